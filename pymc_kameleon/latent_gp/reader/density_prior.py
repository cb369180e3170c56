"""Gaussian variables by their joint log density: areas, walks, autoregressions, effects."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.multivariate import ICARRV
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import (
    Pattern,
    Root,
    UpdatedRoot,
    covariance_times,
)
from pymc_kameleon.latent_gp.reader.affine_graph import AffineGraph, places_of, split_vector
from pymc_kameleon.latent_gp.reader.linear_predictor import with_gradient

LOG_2PI = math.log(2.0 * math.pi)

NO_PENALTY = 1e170
"""Standard deviation of a sum by which its penalty is 0, to the last bit."""


@dataclass(frozen=True)
class Density:
    """exp(constant + slope x - x^T Q x / 2) at some hyperparameters, and its factor.

    Q has the `entries` of `pattern`, and V^T diag(weights) V for a few `rows` V (k, M) beside them.
    """

    pattern: Pattern
    entries: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    slope: np.ndarray
    constant: float

    @cached_property
    def root(self) -> Root:
        """Square root of Q; LinAlgError if it is not positive definite."""
        return self.root_of(self.pattern, self.entries)

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean (M,) of the Gaussian of which this is a multiple."""
        return covariance_times(self.root, self.slope)

    @cached_property
    def log_integral(self) -> float:
        """Log of that multiple."""
        quadratic = 0.5 * float(self.slope @ self.mean)
        normaliser = 0.5 * self.slope.size * LOG_2PI - self.root.half_log_determinant
        return self.constant + quadratic + normaliser

    @cached_property
    def diagonal(self) -> np.ndarray:
        """That of the entries (M,)."""
        is_own = self.pattern.rows == self.pattern.columns
        return np.bincount(self.pattern.rows[is_own], self.entries[is_own], self.slope.size)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw (M,) from that Gaussian."""
        return self.mean + self.root.drawn(rng.standard_normal((1, self.mean.size)))[0]

    def root_of(self, pattern: Pattern, entries: np.ndarray) -> Root:
        """Factorise a matrix with these entries, and the `rows` beside them."""
        root = pattern.root(entries)
        return UpdatedRoot(root, self.rows, self.weights) if len(self.weights) else root


class DensityPrior:
    """N(m, K) of variables whose joint log density is quadratic in them.

    `shared` are the value variables of others, with their shared variables.
    """

    def __init__(self, model, variables, shapes, shared, compile_kwargs):
        values = [model.rvs_to_values[v] for v in variables]
        self.size = sum(map(math.prod, shapes))
        vector, parts = split_vector(values, shapes)
        sums = {v: s for v in variables if (s := _sum_penalty(model, v)) is not None}
        rest = [v for v in variables if v not in sums]
        densities = [s.density for s in sums.values()] + ([model.logp(vars=rest)] if rest else [])
        graphs = with_gradient(model, variables, sum(densities))
        graphs += [graph for s in sums.values() for graph in (s.weight, s.log_constant)]
        density, gradient, *more = clone_replace(graphs, shared | parts, rebuild_strict=False)
        extra = [density, *more]
        self.gradient = AffineGraph(
            model, gradient, vector, self.size, self.size, compile_kwargs, extra
        )
        self.is_constant = set(shared.values()).isdisjoint(ancestors([gradient, *extra]))
        places = dict(zip(variables, places_of(shapes), strict=True))
        self._summed = [places[v] for v in sums]

    def find_entries(self, shared) -> None:
        """Find which entries the precision has, for values near those of `shared` variables."""
        self.gradient.find_groups(self.gradient.matrices_about(shared))
        rows, columns, _ = self.gradient.groups
        diagonal = np.arange(self.size)
        keys = np.concatenate([rows * self.size + columns, diagonal * (self.size + 1)])
        keys = np.unique(keys[keys // self.size >= keys % self.size])
        self.pattern = Pattern(keys // self.size, keys % self.size, self.size)
        own = np.flatnonzero(rows >= columns)
        self._own = own, np.searchsorted(keys, rows[own] * self.size + columns[own])
        self._diagonal = np.searchsorted(keys, diagonal * (self.size + 1))
        vectors = [np.isin(diagonal, part).astype(float) for part in self._summed]
        pins = [diagonal == part[0] for part in self._summed]
        self._rows = np.array([*vectors, *pins], dtype=float).reshape(-1, self.size)

    def at(self) -> Density:
        """Return the density at the present values.

        Where a sum is penalised, the rest may leave it open: one element is pinned, and the pin
        taken back in `weights`.
        """
        start, negative = self.gradient.entries()
        slope, constant, more = np.split(start, [self.size, self.size + 1])
        source, target = self._own
        entries = np.zeros(self.pattern.rows.size)
        entries[target] = -negative[source]
        weights, log_constants = more.reshape(-1, 2).T
        pins = np.array([entries[self._diagonal[part]].mean() for part in self._summed])
        for part, pin in zip(self._summed, pins, strict=True):
            entries[self._diagonal[part[0]]] += pin
        return Density(
            self.pattern,
            entries,
            self._rows,
            np.concatenate([weights, -pins]),
            slope,
            float(constant[0] + log_constants.sum()),
        )


class SumPenalty(NamedTuple):
    """exp(log_constant - weight s^2 / 2) for the sum s of a variable, and its log density without.

    As a matrix it has no entry that is 0, where all else is known of neighbours.
    """

    density: Variable
    weight: Variable
    log_constant: Variable


def _sum_penalty(model, variable) -> SumPenalty | None:
    """Take the penalty of the sum out of the density of `pm.ICAR`; None for other variables."""
    node = variable.owner
    if not isinstance(node.op, ICARRV):
        return None
    deviation = node.op.dist_params(node)[2]
    no_penalty = pt.constant(NO_PENALTY, dtype="float64")
    inputs = [no_penalty if v is deviation else v for v in node.inputs]
    free = node.clone_with_new_inputs(inputs, strict=False).outputs[-1]
    density = pm.logp(free, model.rvs_to_values[variable])
    graphs = [density, (deviation * variable.shape[0]) ** -2.0, pt.log(no_penalty / deviation)]
    return SumPenalty(*model.replace_rvs_by_values([g.astype("float64") for g in graphs]))
