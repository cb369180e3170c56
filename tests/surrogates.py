"""The banana with a prior and a likelihood, surrogates of it, and Gaussian processes."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc_kameleon import GPSurrogate
from pymc_kameleon.gp.covariances import COVARIANCES
from pymc_kameleon.gp.sparse_gp import add_centre, new_sparse_gp
from pymc_kameleon.mcmc import loop
from pymc_kameleon.surrogate import FittedSurrogate
from pymc_kameleon.targets import Banana

TARGET = Banana(bananicity=0.1, variance=100.0, dim=2)


def banana_with_likelihood(prior_sd=30.0):
    """The banana as a normal prior and a likelihood that makes up the difference."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, prior_sd, shape=2)
        bent = x[1] - 0.1 * (x[0] ** 2 - 100.0)
        banana = -(x[0] ** 2) / 200.0 - bent**2 / 2
        pm.Potential("likelihood", banana + pt.sum(x**2) / (2 * prior_sd**2))
    return model


def log_likelihood(points):
    bent = points[:, 1] - 0.1 * (points[:, 0] ** 2 - 100.0)
    return -(points[:, 0] ** 2) / 200 - bent**2 / 2 + (points**2).sum(axis=1) / 1800


def fitted(n, rng, **options):
    """A surrogate of `n` exact draws; of three of them, one that is nearly useless."""
    points = TARGET.draw(n, rng)
    if n > 3:
        return GPSurrogate(**options).fit(points, log_likelihood(points))
    surrogate = GPSurrogate(mean="constant", max_points=4, one_stage_share=0.0)
    process = surrogate.new_process(2)
    # Far from the points it says -7.5, where the largest value does not bound it.
    process.mean.constant[0] = -12.0
    values = log_likelihood(points)
    learn_all(process, points, values, np.log([3.0, 10.0, 10.0]))
    return FittedSurrogate(surrogate, process, points, values)


def learn_all(process, points, values, hyperparameters):
    """Let a process without centres have these hyperparameters, and a centre at each point."""
    process.hyperparameters[:] = hyperparameters
    process.inverse_lengthscales[:] = np.exp(-process.hyperparameters[1:])
    assert all(add_centre(process, x, value) for x, value in zip(points, values, strict=True))
    return process


def gp_of(points, values, hyperparameters, kernel="gaussian", depth=60.0):
    """Return a process with room for five more, of mean 0 in raw coordinates."""
    size, dim = points.shape
    process = new_sparse_gp(COVARIANCES[kernel], dim, size + 5, depth, has_variance=True)
    return learn_all(process, points, values, hyperparameters)


def leave_out_the_ratio(monkeypatch):
    """Let transitions in plain Python accept as if their proposals were symmetric."""
    exact = loop.propose

    def without(proposal, chain, normals, uniforms):
        log_ratio, index = exact(proposal, chain, normals, uniforms)
        return (0.0 if log_ratio > -np.inf else log_ratio), index

    monkeypatch.setattr(loop, "propose", without)
