"""Fast Kernel Adaptive Metropolis-Hastings (Kotlicki 2015, algorithm 2)."""

import math
from typing import Annotated, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.adaptation import record
from pymc_kameleon.layout import floats
from pymc_kameleon.transitions.mixture import (
    ACCEPT,
    Workspace,
    accept_locally,
    learn_local_scaling,
    move_globally,
    propose_locally,
    standardize,
)

__all__ = ["FeatureWorkspace", "Features", "feature_scatter", "run_compiled", "run_plain"]


class Features(NamedTuple):
    """Random features, and a factor of their covariance C = V^T V.

    Attributes
    ----------
    frequencies : array, shape (d, m)
    phases : array, shape (m,)
    factor : array, shape (r, D)
        V; D = 2m columns for "pairs", those of the sines first, and D = m for "shifted".
    """

    frequencies: Annotated[np.ndarray, floats("d", "m")]
    phases: Annotated[np.ndarray, floats("m")]
    factor: Annotated[np.ndarray, floats("rank", "features")]


class FeatureWorkspace(NamedTuple):
    """Scratch arrays; `weights` (r, m) and `projections` (r, d) are those of `feature_scatter`."""

    local: Workspace
    weights: np.ndarray
    projections: np.ndarray


@numba.njit(cache=True)
def feature_scatter(features, standardized, weights, projections, out):
    """J^T C J into `out` (d, d), with the Jacobian J (D, d) of the features (eqs. 4.3 to 4.5).

    The rows of J are multiples of the frequencies, so the columns of V that belong to one frequency
    are combined before they meet it: O(D r) for that, and O(D r d / 2) for "pairs" after it.
    """
    frequencies, factor = features.frequencies, features.factor
    dim, m = frequencies.shape
    sines, cosines = np.empty(m), np.empty(m)
    for i in range(m):
        sines[i] = features.phases[i]
    for a in range(dim):
        for i in range(m):
            sines[i] += frequencies[a, i] * standardized[a]
    scale = math.sqrt(2.0 / factor.shape[1])
    for i in range(m):
        angle = sines[i]
        sines[i] = scale * math.sin(angle)
        cosines[i] = scale * math.cos(angle)
    if factor.shape[1] == m:
        for k in range(factor.shape[0]):
            for i in range(m):
                weights[k, i] = -sines[i] * factor[k, i]
    else:
        for k in range(factor.shape[0]):
            for i in range(m):
                weights[k, i] = cosines[i] * factor[k, i] - sines[i] * factor[k, m + i]
    np.dot(weights, frequencies.T, projections)
    np.dot(projections.T, projections, out)


@register_jitable
def _scatter_at(features, standardized, workspace, out):
    feature_scatter(features, standardized, workspace.weights, workspace.projections, out)


@register_jitable
def _move_by_features(
    log_density, stage, chain, here, learnt, features, eta, workspace, gamma, normals, uniforms
):
    """Propose from N(u, gamma^2 I + eta^2 J^T C J), J at u; the reverse move has J at u*."""
    local = workspace.local
    standardize(learnt, chain.position, local.standardized)
    if not here.is_current[0]:
        _scatter_at(features, local.standardized, workspace, here.scatter)
        here.is_current[0] = True
    if not propose_locally(chain, learnt, here.scatter, local, gamma, eta, normals):
        return 0.0
    _scatter_at(features, local.proposed_standardized, workspace, local.proposed_scatter)
    return accept_locally(log_density, stage, chain, here, local, gamma, eta, normals, uniforms)


def run_plain(
    log_density,
    stage,
    chain,
    here,
    learnt,
    features,
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
    log_density
        As `compiled.evaluate` takes it.
    stage : FirstStage or None
    chain : Chain
    here : Here
    learnt : Learnt
    features : Features
    scaling : Scaling
        Of one scaling, eta.
    components : Components
    history : History
    workspace : FeatureWorkspace
    settings : Settings
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        if not move_globally(
            log_density, stage, chain, here.is_current, learnt, components, settings,
            normals[t], uniforms[t],
        ):  # fmt: skip
            acceptance = _move_by_features(
                log_density, stage, chain, here, learnt, features, math.exp(scaling.log[0]),
                workspace, settings.gamma, normals[t], uniforms[t, ACCEPT:],
            )  # fmt: skip
            learn_local_scaling(scaling, 0, acceptance, learnt, settings)
        if settings.adapt:
            record(history, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
