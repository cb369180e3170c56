r"""What trajectories run on: the model's own log prior plus a regression of the log-likelihood.

.. math:: s(u) = \log p(x) + r(u), \qquad x = \mu + L u

The prior costs nothing beside an expensive likelihood, so nothing of it need be learnt. Where
compiled code cannot call it or it has no gradient, all of the log density is learnt.
"""

from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import standardize
from pymc_kameleon.mcmc.layout import integers
from pymc_kameleon.mcmc.linalg import add_into, factor_times
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate, jit
from pymc_kameleon.surrogate.regression import Regression, regression_gradient, regression_value

__all__ = [
    "NO_PRIOR",
    "PosteriorSurrogate",
    "log_priors",
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
    regression : Regression
        Of the log-likelihood, or of all of the log density without a prior.
    log_prior : int64 array
        What `evaluate` takes of a function that returns the terms of the log density, the first of
        which is the log prior and the others 0, and the prior's gradient; or `NO_PRIOR`. Valid
        until a shared variable gets another array.
    """

    regression: Regression
    log_prior: Annotated[np.ndarray, integers("table")]


@jit
def _prior_terms(log_prior, x):
    """Log prior at `x` (d,), two zeros, and the gradient."""
    terms = np.empty(N_TERMS + x.size)
    evaluate(log_prior, x, terms, np.zeros(2, dtype=np.int64))
    return terms


@jit
def _raw(regression, u):
    x = np.empty(u.size)
    factor_times(regression.standardization.factor, u, x)
    add_into(regression.standardization.location, x, x)
    return x


@jit
def surrogate_value(surrogate, u):
    """Evaluate the surrogate at `u` (d,), in standardised coordinates."""
    value = regression_value(surrogate.regression, u)
    if surrogate.log_prior.size == 0:
        return value
    value += _prior_terms(surrogate.log_prior, _raw(surrogate.regression, u))[0]
    return value if np.isfinite(value) else -np.inf


def surrogate_values(surrogate: PosteriorSurrogate, rows: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of an array (n, d), in standardised coordinates."""
    return np.array([surrogate_value(surrogate, u) for u in np.ascontiguousarray(rows)])


@jit
def surrogate_gradient(surrogate, u, work, out):
    """Gradient of the surrogate in `u` (d,), into `out` (d,); `work` has shape (m,)."""
    regression = surrogate.regression
    regression_gradient(regression, u, work, out)
    if surrogate.log_prior.size > 0:
        terms = _prior_terms(surrogate.log_prior, _raw(regression, u))
        factor = regression.standardization.factor
        for i in range(u.size):
            for j in range(i, u.size):
                out[i] += factor[j, i] * terms[N_TERMS + j]


@jit
def predicted_at(surrogate, x):
    """Surrogate at `x` (d,), in raw coordinates."""
    u = np.empty(x.size)
    standardize(surrogate.regression.standardization, x, u)
    return surrogate_value(surrogate, u)


def predicted(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of `points` (n, d), in raw coordinates."""
    return np.array([predicted_at(surrogate, point) for point in points])


def log_priors(log_prior: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Log prior (n,) at the rows of `points` (n, d), in raw coordinates; 0 for `NO_PRIOR`."""
    if log_prior.size == 0:
        return np.zeros(len(points))
    return np.array([_prior_terms(log_prior, point)[0] for point in np.ascontiguousarray(points)])
