"""Picture of what a chain learnt while it tuned."""

from typing import Any

import numpy as np
from matplotlib import rc_context

from pymc_kameleon._compat import group_dataset, is_result
from pymc_kameleon.plots.style import COLORS, INK, STYLE, pair_of_axes

__all__ = ["plot_adaptation"]

LEARNT = ("scaling", "step_size")
"""Statistics that tuning settles, the first of which a result has is drawn."""

WINDOWS = 50
"""Means of the acceptance are of so many parts of a chain."""


def plot_adaptation(result: Any, *, axes: np.ndarray | None = None) -> np.ndarray:
    """Draw how the scaling of each chain was learnt, and the acceptance that came of it.

    On the left the scaling (or step size) of each draw, on a log scale; on the right the acceptance
    in 50 parts of the chain. Draws of tuning are left of 0. A scaling that still runs away at 0, or
    chains that settle apart, want more tuning.

    Parameters
    ----------
    result : InferenceData or DataTree
        What ``pm.sample(discard_tuned_samples=False)`` returned; without draws of tuning there is
        only what was learnt.
    axes : pair of matplotlib Axes, optional
        Where to draw; default a new figure.

    Returns
    -------
    array of matplotlib Axes, shape (2,)

    Raises
    ------
    TypeError
        If the result is none, or `axes` is no pair.
    ValueError
        If it has no statistics of a step of this package.

    Notes
    -----
    Of a compound step each part has lines of its own style.

    Examples
    --------
    >>> plot_adaptation(idata)
    """
    if not is_result(result):
        raise TypeError(f"result is of type {type(result).__name__}: take what pm.sample returned.")
    statistics = group_dataset(result, "sample_stats")
    known = () if statistics is None else statistics
    name = next((name for name in LEARNT if name in known), None)
    if name is None or "accept" not in known:
        raise ValueError(
            f"The result has none of the statistics {', '.join(LEARNT)} with 'accept': take one of "
            "a random walk, MALAStep, SurrogateHMCStep, LatentGPStep or RiemannianHMCStep."
        )
    tuning = group_dataset(result, "warmup_sample_stats")
    learnt, n_tuning = _values(tuning, statistics, name)
    accept, _ = _values(tuning, statistics, "accept")
    draws = np.arange(learnt.shape[1]) - n_tuning
    size = max(1, len(draws) // WINDOWS)
    with rc_context(STYLE):
        axes = pair_of_axes(axes)
        for chain, part in np.ndindex(learnt.shape[0], learnt.shape[2]):
            line = {
                "color": COLORS[chain % len(COLORS)],
                "ls": ("-", "--", "-.", ":")[part % 4],
                "lw": 1.2,
                "label": f"chain {chain}" if part == 0 else None,
            }
            axes[0].plot(draws, learnt[chain, :, part], **line)
            middles, means = _means(draws, accept[chain, :, part], size)
            axes[1].plot(middles, means, **line)
        for ax in axes:
            ax.axvline(0, color=INK, lw=0.9, ls=":", zorder=0)
            ax.set_xlabel("draw")
        axes[0].set(ylabel=name.replace("_", " "), yscale="log")
        axes[1].set(ylabel="acceptance", ylim=(0, 1))
        axes[0].legend(ncols=4, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0)
    return axes


def _values(tuning, statistics, name):
    """Return a statistic (chains, draws, steps), draws of tuning first, and how many these are."""
    parts = [part for part in (tuning, statistics) if part is not None and name in part]
    arrays = [part[name].transpose("chain", "draw", ...).values for part in parts]
    arrays = [array.reshape(*array.shape[:2], -1) for array in arrays]
    return np.concatenate(arrays, axis=1), sum(array.shape[1] for array in arrays[:-1])


def _means(draws, values, size):
    """Means of `size` draws each, and their middles; the first ones are left out."""
    n = len(values) // size
    kept = slice(len(values) - n * size, None)
    return draws[kept].reshape(n, size).mean(axis=1), values[kept].reshape(n, size).mean(axis=1)
