"""Which points to evaluate next: those where a fitted surrogate is uncertain and not too low."""

import math

import numpy as np

from pymc_kameleon.surrogate.fit_posterior import FittedPosterior
from pymc_kameleon.surrogate.posterior_surrogate import PosteriorSurrogate, surrogate_values

N_CANDIDATES = 100
"""Points of each temperature among which points are chosen."""

WORTH, SURE = 2.5, 0.3
"""A point is worth its standard deviation times the surrogate's density at so high a temperature;
below so large a standard deviation there is nothing to learn."""


def points_to_explore(fitted: FittedPosterior, surrogate: PosteriorSurrogate, n: int) -> np.ndarray:
    """Raw points, at most `n` of the draws at all temperatures, to be evaluated after a fit."""
    drawn = np.concatenate([part[:N_CANDIDATES] for part in fitted.annealed])
    return _uncertain_points(fitted, surrogate, drawn, n)


def points_to_check(fitted: FittedPosterior, surrogate: PosteriorSurrogate, n: int) -> np.ndarray:
    """Raw points, at most `n` of the draws from the surrogate, to be evaluated after a fit."""
    return _uncertain_points(fitted, surrogate, fitted.annealed[-1], n)


def _uncertain_points(fitted, surrogate, drawn, n):
    """Raw points, at most `n` of those `drawn` (m, d), where the surrogate is uncertain.

    They are picked one by one, each as if the ones before were known; typical ones come first.
    """
    values = np.minimum(surrogate_values(surrogate, drawn), fitted.usual_height)
    points = surrogate.to_points(drawn.T)
    covariance = fitted.covariance_at(points)
    variance = np.diagonal(covariance).copy()
    chosen: list[int] = []
    for _ in range(n):
        spread = np.sqrt(np.maximum(variance, 1e-300))
        score = np.where(spread > SURE, np.log(spread) + values / WORTH, -np.inf)
        best = int(np.argmax(score))
        if score[best] == -np.inf:
            break
        chosen.append(best)
        column = covariance[:, best] / math.sqrt(covariance[best, best])
        covariance = covariance - np.outer(column, column)
        variance = np.diagonal(covariance).copy()
        variance[best] = 0.0
    return points[chosen]
