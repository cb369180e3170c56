"""Wall time of chains whose likelihood sleeps, with several points at once and one by one."""

import logging
import time

import numpy as np
import pymc as pm

from benchmarks.common import SEED, heading, mark, show, write
from benchmarks.sampling import four_chains
from pymc_kameleon import KameleonStep, SurrogateHMCStep, black_box
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.targets import Banana

__all__ = ["add_arguments", "run"]

LARGEST_SHARE = 0.4
"""Wall time with four workers a chain, relative to that with one."""

WAYS = {
    "one by one": {},
    "4 workers": {"cores": 4},
    "vectorized": {"vectorized": True},
}
STEPS = {"SurrogateHMC": (SurrogateHMCStep, None), "Kameleon": (KameleonStep, 20)}
"""Steps, and draws of tuning, by default the step's own."""


def add_arguments(parser):
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of a call")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["SurrogateHMC"])


def sleeping_model(dim: int, seconds: float, **options) -> pm.Model:
    """Build a bent posterior whose likelihood sleeps, however many points it takes."""
    target = Banana(0.03, dim=dim)

    def log_likelihood(x):
        time.sleep(seconds)
        values = target.log_density(np.atleast_2d(x))
        return values if "vectorized" in options else values[0]

    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 30.0, shape=dim)
        pm.Potential("likelihood", black_box(log_likelihood, shape=(), **options)(x))
    return model


def measure(step: str, way: str, dim: int, draws: int, sleep: float):
    """Sample four chains; draws (4, n, d), evaluations of a chain, and seconds of the call."""
    make, tune = STEPS[step]
    with sleeping_model(dim, sleep, **WAYS[way]):
        method = make()
        tune = method.default_tune_steps if tune is None else tune
        begin = time.perf_counter()
        idata = four_chains(method, cores=4, tune=tune, draws=draws, random_seed=SEED)
    seconds = time.perf_counter() - begin
    statistics = [group_dataset(idata, g) for g in ("sample_stats", "warmup_sample_stats")]
    n_evals = sum(part["n_evals"].sum("draw") for part in statistics)
    return group_dataset(idata, "posterior")["x"].values, int(n_evals.max()), seconds


def run(arguments):
    """Print and write wall times."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Several points at once",
        f"Four chains in four processes, tuning and {arguments.draws} draws; the likelihood sleeps "
        f"{arguments.sleep:g} s a call. evaluations: of the slowest chain.",
    )
    rows = []
    for step in arguments.steps:
        measure(step, "one by one", arguments.dim, 1, 0.0)  # compiles, and rounds as it may
        first, base = None, 0.0
        for way in WAYS:
            draws, n_evals, seconds = measure(
                step, way, arguments.dim, arguments.draws, arguments.sleep
            )
            if first is None:
                first, base = draws, seconds
            rows.append(
                {
                    "step": step,
                    "calls": way,
                    "evaluations": n_evals,
                    "seconds": seconds,
                    "share": seconds / base,
                    "same draws": np.array_equal(draws, first),
                }
                | (mark(seconds / base, LARGEST_SHARE) if way != "one by one" else {})
            )
    show(rows)
    write(rows, lines, arguments.output / "batches.csv")
