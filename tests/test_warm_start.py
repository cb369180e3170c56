"""Starting from an earlier run: what is learnt from its points, at every chain start."""

import models
import numpy as np
import pymc as pm
import pytest
from conftest import METROPOLIS_HASTINGS, STEPS
from models import assert_moments, run, sample, values
from pymc.backends.base import MultiTrace
from pymc.distributions.transforms import ordered

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep


@pytest.fixture(scope="module")
def model():
    return models.correlated()


@pytest.fixture(scope="module")
def exact_draws():
    rng = np.random.default_rng(1)
    return rng.multivariate_normal(models.CORRELATED_MEAN, models.CORRELATED_COVARIANCE, size=2000)


WARM = [name for name in METROPOLIS_HASTINGS if name != "parallel_tempering"]
"""Steps that take draws to begin with."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kameleon", "result"),
        pytest.param("surrogate_hmc", "draws", marks=pytest.mark.numerics),
        pytest.param("multilevel", "draws", marks=pytest.mark.numerics),
    ],
)
def test_frozen_from_the_start_with_right_moments(name, source, model, exact_draws):
    """A result is of the installed generation of PyMC and ArviZ, whichever it is."""
    make_step, options = STEPS[name].make, {"model": model, "steps_per_draw": 10}
    if source == "result":
        exact_draws = sample(make_step(**options), model, draws=500, tune=300)
    step = make_step(warm_start=exact_draws, **options)
    idata = sample(step, model, draws=1500, tune=0, initvals={"x": models.CORRELATED_MEAN})
    draws = values(idata, "x")
    sd = np.sqrt(np.diag(models.CORRELATED_COVARIANCE))
    assert_moments(draws, models.CORRELATED_MEAN, sd, "correlated")
    difference = draws[..., 0] - draws[..., 1]
    assert_moments(difference, 3.0, np.sqrt(0.2), "difference of the correlated pair")
    assert np.ptp(values(idata, STEPS[name].constant, "sample_stats")) == 0


def test_points_are_those_of_the_result(model):
    """Of a result, not of a trace."""
    metropolis = pm.Metropolis(model=model)
    idata = sample(metropolis, model, chains=2, draws=40, tune=10)
    step = AdaptiveMetropolisStep(model=model, warm_start=idata)
    np.testing.assert_allclose(step.warm.points, values(idata, "x").reshape(-1, 3))
    trace = sample(metropolis, model, draws=5, tune=5, return_inferencedata=False)
    assert isinstance(trace, MultiTrace)
    with pytest.raises(TypeError, match=r"warm_start=.*MultiTrace"):
        AdaptiveMetropolisStep(model=model, warm_start=trace)


def test_arrays_of_two_and_three_dimensions(make_each_way, model, exact_draws):
    flat = make_each_way(model=model, warm_start=exact_draws)
    chains = make_each_way(model=model, warm_start=exact_draws.reshape(4, 500, 3))
    np.testing.assert_array_equal(flat.warm.points, chains.warm.points)
    first, _, _ = run(flat, model, 50, tune=20)
    second, _, _ = run(chains, model, 50, tune=20)
    np.testing.assert_array_equal(first, second)


def test_what_is_learnt(model, exact_draws):
    metropolis = AdaptiveMetropolisStep(model=model, warm_start=exact_draws)
    run(metropolis, model, 1)
    factor = metropolis.learner.moments.factor
    np.testing.assert_allclose(factor @ factor.T, np.cov(exact_draws.T), rtol=0.05, atol=0.1)
    kameleon = KameleonStep(model=model, warm_start=exact_draws, n_subsample=300)
    run(kameleon, model, 1)
    assert kameleon.learner.learnt.points.shape == (3, 300)
    whitened = kameleon.learner.learnt.points
    np.testing.assert_allclose(np.cov(whitened), np.eye(3), atol=0.5)


def test_learnt_anew_at_every_chain_and_not_changed(make_each_way, model, exact_draws):
    given = exact_draws.copy()
    step = make_each_way(model=model, warm_start=given)
    both = values(sample(step, model, chains=2, draws=30, tune=30), "x")
    again = values(sample(step, model, chains=2, draws=30, tune=30), "x")
    np.testing.assert_array_equal(both, again)
    run(step, model, 300, tune=200)
    np.testing.assert_array_equal(exact_draws, given)


def transformed():
    with pm.Model() as model:
        pm.HalfNormal("scale", 2)
        pm.Dirichlet("simplex", np.array([2.0, 3.0, 4.0]))
        low = pm.Normal("low", 0, 1)
        pm.Uniform("interval", low, 3 + pm.math.abs(low))
        pm.Normal("levels", 0, 1, shape=3, transform=ordered, initval=np.array([-1.0, 0.0, 1.0]))
        pm.Normal("matrix", 0, 1, shape=(2, 2))
    return model


def test_transforms():
    """Draws in natural space become the step's raveled coordinates."""
    model = transformed()
    step = AdaptiveMetropolisStep(model=model, compile_kwargs={"mode": "FAST_COMPILE"})
    points, _, _ = run(step, model, 30, tune=20)
    idata = sample(step, model, draws=30, tune=20)
    warm = AdaptiveMetropolisStep(
        model=model, warm_start=idata, compile_kwargs={"mode": "FAST_COMPILE"}
    )
    assert warm.warm.points.shape == (30, points.shape[1])
    at = {rv.name: values(idata, rv.name)[0] for rv in model.free_RVs}
    ends = np.cumsum([np.size(model.initial_point()[v.name]) for v in model.value_vars])[:-1]
    parts = np.split(warm.warm.points, ends, axis=1)
    found = {v.name: part for v, part in zip(model.value_vars, parts, strict=True)}
    np.testing.assert_allclose(found["scale_log__"][:, 0], np.log(at["scale"]))
    upper = 3 + np.abs(at["low"])
    logit = np.log(at["interval"] - at["low"]) - np.log(upper - at["interval"])
    np.testing.assert_allclose(found["interval_interval__"][:, 0], logit)
    log_simplex = np.log(at["simplex"])
    centred = log_simplex - log_simplex.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found["simplex_simplex__"], centred[:, :-1])
    levels = np.column_stack([at["levels"][:, 0], np.log(np.diff(at["levels"]))])
    np.testing.assert_allclose(found["levels_ordered__"], levels)


def test_some_of_the_variables(make_each_way):
    model = models.two_scales()
    idata = sample(pm.Metropolis(model=model), model, draws=40, tune=10)
    step = make_each_way([model["b"]], model=model, warm_start=idata)
    np.testing.assert_allclose(np.sort(step.warm.points[:, 0]), np.sort(values(idata, "b").ravel()))


@pytest.mark.parametrize("name", WARM)
def test_few_and_repeated_points(name, model):
    """A short or stuck earlier run is a poor teacher, and still a valid one."""
    for points in (np.ones((2, 3)), np.arange(6.0).reshape(2, 3), np.ones((50, 3))):
        step = STEPS[name].make(model=model, warm_start=points)
        draws, statistics, _ = run(step, model, 60, tune=30)
        assert np.all(np.isfinite(draws))
        assert all(np.isfinite(s[STEPS[name].constant]) for s in statistics)


def test_points_that_are_left_out(make_each_way, model, exact_draws):
    """Those that are not finite, and of many all but some, thinned evenly from first to last.

    Nor is there a hint about short tuning.
    """
    spoiled = np.tile(exact_draws, (10, 1))
    spoiled[3] = np.nan
    step = make_each_way(model=model, warm_start=spoiled)
    assert np.all(np.isfinite(step.warm.points))
    assert 2 < len(step.warm.points) <= 10_000
    np.testing.assert_array_equal(step.warm.points[[0, -1]], spoiled[[0, -1]])
    points, statistics, _ = run(step, model, 60, tune=0)
    assert np.all(np.isfinite(points))
    assert not [s for s in statistics if "warning" in s]
