"""Targets of the surrogate: log prior and log likelihood against formulas, gradients, data."""

import os
import pickle
import subprocess
import sys
import time

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import stats
from scipy.integrate import solve_ivp
from scipy.optimize import minimize
from scipy.special import expit

from pymc_kameleon import AdaptiveMetropolisStep
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.targets import simulators as targets
from pymc_kameleon.targets.simulators import MODELS, LaplaceEvidence, SimulatedData, SIRCurves

pytestmark = pytest.mark.numerics

FAST = {"mode": "FAST_COMPILE"}
DIMENSIONS = {"T1": 2, "T2": 3, "T3": 3, "T4": 4, "T5": 5}
SIMULATE = {
    "T1": targets.simulate_banana,
    "T2": targets.simulate_nonlinear_regression,
    "T3": lambda **kwargs: targets.simulate_gp_classifier(30, **kwargs),
    "T4": targets.simulate_sir_epidemic,
    "T5": lambda **kwargs: targets.simulate_logistic_regression(50, **kwargs),
}
POINTS = {
    "T1": [{"a": 0.3, "b": 1.0}, {"a": -2.0, "b": 5.0}],
    "T2": [{"a": 0.2, "b": 40.0, "sigma": 0.2}, {"a": 3.0, "b": 80.0, "sigma": 0.05}],
    "T3": [
        {"log_lengthscales": np.log([0.4, 2.0]), "log_amplitude": np.log(1.5)},
        {"log_lengthscales": np.log([0.1, 0.3]), "log_amplitude": np.log(20.0)},
        {"log_lengthscales": np.log([30.0, 5.0]), "log_amplitude": np.log(0.02)},
    ],
    "T4": [
        {"R0": 3.0, "gamma": 1.2, "sigma": np.array([0.3, 0.5])},
        {"R0": 1.5, "gamma": 0.2, "sigma": np.array([1.0, 0.2])},
    ],
    "T5": [{"beta": np.array([0.1, -0.5, 1.0, 2.0, 0.0])}, {"beta": np.linspace(-3.0, 3.0, 5)}],
}
CASES = [(name, i) for name, points in POINTS.items() for i in range(len(points))]

every_model = pytest.mark.parametrize("name", MODELS)


def banana(data, a, b):
    likelihood = stats.norm(a, 4.0).logpdf(data.observed[:, 0]).sum()
    return 0.0, likelihood + stats.norm(b + a**2, 2.0).logpdf(data.observed[:, 1]).sum()


def nonlinear_regression(data, a, b, sigma):
    prior = stats.norm(3, 1).logpdf(a) + stats.norm(30, 15).logpdf(b)
    prior += stats.norm(-2, 1).logpdf(np.log(sigma))
    x = np.array([28, 55, 83, 110, 138, 225, 375])
    return prior, stats.norm(a * x / (x + b), sigma).logpdf(data.observed).sum()


def squared_exponential(x, lengthscales, amplitude):
    scaled = x / lengthscales
    squares = ((scaled[:, None] - scaled[None]) ** 2).sum(axis=2)
    return amplitude**2 * np.exp(-0.5 * squares)


def brute_force_evidence(covariance, labels):
    """Laplace's approximation with inverses, in coordinates in which the prior is white."""
    n = len(labels)
    signs = 2 * labels - 1
    root = np.linalg.cholesky(covariance + 1e-12 * covariance[0, 0] * np.eye(n))

    def objective(white):
        return 0.5 * white @ white + np.logaddexp(0, -signs * (root @ white)).sum()

    def gradient(white):
        return white - root.T @ (signs * expit(-signs * (root @ white)))

    def hessian(white):
        p = expit(root @ white)
        return np.eye(n) + root.T @ np.diag(p * (1 - p)) @ root

    options = {"gtol": 1e-10, "maxiter": 1000}
    found = minimize(
        objective, np.zeros(n), jac=gradient, hess=hessian, method="trust-exact", options=options
    )
    return -objective(found.x) - 0.5 * np.linalg.slogdet(hessian(found.x))[1]


def gp_classifier(data, log_lengthscales, log_amplitude):
    prior = stats.norm(0, np.sqrt(10)).logpdf([*log_lengthscales, log_amplitude]).sum()
    lengthscales, amplitude = np.exp(log_lengthscales), np.exp(log_amplitude)
    covariance = squared_exponential(data.inputs, lengthscales, amplitude)
    return prior, brute_force_evidence(covariance, data.observed)


def epidemic(beta, gamma):
    def derivative(_, y):
        return [-beta * y[0] * y[1], beta * y[0] * y[1] - gamma * y[1]]

    times = np.arange(1, 20) / 4
    solution = solve_ivp(derivative, (0, 5), [0.99, 0.01], t_eval=times, rtol=1e-10, atol=1e-13)
    return solution.y.T


def sir_epidemic(data, R0, gamma, sigma):
    # The Jacobian of R0 -> log(R0 - 1), and those of logarithms.
    prior = stats.truncnorm(-1 / 3, np.inf, 2, 3).logpdf(R0) + np.log(R0 - 1)
    prior += stats.norm(np.log(2), 2).logpdf(np.log(gamma))
    prior += (stats.halfcauchy.logpdf(sigma) + np.log(sigma)).sum()
    curves = epidemic(R0 * gamma, gamma)
    return prior, stats.lognorm(sigma, scale=curves).logpdf(data.observed).sum()


def logistic_regression(data, beta):
    p = expit(data.inputs @ beta)
    likelihood = stats.bernoulli(p).logpmf(data.observed.astype(int)).sum()
    return stats.norm(0, 10).logpdf(beta).sum(), likelihood


FORMULAS = {
    "T1": banana,
    "T2": nonlinear_regression,
    "T3": gp_classifier,
    "T4": sir_epidemic,
    "T5": logistic_regression,
}


@pytest.fixture(scope="module")
def densities():
    """Data, model and log density of each target, made when they are asked for."""
    made = {}

    def get(name):
        if name not in made:
            data = SIMULATE[name](random_seed=1)
            model = MODELS[name](data)
            made[name] = data, model, LogDensity(model, compile_kwargs=FAST)
        return made[name]

    return get


def unconstrained(model, point):
    values = []
    for variable in model.free_RVs:
        transform = model.rvs_to_transforms[variable]
        value = pt.as_tensor(np.asarray(point[variable.name], dtype=float))
        if transform is not None:
            value = transform.forward(value, *variable.owner.inputs)
        values.append(np.ravel(value.eval(mode="FAST_COMPILE")))
    return np.concatenate(values)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_prior_and_likelihood_against_formulas(densities, name, i):
    data, model, density = densities(name)
    prior, likelihood, estimate = density(unconstrained(model, POINTS[name][i]))
    expected_prior, expected_likelihood = FORMULAS[name](data, **POINTS[name][i])
    # PyMC takes the logarithm of a constant scale such as 10.0 in single precision.
    assert prior == pytest.approx(expected_prior, abs=1e-6)
    assert likelihood == pytest.approx(expected_likelihood, rel=1e-5 if name == "T4" else 1e-8)
    assert estimate == 0


@pytest.mark.parametrize(("name", "i"), [case for case in CASES if case[0] != "T4"])
def test_gradients_against_differences(densities, name, i):
    _, model, density = densities(name)
    x = unconstrained(model, POINTS[name][i])
    value, gradient = density.value_and_gradient(x)
    np.testing.assert_allclose(value, density(x), rtol=1e-12)
    steps = 1e-4 * np.maximum(np.abs(x), 1)
    differences = [
        (8 * (density(x + e) - density(x - e)) - density(x + 2 * e) + density(x - 2 * e))
        / (12 * e.sum())
        for e in np.diag(steps)
    ]
    scale = 1 + np.abs(gradient).max()
    np.testing.assert_allclose(gradient, np.transpose(differences)[:2], atol=1e-6 * scale)


@every_model
def test_dimensions_and_data(densities, name):
    data, model, density = densities(name)
    assert density.dim == DIMENSIONS[name]
    assert isinstance(data, SimulatedData)
    assert set(data.truth) == {variable.name for variable in model.free_RVs}
    assert len(model.observed_RVs) + len(model.potentials) == 1
    assert np.isfinite(density(unconstrained(model, data.truth))).all()


@every_model
def test_data_are_reproducible(name):
    first, again, other = (SIMULATE[name](random_seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.observed, again.observed)
    np.testing.assert_equal(first.truth, again.truth)
    assert not np.array_equal(first.observed, other.observed)
    generator = SIMULATE[name](random_seed=np.random.default_rng(1))
    np.testing.assert_array_equal(first.observed, generator.observed)


@pytest.mark.parametrize("name", ["T1", "T2", "T4"])
def test_model_simulates_by_seed(name):
    model = MODELS[name](random_seed=1)
    observed = model.rvs_to_values[model.observed_RVs[0]].eval(mode="FAST_COMPILE")
    np.testing.assert_array_equal(observed, SIMULATE[name](random_seed=1).observed)


def test_banana_posterior_is_a_twisted_gaussian(densities):
    data, _, density = densities("T1")
    first, second = data.observed.mean(axis=0)
    points = 2 * np.random.default_rng(2).standard_normal((20, 2))
    expected = stats.norm(first, 1.0).logpdf(points[:, 0])
    expected += stats.norm(second - points[:, 0] ** 2, 0.5).logpdf(points[:, 1])
    actual = [density(point).sum() for point in points]
    np.testing.assert_allclose(np.diff(actual), np.diff(expected), rtol=1e-9)


@pytest.mark.slow
def test_data_follow_their_laws():
    n = 100_000
    banana = targets.simulate_banana(n, random_seed=3).observed
    np.testing.assert_allclose(banana.mean(axis=0), [0.2, 2.04], atol=6 * 4 / np.sqrt(n))
    np.testing.assert_allclose(banana.std(axis=0), [4, 2], rtol=6 / np.sqrt(2 * n))
    logistic = targets.simulate_logistic_regression(n, beta=[1, 0, 0, 0, 0], random_seed=3)
    assert logistic.observed.mean() == pytest.approx(expit(1), abs=3 / np.sqrt(n))
    np.testing.assert_array_equal(logistic.truth["beta"], [1, 0, 0, 0, 0])
    rng = np.random.default_rng(3)
    epidemics = [targets.simulate_sir_epidemic(random_seed=rng).observed for _ in range(2000)]
    noise = np.log(epidemics) - np.log(epidemic(4.0, 1.0))
    np.testing.assert_allclose(noise.std(axis=(0, 1)), [0.2, 0.3], rtol=0.03)
    np.testing.assert_allclose(noise.mean(axis=(0, 1)), 0, atol=0.01)
    # Points 0.1 lengthscales apart have nearly the same latent value, others do not.
    classes = targets.simulate_gp_classifier(2000, random_seed=4)
    x = classes.inputs / np.exp(classes.truth["log_lengthscales"])
    distances = np.linalg.norm(x[:, None] - x[None], axis=2)
    same = classes.observed[:, None] == classes.observed[None]
    pairs = np.triu(np.ones_like(same), k=1)
    near, far = same[pairs & (distances < 0.1)].mean(), same[pairs & (distances > 5)].mean()
    assert near > 0.6 > far


# Laplace's approximation --------------------------------------------------------------------------


def test_evidence_of_one_point_by_hand():
    # f = k sigmoid(-f) at the mode for a label of one.
    k, f = 4.0, 0.0
    for _ in range(200):
        f -= (f - k * expit(-f)) / (1 + k * expit(f) * expit(-f))
    w = expit(f) * expit(-f)
    expected = np.log(expit(f)) - 0.5 * f**2 / k - 0.5 * np.log(1 + k * w)
    for label in (0, 1):
        value, _ = targets.laplace_evidence(np.array([[k]]), np.array([label]))
        assert value == pytest.approx(expected, rel=1e-12)


def test_derivative_in_every_entry_of_the_covariance():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 2))
    labels = (rng.random(5) < 0.5).astype(float)
    covariance = squared_exponential(x, 1.0, 3.0)
    _, gradient = targets.laplace_evidence(covariance, labels)
    for i in range(5):
        for j in range(i + 1):
            change = np.zeros((5, 5))
            change[i, j] = change[j, i] = 1e-5
            up, down = (targets.laplace_evidence(covariance + s * change, labels) for s in (1, -1))
            slope = (gradient * change).sum() / 1e-5
            assert (up[0] - down[0]) / 2e-5 == pytest.approx(slope, abs=1e-7)


def test_singular_covariances_and_flat_posteriors():
    labels = np.array([1.0, 1.0, 0.0])
    value, gradient = targets.laplace_evidence(np.full((3, 3), 2.0), labels)
    one_value = minimize(lambda f: f**2 / 4 - np.log(expit(f)) * 2 - np.log(expit(-f)), 0.0).x[0]
    p = expit(one_value)
    expected = 2 * np.log(p) + np.log(1 - p) - one_value**2 / 4
    expected -= 0.5 * np.log(1 + 2 * 3 * p * (1 - p))
    assert value == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(gradient).all()
    value, _ = targets.laplace_evidence(np.zeros((3, 3)), labels)
    assert value == pytest.approx(3 * np.log(0.5))


@pytest.mark.parametrize("entry", [np.nan, np.inf, -100.0])
def test_no_covariance_gives_nan(entry):
    covariance = np.eye(3)
    covariance[1, 1] = entry
    value, gradient = targets.laplace_evidence(covariance, np.array([1.0, 0.0, 1.0]))
    assert np.isnan(value)
    assert np.isnan(gradient).all()


def test_an_indefinite_matrix_gives_nan():
    covariance = np.array([[1.0, 2.0], [2.0, 1.0]])
    value, gradient = targets.laplace_evidence(covariance, np.array([1.0, 0.0]))
    assert np.isnan(value)
    assert np.isnan(gradient).all()


def test_mode_is_found_wherever_the_prior_goes():
    rng = np.random.default_rng(6)
    data = targets.simulate_gp_classifier(40, random_seed=6)
    for parameters in np.exp(np.sqrt(10) * rng.standard_normal((200, 3))):
        covariance = squared_exponential(data.inputs, parameters[:2], parameters[2])
        value, gradient = targets.laplace_evidence(covariance, data.observed)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


# the epidemic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "gamma"), [(4.0, 1.0), (0.5, 3.0), (6.0, 0.5)])
def test_epidemic_against_another_solver(beta, gamma):
    expected = np.log(epidemic(beta, gamma))
    np.testing.assert_allclose(targets.solve_sir(beta, gamma), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("beta", "gamma"), [(np.nan, 1.0), (np.inf, 1.0), (4.0, np.inf), (1e300, 1.0)]
)
def test_failing_solver_of_a_target_gives_nan(beta, gamma, capfd):
    start = time.perf_counter()
    solution = targets.solve_sir(beta, gamma)
    assert time.perf_counter() - start < 1
    assert solution.shape == (19, 2)
    assert np.isnan(solution).all()
    assert capfd.readouterr() == ("", "")


def test_epidemic_has_no_gradient(densities):
    data, model, density = densities("T4")
    with pytest.raises(NotImplementedError, match="no gradient"):
        density.value_and_gradient(unconstrained(model, data.truth))


def test_black_boxes_are_picklable_and_comparable():
    for op, other in [
        (SIRCurves([1.0, 2.0], 0.5), SIRCurves([1.0, 2.0])),
        (LaplaceEvidence([1, 0]), LaplaceEvidence([1, 1])),
    ]:
        assert pickle.loads(pickle.dumps(op)) == op
        assert hash(op) == hash(pickle.loads(pickle.dumps(op)))
        assert op != other


@pytest.mark.slow
def test_models_of_simulators_survive_a_new_process(densities):
    cases = {}
    for name in ("T3", "T4"):
        data, model, density = densities(name)
        x = unconstrained(model, data.truth)
        cases[name] = model, x, density(x)
    code = (
        "import sys, cloudpickle, numpy as np\n"
        "from pymc_kameleon.model.log_density import LogDensity\n"
        "for model, x, value in cloudpickle.load(sys.stdin.buffer).values():\n"
        "    density = LogDensity(model, compile_kwargs={'mode': 'FAST_COMPILE'})\n"
        "    np.testing.assert_allclose(density(x), value, rtol=1e-10)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=cloudpickle.dumps(cases),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode()


def sample_epidemic(seconds_per_call=0.0, **kwargs):
    options = dict(draws=60, chains=1, cores=1, random_seed=7) | kwargs
    with targets.sir_epidemic(random_seed=1, seconds_per_call=seconds_per_call):
        return pm.sample(
            tune=100,
            step=AdaptiveMetropolisStep(compile_kwargs={"mode": "FAST_COMPILE"}, steps_per_draw=10),
            progressbar=False,
            compute_convergence_checks=False,
            **options,
        )


def test_epidemic_is_sampled():
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        posterior = sample_epidemic()["posterior"]
    assert posterior["sigma"].shape == (1, 60, 2)
    assert (posterior["R0"].values > 1).all()
    assert len(np.unique(posterior["gamma"].values)) > 5


def test_epidemic_can_be_sent_to_a_process():
    model = targets.sir_epidemic(random_seed=1)
    sent = pickle.loads(cloudpickle.dumps(model))
    found = [m.compile_logp(mode="FAST_COMPILE")(m.initial_point()) for m in (model, sent)]
    assert np.isfinite(found[0])
    assert found[0] == found[1]


def test_dear_epidemic_waits():
    rates = pt.dscalars("beta", "gamma")
    for seconds in (0.0, 0.05):
        curves = SIRCurves(seconds_per_call=seconds)(*rates)
        solve = pytensor.function(rates, curves, mode="FAST_COMPILE")
        start = time.perf_counter()
        for _ in range(4):
            solution = solve(4.0, 1.0)
        assert time.perf_counter() - start >= 4 * seconds
        np.testing.assert_array_equal(solution, targets.solve_sir(4.0, 1.0))


def test_bad_arguments_of_targets():
    with pytest.raises(ValueError, match="seconds_per_call"):
        targets.sir_epidemic(random_seed=1, seconds_per_call=-1.0)
    with pytest.raises(ValueError, match="n_points"):
        targets.simulate_gp_classifier(0)
    with pytest.raises(ValueError, match="n_observations"):
        targets.simulate_banana(0)
    with pytest.raises(ValueError, match="beta has shape"):
        targets.simulate_logistic_regression(10, beta=[1.0, 2.0])
