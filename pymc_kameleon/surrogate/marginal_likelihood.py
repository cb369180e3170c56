"""Hyperparameters by maximum marginal likelihood (Rasmussen & Williams 2006, section 5.4.1)."""

import math
from collections.abc import Callable

import numpy as np
from scipy import linalg, optimize

from pymc_kameleon.surrogate.covariances import correlation_matrix, lengthscale_slopes

__all__ = ["fit_hyperparameters", "log_marginal_likelihood", "most_likely"]

JITTER = 1e-8
"""Relative to the squared amplitude, and larger than that of predictions: the search passes through
lengthscales where the covariance is all but singular."""

N_POINTS = 300
"""At most this many points, evenly spaced in the order that they came, are fitted to."""

SMALLEST_AMPLITUDE = 1e-3
"""In units of the log-likelihood: differences below this change no decision."""

LENGTHSCALES = (0.1, 5.0)
"""Bounds over the root of the dimension, in standardised coordinates. Amplitudes grow with
lengthscales, and the jitter is relative to them: further up it hides what changes decisions."""

STARTS = (1.0, 0.4, 3.0)
"""Lengthscales that a first search starts from, over the root of the dimension."""


def log_marginal_likelihood(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    hyperparameters: np.ndarray,
    noise: np.ndarray | float = 0.0,
) -> tuple[float, np.ndarray]:
    """Log marginal likelihood of values, and its gradient.

    Parameters
    ----------
    kernel : int
    u : array, shape (d, t)
        Standardised coordinates.
    residuals : array, shape (t,)
        Values minus the prior mean.
    hyperparameters : array, shape (1 + d,)
        Logs of the amplitude and of the lengthscales.
    noise : array, shape (t,), or float
        Standard deviations of the values.

    Returns
    -------
    float, array of shape (1 + d,)
    """
    count = residuals.size
    coordinates = u / np.exp(hyperparameters[1:, None])
    values, slopes = np.empty((count, count)), np.empty((count, count))
    correlation_matrix(kernel, coordinates, values, slopes)
    variance = math.exp(2 * hyperparameters[0])
    relative_noise = np.square(noise) / variance
    values[np.diag_indices(count)] += JITTER + relative_noise
    lower, inverse = factor_and_inverse(values)
    weights = inverse @ residuals
    fit = residuals @ weights / variance
    log_determinant = 2 * np.log(np.diagonal(lower)).sum() + 2 * count * hyperparameters[0]
    value = -0.5 * (fit + log_determinant + count * math.log(2 * math.pi))
    gradient = np.empty(hyperparameters.size)
    gradient[0] = fit - count
    if np.any(relative_noise):
        diagonal = np.diagonal(inverse) - weights**2 / variance
        gradient[0] += np.sum(relative_noise * diagonal)
    inverse = 0.5 * (np.outer(weights, weights) / variance - inverse)
    lengthscale_slopes(coordinates, slopes, inverse, gradient[1:])
    return value, gradient


def factor_and_inverse(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower Cholesky factor and inverse of a positive-definite matrix."""
    lower = linalg.cholesky(matrix, lower=True, check_finite=False)
    inverse = linalg.lapack.dpotri(lower, lower=1)[0]
    lower_part = np.tril(inverse)
    return lower, lower_part + np.tril(inverse, -1).T


def most_likely(
    objective: Callable,
    dim: int,
    scale: float,
    previous: np.ndarray | None,
    max_iterations: int = 60,
) -> np.ndarray:
    """Maximise a marginal likelihood with L-BFGS-B.

    Parameters
    ----------
    objective : callable
        Hyperparameters to the log marginal likelihood and its gradient.
    dim : int
    scale : float
        Root mean square of the residuals.
    previous : array, shape (1 + d,), optional
        Start from here; from three lengthscales if not given.
    max_iterations : int

    Returns
    -------
    array, shape (1 + d,)
    """
    root = math.sqrt(dim)
    scale = max(scale, SMALLEST_AMPLITUDE)
    lengths = (math.log(LENGTHSCALES[0] * root), math.log(LENGTHSCALES[1] * root))
    amplitude = (math.log(SMALLEST_AMPLITUDE), math.log(1e3 * scale))
    lowest, highest = np.array([amplitude, *[lengths] * dim]).T

    def negative(hyperparameters):
        try:
            value, gradient = objective(hyperparameters)
        except linalg.LinAlgError:
            return 1e25, np.zeros(hyperparameters.size)
        return -value, -gradient

    starts = [previous] if previous is not None else []
    starts += [np.log([scale, *[s * root] * dim]) for s in STARTS if previous is None]
    results = [
        optimize.minimize(
            negative,
            np.clip(start, lowest, highest),
            jac=True,
            method="L-BFGS-B",
            bounds=optimize.Bounds(lowest, highest),
            options={"maxiter": max_iterations, "ftol": 1e-6},
        )
        for start in starts
    ]
    return min(results, key=lambda result: result.fun).x


def fit_hyperparameters(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    previous: np.ndarray | None = None,
    noise: np.ndarray | float = 0.0,
    max_iterations: int = 60,
) -> np.ndarray:
    """Hyperparameters of a process of values, shape (1 + d,).

    Parameters
    ----------
    kernel : int
    u : array, shape (d, t)
        Standardised coordinates.
    residuals : array, shape (t,)
        Values minus the prior mean.
    previous : array, shape (1 + d,), optional
        Hyperparameters to start from.
    noise : array, shape (t,), or float
        Standard deviations of the values.
    max_iterations : int
        Of the search.
    """
    count = residuals.size
    chosen = np.linspace(0, count - 1, min(count, N_POINTS)).round().astype(int)
    u, residuals = np.ascontiguousarray(u[:, chosen]), residuals[chosen]
    noise = noise if np.ndim(noise) == 0 else noise[chosen]
    scale = math.sqrt(np.mean(residuals**2))
    return most_likely(
        lambda h: log_marginal_likelihood(kernel, u, residuals, h, noise),
        len(u),
        scale,
        previous,
        max_iterations,
    )
