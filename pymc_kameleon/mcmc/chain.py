"""Where a Metropolis-Hastings chain is, and how it accepts a proposal, in one stage or two."""

import math
from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.layout import floats, integers
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import by_class, evaluate, jitable

__all__ = [
    "ACCEPTANCE",
    "ACCEPTED",
    "Chain",
    "accept_in_two_stages",
    "accept_or_reject",
    "has_first_stage",
    "probability",
    "remember",
    "settle",
]

ACCEPTANCE, ACCEPTED = 0, 1
"""Positions in the `outcome` array: summed acceptance probabilities, and accepted moves."""


class Chain(NamedTuple):
    """Where a chain is, with its log density kept; all arrays are changed in place.

    Attributes
    ----------
    position : array, shape (d,)
    value : array, shape (values,)
        Terms of the log density at `position`, and what else a step keeps of them.
    proposal : array, shape (d,)
        The last proposed position.
    proposed_value : array, shape (values,)
    counts : int64 array, shape (2,)
        Log-density evaluations, and non-finite ones.
    outcome : array, shape (2,)
        Sum of acceptance probabilities, and number of accepted moves.
    """

    position: Annotated[np.ndarray, floats("d")]
    value: Annotated[np.ndarray, floats("values")]
    proposal: Annotated[np.ndarray, floats("d")]
    proposed_value: Annotated[np.ndarray, floats("values")]
    counts: Annotated[np.ndarray, integers(2)]
    outcome: Annotated[np.ndarray, floats(2)]


@jitable
def probability(log_ratio):
    """Return min(1, exp(log_ratio)); 0 for NaN."""
    return math.exp(min(0.0, log_ratio)) if log_ratio > -700.0 else 0.0


@jitable
def settle(chain, acceptance, uniform):
    """Move to the evaluated `chain.proposal` with a probability; return whether it did."""
    accepted = uniform < acceptance
    if accepted:
        copy_into(chain.proposal, chain.position)
        copy_into(chain.proposed_value, chain.value)
        chain.outcome[ACCEPTED] += 1.0
    chain.outcome[ACCEPTANCE] += acceptance
    return accepted


@by_class
def has_first_stage(stage, chain, uniforms):
    """Whether this transition has a first stage."""


@by_class
def accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal` if the first stage lets it through, and accept or reject it."""


@by_class
def remember(stage, chain, moved_unscreened):
    """Learn what was found at `chain.proposal`."""


@jitable
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
