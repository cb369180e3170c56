"""A compiled function of a model's raveled vector, callable from Python and from compiled code."""

import functools
import logging
import warnings
from collections.abc import Callable, Set
from contextlib import nullcontext
from operator import is_not
from typing import Any

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import ParameterValueError
from pytensor.compile.mode import Mode, get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.type import TensorType
from scipy.linalg import LinAlgError

from pymc_kameleon._compat import PUTS_BY_ARRAYS, TAKES_BY_ARRAYS
from pymc_kameleon._threads import all_threads
from pymc_kameleon.mcmc.bridge.address import (
    BY_ADDRESS,
    call_for_nothing,
    machine_code,
    machine_code_address,
    with_tabled_arrays,
)
from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.bridge.pytensor import jitted_by_pytensor
from pymc_kameleon.model.operations import (
    has_black_box,
    is_in_numba,
    operation_name,
    operations,
    with_checked_returns,
)

_log = logging.getLogger("pymc.kameleon")

ENDLESS = "local_zero_div"
"""Rewrite of PyTensor 2 that undoes itself without end on second derivatives of some densities."""

IN_PYTHON = Mode(linker="py", optimizer="fast_compile").excluding(ENDLESS)
"""For what is evaluated once: compiling would take longer."""

CHECKED = Mode(linker="py", optimizer=None)
"""NumPy checks every shape and every index; for one evaluation, compiling takes longer."""

KEPT = ("_apart", "_compile_kwargs", "_dim", "_model", "_outputs", "_point", "has_black_box")
"""Attributes of a `ModelFunction` that go with it to another process; the others are made anew."""


class ModelFunction:
    """Values of some outputs of a model at a raveled vector, one after the other in one array.

    Or in an array each, `apart`, without copies of large ones; for plain Python. The outputs are
    scalars and vectors of the variable `point` (d,) and of shared variables. Without
    `compile_kwargs` for `model.compile_fn` they are compiled with PyTensor's Numba linker, or with
    its default linker where they hold an operation that Numba does not know. `has_black_box` is
    what the function of this name says of the outputs, and `is_compilable` whether compiled code
    may call the function, as far as is known yet.
    """

    _arrays: list | None
    _checking: Callable | None
    _table: np.ndarray | None
    _writer: int | None

    def __init__(
        self, model, outputs, point, dim: int, compile_kwargs: dict[str, Any] | None, apart=False
    ):
        self._model, self._point, self._dim = model, point, dim
        self._compile_kwargs, self._apart = compile_kwargs, apart
        outputs = [pt.atleast_1d(pt.as_tensor(o).astype("float64")) for o in outputs]
        self._outputs = outputs if apart else [pt.concatenate(outputs)]
        self.has_black_box = any(map(has_black_box, self._outputs))
        self._set_up(logging.INFO)

    def __getstate__(self):
        return {name: getattr(self, name) for name in KEPT}

    def __setstate__(self, state):
        self.__dict__.update(state)
        # Compiled as at first: a function that PyTensor unpickles rounds otherwise.
        self._set_up(logging.DEBUG)

    def _set_up(self, level):
        """Compile, and log at this level why the result may be slow."""
        self._function = self._compile(level)
        self._arrays = self._checking = self._table = self._writer = None
        self._jitted = jitted_by_pytensor(self._function)
        self.is_compilable = BY_ADDRESS and not self._apart and self._jitted is not None
        # The same without what PyTensor does around it, which takes longer than a likelihood; but
        # it is PyTensor that updates shared variables.
        has_updates = len(self._function.maker.fgraph.outputs) > len(self._outputs)
        self._plain = None if has_updates else self._jitted

    @property
    def dim(self) -> int:
        """Length of the vector."""
        return self._dim

    def arrays(self, x: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Return the outputs at `x` (d,), arrays of these lengths; one if they are joined.

        Raises a ValueError if `x` or an output has another length.
        """
        if x.size != self._dim:
            raise ValueError(f"{x.size} numbers where the model's function takes {self._dim}.")
        outputs = self._call(x.astype(self._point.dtype, copy=False))
        for output, size in zip(outputs, sizes, strict=True):
            if output.size != size:
                raise ValueError(
                    f"{output.size} numbers came from the model's function where {size} go."
                )
        return outputs

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the outputs at `x` (d,) into `value`, in plain Python; as `arrays` otherwise."""
        value[:] = self.arrays(x, [value.size])[0]

    def into_compiled(self, x: np.ndarray, value: np.ndarray) -> None:
        """`into` for a `value` in float64 and C order, faster once `compiled` has been called."""
        if self._writer is None:
            self.into(x, value)
        else:
            _write(self.compiled(), np.ascontiguousarray(x, dtype=float), value)

    def check_data(self, x: np.ndarray, name: str) -> bool:
        """Evaluate the outputs at `x` (d,) with shapes and indices checked, for data that are new.

        PyTensor's compiled code checks shapes, but no arrays of indices. A function that holds a
        black box is not called, which may be expensive: its indices are checked at every call.
        Returns False if nothing could be found out at this point. Raises a ValueError, which calls
        the outputs `name`, if shapes or indices do not fit each other.
        """
        if self.has_black_box:
            return True
        if self._checking is None:
            unchecked = any(map(_indexes_by_shared_values, self._outputs))
            self._checking = self._compile_fn(mode=CHECKED) if unchecked else self._function
        try:
            self._checking(x.astype(self._point.dtype))
        except (LinAlgError, ParameterValueError):
            return False
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            # Numba raises RuntimeError where it fails to build the message of another error.
            values = [f"{v.name} of shape {v.get_value(borrow=True).shape}" for v in self.shared()]
            raise ValueError(
                f"{name} cannot be computed with the present {', '.join(values)}: "
                f"{str(error).splitlines()[0]}. Shapes and indices have to fit each other and the "
                "variables: see pm.set_data."
            ) from error
        return True

    @property
    def outputs(self) -> list:
        """Graphs of what it returns."""
        return self._outputs

    def shared(self) -> list:
        """Shared variables that the outputs depend on, in the order of `containers`."""
        return self._function.get_shared()

    def containers(self) -> list:
        """Where the values of the shared variables are."""
        return self._function.input_storage[1:]

    def plain(self) -> tuple[Callable[[np.ndarray, np.ndarray], None]]:
        """Return what `mcmc.chain.evaluate` takes in plain Python."""
        return (self.into,)

    def compiled(self) -> np.ndarray | None:
        """Return what `mcmc.chain.evaluate` takes in compiled code; None if there is none.

        An int64 array of addresses and lengths, as `_writer` takes them. It is valid until a shared
        variable gets another array.
        """
        if not self.is_compilable:
            return None
        arrays = [container.storage[0] for container in self.containers()]
        if self._arrays is None or any(map(is_not, arrays, self._arrays)):
            if self._writer is None and not self._compile_writer(arrays):
                return None
            # Both are kept: one to notice a new array, the other because it is what is read.
            self._arrays = arrays
            self._buffers = [np.require(array, requirements=["C", "A"]) for array in arrays]
            table = [self._writer, self._dim, self._address]
            for array in self._buffers:
                table += [array.ctypes.data, *array.shape]
            self._table = np.array(table, dtype=np.intp)
        return self._table

    def _compile_writer(self, arrays) -> bool:
        if not all(isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays):
            _log.info(
                "A shared input of the model is no plain array: each transition runs in Python."
            )
            self.is_compilable = False
            return False
        given = [(self._point.dtype, 1), *((array.dtype, array.ndim) for array in arrays)]
        kinds = [numba.types.Array(numba.from_dtype(np.dtype(t)), n, "C") for t, n in given]
        self._address, result = machine_code(self._jitted, kinds)
        self._writer = machine_code_address(_writer(result, *kinds), WRITTEN)
        return True

    def _call(self, x):
        if self._plain is not None:
            return self._plain(x, *(container.storage[0] for container in self.containers()))
        with all_threads() if self.has_black_box else nullcontext():
            outputs = self._function(x)
        return outputs if isinstance(outputs, list) else [outputs]

    def _compile(self, level):
        function, kwargs = None, self._compile_kwargs
        if kwargs is None:
            function = self._compile_numba(level)
            kwargs = {"mode": "cvm"} if pytensor.config.cxx else {}
        if function is None:
            function = self._compile_fn(**kwargs)
        function.trust_input = True
        return function

    def _compile_fn(self, **kwargs):
        """Compile a function of the point, even one that does not depend on it (a flat prior)."""
        is_numba = isinstance(get_mode(kwargs.get("mode")).linker, NumbaLinker)
        outputs = with_checked_returns(self._outputs, lambda op: not (is_numba and is_in_numba(op)))
        return self._model.compile_fn(
            outputs[0] if len(outputs) == 1 else outputs,
            inputs=[self._point],
            point_fn=False,
            **{"on_unused_input": "ignore"} | kwargs,
        )

    def _compile_for_numba(self, function):
        """Have Numba compile what PyTensor made; what may be expensive is not called for it."""
        x, jitted = np.zeros(self._dim, dtype=self._point.dtype), jitted_by_pytensor(function)
        if self.has_black_box and jitted is not None:
            values = [container.storage[0] for container in function.input_storage[1:]]
            jitted.compile(tuple(map(numba.typeof, [x, *values])))
        else:
            function(x)

    def _compile_numba(self, level):
        """Compile with the Numba linker, or return None after logging why it cannot be done."""
        foreign = {operation_name(o) for o in operations(self._outputs) if not is_in_numba(o)}
        if foreign:
            _log.log(
                level,
                "The log density holds %s, which runs in Python, and so do transitions. To compile "
                "them, give black_box a function of @numba.njit, and none of its options failures, "
                "timeout, store, cores, vectorized and each.",
                ", ".join(sorted(foreign)),
            )
            return None
        # Rounding that the compiler may choose is another one when the function comes from
        # PyTensor's cache: one seed would give two chains.
        exact = pytensor.config.change_flags(numba__fastmath=False)
        with exact, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                function = self._compile_fn(mode="NUMBA")
                self._compile_for_numba(function)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            else:
                objects = [str(w.message) for w in caught if "object mode" in str(w.message)]
                if jitted_by_pytensor(function) is None:
                    objects.append("this version of PyTensor has no vm.jit_fn")
                if not objects:
                    return function
                reason = objects[0].splitlines()[0]
        _log.log(
            level,
            "Numba cannot compile the log density (%s): each transition runs in Python.",
            reason,
        )
        return None


WRITTEN = numba.types.float64[::1], numba.types.float64[::1], numba.types.intp[::1]
"""Types of position, values and table."""


@jit
def _write(table, x, value):
    call_for_nothing(table[0], (x, value, table))


@functools.cache
def _writer(result, vector, *kinds):
    """Jitted function that writes what a model's function returns; the same for many models.

    The table it takes holds its own address, the length of the vector, then what
    `with_tabled_arrays` takes: the address of the model's function, and the shared arrays.
    """
    call = with_tabled_arrays(result, vector, kinds)
    is_cast, scalar_type = vector.dtype != numba.types.float64, vector.dtype

    def write(x, value, table):
        if x.size != table[1]:
            raise RuntimeError("the position has another size than the model")
        outputs = call(x.astype(scalar_type) if is_cast else x, table, 2)[0]
        if value.size != outputs.size:
            raise RuntimeError("the log density has another size")
        for i in range(value.size):
            value[i] = outputs[i]

    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(write)


class SharedValues:
    """Notices when the values of a `ModelFunction`'s shared variables change.

    `moving` are those that another step moves: small, set at every draw, and compared by value. The
    others are data, which may be large and are replaced as a whole. `ignored` ones may change
    unnoticed.
    """

    _seen: list | None
    _moves: list[bool]
    _watched: list[int]

    def __init__(self, function: ModelFunction, moving: Set, ignored: Set = frozenset()):
        self._function, self._moving, self._ignored = function, moving, ignored
        self._seen = None
        self.are_data_new = True

    def __reduce__(self):
        return SharedValues, (self._function, self._moving, self._ignored)

    @property
    def were_seen(self) -> bool:
        """Whether `changed` was called before."""
        return self._seen is not None

    def changed(self) -> bool:
        """Whether a value changed since the last call; True at the first one.

        Where data, or the shape of what moves, may have changed, `are_data_new` is True until
        whoever has checked them sets it to False.
        """
        values = [container.storage[0] for container in self._function.containers()]
        if self._seen is None:
            shared = self._function.shared()
            self._seen = [(None, None)] * len(values)
            self._moves = [variable in self._moving for variable in shared]
            self._watched = [i for i, v in enumerate(shared) if v not in self._ignored]
        changed = False
        for i in self._watched:
            value, (last, copy) = values[i], self._seen[i]
            if value is last:
                continue
            if not (self._moves[i] and _same(value, copy)):
                changed = True
            if not (self._moves[i] and np.shape(value) == np.shape(copy)):
                self.are_data_new = True
            self._seen[i] = (value, np.array(value) if self._moves[i] else None)
        return changed


def _same(a, b) -> bool:
    are_arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return are_arrays and a.dtype == b.dtype and np.array_equal(a, b)


def _indexes_by_shared_values(graph) -> bool:
    """Whether an array of indices, or a mask, in a graph depends on a shared variable."""

    def is_index(variable):
        return isinstance(variable.type, TensorType) and np.dtype(variable.dtype).kind in "biu"

    for variable in ancestors([graph]):
        node = variable.owner
        if node is not None and isinstance(node.op, (*TAKES_BY_ARRAYS, *PUTS_BY_ARRAYS)):
            indices = [v for v in node.inputs if is_index(v)]
            if any(isinstance(v, SharedVariable) for v in ancestors(indices)):
                return True
    return False
