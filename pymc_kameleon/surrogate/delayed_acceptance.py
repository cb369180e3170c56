"""Delayed acceptance: a surrogate of the log-likelihood screens proposals.

The first stage knows the log prior exactly and the log-likelihood from a Gaussian process; what it
rejects costs no evaluation. The second stage corrects it (Christen & Fox 2005), so any fixed
surrogate leaves the target invariant.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
from numba import types

from pymc_kameleon.mcmc.chain import (
    accept_in_two_stages,
    has_first_stage,
    probability,
    remember,
    settle,
)
from pymc_kameleon.mcmc.layout import flags, floats, integers
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, by_address, call_for_nothing, evaluate, jitable
from pymc_kameleon.surrogate.gaussian_process import Process, bounded, predict
from pymc_kameleon.surrogate.stages import first_stage, second_stage

__all__ = [
    "N_OUTCOMES",
    "PASSED",
    "SCREENED",
    "SPREAD",
    "FirstStage",
    "Prediction",
    "Routines",
    "accept_with_values",
    "call_for_acceptance",
    "learn",
    "no_prediction",
    "screen",
]

SCREENED, PASSED, SPREAD, N_OUTCOMES = 0, 1, 2, 3
"""Positions in `FirstStage.outcome`: proposals that the first stage saw, summed probabilities of
passing it, and summed standard deviations of the surrogate."""

call_for_acceptance = by_address(types.Tuple((types.float64, types.boolean)))
call_for_truth = by_address(types.boolean)


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


class Routines(NamedTuple):
    """What a first stage calls: addresses in compiled code, callables in plain Python.

    Attributes
    ----------
    accept
        Of type `accept_with_values`; for proposals along a gradient, `accept_with_gradients`.
    learn
        `learn`.
    add_training_point
        `budget.add_training_point`.
    """

    accept: Any
    learn: Any
    add_training_point: Any


class FirstStage(NamedTuple):
    """The surrogate of a chain; all arrays are changed in place.

    Attributes
    ----------
    routines : Routines
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

    routines: Any
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
        call_for_truth(
            stage.routines.add_training_point,
            (stage.process, chain.proposal, value, gradient, chain.position),
        )
        stage.is_current[0] = False


@jitable
def screen(stage, chain, log_ratio, uniforms):
    """First stage of `chain.proposal`, by the process as it is before the proposal is learnt.

    Returns
    -------
    passes : bool
    log_first : float
        Log of the probability of passing.
    log_prior_ratio : float
        log p(x*) - log p(x).
    proposed, current : float
        S(x*) and S(x).
    """
    log_prior = evaluate(stage.log_prior, chain.proposal, stage.proposed_prior, stage.counts)
    stage.outcome[SCREENED] += 1.0
    if not log_prior > -np.inf:
        return False, -np.inf, -np.inf, 0.0, 0.0
    log_prior_ratio = log_prior - chain.value[0]
    process, here, there = stage.process, stage.here.moments, stage.there.moments
    if not stage.is_current[0]:
        here[0], here[1] = predict(process, chain.position)
        stage.is_current[0] = True
    there[0], there[1] = predict(process, chain.proposal)
    stage.outcome[SPREAD] += math.sqrt(there[1])
    current = bounded(process, here[0], here[1])
    proposed = bounded(process, there[0], there[1])
    log_first = first_stage(proposed, current, log_prior_ratio, log_ratio)
    passing = probability(log_first)
    stage.outcome[PASSED] += passing
    return uniforms[0] < passing, log_first, log_prior_ratio, proposed, current


def accept_with_values(stage, log_density, chain, log_ratio, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

    Returns
    -------
    acceptance : float
        That of the second stage; 0 after a rejection by the first.
    accepted : bool
    """
    passes, _, _, proposed, current = screen(stage, chain, log_ratio, uniforms)
    if not passes:
        return 0.0, False
    total = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        acceptance = probability(
            second_stage(chain.proposed_value[1], chain.value[1], proposed, current)
        )
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        copy_into(stage.there.moments, stage.here.moments)
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted


def _accept_in_two_stages(stage, log_density, chain, log_ratio, uniforms):
    arguments = (stage, log_density, chain, log_ratio, uniforms)
    return call_for_acceptance(stage.routines.accept, arguments)


def _learn(stage, chain, moved_unscreened):
    call_for_nothing(stage.routines.learn, (stage, chain, moved_unscreened))


has_first_stage.register(FirstStage, _screens, allocates=False)
remember.register(FirstStage, _learn, allocates=False)
accept_in_two_stages.register(FirstStage, _accept_in_two_stages, allocates=False)
