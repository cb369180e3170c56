r"""Prior means of the surrogates: :math:`m(u) = c + b^\top u + \tfrac12 u^\top Q u`.

u are standardised coordinates. The mean is fitted before the hyperparameters.
"""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit_inner

FALL, LEAST_REACH = 0.25, 1.0
"""By how much a confined mean falls, at least, over the reach of the points that it was fitted to,
and how short that is at least, in standardised coordinates."""

LARGEST_FIT = 600
"""Coefficients up to which a quadratic is fitted to few points: 33 dimensions."""

RIDGES = np.geomspace(10.0, 1e-7, 9)
"""Weights of the log density of a standard normal against that of one value."""


class Mean(NamedTuple):
    """Coefficients in standardised coordinates: constant (1,), linear (d,), quadratic (d, d)."""

    constant: np.ndarray
    linear: np.ndarray
    quadratic: np.ndarray


@jit_inner
def mean_value(mean, u):
    """Evaluate the mean at `u` (d,)."""
    total = mean.constant[0]
    for i in range(u.size):
        row = 0.0
        for j in range(u.size):
            row += mean.quadratic[i, j] * u[j]
        total += u[i] * (mean.linear[i] + 0.5 * row)
    return total


@jit_inner
def mean_gradient(mean, u, out):
    """Gradient of the mean in `u`, into `out` (d,)."""
    for i in range(u.size):
        out[i] = mean.linear[i]
        for j in range(u.size):
            out[i] += mean.quadratic[i, j] * u[j]


def constant_mean(constant: float, dim: int) -> Mean:
    """Return the mean that is `constant` everywhere."""
    return Mean(np.array([float(constant)]), np.zeros(dim), np.zeros((dim, dim)))


def n_coefficients(dim: int) -> int:
    """Return the number of coefficients of a quadratic in `dim` dimensions."""
    return 1 + dim + dim * (dim + 1) // 2


def fit_quadratic(
    u: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray,
    largest_curvature: float = 0.0,
    gradients: np.ndarray | None = None,
) -> Mean:
    """Fit a concave quadratic to values (t,) at `u` (d, t), however few there are.

    Ridge regression towards the log density of a standard normal, as strong as leave-one-out errors
    say. `weights` (t,) multiply the errors. Curvatures above `largest_curvature` are cut off, so
    that the mean does not rise without bound where nothing is known, and the rest is fitted again.
    Of `gradients` (d, t), points with a NaN count with their value alone. In many dimensions the
    quadratic is that log density.
    """
    dim, centre = len(u), values.max()
    if n_coefficients(dim) > LARGEST_FIT:
        rest = values + 0.5 * np.sum(u**2, axis=0)
        constant = np.sum(weights**2 * rest) / np.sum(weights**2)
        return Mean(np.array([constant]), np.zeros(dim), -np.eye(dim))
    design, target = _design(u), values - centre + 0.5 * np.sum(u**2, axis=0)
    if gradients is not None:
        known = np.all(np.isfinite(gradients), axis=0)
        slopes = (gradients + u)[:, known]
        design = np.concatenate([design, *_gradient_designs(u[:, known])])
        target = np.concatenate([target, *slopes])
        weights = np.concatenate([weights, *np.tile(weights[known], (dim, 1))])
    coefficients = _ridge_regression(weights[:, None] * design, weights * target)
    matrix = np.zeros((dim, dim))
    matrix[np.triu_indices(dim)] = coefficients[1 + dim :]
    matrix += np.triu(matrix, 1).T - np.eye(dim)
    eigenvalues, vectors = np.linalg.eigh(matrix)
    if eigenvalues[-1] > largest_curvature:
        matrix = (vectors * np.minimum(eigenvalues, largest_curvature)) @ vectors.T
        rest = values - centre - 0.5 * np.sum(u * (matrix @ u), axis=0)
        if gradients is not None:
            rest = np.concatenate([rest, *(gradients - matrix @ u)[:, known]])
        design = weights[:, None] * design[:, : 1 + dim]
        coefficients = np.linalg.lstsq(design, weights * rest, rcond=1e-10)[0]
    return Mean(np.array([coefficients[0] + centre]), coefficients[1 : 1 + dim].copy(), matrix)


def confined(mean: Mean, whole: Mean, u: np.ndarray, weights: np.ndarray) -> Mean:
    """Let a concave mean fall outside of the points (d, t) that it was fitted to.

    Where nothing was evaluated the log density would go on rising, or stay as high, and nothing
    would correct it. Along each axis the largest value is to be no further from the points' centre
    than the furthest of them on that side, their reach, and to fall by `FALL` at least over it:
    that of the mean, or of the `whole` log density, which asks for less. Value and slope at the
    centre stay, and the average over the points.
    """
    weights = weights / weights.sum()
    _, axes = np.linalg.eigh(mean.quadratic)
    along = axes.T @ u
    centre = along @ weights
    deviations = along - centre[:, None]
    variances = deviations**2 @ weights
    missing = np.full(len(u), np.inf)
    for part in (mean, whole):
        slopes = axes.T @ (part.linear + part.quadratic @ (axes @ centre))
        curvatures = np.sum(axes * (part.quadratic @ axes), axis=0)
        furthest = np.max(np.where(slopes < 0.0, -1.0, 1.0)[:, None] * deviations, axis=1)
        reach = np.maximum(np.maximum(furthest, np.sqrt(variances)), LEAST_REACH)
        needed = np.maximum(np.abs(slopes) / reach, 2.0 * FALL / reach**2)
        missing = np.minimum(missing, np.maximum(needed + curvatures, 0.0))
    return Mean(
        mean.constant + 0.5 * np.sum(missing * (variances - centre**2)),
        mean.linear + axes @ (missing * centre),
        mean.quadratic - (axes * missing) @ axes.T,
    )


def _ridge_regression(design, target):
    """Coefficients (p,), with the ridge that predicts each value best from the others."""
    left, singular, right = np.linalg.svd(design, full_matrices=False)
    projected = left.T @ target
    shrinkages = singular**2 / (singular**2 + RIDGES[:, None])
    residuals = target - (shrinkages * projected) @ left.T
    leverages = np.minimum(shrinkages @ (left**2).T, 1.0 - 1e-9)
    best = np.argmin(np.sum((residuals / (1.0 - leverages)) ** 2, axis=1))
    return right.T @ (singular / (singular**2 + RIDGES[best]) * projected)


def _design(u):
    """Differentiate the mean in its coefficients (c, b, upper triangle of Q), shape (t, p)."""
    rows, columns = np.triu_indices(len(u))
    products = np.where(rows == columns, 0.5, 1.0)[:, None] * u[rows] * u[columns]
    return np.concatenate([np.ones((1, u.shape[1])), u, products]).T


def _gradient_designs(u):
    """Differentiate each partial derivative of the mean likewise: d arrays of shape (t, p)."""
    dim, count = u.shape
    designs = np.zeros((dim, count, n_coefficients(dim)))
    for k in range(dim):
        designs[k, :, 1 + k] = 1.0
    for entry, (i, j) in enumerate(zip(*np.triu_indices(dim), strict=True), start=1 + dim):
        designs[i, :, entry], designs[j, :, entry] = u[j], u[i]
    return list(designs)
