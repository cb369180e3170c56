"""Predicted error of `surrogate_posterior` against its true one, by the plain call."""

import logging
import time
import warnings
from itertools import product

import numpy as np
import pandas as pd

from benchmarks.black_box import reference_draws
from benchmarks.black_box_targets import DENSITIES, MODELS, model_of
from benchmarks.common import heading, show, write
from benchmarks.compare_targets import unconstrained
from pymc_kameleon import surrogate_posterior
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.approximate.predicted_error import marginal_total_variation

__all__ = ["TARGETS", "add_arguments", "run"]

TARGETS = ["banana-2", "banana-8", "two-modes", *MODELS]

N_DRAWS = 4000
"""Of the plain call."""

FACTOR, LARGE = 2.0, 0.1
"""By which predicted and true error are to agree, and a true error that is to be warned of."""


def add_arguments(parser):
    parser.add_argument(
        "--targets", nargs="+", choices=[*DENSITIES, *MODELS], default=TARGETS, metavar="TARGET"
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[100, 170, 250])
    parser.add_argument("--seeds", type=int, default=10)


def measure(name: str, budget: int, seed: int) -> dict:
    """Call it once: true error, what it says of itself, seconds in all."""
    model = model_of(name, with_prior=True)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = surrogate_posterior(
            model, n_evaluations=budget, random_seed=seed, progressbar=False
        )
    seconds = time.perf_counter() - start
    found = group_dataset(result, "posterior").attrs
    told = ["predicted_error", "believable", "effective_share", "pareto_k"]
    evidence = ["log_evidence", "log_evidence_error"]
    error = marginal_total_variation(unconstrained(model, result, N_DRAWS), reference_draws(name))
    return (
        {"target": name, "budget": budget, "seed": seed, "error": error}
        | {key: found[key] for key in (*told, *evidence)}
        | {"seconds": seconds}
    )


def summary(rows: pd.DataFrame) -> dict:
    """Share within the factor, and share of large errors that there was a warning of."""
    ratios = np.abs(np.log(rows["predicted_error"] / rows["error"]))
    large, warned = rows["error"] > LARGE, rows["believable"] == 0
    return {
        "runs": len(rows),
        "within the factor": np.mean(ratios < np.log(FACTOR)),
        "without a warning": np.sum(~warned),
        "of these within": np.mean(ratios[~warned] < np.log(FACTOR)),
        "large errors": large.sum(),
        "of these warned": np.mean(warned[large]),
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
    budgets = [{"budget": b} | summary(part) for b, part in table.groupby("budget")]
    show([*budgets, {"budget": "all"} | summary(table)], "agreement")
