"""Cholesky factors of a precision matrix whose entries stay where they are, and draws by them.

A matrix P = F F^T is factorised as P = L L^T in an order that keeps L sparse, by rows of L, each
from those before it (T. A. Davis, Direct Methods for Sparse Linear Systems, 2006, section 4.7; the
order and the entries of L are SuperLU's, found once). A chain has one entry a row, areas on a map a
few dozen. Where factors cross, its last rows are nearly full: LAPACK factorises what is left there,
and the whole matrix where all of L would be nearly full.
"""

import math
from typing import Protocol

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dtrmv, dtrsm
from scipy.sparse import coo_array, csr_array
from scipy.sparse.linalg import splu

from pymc_kameleon.latent_gp.gaussian.sites import cholesky_overwriting
from pymc_kameleon.mcmc.bridge.jit import jit

FULL = 0.25
"""Share of the entries on and below the diagonal from which a factor is kept as a whole matrix."""

TAIL, LEAST_TAIL = 0.5, 50
"""Share of entries from which the last rows and columns of a factor are kept as a whole matrix, and
how many they are at least."""


class Root(Protocol):
    """A square root F of a precision P = F F^T, and log |P| / 2."""

    half_log_determinant: float

    def solved(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-1 x for the rows x of an array (n, M)."""

    def drawn(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-T x for the rows x of an array (n, M)."""

    def transpose_times(self, x: np.ndarray) -> np.ndarray:
        """Return F^T x for `x` (M,)."""


def covariance_times(root: Root, x: np.ndarray) -> np.ndarray:
    """Return P^-1 x for `x` (M,)."""
    return root.drawn(root.solved(x[None]))[0]


class Pattern:
    """Entries of a symmetric matrix (M, M) on and below its diagonal, at `rows` and `columns`."""

    def __init__(self, rows: np.ndarray, columns: np.ndarray, size: int):
        self.rows, self.columns, self.size = rows, columns, size
        is_own = rows == columns
        # No entry of the factor of such a matrix is 0 by chance.
        values = np.where(is_own, 0.0, -1.0)
        degrees = np.bincount(rows, ~is_own, size) + np.bincount(columns, ~is_own, size)
        entries = coo_array((values, (rows, columns)), shape=(size, size))
        matrix = entries + entries.T + coo_array((degrees + 1.0, (np.arange(size),) * 2))
        factors = splu(
            matrix.tocsc(),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
        lower = factors.L.tocsc()
        self.is_full = lower.nnz > FULL * 0.5 * size * (size + 1)
        if self.is_full:
            return
        lower.sort_indices()
        by_row = csr_array(lower)
        by_row.sort_indices()
        self.order = factors.perm_c.astype(np.int64)
        new = np.sort(np.stack([self.order[rows], self.order[columns]]), axis=0)
        by_new_row = np.argsort(new[1], kind="stable")
        starts = np.searchsorted(new[1][by_new_row], np.arange(size + 1))
        self._entries = starts, new[0][by_new_row], by_new_row
        first = _first_of_tail(lower.indptr)
        lower_starts = lower.indptr[: first + 1].astype(np.int64)
        self._lower = lower_starts, lower.indices[: lower_starts[-1]].astype(np.int64)
        self._by_row = by_row.indptr.astype(np.int64), by_row.indices.astype(np.int64)

    def root(self, values: np.ndarray) -> "Root":
        """Factorise the matrix with these entries; LinAlgError if it is not positive definite."""
        if self.is_full:
            matrix = np.zeros((self.size, self.size))
            matrix[self.rows, self.columns] = values
            return WholeRoot(matrix)
        starts, rows = self._lower
        found, work = np.empty(rows.size), np.zeros(self.size)
        n_left = self.size - (starts.size - 1)
        tail = np.zeros((n_left, n_left))
        if not _factor_into(
            values,
            *self._entries,
            starts,
            rows,
            *self._by_row,
            work,
            starts[:-1].copy(),
            found,
            tail,
        ):
            raise LinAlgError("A precision is not positive definite.")
        return SparseRoot(self.order, starts, rows, found, cholesky_overwriting(tail))


def _first_of_tail(starts):
    """Return the first column of the last ones that are nearly full, M if there are too few."""
    size = starts.size - 1
    n_left = np.arange(size, -1, -1)
    n_entries = starts[-1] - starts
    is_tail = (n_entries > TAIL * 0.5 * n_left * (n_left + 1)) & (n_left >= LEAST_TAIL)
    return int(np.argmax(is_tail)) if np.any(is_tail) else size


class WholeRoot:
    """That of a matrix whose entries on and below the diagonal are given; it is overwritten."""

    def __init__(self, matrix: np.ndarray):
        self._root = cholesky_overwriting(matrix)
        self.half_log_determinant = float(np.log(np.diagonal(self._root)).sum())
        if not math.isfinite(self.half_log_determinant):
            raise LinAlgError("A precision is not finite.")

    def solved(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-1 x for each row."""
        # In Fortran order, F^T is upper triangular.
        return dtrsm(1.0, self._root.T, rows, side=1, lower=0)

    def drawn(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-T x for each row."""
        return dtrsm(1.0, self._root.T, rows.T, lower=0).T

    def transpose_times(self, x: np.ndarray) -> np.ndarray:
        """Return F^T x."""
        return dtrmv(self._root.T, x, lower=0)


class SparseRoot:
    """L of the matrix whose row i has the place `order` (M,) at i.

    Its first columns are compressed, and the `tail` is the rest of it, not read above its diagonal.
    """

    def __init__(self, order, starts, rows, values, tail):
        self._order, self._lower, self._tail = order, (starts, rows, values), tail
        self._n = starts.size - 1
        diagonal = np.concatenate([values[starts[:-1]], np.diagonal(tail)])
        self.half_log_determinant = float(np.log(diagonal).sum())
        if not math.isfinite(self.half_log_determinant):
            raise LinAlgError("A precision is not finite.")

    def solved(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-1 x for each row, which is L^-1 x in the order of L."""
        out = np.empty(rows.shape)
        out[:, self._order] = rows
        _solve(*self._lower, out)
        if self._tail.size:
            out[:, self._n :] = dtrsm(1.0, self._tail.T, out[:, self._n :], side=1, lower=0)
        return out

    def drawn(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-T x for each row."""
        out = np.array(rows, order="C")
        if self._tail.size:
            out[:, self._n :] = dtrsm(1.0, self._tail.T, out[:, self._n :].T, lower=0).T
        _solve_transposed(*self._lower, out)
        return out[:, self._order]

    def transpose_times(self, x: np.ndarray) -> np.ndarray:
        """Return F^T x."""
        out = np.empty(x.size)
        out[self._order] = x
        _times_transposed(*self._lower, out)
        if self._tail.size:
            out[self._n :] = dtrmv(self._tail.T, out[self._n :], lower=0)
        return out


class UpdatedRoot:
    r"""That of P = F F^T + V^T diag(weights) V for a few rows V (k, M); no weight is 0.

    With F^{-1} V^\top = Y R and G = I + R diag(weights) R^T, P = F (I + Y (G - I) Y^T) F^T. The
    middle has the symmetric root I + Y (G^(1/2) - I) Y^T. LinAlgError if G has none.
    """

    def __init__(self, root: Root, rows: np.ndarray, weights: np.ndarray):
        self._root = root
        self._basis, upper = np.linalg.qr(root.solved(rows).T)
        inner = np.eye(len(weights)) + (upper * weights) @ upper.T
        values, vectors = np.linalg.eigh(inner)
        if not values[0] > 0:
            raise LinAlgError("A precision is not positive definite.")
        self.half_log_determinant = root.half_log_determinant + 0.5 * float(np.log(values).sum())
        self._more = (vectors * (np.sqrt(values) - 1.0)) @ vectors.T
        self._less = (vectors * (1.0 / np.sqrt(values) - 1.0)) @ vectors.T

    def solved(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-1 x for each row."""
        return self._less_along(self._root.solved(rows))

    def drawn(self, rows: np.ndarray) -> np.ndarray:
        """Return F^-T x for each row."""
        return self._root.drawn(self._less_along(rows))

    def _less_along(self, rows):
        return rows + ((rows @ self._basis) @ self._less) @ self._basis.T

    def transpose_times(self, x: np.ndarray) -> np.ndarray:
        """Return F^T x."""
        z = self._root.transpose_times(x)
        return z + self._basis @ (self._more @ (self._basis.T @ z))


@jit
def _factor_into(
    values,
    starts,
    columns,
    entries,
    lower_starts,
    rows,
    row_starts,
    row_columns,
    work,
    ends,
    out,
    tail,
):
    """Write the first columns of L; False where a pivot is not positive. `work` (M,) is zeros.

    `ends` (n,) are where the next entry of each of these columns goes, at first its start. What
    is left of the matrix after them is written into `tail`, on its diagonal and below.
    """
    n = ends.size
    for k in range(work.size):
        pivot = 0.0
        for p in range(starts[k], starts[k + 1]):
            if columns[p] == k:
                pivot += values[entries[p]]
            else:
                work[columns[p]] += values[entries[p]]
        for q in range(row_starts[k], row_starts[k + 1] - 1):
            j = row_columns[q]
            if j >= n:
                break
            entry = work[j] / out[lower_starts[j]]
            work[j] = 0.0
            for p in range(lower_starts[j] + 1, ends[j]):
                work[rows[p]] -= out[p] * entry
            out[ends[j]] = entry
            ends[j] += 1
            pivot -= entry * entry
        if not pivot > 0.0:
            return False
        if k >= n:
            for j in range(n, k):
                tail[k - n, j - n] = work[j]
                work[j] = 0.0
            tail[k - n, k - n] = pivot
            continue
        out[ends[k]] = math.sqrt(pivot)
        ends[k] += 1
    return True


@jit
def _solve(starts, rows, values, vectors):
    """L^-1 x for each of `vectors` (n, M), in place."""
    for x in vectors:
        for j in range(starts.size - 1):
            x[j] /= values[starts[j]]
            for p in range(starts[j] + 1, starts[j + 1]):
                x[rows[p]] -= values[p] * x[j]


@jit
def _solve_transposed(starts, rows, values, vectors):
    """L^-T x for each of `vectors` (n, M), in place."""
    for x in vectors:
        for j in range(starts.size - 2, -1, -1):
            total = x[j]
            for p in range(starts[j] + 1, starts[j + 1]):
                total -= values[p] * x[rows[p]]
            x[j] = total / values[starts[j]]


@jit
def _times_transposed(starts, rows, values, x):
    """L^T x, in place."""
    for j in range(starts.size - 1):
        total = 0.0
        for p in range(starts[j], starts[j + 1]):
            total += values[p] * x[rows[p]]
        x[j] = total
