"""The Gaussian that the evaluations near a mode suggest."""

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.surrogate.depth import typical_depth
from pymc_kameleon.surrogate.mean import fit_concave_mean, n_coefficients

__all__ = ["around_the_mode"]

FLAT = -1e-4
"""Curvature, in units of the spread of the evaluations, above which it says nothing of a scale."""


def around_the_mode(
    points: np.ndarray, values: np.ndarray, gradients: np.ndarray | None = None
) -> Standardization:
    """Mean and covariance of the quadratic through the evaluations near the largest value.

    Where they are flat or curved upwards, their own spread stands for that of the posterior.

    Parameters
    ----------
    points : array, shape (n, d)
    values : array, shape (n,)
        Log densities, of which at least one is finite.
    gradients : array, shape (n, d), optional
        Theirs; those with a NaN do not count.
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
    mean = fit_concave_mean(spread.whiten(points), values, weights, FLAT, slopes)
    curvatures, directions = np.linalg.eigh(-mean.quadratic)
    is_flat = curvatures <= -1.01 * FLAT
    mode = directions @ np.where(is_flat, 0.0, directions.T @ mean.linear / curvatures)
    root = spread.factor @ directions / np.sqrt(np.where(is_flat, 1.0, curvatures))
    upper = np.linalg.qr(root.T, mode="r")
    return Standardization(
        spread.location + spread.factor @ mode,
        np.ascontiguousarray((upper * np.sign(np.diagonal(upper))[:, None]).T),
    )
