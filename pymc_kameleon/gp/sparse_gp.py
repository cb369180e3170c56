r"""A Gaussian process that knows of all evaluations of a log density through some centres.

.. math:: s(u) = m(v) + \sum_j w_j\, \varphi(\lVert (v - c_j) / \ell \rVert^2)

in standardised coordinates u, of which v(u) are those where the posterior is straight. The weights
are those of the fully independent training conditional (Quiñonero-Candela & Rasmussen 2005, A
unifying view of sparse approximate Gaussian process regression, JMLR 6), so all evaluations are
used, each as far as functions of the centres can follow it, and a value and its gradient cost no
more than the centres do. With a centre at each of them it is the textbook's process.

The variance is that of the process given its values at the centres. With :math:`\Delta = z - z'` in
coordinates z divided by the lengthscales, :math:`\sigma_1 = -2\varphi'` and :math:`\sigma_2 =
4\varphi''`, covariances of values f and gradients g (Solak, Murray-Smith, Leithead, Leith &
Rasmussen 2002) are, over the squared amplitude,

.. math:: \mathrm{Cov}(f, f') = \varphi,\quad \mathrm{Cov}(f, g') = \sigma_1 \Delta,\quad
          \mathrm{Cov}(g, g') = \sigma_1 I - \sigma_2 \Delta \Delta^\top.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.gp.covariances import (
    COVARIANCES,
    correlation_matrix,
    correlations,
    radial,
)
from pymc_kameleon.gp.mean import Mean, constant_mean, mean_gradient, mean_value
from pymc_kameleon.gp.triangular_map import (
    TriangularMap,
    gradient_in_u,
    identity_map,
    map_to_v,
)
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit, jit_inner
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.linalg import (
    dot,
    solve_lower,
    solve_lower_rows,
    solve_upper,
    squared_distances,
)

RATIONAL = COVARIANCES["rational_quadratic"]
"""The covariance of trajectories: a constant in their loops, which are vectorised then."""

SMALLEST_JITTER = 1e-8

KNOWN = 2.0
"""A value is known already if its variance is below this times the jitter, which is the variance at
a centre, to rounding."""


class MeanFunction(NamedTuple):
    """What trajectories take of a `SparseGP`: calls that are given all of it take longer."""

    standardization: Standardization
    triangular_map: TriangularMap
    mean: Mean
    hyperparameters: np.ndarray
    inverse_lengthscales: np.ndarray
    centres: np.ndarray
    weights: np.ndarray


class SparseGP(NamedTuple):
    """Centres with their weights; arrays have room for as many as there may be.

    `count` centres are in use, divided by the lengthscales; the mean is that of v; hyperparameters
    are logs of the amplitude and of the lengthscales; `noise` (1,) is the standard deviation of
    values that are estimates, 0 of exact ones. `values` are those of the process at the
    centres, and `factor` is the Cholesky factor of the correlations of these, with `jitter` on the
    diagonal; it is empty where no variance is asked for. `censoring` has the largest value that was
    learnt, and the depth below it from which values are censored.
    """

    kernel: int
    count: np.ndarray  # type: ignore[assignment]
    standardization: Standardization
    triangular_map: TriangularMap
    mean: Mean
    hyperparameters: np.ndarray
    noise: np.ndarray
    inverse_lengthscales: np.ndarray
    centres: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    factor: np.ndarray
    jitter: np.ndarray
    censoring: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field: none where there is a factor."""
        return {} if len(self.factor) else {"centres": 1, "values": 0, "weights": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether there is room for as many centres as are counted."""
        size = self.values.size
        has_room = self.weights.size == self.centres.shape[1] == size >= self.count[0] >= 0
        return bool(has_room and len(self.factor) in (0, size))

    def mean_function(self) -> MeanFunction:
        """Return the parts that its mean has, where all centres are in use."""
        return MeanFunction(*(getattr(self, name) for name in MeanFunction._fields))

    @property
    def has_variance(self) -> bool:
        """Whether there is room for a factor."""
        return len(self.factor) == self.values.size


class Uncertainty(NamedTuple):
    """Cholesky factors (m, m) of a fit, which say how uncertain it is.

    That of the correlations of the centres, and of the precision of the weights that it whitens.
    """

    factor: np.ndarray
    precision: np.ndarray


def new_sparse_gp(
    kernel: int, dim: int, capacity: int = 0, depth: float = np.inf, *, has_variance: bool = False
) -> SparseGP:
    """Return a process without centres, of mean 0 and unit amplitude, in raw coordinates."""
    return SparseGP(
        kernel=kernel,
        count=np.zeros(1, np.int64),
        standardization=Standardization(np.zeros(dim), np.eye(dim)),
        triangular_map=identity_map(dim),
        mean=constant_mean(0.0, dim),
        hyperparameters=np.zeros(1 + dim),
        noise=np.zeros(1),
        inverse_lengthscales=np.ones(dim),
        centres=np.zeros((dim, capacity)),
        values=np.zeros(capacity),
        weights=np.zeros(capacity),
        factor=np.zeros((capacity, capacity) if has_variance else (0, 0)),
        jitter=np.array([SMALLEST_JITTER]),
        censoring=np.array([-np.inf, depth]),
    )


@jit_inner(fastmath=SIMD)
def _distances(gp, u, v, z, out):
    """Those of `u` (d,) to the centres, in lengthscales, squared; `v` and `z` (d,) are written."""
    map_to_v(gp.triangular_map, u, v)
    for k in range(v.size):
        z[k] = v[k] * gp.inverse_lengthscales[k]
    squared_distances(z, gp.centres, out.size, out)


@jit_inner(fastmath=SIMD)
def value_at(gp, u, v, z, basis):
    """Mean at `u` (d,), for the rational quadratic covariance; `v`, `z` and `basis` are written."""
    _distances(gp, u, v, z, basis)
    total = 0.0
    for j in range(basis.size):
        total += gp.weights[j] * radial(RATIONAL, basis[j])[0]
    return mean_value(gp.mean, v) + total


@jit(allocates=True)
def mean_at(gp, x):
    """Mean at `x` (d,), raw, of a `MeanFunction` with the rational quadratic covariance."""
    u, v, z = np.empty(x.size), np.empty(x.size), np.empty(x.size)
    standardize(gp.standardization, x, u)
    return value_at(gp, u, v, z, np.empty(gp.weights.size))


@jit_inner(fastmath=SIMD)
def value_and_gradient_at(gp, u, v, z, basis, out):
    """Evaluate likewise, and write the gradient in `u` into `out` (d,)."""
    _distances(gp, u, v, z, basis)
    count, value, total = basis.size, mean_value(gp.mean, v), 0.0
    for j in range(count):
        height, slope = radial(RATIONAL, basis[j])[:2]
        value += gp.weights[j] * height
        basis[j] = gp.weights[j] * slope
        total += basis[j]
    for k in range(u.size):
        pull = z[k] * total - dot(basis, gp.centres[k], count)
        z[k] = -pull * gp.inverse_lengthscales[k]
    mean_gradient(gp.mean, v, out)
    for k in range(u.size):
        v[k] = z[k] + out[k]
    gradient_in_u(gp.triangular_map, u, v, out)
    return value


@jit_inner
def _predicted(gp, x, u, v, z, basis):
    """Mean at `x` (d,), raw, and 1 - its variance over the prior's; `basis` becomes L^-1 k."""
    standardize(gp.standardization, x, u)
    _distances(gp, u, v, z, basis)
    mean = mean_value(gp.mean, v)
    for j in range(basis.size):
        basis[j] = radial(gp.kernel, basis[j])[0]
    mean += dot(basis, gp.weights, basis.size)
    solve_lower(gp.factor, basis.size, basis)
    return mean, dot(basis, basis, basis.size)


@jit(allocates=True)
def predict(gp, x):
    """Mean and variance at a point `x` (d,), in raw coordinates, in O(m^2); never negative."""
    dim = x.size
    basis = np.empty(gp.count[0])
    mean, explained = _predicted(gp, x, np.empty(dim), np.empty(dim), np.empty(dim), basis)
    return mean, math.exp(2.0 * gp.hyperparameters[0]) * max(0.0, 1.0 - explained)


@jit_inner
def _in_raw_coordinates(gp, u, gradient, spare):
    """Gradient in z at `u` to raw coordinates, in place; `spare` (d,) is overwritten."""
    for k in range(u.size):
        spare[k] = gradient[k] * gp.inverse_lengthscales[k]
    gradient_in_u(gp.triangular_map, u, spare, gradient)
    solve_upper(gp.standardization.factor, u.size, gradient)


@jit(allocates=True)
def predict_with_gradient(gp, x, gradient_mean, cross_covariance, gradient_covariance):
    """Mean and variance at `x` (d,), raw, in O(m^2 (1 + d)), and what is known of the gradient.

    Its mean and its covariance with the value, both (d,), and its covariance (d, d), are written.
    """
    dim, count = x.size, gp.count[0]
    u, v, z, spare = np.empty(dim), np.empty(dim), np.empty(dim), np.empty(dim)
    rows = np.empty((1 + dim, count))
    standardize(gp.standardization, x, u)
    _distances(gp, u, v, z, rows[0])
    correlations(gp.kernel, z, gp.centres, count, 1, rows)
    mean = mean_value(gp.mean, v) + dot(rows[0], gp.weights, count)
    mean_gradient(gp.mean, v, gradient_mean)
    for k in range(dim):
        gradient_mean[k] /= gp.inverse_lengthscales[k]
        gradient_mean[k] += dot(rows[1 + k], gp.weights, count)
    solve_lower_rows(gp.factor, count, rows)
    amplitude = math.exp(2.0 * gp.hyperparameters[0])
    slope = radial(gp.kernel, 0.0)[1]
    for k in range(dim):
        cross_covariance[k] = -amplitude * dot(rows[0], rows[1 + k], count)
        for i in range(dim):
            prior = slope if i == k else 0.0
            covariance = prior - dot(rows[1 + k], rows[1 + i], count)
            gradient_covariance[k, i] = amplitude * covariance
    _in_raw_coordinates(gp, u, gradient_mean, spare)
    _in_raw_coordinates(gp, u, cross_covariance, spare)
    for k in range(dim):
        _in_raw_coordinates(gp, u, gradient_covariance[k], spare)
    # Rows are done; the matrix is symmetric after the columns are.
    column = np.empty(dim)
    for k in range(dim):
        for i in range(dim):
            column[i] = gradient_covariance[i, k]
        _in_raw_coordinates(gp, u, column, spare)
        for i in range(dim):
            gradient_covariance[i, k] = column[i]
    return mean, amplitude * max(0.0, 1.0 - dot(rows[0], rows[0], count))


@jit
def log_surrogate(gp, x):
    r"""Log of the expected likelihood :math:`\mu + \kappa/2` (Benavoli et al., eq. 3), bounded.

    It is large where the process knows nothing: such proposals are let through and learnt.
    """
    mean, variance = predict(gp, x)
    return bounded(gp, mean, variance)


@jit_inner
def bounded(gp, mean, variance):
    r"""Return :math:`S = \min(\mu + \kappa/2, \text{largest value learnt})`.

    Beyond the largest value S would let nothing more through, and the second stage divides by what
    was promised: a chain would leave the points that it has learnt with probability
    :math:`e^{-\kappa/2}`.
    """
    promised = mean + 0.5 * variance
    return min(promised, gp.censoring[0]) if gp.count[0] > 0 else promised


@jit(allocates=True)
def add_centre(gp, x, value):
    """Learn the `value` at a point `x` (d,) between two fits, by a centre there, in O(m^2).

    What is below the depth of censoring, infinite or NaN enters as if it were at that depth: a
    log-likelihood falls off cliffs, and a smooth process that interpolates them rings for many
    lengthscales around. Returns False if there is no room or the process knows the value already.
    """
    dim, count = x.size, gp.count[0]
    lowest = gp.censoring[0] - gp.censoring[1]
    if not (value > lowest and value < np.inf):
        value = lowest
    if count == gp.values.size or value == -np.inf:
        return False
    z, basis = np.empty(dim), np.empty(count)
    mean, explained = _predicted(gp, x, np.empty(dim), np.empty(dim), z, basis)
    # Not the opposite test: it must fail for NaN.
    if not 1.0 - explained > KNOWN * gp.jitter[0]:
        return False
    relative_noise = gp.noise[0] ** 2 * math.exp(-2.0 * gp.hyperparameters[0])
    pivot = 1.0 + gp.jitter[0] + relative_noise - explained
    weight = (value - mean) / pivot
    for j in range(count):
        gp.factor[count, j] = basis[j]
    gp.factor[count, count] = math.sqrt(pivot)
    solve_upper(gp.factor, count, basis)
    for j in range(count):
        gp.weights[j] -= weight * basis[j]
    for k in range(dim):
        gp.centres[k, count] = z[k]
    gp.weights[count], gp.values[count] = weight, value
    gp.count[0] = count + 1
    gp.censoring[0] = max(gp.censoring[0], value)
    return True


@jit
def follow(gp, value):
    """Let the prior mean, a constant, be `value`, in O(m^2): the paper's is the current one."""
    gp.mean.constant[0] = value
    count = gp.count[0]
    for j in range(count):
        gp.weights[j] = gp.values[j] - value
    solve_lower(gp.factor, count, gp.weights)
    solve_upper(gp.factor, count, gp.weights)


@jit(allocates=True)
def basis_functions(kernel, coordinates, centres, out):
    """Basis functions at `centres` of the columns of `coordinates`: `out` (n, 1 or 1 + d, m)."""
    z = np.empty(coordinates.shape[0])
    for i in range(coordinates.shape[1]):
        for k in range(z.size):
            z[k] = coordinates[k, i]
        correlations(kernel, z, centres, centres.shape[1], 1, out[i])


def posterior_covariance(gp: SparseGP, uncertainty: Uncertainty, u: np.ndarray) -> np.ndarray:
    """Covariance (n, n) of the values at the columns of `u` (d, n), given all evaluations."""
    z = np.ascontiguousarray(gp.triangular_map.to_v(u) * gp.inverse_lengthscales[:, None])
    basis = np.empty((z.shape[1], 1, gp.weights.size))
    basis_functions(gp.kernel, z, gp.centres, basis)
    prior = np.zeros((z.shape[1], z.shape[1]))
    correlation_matrix(gp.kernel, z, 1, prior)
    prior += np.tril(prior, -1).T
    factor, precision = uncertainty
    seen = linalg.solve_triangular(factor, basis[:, 0].T, lower=True, check_finite=False)
    left = linalg.solve_triangular(precision, seen, lower=True, check_finite=False)
    return np.exp(2.0 * gp.hyperparameters[0]) * (prior - seen.T @ seen) + left.T @ left
