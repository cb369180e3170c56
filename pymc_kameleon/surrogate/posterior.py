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
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate, jit, resolved_once
from pymc_kameleon.surrogate.regression import Regression, regression_gradient, regression_value

__all__ = [
    "NO_PRIOR",
    "PosteriorSurrogate",
    "Workspace",
    "log_priors",
    "natural_slopes",
    "natural_where",
    "new_workspace",
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


class Workspace(NamedTuple):
    """Where evaluations and moves keep what they find on the way, so that none has to allocate.

    Attributes
    ----------
    raw, own : array, shape (d,)
        Raw coordinates of the point, and those of the regression.
    straight, scaled : array, shape (d,)
        The regression's divided by the lengthscales.
    slopes : array, shape (d,)
        Gradient in raw coordinates.
    basis : array, shape (m,)
        Of the regression, one number for each centre.
    prior : array, shape (3 + d,)
        Terms of the log prior, and its gradient.
    counts : int64 array, shape (2,)
        Of calls of the prior.
    gradient, velocity : array, shape (d,)
        Of a trajectory.
    other : array, shape (d,)
        Where a trajectory began, or a difference may lead.
    """

    raw: np.ndarray
    own: np.ndarray
    straight: np.ndarray
    scaled: np.ndarray
    slopes: np.ndarray
    basis: np.ndarray
    prior: np.ndarray
    counts: np.ndarray
    gradient: np.ndarray
    velocity: np.ndarray
    other: np.ndarray


@jit(allocates=True)
def new_workspace(surrogate):
    """Return room for evaluations of `surrogate`."""
    dim = surrogate.is_bounded.size
    return Workspace(
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(surrogate.regression.weights.size),
        np.empty(N_TERMS + dim),
        np.zeros(2, dtype=np.int64),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
    )


def natural_where(is_bounded: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return w of the rows of `points` (n, d): shares of the interval where there are bounds."""
    return np.where(is_bounded, expit(points), points)


def natural_slopes(is_bounded: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return dw/dx (n, d) at the rows of `points` (n, d)."""
    shares = expit(points)
    return np.where(is_bounded, shares * (1.0 - shares), 1.0)


@jit
def _find_coordinates(surrogate, u, workspace):
    """Raw coordinates of `u` (d,), and those of the regression."""
    raw, own = workspace.raw, workspace.own
    factor_times(surrogate.standardization.factor, u, raw)
    add_into(surrogate.standardization.location, raw, raw)
    for k in range(u.size):
        own[k] = 1.0 / (1.0 + np.exp(-raw[k])) if surrogate.is_bounded[k] else raw[k]
    standardize(surrogate.regression.standardization, own, own)


@jit
def surrogate_value(surrogate, u, workspace):
    """Evaluate the surrogate at `u` (d,), in standardised coordinates; -inf if it is not finite."""
    _find_coordinates(surrogate, u, workspace)
    value = regression_value(
        surrogate.regression, workspace.own, workspace.straight, workspace.scaled, workspace.basis
    )
    if surrogate.log_prior.size > 0:
        evaluate(surrogate.log_prior, workspace.raw, workspace.prior, workspace.counts)
        value += workspace.prior[0]
    return value if np.isfinite(value) else -np.inf


@jit(allocates=True)
def _values(surrogate, rows, out):
    workspace = new_workspace(surrogate)
    for i in range(out.size):
        out[i] = surrogate_value(surrogate, rows[i], workspace)


def surrogate_values(surrogate: PosteriorSurrogate, rows: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of an array (n, d), in standardised coordinates."""
    values = np.empty(len(rows))
    _values(surrogate, np.ascontiguousarray(rows), values)
    return values


@jit
def surrogate_gradient(surrogate, u, workspace, out):
    """Gradient of the surrogate in `u` (d,), in standardised coordinates, into `out` (d,)."""
    _find_coordinates(surrogate, u, workspace)
    raw, slopes = workspace.raw, workspace.slopes
    regression_gradient(
        surrogate.regression,
        workspace.own,
        workspace.straight,
        workspace.scaled,
        workspace.basis,
        slopes,
    )
    solve_upper(surrogate.regression.standardization.factor, u.size, slopes)
    for k in range(u.size):
        if surrogate.is_bounded[k]:
            share = 1.0 / (1.0 + np.exp(-raw[k]))
            slopes[k] *= share * (1.0 - share)
    if surrogate.log_prior.size > 0:
        evaluate(surrogate.log_prior, raw, workspace.prior, workspace.counts)
        add_into(workspace.prior[N_TERMS:], slopes, slopes)
    factor = surrogate.standardization.factor
    for i in range(u.size):
        out[i] = 0.0
        for j in range(i, u.size):
            out[i] += factor[j, i] * slopes[j]


@resolved_once
@jit(allocates=True)
def predicted_at(surrogate, x):
    """Surrogate at `x` (d,), in raw coordinates."""
    u = np.empty(x.size)
    standardize(surrogate.standardization, x, u)
    return surrogate_value(surrogate, u, new_workspace(surrogate))


def predicted(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of `points` (n, d), in raw coordinates."""
    return surrogate_values(surrogate, surrogate.standardization.whiten(points).T)


@jit(allocates=True)
def _priors(log_prior, rows, out):
    counts = np.zeros(2, dtype=np.int64)
    for i in range(rows.shape[0]):
        evaluate(log_prior, rows[i], out[i], counts)


def log_priors(log_prior: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log prior (n,) and its gradient (n, d) at the rows of `points` (n, d); 0 for `NO_PRIOR`."""
    terms = np.zeros((len(points), N_TERMS + points.shape[1]))
    if log_prior.size > 0:
        _priors(log_prior, np.ascontiguousarray(points), terms)
    return terms[:, 0], terms[:, N_TERMS:]
