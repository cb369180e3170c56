"""`black_box` of a function that Numba compiles: the same numbers, in compiled transitions."""

import cloudpickle
import numba
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import run, sample
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch import numba_funcify

from pymc_kameleon import EvaluationStore, KameleonStep, black_box
from pymc_kameleon.model.black_box import CompiledSimulator
from pymc_kameleon.store.evaluation_store import describe

DAYS = np.arange(1.0, 9.0)
SEEN = [14.9, 11.1, 8.1, 6.2, 4.4, 3.4, 2.3, 1.9]


def temperature(rate, start, days):
    days *= rate  # a copy
    return start * np.exp(-days)


def half_square(a):
    if a < 0:
        raise ValueError("no solution")
    return -0.5 * a * a


@black_box
@numba.njit
def shared_by_name(a):
    return -0.5 * a * a


def cooling(function):
    with pm.Model() as model:
        rate, start = pm.HalfNormal("rate", 1.0), pm.Normal("start", 20.0, 5.0)
        pm.Normal("seen", function(rate, start, DAYS), 0.2, observed=SEEN)
    return model


@pytest.fixture(scope="module")
def step():
    return KameleonStep(model=cooling(black_box(numba.njit(temperature))), steps_per_draw=4)


# what it returns ----------------------------------------------------------------------------------

RETURNED = {
    "float": (lambda a, data: -0.5 * a + data[0, 1], ()),
    "int": (lambda a, data: 3, ()),
    "truth": (lambda a, data: a > 0, ()),
    "array of one": (lambda a, data: np.full((1, 1), a, np.float32), ()),
    "transposed": (lambda a, data: a * data.T, (3, 2)),
    "whole numbers": (lambda a, data: np.arange(3), (3,)),
    "argument": (lambda a, data: data, (2, 3)),
}


def test_numbers_are_those_of_python():
    """In a new array each, whatever the layout of arguments and result."""
    a, data = pt.dscalar("a"), pt.dmatrix("data")
    values = 1.5, np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = [black_box(numba.njit(f), shape=shape)(a, data) for f, shape in RETURNED.values()]
    assert all(isinstance(variable.owner.op, CompiledSimulator) for variable in found)
    for variable, (function, shape) in zip(found, RETURNED.values(), strict=True):
        call = numba_funcify(variable.owner.op, variable.owner)
        returned = call(np.array(values[0]), values[1])
        assert returned.dtype == np.float64 and returned.shape == shape
        np.testing.assert_array_equal(returned, np.reshape(function(*values), shape))
        assert not np.shares_memory(returned, values[1])


NOT_COMPILED = {
    "ordinary": (half_square, {}),
    "failures": (numba.njit(half_square), {"failures": ValueError}),
    "timeout": (numba.njit(half_square), {"timeout": 9.0}),
    "workers": (numba.njit(half_square), {"cores": 2}),
    "vectorized": (numba.njit(half_square), {"vectorized": True}),
    "store": (numba.njit(half_square), {"store": EvaluationStore()}),
    "vectorize": (numba.vectorize(["float64(float64)"])(lambda a: -a), {}),
    "list": (numba.njit(lambda a: [a, a]), {"shape": 2}),
    "complex": (numba.njit(lambda a: a + 0j), {}),
    "nothing": (numba.njit(lambda a: None), {}),
    "number for a curve": (numba.njit(lambda a: a), {"shape": 3}),
}


@pytest.mark.parametrize("kind", NOT_COMPILED)
def test_what_stays_as_it_is(kind):
    function, options = NOT_COMPILED[kind]
    variable = black_box(function, **{"shape": ()} | options)(pt.dscalar())
    owners = [v.owner for v in ancestors([variable]) if v.owner]
    assert not any(isinstance(node.op, CompiledSimulator) for node in owners)


def test_one_that_numba_cannot_compile_runs_in_python(caplog):
    @numba.njit
    def by_text(a):
        return float(f"{a:.3f}".strip())

    with caplog.at_level("INFO", logger="pymc.kameleon"), pm.Model() as model:
        found = black_box(by_text)(pm.Normal("a", initval=0.25))
    assert found.owner.op.black_box.function is by_text.py_func
    assert "Numba cannot compile by_text, which runs in Python: " in caplog.text
    assert model.compile_fn(found, inputs=[model["a"]], point_fn=False)(0.25) == 0.25


def test_wrong_shapes_name_the_function():
    with pm.Model(), pytest.raises(TypeError, match="nothing returned None: return one number"):

        @black_box
        @numba.njit
        def nothing(a):
            pass

        nothing(pm.Normal("a"))

    @numba.njit
    def curve(a):
        return np.zeros(3 if a == 0 else 4)

    variable = black_box(curve, shape=3)(pt.dscalar())
    evaluate = numba_funcify(variable.owner.op, variable.owner)
    assert evaluate(np.array(0.0)).shape == (3,)
    with pytest.raises(ValueError, match=r"curve returned an array of another shape than \(3,\)"):
        evaluate(np.array(1.0))


# chains -------------------------------------------------------------------------------------------


def test_the_chain_is_that_of_python(step):
    assert "compiled" in repr(step)
    with cooling(black_box(temperature)):
        other = KameleonStep(steps_per_draw=4, compile_kwargs={"mode": "FAST_COMPILE"})
    # Evaluations of one are those of the other.
    assert describe(step.target) == describe(other.target)
    chains = [run(s, s.target.model, 80, tune=60, seed=3) for s in (step, other)]
    (draws, statistics, _), (draws_of_python, statistics_of_python, _) = chains
    np.testing.assert_allclose(draws, draws_of_python, rtol=1e-6)
    assert len(np.unique(draws[:, 0])) > 20
    for name in ("n_evals", "n_nonfinite", "accepted"):
        each = [[s[name] for s in those] for those in (statistics, statistics_of_python)]
        np.testing.assert_array_equal(*each)
    # The first draw after tuning looks for random numbers.
    assert statistics[-1]["n_evals"] == 4.0 and statistics[60]["n_evals"] == 5.0


def test_chains_in_processes_of_their_own(step):
    model = step.target.model
    options = {"draws": 15, "tune": 10, "chains": 2, "random_seed": 1}
    here, there = (sample(step, model, cores=n, **options)["posterior"]["rate"] for n in (1, 2))
    np.testing.assert_allclose(here.values, there.values, rtol=1e-6)


def test_a_copy_is_compiled_anew(step):
    sent = cloudpickle.loads(cloudpickle.dumps(step))
    assert "compiled" in repr(sent)
    x = np.array([0.5, 19.0])
    np.testing.assert_allclose(sent.target(x), step.target(x), rtol=1e-12)


def test_known_by_its_name():
    assert cloudpickle.loads(cloudpickle.dumps(shared_by_name)) is shared_by_name
    assert shared_by_name(2.0) == -2.0


@pytest.fixture(scope="module")
def one_that_raises():
    with pm.Model() as model:
        a = pm.Flat("a", initval=1.0)
        pm.Potential("p", black_box(numba.njit(half_square))(a))
        return model, KameleonStep(steps_per_draw=4)


def test_errors_while_tuning_are_no_density(one_that_raises):
    """As many as in Python, in the same draws; said once."""
    model, step = one_that_raises
    assert "compiled" in repr(step)
    with pm.Model() as plain:
        a = pm.Flat("a", initval=1.0)
        pm.Potential("p", black_box(half_square)(a))
        other = KameleonStep(steps_per_draw=4, compile_kwargs={"mode": "FAST_COMPILE"})
    begun = [run(s, m, 60, tune=60, seed=1) for s, m in ((step, model), (other, plain))]
    np.testing.assert_allclose(begun[0][0], begun[1][0], rtol=1e-6)
    assert begun[0][0].min() > 0
    assert step.report.failed == other.report.failed > 10
    assert "no solution" in step.report.first_failure
    for name in ("n_evals", "n_nonfinite"):
        each = [[s[name] for s in statistics] for _, statistics, _ in begun]
        np.testing.assert_array_equal(*each)


def test_an_error_after_tuning_says_where(one_that_raises):
    model, step = one_that_raises
    with pytest.raises(ValueError, match="no solution") as raised:
        run(step, model, 260, tune=60, seed=1)
    assert "failed at a proposal of the chain, a = -" in raised.value.__notes__[-1]


def test_random_numbers_are_noticed():
    @numba.njit
    def noisy(a):
        return -0.5 * a * a + np.random.normal()  # noqa: NPY002

    with pm.Model() as model:
        pm.Potential("p", black_box(noisy)(pm.Flat("a", initval=0.5)))
        step = KameleonStep(steps_per_draw=4)
    _, statistics, _ = run(step, model, 42, tune=40, seed=1)
    told = [s["warning"].message for s in statistics if "warning" in s]
    assert any("The log density is random" in text for text in told)
