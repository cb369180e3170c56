"""Gaussian approximation of the posterior of a latent function."""

from dataclasses import dataclass, field
from functools import cached_property
from math import factorial

import numpy as np
from scipy.linalg import cholesky, lapack, solve_triangular
from scipy.linalg.blas import dtrmm, dtrmv

from pymc_kameleon.latent_gp.approximations.tilted_moments import log_ndtr_derivatives
from pymc_kameleon.latent_gp.gaussian_algebra import (
    LEAST_ROOT,
    Gaussian,
    Sites,
    cholesky_overwriting,
    inner_matrix,
    with_sites,
)
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood
from pymc_kameleon.mcmc.numba_bridge import jit

__all__ = [
    "GaussianApproximation",
    "SiteProduct",
    "approximation_of",
    "floored",
    "whitened_precision_factor",
]


LEAST_TOLD = 1e-6
"""Share of its precision that a site has, from which 1 - (1 - share) keeps 10 digits."""


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
    slope : array, shape (N,)
        a = K^-1 (mean - m) = shift - W mean.
    half_log_determinant : float
        log |I + K W| / 2.

    Raises
    ------
    scipy.linalg.LinAlgError
        If the negative precisions outweigh the rest, so that the product is no Gaussian.

    Notes
    -----
    For precisions W = S^2 that are not negative, with A = I + S K S (Rasmussen & Williams 2006,
    section 3.4.3), the mean is m + K a for a = s - S A^-1 S K s and s = shift - W m. Where
    s = S t + u, a = u + S A^-1 (t - S K u), which loses no digits where sites are precise; u is
    that of the sites of which S is too small to divide by. The variances are (1 - diag A^-1) / W.
    Where a site says so little that this loses digits, it is that of K - K S A^-1 S K.

    For others, with K = L L^T and B B^T = I + L^T W L, the covariance is V^T V for V = B^-1 L^T:
    variances are sums of squares.
    """

    def __init__(self, prior: Gaussian, sites: Sites):
        self.prior, self.sites = prior, sites
        shift = sites.shift - sites.precision * prior.mean
        if np.any(sites.precision < 0.0):
            roots = self._covariance_roots
            self.half_log_determinant = float(np.log(np.diagonal(self._factor)).sum())
            self.mean = prior.mean + (roots @ shift) @ roots
            self.slope = sites.shift - sites.precision * self.mean
            self.variance = np.einsum("ij,ij->j", roots, roots)
            return
        scale, covariance = np.sqrt(sites.precision), prior.covariance
        upper = cholesky_overwriting(inner_matrix(covariance, sites)).T
        self.half_log_determinant = float(np.log(np.diagonal(upper)).sum())
        inverse, _ = lapack.dtrtri(upper, lower=0, overwrite_c=1)  # A = upper^T upper
        divides = scale > LEAST_ROOT
        t = np.where(divides, shift / np.where(divides, scale, 1.0), 0.0)
        u = np.where(divides, 0.0, shift)
        solved = dtrmv(inverse, dtrmv(inverse, t - scale * (covariance @ u), trans=1))
        self.slope = u + scale * solved
        # Of a precise site K a loses what the site itself says.
        is_precise = sites.precision * np.diagonal(covariance) > 1.0
        by_site = (shift - self.slope) / np.where(is_precise, sites.precision, 1.0)
        self.mean = prior.mean + np.where(is_precise, by_site, covariance @ self.slope)
        told = 1.0 - _column_squares(inverse.T)
        is_told = told > LEAST_TOLD
        self.variance = told / np.where(is_told, sites.precision, 1.0)
        if not np.all(is_told):
            columns = covariance[:, ~is_told]
            explained = dtrmm(1.0, inverse, scale[:, None] * columns, trans_a=1)
            left = np.diagonal(covariance)[~is_told] - np.einsum("ij,ij->j", explained, explained)
            self.variance[~is_told] = left

    @cached_property
    def _factor(self):
        """B, an array (N, N)."""
        return whitened_precision_factor(self.prior, self.sites)

    @cached_property
    def _covariance_roots(self):
        """V, an array (N, N)."""
        return solve_triangular(self._factor, self.prior.cholesky.T, lower=True, check_finite=False)

    def covariance(self) -> np.ndarray:
        """V^T V, an array (N, N)."""
        return self._covariance_roots.T @ self._covariance_roots


@jit(allocates=True)
def _column_squares(lower):
    """Return the sums of squares of the columns of a lower triangular matrix."""
    squares = np.zeros(lower.shape[0])
    for i in range(lower.shape[0]):
        for j in range(i + 1):
            squares[j] += lower[i, j] * lower[i, j]
    return squares


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
        log_evidence=log_evidence,
        method=method,
        converged=converged,
        n_iterations=n_iterations,
        residual=residual,
        n_floored=int(np.sum(sites.precision < 0)),
    )
