"""GP-MALA: delayed acceptance with a joint surrogate of the log-likelihood and its gradient.

The first stage has the marginalised density of the move at both ends, so its log ratio is
antisymmetric (form A of `surrogate.stages`).
"""

from typing import Annotated, Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.mcmc.acceptance import has_first_stage, remember
from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.langevin import accept_langevin_in_two_stages
from pymc_kameleon.mcmc.layout import flags, floats, integers
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate, jit
from pymc_kameleon.surrogate.delayed_acceptance import PASSED, SCREENED, SPREAD, screens
from pymc_kameleon.surrogate.joint_process import JointProcess, predict_joint
from pymc_kameleon.surrogate.joint_training_set import add_joint_training_point
from pymc_kameleon.surrogate.stages import (
    log_exact_density,
    log_marginal_density,
    mala_first_stage,
    mala_second_stage,
)

__all__ = ["JointFirstStage", "predict_into"]


class Prediction(NamedTuple):
    """What a joint process says at a place; all arrays are changed in place.

    Attributes
    ----------
    moments : array, shape (2,)
        Mean and variance of the log-likelihood.
    gradient_mean, cross_covariance : array, shape (d,)
    gradient_covariance : array, shape (d, d)
    """

    moments: Annotated[np.ndarray, floats(2)]
    gradient_mean: Annotated[np.ndarray, floats("d")]
    cross_covariance: Annotated[np.ndarray, floats("d")]
    gradient_covariance: Annotated[np.ndarray, floats("d", "d")]


class JointFirstStage(NamedTuple):
    """The joint surrogate of a chain; attributes as in `FirstStage`, and those below.

    Attributes
    ----------
    log_prior
        Log prior and its gradient, as `numba_bridge.evaluate` takes them.
    process : JointProcess
    here, there : Prediction
        At the current position, valid if `is_current[0]`, and at the proposal.
    proposed_prior : array, shape (3 + d,)
        Log prior, two zeros, and gradient of the log prior, at the proposal.
    gradients : array, shape (m, d)
        Gradients of the log-likelihood at `points`.
    """

    log_prior: Any
    process: JointProcess
    is_open: Annotated[np.ndarray, flags(1)]
    learns: Annotated[np.ndarray, flags(1)]
    one_stage_share: Annotated[np.ndarray, floats(1)]
    here: Prediction
    there: Prediction
    is_current: Annotated[np.ndarray, flags(1)]
    proposed_prior: Annotated[np.ndarray, floats("prior values")]
    points: Annotated[np.ndarray, floats("lately", "d")]
    values: Annotated[np.ndarray, floats("lately")]
    gradients: Annotated[np.ndarray, floats("lately", "d")]
    count: Annotated[np.ndarray, integers(2)]
    counts: Annotated[np.ndarray, integers(2)]
    outcome: Annotated[np.ndarray, floats(3)]

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are no negative ones."""
        return bool(np.all(self.count >= 0))


@jit
def predict_into(process, x, prediction):
    """Predict at `x` (d,)."""
    prediction.moments[0], prediction.moments[1] = predict_joint(
        process,
        x,
        prediction.gradient_mean,
        prediction.cross_covariance,
        prediction.gradient_covariance,
    )


@register_jitable
def _copy_prediction(source, out):
    copy_into(source.moments, out.moments)
    copy_into(source.gradient_mean, out.gradient_mean)
    copy_into(source.cross_covariance, out.cross_covariance)
    copy_into(source.gradient_covariance.ravel(), out.gradient_covariance.ravel())


@register_jitable
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


@register_jitable
def _log_exact(start, end, value, step_size, factor):
    dim = start.size
    gradient = np.empty(dim)
    for k in range(dim):
        gradient[k] = value[N_TERMS + k] + value[N_TERMS + dim + k]
    total = value[0] + value[1] + value[2]
    return log_exact_density(start, end, total, gradient, step_size, factor)


@register_jitable
def _remember(stage, chain, moved_unscreened):
    """Learn what was found at `chain.proposal`; as for `FirstStage`, with the gradient."""
    if moved_unscreened:
        stage.is_current[0] = False
    if not stage.learns[0]:
        return
    dim = chain.position.size
    i = stage.count[0] % stage.values.size
    gradient = chain.proposed_value[N_TERMS + dim :]
    for k in range(dim):
        stage.points[i, k] = chain.proposal[k]
        stage.gradients[i, k] = gradient[k]
    stage.values[i] = chain.proposed_value[1]
    stage.count[0] += 1
    if stage.is_open[0]:
        add_joint_training_point(
            stage.process, chain.proposal, chain.proposed_value[1], gradient, chain.position
        )
        stage.is_current[0] = False


def _accept_langevin(stage, log_density, chain, step_size, factor, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

    Returns
    -------
    acceptance : float
        That of the second stage; 0 after a rejection by the first.
    """
    log_prior = evaluate(stage.log_prior, chain.proposal, stage.proposed_prior, stage.counts)
    stage.outcome[SCREENED] += 1.0
    if not log_prior > -np.inf:
        return 0.0
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
        return 0.0
    total = evaluate(log_density, proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        log_ratio = _log_exact(proposal, x, chain.proposed_value, step_size, factor)
        log_ratio -= _log_exact(x, proposal, chain.value, step_size, factor)
        acceptance = probability(mala_second_stage(log_ratio, reverse - forward))
    if settle(chain, acceptance, uniforms[1]):
        _copy_prediction(stage.there, stage.here)
    _remember(stage, chain, False)
    return acceptance


has_first_stage.register(JointFirstStage, screens)
remember.register(JointFirstStage, _remember)
accept_langevin_in_two_stages.register(JointFirstStage, _accept_langevin)
