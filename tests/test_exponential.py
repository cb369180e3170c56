"""The exponential that the compiler vectorises."""

import numba
import numpy as np
import pytest

from pymc_kameleon.mcmc.exponential import exp


@numba.njit
def exponentials(x):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = exp(x[i])
    return out


@pytest.mark.parametrize(("low", "high"), [(-708, 709.7), (-2, 2)])
def test_one_unit_in_the_last_place(low, high):
    """Where doubles have all their digits, beside extended precision."""
    x = np.random.default_rng(1).uniform(low, high, 100_000)
    exact = np.exp(x.astype(np.longdouble))
    assert np.all(np.abs(exponentials(x) - exact) <= np.spacing(exact.astype(float)))


def test_at_the_ends():
    x = [np.nan, np.inf, -np.inf, 709.8, 1e300, -745.2, -1e300, 0.0, -0.0]
    expected = [np.nan, np.inf, 0, np.inf, np.inf, 0, 0, 1, 1]
    np.testing.assert_array_equal(exponentials(np.array(x)), expected)
    x = np.array([709.78, -708.5, -720.25, -740.0, -745.1])
    np.testing.assert_allclose(exponentials(x), np.exp(x), rtol=1e-15, atol=5e-324)
