"""The plain call, ``pm.sample(step=Step())``, on models of practice that nobody tuned for."""

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, heading, show, write
from benchmarks.practice import MODELS
from benchmarks.sampling import REFERENCE, dataset
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
)

__all__ = ["SAMPLERS", "add_arguments", "run"]

SAMPLERS: dict[str, Callable | None] = {
    "KameleonStep": KameleonStep,
    "FastKameleonStep": FastKameleonStep,
    "PCAKameleonStep": PCAKameleonStep,
    "AdaptiveMetropolisStep": AdaptiveMetropolisStep,
    "MALAStep": MALAStep,
    REFERENCE: pm.DEMetropolisZ,
    "Slice": pm.Slice,
    "NUTS": None,
}
"""Name -> step, made without an argument; None leaves the choice to PyMC."""

WITHOUT_GRADIENT = ("lynx-hare",)
LARGEST_RHAT, SMALLEST_ESS = 1.01, 400


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--draws", type=int, default=1000, help="PyMC's default")
    parser.add_argument("--steps-per-draw", type=int, help="of this package's steps, if not theirs")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")


def plain_call(make_model: Callable, make_step: Callable | None, seed: int, **options) -> dict:
    """Sample a new model as a user would who has read nothing; R-hat, effective draws, seconds."""
    model = make_model()
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        result = pm.sample(
            chains=4,
            cores=1,
            step=None if make_step is None else make_step(),
            random_seed=seed,
            progressbar=False,
            **options,
        )
        seconds = time.perf_counter() - start
    names = [variable.name for variable in model.free_RVs]
    posterior, statistics = dataset(result)[names], dataset(result, "sample_stats")
    row = {
        "R-hat": largest(az.rhat(posterior)),
        "bulk": -largest(-az.ess(posterior)),
        "tail": -largest(-az.ess(posterior, method="tail", prob=(0.05, 0.95))),
        "seconds": seconds,
        "sampling-s": float(result["posterior"].attrs["sampling_time"]),
    }
    if "n_evals" in statistics:
        row["evals/draw"] = float(statistics["n_evals"].mean())
    return row


def largest(values) -> float:
    """Return the largest number of a data set; NaN, which a constant coordinate has, if any is."""
    return float(np.max([float(v.max(skipna=False)) for v in dict(values.data_vars).values()]))


def run(arguments):
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "defaults: the plain call on models of practice",
        "pm.sample(step=Step()) with PyMC's defaults and four chains, one after the other. "
        "seconds: from making the step to the result, compiling included; sampling-s: PyMC's own "
        "count of tuning and sampling. Largest R-hat, smallest bulk and tail effective sample size "
        f"over all free variables. good: R-hat <= {LARGEST_RHAT} and bulk >= {SMALLEST_ESS}. "
        f"against: ratio of bulk to that of {REFERENCE}, and of sampling-s. Medians over "
        f"{arguments.seeds} seeds.",
    )
    rows = []
    for name in arguments.models:
        dim = sum(np.size(v) for v in MODELS[name]().initial_point().values())
        here = []
        for sampler in arguments.samplers:
            if name in WITHOUT_GRADIENT and sampler in ("MALAStep", "NUTS"):
                continue
            make_step, options = SAMPLERS[sampler], {}
            if arguments.steps_per_draw and sampler.endswith("Step"):
                make_step = partial(make_step, steps_per_draw=arguments.steps_per_draw)
            if arguments.draws != 1000:
                options["draws"] = arguments.draws
            runs = [
                plain_call(MODELS[name], make_step, SEED + i, **options)
                for i in range(arguments.seeds)
            ]
            row = {"model": name, "d": dim, "sampler": sampler}
            row |= {key: float(np.median([r[key] for r in runs])) for key in runs[0]}
            is_good = row["R-hat"] <= LARGEST_RHAT and row["bulk"] >= SMALLEST_ESS
            here.append(row | {"good": "yes" if is_good else "NO"})
        reference = next((r for r in here if r["sampler"] == REFERENCE), None)
        for row in here:
            if reference is not None:
                row["against bulk"] = row["bulk"] / reference["bulk"]
                row["against s"] = row["sampling-s"] / reference["sampling-s"]
        rows += here
        show(here)
    write(rows, lines, arguments.output / "defaults.csv")
