"""Log evidence of Gaussian-process classification: methods, starts and transitions."""

import os
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

from benchmarks.classification import read, squared_exponential
from benchmarks.common import SEED, heading, show, write
from pymc_kameleon.latent_gp.gaussian_approximations import (
    expectation_propagation_approximation,
)
from pymc_kameleon.latent_gp.latent_evidence import estimate_log_evidence
from pymc_kameleon.latent_gp.tilted_moments import Probit
from pymc_kameleon.plots import plot_evidence

__all__ = ["add_arguments", "run"]


class Setting(NamedTuple):
    """Hyperparameters, and the log evidence that independent code found by annealing."""

    log_lengthscale: float
    log_amplitude: float
    relative_jitter: float
    reference: float
    reference_error: float


SETTINGS = {
    "crabs": Setting(1.5, 3.0, 1e-6, -31.256, 0.005),
    "glass": Setting(1.0, 1.0, 1e-6, -38.084, 0.009),
    "usps": Setting(4.85, 5.1, 0.0, -105.808, 0.022),
}

RUNGS = {
    ("ais", "EP", "slice"): [25, 100, 400],
    ("ais", "EP", "hmc"): [10, 25, 100],
    ("ais", "EP", "rmhmc"): [8, 24],
    ("ais", "prior", "slice"): [400],
    ("ais", "prior", "hmc"): [150],
    ("tempering", "EP", "slice"): [5],
    ("tempering", "prior", "hmc"): [16],
}
"""Numbers of temperatures, by method, start and transition."""

DEGENERATE = 5.0
"""Effective size below which a run is in the table alone: the picture would be flattened by it."""

PARTICLES = {"ais": 64, "tempering": 2}
RIEMANNIAN_PARTICLES = 16
"""A move of these takes a hundred times as long as one of the slice."""


def add_arguments(parser):
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("PYMC_KAMELEON_DATA"),
        help="folder of crabs.csv, glass.data and usps3vs5.mat",
    )
    parser.add_argument("--sets", nargs="+", default=["crabs", "glass"], choices=list(SETTINGS))
    parser.add_argument("--usps", action="store_true", help="USPS only, slice from EP's sites")
    parser.add_argument("--skip", nargs="*", default=[], help="transitions to leave out")


@cache
def problem(name: str, folder: Path):
    """Prior, likelihood, and the approximation by expectation propagation with its seconds."""
    setting = SETTINGS[name]
    inputs, labels = read(name, folder)
    prior = squared_exponential(
        inputs, setting.log_lengthscale, setting.log_amplitude, setting.relative_jitter
    )
    likelihood = Probit(labels)
    start = time.perf_counter()
    approximation = expectation_propagation_approximation(prior, likelihood)
    return prior, likelihood, approximation, time.perf_counter() - start


# runs -----------------------------------------------------------------------------------------


def row(name: str, method: str, start: str, evidence) -> dict:
    setting, report = SETTINGS[name], evidence.report
    error = np.hypot(evidence.standard_error, setting.reference_error)
    return {
        "data": name,
        "method": method,
        "start": start,
        "transition": evidence.transition,
        "temperatures": len(report.betas),
        "log Z": f"{evidence.log_marginal_likelihood:.3f}",
        "s.e.": evidence.standard_error,
        "seconds": evidence.seconds,
        "particles": len(evidence.log_weights),
        "effective": evidence.effective_size,
        "evaluations": float(report.n_evaluations.sum()),
        "acceptance": float(np.nanmean(report.acceptance)),
        "reference": f"{setting.reference:.3f} ± {setting.reference_error:g}",
        "z": (evidence.log_marginal_likelihood - setting.reference) / error,
    }


def compare(name: str, arguments) -> tuple[list[dict], dict[str, list]]:
    """Rows of the table, and the runs of the picture."""
    prior, likelihood, approximation, seconds = problem(name, arguments.data)
    print(f"{name}: {approximation!r}, {seconds:.2f} s", flush=True)
    rows, runs = [], {}
    for (method, start, transition), numbers in RUNGS.items():
        is_left_out = arguments.usps and (method, start, transition) != ("ais", "EP", "slice")
        if transition in arguments.skip or is_left_out:
            continue
        n_particles = RIEMANNIAN_PARTICLES if transition == "rmhmc" else PARTICLES[method]
        for n_temperatures in numbers:
            evidence = estimate_log_evidence(
                prior,
                likelihood,
                sites=approximation.sites if start == "EP" else None,
                method=method,
                transition=transition,
                n_temperatures=n_temperatures,
                n_particles=n_particles,
                draws=400,
                tune=100,
                random_seed=SEED,
            )
            rows.append(row(name, method, start, evidence))
            if evidence.effective_size >= DEGENERATE:
                runs.setdefault(f"{method}, {transition} from {start}", []).append(evidence)
    return rows, runs


def draw(name: str, runs, arguments):
    prior, _, approximation, _ = problem(name, arguments.data)
    references = {
        "EP": approximation.log_evidence,
        "EP, second order": approximation.second_order_log_evidence(),
    }
    ax = plot_evidence(runs, references=references)
    ax.set_title(f"{name}, N = {prior.size}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"latent-gp-evidence-{name}.png"
    ax.figure.savefig(path, dpi=150)
    print(f"  {path}", flush=True)


def run(arguments):
    if arguments.data is None or not Path(arguments.data).is_dir():
        raise SystemExit("Give the folder of the data sets: --data, or PYMC_KAMELEON_DATA.")
    matplotlib.use("Agg")
    arguments.data = Path(arguments.data)
    names = ["usps"] if arguments.usps else arguments.sets
    lines = heading(
        "latent-gp-evidence: log evidence of Gaussian-process classification, probit likelihood",
        f"One core. ais: annealed importance sampling, {PARTICLES['ais']} particles "
        f"({RIEMANNIAN_PARTICLES} with rmhmc), a move a temperature; tempering: two replicates of "
        "400 iterations after 100. EP: the path begins at the Gaussian of expectation propagation. "
        "effective: size of the weights, or of tempering's draws. z: from the reference, which "
        "independent code made, in combined standard errors.",
    )
    rows = []
    for name in names:
        found, runs = compare(name, arguments)
        rows += found
        show(found)
        draw(name, runs, arguments)
    suffix = "-usps" if arguments.usps else ""
    write(rows, lines, arguments.output / f"latent-gp-evidence{suffix}.csv")
