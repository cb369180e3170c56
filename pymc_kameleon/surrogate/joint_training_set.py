"""What a joint process of value and gradient learns from: points, a budget, a rebuilt factor."""

import math

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.linalg import (
    cholesky_in_place,
    copy_into,
    delete_row,
    dot,
    solve_factor,
    solve_lower,
    solve_upper,
)
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.budget import same_point, use
from pymc_kameleon.surrogate.covariances import radial
from pymc_kameleon.surrogate.gaussian_process import largest_value, standardised
from pymc_kameleon.surrogate.joint_process import (
    JointProcess,
    gradient_to_z,
    joint_correlation_matrix,
    joint_posterior,
    predict_joint,
    prior_rows,
)
from pymc_kameleon.surrogate.mean import Mean
from pymc_kameleon.surrogate.training_set import PREDICTED, cholesky_with_jitter, set_prior

__all__ = [
    "add_joint_training_point",
    "extend_joint",
    "least_useful_joint",
    "rebuild_joint",
    "remove_joint",
]


@jit
def _enters(process, value, gradient):
    """Whether a point is neither censored nor has a gradient that is not finite."""
    for k in range(gradient.size):
        if not math.isfinite(gradient[k]):
            return False
    return value > process.censoring[0] and value < np.inf


@jit
def extend_joint(process, x, value, gradient):
    """Add a point with its gradient, in O(rows^2 (1 + d)).

    Returns
    -------
    bool
        False, and nothing has changed, if the process is full, already predicts the value, or the
        value is censored or the gradient not finite.
    """
    dim, count = x.size, process.count[0]
    size, rows = dim + 1, count * (dim + 1)
    if count == process.values.size or not _enters(process, value, gradient):
        return False
    u, z, prior, target = np.empty(dim), np.empty(dim), np.empty(size), np.empty(size)
    v, covariance, root = np.empty((size, rows)), np.empty((size, size)), np.empty((size, size))
    standardised(process, x, u, z)
    variance = joint_posterior(process, z, v, covariance)
    jitter, slope = process.jitter[0] * variance, radial(process.kernel, 0.0)[1]
    if not covariance[0, 0] > PREDICTED * jitter:
        return False
    for i in range(size):
        for j in range(i + 1):
            total = covariance[i, j] - dot(root[i], root[j], j)
            if i > j:
                root[i, j] = total / root[j, j]
            else:
                total += jitter * (1.0 if i == 0 else slope)
                if not total > 0.0:
                    return False
                root[i, i] = math.sqrt(total)
    prior_rows(process, u, prior)
    target[0] = value
    gradient_to_z(process, gradient, target[1:])
    for i in range(size):
        target[i] -= prior[i] + dot(v[i], process.whitened, rows)
    solve_lower(root, size, target)
    for i in range(size):
        for j in range(rows):
            process.factor[rows + i, j] = v[i, j]
        for j in range(i + 1):
            process.factor[rows + i, rows + j] = root[i, j]
        process.whitened[rows + i] = target[i]
    for k in range(dim):
        process.points[count, k] = x[k]
        process.gradients[count, k] = gradient[k]
        process.coordinates[k, count] = z[k]
    process.values[count] = value
    process.count[0] = count + 1
    process.censoring[0] = max(process.censoring[0], value - process.censoring[1])
    return True


@jit
def _whiten(process):
    dim = process.points.shape[1]
    size = dim + 1
    u, prior = np.empty(dim), np.empty(size)
    for j in range(process.count[0]):
        for k in range(dim):
            u[k] = process.coordinates[k, j] * math.exp(process.hyperparameters[1 + k])
        prior_rows(process, u, prior)
        rows = process.whitened[j * size : (j + 1) * size]
        gradient_to_z(process, process.gradients[j], rows[1:])
        rows[0] = process.values[j]
        for i in range(size):
            rows[i] -= prior[i]
    solve_lower(process.factor, process.count[0] * size, process.whitened)


def rebuild_joint(
    process: JointProcess,
    points: np.ndarray,
    values: np.ndarray,
    gradients: np.ndarray,
    hyperparameters: np.ndarray | None = None,
    mean: Mean | None = None,
    standardization: Standardization | None = None,
) -> float:
    """Replace what the process holds, in O(rows^3).

    Parameters
    ----------
    process : JointProcess
    points, gradients : array, shape (t, d)
        Raw coordinates; t is at most the capacity.
    values : array, shape (t,)
        Finite log-likelihoods.
    hyperparameters, mean, standardization : optional
        The process's own if not given.

    Returns
    -------
    float
        The jitter that the Cholesky factorisation needed.
    """
    count, dim = points.shape
    process.censoring[0] = max(process.censoring[0], values.max() - process.censoring[1])
    set_prior(process, hyperparameters, mean, standardization)
    process.count[0] = count
    process.points[:count], process.values[:count] = points, values
    process.gradients[:count] = gradients
    lengthscales = np.exp(process.hyperparameters[1:, None])
    process.coordinates[:, :count] = process.standardization.whiten(points) / lengthscales
    matrix = np.empty((count * (dim + 1), count * (dim + 1)))
    coordinates = np.ascontiguousarray(process.coordinates[:, :count])
    joint_correlation_matrix(process.kernel, coordinates, matrix)
    scale = np.tile([1.0, *[radial(process.kernel, 0.0)[1]] * dim], count)
    lower, process.jitter[0] = cholesky_with_jitter(matrix, scale)
    process.factor[: len(lower), : len(lower)] = math.exp(process.hyperparameters[0]) * lower
    _whiten(process)
    return process.jitter[0]


@jit
def least_useful_joint(process, current):
    """Find the point whose value the others predict best, other than `current`, in O(rows^3).

    Returns
    -------
    index : int
        -1 if there is no other point.
    use : float
        As in `budget.least_useful`, leaving out value and gradient of a point together.
    """
    count, dim = process.count[0], process.points.shape[1]
    size, rows = dim + 1, count * (dim + 1)
    weights = np.empty(rows)
    copy_into(process.whitened, weights)
    solve_upper(process.factor, rows, weights)
    columns, gram = np.empty((size, rows)), np.empty((size, size))
    unit, block = np.empty(size), np.empty(size)
    best = largest_value(process)
    index, smallest = -1, np.inf
    for i in range(count):
        if same_point(process, i, current):
            continue
        # The block of K^-1 at a point is the inverse of its covariance given the others.
        for k in range(size):
            for j in range(rows):
                columns[k, j] = 0.0
            columns[k, i * size + k] = 1.0
            solve_lower(process.factor, rows, columns[k])
            for j in range(k + 1):
                gram[k, j] = dot(columns[k], columns[j], rows)
        if not cholesky_in_place(gram):
            continue
        for k in range(size):
            unit[k] = 1.0 if k == 0 else 0.0
        solve_factor(gram, unit, unit)
        solve_factor(gram, weights[i * size : (i + 1) * size], block)
        found = use(dot(unit, block, size), dot(unit, unit, size), best - process.values[i])
        if found < smallest:
            index, smallest = i, found
    return index, smallest


@jit
def remove_joint(process, index):
    """Take out a point, in O(rows^2 (1 + d))."""
    count, dim = process.count[0], process.points.shape[1]
    for i in range(dim + 1):
        delete_row(process.factor, count * (dim + 1) - i, index * (dim + 1))
    for i in range(index, count - 1):
        process.values[i] = process.values[i + 1]
        for k in range(dim):
            process.points[i, k] = process.points[i + 1, k]
            process.gradients[i, k] = process.gradients[i + 1, k]
            process.coordinates[k, i] = process.coordinates[k, i + 1]
    process.count[0] = count - 1
    _whiten(process)


@jit
def add_joint_training_point(process, x, value, gradient, current):
    """Add a point; if there is no room, in the place of the least useful one.

    As `budget.learn`, but finding the least useful point costs O(rows^3): some milliseconds with
    300 rows.

    Returns
    -------
    bool
        Whether the process has changed.
    """
    count, dim = process.count[0], x.size
    if count < process.values.size:
        return extend_joint(process, x, value, gradient)
    if not _enters(process, value, gradient):
        return False
    vector, matrix = np.empty(dim), np.empty((dim, dim))
    mean, variance = predict_joint(process, x, vector, vector, matrix)
    if not variance > PREDICTED * process.jitter[0] * math.exp(2.0 * process.hyperparameters[0]):
        return False
    best = max(value, largest_value(process))
    index, smallest = least_useful_joint(process, current)
    if index < 0 or smallest >= use(value - mean, variance, best - value):
        return False
    remove_joint(process, index)
    return extend_joint(process, x, value, gradient)
