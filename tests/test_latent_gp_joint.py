"""Hyperparameters and latent function together: exactness, on closed-form models.

Simulation-based calibration: hyperparameters, function and data are drawn from the model, frozen
transitions start from that draw, and where they end is a draw of the same joint distribution. So
the ranks of hyperparameters in their prior are uniform, and so are those of the log likelihood
among fresh draws of the model. Each Kolmogorov-Smirnov test fails by chance with probability
`models.FALSE_ALARM`, 1e-6; with 300 data sets it sees a distribution function that is 0.16 off
anywhere, as planted mistakes are.
"""

import numpy as np
import pytest
from latent_likelihoods import Normal, Poisson, Probit, StudentT, squared_exponential
from models import FALSE_ALARM
from scipy import stats

from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.gp.typical_set import typical_depth
from pymc_kameleon.latent_gp.gaussian.conditional import conditional_of
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites, with_sites
from pymc_kameleon.latent_gp.hyperparameters import target as target_module
from pymc_kameleon.latent_gp.hyperparameters.learning import HyperparameterLearner, pilot_at
from pymc_kameleon.latent_gp.hyperparameters.site_function import constant_sites, fit_sites
from pymc_kameleon.latent_gp.hyperparameters.target import (
    JointTarget,
    log_density_terms,
    move_hyperparameters,
    slices,
)
from pymc_kameleon.latent_gp.reader.prior import FreeVariable, PriorAt, UnfactorisedPrior
from pymc_kameleon.mcmc.chain import new_chain
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.history import record

pytestmark = pytest.mark.numerics

N_DATA_SETS = 300
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
        return PriorAt(gaussian, FreeVariable(gaussian.mean, gaussian.cholesky, True))

    def unfactorised_prior(self):
        gaussian = self.prior().gaussian
        return UnfactorisedPrior(gaussian.mean, gaussian.covariance.copy(), is_whitened=True)

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
    learner = MomentsLearner(scaling=0.5, learn_scaling=False, covariance=np.diag(model.sd**2))
    learner.check(["theta"], len(x))
    return learner.start(x, rng, 0.3)


def constant(model):
    """Sites of the approximation at the prior mean: a function of the data alone."""
    return constant_sites(pilot_at(model, model.mean, "laplace").sites, model.mean.size)


def learnt(model):
    """Sites as a function of theta, fitted at the points of a fixed design."""
    dim = model.mean.size
    offsets = stats.qmc.Sobol(dim, seed=1).random(8) - 0.5
    points = model.mean + 2.0 * offsets * model.sd
    pilots = [pilot_at(model, x, "laplace") for x in points]
    return fit_sites(
        np.array([p.x for p in pilots]),
        np.array([p.sites.precision for p in pilots]),
        np.array([p.sites.shift for p in pilots]),
        Standardization(model.mean, np.diag(model.sd)),
    )


def calibration_p_values(name, make_sites=constant, move=move_hyperparameters):
    """P-values of theta against its prior, and of the log likelihood against fresh draws."""
    model, draw_data = MODELS[name]()
    rng = np.random.default_rng(20)
    ends, likelihoods, fresh = [], [], []
    for _ in range(N_DATA_SETS):
        x, again = model.draw_hyperparameters(rng), model.draw_hyperparameters(rng)
        f, other = model.draw_function(x, rng), model.draw_function(again, rng)
        model.y = draw_data(other, again, rng)
        model.set_hyperparameters(again)
        fresh.append(model.likelihood.value(other))
        model.y = draw_data(f, x, rng)
        target = JointTarget(model, make_sites(model))
        point, chain, learner = target.point(x, f), new_chain(x), frozen_learner(model, x, rng)
        target.hold(point, rng)
        for _ in range(N_TRANSITIONS):
            point = move(target, point, chain, learner, rng, False)
            point, _ = slices(target, point, rng, 2)
        ends.append(point.x)
        likelihoods.append(point.log_likelihood)
    ranks = stats.norm.cdf(np.array(ends), model.mean, model.sd)
    found = {f"theta[{k}]": stats.kstest(column, "uniform") for k, column in enumerate(ranks.T)}
    found["log likelihood"] = stats.ks_2samp(likelihoods, fresh)
    return {label: result.pvalue for label, result in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make_sites"),
    [("probit", learnt), ("student", learnt)],
)
def test_frozen_transitions_leave_exact_draws_exact(name, make_sites):
    p_values = calibration_p_values(name, make_sites)
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.slow
def test_calibration_sees_a_missing_determinant(monkeypatch):
    def without(point):
        log_prior, log_likelihood, last = log_density_terms(point)
        return log_prior, log_likelihood, last - point.conditional.log_jacobian

    monkeypatch.setattr(target_module, "log_density_terms", without)
    p_values = calibration_p_values("probit")
    assert min(p_values.values()) < FALSE_ALARM, p_values


def surrogate_learner(model, rng):
    """Moves on a surrogate that is narrower than the prior, and beside its middle."""
    learner = HyperparameterLearner(max_points=300).start(model.mean, rng, 0.9)
    middle, sd = model.mean + 0.5 * model.sd, 0.6 * model.sd
    for x in middle + 1.5 * sd * rng.standard_normal((60, model.mean.size)):
        learner.keep(x, np.array([-0.5 * float(np.sum(((x - middle) / sd) ** 2)), 0.0, 0.0]))
        record(learner.history, x)
    assert learner.fit(rng) is not None
    learner.end_tuning(model.mean, rng)
    learner.difference_share = 0.0
    return learner


@pytest.fixture(scope="module")
def surrogate_move():
    """What it knows depends on no data set."""
    learner = surrogate_learner(poisson_model()[0], np.random.default_rng(4))

    def move(target, point, chain, _, rng, adapts):
        return move_hyperparameters(target, point, chain, learner, rng, adapts)

    return move


@pytest.mark.slow
def test_surrogate_transitions_leave_exact_draws_exact(surrogate_move):
    p_values = calibration_p_values("poisson", move=surrogate_move)
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.fixture(params=[0.0, 2e-8, 0.1])
def product(request):
    """A prior and sites, of which one has this precision."""
    rng = np.random.default_rng(6)
    prior = squared_exponential(rng.uniform(-1, 1, (9, 2)), 0.6, 1.7, jitter=1e-4)
    prior = Gaussian(rng.standard_normal(9), prior.covariance, prior.cholesky)
    precision = np.append(request.param, rng.uniform(0.1, 3, 8))
    return prior, Sites(precision, rng.standard_normal(9))


def test_functions_and_eta_there_and_back(product):
    """Mean and determinant are in the table of `test_gaussian_sites`."""
    prior, sites = product
    found, f = conditional_of(prior, sites, None), np.random.default_rng(7).standard_normal(9)
    np.testing.assert_allclose(prior.mean + prior.cholesky @ found.whiten(f), f, rtol=1e-10)
    eta = found.to_eta(f, np.random.default_rng(8))
    np.testing.assert_allclose(found.from_eta(eta), f, rtol=1e-9, atol=1e-12)
    expected = prior.log_density(f) - with_sites(prior, sites)[0].log_density(f)
    np.testing.assert_allclose(found.log_ratio(f), expected, rtol=1e-8)


def test_slices_turn_eta_with_the_function():
    model, draw_data = poisson_model()
    rng = np.random.default_rng(12)
    f = model.draw_function(model.mean, rng)
    model.y = draw_data(f, model.mean, rng)
    target = JointTarget(model, constant(model))
    point = target.point(model.mean, f)
    target.hold(point, rng)
    moved, n_evaluations = slices(target, point, rng, 3)
    assert n_evaluations >= 3 and np.abs(moved.function - f).max() > 0.01
    np.testing.assert_allclose(moved.conditional.from_eta(target.eta), moved.function, rtol=1e-8)
    assert moved.log_likelihood == model.likelihood.value(moved.function)


def test_eta_is_standard_normal(product):
    """1e4 draws of f and eta: Kolmogorov-Smirnov for each of 18, and their correlations."""
    found, rng = conditional_of(*product, None), np.random.default_rng(11)
    draws = []
    for direction in found.images(rng.standard_normal((2, 10_000, 9))):
        draws.append(found.to_eta(found.mean + direction, rng).ravel())
    draws = np.array(draws)
    assert min(stats.kstest(column, "norm").pvalue for column in draws.T) > FALSE_ALARM
    assert np.all(np.abs(np.corrcoef(draws.T) - np.eye(18)) < 0.06)


def test_log_density_is_that_of_theta_and_eta():
    """Its change from one theta to another at fixed eta is that of the posterior over q."""
    model, draw_data = poisson_model()
    rng = np.random.default_rng(9)
    model.y = draw_data(model.draw_function(model.mean, rng), model.mean, rng)
    sites = constant(model)
    target = JointTarget(model, sites)
    point = target.point(model.mean, model.draw_function(model.mean, rng))
    target.hold(point, np.random.default_rng(1))
    value = np.empty(3)
    target.into(np.array([0.0, -1000.0]), value)  # its covariance is not positive definite
    assert value.sum() == -np.inf and target.n_failed == 1
    target.into(model.mean + np.array([0.3, -0.2]), value)
    moved = target.proposed

    def log_posterior_over_q(at):
        model.set_hyperparameters(at.x)
        gaussian = model.prior().gaussian
        log_joint = model.likelihood.value(at.function) + gaussian.log_density(at.function)
        conditional = with_sites(gaussian, sites(at.x))[0]
        return log_joint + model.log_prior(at.x) - conditional.log_density(at.function)

    expected = log_posterior_over_q(moved) - log_posterior_over_q(point)
    np.testing.assert_allclose(value.sum() - sum(log_density_terms(point)), expected, rtol=1e-8)


@pytest.mark.parametrize("has_means", [False, True])
def test_fitted_sites_are_the_regression_and_do_not_leave_the_pilots(has_means):
    """The posterior mean of a Gaussian process, written out for one parameter at a time."""
    rng = np.random.default_rng(10)
    points, size = rng.standard_normal((20, 2)), 4
    precision, shift = rng.gamma(3.0, size=(20, size)), rng.standard_normal((20, size))
    coordinates = Standardization(np.array([0.5, -0.5]), np.array([[2.0, 0.0], [0.5, 1.0]]))
    fitted = fit_sites(points, precision, shift, coordinates, has_means)

    def covariance(x, y):
        u, v = (np.linalg.solve(coordinates.factor, z - coordinates.location) for z in (x, y))
        return 4.0 * (1.0 + u @ v) + np.exp(-0.5 * np.sum((u - v) ** 2) / 2.0**2)

    among = np.array([[covariance(x, y) for y in points] for x in points]) + 0.01 * np.eye(20)
    new = np.array([0.7, -0.2])
    weights = np.linalg.solve(among, [covariance(new, x) for x in points])

    def predicted(values):
        return values.mean(axis=0) + weights @ (values - values.mean(axis=0))

    expected = np.exp(predicted(np.log(precision)))
    np.testing.assert_allclose(fitted(new).precision, expected, rtol=1e-8)
    means = expected * predicted(shift / precision)
    np.testing.assert_allclose(fitted(new).shift, means if has_means else predicted(shift))
    far = np.array([30.0, 40.0])
    np.testing.assert_allclose(
        fitted(coordinates.location + far).shift, fitted(coordinates.location + 2 * far).shift
    )


def test_small_precisions_of_one_pilot_are_not_those_of_another():
    """With a noise of exp(-12) at one pilot, sites of a large noise were floored."""
    log_noise = np.linspace(-12.0, 1.0, 14)[:, None]
    precision = np.exp(-2.0 * log_noise) * np.ones(3)
    coordinates = Standardization(np.array([-5.0]), 4.0 * np.eye(1))
    fitted = fit_sites(log_noise, precision, precision, coordinates, has_means=True)
    for x in log_noise:
        np.testing.assert_allclose(np.log(fitted(x).precision), -2.0 * x[0], atol=0.05)


def test_sites_that_say_nothing_at_some_pilots_are_known_at_the_others():
    """Without log-concavity curvatures are 0 here and there; the noise has any scale beside it."""
    points = np.linspace(-2.0, 2.0, 15)[:, None]
    waves = np.maximum(np.cos(2.0 * points + np.arange(6)), 0.0)
    coordinates = Standardization(np.zeros(1), np.eye(1))
    for precision in (waves, np.exp(-5.0 * points) * waves):
        fitted = fit_sites(points, precision, precision, coordinates)
        found = np.array([fitted(x).precision for x in points])
        is_known = waves > 0.3
        assert np.abs(np.log(found[is_known] / precision[is_known])).max() < 1.5


def test_ends_of_axes_are_explored_until_a_low_density_is_known_there():
    rng = np.random.default_rng(3)
    learner = HyperparameterLearner(max_points=300).start(np.zeros(2), rng, 0.9)

    def keep(points):
        for x in points:
            learner.keep(x, np.array([-0.5 * np.sum((x / scales) ** 2), 0.0, 0.0]))

    scales = np.array([0.3, 4.0])
    keep(scales * rng.uniform(-1.0, 1.0, (20, 2)))
    for _ in range(12):
        unknown = learner.unknown_points(learner.fit(rng), 0)
        u = learner.fitted.standardization.whiten(unknown)
        np.testing.assert_allclose(np.sort(np.abs(u), axis=0)[0], 0.0, atol=1e-10)
        np.testing.assert_allclose(np.linalg.norm(u, axis=0), learner.fitted.integrator.radius[0])
        if len(unknown) == 0:
            break
        keep(unknown)
    points, values, _ = learner.known()
    assert len(unknown) == 0 and len(points) >= 20 + 4
    assert np.all(np.sort(values)[:4] < -typical_depth(2))


def test_log_evidence_that_is_lost_to_rounding_is_no_pilot():
    """With a noise of exp(-18) both are wrong by more than any log evidence is."""
    inputs, y = np.linspace(0, 4, 10)[:, None], np.sin(np.arange(10.0))
    model = ClosedFormModel(inputs, lambda y, x: Normal(y, np.exp(x[2])), np.zeros(3), np.ones(3))
    model.y = y
    for method in ("ep", "laplace"):
        assert pilot_at(model, np.array([-0.5, 0.0, -18.0]), method) is None
        for log_noise in (-2.0, -8.0, -12.0):
            x = np.array([-0.5, 0.0, log_noise])
            found = pilot_at(model, x, method)
            covariance = squared_exponential(inputs, *np.exp(x[:2]), jitter=1e-5).covariance
            covariance = covariance + np.exp(2.0 * log_noise) * np.eye(10)
            expected = stats.multivariate_normal.logpdf(y, cov=covariance) + model.log_prior(x)
            np.testing.assert_allclose(found.log_density, expected, atol=1e-3)
