"""What is peculiar to `LatentGPStep`; `test_contract` has the rest, `test_latent_gp_joint` proofs.

Statistical assertions state their null probability.
"""

import functools
import re

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import (
    COUNTS,
    INPUTS,
    PLAIN,
    UNCOMPILED,
    BlackBox,
    assert_mean,
    begin,
    drive,
    latent,
    negative_half_square,
    run,
    sample,
    values,
)
from pymc.exceptions import SamplingError
from pytensor.graph.op import Op
from scipy import stats
from scipy.special import logsumexp

import pymc_kameleon
from pymc_kameleon import EllipticalSliceStep, LatentGPStep
from pymc_kameleon.latent_gp import laplace
from pymc_kameleon.latent_gp.gaussian_approximations import (
    expectation_propagation_approximation,
)
from pymc_kameleon.latent_gp.hyperparameters.learning import pilot_at
from pymc_kameleon.latent_gp.hyperparameters.target import JointTarget, log_joint
from pymc_kameleon.latent_gp.quadrature import quadrature_moments
from pymc_kameleon.steps import latent_gp as step_module

pytestmark = pytest.mark.filterwarnings("ignore:Detected variables likely created by GP objects")

LINE = np.linspace(0, 4, 10)[:, None]
MANY = np.linspace(0, 4, 11)[:, None]
VALUES = np.array([0.3, 0.9, 1.4, 0.8, -0.2, -0.9, -1.1, -0.3, 0.5, 0.2])


def regression(**kwargs):
    """Normal noise of unknown size: p(y | lengthscale, noise) is known.

    The function is between its hyperparameters in the model's order, which is that of a point.
    """
    with pm.Model() as model:
        lengthscale = pm.LogNormal("lengthscale", 0.0, 0.7)
        f = latent(lengthscale=lengthscale, amplitude=1.0, inputs=LINE, **kwargs)
        noise = pm.HalfNormal("noise", 0.5)
        pm.Normal("y", f, noise, observed=VALUES)
    return model


@functools.cache
def regression_moments():
    """Posterior means of the logs of lengthscale and noise, and of their squares, on a grid."""
    grid = np.stack(
        np.meshgrid(np.linspace(-3, 3, 121), np.linspace(-12, 1.5, 201), indexing="ij"), axis=-1
    ).reshape(-1, 2)
    logs = np.empty(len(grid))
    for i, (log_lengthscale, log_noise) in enumerate(grid):
        covariance = np.exp(-0.5 * (LINE - LINE.T) ** 2 / np.exp(2 * log_lengthscale))
        covariance += (1e-6 + np.exp(2 * log_noise)) * np.eye(len(LINE))
        logs[i] = stats.multivariate_normal.logpdf(VALUES, cov=covariance)
        logs[i] += stats.norm.logpdf(log_lengthscale, 0.0, 0.7)
        logs[i] += stats.halfnorm.logpdf(np.exp(log_noise), scale=0.5) + log_noise
    weights = np.exp(logs - logsumexp(logs))
    return weights @ np.hstack([grid, grid**2])


def hierarchical():
    """Amplitude with a parent of its own, a trend in the likelihood, and something apart."""
    with pm.Model() as model:
        parent = pm.HalfNormal("parent", 1.0)
        amplitude = pm.HalfNormal("amplitude", parent)
        level = pm.Normal("level", 0.0, 1.0)
        apart = pm.Normal("apart", 0.0, 1.0)
        category = pm.Bernoulli("category", 0.5)
        f = latent(amplitude=amplitude)
        pm.Poisson("y", pt.exp(f + level + 0.1 * category), observed=COUNTS)
        pm.Normal("z", apart, 1.0, observed=0.3)
    return model


def names_of(step):
    return [v.name for v in step.vars]


@pytest.mark.numerics
def test_hyperparameters_are_found():
    model = hierarchical()
    with model:
        step = LatentGPStep(compile_kwargs=UNCOMPILED)
        assert names_of(step) == ["amplitude_log__", "level", "f_rotated_"]
        assert names_of(LatentGPStep("f", compile_kwargs=UNCOMPILED)) == names_of(step)
        named = LatentGPStep([model["amplitude"], model["f"]], compile_kwargs=UNCOMPILED)
    assert names_of(named) == ["amplitude_log__", "f_rotated_"]
    assert [v.name for v in named.joint.others] == ["parent_log__", "level", "apart", "category"]


@pytest.mark.slow
def test_points_keep_the_order_of_the_model():
    """PyMC records the values of a point by their order."""
    model = regression()
    step = LatentGPStep(["noise", "f", "lengthscale"], model=model, compile_kwargs=UNCOMPILED)
    point, _ = begin(step).step(dict(reversed(model.initial_point().items())))
    assert list(point) == [value.name for value in model.value_vars]


def scaled():
    """The free variable is no standard normal, so the model's factor is not that of f."""
    with pm.Model() as model:
        lengthscale = pm.LogNormal("lengthscale", 0.0, 0.7)
        covariance = pm.gp.cov.ExpQuad(1, ls=lengthscale)(LINE) + 1e-6 * np.eye(len(LINE))
        v = pm.Normal("v", 0.5, 2.0, shape=len(LINE))
        f = pm.Deterministic("f", pt.linalg.cholesky(covariance) @ v)
        pm.Normal("y", f, 0.3, observed=VALUES)
    return model


@pytest.mark.parametrize("build", [regression, scaled])
def test_density_is_that_of_the_model(build):
    """With the Jacobians of the transforms: differences between points are those of the model.

    At a point that was given, and at the same one as proposals are evaluated.
    """
    model = build()
    step = LatentGPStep("f", model=model, compile_kwargs=UNCOMPILED)
    log_density, rng = model.compile_logp(**UNCOMPILED), np.random.default_rng(0)
    found = []
    for _ in range(3):
        start = model.initial_point()
        point = {name: v + 0.3 * rng.standard_normal(v.shape) for name, v in start.items()}
        begin(step, tune=0)
        step._arrive(np.concatenate([np.ravel(point[v.name]) for v in step.vars]))
        found.append(log_joint(step._point) - log_density(point))
        proposed = JointTarget(step.joint, step.sites).point(step._point.x, step.position)
        np.testing.assert_allclose(log_joint(proposed), log_joint(step._point), rtol=1e-12)
        again = proposed.variable.to_variable(step.position)
        np.testing.assert_allclose(again, point[step.function.value_variable.name], rtol=1e-6)
    np.testing.assert_allclose(found, np.full(3, found[0]), rtol=1e-9)


@pytest.mark.slow
def test_hyperparameters_whose_memory_is_not_ours_to_write():
    """As some arrays are that came from another process."""
    joint = LatentGPStep(model=regression(), compile_kwargs=PLAIN).joint
    joint.set_hyperparameters(np.array([0.3, -1.0]))
    expected = joint.prior().gaussian.covariance
    for shared in joint._shared:
        array = shared.get_value(borrow=True)
        array[...] = 0.0
        array.flags.writeable = False
    joint.set_hyperparameters(np.array([0.3, -1.0]))
    np.testing.assert_array_equal(joint.prior().gaussian.covariance, expected)


@pytest.mark.parametrize("are_data", [False, True])
@pytest.mark.parametrize("compile_kwargs", [None, UNCOMPILED])
def test_a_covariance_without_hyperparameters_is_not_overwritten(are_data, compile_kwargs):
    """Factors take the place of matrices, and this one is a constant, or data of the model."""
    covariance = np.exp(-0.5 * (LINE - LINE.T) ** 2) + 1e-6 * np.eye(len(LINE))
    with pm.Model() as model:
        given = pm.Data("covariance", covariance) if are_data else covariance
        f = pm.MvNormal("f", np.zeros(len(LINE)), cov=given)
        pm.Normal("y", f, pm.HalfNormal("noise", 0.5), observed=VALUES)
    joint = LatentGPStep(model=model, compile_kwargs=compile_kwargs).joint
    for _ in range(2):
        prior = joint.unfactorised_prior()
        np.testing.assert_array_equal(prior.covariance, covariance)
        prior.factorised_in_place()


class Remembered(Op):
    """A covariance that keeps what it has computed."""

    itypes, otypes = [pt.dscalar], [pt.dmatrix]

    def __init__(self):
        self.known = {}

    def perform(self, node, inputs, outputs):
        lengthscale = float(inputs[0])
        if lengthscale not in self.known:
            covariance = np.exp(-0.5 * (LINE - LINE.T) ** 2 / lengthscale**2)
            self.known[lengthscale] = covariance + 1e-6 * np.eye(len(LINE))
        outputs[0][0] = self.known[lengthscale]


def test_what_a_black_box_returns_is_not_overwritten():
    operation = Remembered()
    with pm.Model() as model:
        lengthscale = pm.LogNormal("lengthscale", 0.0, 0.7)
        f = pm.MvNormal("f", np.zeros(len(LINE)), cov=operation(lengthscale))
        pm.Normal("y", f, 0.5, observed=VALUES)
    joint = LatentGPStep(model=model).joint
    joint.set_hyperparameters(np.zeros(1))
    expected = joint.prior().gaussian.covariance.copy()
    joint.unfactorised_prior().factorised_in_place()
    np.testing.assert_array_equal(operation.known[1.0], expected)


def test_new_data_in_the_middle_of_a_chain():
    """What is kept of the point is computed anew, and is the model's density with the new data."""
    with pm.Model() as model:
        observed = pm.Data("observed", VALUES)
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0), inputs=LINE)
        pm.Normal("y", f, 0.5, observed=observed)
    step = LatentGPStep(model=model, compile_kwargs=PLAIN)
    log_density = model.compile_logp(**UNCOMPILED)
    found, point = [], model.initial_point()
    begin(step)
    for data in (VALUES, VALUES[::-1] + 1.0):
        with model:
            pm.set_data({"observed": data})
        point, _ = step.step(point)
        found.append(log_joint(step._point) - log_density(point))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("reparameterize", [True, False])
def test_posterior_of_a_regression(reparameterize):
    """Whitened or not, with a hyperparameter of the likelihood, through `pm.sample`."""
    model = regression(reparameterize=reparameterize)
    with model:
        step = LatentGPStep()
    idata = sample(step, model, draws=2000, tune=400)
    draws = np.log(np.stack([values(idata, n)[0] for n in ("lengthscale", "noise")], axis=-1))
    assert_mean(np.hstack([draws, draws**2]), regression_moments(), "log hyperparameters:")
    assert values(idata, "surrogate_share", "sample_stats")[0, -1] > 0


@pytest.mark.slow
def test_beside_other_steps():
    model = hierarchical()
    with model:
        step = LatentGPStep(compile_kwargs=PLAIN)
    idata = sample([step], model, draws=50, tune=20)
    for name in ("parent", "amplitude", "level", "apart", "f"):
        assert len(np.unique(values(idata, name))) > 5
    prediction = pm.sample_posterior_predictive(
        idata, model=model, progressbar=False, random_seed=1, compile_kwargs=dict(UNCOMPILED)
    )
    assert prediction["posterior_predictive"]["y"].shape == (1, 50, len(COUNTS))


def test_without_a_gradient_it_moves_at_a_fixed_whitened_function():
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
        pm.Potential("simulator", BlackBox(negative_half_square)(f))
    step = LatentGPStep(model=model)
    points, statistics, _ = run(step, model, 300, tune=100)
    assert statistics[-1]["n_refits"] == 0
    assert len(np.unique(points[:, 0])) > 30


def unknown():
    return pm.HalfNormal("amplitude", 1.0)


def marginal():
    process = pm.gp.Marginal(cov_func=unknown() ** 2 * pm.gp.cov.ExpQuad(1, 1.0))
    process.marginal_likelihood("y", X=INPUTS, y=COUNTS.astype(float), sigma=0.1)


def hilbert():
    process = pm.gp.HSGP(m=[4], c=1.5, cov_func=unknown() ** 2 * pm.gp.cov.ExpQuad(1, 1.0))
    pm.Poisson("y", pt.exp(process.prior("f", X=INPUTS)), observed=COUNTS)


def product():
    amplitude = unknown()
    f = latent("f", amplitude=amplitude, inputs=LINE)
    g = latent("g", amplitude=amplitude)
    pm.Poisson("y", pt.exp(f * g[0]), observed=np.ones(len(LINE)))


def apart():
    pm.Normal("apart", 0, 1)
    pm.Bernoulli("category", 0.5)
    pm.Poisson("y", pt.exp(latent(amplitude=unknown())), observed=COUNTS)


def sums():
    pm.Normal("y", latent(amplitude=unknown()).cumsum(), 1.0, observed=COUNTS)


def large():
    pm.Poisson("y", pt.exp(latent(amplitude=unknown(), inputs=MANY)), observed=np.ones(11))


@pytest.mark.parametrize(
    ("build", "vars", "options", "words"),
    [
        (marginal, None, {}, r"pm.gp.Marginal.*NUTS"),
        (hilbert, ["f"], {}, "HSGP"),
        (product, None, {}, r"may depend on 8 values"),
        (product, ["f_rotated_", "g_rotated_"], {}, "may depend on 8 values"),
        (apart, ["f", "amplitude", "apart"], {}, r"apart directly.*vars=\[f, amplitude"),
        (apart, ["f", "category"], {}, "category is discrete"),
        (apart, ["nothing"], {}, "no variable 'nothing'"),
        (apart, ["amplitude", "apart"], {}, "no latent function"),
        (sums, None, {}, "does not factorise"),
        (large, None, {}, r"f_rotated_ has 11 values.*pm.gp.HSGP"),
        (apart, ["f"], {"blocked": False}, "together"),
        (apart, None, {"approximation": "exact"}, "approximation"),
        (apart, None, {"steps_per_draw": 0}, "steps_per_draw"),
        (apart, None, {"n_slices": 0}, "n_slices"),
        (apart, None, {"target_accept": 1.5}, "target_accept"),
    ],
)
def test_what_is_refused(build, vars, options, words, monkeypatch):
    monkeypatch.setattr("pymc_kameleon.latent_gp.hyperparameters.joint_model.MOST_VALUES", 10)
    with pm.Model() as model:
        build()
    with pytest.raises((ValueError, NotImplementedError), match=words):
        LatentGPStep(vars, model=model, compile_kwargs=UNCOMPILED, **options)


def wide():
    """A lengthscale whose prior reaches where the covariance is singular."""
    with pm.Model() as model:
        log_lengthscale = pm.Normal("log_lengthscale", 0.0, 10.0)
        f = latent(lengthscale=pt.exp(log_lengthscale), jitter=0.0)
        pm.Poisson("y", pt.exp(f), observed=COUNTS)
    return model


@pytest.mark.numerics
def test_failing_covariances_are_rejected_and_told_of_once():
    model = wide()
    step = LatentGPStep(model=model, compile_kwargs=UNCOMPILED)
    points, statistics, _ = run(step, model, 700, tune=100)
    told = [s["warning"].message for s in statistics if "warning" in s]
    assert sum(s["n_failed"] for s in statistics) > 0
    assert sum("not positive definite" in message and "%" in message for message in told) == 1
    assert np.all(np.isfinite(points)) and len(np.unique(points[:, 0])) > 50


def test_a_start_without_a_covariance():
    model = wide()
    step = begin(LatentGPStep(model=model, compile_kwargs=UNCOMPILED))
    point = model.initial_point() | {"log_lengthscale": np.array(20.0)}
    with pytest.raises(SamplingError, match="not positive definite"):
        step.step(point)


@pytest.mark.numerics
def test_refits_come_at_doubling_transitions(monkeypatch):
    model = regression()
    step = LatentGPStep(model=model, compile_kwargs=UNCOMPILED, steps_per_draw=10)
    taken, refit = [], step_module.refit

    def spy(*arguments):
        taken.append(step.transition)
        return refit(*arguments)

    monkeypatch.setattr(step_module, "refit", spy)
    begin(step)
    drive(step, model.initial_point(), 60, tune=-1)
    assert taken == [0, 500]
    assert len(step.pilots.values) > 30
    step.stop_tuning()
    assert step.pilots is None and step.history is None


@pytest.mark.numerics
def test_failed_approximations_are_no_pilots(monkeypatch):
    """A chain without any goes on with what it has, and says so."""
    model = regression()
    step = LatentGPStep(model=model, compile_kwargs=UNCOMPILED)
    monkeypatch.setattr(step_module, "pilot_at", lambda *_: None)
    monkeypatch.setattr(
        "pymc_kameleon.latent_gp.hyperparameters.learning.pilot_at", lambda *_: None
    )
    points, statistics, _ = run(step, model, 250, tune=200)
    told = [s["warning"].message for s in statistics if "warning" in s]
    assert len(told) == 1 and "No Gaussian" in told[0]
    assert np.all(np.isfinite(points)) and len(np.unique(points[:, 0])) > 30


def test_pilots_of_logistic_regression_take_its_own_moments():
    """The same as by quadrature, to what either is exact to."""
    labels = np.array([1, 0, 0, 1, 1, 0])
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 2.0))
        pm.Bernoulli("y", logit_p=f, observed=labels)
    joint = LatentGPStep(model=model, compile_kwargs=UNCOMPILED).joint
    np.testing.assert_array_equal(joint.likelihood.logit_labels, 2 * labels - 1)
    assert joint.likelihood.probit_labels is None
    mean, variance = np.linspace(-2, 2, 6), np.geomspace(0.1, 10, 6)
    found = joint.likelihood.tilted_moments(mean, variance)
    expected = quadrature_moments(joint.likelihood, mean, variance)
    for name in ("log_normaliser", "slope", "curvature", "shrinkage"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5)
    x = np.array([0.5])
    joint.set_hyperparameters(x)
    exact = expectation_propagation_approximation(joint.prior().gaussian, joint.likelihood)
    value = pilot_at(joint, x, "ep").log_density
    np.testing.assert_allclose(value, exact.log_evidence + joint.log_prior(x), atol=1e-4)


@pytest.mark.numerics
def test_an_intercept_far_from_its_start():
    """From the default start, by quadrature over the intercept: 5 standard errors, and a tenth of a
    standard deviation for Laplace's approximation and the grid.
    """
    inputs, level = np.linspace(0, 5, 12)[:, None], -8.0
    counts = np.random.default_rng(1).poisson(np.exp(level + np.sin(inputs[:, 0])))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 10)
        f = latent(inputs=inputs, amplitude=1.0)
        pm.Poisson("y", pt.exp(b + f), observed=counts)
    grid = np.linspace(level - 40, level + 10, 301)
    logs = np.array([laplace(model, f, point={"b": x}).log_evidence for x in grid])
    weights = np.exp(logs - 0.5 * (grid / 10) ** 2 - np.max(logs - 0.5 * (grid / 10) ** 2))
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    step = LatentGPStep(model=model, compile_kwargs=UNCOMPILED)
    points, _, _ = run(step, model, 1100, tune=500, seed=1)
    draws = points[500:, 0]
    n = float(az.ess(draws[None]))
    assert n > 80
    assert abs(draws.mean() - mean) < sd * (0.1 + 5.0 / np.sqrt(n))


# known scales -------------------------------------------------------------------------------------

NOISE, WIDTH = 0.7, len(COUNTS)
LAGS = np.abs(np.subtract.outer(np.arange(WIDTH), np.arange(WIDTH)))
RING = ((LAGS == 1) | (LAGS == WIDTH - 1)).astype(float)
START = pm.Normal.dist(0, 1)


def known_walk():
    pm.GaussianRandomWalk("x", sigma=0.5, steps=WIDTH - 1, init_dist=START)
    return 1.0 + 0.25 * np.minimum.outer(np.arange(WIDTH), np.arange(WIDTH))


def known_autoregression():
    pm.AR("x", rho=[0.6], sigma=0.8, steps=WIDTH - 1, init_dist=START)
    return 0.6**LAGS


def known_areas():
    pm.CAR("x", mu=np.zeros(WIDTH), W=RING, alpha=0.5, tau=4.0)
    return np.linalg.inv(4.0 * (2.0 * np.eye(WIDTH) - 0.5 * RING))


def known_function():
    latent("x")
    return 1.5**2 * np.exp(-0.5 * (INPUTS - INPUTS.T) ** 2) + 1e-6 * np.eye(WIDTH)


KNOWN = [known_walk, known_autoregression, known_areas, known_function]


@pytest.mark.parametrize("has_level", [False, True])
@pytest.mark.parametrize("build", KNOWN)
def test_posterior_with_known_scales(build, has_level):
    """Normal noise, against the posterior in closed form, tuned and frozen."""
    with pm.Model() as model:
        covariance = build()
        level = pm.Normal("level", 0, 2) if has_level else 0.0
        pm.Normal("y", level + model["x"], NOISE, observed=COUNTS)
        step = LatentGPStep(compile_kwargs=UNCOMPILED)
    assert not step.joint.hyperparameters
    assert ("level" in names_of(step)) == has_level
    begin(step, tune=20)
    found, point = [], model.initial_point()
    for k in range(620):
        if k == 20:
            step.stop_tuning()
        point, (statistics,) = step.step(point)
        found.append(step.function.prior.gaussian.predictors(step.position))
    assert statistics["accept"] == statistics["accepted"] == 1.0
    covariance = covariance + 4.0 * has_level
    gain = np.linalg.solve(covariance + NOISE**2 * np.eye(WIDTH), covariance).T
    mean, posterior = gain @ COUNTS, covariance - gain @ covariance
    expected = np.concatenate([mean, mean**2 + np.diagonal(posterior)])
    draws = np.array(found[20:])
    assert_mean(np.hstack([draws, draws**2]), expected, build.__name__)


# no two steps send to each other ------------------------------------------------------------------


def observed(build):
    """Counts of a process with known scales."""

    def with_counts():
        build()
        pm.Poisson("y", pt.exp(pm.modelcontext(None)["x"]), observed=COUNTS)

    return with_counts


def known_with_level():
    known_walk()
    level = pm.Normal("level", 0, 1)
    pm.Poisson("y", pt.exp(level + pm.modelcontext(None)["x"]), observed=COUNTS)


def robust():
    pm.Poisson("y", pt.exp(pm.StudentT("x", 4, shape=WIDTH)), observed=COUNTS)


def simulated():
    pm.Potential("simulator", BlackBox(negative_half_square)(latent("x")))


def accepts(name, model):
    """Whether a step, made by its name alone, takes a model."""
    if name == "NUTS":
        return model.dlogp() is not None
    make = getattr(pymc_kameleon, name)
    options = {"approximation": "prior"} if name == "EllipticalSliceStep" else {}
    return make(model=model, compile_kwargs=UNCOMPILED, **options) is not None


@pytest.mark.parametrize(
    "build",
    [*map(observed, KNOWN), known_with_level, hilbert, marginal, sums, product, robust, simulated],
)
def test_a_step_that_an_error_names_takes_the_model(build):
    with pm.Model() as model:
        build()
    name = "x" if "x" in model.named_vars else "f"
    calls = [(LatentGPStep, None), (EllipticalSliceStep, None), (EllipticalSliceStep, [name])]
    for make, vars in calls:
        try:
            make(vars, model=model, compile_kwargs=UNCOMPILED)
        except (ValueError, NotImplementedError) as error:
            named = set(re.findall(r"\b(?:[A-Z]\w*Step|NUTS)\b", str(error)))
            for other in named - {make.__name__}:
                assert accepts(other, model), f"{make.__name__}: {error}"
