r"""Hares and lynx of the Hudson Bay: an ODE model without gradients, sampled in two ways.

Run it with ``python -m pymc_kameleon``. The model is that of Carpenter (2018),
https://mc-stan.org/users/documentation/case-studies/lotka-volterra-predator-prey.html:
:math:`u' = (\alpha - \beta v) u,\; v' = (-\gamma + \delta u) v`, with log-normal observations.
"""

import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.integrate import ODEintWarning, odeint
from scipy.stats import gaussian_kde

from pymc_kameleon.diagnostics import efficiency_table
from pymc_kameleon.model.black_box import black_box
from pymc_kameleon.model.initial_points import dispersed_starts
from pymc_kameleon.model.transforms import unconstraining_function
from pymc_kameleon.plots.common import INK, STYLE
from pymc_kameleon.steps import KameleonStep

__all__ = ["log_solution", "lynx_hare_model", "plausible_starts", "run_demo"]

CHAINS, SEED = 4, 1900
STEPS_PER_DRAW = 20
STARTS_PER_CHAIN = 150
LARGEST_R_HAT = 1.01

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

# Failures come back as NaN. A filter around each call would make Python forget which warnings it
# has shown already, and those of other code would be shown again and again.
warnings.filterwarnings("ignore", category=ODEintWarning, module=re.escape(__name__))


def log_solution(
    log_derivative: Callable, start: Any, times: np.ndarray, rates, tolerance: float = 1e-8
) -> np.ndarray:
    """Logarithms of a positive solution at `times`, all NaN where the solver fails.

    Logarithms are what log-normal observations need, stay accurate where a population almost dies
    out, and take half the steps. `log_derivative` takes them, the time and the rates; `tolerance`
    is that of the solver, absolute and relative.
    """
    failed = np.full((len(times), len(start)), np.nan)
    if not all(0 < value < math.inf for value in start):
        return failed
    options = {"rtol": tolerance, "atol": tolerance, "mxstep": 2000, "full_output": True}
    try:
        solution, report = odeint(
            log_derivative, [math.log(x) for x in start], times, args=tuple(rates), **options
        )
    except (ODEintWarning, OverflowError):
        return failed
    solved = report["message"] == "Integration successful." and np.isfinite(solution).all()
    return solution if solved else failed


def _log_derivative(log_populations, time, alpha, beta, gamma, delta):
    log_hares, log_lynx = log_populations.tolist()
    return alpha - beta * math.exp(log_lynx), delta * math.exp(log_hares) - gamma


def log_populations(
    parameters: np.ndarray, times: np.ndarray, tolerance: float = 1e-8
) -> np.ndarray:
    """Logarithms of hares and lynx (n_times, 2), of the rates and of the populations at first."""
    *rates, hares, lynx = np.asarray(parameters, dtype=float).tolist()
    return log_solution(_log_derivative, (hares, lynx), times, rates, tolerance)


@black_box(shape=(len(YEARS), 2))
def log_trajectory(parameters):
    """Return log populations in all years: to PyTensor a black box without a gradient."""
    return log_populations(parameters, YEARS - YEARS[0])


def lynx_hare_model(log_trajectory: Callable = log_trajectory) -> pm.Model:
    """Model the pelts of 1900 to 1920: rates per year, thousands of pelts, scales of errors."""
    with pm.Model(coords={"year": YEARS}) as model:
        alpha = pm.TruncatedNormal("alpha", mu=1.0, sigma=0.5, lower=0.0)
        beta = pm.TruncatedNormal("beta", mu=0.05, sigma=0.05, lower=0.0)
        gamma = pm.TruncatedNormal("gamma", mu=1.0, sigma=0.5, lower=0.0)
        delta = pm.TruncatedNormal("delta", mu=0.05, sigma=0.05, lower=0.0)
        hares = pm.LogNormal("u0", mu=math.log(10.0), sigma=1.0)
        lynx = pm.LogNormal("v0", mu=math.log(10.0), sigma=1.0)
        sigma_hare = pm.LogNormal("sigma_hare", mu=-1.0, sigma=1.0)
        sigma_lynx = pm.LogNormal("sigma_lynx", mu=-1.0, sigma=1.0)
        log_mean = log_trajectory(pt.stack([alpha, beta, gamma, delta, hares, lynx]))
        pm.LogNormal("hare", log_mean[:, 0], sigma_hare, observed=HARE_PELTS, dims="year")
        pm.LogNormal("lynx", log_mean[:, 1], sigma_lynx, observed=LYNX_PELTS, dims="year")
    return model


def plausible_starts(
    model: pm.Model, chains: int, random_seed: int | None
) -> list[dict[str, np.ndarray]]:
    """Start each chain at the best of many dispersed rates, with the other parameters at a guess.

    The posterior has a minor mode, 40 log units below the main one, where populations swing twice
    as fast and the rest is noise; a chain that starts there stays. With the populations of 1900 as
    counted and small observation errors, only rates with the right rhythm have some density.
    """
    guess = {"u0": HARE_PELTS[0], "v0": LYNX_PELTS[0], "sigma_hare": 0.25, "sigma_lynx": 0.25}
    guess = {name: np.array(value) for name, value in guess.items()}
    starts = dispersed_starts(model, STARTS_PER_CHAIN * chains, random_seed)
    starts = [start | guess for start in starts]
    unconstrain = unconstraining_function(model)
    log_density = model.compile_logp(mode="FAST_COMPILE")
    names = [value.name for value in model.value_vars]
    heights = [
        float(log_density(dict(zip(names, unconstrain(*start.values()), strict=True))))
        for start in starts
    ]
    best = np.reshape(heights, (chains, STARTS_PER_CHAIN)).argmax(axis=1)
    return [starts[chain * STARTS_PER_CHAIN + best[chain]] for chain in range(chains)]


def sample_both(draws: int, tune: int) -> dict[str, Any]:
    """Results of KameleonStep and DEMetropolisZ at equal numbers of evaluations.

    ``pymc.DEMetropolisZ`` evaluates the log density at both points of every proposal, KameleonStep
    only at the new one: for each draw of KameleonStep it gets half as many as that has transitions.
    """
    with lynx_hare_model() as model, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numba will use object mode", UserWarning)
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        options: dict[str, Any] = {
            "chains": CHAINS,
            "cores": min(CHAINS, os.cpu_count() or 1),
            "initvals": plausible_starts(model, CHAINS, SEED),
            "random_seed": SEED,
            "discard_tuned_samples": False,
            "compute_convergence_checks": False,  # the report says whose chains they are
        }
        print(f"KameleonStep: {CHAINS} chains, {tune} + {draws} draws of {STEPS_PER_DRAW} moves")
        step = KameleonStep(steps_per_draw=STEPS_PER_DRAW)
        kameleon = pm.sample(draws=draws, tune=tune, step=step, **options)
        draws, tune = draws * STEPS_PER_DRAW // 2, tune * STEPS_PER_DRAW // 2
        print(f"DEMetropolisZ: {CHAINS} chains, {tune} + {draws} draws of one move")
        differential = pm.sample(draws=draws, tune=tune, step=pm.DEMetropolisZ(), **options)
    return {"KameleonStep": kameleon, "DEMetropolisZ": differential}


def report(results: dict[str, Any]) -> str:
    """Tables of the posterior by each sampler, and of effective draws and their costs."""
    text = ""
    for name, result in results.items():
        table = az.summary(result, var_names=list(PARAMETERS), round_to="none")
        table = table[["mean", "sd", "ess_bulk", "ess_tail", "r_hat"]].astype(float)
        # Each ArviZ has other quantiles by default.
        tail = az.ess(result, var_names=list(PARAMETERS), method="tail", prob=(0.05, 0.95))
        table["ess_tail"] = [float(tail[variable]) for variable in PARAMETERS]
        text += f"\n{name}\n{table.to_string(float_format='{:.4g}'.format)}\n"
        if not (table["r_hat"] <= LARGEST_R_HAT).all():
            worst, largest = table["r_hat"].idxmax(), table["r_hat"].max()
            text += (
                f"R-hat of {name} is up to {largest:.3f} ({worst}), above {LARGEST_R_HAT}: its "
                "chains\ndo not agree yet, and it needs more draws.\n"
            )
    table = efficiency_table(results, var_names=PARAMETERS)
    # DEMetropolisZ has no statistic of it.
    table["evaluations"] = table["evaluations"].fillna(2 * table["chains"] * table["draws"])
    table["ess_bulk_per_evaluation"] = table["ess_bulk"] / table["evaluations"]
    shown = table.drop(columns=["chains", "esjd", "evaluations_percent"])
    return text + (
        "\nThe parameter that each sampler samples worst:\n"
        + shown.T.to_string(float_format="{:.4g}".format)
        + "\nSeconds are those of tuning and sampling, without compiling; evaluations those after"
        "\ntuning. DEMetropolisZ evaluates both points of a proposal, KameleonStep the new one."
    )


def run_demo(output: Path, *, draws: int = 400, tune: int = 200) -> None:
    """Sample the model in both ways, print a report, and write results and picture to a folder."""
    output.mkdir(parents=True, exist_ok=True)
    results = sample_both(draws, tune)
    print(report(results))
    print("\nWritten:")
    for name, result in results.items():
        path = output / f"{name}.nc"
        result.to_netcdf(str(path))
        print(f"  {path.resolve()}")
    path = output / "lynx_hare.png"
    lynx_hare_figure(results).savefig(path, dpi=150)
    print(f"  {path.resolve()}")


# the picture --------------------------------------------------------------------------------------

DARK, LIGHT = "#7a6fb8", "#cbc6e8"
RATE_LABELS = (
    r"$\alpha$  (hare births)",
    r"$\beta$  (hares eaten)",
    r"$\gamma$  (lynx deaths)",
    r"$\delta$  (lynx births)",
)
SPECIES = (("Hares", HARE_PELTS, "#b8682a"), ("Lynx", LYNX_PELTS, "#1f7a85"))


def lynx_hare_figure(results: dict[str, Any]) -> Figure:
    """Draw data, trajectories of the first result, and pairs of rates of both."""
    first, second = results
    with rc_context(STYLE | {"font.size": 11}):
        figure = Figure(figsize=(10, 11.5), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.2], squeeze=False)[:, 0]
        title = {"x": 0.015, "ha": "left", "weight": "bold"}
        top.suptitle("Lynx and hares of the Hudson Bay, 1900 to 1920", size=17, **title)
        trajectory_axes = top.subplots(2, 1, sharex=True)
        _draw_trajectories(trajectory_axes, results[first])
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
        _draw_pairs(pair_axes, [_thinned(result, RATES, 2000) for result in results.values()])
        handles = [
            Patch(color=DARK, label=f"{first}: draws, 50% region"),
            Patch(color=LIGHT, label=f"{first}: 90% region"),
            Line2D([], [], color=INK, ls="--", lw=1, label=f"{second}: the same"),
        ]
        legend = pair_axes[0, 2].legend(handles=handles, loc="upper left", borderaxespad=0.0)
        legend.set_in_layout(False)
        note = "Per year; $\\beta$ and $\\delta$ also per thousand pelts."
        pair_axes[0, 2].text(0.04, 0.2, note, transform=pair_axes[0, 2].transAxes, in_layout=False)
    return figure


def _thinned(result, names, size):
    draws = np.column_stack([result["posterior"][name].values.ravel() for name in names])
    return draws[np.linspace(0, len(draws) - 1, min(size, len(draws)), dtype=int)]


def _draw_trajectories(axes, result):
    """Draw pelts with 90% bands of the ODE's solution and of new observations."""
    times = np.linspace(0.0, 20.0, 201)
    draws = _thinned(result, PARAMETERS, 500)
    log_means = np.array([log_populations(draw[:6], times) for draw in draws])
    # One error for a whole trajectory: the band at each time is the same and comes out smooth.
    noise = np.random.default_rng(0).standard_normal((20, len(draws), 1, 2))
    replicates = (log_means + draws[:, None, 6:] * noise).reshape(-1, *log_means.shape[1:])
    for i, (axis, (title, pelts, color)) in enumerate(zip(axes, SPECIES, strict=True)):
        new_low, new_high = np.exp(np.quantile(replicates[..., i], [0.05, 0.95], axis=0))
        low, middle, high = np.exp(np.quantile(log_means[..., i], [0.05, 0.5, 0.95], axis=0))
        axis.fill_between(YEARS[0] + times, new_low, new_high, color=color, alpha=0.15, lw=0)
        axis.fill_between(YEARS[0] + times, low, high, color=color, alpha=0.40, lw=0)
        axis.plot(YEARS[0] + times, middle, color=color, lw=1.8)
        axis.plot(YEARS, pelts, "o", color=INK, ms=5, mec="white", mew=0.8, zorder=3)
        axis.set_title(title, loc="left", color=color, weight="bold", size=13)
        axis.set(xlim=(1899.5, 1920.5), ylabel="Thousands of pelts")
        axis.set_ylim(0, 1.05 * max(new_high.max(), pelts.max()))
        axis.set_xticks(YEARS[::2])


def _draw_pairs(axes, draws):
    """Draw marginals on the diagonal and pairs of rates below it, one layer a sampler."""
    low, high = np.quantile(np.concatenate(draws), [0.002, 0.998], axis=0)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    last = len(axes) - 1
    for (row, column), axis in np.ndenumerate(axes):
        if column > row:
            axis.set_axis_off()
            continue
        axis.set_xlim(low[column], high[column])
        if row > column:
            axis.set_ylim(low[row], high[row])
            for layer, points in enumerate(draws):
                _draw_regions(axis, points[:, [column, row]], layer)
        else:
            bins = np.linspace(low[row], high[row], 36)
            axis.hist(draws[0][:, row], bins, density=True, color=DARK, alpha=0.75)
            axis.hist(draws[1][:, row], bins, density=True, histtype="step", color=INK, ls="--")
            axis.spines["left"].set_visible(False)
        axis.locator_params(axis="both", nbins=3)
        if row == column:
            axis.set_yticks([])
        axis.tick_params(labelbottom=row == last, labelleft=column == 0 < row)
        if row == last:
            axis.set_xlabel(RATE_LABELS[column])
        if column == 0 < row:
            axis.set_ylabel(RATE_LABELS[row])


def _draw_regions(axis, draws, layer):
    """Draw the regions that hold 50% and 90% of the draws of two parameters."""
    try:
        density = gaussian_kde(draws.T)
    except np.linalg.LinAlgError:  # chains that have hardly moved
        axis.plot(*draws.T, ".", color=INK)
        return
    heights = np.sort(density(draws.T))
    levels = [heights[int(0.1 * len(heights))], heights[int(0.5 * len(heights))]]
    grid = np.meshgrid(*(np.linspace(*limits, 70) for limits in (axis.get_xlim(), axis.get_ylim())))
    values = density(np.reshape(grid, (2, -1))).reshape(grid[0].shape)
    if layer == 0:
        top = [*levels, max(values.max(), 1.01 * levels[-1])]
        axis.contourf(*grid, values, levels=top, colors=[LIGHT, DARK])
    else:
        axis.contour(*grid, values, levels=levels, colors=INK, linewidths=1.0, linestyles="--")
