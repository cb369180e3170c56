"""A budget of points: a new point takes the place of the least useful one."""

import math

import numpy as np

from pymc_kameleon.mcmc.linalg import cholesky_in_place, dot, solve_lower, solve_upper
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.gaussian_process import block_size, largest_value, predict
from pymc_kameleon.surrogate.training_set import PREDICTED, entering, extend, remove

__all__ = ["add_training_point", "least_useful", "leave_one_out_error"]


@jit
def leave_one_out_error(residual, variance, depth):
    """How wrong mu + kappa / 2 is without a point, relative to the point's depth.

    An error of 5 at a value 60 below the largest changes no decision.
    """
    return (abs(residual) + 0.5 * variance) / (1.0 + depth)


@jit
def _is_at(process, index, x):
    """Whether the point `index` is `x` (d,), to the last bit."""
    for k in range(x.size):
        if process.points[index, k] != x[k]:
            return False
    return True


@jit
def _left_out(inverse, weights, root, unit):
    """Residual and variance of the value of a point given the others; infinite if not known.

    The point's block of K^-1 is the inverse of its covariance given the others. Blocks are updated
    by subtraction as points go, and one could cease to be positive definite.

    Parameters
    ----------
    inverse : array, shape (size, size)
        The point's block of K^-1.
    weights : array, shape (size,)
        The point's part of K^-1 (values and gradients - prior mean).
    root : array, shape (size, size)
    unit : array, shape (size,)
        Both overwritten.
    """
    size = unit.size
    for k in range(size):
        unit[k] = 1.0 if k == 0 else 0.0
        for j in range(size):
            root[k, j] = inverse[k, j]
    if not cholesky_in_place(root):
        return np.inf, np.inf
    solve_lower(root, size, unit)
    solve_upper(root, size, unit)
    return dot(unit, weights, size), unit[0]


@jit(allocates=True)
def least_useful(process, current):
    """Find the point whose value the others predict best, other than `current` (d,), in O(rows).

    A point is left out with its gradient, if it has one.

    Returns
    -------
    index : int
        -1 if there is no other point.
    error : float
        Its leave-one-out error, |residual| + variance / 2, over 1 + its depth below the largest
        value stored (Rasmussen & Williams, section 5.4.2).
    """
    size = block_size(process)
    root, unit = np.empty((size, size)), np.empty(size)
    # What is called for each point is not given the process: to pass it takes 0.1 microseconds.
    best = largest_value(process)
    index, smallest = -1, np.inf
    for i in range(process.count[0]):
        if size == 1:
            variance = 1.0 / max(process.inverse_blocks[i, 0], 1e-300)
            residual = process.weights[i] * variance
        else:
            rows = slice(i * size, (i + 1) * size)
            inverse, weights = process.inverse_blocks[rows], process.weights[rows]
            residual, variance = _left_out(inverse, weights, root, unit)
        error = leave_one_out_error(residual, variance, best - process.values[i])
        if error < smallest and not _is_at(process, i, current):
            index, smallest = i, error
    return index, smallest


@jit
def add_training_point(process, x, value, gradient, current):
    """Add a point; if there is no room, in the place of the least useful one.

    The current point of the chain is never taken out, and nothing changes if the new point would
    itself be the least useful. O(rows^2) for each row of the point either way; without gradients a
    replacement costs about thirty predictions.

    Parameters
    ----------
    process : Process
    x : array, shape (d,)
        New point.
    value : float
        Log-likelihood at `x`.
    gradient : array, shape (d,), or (0,) for a process of values
        Its gradient.
    current : array, shape (d,)
        Current point of the chain.

    Returns
    -------
    bool
        Whether the process has changed.
    """
    if process.count[0] < process.values.size:
        return extend(process, x, value, gradient)
    value = entering(process, value, gradient)
    mean, variance = predict(process, x)
    is_known = not variance > PREDICTED * process.jitter[0] * math.exp(
        2.0 * process.hyperparameters[0]
    )
    if value == -np.inf or is_known:
        return False
    best = max(value, largest_value(process))
    index, smallest = least_useful(process, current)
    if index < 0 or smallest >= leave_one_out_error(value - mean, variance, best - value):
        return False
    return remove(process, index) and extend(process, x, value, gradient)
