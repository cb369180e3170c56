"""Hyperparameters by maximum marginal likelihood (Rasmussen & Williams 2006, section 5.4.1)."""

import math

import numpy as np
import scipy
from scipy import linalg

from pymc_kameleon.surrogate.covariances import correlation_matrix, lengthscale_slopes

__all__ = ["N_ROWS", "fit_hyperparameters", "log_marginal_likelihood"]

JITTER = 1e-8
"""Relative to the squared amplitude: the search passes through lengthscales where the covariance is
all but singular."""

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
    """Log marginal likelihood of values, or values and gradients, and its gradient (1 + d,).

    `residuals` (1, t) or (1 + d, t) are values, and their gradients in the standardised coordinates
    `u` (d, t), minus those of the prior mean; `hyperparameters` (1 + d,) are logs of the amplitude
    and of the lengthscales. `noise` (t,) has standard deviations of the values, 0 by default.
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


def fit_hyperparameters(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    previous: np.ndarray | None = None,
    noise: np.ndarray | None = None,
    max_iterations: int = 60,
    n_rows: int = N_ROWS,
) -> tuple[np.ndarray, float]:
    """Maximise the log marginal likelihood by L-BFGS-B; hyperparameters (1 + d,), and its value.

    The arguments are those of `log_marginal_likelihood`; the search starts from `previous` ones, or
    from several lengthscales. At most `n_rows` values and derivatives, those of points that are
    evenly spaced in the order that they came, are fitted to.
    """
    size, count = residuals.shape
    chosen = np.linspace(0, count - 1, min(count, max(2, n_rows // size))).round().astype(int)
    u, residuals = np.ascontiguousarray(u[:, chosen]), residuals[:, chosen]
    noise = None if noise is None else noise[chosen]
    root = math.sqrt(len(u))
    scale = max(math.sqrt(np.mean(residuals[0] ** 2)), SMALLEST_AMPLITUDE)
    lengths = (math.log(LENGTHSCALES[0] * root), math.log(LENGTHSCALES[1] * root))
    amplitude = (math.log(SMALLEST_AMPLITUDE), math.log(1e3 * scale))
    lowest, highest = np.array([amplitude, *[lengths] * len(u)]).T

    def negative(hyperparameters):
        try:
            value, gradient = log_marginal_likelihood(kernel, u, residuals, hyperparameters, noise)
        except linalg.LinAlgError:
            return 1e25, np.zeros(hyperparameters.size)
        return -value, -gradient

    starts = [previous] if previous is not None else []
    starts += [np.log([scale, *[s * root] * len(u)]) for s in STARTS if previous is None]
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
