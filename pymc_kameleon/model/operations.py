"""Operations written in Python, and what they may return."""

from collections.abc import Callable, Iterator
from operator import is_

import numpy as np
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.basic import Apply
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.link.c.op import COp
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.type import TensorType

from pymc_kameleon._compat import with_inner_graph
from pymc_kameleon.mcmc.bridge.pytensor import TELLS_WRAPPED, is_registered, parts_of


def operations(variables) -> Iterator[Op]:
    """Operations in the graphs of `variables`, those inside of other ones among them."""
    for variable in ancestors(variables):
        if variable.owner is not None:
            op = variable.owner.op
            yield op
            if isinstance(op, HasInnerGraph):
                yield from operations(op.inner_outputs)


def is_black_box(op: Op) -> bool:
    """Whether an operation is not PyTensor's own."""
    package = type(op).__module__.split(".")[0]
    return isinstance(op, FromFunctionOp) or package not in ("pytensor", "pymc", "pymc_extras")


def is_in_numba(op: Op) -> bool:
    """Whether Numba may know how to compile an operation."""
    return not is_black_box(op) or is_registered(op)


def has_black_box(graph) -> bool:
    """Whether a graph holds an operation that is not PyTensor's own, or draws at random."""
    return any(isinstance(op, RandomVariable) or is_black_box(op) for op in operations([graph]))


def black_boxes(graphs) -> list[str]:
    """Names of the operations in `graphs` that are not PyTensor's own."""
    return sorted({operation_name(op) for op in operations(graphs) if is_black_box(op)})


def operation_name(op: Op) -> str:
    """Return the name of a user's function or operation, for messages."""
    if isinstance(op, CheckedOperation):
        return operation_name(op.op)
    if isinstance(op, FromFunctionOp):
        return str(op).removeprefix("FromFunctionOp{").removesuffix("}")
    name = getattr(op, "name", None)
    return name if isinstance(name, str) else type(op).__name__


# what is returned ---------------------------------------------------------------------------------


def converted(value, type: TensorType, name: str) -> np.ndarray:
    """Return what a user's function returned as a new array of the declared type.

    It may be a number, an array, or what NumPy makes one of; `name` is the function's. Raises a
    TypeError if it holds no numbers, or numbers that the type cannot hold, and a ValueError if it
    has another shape.
    """
    array = _numbers(value, np.dtype(type.dtype))
    if array is None:
        raise TypeError(f"{name} returned {described(value)}: {wanted(type)}.")
    if type.ndim == 0 and array.size == 1:
        array = array.reshape(())
    sizes = zip(array.shape, type.shape, strict=False)
    if array.ndim != type.ndim or any(known not in (None, size) for size, known in sizes):
        raise ValueError(f"{name} returned {described(value)}: {wanted(type)}.")
    return array


def _numbers(value, dtype):
    """Return a new array of this type; None if its numbers would be other ones, or none."""
    if value is None or np.ma.is_masked(value):
        return None
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = None if None in array.flat else array.astype(float)
        if array is None or array.dtype.kind not in "biuf":
            return None
        new = array.astype(dtype, order="C")
    except (TypeError, ValueError):
        return None
    is_same = np.can_cast(array.dtype, dtype, "same_kind") or np.array_equal(array, new)
    return new if is_same else None


def described(value) -> str:
    """Return what a user's function returned in a few words, for messages."""
    if isinstance(value, np.ndarray) and value.ndim:
        return f"an array of shape {value.shape} and type {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def wanted(type: TensorType) -> str:
    """Say what a user's function has to return."""
    number = "number" if np.dtype(type.dtype).kind == "f" else "whole number"
    if type.ndim == 0:
        return f"return one {number}, as in `return float(value)`"
    known = f" of shape {type.shape}" if None not in type.shape else ""
    return (
        f"return an array of {number}s with {type.ndim} dimension{'s'[: type.ndim - 1]}{known}, as "
        f'in `return np.asarray(values, dtype="{type.dtype}")`'
    )


class CheckedOperation(Op):
    """A user's operation whose outputs are what it declares, in new arrays.

    Compiled code takes an array for granted where PyTensor's interpreter takes what comes, and a
    number that is no array ends the process. Inputs are copies too, which it may change.
    """

    __props__ = ("op",)

    def __init__(self, op: Op):
        self.op = op
        self._parts = parts_of(op) if TELLS_WRAPPED and isinstance(op, FromFunctionOp) else None
        if hasattr(op, "infer_shape"):
            self.infer_shape = op.infer_shape

    def __str__(self):
        return f"Checked{{{operation_name(self.op)}}}"

    def __getstate__(self):
        return {"op": self._parts or self.op}

    def __setstate__(self, state):
        op = state["op"]
        self.__init__(FromFunctionOp(*op) if isinstance(op, tuple) else op)

    def make_node(self, *inputs):  # noqa: D102
        node = self.op.make_node(*inputs)
        return Apply(self, node.inputs, [output.type() for output in node.outputs])

    def perform(self, node, inputs, outputs):  # noqa: D102
        name = operation_name(self.op)
        copies = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
        for i, (returned, variable) in enumerate(
            zip(self._returned(node, copies, name), node.outputs, strict=True)
        ):
            which = f" as output {i + 1}" if len(outputs) > 1 else ""
            if isinstance(variable.type, TensorType):
                returned = converted(returned, variable.type, name + which)
            outputs[i][0] = returned

    def _returned(self, node, inputs, name):
        n = len(node.outputs)
        if self._parts is None:
            storage: list = [[None] for _ in range(n)]
            self.op.perform(node, inputs, storage)
            return [cell[0] for cell in storage]
        returned = self._parts[0](*inputs)
        is_several = isinstance(returned, list | tuple)
        if n == 1:
            # PyTensor takes a list or a tuple for one of outputs, users take it for an array.
            ndim = node.outputs[0].ndim
            is_outer = is_several and len(returned) == 1 and np.ndim(returned[0]) == ndim
            return [returned[0] if is_outer else returned]
        if not is_several or len(returned) != n:
            raise TypeError(f"{name} returned {described(returned)}: return {n} arrays, a tuple.")
        return list(returned)

    def do_constant_folding(self, fgraph, node):
        """As the operation itself says."""
        return self.op.do_constant_folding(fgraph, node)


# graphs -------------------------------------------------------------------------------------------


def with_checked_returns(outputs: list, is_run: Callable[[Op], bool]) -> list:
    """Return graphs in which a `CheckedOperation` takes the place of each user's operation.

    `is_run` says whether an operation will be run by its Python code. Gradients have to be taken
    before: a checked operation has none.
    """
    checked: dict = {}
    for node in io_toposort([], outputs):
        op = _checked(node.op, is_run)
        inputs = [checked.get(variable, variable) for variable in node.inputs]
        if op is node.op and all(map(is_, inputs, node.inputs)):
            continue
        if isinstance(op, CheckedOperation):
            new = op.make_node(*inputs)
        else:
            new = Apply(op, inputs, [output.clone() for output in node.outputs])
        for before, after in zip(node.outputs, new.outputs, strict=True):
            after.name = before.name
            checked[before] = after
    return [checked.get(variable, variable) for variable in outputs]


def _checked(op, is_run):
    if isinstance(op, HasInnerGraph):
        if not any(is_black_box(inner) for inner in operations(op.inner_outputs)):
            return op
        return with_inner_graph(op, lambda outputs: with_checked_returns(outputs, is_run))
    is_own = type(op).__module__.startswith("pymc_kameleon.")
    if is_black_box(op) and not is_own and not isinstance(op, COp) and is_run(op):
        return CheckedOperation(op)
    return op
