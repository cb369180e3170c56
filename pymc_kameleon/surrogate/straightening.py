r"""Coordinates in which a curved ridge is straight.

Where points of the typical set bend, some coordinates are a quadratic of others plus little, and

.. math:: v_k = (u_k - a_k - b_k^\top u - \tfrac12 u^\top C_k u) / s_k

is what is left of them. A stationary covariance that knows the ridge here then knows it further out
too. Coordinates are taken one after the other, and a quadratic is one of those that are not taken
yet, so the map can be inverted and its determinant is constant.

References
----------
M. D. Parno and Y. M. Marzouk (2018), Transport map accelerated Markov chain Monte Carlo, SIAM/ASA
Journal on Uncertainty Quantification 6, for triangular maps of polynomials.
"""

from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.layout import floats, integers
from pymc_kameleon.mcmc.numba_bridge import jit

__all__ = [
    "Straightening",
    "fit_straightening",
    "no_straightening",
    "straighten",
    "straighten_all",
    "straightened_slopes",
    "unstraighten_gradient",
]

STRAIGHT = 0.8
"""Variance that a quadratic has to leave, relative to what a linear function leaves."""

FEWEST = 3
"""Points for each coefficient of a quadratic below which none is fitted."""


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

    bent: Annotated[np.ndarray, integers("bent")]
    scales: Annotated[np.ndarray, floats("bent")]
    constant: Annotated[np.ndarray, floats("bent")]
    linear: Annotated[np.ndarray, floats("bent", "d")]
    quadratic: Annotated[np.ndarray, floats("bent", "d", "d")]


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
def straighten(straightening, u, out):
    """Straight coordinates of `u` (d,), into `out` (d,), another array."""
    for i in range(u.size):
        out[i] = u[i]
    for r in range(straightening.bent.size):
        k = straightening.bent[r]
        expected = straightening.constant[r]
        for i in range(u.size):
            row = 0.0
            for j in range(u.size):
                row += straightening.quadratic[r, i, j] * u[j]
            expected += u[i] * (straightening.linear[r, i] + 0.5 * row)
        out[k] = (u[k] - expected) / straightening.scales[r]


@jit
def unstraighten_gradient(straightening, u, slopes, out):
    """Gradient in `u` of what has the gradient `slopes` in straight coordinates, into `out`."""
    for i in range(u.size):
        out[i] = slopes[i]
    for r in range(straightening.bent.size):
        k = straightening.bent[r]
        slope = slopes[k] / straightening.scales[r]
        out[k] += slope - slopes[k]
        for i in range(u.size):
            row = straightening.linear[r, i]
            for j in range(u.size):
                row += straightening.quadratic[r, i, j] * u[j]
            out[i] -= slope * row


@jit
def _straighten_all(straightening, rows, out):
    for i in range(rows.shape[0]):
        straighten(straightening, rows[i], out[i])


def straighten_all(straightening: Straightening, u: np.ndarray) -> np.ndarray:
    """Straight coordinates (d, n) of the columns of `u` (d, n)."""
    rows = np.ascontiguousarray(u.T)
    out = np.empty_like(rows)
    _straighten_all(straightening, rows, out)
    return np.ascontiguousarray(out.T)


def straightened_slopes(
    straightening: Straightening, u: np.ndarray, slopes: np.ndarray
) -> np.ndarray:
    """Gradients (d, n) in straight coordinates, of `slopes` (d, n) in those of `u` (d, n)."""
    jacobians = np.tile(np.eye(len(u)), (u.shape[1], 1, 1))
    for r, k in enumerate(straightening.bent):
        expected = straightening.linear[r] + u.T @ straightening.quadratic[r]
        jacobians[:, k] = (jacobians[:, k] - expected) / straightening.scales[r]
    return np.linalg.solve(jacobians.transpose(0, 2, 1), slopes.T[:, :, None])[:, :, 0].T


def fit_straightening(u: np.ndarray, weights: np.ndarray) -> Straightening:
    """Find what bends, by regressions of each coordinate on a quadratic of the others.

    Parameters
    ----------
    u : array, shape (d, n)
        Points of the typical set.
    weights : array, shape (n,)
        What multiplies their misfits.
    """
    dim, n = u.shape
    if n < FEWEST * (1 + dim):
        return no_straightening(dim)
    pairs = np.array(np.triu_indices(dim))
    features = np.concatenate([np.ones((1, n)), u, u[pairs[0]] * u[pairs[1]]]) * weights
    gram = features @ features.T
    effective = np.sum(weights**2) ** 2 / np.sum(weights**4)
    rows, left = [], list(range(dim))
    while len(left) > 1:
        fits = [_quadratic(gram, pairs, k, left, effective) for k in left]
        best = min(range(len(left)), key=lambda i: fits[i][0])
        if fits[best][0] > STRAIGHT:
            break
        rows.append((left.pop(best), *fits[best][1:]))
    if not rows:
        return no_straightening(dim)
    bent, *parts = zip(*rows, strict=True)
    return Straightening(np.array(bent), *map(np.array, parts))


def _quadratic(gram, pairs, k, left, effective):
    """Regress coordinate `k` on a linear function of the others in `left`, and on some products.

    Returns what the products leave of the variance that the linear function leaves, the standard
    deviation of that, and the quadratic's coefficients.
    """
    dim, target, total = len(pairs.T) and int(pairs.max()) + 1, 1 + k, gram[0, 0]
    others = [i for i in left if i != k]
    used = [0, *(1 + i for i in others)]
    candidates = 1 + dim + np.flatnonzero(np.all(np.isin(pairs, others), axis=0))
    rest = gram.copy()
    for column in used:
        rest -= np.outer(rest[:, column], rest[column]) / rest[column, column]
    linear_variance = rest[target, target]
    penalty = np.log(effective) + 2.0 * np.log(len(candidates))
    while len(used) < effective / FEWEST:
        pivots = np.diagonal(rest)[candidates]
        free = pivots > 1e-6 * np.diagonal(gram)[candidates]
        gains = np.where(free, rest[candidates, target] ** 2 / np.where(free, pivots, 1.0), 0.0)
        best = candidates[np.argmax(gains)]
        left_over = max(rest[target, target] - gains.max(), 1e-12 * total)
        if effective * np.log(rest[target, target] / left_over) < penalty:
            break
        used.append(best)
        rest -= np.outer(rest[:, best], rest[best]) / rest[best, best]
    coefficients = np.linalg.solve(gram[np.ix_(used, used)], gram[used, target])
    variance = max(rest[target, target], 1e-12 * total)
    linear, quadratic = np.zeros(dim), np.zeros((dim, dim))
    linear[others] = coefficients[1 : len(left)]
    for column, value in zip(used[len(left) :], coefficients[len(left) :], strict=True):
        i, j = pairs[:, column - 1 - dim]
        quadratic[i, j] += value
        quadratic[j, i] += value
    sd = np.sqrt(variance / total)
    return variance / linear_variance, sd, coefficients[0], linear, quadratic
