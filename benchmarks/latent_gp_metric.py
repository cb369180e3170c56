"""Time of the Riemannian metric of a latent Gaussian process, against its Cholesky factor."""

import time
from collections.abc import Callable

import numpy as np
from scipy.linalg import blas, lapack
from scipy.special import expit

from benchmarks.common import SEED, heading, mark, show, write
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, factorised
from pymc_kameleon.latent_gp.riemannian_metric import LocalGeometry, Metric
from pymc_kameleon.latent_gp.riemannian_trajectory import leapfrog_step
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget

__all__ = ["add_arguments", "run"]

BOUNDS = {767: 1.3}
"""Largest time of the metric, in units of a Cholesky factor and a solve with N right-hand sides, by
N: for small N the calls cost more than the arithmetic."""

STEP_SIZE = 0.3


def add_arguments(parser):
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 767])
    parser.add_argument("--blocks", type=int, default=25)


class Logistic:
    """log sigmoid(y f), with its derivatives."""

    probit_labels = None

    def __init__(self, labels: np.ndarray):
        self.labels, self.size = labels, len(labels)

    def value(self, f: np.ndarray) -> float:
        return float(self.elementwise(f).sum())

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        return -np.logaddexp(0.0, -self.labels * f)

    def terms(self, f: np.ndarray) -> np.ndarray:
        s = expit(-self.labels * f)
        second = -s * (1 - s)
        third = -self.labels * second * (1 - 2 * s)
        return np.stack([self.elementwise(f), self.labels * s, second, third])


def problem(size: int, rng: np.random.Generator) -> tuple[TemperedTarget, np.ndarray]:
    """Return a classification with inputs uniform on a square, and its latent function."""
    inputs = 4 * rng.random((size, 2))
    squares = ((inputs[:, None] - inputs) ** 2).sum(axis=-1)
    prior: Gaussian = factorised(
        np.zeros(size), 4.0 * (np.exp(-0.5 * squares) + 1e-6 * np.eye(size))
    )
    f = prior.draw(rng)
    return TemperedTarget(prior, Logistic(np.where(rng.random(size) < expit(f), 1.0, -1.0))), f


def interleaved(parts: dict[str, Callable], blocks: int) -> dict[str, float]:
    """Median CPU milliseconds of each part, called in turn, after one round that is not counted."""
    times = {name: [] for name in parts}
    for _ in range(blocks + 1):
        for name, part in parts.items():
            start = time.process_time()
            part()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * float(np.median(spent[1:])) for name, spent in times.items()}


def cost(size: int, blocks: int) -> dict[str, float]:
    rng = np.random.default_rng(SEED)
    target, f = problem(size, rng)
    geometry = LocalGeometry(target, f)
    momentum = geometry.draw_momentum(rng)
    roots = geometry.metric.roots
    covariance = np.asfortranarray(target.base.covariance)
    inner = np.asfortranarray(roots[:, None] * covariance * roots + np.eye(size))
    factor = np.asfortranarray(geometry.metric.lower)

    def evaluate():
        return LocalGeometry(target, f).potential_gradient

    spent = interleaved(
        {
            "cholesky": lambda: lapack.dpotrf(inner, lower=1, clean=0),
            "solve": lambda: blas.dtrsm(1.0, factor, covariance, lower=1),
            "metric": evaluate,
            "iteration": lambda: Metric(target.base, geometry.curvature).velocity(momentum),
            "velocity": lambda: geometry.metric.velocity(momentum),
            "leapfrog": lambda: leapfrog_step(geometry, momentum, STEP_SIZE),
        },
        blocks,
    )
    row = {"N": size} | {f"ms, {name}": value for name, value in spent.items()}
    unit = spent["cholesky"] + spent["solve"]
    row |= {"metric": spent["metric"] / unit}
    return row | (mark(row["metric"], BOUNDS[size]) if size in BOUNDS else {})


def run(arguments):
    lines = heading(
        "latent-gp-metric: CPU milliseconds of the Riemannian metric of a latent Gaussian process",
        "A logistic classification with N inputs uniform on a square. cholesky, solve: LAPACK's "
        "factor of I + s A s, and BLAS's triangular solve with N right-hand sides. metric: "
        "log-likelihood with three derivatives, log density, log|G|, and the gradient of both. "
        "iteration: one of the implicit position equation. "
        f"leapfrog: a step of {STEP_SIZE} with its checks. The last column is in units of "
        f"cholesky + solve, measured in turn; medians of {arguments.blocks}.",
    )
    rows = [cost(size, arguments.blocks) for size in arguments.sizes]
    show(rows)
    write(rows, lines, arguments.output / "latent-gp-metric.csv")
