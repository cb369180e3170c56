"""What every Metropolis-Hastings transition shares: chain, acceptance, one-coordinate moves."""

import math
from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.compiled import evaluate
from pymc_kameleon.proposals import copy_into

__all__ = ["ACCEPTANCE", "ACCEPTED", "Chain", "Components", "accept_or_reject", "move_component"]

ACCEPTANCE, ACCEPTED = 0, 1
"""Positions in the `outcome` array: summed acceptance probabilities, and accepted moves."""

COMPONENT_TARGET = 0.44


class Chain(NamedTuple):
    """Where a chain is, with its log density kept; all arrays are changed in place.

    Attributes
    ----------
    position : array, shape (d,)
    value : array, shape (3,)
        Terms of the log density at `position`.
    proposal : array, shape (d,)
        The last proposed position.
    proposed_value : array, shape (3,)
    counts : int64 array, shape (2,)
        Log-density evaluations, and non-finite ones.
    outcome : array, shape (2,)
        Sum of acceptance probabilities, and number of accepted moves.
    """

    position: np.ndarray
    value: np.ndarray
    proposal: np.ndarray
    proposed_value: np.ndarray
    counts: np.ndarray
    outcome: np.ndarray


class Components(NamedTuple):
    """Scales of moves that change one coordinate, learnt from nothing at the start of a chain.

    Attributes
    ----------
    log_scale : array, shape (d,)
    n_updates : array, shape (d,)
    """

    log_scale: np.ndarray
    n_updates: np.ndarray


@register_jitable
def accept_or_reject(log_density, chain, log_ratio, uniform):
    """Evaluate `chain.proposal`, and move there with the Metropolis-Hastings probability.

    Parameters
    ----------
    log_density : see `compiled.evaluate`
    chain : Chain
    log_ratio : float
        log q(x | x*) - log q(x* | x).
    uniform : float
        Uniform random number in [0, 1).

    Returns
    -------
    acceptance : float
        Acceptance probability.
    accepted : bool
    """
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    current = chain.value[0] + chain.value[1] + chain.value[2]
    difference = proposed - current + log_ratio
    acceptance = math.exp(min(0.0, difference)) if difference > -700.0 else 0.0
    accepted = uniform < acceptance
    if accepted:
        copy_into(chain.proposal, chain.position)
        copy_into(chain.proposed_value, chain.value)
        chain.outcome[ACCEPTED] += 1.0
    chain.outcome[ACCEPTANCE] += acceptance
    return acceptance, accepted


@register_jitable
def move_component(log_density, chain, components, choice, normal, uniform, adapt):
    """Propose a change of one coordinate, chosen by the uniform number `choice`.

    Its scale is learnt fast enough to cross many orders of magnitude in a few dozen proposals.
    """
    i = int(choice * chain.position.size)
    copy_into(chain.position, chain.proposal)
    chain.proposal[i] += math.exp(components.log_scale[i]) * normal
    acceptance, accepted = accept_or_reject(log_density, chain, 0.0, uniform)
    if adapt:
        step = 3.0 / (1.0 + 0.1 * components.n_updates[i])
        components.n_updates[i] += 1.0
        components.log_scale[i] += step * (acceptance - COMPONENT_TARGET)
    return accepted
