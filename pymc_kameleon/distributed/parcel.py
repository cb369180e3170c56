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

from pymc_kameleon.model.black_box import operations, parts_of

__all__ = ["Parcel", "packed", "unpacked"]


class Parcel(NamedTuple):
    """What is the same for all chains and rounds.

    Attributes
    ----------
    model : pymc.Model
    make_step : callable
    takes_store : bool
        Whether the step is made with `store=`.
    var_names : list of str or None
    compile_kwargs : dict or None
    step_kwargs : dict
        Arguments of the steps that PyMC chooses.
    initvals : list
        Start of each chain, as `pymc.sample` takes it.
    """

    model: pm.Model
    make_step: Callable
    takes_store: bool
    var_names: list[str] | None
    compile_kwargs: dict | None
    step_kwargs: dict
    initvals: list


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


class Registration(NamedTuple):
    """What a generic function of PyMC or PyTensor does for a class that workers cannot import.

    Such is the class that `pymc.CustomDist` makes for each distribution, and its log density.
    """

    module: str
    name: str
    type: type
    function: Callable


def packed(parcel: Parcel) -> bytes:
    """Pickle a parcel, with what is registered for the operations of its model.

    Raises
    ------
    TypeError
        If something in it cannot be pickled, naming it.
    """
    try:
        return _dumps((parcel, _registrations(parcel.model)))
    except Exception as error:
        raise TypeError(
            f"{_culprit(parcel)} cannot be sent to the workers: {error}. Make what it holds (a "
            "connection, an open file, a lock) inside the function when it is first called on a "
            "worker, not beside it."
        ) from error


def unpacked(data: bytes) -> Parcel:
    """Return the parcel.

    Raises
    ------
    ImportError
        If a module is not there, saying how it gets there.
    """
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


def _registrations(model) -> list[Registration]:
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
        Registration(function.__module__, function.__name__, t, function.registry[t])
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
        for variable in ancestors([factor]):
            node = variable.owner
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
        names = function.__code__.co_names
        parts |= {
            name: function.__globals__[name] for name in names if name in function.__globals__
        }
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        parts |= {name: cell.cell_contents for name, cell in cells}
        parts = {name: part for name, part in parts.items() if part is not function}
    failing = [name for name, part in parts.items() if _fails(part)]
    return f", because of {', '.join(failing)} in it," if failing else ""
