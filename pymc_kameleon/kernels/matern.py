"""Matern kernels of any smoothness."""

import math

import numpy as np
from scipy import special
from scipy.spatial.distance import cdist

from pymc_kameleon.kernels.kernel import Kernel, weighted_differences
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.validation import checked_number

__all__ = ["Matern"]


@jit(fastmath=SIMD, allocates=True)
def _matern_three_halves_gradients(x, points, parameters, out):
    rate = math.sqrt(3.0) / parameters[0]
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        weights[j] = rate * rate * exp(-rate * math.sqrt(weights[j]))
    weighted_differences(x, points, weights, out)


@jit(fastmath=SIMD, allocates=True)
def _matern_five_halves_gradients(x, points, parameters, out):
    rate = math.sqrt(5.0) / parameters[0]
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        scaled = rate * math.sqrt(weights[j])
        weights[j] = rate * rate / 3.0 * (1.0 + scaled) * exp(-scaled)
    weighted_differences(x, points, weights, out)


def _matern_gradients(x, points, parameters, out):
    smoothness, bandwidth = parameters
    differences = points - x[:, None]
    scaled = np.sqrt(2 * smoothness * (differences**2).sum(axis=0)) / bandwidth
    weights = smoothness / (smoothness - 1) / bandwidth**2 * _matern(scaled, smoothness - 1)
    out[:] = weights * differences


def _matern(r, smoothness):
    """2^(1-v)/Gamma(v) r^v K_v(r), which tends to 1 at r = 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        log_value = (
            (1 - smoothness) * math.log(2)
            - special.gammaln(smoothness)
            + smoothness * np.log(r)
            + np.log(special.kve(smoothness, r))
            - r
        )
        # K_v overflows at r = 0 and, if v is large, while r is below a share of v. There the kernel
        # is exp(-a + a^2 / (2 (v - 2)) + O(a^3 / v^2)) with a = r^2 / (4 (v - 1)).
        a = r**2 / (4 * max(smoothness - 1, 1e-10))
        at_overflow = np.exp(-a + a**2 / (2 * max(smoothness - 2, 1e-10)))
        return np.where(np.isfinite(log_value), np.exp(log_value), at_overflow)


class Matern(Kernel):
    r""":math:`k(x, y) = \frac{2^{1-\vartheta}}{\Gamma(\vartheta)} s^\vartheta K_\vartheta(s)`.

    Here :math:`s = \sqrt{2\vartheta}\,\|x - y\| / \ell` with bandwidth :math:`\ell`. Frequencies
    are multivariate t with :math:`2\vartheta` degrees of freedom and scale :math:`\ell^{-2} I`.

    Parameters
    ----------
    smoothness : float
        :math:`\vartheta > 0`. It has `gradients` above 1, where the kernel is twice
        differentiable: 1.5 and 2.5 compiled in closed form, others through SciPy's Bessel
        functions.
    """

    def __init__(self, smoothness: float = 2.5) -> None:
        self.smoothness = checked_number("smoothness", smoothness, above=0)
        closed = {1.5: _matern_three_halves_gradients, 2.5: _matern_five_halves_gradients}
        self._closed_form = self.smoothness in closed
        general = _matern_gradients if self.smoothness > 1 else None
        self._gradients = closed.get(self.smoothness, general)

    @property
    def gradients(self):  # noqa: D102
        return self._gradients

    @property
    def has_finite_frequencies(self):  # noqa: D102
        return self.smoothness > 1

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        scaled = math.sqrt(2 * self.smoothness) * cdist(x, y) / bandwidth
        return _matern(scaled, self.smoothness)

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([bandwidth] if self._closed_form else [self.smoothness, bandwidth])

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        # A chi-squared variate of few degrees of freedom underflows to zero now and then.
        chi_squared = np.maximum(
            rng.chisquare(2 * self.smoothness, (size, 1)), np.finfo(float).tiny
        )
        scale = np.sqrt(2 * self.smoothness / chi_squared) / bandwidth
        return scale * rng.standard_normal((size, dim))
