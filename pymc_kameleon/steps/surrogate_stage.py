"""A chain's first stage: its arrays, its fits, its statistics, and what may not have one."""

import copy

import numpy as np
from pymc.stats.convergence import WarningType
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon.mcmc.layout import check_layout
from pymc_kameleon.mcmc.numba_bridge import N_TERMS
from pymc_kameleon.surrogate import FittedSurrogate, GPSurrogate
from pymc_kameleon.surrogate.delayed_acceptance import (
    N_OUTCOMES,
    PASSED,
    SCREENED,
    SPREAD,
    FirstStage,
    learn,
    no_prediction,
)
from pymc_kameleon.surrogate.routines import plain_routines
from pymc_kameleon.surrogate.selection import most_informative

__all__ = [
    "LARGE_JITTER",
    "STATISTICS",
    "check",
    "complaint",
    "configuration",
    "lengths",
    "new_stage",
    "refit",
    "statistics",
    "stored_points",
    "teach",
    "teach_found",
]

ENOUGH = 1000
"""Proposals after which the share that passes is judged."""

STATISTICS: dict = {
    "surrogate_accept": (np.float64, []),
    "surrogate_sd": (np.float64, []),
    "n_points": (np.float64, []),
    "calls_made": (np.float64, []),
    "calls_saved": (np.float64, []),
}

LARGE_JITTER = 1e-5
"""A process that needs more than this, relative to its squared amplitude, is ill-conditioned."""


def configuration(surrogate) -> GPSurrogate:
    """Return the configuration of a surrogate, fitted or not."""
    return surrogate.surrogate if isinstance(surrogate, FittedSurrogate) else surrogate


def check(surrogate, target, pseudo_marginal: bool, gradients: bool = False) -> None:
    """Raise an error if this target cannot have this first stage, saying what to do."""
    if not isinstance(surrogate, GPSurrogate | FittedSurrogate):
        raise TypeError(
            f"surrogate={surrogate!r}: pass GPSurrogate(...), or what its fit(X, values) returned."
        )
    if not target.has_likelihood:
        raise ValueError(
            "surrogate= needs a likelihood, the observed variables and potentials of the model, "
            "and this model has neither: leave surrogate out, or give a variable observed=..."
        )
    if pseudo_marginal or target.estimated_terms:
        raise ValueError(
            "surrogate= with pseudo_marginal=True or an estimated_loglikelihood: the Gaussian "
            "process takes the log-likelihood for exact, and an estimate is noisy. Leave surrogate "
            "out."
        )
    if target.others_in_likelihood:
        raise ValueError(
            f"surrogate=: the likelihood depends on {', '.join(target.others_in_likelihood)} too, "
            "which another step moves, so what was learnt would contradict itself. Give this step "
            f"those variables: vars=[{', '.join([*target.names, *target.others_in_likelihood])}]."
        )
    names = ", ".join(target.names)
    configuration(surrogate).check_dimension(target.dim, names, gradients)
    if gradients and configuration(surrogate).mean == "current":
        raise ValueError(
            'GPSurrogate(mean="current") is for steps without gradients: take "quadratic" or '
            '"constant".'
        )
    if isinstance(surrogate, FittedSurrogate):
        if gradients:
            raise TypeError(
                "surrogate: this step learns values and gradients together; pass GPSurrogate(...), "
                "which it fits itself."
            )
        found = surrogate.process.points.shape[1]
        if found != target.dim:
            raise ValueError(
                f"surrogate was fitted in {found} dimensions, and {names} have {target.dim}."
            )
        expected = _process_lengths(configuration(surrogate).new_process(target.dim))
        check_layout("surrogate.process", surrogate.process, expected)


def new_stage(surrogate, dim: int, gradients: bool = False) -> FirstStage:
    """Return a first stage, closed unless the surrogate is fitted already."""
    settings, is_fitted = configuration(surrogate), isinstance(surrogate, FittedSurrogate)
    if is_fitted:
        process = copy.deepcopy(surrogate.process)
    else:
        process = settings.new_process(dim, gradients)
    size = max(settings.capacity(dim, gradients), settings.initial_size(dim, gradients))
    derivatives = dim if gradients else 0
    return FirstStage(
        routines=None,
        log_prior=None,
        process=process,
        is_open=np.array([is_fitted]),
        learns=np.zeros(1, dtype=np.bool_),
        follows=np.array([settings.mean == "current"]),
        one_stage_share=np.array([settings.one_stage_share]),
        here=no_prediction(derivatives),
        there=no_prediction(derivatives),
        is_current=np.zeros(1, dtype=np.bool_),
        proposed_prior=np.zeros(N_TERMS + derivatives),
        points=np.zeros((size, dim)),
        values=np.zeros(size),
        gradients=np.zeros((size, derivatives)),
        count=np.full(2, process.count[0]),
        counts=np.zeros(2, dtype=np.int64),
        outcome=np.zeros(N_OUTCOMES),
    )


def lengths(stage) -> dict[str, int]:
    """Lengths of the arrays of a stage, by the names in their declarations."""
    return _process_lengths(stage.process) | {
        "lately": stage.values.size,
        "prior values": stage.proposed_prior.size,
    }


def _process_lengths(process):
    capacity, dim = process.points.shape
    derivatives = process.gradients.shape[1]
    return {
        "d": dim,
        "1 + d": 1 + dim,
        "stored": capacity,
        "derivatives": derivatives,
        "1 + derivatives": 1 + derivatives,
        "rows": capacity * (1 + derivatives),
    }


def teach(stage, chain, points, values, log_densities) -> None:
    """Teach what was found before the first transition, as transitions teach what they find.

    What is too low to matter is left out. The highest comes last: where there are more than a fit
    takes, it takes the last ones.

    Parameters
    ----------
    stage : FirstStage
    chain : Chain
        Proposal and its value are overwritten.
    points : sequence of array, shape (d,)
    values : sequence of array
        What a step keeps of each.
    log_densities : array, shape (n,)
        -inf where they are not finite.
    """
    stage.learns[0] = True
    stage = stage._replace(routines=plain_routines(stage))
    lowest = log_densities.max() - stage.process.censoring[1]
    for i in np.argsort(log_densities, kind="stable"):
        if log_densities[i] > lowest:
            chain.proposal[:], chain.proposed_value[:] = points[i], values[i]
            learn(stage, chain, False)


def stored_points(stage, prior) -> tuple[np.ndarray, np.ndarray]:
    """Return the points (n, d) that the process holds, and their log densities (n,).

    Parameters
    ----------
    stage : FirstStage
    prior : ModelFunction
        The log prior, as the stage evaluates it.
    """
    process = stage.process
    points, terms = process.points[: process.count[0]], np.empty(stage.proposed_prior.size)
    log_densities = process.values[: process.count[0]].copy()
    for i, point in enumerate(points):
        prior.into(point, terms)
        log_densities[i] += terms[0]
    log_densities[~np.isfinite(log_densities)] = -np.inf
    return points.copy(), log_densities


def teach_found(stage, surrogate, chain, prior, found) -> None:
    """Teach what others evaluated.

    Where there is no room for all of it, what the process holds is chosen anew, of its own points
    and of these, those that say most.

    Parameters
    ----------
    stage : FirstStage
    surrogate : GPSurrogate or FittedSurrogate
    chain : Chain
        Proposal and its value are overwritten.
    prior : ModelFunction
        The log prior, as the stage evaluates it.
    found : FromOthers
    """
    process, n = stage.process, len(found.points)
    size, count = process.values.size, process.count[0]
    if not stage.is_open[0] or count + n <= size:
        chosen = np.arange(n)
        if n > size:
            chosen = most_informative(found.points, found.log_densities, size)
        teach(stage, chain, *(part[chosen] for part in found))
        refit(stage, surrogate, chain)
        return
    own, log_densities = stored_points(stage, prior)
    chosen = most_informative(
        np.concatenate([own, found.points]),
        np.concatenate([log_densities, found.log_densities]),
        size,
    )
    first = N_TERMS + own.shape[1]
    parts = (
        (own, found.points),
        (process.values[:count], found.values[:, 1]),
        (process.gradients[:count], found.values[:, first:]),
    )
    stage.count[0] += n
    _fit(stage, surrogate, chain, *(np.concatenate(part)[chosen] for part in parts))


def refit(stage, surrogate, chain) -> None:
    """Fit the process anew if enough was learnt since the last time; open the stage at the first.

    Parameters
    ----------
    stage : FirstStage
    surrogate : GPSurrogate or FittedSurrogate
    chain : Chain
    """
    settings, (count, fitted) = configuration(surrogate), stage.count
    process = stage.process
    if stage.is_open[0]:
        if not settings.needs_refit(count, fitted):
            return
        source, size = process, process.count[0]
    else:
        has_gradients = stage.gradients.shape[1] > 0
        initial = settings.initial_size(chain.position.size, has_gradients)
        if count < max(initial, settings.refit * fitted):
            return
        source, size = stage, min(count, stage.values.size)
    stored = (a[:size] for a in (source.points, source.values, source.gradients))
    _fit(stage, surrogate, chain, *stored)


@one_thread()
def _fit(stage, surrogate, chain, points, values, gradients):
    stage.count[1] = stage.count[0]
    try:
        configuration(surrogate).fit_into(
            stage.process, points, values, gradients, current_value=chain.value[1]
        )
    except (ValueError, linalg.LinAlgError):
        # Too few finite points so far, or points that no jitter tells apart: ask again later.
        stage.is_open[0] = False
        return
    stage.is_open[0] = True
    stage.is_current[0] = False


def statistics(stage, report) -> dict[str, float]:
    """Return the statistics since the last call, and add them up in `report`."""
    screened = stage.outcome[SCREENED]
    passed, spread = (
        float(stage.outcome[i] / screened) if screened else np.nan for i in (PASSED, SPREAD)
    )
    report.screened += float(screened)
    report.passed += float(stage.outcome[PASSED])
    stage.outcome[:] = 0.0
    return {
        "surrogate_accept": passed,
        "surrogate_sd": spread,
        "n_points": float(stage.process.count[0]),
        "calls_made": float(report.calls_made),
        "calls_saved": float(report.calls_saved),
    }


def complaint(stage, report, names) -> tuple[WarningType, str] | None:
    """Say what is wrong with a surrogate after tuning, once a chain; None if nothing is."""
    if "surrogate" in report.told:
        return None
    message, share = None, report.passed / max(report.screened, 1.0)
    if not stage.is_open[0]:
        message = (
            f"The surrogate of {names} was never fitted: tuning gave it {stage.count[0]} "
            "evaluations. Tune longer, or lower n_initial."
        )
    elif stage.process.jitter[0] >= LARGE_JITTER:
        message = (
            f"The surrogate of {names} is ill-conditioned: it needed a jitter of "
            f"{stage.process.jitter[0]:.0e} of its variance. The chain is exact, and saves fewer "
            'calls. Try GPSurrogate(kernel="matern52"), or fewer points.'
        )
    elif report.screened >= ENOUGH and share > 0.95:
        message = (
            f"The surrogate of {names} lets {share:.0%} of all proposals through, so it saves "
            "nothing. Tune longer, raise max_points, or leave it out."
        )
    elif report.screened >= ENOUGH and share < 1e-3:
        message = (
            f"The surrogate of {names} lets {share:.1e} of all proposals through, so the chain "
            "hardly moves. Tune longer, or start elsewhere "
            "(initvals=dispersed_starts(model, chains))."
        )
    if message is None:
        return None
    report.told.add("surrogate")
    return WarningType.BAD_PARAMS, message
