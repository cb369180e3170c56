"""Tasks over processes, with one progress bar for all of them."""

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import cloudpickle
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from threadpoolctl import threadpool_limits

from pymc_kameleon.model.counting_bar import REFRESH, counting_bar
from pymc_kameleon.model.process_pool import ProcessPool

_counter = None
"""In a worker process: what it has done, shared with the one that shows it."""


def run_tasks(
    function: Callable,
    tasks: Sequence[tuple],
    *,
    cores: int,
    total: int,
    description: str,
    progressbar: bool = True,
) -> list:
    """Return ``function(*task, advance)`` of each task, which calls `advance` as work is done.

    `total` is how often all tasks together call it. What is pickled may be defined in a notebook.
    BLAS has one thread, here as in every process: its sums depend on the number of threads in the
    last digits, and results must not depend on `cores`.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with counting_bar(*columns, total=total, shown=progressbar, text=description) as show:
        if cores == 1 or len(tasks) == 1:
            done = itertools.count(1)
            with threadpool_limits(limits=1):
                return [function(*task, lambda: show(next(done))) for task in tasks]
        return _in_processes(function, tasks, min(cores, len(tasks)), show)


def _in_processes(function, tasks, cores, show):
    context = multiprocessing.get_context()
    counter = context.Value("Q", 0)
    with ProcessPool(cores, context, _begin, counter) as pool:
        pending = [pool.submit(_call, cloudpickle.dumps((function, task))) for task in tasks]
        unfinished = set(pending)
        while unfinished:
            finished, unfinished = wait(unfinished, timeout=REFRESH)
            for future in finished:
                future.result()  # an error is raised at once
            show(counter.value)
        return [cloudpickle.loads(future.result()) for future in pending]


def _begin(counter):
    global _counter
    _counter = counter


def _call(pickled):
    function, task = cloudpickle.loads(pickled)
    with threadpool_limits(limits=1):
        return cloudpickle.dumps(function(*task, _advance))


def _advance():
    with _counter.get_lock():
        _counter.value += 1
