"""What a chain counts, and the warnings that follow from it."""

import logging
from dataclasses import dataclass, field

import numpy as np
from pymc.stats.convergence import WarningType

from pymc_kameleon._compat import can_interrupt_sampling, interrupt_sampling
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.black_box import Calls
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.life_cycle import STUCK_AFTER

_log = logging.getLogger("pymc.kameleon")

MANY = 0.1
"""Share of log densities that are no number above which there is a warning."""


@dataclass
class Report:
    """Counts of a chain, and the warnings that it has given.

    `unmoved` counts transitions since the last draw with an accepted move, and `rejections` moves
    rejected in a row while tuning where the likelihood is an estimate; `acceptance` is the mean
    acceptance of late. `evaluations` counts those of the log density, `known` log densities that a
    store had, and `nonfinite` those of both that were NaN or +inf. At `failed` points of start and
    tuning the log density raised an error; `first_failure` says where, and which. `calls`
    are those of black boxes. `foreign_seed` is
    `kept_estimate.foreign_seed` at the start of the chain, and `is_examined` says whether the
    estimate that the chain stands on has been compared with others. With a surrogate, `calls_made`
    counts evaluations, `calls_saved` transitions without one, and `screened` proposals that the
    surrogate saw, whose probabilities of passing it sum to `passed`. `pending` is a warning for the
    next draw; the kinds of warnings in `warned` are not to be given (again).
    """

    unmoved: int = 0
    rejections: int = 0
    acceptance: float = 0.0
    evaluations: float = 0.0
    nonfinite: float = 0.0
    failed: int = 0
    first_failure: str | None = None
    calls: Calls = field(default_factory=Calls)
    known: float = 0.0
    foreign_seed: float = 0.0
    calls_made: int = 0
    calls_saved: int = 0
    screened: float = 0.0
    passed: float = 0.0
    is_examined: bool = False
    pending: tuple[WarningType, str] | None = None
    warned: set[str] = field(default_factory=set)


def next_warning(step, statistics):
    """Count what a draw has shown; return a warning, at most one of each kind in a chain, or None.

    Evaluations made to find out what is wrong are added to the draw's `statistics`.
    """
    report, steps = step.report, step.steps_per_draw
    report.unmoved = 0 if statistics["accepted"] > 0 else report.unmoved + steps
    weight = 1.0 / min(1.0 + step.transition / steps, max(1.0, 500 / steps))
    report.acceptance += weight * (statistics["accept"] - report.acceptance)
    report.evaluations += statistics["n_evals"]
    report.nonfinite += statistics["n_nonfinite"]
    return (
        kept_estimate.overestimate(step.sampler, statistics)
        or _complaint_of_randomness(step.sampler, statistics)
        or _complaint(step)
    )


def end_with_draws(error: Exception, n_draws: int, names: str) -> None:
    """Log an error and end `pymc.sample` as an interrupt does, if it is what runs."""
    if can_interrupt_sampling():
        told = "The chain of %s ends here, after %d draws, which are kept."
        _log.error(told, names, n_draws, exc_info=error)
        interrupt_sampling()


def end_by(error: Exception, sampler, point: str, x: np.ndarray) -> None:
    """Say where a black box failed, and end a chain that has draws without losing them.

    `x` (d,) is what `point` says it is.
    """
    if not sampler.target.function.has_black_box:
        return
    error.add_note(
        f"The log density failed at {point} of the chain, {sampler.evaluator.failure(error, x)}. "
        "Where the model is impossible, let the function return -np.inf, or name the exception in "
        "black_box(failures=...)."
    )
    if sampler.draws.n_draws:
        end_with_draws(error, sampler.draws.n_draws, ", ".join(sampler.target.names))


def _complaint(step):
    """Return a warning that was not given before in this chain, or None."""
    report, names = step.report, ", ".join(step.target.names)
    has_stuck = not step.tune and report.unmoved >= STUCK_AFTER
    if has_stuck and not {"stuck", "overestimate"} & report.warned:
        report.warned.add("stuck")
        return (
            WarningType.CONVERGENCE,
            f"The chain of {names} is stuck: no move was accepted in the last "
            f"{report.unmoved} transitions. Tune longer (tune={2 * step.default_tune_steps}) or "
            "start elsewhere (initvals=dispersed_starts(model, chains)).",
        )
    if report.pending is not None:
        message, report.pending = report.pending, None
        return message
    if report.failed and not step.tune and "failed" not in report.warned:
        report.warned.add("failed")
        return (
            WarningType.BAD_PARAMS,
            f"{failures(step.sampler)} Those were points of start and tuning. After tuning such a "
            "proposal ends the chain.",
        )
    if not step.tune and "black box" not in report.warned:
        told = report.calls.complaint()
        if told is not None:
            report.warned.add("black box")
            return WarningType.BAD_PARAMS, told
    found, nonfinite = report.evaluations + report.known, report.nonfinite - report.failed
    if found >= 500 and nonfinite > MANY * found and "nonfinite" not in report.warned:
        report.warned.add("nonfinite")
        return WarningType.BAD_PARAMS, not_finite(names, nonfinite / found)
    message = _complaint_of_mixing(step)
    if message is not None:
        return message
    message = kept_estimate.unseeded(step.sampler)
    if message is None and not step.tune:
        message = step.screening.complaint(step.stage, report, names)
    return message


def not_finite(names: str, share: float) -> str:
    """Warn of log densities that were NaN or +inf, which count as impossible."""
    return (
        f"{share:.0%} of the log densities of {names} so far were NaN or +inf and were "
        "rejected. The draws keep to where the model is finite; check the model there."
    )


def failures(sampler) -> str | None:
    """Say at how many points the log density raised an exception that `failures=` does not name."""
    target, report = sampler.target, sampler.report
    if not report.failed:
        return None
    return (
        f"The log density of {', '.join(target.names)} failed at {report.failed} points "
        f"that were tried, which count as impossible. The first was {report.first_failure}. "
        "Where the model is impossible, let the function return -np.inf, or name the exception in "
        "black_box(failures=...)."
    )


def _complaint_of_randomness(sampler, statistics):
    """Return a warning if a black box is random, which is checked once: in the first draw."""
    report = sampler.report
    is_due = not sampler.tune and sampler.stored is None and "random" not in report.warned
    if not (is_due and may_be_random(sampler)):
        return None
    report.warned.add("random")
    statistics["n_evals"] += 1.0
    report.evaluations += 1.0
    told = randomness(sampler)
    if told is None:
        return None
    report.warned |= {"stuck", "mixing"}  # this is their cause
    report.pending = None
    return WarningType.BAD_PARAMS, told


def may_be_random(sampler) -> bool:
    """Whether there is a black box, which may draw random numbers without saying so."""
    return sampler.target.function.has_black_box and not sampler.target.has_estimates


def randomness(sampler) -> str | None:
    """Say so if the log density at the current point is another one when evaluated again."""
    kept = sampler.chain.value[:N_TERMS].sum()
    try:
        again = sampler.target(sampler.chain.position).sum()
    except Exception as error:  # of the user's function
        found = f"it raises {type(error).__name__}: {error}".splitlines()[0]
    else:
        if np.isclose(again, kept, rtol=1e-6, atol=1e-2):
            return None
        found = f"{again:.8g}"
    return (
        f"The log density is random: at one point of {', '.join(sampler.target.names)} it is "
        f"{kept:.8g}, and evaluated again {found}. Give what draws random numbers a fixed "
        "seed; or, if it estimates the likelihood, take KameleonStep(pseudo_marginal=True)."
    )


def _complaint_of_mixing(step):
    """Return a warning if the chain mixed badly, and no other one said why."""
    if {"stuck", "mixing"} & step.report.warned:
        return None
    n_made = step.transition // step.steps_per_draw
    learnt = None if step.target.is_circular.any() else step.learner.normal()
    message = step.draws.complaint(step, n_made, lambda: element_names(step.sampler), learnt)
    return None if message is None else (WarningType.CONVERGENCE, message)


def watched(sampler):
    """Numbers whose mixing is monitored: cosine and sine of an angle."""
    x, is_angle = sampler.chain.position, sampler.target.is_circular
    if not is_angle.any():
        return x
    return np.concatenate([np.where(is_angle, np.cos(x), x), np.sin(x[is_angle])])


def element_names(sampler):
    """Return what to call the numbers that `watched` returns."""
    names = [name + element for name, element in sampler.target.coordinates()]
    named = list(zip(names, sampler.target.is_circular, strict=True))
    shown = [f"cos({name})" if is_angle else name for name, is_angle in named]
    return shown + [f"sin({name})" for name, is_angle in named if is_angle]


def tuning_was_short(step) -> tuple[WarningType, str]:
    """Warn that tuning had too few transitions to learn the shape of the target."""
    return (
        WarningType.CONVERGENCE,
        f"Tuning of {', '.join(step.target.names)} was short: {step.transition} "
        f"transitions in {step.dim} dimensions. Take pm.sample("
        f"tune={step.default_tune_steps}) or more, or more "
        f"steps_per_draw (now {step.steps_per_draw}).",
    )


def complaint_of_acceptance(step):
    """Return a warning if the acceptance at the end of tuning is not what it should be."""
    acceptance, target = step.report.acceptance, step.target_accept
    if 0.1 * target <= acceptance <= 0.5 * (1 + target):
        return None
    noisy = f" If the estimates are noisy: {kept_estimate.ADVICE}."
    return (
        WarningType.BAD_ACCEPTANCE,
        f"The acceptance of {', '.join(step.target.names)} ended tuning at {acceptance:.3f}, "
        f"far from its target {target:.3f}. Tune longer "
        f"(tune={2 * step.default_tune_steps}), and compare several chains."
        f"{noisy if step.target.has_estimates else ''}",
    )
