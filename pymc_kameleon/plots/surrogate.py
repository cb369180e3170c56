"""Pictures of what the surrogate of `SurrogateHMCStep` knows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from scipy.stats import chi2, gaussian_kde

from pymc_kameleon._compat import is_result
from pymc_kameleon.gp.typical_set import typical_set
from pymc_kameleon.plots.common import (
    COLORS,
    INK,
    STYLE,
    checked_pair,
    coordinate_names,
    grid_of,
    pair_of_axes,
    statistic,
)
from pymc_kameleon.steps.surrogate_hmc import SurrogateHMCStep
from pymc_kameleon.surrogate.evaluations import visited_values
from pymc_kameleon.surrogate.posterior_surrogate import predicted

ORDER_COLORS = LinearSegmentedColormap.from_list("order", ["#e8b45a", "#4f9a94", "#17324d"])
LOW_COLOR = "#a9abb3"

LINEAR = 0.01
"""Errors of the log density below this one, which change no decision, are on a linear scale."""

LARGEST_ERROR = 100.0
"""Larger ones are drawn at this one: all of them mean a rejection."""

GRID_SIZE = 200

SHARES = (0.95, 0.5)
"""Probability inside of each contour."""


def plot_surrogate(
    source: Any, *, variables: Sequence[int | str] | None = None, axes: np.ndarray | None = None
) -> np.ndarray:
    r"""Draw what the surrogate of a `SurrogateHMCStep` learnt, or how well it served.

    Of a step: on the left the log density at its evaluations against the surrogate's there, both
    less the largest one; on the right where the evaluations are, typical ones in colour, and
    contours (50 and 95 %) of the surrogate. Of a result of ``pymc.sample``: on the left the errors
    of the surrogate where draws were proposed, on the right their distribution.

    Parameters
    ----------
    source : SurrogateHMCStep, InferenceData or DataTree
        A step after ``pm.sample(cores=1)``, which leaves it as it was at the end of its last chain;
        or what ``pm.sample`` returned. Draws of tuning are shown left of 0, if they were kept.
    variables : pair of int or str, optional
        The coordinates to draw of a step, horizontal first: positions in the raveled vector, or
        names as in "rate" for a scalar variable and "x[0]" for an element of a vector. Default the
        two that depend most on each other.
    axes : pair of matplotlib Axes, optional
        Where to draw; default a new figure.

    Returns
    -------
    array of matplotlib Axes, shape (2,)

    Raises
    ------
    RuntimeError
        If the step has learnt nothing.
    ValueError
        If the result has no statistic `surrogate_error`, or for a bad pair.
    TypeError
        For any other source.

    Notes
    -----
    A log density that the chain sees, or within about :math:`d/2 + 3\sqrt{d/2} + 6` of the largest
    one, is typical; the others, infinite ones too, are grey, and triangles at the edge where they
    would be outside. The evaluations of a step are those that its surrogate was fitted to, at most
    6000. Errors after tuning are at points that it was not fitted to, so they show how good it is.

    In more than two dimensions the contours are smoothed from 200 draws from the surrogate. The
    acceptance that errors e imply is that of draws from the surrogate which do not depend on where
    the chain is, :math:`\sum_{ij} \min(w_i, w_j) / (n \sum_i w_i)` with :math:`w = \exp(e)`, a
    mean over chains. The statistic `accept` counts difference moves and hotter ones too, which are
    accepted less often. Where it is far above what is implied, the surrogate is much too low in
    places: a chain makes short moves there and stays for long.

    Examples
    --------
    >>> plot_surrogate(idata)
    """
    if isinstance(source, SurrogateHMCStep):
        names = coordinate_names(source)
        if source.learner is None or not source.learner.has_learnt:
            raise RuntimeError(
                "This SurrogateHMCStep has learnt nothing, so there is no surrogate to show. Draw "
                "it after pm.sample(cores=1), which runs the chains in this process; or draw the "
                "result: plot_surrogate(idata)."
            )
        pair = None
        if len(names) > 1:
            pair = _dependent(source) if variables is None else checked_pair(variables, names)
        elif variables is not None:
            raise ValueError(f"variables={variables!r}: the step moves only {names[0][0]}.")
        with rc_context(STYLE):
            axes = pair_of_axes(axes)
            _draw_step(axes, source, names, pair)
        return axes
    if not is_result(source):
        raise TypeError(
            f"source is of type {type(source).__name__}: take a SurrogateHMCStep (one of the "
            "`methods` of a compound step), or what pm.sample returned."
        )
    if variables is not None:
        raise ValueError(f"variables={variables!r}: a result has none to choose; leave it out.")
    tuning, errors = _errors(source)
    accept = statistic(source, "accept")
    with rc_context(STYLE):
        axes = pair_of_axes(axes)
        _draw_errors(axes, tuning, errors, None if accept is None else accept[1].mean())
    return axes


# a step -------------------------------------------------------------------------------------------


def _surrogate_draws(step) -> np.ndarray:
    """Draws from the surrogate, shape (n, d), in raw coordinates."""
    return step.learner.surrogate.to_points(step.learner.fitted.population)


def _dependent(step) -> list[int]:
    """Two coordinates, of which the values or squares of draws from the surrogate correlate most.

    A ridge and a bend count alike.
    """
    draws = _surrogate_draws(step)
    draws = (draws - draws.mean(axis=0)) / np.maximum(draws.std(axis=0), 1e-300)
    dim = step.dim
    found = np.abs(np.corrcoef(np.concatenate([draws, draws**2], axis=1).T))
    plain, bent = found[:dim, :dim], found[:dim, dim:]
    strength = np.nan_to_num(np.maximum(plain, np.maximum(bent, bent.T)))
    strength[np.tril_indices(dim)] = -1.0
    return [int(i) for i in np.unravel_index(np.argmax(strength), strength.shape)]


def _draw_step(axes, step, names, pair):
    learner = step.learner
    points, values, _ = learner.known()
    best = values.max()
    highest, depth = typical_set(values, step.dim, visited_values(learner.history, points, values))
    typical = best - highest + depth
    true = values - best
    found = predicted(learner.surrogate, points) - best
    is_typical = true > -typical
    shown = _draw_predictions(axes[0], found, true, is_typical, typical)
    if pair is None:
        _draw_line(axes[1], step, points[:, 0], true, is_typical, names[0][0], best, typical)
    else:
        _draw_plane(axes[1], step, points[:, pair], is_typical, pair, best)
        axes[1].set(xlabel=names[pair[0]][0], ylabel=names[pair[1]][0])
    bar = axes[1].figure.colorbar(shown, ax=axes[1], ticks=MaxNLocator(5, integer=True))
    bar.outline.set_visible(False)
    bar.set_label("order of evaluation")


def _scatter(ax, x, y, is_typical, zorder):
    order = np.flatnonzero(is_typical) + 1
    colors = {"c": order, "cmap": ORDER_COLORS, "vmin": 1, "vmax": max(2, len(is_typical))}
    look = {"s": 13, "alpha": 0.8, "linewidths": 0, "zorder": zorder}
    return ax.scatter(x[is_typical], y[is_typical], **colors, **look)


def _draw_predictions(ax, found, true, is_typical, typical):
    edge = 1.06 * typical
    inside = is_typical & (found > -edge)
    top = max(0.0, float(np.max(found[inside], initial=0.0))) + 0.03 * typical
    ax.plot([-edge, top], [-edge, top], color=INK, lw=0.9, zorder=1)
    shown = _scatter(ax, np.maximum(found, -edge), true, is_typical, zorder=3)
    low = ~is_typical
    # What is too low for the picture lies on its lower edge, or in the corner.
    at_edge = {"ms": 4, "mew": 0, "clip_on": False}
    x, y = np.clip(found[low], -edge, top), np.full(low.sum(), -edge)
    ax.plot(x, y, "v", color=LOW_COLOR, zorder=2, label="lower", **at_edge)
    misjudged = is_typical & ~inside
    if misjudged.any():
        x, y = np.full(misjudged.sum(), -edge), true[misjudged]
        ax.plot(x, y, "<", color=INK, zorder=4, label="predicted lower", **at_edge)
    ax.set(xlabel="predicted log density - largest", ylabel="log density - largest")
    ax.set(xlim=(-edge, top), ylim=(-edge, top))
    error = np.median(np.abs(found - true)[is_typical])
    text = f"{len(true)} evaluations, {is_typical.sum()} typical\nmedian error of these {error:.2g}"
    ax.text(0.04, 0.96, text, transform=ax.transAxes, va="top")
    return shown


def _draw_plane(ax, step, points, is_typical, pair, best):
    draws = _surrogate_draws(step)[:, pair]
    shown = np.concatenate([points[is_typical], draws])
    low, high = shown.min(axis=0), shown.max(axis=0)
    margin = 0.12 * np.maximum(high - low, 1e-300)
    limits = np.stack([low - margin, high + margin])
    lines = np.linspace(*limits, GRID_SIZE)
    grid = grid_of(lines)
    if step.dim == 2:
        heights = _within_reach(step, np.ascontiguousarray(grid[:, np.argsort(pair)]))
        levels = best - 0.5 * chi2.ppf(SHARES, 2)
    else:
        heights, levels = _smoothed(draws, grid)
    if len(levels):
        heights = heights.reshape(GRID_SIZE, GRID_SIZE)
        for color, width in (("white", 2.6), (INK, 1.2)):
            look = {"colors": color, "linewidths": width, "linestyles": "-", "zorder": 3}
            ax.contour(*lines.T, heights, levels, **look)
    ax.plot(*points[~is_typical].T, ".", ms=4, mew=0, color=LOW_COLOR, zorder=1)
    _scatter(ax, *points.T, is_typical, zorder=2)
    ax.set(xlim=limits[:, 0], ylim=limits[:, 1])


def _within_reach(step, grid):
    """Surrogate at the rows of `grid`, NaN where no trajectory goes."""
    surrogate, radius = step.learner.surrogate, step.learner.fitted.integrator.radius[0]
    squares = np.sum(surrogate.to_moves(grid) ** 2, axis=0)
    return np.where(squares <= radius**2, predicted(surrogate, grid), np.nan)


def _smoothed(draws, grid):
    """Density of the draws at the rows of `grid`, and its levels that hold shares of them."""
    try:
        density = gaussian_kde(draws.T, lambda kernel: 1.2 * kernel.scotts_factor())
    except np.linalg.LinAlgError:  # they lie on a line
        return np.zeros(len(grid)), ()
    return density(grid.T), np.unique(np.quantile(density(draws.T), 1.0 - np.array(SHARES)))


def _draw_line(ax, step, x, true, is_typical, name, best, typical):
    """Of a single coordinate: the log density and the surrogate against it."""
    shown = x[is_typical]
    margin = 0.12 * max(np.ptp(shown), 1e-300)
    grid = np.linspace(shown.min() - margin, shown.max() + margin, 2 * GRID_SIZE)
    ax.plot(grid, predicted(step.learner.surrogate, grid[:, None]) - best, color=INK, lw=1.0)
    _scatter(ax, x, true, is_typical, zorder=2)
    ax.set(xlim=(grid[0], grid[-1]), ylim=(-1.06 * typical, 0.06 * typical))
    ax.set(xlabel=name, ylabel="log density - largest")


# a result -----------------------------------------------------------------------------------------


def _errors(result):
    """Errors of tuning and of sampling (chains, draws), of several steps the one that is worst."""
    found = statistic(result, "surrogate_error")
    if found is None:
        raise ValueError(
            "The result has no statistic 'surrogate_error': take one of a SurrogateHMCStep, with "
            "its sample_stats."
        )
    if np.all(np.isnan(found[1])):
        raise ValueError(
            "The statistic 'surrogate_error' is NaN in all draws: the surrogate learnt nothing. "
            "Tune longer."
        )
    sizes = [np.nan_to_num(np.abs(errors), nan=-1.0, posinf=np.inf) for errors in found]
    return [
        np.take_along_axis(errors, size.argmax(axis=2)[..., None], axis=2)[..., 0]
        for errors, size in zip(found, sizes, strict=True)
    ]


def implied_acceptance(errors: np.ndarray) -> float:
    """Return the acceptance of independent proposals that are wrong by `errors` (n,)."""
    weights = np.sort(np.exp(errors - errors.max()))
    n = len(weights)
    # The k-th smallest of n is the smaller one in 2 (n - k) + 1 of all pairs.
    return float(np.sum(weights * (2 * np.arange(n, 0, -1) - 1)) / (n * weights.sum()))


def _draw_errors(axes, tuning, errors, acceptance):
    for ax in axes:
        ax.set_yscale("asinh", linear_width=LINEAR)
        ax.axhspan(-1, 1, color="#eeeef3", lw=0, zorder=0)
        ax.axhline(0, color=INK, lw=0.8, zorder=1)
    n_tuning = tuning.shape[1]
    if n_tuning:
        axes[0].axvline(0, color=INK, lw=0.9, ls=":", zorder=1)
    largest = np.nanmax(np.abs(np.concatenate([tuning, errors], axis=1)), initial=2.0)
    reach = 1.1 * min(LARGEST_ERROR, largest)
    edges = LINEAR * np.sinh(np.linspace(-1, 1, 61) * np.arcsinh(reach / LINEAR))
    implied = []
    for chain, (early, late) in enumerate(zip(tuning, errors, strict=True)):
        look = {"color": COLORS[chain % len(COLORS)], "zorder": 2}
        values = np.clip(np.concatenate([early, late]), -LARGEST_ERROR, LARGEST_ERROR)
        draws = np.arange(len(values)) - n_tuning
        look_of_dots = {"ms": 3, "mew": 0, "alpha": 0.7, "label": f"chain {chain}"}
        axes[0].plot(draws, values, ".", **look_of_dots, **look)
        known = late[~np.isnan(late)]
        counts = np.histogram(np.clip(known, -LARGEST_ERROR, LARGEST_ERROR), edges)[0]
        shares = counts / max(1, counts.sum())
        axes[1].stairs(shares, edges, orientation="horizontal", lw=1.4, **look)
        implied.append(implied_acceptance(known) if len(known) else 0.0)
    found = "" if acceptance is None else f"\nmean of accept {acceptance:.2f}"
    text = f"implied acceptance {np.mean(implied):.2f}{found}"
    axes[1].text(0.97, 0.97, text, transform=axes[1].transAxes, ha="right", va="top")
    ticks = [-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100]
    ticks = [tick for tick in ticks if abs(tick) <= edges[-1]]
    for ax in axes:
        ax.set(ylabel="log density - predicted", ylim=edges[[0, -1]])
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].set(xlabel="draw")
    axes[1].set(xlabel="share of the draws", xlim=(0, None))
    where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.0}
    axes[0].legend(ncols=8, markerscale=3, columnspacing=1.0, handletextpad=0.0, **where)
