"""A likelihood that is a sum of black boxes: each has a surrogate, and draws are exact."""

import numpy as np
import pymc as pm
import pytest
import surrogates
from models import run

from pymc_kameleon import SurrogateHMCStep, black_box
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.chain.terms_sampler import TermsSampler
from pymc_kameleon.surrogate.fit_terms import (
    Sampled,
    fit_terms,
    moved_particles,
    unfitted_terms,
)
from pymc_kameleon.surrogate.posterior_surrogate import (
    predicted,
    surrogate_gradients,
    surrogate_values,
)
from pymc_kameleon.surrogate.sum_of_surrogates import mean_function_of, terms_at
from pymc_kameleon.surrogate.sum_parts import sum_parts
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = pytest.mark.numerics

BOUND = 1e-6
"""Null probability of each p-value below it."""

MEASURED, SD, BEND, WIDE = np.array([-0.5, 0.8, 1.5]), 0.6, 0.4, 3.0
N_GROUPS = len(MEASURED)


class BentHierarchy:
    """x = (m, a_1, b_1, a_2, b_2, ...), with exact draws.

    m ~ N(0, 1), a_g ~ N(m, 0.5^2), measured with an error, and b_g ~ N(a_g^2, BEND^2): a black box
    says of each group what a Gaussian prior of b_g does not.
    """

    dim = 1 + 2 * N_GROUPS

    def __init__(self, box=None):
        self.box = box or black_box(self.of_group, each=["group", "measured"])

    @staticmethod
    def of_group(group, measured):
        a, b = group
        bent = -0.5 * ((b - a**2) / BEND) ** 2 + 0.5 * (b / WIDE) ** 2
        return -0.5 * ((measured - a) / SD) ** 2 + bent

    def model(self):
        with pm.Model() as model:
            x = pm.Normal("x", 0.0, WIDE, shape=self.dim)
            a = x[1::2]
            hierarchy = pm.logp(pm.Normal.dist(0.0, 1.0), x[0])
            hierarchy += pm.logp(pm.Normal.dist(x[0], 0.5), a).sum()
            replaced = pm.logp(pm.Normal.dist(0.0, WIDE), x[0])
            replaced += pm.logp(pm.Normal.dist(0.0, WIDE), a).sum()
            pm.Potential("hierarchy", hierarchy - replaced)
            pm.Potential("likelihood", self.box(x[1:].reshape((N_GROUPS, 2)), MEASURED))
        return model

    def draw(self, n, rng):
        """Draw m from its marginal posterior, then the groups."""
        variance = SD**2 + 0.25
        precision = 1.0 + N_GROUPS / variance
        m = MEASURED.sum() / variance / precision + rng.standard_normal(n) / np.sqrt(precision)
        within = 1.0 / (1.0 / 0.25 + 1.0 / SD**2)
        mean = within * (m[:, None] / 0.25 + MEASURED / SD**2)
        a = mean + np.sqrt(within) * rng.standard_normal((n, N_GROUPS))
        b = a**2 + BEND * rng.standard_normal((n, N_GROUPS))
        return np.column_stack([m, np.stack([a, b], axis=2).reshape(n, -1)])


STATISTICS = {
    "bend": lambda x: np.sum((x[:, 2::2] - x[:, 1::2] ** 2) ** 2, axis=1),
    "spread": lambda x: np.sum((x[:, 1::2] - x[:, :1]) ** 2, axis=1),
}


def p_values(target, spoil, n=600):
    rng = np.random.default_rng(40)
    step = SurrogateHMCStep(
        model=target.model(), warm_start=target.draw(60, rng), steps_per_draw=30
    )
    step = frozen(step, 41)
    draws, reference = target.draw(n, rng), target.draw(60_000, rng)
    step.step({"x": draws[0]})
    assert isinstance(step.sampler, TermsSampler)
    spoil(step.learner)
    return invariance_p_values(step, draws, reference, STATISTICS), step


def wrong_surrogate(learner):
    """Let the surrogates be far from the terms, with a slope that they do not have."""
    fitted = learner.fitted
    for t in range(N_GROUPS):
        gp = mean_function_of(fitted.terms, t)
        gp.mean.linear[:] += 0.4
        gp.weights[:] *= 0.5


@pytest.mark.slow
def test_exact_draws_stay_exact():
    found, step = p_values(BentHierarchy(), wrong_surrogate)
    assert min(found.values()) > BOUND, found
    assert step.report.acceptance > 0.1
    assert step.learner.difference_share < 0.5  # most moves are trajectories


@pytest.mark.slow
@pytest.mark.sabotage
def test_a_ratio_without_the_surrogate_is_caught(monkeypatch):
    surrogates.leave_out_the_ratio(monkeypatch)
    found, _ = p_values(BentHierarchy(), wrong_surrogate, 300)
    assert min(found.values()) < BOUND, found


@pytest.mark.slow
@pytest.mark.sabotage
def test_a_stale_value_of_one_group_is_caught():
    kept = {}

    def stale(group, measured):
        value = BentHierarchy.of_group(group, measured)
        return kept.setdefault("value", value) if is_stale and measured == MEASURED[0] else value

    def let_it_be_stale(learner):
        nonlocal is_stale
        is_stale = True

    is_stale = False
    target = BentHierarchy(black_box(stale, each=["group", "measured"]))
    found, _ = p_values(target, let_it_be_stale, 400)
    assert min(found.values()) < BOUND, found


# the surrogate ------------------------------------------------------------------------------------


def hierarchy(centred=True, n_groups=5, named=False):
    """Groups of two parameters with a scale that is shared; shapes are by `dims` if not centred."""
    rng = np.random.default_rng(3)
    y = rng.normal(size=(n_groups, 6))

    def of_one(theta, y, s):
        residuals = (y - theta[0] - theta[1] * np.linspace(-1.0, 1.0, 6)) / s
        return -0.5 * residuals @ residuals - 6.0 * np.log(s)

    box = black_box(of_one, each=["theta", "y"])
    with pm.Model(coords={"group": range(n_groups), "of_group": ["a", "b"]}) as model:
        mu, sd = pm.Normal("mu", 0.0, 1.0, shape=2), pm.HalfNormal("sd", 0.7, shape=2)
        s = pm.HalfNormal("s", 1.0)
        if centred:
            theta = pm.Normal("theta", mu, sd, shape=(n_groups, 2))
        else:
            theta = mu + sd * pm.Normal("z", 0.0, 1.0, dims=["group", "of_group"])
            theta = pm.Deterministic("theta", theta) if named else theta
        pm.Potential("likelihood", box(theta, y, s))
    return model


def fitted_sum(model, n=60):
    target = LogDensity(model)
    parts = sum_parts(target)
    points = target.prior_draws(n, 1)
    values = np.empty((n, 3 + len(parts.names)))
    for point, row in zip(points, values, strict=True):
        target.with_terms.into(point, row)
    fitted = fit_terms(points, values[:, 3:], points, unfitted_terms(parts), parts, 100)
    return target, parts, fitted, points, values


@pytest.mark.parametrize("centred", [True, False])
def test_value_and_gradient_are_those_of_the_sum(centred):
    target, parts, fitted, points, values = fitted_sum(hierarchy(centred))
    np.testing.assert_allclose(values[:, 1], values[:, 3:].sum(axis=1), rtol=1e-10)
    assert [len(indices) for indices in parts.members] == [3] * 5
    for is_independent in (False, True):
        surrogate = fitted.surrogate(parts, is_independent)
        rows = np.ascontiguousarray(surrogate.to_moves(points[:6]).T)
        found = surrogate_values(surrogate, rows)
        steps, gradients = 1e-5 * np.eye(target.dim), surrogate_gradients(surrogate, rows)
        for row, gradient in zip(rows, gradients, strict=True):
            rise = surrogate_values(surrogate, row + steps) - surrogate_values(
                surrogate, row - steps
            )
            np.testing.assert_allclose(gradient, rise / 2e-5, rtol=1e-4, atol=1e-3)
        if not is_independent:
            learnt = terms_at(surrogate, parts.inputs_at(points[:6])).sum(axis=1)
            np.testing.assert_allclose(found, values[:6, 0] + learnt, rtol=1e-10)


def test_a_term_is_known_where_it_was_evaluated_and_falls_beyond():
    _, parts, fitted, points, values = fitted_sum(hierarchy())
    surrogate, inputs = fitted.surrogate(parts), parts.inputs_at(points)
    near = values[:, 3] > values[:, 3].max() - 5.0
    found = terms_at(surrogate, inputs[near])[:, 0]
    assert np.std(found - values[near, 3]) < 0.2
    far = inputs[:1] + 1e3 * np.array([[1.0], [2.0]])
    first, second = terms_at(surrogate, far)[:, 0]
    assert second < first < values[:, 3].min() - 100.0


def test_particles_that_are_all_far_out_are_drawn_anew():
    _, parts, fitted, points, _ = fitted_sum(hierarchy())
    sampled = Sampled(parts, False, 0.9, np.random.default_rng(5))
    for distance in (30.0, 1e9):
        far = points[:40] + distance
        moved = moved_particles(fitted._replace(particles=far), points, sampled)
        surrogate = moved.surrogate(parts)
        best = predicted(surrogate, points).max()
        assert predicted(surrogate, moved.particles).min() > best - 60.0


def test_what_terms_depend_on():
    parts = sum_parts(LogDensity(hierarchy()))
    assert [own.tolist() for own in parts.own] == [[5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
    [(i, k)] = parts.shared
    assert k == 4 and all(i in indices for indices in parts.members)
    parts = sum_parts(LogDensity(hierarchy(centred=False)))
    assert [own.size for own in parts.own] == [2] * 5


# the step -----------------------------------------------------------------------------------------


def test_names_of_intermediate_values_change_no_draw():
    draws = []
    for named in (False, True):
        model = hierarchy(centred=False, n_groups=3, named=named)
        points, _, _ = run(SurrogateHMCStep(model=model), model, 12, tune=8)
        draws.append(points)
    np.testing.assert_array_equal(draws[0], draws[1])
