"""Functions and operations that look into a store first, in any step and in any process."""

import multiprocessing

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from models import BlackBox, sample
from pytensor.compile.ops import wrap_py

from pymc_kameleon import AdaptiveMetropolisStep, EvaluationStore


class Differentiable(BlackBox):
    """-|x - 1|^2 / 2 with its gradient."""

    def __init__(self):
        super().__init__(models.negative_half_square)

    def pullback(self, inputs, outputs, cotangents):
        return [cotangents[0] * (1.0 - inputs[0])]

    L_op = pullback


def model_of(operation):
    with pm.Model() as model:
        pm.Potential("simulator", operation(pm.Normal("x", 0, 1, shape=2)))
    return model


def test_an_operation_is_called_once_at_a_point():
    store, operation = EvaluationStore(), BlackBox(models.negative_half_square)
    wrapped, x = store.wrap(operation), pt.dvector()
    function = pytensor.function([x], wrapped(x), mode="FAST_COMPILE")
    for _ in range(3):
        np.testing.assert_allclose(function([1.0, 2.0]), -0.5)
        np.testing.assert_allclose(function([1.0, 3.0]), -2.0)
    assert operation.calls == 2
    assert store.summary()["evaluations"] == 2


def test_what_wrap_py_returns_is_an_operation():
    store, calls = EvaluationStore(), []

    @store.wrap
    @wrap_py([pt.dvector, pt.dscalar], [pt.dscalar])
    def log_likelihood(x, scale):
        calls.append(1)
        return np.asarray(-np.sum(x**2) / scale)

    x, scale = pt.dvector(), pt.dscalar()
    function = pytensor.function([x, scale], log_likelihood(x, scale), mode="FAST_COMPILE")
    for _ in range(2):
        assert function([1.0, 2.0], 2.0) == -2.5
        assert function([1.0, 2.0], 4.0) == -1.25
    assert len(calls) == 2
    ((description,),) = store._execute("SELECT description FROM models")
    assert "log_likelihood" in description
    copy = cloudpickle.loads(cloudpickle.dumps(log_likelihood))
    again = pytensor.function([x, scale], copy(x, scale), mode="FAST_COMPILE")
    assert again([1.0, 2.0], 2.0) == -2.5
    assert again([2.0, 2.0], 2.0) == -4.0
    assert store.summary()["evaluations"] == 3


@pytest.mark.parametrize("pickled", [False, True])
def test_a_function_goes_to_another_process(pickled):
    store = EvaluationStore()
    wrapped = store.wrap(models.negative_half_square)
    assert wrapped.__name__ == "negative_half_square"
    if pickled:
        wrapped = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert wrapped(np.zeros(2)) == -1.0
    assert store.summary()["evaluations"] == 1


def test_the_gradient_is_that_of_the_operation():
    operation = Differentiable()
    wrapped, x = EvaluationStore().wrap(operation), pt.dvector()
    gradient = pytensor.function([x], pt.grad(wrapped(x), x), mode="FAST_COMPILE")
    np.testing.assert_allclose(gradient([0.0, 3.0]), [1.0, -2.0])
    plain = EvaluationStore().wrap(BlackBox(models.negative_half_square))
    with pytest.raises(NotImplementedError):
        pt.grad(plain(x), x)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.numerics)])
def test_chains_of_any_step_share_values(context):
    """Chains of one seed find in the file, one after the other, what the first of them asked."""
    store, operation = EvaluationStore(), BlackBox(models.negative_half_square)
    model = model_of(store.wrap(operation))
    options = {"draws": 30, "tune": 20, "chains": 2, "random_seed": 5}
    before, results = operation.calls, []
    for cores in (1, 2):
        with model:
            step = pm.Metropolis(compile_kwargs={"mode": "FAST_COMPILE"})
        mp_ctx = multiprocessing.get_context(context)
        results.append(sample(step, model, cores=cores, mp_ctx=mp_ctx, **options))
    first, found = results
    assert operation.calls - before > 50
    np.testing.assert_array_equal(models.values(first, "x"), models.values(found, "x"))
    assert store.summary()["evaluations"] == operation.calls
    assert store.summary()["chains"] == 1


def test_a_step_of_this_package_takes_it():
    store, operation = EvaluationStore(), BlackBox(models.negative_half_square)
    model = model_of(store.wrap(operation))
    counts = []
    for _ in range(2):
        before = operation.calls
        idata = sample(
            AdaptiveMetropolisStep(model=model, steps_per_draw=4), model, draws=40, tune=40
        )
        counts.append(operation.calls - before)
    assert counts[0] > 100
    assert counts[1] == 0
    assert models.values(idata, "x").std() > 0.1


def test_functions_are_known_by_their_name_or_another():
    store = EvaluationStore(new_model=True)
    first = store.wrap(lambda x: float(x), name="simulator 1")
    second = store.wrap(lambda x: 2.0 * float(x), name="simulator 2")
    assert (first(1.0), second(1.0), first(1.0)) == (1.0, 2.0, 1.0)
    assert store.wrap(lambda x: 9.0, name="simulator 1")(1.0) == 1.0
    assert store.summary()["models"] == 2
    with pytest.raises(ValueError, match="another model: function differ"):
        EvaluationStore(store.path).wrap(models.negative_half_square)


def test_failures_are_stored_and_raised():
    def fails(x):
        raise ArithmeticError("no solution")

    store = EvaluationStore()
    wrapped, x = store.wrap(BlackBox(fails), name="fails"), pt.dvector()
    function = pytensor.function([x], wrapped(x), mode="FAST_COMPILE")
    with pytest.raises(ArithmeticError, match="no solution"):
        function([1.0])
    assert store.summary()["failed"] == 1


def test_what_cannot_be_wrapped_is_refused():
    store = EvaluationStore()
    with pytest.raises(TypeError, match="function=3"):
        store.wrap(3)
    vector = store.wrap(wrap_py([pt.dvector], [pt.dvector])(lambda x: x), name="vector")
    with pytest.raises(ValueError, match="one scalar output"):
        vector(pt.dvector())
