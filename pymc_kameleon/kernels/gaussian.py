"""The Gaussian kernel."""

import numpy as np
from scipy.spatial.distance import cdist

from pymc_kameleon.kernels.kernel import Kernel, weighted_differences
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["Gaussian"]


@jit(fastmath=SIMD, allocates=True)
def _gaussian_gradients(x, points, parameters, out):
    precision = 1.0 / parameters[0] ** 2
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        weights[j] = precision * exp(-0.5 * precision * weights[j])
    weighted_differences(x, points, weights, out)


class Gaussian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|^2 / 2\sigma^2)` with bandwidth :math:`\sigma`.

    Frequencies are :math:`N(0, \sigma^{-2} I)`.
    """

    gradients = staticmethod(_gaussian_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-0.5 * cdist(x, y, "sqeuclidean") / bandwidth**2)

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        return rng.standard_normal((size, dim)) / bandwidth
