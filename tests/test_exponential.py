"""The exponential that the compiler vectorises, alone and in a model's compiled graph."""

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode

from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.model.vectorised_exp import VECTORISING


@numba.njit
def exponentials(x, out):
    for i in range(x.size):
        out[i] = exp(x[i])


def test_within_a_unit_in_the_last_place():
    """Where doubles have all their digits, beside extended precision."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-708, 709.7, 100_000), rng.uniform(-2, 2, 100_000)])
    found, expected = np.empty_like(x), np.exp(x.astype(np.longdouble))
    exponentials(x, found)
    assert np.all(np.abs(found - expected) <= np.spacing(expected.astype(float)))


def test_at_the_ends():
    x = np.array([np.nan, np.inf, -np.inf, 709.8, 1e300, -745.2, -1e300, 0.0, -0.0, 709.78])
    subnormal = np.array([-708.5, -720.25, -740.0, -745.1])
    found = np.empty(len(x) + len(subnormal))
    exponentials(np.concatenate([x, subnormal]), found)
    inf = np.inf
    np.testing.assert_array_equal(found[:9], [np.nan, inf, 0, inf, inf, 0, 0, 1, 1])
    assert found[9] == pytest.approx(np.exp(709.78), rel=1e-15)
    np.testing.assert_allclose(found[10:], np.exp(subnormal), rtol=1e-15, atol=5e-324)


@pytest.mark.parametrize("shape", [(7,), (5, 5)])
def test_a_graph_has_it_for_arrays_and_the_same_values(shape):
    """Rows and columns are broadcast; scalars and whole numbers are left to PyTensor."""
    x, scale = pt.tensor("x", shape=shape), pt.dscalar("scale")
    whole = pt.lvector("whole")
    parts = x * pt.exp(scale) - x[..., 0][None] if len(shape) == 2 else x * pt.exp(scale)
    output = pt.exp(-0.5 * parts**2 + x.sum(axis=0)) + pt.exp(whole).sum()
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape), 0.3, np.arange(3)
    modes = VECTORISING, get_mode("NUMBA")
    new, old = (pm.pytensorf.compile([x, scale, whole], output, mode=mode) for mode in modes)
    np.testing.assert_allclose(new(*values), old(*values), rtol=1e-14)
    graph = pytensor.dprint(new, file="str")
    assert "vectorised_exp(" in graph
    assert "vectorised_exp" not in pytensor.dprint(old, file="str")
