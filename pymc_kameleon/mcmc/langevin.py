"""Preconditioned Metropolis-adjusted Langevin (Roberts & Stramer 2003), and GP-MALA.

The value arrays of a chain hold the three terms of the log density, then the gradient of the log
prior (d,), then that of the log-likelihood (d,).
"""

import math

import numpy as np

from pymc_kameleon.mcmc.chain import (
    accept_or_reject,
    has_first_stage,
    is_within,
    probability,
    remember,
    settle,
)
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, by_class, evaluate, jit, jitable, resolved_once
from pymc_kameleon.mcmc.proposals import ACCEPT, CHOICE
from pymc_kameleon.mcmc.run import learn_coordinate_scale, observe, propose_coordinate

__all__ = ["accept_langevin_in_two_stages", "run_compiled", "run_plain"]


@jit
def whitened_drift(value, factor, out):
    """P^T times the gradient of the log density that `value` holds, into `out` (d,)."""
    dim = out.size
    for i in range(dim):
        total = 0.0
        for k in range(i, dim):
            gradient = value[N_TERMS + k] + value[N_TERMS + dim + k]
            total += factor[k, i] * gradient
        out[i] = total


@jit
def propose_langevin(position, drift, factor, step_size, normals, out):
    """X + P (step_size / 2 drift + sqrt(step_size) normals), into `out` (d,)."""
    root = math.sqrt(step_size)
    for i in range(out.size):
        total = 0.0
        for k in range(i + 1):
            total += factor[i, k] * (0.5 * step_size * drift[k] + root * normals[k])
        out[i] = position[i] + total


@jit
def langevin_log_ratio(drift, proposed_drift, step_size, normals):
    """Return log q(x | x*) - log q(x* | x) for a move made with `normals`."""
    total, root = 0.0, math.sqrt(step_size)
    for i in range(normals.size):
        back = normals[i] + 0.5 * root * (drift[i] + proposed_drift[i])
        total += 0.5 * (normals[i] * normals[i] - back * back)
    return total


@by_class
def accept_langevin_in_two_stages(stage, log_density, chain, step_size, factor, uniforms):
    """Evaluate `chain.proposal` if the first stage lets it through; return the acceptance."""


@jitable(allocates=True)
def _move_along_gradient(log_density, stage, chain, factor, step_size, normals, uniforms):
    """Propose from N(x + step_size/2 P P^T grad, step_size P P^T), with the gradient at x."""
    drift, proposed_drift = np.empty(normals.size), np.empty(normals.size)
    whitened_drift(chain.value, factor, drift)
    propose_langevin(chain.position, drift, factor, step_size, normals, chain.proposal)
    if not is_within(chain.bounds, chain.proposal):
        return 0.0
    if stage is not None:
        if has_first_stage(stage, chain, uniforms):
            return accept_langevin_in_two_stages(
                stage, log_density, chain, step_size, factor, uniforms
            )
    current = chain.value[0] + chain.value[1] + chain.value[2]
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    whitened_drift(chain.proposed_value, factor, proposed_drift)
    log_ratio = langevin_log_ratio(drift, proposed_drift, step_size, normals)
    acceptance = probability(proposed - current + log_ratio)
    accepted = settle(chain, acceptance, uniforms[0])
    if stage is not None:
        remember(stage, chain, accepted)
    return acceptance


def run_plain(log_density, stage, chain, mixture, walk, observer, adapts, normals, uniforms):
    """Make `len(normals)` transitions.

    Parameters
    ----------
    log_density
        Value and gradients, as `numba_bridge.evaluate` takes them.
    stage : FirstStage or None
    chain : Chain
    mixture : Mixture
        Without differences.
    walk : RandomWalk
        `factor` is P, `log_scaling` the log of the step size.
    observer : MomentsObserver
    adapts : bool
    normals : array, shape (n, d)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        z, u, index = normals[t], uniforms[t], -1
        if u[CHOICE] < mixture.coordinate_share:
            i = propose_coordinate(mixture.scales, chain, z, u)
            acceptance, accepted = accept_or_reject(log_density, None, chain, 0.0, u[ACCEPT:])
            if stage is not None:
                remember(stage, chain, accepted)
            if adapts:
                learn_coordinate_scale(mixture.scales, i, acceptance)
        else:
            index, step_size = 0, math.exp(walk.log_scaling[0])
            acceptance = _move_along_gradient(
                log_density, stage, chain, walk.factor, step_size, z, u[ACCEPT:]
            )
        if adapts:
            observe(observer, chain.position, acceptance, index)


run_compiled = resolved_once(jit(run_plain))
