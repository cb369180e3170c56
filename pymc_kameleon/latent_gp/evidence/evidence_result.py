"""An estimate of log evidence, and what to say about one that cannot be relied upon."""

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Evidence", "warn_of"]

SMALLEST_SIZE = 10.0
SMALLEST_SHARE = 0.1
"""Effective size of the weights, and its share of the particles, below which there is a warning:
the weights that matter may not be among those drawn, and the standard error does not know."""

SMALLEST_SWAP = 0.05
SMALLEST_ACCEPTANCE = 0.05
"""Acceptances of a pair of temperatures, or of a temperature's transitions, below which there is a
warning."""


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
    report : dict
        "betas", "acceptance" (mean at a temperature, NaN at beta = 0), "step_sizes",
        "n_evaluations" (by particle or replicate), and of tempering "swap_acceptance", and the
        "stepping_stones" and "thermodynamic_integration" estimates, each with its standard error
        and effective size.
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
    report: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    start: Any = None

    def __repr__(self) -> str:
        kind, number = ("particles", len(self.log_weights))
        if self.method == "tempering":
            kind, number = "draws", len(self.draws)
        return (
            f"<Evidence: log Z = {self.log_evidence:.4f} ± {self.standard_error:.2g}, "
            f"{self.method} with {self.transition}, {len(self.report['betas'])} temperatures, "
            f"effective size {self.effective_size:.0f} of {number} {kind}, {self.seconds:.1f} s>"
        )

    def posterior_draws(self, random_seed=None) -> np.ndarray:
        """Draws (n, N) of the posterior without weights.

        Those of annealed importance sampling are drawn again by their weights, systematically, and
        the same one may come several times: `effective_size` says how many they are worth.
        """
        if self.method == "tempering":
            return self.draws
        weights = np.exp(self.log_weights - np.max(self.log_weights))
        n = len(weights)
        places = (np.random.default_rng(random_seed).random() + np.arange(n)) / n
        chosen = np.searchsorted(np.cumsum(weights) / weights.sum(), places)
        return self.draws[np.minimum(chosen, n - 1)]


def warn_of(evidence: Evidence):
    """Say what a number alone would hide."""
    n, size = len(evidence.log_weights), evidence.effective_size
    if evidence.method == "ais" and size < max(SMALLEST_SHARE * n, min(SMALLEST_SIZE, 0.5 * n)):
        warnings.warn(
            f"The {n} weights of annealed importance sampling are worth {size:.1f} particles: "
            f"log Z and its standard error of {evidence.standard_error:.2g} are unreliable, log Z "
            f"is probably too small. Take more n_temperatures (now "
            f"{len(evidence.report['betas'])}) or n_moves, and begin at the sites of expectation "
            "propagation (start='ep').",
            stacklevel=_callers_level(),
        )
    if evidence.method == "tempering":
        swaps = evidence.report["swap_acceptance"]
        worst = int(np.argmin(swaps))
        if swaps[worst] < SMALLEST_SWAP:
            low, high = evidence.report["betas"][worst : worst + 2]
            warnings.warn(
                f"Temperatures {worst} and {worst + 1} (beta = {low:.3g} and {high:.3g}) swap with "
                f"probability {swaps[worst]:.2g}: the ladder is cut in two there. Take more "
                f"n_temperatures (now {len(swaps) + 1}), another spacing, or the sites of "
                "expectation propagation.",
                stacklevel=_callers_level(),
            )
    acceptance = evidence.report["acceptance"][1:]
    if np.min(acceptance) < SMALLEST_ACCEPTANCE:
        worst = int(np.argmin(acceptance)) + 1
        warnings.warn(
            f"The {evidence.transition} transition accepts {acceptance[worst - 1]:.2g} at "
            f"temperature {worst} (beta = {evidence.report['betas'][worst]:.3g}): chains hardly "
            "move there. "
            "Take transition='slice', or sites that are closer to the posterior.",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """Stack level of the first caller outside the package, for whom a warning is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("pymc_kameleon."):
        level, frame = level + 1, frame.f_back
    return level
