"""Names of a step's raveled coordinates, and the choice of two of them."""

from collections.abc import Sequence

import numpy as np
from pymc.util import get_untransformed_name, is_transformed_name

from pymc_kameleon.validation import checked_integer

__all__ = ["checked_pair", "coordinate_names", "listed"]


def coordinate_names(step) -> list[list[str]]:
    """For each raveled coordinate, the names it goes by, the one for its axis first."""
    names = []
    for name, element in step.target.coordinates():
        natural, transform = name, ""
        if is_transformed_name(name):
            natural = get_untransformed_name(name)
            transform = f" ({name[len(natural) + 1 : -2]})"
        names.append([natural + element + transform, natural + element, name + element])
    return names


def checked_pair(variables, names: list[list[str]]) -> list[int]:
    """Return the positions of two different coordinates, given by position or name.

    Raises
    ------
    ValueError, TypeError
        If `variables` is no such pair.
    """
    if isinstance(variables, str) or not isinstance(variables, Sequence | np.ndarray):
        raise TypeError(f"variables={variables!r}: take a pair, as in variables=(0, 1).")
    pair = [_coordinate(variable, names) for variable in variables]
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ValueError(f"variables={variables!r}: take two different ones, as in (0, 1).")
    return pair


def listed(names: list[list[str]]) -> str:
    """Return the names on axes, not too many of them."""
    return ", ".join(label for label, _, _ in names[:20])


def _coordinate(variable: int | str, names) -> int:
    if isinstance(variable, str):
        matches = [i for i, known in enumerate(names) if variable in known]
        if len(matches) == 1:
            return matches[0]
        known = ", ".join(name for _, name, _ in names[:20])
        raise ValueError(f"variables: there is no coordinate {variable!r}; there are {known}.")
    index = checked_integer("variables", variable, 0)
    if index >= len(names):
        raise ValueError(
            f"variables: there is no coordinate {index}; take 0 to {len(names) - 1}, or names: "
            f"{listed(names)}."
        )
    return index
