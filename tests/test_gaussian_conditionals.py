"""A latent Gaussian given Gaussian sites, in each way that it is computed, against plain algebra.

One prior N(m, K) of five values, with sites of each value or of values that go together: mean,
covariance, log determinant and log density of the product, the map from standard normals and back,
and Laplace's approximation, which is exact for a likelihood that is itself Gaussian.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from latent_likelihoods import squared_exponential
from scipy import stats

from pymc_kameleon.latent_gp.gaussian import sparse_cholesky
from pymc_kameleon.latent_gp.gaussian.blocks import Blocks
from pymc_kameleon.latent_gp.gaussian.conditional import conditional_in_place, conditional_of
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, SiteProduct, Sites, with_sites
from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import Pattern
from pymc_kameleon.latent_gp.gaussian_approximations import (
    laplace_approximation,
    laplace_in_blocks,
)
from pymc_kameleon.latent_gp.reader.density_prior import Density
from pymc_kameleon.latent_gp.reader.precision_prior import PrecisionAt, Products
from pymc_kameleon.latent_gp.reader.prior import UnfactorisedPrior
from pymc_kameleon.pseudo_marginal.gp_classification import ImportanceDensity

SIZE, RNG = 5, np.random.default_rng(1)
MEAN, SHIFT, PLACE = RNG.standard_normal((3, SIZE))
COVARIANCE = squared_exponential(np.arange(SIZE)[:, None], 1.0, 1.3, jitter=0.1).covariance
BLOCKS = Blocks.of(np.arange(SIZE) // 2, np.arange(SIZE) % 2)
PRECISION = np.diag(RNG.gamma(2.0, size=SIZE))
JOINT_PRECISION = PRECISION.copy()
for i in (0, 2):
    JOINT_PRECISION[i, i + 1] = JOINT_PRECISION[i + 1, i] = 0.4 * np.sqrt(
        PRECISION[i, i] * PRECISION[i + 1, i + 1]
    )


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def dense_prior():
    return Gaussian(MEAN, COVARIANCE.copy(), np.linalg.cholesky(COVARIANCE))


def unfactorised():
    return UnfactorisedPrior(MEAN, COVARIANCE.copy(), is_whitened=True)


def by_precision(together):
    """The same prior, by the entries of its precision."""
    precision = np.linalg.inv(COVARIANCE)
    rows, columns = np.tril_indices(SIZE)
    own = np.arange(SIZE)
    products = Products(own, own, (SIZE, SIZE), together, (rows, columns))
    density = Density(
        Pattern(rows, columns, SIZE),
        precision[rows, columns],
        np.zeros((0, SIZE)),
        np.zeros(0),
        precision @ MEAN,
        0.0,
    )
    return PrecisionAt(density, products, np.ones(SIZE))


def site_matrices(blocks):
    """Give W, the sites as they are learnt, and pairs of values that go together."""
    if blocks is None:
        return PRECISION, Sites(np.diagonal(PRECISION).copy(), SHIFT), np.zeros((0, 2), dtype=int)
    entries = np.zeros((*BLOCKS.members.shape, 2))
    for entry, members in zip(entries, BLOCKS.members, strict=True):
        own = members[members >= 0]
        entry[: own.size, : own.size] = JOINT_PRECISION[np.ix_(own, own)]
    return JOINT_PRECISION, BLOCKS.packed(entries, SHIFT), BLOCKS.together


class Quadratic:
    """Log likelihood shift u - u W u / 2, as Newton's method takes it."""

    size, probit_labels = SIZE, None

    def __init__(self, matrix, blocks):
        self.matrix, self.blocks = matrix, blocks

    def value(self, u):
        return float(SHIFT @ u - 0.5 * u @ self.matrix @ u)

    def terms(self, u):
        own = np.diagonal(self.matrix)
        return np.array([u * (SHIFT - 0.5 * own * u), SHIFT - own * u, -own, np.zeros(SIZE)])

    def block_terms(self, u):
        columns = np.zeros((2, SIZE))
        for members in self.blocks.members:
            own = members[members >= 0]
            columns[: own.size, own] = self.matrix[np.ix_(own, own)]
        return SHIFT - self.matrix @ u, -self.blocks.matrices(columns)


@pytest.fixture(params=[None, BLOCKS], ids=["values", "blocks"])
def case(request):
    blocks = request.param
    matrix, sites, together = site_matrices(blocks)
    covariance = np.linalg.inv(np.linalg.inv(COVARIANCE) + matrix)
    mean = covariance @ (np.linalg.solve(COVARIANCE, MEAN) + SHIFT)
    prior = stats.multivariate_normal(MEAN, COVARIANCE)
    product = stats.multivariate_normal(mean, covariance)
    at = SHIFT @ PLACE - 0.5 * PLACE @ matrix @ PLACE
    return SimpleNamespace(
        blocks=blocks,
        sites=sites,
        together=together,
        likelihood=Quadratic(matrix, blocks),
        mean=mean,
        covariance=covariance,
        half_log_determinant=0.5
        * (np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(COVARIANCE)[1]),
        log_ratio=prior.logpdf(PLACE) - product.logpdf(PLACE),
        log_evidence=prior.logpdf(PLACE) + at - product.logpdf(PLACE),
        squared_length=(PLACE - MEAN) @ np.linalg.solve(COVARIANCE, PLACE - MEAN),
    )


PRIORS = {
    "covariance": lambda case: dense_prior(),
    "in place": lambda case: unfactorised(),
    "sparse precision": lambda case: by_precision(case.together),
    "whole precision": lambda case: by_precision(case.together),
}


@pytest.fixture(params=PRIORS)
def prior(request, case, monkeypatch):
    monkeypatch.setattr(sparse_cholesky, "FULL", 9.0 if request.param[0] == "s" else 0.25)
    return PRIORS[request.param](case)


def test_conditional(case, prior):
    if isinstance(prior, UnfactorisedPrior):
        _, found = conditional_in_place(prior, case.sites, case.blocks)
    else:
        found = conditional_of(prior, case.sites, case.blocks)
    close(found.mean, case.mean)
    close(found.log_jacobian, case.half_log_determinant)
    close(found.log_ratio(PLACE), case.log_ratio)
    close(np.sum(found.whiten(PLACE) ** 2), case.squared_length)
    units = np.eye(found.n_sets * SIZE).reshape(-1, found.n_sets, SIZE).transpose(1, 0, 2).copy()
    images = found.images(units)
    close(images.T @ images, case.covariance)
    close(found.draws(units), case.mean + images)
    eta = found.to_eta(PLACE, np.random.default_rng(2))
    assert eta.shape == (found.n_sets, SIZE)
    close(found.from_eta(eta), PLACE)
    close(found.at_predictors(found.predictors(PLACE), eta), PLACE)
    close(found.from_eta(0.0 * eta), case.mean)
    close(found.from_eta(eta) - found.mean, found.images(eta[:, None])[0])
    normals = np.random.default_rng(3).standard_normal(eta.shape)
    close(found.draw(np.random.default_rng(3)), found.from_eta(normals))
    if found.n_sets == 1:  # the map is one to one, and eta as probable as what it stands for
        z = found.to_eta(PLACE, None)
        normaliser = 0.5 * np.linalg.slogdet(2 * np.pi * case.covariance)[1]
        density = stats.multivariate_normal(case.mean, case.covariance).logpdf(PLACE)
        close(-0.5 * np.sum(z**2) - normaliser, density)


@pytest.mark.parametrize(
    ("case", "prior"),
    [(BLOCKS, "covariance"), *((b, name) for b in (None, BLOCKS) for name in list(PRIORS)[2:])],
    indirect=True,
)
def test_newton_for_conditionals(case, prior):
    found = laplace_in_blocks(prior, case.likelihood, 1e-8)
    assert found.converged
    close(found.log_evidence, case.log_evidence)
    close(conditional_of(prior, found.sites, case.blocks).mean, case.mean)


@pytest.mark.parametrize("case", [None], indirect=True)
def test_products_of_values(case):
    """Those whose digits `test_gaussian_sites` measures, and Laplace's approximation."""
    prior = dense_prior()
    product, log_integral = with_sites(prior, case.sites)
    close(product.mean, case.mean)
    close(product.covariance, case.covariance)
    close(log_integral, case.log_evidence)
    close(prior.log_density(PLACE) - product.log_density(PLACE), case.log_ratio)
    close(product.log_determinant - prior.log_determinant, 2 * case.half_log_determinant)
    of_values = SiteProduct(prior, case.sites)
    close(of_values.mean, case.mean)
    close(of_values.variance, np.diagonal(case.covariance))
    close(of_values.half_log_determinant, -case.half_log_determinant)
    found = laplace_approximation(prior, case.likelihood)
    close(found.posterior.mean, case.mean)
    close(found.posterior.covariance, case.covariance)
    close(found.log_evidence, case.log_evidence)
    density = ImportanceDensity.product(prior, case.sites)
    v = np.linalg.solve(prior.cholesky, PLACE - MEAN)[:, None]
    z = density.whiten(v)
    close(density.draw(z), v)
    close(density.log_ratio(v, z), -case.log_ratio)
    close(prior.mean + prior.cholesky @ density.draw(np.zeros((SIZE, 1)))[:, 0], case.mean)
