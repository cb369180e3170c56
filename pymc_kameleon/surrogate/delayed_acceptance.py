"""Delayed acceptance: a surrogate of the log-likelihood screens proposals (GP-MH).

The first stage knows the log prior exactly and the log-likelihood from a Gaussian process; what it
rejects costs no evaluation. The second stage corrects it, so that any fixed surrogate leaves the
target invariant. Both numbers of a ratio come from the same surrogate, as it was before the
proposed point was learnt.

References
----------
J. A. Christen and C. Fox (2005), Markov chain Monte Carlo using an approximation, Journal of
Computational and Graphical Statistics 14, doi:10.1198/106186005X76983.
A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
exploratory-exploitation effect.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from pymc_kameleon.mcmc.chain import (
    accept_in_one_stage,
    accept_in_two_stages,
    probability,
    settle,
)
from pymc_kameleon.mcmc.linalg import copy_into
from pymc_kameleon.mcmc.numba_bridge import (
    N_TERMS,
    by_address,
    call_for_nothing,
    evaluate,
    jit,
    jitable,
)
from pymc_kameleon.surrogate.sparse_gp import SparseGP, bounded, follow, log_surrogate, predict

__all__ = [
    "N_OUTCOMES",
    "PASSED",
    "SCREENED",
    "SPREAD",
    "FirstStage",
    "Prediction",
    "Routines",
    "accept_with_current_mean",
    "accept_with_values",
    "call_for_acceptance",
    "corrected_second_stage",
    "first_stage",
    "is_screened",
    "learn",
    "log_probability",
    "no_prediction",
    "screen",
    "second_stage",
]

SCREENED, PASSED, SPREAD, N_OUTCOMES = 0, 1, 2, 3
"""Positions in `FirstStage.outcome`: proposals that the first stage saw, summed probabilities of
passing it, and summed standard deviations of the surrogate."""

call_for_acceptance = by_address(types.Tuple((types.float64, types.boolean)))
call_for_truth = by_address(types.boolean)


# the two ratios, as logs -------------------------------------------------------------------------


@jit
def log_probability(log_ratio):
    """Log of 1 ∧ exp(`log_ratio`); -inf, a rejection, where the ratio is NaN."""
    if log_ratio >= 0.0:
        return 0.0
    if log_ratio < 0.0:
        return log_ratio
    return -np.inf


@jit
def first_stage(surrogate_proposed, surrogate_current, log_prior_ratio, log_proposal_ratio):
    """Log acceptance probability of the first stage of GP-MH.

    `surrogate_proposed` and `surrogate_current` are S(x*) and S(x), by the same code even where the
    log-likelihood is known. `log_prior_ratio` is log p(x*) - log p(x), with the Jacobians of
    transforms, and `log_proposal_ratio` is log q(x | x*) - log q(x* | x).
    """
    return log_probability(
        surrogate_proposed - surrogate_current + log_prior_ratio + log_proposal_ratio
    )


@jit
def second_stage(likelihood_proposed, likelihood_current, surrogate_proposed, surrogate_current):
    """Log acceptance probability of the second stage of GP-MH; prior and proposal have cancelled.

    It takes the log-likelihoods of x* and x, then S(x*) and S(x) as the first stage was given them.
    """
    return log_probability(
        likelihood_proposed - likelihood_current - (surrogate_proposed - surrogate_current)
    )


@jit
def corrected_second_stage(log_ratio, log_first, log_first_reverse):
    """Log acceptance probability of the second stage, for a first stage of any kind.

    `log_ratio` is the log of the Metropolis-Hastings ratio without a surrogate; the others are logs
    of the probabilities that the first stage lets x -> x* through, and that it would let x* -> x
    through. It serves a prior mean that follows the current point, and form B of GP-MALA.
    """
    return log_probability(log_ratio + log_first_reverse - log_first)


# the surrogate of a chain -------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What a process says at a point; all arrays are changed in place.

    `moments` (2,) are mean and variance of the log-likelihood. The others are those of
    `sparse_gp.predict_with_gradient`: mean of its gradient (d,), covariance of the two (d,), and
    covariance of the gradient (d, d); they are empty for a process of values.
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
    """What a first stage calls: addresses in compiled code, callables in plain Python.

    `accept` is of the type of `accept_with_values`; for proposals along a gradient, it is
    `accept_with_gradients`. The others are `learn` and `sparse_gp.add_centre`.
    """

    accept: Any
    learn: Any
    add_centre: Any


class FirstStage(NamedTuple):
    """The surrogate of a chain; all arrays are changed in place.

    `log_prior` is as `numba_bridge.evaluate` takes it, with its gradient if points have one, and
    `process` is that of the log-likelihood. Four are boolean, of shape (1,): whether the process
    screens proposals (`is_open`); whether evaluations are learnt; whether the prior mean `follows`
    the log-likelihood of the current position, so that the surrogate depends on the state, and the
    reverse first stage has another one; and whether `here`, what the process says at that position,
    `is_current`. `there` is at the proposal, where `proposed_prior` (3,) or (3 + d,) has the log
    prior, two zeros, and its gradient. `one_stage_share` (1,) is that of transitions without a
    first stage.

    Of m positions evaluated lately there are `points` (m, d), log-likelihoods `values` (m,) and
    `gradients` (m, d) or (m, 0). `count` (2,) says how many there were so far (they are stored
    modulo m), and how many at the last fit; `counts` (2,) are evaluations of the log prior, as for
    the log density. `outcome` has shape (N_OUTCOMES,).
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
        call_for_truth(stage.routines.add_centre, (stage.process, chain.proposal, value))
        stage.is_current[0] = False


@jitable
def screen(stage, chain, log_ratio, uniforms):
    """First stage of `chain.proposal`, by the process as it is before the proposal is learnt.

    Returns whether it passes, the log of the probability that it does, log p(x*) - log p(x), and
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

    Returns the acceptance probability of the second stage, which is 0 after a rejection by the
    first, and whether the proposal was accepted.
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


def accept_with_current_mean(stage, log_density, chain, log_ratio, uniforms):
    """As `accept_with_values`, with the current log-likelihood as the prior mean of the process.

    The surrogate then depends on the state, so the second stage needs the probability that the
    first would let the reverse move through, under the mean of the proposed point.
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


def _accept(stage, log_density, chain, log_ratio, uniforms):
    # A process with gradients screens moves along these alone.
    if stage.gradients.shape[1] == 0 and is_screened(stage, chain, uniforms):
        arguments = (stage, log_density, chain, log_ratio, uniforms)
        return call_for_acceptance(stage.routines.accept, arguments)
    acceptance, accepted = accept_in_one_stage(log_density, chain, log_ratio, uniforms[0])
    call_for_nothing(stage.routines.learn, (stage, chain, accepted))
    return acceptance, accepted


accept_in_two_stages.register(FirstStage, _accept, allocates=False)
