"""Effective draws an estimate, with a surrogate of a noisy likelihood and without one."""

import logging
import os
import time
from functools import partial
from itertools import product
from pathlib import Path

import arviz as az
import numba
import numpy as np
import pymc as pm
from scipy.special import logsumexp

from benchmarks import glass
from benchmarks.common import SEED, heading, show, write
from benchmarks.sampling import four_chains
from pymc_kameleon import AdaptiveMetropolisStep, GPSurrogate, KameleonStep, SurrogateHMCStep
from pymc_kameleon.diagnostics import estimator_sd
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood, particle_filter_loglikelihood

__all__ = ["PROBLEMS", "STEPS", "add_arguments", "run"]

NOISY = {"pseudo_marginal": True, "steps_per_draw": 1}
STEPS = {
    "AdaptiveMetropolisStep": partial(AdaptiveMetropolisStep, **NOISY),
    "KameleonStep": partial(KameleonStep, **NOISY),
    "KameleonStep, GPSurrogate": lambda: KameleonStep(
        pseudo_marginal=True, steps_per_draw=4, surrogate=GPSurrogate()
    ),
    "SurrogateHMCStep": partial(SurrogateHMCStep, **NOISY),
}


def schools(n_samples: int) -> pm.Model:
    """Pupils who passed in 30 schools of three kinds: four parameters, an effect of each school."""
    rng = np.random.default_rng(SEED)
    design = np.column_stack([np.ones(30), rng.normal(size=30), rng.integers(0, 2, size=30)])
    effects = 0.7 * rng.standard_normal(30)
    chances = 1 / (1 + np.exp(-(design @ [0.5, 0.8, -0.6] + effects)))
    passed = rng.binomial(12, chances)

    def log_estimate(coefficients, log_sd, n_samples, rng):
        effects = np.exp(log_sd) * rng.standard_normal((n_samples, 30))
        log_odds = design @ coefficients + effects
        log_likelihood = passed * log_odds - 12 * np.logaddexp(0, log_odds)
        return (logsumexp(log_likelihood, axis=0) - np.log(n_samples)).sum()

    with pm.Model() as model:
        coefficients = pm.Normal("coefficients", 0, 2, shape=3)
        log_sd = pm.Normal("log_sd", -0.5, 1)
        pm.Potential(
            "p", estimated_loglikelihood(log_estimate, coefficients, log_sd, n_samples=n_samples)
        )
    return model


@numba.njit
def _initial(mu, phi, sigma, n_particles, rng):
    return mu + sigma / np.sqrt(1 - phi**2) * rng.standard_normal(n_particles)


@numba.njit
def _transition(x, t, mu, phi, sigma, rng):
    return mu + phi * (x - mu) + sigma * rng.standard_normal(len(x))


@numba.njit
def _log_observation(y_t, x, t, mu, phi, sigma):
    return -0.5 * (np.log(2 * np.pi) + x + y_t**2 * np.exp(-x))


def volatility(n_samples: int) -> pm.Model:
    """Stochastic volatility of 300 returns, by a particle filter: three parameters."""
    rng = np.random.default_rng(SEED)
    x = np.empty(300)
    x[0] = -1.0 + 0.3 / np.sqrt(1 - 0.95**2) * rng.standard_normal()
    for t in range(1, 300):
        x[t] = -1.0 + 0.95 * (x[t - 1] + 1.0) + 0.3 * rng.standard_normal()
    returns = np.exp(0.5 * x) * rng.standard_normal(300)
    with pm.Model() as model:
        mu, sigma = pm.Normal("mu", 0, 2), pm.HalfNormal("sigma", 0.5, initval=0.3)
        phi = pm.Beta("phi", 20, 1.5)
        estimate = particle_filter_loglikelihood(
            returns,
            mu,
            phi,
            sigma,
            initial=_initial,
            transition=_transition,
            log_observation=_log_observation,
            n_particles=n_samples,
        )
        pm.Potential("p", estimate)
    return model


def classifier(n_samples: int) -> pm.Model:
    """Nine lengthscales of a Gaussian-process classifier of glass, by importance sampling."""
    folder = os.environ.get("PYMC_KAMELEON_DATA")
    if folder is None:
        raise SystemExit("PYMC_KAMELEON_DATA is not set: it names the folder with the glass data.")
    return glass.model(Path(folder), n_samples)


PROBLEMS = {
    "schools": (schools, {"coefficients": [0.5, 0.8, -0.6], "log_sd": -0.4}),
    "volatility": (volatility, {"mu": -1.0, "phi": 0.95, "sigma": 0.3}),
    "glass": (classifier, {"theta": np.full(9, 2.0)}),
}
"""Name -> the model, given the number of samples, and a point at which the noise is set."""


def add_arguments(parser):
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--noise", nargs="+", type=float, default=[0.5, 1.5, 3.0])
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=1)


def n_samples_for(name: str, sd: float) -> int:
    """Count the samples that give the log estimate this standard deviation, about."""
    build, point = PROBLEMS[name]
    n = 20
    for _ in range(4):
        found = estimator_sd(build(n), point, n_estimates=200, random_seed=SEED).sd
        n = max(1, min(5000, round(n * (found / sd) ** 2)))
    return n


def measure(name: str, sd: float, n_samples: int, step: str, draws: int, seed: int) -> dict:
    """Sample once: estimates and effective draws, with tuning and after it."""
    start = time.perf_counter()
    with PROBLEMS[name][0](n_samples):
        idata = four_chains(STEPS[step](), draws=draws, random_seed=seed)
    found = az.summary(idata, round_to="none").astype(float)
    after, before = (
        float(idata[group]["n_evals"].sum()) for group in ("sample_stats", "warmup_sample_stats")
    )
    smallest = found["ess_bulk"].min()
    return {
        "problem": name,
        "sd": sd,
        "samples": n_samples,
        "step": step,
        "seed": seed,
        "ess_bulk": smallest,
        "r_hat": found["r_hat"].max(),
        "estimates": after,
        "of tuning": before,
        "ess per 1000": 1000 * smallest / after,
        "with tuning": 1000 * smallest / (before + after),
        "accept": float(idata["sample_stats"]["accept"].mean()),
        "seconds": time.perf_counter() - start,
        "means": " ".join(f"{value:.3f}" for value in found["mean"]),
        "sds": " ".join(f"{value:.3f}" for value in found["sd"]),
    }


def run(arguments):
    """Print and write effective draws an estimate."""
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "A surrogate of a noisy likelihood",
        "Four chains by the plain call with pseudo_marginal=True: smallest bulk effective size a "
        "thousand estimates, after tuning and with it, at three standard deviations of the log "
        "estimate.",
    )
    rows: list[dict] = []
    for name, sd in product(arguments.problems, arguments.noise):
        n_samples = n_samples_for(name, sd)
        for step, seed in product(arguments.steps, range(arguments.seeds)):
            rows.append(measure(name, sd, n_samples, step, arguments.draws, seed))
            show(rows[-1:])
            write(rows, lines, arguments.output / "noisy_surrogate.csv")
    show(rows, "all")
