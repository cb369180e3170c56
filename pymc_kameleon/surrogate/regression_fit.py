"""Fits of the regression of `SurrogateHMCStep` to all evaluations."""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.surrogate.covariances import correlation_matrix, correlations
from pymc_kameleon.surrogate.depth import TypicalSet, misfits, typical_set
from pymc_kameleon.surrogate.marginal_likelihood import N_ROWS, fit_hyperparameters
from pymc_kameleon.surrogate.mean import (
    Mean,
    confined,
    fit_concave_mean,
    mean_value,
)
from pymc_kameleon.surrogate.regression import RATIONAL, Regression, Uncertainty, basis_functions
from pymc_kameleon.surrogate.straightening import (
    Straightening,
    fit_straightening,
    no_straightening,
    straighten_all,
    straightened_slopes,
)

__all__ = [
    "choose_centres",
    "fit_regression",
    "typical_straightening",
]

FEW_ROWS = 150
"""Values from which it is judged whether to straighten."""

SHIFT = 0.5
"""Lengthscales by which centres lie beside a point whose gradient is known."""

TRUSTED = 0.1
"""Root mean square error of a quadratic that is also trusted where nothing was evaluated."""

BLOCK = 500
"""Points whose gradients are regressed on at a time, so that memory stays bounded."""


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


def fit_regression(
    points: np.ndarray,
    values: np.ndarray,
    standardization: Standardization,
    max_centers: int,
    previous: Regression | None = None,
    log_prior: np.ndarray | None = None,
    gradients: np.ndarray | None = None,
    typical: TypicalSet | None = None,
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
    typical : TypicalSet, optional
        By default that of a Gaussian below the largest value.

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
    if typical is None:
        typical = typical_set(values, points.shape[1])
    u = standardization.whiten(points)
    weights, is_typical = _importance(values, typical, len(u))
    slopes = np.full(u.shape, np.nan)
    if gradients is not None:
        slopes = standardization.factor.T @ gradients[first][possible].T
        slopes[:, ~(np.all(np.isfinite(slopes), axis=0) & is_typical)] = np.nan
    data = _Data(u, values, known, slopes, weights, typical, is_typical)
    residuals, start, iterations = _straightest(data, previous)
    hyperparameters, _ = residuals.hyperparameters(start, iterations)
    inverse = np.exp(-hyperparameters[1:])
    z = np.ascontiguousarray(residuals.v * inverse[:, None])
    noise, near = residuals.noise, residuals.near
    rows = [(z, residuals.values, noise)]
    rows += _slope_rows(z[:, near], residuals.slopes.T / inverse, noise[near, None] / inverse)
    candidates, importance = z, 1.0 / noise
    if len(values) < max_centers:
        candidates, importance = _with_shifted(z, importance, near)
    chosen = np.empty(min(max_centers, len(importance)), dtype=np.int64)
    count = choose_centres(candidates, importance, chosen.size, chosen)
    centres = np.ascontiguousarray(candidates[:, chosen[:count]])
    weights, uncertainty = _ridge(rows, centres, math.exp(hyperparameters[0]))
    regression = Regression(
        standardization,
        residuals.straightening,
        residuals.mean,
        inverse,
        centres,
        weights,
        hyperparameters,
    )
    return regression, uncertainty


def typical_straightening(u: np.ndarray, values: np.ndarray, typical: TypicalSet) -> Straightening:
    """Straighten the typical ones of the columns of `u` (d, n) with log densities `values` (n,)."""
    weights, is_typical = _importance(values, typical, len(u))
    return fit_straightening(u[:, is_typical], weights[is_typical])


def _importance(values, typical, dim):
    """Weights (n,) that fall with the depth, and whether points are typical (n,)."""
    depth = typical.depths(values)
    return (1.0 / (1.0 + depth / dim)) ** 2, depth < typical.depth


class _Data(NamedTuple):
    """What was evaluated, in standardised coordinates u.

    Points u (d, n), log densities (n,), what is known of them (n,), gradients of the rest (d, n),
    NaN where they are not to be learnt, weights (n,), what log densities are typical, and which of
    these are (n,).
    """

    u: np.ndarray
    values: np.ndarray
    known: np.ndarray
    slopes: np.ndarray
    weights: np.ndarray
    typical: TypicalSet
    is_typical: np.ndarray


class _Residuals(NamedTuple):
    """What the radial basis functions are to add to a mean, in straight coordinates v.

    Values (n,) at all points v (d, n), with their noise (n,), and gradients (d, k) at those whose
    indices are `near` (k,).
    """

    straightening: Straightening
    mean: Mean
    v: np.ndarray
    values: np.ndarray
    noise: np.ndarray
    near: np.ndarray
    slopes: np.ndarray

    def hyperparameters(self, start, iterations, n_rows=N_ROWS):
        """Return the most likely ones, and their log marginal likelihood."""
        at, rows, noise = self.v, self.values[None], self.noise
        if len(self.near) > 1:
            at, noise = self.v[:, self.near], self.noise[self.near]
            rows = np.concatenate([rows[:, self.near], self.slopes])
        return fit_hyperparameters(RATIONAL, at, rows, start, noise, iterations, n_rows)


def _residuals(data, straightening):
    finite = np.isfinite(data.values)
    near = np.flatnonzero(np.isfinite(data.slopes[0]))
    slopes = np.full(data.u.shape, np.nan)
    slopes[:, near] = straightened_slopes(straightening, data.u[:, near], data.slopes[:, near])
    v = straighten_all(straightening, data.u)
    at, weights = v[:, finite], data.weights[finite]
    values, learnt = data.values[finite], (data.values - data.known)[finite]
    mean = fit_concave_mean(at, learnt, weights, gradients=slopes[:, finite])
    means, of_typical = _mean_values(mean, v), data.weights[data.is_typical]
    errors = (data.values - data.known - means)[data.is_typical]
    if of_typical @ errors**2 > TRUSTED**2 * of_typical.sum():
        whole = fit_concave_mean(at, values, weights) if np.any(data.known) else mean
        mean = confined(mean, whole, v[:, data.is_typical], of_typical)
        means = _mean_values(mean, v)
    values, noise = misfits(data.values, data.known + means, data.typical)
    slopes = slopes[:, near] - (mean.linear[:, None] + mean.quadratic @ v[:, near])
    return _Residuals(straightening, mean, v, values, noise, near, slopes)


def _mean_values(mean, v):
    return np.array([mean_value(mean, row) for row in np.ascontiguousarray(v.T)])


def _straightest(data, previous):
    """Straighten, if that makes the evaluations more likely under the Gaussian process.

    Returns the residuals, and where and how long to search for hyperparameters.
    """
    dim = len(data.u)
    start, iterations = (None, 60) if previous is None else (previous.hyperparameters, 20)
    found = typical_straightening(data.u, data.values, data.typical)
    unbent = _residuals(data, no_straightening(dim))
    if found.bent.size == 0:
        return unbent, start, iterations
    rivals = unbent, _residuals(data, found)
    # From values alone: the density of a gradient depends on the coordinates.
    alone = [rival._replace(near=rival.near[:0]) for rival in rivals]
    fits = [rival.hyperparameters(start, 20, FEW_ROWS) for rival in alone]
    best = int(fits[1][1] > fits[0][1])
    return rivals[best], fits[best][0], 20


def _slope_rows(z, residuals, noise):
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
        basis_functions(z, centres, basis)
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
