r"""A Gaussian process of the log-likelihood, and of its gradient where there is one, noise-free.

Each point is a block of rows: its value, then, if points come with gradients, its gradient in
coordinates z divided by the lengthscales. Covariances of gradients are derivatives of that of the
values (Solak et al. 2002). With :math:`\Delta = z - z'`, :math:`\sigma_1 = -2\varphi'` and
:math:`\sigma_2 = 4\varphi''`, over the squared amplitude:

.. math:: \mathrm{Cov}(f, f') = \varphi,\quad \mathrm{Cov}(f, g') = \sigma_1 \Delta,\quad
          \mathrm{Cov}(g, g') = \sigma_1 I - \sigma_2 \Delta \Delta^\top.

Arrays have a fixed capacity.

References
----------
C. E. Rasmussen and C. K. I. Williams (2006), Gaussian Processes for Machine Learning, chapter 2.
E. Solak, R. Murray-Smith, W. E. Leithead, D. J. Leith and C. E. Rasmussen (2002), Derivative
observations in Gaussian process models of dynamic systems, NeurIPS 15.
A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
exploratory-exploitation effect.
"""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.linalg import dot, solve_lower, solve_lower_rows, solve_upper
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.covariances import correlations, radial
from pymc_kameleon.surrogate.mean import Mean, constant_mean, mean_gradient, mean_value

__all__ = [
    "Process",
    "block_size",
    "bounded",
    "gradient",
    "gradient_to_z",
    "largest_value",
    "log_surrogate",
    "new_process",
    "posterior",
    "predict",
    "predict_with_gradient",
    "prior_slopes",
    "standardised",
]

SMALLEST_JITTER = 1e-10


class Process(NamedTuple):
    """Points with their values, and what predicts other values; arrays are changed in place.

    Attributes
    ----------
    kernel : int
        Code of the covariance, see `covariances.COVARIANCES`.
    count : int64 array, shape (1,)
        Number t of points stored.
    points : array, shape (capacity, d)
        Raw coordinates.
    values : array, shape (capacity,)
        Log-likelihoods; without gradients, censored.
    gradients : array, shape (capacity, d), or (capacity, 0) if points have none
        In raw coordinates.
    coordinates : array, shape (d, capacity)
        Standardised and divided by the lengthscales.
    factor : array, shape (rows, rows)
        Rows of L, the Cholesky factor of the covariance K of all rows. There are capacity (1 + d)
        rows, or without gradients capacity.
    whitened : array, shape (rows,)
        L^-1 (values and gradients - prior mean).
    weights : array, shape (rows,)
        K^-1 (values and gradients - prior mean).
    inverse_blocks : array, shape (rows, rows of a point)
        Diagonal blocks of K^-1, one below the other, for leave-one-out predictions.
    hyperparameters : array, shape (1 + d,)
        Log of the amplitude, which has the unit of the values, and of the lengthscales, in
        standardised coordinates.
    mean : Mean
        Prior mean.
    standardization : Standardization
        u = factor^-1 (x - location).
    jitter : array, shape (1,)
        Added to the diagonal, relative to the prior variance of the row.
    censoring : array, shape (2,)
        Lowest value that enters, and the depth below the largest value that it stands for.
    """

    kernel: int
    count: np.ndarray  # type: ignore[assignment]
    points: np.ndarray
    values: np.ndarray
    gradients: np.ndarray
    coordinates: np.ndarray
    factor: np.ndarray
    whitened: np.ndarray
    weights: np.ndarray
    inverse_blocks: np.ndarray
    hyperparameters: np.ndarray
    mean: Mean
    standardization: Standardization
    jitter: np.ndarray
    censoring: np.ndarray

    @property
    def is_consistent(self) -> bool:
        """Whether there is room for as many points as are counted."""
        return bool(0 <= self.count[0] <= len(self.values))


def new_process(
    kernel: int, capacity: int, dim: int, depth: float, gradients: bool = False
) -> Process:
    """Return a process without points, of unit amplitude and lengthscales, in raw coordinates."""
    derivatives = dim if gradients else 0
    rows = capacity * (1 + derivatives)
    return Process(
        kernel=kernel,
        count=np.zeros(1, np.int64),
        points=np.zeros((capacity, dim)),
        values=np.zeros(capacity),
        gradients=np.zeros((capacity, derivatives)),
        coordinates=np.zeros((dim, capacity)),
        factor=np.zeros((rows, rows)),
        whitened=np.zeros(rows),
        weights=np.zeros(rows),
        inverse_blocks=np.zeros((rows, 1 + derivatives)),
        hyperparameters=np.zeros(1 + dim),
        mean=constant_mean(0.0, dim),
        standardization=Standardization(np.zeros(dim), np.eye(dim)),
        jitter=np.array([SMALLEST_JITTER]),
        censoring=np.array([-np.inf, depth]),
    )


@jit
def block_size(process):
    """Return the number of rows of a point: 1, or 1 + d with gradients."""
    return 1 + process.gradients.shape[1]


@jit
def standardised(process, x, u, z):
    """Write the standardised coordinates of `x` into `u`, and u over the lengthscales into `z`."""
    standardize(process.standardization, x, u)
    for k in range(x.size):
        z[k] = u[k] * math.exp(-process.hyperparameters[1 + k])


@jit
def gradient_to_z(process, gradient, out):
    """Gradient in raw coordinates to the gradient in z, into `out` (d,) or (0,)."""
    for k in range(out.size):
        total = 0.0
        for i in range(k, out.size):
            total += process.standardization.factor[i, k] * gradient[i]
        out[k] = total * math.exp(process.hyperparameters[1 + k])


@jit
def _gradient_from_z(process, vector):
    """Gradient in z to raw coordinates, in place."""
    for k in range(vector.size):
        vector[k] *= math.exp(-process.hyperparameters[1 + k])
    solve_upper(process.standardization.factor, vector.size, vector)


@jit
def prior_slopes(process, u, out):
    """Gradient of the prior mean in z at `u`, into `out` (d,)."""
    mean_gradient(process.mean, u, out)
    for k in range(out.size):
        out[k] *= math.exp(process.hyperparameters[1 + k])


@jit
def posterior(process, z, v, covariance):
    """Covariance at `z` given all rows: of the value, or of the value and the gradient in z.

    Parameters
    ----------
    process : Process
    z : array, shape (d,)
    v : array, shape (1 or 1 + d, rows stored)
        L^-1 of the covariances with the rows, written.
    covariance : array, shape (1, 1) or (1 + d, 1 + d)
        Written.

    Returns
    -------
    float
        The squared amplitude.
    """
    size, rows = v.shape
    variance = math.exp(2.0 * process.hyperparameters[0])
    correlations(process.kernel, z, process.coordinates, process.count[0], block_size(process), v)
    slope = radial(process.kernel, 0.0)[1]
    for i in range(size):
        for j in range(rows):
            v[i, j] *= variance
    solve_lower_rows(process.factor, rows, v)
    for i in range(size):
        for j in range(i + 1):
            prior = 0.0 if i != j else variance * (1.0 if i == 0 else slope)
            covariance[i, j] = prior - dot(v[i], v[j], rows)
            covariance[j, i] = covariance[i, j]
    return variance


@jit(fastmath={"nnan", "nsz"})
def largest_value(process):
    """Return the largest value stored; infinity if there is none.

    Without NaN, which never enters, the maximum is vectorised.
    """
    count = process.count[0]
    largest = process.values[0] if count > 0 else np.inf
    for i in range(1, count):
        largest = max(largest, process.values[i])
    return largest


@jit(allocates=True)
def predict(process, x):
    """Mean and variance of the log-likelihood at a point, in O(rows^2).

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
    rows = process.count[0] * block_size(process)
    u, z = np.empty(x.size), np.empty(x.size)
    v, covariance = np.empty((1, rows)), np.empty((1, 1))
    standardised(process, x, u, z)
    posterior(process, z, v, covariance)
    mean = mean_value(process.mean, u) + dot(v[0], process.whitened, rows)
    return mean, max(0.0, covariance[0, 0])


@jit(allocates=True)
def predict_with_gradient(process, x, gradient_mean, cross_covariance, gradient_covariance):
    """Posterior of log-likelihood f and gradient g at a point, in O(rows^2 (1 + d)).

    Parameters
    ----------
    process : Process
        With or without gradients.
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
    dim, rows = x.size, process.count[0] * block_size(process)
    u, z = np.empty(dim), np.empty(dim)
    v, covariance = np.empty((1 + dim, rows)), np.empty((1 + dim, 1 + dim))
    standardised(process, x, u, z)
    posterior(process, z, v, covariance)
    prior_slopes(process, u, gradient_mean)
    for k in range(dim):
        gradient_mean[k] += dot(v[1 + k], process.whitened, rows)
        cross_covariance[k] = covariance[0, 1 + k]
        for i in range(dim):
            gradient_covariance[k, i] = covariance[1 + k, 1 + i]
    _gradient_from_z(process, gradient_mean)
    _gradient_from_z(process, cross_covariance)
    for k in range(dim):
        _gradient_from_z(process, gradient_covariance[k])
    # Rows are done; the matrix is symmetric after the columns are.
    column = np.empty(dim)
    for k in range(dim):
        for i in range(dim):
            column[i] = gradient_covariance[i, k]
        _gradient_from_z(process, column)
        for i in range(dim):
            gradient_covariance[i, k] = column[i]
    mean = mean_value(process.mean, u) + dot(v[0], process.whitened, rows)
    return mean, max(0.0, covariance[0, 0])


@jit(allocates=True)
def gradient(process, x, of_mean, of_variance):
    """Write the gradients of mean and variance at `x`, in raw coordinates, both (d,).

    They are what `predict_with_gradient` finds too, in O(rows^2).
    """
    count, dim, size = process.count[0], x.size, block_size(process)
    rows = count * size
    u, z = np.empty(dim), np.empty(dim)
    cross, solved = np.empty((1 + dim, rows)), np.empty(rows)
    variance = math.exp(2.0 * process.hyperparameters[0])
    standardised(process, x, u, z)
    correlations(process.kernel, z, process.coordinates, count, size, cross)
    for j in range(rows):
        solved[j] = variance * cross[0, j]
    solve_lower(process.factor, rows, solved)
    solve_upper(process.factor, rows, solved)
    mean_gradient(process.mean, u, of_mean)
    for k in range(dim):
        scale = variance * math.exp(-process.hyperparameters[1 + k])
        of_mean[k] += scale * dot(cross[1 + k], process.weights, rows)
        of_variance[k] = -2.0 * scale * dot(cross[1 + k], solved, rows)
    solve_upper(process.standardization.factor, dim, of_mean)
    solve_upper(process.standardization.factor, dim, of_variance)


@jit
def log_surrogate(process, x):
    r"""Log of the expected likelihood :math:`\mu + \kappa/2` (Benavoli et al., eq. 3), bounded.

    It is large where the process knows nothing: such proposals are let through and learnt.
    """
    mean, variance = predict(process, x)
    return bounded(process, mean, variance)


@jit
def bounded(process, mean, variance):
    r"""Return :math:`S = \min(\mu + \kappa/2, \text{largest value stored})`.

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
