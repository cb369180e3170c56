"""Gaussian sites as a function of hyperparameters: constant, or a quadratic that pilots taught."""

from functools import cache
from typing import Annotated, NamedTuple

import numpy as np
from scipy.linalg.blas import dtrsv

from pymc_kameleon.latent_gp.gaussian_algebra import Sites
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.layout import flags, floats

__all__ = ["SiteFunction", "constant_sites", "fit_sites"]

SMALLEST_PRECISION = 1e-10
"""Share of the mean precision below which a site says nothing, and its logarithm too much."""


class SiteFunction(NamedTuple):
    """Sites whose parameters are polynomials in standardised hyperparameters u.

    Attributes
    ----------
    coordinates : Standardization
        Of theta.
    radius : array, shape (1,)
        Distance from 0 up to which the polynomials are followed: further out the sites are those
        at that distance in the same direction, so that nothing is extrapolated.
    precision : array, shape (b, N)
        Coefficients of the logs of the precisions; b = 1 for constant sites.
    shift : array, shape (b, N)
        Coefficients of the shifts, or of the means.
    has_means : bool array, shape (1,)
        Whether they are those of the means, shift / precision, which do not change with the noise
        of a normal likelihood.
    """

    coordinates: Standardization
    radius: Annotated[np.ndarray, floats(1)]
    precision: Annotated[np.ndarray, floats("basis", "N")]
    shift: Annotated[np.ndarray, floats("basis", "N")]
    has_means: Annotated[np.ndarray, flags(1)]

    def __call__(self, x: np.ndarray) -> Sites:
        """Sites at the hyperparameters `x` (d,)."""
        if len(self.precision) == 1:
            return Sites(np.exp(self.precision[0]), self.shift[0])
        coordinates = self.coordinates
        u = dtrsv(coordinates.factor.T, x - coordinates.location, lower=0, trans=1)
        distance = np.sqrt(u @ u)
        if distance > self.radius[0]:
            u *= self.radius[0] / distance
        basis = _basis(u)
        precision, shift = np.exp(basis @ self.precision), basis @ self.shift
        return Sites(precision, precision * shift if self.has_means[0] else shift)


def constant_sites(sites: Sites, dim: int) -> SiteFunction:
    """Return sites that are the same at all hyperparameters (d,)."""
    with np.errstate(divide="ignore"):
        logs = np.log(sites.precision)[None]
    return SiteFunction(
        Standardization(np.zeros(dim), np.eye(dim)),
        np.zeros(1),
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
    """Fit quadratics, or linear functions where points are few, to the sites at pilot points.

    Parameters
    ----------
    points : array, shape (P, d)
        Hyperparameters.
    precision, shift : array, shape (P, N)
        Of the sites there.
    coordinates : Standardization
        Of the hyperparameters.
    has_means : bool
        Fit the means of the sites and not their shifts.

    Returns
    -------
    SiteFunction or None
        None if there are too few points for a linear function.
    """
    u = coordinates.whiten(points).T
    basis = _basis(u)
    dim = points.shape[1]
    if len(points) < 1.5 * basis.shape[1]:
        basis = basis[:, : 1 + dim]
    if len(points) < 1.5 * basis.shape[1]:
        return None
    floor = SMALLEST_PRECISION * float(np.max(precision.mean(axis=0)))
    precision = np.maximum(precision, floor)
    logs, shift = np.log(precision), shift / precision if has_means else shift
    found, *_ = np.linalg.lstsq(basis, np.hstack([logs, shift]), rcond=1e-10)
    coefficients = np.zeros((_basis(u[:1]).shape[1], found.shape[1]))
    coefficients[: len(found)] = found
    size = precision.shape[1]
    return SiteFunction(
        coordinates,
        np.array([np.sqrt(np.max(np.sum(u**2, axis=1)))]),
        np.ascontiguousarray(coefficients[:, :size]),
        np.ascontiguousarray(coefficients[:, size:]),
        np.array([has_means]),
    )


def _basis(u):
    """1, u and the products of its entries for `u` (..., d): an array (..., b)."""
    rows, columns = _pairs(u.shape[-1])
    products = u[..., rows] * u[..., columns]
    return np.concatenate([np.ones((*u.shape[:-1], 1)), u, products], axis=-1)


@cache
def _pairs(dim):
    return np.triu_indices(dim)
