r"""How location and spread of each coordinate change with another, and moves that follow it.

Of points of a density, coordinate i is taken for :math:`x_i = l_{ij}(u) + e^{s_{ij} u} z_i`, where
u is coordinate j, standardised, and l a quadratic. A move of j by h standard deviations that keeps
every :math:`z_i` is one to :math:`x_i^* = l_{ij}(u + h) + e^{s_{ij} h} (x_i - l_{ij}(u))`. For a
symmetric density of h, log q(x | x*) - log q(x* | x) is then :math:`h \sum_i s_{ij}`, the log of
the Jacobian, as the same move by -h leads back (Liu & Sabatti 2000). Of a funnel s_ij is 1/2 of the
standard deviation of its axis j, of a banana l_ij is its bend.

References
----------
J. S. Liu and C. Sabatti (2000), Generalised Gibbs sampler and multigrid Monte Carlo for Bayesian
computation, Biometrika 87, 353-369.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit, jit_inner, jitable
from pymc_kameleon.mcmc.linalg import copy_into

N_COEFFICIENTS = 4
"""Of a trend: constant, linear and quadratic coefficient of the location, and slope of the log of
the spread."""

SIGNIFICANT = 7.0
"""Standard errors from zero, from which a coefficient is not taken for zero."""

STEEPEST = 3.0
"""Largest slope of the log of the spread, a standard deviation."""

LARGEST = 10.0
"""Coefficient of a location, in standard deviations, from which it was fitted to too few points."""

FARTHEST = 5.0
"""Largest change of the log of a spread in a move: beyond it rounding errors would be accepted."""

LEAST_RESIDUAL = 1e-4
"""Of the root mean square, taken for what is smaller."""

ITERATIONS = 20
"""At most, of location, given the spread, and spread, given the location."""


@jit_inner
def _slope(score, squares, information):
    """Return a coefficient of least squares, or 0 if that may be chance.

    `score` is the sum of the products of regressor and residual, `squares` that of their squares,
    and `information` that of the squares of the regressor.
    """
    is_chance = score * score <= SIGNIFICANT * SIGNIFICANT * squares
    return 0.0 if is_chance or information <= 0.0 else score / information


@jit_inner
def _fit_location(u, x, weights, trend, residuals):
    """Weighted least squares of `x` (n,) on orthogonal polynomials of `u`, one after the other."""
    n = u.size
    total = mean = constant = 0.0
    for a in range(n):
        total += weights[a]
        mean += weights[a] * u[a]
        constant += weights[a] * x[a]
    mean, constant = mean / total, constant / total
    second = third = score = squares = 0.0
    for a in range(n):
        p, residuals[a] = u[a] - mean, x[a] - constant
        product = weights[a] * p * residuals[a]
        second += weights[a] * p * p
        third += weights[a] * p * p * p
        score += product
        squares += product * product
    linear = _slope(score, squares, second)
    skewness, offset = third / second if second > 0.0 else 0.0, second / total
    fourth = score = squares = 0.0
    for a in range(n):
        p = u[a] - mean
        residuals[a] -= linear * p
        bend = p * p - skewness * p - offset
        product = weights[a] * bend * residuals[a]
        fourth += weights[a] * bend * bend
        score += product
        squares += product * product
    quadratic = _slope(score, squares, fourth)
    for a in range(n):
        p = u[a] - mean
        residuals[a] -= quadratic * (p * p - skewness * p - offset)
    slope = linear - quadratic * skewness
    trend[0] = constant - slope * mean + quadratic * (mean * mean - offset)
    trend[1] = slope - 2.0 * quadratic * mean
    trend[2] = quadratic


@jit_inner
def _fit_spread(u, residuals):
    """Slope of the logs of residuals (n,) on `u`, or 0 if that may be chance; they are changed."""
    n, mean_u, mean, square = u.size, 0.0, 0.0, 0.0
    for a in range(n):
        square += residuals[a] * residuals[a] / n
    least = LEAST_RESIDUAL * math.sqrt(square) + 1e-300
    for a in range(n):
        residuals[a] = math.log(max(abs(residuals[a]), least))
        mean_u += u[a] / n
        mean += residuals[a] / n
    information = score = squares = 0.0
    for a in range(n):
        p = u[a] - mean_u
        product = p * (residuals[a] - mean)
        information += p * p
        score += product
        squares += product * product
    return min(max(_slope(score, squares, information), -STEEPEST), STEEPEST)


@jit(allocates=True)
def fit_trends(points, location, deviations, trends):
    """Learn `trends` (d, d, 4), of the second coordinate with the first, from `points` (n, d).

    The first is standardised by `location` (d,) and `deviations` (d,).
    """
    n, dim = points.shape
    u, x, weights, residuals = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    trends[:] = 0.0
    for j in range(dim):
        for a in range(n):
            u[a] = (points[a, j] - location[j]) / deviations[j]
        for i in range(dim):
            if i != j:
                trend = trends[j, i]
                for a in range(n):
                    x[a] = points[a, i]
                for _ in range(ITERATIONS):
                    for a in range(n):
                        weights[a] = math.exp(-2.0 * trend[3] * u[a])
                    _fit_location(u, x, weights, trend, residuals)
                    before, trend[3] = trend[3], _fit_spread(u, residuals)
                    if abs(trend[3] - before) < 0.01:
                        break
                if max(abs(trend[1]), abs(trend[2])) > LARGEST * deviations[i]:
                    trend[:] = 0.0


@jitable
def _location(trend, u):
    return trend[0] + (trend[1] + trend[2] * u) * u


@jitable
def pick(cumulative, uniform):
    """Return which of `cumulative` probabilities (d,) a uniform number falls into."""
    j = 0
    while j < cumulative.size - 1 and cumulative[j] <= uniform:
        j += 1
    return j


@jitable
def propose_along(trends, location, deviations, j, change, x, out):
    """Write `x` (d,) with coordinate j changed, and the others after it, into `out`.

    Returns log q(x | x*) - log q(x* | x), -inf for a change that no spread follows.
    """
    copy_into(x, out)
    out[j] += change
    u, h, total = (x[j] - location[j]) / deviations[j], change / deviations[j], 0.0
    for i in range(x.size):
        trend = trends[j, i]
        if trend[1] != 0.0 or trend[2] != 0.0 or trend[3] != 0.0:
            log_spread = trend[3] * h
            if abs(log_spread) > FARTHEST:
                return -np.inf
            here, there = _location(trend, u), _location(trend, u + h)
            out[i] = there + math.exp(log_spread) * (x[i] - here)
            total += log_spread
    return total


def picks(trends: np.ndarray) -> np.ndarray:
    """Cumulative probabilities (d,) of the coordinate that a move along `trends` (d, d, 4) changes.

    They go with the number of others whose spread follows it.
    """
    wanted = 0.1 + np.count_nonzero(trends[:, :, 3], axis=1)
    return np.cumsum(wanted) / np.sum(wanted)
