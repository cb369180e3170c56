"""Picture of errors against evaluations: a panel a target, a line a sampler."""

import pandas as pd
from matplotlib.figure import Figure

from pymc_kameleon.plots import plot_efficiency

__all__ = ["picture"]

OURS = ("SurrogateHMC", "SurrogateHMC, shared", "surrogate_posterior")
COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Those of Okabe and Ito, which the colour-blind tell apart; vermilion is for `OURS`."""

VERMILION = "#d55e00"
STYLES = (("-", "o"), ("--", "s"), (":", "D"))
COLUMNS = 3

SIZE = 11.0
"""Of all text, in points: to be read on a telephone too."""


def picture(results: pd.DataFrame) -> Figure:
    """Draw the median error over seeds against the median of all evaluations.

    Parameters
    ----------
    results : DataFrame
        A row a run: target, sampler, budget, evaluations, MMTV.
    """
    targets, samplers = results["target"].unique(), results["sampler"].unique()
    results = results.rename(columns={"MMTV": "error"})
    looks = dict(zip(samplers, _looks(samplers), strict=True))
    n_columns = min(COLUMNS, len(targets))
    n_rows = -(-len(targets) // n_columns)
    figure = Figure(figsize=(2.7 * n_columns + 0.3, 2.4 * n_rows + 0.4), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).ravel()
    lines = {}
    for panel, target in zip(panels, targets, strict=False):
        plot_efficiency(results[results["target"] == target], styles=looks, ax=panel)
        panel.get_legend().remove()
        lines |= {line.get_label(): line for line in panel.lines}
        panel.set(xlabel="", ylabel="", yticks=[0.01, 0.03, 0.1, 0.3, 1.0])
        panel.set_title(target, fontsize=SIZE)
        panel.tick_params(labelbottom=True, labelsize=SIZE)
        panel.spines[["top", "right"]].set_visible(False)
    free = panels[len(targets) :]
    for panel in free:
        panel.set_axis_off()
    figure.supxlabel("evaluations of the likelihood, all counted", fontsize=SIZE)
    figure.supylabel("mean marginal total variation", fontsize=SIZE)
    names = [name for name in samplers if name in lines]
    options = {"frameon": False, "fontsize": SIZE}
    handles = [lines[name] for name in names]
    if len(free):
        free[0].legend(handles, names, loc="upper left", **options).set_in_layout(False)
    else:
        figure.legend(handles, names, loc="outside lower center", ncols=3, **options)
    return figure


def _looks(samplers):
    looks, others = [], 0
    for name in samplers:
        if name in OURS:
            style = STYLES[OURS.index(name)][0]
            looks.append(
                {"color": VERMILION, "linewidth": 2.5, "ls": style, "marker": "o", "zorder": 3}
            )
            continue
        style, marker = STYLES[others // len(COLOURS) % len(STYLES)]
        colour = COLOURS[others % len(COLOURS)]
        looks.append(
            {"color": colour, "linewidth": 1.0, "ls": style, "marker": marker, "markersize": 3.5}
        )
        others += 1
    return looks
