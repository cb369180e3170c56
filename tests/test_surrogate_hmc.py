"""HMC on a surrogate: the regression, the trajectories, the exact ratio, the search, the step."""

from dataclasses import replace

import arviz as az
import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import surrogates
from models import begin, drive
from pytensor.compile.ops import wrap_py
from scipy.special import logsumexp
from scipy.stats import norm

from pymc_kameleon import SurrogateHMCStep
from pymc_kameleon.gp.mean import Mean, confined, fit_quadratic, mean_value
from pymc_kameleon.gp.sparse_gp_fit import fit_sparse_gp
from pymc_kameleon.gp.triangular_map import (
    fit_triangular_map,
    gradient_in_u,
    gradient_in_v,
    identity_map,
)
from pymc_kameleon.gp.typical_set import clipped_residuals, typical_depth, typical_set
from pymc_kameleon.mcmc.chain import new_chain
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.mcmc.proposals import learn
from pymc_kameleon.model.initial_points import prior_draws
from pymc_kameleon.model.log_density import LONGEST_LOG
from pymc_kameleon.model.mode_search import search_mode
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.steps.chain import surrogate_sampler
from pymc_kameleon.surrogate import acquisition, hmc, transition
from pymc_kameleon.surrogate.learner import TrajectoryLearner
from pymc_kameleon.surrogate.modes import find_modes, nearest_modes
from pymc_kameleon.surrogate.posterior_surrogate import (
    NO_PRIOR,
    new_surrogate,
    new_workspace,
    predicted,
    predicted_at,
    surrogate_value_and_gradient,
    surrogate_values,
)
from pymc_kameleon.surrogate.support import everywhere
from pymc_kameleon.surrogate.transition import COLD
from pymc_kameleon.targets import Banana, CorrelatedGaussian, Ring
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = pytest.mark.numerics

BOUND = 1e-6
"""Null probability of each p-value below it."""

BANANA = Banana(bananicity=0.1, variance=100.0, dim=2)


def without_prior(gp):
    nowhere = np.zeros(len(gp.mean.linear), dtype=np.bool_)
    bends = gp.triangular_map
    mean, support = gp.mean_function(), everywhere(len(nowhere))
    return new_surrogate(gp.standardization, bends, mean, nowhere, NO_PRIOR, support)


def fitted(target=BANANA, n=80, max_points=500, seed=0):
    points = target.draw(n, np.random.default_rng(seed))
    values = target.log_density(points)
    coordinates = standardization(points, np.ones(target.dim))
    gp, _ = fit_sparse_gp(points, values, coordinates, max_points)
    return without_prior(gp), points, values


def straight_coordinates(gp, points):
    u = gp.standardization.whiten(points)
    return gp.triangular_map.to_v(u)


# the regression -----------------------------------------------------------------------------------


def assert_gradient_is_that_of_the_value(surrogate, dim):
    rng = np.random.default_rng(1)
    for u in rng.normal(size=(5, dim)):
        found = np.empty(dim)
        value = surrogate_value_and_gradient(surrogate, u, new_workspace(surrogate), found)
        assert value == pytest.approx(surrogate_values(surrogate, u[None])[0], rel=1e-12)
        steps = 1e-5 * np.eye(dim)
        above, below = (
            surrogate_values(surrogate, u + steps),
            surrogate_values(surrogate, u - steps),
        )
        expected = (above - below) / 2e-5
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_gradient_is_that_of_the_value(dim):
    target = CorrelatedGaussian(dim) if dim == 1 else Banana(0.1, dim=dim)
    assert_gradient_is_that_of_the_value(fitted(target, n=60)[0], dim)


def gradients_of(target, points):
    """Gradients (n, d), by central differences."""
    steps = 1e-5 * np.eye(target.dim)
    slopes = [target.log_density(points + h) - target.log_density(points - h) for h in steps]
    return np.array(slopes).T / 2e-5


@pytest.mark.parametrize("has_gradients", [False, True])
def test_values_and_gradients_are_regressed_on_together(has_gradients):
    """The weights of few centres are those of generalised least squares on all evaluations."""
    target = Ring(dim=2)
    points = target.draw(30, np.random.default_rng(0))
    gradients, values = gradients_of(target, points), target.log_density(points)
    gradients[0, 1] = np.nan
    coordinates, given = standardization(points, np.ones(2)), gradients if has_gradients else None
    gp, _ = fit_sparse_gp(points, values, coordinates, 20, None, None, given)
    u, factor = gp.standardization.whiten(points), gp.standardization.factor
    slopes = gp.triangular_map.gradients_in_v(u, (gradients @ factor).T).T
    u = straight_coordinates(gp, points)
    prior = np.array([mean_value(gp.mean, row) for row in np.ascontiguousarray(u.T)])
    residuals, noise = clipped_residuals(values, prior, typical_set(values, 2))
    inverse, centres = gp.inverse_lengthscales, gp.centres

    def basis(u):
        apart = (u * inverse[:, None]).T[:, None] - centres.T[None]
        return (1 + np.sum(apart**2, axis=2) / 16) ** -8

    apart = centres.T[:, None] - centres.T[None]
    covariance = (1 + np.sum(apart**2, axis=2) / 16) ** -8 + 1e-8 * np.eye(len(centres.T))

    def with_the_rest(noise, rows, prior):
        explained = np.sum(rows * np.linalg.solve(covariance, rows.T).T, axis=1)
        left = np.where(prior - explained > 2e-8, prior - explained, 0.0)
        return np.sqrt(noise**2 + np.exp(2 * gp.hyperparameters[0]) * left)

    rows, targets, sds = [basis(u)], [residuals], [with_the_rest(noise, basis(u), 1.0)]
    assert np.any(sds[0] > 2.0 * noise)
    known = np.flatnonzero(
        np.all(np.isfinite(slopes), axis=1) & (values > values.max() - typical_depth(2))
    )
    assert 0 not in known and len(known) > 8
    for k in range(2) if has_gradients else ():
        h = 1e-5 * np.eye(2)[:, [k]]
        rows.append((basis(u + h) - basis(u - h))[known] / 2e-5)
        means = [
            [mean_value(gp.mean, np.ascontiguousarray(row)) for row in (u + sign * h).T]
            for sign in (1, -1)
        ]
        targets.append((slopes[:, k] - (np.subtract(*means) / 2e-5))[known])
        sds.append(with_the_rest(noise[known], rows[-1], inverse[k] ** 2))
    design, target = np.concatenate(rows), np.concatenate(targets)
    scaled = design / np.concatenate(sds)[:, None]
    precision = scaled.T @ scaled + covariance * np.exp(-2 * gp.hyperparameters[0])
    weights = np.linalg.solve(precision, scaled.T @ (target / np.concatenate(sds)))
    new = basis(np.random.default_rng(2).normal(size=(2, 9)))
    np.testing.assert_allclose(new @ gp.weights, new @ weights, rtol=1e-4, atol=1e-4)


def test_values_far_below_are_very_low_and_in_order():
    values = np.array([0.0, -1.0, -1e2, -1e4, -1e300, -np.inf, np.nan])
    found, noise = clipped_residuals(values, np.zeros(7), typical_set(values, 3))
    assert np.all(np.diff(found[:3]) < 0)
    assert np.all(np.diff(found[3:]) <= 0)
    assert found[-1] > -2 * typical_depth(3) - 1e-9
    np.testing.assert_array_equal(found[:2], values[:2])
    assert np.all(np.diff(noise) >= 0)
    assert np.all(np.isfinite(found))


def test_nothing_is_added_where_value_and_mean_are_both_far_below():
    values = np.array([0.0, -1e3, -1e3, -2.0, -np.inf])
    means = np.array([0.0, -500.0, -1.0, -500.0, -500.0])
    found, _ = clipped_residuals(values, means, typical_set(values, 3))
    assert found[1] == found[4] == 0.0
    assert found[2] < -typical_depth(3) + 1
    assert found[3] == 498.0


def test_typical_is_what_the_chain_sees():
    """Not what is far above, and all that it sees, unless it has come from far below."""
    values = np.array([300.0, 50.0, 30.0, -70.0, -1e6, np.nan])
    typical = typical_set(values, 12, np.linspace(-20.0, 30.0, 500))
    assert 28 < typical.highest - 6 < 30  # half the dimension above
    assert -20 < typical.highest - typical.depth < -18
    expected = [0.0, 0.0, typical.highest - 30.0, typical.highest + 70.0, typical.highest + 1e6]
    np.testing.assert_allclose(typical.depths(values), [*expected, np.inf])
    residuals, noise = clipped_residuals(values, np.zeros(6), typical)
    np.testing.assert_allclose(residuals[:3], values[:3])
    assert noise[0] == noise[1] == noise[2] < noise[3] < noise[4] <= noise[5]
    assert typical_set(values[1:2], 12, np.array([40.0, 49.0])).highest == 50.0
    assert typical_set(values, 12, np.linspace(-1e5, 0.0, 500)).depth < 100


def test_points_without_density_do_not_spoil_the_rest():
    rng = np.random.default_rng(3)
    points = rng.normal(size=(300, 2))
    values = np.where(points[:, 0] < 1.0, -0.5 * np.sum(points**2, axis=1), -np.inf)
    gp, _ = fit_sparse_gp(points, values, standardization(points, np.ones(2)), 500)
    surrogate = without_prior(gp)
    test = rng.normal(size=(300, 2))
    inside = test[:, 0] < 0.5
    error = predicted(surrogate, test[inside]) + 0.5 * np.sum(test[inside] ** 2, axis=1)
    assert np.median(np.abs(error)) < 0.2
    far_out = predicted(surrogate, np.array([[2.0, 0.0], [2.5, 0.5]]))
    assert np.all(far_out < predicted(surrogate, np.zeros((1, 2))) - typical_depth(2) / 2)


@pytest.mark.parametrize("dim", [1, 3, 40])
def test_the_mean_is_concave(dim):
    rng = np.random.default_rng(dim)
    u = rng.normal(size=(dim, 12))
    mean = fit_quadratic(u, 0.5 * np.sum(u**2, axis=0), np.ones(12))
    assert np.linalg.eigvalsh(mean.quadratic)[-1] <= 1e-9


@pytest.mark.parametrize("dim", [1, 3])
def test_a_confined_mean_falls_beyond_the_points_and_says_the_same_of_them(dim):
    rng = np.random.default_rng(dim)
    u, weights = 3.0 * rng.normal(size=(dim, 60)) + 2.0, rng.random(60)
    centre = u @ weights / weights.sum()
    rising = Mean(np.array([1.0]), 50.0 * rng.normal(size=dim), np.zeros((dim, dim)))
    found = confined(rising, rising, u, weights)

    def average(mean):
        return weights @ [mean_value(mean, row) for row in np.ascontiguousarray(u.T)]

    np.testing.assert_allclose(found.linear + found.quadratic @ centre, rising.linear)
    assert average(found) == pytest.approx(average(rising))
    top = -np.linalg.solve(found.quadratic, found.linear)
    assert np.all(abs(top - centre) <= 1.0001 * abs(u - centre[:, None]).max(axis=1))
    level = rising._replace(linear=np.zeros(dim))
    flat = confined(level, level, u, weights)
    edge = u[:, np.argmax(np.linalg.norm(u - centre[:, None], axis=0))]
    assert mean_value(flat, centre) - mean_value(flat, centre + 2.0 * (edge - centre)) > 0.5
    falling = Mean(np.array([1.0]), 5.0 * centre, -5.0 * np.eye(dim))
    for kept, before in zip(confined(rising, falling, u, weights), rising, strict=True):
        np.testing.assert_array_equal(kept, before)


def test_an_exact_quadratic_stays_exact_beside_a_prior_that_is_none():
    """The centred eight schools: what a quadratic makes of the prior must not change it."""
    rng = np.random.default_rng(6)
    log_scale = rng.normal(size=200)
    points = np.column_stack([log_scale, np.exp(log_scale)[:, None] * rng.normal(size=(200, 4))])
    priors = -0.5 * (log_scale**2 + np.sum((points[:, 1:].T / np.exp(log_scale)) ** 2, axis=0))
    priors -= 4.0 * log_scale
    values = priors - 0.5 * np.sum((points[:, 1:] - 1.0) ** 2, axis=1)
    coordinates = standardization(points, np.ones(5))
    gp, _ = fit_sparse_gp(points, values, coordinates, 100, log_prior=priors)
    far = np.array([[-4.0, 1.0, 1.0, 1.0, 1.0], [4.0, 9.0, -9.0, 3.0, 0.0]])
    exact = -0.5 * np.sum((far[:, 1:] - 1.0) ** 2, axis=1)
    np.testing.assert_allclose(predicted(without_prior(gp), far), exact, atol=1e-3)


# straight coordinates -----------------------------------------------------------------------------


def test_the_surrogate_goes_on_along_a_ridge():
    """Points beyond two standard deviations were never seen, and are three at the end."""
    rng = np.random.default_rng(6)
    points = BANANA.draw(200, rng)
    points = points[np.abs(points[:, 0]) < 20.0]
    values = BANANA.log_density(points)
    gp, _ = fit_sparse_gp(points, values, standardization(points, np.ones(2)), 500)
    beyond = BANANA.draw(4000, rng)
    beyond = beyond[np.abs(beyond[:, 0]) > 20.0]
    assert np.abs(beyond[:, 0]).max() > 30.0
    errors = predicted(without_prior(gp), beyond) - BANANA.log_density(beyond)
    assert np.median(np.abs(errors)) < 0.3


@pytest.mark.parametrize("target", [Ring(dim=4), CorrelatedGaussian(4)])
def test_what_does_not_bend_is_left_as_it_is(target):
    assert fitted(target, n=200)[0].gp.triangular_map.mapped.size == 0


def bending_both_ways():
    """Two bent coordinates, one of which bends along the other, in an order that is not theirs."""
    rng = np.random.default_rng(8)
    u = rng.normal(size=(4, 500))
    u[0] = u[2] * u[3] - 0.5 * u[2] + 0.1 * u[0]
    u[1] = 0.7 * u[0] ** 2 + u[3] ** 2 + 2.0 + 0.3 * u[1]
    return u, fit_triangular_map(u, np.ones(500))


def test_one_bend_may_follow_another():
    u, triangular_map = bending_both_ways()
    np.testing.assert_array_equal(triangular_map.mapped, [1, 0])
    np.testing.assert_allclose(triangular_map.scales, [0.3, 0.1], rtol=0.15)
    np.testing.assert_allclose(triangular_map.quadratic[0][[0, 3], [0, 3]], [1.4, 2.0], atol=0.15)
    assert triangular_map.quadratic[1][2, 3] == pytest.approx(1.0, abs=0.05)
    v = triangular_map.to_v(u)
    expected = (u[0] - u[2] * u[3] + 0.5 * u[2]) / 0.1
    assert np.corrcoef(v[0], expected)[0, 1] > 0.98


def test_slopes_in_straight_coordinates_and_back():
    u, triangular_map = bending_both_ways()
    u = u[:, :5]
    step = 1e-6
    jacobians = np.array(
        [
            triangular_map.to_v(u + h[:, None]) - triangular_map.to_v(u - h[:, None])
            for h in step * np.eye(4)
        ]
    ) / (2 * step)  # (coordinate of u, coordinate of v, point)
    straight = np.random.default_rng(9).normal(size=(4, 5))
    slopes = np.einsum("ijn,jn->in", jacobians, straight)
    found = triangular_map.gradients_in_v(u, slopes)
    np.testing.assert_allclose(found, straight, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        triangular_map.to_u(triangular_map.to_v(u)), u, rtol=1e-10, atol=1e-10
    )
    for i in range(5):
        row, back = np.ascontiguousarray(u[:, i]), np.empty(4)
        gradient_in_u(triangular_map, row, np.ascontiguousarray(straight[:, i]), back)
        np.testing.assert_allclose(back, slopes[:, i], rtol=1e-6, atol=1e-6)
        gradient_in_v(triangular_map, row, back)
        np.testing.assert_allclose(back, straight[:, i], rtol=1e-10, atol=1e-10)


def test_trajectories_are_straight_where_the_regression_is():
    """Their coordinates are those of a Gaussian, so few steps with a large step size will do."""
    target = Banana(0.1, dim=4)
    step = learnt(target.model(), tune=400)
    surrogate = step.learner.surrogate
    np.testing.assert_array_equal(surrogate.triangular_map.mapped, [1])
    draws = surrogate.to_moves(target.draw(4000, np.random.default_rng(4)))
    assert np.abs(np.corrcoef(draws**2)[np.triu_indices(4, 1)]).max() < 0.15
    assert step.learner.fitted.integrator.step_size[0] > 0.3


def test_a_ridge_beside_a_bound_goes_on_from_a_saved_state():
    """Coordinates of moves and of the regression may then differ in what they straighten."""
    with pm.Model() as model:
        pm.Uniform("share", 0.0, 1.0)
        x = pm.Normal("x", 0.0, 2.0, shape=2)
        share = model["share"]
        pm.Potential("y", -0.5 * ((x[1] - x[0] ** 2) ** 2 + (share - 0.5) ** 2) / 0.01)
    step = learnt(model, tune=300)
    fitted = step.learner.fitted
    assert fitted.is_bounded.tolist() == [True, False, False]
    assert fitted.triangular_map.mapped.size > 0 and fitted.gp.triangular_map.mapped.size > 0
    assert_gradient_is_that_of_the_value(step.learner.surrogate, 3)
    state = step.sampling_state

    def with_bends(learner, bends):
        bent = learner.values["fitted"]._replace(triangular_map=bends)
        return replace(learner, values=learner.values | {"fitted": bent})

    for bends in (fitted.triangular_map, identity_map(3)):
        other = SurrogateHMCStep(model=model)
        begin(other, 5, tune=300)
        other.sampling_state = replace(state, learner=with_bends(state.learner, bends))
        drive(other, model.initial_point(), 3, tune=300)
    wrong = fitted.triangular_map._replace(mapped=np.array([3]))
    with pytest.raises(ValueError, match="triangular_map"):
        other.sampling_state = replace(state, learner=with_bends(state.learner, wrong))


# the prior ----------------------------------------------------------------------------------------


def learnt(model, vars=None, tune=60):
    """Return a step after some draws of tuning."""
    step = SurrogateHMCStep(vars, model=model)
    begin(step, 5, tune=tune)
    drive(step, model.initial_point(), tune, tune=tune)
    return step


def test_the_prior_is_the_models_own_and_only_the_rest_is_learnt():
    with pm.Model() as model:
        pm.Uniform("share", 0.0, 3.0)
        pm.HalfCauchy("scale", 2.0)
        pm.Potential("y", -0.5 * pt.sum((model["share"] - 2.9) ** 2) / 0.04)
    step = learnt(model)
    assert_gradient_is_that_of_the_value(step.learner.surrogate, 2)
    points, values, priors = step.learner.known()
    terms = np.array([step.target(point) for point in points])
    np.testing.assert_allclose(values, terms.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(priors, terms[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(step.learner.evaluations.stored()[1], terms[:, 1])
    typical = values > values.max() - 3.0
    found = predicted(step.learner.surrogate, points[typical])
    np.testing.assert_allclose(found, values[typical], atol=0.1)
    # Far from all evaluations, where the likelihood still is the same: a learnt prior would fall by
    # more than 40.
    far = np.array([[4.0, -15.0], [4.0, 0.0], [4.0, 15.0]])
    exact = [step.target(point)[0] for point in far]
    assert np.ptp(predicted(step.learner.surrogate, far) - exact) < 10.0 < np.ptp(exact)


def test_gradients_of_what_is_learnt_are_learnt():
    """Without the prior's, and in the coordinates that the regression takes."""
    with pm.Model() as model:
        pm.Uniform("share", 0.0, 3.0)
        pm.HalfCauchy("scale", 2.0)
        pm.Potential("y", -0.5 * pt.sum((model["share"] - 2.0) ** 2) / 0.04 - model["scale"] ** 2)
        step = SurrogateHMCStep(gradients=True)
    begin(step, 5, tune=60)
    drive(step, model.initial_point(), 60, tune=60)
    points, _, gradients = step.learner.evaluations.stored()
    expected = [step.target.value_and_gradient(point)[1][1] for point in points]
    np.testing.assert_allclose(gradients, expected, rtol=1e-8, atol=1e-12)
    assert step.learner.fitted.is_bounded.tolist() == [True, False]
    values = step.learner.known()[1]
    typical = values > values.max() - 3.0
    found = predicted(step.learner.surrogate, points[typical])
    np.testing.assert_allclose(found, values[typical], atol=0.05)


def test_a_prior_that_another_step_moves_is_followed(caplog):
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        x = pm.Normal("x", 0.0, scale, shape=2)
        pm.Potential("y", -0.5 * pt.sum((x - 2.0) ** 2))
    step = learnt(model, [x])
    assert "depends on" not in caplog.text
    point = np.array([[2.0, 1.0], [2.0, 3.0]])
    for log_scale in (0.0, 1.0):
        next(iter(step.target.shared.values())).set_value(np.array(log_scale))
        exact = [step.target(row).sum() for row in point]
        np.testing.assert_allclose(predicted(step.learner.surrogate, point), exact, atol=0.02)


def _without_gradient(x):
    @wrap_py(itypes=[pt.dvector], otypes=[pt.dvector])
    def densities(x):
        return -0.5 * x**2

    return densities(x)


@pytest.mark.parametrize("has_likelihood", [True, False])
def test_a_prior_that_cannot_be_called_is_learnt(has_likelihood):
    with pm.Model() as model:
        if has_likelihood:
            x = pm.CustomDist("x", logp=_without_gradient, shape=2)
            pm.Potential("y", -0.5 * pt.sum((x - 1.0) ** 2))
        else:
            pm.Normal("x", 0.0, 1.0, shape=2)
    step = learnt(model)
    assert step.learner.log_prior.size == 0
    points, values, _ = step.learner.known()
    np.testing.assert_allclose(values, [step.target(point).sum() for point in points])
    typical = points[values > values.max() - 3.0]
    exact = [step.target(point).sum() for point in typical]
    np.testing.assert_allclose(predicted(step.learner.surrogate, typical), exact, atol=0.1)


# trajectories -------------------------------------------------------------------------------------


def moved(surrogate, root, u, momentum, n_steps=25, step_size=0.11, radius=50.0):
    u, momentum, gradient = u.copy(), momentum.copy(), np.empty(u.size)
    workspace = new_workspace(surrogate)
    surrogate_value_and_gradient(surrogate, u, workspace, gradient)
    value = hmc.leapfrog(
        surrogate, root, step_size, n_steps, radius, gradient, workspace, u, momentum
    )
    return u, momentum, np.isfinite(value)


def test_leapfrog_is_reversible_and_keeps_volume():
    surrogate, _, _ = fitted(Banana(0.1, dim=3))
    rng = np.random.default_rng(7)
    root = np.tril(rng.normal(size=(3, 3))) + 2 * np.eye(3)
    u, momentum = rng.normal(size=(2, 3))
    there, momentum_there, stays = moved(surrogate, root, u, momentum, n_steps=6)
    assert stays
    back, momentum_back, _ = moved(surrogate, root, there, -momentum_there, n_steps=6)
    np.testing.assert_allclose(back, u, atol=1e-9)
    np.testing.assert_allclose(-momentum_back, momentum, atol=1e-9)
    start, columns = np.concatenate([u, momentum]), []
    for h in 1e-6 * np.eye(6):
        ends = [moved(surrogate, root, *np.split(start + s * h, 2), n_steps=6) for s in (1, -1)]
        plus, minus = (np.concatenate(end[:2]) for end in ends)
        columns.append((plus - minus) / 2e-6)
    assert np.linalg.det(columns) == pytest.approx(1.0, abs=1e-4)


def test_a_trajectory_that_leaves_the_ball_leaves_it_on_the_way_back():
    surrogate, _, _ = fitted()
    rng, n_left = np.random.default_rng(8), 0
    for _ in range(200):
        u, momentum = 0.3 * rng.normal(size=2), 1.5 * rng.normal(size=2)
        there, momentum_there, _ = moved(surrogate, np.eye(2), u, momentum, n_steps=25)
        if np.linalg.norm(there) > 2.0:
            continue
        _, _, stays = moved(surrogate, np.eye(2), u, momentum, n_steps=25, radius=2.0)
        _, _, stays_back = moved(
            surrogate, np.eye(2), there, -momentum_there, n_steps=25, radius=2.0
        )
        assert stays == stays_back
        n_left += not stays
    assert n_left > 3


def test_differences_stay_in_the_ball():
    """At a temperature where all is accepted, with points further apart than the ball is wide."""
    surrogate, _, _ = fitted()
    rng, u, n_moved = np.random.default_rng(9), np.zeros(2), 0
    workspace, points = new_workspace(surrogate), 2.0 * rng.normal(size=(2, 12))
    value = surrogate_value_and_gradient(surrogate, u, workspace, np.empty(2))
    for _ in range(100):
        before, uniforms = u.copy(), rng.random(4 * transition.TRIES)
        value = transition._move_by_differences(
            surrogate, points, 2.0, 1e9, u, value, uniforms, workspace
        )
        assert np.linalg.norm(u) <= 2.0
        n_moved += (u != before).any()
    assert n_moved > 20


def test_step_size_is_chosen_for_its_acceptance():
    surrogate, points, _ = fitted(n=200)
    u = np.ascontiguousarray(surrogate.to_moves(points).T)
    integrator = hmc.new_integrator(2)
    integrator.radius[0] = 20.0
    steps = [
        hmc.tuned_integrator(surrogate, integrator, u, share, np.random.default_rng(1)).step_size[0]
        for share in (0.6, 0.9, 0.99)
    ]
    assert steps[0] > steps[1] > steps[2] > 0


def test_a_slope_that_is_the_same_everywhere_has_a_mass_matrix():
    """Its information has one large eigenvalue, and its inverse would have none in float64."""
    surrogate, _, _ = fitted(n=200)
    steep = surrogate.gp._replace(weights=1e9 * surrogate.gp.weights)
    integrator = hmc.new_integrator(2)
    integrator.radius[0] = 20.0
    tuned = hmc.tuned_integrator(
        surrogate._replace(gp=steep), integrator, np.ones((50, 2)), 0.9, np.random.default_rng(1)
    )
    assert np.all(np.isfinite(tuned.root)) and np.all(np.diag(tuned.root) > 0)


# the exact ratio ----------------------------------------------------------------------------------


def p_values(target, spoil, n=5000, steps_per_draw=6, **options):
    """Each has null probability 1e-6 of falling below `BOUND`.

    A distribution function that is 0.04 off anywhere is seen.
    """
    rng = np.random.default_rng(20)
    options |= {"warm_start": target.draw(60, rng), "steps_per_draw": steps_per_draw}
    step = frozen(SurrogateHMCStep(model=target.model(), **options), 21)
    draws = target.draw(n, rng)
    step.step({"x": draws[0]})
    step.learner.difference_share = 0.0
    spoil(step.learner)
    statistics = {
        "quantile statistic": target.quantile_statistic,
        "|x_1|": lambda x: np.abs(x[:, 0]),
    }
    return invariance_p_values(step, draws, target.draw(100_000, rng), statistics), step


def nothing(learner):
    pass


def wrong_surrogate(learner):
    """Tilt it: its own draws are elsewhere, and refused half the time."""
    learner.fitted.gp.mean.linear[:] += 0.8


def hot(learner):
    learner.fitted.integrator.hot_share[0] = 0.7


def test_a_chain_leaves_a_tail_where_the_surrogate_is_too_low():
    target = Banana(bananicity=0.0, variance=1.0, dim=2)
    rng = np.random.default_rng(22)
    step = frozen(SurrogateHMCStep(model=target.model(), warm_start=target.draw(60, rng)), 23)
    step.step({"x": np.zeros(2)})
    learner = step.learner
    learner.difference_share = 0.0
    fitted = learner.fitted
    fitted.integrator.radius[0] = 10.0
    fitted.gp.weights[:] = 0.0
    location, factor = fitted.standardization
    fitted.gp.mean.linear[:] = -factor.T @ location / 0.36
    fitted.gp.mean.quadratic[:] = -factor.T @ factor / 0.36
    # p / exp(s) is exp(14) times as large there as in the middle: without hotter proposals the
    # chain leaves with probability 0.001. A fifth is hotter, of which 0.3 are accepted, so the null
    # probability is 0.94^300 = 1e-8.
    points, _, _ = drive(step, {"x": np.array([4.0, 0.0])}, 300, tune=-1)
    assert np.linalg.norm(points[-1]) < 3.0


class HalfBanana(Banana):
    """A banana without density where x_1 > 3."""

    def model(self):
        model = super().model()
        with model:
            pm.Potential("wall", pt.switch(model["x"][0] > 3.0, -np.inf, 0.0))
        return model

    def draw(self, n, rng):
        draws = super().draw(4 * n + 40, rng)  # 38 % are beyond: of four all in one of fifty
        return draws[draws[:, 0] <= 3.0][:n]


class TwoModes:
    """Two Gaussians in the plane, nine standard deviations apart."""

    dim = 2
    means, sds, weights = np.array([[-3.0, -3.0], [4.0, 3.0]]), np.array([1.0, 0.7]), (0.7, 0.3)

    def log_density(self, x):
        squared = np.sum((x[:, None] - self.means) ** 2, axis=2) / self.sds**2
        return logsumexp(-0.5 * squared - 2 * np.log(self.sds), axis=1, b=self.weights)

    def draw(self, n, rng):
        mode = (rng.random(n) < self.weights[1]).astype(int)
        return self.means[mode] + self.sds[mode, None] * rng.standard_normal((n, 2))

    def model(self):
        """A posterior with a prior that is divided out of the likelihood."""
        with pm.Model() as model:
            x = pm.Normal("x", 0.0, 5.0, shape=2)
            squared = pt.sum((x - self.means) ** 2, axis=1) / self.sds**2
            log_density = -0.5 * squared - 2 * np.log(self.sds) + np.log(self.weights)
            pm.Potential("y", pt.logsumexp(log_density) + 0.5 * pt.sum(x**2) / 25.0)
        return model

    def quantile_statistic(self, x):
        return np.sum(x**2, axis=1)


EXACT = {
    "banana, wrong surrogate": (BANANA, wrong_surrogate),
    "banana, hot": (BANANA, hot),
    "ring": (Ring(4.0, 1.0, dim=2), nothing),
    "beside a region without density": (HalfBanana(0.1, 100.0, 2), nothing),
    "two modes, wrong surrogate": (TwoModes(), wrong_surrogate),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_draws_stay_exact(name):
    target, spoil = EXACT[name]
    found, step = p_values(target, spoil)
    assert min(found.values()) > BOUND, found
    assert step.report.acceptance > 0.1
    if target is BANANA:  # so that straight coordinates are tested too
        assert step.learner.fitted.triangular_map.mapped.size > 0
    if isinstance(target, TwoModes):
        assert step.learner.log_prior.size > 0
        draws, _, _ = drive(step, {"x": TwoModes.means[0]}, 400, tune=-1)
        assert np.sum(np.diff(draws[:, 0] > 0.5)) > 20


@pytest.mark.slow
@pytest.mark.sabotage
def test_a_ratio_without_the_surrogate_is_caught(monkeypatch):
    surrogates.leave_out_the_ratio(monkeypatch)
    found, _ = p_values(BANANA, wrong_surrogate, 800, 60, compile_kwargs={"mode": "cvm"})
    assert min(found.values()) < BOUND, found


# modes --------------------------------------------------------------------------------------------


def test_a_curved_mode_is_one_and_two_are_two():
    for target, n_modes in ((Ring(4.0, 1.0, dim=2), 1), (BANANA, 1), (TwoModes(), 2)):
        surrogate, points, _ = fitted(target, n=150)
        u = surrogate.to_moves(points)
        modes = find_modes(surrogate, u)
        assert modes.max() == n_modes - 1, target
    in_second = points[:, 0] > 0.5
    assert np.all(in_second[modes == 1]) and not np.any(in_second[modes == 0])
    np.testing.assert_array_equal(nearest_modes(u, modes, u.T), in_second)


@pytest.mark.slow
def test_each_chain_finds_both_modes_and_their_weights():
    """Share of the second within 5 standard errors: null probability 6e-7 for each chain."""
    target = TwoModes()
    step = SurrogateHMCStep(model=target.model())
    for seed in range(2):
        begin(step, seed, tune=500)
        draws, statistics, _ = drive(step, target.model().initial_point(), 2000, tune=500)
        sides, told = 1.0 * (draws[500:, 0] > 0.5), [s["mode"] for s in statistics[500:]]
        error = np.sqrt(0.21 / float(az.ess(sides[None])))
        assert abs(sides.mean() - 0.3) < 5 * error < 0.25
        assert np.mean(told != sides) < 0.005  # a draw between the two may be counted to either


# the search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("dim", [1, 2, 8])
def test_search_comes_near_the_mode_and_counts(dim, has_gradients):
    target = CorrelatedGaussian(dim) if dim == 1 else Banana(0.03, dim=dim)
    points, values = [], []

    def log_density(x):
        points.append(x.copy())
        values.append(float(target.log_density(x[None])[0]))
        return values[-1]

    def gradient():
        return gradients_of(target, points[-1][None])[0]

    most = 40 if has_gradients else 60 + 20 * dim
    search_mode(
        log_density, np.full(dim, 4.0), np.full(dim, 0.5), most, gradient if has_gradients else None
    )
    best = max(target.log_density(target.draw(2000, np.random.default_rng(0))))
    assert max(values) > best - 1.5
    assert len(values) <= most


@pytest.mark.parametrize("has_gradients", [False, True])
def test_search_goes_round_where_there_is_no_density(has_gradients):
    points, values = [], []

    def log_density(x):
        points.append(x.copy())
        values.append(-np.inf if x[0] < 0 else -0.5 * np.sum((x - 1.0) ** 2))
        return values[-1] if len(values) % 7 else np.nan

    def gradient():
        return np.where(np.isfinite(values[-1]), 1.0 - points[-1], np.nan)

    start = np.array([3.0, 3.0])
    search_mode(
        log_density, start, np.full(start.size, 0.5), 200, gradient if has_gradients else None
    )
    assert max(values) > -0.5


def evaluations(log_density, most, **options):
    """Values of a search in eight dimensions, of a function of position and count."""
    values = []

    def recorded(x):
        values.append(log_density(x, len(values)))
        return values[-1]

    search_mode(recorded, np.zeros(8), np.full(8, 0.5), most, **options)
    return values


@pytest.mark.parametrize(("slope", "reaches"), [(0.01, False), (3.0, True)])
def test_search_that_others_surpass_goes_on_while_it_gains(slope, reaches):
    """Uphill without an end; the others have come 40 higher."""

    def found(missing):
        return evaluations(lambda x, n: slope * x.sum(), 260, missing=missing)

    values = found(lambda best: 40.0 - best)
    assert (max(values) > 40.0) == reaches
    assert len(values) < 100 < len(found(lambda best: np.nan))


@pytest.mark.parametrize(("gain", "most"), [(0.05, 300), (1.0, 900)])
def test_a_long_search_goes_on_only_while_it_gains_much(gain, most):
    """By so much an evaluation; 260 are usual."""
    assert most - 40 < len(evaluations(lambda x, n: gain * n, 900)) <= most


def test_draws_from_the_prior_do_not_evaluate_the_likelihood():
    calls = []

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def likelihood(x):
        calls.append(x)
        return np.asarray(-np.sum(x**2))

    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2.0)
        x = pm.Normal("x", 10.0, 3.0, shape=2)
        pm.Flat("flat")
        pm.Potential("y", likelihood(scale * x))
    found = prior_draws(model, ["x", "scale_log__"], 400, seed=1)
    assert not calls
    assert found.shape == (400, 3)
    again = prior_draws(model, ["x", "scale_log__"], 400, seed=1)
    np.testing.assert_array_equal(found, again)
    assert np.all(np.abs(found.mean(axis=0)[:2] - 10.0) < 5 * 3 / np.sqrt(400))
    assert abs(np.mean(np.exp(found[:, 2])) - 2 * np.sqrt(2 / np.pi)) < 5 * 1.21 / np.sqrt(400)
    assert len(prior_draws(model, ["flat"], 3, seed=1)) == 0


def test_a_prediction_is_that_of_the_row_however_it_lies_in_memory():
    """Machine code is found by classes, so that another layout would be read as if it were rows."""
    points = np.random.default_rng(1).standard_normal((40, 3))
    values = -0.5 * np.sum(points**2, axis=1)
    coordinates = standardization(points, np.ones(3))
    gp, _ = fit_sparse_gp(points, values, coordinates, 20)
    surrogate = without_prior(gp)
    expected = [predicted_at(surrogate, x, np.inf) for x in points]
    assert np.allclose(expected, values, atol=0.1)
    for other in (np.asfortranarray(points), points[::-1][::-1]):
        np.testing.assert_array_equal([predicted_at(surrogate, x, np.inf) for x in other], expected)
    single = [predicted_at(surrogate, x, np.inf) for x in points.astype(np.float32)]
    np.testing.assert_allclose(single, expected, atol=1e-4)
    assert predicted_at(surrogate, points[0], 0) == -np.inf


# the step -----------------------------------------------------------------------------------------


def test_what_is_learnt_at_the_end_of_tuning():
    step = SurrogateHMCStep(model=BANANA.model())
    begin(step, 2, tune=150)
    drive(step, BANANA.model().initial_point(), 150, tune=150)
    n_known = step.learner.evaluations.count[0]
    step.stop_tuning()
    assert step.learner.n_fitted == n_known > 150  # the last fit knows all evaluations
    # So that differences reach a mode that the chain has not come to.
    points, values, _ = step.learner.known()
    best = step.learner.surrogate.to_moves(points[[np.argmax(values)]])
    assert np.abs(step.learner.fitted.population - best).max(axis=0).min() < 1e-12
    assert 0.05 <= step.learner.fitted.integrator.hot_share[0] <= 0.2


@pytest.mark.parametrize(("error", "n_fits", "n_checks"), [(0.0, 1, 1), (10.0, 6, 5)])
def test_a_surrogate_that_is_wrong_at_its_own_draws_is_fitted_again(
    monkeypatch, error, n_fits, n_checks
):
    step, fits = SurrogateHMCStep(model=BANANA.model()), []
    begin(step, 2, tune=90)
    point = drive(step, BANANA.model().initial_point(), 90, tune=90)[-1]
    fit = TrajectoryLearner.fit

    def counted(learner, rng):
        fits.append(learner.evaluations.count[0])
        return fit(learner, rng)

    def predicted(surrogate, x, radius):
        return BANANA.log_density(x[None])[0] + error

    monkeypatch.setattr(acquisition, "SURE", 0.0)
    monkeypatch.setattr(surrogate_sampler, "predicted_at", predicted)
    monkeypatch.setattr(TrajectoryLearner, "fit", counted)
    step.learner.outcome[:] = [[50, 2, 5.0, 9.0], [50, 10, 30.0, 60.0]]
    step.stop_tuning()
    assert step.learner.difference_share == 0.8  # however often it was fitted
    assert np.all(np.diff(fits) == 4)
    assert len(fits) == n_fits
    _, statistics = step.step({"x": point["x"]})
    assert statistics[0]["n_evals"] == 4 * n_checks + 1


@pytest.mark.parametrize(
    ("outcome", "share"),
    [
        ([[0, 0, 0.0, 0.0], [0, 0, 0.0, 0.0]], 0.05),
        ([[50, 40, 80.0, 200.0], [50, 10, 30.0, 60.0]], 0.05),
        ([[50, 2, 5.0, 9.0], [50, 10, 30.0, 60.0]], 0.8),
        ([[5, 3, 8.0, 20.0], [1, 1, 4.0, 16.0]], 0.05),
        # Ahead by chance: trajectories are always accepted, and twelve say little.
        ([[12, 12, 6.0, 9.0], [30, 15, 45.0, 120.0]], 0.05),
    ],
)
def test_differences_make_most_moves_where_they_take_the_chain_further(outcome, share):
    learner = SurrogateHMCStep(model=BANANA.model()).sampler.new_learner(np.zeros(2), None)
    learner.outcome[:] = outcome
    learner._judge()
    assert learner.difference_share == share
    np.testing.assert_array_equal(learner.outcome, outcome)
    assert learner.follows == (share == 0.05)


def test_moves_weigh_half_after_a_fit():
    step = SurrogateHMCStep(model=BANANA.model())
    begin(step, 2, tune=90)
    drive(step, BANANA.model().initial_point(), 60, tune=90)
    learner = step.learner
    learner.outcome[:] = made = np.array([[50, 2, 5.0, 9.0], [50, 10, 30.0, 60.0]])
    learner.update(step.chain.position, True, step.rng)
    np.testing.assert_array_equal(learner.outcome, 0.5 * made)


def test_a_way_back_from_far_away_counts_as_one_between_independent_points():
    learner = SurrogateHMCStep(model=BANANA.model()).sampler.new_learner(np.zeros(2), None)
    learner.last[:] = 100.0
    learn(learner.proposal(compiled=False), new_chain(np.zeros(2)), False, 0.3, COLD)
    np.testing.assert_array_equal(learner.outcome, [[1, 0.3, 4.0, 16.0], [0] * 4])


@pytest.mark.slow
def test_few_evaluations_are_enough_for_a_curved_posterior():
    """Errors in units of the Monte Carlo error; null probability about 1e-4 for each bound of 4."""
    target = Banana(0.03, dim=4)
    step = SurrogateHMCStep(model=target.model())
    chains, n_evals = [], 0
    for seed in range(2):
        begin(step, seed, tune=400)
        draws, statistics, _ = drive(step, target.model().initial_point(), 1000, tune=400)
        n_evals += sum(s["n_evals"] for s in statistics)
        chains.append(draws[400:])
    chains = np.array(chains)
    assert n_evals < 2400
    for k in range(4):
        x = chains[:, :, k]
        effective = float(az.ess(x))
        assert effective > 100
        expected = target.draw(100_000, np.random.default_rng(9))[:, k]
        z = (x.mean() - expected.mean()) / (expected.std() / np.sqrt(effective))
        assert abs(z) < 4


EFFECTS = 0.65 * norm.ppf((np.arange(16) + 0.5) / 16)
NOISE = 0.55


def hierarchy():
    """Sixteen groups in the centred form: the density has no bound where their spread is small."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfNormal("tau", 1)
        group = pm.Normal("group", mu, tau, shape=16)
        pm.Normal("y", group, NOISE, observed=EFFECTS)
    return model


def quantiles_of_the_log_spread(shares):
    """Quantiles of log tau on a grid, where y is N(mu, NOISE^2 + tau^2)."""
    log_tau, mu = np.meshgrid(np.linspace(-12, 2, 1400), np.linspace(-4, 4, 400), indexing="ij")
    variance = np.exp(2 * log_tau) + NOISE**2
    log_density = log_tau - 0.5 * np.exp(2 * log_tau) - 0.5 * mu**2 / 25
    for y in EFFECTS:
        log_density -= 0.5 * (y - mu) ** 2 / variance + 0.5 * np.log(variance)
    below = np.exp(log_density - log_density.max()).sum(axis=1).cumsum()
    return log_tau[np.searchsorted(below, np.multiply(shares, below[-1])), 0]


@pytest.mark.slow
def test_an_angle_that_may_be_pi_has_one_mode_and_one_period():
    """A start on the wrong side of pi; what is evaluated beyond is the same one turn back."""
    with pm.Model() as model:
        angle = pm.VonMises("angle", 0, 0.1)
        pm.Potential("near pi", -4.0 * pm.math.cos(angle))
    step = SurrogateHMCStep(model=model)
    points, statistics, _ = models.run(step, model, 700, tune=200)
    draws = points[200:, 0]
    assert np.ptp(draws) < 2 * np.pi
    assert np.mean([s["accept"] for s in statistics[200:]]) > 0.7
    assert abs(np.angle(-np.exp(1j * draws).mean())) < 0.2  # 5 standard errors of 200 draws


@pytest.mark.slow
def test_a_chain_with_vague_priors_comes_to_the_mode():
    """The posterior's sd of the noise is .35; the prior's scale of its logarithm is 76."""
    rng, x = np.random.default_rng(1), np.linspace(0, 10, 30)
    y = 30 + 2 * x + rng.normal(0, 3, 30)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 1e4), pm.Normal("b", 0, 1e4)
        pm.Normal("y", a + b * x, pm.InverseGamma("s", 0.01, 0.01), observed=y)
        step = SurrogateHMCStep()
    assert step.target.scales[2] == LONGEST_LOG < step.target.scales[0]
    points, _, _ = models.run(step, model, 900, tune=750, seed=1)
    assert abs(np.exp(points[750:, 2].mean()) - 2.5) < 1.0


@pytest.mark.slow
@pytest.mark.numerics
def test_the_spike_of_a_centred_hierarchy_does_not_draw_the_surrogate_in():
    """The median of its draws is typical of the posterior, and steps are as large as there.

    In one chain of about twelve more than half of the draws lie in the spike. So two of five are
    asked for, and four have them there with probability 2e-4.
    """
    model, good = hierarchy(), 0
    step = SurrogateHMCStep(model=model)
    tune = step.default_tune_steps
    low, high = quantiles_of_the_log_spread([0.05, 0.95])
    for seed in range(1, 6):
        begin(step, seed, tune=tune)
        drive(step, model.initial_point(), tune, tune=tune)
        step.stop_tuning()
        learner = step.learner
        log_tau = learner.surrogate.to_points(learner.fitted.population)[:, 1]
        is_typical = low < np.median(log_tau) < high
        step_size = learner.fitted.integrator.step_size[0]
        good += is_typical and learner.acceptance > 0.5 and step_size > 0.05
        if good == 2:
            return
    pytest.fail(f"{good} of 5 chains are good")


def test_a_density_that_is_not_smooth_is_warned_of():
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=3)
        pm.Potential("rough", 12.0 * pt.sum(pt.sin(1e7 * x)))
    step = SurrogateHMCStep(model=model)
    begin(step, 3, tune=300)
    _, statistics, _ = drive(step, model.initial_point(), 320, tune=300)
    told = [s["warning"].message for s in statistics if "warning" in s]
    assert len([t for t in told if "does not follow the log density" in t]) == 1


def test_variables_of_two_precisions_are_asked_once_a_draw():
    with pm.Model() as model:
        single, double = pm.Normal("single", dtype="float32"), pm.Normal("double", shape=2)
        pm.Normal("y", single + double.sum(), 0.5, observed=1.0)
    step = SurrogateHMCStep(model=model)
    begin(step, 1, tune=60)
    _, statistics, _ = drive(step, model.initial_point(), 90, tune=60)
    assert [s["n_evals"] for s in statistics[61:]] == [1.0] * 29
    assert np.nanmedian(np.abs([s["surrogate_error"] for s in statistics[60:]])) < 0.5


def _estimated():
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        pm.Potential("noisy", estimated_loglikelihood(lambda x, rng: -(float(x) ** 2), x))
    return model


def made(model=None, **options):
    return SurrogateHMCStep(model=BANANA.model() if model is None else model, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: made(start="there"), ValueError, "start='there'"),
        (lambda: made(max_points=0), ValueError, "max_points"),
        (lambda: made(target_accept=1.5), ValueError, "target_accept"),
        (lambda: made(_estimated()), ValueError, r"noisy is an estimate.*pseudo_marginal"),
        (
            lambda: made(models.black_box()[0], gradients=True),
            NotImplementedError,
            r"no gradient .* x.* gradients=True",
        ),
        (
            lambda: made().proposal_covariance(np.zeros(2)),
            NotImplementedError,
            "trajectories",
        ),
    ],
)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_many_dimensions_are_warned_of(caplog):
    SurrogateHMCStep(model=CorrelatedGaussian(40).model())
    assert "40 dimensions" in caplog.text


def test_beside_a_step_that_moves_the_likelihood(caplog):
    """Not that longer tuning would help: which variables these are, and what to do."""
    with pm.Model() as model:
        change, x = pm.Normal("change"), pm.Normal("x")
        pm.Normal("y", x * change, 0.1, observed=1.0)
        step = SurrogateHMCStep([x], start="here")
    assert "depends on change too" in caplog.text and "marginalise" in caplog.text
    begin(step, 1, tune=20)
    point, told = model.initial_point(), []
    for i in range(24):
        if i == 20:
            step.learner.difference_share = 0.8  # as where differences take the chain further
            step.learner._judge = lambda: None
            step.stop_tuning()
        point, (statistics,) = step.step(point | {"change": np.array(np.sin(i))})
        told += [statistics["warning"].message] if "warning" in statistics else []
    _, message = step._complaint_of_acceptance()
    for words in ("depends on change too", "another step", "marginalise", "KameleonStep"):
        assert words in message
    assert "Tune longer" not in message
