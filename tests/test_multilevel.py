"""Subchains on coarse models: exact whatever these are, and as few fine evaluations as promised."""

import functools

import models
import numpy as np
import pymc as pm
import pytest
from models import FALSE_ALARM, assert_mean, begin, drive, run, sample, values
from pymc.exceptions import SamplingError
from pymc.stats.convergence import SamplerWarning

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    KameleonStep,
    MultilevelStep,
    SurrogateHMCStep,
    black_box,
)
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.steps import multilevel
from pymc_kameleon.testing import invariance_p_values

METROPOLIS = functools.partial(
    AdaptiveMetropolisStep, covariance="identity", covariance_scaling=2.0
)


def banana(bend, wide=1.0, height=0.0, rough=0.0):
    """x[0] ~ N(0, 2), and x[1] - bend x[0]^2 ~ N(0, wide), from two improper priors."""

    def log_likelihood(x):
        away = (x[1] - bend * x[0] ** 2) / wide
        return height - x[0] ** 2 / 8.0 - 0.5 * away**2 + rough * np.sin(1e4 * x[0])

    with pm.Model() as model:
        x = pm.Flat("x", shape=2, initval=[0.1, 0.1])
        pm.Potential("p", black_box(log_likelihood, shape=())(x))
    return model


FINE, COARSE, COARSEST = banana(0.25), banana(0.0, 1.5), banana(-0.1, 2.5)


def exact(n, rng):
    first = rng.normal(0.0, 2.0, size=n)
    return np.column_stack([first, 0.25 * first**2 + rng.normal(size=n)])


def p_values(coarse, tune, n=900):
    """Chains from exact draws, compared with exact draws again; `tune` draws teach before."""
    rng = np.random.default_rng(5)
    step = MultilevelStep(
        coarse=coarse,
        step=METROPOLIS,
        subchain_length=3,
        steps_per_draw=15,
        model=FINE,
        start="here",
    )
    begin(step, 6, tune=tune)
    point = FINE.initial_point()
    if tune:
        _, _, point = drive(step, point, tune, tune=-1)
    step.stop_tuning()
    return invariance_p_values(
        step,
        exact(n, rng),
        exact(100_000, rng),
        {"bend": lambda x: x[:, 1] - 0.25 * x[:, 0] ** 2, "product": lambda x: x[:, 0] * x[:, 1]},
    )


ROWS = {
    "two levels": ([COARSE], 0),
    "three levels, differences learnt": ([COARSEST, COARSE], 3),
}


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("name", ROWS)
def test_a_frozen_step_is_invariant(name):
    found = p_values(*ROWS[name])
    assert min(found.values()) > FALSE_ALARM, found


def with_reverse_ratio(learner, chain):
    ratio = PROPOSE(learner, chain)
    return -ratio if ratio > -np.inf else ratio


PROPOSE = multilevel.MultilevelLearner.propose


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.sabotage
def test_a_wrong_ratio_is_caught(monkeypatch):
    monkeypatch.setattr(multilevel.MultilevelLearner, "propose", with_reverse_ratio)
    found = p_values(*ROWS["two levels"])
    assert min(found.values()) < FALSE_ALARM, found


@pytest.mark.parametrize("tune", [0, 30])
def test_acceptance_is_that_of_the_densities(tune):
    """Of three levels, the differences learnt or not, from the models' own log densities."""
    step = MultilevelStep(
        coarse=[COARSEST, COARSE], step=METROPOLIS, subchain_length=[3, 2], model=FINE
    )
    begin(step, 7, tune=tune)
    _, _, point = drive(step, FINE.initial_point(), max(tune, 1), tune=-1)
    step.stop_tuning()
    fine, coarse = FINE.compile_logp(), COARSE.compile_logp()
    learner, n_evaluated = step.learner, 0
    for _ in range(60):
        before = point
        point, (found,) = step.step(point)
        proposed = {"x": step.chain.proposal.copy()}
        if found["n_evals"] == 0.0:
            assert found["accept"] == 0.0
            continue
        n_evaluated += 1
        ratio = fine(proposed) - fine(before) + coarse(before) - coarse(proposed)
        ratio += learner.correction(before["x"]) - learner.correction(proposed["x"])
        np.testing.assert_allclose(found["accept"], np.exp(min(0.0, ratio)), rtol=1e-9)
    assert n_evaluated > 20


@pytest.mark.numerics
def test_what_was_learnt_is_the_difference():
    """Coarse models of a shifted mean: the corrected density is the fine one where the mass is."""
    rng = np.random.default_rng(8)
    step = MultilevelStep(coarse=[banana(0.1, 1.2, height=7.0)], model=FINE)
    run(step, FINE, 150, tune=149, seed=9)
    fine, coarse = FINE.compile_logp(), banana(0.1, 1.2).compile_logp()
    corrected = [
        [fine({"x": x}), coarse({"x": x}) + step.learner.correction(x)] for x in exact(300, rng)
    ]
    error = np.subtract(*np.transpose(corrected))
    assert np.quantile(np.abs(error - np.median(error)), 0.9) < 0.1


@pytest.mark.numerics
def test_posterior_and_counts():
    """Several variables with transforms; each model is asked as often as the statistics say."""
    calls = {"fine": 0, "coarse": 0}

    def model_of(name, slope):
        def log_likelihood(scale, interval):
            calls[name] += 1
            return slope * interval.sum() - scale

        with pm.Model() as model:
            scale, interval = pm.HalfNormal("scale", 2), pm.Uniform("interval", -1, 3, shape=2)
            pm.Potential("p", black_box(log_likelihood, shape=())(scale, interval))
        return model

    fine, coarse = model_of("fine", 0.0), model_of("coarse", 0.3)
    step = MultilevelStep(coarse=[coarse], model=fine)
    idata = sample(step, fine, draws=1200, tune=60, discard_tuned_samples=False)
    stats = [idata[group] for group in ("sample_stats", "warmup_sample_stats")]
    for name, statistic in (("fine", "n_evals"), ("coarse", "coarse_evals")):
        assert calls[name] == sum(float(part[statistic].sum()) for part in stats)
    assert stats[0]["n_evals"].values[0, 1:].max() <= 1.0
    first, *others = (stats[0]["coarse_evals"] - stats[0]["subchain_length"]).values[0]
    assert first > 1000.0 and max(others) <= 0.0  # the coarse model is tuned again at the end
    assert stats[0]["accept"].mean() > 0.6
    grid = np.linspace(1e-6, 20.0, 20_000)
    weights = np.exp(-(grid**2) / 8.0 - grid)
    assert_mean(values(idata, "scale"), np.average(grid, weights=weights), "scale")
    assert_mean(values(idata, "interval"), np.ones(2), "interval")


@pytest.mark.numerics
def test_a_poor_coarse_model_is_told():
    rough = banana(0.25, rough=40.0)
    found = run(MultilevelStep(coarse=[FINE], model=rough), rough, 42, tune=40)
    told = [s["warning"].message for s in found[1] if isinstance(s.get("warning"), SamplerWarning)]
    assert any("is a poor guide to it" in message for message in told), told


@pytest.mark.numerics
def test_moves_from_where_the_coarse_model_is_impossible_are_refused():
    """Nothing leads back there."""
    step = MultilevelStep(coarse=[banana(0.0)], model=FINE)
    run(step, FINE, 21, tune=20)
    step.learner.below.evaluator.into = lambda x, value: value.fill(-np.inf)
    point, (found,) = step.step({"x": np.array([9.0, 9.0])})
    assert found["accept"] == 0.0 and (point["x"] == 9.0).all()


@pytest.mark.numerics
def test_an_error_of_the_coarse_model_says_where():
    def fails(x):
        if x[0] > 2.0:
            raise RuntimeError("no solution")
        return 0.0

    with pm.Model() as coarse:
        pm.Potential("p", black_box(fails, shape=())(pm.Normal("x", [0.0, 5.0], shape=2)))
    fine = models.normal(2)[0]
    step = MultilevelStep(coarse=[coarse], model=fine)
    run(step, fine, 11, tune=10)
    with pytest.raises(RuntimeError, match="no solution") as raised:
        drive(step, fine.initial_point(), 500, tune=-1)
    at = step.chain.proposal
    assert at[0] > 2.0
    assert any(np.array2string(at) in note for note in raised.value.__notes__)


@pytest.mark.numerics
def test_an_impossible_start_of_a_coarse_model_is_said_to_be_its():
    with pm.Model() as coarse:
        pm.Potential("p", pm.math.switch(pm.Normal("x", shape=2).sum() > -1e9, -np.inf, 0.0))
    fine = models.normal(2)[0]
    with pytest.raises(SamplingError, match="A coarse model: Initial evaluation of x failed"):
        run(MultilevelStep(coarse=[coarse], model=fine), fine, 2, tune=1)


def test_data_of_all_levels_may_change():
    """The kept values of lower levels are those of the new data."""

    def with_data():
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("x", shape=2).sum(), pm.Data("sd", 1.0), observed=3.0)
        return model

    *coarse, fine = with_data(), with_data(), with_data()
    step = MultilevelStep(coarse=coarse, subchain_length=2, model=fine)
    _, _, point = run(step, fine, 10, tune=5)
    for model in (*coarse, fine):
        with model:
            pm.set_data({"sd": 0.05})
    for _ in range(20):
        before = point
        point, (found,) = step.step(point)
        if found["n_evals"] and step.chain.proposal.any():
            at = {"x": step.chain.proposal}, before
            logp, learner = fine.compile_logp(), step.learner
            ratio = learner.correction(before["x"]) - learner.correction(at[0]["x"])
            np.testing.assert_allclose(found["accept"], np.exp(min(0.0, ratio)), rtol=1e-8)
            assert np.isfinite([logp(one) for one in at]).all()


@pytest.mark.numerics
def test_a_failure_in_between_leaves_no_value_of_another_point():
    """The level below is put back after a rejection, and the call for that fails."""
    step = MultilevelStep(
        coarse=[COARSEST, COARSE], step=METROPOLIS, subchain_length=[3, 2], model=FINE
    )
    begin(step, 7, tune=5)
    _, _, point = drive(step, FINE.initial_point(), 6, tune=5)
    lowest = step.learner.below.learner.below
    coarsest = COARSEST.compile_logp()
    for _ in range(30):
        plain, calls = lowest.evaluator.into, []

        def fails_at_first(x, value, plain=plain, calls=calls):
            calls.append(x)
            if len(calls) == 1:
                raise KeyboardInterrupt
            plain(x, value)

        lowest.evaluator.into = fails_at_first
        try:
            step.step(point)
        except KeyboardInterrupt:
            pass
        lowest.evaluator.into = plain
        point, _ = step.step(point)
        x = lowest.chain.position.copy()
        expected = coarsest({"x": x}) + step.learner.below.learner.correction(x)
        np.testing.assert_allclose(lowest.chain.value.sum(), expected, rtol=1e-9)


def with_a_random_term():
    with pm.Model() as model:
        x = pm.Normal("x", shape=2)
        pm.Potential("p", estimated_loglikelihood(lambda x, rng: rng.normal(), x))
    return model


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"coarse": []}, ValueError, "at least one model"),
        ({"coarse": [3]}, TypeError, "pass PyMC models"),
        ({"coarse": [models.normal(2)[0]], "cost_ratio": [1, 2]}, ValueError, "cost_ratio has 2"),
        ({"coarse": [COARSE], "cost_ratio": 0}, ValueError, "cost_ratio"),
        ({"coarse": [COARSE], "subchain_length": 0}, ValueError, "subchain_length"),
        ({"coarse": [models.two_scales()]}, ValueError, "free variables a, b, and the fine"),
        ({"coarse": [models.normal(3)[0]]}, ValueError, r"x \(3,\), and the fine one has x \(2,\)"),
        ({"coarse": [COARSE], "step": SurrogateHMCStep}, TypeError, "no random walk"),
        ({"coarse": [COARSE], "step": lambda **options: None}, TypeError, "no random walk"),
        ({"coarse": [COARSE], "step": KameleonStep(model=COARSE)}, TypeError, "pass a class"),
        (
            {"coarse": [COARSE], "step": functools.partial(KameleonStep, adapt_after_tune=True)},
            ValueError,
            "never reversible",
        ),
        ({"coarse": [with_a_random_term()]}, ValueError, "is an estimate"),
        ({"coarse": [COARSE], "surrogate": None}, TypeError, "no argument of MultilevelStep"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        MultilevelStep(model=FINE, **options)


def test_all_variables_are_moved_together():
    model = models.two_scales()
    with pytest.raises(ValueError, match="another step would move it"):
        MultilevelStep(["a"], coarse=[model], model=model)


def test_lengths_are_those_that_bring_most():
    """Of a chain whose autocorrelation is r^k: the largest of (1 - r^k) / (1 + cost k)."""
    rng, r = np.random.default_rng(1), 0.9
    chain = np.zeros((100_000, 1))
    for i, z in enumerate(rng.normal(size=len(chain) - 1)):
        chain[i + 1] = r * chain[i] + z
    k = np.arange(1, 200)
    for cost in (1.0, 0.1, 0.01):
        best = k[np.argmax((1.0 - r**k) / (1.0 + cost * k))]
        found = multilevel.best_length(chain, cost)
        assert 0.6 * best <= found <= 1.7 * best
