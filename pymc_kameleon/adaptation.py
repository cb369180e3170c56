"""What adapts: the history, location and scale, and the recursion of a scaling."""

import math
from typing import Annotated, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable
from scipy import linalg

from pymc_kameleon.layout import floats, integers

__all__ = [
    "HELD",
    "RECENT",
    "SEEN",
    "History",
    "RunningCovariance",
    "Standardization",
    "learn_scaling",
    "new_covariance",
    "new_history",
    "record",
    "standardization",
    "target_acceptance",
    "thinned",
    "update_covariance",
]


HELD, STRIDE, SEEN, RECENT = range(4)
"""Positions in a history's `cursor`: what they count is said in `History`."""


class History(NamedTuple):
    """Evenly spaced past positions of a chain, in bounded memory.

    Every `stride`-th position is kept; when the buffer is full, every other one is dropped and the
    stride doubles. So the points are always uniform over the chain so far, and over any later part
    of it.

    Attributes
    ----------
    points : array, shape (capacity, d)
        Raw positions; row i is from transition i * stride.
    recent : array, shape (m, d)
        The last positions, without gaps, if m > 0: room for `cursor[RECENT]` of them to be used
        and taken out (`cursor[RECENT] = 0`) before there are m.
    cursor : int64 array, shape (4,)
        Number of points held, stride, number of positions seen, and number of recent ones.
    """

    points: Annotated[np.ndarray, floats("history", "d")]
    recent: Annotated[np.ndarray, floats("recent", "d")]
    cursor: Annotated[np.ndarray, integers(4)]

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are those of arrays of this size."""
        count, stride, seen, recent = self.cursor
        room, recent_room = len(self.points), len(self.recent)
        return bool(0 <= count <= room and stride > 0 <= seen and 0 <= recent <= recent_room)

    def later_half(self) -> np.ndarray:
        """Positions from the later half of the chain, shape (m, d)."""
        count = self.cursor[0]
        return self.points[count // 2 : count]


def new_history(capacity: int, dim: int, n_recent: int = 0) -> History:
    """Return an empty history of at most `capacity` (an even number of) points."""
    return History(np.zeros((capacity, dim)), np.zeros((n_recent, dim)), np.array([0, 1, 0, 0]))


@numba.njit(cache=True)
def record(history, position):
    """Show the history the chain's next position."""
    points, cursor = history.points, history.cursor
    if cursor[2] % cursor[1] == 0:
        if cursor[0] == points.shape[0]:
            half = points.shape[0] // 2
            for i in range(half):
                for k in range(points.shape[1]):
                    points[i, k] = points[2 * i, k]
            cursor[0] = half
            cursor[1] *= 2
        if cursor[2] % cursor[1] == 0:
            for k in range(points.shape[1]):
                points[cursor[0], k] = position[k]
            cursor[0] += 1
    cursor[2] += 1
    if history.recent.shape[0] > 0:
        for k in range(points.shape[1]):
            history.recent[cursor[RECENT], k] = position[k]
        cursor[RECENT] += 1


def thinned(points: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """At most `size` of the rows of `points`, drawn without replacement."""
    if len(points) <= size:
        return points
    return points[np.sort(rng.choice(len(points), size, replace=False))]


class Standardization(NamedTuple):
    """The change of variables u = factor^-1 (x - location).

    Attributes
    ----------
    location : array, shape (d,)
    factor : array, shape (d, d)
        Lower Cholesky factor of the covariance.
    """

    location: Annotated[np.ndarray, floats("d")]
    factor: Annotated[np.ndarray, floats("d", "d")]

    def whiten(self, points: np.ndarray) -> np.ndarray:
        """Standardised coordinates of the rows of `points` (n, d), as an array (d, n)."""
        return np.ascontiguousarray(
            linalg.solve_triangular(self.factor, (points - self.location).T, lower=True)
        )


def standardization(points: np.ndarray, fallback_scale: np.ndarray) -> Standardization:
    """Mean and Cholesky factor of the covariance of `points`, safe for few points and wild scales.

    Correlations are shrunk by min(1, 2d/n)^2, which vanishes as the history grows and keeps the
    factor well conditioned before it has.

    Parameters
    ----------
    points : array, shape (n, d)
    fallback_scale : array, shape (d,)
        Scale of a coordinate that has not moved.
    """
    n, dim = points.shape
    location = points.mean(axis=0)
    centred = points - location
    scale = np.sqrt(np.mean(centred**2, axis=0))
    moved = scale > 1e-12 * fallback_scale
    scale = np.where(moved, scale, fallback_scale)
    shrinkage = min(1.0, 2 * dim / n) ** 2
    unit = centred / scale
    correlation = (1 - shrinkage) * (unit.T @ unit) / n
    correlation[np.diag_indices(dim)] = 1.0 + 1e-10
    factor = scale[:, None] * linalg.cholesky(correlation, lower=True)
    return Standardization(location, np.ascontiguousarray(factor))


class RunningCovariance(NamedTuple):
    """Mean and scatter of all rows seen so far, updated in blocks.

    Attributes
    ----------
    mean : array, shape (k,)
    scatter : array, shape (k, k)
        Sum of outer products of the centred rows; the lower triangle is filled.
    weight : array, shape (1,)
        Sum of the weights of the rows.
    """

    mean: Annotated[np.ndarray, floats("features")]
    scatter: Annotated[np.ndarray, floats("features", "features")]
    weight: Annotated[np.ndarray, floats(1)]


def new_covariance(k: int) -> RunningCovariance:
    """Return the running covariance of no rows of length `k`."""
    return RunningCovariance(np.zeros(k), np.zeros((k, k)), np.zeros(1))


def update_covariance(covariance: RunningCovariance, rows: np.ndarray, weight: float = 1.0):
    """Show a block of rows to a running covariance (Welford 1962, for blocks; in place).

    Each block is centred at its own mean, so nothing cancels however large the mean is.

    Parameters
    ----------
    covariance : RunningCovariance
    rows : array, shape (n, k)
    weight : float
        Weight of each row.
    """
    old, new = covariance.weight[0], weight * len(rows)
    if new == 0:
        return
    mean = rows.mean(axis=0)
    shift = mean - covariance.mean
    block = np.empty((len(rows) + 1, len(mean)))
    np.subtract(rows, mean, out=block[:-1])
    block[:-1] *= math.sqrt(weight)
    block[-1] = math.sqrt(old * new / (old + new)) * shift
    linalg.blas.dsyrk(1.0, block.T, beta=1.0, c=covariance.scatter.T, lower=0, overwrite_c=1)
    covariance.mean[:] += new / (old + new) * shift
    covariance.weight[0] += new


def target_acceptance(dim: int) -> float:
    """Return the acceptance that a scaling is learnt for: 0.44 in one dimension, else 0.234."""
    return 0.44 if dim == 1 else 0.234


@register_jitable
def learn_scaling(log_scaling, acceptance, target, step, smallest, largest):
    """One Robbins-Monro step for a log scaling (Andrieu & Thoms 2008, algorithm 4).

    Parameters
    ----------
    log_scaling : float
    acceptance : float
        Acceptance probability of the last proposal.
    target : float
    step : float
        Step of the recursion, which vanishes with the number of updates.
    smallest, largest : float
        Bounds: without kernel support every small move is accepted and the recursion would run
        away; where all moves fail, it would shrink to nothing.
    """
    return min(max(log_scaling + step * (acceptance - target), smallest), largest)
