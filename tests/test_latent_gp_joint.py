"""Hyperparameters and latent function together: exactness, on closed-form models.

Simulation-based calibration: hyperparameters, function and data are drawn from the model, frozen
transitions start from that draw, and where they end is a draw of the same joint distribution. So
the ranks of hyperparameters in their prior are uniform, and so are those of the log likelihood
among fresh draws of the model. Each Kolmogorov-Smirnov test fails by chance with probability
`models.FALSE_ALARM`, 1e-6.
"""

import numpy as np
import pytest
from latent_likelihoods import Normal, Poisson, Probit, StudentT, squared_exponential
from models import FALSE_ALARM
from scipy import stats

from pymc_kameleon.adaptation.moments import MomentsAdaptation
from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, Sites, with_sites
from pymc_kameleon.latent_gp.joint import target as target_module
from pymc_kameleon.latent_gp.joint import transition
from pymc_kameleon.latent_gp.joint.conditional import ConditionalGaussian, unwhitened, whitened
from pymc_kameleon.latent_gp.joint.pilots import approximate
from pymc_kameleon.latent_gp.joint.sites import constant_sites, fit_sites
from pymc_kameleon.latent_gp.joint.target import JointTarget, log_density_terms
from pymc_kameleon.latent_gp.joint.transition import move_hyperparameters, new_chain, slices
from pymc_kameleon.latent_gp.model.prior import PriorAt
from pymc_kameleon.mcmc.coordinates import Standardization

N_DATA_SETS = 500
N_TRANSITIONS = 25
SIZE = 20


class ClosedFormModel:
    """Squared exponential with log lengthscale and log amplitude, and noise of a likelihood.

    A priori the logs are independent normals.
    """

    def __init__(self, inputs, make_likelihood, mean, sd):
        self.inputs, self.make_likelihood = inputs, make_likelihood
        self.mean, self.sd = np.asarray(mean, dtype=float), np.asarray(sd, dtype=float)
        self.y = None

    def log_prior(self, x):
        return float(stats.norm.logpdf(x, self.mean, self.sd).sum())

    def set_hyperparameters(self, x):
        self.x = x.copy()
        self.likelihood = self.make_likelihood(self.y, x)

    def prior(self):
        gaussian = squared_exponential(self.inputs, *np.exp(self.x[:2]), jitter=1e-5)
        return PriorAt(gaussian, np.zeros(gaussian.size), gaussian.cholesky, True)

    def draw_hyperparameters(self, rng):
        return rng.normal(self.mean, self.sd)

    def draw_function(self, x, rng):
        return squared_exponential(self.inputs, *np.exp(x[:2]), jitter=1e-5).draw(rng)


def probit_model():
    inputs = np.random.default_rng(0).uniform(-1, 1, (SIZE, 2))
    model = ClosedFormModel(inputs, lambda y, x: Probit(y), [-0.5, 0.7], [0.7, 0.8])
    return model, lambda f, x, rng: np.where(f + rng.standard_normal(SIZE) > 0, 1.0, -1.0)


def poisson_model():
    inputs = np.linspace(0, 5, SIZE)[:, None]
    model = ClosedFormModel(inputs, lambda y, x: Poisson(y), [0.0, -0.3], [0.7, 0.7])
    return model, lambda f, x, rng: rng.poisson(np.exp(f)).astype(float)


def student_model():
    """The noise is a hyperparameter of the likelihood."""
    inputs = np.linspace(0, 5, SIZE)[:, None]
    model = ClosedFormModel(
        inputs, lambda y, x: StudentT(y, 4.0, np.exp(x[2])), [0.0, 0.0, -1.0], [0.6, 0.6, 0.6]
    )
    return model, lambda f, x, rng: f + np.exp(x[2]) * rng.standard_t(4.0, SIZE)


MODELS = {"probit": probit_model, "poisson": poisson_model, "student": student_model}


def frozen_learner(model, x, rng):
    """A random walk as wide as the prior: its moves go far."""
    adaptation = MomentsAdaptation(
        scaling=0.5,
        learn_scaling=False,
        covariance=np.diag(model.sd**2),
        initial_covariance=None,
        default_scaling=None,
    )
    adaptation.check(["theta"], len(x))
    return adaptation.start(x, rng, None, 0.3)


def constant(model):
    """Sites of the approximation at the prior mean: a function of the data alone."""
    return constant_sites(approximate(model, model.mean, "laplace").sites, model.mean.size)


def learnt(model):
    """Sites as a quadratic in theta, fitted at the points of a fixed design."""
    dim = model.mean.size
    offsets = stats.qmc.Sobol(dim, seed=1).random(16) - 0.5
    points = model.mean + 2.0 * offsets * model.sd
    pilots = [approximate(model, x, "laplace") for x in points]
    return fit_sites(
        np.array([p.x for p in pilots]),
        np.array([p.sites.precision for p in pilots]),
        np.array([p.sites.shift for p in pilots]),
        Standardization(model.mean, np.diag(model.sd)),
    )


def transitions(target, model, x, f, n, rng, move=move_hyperparameters):
    """Make frozen transitions; return theta and log likelihood at their end."""
    place, chain, learner = target.place(x, f), new_chain(x), frozen_learner(model, x, rng)
    for _ in range(n):
        place = move(target, place, chain, learner, rng, False)
        place, _ = slices(model, place, rng, 2)
    return place, chain


def calibration_p_values(name, make_sites=constant, move=move_hyperparameters, n_data=N_DATA_SETS):
    """P-values of theta against its prior, and of the log likelihood against fresh draws."""
    model, draw_data = MODELS[name]()
    rng = np.random.default_rng(20)
    ends, likelihoods, fresh = [], [], []
    for _ in range(n_data):
        x, again = model.draw_hyperparameters(rng), model.draw_hyperparameters(rng)
        f, other = model.draw_function(x, rng), model.draw_function(again, rng)
        model.y = draw_data(other, again, rng)
        model.set_hyperparameters(again)
        fresh.append(model.likelihood.value(other))
        model.y = draw_data(f, x, rng)
        target = JointTarget(model, make_sites(model))
        place, _ = transitions(target, model, x, f, N_TRANSITIONS, rng, move)
        ends.append(place.x)
        likelihoods.append(place.log_likelihood)
    ranks = stats.norm.cdf(np.array(ends), model.mean, model.sd)
    found = {f"theta[{k}]": stats.kstest(column, "uniform") for k, column in enumerate(ranks.T)}
    found["log likelihood"] = stats.ks_2samp(likelihoods, fresh)
    return {label: result.pvalue for label, result in found.items()}


@pytest.mark.numerics
@pytest.mark.parametrize("make_sites", [constant, learnt])
@pytest.mark.parametrize("name", MODELS)
def test_frozen_transitions_leave_exact_draws_exact(name, make_sites):
    p_values = calibration_p_values(name, make_sites)
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["probit", "poisson"])
def test_calibration_sees_a_missing_determinant(name, monkeypatch):
    def without(place):
        log_prior, log_likelihood, last = log_density_terms(place)
        return log_prior, log_likelihood, last - place.conditional.log_root_determinant

    monkeypatch.setattr(target_module, "log_density_terms", without)
    monkeypatch.setattr(transition, "log_density_terms", without)
    assert min(calibration_p_values(name).values()) < FALSE_ALARM


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["probit", "poisson"])
def test_calibration_sees_sites_that_differ_between_directions(name):
    """Sites of a proposal that know where it comes from, and of a place that do not."""

    def move(target, place, chain, learner, rng, adapts):
        def directed(x):
            sites = target.sites(x)
            return sites if x[1] > place.x[1] else sites.scaled(0.1)

        one_way = JointTarget(target.model, directed)
        moved = move_hyperparameters(one_way, place, chain, learner, rng, adapts)
        return moved if moved is place else target.place(moved.x, moved.function)

    assert min(calibration_p_values(name, move=move).values()) < FALSE_ALARM
