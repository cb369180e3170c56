"""The moves of hyperparameters and of the function, one given the other."""

from dataclasses import replace

import numpy as np

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian
from pymc_kameleon.latent_gp.joint.conditional import whitened
from pymc_kameleon.latent_gp.joint.target import (
    HyperparameterModel,
    JointPoint,
    JointTarget,
    log_density_terms,
)
from pymc_kameleon.latent_gp.samplers.ellipse import elliptical_slice
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.mcmc.chain import ACCEPTED, Chain
from pymc_kameleon.mcmc.numba_bridge import N_TERMS
from pymc_kameleon.mcmc.proposals import N_UNIFORMS
from pymc_kameleon.mcmc.run import run_plain

__all__ = ["move_hyperparameters", "new_chain", "point_of_draw", "slices"]


def new_chain(x: np.ndarray) -> Chain:
    """Return a chain of hyperparameters that begins at `x` (d,)."""
    return Chain(
        position=x.copy(),
        value=np.zeros(N_TERMS),
        proposal=x.copy(),
        proposed_value=np.zeros(N_TERMS),
        counts=np.zeros(2, dtype=np.int64),
        outcome=np.zeros(2),
    )


def move_hyperparameters(
    target: JointTarget,
    point: JointPoint,
    chain: Chain,
    learner: Learner,
    rng: np.random.Generator,
    adapts: bool,
) -> JointPoint:
    """Make a Metropolis-Hastings transition of theta, with the function carried along at fixed eta.

    Parameters
    ----------
    target : JointTarget
    point : JointPoint
    chain : Chain
        Of theta; at the point.
    learner : Learner
        Its proposal and its mixture of moves are used.
    rng : numpy.random.Generator
    adapts : bool
        Whether the learner learns from the transition.

    Returns
    -------
    JointPoint
        The one that was given if the proposal was rejected.
    """
    target.hold(point, rng)
    chain.value[:] = log_density_terms(point)
    accepted = chain.outcome[ACCEPTED]
    run_plain(
        (target.into,),
        None,
        chain,
        learner.mixture(adapts),
        learner.proposal(False),
        learner.observer(),
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
    v, f = point.conditional.restored(rng.standard_normal((2, point.function.size)))
    return replace(point, function=f, whitened=v, log_likelihood=model.likelihood.value(f))


def slices(
    model: HyperparameterModel, point: JointPoint, rng: np.random.Generator, n: int
) -> tuple[JointPoint, int]:
    """Move the function by elliptical slices about its conditional Gaussian, at fixed theta.

    Returns
    -------
    JointPoint
    int
        Likelihood evaluations.
    """
    model.set_hyperparameters(point.x)
    conditional, likelihood = point.conditional, model.likelihood
    prior: Gaussian = point.prior.gaussian
    # It has what the slices take of a Gaussian, without a matrix.
    target = TemperedTarget(conditional, likelihood, 1.0, conditional.sites)  # type: ignore[arg-type]
    value = point.log_likelihood - float(conditional.sites.elementwise(point.function).sum())
    f, _, n_evaluations = elliptical_slice(target, point.function, value, rng, n_transitions=n)
    if f is point.function:
        return point, n_evaluations
    v, log_likelihood = whitened(prior, f), likelihood.value(f)
    return replace(point, function=f, whitened=v, log_likelihood=log_likelihood), n_evaluations + 1
