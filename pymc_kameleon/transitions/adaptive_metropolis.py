"""Adaptive Metropolis with a learnt covariance and scaling (Andrieu & Thoms 2008, algorithm 4)."""

import math
from typing import Annotated, NamedTuple

import numba
import numpy as np

from pymc_kameleon.adaptation import learn_scaling
from pymc_kameleon.layout import floats
from pymc_kameleon.proposals import factor_times, rank_one_update
from pymc_kameleon.transitions.acceptance import accept_or_reject, move_component

__all__ = ["N_UNIFORMS", "Moments", "Settings", "run_compiled", "run_plain"]

N_UNIFORMS = 4
"""Uniform random numbers of a transition: coordinate, and three of acceptance."""

FORGETTING = 2.0
"""The covariance weighs position s of t by about (s/t)^(FORGETTING - 1): a bad start fades."""

LARGEST_LOG_SCALING = 20.0


class Settings(NamedTuple):
    """What the user chose, fixed for a phase of the chain."""

    by_component: bool
    target_accept: float
    learn_covariance: bool
    learn_scaling: bool
    adapt: bool


class Moments(NamedTuple):
    """Running mean (d,), Cholesky factor of the running covariance (d, d), log of the scaling (1,).

    `n_updates` (2,) counts the updates of the scaling, and of mean and covariance (from the weight
    that their start has).
    """

    mean: Annotated[np.ndarray, floats("d")]
    factor: Annotated[np.ndarray, floats("d", "d")]
    log_scaling: Annotated[np.ndarray, floats(1)]
    n_updates: Annotated[np.ndarray, floats(2)]


@numba.njit(cache=True)
def update_moments(moments, position):
    """Robbins-Monro step of mean and covariance; the factor is updated, not computed again."""
    step = FORGETTING / (moments.n_updates[1] + FORGETTING)
    difference = np.empty(position.size)
    for i in range(position.size):
        difference[i] = position[i] - moments.mean[i]
        moments.mean[i] += step * difference[i]
    rank_one_update(moments.factor, difference, 1.0 - step, step * (1.0 - step))


def run_plain(log_density, stage, chain, moments, components, settings, normals, uniforms):
    """Make `len(normals)` transitions.

    Parameters
    ----------
    log_density
        As `compiled.evaluate` takes it.
    stage : FirstStage or None
    chain : Chain
    moments : Moments
    components : Components
    settings : Settings
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        if settings.by_component:
            move_component(
                log_density,
                stage,
                chain,
                components,
                uniforms[t, 0],
                normals[t, 0],
                uniforms[t, 1:],
                settings.adapt,
            )
            continue
        factor_times(moments.factor, normals[t], chain.proposal)
        scale = math.exp(0.5 * moments.log_scaling[0])
        for i in range(chain.position.size):
            chain.proposal[i] = chain.position[i] + scale * chain.proposal[i]
        acceptance, _ = accept_or_reject(log_density, stage, chain, 0.0, uniforms[t, 1:])
        if settings.adapt:
            if settings.learn_scaling:
                moments.n_updates[0] += 1.0
                moments.log_scaling[0] = learn_scaling(
                    moments.log_scaling[0],
                    acceptance,
                    settings.target_accept,
                    1.0 / math.sqrt(moments.n_updates[0]),
                    -LARGEST_LOG_SCALING,
                    LARGEST_LOG_SCALING,
                )
            if settings.learn_covariance:
                moments.n_updates[1] += 1.0
                update_moments(moments, chain.position)


run_compiled = numba.njit(cache=True)(run_plain)
