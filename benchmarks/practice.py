"""Models of practice that no step was tuned for, with simulated data of a fixed seed."""

from collections.abc import Callable

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.transforms import ordered

from pymc_kameleon.demo import lynx_hare_model

__all__ = ["MODELS"]


def linear_regression():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3))
    y = 1.0 + x @ np.array([0.5, -2.0, 0.0]) + rng.normal(size=60) * 0.7
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 10)
        slopes = pm.Normal("slopes", 0, 10, shape=3)
        sigma = pm.HalfNormal("sigma", 5)
        pm.Normal("y", intercept + x @ slopes, sigma, observed=y)
    return model


def logistic_regression():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(150, 8))
    x[:, 1] += 0.8 * x[:, 0]
    odds = 0.3 + x @ rng.normal(size=8)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 2.5)
        slopes = pm.Normal("slopes", 0, 2.5, shape=8)
        y = rng.binomial(1, 1 / (1 + np.exp(-odds)))
        pm.Bernoulli("y", logit_p=intercept + x @ slopes, observed=y)
    return model


EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfCauchy("tau", 5)
        school = pm.Normal("school", 0, 1, shape=8)
        pm.Normal("y", mu + tau * school, ERRORS, observed=EFFECTS)
    return model


def eight_schools_centred():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfCauchy("tau", 5)
        school = pm.Normal("school", mu, tau, shape=8)
        pm.Normal("y", school, ERRORS, observed=EFFECTS)
    return model


def varying_intercepts():
    """Fifteen counties of few houses each, in the manner of the radon example: centred."""
    rng = np.random.default_rng(3)
    county = rng.integers(15, size=150)
    floor = rng.binomial(1, 0.3, size=150)
    y = 1.5 + 0.4 * rng.normal(size=15)[county] - 0.7 * floor + 0.7 * rng.normal(size=150)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfNormal("tau", 1)
        level = pm.Normal("level", mu, tau, shape=15)
        slope = pm.Normal("slope", 0, 2)
        sigma = pm.HalfNormal("sigma", 2)
        pm.Normal("y", level[county] + slope * floor, sigma, observed=y)
    return model


def overdispersed_counts():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(120, 2))
    mean = np.exp(1.0 + x @ np.array([0.5, -0.3]))
    y = rng.poisson(mean * rng.gamma(2.0, 0.5, size=120))
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 3)
        slopes = pm.Normal("slopes", 0, 1, shape=2)
        alpha = pm.Exponential("alpha", 0.5)
        pm.NegativeBinomial("y", mu=pt.exp(intercept + x @ slopes), alpha=alpha, observed=y)
    return model


def mixture():
    rng = np.random.default_rng(5)
    y = np.concatenate([rng.normal(-2, 0.8, size=40), rng.normal(2.5, 1.2, size=60)])
    with pm.Model() as model:
        weight = pm.Beta("weight", 2, 2)
        mu = pm.Normal("mu", 0, 5, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        sigma = pm.HalfNormal("sigma", 2, shape=2)
        components = pm.Normal.dist(mu, sigma, shape=2)
        pm.Mixture("y", pt.stack([weight, 1 - weight]), components, observed=y)
    return model


def ordered_logistic():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(200, 2))
    latent = x @ np.array([1.0, -0.5]) + rng.logistic(size=200)
    y = np.digitize(latent, [-1.5, 0.0, 1.0])
    with pm.Model() as model:
        slopes = pm.Normal("slopes", 0, 2, shape=2)
        cuts = pm.Normal(
            "cuts", 0, 3, shape=3, transform=ordered, initval=np.array([-1.0, 0.0, 1.0])
        )
        pm.OrderedLogistic("y", eta=x @ slopes, cutpoints=cuts, observed=y, compute_p=False)
    return model


def dirichlet_multinomial():
    rng = np.random.default_rng(7)
    share = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    y = np.array([rng.multinomial(30, rng.dirichlet(20 * share)) for _ in range(12)])
    with pm.Model() as model:
        share = pm.Dirichlet("share", np.ones(5))
        concentration = pm.LogNormal("concentration", 2, 1)
        pm.DirichletMultinomial("y", n=30, a=share * concentration, observed=y)
    return model


def lkj():
    rng = np.random.default_rng(8)
    covariance = np.array([[1.0, 0.7, 0.2], [0.7, 2.0, -0.3], [0.2, -0.3, 0.5]])
    y = rng.multivariate_normal([1.0, 0.0, -1.0], covariance, size=60)
    with pm.Model() as model:
        factor, _, _ = pm.LKJCholeskyCov("factor", n=3, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
        mu = pm.Normal("mu", 0, 3, shape=3)
        pm.MvNormal("y", mu, chol=factor, observed=y)
    return model


def survival():
    """Weibull times to failure, a third of them censored."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=100)
    times = np.exp(1.0 + 0.5 * x) * rng.weibull(1.5, size=100)
    end = np.quantile(times, 0.67)
    with pm.Model() as model:
        shape = pm.HalfNormal("shape", 3)
        intercept = pm.Normal("intercept", 0, 3)
        slope = pm.Normal("slope", 0, 1)
        time = pm.Weibull.dist(shape, pt.exp(intercept + slope * x))
        pm.Censored("y", time, lower=None, upper=end, observed=np.minimum(times, end))
    return model


def random_walk():
    """A local level of 25 times, observed with noise."""
    rng = np.random.default_rng(10)
    y = np.cumsum(0.5 * rng.normal(size=25)) + 0.7 * rng.normal(size=25)
    with pm.Model() as model:
        step = pm.HalfNormal("step", 1)
        noise = pm.HalfNormal("noise", 1)
        innovations = pm.Normal("innovations", 0, 1, shape=25)
        pm.Normal("y", step * pt.cumsum(innovations), noise, observed=y)
    return model


def bounded():
    """A saturating response whose four parameters all have bounds."""
    rng = np.random.default_rng(11)
    dose = np.geomspace(0.1, 100, 30)
    y = 2.0 + 8.0 * dose**1.2 / (5.0**1.2 + dose**1.2) + rng.normal(size=30)
    with pm.Model() as model:
        low = pm.Uniform("low", 0, 5)
        top = pm.TruncatedNormal("top", 10, 5, lower=0)
        half = pm.LogNormal("half", 1, 1)
        power = pm.Uniform("power", 0.3, 4)
        sigma = pm.HalfCauchy("sigma", 1)
        mean = low + top * dose**power / (half**power + dose**power)
        pm.Normal("y", mean, sigma, observed=y)
    return model


def forty_eight_groups():
    """Fifty dimensions: offsets of 48 groups, their mean and spread."""
    rng = np.random.default_rng(12)
    group = np.repeat(np.arange(48), 5)
    y = rng.poisson(np.exp(1.0 + 0.5 * rng.normal(size=48))[group])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 2)
        tau = pm.HalfNormal("tau", 1)
        offset = pm.Normal("offset", 0, 1, shape=48)
        pm.Poisson("y", pt.exp(mu + tau * offset[group]), observed=y)
    return model


MODELS: dict[str, Callable[[], pm.Model]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        linear_regression,
        logistic_regression,
        eight_schools,
        eight_schools_centred,
        varying_intercepts,
        overdispersed_counts,
        mixture,
        ordered_logistic,
        dirichlet_multinomial,
        lkj,
        survival,
        random_walk,
        bounded,
        forty_eight_groups,
    )
} | {"lynx-hare": lynx_hare_model}
"""Name -> function that makes the model; that of the lynx and hares is a black box."""
