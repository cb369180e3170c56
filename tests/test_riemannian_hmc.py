"""Riemannian HMC for a latent Gaussian: metric, integrator, transition, all without PyMC.

The tests of invariance move exact draws by tens of transitions of a frozen step and compare them
with exact draws again. Each p-value has null probability 1e-6 of falling below the bound.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from pymc_kameleon.latent_gp import riemannian_trajectory
from pymc_kameleon.latent_gp.gaussian.sites import Sites, factorised
from pymc_kameleon.latent_gp.riemannian_metric import (
    LocalGeometry,
    Metric,
    default_soft_floor,
    soft_absolute,
)
from pymc_kameleon.latent_gp.riemannian_trajectory import (
    RETURN_TOLERANCE,
    Diverged,
    DualAveraging,
    IntegrationError,
    NotConverged,
    NotReversible,
    RiemannianSettings,
    RiemannianState,
    leapfrog_step,
    transition,
)
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget, annealed_from_prior_form
from tests.latent_likelihoods import Logit, Normal, Poisson, Probit, StudentT, squared_exponential

pytestmark = pytest.mark.numerics

BOUND = 1e-6
LOG_CONCAVE = ("probit", "logit", "poisson")


def likelihood(name, f, rng):
    """Data drawn around the latent function `f`."""
    signs = np.where(rng.random(len(f)) < 1 / (1 + np.exp(-f)), 1.0, -1.0)
    return {
        "probit": lambda: Probit(signs),
        "logit": lambda: Logit(signs),
        "poisson": lambda: Poisson(rng.poisson(np.exp(f))),
        "student_t": lambda: StudentT(f + 0.5 * rng.standard_t(4, len(f)), 4.0, 0.5),
    }[name]()


def problem(name, n=30, beta=1.0, with_sites=False, seed=1):
    """A target, a latent function of its prior, and the soft floor that it needs."""
    rng = np.random.default_rng(seed)
    prior = squared_exponential(4 * rng.random((n, 2)), 1.0, 2.0)
    prior = replace(prior, mean=0.3 * rng.standard_normal(n))
    f = prior.draw(rng)
    found = likelihood(name, f, rng)
    if with_sites:
        sites = Sites(2 * rng.random(n), rng.standard_normal(n))
        target = annealed_from_prior_form(prior, found, sites, beta)
    else:
        target = TemperedTarget(prior, found, beta)
    return target, f, 0.0 if name in LOG_CONCAVE else default_soft_floor(target)


def dense_metric(geometry):
    return np.diag(geometry.curvature) + np.linalg.inv(geometry.target.base.covariance)


def slope(function, x, step):
    """Central differences of fourth order, one coordinate after the other."""
    columns = []
    for direction in step * np.eye(len(x)):
        near = function(x + direction) - function(x - direction)
        far = function(x + 2 * direction) - function(x - 2 * direction)
        columns.append((8 * near - far) / (12 * step))
    return np.stack(columns, axis=-1)


CASES = pytest.mark.parametrize(
    ("name", "beta", "with_sites"),
    [
        ("probit", 1.0, False),
        ("logit", 0.3, True),
        ("poisson", 0.3, False),
        ("student_t", 0.3, True),
        ("student_t", 1.0, False),
    ],
)


@CASES
def test_geometry_is_that_of_the_dense_matrices(name, beta, with_sites):
    target, f, floor = problem(name, 12, beta, with_sites)
    geometry = LocalGeometry(target, f, floor)
    dense = dense_metric(geometry)
    inverse = np.linalg.inv(dense)
    curvature = -beta * target.likelihood.terms(f)[2]
    if name in LOG_CONCAVE:
        np.testing.assert_array_equal(geometry.curvature, curvature)
    else:
        np.testing.assert_allclose(geometry.curvature, curvature / np.tanh(curvature / floor))
    metric = geometry.metric
    p = np.random.default_rng(2).standard_normal(12)
    np.testing.assert_allclose(metric.velocity(p), inverse @ p, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(metric.leverage, geometry.curvature * np.diag(inverse), atol=1e-10)
    np.testing.assert_allclose(metric.log_determinant, np.linalg.slogdet(dense)[1], rtol=1e-9)
    log_density = target.base.log_density(f) + target.log_ratio(f)
    np.testing.assert_allclose(geometry.log_density, log_density)
    of_momentum = 0.5 * (p @ inverse @ p + np.linalg.slogdet(dense)[1])
    np.testing.assert_allclose(geometry.energy(p), of_momentum - log_density, rtol=1e-9)
    score = target.base.score(f) + target.log_ratio_terms(f)[1]
    np.testing.assert_allclose(geometry.score, score, rtol=1e-9, atol=1e-9)


@CASES
def test_gradients_agree_with_finite_differences(name, beta, with_sites):
    target, f, floor = problem(name, 8, beta, with_sites)
    geometry = LocalGeometry(target, f, floor)
    momentum = geometry.draw_momentum(np.random.default_rng(3))

    def curvature(x):
        return LocalGeometry(target, x, floor).curvature

    def log_determinant(x):
        return LocalGeometry(target, x, floor).metric.log_determinant

    def energy(x):
        return LocalGeometry(target, x, floor).energy(momentum)

    # The energy moves by the inverse of the smallest eigenvalue of A in one direction.
    found = np.diag(geometry.curvature_slope)
    np.testing.assert_allclose(slope(curvature, f, 1e-3), found, rtol=1e-7, atol=1e-8)
    found = geometry.metric.log_determinant_gradient(geometry.curvature_slope)
    np.testing.assert_allclose(slope(log_determinant, f, 1e-3), found, rtol=1e-7, atol=1e-8)
    found = geometry.energy_gradient(geometry.metric.velocity(momentum))
    np.testing.assert_allclose(slope(energy, f, 1e-3), found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_sites", [False, True])
def test_covariance_of_the_momentum_is_the_metric(with_sites):
    target, f, _ = problem("probit", 10, 0.3, with_sites)
    geometry = LocalGeometry(target, f)
    units = np.eye(20).reshape(20, 2, 10)
    linear = np.stack([geometry.metric.momentum(noise) for noise in units], axis=1)
    dense = dense_metric(geometry)
    np.testing.assert_allclose(linear @ linear.T, dense, rtol=1e-9, atol=1e-9 * dense.max())
    drawn = geometry.draw_momentum(np.random.default_rng(5))
    noise = np.random.default_rng(5).standard_normal((2, 10))
    np.testing.assert_array_equal(drawn, geometry.metric.momentum(noise))


def test_sites_that_tell_nothing_or_nearly_nothing_do_no_harm():
    base = problem("probit", 5)[0].base
    curvature = np.array([0.0, 1e-300, 1e-40, 1e-12, 2.0])
    metric = Metric(base, curvature)
    dense = np.diag(curvature) + np.linalg.inv(base.covariance)
    expected = np.diag(np.linalg.inv(dense))
    found = metric.log_determinant_gradient(3.0 * curvature)
    np.testing.assert_allclose(found, 3.0 * curvature * expected, rtol=1e-9, atol=1e-15)


def test_soft_absolute_is_smooth_and_leaves_large_values_alone():
    floor = 0.3
    u = np.concatenate([np.linspace(-4, 4, 97), floor * np.array([0, 9e-4, 1.1e-3, -9e-4, 1e-9])])
    value, derivative = soft_absolute(u, floor)
    expected = np.full_like(u, floor)
    np.divide(u, np.tanh(u / floor), out=expected, where=u != 0)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    assert value.min() >= floor
    step = 1e-4
    differences = (soft_absolute(u + step, floor)[0] - soft_absolute(u - step, floor)[0]) / 2e-4
    np.testing.assert_allclose(derivative, differences, atol=1e-7)
    value, derivative = soft_absolute(np.array([9 * floor, 1e6, -1e6]), floor)
    np.testing.assert_allclose(value, [9 * floor, 1e6, 1e6], rtol=1e-7)
    np.testing.assert_allclose(derivative, [1, 1, -1], rtol=1e-6)


def test_a_likelihood_that_is_not_log_concave_needs_a_floor():
    target, f, floor = problem("student_t")
    with pytest.raises(FloatingPointError, match=r"element \d+, so it is not log-concave"):
        LocalGeometry(target, f)
    assert 1.0 < floor <= 5.0
    half = default_soft_floor(replace(target, scale=0.5))
    np.testing.assert_allclose(half, 0.5 * floor)
    assert LocalGeometry(target, f, floor).curvature.min() >= floor


def starts(name, count, seed=7):
    target, f, floor = problem(name)
    rng = np.random.default_rng(seed)
    for _ in range(count):
        geometry = LocalGeometry(target, f + 0.1 * target.base.draw(rng), floor)
        yield geometry, geometry.draw_momentum(rng)


@pytest.mark.parametrize(
    ("name", "step_size"),
    [("probit", 0.8), ("logit", 0.5), ("poisson", 0.1), ("poisson", 0.8), ("student_t", 0.3)],
)
def test_each_implicit_sub_step_returns(name, step_size, monkeypatch):
    """The equations are checked by dense algebra, the way back by the same solver."""
    calls = []

    def spied(solve, is_position):
        def solve_and_keep(geometry, momentum, *rest):
            found = solve(geometry, momentum, *rest)
            calls.append((is_position, geometry, momentum, rest, found[0]))
            return found

        return solve_and_keep

    for solver, is_position in (("_solve_momentum", False), ("_solve_position", True)):
        wrapped = spied(getattr(riemannian_trajectory, solver), is_position)
        monkeypatch.setattr(riemannian_trajectory, solver, wrapped)
    made = 0
    for geometry, momentum in starts(name, 12):
        calls.clear()
        try:
            there, end, _ = leapfrog_step(geometry, momentum, step_size)
        except IntegrationError:
            continue
        made += 1
        (_, _, _, _, middle), (_, _, _, _, position), (_, _, _, _, start), *_ = calls
        np.testing.assert_array_equal(position, there.position)
        assert np.abs(start - geometry.position).max() <= RETURN_TOLERANCE
        # Relative to what the sub-step changes: a momentum may be as large as A^-1 makes it.
        first, last = np.abs(momentum - middle).max(), np.abs(end - middle).max()
        assert np.abs(calls[3][4] - middle).max() <= RETURN_TOLERANCE * max(1.0, last)
        velocity = np.linalg.solve(dense_metric(geometry), middle)
        there_velocity = np.linalg.solve(dense_metric(there), middle)
        residual = middle + 0.5 * step_size * geometry.energy_gradient(velocity) - momentum
        assert np.abs(residual).max() <= RETURN_TOLERANCE * max(1.0, first)
        residual = position - geometry.position - 0.5 * step_size * (velocity + there_velocity)
        assert np.abs(residual).max() <= RETURN_TOLERANCE
    assert made >= (12 if step_size < 0.5 else 6)


@pytest.mark.parametrize("solver", ["_solve_momentum", "_solve_position"])
def test_a_way_back_to_somewhere_else_is_refused(solver, monkeypatch):
    """An equation with two solutions, of which the way back finds the other."""
    solve = getattr(riemannian_trajectory, solver)

    def other_solution_on_the_way_back(geometry, momentum, *rest):
        found, *more = solve(geometry, momentum, *rest)
        is_back = min(number for number in rest if np.ndim(number) == 0 and number is not None) < 0
        return (found + 1e-3 * is_back, *more)

    monkeypatch.setattr(riemannian_trajectory, solver, other_solution_on_the_way_back)
    for start in starts("logit", 2):
        with pytest.raises(NotReversible):
            leapfrog_step(*start, 0.3)


def test_newton_and_plain_iterations_have_the_same_solution():
    for geometry, momentum in starts("poisson", 3):
        solved, _, n_solved = leapfrog_step(geometry, momentum, 0.3)
        plain, _, n_plain = leapfrog_step(geometry, momentum, 0.3, 80)
        np.testing.assert_allclose(plain.position, solved.position, atol=1e-8)
        assert n_solved < 20
        assert n_plain == 160


@pytest.mark.parametrize("name", ["probit", "poisson", "student_t"])
def test_volume_is_preserved(name):
    target, f, floor = problem(name, 3)
    geometry = LocalGeometry(target, f, floor)
    momentum = geometry.draw_momentum(np.random.default_rng(8))

    def step(both):
        there, p, _ = leapfrog_step(LocalGeometry(target, both[:3], floor), both[3:], 0.3)
        return np.concatenate([there.position, p])

    jacobian = slope(step, np.concatenate([f, momentum]), 1e-3)
    assert abs(np.abs(np.linalg.det(jacobian)) - 1) < 1e-6
    assert np.abs(jacobian - np.eye(6)).max() > 0.05


@pytest.mark.parametrize("name", ["poisson", "student_t"])
def test_energy_error_falls_with_the_square_of_the_step(name):
    errors = []
    for n_steps in (8, 16, 32):
        total = 0.0
        for geometry, momentum in starts(name, 6):
            before = geometry.energy(momentum)
            for _ in range(n_steps):
                geometry, momentum, _ = leapfrog_step(geometry, momentum, 0.8 / n_steps)
            total += abs(geometry.energy(momentum) - before)
        errors.append(total)
    ratios = np.array(errors[:-1]) / errors[1:]
    np.testing.assert_allclose(ratios, 4.0, rtol=0.15)


class Cliff(Normal):
    """A likelihood that is not finite from 1.5 on."""

    def terms(self, f):
        return np.where(f > 1.5, np.inf, super().terms(f))


def test_failures_are_told_apart(monkeypatch):
    base = factorised(np.zeros(1), np.eye(1))
    geometry = LocalGeometry(TemperedTarget(base, Cliff(np.zeros(1), 1.0)), np.ones(1))
    with pytest.raises(NotConverged):
        leapfrog_step(geometry, np.array([9.0]), 1.0)
    with pytest.raises(Diverged):
        leapfrog_step(geometry, np.array([9.0]), 1.0, 5)
    seen = set()
    for start in starts("poisson", 20):
        try:
            leapfrog_step(*start, 2.0)
        except IntegrationError as error:
            seen.add(type(error))
            assert error.n_fixed_point > 0
    assert NotReversible in seen
    monkeypatch.setattr(riemannian_trajectory, "MAX_ITERATIONS", 2)
    for start in starts("poisson", 2):
        with pytest.raises(NotConverged):
            leapfrog_step(*start, 0.5)


@pytest.mark.parametrize("failure", [NotConverged, NotReversible, Diverged])
def test_a_failure_is_a_rejection_that_is_counted(failure, monkeypatch):
    def fail(*_):
        raise failure(7)

    target, f, _ = problem("probit")
    monkeypatch.setattr(riemannian_trajectory, "leapfrog_step", fail)
    state, outcome = transition(
        target, RiemannianState(f), RiemannianSettings(), np.random.default_rng(9)
    )
    np.testing.assert_array_equal(state.position, f)
    assert not outcome.accepted
    assert outcome.acceptance == 0.0
    assert (outcome.n_leapfrog, outcome.n_fixed_point) == (1, 7)
    assert np.isfinite(outcome.energy)
    flags = (outcome.not_converged, outcome.not_reversible, outcome.diverging)
    assert flags == tuple(
        float(failure is kind) for kind in (NotConverged, NotReversible, Diverged)
    )


def test_bad_settings_and_targets_are_refused():
    for options in ({"step_size": 0.0}, {"n_steps": 0}, {"n_fixed_point": 0}, {"soft_floor": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            RiemannianSettings(**options)
    target, f, _ = problem("probit")
    tilted = TemperedTarget(target.base, target.likelihood, 0.5, Sites.flat(30))
    with pytest.raises(ValueError, match="annealed_from_prior_form"):
        LocalGeometry(tilted, f)
    with pytest.raises(FloatingPointError, match="not finite"):
        LocalGeometry(target, np.full(30, np.nan))


def test_nothing_is_evaluated_twice():
    target, f, _ = problem("probit")
    rng, settings = np.random.default_rng(10), RiemannianSettings(1e-3, n_steps=1)
    state, outcome = transition(target, RiemannianState(f), settings, rng)
    assert outcome.accepted
    target.likelihood.n_calls = 0
    again, _ = transition(target, state, settings, rng)
    made = target.likelihood.n_calls
    again = RiemannianState(again.position.copy(), again.geometry)
    state, _ = transition(replace(target), again, settings, rng)
    assert target.likelihood.n_calls == 2 * made
    other = replace(target, base=factorised(target.base.mean, 2 * target.base.covariance))
    target.likelihood.n_calls = 0
    moved, _ = transition(other, state, settings, rng)
    assert target.likelihood.n_calls == made + 1
    assert moved.geometry.target is other
    elsewhere = RiemannianState(moved.position + 0.1, moved.geometry)
    for changed, start in ((replace(other, scale=0.5), moved), (other, elsewhere)):
        target.likelihood.n_calls = 0
        transition(changed, start, settings, rng)
        assert target.likelihood.n_calls == made + 1


def test_a_position_iteration_makes_no_inverse_factor(monkeypatch):
    made, right = [], Metric.inverse_root
    monkeypatch.setattr(Metric, "inverse_root", lambda metric: (made.append(1), right(metric))[1])
    target, f, _ = problem("probit")
    settings = RiemannianSettings(0.3, n_steps=4, random_length=False)
    transition(target, RiemannianState(f), settings, np.random.default_rng(11))
    assert len(made) == 5


def test_length_is_uniform_or_as_in_the_paper():
    target, f, _ = problem("probit", 2)
    rng, state = np.random.default_rng(12), RiemannianState(f)
    lengths = [
        transition(target, state, RiemannianSettings(0.1, 4), rng)[1].n_leapfrog for _ in range(80)
    ]
    assert set(lengths) == {1, 2, 3, 4}
    outcome = transition(target, state, RiemannianSettings(0.1, 10, 5, False), rng)[1]
    assert (outcome.n_leapfrog, outcome.n_fixed_point) == (10, 10.0)


@pytest.mark.parametrize("initial", [0.02, 3.0])
def test_dual_averaging_reaches_the_target_acceptance(initial):
    target, f, _ = problem("logit")
    rng, state = np.random.default_rng(13), RiemannianState(f)
    adaptation, settings = DualAveraging(initial), RiemannianSettings(n_steps=3)
    for _ in range(250):
        settings = replace(settings, step_size=adaptation.step_size)
        state, outcome = transition(target, state, settings, rng)
        adaptation.update(outcome.acceptance)
    settings = replace(settings, step_size=adaptation.learnt)
    acceptance = 0.0
    for _ in range(200):
        state, outcome = transition(target, state, settings, rng)
        acceptance += outcome.acceptance / 200
    assert 0.7 < acceptance < 0.93


def exact_draws(target, count, rng):
    """Draws by rejection from the Gaussian, for likelihoods with a largest value."""
    kept, base = np.zeros((0, target.base.mean.size)), target.base
    largest = float(target.likelihood.upper_bound)
    while len(kept) < count:
        drawn = base.mean + rng.standard_normal((2000, base.mean.size)) @ base.cholesky.T
        values = target.likelihood.elementwise(drawn).sum(axis=1)
        is_kept = np.log(rng.random(len(drawn))) < target.scale * (values - largest)
        kept = np.concatenate([kept, drawn[is_kept]])
    return kept[:count]


def move(target, draws, settings, n_transitions, seed):
    rng, moved, accepted = np.random.default_rng(seed), np.empty_like(draws), 0
    for i, draw in enumerate(draws):
        state = RiemannianState(draw)
        for _ in range(n_transitions):
            state, outcome = transition(target, state, settings, rng)
            accepted += outcome.accepted
        moved[i] = state.position
    return moved, accepted / (len(draws) * n_transitions)


def p_values(moved, reference):
    """Kolmogorov-Smirnov p-values of the marginals, the first product and the sum."""
    statistics = [lambda x, j=j: x[:, j] for j in range(moved.shape[1])]
    statistics += [lambda x: x[:, 0] * x[:, -1], lambda x: x.sum(axis=1)]
    return [stats.ks_2samp(s(moved), s(reference)).pvalue for s in statistics]


def small_target(name, beta=1.0):
    prior = squared_exponential(np.array([[0.0], [0.7]]), 1.0, 3.0)
    if name == "poisson":
        found = Poisson([0.0, 1.0])
        found.upper_bound = -1.0
    else:
        found = StudentT([-1.0, 1.5], 3.0, 0.6)
        found.upper_bound = found.value(found.y)
    target = TemperedTarget(prior, found, beta)
    return target, 0.4 * default_soft_floor(target) if name == "student_t" else 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "beta", "step_size"),
    [("poisson", 0.3, 0.9), ("student_t", 1.0, 0.5)],
)
def test_exact_draws_stay_exact(name, beta, step_size):
    target, floor = small_target(name, beta)
    rng = np.random.default_rng(14)
    settings = RiemannianSettings(step_size, n_steps=3, soft_floor=floor)
    moved, accepted = move(target, exact_draws(target, 180, rng), settings, 10, 15)
    assert 0.3 < accepted < 0.97
    assert min(p_values(moved, exact_draws(target, 10_000, rng))) > BOUND


@pytest.mark.slow
@pytest.mark.sabotage
def test_a_wrong_energy_is_caught(monkeypatch):
    """The determinant left out of the acceptance, the integrator right."""
    right = LocalGeometry.energy

    def without_determinant(self, momentum):
        return right(self, momentum) - 0.5 * self.metric.log_determinant

    target, _ = small_target("poisson")
    rng = np.random.default_rng(16)
    draws, reference = exact_draws(target, 250, rng), exact_draws(target, 10_000, rng)
    monkeypatch.setattr(LocalGeometry, "energy", without_determinant)
    moved, _ = move(target, draws, RiemannianSettings(0.5, n_steps=3), 10, 17)
    assert min(p_values(moved, reference)) < BOUND
