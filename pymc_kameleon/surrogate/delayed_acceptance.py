"""Delayed acceptance: a surrogate of the log-likelihood screens proposals (GP-MH and GP-MALA).

What the first stage rejects costs no evaluation. The second stage corrects it, so that any fixed
surrogate leaves the target invariant. Both numbers of a ratio come from the same surrogate, as it
was before the proposed point was learnt.

J. A. Christen and C. Fox (2005), Markov chain Monte Carlo using an approximation, Journal of
Computational and Graphical Statistics 14, doi:10.1198/106186005X76983; for the ratios see
`acceptance_ratios`.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import typeof, types

from pymc_kameleon.gp.sparse_gp import (
    SparseGP,
    add_centre,
    bounded,
    follow,
    log_surrogate,
    predict,
    predict_with_gradient,
)
from pymc_kameleon.mcmc.bridge.address import address_once, by_address, call_for_nothing
from pymc_kameleon.mcmc.bridge.jit import jit, jit_by_address, jitable
from pymc_kameleon.mcmc.chain import (
    N_TERMS,
    accept_in_one_stage,
    accept_in_two_stages,
    accept_or_stay,
    evaluate,
    probability,
)
from pymc_kameleon.mcmc.linalg import copy_into, copy_matrix_into
from pymc_kameleon.mcmc.proposals.langevin import accept_langevin, accept_langevin_in_two_stages
from pymc_kameleon.surrogate.acceptance_ratios import (
    corrected_second_stage,
    first_stage,
    log_exact_density,
    log_marginal_density,
    log_probability,
    second_stage,
)

SCREENED, PASSED, SPREAD, N_OUTCOMES = 0, 1, 2, 3
"""Positions in `FirstStage.outcome`: proposals that the first stage saw, summed probabilities of
passing it, and summed standard deviations of the surrogate."""

call_for_acceptance = by_address(types.Tuple((types.float64, types.boolean)))
call_for_truth = by_address(types.boolean)


class Prediction(NamedTuple):
    """What a process says at a point; all arrays are changed in place.

    Mean and variance of the log-likelihood (2,), mean of its gradient (d,), covariance of the two
    (d,), and covariance of the gradient (d, d); the last three are empty for a process of values.
    """

    moments: np.ndarray
    gradient_mean: np.ndarray
    cross_covariance: np.ndarray
    gradient_covariance: np.ndarray


def no_prediction(derivatives: int) -> Prediction:
    """Return room for a prediction; `derivatives` is 0 or d."""
    vectors = np.zeros(derivatives), np.zeros(derivatives)
    return Prediction(np.zeros(2), *vectors, np.zeros((derivatives, derivatives)))


class Routines(NamedTuple):
    """What a first stage calls: addresses in compiled code, callables in plain Python."""

    accept: Any
    learn: Any
    add_centre: Any


class FirstStage(NamedTuple):
    """The surrogate of a chain; all arrays are changed in place, and flags have shape (1,).

    `log_prior` is as `mcmc.chain.evaluate` takes it, with its gradient if points have one. The
    process screens proposals where it `is_open`; its prior mean `follows` the log-likelihood of the
    current position or not; `here`, what it says at that position, `is_current` or not; `there` is
    at the proposal. Of m positions evaluated lately there are `points` (m, d), log-likelihoods
    `values` (m,) and `gradients` (m, d) or (m, 0), stored modulo m. `count` (2,) says how many
    there were so far, and how many at the last fit; `counts` (2,) are evaluations of the log prior.
    """

    routines: Any
    log_prior: Any
    process: SparseGP
    is_open: np.ndarray
    learns: np.ndarray
    follows: np.ndarray
    one_stage_share: np.ndarray
    here: Prediction
    there: Prediction
    is_current: np.ndarray
    proposed_prior: np.ndarray
    points: np.ndarray
    values: np.ndarray
    gradients: np.ndarray
    count: np.ndarray  # type: ignore[assignment]
    counts: np.ndarray
    outcome: np.ndarray

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are no negative ones, and the process has a variance."""
        return bool(np.all(self.count >= 0)) and self.process.has_variance


@jitable
def is_screened(stage, chain, uniforms):
    """Whether this transition has a first stage.

    A small share has none, whatever the state, so that a surrogate which is wrong about a region
    cannot close it.
    """
    return stage.is_open[0] and uniforms[2] >= stage.one_stage_share[0] and chain.value[0] > -np.inf


@jitable
def _log_likelihood(value):
    """Sum of its exact terms and of its kept estimate, 0 if there is none."""
    return value[1] + value[2]


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
    value = _log_likelihood(chain.proposed_value)
    # It is stored after the terms of the log density and the gradient of the log prior, if at all.
    gradient = chain.proposed_value[N_TERMS + dim :]
    for k in range(dim):
        stage.points[i, k] = chain.proposal[k]
    for k in range(stage.gradients.shape[1]):
        stage.gradients[i, k] = gradient[k]
    stage.values[i] = value
    stage.count[0] += 1
    if stage.is_open[0]:
        call_for_truth(stage.routines.add_centre, (stage.process, chain.proposal, value))
        stage.is_current[0] = False


@jitable
def screen(stage, chain, log_ratio, uniforms):
    """First stage of `chain.proposal`, by the process as it is before the proposal is learnt.

    Returns whether it passes, the log probability of that, log p(x*) - log p(x), S(x*) and S(x).
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

    Where the prior mean `follows` the state, the second stage needs the probability that the first
    would let the reverse move through, under the mean of the proposed point. Returns the acceptance
    probability of the second stage, 0 after a rejection by the first, and whether the proposal was
    accepted.
    """
    process, there, follows = stage.process, stage.there.moments, stage.follows[0]
    if follows and not stage.is_current[0]:
        follow(process, chain.value[1])
    screened = screen(stage, chain, log_ratio, uniforms)
    passes, log_first, log_prior_ratio, proposed, current = screened
    if not passes:
        return 0.0, False
    total = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf and follows:
        follow(process, chain.proposed_value[1])
        there[0], there[1] = predict(process, chain.proposal)
        log_reverse = first_stage(
            log_surrogate(process, chain.position),
            bounded(process, there[0], there[1]),
            -log_prior_ratio,
            -log_ratio,
        )
        total -= chain.value[0] + chain.value[1] + chain.value[2]
        acceptance = probability(corrected_second_stage(total + log_ratio, log_first, log_reverse))
    elif total > -np.inf:
        acceptance = probability(
            second_stage(
                _log_likelihood(chain.proposed_value),
                _log_likelihood(chain.value),
                proposed,
                current,
            )
        )
    accepted = accept_or_stay(chain, acceptance, uniforms[1])
    if accepted:
        copy_into(there, stage.here.moments)
    elif follows:
        follow(process, chain.value[1])
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted


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


def accept_with_gradients(stage, log_density, chain, factor, step_size, uniforms):
    """As `accept_with_values`, with proposals along the gradient: form A of `acceptance_ratios`."""
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
    passing = probability(log_probability(reverse - forward))
    stage.outcome[PASSED] += passing
    if not uniforms[0] < passing:
        return 0.0, False
    total = evaluate(log_density, proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        log_ratio = _log_exact(proposal, x, chain.proposed_value, step_size, factor)
        log_ratio -= _log_exact(x, proposal, chain.value, step_size, factor)
        acceptance = probability(log_probability(log_ratio - (reverse - forward)))
    accepted = accept_or_stay(chain, acceptance, uniforms[1])
    if accepted:
        here, there = stage.here, stage.there
        copy_into(there.moments, here.moments)
        copy_into(there.gradient_mean, here.gradient_mean)
        copy_into(there.cross_covariance, here.cross_covariance)
        copy_matrix_into(there.gradient_covariance, here.gradient_covariance)
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted


# which of them -----------------------------------------------------------------------------------


_compiled = functools.cache(jit_by_address)


def _acceptance(stage):
    return accept_with_gradients if stage.gradients.shape[1] > 0 else accept_with_values


def plain_routines(stage) -> Routines:
    """Return what a `FirstStage` calls in plain Python."""
    return Routines(_acceptance(stage), learn, add_centre)


def compiled_routines(stage, chain) -> Routines:
    """Return the addresses that a `FirstStage` of a `Chain` calls in compiled code."""
    accept, number, vector = _acceptance(stage), types.float64, types.float64[::1]

    def stage_type():
        return typeof(stage._replace(routines=Routines(0, 0, 0), log_prior=np.zeros(0, np.intp)))

    def of_acceptance():
        has_gradients = accept is accept_with_gradients
        move = (types.float64[:, ::1], number) if has_gradients else (number,)
        return stage_type(), typeof(np.zeros(0, np.intp)), typeof(chain), *move, vector

    return Routines(
        address_once(_compiled(accept), of_acceptance),
        address_once(_compiled(learn), lambda: (stage_type(), typeof(chain), types.boolean)),
        address_once(add_centre, lambda: (typeof(stage.process), vector, number)),
    )


def _accept(stage, log_density, chain, log_ratio, uniforms):
    # A process with gradients screens moves along these alone.
    if stage.gradients.shape[1] == 0 and is_screened(stage, chain, uniforms):
        arguments = (stage, log_density, chain, log_ratio, uniforms)
        return call_for_acceptance(stage.routines.accept, arguments)
    acceptance, accepted = accept_in_one_stage(log_density, chain, log_ratio, uniforms[0])
    call_for_nothing(stage.routines.learn, (stage, chain, accepted))
    return acceptance, accepted


accept_in_two_stages.register(FirstStage, _accept, allocates=False)


def _accept_langevin(stage, log_density, chain, factor, step_size, normals, uniforms):
    if is_screened(stage, chain, uniforms):
        arguments = (stage, log_density, chain, factor, step_size, uniforms)
        return call_for_acceptance(stage.routines.accept, arguments)
    acceptance, accepted = accept_langevin(
        log_density, chain, factor, step_size, normals, uniforms[0]
    )
    call_for_nothing(stage.routines.learn, (stage, chain, accepted))
    return acceptance, accepted


accept_langevin_in_two_stages.register(FirstStage, _accept_langevin, allocates=True)
