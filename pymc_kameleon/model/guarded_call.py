"""Calls of a function that may fail, or are ended where they take too long, or are made at once.

It imports no NumPy and no PyMC, since each process that calls a function imports it.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import cloudpickle

BEGIN = (
    "import ast, sys; sys.path[:] = ast.literal_eval(sys.argv[1]); "
    "from pymc_kameleon.model.guarded_call import serve; serve()"
)


class Outcome(NamedTuple):
    """What a call came to: what the function returned, or why it `failed`, by `kind`."""

    returned: Any
    failed: str | None = None
    kind: str | None = None


class GuardedCall:
    """A function of which the exceptions `failures` are outcomes and no errors."""

    def __init__(self, function: Callable, failures: tuple[type[Exception], ...]):
        self.function, self.failures = function, failures

    def __call__(self, *arguments, **named) -> Outcome:
        """Call the function; other exceptions are raised."""
        try:
            return Outcome(self.function(*arguments, **named))
        except self.failures as error:
            kind = type(error).__name__
            first_line = (str(error).splitlines() or [""])[0]
            return Outcome(None, f"{kind}: {first_line}" if first_line else kind, kind)


class TimedCall:
    """A `GuardedCall` in a process of its own, which is ended after `timeout` seconds if given.

    That takes no help from the function, which may be in compiled code, or wait for a program of
    its own. The process is kept for further calls, and made anew after one that was ended.
    """

    _process: subprocess.Popen | None

    def __init__(self, call: GuardedCall, timeout: float | None):
        self.call, self.timeout = call, timeout
        self._process, self._owner = None, 0
        self._lock, self._locker = threading.Lock(), os.getpid()

    def __call__(self, *arguments, **named) -> Outcome:
        """Call the function; too long a call is a failure.

        Raises
        ------
        ChildProcessError
            If the function ended its process.
        """
        if self._locker != os.getpid():  # a thread of the parent may hold the lock
            self._lock, self._locker = threading.Lock(), os.getpid()
        with self._lock:
            return self._called(arguments, named)

    def _called(self, arguments, named):
        process = self._running()
        with _ended_after(process, self.timeout) as is_late:
            try:
                reply = _asked(process, (arguments, named))
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
                status = self._end()
                if is_late.is_set():
                    return Outcome(None, f"longer than {self.timeout:g} s", "too long")
                ended = ChildProcessError(f"the process of the function ended with status {status}")
                if isinstance(ended, self.call.failures):
                    return Outcome(None, str(ended), "ChildProcessError")
                raise ended from error
            except BaseException:  # an interrupt: the answer to this call is not the next one's
                self._end()
                raise
        if is_late.is_set():
            self._end()
        return _value_of(reply)

    def _running(self):
        """Return the process that calls the function; a copy by a fork is the parent's."""
        if self._process is not None and self._owner != os.getpid():
            for pipe in (self._process.stdin, self._process.stdout):
                pipe.close()
            self._process = None
        if self._process is None:
            process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, repr([p for p in sys.path if isinstance(p, str)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._process, self._owner = process, os.getpid()
            self._finalizer = weakref.finalize(self, _killed, process, self._owner)
            try:
                _value_of(_asked(process, self.call))
            except BaseException:
                self._end()
                raise
        return self._process

    def _end(self):
        process, self._process = self._process, None
        self._finalizer.detach()
        return _killed(process, self._owner)

    def close(self):
        """End the process, if there is one."""
        if self._process is not None and self._owner == os.getpid():
            self._end()

    def interrupt(self):
        """End the call that another thread waits for, if there is one."""
        process = self._process
        if process is not None and self._owner == os.getpid():
            _kill(process)


class ParallelCalls:
    """A `GuardedCall` in several processes, to which calls go as they are free."""

    def __init__(self, call: GuardedCall, timeout: float | None, workers: int):
        self._calls = [TimedCall(call, timeout) for _ in range(workers)]

    def __call__(self, *arguments, **named) -> Outcome:
        """Make one call; raises as `TimedCall` does."""
        return self._calls[0](*arguments, **named)

    def all(self, requests: Sequence[tuple[tuple, dict]]) -> list[Outcome | Exception]:
        """Make calls at once, each of arguments and named ones; errors are returned."""
        return list(self.each(requests))

    def each(self, requests: Sequence[tuple[tuple, dict]]) -> Iterator[Outcome | Exception]:
        """Make calls as `all` does; yield what they come to in their order, as it is known."""
        free: queue.SimpleQueue = queue.SimpleQueue()
        for call in self._calls:
            free.put(call)

        def one(request):
            call, (arguments, named) = free.get(), request
            try:
                return call(*arguments, **named)
            except Exception as error:
                return error
            finally:
                free.put(call)

        with ThreadPoolExecutor(len(self._calls)) as threads:
            found = [threads.submit(one, request) for request in requests]
            try:
                for future in found:
                    yield future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in found):
                    for call in self._calls:
                        call.interrupt()
                    time.sleep(0.02)
                raise

    def close(self) -> None:
        """End the processes."""
        for call in self._calls:
            call.close()


@contextmanager
def _ended_after(process, seconds):
    """End the process within after so many seconds, if they are given; yield whether it was."""
    is_late = threading.Event()
    if seconds is None:  # a thread for each call would cost more than many a call
        yield is_late
        return

    def end():
        is_late.set()
        _kill(process)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()


def _kill(process):
    """End a process, and the programs that it waits for."""
    if process.poll() is None:
        end_group(process.pid)


def end_group(pid: int) -> None:
    """End a process that leads a group, and the programs that it waits for."""
    with suppress(OSError):  # it has ended
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)  # as Windows ends a process


def _killed(process, owner):
    if owner != os.getpid():
        return None
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            pipe.close()
    return process.wait()


def _asked(process, request):
    pickle.dump(cloudpickle.dumps(request), process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def sendable(error: BaseException, pickler=pickle) -> BaseException:
    """Return an error that another process can make anew: this one, or one of its words."""
    try:
        pickler.loads(pickler.dumps(error))
    except Exception:  # whatever a class raises that cannot be made anew
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _value_of(reply):
    value, error, told = reply
    if error is None:
        return value
    error.add_note(f"In a process of its own:\n{told}")
    raise error


# the process --------------------------------------------------------------------------------------


def serve() -> None:
    """Call a function, the first that is read from the standard input, as often as is asked for.

    The process ends with the one that asks, also within a call that gives Python a turn. What the
    function prints goes to the standard error, since answers are in the standard output, and it has
    nothing to read.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    asked: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, asked), daemon=True).start()
    call = _answered(answers, lambda: cloudpickle.loads(asked.get()), is_shown=False)

    def called():
        arguments, named = cloudpickle.loads(asked.get())
        return call(*arguments, **named)

    while True:
        _answered(answers, called)


def _read(requests, asked):
    while True:
        try:
            asked.put(pickle.load(requests))
        except EOFError:
            end_here()


def end_here() -> None:
    """End this process, and its group if it leads one."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answered(answers, make, is_shown=True):
    """Answer with what is made, or the error and where it was raised; return it."""
    value = None
    try:
        value = make()
        answer = cloudpickle.dumps((value if is_shown else None, None, None))
    except BaseException as raised:
        told = traceback.format_exc()
        answer = cloudpickle.dumps((None, sendable(raised, cloudpickle), told))
    answers.write(answer)
    answers.flush()
    return value
