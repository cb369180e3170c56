"""Laplace's approximation: a Gaussian about the mode, with the curvature there."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.latent_gp.approximations.approximation import (
    GaussianApproximation,
    approximation_of,
)
from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, SiteFactor, SiteProduct, Sites
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood
from pymc_kameleon.validation import checked_array, checked_integer, checked_number

__all__ = ["NewtonMode", "laplace_approximation", "newton_mode"]

SMALLEST_STEP = 2.0**-40
"""Share of a Newton step below which the line search gives up."""


def laplace_approximation(
    prior: Gaussian,
    likelihood: FactorisingLikelihood,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
    start: np.ndarray | None = None,
) -> GaussianApproximation:
    r"""Gaussian about the mode of N(f; m, K) exp(sum_n l_n(f_n)).

    Options, and the warning, are those of `latent_gp.laplace`. The sites have precision -l'' and
    shift l' - l'' f at the mode f. It raises ValueError if an option is out of its range or the
    log-likelihood is not finite where to begin, and ArithmeticError if the iterations end where the
    posterior has no maximum but a saddle, or at kinks of a likelihood that has no curvature.

    Newton's method in the form of Rasmussen & Williams (2006), algorithm 3.1, in which K is never
    inverted: with a = K^-1 (f - m), W = -diag(l'') and B = I + W^1/2 K W^1/2,

    .. math:: a \leftarrow b - W^{1/2} B^{-1} W^{1/2} K b,\quad b = W (f - m) + l'.

    Steps are halved until the posterior density increases. Where l_n is not log-concave, W is
    floored at 0 in the iterations, which keeps every step uphill; at the mode the curvature itself
    gives the log evidence, and the sites of the result are floored (see
    `GaussianApproximation.n_floored`).
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
    if not np.isfinite(_log_posterior(prior, likelihood, weights, offset)):
        raise ValueError(
            "The log-likelihood is not finite at the "
            f"{'prior mean' if start is None else 'start'}: give a start where it is."
        )
    found = newton_mode(prior, likelihood, weights, offset, tolerance, max_iterations)
    converged = found.residual < tolerance
    if not converged:
        if not np.any(likelihood.terms(prior.mean + found.offset)[2]):
            raise ArithmeticError(
                "The log-likelihood has kinks, as -|y - f| has, and no curvature beside them, so "
                "that Laplace's approximation does not exist. Use expectation propagation."
            )
        warn_user(
            f"Laplace's approximation has not converged: after {found.n_iterations} Newton steps "
            f"the next one is {found.residual:.2g} standard deviations long (tolerance "
            f"{tolerance:g}). Take more max_iterations, another start, or expectation propagation."
        )
    mode = prior.mean + found.offset
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
    log_evidence = values.sum() - 0.5 * found.weights @ found.offset - product.half_log_determinant
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


class NewtonMode(NamedTuple):
    """Posterior mode of the latent function as Newton's method has left it.

    At f = m + `offset`, where `weights` = K^-1 (f - m) are found without an inverse, the next step
    would add `next_step` and `next_weights_step`; `residual` is its length in standard deviations
    of the approximation.
    """

    offset: np.ndarray
    weights: np.ndarray
    next_step: np.ndarray
    next_weights_step: np.ndarray
    residual: float
    n_iterations: int


def newton_mode(prior, likelihood, weights, offset, tolerance, max_iterations) -> NewtonMode:
    """Search the posterior mode by Newton's method from f = m + `offset`, offset = K weights.

    K may be singular: the prior's Cholesky factor is not needed. The tolerance and the maximum are
    those of `laplace_approximation`. It raises LinAlgError if I + W^1/2 K W^1/2 is not positive
    definite, because K is no covariance.
    """
    covariance = prior.covariance
    value = _log_posterior(prior, likelihood, weights, offset)
    residual, n_iterations = np.inf, 0
    while n_iterations < max_iterations:
        _, slope, second, _ = likelihood.terms(prior.mean + offset)
        inner = SiteFactor(covariance, np.maximum(-second, 0.0))
        gradient = slope - weights
        # b - W^1/2 B^-1 W^1/2 K b - a, with b = W K a + l', is the same for the gradient alone.
        step = gradient - inner.roots * inner.solved(inner.roots * (covariance @ gradient))
        offset_step = covariance @ step
        residual = float(np.sqrt(max(gradient @ offset_step, 0.0)))
        if residual < tolerance:
            break
        n_iterations += 1
        share = 1.0
        while True:
            new_weights, new_offset = weights + share * step, offset + share * offset_step
            new_value = _log_posterior(prior, likelihood, new_weights, new_offset)
            # At the mode a step gains less than what rounding takes.
            is_uphill = new_value >= value - 1e-10 * (1.0 + abs(value))
            if is_uphill or share < SMALLEST_STEP:
                break
            share *= 0.5
        if not is_uphill:
            break
        weights, offset, value = new_weights, new_offset, new_value
    return NewtonMode(offset, weights, offset_step, step, residual, n_iterations)


def _log_posterior(prior, likelihood, weights, offset):
    """Return log p(y | f) - (f - m)^T K^-1 (f - m) / 2 for f = m + offset, offset = K weights."""
    with np.errstate(all="ignore"):
        total = likelihood.value(prior.mean + offset) - 0.5 * weights @ offset
    return total if np.isfinite(total) else -np.inf
