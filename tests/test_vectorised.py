"""Elementary functions that the compiler vectorises, alone and in a model's compiled graph."""

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode
from scipy import special

from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.logarithm import log, log1p, sigmoid_by_series, softplus_by_series
from pymc_kameleon.model.vectorised import VECTORISING

MODES = VECTORISING, get_mode("NUMBA")


def looped(function):
    """Apply a function that Numba compiles to every element."""
    is_series = function.__name__.endswith("by_series")
    by_element = numba.njit(function if is_series else lambda x: function(x))

    @numba.njit
    def loop(x):
        out = np.empty_like(x)
        for i in range(x.size):
            out[i] = by_element(x[i])
        return out

    return loop


def numbers_of_all_sizes(low, high):
    rng = np.random.default_rng(1)
    return np.concatenate(
        [rng.uniform(low, high, 100_000), np.exp(rng.uniform(-700, 700, 100_000))]
    )


UNITS = {
    "exp": (exp, np.exp, np.random.default_rng(1).uniform(-708, 709.7, 100_000), 1.0),
    "exp of small numbers": (exp, np.exp, np.random.default_rng(1).uniform(-2, 2, 100_000), 1.0),
    "log": (log, np.log, numbers_of_all_sizes(0.5, 2.0), 1.0),
    "log1p": (log1p, np.log1p, numbers_of_all_sizes(-1.0, 1.0), 2.0),
    "softplus": (
        softplus_by_series,
        lambda x: np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))),
        np.random.default_rng(1).uniform(-700, 700, 200_000) ** 3 / 490_000,
        3.0,
    ),
    "sigmoid": (
        sigmoid_by_series,
        lambda x: 1.0 / (1.0 + np.exp(-x)),
        np.random.default_rng(1).uniform(-700, 700, 200_000) ** 3 / 490_000,
        3.0,
    ),
}
"""Function, the same in extended precision, arguments, units in the last place."""


@pytest.mark.parametrize("name", UNITS)
def test_units_in_the_last_place(name):
    """Where doubles have all their digits, beside extended precision."""
    function, exact, x, most = UNITS[name]
    found, expected = looped(function)(x), exact(x.astype(np.longdouble))
    assert np.all(np.abs(found - expected) <= most * np.spacing(np.abs(expected.astype(float))))


INF, NAN, LEAST = np.inf, np.nan, 5e-324
ENDS = {
    "exp": (
        exp,
        [NAN, INF, -INF, 709.8, 1e300, -745.2, -1e300, 0.0, -0.0],
        [NAN, INF, 0, INF, INF, 0, 0, 1, 1],
    ),
    "log": (
        log,
        [NAN, INF, -INF, -1.0, -LEAST, 0.0, 1.0, LEAST],
        [NAN, INF, NAN, NAN, NAN, -INF, 0, np.log(LEAST)],
    ),
    "log1p": (
        log1p,
        [NAN, INF, -INF, -1.0, -1.1, 0.0, LEAST],
        [NAN, INF, NAN, -INF, NAN, 0, LEAST],
    ),
    "softplus": (softplus_by_series, [NAN, INF, -INF, -800.0, 1e308], [NAN, INF, 0, 0, 1e308]),
    "sigmoid": (sigmoid_by_series, [NAN, INF, -INF, -800.0, 800.0], [NAN, 1, 0, 0, 1]),
}


@pytest.mark.parametrize("name", ENDS)
def test_at_the_ends(name):
    function, x, expected = ENDS[name]
    np.testing.assert_array_equal(looped(function)(np.array(x)), expected)


def test_subnormal_and_large_numbers():
    np.testing.assert_allclose(looped(exp)(np.array([709.78])), np.exp(709.78), rtol=1e-15)
    x = np.array([-708.5, -720.25, -740.0, -745.1])
    np.testing.assert_allclose(looped(exp)(x), np.exp(x), rtol=1e-15, atol=5e-324)
    np.testing.assert_allclose(looped(log)(np.exp(x)), np.log(np.exp(x)), rtol=1e-15)


def compiled(inputs, output):
    """In our mode and in PyTensor's, and the names of the operations in both."""
    functions = [pm.pytensorf.compile(inputs, output, mode=mode) for mode in MODES]
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


@pytest.mark.parametrize(
    ("name", "function", "exact"),
    [
        ("exp", pt.exp, np.exp),
        ("log", pt.log, np.log),
        ("log1p", pt.log1p, np.log1p),
        ("sigmoid", pt.sigmoid, special.expit),
        ("softplus", pt.softplus, lambda x: np.logaddexp(0.0, x)),
    ],
)
def test_arrays_of_any_layout(name, function, exact):
    x = pt.tensor("x", shape=(None, None, None), dtype="float64")
    new, _, graph, _ = compiled([x], function(x))
    values = np.random.default_rng(1).gamma(1.0, size=(3, 4, 5))
    for layout in (values, values.T, values[::2, :, ::-1], values[:, :0]):
        np.testing.assert_allclose(new(layout), exact(layout), rtol=1e-14)
    assert f"vectorised_{name}" in graph.lower()


def test_one_loop_where_a_condition_chooses_between_two():
    """The log likelihood of a logistic regression, whose terms of ones and zeros differ."""
    x, y = pt.dvector("x"), pt.lvector("y")
    for p in (
        pm.logp(pm.Bernoulli.dist(logit_p=x), y),
        pt.switch(y, pt.log1p(x**2), pt.log1p(2.0 * x**2)),
    ):
        new, old, graph, _ = compiled([x, y], p)
        assert graph.count("vectorised_softplus") + graph.count("vectorised_log1p") == 1
        values = np.random.default_rng(1).standard_normal(9) * 20, np.arange(9) % 2
        np.testing.assert_allclose(new(*values), old(*values), rtol=1e-14)


def test_branches_of_other_types_stay_two():
    """One function of both would take them in another precision."""
    x, y = pt.dvector("x"), pt.lvector("y")
    small = pt.vector("small", dtype="float32")
    new, old, *_ = compiled([x, y, small], pt.switch(y, pt.exp(x), pt.exp(small)))
    values = np.array([1.1, 2.2]), np.array([0, 1]), np.array([3.3, 4.4], dtype=np.float32)
    np.testing.assert_allclose(new(*values), old(*values), rtol=1e-14)


def test_a_condition_that_is_longer_than_its_branches():
    """One logarithm is not made many."""
    x, y = pt.tensor("x", shape=(1,)), pt.lvector("y")
    new, old, *_ = compiled([x, y], pt.switch(y, pt.log(x), pt.log(x + 1.0)))
    values = np.array([2.0]), np.arange(4) % 2
    np.testing.assert_allclose(new(*values), old(*values), rtol=1e-14)


@pytest.mark.parametrize(("size", "expected"), [(7, False), (70, True)])
def test_few_elements_have_no_loop_of_their_own(size, expected):
    x = pt.tensor("x", shape=(size,))
    new, old, graph, _ = compiled([x], pt.log(x) * pt.exp(x))
    values = np.random.default_rng(1).gamma(1.0, size=size)
    np.testing.assert_allclose(new(values), old(values), rtol=1e-14)
    assert ("vectorised_log" in graph) == expected
