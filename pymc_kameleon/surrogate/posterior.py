r"""What trajectories run on: the model's own log prior plus a regression of the log-likelihood.

.. math:: s(x) = \log p(x) + r(w(x))

The prior costs nothing beside an expensive likelihood, so nothing of it need be learnt. Where a
coordinate x has two bounds in its natural space, w(x) is its natural value: towards a bound the
log-likelihood goes on smoothly in that, and flattens out without end in x. Where compiled code
cannot call the prior, or it has no gradient, all of the log density is learnt, with w(x) = x.
"""

from typing import Annotated, NamedTuple

import numpy as np
from scipy.special import expit

from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.layout import flags, integers
from pymc_kameleon.mcmc.linalg import add_into, factor_times, solve_upper
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate, jit
from pymc_kameleon.surrogate.regression import Regression, regression_gradient, regression_value

__all__ = [
    "NO_PRIOR",
    "PosteriorSurrogate",
    "log_priors",
    "natural_slopes",
    "natural_where",
    "predicted",
    "predicted_at",
    "surrogate_gradient",
    "surrogate_value",
    "surrogate_values",
]

NO_PRIOR = np.zeros(0, dtype=np.int64)
"""Stands for a log prior of 0: all of the log density is learnt."""


class PosteriorSurrogate(NamedTuple):
    """A surrogate of the log density; fixed until the next fit.

    Attributes
    ----------
    standardization : Standardization
        u = factor^-1 (x - location), the coordinates of moves.
    regression : Regression
        Of the log-likelihood, or of all of the log density without a prior, in its own standardised
        coordinates of w(x).
    is_bounded : bool array, shape (d,)
        Coordinates of which w(x) is a natural value.
    log_prior : int64 array
        What `evaluate` takes of a function that returns the terms of the log density, the first of
        which is the log prior and the others 0, and the prior's gradient; or `NO_PRIOR`. Valid
        until a shared variable gets another array.
    """

    standardization: Standardization
    regression: Regression
    is_bounded: Annotated[np.ndarray, flags("d")]
    log_prior: Annotated[np.ndarray, integers("table")]


def natural_where(is_bounded: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return w of the rows of `points` (n, d): shares of the interval where there are bounds."""
    return np.where(is_bounded, expit(points), points)


def natural_slopes(is_bounded: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return dw/dx (n, d) at the rows of `points` (n, d)."""
    shares = expit(points)
    return np.where(is_bounded, shares * (1.0 - shares), 1.0)


@jit
def _prior_terms(log_prior, x):
    """Log prior at `x` (d,), two zeros, and the gradient."""
    terms = np.empty(N_TERMS + x.size)
    evaluate(log_prior, x, terms, np.zeros(2, dtype=np.int64))
    return terms


@jit
def _raw(surrogate, u):
    x = np.empty(u.size)
    factor_times(surrogate.standardization.factor, u, x)
    add_into(surrogate.standardization.location, x, x)
    return x


@jit
def _own(surrogate, x):
    """Coordinates of the regression at `x` (d,)."""
    z = np.empty(x.size)
    for k in range(x.size):
        z[k] = 1.0 / (1.0 + np.exp(-x[k])) if surrogate.is_bounded[k] else x[k]
    standardize(surrogate.regression.standardization, z, z)
    return z


@jit
def surrogate_value(surrogate, u):
    """Evaluate the surrogate at `u` (d,), in standardised coordinates; -inf if it is not finite."""
    x = _raw(surrogate, u)
    value = regression_value(surrogate.regression, _own(surrogate, x))
    if surrogate.log_prior.size > 0:
        value += _prior_terms(surrogate.log_prior, x)[0]
    return value if np.isfinite(value) else -np.inf


def surrogate_values(surrogate: PosteriorSurrogate, rows: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of an array (n, d), in standardised coordinates."""
    return np.array([surrogate_value(surrogate, u) for u in np.ascontiguousarray(rows)])


@jit
def surrogate_gradient(surrogate, u, work, out):
    """Gradient of the surrogate in `u` (d,), into `out` (d,); `work` has shape (m,)."""
    x = _raw(surrogate, u)
    z, slope = _own(surrogate, x), np.empty(u.size)
    regression_gradient(surrogate.regression, z, work, slope)
    solve_upper(surrogate.regression.standardization.factor, u.size, slope)
    for k in range(u.size):
        if surrogate.is_bounded[k]:
            share = 1.0 / (1.0 + np.exp(-x[k]))
            slope[k] *= share * (1.0 - share)
    if surrogate.log_prior.size > 0:
        add_into(_prior_terms(surrogate.log_prior, x)[N_TERMS:], slope, slope)
    factor = surrogate.standardization.factor
    for i in range(u.size):
        out[i] = 0.0
        for j in range(i, u.size):
            out[i] += factor[j, i] * slope[j]


@jit
def predicted_at(surrogate, x):
    """Surrogate at `x` (d,), in raw coordinates."""
    u = np.empty(x.size)
    standardize(surrogate.standardization, x, u)
    return surrogate_value(surrogate, u)


def predicted(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of `points` (n, d), in raw coordinates."""
    return np.array([predicted_at(surrogate, point) for point in points])


def log_priors(log_prior: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log prior (n,) and its gradient (n, d) at the rows of `points` (n, d); 0 for `NO_PRIOR`."""
    if log_prior.size == 0:
        return np.zeros(len(points)), np.zeros(points.shape)
    rows = np.ascontiguousarray(points)
    terms = np.array([_prior_terms(log_prior, row) for row in rows]).reshape(len(rows), -1)
    return terms[:, 0], terms[:, N_TERMS:]
