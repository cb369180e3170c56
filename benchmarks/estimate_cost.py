"""Milliseconds and precision of the estimated marginal likelihood of a classifier."""

import os
import time
from copy import copy
from pathlib import Path

import numpy as np

from benchmarks.classification import read
from benchmarks.common import SEED, heading, mark, show, write
from pymc_kameleon.pseudo_marginal import GPClassificationEstimator

__all__ = ["add_arguments", "run"]

BOUNDS = {"laplace": 15.0, "ep": 60.0}
"""Largest milliseconds of an estimate of 100 draws on Glass."""

N_IMPORTANCE = 100

FORMS = {
    "sd": (0.02, True),
    "sd, no pairs": (0.02, False),
    "sd, share 0": (0.0, True),
    "sd, share 0.01": (0.01, True),
    "sd, share 0.05": (0.05, True),
    "sd, plain": (0.0, False),
}
"""Name -> share of the prior, and whether draws are in antithetic pairs."""


def add_arguments(parser):
    parser.add_argument("--estimates", type=int, default=200, help="for each standard deviation")
    parser.add_argument("--priors", type=int, default=3, help="draws from the prior of the paper")


def hyperparameters(dimension: int, n_priors: int) -> dict[str, tuple[np.ndarray, float]]:
    """Name -> lengthscales and amplitude; the prior is log lengthscale^2 ~ N(0, 5)."""
    rng = np.random.default_rng(SEED)
    places = {
        f"prior {k + 1}": (np.exp(rng.normal(0.0, np.sqrt(5.0), dimension) / 2), 1.0)
        for k in range(n_priors)
    }
    for lengthscale, amplitude in ((0.3, 1.0), (1.0, 1.0), (3.0, 1.0), (10.0, 1.0), (3.0, 5.0)):
        name = f"all {lengthscale:g}" + (f", amplitude {amplitude:g}" if amplitude != 1.0 else "")
        places[name] = np.full(dimension, lengthscale), amplitude
    return places


def milliseconds(function, n: int = 15) -> float:
    """Median of `n` calls, after one that is not counted."""
    function()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def measured(estimator, place, n_estimates) -> dict:
    """Times of an estimate and its parts, and standard deviations of its forms."""
    rng = np.random.default_rng(SEED)
    density = estimator.approximate(*place)
    whole = milliseconds(lambda: estimator(*place, N_IMPORTANCE, rng))
    kernel = milliseconds(lambda: estimator.prior(*place))
    result = {
        "ms": whole,
        "kernel": kernel,
        "density": milliseconds(lambda: estimator.approximate(*place)) - kernel,
        "draws": milliseconds(lambda: estimator.estimate(density, N_IMPORTANCE, rng)),
    }
    other = copy(estimator)
    for form, (other.prior_share, antithetic) in FORMS.items():
        logs = [
            other.estimate(density, N_IMPORTANCE, rng, antithetic=antithetic)
            for _ in range(n_estimates)
        ]
        result[form] = np.std(logs, ddof=1)
    return result


def run(arguments):
    folder = os.environ.get("PYMC_KAMELEON_DATA")
    if folder is None or not (Path(folder) / "glass.data").is_file():
        print(
            "estimate-cost: glass.data (UCI glass identification) is not there. Put the folder "
            f"that has it into PYMC_KAMELEON_DATA: it is {folder!r} now."
        )
        return
    inputs, labels = read("glass", Path(folder))
    lines = heading(
        "estimate-cost: estimated marginal likelihood of Gaussian-process classification, Glass",
        f"N = {len(labels)}, D = {inputs.shape[1]}, {N_IMPORTANCE} draws an estimate. Medians of "
        "milliseconds of an estimate and of its parts: kernel matrix with its factorisation, "
        "importance density, draws and weights.",
        f"sd: of the log of {arguments.estimates} estimates, with 0.02 of the draws from the prior "
        "and those of the approximation in antithetic pairs; then without one of these, with "
        "other shares, and without either.",
    )
    rows = []
    for likelihood in ("logit", "probit"):
        for approximation, bound in BOUNDS.items():
            estimator = GPClassificationEstimator(
                inputs, labels, likelihood=likelihood, approximation=approximation
            )
            places = hyperparameters(inputs.shape[1], arguments.priors)
            for name, place in places.items():
                row = {"likelihood": likelihood, "approximation": approximation, "place": name}
                figures = measured(estimator, place, arguments.estimates)
                rows.append(row | figures | mark(figures["ms"], bound))
    common = ["likelihood", "approximation", "place"]
    show(rows, "Milliseconds", [*common, "ms", "target", "met", "kernel", "density", "draws"])
    show(rows, "Standard deviations of the log", [*common, *FORMS])
    write(rows, lines, arguments.output / "estimate-cost.csv")
