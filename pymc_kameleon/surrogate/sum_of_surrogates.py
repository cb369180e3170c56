r"""A surrogate of a log density that is a sum of black boxes, each of a few numbers.

.. math:: s(x) = k(x) + \sum_t r_t(w_t(x))

k is known with its gradient: the log prior, and likelihoods that are no black boxes. Term t, the
log-likelihood of a group, depends on a few inputs :math:`w_t`, and is a regression on these alone;
so trajectories run in all dimensions at once, and none of the regressions has many. Beyond the
points that a regression was fitted to it falls, so that no trajectory runs away there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import typeof, types

from pymc_kameleon.gp.mean import Mean
from pymc_kameleon.gp.sparse_gp import MeanFunction, SparseGP, value_and_gradient_at
from pymc_kameleon.gp.triangular_map import TriangularMap
from pymc_kameleon.mcmc.bridge.address import address_once
from pymc_kameleon.mcmc.bridge.jit import jit, jit_by_address, jit_inner
from pymc_kameleon.mcmc.chain import N_TERMS, values_into
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.linalg import copy_into, dot, solve_upper
from pymc_kameleon.surrogate.posterior_surrogate import (
    Routines,
    move_coordinates,
    new_workspace,
    raw_coordinates,
)
from pymc_kameleon.surrogate.support import Support, everywhere

STEEPNESS = 2.0
"""Second derivative of the fall of a regression beyond its edge, in standardised coordinates."""


class Terms(NamedTuple):
    """The regressions of all terms, one after the other in arrays.

    Of term t with k inputs, r straightened coordinates and m centres, which are the `sizes` (T, 3),
    `numbers` has a `MeanFunction` from `first[t, 0]` on, in the order of `mean_function_of`, and
    `mapped` its straightened coordinates from `first[t, 1]` on. `members` has the indices of its
    inputs from `first[t, 2]` on. `edges` (T,) are the distances, in standardised coordinates, from
    which they fall.
    """

    numbers: np.ndarray
    mapped: np.ndarray
    members: np.ndarray
    first: np.ndarray
    sizes: np.ndarray
    edges: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"numbers": 0, "mapped": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether all arrays are as long as their parts."""
        k, r, m = self.sizes.T
        lengths = np.stack([_n_numbers(k, r, m), r, k], axis=1)
        ends = np.cumsum(lengths, axis=0)
        found = self.numbers.size, self.mapped.size, self.members.size
        are_there = np.array_equal(self.first, ends - lengths)
        return bool(np.all(self.sizes >= 0) and are_there and tuple(ends[-1]) == found)


def _n_numbers(k, r, m):
    return k + k * k + 2 * r + r * k + r * k * k + 1 + k + k * k + 1 + k + k + k * m + m


def packed(
    processes: Sequence[SparseGP], members: Sequence[np.ndarray], edges: np.ndarray
) -> Terms:
    """Return the regressions with the indices of their inputs, in arrays."""
    numbers, sizes = [], []
    for gp in processes:
        k, m = gp.centres.shape
        straight, mean = gp.triangular_map, gp.mean
        sizes.append((k, straight.mapped.size, m))
        parts = *gp.standardization, *straight[1:], *mean, gp.hyperparameters
        numbers += [*parts, gp.inverse_lengthscales, gp.centres, gp.weights]
    shapes = np.array(sizes, dtype=np.int64)
    k, r, m = shapes.T
    lengths = np.stack([_n_numbers(k, r, m), r, k], axis=1)
    return Terms(
        np.concatenate([np.ravel(part) for part in numbers]),
        np.concatenate([gp.triangular_map.mapped for gp in processes]),
        np.concatenate(members).astype(np.int64),
        np.cumsum(lengths, axis=0) - lengths,
        shapes,
        np.array(edges, dtype=np.float64),
    )


@jit_inner(allocates=True)
def mean_function_of(terms, t):
    """Return the regression of term `t`, of which it is a view."""
    k, r, m = terms.sizes[t, 0], terms.sizes[t, 1], terms.sizes[t, 2]
    a, i = terms.numbers, terms.first[t, 0]
    location, i = a[i : i + k], i + k
    factor, i = a[i : i + k * k].reshape((k, k)), i + k * k
    scales, i = a[i : i + r], i + r
    constants, i = a[i : i + r], i + r
    slopes, i = a[i : i + r * k].reshape((r, k)), i + r * k
    bends, i = a[i : i + r * k * k].reshape((r, k, k)), i + r * k * k
    constant, i = a[i : i + 1], i + 1
    linear, i = a[i : i + k], i + k
    quadratic, i = a[i : i + k * k].reshape((k, k)), i + k * k
    hyperparameters, i = a[i : i + 1 + k], i + 1 + k
    inverse, i = a[i : i + k], i + k
    centres, i = a[i : i + k * m].reshape((k, m)), i + k * m
    begin = terms.first[t, 1]
    return MeanFunction(
        Standardization(location, factor),
        TriangularMap(terms.mapped[begin : begin + r], scales, constants, slopes, bends),
        Mean(constant, linear, quadratic),
        hyperparameters,
        inverse,
        centres,
        a[i : i + m],
    )


class SumOfSurrogates(NamedTuple):
    """A surrogate of the log density of x; fixed until the next fit.

    Moves are in v = (x - location) / scales, both (d,). `inputs` is what `values_into` takes of
    w(x) (n,), and `known` of k at x followed by slopes (n,) of the terms in w: k, two zeros, and
    the gradient in x of all; both are valid until a shared variable gets another array. One is made
    by `new_sum`, which finds the `routines`.
    """

    location: np.ndarray
    scales: np.ndarray
    terms: Terms
    n_inputs: int
    inputs: np.ndarray
    known: np.ndarray
    support: Support
    routines: Routines

    def to_moves(self, points: np.ndarray) -> np.ndarray:
        """Coordinates of moves (d, n) of the rows of `points` (n, d)."""
        return np.ascontiguousarray(((points - self.location) / self.scales).T)

    def to_points(self, v: np.ndarray) -> np.ndarray:
        """Points (n, d) whose coordinates of moves are `v` (d, n)."""
        return self.location + v.T * self.scales


class SumWorkspace(NamedTuple):
    """Where evaluations and moves keep what they find on the way, so that none has to allocate."""

    standardised: np.ndarray
    raw: np.ndarray
    inputs: np.ndarray
    with_slopes: np.ndarray
    known: np.ndarray
    own: np.ndarray
    straight: np.ndarray
    scaled: np.ndarray
    slopes: np.ndarray
    basis: np.ndarray
    gradient: np.ndarray
    velocity: np.ndarray
    other: np.ndarray
    unused: np.ndarray


def _new_workspace(surrogate):
    dim, n = surrogate.location.size, surrogate.n_inputs
    k, m = 0, 0
    for t in range(surrogate.terms.edges.size):
        k = max(k, surrogate.terms.sizes[t, 0])
        m = max(m, surrogate.terms.sizes[t, 2])
    return SumWorkspace(
        np.empty(dim),
        np.empty(dim),
        np.empty(n),
        np.empty(dim + n),
        np.empty(N_TERMS + dim),
        np.empty(k),
        np.empty(k),
        np.empty(k),
        np.empty(k),
        np.empty(m),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
    )


def _move_coordinates(surrogate, x, u, out):
    for k in range(x.size):
        out[k] = (x[k] - surrogate.location[k]) / surrogate.scales[k]


def _raw_coordinates(surrogate, v, u, out):
    for k in range(v.size):
        out[k] = surrogate.location[k] + surrogate.scales[k] * v[k]


@jit_inner(allocates=True)
def add_term(terms, t, inputs, workspace, slopes):
    """Return term `t` at all `inputs` (n,), and add its slopes to those in all of them (n,)."""
    gp, k = mean_function_of(terms, t), terms.sizes[t, 0]
    own, out = workspace.own[:k], workspace.slopes[:k]
    members = terms.members[terms.first[t, 2] : terms.first[t, 2] + k]
    for i in range(k):
        own[i] = inputs[members[i]]
    standardize(gp.standardization, own, own)
    straight, scaled = workspace.straight[:k], workspace.scaled[:k]
    basis = workspace.basis[: terms.sizes[t, 2]]
    value = value_and_gradient_at(gp, own, straight, scaled, basis, out)
    distance = np.sqrt(dot(own, own, k))
    beyond = distance - terms.edges[t]
    if beyond > 0.0:
        value -= 0.5 * STEEPNESS * beyond * beyond
        for i in range(k):
            out[i] -= STEEPNESS * beyond * own[i] / distance
    solve_upper(gp.standardization.factor, k, out)
    for i in range(k):
        slopes[members[i]] += out[i]
    return value


@jit_by_address(allocates=True)
def _value_and_gradient(surrogate, v, workspace, out):
    dim, terms = v.size, surrogate.terms
    raw, both, known = workspace.raw, workspace.with_slopes, workspace.known
    raw_coordinates(surrogate, v, v, raw)
    values_into(surrogate.inputs, raw, workspace.inputs)
    copy_into(raw, both[:dim])
    slopes, value = both[dim:], 0.0
    for i in range(slopes.size):
        slopes[i] = 0.0
    for t in range(terms.edges.size):
        value += add_term(terms, t, workspace.inputs, workspace, slopes)
    values_into(surrogate.known, both, known)
    value += known[0]
    for k in range(dim):
        out[k] = surrogate.scales[k] * known[N_TERMS + k]
    return value if np.isfinite(value) else -np.inf


@jit_by_address(allocates=True)
def _value(surrogate, v, workspace):
    return _value_and_gradient(surrogate, v, workspace, workspace.unused)


new_workspace.register(SumOfSurrogates, _new_workspace)
move_coordinates.register(SumOfSurrogates, _move_coordinates, allocates=False)
raw_coordinates.register(SumOfSurrogates, _raw_coordinates, allocates=False)


def new_sum(
    location: np.ndarray,
    scales: np.ndarray,
    terms: Terms,
    n_inputs: int,
    inputs: np.ndarray,
    known: np.ndarray,
) -> SumOfSurrogates:
    """Return a surrogate with its routines."""
    parts = location, scales, terms, n_inputs, inputs, known, everywhere(len(location))

    def argument_types():
        surrogate = SumOfSurrogates(*parts, Routines(0, 0))
        return typeof(surrogate), types.float64[::1], typeof(new_workspace(surrogate))

    routines = Routines(
        address_once(_value, argument_types, SumOfSurrogates),
        address_once(
            _value_and_gradient,
            lambda: (*argument_types(), types.float64[::1]),
            SumOfSurrogates,
        ),
    )
    return SumOfSurrogates(*parts, routines)


@jit(allocates=True)
def _terms_at(surrogate, rows, out):
    workspace = new_workspace(surrogate)
    slopes = np.zeros(rows.shape[1])
    for i in range(rows.shape[0]):
        for t in range(out.shape[1]):
            out[i, t] = add_term(surrogate.terms, t, rows[i], workspace, slopes)


def terms_at(surrogate: SumOfSurrogates, inputs: np.ndarray) -> np.ndarray:
    """Terms (m, T) at the rows of `inputs` (m, n)."""
    values = np.empty((len(inputs), len(surrogate.terms.edges)))
    _terms_at(surrogate, np.ascontiguousarray(inputs), values)
    return values
