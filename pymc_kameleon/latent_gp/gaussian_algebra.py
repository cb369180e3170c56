"""Gaussians by covariance and Cholesky factor, and what Gaussian sites make of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky, eigvalsh, lapack, solve_triangular

from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = [
    "LEAST_ROOT",
    "Gaussian",
    "Sites",
    "cholesky_of",
    "cholesky_overwriting",
    "factorised",
    "inner_matrix",
    "with_sites",
]

LEAST_ROOT = 1e-4
"""Root of a site's precision from which a division by it keeps 12 digits of the function."""


@dataclass(frozen=True)
class Gaussian:
    """N(mean, covariance).

    Attributes
    ----------
    mean : array, shape (N,)
    covariance : array, shape (N, N)
    cholesky : array, shape (N, N)
        Lower triangular, cholesky @ cholesky.T = covariance.
    """

    mean: np.ndarray
    covariance: np.ndarray
    cholesky: np.ndarray

    @property
    def size(self) -> int:
        """N."""
        return len(self.mean)

    @cached_property
    def log_determinant(self) -> float:
        """Log determinant of the covariance."""
        return 2.0 * float(np.log(np.diagonal(self.cholesky)).sum())

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw from the Gaussian: an array (N,)."""
        return self.mean + self.cholesky @ rng.standard_normal(self.size)

    def directions(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws (n, N) of the Gaussian about its mean."""
        return rng.standard_normal((n, self.size)) @ self.cholesky.T

    def log_density(self, x: np.ndarray) -> float:
        """Normalised log density at `x` (N,)."""
        z = solve_triangular(self.cholesky, x - self.mean, lower=True, check_finite=False)
        return -0.5 * float(z @ z + self.log_determinant + self.size * np.log(2 * np.pi))

    def score(self, x: np.ndarray) -> np.ndarray:
        """Gradient (N,) of the log density at `x` (N,)."""
        return -cho_solve((self.cholesky, True), x - self.mean, check_finite=False)


@dataclass(frozen=True)
class Sites:
    """Gaussian site factors: their product is exp(sum(shift x - precision x^2 / 2)).

    Attributes
    ----------
    precision : array, shape (N,)
    shift : array, shape (N,)
    """

    precision: np.ndarray
    shift: np.ndarray

    @classmethod
    def flat(cls, size: int) -> "Sites":
        """Sites that say nothing."""
        return cls(np.zeros(size), np.zeros(size))

    def scaled(self, power: float) -> "Sites":
        """Every factor raised to `power`."""
        return Sites(power * self.precision, power * self.shift)

    def elementwise(self, x: np.ndarray) -> np.ndarray:
        """Log of each factor (N,) at `x` (N,)."""
        return x * (self.shift - 0.5 * self.precision * x)


def cholesky_of(matrix: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor (N, N), in C order, of a symmetric matrix in C order, which is kept.

    Raises
    ------
    scipy.linalg.LinAlgError
        If the matrix is not positive definite. Of NaN the factor may be NaN.
    """
    return _factor(matrix, clean=1)


def cholesky_overwriting(matrix: np.ndarray) -> np.ndarray:
    """Replace a symmetric matrix (N, N) in C order, of which the lower triangle is enough.

    Returns
    -------
    array, shape (N, N)
        The same memory: the lower Cholesky factor, and above its diagonal what was there.

    Raises
    ------
    scipy.linalg.LinAlgError
        As for `cholesky_of`.
    """
    return _factor(matrix, clean=0, overwrite_a=1)


def _factor(matrix, **options):
    # The upper factor in Fortran order is the lower one in C order, without a copy.
    upper, failed = lapack.dpotrf(matrix.T, lower=0, **options)
    if failed:
        raise LinAlgError("The matrix is not positive definite.")
    return upper.T


def factorised(mean, covariance, name: str = "the latent function") -> Gaussian:
    """N(mean, covariance) with the Cholesky factor computed.

    Raises
    ------
    ValueError
        If the covariance is not positive definite: with its smallest eigenvalue and the jitter that
        would make it so.
    """
    covariance = np.asarray(covariance, dtype=float)
    if not np.all(np.isfinite(covariance)):
        raise ValueError(f"The covariance of {name} has NaN or infinite entries.")
    try:
        factor = cholesky_of(covariance)
    except LinAlgError as error:
        smallest = float(eigvalsh(covariance, subset_by_index=[0, 0])[0])
        scale = float(np.mean(np.diagonal(covariance)))
        jitter = max(1e-6 * scale, -2.0 * smallest)
        raise ValueError(
            f"The covariance of {name} is not positive definite: its smallest eigenvalue is "
            f"{smallest:.3g}. Add a jitter to its diagonal, of {jitter:.2g} say (its variances are "
            f"about {scale:.3g})."
        ) from error
    return Gaussian(np.asarray(mean, dtype=float), covariance, factor)


def with_sites(prior: Gaussian, sites: Sites) -> tuple[Gaussian, float]:
    """Multiply a Gaussian by Gaussian sites.

    Returns
    -------
    Gaussian
        With precision K^-1 + diag(sites.precision) and mean m + Sigma (shift - precision m).
    float
        Log of the integral of the product.

    Raises
    ------
    ValueError
        If a site has a negative precision.

    Notes
    -----
    With K = L L^T, I + L^T diag(precision) L = U U^T for an upper triangular U, and L U^-T is the
    lower triangular factor of Sigma. It keeps the small eigenvalues of an ill-conditioned K, which
    a difference K - V^T V loses, and there is no inverse of K.
    """
    if np.any(sites.precision < 0):
        raise ValueError("A site has a negative precision: the product may not be a Gaussian.")
    inner = prior.cholesky.T @ (sites.precision[:, None] * prior.cholesky)
    inner[np.diag_indices_from(inner)] += 1.0
    # Reversed, a lower triangular factor is an upper triangular one.
    upper = cholesky(inner[::-1, ::-1], lower=True, check_finite=False)[::-1, ::-1]
    factor = solve_triangular(upper, prior.cholesky.T, lower=False, check_finite=False).T
    shift = sites.shift - sites.precision * prior.mean
    whitened = factor.T @ shift
    log_integral = float(
        sites.elementwise(prior.mean).sum()
        + 0.5 * whitened @ whitened
        - np.log(np.diagonal(upper)).sum()
    )
    return Gaussian(prior.mean + factor @ whitened, factor @ factor.T, factor), log_integral


def inner_matrix(covariance: np.ndarray, sites: Sites) -> np.ndarray:
    """Return an array (N, N) with the lower triangle of A = I + S K S, S^2 the sites' precisions.

    For a covariance K in C order, and no negative precision.
    """
    inner = np.empty(covariance.shape)
    _inner_into(covariance, np.sqrt(sites.precision), inner)
    return inner


@jit(fastmath=SIMD)
def _inner_into(covariance, roots, out):
    """Write the lower triangle of A into that of `out`."""
    for i in range(roots.size):
        for j in range(i):
            out[i, j] = roots[i] * covariance[i, j] * roots[j]
        out[i, i] = 1.0 + roots[i] * covariance[i, i] * roots[i]
