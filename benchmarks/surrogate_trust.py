"""Predicted error of `surrogate_posterior` against its true one, by the plain call."""

import logging
import time
import warnings
from itertools import product

import numpy as np
import pandas as pd

from benchmarks import trust_targets
from benchmarks.black_box import reference_draws
from benchmarks.black_box_targets import DENSITIES, MODELS, model_of
from benchmarks.common import heading, show, write
from benchmarks.compare_targets import unconstrained
from pymc_kameleon import surrogate_posterior
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.approximate.predicted_error import marginal_total_variation

__all__ = ["TARGETS", "add_arguments", "run"]

TARGETS = ["banana-2", "banana-8", "two-modes", *MODELS, *trust_targets.TARGETS]

N_DRAWS = 4000
"""Of the plain call."""

FACTOR, LARGE, SMALL = 2.0, 0.1, 0.05
"""By which predicted and true error are to agree, a true error that is to be warned of, and one
that is not."""


def add_arguments(parser):
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=[*DENSITIES, *MODELS, *trust_targets.TARGETS],
        default=TARGETS,
        metavar="TARGET",
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[100, 170, 250])
    parser.add_argument("--seeds", type=int, default=10)


def measure(name: str, budget: int, seed: int) -> dict:
    """Call it once: true error, what it says of itself, seconds in all."""
    is_cheap = name in trust_targets.TARGETS
    model = trust_targets.model_of(name) if is_cheap else model_of(name, with_prior=True)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = surrogate_posterior(
            model, n_evaluations=budget, random_seed=seed, progressbar=False
        )
    seconds = time.perf_counter() - start
    posterior = group_dataset(result, "posterior")
    found = posterior.attrs
    told = ["predicted_error", "believable", "effective_share", "pareto_k"]
    evidence = ["log_evidence", "log_evidence_error"]
    if is_cheap:
        draws, expected = (
            trust_targets.normal_scores(name, posterior),
            trust_targets.reference(name),
        )
        excess = found["log_evidence"] - trust_targets.evidence(name)
        held_out = trust_targets.TARGETS[name].held_out
    else:
        draws, expected = unconstrained(model, result, N_DRAWS), reference_draws(name)
        excess, held_out = np.nan, False
    return (
        {"target": name, "held_out": held_out, "budget": budget, "seed": seed}
        | {"error": marginal_total_variation(draws, expected)}
        | {key: found[key] for key in (*told, *evidence)}
        | {"evidence_excess": excess, "seconds": seconds}
    )


def summary(rows: pd.DataFrame) -> dict:
    """Share within the factor, and share of large errors that there was a warning of."""
    ratios = np.abs(np.log(rows["predicted_error"] / rows["error"]))
    large, small = rows["error"] > LARGE, rows["error"] < SMALL
    warned = rows["believable"] == 0
    return {
        "runs": len(rows),
        "within the factor": np.mean(ratios < np.log(FACTOR)),
        "without a warning": np.sum(~warned),
        "of these within": np.mean(ratios[~warned] < np.log(FACTOR)),
        "large errors": large.sum(),
        "of these warned": np.mean(warned[large]),
        "small errors": np.sum(small),
        "of these warned too": np.mean(warned[small]),
    }


def run(arguments):
    """Print and write errors, true and predicted."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Predicted and true error",
        "surrogate_posterior(n_evaluations=budget), 4 x 1000 draws: mean marginal total variation "
        "to a long reference, of which exact draws of this number have about .01.",
    )
    rows = []
    for name in arguments.targets:
        for key in product([name], arguments.budgets, range(arguments.seeds)):
            rows.append(measure(*key))
            show(rows[-1:])
        write(rows, lines, arguments.output / "surrogate_trust.csv")
    table = pd.DataFrame(rows)
    medians = table.groupby(["target", "budget"], sort=False)[["error", "predicted_error"]]
    show(medians.median().reset_index().to_dict("records"), "medians")
    groups = table.groupby(["held_out", "budget"])
    show([{"held_out": h, "budget": b} | summary(part) for (h, b), part in groups], "agreement")
