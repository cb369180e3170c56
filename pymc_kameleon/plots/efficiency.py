"""Picture of how the error of samplers falls with their evaluations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from pymc_kameleon._compat import group_dataset, is_result, stacked
from pymc_kameleon.plots.style import COLORS, MARKERS, STYLE
from pymc_kameleon.validation import checked_results, option_by_name

__all__ = ["plot_efficiency"]

COLUMNS = ("sampler", "evaluations", "error")
N_COUNTS = 20
"""Numbers of draws of a result at which its error is computed."""


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
        if ax is None:
            from matplotlib import pyplot as plt

            _, ax = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
        for i, (name, rows) in enumerate(table.groupby("sampler", sort=False)):
            if "budget" in rows:
                rows = rows.groupby("budget")[["evaluations", "error"]].median()
            rows = rows.sort_values("evaluations")
            look = {
                "color": COLORS[i % len(COLORS)],
                "marker": MARKERS[i % len(MARKERS)],
                "linewidth": 1.2,
                "markersize": 4.0,
                "label": name,
            }
            ax.plot(rows["evaluations"], rows["error"], **look | dict(styles.get(name, {})))
        ax.set(xscale="log", yscale="log", xlabel="evaluations", ylabel="error")
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(color="#e6e6ea", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return ax


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
        if not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError(
                f"runs[{name!r}] has {values[~(np.isfinite(values) & (values > 0))][0]:g}, which a "
                "log scale cannot show: leave such rows out."
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
    statistics = group_dataset(result, "sample_stats")
    if statistics is None or counter not in statistics:
        raise ValueError(
            f"runs[{name!r}] has no statistic {counter!r}: name one by evaluations=, or take a "
            f"table of {', '.join(COLUMNS)}."
        )
    common = [variable for variable in posterior.data_vars if variable in reference]
    if not common:
        raise ValueError(
            f"runs[{name!r}] has none of the variables of the reference, {', '.join(reference)}."
        )
    tuning = group_dataset(result, "warmup_sample_stats")
    before = 0.0 if tuning is None or counter not in tuning else float(tuning[counter].sum())
    per_draw = statistics[counter].transpose("draw", ...).values
    spent = before + per_draw.reshape(len(per_draw), -1).sum(axis=1).cumsum()
    squares = np.concatenate(
        [_squared_errors(name, variable, posterior, reference) for variable in common], axis=1
    )
    counts = np.unique(np.geomspace(1, len(spent), N_COUNTS).astype(int)) - 1
    errors = np.sqrt(squares.mean(axis=1))
    return pd.DataFrame({"sampler": name, "evaluations": spent[counts], "error": errors[counts]})


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
