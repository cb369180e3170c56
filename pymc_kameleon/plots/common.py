"""What pictures share: colours, axes, coordinates of a step, statistics of a result."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from pymc.util import get_untransformed_name, is_transformed_name

from pymc_kameleon._compat import group_dataset
from pymc_kameleon.validation import checked_integer

INK = "#2b2d33"
COLORS = ["#7a6fb8", "#b8682a", "#1f7a85", "#b0447a", "#5d7a2f", "#4a4a55"]
MARKERS = "osD^vPX"
"""As many as there are colours and one more: both repeat, but not together."""

STYLE = {
    "axes.edgecolor": "#8a8d94",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def new_axes(*shape: int, **options):
    """Axes of a new figure; pyplot is imported when the first picture is drawn."""
    from matplotlib import pyplot as plt

    return plt.subplots(*shape, layout="constrained", **options)[1]


def pair_of_axes(axes) -> np.ndarray:
    """Return two axes side by side, new ones for None, as an array; anything else is an error."""
    return row_of_axes(axes, 2, "a pair", figsize=(9.5, 4.0))


def row_of_axes(axes, n: int, wanted: str, **options) -> np.ndarray:
    """Return `n` axes side by side, as `pair_of_axes` does; an error asks for what is `wanted`."""
    if axes is None:
        return new_axes(1, n, **options)
    found = np.empty(np.size(axes), dtype=object)
    found[:] = np.ravel(axes)
    if len(found) != n or not all(isinstance(ax, Axes) for ax in found):
        raise TypeError(f"axes={axes!r}: take {wanted}, as from plt.subplots(1, {n})[1].")
    return found


def grid_of(lines: np.ndarray) -> np.ndarray:
    """Crossings of grid lines (size, 2), as points (size**2, 2), the first coordinate fastest."""
    return np.stack(np.meshgrid(*lines.T), axis=-1).reshape(-1, 2)


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


def listed(names: list[list[str]], which: int = 0) -> str:
    """Return names of coordinates, not too many of them."""
    return ", ".join(known[which] for known in names[:20])


def checked_pair(variables, names: list[list[str]]) -> list[int]:
    """Return the positions of two different coordinates, given by position or name."""
    if isinstance(variables, str) or not isinstance(variables, Sequence | np.ndarray):
        raise TypeError(f"variables={variables!r}: take a pair, as in variables=(0, 1).")
    pair = [_coordinate(variable, names) for variable in variables]
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ValueError(f"variables={variables!r}: take two different ones, as in (0, 1).")
    return pair


def _coordinate(variable: int | str, names) -> int:
    if isinstance(variable, str):
        matches = [i for i, known in enumerate(names) if variable in known]
        if len(matches) == 1:
            return matches[0]
        raise ValueError(
            f"variables: there is no coordinate {variable!r}; there are {listed(names, 1)}."
        )
    index = checked_integer("variables", variable, 0)
    if index >= len(names):
        raise ValueError(
            f"variables: there is no coordinate {index}; take 0 to {len(names) - 1}, or names: "
            f"{listed(names)}."
        )
    return index


def statistic(result, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Values of a sampler statistic in tuning, if kept, and after it: (chains, draws, steps) each.

    None where the result has no such statistic.
    """
    groups = [group_dataset(result, group) for group in ("warmup_sample_stats", "sample_stats")]
    values = [
        None if group is None or name not in group else group[name].transpose("chain", "draw", ...)
        for group in groups
    ]
    tuning, after = (
        None if found is None else found.values.reshape(*found.shape[:2], -1) for found in values
    )
    if after is None:
        return None
    return after[:, :0] if tuning is None else tuning, after
