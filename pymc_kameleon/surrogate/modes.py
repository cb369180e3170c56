"""Which of a surrogate's modes points belong to: those that no barrier separates are one."""

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.posterior import (
    PosteriorSurrogate,
    new_workspace,
    surrogate_value,
    surrogate_values,
)

__all__ = ["find_modes", "nearest_mode"]

BARRIER = 3.0
"""Depth of the surrogate's log density between two points, below the lower of them, from which they
are not linked."""

N_BETWEEN = 7

LEAST_SHARE = 0.05
"""Share of the draws below which a group of them is no mode."""


@jit(allocates=True)
def _link(surrogate, points, values, linked):
    n, dim = points.shape
    between, workspace = np.empty(dim), new_workspace(surrogate)
    for i in range(n):
        for j in range(i):
            lowest, linked[i, j] = min(values[i], values[j]) - BARRIER, True
            for m in range(1, N_BETWEEN + 1):
                share = m / (N_BETWEEN + 1.0)
                for k in range(dim):
                    between[k] = share * points[i, k] + (1.0 - share) * points[j, k]
                if surrogate_value(surrogate, between, workspace) < lowest:
                    linked[i, j] = False
                    break


def find_modes(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Group draws from a surrogate by its modes.

    Two of the higher half of `points` (d, n), in coordinates of moves, are linked if the straight
    line between them crosses no deep valley; a curved mode is a chain of links. Returns the number
    of each one's mode (n,), the largest first; -1 for low draws, and for few of their own.
    """
    values = surrogate_values(surrogate, points.T)
    high = np.flatnonzero(values >= np.median(values))
    linked = np.zeros((len(high), len(high)), dtype=np.bool_)
    _link(surrogate, np.ascontiguousarray(points[:, high].T), values[high], linked)
    _, groups = connected_components(linked, directed=False)
    sizes = np.bincount(groups)
    order = np.argsort(-sizes, kind="stable")
    kept = order[sizes[order] >= LEAST_SHARE * len(high)]
    numbers = np.full(len(sizes), -1)
    numbers[kept] = np.arange(len(kept))
    modes = np.full(len(values), -1)
    modes[high] = numbers[groups]
    return modes


def nearest_mode(points: np.ndarray, modes: np.ndarray, u: np.ndarray) -> int:
    """Return that of `modes` (n,) whose column of `points` (d, n) is nearest to `u` (d,)."""
    known = modes >= 0
    distances = cdist(u[None], points.T[known])[0]
    return int(modes[known][np.argmin(distances)])
