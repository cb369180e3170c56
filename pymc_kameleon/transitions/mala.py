"""Preconditioned Metropolis-adjusted Langevin (Roberts & Stramer 2003), and GP-MALA.

The value arrays of a chain hold the three terms of the log density, then the gradient of the log
prior (d,), then that of the log-likelihood (d,).
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import learn_scaling
from pymc_kameleon.compiled import N_TERMS, evaluate
from pymc_kameleon.transitions.acceptance import move_component
from pymc_kameleon.transitions.adaptive_metropolis import LARGEST_LOG_SCALING, update_moments
from pymc_kameleon.transitions.metropolis import probability, settle
from pymc_kameleon.transitions.two_stage import is_asked
from pymc_kameleon.transitions.two_stage_mala import accept_langevin_in_two_stages, remember

__all__ = ["N_UNIFORMS", "LangevinWorkspace", "Settings", "run_compiled", "run_plain"]

N_UNIFORMS = 5
"""Uniform random numbers of a transition: move, coordinate, and three of acceptance."""


class Settings(NamedTuple):
    """What the user chose, fixed for a phase of the chain."""

    component_share: float
    target_accept: float
    learn_covariance: bool
    learn_scaling: bool
    adapt: bool


class LangevinWorkspace(NamedTuple):
    """Scratch arrays (d,): P^T times the gradients at the two ends of a move."""

    drift: np.ndarray
    proposed_drift: np.ndarray


@numba.njit(cache=True)
def whitened_drift(value, factor, out):
    """P^T times the gradient of the log density that `value` holds, into `out` (d,)."""
    dim = out.size
    for i in range(dim):
        total = 0.0
        for k in range(i, dim):
            gradient = value[N_TERMS + k] + value[N_TERMS + dim + k]
            total += factor[k, i] * gradient
        out[i] = total


@numba.njit(cache=True)
def propose_langevin(position, drift, factor, step_size, normals, out):
    """X + P (step_size / 2 drift + sqrt(step_size) normals), into `out` (d,)."""
    root = math.sqrt(step_size)
    for i in range(out.size):
        total = 0.0
        for k in range(i + 1):
            total += factor[i, k] * (0.5 * step_size * drift[k] + root * normals[k])
        out[i] = position[i] + total


@numba.njit(cache=True)
def langevin_log_ratio(drift, proposed_drift, step_size, normals):
    """Return log q(x | x*) - log q(x* | x) for a move made with `normals`."""
    total, root = 0.0, math.sqrt(step_size)
    for i in range(normals.size):
        back = normals[i] + 0.5 * root * (drift[i] + proposed_drift[i])
        total += 0.5 * (normals[i] * normals[i] - back * back)
    return total


@register_jitable
def _move_along_gradient(
    log_density, stage, chain, factor, step_size, workspace, normals, uniforms
):
    """Propose from N(x + step_size/2 P P^T grad, step_size P P^T), with the gradient at x."""
    whitened_drift(chain.value, factor, workspace.drift)
    propose_langevin(chain.position, workspace.drift, factor, step_size, normals, chain.proposal)
    if stage is not None:
        if is_asked(stage, chain, uniforms):
            return accept_langevin_in_two_stages(
                log_density, stage, chain, step_size, factor, uniforms
            )
    current = chain.value[0] + chain.value[1] + chain.value[2]
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    whitened_drift(chain.proposed_value, factor, workspace.proposed_drift)
    log_ratio = langevin_log_ratio(workspace.drift, workspace.proposed_drift, step_size, normals)
    acceptance = probability(proposed - current + log_ratio)
    accepted = settle(chain, acceptance, uniforms[0])
    if stage is not None:
        remember(stage, chain, accepted)
    return acceptance


def run_plain(
    log_density, stage, chain, moments, components, workspace, settings, normals, uniforms
):
    """Make `len(normals)` transitions.

    Parameters
    ----------
    log_density
        Value and gradients, as `compiled.evaluate` takes them.
    stage : JointFirstStage or None
    chain : Chain
    moments : Moments
        `factor` is P, `log_scaling` the log of the step size.
    components : Components
    workspace : LangevinWorkspace
    settings : Settings
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        if uniforms[t, 0] < settings.component_share:
            accepted = move_component(
                log_density,
                None,
                chain,
                components,
                uniforms[t, 1],
                normals[t, 0],
                uniforms[t, 2:],
                settings.adapt,
            )
            if stage is not None:
                remember(stage, chain, accepted)
        else:
            acceptance = _move_along_gradient(
                log_density,
                stage,
                chain,
                moments.factor,
                math.exp(moments.log_scaling[0]),
                workspace,
                normals[t],
                uniforms[t, 2:],
            )
            if settings.adapt and settings.learn_scaling:
                moments.n_updates[0] += 1.0
                moments.log_scaling[0] = learn_scaling(
                    moments.log_scaling[0],
                    acceptance,
                    settings.target_accept,
                    1.0 / math.sqrt(moments.n_updates[0]),
                    -LARGEST_LOG_SCALING,
                    LARGEST_LOG_SCALING,
                )
        if settings.adapt and settings.learn_covariance and settings.component_share < 1.0:
            moments.n_updates[1] += 1.0
            update_moments(moments, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
