"""Error of the posterior against the number of all evaluations, from dispersed starts."""

import logging
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.blocking import DictToArrayBijection, RaveledVars
from pytensor.compile.ops import wrap_py
from scipy import stats

from benchmarks.common import SEED, DrivenStep, heading, show, write
from benchmarks.sampling import REFERENCE
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    GPSurrogate,
    KameleonStep,
    SurrogateHMCStep,
    dispersed_starts,
)
from pymc_kameleon.demo import lynx_hare_model
from pymc_kameleon.demo.command import plausible_starts
from pymc_kameleon.targets import Banana, CorrelatedGaussian, Ring, Target
from pymc_kameleon.targets.simulators import (
    logistic_regression,
    simulate_logistic_regression,
    simulate_sir_epidemic,
    sir_epidemic,
)

__all__ = ["SAMPLERS", "TARGETS", "add_arguments", "run"]

TARGETS: dict[str, Target | Callable[[], pm.Model]] = {
    "banana-2": Banana(0.03, dim=2),
    "banana-8": Banana(0.03, dim=8),
    "twisted-banana-8": Banana(0.1, dim=8),
    "ring-8": Ring(10.0, 1.0, dim=8),
    "gaussian-20": CorrelatedGaussian(20),
    "logistic": lambda: logistic_regression(simulate_logistic_regression(random_seed=SEED)),
    "sir": lambda: sir_epidemic(simulate_sir_epidemic(random_seed=SEED)),
    "lynx-hare": lynx_hare_model,
}
"""Name -> density with exact draws, or what makes a model, whose reference is a long chain."""

SAMPLERS: dict[str, Callable] = {
    "SurrogateHMC": SurrogateHMCStep,
    "Kameleon": partial(KameleonStep, steps_per_draw=1),
    "Kameleon + GP": partial(KameleonStep, steps_per_draw=1, surrogate=GPSurrogate()),
    "AdaptiveMetropolis + GP": partial(
        AdaptiveMetropolisStep, steps_per_draw=1, surrogate=GPSurrogate()
    ),
    REFERENCE: pm.DEMetropolisZ,
}

TUNING_SHARE = 0.4
N_REFERENCE = 40_000
N_GRID = 400


def add_arguments(parser):
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[1000, 3000, 10_000])
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)


@cache
def model_of(name: str) -> pm.Model:
    """A model whose likelihood is a black box where it could be compiled."""
    target = TARGETS[name]
    if not isinstance(target, Target):
        return target()

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def log_density(x):
        return np.asarray(target.log_density(x[None])[0])

    with pm.Model() as model:
        pm.Potential("log_density", log_density(pm.Flat("x", shape=target.dim)))
    return model


def starting_points(name: str, chains: int, seed: int) -> list[np.ndarray]:
    """Raveled unconstrained points that are not draws of the posterior."""
    model, target = model_of(name), TARGETS[name]
    if isinstance(target, Target):
        scales = target.scales if isinstance(target, CorrelatedGaussian) else 1.0
        normals = np.random.default_rng(SEED + seed).standard_normal((chains, target.dim))
        return list(3.0 * scales * normals)
    find = plausible_starts if name == "lynx-hare" else dispersed_starts
    points = []
    for start in find(model, chains, SEED + seed):
        initial = pm.initial_point.make_initial_point_fn(model=model, overrides=start)(0)
        points.append(DictToArrayBijection.map(initial).data)
    return points


@cache
def reference_draws(name: str) -> np.ndarray:
    """Draws of the posterior, shape (n, d), raveled and unconstrained."""
    target = TARGETS[name]
    if isinstance(target, Target):
        return target.draw(N_REFERENCE, np.random.default_rng(SEED))
    driven = DrivenStep(model_of(name), partial(AdaptiveMetropolisStep, steps_per_draw=20))
    chains = []
    for seed, start in enumerate(starting_points(name, 4, 99)):
        n_draws = N_REFERENCE // 40
        chains.append(chain(driven, start, seed, 10_000, 20 * n_draws)[0])
    return np.concatenate(chains)


def chain(driven: DrivenStep, start, seed: int, tuning: int, budget: int) -> tuple[np.ndarray, int]:
    """Draws after tuning (n, d), and evaluations in all.

    Tuning ends after `tuning` evaluations, and the chain after `budget` further ones.
    """
    driven.begin([SEED, seed])
    point_map = DictToArrayBijection.map(driven.start).point_map_info
    point = DictToArrayBijection.rmap(RaveledVars(start, point_map))
    n_evals, draws, end = 0, [], np.inf
    while n_evals < end:
        if end == np.inf and n_evals >= tuning:
            driven.step.stop_tuning()
            end = n_evals + budget
        point, statistics = driven.step.step(point)
        n_evals += int(statistics[0].get("n_evals", 1))
        if end < np.inf:
            draws.append(DictToArrayBijection.map(point).data)
    return np.array(draws), n_evals


def marginal_total_variation(draws: np.ndarray, reference: np.ndarray) -> float:
    """Mean over coordinates of half the L1 distance of two kernel density estimates."""
    distances = []
    for x, expected in zip(draws.T, reference.T, strict=True):
        low, high = np.quantile(expected, [0.0005, 0.9995])
        margin = 0.3 * (high - low)
        grid = np.linspace(low - margin, high + margin, N_GRID)
        if np.ptp(x) == 0.0:
            distances.append(1.0)
            continue
        densities = [stats.gaussian_kde(sample)(grid) for sample in (x, expected[::8])]
        distances.append(0.5 * np.trapezoid(np.abs(densities[0] - densities[1]), grid))
    return float(np.mean(distances))


def measure(name: str, sampler: str, budget: int, chains: int, seed: int) -> dict:
    """Sample with a new step; error and evaluations."""
    driven = DrivenStep(model_of(name), SAMPLERS[sampler])
    tuning = round(TUNING_SHARE * budget / chains)
    rest = budget // chains - tuning
    results = [
        chain(driven, start, 100 * seed + i, tuning, rest)
        for i, start in enumerate(starting_points(name, chains, seed))
    ]
    shortest = min(len(draws) for draws, _ in results)
    draws = np.concatenate([draws[-shortest:] for draws, _ in results])
    return {
        "target": name,
        "sampler": sampler,
        "budget": budget,
        "seed": seed,
        "evaluations": sum(n for _, n in results),
        "MMTV": marginal_total_variation(draws, reference_draws(name)),
    }


def run(arguments):
    """Print the median error of each sampler at each budget."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Error against evaluations",
        f"Mean marginal total variation to a long reference, median of {arguments.seeds} seeds, "
        f"{arguments.chains} chains from dispersed starts. Every evaluation of all chains counts; "
        f"{TUNING_SHARE:.0%} of them tune.",
    )
    rows = []
    for name in arguments.targets:
        table = []
        for sampler in arguments.samplers:
            line = {"sampler": sampler}
            for budget in arguments.budgets:
                found = [
                    measure(name, sampler, budget, arguments.chains, seed)
                    for seed in range(arguments.seeds)
                ]
                rows += found
                line[str(budget)] = round(float(np.median([row["MMTV"] for row in found])), 3)
            table.append(line)
        show(table, name)
    write(rows, lines, arguments.output / "black_box.csv")
