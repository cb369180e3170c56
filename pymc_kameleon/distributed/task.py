"""What runs on a worker: a round of a chain, and the end of a run before its time."""

import threading

import numpy as np
from dask.distributed import get_worker

from pymc_kameleon.distributed.round_store import Known
from pymc_kameleon.distributed.workbench import Part, Task, part_of, workbench

__all__ = ["run_round", "stop", "stored", "topic"]

INTERVAL = 0.2
"""Seconds between messages of one chain."""

_running: dict[tuple[str, int], tuple] = {}
_stopped: set[str] = set()


def topic(run: str) -> str:
    """Name of the messages of a run."""
    return f"pymc_kameleon-{run}"


def stored(value):
    """Return what it is given: a value that a worker has, and that is sent again if it is lost."""
    return value


def run_round(data: bytes, known: Known | None, task: Task) -> Part:
    """Sample a round of a chain.

    Parameters
    ----------
    data : bytes
        A pickled `Parcel`.
    known : Known or None
    task : Task

    Returns
    -------
    Part
    """
    messages = _Messages(task)

    def on_draw(trace, draw):
        _running[task.run, task.chain] = trace, task.round, bench.store
        messages.add_draw(draw)
        if task.run in _stopped:
            raise KeyboardInterrupt

    try:
        with workbench(data) as bench:
            return bench.run(task, known, messages.add_evaluation, on_draw)
    except Exception as error:
        _leave_out_operations(error)
        raise
    finally:
        _running.pop((task.run, task.chain), None)
        messages.send()


def stop(run: str) -> list[tuple[int, int, Part]]:
    """End the chains of a run after their present draws.

    Returns
    -------
    list of (int, int, Part)
        Chain, round, and what the round made so far.
    """
    _stopped.add(run)
    return [
        (chain, number, part_of(trace, None, [] if store is None else store.found))
        for (other, chain), (trace, number, store) in list(_running.items())
        if other == run
    ]


class _Messages:
    """Messages of a task, at a bounded rate: what has come, and how far the chain is."""

    def __init__(self, task: Task):
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
