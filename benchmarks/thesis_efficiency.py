"""Section 5.1 of the F-KAMH thesis (Kotlicki 2015): effective draws of F-KAMH and of KAMH."""

import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from benchmarks.common import SEED, DrivenStep, heading, show, write
from benchmarks.thesis_convergence import COLORS, EXPERIMENTS
from pymc_kameleon import FastKameleonStep, KameleonStep

__all__ = ["add_arguments", "run"]

LENGTH, DROPPED, ADAPTED, PILOT = 20_000, 5_000, 15_000, 4_000
"""Transitions of a chain, those dropped, those in which KAMH adapts, and those of a pilot run."""

GAMMA = 0.5
N_FEATURES = (10, 20, 50, 100, 200, 350, 600)
SUBSAMPLES = (600, 1000)
CLAIMED = (50, 350)
"""Range of D, ends excluded, in which F-KAMH is published to be better in ESS per second."""

QUANTILES = np.arange(1, 10) / 10
CONFIDENCE, N_BOOTSTRAPS = 0.95, 4000
MEASURES = ["bulk", "bulk low", "bulk high", "initial", "mse", "mse low", "mse high", "q error"]
MEASURES += ["bulk/s", "initial/s", "mse/s"]
PANELS = ["bulk", "bulk/s", "mse", "mse/s"]
LABELS = {
    "bulk": "ESS (bulk)",
    "bulk/s": "ESS (bulk) per CPU second",
    "mse": r"effective draws, by the error of $E[x_1^2]$",
    "mse/s": "those per CPU second",
}
KAMH_STYLES = [(0, (4, 2)), "-", ":"]

Sampler = tuple[str, str, int]
"""Name, embedding or how often the subsample is redrawn, number of features or points."""


def samplers(n_features) -> list[Sampler]:
    """All that are compared; those of KAMH first."""
    kamh = [("KAMH", "every transition", n) for n in SUBSAMPLES]
    kamh.append(("KAMH", "seldom", SUBSAMPLES[-1]))
    return kamh + [("F-KAMH", embedding, n) for n in n_features for embedding in COLORS]


def add_arguments(parser):
    parser.add_argument("--runs", type=int, default=8, help="published: 50")
    parser.add_argument("--features", type=int, nargs="+", default=list(N_FEATURES), metavar="D")
    parser.add_argument("--share", type=float, default=1.0, help="of the published length")
    parser.add_argument("--quick", action="store_true", help="2 runs, a tenth of the length, few D")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    choices = {"nargs": "+", "choices": EXPERIMENTS, "default": list(EXPERIMENTS)}
    parser.add_argument("--targets", **choices)


# chains ---------------------------------------------------------------------------------------


@cache
def model(target: str):
    """Return the same model to all the steps of a process."""
    return EXPERIMENTS[target].target.model()


def make_step(target: str, sampler: Sampler, scaling: float | None, learning_decay: float):
    """Make a step as published, inside a model; `scaling` None is that of the class method."""
    name, kind, size = sampler
    options = {"bandwidth": EXPERIMENTS[target].bandwidth, "gamma": GAMMA}
    options |= {"learning_rate": 1.0, "learning_decay": learning_decay}
    if scaling is not None:
        options["scaling"] = scaling
    if name == "F-KAMH":
        return FastKameleonStep.thesis(n_features=size, embedding=kind, **options)
    if kind == "seldom":
        options["adaptation"] = None
    return KameleonStep.paper(n_subsample=size, **options)


@cache
def driven_step(target: str, sampler: Sampler, scaling: float) -> DrivenStep:
    """Make a step and warm it up: all that it runs is compiled."""
    driven = DrivenStep(model(target), partial(make_step, target, sampler, scaling, 1.0))
    driven.tune(700)
    driven.draw(10)
    return driven


def start(target: str, seed: int) -> dict[str, np.ndarray]:
    """Exact draw, the same for all samplers of a run."""
    return {"x": EXPERIMENTS[target].target.draw(1, np.random.default_rng(seed))[0]}


@cache
def pilot(target: str, sampler: Sampler, length: int) -> float:
    """Scaling that a trial run learns, to begin with."""
    driven = DrivenStep(model(target), partial(make_step, target, sampler, None, 0.5))
    driven.begin(SEED - 1)
    driven.point = start(target, SEED - 1)
    driven.draw(length)
    return float(np.exp(driven.step.learner.scaling.log[0]))


def chain(target: str, sampler: Sampler, seed: int, share: float) -> dict:
    """Make one chain of which every transition is stored, and measure it."""
    driven = driven_step(target, sampler, pilot(target, sampler, round(share * PILOT)))
    driven.begin(seed)
    point, step = start(target, seed), driven.step.step
    length, dropped, adapted = (round(share * n) for n in (LENGTH, DROPPED, ADAPTED))
    draws, accepted = np.empty((length, len(point["x"]))), 0.0
    began = time.process_time()
    for t in range(length):
        if t == adapted:
            driven.step.stop_tuning()
        point, (statistics,) = step(point)
        draws[t] = point["x"]
        accepted += statistics["accepted"]
    seconds = time.process_time() - began
    row = {"target": target, "sampler": sampler[0], "kind": sampler[1], "size": sampler[2]}
    row |= {"seed": seed, "seconds": seconds, "us": 1e6 * seconds / length}
    row |= {"accepted": accepted / length, "scaling": statistics["scaling"]}
    return row | measures(EXPERIMENTS[target].target, draws[dropped:])


# measures -------------------------------------------------------------------------------------


def initial_sequence_size(x: np.ndarray) -> float:
    """Effective sample size by the initial monotone sequence of Geyer (1992)."""
    n = len(x)
    spectrum = np.fft.rfft(x - x.mean(), 2 * n)
    autocovariances = np.fft.irfft(np.abs(spectrum) ** 2)[:n] / n
    pairs = autocovariances[: n - n % 2].reshape(-1, 2).sum(axis=1)
    first = np.argmax(pairs <= 0) if np.any(pairs <= 0) else len(pairs)
    variance = 2 * np.minimum.accumulate(pairs[:first]).sum() - autocovariances[0]
    return n * autocovariances[0] / variance


def measures(target, draws: np.ndarray) -> dict[str, float]:
    """ESS of the first two coordinates, the mean of x1^2, and the mean error of quantiles."""
    posterior = xr.Dataset({"x": (("chain", "draw", "coordinate"), draws[None, :, :2])})
    return {
        "bulk": float(az.ess(posterior, method="bulk")["x"].mean()),
        "initial": np.mean([initial_sequence_size(x) for x in draws[:, :2].T]),
        "square": np.mean(draws[:, 0] ** 2),
        "q error": target.quantile_error(draws, QUANTILES).mean(),
    }


def resampled(n_runs: int) -> np.ndarray:
    """Runs as they are, and bootstrapped ones; an index array (1 + n, n_runs)."""
    chosen = np.random.default_rng(SEED).integers(n_runs, size=(N_BOOTSTRAPS, n_runs))
    return np.vstack([np.arange(n_runs), chosen])


def estimates(runs: pd.DataFrame, measure: str) -> np.ndarray:
    """Evaluate a measure of one sampler on all that `resampled` gives."""
    name, chosen = measure.removesuffix("/s"), resampled(len(runs))
    if name == "mse":
        variance = EXPERIMENTS[runs["target"].iloc[0]].target.variance
        errors = (runs["square"].to_numpy() - variance) ** 2
        values = 2 * variance**2 / errors[chosen].mean(axis=1)
    else:
        values = runs[name].to_numpy()[chosen].mean(axis=1)
    # The median, since a neighbour on the machine slows some runs.
    return values / runs["seconds"].median() if measure.endswith("/s") else values


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Value of the runs themselves, and the ends of its confidence interval."""
    tail = (1 - CONFIDENCE) / 2
    return values[0], *np.quantile(values[1:], [tail, 1 - tail])


def summary(runs: pd.DataFrame) -> dict:
    """Return one row of the table."""
    row = {key: runs[key].iloc[0] for key in ("target", "sampler", "kind", "size")}
    row |= {key: runs[key].mean() for key in ("accepted", "scaling")} | {"us": runs["us"].median()}
    for measure in ("bulk", "initial", "mse", "q error", "bulk/s", "initial/s", "mse/s"):
        names = measure, f"{measure} low", f"{measure} high"
        row |= dict(zip(names, interval(estimates(runs, measure)), strict=True))
    return row


# verdicts -------------------------------------------------------------------------------------


def verdict(groups, sizes: list[int], measure: str, kamh: Sampler, published: str) -> dict:
    """Compare the mean over some sizes and both embeddings with a row of KAMH."""
    both = [("F-KAMH", embedding, n) for n in sizes for embedding in COLORS]
    all_values = [estimates(groups.get_group(sampler), measure) for sampler in both]
    ratios = all_values / estimates(groups.get_group(kamh), measure)
    ratio, low, high = interval(ratios.mean(axis=0))
    found = "above" if low > 1 else "below" if high < 1 else "like"
    return {
        "measure": measure,
        "D": f"{min(sizes)} to {max(sizes)}",
        "KAMH": f"n = {kamh[2]}, redrawn {kamh[1]}",
        "smallest": ratios[:, 0].min(),
        "largest": ratios[:, 0].max(),
        "ratio": ratio,
        "low": low,
        "high": high,
        "published": published,
        "found": found,
    }


def verdicts(groups, name: str, n_features: list[int]) -> list[dict]:
    """Compare with what is published on a target, by every measure."""
    *kamh, seldom = (sampler for sampler in samplers(n_features) if sampler[0] == "KAMH")
    many = [n for n in n_features if n >= CLAIMED[0]] or n_features
    some = [n for n in n_features if CLAIMED[0] < n < CLAIMED[1]] or n_features
    in_draws = "above" if name == "banana-0.1" else "below"
    found = []
    for measure in ("bulk", "initial", "mse"):
        found.append(verdict(groups, many, measure, kamh[0], in_draws))
    for measure in ("bulk/s", "initial/s", "mse/s"):
        found += [verdict(groups, some, measure, sampler, "above") for sampler in kamh]
        found.append(verdict(groups, some, measure, seldom, ""))
    return [{"target": name} | row for row in found]


def sentences(found: list[dict]) -> list[str]:
    """Put verdicts into words."""
    words = []
    for row in found:
        claim, verdict = "not published", f"F-KAMH is {row['found']} it"
        if row["published"]:
            claim = f"published: {row['published']} it"
            verdict = "as published" if row["found"] == row["published"] else "the opposite"
            verdict = "not confirmed" if row["found"] == "like" else verdict
        words.append(
            f"{row['target']}, {row['measure']}: F-KAMH with D = {row['D']} against KAMH with "
            f"{row['KAMH']}; {claim}; measured: {row['ratio']:.2f} times it ({row['low']:.2f} to "
            f"{row['high']:.2f}): {verdict}."
        )
    return words


# pictures and tables --------------------------------------------------------------------------


def figure(results: dict[str, list[dict]]) -> Figure:
    """Draw ESS and effective size by error, per chain and per second, on D."""
    picture = Figure(figsize=(13, 0.7 + 3.1 * len(results)), layout="constrained")
    axes = picture.subplots(len(results), len(PANELS), squeeze=False)
    for line, (name, rows) in zip(axes, results.items(), strict=True):
        kamh = [row for row in rows if row["sampler"] == "KAMH"]
        for axis, measure in zip(line, PANELS, strict=True):
            for row, style in zip(kamh, KAMH_STYLES, strict=True):
                label = f"KAMH, n = {row['size']}, redrawn {row['kind']}"
                axis.axhline(row[measure], color="#2b2d33", linestyle=style, label=label)
                ends = row[f"{measure} low"], row[f"{measure} high"]
                axis.axhspan(*ends, color="#2b2d33", alpha=0.07, linewidth=0)
            for embedding, color in COLORS.items():
                some = [row for row in rows if row["kind"] == embedding]
                sizes, means, low, high = (
                    np.array([row[key] for row in some])
                    for key in ("size", measure, f"{measure} low", f"{measure} high")
                )
                style = {"color": color, "marker": "o", "markersize": 3.5, "capsize": 2}
                spread = [means - low, high - means]
                axis.errorbar(sizes, means, spread, label=f"F-KAMH, {embedding}", **style)
            means = [row[measure] for row in rows]
            axis.set(xscale="log", yscale="log", ylim=(0.5 * min(means), 2 * max(means)))
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_xticks(sizes, [f"{n}" for n in sizes])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_title(LABELS[measure], loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(EXPERIMENTS[name].label)
    for axis in axes[-1]:
        axis.set_xlabel("random features D")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return picture


def sample_all(arguments) -> pd.DataFrame:
    """Make all chains; a task is all samplers on one target from one start."""
    which, share = samplers(arguments.features), arguments.share
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        rows = []
        tasks = [
            (name, which, SEED + run, share)
            for run in range(arguments.runs)
            for name in arguments.targets
        ]
        for found in pool.map(chains, *zip(*tasks, strict=True)):
            rows += found
            print(".", end="", flush=True)
    print()
    return pd.DataFrame(rows)


def chains(target: str, which: list[Sampler], seed: int, share: float) -> list[dict]:
    """Make one chain of each sampler, in an order of chance."""
    order = np.random.default_rng(seed).permutation(len(which))
    return [chain(target, which[i], seed, share) for i in order]


def report(runs: pd.DataFrame, arguments, lines: str):
    """Print and write the tables, the verdicts and the figure."""
    rows, found, results = [], [], {}
    for name in arguments.targets:
        groups = runs[runs["target"] == name].groupby(["sampler", "kind", "size"])
        results[name] = [summary(groups.get_group(s)) for s in samplers(arguments.features)]
        rows += results[name]
        found += verdicts(groups, name, arguments.features)
        columns = ["sampler", "kind", "size", "accepted", "scaling", "us", *MEASURES]
        show(results[name], EXPERIMENTS[name].label, columns)
        print("\n".join(sentences([row for row in found if row["target"] == name])), flush=True)
    write(rows, lines, arguments.output / "thesis-efficiency.csv")
    write(found, lines, arguments.output / "thesis-efficiency-claims.csv")
    write(runs.to_dict("records"), lines, arguments.output / "thesis-efficiency-runs.csv")
    path = arguments.output / f"thesis-efficiency-pymc{version('pymc')}.png"
    figure(results).savefig(path, dpi=150)
    print(f"  {path}", flush=True)


def run(arguments):
    if arguments.quick:
        arguments.runs, arguments.share, arguments.features = 2, 0.1, [50, 200]
    length, dropped, adapted = (round(arguments.share * n) for n in (LENGTH, DROPPED, ADAPTED))
    lines = heading(
        "thesis-efficiency: F-KAMH against KAMH (Kotlicki 2015, section 5.1)",
        f"{arguments.runs} runs from exact draws, the same for all samplers; chains of {length} "
        f"transitions, all stored, of which {dropped} are dropped. Raw coordinates, no difference "
        f"moves, gamma {GAMMA}, published bandwidths; the log scaling moves by 1/t and starts "
        f"where a pilot run of {round(arguments.share * PILOT)} transitions with 1/sqrt(t) ended. "
        f"KAMH is KameleonStep.paper, adapting for {adapted} transitions, with a new subsample "
        "before every transition as published, or seldom: at counts that grow by a tenth. F-KAMH "
        "is FastKameleonStep.thesis, adapting throughout; its covariance enters the proposal at "
        "counts that grow by a fifth.",
        "size: features D, points n. us: CPU microseconds a transition, the median over runs of "
        "those of whole chains, adaptation included, timed by process_time around the loop that "
        "calls step.step(point); the same for both. bulk, initial: ESS of ArviZ, and by the "
        "initial monotone sequence, mean of the first two coordinates. mse: number of exact draws "
        "with the same mean squared error of E[x1^2] over runs. /s: divided by CPU seconds of a "
        f"chain. q error: mean |F(q) - q| over nine quantiles. low, high: {CONFIDENCE:.0%} "
        "intervals, by the bootstrap over runs. "
        "Verdicts compare the mean of the rows of F-KAMH, both embeddings, with a row of KAMH.",
    )
    report(sample_all(arguments), arguments, lines)
