r"""The five posteriors on which the paper of the Gaussian-process surrogate compares its samplers.

=======================  ========================================  =====  ========  ===============
paper, model             parameters                                d      gradient  likelihood
=======================  ========================================  =====  ========  ===============
T1 banana_posterior      `a`, `b`                                  2      yes       microseconds
T2 nonlinear_regression  `a`, `b`, `sigma`                         3      yes       microseconds
T3 gp_classifier         `log_lengthscales` (2,), `log_amplitude`  3      yes       milliseconds
T4 sir_epidemic          `R0`, `gamma`, `sigma` (2,)               4      no        as chosen
T5 logistic_regression   `beta` (5,)                               5      yes       microseconds
=======================  ========================================  =====  ========  ===============

Benavoli, Wyse and White. Gaussian processes to speed up MCMC with automatic
exploratory-exploitation effect, section 4 and appendix A.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.compile.ops import wrap_py
from pytensor.graph import Apply, Op
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.special import expit

from pymc_kameleon.demo import log_solution

__all__ = [
    "MODELS",
    "SIMULATE",
    "SimulatedData",
    "laplace_evidence",
    "logistic_regression",
    "simulate_logistic_regression",
    "simulate_sir_epidemic",
    "sir_epidemic",
]

BANANA_SCALES = np.array([4.0, 2.0])
CONCENTRATIONS = np.array([28.0, 55.0, 83.0, 110.0, 138.0, 225.0, 375.0])
TIMES = 0.25 * np.arange(1, 20)
INITIAL_SHARES = (0.99, 0.01)

NEWTON_MAX_STEPS = 100
NEWTON_TOLERANCE = 1e-8
"""Length of the last Newton step in posterior standard deviations."""

SMALLEST_SHARE = 2.0**-40
"""Share of a Newton step below which it is given up."""


@dataclass(frozen=True)
class SimulatedData:
    """Data (n, ...) of a target, their covariates, and the natural parameters behind them."""

    observed: np.ndarray
    truth: dict[str, Any]
    inputs: np.ndarray | None = None


# T1 -----------------------------------------------------------------------------------------------


def simulate_banana(*, random_seed=None) -> SimulatedData:
    truth = {"a": 0.2, "b": 2.0}
    mean = np.array([truth["a"], truth["b"] + truth["a"] ** 2])
    noise = np.random.default_rng(random_seed).standard_normal((16, 2))
    return SimulatedData(mean + BANANA_SCALES * noise, truth)


def banana_posterior(data: SimulatedData) -> pm.Model:
    """A twisted Gaussian with standard deviations of 1 and 1/2, under a flat prior.

    The paper gives the prior, the true values and starts in [-2, 2], but no density: this one is a
    choice, with scales of the order of those starts.
    """
    with pm.Model() as model:
        a, b = pm.Flat("a"), pm.Flat("b")
        pm.Normal("y", pt.stack([a, b + a**2]), BANANA_SCALES, observed=data.observed)
    return model


# T2 -----------------------------------------------------------------------------------------------


def simulate_nonlinear_regression(*, random_seed=None) -> SimulatedData:
    truth = {"a": 0.14, "b": 50.0, "sigma": 0.1}
    x = CONCENTRATIONS
    noise = np.random.default_rng(random_seed).standard_normal(x.size)
    return SimulatedData(truth["a"] * x / (x + truth["b"]) + truth["sigma"] * noise, truth, x)


def nonlinear_regression(data: SimulatedData) -> pm.Model:
    """A saturating curve with parameters of very different size, all as in the paper."""
    with pm.Model() as model:
        a = pm.Normal("a", 3.0, 1.0)
        b = pm.Normal("b", 30.0, 15.0)
        sigma = pm.LogNormal("sigma", -2.0, 1.0)
        pm.Normal("y", a * data.inputs / (data.inputs + b), sigma, observed=data.observed)
    return model


# T3 -----------------------------------------------------------------------------------------------


def simulate_gp_classifier(n_points: int = 100, *, random_seed=None) -> SimulatedData:
    rng = np.random.default_rng(random_seed)
    x = rng.standard_normal((n_points, 2))
    truth = {
        "log_lengthscales": np.log(rng.uniform(0.1, 1.0, 2)),
        "log_amplitude": 0.5 * math.log(5.0),
    }
    values, vectors = np.linalg.eigh(_squared_exponential(x, **truth, numerics=np))
    latent = vectors @ (np.sqrt(np.maximum(values, 0.0)) * rng.standard_normal(n_points))
    return SimulatedData((rng.random(n_points) < expit(latent)).astype(float), truth, x)


def gp_classifier(data: SimulatedData) -> pm.Model:
    """The hyperparameters of a Gaussian-process classifier, its function integrated out.

    From the paper are the kernel, the priors (10 is a variance) and how data are simulated. It does
    not say which approximation and which link it takes, and its n is 1000: the logistic function,
    Laplace's approximation and n = 100 are choices.
    """
    with pm.Model() as model:
        log_lengthscales = pm.Normal("log_lengthscales", 0.0, math.sqrt(10.0), shape=2)
        log_amplitude = pm.Normal("log_amplitude", 0.0, math.sqrt(10.0))
        covariance = _squared_exponential(data.inputs, log_lengthscales, log_amplitude, numerics=pt)
        pm.Potential("log_evidence", LaplaceEvidence(data.observed)(covariance)[0])
    return model


def _squared_exponential(x, log_lengthscales, log_amplitude, numerics):
    squares = (x[:, None] - x) ** 2
    distances = (squares * numerics.exp(-2.0 * log_lengthscales)).sum(axis=2)
    return numerics.exp(2.0 * log_amplitude - 0.5 * distances)


def laplace_evidence(covariance: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Approximate the log evidence of a logistic Gaussian-process classifier by Laplace's method.

    Rasmussen and Williams (2006), algorithms 3.1 and 5.1; the covariance (n, n) may be singular.
    The gradient is the derivative in each of its entries, through the mode too. Both are NaN where
    it is no covariance or the mode is not found.
    """
    failed = math.nan, np.full(np.shape(covariance), math.nan)
    if not np.isfinite(covariance).all():
        return failed
    signs = 2.0 * np.asarray(labels) - 1.0
    try:
        weights, latent = _newton_mode(covariance, signs)
    except LinAlgError:
        return failed
    curvature = expit(latent) * expit(-latent)
    third = -curvature * (1.0 - 2.0 * expit(latent))
    root = np.sqrt(curvature)
    factor = cholesky(np.eye(len(root)) + root[:, None] * covariance * root, lower=True)
    value = _log_posterior(weights, latent, signs) - np.log(np.diag(factor)).sum()

    whitened = solve_triangular(factor, np.diag(root), lower=True)
    precision = whitened.T @ whitened
    posterior_variance = np.diag(covariance) - ((whitened @ covariance) ** 2).sum(axis=0)
    through_mode = 0.5 * posterior_variance * third
    through_mode -= precision @ (covariance @ through_mode)
    gradient = 0.5 * (np.outer(weights, weights) - precision) + np.outer(through_mode, weights)
    return float(value), gradient


def _log_posterior(weights, latent, signs):
    return -np.logaddexp(0.0, -signs * latent).sum() - 0.5 * weights @ latent


def _newton_mode(covariance, signs):
    """Return the mode K a of the latent function and a, by steps that are halved until uphill."""
    weights = latent = np.zeros(len(signs))
    for _ in range(NEWTON_MAX_STEPS):
        curvature = expit(latent) * expit(-latent)
        root = np.sqrt(curvature)
        factor = cholesky(np.eye(len(root)) + root[:, None] * covariance * root, lower=True)
        gradient = signs * expit(-signs * latent) - weights
        step = gradient - root * cho_solve((factor, True), root * (covariance @ gradient))
        change = covariance @ step
        if gradient @ change < NEWTON_TOLERANCE**2:
            weights, latent = weights + step, latent + change
            # Twice the exponent of the prior; negative only where K is no covariance.
            if weights @ latent < -NEWTON_TOLERANCE:
                break
            return weights, latent
        share, height = 1.0, _log_posterior(weights, latent, signs)
        # At the mode a step gains less than what rounding takes.
        height -= 1e-10 * (1.0 + abs(height))
        while not _log_posterior(weights + share * step, latent + share * change, signs) >= height:
            share *= 0.5
            if share < SMALLEST_SHARE:
                raise LinAlgError("no step goes uphill")
        weights, latent = weights + share * step, latent + share * change
    raise LinAlgError("there is no mode")


class LaplaceEvidence(Op):
    """`laplace_evidence` of a covariance matrix: the value, and derivatives, which have none."""

    __props__ = ("labels",)

    def __init__(self, labels) -> None:
        self.labels = tuple(float(label) for label in labels)

    def make_node(self, covariance: Any) -> Apply:
        covariance = pt.cast(pt.as_tensor_variable(covariance), "float64")
        n = len(self.labels)
        return Apply(self, [covariance], [pt.dscalar(), pt.dmatrix(shape=(n, n))])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        value, gradient = laplace_evidence(inputs[0], np.array(self.labels))
        outputs[0][0], outputs[1][0] = np.array(value), gradient

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, False]]

    def pullback(self, inputs: list, outputs: list, cotangents: list) -> list:
        return [cotangents[0] * outputs[1]]

    # The name that PyTensor 2 calls.
    L_op = pullback


# T4 -----------------------------------------------------------------------------------------------


def _log_derivative(log_shares, time, beta, gamma):
    log_susceptible, log_infected = log_shares.tolist()
    return -beta * math.exp(log_infected), beta * math.exp(log_susceptible) - gamma


def solve_sir(beta: float, gamma: float, tolerance: float = 1e-8) -> np.ndarray:
    """Logarithms of the shares S and I at `TIMES` (19, 2), all NaN where the solver fails."""
    times = np.concatenate([[0.0], TIMES])
    rates = float(beta), float(gamma)
    return log_solution(_log_derivative, INITIAL_SHARES, times, rates, tolerance)[1:]


def simulate_sir_epidemic(*, random_seed=None) -> SimulatedData:
    truth: dict[str, Any] = {"R0": 4.0, "gamma": 1.0, "sigma": np.array([0.2, 0.3])}
    log_shares = solve_sir(truth["R0"] * truth["gamma"], truth["gamma"])
    noise = np.random.default_rng(random_seed).standard_normal(log_shares.shape)
    return SimulatedData(np.exp(log_shares + truth["sigma"] * noise), truth, TIMES)


def sir_epidemic(
    data: SimulatedData, *, seconds_per_call: float = 0.0, tolerance: float = 1e-8
) -> pm.Model:
    r"""An epidemic, S' = -beta S I and I' = beta S I - gamma I, that is a black box.

    `seconds_per_call` are waited in each solution, instead of a more expensive simulator;
    `tolerance` is that of the solver. The
    paper takes the model of Pananos, "GSoC 2019: Introduction of pymc3.ode API", where gamma is
    called lambda, and speaks of the posterior of (beta, gamma, sigma_S, sigma_I): it is this one in
    other coordinates, beta = R0 gamma.
    """

    @wrap_py(itypes=[pt.dscalar, pt.dscalar], otypes=[pt.dmatrix])
    def curves(beta, gamma):
        if seconds_per_call:
            time.sleep(seconds_per_call)
        return solve_sir(beta, gamma, tolerance)

    with pm.Model(coords={"series": ("S", "I"), "time": TIMES}) as model:
        reproduction = pm.TruncatedNormal("R0", mu=2.0, sigma=3.0, lower=1.0)
        gamma = pm.LogNormal("gamma", math.log(2.0), 2.0)
        sigma = pm.HalfCauchy("sigma", 1.0, dims="series")
        log_mean = curves(reproduction * gamma, gamma)
        pm.LogNormal("y", log_mean, sigma, observed=data.observed, dims=("time", "series"))
    return model


# T5 -----------------------------------------------------------------------------------------------


def simulate_logistic_regression(n_points: int = 1000, *, random_seed=None) -> SimulatedData:
    rng = np.random.default_rng(random_seed)
    beta = rng.standard_normal(5)
    x = np.column_stack([np.ones(n_points), rng.standard_normal((n_points, 4))])
    observed = (rng.random(n_points) < expit(x @ beta)).astype(float)
    return SimulatedData(observed, {"beta": beta}, x)


def logistic_regression(data: SimulatedData) -> pm.Model:
    """An intercept and four slopes with prior variances of 100.

    The paper speaks of five coefficients and of two standard normal covariates.
    """
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0, shape=5)
        pm.Bernoulli("y", logit_p=pt.dot(data.inputs, beta), observed=data.observed)
    return model


SIMULATE: dict[str, Callable[..., SimulatedData]] = {
    "T1": simulate_banana,
    "T2": simulate_nonlinear_regression,
    "T3": simulate_gp_classifier,
    "T4": simulate_sir_epidemic,
    "T5": simulate_logistic_regression,
}
MODELS: dict[str, Callable[..., pm.Model]] = {
    "T1": banana_posterior,
    "T2": nonlinear_regression,
    "T3": gp_classifier,
    "T4": sir_epidemic,
    "T5": logistic_regression,
}
"""The paper's names of the models."""
