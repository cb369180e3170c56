r"""Surrogate transitions: many moves on a surrogate for one evaluation of the true density.

A proposal is the end of a short chain, each move of which leaves :math:`e^{s(u)}` invariant and is
reversible: a trajectory, or a difference of two fixed points, which crosses between modes. The
number of moves does not depend on the state, so the whole is reversible too, and

.. math:: \alpha = 1 \wedge \frac{\pi(x^*) e^{s(x)}}{\pi(x) e^{s(x^*)}}

accepts it exactly, whatever the surrogate s is (Liu 2001, Monte Carlo Strategies in Scientific
Computing, section 9.4.3). A share of the transitions has moves on s / T, and s / T in the ratio.
This module gives log :math:`e^{s(x) / T} / e^{s(x^*) / T}`; `mcmc.chain` accepts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import typeof, types

from pymc_kameleon.mcmc.bridge.address import address_once
from pymc_kameleon.mcmc.bridge.jit import jit, jit_inner, resolved_once
from pymc_kameleon.mcmc.chain import probability
from pymc_kameleon.mcmc.differences import add_difference, picked_difference, usual_scale
from pymc_kameleon.mcmc.history import History, record
from pymc_kameleon.mcmc.linalg import copy_into, dot
from pymc_kameleon.mcmc.proposals import ACCEPT, N_UNIFORMS, PICK, register_proposal
from pymc_kameleon.surrogate.evaluations import Evaluations, keep_evaluation
from pymc_kameleon.surrogate.hmc import Integrator, move_by_trajectory
from pymc_kameleon.surrogate.posterior_surrogate import (
    PosteriorSurrogate,
    call_for_value,
    move_coordinates,
    new_workspace,
    raw_coordinates,
    surrogate_value,
)

COLD, HOT = 0, 1
"""Indices of transitions with the surrogate, and with the surrogate at a higher temperature."""

LEAST_MOVES, MOVES = 4, 8
"""Least and largest number of moves on the surrogate between two evaluations."""

DIFFERENCES, JUMPS, TRIES = 0.5, 0.7, 12
"""Share of the moves that add differences of two points, share of whole ones among these, which
cross between modes, and how many are tried in such a move."""

UNIFORMS = 1 + 4 * TRIES
"""Uniform random numbers that a move takes."""

HOT_HEAT = 2.0
"""Part above 1 of the temperature of hot transitions, times the root of the dimension."""


class TransitionRecord(NamedTuple):
    """What a chain that adapts remembers of each transition; all arrays are changed in place.

    Rows of `outcome` (2, 4) are of trajectories and of differences: how many, and sums of their
    acceptance probabilities, of squared distances that the chain moved, in units of `scales` (d,),
    and of the squares of these. No distance counts for more than that of two independent points, so
    that one return from far away does not outweigh all else.
    """

    history: History
    evaluations: Evaluations
    outcome: np.ndarray
    scales: np.ndarray
    last: np.ndarray
    keeps_evaluations: bool


class SurrogateTransition(NamedTuple):
    """The proposal; `move` is what `move_routine` returned.

    Differences of `points` (d, n), in coordinates of moves, are moves.
    """

    surrogate: PosteriorSurrogate
    integrator: Integrator
    points: np.ndarray
    move: int | Callable
    record: TransitionRecord | None


@jit_inner
def temperature_of(heat, dim):
    """Temperature whose part above 1 is `heat` over the root of the dimension."""
    return 1.0 + heat / math.sqrt(dim)


@jit_inner
def _move_by_differences(surrogate, points, radius, temperature, u, value, uniforms, workspace):
    dim, n = points.shape
    moved = workspace.other
    for t in range(TRIES):
        four = uniforms[4 * t : 4 * t + 4]
        i, j, scale = picked_difference(n, four[0], four[1], four[2], JUMPS, usual_scale(dim))
        add_difference(u, points, i, j, scale, moved)
        if dot(moved, moved, dim) <= radius * radius:
            end = surrogate_value(surrogate, moved, workspace)
            if four[3] < probability((end - value) / temperature):
                copy_into(moved, u)
                value = end
    return value


@jit
def _move(surrogate, integrator, points, temperature, u, value, normals, uniforms, workspace):
    """Move `u` (d,) in place so that exp(s / T) stays invariant; return s of where it is."""
    if uniforms[0] < DIFFERENCES and points.shape[1] > 1:
        radius = integrator.radius[0]
        return _move_by_differences(
            surrogate, points, radius, temperature, u, value, uniforms[1:], workspace
        )
    return move_by_trajectory(
        surrogate, integrator, temperature, u, value, normals, uniforms[1:], workspace
    )


def move_routine(surrogate: PosteriorSurrogate, integrator: Integrator) -> int | Callable:
    """Return the address of a move on a surrogate, compiled once for all that make moves."""

    def argument_types():
        number, vector, matrix = types.float64, types.float64[::1], types.float64[:, ::1]
        workspace = typeof(new_workspace(surrogate))
        arguments = matrix, number, vector, number, vector, vector, workspace
        return typeof(surrogate), typeof(integrator), *arguments

    return address_once(_move, argument_types, type(surrogate))


def propose_by_moves(proposal, chain, normals, uniforms):
    """Move on the surrogate to `chain.proposal`; return the ratio of s / T, and which T it was."""
    dim, surrogate, integrator = chain.position.size, proposal.surrogate, proposal.integrator
    u, workspace = np.empty(dim), new_workspace(surrogate)
    move_coordinates(surrogate, chain.position, workspace.standardised, u)
    if not dot(u, u, dim) <= integrator.radius[0] ** 2:
        return -np.inf, COLD
    is_hot = uniforms[ACCEPT + 2] < integrator.hot_share[0]
    temperature = temperature_of(HOT_HEAT, dim) if is_hot else 1.0
    start = value = surrogate_value(surrogate, u, workspace)
    for m in range(LEAST_MOVES + int(uniforms[PICK] * (1 + MOVES - LEAST_MOVES))):
        first = N_UNIFORMS + m * UNIFORMS
        value = call_for_value(
            proposal.move,
            (
                surrogate,
                integrator,
                proposal.points,
                temperature,
                u,
                value,
                normals[m * dim : (m + 1) * dim],
                uniforms[first : first + UNIFORMS],
                workspace,
            ),
        )
    index = HOT if is_hot else COLD
    if value == start:  # no move was made
        return -np.inf, index
    raw_coordinates(surrogate, u, workspace.standardised, chain.proposal)
    return (start - value) / temperature, index


def learn_from_transition(proposal, chain, is_evaluated, acceptance, index):
    """Remember a transition, and its evaluation."""
    known, position = proposal.record, chain.position
    if is_evaluated and known.keeps_evaluations:
        keep_evaluation(known.evaluations, chain.proposal, chain.proposed_value)
    record(known.history, position)
    distance = 0.0
    for k in range(position.size):
        distance += ((position[k] - known.last[k]) / known.scales[k]) ** 2
        known.last[k] = position[k]
    if index != HOT:
        outcome = known.outcome[0 if index == COLD else 1]
        outcome[0] += 1.0
        outcome[1] += acceptance
        distance = min(distance, 2.0 * position.size)
        outcome[2] += distance
        outcome[3] += distance * distance


register_proposal(
    SurrogateTransition,
    propose=propose_by_moves,
    learn=learn_from_transition,
    in_python=resolved_once(jit(propose_by_moves, allocates=True)),
)
