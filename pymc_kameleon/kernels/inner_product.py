"""Kernels of the inner product, which have gradients and no spectrum."""

import numpy as np

from pymc_kameleon.kernels.kernel import Kernel
from pymc_kameleon.mcmc.linalg import copy_matrix_into
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["Linear", "Polynomial"]


@jit
def _linear_gradients(x, points, parameters, out):
    copy_matrix_into(points, out)


@jit(fastmath=SIMD, allocates=True)
def _polynomial_gradients(x, points, parameters, out):
    degree, offset = parameters
    weights = np.full(points.shape[1], offset)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            weights[j] += points[i, j] * x[i]
    for j in range(weights.size):
        weights[j] = degree * weights[j] ** (degree - 1.0)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            out[i, j] = weights[j] * points[i, j]


class Linear(Kernel):
    r""":math:`k(x, y) = x^\top y`: the proposal covariance is that of adaptive Metropolis."""

    has_bandwidth = False
    gradients = staticmethod(_linear_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return x @ y.T

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.zeros(1)


class Polynomial(Kernel):
    r""":math:`k(x, y) = (x^\top y + c)^p`.

    Parameters
    ----------
    degree : int
        :math:`p \ge 1`.
    offset : float
        :math:`c \ge 0`.
    """

    has_bandwidth = False
    gradients = staticmethod(_polynomial_gradients)

    def __init__(self, degree: int = 2, offset: float = 1.0) -> None:
        if int(degree) != degree or degree < 1:
            raise ValueError(f"degree={degree!r}: take a whole number of at least 1.")
        if not (np.isfinite(offset) and offset >= 0):
            raise ValueError(f"offset={offset!r}: take a number of at least 0.")
        self.degree, self.offset = int(degree), float(offset)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (x @ y.T + self.offset) ** self.degree

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([self.degree, self.offset], dtype=float)
