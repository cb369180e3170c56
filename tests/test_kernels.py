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


@numba.njit
def _rational_quadratic_gradient(x, y, c):
    return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2


def _plain_gradient(x, y, c):
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
    "custom-njit": CustomKernel(_rational_quadratic, _rational_quadratic_gradient),
    "custom-plain": CustomKernel(_rational_quadratic, _plain_gradient),
}
"""Kernels with gradients."""

ROUGH = {
    "laplacian": Laplacian(),
    "matern-0.5": Matern(0.5),
    "matern-1": Matern(1),
    "custom-spectral": CustomKernel(_cosines, frequencies=_signs),
}
"""Kernels without."""


def gradients_of(kernel, x, points, bandwidth):
    out = np.full(points.shape, np.nan)
    kernel.gradients(x, points, kernel.parameters(bandwidth), out)
    return out


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_gradients_of_kernels_match_finite_differences(name, dim):
    kernel, rng = KERNELS[name], np.random.default_rng(dim)
    x, points, bandwidth = rng.normal(size=dim), rng.normal(size=(dim, 7)), 1.7
    gradients = gradients_of(kernel, x, points, bandwidth)
    step = 1e-5
    for i in range(dim):
        ahead, behind = x.copy(), x.copy()
        ahead[i] += step
        behind[i] -= step
        difference = kernel(ahead[None], points.T, bandwidth) - kernel(
            behind[None], points.T, bandwidth
        )
        np.testing.assert_allclose(gradients[i], difference[0] / (2 * step), atol=2e-8)


@pytest.mark.parametrize("name", [n for n in KERNELS if "poly" not in n and n != "linear"])
def test_gradient_vanishes_at_zero_distance(name):
    x = np.array([0.3, -1.2])
    gradients = gradients_of(KERNELS[name], x, np.ascontiguousarray(x[:, None]), 0.9)
    np.testing.assert_array_equal(gradients, 0.0)


def test_values_match_textbook_formulas():
    x, y, length = np.array([[0.2, 0.5]]), np.array([[1.1, -0.4]]), 1.3
    r = np.linalg.norm(x - y)
    assert Gaussian()(x, y, length) == pytest.approx(math.exp(-(r**2) / (2 * length**2)), rel=1e-12)
    s = math.sqrt(3) * r / length
    assert Matern(1.5)(x, y, length) == pytest.approx((1 + s) * math.exp(-s), rel=1e-10)
    s = math.sqrt(5) * r / length
    assert Matern(2.5)(x, y, length) == pytest.approx((1 + s + s**2 / 3) * math.exp(-s), rel=1e-10)
    for v in (1.2, 4.0):
        s = math.sqrt(2 * v) * r / length
        expected = 2 ** (1 - v) / math.gamma(v) * s**v * special.kv(v, s)
        assert Matern(v)(x, y, length) == pytest.approx(expected, rel=1e-10)
    assert Matern(0.5)(x, y, length) == pytest.approx(math.exp(-r / length), rel=1e-12)
    l1 = np.abs(x - y).sum()
    assert Laplacian()(x, y, length) == pytest.approx(math.exp(-l1 / length), rel=1e-12)
    for b in (0.5, 2.0):
        expected = (1 + r**2 / length**2) ** -b
        assert InverseMultiquadric(b)(x, y, length) == pytest.approx(expected, rel=1e-12)
    u = (x - y)[0] / length
    expected = math.prod(math.sin(v) / v for v in u)
    assert Sinc()(x, y, length) == pytest.approx(expected, rel=1e-12)
    expected = math.prod((math.sin(v / 2) / (v / 2)) ** 2 for v in u)
    assert SincSquared()(x, y, length) == pytest.approx(expected, rel=1e-12)
    assert Linear()(x, y) == pytest.approx(float(x[0] @ y[0]), rel=1e-12)
    assert Polynomial(3, 0.7)(x, y) == pytest.approx(float(x[0] @ y[0] + 0.7) ** 3, rel=1e-12)


@pytest.mark.parametrize("smoothness", [60, 500, 10_000])
def test_matern_is_right_where_the_bessel_function_overflows(smoothness):
    """Against the mixture of Gaussians over a gamma-distributed precision that it is."""
    r = np.array([0, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0])[:, None]
    g = smoothness + math.sqrt(smoothness) * np.linspace(-7, 12, 10_001)
    log_density = (smoothness - 1) * np.log(g) - g
    weights = np.exp(log_density - log_density.max())
    expected = np.exp(-smoothness * r**2 / (2 * g)) @ weights / weights.sum()
    np.testing.assert_allclose(Matern(smoothness)(r, np.zeros((1, 1)))[:, 0], expected, atol=5e-6)


def test_a_very_smooth_matern_is_gaussian():
    rng = np.random.default_rng(3)
    x, points = rng.normal(size=3), rng.normal(size=(3, 20))
    np.testing.assert_allclose(
        gradients_of(Matern(5000), x, points, 1.3),
        gradients_of(Gaussian(), x, points, 1.3),
        atol=2e-3,
    )


@pytest.mark.parametrize("smoothness", [0.01, 0.3, 0.5, 1, 1.2, 4, 60, 500])
def test_matern_is_one_at_zero_distance_and_falls(smoothness):
    r = np.concatenate([[0], np.geomspace(1e-250, 30, 40)])[:, None]
    values = Matern(smoothness)(r, np.zeros((1, 1)))[:, 0]
    assert values[0] == 1
    assert np.all(np.diff(values) < 1e-12)
    assert 0 <= values[-1] < 0.2


@pytest.mark.parametrize("smoothness", [1.5, 2.5])
def test_closed_forms_match_the_general_matern(smoothness):
    rng = np.random.default_rng(5)
    x, points = rng.normal(size=4), rng.normal(size=(4, 50))
    general = Matern(smoothness + 1e-9)
    np.testing.assert_allclose(
        gradients_of(Matern(smoothness), x, points, 0.8),
        gradients_of(general, x, points, 0.8),
        rtol=1e-6,
    )


def test_compiled_and_plain_custom_kernels_agree_and_say_what_they_are():
    assert KERNELS["custom-njit"].is_compiled
    assert not KERNELS["custom-plain"].is_compiled
    assert not Matern(1.2).is_compiled
    rng = np.random.default_rng(2)
    x, points = rng.normal(size=3), rng.normal(size=(3, 9))
    np.testing.assert_allclose(
        gradients_of(KERNELS["custom-njit"], x, points, 1.1),
        gradients_of(KERNELS["custom-plain"], x, points, 1.1),
        rtol=1e-12,
    )


def test_median_bandwidth_is_the_median_distance_over_root_two():
    points = np.array([[0.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    assert median_bandwidth(points) == pytest.approx(4 / math.sqrt(2))
    assert median_bandwidth(np.zeros((2, 5))) == 1.0


def test_median_bandwidth_ignores_repeated_points():
    points = np.repeat(np.array([[0.0, 3.0, 0.0], [0.0, 0.0, 4.0]]), 4, axis=1)
    assert median_bandwidth(points) == pytest.approx(4 / math.sqrt(2))


def test_names_classes_and_pairs_become_kernels():
    assert isinstance(as_kernel("gaussian"), Gaussian)
    assert isinstance(as_kernel(Polynomial), Polynomial)
    assert isinstance(as_kernel((_rational_quadratic, _plain_gradient)), CustomKernel)
    assert isinstance(as_kernel("matern"), Matern)
    assert isinstance(as_kernel("SINC"), Sinc)


SPECTRAL = {**KERNELS, **ROUGH}
for name in ("linear", "polynomial-3", "polynomial-1", "custom-njit", "custom-plain"):
    del SPECTRAL[name]


@pytest.mark.parametrize("name", [*KERNELS, *ROUGH])
def test_a_kernel_passes_for_what_it_has(name):
    kernel = {**KERNELS, **ROUGH}[name]
    assert kernel.has_gradients == (name in KERNELS)
    assert kernel.has_spectrum == (name in SPECTRAL)
    for needs, present in (("gradients", kernel.has_gradients), ("spectrum", kernel.has_spectrum)):
        if present:
            assert as_kernel(kernel, needs) is kernel
        else:
            with pytest.raises(ValueError, match=r"gradient|spectral density"):
                as_kernel(kernel, needs)


@pytest.mark.parametrize("name", [*KERNELS, *ROUGH])
def test_kernels_survive_pickling(name):
    kernel = {**KERNELS, **ROUGH}[name]
    copy = pickle.loads(pickle.dumps(kernel))
    x, y = np.array([[0.2, 0.5]]), np.array([[1.1, -0.4]])
    assert copy(x, y, 1.3) == kernel(x, y, 1.3)
    assert repr(copy) == repr(kernel)
    if kernel.has_gradients:
        points = np.ascontiguousarray(y.T)
        np.testing.assert_array_equal(
            gradients_of(copy, x[0], points, 1.3), gradients_of(kernel, x[0], points, 1.3)
        )
    if kernel.has_spectrum:
        draws = [k.frequencies(5, 2, 1.3, np.random.default_rng(1)) for k in (kernel, copy)]
        np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("name", [*SPECTRAL, "custom-spectral"])
def test_frequencies_scale_inversely_with_the_bandwidth(name):
    kernel = SPECTRAL[name]
    short, long = (kernel.frequencies(50, 3, c, np.random.default_rng(4)) for c in (0.1, 10))
    assert short.shape == (50, 3)
    np.testing.assert_allclose(short, 100 * long, rtol=1e-12)


@pytest.mark.parametrize("name", SPECTRAL)
def test_finite_frequencies_are_a_finite_curvature_at_zero(name):
    """E omega^2 = -k''(0): 2 (1 - k(h)) / h^2 tends to it as h falls, or grows without end."""
    kernel, h = SPECTRAL[name], np.array([[1e-2], [1e-4]])
    curvature = 2 * (1 - kernel(h, np.zeros((1, 1)))[:, 0]) / h[:, 0] ** 2
    settles = curvature[1] < 1.2 * curvature[0]
    assert kernel.has_finite_frequencies == settles


def test_frequencies_of_a_barely_continuous_kernel_are_finite():
    draws = Matern(0.005).frequencies(10_000, 1, 1.0, np.random.default_rng(0))
    assert np.all(np.isfinite(draws))


def test_sinc_gradients_are_stable_near_and_at_the_zeros_of_their_factors():
    x = np.zeros(3)
    points = np.array([[math.pi, 1e-9, 0.1, 0.1 + 1e-12], [0.5, 0, 0.2, 0.2], [-1.0, 2, 0.3, 0.3]])
    gradients = gradients_of(Sinc(), x, points, 1.0)
    u = math.pi
    others = math.sin(0.5) / 0.5 * math.sin(1.0)
    slope = -(math.cos(u) - math.sin(u) / u) / u
    assert gradients[0, 0] == pytest.approx(slope * others, rel=1e-12)
    assert gradients[0, 1] == pytest.approx(1e-9 / 3 * math.sin(2) / 2, rel=1e-12)
    np.testing.assert_allclose(gradients[:, 2], gradients[:, 3], rtol=1e-10)
