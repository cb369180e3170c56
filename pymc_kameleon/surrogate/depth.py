"""How values far below the typical set are learnt: low, however low they are."""

import math

import numpy as np

__all__ = ["ceilings", "compressed", "depths", "misfits", "typical_depth"]

RELATIVE_NOISE = 0.1
"""Standard deviation of the misfit of a value, relative to its depth below the typical set: where
the posterior has no mass the surrogate need only be low."""

LEAST_NOISE = 0.02
"""Standard deviation of the misfit, in the unit of the log density, where the mass is."""


def typical_depth(dim: int) -> float:
    """Depth below the largest value within which a Gaussian posterior has nearly all its mass."""
    return 0.5 * dim + 3.0 * math.sqrt(0.5 * dim) + 6.0


def ceilings(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Log densities from which the depth of points is measured.

    The largest of all; but no more than the largest likelihood would give with the point's prior.
    Where a prior has a spike, as that of a centred hierarchical model has at a small scale, points
    far below it are not low for that: the spike is narrow.

    Parameters
    ----------
    values, known : array, shape (n,)
        Log densities, at least one of them finite, and the part of them that is not learnt.

    Returns
    -------
    array, shape (n,)
    """
    finite = np.isfinite(values)
    likelihood = (values[finite] - known[finite]).max()
    return np.minimum(values[finite].max(), known + likelihood)


def depths(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return how far log densities (n,) are below their `ceilings`; inf where they are not finite."""
    finite, found = np.isfinite(values), np.full(len(values), np.inf)
    found[finite] = ceilings(values, known)[finite] - values[finite]
    return found


def compressed(depth: np.ndarray, typical: float) -> np.ndarray:
    """Depths below the largest value, bent beyond that of the typical set towards twice that.

    They say "very low", as -inf and NaN do; how low changes no decision.
    """
    excess = np.maximum(depth - typical, 0.0) / typical
    return np.minimum(depth, typical) + typical * -np.expm1(-excess)


def misfits(
    values: np.ndarray, known: np.ndarray, means: np.ndarray, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the radial basis functions are to add to the prior mean, and how closely.

    The difference of the compressed value; but where that is far below the typical set, and what
    is expected further, nothing.

    Parameters
    ----------
    values, known, means : array, shape (n,)
        Log densities, at least one of them finite, the part of them that is not learnt, and the
        mean that was fitted to the rest.
    dim : int

    Returns
    -------
    residuals, noise : arrays, shape (n,)
    """
    typical, depth = typical_depth(dim), depths(values, known)
    low = compressed(depth, typical)
    differences = ceilings(values, known) - low - (known + means)
    weights = np.where(differences > 0.0, np.clip(2.0 - depth / typical, 0.0, 1.0), 1.0)
    residuals = weights * differences
    return residuals, LEAST_NOISE + RELATIVE_NOISE * np.maximum(0.0, low - 0.5 * typical)
