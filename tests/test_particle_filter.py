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

from pymc_kameleon.pseudo_marginal import BootstrapFilter, particle_filter_loglikelihood
from pymc_kameleon.pseudo_marginal import particle_filter as module

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


def both_started(matrix, sd, n_particles, rng):
    return rng.standard_normal((n_particles, 2))


def both_moved(x, t, matrix, sd, rng):
    return x @ matrix.T + rng.standard_normal(x.shape)


def log_sum(y_t, x, t, matrix, sd):
    return -0.5 * ((y_t - x[:, 0] - x[:, 1]) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


def two_levels():
    """A state of two numbers, of which the sum is observed."""
    y, parameters = np.array([0.3, 2.1, np.nan, 0.4]), (np.array([[0.8, 0.3], [-0.2, 0.6]]), 0.7)
    functions = (both_started, both_moved, log_sum)
    return StateSpaceModel(y, parameters, functions, kalman_of_two(y, *parameters)[0])


def kalman_of_two(y, matrix, sd, n_ahead=0):
    """Log-likelihood, and means (T, 2) and variances (T, 2) of filtered states and forecasts."""
    mean, covariance, total, found = np.zeros(2), np.eye(2), 0.0, []
    for t, y_t in enumerate([*y, *[np.nan] * n_ahead]):
        if t > 0:
            mean, covariance = matrix @ mean, matrix @ covariance @ matrix.T + np.eye(2)
        if not np.isnan(y_t):
            variance = covariance.sum() + sd**2
            total += norm.logpdf(y_t, mean.sum(), np.sqrt(variance))
            gain = covariance.sum(axis=1) / variance
            mean = mean + gain * (y_t - mean.sum())
            covariance = covariance - np.outer(gain, covariance.sum(axis=0))
        found.append((mean, np.diag(covariance)))
    return total, *map(np.array, zip(*found, strict=True))


PARAMETERS = (-1.0, 0.97, 0.2)


def simulated_volatility(n_times):
    rng = np.random.default_rng(3)
    x, y = stationary(*PARAMETERS, 1, rng), []
    for t in range(n_times):
        x = autoregression(x, t, *PARAMETERS, rng) if t > 0 else x
        y.append(np.exp(x[0] / 2) * rng.standard_normal())
    return np.array(y)


COMPILED = {
    function: numba.njit(function)
    for make in (linear, volatility, two_levels)
    for function in make().functions
}


def compiled(functions):
    return tuple(COMPILED.get(function) or numba.njit(function) for function in functions)


def estimate(y, functions, parameters, n_particles):
    rng = np.random.default_rng(1)
    return BootstrapFilter(y, *functions)(*parameters, n_particles, rng)


@numba.njit
def repeated(run, out, arguments):
    for i in range(len(out)):
        out[i] = run(*arguments)


def compiled_estimates(model, n_particles, run=module._run_compiled):
    functions, estimates = compiled(model.functions), np.empty(100_000)
    log_estimate, rng = BootstrapFilter(model.y, *functions), np.random.default_rng(n_particles)
    data = log_estimate.y, log_estimate.is_observed
    shape = functions[0](*model.parameters, n_particles, rng).shape
    no_states = np.empty((0, *shape[1:]))
    arguments = (*data, *functions, model.parameters, n_particles, rng, no_states)
    repeated(run, estimates, arguments)
    return estimates


def standardised_error(log_estimates, exact):
    """Of the mean estimate, in standard errors."""
    ratios = np.exp(log_estimates - exact)
    return (ratios.mean() - 1) / (ratios.std(ddof=1) / np.sqrt(len(ratios)))


@pytest.mark.slow
@pytest.mark.parametrize("n_particles", SIZES)
@pytest.mark.parametrize("make", [linear, volatility, two_levels])
def test_unbiased(make, n_particles):
    """Of the compiled form; the plain one has the same value."""
    model = make()
    error = standardised_error(compiled_estimates(model, n_particles), model.exact)
    assert abs(error) < STANDARD_ERRORS


def weights_not_reset(particles, weights, uniform, log_weights):
    return resample(particles, weights, uniform, np.empty_like(log_weights))


def weights_not_divided(particles, weights, uniform, log_weights):
    taken = resample(particles, weights, uniform, log_weights)
    log_weights += np.log(len(log_weights))
    return taken


def points_not_random(particles, weights, uniform, log_weights):
    return resample(particles, weights, 0.0, log_weights)


resample = module._resample


@pytest.mark.sabotage
@pytest.mark.parametrize("mistake", [weights_not_reset, weights_not_divided, points_not_random])
def test_mistakes_are_seen(mistake):
    names = vars(module) | {"_resample": numba.njit(mistake)}
    run = numba.njit(FunctionType(module._run_plain.__code__, names))
    model = volatility()
    estimates = compiled_estimates(model, 30, run)
    assert abs(standardised_error(estimates, model.exact)) > 2 * STANDARD_ERRORS


log_normal = COMPILED[log_noise]


def log_both(y_t, x, t, start, slope, sd):
    return log_normal(y_t[0], x, t, start, slope, sd) + np.log(y_t[1])


def zeros(rate, n_particles, rng):
    return np.zeros(n_particles, dtype=np.int64)


def count_on(x, t, rate, rng):
    return (x + t) % rate


def log_count(y_t, x, t, rate):
    return np.log(0.2 + 0.6 * (x == y_t))


def long_volatility():
    y = simulated_volatility(200)
    y[[0, 7, 8, 199]] = np.nan
    return y, volatility().functions, PARAMETERS, 50, None


def pairs():
    y, parameters, functions, _ = linear()
    expected = estimate(y, functions, parameters, 20) + 4 * np.log(2)
    y = np.column_stack([y, np.where(np.isnan(y), np.nan, 2.0)])
    return y, (*functions[:2], log_both), parameters, 20, expected


def integers():
    exact = np.log(0.8 * 0.8 * 0.2)
    return [0, 1, 0], (zeros, count_on, log_count), (np.int32(2),), 3, exact


def masked():
    y, parameters, functions, _ = volatility()
    mask = np.array([True, False, False, True])
    expected = estimate(np.where(mask, np.nan, y), functions, parameters, 20)
    return np.ma.masked_array(y, mask), functions, parameters, 20, expected


def test_variance_of_the_log_falls_as_the_number_of_particles():
    functions, n_estimates = compiled(volatility().functions), 1500
    log_estimate = BootstrapFilter(simulated_volatility(100), *functions)
    rng = np.random.default_rng(2)
    few, many = (
        np.var([log_estimate(*PARAMETERS, n_particles, rng) for _ in range(n_estimates)])
        for n_particles in (100, 400)
    )
    # Standard error of the log of a ratio of two variances, and 0.1 for terms of order 1/n^2.
    tolerance = STANDARD_ERRORS * np.sqrt(4 / n_estimates) + 0.1
    assert np.log(few / many) == pytest.approx(np.log(4), abs=tolerance)


@pytest.mark.parametrize("make", [long_volatility, pairs, integers, masked])
def test_python_and_compiled_agree(make):
    y, functions, parameters, n_particles, expected = make()
    assert not BootstrapFilter(y, *functions).is_compiled
    assert BootstrapFilter(y, *compiled(functions)).is_compiled
    plain = estimate(y, functions, parameters, n_particles)
    assert estimate(y, compiled(functions), parameters, n_particles) == pytest.approx(plain)
    assert expected is None or plain == pytest.approx(expected, rel=1e-10)


def test_compiled_functions_may_divide_by_zero():
    at_a_bound, inside = (0.0, 1.0, 0.5), (0.0, 0.9, 0.5)
    filter_ = BootstrapFilter(np.zeros(3), *compiled(volatility().functions))
    for parameters in (at_a_bound, inside, at_a_bound):
        value = filter_(*parameters, 5, np.random.default_rng(1))
        assert np.isfinite(value) if parameters == inside else np.isnan(value)


def still(values, n_particles, rng):
    return np.arange(n_particles) * 1.0


def stay(x, t, values, rng):
    # Every state once, whatever was resampled.
    return np.arange(len(x)) * 1.0


def look_up(y_t, x, t, values):
    return values[x.astype(np.int64)]


STILL = (still, stay, look_up)


@pytest.mark.parametrize("functions", [STILL, tuple(map(numba.njit, STILL))])
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
def test_weights_of_any_size(values, expected, functions):
    value = estimate([0.0, np.nan, 0.0], functions, (np.array(values),), 3)
    assert value == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_copy_is_not_compiled_again():
    model, rng = volatility(), np.random.default_rng
    log_estimate = BootstrapFilter(model.y, *compiled(model.functions))
    value = log_estimate(*model.parameters, 20, rng(1))
    n_compiled = len(module._run_compiled.signatures)
    copy = cloudpickle.loads(cloudpickle.dumps(log_estimate))
    assert copy(*model.parameters, 40, rng(1)) != value
    assert copy(*model.parameters, 20, rng(1)) == value
    other = BootstrapFilter(np.ones(9), *compiled(model.functions))
    assert np.isfinite(other(*map(np.float64, model.parameters), 3, rng(1)))
    assert len(module._run_compiled.signatures) == n_compiled


@pytest.mark.slow
def test_pickles_for_another_process(tmp_path):
    model = volatility()
    # Of no module, as in a notebook.
    names = {"np": np, "__name__": "__main__"}
    plain = [FunctionType(f.__code__, names, f.__name__) for f in model.functions]
    filters = [BootstrapFilter(model.y, *f) for f in (plain, map(numba.njit, plain))]
    arguments = (*model.parameters, 20)
    values = [f(*arguments, np.random.default_rng(1)) for f in filters]
    (tmp_path / "filters").write_bytes(cloudpickle.dumps(filters))
    code = (
        "import pickle, numpy\nfor f in pickle.load(open('filters', 'rb')):"
        f"print(f(*{arguments}, numpy.random.default_rng(1)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    np.testing.assert_allclose(np.array(printed.split(), dtype=float), values, rtol=1e-12)


@pytest.mark.parametrize("form", [tuple, compiled])
def test_filtered_states_and_forecasts(form):
    """Of one draw of the parameters, 2000 times; 300 particles have no bias that is seen here."""
    model, n = two_levels(), 2000
    _, means, variances = kalman_of_two(model.y, *model.parameters, n_ahead=2)
    log_estimate = BootstrapFilter(model.y, *form(model.functions))
    draws = [np.tile(p, (n, *[1] * np.ndim(p))) for p in model.parameters]
    draws[1] = draws[1].ravel()
    states = log_estimate.filtered_states(*draws, n_particles=300, n_ahead=2, random_seed=1)
    assert states.shape == (n, 6, 2)
    errors = (states.mean(axis=0) - means) / np.sqrt(variances / n)
    assert np.abs(errors).max() < STANDARD_ERRORS + 0.5
    ratios = states.var(axis=0, ddof=1) / variances - 1
    assert np.abs(ratios).max() < (STANDARD_ERRORS + 0.5) * np.sqrt(2 / n)


def test_filtered_states_of_a_number():
    model = volatility()
    log_estimate = BootstrapFilter(model.y, *model.functions)
    draws = [np.full(3, p) for p in model.parameters]
    assert log_estimate.filtered_states(*draws, n_ahead=1).shape == (3, 5)
    with pytest.raises(ValueError, match=r"parameters have shapes \(3,\), \(3,\), \(\): take"):
        log_estimate.filtered_states(*draws[:2], 0.8)


def test_in_a_model():
    model, names = volatility(), ("initial", "transition", "log_observation")
    functions = compiled(model.functions)
    with pm.Model() as pymc_model:
        mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma")
        options = dict(zip(names, functions, strict=True))
        loglike = particle_filter_loglikelihood(model.y, mu, 0.9, sigma, n_particles=30, **options)
        pm.Potential("loglike", loglike)
    evaluate = pymc_model.compile_fn(loglike, inputs=[mu, sigma], point_fn=False)
    expected = BootstrapFilter(model.y, *functions)(-0.5, 0.9, 0.8, 30, np.random.default_rng(0))
    assert evaluate(-0.5, 0.8) == pytest.approx(expected, rel=1e-12)
    assert evaluate(-0.5, 0.8) != evaluate(-0.4, 0.8)
    assert np.isfinite(pymc_model.compile_logp()(pymc_model.initial_point()))


@pytest.mark.parametrize("place, name", list(enumerate(module.SIGNATURES)))
@pytest.mark.parametrize(
    "function, error, message",
    [
        (3, TypeError, "NAME=3: pass a function NAME"),
        (lambda x: x, TypeError, r"NAME does not take .* write it as NAME\(.* 3 par"),
        (lambda *_: np.full(5, 1j), TypeError, "NAME returned complex128 values"),
        (lambda *_: np.ones(4), ValueError, r"NAME returned an array of shape \(4,\): .* \(5,\)"),
        (lambda *_: np.ones((5, 1, 1)), ValueError, r"NAME returned an array of shape \(5, 1, 1"),
        (lambda *_: np.float64(1.0), ValueError, r"NAME returned an array of shape \(\): "),
        (lambda *_: None, ValueError, "NAME returned a NoneType: "),
        (lambda *_: [1.0] * 5, ValueError, "NAME returned a list: "),
    ],
)
def test_functions(place, name, function, error, message):
    model = volatility()
    functions = [*model.functions[:place], function, *model.functions[place + 1 :]]
    with pytest.raises(error, match=message.replace("NAME", name)):
        estimate(model.y, functions, model.parameters, 5)


def filtered(y=(0.0, 1.0), functions=None, parameters=None, n_particles=5):
    model = volatility()
    return estimate(y, functions or model.functions, parameters or model.parameters, n_particles)


def without_a_generator():
    BootstrapFilter([0.0], *volatility().functions)(*PARAMETERS, 20)


def of_no_particles():
    names = dict(initial=still, transition=stay, log_observation=look_up)
    particle_filter_loglikelihood([0.0], 1.0, **names, n_particles=0)


def shrinking(**functions):
    chosen = {"initial": still, "transition": stay, "log_observation": look_up} | functions
    return filtered(np.ones(4), tuple(chosen.values()), (np.zeros(5),))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: filtered([]), ValueError, r"shape \(0,\)"),
        (lambda: filtered(np.ones((2, 2, 2))), ValueError, r"shape \(2, 2, 2\)"),
        (lambda: filtered(1.0), ValueError, r"shape \(\)"),
        (lambda: filtered([0.0, np.inf]), ValueError, r"y\[1\] is infinite"),
        (lambda: filtered([np.nan, np.nan]), ValueError, "all of its 2 times"),
        (lambda: filtered(["a"]), TypeError, "array of numbers"),
        (lambda: filtered([1j]), TypeError, "array of numbers"),
        (without_a_generator, TypeError, r"\(\*parameters, n_particles, rng\)"),
        (lambda: filtered(n_particles=0), ValueError, "n_particles=0"),
        (of_no_particles, ValueError, "n_particles=0"),
        (
            lambda: shrinking(transition=lambda x, t, values, rng: x[1:] if t == 2 else x),
            ValueError,
            "transition returned another number",
        ),
        (
            lambda: shrinking(log_observation=lambda y_t, x, t, values: x[1:] if t == 2 else x),
            ValueError,
            "log_observation returned another number",
        ),
    ],
)
def test_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
