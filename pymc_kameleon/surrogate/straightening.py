r"""Coordinates in which a curved ridge is straight.

Where points of the typical set bend, some coordinates are a quadratic of others plus little, and

.. math:: v_k = (u_k - a_k - b_k^\top u - \tfrac12 u^\top C_k u) / s_k

is what is left of them. A stationary covariance that knows the ridge here then knows it further out
too. Coordinates are taken one after the other, and a quadratic is one of those that are not taken
yet, so the map can be inverted, and what falls in all directions of v falls in those of u.

References
----------
M. D. Parno and Y. M. Marzouk (2018), Transport map accelerated Markov chain Monte Carlo, SIAM/ASA
Journal on Uncertainty Quantification 6, for triangular maps of polynomials.
"""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.mean import LARGEST_FIT, n_coefficients

__all__ = [
    "Straightening",
    "bend",
    "bend_all",
    "bend_gradient",
    "fit_straightening",
    "no_straightening",
    "straighten",
    "straighten_all",
    "straighten_gradient",
    "straightened_slopes",
]

STRAIGHT = 0.8
"""Variance that a quadratic has to leave, relative to what a linear function leaves."""

FEWEST = 3
"""Points for each coefficient below which there is no more to fit."""

MOST_POINTS = 2000
"""Points from which a quadratic is fitted."""

SMALLEST_VARIANCE = 1e-8
"""Of what is left of a standardised coordinate."""


class Straightening(NamedTuple):
    """The map; with no rows it is the identity.

    Attributes
    ----------
    bent : int64 array, shape (r,)
        Coordinates that are replaced.
    scales : array, shape (r,)
        Standard deviations s of what is left of them.
    constant : array, shape (r,)
    linear : array, shape (r, d)
    quadratic : array, shape (r, d, d)
        Symmetric.
    """

    bent: np.ndarray
    scales: np.ndarray
    constant: np.ndarray
    linear: np.ndarray
    quadratic: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("bent", "scales", "constant", "linear", "quadratic"), 0)

    @property
    def is_consistent(self) -> bool:
        """Whether all rows are complete, and replace a coordinate."""
        is_complete = len({len(array) for array in self}) == 1
        return is_complete and bool(np.all((self.bent >= 0) & (self.bent < self.linear.shape[1])))


def no_straightening(dim: int) -> Straightening:
    """Return the identity."""
    nothing = np.zeros(0)
    return Straightening(
        np.zeros(0, dtype=np.int64),
        nothing,
        nothing.copy(),
        np.zeros((0, dim)),
        np.zeros((0, dim, dim)),
    )


@jit
def _expected(straightening, r, u):
    """Quadratic of row `r` at `u` (d,)."""
    total = straightening.constant[r]
    for i in range(u.size):
        row = 0.0
        for j in range(u.size):
            row += straightening.quadratic[r, i, j] * u[j]
        total += u[i] * (straightening.linear[r, i] + 0.5 * row)
    return total


@jit
def _expected_slope(straightening, r, u, i):
    """Differentiate the quadratic of row `r` in coordinate `i` at `u` (d,)."""
    slope = straightening.linear[r, i]
    for j in range(u.size):
        slope += straightening.quadratic[r, i, j] * u[j]
    return slope


@jit
def straighten(straightening, u, out):
    """Straight coordinates of `u` (d,), into `out` (d,), another array."""
    for i in range(u.size):
        out[i] = u[i]
    for r in range(straightening.bent.size):
        k = straightening.bent[r]
        out[k] = (u[k] - _expected(straightening, r, u)) / straightening.scales[r]


@jit
def bend(straightening, v, out):
    """Point of straight coordinates `v` (d,), into `out` (d,): the inverse of `straighten`."""
    for i in range(v.size):
        out[i] = v[i]
    for r in range(straightening.bent.size - 1, -1, -1):
        k = straightening.bent[r]
        out[k] = straightening.scales[r] * v[k] + _expected(straightening, r, out)


@jit
def bend_gradient(straightening, u, slopes, out):
    """Gradient in `u` (d,), into `out`, of what has `slopes` (d,) in straight coordinates."""
    for i in range(u.size):
        out[i] = slopes[i]
    for r in range(straightening.bent.size):
        k = straightening.bent[r]
        slope = slopes[k] / straightening.scales[r]
        out[k] += slope - slopes[k]
        for i in range(u.size):
            out[i] -= slope * _expected_slope(straightening, r, u, i)


@jit
def straighten_gradient(straightening, u, slopes):
    """Replace `slopes` (d,), a gradient in `u`, by that in straight coordinates."""
    for r in range(straightening.bent.size):
        k = straightening.bent[r]
        slope = slopes[k]
        for i in range(u.size):
            slopes[i] += slope * _expected_slope(straightening, r, u, i)
        slopes[k] = slope * straightening.scales[r]


@jit
def _straighten_rows(straightening, rows, out):
    for i in range(rows.shape[0]):
        straighten(straightening, rows[i], out[i])


@jit
def _bend_rows(straightening, rows, out):
    for i in range(rows.shape[0]):
        bend(straightening, rows[i], out[i])


@jit
def _straighten_gradients(straightening, rows, slopes):
    for i in range(rows.shape[0]):
        straighten_gradient(straightening, rows[i], slopes[i])


def _by_rows(function, straightening, columns, out):
    rows = np.ascontiguousarray(columns.T)
    function(straightening, rows, out)
    return np.ascontiguousarray(out.T)


def straighten_all(straightening: Straightening, u: np.ndarray) -> np.ndarray:
    """Straight coordinates (d, n) of the columns of `u` (d, n)."""
    return _by_rows(_straighten_rows, straightening, u, np.empty(u.shape[::-1]))


def bend_all(straightening: Straightening, v: np.ndarray) -> np.ndarray:
    """Points (d, n) whose straight coordinates are the columns of `v` (d, n)."""
    return _by_rows(_bend_rows, straightening, v, np.empty(v.shape[::-1]))


def straightened_slopes(
    straightening: Straightening, u: np.ndarray, slopes: np.ndarray
) -> np.ndarray:
    """Gradients (d, n) in straight coordinates, of `slopes` (d, n) in those of `u` (d, n)."""
    return _by_rows(_straighten_gradients, straightening, u, np.array(slopes.T, order="C"))


def fit_straightening(u: np.ndarray, weights: np.ndarray) -> Straightening:
    """Find what bends, by regressions of each coordinate on a quadratic of the others.

    Parameters
    ----------
    u : array, shape (d, n)
        Points of the typical set.
    weights : array, shape (n,)
        What multiplies their misfits.
    """
    dim = len(u)
    kept = np.unique(np.linspace(0, u.shape[1] - 1, MOST_POINTS).astype(int))
    u, weights = u[:, kept], weights[kept]
    if len(kept) < FEWEST * (1 + dim) or n_coefficients(dim) > LARGEST_FIT:
        return no_straightening(dim)
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
        return no_straightening(dim)
    bent, *parts = zip(*rows, strict=True)
    return Straightening(np.array(bent), *map(np.array, parts))


def _fit_quadratic(gram, pairs, k, left, n_effective):
    """Regress coordinate `k` on a linear function of the others in `left`, and on some products.

    Products are taken one by one, as long as a Bayesian information criterion, which knows among
    how many they are chosen, says so.

    Parameters
    ----------
    gram : array, shape (p, p)
        Mean products of constant, coordinates and their products.
    pairs : int array, shape (2, p - 1 - d)
        Of which coordinates the products are.
    k : int
    left : list of int
    n_effective : float
        Points.

    Returns
    -------
    tuple
        What the products leave of the variance that the linear function leaves; then scale,
        constant, linear and quadratic coefficients.
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
