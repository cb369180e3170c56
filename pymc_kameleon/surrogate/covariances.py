r"""Stationary covariances :math:`k = s^2 \varphi(q)` of the surrogates, and their derivatives.

q is the squared distance of two points in coordinates divided by the lengthscales, so that all
covariances of values and gradients follow from :math:`\varphi` and its first two derivatives.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.linalg import squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = [
    "COVARIANCES",
    "correlation_matrix",
    "correlations",
    "lengthscale_slopes",
    "radial",
]

COVARIANCES = {"squared_exponential": 0, "matern52": 1, "rational_quadratic": 2}
"""Code of each covariance in a process: compiled code takes no function pointers."""


@jit(fastmath=SIMD)
def radial(kernel, squared):
    r"""Return :math:`\varphi(q), -2\varphi'(q), 4\varphi''(q), -8\varphi'''(q)` at q = `squared`.

    Squared exponential: :math:`\varphi = e^{-q/2}`. Matern 5/2:
    :math:`\varphi = (1 + a + a^2/3)\,e^{-a}` with :math:`a = \sqrt{5q}`; its third derivative is
    infinite at q = 0, where it is always multiplied by 0, and 0 is returned. Rational quadratic:
    :math:`\varphi = (1 + q/16)^{-8}`, close to the squared exponential without its cost.
    """
    if kernel == 2:
        t = 1.0 / (1.0 + squared / 16.0)
        t8 = ((t * t) * (t * t)) * ((t * t) * (t * t))
        return t8, t8 * t, 1.125 * t8 * t * t, 1.40625 * t8 * t * t * t
    if kernel == 0:
        value = math.exp(-0.5 * squared)
        return value, value, value, value
    a = math.sqrt(5.0 * squared)
    decay = math.exp(-a)
    third = 125.0 / 3.0 * decay / a if a > 0.0 else 0.0
    return (
        (1.0 + a + a * a / 3.0) * decay,
        5.0 / 3.0 * (1.0 + a) * decay,
        25.0 / 3.0 * decay,
        third,
    )


@jit(fastmath=SIMD, allocates=True)
def correlations(kernel, z, coordinates, count, size, out):
    """Correlations at `z` (d,) with the rows of the first `count` points of `coordinates` (d, n).

    Both are divided by the lengthscales. A point has `size` rows: 1, its value, or 1 + d, its value
    and its gradient in z. Written to `out` (1 or 1 + d, at least count * size): those of the value
    at `z`, or of value and gradient.
    """
    n_out = out.shape[0]
    if n_out == 1 and size == 1:  # without room for differences, a tenth of a prediction faster
        squared_distances(z, coordinates, count, out[0])
        for j in range(count):
            out[0, j] = radial(kernel, out[0, j])[0]
        return
    squared, difference = np.empty(count), np.empty(z.size)
    squared_distances(z, coordinates, count, squared)
    for j in range(count):
        value, slope, curvature, _ = radial(kernel, squared[j])
        row = j * size
        out[0, row] = value
        for k in range(z.size):
            difference[k] = z[k] - coordinates[k, j]
        for k in range(size - 1):
            out[0, row + 1 + k] = slope * difference[k]
        for k in range(n_out - 1):
            out[1 + k, row] = -slope * difference[k]
            for i in range(size - 1):
                out[1 + k, row + 1 + i] = -curvature * difference[k] * difference[i]
            if size > 1:
                out[1 + k, row + 1 + k] += slope


@jit(allocates=True)
def correlation_matrix(kernel, coordinates, size, out):
    """Correlations of all rows of the columns of `coordinates` (d, t), into `out` (rows, rows).

    The lower triangle is written, and the diagonal blocks.
    """
    dim, count = coordinates.shape
    z = np.empty(dim)
    for j in range(count):
        for k in range(dim):
            z[k] = coordinates[k, j]
        block = out[j * size : (j + 1) * size]
        correlations(kernel, z, coordinates, j + 1, size, block)


@jit(fastmath=SIMD, allocates=True)
def lengthscale_slopes(kernel, coordinates, size, weights, out):
    """Sum `weights` times the derivatives of correlations in each log lengthscale.

    The sum, into `out` (d,), is over the lower triangle of `weights` (rows, rows); coordinates and
    size are those of `correlations`. In z, a log lengthscale moves a difference by minus itself in
    one coordinate.
    """
    dim, count = coordinates.shape
    z, difference = np.empty(dim), np.empty(dim)
    squared, common = np.empty(count), np.empty(count)
    for k in range(dim):
        out[k] = 0.0
    for i in range(count):
        for k in range(dim):
            z[k] = coordinates[k, i]
        squared_distances(z, coordinates, i, squared)
        for j in range(i):
            _, slope, curvature, third = radial(kernel, squared[j])
            a, b = i * size, j * size
            common[j] = slope * weights[a, b]
            if size == 1:
                continue
            for k in range(dim):
                difference[k] = z[k] - coordinates[k, j]
            for k in range(dim):
                mixed = weights[a, b + 1 + k] - weights[a + 1 + k, b]
                forward, backward = 0.0, 0.0
                for m in range(dim):
                    forward += weights[a + 1 + k, b + 1 + m] * difference[m]
                    backward += weights[a + 1 + m, b + 1 + k] * difference[m]
                common[j] += curvature * (mixed * difference[k] + weights[a + 1 + k, b + 1 + k])
                common[j] -= third * difference[k] * forward
                direct = curvature * (forward + backward) - slope * mixed
                out[k] += difference[k] * direct
        for k in range(dim):
            total = 0.0
            for j in range(i):
                total += common[j] * (z[k] - coordinates[k, j]) ** 2
            out[k] += total
