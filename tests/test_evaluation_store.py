"""A store of evaluations: nothing lost, nothing torn, nothing asked twice, other models refused."""

import gc
import os
import pickle
import signal
import sqlite3
import tempfile
from pathlib import Path

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import FORK, BlackBox, Killed, begin, drive, sample

from pymc_kameleon import EvaluationStore, SurrogateHMCStep
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.store.stored_density import StoredDensity
from pymc_kameleon.targets import Banana
from pymc_kameleon.testing import frozen, invariance_p_values

BOUND = 1e-6
"""Null probability of each p-value below it."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.sqlite"


def values_of(store):
    return store._execute("SELECT value FROM evaluations ORDER BY id")


# the file -----------------------------------------------------------------------------------------


def write_many(store, model, chain, n):
    rng = np.random.default_rng(chain)
    for _ in range(n):
        point = rng.normal(size=3)
        store.add(model, str(chain), point, float(point.sum()), 0.0)


def test_many_processes_write_at_once_and_nothing_is_lost_or_torn(path):
    store = EvaluationStore(path)
    model = store.model_number({"likelihood": "sum"})
    processes = [FORK.Process(target=write_many, args=(store, model, k, 200)) for k in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = store.read(model)
    assert len(found) == 16 * 200
    assert all(e.value == e.point.sum() for e in found)
    expected = {np.random.default_rng(k).normal(size=3).tobytes() for k in range(16)}
    assert expected <= {e.point.tobytes() for e in found}
    assert len(store.read(model, not_by="3")) == 15 * 200
    assert [e.number for e in store.read(model, after=found[-3].number)] == [
        e.number for e in found[-2:]
    ]


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
    assert store.summary() == {
        "models": 1,
        "chains": 2,
        "evaluations": 5,
        "nonfinite": 3,
        "failed": 1,
        "seconds": 3.0,
    }


def test_a_temporary_store_leaves_nothing_behind():
    store = EvaluationStore()
    path = store.path
    store.add(store.model_number({}), "a", np.zeros(1), 0.0, 0.0)
    assert path.exists()
    del store
    gc.collect()
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
    with pytest.raises(ValueError, match=r"run\.sqlite cannot be used as a store"):
        EvaluationStore(path)


def test_a_directory_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(ValueError, match="cannot be used as a store"):
        EvaluationStore(tmp_path / "nowhere" / "run.sqlite")


def test_sampling_goes_on_where_the_disk_is_full(path, caplog):
    model, operation = models.black_box()
    store = EvaluationStore(path)
    step = SurrogateHMCStep(model=model, store=store)
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


def open_together(path, barrier, opened):
    barrier.wait()
    EvaluationStore(path)
    opened.put(True)


@pytest.mark.parametrize("is_old", [True, False])
def test_many_processes_open_a_file_at_once_that_is_old_or_new(path, is_old):
    if is_old:
        make_old(path)
    barrier, opened = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=open_together, args=(path, barrier, opened)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [opened.get(timeout=10) for _ in processes] == [True] * 8


def test_only_the_last_are_read_where_so_many_are_wanted(path):
    store = EvaluationStore(path)
    model = store.model_number({})
    for k in range(9):
        store.add(model, "a", np.array([float(k)]), 0.0, 0.0)
    assert [e.point[0] for e in store.read(model, most=3)] == [6.0, 7.0, 8.0]
    assert [e.point[0] for e in store.read(model, after=7, most=3)] == [7.0, 8.0]


def test_models_in_one_file_are_kept_apart(path):
    store = EvaluationStore(path, new_model=True)
    first, second = store.model_number({"likelihood": "a"}), store.model_number({"likelihood": "b"})
    store.add(first, "a", np.zeros(2), -1.0, 0.0, gradient=np.ones(2))
    store.add(second, "b", np.zeros(2), -2.0, 0.0)
    assert (store.find(first, np.zeros(2)), store.find(second, np.zeros(2))) == (-1.0, -2.0)
    assert store.find_with_gradient(second, np.zeros(2)) is None
    assert [e.value for e in store.read(second)] == [-2.0]
    assert store.summary()["models"] == 2


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
    with pytest.raises(ValueError, match=r"run\.sqlite cannot be used as a store"):
        EvaluationStore(path).read(model)


# which model --------------------------------------------------------------------------------------


def regression(prior_sd=1.0, observed=(1.0, 2.0), name="slope", power=1):
    with pm.Model() as model:
        slope = pm.Normal(name, 0.0, prior_sd)
        spread = pm.HalfNormal("spread", 1.0)
        x = pm.Data("x", np.array([0.5, 1.5]))
        pm.Normal("y", slope * x**power, spread, observed=np.array(observed))
    return model


def number_of(model, store, vars=None):
    return StoredDensity(LogDensity(model, vars), store).model


def test_another_prior_is_the_same_likelihood(path):
    store = EvaluationStore(path)
    numbers = {number_of(regression(sd), store) for sd in (1.0, 5.0, 1.0)}
    assert len(numbers) == 1


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"observed": (1.0, 2.1)}, "data or constants differ"),
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


def test_other_data_of_the_same_model_are_another_likelihood(path):
    model = regression()
    number_of(model, EvaluationStore(path))
    model.set_data("x", np.array([0.5, 1.6]))
    with pytest.raises(ValueError, match="data or constants"):
        number_of(model, EvaluationStore(path))


def test_a_likelihood_of_variables_of_another_step_is_refused():
    model = regression()
    with pytest.raises(ValueError, match=r"depends on spread_log__ too.*vars=\[slope, spread"):
        SurrogateHMCStep([model["slope"]], model=model, store=EvaluationStore())


def test_a_model_without_a_likelihood_is_refused():
    with pytest.raises(ValueError, match="no observed variables"):
        SurrogateHMCStep(model=models.two_scales(), store=EvaluationStore())


# chains -------------------------------------------------------------------------------------------


def test_every_call_is_stored_with_its_value():
    model, operation = models.black_box()
    store = EvaluationStore()
    step = SurrogateHMCStep(model=model, store=store)
    begin(step, 1, tune=60)
    before = operation.calls
    drive(step, model.initial_point(), 100, tune=60)
    found = store.read(step.stored.model)
    assert len(found) == operation.calls - before
    for evaluation in found:
        np.testing.assert_allclose(
            evaluation.value, models.negative_half_square(evaluation.point), rtol=1e-12
        )


def test_failures_are_stored_and_raised():
    def fails_far_out(x):
        if np.sum(np.asarray(x) ** 2) > 9.0:
            raise ArithmeticError("no solution")
        return models.negative_half_square(x)

    model, _ = models.black_box(function=fails_far_out)
    store = EvaluationStore()
    step = SurrogateHMCStep(model=model, store=store, disperse=False)
    begin(step, 1)
    with pytest.raises(ArithmeticError, match="no solution"):
        step.step({"x": np.full(2, 5.0)})
    (failed,) = store.read(step.stored.model)
    assert failed.failure.startswith("ArithmeticError: no solution")


def killable():
    operation = Killed(models.negative_half_square)
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=2)
        pm.Potential("simulator", operation(x))
    return model, operation


def test_a_killed_run_goes_on_where_it_was(path):
    model, operation = killable()
    step = SurrogateHMCStep(model=model, store=EvaluationStore(path))
    operation.calls, operation.last = 0, 120
    process = FORK.Process(target=lambda: sample(step, model, draws=300, tune=200))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    operation.last, store = None, EvaluationStore(path)
    stored = store.read(step.stored.model)
    assert len(stored) == 119  # the last one was not finished
    seen = {e.point.tobytes() for e in stored}
    asked = []
    original, operation.function = operation.function, None

    def counted(x):
        asked.append(np.array(x, dtype=float).tobytes())
        return original(x)

    operation.function = counted
    again = SurrogateHMCStep(model=model, store=store)
    asked.clear()
    idata = sample(again, model, draws=600, tune=40)
    assert not seen & set(asked)
    assert len(store.read(step.stored.model)) == 119 + len(asked)
    # It begins with a surrogate: a run that knows nothing asks 60 times before its first draw.
    assert len(asked) < 700
    models.assert_mean(models.values(idata, "x"), 0.5)
    models.assert_mean((models.values(idata, "x") - 0.5) ** 2, 0.5)


def test_chains_that_tune_learn_from_each_other_and_stop_then():
    model, _ = models.black_box()
    store = EvaluationStore()
    steps = [SurrogateHMCStep(model=model, store=store) for _ in range(2)]
    points = [model.initial_point() for _ in steps]
    for k, step in enumerate(steps):
        begin(step, k, tune=150)
    for _ in range(150):
        for k, step in enumerate(steps):
            points[k], _ = step.step(points[k])
    for step in steps:
        step.stop_tuning()
    for step, other in zip(steps, reversed(steps), strict=True):
        learner = step.learner
        assert learner.n_own + learner.n_foreign == learner.evaluations.count[0]
        assert learner.n_fitted == learner.evaluations.count[0]
        assert 0.7 * other.learner.n_own < learner.n_foreign <= other.learner.n_own
    held = [step.learner.regression.weights.copy() for step in steps]
    counts = [int(step.learner.evaluations.count[0]) for step in steps]
    for k, step in enumerate(steps):
        drive(step, points[k], 30, tune=-1)
    for step, weights, count in zip(steps, held, counts, strict=True):
        np.testing.assert_array_equal(step.learner.regression.weights, weights)
        assert step.learner.evaluations.count[0] == count


def test_a_chain_that_shares_nothing_is_as_without_a_store():
    chains = []
    for store in (None, EvaluationStore()):
        model, _ = models.black_box()
        step = SurrogateHMCStep(model=model, store=store)
        begin(step, 3, tune=80)
        points, _, _ = drive(step, model.initial_point(), 120, tune=80)
        chains.append(points)
    np.testing.assert_array_equal(*chains)


@pytest.mark.parametrize("shares", [False, True])
def test_a_search_ends_when_another_chain_has_taught_enough(shares):
    """What that chain evaluated comes between two calls of the search, which takes 55 alone."""
    model, operation = models.black_box(dim=8)
    other = SurrogateHMCStep(model=model, store=EvaluationStore())
    begin(other, 2, tune=100)
    drive(other, model.initial_point(), 60, tune=100)
    taught = other.stored.store.read(other.stored.model)
    store = EvaluationStore()
    step = SurrogateHMCStep(model=model, store=store)
    asked, original = [], operation.function

    def searching(x):
        asked.append(x)
        if len(asked) == 30 and shares:
            for found in taught:
                store.add(step.stored.model, "other", found.point, found.value, 0.0)
        return original(x)

    operation.function = searching
    begin(step, 1, tune=100)
    step.step({"x": np.full(8, 6.0)})
    assert len(asked) < 40 if shares else len(asked) > 50


def test_a_chain_that_is_continued_reads_nothing_twice():
    model, _ = models.black_box()
    store = EvaluationStore()
    first = SurrogateHMCStep(model=model, store=store)
    begin(first, 1, tune=100)
    _, _, point = drive(first, model.initial_point(), 60, tune=100)
    second = SurrogateHMCStep(model=model, store=store)
    second.sampling_state = first.sampling_state
    drive(second, point, 40, tune=100)
    assert second.learner.n_foreign == 0
    known = np.unique(second.learner.evaluations.stored()[0], axis=0)
    assert len(known) == store.summary()["evaluations"]


def test_data_that_change_are_another_model():
    with pm.Model() as model:
        y = pm.Data("y", np.array([1.0, 2.0]))
        x = pm.Normal("x", 0.0, 1.0)
        pm.Potential("likelihood", -0.5 * pt.sum((x - y) ** 2))
    store = EvaluationStore()
    step = SurrogateHMCStep(model=model, store=store)
    begin(step, 1, tune=5)
    step.step(model.initial_point())
    model.set_data("y", np.array([1.0, 3.0]))
    begin(step, 1, tune=5)
    with pytest.raises(ValueError, match="another model: data or constants differ"):
        step.step(model.initial_point())


def test_a_chain_that_is_told_to_begin_here_does(path):
    model, _ = models.black_box()
    taught = SurrogateHMCStep(model=model, store=EvaluationStore(path))
    begin(taught, 1, tune=100)
    drive(taught, model.initial_point(), 100, tune=100)
    step = SurrogateHMCStep(model=model, store=EvaluationStore(path), start="here")
    begin(step, 1, tune=10)
    before = np.full(2, 2.5)
    points, _, _ = drive(step, {"x": before}, 1, tune=10)
    assert step.learner.n_foreign > 100
    assert np.linalg.norm(points[0] - before) < 1.0


@pytest.mark.slow
@pytest.mark.numerics
def test_exact_draws_stay_exact_with_a_surrogate_of_shared_evaluations():
    target = Banana(bananicity=0.1, variance=100.0, dim=2)
    store, rng = EvaluationStore(), np.random.default_rng(20)
    operation = BlackBox(lambda x: float(target.log_density(np.array(x, dtype=float)[None])[0]))
    with pm.Model() as model:
        pm.Potential("y", operation(pm.Flat("x", shape=2)))
    first, second = (SurrogateHMCStep(model=model, store=store) for _ in range(2))
    begin(first, 1, tune=150)
    drive(first, model.initial_point(), 150, tune=150)
    step = frozen(second, 21)
    draws = target.draw(3000, rng)
    step.step({"x": draws[0]})
    step.learner.difference_share = 0.0
    step.tune = True
    step.stop_tuning()
    assert step.learner.n_foreign > 150
    found = invariance_p_values(
        step,
        draws,
        target.draw(30_000, rng),
        {"quantile statistic": target.quantile_statistic},
    )
    assert min(found.values()) > BOUND, found
    accepted = [step.step({"x": x})[1][0]["accepted"] for x in draws[:100]]
    assert np.mean(accepted) > 0.5


# alone --------------------------------------------------------------------------------------------


def test_a_function_that_is_wrapped_is_called_once_at_a_point():
    calls, store = [], EvaluationStore()

    @store.wrap
    def log_likelihood(x, scale):
        calls.append(1)
        return -float(np.sum(x**2)) / scale

    for _ in range(2):
        assert log_likelihood(np.array([1.0, 2.0]), 2.0) == -2.5
        assert log_likelihood(np.array([1.0, 2.0]), 4.0) == -1.25
    assert len(calls) == 2
    assert store.summary()["evaluations"] == 2


def test_evaluations_as_a_data_set_have_natural_coordinates():
    with pm.Model(coords={"place": ["a", "b"]}) as model:
        rate = pm.LogNormal("rate", 0.0, 1.0, dims="place")
        share = pm.Uniform("share", 0.0, 2.0)
        pm.Potential("y", -pt.sum((rate - 1.0) ** 2) - (share - 1.5) ** 2)
    store = EvaluationStore()
    step = SurrogateHMCStep(model=model, store=store)
    begin(step, 1, tune=20)
    drive(step, model.initial_point(), 20, tune=20)
    found = store.to_dataset(model)
    assert found["rate"].dims == ("evaluation", "place")
    assert list(found["place"].values) == ["a", "b"]
    expected = -((found["rate"] - 1.0) ** 2).sum("place") - (found["share"] - 1.5) ** 2
    np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-10)
    assert found.sizes["evaluation"] == store.summary()["evaluations"]
    assert not found["failed"].any()


def test_the_format_is_plain_sqlite(path):
    store = EvaluationStore(path)
    store.add(store.model_number({}), "a", np.array([1.0, 2.0]), -3.0, 0.1)
    with sqlite3.connect(path) as connection:
        ((point, value),) = connection.execute("SELECT point, value FROM evaluations")
    np.testing.assert_array_equal(np.frombuffer(point), [1.0, 2.0])
    assert value == -3.0
