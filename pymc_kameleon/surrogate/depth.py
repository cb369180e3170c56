"""How values far below the typical set are learnt: low, however low they are."""

import math

import numpy as np

__all__ = ["compressed", "misfits", "typical_depth"]

RELATIVE_NOISE = 0.1
"""Standard deviation of the misfit of a value, relative to its depth below the typical set: where
the posterior has no mass the surrogate need only be low."""

LEAST_NOISE = 0.02
"""Standard deviation of the misfit, in the unit of the log density, where the mass is."""


def typical_depth(dim: int) -> float:
    """Depth below the largest value within which a Gaussian posterior has nearly all its mass."""
    return 0.5 * dim + 3.0 * math.sqrt(0.5 * dim) + 6.0


def compressed(depth: np.ndarray, typical: float) -> np.ndarray:
    """Depths below the largest value, bent beyond that of the typical set towards twice that.

    They say "very low", as -inf and NaN do; how low changes no decision.
    """
    excess = np.maximum(depth - typical, 0.0) / typical
    return np.minimum(depth, typical) + typical * -np.expm1(-excess)


def misfits(values: np.ndarray, expected: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the radial basis functions are to add to the prior mean, and how closely.

    The difference of the compressed value; but where that is far below the typical set, and what
    is expected further, nothing.

    Parameters
    ----------
    values, expected : array, shape (n,)
        Log densities, at least one of them finite, and log prior plus mean.
    dim : int

    Returns
    -------
    residuals, noise : arrays, shape (n,)
    """
    finite = np.isfinite(values)
    best, typical = values[finite].max(), typical_depth(dim)
    depth = np.where(finite, best - np.where(finite, values, best), np.inf)
    low = compressed(depth, typical)
    differences = best - low - expected
    weights = np.where(differences > 0.0, np.clip(2.0 - depth / typical, 0.0, 1.0), 1.0)
    residuals = weights * differences
    return residuals, LEAST_NOISE + RELATIVE_NOISE * np.maximum(0.0, low - 0.5 * typical)
