r"""A triangular map to coordinates in which a curved ridge is straight.

Where points of the typical set bend, some coordinates are a quadratic of others plus little, and

.. math:: v_k = (u_k - a_k - b_k^\top u - \tfrac12 u^\top C_k u) / s_k

is the residual of that. A stationary covariance that describes the ridge here then describes it
further out, too. Coordinates are taken one after the other, and a quadratic is one of those that
are not taken yet, so the map can be inverted (Parno & Marzouk 2018, Transport map accelerated
Markov chain Monte Carlo, SIAM/ASA Journal on Uncertainty Quantification 6).
"""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.gp.mean import LARGEST_FIT, n_coefficients
from pymc_kameleon.mcmc.bridge.jit import jit, jit_inner

STRAIGHT = 0.8
"""Residual variance of a quadratic, relative to that of a linear function, below which it is
used."""

FEWEST = 3
"""Points for each coefficient below which there is no more to fit."""

MOST_POINTS = 2000
"""Points from which a quadratic is fitted."""

SMALLEST_VARIANCE = 1e-8
"""Of the residual of a standardised coordinate."""


class TriangularMap(NamedTuple):
    """The map: which coordinates are replaced, s, a, b and C; with no rows it is the identity."""

    mapped: np.ndarray
    scales: np.ndarray
    constant: np.ndarray
    linear: np.ndarray
    quadratic: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(self._fields, 0)

    @property
    def is_consistent(self) -> bool:
        """Whether all rows are complete, and replace a coordinate."""
        is_complete = len({len(array) for array in self}) == 1
        return is_complete and bool(
            np.all((self.mapped >= 0) & (self.mapped < self.linear.shape[1]))
        )

    def to_v(self, u: np.ndarray) -> np.ndarray:
        """Straight coordinates (d, n) of the columns of `u` (d, n)."""
        rows = np.ascontiguousarray(u.T)
        out = np.empty(rows.shape)
        _rows_to_v(self, rows, out)
        return np.ascontiguousarray(out.T)

    def to_u(self, v: np.ndarray) -> np.ndarray:
        """Points (d, n) whose straight coordinates are the columns of `v` (d, n)."""
        rows = np.ascontiguousarray(v.T)
        out = np.empty(rows.shape)
        _rows_to_u(self, rows, out)
        return np.ascontiguousarray(out.T)

    def gradients_in_v(self, u: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients (d, n) in straight coordinates, of `gradients` (d, n) in `u` (d, n)."""
        out = np.array(gradients.T, order="C")
        _row_gradients_in_v(self, np.ascontiguousarray(u.T), out)
        return np.ascontiguousarray(out.T)


def identity_map(dim: int) -> TriangularMap:
    """Return the map that replaces no coordinate."""
    nothing = [np.zeros((0, *(dim,) * axes)) for axes in (0, 0, 1, 2)]
    return TriangularMap(np.zeros(0, dtype=np.int64), *nothing)


@jit_inner
def _expected(triangular_map, r, u):
    """Quadratic of row `r` at `u` (d,)."""
    total = triangular_map.constant[r]
    for i in range(u.size):
        row = 0.0
        for j in range(u.size):
            row += triangular_map.quadratic[r, i, j] * u[j]
        total += u[i] * (triangular_map.linear[r, i] + 0.5 * row)
    return total


@jit_inner
def _expected_slope(triangular_map, r, u, i):
    slope = triangular_map.linear[r, i]
    for j in range(u.size):
        slope += triangular_map.quadratic[r, i, j] * u[j]
    return slope


@jit_inner
def map_to_v(triangular_map, u, v):
    """Write the straight coordinates of `u` (d,) into `v` (d,), another array."""
    for i in range(u.size):
        v[i] = u[i]
    for r in range(triangular_map.mapped.size):
        k = triangular_map.mapped[r]
        v[k] = (u[k] - _expected(triangular_map, r, u)) / triangular_map.scales[r]


@jit_inner
def map_to_u(triangular_map, v, u):
    """Write the point of straight coordinates `v` (d,) into `u` (d,), another array."""
    for i in range(v.size):
        u[i] = v[i]
    for r in range(triangular_map.mapped.size - 1, -1, -1):
        k = triangular_map.mapped[r]
        u[k] = triangular_map.scales[r] * v[k] + _expected(triangular_map, r, u)


@jit_inner
def gradient_in_u(triangular_map, u, gradient, out):
    """Gradient in `u` (d,), into `out` (d,), of what has this `gradient` (d,) in v."""
    for i in range(u.size):
        out[i] = gradient[i]
    for r in range(triangular_map.mapped.size):
        k = triangular_map.mapped[r]
        slope = gradient[k] / triangular_map.scales[r]
        out[k] += slope - gradient[k]
        for i in range(u.size):
            out[i] -= slope * _expected_slope(triangular_map, r, u, i)


@jit_inner
def gradient_in_v(triangular_map, u, gradient):
    """Replace a `gradient` (d,) in `u` (d,) by that in v."""
    for r in range(triangular_map.mapped.size):
        k = triangular_map.mapped[r]
        slope = gradient[k]
        for i in range(u.size):
            gradient[i] += slope * _expected_slope(triangular_map, r, u, i)
        gradient[k] = slope * triangular_map.scales[r]


@jit
def _rows_to_v(triangular_map, rows, out):
    for i in range(rows.shape[0]):
        map_to_v(triangular_map, rows[i], out[i])


@jit
def _rows_to_u(triangular_map, rows, out):
    for i in range(rows.shape[0]):
        map_to_u(triangular_map, rows[i], out[i])


@jit
def _row_gradients_in_v(triangular_map, rows, gradients):
    for i in range(rows.shape[0]):
        gradient_in_v(triangular_map, rows[i], gradients[i])


def fit_triangular_map(u: np.ndarray, weights: np.ndarray) -> TriangularMap:
    """Find what bends, by regressions of each coordinate on a quadratic of the others.

    `u` (d, n) are points of the typical set, and `weights` (n,) multiply their errors.
    """
    dim, n = u.shape
    if n < FEWEST * (1 + dim) or n_coefficients(dim) > LARGEST_FIT:
        return identity_map(dim)
    kept = np.unique(np.linspace(0, n - 1, MOST_POINTS).astype(int))
    u, weights = u[:, kept], weights[kept]
    pairs = np.array(np.triu_indices(dim))
    features = np.concatenate([np.ones((1, len(kept))), u, u[pairs[0]] * u[pairs[1]]]) * weights
    gram = features @ features.T / np.sum(weights**2)
    n_effective = np.sum(weights**2) ** 2 / np.sum(weights**4)
    rows, left = [], list(range(dim))
    while len(left) > 1:
        fits = [_fit_quadratic(gram, pairs, k, left, n_effective) for k in left]
        best = min(range(len(left)), key=lambda i: fits[i][0])
        if fits[best][0] > STRAIGHT:
            break
        rows.append((left.pop(best), *fits[best][1:]))
    if not rows:
        return identity_map(dim)
    mapped, *parts = zip(*rows, strict=True)
    return TriangularMap(np.array(mapped), *map(np.array, parts))


def _fit_quadratic(gram, pairs, k, left, n_effective):
    """Regress coordinate `k` on a linear function of the others in `left`, and on some products.

    Products are taken one by one while a Bayesian information criterion, which knows among how many
    they are chosen, says so. `gram` (p, p) has mean products of constant, coordinates and their
    products, of `pairs` (2, p - 1 - d). Returns the share of the variance that the products leave;
    then scale, constant, linear and quadratic coefficients.
    """
    dim = len(gram) - 1 - pairs.shape[1]
    others = np.array([i for i in left if i != k])
    flat = np.append(0, 1 + others)
    candidates = 1 + dim + np.flatnonzero(np.all(np.isin(pairs, others), axis=0))
    columns = np.append(candidates, 1 + k)
    block = gram[np.ix_(flat, columns)]
    rest = gram[np.ix_(columns, columns)] - block.T @ _solved(gram, flat, block)
    variance = linear_variance = max(rest[-1, -1], SMALLEST_VARIANCE)
    least_pivots = 1e-6 * np.diagonal(gram)[candidates] + SMALLEST_VARIANCE
    penalty = math.log(n_effective) + 2.0 * math.log(len(candidates))
    used = []
    while len(flat) + len(used) < n_effective / FEWEST:
        pivots = np.diagonal(rest)[:-1]
        gains = np.where(pivots > least_pivots, rest[:-1, -1] ** 2, 0.0)
        gains /= np.maximum(pivots, least_pivots)
        best = int(np.argmax(gains))
        left_over = max(variance - gains[best], SMALLEST_VARIANCE)
        if n_effective * math.log(variance / left_over) < penalty:
            break
        used.append(candidates[best])
        variance = left_over
        rest = rest - np.outer(rest[:, best], rest[best]) / rest[best, best]
    every = np.append(flat, np.array(used, dtype=int))
    coefficients = _solved(gram, every, gram[every, 1 + k])
    linear, quadratic = np.zeros(dim), np.zeros((dim, dim))
    linear[others] = coefficients[1 : len(flat)]
    first, second = pairs[:, every[len(flat) :] - 1 - dim]
    quadratic[first, second] = coefficients[len(flat) :]
    quadratic += quadratic.T
    return variance / linear_variance, math.sqrt(variance), coefficients[0], linear, quadratic


def _solved(gram, columns, moments):
    return np.linalg.lstsq(gram[np.ix_(columns, columns)], moments, rcond=1e-10)[0]
