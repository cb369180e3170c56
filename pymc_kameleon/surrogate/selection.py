"""Which of many evaluations a process of few points should learn from."""

import numpy as np

from pymc_kameleon.surrogate.depth import misfits, typical_set
from pymc_kameleon.surrogate.near_mode import around_the_mode
from pymc_kameleon.surrogate.regression_fit import choose_centres

__all__ = ["most_informative"]


def most_informative(points: np.ndarray, log_densities: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of evaluations that predict the others, most of all where the mass is.

    A pivoted Cholesky decomposition in the coordinates of the mode. What is far below the typical
    set counts the less.

    Parameters
    ----------
    points : array, shape (n, d)
    log_densities : array, shape (n,)
        Finite for those that may be chosen.
    size : int
        At most this many are chosen.

    Returns
    -------
    int64 array, shape (m,)
        Without repeated points.
    """
    finite = np.flatnonzero(np.isfinite(log_densities))
    if not finite.size:
        return finite
    points, values = points[finite], log_densities[finite]
    typical = typical_set(values, points.shape[1])
    _, noise = misfits(values, np.zeros(len(values)), typical)
    coordinates = np.ascontiguousarray(around_the_mode(points, values).whiten(points))
    chosen = np.empty(min(size, len(values)), dtype=np.int64)
    count = choose_centres(coordinates, 1.0 / noise, chosen.size, chosen)
    return finite[chosen[:count]]
