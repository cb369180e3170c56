"""Hares and lynx of the Hudson Bay: an ODE model without gradients, sampled in two ways.

The model is the predator and prey case study of Carpenter (2018),
https://mc-stan.org/users/documentation/case-studies/lotka-volterra-predator-prey.html,
with the differential equation solved by SciPy inside an Op that PyTensor cannot see into.
Run it with ``python -m pymc_kameleon``.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pytensor.graph import Apply, Op
from scipy.integrate import ODEintWarning, odeint
from scipy.stats import gaussian_kde

from pymc_kameleon import KameleonStep
from pymc_kameleon.starts import dispersed_starts

__all__ = [
    "HARE_PELTS",
    "LYNX_PELTS",
    "PARAMETERS",
    "YEARS",
    "LotkaVolterra",
    "SamplerRun",
    "comparison_table",
    "lynx_hare_figure",
    "lynx_hare_model",
    "run_demo",
    "sample_both",
    "solve_lotka_volterra",
    "summary_table",
]

DRAWS = 1000
TUNE = 500
CHAINS = 4
STEPS_PER_DRAW = 20
QUICK_DRAWS = 50
QUICK_TUNE = 50
SEED = 1900

SOLVER_TOLERANCE = 1e-8
SOLVER_MAX_STEPS = 2000
# Failures come back as NaN. A filter around each call would make Python forget which warnings it
# has shown already, and those of other code would be shown again and again.
warnings.filterwarnings("ignore", category=ODEintWarning, module=re.escape(__name__))

YEARS = np.arange(1900, 1921)
# Thousands of pelts collected by the Hudson's Bay Company.
# fmt: off
HARE_PELTS = np.array([
    30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1,
    40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7,
])
LYNX_PELTS = np.array([
    4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4,
    8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6,
])
# fmt: on
RATES = ("alpha", "beta", "gamma", "delta")
PARAMETERS = (*RATES, "u0", "v0", "sigma_hare", "sigma_lynx")

INK = "#2b2d33"
POSTERIOR_COLORS = ["#cbc6e8", "#7a6fb8"]
RATE_LABELS = (
    r"$\alpha$  (hare births)",
    r"$\beta$  (hares eaten)",
    r"$\gamma$  (lynx deaths)",
    r"$\delta$  (lynx births)",
)
SPECIES = (("Hares", HARE_PELTS, "#b8682a"), ("Lynx", LYNX_PELTS, "#1f7a85"))
STYLE = {
    "axes.edgecolor": "#8a8d94",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def _log_derivative(
    log_populations: np.ndarray, time: float, alpha: float, beta: float, gamma: float, delta: float
) -> tuple[float, float]:
    log_hares, log_lynx = log_populations.tolist()
    return alpha - beta * math.exp(log_lynx), delta * math.exp(log_hares) - gamma


def solve_lotka_volterra(parameters: np.ndarray, times: np.ndarray) -> np.ndarray:
    r"""Solve the Lotka--Volterra equations for the logarithms of both populations.

    .. math:: u' = (\alpha - \beta v) u, \qquad v' = (-\gamma + \delta u) v

    The logarithms are what the log-normal observations need, stay accurate where a population
    almost dies out, and take half the steps.

    Parameters
    ----------
    parameters : array of float, shape (6,)
        alpha, beta, gamma, delta (per year) and the populations u0 of hares and v0 of lynx at
        ``times[0]`` (thousands of pelts).
    times : array of float, shape (n_times,)
        Increasing times in years.

    Returns
    -------
    array of float, shape (n_times, 2)
        Logarithms of hares and lynx, all NaN where the solver fails.
    """
    *rates, hares, lynx = np.asarray(parameters, dtype=float).tolist()
    failed = np.full((len(times), 2), np.nan)
    if not (0 < hares < math.inf and 0 < lynx < math.inf):
        return failed
    try:
        solution, report = odeint(
            _log_derivative,
            [math.log(hares), math.log(lynx)],
            times,
            args=tuple(rates),
            rtol=SOLVER_TOLERANCE,
            atol=SOLVER_TOLERANCE,
            mxstep=SOLVER_MAX_STEPS,
            full_output=True,
        )
    except (ODEintWarning, OverflowError):
        return failed
    solved = report["message"] == "Integration successful." and np.isfinite(solution).all()
    return solution if solved else failed


class LotkaVolterra(Op):
    """A black box for PyTensor: log populations at fixed times, without a gradient.

    Parameters
    ----------
    times : sequence of float
        Times in years, the first one being that of the initial populations.
    """

    __props__ = ("times",)

    def __init__(self, times: Sequence[float]) -> None:
        self.times = tuple(float(time) for time in times)

    def make_node(self, parameters: Any) -> Apply:
        """Wrap a vector of the six parameters of :func:`solve_lotka_volterra`."""
        parameters = pt.cast(pt.as_tensor_variable(parameters), "float64")
        return Apply(self, [parameters], [pt.dmatrix(shape=(len(self.times), 2))])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        """Solve the equations."""
        outputs[0][0] = solve_lotka_volterra(inputs[0], np.asarray(self.times))


def lynx_hare_model() -> pm.Model:
    """Build the predator and prey model of the pelts of 1900 to 1920.

    Returns
    -------
    pymc.Model
        Eight parameters: the rates ``alpha``, ``beta``, ``gamma``, ``delta`` per year, the
        populations ``u0`` of hares and ``v0`` of lynx in 1900 in thousands of pelts, and the
        scales ``sigma_hare`` and ``sigma_lynx`` of the log-normal observations.
    """
    with pm.Model(coords={"year": YEARS}) as model:
        alpha = pm.TruncatedNormal("alpha", mu=1.0, sigma=0.5, lower=0.0)
        beta = pm.TruncatedNormal("beta", mu=0.05, sigma=0.05, lower=0.0)
        gamma = pm.TruncatedNormal("gamma", mu=1.0, sigma=0.5, lower=0.0)
        delta = pm.TruncatedNormal("delta", mu=0.05, sigma=0.05, lower=0.0)
        hares = pm.LogNormal("u0", mu=math.log(10.0), sigma=1.0)
        lynx = pm.LogNormal("v0", mu=math.log(10.0), sigma=1.0)
        sigma_hare = pm.LogNormal("sigma_hare", mu=-1.0, sigma=1.0)
        sigma_lynx = pm.LogNormal("sigma_lynx", mu=-1.0, sigma=1.0)
        solve = LotkaVolterra(YEARS - YEARS[0])
        log_mean = solve(pt.stack([alpha, beta, gamma, delta, hares, lynx]))
        pm.LogNormal("hare", log_mean[:, 0], sigma_hare, observed=HARE_PELTS, dims="year")
        pm.LogNormal("lynx", log_mean[:, 1], sigma_lynx, observed=LYNX_PELTS, dims="year")
    return model


@dataclass(frozen=True)
class SamplerRun:
    """What one sampler returned and what it spent.

    Parameters
    ----------
    name : str
        Name of the step method.
    idata : InferenceData or DataTree
        Result of ``pymc.sample``, tuning included.
    proposals, evaluations : int
        Proposed moves and evaluations of the log density after tuning, over all chains.
    tuning_evaluations : int
        Evaluations of the log density during tuning, over all chains.
    """

    name: str
    idata: Any
    proposals: int
    evaluations: int
    tuning_evaluations: int

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of tuning and sampling; compiling is not in it."""
        return float(self.idata["posterior"].attrs["sampling_time"])


def sample_both(
    model: pm.Model,
    *,
    draws: int = DRAWS,
    tune: int = TUNE,
    chains: int = CHAINS,
    steps_per_draw: int = STEPS_PER_DRAW,
    random_seed: int | None = None,
    progressbar: bool = True,
) -> list[SamplerRun]:
    """Sample a model with KameleonStep and DEMetropolisZ at equal numbers of evaluations.

    ``pymc.DEMetropolisZ`` evaluates the log density at both points of every proposal, KameleonStep
    only at the new one, so DEMetropolisZ gets ``steps_per_draw / 2`` draws for each of
    KameleonStep's.

    Parameters
    ----------
    model : pymc.Model
        A model whose free variables are all continuous.
    draws, tune : int
        Draws and tuning draws of KameleonStep in each chain.
    chains : int
        Number of chains; both samplers start them at the same dispersed points.
    steps_per_draw : int
        Transitions in each draw of KameleonStep.
    random_seed : int, optional
        Seed of starts and chains.
    progressbar : bool
        Whether to show the progress of sampling.

    Returns
    -------
    list of SamplerRun
    """
    with model, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numba will use object mode", UserWarning)
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        arguments: dict[str, Any] = {
            "chains": chains,
            "cores": min(chains, os.cpu_count() or 1),
            "initvals": dispersed_starts(model, chains, random_seed),
            "random_seed": random_seed,
            "discard_tuned_samples": False,
            "progressbar": progressbar,
        }
        print(f"KameleonStep: {chains} chains, {tune} + {draws} draws of {steps_per_draw} moves")
        step = KameleonStep(steps_per_draw=steps_per_draw)
        idata = pm.sample(draws=draws, tune=tune, step=step, **arguments)
        kameleon = SamplerRun(
            "KameleonStep",
            idata,
            chains * draws * steps_per_draw,
            int(idata["sample_stats"]["n_evals"].sum()),
            int(idata["warmup_sample_stats"]["n_evals"].sum()) if tune else 0,
        )
        draws, tune = draws * steps_per_draw // 2, tune * steps_per_draw // 2
        print(f"DEMetropolisZ: {chains} chains, {tune} + {draws} draws of one move")
        idata = pm.sample(draws=draws, tune=tune, step=pm.DEMetropolisZ(), **arguments)
    proposals = chains * draws
    differential = SamplerRun("DEMetropolisZ", idata, proposals, 2 * proposals, 2 * chains * tune)
    return [kameleon, differential]


def summary_table(idata: Any) -> pd.DataFrame:
    """Posterior summary with the columns that every ArviZ has, in full precision.

    Parameters
    ----------
    idata : InferenceData or DataTree
        Result of ``pymc.sample``.

    Returns
    -------
    pandas.DataFrame
        One row a parameter; columns mean, sd, ess_bulk, ess_tail, r_hat.
    """
    columns = ["mean", "sd", "ess_bulk", "ess_tail", "r_hat"]
    summary = az.summary(idata, var_names=list(PARAMETERS), round_to="none")[columns].astype(float)
    tail = az.ess(idata, var_names=list(PARAMETERS), method="tail", prob=(0.05, 0.95))
    return summary.assign(ess_tail=[float(tail[name]) for name in PARAMETERS])


def comparison_table(runs: Sequence[SamplerRun]) -> pd.DataFrame:
    """Compare samplers by the parameter that each of them samples worst.

    Parameters
    ----------
    runs : sequence of SamplerRun
        Results to compare.

    Returns
    -------
    pandas.DataFrame
        One row a sampler. Effective sample sizes (ESS) per second count tuning in, those per 1000
        evaluations count the evaluations after tuning.
    """
    rows = {}
    for run in runs:
        summary = summary_table(run.idata)
        bulk = summary["ess_bulk"].min()
        rows[run.name] = {
            "max R-hat": summary["r_hat"].max(),
            "min bulk ESS": bulk,
            "min tail ESS": summary["ess_tail"].min(),
            "seconds": run.seconds,
            "ESS / s": bulk / run.seconds,
            "ESS / 1000 evals": 1000 * bulk / run.evaluations,
            "proposals": run.proposals,
            "evals": run.evaluations,
            "tuning evals": run.tuning_evaluations,
        }
    counts = ["proposals", "evals", "tuning evals"]
    return pd.DataFrame(rows).T.astype(dict.fromkeys(counts, int))


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
    grids = [np.linspace(*limits, 70) for limits in (axis.get_xlim(), axis.get_ylim())]
    x, y = np.meshgrid(*grids)
    values = density(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    if run_index == 0:
        top = [*levels, max(values.max(), 1.01 * levels[-1])]
        axis.contourf(x, y, values, levels=top, colors=POSTERIOR_COLORS)
    else:
        axis.contour(x, y, values, levels=levels, colors=INK, linewidths=1.0, linestyles="--")


def _draw_pairs(axes: np.ndarray, runs: Sequence[SamplerRun]) -> None:
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


def lynx_hare_figure(runs: Sequence[SamplerRun]) -> Figure:
    """Draw data, fitted trajectories and posterior pairs.

    Parameters
    ----------
    runs : sequence of SamplerRun
        Results of :func:`sample_both`; the trajectories are those of the first.

    Returns
    -------
    matplotlib.figure.Figure
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 11.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.2])
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


def run_demo(
    output: Path,
    *,
    draws: int = DRAWS,
    tune: int = TUNE,
    chains: int = CHAINS,
    random_seed: int | None = None,
    progressbar: bool = True,
) -> list[SamplerRun]:
    """Sample the lynx--hare model with both samplers, report, and write results and a picture.

    Parameters
    ----------
    output : Path
        Folder to write to; made where it does not exist.
    draws, tune, chains, random_seed, progressbar
        See :func:`sample_both`.

    Returns
    -------
    list of SamplerRun
    """
    output.mkdir(parents=True, exist_ok=True)
    runs = sample_both(
        lynx_hare_model(),
        draws=draws,
        tune=tune,
        chains=chains,
        random_seed=random_seed,
        progressbar=progressbar,
    )
    for run in runs:
        print(f"\n{run.name}\n{summary_table(run.idata).to_string(float_format='{:.4g}'.format)}")
    print("\nThe parameter that each sampler samples worst:")
    print(comparison_table(runs).to_string(float_format="{:.4g}".format))
    print(
        "Seconds are those of tuning and sampling, without compiling; ESS / 1000 evals leaves"
        "\ntuning out. DEMetropolisZ evaluates both points of a proposal, KameleonStep the new one."
    )
    print("\nWritten:")
    for run in runs:
        path = output / f"{run.name}.nc"
        run.idata.to_netcdf(str(path))
        print(f"  {path.resolve()}")
    path = output / "lynx_hare.png"
    lynx_hare_figure(runs).savefig(path, dpi=150)
    print(f"  {path.resolve()}")
    return runs
