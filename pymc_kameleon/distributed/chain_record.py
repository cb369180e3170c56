"""What the client has of each chain."""

from typing import NamedTuple

import numpy as np
import pymc as pm
from pymc.backends.ndarray import NDArray

from pymc_kameleon.distributed.round_store import Known
from pymc_kameleon.distributed.workbench import Part, traced
from pymc_kameleon.store.evaluation_store import as_bytes

__all__ = ["ChainRecord", "ClientStore"]


class ChainRecord:
    """The parts of a chain, in the order of its rounds."""

    def __init__(self):
        self.parts: list[Part] = []

    @property
    def n_draws(self) -> int:
        """Draws of all rounds so far, tuning included."""
        return sum(part.n_draws for part in self.parts)

    def log_warnings(self, log) -> None:
        """Log what the last round says, in which the chain was sampled."""
        for of_step in self.parts[-1].statistics if self.parts else []:
            for warning in of_step.get("warning", []):
                log([{"warning": warning}] if warning else None)

    def trace(self, model: pm.Model, var_names, chain: int, statistics: list[dict]) -> NDArray:
        """Return all draws as a trace of PyMC.

        Parameters
        ----------
        model : pymc.Model
        var_names : list of str or None
        chain : int
            Its number.
        statistics : list of dict
            For each step, name -> type.
        """
        like = [part for part in self.parts if part.n_draws]
        shapes = {k: v.shape[1:] for k, v in like[0].samples.items()} if like else {}
        dtypes = {k: v.dtype for k, v in like[0].samples.items()} if like else {}
        trace = NDArray(
            model=model,
            vars=traced(model, var_names),
            fn=_not_evaluated,
            var_shapes=shapes,
            var_dtypes=dtypes,
        )
        n = self.n_draws
        trace.setup(n, chain, statistics)
        trace.draw_idx = n
        for name, values in trace.samples.items():
            values[:] = np.concatenate([part.samples[name] for part in like])
        for i, of_step in enumerate(trace._stats):
            for name, values in of_step.items():
                if like:
                    values[:] = np.concatenate([part.statistics[i][name] for part in like])
        return trace


def _not_evaluated(*values):
    raise NotImplementedError("The draws of this trace were made on workers.")


class _Mark(NamedTuple):
    """A round of a chain, and how many of its evaluations are in the store."""

    round: int
    stored: int


class ClientStore:
    """The user's store, filled with what workers find.

    Parameters
    ----------
    store : EvaluationStore
    model : int
        Its number in the store.
    run : str
    dim : int
        d, how many numbers a point has.
    """

    def __init__(self, store, model: int, run: str, dim: int):
        self.store, self.model, self.run = store, model, run
        self.points: list = []
        self.values: list = []
        self.gradients: list = []
        self.marks: dict[int, _Mark] = {}
        for known in store.read(model):
            if known.failure is None:
                gradient = None if known.gradient is None else as_bytes(known.gradient)
                self._learn(known.point, known.value, gradient)
        self.dim = dim

    def keep(self, chain: int, number: int, first: int, found: list) -> None:
        """Store evaluations of a round that are not stored yet.

        Parameters
        ----------
        chain : int
        number : int
            Of the round.
        first : int
            Place of the first of them among those of the round.
        found : list of Found
        """
        mark = self.marks.get(chain, _Mark(number, 0))
        if mark.round > number:
            return
        stored = mark.stored if mark.round == number else 0
        for point, value, seconds, failure, gradient in found[max(stored - first, 0) :]:
            self.store.add(
                self.model,
                f"{self.run}-{chain}",
                np.frombuffer(point),
                value,
                seconds,
                failure,
                None if gradient is None else np.frombuffer(gradient),
            )
        self.marks[chain] = _Mark(number, max(stored, first + len(found)))

    def learn(self, parts: list[Part]) -> None:
        """Let the next round know what the chains found in this one, in the order of chains."""
        for part in parts:
            for found in part.found:
                if found.failure is None:
                    self._learn(np.frombuffer(found.point), found.value, found.gradient)

    def known(self) -> Known:
        """Return what the next round begins with."""
        points = np.array(self.points).reshape(-1, self.dim)
        return Known(points, np.array(self.values), list(self.gradients))

    def _learn(self, point, value, gradient):
        self.points.append(point)
        self.values.append(value)
        self.gradients.append(gradient)
