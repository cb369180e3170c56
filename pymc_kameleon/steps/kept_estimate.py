"""What is different where the likelihood is an estimate: acceptance, statistics, warnings."""

import math
import warnings

import numpy as np
from pymc.stats.convergence import WarningType

__all__ = ["STATISTICS", "acceptance_share", "complaint", "warn_without"]

STATISTICS = {"estimate": (np.float64, [])}

UNMOVED = 300
"""Transitions without an accepted move after which the kept estimate is looked into."""

N_FRESH = 20
"""Estimates it is compared with."""

ACCEPTANCE_SHARE = 0.5
"""Share of the usual acceptance to aim at. With log-normal noise of standard deviation s on a
Gaussian target, moves of the best length are accepted 1, 0.71 and 0.39 times as often as without
noise at s = 0, 1 and 1.7 (Sherlock, Thiery, Roberts & Rosenthal 2015, eq. 3.4), and none as often
as 0.234 above s = 1.7: a scaling that is learnt for it would end at 0. Half of it costs at most a
seventh of the efficiency for s from 0 to 1.7."""


def acceptance_share(pseudo_marginal: bool) -> float:
    """Return the share of a step's usual target acceptance that its default is."""
    return ACCEPTANCE_SHARE if pseudo_marginal else 1.0


def warn_without(step_name: str, target) -> None:
    """Warn that a step keeps no estimates though the model has some."""
    if target.estimated_terms:
        warnings.warn(
            f"The likelihood term {', '.join(target.estimated_terms)} is an estimate. Without "
            "pseudo_marginal=True this step draws the estimate of its current place again whenever "
            "another step moves or data change, and such a chain does not sample the posterior. "
            f"Write {step_name}(pseudo_marginal=True).",
            UserWarning,
            stacklevel=2,
        )


def complaint(step, unmoved: int, statistics: dict) -> tuple[WarningType, str] | None:
    """Return a warning if a chain that does not move stands on an overestimate.

    The place's likelihood is estimated `N_FRESH` times more, which is no part of the chain.
    """
    if not unmoved - step.steps_per_draw < UNMOVED <= unmoved:
        return None
    fresh = np.empty(N_FRESH)
    for i in range(N_FRESH):
        step.target.redraw_estimates(step.rng)
        fresh[i] = step.target(step.chain.position)[2]
    statistics["n_evals"] += N_FRESH
    fresh = fresh[np.isfinite(fresh)]
    if len(fresh) < 2:
        return None
    level = np.logaddexp.reduce(fresh) - math.log(N_FRESH)
    excess, sd = step.chain.value[2] - level, float(fresh.std(ddof=1))
    if not excess > max(1.0, 2.0 * sd):
        return None
    return (
        WarningType.CONVERGENCE,
        f"The chain of {', '.join(step.target.names)} sticks on an overestimate: no move was "
        f"accepted in {unmoved} transitions, and the kept log-likelihood is {excess:.1f} above "
        f"that of {N_FRESH} fresh estimates of the same place (standard deviation {sd:.1f}). Take "
        "more importance samples or particles: pymc_kameleon.diagnostics.estimator_sd(model, "
        "point) says how many.",
    )
