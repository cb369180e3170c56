"""The posteriors of real models, against long runs of NUTS or closed forms.

Differences are judged in Monte Carlo standard errors: a bound of 6 has null probability 2e-9 for
each comparison, and the few hundred here leave it below 1e-6 in all, even with standard errors that
are themselves a few per cent off.
"""

import arviz as az
import numpy as np
import pymc as pm
import pytest
from models import sample
from references import z_scores

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep

pytestmark = pytest.mark.slow

BOUND = 6.0


def hierarchical_poisson():
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(6), 8)
    x = rng.normal(size=48)
    y = rng.poisson(np.exp(0.5 + 0.6 * rng.normal(size=6)[group] + 0.3 * x))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 2)
        spread = pm.HalfNormal("spread", 1)
        offset = pm.Normal("offset", 0, 1, shape=6)
        slope = pm.Normal("slope", 0, 1)
        pm.Poisson("y", pm.math.exp(level + spread * offset[group] + slope * x), observed=y)
    return model


def ordered_mixture():
    rng = np.random.default_rng(3)
    y = np.concatenate([rng.normal(-2, 0.8, size=40), rng.normal(2.5, 1.2, size=60)])
    with pm.Model() as model:
        weight = pm.Beta("weight", 2, 2)
        mu = pm.Normal(
            "mu",
            0,
            5,
            shape=2,
            transform=pm.distributions.transforms.ordered,
            initval=np.array([-1.0, 1.0]),
        )
        sigma = pm.HalfNormal("sigma", 2, shape=2)
        components = pm.Normal.dist(mu, sigma, shape=2)
        pm.Mixture("y", pm.math.stack([weight, 1 - weight]), components, observed=y)
    return model


def numbers(idata):
    """Draws of all variables, shape (chain, draw, n)."""
    posterior = idata["posterior"]
    arrays = [posterior[name].values for name in posterior.data_vars]
    return np.concatenate([v.reshape(*v.shape[:2], -1) for v in arrays], axis=-1)


@pytest.mark.parametrize(
    "make_model",
    [hierarchical_poisson, pytest.param(ordered_mixture, marks=pytest.mark.numerics)],
)
def test_kameleon_agrees_with_nuts(make_model):
    model = make_model()
    step = KameleonStep(model=model, steps_per_draw=50)
    found = numbers(sample(step, model, draws=1000, tune=700, chains=4, random_seed=2))
    assert np.all(np.abs(z_scores(found, make_model.__name__)) < BOUND)
    assert max(float(az.rhat(np.ascontiguousarray(x))) for x in np.moveaxis(found, -1, 0)) < 1.05


def wild_scales():
    """Independent pairs of size 1e-6 and 1e6, tied by a correlation of 0.8."""
    with pm.Model() as model:
        small = pm.Normal("small", 3e-6, 1e-6)
        pm.Normal("large", 1e6 * (1 + 0.8 * (small - 3e-6) / 1e-6), 0.6e6)
    return model, {"small": (3e-6, 1e-6), "large": (1e6, 1e6)}


def far_start():
    """Start 1000 posterior standard deviations away, in two correlated directions."""
    n = 100
    with pm.Model() as model:
        a = pm.Normal("a", 0, 1e5)
        b = pm.Normal("b", 0, 1e5)
        pm.Normal("y", a + b, 1.0, observed=np.full(n, 1000.0))
        pm.Normal("z", a - b, 1.0, observed=np.full(n, 3000.0))
    return model, {"a": (2000.0, np.sqrt(0.5 / n)), "b": (-1000.0, np.sqrt(0.5 / n))}


@pytest.mark.numerics
@pytest.mark.parametrize("make_step", [KameleonStep, AdaptiveMetropolisStep])
@pytest.mark.parametrize("make_model", [wild_scales, far_start], ids=lambda m: m.__name__)
def test_wild_scales_and_far_starts(make_model, make_step):
    model, exact = make_model()
    step = make_step(model=model, steps_per_draw=20)
    result = sample(step, model, draws=1000, tune=500, chains=4, random_seed=3)
    for name, (mean, sd) in exact.items():
        standardized = (result["posterior"][name].values - mean) / sd
        error = 1 / np.sqrt(float(az.ess(standardized)))
        assert abs(standardized.mean()) < BOUND * error, name
        square = standardized**2
        error = square.std() / np.sqrt(float(az.ess(square)))
        assert abs(square.mean() - 1) < BOUND * error, name
