"""Effective draws of several samplers and their costs; how noisy an estimated likelihood is."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr

from pymc_kameleon._compat import group_dataset
from pymc_kameleon.kernels import Gaussian, Kernel, median_bandwidth
from pymc_kameleon.pseudo_marginal.estimator_variance import EstimatorSD, estimator_sd
from pymc_kameleon.validation import (
    checked_integer,
    checked_number,
    checked_results,
    option_by_name,
)

__all__ = [
    "EstimatorSD",
    "efficiency_table",
    "estimator_sd",
    "maximum_mean_discrepancy",
    "squared_jump_distance",
]

ACCEPTANCE_STATISTICS = ("accept", "acceptance_rate")
"""Names of the acceptance probability: of Metropolis-like steps, and of NUTS."""

TAILS = (0.05, 0.95)

COLUMNS = [
    *("chains", "draws", "acceptance", "ess_bulk", "ess_tail", "esjd"),
    *("evaluations", "evaluations_percent", "ess_bulk_per_evaluation"),
    *("seconds", "ess_bulk_per_second", "rhat"),
]


def efficiency_table(
    results: Mapping[str, Any],
    *,
    var_names: Sequence[str] | None = None,
    evaluations: str | Mapping[str, str] = "n_evals",
    steps_per_draw: int | Mapping[str, int] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Compare the effective draws that several samplers got from one model, and their costs.

    Parameters
    ----------
    results : mapping
        Name -> what ``pymc.sample`` returned.
    var_names : sequence of str, optional
        Variables to judge by; default all variables of the posterior, deterministic ones included.
    evaluations : str or mapping
        Sampler statistic that counts the full evaluations of the log density in a draw, for all
        results or by name. ``{"NUTS": "n_steps"}`` counts the gradients of NUTS.
    steps_per_draw : int or mapping, optional
        Transitions that each step method makes in a draw, for all results or by name. Default the
        statistic `n_transitions`, which the steps of this package give, or else 1.
    seconds : mapping, optional
        Name -> wall time in seconds, of those results for which it is not the attribute
        ``sampling_time`` of the posterior.

    Returns
    -------
    pandas.DataFrame
        One row a result, in the given order. What cannot be known is NaN.

        =========================  =================================================================
        chains, draws              numbers of chains and of draws in each, after tuning
        acceptance                 mean of the statistic `accept` (or else `acceptance_rate`), each
                                   at most 1: that of ``pymc.Metropolis`` can exceed it
        ess_bulk, ess_tail         effective sample size over all chains, the smallest over all
                                   elements of the variables; tail: of the 5% and 95% quantiles
        esjd                       :func:`squared_jump_distance`
        evaluations                full evaluations of the log density, all chains, after tuning
        evaluations_percent        the same in percent of the transitions
        ess_bulk_per_evaluation    ess_bulk / evaluations
        seconds                    wall time of all chains, tuning included
        ess_bulk_per_second        ess_bulk / seconds
        rhat                       largest rank-normalised R-hat over all elements
        =========================  =================================================================

    Raises
    ------
    TypeError
        If `results` is no mapping, or something in it was not returned by ``pymc.sample``.
    ValueError
        If there are no results, a variable is not in a result, or an option names no result.

    Notes
    -----
    A plain step evaluates the log density once a transition, 100%; a surrogate saves a part of
    that, and a first evaluation at the start of a chain, or after other steps of a compound step
    moved other variables, comes on top. Several steps of one draw each make their transitions:
    their evaluations are added, their acceptances averaged.

    Elements that never change in any chain are left out of ESS and R-hat, as for the diagonal of a
    correlation matrix; if none changes, both are NaN. R-hat needs two chains.

    Examples
    --------
    >>> efficiency_table({"plain": idata, "surrogate": other})
    """
    checked_results(results)
    counters = option_by_name("evaluations", evaluations, results, "n_evals")
    transitions = option_by_name("steps_per_draw", steps_per_draw, results, None)
    times = option_by_name("seconds", {} if seconds is None else seconds, results, None)
    rows = []
    for name, result in results.items():
        steps = transitions[name]
        if steps is not None:
            steps = checked_integer(f"steps_per_draw of {name!r}", steps, 1)
        posterior = _selected(name, result, var_names)
        row = _statistics(group_dataset(result, "sample_stats"), counters[name], steps)
        row |= _quality(_raveled(posterior))
        rows.append(row | {"seconds": _seconds(name, posterior, times[name])})
    table = pd.DataFrame(rows, index=list(results), columns=COLUMNS)
    for unit in ("evaluation", "second"):
        paid = table[f"{unit}s"]
        table[f"ess_bulk_per_{unit}"] = table["ess_bulk"] / paid.where(paid > 0)
    return table


def squared_jump_distance(result: Any, *, var_names: Sequence[str] | None = None) -> float:
    r"""Estimate the expected squared jump distance (ESJD) of a draw.

    .. math:: \frac 1 {C (n - 1)} \sum_{c=1}^C \sum_{t=1}^{n-1} \lVert x_{c,t+1} - x_{c,t} \rVert^2

    Parameters
    ----------
    result : InferenceData or DataTree
        What ``pymc.sample`` returned.
    var_names : sequence of str, optional
        Variables that make up x, raveled in their natural (constrained) space; default all
        variables of the posterior, deterministic ones included.

    Returns
    -------
    float
        In squared units of the variables; NaN for fewer than two draws.

    Notes
    -----
    It compares samplers of one model. It is a sum over coordinates, ruled by those with the largest
    scale; a mean over coordinates, which some papers give, is this over their number.
    """
    checked_results({"result": result})
    return _mean_squared_jump(_raveled(_selected("result", result, var_names)))


def maximum_mean_discrepancy(
    first: np.ndarray, second: np.ndarray, kernel: Kernel | None = None
) -> float:
    r"""Distance between two samples in the feature space of a kernel (MMD).

    .. math:: \Big(\frac 1 {n^2} \sum_{i,j} k(x_i, x_j) - \frac 2 {nm} \sum_{i,j} k(x_i, y_j)
        + \frac 1 {m^2} \sum_{i,j} k(y_i, y_j)\Big)^{1/2}

    Parameters
    ----------
    first : array, shape (n, d)
    second : array, shape (m, d)
        The cost is quadratic in n + m: thin long chains to a few thousand draws.
    kernel : Kernel, optional
        ``kernels.Polynomial(p)`` compares all mixed moments up to order p. Default
        ``kernels.Gaussian()``, whose bandwidth is the median heuristic of the second sample.

    Returns
    -------
    float
        0 for equal samples; with independent draws it falls as the root of the smaller size.

    Raises
    ------
    ValueError
        If the samples are no such arrays.

    References
    ----------
    .. [1] A. Gretton, K. Borgwardt, M. Rasch, B. Schölkopf and A. Smola, "A kernel two-sample
       test", Journal of Machine Learning Research 13, 2012.
    """
    first, second = (np.asarray(sample, dtype=float) for sample in (first, second))
    if first.ndim != 2 or second.ndim != 2 or first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"The samples have shapes {first.shape} and {second.shape}: take (n, d) and (m, d), "
            "draws by coordinates."
        )
    if not (first.size and second.size):
        raise ValueError("A sample is empty: take at least one draw.")
    if not (np.all(np.isfinite(first)) and np.all(np.isfinite(second))):
        raise ValueError("A sample has NaN or infinite entries: take finite draws.")
    kernel = Gaussian() if kernel is None else kernel
    bandwidth = median_bandwidth(second[:: 1 + len(second) // 500].T)
    within = _mean_kernel(kernel, first, first, bandwidth)
    between = _mean_kernel(kernel, first, second, bandwidth)
    distance = within - 2.0 * between + _mean_kernel(kernel, second, second, bandwidth)
    return math.sqrt(max(distance, 0.0))


def _mean_kernel(kernel, x, y, bandwidth):
    blocks = np.array_split(x, 1 + len(x) * len(y) // 2_000_000)
    return sum(kernel(block, y, bandwidth).sum() for block in blocks) / (len(x) * len(y))


def _selected(name, result, var_names):
    posterior = group_dataset(result, "posterior")
    if var_names is None:
        return posterior
    names = [var_names] if isinstance(var_names, str) else list(var_names)
    missing = [variable for variable in names if variable not in posterior]
    if missing or not names:
        raise ValueError(
            f"var_names={var_names!r}: the posterior of {name!r} holds "
            f"{', '.join(map(str, posterior.data_vars))}; take some of these, or leave it out."
        )
    return posterior[names]


def _raveled(posterior) -> np.ndarray:
    """All elements of all variables, shape (chains, draws, d)."""
    shape = posterior.sizes["chain"], posterior.sizes["draw"], -1
    values = [
        variable.transpose("chain", "draw", ...).values.astype(float).reshape(shape)
        for variable in posterior.data_vars.values()
    ]
    return np.concatenate(values, axis=2)


def _statistics(statistics, counter, steps_per_draw):
    """Mean acceptance and evaluations, of sampler statistics (chains, draws, ...)."""
    values = {} if statistics is None else {name: statistics[name].values for name in statistics}
    row = {"acceptance": math.nan, "evaluations": math.nan, "evaluations_percent": math.nan}
    for name in ACCEPTANCE_STATISTICS:
        if name in values:
            row["acceptance"] = float(np.minimum(values[name], 1.0).mean())
            break
    if counter in values:
        if steps_per_draw is None:
            steps_per_draw = float(np.mean(values.get("n_transitions", 1.0)))
        row["evaluations"] = float(values[counter].sum())
        row["evaluations_percent"] = 100.0 * float(values[counter].mean()) / steps_per_draw
    return row


def _quality(draws):
    row = {"chains": draws.shape[0], "draws": draws.shape[1], "esjd": _mean_squared_jump(draws)}
    row |= {"ess_bulk": math.nan, "ess_tail": math.nan, "rhat": math.nan}
    moving = draws[:, :, ~(draws == draws[:1, :1]).all(axis=(0, 1))]
    if moving.size:
        dataset = xr.Dataset({"x": (("chain", "draw", "element"), moving)})
        row["ess_bulk"] = float(az.ess(dataset, method="bulk")["x"].values.min())
        row["ess_tail"] = float(az.ess(dataset, method="tail", prob=TAILS)["x"].values.min())
        if len(moving) > 1:
            row["rhat"] = float(az.rhat(dataset)["x"].values.max())
    return row


def _mean_squared_jump(draws):
    if draws.shape[1] < 2:
        return math.nan
    return float((np.diff(draws, axis=1) ** 2).sum(axis=2).mean())


def _seconds(name, posterior, given):
    if given is not None:
        return checked_number(f"seconds of {name!r}", given, above=0)
    value = posterior.attrs.get("sampling_time")
    return float(value) if isinstance(value, numbers.Real) else math.nan
