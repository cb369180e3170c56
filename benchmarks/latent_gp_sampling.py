"""Effective draws of a latent function per second: RMHMC, elliptical slices and PyMC's NUTS."""

import logging
import time
import warnings
from functools import partial

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, heading, mark, show, write
from pymc_kameleon import EllipticalSliceStep, RiemannianHMCStep

__all__ = ["add_arguments", "run"]

SETTINGS = ((0.0, 0.0), (0.0, 2.0), (1.5, 4.0))
"""(log lengthscale, log amplitude)."""

BOUNDED = (0.0, 2.0)
RATIO = 5.0
"""Least ratio of the EP-centred slice to NUTS at `BOUNDED`."""


def _slices(approximation, f):
    return EllipticalSliceStep([f], approximation=approximation, steps_per_draw=5)


STEPS = {
    "slice, EP": (partial(_slices, "ep"), 4),
    "slice, Laplace": (partial(_slices, "laplace"), 4),
    "slice, prior": (partial(_slices, "prior"), 4),
    "RMHMC": (lambda f: RiemannianHMCStep([f]), 0.25),
    "NUTS, whitened": (lambda f: pm.NUTS(), 1),
}
"""Name -> a step for a function f, and its draws as a multiple of --draws."""


def add_arguments(parser):
    parser.add_argument("--size", type=int, default=100, help="observations N")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--half-width", type=float, default=1.0, help="of the square of inputs")


def classification(
    size: int, log_lengthscale: float, log_amplitude: float, half_width: float = 1.0
) -> pm.Model:
    """Probit model of labels that it has drawn itself, at inputs uniform on a square about 0."""
    rng = np.random.default_rng(SEED)
    inputs = rng.uniform(-half_width, half_width, (size, 2))
    lengthscale, amplitude = np.exp([log_lengthscale, log_amplitude])
    squares = ((inputs[:, None] - inputs) ** 2).sum(axis=2)
    covariance = amplitude**2 * (np.exp(-0.5 * squares / lengthscale**2) + 1e-6 * np.eye(size))
    truth = np.linalg.cholesky(covariance) @ rng.standard_normal(size)
    labels = (truth + rng.standard_normal(size) > 0).astype(int)
    with pm.Model() as model:
        kernel = amplitude**2 * pm.gp.cov.ExpQuad(2, ls=lengthscale)
        process = pm.gp.Latent(cov_func=kernel)
        f = process.prior("f", X=inputs, jitter=1e-6 * amplitude**2)
        pm.Bernoulli("y", p=pm.math.invprobit(f), observed=labels)
    return model


def sampled(model, make_step, draws, tune, chains) -> dict:
    """Effective draws of f, and the seconds of the draws after tuning."""
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = make_step(model["f"])
        stamps = []
        start = time.perf_counter()
        result = pm.sample(
            draws,
            tune=tune,
            chains=chains,
            cores=1,
            step=step,
            random_seed=SEED,
            progressbar=False,
            compute_convergence_checks=False,
            callback=lambda trace, draw: stamps.append((draw.tuning, time.perf_counter())),
        )
        total = time.perf_counter() - start
    tuning = np.array([t for t, _ in stamps])
    times = np.array([s for _, s in stamps])
    # The interval before a draw is that draw's; PyMC's own work after sampling is left out.
    intervals = np.diff(times, prepend=times[0])
    seconds = intervals[~tuning].sum()
    effective = np.asarray(az.ess(result, var_names=["f"])["f"].values)
    return {
        "draws": chains * draws,
        "seconds": seconds,
        "with_tuning": total,
        "ess_median": float(np.median(effective)),
        "ess_least": float(effective.min()),
        "ess_per_second": float(np.median(effective)) / seconds,
        "least_per_second": float(effective.min()) / seconds,
        "rhat": float(np.max(az.rhat(result, var_names=["f"])["f"].values)),
    }


def run(arguments):
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Effective draws of a latent function a second, probit likelihood",
        f"N = {arguments.size} inputs uniform on a square of half width {arguments.half_width:g}, "
        f"labels drawn from the model (seed {SEED}), jitter 1e-6 of the variance; bulk effective "
        "size of each f_n over the seconds of the draws after tuning, chains one after the other. "
        "The slices make five transitions a draw. NUTS is PyMC's own on v ~ N(0, I).",
    )
    rows = []
    for setting in SETTINGS:
        model = classification(arguments.size, *setting, arguments.half_width)
        here = []
        for name, (make_step, share) in STEPS.items():
            draws = max(50, int(share * arguments.draws))
            tune = arguments.tune if share >= 1 else max(50, int(share * arguments.tune))
            found = sampled(model, make_step, draws, tune, arguments.chains)
            here.append({"log_l, log_sigma": str(setting), "step": name} | found)
        for row in here:
            row["to NUTS"] = row["ess_per_second"] / here[-1]["ess_per_second"]
            if setting == BOUNDED and row["step"] == "slice, EP":
                row |= mark(row["to NUTS"], RATIO, largest=False)
        rows += here
        show(here)
    write(rows, lines, arguments.output / "latent_gp_sampling.csv")
