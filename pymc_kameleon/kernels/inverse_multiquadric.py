"""The inverse multiquadric kernel."""

import numpy as np
from scipy.spatial.distance import cdist

from pymc_kameleon.kernels.kernel import Kernel, weighted_differences
from pymc_kameleon.mcmc.linalg import squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.validation import checked_number

__all__ = ["InverseMultiquadric"]


@jit(fastmath=SIMD, allocates=True)
def _inverse_multiquadric_gradients(x, points, parameters, out):
    exponent, bandwidth = parameters
    precision = 1.0 / bandwidth**2
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        power = (1.0 + precision * weights[j]) ** (-exponent - 1.0)
        weights[j] = 2.0 * exponent * precision * power
    weighted_differences(x, points, weights, out)


class InverseMultiquadric(Kernel):
    r""":math:`k(x, y) = (1 + \|x - y\|^2 / c^2)^{-\beta}` with bandwidth :math:`c`.

    Frequencies are :math:`\sqrt{2 g}\, w` with :math:`w \sim N(0, I)` and one
    :math:`g \sim \mathrm{Gamma}(\beta, \text{rate } c^2)` for each.

    Parameters
    ----------
    exponent : float
        :math:`\beta > 0`.
    """

    gradients = staticmethod(_inverse_multiquadric_gradients)

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = checked_number("exponent", exponent, above=0)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (1 + cdist(x, y, "sqeuclidean") / bandwidth**2) ** -self.exponent

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([self.exponent, bandwidth])

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        scale = np.sqrt(2 * rng.standard_gamma(self.exponent, (size, 1))) / bandwidth
        return scale * rng.standard_normal((size, dim))
