"""The Laplacian kernel."""

import numpy as np
from scipy.spatial.distance import cdist

from pymc_kameleon.kernels.kernel import Kernel

__all__ = ["Laplacian"]


class Laplacian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|_1 / \ell)` with bandwidth :math:`\ell`; no gradient.

    Frequencies are independent :math:`\mathrm{Cauchy}(0, 1/\ell)` in each coordinate.
    """

    has_finite_frequencies = False

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-cdist(x, y, "cityblock") / bandwidth)

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        return rng.standard_cauchy((size, dim)) / bandwidth
