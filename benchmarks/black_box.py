"""Error of the posterior against the number of all evaluations, from dispersed starts."""

import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm
from pymc.blocking import DictToArrayBijection, RaveledVars

from benchmarks.black_box_peers import PEERS, Peer
from benchmarks.black_box_picture import picture
from benchmarks.black_box_targets import (
    DENSITIES,
    MODELS,
    Oscillation,
    black_box,
    model_of,
    starting_points,
)
from benchmarks.common import SEED, DrivenStep, heading, show, versions, write
from benchmarks.sampling import REFERENCE
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    GPSurrogate,
    KameleonStep,
    SurrogateHMCStep,
)
from pymc_kameleon.approximate.checked_exploration import CheckedExploration
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.approximate.predicted_error import marginal_total_variation
from pymc_kameleon.distributed.run import shared_tuning

__all__ = ["SAMPLERS", "TARGETS", "Step", "add_arguments", "run"]

TARGETS = [*DENSITIES, *MODELS]


@dataclass(frozen=True)
class Step:
    """A step method, of which every chain gets its share of the budget.

    Parameters
    ----------
    make : callable
        Makes the step; called inside a model.
    tuning_share : float
        Largest share of the evaluations that tune; less where the step's own `default_tune_steps`
        are fewer.
    shares : bool
        Whether the chains run at once and share their evaluations. They tune no longer than
        `distributed.sample` has them tune unless told.
    """

    make: Callable
    tuning_share: float = 0.4
    shares: bool = False


@dataclass(frozen=True)
class Approximation:
    """Draws of a surrogate that is taught by the whole budget, from the first of the starts."""

    n_draws: int = 4000

    def draw(self, name: str, starts: list, budget: int, seed: int) -> tuple[np.ndarray, int]:
        """Draws (n, d), and evaluations in all."""
        explorer = Explorer(budget=budget, model=model_of(name))
        exploration = CheckedExploration(explorer, None)
        rng = np.random.default_rng([SEED, seed])
        exploration.learn(rng, progressbar=False, start=starts[0])
        return exploration.draw(self.n_draws).points, explorer.n_calls


SAMPLERS: dict[str, Step | Peer | Approximation] = {
    "surrogate_posterior": Approximation(),
    "SurrogateHMC": Step(SurrogateHMCStep, tuning_share=0.6),
    "SurrogateHMC, shared": Step(SurrogateHMCStep, tuning_share=0.5, shares=True),
    "Kameleon": Step(partial(KameleonStep, steps_per_draw=1)),
    "Kameleon + GP, optimized start": Step(
        partial(KameleonStep, steps_per_draw=1, surrogate=GPSurrogate(), start="optimize")
    ),
    "AdaptiveMetropolis + GP, optimized start": Step(
        partial(AdaptiveMetropolisStep, steps_per_draw=1, surrogate=GPSurrogate(), start="optimize")
    ),
    REFERENCE: Step(pm.DEMetropolisZ),
} | PEERS

WAIT = 0.001
"""Seconds after which a chain looks again whether the others have come as far."""

N_REFERENCE = 400_000
"""Exact draws of a density."""

REFERENCE_EVALUATIONS = {
    "logistic": 200_000,
    "sir": 150_000,
    "supernova": 250_000,
    "lynx-hare": 120_000,
    "pharmacokinetics": 150_000,
    "threshold": 200_000,
}
"""Of each of four chains on a model, which take one to four minutes."""

OWN = 0
"""The budget of those that choose the number of evaluations themselves."""

KEY = ["target", "sampler", "budget", "seed"]
MEASURES = ["MMTV", "mean error", "log sd ratio"]


def add_arguments(parser):
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[300, 1000, 3000, 10_000, 30_000])
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--from",
        dest="earlier",
        nargs="+",
        type=Path,
        default=[],
        metavar="CSV",
        help="results of earlier runs, which are kept and not measured again",
    )
    parser.add_argument(
        "--picture", action="store_true", help="measure nothing, draw the targets in --from"
    )


class PacedStore(EvaluationStore):
    """A store whose chains, each in a process, wait for one another after each evaluation.

    So do chains whose likelihood is so expensive that nothing else takes time.
    """

    def begin(self, counts, i: int):
        """Write for the chain `i`; `counts` (n,) is shared and has the evaluations of all."""
        self.counts, self.i = counts, i

    def add(self, *arguments):
        """Store an evaluation, and wait until every other chain has made as many."""
        super().add(*arguments)
        self.counts[self.i] += 1
        while min(self.counts) < self.counts[self.i]:
            time.sleep(WAIT)


def chain(driven: DrivenStep, start, seed: int, tuning: int, budget: int) -> tuple[np.ndarray, int]:
    """Draws after tuning (n, d), and evaluations in all.

    Tuning ends after `tuning` evaluations, later where the search for a mode takes more, and the
    chain after `budget`, with one draw at least.
    """
    driven.begin([SEED, seed])
    point_map = DictToArrayBijection.map(driven.start).point_map_info
    point = DictToArrayBijection.rmap(RaveledVars(start, point_map))
    n_evals, draws, end = 0, [], np.inf
    while n_evals < end:
        if end == np.inf and n_evals >= tuning:
            driven.step.stop_tuning()
            end = max(budget, n_evals + 1)
        point, statistics = driven.step.step(point)
        n_evals += int(statistics[0].get("n_evals", 1))
        if end < np.inf:
            draws.append(DictToArrayBijection.map(point).data)
    return np.array(draws), n_evals


@cache
def reference_draws(name: str) -> np.ndarray:
    """Draws of the posterior, shape (n, d), raveled and unconstrained."""
    if name in DENSITIES:
        return DENSITIES[name].draw(N_REFERENCE, np.random.default_rng(SEED))
    if name == "oscillation":
        return Oscillation().draw(N_REFERENCE, np.random.default_rng(SEED))
    driven = DrivenStep(model_of(name), partial(AdaptiveMetropolisStep, steps_per_draw=20))
    chains = [
        chain(driven, start, seed, 5000, 5000 + REFERENCE_EVALUATIONS[name])[0]
        for seed, start in enumerate(starting_points(name, 4, 99))
    ]
    return np.concatenate(chains)


def errors(draws: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """`MEASURES`: of the marginals, of the means in standard deviations, of the logs of those."""
    sd = reference.std(axis=0)
    shifts = (draws.mean(axis=0) - reference.mean(axis=0)) / sd
    with np.errstate(divide="ignore"):
        log_ratios = np.log(draws.std(axis=0) / sd)
    distances = [np.sqrt(np.mean(x**2)) for x in (shifts, log_ratios)]
    values = [marginal_total_variation(draws, reference), *map(float, distances)]
    return dict(zip(MEASURES, values, strict=True))


def at_once(store: PacedStore, chains: list[Callable]) -> list:
    """Results of calls, each in a process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    counts = context.Array("d", len(chains), lock=False)

    def run(i, make):
        store.begin(counts, i)
        try:
            queue.put(make())
        except Exception as error:
            queue.put(error)
        finally:
            counts[i] = np.inf

    processes = [context.Process(target=run, args=job) for job in enumerate(chains)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def draw_by_step(step: Step, name: str, starts: list, budget: int, seed: int):
    """Draws (n, d) of a chain from each start, and evaluations in all."""
    store = PacedStore() if step.shares else None
    make = partial(step.make, store=store) if step.shares else step.make
    driven = DrivenStep(model_of(name), make)
    share = budget // len(starts)
    most = driven.step.default_tune_steps or share
    if step.shares:
        most = shared_tuning(most, len(starts))
    tuning = min(round(step.tuning_share * share), most)
    chains = [
        partial(chain, driven, start, 100 * seed + i, tuning, share)
        for i, start in enumerate(starts)
    ]
    results = at_once(store, chains) if step.shares else [run_chain() for run_chain in chains]
    shortest = min(len(draws) for draws, _ in results)
    draws = np.concatenate([draws[-shortest:] for draws, _ in results])
    return draws, sum(n for _, n in results)


def measure(name: str, sampler: str, budget: int, chains: int, seed: int) -> dict:
    """Sample once; errors and evaluations."""
    method = SAMPLERS[sampler]
    starts = starting_points(name, chains, seed)
    if isinstance(method, Peer):
        box = black_box(name)
        box.n_evals = 0
        draws = method.draw(box, starts, budget, SEED + seed)
        draws, n_evals = draws.reshape(-1, box.dim), box.n_evals
    elif isinstance(method, Approximation):
        draws, n_evals = method.draw(name, starts, budget, seed)
    else:
        draws, n_evals = draw_by_step(method, name, starts, budget, seed)
    key = dict(zip(KEY, (name, sampler, budget, seed), strict=True))
    return key | {"evaluations": n_evals} | errors(draws, reference_draws(name))


def own_budget(sampler: str) -> bool:
    """Whether a sampler chooses the number of evaluations itself."""
    method = SAMPLERS[sampler]
    return isinstance(method, Peer) and method.own_budget


def installed(samplers: list[str]) -> list[str]:
    """Samplers whose packages can be imported; print a line for each other one."""
    found = []
    for sampler in samplers:
        method = SAMPLERS[sampler]
        if not isinstance(method, Peer) or method.installed:
            found.append(sampler)
        else:
            print(f"{sampler} is left out: {method.package} is not installed.")
    return found


def read(paths: list[Path]) -> list[dict]:
    """Rows of earlier results; of those with the same key, the first."""
    if not paths:
        return []
    rows = pd.concat([pd.read_csv(path, comment="#") for path in paths])
    return rows.drop_duplicates(KEY).to_dict("records")


def table(rows: list[dict], name: str) -> list[dict]:
    """Medians over seeds: MMTV at each budget, the other measures at the largest one."""
    results = pd.DataFrame(rows)
    lines, here = [], results[results["target"] == name]
    budgets = {str(budget): np.nan for budget in sorted(set(here["budget"]) - {OWN})}
    for sampler, found in here.groupby("sampler", sort=False):
        medians = found.groupby("budget")[["evaluations", *MEASURES]].median()
        line = {"sampler": sampler} | budgets
        for budget, row in medians.iterrows():
            line["own" if budget == OWN else str(budget)] = row["MMTV"]
        last = medians.iloc[-1]
        lines.append(line | {key: last[key] for key in ("evaluations", *MEASURES[1:])})
    return lines


def write_picture(rows: list[dict], folder: Path):
    """Draw all rows."""
    path = folder / "black_box.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(pd.DataFrame(rows)).savefig(path, dpi=150)
    print(f"  {path}", flush=True)


def run(arguments):
    """Measure what is missing; print, write and draw the errors of each sampler."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    rows = read(arguments.earlier)
    if arguments.picture:
        rows = [row for row in rows if row["target"] in arguments.targets]
        for name in dict.fromkeys(row["target"] for row in rows):
            show(table(rows, name), name)
        write_picture(rows, arguments.output)
        return
    samplers = installed(arguments.samplers)
    lines = heading(
        "Error against evaluations",
        f"Mean marginal total variation (MMTV) to a long reference, median of {arguments.seeds} "
        f"seeds; {arguments.chains} chains from dispersed starts, of which surrogate_posterior, an "
        "approximation, takes the first. Every evaluation of all chains "
        "counts: starts, searches, tuning, burn-in. Not counted are runs that find how sample_smc "
        "and nautilus use up a budget, and, on lynx-hare, the draws of the prior, 150 a chain, of "
        "which the best is its start. At the largest budget also the error of "
        "the means in standard deviations and the log ratio of those, root mean squares over "
        "coordinates. own: budget that the sampler chooses.",
        versions({getattr(SAMPLERS[sampler], "package", "pymc") for sampler in samplers}),
    )
    known = {tuple(row[key] for key in KEY) for row in rows}
    for name in arguments.targets:
        for sampler in samplers:
            budgets = [OWN] if own_budget(sampler) else arguments.budgets
            for key in product([name], [sampler], budgets, range(arguments.seeds)):
                if key not in known:
                    rows += attempt(*key, arguments.chains)
        show(table(rows, name), name)
        write(rows, lines, arguments.output / "black_box.csv")
    write_picture(rows, arguments.output)


def attempt(name: str, sampler: str, budget: int, seed: int, chains: int) -> list[dict]:
    """Measure, or print why a peer could not do it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [measure(name, sampler, budget, chains, seed)]
    except Exception as error:
        if not isinstance(SAMPLERS[sampler], Peer):
            raise
        print(f"{sampler} on {name}, budget {budget}, seed {seed}: {error}", flush=True)
        return []
