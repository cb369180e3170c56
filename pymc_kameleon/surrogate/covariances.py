r"""Stationary covariances :math:`k = s^2 \varphi(q)` of the surrogates, and their derivatives.

q is the squared distance of two points in coordinates divided by the lengthscales, so that all
covariances of values and gradients follow from :math:`\varphi` and its first two derivatives.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["COVARIANCES", "correlation_matrix", "lengthscale_slopes", "radial", "squared_distances"]

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


@jit(fastmath=SIMD)
def squared_distances(point, coordinates, count, out):
    """Squared distances of `point` (d,) to the first `count` columns of `coordinates`."""
    for j in range(count):
        out[j] = 0.0
    for k in range(point.size):
        for j in range(count):
            difference = coordinates[k, j] - point[k]
            out[j] += difference * difference


@jit(fastmath=SIMD)
def correlation_matrix(kernel, coordinates, values, slopes):
    r"""Write :math:`\varphi` and :math:`-2\varphi'` of all pairs of columns, both symmetric.

    Parameters
    ----------
    kernel : int
    coordinates : array, shape (d, t)
        Divided by the lengthscales.
    values, slopes : array, shape (t, t)
        Written.
    """
    dim, count = coordinates.shape
    point, squared = np.empty(dim), np.empty(count)
    for i in range(count):
        for k in range(dim):
            point[k] = coordinates[k, i]
        squared_distances(point, coordinates, i + 1, squared)
        for j in range(i + 1):
            value, slope, _, _ = radial(kernel, squared[j])
            values[i, j] = values[j, i] = value
            slopes[i, j] = slopes[j, i] = slope


@jit(fastmath=SIMD)
def lengthscale_slopes(coordinates, slopes, weights, out):
    r"""Sum `weights` times the derivatives of :math:`\varphi` in each log lengthscale, into `out`.

    :math:`\partial \varphi / \partial \log \ell_k = -2\varphi' (z_k - z'_k)^2` in coordinates z
    that are divided by the lengthscales.

    Parameters
    ----------
    coordinates : array, shape (d, t)
    slopes, weights : array, shape (t, t)
        Symmetric.
    out : array, shape (d,)
    """
    dim, count = coordinates.shape
    for k in range(dim):
        total = 0.0
        for i in range(count):
            for j in range(i):
                difference = coordinates[k, i] - coordinates[k, j]
                total += weights[i, j] * slopes[i, j] * difference * difference
        out[k] = 2.0 * total
