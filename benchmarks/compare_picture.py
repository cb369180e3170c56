"""Pictures of the comparison: a column a target, a row a sampler, a dot a run."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from benchmarks.compare_samplers import SAMPLERS

__all__ = ["MEASURES", "is_doubtful", "picture"]

MEASURES = {
    "MMTV": "mean marginal total variation to the reference: less is better",
    "quantile-error": "largest error of the probability below a quantile: less is better",
    "ESS/1000": "effective draws per 1000 evaluations: more is better",
    "ESS/s": "effective draws per CPU second, tuning and compiling counted: more is better",
}
HERE = "pymc_kameleon"
COLUMNS = 6
LOWER_IS_BETTER = ("MMTV", "quantile-error")
LARGEST_RHAT = 1.05
OURS, OTHERS, STOPPED = "#d55e00", "#0072b2", "#8a8d94"


def is_doubtful(row) -> bool:
    """Whether the chains of a run disagree, or the sampler itself says not to trust its result."""
    # A constant coordinate has an R-hat of NaN, and so have draws without chains.
    return row["R-hat"] > LARGEST_RHAT or row.get("doubtful") == "yes"


def picture(results: pd.DataFrame, measure: str) -> Figure:
    """Draw one of `MEASURES`.

    Parameters
    ----------
    results : DataFrame
        A row a run: target, sampler, outcome, R-hat, doubtful and the measures.
    measure : str
    """
    targets = list(dict.fromkeys(results["target"]))
    samplers = [name for name in SAMPLERS if name in set(results["sampler"])]
    n_columns = min(COLUMNS, len(targets))
    n_rows = -(-len(targets) // n_columns)
    size = (1.3 * n_columns + 2.6, (0.2 * len(samplers) + 0.5) * n_rows + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for panel, target in zip(panels.ravel(), targets, strict=False):
        _draw(panel, results[results["target"] == target], samplers, measure)
        panel.set_title(target, fontsize="small")
    for panel in panels.ravel()[len(targets) :]:
        panel.set_visible(False)
    first = panels[0, 0]
    first.set_xticks([0.02, 0.1, 0.5] if measure in LOWER_IS_BETTER else [0.1, 10.0, 1000.0])
    first.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    first.set_yticks(range(len(samplers)), samplers)
    first.set_ylim(len(samplers) - 0.5, -0.5)
    for panel in panels[:, 0]:
        for label, name in zip(panel.get_yticklabels(), samplers, strict=True):
            label.set(color=OURS if SAMPLERS[name].package == HERE else OTHERS, fontsize="small")
    figure.supxlabel(MEASURES[measure], fontsize="medium")
    dot = {"marker": "o", "ls": "", "color": "black"}
    handles = [
        Line2D([], [], label=f"R-hat up to {LARGEST_RHAT:g}, or no chains", **dot),
        Line2D([], [], label="R-hat above, or said not to be trusted", mfc="white", **dot),
        Line2D([], [], marker="x", ls="", color=STOPPED, label="over time"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False)
    return figure


def _draw(panel, rows, samplers, measure):
    panel.set_xscale("log")
    done = rows[(rows["outcome"] == "") & (rows[measure] > 0)]
    for _, row in done.iterrows():
        color = OURS if SAMPLERS[row["sampler"]].package == HERE else OTHERS
        face = "white" if is_doubtful(row) else color
        place = samplers.index(row["sampler"])
        panel.plot(row[measure], place, "o", ms=5.5, mec=color, mfc=face, mew=1.2, zorder=3)
    worst = 0.98 if measure in LOWER_IS_BETTER else 0.02
    stopped = [samplers.index(name) for name in rows.loc[rows["outcome"] == "over time", "sampler"]]
    across = panel.get_yaxis_transform()
    panel.plot(np.full(len(stopped), worst), stopped, "x", ms=5, color=STOPPED, transform=across)
    panel.grid(axis="y", color="#e6e6ea", linewidth=0.8)
    panel.grid(axis="x", color="#e6e6ea", linewidth=0.5)
    panel.set_axisbelow(True)
    panel.minorticks_off()
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize="x-small", labelbottom=True)
    panel.margins(x=0.15)
    panel.spines[["top", "right", "left"]].set_visible(False)
