"""The bootstrap filter against exact likelihoods, and what it tells those who call it wrongly."""

import os
import subprocess
import sys
from types import FunctionType
from typing import NamedTuple

import cloudpickle
import numba
import numpy as np
import pymc as pm
import pytest
from scipy.stats import norm

from pymc_kameleon.pseudo_marginal import bootstrap_filter as module
from pymc_kameleon.pseudo_marginal.bootstrap_filter import BootstrapFilter
from pymc_kameleon.pseudo_marginal.particle_filter import particle_filter_loglikelihood

pytestmark = pytest.mark.numerics

SIZES = [1, 3, 30]
"""One and two are never resampled."""
STANDARD_ERRORS = 4.0
"""Null probability 6e-5 a comparison."""


class StateSpaceModel(NamedTuple):
    y: np.ndarray
    parameters: tuple
    functions: tuple
    exact: float
    """Log-likelihood."""


def stationary(mu, phi, sigma, n_particles, rng):
    return mu + sigma / np.sqrt(1 - phi**2) * rng.standard_normal(n_particles)


def autoregression(x, t, mu, phi, sigma, rng):
    return mu + phi * (x - mu) + sigma * rng.standard_normal(len(x))


def log_volatility(y_t, x, t, mu, phi, sigma):
    return -0.5 * (np.log(2 * np.pi) + x + y_t**2 * np.exp(-x))


def drifting_start(start, slope, sd, n_particles, rng):
    return start + rng.standard_normal(n_particles)


def drift(x, t, start, slope, sd, rng):
    return slope[0] * x + slope[1] * t + rng.standard_normal(len(x))


def log_noise(y_t, x, t, start, slope, sd):
    return -0.5 * ((y_t - x) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


def kalman(y, start, slope, sd):
    """Log-likelihood of the linear model; NaN is missing."""
    mean, variance, total = start, 1.0, 0.0
    for t, y_t in enumerate(y):
        if t > 0:
            mean, variance = slope[0] * mean + slope[1] * t, slope[0] ** 2 * variance + 1.0
        if not np.isnan(y_t):
            total += norm.logpdf(y_t, mean, np.sqrt(variance + sd**2))
            gain = variance / (variance + sd**2)
            mean, variance = mean + gain * (y_t - mean), (1 - gain) * variance
    return total


def on_grid(y, mu, phi, sigma, n=1001):
    """Log-likelihood of stochastic volatility by the trapezoidal rule."""
    scale = sigma / np.sqrt(1 - phi**2)
    x, step = np.linspace(mu - 10 * scale, mu + 10 * scale, n, retstep=True)
    density = norm.pdf(x, mu, scale)
    transitions = norm.pdf(x[:, None], mu + phi * (x - mu), sigma)
    for t, y_t in enumerate(y):
        if t > 0:
            density = step * transitions @ density
        density = density * norm.pdf(y_t, 0, np.exp(x / 2))
    return np.log(step * density.sum())


def linear():
    y, parameters = np.array([0.3, 2.1, np.nan, 0.4, 2.6]), (0.2, np.array([0.8, 0.3]), 0.7)
    functions = (drifting_start, drift, log_noise)
    return StateSpaceModel(y, parameters, functions, kalman(y, *parameters))


def volatility():
    y, parameters = np.array([0.1, -1.9, 3.0, 0.02]), (-0.5, 0.9, 0.8)
    functions = (stationary, autoregression, log_volatility)
    return StateSpaceModel(y, parameters, functions, on_grid(y, *parameters))


def simulated_volatility(n_times, parameters, seed=3):
    rng = np.random.default_rng(seed)
    x = stationary(*parameters, 1, rng)
    y = []
    for t in range(n_times):
        x = autoregression(x, t, *parameters, rng) if t > 0 else x
        y.append(np.exp(x[0] / 2) * rng.standard_normal())
    return np.array(y)


COMPILED = {
    function: numba.njit(function) for make in (linear, volatility) for function in make().functions
}


def compiled(functions):
    return tuple(COMPILED[function] for function in functions)


@numba.njit
def repeated(
    run, y, is_observed, initial, transition, log_observation, parameters, n_particles, rng, out
):
    for i in range(len(out)):
        out[i] = run(
            y, is_observed, initial, transition, log_observation, parameters, n_particles, rng
        )


def compiled_estimates(model, n_particles, run=module._run_compiled, n_estimates=100_000):
    functions, estimates = compiled(model.functions), np.empty(n_estimates)
    log_estimate, rng = BootstrapFilter(model.y, *functions), np.random.default_rng(n_particles)
    data = log_estimate.y, log_estimate.is_observed
    repeated(run, *data, *functions, model.parameters, n_particles, rng, estimates)
    return estimates


def standardised_error(log_estimates, exact):
    """Of the mean estimate, in standard errors."""
    ratios = np.exp(log_estimates - exact)
    return (ratios.mean() - 1) / (ratios.std(ddof=1) / np.sqrt(len(ratios)))


def plain_estimates(model, n_particles, n_estimates):
    log_estimate, rng = BootstrapFilter(model.y, *model.functions), np.random.default_rng(1)
    return np.array([log_estimate(*model.parameters, n_particles, rng) for _ in range(n_estimates)])


# the mean of the estimate -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n_particles", SIZES)
@pytest.mark.parametrize("make", [linear, volatility])
def test_unbiased_when_compiled(make, n_particles):
    model = make()
    estimates = compiled_estimates(model, n_particles)
    assert abs(standardised_error(estimates, model.exact)) < STANDARD_ERRORS


@pytest.mark.parametrize("n_particles", SIZES)
@pytest.mark.parametrize("make", [linear, volatility])
def test_unbiased_in_python(make, n_particles):
    model = make()
    estimates = plain_estimates(model, n_particles, 2500)
    assert abs(standardised_error(estimates, model.exact)) < STANDARD_ERRORS


def weights_not_reset(particles, weights, uniform, log_weights):
    return resample(particles, weights, uniform, np.empty_like(log_weights))


def weights_not_divided(particles, weights, uniform, log_weights):
    taken = resample(particles, weights, uniform, log_weights)
    log_weights += np.log(len(log_weights))
    return taken


def points_not_random(particles, weights, uniform, log_weights):
    return resample(particles, weights, 0.0, log_weights)


resample = module._resample


@pytest.mark.parametrize("mistake", [weights_not_reset, weights_not_divided, points_not_random])
def test_mistakes_are_seen(mistake):
    names = vars(module) | {"_resample": numba.njit(mistake)}
    run = numba.njit(FunctionType(module._run_plain.__code__, names))
    model = volatility()
    estimates = compiled_estimates(model, 30, run)
    assert abs(standardised_error(estimates, model.exact)) > 2 * STANDARD_ERRORS


def test_variance_of_the_log_falls_as_the_number_of_particles():
    parameters = (-1.0, 0.97, 0.2)
    functions = compiled(volatility().functions)
    log_estimate = BootstrapFilter(simulated_volatility(100, parameters), *functions)
    rng, n_estimates = np.random.default_rng(2), 1500
    few, many = (
        np.var([log_estimate(*parameters, n_particles, rng) for _ in range(n_estimates)])
        for n_particles in (100, 400)
    )
    # Standard error of the log of a ratio of two variances, and 0.1 for terms of order 1/n^2.
    tolerance = STANDARD_ERRORS * np.sqrt(4 / n_estimates) + 0.1
    assert np.log(few / many) == pytest.approx(np.log(4), abs=tolerance)


# two forms of one filter ------------------------------------------------------------------------


@pytest.mark.parametrize("n_particles", [1, 50])
def test_python_and_compiled_agree(n_particles):
    parameters = (-1.0, 0.97, 0.2)
    y = simulated_volatility(200, parameters)
    y[[0, 7, 8, 199]] = np.nan
    functions = volatility().functions
    plain, fast = BootstrapFilter(y, *functions), BootstrapFilter(y, *compiled(functions))
    assert not plain.is_compiled
    assert fast.is_compiled
    estimates = (f(*parameters, n_particles, np.random.default_rng(5)) for f in (plain, fast))
    assert next(estimates) == pytest.approx(next(estimates), rel=1e-10)


def test_compiled_functions_may_divide_by_zero():
    at_a_bound, inside = (0.0, 1.0, 0.5), (0.0, 0.9, 0.5)
    functions = stationary, autoregression, log_volatility
    filter_ = BootstrapFilter(np.zeros(3), *compiled(functions))
    for parameters, is_finite in ((at_a_bound, False), (inside, True), (at_a_bound, False)):
        estimate = filter_(*parameters, 5, np.random.default_rng(1))
        assert np.isfinite(estimate) == is_finite
        assert is_finite or np.isnan(estimate)


def test_vector_observations():
    scalar = linear()
    functions, log_normal = scalar.functions, COMPILED[log_noise]

    def log_both(y_t, x, t, start, slope, sd):
        return log_normal(y_t[0], x, t, start, slope, sd) + np.log(y_t[1])

    y = np.column_stack([scalar.y, np.where(np.isnan(scalar.y), np.nan, 2.0)])
    value, plain, fast = (
        f(*scalar.parameters, 20, np.random.default_rng(1))
        for f in (
            BootstrapFilter(scalar.y, *functions),
            BootstrapFilter(y, *functions[:2], log_both),
            BootstrapFilter(y, *compiled(functions[:2]), numba.njit(log_both)),
        )
    )
    assert plain == pytest.approx(value + 4 * np.log(2), rel=1e-10)
    assert fast == pytest.approx(plain, rel=1e-10)


def test_missing_times_and_masked_arrays():
    model = volatility()
    masked = np.ma.masked_array(model.y, mask=[True, False, False, True])
    missing = np.where(masked.mask, np.nan, model.y)
    one, other = (
        BootstrapFilter(y, *model.functions)(*model.parameters, 20, np.random.default_rng(1))
        for y in (masked, missing)
    )
    assert one == other


def test_integer_parameters_and_states():
    def initial(rate, n_particles, rng):
        return np.zeros(n_particles, dtype=np.int64)

    def transition(x, t, rate, rng):
        return (x + t) % rate

    def log_observation(y_t, x, t, rate):
        return np.log(0.2 + 0.6 * (x == y_t))

    functions = initial, transition, log_observation
    for wanted in (functions, map(numba.njit, functions)):
        value = BootstrapFilter([0, 1, 0], *wanted)(np.int32(2), 3, np.random.default_rng(1))
        assert value == pytest.approx(np.log(0.8 * 0.8 * 0.2), rel=1e-12)


# weights at the edge ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "values, expected",
    [
        ([-np.inf, -np.inf, -np.inf], -np.inf),
        ([-np.inf, np.nan, -np.inf], np.nan),
        ([np.inf, 0.0, 0.0], np.nan),
        ([-np.inf, 0.0, -np.inf], 2 * np.log(1 / 3)),
        ([-1e5, -1e5, -1e5], -2e5),
        ([1e5, -1e5, -np.inf], 2 * (1e5 - np.log(3))),
    ],
)
def test_weights_of_any_size(values, expected, is_compiled):
    functions = still, stay, look_up
    if is_compiled:
        functions = still_compiled, stay_compiled, look_up_compiled
    log_estimate = BootstrapFilter([0.0, np.nan, 0.0], *functions)
    value = log_estimate(np.array(values), 3, np.random.default_rng(1))
    assert value == pytest.approx(expected, rel=1e-12, nan_ok=True)


def still(values, n_particles, rng):
    return np.arange(n_particles) * 1.0


def stay(x, t, values, rng):
    # Every state once, whatever was resampled.
    return np.arange(len(x)) * 1.0


def look_up(y_t, x, t, values):
    return values[x.astype(np.int64)]


still_compiled, stay_compiled, look_up_compiled = map(numba.njit, (still, stay, look_up))


# in other processes and in models ---------------------------------------------------------------


def test_a_copy_is_not_compiled_again():
    model = volatility()
    log_estimate = BootstrapFilter(model.y, *compiled(model.functions))
    value = log_estimate(*model.parameters, 20, np.random.default_rng(1))
    n_compiled = len(module._run_compiled.signatures)
    copy = cloudpickle.loads(cloudpickle.dumps(log_estimate))
    assert copy(*model.parameters, 40, np.random.default_rng(1)) != value
    assert copy(*model.parameters, 20, np.random.default_rng(1)) == value
    other = BootstrapFilter(np.ones(9), *compiled(model.functions))
    assert np.isfinite(other(*map(np.float64, model.parameters), 3, np.random.default_rng(1)))
    assert len(module._run_compiled.signatures) == n_compiled


@pytest.mark.slow
def test_pickles_for_another_process(tmp_path):
    model = volatility()
    # Of no module, as in a notebook.
    functions = [
        FunctionType(f.__code__, {"np": np, "__name__": "__main__"}, f.__name__)
        for f in model.functions
    ]
    filters = [
        BootstrapFilter(model.y, *functions),
        BootstrapFilter(model.y, *map(numba.njit, functions)),
    ]
    arguments = (*model.parameters, 20)
    values = [f(*arguments, np.random.default_rng(1)) for f in filters]
    (tmp_path / "filters").write_bytes(cloudpickle.dumps(filters))
    code = (
        "import pickle, numpy\nfor f in pickle.load(open('filters', 'rb')):"
        f"print(f(*{arguments}, numpy.random.default_rng(1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    np.testing.assert_allclose(np.array(done.stdout.split(), dtype=float), values, rtol=1e-12)


def test_in_a_model():
    model = volatility()
    functions = compiled(model.functions)
    names = ("initial", "transition", "log_observation")
    with pm.Model() as pymc_model:
        mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma")
        loglike = particle_filter_loglikelihood(
            model.y, mu, 0.9, sigma, n_particles=30, **dict(zip(names, functions, strict=True))
        )
        pm.Potential("loglike", loglike)
    evaluate = pymc_model.compile_fn(loglike, inputs=[mu, sigma], point_fn=False)
    expected = BootstrapFilter(model.y, *functions)(-0.5, 0.9, 0.8, 30, np.random.default_rng(0))
    assert evaluate(-0.5, 0.8) == pytest.approx(expected, rel=1e-12)
    assert evaluate(-0.5, 0.8) != evaluate(-0.4, 0.8)
    assert np.isfinite(pymc_model.compile_logp()(pymc_model.initial_point()))


# what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "y, error, message",
    [
        ([], ValueError, r"shape \(0,\)"),
        (np.ones((2, 2, 2)), ValueError, r"shape \(2, 2, 2\)"),
        (1.0, ValueError, r"shape \(\)"),
        ([0.0, np.inf], ValueError, r"y\[1\] is infinite"),
        ([np.nan, np.nan], ValueError, "all of its 2 times"),
        (["a"], TypeError, "array of numbers"),
        ([1j], TypeError, "array of numbers"),
    ],
)
def test_observations(y, error, message):
    with pytest.raises(error, match=message):
        BootstrapFilter(y, *volatility().functions)


@pytest.mark.parametrize(
    "place, name", list(enumerate(("initial", "transition", "log_observation")))
)
def test_functions(place, name):
    model = volatility()

    def call(function):
        functions = list(model.functions)
        functions[place] = function
        BootstrapFilter(model.y, *functions)(*model.parameters, 5, np.random.default_rng(1))

    with pytest.raises(TypeError, match=f"{name}=3: pass a function {name}"):
        call(3)
    with pytest.raises(TypeError, match=rf"{name} does not take .* write it as {name}\(.* 3 par"):
        call(lambda x: x)
    with pytest.raises(TypeError, match=f"{name} returned complex128 values"):
        call(lambda *arguments: np.full(5, 1j))
    for value, got in (
        (np.ones(4), r"an array of shape \(4,\)"),
        (np.ones((5, 1)), r"an array of shape \(5, 1\)"),
        (np.float64(1.0), r"an array of shape \(\)"),
        (None, "a NoneType"),
        ([1.0] * 5, "a list"),
    ):
        with pytest.raises(ValueError, match=rf"{name} returned {got}: .* \(5,\)"):
            call(lambda *arguments, value=value: value)


def test_shapes_later_on():
    def transition(x, t, values, rng):
        return x[1:] if t == 2 else x

    def log_observation(y_t, x, t, values):
        return x[1:] if t == 2 else x

    for functions, name in (
        ((still, transition, look_up), "transition returned another number"),
        ((still, stay, log_observation), "log_observation returned another number"),
    ):
        with pytest.raises(ValueError, match=name):
            BootstrapFilter(np.ones(4), *functions)(np.zeros(5), 5, np.random.default_rng(1))


def test_call():
    model = volatility()
    log_estimate = BootstrapFilter(model.y, *model.functions)
    with pytest.raises(TypeError, match=r"\(\*parameters, n_particles, rng\)"):
        log_estimate(*model.parameters, 20)
    with pytest.raises(ValueError, match="n_particles=0"):
        log_estimate(*model.parameters, 0, np.random.default_rng(1))
    with pytest.raises(ValueError, match="n_particles=0"):
        particle_filter_loglikelihood(
            model.y, 1.0, initial=stationary, transition=autoregression,
            log_observation=log_volatility, n_particles=0,
        )  # fmt: skip
