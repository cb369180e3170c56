"""Seconds that the Gaussian approximations of a latent Gaussian process take, from cold."""

import os
import time
from pathlib import Path

from benchmarks.classification import read, squared_exponential
from benchmarks.common import heading, mark, show, write
from pymc_kameleon.latent_gp.gaussian_approximations import (
    expectation_propagation_approximation,
    laplace_approximation,
)
from pymc_kameleon.latent_gp.tilted_moments import Probit

__all__ = ["add_arguments", "run"]

BOUND = 12.0
"""Largest seconds of expectation propagation at N = 767."""

REFERENCES = {(3.0, 0.0): (-222.390, -222.355, None), (4.85, 5.1): (-111.001, -106.0892, -105.8169)}
"""(log lengthscale, log amplitude) -> log evidence of Laplace, EP, and EP to second order."""


def add_arguments(parser):
    """There are none."""


def usps_file() -> Path | None:
    """Where the data are, None after saying what to do where they are not."""
    folder = os.environ.get("PYMC_KAMELEON_DATA")
    path = None if folder is None else Path(folder) / "usps3vs5.mat"
    if path is None or not path.is_file():
        print(
            "latent-gp-ep: usps3vs5.mat is not there. Put the folder that has it (digits 3 and 5 "
            "of USPS, 767 x 256, in the split of Kuss & Rasmussen 2005) into PYMC_KAMELEON_DATA: "
            f"it is {folder!r} now."
        )
        return None
    return path


def timed(function, *arguments, **options):
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def compare(inputs, labels, setting) -> list[dict]:
    """Rows of one prior, the time of whose factorisation counts as well."""
    likelihood, references = Probit(labels), REFERENCES[setting]
    prior, prior_seconds = timed(squared_exponential, inputs, *setting)
    common = {"log lengthscale": setting[0], "log amplitude": setting[1]}
    rows = []
    mode, seconds = timed(laplace_approximation, prior, likelihood)
    rows.append(common | row("Laplace", mode, prior_seconds + seconds, references[0]))
    result, seconds = timed(expectation_propagation_approximation, prior, likelihood)
    new = row("EP", result, prior_seconds + seconds, references[1])
    rows.append(common | new | mark(new["seconds"], BOUND))
    corrected, seconds = timed(result.second_order_log_evidence)
    second = {"method": "  second order", "seconds": seconds, "log evidence": f"{corrected:.4f}"}
    if references[2] is not None:
        second["reference"] = f"{references[2]:.4f}"
    rows.append(common | second)
    return rows


def row(method, result, seconds, reference) -> dict:
    return {
        "method": method,
        "seconds": seconds,
        "iterations": str(result.n_iterations),
        "log evidence": f"{result.log_evidence:.4f}",
        "reference": f"{reference:.4f}",
        "residual": f"{result.residual:.1g}",
    }


def run(arguments):
    path = usps_file()
    if path is None:
        return
    inputs, labels = read("usps", path.parent)
    lines = heading(
        "latent-gp-ep: Gaussian approximations of probit classification, USPS 3 against 5",
        f"N = {len(labels)}; squared-exponential kernel, no jitter. Seconds from the inputs to the "
        "result, with kernel matrix and factorisation, from no sites; the second order's are its "
        "own. Iterations: Newton steps, or sweeps over all sites.",
    )
    rows = [row for setting in REFERENCES for row in compare(inputs, labels, setting)]
    show(rows)
    write(rows, lines, arguments.output / "latent-gp-ep.csv")
