"""Gaussian approximation of the posterior of a latent function."""

from dataclasses import dataclass, field
from functools import cached_property
from math import factorial

import numpy as np

from pymc_kameleon.latent_gp.approximations.binary_likelihoods import log_ndtr_derivatives
from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, SiteProduct, Sites, with_sites
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood

__all__ = ["GaussianApproximation", "approximation_of"]


@dataclass(frozen=True)
class GaussianApproximation:
    """N(f; m, K) exp(sum_n l_n(f_n)) replaced by a Gaussian: the prior times Gaussian sites.

    Attributes
    ----------
    prior : Gaussian
        N(m, K).
    likelihood : FactorisingLikelihood
    sites : Sites
        One Gaussian factor exp(shift f - precision f^2 / 2) instead of each exp(l_n), no
        precision negative: see `n_floored`.
    log_evidence : float
        Approximate log of the integral of N(f; m, K) exp(sum_n l_n(f_n)).
    method : str
        "Laplace" or "expectation propagation".
    converged : bool
    n_iterations : int
        Newton steps, or sweeps over the sites.
    residual : float
        How far from a fixed point the iterations ended, in posterior standard deviations.
    n_floored : int
        Sites whose precision came out negative, as happens where l_n is not log-concave, and was
        set to 0 with the posterior mean kept. `log_evidence` is that of the negative precisions.
    """

    prior: Gaussian = field(repr=False)
    likelihood: FactorisingLikelihood = field(repr=False)
    sites: Sites = field(repr=False)
    log_evidence: float
    method: str
    converged: bool
    n_iterations: int
    residual: float
    n_floored: int = 0

    def __repr__(self) -> str:
        outcome = "converged" if self.converged else "NOT converged"
        floored = f", {self.n_floored} site precisions floored at 0" if self.n_floored else ""
        return (
            f"GaussianApproximation({self.method}, N={self.prior.size}, "
            f"log_evidence={self.log_evidence:.4f}, {outcome} in {self.n_iterations} iterations, "
            f"residual {self.residual:.1g}{floored})"
        )

    @cached_property
    def posterior(self) -> Gaussian:
        """The prior times the sites, normalised; computed where it is asked for."""
        return with_sites(self.prior, self.sites)[0]

    @cached_property
    def _product(self):
        return SiteProduct(self.prior, self.sites)

    def marginals(self) -> tuple[np.ndarray, np.ndarray]:
        """Posterior means (N,) and standard deviations (N,)."""
        return self._product.mean, np.sqrt(self._product.variance)

    def cavities(self) -> tuple[np.ndarray, np.ndarray]:
        """Means (N,) and variances (N,) of the posterior's marginals without their own site.

        Where precisions were floored these are not the cavities of the last sweep.
        """
        return self._product.cavities()

    def second_order_log_evidence(self) -> float:
        r"""Log evidence of expectation propagation with its leading correction, for probit.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If the method is not expectation propagation, or the likelihood not probit.

        Notes
        -----
        For cavities N(m, v) it adds

        .. math:: \frac12 \sum_{m \ne n} \sum_{l=3}^4 \frac{\kappa_{lm} \kappa_{ln}}{l!}
            \left(\frac{\Sigma_{mn}}{\Sigma_{mm} \Sigma_{nn}}\right)^l,\quad
            \kappa_l = v^l \partial^l_m \log \Phi(y m / \sqrt{1 + v})

        what two sites at a time say of the cumulants that a Gaussian leaves out (Opper, Paquet &
        Winther 2013).
        """
        labels = self.likelihood.probit_labels
        if labels is None or self.method == "Laplace":
            raise ValueError(
                "second_order_log_evidence is for expectation propagation with a probit "
                f"likelihood; this is {self.method}"
                + (", of another likelihood." if labels is None else ".")
            )
        means, variances = self.cavities()
        scale = labels / np.sqrt(1.0 + variances)
        derivatives = log_ndtr_derivatives(scale * means)
        own = self._product.variance
        ratio = self.posterior.covariance / np.outer(own, own)
        ratio[np.diag_indices_from(ratio)] = 0.0
        correction = 0.0
        for order in (3, 4):
            cumulants = (variances * scale) ** order * derivatives[order]
            correction += cumulants @ ratio**order @ cumulants / factorial(order)
        return self.log_evidence + 0.5 * float(correction)


def approximation_of(
    prior: Gaussian, likelihood, sites: Sites, mean: np.ndarray, **found
) -> GaussianApproximation:
    """Make the result of sites of either sign, which make a Gaussian of this mean (N,)."""
    n_floored = int(np.sum(sites.precision < 0))
    return GaussianApproximation(
        prior, likelihood, sites.floored(mean), n_floored=n_floored, **found
    )
