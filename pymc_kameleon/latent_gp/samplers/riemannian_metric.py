"""The position-dependent metric of a Gaussian times a likelihood (Paquet & Fraccaro 2018, §4)."""

from functools import cached_property

import numpy as np
from scipy.linalg import blas, lapack

from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget

__all__ = [
    "LocalGeometry",
    "Metric",
    "default_soft_floor",
    "log_ratio_curvature",
    "needed_soft_floor",
    "soft_absolute",
]

ROUNDING = 1e-9
"""Negative curvature that counts as none, in units of the precision of the Gaussian."""


def default_soft_floor(target: TemperedTarget) -> float:
    """Soft floor for a likelihood that is not log-concave: the mean over n of max |beta l_n''|.

    The largest value of each is sought within three standard deviations of the Gaussian, not at a
    state of the chain. The metric then follows the sites where they tell most, and hardly changes
    where their curvature changes sign. A much smaller floor leaves a kink there, which the implicit
    steps of the integrator do not get past: at a tenth of it most of them fail.
    """
    base = target.base
    deviations = np.sqrt(np.diagonal(base.covariance))
    largest = np.zeros(base.size)
    for z in np.linspace(-3.0, 3.0, 41):
        curvature = np.abs(target.log_ratio_terms(base.mean + z * deviations)[2])
        np.fmax(largest, np.where(np.isfinite(curvature), curvature, 0.0), out=largest)
    return float(largest.mean())


def needed_soft_floor(target: TemperedTarget) -> float:
    """0 if no term of the likelihood is convex within five standard deviations, else the default.

    It is looked for about the mean of the Gaussian, not at a state of the chain.
    """
    base = target.base
    deviations = np.sqrt(np.diagonal(base.covariance))
    for z in np.linspace(-5.0, 5.0, 41):
        second = target.log_ratio_terms(base.mean + z * deviations)[2]
        if np.any(second * deviations**2 > ROUNDING):
            return default_soft_floor(target)
    return 0.0


def soft_absolute(u: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Smooth |u| that is nowhere below `floor`: u coth(u / floor), and its derivative.

    It exceeds |u| by 2 |u| / (exp(2 |u| / floor) - 1): 2e-8 of |u| at 9 floors (SoftAbs of
    Betancourt 2013, of a diagonal matrix).

    Parameters
    ----------
    u : array, shape (N,)
    floor : float
        Positive; the value at u = 0.

    Returns
    -------
    value, derivative : array, shape (N,)
    """
    ratio = u / floor
    size = np.abs(ratio)
    decay = np.exp(-2.0 * size)
    is_small = size < 1e-3
    # 1 - exp(-2r) cancels near 0: there u coth(u / floor) = floor (1 + r^2 / 3 - r^4 / 45).
    divisor = np.where(is_small, 1.0, -np.expm1(-2.0 * size))
    value = np.where(is_small, 1.0 + size**2 / 3.0 - size**4 / 45.0, size * (1.0 + decay) / divisor)
    derivative = np.where(
        is_small,
        2.0 * size / 3.0 - 4.0 * size**3 / 45.0,
        (1.0 + decay) / divisor - 4.0 * size * decay / divisor**2,
    )
    return floor * value, np.sign(u) * derivative


def log_ratio_curvature(
    terms: np.ndarray, soft_floor: float, precision_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal part lambda (N,) of the metric, and its derivative d lambda_n / d x_n.

    Parameters
    ----------
    terms : array, shape (4, N)
        See `TemperedTarget.log_ratio_terms`.
    soft_floor : float
        0 if the likelihood is log-concave: lambda = -beta l''. Otherwise lambda is
        `soft_absolute` of that, in value and derivative alike.
    precision_scale : float
        What the curvature is compared with, to tell rounding from a wrong sign.

    Raises
    ------
    FloatingPointError
        If a curvature is not finite, or negative without a floor.
    """
    curvature, slope = -terms[2], -terms[3]
    if not np.all(np.isfinite(terms)):
        raise FloatingPointError("The log-likelihood or a derivative of it is not finite.")
    if soft_floor > 0.0:
        value, derivative = soft_absolute(curvature, soft_floor)
        return value, derivative * slope
    worst = int(np.argmin(curvature))
    if curvature[worst] < -ROUNDING * precision_scale:
        raise FloatingPointError(
            f"The second derivative of the log-likelihood is {-curvature[worst]:.3g} at element "
            f"{worst}, so it is not log-concave: set soft_floor to a positive value."
        )
    return np.maximum(curvature, 0.0), slope


class Metric:
    """G = diag(curvature) + A^-1, of which only the Cholesky factor of I + s A s is made at once.

    Here s = sqrt(curvature) and A is the covariance of `base`. With L L^T = I + s A s,
    G^-1 = A - V^T V for V = L^-1 (s * A), and |G| = |L|^2 / |A|. Since s G^-1 s = I - (L L^T)^-1,
    the diagonal of G^-1 needs L^-1 only, for a third of the multiplications that V takes.

    Parameters
    ----------
    base : Gaussian
    curvature : array, shape (N,)
        Not negative.

    Raises
    ------
    FloatingPointError
        If the factor is not finite.
    """

    def __init__(self, base: Gaussian, curvature: np.ndarray):
        self.base = base
        self.curvature = curvature
        self.roots = np.sqrt(curvature)
        inner = np.multiply(_fortran(base.covariance), self.roots, order="F")
        inner *= self.roots[:, None]
        np.einsum("ii->i", inner)[:] += 1.0
        self.factor, failed = lapack.dpotrf(inner, lower=1, clean=1, overwrite_a=1)
        log_diagonal = float(np.log(np.diagonal(self.factor)).sum())
        if failed or not np.isfinite(log_diagonal):
            raise FloatingPointError("The metric is not finite.")
        self.log_determinant = 2.0 * log_diagonal - base.log_determinant

    def velocity(self, momentum: np.ndarray) -> np.ndarray:
        """G^-1 p (N,) for p (N,), from the Cholesky factor alone.

        By way of z = A_chol^T p, which is of order 1 where p is large because A is nearly singular.
        """
        outer = self.base.cholesky
        whitened = outer.T @ momentum
        scaled = self.roots * (outer @ whitened)
        scaled = blas.dtrsv(self.factor, scaled, lower=1, overwrite_x=1)
        scaled = blas.dtrsv(self.factor, scaled, lower=1, trans=1, overwrite_x=1)
        return outer @ (whitened - outer.T @ (self.roots * scaled))

    def momentum(self, noise: np.ndarray) -> np.ndarray:
        """Turn independent standard normals (2, N) into a momentum (N,) of covariance G exactly."""
        return self.roots * noise[0] + _solve(self.base.cholesky, noise[1], transposed=True)

    @cached_property
    def inverse_factor(self) -> np.ndarray:
        """L^-1 (N, N), lower triangular."""
        return lapack.dtrtri(self.factor, lower=1)[0]

    @cached_property
    def leverage(self) -> np.ndarray:
        """Share curvature_n (G^-1)_nn (N,), 0 to 1, of each site in its own precision."""
        rows = self.inverse_factor.T
        return 1.0 - np.einsum("ij,ij->i", rows, rows)

    def log_determinant_gradient(self, slope: np.ndarray) -> np.ndarray:
        """Gradient (N,) of log|G|: d curvature_n / d x_n times (G^-1)_nn.

        Written with `leverage`, so that its rounding error is that of d log(curvature) / d x,
        however small the curvature.
        """
        relative = np.divide(
            slope, self.curvature, out=np.zeros_like(slope), where=self.curvature > 0.0
        )
        return relative * self.leverage

    def inverse(self) -> np.ndarray:
        """All of G^-1 (N, N), symmetric: A - V^T V, to the rounding of A.

        No transition needs it; it costs more than the rest of the metric.
        """
        scaled = np.multiply(_fortran(self.base.covariance), self.roots[:, None], order="F")
        reduced = blas.dtrmm(1.0, self.inverse_factor, scaled, lower=1, overwrite_b=1)
        lower = blas.dsyrk(
            -1.0, reduced, trans=1, beta=1.0, c=_fortran(self.base.covariance), lower=1
        )
        for i in range(len(lower)):
            lower[i, i + 1 :] = lower[i + 1 :, i]
        return lower


class LocalGeometry:
    """A target and its metric at one position: everything that does not need the momentum.

    The Hamiltonian is H(x, p) = p^T G^-1 p / 2 + log|G| / 2 - log density.

    Parameters
    ----------
    target : TemperedTarget
        Without sites: see `annealed_from_prior_form`.
    position : array, shape (N,)
    soft_floor : float
        See `log_ratio_curvature`.

    Attributes
    ----------
    unit : float
        Root mean variance of the Gaussian: the unit in which positions are measured.
    terms : array, shape (4, N)
        Log importance ratio of each element and its derivatives.
    curvature, curvature_slope : array, shape (N,)
        See `log_ratio_curvature`.
    metric : Metric
    log_density : float
        Normalised but for the evidence.
    score : array, shape (N,)
        Gradient of the log density.

    Raises
    ------
    ValueError
        If the target has sites.
    FloatingPointError
        If the log density or the metric is not finite, or the likelihood is not log-concave and
        there is no floor.
    """

    def __init__(self, target: TemperedTarget, position: np.ndarray, soft_floor: float = 0.0):
        if target.sites is not None:
            raise ValueError("The target has sites: write it with annealed_from_prior_form.")
        self.target = target
        self.position = np.array(position, dtype=float)
        self.soft_floor = soft_floor
        self.unit = float(np.sqrt(np.mean(np.diagonal(target.base.covariance))))
        self.terms = target.log_ratio_terms(position)
        self.curvature, self.curvature_slope = log_ratio_curvature(
            self.terms, soft_floor, 1.0 / self.unit**2
        )
        base = target.base
        self.metric = Metric(base, self.curvature)
        whitened = _solve(base.cholesky, position - base.mean)
        constant = base.log_determinant + base.size * np.log(2 * np.pi)
        self.log_density = float(self.terms[0].sum() - 0.5 * (whitened @ whitened + constant))
        if not np.isfinite(self.log_density):
            raise FloatingPointError("The log density is not finite.")
        self.score = self.terms[1] - _solve(base.cholesky, whitened, transposed=True)

    @cached_property
    def potential_gradient(self) -> np.ndarray:
        """Gradient (N,) of log|G| / 2 - log density."""
        return 0.5 * self.metric.log_determinant_gradient(self.curvature_slope) - self.score

    def energy(self, momentum: np.ndarray) -> float:
        """Value of the Hamiltonian."""
        kinetic = 0.5 * float(momentum @ self.metric.velocity(momentum))
        return kinetic + 0.5 * self.metric.log_determinant - self.log_density

    def energy_gradient(self, velocity: np.ndarray) -> np.ndarray:
        """Gradient (N,) of the Hamiltonian in the position, at the momentum G `velocity`."""
        return self.potential_gradient - 0.5 * self.curvature_slope * velocity**2

    def draw_momentum(self, rng: np.random.Generator) -> np.ndarray:
        """Draw from N(0, G): an array (N,)."""
        return self.metric.momentum(rng.standard_normal((2, self.target.base.size)))


def _fortran(symmetric):
    """Return a symmetric matrix in Fortran order, without a copy."""
    return symmetric if symmetric.flags.f_contiguous else symmetric.T


def _solve(factor, vector, transposed=False):
    """L^-1 or L^-T times a vector, for a lower triangular L as it lies in memory."""
    if factor.flags.f_contiguous:
        return blas.dtrsv(factor, vector, lower=1, trans=int(transposed))
    return blas.dtrsv(factor.T, vector, lower=0, trans=int(not transposed))
