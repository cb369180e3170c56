"""Kernels against textbook formulas and finite differences."""

import math

import numba
import numpy as np
import pytest
from scipy import special

from pymc_kameleon.kernels import (
    CustomKernel,
    Gaussian,
    Linear,
    Matern,
    Polynomial,
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


KERNELS = {
    "gaussian": Gaussian(),
    "matern-1.5": Matern(1.5),
    "matern-2.5": Matern(2.5),
    "matern-1.2": Matern(1.2),
    "matern-4": Matern(4),
    "linear": Linear(),
    "polynomial-3": Polynomial(3, 0.7),
    "polynomial-1": Polynomial(1),
    "custom-njit": CustomKernel(_rational_quadratic, _rational_quadratic_gradient),
    "custom-plain": CustomKernel(_rational_quadratic, _plain_gradient),
}


def gradients_of(kernel, x, points, bandwidth):
    out = np.full(points.shape, np.nan)
    kernel.gradients(x, points, kernel.parameters(bandwidth), out)
    return out


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_gradients_match_finite_differences(name, dim):
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
    assert Linear()(x, y) == pytest.approx(float(x[0] @ y[0]), rel=1e-12)
    assert Polynomial(3, 0.7)(x, y) == pytest.approx(float(x[0] @ y[0] + 0.7) ** 3, rel=1e-12)


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
