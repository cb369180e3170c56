"""Where a Metropolis-Hastings chain is, and how it accepts a proposal."""

import math
from typing import NamedTuple

import numpy as np
from numba.extending import overload

from pymc_kameleon.mcmc.bridge.address import call_for_nothing
from pymc_kameleon.mcmc.bridge.jit import by_class, compile_options, jitable
from pymc_kameleon.mcmc.linalg import copy_into

N_TERMS = 3
"""Terms of a log density: log prior, exact log likelihood, estimated log likelihood."""

EVALUATIONS, NONFINITE = 0, 1
"""Positions in the `counts` array: log-density evaluations, and those that were NaN or +inf."""


def values_into(function, x, values):
    """Write the `values` of a model's function at `x` (d,).

    The `function` is what `ModelFunction.compiled` returned (int64 array) or, for plain Python,
    `ModelFunction.plain`.
    """
    function[0](x, values)


@overload(values_into, jit_options=compile_options(False))
def _values_into_overload(function, x, values):
    def compiled(function, x, values):
        call_for_nothing(function[0], (x, values, function))

    return compiled


@jitable
def evaluate(log_density, x, value, counts):
    """Evaluate the terms of the log density at `x` (d,) into `value` (3,); return their sum.

    Or -inf where that is NaN or +inf, so that such a proposal is rejected. `log_density` is what
    `values_into` takes. `counts[EVALUATIONS]` and, for NaN and +inf, `counts[NONFINITE]` go up by
    one.
    """
    counts[EVALUATIONS] += 1
    values_into(log_density, x, value)
    total = value[0] + value[1] + value[2]
    if np.isnan(total) or total == np.inf:
        counts[NONFINITE] += 1
        return -np.inf
    return total


ACCEPTANCE, ACCEPTED = 0, 1
"""Positions in the `outcome` array: summed acceptance probabilities, and accepted moves."""

TRANSITION = 2
"""Position in the `counts` array, after those of evaluations: the present transition of a run."""


class Chain(NamedTuple):
    """Where a chain is, with its log density kept; all arrays are changed in place.

    `value` (values,) has the terms of the log density at `position` (d,), and what else a step
    keeps of them; `proposed_value` has those at `proposal` (d,), the last proposed position.
    `counts` (3,), of int64, are log-density evaluations, non-finite ones, and the number of the
    present transition in a run, from 0; `outcome` (2,) has the sum of acceptance probabilities, and
    the number of accepted moves. `bounds` (2, d) are least and largest coordinates: one period of
    an angle, else infinite. A proposal beyond them is rejected, so that the target is a density of
    one period.
    """

    position: np.ndarray
    value: np.ndarray
    proposal: np.ndarray
    proposed_value: np.ndarray
    counts: np.ndarray
    outcome: np.ndarray
    bounds: np.ndarray


def new_chain(x: np.ndarray, n_values: int = N_TERMS) -> Chain:
    """Return a chain that is at `x` (d,), with room for so many values."""
    unbounded = np.full(x.size, np.inf)
    return Chain(
        position=x.copy(),
        value=np.zeros(n_values),
        proposal=x.copy(),
        proposed_value=np.zeros(n_values),
        counts=np.zeros(3, dtype=np.int64),
        outcome=np.zeros(2),
        bounds=np.array([-unbounded, unbounded]),
    )


def mark_impossible(chain: Chain) -> None:
    """Let a chain that was put where there is no density leave by any move."""
    if not math.isfinite(chain.value[:N_TERMS].sum()):
        chain.value[:N_TERMS] = 0.0
        chain.value[0] = -np.inf


@jitable
def is_within(bounds, x):
    """Whether no coordinate of `x` (d,) is beyond its `bounds` (2, d)."""
    for i in range(x.size):
        if x[i] < bounds[0, i] or x[i] > bounds[1, i]:
            return False
    return True


@jitable
def wrap_angle(angles, low):
    """Angles moved by whole turns to between `low` and a turn above it."""
    return angles - 2.0 * math.pi * np.floor((angles - low) / (2.0 * math.pi))


@jitable
def probability(log_ratio):
    """Return min(1, exp(log_ratio)); 0 for NaN."""
    return math.exp(min(0.0, log_ratio)) if log_ratio > -700.0 else 0.0


@jitable
def accept_or_stay(chain, acceptance, uniform):
    """Move to the evaluated `chain.proposal` with a probability; return whether it did."""
    accepted = uniform < acceptance
    if accepted:
        copy_into(chain.proposal, chain.position)
        copy_into(chain.proposed_value, chain.value)
        chain.outcome[ACCEPTED] += 1.0
    chain.outcome[ACCEPTANCE] += acceptance
    return accepted


@jitable
def accept_in_one_stage(log_density, chain, log_ratio, uniform):
    """Evaluate `chain.proposal`, and move there with probability min(1, r p(x*) / p(x)).

    r is exp(`log_ratio`), that of the proposal densities of the move back and of the move.
    """
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    current = chain.value[0] + chain.value[1] + chain.value[2]
    acceptance = probability(proposed - current + log_ratio)
    return acceptance, accept_or_stay(chain, acceptance, uniform)


@by_class
def accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms):
    """As `accept_or_reject`, with a first stage that lets only some proposals be evaluated."""


@jitable
def accept_or_reject(log_density, stage, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal`, and move there with the Metropolis-Hastings probability.

    `log_density` is what `mcmc.chain.evaluate` takes, `stage` a FirstStage that screens most
    proposals, or None, and `log_ratio` is log q(x | x*) - log q(x* | x). `uniforms` (3,) are
    uniform random numbers in [0, 1): of the two stages (without a first stage the first is used),
    and of whether there is a first stage. Returns the acceptance probability (0 after a rejection
    by the first stage), and whether the proposal was accepted.
    """
    if not is_within(chain.bounds, chain.proposal):
        return 0.0, False
    if stage is not None:
        return accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms)
    return accept_in_one_stage(log_density, chain, log_ratio, uniforms[0])
