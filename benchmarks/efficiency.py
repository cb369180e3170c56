"""Effective draws per draw, per evaluation and per second, through `pymc.sample`."""

import time
import warnings
from functools import partial
from typing import Any

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, dataset, heading, show
from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep, dispersed_starts
from pymc_kameleon.demo import lynx_hare_model
from pymc_kameleon.targets import Banana, CorrelatedGaussian, Flower, Ring, Target

__all__ = ["SAMPLERS", "TARGETS", "add_arguments", "run"]

STUCK_AFTER = 1000
PILOT_DRAWS = 200
LEAST_PER_SECOND, LEAST_PER_EVALUATION = 5.0, 0.7

TARGETS: dict[str, Target | None] = {
    "banana-0.03": Banana(0.03, 100.0),
    "banana-0.1": Banana(0.1, 100.0),
    "flower": Flower(10.0, 6.0, 6, 1.0),
    "ring": Ring(10.0, 1.0),
    "gaussian": CorrelatedGaussian(20),
    "lynx-hare": None,
}

REFERENCE = "DEMetropolisZ"
SAMPLERS = {
    REFERENCE: pm.DEMetropolisZ,
    "KameleonStep": partial(KameleonStep, steps_per_draw=20),
    "KameleonStep.paper": partial(KameleonStep.paper, steps_per_draw=20),
    "KameleonStep-1": KameleonStep,
    "AdaptiveMetropolis": partial(AdaptiveMetropolisStep, steps_per_draw=20),
    "Metropolis": pm.Metropolis,
    "Slice": pm.Slice,
}

COUNTS = ("sampler draws evals/draw R-hat stuck accepted bulk tail seconds").split()
RATES = "bulk/draw bulk/1k bulk/1k+t bulk/s bulk/s+t tail/draw tail/1k tail/1k+t tail/s tail/s+t"
RATES = ["sampler", *RATES.split(), "mse/10k", "mse/10k+t"]
RATIOS = "sampler bulk/s tail/s mse/s bulk/eval tail/eval mse/eval goal/s goal/eval".split()


def add_arguments(parser):
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--tuning", type=int, default=20_000, help="tuning evaluations a chain")
    parser.add_argument("--evaluations", type=int, default=40_000, help="those after it, a chain")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))


class Stopwatch:
    """Callback of `pymc.sample` that takes the CPU time after three draws of each chain."""

    def __init__(self, tune: int, draws: int):
        self.marks = (0, tune - 1, tune + draws - 1)
        self.times: list[float] = []

    def __call__(self, trace, draw):
        if draw.draw_idx in self.marks:
            self.times.append(time.process_time())

    def seconds(self) -> np.ndarray:
        """Seconds of tuning (without its first draw) and of sampling, summed over chains."""
        return np.diff(np.reshape(self.times, (-1, 3)), axis=1).sum(axis=0)


def starting_points(name: str, model: pm.Model, chains: int) -> list[dict[str, np.ndarray]]:
    """Draw starts that are not exact draws, which would hide how long a sampler takes to arrive."""
    target = TARGETS[name]
    if target is None:
        return dispersed_starts(model, chains, SEED)
    scales = target.scales if isinstance(target, CorrelatedGaussian) else np.ones(target.dim)
    normals = np.random.default_rng(SEED).standard_normal((chains, target.dim))
    return [{"x": 3.0 * scales * row} for row in normals]


def sample(model: pm.Model, sampler: str, draws: int, tune: int, initvals: list) -> tuple:
    """Run `pymc.sample`, one chain after the other; return its result and the `Stopwatch`."""
    stopwatch = Stopwatch(tune, draws)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pm.sample(
            draws=draws,
            tune=tune,
            chains=len(initvals),
            cores=1,
            step=SAMPLERS[sampler](),
            initvals=initvals,
            random_seed=SEED,
            callback=stopwatch,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
            progressbar=False,
        )
    return result, stopwatch


def n_evaluations(sampler: str, statistics, dim: int) -> int:
    """Evaluations of the log density at new points, over all chains and draws."""
    n_draws = statistics.sizes["chain"] * statistics.sizes["draw"]
    if "n_evals" in statistics:
        return int(statistics["n_evals"].sum())
    if sampler == "Slice":
        # Of each coordinate at least two ends and one point between; each step is one more.
        steps = statistics["nstep_out"].sum() + statistics["nstep_in"].sum()
        return int(steps) + 3 * dim * n_draws
    return n_draws * (dim if sampler == "Metropolis" else 1)


def transitions_per_draw(sampler: str, dim: int) -> int:
    """Moves in a draw that are accepted or rejected each; a slice sampler's are never rejected."""
    options = getattr(SAMPLERS[sampler], "keywords", {})
    return dim if sampler in ("Metropolis", "Slice") else options.get("steps_per_draw", 1)


def evaluations_per_draw(sampler: str, model: pm.Model, dim: int, initvals: list) -> float:
    """Find the number of evaluations in a draw, that of the slice sampler in a short chain."""
    if sampler != "Slice":
        return transitions_per_draw(sampler, dim)
    result, _ = sample(model, sampler, PILOT_DRAWS, PILOT_DRAWS, initvals[:1])
    return n_evaluations(sampler, dataset(result, "sample_stats"), dim) / PILOT_DRAWS


def moved(statistics) -> np.ndarray | None:
    """Share of accepted moves in each draw, shape (chains, draws), where the step says it."""
    if "accepted" not in statistics:
        return None
    accepted = statistics["accepted"].values.astype(float)
    return accepted.reshape(*accepted.shape[:2], -1).mean(axis=-1)


def longest_rest(accepted: np.ndarray) -> int:
    """Length of the longest run of draws without an accepted move; shape (draws,)."""
    moves = np.flatnonzero(np.concatenate([[True], accepted > 0, [True]]))
    return int(np.diff(moves).max() - 1)


def measure(target: str, sampler: str, model: pm.Model, arguments) -> dict[str, Any]:
    """One row of the table."""
    chains = arguments.chains
    initvals = starting_points(target, model, chains)
    dim = sum(np.size(value) for value in model.initial_point().values())
    cost = evaluations_per_draw(sampler, model, dim, initvals)
    draws, tune = (round(n / cost) for n in (arguments.evaluations, arguments.tuning))
    result, stopwatch = sample(model, sampler, draws, tune, initvals)
    posterior = dataset(result)[[variable.name for variable in model.free_RVs]]
    statistics = dataset(result, "sample_stats")
    tuning_statistics = dataset(result, "warmup_sample_stats")
    evaluations = n_evaluations(sampler, statistics, dim)
    tuning_evaluations = n_evaluations(sampler, tuning_statistics, dim)
    tuning_seconds, seconds = stopwatch.seconds()
    row = {
        "target": target,
        "sampler": sampler,
        "chains": chains,
        "tune": tune,
        "draws": draws,
        "tuning evaluations": tuning_evaluations,
        "evaluations": evaluations,
        "tuning seconds": tuning_seconds,
        "seconds": seconds,
        "evals/draw": evaluations / (chains * draws),
        "R-hat": float(az.rhat(posterior).to_array().max()),
    }
    accepted = moved(statistics)
    if accepted is not None:
        rests = transitions_per_draw(sampler, dim) * np.array([longest_rest(a) for a in accepted])
        row |= {"stuck": int((rests >= STUCK_AFTER).sum()), "accepted": accepted.mean()}
    for kind, options in (("bulk", {}), ("tail", {"prob": (0.05, 0.95)})):
        size = float(az.ess(posterior, method=kind, **options).to_array().min())
        row |= {
            kind: size,
            f"{kind}/draw": size / (chains * draws),
            f"{kind}/1k": 1000 * size / evaluations,
            f"{kind}/1k+t": 1000 * size / (evaluations + tuning_evaluations),
            f"{kind}/s": size / seconds,
            f"{kind}/s+t": size / (seconds + tuning_seconds),
        }
    if isinstance(TARGETS[target], Banana):
        variance = TARGETS[target].variance
        estimates = (posterior["x"].values[..., 0] ** 2).mean(axis=1)
        size = chains * 2 * variance**2 / np.mean((estimates - variance) ** 2)
        row["mse/10k"] = 1e4 * size / evaluations
        row["mse/10k+t"] = 1e4 * size / (evaluations + tuning_evaluations)
        row["mse/s"] = size / seconds
    return row


def ratios(rows: list[dict], target: str) -> list[dict]:
    """Every sampler divided by the first, and whether the default step does what it should."""
    compared = []
    for row in rows:
        found = {"target": target, "sampler": row["sampler"]}
        for kind, per_evaluation in (("bulk", "1k"), ("tail", "1k"), ("mse", "10k")):
            for name, key in ((f"{kind}/s",) * 2, (f"{kind}/eval", f"{kind}/{per_evaluation}")):
                if key in row:
                    found[name] = row[key] / rows[0][key]
        if row["sampler"] == "KameleonStep":
            goals = [("eval", LEAST_PER_EVALUATION)]
            goals += [("s", LEAST_PER_SECOND)] if TARGETS[target] else []
            for unit, least in goals:
                met = "yes" if found[f"bulk/{unit}"] >= least else "NO"
                found[f"goal/{unit}"] = f">= {least:g} {met}"
        compared.append(found)
    return compared


def run(arguments):
    lines = heading(
        "efficiency: effective draws (ESS) through pymc.sample(cores=1)",
        f"Each of {arguments.chains} chains has about {arguments.tuning} evaluations of the log density",
        f"to tune and {arguments.evaluations} after that. An evaluation is one at a new point:",
        "a proposal. DEMetropolisZ and Metropolis evaluate the old point again for each and it is not",
        "counted, nor for Slice, which costs nstep_out + nstep_in + 3 dim, its number of draws being",
        f"found in a chain of {PILOT_DRAWS} + {PILOT_DRAWS} draws. A draw of Metropolis is dim"
        " proposals; one of KameleonStep,",
        "KameleonStep.paper and AdaptiveMetropolis 20 (steps_per_draw=20), of KameleonStep-1 one.",
        "Starts: N(0, 3^2), for the Gaussian in units of its scales; prior draws for lynx-hare.",
        "bulk, tail: ESS over all chains, of the worst coordinate. 1k: per 1000 evaluations; s: per",
        "CPU second, from stamps of a callback; +t: with tuning counted (without its first draw).",
        "mse/10k: effective size by the mean squared error of E[x1^2] over chains, per 10 000",
        f"evaluations. stuck: chains without an accepted move in {STUCK_AFTER} transitions in a row.",
    )
    for target in arguments.targets:
        density = TARGETS[target]
        model = lynx_hare_model() if density is None else density.model()
        rows, title = [], f"{target}: {density or 'Hudson Bay pelts, ODE in a black-box Op'}"
        path = arguments.output / f"efficiency-{target}.csv"
        for sampler in arguments.samplers:
            rows.append(measure(target, sampler, model, arguments))
            show(rows, lines, path, quiet=True)
            print(f"{target} {sampler}: {rows[-1]['seconds']:.1f} s", flush=True)
        show(rows, f"{lines}\n\n{title}", path, columns=COUNTS)
        show(rows, title, path, columns=RATES)
        if rows[0]["sampler"] == REFERENCE:
            title = f"{target}: ratios to {REFERENCE}"
            compared = ratios(rows, target)
            show(compared, title, arguments.output / f"efficiency-{target}-ratios.csv", RATIOS)
