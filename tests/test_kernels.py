"""Kernels against textbook formulas and finite differences."""

import math
import pickle

import numba
import numpy as np
import pytest
from scipy import special

from pymc_kameleon.kernels import (
    CustomKernel,
    Gaussian,
    InverseMultiquadric,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    Sinc,
    SincSquared,
    as_kernel,
    median_bandwidth,
)


def _rational_quadratic(x, y, c):
    return 1 / (1 + ((x - y) ** 2).sum() / c**2)


def _gradient(x, y, c):
    return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2


def _cosines(x, y, c):
    return np.prod(np.cos((x - y) / c))


def _signs(size, dim, c, rng):
    return rng.choice([-1 / c, 1 / c], (size, dim))


KERNELS = {
    "gaussian": Gaussian(),
    "matern-1.5": Matern(1.5),
    "matern-2.5": Matern(2.5),
    "matern-1.2": Matern(1.2),
    "matern-4": Matern(4),
    "inverse-multiquadric-0.5": InverseMultiquadric(),
    "inverse-multiquadric-2": InverseMultiquadric(2),
    "sinc": Sinc(),
    "sinc-squared": SincSquared(),
    "linear": Linear(),
    "polynomial-3": Polynomial(3, 0.7),
    "polynomial-1": Polynomial(1),
    "custom-njit": CustomKernel(_rational_quadratic, numba.njit(_gradient)),
    "custom-plain": CustomKernel(_rational_quadratic, _gradient),
}
"""Kernels with gradients."""

ROUGH = {
    "laplacian": Laplacian(),
    "matern-0.5": Matern(0.5),
    "matern-1": Matern(1),
    "custom-spectral": CustomKernel(_cosines, frequencies=_signs),
}
"""Kernels without."""

ALL = KERNELS | ROUGH

NOT_SPECTRAL = {"linear", "polynomial-3", "polynomial-1", "custom-njit", "custom-plain"}

SPECTRAL = {name: kernel for name, kernel in ALL.items() if name not in NOT_SPECTRAL}


def gradients_of(kernel, x, points, bandwidth):
    out = np.full(points.shape, np.nan)
    kernel.gradients(x, points, kernel.parameters(bandwidth), out)
    return out


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 8])
def test_gradients_of_kernels_match_finite_differences(name, dim):
    kernel, rng = KERNELS[name], np.random.default_rng(dim)
    x, points, bandwidth = rng.normal(size=dim), rng.normal(size=(dim, 7)), 1.7
    step = 1e-5 * np.eye(dim)
    difference = kernel(x + step, points.T, bandwidth) - kernel(x - step, points.T, bandwidth)
    gradients = gradients_of(kernel, x, points, bandwidth)
    np.testing.assert_allclose(gradients, difference / 2e-5, atol=2e-8)
    if not ({name} & {"linear", "polynomial-3", "polynomial-1"}):
        at_itself = gradients_of(kernel, x, np.ascontiguousarray(x[:, None]), 0.9)
        np.testing.assert_array_equal(at_itself, 0.0)


X, Y, LENGTH = np.array([[0.2, 0.5]]), np.array([[1.1, -0.4]]), 1.3
R, PRODUCT = np.linalg.norm(X - Y) / LENGTH, float(X[0] @ Y[0])


def textbook_matern(v):
    s = math.sqrt(2 * v) * R
    return 2 ** (1 - v) / math.gamma(v) * s**v * special.kv(v, s)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Gaussian(), math.exp(-(R**2) / 2)),
        (Matern(0.5), math.exp(-R)),
        (Matern(1.5), (1 + math.sqrt(3) * R) * math.exp(-math.sqrt(3) * R)),
        (Matern(2.5), (1 + math.sqrt(5) * R + 5 * R**2 / 3) * math.exp(-math.sqrt(5) * R)),
        (Matern(1.2), textbook_matern(1.2)),
        (Matern(4), textbook_matern(4)),
        (Laplacian(), math.exp(-np.abs(X - Y).sum() / LENGTH)),
        (InverseMultiquadric(0.5), (1 + R**2) ** -0.5),
        (InverseMultiquadric(2), (1 + R**2) ** -2),
        (Sinc(), math.prod(math.sin(u) / u for u in (X - Y)[0] / LENGTH)),
        (SincSquared(), math.prod((math.sin(u) / u) ** 2 for u in (X - Y)[0] / (2 * LENGTH))),
        (Linear(), PRODUCT),
        (Polynomial(3, 0.7), (PRODUCT + 0.7) ** 3),
    ],
    ids=repr,
)
def test_values_match_textbook_formulas(kernel, expected):
    assert kernel(X, Y, LENGTH) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("smoothness", [60, 500, 10_000])
def test_matern_is_right_where_the_bessel_function_overflows(smoothness):
    """Against the mixture of Gaussians over a gamma-distributed precision that it is."""
    r = np.array([0, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0])[:, None]
    g = smoothness + math.sqrt(smoothness) * np.linspace(-7, 12, 10_001)
    log_density = (smoothness - 1) * np.log(g) - g
    weights = np.exp(log_density - log_density.max())
    expected = np.exp(-smoothness * r**2 / (2 * g)) @ weights / weights.sum()
    np.testing.assert_allclose(Matern(smoothness)(r, np.zeros((1, 1)))[:, 0], expected, atol=5e-6)


@pytest.mark.parametrize("smoothness", [0.01, 0.3, 1, 4, 500])
def test_matern_is_one_at_zero_distance_and_falls(smoothness):
    r = np.concatenate([[0], np.geomspace(1e-250, 30, 40)])[:, None]
    values = Matern(smoothness)(r, np.zeros((1, 1)))[:, 0]
    assert values[0] == 1
    assert np.all(np.diff(values) < 1e-12)
    assert 0 <= values[-1] < 0.2


@pytest.mark.numerics
def test_gradients_of_a_very_smooth_matern_are_those_of_a_gaussian():
    rng = np.random.default_rng(5)
    x, points = rng.normal(size=4), rng.normal(size=(4, 50))
    found, expected = (gradients_of(k, x, points, 1.3) for k in (Matern(5000), Gaussian()))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_median_bandwidth_is_the_median_distance_of_distinct_points_over_root_two():
    points = np.array([[0.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    assert median_bandwidth(points) == pytest.approx(4 / math.sqrt(2))
    assert median_bandwidth(np.repeat(points, 4, axis=1)) == pytest.approx(4 / math.sqrt(2))
    assert median_bandwidth(np.zeros((2, 5))) == 1.0


def test_names_classes_and_pairs_become_kernels():
    assert isinstance(as_kernel("gaussian"), Gaussian)
    assert isinstance(as_kernel(Polynomial), Polynomial)
    assert isinstance(as_kernel((_rational_quadratic, _gradient)), CustomKernel)
    assert isinstance(as_kernel("SINC"), Sinc)


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_and_its_copy_pass_for_what_they_have(name):
    kernel = ALL[name]
    copy = pickle.loads(pickle.dumps(kernel))
    assert repr(copy) == repr(kernel)
    assert copy(X, Y, 1.3) == kernel(X, Y, 1.3)
    for needs, present in (("gradients", name in KERNELS), ("spectrum", name in SPECTRAL)):
        if present:
            assert as_kernel(kernel, needs) is kernel
        else:
            with pytest.raises(ValueError, match=r"gradient|spectral density"):
                as_kernel(kernel, needs)
    assert kernel.is_compiled == (name in set(KERNELS) - {"matern-1.2", "matern-4", "custom-plain"})
    if kernel.has_gradients:
        gradients = [gradients_of(k, X[0], np.ascontiguousarray(Y.T), 1.3) for k in (kernel, copy)]
        np.testing.assert_array_equal(*gradients)
    if kernel.has_spectrum:
        draws = [k.frequencies(5, 2, 1.3, np.random.default_rng(1)) for k in (kernel, copy)]
        np.testing.assert_array_equal(*draws)
        short, long = (kernel.frequencies(50, 3, c, np.random.default_rng(4)) for c in (0.1, 10))
        assert short.shape == (50, 3)
        np.testing.assert_allclose(short, 100 * long, rtol=1e-12)
        # E omega^2 = -k''(0): 2 (1 - k(h)) / h^2 tends to it as h falls, or grows without end.
        h = np.array([[1e-2], [1e-4]])
        curvature = 2 * (1 - kernel(h, np.zeros((1, 1)))[:, 0]) / h[:, 0] ** 2
        assert kernel.has_finite_frequencies == (curvature[1] < 1.2 * curvature[0])


def test_frequencies_of_a_barely_continuous_kernel_are_finite():
    draws = Matern(0.005).frequencies(10_000, 1, 1.0, np.random.default_rng(0))
    assert np.all(np.isfinite(draws))


def test_sinc_gradients_are_stable_near_and_at_the_zeros_of_their_factors():
    points = np.array([[math.pi, 1e-9, 0.1, 0.1 + 1e-12], [0.5, 0, 0.2, 0.2], [-1.0, 2, 0.3, 0.3]])
    gradients = gradients_of(Sinc(), np.zeros(3), points, 1.0)
    others = math.sin(0.5) / 0.5 * math.sin(1.0)
    assert gradients[0, 0] == pytest.approx(others / math.pi, rel=1e-12)
    assert gradients[0, 1] == pytest.approx(1e-9 / 3 * math.sin(2) / 2, rel=1e-12)
    np.testing.assert_allclose(gradients[:, 2], gradients[:, 3], rtol=1e-10)
