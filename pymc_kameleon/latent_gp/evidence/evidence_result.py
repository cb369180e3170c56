"""An estimate of log evidence, and what to say about one that cannot be relied upon."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pymc.smc.kernels import systematic_resampling
from scipy.special import softmax

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.latent_gp.evidence.parallel_tempering import Estimate

__all__ = ["AnnealingReport", "Evidence", "TemperingReport", "warn_of"]

SMALLEST_SIZE = 10.0
SMALLEST_SHARE = 0.1
"""Effective size of the weights, and its share of the particles, below which there is a warning:
the weights that matter may not be among those drawn, and the standard error does not know."""

LARGEST_PARETO_K = 0.7
"""Shape of the tail of the weights above which there is a warning: from there on more particles
hardly make their mean more precise (Vehtari, Simpson, Gelman, Yao & Gabry 2024)."""

ENOUGH_FOR_PARETO_K = 100
"""Weights from which on there is such a warning. Of harmless weights, log-normal with a standard
deviation of 1/2 in logs, k is above 0.7 in 4 % of samples of 40, 1.5 % of 100 and none of 200."""

SMALLEST_SWAP = 0.05
SMALLEST_ACCEPTANCE = 0.05
"""Acceptances of a pair of temperatures, or of a temperature's transitions, below which there is a
warning."""


@dataclass(frozen=True, eq=False)
class EvidenceReport:
    """How the estimation went, whichever the method.

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
    """

    betas: np.ndarray
    step_sizes: np.ndarray
    acceptance: np.ndarray
    n_evaluations: np.ndarray

    def __getitem__(self, name):
        raise TypeError(f"report[{name!r}] is written report.{name}.")


@dataclass(frozen=True, eq=False)
class AnnealingReport(EvidenceReport):
    """How annealed importance sampling went: an `EvidenceReport` and the following.

    Attributes
    ----------
    pareto_k : float
        Shape of the generalised Pareto distribution of the largest weights (Pareto smoothed
        importance sampling): above 0.7 the estimate is unreliable, and above 1/2 the weights have
        no variance. A few dozen weights tell little of it: there is a warning from 100 of them on.
        NaN where no tail can be fitted, as with fewer than 25.
    """

    pareto_k: float


@dataclass(frozen=True, eq=False)
class TemperingReport(EvidenceReport):
    """How parallel tempering went: an `EvidenceReport` and the following.

    Attributes
    ----------
    swap_acceptance : array, shape (n_temperatures - 1,)
        Mean acceptance probability of the swaps of a temperature and the next.
    stepping_stones, thermodynamic_integration : Estimate
        Both estimates of log Z, each with its `standard_error` and `effective_size`.
    """

    swap_acceptance: np.ndarray
    stepping_stones: Estimate
    thermodynamic_integration: Estimate


@dataclass(frozen=True, repr=False)
class Evidence:
    """Estimate of log p(y), and what it came from.

    Attributes
    ----------
    log_evidence : float
    standard_error : float
        Of `log_evidence`.
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
    report : AnnealingReport or TemperingReport
        Temperatures, acceptances, step sizes and diagnoses.
    result : InferenceData or DataTree, or None
        Draws of the posterior, equally weighted, as `pm.sample` returns them; from `log_evidence`.
    start : GaussianApproximation or None
        Where the path began, with its own estimate of log Z; from `log_evidence`. None is the
        prior.
    """

    log_evidence: float
    standard_error: float
    log_weights: np.ndarray
    effective_size: float
    draws: np.ndarray
    seconds: float
    method: str
    transition: str
    report: AnnealingReport | TemperingReport
    result: Any = None
    start: Any = None

    def __repr__(self) -> str:
        kind, number = ("particles", len(self.log_weights))
        if self.method == "tempering":
            kind, number = "draws", len(self.draws)
        return (
            f"<Evidence: log Z = {self.log_evidence:.4f} ± {self.standard_error:.2g}, "
            f"{self.method} with {self.transition}, {len(self.report.betas)} temperatures, "
            f"effective size {self.effective_size:.0f} of {number} {kind}, {self.seconds:.1f} s>"
        )

    def posterior_draws(self, random_seed: Any = None) -> np.ndarray:
        """Draws (n, N) of the posterior without weights.

        Those of annealed importance sampling are drawn again by their weights, systematically, and
        the same one may come several times: `effective_size` says how many they are worth.
        """
        if self.method == "tempering":
            return self.draws
        weights = softmax(self.log_weights)
        return self.draws[systematic_resampling(weights, np.random.default_rng(random_seed))]


def warn_of(evidence: Evidence):
    """Say what a number alone would hide."""
    report = evidence.report
    if isinstance(report, AnnealingReport):
        _warn_of_weights(evidence)
    else:
        _warn_of_swaps(report)
    acceptance = report.acceptance[1:]
    if np.min(acceptance) < SMALLEST_ACCEPTANCE:
        worst = int(np.argmin(acceptance)) + 1
        warn_user(
            f"The {evidence.transition} transition accepts {acceptance[worst - 1]:.2g} at "
            f"temperature {worst} (beta = {report.betas[worst]:.3g}): chains hardly move there. "
            "Take transition='slice', or sites that are closer to the posterior."
        )


def _warn_of_weights(evidence):
    n, size, k = len(evidence.log_weights), evidence.effective_size, evidence.report.pareto_k
    are_few = size < max(SMALLEST_SHARE * n, min(SMALLEST_SIZE, 0.5 * n))
    is_heavy = n >= ENOUGH_FOR_PARETO_K and k > LARGEST_PARETO_K
    if not are_few and not is_heavy:
        return
    tail = f", and their tail is heavy (Pareto k of {k:.2f})" if is_heavy else ""
    warn_user(
        f"The {n} weights of annealed importance sampling are worth {size:.1f} particles{tail}: "
        f"log Z and its standard error of {evidence.standard_error:.2g} are unreliable, log Z is "
        f"probably too small. Take more n_temperatures (now {len(evidence.report.betas)}) or "
        "n_moves, and begin at the sites of expectation propagation (start='ep')."
    )


def _warn_of_swaps(report):
    swaps = report.swap_acceptance
    worst = int(np.argmin(swaps))
    if swaps[worst] < SMALLEST_SWAP:
        low, high = report.betas[worst : worst + 2]
        warn_user(
            f"Temperatures {worst} and {worst + 1} (beta = {low:.3g} and {high:.3g}) swap with "
            f"probability {swaps[worst]:.2g}: the ladder is cut in two there. Take more "
            f"n_temperatures (now {len(swaps) + 1}), another spacing, or the sites of "
            "expectation propagation."
        )
