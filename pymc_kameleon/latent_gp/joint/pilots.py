"""Approximations of the latent function's posterior at pilot values of its hyperparameters."""

import warnings
from typing import NamedTuple

import numpy as np

from pymc_kameleon.latent_gp.approximations.expectation_propagation import (
    expectation_propagation_approximation,
)
from pymc_kameleon.latent_gp.approximations.laplace import laplace_approximation
from pymc_kameleon.latent_gp.gaussian_algebra import Sites

__all__ = ["Pilot", "approximate"]

TOLERANCE, MAX_SWEEPS = 1e-3, 40
"""Of expectation propagation: the sites are exact enough long before they have converged."""


class Pilot(NamedTuple):
    """Sites, and log p(y | theta) + log p(theta) as they give it, at hyperparameters theta."""

    x: np.ndarray
    sites: Sites
    log_density: float


def approximate(model, x: np.ndarray, method: str, start: Sites | None = None) -> Pilot | None:
    """Approximate p(f | y, theta) at `x` (d,), by `method` or, where it fails, by Laplace's.

    Parameters
    ----------
    model : HyperparameterModel
        Its hyperparameters are set to `x`.
    x : array, shape (d,)
    method : {"ep", "laplace"}
    start : Sites, optional
        Of a point nearby, where expectation propagation begins.

    Returns
    -------
    Pilot or None
        None if neither gives a Gaussian.
    """
    log_prior = model.log_prior(x)
    if not np.isfinite(log_prior):
        return None
    model.set_hyperparameters(x)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", UserWarning)
        try:
            prior = model.prior().gaussian
        except (ArithmeticError, ValueError):
            return None
        for name in dict.fromkeys([method, "laplace"]):
            try:
                if name == "ep":
                    found = expectation_propagation_approximation(
                        prior,
                        model.likelihood,
                        tolerance=TOLERANCE,
                        max_sweeps=MAX_SWEEPS,
                        sites=start,
                    )
                else:
                    found = laplace_approximation(prior, model.likelihood, tolerance=1e-3)
            except (ArithmeticError, ValueError, NotImplementedError):
                continue
            sites, value = found.sites, found.log_evidence + log_prior
            if found.converged and np.isfinite(value) and _are_finite(sites):
                return Pilot(x.copy(), sites, float(value))
    return None


def _are_finite(sites: Sites) -> bool:
    return bool(np.all(np.isfinite(sites.precision)) and np.all(np.isfinite(sites.shift)))
