"""Moves by the difference of two points that stand still (ter Braak & Vrugt 2008): symmetric."""

import math

from pymc_kameleon.mcmc.bridge.jit import jitable


@jitable
def usual_scale(dim):
    """Factor of differences that is best for a Gaussian in `dim` dimensions."""
    return 2.38 / math.sqrt(2.0 * dim)


@jitable
def two_of(n, first, second):
    """Two different indices below `n`, from two uniform numbers in [0, 1)."""
    i, j = int(first * n), int(second * (n - 1))
    return i, j + 1 if j >= i else j


@jitable
def picked_difference(n, first, second, jump, jump_share, scale):
    """Two different indices below `n`, and the factor of the difference of their points.

    It is `scale`, or with the probability `jump_share` 1, which crosses between modes. The first
    three numbers after `n` are uniform in [0, 1).
    """
    i, j = two_of(n, first, second)
    return i, j, 1.0 if jump < jump_share else scale


@jitable
def add_difference(x, points, i, j, scale, out):
    """`x` (d,) plus `scale` times the difference of two columns of `points` (d, n), into `out`."""
    for k in range(x.size):
        out[k] = x[k] + scale * (points[k, i] - points[k, j])
