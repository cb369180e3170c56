"""What a kernel is, and the loops that several kernels share.

A kernel enters the proposal of Kernel Adaptive Metropolis-Hastings through the gradients of
k(., z_i) at the current point only, written for all points at once in loops over contiguous rows,
which the compiler turns into vector instructions. It enters random Fourier features through its
frequencies only. A bandwidth is a length for every kernel that has one, so the median heuristic
means the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.registry import CPUDispatcher

from pymc_kameleon.mcmc.numba_bridge import SIMD, gradients_address, jit_inner

__all__ = ["Kernel", "weighted_differences"]


@jit_inner(fastmath=SIMD)
def weighted_differences(x, points, weights, out):
    """`weights` (n,) times the differences of `points` (d, n) and x (d,), into `out` (d, n)."""
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            out[i, j] = weights[j] * (points[i, j] - x[i])


class Kernel(ABC):
    """A positive-definite kernel k.

    A subclass gives `__call__` (values); `gradients` (a function, jitted if it can be), with
    `parameters` unless those are the bandwidth alone; and `frequencies`. Either of `gradients` and
    `frequencies` may be missing.
    """

    has_bandwidth = True
    """Whether the kernel has a length scale, which may be given or follow the median heuristic."""

    has_finite_frequencies = True
    r"""Whether :math:`E\|\omega\|^2` is finite, as it is when k is twice differentiable.

    If not, :math:`\phi(x)^\top \phi(y)` of random Fourier features still tends to k, but their
    Jacobian, and so the proposal covariance of F-KAMH, does not settle as features are added.
    """

    gradients: Callable | None = None
    """`gradients(x, points, parameters, out)` writes the gradient of k(., points[:, i]) at `x` into
    `out[:, i]`; x (d,), points and out (d, n), parameters (p,), all float64 and C-contiguous. None
    if the kernel is not smooth enough, or none was given."""

    @abstractmethod
    def __call__(self, x: np.ndarray, y: np.ndarray, bandwidth: float = 1.0) -> np.ndarray:
        """Matrix of kernel values.

        Parameters
        ----------
        x : array, shape (n, d)
        y : array, shape (m, d)
        bandwidth : float
            Ignored by kernels without one.

        Returns
        -------
        array, shape (n, m)
        """

    def parameters(self, bandwidth: float) -> np.ndarray:
        """Parameters that `gradients` takes, shape (p,)."""
        return np.array([bandwidth])

    def frequencies(
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw from the spectral density of the kernel, its normalised Fourier transform.

        Parameters
        ----------
        size : int
            Number of draws.
        dim : int
            Dimension d of the points.
        bandwidth : float
            Ignored by kernels without one.
        rng : numpy.random.Generator

        Returns
        -------
        array, shape (size, dim)

        Raises
        ------
        ValueError
            If the kernel has no spectral density.
        """
        raise ValueError(
            f"{self!r} has no spectral density, which random Fourier features need. Take "
            "Gaussian(), Matern(smoothness), Laplacian(), InverseMultiquadric(exponent), Sinc(), "
            "SincSquared() or CustomKernel(value, frequencies=...)."
        )

    @property
    def has_gradients(self) -> bool:
        """Whether the kernel has a gradient everywhere, as `gradients`."""
        return self.gradients is not None

    @property
    def has_spectrum(self) -> bool:
        """Whether the kernel has a spectral density, which `frequencies` draws from."""
        return type(self).frequencies is not Kernel.frequencies

    @property
    def is_compiled(self) -> bool:
        """Whether `gradients` is a Numba function."""
        return isinstance(self.gradients, CPUDispatcher)

    def address(self) -> int:
        """Address of the machine code of `gradients`, for compiled transitions."""
        if "_address" not in self.__dict__:
            self._address = gradients_address(self.gradients)
        return self._address

    def form(self, compiled: bool) -> Any:
        """Return what `numba_bridge.evaluate_gradients` takes, compiled or in plain Python."""
        return self.address() if compiled else self.gradients

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_address"}

    def __repr__(self):
        arguments = ", ".join(
            f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_")
        )
        return f"{type(self).__name__}({arguments})"
