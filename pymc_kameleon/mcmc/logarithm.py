r"""Logarithms that the compiler vectorises, in loops over arrays.

x = 2^k m, with m between the square roots of 1/2 and of 2, is taken apart by its bits. With
s = (m - 1) / (m + 1), log m = 2 artanh s, of whose series in s^2, at most .03, ten terms are enough
for double precision. The error is below two units in the last place.

References
----------
W. J. Cody and W. Waite (1980), Software Manual for the Elementary Functions, chapter 5.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.exponential import BIAS, LOG_2, bits, compiled_as, exp, with_bits

__all__ = ["log1p_by_series", "log_by_series", "sigmoid_by_series", "softplus_by_series"]

TINY = 2.2250738585072014e-308
"""Smallest number that is not subnormal."""

TO_NORMAL, EXPONENT_TO_NORMAL = 2.0**54, 54.0

ROOT_HALF_BITS = 0x3FE6A09E667F3BCD
"""Of the square root of 1/2."""

FRACTION_BITS = 52
INTEGER, INTEGER_BITS = 4503599627370496.0, 0x4330000000000000
"""2^52 and its bits: a small integer is in the last bits of its sum with it."""

L1, L2, L3, L4, L5, L6, L7, L8, L9, L10 = (2.0 / (2 * i + 1) for i in range(1, 11))


def log_by_series(x):
    """Return log x, for Numba to compile with the freedoms `FUSED`."""
    is_subnormal = x < TINY
    i = bits(x * TO_NORMAL if is_subnormal else x)
    exponent = (i - ROOT_HALF_BITS + (BIAS << FRACTION_BITS)) >> FRACTION_BITS
    f = with_bits(i - ((exponent - BIAS) << FRACTION_BITS)) - 1.0
    k = with_bits(exponent | INTEGER_BITS) - (INTEGER + BIAS)
    k = k - EXPONENT_TO_NORMAL if is_subnormal else k
    s = f / (2.0 + f)
    z = s * s
    total = L10
    for c in (L9, L8, L7, L6, L5, L4, L3, L2, L1):
        total = total * z + c
    half = 0.5 * f * f
    # log m = f - half + s (half + s^2 total), the largest term last.
    value = k * LOG_2[0] - ((half - (s * (half + z * total) + k * LOG_2[1])) - f)
    if x == np.inf:
        value = np.inf
    if x == 0.0:
        value = -np.inf
    if not x >= 0.0:
        value = np.nan
    return value


@compiled_as(log_by_series, forceinline=True)
def log(x):
    """Return log x for a float; in compiled code by `log_by_series`."""
    return math.log(x)


def log1p_by_series(x):
    """Return log(1 + x), for Numba to compile with the freedoms `FUSED`."""
    y = 1.0 + x
    value = log(y) + (x - (y - 1.0)) / y
    if x == np.inf:
        value = np.inf
    if x == -1.0:
        value = -np.inf
    return value


@compiled_as(log1p_by_series, forceinline=True)
def log1p(x):
    """Return log(1 + x) for a float; in compiled code by `log1p_by_series`."""
    return math.log1p(x)


def softplus_by_series(x):
    """Return log(1 + e^x), for Numba to compile with the freedoms `FUSED`."""
    value = log1p(exp(-abs(x)))
    if x > 0.0:
        value += x
    return value


def sigmoid_by_series(x):
    """Return 1 / (1 + e^-x), for Numba to compile with the freedoms `FUSED`."""
    return 1.0 / (1.0 + exp(-x))
