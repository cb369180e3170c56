"""Evaluations of a log density by several processes, for a step that knows its next points."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from pymc_kameleon.guarded_call import sendable
from pymc_kameleon.mcmc.numba_bridge import N_TERMS
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.model.simulator import CALLS

_function: ModelFunction


class ParallelFunction:
    """A `ModelFunction` whose values at points that are announced come from forked processes.

    Whoever evaluates it sees no difference: values, errors and the order of evaluations are those
    of one process.
    """

    def __init__(self, function: ModelFunction, cores: int):
        self._function, self.cores = function, cores
        self._known: dict[bytes, tuple] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._workers: list[Any] = []

    def __getattr__(self, name):
        return getattr(self.__dict__["_function"], name)

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,) into `value`."""
        known = self._known.pop(x.tobytes(), None)
        if known is None:
            return self._function.into(x, value)
        value[:], error, made, failed, last = known
        CALLS.add(made, failed, last)
        if error is not None:
            raise error

    def announced(self, points: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield `points` one by one, each when its value is known."""
        points = [np.array(point, dtype=float) for point in points]
        if len(points) < 2:
            yield from points
            return
        for point, found in zip(points, self._started().map(_evaluate, points), strict=True):
            self._known[point.tobytes()] = found
            yield point
        self._known.clear()

    def _started(self):
        if self._pool is None:
            others = multiprocessing.active_children()
            self._pool = ProcessPoolExecutor(
                self.cores,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(self._function,),
            )
            try:
                self._pool.submit(int).result()
            finally:
                begun = multiprocessing.active_children()
                self._workers = [process for process in begun if process not in others]
        return self._pool

    def close(self) -> None:
        """End the processes, also those that are within a call."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.kill()
        self._pool, self._workers = None, []


def can_fork() -> bool:
    """Whether processes can be copied here, as compiled functions need."""
    return "fork" in multiprocessing.get_all_start_methods()


# in a process -------------------------------------------------------------------------------------


def _begin(function):
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends this one
    _function = function


def _evaluate(x):
    value, error, before = np.full(N_TERMS, np.nan), None, CALLS.begun()
    try:
        _function.into(x, value)
    except Exception as raised:
        error = sendable(raised)
    made, failed = CALLS.since(before)
    return value, error, made, failed, CALLS.last if failed else None
