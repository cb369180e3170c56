"""Tuning that begins with a search for the mode: `start="optimize"` of the Metropolis steps."""

import functools

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import begin, drive, sample, values

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    SurrogateHMCStep,
)
from pymc_kameleon.gp.typical_set import around_the_mode
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.targets import Banana, CorrelatedGaussian

pytestmark = pytest.mark.numerics

each_way = pytest.mark.parametrize("make", [KameleonStep, MALAStep], ids=["values", "gradients"])

SURROGATES = [None, GPSurrogate()]
with_and_without = pytest.mark.parametrize("surrogate", SURROGATES, ids=["alone", "surrogate"])


@functools.cache
def banana(dim):
    target = Banana(0.1, dim=dim)
    return target, target.model()


def first_draw(step, point, seed=0, tune=100):
    """The point after it, and its statistics."""
    begin(step, seed, tune)
    points, statistics, _ = drive(step, point, 1, tune=1)
    return points[0], statistics[0]


# the Gaussian at the mode -------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_the_quadratic_of_a_gaussian_is_that_gaussian(dim):
    rng = np.random.default_rng(dim)
    root = np.tril(rng.normal(size=(dim, dim))) + 2.0 * np.eye(dim)
    mean = rng.normal(size=dim)
    points = mean + 2.0 * rng.normal(size=(4 * (dim + 1) ** 2, dim))
    values = -0.5 * np.sum(np.linalg.solve(root, (points - mean).T) ** 2, axis=0)
    values[0] = -np.inf
    found = around_the_mode(points, values)
    np.testing.assert_allclose(found.location, mean, atol=1e-4)
    np.testing.assert_allclose(found.factor @ found.factor.T, root @ root.T, rtol=1e-3, atol=1e-3)


# evaluations --------------------------------------------------------------------------------------


@with_and_without
def test_every_call_of_the_model_is_counted(surrogate):
    model, operation = models.black_box()
    step = KameleonStep(model=model, start="optimize", surrogate=surrogate, steps_per_draw=5)
    begin(step, 1, tune=10)
    before = operation.calls
    _, statistics, _ = drive(step, model.initial_point(), 10, tune=-1)
    n_evals = [s["n_evals"] for s in statistics]
    assert operation.calls - before == sum(n_evals)
    assert 10 < n_evals[0] <= 1 + 140 + 5 + 5
    assert max(n_evals[1:]) <= 5


def test_those_that_are_not_finite_are_counted():
    def half(x):
        return np.nan if x[0] < 0 else -0.5 * float(np.sum((x - 0.5) ** 2))

    model, operation = models.black_box(function=half)
    point = {"x": np.array([0.01, 3.0])}
    step = AdaptiveMetropolisStep(model=model, start="optimize", steps_per_draw=1)
    nonfinite = []
    original, function = operation.calls, operation.function
    operation.function = lambda x: nonfinite.append(x[0] < 0) or function(x)
    position, statistics = first_draw(step, point, seed=2)
    assert statistics["n_evals"] == len(nonfinite) == operation.calls - original
    assert statistics["n_nonfinite"] == sum(nonfinite) > 0
    assert position[0] >= 0


@pytest.mark.slow
@each_way
def test_the_first_stage_learns_from_the_search(make):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 3, shape=2)
        bent = pt.stack([x[0], x[1] + x[0] ** 2])  # with gradients a straight one takes three steps
        pm.Normal("y", bent, 0.1, observed=[2.0, 2.0])
    step = make(model=model, start="optimize", surrogate=GPSurrogate(), steps_per_draw=1)
    begin(step, 3)
    _, statistics = step.step(model.initial_point())
    stage = step.stage
    assert stage.is_open[0]
    assert stage.count[0] > 10
    assert statistics[0]["n_points"] > 10
    assert statistics[0]["n_evals"] >= stage.count[0]
    log_prior = -0.5 * np.sum(stage.points**2, axis=1) / 9 - 2 * np.log(3 * np.sqrt(2 * np.pi))
    known = stage.points[: min(stage.count[0], len(stage.points))]
    for point, value, prior in zip(known, stage.values, log_prior, strict=False):
        np.testing.assert_allclose(value + prior, step.target(point)[:3].sum(), rtol=1e-6)


# where the chain is put ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dim"),
    # The search is one for all steps without gradients.
    [(KameleonStep, 1), (KameleonStep, 2), (AdaptiveMetropolisStep, 8), (MALAStep, 8)],
)
def test_from_afar_the_first_draw_is_in_the_typical_set(make, dim):
    """The log density of a Gaussian of d dimensions varies by d/2; here 20 + 3 d are allowed.

    Of searches without a gradient on the banana one in eight ends in a bend of its ridge: the
    median of nine does with probability 2e-3.
    """
    target = CorrelatedGaussian(dim) if dim in (1, 20) else Banana(0.1, dim=dim)
    model = target.model()
    step = make(model=model, start="optimize", steps_per_draw=20)
    typical = target.log_density(target.draw(1000, np.random.default_rng(5)))
    may_end_early = make is AdaptiveMetropolisStep
    starts = target.draw(9 if may_end_early else 3, np.random.default_rng(4))
    starts += 30.0 * (-1.0) ** np.arange(dim)
    ends = np.array([first_draw(step, {"x": far}, k)[0] for k, far in enumerate(starts)])
    found = (np.median if may_end_early else np.min)(target.log_density(ends))
    assert found > typical.max() - 20 - 3 * dim


@each_way
def test_chains_of_one_start_lie_as_far_apart_as_the_posterior(make):
    """Means of 20 chi-square numbers with one degree of freedom, times up to 1.5 squared."""
    model, mean, sd = models.normal(3)
    step = make(model=model, start="optimize", steps_per_draw=1)
    ends = np.array([first_draw(step, model.initial_point(), seed)[0] for seed in range(20)])
    size = np.mean(((ends - mean) / sd) ** 2, axis=0)
    assert np.all((size > 0.5) & (size < 8.0)), size


@pytest.mark.parametrize("make", [AdaptiveMetropolisStep, SurrogateHMCStep])
def test_the_search_begins_where_the_user_said(make):
    seen = []

    def two_modes(x):
        seen.append(np.array(x))
        return float(np.logaddexp(*(-0.5 * np.sum((x - m) ** 2) for m in (-20.0, 20.0))))

    with pm.Model() as model:
        pm.Potential("simulator", models.BlackBox(two_modes)(pm.Flat("x", shape=2)))
    step = make(model=model, start="optimize", steps_per_draw=1)
    for start in (-17.0, 17.0):
        seen.clear()
        position, _ = first_draw(step, {"x": np.full(2, start)})
        np.testing.assert_array_equal(seen[0], np.full(2, start))
        assert np.all(np.sign(position) == np.sign(start))


@pytest.mark.parametrize("outside", [np.nan, np.inf, -np.inf])
@each_way
def test_a_region_without_density_is_left_out(make, outside):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=2, initval=np.ones(2))
        pm.Potential("half", pt.switch(x[0] < 0, outside, 0.0))
    step = make(model=model, start="optimize", steps_per_draw=5)
    for seed in range(5):
        position, _ = first_draw(step, model.initial_point(), seed)
        assert position[0] >= 0
        assert np.all(np.abs(position) < 8)


def test_a_needle_is_not_left():
    step = KameleonStep(model=models.needle(), start="optimize", steps_per_draw=1, disperse=False)
    position, statistics = first_draw(step, models.needle().initial_point())
    assert position == 0.0
    assert np.isfinite(statistics["accept"])


# when there is no search --------------------------------------------------------------------------


@each_way
def test_there_is_no_search_without_tuning_after_a_warm_start_nor_by_default(make):
    target, model = banana(2)
    chains = []
    for choice in ("here", "optimize"):
        step = begin(make(model=model, start=choice, steps_per_draw=3), 6, tune=0)
        chains.append(drive(step, {"x": np.array([5.0, 5.0])}, 5, tune=0))
    np.testing.assert_array_equal(chains[0][0], chains[1][0])
    assert chains[1][1][0]["n_evals"] <= 4
    draws = target.draw(100, np.random.default_rng(7))
    for options in ({"start": "optimize", "warm_start": draws}, {}):
        step = make(model=model, steps_per_draw=3, **options)
        _, statistics = first_draw(step, {"x": draws[0]})
        assert statistics["n_evals"] <= 4


def test_a_covariance_that_was_given_is_where_learning_begins():
    _, model = banana(2)
    given = np.array([[4.0, 1.0], [1.0, 2.0]])
    options = {"initial_covariance": given}, {"covariance": given}
    for option in options:
        step = AdaptiveMetropolisStep(
            model=model, start="optimize", learn_scaling=False, steps_per_draw=1, **option
        )
        begin(step)
        step.arrive(np.ones(2))
        factor = step.learner.moments.factor
        np.testing.assert_allclose(factor @ factor.T, given)


# what is refused ----------------------------------------------------------------------------------


@each_way
def test_other_starts_are_refused(make):
    for value in ("there", None, 1, True):
        with pytest.raises(ValueError, match=rf"start={value!r}: take 'here' or 'optimize'"):
            make(model=banana(2)[1], start=value)


def test_estimates_are_refused():
    noisy, _ = models.black_box(noise=0.5)
    with pm.Model() as seeded:
        x = pm.Normal("x", 0, 1)
        pm.Potential("noisy", estimated_loglikelihood(lambda x, rng: -(float(x) ** 2), x))
    for model, options in (
        (noisy, {"pseudo_marginal": True}),
        (seeded, {"pseudo_marginal": True}),
        (seeded, {}),
    ):
        with pytest.raises(ValueError, match='Write start="here"'):
            KameleonStep(model=model, start="optimize", **options)


# in PyMC ------------------------------------------------------------------------------------------


@each_way
def test_draws_are_right(make):
    model, mean, sd = models.normal(2)
    step = make(model=model, start="optimize", steps_per_draw=10)
    idata = sample(step, model, draws=1500, tune=200)
    models.assert_moments(values(idata, "x"), mean, sd)


def test_a_state_goes_on_without_another_search():
    _, model = banana(2)
    step, other = (KameleonStep(model=model, start="optimize", steps_per_draw=5) for _ in range(2))
    begin(step, 9)
    _, _, point = drive(step, model.initial_point(), 5, tune=100)
    other.sampling_state = step.sampling_state
    expected, found = (drive(s, point, 5, tune=100) for s in (step, other))
    np.testing.assert_array_equal(expected[0], found[0])
    assert max(statistics["n_evals"] for statistics in found[1]) <= 5
