"""Pictures of results: how steps were tuned, errors against evaluations, log evidence."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from pymc_kameleon._compat import group_dataset, is_result, stacked
from pymc_kameleon.latent_gp.latent_evidence import MarginalLikelihood
from pymc_kameleon.plots.common import (
    COLORS,
    INK,
    MARKERS,
    STYLE,
    new_axes,
    pair_of_axes,
    statistic,
)
from pymc_kameleon.validation import checked_results, option_by_name

LINE_STYLES = ("-", "--", ":", "-.")

LEARNT = ("scaling", "step_size")
"""Statistics that tuning settles, the first of which a result has is drawn."""

WINDOWS = 50
"""Means of the acceptance are of so many parts of a chain."""

COLUMNS = ("sampler", "evaluations", "error")
N_COUNTS = 20
"""Numbers of draws of a result at which its error is computed."""


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
    found = {name: statistic(result, name) for name in (*LEARNT, "accept")}
    known = {name: values for name, values in found.items() if values is not None}
    name = next((name for name in LEARNT if name in known), None)
    if name is None or "accept" not in known:
        raise ValueError(
            f"The result has none of the statistics {', '.join(LEARNT)} with 'accept': take one of "
            "a random walk, MALAStep, SurrogateHMCStep, LatentGPStep or RiemannianHMCStep."
        )
    learnt, accept = (np.concatenate(known[key], axis=1) for key in (name, "accept"))
    draws = np.arange(learnt.shape[1]) - known[name][0].shape[1]
    size = max(1, len(draws) // WINDOWS)
    with rc_context(STYLE):
        axes = pair_of_axes(axes)
        for chain, part in np.ndindex(learnt.shape[0], learnt.shape[2]):
            line = {
                "color": COLORS[chain % len(COLORS)],
                "ls": LINE_STYLES[part % 4],
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


def _means(draws, values, size):
    """Means of `size` draws each, and their middles; the first ones are left out."""
    n = len(values) // size
    kept = slice(len(values) - n * size, None)
    return draws[kept].reshape(n, size).mean(axis=1), values[kept].reshape(n, size).mean(axis=1)


def plot_efficiency(
    runs: pd.DataFrame | Mapping[str, Any],
    reference: Any = None,
    *,
    evaluations: str | Mapping[str, str] = "n_evals",
    styles: Mapping[str, Mapping] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the errors of samplers against their evaluations, both on log scales.

    Parameters
    ----------
    runs : DataFrame, or mapping of str to result
        A table has the columns ``sampler``, ``evaluations`` and ``error``, whatever error that is;
        rows of one sampler are joined by a line. If there is a column ``budget``, rows of one
        sampler and budget are repetitions, of which the medians are drawn.

        Results of `pymc.sample` by name need a `reference`. Their error after n draws of each chain
        is that of the mean of these draws, in standard deviations of the reference: the root mean
        square over all elements of the variables that both have. Evaluations are those of all
        chains, tuning included where the result has it, as after
        ``pm.sample(discard_tuned_samples=False)``.
    reference : result, or mapping of str to array, optional
        Draws that are taken for the truth, those of a long run say: a result, or an array of shape
        (n, ...) by the name of each variable. Only for results.
    evaluations : str or mapping
        Sampler statistic that counts the evaluations of the log density in a draw, for all results
        or by name. ``{"NUTS": "n_steps"}`` counts the gradients of NUTS. Only for results.
    styles : mapping of str to mapping, optional
        Properties of the line of a sampler, as in ``{"NUTS": {"color": "black"}}``.
    ax : matplotlib Axes, optional
        Where to draw; default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If `runs` is neither a table nor a mapping of results, or the reference is missing.
    ValueError
        If a column is missing, a number in it cannot be drawn on a log scale, a result has no such
        statistic, or no variable is in both a result and the reference.

    See Also
    --------
    pymc_kameleon.diagnostics.efficiency_table : Effective draws of results, and what they cost.

    Notes
    -----
    PyMC's own steps without gradients do not count evaluations: put theirs in a table.

    Examples
    --------
    >>> options = {"discard_tuned_samples": False}
    >>> with model:
    ...     first = pm.sample(step=KameleonStep(), **options)
    ...     second = pm.sample(step=AdaptiveMetropolisStep(), **options)
    ...     long_run = pm.sample(draws=20_000, step=KameleonStep())
    >>> plot_efficiency({"Kameleon": first, "adaptive Metropolis": second}, long_run)
    """
    if isinstance(runs, pd.DataFrame):
        table = _checked_table(runs)
    else:
        table = _of_results(runs, reference, evaluations)
    styles = {} if styles is None else styles
    with rc_context(STYLE):
        ax = new_axes(figsize=(7.0, 4.2)) if ax is None else ax
        for i, (name, rows) in enumerate(table.groupby("sampler", sort=False)):
            if "budget" in rows:
                rows = rows.groupby("budget")[["evaluations", "error"]].median()
            rows = rows.sort_values("evaluations")
            look = _look(name, i) | {"linewidth": 1.2, "markersize": 4.0}
            ax.plot(rows["evaluations"], rows["error"], **look | dict(styles.get(name, {})))
        ax.set(xscale="log", yscale="log", xlabel="evaluations", ylabel="error")
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        _finish(ax, grid="both")
    return ax


def _look(name, i):
    """Return what tells the i-th line apart."""
    color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
    return {"color": color, "marker": marker, "label": name}


def _finish(ax, grid):
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis=grid, color="#e6e6ea", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _checked_table(table):
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise ValueError(
            f"runs has no column {', '.join(missing)}: take a table with {', '.join(COLUMNS)}."
        )
    if table.empty:
        raise ValueError("runs is empty: take at least one row.")
    for name in COLUMNS[1:]:
        values = table[name].to_numpy(dtype=float)
        bad = values[~(np.isfinite(values) & (values > 0))]
        if bad.size:
            raise ValueError(
                f"runs[{name!r}] has {bad[0]:g}, which a log scale cannot show: leave such rows "
                "out."
            )
    return table


def _of_results(runs, reference, evaluations):
    """Return the table of results by name."""
    checked_results(runs, "runs")
    counters = option_by_name("evaluations", evaluations, runs, "n_evals")
    if is_result(reference):
        posterior = group_dataset(reference, "posterior")
        reference = {name: stacked(posterior, name) for name in posterior.data_vars}
    if not isinstance(reference, Mapping):
        raise TypeError(
            f"reference={reference!r}: for results take a result of a long run, or arrays of draws "
            "by the names of variables."
        )
    return pd.concat([_curve(name, run, reference, counters[name]) for name, run in runs.items()])


def _curve(name, result, reference, counter):
    """Return the table of one result."""
    posterior = group_dataset(result, "posterior")
    counts = statistic(result, counter)
    if counts is None:
        raise ValueError(
            f"runs[{name!r}] has no statistic {counter!r}: name one by evaluations=, or take a "
            f"table of {', '.join(COLUMNS)}."
        )
    common = [variable for variable in posterior.data_vars if variable in reference]
    if not common:
        raise ValueError(
            f"runs[{name!r}] has none of the variables of the reference, {', '.join(reference)}."
        )
    tuning, after = counts
    spent = tuning.sum() + after.sum(axis=(0, 2)).cumsum()
    squares = np.concatenate(
        [_squared_errors(name, variable, posterior, reference) for variable in common], axis=1
    )
    shown = np.unique(np.geomspace(1, len(spent), N_COUNTS).astype(int)) - 1
    errors = np.sqrt(squares.mean(axis=1))
    return pd.DataFrame({"sampler": name, "evaluations": spent[shown], "error": errors[shown]})


def _squared_errors(name, variable, posterior, reference):
    """Squared errors of running means, in variances of the reference, shape (draws, elements)."""
    values = posterior[variable].transpose("draw", "chain", ...).values
    expected = np.asarray(reference[variable], dtype=float)
    if values.shape[2:] != expected.shape[1:]:
        raise ValueError(
            f"reference[{variable!r}] has elements of shape {expected.shape[1:]}, runs[{name!r}] "
            f"of shape {values.shape[2:]}."
        )
    means = values.mean(axis=1).cumsum(axis=0)
    means = means.reshape(len(means), -1) / np.arange(1, len(means) + 1)[:, None]
    expected = expected.reshape(len(expected), -1)
    varies = expected.std(axis=0) > 0  # an element that is fixed, as on the diagonal of an LKJ
    return ((means - expected.mean(axis=0)) / np.where(varies, expected.std(axis=0), 1.0)) ** 2


def plot_evidence(
    runs: Mapping[str, MarginalLikelihood | Sequence[MarginalLikelihood]],
    *,
    references: Mapping[str, float] | None = None,
    n_standard_errors: float = 2.0,
    ax: Axes | None = None,
) -> Axes:
    """Draw estimates of log Z with bars of standard errors, against seconds on a log scale.

    As figure 2 of the paper of Paquet & Fraccaro: which method gets how close in what time.

    Parameters
    ----------
    runs : mapping of str to MarginalLikelihood or sequence of MarginalLikelihood
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
        If `runs` is no mapping, or something in it is no `MarginalLikelihood`.
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> plot_evidence({"slice": [few, many], "HMC": other}, references={"EP": -31.42})
    """
    groups = _checked_runs(runs)
    with rc_context(STYLE):
        ax = new_axes(figsize=(7.0, 4.2)) if ax is None else ax
        for i, (name, group) in enumerate(groups.items()):
            group = sorted(group, key=lambda result: result.seconds)
            errors = n_standard_errors * np.array([result.standard_error for result in group])
            ax.errorbar(
                [result.seconds for result in group],
                [result.log_marginal_likelihood for result in group],
                # A single particle has an infinite error: no bar rather than an endless one.
                yerr=np.where(np.isfinite(errors), errors, 0.0),
                markersize=5.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                linewidth=0.8,
                elinewidth=1.4,
                capsize=3.0,
                zorder=3,
                **_look(name, i),
            )
        for i, (name, value) in enumerate((references or {}).items()):
            style = LINE_STYLES[i % 4]
            ax.axhline(value, color=INK, linewidth=1.0, linestyle=style, zorder=1, label=name)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.margins(x=0.12, y=0.12)
        ax.set_xlabel("time (seconds)")
        ax.set_ylabel(rf"$\log Z$  ($\pm${n_standard_errors:g} standard errors)")
        _finish(ax, grid="y")
    return ax


def _checked_runs(runs):
    """Return lists of results by name."""
    if not isinstance(runs, Mapping):
        raise TypeError(
            f"runs is of type {type(runs).__name__}: take a mapping of names to what "
            'log_marginal_likelihood returned, as in {"slice": [few, many]}.'
        )
    groups = {
        name: [group] if isinstance(group, MarginalLikelihood) else list(group)
        for name, group in runs.items()
    }
    for name, group in groups.items():
        for result in group:
            if not isinstance(result, MarginalLikelihood):
                raise TypeError(
                    f"runs[{name!r}] holds a {type(result).__name__}: take what "
                    "log_marginal_likelihood returned."
                )
    if not any(groups.values()):
        raise ValueError("runs is empty: take at least one result.")
    return {name: group for name, group in groups.items() if group}
