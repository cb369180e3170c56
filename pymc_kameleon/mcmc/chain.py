"""Where a Metropolis-Hastings chain is, and how it moves to a proposal or stays."""

import math
from typing import Annotated, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.mcmc.layout import floats, integers
from pymc_kameleon.mcmc.linalg import copy_into

__all__ = [
    "ACCEPTANCE",
    "ACCEPTED",
    "Chain",
    "probability",
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


@register_jitable
def probability(log_ratio):
    """Return min(1, exp(log_ratio)); 0 for NaN."""
    return math.exp(min(0.0, log_ratio)) if log_ratio > -700.0 else 0.0


@register_jitable
def settle(chain, acceptance, uniform):
    """Move to the evaluated `chain.proposal` with a probability; return whether it did."""
    accepted = uniform < acceptance
    if accepted:
        copy_into(chain.proposal, chain.position)
        copy_into(chain.proposed_value, chain.value)
        chain.outcome[ACCEPTED] += 1.0
    chain.outcome[ACCEPTANCE] += acceptance
    return accepted
