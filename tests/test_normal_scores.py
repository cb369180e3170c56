"""Coordinates in which the prior is standard normal: the same posterior, in another one."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import BlackBox
from scipy import stats

from pymc_kameleon import EvaluationStore, surrogate_posterior
from pymc_kameleon._compat import group_dataset, stacked
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.model.log_density import LogDensity


def hierarchy():
    """Each positive distribution with a quantile function, some with parents that have one too."""
    with pm.Model() as model:
        a = pm.HalfNormal("a", 2.0)
        b = pm.Exponential("b", a)
        g = pm.Gamma("g", 2.0, b, shape=2)
        i = pm.InverseGamma("i", 3.0, a)
        h = pm.HalfCauchy("h", b)
        t = pm.HalfStudentT("t", 3.0, a)
        w = pm.Weibull("w", 2.0, 1.5)
        u = pm.Uniform("u", 0.0, 1.0)
        n = pm.Normal("n", 0.0, a)
        pm.Normal("y", a + b + g.sum() + i + h + t + w + u + n, 1.0, observed=3.0)
    return model


@pytest.mark.numerics
def test_the_posterior_is_that_of_the_model_by_a_change_of_variables():
    model = hierarchy()
    target, plain = LogDensity(model, normal_scores=True), LogDensity(model)
    points = 1.5 * np.random.default_rng(1).standard_normal((5, target.dim))
    values = target.scores.to_values(points)
    assert target.scores.is_scored.sum() == 8
    np.testing.assert_array_equal(points[:, -2:], values[:, -2:])
    np.testing.assert_allclose(target.scores.from_values(values), points, atol=1e-9)
    steps = 1e-5 * np.eye(target.dim)
    for z, x in zip(points, values, strict=True):
        jacobian = target.scores.to_values(z + steps) - target.scores.to_values(z - steps)
        log_volume = np.linalg.slogdet(jacobian / 2e-5)[1]
        np.testing.assert_allclose(target(z).sum(), plain(x).sum() + log_volume, atol=1e-5)
        np.testing.assert_allclose(target(z)[1], plain(x)[1], atol=1e-9)


@pytest.mark.parametrize(
    ("variable", "prior"),
    [
        (lambda: pm.HalfNormal("x", 2.0), stats.halfnorm(scale=2.0)),
        (lambda: pm.Exponential("x", 3.0), stats.expon(scale=1 / 3.0)),
        (lambda: pm.Gamma("x", 0.7, 2.0), stats.gamma(0.7, scale=0.5)),
        (lambda: pm.InverseGamma("x", 2.5, 3.0), stats.invgamma(2.5, scale=3.0)),
        (lambda: pm.Weibull("x", 1.5, 2.0), stats.weibull_min(1.5, scale=2.0)),
        (lambda: pm.HalfCauchy("x", 2.0), stats.halfcauchy(scale=2.0)),
    ],
)
def test_values_are_quantiles_of_the_prior_in_both_tails(variable, prior):
    with pm.Model() as model:
        x = variable()
        pm.Normal("y", x, observed=1.0)
    scores = LogDensity(model, normal_scores=True).scores
    z = np.array([-12.0, -6.0, -1.0, 0.0, 1.0, 6.0, 12.0])
    found = np.exp(scores.to_values(z[:, None])[:, 0])
    np.testing.assert_allclose(prior.logcdf(found[:4]), stats.norm.logcdf(z[:4]), rtol=1e-6)
    np.testing.assert_allclose(prior.logsf(found[3:]), stats.norm.logsf(z[3:]), rtol=1e-6)


@pytest.mark.numerics
def test_a_scale_that_may_be_zero():
    """Groups that hardly differ: the scale's posterior reaches 0, as a quadrature has it."""
    means, sd = np.array([0.9, 1.1, 1.0, 0.8, 1.3]), 0.5

    def log_likelihood(mu, tau):
        return stats.norm.logpdf(means, mu, np.hypot(tau, sd)).sum()

    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        pm.Potential("groups", BlackBox(lambda x: log_likelihood(*x))(pt.stack([mu, tau])))
    result = surrogate_posterior(model, n_evaluations=100, random_seed=1, progressbar=False)
    attributes = group_dataset(result, "posterior").attrs
    assert attributes["believable"] == 1
    grid = (np.arange(800) + 0.5) / 200.0
    middle = np.linspace(-4.0, 6.0, 501)
    log_density = (
        stats.norm.logpdf(means[:, None, None], middle[:, None], np.hypot(grid, sd)).sum(axis=0)
        + stats.norm.logpdf(middle, 0.0, 2.0)[:, None]
        + stats.halfnorm.logpdf(grid)
    )
    evidence = np.log(np.exp(log_density).sum() * (grid[1] - grid[0]) * (middle[1] - middle[0]))
    of_tau = np.exp(log_density).sum(axis=0)
    below = np.cumsum(of_tau / of_tau.sum())
    draws = stacked(group_dataset(result, "posterior"), "tau")
    for quantile in (0.05, 0.25, 0.5, 0.9):
        assert abs(np.mean(draws < np.interp(quantile, below, grid)) - quantile) < 0.04
    assert abs(attributes["log_evidence"] - evidence) < 0.1


@pytest.mark.numerics
def test_a_store_has_the_values_of_the_model(tmp_path):
    """A step in PyMC's coordinates and this one read each other's evaluations."""

    def log_likelihood(s):
        return stats.norm.logpdf([1.0, -2.0, 0.5], 0.0, s).sum()

    with pm.Model() as model:
        s = pm.HalfNormal("s", 3.0)
        pm.Potential("normal", BlackBox(log_likelihood)(s))
    store = EvaluationStore(tmp_path / "run.sqlite")
    first = surrogate_posterior(
        model, n_evaluations=60, store=store, random_seed=1, progressbar=False
    )
    kept = store.to_dataset(model)
    for value, expected in zip(kept["s"].values, kept["log_likelihood"].values, strict=True):
        np.testing.assert_allclose(log_likelihood(value), expected)
    assert group_dataset(first, "posterior").attrs["n_evaluations"] == len(kept["s"])
    surrogate_posterior(model, n_evaluations=60, store=store, random_seed=2, progressbar=False)
    more = store.to_dataset(model)["s"].values
    assert len(np.unique(more)) == len(more) <= 60


def test_what_has_no_quantile_function_is_moved_as_pymc_does():
    with pm.Model() as model:
        x = pm.LogNormal("x", 0.0, 1.0)
        y = pm.TruncatedNormal("y", 0.0, 1.0, lower=0.0)
        pm.Normal("z", x + y, observed=1.0)
    explorer = Explorer(model, budget=100)
    assert not explorer.target.scores.scored
