"""Laplace's approximation and expectation propagation, against what is known exactly."""

import copy
from itertools import pairwise

import latent_data
import numpy as np
import pytest
from latent_likelihoods import (
    Kinks,
    Logit,
    Normal,
    Poisson,
    Probit,
    StudentT,
    squared_exponential,
)
from scipy.integrate import quad
from scipy.stats import multivariate_normal

from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites, factorised, with_sites
from pymc_kameleon.latent_gp.gaussian_approximations import (
    SiteProduct,
    expectation_propagation_approximation,
    laplace_approximation,
)
from pymc_kameleon.latent_gp.quadrature import quadrature_moments
from pymc_kameleon.latent_gp.tilted_moments import (
    log_ndtr_derivatives,
    probit_moments,
)

pytestmark = pytest.mark.numerics

METHODS = [laplace_approximation, expectation_propagation_approximation]


def problem(size, seed=1, lengthscale=0.8, amplitude=1.5, mean=0.0):
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(-2, 2, (size, 1))
    prior = squared_exponential(inputs, lengthscale, amplitude, 1e-4)
    prior = Gaussian(np.full(size, mean), prior.covariance, prior.cholesky)
    return prior, prior.draw(rng), rng


def tilted_by_quad(likelihood, mean, variance):
    """Log normaliser, mean and variance of the tilted density of a likelihood of one term."""
    deviation = np.sqrt(variance)

    def log_density(f):
        value = likelihood.elementwise(np.array([f]))[0] - 0.5 * (f - mean) ** 2 / variance
        return value - 0.5 * np.log(2 * np.pi * variance)

    fine = [likelihood.y[0] + scale * np.linspace(-30, 30, 601) for scale in (1e-3, 0.1, 1.0)]
    grid = np.unique(np.concatenate([mean + deviation * np.linspace(-12, 30, 2001), *fine]))
    logs = np.array([log_density(f) for f in grid])
    peak, kept = logs.max(), grid[logs > logs.max() - 45]
    ends = np.unique(
        np.concatenate([kept[:: len(kept) // 60 + 1], kept[-1:], grid[[logs.argmax()]]])
    )

    def integral(function):
        pieces = pairwise(ends)
        return sum(quad(function, a, b, epsabs=0, epsrel=1e-11, limit=200)[0] for a, b in pieces)

    total = integral(lambda f: np.exp(log_density(f) - peak))
    middle = grid[logs.argmax()]
    first = middle + integral(lambda f: (f - middle) * np.exp(log_density(f) - peak)) / total
    second = integral(lambda f: (f - first) ** 2 * np.exp(log_density(f) - peak)) / total
    return np.log(total) + peak, first, second


def evidence_on_grid(prior, likelihood, n=1501):
    """Log evidence and marginal means for N = 1 or 2 by a fine rule."""
    z = np.linspace(-9, 9, n if prior.size == 1 else 401)
    mesh = np.stack(np.meshgrid(*[z] * prior.size, indexing="ij")).reshape(prior.size, -1)
    f = prior.mean[:, None] + prior.cholesky @ mesh
    one = np.ones(f.shape[1])
    logs = -0.5 * (mesh**2).sum(0) - prior.size / 2 * np.log(2 * np.pi)
    for k in range(prior.size):
        term = copy.copy(likelihood)
        term.y = likelihood.y[k] * one
        logs = logs + term.elementwise(f[k])
    weights = np.exp(logs) * (z[1] - z[0]) ** prior.size
    return np.log(weights.sum()), (f * weights).sum(1) / weights.sum()


@pytest.mark.parametrize("z", [-1e4, -400.0, -20.01, -19.99, -10.0, -3.0, -0.4, 0.0, 1.3, 5.0])
def test_derivatives_of_log_ndtr(z):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(80):
        exact = [
            float(mpmath.diff(lambda x: mpmath.log(mpmath.ncdf(x)), mpmath.mpf(z), order))
            for order in range(5)
        ]
    found = log_ndtr_derivatives(np.array([z]))[:, 0]
    np.testing.assert_allclose(found[:3], exact[:3], rtol=1e-11)
    # Just above the first z of the series the closed form has lost this much.
    np.testing.assert_allclose(found[3], exact[3], rtol=1e-8)
    np.testing.assert_allclose(found[4], exact[4], rtol=1e-5)


CAVITIES = [(0.0, 1.0), (-3.0, 0.04), (3.0, 100.0), (-8.0, 4.0)]


@pytest.mark.parametrize("mean, variance", [*CAVITIES, (-40.0, 25.0), (0.0, 2.6e4)])
@pytest.mark.parametrize("label", [-1.0, 1.0])
def test_probit_moments(mean, variance, label):
    likelihood = Probit([label])
    moments = probit_moments(np.array([label]), np.array([mean]), np.array([variance]))
    check_moments(moments, likelihood, mean, variance)


@pytest.mark.parametrize("mean, variance", [*CAVITIES, (120.0, 3600.0)])
@pytest.mark.parametrize(
    "likelihood",
    [
        Logit([-1.0]),
        Poisson([0.0]),
        Poisson([7.0]),
        Normal([0.3], 1e-3),
        StudentT([2.0], 4, 0.5),
        StudentT([5.0], 2, 0.01),
        Kinks([0.3], 2.0, 2.0),
        Kinks([2.0], 3e3, 1e3),
        Kinks([[-1.0], [0.5], [0.6]], 3.0, 1.0),
    ],
    ids=lambda likelihood: f"{type(likelihood).__name__}{likelihood.y[0]:g}",
)
def test_quadrature_moments(likelihood, mean, variance):
    moments = quadrature_moments(likelihood, np.array([mean]), np.array([variance]))
    check_moments(moments, likelihood, mean, variance)


def check_moments(moments, likelihood, mean, variance):
    log_normaliser, first, second = tilted_by_quad(likelihood, mean, variance)
    assert moments.log_normaliser[0] == pytest.approx(log_normaliser, rel=1e-9, abs=1e-8)
    deviation = np.sqrt(second)
    assert abs(mean + variance * moments.slope[0] - first) / deviation < 1e-8
    assert variance * moments.shrinkage[0] / second == pytest.approx(1.0, abs=1e-8)
    assert moments.curvature[0] == pytest.approx((1 - second / variance) / variance, abs=1e-8)


def test_quadrature_treats_different_terms_together():
    y, means = np.array([5.0, 0.0, -3.0]), np.array([0.0, 0.1, 40.0])
    variances = np.array([1.0, 100.0, 1e-4])
    together = quadrature_moments(StudentT(y, 2, 0.01), means, variances)
    for n in range(3):
        alone = quadrature_moments(StudentT(y[[n]], 2, 0.01), means[[n]], variances[[n]])
        assert together.slope[n] == pytest.approx(alone.slope[0], rel=1e-8)
        assert together.shrinkage[n] == pytest.approx(alone.shrinkage[0], rel=1e-8)


def test_sigmoids_in_a_broad_cavity():
    mean, variance = np.array([70.73459698087633]), np.array([180.81056617987215])
    moments = quadrature_moments(Logit([1.0]), mean, variance, tolerance=1e-10)
    assert moments.log_normaliser[0] == pytest.approx(-9.38872e-8, rel=1e-4)


def test_quadrature_that_does_not_settle_is_an_error():
    class Step(Logit):
        def elementwise(self, f):
            return np.where(np.sin(300 * f) > 0, 0.0, -3.0)

    with pytest.raises(FloatingPointError, match="element 0"):
        quadrature_moments(Step([1.0]), np.zeros(1), np.ones(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("sd", [0.05, 0.5])
def test_exact_for_a_gaussian_likelihood(method, mean, sd):
    prior, f, rng = problem(12, mean=mean)
    y = f + sd * rng.standard_normal(12)
    result = method(prior, Normal(y, sd))
    total = prior.covariance + sd**2 * np.eye(12)
    gain = np.linalg.solve(total, prior.covariance).T
    exact = multivariate_normal(prior.mean, total).logpdf(y)
    assert result.converged
    assert result.n_floored == 0
    assert result.log_evidence == pytest.approx(exact, abs=1e-8)
    expected = prior.mean + gain @ (y - prior.mean)
    np.testing.assert_allclose(result.posterior.mean, expected, atol=1e-8)
    covariance = prior.covariance - gain @ prior.covariance
    np.testing.assert_allclose(result.posterior.covariance, covariance, atol=1e-8)
    _, deviations = result.marginals()
    np.testing.assert_allclose(deviations**2, np.diagonal(covariance), atol=1e-8)
    np.testing.assert_allclose(result.sites.precision, 1 / sd**2, rtol=1e-6)


@pytest.mark.parametrize("likelihood", [Probit([1.0]), Logit([-1.0]), Poisson([4.0])])
def test_one_term_is_exact(likelihood):
    prior = factorised([0.7], [[2.5]])
    result = expectation_propagation_approximation(prior, likelihood)
    log_evidence, mean = evidence_on_grid(prior, likelihood)
    assert result.log_evidence == pytest.approx(log_evidence, abs=1e-7)
    assert result.posterior.mean[0] == pytest.approx(mean[0], abs=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "tolerances"),
    [
        (Probit([1.0, -1.0]), (5e-3, 0.01)),
        (Logit([-1.0, -1.0]), (5e-3, 0.01)),
        (Poisson([4.0, 1.0]), (5e-3, 0.01)),
        (StudentT([1.5, -0.5], 4, 0.3), (0.03, 0.02)),
    ],
)
def test_two_terms_are_close(likelihood, tolerances):
    prior = factorised([0.4, -0.2], [[1.5, 0.7], [0.7, 1.0]])
    result = expectation_propagation_approximation(prior, likelihood)
    log_evidence, mean = evidence_on_grid(prior, likelihood)
    assert result.converged
    assert result.log_evidence == pytest.approx(log_evidence, abs=tolerances[0])
    np.testing.assert_allclose(result.posterior.mean, mean, atol=tolerances[1])
    if likelihood.probit_labels is not None:
        error = abs(result.log_evidence - log_evidence)
        assert abs(result.second_order_log_evidence() - log_evidence) < 0.2 * error


@pytest.mark.parametrize("kind", ["probit", "logit", "poisson"])
def test_fixed_point(kind):
    """Cavities by dense algebra, and their moments by a method of their own."""
    prior, f, rng = problem(30, mean=0.5)
    y = rng.poisson(np.exp(f)) if kind == "poisson" else np.where(f > 0, 1.0, -1.0)
    likelihood = {"probit": Probit, "logit": Logit, "poisson": Poisson}[kind](y)
    result = expectation_propagation_approximation(prior, likelihood, tolerance=1e-8, damping=0.2)
    precision, shift = result.sites.precision, result.sites.shift
    covariance = np.linalg.inv(np.linalg.inv(prior.covariance) + np.diag(precision))
    means = prior.mean + covariance @ (shift - precision * prior.mean)
    variances = 1.0 / (1.0 / np.diagonal(covariance) - precision)
    cavity_means = variances * (means / np.diagonal(covariance) - shift)
    np.testing.assert_allclose(result.cavities(), [cavity_means, variances], atol=1e-6)
    tilted = quadrature_moments(likelihood, cavity_means, variances)
    np.testing.assert_allclose(cavity_means + variances * tilted.slope, means, atol=1e-6)
    np.testing.assert_allclose(variances * tilted.shrinkage, np.diagonal(covariance), rtol=1e-6)
    assert abs(result.log_evidence - laplace_approximation(prior, likelihood).log_evidence) < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_student_t(method):
    rng = np.random.default_rng(5)
    # Dense points and outliers that stand alone: elsewhere the posterior has several modes.
    prior = squared_exponential(np.linspace(-2, 2, 40)[:, None], 1.0, 1.0, 1e-4)
    f = prior.draw(rng)
    y = f + 0.3 * rng.standard_normal(40)
    y[5::9] += 4.0
    result = method(prior, StudentT(y, 4, 0.3))
    assert result.converged
    assert result.n_floored > 0
    assert "floored" in repr(result)
    assert np.all(result.sites.precision >= 0)
    posterior, _ = with_sites(prior, result.sites)
    np.testing.assert_allclose(posterior.mean, result.posterior.mean, atol=1e-8)
    # Outliers pull a Gaussian likelihood much further.
    pulled = method(prior, Normal(y, 0.3)).posterior.mean - f
    assert np.sum((result.posterior.mean - f) ** 2) < 0.5 * np.sum(pulled**2)


def test_laplace_is_at_the_mode():
    prior, f, rng = problem(30, mean=-1.0)
    result = laplace_approximation(prior, Poisson(rng.poisson(np.exp(f))))
    mode = result.posterior.mean
    _, slope, second, _ = result.likelihood.terms(mode)
    gradient = prior.covariance @ slope - (mode - prior.mean)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    precision = np.linalg.inv(prior.covariance) - np.diag(second)
    np.testing.assert_allclose(result.posterior.covariance @ precision, np.eye(30), atol=1e-6)
    started = laplace_approximation(prior, result.likelihood, start=f + 3.0)
    np.testing.assert_allclose(started.posterior.mean, mode, atol=1e-6)


def test_laplace_does_not_diverge_from_far_away():
    prior, _, _ = problem(20, amplitude=5.0, mean=6.0)
    result = laplace_approximation(prior, Poisson(np.zeros(20)), start=np.full(20, 30.0))
    assert result.converged


@pytest.mark.parametrize("amplitude", [1.0, 10.0])
@pytest.mark.parametrize("noise", [1e-1, 1e-3, 1e-4])
def test_precise_sites_lose_no_digits(amplitude, noise):
    """Normal noise: expectation propagation is exact, log p(y) and moments in closed form."""
    inputs = np.linspace(0, 1, 40)[:, None]
    prior = squared_exponential(inputs, 0.3, amplitude)
    rng = np.random.default_rng(0)
    y = prior.draw(rng) + noise * rng.standard_normal(40)
    result = expectation_propagation_approximation(prior, Normal(y, noise))
    total = factorised(np.zeros(40), prior.covariance + noise**2 * np.eye(40))
    assert result.log_evidence == pytest.approx(total.log_density(y), rel=1e-7, abs=1e-5)
    product = SiteProduct(prior, result.sites)
    solved = np.linalg.solve(total.cholesky, prior.covariance)
    sd = np.sqrt(np.diagonal(prior.covariance) - np.sum(solved**2, axis=0))
    mean = prior.covariance @ np.linalg.solve(total.covariance, y)
    np.testing.assert_allclose(product.mean / sd, mean / sd, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(product.variance), sd, rtol=1e-3)


def test_no_silent_failure():
    prior, f, _ = problem(20)
    likelihood = Probit(np.where(f > 0, 1.0, -1.0))
    with pytest.warns(UserWarning, match="has not converged"):
        assert not expectation_propagation_approximation(prior, likelihood, max_sweeps=1).converged
    with pytest.warns(UserWarning, match="has not converged"):
        result = laplace_approximation(prior, likelihood, max_iterations=1)
    assert "NOT converged" in repr(result)


PRIOR, ONES = problem(5)[0], np.ones(5)
propagate = expectation_propagation_approximation


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: propagate(PRIOR, Logit(ONES), damping=1.0), "damping"),
        (lambda: propagate(PRIOR, Logit(ONES), tolerance=0.0), "tolerance"),
        (lambda: propagate(PRIOR, Logit(ONES), max_sweeps=0), "max_sweeps"),
        (lambda: propagate(PRIOR, Logit(ONES), n_nodes=3), "n_nodes"),
        (lambda: propagate(PRIOR, Logit(ONES), sites=Sites(-1e3 * ONES, 0 * ONES)), "sites"),
        (lambda: propagate(PRIOR, Logit(ONES[:4])), "5 values and the likelihood 4"),
        (lambda: laplace_approximation(PRIOR, Logit(ONES[:4])), "5 values and the likelihood 4"),
        (
            lambda: propagate(PRIOR, Logit(ONES)).second_order_log_evidence(),
            "second_order_log_evidence",
        ),
        (
            lambda: laplace_approximation(PRIOR, Probit(ONES)).second_order_log_evidence(),
            "second_order_log_evidence",
        ),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "read, log_lengthscale, log_amplitude, jitter, laplace, propagated, second_order",
    [
        (latent_data.glass, 1.0, 1.0, 1e-6, -39.6721, -38.3593, -38.0533),
        (latent_data.crabs, 1.5, 3.0, 1e-6, -31.2356, -31.4156, -31.2173),
        (latent_data.usps, 3.0, 0.0, 0.0, -222.390, -222.355, None),
        (latent_data.usps, 4.85, 5.1, 0.0, -111.001, -106.0892, -105.8169),
    ],
    ids=["glass", "crabs", "usps", "usps-wide"],
)
def test_reference_values(
    read, log_lengthscale, log_amplitude, jitter, laplace, propagated, second_order
):
    inputs, labels = read()
    prior = squared_exponential(inputs, np.exp(log_lengthscale), np.exp(log_amplitude), jitter)
    likelihood = Probit(labels)
    mode = laplace_approximation(prior, likelihood)
    assert mode.log_evidence == pytest.approx(laplace, abs=1e-3)
    result = expectation_propagation_approximation(prior, likelihood)
    assert result.converged
    assert result.log_evidence == pytest.approx(propagated, abs=1e-3)
    if second_order is not None:
        assert result.second_order_log_evidence() == pytest.approx(second_order, abs=1e-3)
