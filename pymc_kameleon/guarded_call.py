"""Calls of a function that may fail, or that are ended where they take too long.

It imports nothing but the standard library, since each process that calls a function imports it.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

BEGIN = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from pymc_kameleon.guarded_call import serve; serve()"
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
    """A `GuardedCall` in a process of its own, which is ended after `timeout` seconds.

    That takes no help from the function, which may be in compiled code, or wait for a program of
    its own. The process is kept for further calls, and made anew after one that was ended.
    """

    _process: subprocess.Popen | None

    def __init__(self, call: GuardedCall, timeout: float):
        self.call, self.timeout = call, timeout
        self._process, self._owner = None, 0

    def __getstate__(self):
        return {"call": self.call, "timeout": self.timeout}

    def __setstate__(self, state):
        self.__init__(**state)

    def __deepcopy__(self, memo):
        return type(self)(self.call, self.timeout)

    def __call__(self, *arguments, **named) -> Outcome:
        """Call the function; too long a call is a failure.

        Raises
        ------
        ChildProcessError
            If the function ended its process.
        """
        process, is_late = self._running(), threading.Event()

        def end():
            is_late.set()
            process.kill()

        timer = threading.Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        try:
            reply = _asked(process, (arguments, named))
        except (EOFError, BrokenPipeError) as error:
            status = self._end()
            if is_late.is_set():
                return Outcome(None, f"longer than {self.timeout:g} s", "too long")
            ended = ChildProcessError(f"the process of the function ended with status {status}")
            if isinstance(ended, self.call.failures):
                return Outcome(None, str(ended), "ChildProcessError")
            raise ended from error
        except BaseException:  # an interrupt: the answer to this call is not to be the next one's
            self._end()
            raise
        finally:
            timer.cancel()
        timer.join()
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
                [sys.executable, "-c", BEGIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._process, self._owner = process, os.getpid()
            self._finalizer = weakref.finalize(self, _killed, process, self._owner)
            pickle.dump(sys.path, process.stdin)
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


def _killed(process, owner):
    if owner != os.getpid():
        return None
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()
        except BrokenPipeError:
            pass
    return process.wait()


def _asked(process, request):
    pickle.dump(cloudpickle.dumps(request), process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _value_of(reply):
    value, error, told = reply
    if error is None:
        return value
    error.add_note(f"In a process of its own:\n{told}")
    raise error


# the process --------------------------------------------------------------------------------------


def serve() -> None:
    """Call a function, the first that is read from the standard input, as often as is asked for.

    The process ends with the one that asks, even within a call. What the function prints goes to
    the standard error, since answers are in the standard output.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, asked), daemon=True).start()
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
            os._exit(0)


def _answered(answers, make, is_shown=True):
    """Answer with what is made, or the error and where it was raised; return it."""
    value = error = told = None
    try:
        value = make()
        answer = cloudpickle.dumps((value if is_shown else None, None, None))
    except BaseException as raised:
        told = traceback.format_exc()
        try:
            cloudpickle.loads(cloudpickle.dumps(raised))
            error = raised
        except Exception:  # of classes that cannot be made anew
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        answer = cloudpickle.dumps((None, error, told))
    answers.write(answer)
    answers.flush()
    return value
