"""Where tuning begins: where the chain was put, or at a random point around a mode nearby."""

import numpy as np

from pymc_kameleon.model.mode_search import search_mode
from pymc_kameleon.validation import checked_choice

__all__ = ["FIRST_SHARE", "STARTS", "TAUGHT", "checked_start", "point_near_mode", "search_from"]

TAUGHT = 10
"""Known evaluations near the largest, times d + 2, that make a search for the mode needless."""

STARTS = ("here", "optimize")

FIRST_SHARE = 0.5
"""Of the scale of the prior: of the first moves, before anything is known."""

WIDTHS = (1.5, 1.0, 0.5, 0.25)
"""Of the Gaussian from which a chain's start is drawn, relative to that of the mode, in the order
in which they are tried. The first is wide, so that chains begin further apart than they end."""


def checked_start(start: str, is_estimated: bool) -> str:
    """`start`, which is one of `STARTS`, and "here" where the log density is an estimate."""
    start = checked_choice("start", start, STARTS)
    if start == "optimize" and is_estimated:
        raise ValueError(
            'start="optimize" with pseudo_marginal=True or an estimated_loglikelihood: the search '
            'takes the log density for exact, and an estimate is noisy. Write start="here", and '
            "pm.sample(initvals=dispersed_starts(model, chains)) for starts that lie apart."
        )
    return start


def search_from(begin: np.ndarray, scales: np.ndarray, evaluate, gradient=None, missing=None):
    """Search for a mode from `begin` (d,) by calls of `evaluate`, which keeps what it finds.

    `scales` (d,) are the lengths of the first steps. `gradient` returns the gradient where
    `evaluate` was called last, if there is one; `missing` says how much higher than the largest
    value others have come.
    """
    search_mode(evaluate, begin.copy(), scales, 100 + 100 * begin.size, gradient, missing)


def point_near_mode(gaussian, points, log_densities, evaluate, rng) -> np.ndarray:
    """Return a random point (d,) around a mode, or the best of the points; it is evaluated last.

    Parameters
    ----------
    gaussian : Standardization
        Mean and covariance of the mode.
    points : array, shape (n, d)
        Points that were evaluated.
    log_densities : array, shape (n,)
    evaluate : callable
        Log density at a point.
    rng : numpy.random.Generator
    """
    dim = len(gaussian.location)
    lowest = log_densities.max() - 20 - 3 * dim
    for width in WIDTHS:
        point = gaussian.location + width * gaussian.factor @ rng.standard_normal(dim)
        if evaluate(point) > lowest:
            return point
    point = points[np.argmax(log_densities)]
    evaluate(point)
    return point
