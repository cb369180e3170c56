"""Time of one transition, compared with `pymc.DEMetropolisZ` and between steps."""

import math
import pickle
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numba
import numpy as np
import pymc as pm

from benchmarks.common import DrivenStep, heading, mark, pymc_major, show, write
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
    black_box,
)
from pymc_kameleon.mcmc.history import RECENT
from pymc_kameleon.targets import Banana

__all__ = ["add_arguments", "run"]

PLAIN = {"compile_kwargs": {"mode": "cvm"}}
"""Compiled by PyTensor to C, which the compiled transitions cannot call."""

OPTIONS = {"": {}, "global_share=0": {"global_share": 0.0}, "plain Python": PLAIN}
STEPS = {
    step.__name__: step
    for step in (KameleonStep, FastKameleonStep, PCAKameleonStep, AdaptiveMetropolisStep)
}
SIZES = {
    "KameleonStep": "n_subsample",
    "PCAKameleonStep": "n_subsample",
    "FastKameleonStep": "n_features",
}


class Row(NamedTuple):
    """A step to time; `size` is that of its subsample or the number of its features."""

    sampler: str
    dim: int
    size: int
    steps_per_draw: int
    options: str = ""

    def columns(self) -> dict[str, Any]:
        return self._asdict() | {"size": str(self.size or "")}


BOUNDS = {
    # ratio to DEMetropolisZ by generation of PyMC
    Row("KameleonStep", 8, 1000, 20): {5: 0.6, 6: 0.45},
    Row("KameleonStep", 8, 1000, 1): {5: 1.2, 6: 1.2},
    Row("AdaptiveMetropolisStep", 8, 0, 20): {5: 0.06, 6: 0.06},
}
PAIRS = [
    # step, size, size of KameleonStep, largest ratio between the two
    ("FastKameleonStep", 300, 1000, 1.0),
    ("FastKameleonStep", 300, 10_000, 0.35),
    ("PCAKameleonStep", 1000, 1000, 1.0),
]
ABSORB_MICROSECONDS = 10.0
STATE_GROWTH, COST_GROWTH = 1.01, 1.1


def add_arguments(parser):
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8, 20, 50])
    parser.add_argument("--subsamples", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--features", type=int, nargs="+", default=[300])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 20], help="steps per draw")
    parser.add_argument("--blocks", type=int, default=15, help="pairs of timed blocks a row")
    parser.add_argument("--block-seconds", type=float, default=0.05)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))


@cache
def banana(dim: int) -> pm.Model:
    """Return the same model to all the steps of a dimension."""
    return Banana(0.03, 100.0, dim=dim).model()


def configurations(arguments) -> Iterator[Row]:
    """Rows of the first table."""
    steps = arguments.steps
    for dim in arguments.dims:
        kernel = ("", "global_share=0") if dim == 8 else ("",)
        largest = [10_000] if dim == 8 else []
        for n in arguments.subsamples + largest:
            yield from (Row("KameleonStep", dim, n, s, words) for s in steps for words in kernel)
        for n in arguments.features:
            both = ("", "global_share=0")
            yield from (Row("FastKameleonStep", dim, n, s, words) for s in steps for words in both)
        for n in (500, 1000) if dim == 8 else ():
            yield from (Row("PCAKameleonStep", dim, n, s, words) for s in steps for words in kernel)
        yield from (Row("AdaptiveMetropolisStep", dim, 0, s) for s in steps)
        for sampler, n in (("KameleonStep", 1000), ("AdaptiveMetropolisStep", 0)):
            if dim == 8:
                yield from (Row(sampler, dim, n, s, "plain Python") for s in steps)


def tuned(row: Row) -> DrivenStep:
    """Make a step and tune it, until it has a full subsample if it has one."""
    options = {"steps_per_draw": row.steps_per_draw} | OPTIONS[row.options]
    if row.sampler in SIZES:
        options[SIZES[row.sampler]] = row.size
    driven = DrivenStep(banana(row.dim), partial(STEPS[row.sampler], **options))
    transitions = 1000 + 500 * row.dim
    subsamples = SIZES.get(row.sampler) == "n_subsample"
    if subsamples:
        # The subsample comes from the later half of the chain, at counts that grow by a factor.
        growth = driven.step.sampler.template.growth
        transitions = max(transitions, math.ceil(2.1 * growth * row.size))
    driven.tune(math.ceil(transitions / row.steps_per_draw))
    found = driven.step.learner.learnt.points.shape[1] if subsamples else row.size
    if found != row.size:
        raise RuntimeError(f"{found} points in the subsample instead of {row.size}.")
    return driven


def compare(driven: DrivenStep, reference: DrivenStep, arguments) -> dict[str, float]:
    """Time alternating blocks of both; medians over the blocks and over the ratios of pairs."""
    both, seconds, accepted = (reference, driven), ([], []), []
    draws = [max(1, round(arguments.block_seconds / one.draw(5)[0])) for one in both]
    for _ in range(arguments.blocks):
        for one, n, times in zip(both, draws, seconds, strict=True):
            block_seconds, block_accepted = one.draw(n)
            times.append(block_seconds / getattr(one.step, "steps_per_draw", 1))
        accepted.append(block_accepted)
    low, ratio, high = np.quantile(np.divide(seconds[1], seconds[0]), [0.25, 0.5, 0.75])
    return {
        "accepted": np.mean(accepted),
        "us": 1e6 * np.median(seconds[1]),
        "reference us": 1e6 * np.median(seconds[0]),
        "ratio": ratio,
        "25%": low,
        "75%": high,
    }


def show_ratios(arguments):
    lines = heading(
        "transitions: CPU microseconds a transition, and the ratio to pymc.DEMetropolisZ",
        "Target: Banana(0.03, 100) in dim dimensions as a PyMC model. Every step is tuned first, "
        "then frozen. size: points of the subsample, for FastKameleonStep random features. us: "
        "time of step.step(point) divided by steps_per_draw. reference us: that of DEMetropolisZ's "
        "step.step(point) on the banana of dimension 8, in blocks of calls that alternate with the "
        f"step's own. ratio: median over {arguments.blocks} pairs of blocks, with quartiles. "
        "accepted: share of moves. No options means defaults, where 0.2 of the moves of a kernel "
        "adaptive step use the kernel; with global_share=0 all of them do. plain Python: "
        'compile_kwargs={"mode": "cvm"}, as for a black-box model.',
    )
    reference = DrivenStep(banana(8), pm.DEMetropolisZ)
    reference.tune(2000)
    rows = []
    for row in configurations(arguments):
        found = row.columns() | compare(tuned(row), reference, arguments)
        bound = BOUNDS.get(row)
        found |= (
            {"target": "", "met": ""}
            if bound is None
            else mark(found["ratio"], bound[pymc_major()])
        )
        rows.append(found)
        print(".", end="", flush=True)
    print()
    show(rows)
    write(rows, lines, arguments.output / "transitions.csv")


def show_pairs(arguments):
    lines = heading(
        "transitions: ratios to KameleonStep",
        "As above, in 8 dimensions with 20 steps a draw, with KameleonStep of n_subsample points "
        "instead of DEMetropolisZ; both with the same options.",
    )
    rows, make = [], cache(tuned)
    for words in ("", "global_share=0"):
        for sampler, size, n, bound in PAIRS:
            row = Row(sampler, 8, size, 20, words)
            reference = make(Row("KameleonStep", 8, n, 20, words))
            found = row.columns() | {"against": f"n_subsample={n}"}
            found |= compare(make(row), reference, arguments)
            rows.append(found | mark(found["ratio"], bound))
    show(rows)
    write(rows, lines, arguments.output / "transitions-pairs.csv")


def adapting(draws: int) -> DrivenStep:
    """Make a FastKameleonStep after this many draws, the later half of them after tuning."""
    options = {"n_features": 300, "steps_per_draw": 1, "adapt_after_tune": True}
    driven = DrivenStep(banana(8), partial(FastKameleonStep, **options))
    driven.tune(draws // 2)
    driven.draw(draws - draws // 2)
    return driven


def mean_seconds(function, times: int, prepare=lambda: None) -> float:
    """Mean CPU seconds of calls, each after a preparation that is not timed."""
    total = 0.0
    for _ in range(times):
        prepare()
        start = time.process_time()
        function()
        total += time.process_time() - start
    return total / times


def show_adaptation(arguments):
    lines = heading(
        "transitions: FastKameleonStep while it adapts",
        "Banana(0.03, 100) in 8 dimensions, 300 features, 1 step a draw, adapt_after_tune=True, "
        "past tuning: early after 1000, late after 100 000 draws. us: of a transition, in "
        "alternating blocks; positions enter the covariance, but it is not factored, whose time is "
        "in the last row and which comes at counts that grow by a fifth. absorb: features of 256 "
        "positions and the update of the covariance by them, divided by 256.",
    )
    steps = adapting(1000), adapting(100_000)
    sizes = [len(pickle.dumps(one.step.sampling_state)) for one in steps]
    for one in steps:
        one.step.learner.next_update = sys.maxsize
    found = compare(*reversed(steps), Namespace(blocks=arguments.blocks, block_seconds=0.01))
    step = steps[1].step
    block = len(step.learner.history.recent)
    absorb = mean_seconds(
        step.learner._absorb, 100, lambda: step.learner.history.cursor.put(RECENT, block)
    )
    refresh = partial(step.learner._refresh, step.rng)
    microseconds, growth = 1e6 * absorb / block, sizes[1] / sizes[0]
    rows = [
        {"what": "us", "early": found["reference us"], "late": found["us"]}
        | {"ratio": found["ratio"]} | mark(found["ratio"], COST_GROWTH),
        {"what": "bytes of the state", "early": sizes[0], "late": sizes[1]}
        | {"ratio": growth} | mark(growth, STATE_GROWTH),
        {"what": "us, absorb", "late": microseconds} | mark(microseconds, ABSORB_MICROSECONDS),
        {"what": "ms, factorisation", "late": 1e3 * mean_seconds(refresh, 10)},
    ]  # fmt: skip
    show(rows)
    write(rows, lines, arguments.output / "transitions-adaptation.csv")


DAYS = np.arange(1.0, 9.0)


def cooling(rate, start):
    return start * np.exp(-rate * DAYS)


def predation(rate, start):
    """Logarithm of the prey in eight years, of two species: 400 Runge-Kutta steps."""
    x, y, h, found = math.log(start), 0.0, 0.02, np.empty(8)
    for i in range(400):
        a, b = rate - 0.1 * math.exp(y), 0.02 * math.exp(x) - rate
        c, d = x + 0.5 * h * a, y + 0.5 * h * b
        a2, b2 = rate - 0.1 * math.exp(d), 0.02 * math.exp(c) - rate
        c, d = x + 0.5 * h * a2, y + 0.5 * h * b2
        a3, b3 = rate - 0.1 * math.exp(d), 0.02 * math.exp(c) - rate
        c, d = x + h * a3, y + h * b3
        a4, b4 = rate - 0.1 * math.exp(d), 0.02 * math.exp(c) - rate
        x += h * (a + 2.0 * (a2 + a3) + a4) / 6.0
        y += h * (b + 2.0 * (b2 + b3) + b4) / 6.0
        if i % 50 == 49:
            found[i // 50] = x
    return found


def tuned_on_black_box(function, observed, options) -> DrivenStep:
    """Make a step for the two parameters of a curve, and tune it."""
    with pm.Model() as model:
        rate, start = pm.LogNormal("rate", -0.5, 0.3), pm.LogNormal("start", 3.0, 0.3)
        pm.Normal("seen", black_box(function, shape=8)(rate, start), 0.2, observed=observed)
    driven = DrivenStep(model, partial(KameleonStep, steps_per_draw=20, **options))
    driven.tune(100)
    return driven


def show_black_boxes(arguments):
    lines = heading(
        "transitions: black boxes that Numba compiles",
        "KameleonStep on two parameters of a curve of eight numbers, which a black_box returns; 20 "
        "transitions a draw, tuned, then frozen. us: of a transition with a function of "
        "@numba.njit, which runs inside of the compiled loop, or is called from transitions in "
        "Python. reference us: with the same function in Python, in blocks of calls that "
        "alternate. ratio: median over pairs of blocks, with quartiles.",
    )
    rows = []
    for function in (cooling, predation):
        jitted, observed = numba.njit(function), function(0.6, 20.0)
        reference = tuned_on_black_box(function, observed, {})
        for how, options in (("compiled", {}), ("in Python", PLAIN)):
            driven = tuned_on_black_box(jitted, observed, options)
            found = compare(driven, reference, arguments)
            rows.append({"function": function.__name__, "transitions": how} | found)
    show(rows)
    write(rows, lines, arguments.output / "transitions-black-boxes.csv")


TABLES = {
    "DEMetropolisZ": show_ratios,
    "KameleonStep": show_pairs,
    "adaptation": show_adaptation,
    "black boxes": show_black_boxes,
}


def run(arguments):
    for name in arguments.tables:
        TABLES[name](arguments)
