"""A compiled function of a model's raveled vector, callable from Python and from compiled code."""

import logging
import warnings
from collections.abc import Callable, Set
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

from pymc_kameleon._threads import all_threads
from pymc_kameleon.mcmc.numba_bridge import (
    call_for_nothing,
    caller,
    jit,
    jitable,
    machine_code_address,
)
from pymc_kameleon.model.black_box import (
    has_black_box,
    is_in_numba,
    operation_name,
    operations,
    with_checked_returns,
)
from pymc_kameleon.model.vectorised import VECTORISING

__all__ = [
    "ENDLESS",
    "IN_PYTHON",
    "ModelFunction",
    "SharedValues",
]

_log = logging.getLogger("pymc.kameleon")

ENDLESS = "local_zero_div"
"""Rewrite of PyTensor 2 that undoes itself without end on second derivatives of some densities."""

IN_PYTHON = Mode(linker="py", optimizer="fast_compile").excluding(ENDLESS)
"""For what is evaluated once: compiling would take longer."""

CHECKED = Mode(linker="py", optimizer=None)
"""NumPy checks every shape and every index; for one evaluation, compiling takes longer."""

MADE_ANEW = (
    "_address",
    "_arrays",
    "_buffers",
    "_caller",
    "_checking",
    "_compilable",
    "_containers",
    "_function",
    "_jitted",
    "_machine_code",
    "_table",
)
"""Attributes of a `ModelFunction` that do not go with it to another process."""


class ModelFunction:
    """Values of some outputs of a model at a raveled vector, one after the other in one array.

    Or in an array each, `apart`, without copies of large ones; for plain Python.

    Parameters
    ----------
    model : pymc.Model
    outputs : list of variables
        Scalars and vectors of the vector `point` and shared variables.
    point : variable
        The raveled vector, of length d.
    dim : int
        d.
    compile_kwargs : dict or None
        Passed to `model.compile_fn`. None compiles with PyTensor's Numba linker, and falls back to
        the default linker where the outputs hold an operation that Numba does not know.
    apart : bool
        Whether outputs are not joined.

    Attributes
    ----------
    has_black_box : bool
        As the function of this name says of the outputs.
    """

    _arrays: list | None
    _caller: Callable | None
    _checking: Callable | None
    _table: np.ndarray | None

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
        return {k: v for k, v in self.__dict__.items() if k not in MADE_ANEW}

    def __setstate__(self, state):
        self.__dict__.update(state)
        # Compiled as at first: a function that PyTensor unpickles rounds otherwise.
        self._set_up(logging.DEBUG)

    def _set_up(self, level):
        """Compile, and log at this level why the result may be slow."""
        self.__dict__.update(dict.fromkeys(MADE_ANEW))
        self._function = self._compile(self._outputs, level)
        self._containers = self.containers()
        # The same without what PyTensor does around it, which takes longer than a likelihood; but
        # it is PyTensor that updates shared variables.
        has_updates = len(self._function.maker.fgraph.outputs) > len(self._outputs)
        self._machine_code = None if has_updates else self._jit_function()
        self._compilable = not self._apart and self._jit_function() is not None

    def values(self, x: np.ndarray, size: int) -> np.ndarray:
        """Return the outputs at `x` (d,), an array (size,), in plain Python.

        Raises
        ------
        ValueError
            If `x` or the outputs have another length.
        """
        return self.arrays(x, [size])[0]

    def arrays(self, x: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Return the outputs at `x` (d,), arrays of these lengths; one if they are joined.

        Raises
        ------
        ValueError
            As for `values`.
        """
        if x.size != self._dim:
            raise ValueError(f"{x.size} numbers where the model's function takes {self._dim}.")
        x = x.astype(self._point.dtype, copy=False)
        outputs = self._call(x)
        for output, size in zip(outputs, sizes, strict=True):
            if output.size != size:
                raise ValueError(
                    f"{output.size} numbers came from the model's function where {size} go."
                )
        return outputs

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the outputs at `x` (d,) into `value`, in plain Python.

        Raises
        ------
        ValueError
            If `x` or `value` has another length than the function takes or returns.
        """
        value[:] = self.values(x, value.size)

    def into_compiled(self, x: np.ndarray, value: np.ndarray) -> None:
        """`into` for a `value` in float64 and C order, faster once `compiled` has been called.

        Raises
        ------
        ValueError, RuntimeError
            As for `into`, or where compiled code finds it.
        """
        if self._caller is None:
            self.into(x, value)
        else:
            _write(self.compiled(), np.ascontiguousarray(x, dtype=float), value)

    def check_data(self, x: np.ndarray, name: str) -> bool:
        """Evaluate the outputs at `x` (d,) with shapes and indices checked, for data that are new.

        PyTensor's compiled code checks shapes, but no arrays of indices. A function that holds a
        black box is not called, which may be expensive: its indices are checked at every call.

        Parameters
        ----------
        x : array, shape (d,)
        name : str
            What messages call the outputs.

        Returns
        -------
        bool
            False if that could not be found out at this point.

        Raises
        ------
        ValueError
            If shapes or indices do not fit each other.
        """
        if self.has_black_box:
            return True
        checking = self._checking
        if checking is None:
            checking = self._function
            if any(map(_indexes_by_shared_values, self._outputs)):
                checking = self._compile_fn(self._outputs, mode=CHECKED)
            self._checking = checking
        try:
            checking(x.astype(self._point.dtype))
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

    def shared(self) -> list:
        """Shared variables that the outputs depend on, in the order of `containers`."""
        return self._function.get_shared()

    def containers(self) -> list:
        """Where the values of the shared variables are."""
        return self._function.input_storage[1:]

    @property
    def is_compilable(self) -> bool:
        """Whether compiled code may call the function, as far as is known yet."""
        return self._compilable

    def plain(self) -> tuple[Callable[[np.ndarray, np.ndarray], None]]:
        """Return what `numba_bridge.evaluate` takes in plain Python."""
        return (self.into,)

    def compiled(self) -> np.ndarray | None:
        """Return what `numba_bridge.evaluate` takes in compiled code; None if there is none.

        Returns
        -------
        int64 array
            The address of a function's machine code, then data pointer and shape of every shared
            array. Valid until a shared variable gets another array.
        """
        if not self._compilable:
            return None
        if self._caller is None and not self._compile_caller():
            return None
        arrays = [container.storage[0] for container in self._containers]
        if self._table is None or any(map(is_not, arrays, self._arrays or ())):
            # Both are kept: one to notice a new array, the other because it is what is read.
            self._arrays = arrays
            self._buffers = [np.require(array, requirements=["C", "A"]) for array in arrays]
            table = [self._address]
            for array in self._buffers:
                table += [array.ctypes.data, *array.shape]
            self._table = np.array(table, dtype=np.intp)
        return self._table

    def _call(self, x):
        if self._machine_code is not None:
            return self._machine_code(x, *(c.storage[0] for c in self._containers))
        if self.has_black_box:
            with all_threads():
                outputs = self._function(x)
        else:
            outputs = self._function(x)
        return outputs if isinstance(outputs, list) else [outputs]

    def _jit_function(self):
        return getattr(getattr(self._function, "vm", None), "jit_fn", None)

    def _compile(self, outputs, level):
        function = None
        if self._compile_kwargs is None:
            function = self._compile_numba(outputs, level)
        if function is None:
            kwargs = self._compile_kwargs
            if kwargs is None:
                kwargs = {"mode": "cvm"} if pytensor.config.cxx else {}
            function = self._compile_fn(outputs, **kwargs)
        function.trust_input = True
        return function

    def _compile_fn(self, outputs, **kwargs):
        """Compile a function of the point, even one that does not depend on it (a flat prior)."""
        is_numba = isinstance(get_mode(kwargs.get("mode")).linker, NumbaLinker)
        outputs = with_checked_returns(outputs, lambda op: not (is_numba and is_in_numba(op)))
        return self._model.compile_fn(
            outputs[0] if len(outputs) == 1 else outputs,
            inputs=[self._point],
            point_fn=False,
            **{"on_unused_input": "ignore"} | kwargs,
        )

    def _compile_numba(self, outputs, level):
        """Compile with the Numba linker, or return None after logging why it cannot be done."""
        foreign = sorted({operation_name(op) for op in operations(outputs) if not is_in_numba(op)})
        if foreign:
            _log.log(
                level,
                "The log density holds %s, which Numba cannot compile: transitions run in Python.",
                ", ".join(foreign),
            )
            return None
        # Rounding that the compiler may choose is another one when the function comes from
        # PyTensor's cache: one seed would give two chains.
        exact = pytensor.config.change_flags(numba__fastmath=False)
        with exact, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                function = self._compile_fn(outputs, mode=VECTORISING)
                function(np.zeros(self._dim, dtype=self._point.dtype))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            else:
                objects = [str(w.message) for w in caught if "object mode" in str(w.message)]
                if not objects:
                    return function
                reason = objects[0].splitlines()[0]
        _log.log(
            level,
            "Numba cannot compile the log density (%s): each transition runs in Python.",
            reason,
        )
        return None

    def _compile_caller(self) -> bool:
        arrays = [c.storage[0] for c in self.containers()]
        if not all(isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays):
            _log.info(
                "A shared input of the model is no plain array: each transition runs in Python."
            )
            self._compilable = False
            return False
        self._jitted = self._jit_function()
        given = [np.dtype(self._point.dtype), *(a.dtype for a in arrays)]
        dimensions = [1, *(a.ndim for a in arrays)]
        types = [
            numba.types.Array(numba.from_dtype(t), n, "C")
            for t, n in zip(given, dimensions, strict=True)
        ]
        self._caller = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(
            _model_function(caller(self._jitted, types), self._dim, given[0])
        )
        vector, table = numba.types.float64[::1], numba.types.intp[::1]
        self._address = machine_code_address(self._caller, (vector, vector, table))
        return True


class SharedValues:
    """Notices when the values of shared variables change.

    Parameters
    ----------
    function : ModelFunction
    moving : set of shared variables
        Those that another step moves: small, set at every draw, and compared by value. The others
        are data, which may be large and are replaced as a whole.
    ignored : set of shared variables
        Those that may change unnoticed.
    """

    def __init__(self, function: ModelFunction, moving: set, ignored: Set = frozenset()):
        self._function, self._moving, self._ignored = function, moving, ignored
        self._forget()

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k not in ("_seen", "_moves", "_watched")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()

    def _forget(self):
        self._seen = self._moves = self._watched = None
        self.are_data_new = True

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
    return (
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.dtype == b.dtype
        and np.array_equal(a, b)
    )


@jit
def _write(table, x, value):
    call_for_nothing(table[0], (x, value, table))


def _model_function(call, dim: int, dtype: np.dtype):
    """Return a function that writes what `call` returns for the vector `x`, cast, into `value`."""
    as_input = _as_it_is if dtype == np.float64 else _cast_to(dtype.type)

    def model_function(x, value, table):
        if x.size != dim:
            raise RuntimeError("the position has another size than the model")
        outputs = call(as_input(x), table)[0]
        if value.size != outputs.size:
            raise RuntimeError("the log density has another size")
        for i in range(value.size):
            value[i] = outputs[i]

    return model_function


@jitable(allocates=True)
def _as_it_is(x):
    return x


def _cast_to(scalar_type):
    @jitable(allocates=True)
    def cast(x):
        return x.astype(scalar_type)

    return cast


def _indexes_by_shared_values(graph) -> bool:
    """Whether an array of indices, or a mask, in a graph depends on a shared variable."""

    def is_index(variable):
        return isinstance(variable.type, TensorType) and np.dtype(variable.dtype).kind in "biu"

    for variable in ancestors([graph]):
        if variable.owner is not None and type(variable.owner.op).__name__.startswith("Advanced"):
            indices = [v for v in variable.owner.inputs if is_index(v)]
            if any(isinstance(v, SharedVariable) for v in ancestors(indices)):
                return True
    return False
