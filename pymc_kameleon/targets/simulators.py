r"""The five posteriors on which the paper of the Gaussian-process surrogate compares its samplers.

Every target is a function that returns a PyMC model, and a function that simulates its data. The
likelihood is an observed variable or a potential, apart from the prior, since a surrogate learns
the likelihood only.

=======================  ========================================  =====  ========  ===============
paper, model             parameters                                d      gradient  likelihood
=======================  ========================================  =====  ========  ===============
T1 banana_posterior      `a`, `b`                                  2      yes       microseconds
T2 nonlinear_regression  `a`, `b`, `sigma`                         3      yes       microseconds
T3 gp_classifier         `log_lengthscales` (2,), `log_amplitude`  3      yes       milliseconds
T4 sir_epidemic          `R0`, `gamma`, `sigma` (2,)               4      no        as chosen
T5 logistic_regression   `beta` (5,)                               5      yes       microseconds
=======================  ========================================  =====  ========  ===============

References
----------
Benavoli, Wyse and White. Gaussian processes to speed up MCMC with automatic
exploratory-exploitation effect, section 4 and appendix A.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pytensor.graph import Apply, Op
from scipy.integrate import ODEintWarning, odeint
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.special import expit

from pymc_kameleon.latent_gp.approximations.binary_likelihoods import Logit
from pymc_kameleon.latent_gp.approximations.laplace import newton_mode
from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian
from pymc_kameleon.validation import checked_array, checked_integer, checked_number

__all__ = [
    "MODELS",
    "LaplaceEvidence",
    "SIRCurves",
    "SimulatedData",
    "banana_posterior",
    "gp_classifier",
    "laplace_evidence",
    "logistic_regression",
    "nonlinear_regression",
    "simulate_banana",
    "simulate_gp_classifier",
    "simulate_logistic_regression",
    "simulate_nonlinear_regression",
    "simulate_sir_epidemic",
    "sir_epidemic",
    "solve_sir",
]

BANANA_SCALES = (4.0, 2.0)
CONCENTRATIONS = np.array([28.0, 55.0, 83.0, 110.0, 138.0, 225.0, 375.0])
TIMES = 0.25 * np.arange(1, 20)
INITIAL_SHARES = (0.99, 0.01)
SERIES = ("S", "I")

NEWTON_MAX_STEPS = 100
NEWTON_TOLERANCE = 1e-8
"""Length of the last Newton step in posterior standard deviations."""

SOLVER_TOLERANCE = 1e-8
SOLVER_MAX_STEPS = 2000
# Failures come back as NaN. A filter around each call would make Python forget which warnings it
# has shown already, and those of other code would be shown again and again.
warnings.filterwarnings("ignore", category=ODEintWarning, module=re.escape(__name__))

RandomSeed = int | Sequence[int] | np.random.SeedSequence | np.random.Generator | None


@dataclass(frozen=True)
class SimulatedData:
    """Data of a target, and the parameters that they were simulated with.

    Parameters
    ----------
    observed : array of float, shape (n, ...)
    truth : dict
        Name of each free variable of the model -> its value, in the natural (constrained) space.
    inputs : array of float, shape (n, ...), optional
        Covariates.
    """

    observed: np.ndarray
    truth: dict[str, Any]
    inputs: np.ndarray | None = None


# T1 -----------------------------------------------------------------------------------------------


def simulate_banana(n_observations: int = 16, *, random_seed: RandomSeed = None) -> SimulatedData:
    """Simulate the data of :func:`banana_posterior` with a = 0.2, b = 2.

    Parameters
    ----------
    n_observations : int
    random_seed : int, sequence of int, SeedSequence, Generator or None

    Returns
    -------
    SimulatedData
        ``observed`` has shape (n_observations, 2).
    """
    n = checked_integer("n_observations", n_observations, 1)
    truth = {"a": 0.2, "b": 2.0}
    mean = np.array([truth["a"], truth["b"] + truth["a"] ** 2])
    noise = np.random.default_rng(random_seed).standard_normal((n, 2))
    return SimulatedData(mean + BANANA_SCALES * noise, truth)


def banana_posterior(
    data: SimulatedData | None = None, *, random_seed: RandomSeed = None
) -> pm.Model:
    r"""Build T1, a banana-shaped posterior of two parameters under a flat prior.

    .. math:: y_{i1} \sim N(a, 4^2), \qquad y_{i2} \sim N(b + a^2, 2^2), \qquad p(a, b) \propto 1

    With n observations and their means :math:`\bar y`, the posterior is a twisted Gaussian,
    :math:`a \sim N(\bar y_1, 16/n)` and :math:`b \mid a \sim N(\bar y_2 - a^2, 4/n)`: standard
    deviations of 1 and 1/2 for n = 16.

    Parameters
    ----------
    data : SimulatedData, optional
        Default :func:`simulate_banana`.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        Seed of the default data.

    Returns
    -------
    pymc.Model
        Free variables ``a`` and ``b``, scalars without a transform; observed ``y`` (n, 2).

    Notes
    -----
    The paper gives the flat prior, the true values and starts in [-2, 2], but no density. The one
    here is a choice: a banana with a known answer, whose scales are of the order of those starts.
    """
    data = simulate_banana(random_seed=random_seed) if data is None else data
    with pm.Model() as model:
        a, b = pm.Flat("a"), pm.Flat("b")
        pm.Normal("y", pt.stack([a, b + a**2]), np.array(BANANA_SCALES), observed=data.observed)
    return model


# T2 -----------------------------------------------------------------------------------------------


def simulate_nonlinear_regression(*, random_seed: RandomSeed = None) -> SimulatedData:
    """Simulate the data of :func:`nonlinear_regression` with a = 0.14, b = 50, sigma = 0.1.

    Parameters
    ----------
    random_seed : int, sequence of int, SeedSequence, Generator or None

    Returns
    -------
    SimulatedData
        ``observed`` and ``inputs`` have shape (7,).
    """
    truth = {"a": 0.14, "b": 50.0, "sigma": 0.1}
    x = CONCENTRATIONS
    noise = np.random.default_rng(random_seed).standard_normal(x.size)
    return SimulatedData(truth["a"] * x / (x + truth["b"]) + truth["sigma"] * noise, truth, x)


def nonlinear_regression(
    data: SimulatedData | None = None, *, random_seed: RandomSeed = None
) -> pm.Model:
    r"""Build T2, a saturating regression curve with parameters of very different size.

    .. math:: y_i \sim N\left(\frac{a x_i}{x_i + b}, \sigma^2\right), \qquad
        a \sim N(3, 1), \quad b \sim N(30, 15^2), \quad \log\sigma \sim N(-2, 1)

    at x = 28, 55, 83, 110, 138, 225, 375.

    Parameters
    ----------
    data : SimulatedData, optional
        Default :func:`simulate_nonlinear_regression`.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        Seed of the default data.

    Returns
    -------
    pymc.Model
        Free variables ``a``, ``b`` and ``sigma``, scalars, the last one sampled as its logarithm;
        observed ``y`` (7,).

    Notes
    -----
    All as in the paper. Seven noisy points tell a to about 0.05, although its prior lies far off,
    and next to nothing of b, which keeps the width of its prior.
    """
    data = simulate_nonlinear_regression(random_seed=random_seed) if data is None else data
    with pm.Model() as model:
        a = pm.Normal("a", 3.0, 1.0)
        b = pm.Normal("b", 30.0, 15.0)
        sigma = pm.LogNormal("sigma", -2.0, 1.0)
        pm.Normal("y", a * data.inputs / (data.inputs + b), sigma, observed=data.observed)
    return model


# T3 -----------------------------------------------------------------------------------------------


def simulate_gp_classifier(n_points: int = 100, *, random_seed: RandomSeed = None) -> SimulatedData:
    r"""Simulate the data of :func:`gp_classifier`.

    The inputs are standard normal, the lengthscales uniform on [0.1, 1], and
    :math:`\sigma^2 = 5`.

    Parameters
    ----------
    n_points : int
        Number n of points. The paper takes 1000; the likelihood costs O(n³).
    random_seed : int, sequence of int, SeedSequence, Generator or None

    Returns
    -------
    SimulatedData
        ``observed`` (n,) of zeros and ones, ``inputs`` (n, 2).
    """
    n = checked_integer("n_points", n_points, 1)
    rng = np.random.default_rng(random_seed)
    x = rng.standard_normal((n, 2))
    truth = {
        "log_lengthscales": np.log(rng.uniform(0.1, 1.0, 2)),
        "log_amplitude": 0.5 * math.log(5.0),
    }
    covariance = _squared_exponential(x, **truth, numerics=np)
    values, vectors = np.linalg.eigh(covariance)
    latent = vectors @ (np.sqrt(np.maximum(values, 0.0)) * rng.standard_normal(n))
    return SimulatedData((rng.random(n) < expit(latent)).astype(float), truth, x)


def gp_classifier(data: SimulatedData | None = None, *, random_seed: RandomSeed = None) -> pm.Model:
    r"""Build T3, the hyperparameters of a Gaussian-process classifier.

    .. math:: y_i \sim \text{Bernoulli}(1 / (1 + e^{-f_i})), \quad f \sim N(0, K), \quad
        K_{ij} = \sigma^2 \exp\left(-\frac 1 2 \sum_k (x_{ik} - x_{jk})^2 / \ell_k^2\right), \quad
        \log\ell_k, \log\sigma \sim N(0, 10)

    with the latent f integrated out by Laplace's approximation, :class:`LaplaceEvidence`.

    Parameters
    ----------
    data : SimulatedData, optional
        Default :func:`simulate_gp_classifier`.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        Seed of the default data.

    Returns
    -------
    pymc.Model
        Free variables ``log_lengthscales`` (2,) and ``log_amplitude`` (:math:`\log\sigma`), without
        a transform; the potential ``log_evidence`` is the log likelihood, with a gradient.

    Notes
    -----
    From the paper are the kernel, the priors (10 is a variance) and how data are simulated. It does
    not say which approximation and which link it takes, and its n is 1000: the logistic function,
    Laplace's approximation and n = 100 are choices. The posterior has long tails towards
    lengthscales far above the spread of the inputs.
    """
    data = simulate_gp_classifier(random_seed=random_seed) if data is None else data
    scale = math.sqrt(10.0)
    with pm.Model() as model:
        log_lengthscales = pm.Normal("log_lengthscales", 0.0, scale, shape=2)
        log_amplitude = pm.Normal("log_amplitude", 0.0, scale)
        covariance = _squared_exponential(data.inputs, log_lengthscales, log_amplitude, numerics=pt)
        pm.Potential("log_evidence", LaplaceEvidence(data.observed)(covariance)[0])
    return model


def _squared_exponential(x, log_lengthscales, log_amplitude, numerics):
    squares = (x[:, None] - x) ** 2
    distances = (squares * numerics.exp(-2.0 * log_lengthscales)).sum(axis=2)
    return numerics.exp(2.0 * log_amplitude - 0.5 * distances)


def laplace_evidence(covariance: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    r"""Approximate the log evidence of a Gaussian-process classifier by Laplace's method.

    .. math:: \log q(y \mid K) = \log p(y \mid \hat f) - \frac 1 2 \hat f^\top K^{-1} \hat f
        - \frac 1 2 \log \lvert I + W^{1/2} K W^{1/2} \rvert

    at the mode :math:`\hat f` of the latent function, with the logistic likelihood and its
    curvature :math:`W = -\nabla^2 \log p(y \mid \hat f)`. K may be singular.

    Parameters
    ----------
    covariance : array of float, shape (n, n)
        Prior covariance K of the latent function.
    labels : array, shape (n,)
        Zeros and ones.

    Returns
    -------
    value : float
        NaN where K is not a covariance or the mode is not found.
    gradient : array of float, shape (n, n)
        Derivative with respect to each entry of K, through the mode too; NaN where the value is.

    References
    ----------
    .. [1] C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006,
       algorithms 3.1 and 5.1.
    """
    failed = math.nan, np.full(np.shape(covariance), math.nan)
    if not np.isfinite(covariance).all():
        return failed
    zero = np.zeros(len(labels))
    prior = Gaussian(zero, covariance, None)  # type: ignore[arg-type]  # K may be singular
    likelihood = Logit(2.0 * np.asarray(labels) - 1.0)
    try:
        found = newton_mode(prior, likelihood, zero, zero, NEWTON_TOLERANCE, NEWTON_MAX_STEPS)
        if not found.residual < NEWTON_TOLERANCE:
            return failed
        latent = found.offset + found.next_step
        weights = found.weights + found.next_weights_step
        # Twice the exponent of the prior; negative only where K is no covariance.
        if weights @ latent < -NEWTON_TOLERANCE:
            return failed
        return _evidence_at_mode(covariance, likelihood, latent, weights)
    except LinAlgError:
        return failed


def _evidence_at_mode(covariance, likelihood, latent, weights):
    """Return `laplace_evidence` for the mode `latent` = K `weights`."""
    values, _, second, third = likelihood.terms(latent)
    root = np.sqrt(-second)
    inner = root[:, None] * covariance * root
    inner[np.diag_indices_from(inner)] += 1.0
    factor = cholesky(inner, lower=True, overwrite_a=True)
    value = values.sum() - 0.5 * weights @ latent - np.log(np.diag(factor)).sum()

    whitened = solve_triangular(factor, np.diag(root), lower=True)
    precision = whitened.T @ whitened
    product = whitened @ covariance
    posterior_variance = np.diag(covariance) - (product**2).sum(axis=0)
    through_mode = 0.5 * posterior_variance * third
    through_mode -= precision @ (covariance @ through_mode)
    gradient = 0.5 * (np.outer(weights, weights) - precision) + np.outer(through_mode, weights)
    return float(value), gradient


class LaplaceEvidence(Op):
    """Log evidence of a Gaussian-process classifier as a function of the covariance matrix.

    Applied to K (n, n), it returns :func:`laplace_evidence`: the value, which has a gradient, and
    the matrix of derivatives, which has none.

    Parameters
    ----------
    labels : sequence of 0 and 1, length n
    """

    __props__ = ("labels",)

    def __init__(self, labels: ArrayLike) -> None:
        self.labels = tuple(float(label) for label in np.asarray(labels))

    def make_node(self, covariance: Any) -> Apply:
        """Wrap a covariance matrix."""
        covariance = pt.cast(pt.as_tensor_variable(covariance), "float64")
        n = len(self.labels)
        return Apply(self, [covariance], [pt.dscalar(), pt.dmatrix(shape=(n, n))])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        """Find the mode and evaluate value and derivatives there."""
        value, gradient = laplace_evidence(inputs[0], np.array(self.labels))
        outputs[0][0], outputs[1][0] = np.array(value), gradient

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """Connect the value only."""
        return [[True, False]]

    def pullback(self, inputs: list, outputs: list, cotangents: list) -> list:
        """Multiply by the derivatives that were computed with the value."""
        return [cotangents[0] * outputs[1]]

    # The name that PyTensor 2 calls.
    L_op = pullback


# T4 -----------------------------------------------------------------------------------------------


def _log_derivative(
    log_shares: np.ndarray, time: float, beta: float, gamma: float
) -> tuple[float, float]:
    log_susceptible, log_infected = log_shares.tolist()
    return -beta * math.exp(log_infected), beta * math.exp(log_susceptible) - gamma


def solve_sir(
    beta: float,
    gamma: float,
    times: np.ndarray = TIMES,
    initial_shares: tuple[float, float] = INITIAL_SHARES,
) -> np.ndarray:
    r"""Solve the equations of a susceptible, infected, recovered epidemic for the logarithms.

    .. math:: S' = -\beta S I, \qquad I' = \beta S I - \gamma I

    Parameters
    ----------
    beta, gamma : float
        Rates of contact and recovery per unit of time.
    times : array of float, shape (n_times,)
        Increasing positive times, counted from the initial shares.
    initial_shares : tuple of two floats
        Shares S and I of the population at time 0, positive.

    Returns
    -------
    array of float, shape (n_times, 2)
        Logarithms of S and I, all NaN where the solver fails.
    """
    failed = np.full((len(times), 2), math.nan)
    try:
        solution, report = odeint(
            _log_derivative,
            np.log(initial_shares),
            np.concatenate([[0.0], times]),
            args=(float(beta), float(gamma)),
            rtol=SOLVER_TOLERANCE,
            atol=SOLVER_TOLERANCE,
            mxstep=SOLVER_MAX_STEPS,
            full_output=True,
        )
    except (ODEintWarning, OverflowError):
        return failed
    solved = report["message"] == "Integration successful." and np.isfinite(solution).all()
    return solution[1:] if solved else failed


class SIRCurves(Op):
    """A black box for PyTensor: log shares of an epidemic at fixed times, without a gradient.

    Parameters
    ----------
    times : sequence of float, length n_times
        Increasing positive times.
    seconds_per_call : float
        Time to wait in each call, in seconds, which stands for an expensive simulator.
    """

    __props__ = ("times", "seconds_per_call")

    def __init__(self, times: ArrayLike = TIMES, seconds_per_call: float = 0.0) -> None:
        self.times = tuple(float(t) for t in np.asarray(times))
        self.seconds_per_call = checked_number("seconds_per_call", seconds_per_call, at_least=0)

    def make_node(self, beta: Any, gamma: Any) -> Apply:
        """Wrap the two rates of :func:`solve_sir`, scalars."""
        rates = [pt.cast(pt.as_tensor_variable(rate), "float64") for rate in (beta, gamma)]
        return Apply(self, rates, [pt.dmatrix(shape=(len(self.times), 2))])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        """Solve the equations."""
        if self.seconds_per_call:
            time.sleep(self.seconds_per_call)
        beta, gamma = inputs
        outputs[0][0] = solve_sir(float(beta), float(gamma), np.array(self.times))


def simulate_sir_epidemic(*, random_seed: RandomSeed = None) -> SimulatedData:
    """Simulate the data of :func:`sir_epidemic` with beta = 4 and gamma = 1.

    Parameters
    ----------
    random_seed : int, sequence of int, SeedSequence, Generator or None

    Returns
    -------
    SimulatedData
        ``observed`` (19, 2), the shares S and I times log-normal noise of scales 0.2 and 0.3;
        ``inputs`` (19,), the times 0.25, 0.5, ..., 4.75.
    """
    truth: dict[str, Any] = {"R0": 4.0, "gamma": 1.0, "sigma": np.array([0.2, 0.3])}
    log_shares = solve_sir(truth["R0"] * truth["gamma"], truth["gamma"])
    noise = np.random.default_rng(random_seed).standard_normal(log_shares.shape)
    return SimulatedData(np.exp(log_shares + truth["sigma"] * noise), truth, TIMES)


def sir_epidemic(
    data: SimulatedData | None = None,
    *,
    seconds_per_call: float = 0.0,
    random_seed: RandomSeed = None,
) -> pm.Model:
    r"""Build T4, an epidemic whose differential equation is a black box without a gradient.

    .. math:: \log y_{tk} \sim N(\log c_k(t; \beta, \gamma), \sigma_k^2), \quad c = (S, I), \quad
        S' = -\beta S I, \quad I' = \beta S I - \gamma I

    with (S, I) = (0.99, 0.01) at time 0 and :math:`\beta = R_0 \gamma`. The priors are
    :math:`R_0 \sim N(2, 3^2)` above 1, :math:`\log\gamma \sim N(\log 2, 2^2)` and
    :math:`\sigma_S, \sigma_I \sim \text{HalfCauchy}(1)`.

    Parameters
    ----------
    data : SimulatedData, optional
        Default :func:`simulate_sir_epidemic`.
    seconds_per_call : float
        Time to wait in each solution of the equation, in seconds.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        Seed of the default data.

    Returns
    -------
    pymc.Model
        Free variables ``R0``, ``gamma`` and ``sigma`` (2,), all positive; observed ``y`` (19, 2).
        Its log likelihood is NaN where the solver fails.

    Notes
    -----
    The paper takes the model of [1]_, where gamma is called lambda, and speaks of the posterior of
    (beta, gamma, sigma_S, sigma_I): it is this one in other coordinates.

    References
    ----------
    .. [1] D. Pananos, "GSoC 2019: Introduction of pymc3.ode API", 2019,
       https://www.pymc.io/projects/examples/en/latest/ode_models/ODE_API_introduction.html
    """
    data = simulate_sir_epidemic(random_seed=random_seed) if data is None else data
    times = TIMES if data.inputs is None else data.inputs
    curves = SIRCurves(times, seconds_per_call)
    with pm.Model(coords={"series": SERIES, "time": times}) as model:
        reproduction = pm.TruncatedNormal("R0", mu=2.0, sigma=3.0, lower=1.0)
        gamma = pm.LogNormal("gamma", math.log(2.0), 2.0)
        sigma = pm.HalfCauchy("sigma", 1.0, dims="series")
        log_mean = curves(reproduction * gamma, gamma)
        pm.LogNormal("y", log_mean, sigma, observed=data.observed, dims=("time", "series"))
    return model


# T5 -----------------------------------------------------------------------------------------------


def simulate_logistic_regression(
    n_points: int = 1000, *, beta: Sequence[float] | None = None, random_seed: RandomSeed = None
) -> SimulatedData:
    """Simulate the data of :func:`logistic_regression`.

    Parameters
    ----------
    n_points : int
        Number n of points.
    beta : sequence of float, length 5, optional
        Intercept and slopes; default draws from N(0, 1).
    random_seed : int, sequence of int, SeedSequence, Generator or None

    Returns
    -------
    SimulatedData
        ``observed`` (n,) of zeros and ones; ``inputs`` (n, 5), a column of ones and four of
        standard normals.
    """
    n = checked_integer("n_points", n_points, 1)
    rng = np.random.default_rng(random_seed)
    drawn = rng.standard_normal(5)
    if beta is not None:
        drawn = checked_array("beta", beta, (5,), "an intercept and four slopes")
    x = np.column_stack([np.ones(n), rng.standard_normal((n, 4))])
    observed = (rng.random(n) < expit(x @ drawn)).astype(float)
    return SimulatedData(observed, {"beta": drawn}, x)


def logistic_regression(
    data: SimulatedData | None = None, *, random_seed: RandomSeed = None
) -> pm.Model:
    r"""Build T5, a logistic regression on 1000 points.

    .. math:: y_i \sim \text{Bernoulli}(1 / (1 + e^{-x_i^\top \beta})), \qquad
        \beta_j \sim N(0, 100), \quad j = 0, \dots, 4

    Parameters
    ----------
    data : SimulatedData, optional
        Default :func:`simulate_logistic_regression`.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        Seed of the default data.

    Returns
    -------
    pymc.Model
        Free variable ``beta`` (5,), the first one an intercept; observed ``y`` (n,).

    Notes
    -----
    The paper speaks of five coefficients (100 is a variance) and of two standard normal covariates;
    here there are four of them and an intercept.
    """
    data = simulate_logistic_regression(random_seed=random_seed) if data is None else data
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0, shape=5)
        pm.Bernoulli("y", logit_p=pt.dot(data.inputs, beta), observed=data.observed)
    return model


MODELS: dict[str, Callable[..., pm.Model]] = {
    "T1": banana_posterior,
    "T2": nonlinear_regression,
    "T3": gp_classifier,
    "T4": sir_epidemic,
    "T5": logistic_regression,
}
"""The paper's names of the models."""
