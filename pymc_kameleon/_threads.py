"""The package's own small linear algebra on one thread, a user's functions on as many as there are.

The threads of BLAS wait for work by running: where matrices are small they take longer than one
thread does, and a multiple of it beside other processes.
"""

import threading
from contextlib import contextmanager, nullcontext
from functools import cache

from threadpoolctl import ThreadpoolController

SMALL = 1000
"""Rows up to which square matrices are for one thread: two of an idle machine gain a tenth at 800,
and beside another process that uses them all take 25 times as long."""


@cache
def _libraries():
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _set(numbers):
    for library, number in zip(_libraries(), numbers, strict=True):
        library.set_num_threads(number)


class _Limit:
    """Limit of BLAS to one thread, for as long as a thread of Python asks for it.

    The number is of the process, and what one thread sets another one has: the last to begin or end
    decides. OpenBLAS lets one thread alone set it, so each sets what it asks for itself, and all
    numbers are those there were before the first of them.
    """

    def __init__(self):
        self.lock, self.n_asking = threading.Lock(), 0
        self.given: list[int] = []

    def begin(self):
        with self.lock:
            if self.n_asking == 0:
                self.given = [library.get_num_threads() for library in _libraries()]
            self.n_asking += 1
            _set([1] * len(self.given))

    def end(self):
        with self.lock:
            self.n_asking -= 1
            _set(self.given)


_limit = _Limit()
_own = threading.local()
"""Of each thread: whether it `asks` for the limit."""


@contextmanager
def _asking(asks):
    """Let this thread ask for the limit, or not."""
    before = getattr(_own, "asks", False)
    if asks == before:
        yield
        return
    begin, end = (_limit.begin, _limit.end) if asks else (_limit.end, _limit.begin)
    begin()
    _own.asks = asks
    try:
        yield
    finally:
        _own.asks = before
        end()


def one_thread():
    """Let NumPy and SciPy calculate on one thread; a decorator too."""
    return _asking(True)


def all_threads():
    """Let a user's function calculate on the threads that there were before `one_thread`."""
    return _asking(False)


def threads_for(size: int):
    """Return `one_thread` for at most `SMALL` rows, otherwise a context without effect."""
    return one_thread() if size <= SMALL else nullcontext()
