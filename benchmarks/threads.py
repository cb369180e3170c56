"""What the threads of linear algebra cost the steps, on an idle machine and on a busy one."""

import argparse
import json
import logging
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import median

import numpy as np
import pymc as pm

from benchmarks.common import SEED, all_threads, busy_machine, heading, machine, mark, show, write

__all__ = ["add_arguments", "run"]

MOST = 1.3
"""Times what a call takes with OMP_NUM_THREADS=1."""


def regression():
    """Five parameters of a straight line in four dimensions."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4))
    y = x @ [1.0, 2.0, 3.0, 4.0] + rng.normal(size=40)
    with pm.Model() as model:
        slopes = pm.Normal("slopes", 0, 10, shape=4)
        sigma = pm.HalfNormal("sigma", 5)
        pm.Normal("y", x @ slopes, sigma, observed=y)
    return model


def counts(n: int):
    """A latent function of `n` values with two hyperparameters, seen through counts."""
    rng = np.random.default_rng(0)
    x = np.linspace(0, 10, n)[:, None]
    y = rng.poisson(np.exp(1 + np.sin(x[:, 0])))
    with pm.Model() as model:
        lengthscale = pm.InverseGamma("lengthscale", 3, 3)
        amplitude = pm.HalfNormal("amplitude", 2)
        gp = pm.gp.Latent(cov_func=amplitude**2 * pm.gp.cov.Matern52(1, lengthscale))
        pm.Poisson("y", pm.math.exp(gp.prior("f", X=x)), observed=y)
    return model


def fixed_counts(n: int):
    """The same with fixed hyperparameters."""
    rng = np.random.default_rng(0)
    x = np.linspace(0, 10, n)[:, None]
    y = rng.poisson(np.exp(1 + np.sin(x[:, 0])))
    with pm.Model() as model:
        gp = pm.gp.Latent(cov_func=pm.gp.cov.Matern52(1, 2.0))
        pm.Poisson("y", pm.math.exp(gp.prior("f", X=x)), observed=y)
    return model


def cases() -> dict:
    """Name -> model, step, and arguments of `pm.sample`."""
    import pymc_kameleon as pk

    surrogate = {"surrogate": pk.GPSurrogate()}
    few = {"draws": 100, "tune": 100, "chains": 1}
    return {
        "KameleonStep": (regression, pk.KameleonStep, {}, {}),
        "FastKameleonStep": (regression, pk.FastKameleonStep, {}, {}),
        "PCAKameleonStep": (regression, pk.PCAKameleonStep, {}, {}),
        "AdaptiveMetropolisStep": (regression, pk.AdaptiveMetropolisStep, {}, {}),
        "MALAStep": (regression, pk.MALAStep, {}, {}),
        "KameleonStep, GPSurrogate": (regression, pk.KameleonStep, surrogate, {}),
        "MALAStep, GPSurrogate": (regression, pk.MALAStep, surrogate, {}),
        "SurrogateHMCStep": (regression, pk.SurrogateHMCStep, {}, {}),
        "LatentGPStep, N=80": (lambda: counts(80), pk.LatentGPStep, {}, {"tune": 500}),
        "LatentGPStep, N=1000": (lambda: counts(1000), pk.LatentGPStep, {}, few),
        "EllipticalSliceStep, N=80": (lambda: fixed_counts(80), pk.EllipticalSliceStep, {}, {}),
        "EllipticalSliceStep, N=1000": (
            lambda: fixed_counts(1000),
            pk.EllipticalSliceStep,
            {},
            few,
        ),
        "RiemannianHMCStep, N=80": (
            lambda: fixed_counts(80),
            pk.RiemannianHMCStep,
            {},
            {"draws": 100, "tune": 100},
        ),
        "RiemannianHMCStep, N=1000": (
            lambda: fixed_counts(1000),
            pk.RiemannianHMCStep,
            {},
            {"draws": 5, "tune": 5, "chains": 1},
        ),
    }


def add_arguments(parser):
    parser.add_argument("--steps", nargs="*", help="beginnings of names; default all")
    parser.add_argument("--repeats", type=int, default=3, help="calls for each median")


def timed(name: str, repeats: int) -> list[float]:
    """Wall seconds of `pm.sample`, after a short call that compiles."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    make_model, step, options, arguments = cases()[name]
    seconds = []
    for i in range(repeats + 1):
        given = (
            {"chains": 4} | arguments | ({"draws": 5, "tune": 20, "chains": 1} if i == 0 else {})
        )
        if "tune" not in given:
            given["tune"] = None if int(pm.__version__[0]) > 5 else 1000
        with make_model():
            made = step(**options)
            start = time.perf_counter()
            pm.sample(
                step=made,
                random_seed=SEED,
                progressbar=False,
                compute_convergence_checks=False,
                **given,
            )
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def in_new_process(name: str, one_thread: bool, repeats: int) -> float:
    """Return the median of `timed` in a process with or without OMP_NUM_THREADS=1."""
    environment = all_threads()
    if one_thread:
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "benchmarks.threads", name, str(repeats)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return median(json.loads(result.stdout.splitlines()[-1]))


def run(arguments):
    lines = heading(
        "threads: seconds of pm.sample with OMP_NUM_THREADS=1 and without",
        "The plain call, four chains unless N is 1000, after a short one that compiles. busy: "
        "beside a process that multiplies matrices without end, on all threads. Medians of "
        f"{arguments.repeats} calls in one process. {machine()}",
    )
    rows = []
    for name in cases():
        if arguments.steps and not name.startswith(tuple(arguments.steps)):
            continue
        for is_busy in (False, True):
            with busy_machine() if is_busy else nullcontext():
                one, several = (in_new_process(name, o, arguments.repeats) for o in (True, False))
            rows.append({"step": name, "machine": "busy" if is_busy else "idle"})
            rows[-1] |= {"one thread s": one, "as it is s": several, "ratio": several / one}
            rows[-1] |= mark(several / one, MOST)
            print(rows[-1], flush=True)
    show(rows)
    write(rows, lines, arguments.output / "threads.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time a step in this process.")
    parser.add_argument("name")
    parser.add_argument("repeats", type=int)
    given = parser.parse_args()
    print(json.dumps(timed(given.name, given.repeats)))
