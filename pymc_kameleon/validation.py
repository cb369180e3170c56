"""Checks of arguments; each error names the argument, its value and what to write instead."""

import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pymc_kameleon._compat import is_result
from pymc_kameleon._warnings import warn_user

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def checked_integer(name: str, value, smallest: int) -> int:
    """`value` as an int of at least `smallest`."""
    if not _is_number(value) or not np.isfinite(value) or int(value) != value:
        raise TypeError(f"{name}={value!r}: take a whole number of at least {smallest}.")
    if value < smallest:
        raise ValueError(f"{name}={value!r}: take a whole number of at least {smallest}.")
    return int(value)


def checked_number(
    name: str, value, *, above: float | None = None, at_least: float | None = None
) -> float:
    """`value` as a finite float, above or at least a bound."""
    bound = f"above {above:g}" if above is not None else f"of at least {at_least:g}"
    if not _is_number(value):
        raise TypeError(f"{name}={value!r}: take a number {bound}.")
    if not np.isfinite(value) or (value <= above if above is not None else value < at_least):
        raise ValueError(f"{name}={value!r}: take a finite number {bound}.")
    return float(value)


def checked_share(name: str, value, *, open_interval: bool = False) -> float:
    """`value` as a float in [0, 1], or in (0, 1)."""
    interval = "(0, 1)" if open_interval else "[0, 1]"
    if not _is_number(value):
        raise TypeError(f"{name}={value!r}: take a number in {interval}.")
    inside = 0 < value < 1 if open_interval else 0 <= value <= 1
    if not inside:
        raise ValueError(f"{name}={value!r}: take a number in {interval}.")
    return float(value)


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def checked_choice(name: str, value, choices: Iterable[str], besides: str = "") -> str:
    """`value` of the argument `name`, which is one of the names `choices`.

    `besides` ends the message of the error: it says what else the argument takes, which the caller
    has already ruled out.
    """
    if isinstance(value, str) and value in choices:
        return value
    names = [repr(choice) for choice in choices]
    listed = " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"
    raise ValueError(f"{name}={value!r}: take {listed}{besides}.")


def checked_array(name: str, value, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    """`value` as a finite float array of the given shape."""
    array = np.asarray(value, dtype=float)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: take {meaning}, shape {shape}.")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} has NaN or infinite entries: take {meaning}, all finite.")
    return array


def argument_mismatch(function: Callable, arguments: Sequence) -> TypeError | None:
    """Return what calling a user's `function` with positional `arguments` would raise, if anything.

    None as well for a function of C that has no signature.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return error
    except ValueError:
        return None
    return None


def unknown_argument(called: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that `called` does not take; it takes those `known`."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f": did you mean {close[0]}?" if close else f", which takes {', '.join(known)}."
    return TypeError(f"{name} is no argument of {called}{hint}")


def names_close_arguments(function: Callable) -> Callable:
    """Decorate a function: an argument that it does not take raises `unknown_argument`."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*arguments, **named):
        for name in named:
            if name not in known:
                raise unknown_argument(function.__name__, name, known)
        return function(*arguments, **named)

    return checked


# names that changed -------------------------------------------------------------------------------


def warn_of_old_name(old: str, new: str) -> None:
    """Warn the user, at the user's line, that `old` still works and `new` is what to write."""
    warn_user(f"{old} is deprecated: write {new}.", FutureWarning)


def renamed(**new_names: str) -> Callable[[Decorated], Decorated]:
    """Decorate a function or an `__init__`: it takes arguments by old names too, with a warning.

    `new_names` maps the old names to the new ones, which alone are in the signature. Old and new
    together are a TypeError.
    """

    def decorate(function):
        @functools.wraps(function)
        def translating(*arguments, **named):
            for old in [name for name in named if name in new_names]:
                called, new = _called(function, arguments), new_names[old]
                if new in named:
                    raise TypeError(
                        f"{called}({old}=..., {new}=...): {old} is the old name of {new}. Write "
                        f"{new} alone."
                    )
                warn_of_old_name(f"{called}({old}=...)", f"{called}({new}=...)")
                named[new] = named.pop(old)
            return function(*arguments, **named)

        return _with_hidden(translating, new_names)

    return decorate


def only_published(*names: str, constructor: str) -> Callable[[Decorated], Decorated]:
    """Decorate an `__init__`: the arguments `names` are those of published settings alone.

    They are not in the signature, and given by users there is a warning: they are for the class
    method `constructor`, which passes `as_published(names, settings)`.
    """

    def decorate(init):
        @functools.wraps(init)
        def hiding(self, *arguments, _published=None, **named):
            called = type(self).__name__
            for name in [name for name in named if name in names]:
                warn_of_old_name(f"{called}({name}=...)", f"{called}.{constructor}({name}=...)")
            return init(self, *arguments, **named, **(_published or {}))

        shown = inspect.signature(init)
        hiding.__signature__ = shown.replace(
            parameters=[p for name, p in shown.parameters.items() if name not in names]
        )
        return _with_hidden(hiding, (*names, "_published"))

    return decorate


def as_published(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` as an `__init__` takes them for which `names` are `only_published`."""
    kept = {name: value for name, value in settings.items() if name not in names}
    return kept | {"_published": {k: v for k, v in settings.items() if k not in kept}}


def hidden_arguments(function: Callable) -> tuple[str, ...]:
    """Names of arguments that `function` takes and its signature does not show."""
    return getattr(function, "_hidden_arguments", ())


def _with_hidden(function, names):
    function._hidden_arguments = (*hidden_arguments(function), *names)
    return function


def _called(function, arguments):
    return type(arguments[0]).__name__ if function.__name__ == "__init__" else function.__name__


# results of earlier runs --------------------------------------------------------------------------


def checked_results(results, argument: str = "results") -> None:
    """Check that `results` are what `pymc.sample` returned, by name, at least one."""
    if is_result(results) or not isinstance(results, Mapping):
        raise TypeError(
            f"{argument} is of type {type(results).__name__}: take a mapping of names to what "
            'pm.sample returned, as in {"plain": idata}.'
        )
    if not results:
        raise ValueError(f'{argument} is empty: take at least one, as in {{"plain": idata}}.')
    for name, result in results.items():
        if not is_result(result):
            raise TypeError(
                f"{argument}[{name!r}] is of type {type(result).__name__} without a posterior: "
                "take what pm.sample returned (with return_inferencedata=True, its default)."
            )


def option_by_name(argument: str, value, results: Mapping, default) -> dict:
    """Value of an option for each result."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(results, value)
    unknown = [name for name in value if name not in results]
    if unknown:
        raise ValueError(
            f"{argument} names {', '.join(map(repr, unknown))}, which is none of the results: take "
            f"names among {', '.join(map(repr, results))}."
        )
    return {name: value.get(name, default) for name in results}
