"""What is different where the likelihood is an estimate: statistic, tuning and warnings."""

import math

import numpy as np
from pymc.stats.convergence import WarningType
from scipy.special import logsumexp

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.mcmc.chain import ACCEPTED

ADVICE = "pymc_kameleon.diagnostics.estimator_sd(model, point) says how many samples it takes"
"""End of the messages for which noise may be the cause."""

STATISTICS: dict = {"estimate": (np.float64, [])}

PATIENCE = 3
"""Moves rejected in a row while tuning after which the point's estimate is drawn again. A chain
that sticks on an overestimate would learn from its rejections that no move is short enough: above a
standard deviation of 1.7 no move at all is accepted as often as 0.234 (Sherlock, Thiery, Roberts &
Rosenthal 2015). What it does while tuning is no part of the result."""

UNMOVED = 300
"""Transitions without an accepted move after which the kept estimate is examined."""

N_FRESH = 20
"""Estimates it is compared with."""

FIRST_ESTIMATES = 100
"""Estimates of zero, or not finite, at the start of a chain before it is given up."""

TOO_NOISY = 2.5
"""Standard deviation of the log estimates, as a surrogate finds it, from which there is a warning:
fewer than one in ten is accepted then at an independent point."""

WAIT = 20
"""Draws after which every estimate of the model should have got a seed."""


def warn_without(step_name: str, target) -> None:
    """Warn that a step keeps no estimates though its log density has some."""
    if target.estimated_terms:
        warn_user(
            f"The likelihood term {', '.join(target.estimated_terms)} is an estimate. Without "
            "pseudo_marginal=True this step tunes as if it were exact, and draws the estimate of "
            "its current point again whenever another step moves or data change: such a chain does "
            f"not sample the posterior. Write {step_name}(pseudo_marginal=True)."
        )


def require_one(step_name: str, target) -> None:
    """Raise an error if nothing in the log density is an estimate, which a step is to keep."""
    if not (target.has_estimates or target.foreign_estimates):
        raise ValueError(
            "pseudo_marginal=True, and no term of the likelihood that depends on "
            f"{', '.join(target.names)} is an estimate. Write {step_name}() for an exact "
            "likelihood; an estimate is a term such as "
            'pm.Potential("estimate", estimated_loglikelihood(function, ...)), of '
            "pymc_kameleon.pseudo_marginal."
        )


def advance_patiently(sampler, n: int) -> None:
    """Make `n` transitions of tuning; redraw the estimate where the chain is stuck."""
    chain, report = sampler.chain, sampler.report
    for _ in range(n):
        if report.rejections >= PATIENCE:
            before = chain.value.copy()
            sampler.evaluate_current()
            if chain.value[0] == -np.inf:
                chain.value[:] = before
            report.rejections = 0
        accepted = chain.outcome[ACCEPTED]
        sampler.advance(1)
        report.rejections = 0 if chain.outcome[ACCEPTED] > accepted else report.rejections + 1


def overestimate(sampler, statistics: dict) -> tuple[WarningType, str] | None:
    """Return a warning if a chain that has not moved for long stands on an overestimate.

    The likelihood of the point is estimated `N_FRESH` times more, which is no part of the chain.
    """
    report = sampler.report
    if report.unmoved == 0:
        report.is_examined = False
    is_due = not sampler.tune and sampler.target.has_estimates and report.unmoved >= UNMOVED
    if not is_due or report.is_examined or "overestimate" in report.warned:
        return None
    report.is_examined = True
    fresh = np.empty(N_FRESH)
    for i in range(N_FRESH):
        sampler.target.redraw_estimates(sampler.rng)
        fresh[i] = sampler.target(sampler.chain.position)[2]
    statistics["n_evals"] += N_FRESH
    fresh = fresh[np.isfinite(fresh)]
    if len(fresh) < 2:
        return None
    level = logsumexp(fresh) - math.log(N_FRESH)
    excess, sd = sampler.chain.value[2] - level, float(fresh.std(ddof=1))
    if not excess > max(1.0, 2.0 * sd):
        return None
    report.warned.add("overestimate")
    return (
        WarningType.CONVERGENCE,
        f"The chain of {', '.join(sampler.target.names)} sticks on an overestimate: no move was "
        f"accepted in {report.unmoved} transitions, and the kept log-likelihood is "
        f"{excess:.1f} above that of {N_FRESH} fresh estimates at the same point (standard "
        f"deviation {sd:.1f}). Take more importance samples or particles: {ADVICE}.",
    )


def too_noisy(names: str, sd: float) -> tuple[WarningType, str] | None:
    """Return a warning if a surrogate has learnt that the log estimates are too noisy."""
    if sd < TOO_NOISY:
        return None
    return (
        WarningType.BAD_ACCEPTANCE,
        f"The log of the estimated likelihood of {names} has a standard deviation of "
        f"about {sd:.1f}: chains work best at 1 to 1.7, and stick above. Take more importance "
        f"samples or particles: {ADVICE}.",
    )


def foreign_seed(target) -> float:
    """Return a number that changes when a step seeds an estimate that `target` has left out."""
    seeds = [seed for seeds in target.foreign_estimates.values() for seed in seeds]
    return float(sum(int(seed.get_value()) for seed in seeds))


def unseeded(sampler) -> tuple[WarningType, str] | None:
    """Return the warning that an estimate that was left out gets no seeds, once it is time."""
    target, report = sampler.target, sampler.report
    is_due = sampler.transition >= WAIT * sampler.steps_per_draw and "unseeded" not in report.warned
    if not (target.foreign_estimates and is_due):
        return None
    if foreign_seed(target) != report.foreign_seed:
        return None
    report.warned.add("unseeded")
    names = ", ".join(target.foreign_estimates)
    return (
        WarningType.BAD_PARAMS,
        f"The estimated likelihood term {names} does not depend on {', '.join(target.names)}, and "
        "no step draws it anew: the variables that it depends on are sampled on one fixed, rough "
        "surface, not from their posterior. Give them a step with pseudo_marginal=True.",
    )
