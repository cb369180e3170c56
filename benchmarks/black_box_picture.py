"""Picture of errors against evaluations: a panel a target, a line a sampler."""

import pandas as pd
from matplotlib.figure import Figure

from pymc_kameleon.plots import plot_efficiency

__all__ = ["picture"]

OURS = ("SurrogateHMC", "SurrogateHMC, shared")
COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Those of Okabe and Ito, which the colour-blind tell apart; vermilion is for `OURS`."""

VERMILION = "#d55e00"
STYLES = (("-", "o"), ("--", "s"), (":", "D"))
COLUMNS = 4


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
    figure = Figure(figsize=(3.0 * n_columns + 2.2, 2.7 * n_rows + 0.4), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).ravel()
    lines = {}
    for panel, target in zip(panels, targets, strict=False):
        plot_efficiency(results[results["target"] == target], styles=looks, ax=panel)
        panel.get_legend().remove()
        lines |= {line.get_label(): line for line in panel.lines}
        panel.set(title=target, xlabel="", ylabel="", yticks=[0.01, 0.03, 0.1, 0.3, 1.0])
        panel.tick_params(labelbottom=True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(targets) :]:
        panel.set_visible(False)
    figure.supxlabel("evaluations of the likelihood, all counted", fontsize="medium")
    figure.supylabel("mean marginal total variation", fontsize="medium")
    names = [name for name in samplers if name in lines]
    figure.legend([lines[n] for n in names], names, loc="outside right upper", frameon=False)
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
