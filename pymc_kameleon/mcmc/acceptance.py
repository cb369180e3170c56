"""Acceptance of a proposal, in one stage or two."""

from numba.extending import register_jitable

from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.numba_bridge import by_class, evaluate

__all__ = ["accept_in_two_stages", "accept_or_reject", "has_first_stage", "remember"]


@by_class
def has_first_stage(stage, chain, uniforms):
    """Whether this transition has a first stage."""


@by_class
def accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal` if the first stage lets it through, and accept or reject it."""


@by_class
def remember(stage, chain, moved_unscreened):
    """Learn what was found at `chain.proposal`."""


@register_jitable
def accept_or_reject(log_density, stage, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal`, and move there with the Metropolis-Hastings probability.

    Parameters
    ----------
    log_density : see `numba_bridge.evaluate`
    stage : FirstStage or None
        Screens most proposals.
    chain : Chain
    log_ratio : float
        log q(x | x*) - log q(x* | x).
    uniforms : array, shape (3,)
        Uniform random numbers in [0, 1): of the two stages (without a first stage the first is
        used), and of whether there is a first stage.

    Returns
    -------
    acceptance : float
        Acceptance probability (0 after a rejection by the first stage).
    accepted : bool
    """
    if stage is not None:
        if has_first_stage(stage, chain, uniforms):
            return accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms)
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    current = chain.value[0] + chain.value[1] + chain.value[2]
    acceptance = probability(proposed - current + log_ratio)
    accepted = settle(chain, acceptance, uniforms[0])
    if stage is not None:
        remember(stage, chain, accepted)
    return acceptance, accepted
