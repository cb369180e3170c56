"""The moves of hyperparameters and of the function, one given the other."""

import math

import numpy as np

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.latent_gp.joint.target import (
    HyperparameterModel,
    JointPoint,
    JointTarget,
    log_density_terms,
)
from pymc_kameleon.latent_gp.samplers.ellipse import MOST_EVALUATIONS, slices_along
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.mcmc.chain import ACCEPTED, Chain
from pymc_kameleon.mcmc.loop import run_plain
from pymc_kameleon.mcmc.numba_bridge import jit
from pymc_kameleon.mcmc.proposals import N_UNIFORMS

__all__ = ["move_hyperparameters", "point_of_draw", "slices"]


def move_hyperparameters(
    target: JointTarget,
    point: JointPoint,
    chain: Chain,
    learner: Learner,
    rng: np.random.Generator,
    adapts: bool,
) -> JointPoint:
    """Make a Metropolis-Hastings transition of theta, with the function carried along at fixed eta.

    `target` holds an eta of the point, `chain` is that of theta, at the point, and the learner's
    proposal and mixture of moves are used; it learns if it `adapts`. The point that was given is
    returned if the proposal was rejected.
    """
    chain.value[:] = log_density_terms(point)
    accepted = chain.outcome[ACCEPTED]
    run_plain(
        (target.into,),
        None,
        chain,
        learner.mixture(adapts),
        learner.proposal(False),
        learner.recursion(),
        adapts,
        rng.standard_normal((1, point.x.size + learner.n_more_normals)),
        rng.random((1, N_UNIFORMS + learner.n_more_uniforms)),
    )
    if target.proposed is None or chain.outcome[ACCEPTED] <= accepted:
        return point
    return target.proposed


def point_of_draw(
    model: HyperparameterModel, point: JointPoint, rng: np.random.Generator
) -> JointPoint:
    """Return the point of a draw of the conditional Gaussian, at the same theta, which is set."""
    f = point.conditional.restored(rng.standard_normal((2, point.function.size)))
    return point._replace(function=f, log_likelihood=model.likelihood.value(f))


def slices(
    target: JointTarget, point: JointPoint, rng: np.random.Generator, n: int
) -> tuple[JointPoint, int]:
    """Move the function by `n` elliptical slices about its conditional Gaussian, at fixed theta.

    They are those of eta, of which the function is a linear function, about N(0, I). `target` holds
    an eta of the point, and then of the one that is returned, with the number of likelihood
    evaluations.
    """
    target.model.set_hyperparameters(point.x)
    conditional, likelihood, sites = (
        point.conditional,
        target.model.likelihood,
        point.conditional.sites,
    )
    normals = rng.standard_normal((2, n, conditional.size))
    value = point.log_likelihood - float(sites.elementwise(point.function).sum())
    # The conditional has what slices take of a Gaussian, without a matrix.
    f, _, n_evaluations, angles = slices_along(
        TemperedTarget(conditional, likelihood, 1.0, sites),  # type: ignore[arg-type]
        point.function,
        value,
        conditional.images(normals),
        rng.random((n, 1 + MOST_EVALUATIONS)),
    )
    if f is point.function:
        return point, n_evaluations
    _turn(target.eta, normals, angles)
    return point._replace(function=f, log_likelihood=likelihood.value(f)), n_evaluations + 1


@jit
def _turn(eta, normals, angles):
    """Replace `eta` by its combinations with the rows of `normals`, one after the other."""
    for t in range(angles.size):
        cosine, sine = math.cos(angles[t]), math.sin(angles[t])
        for k in range(eta.shape[0]):
            for i in range(eta.shape[1]):
                eta[k, i] = cosine * eta[k, i] + sine * normals[k, t, i]
