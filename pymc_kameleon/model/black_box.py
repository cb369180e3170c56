"""Any Python function as a term of a model: a log-likelihood, or a curve for one of PyMC's."""

import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numba.extending import is_jitted
from pymc.initial_point import make_initial_point_fn
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.utils import MissingInputError
from pytensor.link.numba.dispatch import numba_funcify

from pymc_kameleon.mcmc.bridge.address import BY_ADDRESS, machine_code
from pymc_kameleon.model.forks import refuse_lost_threads
from pymc_kameleon.model.guarded_call import GuardedCall, Outcome, ParallelCalls, TimedCall
from pymc_kameleon.model.operations import converted, described, wanted
from pymc_kameleon.validation import (
    checked_integer,
    checked_number,
    names_close_arguments,
    renamed,
)

__all__ = ["black_box"]

_log = logging.getLogger("pymc.kameleon")
_numbers = itertools.count()

Request = tuple[tuple[np.ndarray, ...], tuple[str, ...]]
"""Values of a call, and the names of the last of them."""

VECTORIZED = 8
"""Points that a chain asks a vectorized function for at once, some of them in vain."""

N_KEPT = 20
"""Outcomes that are kept for each group. Where a block of variables moves one group, and all of as
many proposals are rejected, the value to which it returned is not known to the next block: then
that group is called once more, at most one call in 20."""

LARGEST_KEPT = 2**26
"""Bytes of the curves that are kept for all groups of an operation, 64 MB; but two for each."""

LONGEST_STORED = 100
"""Numbers of an argument of a group that a store keeps as they are; of more it keeps a digest."""

LONGEST_KEPT = 64
"""Bytes of an array that are kept as they are, to find what was called with them; else a digest."""


@renamed(workers="cores")
@names_close_arguments
def black_box(
    function: Callable | None = None,
    *,
    failures: type[Exception] | Sequence[type[Exception]] = (),
    timeout: float | None = None,
    store: Any = None,
    shape: int | Sequence[int] | None = None,
    name: str | None = None,
    cores: int = 1,
    vectorized: bool = False,
    each: str | Sequence[str] = (),
) -> Any:
    """Make a Python function a term of PyMC models, called with their variables.

    Parameters
    ----------
    function : callable
        Takes numbers and arrays, in the natural coordinates of the variables that it is called
        with, and returns one number, a log-likelihood for ``pymc.Potential``, or an array of
        numbers, a curve for an ordinary likelihood of PyMC. A list, an int or a float32 will do.
        One of ``numba.njit`` that returns a number or an array is called by compiled transitions,
        with none of the options `failures`, `timeout`, `store`, `cores`, `vectorized` and `each`.
    failures : exception class or several
        What the function raises where it cannot run. There the posterior is 0: such points are
        rejected, and counted, and a warning says how many and where the first was. Other exceptions
        are errors.
    timeout : float, optional
        Seconds after which a call is ended, and counts as such a failure. Calls are then made in a
        process beside each chain, which takes a fraction of a millisecond a call; also a
        function in compiled code, or one that waits for a program, is ended.
    store : EvaluationStore, optional
        Keep each value in this file, and look there first. For functions that return one number;
        with `each`, the value of each group.
    shape : int or tuple of ints, optional
        Shape of what the function returns, () for one number, as with a store. By default it is
        called once, at the starting point of the model.
    name : str, optional
        What messages and the store call it, by default its own. The store does not tell two
        functions of one name apart.
    cores : int
        Calls of each chain that run at once, each in a process beside it. `SurrogateHMCStep`,
        `surrogate_posterior` and, after tuning, the random walks ask for several points at once:
        those that are known beforehand, and those where a chain will probably go. Draws are the
        same as with one.
    each : str or several, optional
        Names of arguments that have one row for each group, as parameters of persons and their
        data. The function is written for one group, and called once for each: with its rows, and
        with the other arguments as they are. What it returns gets the groups as first axis. Groups
        whose arguments did not change are not called, unless none did. With `cores` or `vectorized`
        the groups of an evaluation are called at once, and chains ask for one point at a time.
    vectorized : bool
        The function takes several points at once: every argument, data too, gets one more axis, the
        first one, of as many points, and so has what it returns. It runs where the chain runs. An
        exception is then looked for in halves of the points.

    Returns
    -------
    callable
        With a model's variables it returns a variable of the model, with numbers an array of
        float64 of what `function` returns. Without `function`, a decorator that makes it.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind or value than above. When it is called, if `function` does
        not take these arguments; if it returns no numbers, or not as many as at first; or if it
        raises at the starting point.

    Notes
    -----
    A function of JAX, PyTorch or another library with threads of its own waits for ever in a forked
    process. Chains that would be forked raise a RuntimeError instead: write
    ``pm.sample(mp_ctx="forkserver")``, ``pm.sample(cores=1)``, or `timeout`.

    No gradient is known: sample with a step of this package, or one of PyMC that takes none. For a
    function with failures that returns an array, the model gets a potential, named after it with
    ``_ran``: 0, or -inf where it failed. Failures that depend on chance or on the load of the
    machine, such as `timeout` near the usual time of a call, make the posterior depend on them too.

    Examples
    --------
    >>> @black_box(failures=ArithmeticError, timeout=60)
    ... def curve(absorption, elimination):
    ...     return simulate(absorption, elimination, days)
    >>> with pm.Model():
    ...     absorption, elimination = pm.LogNormal("absorption"), pm.LogNormal("elimination")
    ...     pm.Normal("measured", curve(absorption, elimination), 0.3, observed=measured)
    ...     idata = pm.sample(step=SurrogateHMCStep())

    >>> log_likelihood = black_box(of_one_person, each=["theta", "y"], cores=4)
    >>> with pm.Model():
    ...     theta, sd = pm.Normal("theta", 0, 1, shape=(12, 2)), pm.HalfNormal("sd")
    ...     pm.Potential("likelihood", log_likelihood(theta, y, sd))  # 12 numbers, one a person
    """
    make = functools.partial(
        BlackBox,
        failures=failures,
        timeout=timeout,
        store=store,
        shape=shape,
        name=name,
        cores=cores,
        vectorized=vectorized,
        each=each,
    )
    return make if function is None else make(function)


class BlackBox:
    """What `black_box` returns: the function, and an operation of it for each call in a model."""

    def __init__(
        self,
        function,
        failures=(),
        timeout=None,
        store=None,
        shape=None,
        name=None,
        cores=1,
        vectorized=False,
        each=(),
    ):
        if not callable(function):
            raise TypeError(f"function={function!r}: pass a Python function.")
        self.failures = _exceptions(failures)
        if timeout is not None:
            timeout = checked_number("timeout", timeout, above=0)
        if store is not None and not hasattr(store, "wrap"):
            raise TypeError(f"store={store!r}: take an EvaluationStore.")
        self.shape = _checked_shape(shape, store)
        cores = checked_integer("cores", cores, 1)
        if vectorized and cores > 1:
            raise ValueError(
                f"cores={cores} with vectorized=True: such a function takes all points in one "
                "call. Leave one of both out."
            )
        self.each = _checked_each(each, function)
        self.vectorized, self.calls_at_once = bool(vectorized), bool(vectorized) or cores > 1
        self.n_at_once = VECTORIZED if vectorized else cores
        if self.each:
            self.n_at_once = 1
        self.function, self.store = function, store
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        named = named if hasattr(named, "__qualname__") else type(named)
        functools.update_wrapper(self, named, updated=())
        self.__wrapped__, self.__doc__ = function, function.__doc__
        self.name = named.__name__ if name is None else str(name)
        self.key = self.name, os.getpid(), next(_numbers)
        self._process = os.getpid()
        call = GuardedCall(function, self.failures)
        if cores > 1:
            self._call = ParallelCalls(call, timeout, cores)
        else:
            self._call = call if timeout is None else TimedCall(call, timeout)
        self._known: dict[tuple, tuple[Outcome | Exception, float]] = {}
        self.asked: list | None = None
        self.may_fail = bool(self.failures) or timeout is not None
        needs_python = self.may_fail or store is not None or self.calls_at_once or self.each
        self._is_for_numba = BY_ADDRESS and is_jitted(function) and not needs_python
        self._options = failures, timeout, store, shape, name, cores, vectorized, self.each
        self._name_in_store = f"{named.__module__}.{named.__qualname__}" if name is None else name

    def __repr__(self):
        return f"black_box({self.name})"

    def with_store(self, store: Any, name: str | None = None) -> "BlackBox":
        """Return one that keeps its values in a store, where it is known by `name`."""
        failures, timeout, _, shape, own_name, *others = self._options
        name = own_name if name is None else name
        return type(self)(self.function, failures, timeout, store, shape, name, *others)

    def __get__(self, instance, owner=None):
        if instance is None or not hasattr(self.function, "__get__"):
            return self
        bound = type(self)(self.function.__get__(instance, owner), *self._options)
        bound.key = (*self.key, id(instance))
        return bound

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        # By its name where that finds it, as functions are; else with the function.
        module = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        if getattr(module, self.__qualname__, None) is self:
            return _found, (self.__module__, self.__qualname__, self.key)
        return type(self), (self.function, *self._options), {"key": self.key}

    def __call__(self, *arguments, **named):
        arguments, named = self._in_order(arguments, named)
        given = [*arguments, *named.values()]
        names = tuple(named)
        if not any(map(_holds_variables, given)):
            values = [np.asarray(value) for value in given]
            found = []
            for outcome in self.outcomes(self.requests(values, names)):
                if outcome.failed is not None:
                    raise RuntimeError(f"{self.name} failed: {outcome.failed}")
                found.append(self._numbers(outcome.returned))
            return np.array(found) if self.each else found[0]
        inputs = [self._tensor(value, i) for i, value in enumerate(given)]
        kind = None
        if self._is_for_numba and not named:
            try:
                kind = _returned_kind(self.function, inputs)
            except Exception as error:
                _log.info("Numba cannot compile %s, which runs in Python: %s", self.name, error)
                return type(self)(self.function.py_func, *self._options)(*arguments)
        if self.shape is None:
            found = self._value_at_start(inputs, names)
        else:
            found = np.ones(self.shape)
        if self.each:
            found = np.repeat(found[None], self._n_groups(inputs, names), 0)
            has_rows = self._has_rows(len(inputs), names)
            operation: Any = GroupSimulator(self, names, found.shape, found, has_rows)
        elif kind is not None and _fits(kind, found.shape):
            operation = CompiledSimulator(self, names, found.shape, found)
        else:
            operation = Simulator(self, names, found.shape, found)
        if self.store is not None:
            operation = self.store.wrap(operation, self._name_in_store)
        outputs = operation(*inputs)
        if not isinstance(outputs, list):
            return outputs
        value, log_ran = outputs
        try:
            model = pm.modelcontext(None)
        except TypeError:
            return value + log_ran
        label, count = f"{self.name}_ran", 2
        while label in model.named_vars:
            label, count = f"{self.name}_ran_{count}", count + 1
        pm.Potential(label, log_ran)
        return value

    def requests(self, values: Sequence[np.ndarray], names: tuple[str, ...]) -> list[Request]:
        """Return the values and names of each call at these `values`: one, or one a group."""
        if not self.each:
            return [(tuple(values), names)]
        n_groups = self._n_groups(values, names)
        return _of_groups(values, names, self._has_rows(len(values), names), n_groups)

    def outcomes(
        self, requests: list[Request], groups: Sequence[int] | None = None
    ) -> Iterator[Outcome]:
        """Yield what the calls of `requests` come to; they are made at once where that can be.

        `groups` are those that the requests are for, by default all, or none without `each`.
        """
        if groups is None:
            groups = range(len(requests))
        at_once = len(requests) > 1 and self.calls_at_once
        if at_once:
            self.evaluate_ahead(requests)
        try:
            for group, (values, names) in zip(groups, requests, strict=True):
                yield self.outcome(values, names, group if self.each else None)
        finally:
            if at_once:
                self.forget()

    def _has_rows(self, n, names):
        """Whether each of `n` arguments, the last by `names`, has a row for each group."""
        return [label in self.each for label in self._labels(n, names)]

    def _n_groups(self, values, names):
        """Count the groups; `values` are arrays or variables, whose shape may not be known."""
        labels = self._labels(len(values), names)
        rows = {k: v for k, v in zip(labels, values, strict=True) if k in self.each}
        for label, value in rows.items():
            if value.ndim == 0:
                raise ValueError(
                    f"{label} of {self.name} is a number: with each={list(self.each)} give it a "
                    "first axis, with one row for each group."
                )
        known = {label: getattr(value, "type", value).shape[0] for label, value in rows.items()}
        if None in known.values():
            values = _values_at_start(pm.modelcontext(None), list(rows.values()))
            known = {label: len(value) for label, value in zip(rows, values, strict=True)}
        if len(set(known.values())) != 1:
            shown = ", ".join(f"{label} {size}" for label, size in known.items())
            raise ValueError(
                f"{self.name} has rows for another number of groups in one argument than in "
                f"another: {shown}. Give as many to each."
            )
        return next(iter(known.values()))

    def outcome(
        self, values: Sequence[np.ndarray], names: tuple[str, ...], group: int | None = None
    ) -> Outcome:
        """Call the function with copies of `values`, the last of them by `names`; count it.

        What `evaluate_ahead` has found at these values is taken from there. A failure is counted
        for the `group`, if there is one.
        """
        known = self._known.pop(_key(values, names), None)
        if known is None:
            [outcome] = self._outcomes([values], names)
            seconds = 0.0
        else:
            outcome, seconds = known
        if isinstance(outcome, Exception):
            count(Calls(seconds_ahead=seconds))
            outcome.add_note(f"{self.name} was called with {self.described(values, names)}.")
            raise outcome
        calls = Calls(Counter([self.key]), seconds_ahead=seconds)
        if outcome.failed is not None:
            calls.failed = Counter([(self.key, outcome.kind)])
            calls.last = f"{self.described(values, names)}: {outcome.failed}"
            calls.first = {self.key: calls.last}
            if group is not None:
                calls.groups = Counter([(self.key, group)])
        count(calls)
        return outcome

    def forget(self) -> None:
        """Forget what was evaluated ahead and not asked for."""
        self._known.clear()

    def taken_asked(self) -> list[Request]:
        """Return what was `asked` for, values and names as `outcome` takes them; ask no more."""
        asked, self.asked = self.asked or [], None
        return asked

    def evaluate_ahead(self, asked: list[Request]) -> None:
        """Call the function at once for all that was `asked` for."""
        begin, new = time.perf_counter(), {_key(*request): request for request in asked}
        by_names: dict = {}
        for key, (values, names) in new.items():
            by_names.setdefault(names, []).append((key, values))
        for names, requests in by_names.items():
            keys, values = zip(*requests, strict=True)
            found = self._outcomes(values, names)
            share = (time.perf_counter() - begin) / len(new)
            self._known.update({key: (one, share) for key, one in zip(keys, found, strict=True)})

    def _outcomes(self, requests, names) -> list[Outcome | Exception]:
        """Return what calls for each of `requests` come to."""
        if self._process != os.getpid():
            if isinstance(self._call, GuardedCall):
                refuse_lost_threads(self.function, self.name)
            self._process = os.getpid()
        if self.vectorized:
            return self._of_a_batch(requests, names)
        calls = [_in_two([value.copy()[()] for value in values], names) for values in requests]
        if len(calls) > 1:
            return self._call.all(calls)
        [(arguments, named)] = calls
        try:
            return [self._call(*arguments, **named)]
        except Exception as error:
            return [error]

    def _of_a_batch(self, requests, names):
        n = len(requests)
        arguments, named = _in_two([np.stack(v) for v in zip(*requests, strict=True)], names)
        try:
            outcome = self._call(*arguments, **named)
        except Exception as error:
            outcome = error
        if isinstance(outcome, Exception) or outcome.failed is not None:
            if n == 1:
                return [outcome]
            return [
                one
                for half in (requests[: n // 2], requests[n // 2 :])
                for one in self._of_a_batch(half, names)
            ]
        returned = outcome.returned
        if np.ndim(returned) == 0 or len(returned) != n:
            message = (
                f"{self.name} returned {described(returned)} for {n} points: with vectorized=True "
                f"return an array whose first axis has one entry for each, {n}."
            )
            return [ValueError(message) for _ in requests]
        return [Outcome(one) for one in returned]

    def described(self, values: Sequence[np.ndarray], names: tuple[str, ...]) -> str:
        """Values of the arguments, by the function's own names for them."""
        labels = self._labels(len(values), names)
        shown = [np.array2string(np.asarray(value), precision=6, threshold=10) for value in values]
        return ", ".join(f"{label} = {text}" for label, text in zip(labels, shown, strict=True))

    def _labels(self, n, names):
        """Names of `n` arguments: the function's own, and for the last ones `names`."""
        n -= len(names)
        try:
            bound = inspect.signature(self.function).bind_partial(*range(n)).arguments
            first = [name for name, value in bound.items() if not isinstance(value, tuple)]
        except (TypeError, ValueError):
            first = []
        return [*(first if len(first) == n else [f"argument {i + 1}" for i in range(n)]), *names]

    def _in_order(self, arguments, named):
        """Return the arguments in the order of the function, whichever way they were given."""
        if not arguments and not named:
            raise ValueError(f"{self.name} got no arguments: name what it depends on.")
        try:
            bound = inspect.signature(self.function).bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{self.name} does not take these arguments: {error}.") from error
        except ValueError:  # of C, without a signature
            return arguments, dict(sorted(named.items()))
        return bound.args, dict(sorted(bound.kwargs.items()))

    def _tensor(self, value, i):
        try:
            return pt.as_tensor_variable(np.asarray(value) if isinstance(value, bool) else value)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise TypeError(
                f"Argument {i + 1} of {self.name} is of type {type(value).__name__}: pass "
                "variables, numbers and arrays, and let the function find the rest itself, as in "
                "black_box(functools.partial(function, settings=settings))."
            ) from error

    def _numbers(self, returned):
        return converted(returned, _float_tensor((None,) * np.ndim(returned)), self.name)

    def _value_at_start(self, inputs, names):
        """Return what the function does at the starting point of the model."""
        try:
            model = pm.modelcontext(None)
        except TypeError:
            raise TypeError(
                f"{self.name} is called outside of a model: call it inside `with pm.Model():`, or "
                "give the shape of what it returns, black_box(shape=()) for one number."
            ) from None
        try:
            values = _values_at_start(model, inputs)
        except MissingInputError as error:
            raise TypeError(
                f"{self.name} depends on more than the variables of the model, so it cannot be "
                "called beforehand: give the shape of what it returns, black_box(shape=()) for one "
                "number."
            ) from error
        values, names = self.requests(values, names)[0]
        where = f"at the starting point of the model, {self.described(values, names)}"
        advice = (
            "Take other starting points, as in pm.Normal(..., initval=...), or give the shape of "
            "what it returns, black_box(shape=())."
        )
        try:
            outcome = self.outcome(values, names)
        except Exception as error:
            error.add_note(f"It is called {where}, to find the shape of what it returns. {advice}")
            raise
        if outcome.failed is not None:
            raise ValueError(f"{self.name} failed {where}: {outcome.failed}. {advice}")
        return self._numbers(outcome.returned)


def _found(module, name, key):
    """Return the black box of a module, which another process counts by `key`."""
    found = getattr(importlib.import_module(module), name)
    found.key = key
    return found


class Simulator(Op):
    """Operation of a `black_box`; its last inputs go to the function by `names`.

    `last` is the last finite value, or another one of this shape.
    """

    __props__ = ("black_box", "names", "shape")

    def __init__(
        self,
        black_box: BlackBox,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        last: np.ndarray,
    ):
        self.black_box, self.names, self.shape, self.last = black_box, names, shape, last
        self.name = black_box.name

    def __str__(self):
        # Also where Numba compiles it: a store knows the likelihood by this.
        return f"Simulator({self.black_box.name})"

    def make_node(self, *inputs):
        types = [_float_tensor(self.shape)]
        if self.black_box.may_fail and self.shape:
            types.append(_float_tensor(()))
        return Apply(self, list(inputs), [type_() for type_ in types])

    def perform(self, node, inputs, outputs):
        """Call the function.

        Where it fails a number is -inf. A curve is the last finite one, so that whatever
        the model makes of it is finite, and a second output, for a term of its own, is -inf; else
        that is 0. Where the black box is `asked` what it will be called with, the last finite value
        stands for all.
        """
        black_box = self.black_box
        if self.is_asked:
            black_box.asked.append((tuple(value.copy() for value in inputs), self.names))
            for output, value in zip(outputs, (self.last, np.array(0.0)), strict=False):
                output[0] = value.copy()
            return
        outcome = black_box.outcome(inputs, self.names)
        has_failed = outcome.failed is not None
        if not has_failed:
            value = converted(outcome.returned, node.outputs[0].type, black_box.name)
        elif not self.shape:
            value = np.array(-np.inf)
        else:
            value = self.last.copy()
        outputs[0][0] = value
        if len(outputs) > 1:
            outputs[1][0] = np.array(-np.inf if has_failed else 0.0)
            if np.all(np.isfinite(value)):
                self.last = value.copy()

    @property
    def is_asked(self) -> bool:
        """Whether it is only asked what its function would be called with."""
        return self.black_box.asked is not None

    def do_constant_folding(self, fgraph, node):
        """Never: a call may be expensive."""
        return False


class GroupSimulator(Simulator):
    """The same of a function that is called for `each` group, the first axis of what it returns.

    `has_rows` says which inputs have a row for each. Groups whose inputs are among the last
    different ones are not called; but all are where the whole point is known, so that a random
    function is noticed where the same point is evaluated again. `stored` are the values that a
    store has, if there is one, which is asked instead.
    """

    stored: Any = None

    def __init__(self, black_box, names, shape, last, has_rows: list[bool]):
        super().__init__(black_box, names, shape, last)
        self.has_rows = has_rows
        n_kept = min(N_KEPT, LARGEST_KEPT // max(last.nbytes, 1))
        self.memory = GroupMemory(shape[0], max(n_kept, 2))

    def make_node(self, *inputs):
        types = [_float_tensor(self.shape)]
        if self.black_box.may_fail and len(self.shape) > 1:
            types.append(_float_tensor(self.shape[:1]))
        return Apply(self, list(inputs), [type_() for type_ in types])

    def perform(self, node, inputs, outputs):
        """Call the function for each group; one that fails has -inf, or its last finite curve."""
        black_box, n_groups = self.black_box, self.shape[0]
        if any(len(rows) != n_groups for rows in itertools.compress(inputs, self.has_rows)):
            found = len(black_box.requests(inputs, self.names))
            raise ValueError(
                f"{black_box.name} has rows for {found} groups, and had {n_groups} when the model "
                "was made: make the model anew."
            )
        requests = _of_groups(inputs, self.names, self.has_rows, n_groups)
        value, log_ran = self.last.copy(), np.zeros(n_groups)
        find = self._with_memory if self.stored is None else self._with_store
        for i, outcome in find(requests):
            if outcome.failed is None:
                value[i] = outcome.returned
            else:
                log_ran[i] = -np.inf
                if len(self.shape) == 1:
                    value[i] = -np.inf
        outputs[0][0] = value
        if len(outputs) > 1:
            outputs[1][0] = log_ran
            is_finite = np.isfinite(value).reshape(n_groups, -1).all(axis=1)
            self.last[is_finite] = value[is_finite]

    def _with_memory(self, requests):
        """Yield each group with its outcome, that of a call only where the group is not known."""
        keys = [_short_key(values) for values, _ in requests]
        known = {i: outcome for i, key in enumerate(keys) if (outcome := self.memory.find(i, key))}
        if len(known) == len(keys) and not _takes_known.get():
            known = {}
        new = [i for i in range(len(keys)) if i not in known]
        called = self.black_box.outcomes([requests[i] for i in new], new)
        for i, outcome in zip(new, called, strict=True):
            found = self._converted(outcome)
            self.memory.keep(i, keys[i], found)
            yield i, found
        for i, outcome in known.items():
            if outcome.failed is not None:
                last = f"{self.black_box.described(*requests[i])}: {outcome.failed}"
                count(Calls(last=last))
            yield i, outcome

    def _with_store(self, requests):
        """Yield each group with its outcome, as the store has it or will have it."""
        black_box, stored = self.black_box, self.stored
        unknown = [one for one in requests if stored.find(one[0], LONGEST_STORED) is None]
        if len(unknown) > 1 and black_box.calls_at_once:
            black_box.evaluate_ahead(unknown)

        def called(i, request):
            outcome = self._converted(black_box.outcome(*request, i))
            return float(outcome.returned) if outcome.failed is None else -np.inf

        try:
            for i, request in enumerate(requests):
                evaluate = functools.partial(called, i, request)
                yield i, Outcome(stored.at(request[0], evaluate, longest=LONGEST_STORED))
        finally:
            black_box.forget()

    def _converted(self, outcome):
        """Return an outcome with a new array of the promised shape."""
        if outcome.failed is not None:
            return outcome
        kind = _float_tensor(self.shape[1:])
        return Outcome(converted(outcome.returned, kind, self.black_box.name))


class GroupMemory(threading.local):
    """The last outcomes for each group that differ in what it was called with.

    They belong to one thread of one process; a copy has none.
    """

    def __init__(self, n_groups: int, n_kept: int):
        self.n_kept = n_kept
        self._groups: list[OrderedDict] = [OrderedDict() for _ in range(n_groups)]

    def __reduce__(self):
        return type(self), (len(self._groups), self.n_kept)

    def find(self, group: int, key: Any) -> Outcome | None:
        """Return the outcome at `key`, None if it is not known."""
        known = self._groups[group]
        if key in known:
            known.move_to_end(key)
        return known.get(key)

    def keep(self, group: int, key: Any, outcome: Outcome) -> None:
        """Keep an outcome, in place of the one that was used longest ago."""
        known = self._groups[group]
        known[key] = outcome
        known.move_to_end(key)
        if len(known) > self.n_kept:
            known.popitem(last=False)


_takes_known: ContextVar[bool] = ContextVar("_takes_known", default=False)
"""Whether this thread evaluates a point at which groups need not be called if all are known."""


@contextmanager
def takes_known_groups():
    """Call no group that is known, within, even where all are: a step comes back to its point."""
    before = _takes_known.set(True)
    try:
        yield
    finally:
        _takes_known.reset(before)


class CompiledSimulator(Simulator):
    """The same of a function that Numba compiles: compiled transitions call it too."""


@numba_funcify.register(CompiledSimulator)
def _compiled_call(op, node, **options):
    """Return what calls the function in compiled code as `Simulator.perform` does in Python."""
    names = [f"x{i}" for i in range(len(node.inputs))]
    values = [f"{x}.copy()" if node.inputs[i].ndim else f"{x}[()]" for i, x in enumerate(names)]
    source = f"def call({', '.join(names)}): return returned(function({', '.join(values)}))"
    namespace = {"function": op.black_box.function, "returned": _compiled_conversion(op)}
    exec(source, namespace)
    return numba.njit(namespace["call"])


def _compiled_conversion(op):
    """Return what makes of what the function returned a new array of the promised shape."""
    shape, asked = op.shape, wanted(_float_tensor(op.shape))
    error = f"{op.name} returned an array of another shape than {shape}: {asked}."

    def number(value):
        found, array = np.asarray(value), np.empty(())
        if found.size != 1:
            raise ValueError(error)
        array[()] = found.item()
        return array

    def curve(value):
        if value.shape != shape:
            raise ValueError(error)
        array = np.empty(shape)
        array[...] = value
        return array

    return numba.njit(curve if shape else number)


def _returned_kind(function, inputs):
    """Numba type of what a jitted function returns for inputs of these types."""
    numbers = [numba.from_dtype(np.dtype(variable.dtype)) for variable in inputs]
    kinds = [
        numba.types.Array(number, variable.ndim, "C") if variable.ndim else number
        for number, variable in zip(numbers, inputs, strict=True)
    ]
    return machine_code(function, kinds)[1]


def _fits(kind, shape) -> bool:
    """Whether compiled code can make an array of this shape of what has this Numba type."""
    is_array = isinstance(kind, numba.types.Array)
    dtype, ndim = (kind.dtype, kind.ndim) if is_array else (kind, 0)
    is_real = isinstance(dtype, numba.types.Integer | numba.types.Float | numba.types.Boolean)
    return is_real and (shape == () or ndim == len(shape))


def _of_groups(values, names, has_rows, n_groups):
    """Return a request for each group, with its rows of those `values` that have some."""
    return [
        (tuple(v[i] if has else v for v, has in zip(values, has_rows, strict=True)), names)
        for i in range(n_groups)
    ]


def _key(values, names):
    return names, *((value.shape, value.tobytes()) for value in values)


def _short_key(values):
    """Return the same without names, and with digests of long arrays."""
    return tuple((value.dtype.char, value.shape, _short(value.tobytes())) for value in values)


def _short(text):
    return text if len(text) <= LONGEST_KEPT else hashlib.sha256(text).digest()


def _in_two(values, names):
    """Values by position, and those by `names`."""
    n = len(values) - len(names)
    return tuple(values[:n]), dict(zip(names, values[n:], strict=True))


def _holds_variables(value):
    if isinstance(value, list | tuple):
        return any(map(_holds_variables, value))
    return isinstance(value, Variable)


def _float_tensor(shape):
    return pt.TensorType("float64", shape=shape)


def _exceptions(failures):
    classes = failures if isinstance(failures, list | tuple) else [failures]
    if not all(isinstance(c, type) and issubclass(c, Exception) for c in classes):
        raise TypeError(
            f"failures={failures!r}: take classes of exceptions, as in failures=(ValueError, "
            "ArithmeticError)."
        )
    return tuple(classes)


def _checked_each(each, function):
    """Names of arguments that have a row for each group."""
    names = (each,) if isinstance(each, str) else tuple(each)
    if not names:
        return ()
    try:
        known = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        known = []
    for name in names:
        if name not in known:
            raise ValueError(
                f"each={list(names)}: the function has no argument {name}; name some of "
                f"{', '.join(known) or 'a Python function that names its arguments'}."
            )
    return names


def _checked_shape(shape, store):
    if shape is None:
        return None if store is None else ()
    if store is not None and shape != ():
        raise ValueError(f"shape={shape!r}: a store keeps functions of one number; take shape=().")
    sizes = shape if isinstance(shape, list | tuple) else [shape]
    return tuple(checked_integer("shape", size, 0) for size in sizes)


def _values_at_start(model, inputs):
    """Values of variables of a model at its starting point."""
    point = make_initial_point_fn(model=model, return_transformed=False)(0)
    variables = model.free_RVs
    evaluate = pytensor.function(variables, inputs, mode="FAST_COMPILE", on_unused_input="ignore")
    return evaluate(*(point[variable.name] for variable in variables))


# what was called ----------------------------------------------------------------------------------

_counting: ContextVar[tuple["Calls", ...]] = ContextVar("_counting", default=())
"""Those that count what this thread calls."""


@dataclass
class Calls:
    """Calls of black boxes, and their failures, that a thread makes while this is `counting`.

    By the black box's `key`, `made` counts the calls and `first` describes the first failure;
    `failed` counts by key and kind, `groups` by key and group. `last` describes the last failure of
    any. `seconds_ahead` is what calls that were made ahead took, of those that were asked for.
    """

    made: Counter = field(default_factory=Counter)
    failed: Counter = field(default_factory=Counter)
    groups: Counter = field(default_factory=Counter)
    first: dict = field(default_factory=dict)
    last: str | None = None
    seconds_ahead: float = 0.0

    @contextmanager
    def counting(self):
        """Count what this thread calls within."""
        before = _counting.set((*_counting.get(), self))
        try:
            yield self
        finally:
            _counting.reset(before)

    def add(self, other: "Calls") -> None:
        """Count the calls that another one counted."""
        self.made += other.made
        self.failed += other.failed
        self.groups += other.groups
        self.first = other.first | self.first
        self.last = other.last or self.last
        self.seconds_ahead += other.seconds_ahead

    def complaint(self) -> str | None:
        """Say what has failed; None if nothing has."""
        if not self.failed:
            return None
        parts = []
        for key in sorted({key for key, _ in self.failed}):
            kinds = {kind: count for (of, kind), count in self.failed.items() if of == key}
            listed = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            share = sum(kinds.values()) / self.made[key]
            parts.append(
                f"{key[0]} failed in {share:.1%} of {self.made[key]} calls so far ({listed}), "
                f"{self._told_of_groups(key)}first at {self.first[key]}."
            )
        return f"{' '.join(parts)} Such points count as impossible: the posterior is 0 there."

    def _told_of_groups(self, key):
        """Say which group failed most often, if there are groups."""
        groups = Counter({group: n for (of, group), n in self.groups.items() if of == key})
        if not groups:
            return ""
        [(group, n)] = groups.most_common(1)
        if n == groups.total():
            return f"all of them in group {group}, " if n > 1 else f"in group {group}, "
        return f"most often in group {group} ({n} of {groups.total()}), "


def count(calls: Calls) -> None:
    """Let all that are counting in this thread add these calls."""
    for one in _counting.get():
        one.add(calls)
