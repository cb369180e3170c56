"""The position-dependent metric of a Gaussian times a likelihood (Paquet & Fraccaro 2018, §4)."""

from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError

from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, SiteFactor, solve_lower
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget

ROUNDING = 1e-9
"""Negative curvature that counts as none, in units of the precision of the Gaussian."""


def default_soft_floor(target: TemperedTarget) -> float:
    """Soft floor for a likelihood that is not log-concave: the mean over n of max |beta l_n''|.

    The largest value of each is sought within three standard deviations of the Gaussian, not at a
    state of the chain. A much smaller floor leaves a kink where the curvature changes sign, which
    the implicit steps of the integrator do not get past: at a tenth of it most of them fail.
    """
    largest = np.zeros(target.base.size)
    for second in _second_derivatives(target, 3.0):
        curvature = np.abs(second)
        np.fmax(largest, np.where(np.isfinite(curvature), curvature, 0.0), out=largest)
    return float(largest.mean())


def needed_soft_floor(target: TemperedTarget) -> float:
    """0 if no term is convex within five standard deviations of the Gaussian, else the default."""
    variances = np.diagonal(target.base.covariance)
    for second in _second_derivatives(target, 5.0):
        if np.any(second * variances > ROUNDING):
            return default_soft_floor(target)
    return 0.0


def _second_derivatives(target, reach):
    """Yield those of the log ratio (N,), from -reach to reach standard deviations."""
    deviations = np.sqrt(np.diagonal(target.base.covariance))
    for z in np.linspace(-reach, reach, 41):
        yield target.log_ratio_terms(target.base.mean + z * deviations)[2]


def soft_absolute(u: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Smooth |u| that is nowhere below `floor`, u coth(u / floor), and its derivative: (N,), (N,).

    SoftAbs of Betancourt 2013, of a diagonal matrix: it exceeds |u| by 2e-8 of it at 9 floors.
    """
    size = np.abs(u / floor)
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

    Of the `terms` (4, N) of `TemperedTarget.log_ratio_terms`, lambda is -beta l'' where there is no
    `soft_floor`, for a log-concave likelihood, and else `soft_absolute` of that, in value and
    derivative alike. It raises FloatingPointError if a curvature is not finite, or negative without
    a floor; `precision_scale` tells rounding from a wrong sign.
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


class Metric(SiteFactor):
    """G = diag(curvature) + A^-1, A the covariance of `base`: the precision of base times sites."""

    def __init__(self, base: Gaussian, curvature: np.ndarray):
        self.base, self.curvature = base, curvature
        try:
            super().__init__(base.covariance, curvature)
        except LinAlgError as error:
            raise FloatingPointError("The metric is not finite.") from error
        self.log_determinant = 2.0 * self.half_log_determinant - base.log_determinant

    def velocity(self, momentum: np.ndarray) -> np.ndarray:
        """G^-1 p (N,) for p (N,).

        By way of z = A_chol^T p, which is of order 1 where p is large because A is nearly singular.
        """
        outer = self.base.cholesky
        whitened = outer.T @ momentum
        solved = self.solved(self.roots * (outer @ whitened))
        return outer @ (whitened - outer.T @ (self.roots * solved))

    def momentum(self, noise: np.ndarray) -> np.ndarray:
        """Turn independent standard normals (2, N) into a momentum (N,) of covariance G exactly."""
        return self.roots * noise[0] + solve_lower(self.base.cholesky, noise[1], transposed=True)

    @cached_property
    def leverage(self) -> np.ndarray:
        """Share curvature_n (G^-1)_nn (N,), 0 to 1, of each site in its own precision."""
        return 1.0 - self.shares

    def log_determinant_gradient(self, slope: np.ndarray) -> np.ndarray:
        """Gradient (N,) of log|G|: d curvature_n / d x_n times (G^-1)_nn.

        By `leverage` its rounding error is that of d log(curvature) / d x, however small the
        curvature.
        """
        relative = np.divide(
            slope, self.curvature, out=np.zeros_like(slope), where=self.curvature > 0.0
        )
        return relative * self.leverage


class LocalGeometry:
    """A target and its metric at one position: everything that does not need the momentum.

    The Hamiltonian is H(x, p) = p^T G^-1 p / 2 + log|G| / 2 - log density. `unit`, the root mean
    variance of the Gaussian, is what positions are measured in; `log_density` is normalised but for
    the evidence, and `score` (N,) its gradient.

    It raises ValueError if the target has sites, and FloatingPointError if the log density or the
    metric is not finite, or the likelihood is not log-concave and there is no floor.
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
        self.log_density = float(self.terms[0].sum()) + base.log_density(position)
        if not np.isfinite(self.log_density):
            raise FloatingPointError("The log density is not finite.")
        self.score = self.terms[1] + base.score(position)

    def is_of(self, target: TemperedTarget, position: np.ndarray, soft_floor: float) -> bool:
        """Whether it is that of this target, with this floor, at this position."""
        own = self.target
        return (
            np.array_equal(self.position, position)
            and self.soft_floor == soft_floor
            and own.base is target.base
            and own.likelihood is target.likelihood
            and own.scale == target.scale
            and target.sites is None
        )

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
