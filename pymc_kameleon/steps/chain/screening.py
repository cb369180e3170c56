"""The surrogate that screens the proposals of a step: its fits, statistics and warnings."""

import copy
from dataclasses import replace

import numpy as np
from pymc.stats.convergence import WarningType
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, most_informative
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.saved_state import check_like
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.surrogate import FittedSurrogate, GPSurrogate
from pymc_kameleon.surrogate.delayed_acceptance import (
    N_OUTCOMES,
    PASSED,
    SCREENED,
    SPREAD,
    FirstStage,
    compiled_routines,
    learn,
    no_prediction,
    plain_routines,
)
from pymc_kameleon.surrogate.evaluations import oldest_first

ENOUGH = 1000
"""Proposals after which the share that passes is judged."""

LARGE_JITTER = 1e-5
"""A process that needs more than this, relative to its squared amplitude, is ill-conditioned."""

READ_GROWTH = 1.05
"""Factor by which the evaluations of a chain grow from one reading of a store to the next, while
its surrogate has room for what is read."""


def configuration(surrogate) -> GPSurrogate:
    """Return the configuration of a surrogate, fitted or not."""
    return surrogate.surrogate if isinstance(surrogate, FittedSurrogate) else surrogate


def screening(surrogate, target, pseudo_marginal: bool, gradients: bool):
    """Return what screens proposals, by a surrogate or None; raise an error if it cannot."""
    if surrogate is None:
        return NoScreening()
    _check(surrogate, target, pseudo_marginal, gradients)
    return Screening(surrogate, target, gradients, pseudo_marginal)


class NoScreening:
    """No surrogate: every proposal is evaluated."""

    store = None
    statistics_dtypes: dict = {}
    configuration: str | None = None

    def new_stage(self):
        """Return the first stage of a new chain, or None."""

    def stage_for_loop(self, stage, chain, is_compiled, learns):
        """Return the first stage as the compiled or the plain loop takes it; None without one."""

    def guess(self, stage, chain, value):
        """Write to `value` a guess of the log density at a proposal, which is to be evaluated.

        Most are rejected; with a first stage most of those that it lets through are accepted.
        """
        value[:] = 0.0
        value[0] = -np.inf

    def invalidate(self, stage):
        """Drop what was computed for the position, which was changed from outside."""

    def known(self, stage):
        """Points that the process of an open stage holds, and their log densities; else None."""

    def teach(self, stage, chain, points, values, log_densities):
        """Teach what was found before the first transition, as transitions teach what they find."""

    def refit(self, stage, chain):
        """Fit the process anew if enough was learnt since the last time."""

    def statistics(self, stage, report, n_transitions, n_evaluations):
        """Return the statistics since the last call, and add them up in `report`."""
        return {}

    def complaint(self, stage, report, names):
        """Say what is wrong with a surrogate after tuning, once a chain; None if nothing is."""


class Screening(NoScreening):
    """The surrogate of a step, which learns `gradients` too, or from estimates, or neither.

    Stages belong to its chains.
    """

    statistics_dtypes = dict.fromkeys(
        ("surrogate_accept", "surrogate_sd", "n_points", "calls_made", "calls_saved"),
        (np.float64, []),
    )

    def __init__(self, surrogate, target, gradients, is_noisy):
        self.settings, self.gradients, self.dim = configuration(surrogate), gradients, target.dim
        self.is_noisy = is_noisy
        self.prior = target.prior_with_gradient if gradients else target.prior
        self.fitted = surrogate if isinstance(surrogate, FittedSurrogate) else None
        self.store = self.settings.store
        self.configuration = repr(replace(self.settings, store=None))

    def new_stage(self):
        """Return a first stage, closed unless the surrogate is fitted already."""
        settings, dim, gradients = self.settings, self.dim, self.gradients
        if self.fitted is not None:
            process, known = copy.deepcopy(self.fitted.process), len(self.fitted.values)
        else:
            process, known = settings.new_process(dim, gradients, self.is_noisy), 0
        size, derivatives = settings.n_kept(dim, gradients), dim if gradients else 0
        stage = FirstStage(
            routines=None,
            log_prior=None,
            process=process,
            is_open=np.array([self.fitted is not None]),
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
            count=np.full(2, known),
            counts=np.zeros(2, dtype=np.int64),
            outcome=np.zeros(N_OUTCOMES),
        )
        if known:
            stage.points[:known], stage.values[:known] = self.fitted.points, self.fitted.values
        return stage

    def stage_for_loop(self, stage, chain, is_compiled, learns):  # noqa: D102
        stage.learns[0] = learns
        if is_compiled:
            return stage._replace(
                routines=compiled_routines(stage, chain), log_prior=self.prior.compiled()
            )
        return stage._replace(routines=plain_routines(stage), log_prior=self.prior.plain())

    def guess(self, stage, chain, value):  # noqa: D102
        value[:] = 0.0
        value[0] = stage.proposed_prior[0]
        value[1] = chain.value[1] + stage.there.moments[0] - stage.here.moments[0]

    def invalidate(self, stage):  # noqa: D102
        stage.is_current[0] = False

    def known(self, stage):  # noqa: D102
        if not stage.is_open[0]:
            return None
        (points, log_densities, _), terms = _lately(stage), np.empty(stage.proposed_prior.size)
        for i, point in enumerate(points):
            self.prior.into(point, terms)
            log_densities[i] += terms[0]
        log_densities[~np.isfinite(log_densities)] = -np.inf
        return points, log_densities

    def growth(self, stage) -> float:
        """Factor by which evaluations grow from one reading of a store to the next."""
        process = stage.process
        return self.settings.refit if process.count[0] == process.values.size else READ_GROWTH

    def teach(self, stage, chain, points, values, log_densities):
        """Teach what was found before the first transition, as transitions teach what they find.

        For each of the `points` (n, d), `values` has what a step keeps of it; `log_densities` (n,)
        are -inf where they are not finite. What is too low to matter is left out. The highest comes
        last: where there are more than a fit takes, it takes the last ones. The proposal of `chain`
        and its value are overwritten.
        """
        stage.learns[0] = True
        stage = stage._replace(routines=plain_routines(stage))
        lowest = log_densities.max() - stage.process.censoring[1]
        for i in np.argsort(log_densities, kind="stable"):
            if log_densities[i] > lowest:
                chain.proposal[:], chain.proposed_value[:] = points[i], values[i]
                learn(stage, chain, False)

    def teach_found(self, stage, chain, found):
        """Teach what others evaluated (`FromOthers`); `chain`'s proposal is overwritten.

        Where there is no room for all of it, the most informative points are added.
        """
        n, size = len(found.points), stage.values.size
        chosen = np.arange(n)
        if n > size:
            chosen = most_informative(found.points, found.log_densities, size)
        self.teach(stage, chain, *(part[chosen] for part in found))
        is_full = stage.process.count[0] == stage.process.values.size
        self.refit(stage, chain, at_once=is_full)

    def refit(self, stage, chain, at_once=False):
        """Fit the process anew if enough was learnt since the last time; open it at the first.

        With `at_once` one that is open is fitted in any case.
        """
        settings, (count, fitted) = self.settings, stage.count
        if stage.is_open[0]:
            if not (at_once or settings.needs_refit(count, fitted)):
                return
        else:
            initial = settings.initial_size(self.dim, self.gradients)
            if count < max(initial, settings.refit * fitted):
                return
        self._fit(stage, chain)

    @one_thread()
    def _fit(self, stage, chain):
        stage.count[1] = stage.count[0]
        try:
            self.settings.fit_into(stage.process, *_lately(stage), current_value=chain.value[1])
        except (TooFewValues, linalg.LinAlgError):
            # Too few finite points so far, or points that no jitter tells apart: ask again later.
            stage.is_open[0] = False
            return
        stage.is_open[0] = True
        stage.is_current[0] = False

    def statistics(self, stage, report, n_transitions, n_evaluations):  # noqa: D102
        screened = stage.outcome[SCREENED]
        passed, spread = (
            float(stage.outcome[i] / screened) if screened else np.nan for i in (PASSED, SPREAD)
        )
        report.calls_made += n_evaluations
        report.calls_saved += n_transitions - n_evaluations
        report.screened += float(screened)
        report.passed += float(stage.outcome[PASSED])
        stage.outcome[:] = 0.0
        return {
            "surrogate_accept": passed,
            "surrogate_sd": spread,
            "n_points": float(min(stage.count[0], stage.values.size)) if stage.is_open[0] else 0.0,
            "calls_made": float(report.calls_made),
            "calls_saved": float(report.calls_saved),
        }

    def complaint(self, stage, report, names):  # noqa: D102
        if "surrogate" in report.warned:
            return None
        message, share = None, report.passed / max(report.screened, 1.0)
        found = kept_estimate.too_noisy(names, stage.process.noise[0])
        if found is not None:
            report.warned.add("surrogate")
            return found
        if not stage.is_open[0]:
            message = (
                f"The surrogate of {names} was never fitted: tuning gave it {stage.count[0]} "
                "evaluations. Tune longer, or lower n_initial."
            )
        elif stage.process.jitter[0] >= LARGE_JITTER:
            message = (
                f"The surrogate of {names} is ill-conditioned: it needed a jitter of "
                f"{stage.process.jitter[0]:.0e} of its variance. The chain is exact, and saves "
                'fewer calls. Try GPSurrogate(kernel="matern"), or fewer points.'
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
        report.warned.add("surrogate")
        return WarningType.BAD_PARAMS, message


def _lately(stage):
    """Points, values and gradients evaluated lately, the oldest first."""
    return oldest_first(int(stage.count[0]), stage.points, stage.values, stage.gradients)


def _check(surrogate, target, pseudo_marginal, gradients):
    if not isinstance(surrogate, GPSurrogate | FittedSurrogate):
        raise TypeError(
            f"surrogate={surrogate!r}: pass GPSurrogate(...), or what its fit(X, values) returned."
        )
    if not target.has_likelihood:
        raise ValueError(
            "surrogate= needs a likelihood, the observed variables and potentials of the model, "
            "and this model has neither: leave surrogate out, or give a variable observed=..."
        )
    settings = configuration(surrogate)
    if target.estimated_terms and not pseudo_marginal:
        raise ValueError(
            f"surrogate=: the likelihood term {', '.join(target.estimated_terms)} is an estimate. "
            "Write pseudo_marginal=True too: the Gaussian process then learns with its noise."
        )
    if pseudo_marginal and (isinstance(surrogate, FittedSurrogate) or settings.mean == "current"):
        raise ValueError(
            "surrogate= with pseudo_marginal=True: take GPSurrogate() that is not fitted yet, with "
            'mean="quadratic" or "constant".'
        )
    if pseudo_marginal and settings.store is not None:
        raise ValueError(
            "GPSurrogate(store=...) with pseudo_marginal=True: a store keeps one value of a point, "
            "and an estimate is another one each time. Leave store out."
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
        found = surrogate.points.shape[1]
        if found != target.dim:
            raise ValueError(
                f"surrogate was fitted in {found} dimensions, and {names} have {target.dim}."
            )
        fresh = configuration(surrogate).new_process(target.dim)
        check_like("surrogate.process", surrogate.process, fresh, varying={})
