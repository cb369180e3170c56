"""Chains on a Dask cluster that tune together, for a likelihood that sleeps."""

import functools
import logging
import time

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.compile.ops import wrap_py

from benchmarks.common import SEED, heading, mark, show, write
from pymc_kameleon import EvaluationStore, SurrogateHMCStep, distributed
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.targets import Banana

__all__ = ["add_arguments", "run"]

TARGETS = {8: 0.35, 16: 0.25}
"""Largest wall time of tuning, relative to that of a chain alone."""

OVERHEAD_SECONDS = 0.5


def add_arguments(parser):
    parser.add_argument("--dims", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds of an evaluation")


def sleeping_model(dim: int, seconds: float) -> pm.Model:
    """Build a bent posterior whose likelihood sleeps."""
    target = Banana(0.03, dim=dim)

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def log_likelihood(x):
        time.sleep(seconds)
        return np.asarray(target.log_density(x[None])[0])

    with pm.Model() as model:
        pm.Potential("likelihood", log_likelihood(pm.Normal("x", 0.0, 30.0, shape=dim)))
    return model


def sampled(model, client, **options):
    with model:
        return distributed.sample(
            client=client, progressbar=False, compute_convergence_checks=False, **options
        )


def measured(model, client, chains: int, draws: int) -> dict[str, float]:
    """Sample once on workers that have compiled the model; figures of the slowest chain."""
    options = {"chains": chains, "step": SurrogateHMCStep, "random_seed": SEED}
    sampled(model, client, **options, tune=1, draws=1, rounds=1, store=EvaluationStore())
    store, begin = EvaluationStore(), time.time()
    idata = sampled(model, client, **options, draws=draws, store=store)
    seconds = time.time() - begin
    statistics = group_dataset(idata, "sample_stats")
    after = [int(n) for n in statistics["n_evals"].sum("draw")]
    finished = np.array(store._execute("SELECT chain, finished FROM evaluations ORDER BY id"))
    of_chain = [
        finished[finished[:, 0] == name, 1].astype(float)
        for name in sorted(set(finished[:, 0]), key=lambda name: int(name.split("-")[-1]))
    ]
    tuned = [times[-n] - begin for times, n in zip(of_chain, after, strict=True)]
    size = float(az.ess(group_dataset(idata, "posterior"))["x"].min())
    errors = np.abs(statistics["surrogate_error"].values)
    return {
        "tune": group_dataset(idata, "posterior").attrs["tuning_steps"],
        "evaluations to tune": max(len(t) - n for t, n in zip(of_chain, after, strict=True)),
        "tuned after s": max(tuned),
        "surrogate error": float(np.nanmedian(errors)),
        "accept": float(statistics["accept"].mean()),
        "all evaluations": len(finished),
        "seconds": seconds,
        "ESS/s": size / seconds,
    }


def overhead(client) -> float:
    """Seconds that a round of a chain takes on one worker, with one or two draws that cost none."""
    model, times = sleeping_model(2, 0.0), []
    step = functools.partial(SurrogateHMCStep, start="here")
    options = {"tune": 42, "draws": 1, "chains": 2, "rounds": 41, "random_seed": SEED}
    for _ in range(4):
        idata = sampled(model, client, **options, step=step, store=EvaluationStore())
        times.append(group_dataset(idata, "posterior").attrs["sampling_time"])
    return min(times[1:]) / (options["chains"] * options["rounds"])


def run(arguments):
    from dask.distributed import Client, LocalCluster

    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Chains on a Dask cluster that tune together",
        f"A bent posterior whose likelihood sleeps {arguments.sleep} s, one worker a chain, all on "
        "this machine. The error is the median of |log density - surrogate| after tuning.",
    )
    rows, alone = [], {}
    for chains in arguments.chains:
        with (
            LocalCluster(n_workers=chains, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            if chains == arguments.chains[0]:
                seconds = overhead(client)
                rows.append(
                    {"chains": "a round", "seconds": seconds} | mark(seconds, OVERHEAD_SECONDS)
                )
                show(rows)
            for dim in arguments.dims:
                found = measured(
                    sleeping_model(dim, arguments.sleep), client, chains, arguments.draws
                )
                row = {"d": dim, "chains": chains} | found
                alone.setdefault(dim, found)
                for name in ("evaluations to tune", "tuned after s"):
                    row[f"{name}, of one"] = found[name] / alone[dim][name]
                if chains in TARGETS:
                    row |= mark(row["tuned after s, of one"], TARGETS[chains])
                rows.append(row)
                show([row])
    show(rows, "all")
    write(rows, lines, arguments.output / "shared-evaluations.csv")
