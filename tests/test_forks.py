"""Libraries whose threads a forked process does not have: who uses them is told, and not hung."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor

import models
import numba
import numpy as np
import pymc as pm
import pytest
from models import sample

from pymc_kameleon import EvaluationStore, KameleonStep, black_box
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.approximate.parallel_evaluations import ParallelDensity
from pymc_kameleon.model.forks import libraries_of, refuse_lost_threads, runs_in_forks

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork"
)

juliacall = types.ModuleType("juliacall")
juliacall.square = lambda x: -0.5 * np.sum(np.square(x))
solver = types.ModuleType("solver_of_somebody")  # which is built on it
solver.jl = juliacall


@pytest.fixture
def running(monkeypatch):
    """A library that has threads of its own."""
    monkeypatch.setitem(sys.modules, "juliacall", juliacall)


def uses(x):
    return juliacall.square(x)


def uses_not(x):
    return -0.5 * np.sum(np.square(x))


def calls_one_that_uses(x):
    return uses(x) + 1.0


def imports_within(x):
    import juliacall

    return juliacall.square(x)


def uses_by_another_module(x):
    return solver.solve(x)


class Uses:
    def __call__(self, x):
        return self.value(x)

    def value(self, x):
        return juliacall.square(x)


class Data:
    __module__ = "juliacall.core"


def enclosing(value):
    return lambda x: value


@pytest.mark.parametrize(
    "function",
    [
        uses,
        calls_one_that_uses,
        imports_within,
        uses_by_another_module,
        Uses(),
        Uses().value,
        functools.partial(uses, 1.0),
        functools.partial(uses_not, Data()),
        enclosing(Data()),
        lambda x: [uses(one) for one in x],
        black_box(uses),
    ],
)
def test_a_function_that_uses_a_library_is_seen(function):
    assert libraries_of(function) == {"juliacall"}


class NoAttributes:
    """What calls itself a dictionary, as wrapped libraries of C do, and is none."""

    __dict__ = property(lambda self: self)


endless = [uses_not]
for _ in range(20_000):
    endless = [endless]


@pytest.mark.parametrize(
    "function",
    [
        uses_not,
        np.sum,
        len,
        enclosing(None),
        black_box(uses_not),
        enclosing(NoAttributes()),
        enclosing(endless),
        numba.njit(uses_not),
    ],
)
def test_one_that_does_not_is_not(function):
    assert libraries_of(function) == set()


def in_a_fork(function, *arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        return processes.submit(function, *arguments).result()


BOXES = {f: black_box(f, shape=()) for f in (uses, uses_not)}


def call(function, x):
    return float(BOXES[function](x))


def test_a_black_box_raises_in_a_fork_what_to_write(running):
    assert call(uses, 2.0) == -2.0
    with pytest.raises(RuntimeError, match=r"uses uses juliacall.*mp_ctx=.*cores=1.*timeout="):
        in_a_fork(call, uses, 2.0)
    assert in_a_fork(call, uses_not, 2.0) == -2.0


def test_it_does_not_where_nothing_runs():
    assert in_a_fork(call, uses, 2.0) == -2.0


def test_one_that_is_not_seen_to_use_it_is_warned_of(running, monkeypatch, caplog):
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "worker_chain_0")
    for _ in range(2):
        refuse_lost_threads(uses_not, "box")
    assert caplog.text.count("If box uses it, its chains wait for ever") == 1


def model_of(box):
    with pm.Model() as model:
        pm.Potential("p", box(pm.Normal("x", 0.0, 3.0, shape=2)))
    return model


def test_chains_that_would_be_forked_end_at_once(running):
    with model_of(black_box(uses)), pytest.raises(Exception, match="uses juliacall, whose threads"):
        sample(KameleonStep(), tune=5, draws=5, chains=2, cores=2, mp_ctx="fork")


def noted(path, x):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    if x[0] > 2.0:
        raise ArithmeticError("diverged")
    return -0.5 * np.sum(x**2)


def test_processes_that_are_not_forked_say_the_same_and_end(running, tmp_path):
    box = black_box(functools.partial(noted, tmp_path / "calls"), shape=())
    model = model_of(box)
    store = EvaluationStore(tmp_path / "run.sqlite")
    explorer = Explorer(budget=60, model=model, store=store)
    assert not runs_in_forks(explorer.target.function.outputs)
    density = explorer.stored
    density.begin_chain()
    parallel = ParallelDensity(density, 2, is_forked=False)
    points = np.array([[0.0, 1.0], [3.0, 0.0], [1.0, 1.0]])
    values = np.zeros((3, 3))
    try:
        for i, point in enumerate(parallel.announced(points)):
            if i == 1:
                with pytest.raises(ArithmeticError, match="diverged"):
                    parallel.into(point, values[i])
            else:
                parallel.into(point, values[i])
    finally:
        parallel.close()
    assert list(values[[0, 2], 1]) == [-0.5, -1.0]
    assert density.n_evaluated == 3 == store.summary()["evaluations"]
    callers = {int(line) for line in (tmp_path / "calls").read_text().split()}
    assert os.getpid() not in callers and all(map(models.has_ended, callers))


def test_jax_is_known():
    jax = pytest.importorskip("jax")
    square = jax.jit(lambda x: -0.5 * x**2)
    box = black_box(lambda x: square(x), shape=())
    assert float(box(2.0)) == -2.0
    assert libraries_of(box) == {"jax"}
    with pytest.raises(RuntimeError, match="uses JAX"):
        refuse_lost_threads(box.function, box.name)


TASKS = """
import multiprocessing, os, signal, sys, time
from pymc_kameleon.latent_gp.parallel_tasks import run_tasks

def waits(path, advance):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(60.0)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(sys.argv[2])
    tasks = [(sys.argv[1],)] * 3
    try:
        run_tasks(waits, tasks, cores=2, total=3, description="", progressbar=False)
    except KeyboardInterrupt:
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("method", "sent", "status"),
    [
        ("fork", signal.SIGKILL, -signal.SIGKILL),
        ("fork", signal.SIGINT, 3),
        ("spawn", signal.SIGINT, 3),
    ],
)
def test_processes_of_tasks_end_with_a_parent_that_is_killed_or_interrupted(
    tmp_path, method, sent, status
):
    script, path = tmp_path / "script.py", tmp_path / "processes"
    script.write_text(TASKS)
    path.touch()
    with subprocess.Popen([sys.executable, script, path, method]) as run:
        while run.poll() is None and len(path.read_text().split()) < 2:
            time.sleep(0.02)
        run.send_signal(sent)
        assert run.wait(20.0) == status
    begun = [int(line) for line in path.read_text().split()]
    assert len(begun) == 2 and all(map(models.has_ended, begun))
