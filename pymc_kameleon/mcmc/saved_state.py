"""Checks of what comes from outside, a saved state or a surrogate fitted elsewhere.

Compiled loops check no index, so an array of another length would be read or written past its end.
And what a saved state says of a user's function, which is the same in every process.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def name_of(function: Any) -> str:
    """Return module and name of a function, or of the class of another object that is called.

    Its `repr` has an address, by which no other process would know it.
    """
    function = getattr(function, "py_func", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def check_like(name: str, value: Any, fresh: Any, varying: Mapping[str, int] | None = None) -> None:
    """Raise an error unless arrays in `value` are as in a fresh object of the kind.

    Tuples, dictionaries and dataclasses are searched. A tuple with a property `is_consistent` is
    also asked for that, and may name in `varying` the axis of an array that has no fixed length;
    the argument `varying` names such axes for `value` itself. Where `fresh` is None nothing is
    known. A ValueError or TypeError, in which `value` is called `name`, says
    which array it is, what it is and what it should be.
    """
    if fresh is None:
        return
    if isinstance(fresh, np.ndarray):
        _check_array(name, value, fresh, None)
        return
    expected = _parts(fresh)
    if expected and type(value) is not type(fresh):
        raise TypeError(f"{name} is {type(value).__name__}, and should be {type(fresh).__name__}.")
    parts = _parts(value)
    axes = getattr(fresh, "varying", {}) if varying is None else varying
    if parts.keys() != expected.keys():
        raise ValueError(f"{name} has {', '.join(parts)}, and should have {', '.join(expected)}.")
    for key, part in parts.items():
        where = f"{name}.{key}"
        if key in axes:
            _check_array(where, part, expected[key], axes[key])
        else:
            check_like(where, part, expected[key])
    if not getattr(value, "is_consistent", True):
        raise ValueError(f"{name} counts more numbers than its arrays hold.")


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if hasattr(value, "_asdict"):
        return value._asdict()
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {}


def _check_array(name: str, array: Any, fresh: np.ndarray, varying_axis: int | None) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != fresh.dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} is {found}, and should be an array of {fresh.dtype.name}.")
    expected = list(fresh.shape)
    if varying_axis is not None and array.ndim == fresh.ndim:
        expected[varying_axis] = array.shape[varying_axis]
    if array.shape != tuple(expected):
        raise ValueError(f"{name} has shape {array.shape}, and should have {tuple(expected)}.")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise ValueError(f"{name} should be C-contiguous, aligned and writeable.")
