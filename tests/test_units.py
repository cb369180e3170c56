"""The unit of a parameter changes nothing: draws are the same in all units, up to the unit.

Sums round otherwise in other units, which a chain makes larger: chains are short, and compared to a
millionth. What optimises on the way makes it larger at once: such steps are compared by moments.
"""

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import COUNTS
from pytensor.compile.ops import wrap_py

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    PCAKameleonStep,
    SurrogateHMCStep,
)

pytestmark = pytest.mark.numerics

TIMES = np.linspace(0, 5, 25)
NOISE = np.random.default_rng(1).normal(size=60)
RTOL = 1e-6


def decay(unit):
    """An exponential decay by a black box."""

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dvector])
    def curve(p):
        height, rate, floor = p / unit
        return height * np.exp(-rate * TIMES) + floor

    y = 2 * np.exp(-0.8 * TIMES) + 0.5 + 0.1 * NOISE[:25]
    prior = np.array([1.5, 1.0, 0.0]), np.array([0.5, 0.3, 1.0])
    p = pm.Normal("p", prior[0] * unit, prior[1] * unit)
    pm.Normal("y", curve(p), 0.1, observed=y)


def regression(unit):
    x = np.random.default_rng(2).normal(size=(60, 2))
    y = (1.0 + x @ [0.5, -2.0] + 0.7 * NOISE) * unit
    intercept = pm.Normal("intercept", 0, 10 * unit)
    slopes = pm.Normal("slopes", 0, 10 * unit, shape=2)
    sigma = pm.HalfNormal("sigma", 5 * unit)
    pm.Normal("y", intercept + x @ slopes, sigma, observed=y)


def eight_schools(unit):
    effects = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]) * unit
    errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]) * unit
    mu = pm.Normal("mu", 0, 5 * unit)
    tau = pm.HalfCauchy("tau", 5 * unit)
    pm.Normal("y", pm.Normal("school", mu, tau, shape=8), errors, observed=effects)


def bounded(unit):
    low = pm.Uniform("low", 0, 5 * unit)
    top = pm.TruncatedNormal("top", 10 * unit, 5 * unit, lower=0, initval=unit)
    mean = (low + top * TIMES / (1.0 + TIMES)) / unit
    pm.Normal("y", mean, 1.0, observed=2 + 8 * TIMES / (1.0 + TIMES) + NOISE[:25])


def counts(unit):
    """A latent function whose level and lengthscale have units."""
    x = np.linspace(0, 10, len(COUNTS))[:, None] * unit
    lengthscale = pm.InverseGamma("lengthscale", 3, 6 * unit)
    level = pm.Normal("level", 0, 2 * unit)
    gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=lengthscale))
    pm.Poisson("y", pt.exp(gp.prior("f", X=x) + level / unit), observed=COUNTS)


MODELS = (decay, eight_schools, bounded)
UNITS = (1e-6, 1e6)
STEPS = {
    "FastKameleonStep": FastKameleonStep,
    "PCAKameleonStep": PCAKameleonStep,
    "AdaptiveMetropolisStep": AdaptiveMetropolisStep,
    "MALAStep": MALAStep,
}
OPTIMISING = {
    "KameleonStep, searched": lambda: KameleonStep(start="optimize"),
    "KameleonStep, surrogate": lambda: KameleonStep(surrogate=GPSurrogate()),
    "SurrogateHMCStep": SurrogateHMCStep,
    "LatentGPStep": LatentGPStep,
}


def drawn(make_model, make_step, unit, tune=15, draws=15):
    """Draws in natural values over the unit, those of tuning among them."""
    with pm.Model() as model:
        make_model(unit)
        result = pm.sample(
            step=make_step(),
            tune=tune,
            draws=draws,
            chains=1,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            discard_tuned_samples=False,
        )
    groups = [result["warmup_posterior"], result["posterior"]]
    values = [np.concatenate([group[v.name].values[0] for group in groups]) for v in model.free_RVs]
    return np.column_stack([v.reshape(len(v), -1) for v in values])


@pytest.mark.parametrize("make_model", MODELS)
def test_units_of_a_model_change_nothing(make_model):
    small, large = (drawn(make_model, KameleonStep, unit) / unit for unit in UNITS)
    assert len(np.unique(large, axis=0)) > 15
    np.testing.assert_allclose(small, large, rtol=RTOL)


@pytest.mark.parametrize("name", STEPS)
def test_units_change_nothing_for_a_step(name):
    small, large = (drawn(regression, STEPS[name], unit) / unit for unit in UNITS)
    assert len(np.unique(large, axis=0)) > 15
    np.testing.assert_allclose(small, large, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISING)
def test_units_change_no_moments(name):
    """By the z-score of means of effective draws: above 6 with a probability of 2e-9 each."""
    make_model = counts if name == "LatentGPStep" else regression
    samples = []
    for unit in UNITS:
        draws = drawn(make_model, OPTIMISING[name], unit, tune=300, draws=500)[300:]
        n_free = 2 if make_model is counts else draws.shape[1]
        samples.append(draws[:, :n_free] / unit)
    sizes = [np.array([az.ess(x[None]) for x in sample.T]) for sample in samples]
    assert min(map(np.min, sizes)) > 70
    small, large = (sample.mean(axis=0) for sample in samples)
    variance = sum(sample.var(axis=0) / n for sample, n in zip(samples, sizes, strict=True))
    assert np.all(np.abs(small - large) < 6 * np.sqrt(variance))
