"""Products of sinc functions over the coordinates, and of their squares."""

import math

import numpy as np

from pymc_kameleon.kernels.kernel import Kernel
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["Sinc", "SincSquared"]


@jit(fastmath=SIMD)
def _sinc(u):
    return math.sin(u) / u if u != 0.0 else 1.0


@jit(fastmath=SIMD)
def _sinc_slope(u):
    """Return the derivative of sin(u)/u, by its series where the closed form would cancel."""
    if abs(u) > 0.1:
        return (math.cos(u) - math.sin(u) / u) / u
    square = u * u
    return -u / 3.0 * (1.0 - square / 10.0 * (1.0 - square / 28.0 * (1.0 - square / 54.0)))


@jit(fastmath=SIMD, allocates=True)
def _times_other_rows(factors, out):
    """Multiply each `out[i]` by all rows of `factors` but the i-th; a factor may be zero."""
    dim, n = factors.shape
    product = np.ones(n)
    for i in range(dim):
        for j in range(n):
            out[i, j] *= product[j]
            product[j] *= factors[i, j]
    for j in range(n):
        product[j] = 1.0
    for i in range(dim - 1, -1, -1):
        for j in range(n):
            out[i, j] *= product[j]
            product[j] *= factors[i, j]


@jit(fastmath=SIMD, allocates=True)
def _sinc_gradients(x, points, parameters, out):
    rate = 1.0 / parameters[0]
    factors = np.empty(points.shape)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            u = rate * (x[i] - points[i, j])
            factors[i, j] = _sinc(u)
            out[i, j] = rate * _sinc_slope(u)
    _times_other_rows(factors, out)


@jit(fastmath=SIMD, allocates=True)
def _sinc_squared_gradients(x, points, parameters, out):
    rate = 0.5 / parameters[0]
    factors = np.empty(points.shape)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            u = rate * (x[i] - points[i, j])
            root = _sinc(u)
            factors[i, j] = root * root
            out[i, j] = 2.0 * rate * root * _sinc_slope(u)
    _times_other_rows(factors, out)


class Sinc(Kernel):
    r""":math:`k(x, y) = \prod_i \frac{\sin u_i}{u_i}` with :math:`u = (x - y) / \ell`.

    The bandwidth is :math:`\ell`; frequencies are uniform on :math:`(-1/\ell, 1/\ell)` in each
    coordinate.
    """

    gradients = staticmethod(_sinc_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        # np.sinc(t) is sin(pi t) / (pi t).
        return np.sinc((x[:, None] - y) / (np.pi * bandwidth)).prod(axis=-1)

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        return rng.uniform(-1 / bandwidth, 1 / bandwidth, (size, dim))


class SincSquared(Kernel):
    r""":math:`k(x, y) = \prod_i (\frac{\sin u_i}{u_i})^2` with :math:`u = (x - y) / 2\ell`.

    The bandwidth is :math:`\ell`; frequencies are triangular on :math:`(-1/\ell, 1/\ell)`, with
    mode 0, in each coordinate.
    """

    gradients = staticmethod(_sinc_squared_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.sinc((x[:, None] - y) / (2 * np.pi * bandwidth)).prod(axis=-1) ** 2

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        return rng.triangular(-1 / bandwidth, 0, 1 / bandwidth, (size, dim))
