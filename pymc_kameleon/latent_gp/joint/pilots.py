"""Approximations of the latent function's posterior at pilot values of its hyperparameters."""

import warnings
from typing import NamedTuple

import numpy as np

from pymc_kameleon.latent_gp.approximations.expectation_propagation import (
    expectation_propagation_approximation,
)
from pymc_kameleon.latent_gp.approximations.laplace import laplace_approximation
from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, Sites

__all__ = ["MOST_PILOTS", "Pilot", "Pilots", "approximate", "no_pilots"]

MOST_PILOTS = 400
"""Approximations that are kept; beyond, the least probable go."""

TOLERANCE, MAX_SWEEPS, N_NODES = 1e-3, 40, 17
"""Of expectation propagation: the sites are exact enough long before they have converged."""

MOST_TOLD = 1e12
"""Precision of a site, in units of the prior's, beyond which log evidences are lost to rounding."""


class Pilot(NamedTuple):
    """Sites, and log p(y | theta) + log p(theta) as they give it, at hyperparameters theta."""

    x: np.ndarray
    sites: Sites
    log_density: float


class Pilots(NamedTuple):
    """What is kept of approximations, one row each: theta, its log density, and the sites."""

    points: np.ndarray
    values: np.ndarray
    precision: np.ndarray
    shift: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("points", "values", "precision", "shift"), 0)

    @property
    def is_consistent(self) -> bool:
        """Whether all rows are complete."""
        return len({len(array) for array in self}) == 1

    def joined(self, new: list[Pilot]) -> "Pilots":
        """Return these and new ones, at most `MOST_PILOTS`."""
        if not new:
            return self
        rows = zip(
            *((p.x, p.log_density, p.sites.precision, p.sites.shift) for p in new), strict=True
        )
        parts = [np.concatenate([old, row]) for old, row in zip(self, rows, strict=True)]
        kept = np.sort(np.argsort(-parts[1])[:MOST_PILOTS])
        return Pilots(*(np.ascontiguousarray(part[kept]) for part in parts))

    def among_the_best(self, depth: float) -> "Pilots":
        """Return those whose log density is within `depth` of the largest."""
        kept = self.values > self.values.max() - depth
        return Pilots(*(part[kept] for part in self))

    def sites_near(self, x: np.ndarray, scale: np.ndarray) -> Sites | None:
        """Sites of the pilot nearest to `x` (d,) in units of `scale` (d,); None without pilots."""
        if len(self.values) == 0:
            return None
        i = int(np.argmin(np.sum(((self.points - x) / scale) ** 2, axis=1)))
        return Sites(self.precision[i], self.shift[i])


def no_pilots(dim: int, size: int) -> Pilots:
    """Return no pilots of `dim` hyperparameters and a function of `size` values."""
    return Pilots(np.zeros((0, dim)), np.zeros(0), np.zeros((0, size)), np.zeros((0, size)))


def approximate(model, x: np.ndarray, method: str, start: Sites | None = None) -> Pilot | None:
    """Approximate p(f | y, theta) at `x` (d,), by "ep" or "laplace" or, where it fails, the latter.

    Without curvature of the likelihood it is always by expectation propagation, which begins at the
    sites `start`. The hyperparameters of the model are set to `x`. None if neither gives a
    Gaussian.
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
        is_logit = getattr(model.likelihood, "logit_labels", None) is not None
        is_curved = getattr(model.likelihood, "has_curvature", True)
        for name in dict.fromkeys([method, "laplace"] if is_curved else ["ep"]):
            try:
                if name == "ep":
                    found = expectation_propagation_approximation(
                        prior,
                        model.likelihood,
                        tolerance=TOLERANCE,
                        max_sweeps=MAX_SWEEPS,
                        n_nodes=None if is_logit else N_NODES,
                        moment_tolerance=TOLERANCE,
                        sites=start,
                    )
                else:
                    found = laplace_approximation(prior, model.likelihood, tolerance=1e-3)
            except (ArithmeticError, ValueError, NotImplementedError):
                continue
            sites, value = found.sites, found.log_evidence + log_prior
            if found.converged and np.isfinite(value) and _are_usable(sites, prior):
                return Pilot(x.copy(), sites, float(value))
    return None


def _are_usable(sites: Sites, prior: Gaussian) -> bool:
    told = sites.precision * np.diagonal(prior.covariance)
    return bool(np.all(told < MOST_TOLD) and np.all(np.isfinite(sites.shift)))
