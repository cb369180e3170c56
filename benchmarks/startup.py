"""Time to the first draw, time that adaptation takes, and size of the state."""

import argparse
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from functools import partial
from statistics import median

import pymc as pm

from benchmarks.common import SEED, DrivenStep, heading, mark, show, write

__all__ = ["add_arguments", "eight_schools", "run"]

SAMPLERS = ("DEMetropolisZ", "KameleonStep", "AdaptiveMetropolisStep")
BOUNDS = {"cold": 4.0, "new model": 2.0, "warm": 2.0}
ADAPTATION_SECONDS = 2.0
STATE_BYTES, STATE_GROWTH = 2_000_000, 0.01


def add_arguments(parser):
    parser.add_argument("--repeats", type=int, default=3, help="processes for each median")
    parser.add_argument("--transitions", type=int, nargs=2, default=[1000, 100_000], metavar="N")


def eight_schools() -> pm.Model:
    """Build the eight schools model of Rubin (1981), non-centred: ten parameters."""
    effects = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
    errors = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0)
        tau = pm.HalfCauchy("tau", 5.0)
        eta = pm.Normal("eta", 0.0, 1.0, shape=8)
        pm.Normal("effect", mu + tau * eta, errors, observed=effects)
    return model


def cpu_seconds() -> float:
    """CPU seconds of this process and of the compilers that it has run."""
    return sum(os.times()[:4])


def first_draw(sampler: str) -> dict[str, float]:
    """CPU seconds of importing this package after PyMC, of making the step, and to a first draw."""
    times = [cpu_seconds()]
    import pymc_kameleon

    logging.getLogger("pymc").setLevel(logging.ERROR)
    make_step = pm.DEMetropolisZ if sampler == SAMPLERS[0] else getattr(pymc_kameleon, sampler)
    with eight_schools():
        times.append(cpu_seconds())
        step = make_step()
        times.append(cpu_seconds())
        pm.sample(
            draws=2,
            tune=2,
            chains=1,
            cores=1,
            step=step,
            callback=lambda trace, draw: times.append(cpu_seconds()),
            progressbar=False,
            compute_convergence_checks=False,
            random_seed=SEED,
        )
    return {
        "import": times[1] - times[0],
        "step": times[2] - times[1],
        "seconds": times[3] - times[1],
    }


def in_new_process(sampler: str, numba_folder: str, pytensor_folder: str) -> dict[str, float]:
    """Call `first_draw` in a process whose compiled code is kept in these folders."""
    flags = [os.environ.get("PYTENSOR_FLAGS", ""), f"base_compiledir={pytensor_folder}"]
    environment = os.environ | {
        "NUMBA_CACHE_DIR": numba_folder,
        "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
    }
    command = [sys.executable, "-m", "benchmarks.startup", sampler]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def show_first_draws(arguments):
    lines = heading(
        "startup: CPU seconds to the first draw of pm.sample, compilers included",
        f"Model: eight schools, non-centred. Medians over {arguments.repeats} new processes. "
        "cache: cold has an empty NUMBA_CACHE_DIR and an empty base_compiledir of PyTensor, as "
        "right after installing; new model keeps Numba's folder and empties PyTensor's; warm keeps "
        "both. import: of pymc_kameleon after pymc, in no other column. step: construction of the "
        "step. first draw: that, pm.sample's preparations and the first draw, with its smallest "
        "and largest value. more: than DEMetropolisZ.",
    )
    found = {(cache, sampler): [] for cache in BOUNDS for sampler in SAMPLERS}
    for _ in range(arguments.repeats):
        for sampler in SAMPLERS:
            with tempfile.TemporaryDirectory() as folder:
                # The order matters: the second finds Numba's folder filled, the third both.
                for cache, name in (("cold", "one"), ("new model", "two"), ("warm", "two")):
                    folders = (f"{folder}/numba", f"{folder}/pytensor-{name}")
                    found[cache, sampler].append(in_new_process(sampler, *folders))
                    print(".", end="", flush=True)
    rows = []
    for (cache, sampler), runs in found.items():
        seconds, reference = (
            [run["seconds"] for run in some] for some in (runs, found[cache, SAMPLERS[0]])
        )
        more = median(seconds) - median(reference)
        row = {"cache": cache, "sampler": sampler, "import": median(r["import"] for r in runs)}
        row |= {"step": median(r["step"] for r in runs), "first draw": median(seconds)}
        row |= {"smallest": min(seconds), "largest": max(seconds), "more": more}
        rows.append(row | ({} if sampler == SAMPLERS[0] else mark(more, BOUNDS[cache])))
    print()
    show(rows)
    write(rows, lines, arguments.output / "startup-first-draw.csv")


def show_adaptation(arguments):
    from pymc_kameleon import KameleonStep
    from pymc_kameleon.targets import Banana

    rows = []
    for steps in (1, 20):
        make_step = partial(KameleonStep, n_subsample=1000, steps_per_draw=steps)
        driven = DrivenStep(Banana(0.03).model(), make_step)
        driven.tune(1000)  # loads all that is compiled
        step, times = driven.step, []
        driven.begin()
        driven.draw(1)
        learner, update = step.learner, step.learner.update

        def timed(*arguments, update=update, times=times):
            start = time.process_time()
            update(*arguments)
            times.append(time.process_time() - start)

        learner.update = timed
        start = time.process_time()
        driven.tune(step.default_tune_steps)
        rows.append(
            {
                "steps_per_draw": steps,
                "tune": step.default_tune_steps,
                "transitions": step.transition,
                "tuning s": time.process_time() - start,
                "updates": len(times),
                "adaptation s": sum(times),
                **mark(sum(times), ADAPTATION_SECONDS),
            }
        )
    lines = heading(
        "startup: CPU seconds of adaptation in a default tuning",
        "KameleonStep(n_subsample=1000) on Banana(0.03, 100) in 8 dimensions, tuned for its "
        "default_tune_steps. adaptation s: time in new subsamples, bandwidths and coordinates; the "
        "recursions of scalings are a part of the compiled transitions.",
    )
    show(rows)
    write(rows, lines, arguments.output / "startup-adaptation.csv")


def show_state(arguments):
    from pymc_kameleon import KameleonStep
    from pymc_kameleon.targets import Banana

    counts, rows = sorted(arguments.transitions), []
    for phase in ("tuning all along", "after a default tuning"):
        make_step = partial(KameleonStep, n_subsample=1000, steps_per_draw=1)
        driven = DrivenStep(Banana(0.03).model(), make_step)
        if phase != "tuning all along":
            driven.tune(driven.step.default_tune_steps)
        sizes, done = [], 0
        for count in counts:
            driven.draw(count - done)
            done = count
            state = driven.step.sampling_state
            sizes.append(len(pickle.dumps(state)))
            rows.append({"phase": phase, "draws": count, "bytes": sizes[-1]})
            rows[-1] |= mark(sizes[-1], STATE_BYTES)
        growth = sizes[-1] / sizes[0] - 1
        rows[-1] |= {"growth": growth, "growth met": mark(abs(growth), STATE_GROWTH)["met"]}
    lines = heading(
        "startup: bytes of the pickled sampling_state",
        "KameleonStep(n_subsample=1000) on Banana(0.03, 100) in 8 dimensions, 1 step a draw. "
        f"growth: between the two numbers of draws, to be within {STATE_GROWTH:.0%}.",
    )
    show(rows)
    write(rows, lines, arguments.output / "startup-state.csv")


def run(arguments):
    show_first_draws(arguments)
    show_adaptation(arguments)
    show_state(arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time the first draw in this process.")
    parser.add_argument("sampler", choices=SAMPLERS)
    print(json.dumps(first_draw(parser.parse_args().sampler)))
