r"""Regression of a log-likelihood on all evaluations: a quadratic plus radial basis functions.

.. math:: s(u) = m(v) + \sum_j w_j\, \varphi(\lVert (v - c_j) / \ell \rVert^2)

in standardised coordinates u, of which v(u) are those where the posterior is straight. It is the
posterior mean of a Gaussian process that is a combination of its covariances with the centres c
(subset of regressors), so all evaluations are used and a gradient costs no more than the centres
do.

References
----------
C. E. Rasmussen (2003), Gaussian processes to speed up hybrid Monte Carlo for expensive Bayesian
integrals, Bayesian Statistics 7.
C. E. Rasmussen and C. K. I. Williams (2006), Gaussian Processes for Machine Learning, section
8.3.1.
"""

from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.linalg import dot, squared_distances
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit
from pymc_kameleon.surrogate.covariances import (
    COVARIANCES,
    correlation_matrix,
    correlations,
    radial,
)
from pymc_kameleon.surrogate.mean import Mean, constant_mean, mean_gradient, mean_value
from pymc_kameleon.surrogate.straightening import (
    Straightening,
    bend_gradient,
    no_straightening,
    straighten,
    straighten_all,
)

__all__ = [
    "RATIONAL",
    "Regression",
    "Uncertainty",
    "basis_functions",
    "no_regression",
    "posterior_covariance",
    "regression_value",
    "regression_value_and_gradient",
]

RATIONAL = COVARIANCES["rational_quadratic"]
"""The covariance."""


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
    straightening: Straightening
    mean: Mean
    inverse_lengthscales: np.ndarray
    centres: np.ndarray
    weights: np.ndarray
    hyperparameters: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"centres": 1, "weights": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether every centre has a weight."""
        return self.centres.shape[1] == self.weights.size


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
        no_straightening(dim),
        constant_mean(0.0, dim),
        np.ones(dim),
        np.zeros((dim, 0)),
        np.zeros(0),
        np.zeros(1 + dim),
    )


@jit(fastmath=SIMD)
def _squared_distances(regression, v, z, out):
    """Those of `v` (d,) to the centres, in lengthscales; `z` (d,) is `v` in them, and written."""
    for k in range(v.size):
        z[k] = v[k] * regression.inverse_lengthscales[k]
    squared_distances(z, regression.centres, out.size, out)


@jit(fastmath=SIMD)
def regression_value(regression, u, v, z, basis):
    """Evaluate the regression at `u` (d,); `v`, `z` (d,) and `basis` (m,) are written."""
    straighten(regression.straightening, u, v)
    _squared_distances(regression, v, z, basis)
    total = 0.0
    for j in range(basis.size):
        total += regression.weights[j] * radial(RATIONAL, basis[j])[0]
    return mean_value(regression.mean, v) + total


@jit(fastmath=SIMD)
def regression_value_and_gradient(regression, u, v, z, basis, out):
    """Evaluate likewise, and write the gradient in `u` into `out` (d,)."""
    straighten(regression.straightening, u, v)
    _squared_distances(regression, v, z, basis)
    value, total = mean_value(regression.mean, v), 0.0
    for j in range(basis.size):
        height, slope = radial(RATIONAL, basis[j])[:2]
        value += regression.weights[j] * height
        basis[j] = regression.weights[j] * slope
        total += basis[j]
    for k in range(u.size):
        pull = z[k] * total - dot(basis, regression.centres[k], basis.size)
        z[k] = -pull * regression.inverse_lengthscales[k]
    mean_gradient(regression.mean, v, out)
    for k in range(u.size):
        v[k] = z[k] + out[k]
    bend_gradient(regression.straightening, u, v, out)
    return value


@jit(allocates=True)
def basis_functions(coordinates, centres, out):
    """Basis functions at `centres` (d, m) of the columns of `coordinates` (d, n).

    `out` has shape (n, 1, m), or (n, 1 + d, m) for the gradients after the values.
    """
    z = np.empty(coordinates.shape[0])
    for i in range(coordinates.shape[1]):
        for k in range(z.size):
            z[k] = coordinates[k, i]
        correlations(RATIONAL, z, centres, centres.shape[1], 1, out[i])


def posterior_covariance(
    regression: Regression, uncertainty: Uncertainty, u: np.ndarray
) -> np.ndarray:
    """Covariance (n, n) of the log density at the columns of `u` (d, n), given all evaluations.

    What the centres do not see keeps its prior variance, so it grows away from the evaluations.
    """
    v = straighten_all(regression.straightening, u)
    z = np.ascontiguousarray(v * regression.inverse_lengthscales[:, None])
    basis = np.empty((z.shape[1], 1, regression.weights.size))
    basis_functions(z, regression.centres, basis)
    prior = np.zeros((z.shape[1], z.shape[1]))
    correlation_matrix(RATIONAL, z, 1, prior)
    prior += np.tril(prior, -1).T
    seen = linalg.solve_triangular(uncertainty.lower, basis[:, 0].T, lower=True, check_finite=False)
    left = linalg.solve_triangular(uncertainty.precision, seen, lower=True, check_finite=False)
    return uncertainty.amplitude**2 * (prior - seen.T @ seen) + left.T @ left
