"""Functions of libraries whose threads a forked process does not have, and waits for for ever."""

import functools
import logging
import multiprocessing
import multiprocessing.context
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from numba.extending import is_jitted
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.op import Op

from pymc_kameleon.mcmc.bridge.pytensor import TELLS_WRAPPED, parts_of
from pymc_kameleon.model.guarded_call import GuardedCall
from pymc_kameleon.model.operations import is_black_box, operation_name, operations

_log = logging.getLogger("pymc.kameleon")


def _jax_runs(_):
    return sys.modules["jax._src.xla_bridge"].backends_are_initialized()


def _torch_runs(torch):
    return torch.get_num_threads() > 1 or torch.cuda.is_initialized()


def _tensorflow_runs(_):
    context = sys.modules["tensorflow.python.eager.context"]
    return context.context_safe() is not None and context.context_safe()._initialized


LIBRARIES: dict[str, tuple[str, Callable[[ModuleType], bool]]] = {
    "jax": ("JAX", _jax_runs),
    "torch": ("PyTorch", _torch_runs),
    "tensorflow": ("TensorFlow", _tensorflow_runs),
    "jpype": ("JPype", lambda jpype: jpype.isJVMStarted()),
    "juliacall": ("juliacall", lambda _: True),
}
"""By module: what it is called, and whether the module has begun its threads."""

PARTS = {"jaxlib": "jax"}
"""Packages of which the objects of a library are."""

MOST_READ = 10_000
"""Objects that are looked at to find the libraries of a function."""

_warned: list[str] = []
"""In a process that was warned: the function that was named."""


def running_libraries() -> set[str]:
    """Modules of `LIBRARIES` whose threads this process, or the one that it was copied of, runs."""
    return {name for name in LIBRARIES if name in sys.modules and _runs(name)}


def _runs(name):
    try:
        return bool(LIBRARIES[name][1](sys.modules[name]))
    except (AttributeError, KeyError):  # another version: what it calls so is not known
        return True


def runs_in_forks(outputs: Iterable) -> bool:
    """Whether the Python functions in these graphs may be called by a forked process."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    called = [op for op in operations(outputs) if is_black_box(op) and _called_here(op) is not None]
    return not (called and running_libraries())


def refuse_in_fork(outputs: Iterable) -> None:
    """Raise an error if this is a forked chain, and a function in these graphs waits for ever."""
    if isinstance(multiprocessing.current_process(), multiprocessing.context.ForkProcess):
        for op in operations(outputs):
            function = _called_here(op) if is_black_box(op) else None
            if function is not None:
                refuse_lost_threads(function, operation_name(op))


def refuse_lost_threads(function: Any, name: str) -> None:
    """Raise an error if a function of this forked process waits for threads that it has not.

    Where it is not seen to use the library that has them, there is a warning.
    """
    running = running_libraries()
    used = running & libraries_of(function)
    shown = " and ".join(LIBRARIES[module][0] for module in sorted(used or running))
    advice = (
        'Write pm.sample(mp_ctx="forkserver"), or pm.sample(cores=1), or '
        "black_box(timeout=...), which calls the function in a process that is not forked."
    )
    if used:
        raise RuntimeError(
            f"{name} uses {shown}, whose threads a forked process does not have: there it waits "
            f"for ever. {advice}"
        )
    if running and multiprocessing.current_process().name == "worker_chain_0" and not _warned:
        _warned.append(name)
        _log.warning(
            "%s has begun threads, which forked processes do not have. If %s uses it, its chains "
            "wait for ever. %s",
            shown,
            name,
            advice,
        )


def _called_here(op: Op):
    """Return the function of an operation, if it is called in the process of the chain."""
    op = getattr(op, "op", op)  # what checks it, or keeps its values
    op = getattr(op, "op", op)
    box = getattr(op, "black_box", None)
    if box is not None:
        return box.function if isinstance(box._call, GuardedCall) else None
    if isinstance(op, FromFunctionOp) and TELLS_WRAPPED:
        return parts_of(op)[0]
    return op


def libraries_of(function: Any) -> set[str]:
    """Modules of `LIBRARIES` that a function names, or one that it calls, or that are its data.

    It is read, not called: what it finds by other ways, such as a name in a string, is not seen,
    nor what is behind the first `MOST_READ` objects.
    """
    found: set[str] = set()
    seen: dict[int, Any] = {}
    left = [function]
    while left and len(seen) < MOST_READ:
        thing = left.pop()
        if id(thing) not in seen:
            seen[id(thing)] = thing
            left += _parts(thing, found)
    return found


def _parts(thing, found) -> list:
    """Note the library of an object, and return what it refers to."""
    if isinstance(thing, ModuleType):
        _note(thing.__name__, found)
        # A module of another library, as those that are built on JAX.
        for value in list(vars(thing).values()):
            if isinstance(value, ModuleType):
                _note(value.__name__, found)
        return []
    for cls in type(thing).__mro__:
        _note(cls.__module__, found)
    if is_jitted(thing):  # what Numba compiles calls no library
        return []
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, FunctionType):
        return _parts_of_function(thing, found)
    if isinstance(thing, list | tuple):
        return list(thing[:MOST_READ])
    if type(thing).__module__ == "builtins":
        return []
    attributes = getattr(thing, "__dict__", None)
    parts = list(attributes.values()) if isinstance(attributes, dict) else []
    if _is_of_user(type(thing).__module__):
        methods = vars(type(thing)).values()
        parts += [part for part in methods if isinstance(part, FunctionType)]
    return parts


def _parts_of_function(function, found):
    """Return what a function refers to: defaults, what it encloses, and globals, by their names."""
    _note(function.__module__ or "", found)
    if not _is_of_user(function.__module__):
        return [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    names = _names(function.__code__)
    for name in names & LIBRARIES.keys():  # imported within
        if name not in function.__globals__:
            found.add(name)
    cells = [_content(cell) for cell in function.__closure__ or ()]
    globals_ = [function.__globals__[name] for name in names if name in function.__globals__]
    # What it calls of a module of the user's.
    modules = [one for one in globals_ if isinstance(one, ModuleType) and _is_of_user(one.__name__)]
    called = [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return [*(function.__defaults__ or ()), *cells, *globals_, *called, *vars(function).values()]


def _names(code):
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_of_user(module):
    """Whether a module is none of the standard library, nor installed."""
    name = (module or "").split(".")[0]
    if name in sys.stdlib_module_names and name != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(file.split(os.sep))


def _note(module, found):
    name = module.split(".")[0]
    name = PARTS.get(name, name)
    if name in LIBRARIES:
        found.add(name)
