"""The median heuristic."""

import math

import numpy as np
from scipy.spatial.distance import pdist

__all__ = ["median_bandwidth"]


def median_bandwidth(points: np.ndarray) -> float:
    r"""Median heuristic: the median distance between distinct points, divided by :math:`\sqrt 2`.

    Parameters
    ----------
    points : array, shape (d, n)
        A few hundred points are enough; the cost is quadratic in n.

    Returns
    -------
    float
        1.0 if there are no two distinct points.
    """
    distances = pdist(points.T)
    distances = distances[distances > 0]
    return float(np.median(distances) / math.sqrt(2)) if distances.size else 1.0
