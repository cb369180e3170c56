"""Fine solves an effective draw with coarse models: groundwater flow on three meshes."""

import logging
import time
from functools import cache, partial

import arviz as az
import numpy as np
import pymc as pm
from scipy import sparse
from scipy.interpolate import RegularGridInterpolator

from benchmarks.common import SEED, heading, show, write
from benchmarks.sampling import four_chains
from pymc_kameleon import GPSurrogate, KameleonStep, MultilevelStep, SurrogateHMCStep, black_box

__all__ = ["STEPS", "add_arguments", "aquifer", "pressure", "run"]

MESHES = 8, 20, 56
COST_RATIOS = 8.0, 8.0
"""Of the meshes, as their numbers of cells are."""

WAVES = (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 1)
WELLS = np.stack(np.meshgrid(*[np.linspace(0.1, 0.9, 5)] * 2, indexing="ij"), axis=-1)
NOISE = 0.01


def pressure(n: int, theta: np.ndarray) -> np.ndarray:
    """Solve for the pressure at 25 wells, by finite volumes on n x n cells of the unit square.

    It is 1 at one side and 0 at the opposite one, and nothing flows through the others. The log
    permeability is a sum of cosines with the coefficients `theta` (6,).
    """
    middle = (np.arange(n) + 0.5) / n
    along = [np.cos(np.pi * i * middle) for i in range(3)]
    log_k = sum(
        2.0 * t / (i + j) * np.outer(along[i], along[j])
        for t, (i, j) in zip(theta, WAVES, strict=True)
    )
    k, index = np.exp(log_k), np.arange(n * n).reshape(n, n)
    links, conductances = [], []
    for axis in (0, 1):
        a, b = (np.take(index, range(s, n - 1 + s), axis).ravel() for s in (0, 1))
        links.append([a, b])
        conductances.append(2.0 / (1.0 / k.ravel()[a] + 1.0 / k.ravel()[b]))
    (a, b), c = np.concatenate(links, axis=1), np.concatenate(conductances)
    matrix = sparse.coo_array((np.r_[c, c, -c, -c], (np.r_[a, b, a, b], np.r_[a, b, b, a])))
    sides, inflow = np.zeros((n, n)), np.zeros((n, n))
    sides[0], sides[-1] = 2.0 * k[0], 2.0 * k[-1]
    inflow[0] = sides[0]
    matrix = (matrix + sparse.diags_array(sides.ravel())).tocsc()
    solved = sparse.linalg.spsolve(matrix, inflow.ravel()).reshape(n, n)
    return RegularGridInterpolator((middle, middle), solved, bounds_error=False, fill_value=None)(
        WELLS
    ).ravel()


@cache
def aquifer(n: int) -> pm.Model:
    """Build the model on a mesh of n x n cells: six coefficients of the log permeability."""
    rng = np.random.default_rng(SEED)
    observed = pressure(2 * MESHES[-1], rng.standard_normal(6)) + NOISE * rng.standard_normal(25)
    solve = black_box(partial(pressure, n), shape=(25,), name=f"pressure_{n}")
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=6)
        pm.Normal("observed", solve(theta), NOISE, observed=observed)
    return model


def levels(meshes, cost_ratios):
    """Return a function that makes a step whose coarse models have these meshes.

    They are built before the model that is sampled is that of the context.
    """
    coarse = [aquifer(n) for n in meshes]
    return lambda: MultilevelStep(coarse=coarse, cost_ratio=cost_ratios)


STEPS = {
    "KameleonStep": (lambda: partial(KameleonStep, steps_per_draw=1), 3000, 6000),
    "KameleonStep, GPSurrogate": (
        lambda: partial(KameleonStep, surrogate=GPSurrogate()),
        1000,
        500,
    ),
    "SurrogateHMCStep": (lambda: SurrogateHMCStep, 300, 500),
    "MultilevelStep, 2 levels": (
        partial(levels, MESHES[:1], [COST_RATIOS[0] * COST_RATIOS[1]]),
        100,
        500,
    ),
    "MultilevelStep, 3 levels": (partial(levels, MESHES[:2], COST_RATIOS), 100, 500),
}
"""Name -> what returns a function that makes the step, and draws of tuning and after it."""


def add_arguments(parser):
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seeds", type=int, default=1)


def measure(fine: pm.Model, name: str, seed: int) -> dict:
    """Sample once: fine solves and effective draws, with tuning and after it, and seconds."""
    prepared, tune, draws = STEPS[name]
    make = prepared()
    start = time.perf_counter()
    with fine:
        idata = four_chains(make(), tune=tune, draws=draws, random_seed=seed)
    seconds = time.perf_counter() - start
    found = az.summary(idata, round_to="none").astype(float)
    after, before = (idata[group] for group in ("sample_stats", "warmup_sample_stats"))
    solves, tuning = float(after["n_evals"].sum()), float(before["n_evals"].sum())
    coarse = [float(s["coarse_evals"].sum()) for s in (after, before) if "coarse_evals" in s]
    smallest = found["ess_bulk"].min()
    return {
        "step": name,
        "seed": seed,
        "ess_bulk": smallest,
        "r_hat": found["r_hat"].max(),
        "solves": solves,
        "of tuning": tuning,
        "coarse solves": sum(coarse),
        "solves per ess": solves / smallest,
        "with tuning": (solves + tuning) / smallest,
        "ess per s": smallest / seconds,
        "accept": float(after["accept"].mean()),
        "seconds": seconds,
        "means": " ".join(f"{value:.3f}" for value in found["mean"]),
        "sds": " ".join(f"{value:.3f}" for value in found["sd"]),
    }


def run(arguments):
    """Print and write fine solves an effective draw."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    fine = aquifer(MESHES[-1])
    for n in MESHES:
        start = time.perf_counter()
        for _ in range(20):
            pressure(n, np.zeros(6))
        print(f"{n} x {n} cells: {1e3 * (time.perf_counter() - start) / 20:.2f} ms a solve")
    lines = heading(
        "Coarse models",
        "Groundwater flow, six parameters: solves of the finest of three meshes for each effective "
        "draw of the worst parameter, four chains.",
    )
    rows: list[dict] = []
    for name in arguments.steps:
        for seed in range(arguments.seeds):
            rows.append(measure(fine, name, seed))
            show(rows[-1:])
            write(rows, lines, arguments.output / "coarse_models.csv")
    show(rows, "all")
