"""Targets of the benchmarks of a surrogate: log densities against formulas, and gradients."""

import numpy as np
import pymc as pm
import pytest
from pymc.blocking import DictToArrayBijection
from scipy import stats
from scipy.integrate import solve_ivp
from scipy.optimize import minimize
from scipy.special import expit

from pymc_kameleon.model.log_density import LogDensity

pytest.importorskip("benchmarks", reason="the tests are not in a clone")

from benchmarks.simulators import (
    MODELS,
    SIMULATE,
    laplace_evidence,
    simulate_gp_classifier,
    solve_sir,
)

pytestmark = pytest.mark.numerics

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
    return solve_ivp(derivative, (0, 5), [0.99, 0.01], t_eval=times, rtol=1e-10, atol=1e-13).y.T


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


@pytest.mark.parametrize("name", MODELS)
def test_prior_likelihood_and_gradient(name):
    """T4 is a black box; the gradient of the others against differences of fourth order."""
    size = {"T3": (30,), "T5": (50,)}.get(name, ())
    data = SIMULATE[name](*size, random_seed=1)
    model = MODELS[name](data)
    assert set(data.truth) == {variable.name for variable in model.free_RVs}
    density = LogDensity(model, compile_kwargs={"mode": "FAST_COMPILE"})
    for point in POINTS[name]:
        initial = pm.initial_point.make_initial_point_fn(model=model, overrides=point)(0)
        x = DictToArrayBijection.map(initial).data
        prior, likelihood, estimate = density(x)
        expected_prior, expected_likelihood = FORMULAS[name](data, **point)
        # PyMC takes the logarithm of a constant scale such as 10.0 in single precision.
        assert prior == pytest.approx(expected_prior, abs=1e-6)
        assert likelihood == pytest.approx(expected_likelihood, rel=1e-5 if name == "T4" else 1e-8)
        assert estimate == 0
        if name == "T4":
            continue
        gradient = model.compile_dlogp(mode="FAST_COMPILE")(initial)
        differences = [
            (8 * (density(x + e) - density(x - e)) - density(x + 2 * e) + density(x - 2 * e)).sum()
            / (12 * e.sum())
            for e in np.diag(1e-4 * np.maximum(np.abs(x), 1))
        ]
        np.testing.assert_allclose(gradient, differences, atol=1e-6 * (1 + np.abs(gradient).max()))


def test_derivative_in_every_entry_of_the_covariance():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 2))
    labels = (rng.random(5) < 0.5).astype(float)
    covariance = squared_exponential(x, 1.0, 3.0)
    _, gradient = laplace_evidence(covariance, labels)
    for i, j in zip(*np.tril_indices(5), strict=True):
        change = np.zeros((5, 5))
        change[i, j] = change[j, i] = 1e-5
        up, down = (laplace_evidence(covariance + s * change, labels)[0] for s in (1, -1))
        assert (up - down) / 2e-5 == pytest.approx((gradient * change).sum() / 1e-5, abs=1e-7)


def test_evidence_of_singular_covariances():
    labels = np.array([1.0, 1.0, 0.0])
    value, gradient = laplace_evidence(np.full((3, 3), 2.0), labels)
    one_value = minimize(lambda f: f**2 / 4 - np.log(expit(f)) * 2 - np.log(expit(-f)), 0.0).x[0]
    p = expit(one_value)
    expected = 2 * np.log(p) + np.log(1 - p) - one_value**2 / 4
    expected -= 0.5 * np.log(1 + 2 * 3 * p * (1 - p))
    assert value == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(gradient).all()
    assert laplace_evidence(np.zeros((3, 3)), labels)[0] == pytest.approx(3 * np.log(0.5))


@pytest.mark.parametrize(
    "covariance",
    [*(np.diag([1.0, entry]) for entry in (np.nan, np.inf, -100.0)), np.array([[1, 2], [2, 1.0]])],
)
def test_what_is_no_covariance_gives_nan(covariance):
    value, gradient = laplace_evidence(covariance, np.array([1.0, 0.0]))
    assert np.isnan(value)
    assert np.isnan(gradient).all()


def test_mode_is_found_wherever_the_prior_goes():
    rng = np.random.default_rng(6)
    data = simulate_gp_classifier(40, random_seed=6)
    for parameters in np.exp(np.sqrt(10) * rng.standard_normal((200, 3))):
        covariance = squared_exponential(data.inputs, parameters[:2], parameters[2])
        value, gradient = laplace_evidence(covariance, data.observed)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("beta", "gamma"), [(4.0, 1.0), (0.5, 3.0), (6.0, 0.5)])
def test_epidemic_against_another_solver(beta, gamma):
    np.testing.assert_allclose(solve_sir(beta, gamma), np.log(epidemic(beta, gamma)), atol=1e-5)
    assert np.isnan(solve_sir(1e300, gamma)).all()
