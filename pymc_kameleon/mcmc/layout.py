"""Types and lengths of the arrays that compiled code takes, declared where their tuples are.

Compiled loops check no index, so an array of another length would be read or written past its end.
Within the package the lengths are right by construction; `check_layout` is for what comes from
outside, a saved state or a surrogate fitted elsewhere.
"""

from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

__all__ = ["Axes", "check_layout", "flags", "floats", "integers"]


OWN = "own "
"""Begins the names of lengths that hold within one tuple."""


@dataclass(frozen=True)
class Axes:
    """Type of an array and the lengths of its axes: numbers, or names of lengths.

    It annotates a field, as in ``factor: Annotated[np.ndarray, floats("d", "d")]``.
    """

    dtype: type
    lengths: tuple[int | str, ...]


def floats(*lengths: int | str) -> Axes:
    """Declare an array of float64."""
    return Axes(np.float64, lengths)


def integers(*lengths: int | str) -> Axes:
    """Declare an array of int64."""
    return Axes(np.int64, lengths)


def flags(*lengths: int | str) -> Axes:
    """Declare an array of truth values."""
    return Axes(np.bool_, lengths)


def check_layout(name: str, value: Any, lengths: dict[str, int]) -> None:
    """Raise an error unless the arrays of a tuple or state, and of those in it, are as declared.

    A tuple with a property `is_consistent` is also asked for that.

    Parameters
    ----------
    name : str
        What messages call it.
    value : tuple or dataclass
        A field that is declared to may be None.
    lengths : dict
        Known lengths by name. A length with another name is added as it is found, so it has to be
        the same in all arrays that have it; or in those of one tuple, if its name begins with
        "own".

    Raises
    ------
    ValueError, TypeError
        Naming the array, what it is and what it should be.
    """
    theirs = {key: lengths.pop(key) for key in list(lengths) if key.startswith(OWN)}
    for field, hint in get_type_hints(type(value), include_extras=True).items():
        part, where = getattr(value, field), f"{name}.{field}"
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if part is None and NoneType in options:
            continue
        for option in options:
            if get_origin(option) is Annotated:
                _check_array(where, part, option.__metadata__[0], lengths)
        tuples = [o for o in options if isinstance(o, type) and issubclass(o, tuple)]
        if tuples and type(part) not in tuples:
            expected = " or ".join(t.__name__ for t in tuples)
            raise TypeError(f"{where} is {type(part).__name__}, and should be {expected}.")
        if tuples or is_dataclass(part):
            check_layout(where, part, lengths)
    for key in [key for key in lengths if key.startswith(OWN)]:
        del lengths[key]
    lengths.update(theirs)
    if not getattr(value, "is_consistent", True):
        raise ValueError(f"{name} counts more numbers than its arrays hold.")


def _check_array(name: str, array: Any, axes: Axes, lengths: dict[str, int]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != axes.dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} is {found}, and should be an array of {axes.dtype.__name__}.")
    if array.ndim == len(axes.lengths):
        for axis, length in zip(axes.lengths, array.shape, strict=True):
            if isinstance(axis, str):
                lengths.setdefault(axis, length)
    expected = tuple(
        lengths.get(axis, axis) if isinstance(axis, str) else axis for axis in axes.lengths
    )
    if array.shape != expected:
        raise ValueError(f"{name} has shape {array.shape}, and should have {expected}.")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise ValueError(f"{name} should be C-contiguous, aligned and writeable.")
