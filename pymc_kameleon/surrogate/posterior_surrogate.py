r"""What trajectories run on: the model's own log prior plus a regression of the log-likelihood.

.. math:: s(x) = \log p(x) + r(w(x))

The prior costs nothing beside an expensive likelihood, so nothing of it need be learnt. Where a
coordinate x has two bounds in its natural space, w(x) is its natural value: towards a bound the
log-likelihood goes on smoothly in that, and flattens out without end in x. Where compiled code
cannot call the prior, or it has no gradient, all of the log density is learnt, with w(x) = x.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import typeof, types
from scipy.special import expit

from pymc_kameleon.gp.sparse_gp import MeanFunction, value_and_gradient_at, value_at
from pymc_kameleon.gp.triangular_map import TriangularMap, gradient_in_v, map_to_u, map_to_v
from pymc_kameleon.mcmc.bridge.address import address_once, by_address
from pymc_kameleon.mcmc.bridge.jit import (
    by_class,
    jit,
    jit_by_address,
    jit_inner,
    resolved_once,
)
from pymc_kameleon.mcmc.chain import N_TERMS, evaluate
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.linalg import add_into, dot, factor_times, solve_upper
from pymc_kameleon.surrogate.support import Support, is_inside

NO_PRIOR = np.zeros(0, dtype=np.int64)
"""Stands for a log prior of 0: all of the log density is learnt."""

call_for_value = by_address(types.float64)


class Routines(NamedTuple):
    """What evaluates a surrogate: addresses of machine code, in plain Python functions.

    All that calls them is compiled without a copy of them, and gets the same digits.
    """

    value: int | Callable
    value_and_gradient: int | Callable


class PosteriorSurrogate(NamedTuple):
    """A surrogate of the log density; fixed until the next fit.

    Moves are in v(u) of u = factor^-1 (x - location); the map's determinant is constant, so the
    density of v is proportional to that of u. The process has its own standardised coordinates of
    w(x). `log_prior` is what `evaluate` takes of the log prior with its gradient, or `NO_PRIOR`; it
    is valid until a shared variable gets another array. Outside of the `support` it is -inf. One is
    made by `new_surrogate`, which finds the `routines`.
    """

    standardization: Standardization
    triangular_map: TriangularMap
    gp: MeanFunction
    is_bounded: np.ndarray
    log_prior: np.ndarray
    support: Support
    routines: Routines

    def to_moves(self, points: np.ndarray) -> np.ndarray:
        """Coordinates of moves (d, n) of the rows of `points` (n, d)."""
        return self.triangular_map.to_v(self.standardization.whiten(points))

    def to_points(self, v: np.ndarray) -> np.ndarray:
        """Points (n, d) whose coordinates of moves are `v` (d, n)."""
        return self.standardization.unwhiten(self.triangular_map.to_u(v))


class Workspace(NamedTuple):
    """Where evaluations and moves keep what they find on the way, so that none has to allocate.

    `own` coordinates are those of the process, `scaled` ones are divided by the lengthscales.
    """

    standardised: np.ndarray
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


@by_class
def new_workspace(surrogate):
    """Return room for evaluations of `surrogate`."""


@by_class
def move_coordinates(surrogate, x, u, out):
    """Coordinates of moves of `x` (d,), into `out` (d,); `u` (d,) is written."""


@by_class
def raw_coordinates(surrogate, v, u, out):
    """Raw coordinates of `v` (d,), into `out` (d,), and the standardised ones, into `u` (d,)."""


def _new_workspace(surrogate):
    dim = surrogate.is_bounded.size
    return Workspace(
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(surrogate.gp.weights.size),
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


def _move_coordinates(surrogate, x, u, out):
    standardize(surrogate.standardization, x, u)
    map_to_v(surrogate.triangular_map, u, out)


def _raw_coordinates(surrogate, v, u, out):
    map_to_u(surrogate.triangular_map, v, u)
    factor_times(surrogate.standardization.factor, u, out)
    add_into(surrogate.standardization.location, out, out)


new_workspace.register(PosteriorSurrogate, _new_workspace)
move_coordinates.register(PosteriorSurrogate, _move_coordinates, allocates=False)
raw_coordinates.register(PosteriorSurrogate, _raw_coordinates, allocates=False)


@jit_inner
def _find_coordinates(surrogate, v, workspace):
    raw, own = workspace.raw, workspace.own
    raw_coordinates(surrogate, v, workspace.standardised, raw)
    for k in range(v.size):
        own[k] = 1.0 / (1.0 + np.exp(-raw[k])) if surrogate.is_bounded[k] else raw[k]
    standardize(surrogate.gp.standardization, own, own)


@jit_by_address
def _value(surrogate, v, workspace):
    _find_coordinates(surrogate, v, workspace)
    value = value_at(
        surrogate.gp, workspace.own, workspace.straight, workspace.scaled, workspace.basis
    )
    if surrogate.log_prior.size > 0:
        evaluate(surrogate.log_prior, workspace.raw, workspace.prior, workspace.counts)
        value += workspace.prior[0]
    return value if np.isfinite(value) and is_inside(surrogate.support, v) else -np.inf


@jit_by_address
def _value_and_gradient(surrogate, v, workspace, out):
    _find_coordinates(surrogate, v, workspace)
    raw, slopes = workspace.raw, workspace.slopes
    value = value_and_gradient_at(
        surrogate.gp, workspace.own, workspace.straight, workspace.scaled, workspace.basis, slopes
    )
    solve_upper(surrogate.gp.standardization.factor, v.size, slopes)
    for k in range(v.size):
        if surrogate.is_bounded[k]:
            share = 1.0 / (1.0 + np.exp(-raw[k]))
            slopes[k] *= share * (1.0 - share)
    if surrogate.log_prior.size > 0:
        evaluate(surrogate.log_prior, raw, workspace.prior, workspace.counts)
        value += workspace.prior[0]
        add_into(workspace.prior[N_TERMS:], slopes, slopes)
    factor = surrogate.standardization.factor
    for i in range(v.size):
        out[i] = 0.0
        for j in range(i, v.size):
            out[i] += factor[j, i] * slopes[j]
    gradient_in_v(surrogate.triangular_map, workspace.standardised, out)
    return value if np.isfinite(value) else -np.inf


def new_surrogate(
    standardization: Standardization,
    triangular_map: TriangularMap,
    gp: MeanFunction,
    is_bounded: np.ndarray,
    log_prior: np.ndarray,
    support: Support,
) -> PosteriorSurrogate:
    """Return a surrogate with the routines of this process."""
    parts = standardization, triangular_map, gp, is_bounded, log_prior, support

    def argument_types():
        surrogate = PosteriorSurrogate(*parts, Routines(0, 0))
        return typeof(surrogate), types.float64[::1], typeof(new_workspace(surrogate))

    routines = Routines(
        address_once(_value, argument_types),
        address_once(_value_and_gradient, lambda: (*argument_types(), types.float64[::1])),
    )
    return PosteriorSurrogate(*parts, routines)


@jit_inner
def surrogate_value(surrogate, v, workspace):
    """Evaluate the surrogate at `v` (d,), in coordinates of moves; -inf if it is not finite."""
    return call_for_value(surrogate.routines.value, (surrogate, v, workspace))


@jit_inner
def surrogate_value_and_gradient(surrogate, v, workspace, out):
    """Evaluate likewise, but outside of the support too; the gradient in `v` is into `out` (d,)."""
    return call_for_value(surrogate.routines.value_and_gradient, (surrogate, v, workspace, out))


@jit(allocates=True)
def _values(surrogate, rows, out):
    workspace = new_workspace(surrogate)
    for i in range(out.size):
        out[i] = surrogate_value(surrogate, rows[i], workspace)


def surrogate_values(surrogate: PosteriorSurrogate, rows: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of an array (n, d), in coordinates of moves."""
    values = np.empty(len(rows))
    _values(surrogate, np.ascontiguousarray(rows), values)
    return values


@jit(allocates=True)
def _gradients(surrogate, rows, out):
    workspace = new_workspace(surrogate)
    for i in range(rows.shape[0]):
        surrogate_value_and_gradient(surrogate, rows[i], workspace, out[i])


def surrogate_gradients(surrogate: PosteriorSurrogate, rows: np.ndarray) -> np.ndarray:
    """Gradients (n, d) of the surrogate at the rows of an array (n, d), in coordinates of moves."""
    gradients = np.empty(rows.shape)
    _gradients(surrogate, np.ascontiguousarray(rows), gradients)
    return gradients


def predicted_at(surrogate: PosteriorSurrogate, x: np.ndarray, radius: float) -> float:
    """Surrogate at `x` (d,), in raw coordinates; -inf beyond a `radius` in those of moves."""
    return _predicted_at(surrogate, np.ascontiguousarray(x, dtype=np.float64), float(radius))


@resolved_once
@jit(allocates=True)
def _predicted_at(surrogate, x, radius):
    v = np.empty(x.size)
    move_coordinates(surrogate, x, np.empty(x.size), v)
    if not dot(v, v, v.size) <= radius * radius:
        return -np.inf
    return surrogate_value(surrogate, v, new_workspace(surrogate))


def predicted(surrogate: PosteriorSurrogate, points: np.ndarray) -> np.ndarray:
    """Surrogate (n,) at the rows of `points` (n, d), in raw coordinates."""
    return surrogate_values(surrogate, surrogate.to_moves(points).T)


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
