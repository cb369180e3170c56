"""Effective draws per draw, per evaluation and per second, through `pymc.sample`."""

from functools import partial
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import xarray as xr

from benchmarks.common import SEED, heading, show, write
from benchmarks.sampling import (
    REFERENCE,
    SAMPLERS,
    dataset,
    longest_rest,
    make_step,
    n_evaluations,
    sample,
    transitions_per_draw,
)
from pymc_kameleon.demo import lynx_hare_model, plausible_starts
from pymc_kameleon.targets import Banana, CorrelatedGaussian, Flower, Ring, Target

__all__ = ["TARGETS", "add_arguments", "run"]

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

COUNTS = "sampler draws evals/draw R-hat stuck accepted bulk tail seconds tuning-s".split()
RATES = "bulk/draw bulk/1k bulk/1k+t bulk/s bulk/s+t tail/draw tail/1k tail/1k+t tail/s tail/s+t"
RATES = ["sampler", *RATES.split(), "mse/10k", "mse/10k+t"]
RATIOS = "sampler bulk/s tail/s mse/s bulk/eval tail/eval mse/eval goal/s goal/eval".split()


def add_arguments(parser):
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--batches", type=int, default=4, help="parts of the chains")
    parser.add_argument("--tuning", type=int, default=20_000, help="tuning evaluations a chain")
    parser.add_argument("--evaluations", type=int, default=40_000, help="those after it, a chain")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))


def starting_points(name: str, model: pm.Model, chains: int) -> list[dict[str, np.ndarray]]:
    """Draw starts that are not exact draws, which would hide how long a sampler takes to arrive."""
    target = TARGETS[name]
    if target is None:
        return plausible_starts(model, chains, SEED)
    scales = target.scales if isinstance(target, CorrelatedGaussian) else np.ones(target.dim)
    normals = np.random.default_rng(SEED).standard_normal((chains, target.dim))
    return [{"x": 3.0 * scales * row} for row in normals]


class Tally:
    """What one sampler drew on one target, and what it cost."""

    def __init__(self, target: str, sampler: str, model: pm.Model, initvals: list, arguments):
        self.target, self.sampler, self.model = target, sampler, model
        self.dim = sum(np.size(value) for value in model.initial_point().values())
        cost = transitions_per_draw(sampler, self.dim)
        self.posteriors: list[xr.Dataset] = []
        self.accepted: list[np.ndarray] = []
        self._forget_costs()
        if sampler == "Slice":
            self.draws = self.tune = PILOT_DRAWS
            self.run(initvals[:1], SEED)
            cost = self.evaluations / PILOT_DRAWS
            self.posteriors.clear()
            self._forget_costs()
        self.draws, self.tune = (round(n / cost) for n in (arguments.evaluations, arguments.tuning))

    def _forget_costs(self):
        self.evaluations = self.tuning_evaluations = 0
        self.seconds = np.zeros(2)

    def run(self, initvals: list, random_seed: int):
        """Sample some more chains."""
        result, seconds = sample(
            self.model,
            partial(make_step, self.sampler, TARGETS[self.target] is None),
            draws=self.draws,
            tune=self.tune,
            initvals=initvals,
            random_seed=random_seed,
        )
        statistics = dataset(result, "sample_stats")
        tuning_statistics = dataset(result, "warmup_sample_stats")
        self.seconds += seconds
        self.evaluations += n_evaluations(self.sampler, statistics, self.dim)
        self.tuning_evaluations += n_evaluations(self.sampler, tuning_statistics, self.dim)
        if "accepted" in statistics:
            accepted = statistics["accepted"].values.astype(float)
            self.accepted += list(accepted.reshape(*accepted.shape[:2], -1))
        self.posteriors.append(dataset(result)[[rv.name for rv in self.model.free_RVs]].load())

    def row(self) -> dict[str, Any]:
        """Return one row of the table."""
        posterior = xr.concat(self.posteriors, "chain")
        posterior = posterior.assign_coords(chain=np.arange(posterior.sizes["chain"]))
        chains, evaluations = posterior.sizes["chain"], self.evaluations
        tuning_seconds, seconds = self.seconds
        costs = {
            "draw": chains * self.draws,
            "1k": evaluations / 1000,
            "1k+t": (evaluations + self.tuning_evaluations) / 1000,
            "s": seconds,
            "s+t": seconds + tuning_seconds,
        }
        row = {
            "target": self.target,
            "sampler": self.sampler,
            "chains": chains,
            "tune": self.tune,
            "draws": self.draws,
            "tuning evaluations": self.tuning_evaluations,
            "evaluations": evaluations,
            "tuning-s": tuning_seconds,
            "seconds": seconds,
            "evals/draw": evaluations / costs["draw"],
            "R-hat": float(az.rhat(posterior).to_array().max()),
        }
        if self.accepted:
            steps = transitions_per_draw(self.sampler, self.dim)
            rests = steps * np.array([longest_rest(accepted) for accepted in self.accepted])
            row |= {"stuck": str((rests >= STUCK_AFTER).sum()), "accepted": np.mean(self.accepted)}
        for kind, options in (("bulk", {}), ("tail", {"prob": (0.05, 0.95)})):
            row[kind] = float(az.ess(posterior, method=kind, **options).to_array().min())
            row |= {f"{kind}/{unit}": row[kind] / cost for unit, cost in costs.items()}
        if isinstance(TARGETS[self.target], Banana):
            variance = TARGETS[self.target].variance
            estimates = (posterior["x"].values[..., 0] ** 2).mean(axis=1)
            size = chains * 2 * variance**2 / np.mean((estimates - variance) ** 2)
            row |= {f"mse/10{unit[1:]}": 10 * size / costs[unit] for unit in ("1k", "1k+t")}
            row["mse/s"] = size / seconds
        return row


def ratios(rows: list[dict]) -> list[dict]:
    """Every sampler divided by the first, and whether the default step does what it should."""
    keys = {f"{kind}/s": f"{kind}/s" for kind in ("bulk", "tail", "mse")}
    keys |= {"bulk/eval": "bulk/1k", "tail/eval": "tail/1k", "mse/eval": "mse/10k"}
    compared = []
    for row in rows:
        found = {name: row[key] / rows[0][key] for name, key in keys.items() if key in row}
        if row["sampler"] == "KameleonStep":
            for unit, least in (("s", LEAST_PER_SECOND), ("eval", LEAST_PER_EVALUATION)):
                if unit == "eval" or TARGETS[row["target"]]:
                    met = "yes" if found[f"bulk/{unit}"] >= least else "NO"
                    found[f"goal/{unit}"] = f">= {least:g} {met}"
        compared.append({"target": row["target"], "sampler": row["sampler"]} | found)
    return compared


def show_target(target: str, rows: list[dict], lines: str, arguments):
    """Print and write the tables of one target."""
    about = TARGETS[target] or "Hudson Bay pelts, an ODE in a black-box Op, 8 parameters"
    show(rows, f"{target}: {about}", COUNTS)
    show(rows, f"{target}: effective draws", RATES)
    write(rows, lines, arguments.output / f"efficiency-{target}.csv")
    if rows[0]["sampler"] == REFERENCE:
        compared = ratios(rows)
        show(compared, f"{target}: ratios to {REFERENCE}", RATIOS)
        write(compared, lines, arguments.output / f"efficiency-{target}-ratios.csv")


def run(arguments):
    lines = heading(
        "efficiency: effective draws (ESS) through pymc.sample(cores=1)",
        f"{arguments.chains} chains, each with about {arguments.tuning} evaluations of the log "
        f"density to tune and {arguments.evaluations} after that. An evaluation is one at a new "
        "point, a proposal. DEMetropolisZ and Metropolis evaluate the old point again with each, "
        "which is not counted, nor is it for Slice: its draw costs nstep_out + nstep_in + 3 dim, "
        f"and {PILOT_DRAWS} + {PILOT_DRAWS} draws of a chain tell how many it gets. A draw of "
        "Metropolis is dim proposals; of KameleonStep-1 and DEMetropolisZ one, and of the other "
        "steps of this package 20 (steps_per_draw=20).",
        "Starts: N(0, 3^2), for the Gaussian in units of its scales; prior draws for lynx-hare, "
        "where Slice gets -inf for the NaN of a failed solver, which it would accept.",
        "bulk, tail: ESS over all chains, of the worst coordinate. 1k: per 1000 evaluations. s: "
        "per CPU second between stamps that a callback takes; the samplers take turns in "
        f"{arguments.batches} batches of chains. +t: with tuning counted, but for its first draw. "
        "mse/10k: effective size by the mean squared error of E[x1^2] over chains, per 10 000 "
        f"evaluations. stuck: chains with {STUCK_AFTER} transitions in a row without an accepted "
        "move.",
    )
    for target in arguments.targets:
        density = TARGETS[target]
        model = lynx_hare_model() if density is None else density.model()
        initvals = starting_points(target, model, arguments.chains)
        tallies = [Tally(target, s, model, initvals, arguments) for s in arguments.samplers]
        batches = np.array_split(np.arange(arguments.chains), arguments.batches)
        for seed, chains in enumerate(filter(len, batches), start=SEED):
            for tally in tallies:
                tally.run([initvals[i] for i in chains], seed)
                print(f"{target} {tally.sampler}: {tally.seconds.sum():.1f} s", flush=True)
        show_target(target, [tally.row() for tally in tallies], lines, arguments)
