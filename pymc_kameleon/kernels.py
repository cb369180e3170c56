"""Kernels of Kernel Adaptive Metropolis-Hastings: values, and gradients in the first argument.

A kernel enters the proposal through the gradients of k(., z_i) at the current point only, written
for all points at once in loops over contiguous rows, which the compiler turns into vector
instructions. A bandwidth is a length for every kernel that has one, so the median heuristic means
the same for all.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable

import numba
import numpy as np
from numba.core.registry import CPUDispatcher
from scipy import special
from scipy.spatial.distance import cdist, pdist

from pymc_kameleon.compiled import SIMD, gradients_address

__all__ = [
    "CustomKernel",
    "Gaussian",
    "Kernel",
    "Linear",
    "Matern",
    "Polynomial",
    "as_kernel",
    "median_bandwidth",
]


@numba.njit(cache=True, fastmath=SIMD)
def _squared_distances(x, points, out):
    for j in range(points.shape[1]):
        out[j] = 0.0
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            difference = points[i, j] - x[i]
            out[j] += difference * difference


@numba.njit(cache=True, fastmath=SIMD)
def _weighted_differences(x, points, weights, out):
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            out[i, j] = weights[j] * (points[i, j] - x[i])


@numba.njit(cache=True, fastmath=SIMD)
def _gaussian_gradients(x, points, parameters, out):
    precision = 1.0 / parameters[0] ** 2
    weights = np.empty(points.shape[1])
    _squared_distances(x, points, weights)
    for j in range(weights.size):
        weights[j] = precision * math.exp(-0.5 * precision * weights[j])
    _weighted_differences(x, points, weights, out)


@numba.njit(cache=True, fastmath=SIMD)
def _matern_three_halves_gradients(x, points, parameters, out):
    rate = math.sqrt(3.0) / parameters[0]
    weights = np.empty(points.shape[1])
    _squared_distances(x, points, weights)
    for j in range(weights.size):
        weights[j] = rate * rate * math.exp(-rate * math.sqrt(weights[j]))
    _weighted_differences(x, points, weights, out)


@numba.njit(cache=True, fastmath=SIMD)
def _matern_five_halves_gradients(x, points, parameters, out):
    rate = math.sqrt(5.0) / parameters[0]
    weights = np.empty(points.shape[1])
    _squared_distances(x, points, weights)
    for j in range(weights.size):
        scaled = rate * math.sqrt(weights[j])
        weights[j] = rate * rate / 3.0 * (1.0 + scaled) * math.exp(-scaled)
    _weighted_differences(x, points, weights, out)


@numba.njit(cache=True)
def _linear_gradients(x, points, parameters, out):
    out[:] = points


@numba.njit(cache=True, fastmath=SIMD)
def _polynomial_gradients(x, points, parameters, out):
    degree, offset = parameters
    weights = np.full(points.shape[1], offset)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            weights[j] += points[i, j] * x[i]
    for j in range(weights.size):
        weights[j] = degree * weights[j] ** (degree - 1.0)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            out[i, j] = weights[j] * points[i, j]


def _matern_gradients(x, points, parameters, out):
    smoothness, bandwidth = parameters
    differences = points - x[:, None]
    scaled = np.sqrt(2 * smoothness * (differences**2).sum(axis=0)) / bandwidth
    weights = smoothness / (smoothness - 1) / bandwidth**2 * _matern(scaled, smoothness - 1)
    out[:] = weights * differences


def _matern(scaled_distance, smoothness):
    """2^(1-v)/Gamma(v) r^v K_v(r), which tends to 1 at r = 0."""
    r = np.maximum(scaled_distance, 1e-10)
    with np.errstate(over="ignore", under="ignore"):
        log_value = (
            (1 - smoothness) * math.log(2)
            - special.gammaln(smoothness)
            + smoothness * np.log(r)
            + np.log(special.kve(smoothness, r))
            - r
        )
        return np.where(scaled_distance > 1e-10, np.exp(log_value), 1.0)


class Kernel(ABC):
    """A positive-definite kernel k with a gradient everywhere.

    A subclass gives `__call__` (values), `gradients` (a function, jitted if it can be) and
    `parameters`.
    """

    has_bandwidth = True
    """Whether the kernel has a length scale, which may be given or follow the median heuristic."""

    gradients: Callable
    """`gradients(x, points, parameters, out)` writes the gradient of k(., points[:, i]) at `x` into
    `out[:, i]`; x (d,), points and out (d, n), parameters (p,), all float64 and C-contiguous."""

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

    @abstractmethod
    def parameters(self, bandwidth: float) -> np.ndarray:
        """Parameters that `gradients` takes, shape (p,)."""

    @property
    def is_compiled(self) -> bool:
        """Whether `gradients` is a Numba function."""
        return isinstance(self.gradients, CPUDispatcher)

    def address(self) -> int:
        """Address of `gradients` as a C function, for compiled transitions."""
        if "_c_function" not in self.__dict__:
            self._c_function = gradients_address(self.gradients)
        return self._c_function.address

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_c_function"}

    def __repr__(self):
        arguments = ", ".join(
            f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_")
        )
        return f"{type(self).__name__}({arguments})"


class Gaussian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|^2 / 2\sigma^2)` with bandwidth :math:`\sigma`."""

    gradients = staticmethod(_gaussian_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-0.5 * cdist(x, y, "sqeuclidean") / bandwidth**2)

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([bandwidth])


class Matern(Kernel):
    r""":math:`k(x, y) = \frac{2^{1-\vartheta}}{\Gamma(\vartheta)} s^\vartheta K_\vartheta(s)`.

    Here :math:`s = \sqrt{2\vartheta}\,\|x - y\| / \ell` with bandwidth :math:`\ell`.

    Parameters
    ----------
    smoothness : float
        :math:`\vartheta > 1`: below, the kernel has no gradient at zero distance. 1.5 and 2.5 are
        compiled in closed form, others go through SciPy's Bessel functions.
    """

    def __init__(self, smoothness: float = 2.5):
        is_number = isinstance(smoothness, numbers.Real)
        if not (is_number and np.isfinite(smoothness) and smoothness > 1):
            raise ValueError(
                f"smoothness={smoothness!r}: a Matern kernel of smoothness <= 1 has no gradient at "
                "zero distance, which Kernel Adaptive Metropolis-Hastings needs; take a number "
                "above 1, such as 1.5 or 2.5."
            )
        self.smoothness = float(smoothness)
        closed = {1.5: _matern_three_halves_gradients, 2.5: _matern_five_halves_gradients}
        self._closed_form = self.smoothness in closed
        self._gradients = closed.get(self.smoothness, _matern_gradients)

    @property
    def gradients(self):  # noqa: D102
        return self._gradients

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        scaled = math.sqrt(2 * self.smoothness) * cdist(x, y) / bandwidth
        return _matern(scaled, self.smoothness)

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([bandwidth] if self._closed_form else [self.smoothness, bandwidth])


class Linear(Kernel):
    r""":math:`k(x, y) = x^\top y`: the proposal covariance is that of adaptive Metropolis."""

    has_bandwidth = False
    gradients = staticmethod(_linear_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return x @ y.T

    def parameters(self, bandwidth):  # noqa: D102
        return np.zeros(1)


class Polynomial(Kernel):
    r""":math:`k(x, y) = (x^\top y + c)^p`.

    Parameters
    ----------
    degree : int
        :math:`p \ge 1`.
    offset : float
        :math:`c \ge 0`.
    """

    has_bandwidth = False
    gradients = staticmethod(_polynomial_gradients)

    def __init__(self, degree: int = 2, offset: float = 1.0):
        if int(degree) != degree or degree < 1:
            raise ValueError(f"degree={degree!r}: take a whole number of at least 1.")
        if not (np.isfinite(offset) and offset >= 0):
            raise ValueError(f"offset={offset!r}: take a number of at least 0.")
        self.degree, self.offset = int(degree), float(offset)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (x @ y.T + self.offset) ** self.degree

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([self.degree, self.offset], dtype=float)


class CustomKernel(Kernel):
    """A kernel of your own, from two functions of one pair of points.

    Parameters
    ----------
    value : callable
        `value(x, y, bandwidth) -> float`, x and y of shape (d,).
    gradient : callable
        `gradient(x, y, bandwidth) -> array (d,)`: the derivative of `value` in x. Decorated with
        `numba.njit`, it runs in compiled transitions; a plain function runs in Python.
    has_bandwidth : bool
        Whether the two functions use their third argument.

    Examples
    --------
    >>> import numba, numpy as np
    >>> def value(x, y, c):
    ...     return 1 / (1 + ((x - y) ** 2).sum() / c**2)
    >>> @numba.njit
    ... def gradient(x, y, c):
    ...     return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2
    >>> rational_quadratic = CustomKernel(value, gradient)
    """

    def __init__(self, value: Callable, gradient: Callable, *, has_bandwidth: bool = True):
        for name, function in (("value", value), ("gradient", gradient)):
            if not callable(function):
                raise TypeError(f"{name}={function!r}: pass a function of (x, y, bandwidth).")
        self.value, self.gradient, self.has_bandwidth = value, gradient, bool(has_bandwidth)
        self._gradients = _over_points(gradient)

    @property
    def gradients(self):  # noqa: D102
        return self._gradients

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "_gradients"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._gradients = _over_points(self.gradient)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.array([[float(self.value(a, b, bandwidth)) for b in y] for a in x])

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([bandwidth])


def _over_points(gradient):
    def gradients(x, points, parameters, out):
        for j in range(points.shape[1]):
            out[:, j] = gradient(x, np.ascontiguousarray(points[:, j]), parameters[0])

    return numba.njit(gradients) if isinstance(gradient, CPUDispatcher) else gradients


_BY_NAME = {
    "gaussian": Gaussian,
    "linear": Linear,
    "matern": Matern,
    "polynomial": Polynomial,
}

_WITHOUT_GRADIENT = ("laplacian", "laplace", "exponential", "sinc", "triangular")


def as_kernel(kernel) -> Kernel:
    """Turn the argument `kernel` of a step into a `Kernel`.

    Parameters
    ----------
    kernel : Kernel, str, or pair of callables
        A kernel object, one of "gaussian", "matern", "linear", "polynomial", or (value, gradient)
        as `CustomKernel` takes them.

    Raises
    ------
    ValueError, TypeError
        If it is unknown, or has no gradient everywhere.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, type) and issubclass(kernel, Kernel) and kernel is not CustomKernel:
        return kernel()
    if isinstance(kernel, tuple) and len(kernel) == 2:
        return CustomKernel(*kernel)
    known = ", ".join(repr(name) for name in _BY_NAME)
    if isinstance(kernel, str):
        if kernel.lower() in _BY_NAME:
            return _BY_NAME[kernel.lower()]()
        if kernel.lower() in _WITHOUT_GRADIENT:
            raise ValueError(
                f"kernel={kernel!r} has no gradient everywhere, which Kernel Adaptive "
                f"Metropolis-Hastings needs. Take one of {known}, or Matern(smoothness) above 1."
            )
        raise ValueError(f"kernel={kernel!r} is unknown. Take one of {known}, or a Kernel object.")
    raise TypeError(
        f"kernel={kernel!r}: pass a Kernel object such as Gaussian(), one of {known}, or your own "
        "as CustomKernel(value, gradient); a value without its gradient is not enough."
    )


def median_bandwidth(points: np.ndarray) -> float:
    r"""Median heuristic: the median distance between distinct points, divided by :math:`\sqrt 2`.

    Parameters
    ----------
    points : array, shape (d, n)
        A few hundred points are enough; the cost is quadratic in n.

    Returns
    -------
    float
        1.0 if there are no two distinct points.
    """
    distances = pdist(points.T)
    distances = distances[distances > 0]
    return float(np.median(distances) / math.sqrt(2)) if distances.size else 1.0
