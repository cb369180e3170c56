"""Log evidence by parallel tempering, beside closed forms and quadrature; and its intervals."""

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy import stats
from scipy.special import logsumexp

from benchmarks.common import SEED, heading, show, write
from benchmarks.practice import EFFECTS, ERRORS, eight_schools, eight_schools_centred
from pymc_kameleon import ParallelTemperingStep, log_evidence

__all__ = ["add_arguments", "run"]


class Problem(NamedTuple):
    """A model, and its log evidence."""

    model: Callable[[], pm.Model]
    truth: Callable[[], float]


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")
    parser.add_argument("--draws", type=int, default=1000, help="PyMC's default")


def on_grid(log_density: Callable, *axes: np.ndarray) -> float:
    """Log integral by the trapezoid rule over a regular grid, outside of which there is nothing."""
    points = np.meshgrid(*axes, indexing="ij")
    cell = sum(np.log(axis[1] - axis[0]) for axis in axes)
    return float(logsumexp(log_density(*points)) + cell)


def regression(scale: float):
    rng = np.random.default_rng(8)
    design, y = rng.standard_normal((30, 3)), rng.standard_normal(30)
    with pm.Model() as model:
        weights = pm.Normal("weights", 0.0, scale, shape=3)
        pm.Normal("y", design @ weights, 0.7, observed=y)
    covariance = 0.49 * np.eye(30) + scale**2 * design @ design.T
    return model, stats.multivariate_normal(np.zeros(30), covariance).logpdf(y)


def schools_truth() -> float:
    """Over mu and log tau, with the schools integrated out."""

    def log_density(mu, log_tau):
        tau = np.exp(log_tau)
        prior = stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, 0, 5) + log_tau
        sd = np.sqrt(ERRORS**2 + tau[..., None] ** 2)
        return prior + stats.norm.logpdf(EFFECTS, mu[..., None], sd).sum(axis=-1)

    return on_grid(log_density, np.linspace(-40, 45, 400), np.linspace(-14, 12, 800))


def egg_box():
    """The egg box of nested sampling: 18 equal modes in a square."""
    with pm.Model() as model:
        x = pm.Uniform("x", 0.0, 10 * np.pi, shape=2)
        pm.Potential("likelihood", (2.0 + pt.cos(x[0] / 2) * pt.cos(x[1] / 2)) ** 5)
    return model


def egg_box_truth() -> float:
    axis = np.linspace(0, 10 * np.pi, 4001)
    axis = 0.5 * (axis[1:] + axis[:-1])
    value = on_grid(lambda a, b: (2.0 + np.cos(a / 2) * np.cos(b / 2)) ** 5, axis, axis)
    return value - 2.0 * np.log(10 * np.pi)


def spike_and_slab():
    """Half of the mass in a spike of width 0.1 at 1, the other half as wide as the prior."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=4)
        spike = -0.5 * (((x - 1.0) / 0.1) ** 2).sum() - 4 * np.log(0.1)
        prior = -0.5 * (x**2).sum()
        pm.Potential("likelihood", pt.logaddexp(spike - prior, 0.0))
    return model


LABELS = np.array([-2.1, -1.7, -2.4, 1.4, 2.2, 1.9, 2.6, 1.1])


def labels():
    """Two components that may change places."""
    with pm.Model() as model:
        means = pm.Normal("means", 0.0, 3.0, shape=2)
        pm.NormalMixture("y", [0.5, 0.5], mu=means, sigma=0.6, observed=LABELS)
    return model


def labels_truth() -> float:
    def log_density(a, b):
        parts = [stats.norm.logpdf(LABELS, m[..., None], 0.6) for m in (a, b)]
        likelihood = np.logaddexp(*parts) - np.log(2.0)
        return stats.norm.logpdf(a, 0, 3) + stats.norm.logpdf(b, 0, 3) + likelihood.sum(axis=-1)

    axis = np.linspace(-15, 15, 601)
    return on_grid(log_density, axis, axis)


INPUTS = np.linspace(-2.0, 2.0, 6)
COVARIANCE = 4.0 * np.exp(-0.5 * (INPUTS - INPUTS[:, None]) ** 2) + 1e-4 * np.eye(6)
CLASSES = np.array([1, 1, 0, 1, 0, 0])


def probit():
    """A latent Gaussian process with a probit likelihood."""
    with pm.Model() as model:
        f = pm.MvNormal("f", np.zeros(6), COVARIANCE)
        sign = 2.0 * CLASSES - 1.0
        pm.Potential("likelihood", pm.math.log(0.5 * pt.erfc(-sign * f / np.sqrt(2.0))).sum())
    return model


def probit_truth() -> float:
    """Probability that a Gaussian with covariance K + I has the signs of the classes."""
    sign = 2.0 * CLASSES - 1.0
    covariance = np.outer(sign, sign) * (COVARIANCE + np.eye(6))
    options = {"maxpts": 4_000_000, "abseps": 1e-9, "releps": 1e-7}
    return float(stats.multivariate_normal(np.zeros(6), covariance, **options).logcdf(np.zeros(6)))


PROBLEMS = {
    "regression": Problem(lambda: regression(1.0)[0], lambda: regression(1.0)[1]),
    "regression, vague": Problem(lambda: regression(100.0)[0], lambda: regression(100.0)[1]),
    "eight-schools": Problem(eight_schools, schools_truth),
    "eight-schools-centred": Problem(eight_schools_centred, schools_truth),
    "egg-box": Problem(egg_box, egg_box_truth),
    "spike-and-slab": Problem(spike_and_slab, partial(float, np.log(2.0))),
    "labels": Problem(labels, labels_truth),
    "probit": Problem(probit, probit_truth),
}


def run(arguments):
    logging.getLogger("pymc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    lines = heading(
        "evidence: log p(y) by parallel tempering",
        "pm.sample(step=ParallelTemperingStep()) with PyMC's defaults and four chains, and "
        "log_evidence of the result. truth: closed form or quadrature. z: error in standard "
        "errors; covered: share of runs whose interval of 1.96 standard errors holds the truth. "
        f"Seconds of tuning and sampling. Means over {arguments.seeds} seeds.",
    )
    rows = []
    for name in arguments.models:
        truth, found, seconds = PROBLEMS[name].truth(), [], []
        model = PROBLEMS[name].model()
        for i in range(arguments.seeds):
            start = time.process_time()
            with model:
                result = pm.sample(
                    draws=arguments.draws,
                    step=ParallelTemperingStep(),
                    chains=4,
                    cores=1,
                    random_seed=SEED + i,
                    progressbar=False,
                    compute_convergence_checks=False,
                )
            found.append(log_evidence(result)[:2])
            seconds.append(time.process_time() - start)
        value, error = np.array(found).T
        z = (value - truth) / error
        rows.append(
            {
                "model": name,
                "truth": truth,
                "estimate": value.mean(),
                "standard error": error.mean(),
                "spread": value.std(ddof=1) if len(value) > 1 else np.nan,
                "z": z.mean(),
                "largest |z|": np.abs(z).max(),
                "covered": np.mean(np.abs(z) < 1.96),
                "seconds": np.mean(seconds),
            }
        )
    show(rows)
    write(rows, lines, arguments.output / "evidence.csv")
