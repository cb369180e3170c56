"""`store=` of every step that accepts and rejects: nothing that is known is evaluated again."""

import functools

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    ParallelTemperingStep,
    PCAKameleonStep,
    black_box,
)
from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood

WALKS = {
    "kameleon": KameleonStep,
    "fast": functools.partial(FastKameleonStep, n_features=20),
    "pca": PCAKameleonStep,
    "metropolis": AdaptiveMetropolisStep,
    "metropolis, from the mode": functools.partial(AdaptiveMetropolisStep, start="optimize"),
    "tempering": functools.partial(ParallelTemperingStep, n_temperatures=3, n_moves=2),
}


def counted():
    """A model of a black box, and the list of its calls."""
    calls = []

    @black_box(shape=())
    def log_likelihood(x):
        calls.append(x.copy())
        return -0.5 * float(np.sum((x - 1.0) ** 2))

    with pm.Model() as model:
        pm.Potential("likelihood", log_likelihood(pm.Normal("x", 0, 2, shape=2)))
    return model, calls


def differentiable():
    with pm.Model() as model:
        x = pm.Normal("x", 0, 2, shape=2)
        pm.Normal("y", x.sum(), 1.0, observed=1.0)
    return model


def estimated():
    def estimate(x, rng):
        return -0.5 * float(x**2) + 0.1 * rng.normal()

    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("estimate", estimated_loglikelihood(estimate, x))
    return model


@pytest.mark.parametrize("name", WALKS)
def test_a_run_that_is_repeated_calls_nothing(name):
    model, calls = counted()
    store, found = EvaluationStore(), []
    for stored in (None, store, store):
        step = WALKS[name](model=model, store=stored, steps_per_draw=3)
        calls.clear()
        points, statistics, _ = models.run(step, model, 60, tune=50, seed=3)
        found.append((points, len(calls), sum(s["n_evals"] for s in statistics)))
    (plain, _, _), (first, n_first, evals), (second, n_second, evals_again) = found
    assert n_first > 50 < evals
    assert n_second == evals_again == 0
    np.testing.assert_array_equal(second, first)
    np.testing.assert_array_equal(first, plain)


def test_gradients_are_kept_too():
    model, found = differentiable(), []
    store = EvaluationStore()
    for _ in range(2):
        step = MALAStep(model=model, store=store, steps_per_draw=2)
        points, statistics, _ = models.run(step, model, 40, tune=30, seed=3)
        found.append((points, sum(s["n_evals"] for s in statistics)))
    np.testing.assert_array_equal(found[1][0], found[0][0])
    assert found[0][1] > 50 and found[1][1] == 0


def test_a_store_of_estimates_is_refused():
    model = estimated()
    words = "store= with a likelihood that is an estimate"
    with pytest.raises(ValueError, match=words):
        KameleonStep(model=model, store=EvaluationStore(), pseudo_marginal=True)
    with pytest.warns(UserWarning, match="pseudo_marginal"), pytest.raises(ValueError, match=words):
        KameleonStep(model=model, store=EvaluationStore())
    with pytest.raises(ValueError, match="estimate"):
        ParallelTemperingStep(model=model, store=EvaluationStore())


def test_two_stores_are_refused():
    model, _ = counted()
    store = EvaluationStore()
    surrogate = GPSurrogate(store=store)
    with pytest.raises(ValueError, match=r"two stores.*GPSurrogate\(store=...\) alone"):
        AdaptiveMetropolisStep(model=model, surrogate=surrogate, store=EvaluationStore())
    same = AdaptiveMetropolisStep(model=model, surrogate=surrogate, store=store)
    assert same.stored.store is store
    with pytest.raises(TypeError, match="EvaluationStore"):
        KameleonStep(model=model, store="run.sqlite")


def test_a_part_of_a_model_is_not_tempered_with_a_store():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        x = pm.Normal("x", 0, scale)
        pm.Potential("likelihood", -0.5 * pt.sqr(x - 1))
    with pytest.raises(ValueError, match=r"another step moves scale"):
        ParallelTemperingStep([x], model=model, store=EvaluationStore())
