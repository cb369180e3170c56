"""Picture of estimates of log evidence against the time that they took."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pymc_kameleon.latent_gp.evidence.evidence_result import Evidence
from pymc_kameleon.plots.style import COLORS, INK, MARKERS, STYLE

__all__ = ["plot_evidence"]

LINE_STYLES = ["-", "--", ":", "-."]


def plot_evidence(
    runs: Mapping[str, Evidence | Sequence[Evidence]],
    *,
    references: Mapping[str, float] | None = None,
    n_standard_errors: float = 2.0,
    ax: Axes | None = None,
) -> Axes:
    """Draw estimates of log Z with bars of standard errors, against seconds on a log scale.

    As figure 2 of the paper of Paquet & Fraccaro: which method gets how close in what time.

    Parameters
    ----------
    runs : mapping of str to Evidence or sequence of Evidence
        Results by the name of what made them; those of one name, for more and more temperatures or
        particles say, have one colour and marker, and a line that joins them.
    references : mapping of str to float, optional
        Values of log Z to compare with, that of expectation propagation say: horizontal lines.
    n_standard_errors : float
        Half the length of a bar.
    ax : matplotlib Axes, optional
        Where to draw; default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If `runs` is no mapping, or something in it is no `Evidence`.
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> plot_evidence({"slice": [few, many], "HMC": other}, references={"EP": -31.42})
    """
    groups = _checked_runs(runs)
    with rc_context(STYLE):
        if ax is None:
            _, ax = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
        for i, (name, group) in enumerate(groups.items()):
            _draw_group(ax, name, group, n_standard_errors, i)
        for i, (name, value) in enumerate((references or {}).items()):
            style = LINE_STYLES[i % len(LINE_STYLES)]
            ax.axhline(value, color=INK, linewidth=1.0, linestyle=style, zorder=1, label=name)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.margins(x=0.12, y=0.12)
        ax.set_xlabel("time (seconds)")
        ax.set_ylabel(rf"$\log Z$  ($\pm${n_standard_errors:g} standard errors)")
        ax.grid(axis="y", color="#e6e6ea", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return ax


def _checked_runs(runs):
    """Return lists of results by name."""
    if not isinstance(runs, Mapping):
        raise TypeError(
            f"runs is of type {type(runs).__name__}: take a mapping of names to what "
            'log_evidence returned, as in {"slice": [few, many]}.'
        )
    groups = {
        name: [group] if isinstance(group, Evidence) else list(group)
        for name, group in runs.items()
    }
    for name, group in groups.items():
        for result in group:
            if not isinstance(result, Evidence):
                raise TypeError(
                    f"runs[{name!r}] holds a {type(result).__name__}: take what log_evidence "
                    "returned."
                )
    if not any(groups.values()):
        raise ValueError("runs is empty: take at least one result.")
    return {name: group for name, group in groups.items() if group}


def _draw_group(ax, name, group, n_standard_errors, i):
    group = sorted(group, key=lambda result: result.seconds)
    seconds = [result.seconds for result in group]
    errors = n_standard_errors * np.array([result.standard_error for result in group])
    ax.errorbar(
        seconds,
        [result.log_evidence for result in group],
        # A single particle has an infinite error: no bar rather than an endless one.
        yerr=np.where(np.isfinite(errors), errors, 0.0),
        color=COLORS[i % len(COLORS)],
        marker=MARKERS[i % len(MARKERS)],
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=0.8,
        elinewidth=1.4,
        capsize=3.0,
        zorder=3,
        label=name,
    )
