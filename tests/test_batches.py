"""Functions that take several points at once: the draws are those of one point after the other."""

import os
import signal
import sqlite3
import threading
import time
from typing import NamedTuple

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytest
from models import begin, drive, has_ended, run, sample

from pymc_kameleon import (
    EvaluationStore,
    GPSurrogate,
    KameleonStep,
    SurrogateHMCStep,
    black_box,
    surrogate_posterior,
)
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.model.black_box import Calls
from pymc_kameleon.model.guarded_call import GuardedCall, ParallelCalls
from pymc_kameleon.steps.chain.look_ahead import Guesses, _copied

TIMES = np.array([0.5, 1.0, 2.0, 4.0])
MEASURED = np.array([1.7, 1.1, 0.5, 0.05])


class Diverged(ArithmeticError):
    pass


class Forgotten(NamedTuple):
    array: np.ndarray
    arrays: list


class Functions:
    """A curve and a log-likelihood of several points; `sizes` has how many each call had."""

    def __init__(self):
        self.sizes = []

    def curve(self, rate, height, times):
        self.sizes.append(len(rate))
        return height[:, None] * np.exp(-rate[:, None] * times)

    def log_likelihood(self, shares, weight):
        self.sizes.append(len(shares))
        if np.any(shares[:, 0] > 0.97):
            raise Diverged("a share is too large")
        value = -4.0 * np.sum((shares - [0.2, 0.3, 0.5]) ** 2, axis=1) * weight
        value[shares[:, 1] > 0.9] = np.nan
        return value


def one_by_one(function):
    """The same function of one point."""

    def of_one(*arguments):
        return function(*(np.asarray(value)[None] for value in arguments))[0]

    return of_one


def two_functions(is_vectorized, store=None):
    functions = Functions()
    curve, log_likelihood = functions.curve, functions.log_likelihood
    if not is_vectorized:
        curve, log_likelihood = one_by_one(curve), one_by_one(log_likelihood)
    boxes = [
        black_box(curve, vectorized=is_vectorized, name="curve"),
        black_box(
            log_likelihood,
            failures=Diverged,
            vectorized=is_vectorized,
            name="log_likelihood",
            store=store,
        ),
    ]
    with pm.Model() as model:
        rate, height = pm.LogNormal("rate", 0, 1), pm.Uniform("height", 0, 5)
        shares, angle = pm.Dirichlet("shares", np.ones(3)), pm.VonMises("angle", 3.0, 0.5)
        pm.Normal("measured", boxes[0](rate, height, TIMES), 0.1, observed=MEASURED)
        pm.Potential("simulated", boxes[1](shares, 1.0 + rate * pm.math.cos(angle) ** 2))
    functions.sizes.clear()
    return model, functions


TUNE, DRAWS = 100, 50


def driven(step, model):
    """Values of all variables, and statistics, of all draws."""
    values, statistics, _ = run(step, model, TUNE + DRAWS, tune=TUNE, seed=1)
    return values, [[s[k] for k in ("accept", "n_evals", "n_nonfinite")] for s in statistics]


STEPS = {
    "surrogate": (SurrogateHMCStep, 0.75),
    "two transitions a draw": (lambda: SurrogateHMCStep(steps_per_draw=2), 0.85),
    "random walk": (lambda: KameleonStep(steps_per_draw=3), 1.0),
    "random walk with surrogate": (
        lambda: KameleonStep(steps_per_draw=3, surrogate=GPSurrogate()),
        1.0,
    ),
}
"""Steps, and the largest share of calls among evaluations, with search for a mode and tuning.

With several transitions a draw a chain that learns looks ahead within the draw alone."""


@pytest.mark.numerics
@pytest.mark.parametrize("name", STEPS)
def test_draws_are_the_same_with_fewer_calls(name):
    make, share = STEPS[name]
    found = []
    for is_vectorized in (False, True):
        model, functions = two_functions(is_vectorized)
        with model:
            step = make()
        calls = Calls()
        with calls.counting():
            values, statistics = driven(step, model)
        made = {name: n for (name, *_), n in calls.made.items()}
        failed = {(key[0], kind): n for (key, kind), n in calls.failed.items()}
        found.append((values, statistics, made, failed, functions.sizes))
    for one, other in zip(*(f[:2] for f in found), strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[0][2:4] == found[1][2:4]  # calls that count, and failures
    (*_, singly), (*_, at_once) = found
    assert set(singly) == {1} and len(at_once) < share * len(singly)


@pytest.mark.numerics
@pytest.mark.parametrize("surrogate", [None, GPSurrogate()], ids=["plain", "surrogate"])
def test_a_random_walk_looks_ahead_after_tuning(surrogate):
    model, functions = two_functions(True)
    with model:
        step = KameleonStep(steps_per_draw=3, surrogate=surrogate)
    begin(step, seed=1, tune=300)
    _, _, point = drive(step, model.initial_point(), 300, tune=-1)
    step.stop_tuning()
    functions.sizes.clear()
    _, statistics, _ = drive(step, point, 100, tune=-1)
    n_evaluations = sum(s["n_evals"] for s in statistics)
    assert len(functions.sizes) < 0.5 * 2 * n_evaluations  # of two functions


@pytest.mark.numerics
def test_a_posterior_of_a_surrogate_is_the_same():
    found = []
    for is_vectorized in (False, True):
        model, functions = two_functions(is_vectorized)
        result = surrogate_posterior(
            model, n_evaluations=80, draws=50, random_seed=2, progressbar=False
        )
        found.append((group_dataset(result, "posterior"), functions.sizes))
    (one, singly), (other, at_once) = found
    for variable in one.data_vars:
        np.testing.assert_array_equal(one[variable], other[variable])
    assert one.attrs["n_evaluations"] == other.attrs["n_evaluations"]
    assert len(at_once) < 0.6 * len(singly)


def arrays_in(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [array for part in value for array in arrays_in(part)]


@pytest.mark.parametrize("step_class", [KameleonStep, SurrogateHMCStep])
def test_a_chain_that_is_looked_at_ahead_shares_no_array(step_class):
    """Also where a learner has one that is no part of its state, so that draws stay the same."""
    step = begin(step_class(model=models.black_box()[0], start="here"), tune=5)
    step.step(step.target.model.initial_point())
    step.learner.forgotten = Forgotten(np.zeros(2), [np.ones(3)])
    own = [*arrays_in(vars(step.learner)), *arrays_in(step.chain)]
    copied = _copied(step.sampler, Guesses(step.evaluator, lambda x, value: None))
    copies = [*arrays_in(vars(copied.learner)), *arrays_in(copied.chain)]
    assert len(own) == len(copies) > 10
    assert not any(np.may_share_memory(a, b) for a in own for b in copies if a.size)
    assert copied.report is not step.report


def test_another_step_is_not_foreseen():
    """What it does to its variables is not known beforehand, so that nothing is asked in vain."""
    sizes = []

    def log_likelihood(x, y):
        sizes.append(len(x))
        return -0.5 * (x - y) ** 2

    with pm.Model() as model:
        x, y = pm.Normal("x"), pm.Normal("y")
        pm.Potential("p", black_box(log_likelihood, vectorized=True, shape=())(x, y))
        step = KameleonStep([x], steps_per_draw=4)
    begin(step, seed=1, tune=0, draws=20)
    step.stop_tuning()
    point, rng = model.initial_point(), np.random.default_rng(3)
    for _ in range(20):
        point, _ = step.step(point | {"y": rng.normal()})
    assert max(sizes) == 4 and sum(sizes) < 2.5 * 20 * 4


def test_all_arguments_get_an_axis():
    shapes = []

    curve = black_box(
        lambda number, matrix, scale: (
            shapes.append((number.shape, matrix.shape, scale.shape))
            or np.outer(scale * number, [1, 2])
        ),
        vectorized=True,
    )
    np.testing.assert_array_equal(curve(2, np.ones((3, 2)), scale=1.5), [3.0, 6.0])
    assert shapes == [((1,), (1, 3, 2), (1,))]
    with pm.Model():
        assert curve(pm.Normal("a"), np.ones((3, 2)), scale=2.0).type.shape == (2,)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda x: -1.0, "returned -1.0 for 1 points"),
        (lambda x: np.zeros((3, len(x))), "one entry for each, 1"),
        (lambda x: None, "returned None"),
    ],
)
def test_an_array_of_another_length_is_an_error(returned, words):
    with pytest.raises(ValueError, match=words):
        black_box(returned, vectorized=True, name="wrong")(2.0)


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="cores=0"):
        black_box(len, cores=0)
    with pytest.raises(ValueError, match="Leave one of both out"):
        black_box(len, cores=2, vectorized=True)


def test_an_error_where_nothing_is_asked_for_is_none():
    """Points ahead can be ones to which the chain never comes."""

    def unwanted(x):
        if np.any(x > 10.0):
            raise RuntimeError("beyond")
        return -0.5 * x**2

    box = black_box(unwanted, vectorized=True, shape=())
    with pm.Model():
        pm.Potential("p", box(pm.Flat("x")))
        step = KameleonStep()
    step.ahead.announce([np.array([x]) for x in (1.0, 11.0, 2.0)])
    assert step.target(np.array([2.0])).sum() == -2.0
    with pytest.raises(RuntimeError, match="beyond"):
        step.target(np.array([11.0]))


@pytest.mark.numerics
def test_what_a_store_knows_is_not_evaluated_again(tmp_path):
    """The second chain does not search, and no point is evaluated twice."""
    n_calls, store = [], EvaluationStore(tmp_path / "store")
    for _ in range(2):
        model, functions = two_functions(True)
        with model:
            step = SurrogateHMCStep(store=store)
        functions.sizes.clear()
        begin(step, seed=1, tune=40)
        step.step(model.initial_point())
        n_calls.append(sum(functions.sizes))
    assert n_calls[1] < 0.6 * n_calls[0]
    with sqlite3.connect(store.path) as file:
        n, n_points = file.execute(
            "SELECT COUNT(*), COUNT(DISTINCT point) FROM evaluations"
        ).fetchone()
    assert n == n_points


@pytest.mark.numerics
def test_a_store_has_what_was_asked_for(tmp_path):
    def found(is_vectorized, name):
        store = EvaluationStore(tmp_path / name)
        model, functions = two_functions(is_vectorized, store)
        with model:
            step = SurrogateHMCStep()
        begin(step, seed=1, tune=200)
        drive(step, model.initial_point(), 60, tune=-1)
        with sqlite3.connect(store.path) as file:
            rows = file.execute("SELECT point, value FROM evaluations").fetchall()
        return rows, functions.sizes

    (one, singly), (other, at_once) = found(False, "one"), found(True, "other")
    assert one == other and len(at_once) < len(singly)


def new_function():
    """A function that is sent to processes by value, so that they need no module of the tests."""

    def process_and_value(x):
        time.sleep(0.01)
        return [float(os.getpid()), -0.5 * float(x) ** 2]

    return process_and_value


def test_workers_are_processes_that_run_at_once():
    box = black_box(new_function(), cores=3, shape=2)
    with pm.Model():
        pm.Potential("p", box(pm.Normal("x"))[1])
        step = KameleonStep()
    step.ahead.announce([np.array([0.1 * i]) for i in range(6)])
    known = [outcome.returned for outcome, _ in box._known.values()]
    assert [value for _, value in known] == [-0.5 * (0.1 * i) ** 2 for i in range(6)]
    processes = {int(process) for process, _ in known}
    assert len(processes) == 3 and os.getpid() not in processes
    box._call._calls.clear()
    assert all(map(has_ended, processes))


def test_chains_in_processes_have_workers_of_their_own():
    found = []
    for workers in (1, 2):
        box = black_box(new_function(), cores=workers, shape=2)
        with pm.Model():
            pm.Potential("p", box(pm.Normal("x"))[1])
            idata = sample(KameleonStep(), tune=3, draws=6, chains=2, cores=2, mp_ctx="fork")
        found.append(idata["posterior"]["x"].values)
    np.testing.assert_array_equal(*found)


def test_a_copy_takes_as_many_at_once():
    for options in ({"cores": 3}, {"vectorized": True}):
        box = black_box(new_function(), **options)
        copied = cloudpickle.loads(cloudpickle.dumps(box))
        assert copied.n_at_once == box.n_at_once > 1 and copied.vectorized == box.vectorized


def test_a_copy_of_a_step_asks_its_own_functions():
    box = black_box(lambda x: -0.5 * x**2, vectorized=True, shape=())
    with pm.Model():
        pm.Potential("p", box(pm.Flat("x")))
        step = cloudpickle.loads(cloudpickle.dumps(KameleonStep()))
    step.ahead.announce([np.array([1.0]), np.array([2.0])])
    calls = Calls()
    with calls.counting():
        step.target(np.array([2.0]))
    assert calls.seconds_ahead > 0.0


def test_an_interrupt_ends_all_calls(interruptible):
    def hangs(number):
        time.sleep(60)

    call = ParallelCalls(GuardedCall(hangs, ()), None, workers=2)
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call.all([((i,), {}) for i in range(5)])
    assert time.monotonic() - begun < 30
    processes = [one._process for one in call._calls if one._process is not None]
    assert all(has_ended(process.pid) for process in processes)
