"""Processes that end with the one that asks them, and at once where it asks them to."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.context import BaseContext
from typing import Any

from pymc_kameleon.model.guarded_call import end_group, end_here

PATIENCE = 0.5
"""Seconds between two looks whether the parent still runs."""


class ProcessPool(ProcessPoolExecutor):
    """Processes in which ``begin(*arguments)`` is called first.

    They end with this one, however it ends; a call that gives Python no turn, where it returns.
    Ctrl-C in a terminal does not reach them: where a ``with`` is left by it, it ends them.
    """

    def __init__(self, cores: int, context: BaseContext, begin: Callable, *arguments):
        super().__init__(cores, context, _begin, (begin, *arguments))
        self._begun: list[Any] = []

    def submit(self, function, /, *arguments, **named) -> Future:  # noqa: D102
        others = multiprocessing.active_children()
        try:
            return super().submit(function, *arguments, **named)
        finally:
            self._begun += [p for p in multiprocessing.active_children() if p not in others]

    def end(self) -> None:
        """End the processes, also those that are within a call, and programs that they wait for."""
        self.shutdown(wait=False, cancel_futures=True)
        for process in self._begun:
            end_group(process.pid)
            process.kill()  # one that has not yet made a group of its own
        self._begun = []

    def __exit__(self, *_):
        self.end()


# in a process -------------------------------------------------------------------------------------


def _begin(begin, *arguments):
    if hasattr(os, "setsid"):
        os.setsid()  # with what the function waits for, and apart from Ctrl-C in a terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(*arguments)


def _end_with_parent():
    parent, pid = multiprocessing.parent_process(), os.getppid()
    # Processes that were forked later hold the pipe that tells of the end of the parent.
    while parent is not None and parent.is_alive() and os.getppid() == pid:
        parent.join(PATIENCE)
    end_here()
