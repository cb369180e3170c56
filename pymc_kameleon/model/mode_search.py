"""Towards the mode of a log density, counting evaluations."""

from collections.abc import Callable

import numpy as np
import scipy

ENOUGH = 0.5
"""A gain of the log density; the search ends after `PATIENCE` evaluations without one."""

PATIENCE, MORE_PATIENCE = 8, 2
"""The second for each dimension, where there are no gradients."""

LONG, MORE_LONG = 100, 20
"""Evaluations, the second for each dimension, after which only gains of the size of the dimension
count: where the density is still far too low, not on the way up a spike."""

ASKED = 5
"""Evaluations after which it is asked again how much higher others have come."""

HOPEFUL = 0.1
"""Share of that height which a search has to gain while `PATIENCE` lasts."""


class _Found(Exception):
    pass


def search_mode(
    log_density: Callable[[np.ndarray], float],
    start: np.ndarray,
    scales: np.ndarray,
    max_evaluations: int,
    gradient: Callable[[], np.ndarray] | None = None,
    missing: Callable[[float], float] | None = None,
) -> None:
    """Climb from `start` (d,) by a trust region without derivatives (COBYQA), or by L-BFGS-B.

    `log_density` keeps its points and values itself; -inf and NaN are allowed. `scales` (d,) are
    the lengths of the first steps, and `gradient` returns the gradient (d,) where it was evaluated
    last. `missing` takes the largest value found so far, and returns by how much others have come
    higher, NaN if nothing is known of others: the search ends where that is not positive, and where
    it goes up too slowly to come as high.

    References
    ----------
    T. M. Ragonneau (2022), Model-Based Derivative-Free Optimization Methods and Software, PhD
    thesis, The Hong Kong Polytechnic University.
    """
    best, lowest, since, count, enough = -np.inf, 0.0, 0, 0, ENOUGH
    patience = PATIENCE + (MORE_PATIENCE * start.size if gradient is None else 0)

    def negative(steps):
        nonlocal best, lowest, since, count, enough
        if count >= max_evaluations or since > patience:
            raise _Found
        if missing is not None and count and count % ASKED == 0:
            height = missing(best)
            if height <= 0.0:
                raise _Found
            enough = np.fmax(ENOUGH, HOPEFUL * height)
        if count > LONG + MORE_LONG * start.size:
            enough = max(enough, start.size)
        value, count = log_density(start + scales * steps), count + 1
        if value > best + enough:
            best, since = value, 0
        else:
            since += 1
        if not np.isfinite(value):  # a wall as high as the landscape, which a quadratic can follow
            return -lowest
        lowest = min(lowest, value)
        return -value

    def negative_with_gradient(steps):
        value, slope = negative(steps), -scales * gradient()
        return value, np.where(np.isfinite(slope), slope, 0.0)

    nothing = np.zeros(start.size)
    options = {"initial_tr_radius": 1.0, "final_tr_radius": 1e-6, "maxfev": max_evaluations + 1}
    try:
        if gradient is None:
            scipy.optimize.minimize(negative, nothing, method="COBYQA", options=options)
        else:
            scipy.optimize.minimize(negative_with_gradient, nothing, jac=True, method="L-BFGS-B")
    except _Found:
        pass
