"""The random walk of adaptive Metropolis: x* ~ N(x, lambda L L^T)."""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.linalg import factor_times
from pymc_kameleon.mcmc.proposals import register_proposal

__all__ = ["RandomWalk"]


class RandomWalk(NamedTuple):
    """L, shape (d, d) and lower-triangular, and the log of lambda, shape (1,)."""

    factor: np.ndarray
    log_scaling: np.ndarray


def _propose(proposal, chain, normals, uniforms):
    factor_times(proposal.factor, normals, chain.proposal)
    scale = math.exp(0.5 * proposal.log_scaling[0])
    for i in range(chain.position.size):
        chain.proposal[i] = chain.position[i] + scale * chain.proposal[i]
    return 0.0, 0


def _covariance_at(proposal, x):
    return math.exp(proposal.log_scaling[0]) * proposal.factor @ proposal.factor.T


register_proposal(RandomWalk, propose=_propose, covariance_at=_covariance_at, allocates=False)
