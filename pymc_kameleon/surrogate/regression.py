r"""Regression of a log-likelihood on all evaluations: a quadratic plus radial basis functions.

.. math:: s(u) = m(u) + \sum_j w_j\, \varphi(\lVert (u - c_j) / \ell \rVert^2)

in standardised coordinates u. It is the posterior mean of a Gaussian process that is a combination
of its covariances with the centres c (subset of regressors), so all evaluations are used and a
gradient costs no more than the centres do.

References
----------
C. E. Rasmussen (2003), Gaussian processes to speed up hybrid Monte Carlo for expensive Bayesian
integrals, Bayesian Statistics 7.
C. E. Rasmussen and C. K. I. Williams (2006), Gaussian Processes for Machine Learning, section
8.3.1.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.layout import floats
from pymc_kameleon.mcmc.linalg import dot, squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.surrogate.covariances import (
    COVARIANCES,
    correlation_matrix,
    correlations,
    radial,
)
from pymc_kameleon.surrogate.marginal_likelihood import fit_hyperparameters
from pymc_kameleon.surrogate.mean import (
    LARGEST_CURVATURE,
    Mean,
    constant_mean,
    fit_confining_mean,
    mean_gradient,
    mean_value,
)

__all__ = [
    "Regression",
    "Uncertainty",
    "choose_centres",
    "compressed",
    "fit_regression",
    "misfits",
    "no_regression",
    "posterior_covariance",
    "regression_gradient",
    "regression_value",
    "typical_depth",
]

RATIONAL = COVARIANCES["rational_quadratic"]

RELATIVE_NOISE = 0.1
"""Standard deviation of the misfit of a value, relative to its depth below the typical set: where
the posterior has no mass the surrogate need only be low."""

LEAST_NOISE = 0.02
"""Standard deviation of the misfit, in the unit of the log density, where the mass is."""

SHIFT = 0.5
"""Lengthscales by which centres lie beside a point whose gradient is known."""

BLOCK = 500
"""Points whose gradients are regressed on at a time, so that memory stays bounded."""


class Regression(NamedTuple):
    """A fitted regression; fixed until the next fit.

    Attributes
    ----------
    standardization : Standardization
        u = factor^-1 (x - location).
    mean : Mean
    inverse_lengthscales : array, shape (d,)
    centres : array, shape (d, m)
        Divided by the lengthscales.
    weights : array, shape (m,)
    hyperparameters : array, shape (1 + d,)
        Logs of the amplitude and of the lengthscales.
    """

    standardization: Standardization
    mean: Mean
    inverse_lengthscales: Annotated[np.ndarray, floats("d")]
    centres: Annotated[np.ndarray, floats("d", "centres")]
    weights: Annotated[np.ndarray, floats("centres")]
    hyperparameters: Annotated[np.ndarray, floats("1 + d")]


class Uncertainty(NamedTuple):
    """What a fit knows of its own errors: two Cholesky factors (m, m), and the amplitude.

    `lower` is that of the covariance of the centres, `precision` that of the weights' precision in
    the coordinates that it whitens.
    """

    lower: np.ndarray
    precision: np.ndarray
    amplitude: float


def no_regression(dim: int) -> Regression:
    """Return the regression of nothing, which is 0 everywhere."""
    return Regression(
        Standardization(np.zeros(dim), np.eye(dim)),
        constant_mean(0.0, dim),
        np.ones(dim),
        np.zeros((dim, 0)),
        np.zeros(0),
        np.zeros(1 + dim),
    )


@jit(fastmath=SIMD)
def _squared_distances(regression, u, z, out):
    """Those of `u` (d,) to the centres, in lengthscales; `z` (d,) is `u` in them, and written."""
    for k in range(u.size):
        z[k] = u[k] * regression.inverse_lengthscales[k]
    squared_distances(z, regression.centres, out.size, out)


@jit(fastmath=SIMD)
def regression_value(regression, u, z, basis):
    """Evaluate the regression at `u` (d,); `z` (d,) and `basis` (m,) are written."""
    _squared_distances(regression, u, z, basis)
    total = 0.0
    for j in range(basis.size):
        total += regression.weights[j] * radial(RATIONAL, basis[j])[0]
    return mean_value(regression.mean, u) + total


@jit(fastmath=SIMD)
def regression_gradient(regression, u, z, basis, out):
    """Gradient of the regression in `u` (d,), into `out` (d,); `z` and `basis` are written."""
    _squared_distances(regression, u, z, basis)
    total = 0.0
    for j in range(basis.size):
        basis[j] = regression.weights[j] * radial(RATIONAL, basis[j])[1]
        total += basis[j]
    mean_gradient(regression.mean, u, out)
    for k in range(u.size):
        pull = z[k] * total - dot(basis, regression.centres[k], basis.size)
        out[k] -= pull * regression.inverse_lengthscales[k]


@jit(allocates=True)
def _basis(coordinates, centres, out):
    """Basis functions at `centres` (d, m) of the columns of `coordinates` (d, n).

    `out` has shape (n, 1, m), or (n, 1 + d, m) for the gradients after the values.
    """
    z = np.empty(coordinates.shape[0])
    for i in range(coordinates.shape[1]):
        for k in range(z.size):
            z[k] = coordinates[k, i]
        correlations(RATIONAL, z, centres, centres.shape[1], 1, out[i])


@jit(fastmath=SIMD, allocates=True)
def choose_centres(coordinates, importance, size, chosen):
    """Pivoted Cholesky: columns that predict the others worst, weighed by their importance.

    Parameters
    ----------
    coordinates : array, shape (d, n)
    importance : array, shape (n,)
    size : int
        At most this many.
    chosen : int64 array, shape (size,)
        Written.

    Returns
    -------
    int
        How many were chosen: fewer where the rest is predicted to rounding.
    """
    dim, n = coordinates.shape
    rows, left = np.zeros((size, n)), np.ones(n)
    z, correlation = np.empty(dim), np.empty((1, n))
    column = correlation[0]
    for count in range(size):
        best, pivot = -1.0, 0
        for i in range(n):
            if left[i] * importance[i] > best:
                best, pivot = left[i] * importance[i], i
        if not left[pivot] > 1e-8:
            return count
        chosen[count] = pivot
        for k in range(dim):
            z[k] = coordinates[k, pivot]
        correlations(RATIONAL, z, coordinates, n, 1, correlation)
        for c in range(count):
            factor = rows[c, pivot]
            for i in range(n):
                column[i] -= factor * rows[c, i]
        root = math.sqrt(left[pivot])
        for i in range(n):
            rows[count, i] = column[i] / root
            left[i] -= rows[count, i] * rows[count, i]
        left[pivot] = 0.0
    return size


def typical_depth(dim: int) -> float:
    """Depth below the largest value within which a Gaussian posterior has nearly all its mass."""
    return 0.5 * dim + 3.0 * math.sqrt(0.5 * dim) + 6.0


def compressed(depth: np.ndarray, typical: float) -> np.ndarray:
    """Depths below the largest value, bent beyond that of the typical set towards twice that.

    They say "very low", as -inf and NaN do; how low changes no decision.
    """
    excess = np.maximum(depth - typical, 0.0) / typical
    return np.minimum(depth, typical) + typical * -np.expm1(-excess)


def misfits(values: np.ndarray, expected: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the radial basis functions are to add to the prior mean, and how closely.

    The difference of the compressed value; but where that is far below the typical set, and what
    is expected further, nothing.

    Parameters
    ----------
    values, expected : array, shape (n,)
        Log densities, at least one of them finite, and log prior plus mean.
    dim : int

    Returns
    -------
    residuals, noise : arrays, shape (n,)
    """
    finite = np.isfinite(values)
    best, typical = values[finite].max(), typical_depth(dim)
    depth = np.where(finite, best - np.where(finite, values, best), np.inf)
    low = compressed(depth, typical)
    differences = best - low - expected
    weights = np.where(differences > 0.0, np.clip(2.0 - depth / typical, 0.0, 1.0), 1.0)
    residuals = weights * differences
    return residuals, LEAST_NOISE + RELATIVE_NOISE * np.maximum(0.0, low - 0.5 * typical)


def fit_regression(
    points: np.ndarray,
    values: np.ndarray,
    standardization: Standardization,
    max_centers: int,
    previous: Regression | None = None,
    log_prior: np.ndarray | None = None,
    gradients: np.ndarray | None = None,
) -> tuple[Regression, Uncertainty]:
    """Fit a regression to all evaluations, and say how uncertain it is.

    Parameters
    ----------
    points : array, shape (n, d)
        Raw coordinates.
    values : array, shape (n,)
        Log densities, with the prior; -inf and NaN are "very low".
    standardization : Standardization
    max_centers : int
    previous : Regression, optional
        The search for lengthscales begins with its.
    log_prior : array, shape (n,), optional
        What is not to be learnt, because it is known; 0 by default.
    gradients : array, shape (n, d), optional
        Of what is to be learnt, in raw coordinates. They count down to the depth of the typical
        set; those with a NaN do not.

    Raises
    ------
    ValueError
        If no value is finite.
    numpy.linalg.LinAlgError
        If the points cannot be told apart.
    """
    points, first = np.unique(points, axis=0, return_index=True)
    values = values[first]
    known = np.zeros(len(values)) if log_prior is None else log_prior[first]
    possible = np.isfinite(known)
    points, values, known = points[possible], values[possible], known[possible]
    if not np.any(np.isfinite(values)):
        raise ValueError("none of the log densities is finite: there is nothing to learn from")
    dim = points.shape[1]
    u = standardization.whiten(points)
    finite = np.isfinite(values)
    depth = values[finite].max() - values[finite]
    learnt, weights = (values - known)[finite], 1.0 / (1.0 + depth / dim) ** 2
    confined = np.ptp(known) > 0.0  # by the prior
    curvature = 0.0 if confined else LARGEST_CURVATURE
    slopes = np.full(u.shape, np.nan)
    if gradients is not None:
        slopes = standardization.factor.T @ gradients[first][possible].T
        counts = np.all(np.isfinite(slopes), axis=0) & finite
        counts[finite] &= depth < typical_depth(dim)
        slopes[:, ~counts] = np.nan
    mean = fit_confining_mean(u[:, finite], learnt, weights, curvature, slopes[:, finite])
    means = np.array([mean_value(mean, row) for row in np.ascontiguousarray(u.T)])
    residuals, noise = misfits(values, known + means, dim)
    near = np.flatnonzero(np.isfinite(slopes[0]))
    slopes = slopes[:, near] - (mean.linear[:, None] + mean.quadratic @ u[:, near])
    at, rows, sds = u, residuals[None], noise
    if len(near) > 1:
        at, rows, sds = u[:, near], np.concatenate([rows[:, near], slopes]), noise[near]
    start, iterations = (None, 60) if previous is None else (previous.hyperparameters, 20)
    hyperparameters = fit_hyperparameters(RATIONAL, at, rows, start, sds, iterations)
    inverse = np.exp(-hyperparameters[1:])
    z = np.ascontiguousarray(u * inverse[:, None])
    data = [(z, residuals, noise)]
    data += _slope_data(z[:, near], slopes.T / inverse, noise[near, None] / inverse)
    candidates, importance = z, 1.0 / noise
    if len(values) < max_centers:
        candidates, importance = _with_shifted(z, importance, near)
    chosen = np.empty(min(max_centers, len(importance)), dtype=np.int64)
    count = choose_centres(candidates, importance, chosen.size, chosen)
    centres = np.ascontiguousarray(candidates[:, chosen[:count]])
    weights, uncertainty = _ridge(data, centres, math.exp(hyperparameters[0]))
    regression = Regression(standardization, mean, inverse, centres, weights, hyperparameters)
    return regression, uncertainty


def _slope_data(z, residuals, noise):
    """Return gradients of the residual in z, as `_ridge` takes them, block by block."""
    blocks = [slice(begin, begin + BLOCK) for begin in range(0, z.shape[1], BLOCK)]
    return [(np.ascontiguousarray(z[:, b]), residuals[b], noise[b]) for b in blocks]


def _with_shifted(z, importance, near):
    """Candidates for centres: the points, and beside those whose gradient is known one a direction.

    Differences of such basis functions are near the derivatives that a gradient is correlated with.
    """
    dim = len(z)
    shifted = [z[:, near] + SHIFT * np.eye(dim)[:, [k]] for k in range(dim)]
    candidates = np.ascontiguousarray(np.concatenate([z, *shifted], axis=1))
    return candidates, np.concatenate([importance, *[0.5 * importance[near]] * dim])


def _ridge(data, centres, amplitude):
    """Weights (m,) of the basis functions: the posterior mean of the subset of regressors.

    Parameters
    ----------
    data : list of (z, residuals, noise)
        Points (d, n), what the basis functions are to add there, and how closely: arrays of shape
        (n,) for values, (n, d) for gradients in z.
    centres : array, shape (d, m)
    amplitude : float
    """
    m = centres.shape[1]
    covariance = np.zeros((m, m))
    correlation_matrix(RATIONAL, centres, 1, covariance)
    covariance[np.diag_indices(m)] += 1e-8
    lower = linalg.cholesky(covariance, lower=True, check_finite=False)
    gram, moment = np.zeros((m, m)), np.zeros(m)
    for z, residuals, noise in data:
        is_value = residuals.ndim == 1
        basis = np.empty((z.shape[1], 1 if is_value else 1 + len(z), m))
        _basis(z, centres, basis)
        rows = basis[:, 0] if is_value else basis[:, 1:].reshape(-1, m)
        sds, targets = noise.ravel(), residuals.ravel()
        scaled = linalg.solve_triangular(lower, rows.T / sds, lower=True, check_finite=False)
        gram += linalg.blas.dsyrk(1.0, scaled, lower=1)
        moment += scaled @ (targets / sds)
    gram[np.diag_indices(m)] += amplitude**-2
    precision = linalg.cholesky(gram, lower=True, check_finite=False)
    solved = linalg.cho_solve((precision, True), moment, check_finite=False)
    weights = linalg.solve_triangular(lower, solved, lower=True, trans=1, check_finite=False)
    return weights, Uncertainty(lower, precision, amplitude)


def posterior_covariance(
    regression: Regression, uncertainty: Uncertainty, u: np.ndarray
) -> np.ndarray:
    """Covariance (n, n) of the log density at the columns of `u` (d, n), given all evaluations.

    What the centres do not see keeps its prior variance, so it grows away from the evaluations.
    """
    z = np.ascontiguousarray(u * regression.inverse_lengthscales[:, None])
    basis = np.empty((z.shape[1], 1, regression.weights.size))
    _basis(z, regression.centres, basis)
    prior = np.zeros((z.shape[1], z.shape[1]))
    correlation_matrix(RATIONAL, z, 1, prior)
    prior += np.tril(prior, -1).T
    seen = linalg.solve_triangular(uncertainty.lower, basis[:, 0].T, lower=True, check_finite=False)
    left = linalg.solve_triangular(uncertainty.precision, seen, lower=True, check_finite=False)
    return uncertainty.amplitude**2 * (prior - seen.T @ seen) + left.T @ left
