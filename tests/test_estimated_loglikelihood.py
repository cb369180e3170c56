"""Estimates of a likelihood as terms of a model: seeds, kept estimates, warnings."""

import re

import models
import numpy as np
import pymc as pm
import pytest
from pymc.stats.convergence import WarningType
from pymc.step_methods.compound import CompoundStep
from scipy import stats

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    ParallelTemperingStep,
    SurrogateHMCStep,
)
from pymc_kameleon.diagnostics import efficiency_table
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.steps.chain.kept_estimate import N_FRESH, UNMOVED


class NormalEstimate:
    """N(1 | x, I) times log-normal noise with mean one; counts its calls, keeps its arguments."""

    def __init__(self, noise=1.0):
        self.noise, self.calls, self.last = noise, 0, None

    def __call__(self, x, *rest):
        self.calls += 1
        self.last = (x, *rest)
        noise = self.noise * rest[-1].standard_normal() - 0.5 * self.noise**2
        return -0.5 * np.sum((x - 1.0) ** 2) + noise


def noisy_normal(noise=1.0, shape=(), n_samples=None):
    """x ~ N(0, I) with that likelihood: the posterior is N(0.5, 0.5) in each dimension."""
    estimate = NormalEstimate(noise)
    with pm.Model() as model:
        x = pm.Normal("x", shape=shape)
        term = estimated_loglikelihood(estimate, x, n_samples=n_samples)
        pm.Potential("loglike", term)
        pm.Deterministic("seen", term)
    return model, estimate


def one_term(fn, **options):
    """x ~ N(0, 1) with the estimate `fn`."""
    with pm.Model() as model:
        pm.Potential("loglike", estimated_loglikelihood(fn, pm.Normal("x", **options)))
    return model


def noisy_step(model, make=AdaptiveMetropolisStep, **options):
    with model:
        return make(pseudo_marginal=True, **options)


def messages(statistics):
    """Warnings in the statistics of a chain, of the first step in a compound."""
    first = [s[0] if isinstance(s, list) else s for s in statistics]
    return [s["warning"].message for s in first if s.get("warning") is not None]


def impossible_at_times(x, rng):
    """N(1 | x, 1) with probability 0.8, times 1.25, and else zero."""
    return -0.5 * float((x - 1.0) ** 2) - np.log(0.8) if rng.random() < 0.8 else -np.inf


# the operation ------------------------------------------------------------------------------------


def test_evaluations_without_a_step_see_one_fixed_surface():
    model, estimate = noisy_normal()
    logp = model.compile_logp()
    point = model.initial_point()
    assert logp(point) == logp(point)
    assert estimate.calls == 2


@pytest.mark.numerics
def test_a_new_seed_is_a_new_estimate():
    model, _ = noisy_normal(noise=2.0)
    target = LogDensity(model, separate_estimates=True)
    x, rng, values = np.array([0.3]), np.random.default_rng(1), []
    for _ in range(2000):
        target.redraw_estimates(rng)
        values.append(target(x)[2])
    noise = np.array(values) + 0.5 * 0.7**2 + 2.0
    assert len(set(values)) == 2000
    # Kolmogorov-Smirnov: below this with probability 1e-6 if seeds are independent.
    assert stats.kstest(noise / 2.0, "norm").pvalue > 1e-6


def test_arguments_of_the_function():
    seen = []

    def fn(a, b, constant, n_samples, rng):
        seen[:] = a, b, constant, n_samples, rng
        return 0.0

    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b", shape=3)
        pm.Potential("loglike", estimated_loglikelihood(fn, a, b * 2, [1, 2], n_samples=7))
    LogDensity(model)(np.array([0.5, 1.0, 2.0, 3.0]))
    scalar, vector, constant, n_samples, rng = seen
    assert isinstance(scalar, np.float64) and scalar == 0.5
    np.testing.assert_array_equal(vector, [2.0, 4.0, 6.0])
    np.testing.assert_array_equal(constant, [1, 2])
    assert n_samples == 7 and isinstance(rng, np.random.Generator)


def test_equal_estimates_are_independent_and_constants_are_not_folded():
    def fn(constant, rng):
        return rng.standard_normal()

    with pm.Model() as model:
        pm.Normal("x")
        for name in "ab":
            pm.Potential(name, estimated_loglikelihood(fn, 1.0))
    logp = model.logp(vars=[model["a"], model["b"]], sum=False)
    function = model.compile_fn(logp, inputs=[], on_unused_input="ignore", point_fn=False)
    seeds = [term.owner.inputs[0] for term in logp]
    draws = []
    for i in range(3):
        for j, seed in enumerate(seeds):
            seed.set_value(np.int64(2 * i + j))
        draws.extend(float(value) for value in function())
    expected = [np.random.default_rng(i).standard_normal() for i in range(6)]
    np.testing.assert_array_equal(draws, expected)


@pytest.mark.filterwarnings("ignore:Numba will use object mode")
def test_never_compiled():
    """Even where a compiled function would do: each evaluation needs a seed."""
    chains = []
    for options in ({}, {"compile_kwargs": {"mode": "NUMBA"}}):
        model, estimate = noisy_normal()
        step = noisy_step(model, steps_per_draw=10, **options)
        chains.append(models.run(step, model, 50, tune=20)[0])
    np.testing.assert_allclose(*chains)
    assert estimate.calls >= 501


BAD_ARGUMENTS = [
    ((3.0, 1.0), {}, TypeError, r"fn=3.0.*fn\(theta, rng\)"),
    ((len,), {}, ValueError, r"no inputs.*theta"),
    ((lambda x, n, rng: 0.0, 1.0), {"n_samples": 0}, ValueError, "n_samples=0"),
    ((lambda x, n, rng: 0.0, 1.0), {"n_samples": 2.5}, TypeError, "n_samples=2.5"),
    ((impossible_at_times, 1.0, 2.0), {}, TypeError, r"\(value_1, value_2, rng\)"),
    ((impossible_at_times, 1.0), {"n_samples": 5}, TypeError, "impossible_at_times does not"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_of_an_estimate(arguments, options, error, message):
    with pytest.raises(error, match=message):
        estimated_loglikelihood(*arguments, **options)


def test_a_function_that_returns_no_number():
    returned = [None, np.zeros(2), "one"]

    def half_finished(x, rng):
        return returned.pop()

    model = one_term(half_finished)
    logp = model.compile_logp(mode="FAST_COMPILE")
    while returned:
        with pytest.raises((TypeError, ValueError), match=r"half_finished returned .*one number"):
            logp(model.initial_point())


# the chain ----------------------------------------------------------------------------------------

TAILS = 0.1, 0.9


def share_in_the_tails(step, model):
    """Whether each draw is beyond the exact quantiles of the posterior."""
    low, high = stats.norm.ppf(TAILS, 0.5, np.sqrt(0.5))
    points, _, _ = models.run(step, model, 25_000, tune=1000)
    draws = points[1000:, 0]
    return np.stack([draws < low, draws > high, (draws < low) | (draws > high)], axis=1)


@pytest.mark.numerics
@pytest.mark.slow
def test_quantiles_with_log_normal_noise():
    """They are wrong where a kept estimate is drawn again: both tails get half as much again."""
    model, _ = noisy_normal(noise=1.0)
    step = noisy_step(model, steps_per_draw=1)
    models.assert_mean(share_in_the_tails(step, model), np.array([0.1, 0.1, 0.2]))
    arrive = step.arrive

    def arrive_and_draw_again(x):
        arrive(x)
        step.sampler.evaluate_current()

    step.arrive = arrive_and_draw_again
    with pytest.raises(AssertionError, match="standard errors"):
        models.assert_mean(share_in_the_tails(step, model), np.array([0.1, 0.1, 0.2]))


@pytest.mark.slow
def test_one_seed_is_one_chain_in_any_process():
    model, _ = noisy_normal()
    step = noisy_step(model, KameleonStep, n_subsample=100)
    settings = {"model": model, "chains": 2, "draws": 200, "tune": 200}
    expected, found = (models.sample(step, **settings, cores=cores) for cores in (1, 2))
    for name, group in (("x", "posterior"), ("estimate", "sample_stats")):
        values = models.values(expected, name, group)
        np.testing.assert_array_equal(models.values(found, name, group), values)
        assert not np.array_equal(values[0], values[1])


def test_restored_state_keeps_its_estimate_and_draws_the_same(make_estimating):
    """`n_samples`, like data, is a shared value that a new step has not seen before."""
    model, _ = noisy_normal(n_samples=5)
    step, other = (noisy_step(model, make_estimating) for _ in range(2))
    models.begin(step)
    _, _, point = models.drive(step, model.initial_point(), 60, tune=50)
    other.sampling_state = step.sampling_state
    expected, statistics, _ = models.drive(step, point, 100, tune=-1)
    found, restored, _ = models.drive(other, point, 100, tune=-1)
    np.testing.assert_array_equal(found, expected)
    for name in ("estimate", "n_evals"):
        assert [s[name] for s in restored] == [s[name] for s in statistics]


def test_an_estimate_of_zero_or_nan_is_refused(make_estimating):
    """The estimates are 0 for x > 1, NaN for x < -1, and else half of them 0 and half of them 2."""

    def fn(x, rng):
        x = float(x[0])
        if abs(x) > 1:
            return -np.inf if x > 1 else np.nan
        return np.log(2.0) if rng.random() < 0.5 else -np.inf

    model = one_term(fn, shape=1, initval=np.zeros(1))
    step = noisy_step(model, make_estimating)
    points, statistics, _ = models.run(step, model, 6000, tune=1000)
    draws = points[1000:, 0]
    assert sum(s["n_nonfinite"] for s in statistics) > 10
    models.assert_moments(draws, 0.0, stats.truncnorm(-1, 1).std(), "two estimates")


# compound steps -----------------------------------------------------------------------------------


@pytest.mark.numerics
def test_two_estimates_with_a_step_each():
    """An estimate that depends on none of a step's variables costs that step nothing."""
    estimates = {name: NormalEstimate(0.5) for name in "ab"}
    with pm.Model() as model:
        for name, estimate in estimates.items():
            x = pm.Normal(name)
            pm.Potential(f"likelihood of {name}", estimated_loglikelihood(estimate, x))
        options = {"pseudo_marginal": True, "steps_per_draw": 1}
        steps = [AdaptiveMetropolisStep([model[name]], **options) for name in "ab"]
        step = CompoundStep(steps)
    models.begin(step, tune=1000, draws=7000)
    for estimate in estimates.values():
        estimate.calls = 0
    _, _, point = models.drive(step, model.initial_point(), 1000, tune=-1)
    for estimate in estimates.values():
        estimate.calls = 0
    points, statistics, _ = models.drive(step, point, 7000, tune=0)
    assert [estimate.calls for estimate in estimates.values()] == [7000, 7000]
    models.assert_moments(points, np.full(2, 0.5), np.sqrt(0.5), "two estimates")
    assert not any(part.get("warning") for draw in statistics for part in draw)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Numba will use object mode")
@pytest.mark.parametrize(
    "other", [pm.NUTS, pytest.param(AdaptiveMetropolisStep, marks=pytest.mark.numerics)]
)
def test_beside_a_step_of_another_variable(other):
    """Other steps see the kept estimate, or none; never one of a rejected proposal."""
    with pm.Model() as model:
        x, z = pm.Normal("x"), pm.Normal("z")
        pm.Potential("loglike", estimated_loglikelihood(impossible_at_times, x))
        pm.Normal("y", z, 1, observed=1.0)
        ours = AdaptiveMetropolisStep([x], pseudo_marginal=True, steps_per_draw=5)
        steps = [ours, other([z])]
    idata = models.sample(steps, model, draws=2000, tune=500)
    for name in "xz":
        models.assert_moments(models.values(idata, name), 0.5, np.sqrt(0.5), name)


@pytest.mark.filterwarnings("ignore:Numba will use object mode")
def test_a_deterministic_of_the_estimate_shows_the_kept_one(make_estimating):
    model, _ = noisy_normal(noise=2.0)
    step = noisy_step(model, make_estimating, steps_per_draw=2)
    idata = models.sample(step, model, chains=2, draws=100, tune=50)
    estimates = models.values(idata, "estimate", "sample_stats")
    np.testing.assert_allclose(models.values(idata, "seen"), estimates)
    table = efficiency_table({"noisy": idata}, steps_per_draw=2)
    assert table.loc["noisy", "evaluations_percent"] == 100.0


def test_warned_of_an_estimate_that_no_step_draws_anew():
    with pm.Model() as model:
        x, z = pm.Normal("x"), pm.Normal("z")
        pm.Potential("loglike", estimated_loglikelihood(impossible_at_times, z))
        ours = AdaptiveMetropolisStep([x], pseudo_marginal=True)
        step = CompoundStep([ours, models.Shift([z])])
    _, statistics, _ = models.run(step, model, 100, tune=10)
    (message,) = [m for m in messages(statistics) if "fixed, rough surface" in m]
    assert "loglike" in message and "pseudo_marginal=True" in message


# settings and messages ----------------------------------------------------------------------------


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("make", "noise", "shape"), [(KameleonStep, 1.8, ()), (AdaptiveMetropolisStep, 4.0, (3,))]
)
def test_tuning_does_not_learn_from_overestimates(make, noise, shape):
    """With noise above 1.7 no move is accepted as often as 0.234: scales would run away to zero.

    The chain after tuning has less noise, so that it can be judged by its moments.
    """
    model, estimate = noisy_normal(noise=noise, shape=shape)
    step = noisy_step(model, make, steps_per_draw=5)
    models.begin(step)
    _, _, point = models.drive(step, model.initial_point(), 600, tune=-1)
    estimate.noise = 0.3
    points, statistics, _ = models.drive(step, point, 3000, tune=0)
    models.assert_moments(points, 0.5, np.sqrt(0.5))
    assert np.mean([s["accept"] for s in statistics]) < 0.8


def test_tuning_draws_a_kept_estimate_again_and_sampling_does_not():
    model, estimate = noisy_normal(noise=0.5)
    step = noisy_step(model, steps_per_draw=1)
    models.begin(step)
    estimate.calls = 0
    _, _, point = models.drive(step, model.initial_point(), 1000, tune=-1)
    assert 1001 < estimate.calls < 1400
    step.stop_tuning()
    estimate.calls = 0
    models.drive(step, point, 1000, tune=-1)
    assert estimate.calls == 1000


def in_a_prior():
    def logp(value, rate):
        return estimated_loglikelihood(impossible_at_times, value - rate)

    pm.CustomDist("x", pm.Normal("rate"), logp=logp)
    AdaptiveMetropolisStep(pseudo_marginal=True)


def of_a_latent_function():
    f = pm.MvNormal("f", np.zeros(3), np.eye(3))
    pm.Potential("loglike", estimated_loglikelihood(NormalEstimate(), f))
    EllipticalSliceStep([f], approximation="prior")


def simulated(rng, mean, size=None):
    return rng.normal(mean, 1.0, size=(20,))


def a_simulator():
    mean = pm.Normal("mean", 0, 1)
    pm.Simulator("y", simulated, mean, sum_stat="mean", epsilon=0.3, observed=np.ones(20))


def an_estimate():
    pm.Potential("loglike", estimated_loglikelihood(NormalEstimate(), pm.Normal("x")))


def screened():
    return KameleonStep(surrogate=GPSurrogate())


@pytest.mark.parametrize(
    ("make", "step", "error", "message"),
    [
        (in_a_prior, None, ValueError, r"free variable x .*pm\.Potential"),
        (of_a_latent_function, None, ValueError, "loglike is an estimate"),
        (an_estimate, MALAStep, NotImplementedError, "gradient"),
        (an_estimate, screened, ValueError, "loglike is an estimate.*pseudo_marginal=True"),
        (a_simulator, SurrogateHMCStep, ValueError, "y is an estimate"),
        (a_simulator, ParallelTemperingStep, ValueError, "y is an estimate"),
        (a_simulator, screened, ValueError, "an estimate"),
    ],
)
@pytest.mark.filterwarnings("ignore:The likelihood term .* is an estimate")
def test_estimates_that_are_refused(make, step, error, message):
    with pm.Model(), pytest.raises(error, match=message):
        make()
        step()


def test_warned_without_the_flag():
    model, _ = noisy_normal()
    with model, pytest.warns(UserWarning, match=r"loglike.*pseudo_marginal=True"):
        KameleonStep(compile_kwargs=models.UNCOMPILED)
    with pm.Model():
        a_simulator()
        with pytest.warns(UserWarning, match=r"y is an estimate.*pseudo_marginal=True"):
            KameleonStep(compile_kwargs=models.UNCOMPILED)
        step = KameleonStep(pseudo_marginal=True, compile_kwargs=models.UNCOMPILED)
        assert step.target.has_estimates


def test_a_start_whose_estimates_are_all_zero():
    model = one_term(lambda x, rng: -np.inf)
    step = noisy_step(model)
    with pytest.raises(pm.exceptions.SamplingError, match=r"100 estimates.*estimator_sd"):
        models.run(step, model, 10)


@pytest.mark.numerics
@pytest.mark.parametrize(("make", "length"), [(KameleonStep, 1), (AdaptiveMetropolisStep, 7)])
def test_warned_of_a_chain_that_sticks_on_an_overestimate(make, length):
    """Its kept estimate is raised after tuning; there is no warning where all is well."""
    model, estimate = noisy_normal(noise=1.0)
    step = noisy_step(model, make, steps_per_draw=length)
    _, _, point = models.run(step, model, 1500, tune=1500)
    step.stop_tuning()
    for overestimate in (0.0, 60.0):
        step.report.pending = None
        step.chain.value[2] += overestimate
        estimate.calls = 0
        _, statistics, point = models.drive(step, point, 1200 // length, tune=-1)
        told = [s["warning"] for s in statistics if s.get("warning") is not None]
        assert estimate.calls == sum(s["n_evals"] for s in statistics)
        if not overestimate:
            assert not told
        assert estimate.calls == 1200 // length * length + N_FRESH * bool(overestimate)
    warning, *others = told
    assert warning.kind == WarningType.CONVERGENCE and warning.level == "warn"
    assert f"in {UNMOVED} " in warning.message or length > 1
    for word in ("overestimate", "estimator_sd", "chain of x"):
        assert word in warning.message
    excess = float(re.search(r"likelihood is ([0-9.]+) above", warning.message)[1])
    assert 50 < excess < 70
    assert all("overestimate" not in other.message for other in others)


@pytest.mark.numerics
def test_stuck_for_another_reason_is_no_overestimate():
    def needle(x, rng):
        return 0.0 if x == 0 else -np.inf

    model = one_term(needle)
    step = noisy_step(model)
    _, statistics, _ = models.run(step, model, 1500, tune=10)
    told = messages(statistics)
    assert any("stuck" in message for message in told)
    assert not any("overestimate" in message for message in told)
