"""PCA-Kameleon: moves along principal eigenfunctions (Sejdinovic et al. 2014, appendix C)."""

import math
from typing import Annotated, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import record
from pymc_kameleon.compiled import SIMD, evaluate_gradients
from pymc_kameleon.layout import flags, floats
from pymc_kameleon.proposals import add_into, copy_into, factor_times, rank_one_log_ratio
from pymc_kameleon.transitions.acceptance import accept_or_reject
from pymc_kameleon.transitions.mixture import (
    ACCEPT,
    PICK,
    learn_local_scaling,
    move_globally,
    standardize,
)

__all__ = [
    "Directions",
    "Eigenfunctions",
    "GradientsHere",
    "direction",
    "run_compiled",
    "run_plain",
]


class Eigenfunctions(NamedTuple):
    """Principal eigenfunctions of the subsample's centred kernel matrix HKH.

    Attributes
    ----------
    vectors : array, shape (m, n)
        Unit eigenvectors a_j, which are centred: H a_j = a_j.
    weights : array, shape (m,)
        omega_j, 0 for components that there are not.
    thresholds : array, shape (m,)
        omega_1 + ... + omega_j, infinite from the last component with a weight on.
    used : float array, shape (2,)
        Number of the last eigenfunction moved along since this was set, from 1 (NaN: none), and its
        scaling then.
    """

    vectors: Annotated[np.ndarray, floats("scalings", "n")]
    weights: Annotated[np.ndarray, floats("scalings")]
    thresholds: Annotated[np.ndarray, floats("scalings")]
    used: Annotated[np.ndarray, floats(2)]

    @property
    def is_consistent(self) -> bool:
        """Whether every uniform number finds a component."""
        return bool(self.thresholds[-1] == np.inf)


class GradientsHere(NamedTuple):
    """Gradients (d, n) of the kernel at the current position; valid if `is_current[0]`."""

    is_current: Annotated[np.ndarray, flags(1)]
    gradients: Annotated[np.ndarray, floats("d", "n")]


class Directions(NamedTuple):
    """Scratch arrays, which carry nothing from one transition to the next."""

    proposed_gradients: np.ndarray
    direction: np.ndarray
    proposed_direction: np.ndarray
    standardized: np.ndarray
    displacement: np.ndarray


@numba.njit(cache=True, fastmath=SIMD)
def direction(gradients, vector, out):
    """C = M H a with M = 2 `gradients` (d, n) and a centred `vector` (n,), into `out` (d,)."""
    for a in range(out.size):
        total = 0.0
        for i in range(vector.size):
            total += gradients[a, i] * vector[i]
        out[a] = 2.0 * total


@register_jitable
def _move_along(
    log_density, stage, kernel, chain, here, learnt, eigenfunctions, j, nu, workspace, gamma,
    normals, uniforms,
):  # fmt: skip
    """Propose from N(u, gamma^2 I + nu_j^2 c c^T), c = M H a_j at u; the reverse has c at u*.

    j does not depend on the state, so each eigenfunction is a transition with its own ratio.
    """
    c, proposed_c = workspace.direction, workspace.proposed_direction
    u, displacement = workspace.standardized, workspace.displacement
    standardize(learnt, chain.position, u)
    if not here.is_current[0]:
        evaluate_gradients(kernel, u, learnt.points, learnt.parameters, here.gradients)
        here.is_current[0] = True
    direction(here.gradients, eigenfunctions.vectors[j], c)
    for a in range(u.size):
        displacement[a] = gamma * normals[a] + nu * normals[u.size] * c[a]
    factor_times(learnt.factor, displacement, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    add_into(u, displacement, u)
    evaluate_gradients(kernel, u, learnt.points, learnt.parameters, workspace.proposed_gradients)
    direction(workspace.proposed_gradients, eigenfunctions.vectors[j], proposed_c)
    log_ratio = rank_one_log_ratio(c, proposed_c, displacement, gamma, nu)
    acceptance, accepted = accept_or_reject(log_density, stage, chain, log_ratio, uniforms)
    if accepted:
        copy_into(workspace.proposed_gradients.ravel(), here.gradients.ravel())
    return acceptance


def run_plain(
    log_density,
    stage,
    kernel,
    chain,
    here,
    learnt,
    eigenfunctions,
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
    here : GradientsHere
    learnt : Learnt
    eigenfunctions : Eigenfunctions
    scaling : Scaling
        Of m scalings, nu_j.
    components : Components
    history : History
    workspace : Directions
    settings : Settings
    normals : array, shape (n, d + 1)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        if not move_globally(
            log_density, stage, chain, here.is_current, learnt, components, settings,
            normals[t], uniforms[t],
        ):  # fmt: skip
            j = 0
            while uniforms[t, PICK] >= eigenfunctions.thresholds[j]:
                j += 1
            nu = math.exp(scaling.log[j])
            eigenfunctions.used[0] = j + 1.0
            eigenfunctions.used[1] = nu
            acceptance = _move_along(
                log_density, stage, kernel, chain, here, learnt, eigenfunctions, j, nu, workspace,
                settings.gamma, normals[t], uniforms[t, ACCEPT:],
            )  # fmt: skip
            learn_local_scaling(scaling, j, acceptance, learnt, settings)
        if settings.adapt:
            record(history, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
