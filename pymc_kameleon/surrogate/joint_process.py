r"""A joint Gaussian process of the log-likelihood and its gradient, noise-free.

Covariances of gradients are derivatives of that of the values (Solak et al. 2002). In coordinates z
divided by the lengthscales, with :math:`\Delta = z - z'`, :math:`\sigma_1 = -2\varphi'` and
:math:`\sigma_2 = 4\varphi''`, over the squared amplitude:

.. math:: \mathrm{Cov}(f, f') = \varphi,\quad \mathrm{Cov}(f, g') = \sigma_1 \Delta,\quad
          \mathrm{Cov}(g, g') = \sigma_1 I - \sigma_2 \Delta \Delta^\top.

Each point has 1 + d rows: its value, then its gradient in z.

References
----------
E. Solak, R. Murray-Smith, W. E. Leithead, D. J. Leith and C. E. Rasmussen (2002), Derivative
observations in Gaussian process models of dynamic systems, NeurIPS 15.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.layout import floats, integers
from pymc_kameleon.mcmc.linalg import dot, solve_lower, solve_upper
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.surrogate.covariances import radial
from pymc_kameleon.surrogate.gaussian_process import SMALLEST_JITTER, standardised
from pymc_kameleon.surrogate.mean import Mean, constant_mean, mean_gradient, mean_value

__all__ = [
    "JointProcess",
    "gradient_from_z",
    "gradient_to_z",
    "joint_correlation_matrix",
    "joint_correlations",
    "joint_posterior",
    "new_joint_process",
    "predict_joint",
    "prior_rows",
]


class JointProcess(NamedTuple):
    """Points with values and gradients, and what predicts others; arrays are changed in place.

    Attributes
    ----------
    kernel, count, points, values, coordinates, hyperparameters, mean, standardization, jitter
        As in `gaussian_process.Process`.
    gradients : array, shape (capacity, d)
        In raw coordinates.
    factor : array, shape (rows, rows)
        Rows of L, with rows = capacity (1 + d).
    whitened : array, shape (rows,)
        L^-1 (values and gradients - prior mean).
    censoring : array, shape (2,)
        Lowest value that enters, and its depth below the largest. A point below it enters not at
        all: its gradient is that of the cliff, not of the plateau that would stand for it.
    """

    kernel: int
    count: Annotated[np.ndarray, integers(1)]
    points: Annotated[np.ndarray, floats("stored", "d")]
    values: Annotated[np.ndarray, floats("stored")]
    gradients: Annotated[np.ndarray, floats("stored", "d")]
    coordinates: Annotated[np.ndarray, floats("d", "stored")]
    factor: Annotated[np.ndarray, floats("rows", "rows")]
    whitened: Annotated[np.ndarray, floats("rows")]
    hyperparameters: Annotated[np.ndarray, floats("1 + d")]
    mean: Mean
    standardization: Standardization
    jitter: Annotated[np.ndarray, floats(1)]
    censoring: Annotated[np.ndarray, floats(2)]

    @property
    def is_consistent(self) -> bool:
        """Whether there is room for as many points as are counted."""
        return bool(0 <= self.count[0] <= len(self.values))


def new_joint_process(kernel: int, capacity: int, dim: int, depth: float) -> JointProcess:
    """Return a process without points, of unit amplitude and lengthscales, in raw coordinates."""
    rows = capacity * (1 + dim)
    return JointProcess(
        kernel,
        np.zeros(1, np.int64),
        np.zeros((capacity, dim)),
        np.zeros(capacity),
        np.zeros((capacity, dim)),
        np.zeros((dim, capacity)),
        np.zeros((rows, rows)),
        np.zeros(rows),
        np.zeros(1 + dim),
        constant_mean(0.0, dim),
        Standardization(np.zeros(dim), np.eye(dim)),
        np.array([SMALLEST_JITTER]),
        np.array([-np.inf, depth]),
    )


@jit(fastmath=SIMD)
def joint_correlations(kernel, z, coordinates, count, out):
    """Correlations of value and gradient at `z` with the rows of `count` points.

    Parameters
    ----------
    kernel : int
    z : array, shape (d,)
    coordinates : array, shape (d, capacity)
    count : int
    out : array, shape (1 + d, rows)
        Written.
    """
    dim = z.size
    difference = np.empty(dim)
    for j in range(count):
        squared = 0.0
        for k in range(dim):
            difference[k] = z[k] - coordinates[k, j]
            squared += difference[k] * difference[k]
        value, slope, curvature, _ = radial(kernel, squared)
        row = j * (dim + 1)
        out[0, row] = value
        for k in range(dim):
            out[0, row + 1 + k] = slope * difference[k]
            out[1 + k, row] = -slope * difference[k]
            for i in range(dim):
                out[1 + k, row + 1 + i] = -curvature * difference[k] * difference[i]
            out[1 + k, row + 1 + k] += slope


@jit
def joint_correlation_matrix(kernel, coordinates, out):
    """Correlations of all rows of all columns of `coordinates` (d, t), into `out` (rows, rows)."""
    dim, count = coordinates.shape
    z = np.empty(dim)
    for j in range(count):
        for k in range(dim):
            z[k] = coordinates[k, j]
        block = out[j * (dim + 1) : (j + 1) * (dim + 1)]
        joint_correlations(kernel, z, coordinates, count, block)


@jit
def joint_posterior(process, z, v, covariance):
    """Covariance of value and gradient at `z` given all rows, in coordinates z.

    Parameters
    ----------
    process : JointProcess
    z : array, shape (d,)
    v : array, shape (1 + d, rows)
        L^-1 of the covariances with the rows, written.
    covariance : array, shape (1 + d, 1 + d)
        Written.

    Returns
    -------
    float
        The squared amplitude.
    """
    count, size, rows = process.count[0], z.size + 1, v.shape[1]
    variance = math.exp(2.0 * process.hyperparameters[0])
    joint_correlations(process.kernel, z, process.coordinates, count, v)
    slope = radial(process.kernel, 0.0)[1]
    for i in range(size):
        for j in range(rows):
            v[i, j] *= variance
        solve_lower(process.factor, rows, v[i])
        for j in range(i + 1):
            prior = 0.0 if i != j else variance * (1.0 if i == 0 else slope)
            covariance[i, j] = prior - dot(v[i], v[j], rows)
            covariance[j, i] = covariance[i, j]
    return variance


@jit
def gradient_to_z(process, gradient, out):
    """Gradient in raw coordinates to the gradient in z."""
    for k in range(gradient.size):
        total = 0.0
        for i in range(k, gradient.size):
            total += process.standardization.factor[i, k] * gradient[i]
        out[k] = total * math.exp(process.hyperparameters[1 + k])


@jit
def gradient_from_z(process, vector):
    """Gradient in z to raw coordinates, in place."""
    for k in range(vector.size):
        vector[k] *= math.exp(-process.hyperparameters[1 + k])
    solve_upper(process.standardization.factor, vector.size, vector)


@jit
def prior_rows(process, u, out):
    """Prior mean of value and gradient in z, into `out` (1 + d,)."""
    out[0] = mean_value(process.mean, u)
    mean_gradient(process.mean, u, out[1:])
    for k in range(u.size):
        out[1 + k] *= math.exp(process.hyperparameters[1 + k])


@jit
def predict_joint(process, x, gradient_mean, cross_covariance, gradient_covariance):
    """Posterior of log-likelihood f and gradient g at a point, in O(rows^2 (1 + d)).

    Parameters
    ----------
    process : JointProcess
    x : array, shape (d,)
        Raw coordinates, as all that follows.
    gradient_mean : array, shape (d,)
        Mean of g, written.
    cross_covariance : array, shape (d,)
        Covariance of f and g, written.
    gradient_covariance : array, shape (d, d)
        Covariance of g, written.

    Returns
    -------
    mean : float
    variance : float
        Of f; never negative.
    """
    dim = x.size
    size, rows = dim + 1, process.count[0] * (dim + 1)
    u, z, prior = np.empty(dim), np.empty(dim), np.empty(size)
    v, covariance = np.empty((size, rows)), np.empty((size, size))
    standardised(process, x, u, z)
    joint_posterior(process, z, v, covariance)
    prior_rows(process, u, prior)
    for k in range(dim):
        gradient_mean[k] = prior[1 + k] + dot(v[1 + k], process.whitened, rows)
        cross_covariance[k] = covariance[0, 1 + k]
        for i in range(dim):
            gradient_covariance[k, i] = covariance[1 + k, 1 + i]
    gradient_from_z(process, gradient_mean)
    gradient_from_z(process, cross_covariance)
    for k in range(dim):
        gradient_from_z(process, gradient_covariance[k])
    # Rows are done; the matrix is symmetric after the columns are.
    column = np.empty(dim)
    for k in range(dim):
        for i in range(dim):
            column[i] = gradient_covariance[i, k]
        gradient_from_z(process, column)
        for i in range(dim):
            gradient_covariance[i, k] = column[i]
    return prior[0] + dot(v[0], process.whitened, rows), max(0.0, covariance[0, 0])
