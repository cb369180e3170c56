"""What a Gaussian process learns from: new points, censored values, a rebuilt factor."""

import math

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.linalg import dot, solve_lower, solve_upper
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.covariances import correlation_matrix
from pymc_kameleon.surrogate.gaussian_process import (
    SMALLEST_JITTER,
    Process,
    standardised,
    whitened_covariances,
)
from pymc_kameleon.surrogate.mean import Mean, mean_value

__all__ = [
    "PREDICTED",
    "censored",
    "cholesky_with_jitter",
    "extend",
    "follow",
    "rebuild",
    "set_prior",
    "whiten_values",
]

LARGEST_JITTER = 1e-2

PREDICTED = 2.0
"""A value is predicted already if its variance is below this times the jitter, which is the
variance at a point held, to rounding."""


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
def extend(process, x, value):
    """Add a point, in O(t^2).

    Parameters
    ----------
    process : Process
    x : array, shape (d,)
    value : float
        Log-likelihood at `x`; `censored` before it enters.

    Returns
    -------
    bool
        False, and nothing has changed, if the process already predicts this value, is full, or has
        no finite value yet and gets none.
    """
    count = process.count[0]
    value = censored(process, value)
    if count == process.values.size or value == -np.inf:
        return False
    u, z, v = np.empty(x.size), np.empty(x.size), np.empty(count)
    standardised(process, x, u, z)
    variance = whitened_covariances(process, z, v)
    jitter = process.jitter[0] * variance
    conditional = variance - dot(v, v, count)
    # Not the opposite test: it must fail for NaN.
    if not conditional > PREDICTED * jitter:
        return False
    conditional += jitter
    diagonal = math.sqrt(conditional)
    residual = value - mean_value(process.mean, u) - dot(v, process.whitened, count)
    for j in range(count):
        process.factor[count, j] = v[j]
    process.factor[count, count] = diagonal
    process.whitened[count] = residual / diagonal
    solve_upper(process.factor, count, v)
    for j in range(count):
        process.weights[j] -= v[j] * residual / conditional
        process.inverse_diagonal[j] += v[j] * v[j] / conditional
    process.weights[count] = residual / conditional
    process.inverse_diagonal[count] = 1.0 / conditional
    for k in range(x.size):
        process.points[count, k] = x[k]
        process.coordinates[k, count] = z[k]
    process.values[count] = value
    process.count[0] = count + 1
    process.censoring[0] = max(process.censoring[0], value - process.censoring[1])
    return True


@jit
def whiten_values(process):
    """Compute `whitened` and `weights` from the values and the prior mean, in O(t^2)."""
    count, dim = process.count[0], process.points.shape[1]
    u = np.empty(dim)
    for j in range(count):
        for k in range(dim):
            u[k] = process.coordinates[k, j] * math.exp(process.hyperparameters[1 + k])
        process.whitened[j] = process.values[j] - mean_value(process.mean, u)
    solve_lower(process.factor, count, process.whitened)
    for j in range(count):
        process.weights[j] = process.whitened[j]
    solve_upper(process.factor, count, process.weights)


@jit
def follow(process, value):
    """Let the prior mean be `value`, in O(t^2): the paper's mean, that of the current point.

    A surrogate that depends on the state needs the reverse probability under the proposed point's
    mean, see `stages.corrected_second_stage`.
    """
    process.mean.constant[0] = value
    whiten_values(process)


def cholesky_with_jitter(matrix: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, float]:
    """Lower Cholesky factor of `matrix` + jitter `scale` on the diagonal, with the least jitter.

    Jitters from 1e-10 to 1e-2 are tried, ten times the last one each.

    Raises
    ------
    numpy.linalg.LinAlgError
        If the matrix is not positive definite with the largest jitter, or not finite.
    """
    diagonal = np.diagonal(matrix).copy()
    jitter = SMALLEST_JITTER
    while True:
        matrix[np.diag_indices_from(matrix)] = diagonal + jitter * scale
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
    hyperparameters: np.ndarray | None = None,
    mean: Mean | None = None,
    standardization: Standardization | None = None,
) -> float:
    """Replace what the process holds, in O(t^3).

    Parameters
    ----------
    process : Process
    points : array, shape (t, d)
        Raw coordinates; t is at most the capacity.
    values : array, shape (t,)
        Log-likelihoods, at least one of them finite; censored here.
    hyperparameters, mean, standardization : optional
        The process's own if not given.

    Returns
    -------
    float
        The jitter that the Cholesky factorisation needed.
    """
    count = len(values)
    best = np.max(values, initial=-np.inf, where=np.isfinite(values))
    process.censoring[0] = max(process.censoring[0], best - process.censoring[1])
    set_prior(process, hyperparameters, mean, standardization)
    process.count[0] = count
    process.points[:count] = points
    process.values[:count] = [censored(process, value) for value in values]
    lengthscales = np.exp(process.hyperparameters[1:, None])
    process.coordinates[:, :count] = process.standardization.whiten(points) / lengthscales
    matrix, slopes = np.empty((count, count)), np.empty((count, count))
    coordinates = np.ascontiguousarray(process.coordinates[:, :count])
    correlation_matrix(process.kernel, coordinates, matrix, slopes)
    lower, process.jitter[0] = cholesky_with_jitter(matrix, np.ones(count))
    amplitude = math.exp(process.hyperparameters[0])
    process.factor[:count, :count] = amplitude * lower
    inverse = linalg.lapack.dtrtri(lower, lower=1)[0]
    process.inverse_diagonal[:count] = np.sum(np.tril(inverse) ** 2, axis=0) / amplitude**2
    whiten_values(process)
    return process.jitter[0]
