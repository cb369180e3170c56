"""Latent Gaussian models as people write them: the plain call of LatentGPStep, beside NUTS."""

import logging

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt

from benchmarks import mixed_models
from benchmarks.common import SEED, heading, mark, show, write
from benchmarks.latent_gp_joint import cpu_seconds, least, truth
from benchmarks.sampling import dataset, sample
from pymc_kameleon import LatentGPStep

__all__ = ["add_arguments", "run"]

RATIO = 5.0
"""Least ratio to NUTS of the smallest effective number a CPU second, with tuning."""

STEPS = {
    "LatentGPStep": lambda: LatentGPStep(),
    "NUTS": lambda: pm.NUTS(),
}


def add_arguments(parser):
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000, help="of NUTS")
    parser.add_argument("--chains", type=int, default=4)
    names = [*MODELS, *mixed_models.LARGE]
    parser.add_argument("--problems", nargs="*", default=list(MODELS), choices=names)
    parser.add_argument("--samplers", nargs="+", default=list(STEPS), choices=STEPS)


def latent(name, inputs, lengthscale, amplitude):
    covariance = amplitude**2 * pm.gp.cov.ExpQuad(1, lengthscale)
    return pm.gp.Latent(cov_func=covariance).prior(name, X=inputs)


def scales(number=""):
    return pm.InverseGamma(f"l{number}", 3, 3), pm.HalfNormal(f"s{number}", 1)


def intercept(rng):
    """Counts of about a thousand, an intercept with a vague prior."""
    inputs = np.linspace(0, 10, 50)[:, None]
    y = rng.poisson(np.exp(7 + truth(inputs, 1.5, 0.5, rng)))
    level = pm.Normal("level", 0, 10)
    pm.Poisson("y", pt.exp(level + latent("f", inputs, *scales())), observed=y)


def two_functions(rng):
    inputs = np.linspace(0, 10, 60)[:, None]
    y = rng.poisson(np.exp(1 + truth(inputs, 3, 1, rng) + truth(inputs, 0.4, 0.5, rng)))
    slow = latent("slow", inputs, pm.InverseGamma("l0", 5, 15), pm.HalfNormal("s0", 1))
    fast = latent("fast", inputs, pm.InverseGamma("l1", 5, 2), pm.HalfNormal("s1", 1))
    pm.Poisson("y", pt.exp(1 + slow + fast), observed=y)


def noise_function(rng):
    """A function for the mean and one for the logarithm of the standard deviation."""
    inputs = np.linspace(0, 10, 80)[:, None]
    sd = np.exp(-1 + truth(inputs, 3, 0.7, rng))
    y = truth(inputs, 2, 2, rng) + sd * rng.standard_normal(80)
    f = latent("f", inputs, *scales(0))
    g = latent("g", inputs, pm.InverseGamma("l1", 5, 15), pm.HalfNormal("s1", 1))
    pm.Normal("y", f, pt.exp(pm.Normal("level", 0, 2) + g), observed=y)


def groups(rng):
    """Three groups, each with its function, of the same lengthscale and amplitude."""
    inputs, (lengthscale, amplitude) = np.linspace(0, 5, 25)[:, None], scales()
    for k in range(3):
        f = latent(f"f{k}", inputs, lengthscale, amplitude)
        y = rng.poisson(np.exp(1 + truth(inputs, 1, 0.7, rng)))
        pm.Poisson(f"y{k}", pt.exp(1 + f), observed=y)


def classes(rng):
    """Softmax of three functions."""
    inputs, (lengthscale, amplitude) = np.linspace(0, 10, 60)[:, None], scales()
    weights = np.exp(np.stack([truth(inputs, 2, 2, rng) for _ in range(3)], axis=1))
    y = [rng.choice(3, p=row / row.sum()) for row in weights]
    functions = [latent(f"f{k}", inputs, lengthscale, amplitude) for k in range(3)]
    pm.Categorical("y", p=pm.math.softmax(pt.stack(functions, axis=1), axis=1), observed=y)


def areas(rng, intrinsic=False, width=8, n=56):
    """Counts in areas of a grid, with a covariate: CAR, or BYM2 with ICAR."""
    i, j = np.divmod(np.arange(n), width)
    neighbours = (abs(i[:, None] - i) + abs(j[:, None] - j) == 1).astype(float)
    expected, x = rng.gamma(5, 2, n), rng.standard_normal(n)
    y = rng.poisson(expected * np.exp(0.2 + 0.3 * x + 0.4 * rng.standard_normal(n)))
    predictor = pm.Normal("level", 0, 5) + pm.Normal("slope", 0, 1) * x
    sd = pm.HalfNormal("sd", 1)
    if intrinsic:
        share, apart = pm.Beta("share", 1, 1), pm.Normal("apart", 0, 1, shape=n)
        phi = pm.ICAR("phi", W=neighbours)
        predictor += sd * (pt.sqrt(1 - share) * apart + pt.sqrt(share / 0.5) * phi)
    else:
        alpha = pm.Beta("alpha", 1, 1)
        predictor += pm.CAR("phi", mu=np.zeros(n), W=neighbours, alpha=alpha, tau=sd**-2)
    pm.Poisson("y", expected * pt.exp(predictor), observed=y)


def missing(rng):
    """Student-t noise, and 20 of 80 observations missing."""
    inputs = np.linspace(0, 10, 80)[:, None]
    y = truth(inputs, 1, 1, rng) + 0.3 * rng.standard_t(4, 80)
    y[rng.choice(80, 20, replace=False)] = np.nan
    f, noise = latent("f", inputs, *scales()), pm.HalfNormal("noise", 1)
    pm.StudentT("y", nu=4, mu=f, sigma=noise, observed=np.ma.masked_invalid(y))


def effects(rng):
    """An intercept, a function, and an effect of each observation."""
    inputs = np.linspace(0, 10, 40)[:, None]
    f = 1 + truth(inputs, 1.5, 1, rng) + 0.5 * rng.standard_normal(40)
    sd = pm.HalfNormal("sd", 1)
    predictor = pm.Normal("level", 0, 5) + pm.Normal("v", 0, sd, shape=40)
    predictor += latent("f", inputs, *scales())
    pm.Poisson("y", pt.exp(predictor), observed=rng.poisson(np.exp(f)))


def walk(rng, n=100):
    x = 1 + np.cumsum(0.2 * rng.standard_normal(n))
    # Of a long walk what is between 0 and 2, reflected there.
    y = rng.poisson(np.exp(x if n <= 100 else np.abs((x % 4) - 2)))
    start, sd = pm.Normal.dist(0, 2), pm.HalfNormal("sd", 1)
    x = pm.GaussianRandomWalk("x", sigma=sd, steps=n - 1, init_dist=start)
    pm.Poisson("y", pt.exp(x), observed=y)


def autoregression(rng):
    x = np.zeros(100)
    for i in range(1, 100):
        x[i] = 0.8 * x[i - 1] + 0.4 * rng.standard_normal()
    sd, rho = pm.HalfNormal("sd", 1), pm.Uniform("rho", -1, 1)
    start = pm.Normal.dist(0, 2)
    process = pm.AR("x", rho=[rho], sigma=sd, steps=99, init_dist=start)
    pm.Poisson("y", pt.exp(pm.Normal("level", 0, 5) + process), observed=rng.poisson(np.exp(1 + x)))


PROBLEMS = {
    "intercept, counts of e^7": intercept,
    "two functions": two_functions,
    "function of the noise": noise_function,
    "three groups": groups,
    "softmax of three": classes,
    "areas, CAR": areas,
    "areas, BYM2": lambda rng: areas(rng, intrinsic=True),
    "missing observations": missing,
    "effects of observations": effects,
    "random walk": walk,
    "autoregression": autoregression,
    "areas, BYM2, N = 1024": lambda rng: areas(rng, intrinsic=True, width=32, n=1024),
    "random walk, N = 10 000": lambda rng: walk(rng, n=10_000),
}

MODELS = PROBLEMS | mixed_models.PROBLEMS


def sampled(name, sampler, arguments) -> dict:
    """Smallest effective number and largest R-hat of all free variables, and CPU seconds."""
    with pm.Model() as model:
        (MODELS | mixed_models.LARGE)[name](np.random.default_rng(SEED))
    start = cpu_seconds()
    with model:
        step = STEPS[sampler]()
    result, (tuning, drawing) = sample(
        model,
        lambda: step,
        draws=arguments.draws,
        tune=arguments.tune if sampler == "NUTS" else step.default_tune_steps,
        initvals=[{}] * arguments.chains,
        random_seed=SEED,
    )
    seconds = cpu_seconds() - start
    names = [v.name for v in model.free_RVs if v.name in dataset(result).data_vars]
    effective = least(az.ess(result, var_names=names))
    return {
        "model": name,
        "sampler": sampler,
        "effective": effective,
        "rhat": -least(-az.rhat(result, var_names=names)),
        "a second, with tuning": effective / (tuning + drawing),
        "a second, with compiling": effective / seconds,
        "seconds": seconds,
    }


def run(arguments):
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Latent Gaussian models as people write them: effective draws a second",
        "Smallest bulk effective size of all free variables, and largest split R-hat, of "
        f"{arguments.chains} chains with {arguments.draws} draws each from PyMC's default start; "
        "over the CPU seconds of all draws, and of those and compiling. Data drawn from the model "
        f"(seed {SEED}).",
    )
    rows = []
    for name in arguments.problems:
        here = [sampled(name, sampler, arguments) for sampler in arguments.samplers]
        ours = next((row for row in here if row["sampler"] == "LatentGPStep"), None)
        nuts = next((row for row in here if row["sampler"] == "NUTS"), None)
        if ours and nuts:
            ours["to NUTS"] = ours["a second, with tuning"] / nuts["a second, with tuning"]
            ours |= mark(ours["to NUTS"], RATIO, largest=False)
        rows += here
        show(here)
        write(rows, lines, arguments.output / "latent_models.csv")
