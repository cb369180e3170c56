"""The range of log densities of the typical set, and soft clipping of values far below it.

So far down the exact value changes no decision.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pymc_kameleon.gp.mean import fit_quadratic, n_coefficients
from pymc_kameleon.mcmc.coordinates import Standardization, standardization

RELATIVE_NOISE = 0.1
"""Standard deviation of the error of a value, relative to its depth below the typical set: where
the posterior has no mass the surrogate need only be low."""

LEAST_NOISE = 0.02
"""Standard deviation of the error, in the unit of the log density, where the mass is."""

VISITED = 0.02, 0.98
"""Quantiles of the log densities that a chain sees which say what is typical."""

WIDEST = 3.0
"""Times the depth of a Gaussian that a typical set is deep at most: a chain that still climbs has
seen lower ones."""

FLAT = -1e-4
"""Curvature, in units of the spread of the evaluations, above which no scale follows from it."""


def typical_depth(dim: int) -> float:
    """Depth below the largest value within which a Gaussian posterior has nearly all its mass."""
    return 0.5 * dim + 3.0 * math.sqrt(0.5 * dim) + 6.0


class TypicalSet(NamedTuple):
    """The value from which depths are measured, and the depth of the lowest typical one."""

    highest: float
    depth: float

    def depths(self, values: np.ndarray) -> np.ndarray:
        """Return how far log densities (n,) are below; inf where they are not finite."""
        return np.maximum(self.highest - np.where(np.isfinite(values), values, -np.inf), 0.0)


def typical_set(
    values: np.ndarray, dim: int, visited: np.ndarray | Sequence[float] = ()
) -> TypicalSet:
    """Find the typical set of log densities (n,) from those `visited` (m,); else of a Gaussian.

    A density can be far larger than the chain ever sees it, in a spike without mass, as that of a
    centred hierarchical model, and its mass at values that differ by more than those of a Gaussian.
    """
    largest, depth = values[np.isfinite(values)].max(), typical_depth(dim)
    if not len(visited):
        return TypicalSet(largest, depth)
    low, high = np.quantile(visited, VISITED)
    highest = min(largest, high + 0.5 * dim)
    return TypicalSet(highest, float(np.clip(highest - low, depth, WIDEST * depth)))


def clipped_residuals(
    values: np.ndarray, expected: np.ndarray, typical: TypicalSet
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a Gaussian process is to add to `expected`, and its noise, both of shape (n,).

    Depths beyond that of the typical set are bent towards twice that, and say "very low", as -inf
    and NaN do. Where a value is far below, and what is expected further, nothing is to be added.
    """
    depth = typical.depths(values)
    excess = np.maximum(depth - typical.depth, 0.0) / typical.depth
    low = np.minimum(depth, typical.depth) - typical.depth * np.expm1(-excess)
    differences = np.where(depth > 0.0, typical.highest - low, values) - expected
    weights = np.where(differences > 0.0, np.clip(2.0 - depth / typical.depth, 0.0, 1.0), 1.0)
    residuals = weights * differences
    return residuals, LEAST_NOISE + RELATIVE_NOISE * np.maximum(0.0, low - 0.5 * typical.depth)


def around_the_mode(
    points: np.ndarray, values: np.ndarray, gradients: np.ndarray | None = None
) -> Standardization:
    """Mean and covariance of the quadratic through the evaluations near the largest value.

    One of the log densities (n,) at `points` (n, d) is finite; `gradients` (n, d) with a NaN do not
    count. Where the evaluations are flat or curved upwards their own spread stands for the
    posterior's.
    """
    dim = points.shape[1]
    finite = np.isfinite(values)
    points, values = points[finite], values[finite]
    order, depth = np.argsort(-values), values.max() - values
    near = max(2 * n_coefficients(dim), int(np.sum(depth < typical_depth(dim))))
    points, values = points[order[:near]], values[order[:near]]
    spread, slopes = standardization(points, np.ones(dim)), None
    if gradients is not None:
        slopes = spread.factor.T @ gradients[finite][order[:near]].T
    weights = 1.0 / (1.0 + (values.max() - values) / dim)
    mean = fit_quadratic(spread.whiten(points), values, weights, FLAT, slopes)
    curvatures, directions = np.linalg.eigh(-mean.quadratic)
    is_flat = curvatures <= -1.01 * FLAT
    mode = directions @ np.where(is_flat, 0.0, directions.T @ mean.linear / curvatures)
    root = spread.factor @ directions / np.sqrt(np.where(is_flat, 1.0, curvatures))
    upper = np.linalg.qr(root.T, mode="r")
    return Standardization(
        spread.location + spread.factor @ mode,
        np.ascontiguousarray((upper * np.sign(np.diagonal(upper))[:, None]).T),
    )
