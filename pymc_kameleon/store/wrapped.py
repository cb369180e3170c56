"""Functions and PyTensor operations that look for their value in a store before they are called."""

import functools
import os
import uuid
from collections.abc import Callable

import numpy as np
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from pymc_kameleon.model.black_box import CheckedOperation, parts_of

__all__ = ["StoredFunction", "StoredOp", "stored_function"]


def stored_function(store, function, name: str | None):
    """Return `function` with its values kept in `store`; see `EvaluationStore.wrap`."""
    if not callable(function):
        raise TypeError(
            f"function={function!r}: pass a callable that returns one number, or a PyTensor Op."
        )
    values = _Values(store, _name(function) if name is None else name)
    if isinstance(function, Op):
        return StoredOp(function, values)
    return StoredFunction(function, values)


def _name(function) -> str:
    named = parts_of(function)[0] if isinstance(function, FromFunctionOp) else function
    if isinstance(named, Op) or not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}.{named.__qualname__}"


class _Values:
    """Values of one function in a store."""

    def __init__(self, store, name: str):
        self.store, self.name = store, name
        self.model = store.model_number({"function": name})
        self._chain: str | None = None
        self._process: int | None = None

    def __getstate__(self):
        return self.__dict__ | {"_chain": None, "_process": None}

    def at(self, arguments, evaluate: Callable[[], float]) -> float:
        """Return the value that is stored for `arguments`, or else that of `evaluate`, stored."""
        point = np.concatenate([np.ravel(argument) for argument in arguments])
        known = self.store.find(self.model, point)
        if known is not None:
            return known
        if self._process != os.getpid():
            self._chain, self._process = uuid.uuid4().hex, os.getpid()
        return self.store.timed(self.model, self._chain, point, evaluate)


class StoredFunction:
    """What `EvaluationStore.wrap` returns of a function.

    Parameters
    ----------
    function : callable
    values : _Values
    """

    def __init__(self, function: Callable[..., float], values: _Values):
        functools.update_wrapper(self, function)
        self._function, self._values = function, values

    def __call__(self, *arguments) -> float:
        """Return the value at `arguments`, and call the function where it is not known."""
        return self._values.at(arguments, lambda: float(self._function(*arguments)))


class StoredOp(Op):
    """What `EvaluationStore.wrap` returns of an operation with one scalar output.

    Parameters
    ----------
    op : pytensor Op
    values : _Values
    """

    def __init__(self, op: Op, values: _Values):
        self._checked, self._values = CheckedOperation(op), values

    @property
    def op(self) -> Op:
        """The operation itself."""
        return self._checked.op

    def __str__(self):
        return f"Stored{{{self._values.name}}}"

    def make_node(self, *inputs):  # noqa: D102
        node = self.op.make_node(*inputs)
        if [output.type.ndim for output in node.outputs] != [0]:
            raise ValueError(
                f"{self.op} has outputs {[str(output.type) for output in node.outputs]}: wrap an "
                "operation with one scalar output, the log-likelihood."
            )
        return Apply(self, node.inputs, [output.type() for output in node.outputs])

    def perform(self, node, inputs, outputs):  # noqa: D102
        def evaluate():
            self._checked.perform(node, inputs, outputs)
            return float(outputs[0][0])

        value = self._values.at(inputs, evaluate)
        outputs[0][0] = np.asarray(value, dtype=node.outputs[0].dtype)

    def pullback(self, inputs, outputs, cotangents):
        """Gradient of the operation, where it has one."""
        derive = getattr(self.op, "pullback", self.op.L_op)
        return derive(inputs, outputs, cotangents)

    # The name that PyTensor 2 calls.
    L_op = pullback
