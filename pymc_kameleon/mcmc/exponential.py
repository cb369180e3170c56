r"""An exponential that the compiler vectorises: in loops over arrays two to six times as fast.

With k the integer nearest to x / log 2, :math:`e^x = 2^k e^r` where r = x - k log 2 is at most
.35 in size, and 14 terms of the series of :math:`e^r` are enough for double precision. There is no
branch and no table. The error is below one unit in the last place.

References
----------
W. J. Cody and W. Waite (1980), Software Manual for the Elementary Functions, chapter 6.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from pymc_kameleon.mcmc.bridge.jit import compile_options

FUSED = {"contract"}
"""Fast-math freedom of the series; with others its rounding to integers would go."""

INVERSE_LOG_2 = 1.4426950408889634
LOG_2 = (0.6931471803691238, 1.9082149292705877e-10)
"""The first has 32 bits, so that its products with k are exact."""

ROUNDING = 6755399441055744.0
"""1.5 2^52: what is left of a number that is added to it is its nearest integer, in the last bits
of the sum."""

BIAS = 1023
LARGEST, SMALLEST = 709.782712893384, -745.1332191019412
"""Beyond them e^x overflows, or is nearer to 0 than to any other number."""

C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13 = (1.0 / math.factorial(i) for i in range(2, 14))


@intrinsic
def _bits(typingctx, x):
    """Return the bits of a float as an integer."""
    return types.int64(types.float64), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(64)
    )


@intrinsic
def _with_bits(typingctx, integer):
    """Return the float of which an integer has the bits."""
    return types.float64(types.int64), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


def _exp_by_series(x):
    k = (x * INVERSE_LOG_2 + ROUNDING) - ROUNDING
    r = (x - k * LOG_2[0]) - k * LOG_2[1]
    total = C13
    for c in (C12, C11, C10, C9, C8, C7, C6, C5, C4, C3, C2):
        total = total * r + c
    total = total * r * r + r + 1.0
    # In two factors: where e^x is subnormal or about to overflow, 2^k is out of range.
    half = (k * 0.5 + ROUNDING) - ROUNDING
    shift = BIAS - _bits(ROUNDING)
    one = _with_bits((_bits(half + ROUNDING) + shift) << 52)
    other = _with_bits((_bits(k - half + ROUNDING) + shift) << 52)
    value = total * one * other
    if x > LARGEST:
        value = np.inf
    if x < SMALLEST:
        value = 0.0
    return value


def exp(x):
    """Return e^x for a float; in compiled code by its series."""
    return math.exp(x)


@overload(exp, jit_options=compile_options(False, fastmath=FUSED))
def _exp_overload(x):
    return _exp_by_series if x == types.float64 else None
