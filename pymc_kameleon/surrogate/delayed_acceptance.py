"""Delayed acceptance: a surrogate of the log-likelihood screens proposals.

The first stage knows the log prior exactly and the log-likelihood from a Gaussian process; what it
rejects costs no evaluation. The second stage corrects it (Christen & Fox 2005), so any fixed
surrogate leaves the target invariant.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.mcmc.acceptance import accept_in_two_stages, has_first_stage, remember
from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.layout import flags, floats, integers
from pymc_kameleon.mcmc.numba_bridge import evaluate
from pymc_kameleon.surrogate.budget import add_training_point
from pymc_kameleon.surrogate.gaussian_process import Process, bounded, log_surrogate, predict
from pymc_kameleon.surrogate.stages import corrected_second_stage, first_stage, second_stage
from pymc_kameleon.surrogate.training_set import follow

__all__ = [
    "N_OUTCOMES",
    "PASSED",
    "SCREENED",
    "SPREAD",
    "FirstStage",
    "screens",
]

SCREENED, PASSED, SPREAD, N_OUTCOMES = 0, 1, 2, 3
"""Positions in `FirstStage.outcome`: proposals that the first stage saw, summed probabilities of
passing it, and summed standard deviations of the surrogate."""


class FirstStage(NamedTuple):
    """The surrogate of a chain; all arrays are changed in place.

    Attributes
    ----------
    log_prior
        The log prior, as `numba_bridge.evaluate` takes it.
    process : Process
        Gaussian process of the log-likelihood.
    is_open : bool array, shape (1,)
        Whether the process screens proposals.
    learns : bool array, shape (1,)
        Whether evaluations are learnt.
    follows : bool array, shape (1,)
        Whether the prior mean of the process is the log-likelihood of the current position. The
        surrogate then depends on the state, and the reverse first stage has another one.
    one_stage_share : array, shape (1,)
        Share of transitions without a first stage.
    here : array, shape (1,)
        The surrogate at the current position; valid if `is_current[0]`.
    is_current : bool array, shape (1,)
    proposed_prior : array, shape (3,)
    points : array, shape (m, d)
        Positions evaluated lately.
    values : array, shape (m,)
        Their log-likelihoods.
    count : int64 array, shape (2,)
        How many there were so far (they are held modulo m), and how many at the last fit.
    counts : int64 array, shape (2,)
        Evaluations of the log prior, as for the log density.
    outcome : array, shape (N_OUTCOMES,)
    """

    log_prior: Any
    process: Process
    is_open: Annotated[np.ndarray, flags(1)]
    learns: Annotated[np.ndarray, flags(1)]
    follows: Annotated[np.ndarray, flags(1)]
    one_stage_share: Annotated[np.ndarray, floats(1)]
    here: Annotated[np.ndarray, floats(1)]
    is_current: Annotated[np.ndarray, flags(1)]
    proposed_prior: Annotated[np.ndarray, floats("prior values")]
    points: Annotated[np.ndarray, floats("lately", "d")]
    values: Annotated[np.ndarray, floats("lately")]
    count: Annotated[np.ndarray, integers(2)]
    counts: Annotated[np.ndarray, integers(2)]
    outcome: Annotated[np.ndarray, floats(3)]

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are no negative ones."""
        return bool(np.all(self.count >= 0))


def screens(stage, chain, uniforms):
    """Whether this transition has a first stage.

    A small share has none, whatever the state, so that a surrogate which is wrong about a region
    cannot close it.
    """
    return stage.is_open[0] and uniforms[2] >= stage.one_stage_share[0] and chain.value[0] > -np.inf


@register_jitable
def _remember(stage, chain, moved_unscreened):
    """Learn the log-likelihood that was found at `chain.proposal`.

    A move that was accepted without the first stage leaves its value of the old point behind.
    """
    if moved_unscreened:
        stage.is_current[0] = False
    if not stage.learns[0]:
        return
    i = stage.count[0] % stage.values.size
    for k in range(chain.position.size):
        stage.points[i, k] = chain.proposal[k]
    stage.values[i] = chain.proposed_value[1]
    stage.count[0] += 1
    if stage.is_open[0]:
        add_training_point(stage.process, chain.proposal, chain.proposed_value[1], chain.position)
        stage.is_current[0] = False


def _accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

    Both surrogate values are from the process as it was before the proposal is learnt.

    Returns
    -------
    acceptance : float
        That of the second stage; 0 after a rejection by the first.
    accepted : bool
    """
    log_prior = evaluate(stage.log_prior, chain.proposal, stage.proposed_prior, stage.counts)
    stage.outcome[SCREENED] += 1.0
    if not log_prior > -np.inf:
        return 0.0, False
    prior_difference = log_prior - chain.value[0]
    if not stage.is_current[0]:
        if stage.follows[0]:
            follow(stage.process, chain.value[1])
        stage.here[0] = log_surrogate(stage.process, chain.position)
        stage.is_current[0] = True
    mean, variance = predict(stage.process, chain.proposal)
    there = bounded(stage.process, mean, variance)
    stage.outcome[SPREAD] += math.sqrt(variance)
    first = first_stage(there, stage.here[0], prior_difference, log_ratio)
    passing = probability(first)
    stage.outcome[PASSED] += passing
    if not uniforms[0] < passing:
        return 0.0, False
    total = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        if stage.follows[0]:
            current = chain.value[0] + chain.value[1] + chain.value[2]
            follow(stage.process, chain.proposed_value[1])
            there = log_surrogate(stage.process, chain.proposal)
            here = log_surrogate(stage.process, chain.position)
            reverse = first_stage(here, there, -prior_difference, -log_ratio)
            second = corrected_second_stage(total - current + log_ratio, first, reverse)
        else:
            second = second_stage(chain.proposed_value[1], chain.value[1], there, stage.here[0])
        acceptance = probability(second)
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        stage.here[0] = there
    elif stage.follows[0]:
        follow(stage.process, chain.value[1])
    _remember(stage, chain, False)
    return acceptance, accepted


has_first_stage.register(FirstStage, screens)
remember.register(FirstStage, _remember)
accept_in_two_stages.register(FirstStage, _accept_in_two_stages)
