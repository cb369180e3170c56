"""Gaussian approximations of a latent function: Laplace's, and expectation propagation.

Minka (2001) for the latter, in the notation of Rasmussen & Williams (2006), sections 3.4 and 3.6.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import factorial
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import LinAlgError

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.latent_gp.gaussian.conditional import conditional_of
from pymc_kameleon.latent_gp.gaussian.sites import (
    Gaussian,
    SiteFactor,
    SiteProduct,
    Sites,
    with_sites,
)
from pymc_kameleon.latent_gp.quadrature import quadrature_moments
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood
from pymc_kameleon.latent_gp.tilted_moments import (
    TiltedMoments,
    log_ndtr_derivatives,
    probit_moments,
)
from pymc_kameleon.validation import checked_array, checked_integer, checked_number, checked_share


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


SMALLEST_STEP = 2.0**-40
"""Share of a Newton step below which the line search gives up."""

MOST_STEPS = 100
"""Newton steps to a mode where values go together."""


class NewtonPoint(NamedTuple):
    """Where Newton's method ended: a `position`, with the log density `value` there.

    `step` is the last that was computed, `residual` its length in standard deviations, and `local`
    what else was computed with it: at this position, if the method has converged.
    """

    position: np.ndarray
    value: float
    step: np.ndarray
    residual: float
    n_iterations: int
    local: Any


def newton(
    position: np.ndarray,
    value_at: Callable[[np.ndarray], float],
    step_at: Callable[[np.ndarray], tuple[np.ndarray, float, Any]],
    tolerance: float,
    max_iterations: int,
) -> NewtonPoint:
    """Search the mode of a log density by Newton's method, each step halved until it goes uphill.

    `step_at` returns a step, its length in standard deviations, and whatever is wanted of it at the
    end. The search ends where a step is shorter than `tolerance`, or none goes uphill.
    """
    value, residual, n_iterations = value_at(position), np.inf, 0
    while n_iterations < max_iterations:
        step, residual, local = step_at(position)
        if residual < tolerance:
            break
        n_iterations += 1
        share = 1.0
        while True:
            new = position + share * step
            new_value = value_at(new)
            # At the mode a step gains less than what rounding takes.
            is_uphill = new_value >= value - 1e-10 * (1.0 + abs(value))
            if is_uphill or share < SMALLEST_STEP:
                break
            share *= 0.5
        if not is_uphill:
            break
        position, value = new, new_value
    return NewtonPoint(position, value, step, residual, n_iterations, local)


def laplace_approximation(
    prior: Gaussian,
    likelihood: FactorisingLikelihood,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
    start: np.ndarray | None = None,
) -> GaussianApproximation:
    r"""Gaussian about the mode of N(f; m, K) exp(sum_n l_n(f_n)); see `latent_gp.laplace`.

    Newton's method in the form of Rasmussen & Williams (2006), algorithm 3.1, in which K is never
    inverted: with a = K^-1 (f - m), W = -diag(l'') and B = I + W^1/2 K W^1/2,

    .. math:: a \leftarrow b - W^{1/2} B^{-1} W^{1/2} K b,\quad b = W (f - m) + l'.

    Steps are halved until the posterior density increases. Where l_n is not log-concave, W is
    floored at 0 in the iterations, which keeps every step uphill; at the mode the curvature itself
    gives the log evidence, and the sites of the result are floored.
    """
    checked_number("tolerance", tolerance, above=0.0)
    checked_integer("max_iterations", max_iterations, 1)
    if likelihood.size != prior.size:
        raise ValueError(f"The prior has {prior.size} values and the likelihood {likelihood.size}.")
    weights, offset = np.zeros(prior.size), np.zeros(prior.size)
    if start is not None:
        start = checked_array("start", start, (prior.size,), "a latent function to begin at")
        offset = start - prior.mean
        weights = -prior.score(start)
    if not np.isfinite(_log_joint(prior, likelihood, weights, offset)):
        raise ValueError(
            "The log-likelihood is not finite at the "
            f"{'prior mean' if start is None else 'start'}: give a start where it is."
        )
    found = newton_mode(prior, likelihood, weights, offset, tolerance, max_iterations)
    weights, offset = found.position
    mode = prior.mean + offset
    converged = found.residual < tolerance
    if not converged:
        if not np.any(likelihood.terms(mode)[2]):
            raise ArithmeticError(
                "The log-likelihood has kinks, as -|y - f| has, and no curvature beside them, so "
                "that Laplace's approximation does not exist. Use expectation propagation."
            )
        warn_user(
            f"Laplace's approximation has not converged: after {found.n_iterations} Newton steps "
            f"the next one is {found.residual:.2g} standard deviations long (tolerance "
            f"{tolerance:g}). Take more max_iterations, another start, or expectation propagation."
        )
    values, slope, second, _ = likelihood.terms(mode)
    sites = Sites(-second, slope - second * mode)
    try:
        product = SiteProduct(prior, sites)
    except LinAlgError as error:
        raise ArithmeticError(
            "The posterior has no maximum where Newton's method ended: the likelihood is not "
            f"log-concave there ({np.sum(second > 0)} of {prior.size} second derivatives are "
            "positive). Begin elsewhere (start), or use expectation propagation, or the prior."
        ) from error
    # By a = K^-1 (f - m) and not l', whose error at this f is of first order.
    log_evidence = values.sum() - 0.5 * weights @ offset - product.half_log_determinant
    return approximation_of(
        prior,
        likelihood,
        sites,
        mode,
        log_evidence=float(log_evidence),
        method="Laplace",
        converged=converged,
        n_iterations=found.n_iterations,
        residual=found.residual,
    )


def newton_mode(prior, likelihood, weights, offset, tolerance, max_iterations) -> NewtonPoint:
    """Search the posterior mode by Newton's method from f = m + `offset`, offset = K weights.

    Position and step of the result have shape (2, N): those of the weights and of the offset. K may
    be singular: the prior's Cholesky factor is not needed. It raises LinAlgError if I + W^1/2 K
    W^1/2 is not positive definite, because K is no covariance.
    """
    covariance = prior.covariance

    def value_at(position):
        return _log_joint(prior, likelihood, *position)

    def step_at(position):
        weights, offset = position
        _, slope, second, _ = likelihood.terms(prior.mean + offset)
        factor = SiteFactor(covariance, np.maximum(-second, 0.0))
        gradient = slope - weights
        # b - W^1/2 B^-1 W^1/2 K b - a, with b = W K a + l', is the same for the gradient alone.
        step = gradient - factor.roots * factor.solved(factor.roots * (covariance @ gradient))
        offset_step = covariance @ step
        residual = float(np.sqrt(max(gradient @ offset_step, 0.0)))
        return np.array([step, offset_step]), residual, None

    start = np.array([weights, offset])
    return newton(start, value_at, step_at, tolerance, max_iterations)


def _log_joint(prior, likelihood, weights, offset):
    """Return log p(y | f) - (f - m)^T K^-1 (f - m) / 2 for f = m + offset, offset = K weights."""
    with np.errstate(all="ignore"):
        total = likelihood.value(prior.mean + offset) - 0.5 * weights @ offset
    return total if np.isfinite(total) else -np.inf


@dataclass(frozen=True)
class BlockApproximation:
    """Laplace's approximation: sites, `packed` if there are blocks, and log p(y | theta)."""

    sites: Sites
    log_evidence: float
    converged: bool


def laplace_in_blocks(
    prior, likelihood, tolerance: float, sites: Sites | None = None
) -> BlockApproximation:
    """Laplace's approximation where values go together, or the prior is known by its precision.

    A step goes from f to the mean of the Gaussian given the sites there, whose curvature is floored
    where it is not positive. The first f is the mean given `sites`, if that is better than the
    prior's.
    """

    def value_at(f):
        v = prior.whiten(f)
        return likelihood.value(prior.predictors(f)) - 0.5 * float(v @ v)

    def step_at(f):
        sites = _sites_at(likelihood, prior.predictors(f))
        conditional = conditional_of(prior, sites, likelihood.blocks)
        residual = float(np.linalg.norm(conditional.to_eta(f)))
        return conditional.mean - f, residual, (sites, conditional.log_jacobian)

    start = prior.mean
    if sites is not None:
        start = max(start, conditional_of(prior, sites, likelihood.blocks).mean, key=value_at)
    found = newton(start, value_at, step_at, tolerance, MOST_STEPS)
    sites, log_jacobian = found.local
    log_evidence = float(found.value + log_jacobian)
    return BlockApproximation(sites, log_evidence, found.residual < tolerance)


def _sites_at(likelihood, u):
    """Sites with the slope and the floored curvature of a log likelihood at predictors `u` (N,)."""
    blocks = likelihood.blocks
    if blocks is None:
        _, slope, curvature, _ = likelihood.terms(u)
        precision = np.maximum(-curvature, 0.0)
        return Sites(precision, slope + precision * u)
    slope, curvature = likelihood.block_terms(u)
    values, vectors = np.linalg.eigh(-curvature)
    precision = (vectors * np.maximum(values, 0.0)[:, None, :]) @ vectors.transpose(0, 2, 1)
    sites = blocks.packed(precision, np.zeros(u.size))
    shift = slope + blocks.unpacked(sites).times(u)
    return Sites(sites.precision, np.concatenate([shift, sites.shift[u.size :]]))


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

    Options are those of `latent_gp.expectation_propagation`. With cavities :math:`N(m_n, v_n)`,
    their tilted normalisers :math:`Z_n`, posterior mean :math:`\mu` and :math:`a = \tilde\nu -
    \tilde\tau \mu`,

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

    It raises LinAlgError if the product or a cavity is no Gaussian.
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

    The share of an update that is made follows the residual, until no share of it is valid.
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
