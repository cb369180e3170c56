"""Delayed acceptance with the current log-likelihood as the prior mean of the surrogate.

The surrogate then depends on the state, so the second stage needs the probability that the first
would let the reverse move through, under the mean of the proposed point.
"""

import numpy as np

from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import call_for_nothing, evaluate
from pymc_kameleon.surrogate.delayed_acceptance import screen
from pymc_kameleon.surrogate.gaussian_process import bounded, log_surrogate, predict
from pymc_kameleon.surrogate.stages import corrected_second_stage, first_stage
from pymc_kameleon.surrogate.training_set import follow

__all__ = ["accept_with_current_mean"]


def accept_with_current_mean(stage, log_density, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

    Returns
    -------
    acceptance : float
        That of the second stage; 0 after a rejection by the first.
    accepted : bool
    """
    process, there = stage.process, stage.there.moments
    if not stage.is_current[0]:
        follow(process, chain.value[1])
    passes, log_first, log_prior_ratio, _, _ = screen(stage, chain, log_ratio, uniforms)
    if not passes:
        return 0.0, False
    total = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        follow(process, chain.proposed_value[1])
        there[0], there[1] = predict(process, chain.proposal)
        log_reverse = first_stage(
            log_surrogate(process, chain.position),
            bounded(process, there[0], there[1]),
            -log_prior_ratio,
            -log_ratio,
        )
        current = chain.value[0] + chain.value[1] + chain.value[2]
        acceptance = probability(
            corrected_second_stage(total - current + log_ratio, log_first, log_reverse)
        )
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        copy_into(there, stage.here.moments)
    else:
        follow(process, chain.value[1])
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted
