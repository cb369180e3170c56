"""What PyTensor compiled with Numba, and what it knows of users' operations."""

import pkgutil

from pytensor.compile.ops import FromFunctionOp

from pymc_kameleon.mcmc.bridge.undocumented import has_names

REGISTRIES = [
    f"pytensor.link.numba.dispatch.basic.numba_funcify{what}"
    for what in ("", "_and_cache_key", "_default_op_cache_key")
]

# Missing: to ask whether Numba can compile an operation that is not PyTensor's own.
HAS_REGISTRIES = has_names(" ".join(REGISTRIES), "users' operations are not compiled with Numba")

# Missing: the function that an operation of `wrap_py` calls, and a way to pickle one.
TELLS_WRAPPED = has_names(
    "wrapped._FromFunctionOp__fn wrapped._FromFunctionOp__infer_shape",
    "what functions of wrap_py return is not converted, and they are pickled by their names",
)


def jitted_by_pytensor(function):
    """Return the jitted function in one that PyTensor compiled with Numba; None if there is none.

    Missing: to call from compiled code what PyTensor compiled. Transitions then run in Python.
    """
    return getattr(getattr(function, "vm", None), "jit_fn", None)


def is_registered(op) -> bool:
    """Whether someone has registered how Numba compiles an operation like this one."""
    registries = map(pkgutil.resolve_name, REGISTRIES) if HAS_REGISTRIES else ()
    return any(r.dispatch(type(op)) is not r.dispatch(object) for r in registries)


def parts_of(op: FromFunctionOp) -> tuple:
    """Return the arguments that make an operation of `wrap_py` anew, its function first.

    PyTensor pickles such an operation by the name of its function, under which another object may
    be, or which other processes do not have.
    """
    if not TELLS_WRAPPED:
        raise TypeError(
            f"This version of PyTensor does not tell which function {op} calls: take a class of "
            "pytensor.graph.Op with a method `perform` in place of wrap_py."
        )
    private = "_FromFunctionOp__"
    function, infer_shape = (getattr(op, private + name) for name in ("fn", "infer_shape"))
    return function, op.itypes, op.otypes, infer_shape
