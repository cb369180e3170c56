"""A kernel of your own: a Gaussian that is longer in some directions than in others.

k(x, y) = exp(-|W (x - y)|^2 / 2 c^2) with fixed weights W and the bandwidth c.
"""

import numba
import numpy as np
import pymc as pm

from pymc_kameleon import FastKameleonStep, KameleonStep
from pymc_kameleon.kernels import CustomKernel

WEIGHTS = np.array([1.0, 0.5, 0.25])


@numba.njit
def value(x, y, bandwidth):
    """Return k(x, y) for x and y of shape (d,)."""
    return np.exp(-np.sum((WEIGHTS * (x - y)) ** 2) / (2 * bandwidth**2))


@numba.njit
def gradient(x, y, bandwidth):
    """Return the gradient of k in x, shape (d,): what `KameleonStep` needs."""
    return value(x, y, bandwidth) * WEIGHTS**2 * (y - x) / bandwidth**2


def frequencies(size, dim, bandwidth, rng):
    """Draw from the spectrum of k, shape (size, d): what `FastKameleonStep` needs."""
    return rng.standard_normal((size, dim)) * WEIGHTS / bandwidth


weighted = CustomKernel(value, gradient, frequencies=frequencies)


if __name__ == "__main__":
    with pm.Model():
        x = pm.Normal("x", shape=3)
        pm.Potential("bend", -((x[1] - x[0] ** 2) ** 2))
        for step in (KameleonStep(kernel=weighted), FastKameleonStep(kernel=weighted)):
            idata = pm.sample(step=step, random_seed=1)
            print(idata.posterior["x"].mean(("chain", "draw")).values)
