"""Gaussian sites as a function of hyperparameters: constant, or a regression that pilots taught."""

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve

from pymc_kameleon.kernels import Gaussian
from pymc_kameleon.latent_gp.gaussian_sites import Sites
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import dot, solve_lower
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["SiteFunction", "constant_sites", "fit_sites"]

SMALLEST_PRECISION = 1e-10
"""Share of a pilot's mean precision below which a site says nothing, and its logarithm too much."""

LENGTHSCALE, LINEAR_VARIANCE, NOISE_VARIANCE = 2.0, 4.0, 0.01
"""Of the regression, in standardised coordinates, relative to the variance of a parameter."""

_KERNEL = Gaussian()


class SiteFunction(NamedTuple):
    """Sites whose parameters are a regression on standardised hyperparameters u.

    The basis functions are 1, u, and a radial one at each pilot.

    Attributes
    ----------
    coordinates : Standardization
        Of theta.
    radius : array, shape (1,)
        Distance from 0 up to which the regression is followed: further out the sites are those
        at that distance in the same direction, so that nothing is extrapolated.
    pilots : array, shape (P, d)
        Standardised.
    precision : array, shape (b, N)
        Coefficients of the logs of the precisions; b = 1 for constant sites, else 1 + d + P.
    shift : array, shape (b, N)
        Coefficients of the shifts, or of the means.
    has_means : bool array, shape (1,)
        Whether they are those of the means, shift / precision, which do not change with the noise
        of a normal likelihood.
    """

    coordinates: Standardization
    radius: np.ndarray
    pilots: np.ndarray
    precision: np.ndarray
    shift: np.ndarray
    has_means: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"pilots": 0, "precision": 0, "shift": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether there is a coefficient for each basis function."""
        n = len(self.precision)
        return n == len(self.shift) and (n == 1 or n == 1 + self.pilots.shape[1] + len(self.pilots))

    def __call__(self, x: np.ndarray) -> Sites:
        """Sites at the hyperparameters `x` (d,)."""
        if len(self.precision) == 1:
            return Sites(np.exp(self.precision[0]), self.shift[0])
        found = np.zeros((2, self.precision.shape[1]))
        _evaluate_into(*self.coordinates, *self[1:], x.copy(), found)
        return Sites(found[0], found[1])


@jit(fastmath=SIMD)
def _evaluate_into(location, factor, radius, pilots, precision, shift, has_means, x, found):
    """Write precisions and shifts in place of zeros; overwrites `x`."""
    dim, size = x.size, found.shape[1]
    for k in range(dim):
        x[k] -= location[k]
    solve_lower(factor, dim, x)
    distance = math.sqrt(dot(x, x, dim))
    if distance > radius[0]:
        for k in range(dim):
            x[k] *= radius[0] / distance
    for j in range(precision.shape[0]):
        weight = 1.0
        if j > dim:
            squares = 0.0
            for k in range(dim):
                squares += (x[k] - pilots[j - dim - 1, k]) ** 2
            weight = exp(-0.5 * squares / LENGTHSCALE**2)
        elif j > 0:
            weight = x[j - 1]
        for i in range(size):
            found[0, i] += weight * precision[j, i]
            found[1, i] += weight * shift[j, i]
    for i in range(size):
        found[0, i] = exp(found[0, i])
        if has_means[0]:
            found[1, i] *= found[0, i]


def constant_sites(sites: Sites, dim: int) -> SiteFunction:
    """Return sites that are the same at all hyperparameters (d,)."""
    with np.errstate(divide="ignore"):
        logs = np.log(sites.precision)[None]
    return SiteFunction(
        Standardization(np.zeros(dim), np.eye(dim)),
        np.zeros(1),
        np.zeros((0, dim)),
        logs,
        sites.shift[None].copy(),
        np.zeros(1, dtype=np.bool_),
    )


def fit_sites(
    points: np.ndarray,
    precision: np.ndarray,
    shift: np.ndarray,
    coordinates: Standardization,
    has_means: bool = False,
) -> SiteFunction | None:
    """Regress the parameters of sites on hyperparameters, from those at pilot points.

    The posterior mean of a Gaussian process for each parameter, in units of its standard deviation:
    a linear function of u with weights N(0, 4), plus a squared-exponential covariance.

    Parameters
    ----------
    points : array, shape (P, d)
        Hyperparameters.
    precision, shift : array, shape (P, N)
        Of the sites there.
    coordinates : Standardization
        Of the hyperparameters.
    has_means : bool
        Regress the means of the sites and not their shifts.

    Returns
    -------
    SiteFunction or None
        None if there are too few points for a linear function, or no site says anything.
    """
    dim = points.shape[1]
    if len(points) < 1.5 * (1 + dim) or not np.any(precision > 0):
        return None
    u = np.ascontiguousarray(coordinates.whiten(points).T)
    usual = precision.mean(axis=1, keepdims=True)
    usual = np.where(usual > 0, usual, usual.mean())
    precision = np.maximum(precision, SMALLEST_PRECISION * usual)
    parameters = np.hstack([np.log(precision), shift / precision if has_means else shift])
    location = parameters.mean(axis=0)
    linear = np.column_stack([np.ones(len(u)), u])
    covariance = _KERNEL(u, u, LENGTHSCALE) + LINEAR_VARIANCE * linear @ linear.T
    covariance[np.diag_indices_from(covariance)] += NOISE_VARIANCE
    weights = solve(covariance, parameters - location, assume_a="pos")
    coefficients = np.vstack([LINEAR_VARIANCE * linear.T @ weights, weights])
    coefficients[0] += location
    size = precision.shape[1]
    return SiteFunction(
        coordinates,
        np.array([np.sqrt(np.max(np.sum(u**2, axis=1)))]),
        u,
        np.ascontiguousarray(coefficients[:, :size]),
        np.ascontiguousarray(coefficients[:, size:]),
        np.array([has_means]),
    )
