"""What each part of `SurrogateHMCStep` is worth: its error without it, at equal evaluations."""

import logging
import warnings
from contextlib import ExitStack
from functools import partial
from unittest.mock import PropertyMock, patch

import numpy as np

from benchmarks.black_box import TARGETS, Step, draw_by_step, errors, reference_draws
from benchmarks.black_box_targets import starting_points
from benchmarks.common import heading, show, write
from pymc_kameleon import SurrogateHMCStep
from pymc_kameleon.gp.triangular_map import identity_map

__all__ = ["PARTS", "add_arguments", "run"]

STEP = "pymc_kameleon.steps.surrogate_hmc"
LEARNER = "pymc_kameleon.surrogate.learner"
FIT = "pymc_kameleon.gp.sparse_gp_fit"

PARTS: dict[str, tuple[dict, dict, bool]] = {
    "all parts": ({}, {}, False),
    "shared evaluations too": ({}, {}, True),
    "prior learnt, not known": ({f"{STEP}._prior_with_gradient": lambda target: None}, {}, False),
    "no search for the mode": ({}, {"start": "here"}, False),
    "no draws from the prior": (
        {f"{STEP}.SurrogateHMCStep._n_prior_points": PropertyMock(return_value=0)},
        {},
        False,
    ),
    "nothing where uncertain": ({f"{LEARNER}.EXPLORED": 0.0}, {}, False),
    "no hot trajectories while tuning": ({f"{LEARNER}.HOT_SHARE": 0.0}, {}, False),
    "no hot trajectories after tuning": ({f"{LEARNER}.LATER_HOT_SHARE": (0.0, 0.0)}, {}, False),
    "mean not confined": ({f"{FIT}.confined": lambda mean, *_: mean}, {}, False),
    "last surrogate not checked": ({f"{LEARNER}.N_CHECKED": 0}, {}, False),
    "no straight coordinates": (
        {f"{FIT}.fit_triangular_map": lambda u, weights: identity_map(len(u))},
        {},
        False,
    ),
    "100 centres": ({}, {"max_points": 100}, False),
    "gradients too": ({}, {"gradients": True}, False),
}
"""Name -> what is replaced, arguments, and whether chains share."""


def add_arguments(parser):
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--evaluations", type=int, default=3000, help="in all")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)


def error(name: str, part: str, evaluations: int, chains: int, seed: int) -> float:
    """MMTV of a run without a part."""
    replaced, options, shares = PARTS[part]
    step = Step(partial(SurrogateHMCStep, **options), tuning_share=0.6, shares=shares)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for target, value in replaced.items():
            stack.enter_context(patch(target, value))
        starts = starting_points(name, chains, seed)
        try:
            draws, _ = draw_by_step(step, name, starts, evaluations, seed)
        except NotImplementedError:  # there is no gradient
            return np.nan
    return errors(draws, reference_draws(name))["MMTV"]


def run(arguments):
    """Print and write the median error of each target and part."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Parts of SurrogateHMCStep",
        f"MMTV to a long reference after {arguments.evaluations} evaluations in all, of "
        f"{arguments.chains} chains: median of {arguments.seeds} seeds.",
    )
    rows = []
    for part in arguments.parts:
        row = {"part": part}
        for name in arguments.targets:
            key = (arguments.evaluations, arguments.chains)
            found = [error(name, part, *key, seed) for seed in range(arguments.seeds)]
            row[name] = float(np.median(found))
        rows.append(row)
        show([row])
        write(rows, lines, arguments.output / "surrogate_parts.csv")
    show(rows, "MMTV")
