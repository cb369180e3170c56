"""Location and scale of a history."""

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization

__all__ = ["standardization"]

ROUNDING = 1e-14
"""Of the mean of equal numbers, relative to these."""


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
    moved = scale > ROUNDING * np.abs(location)
    scale = np.where(moved, scale, fallback_scale)
    shrinkage = min(1.0, 2 * dim / n) ** 2
    unit = centred / scale
    correlation = (1 - shrinkage) * (unit.T @ unit) / n
    correlation[np.diag_indices(dim)] = 1.0 + 1e-10
    factor = scale[:, None] * linalg.cholesky(correlation, lower=True)
    return Standardization(location, np.ascontiguousarray(factor))
