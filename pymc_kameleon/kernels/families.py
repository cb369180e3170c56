"""The kernels that have names, from `Gaussian` to `Polynomial`; and from a name to its kernel."""

import math
from typing import Any

import numpy as np
from numpy.random import Generator
from scipy import special
from scipy.spatial.distance import cdist, pdist

from pymc_kameleon.kernels.kernel import CustomKernel, Kernel
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit, jit_inner
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import copy_matrix_into, squared_distances
from pymc_kameleon.validation import checked_choice, checked_number

# functions of the distance ------------------------------------------------------------------------


@jit_inner(fastmath=SIMD)
def _weighted_differences(x, points, weights, out):
    """`weights` (n,) times the differences of `points` (d, n) and x (d,), into `out` (d, n)."""
    for i in range(points.shape[0]):
        for j in range(points.shape[1]):
            out[i, j] = weights[j] * (points[i, j] - x[i])


@jit(fastmath=SIMD, allocates=True)
def _gaussian_gradients(x, points, parameters, out):
    precision = 1.0 / parameters[0] ** 2
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        weights[j] = precision * exp(-0.5 * precision * weights[j])
    _weighted_differences(x, points, weights, out)


class Gaussian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|^2 / 2\sigma^2)` with bandwidth :math:`\sigma`.

    Frequencies are :math:`N(0, \sigma^{-2} I)`.
    """

    gradients = staticmethod(_gaussian_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-0.5 * cdist(x, y, "sqeuclidean") / bandwidth**2)

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        return rng.standard_normal((size, dim)) / bandwidth


class Laplacian(Kernel):
    r""":math:`k(x, y) = \exp(-\|x - y\|_1 / \ell)` with bandwidth :math:`\ell`; no gradient.

    Frequencies are independent :math:`\mathrm{Cauchy}(0, 1/\ell)` in each coordinate.
    """

    has_finite_frequencies = False

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.exp(-cdist(x, y, "cityblock") / bandwidth)

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        return rng.standard_cauchy((size, dim)) / bandwidth


@jit(fastmath=SIMD, allocates=True)
def _inverse_multiquadric_gradients(x, points, parameters, out):
    exponent, bandwidth = parameters
    precision = 1.0 / bandwidth**2
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        power = (1.0 + precision * weights[j]) ** (-exponent - 1.0)
        weights[j] = 2.0 * exponent * precision * power
    _weighted_differences(x, points, weights, out)


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

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = checked_number("exponent", exponent, above=0)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (1 + cdist(x, y, "sqeuclidean") / bandwidth**2) ** -self.exponent

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([self.exponent, bandwidth])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        scale = np.sqrt(2 * rng.standard_gamma(self.exponent, (size, 1))) / bandwidth
        return scale * rng.standard_normal((size, dim))


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


def _matern_gradients(x, points, parameters, out):
    smoothness, bandwidth = parameters
    differences = points - x[:, None]
    scaled = np.sqrt(2 * smoothness * (differences**2).sum(axis=0)) / bandwidth
    weights = smoothness / (smoothness - 1) / bandwidth**2 * _matern(scaled, smoothness - 1)
    out[:] = weights * differences


@jit(fastmath=SIMD, allocates=True)
def _matern_closed_gradients(x, points, parameters, out):
    """Of (1 + s) exp(-s) for smoothness 1.5, of (1 + s + s^2 / 3) exp(-s) for 2.5."""
    smoothness, bandwidth = parameters
    rate = math.sqrt(2.0 * smoothness) / bandwidth
    weights = np.empty(points.shape[1])
    squared_distances(x, points, weights.size, weights)
    for j in range(weights.size):
        scaled = rate * math.sqrt(weights[j])
        polynomial = 1.0 if smoothness == 1.5 else (1.0 + scaled) / 3.0
        weights[j] = rate * rate * polynomial * exp(-scaled)
    _weighted_differences(x, points, weights, out)


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

    def __init__(self, smoothness: float = 2.5) -> None:
        self.smoothness = checked_number("smoothness", smoothness, above=0)

    @property
    def gradients(self):  # noqa: D102
        if self.smoothness in (1.5, 2.5):
            return _matern_closed_gradients
        return _matern_gradients if self.smoothness > 1 else None

    @property
    def has_finite_frequencies(self):  # noqa: D102
        return self.smoothness > 1

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        scaled = math.sqrt(2 * self.smoothness) * cdist(x, y) / bandwidth
        return _matern(scaled, self.smoothness)

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([self.smoothness, bandwidth])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        # A chi-squared variate of few degrees of freedom underflows to zero now and then.
        chi_squared = np.maximum(
            rng.chisquare(2 * self.smoothness, (size, 1)), np.finfo(float).tiny
        )
        scale = np.sqrt(2 * self.smoothness / chi_squared) / bandwidth
        return scale * rng.standard_normal((size, dim))


# products over the coordinates --------------------------------------------------------------------


@jit(fastmath=SIMD, allocates=True)
def _sinc_gradients(x, points, parameters, out):
    """Of the product of (sin u / u)^power with u = (x - y) / (power bandwidth); power 1 or 2."""
    power, bandwidth = parameters
    rate = 1.0 / (power * bandwidth)
    dim, n = points.shape
    factors = np.empty((dim, n))
    for i in range(dim):
        for j in range(n):
            u = rate * (x[i] - points[i, j])
            sinc = math.sin(u) / u if u != 0.0 else 1.0
            if abs(u) > 0.1:
                slope = (math.cos(u) - sinc) / u
            else:  # its series, where the closed form would cancel
                square = u * u
                slope = 1.0 - square / 10.0 * (1.0 - square / 28.0 * (1.0 - square / 54.0))
                slope *= -u / 3.0
            factors[i, j] = sinc if power == 1.0 else sinc * sinc
            out[i, j] = rate * slope if power == 1.0 else 2.0 * rate * sinc * slope
    # Each slope times the factors of all other coordinates, of which some may be zero.
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


class Sinc(Kernel):
    r""":math:`k(x, y) = \prod_i \frac{\sin u_i}{u_i}` with :math:`u = (x - y) / \ell`.

    The bandwidth is :math:`\ell`; frequencies are uniform on :math:`(-1/\ell, 1/\ell)` in each
    coordinate.
    """

    gradients = staticmethod(_sinc_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        # np.sinc(t) is sin(pi t) / (pi t).
        return np.sinc((x[:, None] - y) / (np.pi * bandwidth)).prod(axis=-1)

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([1.0, bandwidth])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        return rng.uniform(-1 / bandwidth, 1 / bandwidth, (size, dim))


class SincSquared(Kernel):
    r""":math:`k(x, y) = \prod_i (\frac{\sin u_i}{u_i})^2` with :math:`u = (x - y) / 2\ell`.

    The bandwidth is :math:`\ell`; frequencies are triangular on :math:`(-1/\ell, 1/\ell)`, with
    mode 0, in each coordinate.
    """

    gradients = staticmethod(_sinc_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return np.sinc((x[:, None] - y) / (2 * np.pi * bandwidth)).prod(axis=-1) ** 2

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([2.0, bandwidth])

    def frequencies(self, size: int, dim: int, bandwidth: float, rng: Generator) -> np.ndarray:  # noqa: D102
        return rng.triangular(-1 / bandwidth, 0, 1 / bandwidth, (size, dim))


# functions of the inner product, which have gradients and no spectrum -----------------------------


@jit
def _linear_gradients(x, points, parameters, out):
    copy_matrix_into(points, out)


class Linear(Kernel):
    r""":math:`k(x, y) = x^\top y`: the proposal covariance is that of adaptive Metropolis."""

    has_bandwidth = False
    gradients = staticmethod(_linear_gradients)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return x @ y.T

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.zeros(1)


@jit(fastmath=SIMD, allocates=True)
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

    def __init__(self, degree: int = 2, offset: float = 1.0) -> None:
        if int(degree) != degree or degree < 1:
            raise ValueError(f"degree={degree!r}: take a whole number of at least 1.")
        self.degree = int(degree)
        self.offset = checked_number("offset", offset, at_least=0)

    def __call__(self, x, y, bandwidth=1.0):  # noqa: D102
        return (x @ y.T + self.offset) ** self.degree

    def parameters(self, bandwidth: float) -> np.ndarray:  # noqa: D102
        return np.array([self.degree, self.offset], dtype=float)


# from the argument `kernel` of a step -------------------------------------------------------------

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


def as_kernel(kernel: Any, needs: str = "gradients") -> Kernel:
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
    checked_choice("needs", needs, _OWN)
    names = ", ".join(repr(name) for name, kind in _BY_NAME.items() if _has(kind(), needs))
    if isinstance(kernel, Kernel):
        found = kernel
    elif isinstance(kernel, type) and issubclass(kernel, Kernel) and kernel is not CustomKernel:
        found = kernel()
    elif isinstance(kernel, tuple) and len(kernel) == 2:
        found = CustomKernel(*kernel)
    elif isinstance(kernel, str) and kernel.lower() in _BY_NAME:
        found = _BY_NAME[kernel.lower()]()
    elif isinstance(kernel, str):
        raise ValueError(f"kernel={kernel!r} is unknown. Take one of {names}, or a Kernel object.")
    else:
        raise TypeError(
            f"kernel={kernel!r}: pass a Kernel object such as Gaussian(), one of {names}, or your "
            f"own as {_OWN[needs]}; a value alone is not enough."
        )
    if _has(found, needs):
        return found
    if needs == "gradients":
        raise ValueError(
            f"kernel={kernel!r} has no gradient everywhere, which Kernel Adaptive "
            f"Metropolis-Hastings needs. Take one of {names}, Matern(smoothness) above 1, "
            f"{_OWN[needs]}, or FastKameleonStep, which works with any kernel that has a spectrum."
        )
    raise ValueError(
        f"kernel={kernel!r} has no spectral density, which random Fourier features need. "
        f"Take one of {names}, or {_OWN[needs]}."
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
