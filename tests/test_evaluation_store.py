"""A store of evaluations: nothing lost, nothing torn, nothing asked twice, other models refused."""

import os
import pickle
import sqlite3
import tempfile
from pathlib import Path

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from models import FORK, BlackBox, begin, drive, sample
from pytensor.compile.ops import wrap_py

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    GPSurrogate,
    SurrogateHMCStep,
)
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.store.stored_density import StoredDensity

NO_STORE = r"run\.sqlite cannot be used as a store"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.sqlite"


def together(function, arguments):
    """Call a function in as many processes at once."""
    processes = [FORK.Process(target=function, args=those) for those in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


# the file -----------------------------------------------------------------------------------------


def write_many(store, model, chain):
    rng = np.random.default_rng(chain)
    for _ in range(200):
        point = rng.normal(size=3)
        store.add(model, str(chain), point, float(point.sum()), 0.0)


def test_many_processes_write_at_once_and_nothing_is_lost_or_torn(path):
    store = EvaluationStore(path)
    model = store.model_number({"likelihood": "sum"})
    together(write_many, [(store, model, k) for k in range(16)])
    found = store.read(model)
    assert len(found) == 16 * 200
    assert all(e.value == e.point.sum() for e in found)
    expected = {np.random.default_rng(k).normal(size=3).tobytes() for k in range(16)}
    assert expected <= {e.point.tobytes() for e in found}
    assert len(store.read(model, not_by="3")) == 15 * 200
    numbers = [e.number for e in found]
    assert numbers == sorted(set(numbers))
    assert [e.number for e in store.read(model, after=numbers[-3])] == numbers[-2:]
    assert [e.number for e in store.read(model, most=3)] == numbers[-3:]
    assert [e.number for e in store.read(model, after=numbers[-3], most=3)] == numbers[-2:]


def test_values_are_stored_as_what_they_are(path):
    store = EvaluationStore(path)
    model = store.model_number({})
    for k, value in enumerate([-1.5, -np.inf, np.nan, np.inf]):
        store.add(model, "a", np.full(2, float(k)), value, 0.5)
    store.add(model, "b", np.full(2, 4.0), np.nan, 1.0, "ValueError: no solution")
    again = EvaluationStore(path).read(model)
    np.testing.assert_array_equal([e.value for e in again], [-1.5, -np.inf, np.nan, np.inf, np.nan])
    assert [e.failure for e in again] == [None] * 4 + ["ValueError: no solution"]
    assert store.find(model, np.ones(2)) == -np.inf
    assert np.isnan(store.find(model, np.full(2, 2.0)))
    assert store.find(model, np.full(2, 4.0)) is None  # it failed: try again
    assert store.find(model, np.full(2, 5.0)) is None
    counts = {"models": 1, "chains": 2, "evaluations": 5, "nonfinite": 3, "failed": 1}
    assert store.summary() == counts | {"seconds": 3.0}
    with sqlite3.connect(path) as connection:  # the format is plain SQLite
        rows = connection.execute("SELECT point, value FROM evaluations").fetchall()
    np.testing.assert_array_equal(np.frombuffer(rows[1][0]), [1.0, 1.0])
    assert [value for _, value in rows] == [-1.5, -np.inf, None, np.inf, None]


def test_a_temporary_store_leaves_nothing_behind():
    store = EvaluationStore()
    path = store.path
    store.add(store.model_number({}), "a", np.zeros(1), 0.0, 0.0)
    assert path.exists()
    del store
    assert not list(path.parent.glob(f"{path.name}*"))


def test_a_copy_in_another_process_is_the_same_store(path):
    store = EvaluationStore(path)
    model = store.model_number({})
    copy = pickle.loads(pickle.dumps(store))
    copy.add(model, "a", np.zeros(1), -2.0, 0.0)
    assert store.find(model, np.zeros(1)) == -2.0


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\0 and then nothing"])
def test_a_file_of_another_kind_is_refused(path, content):
    path.write_bytes(content * 50)
    with pytest.raises(ValueError, match=NO_STORE):
        EvaluationStore(path)
    with pytest.raises(ValueError, match=NO_STORE):
        EvaluationStore(path.parent / "nowhere" / "run.sqlite")


def open_as_nobody(path, messages):
    if os.geteuid() == 0:  # whom no file is closed to
        os.setuid(65534)
    try:
        EvaluationStore(path)
        messages.put("opened")
    except ValueError as error:
        messages.put(str(error))


def test_a_file_that_is_read_only_is_refused():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.sqlite")
        EvaluationStore(path)
        path.chmod(0o444)
        Path(directory).chmod(0o777)
        messages = FORK.Queue()
        process = FORK.Process(target=open_as_nobody, args=(path, messages))
        process.start()
        assert "run.sqlite cannot be used as a store" in messages.get(timeout=30)
        process.join()


def test_a_file_that_is_damaged_later_is_told(path):
    store = EvaluationStore(path)
    model = store.model_number({})
    for k in range(500):
        store.add(model, "a", np.full(8, float(k)), 0.0, 0.0)
    store._execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    content[8192:-4096] = b"x" * (len(content) - 12288)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=NO_STORE):
        EvaluationStore(path).read(model)


def test_sampling_goes_on_where_the_disk_is_full(path, caplog):
    model, operation = models.black_box()
    store = EvaluationStore(path)
    step = AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate(store=store))
    begin(step, 1, tune=30)
    ((pages,),) = store._execute("PRAGMA page_count")
    store._execute(f"PRAGMA max_page_count = {pages}")
    _, statistics, _ = drive(step, model.initial_point(), 400, tune=300)
    assert len(statistics) == 400
    told = [r for r in caplog.records if "database or disk is full" in r.getMessage()]
    assert len(told) == 1
    assert 0 < store.summary()["evaluations"] < operation.calls


OLD_TABLE = """
CREATE TABLE models (
    id INTEGER PRIMARY KEY, description TEXT NOT NULL UNIQUE, created REAL NOT NULL
);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL REFERENCES models, chain TEXT NOT NULL,
    point BLOB NOT NULL, value REAL, failure TEXT, seconds REAL NOT NULL, finished REAL NOT NULL
);
INSERT INTO models (description, created) VALUES ('{}', 0.0);
"""


def make_old(path):
    """A file of the time when no gradients were stored, with one evaluation."""
    with sqlite3.connect(path) as connection:
        connection.executescript(OLD_TABLE)
        row = np.array([1.0, 2.0]).tobytes()
        connection.execute(
            "INSERT INTO evaluations VALUES (1, 1, 'a', ?, -3.0, NULL, 0.1, 0)", [row]
        )


def test_a_file_without_gradients_is_opened_and_takes_some(path):
    make_old(path)
    store = EvaluationStore(path)
    model = store.model_number({})
    (found,) = store.read(model)
    np.testing.assert_array_equal(found.point, [1.0, 2.0])
    assert (found.value, found.gradient) == (-3.0, None)
    assert store.find(model, found.point) == -3.0
    assert store.find_with_gradient(model, found.point) is None
    store.add(model, "b", found.point, -3.0, 0.1, gradient=np.array([0.5, np.nan]))
    value, gradient = EvaluationStore(path).find_with_gradient(model, found.point)
    assert value == -3.0
    np.testing.assert_array_equal(gradient, [0.5, np.nan])


@pytest.mark.parametrize("is_old", [True, False])
def test_many_processes_open_a_file_at_once_that_is_old_or_new(path, is_old):
    if is_old:
        make_old(path)
    barrier, opened = FORK.Barrier(8), FORK.Queue()

    def open_together():
        barrier.wait()
        EvaluationStore(path)
        opened.put(True)

    together(open_together, 8 * [()])
    assert [opened.get(timeout=10) for _ in range(8)] == [True] * 8


# which model --------------------------------------------------------------------------------------


def test_models_in_one_file_are_kept_apart(path):
    store = EvaluationStore(path, new_model=True)
    first, second = store.model_number({"likelihood": "a"}), store.model_number({"likelihood": "b"})
    store.add(first, "a", np.zeros(2), -1.0, 0.0, gradient=np.ones(2))
    store.add(second, "b", np.zeros(2), -2.0, 0.0)
    assert (store.find(first, np.zeros(2)), store.find(second, np.zeros(2))) == (-1.0, -2.0)
    assert store.find_with_gradient(second, np.zeros(2)) is None
    assert [e.value for e in store.read(second)] == [-2.0]
    assert store.summary()["models"] == 2


def regression(prior_sd=1.0, observed=(1.0, 2.0), name="slope", power=1, last=1.5):
    with pm.Model() as model:
        slope = pm.Normal(name, 0.0, prior_sd)
        spread = pm.HalfNormal("spread", 1.0)
        x = pm.Data("x", np.array([0.5, 1.5]))
        pm.Normal("y", slope * x**power, spread, observed=np.array(observed))
    model.set_data("x", np.array([0.5, last]))
    return model


def number_of(model, store, vars=None):
    target = LogDensity(model, vars, compile_kwargs=models.UNCOMPILED)
    return StoredDensity(target, store).model


def test_another_prior_is_the_same_likelihood(path):
    store = EvaluationStore(path)
    assert {number_of(regression(sd), store) for sd in (1.0, 5.0, 1.0)} == {1}


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"observed": (1.0, 2.1)}, "data or constants differ"),
        ({"last": 1.6}, "data or constants differ"),
        ({"name": "rate"}, "variables, likelihood differ"),
        ({"power": 2}, "data or constants, likelihood differ"),
    ],
)
def test_another_likelihood_is_refused_and_what_differs_is_named(path, options, differs):
    number_of(regression(), EvaluationStore(path))
    with pytest.raises(ValueError, match=rf"run\.sqlite .* another model: {differs}"):
        number_of(regression(**options), EvaluationStore(path))
    assert number_of(regression(**options), EvaluationStore(path, new_model=True)) == 2
    assert number_of(regression(), EvaluationStore(path)) == 1


def test_a_likelihood_that_no_store_can_keep_is_refused():
    model = regression()
    with pytest.raises(ValueError, match=r"depends on spread_log__ too.*vars=\[slope, spread"):
        SurrogateHMCStep([model["slope"]], model=model, store=EvaluationStore())
    with pytest.raises(ValueError, match="no observed variables"):
        SurrogateHMCStep(model=models.two_scales(), store=EvaluationStore())


def test_evaluations_as_a_data_set_have_natural_coordinates():
    with pm.Model(coords={"place": ["a", "b"]}) as model:
        rate = pm.LogNormal("rate", 0.0, 1.0, dims="place")
        share = pm.Uniform("share", 0.0, 2.0)
        pm.Potential("y", -pt.sum((rate - 1.0) ** 2) - (share - 1.5) ** 2)
    store, value = EvaluationStore(), np.empty(3)
    density = StoredDensity(LogDensity(model, compile_kwargs=models.UNCOMPILED), store)
    for x in np.random.default_rng(1).normal(size=(20, 3)):
        density.into(x, value)
    found = store.to_dataset(model)
    assert found["rate"].dims == ("evaluation", "place")
    assert list(found["place"].values) == ["a", "b"]
    expected = -((found["rate"] - 1.0) ** 2).sum("place") - (found["share"] - 1.5) ** 2
    np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-10)
    assert found.sizes["evaluation"] == store.summary()["evaluations"]
    assert not found["failed"].any()


# functions and operations -------------------------------------------------------------------------


class Differentiable(BlackBox):
    """-|x - 1|^2 / 2 with its gradient."""

    def pullback(self, inputs, outputs, cotangents):
        return [cotangents[0] * (1.0 - inputs[0])]

    L_op = pullback


def model_of(operation):
    with pm.Model() as model:
        pm.Potential("simulator", operation(pm.Normal("x", 0, 1, shape=2)))
    return model


def called(operation, *arguments):
    """The value of an operation at numbers and vectors, in a function of its own."""
    inputs = [pt.vector() if np.ndim(argument) else pt.scalar() for argument in arguments]
    return pytensor.function(inputs, operation(*inputs), mode="FAST_COMPILE")(*arguments)


@pytest.mark.parametrize("kind", ["function", "wrap_py"])
def test_what_is_wrapped_is_called_once_at_a_point(kind):
    calls, store = [], EvaluationStore()

    def log_likelihood(x, scale):
        calls.append(1)
        return np.asarray(-np.sum(np.asarray(x) ** 2) / scale)

    def found(*arguments):
        return wrapped(*arguments) if kind == "function" else called(wrapped, *arguments)

    if kind == "function":
        wrapped = store.wrap(log_likelihood)
        assert wrapped.__name__ == "log_likelihood"
    else:
        wrapped = store.wrap(wrap_py([pt.dvector, pt.dscalar], [pt.dscalar])(log_likelihood))
    for _ in range(2):
        assert found([1.0, 2.0], 2.0) == -2.5
        assert found([1.0, 2.0], 4.0) == -1.25
    assert len(calls) == store.summary()["evaluations"] == 2
    ((description,),) = store._execute("SELECT description FROM models")
    assert "log_likelihood" in description
    wrapped = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert found([1.0, 2.0], 2.0) == -2.5
    assert found([2.0, 2.0], 2.0) == -4.0
    assert store.summary()["evaluations"] == 3


def test_the_gradient_is_that_of_the_operation():
    operation = Differentiable(models.negative_half_square)
    wrapped, x = EvaluationStore().wrap(operation), pt.dvector()
    np.testing.assert_allclose(called(wrapped, [1.0, 2.0]), -0.5)
    gradient = pytensor.function([x], pt.grad(wrapped(x), x), mode="FAST_COMPILE")
    np.testing.assert_allclose(gradient([0.0, 3.0]), [1.0, -2.0])
    plain = EvaluationStore().wrap(BlackBox(models.negative_half_square))
    with pytest.raises(NotImplementedError):
        pt.grad(plain(x), x)


def test_chains_of_any_step_share_values():
    """Chains of one seed find in the file, one after the other, what the first of them asked."""
    store, operation = EvaluationStore(), BlackBox(models.negative_half_square)
    model = model_of(store.wrap(operation))
    options = {"draws": 30, "tune": 20, "chains": 2, "random_seed": 5}
    before, results = operation.calls, []
    for cores in (1, 2):
        with model:
            step = pm.Metropolis(compile_kwargs={"mode": "FAST_COMPILE"})
        results.append(sample(step, model, cores=cores, mp_ctx="fork", **options))
    first, found = results
    assert operation.calls - before > 50
    np.testing.assert_array_equal(models.values(first, "x"), models.values(found, "x"))
    assert store.summary()["evaluations"] == operation.calls
    assert store.summary()["chains"] == 1


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
    with pytest.raises(ArithmeticError, match="no solution"):
        called(store.wrap(BlackBox(fails), name="fails"), [1.0])
    assert store.summary()["failed"] == 1


def test_what_cannot_be_wrapped_is_refused():
    store = EvaluationStore()
    with pytest.raises(TypeError, match="function=3"):
        store.wrap(3)
    vector = store.wrap(wrap_py([pt.dvector], [pt.dvector])(lambda x: x), name="vector")
    with pytest.raises(ValueError, match="one scalar output"):
        vector(pt.dvector())


def test_data_that_change_are_another_model():
    with pm.Model() as model:
        y = pm.Data("y", np.array([1.0, 2.0]))
        x = pm.Normal("x", 0.0, 1.0)
        pm.Potential("likelihood", -0.5 * pt.sum((x - y) ** 2))
    surrogate = GPSurrogate(store=EvaluationStore())
    step = begin(AdaptiveMetropolisStep(model=model, surrogate=surrogate), 1, tune=5)
    step.step(model.initial_point())
    model.set_data("y", np.array([1.0, 3.0]))
    begin(step, 1, tune=5)
    with pytest.raises(ValueError, match="another model: data or constants differ"):
        step.step(model.initial_point())


def test_chains_in_processes_share_one_file():
    model, _ = models.black_box()
    store = EvaluationStore()
    step = AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate(store=store), steps_per_draw=3)
    idata = sample(step, model, draws=60, tune=80, chains=2, cores=2, discard_tuned_samples=False)
    groups = "sample_stats", "warmup_sample_stats"
    calls = sum(models.values(idata, "n_evals", group).sum() for group in groups)
    assert store.summary()["chains"] == 2
    assert store.summary()["evaluations"] == calls
