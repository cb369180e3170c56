"""Marginal likelihood of values and gradients together, and its gradient."""

import math

import numpy as np

from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.surrogate.covariances import radial
from pymc_kameleon.surrogate.joint_process import joint_correlation_matrix
from pymc_kameleon.surrogate.marginal_likelihood import (
    JITTER,
    N_POINTS,
    factor_and_inverse,
    most_likely,
)

__all__ = ["fit_joint_hyperparameters", "joint_log_marginal_likelihood"]


@jit
def _lengthscale_slopes(kernel, coordinates, weights, out):
    """Sum `weights` times the derivatives of all correlations in each log lengthscale.

    In z, a log lengthscale moves a difference by minus itself in one coordinate.

    Parameters
    ----------
    kernel : int
    coordinates : array, shape (d, t)
    weights : array, shape (rows, rows)
        Symmetric.
    out : array, shape (d,)
    """
    dim, count = coordinates.shape
    size = dim + 1
    out[:] = 0.0
    for i in range(count):
        for j in range(i):
            difference = coordinates[:, i] - coordinates[:, j]
            _, slope, curvature, third = radial(kernel, np.sum(difference**2))
            block = weights[i * size : (i + 1) * size, j * size : (j + 1) * size]
            mixed = block[0, 1:] - block[1:, 0]
            of_gradients = np.ascontiguousarray(block[1:, 1:])
            forward, backward = of_gradients @ difference, of_gradients.T @ difference
            common = slope * block[0, 0] - third * np.sum(difference * forward)
            common += curvature * (np.sum(mixed * difference) + np.trace(of_gradients))
            for k in range(dim):
                direct = curvature * (forward[k] + backward[k]) - slope * mixed[k]
                out[k] += 2.0 * difference[k] * (difference[k] * common + direct)


def joint_log_marginal_likelihood(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    gradients: np.ndarray,
    hyperparameters: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Log marginal likelihood of noise-free values and gradients, and its gradient.

    Parameters
    ----------
    kernel : int
    u : array, shape (d, t)
        Standardised coordinates.
    residuals : array, shape (t,)
        Values minus the prior mean.
    gradients : array, shape (d, t)
        Gradients minus that of the prior mean, in standardised coordinates.
    hyperparameters : array, shape (1 + d,)
        Logs of the amplitude and of the lengthscales.

    Returns
    -------
    float, array of shape (1 + d,)
    """
    dim, count = u.shape
    rows, lengthscales = count * (dim + 1), np.exp(hyperparameters[1:, None])
    coordinates = u / lengthscales
    matrix = np.empty((rows, rows))
    joint_correlation_matrix(kernel, coordinates, matrix)
    matrix[np.diag_indices(rows)] *= 1 + JITTER
    lower, inverse = factor_and_inverse(matrix)
    target = np.vstack([residuals, lengthscales * gradients]).T.ravel()
    variance = math.exp(2 * hyperparameters[0])
    weights = inverse @ target
    fit = target @ weights / variance
    log_determinant = 2 * np.log(np.diagonal(lower)).sum() + 2 * rows * hyperparameters[0]
    value = -0.5 * (fit + log_determinant + rows * math.log(2 * math.pi))
    # The density is that of gradients in u; in z they are multiplied by the lengthscales.
    value += count * hyperparameters[1:].sum()
    slopes = np.empty(hyperparameters.size)
    slopes[0] = fit - rows
    inverse = 0.5 * (np.outer(weights, weights) / variance - inverse)
    _lengthscale_slopes(kernel, coordinates, inverse, slopes[1:])
    explained = (weights * target).reshape(count, dim + 1)[:, 1:].sum(axis=0)
    slopes[1:] += count - explained / variance
    return value, slopes


def fit_joint_hyperparameters(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    gradients: np.ndarray,
    previous: np.ndarray | None = None,
) -> np.ndarray:
    """Hyperparameters of a process of values and gradients, shape (1 + d,).

    The arguments are those of `joint_log_marginal_likelihood`; `previous` hyperparameters are where
    the search starts.
    """
    dim, count = u.shape
    n_points = max(2, N_POINTS // (dim + 1))
    chosen = np.linspace(0, count - 1, min(count, n_points)).round().astype(int)
    u, gradients = np.ascontiguousarray(u[:, chosen]), gradients[:, chosen]
    residuals = residuals[chosen]
    return most_likely(
        lambda h: joint_log_marginal_likelihood(kernel, u, residuals, gradients, h),
        dim,
        math.sqrt(np.mean(residuals**2)),
        previous,
    )
