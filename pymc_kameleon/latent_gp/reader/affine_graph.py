"""Affine graphs of a model, whose matrices are found from differences of what they return.

Columns that have no entry in one row together are found by one evaluation.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from scipy.sparse import csc_array, csr_array

from pymc_kameleon.latent_gp.reader.linear_predictor import perturbed
from pymc_kameleon.model.model_function import ModelFunction

MANY, N_PROBES, ROUNDS = 2000, 64, 12
"""Columns of a matrix from which they are not looked at one by one, but in so many random groups,
in so many rounds."""

TRIES = (1.0, 0.3, 0.03, 0.0)
"""Standard deviations of the values, about the model's start, at which a matrix is looked at."""


class Groups(NamedTuple):
    """Which entries of a matrix are not 0, and which of its columns are found together.

    `rows`, `columns` (n,) are those of the entries, by rows; `of_column` (M,) is the group of each
    column.
    """

    rows: np.ndarray
    columns: np.ndarray
    of_column: np.ndarray

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.of_column.max(initial=-1)) + 1


def grouped(pattern: csr_array) -> Groups:
    """Put columns of a pattern (N, M) together, of which none two have an entry in one row."""
    pattern.sort_indices()
    by_column = csc_array(pattern)
    taken: list[set[int]] = [set() for _ in range(pattern.shape[0])]
    of_column = np.zeros(pattern.shape[1], dtype=np.int64)
    for j, (begin, end) in enumerate(pairwise(by_column.indptr)):
        rows = by_column.indices[begin:end]
        near = set().union(*(taken[i] for i in rows))
        of_column[j] = next(k for k in range(len(near) + 1) if k not in near)
        for i in rows:
            taken[i].add(of_column[j])
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))
    return Groups(rows, pattern.indices.astype(np.int64), of_column)


class AffineGraph:
    """An affine graph (N,) of a vector (M,), other variables of the model given.

    `graph` is that of `vector`, and of shared variables. `extra` scalars are returned with it at 0.
    """

    def __init__(self, model, graph, vector, size, length, compile_kwargs, extra=()):
        outputs = [graph, *extra]
        self.function = ModelFunction(model, outputs, vector, size, compile_kwargs)
        self.size, self.length, self.n_extra = size, length, len(extra)
        self.groups = grouped(csr_array((length, size)))

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the graph (N,) and what is returned with it, at `x` (M,)."""
        out = np.empty(self.length + self.n_extra)
        self.function.into(x, out)
        return out

    def find_groups(self, matrices: list[csr_array]) -> None:
        """Find which entries the matrix has, from what `matrices_about` returned."""
        self.groups = grouped(sum(abs(matrix) for matrix in matrices))

    def matrices_about(self, shared) -> list[csr_array]:
        """Return the matrix (N, M) at two values of `shared` variables, near the present ones."""
        present, found = [(v, v.get_value()) for v in shared], []
        rng = np.random.default_rng(0)
        for scale in TRIES:
            for variable, value in present:
                variable.set_value(perturbed(value, scale, rng))
            with np.errstate(all="ignore"):
                matrix = matrix_of(lambda x: self.at(x)[: self.length], self.size)
            if np.all(np.isfinite(matrix.data)):
                found.append(matrix)
            if len(found) == 2:
                break
        for variable, value in present:
            variable.set_value(value)
        if not found:
            raise ValueError("A linear predictor is not finite near the start of the model.")
        return found

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what `at` does at 0, and the entries of the matrix in the order of `groups`."""
        start = self.at(np.zeros(self.size))
        rows, columns, of_column = self.groups
        changes = np.empty((self.groups.n_groups, self.length))
        for k in range(self.groups.n_groups):
            changes[k] = (self.at((of_column == k).astype(float)) - start)[: self.length]
        return start, changes[of_column[columns], rows]

    def matrix(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what `at` does at 0, and the matrix (N, M)."""
        start, entries = self.entries()
        matrix = np.zeros((self.length, self.size))
        matrix[self.groups.rows, self.groups.columns] = entries
        return start, matrix


def matrix_of(affine, size: int) -> csr_array:
    """Return the matrix (N, M) of an affine function of vectors (M,)."""
    start = affine(np.zeros(size))
    if size > MANY:
        found = _probed(affine, start, size)
        if found is not None:
            return found
    parts, x = [], np.zeros(size)
    for j in range(size):
        x[j] = 1.0
        change = affine(x) - start
        rows = np.flatnonzero(change)
        parts.append((change[rows], rows, np.full(rows.size, j)))
        x[j] = 0.0
    values, rows, columns = (np.concatenate(part) for part in zip(*parts, strict=True))
    return csr_array((values, (rows, columns)), shape=(start.size, size))


def _probed(affine, start, size):
    """Find a matrix with few entries a row from sums of random groups of its columns.

    An entry alone in its row of a group is told by sums with two more weights, whose ratios to the
    first say which column it is. None if some entries are never alone.
    """
    rng, known = np.random.default_rng(0), {}
    weights, x = 1.0 + rng.random((2, size)), rng.standard_normal(size)
    order = np.argsort(weights[0])
    in_order = weights[0][order]
    changes = affine(x) - start
    for _ in range(ROUNDS):
        group = rng.integers(N_PROBES, size=size)
        for k in range(N_PROBES):
            own = (group == k).astype(float)
            plain, *weighted = (affine(own * w) - start for w in (np.ones(size), *weights))
            rows = np.flatnonzero(plain)
            ratios = [w[rows] / plain[rows] for w in weighted]
            places = np.clip(np.searchsorted(in_order, ratios[0]), 1, size - 1)
            near = order[np.stack([places - 1, places])]
            nearer = np.argmin(np.abs(weights[0][near] - ratios[0]), axis=0)
            columns = near[nearer, np.arange(rows.size)]
            agree = [np.abs(w[columns] - r) < 1e-9 for w, r in zip(weights, ratios, strict=True)]
            alone = agree[0] & agree[1] & (own[columns] > 0)
            known |= {
                (i, j): value
                for i, j, value in zip(rows[alone], columns[alone], plain[rows[alone]], strict=True)
            }
        rows, columns = np.array(list(known), dtype=np.int64).reshape(-1, 2).T
        matrix = csr_array((list(known.values()), (rows, columns)), shape=(start.size, size))
        if np.allclose(matrix @ x, changes, rtol=1e-6, atol=1e-9 * np.abs(changes).max()):
            return matrix
    return None


def places_of(shapes):
    """Return where values of these shapes are in a vector that holds one after the other."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return np.split(np.arange(ends[-1]), ends[:-1])


def split_vector(variables, shapes):
    """Return a vector, and what of it stands for each of the variables, of these shapes."""
    parts = places_of(shapes)
    vector = pt.tensor("latent", dtype="float64", shape=(sum(map(len, parts)),))
    return vector, {
        variable: pt.specify_shape(vector[part[0] : part[-1] + 1].reshape(shape), shape).astype(
            variable.dtype
        )
        for variable, part, shape in zip(variables, parts, shapes, strict=True)
    }
