"""A surrogate learnt from estimates: exact with the kept estimate, whatever it has learnt."""

import numpy as np
import pymc as pm
import pytest
from models import FALSE_ALARM, BlackBox, run, sample
from scipy import stats

from pymc_kameleon import AdaptiveMetropolisStep, GPSurrogate, KameleonStep, SurrogateHMCStep
from pymc_kameleon.diagnostics import efficiency_table
from pymc_kameleon.gp.covariances import (
    COVARIANCES,
    fit_hyperparameters,
    log_marginal_likelihood,
)
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.steps.chain.sampler import ChainSampler
from pymc_kameleon.surrogate import delayed_acceptance

NOISE = 1.0


def log_likelihood(x):
    """With x[0] ~ N(0, 2) and x[1] flat, x[1] - x[0]^2 / 4 is a standard normal variable."""
    return -0.5 * (x[1] - 0.25 * x[0] ** 2) ** 2


def noisy_banana():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, [2.0, 1e4], shape=2)
        pm.Potential("p", BlackBox(log_likelihood, NOISE)(x))
    return model


STEPS = {
    "metropolis": lambda: AdaptiveMetropolisStep(pseudo_marginal=True, surrogate=GPSurrogate()),
    "kameleon, one or two stages": lambda: KameleonStep(
        pseudo_marginal=True, surrogate=GPSurrogate(mean="constant", one_stage_share=0.5)
    ),
    "surrogate_hmc": lambda: SurrogateHMCStep(pseudo_marginal=True),
}


def p_values(make, n=1500, transitions=25):
    """Chains that start at exact draws with exact kept estimates, compared with them again.

    A kept estimate is too large by as much as exp(noise) makes likelier.
    """
    rng = np.random.default_rng(3)
    model = noisy_banana()
    with model:
        step = make()
    run(step, model, 61, tune=60, seed=4)
    chain, moved, noise = step.chain, np.empty((n, 2)), np.empty(n)
    for i in range(n):
        first = rng.normal(0.0, 2.0)
        chain.position[:] = first, 0.25 * first**2 + rng.normal()
        kept = log_likelihood(chain.position) + rng.normal(0.5 * NOISE**2, NOISE)
        step.target.prior.into(chain.position, chain.value)
        chain.value[2] = kept
        step.sampler.position_changed()
        step.sampler.advance(transitions)
        moved[i], noise[i] = chain.position, chain.value[2] - log_likelihood(chain.position)
    return {
        "x[0]": stats.kstest(moved[:, 0], stats.norm(0.0, 2.0).cdf).pvalue,
        "x[1]": stats.kstest(moved[:, 1] - 0.25 * moved[:, 0] ** 2, stats.norm.cdf).pvalue,
        "noise": stats.kstest(noise, stats.norm(0.5 * NOISE**2, NOISE).cdf).pvalue,
        "accepted": float(chain.outcome.sum() > 0),
    }


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_the_extended_target_is_invariant(make):
    found = p_values(make)
    assert min(found.values()) > FALSE_ALARM, found


# calibration --------------------------------------------------------------------------------------

N_GROUPS, SPREAD = 5, 0.5


def _without_estimates(value):
    return value[1]


def _drawn_again(sampler, n):
    for _ in range(n):
        sampler.evaluate_current()
        advance(sampler, 1)


advance = ChainSampler.advance


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.sabotage
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("metropolis", (delayed_acceptance, "_log_likelihood", _without_estimates)),
        ("surrogate_hmc", (ChainSampler, "advance", _drawn_again)),
    ],
)
def test_a_spoilt_ratio_is_caught(name, mistake, monkeypatch):
    monkeypatch.setattr(*mistake)
    found = p_values(STEPS[name], n=400)
    assert min(found.values()) < FALSE_ALARM, found


@pytest.mark.parametrize("has_gradients", [False, True])
def test_likelihood_of_the_noise_and_its_gradient(has_gradients):
    rng = np.random.default_rng(1)
    u, known = rng.normal(size=(2, 12)), np.linspace(0.0, 0.2, 12)
    targets = rng.normal(size=(3 if has_gradients else 1, 12))
    kernel, hyperparameters = COVARIANCES["matern"], np.log([1.5, 0.8, 1.2, 0.3])
    found, slopes = log_marginal_likelihood(kernel, u, targets, hyperparameters, known)
    both = np.hypot(known, 0.3)
    expected, of_others = log_marginal_likelihood(kernel, u, targets, hyperparameters[:-1], both)
    assert found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(slopes[:-1], of_others, rtol=1e-10)
    ends = [
        log_marginal_likelihood(kernel, u, targets, hyperparameters + h, known)[0]
        for h in np.array([[0.0, 0.0, 0.0, 1e-5], [0.0, 0.0, 0.0, -1e-5]])
    ]
    assert slopes[-1] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


@pytest.mark.numerics
@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_noise_is_found(noise):
    """To 20 %, from 300 values of a smooth function, where its standard error is 5 %."""
    rng = np.random.default_rng(2)
    u = rng.normal(size=(2, 300))
    values = 3.0 * np.cos(u).sum(axis=0) + noise * rng.normal(size=300)
    kernel = COVARIANCES["gaussian"]
    found, _ = fit_hyperparameters(kernel, u, values[None], noise_start=1.0)
    assert np.exp(found[-1]) == pytest.approx(noise, rel=0.2)


REFUSED = [
    (
        lambda: SurrogateHMCStep(pseudo_marginal=True, gradients=True),
        "an estimate has no gradient",
    ),
    (lambda: SurrogateHMCStep(pseudo_marginal=True, store=object()), "Leave it out"),
    (
        lambda: KameleonStep(pseudo_marginal=True, surrogate=GPSurrogate(mean="current")),
        'with mean="quadratic" or "constant"',
    ),
    (lambda: KameleonStep(surrogate=GPSurrogate()), "Write pseudo_marginal=True too"),
    (lambda: SurrogateHMCStep(), r"Write SurrogateHMCStep\(pseudo_marginal=True\)"),
    (
        lambda: SurrogateHMCStep(pseudo_marginal=True, start="optimize"),
        "an estimate is noisy",
    ),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
@pytest.mark.filterwarnings("ignore:The likelihood term")
def test_what_is_refused(make, words):
    with pm.Model():
        x = pm.Normal("x", shape=2)
        pm.Potential("p", estimated_loglikelihood(lambda x, rng: 0.0, x))
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.numerics
@pytest.mark.parametrize("make", [STEPS["metropolis"], STEPS["surrogate_hmc"]])
def test_estimates_that_are_too_noisy_are_told_of(make):
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 2.0, shape=2)
        pm.Potential("p", BlackBox(log_likelihood, 4.0)(x))
        step = make()
    _, statistics, _ = run(step, model, 303, tune=300, seed=2)
    told = [s["warning"].message for s in statistics if "warning" in s]
    (message,) = [text for text in told if "has a standard deviation of about" in text]
    assert 3.0 < float(message.split("about ")[1].split(":")[0]) < 5.5
    assert np.isfinite(statistics[-1]["estimate"])


@pytest.mark.slow
@pytest.mark.numerics
def test_estimates_are_saved_through_pm_sample():
    """Five times as many effective draws an estimate, in four dimensions; checked are two."""

    def estimate(x, rng):
        noise = rng.normal(-0.5 * 1.5**2, 1.5)
        return -0.5 * np.sum(np.arange(1, 5) * x**2) - 0.4 * np.sum(x[1:] * x[:-1]) + noise

    found = {}
    with pm.Model():
        x = pm.Normal("x", 0.0, 3.0, shape=4)
        pm.Potential("p", estimated_loglikelihood(estimate, x))
        for make, draws in ((AdaptiveMetropolisStep, 2000), (SurrogateHMCStep, 700)):
            step = make(pseudo_marginal=True, steps_per_draw=1)
            found[make.__name__] = sample(step, tune=600, draws=draws, chains=2)
    precision = np.diag(np.arange(1.0, 5.0) + 1 / 9)
    precision += np.diag([0.4] * 3, 1) + np.diag([0.4] * 3, -1)
    sds = np.sqrt(np.diag(np.linalg.inv(precision)))
    draws = found["SurrogateHMCStep"]["posterior"]["x"].values.reshape(-1, 4)
    # With 50 effective draws means are known to .14 sd, and sds to .1 of theirs.
    assert np.all(np.abs(draws.mean(axis=0)) < 0.75 * sds)
    np.testing.assert_allclose(draws.std(axis=0), sds, rtol=0.55)
    each = efficiency_table(found)["ess_bulk_per_evaluation"].astype(float)
    assert each["SurrogateHMCStep"] > 2.0 * each["AdaptiveMetropolisStep"]
