"""Every step and samplers of other packages on the same targets: accuracy, and what it costs."""

import logging
import multiprocessing
import resource
import time
import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.black_box import marginal_total_variation
from benchmarks.common import SEED, heading, machine, show, versions, write
from benchmarks.compare_picture import MEASURES, is_doubtful, picture
from benchmarks.compare_samplers import CHAINS, SAMPLERS, Drawn, Problem, Sampler
from benchmarks.compare_targets import BLACK_BOXES, TARGETS, TOLERANCE, reference, starts_of

__all__ = ["add_arguments", "run"]

N_POINTS = 10_000
"""Most draws from which errors are computed."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KEY = ["target", "sampler", "seed"]
OVER_TIME = "over time"
WALL = 4
"""Times the limit of CPU seconds after which a sampler that waits is stopped, too."""

COLUMNS = (
    "sampler evaluations seconds ESS R-hat doubtful MMTV quantile-error ESS/1000 ESS/s outcome"
).split()


def add_arguments(parser):
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--budget", type=int, default=100_000, help="evaluations in all")
    parser.add_argument(
        "--black-box-budget", type=int, default=30_000, help="the same without gradients"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=90, help="CPU seconds of a run")
    parser.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run wrote to --output"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, show and draw what was measured"
    )
    parser.add_argument(
        "--references", type=Path, help="folder of reference draws, made where they are missing"
    )


def effective_size(draws: np.ndarray) -> tuple[float, float]:
    """Smallest bulk effective size of a coordinate and largest R-hat; draws (chains, n, d)."""
    if draws.ndim == 2:
        return float(len(draws)), np.nan
    chains = xr.Dataset({"x": (("chain", "draw", "i"), draws)})
    chains = chains.assign_coords(chain=np.arange(len(draws)), draw=np.arange(draws.shape[1]))
    return float(az.ess(chains)["x"].min()), float(az.rhat(chains)["x"].max(skipna=False))


def quantile_error(points: np.ndarray, expected: np.ndarray) -> float:
    """Largest error, over coordinates, of the probability below a quantile of the draws."""
    quantiles = np.quantile(points, QUANTILES, axis=0)
    found = (expected[None] <= quantiles[:, None]).mean(axis=1)
    return float(np.abs(found - np.array(QUANTILES)[:, None]).max())


def problem_of(
    target: str, sampler: Sampler, seed: int, budget: int, only_compile: bool = False
) -> Problem:
    model = TARGETS[target]()
    dim = sum(np.size(value) for value in model.initial_point().values())
    starts = starts_of(target, model, sampler.n_starts(dim), seed)
    return Problem(target, model, starts, budget, SEED + seed, only_compile)


def fill_caches(target: str, sampler: str):
    """Compile what a later run finds on disk."""
    method = SAMPLERS[sampler]
    method.draw(problem_of(target, method, 0, 0, only_compile=True))


def measure(target: str, sampler: str, seed: int, budget: int, expected: np.ndarray) -> dict:
    """Sample once; errors, effective draws and costs."""
    method = SAMPLERS[sampler]
    problem = problem_of(target, method, seed, budget)
    import_module(method.package)
    start = time.process_time()
    drawn: Drawn = method.draw(problem)
    seconds = time.process_time() - start
    points = drawn.points(N_POINTS)
    size, rhat = effective_size(drawn.draws) if method.exact else (np.nan, np.nan)
    return {
        "d": problem.dim,
        "evaluations": drawn.evaluations,
        "gradients": "yes" if method.gradient else "no",
        "seconds": seconds,
        "ESS": size,
        "R-hat": rhat,
        "doubtful": "yes" if drawn.is_doubtful else "no",
        "MMTV": marginal_total_variation(points, expected),
        "quantile-error": quantile_error(points, expected),
        "ESS/1000": 1000 * size / drawn.evaluations,
        "ESS/s": size / seconds,
        "outcome": "",
    }


def in_child(function, arguments: tuple, limit: int | None):
    """Result of a call in a process of its own; `OVER_TIME` after so many CPU seconds."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            used = int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + limit, used + 2 * limit))
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
        try:
            sender.send(function(*arguments))
        except Exception as error:
            text = str(error).splitlines()
            sender.send(f"{type(error).__name__}: {text[0] if text else ''}"[:120])

    process = context.Process(target=work)
    process.start()
    sender.close()
    found = OVER_TIME
    try:
        if receiver.poll(None if limit is None else WALL * limit):
            found = receiver.recv()
    except EOFError:
        if process.exitcode is None:
            process.join()
    process.kill()
    process.join()
    return found


def references(targets: list[str], folder: Path) -> dict[str, np.ndarray]:
    """Reference draws by target, from a folder, or made and kept there."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for target in targets:
        path = folder / f"{target}.npy"
        if not path.exists():
            print(f"reference of {target}", flush=True)
            draws = in_child(reference, (target,), None)
            if isinstance(draws, str):
                raise RuntimeError(f"reference of {target}: {draws}")
            np.save(path, draws)
        found[target] = np.load(path)
    return found


def earlier(folder: Path) -> list[dict]:
    """Rows of an interrupted run, without those that failed."""
    tables = [pd.read_csv(path, comment="#") for path in folder.glob("compare-pymc*.csv")]
    if not tables:
        return []
    rows = pd.concat(tables).fillna({"outcome": ""})
    return rows[rows["outcome"].isin(["", OVER_TIME])].to_dict("records")


def place(row: dict) -> tuple:
    """Place of a row in the table."""
    targets, samplers = list(TARGETS), list(SAMPLERS)
    return targets.index(row["target"]), samplers.index(row["sampler"]), row["seed"]


def installed(samplers: Iterable[str]) -> list[str]:
    """Samplers whose packages can be imported."""
    return [name for name in samplers if find_spec(SAMPLERS[name].package)]


def run(arguments):
    """Measure what is missing, a sampler and target at a time; print, write and draw."""
    rows = earlier(arguments.output) if arguments.report or arguments.resume else []
    if arguments.report:
        if not rows:
            raise SystemExit(f"{arguments.output} has no compare-pymc*.csv to report.")
        report(rows, arguments.output)
        return
    samplers = installed(arguments.samplers)
    for name in sorted(set(arguments.samplers) - set(samplers)):
        print(f"{name} is left out: {SAMPLERS[name].package} is not installed.")
    folder = arguments.references or arguments.output / "references"
    lines = heading(
        "compare: every step and samplers of other packages on the same targets",
        machine(),
        versions({SAMPLERS[name].package for name in installed(SAMPLERS)} - {"pymc_kameleon"}),
        f"Each sampler as it is called for the first time: defaults, {CHAINS} chains where it has "
        "chains, from draws of the prior (nutpie and surrogate_posterior find their starts; "
        "optimised: walkers around modes, whose search is counted). Steps of this package, "
        "NUTS, nutpie, sample_smc, pocoMC, nautilus and PyVBMC end by their own rule. "
        f"DEMetropolisZ, Metropolis, Slice, emcee, zeus and PINTS get {arguments.budget} "
        f"evaluations in all, on {' and '.join(BLACK_BOXES)} {arguments.black_box_budget}, half of "
        "them to tune; surrogate_posterior the number beside its name. MultilevelStep has the same "
        f"model with a solver's tolerance of {TOLERANCE:g} instead of 1e-8 as its coarse one.",
        "evaluations: of the log density at new points, over all chains, tuning and searches "
        "counted; where gradients says yes, of value and gradient; of MultilevelStep those of the "
        "fine model alone. seconds: CPU seconds with "
        "tuning and compiling, where a short run before has filled the caches on disk, in a "
        f"process of its own, one at a time; {OVER_TIME}: stopped after {arguments.limit} s. "
        "ESS: smallest bulk effective size of a coordinate; of pocoMC and nautilus, which weigh "
        "draws, that of Kish; of emcee and zeus each walker counts as a chain, of sample_smc each "
        "run; surrogate_posterior and PyVBMC return approximations, which have none. doubtful: the "
        "sampler itself warned that its result should not be trusted (surrogate_posterior).",
        "MMTV: mean over coordinates of the total variation distance of the marginal to that of "
        "the reference. quantile-error: largest error of the probability below the 5, 25, 50, 75 "
        "and 95 % quantiles of a coordinate. References: exact draws; for eight-schools and "
        "gp-classification long chains of NUTS, for lynx-hare and sir of AdaptiveMetropolisStep.",
    )
    known = {tuple(row[key] for key in KEY) for row in rows}
    expected = references(arguments.targets, folder)
    for target in arguments.targets:
        is_expensive = target in BLACK_BOXES
        budget = arguments.black_box_budget if is_expensive else arguments.budget
        for sampler in filter(lambda name: SAMPLERS[name].fits(target), samplers):
            keys = [(target, sampler, seed) for seed in range(arguments.seeds)]
            missing = [key for key in keys if key not in known]
            if missing:
                in_child(fill_caches, (target, sampler), arguments.limit)
            for key in missing:
                cell = (*key, budget, expected[target])
                found = in_child(measure, cell, arguments.limit)
                if isinstance(found, str):
                    found = {"outcome": found}
                rows.append(dict(zip(KEY, key, strict=True)) | found)
                rows.sort(key=place)
                write(rows, lines, arguments.output / "compare.csv")
        show([row for row in rows if row["target"] == target], target, COLUMNS)
    report(rows, arguments.output)


def report(rows: list[dict], folder: Path):
    """Print each measure as a table in Markdown and draw it."""
    results = pd.DataFrame(rows)
    for measure, description in MEASURES.items():
        print(f"\n{description}\n\n{markdown(results, measure)}\n")
        name = measure.lower().replace("/", "_per_").replace("-", "_")
        path = folder / f"compare_{name}.png"
        picture(results, measure).savefig(path, dpi=150)
        print(f"  {path}", flush=True)


def cell(runs: pd.DataFrame, measure: str) -> str:
    """Median over the runs of a sampler on a target, with a star if one of them is doubtful."""
    done = runs[runs["outcome"] == ""]
    if 2 * len(done) <= len(runs):
        return OVER_TIME if OVER_TIME in set(runs["outcome"]) else "failed"
    value = done[measure].median()
    star = r"\*" if any(is_doubtful(row) for _, row in done.iterrows()) else ""
    return "" if np.isnan(value) else f"{float(f'{value:.2g}'):g}{star}"


def markdown(results: pd.DataFrame, measure: str) -> str:
    """Table of a measure, samplers by targets: medians over seeds, with the number of these.

    A cell is empty where a sampler does not fit a target.
    """
    targets = list(dict.fromkeys(results["target"]))
    cells = {key: cell(runs, measure) for key, runs in results.groupby(["sampler", "target"])}
    lines = [["sampler", "seeds", *targets], ["---"] * (len(targets) + 2)]
    for sampler in filter(set(results["sampler"]).__contains__, SAMPLERS):
        name = f"`{sampler}`" if SAMPLERS[sampler].package == "pymc_kameleon" else sampler
        numbers = results.loc[results["sampler"] == sampler, "target"].value_counts()
        seeds = " to ".join(f"{n}" for n in sorted({numbers.min(), numbers.max()}))
        missing = {t: "not run" if SAMPLERS[sampler].fits(t) else "" for t in targets}
        lines.append([name, seeds, *(cells.get((sampler, t), missing[t]) for t in targets)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
