"""Speed and efficiency, as ratios within one run and on one thread: ``python -m benchmarks``."""

import os

# Before NumPy and Numba are imported; processes started from here inherit it.
for _library in ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR", "NUMBA"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"
