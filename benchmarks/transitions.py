"""Time of one transition, compared with `pymc.DEMetropolisZ`."""

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pymc as pm

from benchmarks.common import DrivenStep, heading, mark, pymc_major, show, write
from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep
from pymc_kameleon.targets import Banana

__all__ = ["add_arguments", "run"]

PLAIN = {"mode": "cvm"}
"""Compiled by PyTensor to C, which the compiled transitions cannot call."""

BOUNDS = {
    # sampler, dim, n_subsample, steps_per_draw, options: ratio by generation of PyMC
    ("KameleonStep", 8, 1000, 20, ""): {5: 0.6, 6: 0.45},
    ("KameleonStep", 8, 1000, 1, ""): {5: 1.2, 6: 1.2},
    ("AdaptiveMetropolisStep", 8, 0, 20, ""): {5: 0.06, 6: 0.06},
}


def add_arguments(parser):
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8, 20, 50])
    parser.add_argument("--subsamples", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 20], help="steps per draw")
    parser.add_argument("--blocks", type=int, default=15, help="pairs of timed blocks a row")
    parser.add_argument("--block-seconds", type=float, default=0.05)


@cache
def banana(dim: int) -> pm.Model:
    """Return the same model to all the steps of a dimension."""
    return Banana(0.03, 100.0, dim=dim).model()


def configurations(arguments) -> Iterator[tuple[str, int, int, int, str, dict[str, Any]]]:
    """Rows of the table: sampler, dim, n_subsample, steps_per_draw, options in words, options."""
    for dim in arguments.dims:
        for n in arguments.subsamples:
            for steps in arguments.steps:
                yield "KameleonStep", dim, n, steps, "", {}
                if dim == 8:
                    yield "KameleonStep", dim, n, steps, "global_share=0", {"global_share": 0}
        for steps in arguments.steps:
            yield "AdaptiveMetropolisStep", dim, 0, steps, "", {}
        if dim == 8:
            for steps in arguments.steps:
                options = {"compile_kwargs": PLAIN}
                yield "KameleonStep", dim, 1000, steps, "plain Python", options
                yield "AdaptiveMetropolisStep", dim, 0, steps, "plain Python", options


def tuned(sampler: str, dim: int, n_subsample: int, steps: int, options: dict) -> DrivenStep:
    """Make a step and tune it until it has a full subsample."""
    options = {"steps_per_draw": steps} | options
    transitions = 1000 + 500 * dim
    if sampler == "KameleonStep":
        options["n_subsample"] = n_subsample
        # The subsample comes from the later half of the chain, at counts that grow by a tenth.
        transitions = max(transitions, math.ceil(2.3 * n_subsample))
        make_step = partial(KameleonStep, **options)
    else:
        make_step = partial(AdaptiveMetropolisStep, **options)
    driven = DrivenStep(banana(dim), make_step)
    driven.tune(math.ceil(transitions / steps))
    if sampler == "KameleonStep" and driven.step.learnt.points.shape[1] != n_subsample:
        found = driven.step.learnt.points.shape[1]
        raise RuntimeError(f"{found} points in the subsample instead of {n_subsample}.")
    return driven


def compare(driven: DrivenStep, steps: int, reference: DrivenStep, arguments) -> dict[str, float]:
    """Time alternating blocks of both; medians over the blocks and over the ratios of pairs."""
    seconds, reference_seconds, accepted = [], [], []
    draws = max(1, round(arguments.block_seconds / driven.draw(5)[0]))
    reference_draws = max(1, round(arguments.block_seconds / reference.draw(5)[0]))
    for _ in range(arguments.blocks):
        reference_seconds.append(reference.draw(reference_draws)[0])
        block_seconds, block_accepted = driven.draw(draws)
        seconds.append(block_seconds / steps)
        accepted.append(block_accepted)
    low, ratio, high = np.quantile(np.divide(seconds, reference_seconds), [0.25, 0.5, 0.75])
    return {
        "accepted": np.mean(accepted),
        "us": 1e6 * np.median(seconds),
        "DEMZ us": 1e6 * np.median(reference_seconds),
        "ratio": ratio,
        "25%": low,
        "75%": high,
    }


def run(arguments):
    lines = heading(
        "transitions: CPU microseconds a transition, and the ratio to pymc.DEMetropolisZ",
        "Target: Banana(0.03, 100) in dim dimensions as a PyMC model. Every step is tuned first, "
        "then frozen. us: time of step.step(point) divided by steps_per_draw. DEMZ us: that of "
        "DEMetropolisZ's step.step(point) on the banana of dimension 8, in blocks of calls that "
        f"alternate with the step's own. ratio: median over {arguments.blocks} pairs of blocks, "
        "with quartiles. accepted: share of moves. No options means defaults, where 0.3 of "
        "KameleonStep's moves use the kernel; with global_share=0 all of them do. plain Python: "
        'compile_kwargs={"mode": "cvm"}, as for a black-box model.',
    )
    reference = DrivenStep(banana(8), pm.DEMetropolisZ)
    reference.tune(2000)
    rows = []
    for sampler, dim, n, steps, words, options in configurations(arguments):
        driven = tuned(sampler, dim, n, steps, options)
        row = {
            "sampler": sampler,
            "dim": dim,
            "n_subsample": str(n or ""),
            "steps_per_draw": steps,
            "options": words,
            **compare(driven, steps, reference, arguments),
        }
        bound = BOUNDS.get((sampler, dim, n, steps, words))
        row |= (
            {"target": "", "met": ""} if bound is None else mark(row["ratio"], bound[pymc_major()])
        )
        rows.append(row)
        print(".", end="", flush=True)
    print()
    show(rows)
    write(rows, lines, arguments.output / "transitions.csv")
