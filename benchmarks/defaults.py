"""The plain call, ``pm.sample(step=Step())``, on models of practice that nobody tuned for."""

import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable
from functools import partial

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, heading, show, write
from benchmarks.practice import MODELS
from benchmarks.sampling import REFERENCE, dataset, n_evaluations
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    ParallelTemperingStep,
    PCAKameleonStep,
    SurrogateHMCStep,
)

__all__ = ["SAMPLERS", "add_arguments", "run"]

SAMPLERS: dict[str, Callable | None] = {
    "KameleonStep": KameleonStep,
    "FastKameleonStep": FastKameleonStep,
    "PCAKameleonStep": PCAKameleonStep,
    "AdaptiveMetropolisStep": AdaptiveMetropolisStep,
    "MALAStep": MALAStep,
    "SurrogateHMCStep": SurrogateHMCStep,
    "ParallelTemperingStep": ParallelTemperingStep,
    REFERENCE: pm.DEMetropolisZ,
    "Slice": pm.Slice,
    "NUTS": None,
}
"""Name -> step, made without an argument; None leaves the choice to PyMC."""

WITHOUT_GRADIENT = ("lynx-hare",)
WITH_GRADIENT = ("MALAStep", "NUTS")
LARGEST_RHAT, SMALLEST_ESS = 1.01, 400


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--draws", type=int, default=1000, help="PyMC's default")
    parser.add_argument("--steps-per-draw", type=int, help="of this package's steps, if not theirs")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")


def plain_call(name: str, sampler: str, seed: int, steps_per_draw: int | None, options) -> dict:
    """Sample a new model as a user would who has read nothing; R-hat, effective draws, seconds."""
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.WARNING)
    logging.getLogger("pymc").addHandler(told := _Kept())
    model, make_step = MODELS[name](), SAMPLERS[sampler]
    if steps_per_draw and sampler.endswith("Step"):
        make_step = partial(make_step, steps_per_draw=steps_per_draw)
    with model:
        start = time.perf_counter()
        result = pm.sample(
            chains=4,
            cores=1,
            step=None if make_step is None else make_step(),
            random_seed=seed,
            progressbar=False,
            discard_tuned_samples=False,
            **options,
        )
        seconds = time.perf_counter() - start
    names = [variable.name for variable in model.free_RVs]
    posterior, statistics = dataset(result)[names], dataset(result, "sample_stats")
    row = {
        "d": sum(np.size(v) for v in model.initial_point().values()),
        "R-hat": largest(az.rhat(posterior)),
        "bulk": -largest(-az.ess(posterior)),
        "tail": -largest(-az.ess(posterior, method="tail", prob=(0.05, 0.95))),
        "seconds": seconds,
        "sampling-s": float(result["posterior"].attrs["sampling_time"]),
        "advice": any("of this chain" in m or "Take " in m or "Tune " in m for m in told.messages),
    }
    row["good"] = row["R-hat"] <= LARGEST_RHAT and row["bulk"] >= SMALLEST_ESS
    if "n_transitions" in statistics:
        row["transitions"] = float(statistics["n_transitions"].mean())
    if sampler not in WITH_GRADIENT:
        tuning = dataset(result, "warmup_sample_stats")
        row["evals"] = sum(n_evaluations(sampler, part, row["d"]) for part in (tuning, statistics))
        row["bulk/1000 evals"] = 1000 * row["bulk"] / row["evals"]
    return row


class _Kept(logging.Handler):
    """Keeps the messages of a run."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def largest(values) -> float:
    """Return the largest number of a data set; NaN, which a constant coordinate has, if any is."""
    return float(np.max([float(v.max(skipna=False)) for v in dict(values.data_vars).values()]))


def run(arguments):
    lines = heading(
        "defaults: the plain call on models of practice",
        "pm.sample(step=Step()) with PyMC's defaults and four chains, one after the other, each "
        "call in a fresh process that finds the caches of earlier ones on disk. seconds: from "
        "making the step to the result, compiling included; sampling-s: PyMC's own count of tuning "
        "and sampling. Largest R-hat, smallest bulk and tail effective sample size over all free "
        f"variables. good: share of runs with R-hat <= {LARGEST_RHAT} and bulk >= {SMALLEST_ESS}. "
        "advice: share of runs in which a warning says what to change. evals: evaluations of the "
        "log density, tuning included. bulk, s, bulk/s and bulk/eval against: "
        f"ratios to {REFERENCE}. Medians over {arguments.seeds} seeds.",
    )
    rows, context = [], multiprocessing.get_context("fork")
    options = {} if arguments.draws == 1000 else {"draws": arguments.draws}
    with context.Pool(1, maxtasksperchild=1) as pool:
        for name in arguments.models:
            here = []
            for sampler in arguments.samplers:
                if name in WITHOUT_GRADIENT and sampler in WITH_GRADIENT:
                    continue
                steps = arguments.steps_per_draw
                # A short call fills the caches, as they are on a user's second day.
                short = {"draws": 10, "tune": 10}
                pool.apply(plain_call, (name, sampler, SEED, steps, short))
                runs = [
                    pool.apply(plain_call, (name, sampler, SEED + i, steps, options))
                    for i in range(arguments.seeds)
                ]
                row = {"model": name, "d": runs[0].pop("d"), "sampler": sampler}
                share = {key: np.mean([r.pop(key) for r in runs]) for key in ("good", "advice")}
                row |= {key: float(np.median([r[key] for r in runs])) for key in runs[0]}
                here.append(row | share)
            reference = next((r for r in here if r["sampler"] == REFERENCE), None)
            for row in here if reference is not None else ():
                row["bulk against"] = row["bulk"] / reference["bulk"]
                row["s against"] = row["seconds"] / reference["seconds"]
                row["bulk/s against"] = row["bulk against"] / row["s against"]
                if "evals" in row:
                    per_evaluation = row["bulk/1000 evals"] / reference["bulk/1000 evals"]
                    row["bulk/eval against"] = per_evaluation
            rows += here
            show(here)
    write(rows, lines, arguments.output / "defaults.csv")
