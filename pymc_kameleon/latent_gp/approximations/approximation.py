"""Gaussian approximation of the posterior of a latent function."""

from dataclasses import dataclass, field
from math import factorial

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from pymc_kameleon.latent_gp.approximations.tilted_moments import log_ndtr_derivatives
from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, Sites, with_sites
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood

__all__ = [
    "GaussianApproximation",
    "SiteProduct",
    "approximation_of",
    "floored",
    "whitened_precision_factor",
]


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
    posterior : Gaussian
        The prior times the sites, normalised.
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
    posterior: Gaussian = field(repr=False)
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

    def marginals(self) -> tuple[np.ndarray, np.ndarray]:
        """Posterior means (N,) and standard deviations (N,)."""
        # From the factor rather than the diagonal of the covariance, which is a difference.
        return self.posterior.mean, np.sqrt((self.posterior.cholesky**2).sum(axis=1))

    def cavities(self) -> tuple[np.ndarray, np.ndarray]:
        """Means (N,) and variances (N,) of the posterior's marginals without their own site.

        Where precisions were floored these are not the cavities of the last sweep.
        """
        means, deviations = self.marginals()
        variances = deviations**2 / (1.0 - self.sites.precision * deviations**2)
        return means - variances * (self.sites.shift - self.sites.precision * means), variances

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
        _, deviations = self.marginals()
        ratio = self.posterior.covariance / np.outer(deviations**2, deviations**2)
        ratio[np.diag_indices_from(ratio)] = 0.0
        correction = 0.0
        for order in (3, 4):
            cumulants = (variances * scale) ** order * derivatives[order]
            correction += cumulants @ ratio**order @ cumulants / factorial(order)
        return self.log_evidence + 0.5 * float(correction)


class SiteProduct:
    """Marginals and normaliser of a Gaussian times sites of either sign.

    Parameters
    ----------
    prior : Gaussian
    sites : Sites

    Attributes
    ----------
    mean, variance : array, shape (N,)
        Marginals of the product.
    half_log_determinant : float
        log |I + K diag(precision)| / 2.

    Raises
    ------
    scipy.linalg.LinAlgError
        If the negative precisions outweigh the rest, so that the product is no Gaussian.

    Notes
    -----
    With K = L L^T and A A^T = I + L^T diag(precision) L, the covariance is V^T V for V = A^-1 L^T:
    variances are sums of squares, for negative precisions as well.
    """

    def __init__(self, prior: Gaussian, sites: Sites):
        factor = whitened_precision_factor(prior, sites)
        self.roots = solve_triangular(factor, prior.cholesky.T, lower=True, check_finite=False)
        shift = sites.shift - sites.precision * prior.mean
        self.mean = prior.mean + (self.roots @ shift) @ self.roots
        self.variance = np.einsum("ij,ij->j", self.roots, self.roots)
        self.half_log_determinant = float(np.log(np.diagonal(factor)).sum())

    def covariance(self) -> np.ndarray:
        """V^T V, an array (N, N)."""
        return self.roots.T @ self.roots


def whitened_precision_factor(prior: Gaussian, sites: Sites) -> np.ndarray:
    """Lower Cholesky factor (N, N) of I + L^T diag(precision) L, with K = L L^T.

    It is that of the precision of the prior times the sites in the coordinates L^-1 (f - m).

    Raises
    ------
    scipy.linalg.LinAlgError
        If the product is no Gaussian.
    """
    inner = _gram(prior.cholesky, sites.precision)
    inner[np.diag_indices_from(inner)] += 1.0
    return cholesky(inner, lower=True, overwrite_a=True, check_finite=False)


def _gram(factor, precision):
    """`factor`.T @ diag(`precision`) @ `factor`."""
    positive = np.sqrt(np.maximum(precision, 0.0))[:, None] * factor
    gram = positive.T @ positive
    is_negative = precision < 0
    if np.any(is_negative):
        negative = np.sqrt(-precision[is_negative])[:, None] * factor[is_negative]
        gram -= negative.T @ negative
    return gram


def floored(sites: Sites, mean: np.ndarray) -> Sites:
    """Set the negative precisions to 0 and keep the mean (N,) of the prior times these sites."""
    floor = np.maximum(sites.precision, 0.0)
    return Sites(floor, sites.shift + (floor - sites.precision) * mean)


def approximation_of(
    prior: Gaussian,
    likelihood,
    sites: Sites,
    mean: np.ndarray,
    *,
    log_evidence: float,
    method: str,
    converged: bool,
    n_iterations: int,
    residual: float,
) -> GaussianApproximation:
    """Make the result, with the negative precisions set to 0.

    Parameters
    ----------
    prior : Gaussian
    likelihood : FactorisingLikelihood
    sites : Sites
        Of either sign.
    mean : array, shape (N,)
        Mean of the prior times these sites; it stays when precisions are set to 0, because
        K^-1 (mean - m) = shift - precision mean is kept.
    log_evidence, method, converged, n_iterations, residual
        Of the result.
    """
    kept = floored(sites, mean)
    return GaussianApproximation(
        prior=prior,
        likelihood=likelihood,
        sites=kept,
        posterior=with_sites(prior, kept)[0],
        log_evidence=log_evidence,
        method=method,
        converged=converged,
        n_iterations=n_iterations,
        residual=residual,
        n_floored=int(np.sum(sites.precision < 0)),
    )
