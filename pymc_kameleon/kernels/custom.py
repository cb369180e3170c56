"""A kernel of the user's own."""

from collections.abc import Callable

import numba
import numpy as np
from numba.core.registry import CPUDispatcher

from pymc_kameleon.kernels.kernel import Kernel
from pymc_kameleon.validation import checked_array

__all__ = ["CustomKernel"]


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
        self._gradients = _over_points(gradient)

    @property
    def gradients(self):  # noqa: D102
        return self._gradients

    @property
    def has_spectrum(self):  # noqa: D102
        return self._frequencies is not None

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "_gradients"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._gradients = _over_points(self.gradient)

    def __repr__(self):
        return f"{super().__repr__()[:-1]}, frequencies={self._frequencies!r})"

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.array([[float(self.value(a, b, bandwidth)) for b in y] for a in x])

    def frequencies(  # noqa: D102
        self, size: int, dim: int, bandwidth: float, rng: np.random.Generator
    ) -> np.ndarray:
        if self._frequencies is None:
            return super().frequencies(size, dim, bandwidth, rng)
        return checked_array(
            f"the result of frequencies={self._frequencies!r}",
            self._frequencies(size, dim, bandwidth, rng),
            (size, dim),
            "an array of one frequency per row",
        )


def _over_points(gradient):
    if gradient is None:
        return None

    def gradients(x, points, parameters, out):
        for j in range(points.shape[1]):
            out[:, j] = gradient(x, np.ascontiguousarray(points[:, j]), parameters[0])

    return numba.njit(gradients) if isinstance(gradient, CPUDispatcher) else gradients
