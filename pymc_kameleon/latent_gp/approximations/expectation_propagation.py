"""Expectation propagation: Gaussian sites that match the moments of each likelihood term.

Minka (2001), in the notation of Rasmussen & Williams (2006), section 3.6.
"""

import numpy as np
from scipy.linalg import LinAlgError

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.latent_gp.approximations.approximation import (
    GaussianApproximation,
    approximation_of,
)
from pymc_kameleon.latent_gp.approximations.binary_likelihoods import TiltedMoments, probit_moments
from pymc_kameleon.latent_gp.approximations.quadrature import quadrature_moments
from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, SiteProduct, Sites
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood
from pymc_kameleon.validation import checked_integer, checked_number, checked_share

__all__ = ["PropagationState", "best_seen", "expectation_propagation_approximation"]

SMALLEST_SHARE = 1e-3
"""Share of an update below which a sweep makes no progress."""

SHORT_SHARE = 0.02
"""Share of an update below which it is made though it is far worse than the sites before."""


def expectation_propagation_approximation(
    prior: Gaussian,
    likelihood: FactorisingLikelihood,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-6,
    max_sweeps: int = 200,
    n_nodes: int | None = 33,
    moment_tolerance: float = 1e-6,
    sites: Sites | None = None,
) -> GaussianApproximation:
    r"""Gaussian whose sites match the moments of each term against all other sites.

    Options, and the warning, are those of `latent_gp.expectation_propagation`. Moments are closed
    form where the likelihood has `probit_labels`; else `n_nodes` begins the quadrature of
    `quadrature_moments`, to `moment_tolerance`, or `tolerance` if that is smaller, and None takes
    the moments that the likelihood itself gives, by a method `tilted_moments`. It raises ValueError
    if an option is out of its range or `sites` leave no Gaussian, and FloatingPointError if the
    quadrature does not settle.

    With cavities :math:`N(m_n, v_n)`, their tilted normalisers :math:`Z_n`, posterior mean
    :math:`\mu` and :math:`a = \tilde\nu - \tilde\tau \mu`,

    .. math:: \log Z = \sum_n \log Z_n - \tfrac12 a^T (\mu - m) + \tfrac12 \sum_n v_n a_n^2
        - \tfrac12 \log|I + K \tilde\tau| + \tfrac12 \sum_n \log(1 + \tilde\tau_n v_n),

    equation 3.65 for any normaliser and prior mean, with all that cancels left out.

    A likelihood that is not log-concave may need negative site precisions. The set of sites for
    which the product and all cavities are Gaussians is convex and has the flat sites in it, so
    halving an update that leaves the set always comes back into it. The sites of the result have no
    negative precision (see `GaussianApproximation.n_floored`).
    """
    if checked_share("damping", damping) == 1.0:
        raise ValueError("damping=1 keeps the old sites for ever: take a number in [0, 1).")
    checked_number("tolerance", tolerance, above=0.0)
    checked_integer("max_sweeps", max_sweeps, 1)
    if n_nodes is not None:
        checked_integer("n_nodes", n_nodes, 9)
    checked_number("moment_tolerance", moment_tolerance, above=0.0)
    moment_tolerance = min(moment_tolerance, tolerance)
    if likelihood.size != prior.size:
        raise ValueError(f"The prior has {prior.size} values and the likelihood {likelihood.size}.")
    if sites is None:
        sites = Sites.flat(prior.size)
    try:
        state = PropagationState(prior, likelihood, sites, n_nodes, moment_tolerance)
    except LinAlgError as error:
        raise ValueError(
            "The prior and the cavities of `sites` are not all Gaussian, because some precisions "
            "are negative: leave `sites` out."
        ) from error
    state, n_sweeps = best_seen(state, 1.0 - damping, tolerance, max_sweeps)
    converged = bool(state.residual < tolerance)
    if not converged:
        warn_user(
            f"Expectation propagation has not converged: after {n_sweeps} sweeps a marginal is "
            f"still {state.residual:.2g} standard deviations from its tilted moments (tolerance "
            f"{tolerance:g}). These are the best sites seen; their log evidence means little. Take "
            "more damping (0.5, say), more max_sweeps, or Laplace's approximation."
        )
    return approximation_of(
        prior,
        likelihood,
        state.sites,
        state.product.mean,
        log_evidence=state.log_evidence(),
        method="expectation propagation",
        converged=converged,
        n_iterations=n_sweeps,
        residual=float(state.residual),
    )


class PropagationState:
    """Sites, the Gaussian that they make, its cavities and their tilted moments.

    Without `n_nodes` the moments are those that the likelihood itself gives; `tolerance` is that of
    the quadrature otherwise. It raises LinAlgError if the product or a cavity is no Gaussian.
    """

    def __init__(self, prior, likelihood, sites, n_nodes, tolerance):
        self.prior, self.likelihood, self.sites = prior, likelihood, sites
        self.n_nodes, self.tolerance = n_nodes, tolerance
        self.product = product = SiteProduct(prior, sites)
        if not np.all(product.shares > 0):
            raise LinAlgError("A cavity has no positive variance.")
        self.cavity_mean, self.cavity_variance = product.cavities()
        self.tilted = self.moments(self.cavity_mean, self.cavity_variance)
        change = self.cavity_variance * (self.tilted.slope - product.slope)
        ratio = self.tilted.shrinkage / product.shares
        self.residual = np.max(
            np.maximum(np.abs(change) / np.sqrt(product.variance), np.abs(np.log(ratio)) / 2)
        )

    def moments(self, mean, variance) -> TiltedMoments:
        """Tilted moments for cavities (N,), by closed form, quadrature or the likelihood."""
        labels = self.likelihood.probit_labels
        if labels is not None:
            return probit_moments(labels, mean, variance)
        if self.n_nodes is None:
            return self.likelihood.tilted_moments(mean, variance)
        return quadrature_moments(self.likelihood, mean, variance, self.n_nodes, self.tolerance)

    def updated(self, share: float) -> "PropagationState":
        """Return the state of sites of which a share is what the tilted moments make of them."""
        old, tilted = self.sites, self.tilted
        # Sites that turn the cavities' moments into the tilted ones (eq. 3.59).
        precision = tilted.curvature / tilted.shrinkage
        shift = (tilted.slope + self.cavity_mean * tilted.curvature) / tilted.shrinkage
        sites = Sites(
            old.precision + share * (precision - old.precision),
            old.shift + share * (shift - old.shift),
        )
        new = PropagationState(self.prior, self.likelihood, sites, self.n_nodes, self.tolerance)
        # Log-concave terms find their way back from anywhere. Others must not wander off to nearly
        # improper cavities; but not every good update improves the worst site.
        is_usable = np.all(precision >= 0) or new.residual < 2.0 * self.residual
        if not is_usable and share >= SHORT_SHARE:
            raise LinAlgError("The sites are far worse than those before.")
        return new

    def log_evidence(self) -> float:
        """Log of the normaliser: see `expectation_propagation_approximation`."""
        product = self.product
        return float(
            self.tilted.log_normaliser.sum()
            - 0.5 * product.slope @ (product.mean - self.prior.mean)
            + 0.5 * self.cavity_variance @ product.slope**2
            - product.half_log_determinant
            - 0.5 * np.log(product.shares).sum()  # 1 + precision * cavity variance = 1 / share
        )


def best_seen(
    state: PropagationState, largest_share: float, tolerance: float, max_sweeps: int
) -> tuple[PropagationState, int]:
    """Sweep until the residual is below the tolerance; return the best state and the sweeps.

    The share of an update that is made follows the residual. There are no more sweeps where no
    share of it is valid.
    """
    best, share, n_better, n_sweeps = state, largest_share, 0, 0
    while not best.residual < tolerance and n_sweeps < max_sweeps:
        before = state
        while state is before:
            if share < SMALLEST_SHARE:
                return best, n_sweeps
            try:
                state = before.updated(share)
            except (LinAlgError, FloatingPointError):
                share *= 0.5
        n_sweeps += 1
        if not state.residual <= before.residual:
            share, n_better = max(0.5 * share, 2.0 * SMALLEST_SHARE), 0
        elif n_better < 2:
            n_better += 1
        else:
            share, n_better = min(1.5 * share, largest_share), 0
        best = state if state.residual < best.residual else best
    return best, n_sweeps
