"""Microseconds that a surrogate takes: asked by the first stage, taught, and fitted."""

import time
from collections.abc import Callable
from functools import partial

import numba
import numpy as np

from benchmarks.common import SEED, DrivenStep, heading, mark, show, write
from benchmarks.simulators import logistic_regression, simulate_logistic_regression
from pymc_kameleon import AdaptiveMetropolisStep, MALAStep
from pymc_kameleon.gp.sparse_gp import (
    SparseGP,
    add_centre,
    log_surrogate,
    predict_with_gradient,
)
from pymc_kameleon.surrogate import GPSurrogate

__all__ = ["add_arguments", "run"]

DIM = 5
BOUNDS = {200: 30.0, 500: 120.0}
"""Largest microseconds of a prediction, by the number of points."""

TAUGHT = 20
"""Points that are added, one after the other, in a timed block."""

STEPS_PER_DRAW = 20
STEPS = {"AdaptiveMetropolisStep": AdaptiveMetropolisStep, "MALAStep": MALAStep}


def add_arguments(parser):
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 200, 500])
    parser.add_argument("--proposals", type=int, default=200, help="predictions in a block")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--tuning", type=int, default=5000, help="transitions before those timed")


# compiled loops -------------------------------------------------------------------------------


@numba.njit
def ask(process, points):
    """Predict at every row, as the first stage does; returns what the compiler must not drop."""
    total = 0.0
    for i in range(len(points)):
        total += log_surrogate(process, points[i])
    return total


@numba.njit
def ask_with_gradient(process, points):
    """Predict value and gradient at every row."""
    total, dim = 0.0, points.shape[1]
    mean, cross, covariance = np.empty(dim), np.empty(dim), np.empty((dim, dim))
    for i in range(len(points)):
        total += predict_with_gradient(process, points[i], mean, cross, covariance)[0]
    return total


@numba.njit
def learn_all(process, points, values):
    for i in range(len(points)):
        add_centre(process, points[i], values[i])


# timing ---------------------------------------------------------------------------------------


def examples(n: int, has_gradients: bool, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Points (n, d), values and gradients of a log-likelihood with heavier tails than a Gaussian.

    It is the sum over coordinates of -4 log cosh x.
    """
    points = rng.standard_normal((n, DIM))
    gradients = -4.0 * np.tanh(points) if has_gradients else np.empty((n, 0))
    return points, -4.0 * np.log(np.cosh(points)).sum(axis=1), gradients


def fitted(data, capacity: int) -> SparseGP:
    """Return a process that holds these points and has room for `capacity` of them."""
    has_gradients = data[2].shape[1] > 0
    surrogate = GPSurrogate(max_points=capacity * (1 + data[2].shape[1]))
    process = surrogate.new_process(DIM, has_gradients)
    surrogate.fit_into(process, *data)
    return process


def seconds(function: Callable, blocks: int, prepare: Callable = tuple) -> float:
    """Median CPU seconds of a call, after one that compiles it; `prepare` makes the arguments."""
    times = []
    for _ in range(blocks + 1):
        arguments = prepare()
        start = time.process_time()
        function(*arguments)
        times.append(time.process_time() - start)
    return float(np.median(times[1:]))


def cost(size: int, has_gradients: bool, arguments) -> dict[str, float]:
    """Return a row: `size` counts numbers, a point with its gradient d + 1 of them."""
    rng, blocks = np.random.default_rng(SEED), arguments.blocks
    n = size // (DIM + 1) if has_gradients else size
    data, new = examples(n, has_gradients, rng), examples(TAUGHT, has_gradients, rng)
    proposals = examples(arguments.proposals, has_gradients, rng)[0]
    process, asked = fitted(data, n), ask_with_gradient if has_gradients else ask
    predict = seconds(partial(asked, process, proposals), blocks) / len(proposals)
    few = min(blocks, 3)
    learning = seconds(learn_all, few, lambda: (fitted(data, n + TAUGHT), *new[:2]))
    before = [part[: round(n / GPSurrogate().refit)] for part in data]
    fit_again = GPSurrogate().fit_into
    refitting = seconds(fit_again, few, lambda: (fitted(before, n), *data))
    row = {"surrogate": "value and gradient" if has_gradients else "value", "dim": DIM, "points": n}
    row |= {"us, predict": 1e6 * predict, "us, learn": 1e6 * learning / TAUGHT}
    row |= {"ms, refit": 1e3 * refitting}
    if not has_gradients and size in BOUNDS:
        row |= mark(row["us, predict"], BOUNDS[size])
    return row


def show_costs(arguments):
    lines = heading(
        "surrogate-cost: CPU time of a surrogate in 5 dimensions",
        "Values of a sum of -4 log cosh over coordinates at standard normal points. predict: mean "
        "and variance at a proposal in a compiled loop, what the first stage of a transition "
        f"does. learn: a point more, {TAUGHT} in a row. refit: hyperparameters, centres and "
        "weights, when the number of points has grown to this one by the factor of "
        "GPSurrogate.refit. "
        f"Medians over {arguments.blocks} blocks (3 where a process is fitted for each).",
    )
    rows = []
    for has_gradients in (False, True):
        for size in arguments.sizes:
            rows.append(cost(size, has_gradients, arguments))
            print(".", end="", flush=True)
    print()
    show(rows)
    write(rows, lines, arguments.output / "surrogate-cost.csv")


# whole transitions ----------------------------------------------------------------------------


def transition(step_name: str, surrogate: GPSurrogate | None, arguments) -> dict:
    """Time transitions after tuning."""
    make = partial(STEPS[step_name], steps_per_draw=STEPS_PER_DRAW, surrogate=surrogate)
    data = simulate_logistic_regression(random_seed=SEED)
    driven = DrivenStep(logistic_regression(data), make)
    driven.tune(arguments.tuning // STEPS_PER_DRAW)
    draws, evaluations = 50, driven.step.target.n_evaluations
    timed = [driven.draw(draws) for _ in range(arguments.blocks)]
    made = driven.step.target.n_evaluations - evaluations
    transitions = arguments.blocks * draws * STEPS_PER_DRAW
    stage = driven.step.stage
    return {
        "step": step_name,
        "surrogate": "" if surrogate is None else f"max_points={surrogate.max_points}",
        "points": "" if stage is None else str(stage.process.count[0]),
        "accepted": np.mean([accepted for _, accepted in timed]),
        "evaluations %": 100 * made / transitions,
        "us": 1e6 * np.median([spent for spent, _ in timed]) / STEPS_PER_DRAW,
    }


def show_transitions(arguments):
    lines = heading(
        "surrogate-cost: CPU microseconds of a transition, with and without a surrogate",
        f"T5, a logistic regression of 1000 points in 5 dimensions, compiled; {STEPS_PER_DRAW} "
        f"transitions a draw, after {arguments.tuning} of tuning. us: the whole transition, its "
        "evaluations of the log-likelihood included. more: with the surrogate, over what the "
        "plain step takes for as many evaluations.",
    )
    rows = []
    for step_name in STEPS:
        plain = transition(step_name, None, arguments)
        rows.append(plain)
        for max_points in (100, 300):
            row = transition(step_name, GPSurrogate(max_points=max_points), arguments)
            rows.append(row | {"more": row["us"] - plain["us"] * row["evaluations %"] / 100})
    show(rows)
    write(rows, lines, arguments.output / "surrogate-cost-transitions.csv")


def run(arguments):
    show_costs(arguments)
    show_transitions(arguments)
