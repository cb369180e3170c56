"""Log evidence by annealed importance sampling and parallel tempering, and what it is made of.

Estimates are compared with exact values in their own standard errors: 4 of them have a null
probability of 6e-5 where the errors are Gaussian, and seeds are fixed.
"""

import functools
import warnings

import matplotlib
import numpy as np
import pytest
from latent_data import crabs, glass
from latent_likelihoods import ClosedForm, Normal, Probit, StudentT, squared_exponential
from scipy import stats
from scipy.integrate import dblquad

from pymc_kameleon._compat import pareto_k
from pymc_kameleon.evidence.estimates import (
    Estimate,
    importance_sampling,
    stepping_stones,
    thermodynamic_integration,
)
from pymc_kameleon.latent_gp.annealing import (
    TARGET_ACCEPTANCE,
    TRANSITIONS,
    AnnealingPath,
    Move,
    TemperedTransition,
    anneal,
    learn_ladder,
)
from pymc_kameleon.latent_gp.gaussian.sites import Sites, factorised, with_sites
from pymc_kameleon.latent_gp.gaussian_approximations import (
    expectation_propagation_approximation,
)
from pymc_kameleon.latent_gp.latent_evidence import estimate_log_evidence
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget, elliptical_slice, hamiltonian
from pymc_kameleon.plots import plot_evidence

pytestmark = pytest.mark.numerics

matplotlib.use("Agg")

BOUND = 1e-6
estimate = functools.partial(estimate_log_evidence, progressbar=False)


def gaussian_problem(n=6, sd=0.7):
    """Prior, Gaussian likelihood, wrong sites, and the exact log evidence."""
    rng = np.random.default_rng(3)
    inputs = rng.uniform(-2, 2, (n, 1))
    bare = squared_exponential(inputs, 1.0, 1.3)
    prior = factorised(np.linspace(-0.5, 0.8, n), bare.covariance)
    y = prior.draw(rng) + sd * rng.standard_normal(n)
    exact = factorised(prior.mean, prior.covariance + sd**2 * np.eye(n)).log_density(y)
    wrong = Sites(np.linspace(0.5, 3.0, n), np.linspace(0.5, 3.0, n) * (y + 0.3))
    return prior, Normal(y, sd), wrong, exact


class Positive(ClosedForm):
    """Probability 1 above 0 and 0 below."""

    def terms(self, f):
        values = np.where(f > 0, 0.0, -np.inf)
        return np.stack([values, *np.zeros((3, self.size))])


class Constant(ClosedForm):
    """Says nothing where `y` is 0, and is impossible where it is infinite."""

    def terms(self, f):
        return np.stack([-self.y, *np.zeros((3, self.size))])


@pytest.mark.parametrize("likelihood", [Normal, Positive, Constant], ids=lambda c: c.__name__)
@pytest.mark.parametrize("n_temperatures", [2, 50])
def test_a_ladder_climbs_from_0_to_1(likelihood, n_temperatures):
    prior, normal, _, _ = gaussian_problem()
    wanted = {Normal: [normal], Positive: [Positive(np.zeros(prior.size))]}.get(
        likelihood, [Constant(np.full(prior.size, y)) for y in (0.0, np.inf)]
    )
    for found in wanted:
        path = AnnealingPath(prior, found, Sites.flat(prior.size))
        rng = np.random.default_rng(1)
        betas, steps = learn_ladder(path, n_temperatures, TRANSITIONS["hmc"], rng)
        assert len(betas) == len(steps) == n_temperatures
        assert (betas[0], betas[-1]) == (0.0, 1.0)
        assert np.all(np.diff(betas) > 0)
        assert np.isnan(steps[0]) and np.all(steps[1:] > 0)
        steps = learn_ladder(path, n_temperatures, TRANSITIONS["slice"], rng)[1]
        assert np.all(np.isnan(steps))


def test_neighbours_of_a_learnt_ladder_reject_equally_often():
    prior, likelihood, _, _ = gaussian_problem(sd=0.3)
    options = {"n_temperatures": 9, "n_particles": 2, "draws": 400, "tune": 50}
    found = estimate(prior, likelihood, method="tempering", random_seed=2, **options)
    rejection = 1.0 - found.report.swap_acceptance
    assert rejection.max() < 2 * rejection.min()
    # Of temperatures in equal steps, the first alone would hold most of the barrier.
    barrier = np.append(0.0, np.cumsum(rejection))
    assert np.interp(1 / 8, found.report.betas, barrier) > 3 * barrier[-1] / 8


def test_sums_of_weights_do_not_overflow():
    found = importance_sampling(np.log([1.0, 2.0, 3.0]) + 1000.0)
    exact = 1000.0 + np.log(2.0), 1.0 / np.sqrt(3) / 2.0, 36.0 / 14.0
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    assert importance_sampling(np.full(3, -np.inf)) == (-np.inf, np.inf, 0.0)
    assert importance_sampling(np.zeros(1)).standard_error == np.inf


def test_pareto_k_of_a_known_tail():
    rng = np.random.default_rng(3)
    for shape in (0.3, 0.9):
        # 135 weights in the tail tell k with a standard deviation of (1 + k) / sqrt(135); four of
        # them: null probability 6e-5.
        found = pareto_k(100.0 + np.log(1.0 + rng.pareto(1.0 / shape, 2000)))
        assert abs(found - shape) < 4 * (1 + shape) / np.sqrt(135)
    log_weights = rng.standard_normal(64)
    log_weights[:10] = -np.inf
    assert np.isfinite(pareto_k(log_weights))
    for nothing_to_fit in (np.zeros(64), np.full(64, -np.inf), np.zeros(3), np.full(64, np.nan)):
        assert np.isnan(pareto_k(nothing_to_fit))


def stay(path, beta):
    """Leave every temperature invariant, and go nowhere."""
    return lambda x, log_ratio, step_size, rng: Move(x, log_ratio, 1.0, 0)


@pytest.mark.filterwarnings("ignore:The 64 weights")
def test_weights_of_still_particles_are_importance_weights():
    prior, likelihood, wrong, _ = gaussian_problem()
    found = estimate(
        prior, likelihood, sites=wrong, transition=TemperedTransition(stay), random_seed=1
    )
    base, _ = with_sites(prior, wrong)
    exact = [prior.log_density(x) + likelihood.value(x) - base.log_density(x) for x in found.draws]
    np.testing.assert_allclose(found.log_weights, exact, rtol=1e-10)


def test_log_ratios_are_those_that_each_temperature_saw():
    """Weights telescope over them."""
    prior, likelihood, wrong, _ = gaussian_problem()
    path, seen = AnnealingPath(prior, likelihood, wrong), []

    def recording(path, beta):
        move = TRANSITIONS["slice"].at(path, beta)

        def recorded(x, *arguments):
            seen.append(x.copy())
            return move(x, *arguments)

        return recorded

    betas = np.linspace(0, 1, 12)
    generators, no_steps = [np.random.default_rng(2)], np.full(12, np.nan)
    run = anneal(path, betas, TemperedTransition(recording), no_steps, generators)
    exact = [path.tempered(1.0).log_ratio(x) for x in [*seen, run.draws[0]]]
    np.testing.assert_allclose(run.log_ratios[0], exact, rtol=1e-10)


def test_both_forms_of_a_temperature_are_one_density():
    prior, likelihood, wrong, _ = gaussian_problem()
    path = AnnealingPath(prior, likelihood, wrong)
    points = np.random.default_rng(5).standard_normal((4, prior.size))
    for beta in (0.2, 1.0):
        one, other = path.tempered(beta), path.tempered_in_prior_form(beta)
        logs = [[r.base.log_density(x) + r.log_ratio(x) for x in points] for r in (one, other)]
        np.testing.assert_allclose(np.diff(logs[0]), np.diff(logs[1]), rtol=1e-8)


class AlwaysAccepting:
    """A generator whose uniform numbers are 0."""

    def __init__(self, rng):
        self.standard_normal, self.integers = rng.standard_normal, rng.integers

    def random(self):
        return 0.0


def slice_move(target, x, rng, mistake=0.0, **options):
    return elliptical_slice(target, x, target.log_ratio(x) - mistake, rng, **options)[0]


def hamiltonian_move(target, x, rng, mistake=0.0, **options):
    rng = AlwaysAccepting(rng) if mistake else rng
    return hamiltonian(target, x, rng, n_steps=4, **options)[0]


MOVES = {
    "slice": (slice_move, {}, 3.0),
    "slice that gives up": (slice_move, {"most_evaluations": 2}, 3.0),
    "hamiltonian": (hamiltonian_move, {"step_size": 0.7}, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
def test_transitions_leave_the_posterior_invariant(name):
    """Exact draws stay exact; a wrong acceptance ratio shows."""
    move, options, mistake = MOVES[name]
    rng = np.random.default_rng(11)
    n = 4
    bare = squared_exponential(np.linspace(-2, 2, n)[:, None], 1.0, 1.2, jitter=0.05)
    prior = factorised(np.linspace(-0.5, 0.8, n), bare.covariance)
    likelihood = Normal(np.array([0.5, -1.0, 2.0, 0.3]), 0.6)
    exact, _ = with_sites(prior, Sites(np.full(n, 1 / 0.36), likelihood.y / 0.36))
    sites = Sites(np.linspace(0.2, 1.0, n), np.linspace(-1.0, 0.5, n))
    target = TemperedTarget(with_sites(prior, sites)[0], likelihood, 1.0, sites)

    def smallest_p(mistake):
        moved = np.array([exact.draw(rng) for _ in range(1000)])
        for i in range(len(moved)):
            for _ in range(6):
                moved[i] = move(target, moved[i], rng, mistake, **options)
        v = np.linalg.solve(exact.cholesky, (moved - exact.mean).T)
        p = [stats.kstest(row, "norm").pvalue for row in v]
        return min(*p, stats.kstest((v**2).sum(axis=0), stats.chi2(n).cdf).pvalue)

    assert smallest_p(0.0) > BOUND
    assert smallest_p(mistake) < BOUND


def test_elliptical_slice_returns_the_log_ratio_where_it_is():
    prior, likelihood, wrong, _ = gaussian_problem()
    target = AnnealingPath(prior, likelihood, wrong).tempered(0.6)
    rng = np.random.default_rng(4)
    x = target.base.draw(rng)
    calls = likelihood.n_calls
    moved, value, n_evaluations = elliptical_slice(target, x, target.log_ratio(x), rng)
    assert likelihood.n_calls - calls == n_evaluations + 1
    np.testing.assert_allclose(value, target.log_ratio(moved), rtol=1e-12)
    stayed, value, _ = elliptical_slice(target, x, np.inf, rng)
    assert stayed is x
    assert value == np.inf


def test_hamiltonian_rejects_what_is_not_finite():
    class Nowhere(Normal):
        def terms(self, f):
            return np.full((4, self.size), np.nan)

    prior, likelihood, _, _ = gaussian_problem()
    target = TemperedTarget(prior, Nowhere(likelihood.y, 1.0))
    x = prior.mean
    moved, acceptance, _ = hamiltonian(target, x, np.random.default_rng(1), 0.1, 5)
    assert moved is x
    assert acceptance == 0.0


@pytest.mark.parametrize("name", [name for name in TRANSITIONS if name != "slice"])
def test_the_pilot_pass_finds_steps_that_are_accepted_as_wanted(name):
    prior, likelihood, _, _ = gaussian_problem(n=10, sd=0.3)
    options = {"n_temperatures": 60, "n_particles": 16, "random_seed": 8}
    found = estimate(prior, likelihood, transition=name, **options)
    acceptance = found.report.acceptance[1:]
    assert abs(acceptance.mean() - TARGET_ACCEPTANCE) < 0.1
    steps = found.report.step_sizes
    assert np.isnan(steps[0])
    if name == "hmc":
        # The metric of the other one follows the temperatures, and its step size need not.
        assert steps[-1] < steps[1]


def value_of(found):
    return found.log_evidence if isinstance(found, Estimate) else found.log_marginal_likelihood


def assert_near(found, exact, n_errors=4.0, exact_error=0.0):
    error = np.hypot(found.standard_error, exact_error)
    assert abs(value_of(found) - exact) < n_errors * error, found


@pytest.mark.parametrize(
    ("transition", "start"),
    [("slice", "prior"), ("slice", "sites"), ("hmc", "sites"), ("rmhmc", "prior")],
)
def test_annealing_finds_the_exact_evidence(transition, start):
    prior, likelihood, wrong, exact = gaussian_problem()
    sites = wrong if start == "sites" else None
    options = {"n_temperatures": 40}
    if start == "prior" and transition == "slice":
        # A slice about a prior that is much wider than the posterior makes small moves.
        options = {"n_temperatures": 80, "n_moves": 5}
    if transition == "rmhmc":
        options["n_particles"] = 24
    found = estimate(
        prior, likelihood, sites=sites, transition=transition, random_seed=1, **options
    )
    assert_near(found, exact)
    assert found.standard_error < 0.3


@pytest.mark.parametrize("start", ["prior", "wrong sites"])
def test_tempering_finds_the_exact_evidence_and_posterior(start):
    prior, likelihood, wrong, exact = gaussian_problem()
    options = {"n_temperatures": 10, "n_particles": 2, "draws": 400, "tune": 50}
    options |= {"sites": wrong if start == "wrong sites" else None, "random_seed": 2}
    found = estimate(prior, likelihood, method="tempering", **options)
    assert_near(found, exact)
    assert found.standard_error < 0.25
    report = found.report
    assert found.log_marginal_likelihood == report.stepping_stones.log_evidence
    assert_near(report.thermodynamic_integration, exact)
    assert found.draws.shape == (800, prior.size)
    precision = np.full(prior.size, likelihood.sd**-2)
    posterior, _ = with_sites(prior, Sites(precision, precision * likelihood.y))
    sd = np.sqrt(np.diagonal(posterior.covariance))
    # 5 standard errors of a mean, were one draw in twenty independent.
    assert np.all(abs(found.draws.mean(axis=0) - posterior.mean) < 5 * sd / np.sqrt(40))
    chosen = "thermodynamic_integration"
    options |= {"n_temperatures": 5, "draws": 40, "estimator": chosen}
    found = estimate(prior, likelihood, method="tempering", **options)
    assert found.log_marginal_likelihood == found.report.thermodynamic_integration.log_evidence


CHEAP = {
    "ais": {"n_temperatures": 20, "n_particles": 40},
    "tempering": {"method": "tempering", "n_temperatures": 5, "n_particles": 2, "draws": 150},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CHEAP)
def test_standard_errors_are_those_of_repeated_runs(method):
    """Sum of 30 squared z-scores within chi-square bounds of null probability 1e-4 a side."""
    prior, likelihood, wrong, exact = gaussian_problem()
    options = CHEAP[method] | ({"n_temperatures": 40, "n_moves": 2} if method == "ais" else {})
    runs = [
        estimate(prior, likelihood, sites=wrong, tune=10, random_seed=seed, **options)
        for seed in range(30)
    ]
    candidates = [runs]
    if method == "tempering":
        candidates.append([run.report.thermodynamic_integration for run in runs])
    for found in candidates:
        z = np.array([(value_of(run) - exact) / run.standard_error for run in found])
        low, high = stats.chi2(30).ppf([1e-4, 1 - 1e-4])
        assert low < (z**2).sum() < high
        assert abs(z.mean()) < 4 / np.sqrt(30)


def test_estimates_from_temperatures_of_a_known_path():
    """For log ratios N(m + v beta, v) log Z = m + v / 2; the corrected trapezoid rule is exact."""
    rng = np.random.default_rng(6)
    betas = np.linspace(0, 1, 4)
    mean, variance = -3.0, 2.0
    log_ratios = mean + variance * betas + np.sqrt(variance) * rng.standard_normal((4, 2000, 4))
    for found in (stepping_stones(betas, log_ratios), thermodynamic_integration(betas, log_ratios)):
        assert_near(found, mean + variance / 2)
        assert 0.005 < found.standard_error < 0.03


@pytest.mark.slow
def test_a_likelihood_that_is_not_log_concave_agrees_with_quadrature():
    """Of N = 2; that it is not is found out."""
    prior = factorised(np.array([0.3, -0.4]), np.array([[1.5, 0.9], [0.9, 1.2]]))
    likelihood = StudentT([0.5, -0.7], 3.0, 0.5)

    def density(*f):
        return np.exp(prior.log_density(np.array(f)) + likelihood.value(np.array(f)))

    found = estimate(prior, likelihood, random_seed=9, transition="rmhmc", n_temperatures=12)
    sd = np.sqrt(np.diagonal(prior.covariance))
    bounds = np.stack([prior.mean - 9 * sd, prior.mean + 9 * sd], axis=1).ravel()
    assert_near(found, np.log(dblquad(density, *bounds, epsabs=1e-9)[0]))
    assert found.standard_error < 0.15
    assert found.report.acceptance[1:].min() > 0.3


def test_a_likelihood_may_be_zero_in_places():
    prior = factorised(np.zeros(2), np.array([[1.0, 0.5], [0.5, 1.0]]))
    exact = np.log(1 / 4 + np.arcsin(0.5) / (2 * np.pi))
    found = estimate(prior, Positive(np.zeros(2)), n_temperatures=3, n_particles=400, random_seed=1)
    assert_near(found, exact)
    assert np.any(np.isinf(found.log_weights))
    found = estimate(prior, Positive(np.zeros(2)), random_seed=1, **CHEAP["tempering"])
    assert_near(found, exact)
    assert np.all(found.draws > 0)
    assert np.isnan(found.report.thermodynamic_integration.log_evidence)


@pytest.mark.parametrize("method", CHEAP)
def test_one_seed_is_one_result_on_any_number_of_cores(method):
    prior, likelihood, wrong, _ = gaussian_problem()

    class Local(Normal):
        """Pickled by value alone."""

    options = {"sites": wrong, "transition": "hmc", "random_seed": 12} | CHEAP[method]
    options |= {"n_particles": 3, "draws": 20, "tune": 5}
    one, two = (
        estimate(prior, Local(likelihood.y, likelihood.sd), cores=cores, **options)
        for cores in (1, 2)
    )
    np.testing.assert_array_equal(one.log_weights, two.log_weights)
    np.testing.assert_array_equal(one.draws, two.draws)
    assert one.log_marginal_likelihood == two.log_marginal_likelihood
    other = estimate(prior, likelihood, **options | {"random_seed": 13})
    assert other.log_marginal_likelihood != one.log_marginal_likelihood


def test_an_error_in_a_process_comes_back():
    class Failing(Normal):
        def value(self, f):
            raise ArithmeticError("no such value")

    prior, likelihood, _, _ = gaussian_problem()
    failing = Failing(likelihood.y, 1.0)
    with pytest.raises(ArithmeticError, match="no such value"):
        estimate(prior, failing, cores=2, n_temperatures=3, n_particles=4, random_seed=1)


def test_poor_weights_and_temperatures_that_do_not_swap_are_told():
    n = 40
    prior = squared_exponential(np.linspace(-2, 2, n)[:, None], 0.1, 10.0)
    likelihood = Normal(np.zeros(n), 0.1)
    with pytest.warns(UserWarning, match=r"worth .* particles.*n_temperatures"):
        estimate(prior, likelihood, n_temperatures=4, random_seed=1)
    smooth, *_ = gaussian_problem()
    narrow = Normal(np.zeros(smooth.size), 0.1)
    with pytest.warns(UserWarning, match=r"their tail is heavy \(Pareto k of \d"):
        found = estimate(smooth, narrow, n_temperatures=8, n_particles=100, random_seed=1)
    assert found.report.pareto_k > 0.7
    with pytest.warns(UserWarning, match=r"Temperatures \d and \d .* swap with probability"):
        estimate(prior, likelihood, random_seed=1, **CHEAP["tempering"] | {"draws": 20})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "nested"}, "method='nested': take 'ais' or 'tempering'"),
        ({"transition": "nuts"}, "transition='nuts': take one of 'slice', 'hmc', 'rmhmc'"),
        (
            {"estimator": "bridge"},
            "estimator='bridge': take 'stepping_stones' or 'thermodynamic_integration'",
        ),
        ({"sites": Sites.flat(2)}, "shape"),
        ({"sites": Sites(np.full(6, -1.0), np.zeros(6))}, "negative precision"),
        ({"likelihood": Normal(np.zeros(2), 1.0)}, "2 terms and the prior 6"),
        ({"n_particles": 0}, "n_particles=0"),
        ({"n_temperatures": 1}, "n_temperatures=1: take a whole number of at least 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_told(options, words):
    prior, likelihood, _, _ = gaussian_problem()
    with pytest.raises(ValueError, match=words):
        estimate(prior, **{"likelihood": likelihood} | options)


def test_a_result_can_be_read_and_drawn_from():
    prior, likelihood, wrong, _ = gaussian_problem()
    found = estimate(prior, likelihood, sites=wrong, n_temperatures=10, random_seed=1)
    assert repr(found).startswith(
        f"<MarginalLikelihood: log Z = {found.log_marginal_likelihood:.4f}"
    )
    assert found.report.pareto_k == pareto_k(found.log_weights)
    with pytest.raises(TypeError, match=r"report\['betas'\] is written report.betas"):
        found.report["betas"]
    draws = found.posterior_draws(1)
    assert draws.shape == found.draws.shape
    weights = np.exp(found.log_weights - found.log_weights.max())
    weights /= weights.sum()
    copies = [(draws == draw).all(axis=1).sum() for draw in found.draws]
    assert np.all(abs(copies - len(weights) * weights) < 1)
    tempered = estimate(prior, likelihood, sites=wrong, random_seed=1, **CHEAP["tempering"])
    assert "tempering with slice, 5 temperatures" in repr(tempered)
    assert tempered.posterior_draws() is tempered.draws


def test_the_picture_holds_every_run():
    prior, likelihood, wrong, exact = gaussian_problem()
    runs = [
        estimate(prior, likelihood, sites=wrong, n_temperatures=n, random_seed=1) for n in (5, 10)
    ]
    ax = plot_evidence({"slice": runs, "once": runs[0]}, references={"exact": exact})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(labels) == ["exact", "once", "slice"]
    assert ax.get_xscale() == "log"
    assert plot_evidence({"slice": runs}, ax=ax) is ax
    with pytest.raises(TypeError, match="mapping"):
        plot_evidence(runs)
    with pytest.raises(TypeError, match="float"):
        plot_evidence({"slice": [1.0]})
    with pytest.raises(ValueError, match="empty"):
        plot_evidence({})


REFERENCES = {
    "crabs": (crabs, 1.5, 3.0, -31.256, 0.005),
    "glass": (glass, 1.0, 1.0, -38.084, 0.009),
}
"""Reader, log length-scale, log amplitude, log evidence and its standard error, of independent
code."""


@functools.cache
def data_problem(name):
    reader, log_lengthscale, log_amplitude, reference, error = REFERENCES[name]
    inputs, labels = reader()
    prior = squared_exponential(inputs, np.exp(log_lengthscale), np.exp(log_amplitude))
    likelihood = Probit(labels)
    sites = expectation_propagation_approximation(prior, likelihood).sites
    return prior, likelihood, sites, reference, error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "largest_error"),
    [
        ("crabs", {"n_temperatures": 50}, 0.3),
        ("glass", {"transition": "hmc", "n_temperatures": 25, "n_particles": 32}, 0.3),
        ("crabs", CHEAP["tempering"] | {"draws": 300, "tune": 50}, 0.1),
    ],
)
def test_estimates_from_expectation_propagation_on_data(name, options, largest_error):
    prior, likelihood, sites, reference, error = data_problem(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = estimate(prior, likelihood, sites=sites, random_seed=21, **options)
    assert_near(found, reference, n_errors=3.0, exact_error=error)
    assert found.standard_error < largest_error
