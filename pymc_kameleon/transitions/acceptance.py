"""Acceptance of a proposal, with or without a first stage, and moves of one coordinate."""

import math

from numba.extending import register_jitable

from pymc_kameleon.compiled import evaluate
from pymc_kameleon.proposals import copy_into
from pymc_kameleon.transitions.metropolis import probability, settle
from pymc_kameleon.transitions.two_stage import accept_in_two_stages, is_asked, remember

__all__ = ["accept_or_reject", "move_component"]

COMPONENT_TARGET = 0.44


@register_jitable
def accept_or_reject(log_density, stage, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal`, and move there with the Metropolis-Hastings probability.

    Parameters
    ----------
    log_density : see `compiled.evaluate`
    stage : FirstStage or None
        Asked before the log density, mostly.
    chain : Chain
    log_ratio : float
        log q(x | x*) - log q(x* | x).
    uniforms : array, shape (3,)
        Uniform random numbers in [0, 1): of the two stages (without a first stage the first is
        used), and of whether the first is asked.

    Returns
    -------
    acceptance : float
        Acceptance probability (0 after a rejection by the first stage).
    accepted : bool
    """
    if stage is not None:
        if is_asked(stage, chain, uniforms):
            return accept_in_two_stages(log_density, stage, chain, log_ratio, uniforms)
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    current = chain.value[0] + chain.value[1] + chain.value[2]
    acceptance = probability(proposed - current + log_ratio)
    accepted = settle(chain, acceptance, uniforms[0])
    if stage is not None:
        remember(stage, chain, accepted)
    return acceptance, accepted


@register_jitable
def move_component(log_density, stage, chain, components, choice, normal, uniforms, adapt):
    """Propose a change of one coordinate, chosen by the uniform number `choice`.

    Its scale is learnt fast enough to cross many orders of magnitude in a few dozen proposals.
    """
    i = int(choice * chain.position.size)
    copy_into(chain.position, chain.proposal)
    chain.proposal[i] += math.exp(components.log_scale[i]) * normal
    acceptance, accepted = accept_or_reject(log_density, stage, chain, 0.0, uniforms)
    if adapt:
        step = 3.0 / (1.0 + 0.1 * components.n_updates[i])
        components.n_updates[i] += 1.0
        components.log_scale[i] += step * (acceptance - COMPONENT_TARGET)
    return accepted
