"""Towards the mode of a log density without its gradient, counting evaluations."""

from collections.abc import Callable

import numpy as np
import scipy

__all__ = ["search_mode"]

ENOUGH = 0.5
"""A gain of the log density in `PATIENCE` evaluations a dimension below which the search ends."""

PATIENCE = 2


class _Found(Exception):
    """The search has come near a mode."""


def search_mode(
    log_density: Callable[[np.ndarray], float], start: np.ndarray, max_evaluations: int
) -> None:
    """Climb from `start` (d,) by a trust region without derivatives (COBYQA).

    Parameters
    ----------
    log_density : callable
        Keeps its points and values itself; -inf and NaN are allowed.
    start : array, shape (d,)
    max_evaluations : int

    References
    ----------
    T. M. Ragonneau (2022), Model-Based Derivative-Free Optimization Methods and Software, PhD
    thesis, The Hong Kong Polytechnic University.
    """
    best, lowest, since, count = -np.inf, 0.0, 0, 0

    def negative(x):
        nonlocal best, lowest, since, count
        if count >= max_evaluations or since > PATIENCE * start.size + 8:
            raise _Found
        value, count = log_density(x), count + 1
        if value > best + ENOUGH:
            best, since = value, 0
        else:
            since += 1
        if not np.isfinite(value):  # a wall as high as the landscape, which a quadratic can follow
            return -lowest
        lowest = min(lowest, value)
        return -value

    options = {"initial_tr_radius": 0.5, "final_tr_radius": 1e-6, "maxfev": max_evaluations + 1}
    try:
        scipy.optimize.minimize(negative, start, method="COBYQA", options=options)
    except _Found:
        pass
