"""A Gaussian process of the log-likelihood, noise-free, in arrays of fixed capacity.

References
----------
C. E. Rasmussen and C. K. I. Williams (2006), Gaussian Processes for Machine Learning, chapter 2.
A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
exploratory-exploitation effect.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.layout import floats, integers
from pymc_kameleon.mcmc.linalg import dot, solve_factor, solve_lower, solve_upper
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.surrogate.covariances import radial, squared_distances
from pymc_kameleon.surrogate.mean import Mean, constant_mean, mean_gradient, mean_value

__all__ = [
    "Process",
    "bounded",
    "gradient",
    "largest_value",
    "log_surrogate",
    "new_process",
    "predict",
    "standardised",
    "whitened_covariances",
]

SMALLEST_JITTER = 1e-10


class Process(NamedTuple):
    """Points with their values, and what predicts other values; arrays are changed in place.

    Attributes
    ----------
    kernel : int
        Code of the covariance, see `covariances.COVARIANCES`.
    count : int64 array, shape (1,)
        Number t of points held.
    points : array, shape (capacity, d)
        Raw coordinates.
    values : array, shape (capacity,)
        Log-likelihoods, censored.
    coordinates : array, shape (d, capacity)
        Standardised and divided by the lengthscales.
    factor : array, shape (capacity, capacity)
        Rows of L, the Cholesky factor of the covariance of the values.
    whitened : array, shape (capacity,)
        L^-1 (values - prior mean).
    weights : array, shape (capacity,)
        K^-1 (values - prior mean).
    inverse_diagonal : array, shape (capacity,)
        Diagonal of K^-1, for leave-one-out predictions.
    hyperparameters : array, shape (1 + d,)
        Log of the amplitude, which has the unit of the values, and of the lengthscales, in
        standardised coordinates.
    mean : Mean
        Prior mean.
    standardization : Standardization
        u = factor^-1 (x - location).
    jitter : array, shape (1,)
        Added to the diagonal, relative to the squared amplitude.
    censoring : array, shape (2,)
        Lowest value that enters, and the depth below the largest value that it stands for.
    """

    kernel: int
    count: Annotated[np.ndarray, integers(1)]
    points: Annotated[np.ndarray, floats("stored", "d")]
    values: Annotated[np.ndarray, floats("stored")]
    coordinates: Annotated[np.ndarray, floats("d", "stored")]
    factor: Annotated[np.ndarray, floats("stored", "stored")]
    whitened: Annotated[np.ndarray, floats("stored")]
    weights: Annotated[np.ndarray, floats("stored")]
    inverse_diagonal: Annotated[np.ndarray, floats("stored")]
    hyperparameters: Annotated[np.ndarray, floats("1 + d")]
    mean: Mean
    standardization: Standardization
    jitter: Annotated[np.ndarray, floats(1)]
    censoring: Annotated[np.ndarray, floats(2)]

    @property
    def is_consistent(self) -> bool:
        """Whether there is room for as many points as are counted."""
        return bool(0 <= self.count[0] <= len(self.values))


def new_process(kernel: int, capacity: int, dim: int, depth: float) -> Process:
    """Return a process without points, of unit amplitude and lengthscales, in raw coordinates."""
    return Process(
        kernel,
        np.zeros(1, np.int64),
        np.zeros((capacity, dim)),
        np.zeros(capacity),
        np.zeros((dim, capacity)),
        np.zeros((capacity, capacity)),
        np.zeros(capacity),
        np.zeros(capacity),
        np.zeros(capacity),
        np.zeros(1 + dim),
        constant_mean(0.0, dim),
        Standardization(np.zeros(dim), np.eye(dim)),
        np.array([SMALLEST_JITTER]),
        np.array([-np.inf, depth]),
    )


@jit
def standardised(process, x, u, z):
    """Write the standardised coordinates of `x` into `u`, and u over the lengthscales into `z`."""
    for k in range(x.size):
        u[k] = x[k] - process.standardization.location[k]
    solve_factor(process.standardization.factor, u, u)
    for k in range(x.size):
        z[k] = u[k] * math.exp(-process.hyperparameters[1 + k])


@jit(fastmath=SIMD)
def whitened_covariances(process, z, out):
    """L^-1 k(z, points) into `out` (t,); returns the squared amplitude."""
    count = process.count[0]
    variance = math.exp(2.0 * process.hyperparameters[0])
    squared_distances(z, process.coordinates, count, out)
    for j in range(count):
        out[j] = variance * radial(process.kernel, out[j])[0]
    solve_lower(process.factor, count, out)
    return variance


@jit
def largest_value(process):
    """Return the largest value held; infinity if there is none."""
    if process.count[0] == 0:
        return np.inf
    return process.values[: process.count[0]].max()


@jit
def predict(process, x):
    """Mean and variance of the log-likelihood at a point, in O(t^2).

    Both come from L^-1 k and L^-1 (values - m), which is more accurate than the textbook k^T K^-1
    (values - m) when points are close to each other.

    Parameters
    ----------
    process : Process
    x : array, shape (d,)
        Raw coordinates.

    Returns
    -------
    mean : float
    variance : float
        Without the jitter; never negative.
    """
    count = process.count[0]
    u, z, v = np.empty(x.size), np.empty(x.size), np.empty(count)
    standardised(process, x, u, z)
    variance = whitened_covariances(process, z, v)
    mean = mean_value(process.mean, u) + dot(v, process.whitened, count)
    return mean, max(0.0, variance - dot(v, v, count))


@jit
def log_surrogate(process, x):
    r"""Log of the expected likelihood :math:`\mu + \kappa/2` (Benavoli et al., eq. 3), bounded.

    It is large where the process knows nothing: such proposals are let through and learnt.
    """
    mean, variance = predict(process, x)
    return bounded(process, mean, variance)


@jit
def bounded(process, mean, variance):
    r"""Return :math:`S = \min(\mu + \kappa/2, \text{largest value held})`.

    It is a fixed function of the point, as the second stage needs. Beyond the largest value S would
    let nothing more through, and the second stage divides by what was promised: a chain would leave
    the points that it has learnt with probability :math:`e^{-\kappa/2}` only.

    Parameters
    ----------
    process : Process
    mean, variance : float
        From `predict`.
    """
    return min(mean + 0.5 * variance, largest_value(process))


@jit(fastmath=SIMD)
def gradient(process, x, of_mean, of_variance):
    """Write the gradients of mean and variance at `x`, in raw coordinates, both (d,)."""
    count, dim = process.count[0], x.size
    u, z = np.empty(dim), np.empty(dim)
    solved, slopes = np.empty(count), np.empty(count)
    standardised(process, x, u, z)
    variance = whitened_covariances(process, z, solved)
    solve_upper(process.factor, count, solved)
    squared_distances(z, process.coordinates, count, slopes)
    for j in range(count):
        slopes[j] = variance * radial(process.kernel, slopes[j])[1]
    mean_gradient(process.mean, u, of_mean)
    for k in range(dim):
        mean_total, variance_total = 0.0, 0.0
        for j in range(count):
            slope = slopes[j] * (process.coordinates[k, j] - z[k])
            mean_total += process.weights[j] * slope
            variance_total += solved[j] * slope
        inverse = math.exp(-process.hyperparameters[1 + k])
        of_mean[k] += mean_total * inverse
        of_variance[k] = -2.0 * variance_total * inverse
    solve_upper(process.standardization.factor, dim, of_mean)
    solve_upper(process.standardization.factor, dim, of_variance)
