r"""Stationary covariances :math:`k = s^2 \varphi(q)` of the surrogates, and their hyperparameters.

q is the squared distance of two points in coordinates divided by the lengthscales, so that all
covariances of values and gradients follow from :math:`\varphi` and its first two derivatives.
"""

import math

import numpy as np
import scipy
from scipy import linalg

from pymc_kameleon.mcmc.bridge.jit import SIMD, jit, jit_inner
from pymc_kameleon.mcmc.linalg import squared_distances

COVARIANCES = {"gaussian": 0, "matern": 1, "rational_quadratic": 2}
"""Code of each covariance in a process: compiled code takes no function pointers. Names are those
of `kernels`."""


@jit_inner(fastmath=SIMD)
def radial(kernel, squared):
    r"""Return :math:`\varphi(q), -2\varphi'(q), 4\varphi''(q), -8\varphi'''(q)` at q = `squared`.

    Squared exponential: :math:`\varphi = e^{-q/2}`. Matern 5/2:
    :math:`\varphi = (1 + a + a^2/3)\,e^{-a}` with :math:`a = \sqrt{5q}`; its third derivative is
    infinite at q = 0, where it is always multiplied by 0, and 0 is returned. Rational quadratic:
    :math:`\varphi = (1 + q/16)^{-8}`, close to the squared exponential without its cost.
    """
    if kernel == 2:
        t = 1.0 / (1.0 + squared / 16.0)
        t8 = ((t * t) * (t * t)) * ((t * t) * (t * t))
        return t8, t8 * t, 1.125 * t8 * t * t, 1.40625 * t8 * t * t * t
    if kernel == 0:
        value = math.exp(-0.5 * squared)
        return value, value, value, value
    a = math.sqrt(5.0 * squared)
    decay = math.exp(-a)
    third = 125.0 / 3.0 * decay / a if a > 0.0 else 0.0
    return (
        (1.0 + a + a * a / 3.0) * decay,
        5.0 / 3.0 * (1.0 + a) * decay,
        25.0 / 3.0 * decay,
        third,
    )


@jit_inner(fastmath=SIMD, allocates=True)
def correlations(kernel, z, coordinates, count, size, out):
    """Correlations at `z` (d,) with the rows of the first `count` points of `coordinates` (d, n).

    Both are divided by the lengthscales. A point has `size` rows: 1, its value, or 1 + d, its value
    and its gradient in z; so has `out` (1 or 1 + d, at least count * size) for `z`.
    """
    n_out = out.shape[0]
    if n_out == 1 and size == 1:  # without room for differences, a tenth of a prediction faster
        squared_distances(z, coordinates, count, out[0])
        for j in range(count):
            out[0, j] = radial(kernel, out[0, j])[0]
        return
    squared, difference = np.empty(count), np.empty(z.size)
    squared_distances(z, coordinates, count, squared)
    for j in range(count):
        value, slope, curvature, _ = radial(kernel, squared[j])
        row = j * size
        out[0, row] = value
        for k in range(z.size):
            difference[k] = z[k] - coordinates[k, j]
        for k in range(size - 1):
            out[0, row + 1 + k] = slope * difference[k]
        for k in range(n_out - 1):
            out[1 + k, row] = -slope * difference[k]
            for i in range(size - 1):
                out[1 + k, row + 1 + i] = -curvature * difference[k] * difference[i]
            if size > 1:
                out[1 + k, row + 1 + k] += slope


@jit(allocates=True)
def correlation_matrix(kernel, coordinates, size, out):
    """Write those of all columns: the lower triangle of `out`, and the diagonal blocks."""
    dim, count = coordinates.shape
    z = np.empty(dim)
    for j in range(count):
        for k in range(dim):
            z[k] = coordinates[k, j]
        block = out[j * size : (j + 1) * size]
        correlations(kernel, z, coordinates, j + 1, size, block)


@jit(fastmath=SIMD, allocates=True)
def lengthscale_slopes(kernel, coordinates, size, weights, out):
    """Sum `weights` times the derivatives of correlations in each log lengthscale, into `out` (d,).

    The sum is over the lower triangle of `weights` (rows, rows). In z, a log lengthscale moves a
    difference by minus itself in one coordinate.
    """
    dim, count = coordinates.shape
    z, difference = np.empty(dim), np.empty(dim)
    squared, common = np.empty(count), np.empty(count)
    for k in range(dim):
        out[k] = 0.0
    for i in range(count):
        for k in range(dim):
            z[k] = coordinates[k, i]
        squared_distances(z, coordinates, i, squared)
        for j in range(i):
            _, slope, curvature, third = radial(kernel, squared[j])
            a, b = i * size, j * size
            common[j] = slope * weights[a, b]
            if size == 1:
                continue
            for k in range(dim):
                difference[k] = z[k] - coordinates[k, j]
            for k in range(dim):
                mixed = weights[a, b + 1 + k] - weights[a + 1 + k, b]
                forward, backward = 0.0, 0.0
                for m in range(dim):
                    forward += weights[a + 1 + k, b + 1 + m] * difference[m]
                    backward += weights[a + 1 + m, b + 1 + k] * difference[m]
                common[j] += curvature * (mixed * difference[k] + weights[a + 1 + k, b + 1 + k])
                common[j] -= third * difference[k] * forward
                direct = curvature * (forward + backward) - slope * mixed
                out[k] += difference[k] * direct
        for k in range(dim):
            total = 0.0
            for j in range(i):
                total += common[j] * (z[k] - coordinates[k, j]) ** 2
            out[k] += total


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
    """Log marginal likelihood of values, or values and gradients, and its gradient.

    `residuals` (1, t) or (1 + d, t) are values, and gradients in the standardised coordinates `u`
    (d, t), minus those of the prior mean; `hyperparameters` (1 + d,) are logs of the amplitude and
    of the lengthscales; `noise` (t,) are standard deviations of the values (Rasmussen & Williams
    2006, section 5.4.1). One more hyperparameter is the log of a standard deviation of all values,
    beside that.
    """
    size, count = residuals.shape
    dim, is_noisy = len(u), hyperparameters.size > 1 + len(u)
    rows, lengthscales = count * size, np.exp(hyperparameters[1 : 1 + dim, None])
    coordinates = u / lengthscales
    # In z, gradients are multiplied by the lengthscales.
    target = np.concatenate([residuals[:1], lengthscales[: size - 1] * residuals[1:]]).T.ravel()
    matrix = np.zeros((rows, rows))
    correlation_matrix(kernel, coordinates, size, matrix)
    matrix[np.abs(matrix) < NEGLIGIBLE] = 0.0
    matrix[np.diag_indices(rows)] *= 1 + JITTER
    variance = math.exp(2 * hyperparameters[0])
    common = math.exp(2 * hyperparameters[-1]) if is_noisy else 0.0
    if is_noisy or noise is not None:
        known = np.zeros(count) if noise is None else noise**2
        relative = (known + common) / variance
        matrix[np.diag_indices(rows)] += np.repeat(relative, size) * (np.arange(rows) % size == 0)
    lower = linalg.cholesky(matrix, lower=True, check_finite=False)
    weights = linalg.cho_solve((lower, True), target, check_finite=False)
    fit = target @ weights / variance
    log_determinant = 2 * np.log(np.diagonal(lower)).sum() + 2 * rows * hyperparameters[0]
    value = -0.5 * (fit + log_determinant + rows * math.log(2 * math.pi))
    inverse = linalg.lapack.dpotri(lower.T, lower=0)[0].T
    slopes = np.empty(hyperparameters.size)
    slopes[0] = fit - rows
    of_matrix = np.outer(weights / variance, weights) - inverse
    if is_noisy or noise is not None:
        of_noise = np.diagonal(of_matrix)[::size]
        slopes[0] -= relative @ of_noise
        slopes[1 + dim :] = common / variance * of_noise.sum()
    lengthscale_slopes(kernel, coordinates, size, of_matrix, slopes[1 : 1 + dim])
    if size > 1:
        # The density is that of gradients in u.
        value += count * hyperparameters[1 : 1 + dim].sum()
        explained = (weights * target).reshape(count, size)[:, 1:].sum(axis=0)
        slopes[1 : 1 + dim] += count - explained / variance
    return value, slopes


def fit_hyperparameters(
    kernel: int,
    u: np.ndarray,
    residuals: np.ndarray,
    previous: np.ndarray | None = None,
    noise: np.ndarray | None = None,
    max_iterations: int = 60,
    n_rows: int = N_ROWS,
    noise_start: float | None = None,
) -> tuple[np.ndarray, float]:
    """Maximise the log marginal likelihood by L-BFGS-B; hyperparameters (1 + d,), and its value.

    The search starts from `previous` ones, or from several lengthscales. At most `n_rows` values
    and derivatives, of points evenly spaced in the order that they came, are fitted to. With
    `noise_start`, a standard deviation that all values have beside `noise`, one more hyperparameter
    is found, its log.
    """
    size, count = residuals.shape
    chosen = np.linspace(0, count - 1, min(count, max(2, n_rows // size))).round().astype(int)
    u, residuals = np.ascontiguousarray(u[:, chosen]), residuals[:, chosen]
    noise = None if noise is None else noise[chosen]
    root = math.sqrt(len(u))
    scale = max(math.sqrt(np.mean(residuals[0] ** 2)), SMALLEST_AMPLITUDE)
    lengths = (math.log(LENGTHSCALES[0] * root), math.log(LENGTHSCALES[1] * root))
    amplitude = (math.log(SMALLEST_AMPLITUDE), math.log(1e3 * scale))
    noises = [] if noise_start is None else [math.log(noise_start)]
    bounds = [(math.log(SMALLEST_AMPLITUDE), math.log(scale) + 1.0)] * len(noises)
    lowest, highest = np.array([amplitude, *[lengths] * len(u), *bounds]).T

    def negative(hyperparameters):
        try:
            value, gradient = log_marginal_likelihood(kernel, u, residuals, hyperparameters, noise)
        except linalg.LinAlgError:
            return 1e25, np.zeros(hyperparameters.size)
        return -value, -gradient

    starts = [np.log([scale, *[s * root] * len(u)]) for s in STARTS]
    starts = starts if previous is None else [previous]
    starts = [np.append(start, noises) for start in starts]
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
