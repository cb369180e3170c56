"""Latent function and hyperparameters together: LatentGPStep beside NUTS and a compound step."""

import importlib.util
import logging
import os
import time
import warnings
from importlib.metadata import version

import arviz as az
import numpy as np
import pymc as pm

from benchmarks.common import SEED, DrivenStep, heading, mark, show, write
from benchmarks.sampling import dataset, sample
from pymc_kameleon import EllipticalSliceStep, KameleonStep, LatentGPStep, dispersed_starts
from pymc_kameleon.latent_gp.gaussian.sites import cholesky_of

__all__ = ["add_arguments", "run"]

RATIO, RATIO_LARGE, RATIO_WITH_TUNING = 10.0, 5.0, 4.0
"""Least ratios to NUTS of the slowest hyperparameter: after tuning, the same at N = 500, and with
tuning."""

TRANSITION = 3.0
"""Largest ratio of a transition to a Cholesky factorisation."""

TARGET_ACCEPT = 0.9
"""Of both samplers that are NUTS: less leaves divergences."""


def compound(model):
    """What there was without `LatentGPStep`: hyperparameters at a fixed whitened function."""
    names = [rv for rv in model.free_RVs if rv.name != "f_rotated_"]
    return [KameleonStep(names), EllipticalSliceStep([model["f"]])]


STEPS = {
    "LatentGPStep": lambda model: LatentGPStep(),
    "compound": compound,
    "NUTS": lambda model: pm.NUTS(target_accept=TARGET_ACCEPT),
}


def add_arguments(parser):
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000, help="of steps that ask for no number")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS)[:-1], choices=PROBLEMS)
    parser.add_argument("--samplers", nargs="+", default=[*STEPS, "nutpie"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 500, 1000, 2000])


def classification(link, size):
    """Labels at inputs uniform on a square, two lengthscales and an amplitude."""
    rng = np.random.default_rng(SEED)
    inputs = rng.uniform(-1, 1, (size, 2))
    f = truth(inputs, 0.5, 3.0, rng)
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
    y = rng.poisson(level * np.exp(truth(inputs, 1.5, 1.0, rng)))
    with pm.Model() as model:
        f = _latent(inputs, pm.Gamma("lengthscale", 2, 1), pm.HalfNormal("amplitude", 2))
        pm.Poisson("y", level * pm.math.exp(f), observed=y)
    return model


def robust_regression(size):
    """Student-t noise of unknown scale and degrees of freedom."""
    rng = np.random.default_rng(SEED)
    inputs = np.linspace(0, 10, size)[:, None]
    y = truth(inputs, 1.0, 1.0, rng) + 0.3 * rng.standard_t(4, size)
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
    "logit, N=500": lambda: classification("logit", 500),
}


def truth(inputs, lengthscale, amplitude, rng):
    """Draw a function with a squared exponential covariance at `inputs` (N, d)."""
    squares = ((inputs[:, None] - inputs) ** 2).sum(axis=2)
    covariance = amplitude**2 * np.exp(-0.5 * squares / lengthscale**2)
    factor = np.linalg.cholesky(covariance + 1e-6 * np.eye(len(inputs)))
    return factor @ rng.standard_normal(len(inputs))


def _latent(inputs, lengthscale, amplitude):
    kernel = amplitude**2 * pm.gp.cov.ExpQuad(inputs.shape[1], lengthscale)
    return pm.gp.Latent(cov_func=kernel).prior("f", X=inputs)


def sampled(model, sampler, arguments) -> dict:
    """Effective draws of the slowest hyperparameter and of f, and the seconds they took."""
    run_of = nutpie_run if sampler == "nutpie" else pymc_run
    result, compiling, tuning, drawing = run_of(model, sampler, arguments)
    posterior = dataset(result)
    thetas = [name for name in posterior.data_vars if name not in ("f", "f_rotated_")]
    theta, f = (least(az.ess(result, var_names=names)) for names in (thetas, ["f"]))
    return {
        "theta/s": theta / drawing,
        "f/s": f / drawing,
        "theta/s with tuning": theta / (tuning + drawing),
        "theta/s with compiling": theta / (compiling + tuning + drawing),
        "theta": theta,
        "rhat": -least(-az.rhat(result, var_names=[*thetas, "f"])),
        "drawing, s": drawing,
        "tuning, s": tuning,
        "compiling, s": compiling,
    }


def pymc_run(model, sampler, arguments) -> tuple:
    """Draws of `pm.sample`, and CPU seconds of compiling, of tuning and of the draws kept."""
    start = cpu_seconds()
    with model:
        step = STEPS[sampler](model)
    result, (tuning, drawing) = sample(
        model,
        lambda: step,
        draws=arguments.draws,
        tune=tune_of(step, arguments),
        initvals=dispersed_starts(model, arguments.chains, random_seed=SEED),
        random_seed=SEED,
    )
    # Steps of PyMC compile in the first draw, which is in neither of the two.
    return result, cpu_seconds() - start - tuning - drawing, tuning, drawing


def tune_of(step, arguments) -> int:
    """Tuning draws: as many as the step asks PyMC 6 for, else those of the command line."""
    parts = step if isinstance(step, list) else [step]
    return max(getattr(part, "default_tune_steps", None) or arguments.tune for part in parts)


def nutpie_run(model, sampler, arguments) -> tuple:
    """The same of nutpie; its seconds are tuning's and draws' by their numbers of gradients."""
    import nutpie

    start = cpu_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled_model = nutpie.compile_pymc_model(model)
    compiled = cpu_seconds()
    result = nutpie.sample(
        compiled_model,
        draws=arguments.draws,
        tune=arguments.tune,
        chains=arguments.chains,
        cores=1,
        seed=SEED,
        target_accept=TARGET_ACCEPT,
        progress_bar=False,
    )
    seconds = cpu_seconds() - compiled
    kept, warmup = (
        float(dataset(result, group)["n_steps"].sum())
        for group in ("sample_stats", "warmup_sample_stats")
    )
    drawing = seconds * kept / (kept + warmup)
    return result, compiled - start, seconds - drawing, drawing


def cpu_seconds() -> float:
    """CPU seconds of this process and of compilers that it called."""
    return sum(os.times()[:4])


def least(measures):
    """Return the least number of what ArviZ returns."""
    found = measures.to_dataset() if hasattr(measures, "to_dataset") else measures
    return min(float(values.min()) for values in found.data_vars.values())


def transition_cost(size) -> dict:
    """Seconds of a transition of the logit problem, and of one Cholesky factorisation."""
    model = classification("logit", size)
    driven = DrivenStep(model, lambda: LatentGPStep(steps_per_draw=10))
    driven.tune(20)  # 200 transitions: no pilots yet
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
    has_nutpie = importlib.util.find_spec("nutpie") is not None
    samplers = [s for s in arguments.samplers if s != "nutpie" or has_nutpie]
    nutpie_version = f" {version('nutpie')}" if has_nutpie else ""
    lines = heading(
        "A latent Gaussian process and its hyperparameters: effective draws a second",
        "Bulk effective size of the slowest hyperparameter and of the slowest value of f, over the "
        "CPU seconds of the draws after tuning, of all draws, and of those and compiling; split "
        f"R-hat over all chains, {arguments.chains} with {arguments.draws} draws each. Squared "
        f"exponential covariances; data drawn from the model (seed {SEED}). The compound step is "
        "KameleonStep for the hyperparameters and EllipticalSliceStep for f; NUTS is PyMC's, on "
        f"v ~ N(0, I), and so is nutpie's{nutpie_version}. Chains start "
        "at dispersed points, those of nutpie where it puts them.",
    )
    rows = []
    for problem in arguments.problems:
        model = PROBLEMS[problem]()
        here = [{"problem": problem, "sampler": s} | sampled(model, s, arguments) for s in samplers]
        compare(here, RATIO_LARGE if problem.endswith("N=500") else RATIO)
        rows += here
        show(here)
        write(rows, lines, arguments.output / "latent_gp_joint.csv")
    scaling = [transition_cost(size) for size in arguments.sizes]
    if scaling:
        show(scaling, "Logit: a transition, of one Cholesky factorisation")
        write(scaling, lines, arguments.output / "latent_gp_joint_scaling.csv")


def compare(rows, least):
    """Add ratios to PyMC's NUTS to rows of one problem, and targets to that of our step."""
    nuts = next((row for row in rows if row["sampler"] == "NUTS"), None)
    if nuts is None:
        return
    for row in rows:
        row["to NUTS"] = row["theta/s"] / nuts["theta/s"]
        row["with tuning, to NUTS"] = row["theta/s with tuning"] / nuts["theta/s with tuning"]
        if row["sampler"] == "LatentGPStep":
            tuned = mark(row["with tuning, to NUTS"], RATIO_WITH_TUNING, largest=False)
            row |= mark(row["to NUTS"], least, largest=False)
            row |= {f"{name}, with tuning": value for name, value in tuned.items()}
