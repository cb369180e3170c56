r"""A Gaussian times Gaussian sites: all the algebra of latent Gaussian models.

The prior N(m, K), K = L L^T, times sites exp(shift f - precision f^2 / 2) is a Gaussian with the
precision K^-1 + W, W = diag(precision) = S^2. Two factorisations give all that is asked of it.

That of A = I + S K S (Rasmussen & Williams 2006, section 3.4.3; `SiteFactor`) takes no factor of K,
which may be singular, and keeps the digits where sites of all sizes stand side by side:

.. math:: \Sigma = K - K S A^{-1} S K,\quad S \Sigma S = I - A^{-1},\quad
    |K^{-1} + W| = |A| / |K|.

That of B = I + L^T W L (`whitened_precision`) is of the precision in the coordinates L^-1 (f - m).
Where B = U U^T for an upper triangular U, L U^-T is the lower triangular factor of the covariance,
which keeps the small eigenvalues of an ill-conditioned K; and precisions may be negative.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, eigvalsh, lapack, solve_triangular
from scipy.linalg.blas import dtrmm, dtrmv, dtrsv

from pymc_kameleon.mcmc.bridge.jit import SIMD, jit

LEAST_LEVERAGE = 1e-6
"""Share of a site in the precision of its value, from which 1 - (1 - share) keeps 10 digits."""


@dataclass(frozen=True)
class Gaussian:
    """N(mean, covariance), with `cholesky` @ `cholesky`.T = `covariance` (N, N)."""

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

    @property
    def variances(self) -> np.ndarray:
        """Of the values (N,)."""
        return np.diagonal(self.covariance)

    def predictors(self, f: np.ndarray) -> np.ndarray:
        """Return what observations depend on, which is `f` (N,)."""
        return f

    def whiten(self, x: np.ndarray) -> np.ndarray:
        """Return z (N,), standard normal, for `x` (N,)."""
        return solve_lower(self.cholesky, x - self.mean)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw from the Gaussian: an array (N,)."""
        return self.mean + self.cholesky @ rng.standard_normal(self.size)

    def directions(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws (n, N) of the Gaussian about its mean."""
        return rng.standard_normal((n, self.size)) @ self.cholesky.T

    def log_density(self, x: np.ndarray) -> float:
        """Normalised log density at `x` (N,)."""
        z = self.whiten(x)
        return -0.5 * float(z @ z + self.log_determinant + self.size * np.log(2 * np.pi))

    def score(self, x: np.ndarray) -> np.ndarray:
        """Gradient (N,) of the log density at `x` (N,)."""
        return -solve_lower(self.cholesky, self.whiten(x), transposed=True)


@dataclass(frozen=True)
class Sites:
    """Gaussian site factors: their product is exp(sum(shift x - precision x^2 / 2))."""

    precision: np.ndarray
    shift: np.ndarray

    @classmethod
    def flat(cls, size: int) -> "Sites":
        """Sites without information."""
        return cls(np.zeros(size), np.zeros(size))

    def scaled(self, power: float) -> "Sites":
        """Every factor raised to `power`."""
        return Sites(power * self.precision, power * self.shift)

    def times(self, x: np.ndarray) -> np.ndarray:
        """Return W x for `x` (N,)."""
        return self.precision * x

    def elementwise(self, x: np.ndarray) -> np.ndarray:
        """Log of each factor (N,) at `x` (N,)."""
        return x * (self.shift - 0.5 * self.precision * x)

    def coupled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return precisions (N,), and pairs (0, 2) of values that go together with theirs (0,)."""
        return self.precision, np.zeros((0, 2), dtype=np.int64), np.zeros(0)

    def floored(self, mean: np.ndarray) -> "Sites":
        """Set negative precisions to 0 and keep the `mean` (N,) of a prior times these sites.

        It stays because K^-1 (mean - m) = shift - precision mean does.
        """
        floor = np.maximum(self.precision, 0.0)
        return Sites(floor, self.shift + (floor - self.precision) * mean)


def cholesky_of(matrix: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor (N, N), in C order, of a symmetric matrix in C order, which is kept.

    It raises LinAlgError if the matrix is not positive definite. Of NaN the factor may be NaN.
    """
    return _factor(matrix, clean=1)


def cholesky_overwriting(matrix: np.ndarray) -> np.ndarray:
    """Likewise, in the memory of the matrix, with what was there above the diagonal."""
    return _factor(matrix, clean=0, overwrite_a=1)


def _factor(matrix, **options):
    # The upper factor in Fortran order is the lower one in C order, without a copy.
    upper, failed = lapack.dpotrf(matrix.T, lower=0, **options)
    if failed:
        raise LinAlgError("The matrix is not positive definite.")
    return upper.T


def solve_lower(cholesky: np.ndarray, x: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return L^-1 x, or L^-T x, (N,) for a lower triangular L as it lies in memory."""
    if cholesky.flags.f_contiguous:
        return dtrsv(cholesky, x, lower=1, trans=int(transposed))
    return dtrsv(cholesky.T, x, lower=0, trans=int(not transposed))


def factorised(mean, covariance, name: str = "the latent function") -> Gaussian:
    """N(mean, covariance) with the Cholesky factor computed; ValueError if there is none."""
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


# from a factor of K -------------------------------------------------------------------------------


def with_sites(prior: Gaussian, sites: Sites) -> tuple[Gaussian, float]:
    """Multiply a Gaussian by Gaussian sites; the product and the log of its integral.

    It raises ValueError if a site has a negative precision.
    """
    if np.any(sites.precision < 0):
        raise ValueError("A site has a negative precision: the product may not be a Gaussian.")
    factor, half_log_determinant = _product_cholesky(prior, sites)
    whitened = factor.T @ (sites.shift - sites.precision * prior.mean)
    log_integral = sites.elementwise(prior.mean).sum() + 0.5 * whitened @ whitened
    product = Gaussian(prior.mean + factor @ whitened, factor @ factor.T, factor)
    return product, float(log_integral - half_log_determinant)


def whitened_precision(prior: Gaussian, sites: Sites) -> np.ndarray:
    """B = I + L^T diag(precision) L, an array (N, N) in C order, with K = L L^T."""
    precision, cholesky = sites.precision, prior.cholesky
    positive = np.sqrt(np.maximum(precision, 0.0))[:, None] * cholesky
    inner = positive.T @ positive
    is_negative = precision < 0
    if np.any(is_negative):
        negative = np.sqrt(-precision[is_negative])[:, None] * cholesky[is_negative]
        inner -= negative.T @ negative
    inner[np.diag_indices_from(inner)] += 1.0
    return inner


def _product_cholesky(prior, sites):
    """Lower triangular factor (N, N) of the product's covariance, and log |I + K W| / 2."""
    # Reversed, a lower triangular factor is an upper triangular one.
    upper = cholesky_of(whitened_precision(prior, sites)[::-1, ::-1])[::-1, ::-1]
    factor = solve_triangular(upper, prior.cholesky.T, lower=False, check_finite=False).T
    return factor, float(np.log(np.diagonal(upper)).sum())


# from K alone -------------------------------------------------------------------------------------


class SiteFactor:
    """A = I + S K S factorised, for a covariance K and precisions W = S^2, none of them negative.

    `roots` (N,) are S, and `information` (N,) is diag(S K S): precisions in units of the prior's.
    `lower` is the Cholesky factor of A, and what is above its diagonal is not zero;
    `half_log_determinant` is log |A| / 2 = log |I + K W| / 2. It raises LinAlgError if the factor
    is not finite.
    """

    def __init__(self, covariance: np.ndarray, precision: np.ndarray):
        # Symmetric, so that the transpose of what is in Fortran order is the same in C order.
        covariance = covariance if covariance.flags.c_contiguous else covariance.T
        inner = np.empty(covariance.shape)
        self.roots, self.information = np.empty((2, precision.size))
        _inner_into(covariance, precision, self.roots, self.information, inner)
        self.lower = cholesky_overwriting(inner)
        self.half_log_determinant = _log_diagonal(self.lower)
        if not math.isfinite(self.half_log_determinant):
            raise LinAlgError("The precision of the latent function is not finite.")

    def solved(self, x: np.ndarray) -> np.ndarray:
        """A^-1 x for a vector `x` (N,)."""
        return solve_lower(self.lower, solve_lower(self.lower, x), transposed=True)

    def inverse_root(self, overwrites: bool = False) -> np.ndarray:
        """Return R (N, N), A^-1 = R R^T, in Fortran order; what is below its diagonal is not zero.

        It `overwrites` the factor in its memory, if that is not needed any more.
        """
        return lapack.dtrtri(self.lower.T, lower=0, overwrite_c=int(overwrites))[0]

    @cached_property
    def shares(self) -> np.ndarray:
        """Diagonal of A^-1 (N,): the share that sites do not have in their marginal precisions."""
        shares = np.empty(self.roots.size)
        _row_squares_into(self.inverse_root(), shares)
        return shares


@jit
def _log_diagonal(factor):
    """Sum of the logs of the diagonal."""
    total = 0.0
    for i in range(factor.shape[0]):
        total += math.log(factor[i, i])
    return total


@jit(fastmath=SIMD)
def _inner_into(covariance, precision, roots, information, out):
    """Write S, the diagonal of S K S, and the lower triangle of A into that of `out`."""
    for i in range(roots.size):
        roots[i] = math.sqrt(precision[i])
        for j in range(i):
            out[i, j] = roots[i] * covariance[i, j] * roots[j]
        information[i] = roots[i] * covariance[i, i] * roots[i]
        out[i, i] = 1.0 + information[i]


@jit
def _row_squares_into(upper, out):
    """Write the sums of squares of the rows of an upper triangular matrix in Fortran order."""
    out[:] = 0.0
    for j in range(out.size):
        for i in range(j + 1):
            out[i] += upper[i, j] * upper[i, j]


class SiteProduct:
    """Marginals and normaliser of a Gaussian times sites of either sign.

    `mean` and `variance` (N,) are the marginals, `slope` (N,) is a = K^-1 (mean - m), and `shares`
    (N,) are 1 - W variance, by which a marginal's variance is divided to be the cavity's. It raises
    LinAlgError if negative precisions outweigh the rest, so that the product is no Gaussian.

    The mean is m + K a for a = s - S A^-1 S K s and s = shift - W m. Where s = S t + u, a = u + S
    A^-1 (t - S K u), which loses no digits where sites are precise; u is that of the sites that say
    less than the prior. The variances are (1 - diag A^-1) / W, but where a site says so little that
    this loses digits, K - K S A^-1 S K.
    """

    def __init__(self, prior: Gaussian, sites: Sites):
        precision, covariance = sites.precision, prior.covariance
        shift = sites.shift - precision * prior.mean
        if np.any(precision < 0.0):
            factor, self.half_log_determinant = _product_cholesky(prior, sites)
            self.mean = prior.mean + factor @ (factor.T @ shift)
            self.slope = sites.shift - precision * self.mean
            self.variance = np.einsum("ij,ij->i", factor, factor)
            self.shares = 1.0 - precision * self.variance
            return
        inner = SiteFactor(covariance, precision)
        self.half_log_determinant = inner.half_log_determinant
        scale, inverse = inner.roots, inner.inverse_root(overwrites=True)
        self.shares = np.empty(prior.size)
        _row_squares_into(inverse, self.shares)
        is_precise = inner.information > 1.0
        t = np.where(is_precise, shift / np.where(is_precise, scale, 1.0), 0.0)
        u = np.where(is_precise, 0.0, shift)
        solved = dtrmv(inverse, dtrmv(inverse, t - scale * (covariance @ u), trans=1))
        self.slope = u + scale * solved
        # Of a precise site K a loses what the site itself says.
        by_site = (shift - self.slope) / np.where(is_precise, precision, 1.0)
        self.mean = prior.mean + np.where(is_precise, by_site, covariance @ self.slope)
        leverage = 1.0 - self.shares
        is_large = leverage > LEAST_LEVERAGE
        self.variance = leverage / np.where(is_large, precision, 1.0)
        if not np.all(is_large):
            columns = covariance[:, ~is_large]
            explained = dtrmm(1.0, inverse, scale[:, None] * columns, trans_a=1)
            left = np.diagonal(covariance)[~is_large] - np.einsum("ij,ij->j", explained, explained)
            self.variance[~is_large] = left

    def cavities(self) -> tuple[np.ndarray, np.ndarray]:
        """Means (N,) and variances (N,) of the marginals without their own site."""
        variance = self.variance / self.shares
        return self.mean - variance * self.slope, variance
