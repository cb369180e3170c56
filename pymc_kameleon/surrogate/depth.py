"""How values far below the typical set are learnt: low, however low they are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["TypicalSet", "compressed", "misfits", "typical_depth", "typical_set"]

RELATIVE_NOISE = 0.1
"""Standard deviation of the misfit of a value, relative to its depth below the typical set: where
the posterior has no mass the surrogate need only be low."""

LEAST_NOISE = 0.02
"""Standard deviation of the misfit, in the unit of the log density, where the mass is."""

VISITED = 0.02, 0.98
"""Quantiles of the log densities that a chain sees which say what is typical."""

WIDEST = 3.0
"""Times the depth of a Gaussian that a typical set is deep at most: a chain that still climbs has
seen lower ones."""


def typical_depth(dim: int) -> float:
    """Depth below the largest value within which a Gaussian posterior has nearly all its mass."""
    return 0.5 * dim + 3.0 * math.sqrt(0.5 * dim) + 6.0


class TypicalSet(NamedTuple):
    """What log densities the posterior's mass has.

    Attributes
    ----------
    highest : float
        From which depths are measured.
    depth : float
        Depth of the lowest.
    """

    highest: float
    depth: float

    def depths(self, values: np.ndarray) -> np.ndarray:
        """Return how far log densities (n,) are below; inf where they are not finite."""
        return np.maximum(self.highest - np.where(np.isfinite(values), values, -np.inf), 0.0)


def typical_set(
    values: np.ndarray, dim: int, visited: np.ndarray | Sequence[float] = ()
) -> TypicalSet:
    """Return the typical set, as far as a chain has seen it; before that, of a Gaussian.

    A density can be far larger than the chain ever sees it, in a spike without mass, as that of a
    centred hierarchical model where the scale is small; and its mass can be at values that differ
    by more than those of a Gaussian.

    Parameters
    ----------
    values : array, shape (n,)
        Log densities, at least one of them finite.
    dim : int
    visited : array, shape (m,), optional
        Log densities where the chain was.
    """
    largest, depth = values[np.isfinite(values)].max(), typical_depth(dim)
    if not len(visited):
        return TypicalSet(largest, depth)
    low, high = np.quantile(visited, VISITED)
    highest = min(largest, high + 0.5 * dim)
    return TypicalSet(highest, float(np.clip(highest - low, depth, WIDEST * depth)))


def compressed(depth: np.ndarray, typical: float) -> np.ndarray:
    """Depths of a `TypicalSet`, bent beyond that of the typical set towards twice that.

    They say "very low", as -inf and NaN do; how low changes no decision.
    """
    excess = np.maximum(depth - typical, 0.0) / typical
    return np.minimum(depth, typical) + typical * -np.expm1(-excess)


def misfits(
    values: np.ndarray, expected: np.ndarray, typical: TypicalSet
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the radial basis functions are to add to the prior mean, and how closely.

    The difference of the compressed value; but where that is far below the typical set, and what
    is expected further, nothing.

    Parameters
    ----------
    values, expected : array, shape (n,)
        Log densities, and log prior plus mean.
    typical : TypicalSet

    Returns
    -------
    residuals, noise : arrays, shape (n,)
    """
    depth = typical.depths(values)
    low = compressed(depth, typical.depth)
    differences = np.where(depth > 0.0, typical.highest - low, values) - expected
    weights = np.where(differences > 0.0, np.clip(2.0 - depth / typical.depth, 0.0, 1.0), 1.0)
    residuals = weights * differences
    return residuals, LEAST_NOISE + RELATIVE_NOISE * np.maximum(0.0, low - 0.5 * typical.depth)
