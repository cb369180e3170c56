"""Likelihood of a state-space model by the bootstrap particle filter, and as a term of a model."""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import is_jitted
from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable

from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.validation import argument_mismatch, checked_integer

RESAMPLE_BELOW = 0.5
"""Effective share of the particles below which they are resampled. Against resampling at every
time, the variance of the log estimate is the same or a little less, and time is saved."""

SIGNATURES = {
    "initial": "initial(*parameters, n_particles, rng)",
    "transition": "transition(x, t, *parameters, rng)",
    "log_observation": "log_observation(y_t, x, t, *parameters)",
}


def particle_filter_loglikelihood(
    y: ArrayLike,
    *parameters: Any,
    initial: Callable,
    transition: Callable,
    log_observation: Callable,
    n_particles: int = 200,
) -> Variable:
    """Estimated log-likelihood of a state-space model, for a PyMC model.

    Parameters
    ----------
    y : array, shape (T,) or (T, k)
        Observations, a row a time. NaN, or a row of NaN, is a missing one: the particles move and
        are not weighted. A row with some NaN is handed to `log_observation`.
    *parameters : variables, arrays or numbers
        Random variables of the model, or anything made of them; the three functions get all of
        them, in this order.
    initial : callable
        ``initial(*parameters, n_particles, rng)``: draws of the first state, (n_particles,), or
        (n_particles, m) of a state that is a vector.
    transition : callable
        ``transition(x, t, *parameters, rng)``: a draw of the state at time t given each state `x`,
        of the shape that `initial` returned, at time t - 1. t is the row of `y`, from 1 on.
    log_observation : callable
        ``log_observation(y_t, x, t, *parameters)``: log density (n_particles,) of ``y_t = y[t]``
        given each state `x`, every constant that a parameter enters included.
    n_particles : int
        The standard deviation of the log estimate falls as its inverse root. Pseudo-marginal chains
        are most efficient when it is between 1 and 1.7 [4]_; `diagnostics.estimator_sd` finds the
        number that this takes.

    Returns
    -------
    TensorVariable, scalar float64
        For ``pymc.Potential``.

    Raises
    ------
    TypeError, ValueError
        See `BootstrapFilter`.

    Notes
    -----
    The mean of the estimated likelihood, not of its log, is the exact one [2]_, so that a
    pseudo-marginal chain has the exact posterior [3]_; see `estimated_loglikelihood` for the steps
    to take. If all three functions are decorated with ``numba.njit`` the filter runs compiled,
    about four times as fast. Where they divide by zero, which Numba takes for an error, the
    estimate is NaN and the proposal rejected.

    References
    ----------
    .. [1] N. J. Gordon, D. J. Salmond and A. F. M. Smith, "Novel approach to nonlinear/non-Gaussian
       Bayesian state estimation", IEE Proceedings F 140, 1993. doi:10.1049/ip-f-2.1993.0015
    .. [2] P. Del Moral, Feynman-Kac Formulae, Springer, 2004, section 7.4.
    .. [3] C. Andrieu, A. Doucet and R. Holenstein, "Particle Markov chain Monte Carlo methods",
       JRSS B 72, 2010. doi:10.1111/j.1467-9868.2009.00736.x
    .. [4] A. Doucet, M. K. Pitt, G. Deligiannidis and R. Kohn, "Efficient implementation of Markov
       chain Monte Carlo when using an unbiased likelihood estimator", Biometrika 102, 2015.
       doi:10.1093/biomet/asu075

    Examples
    --------
    Stochastic volatility:

    >>> @numba.njit
    ... def initial(mu, phi, sigma, n_particles, rng):
    ...     return mu + sigma / np.sqrt(1 - phi**2) * rng.standard_normal(n_particles)
    >>> @numba.njit
    ... def transition(x, t, mu, phi, sigma, rng):
    ...     return mu + phi * (x - mu) + sigma * rng.standard_normal(len(x))
    >>> @numba.njit
    ... def log_observation(y_t, x, t, mu, phi, sigma):
    ...     return -0.5 * (np.log(2 * np.pi) + x + y_t**2 * np.exp(-x))
    >>> with pm.Model():
    ...     mu, phi, sigma = pm.Normal("mu"), pm.Uniform("phi"), pm.HalfNormal("sigma")
    ...     loglike = particle_filter_loglikelihood(
    ...         returns, mu, phi, sigma,
    ...         initial=initial, transition=transition, log_observation=log_observation,
    ...     )
    ...     pm.Potential("loglike", loglike)
    ...     idata = pm.sample(step=KameleonStep(pseudo_marginal=True))
    """
    checked_integer("n_particles", n_particles, 1)
    log_estimate = BootstrapFilter(y, initial, transition, log_observation)
    return estimated_loglikelihood(log_estimate, *parameters, n_samples=n_particles)


class BootstrapFilter:
    r"""Bootstrap filter: ``log_estimate(*parameters, n_particles, rng)`` is a float.

    Parameters
    ----------
    y : array, shape (T,) or (T, k)
    initial, transition, log_observation : callable
        As `particle_filter_loglikelihood` takes them.

    Attributes
    ----------
    y : array, shape (T,) or (T, k)
    is_observed : array of bool, shape (T,)
    is_compiled : bool
        Whether the three functions are Numba's. The first call then compiles the filter, for
        about two seconds; later calls, and calls of a copy in the same process, do not.

    Raises
    ------
    TypeError
        If `y` is not numeric, a function is not callable, or, when called, one does not take its
        arguments or returns no numbers.
    ValueError
        If `y` is of another shape, infinite, or all missing, or, when called, a function returns
        another shape than that of the particles.

    Notes
    -----
    Particles are moved by the transition and weighted by the observation density. When their
    effective number, 1 / sum_i W_i^2 of the normalised weights W, is less than half of them, they
    are resampled, systematically. With the weights carried from the time before, the estimate is

    .. math:: \hat p(y) = \prod_t \sum_i W_{t-1}^i\, p(y_t \mid x_t^i),

    unbiased for any number of particles (Del Moral 2004), also with resampling that depends on the
    weights (Whiteley, Lee & Heine 2016, doi:10.3150/14-BEJ666). It is -inf, an estimate of 0, when
    all weights are zero at one time, and NaN when a log density is NaN or +inf, or when a compiled
    function divides by zero.
    """

    def __init__(
        self, y: ArrayLike, initial: Callable, transition: Callable, log_observation: Callable
    ) -> None:
        self.y = _observations(y)
        missing = np.isnan(self.y)
        self.is_observed = ~(missing if self.y.ndim == 1 else missing.all(axis=1))
        if not self.is_observed.any():
            raise ValueError(f"y has no observation: all of its {len(self.y)} times are NaN.")
        functions = (initial, transition, log_observation)
        for (name, signature), function in zip(SIGNATURES.items(), functions, strict=True):
            if not callable(function):
                raise TypeError(f"{name}={function!r}: pass a function {signature}.")
        self.initial, self.transition, self.log_observation = functions
        self.is_compiled = all(map(is_jitted, functions))
        self._checked_shapes: dict[int, tuple[int, ...]] = {}

    def __call__(self, *arguments) -> float:
        """Log of the estimate, as ``log_estimate(*parameters, n_particles, rng)``."""
        if len(arguments) < 2 or not isinstance(arguments[-1], np.random.Generator):
            raise TypeError(
                "Call the filter as (*parameters, n_particles, rng), the last one a "
                "numpy.random.Generator, as from numpy.random.default_rng()."
            )
        *values, n_particles, rng = arguments
        return self._run(values, checked_integer("n_particles", n_particles, 1), rng, 0)[0]

    def filtered_states(
        self,
        *parameters: ArrayLike,
        n_particles: int = 200,
        n_ahead: int = 0,
        random_seed: int | np.random.Generator | None = None,
    ) -> np.ndarray:
        """Draw states given the observations up to each time, and forecast them.

        Parameters
        ----------
        *parameters : array, shape (n, ...)
            Draws of each parameter from the posterior, in the order that the functions take them,
            as ``stacked["phi"].values`` of an `arviz.extract`.
        n_particles : int
        n_ahead : int
            Times after the last observation for which states are forecast; `transition` is called
            with t up to T + n_ahead - 1.
        random_seed : int or numpy.random.Generator, optional

        Returns
        -------
        array, shape (n, T + n_ahead) or (n, T + n_ahead, m)
            For each draw of the parameters a state at each time. Those of different times are no
            path: each is drawn anew from the particles. NaN from where an estimate is 0.

        Raises
        ------
        ValueError
            If the parameters have different numbers of draws.
        """
        draws = [np.asarray(parameter) for parameter in parameters]
        if len({len(draw) if draw.ndim else None for draw in draws}) != 1 or not draws[0].ndim:
            shapes = ", ".join(str(draw.shape) for draw in draws)
            raise ValueError(
                f"parameters have shapes {shapes}: take arrays with the draws along the first axis."
            )
        n_particles = checked_integer("n_particles", n_particles, 1)
        length = len(self.y) + checked_integer("n_ahead", n_ahead, 0)
        rng = np.random.default_rng(random_seed)
        found = [
            self._run(values, n_particles, rng, length)[1] for values in zip(*draws, strict=True)
        ]
        return np.array(found)

    def _run(self, values, n_particles, rng, length):
        """Log of the estimate, and a state at each of the first `length` times."""
        parameters = tuple(_parameter(value) for value in values)
        run = _run_compiled if self.is_compiled else _run_plain
        states = None
        try:
            if n_particles not in self._checked_shapes:
                self._checked_shapes[n_particles] = self._check_functions(parameters, n_particles)
            states = np.full((length, *self._checked_shapes[n_particles][1:]), np.nan)
            log_estimate = run(
                self.y, self.is_observed, self.initial, self.transition, self.log_observation,
                parameters, n_particles, rng, states,
            )  # fmt: skip
        except ZeroDivisionError:
            # Numba raises where NumPy goes on with infinity or NaN.
            if not self.is_compiled:
                raise
            log_estimate = math.nan
        return log_estimate, states

    def _check_functions(self, parameters, n_particles):
        """Call each function once, with draws of its own; return the shape of the states."""
        rng = np.random.default_rng(0)
        x = _checked_values("initial", self.initial, (*parameters, n_particles, rng), n_particles)
        if len(self.y) > 1:
            arguments = (x.copy(), 1, *parameters, rng)
            _checked_values("transition", self.transition, arguments, n_particles, x.shape)
        t, alone = int(self.is_observed.argmax()), (n_particles,)
        arguments = (self.y[t], x, t, *parameters)
        _checked_values("log_observation", self.log_observation, arguments, n_particles, alone)
        return x.shape


def _observations(y):
    try:
        y = np.ma.filled(np.ma.array(y, dtype=float, copy=True, order="C"), np.nan)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"y={y!r}: take an array of numbers, shape (T,) or (T, k), with NaN where one is "
            "missing."
        ) from error
    if y.ndim not in (1, 2) or y.size == 0:
        raise ValueError(f"y has shape {y.shape}: take observations of shape (T,) or (T, k).")
    if np.isinf(y).any():
        time = np.argwhere(np.isinf(y))[0, 0]
        raise ValueError(f"y[{time}] is infinite: take NaN for what is missing.")
    return y


def _parameter(value):
    """Copy to a NumPy number or array, of few types so that Numba compiles for few."""
    array = np.array(value, order="C")
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(array.dtype.kind, array.dtype)
    return array.astype(wide, copy=False)[()]


def _checked_values(name, function, arguments, n_particles, shape=None):
    """Values of a user's function, of this shape, or (n_particles,), or (n_particles, m)."""
    error = argument_mismatch(getattr(function, "py_func", function), arguments)
    if error is not None:
        fixed = SIGNATURES[name].count(",")
        raise TypeError(
            f"{name} does not take the {len(arguments)} arguments it is called with ({error}): "
            f"write it as {SIGNATURES[name]}, here with {len(arguments) - fixed} parameters."
        ) from error
    values = function(*arguments)
    is_fit = isinstance(values, np.ndarray) and (
        (values.ndim in (1, 2) and len(values) == n_particles)
        if shape is None
        else values.shape == shape
    )
    if not is_fit:
        is_array = isinstance(values, np.ndarray | np.generic)
        got = f"an array of shape {values.shape}" if is_array else f"a {type(values).__name__}"
        known = (n_particles,) if shape is None else shape
        raise ValueError(
            f"{name} returned {got}: return one value for each particle, here an array of shape "
            f"{known}{', or a row for each of a state that is a vector' if shape is None else ''}."
        )
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{name} returned {values.dtype} values: return real numbers.")
    return values.astype(float)


@jit(allocates=True)
def _put(values, particles):
    """`values` of a user's function into `particles`; Numba takes seconds over ``[:] =``."""
    if len(values) != len(particles):
        raise ValueError("initial or transition returned another number of values than particles.")
    for i in range(len(particles)):
        particles[i] = values[i]


@jit
def _weigh(log_weights, log_densities, weights):
    """Weights times densities, normalised, into `log_weights` and `weights`.

    Returns the log of their sum before, and the effective number of particles.
    """
    if len(log_densities) != len(log_weights):
        raise ValueError("log_observation returned another number of values than particles.")
    peak, is_nan = -np.inf, False
    for i in range(len(log_weights)):
        log_weights[i] += log_densities[i]
        peak = max(peak, log_weights[i])
        is_nan |= math.isnan(log_weights[i])
    if is_nan or peak == np.inf:
        return np.nan, 0.0
    if peak == -np.inf:
        return -np.inf, 0.0
    total, squares = 0.0, 0.0
    for i in range(len(log_weights)):
        weights[i] = math.exp(log_weights[i] - peak)
        total += weights[i]
        squares += weights[i] ** 2
    log_total = peak + math.log(total)
    for i in range(len(log_weights)):
        log_weights[i] -= log_total
        weights[i] /= total
    return log_total, total**2 / squares


@jit(allocates=True)
def _resample(particles, weights, uniform, log_weights):
    """Systematic resampling: a new array of particles, numbers or rows; `log_weights` become equal.

    Particle i is taken once for each of the points (j + uniform) / n, j = 0, ..., n - 1, between
    the sums of the weights before and up to it.
    """
    n_particles = len(particles)
    taken = np.empty_like(particles)
    i, reached = 0, weights[0]
    for j in range(n_particles):
        point = (j + uniform) / n_particles
        while reached <= point and i < n_particles - 1:
            i += 1
            reached += weights[i]
        taken[j] = particles[i]
        log_weights[j] = -math.log(n_particles)
    return taken


@jit
def _picked(log_weights, uniform):
    """Index of a particle, drawn with probabilities exp(`log_weights`)."""
    reached = 0.0
    for i in range(len(log_weights) - 1):
        reached += math.exp(log_weights[i])
        if uniform < reached:
            return i
    return len(log_weights) - 1


def _run_plain(
    y,
    is_observed,
    initial,
    transition,
    log_observation,
    parameters,
    n_particles,
    rng,
    states,
):
    """Filter, and return the log estimate.

    Where `states` has rows, one for each time, or for more, a particle of each goes there.
    """
    first = initial(*parameters, n_particles, rng)
    particles = np.empty((n_particles, *states.shape[1:]))
    _put(first, particles)
    weights, log_weights = np.empty(n_particles), np.empty(n_particles)
    log_weights.fill(-math.log(n_particles))
    log_estimate, effective = 0.0, float(n_particles)
    for t in range(max(len(y), len(states))):
        if t > 0:
            if effective < RESAMPLE_BELOW * n_particles:
                particles = _resample(particles, weights, rng.random(), log_weights)
                effective = float(n_particles)
            _put(transition(particles, t, *parameters, rng), particles)
        if t < len(y) and is_observed[t]:
            log_densities = log_observation(y[t], particles, t, *parameters)
            log_factor, effective = _weigh(log_weights, log_densities, weights)
            log_estimate += log_factor
            if not math.isfinite(log_factor):
                break
        if len(states) > 0:
            states[t] = particles[_picked(log_weights, rng.random())]
    return log_estimate


_run_compiled = numba.njit(_run_plain)
