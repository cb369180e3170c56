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

_lock = threading.Lock()
_given: list[int] | None = None
"""Threads of each library before the first of those that wanted one."""
_depth = 0


@cache
def _libraries():
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _set(numbers):
    for library, number in zip(_libraries(), numbers, strict=True):
        library.set_num_threads(number)


@contextmanager
def one_thread():
    """Let NumPy and SciPy calculate on one thread; a decorator too."""
    global _given, _depth
    with _lock:
        if _depth == 0:
            _given = [library.get_num_threads() for library in _libraries()]
            _set([1] * len(_given))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set(_given)


@contextmanager
def all_threads():
    """Let a user's function calculate on the threads that there were before `one_thread`."""
    global _depth
    depth, given = _depth, _given
    if depth == 0:
        yield
        return
    with _lock:
        _depth = 0
        _set(given)
    try:
        yield
    finally:
        with _lock:
            _depth = depth
            _set([1] * len(given))


def threads_for(size: int):
    """Return `one_thread` for at most `SMALL` rows, otherwise a context without effect."""
    return one_thread() if size <= SMALL else nullcontext()
