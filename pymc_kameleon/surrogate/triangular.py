"""Triangular systems with rows of a fixed-capacity Cholesky factor: solve, and delete a row."""

import math

import numba
import numpy as np

from pymc_kameleon.compiled import SIMD

__all__ = ["delete_row", "dot", "solve_lower", "solve_upper"]


@numba.njit(cache=True, fastmath=SIMD)
def dot(first, second, count):
    """Inner product of the first `count` entries."""
    total = 0.0
    for i in range(count):
        total += first[i] * second[i]
    return total


@numba.njit(cache=True, fastmath=SIMD)
def solve_lower(factor, count, vector):
    """Overwrite `vector` with L^-1 `vector`, L the leading (count, count) block of `factor`.

    Each row is one inner product of contiguous numbers, as fast as a product with a stored inverse
    and as accurate as substitution is.
    """
    for i in range(count):
        total = 0.0
        for j in range(i):
            total += factor[i, j] * vector[j]
        vector[i] = (vector[i] - total) / factor[i, i]


@numba.njit(cache=True, fastmath=SIMD)
def solve_upper(factor, count, vector):
    """Overwrite `vector` with L^-T `vector`, row by row of L."""
    for i in range(count - 1, -1, -1):
        vector[i] /= factor[i, i]
        entry = vector[i]
        for j in range(i):
            vector[j] -= entry * factor[i, j]


@numba.njit(cache=True)
def delete_row(factor, count, index):
    """Turn the factor of K into that of K without row and column `index`, in O(t^2).

    Below the deleted row, L' L'^T = L L^T + l l^T with l the deleted column: a rank-one update by
    rotations, which adds and so loses no accuracy.
    """
    size = count - 1 - index
    cosines, sines = np.empty(size), np.empty(size)
    for i in range(size):
        row, old = index + i, index + i + 1
        for j in range(index):
            factor[row, j] = factor[old, j]
        carried = factor[old, index]
        for j in range(i):
            entry = factor[old, index + 1 + j]
            factor[row, index + j] = cosines[j] * entry + sines[j] * carried
            carried = cosines[j] * carried - sines[j] * entry
        entry = factor[old, old]
        diagonal = math.sqrt(entry * entry + carried * carried)
        factor[row, row] = diagonal
        cosines[i], sines[i] = entry / diagonal, carried / diagonal
