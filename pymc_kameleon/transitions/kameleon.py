"""Kernel Adaptive Metropolis-Hastings (Sejdinovic et al. 2014, algorithm 1)."""

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import record
from pymc_kameleon.compiled import evaluate_gradients
from pymc_kameleon.proposals import centred_scatter
from pymc_kameleon.transitions.mixture import (
    ACCEPT,
    Workspace,
    accept_locally,
    learn_local_scaling,
    move_globally,
    propose_locally,
    standardize,
)

__all__ = ["KernelWorkspace", "run_compiled", "run_plain"]


class KernelWorkspace(NamedTuple):
    """Scratch arrays; `gradients` (d, n) are those of the kernel at one place."""

    local: Workspace
    gradients: np.ndarray


@register_jitable
def _scatter_at(kernel, learnt, standardized, gradients, out):
    evaluate_gradients(kernel, standardized, learnt.points, learnt.parameters, gradients)
    centred_scatter(gradients, out)


@register_jitable
def _move_by_kernel(
    log_density, stage, kernel, chain, here, learnt, nu, workspace, gamma, normals, uniforms
):
    """Propose from N(u, gamma^2 I + nu^2 M H M^T), M at u; the reverse move has M at u*."""
    local, gradients = workspace.local, workspace.gradients
    standardize(learnt, chain.position, local.standardized)
    if not here.is_current[0]:
        _scatter_at(kernel, learnt, local.standardized, gradients, here.scatter)
        here.is_current[0] = True
    if not propose_locally(chain, learnt, here.scatter, local, gamma, nu, normals):
        return 0.0
    _scatter_at(kernel, learnt, local.proposed_standardized, gradients, local.proposed_scatter)
    return accept_locally(log_density, stage, chain, here, local, gamma, nu, normals, uniforms)


def run_plain(
    log_density,
    stage,
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
    stage : FirstStage or None
    chain : Chain
    here : Here
    learnt : Learnt
    scaling : Scaling
        Of one scaling, nu.
    components : Components
    history : History
    workspace : KernelWorkspace
    settings : Settings
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        if not move_globally(
            log_density, stage, chain, here.is_current, learnt, components, settings,
            normals[t], uniforms[t],
        ):  # fmt: skip
            acceptance = _move_by_kernel(
                log_density, stage, kernel, chain, here, learnt, math.exp(scaling.log[0]),
                workspace, settings.gamma, normals[t], uniforms[t, ACCEPT:],
            )  # fmt: skip
            learn_local_scaling(scaling, 0, acceptance, learnt, settings)
        if settings.adapt:
            record(history, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
