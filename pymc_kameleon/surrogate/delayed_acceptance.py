"""Delayed acceptance: a surrogate of the log-likelihood screens proposals.

The first stage knows the log prior exactly and the log-likelihood from a Gaussian process; what it
rejects costs no evaluation. The second stage corrects it (Christen & Fox 2005), so any fixed
surrogate leaves the target invariant.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.mcmc.chain import (
    accept_in_two_stages,
    has_first_stage,
    probability,
    remember,
    settle,
)
from pymc_kameleon.mcmc.layout import flags, floats, integers
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate
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
    "Prediction",
    "learn",
    "no_prediction",
]

SCREENED, PASSED, SPREAD, N_OUTCOMES = 0, 1, 2, 3
"""Positions in `FirstStage.outcome`: proposals that the first stage saw, summed probabilities of
passing it, and summed standard deviations of the surrogate."""


class Prediction(NamedTuple):
    """What a process says at a point; all arrays are changed in place.

    Attributes
    ----------
    moments : array, shape (2,)
        Mean and variance of the log-likelihood.
    gradient_mean, cross_covariance : array, shape (d,)
    gradient_covariance : array, shape (d, d)
        As in `gaussian_process.predict_with_gradient`; empty for a process of values.
    """

    moments: Annotated[np.ndarray, floats(2)]
    gradient_mean: Annotated[np.ndarray, floats("derivatives")]
    cross_covariance: Annotated[np.ndarray, floats("derivatives")]
    gradient_covariance: Annotated[np.ndarray, floats("derivatives", "derivatives")]


def no_prediction(derivatives: int) -> Prediction:
    """Return room for a prediction; `derivatives` is 0 or d."""
    vectors = np.zeros(derivatives), np.zeros(derivatives)
    return Prediction(np.zeros(2), *vectors, np.zeros((derivatives, derivatives)))


class FirstStage(NamedTuple):
    """The surrogate of a chain; all arrays are changed in place.

    Attributes
    ----------
    log_prior
        The log prior, as `numba_bridge.evaluate` takes it, with its gradient if points have one.
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
    here, there : Prediction
        At the current position, valid if `is_current[0]`, and at the proposal.
    is_current : bool array, shape (1,)
    proposed_prior : array, shape (3,) or (3 + d,)
        Log prior, two zeros, and the gradient of the log prior, at the proposal.
    points : array, shape (m, d)
        Positions evaluated lately.
    values : array, shape (m,)
        Their log-likelihoods.
    gradients : array, shape (m, d) or (m, 0)
        Gradients of these.
    count : int64 array, shape (2,)
        How many there were so far (they are stored modulo m), and how many at the last fit.
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
    here: Prediction
    there: Prediction
    is_current: Annotated[np.ndarray, flags(1)]
    proposed_prior: Annotated[np.ndarray, floats("prior values")]
    points: Annotated[np.ndarray, floats("lately", "d")]
    values: Annotated[np.ndarray, floats("lately")]
    gradients: Annotated[np.ndarray, floats("lately", "derivatives")]
    count: Annotated[np.ndarray, integers(2)]  # type: ignore[assignment]
    counts: Annotated[np.ndarray, integers(2)]
    outcome: Annotated[np.ndarray, floats(3)]

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are no negative ones."""
        return bool(np.all(self.count >= 0))


def _screens(stage, chain, uniforms):
    """Whether this transition has a first stage.

    A small share has none, whatever the state, so that a surrogate which is wrong about a region
    cannot close it.
    """
    return stage.is_open[0] and uniforms[2] >= stage.one_stage_share[0] and chain.value[0] > -np.inf


@register_jitable
def learn(stage, chain, moved_unscreened):
    """Learn the log-likelihood, and its gradient if there is one, found at `chain.proposal`.

    A move that was accepted without the first stage leaves its value of the old point behind.
    """
    if moved_unscreened:
        stage.is_current[0] = False
    if not stage.learns[0]:
        return
    dim = chain.position.size
    i = stage.count[0] % stage.values.size
    value = chain.proposed_value[1]
    # It is stored after the terms of the log density and the gradient of the log prior, if at all.
    gradient = chain.proposed_value[N_TERMS + dim :]
    for k in range(dim):
        stage.points[i, k] = chain.proposal[k]
    for k in range(stage.gradients.shape[1]):
        stage.gradients[i, k] = gradient[k]
    stage.values[i] = value
    stage.count[0] += 1
    if stage.is_open[0]:
        add_training_point(stage.process, chain.proposal, value, gradient, chain.position)
        stage.is_current[0] = False


@register_jitable
def _bounded(process, prediction):
    return bounded(process, prediction.moments[0], prediction.moments[1])


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
    process = stage.process
    if not stage.is_current[0]:
        if stage.follows[0]:
            follow(process, chain.value[1])
        stage.here.moments[0], stage.here.moments[1] = predict(process, chain.position)
        stage.is_current[0] = True
    stage.there.moments[0], stage.there.moments[1] = predict(process, chain.proposal)
    stage.outcome[SPREAD] += math.sqrt(stage.there.moments[1])
    here, there = _bounded(process, stage.here), _bounded(process, stage.there)
    first = first_stage(there, here, prior_difference, log_ratio)
    passing = probability(first)
    stage.outcome[PASSED] += passing
    if not uniforms[0] < passing:
        return 0.0, False
    total = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        if stage.follows[0]:
            current = chain.value[0] + chain.value[1] + chain.value[2]
            follow(process, chain.proposed_value[1])
            stage.there.moments[0], stage.there.moments[1] = predict(process, chain.proposal)
            here = log_surrogate(process, chain.position)
            reverse = first_stage(
                here, _bounded(process, stage.there), -prior_difference, -log_ratio
            )
            second = corrected_second_stage(total - current + log_ratio, first, reverse)
        else:
            second = second_stage(chain.proposed_value[1], chain.value[1], there, here)
        acceptance = probability(second)
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        copy_into(stage.there.moments, stage.here.moments)
    elif stage.follows[0]:
        follow(process, chain.value[1])
    learn(stage, chain, False)
    return acceptance, accepted


has_first_stage.register(FirstStage, _screens)
remember.register(FirstStage, learn)
accept_in_two_stages.register(FirstStage, _accept_in_two_stages)
