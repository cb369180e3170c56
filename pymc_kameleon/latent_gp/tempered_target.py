"""The targets of all samplers of a latent function: a Gaussian times a tempered likelihood."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, Sites, with_sites

__all__ = ["FactorisingLikelihood", "TemperedTarget", "annealed_from_prior_form"]


class FactorisingLikelihood(Protocol):
    """Log likelihood sum_n l_n(f_n) of the values (N,) of a latent function.

    `size` is N, and `probit_labels` (N,) are the labels, -1 and +1, if l_n is log Phi(y_n f_n) for
    every n, else None.
    """

    size: int
    probit_labels: np.ndarray | None

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n; -inf or NaN where it is not finite."""

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n (N,) of each element."""

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and the first three derivatives: an array (4, N)."""


@dataclass(frozen=True)
class TemperedTarget:
    """Density proportional to base(x) exp(scale sum_n (l_n(x_n) - log site_n(x_n))).

    `scale` is the inverse temperature, 0 to 1; `sites` what the base has taken from the likelihood
    already, and gives back (None is nothing).
    """

    base: Gaussian
    likelihood: FactorisingLikelihood
    scale: float = 1.0
    sites: Sites | None = None

    def log_ratio(self, x: np.ndarray) -> float:
        """Log of target over base at `x` (N,), without a constant; -inf where not finite."""
        total = self.likelihood.value(x)
        if self.sites is not None:
            total -= self.sites.elementwise(x).sum()
        total = float(self.scale * total) if self.scale > 0 else 0.0
        return total if np.isfinite(total) else -np.inf

    def log_ratio_terms(self, x: np.ndarray) -> np.ndarray:
        """Elementwise values and first three derivatives of the log ratio: an array (4, N)."""
        terms = np.array(self.likelihood.terms(x), dtype=float)
        if self.sites is not None:
            terms[0] -= self.sites.elementwise(x)
            terms[1] -= self.sites.shift - self.sites.precision * x
            terms[2] += self.sites.precision
        return self.scale * terms


def annealed_from_prior_form(
    prior: Gaussian, likelihood, sites: Sites, beta: float
) -> TemperedTarget:
    """Write a temperature from prior x sites to the posterior as a Gaussian times likelihood^beta.

    A log-concave likelihood then has a non-negative curvature at every temperature, which the
    Riemannian metric needs.
    """
    gaussian, _ = with_sites(prior, sites.scaled(1.0 - beta))
    return TemperedTarget(gaussian, likelihood, beta)
