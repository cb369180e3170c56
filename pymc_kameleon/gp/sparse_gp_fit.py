"""Fits of a sparse Gaussian process to all evaluations."""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.gp.covariances import (
    N_ROWS,
    correlation_matrix,
    correlations,
    fit_hyperparameters,
    radial,
)
from pymc_kameleon.gp.mean import Mean, confined, constant_mean, fit_quadratic, mean_value
from pymc_kameleon.gp.sparse_gp import (
    KNOWN,
    RATIONAL,
    SMALLEST_JITTER,
    SparseGP,
    Uncertainty,
    basis_functions,
    new_sparse_gp,
)
from pymc_kameleon.gp.triangular_map import TriangularMap, fit_triangular_map, identity_map
from pymc_kameleon.gp.typical_set import (
    LEAST_NOISE,
    TypicalSet,
    around_the_mode,
    clipped_residuals,
    typical_set,
)
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit
from pymc_kameleon.mcmc.coordinates import Standardization

LARGEST_JITTER = 1e-2

FEW_ROWS = 150
"""Values from which it is judged whether to straighten."""

SHIFT = 0.5
"""Lengthscales by which centres lie beside a point whose gradient is known."""

TRUSTED = 0.1
"""Root mean square error of a quadratic that is also trusted where nothing was evaluated."""

BLOCK = 500
"""Points whose gradients are regressed on at a time, so that memory stays bounded."""

SMALLEST_NOISE = 1e-6, 1e-5
"""Least noise where values are exact, and the least relative to the amplitude, for the sake of
rounding."""


class TooFewValues(ValueError):
    """There are fewer finite values than a fit takes."""


def distinct(points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the indices of the last occurrences of the rows of `points`, in order.

    Of the last ones whose `values` (n,) are finite, if those of a point differ in that.
    """
    order = np.argsort(np.isfinite(values), kind="stable")[::-1]
    return np.sort(order[np.unique(points[order], axis=0, return_index=True)[1]])


@jit(fastmath=SIMD, allocates=True)
def choose_centres(kernel, coordinates, importance, size, chosen):
    """Pivoted Cholesky: columns of `coordinates` (d, n) that predict the others worst.

    They are weighed by their `importance` (n,). At most `size` indices are written to `chosen`;
    returns how many: fewer where the rest is predicted to rounding.
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
        if not left[pivot] > SMALLEST_JITTER:
            return count
        chosen[count] = pivot
        for k in range(dim):
            z[k] = coordinates[k, pivot]
        correlations(kernel, z, coordinates, n, 1, correlation)
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


def most_informative(points: np.ndarray, log_densities: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of at most `size` evaluations that predict the others.

    What is far below the typical set counts the less; repeated points, and those without a finite
    log density, are left out.
    """
    finite = np.flatnonzero(np.isfinite(log_densities))
    if not finite.size:
        return finite
    points, values = points[finite], log_densities[finite]
    typical = typical_set(values, points.shape[1])
    _, noise = clipped_residuals(values, np.zeros(len(values)), typical)
    coordinates = np.ascontiguousarray(around_the_mode(points, values).whiten(points))
    chosen = np.empty(min(size, len(values)), dtype=np.int64)
    count = choose_centres(RATIONAL, coordinates, 1.0 / noise, chosen.size, chosen)
    return finite[chosen[:count]]


def fit_sparse_gp(
    points: np.ndarray,
    values: np.ndarray,
    standardization: Standardization,
    max_centres: int,
    previous: np.ndarray | None = None,
    log_prior: np.ndarray | None = None,
    gradients: np.ndarray | None = None,
    typical: TypicalSet | None = None,
    *,
    kernel: int = RATIONAL,
    constant: float | None = None,
    noise_share: float | None = None,
    noise_start: float | None = None,
    max_iterations: tuple[int, int] = (60, 20),
) -> tuple[SparseGP, Uncertainty]:
    """Fit a sparse Gaussian process to all evaluations, and say how uncertain it is.

    `values` (n,) at `points` (n, d), in raw coordinates, are log densities with the prior; -inf and
    NaN are "very low", and of repeated points the last finite one counts. `log_prior` (n,) is
    known, and not to be learnt. `gradients` (n, d) are of what is; they count down to the depth of
    the `typical` set, by default that of a Gaussian below the largest value, as where nothing is in
    the given one; those with a NaN do not.

    The search for hyperparameters begins with `previous` ones (1 + d,); `max_iterations` are those
    of a first search, and of one that begins with others. The prior mean is `constant`, or a
    concave quadratic. A `noise_share` is for values that are to be met exactly, and are not
    straightened: noise of the typical ones, relative to the residuals of the prior mean. With
    `noise_start` they are estimates, whose standard deviation is found from there.

    Raises TooFewValues if no value is finite, and LinAlgError if the points cannot be told apart.
    """
    chosen = distinct(points, values)
    known = np.zeros(len(values)) if log_prior is None else log_prior
    chosen = chosen[np.isfinite(known[chosen])]
    points, values, known = points[chosen], values[chosen], known[chosen]
    if not np.any(np.isfinite(values)):
        raise TooFewValues("none of the log densities is finite: there is nothing to learn from")
    if typical is None or not np.any(typical.depths(values) < typical.depth):
        typical = typical_set(values, points.shape[1])
    u = standardization.whiten(points)
    weights, is_typical = _importance(values, typical, len(u))
    slopes = np.full(u.shape, np.nan)
    if gradients is not None:
        slopes = standardization.factor.T @ gradients[chosen].T
        slopes[:, ~(np.all(np.isfinite(slopes), axis=0) & is_typical)] = np.nan
    data = _Data(
        u, values, known, slopes, weights, typical, is_typical, kernel, constant, noise_share
    )
    residuals, start, iterations = _straightest(data, previous, noise_start, max_iterations)
    hyperparameters, sd = start
    if hyperparameters is None or iterations > 0:
        hyperparameters, sd, _ = residuals.hyperparameters(kernel, *start, iterations)
    amplitude, inverse = math.exp(hyperparameters[0]), np.exp(-hyperparameters[1:])
    z = np.ascontiguousarray(residuals.v * inverse[:, None])
    noise, near = residuals.noise, residuals.near
    importance = 1.0 / noise
    noise = np.hypot(noise, 0.0 if sd is None else sd)
    if noise_share is not None:
        noise = np.maximum(noise, SMALLEST_NOISE[1] * amplitude)
        importance = weights / noise
    rows = [(z, residuals.values, noise)]
    for begin in range(0, len(near), BLOCK):
        block = slice(begin, begin + BLOCK)
        at = near[block]
        slopes, sds = residuals.slopes[:, block].T / inverse, noise[at, None] / inverse
        rows.append((np.ascontiguousarray(z[:, at]), slopes, sds))
    candidates = z
    if len(values) < max_centres:
        candidates, importance = _with_shifted(z, importance, near)
    chosen = np.empty(min(max_centres, len(importance)), dtype=np.int64)
    count = choose_centres(kernel, candidates, importance, chosen.size, chosen)
    centres = np.ascontiguousarray(candidates[:, chosen[:count]])
    whitened, uncertainty, jitter = _ridge(kernel, rows, centres, amplitude)
    factor = uncertainty.factor
    learnt = (values - known)[np.isfinite(values)]
    gp = new_sparse_gp(kernel, len(u))._replace(
        count=np.array([count]),
        standardization=standardization,
        triangular_map=residuals.triangular_map,
        mean=residuals.mean,
        hyperparameters=hyperparameters,
        noise=np.array([0.0 if sd is None else sd]),
        inverse_lengthscales=inverse,
        centres=centres,
        values=_mean_values(residuals.mean, centres / inverse[:, None]) + factor @ whitened,
        weights=linalg.solve_triangular(factor, whitened, lower=True, trans=1, check_finite=False),
        jitter=np.array([jitter]),
        censoring=np.array([learnt.max(), np.inf]),
    )
    return gp, uncertainty


def typical_map(u: np.ndarray, values: np.ndarray, typical: TypicalSet) -> TriangularMap:
    """Straighten the typical ones of the columns of `u` (d, n) with log densities `values` (n,)."""
    weights, is_typical = _importance(values, typical, len(u))
    return fit_triangular_map(u[:, is_typical], weights[is_typical])


def _importance(values, typical, dim):
    """Weights (n,) that fall with the depth, and whether points are typical (n,)."""
    depth = typical.depths(values)
    return (1.0 / (1.0 + depth / dim)) ** 2, depth < typical.depth


class _Data(NamedTuple):
    """What was evaluated, in standardised coordinates u (d, n), and how it is to be fitted.

    `known` (n,) is not to be learnt; `slopes` (d, n) are gradients of the rest, NaN where they are
    not.
    """

    u: np.ndarray
    values: np.ndarray
    known: np.ndarray
    slopes: np.ndarray
    weights: np.ndarray
    typical: TypicalSet
    is_typical: np.ndarray
    kernel: int
    constant: float | None
    noise_share: float | None


class _Residuals(NamedTuple):
    """What the basis functions are to add to a mean at points v (d, n), in straight coordinates.

    Gradients (d, k) are at those whose indices are `near` (k,).
    """

    triangular_map: TriangularMap
    mean: Mean
    v: np.ndarray
    values: np.ndarray
    noise: np.ndarray
    near: np.ndarray
    slopes: np.ndarray

    def hyperparameters(self, kernel, start, noise_start, iterations, n_rows=N_ROWS):
        """Return the most likely ones, noise of estimates, and their log marginal likelihood."""
        at, rows, noise = self.v, self.values[None], self.noise
        if len(self.near) > 1:
            at, noise = self.v[:, self.near], self.noise[self.near]
            rows = np.concatenate([rows[:, self.near], self.slopes])
        found, value = fit_hyperparameters(
            kernel, at, rows, start, noise, iterations, n_rows, noise_start
        )
        if noise_start is None:
            return found, None, value
        return found[:-1], math.exp(found[-1]), value


def _residuals(data, triangular_map):
    near = np.flatnonzero(np.isfinite(data.slopes[0]))
    slopes = np.full(data.u.shape, np.nan)
    slopes[:, near] = triangular_map.gradients_in_v(data.u[:, near], data.slopes[:, near])
    v = triangular_map.to_v(data.u)
    if data.constant is None:
        mean, means = _quadratic_mean(data, v, slopes)
    else:
        mean, means = constant_mean(data.constant, len(v)), np.full(v.shape[1], data.constant)
    values, noise = clipped_residuals(data.values, data.known + means, data.typical)
    if data.noise_share is not None:
        spread = math.sqrt(np.mean(values[data.is_typical] ** 2))
        least = max(data.noise_share * spread, SMALLEST_NOISE[0])
        noise += min(least - LEAST_NOISE, 0.0)
    slopes = slopes[:, near] - (mean.linear[:, None] + mean.quadratic @ v[:, near])
    return _Residuals(triangular_map, mean, v, values, noise, near, slopes)


def _quadratic_mean(data, v, slopes):
    """Fit a concave quadratic, confined unless it is exact, and its values (n,)."""
    finite = np.isfinite(data.values)
    at, weights = v[:, finite], data.weights[finite]
    values, learnt = data.values[finite], (data.values - data.known)[finite]
    mean = fit_quadratic(at, learnt, weights, gradients=slopes[:, finite])
    means, of_typical = _mean_values(mean, v), data.weights[data.is_typical]
    errors = (data.values - data.known - means)[data.is_typical]
    if of_typical @ errors**2 > TRUSTED**2 * of_typical.sum():
        whole = fit_quadratic(at, values, weights) if np.any(data.known) else mean
        mean = confined(mean, whole, v[:, data.is_typical], of_typical)
        means = _mean_values(mean, v)
    return mean, means


def _mean_values(mean, v):
    return np.array([mean_value(mean, row) for row in np.ascontiguousarray(v.T)])


def _straightest(data, previous, noise_start, max_iterations):
    """Straighten if that makes the evaluations more likely; say how to search then, from where."""
    iterations = max_iterations[previous is not None]
    unbent = _residuals(data, identity_map(len(data.u)))
    start = previous, noise_start
    if data.noise_share is not None:
        return unbent, start, iterations
    found = typical_map(data.u, data.values, data.typical)
    if found.mapped.size == 0:
        return unbent, start, iterations
    rivals = unbent, _residuals(data, found)
    # From values alone: the density of a gradient depends on the coordinates.
    alone = [rival._replace(near=rival.near[:0]) for rival in rivals]
    few = max_iterations[1]
    fits = [rival.hyperparameters(data.kernel, *start, few, FEW_ROWS) for rival in alone]
    best = int(fits[1][2] > fits[0][2])
    return rivals[best], fits[best][:2], few


def _with_shifted(z, importance, near):
    """Candidates for centres: the points, and beside those whose gradient is known one a direction.

    Differences of such basis functions are near the derivatives that a gradient is correlated with.
    """
    dim = len(z)
    shifted = [z[:, near] + SHIFT * np.eye(dim)[:, [k]] for k in range(dim)]
    candidates = np.ascontiguousarray(np.concatenate([z, *shifted], axis=1))
    return candidates, np.concatenate([importance, *[0.5 * importance[near]] * dim])


def cholesky_with_jitter(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """Lower Cholesky factor of `matrix`, of unit diagonal, and the least jitter that it takes.

    That is 1e-8, 1e-7, ... or 1e-2; only the lower triangle is read. Raises a LinAlgError beyond.
    """
    diagonal, jitter = np.diagonal(matrix).copy(), SMALLEST_JITTER
    while True:
        matrix[np.diag_indices_from(matrix)] = diagonal + jitter
        try:
            return linalg.cholesky(matrix, lower=True, check_finite=False), jitter
        except linalg.LinAlgError:
            jitter *= 10
            if jitter > LARGEST_JITTER * 1.001:
                raise


def _ridge(kernel, data, centres, amplitude):
    """Weights of the basis functions, whitened (m,).

    `data` lists points z (d, n), what the basis functions are to add there, and how closely: (n,)
    for values, (n, d) for gradients in z. Variance of the process that the centres do not explain
    counts as noise: where they are few, weights that had to follow all values would be wild
    elsewhere. Returns uncertainty and jitter too.
    """
    m = centres.shape[1]
    correlation = np.zeros((m, m))
    correlation_matrix(kernel, centres, 1, correlation)
    factor, jitter = cholesky_with_jitter(correlation)
    gram, moment = np.zeros((m, m)), np.zeros(m)
    for z, residuals, noise in data:
        is_value = residuals.ndim == 1
        basis = np.empty((z.shape[1], 1 if is_value else 1 + len(z), m))
        basis_functions(kernel, z, centres, basis)
        rows = basis[:, 0] if is_value else basis[:, 1:].reshape(-1, m)
        scaled = linalg.solve_triangular(factor, rows.T, lower=True, check_finite=False)
        prior = 1.0 if is_value else radial(kernel, 0.0)[1]
        left = np.maximum(prior - np.sum(scaled**2, axis=0) - KNOWN * jitter, 0.0)
        sds = np.hypot(noise.ravel(), amplitude * np.sqrt(left))
        scaled /= sds
        gram += linalg.blas.dsyrk(1.0, scaled, lower=1)
        moment += scaled @ (residuals.ravel() / sds)
    gram[np.diag_indices(m)] += amplitude**-2
    precision = linalg.cholesky(gram, lower=True, check_finite=False)
    whitened = linalg.cho_solve((precision, True), moment, check_finite=False)
    return whitened, Uncertainty(factor, precision), jitter
