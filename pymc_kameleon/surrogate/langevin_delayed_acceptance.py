"""GP-MALA: delayed acceptance with one surrogate of the log-likelihood and its gradient.

The first stage has the marginalised density of the move at both ends, so its log ratio is
antisymmetric (form A of `surrogate.stages`).
"""

import numpy as np

from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.langevin import accept_langevin_in_two_stages
from pymc_kameleon.mcmc.linalg import copy_into, copy_matrix_into
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, call_for_nothing, evaluate, jit, jitable
from pymc_kameleon.surrogate.delayed_acceptance import (
    PASSED,
    SCREENED,
    SPREAD,
    FirstStage,
    call_for_acceptance,
)
from pymc_kameleon.surrogate.gaussian_process import predict_with_gradient
from pymc_kameleon.surrogate.stages import (
    log_exact_density,
    log_marginal_density,
    mala_first_stage,
    mala_second_stage,
)

__all__ = ["accept_with_gradients", "predict_into"]


@jit
def predict_into(process, x, prediction):
    """Predict at `x` (d,)."""
    prediction.moments[0], prediction.moments[1] = predict_with_gradient(
        process,
        x,
        prediction.gradient_mean,
        prediction.cross_covariance,
        prediction.gradient_covariance,
    )


@jitable
def _copy_prediction(source, out):
    copy_into(source.moments, out.moments)
    copy_into(source.gradient_mean, out.gradient_mean)
    copy_into(source.cross_covariance, out.cross_covariance)
    copy_matrix_into(source.gradient_covariance, out.gradient_covariance)


@jitable
def _log_marginal(start, end, value, prediction, step_size, factor):
    dim = start.size
    return log_marginal_density(
        start,
        end,
        value[0],
        value[N_TERMS : N_TERMS + dim],
        prediction.moments[0],
        prediction.moments[1],
        prediction.gradient_mean,
        prediction.cross_covariance,
        prediction.gradient_covariance,
        step_size,
        factor,
    )


@jitable(allocates=True)
def _log_exact(start, end, value, step_size, factor):
    dim = start.size
    gradient = np.empty(dim)
    for k in range(dim):
        gradient[k] = value[N_TERMS + k] + value[N_TERMS + dim + k]
    total = value[0] + value[1] + value[2]
    return log_exact_density(start, end, total, gradient, step_size, factor)


def accept_with_gradients(stage, log_density, chain, step_size, factor, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

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
    x, proposal = chain.position, chain.proposal
    if not stage.is_current[0]:
        predict_into(stage.process, x, stage.here)
        stage.is_current[0] = True
    predict_into(stage.process, proposal, stage.there)
    stage.outcome[SPREAD] += np.sqrt(stage.there.moments[1])
    forward = _log_marginal(x, proposal, chain.value, stage.here, step_size, factor)
    reverse = _log_marginal(proposal, x, stage.proposed_prior, stage.there, step_size, factor)
    passing = probability(mala_first_stage(reverse, forward))
    stage.outcome[PASSED] += passing
    if not uniforms[0] < passing:
        return 0.0, False
    total = evaluate(log_density, proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        log_ratio = _log_exact(proposal, x, chain.proposed_value, step_size, factor)
        log_ratio -= _log_exact(x, proposal, chain.value, step_size, factor)
        acceptance = probability(mala_second_stage(log_ratio, reverse - forward))
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        _copy_prediction(stage.there, stage.here)
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted


def _accept_langevin(stage, log_density, chain, step_size, factor, uniforms):
    arguments = (stage, log_density, chain, step_size, factor, uniforms)
    return call_for_acceptance(stage.routines.accept, arguments)[0]


accept_langevin_in_two_stages.register(FirstStage, _accept_langevin, allocates=False)
