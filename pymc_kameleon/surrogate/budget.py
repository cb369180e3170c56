"""A budget of points: a new point takes the place of the least useful one."""

import math

import numpy as np

from pymc_kameleon.mcmc.linalg import delete_row, solve_lower, solve_upper
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.gaussian_process import largest_value, predict
from pymc_kameleon.surrogate.training_set import PREDICTED, censored, extend, whiten_values

__all__ = ["add_training_point", "least_useful", "remove", "same_point", "use"]


@jit
def use(residual, variance, depth):
    """How wrong mu + kappa / 2 is without a point, relative to the point's depth.

    An error of 5 at a value 60 below the largest changes no decision.
    """
    return (abs(residual) + 0.5 * variance) / (1.0 + depth)


@jit
def same_point(process, index, x):
    """Whether the point `index` is `x` (d,), to the last bit."""
    for k in range(x.size):
        if process.points[index, k] != x[k]:
            return False
    return True


@jit
def least_useful(process, current):
    """Find the point that the others predict best, other than `current` (d,), in O(t).

    Returns
    -------
    index : int
        -1 if there is no other point.
    use : float
        Its leave-one-out error, |residual| + variance / 2, over 1 + its depth below the largest
        value held (Rasmussen & Williams, section 5.4.2).
    """
    count = process.count[0]
    best = largest_value(process)
    index, smallest = -1, np.inf
    for i in range(count):
        # The diagonal is updated by subtraction as points go, and could lose its sign.
        variance = 1.0 / max(process.inverse_diagonal[i], 1e-300)
        found = use(process.weights[i] * variance, variance, best - process.values[i])
        if found < smallest and not same_point(process, i, current):
            index, smallest = i, found
    return index, smallest


@jit
def remove(process, index):
    """Take out a point, in O(t^2)."""
    count = process.count[0]
    column = np.zeros(count)
    column[index] = 1.0
    solve_lower(process.factor, count, column)
    solve_upper(process.factor, count, column)
    delete_row(process.factor, count, index)
    for i in range(count):
        process.inverse_diagonal[i] -= column[i] * column[i] / column[index]
    for i in range(index, count - 1):
        process.inverse_diagonal[i] = process.inverse_diagonal[i + 1]
        process.values[i] = process.values[i + 1]
        for k in range(process.points.shape[1]):
            process.points[i, k] = process.points[i + 1, k]
            process.coordinates[k, i] = process.coordinates[k, i + 1]
    process.count[0] = count - 1
    whiten_values(process)


@jit
def add_training_point(process, x, value, current):
    """Add a point; if there is no room, in the place of the least useful one.

    The current point of the chain is never taken out, and nothing changes if the new point would
    itself be the least useful. O(t^2) either way; a replacement costs about thirty predictions.

    Parameters
    ----------
    process : Process
    x : array, shape (d,)
        New point.
    value : float
        Log-likelihood at `x`.
    current : array, shape (d,)
        Current point of the chain.

    Returns
    -------
    bool
        Whether the process has changed.
    """
    count = process.count[0]
    if count < process.values.size:
        return extend(process, x, value)
    mean, variance = predict(process, x)
    if not variance > PREDICTED * process.jitter[0] * math.exp(2.0 * process.hyperparameters[0]):
        return False
    value = censored(process, value)
    best = max(value, largest_value(process))
    index, smallest = least_useful(process, current)
    if index < 0 or smallest >= use(value - mean, variance, best - value):
        return False
    remove(process, index)
    return extend(process, x, value)
