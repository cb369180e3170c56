"""A Gaussian times Gaussian sites: every form of the product, in one table of hard cases.

Covariances K = L L^T hold without rounding, since their factors have few digits, so that the two
factorisations, from K and from L, are of the same problem. Errors are in standard deviations of the
product. The reference is the formula K (I + W K)^-1 in 80 digits, or for 300 values the Cholesky
factor of I + S K S in extended precision.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from latent_likelihoods import squared_exponential

from pymc_kameleon.latent_gp.gaussian.conditional import conditional_of
from pymc_kameleon.latent_gp.gaussian.sites import (
    Gaussian,
    SiteFactor,
    SiteProduct,
    Sites,
    with_sites,
)
from pymc_kameleon.latent_gp.riemannian_metric import Metric
from pymc_kameleon.pseudo_marginal.gp_classification import ImportanceDensity

pytestmark = pytest.mark.numerics

mpmath = pytest.importorskip("mpmath")


def smooth(size):
    inputs = np.linspace(0, 2, size)
    covariance = np.exp(-0.5 * (inputs - inputs[:, None]) ** 2) + 0.01 * np.eye(size)
    return np.round(np.linalg.cholesky(covariance) * 2**20) / 2**20


def nearly_constant(smallest):
    """One large eigenvalue of K, and seven that are as small as the square of `smallest`."""
    root = smallest * np.tril(np.random.default_rng(3).integers(-2, 3, (8, 8)).astype(float))
    root[np.diag_indices(8)] = smallest
    root[:, 0] = 1.0
    return root


ALL_SIZES = [0.0, 1e-300, 1e-20, 1e-9, 1e-4, 1.0, 1e4, 1e12]
TYPICAL = np.linspace(0.1, 3.0, 8)
SMALL, SINGULAR = nearly_constant(2.0**-22), nearly_constant(0.0)

# Name: root of K, precisions, unit of the function.
CASES = {
    "typical": (smooth(8), TYPICAL, 1.0),
    "one value": (np.array([[1.5]]), [0.7], 1.0),
    "one value, nothing told": (np.array([[1.5]]), [0.0], 1.0),
    "nothing told": (smooth(8), np.zeros(8), 1.0),
    "vague": (smooth(8), np.full(8, 1e-9), 1.0),
    "all sizes": (smooth(8), ALL_SIZES, 1.0),
    "all sizes, in a small unit": (smooth(8), ALL_SIZES, 2.0**-30),
    "all sizes, in a large unit": (smooth(8), ALL_SIZES, 2.0**30),
    "one precise among vague": (smooth(8), [1e-9] * 4 + [1e12] + [1e-9] * 3, 1.0),
    "one precise among typical": (smooth(8), [1.0] * 4 + [1e12] + [1.0] * 3, 1.0),
    "precise": (smooth(8), np.full(8, 1e12), 1.0),
    "small eigenvalues": (SMALL, TYPICAL, 1.0),
    "small eigenvalues, precise": (SMALL, np.full(8, 1e12), 1.0),
    "singular": (SINGULAR, TYPICAL, 1.0),
    "one negative": (smooth(8), [1.0, 2.0, -0.1, 0.0, 1.0, 1.0, 1e-12, 1e3], 1.0),
    "negative, small eigenvalues": (SMALL, [1.0, 2.0, -0.05, 1.0, 1.0, 1.0, 1.0, 1.0], 1.0),
    "300 values": (smooth(300), np.geomspace(1e-3, 1e3, 300), 1.0),
}


@pytest.fixture(scope="module")
def case(request):
    root, precision, unit = CASES[request.param]
    precision = np.asarray(precision) / unit**2
    rng = np.random.default_rng(0)
    mean = unit * np.round(rng.standard_normal(len(root)), 3)
    root = unit * root
    # A singular K has no factor that can be divided by.
    factor = root if np.all(np.diagonal(root)) else None
    prior = Gaussian(mean, root @ root.T, factor)
    places = mean + 0.5 * root @ rng.standard_normal(len(root))
    noise = np.sqrt(np.abs(precision)) * rng.standard_normal(len(root))
    sites = Sites(precision, precision * places + noise)
    exact = (exactly if len(root) < 50 else in_extended_precision)(prior, sites)
    return SimpleNamespace(name=request.param, prior=prior, sites=sites, exact=exact)


def exactly(prior, sites):
    with mpmath.workdps(80):
        covariance = mpmath.matrix(prior.covariance.tolist())
        precision, shift, mean = (
            mpmath.matrix(x.tolist()) for x in (sites.precision, sites.shift, prior.mean)
        )
        told = mpmath.diag(precision)
        whole = mpmath.eye(prior.size) + covariance * told
        product = whole**-1 * covariance
        pull = shift - told * mean
        offset = product * pull
        return described(
            product.tolist(),
            list(offset),
            list(pull - told * offset),
            [1 - p * product[i, i] for i, p in enumerate(precision)],
            mpmath.log(mpmath.det(whole)) / 2,
            (mean.T * (shift - told * mean / 2))[0],
            (pull.T * offset / 2)[0],
        )


def in_extended_precision(prior, sites):
    covariance, precision, mean = (
        x.astype(np.longdouble) for x in (prior.covariance, sites.precision, prior.mean)
    )
    roots = np.sqrt(precision)
    factor = np.eye(prior.size) + roots[:, None] * covariance * roots
    explained = roots[:, None] * covariance
    for k in range(prior.size):
        factor[k:, k] /= np.sqrt(factor[k, k])
        factor[k + 1 :, k + 1 :] -= np.outer(factor[k + 1 :, k], factor[k + 1 :, k])
        explained[k] = (explained[k] - factor[k, :k] @ explained[:k]) / factor[k, k]
    product = covariance - explained.T @ explained
    pull = sites.shift - precision * mean
    offset = product @ pull
    return described(
        product,
        offset,
        pull - precision * offset,
        1 - precision * np.diagonal(product),
        np.log(np.diagonal(factor)).sum(),
        mean @ (sites.shift - precision * mean / 2),
        pull @ offset / 2,
    )


def described(covariance, offset, slope, shares, half_log_determinant, at_mean, gain):
    covariance, offset, slope, shares = (
        np.array(x, dtype=float) for x in (covariance, offset, slope, shares)
    )
    log_ratio = float(gain - half_log_determinant)
    return SimpleNamespace(
        covariance=covariance,
        sd=np.sqrt(np.diagonal(covariance)),
        offset=offset,
        slope=slope,
        shares=shares,
        half_log_determinant=float(half_log_determinant),
        log_integral=float(at_mean) + log_ratio,
        log_ratio=log_ratio,  # of prior over product, at the prior mean
    )


def of_site_product(prior, sites):
    found = SiteProduct(prior, sites)
    cavity_mean, cavity_variance = found.cavities()
    return {
        "offset": found.mean - prior.mean,
        "sd": np.sqrt(found.variance),
        "slope": found.slope,
        "shares": found.shares,
        "half_log_determinant": found.half_log_determinant,
        "cavities": (cavity_mean - prior.mean, cavity_variance),
    }


def of_with_sites(prior, sites):
    found, log_integral = with_sites(prior, sites)
    assert not np.any(np.triu(found.cholesky, 1))
    return {
        "offset": found.mean - prior.mean,
        "sd": np.sqrt(np.sum(found.cholesky**2, axis=1)),
        "covariance": found.covariance,
        "log_integral": log_integral,
        "half_log_determinant": np.log(
            np.diagonal(prior.cholesky) / np.diagonal(found.cholesky)
        ).sum(),
    }


def of_conditional(prior, sites):
    found = conditional_of(prior, sites, None)
    units = np.eye(2 * prior.size).reshape(-1, 2, prior.size).transpose(1, 0, 2)
    images = found.images(np.ascontiguousarray(units))
    f = found.from_eta(np.random.default_rng(1).standard_normal((2, prior.size)))
    return {
        "offset": found.mean - prior.mean,
        "covariance": images.T @ images,
        "half_log_determinant": -found.log_jacobian,
        "log_ratio": found.log_ratio(prior.mean),
        "log_ratio_at": (f, found.log_ratio(f)),
    }


def of_metric(prior, sites):
    found = Metric(prior, sites.precision)
    columns = np.eye(prior.size) / prior.cholesky[0, 0]
    return {
        "covariance": np.array([found.velocity(p) for p in columns]) * prior.cholesky[0, 0],
        "shares": 1.0 - found.leverage,
        "half_log_determinant": 0.5 * (found.log_determinant + prior.log_determinant),
    }


def of_importance_density(prior, sites):
    found = ImportanceDensity.product(prior, sites)
    draws = prior.cholesky @ (found.draw(np.eye(prior.size)) - found.centre[:, None])
    return {
        "offset": prior.cholesky @ found.centre,
        "covariance": draws @ draws.T,
        "half_log_determinant": found.log_determinant,
    }


def of_site_factor(prior, sites):
    """What Newton's method takes of it."""
    found = SiteFactor(prior.covariance, sites.precision)
    return {"shares": found.shares, "half_log_determinant": found.half_log_determinant}


FORMS = {
    "SiteProduct": of_site_product,
    "with_sites": of_with_sites,
    "ConditionalGaussian": of_conditional,
    "Metric": of_metric,
    "ImportanceDensity": of_importance_density,
    "SiteFactor": of_site_factor,
}

FROM_ROOT = ("with_sites", "ImportanceDensity")
"""Forms that factorise I + L^T W L, where 1e12 of one site leaves four digits to the others."""

FROM_COVARIANCE = ("SiteProduct", "SiteFactor")
"""Forms that need no factor of the covariance."""

NOT_NEGATIVE = ("with_sites", "ConditionalGaussian", "Metric", "SiteFactor")


def tolerance(form, name):
    if name == "small eigenvalues, precise" and form not in FROM_ROOT:
        return 0.02  # K has the digits of the small eigenvalues, I + S K S has lost them.
    if form in FROM_ROOT and ("one precise" in name or "all sizes" in name):
        return 1e-3
    if form == "Metric" and ("precise" in name or "all sizes" in name):
        return 0.01  # A momentum is the sum of what a site of 1e12 and a prior of 1 say.
    # Where precise, the shift of a site has the mean to 1e-16 of 1e6 standard deviations.
    return 1e-8


def test_without_negative_precisions_the_mean_stays():
    prior = squared_exponential(np.linspace(0, 1, 4)[:, None], 0.5, 1.5, jitter=0.1)
    sites = Sites(np.array([-0.1, 0.4, -0.2, 1.0]), np.array([0.3, -1.0, 0.5, 2.0]))
    inverse = np.linalg.inv(prior.covariance)
    mean = np.linalg.solve(inverse + np.diag(sites.precision), sites.shift + inverse @ prior.mean)
    floored = sites.floored(mean)
    np.testing.assert_array_equal(floored.precision, [0.0, 0.4, 0.0, 1.0])
    np.testing.assert_allclose(with_sites(prior, floored)[0].mean, mean, rtol=1e-10)


@pytest.mark.parametrize(
    ("case", "form"),
    [(name, form) for name in CASES for form in (FORMS if name != "singular" else FROM_COVARIANCE)],
    indirect=["case"],
)
def test_every_form_of_the_product(case, form):
    prior, sites, exact, name = case.prior, case.sites, case.exact, case.name
    if np.any(sites.precision < 0) and form in NOT_NEGATIVE:
        with pytest.raises((ValueError, FloatingPointError)):
            FORMS[form](prior, sites)
        return
    bound = tolerance(form, name)
    for key, value in FORMS[form](prior, sites).items():
        if key == "log_ratio_at":
            f, value = value
            h = f - prior.mean - exact.offset
            expected = 0.5 * sites.precision @ h**2 - (h + 0.5 * exact.offset) @ exact.slope
            assert abs(value - expected + exact.half_log_determinant) < max(bound, 1e-4)
            continue
        if key == "cavities":
            variance = exact.sd**2 / exact.shares
            expected = exact.offset - variance * exact.slope
            assert np.max(np.abs(value[0] - expected) / np.sqrt(variance)) < max(bound, 1e-4)
            np.testing.assert_allclose(value[1], variance, rtol=max(bound, 1e-8))
            continue
        scale = {
            "offset": exact.sd,
            "sd": exact.sd,
            "covariance": np.outer(exact.sd, exact.sd),
            "shares": exact.shares if form == "SiteProduct" else 1.0,
            "slope": np.abs(exact.slope).max() + 1e-300,
        }.get(key, 1.0)
        expected = getattr(exact, key)
        if np.ndim(expected) == 0:
            scale = max(1.0, abs(expected))
        assert np.max(np.abs(value - expected) / scale) < bound, (key, value, expected)
