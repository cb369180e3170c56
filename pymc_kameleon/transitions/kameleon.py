"""Kernel Adaptive Metropolis-Hastings (Sejdinovic et al. 2014, algorithm 1).

A transition draws one of three moves with probabilities that do not depend on the state: the kernel
move of the paper, a difference of two points of the history (ter Braak & Vrugt 2008), or, in the
initial phase of tuning, a change of one coordinate. Each has its own acceptance ratio, so the
mixture leaves the target invariant as long as the points, the scales and the standardisation stand
still.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import learn_scaling, record
from pymc_kameleon.compiled import evaluate_gradients
from pymc_kameleon.proposals import (
    add_into,
    centred_scatter,
    copy_into,
    factor_difference,
    factor_times,
    proposal_factor,
    reverse_log_density,
    solve_factor,
)
from pymc_kameleon.transitions.metropolis import accept_or_reject, move_component

__all__ = [
    "N_UNIFORMS",
    "Here",
    "Learnt",
    "Scaling",
    "Settings",
    "Workspace",
    "run_compiled",
    "run_plain",
]

N_UNIFORMS = 5
"""Uniform random numbers of a transition: move, two points, jump, acceptance."""


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
        What the kernel's `gradients` takes.
    smallest_log_scaling, largest_log_scaling : float
        Bounds of the log scaling of kernel moves.
    """

    points: np.ndarray
    location: np.ndarray
    factor: np.ndarray
    parameters: np.ndarray
    smallest_log_scaling: float
    largest_log_scaling: float


class Scaling(NamedTuple):
    """Log nu of the kernel moves, and how often it was updated; arrays of shape (1,)."""

    log: np.ndarray
    n_updates: np.ndarray


class Here(NamedTuple):
    """Scatter M H M^T (d, d) at the current position; valid if `is_current[0]`."""

    is_current: np.ndarray
    scatter: np.ndarray


class Workspace(NamedTuple):
    """Scratch arrays, which carry nothing from one transition to the next."""

    proposed_scatter: np.ndarray
    factor: np.ndarray
    proposed_factor: np.ndarray
    gradients: np.ndarray
    standardized: np.ndarray
    displacement: np.ndarray
    step: np.ndarray


@numba.njit(cache=True)
def standardize(learnt, position, out):
    """Standardised coordinates of one position."""
    for i in range(out.size):
        out[i] = position[i] - learnt.location[i]
    solve_factor(learnt.factor, out, out)


@register_jitable
def _scatter_at(kernel, learnt, standardized, gradients, out):
    evaluate_gradients(kernel, standardized, learnt.points, learnt.parameters, gradients)
    centred_scatter(gradients, out)


@register_jitable
def _move_by_kernel(
    log_density, kernel, chain, here, learnt, workspace, settings, nu, normals, uniform
):
    """Propose from N(u, R(u)); both densities use the same points, nu and coordinates."""
    start, end = workspace.standardized, workspace.step
    standardize(learnt, chain.position, start)
    if not here.is_current[0]:
        _scatter_at(kernel, learnt, start, workspace.gradients, here.scatter)
        here.is_current[0] = True
    if not proposal_factor(here.scatter, settings.gamma, nu, workspace.factor):
        return 0.0
    factor_times(workspace.factor, normals, workspace.displacement)
    factor_times(learnt.factor, workspace.displacement, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    add_into(start, workspace.displacement, end)
    _scatter_at(kernel, learnt, end, workspace.gradients, workspace.proposed_scatter)
    if not proposal_factor(
        workspace.proposed_scatter, settings.gamma, nu, workspace.proposed_factor
    ):
        return 0.0
    log_ratio = reverse_log_density(
        workspace.factor, workspace.proposed_factor, normals, workspace.displacement
    )
    acceptance, accepted = accept_or_reject(log_density, chain, log_ratio, uniform)
    if accepted:
        copy_into(workspace.proposed_scatter.ravel(), here.scatter.ravel())
    return acceptance


@register_jitable
def _move_by_difference(
    log_density, chain, here, learnt, scale, noise, normals, first, second, uniform
):
    """Add a multiple of the difference of two history points: symmetric, for these points."""
    n = learnt.points.shape[1]
    i = int(first * n)
    j = int(second * (n - 1))
    if j >= i:
        j += 1
    factor_difference(learnt.factor, learnt.points, i, j, scale, noise, normals, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    _, accepted = accept_or_reject(log_density, chain, 0.0, uniform)
    if accepted:
        here.is_current[0] = False


def run_plain(
    log_density,
    kernel,
    chain,
    here,
    learnt,
    scaling,
    components,
    history,
    workspace,
    settings,
    normals,
    uniforms,
):
    """Make `len(normals)` transitions.

    Parameters
    ----------
    log_density, kernel
        As `compiled.evaluate` and `compiled.evaluate_gradients` take them.
    chain : Chain
    here : Here
    learnt : Learnt
    scaling : Scaling
    components : Components
    history : History
    workspace : Workspace
    settings : Settings
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        choice = uniforms[t, 0]
        if choice < settings.component_share:
            accepted = move_component(
                log_density,
                chain,
                components,
                uniforms[t, 1],
                normals[t, 0],
                uniforms[t, 4],
                settings.adapt,
            )
            if accepted:
                here.is_current[0] = False
        else:
            by_difference = (
                choice < settings.component_share + settings.global_share
                and learnt.points.shape[1] > 1
            )
            if by_difference:
                scale = 1.0 if uniforms[t, 3] < settings.jump_share else settings.difference_scale
                _move_by_difference(
                    log_density, chain, here, learnt, scale, settings.noise,
                    normals[t], uniforms[t, 1], uniforms[t, 2], uniforms[t, 4],
                )  # fmt: skip
            else:
                acceptance = _move_by_kernel(
                    log_density, kernel, chain, here, learnt, workspace, settings,
                    math.exp(scaling.log[0]), normals[t], uniforms[t, 4],
                )  # fmt: skip
                if settings.adapt and settings.learn and learnt.points.shape[1] > 1:
                    scaling.n_updates[0] += 1.0
                    scaling.log[0] = learn_scaling(
                        scaling.log[0],
                        acceptance,
                        settings.target_accept,
                        scaling.n_updates[0],
                        settings.step_factor,
                        learnt.smallest_log_scaling,
                        learnt.largest_log_scaling,
                    )
        if settings.adapt:
            record(history, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
