"""Section 5.1 of the paper of kernel adaptive Metropolis-Hastings: hyperparameters of a classifier.

Sejdinovic et al. (2014): the glass data of UCI, a pseudo-marginal posterior of nine log squared
lengthscales, samplers judged by their distance to a long run.
"""

import os
import time
from functools import partial
from pathlib import Path

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from matplotlib.figure import Figure

from benchmarks.classification import read
from benchmarks.common import SEED, DrivenStep, heading, mark, show, write
from benchmarks.kamh_figure5 import CONFIDENCE, interval
from benchmarks.sampling import dataset
from pymc_kameleon import AdaptiveMetropolisStep, FastKameleonStep, KameleonStep
from pymc_kameleon.diagnostics import maximum_mean_discrepancy
from pymc_kameleon.kernels import Polynomial
from pymc_kameleon.model.estimated_loglikelihood import estimates
from pymc_kameleon.pseudo_marginal import gp_classification_loglikelihood

__all__ = ["SAMPLERS", "add_arguments", "figure", "model", "run"]

PUBLISHED = {"iterations": 100_000, "chains": 30, "every": 20}
PUBLISHED_BENCHMARK = {"iterations": 500_000, "chains": 30}
QUICK = {"iterations": 300, "chains": 2, "benchmark_iterations": 400, "benchmark_chains": 2}
PRIOR_VARIANCE, JITTER = 5.0, 1e-3
MOMENTS = Polynomial(3)
CHECKPOINTS = np.arange(1, 11) / 10
OWN_SHARE = 0.05
CLAIM = (
    "Published: KAMH-LS approximates the benchmark sample best, above all in MMD, which compares "
    "all mixed moments up to the third; its own cost is 2 to 3 % of the time."
)

NOISY = {"pseudo_marginal": True, "steps_per_draw": 1}
adaptive = partial(AdaptiveMetropolisStep, **NOISY)
SAMPLERS = {
    "SM": partial(adaptive, covariance="identity", learn_scaling=False),
    "AM-FS": partial(adaptive, initial_covariance=np.eye(9), learn_scaling=False),
    "AM-LS": partial(adaptive, initial_covariance=np.eye(9)),
    "KAMH-LS": partial(KameleonStep.paper, bandwidth=23.0, **NOISY),
    "KameleonStep": partial(KameleonStep, **NOISY),
    "F-KAMH": partial(FastKameleonStep, **NOISY),
}
COLORS = ("#c9c4b5", "#d99a4e", "#a4503c", "#1f7a85", "#17324d", "#7a9e3f")


def add_arguments(parser):
    parser.add_argument("--data", type=Path, default=os.environ.get("PYMC_KAMELEON_DATA"))
    parser.add_argument("--iterations", type=int, default=PUBLISHED["iterations"])
    parser.add_argument("--chains", type=int, default=PUBLISHED["chains"])
    iterations = PUBLISHED_BENCHMARK["iterations"]
    parser.add_argument("--benchmark-iterations", type=int, default=iterations)
    parser.add_argument("--benchmark-chains", type=int, default=PUBLISHED_BENCHMARK["chains"])
    parser.add_argument("--n-importance", type=int, default=100)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help=f"a minute or two: {QUICK}")
    parser.add_argument("--benchmark", type=Path, help="draws of the long run, made earlier")


def model(folder: Path, n_importance: int = 100) -> pm.Model:
    """Return the published model: theta_d = log lengthscale_d^2 ~ N(0, 5), inputs whitened."""
    inputs, labels = read("glass", folder)
    factor = np.linalg.cholesky(np.cov(inputs, rowvar=False))
    inputs = np.linalg.solve(factor, (inputs - inputs.mean(axis=0)).T).T
    with pm.Model() as classifier:
        theta = pm.Normal("theta", 0.0, np.sqrt(PRIOR_VARIANCE), shape=inputs.shape[1])
        estimate = gp_classification_loglikelihood(
            inputs,
            labels,
            pt.exp(theta / 2),
            likelihood="logit",
            approximation="laplace",
            n_importance=n_importance,
            jitter=JITTER,
        )
        pm.Potential("loglike", estimate)
    return classifier


def draw(classifier, make_step, iterations, initvals, cores):
    """Draws of a chain from each start after a fifth of burn-in, during which the step adapts."""
    burn_in, chains = iterations // 5, len(initvals)
    with classifier:
        return pm.sample(
            draws=iterations - burn_in,
            tune=burn_in,
            chains=chains,
            cores=min(cores, chains),
            step=make_step(),
            initvals=initvals,
            random_seed=SEED,
            compute_convergence_checks=False,
            progressbar=False,
        )


def largest_rhat(theta: xr.DataArray) -> float:
    return float(az.rhat(xr.Dataset({"theta": theta}))["theta"].max())


def smallest_ess(theta: xr.DataArray) -> float:
    return float(az.ess(xr.Dataset({"theta": theta}))["theta"].min())


def long_run(classifier, arguments) -> np.ndarray:
    """Draws (n, 9) of standard Metropolis chains from the prior, after a fifth of burn-in."""
    path = arguments.benchmark
    if path is not None and path.exists():
        return np.load(path)
    iterations, chains = arguments.benchmark_iterations, arguments.benchmark_chains
    rng = np.random.default_rng(SEED)
    starts = [{"theta": rng.normal(0, np.sqrt(PRIOR_VARIANCE), 9)} for _ in range(chains)]
    result = draw(classifier, SAMPLERS["SM"], iterations, starts, arguments.cores)
    theta = dataset(result)["theta"]
    report = {
        "chains": chains,
        "iterations": iterations,
        "accepted": float(dataset(result, "sample_stats")["accepted"].mean()),
        "largest R-hat": largest_rhat(theta),
        "smallest ESS": smallest_ess(theta),
    }
    show([report], "The long run, by standard Metropolis")
    every = max(1, theta.sizes["draw"] * chains // 4000)
    draws = theta.values[:, ::every].reshape(-1, theta.shape[-1])
    if path is not None:
        np.save(path, draws)
    return draws


def distances(chain: np.ndarray, benchmark: np.ndarray) -> np.ndarray:
    """Distance of the mean, and MMD, of growing parts of a chain (n, 9): shape (2, 10)."""
    found = []
    for share in CHECKPOINTS:
        part = chain[: max(2, round(share * len(chain)))]
        part = part[:: max(1, len(part) // 2000)]
        found.append(
            [
                np.linalg.norm(part.mean(axis=0) - benchmark.mean(axis=0)),
                maximum_mean_discrepancy(part, benchmark, MOMENTS),
            ]
        )
    return np.transpose(found)


def measured(name, classifier, benchmark, arguments) -> tuple[dict, np.ndarray]:
    """Return a sampler's row of the table, and its distances, shape (chains, 2, 10)."""
    iterations = arguments.iterations
    starts = [{"theta": np.zeros(9)}] * arguments.chains
    start = time.perf_counter()
    result = draw(classifier, SAMPLERS[name], iterations, starts, arguments.cores)
    seconds = time.perf_counter() - start
    theta, statistics = dataset(result)["theta"], dataset(result, "sample_stats")
    every = max(1, PUBLISHED["every"] * iterations // PUBLISHED["iterations"])
    found = np.array([distances(chain, benchmark) for chain in theta.values[:, ::every]])
    (mean, half) = interval(found[:, :, -1])
    row = {
        "sampler": name,
        "accepted": float(statistics["accepted"].mean()),
        "distance of mean": mean[0],
        "+-mean": half[0],
        "MMD": mean[1],
        "+-MMD": half[1],
        "R-hat": largest_rhat(theta),
        "ESS a chain": smallest_ess(theta) / arguments.chains,
        "minutes": seconds / 60,
    }
    return row, found


def own_share(name, classifier, n=300) -> dict:
    """Share of the time of tuned transitions that is not spent in the estimate."""
    driven = DrivenStep(classifier, SAMPLERS[name])
    operation = estimates(classifier.potentials)[0].owner.op
    driven.tune(2 * n)
    inside, estimate = [0.0], operation.fn

    def timed(*arguments):
        start = time.process_time()
        value = estimate(*arguments)
        inside[0] += time.process_time() - start
        return value

    operation.fn = timed
    try:
        seconds, _ = driven.draw(n)
    finally:
        operation.fn = estimate
    share = 1.0 - inside[0] / (n * seconds)
    return {
        "sampler": name,
        "ms a transition": 1e3 * seconds,
        "ms an estimate": 1e3 * inside[0] / n,
        "own share": share,
        **mark(share, OWN_SHARE),
    }


def figure(results: dict[str, np.ndarray], iterations: int) -> Figure:
    """Draw both distances against the number of iterations, as in the published figure 4."""
    picture = Figure(figsize=(10, 4), layout="constrained")
    axes = picture.subplots(1, 2)
    length = CHECKPOINTS * iterations * 4 / 5
    titles = ("distance of the mean to the long run's", "MMD to the long run, moments up to three")
    for k, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for color, (name, found) in zip(COLORS, results.items(), strict=False):
            mean, half = interval(found[:, k])
            axis.errorbar(length, mean, half, color=color, label=name, capsize=2, linewidth=1.6)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("iterations after the burn-in")
        axis.set_ylim(bottom=0.0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=9)
    return picture


def run(arguments):
    if arguments.data is None:
        raise SystemExit("--data: name the folder that holds glass.data, or PYMC_KAMELEON_DATA.")
    if arguments.quick:
        vars(arguments).update(QUICK)
    lines = heading(
        "glass: pseudo-marginal GP classification, section 5.1 of Sejdinovic et al. (2014)",
        f"{arguments.chains} chains of {arguments.iterations} iterations from 0, a fifth of them "
        f"burn-in, beside a long run of {arguments.benchmark_chains} standard Metropolis chains of "
        f"{arguments.benchmark_iterations}. Published: {PUBLISHED['chains']} x "
        f"{PUBLISHED['iterations']}, beside {PUBLISHED_BENCHMARK['chains']} x "
        f"{PUBLISHED_BENCHMARK['iterations']}. {arguments.n_importance} importance samples from "
        "Laplace's approximation, a fixed share from the prior. Figures are means over chains, +- "
        f"half of the {CONFIDENCE:.0%} interval of that mean.",
        "SM is N(x, 2.38^2/d I); AM-FS and AM-LS start at covariance I; KAMH-LS is "
        "KameleonStep.paper with the published bandwidth 23; KameleonStep and F-KAMH "
        "(FastKameleonStep) are our default steps.",
        CLAIM,
    )
    classifier = model(arguments.data, arguments.n_importance)
    stem = arguments.output / "glass.csv"
    costs = [own_share(name, classifier) for name in arguments.samplers]
    show(costs, "Share of the time that is the sampler's own")
    write(costs, lines, stem.with_name("glass-cost.csv"))
    benchmark = long_run(classifier, arguments)
    rows, results = [], {}
    for name in arguments.samplers:
        print(name, flush=True)
        row, results[name] = measured(name, classifier, benchmark, arguments)
        rows.append(row)
        # All samplers so far, so that an interrupted run loses nothing.
        write(rows, lines, stem)
        path = arguments.output / "glass.png"
        figure(results, arguments.iterations).savefig(path, dpi=150)
    show(rows, "Distance to the long run")
    print(f"  {path}", flush=True)
