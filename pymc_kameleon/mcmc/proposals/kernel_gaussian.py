"""The proposal of Kernel Adaptive Metropolis-Hastings (Sejdinovic et al. 2014, algorithm 1)."""

from typing import Any, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.numba_bridge import SIMD, evaluate_gradients, jit
from pymc_kameleon.mcmc.proposals import Scaling
from pymc_kameleon.mcmc.proposals.local_gaussian import ScatterHere, register_local_gaussian

__all__ = ["KernelGaussian", "centred_scatter"]


class KernelGaussian(NamedTuple):
    """N(u, gamma^2 I + nu^2 M H M^T), with M = 2 [grad k(u, z_1), ..., grad k(u, z_n)].

    Attributes
    ----------
    kernel
        As `numba_bridge.evaluate_gradients` takes it.
    points : array, shape (d, n)
        z_i, a subsample of the history in standardised coordinates.
    parameters : array
        What the kernel's `gradients` takes.
    """

    kernel: Any
    points: np.ndarray
    parameters: np.ndarray
    here: ScatterHere
    coordinates: Standardization
    scaling: Scaling
    gamma: float


@jit(fastmath=SIMD, allocates=True)
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


def _scatter(proposal, u, out):
    """Write M H M^T at u."""
    gradients = np.empty(proposal.points.shape)
    evaluate_gradients(proposal.kernel, u, proposal.points, proposal.parameters, gradients)
    centred_scatter(gradients, out)


register_local_gaussian(KernelGaussian, _scatter)
