"""Evaluations of a log density by several processes, for a step that knows its next points."""

import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.black_box import Calls, count
from pymc_kameleon.model.guarded_call import GuardedCall, ParallelCalls, sendable
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.model.process_pool import ProcessPool
from pymc_kameleon.store.stored_density import StoredDensity

_density: ModelFunction | StoredDensity


class Evaluation(NamedTuple):
    """What an evaluation in another process came to: terms of the log density, or an error.

    `counts` are how many were evaluated, and how many a store knew.
    """

    terms: np.ndarray
    error: Exception | None
    calls: Calls
    counts: tuple[int, int]


class ParallelDensity:
    """A density of a step, whose values at points that are announced come from processes.

    Whoever evaluates it sees no difference: values, errors and the order of evaluations are those
    of one process. Each process writes what it has evaluated to the store, if there is one, before
    it takes another point. Where `is_forked` they are copies of this one; others, which take the
    seconds of an import and a compilation to begin, are sent what they evaluate.
    """

    is_compilable = False

    def __init__(self, density: ModelFunction | StoredDensity, cores: int, is_forked: bool):
        self._density, self.cores, self.is_forked = density, cores, is_forked
        self._known: dict[bytes, Evaluation] = {}
        self._forks: ProcessPool | None = None
        self._calls: ParallelCalls | None = None
        self._asked: Any = None

    def compiled(self) -> None:
        """Return nothing: compiled code asks no other process."""

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,) into `value`."""
        found = self._known.pop(x.tobytes(), None)
        if found is None:
            return self._density.into(x, value)
        value[:] = found.terms
        count(found.calls)
        if isinstance(self._density, StoredDensity):
            self._density.count(*found.counts)
        if found.error is not None:
            raise found.error

    def announced(self, points: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield `points` one by one, each when its value is known."""
        points = [np.array(point, dtype=float) for point in points]
        if len(points) < 2:
            yield from points
            return
        self._asked = self._evaluations(points)
        for point, found in zip(points, self._asked, strict=True):
            self._known[point.tobytes()] = found
            yield point
        self._known.clear()

    def _evaluations(self, points):
        if self.is_forked:
            if self._forks is None:
                context = multiprocessing.get_context("fork")
                self._forks = ProcessPool(self.cores, context, _begin, self._density)
            yield from self._forks.map(_evaluated_here, points)
            return
        if self._calls is None:
            call = GuardedCall(functools.partial(_evaluated, self._density), ())
            self._calls = ParallelCalls(call, None, self.cores)
        for outcome in self._calls.each([((point,), {}) for point in points]):
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome.returned

    def close(self) -> None:
        """End the processes, also those that are within a call."""
        if self._asked is not None:
            self._asked.close()
        if self._calls is not None:
            self._calls.close()
        if self._forks is not None:
            self._forks.end()
        self._forks, self._calls, self._asked = None, None, None


# in a process -------------------------------------------------------------------------------------


def _begin(density):
    global _density
    _density = density


def _evaluated_here(x):
    return _evaluated(_density, x)


def _evaluated(density, x):
    terms, error, calls = np.full(N_TERMS, np.nan), None, Calls()
    is_stored = isinstance(density, StoredDensity)
    if is_stored:
        density.taken_counts()
    try:
        with calls.counting():
            density.into(x, terms)
    except Exception as raised:
        error = sendable(raised)
    return Evaluation(terms, error, calls, density.taken_counts() if is_stored else (0, 0))
