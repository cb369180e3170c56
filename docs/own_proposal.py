"""A proposal of your own: a random walk that takes longer steps far out, for heavy tails.

From x it draws x* ~ N(x, s(x)^2 I) with s(x) = nu sqrt(d + |x|^2); nu is learnt while tuning.
"""

import math
from typing import NamedTuple

import pymc as pm

from pymc_kameleon.adaptation.learner import ScalingLearner
from pymc_kameleon.mcmc.proposals import Scaling, register_proposal
from pymc_kameleon.steps import MetropolisHastingsStep


class TailWalk(NamedTuple):
    """All that a move needs: arrays, numbers, and tuples of such."""

    scaling: Scaling


def propose(proposal, chain, normals, uniforms):
    """Write x* into `chain.proposal`; return log q(x | x*) - log q(x* | x), and which scaling."""
    dim, x, proposed = chain.position.size, chain.position, chain.proposal
    size, proposed_size, distance = float(dim), float(dim), 0.0
    for i in range(dim):
        size += x[i] ** 2
    sd = math.exp(proposal.scaling.log[0]) * math.sqrt(size)
    for i in range(dim):
        proposed[i] = x[i] + sd * normals[i]
        proposed_size += proposed[i] ** 2
        distance += normals[i] ** 2
    back = distance * size / proposed_size
    return 0.5 * (distance - back) + 0.5 * dim * math.log(size / proposed_size), 0


register_proposal(TailWalk, propose=propose)


def tail_walk(vars=None, **options):
    """Return a step that makes these moves; options as for `AdaptiveMetropolisStep`."""
    return MetropolisHastingsStep(vars, learner=ScalingLearner(TailWalk), **options)


if __name__ == "__main__":
    with pm.Model():
        pm.StudentT("x", nu=2, mu=0, sigma=1, shape=3)
        idata = pm.sample(step=tail_walk(), random_seed=1)
    print(idata.posterior["x"].quantile([0.05, 0.5, 0.95], dim=("chain", "draw")).values)
