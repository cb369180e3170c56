"""Gaussian sites as a function of the hyperparameters, fitted to those of pilots."""

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve

from pymc_kameleon.gp.covariances import COVARIANCES
from pymc_kameleon.gp.sparse_gp import basis_functions
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import dot

SMALLEST_PRECISION = 1e-10
"""Share of a pilot's mean precision below which a site says nothing, and its logarithm too much."""

LEAST_SHARE = 0.1
"""Share of what it says on average below which a site that says nothing at some pilots does not
fall."""

LENGTHSCALE, LINEAR_VARIANCE, NOISE_VARIANCE = 2.0, 4.0, 0.01
"""Of the regression, in standardised coordinates, relative to the variance of a parameter."""


class SiteFunction(NamedTuple):
    """Sites whose parameters are a Gaussian process of standardised hyperparameters u.

    The basis functions are 1, u, and a radial one at each of `pilots` (d, P), standardised, over
    the lengthscale. `precision` and `shift` (b, N) are coefficients of the logs of the precisions,
    and of the shifts and what else sites of blocks have, b = 1 for constant sites, else 1 + d + P.
    Where `has_means` (1,) the second are those of the means, which do not change with the noise of
    a normal likelihood. Further out than `radius` (1,) the sites are those at that distance in the
    same direction: nothing is extrapolated.
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
        return {"pilots": 1, "precision": 0, "shift": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether there is a coefficient for each basis function."""
        n = len(self.precision)
        return n == len(self.shift) and (n == 1 or n == 1 + sum(self.pilots.shape))

    def __call__(self, x: np.ndarray) -> Sites:
        """Sites at the hyperparameters `x` (d,)."""
        if len(self.precision) == 1:
            return Sites(np.exp(self.precision[0]), self.shift[0])
        found = Sites(np.zeros(self.precision.shape[1]), np.zeros(self.shift.shape[1]))
        _sites_into(*self, x, np.empty_like(x), found.precision, found.shift)
        return found


@jit(fastmath=SIMD)
def _sites_into(coordinates, radius, pilots, precision, shift, has_means, x, u, found, shifts):
    """Write precisions and shifts at `x` (d,) in place of zeros; u (d,) is overwritten."""
    dim = x.size
    standardize(coordinates, x, u)
    distance = math.sqrt(dot(u, u, dim))
    if distance > radius[0]:
        for k in range(dim):
            u[k] *= radius[0] / distance
    for j in range(precision.shape[0]):
        weight = 1.0
        if j > dim:
            squared = 0.0
            for k in range(dim):
                squared += (u[k] / LENGTHSCALE - pilots[k, j - dim - 1]) ** 2
            weight = exp(-0.5 * squared)
        elif j > 0:
            weight = u[j - 1]
        for i in range(found.size):
            found[i] += weight * precision[j, i]
        for i in range(shifts.size):
            shifts[i] += weight * shift[j, i]
    for i in range(found.size):
        found[i] = exp(found[i])
        if has_means[0]:
            shifts[i] *= found[i]


def _radial(u, pilots):
    """Squared-exponential basis functions (n, P) of the columns of `u` (d, n)."""
    out = np.empty((u.shape[1], 1, pilots.shape[1]))
    basis_functions(COVARIANCES["gaussian"], u / LENGTHSCALE, pilots, out)
    return out[:, 0]


def constant_sites(sites: Sites, dim: int) -> SiteFunction:
    """Return sites that are the same at all hyperparameters (d,)."""
    with np.errstate(divide="ignore"):
        logs = np.log(sites.precision)[None]
    return SiteFunction(
        Standardization(np.zeros(dim), np.eye(dim)),
        np.zeros(1),
        np.zeros((dim, 0)),
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
    """Regress parameters of sites, both (P, N), on the hyperparameters of pilot `points` (P, d).

    The posterior mean of a Gaussian process for each parameter, in units of its standard deviation:
    a linear function of u with weights N(0, 4), plus a squared-exponential covariance. None if
    there are too few points for a linear function, or no site says anything.
    """
    dim = points.shape[1]
    if len(points) < 1.5 * (1 + dim) or not np.any(precision > 0):
        return None
    u = coordinates.whiten(points)
    usual = precision.mean(axis=1, keepdims=True)
    usual = np.where(usual > 0, usual, usual.mean())
    # A logarithm that falls far at some pilots would rise as far between others.
    shares = (precision / usual).mean(axis=0)
    least = np.where(np.any(precision <= 0, axis=0), LEAST_SHARE * shares, 0.0)
    precision = np.maximum(precision, np.maximum(least, SMALLEST_PRECISION) * usual)
    parameters = np.hstack([np.log(precision), shift / precision if has_means else shift])
    location = parameters.mean(axis=0)
    linear, pilots = np.column_stack([np.ones(len(points)), u.T]), u / LENGTHSCALE
    covariance = _radial(u, pilots) + LINEAR_VARIANCE * linear @ linear.T
    covariance[np.diag_indices_from(covariance)] += NOISE_VARIANCE
    weights = solve(covariance, parameters - location, assume_a="pos")
    coefficients = np.vstack([LINEAR_VARIANCE * linear.T @ weights, weights])
    coefficients[0] += location
    size = precision.shape[1]
    return SiteFunction(
        coordinates,
        np.array([np.sqrt(np.max(np.sum(u**2, axis=0)))]),
        pilots,
        np.ascontiguousarray(coefficients[:, :size]),
        np.ascontiguousarray(coefficients[:, size:]),
        np.array([has_means]),
    )
