"""The proposal of preconditioned MALA (Roberts & Stramer 2003).

From x it draws x* ~ N(x + delta/2 Lambda grad log p(x), delta Lambda) with Lambda = P P^T. The
density of the way back has the gradient at x*, so the ratio is known when x* has been evaluated.

The value arrays of a chain hold the three terms of the log density, then the gradient of the log
prior (d,), then that of the log-likelihood (d,).
"""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import by_class, jit, jitable
from pymc_kameleon.mcmc.chain import N_TERMS, accept_or_stay, evaluate, is_within, probability
from pymc_kameleon.mcmc.proposals import register_proposal
from pymc_kameleon.mcmc.proposals.random_walk import Moments, learn_moments, scaled_covariance


class Langevin(NamedTuple):
    """P = `moments.factor`, the log of delta, shape (1,), and whether the chain learns P."""

    moments: Moments
    log_scaling: np.ndarray
    learns: bool


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
def accept_langevin_in_two_stages(stage, log_density, chain, factor, step_size, normals, uniforms):
    """As `accept_langevin`, with a first stage that lets only some proposals be evaluated."""


@jitable(allocates=True)
def accept_langevin(log_density, chain, factor, step_size, normals, uniform):
    """Evaluate the move made with `normals`, and accept or reject it."""
    drift, proposed_drift = np.empty(normals.size), np.empty(normals.size)
    proposed = evaluate(log_density, chain.proposal, chain.proposed_value, chain.counts)
    current = chain.value[0] + chain.value[1] + chain.value[2]
    whitened_drift(chain.value, factor, drift)
    whitened_drift(chain.proposed_value, factor, proposed_drift)
    log_ratio = langevin_log_ratio(drift, proposed_drift, step_size, normals)
    acceptance = probability(proposed - current + log_ratio)
    return acceptance, accept_or_stay(chain, acceptance, uniform)


def _propose(proposal, chain, normals, uniforms):
    factor, step_size = proposal.moments.factor, math.exp(proposal.log_scaling[0])
    drift = np.empty(chain.position.size)
    whitened_drift(chain.value, factor, drift)
    propose_langevin(chain.position, drift, factor, step_size, normals, chain.proposal)
    return 0.0, 0


def _accept(proposal, log_density, stage, chain, log_ratio, normals, uniforms):
    if not is_within(chain.bounds, chain.proposal):
        return 0.0, False
    factor, step_size = proposal.moments.factor, math.exp(proposal.log_scaling[0])
    if stage is not None:
        return accept_langevin_in_two_stages(
            stage, log_density, chain, factor, step_size, normals, uniforms
        )
    return accept_langevin(log_density, chain, factor, step_size, normals, uniforms[0])


register_proposal(
    Langevin, propose=_propose, accept=_accept, learn=learn_moments, covariance_at=scaled_covariance
)
