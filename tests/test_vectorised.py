"""The exponential that the compiler vectorises, alone and in a model's compiled graph."""

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode

from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.model.vectorised import VECTORISING


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


def compiled(inputs, output):
    """In our mode and in PyTensor's, and the names of the operations in both."""
    modes = VECTORISING, get_mode("NUMBA")
    functions = [pm.pytensorf.compile(inputs, output, mode=mode) for mode in modes]
    return *functions, *(pytensor.dprint(f, file="str") for f in functions)


@pytest.mark.parametrize("shape", [(7,), (5, 5)])
def test_a_graph_has_it_for_arrays_and_the_same_values(shape):
    """Rows and columns are broadcast; scalars and whole numbers are left to PyTensor."""
    x, scale = pt.tensor("x", shape=shape), pt.dscalar("scale")
    whole = pt.lvector("whole")
    parts = x * pt.exp(scale) - x[..., 0][None] if len(shape) == 2 else x * pt.exp(scale)
    output = pt.exp(-0.5 * parts**2 + x.sum(axis=0)) + pt.exp(whole).sum()
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape), 0.3, np.arange(3)
    new, old, graph, old_graph = compiled([x, scale, whole], output)
    np.testing.assert_allclose(new(*values), old(*values), rtol=1e-14)
    assert "vectorised_exp(" in graph
    assert "vectorised_exp" not in old_graph


def test_arrays_of_any_layout():
    x = pt.tensor("x", shape=(None, None, None), dtype="float64")
    new, _, graph, _ = compiled([x], pt.exp(x))
    values = np.random.default_rng(1).gamma(1.0, size=(3, 4, 5))
    for layout in (values, values.T, values[::2, :, ::-1], values[:, :0]):
        np.testing.assert_allclose(new(layout), np.exp(layout), rtol=1e-14)
    assert "vectorised_exp" in graph.lower()
