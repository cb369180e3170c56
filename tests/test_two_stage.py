"""A first stage leaves the target invariant, learns in the right order, and saves evaluations."""

import pickle
import sys

import models
import numpy as np
import pymc as pm
import pytest
from models import drive, sample, values
from scipy import stats
from surrogates import TARGET, banana_with_likelihood, fitted, learn_all, log_likelihood

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
)
from pymc_kameleon.gp.sparse_gp import predict
from pymc_kameleon.mcmc.chain import evaluate
from pymc_kameleon.surrogate import FittedSurrogate
from pymc_kameleon.surrogate.acceptance_ratios import log_marginal_density
from pymc_kameleon.surrogate.delayed_acceptance import (
    PASSED,
    accept_with_gradients,
    predict_into,
)
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = pytest.mark.numerics

BOUND = 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("make", [KameleonStep, MALAStep])
def test_the_surrogate_here_is_that_of_the_present_position(make):
    """While learning and after it, and whichever kind of move was accepted last."""
    model = logistic()
    step = make(
        model=model,
        rng=5,
        surrogate=GPSurrogate(max_points=60, one_stage_share=0.3),
        steps_per_draw=3,
    )
    point, checked = model.initial_point(), 0
    for i in range(600):
        if i == 400:
            step.stop_tuning()
        point, _ = step.step(point)
        stage = step.stage
        if stage.is_current[0]:
            if make is MALAStep:
                predict_into(stage.process, step.chain.position, stage.there)
                here, fresh = stage.here.moments, stage.there.moments
            else:
                here, fresh = stage.here.moments, predict(stage.process, step.chain.position)
            np.testing.assert_allclose(here, fresh, rtol=1e-8, atol=1e-8)
            checked += 1
    assert checked > 100


@pytest.mark.slow
def test_gp_mala_is_invariant_with_a_frozen_surrogate():
    """What it learns while tuning on one chain is then frozen, and the chain moves.

    The prior is as narrow as a move is long, so that a ratio with the prior of the wrong end shows.
    """
    rng = np.random.default_rng(41)
    step = MALAStep(
        model=banana_with_likelihood(prior_sd=3.0),
        surrogate=GPSurrogate(max_points=90),
        steps_per_draw=100,
        rng=rng,
    )
    point = {"x": TARGET.draw(1, rng)[0]}
    point, _ = driven(step, 10, point)
    step.stop_tuning()
    assert step.stage.is_open[0]
    _, statistics = driven(step, 10, point)
    assert np.mean([s["accepted"] for s in statistics]) > 0.05
    found = invariance_p_values(
        step,
        TARGET.draw(1500, rng),
        TARGET.draw(100_000, rng),
        {"quantile statistic": TARGET.quantile_statistic},
    )
    assert min(found.values()) > BOUND, found


def test_the_first_stage_of_gp_mala_is_that_of_both_ends():
    """Prior and prediction of each end make its density; the way back has one over the ratio."""
    rng = np.random.default_rng(43)
    step = MALAStep(model=banana_with_likelihood(prior_sd=3.0), surrogate=GPSurrogate(), rng=rng)
    point = {"x": TARGET.draw(1, rng)[0]}
    driven(step, 400, point)
    stage, chain = step.screening.stage_for_loop(step.stage, step.chain, False, False), step.chain
    for start in TARGET.draw(10, rng):
        passed, densities = [], []
        for ends in (start, start + 0.5), (start + 0.5, start):
            chain.position[:], chain.proposal[:] = ends
            evaluate(stage.log_prior, chain.position, chain.value[:5], stage.counts)
            stage.is_current[0], before = False, stage.outcome[PASSED]
            accept_with_gradients(stage, None, chain, np.eye(2), 0.3, np.ones(3))
            passed.append(stage.outcome[PASSED] - before)
            values, here = chain.value, stage.here
            moments = (*here.moments, here.gradient_mean, here.cross_covariance)
            moments = (*moments, here.gradient_covariance)
            densities.append(
                log_marginal_density(*ends, values[0], values[3:5], *moments, 0.3, np.eye(2))
            )
        ratio = densities[1] - densities[0]
        np.testing.assert_allclose(np.log(passed), [min(0, ratio), min(0, -ratio)], atol=1e-9)


def driven(step, n, point):
    _, statistics, point = drive(step, point, n, tune=-1)
    return point, statistics


def logistic(n=60):
    rng = np.random.default_rng(1)
    covariates = rng.normal(size=(n, 3))
    observed = rng.random(n) < 1 / (1 + np.exp(-covariates @ [1.0, -1.0, 0.5]))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 3, shape=3)
        pm.Bernoulli("y", logit_p=pm.math.dot(covariates, beta), observed=observed)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [KameleonStep, AdaptiveMetropolisStep, MALAStep])
def test_evaluations_are_saved_and_the_posterior_is_the_same(make):
    model = logistic()
    plain = make(model=model, rng=2, steps_per_draw=10)
    asked = make(model=model, rng=2, steps_per_draw=10, surrogate=GPSurrogate(max_points=120))
    results = []
    for step in (plain, asked):
        point, _ = driven(step, 300, model.initial_point())
        step.stop_tuning()
        results.append(drive(step, point, 1500, tune=-1)[:2])
    (expected, _), (found, statistics) = results
    n_evals = sum(s["n_evals"] for s in statistics)
    accepted = 10 * sum(s["accepted"] for s in statistics)
    assert accepted <= n_evals < 0.75 * 15_000
    assert n_evals < 1.15 * accepted + 0.06 * 15_000
    assert 0 < np.nanmean([s["surrogate_accept"] for s in statistics]) < 1
    assert all(s["n_points"] == statistics[0]["n_points"] > 10 for s in statistics)
    for j in range(3):
        # 30 batches each; |t| > 7 with 58 degrees of freedom has probability 3e-9.
        batches = [d[:, j].reshape(30, -1).mean(axis=1) for d in (expected, found)]
        assert abs(stats.ttest_ind(*batches).statistic) < 7


def test_a_chain_leaves_what_it_has_learnt_for_what_is_better():
    """Four points far from the mass: all else is unknown, and promised e^450 times as much."""
    surrogate = GPSurrogate(mean="constant", max_points=4, one_stage_share=0.0)
    start, process = np.array([0.0, -25.0]), surrogate.new_process(2)
    points = start + 0.1 * np.random.default_rng(51).normal(size=(4, 2))
    values = log_likelihood(points)
    learn_all(process, points, values, np.log([30.0, 0.1, 0.1]))
    step = AdaptiveMetropolisStep(
        model=banana_with_likelihood(),
        surrogate=FittedSurrogate(surrogate, process, points, values),
        covariance="identity",
        covariance_scaling=2.0,
        learn_scaling=False,
    )
    step = frozen(step, 52)
    _, statistics = driven(step, 200, {"x": points[0]})
    assert np.mean([s["accept"] for s in statistics[:20]]) > 0.05
    assert step.chain.value[1] > log_likelihood(start[None])[0] + 50


def test_without_a_surrogate_there_is_nothing_of_one():
    step = AdaptiveMetropolisStep(model=logistic())
    _, statistics = driven(step, 1, logistic().initial_point())
    assert "surrogate_accept" not in {*statistics[0], *step.stats_dtypes_shapes}
    assert not {"prior", "with_gradients"} & {*vars(step.target)}


def test_the_surrogate_is_frozen_after_tuning_unless_asked():
    model = logistic()
    for adapts in (False, True):
        step = AdaptiveMetropolisStep(
            model=model, rng=3, surrogate=GPSurrogate(), adapt_after_tune=adapts
        )
        point, _ = driven(step, 300, model.initial_point())
        step.stop_tuning()
        before, count = step.stage.process.weights.copy(), step.stage.count[0]
        driven(step, 200, point)
        assert (step.stage.count[0] > count) == adapts
        assert np.array_equal(before, step.stage.process.weights) != adapts


def without_likelihood():
    with pm.Model() as model:
        pm.Normal("x")
    return model


def of_two():
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Normal("y", a + b, 1.0, observed=[1.0, 2.0])
    return model


def black_box():
    return models.black_box()[0]


ASKED, FEW = {"surrogate": GPSurrogate()}, {"surrogate": GPSurrogate(max_points=4)}
OF_THE_BANANA = {"surrogate": fitted(20, np.random.default_rng(1))}
FOLLOWING = {"surrogate": GPSurrogate(mean="current")}
METROPOLIS = AdaptiveMetropolisStep


@pytest.mark.parametrize(
    ("make", "build", "options", "error", "words"),
    [
        (METROPOLIS, without_likelihood, ASKED, ValueError, "observed.*potential"),
        (METROPOLIS, of_two, ASKED | {"vars": ["a"]}, ValueError, r"b.*vars=\[a, b\]"),
        (METROPOLIS, logistic, FEW, ValueError, "max_points=4.*beta"),
        (MALAStep, logistic, FEW, ValueError, "max_points=4.*beta"),
        (METROPOLIS, logistic, {"surrogate": True}, TypeError, "GPSurrogate"),
        (METROPOLIS, logistic, OF_THE_BANANA, ValueError, "2 dimensions.*3"),
        (MALAStep, logistic, OF_THE_BANANA, TypeError, r"GPSurrogate\(\.\.\.\)"),
        (MALAStep, logistic, FOLLOWING, ValueError, "current"),
        (MALAStep, black_box, {}, NotImplementedError, "BlackBox.*KameleonStep"),
        (MALAStep, black_box, ASKED, NotImplementedError, "BlackBox.*KameleonStep"),
    ],
)
def test_what_is_refused(make, build, options, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        make(model=build(), **options)


def test_a_prior_that_other_steps_move_is_no_likelihood():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        a = pm.Normal("a", 0, scale)
        pm.Normal("y", a, 1.0, observed=[1.0, 2.0])
    AdaptiveMetropolisStep(model=model, vars=[a], surrogate=GPSurrogate())


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tune"), [(AdaptiveMetropolisStep, 200), (MALAStep, 60)])
def test_state_goes_on_where_it_was(make, tune):
    model = logistic()
    one, other = (
        make(model=model, rng=seed, surrogate=GPSurrogate(max_points=80)) for seed in (1, 2)
    )
    point, _ = driven(one, tune, model.initial_point())
    other.sampling_state = pickle.loads(pickle.dumps(one.sampling_state))
    expected, found = (drive(step, point, 60, tune=-1)[:2] for step in (one, other))
    np.testing.assert_array_equal(found[0], expected[0])
    assert [s["n_points"] for s in found[1]] == [s["n_points"] for s in expected[1]]


@pytest.mark.slow
def test_chains_are_the_same_in_other_processes():
    chains, model = [], logistic()
    for cores in (1, 2):
        step = AdaptiveMetropolisStep(
            model=model, surrogate=GPSurrogate(), compile_kwargs={"mode": "cvm"}
        )
        result = sample(step, model, chains=2, cores=cores, draws=60, tune=150)
        chains.append(values(result, "beta"))
    np.testing.assert_array_equal(*chains)


def warnings_of(step, tune, draws, point):
    point, _ = driven(step, tune, point)
    step.stop_tuning()
    _, statistics = driven(step, draws, point)
    return [s["warning"].message for s in statistics if "warning" in s]


def test_a_surrogate_that_was_never_fitted_says_so_once():
    model = logistic()
    step = AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate(), rng=1, steps_per_draw=1)
    told = warnings_of(step, 5, 300, model.initial_point())
    assert sum("never fitted" in message for message in told) == 1


def test_a_surrogate_that_saves_nothing_says_so_once():
    surrogate = GPSurrogate(mean="constant", max_points=4)
    process = surrogate.new_process(2)
    far = 1e3 + np.arange(6.0).reshape(3, 2)
    learn_all(process, far, np.zeros(3), np.zeros(3))
    step = AdaptiveMetropolisStep(
        model=banana_with_likelihood(),
        surrogate=FittedSurrogate(surrogate, process, far, np.zeros(3)),
        covariance="identity",
        covariance_scaling=1e-4,
        learn_scaling=False,
        rng=1,
        steps_per_draw=20,
    )
    step.setup_chain(np.random.default_rng(1), 0, 1)
    told = warnings_of(step, 0, 100, {"x": np.array([0.0, -10.0])})
    assert sum("saves nothing" in message for message in told) == 1


def test_progress_columns_count_the_calls(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    # PyMC 5 keeps the stream that was there when it was imported.
    monkeypatch.setattr("pymc.progress_bar.rich_progress.stderr", sys.stderr, raising=False)
    model = logistic()
    step = AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate())
    sample(step, model, draws=60, tune=100, progressbar=True)
    captured = capsys.readouterr()
    for column in ("Calls", "Saved"):
        assert column in captured.out + captured.err
