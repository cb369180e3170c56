"""The random walk of adaptive Metropolis: x* ~ N(x, lambda L L^T), and how L is learnt."""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.linalg import factor_times, rank_one_update
from pymc_kameleon.mcmc.proposals import register_proposal

FORGETTING = 2.0
"""The covariance weighs position s of t by about (s/t)^(FORGETTING - 1): a bad start fades."""


class Moments(NamedTuple):
    """Running mean (d,), Cholesky factor of the running covariance (d, d), their weight (1,)."""

    mean: np.ndarray
    factor: np.ndarray
    weight: np.ndarray


class RandomWalk(NamedTuple):
    """L = `moments.factor`, the log of lambda, shape (1,), and whether the chain learns L."""

    moments: Moments
    log_scaling: np.ndarray
    learns: bool


@jit(allocates=True)
def update_moments(moments, position):
    """Robbins-Monro step of mean and covariance (Andrieu & Thoms 2008, algorithm 4).

    The factor is updated, not computed again.
    """
    moments.weight[0] += 1.0
    step = FORGETTING / (moments.weight[0] + FORGETTING)
    difference = np.empty(position.size)
    for i in range(position.size):
        difference[i] = position[i] - moments.mean[i]
        moments.mean[i] += step * difference[i]
    rank_one_update(moments.factor, difference, 1.0 - step, step * (1.0 - step))


def learn_moments(proposal, chain, is_evaluated, acceptance, index):
    """Learn mean and covariance of a proposal with `moments` from where the chain is."""
    if proposal.learns:
        update_moments(proposal.moments, chain.position)


def scaled_covariance(proposal, x):
    """Covariance of a proposal with `moments`, which does not depend on where it is."""
    factor = proposal.moments.factor
    return math.exp(proposal.log_scaling[0]) * factor @ factor.T


def _propose(proposal, chain, normals, uniforms):
    factor_times(proposal.moments.factor, normals, chain.proposal)
    scale = math.exp(0.5 * proposal.log_scaling[0])
    for i in range(chain.position.size):
        chain.proposal[i] = chain.position[i] + scale * chain.proposal[i]
    return 0.0, 0


register_proposal(
    RandomWalk,
    propose=_propose,
    learn=learn_moments,
    covariance_at=scaled_covariance,
    allocates=False,
)
