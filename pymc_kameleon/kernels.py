"""Kernels: their values, gradients in the first argument, and spectral densities.

A kernel enters the proposal of Kernel Adaptive Metropolis-Hastings through the gradients of
k(., z_i) at the current point only, written for all points at once in loops over contiguous rows,
which the compiler turns into vector instructions. It enters random Fourier features through its
frequencies only. A bandwidth is a length for every kernel that has one, so the median heuristic
means the same for all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numba
import numpy as np
from numba.core.registry import CPUDispatcher
from scipy import special
from scipy.spatial.distance import cdist, pdist

from pymc_kameleon.compiled import SIMD, gradients_address
from pymc_kameleon.validation import checked_array, checked_number

__all__ = [
    "CustomKernel",
    "Gaussian",
    "InverseMultiquadric",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Polynomial",
    "Sinc",
    "SincSquared",
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


@numba.njit(cache=True, fastmath=SIMD)
def _inverse_multiquadric_gradients(x, points, parameters, out):
    exponent, bandwidth = parameters
    precision = 1.0 / bandwidth**2
    weights = np.empty(points.shape[1])
    _squared_distances(x, points, weights)
    for j in range(weights.size):
        power = (1.0 + precision * weights[j]) ** (-exponent - 1.0)
        weights[j] = 2.0 * exponent * precision * power
    _weighted_differences(x, points, weights, out)


@numba.njit(cache=True, fastmath=SIMD)
def _sinc(u):
    return math.sin(u) / u if u != 0.0 else 1.0


@numba.njit(cache=True, fastmath=SIMD)
def _sinc_slope(u):
    """Return the derivative of sin(u)/u, by its series where the closed form would cancel."""
    if abs(u) > 0.1:
        return (math.cos(u) - math.sin(u) / u) / u
    square = u * u
    return -u / 3.0 * (1.0 - square / 10.0 * (1.0 - square / 28.0 * (1.0 - square / 54.0)))


@numba.njit(cache=True, fastmath=SIMD)
def _times_other_rows(factors, out):
    """Multiply each `out[i]` by all rows of `factors` but the i-th; a factor may be zero."""
    dim, n = factors.shape
    product = np.ones(n)
    for i in range(dim):
        for j in range(n):
            out[i, j] *= product[j]
            product[j] *= factors[i, j]
    for j in range(n):
        product[j] = 1.0
    for i in range(dim - 1, -1, -1):
        for j in range(n):
            out[i, j] *= product[j]
            product[j] *= factors[i, j]


@numba.njit(cache=True, fastmath=SIMD)
def _sinc_gradients(x, points, parameters, out):
    rate = 1.0 / parameters[0]
    factors = np.empty(points.shape)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            u = rate * (x[i] - points[i, j])
            factors[i, j] = _sinc(u)
            out[i, j] = rate * _sinc_slope(u)
    _times_other_rows(factors, out)


@numba.njit(cache=True, fastmath=SIMD)
def _sinc_squared_gradients(x, points, parameters, out):
    rate = 0.5 / parameters[0]
    factors = np.empty(points.shape)
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            u = rate * (x[i] - points[i, j])
            root = _sinc(u)
            factors[i, j] = root * root
            out[i, j] = 2.0 * rate * root * _sinc_slope(u)
    _times_other_rows(factors, out)


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


def _matern(r, smoothness):
    """2^(1-v)/Gamma(v) r^v K_v(r), which tends to 1 at r = 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        log_value = (
            (1 - smoothness) * math.log(2)
            - special.gammaln(smoothness)
            + smoothness * np.log(r)
            + np.log(special.kve(smoothness, r))
            - r
        )
        # K_v overflows at r = 0 and, if v is large, while r is below a share of v. There the kernel
        # is exp(-a + a^2 / (2 (v - 2)) + O(a^3 / v^2)) with a = r^2 / (4 (v - 1)).
        a = r**2 / (4 * max(smoothness - 1, 1e-10))
        at_overflow = np.exp(-a + a**2 / (2 * max(smoothness - 2, 1e-10)))
        return np.where(np.isfinite(log_value), np.exp(log_value), at_overflow)


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
        raise ValueError(_lacking(self, "spectrum"))

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
    r""":math:`k(x, y) = \exp(-\|x - y\|^2 / 2\sigma^2)` with bandwidth :math:`\sigma`.

    Frequencies are :math:`N(0, \sigma^{-2} I)`.
    """

    gradients = staticmethod(_gaussian_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-0.5 * cdist(x, y, "sqeuclidean") / bandwidth**2)

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        return rng.standard_normal((size, dim)) / bandwidth


class Laplacian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|_1 / \ell)` with bandwidth :math:`\ell`; no gradient.

    Frequencies are independent :math:`\mathrm{Cauchy}(0, 1/\ell)` in each coordinate.
    """

    has_finite_frequencies = False

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-cdist(x, y, "cityblock") / bandwidth)

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        return rng.standard_cauchy((size, dim)) / bandwidth


class Matern(Kernel):
    r""":math:`k(x, y) = \frac{2^{1-\vartheta}}{\Gamma(\vartheta)} s^\vartheta K_\vartheta(s)`.

    Here :math:`s = \sqrt{2\vartheta}\,\|x - y\| / \ell` with bandwidth :math:`\ell`. Frequencies
    are multivariate t with :math:`2\vartheta` degrees of freedom and scale :math:`\ell^{-2} I`.

    Parameters
    ----------
    smoothness : float
        :math:`\vartheta > 0`. It has `gradients` above 1, where the kernel is twice
        differentiable: 1.5 and 2.5 compiled in closed form, others through SciPy's Bessel
        functions.
    """

    def __init__(self, smoothness: float = 2.5):
        self.smoothness = checked_number("smoothness", smoothness, above=0)
        closed = {1.5: _matern_three_halves_gradients, 2.5: _matern_five_halves_gradients}
        self._closed_form = self.smoothness in closed
        general = _matern_gradients if self.smoothness > 1 else None
        self._gradients = closed.get(self.smoothness, general)

    @property
    def gradients(self):  # noqa: D102
        return self._gradients

    @property
    def has_finite_frequencies(self):  # noqa: D102
        return self.smoothness > 1

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        scaled = math.sqrt(2 * self.smoothness) * cdist(x, y) / bandwidth
        return _matern(scaled, self.smoothness)

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([bandwidth] if self._closed_form else [self.smoothness, bandwidth])

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        # A chi-squared variate of few degrees of freedom underflows to zero now and then.
        chi_squared = np.maximum(
            rng.chisquare(2 * self.smoothness, (size, 1)), np.finfo(float).tiny
        )
        scale = np.sqrt(2 * self.smoothness / chi_squared) / bandwidth
        return scale * rng.standard_normal((size, dim))


class InverseMultiquadric(Kernel):
    r""":math:`k(x, y) = (1 + \|x - y\|^2 / c^2)^{-\beta}` with bandwidth :math:`c`.

    Frequencies are :math:`\sqrt{2 g}\, w` with :math:`w \sim N(0, I)` and one
    :math:`g \sim \mathrm{Gamma}(\beta, \text{rate } c^2)` for each.

    Parameters
    ----------
    exponent : float
        :math:`\beta > 0`.
    """

    gradients = staticmethod(_inverse_multiquadric_gradients)

    def __init__(self, exponent: float = 0.5):
        self.exponent = checked_number("exponent", exponent, above=0)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (1 + cdist(x, y, "sqeuclidean") / bandwidth**2) ** -self.exponent

    def parameters(self, bandwidth):  # noqa: D102
        return np.array([self.exponent, bandwidth])

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        scale = np.sqrt(2 * rng.standard_gamma(self.exponent, (size, 1))) / bandwidth
        return scale * rng.standard_normal((size, dim))


class Sinc(Kernel):
    r""":math:`k(x, y) = \prod_i \frac{\sin u_i}{u_i}` with :math:`u = (x - y) / \ell`.

    The bandwidth is :math:`\ell`; frequencies are uniform on :math:`(-1/\ell, 1/\ell)` in each
    coordinate.
    """

    gradients = staticmethod(_sinc_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        # np.sinc(t) is sin(pi t) / (pi t).
        return np.sinc((x[:, None] - y) / (np.pi * bandwidth)).prod(axis=-1)

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        return rng.uniform(-1 / bandwidth, 1 / bandwidth, (size, dim))


class SincSquared(Kernel):
    r""":math:`k(x, y) = \prod_i (\frac{\sin u_i}{u_i})^2` with :math:`u = (x - y) / 2\ell`.

    The bandwidth is :math:`\ell`; frequencies are triangular on :math:`(-1/\ell, 1/\ell)`, with
    mode 0, in each coordinate.
    """

    gradients = staticmethod(_sinc_squared_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.sinc((x[:, None] - y) / (2 * np.pi * bandwidth)).prod(axis=-1) ** 2

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
        return rng.triangular(-1 / bandwidth, 0, 1 / bandwidth, (size, dim))


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
    ):
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

    def frequencies(self, size, dim, bandwidth, rng):  # noqa: D102
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


_BY_NAME = {
    "gaussian": Gaussian,
    "matern": Matern,
    "laplacian": Laplacian,
    "inverse_multiquadric": InverseMultiquadric,
    "sinc": Sinc,
    "sinc_squared": SincSquared,
    "linear": Linear,
    "polynomial": Polynomial,
}

_OWN = {
    "gradients": "CustomKernel(value, gradient)",
    "spectrum": "CustomKernel(value, frequencies=...)",
}


def _has(kernel, needs):
    return kernel.has_gradients if needs == "gradients" else kernel.has_spectrum


def _names(needs):
    return ", ".join(repr(name) for name, kind in _BY_NAME.items() if _has(kind(), needs))


def _lacking(kernel, needs):
    """Error message for the argument `kernel`, which has no gradients or no spectrum."""
    if needs == "gradients":
        return (
            f"kernel={kernel!r} has no gradient everywhere, which Kernel Adaptive "
            f"Metropolis-Hastings needs. Take one of {_names(needs)}, Matern(smoothness) above 1, "
            f"{_OWN[needs]}, or FastKameleonStep, which works with any kernel that has a spectrum."
        )
    return (
        f"kernel={kernel!r} has no spectral density, which random Fourier features need. "
        f"Take one of {_names(needs)}, or {_OWN[needs]}."
    )


def as_kernel(kernel, needs: str = "gradients") -> Kernel:
    """Turn the argument `kernel` of a step into a `Kernel`.

    Parameters
    ----------
    kernel : Kernel, type, str, or pair of callables
        A kernel object or class, the name of one in lower case ("gaussian", "matern",
        "laplacian", "inverse_multiquadric", "sinc", "sinc_squared", "linear", "polynomial"), or
        (value, gradient) as `CustomKernel` takes them.
    needs : {"gradients", "spectrum"}
        What the kernel must have.

    Raises
    ------
    ValueError, TypeError
        If it is unknown, or lacks what is needed.
    """
    if needs not in _OWN:
        raise ValueError(f"needs={needs!r}: take one of {', '.join(map(repr, _OWN))}.")
    if isinstance(kernel, Kernel):
        found = kernel
    elif isinstance(kernel, type) and issubclass(kernel, Kernel) and kernel is not CustomKernel:
        found = kernel()
    elif isinstance(kernel, tuple) and len(kernel) == 2:
        found = CustomKernel(*kernel)
    elif isinstance(kernel, str) and kernel.lower() in _BY_NAME:
        found = _BY_NAME[kernel.lower()]()
    elif isinstance(kernel, str):
        raise ValueError(
            f"kernel={kernel!r} is unknown. Take one of {_names(needs)}, or a Kernel object."
        )
    else:
        raise TypeError(
            f"kernel={kernel!r}: pass a Kernel object such as Gaussian(), one of {_names(needs)}, "
            f"or your own as {_OWN[needs]}; a value alone is not enough."
        )
    if not _has(found, needs):
        raise ValueError(_lacking(kernel, needs))
    return found


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
