"""Latent function and hyperparameters together: LatentGPStep beside NUTS and a compound step."""

import importlib.util
import logging
import time
import warnings

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, DrivenStep, heading, mark, show, write
from benchmarks.sampling import dataset
from pymc_kameleon import EllipticalSliceStep, KameleonStep, LatentGPStep, dispersed_starts
from pymc_kameleon.latent_gp.gaussian_algebra import cholesky_of

__all__ = ["add_arguments", "run"]

RATIO, TRANSITION = 10.0, 3.0
"""Least ratio to NUTS of the slowest hyperparameter, and largest of a transition to a Cholesky
factorisation."""


def compound(model):
    """What there was without `LatentGPStep`: hyperparameters at a fixed whitened function."""
    names = [rv for rv in model.free_RVs if rv.name != "f_rotated_"]
    return [KameleonStep(names), EllipticalSliceStep([model["f"]])]


STEPS = {
    "LatentGPStep": lambda model: LatentGPStep(),
    "compound": compound,
    "NUTS": lambda model: pm.NUTS(target_accept=0.9),
}


def add_arguments(parser):
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--samplers", nargs="+", default=[*STEPS, "nutpie"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 500, 1000, 2000])


def classification(link, size):
    """Labels at inputs uniform on a square, two lengthscales and an amplitude."""
    rng = np.random.default_rng(SEED)
    inputs = rng.uniform(-1, 1, (size, 2))
    f = _truth(inputs, 0.5, 3.0, rng)
    probability = 1 / (1 + np.exp(-f)) if link == "logit" else None
    is_one = f + rng.standard_normal(size) > 0 if link == "probit" else None
    labels = rng.random(size) < probability if link == "logit" else is_one
    with pm.Model() as model:
        lengthscale = pm.InverseGamma("lengthscale", 3, 2, shape=2)
        amplitude = pm.HalfNormal("amplitude", 3)
        f = _latent(inputs, lengthscale, amplitude)
        p = pm.math.invlogit(f) if link == "logit" else pm.math.invprobit(f)
        options = {"logit_p": f} if link == "logit" else {"p": p}
        pm.Bernoulli("y", observed=labels.astype(int), **options)
    return model


def counts(size, level):
    """Counts on a line about a known level."""
    rng = np.random.default_rng(SEED)
    inputs = np.linspace(0, 10, size)[:, None]
    y = rng.poisson(level * np.exp(_truth(inputs, 1.5, 1.0, rng)))
    with pm.Model() as model:
        f = _latent(inputs, pm.Gamma("lengthscale", 2, 1), pm.HalfNormal("amplitude", 2))
        pm.Poisson("y", level * pm.math.exp(f), observed=y)
    return model


def robust_regression(size):
    """Student-t noise of unknown scale and degrees of freedom."""
    rng = np.random.default_rng(SEED)
    inputs = np.linspace(0, 10, size)[:, None]
    y = _truth(inputs, 1.0, 1.0, rng) + 0.3 * rng.standard_t(4, size)
    with pm.Model() as model:
        f = _latent(inputs, pm.Gamma("lengthscale", 2, 1), pm.HalfNormal("amplitude", 2))
        noise, dof = pm.HalfNormal("noise", 1), pm.Gamma("dof", 2, 0.1)
        pm.StudentT("y", mu=f, sigma=noise, nu=1 + dof, observed=y)
    return model


PROBLEMS = {
    "logit, N=100": lambda: classification("logit", 100),
    "probit, N=100": lambda: classification("probit", 100),
    "Poisson, N=50": lambda: counts(50, 1.0),
    "Poisson, N=50, mean 50": lambda: counts(50, 50.0),
    "Student-t, N=100": lambda: robust_regression(100),
}


def _truth(inputs, lengthscale, amplitude, rng):
    squares = ((inputs[:, None] - inputs) ** 2).sum(axis=2)
    covariance = amplitude**2 * np.exp(-0.5 * squares / lengthscale**2)
    factor = np.linalg.cholesky(covariance + 1e-6 * np.eye(len(inputs)))
    return factor @ rng.standard_normal(len(inputs))


def _latent(inputs, lengthscale, amplitude):
    kernel = amplitude**2 * pm.gp.cov.ExpQuad(inputs.shape[1], lengthscale)
    return pm.gp.Latent(cov_func=kernel).prior("f", X=inputs)


def sampled(model, sampler, arguments) -> dict:
    """Effective draws of the slowest hyperparameter and of f, and the seconds they took."""
    draws, tune, chains = arguments.draws, arguments.tune, arguments.chains
    stamps, options = [], {}
    start = time.perf_counter()
    if sampler == "nutpie":
        options = {"nuts_sampler": "nutpie", "target_accept": 0.9}
    else:
        with model:
            options = {
                "step": STEPS[sampler](model),
                "callback": lambda trace, draw: stamps.append((draw.tuning, time.perf_counter())),
                "initvals": dispersed_starts(model, chains, random_seed=SEED),
                "compute_convergence_checks": False,
            }
    compiled = time.perf_counter()
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pm.sample(
            draws, tune=tune, chains=chains, cores=1, random_seed=SEED, progressbar=False, **options
        )
    total = time.perf_counter() - start
    seconds = total * draws / (draws + tune)
    tuned = total
    if stamps:
        is_tuning, times = np.array([t for t, _ in stamps]), np.array([s for _, s in stamps])
        # The interval before a draw is that draw's; PyMC's own work after sampling is left out.
        intervals = np.diff(times, prepend=compiled)
        seconds, tuned = intervals[~is_tuning].sum(), times[-1] - compiled
    posterior = dataset(result)
    thetas = [name for name in posterior.data_vars if name not in ("f", "f_rotated_")]
    theta, f = (_least(az.ess(result, var_names=names)) for names in (thetas, ["f"]))
    return {
        "theta/s": theta / seconds,
        "f/s": f / seconds,
        "theta/s with tuning": theta / tuned,
        "theta/s with compiling": theta / total,
        "rhat": -_least(-az.rhat(result, var_names=[*thetas, "f"])),
        "seconds": seconds,
        "with tuning": tuned,
        "compiling": compiled - start,
    }


def _least(measures):
    found = measures.to_dataset() if hasattr(measures, "to_dataset") else measures
    return min(float(values.min()) for values in found.data_vars.values())


def transition_cost(size) -> dict:
    """Seconds of a transition of the logit problem, and of one Cholesky factorisation."""
    model = classification("logit", size)
    driven = DrivenStep(model, lambda: LatentGPStep(steps_per_draw=10))
    driven.tune(2)
    driven.draw(1)  # in which the sites are fitted
    n = max(2, 2000 // size)
    transition = driven.draw(n)[0] / 10
    covariance = driven.step.joint.prior().gaussian.covariance
    start = time.process_time()
    for _ in range(n):
        cholesky_of(covariance)
    cholesky = (time.process_time() - start) / n
    ratio = transition / cholesky
    row = {"N": size, "transition, ms": 1e3 * transition, "Cholesky, ms": 1e3 * cholesky}
    return row | {"ratio": ratio} | mark(ratio, TRANSITION)


def run(arguments):
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "A latent Gaussian process and its hyperparameters: effective draws a second",
        "Bulk effective size of the slowest hyperparameter and of the slowest value of f, over the "
        "seconds of the draws after tuning, of all draws, and of those and compiling; chains one "
        "after the other from dispersed starts, split R-hat over all of them. Squared exponential "
        "covariances; data drawn from the model (seed "
        f"{SEED}). The compound step is KameleonStep for the hyperparameters and "
        "EllipticalSliceStep for f; NUTS is PyMC's, nutpie of its default, on v ~ N(0, I).",
    )
    rows = []
    samplers = [s for s in arguments.samplers if s != "nutpie" or importlib.util.find_spec(s)]
    for problem in arguments.problems:
        model = PROBLEMS[problem]()
        here = [{"problem": problem, "sampler": s} | sampled(model, s, arguments) for s in samplers]
        nuts = next((row for row in here if row["sampler"] == "NUTS"), None)
        for row in here if nuts else []:
            row["to NUTS"] = row["theta/s"] / nuts["theta/s"]
            row["with tuning, to NUTS"] = row["theta/s with tuning"] / nuts["theta/s with tuning"]
        if nuts and here[0]["sampler"] == "LatentGPStep":
            here[0] |= mark(here[0]["to NUTS"], RATIO, largest=False)
        rows += here
        show(here)
    if rows:
        write(rows, lines, arguments.output / "latent_gp_joint.csv")
    scaling = [transition_cost(size) for size in arguments.sizes]
    if scaling:
        show(scaling, "Logit: a transition, of one Cholesky factorisation")
        write(scaling, lines, arguments.output / "latent_gp_joint_scaling.csv")
