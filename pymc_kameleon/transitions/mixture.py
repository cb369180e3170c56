"""What the kernel-adaptive samplers share: the mixture of moves, and the local Gaussian move.

A transition draws one of three moves with probabilities that do not depend on the state: a move of
the sampler's own, whose Gaussian has a covariance of its place; a difference of two points of the
history (ter Braak & Vrugt 2008); or, in the initial phase of tuning, a change of one coordinate.
Each has its own acceptance ratio, so the mixture leaves the target invariant as long as the points,
the scales and the standardisation stand still.
"""

from typing import Annotated, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import learn_scaling
from pymc_kameleon.layout import flags, floats
from pymc_kameleon.proposals import (
    add_into,
    copy_into,
    factor_difference,
    factor_times,
    proposal_factor,
    reverse_log_density,
    solve_factor,
)
from pymc_kameleon.transitions.acceptance import accept_or_reject, move_component

__all__ = [
    "ACCEPT",
    "CHOICE",
    "N_UNIFORMS",
    "PICK",
    "Here",
    "Learnt",
    "Scaling",
    "Settings",
    "Workspace",
    "accept_locally",
    "learn_local_scaling",
    "move_globally",
    "new_workspace",
    "propose_locally",
    "standardize",
]

N_UNIFORMS = 7
CHOICE, PICK, _SECOND_PICK, _JUMP, ACCEPT = range(N_UNIFORMS - 2)
"""Uniform random numbers of a transition: kind of move, two points, length, and from `ACCEPT` on
those of acceptance."""


class Settings(NamedTuple):
    """What the user chose, fixed for a phase of the chain."""

    gamma: float
    component_share: float
    global_share: float
    difference_scale: float
    jump_share: float
    noise: float
    target_accept: float
    step_factor: float
    step_power: float
    learn: bool
    adapt: bool


class Learnt(NamedTuple):
    """What an update of the proposal replaces; fixed between updates.

    Attributes
    ----------
    points : array, shape (d, n)
        Subsample of the history in standardised coordinates.
    location : array, shape (d,)
    factor : array, shape (d, d)
        Lower Cholesky factor of the standardisation.
    parameters : array
        What the kernel's `gradients` takes; the last is its bandwidth.
    smallest_log_scaling, largest_log_scaling : array, shape (m,)
        Bounds of the log scalings of local moves.
    """

    points: Annotated[np.ndarray, floats("d", "n")]
    location: Annotated[np.ndarray, floats("d")]
    factor: Annotated[np.ndarray, floats("d", "d")]
    parameters: Annotated[np.ndarray, floats("parameters")]
    smallest_log_scaling: Annotated[np.ndarray, floats("scalings")]
    largest_log_scaling: Annotated[np.ndarray, floats("scalings")]


class Scaling(NamedTuple):
    """Logs of the scalings of local moves, and how often each was updated; arrays of shape (m,)."""

    log: Annotated[np.ndarray, floats("scalings")]
    n_updates: Annotated[np.ndarray, floats("scalings")]


class Here(NamedTuple):
    """Scatter (d, d) of the local move at the current position; valid if `is_current[0]`."""

    is_current: Annotated[np.ndarray, flags(1)]
    scatter: Annotated[np.ndarray, floats("d", "d")]


class Workspace(NamedTuple):
    """Scratch arrays, which carry nothing from one transition to the next."""

    proposed_scatter: np.ndarray
    factor: np.ndarray
    proposed_factor: np.ndarray
    standardized: np.ndarray
    proposed_standardized: np.ndarray
    displacement: np.ndarray


def new_workspace(dim: int) -> Workspace:
    """Return scratch arrays for local moves in `dim` dimensions."""
    matrices = (np.zeros((dim, dim)) for _ in range(3))
    vectors = (np.zeros(dim) for _ in range(3))
    return Workspace(*matrices, *vectors)


@numba.njit(cache=True)
def standardize(learnt, position, out):
    """Standardised coordinates of one position."""
    for i in range(out.size):
        out[i] = position[i] - learnt.location[i]
    solve_factor(learnt.factor, out, out)


@register_jitable
def propose_locally(chain, learnt, scatter, workspace, gamma, scaling, normals):
    """Propose from N(u, gamma^2 I + scaling^2 scatter), from u = `workspace.standardized`.

    Returns whether the covariance is positive definite.
    """
    if not proposal_factor(scatter, gamma, scaling, workspace.factor):
        return False
    factor_times(workspace.factor, normals, workspace.displacement)
    factor_times(learnt.factor, workspace.displacement, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    add_into(workspace.standardized, workspace.displacement, workspace.proposed_standardized)
    return True


@register_jitable
def accept_locally(log_density, stage, chain, here, workspace, gamma, scaling, normals, uniforms):
    """Accept or reject with the reverse density under `workspace.proposed_scatter`.

    Both densities use the same points, scaling and coordinates. Returns the acceptance probability.
    """
    if not proposal_factor(workspace.proposed_scatter, gamma, scaling, workspace.proposed_factor):
        return 0.0
    log_ratio = reverse_log_density(
        workspace.factor, workspace.proposed_factor, normals, workspace.displacement
    )
    acceptance, accepted = accept_or_reject(log_density, stage, chain, log_ratio, uniforms)
    if accepted:
        copy_into(workspace.proposed_scatter.ravel(), here.scatter.ravel())
    return acceptance


@register_jitable
def learn_local_scaling(scaling, j, acceptance, learnt, settings):
    """Robbins-Monro step of the `j`-th scaling."""
    if settings.adapt and settings.learn and learnt.points.shape[1] > 1:
        scaling.n_updates[j] += 1.0
        scaling.log[j] = learn_scaling(
            scaling.log[j],
            acceptance,
            settings.target_accept,
            settings.step_factor * scaling.n_updates[j] ** -settings.step_power,
            learnt.smallest_log_scaling[j],
            learnt.largest_log_scaling[j],
        )


@register_jitable
def _propose_difference(chain, learnt, settings, normals, uniforms):
    """Add a multiple of the difference of two history points: symmetric, for these points."""
    n = learnt.points.shape[1]
    i = int(uniforms[PICK] * n)
    j = int(uniforms[_SECOND_PICK] * (n - 1))
    if j >= i:
        j += 1
    scale = 1.0 if uniforms[_JUMP] < settings.jump_share else settings.difference_scale
    factor_difference(
        learnt.factor, learnt.points, i, j, scale, settings.noise, normals, chain.proposal
    )
    add_into(chain.position, chain.proposal, chain.proposal)


@register_jitable
def move_globally(
    log_density, stage, chain, is_current, learnt, components, settings, normals, uniforms
):
    """Make a one-coordinate or a difference move, if `uniforms[CHOICE]` picks one of them.

    An accepted one clears `is_current[0]`. Returns whether there was a move.
    """
    choice = uniforms[CHOICE]
    if choice < settings.component_share:
        accepted = move_component(
            log_density,
            stage,
            chain,
            components,
            uniforms[PICK],
            normals[0],
            uniforms[ACCEPT:],
            settings.adapt,
        )
    elif choice < settings.component_share + settings.global_share and learnt.points.shape[1] > 1:
        _propose_difference(chain, learnt, settings, normals, uniforms)
        _, accepted = accept_or_reject(log_density, stage, chain, 0.0, uniforms[ACCEPT:])
    else:
        return False
    if accepted:
        is_current[0] = False
    return True
