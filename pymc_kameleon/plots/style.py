"""What all pictures have in common."""

import numpy as np
from matplotlib.axes import Axes

__all__ = ["COLORS", "INK", "MARKERS", "STYLE", "pair_of_axes"]

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


def pair_of_axes(axes) -> np.ndarray:
    """Return two axes side by side, new ones for None, as an array.

    Raises
    ------
    TypeError
        If `axes` is no pair of axes.
    """
    if axes is None:
        from matplotlib import pyplot as plt

        return plt.subplots(1, 2, figsize=(9.5, 4.0), layout="constrained")[1]
    found = np.empty(np.size(axes), dtype=object)
    found[:] = np.ravel(axes)
    if len(found) != 2 or not all(isinstance(ax, Axes) for ax in found):
        raise TypeError(f"axes={axes!r}: take a pair, as from plt.subplots(1, 2)[1].")
    return found
