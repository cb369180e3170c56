"""Samplers to compare, run through `pymc.sample`, and what their draws cost."""

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
    SurrogateHMCStep,
)

__all__ = [
    "REFERENCE",
    "SAMPLERS",
    "dataset",
    "four_chains",
    "longest_rest",
    "make_step",
    "n_evaluations",
    "sample",
    "transitions_per_draw",
]

REFERENCE = "DEMetropolisZ"
SAMPLERS = {
    REFERENCE: pm.DEMetropolisZ,
    "KameleonStep": partial(KameleonStep, steps_per_draw=20),
    "KameleonStep.paper": partial(KameleonStep.paper, steps_per_draw=20),
    "KameleonStep-1": partial(KameleonStep, steps_per_draw=1),
    "FastKameleonStep": partial(FastKameleonStep, steps_per_draw=20),
    "PCAKameleonStep": partial(PCAKameleonStep, steps_per_draw=20),
    "AdaptiveMetropolis": partial(AdaptiveMetropolisStep, steps_per_draw=20),
    "SurrogateHMC": SurrogateHMCStep,
    "Metropolis": pm.Metropolis,
    "Slice": pm.Slice,
}


def transitions_per_draw(sampler: str, dim: int) -> int:
    """Moves in a draw, each of which has a proposal of its own."""
    options = getattr(SAMPLERS[sampler], "keywords", {})
    return dim if sampler in ("Metropolis", "Slice") else options.get("steps_per_draw", 1)


def make_step(sampler: str, may_fail: bool):
    """Make a step, inside a model, whose log density may be NaN or not."""
    step = SAMPLERS[sampler]()
    if sampler == "Slice" and may_fail:
        for method in getattr(step, "methods", [step]):
            method.logp = partial(_finite_or_impossible, method.logp)
    return step


def _finite_or_impossible(log_density, x: np.ndarray) -> float:
    """Evaluate to -inf instead of NaN, which PyMC's slice sampler accepts."""
    value = float(log_density(x))
    return value if np.isfinite(value) else -np.inf


def n_evaluations(sampler: str, statistics: xr.Dataset, dim: int) -> int:
    """Evaluations of the log density at new points, over all chains and draws."""
    n_draws = statistics.sizes["chain"] * statistics.sizes["draw"]
    if sampler == "Slice":
        # For each coordinate the two ends and one point between; each step is one more.
        steps = statistics["nstep_out"].sum() + statistics["nstep_in"].sum()
        return int(steps) + 3 * dim * n_draws
    if "n_evals" in statistics:
        return int(statistics["n_evals"].sum())
    return n_draws * transitions_per_draw(sampler, dim)


def longest_rest(accepted: np.ndarray) -> int:
    """Length of the longest run of draws without an accepted move; shape (draws, moves)."""
    moves = np.flatnonzero(np.concatenate([[True], accepted.any(axis=1), [True]]))
    return int(np.diff(moves).max() - 1)


def dataset(result, group: str = "posterior"):
    """Group of what `pymc.sample` returned as an `xarray.Dataset`, on PyMC 5 and 6."""
    node = result[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node


class Stopwatch:
    """Callback of `pymc.sample` that takes the CPU time after three draws of each chain."""

    def __init__(self, tune: int, draws: int):
        self.marks = (0, tune - 1, tune + draws - 1)
        self.times: list[float] = []

    def __call__(self, trace, draw):
        if draw.draw_idx in self.marks:
            self.times.append(time.process_time())

    def seconds(self) -> np.ndarray:
        """Seconds of tuning (without its first draw) and of sampling, summed over chains."""
        return np.diff(np.reshape(self.times, (-1, 3)), axis=1).sum(axis=0)


def four_chains(step, cores=1, **options):
    """Call `pymc.sample` quietly, by default one chain at a time; draws of tuning are kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pm.sample(
            step=step,
            chains=4,
            cores=cores,
            progressbar=False,
            compute_convergence_checks=False,
            discard_tuned_samples=False,
            **options,
        )


def sample(
    model: pm.Model,
    make_step: Callable,
    *,
    draws: int,
    tune: int,
    initvals: list[dict[str, np.ndarray]],
    random_seed: int,
) -> tuple[Any, np.ndarray]:
    """Run `pymc.sample`, one chain after the other in this process.

    Returns
    -------
    result : InferenceData or DataTree
        With what was drawn in tuning.
    seconds : array, shape (2,)
        See `Stopwatch.seconds`.
    """
    logging.getLogger("pymc").setLevel(logging.ERROR)
    stopwatch = Stopwatch(tune, draws)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pm.sample(
            draws=draws,
            tune=tune,
            chains=len(initvals),
            cores=1,
            step=make_step(),
            initvals=initvals,
            random_seed=random_seed,
            callback=stopwatch,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
            progressbar=False,
        )
    return result, stopwatch.seconds()
