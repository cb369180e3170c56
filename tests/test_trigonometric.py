"""Sine and cosine that the compiler vectorises."""

import numba
import numpy as np
import pytest

from pymc_kameleon.mcmc.trigonometric import sine_and_cosine


@numba.njit
def sines_and_cosines(x, sines, cosines):
    for i in range(x.size):
        sines[i], cosines[i] = sine_and_cosine(x[i])


def found_at(x):
    sines, cosines = np.empty_like(x), np.empty_like(x)
    sines_and_cosines(x, sines, cosines)
    return sines, cosines


@pytest.mark.parametrize("largest", [1.0, 10.0, 1e3, 1e6])
def test_beside_extended_precision(largest):
    x = np.random.default_rng(1).uniform(-largest, largest, 100_000)
    sines, cosines = found_at(x)
    exact = x.astype(np.longdouble)
    assert np.abs(sines - np.sin(exact)).max() < 2e-16
    assert np.abs(cosines - np.cos(exact)).max() < 2e-16


def test_at_the_ends():
    sines, cosines = found_at(np.array([np.nan, np.inf, -1e300, 0.0]))
    np.testing.assert_array_equal(sines, [np.nan, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(cosines, [np.nan, 1.0, 1.0, 1.0])
