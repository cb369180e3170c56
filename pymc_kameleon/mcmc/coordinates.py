"""Standardised coordinates, in which local moves are made."""

from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.linalg import solve_factor
from pymc_kameleon.mcmc.numba_bridge import jit_inner

__all__ = ["Standardization", "standardize"]


class Standardization(NamedTuple):
    """The change of variables u = factor^-1 (x - location).

    Attributes
    ----------
    location : array, shape (d,)
    factor : array, shape (d, d)
        Lower Cholesky factor of the covariance.
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


@jit_inner
def standardize(coordinates, position, out):
    """Standardised coordinates of one position (d,), into `out`."""
    for i in range(out.size):
        out[i] = position[i] - coordinates.location[i]
    solve_factor(coordinates.factor, out, out)
