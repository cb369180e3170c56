"""A model and its step as bytes for the workers, and what to say of those that cannot be sent."""

import importlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import pymc as pm
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.traversal import ancestors

from pymc_kameleon._compat import complete_step, steps_of
from pymc_kameleon.mcmc.bridge.pytensor import parts_of
from pymc_kameleon.model.operations import operations


class Parcel(NamedTuple):
    """What is the same for all chains and rounds: a model, and the arguments of `sample`.

    `takes_store` says whether the step is made with `store=`; `initvals` has a start a chain.
    """

    model: pm.Model
    make_step: Callable
    takes_store: bool
    var_names: list[str] | None
    compile_kwargs: dict | None
    step_kwargs: dict
    initvals: list


def made_step(parcel: Parcel, store=None):
    """Make the step of a parcel, with those that PyMC chooses for the variables it leaves."""
    with parcel.model as model:
        step = parcel.make_step(store=store) if parcel.takes_store else parcel.make_step()
        return complete_step(model, step, parcel.compile_kwargs, parcel.step_kwargs)


def stored_densities(step) -> list:
    """Return what a step, or those that it is made of, evaluates through a store."""
    found = [getattr(part, "stored", None) for part in steps_of(step)]
    return [stored for stored in found if stored is not None]


# there and back -----------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """Sends operations of `wrap_py` with their functions.

    PyTensor looks for them in modules, and workers have no module of a script or a notebook.
    """

    def reducer_override(self, obj):
        if type(obj) is FromFunctionOp:
            return FromFunctionOp, parts_of(obj)
        return super().reducer_override(obj)


def _dumps(value) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def packed(parcel: Parcel) -> bytes:
    """Pickle a parcel, with what is registered for the operations of its model."""
    try:
        return _dumps((parcel, _registrations(parcel.model)))
    except Exception as error:
        raise TypeError(
            f"{_culprit(parcel)} cannot be sent to the workers: {error}. Make what it holds (a "
            "connection, an open file, a lock) inside the function when it is first called on a "
            "worker, not beside it."
        ) from error


def unpacked(data: bytes) -> Parcel:
    """Return a parcel that was packed, in a process that may lack modules."""
    try:
        parcel, registrations = cloudpickle.loads(data)
        for module, name, type_, function in registrations:
            getattr(importlib.import_module(module), name).register(type_, function)
    except ImportError as error:
        raise ImportError(
            f"{error}: the model needs a module that this worker does not have. Install it where "
            f"the workers run, or send it with client.upload_file({f'{error.name}.py'!r})."
        ) from error
    return parcel


def _registrations(model) -> list[tuple[str, str, type, Callable]]:
    """Find what generic functions of PyMC or PyTensor do for classes that workers cannot import.

    Such is the class that `pymc.CustomDist` makes for each distribution, and its log density.
    """
    found = operations([*model.basic_RVs, *model.potentials])
    types = {t for t in map(type, found) if _is_new(t)}
    generic: dict[int, Any] = {
        id(function): function
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("pymc", "pytensor")
        for function in list(vars(module).values())
        if isinstance(getattr(function, "registry", None), Mapping)
        and getattr(sys.modules.get(function.__module__), function.__name__, None) is function
    }
    return [
        (function.__module__, function.__name__, t, function.registry[t])
        for function in generic.values()
        for t in types & function.registry.keys()
    ]


def _is_new(type_) -> bool:
    """Whether another process cannot import a type, because a program made it as it ran."""
    if type_.__module__ == "__main__":
        return True
    place = sys.modules.get(type_.__module__)
    for name in type_.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is not type_


# what is at fault ---------------------------------------------------------------------------------


def _fails(part) -> bool:
    try:
        _dumps(part)
    except Exception:
        return True
    return False


def _culprit(parcel: Parcel) -> str:
    """Name the smallest part that fails."""
    for name in ("compile_kwargs", "step_kwargs", "initvals"):
        if _fails(getattr(parcel, name)):
            return name
    model, seen = parcel.model, set()
    factors = [*model.potentials, *model.observed_RVs, *model.deterministics, *model.free_RVs]
    for factor in factors:
        for node in (variable.owner for variable in ancestors([factor])):
            if node is None or node in seen:
                continue
            seen.add(node)
            if _fails(node.op):
                return f"The operation {node.op} of {factor.name}{_attribute(node.op)}"
    for name, variable in model.named_vars.items():
        if _fails(variable):
            return f"The variable {name} of the model"
    if not _fails(model) and _fails(parcel.make_step):
        return f"step={parcel.make_step!r}{_attribute(parcel.make_step)}"
    return f"The model {model.name}".strip()


def _attribute(owner) -> str:
    """Name the attribute, or the variable of a function, that fails."""
    parts = dict(getattr(owner, "__dict__", {}))
    function = next((part for part in [owner, *parts.values()] if hasattr(part, "__code__")), None)
    if function is not None:
        code, known = function.__code__, function.__globals__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        parts |= {name: known[name] for name in code.co_names if name in known}
        parts |= {name: cell.cell_contents for name, cell in cells}
        parts = {name: part for name, part in parts.items() if part is not function}
    failing = [name for name, part in parts.items() if _fails(part)]
    return f", because of {', '.join(failing)} in it," if failing else ""
