"""What a kernel is, and a kernel of the user's own.

A kernel enters the proposal of Kernel Adaptive Metropolis-Hastings through the gradients of
k(., z_i) at the current point only, written for all points at once in loops over contiguous rows,
which the compiler turns into vector instructions. It enters random Fourier features through its
frequencies only. A bandwidth is a length for every kernel that has one, so the median heuristic
means the same for all.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import numba
import numpy as np
from numba import types
from numba.extending import is_jitted
from numpy.random import Generator

from pymc_kameleon.mcmc.bridge.address import machine_code_address
from pymc_kameleon.mcmc.saved_state import name_of
from pymc_kameleon.validation import checked_array


def gradients_address(gradients) -> int:
    """Address of a jitted `gradients(x, points, parameters, out)`, which has to be kept alive."""
    vector, matrix = types.float64[::1], types.float64[:, ::1]
    return machine_code_address(gradients, (vector, matrix, vector, matrix))


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
        """Parameters that `gradients` takes, shape (p,); any bandwidth is the last one."""
        return np.array([bandwidth])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:
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
        return is_jitted(self.gradients)

    def address(self) -> int:
        """Address of the machine code of `gradients`, for compiled transitions."""
        if "_address" not in self.__dict__:
            self._address = gradients_address(self.gradients)
        return self._address

    def form(self, compiled: bool) -> int | Callable | None:
        """Return what `evaluate_gradients` takes, compiled or in plain Python."""
        return self.address() if compiled else self.gradients

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_address"}

    def __repr__(self):
        arguments = ", ".join(
            f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_")
        )
        return f"{type(self).__name__}({arguments})"


class CustomKernel(Kernel):
    """A kernel of your own, with a gradient, a spectral density, or both.

    Parameters
    ----------
    value : callable
        `value(x, y, bandwidth) -> float`, x and y of shape (d,).
    gradient : callable, optional
        `gradient(x, y, bandwidth) -> array (d,)`: the derivative of `value` in x. Decorated with
        `numba.njit`, it runs in compiled transitions; a plain function runs in Python.
    frequencies : callable, optional
        `frequencies(size, dim, bandwidth, rng) -> array (size, dim)`: draws from the normalised
        Fourier transform of `value`, which must depend on x - y only and be 1 at zero. Their
        second moment is taken to be finite.
    has_bandwidth : bool
        Whether the functions use their argument `bandwidth`.

    Examples
    --------
    >>> import numba, numpy as np
    >>> def value(x, y, c):
    ...     return 1 / (1 + ((x - y) ** 2).sum() / c**2)
    >>> @numba.njit
    ... def gradient(x, y, c):
    ...     return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2
    >>> rational_quadratic = CustomKernel(value, gradient)

    >>> def cosines(x, y, length):
    ...     return np.prod(np.cos((x - y) / length))
    >>> def signs(size, dim, length, rng):
    ...     return rng.choice([-1 / length, 1 / length], (size, dim))
    >>> periodic = CustomKernel(cosines, frequencies=signs)
    """

    def __init__(
        self,
        value: Callable,
        gradient: Callable | None = None,
        *,
        frequencies: Callable | None = None,
        has_bandwidth: bool = True,
    ) -> None:
        if gradient is None and frequencies is None:
            raise TypeError(
                "gradient=None and frequencies=None: pass a function as at least one of them. "
                "KameleonStep needs the gradient, FastKameleonStep the frequencies."
            )
        for name, function, arguments in (
            ("value", value, "(x, y, bandwidth)"),
            ("gradient", gradient, "(x, y, bandwidth)"),
            ("frequencies", frequencies, "(size, dim, bandwidth, rng)"),
        ):
            if not (callable(function) or (function is None and name != "value")):
                raise TypeError(f"{name}={function!r}: pass a function of {arguments}.")
        self.value, self.gradient, self.has_bandwidth = value, gradient, bool(has_bandwidth)
        self._frequencies = frequencies

    @functools.cached_property
    def gradients(self):  # noqa: D102
        if self.gradient is None:
            return None
        gradient = self.gradient

        def gradients(x, points, parameters, out):
            for j in range(points.shape[1]):
                out[:, j] = gradient(x, np.ascontiguousarray(points[:, j]), parameters[0])

        return numba.njit(gradients) if is_jitted(gradient) else gradients

    @property
    def has_spectrum(self):  # noqa: D102
        return self._frequencies is not None

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.array([[float(self.value(a, b, bandwidth)) for b in y] for a in x])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        if self._frequencies is None:
            return super().frequencies(size, dim, bandwidth, rng)
        return checked_array(
            f"the result of frequencies={self._frequencies!r}",
            self._frequencies(size, dim, bandwidth, rng),
            (size, dim),
            "an array of one frequency per row",
        )

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "gradients"}

    def __repr__(self):
        value, gradient, frequencies = (
            function and name_of(function)
            for function in (self.value, self.gradient, self._frequencies)
        )
        return (
            f"{type(self).__name__}(value={value}, gradient={gradient}, "
            f"has_bandwidth={self.has_bandwidth}, frequencies={frequencies})"
        )
