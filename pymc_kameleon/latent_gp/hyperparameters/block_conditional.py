r"""The conditional Gaussian, and Laplace's approximation, where values go together in blocks.

What `conditional` says of its two sets of standard normals holds here of one. With T = S^T C,

.. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + T^\top T = G G^\top,\quad
    B \mu = C^\top (\nu - W m),\quad v = \mu + G^{-\top} \eta.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dsyrk, dtrmm, dtrmv, dtrsm

from pymc_kameleon.latent_gp.gaussian.blocks import Blocks, BlockSites
from pymc_kameleon.latent_gp.gaussian.sites import (
    Gaussian,
    SiteFactor,
    Sites,
    cholesky_overwriting,
    solve_root,
)
from pymc_kameleon.latent_gp.gaussian_approximations import SMALLEST_STEP
from pymc_kameleon.latent_gp.hyperparameters.conditional import ConditionalGaussian
from pymc_kameleon.latent_gp.reader.precision_prior import PrecisionAt, PrecisionConditional

MOST_STEPS = 100
"""Newton steps to a mode."""


def conditional_of(prior: Gaussian | PrecisionAt, sites: Sites, blocks: Blocks | None):
    """Multiply a prior, which is kept, by sites, those of `Blocks.packed` if there are blocks."""
    if isinstance(prior, PrecisionAt):
        return PrecisionConditional(prior, sites if blocks is None else blocks.unpacked(sites))
    if blocks is None:
        return ConditionalGaussian.of(prior, sites)
    return BlockConditional(prior.mean, prior.cholesky, blocks.unpacked(sites))


def conditional_in_place(prior, sites: Sites, blocks: Blocks | None) -> tuple:
    """Return the free variables and the conditional Gaussian, in the memory of the prior."""
    if isinstance(prior, PrecisionAt):
        return prior, conditional_of(prior, sites, blocks)
    if blocks is not None:
        root, variable = prior.factorised_in_place()
        return variable, BlockConditional(prior.mean, root, blocks.unpacked(sites))
    # Before its memory is the factor's.
    inner = SiteFactor(prior.covariance, sites.precision)
    root, variable = prior.factorised_in_place()
    return variable, ConditionalGaussian(prior.mean, root, sites, inner)


class BlockConditional:
    """N(f; m, C C^T) times sites of blocks, normalised, as `ConditionalGaussian` is for others.

    `centre` (N,) is the mean of v.
    """

    n_sets = 1

    def __init__(self, prior_mean: np.ndarray, root: np.ndarray, sites: BlockSites) -> None:
        self._prior_mean, self._root, self.sites = prior_mean, root, sites
        # In Fortran order T is its transpose, and the upper triangle the lower one.
        inner = dsyrk(1.0, sites.pulled(root).T, lower=0).T
        inner[np.diag_indices_from(inner)] += 1.0
        self._factor = cholesky_overwriting(inner)
        self.log_root_determinant = -float(np.log(np.diagonal(self._factor)).sum())
        if not math.isfinite(self.log_root_determinant):
            raise LinAlgError("The precision of the latent function is not finite.")
        pull = dtrmv(root.T, sites.shift - sites.times(prior_mean), lower=0)
        self.centre = solve_root(self._factor, solve_root(self._factor, pull), transposed=True)

    @property
    def size(self) -> int:
        """N."""
        return self._prior_mean.size

    @property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return self._function(self.centre)

    @property
    def of_predictors(self):
        """The Gaussian of what observations depend on, which is the function."""
        return self

    def predictors(self, f: np.ndarray) -> np.ndarray:
        """Return what observations depend on, which is `f` (N,)."""
        return f

    def whitened(self, f: np.ndarray) -> np.ndarray:
        """Return v = C^-1 (f - m), shape (N,), of a function `f` (N,)."""
        return solve_root(self._root, f - self._prior_mean)

    def log_ratio(self, f: np.ndarray) -> float:
        """Log of N(v; 0, I) over q(v), where the function is `f` (N,)."""
        v = self.whitened(f)
        z = self._standardised(v)
        return 0.5 * float(z @ z - v @ v) + self.log_root_determinant

    def standardised(self, f: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return eta, shape (1, N), where the function is `f` (N,)."""
        return self._standardised(self.whitened(f))[None]

    def restored(self, eta: np.ndarray) -> np.ndarray:
        """Return f (N,) where the standardised function is `eta` (1, N)."""
        v = self.centre + solve_root(self._factor, eta[0], transposed=True)
        return self._function(v)

    def restored_after(self, f: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return the function for the `eta` (1, N) at which it is known to be `f` (N,)."""
        return f

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Draw f (N,)."""
        return self.restored(rng.standard_normal((self.n_sets, self.size)))

    def draws(self, normals: np.ndarray) -> np.ndarray:
        """Return functions f (n, N) of standard normals (1, n, N)."""
        return self.mean + self.images(normals)

    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return C G^-T eta, shape (n, N), the changes of f by standardised `eta` (1, n, N)."""
        changes = dtrsm(1.0, self._factor.T, eta[0].T, lower=0)
        return dtrmm(1.0, self._root.T, changes, lower=0, trans_a=1).T.copy()

    def _standardised(self, v):
        return dtrmv(self._factor.T, v - self.centre, lower=0)

    def _function(self, v):
        return self._prior_mean + dtrmv(self._root.T, v, lower=0, trans=1)


@dataclass(frozen=True)
class NewtonApproximation:
    """Laplace's approximation: sites, `packed` if there are blocks, and log p(y | theta)."""

    sites: Sites
    log_evidence: float
    converged: bool


def newton_laplace(prior, likelihood, tolerance: float) -> NewtonApproximation:
    """Gaussian about the mode of the prior times the likelihood, by Newton's method.

    The curvature that is not positive is floored in the iterations and in the sites. An iteration
    begins at f, and the mean of the conditional Gaussian by sites there is where its step ends.
    """
    f, blocks, distance = prior.mean, likelihood.blocks, np.inf
    value, prior_term = likelihood.value(prior.predictors(f)), 0.0
    for _ in range(MOST_STEPS):
        sites = _sites_at(likelihood, prior.predictors(f))
        conditional = conditional_of(prior, sites, blocks)
        distance = float(np.linalg.norm(conditional.standardised(f, None)))
        if distance < tolerance:
            break
        step, share, before = conditional.mean - f, 1.0, value + prior_term
        while True:
            new = f + share * step
            value = likelihood.value(prior.predictors(new))
            v = conditional.whitened(new)
            prior_term = -0.5 * float(v @ v)
            if value + prior_term >= before - 1e-10 * (1.0 + abs(before)):
                f = new
                break
            share *= 0.5
            if share < SMALLEST_STEP:
                raise ArithmeticError("Newton's method makes no progress.")
    log_evidence = value + prior_term + conditional.log_root_determinant
    return NewtonApproximation(sites, float(log_evidence), distance < tolerance)


def _sites_at(likelihood, u):
    """Sites with the slope and the floored curvature of a log likelihood at predictors `u` (N,)."""
    blocks = likelihood.blocks
    if blocks is None:
        _, slope, curvature, _ = likelihood.terms(u)
        precision = np.maximum(-curvature, 0.0)
        return Sites(precision, slope + precision * u)
    slope, curvature = likelihood.block_terms(u)
    values, vectors = np.linalg.eigh(-curvature)
    precision = (vectors * np.maximum(values, 0.0)[:, None, :]) @ vectors.transpose(0, 2, 1)
    sites = blocks.packed(precision, np.zeros(u.size))
    shift = slope + blocks.unpacked(sites).times(u)
    return Sites(sites.precision, np.concatenate([shift, sites.shift[u.size :]]))
