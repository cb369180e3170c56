"""Gaussian proposals: the covariance of KAMH, and the linear algebra of its acceptance ratio."""

import math

import numba
import numpy as np

from pymc_kameleon.compiled import SIMD

__all__ = [
    "add_into",
    "centred_scatter",
    "copy_into",
    "factor_difference",
    "factor_times",
    "proposal_factor",
    "rank_one_log_ratio",
    "rank_one_update",
    "reverse_log_density",
    "solve_factor",
]


@numba.njit(cache=True, fastmath=SIMD)
def centred_scatter(gradients, out):
    """M H M^T, with M = 2 `gradients` (d, n) and H = I - 11^T/n, into `out` (d, d).

    Rows are taken two at a time, so that each number loaded serves two products.
    """
    dim, n = gradients.shape
    sums = np.empty(dim)
    for a in range(dim):
        total = 0.0
        for j in range(n):
            total += gradients[a, j]
        sums[a] = total
    inverse = 1.0 / max(n, 1)
    for a in range(0, dim, 2):
        a2 = min(a + 1, dim - 1)
        for b in range(0, a + 1, 2):
            b2 = min(b + 1, dim - 1)
            s11, s12, s21, s22 = 0.0, 0.0, 0.0, 0.0
            for j in range(n):
                s11 += gradients[a, j] * gradients[b, j]
                s12 += gradients[a, j] * gradients[b2, j]
                s21 += gradients[a2, j] * gradients[b, j]
                s22 += gradients[a2, j] * gradients[b2, j]
            out[a, b] = 4.0 * (s11 - sums[a] * sums[b] * inverse)
            out[a, b2] = 4.0 * (s12 - sums[a] * sums[b2] * inverse)
            out[a2, b] = 4.0 * (s21 - sums[a2] * sums[b] * inverse)
            out[a2, b2] = 4.0 * (s22 - sums[a2] * sums[b2] * inverse)
    for a in range(dim):
        for b in range(a):
            out[b, a] = out[a, b]


@numba.njit(cache=True)
def proposal_factor(scatter, gamma, nu, out):
    """Lower Cholesky factor of R = gamma^2 I + nu^2 `scatter`, into `out`.

    KAMH, proposition 2, with `scatter` = M H M^T. Returns whether R is positive definite.
    """
    dim = scatter.shape[0]
    for i in range(dim):
        for j in range(i + 1):
            total = nu * nu * scatter[i, j]
            if i == j:
                total += gamma * gamma
            for k in range(j):
                total -= out[i, k] * out[j, k]
            if i > j:
                out[i, j] = total / out[j, j]
            elif total > 0.0 and total < np.inf:
                out[i, i] = math.sqrt(total)
            else:
                return False
    return True


@numba.njit(cache=True)
def copy_into(source, out):
    """Copy a vector. Loops like this one compile in a fraction of the time of array expressions."""
    for i in range(out.size):
        out[i] = source[i]


@numba.njit(cache=True)
def add_into(first, second, out):
    """Write the sum of two vectors into `out`, which may be one of them."""
    for i in range(out.size):
        out[i] = first[i] + second[i]


@numba.njit(cache=True)
def factor_times(factor, vector, out):
    """Lower-triangular `factor` times `vector`, into `out`."""
    for i in range(vector.size):
        total = 0.0
        for j in range(i + 1):
            total += factor[i, j] * vector[j]
        out[i] = total


@numba.njit(cache=True)
def solve_factor(factor, vector, out):
    """Solve `factor` @ out = `vector` for a lower-triangular `factor`; `out` may be `vector`."""
    for i in range(vector.size):
        total = vector[i]
        for j in range(i):
            total -= factor[i, j] * out[j]
        out[i] = total / factor[i, i]


@numba.njit(cache=True)
def factor_difference(factor, points, i, j, scale, noise, normals, out):
    """`factor` @ (scale (points[:, i] - points[:, j]) + noise normals), into `out`."""
    for row in range(out.size):
        total = 0.0
        for k in range(row + 1):
            step = scale * (points[k, i] - points[k, j]) + noise * normals[k]
            total += factor[row, k] * step
        out[row] = total


@numba.njit(cache=True)
def reverse_log_density(forward_factor, reverse_factor, normals, displacement):
    """Return log N(x; x*, R(x*)) - log N(x*; x, R(x)).

    The factors are those of R(x) and R(x*); x* - x = `displacement` = forward_factor @ normals.
    """
    back = np.empty(normals.size)
    solve_factor(reverse_factor, displacement, back)
    total = 0.0
    for i in range(normals.size):
        total += 0.5 * (normals[i] * normals[i] - back[i] * back[i])
        total += math.log(forward_factor[i, i] / reverse_factor[i, i])
    return total


@numba.njit(cache=True)
def rank_one_log_ratio(forward, reverse, displacement, gamma, nu):
    """Return log N(x; x*, R*) - log N(x*; x, R) for R = gamma^2 I + nu^2 c c^T.

    c is `forward` in R and `reverse` in R*; x* - x = `displacement`. Inverse and determinant of a
    rank-one covariance are those of Sherman and Morrison.
    """
    forward_size, reverse_size, forward_dot, reverse_dot = 0.0, 0.0, 0.0, 0.0
    for i in range(displacement.size):
        forward_size += forward[i] * forward[i]
        reverse_size += reverse[i] * reverse[i]
        forward_dot += forward[i] * displacement[i]
        reverse_dot += reverse[i] * displacement[i]
    isotropic, rank_one = gamma * gamma, nu * nu
    forward_variance = isotropic + rank_one * forward_size
    reverse_variance = isotropic + rank_one * reverse_size
    explained = reverse_dot**2 / reverse_variance - forward_dot**2 / forward_variance
    return 0.5 * (rank_one / isotropic * explained + math.log(forward_variance / reverse_variance))


@numba.njit(cache=True)
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
