"""Hyperparameters by maximum marginal likelihood (Rasmussen & Williams 2006, section 5.4.1)."""

import math
from collections.abc import Callable

import numpy as np
import scipy
from scipy import linalg

from pymc_kameleon.surrogate.covariances import correlation_matrix, lengthscale_slopes

__all__ = ["N_ROWS", "fit_hyperparameters", "log_marginal_likelihood"]

JITTER = 1e-8
"""Relative to the squared amplitude, and larger than that of predictions: the search passes through
lengthscales where the covariance is all but singular."""

NEGLIGIBLE = 1e-25
"""A smaller correlation is taken for 0: products of several would be denormal, and slow."""

N_ROWS = 300
"""Values and derivatives that hyperparameters are fitted to."""

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
    noise: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """Log marginal likelihood of values, or values and gradients, and its gradient.

    Parameters
    ----------
    kernel : int
    u : array, shape (d, t)
        Standardised coordinates.
    residuals : array, shape (1, t) or (1 + d, t)
        Values, and their gradients in standardised coordinates, minus those of the prior mean.
    hyperparameters : array, shape (1 + d,)
        Logs of the amplitude and of the lengthscales.
    noise : array, shape (t,), optional
        Standard deviations of the values; default 0.

    Returns
    -------
    float, array of shape (1 + d,)
    """
    size, count = residuals.shape
    rows, lengthscales = count * size, np.exp(hyperparameters[1:, None])
    coordinates = u / lengthscales
    # In z, gradients are multiplied by the lengthscales.
    target = np.concatenate([residuals[:1], lengthscales[: size - 1] * residuals[1:]]).T.ravel()
    matrix = np.zeros((rows, rows))
    correlation_matrix(kernel, coordinates, size, matrix)
    matrix[np.abs(matrix) < NEGLIGIBLE] = 0.0
    matrix[np.diag_indices(rows)] *= 1 + JITTER
    variance = math.exp(2 * hyperparameters[0])
    if noise is not None:
        relative = noise**2 / variance
        matrix[np.diag_indices(rows)] += np.repeat(relative, size) * (np.arange(rows) % size == 0)
    lower = linalg.cholesky(matrix, lower=True, check_finite=False)
    weights = linalg.cho_solve((lower, True), target, check_finite=False)
    fit = target @ weights / variance
    log_determinant = 2 * np.log(np.diagonal(lower)).sum() + 2 * rows * hyperparameters[0]
    value = -0.5 * (fit + log_determinant + rows * math.log(2 * math.pi))
    inverse = linalg.lapack.dpotri(lower.T, lower=0)[0].T
    slopes = np.empty(hyperparameters.size)
    slopes[0] = fit - rows
    if noise is not None:
        slopes[0] += relative @ (np.diagonal(inverse) - weights**2 / variance)[::size]
    of_matrix = np.outer(weights / variance, weights) - inverse
    lengthscale_slopes(kernel, coordinates, size, of_matrix, slopes[1:])
    if size > 1:
        # The density is that of gradients in u.
        value += count * hyperparameters[1:].sum()
        explained = (weights * target).reshape(count, size)[:, 1:].sum(axis=0)
        slopes[1:] += count - explained / variance
    return value, slopes


def _most_likely(
    objective: Callable,
    dim: int,
    scale: float,
    previous: np.ndarray | None,
    max_iterations: int,
) -> tuple[np.ndarray, float]:
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
    array of shape (1 + d,), float
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
        scipy.optimize.minimize(
            negative,
            np.clip(start, lowest, highest),
            jac=True,
            method="L-BFGS-B",
            bounds=scipy.optimize.Bounds(lowest, highest),
            options={"maxiter": max_iterations, "ftol": 1e-6},
        )
        for start in starts
    ]
    best = min(results, key=lambda result: result.fun)
    return best.x, -best.fun


def fit_hyperparameters(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    previous: np.ndarray | None = None,
    noise: np.ndarray | None = None,
    max_iterations: int = 60,
    n_rows: int = N_ROWS,
) -> tuple[np.ndarray, float]:
    """Hyperparameters of a process, shape (1 + d,), and their log marginal likelihood.

    The arguments are those of `log_marginal_likelihood`; `previous` hyperparameters are where the
    search, of at most `max_iterations`, starts. At most `n_rows` values and derivatives, those of
    points that are evenly spaced in the order that they came, are fitted to.
    """
    size, count = residuals.shape
    n_points = min(count, max(2, n_rows // size))
    chosen = np.linspace(0, count - 1, n_points).round().astype(int)
    u, residuals = np.ascontiguousarray(u[:, chosen]), residuals[:, chosen]
    noise = None if noise is None else noise[chosen]
    scale = math.sqrt(np.mean(residuals[0] ** 2))
    return _most_likely(
        lambda h: log_marginal_likelihood(kernel, u, residuals, h, noise),
        len(u),
        scale,
        previous,
        max_iterations,
    )
