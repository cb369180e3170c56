"""What runs on a worker: rounds of chains, of a model and a step that are compiled once."""

import copy
import hashlib
import logging
import os
import pickle
import sqlite3
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pymc as pm
from pymc.backends.ndarray import NDArray
from threadpoolctl import threadpool_limits

from pymc_kameleon.distributed.parcel import Parcel, made_step, stored_densities, unpacked
from pymc_kameleon.model.traced import traced
from pymc_kameleon.store.evaluation_store import TABLES, EvaluationStore, as_bytes

INTERVAL = 0.2
"""Seconds between messages of one chain."""

MODELS_KEPT = 3


class Task(NamedTuple):
    """One round of one chain: with the parcel and what is known, all that its draws depend on."""

    run: str
    chain: int
    round: int
    bit_generator: type
    seed: np.random.SeedSequence  # PyMC's generator of the chain is its next child
    tune: int
    draws: int
    start: dict[str, np.ndarray] | None  # where the round before ended, unconstrained


class Found(NamedTuple):
    """An evaluation in the plain types that Dask's messages take, with d float64 as bytes."""

    point: bytes
    value: float
    seconds: float
    failure: str | None
    gradient: bytes | None

    @classmethod
    def of(cls, point, value, seconds=0.0, failure=None, gradient=None) -> "Found":
        """Return the evaluation that `EvaluationStore.add` takes by these arguments."""
        gradient = None if gradient is None else as_bytes(gradient)
        return cls(as_bytes(point), float(value), float(seconds), failure, gradient)

    def arguments(self) -> tuple:
        """Return what `EvaluationStore.add` takes."""
        gradient = None if self.gradient is None else np.frombuffer(self.gradient)
        return np.frombuffer(self.point), self.value, self.seconds, self.failure, gradient


class Part(NamedTuple):
    """What a round of a chain made: draws and their statistics, and evaluations."""

    samples: dict[str, np.ndarray]  # shape (draws, ...)
    statistics: list[dict[str, np.ndarray]]  # for each step, shape (draws,)
    point: dict[str, np.ndarray] | None  # the last draw, unconstrained
    found: list[Found]

    @property
    def n_draws(self) -> int:
        """Draws, of tuning and after it."""
        return len(next(iter(self.samples.values())))


def part_of(trace: NDArray, point, store: "RoundStore | None") -> Part:
    """Copy the draws that a trace has so far."""
    n = len(trace)
    samples = {name: trace.get_values(name)[:n].copy() for name in trace.varnames}
    statistics = [
        {name: trace.get_sampler_stats(name, sampler_idx=i)[:n].copy() for name in of_step}
        for i, of_step in enumerate(trace.sampler_vars)
    ]
    return Part(samples, statistics, point, [] if store is None else list(store.found))


class RoundStore(EvaluationStore):
    """A store in memory: what is known before a round of one chain, and what the round finds."""

    def __init__(self):
        self.path, self.new_model = ":memory:", True
        self.found: list[Found] = []
        self.tell: Callable[[Found], None] | None = None
        self._reset()

    def begin(self, model: int, known: list[Found], tell: Callable[[Found], None]) -> None:
        """Know these evaluations and no others, and report each one that is found from now on."""
        self._execute("DELETE FROM evaluations")
        for found in known:
            super().add(model, "", *found.arguments())
        self.found, self.tell = [], tell

    def add(self, model, chain, point, value, seconds, failure=None, gradient=None):
        """Keep an evaluation, and report it."""
        super().add(model, chain, point, value, seconds, failure, gradient)
        found = Found.of(point, value, seconds, failure, gradient)
        self.found.append(found)
        if self.tell is not None:
            self.tell(found)

    def _connect(self):
        # A worker runs the rounds of one chain after the other, in threads of its choice.
        self._connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._connection.executescript(TABLES)
        self._process = os.getpid()


# a model on a worker ------------------------------------------------------------------------------


class Workbench:
    """A model and a step of which no state goes from one task to the next."""

    def __init__(self, parcel: Parcel):
        self.parcel = parcel
        self.store = RoundStore() if parcel.takes_store else None
        log = logging.getLogger("pymc.kameleon")
        level = log.level
        log.setLevel(logging.ERROR)  # the client has made this step too, and told what it says
        try:
            self.step = made_step(parcel, self.store)
        finally:
            log.setLevel(level)
        self.state = copy.deepcopy(self.step.sampling_state)
        self.prototype = NDArray(model=parcel.model, vars=traced(parcel.model, parcel.var_names))

    def run(self, task: Task, known: list[Found], tell, on_draw) -> Part:
        """Sample the round of a task.

        `tell` is called with each evaluation, and `on_draw` with the trace and PyMC's draw after
        each one; a KeyboardInterrupt in it ends the chain.
        """
        if self.store is not None:
            (stored,) = stored_densities(self.step)
            self.store.begin(stored.model, known, tell)
        self.step.sampling_state = copy.deepcopy(self.state)
        start = task.start if task.start is not None else self.parcel.initvals[task.chain]
        like = self.prototype
        empty = NDArray(
            model=like.model,
            vars=like.vars,
            fn=like.fn,
            var_shapes=like.var_shapes,
            var_dtypes=like.var_dtypes,
        )
        last: tuple[NDArray, dict]

        def callback(trace, draw):
            nonlocal last
            last = trace, draw.point
            on_draw(trace, draw)

        with threadpool_limits(1), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Tuning samples will be included")
            warnings.filterwarnings("ignore", message="`return_inferencedata=False`")
            pm.sample(
                draws=task.draws,
                tune=task.tune,
                chains=1,
                cores=1,
                random_seed=np.random.Generator(task.bit_generator(task.seed)),
                step=self.step,
                initvals=start,
                trace=empty,
                callback=callback,
                model=self.parcel.model,
                progressbar=False,
                quiet=True,
                discard_tuned_samples=False,
                compute_convergence_checks=False,
                return_inferencedata=False,
            )
        return part_of(*last, self.store)


_free: OrderedDict[str, list[Workbench]] = OrderedDict()
_changing, _building = threading.Lock(), threading.Lock()


@contextmanager
def workbench(data: bytes):
    """Lend a workbench of a pickled parcel; threads of one worker have different ones."""
    digest = hashlib.sha256(data).hexdigest()
    with _changing:
        free = _free.setdefault(digest, [])
        _free.move_to_end(digest)
        while len(_free) > MODELS_KEPT:
            _free.popitem(last=False)
        lent = free.pop() if free else None
    if lent is None:
        with _building:
            lent = Workbench(unpacked(data))
    yield lent
    # One that raised an error is not lent again.
    with _changing:
        free.append(lent)


# what the client calls ----------------------------------------------------------------------------

_running: dict[tuple[str, int], tuple] = {}
_stopped: set[str] = set()


def topic(run: str) -> str:
    """Name of the messages of a run."""
    return f"pymc_kameleon-{run}"


def same(value):
    """Return what it is given: a value that a worker has, and that is sent again if it is lost."""
    return value


def run_round(data: bytes, known: bytes | None, task: Task) -> Part:
    """Sample a round of a chain, from a pickled `Parcel` and a pickled list of `Found`."""
    messages = _Messages(task)

    def on_draw(trace, draw):
        _running[task.run, task.chain] = trace, task.round, bench.store
        messages.add_draw(draw)
        if task.run in _stopped:
            raise KeyboardInterrupt

    try:
        with workbench(data) as bench:
            begin_with = [] if known is None else pickle.loads(known)
            return bench.run(task, begin_with, messages.add_evaluation, on_draw)
    except Exception as error:
        _leave_out_operations(error)
        raise
    finally:
        _running.pop((task.run, task.chain), None)
        messages.send()


def stop(run: str) -> list[tuple[int, int, Part]]:
    """End the chains of a run after their present draws; return chain, round and draws so far."""
    _stopped.add(run)
    return [
        (chain, number, part_of(trace, None, store))
        for (other, chain), (trace, number, store) in list(_running.items())
        if other == run
    ]


class _Messages:
    """Messages of a task, at a bounded rate: what has come, and how far the chain is."""

    def __init__(self, task: Task):
        from dask.distributed import get_worker

        self.task, self.worker = task, get_worker()
        self.lock = threading.Lock()
        self.found: list = []
        self.statistics: list = []
        self.n_found = self.draws = 0
        self.is_waiting = False

    def add_evaluation(self, found):
        with self.lock:
            self.found.append(tuple(found))
        self._send_soon()

    def add_draw(self, draw):
        with self.lock:
            self.draws, self.statistics = draw.draw_idx + 1, draw.stats
        self._send_soon()

    def _send_soon(self):
        if not self.is_waiting:
            self.is_waiting = True
            loop = self.worker.loop
            loop.add_callback(loop.call_later, INTERVAL, self.send)

    def send(self):
        """Send what has come since the last time."""
        with self.lock:
            self.is_waiting = False
            if not self.found and not self.statistics:
                return
            message = {
                "chain": self.task.chain,
                "round": self.task.round,
                "draws": self.draws,
                "statistics": [_numbers(of_step) for of_step in self.statistics],
                "first": self.n_found,
                "found": self.found,
            }
            self.n_found += len(self.found)
            self.found, self.statistics = [], []
        self.worker.log_event(topic(self.task.run), message)


def _leave_out_operations(error) -> None:
    """Take from an error, and those before it, what PyTensor adds and may not be pickled."""
    while error is not None:
        for name in ("__op_instance__", "__thunk_trace__"):
            vars(error).pop(name, None)
        error = error.__cause__ or error.__context__


def _numbers(statistics) -> dict:
    """Those statistics that a progress bar can show."""
    scalars = {k: np.asarray(v) for k, v in statistics.items()}
    return {k: v.item() for k, v in scalars.items() if v.ndim == 0 and v.dtype.kind in "biuf"}
