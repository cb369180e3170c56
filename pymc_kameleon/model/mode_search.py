"""Towards the mode of a log density, counting evaluations."""

from collections.abc import Callable

import numpy as np
import scipy

__all__ = ["search_mode"]

ENOUGH = 0.5
"""A gain of the log density; the search ends after `PATIENCE` evaluations without one."""

PATIENCE, MORE_PATIENCE = 8, 2
"""The second for each dimension, where there are no gradients."""


ASKED = 5
"""Evaluations after which it is asked again whether the search may end."""


class _Found(Exception):
    """The search has come near a mode."""


def search_mode(
    log_density: Callable[[np.ndarray], float],
    start: np.ndarray,
    max_evaluations: int,
    gradient: Callable[[], np.ndarray] | None = None,
    is_enough: Callable[[float], bool] | None = None,
) -> None:
    """Climb from `start` (d,) by a trust region without derivatives (COBYQA), or by L-BFGS-B.

    Parameters
    ----------
    log_density : callable
        Keeps its points and values itself; -inf and NaN are allowed.
    start : array, shape (d,)
    max_evaluations : int
    gradient : callable, optional
        Returns the gradient (d,) at the point that was evaluated last.
    is_enough : callable, optional
        Says of the largest value found so far whether the search may end; asked after every
        `ASKED` evaluations.

    References
    ----------
    T. M. Ragonneau (2022), Model-Based Derivative-Free Optimization Methods and Software, PhD
    thesis, The Hong Kong Polytechnic University.
    """
    best, lowest, since, count = -np.inf, 0.0, 0, 0
    patience = PATIENCE + (MORE_PATIENCE * start.size if gradient is None else 0)

    def negative(x):
        nonlocal best, lowest, since, count
        if count >= max_evaluations or since > patience:
            raise _Found
        if is_enough is not None and count and count % ASKED == 0 and is_enough(best):
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

    def negative_with_gradient(x):
        value, slope = negative(x), -gradient()
        return value, np.where(np.isfinite(slope), slope, 0.0)

    options = {"initial_tr_radius": 0.5, "final_tr_radius": 1e-6, "maxfev": max_evaluations + 1}
    try:
        if gradient is None:
            scipy.optimize.minimize(negative, start, method="COBYQA", options=options)
        else:
            scipy.optimize.minimize(negative_with_gradient, start, jac=True, method="L-BFGS-B")
    except _Found:
        pass
