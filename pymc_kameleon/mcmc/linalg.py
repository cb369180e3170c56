"""Linear algebra in loops that compile fast: vectors, Cholesky factors and their updates."""

import math

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import SIMD, jit_inner


@jit_inner
def copy_into(source, out):
    """Copy a vector. Loops like this one compile in a fraction of the time of array expressions."""
    for i in range(out.size):
        out[i] = source[i]


@jit_inner
def copy_matrix_into(source, out):
    """Copy a matrix."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = source[i, j]


@jit_inner
def add_into(first, second, out):
    """Write the sum of two vectors into `out`, which may be one of them."""
    for i in range(out.size):
        out[i] = first[i] + second[i]


@jit_inner
def cholesky_in_place(matrix):
    """Replace the lower triangle by the Cholesky factor's; False if there is none."""
    dim = matrix.shape[0]
    for i in range(dim):
        for j in range(i + 1):
            total = matrix[i, j]
            for k in range(j):
                total -= matrix[i, k] * matrix[j, k]
            if i > j:
                matrix[i, j] = total / matrix[j, j]
            elif total > 0.0 and total < np.inf:
                matrix[i, i] = math.sqrt(total)
            else:
                return False
    return True


@jit_inner
def factor_times(factor, vector, out):
    """Lower-triangular `factor` times `vector`, into `out`."""
    for i in range(vector.size):
        total = 0.0
        for j in range(i + 1):
            total += factor[i, j] * vector[j]
        out[i] = total


@jit_inner
def solve_factor(factor, vector, out):
    """Solve `factor` @ out = `vector` for a lower-triangular `factor`; `out` may be `vector`."""
    for i in range(vector.size):
        total = vector[i]
        for j in range(i):
            total -= factor[i, j] * out[j]
        out[i] = total / factor[i, i]


@jit_inner
def rank_one_update(factor, vector, keep, add):
    """Replace L by the Cholesky factor of keep L L^T + add v v^T; overwrites `vector` too."""
    dim = vector.size
    root = math.sqrt(keep)
    weight = math.sqrt(add)
    for i in range(dim):
        vector[i] *= weight
    for k in range(dim):
        old = root * factor[k, k]
        new = math.sqrt(old * old + vector[k] * vector[k])
        cosine, sine = new / old, vector[k] / old
        factor[k, k] = new
        for i in range(k + 1, dim):
            factor[i, k] = (root * factor[i, k] + sine * vector[i]) / cosine
            vector[i] = cosine * vector[i] - sine * factor[i, k]


@jit_inner(fastmath=SIMD)
def dot(first, second, count):
    """Inner product of the first `count` entries."""
    total = 0.0
    for i in range(count):
        total += first[i] * second[i]
    return total


@jit_inner(fastmath=SIMD)
def squared_distances(point, points, count, out):
    """Squared distances of `point` (d,) to the first `count` columns of `points`, into `out`.

    Four coordinates at a time, so that sums are loaded and stored a quarter as often.
    """
    dim = point.size
    for j in range(count):
        out[j] = 0.0
    for k in range(dim % 4):
        for j in range(count):
            difference = points[k, j] - point[k]
            out[j] += difference * difference
    for k in range(dim % 4, dim, 4):
        first, second, third, fourth = point[k], point[k + 1], point[k + 2], point[k + 3]
        for j in range(count):
            one = points[k, j] - first
            two = points[k + 1, j] - second
            three = points[k + 2, j] - third
            four = points[k + 3, j] - fourth
            out[j] += (one * one + two * two) + (three * three + four * four)


@jit_inner(fastmath=SIMD)
def solve_lower(factor, count, vector):
    """Overwrite `vector` with L^-1 `vector`, L the leading (count, count) block of `factor`.

    Rows are inner products of contiguous numbers, as fast as a product with a stored inverse and as
    accurate as substitution is. Two rows share each number of the vector.
    """
    for i in range(0, count - 1, 2):
        one, two = 0.0, 0.0
        for j in range(i):
            one += factor[i, j] * vector[j]
            two += factor[i + 1, j] * vector[j]
        vector[i] = (vector[i] - one) / factor[i, i]
        two += factor[i + 1, i] * vector[i]
        vector[i + 1] = (vector[i + 1] - two) / factor[i + 1, i + 1]
    if count % 2 == 1:
        last = count - 1
        vector[last] -= dot(factor[last], vector, last)
        vector[last] /= factor[last, last]


@jit_inner(fastmath=SIMD)
def solve_lower_rows(factor, count, vectors):
    """`solve_lower` for all rows of `vectors` (n, at least count), two by two.

    Two rows of each, so that each number loaded serves two products.
    """
    n = vectors.shape[0]
    if n % 2 == 1:
        solve_lower(factor, count, vectors[n - 1])
    for k in range(0, n - 1, 2):
        for i in range(0, count, 2):
            i2 = min(i + 1, count - 1)
            s11, s12, s21, s22 = 0.0, 0.0, 0.0, 0.0
            for j in range(i):
                s11 += factor[i, j] * vectors[k, j]
                s12 += factor[i, j] * vectors[k + 1, j]
                s21 += factor[i2, j] * vectors[k, j]
                s22 += factor[i2, j] * vectors[k + 1, j]
            vectors[k, i] = (vectors[k, i] - s11) / factor[i, i]
            vectors[k + 1, i] = (vectors[k + 1, i] - s12) / factor[i, i]
            if i2 > i:
                s21 += factor[i2, i] * vectors[k, i]
                s22 += factor[i2, i] * vectors[k + 1, i]
                vectors[k, i2] = (vectors[k, i2] - s21) / factor[i2, i2]
                vectors[k + 1, i2] = (vectors[k + 1, i2] - s22) / factor[i2, i2]


@jit_inner(fastmath=SIMD)
def solve_upper(factor, count, vector):
    """Overwrite `vector` with L^-T `vector`, row by row of L."""
    for i in range(count - 1, -1, -1):
        vector[i] /= factor[i, i]
        entry = vector[i]
        for j in range(i):
            vector[j] -= entry * factor[i, j]


@jit_inner(fastmath=SIMD)
def solve_upper_rows(factor, count, vectors):
    """`solve_upper` for all rows of `vectors` (n, at least count), two by two."""
    n = vectors.shape[0]
    if n % 2 == 1:
        solve_upper(factor, count, vectors[n - 1])
    for k in range(0, n - 1, 2):
        for i in range(count - 1, -1, -1):
            one, two = vectors[k, i] / factor[i, i], vectors[k + 1, i] / factor[i, i]
            vectors[k, i], vectors[k + 1, i] = one, two
            for j in range(i):
                vectors[k, j] -= one * factor[i, j]
                vectors[k + 1, j] -= two * factor[i, j]
