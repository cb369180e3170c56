"""Speed and efficiency, as ratios within one run and on one thread: ``python -m benchmarks``."""

import os

LIBRARIES = ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR", "NUMBA")
ALL_THREADS = "BENCHMARKS_ALL_THREADS"
"""Variable of the environment that leaves the threads as users have them."""

# Before NumPy and Numba are imported; processes started from here inherit it.
if ALL_THREADS not in os.environ:
    os.environ.update({f"{library}_NUM_THREADS": "1" for library in LIBRARIES})
