"""Standardised coordinates, in which local moves are made, and how a history gives them."""

from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.bridge.jit import jit_inner
from pymc_kameleon.mcmc.linalg import solve_factor

ROUNDING = 1e-14
"""Of the mean of equal numbers, relative to these."""


class Standardization(NamedTuple):
    """The change of variables u = factor^-1 (x - location).

    `factor` (d, d) is the lower Cholesky factor of the covariance.
    """

    location: np.ndarray
    factor: np.ndarray

    def whiten(self, points: np.ndarray) -> np.ndarray:
        """Standardised coordinates of the rows of `points` (n, d), as an array (d, n)."""
        return np.ascontiguousarray(
            linalg.solve_triangular(self.factor, (points - self.location).T, lower=True)
        )

    def unwhiten(self, u: np.ndarray) -> np.ndarray:
        """Points (n, d) whose standardised coordinates are `u` (d, n): the inverse of `whiten`."""
        return self.location + u.T @ self.factor.T

    def distance(self, x: np.ndarray, y: np.ndarray) -> float:
        """Distance of two points (d,), in standard deviations."""
        return float(np.linalg.norm(self.whiten(np.array([x, y])) @ (1.0, -1.0)))


def standardization(points: np.ndarray, fallback_scale: np.ndarray) -> Standardization:
    """Mean and Cholesky factor of the covariance of `points`, safe for few points and wild scales.

    Correlations of `points` (n, d) are shrunk by min(1, 2d/n)^2, which vanishes as the history
    grows and keeps the factor well conditioned before it has. `fallback_scale` (d,) is the scale of
    a coordinate that has not moved.
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


@jit_inner
def standardize(coordinates, position, out):
    """Standardised coordinates of one position (d,), into `out`."""
    for i in range(out.size):
        out[i] = position[i] - coordinates.location[i]
    solve_factor(coordinates.factor, out, out)
