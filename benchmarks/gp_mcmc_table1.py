"""Table 1 of the paper of the Gaussian-process surrogate (Benavoli, Wyse and White): T1 to T5."""

import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from benchmarks.common import SEED, DrivenStep, heading, mark, show, write
from benchmarks.simulators import MODELS, SIMULATE, sir_epidemic
from pymc_kameleon import AdaptiveMetropolisStep, MALAStep
from pymc_kameleon.surrogate import GPSurrogate

__all__ = ["add_arguments", "run"]

TUNE, DRAWS = 500, 2000
SPREAD = 0.2
"""Standard deviation of the log of what the truth is multiplied by, for a start."""

SLOW_SECONDS = 0.01
WARM_UP = 100
"""Transitions that compile everything before a chain is timed, enough for the first fits."""

STEPS = {"MH": AdaptiveMetropolisStep, "MALA": MALAStep}


class Published(NamedTuple):
    """A row of the paper's table; evaluations in percent of the draws."""

    acceptance: float
    ess: float
    esjd: float
    evaluations: float = 100.0


PUBLISHED = {
    ("T1", "MH", False): Published(0.37, 90, 0.13),
    ("T1", "MH", True): Published(0.36, 113, 0.13, 41),
    ("T1", "MALA", False): Published(0.26, 73, 0.2),
    ("T1", "MALA", True): Published(0.26, 75, 0.2, 35),
    ("T2", "MH", False): Published(0.28, 138, 32.6),
    ("T2", "MH", True): Published(0.27, 133, 31, 39),
    ("T2", "MALA", False): Published(0.26, 220, 51),
    ("T2", "MALA", True): Published(0.21, 147, 29, 43),
    ("T3", "MH", False): Published(0.42, 137, 0.44),
    ("T3", "MH", True): Published(0.42, 135, 0.38, 42),
    ("T3", "MALA", False): Published(0.44, 133, 0.48),
    ("T3", "MALA", True): Published(0.43, 134, 0.45, 45),
    ("T4", "MH", False): Published(0.1, 51, 0.003),
    ("T4", "MH", True): Published(0.1, 45, 0.003, 15),
    ("T5", "MH", False): Published(0.29, 98, 0.002),
    ("T5", "MH", True): Published(0.29, 102, 0.002, 35),
    ("T5", "MALA", False): Published(0.67, 339, 0.009),
    ("T5", "MALA", True): Published(0.67, 368, 0.009, 68),
}

SHARE_TARGETS = ("T1", "T2", "T4", "T5")
"""Where the share of evaluations is to be at most that of the paper."""

LEAST_GAIN, LEAST_GAIN_T4, LEAST_GAIN_LOW = 2.0, 3.0, 4.0
LEAST_OF_BOUND = 0.8
LEAST_SLOW_GAIN = 2.5

KEY = ["target", "proposal", "aim"]
MEASURES = ["acceptance", "ess", "esjd", "evaluations"]
DIAGNOSTICS = ["tuning evaluations", "passed", "kept", "points", "surrogate sd", "sd ratio"]


def add_arguments(parser):
    parser.add_argument("--repetitions", type=int, default=4, help="published: 30")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--slow", action="store_true", help="only the time of an expensive T4")
    parser.add_argument("--slow-repetitions", type=int, default=4)
    choices = {"nargs": "+", "default": list(SIMULATE)}
    parser.add_argument("--targets", choices=SIMULATE, **choices)


# chains ---------------------------------------------------------------------------------------


def aims(target: str, proposal: str) -> dict[str, float | None]:
    """Acceptances that the steps adapt to."""
    return {"default": None, "published": PUBLISHED[target, proposal, False].acceptance}


def to_natural(model: pm.Model, draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Undo the transforms of stacked points; the raveled variables have shape (draws, size)."""
    variables = {}
    for rv in model.free_RVs:
        values, transform = draws[model.rvs_to_values[rv].name], model.rvs_to_transforms[rv]
        if transform is not None:
            values = transform.backward(values, *rv.owner.inputs).eval()
        variables[rv.name] = values.reshape(len(values), -1)
    return variables


def start(model: pm.Model, truth: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return the truth, its elements times exp(0.2 z) with standard normal z, transformed."""
    rng, point = np.random.default_rng(seed), {}
    for rv in model.free_RVs:
        value = np.asarray(truth[rv.name], dtype=float)
        value = value * np.exp(SPREAD * rng.standard_normal(value.shape))
        transform = model.rvs_to_transforms[rv]
        if transform is not None:
            value = np.asarray(transform.forward(value, *rv.owner.inputs).eval())
        point[model.rvs_to_values[rv].name] = value
    return point


def make_step(proposal: str, has_surrogate: bool, aim: float | None):
    """Make a step, inside a model; the plain one and that with a surrogate adapt alike."""
    options = {} if aim is None else {"target_accept": aim}
    surrogate = GPSurrogate() if has_surrogate else None
    return STEPS[proposal](surrogate=surrogate, **({"steps_per_draw": 1} | options))


def chain(driven: DrivenStep, begin: dict[str, np.ndarray], seed: int):
    """Make one chain.

    Returns
    -------
    points : dict
        Stacked draws after tuning, by value variable.
    statistics : pandas.DataFrame
        Those of all draws, tuning included.
    seconds : float
        Wall time of all draws.
    """
    driven.begin(seed)
    point, step, found, statistics = begin, driven.step, [], []
    began = time.perf_counter()
    for t in range(TUNE + DRAWS):
        if t == TUNE:
            step.stop_tuning()
        point, (one,) = step.step(point)
        statistics.append(one)
        if t >= TUNE:
            found.append(point)
    seconds = time.perf_counter() - began
    points = {name: np.stack([one[name] for one in found]) for name in begin}
    return points, pd.DataFrame(statistics), seconds


def measure(model: pm.Model, points: dict, statistics: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of a chain."""
    variables = to_natural(model, points)
    draws = np.hstack(list(variables.values()))
    dataset = xr.Dataset({"x": (("chain", "draw", "coordinate"), draws[None])})
    tuning, kept = statistics[:TUNE], statistics[TUNE:]
    found = {
        "acceptance": kept["accepted"].mean(),
        "ess": float(az.ess(dataset, method="bulk")["x"].mean()),
        "esjd": float((np.diff(draws, axis=0) ** 2).mean()),
        "evaluations": 100 * kept["n_evals"].mean(),
        "tuning evaluations": 100 * tuning["n_evals"].mean(),
        "scaling": kept["scaling"].iloc[-1],
        "sd": draws.std(axis=0),
    }
    if "n_points" in kept:
        passed = kept["surrogate_accept"].mean()
        found |= {
            "passed": passed,
            "kept": found["acceptance"] / max(passed, 1e-9),
            "points": kept["n_points"].iloc[-1],
            "surrogate sd": kept["surrogate_sd"].mean(),
        }
    return found


def repetition(target: str, number: int) -> list[dict]:
    """Simulate data and run every sampler on them."""
    data = SIMULATE[target](random_seed=[SEED, number])
    model = MODELS[target](data)
    begin, rows = start(model, data.truth, number), []
    for proposal in STEPS:
        if (target, proposal, True) not in PUBLISHED:
            continue
        for aim, acceptance in aims(target, proposal).items():
            for has_surrogate in (False, True):
                make = partial(make_step, proposal, has_surrogate, acceptance)
                points, statistics, _ = chain(DrivenStep(model, make), begin, SEED + number)
                row = {"target": target, "proposal": proposal, "aim": aim}
                row |= {"surrogate": has_surrogate, "repetition": number}
                row |= measure(model, points, statistics)
                if has_surrogate:
                    ratio = row["sd"] / rows[-1]["sd"]
                    row["sd ratio"] = float(np.exp(np.log(ratio).mean()))
                rows.append(row)
    return rows


def slow_repetition(number: int) -> list[dict]:
    """Time both steps on T4 with a solver that takes its time."""
    data = SIMULATE["T4"](random_seed=[SEED, number])
    fast, slow = (sir_epidemic(data, seconds_per_call=s) for s in (0.0, SLOW_SECONDS))
    begin, rows = start(slow, data.truth, number), []
    for aim, acceptance in aims("T4", "MH").items():
        for has_surrogate in (False, True):
            make = partial(make_step, "MH", has_surrogate, acceptance)
            DrivenStep(fast, make).tune(WARM_UP)
            driven = DrivenStep(slow, make)
            points, statistics, seconds = chain(driven, begin, SEED + number)
            row = {"target": "T4", "proposal": "MH", "aim": aim, "surrogate": has_surrogate}
            row |= {"repetition": number, "seconds": seconds}
            rows.append(row | measure(slow, points, statistics))
    return rows


# tables ---------------------------------------------------------------------------------------


def mean_and_error(values: pd.Series) -> str:
    return f"{values.mean():.3g} ± {values.sem():.1g}"


def per_evaluation(runs: pd.DataFrame) -> float:
    return runs["ess"].sum() / (DRAWS * runs["evaluations"].sum() / 100)


def per_second(runs: pd.DataFrame) -> float:
    return runs["ess"].sum() / runs["seconds"].sum()


def ratio_and_error(rate, surrogate: pd.DataFrame, plain: pd.DataFrame) -> tuple[float, float]:
    """Ratio of two rates over repetitions, with a jackknife estimate of its standard error."""
    ratio = rate(surrogate) / rate(plain)
    numbers = plain["repetition"].unique()
    without = [
        rate(surrogate[surrogate["repetition"] != i]) / rate(plain[plain["repetition"] != i])
        for i in numbers
        if len(numbers) > 1
    ]
    return ratio, float(np.std(without) * np.sqrt(max(len(without) - 1, 0))) if without else np.nan


def pairs(runs: pd.DataFrame):
    """Yield the key, the plain runs and those with the surrogate of each pair."""
    for key, group in runs.groupby(KEY, sort=False):
        yield key, group[~group["surrogate"]], group[group["surrogate"]]


def name(proposal: str, has_surrogate: bool) -> str:
    return f"GP-{proposal}" if has_surrogate else proposal


def table(runs: pd.DataFrame) -> list[dict]:
    """Return the rows of the paper's table, with what was published in columns of their own."""
    rows = []
    for (target, proposal, aim), plain, surrogate in pairs(runs):
        for has_surrogate, group in ((False, plain), (True, surrogate)):
            published = PUBLISHED[target, proposal, has_surrogate]._asdict()
            row = {"model": target, "sampler": name(proposal, has_surrogate), "aim": aim}
            for measure_name in MEASURES:
                row[measure_name] = mean_and_error(group[measure_name])
                row[f"({measure_name})"] = published[measure_name]
            row["ess/eval"] = per_evaluation(group)
            if has_surrogate:
                gain, error = ratio_and_error(per_evaluation, surrogate, plain)
                row["gain"] = f"{gain:.2f} ± {error:.1g}"
                found, before = (PUBLISHED[target, proposal, i] for i in (True, False))
                row["(gain)"] = 100 * found.ess / found.evaluations / before.ess
            rows.append(row)
    return rows


def least_gain(target: str, proposal: str, aim: str, acceptance: float) -> float:
    """Smallest gain in effective draws an evaluation that is required."""
    if proposal == "MALA":
        return LEAST_OF_BOUND / acceptance
    if target == "T4":
        return LEAST_GAIN_LOW if aim == "published" else LEAST_GAIN_T4
    return LEAST_GAIN


def bounds(runs: pd.DataFrame) -> list[dict]:
    """Return what was to reach, a row for each bound."""
    rows = []
    for (target, proposal, aim), plain, surrogate in pairs(runs):
        row = {"model": target, "sampler": name(proposal, True), "aim": aim}
        if proposal == "MH" and aim == "published" and target in SHARE_TARGETS:
            share = surrogate["evaluations"].mean()
            largest = PUBLISHED[target, proposal, True].evaluations
            rows.append(row | {"what": "evaluations %", "found": share} | mark(share, largest))
        gain, error = ratio_and_error(per_evaluation, surrogate, plain)
        least = round(least_gain(target, proposal, aim, plain["acceptance"].mean()), 2)
        row |= {"what": "gain in ESS per evaluation", "found": gain, "error": error}
        rows.append(row | mark(gain, least, largest=False))
    return rows


def diagnostics(runs: pd.DataFrame) -> list[dict]:
    """Return what tells why a surrogate saved what it did."""
    rows = []
    for (target, proposal, aim), plain, surrogate in pairs(runs):
        row = {"model": target, "sampler": name(proposal, True), "aim": aim}
        columns = ["acceptance", "evaluations", *DIAGNOSTICS]
        row |= {"plain acceptance": plain["acceptance"].mean()}
        row |= {column: surrogate[column].mean() for column in columns}
        row["ess ratio"] = surrogate["ess"].sum() / plain["ess"].sum()
        row["scaling ratio"] = np.exp(
            np.log(surrogate["scaling"].to_numpy() / plain["scaling"].to_numpy()).mean()
        )
        rows.append(row | {"fewest ess": surrogate["ess"].min()})
    return rows


def show_table(runs: pd.DataFrame, lines: str, arguments):
    """Print and write everything but the times."""
    tables = {
        "": (table(runs), "beside each column, in parentheses, what was published"),
        "-bounds": (bounds(runs), "what was to reach"),
        "-diagnostics": (diagnostics(runs), "what the surrogates do"),
    }
    for suffix, (rows, title) in tables.items():
        show(rows, title)
        write(rows, lines, arguments.output / f"gp-mcmc-table1{suffix}.csv")
    raw = runs.drop(columns="sd").to_dict("records")
    write(raw, lines, arguments.output / "gp-mcmc-table1-runs.csv")


def parallel(function, tasks: list[tuple], processes: int) -> pd.DataFrame:
    """Call a function with every tuple of arguments; one table of the rows that it returns."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = []
        for rows in pool.map(function, *zip(*tasks, strict=True)):
            found += rows
            print(".", end="", flush=True)
    print()
    return pd.DataFrame(found)


def run_table(arguments):
    lines = heading(
        "gp-mcmc-table1: table 1 of the paper of the Gaussian-process surrogate",
        "MH is AdaptiveMetropolisStep, MALA is MALAStep, and with GP- the same with GPSurrogate(): "
        "the plain step and the one with the surrogate have the same options, and each learns its "
        f"own covariance and scaling. {TUNE} transitions of tuning from the truth, its elements "
        f"times exp({SPREAD} z) with standard normal z, then {DRAWS} frozen ones, one a draw; "
        f"{arguments.repetitions} repetitions (published: 30), each with its own data, the same "
        "for all samplers. aim: acceptance that the steps adapt to, the default of the step or "
        "that published for the plain sampler.",
        "acceptance: share of moves. ess: bulk, mean over coordinates. esjd: mean over "
        "coordinates, in the natural space. evaluations: of the log-likelihood, in percent of the "
        f"{DRAWS} draws. ess/eval: effective draws per evaluation, both summed over repetitions. "
        "gain: its ratio to that of the plain step with the same aim. ±: standard error over "
        "repetitions (of gain by the jackknife).",
        "tuning evaluations: percent of the tuning transitions. passed: mean probability of "
        "passing the first stage. kept: acceptance over passed, the share that the second stage "
        "keeps. points, surrogate sd: kept by the surrogate at the end, and its mean standard "
        "deviation at proposals. sd ratio, ess ratio, scaling ratio: posterior standard "
        "deviations, ESS and learnt scaling with the surrogate over those without.",
    )
    numbers = range(arguments.repetitions)
    tasks = [(target, number) for target in arguments.targets for number in numbers]
    # The longest first, so that no process is left with one of them at the end.
    tasks.sort(key=lambda task: task[0] != "T3")
    runs = parallel(repetition, tasks, arguments.processes)
    order = {target: i for i, target in enumerate(SIMULATE)}
    runs = runs.sort_values("target", key=lambda column: column.map(order), kind="stable")
    show_table(runs, lines, arguments)


def run_slow(arguments):
    lines = heading(
        f"gp-mcmc-table1: wall time on T4 with {1000 * SLOW_SECONDS:g} ms to wait in each call",
        "The steps, starts and aims of the table; seconds: wall time of "
        f"{TUNE} + {DRAWS} transitions, everything compiled before, {arguments.processes} chains "
        f"at a time, {arguments.slow_repetitions} repetitions. gain: effective draws a second "
        "over those of the plain step.",
    )
    tasks = [(number,) for number in range(arguments.slow_repetitions)]
    runs = parallel(slow_repetition, tasks, arguments.processes)
    rows = []
    for (target, proposal, aim), plain, surrogate in pairs(runs):
        for has_surrogate, group in ((False, plain), (True, surrogate)):
            row = {"model": target, "sampler": name(proposal, has_surrogate), "aim": aim}
            row |= {c: mean_and_error(group[c]) for c in ("acceptance", "ess", "evaluations")}
            row |= {"seconds": group["seconds"].mean(), "ess/s": per_second(group)}
            if has_surrogate:
                gain, error = ratio_and_error(per_second, surrogate, plain)
                row |= {"gain": gain, "error": error} | mark(gain, LEAST_SLOW_GAIN, largest=False)
            rows.append(row)
    show(rows)
    write(rows, lines, arguments.output / "gp-mcmc-table1-slow.csv")


def run(arguments):
    if arguments.slow:
        run_slow(arguments)
    else:
        run_table(arguments)
