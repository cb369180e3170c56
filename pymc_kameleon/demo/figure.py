"""Picture of the demo: data, fitted trajectories and posterior pairs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.stats import gaussian_kde

from pymc_kameleon.demo.model import (
    HARE_PELTS,
    LYNX_PELTS,
    PARAMETERS,
    RATES,
    YEARS,
    solve_lotka_volterra,
)
from pymc_kameleon.plots.style import INK, STYLE

__all__ = ["lynx_hare_figure"]

POSTERIOR_COLORS = ["#cbc6e8", "#7a6fb8"]
RATE_LABELS = (
    r"$\alpha$  (hare births)",
    r"$\beta$  (hares eaten)",
    r"$\gamma$  (lynx deaths)",
    r"$\delta$  (lynx births)",
)
SPECIES = (("Hares", HARE_PELTS, "#b8682a"), ("Lynx", LYNX_PELTS, "#1f7a85"))
FONT_SIZE = {"font.size": 11}


def _thinned(idata: Any, names: Sequence[str], size: int) -> np.ndarray:
    draws = np.column_stack([idata["posterior"][name].values.ravel() for name in names])
    return draws[np.linspace(0, len(draws) - 1, min(size, len(draws)), dtype=int)]


def _draw_trajectories(axes: Sequence[Axes], idata: Any, seed: int = 0) -> None:
    """Draw pelts with 90% bands of the ODE's solution and of new observations."""
    times = np.linspace(0.0, 20.0, 201)
    draws = _thinned(idata, PARAMETERS, 500)
    log_means = np.array([solve_lotka_volterra(draw[:6], times) for draw in draws])
    # One error for a whole trajectory: the band at each time is the same and comes out smooth.
    noise = np.random.default_rng(seed).standard_normal((20, len(draws), 1, 2))
    replicates = (log_means + draws[:, None, 6:] * noise).reshape(-1, *log_means.shape[1:])
    for index, (title, pelts, color) in enumerate(SPECIES):
        axis = axes[index]
        new_low, new_high = np.exp(np.quantile(replicates[..., index], [0.05, 0.95], axis=0))
        low, middle, high = np.exp(np.quantile(log_means[..., index], [0.05, 0.5, 0.95], axis=0))
        axis.fill_between(YEARS[0] + times, new_low, new_high, color=color, alpha=0.15, lw=0)
        axis.fill_between(YEARS[0] + times, low, high, color=color, alpha=0.40, lw=0)
        axis.plot(YEARS[0] + times, middle, color=color, lw=1.8)
        axis.plot(YEARS, pelts, "o", color=INK, ms=5, mec="white", mew=0.8, zorder=3)
        axis.set_title(title, loc="left", color=color, weight="bold", size=13)
        axis.set(xlim=(1899.5, 1920.5), ylabel="Thousands of pelts")
        axis.set_ylim(0, 1.05 * max(new_high.max(), pelts.max()))
        axis.set_xticks(YEARS[::2])


def _contours(axis: Axes, draws: np.ndarray, run_index: int) -> None:
    """Draw the regions that hold 50% and 90% of the draws of two parameters."""
    try:
        density = gaussian_kde(draws.T)
    except np.linalg.LinAlgError:  # chains that have hardly moved
        axis.plot(*draws.T, ".", color=INK)
        return
    heights = np.sort(density(draws.T))
    levels = [heights[int(0.1 * len(heights))], heights[int(0.5 * len(heights))]]
    grids = [np.linspace(low, high, 70) for low, high in (axis.get_xlim(), axis.get_ylim())]
    x, y = np.meshgrid(*grids)
    values = density(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    if run_index == 0:
        top = [*levels, max(values.max(), 1.01 * levels[-1])]
        axis.contourf(x, y, values, levels=top, colors=POSTERIOR_COLORS)
    else:
        axis.contour(x, y, values, levels=levels, colors=INK, linewidths=1.0, linestyles="--")


def _draw_pairs(axes: Any, runs: Sequence) -> None:
    """Draw marginals on the diagonal and pairs of rates below it, one layer a sampler."""
    draws = [_thinned(run.idata, RATES, 2000) for run in runs]
    low, high = np.quantile(np.concatenate(draws), [0.002, 0.998], axis=0)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    for row, column in np.ndindex(axes.shape):
        axis = axes[row, column]
        if column > row:
            axis.set_axis_off()
            continue
        axis.set_xlim(low[column], high[column])
        if row == column:
            bins = np.linspace(low[row], high[row], 36)
            axis.hist(draws[0][:, row], bins, density=True, color=POSTERIOR_COLORS[1], alpha=0.75)
            axis.hist(draws[-1][:, row], bins, density=True, histtype="step", color=INK, ls="--")
            axis.set_yticks([])
            axis.spines["left"].set_visible(False)
        else:
            axis.set_ylim(low[row], high[row])
            for index, points in enumerate(draws):
                _contours(axis, points[:, [column, row]], index)
        axis.locator_params(axis="both", nbins=3)
        if row == column:
            axis.set_yticks([])
        axis.tick_params(labelbottom=row == len(RATES) - 1, labelleft=column == 0 < row)
        if row == len(RATES) - 1:
            axis.set_xlabel(RATE_LABELS[column])
        if column == 0 < row:
            axis.set_ylabel(RATE_LABELS[row])


def lynx_hare_figure(runs: Sequence) -> Figure:
    """Draw data, fitted trajectories and posterior pairs.

    Parameters
    ----------
    runs : sequence of `SamplerRun`
        Results of :func:`sample_both`; the trajectories are those of the first.

    Returns
    -------
    matplotlib.figure.Figure
    """
    with rc_context(STYLE | FONT_SIZE):
        figure = Figure(figsize=(10, 11.5), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.2], squeeze=False)[:, 0]
        title = {"x": 0.015, "ha": "left", "weight": "bold"}
        top.suptitle("Lynx and hares of the Hudson Bay, 1900 to 1920", size=17, **title)
        trajectory_axes = top.subplots(2, 1, sharex=True)
        _draw_trajectories(trajectory_axes, runs[0].idata)
        trajectory_axes[-1].set_xlabel("Year")
        top.align_ylabels()
        handles = [
            Line2D([], [], marker="o", ls="", color=INK, mec="white", label="pelts collected"),
            Line2D([], [], color="#555555", lw=1.8, label="median trajectory"),
            Patch(color="#555555", alpha=0.45, lw=0, label="its 90% band"),
            Patch(color="#555555", alpha=0.15, lw=0, label="90% band of observations"),
        ]
        where = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderaxespad": 0.0}
        trajectory_axes[0].legend(handles=handles, ncols=4, fontsize=10, columnspacing=1.4, **where)
        bottom.suptitle("Posterior of the rates", size=14, **title)
        pair_axes = bottom.subplots(4, 4)
        _draw_pairs(pair_axes, runs)
        handles = [
            Patch(color=POSTERIOR_COLORS[1], label=f"{runs[0].name}: draws, 50% region"),
            Patch(color=POSTERIOR_COLORS[0], label=f"{runs[0].name}: 90% region"),
            Line2D([], [], color=INK, ls="--", lw=1, label=f"{runs[-1].name}: the same"),
        ]
        legend = pair_axes[0, 2].legend(handles=handles, loc="upper left", borderaxespad=0.0)
        legend.set_in_layout(False)
        note = "Per year; $\\beta$ and $\\delta$ also per thousand pelts."
        pair_axes[0, 2].text(0.04, 0.2, note, transform=pair_axes[0, 2].transAxes, in_layout=False)
    return figure
