"""What a black box may return: converted where that is safe, else an error says what to write."""

import re
from decimal import Decimal

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import xarray as xr
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import wrap_py
from pytensor.graph.op import Op

from pymc_kameleon import EvaluationStore, KameleonStep
from pymc_kameleon.model.operations import converted

try:
    from pytensor.conditional.op import ifelse
except ImportError:  # PyTensor 2
    from pytensor.ifelse import ifelse

VALUE = -1.5
NUMBERS = {
    "float": VALUE,
    "list": [VALUE],
    "tuple": (VALUE,),
    "nested list": [[VALUE]],
    "NumPy's float": np.float64(VALUE),
    "NumPy's float32": np.float32(VALUE),
    "long double": np.longdouble(VALUE),
    "array without dimensions": np.array(VALUE),
    "array of one": np.array([VALUE]),
    "matrix of one": np.array([[VALUE]]),
    "float32 array": np.array(VALUE, dtype=np.float32),
    "object array": np.array([VALUE], dtype=object),
    "masked array, nothing masked": np.ma.array([VALUE]),
    "data array": xr.DataArray(VALUE),
    "series": pd.Series([VALUE]),
    "decimal": Decimal(VALUE),
    "memory": memoryview(np.array([VALUE])),
}
INTEGERS = {"int": -2, "NumPy's int": np.int64(-2), "int array": np.array([-2], dtype=np.int8)}
NO_NUMBERS = {
    "nothing": None,
    "text": "-1.5",
    "bytes": b"-1.5",
    "complex": complex(VALUE),
    "complex array": np.array([VALUE + 0j]),
    "several": [VALUE, VALUE],
    "array of several": np.full(3, VALUE),
    "empty": [],
    "dict": {"value": VALUE},
    "generator": (x for x in [VALUE]),
    "function": len,
    "masked": np.ma.array([VALUE], mask=[True]),
    "date": np.datetime64("2020-01-01"),
    "ragged": [[1.0], [1.0, 2.0]],
    "array of None": np.array([None]),
}
CURVE = np.array([1.0, 2.0, 4.0])
CURVES = {
    "list": [1.0, 2.0, 4.0],
    "tuple": (1.0, 2.0, 4.0),
    "list of arrays": [np.array(1.0), np.array(2.0), np.array(4.0)],
    "integers": np.array([1, 2, 4]),
    "float32": CURVE.astype(np.float32),
    "every other": np.repeat(CURVE, 2)[::2],
    "backwards": CURVE[::-1][::-1],
    "read-only": np.broadcast_to(CURVE, (2, 3))[0],
    "other byte order": CURVE.astype(">f8"),
    "row of a matrix": np.asfortranarray(np.tile(CURVE, (2, 1)))[1],
    "series": pd.Series(CURVE),
    "data array": xr.DataArray(CURVE),
}
NO_CURVES = {
    "number": 1.0,
    "row": CURVE[None],
    "column": CURVE[:, None],
    "nothing": None,
    "texts": ["1", "2", "4"],
    "complex": CURVE + 0j,
}


@pytest.mark.parametrize("kind", NUMBERS | INTEGERS)
def test_number_is_converted(kind):
    """A whole one to any type."""
    expected = -2 if kind in INTEGERS else VALUE
    for declared in (pt.dscalar, pt.fscalar, pt.lscalar)[: 3 if kind in INTEGERS else 1]:
        found = converted((NUMBERS | INTEGERS)[kind], declared, "f")
        assert type(found) is np.ndarray and found.dtype == declared.dtype
        assert found.shape == () and found == expected


@pytest.mark.parametrize("kind", CURVES)
def test_curve_is_converted_into_an_array_of_its_own(kind):
    found = converted(CURVES[kind], pt.dvector, "f")
    assert found.dtype == np.float64 and found.flags.c_contiguous and found.flags.writeable
    np.testing.assert_array_equal(found, CURVE)
    assert not np.shares_memory(found, CURVE)


FOUR = pt.TensorType("float64", shape=(4,))
REFUSED = [
    *((value, pt.dscalar, "return one number, as in") for value in NO_NUMBERS.values()),
    *((value, pt.dvector, "with 1 dimension, as in") for value in NO_CURVES.values()),
    *((value, pt.lscalar, "return one whole number") for value in (1.5, np.nan)),
    (2.0**40, pt.iscalar, "return one whole number"),
    (CURVE, FOUR, r"of shape \(3,\) .* of shape \(4,\)"),
    ({"key": "x" * 1000}, pt.dscalar, "return one number"),
]


@pytest.mark.parametrize(("value", "declared", "words"), REFUSED)
def test_what_does_not_fit_is_refused(value, declared, words):
    with np.errstate(invalid="ignore"), pytest.raises((TypeError, ValueError)) as caught:
        converted(value, declared, "f")
    assert re.match(f"f returned .*{words}", str(caught.value))
    assert len(str(caught.value)) < 250


# where a black box may be -------------------------------------------------------------------------


@wrap_py(itypes=[pt.dscalar], otypes=[pt.dscalar])
def half_square(a):
    return float(-0.5 * a * a)


class Forgetful(Op):
    """An operation that leaves what it declares to others."""

    itypes, otypes = [pt.dscalar], [pt.dscalar]

    def perform(self, node, inputs, outputs):
        outputs[0][0] = float(-0.5 * inputs[0] ** 2)


@wrap_py(itypes=[pt.dscalar], otypes=[pt.dscalar, pt.dvector])
def value_and_curve(a):
    return float(-0.25 * a * a), [0.0, float(-0.25 * a * a)]


def sum_of_several(a):
    value, curve = value_and_curve(a)
    return value + curve.sum()


def in_a_graph_of_its_own(a):
    inner = pt.dscalar()
    return OpFromGraph([inner], [half_square(inner)])(a)


def in_a_loop(a):
    weights = pt.as_tensor(np.array([0.25, 0.75]))
    found = pytensor.scan(lambda w, a: w * half_square(a), sequences=[weights], non_sequences=[a])
    return (found[0] if isinstance(found, list | tuple) else found).sum()


def in_a_branch(a):
    return ifelse(pt.ge(a, -100.0), half_square(a), pt.zeros((), dtype="float64"))


@wrap_py(itypes=[pt.dscalar], otypes=[pt.dvector])
def list_of_one_array(a):
    return [-0.25 * np.array([a, a]) ** 2]


def sum_of_a_list_of_one_array(a):
    return list_of_one_array(a).sum()


def after_another(a):
    return half_square(pt.sqrt(-2.0 * half_square(a)))


def stored(a):
    return EvaluationStore().wrap(half_square)(a)


FORMS = {
    "wrap_py": half_square,
    "stored": stored,
    "operation": Forgetful(),
    "several outputs": sum_of_several,
    "list of one array": sum_of_a_list_of_one_array,
    "graph": in_a_graph_of_its_own,
    "loop": in_a_loop,
    "branch": in_a_branch,
    "after another": after_another,
}


@pytest.mark.parametrize("form", FORMS)
def test_number_is_converted_wherever_it_comes_from(form):
    with pm.Model() as model:
        pm.Potential("p", FORMS[form](pm.Flat("a")))
    for mode in (None, "cvm", "numba", "FAST_COMPILE"):
        step = KameleonStep(model=model, compile_kwargs=None if mode is None else {"mode": mode})
        assert step.target(np.array([3.0]))[1] == pytest.approx(-4.5), mode


def test_log_density_of_a_custom_distribution():
    @wrap_py(itypes=[pt.dvector, pt.dvector], otypes=[pt.dvector])
    def logp(a, data):
        return (-0.5 * (data - a) ** 2).tolist()

    with pm.Model():
        a = pm.Flat("a")
        pm.CustomDist(
            "y", a, logp=lambda value, a: logp(pt.atleast_1d(a), value), observed=[1.0, 3.0]
        )
        step = KameleonStep()
    assert step.target(np.array([1.0]))[1] == pytest.approx(-2.0)


def test_one_buffer_for_all_values():
    buffer = np.zeros(2)

    @wrap_py(itypes=[pt.dscalar], otypes=[pt.dvector])
    def curve(a):
        buffer[:] = a
        return buffer

    with pm.Model():
        a = pm.Flat("a")
        pm.Potential("p", pt.dot(curve(a), curve(2.0 * a)))
        step = KameleonStep()
    assert step.target(np.array([1.0]))[1] == 4.0
    assert step.target(np.array([3.0]))[1] == 36.0


def test_arguments_that_are_changed_are_copies():
    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def squares(a):
        a *= a
        return -0.5 * a.sum()

    with pm.Model():
        a = pm.Normal("a", shape=2)
        pm.Potential("p", squares(a))
        step = KameleonStep()
    x = np.array([1.0, 3.0])
    for _ in range(2):
        np.testing.assert_allclose(step.target(x)[:2], [-5.0 - np.log(2 * np.pi), -5.0])
    np.testing.assert_array_equal(x, [1.0, 3.0])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda a: a, r"^pair returned .*: return 2 arrays, a tuple"),
        (lambda a: (a, None), r"^pair as output 2 returned None: return one number"),
    ],
)
def test_several_outputs_are_checked(returned, words):
    @wrap_py(itypes=[pt.dscalar], otypes=[pt.dscalar, pt.dscalar])
    def pair(a):
        return returned(a)

    with pm.Model():
        value, other = pair(pm.Flat("a"))
        pm.Potential("p", value + other)
        step = KameleonStep()
    with pytest.raises(TypeError, match=words):
        step.target(np.array([1.0]))


def test_log_names_the_function(caplog):
    with caplog.at_level("INFO", logger="pymc.kameleon"), pm.Model():
        pm.Potential("p", half_square(pm.Flat("a")))
        KameleonStep()
        pm.Potential("q", Forgetful()(pm.Flat("b")))
        KameleonStep()
    assert "The log density holds half_square, which runs in Python, and so do" in caplog.text
    assert "@numba.njit" in caplog.text
    assert "holds Forgetful, half_square, which" in caplog.text
