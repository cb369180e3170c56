r"""Sine and cosine that the compiler vectorises, in loops over arrays.

With k the integer nearest to 2 x / pi, r = x - k pi / 2 is at most pi / 4 in size, and eight terms
of each series are enough for double precision. Up to |x| = 1e6 the error is below 2e-16; it grows
with |x|, as that of an angle does.

References
----------
W. J. Cody and W. Waite (1980), Software Manual for the Elementary Functions, chapter 8.
"""

import math

from pymc_kameleon.mcmc.exponential import ROUNDING, bits, compiled_as

__all__ = ["sine_and_cosine"]

INVERSE_HALF_PI = 2.0 / math.pi
HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
"""The first two have 33 bits, so that their products with k are exact."""

LARGEST = 1e15
"""Size of an angle from which its last bit says nothing of its direction: 0 is taken."""

S3, S5, S7, S9, S11, S13, S15, S17 = ((-1) ** (i // 2) / math.factorial(i) for i in range(3, 18, 2))
C2, C4, C6, C8, C10, C12, C14, C16 = ((-1) ** (i // 2) / math.factorial(i) for i in range(2, 17, 2))


def by_series(x):
    """Return sine and cosine of x, for Numba to compile with the freedoms `FUSED`."""
    if math.fabs(x) > LARGEST:
        x = 0.0
    k = (x * INVERSE_HALF_PI + ROUNDING) - ROUNDING
    r = ((x - k * HALF_PI[0]) - k * HALF_PI[1]) - k * HALF_PI[2]
    z = r * r
    sine, cosine = S17, C16
    for s, c in ((S15, C14), (S13, C12), (S11, C10), (S9, C8), (S7, C6), (S5, C4), (S3, C2)):
        sine = sine * z + s
        cosine = cosine * z + c
    sine = sine * z * r + r
    cosine = cosine * z + 1.0
    quadrant = bits(k + ROUNDING)
    if quadrant & 1:
        sine, cosine = cosine, -sine
    if quadrant & 2:
        sine, cosine = -sine, -cosine
    return sine, cosine


@compiled_as(by_series)
def sine_and_cosine(x):
    """Return sine and cosine of a float; in compiled code by `by_series`."""
    return math.sin(x), math.cos(x)
