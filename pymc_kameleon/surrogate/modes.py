"""Modes of a surrogate, found from draws."""

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from pymc_kameleon.surrogate.posterior_surrogate import PosteriorSurrogate, surrogate_values

BARRIER = 3.0
"""Depth of the surrogate's log density between two points, below the lower of them, from which they
are not linked."""

N_BETWEEN = 7

LEAST_SHARE = 0.05
"""Share of the draws below which a group of them is no mode."""


def find_modes(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Group draws from a surrogate by its modes.

    Two of the higher half of `points` (d, n), in coordinates of moves, are linked if the straight
    line between them crosses no deep valley; a curved mode is a chain of links. Returns the number
    of each one's mode (n,), the largest first; -1 for low draws, and for few of their own.
    """
    values = surrogate_values(surrogate, points.T)
    high = np.flatnonzero(values >= np.median(values))
    i, j = np.tril_indices(len(high), -1)
    shares = np.arange(1, N_BETWEEN + 1)[:, None, None] / (N_BETWEEN + 1)
    ends = points.T[high]
    between = shares * ends[i] + (1.0 - shares) * ends[j]
    found = surrogate_values(surrogate, between.reshape(-1, len(points)))
    lowest = np.minimum(values[high[i]], values[high[j]]) - BARRIER
    linked = np.zeros((len(high), len(high)), dtype=np.bool_)
    linked[i, j] = np.all(found.reshape(N_BETWEEN, -1) >= lowest, axis=0)
    _, groups = connected_components(linked, directed=False)
    sizes = np.bincount(groups)
    order = np.argsort(-sizes, kind="stable")
    kept = order[sizes[order] >= LEAST_SHARE * len(high)]
    numbers = np.full(len(sizes), -1)
    numbers[kept] = np.arange(len(kept))
    modes = np.full(len(values), -1)
    modes[high] = numbers[groups]
    return modes


def nearest_modes(points: np.ndarray, modes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Of each of the `rows` (m, d), that of `modes` (n,) whose column of `points` is nearest."""
    known = modes >= 0
    return modes[known][np.argmin(cdist(rows, points.T[known]), axis=1)]
