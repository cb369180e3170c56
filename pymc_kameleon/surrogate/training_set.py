"""What a Gaussian process learns from: new points, censored values, a rebuilt factor."""

import math

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.linalg import (
    cholesky_in_place,
    delete_row,
    dot,
    solve_lower,
    solve_lower_rows,
    solve_upper,
    solve_upper_rows,
)
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.covariances import correlation_matrix, radial
from pymc_kameleon.surrogate.gaussian_process import (
    SMALLEST_JITTER,
    Process,
    block_size,
    gradient_to_z,
    posterior,
    prior_slopes,
    standardised,
)
from pymc_kameleon.surrogate.mean import Mean, mean_value

__all__ = [
    "PREDICTED",
    "censored",
    "entering",
    "extend",
    "follow",
    "rebuild",
    "remove",
    "set_prior",
]

LARGEST_JITTER = 1e-2

PREDICTED = 2.0
"""A value is predicted already if its variance is below this times the jitter, which is the
variance at a point stored, to rounding."""


@jit
def censored(process, value):
    """`value`, or the lowest value that enters if it is below that, infinite or NaN.

    A log-likelihood falls off cliffs, to -inf at times, and a smooth process that interpolates
    them rings for many lengthscales around. Its exact depth is of no use: a proposal that the
    surrogate puts 10 d + 50 below the largest value is refused, since where the posterior has its
    mass values lie about d/2 below it, and 2 d + 14 already has probability below 1e-6.
    """
    if value > process.censoring[0] and value < np.inf:
        return value
    return process.censoring[0]


@jit
def entering(process, value, gradient):
    """`censored` value of a point as it enters; -inf if it does not.

    A censored point that comes with a gradient enters not at all: its gradient is that of the
    cliff, not of the plateau that would stand for it.
    """
    value = censored(process, value)
    if block_size(process) > 1:
        if not value > process.censoring[0]:
            return -np.inf
        for k in range(gradient.size):
            if not math.isfinite(gradient[k]):
                return -np.inf
    return value


@jit(allocates=True)
def extend(process, x, value, gradient):
    """Add a point, in O(rows^2) for each of its rows.

    Parameters
    ----------
    process : Process
    x : array, shape (d,)
    value : float
        Log-likelihood at `x`; `censored` before it enters.
    gradient : array, shape (d,), or (0,) for a process of values
        Its gradient.

    Returns
    -------
    bool
        False, and nothing has changed, if the process already predicts this value, is full, or
        `entering` lets the point not in.
    """
    dim, count, size = x.size, process.count[0], block_size(process)
    rows = count * size
    value = entering(process, value, gradient)
    if count == process.values.size or value == -np.inf:
        return False
    u, z, target = np.empty(dim), np.empty(dim), np.empty(size)
    v, root = np.empty((size, rows)), np.empty((size, size))
    standardised(process, x, u, z)
    variance = posterior(process, z, v, root)
    jitter, slope = process.jitter[0] * variance, radial(process.kernel, 0.0)[1]
    # Not the opposite test: it must fail for NaN.
    if not root[0, 0] > PREDICTED * jitter:
        return False
    for i in range(size):
        root[i, i] += jitter * (1.0 if i == 0 else slope)
    if not cholesky_in_place(root):
        return False
    target[0] = value - mean_value(process.mean, u)
    if size > 1:
        _gradient_residual(process, u, gradient, target[1:])
    for i in range(size):
        target[i] -= dot(v[i], process.whitened, rows)
    solve_lower(root, size, target)
    for i in range(size):
        for j in range(rows):
            process.factor[rows + i, j] = v[i, j]
        for j in range(i + 1):
            process.factor[rows + i, rows + j] = root[i, j]
        process.whitened[rows + i] = target[i]
        process.weights[rows + i] = target[i]
    solve_upper(root, size, process.weights[rows : rows + size])
    solve_upper_rows(process.factor, rows, v)
    _divide(root, v)
    for i in range(size):
        for j in range(rows):
            process.weights[j] -= v[i, j] * target[i]
    _add_gram_blocks(v, 1.0, process.inverse_blocks)
    _inverse(root, process.inverse_blocks[rows : rows + size])
    for k in range(dim):
        process.points[count, k] = x[k]
        process.coordinates[k, count] = z[k]
    for k in range(size - 1):
        process.gradients[count, k] = gradient[k]
    process.values[count] = value
    process.count[0] = count + 1
    process.censoring[0] = max(process.censoring[0], value - process.censoring[1])
    return True


@jit(allocates=True)
def remove(process, index):
    """Take out a point, in O(rows^2) for each of its rows.

    Returns
    -------
    bool
        False, and nothing has changed, if its block of K^-1 is not positive definite to rounding.
    """
    count, size = process.count[0], block_size(process)
    rows, first = count * size, index * size
    columns, root = np.zeros((size, rows)), np.empty((size, size))
    for i in range(size):
        columns[i, first + i] = 1.0
    solve_lower_rows(process.factor, rows, columns)
    for i in range(size):
        for j in range(i + 1):
            root[i, j] = dot(columns[i], columns[j], rows)
    if not cholesky_in_place(root):
        return False
    solve_upper_rows(process.factor, rows, columns)
    _divide(root, columns)
    _add_gram_blocks(columns, -1.0, process.inverse_blocks)
    for i in range(size):
        delete_row(process.factor, rows - i, first)
    for i in range(index, count - 1):
        process.values[i] = process.values[i + 1]
        for k in range(process.points.shape[1]):
            process.points[i, k] = process.points[i + 1, k]
            process.coordinates[k, i] = process.coordinates[k, i + 1]
        for k in range(size - 1):
            process.gradients[i, k] = process.gradients[i + 1, k]
    for i in range(first, rows - size):
        for j in range(size):
            process.inverse_blocks[i, j] = process.inverse_blocks[i + size, j]
    process.count[0] = count - 1
    whiten_rows(process)
    return True


@jit
def _divide(root, v):
    """Overwrite `v` (size, rows) with R^-1 v for a lower-triangular R (size, size)."""
    size, rows = v.shape
    for i in range(size):
        for k in range(i):
            for j in range(rows):
                v[i, j] -= root[i, k] * v[k, j]
        scale = 1.0 / root[i, i]
        for j in range(rows):
            v[i, j] *= scale


@jit
def _inverse(root, out):
    """Write the inverse of R R^T for a lower-triangular R into `out` (size, size)."""
    size = root.shape[0]
    for i in range(size):
        for j in range(size):
            out[i, j] = 1.0 if i == j else 0.0
        solve_lower(root, size, out[i])
        solve_upper(root, size, out[i])


@jit
def _add_gram_blocks(v, sign, blocks):
    """Add `sign` times the diagonal blocks of v^T v to `blocks` (rows, size); `v` is (n, rows)."""
    rows, size = v.shape[1], blocks.shape[1]
    for i in range(v.shape[0]):
        if size == 1:
            for j in range(rows):
                blocks[j, 0] += sign * v[i, j] * v[i, j]
            continue
        for first in range(0, rows, size):
            for j in range(first, first + size):
                for k in range(size):
                    blocks[j, k] += sign * v[i, j] * v[i, first + k]


@jit(allocates=True)
def whiten_rows(process):
    """Compute `whitened` and `weights` from values, gradients and prior mean, in O(rows^2)."""
    count, dim, size = process.count[0], process.points.shape[1], block_size(process)
    rows = count * size
    u = np.empty(dim)
    for j in range(count):
        for k in range(dim):
            u[k] = process.coordinates[k, j] * math.exp(process.hyperparameters[1 + k])
        first = j * size
        process.whitened[first] = process.values[j] - mean_value(process.mean, u)
        if size > 1:
            slopes = process.whitened[first + 1 : first + size]
            _gradient_residual(process, u, process.gradients[j], slopes)
    solve_lower(process.factor, rows, process.whitened)
    for j in range(rows):
        process.weights[j] = process.whitened[j]
    solve_upper(process.factor, rows, process.weights)


@jit(allocates=True)
def _gradient_residual(process, u, gradient, out):
    """Gradient in z minus that of the prior mean at `u`, into `out` (d,)."""
    slopes = np.empty(u.size)
    prior_slopes(process, u, slopes)
    gradient_to_z(process, gradient, out)
    for k in range(u.size):
        out[k] -= slopes[k]


@jit
def follow(process, value):
    """Let the prior mean be `value`, in O(t^2): the paper's mean, that of the current point.

    A surrogate that depends on the state needs the reverse probability under the proposed point's
    mean, see `stages.corrected_second_stage`.
    """
    process.mean.constant[0] = value
    whiten_rows(process)


def _cholesky_with_jitter(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """Lower Cholesky factor of `matrix` with its diagonal times 1 + jitter, and the jitter.

    The least of 1e-10, 1e-9, ..., 1e-2 that works; only the lower triangle is read.

    Raises
    ------
    numpy.linalg.LinAlgError
        If the matrix is not positive definite with the largest jitter, or not finite.
    """
    diagonal = np.diagonal(matrix).copy()
    jitter = SMALLEST_JITTER
    while True:
        matrix[np.diag_indices_from(matrix)] = diagonal * (1.0 + jitter)
        try:
            return linalg.cholesky(matrix, lower=True, check_finite=False), jitter
        except linalg.LinAlgError:
            jitter *= 10
            if jitter > LARGEST_JITTER * 1.001:
                raise


def set_prior(process, hyperparameters=None, mean=None, standardization=None):
    """Copy what is given into the process."""
    if hyperparameters is not None:
        process.hyperparameters[:] = hyperparameters
    if mean is not None:
        for own, given in zip(process.mean, mean, strict=True):
            own[:] = given
    if standardization is not None:
        process.standardization.location[:] = standardization.location
        process.standardization.factor[:] = standardization.factor


def rebuild(
    process: Process,
    points: np.ndarray,
    values: np.ndarray,
    gradients: np.ndarray | None = None,
    *,
    hyperparameters: np.ndarray | None = None,
    mean: Mean | None = None,
    standardization: Standardization | None = None,
) -> float:
    """Replace what the process holds, in O(rows^3).

    Parameters
    ----------
    process : Process
    points : array, shape (t, d)
        Raw coordinates; t is at most the capacity.
    values : array, shape (t,)
        Log-likelihoods, at least one of them finite; censored here.
    gradients : array, shape (t, d), or (t, 0) or None for a process of values
        Finite gradients, of points that are not censored.
    hyperparameters, mean, standardization : optional
        The process's own if not given.

    Returns
    -------
    float
        The jitter that the Cholesky factorisation needed.
    """
    count, size = len(values), block_size(process)
    rows = count * size
    best = np.max(values, initial=-np.inf, where=np.isfinite(values))
    process.censoring[0] = max(process.censoring[0], best - process.censoring[1])
    set_prior(process, hyperparameters, mean, standardization)
    process.count[0] = count
    process.points[:count] = points
    process.values[:count] = [censored(process, value) for value in values]
    if gradients is not None:
        process.gradients[:count] = gradients
    lengthscales = np.exp(process.hyperparameters[1:, None])
    process.coordinates[:, :count] = process.standardization.whiten(points) / lengthscales
    matrix = np.zeros((rows, rows))
    coordinates = np.ascontiguousarray(process.coordinates[:, :count])
    correlation_matrix(process.kernel, coordinates, size, matrix)
    lower, process.jitter[0] = _cholesky_with_jitter(matrix)
    amplitude = math.exp(process.hyperparameters[0])
    process.factor[:rows, :rows] = amplitude * lower
    inverse = np.ascontiguousarray(linalg.lapack.dtrtri(lower, lower=1)[0])
    process.inverse_blocks[:rows] = 0.0
    _add_gram_blocks(inverse, amplitude**-2, process.inverse_blocks)
    whiten_rows(process)
    return process.jitter[0]
