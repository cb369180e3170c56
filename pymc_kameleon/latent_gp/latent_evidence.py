"""Log marginal likelihood of a latent function, by annealed importance sampling or tempering."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from pymc.smc.kernels import systematic_resampling
from scipy.special import softmax

from pymc_kameleon._compat import pareto_k
from pymc_kameleon._threads import threads_for
from pymc_kameleon._warnings import warn_user
from pymc_kameleon.evidence.estimates import (
    ESTIMATORS,
    LARGEST_PARETO_K,
    Estimate,
    importance_sampling,
)
from pymc_kameleon.latent_gp.annealing import (
    TRANSITIONS,
    AnnealingPath,
    Run,
    TemperedTransition,
    anneal,
    learn_ladder,
    temper,
)
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites
from pymc_kameleon.latent_gp.parallel_tasks import run_tasks
from pymc_kameleon.latent_gp.tempered_target import FactorisingLikelihood
from pymc_kameleon.validation import checked_choice, checked_integer, warn_of_old_name

DEFAULTS = {
    "ais": {"n_temperatures": 100, "n_particles": 64},
    "tempering": {"n_temperatures": 20, "n_particles": 4},
}

SMALLEST_SIZE = 10.0
SMALLEST_SHARE = 0.1
"""Effective size of the weights, and its share of the particles, below which there is a warning:
the weights that matter may not be among those drawn, and the standard error does not know."""

ENOUGH_FOR_PARETO_K = 100
"""Weights from which on there is such a warning. Of harmless weights, log-normal with a standard
deviation of 1/2 in logs, k is above 0.7 in 4 % of samples of 40, 1.5 % of 100 and none of 200."""

SMALLEST_SWAP = 0.05
SMALLEST_ACCEPTANCE = 0.05
"""Acceptances of a pair of temperatures, or of a temperature's transitions, below which there is a
warning."""


# the result ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EvidenceReport:
    """How the estimation went.

    Attributes
    ----------
    betas : array, shape (n_temperatures,)
        Inverse temperatures, from 0 to 1.
    step_sizes : array, shape (n_temperatures,)
        Of the transitions; NaN at beta = 0, and where they have none.
    acceptance : array, shape (n_temperatures,)
        Mean acceptance probability of the transitions; NaN at beta = 0.
    n_evaluations : array, shape (n_particles,)
        Evaluations of the likelihood, or of its derivatives, by each particle or replicate.
    pareto_k : float or None
        Of annealed importance sampling: shape of the generalised Pareto distribution of the largest
        weights (Pareto smoothed importance sampling). Above 0.7 the estimate is unreliable, and
        above 1/2 the weights have no variance. A few dozen weights tell little of it: there is a
        warning from 100 of them on. NaN where no tail can be fitted, as with fewer than 25.
    swap_acceptance : array, shape (n_temperatures - 1,), or None
        Of tempering: mean acceptance probability of the swaps of a temperature and the next.
    stepping_stones, thermodynamic_integration : Estimate or None
        Of tempering: both estimates of log Z, each with its `standard_error` and `effective_size`.
    """

    betas: np.ndarray
    step_sizes: np.ndarray
    acceptance: np.ndarray
    n_evaluations: np.ndarray
    pareto_k: float | None = None
    swap_acceptance: np.ndarray | None = None
    stepping_stones: Estimate | None = None
    thermodynamic_integration: Estimate | None = None

    def __getitem__(self, name):
        raise TypeError(f"report[{name!r}] is written report.{name}.")


@dataclass(frozen=True, repr=False)
class MarginalLikelihood:
    """Estimate of log p(y), and what it came from.

    Attributes
    ----------
    log_marginal_likelihood : float
    standard_error : float
        Of `log_marginal_likelihood`.
    log_weights : array, shape (n_particles,)
        Annealed importance sampling: unbiased estimates of Z, in logs. Tempering: the estimates of
        log Z by each replicate.
    effective_size : float
        Annealed importance sampling: of the weights, at most n_particles. Tempering: of the draws,
        for the estimate.
    draws : array, shape (n, N)
        States at beta = 1. Of annealed importance sampling a draw a particle, to be weighted by
        `log_weights` or drawn again by them, see `posterior_draws`. Of tempering all replicates,
        one after the other.
    seconds : float
        Wall time, with the tuning and without finding the sites.
    method : {"ais", "tempering"}
    transition : str
    report : EvidenceReport
        Temperatures, acceptances, step sizes and diagnoses.
    result : InferenceData or DataTree, or None
        Draws of the posterior, equally weighted, as `pm.sample` returns them; from
        `log_marginal_likelihood`.
    approximation : GaussianApproximation or None
        Where the path began, with its own estimate of log Z; from `log_marginal_likelihood`. None
        is the prior.
    """

    log_marginal_likelihood: float
    standard_error: float
    log_weights: np.ndarray
    effective_size: float
    draws: np.ndarray
    seconds: float
    method: str
    transition: str
    report: EvidenceReport
    result: Any = None
    approximation: Any = None

    def __repr__(self) -> str:
        kind, number = ("particles", len(self.log_weights))
        if self.method == "tempering":
            kind, number = "draws", len(self.draws)
        return (
            f"<MarginalLikelihood: log Z = {self.log_marginal_likelihood:.4f} "
            f"± {self.standard_error:.2g}, {self.method} with {self.transition}, "
            f"{len(self.report.betas)} temperatures, "
            f"effective size {self.effective_size:.0f} of {number} {kind}, {self.seconds:.1f} s>"
        )

    @property
    def log_evidence(self) -> float:
        """The name of `log_marginal_likelihood` in earlier versions."""
        warn_of_old_name("MarginalLikelihood.log_evidence", ".log_marginal_likelihood")
        return self.log_marginal_likelihood

    @property
    def start(self) -> Any:
        """The name of `approximation` in earlier versions."""
        warn_of_old_name("MarginalLikelihood.start", ".approximation")
        return self.approximation

    def posterior_draws(self, random_seed: Any = None) -> np.ndarray:
        """Draws (n, N) of the posterior without weights.

        Those of annealed importance sampling are drawn again by their weights, systematically, and
        the same one may come several times: `effective_size` says how many they are worth.
        """
        if self.method == "tempering":
            return self.draws
        weights = softmax(self.log_weights)
        return self.draws[systematic_resampling(weights, np.random.default_rng(random_seed))]


def estimate_log_evidence(
    prior: Gaussian,
    likelihood: FactorisingLikelihood,
    *,
    sites: Sites | None = None,
    method: str = "ais",
    transition: str | TemperedTransition = "slice",
    n_temperatures: int | None = None,
    n_particles: int | None = None,
    n_moves: int = 1,
    draws: int = 1000,
    tune: int = 500,
    estimator: str = "stepping_stones",
    cores: int = 1,
    random_seed=None,
    progressbar: bool = True,
) -> MarginalLikelihood:
    """Estimate log Z, Z the integral of N(f; prior) exp(sum l_n(f_n)).

    Arguments are those of `latent_gp.log_marginal_likelihood`. With `sites`, of non-negative
    precisions, the path begins at prior x sites.
    """
    checked_choice("method", method, DEFAULTS)
    checked_choice("estimator", estimator, ESTIMATORS)
    if isinstance(transition, str):
        name, moves = transition, TRANSITIONS[checked_choice("transition", transition, TRANSITIONS)]
    else:
        name, moves = transition.at.__name__, transition
    usual = DEFAULTS[method]
    n_temperatures = usual["n_temperatures"] if n_temperatures is None else n_temperatures
    n_particles = usual["n_particles"] if n_particles is None else n_particles
    n_temperatures = checked_integer("n_temperatures", n_temperatures, 2)
    n_particles = checked_integer("n_particles", n_particles, 1)
    cores = checked_integer("cores", cores, 1)
    n_moves = checked_integer("n_moves", n_moves, 1)
    draws, tune = checked_integer("draws", draws, 10), checked_integer("tune", tune, 0)
    start = time.perf_counter()
    path = AnnealingPath(prior, likelihood, _checked_sites(sites, prior, likelihood))
    pilot, *generators = np.random.default_rng(random_seed).spawn(n_particles + 1)
    with threads_for(prior.size):
        betas, step_sizes = learn_ladder(path, n_temperatures, moves, pilot)
    common = path, betas, moves, step_sizes
    options: dict[str, Any] = {
        "cores": cores,
        "description": f"{method}, {name}",
        "progressbar": progressbar,
    }
    more: dict[str, Any]
    if method == "ais":
        numbers = np.array_split(np.arange(n_particles), min(cores, n_particles))
        chunks = [(*common, [generators[i] for i in part], n_moves) for part in numbers]
        runs = run_tasks(anneal, chunks, total=len(chunks) * (n_temperatures - 1), **options)
        seen = np.concatenate([run.log_ratios for run in runs])[:, :-1]
        log_weights = path.log_normaliser + seen @ np.diff(betas)
        found, more = importance_sampling(log_weights), {"pareto_k": pareto_k(log_weights)}
    else:
        replicates = [(*common, generator, draws, tune) for generator in generators]
        runs = run_tasks(temper, replicates, total=n_particles * (draws + tune), **options)
        found, log_weights, more = _from_replicates(runs, path.log_normaliser, betas, estimator)
    report = EvidenceReport(
        betas=betas,
        step_sizes=step_sizes,
        acceptance=np.concatenate([run.acceptance for run in runs]).mean(axis=0),
        n_evaluations=np.concatenate([run.n_evaluations for run in runs]),
        **more,
    )
    evidence = MarginalLikelihood(
        log_marginal_likelihood=found.log_evidence,
        standard_error=found.standard_error,
        effective_size=found.effective_size,
        log_weights=log_weights,
        draws=np.concatenate([run.draws for run in runs]),
        seconds=time.perf_counter() - start,
        method=method,
        transition=name,
        report=report,
    )
    _warn_of(evidence)
    return evidence


def _checked_sites(sites, prior, likelihood):
    if likelihood.size != prior.size:
        raise ValueError(
            f"The likelihood has {likelihood.size} terms and the prior {prior.size} values: the "
            "latent function needs a value for each term."
        )
    sites = Sites.flat(prior.size) if sites is None else sites
    if np.shape(sites.precision) != (prior.size,) or np.shape(sites.shift) != (prior.size,):
        raise ValueError(
            f"sites has precisions of shape {np.shape(sites.precision)} and shifts of shape "
            f"{np.shape(sites.shift)}: take a site for each of the {prior.size} values."
        )
    return sites


def _from_replicates(runs: list[Run], log_normaliser, betas, estimator):
    def estimate(name, log_ratios):
        value, *rest = ESTIMATORS[name](betas, log_ratios)
        return Estimate(log_normaliser + value, *rest)

    log_ratios = np.array([run.log_ratios for run in runs])
    estimates: dict[str, Any] = {name: estimate(name, log_ratios) for name in ESTIMATORS}
    separate = np.array([estimate(estimator, one[None]).log_evidence for one in log_ratios])
    swap_acceptance = np.mean([run.swap_acceptance for run in runs], axis=0)
    return estimates[estimator], separate, {"swap_acceptance": swap_acceptance, **estimates}


# warnings -----------------------------------------------------------------------------------------


def _warn_of(evidence: MarginalLikelihood):
    report = evidence.report
    if report.swap_acceptance is None:
        _warn_of_weights(evidence, report.pareto_k)
    else:
        _warn_of_swaps(report.betas, report.swap_acceptance)
    acceptance = report.acceptance[1:]
    if np.min(acceptance) < SMALLEST_ACCEPTANCE:
        worst = int(np.argmin(acceptance)) + 1
        warn_user(
            f"The {evidence.transition} transition accepts {acceptance[worst - 1]:.2g} at "
            f"temperature {worst} (beta = {report.betas[worst]:.3g}): chains hardly move there. "
            "Take transition='slice', or sites that are closer to the posterior."
        )


def _warn_of_weights(evidence, k):
    n, size = len(evidence.log_weights), evidence.effective_size
    are_few = size < max(SMALLEST_SHARE * n, min(SMALLEST_SIZE, 0.5 * n))
    is_heavy = n >= ENOUGH_FOR_PARETO_K and k > LARGEST_PARETO_K
    if not are_few and not is_heavy:
        return
    tail = f", and their tail is heavy (Pareto k of {k:.2f})" if is_heavy else ""
    warn_user(
        f"The {n} weights of annealed importance sampling are worth {size:.1f} particles{tail}: "
        f"log Z and its standard error of {evidence.standard_error:.2g} are unreliable, log Z is "
        f"probably too small. Take more n_temperatures (now {len(evidence.report.betas)}) or "
        "n_moves, and begin at the sites of expectation propagation (approximation='ep')."
    )


def _warn_of_swaps(betas, swaps):
    worst = int(np.argmin(swaps))
    if swaps[worst] < SMALLEST_SWAP:
        low, high = betas[worst : worst + 2]
        warn_user(
            f"Temperatures {worst} and {worst + 1} (beta = {low:.3g} and {high:.3g}) swap with "
            f"probability {swaps[worst]:.2g}: the ladder is cut in two there. Take more "
            f"n_temperatures (now {len(betas)}), or the sites of expectation propagation."
        )
