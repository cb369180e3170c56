r"""Hyperparameters moved with the latent function carried along: the density of (theta, eta).

For any Gaussian q that is a function of theta alone, with f = m + C v and v = mu + L eta, let eta
be drawn from what q says of it given v. Then (theta, eta) have the density

.. math:: \pi(\theta, \eta) \propto p(\theta) \frac{p(y \mid f, \theta)\, N(v; 0, I)}{q(v)}
    N(\eta; 0, I),

so a Metropolis-Hastings move of theta at fixed eta, accepted by the ratio of this density, leaves
the posterior of (theta, f) invariant, whatever q is. Its 1 / q(v) holds the determinant of L: for
a square L, N(eta) / q(v) = |L|, the Jacobian of the change of variables. Where q is
p(f | y, theta) the ratio is that of the marginal posterior p(theta | y).

References
----------
I. Murray and R. P. Adams (2010), Slice sampling covariance hyperparameters of latent Gaussian
models, NIPS 23, arXiv:1006.0868: the same change of variables, with a slice sampler.
M. Filippone and M. Girolami (2014), Pseudo-marginal Bayesian inference for Gaussian processes, IEEE
Transactions on Pattern Analysis and Machine Intelligence 36, doi:10.1109/TPAMI.2014.2316530.
C. E. Rasmussen and C. K. I. Williams (2006), Gaussian Processes for Machine Learning, chapter 3.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.latent_gp.gaussian.conditional import (
    Conditional,
    conditional_in_place,
    conditional_of,
)
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.reader.prior import FreeVariables, PriorAt
from pymc_kameleon.latent_gp.tempered_target import MOST_EVALUATIONS, TemperedTarget, slices_along
from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.chain import ACCEPTED, Chain
from pymc_kameleon.mcmc.loop import run_plain
from pymc_kameleon.mcmc.proposals import N_UNIFORMS


class JointPoint(NamedTuple):
    """Hyperparameters x (d,), a function f (N,), and what is known of the model there."""

    x: np.ndarray
    function: np.ndarray
    variable: FreeVariables
    conditional: Conditional
    log_prior: float
    log_likelihood: float


def log_density_terms(point: JointPoint) -> tuple[float, float, float]:
    """Log prior of theta, log likelihood, and log N(v; 0, I) / q(v)."""
    return point.log_prior, point.log_likelihood, point.conditional.log_ratio(point.function)


def log_joint(point: JointPoint) -> float:
    """Log joint density of theta, v and the data, without a constant."""
    v = point.conditional.whiten(point.function)
    return point.log_prior + point.log_likelihood - 0.5 * float(v @ v)


class PredictorMean(NamedTuple):
    """What slices take of the Gaussian of the predictors: its `mean` (N,)."""

    mean: np.ndarray

    @property
    def size(self) -> int:
        """N."""
        return self.mean.size


class JointTarget:
    """The density of theta at a fixed eta, as `mcmc.loop` evaluates it in plain Python.

    The Gaussian `sites` are a function of theta alone. `eta` (k, N) are standard normals under q;
    `proposed` the point of the last evaluation that succeeded; `n_failed` counts those at which a
    covariance was not positive definite.
    """

    def __init__(self, model: JointModel, sites: Callable[[np.ndarray], Sites]):
        self.model, self.sites = model, sites
        self.eta = np.zeros((2, model.likelihood.size))
        self.proposed: JointPoint | None = None
        self.n_failed = 0

    def hold(self, point: JointPoint, rng: np.random.Generator) -> None:
        """Draw an eta of a point, and fix it."""
        self.eta = point.conditional.to_eta(point.function, rng)

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,), eta fixed; -inf if there is none."""
        value[:] = 0.0
        value[0] = -np.inf
        log_prior = self.model.log_prior(x)
        if not math.isfinite(log_prior):
            return
        try:
            variable, conditional = self._gaussians(x)
        except ValueError:  # of which LinAlgError is one
            self.n_failed += 1
            return
        f = conditional.from_eta(self.eta)
        self.proposed = self._point(x, f, variable, conditional, log_prior)
        value[:3] = log_density_terms(self.proposed)

    def point(self, x: np.ndarray, f: np.ndarray, prior: PriorAt | None = None) -> JointPoint:
        """Return the point of hyperparameters `x` (d,) and function `f` (N,).

        `prior` is the one there, if it is known; theta is set to `x` then.
        """
        if prior is None:
            variable, conditional = self._gaussians(x)
        else:
            variable, conditional = prior.variable, self.conditional(x, prior)
        return self._point(x, f, variable, conditional, self.model.log_prior(x))

    def conditional(self, x: np.ndarray, prior: PriorAt) -> Conditional:
        """Return the Gaussian of the function given the sites at `x` (d,), where its prior is."""
        return conditional_of(prior.gaussian, self.sites(x), self._blocks)

    def _point(self, x, f, variable, conditional, log_prior):
        log_prior += variable.log_integral
        log_likelihood = self.model.likelihood.value(conditional.predictors(f))
        return JointPoint(x.copy(), f, variable, conditional, log_prior, log_likelihood)

    def _gaussians(self, x):
        self.model.set_hyperparameters(x)
        return conditional_in_place(self.model.unfactorised_prior(), self.sites(x), self._blocks)

    @property
    def _blocks(self):
        return getattr(self.model.likelihood, "blocks", None)


def transition(
    target: JointTarget,
    point: JointPoint,
    chain: Chain,
    learner: Learner,
    rng: np.random.Generator,
    adapts: bool,
    n_slices: int,
    angle: float,
) -> tuple[JointPoint, int, float | None]:
    """Move hyperparameters, if there are any, with the function, and then the function alone.

    `target` holds an eta of the point, and then of the one that is returned; `chain` is at its
    theta. The function moves by `n_slices` elliptical slices, or, where a gradient can be carried
    to eta, by a trajectory of turns of at most `angle` and one slice.

    The other results are the evaluations of the likelihood in moves of the function alone, and the
    acceptance probability of the trajectory, None if there was none.
    """
    if point.x.size:
        point = move_hyperparameters(target, point, chain, learner, rng, adapts)
    if not (point.conditional.has_adjoint and target.model.likelihood.has_gradient):
        point, n_evaluations = slices(target, point, rng, n_slices)
        return point, n_evaluations, None
    # Slices change all of thousands of values at a time, and none by much.
    point, acceptance, n_more = trajectory(target, point, rng, angle)
    point, n_evaluations = slices(target, point, rng, 1)
    return point, n_evaluations + n_more, acceptance


def move_hyperparameters(
    target: JointTarget,
    point: JointPoint,
    chain: Chain,
    learner: Learner,
    rng: np.random.Generator,
    adapts: bool,
) -> JointPoint:
    """Make a Metropolis-Hastings transition of theta, with the function carried along at fixed eta.

    `target` holds an eta of the point, and `chain` is at it. The point that was given is returned
    if the proposal was rejected.
    """
    chain.value[:] = log_density_terms(point)
    accepted = chain.outcome[ACCEPTED]
    proposal, mixture, recursion = learner.moves(adapts, compiled=False)
    run_plain(
        (target.into,),
        None,
        chain,
        mixture,
        proposal,
        recursion,
        adapts,
        rng.standard_normal((1, point.x.size + learner.n_more_normals)),
        rng.random((1, N_UNIFORMS + learner.n_more_uniforms)),
    )
    if target.proposed is None or chain.outcome[ACCEPTED] <= accepted:
        return point
    return target.proposed


def point_of_draw(model: JointModel, point: JointPoint, rng: np.random.Generator) -> JointPoint:
    """Draw the function from its conditional Gaussian, at the same theta, which the model has."""
    f = point.conditional.draw(rng)
    likelihood = model.likelihood.value(point.conditional.predictors(f))
    return point._replace(function=f, log_likelihood=likelihood)


def slices(
    target: JointTarget, point: JointPoint, rng: np.random.Generator, n: int
) -> tuple[JointPoint, int]:
    """Move the function by `n` elliptical slices about its conditional Gaussian, at fixed theta.

    They are those of eta, of which the function is a linear function, about N(0, I). `target` holds
    an eta of the point, and then of the one that is returned, with the number of evaluations.
    """
    target.model.set_hyperparameters(point.x)
    conditional, likelihood = point.conditional, target.model.likelihood
    sites = conditional.sites
    normals = rng.standard_normal((conditional.n_sets, n, conditional.size))
    u = conditional.predictors(point.function)
    value = point.log_likelihood - float(sites.elementwise(u).sum())
    base = PredictorMean(conditional.predictors(conditional.mean))
    moved, _, n_evaluations, angles = slices_along(
        TemperedTarget(base, likelihood, 1.0, sites),  # type: ignore[arg-type]
        u,
        value,
        conditional.images(normals),
        rng.random((n, 1 + MOST_EVALUATIONS)),
    )
    if moved is u:
        return point, n_evaluations
    _turn(target.eta, normals, angles)
    f = conditional.at_predictors(moved, target.eta)
    value = likelihood.value(conditional.predictors(f))
    return point._replace(function=f, log_likelihood=value), n_evaluations + 1


def trajectory(
    target: JointTarget, point: JointPoint, rng: np.random.Generator, angle: float
) -> tuple[JointPoint, float, int]:
    """Move the function along a trajectory of eta, at fixed theta, for a quarter of a turn.

    Hamiltonian dynamics of eta, with the density N(eta; 0, I) exp(r), r the log likelihood less its
    sites: r changes the momentum, and a turn of eta and momentum, which no r would change, is
    exact (Neal 2010, section 5.5.1). A turn is at most `angle`, give or take a quarter of it.
    `target` holds an eta of the point, and then of the one that is returned, with the acceptance
    probability and the number of evaluations. The `conditional` has an adjoint.
    """
    target.model.set_hyperparameters(point.x)
    conditional, likelihood = point.conditional, target.model.likelihood
    sites = conditional.sites

    def slope(u):
        by_likelihood = likelihood.slope(u)
        return conditional.adjoint(by_likelihood - sites.shift + sites.times(u))

    def energy(u, value, eta, momentum):
        kinetic = 0.5 * float(np.sum(momentum**2) + np.sum(eta**2))
        return kinetic - value + float(sites.elementwise(u).sum())

    u, eta = conditional.predictors(point.function), target.eta
    momentum, share = rng.standard_normal(eta.shape), rng.random(2)
    n_turns = math.ceil(0.5 * math.pi / angle)
    step = (0.75 + 0.5 * share[0]) * 0.5 * math.pi / n_turns
    cosine, sine = math.cos(step), math.sin(step)
    start = energy(u, point.log_likelihood, eta, momentum)
    gradient = slope(u)
    for _ in range(n_turns):
        momentum = momentum + 0.5 * step * gradient
        eta, momentum = cosine * eta + sine * momentum, cosine * momentum - sine * eta
        f = conditional.from_eta(eta)
        u = conditional.predictors(f)
        gradient = slope(u)
        momentum = momentum + 0.5 * step * gradient
    value = likelihood.value(u)
    change = start - energy(u, value, eta, momentum)
    acceptance = math.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if share[1] < acceptance:
        target.eta = eta
        point = point._replace(function=f, log_likelihood=value)
    return point, acceptance, n_turns + 2


@jit
def _turn(eta, normals, angles):
    """Turn `eta` (k, N) towards each of `normals` (k, n, N) by its angle (n,), in turn."""
    for t in range(angles.size):
        cosine, sine = math.cos(angles[t]), math.sin(angles[t])
        for k in range(eta.shape[0]):
            for i in range(eta.shape[1]):
                eta[k, i] = cosine * eta[k, i] + sine * normals[k, t, i]
