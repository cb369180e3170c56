"""What every step shares: chains, kept log density, first stage, statistics, warnings."""

import copy
import logging
import math
from dataclasses import field, replace
from typing import Any

import numpy as np
from pymc.blocking import RaveledVars
from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_kameleon._threads import one_thread
from pymc_kameleon.adaptation.learner import Adaptation, LearnerState, WarmStart
from pymc_kameleon.adaptation.scaling import target_acceptance
from pymc_kameleon.mcmc.chain import ACCEPTANCE, ACCEPTED, Chain, new_chain, turned
from pymc_kameleon.mcmc.numba_bridge import EVALUATIONS, N_TERMS, NONFINITE, evaluate
from pymc_kameleon.mcmc.proposals import N_UNIFORMS
from pymc_kameleon.mcmc.run import run_plain, runner
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.model.warm_start import warm_points, warm_scaling
from pymc_kameleon.steps import kept_estimate, surrogate_stage
from pymc_kameleon.steps.life_cycle import STUCK_AFTER, Step, all_or_nothing
from pymc_kameleon.steps.mixing import KeptDraws
from pymc_kameleon.steps.report import Report
from pymc_kameleon.steps.start import (
    FIRST_SHARE,
    TAUGHT,
    checked_start,
    point_near_mode,
    search_from,
)
from pymc_kameleon.store import EvaluationStore
from pymc_kameleon.store.stored_density import StoredDensity
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.surrogate.delayed_acceptance import FirstStage
from pymc_kameleon.surrogate.depth import typical_depth
from pymc_kameleon.surrogate.near_mode import around_the_mode
from pymc_kameleon.surrogate.routines import compiled_routines, plain_routines
from pymc_kameleon.validation import checked_integer, checked_share

__all__ = ["MetropolisHastingsState", "MetropolisHastingsStep", "chosen_steps_per_draw"]

_log = logging.getLogger("pymc.kameleon")

N_READ = 6000
"""Evaluations of other chains and runs that are read at a time, at most: the last ones."""

READ_GROWTH = 1.05
"""Factor by which the evaluations of a chain grow from one reading to the next, while its surrogate
has room for what is read."""

NEARER = 0.25
"""What the share of the way to a draw from the prior is multiplied by where that is too far."""

CENTRED_IN = 100
"""Transitions of which the running mean of an angle is, about."""

LOOKS, IMPOSSIBLE_LOOKS, TRIES = 15, 64, 8
"""Points that are tried, each nearer; those from where there is no density, and how many of these
are as near."""


def chosen_steps_per_draw(dim: int, is_compiled: bool) -> int:
    """Transitions a draw that a step makes unless told otherwise.

    A well-tuned random walk on a Gaussian gains about 0.25 / d effective draws a transition, so 2d
    transitions leave one of two draws effective, and d one of four; posteriors of practice need
    the margin. It depends on what is fixed by the model, never on a clock, so that one seed is one
    chain.

    Parameters
    ----------
    dim : int
        d.
    is_compiled : bool
        Whether a transition costs microseconds, as a stored draw does.
    """
    return min(max(20, 2 * dim), 100) if is_compiled else min(max(5, dim), 50)


@dataclass_state
class MetropolisHastingsState(StepMethodState):
    """All that the next transition of a chain needs."""

    tune: bool
    expected_tune: int | None
    transition: int
    chain: Chain | None
    learner: LearnerState | None
    stage: FirstStage | None
    returned: np.ndarray | None
    report: Report
    configuration: str = field(metadata={"frozen": True})


class MetropolisHastingsStep(Step):
    """Base of the steps: chains, kept log density, first stage, statistics, warnings.

    A subclass is its arguments, from which it makes an `Adaptation`; one that needs a gradient,
    which no estimate has, gives None for `pseudo_marginal`.
    """

    stats_dtypes_shapes: dict = {
        "accept": (np.float64, []),
        "accepted": (np.float64, []),
        "scaling": (np.float64, []),
        "n_evals": (np.float64, []),
        "n_nonfinite": (np.float64, []),
        "n_transitions": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    name = "metropolis_hastings"
    _state_class = MetropolisHastingsState
    default_tune_steps = 2000

    takes_gradients = False
    """Whether gradients of prior and likelihood follow the terms of the log density."""

    def __init__(
        self,
        vars=None,
        *,
        adaptation: Adaptation,
        steps_per_draw: int | None = None,
        disperse: bool = True,
        start: str = "here",
        target_accept: float | None = None,
        adapt_after_tune: bool = False,
        pseudo_marginal: bool | None = False,
        surrogate: GPSurrogate | None = None,
        store: EvaluationStore | None = None,
        warm_start=None,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        model = modelcontext(model)
        if steps_per_draw is not None:
            steps_per_draw = checked_integer("steps_per_draw", steps_per_draw, 1)
        if target_accept is not None:
            checked_share("target_accept", target_accept, open_interval=True)
        self.pseudo_marginal = bool(pseudo_marginal)
        self.adapt_after_tune = bool(adapt_after_tune)
        self.disperse = bool(disperse)
        self.adaptation = adaptation
        self.target = LogDensity(
            model,
            vars,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            separate_estimates=self.pseudo_marginal,
        )
        self.dim = self.target.dim
        adaptation.check(self.target.names, self.dim)
        kernel = adaptation.transition_kernel
        has_compiled_kernel = kernel is None or kernel.is_compiled
        self._could_compile = has_compiled_kernel and not self.target.n_seeds
        takes_estimates = pseudo_marginal is not None
        is_estimated = self.pseudo_marginal or bool(self.target.estimated_terms)
        self.start = checked_start(start, takes_estimates and is_estimated)
        if takes_estimates and not pseudo_marginal:
            kept_estimate.warn_without(type(self).__name__, self.target)
        self.surrogate = surrogate
        if surrogate is not None:
            surrogate_stage.check(
                surrogate, self.target, self.pseudo_marginal, self.takes_gradients
            )
            store = surrogate_stage.configuration(surrogate).store
        self.stored = None
        if store is not None:
            self.stored = StoredDensity(self.target, store, self.takes_gradients)
            self._prior()  # compiled once, before PyMC forks a process for each chain
        self.target_accept = (
            target_acceptance(self.dim) if target_accept is None else float(target_accept)
        )
        if steps_per_draw is None:
            steps_per_draw = chosen_steps_per_draw(self.dim, self.runs_compiled)
            name = type(self).__name__
            _log.info("%s: %d transitions a draw, %s", name, steps_per_draw, self._how)
        self.steps_per_draw = steps_per_draw
        patience = 2 if self.runs_compiled else 1
        self.default_tune_steps = math.ceil(patience * self._transitions_to_tune() / steps_per_draw)
        options = adaptation.options | {
            "steps_per_draw": self.steps_per_draw,
            "target_accept": self.target_accept,
            "adapt_after_tune": self.adapt_after_tune,
            "pseudo_marginal": self.pseudo_marginal,
            "shapes": self.target.shapes,
            "surrogate": None
            if surrogate is None
            else repr(replace(surrogate_stage.configuration(surrogate), store=None)),
        }
        self.configuration = ", ".join(f"{k}={v!r}" for k, v in sorted(options.items()))
        super().__init__(
            self.target.vars, self.target.shapes, self.target.shared, blocked=blocked, rng=rng
        )
        added = {} if surrogate is None else surrogate_stage.STATISTICS
        if self.pseudo_marginal:
            added = added | kept_estimate.STATISTICS
        if added:
            self.stats_dtypes_shapes = self.stats_dtypes_shapes | added
            self.stats_dtypes = [{k: dtype for k, (dtype, _) in self.stats_dtypes_shapes.items()}]
        self.warm = None
        if warm_start is not None:
            own = set(self.stats_dtypes_shapes) - {"warning"}
            others = {"bandwidth", "rank", "component", "step_size"} - own
            self.warm = WarmStart(
                warm_points(warm_start, model, self.target, adaptation.history_capacity),
                warm_scaling(warm_start, own, others),
            )
        if self.runs_compiled:  # once, before PyMC forks a process for each chain
            self._density().compiled()
        self._begin_chain(None)

    def __repr__(self):
        name, variables = type(self).__name__, ", ".join(self.target.names)
        return f"{name}(vars=[{variables}], steps_per_draw={self.steps_per_draw}), {self._how}"

    @property
    def runs_compiled(self) -> bool:
        """Whether transitions run compiled, log density included."""
        return self._could_compile and self._density().is_compilable

    @property
    def _how(self):
        return "compiled" if self.runs_compiled else "in Python"

    def _transitions_to_tune(self) -> int:
        """Transitions that a first run needs to learn the shape of a target of this dimension."""
        return 1000 + 500 * self.dim

    def _n_learnt_from(self) -> int:
        """Transitions of tuning so far, and what else taught as much."""
        return self.transition

    def _begin_chain(self, expected_tune):
        self.tune = True
        self.expected_tune = expected_tune
        self.transition = 0
        self.chain = self.learner = self.stage = self.returned = None
        self.draws, self.looked, self.scales = KeptDraws(), [], self.target.scales
        self.report = Report()

    def _lengths(self):
        lengths = {"d": self.dim, "values": self._n_values()}
        if self.learner is not None:
            lengths |= self.learner.lengths()
        if self.stage is not None:
            lengths |= surrogate_stage.lengths(self._new_stage())
        return lengths

    def stop_tuning(self):
        """Freeze the adaptation (or let it go on with vanishing steps, `adapt_after_tune=True`)."""
        if self.chain is not None and self.tune:
            self._learn_from_others()
            self._end_learning(self.chain.position)
            self._check_tuning()
        super().stop_tuning()

    def _end_learning(self, position):
        with one_thread(), all_or_nothing(self.learner):
            self.learner.end_tuning(position, self.rng)

    @property
    def adapts(self) -> bool:
        """Whether the next transition adapts."""
        return self.tune or self.adapt_after_tune

    # a draw ---------------------------------------------------------------------------------------

    def astep(self, q0: RaveledVars) -> tuple[RaveledVars, list[dict[str, Any]]]:
        """Make `steps_per_draw` transitions from `q0`."""
        self._arrive(q0.data)
        # Until the draw is complete: if it is interrupted, position and value may not go together.
        self.returned = None
        chain = self.chain
        chain.outcome[:] = 0.0
        if self.tune and self.target.has_estimates:
            kept_estimate.advance_patiently(self, self.steps_per_draw)
        else:
            self._advance(self.steps_per_draw)
            self.transition += self.steps_per_draw
        self.returned = self._as_recorded(chain.position, q0.data.dtype)
        evaluations, nonfinite = (int(chain.counts[i]) for i in (EVALUATIONS, NONFINITE))
        chain.counts[:] = 0
        if self.stored is not None:
            known = self.stored.taken_n_known()
            evaluations -= known
            self.report.known += known
        self.target.n_evaluations += evaluations
        statistics = {
            "accept": chain.outcome[ACCEPTANCE] / self.steps_per_draw,
            "accepted": chain.outcome[ACCEPTED] / self.steps_per_draw,
            "n_evals": float(evaluations),
            "n_nonfinite": float(nonfinite),
            "n_transitions": float(self.steps_per_draw),
            **self._learnt_statistics(evaluations),
        }
        if self.stage is not None:
            self.report.calls_made += evaluations
            self.report.calls_saved += self.steps_per_draw - evaluations
            statistics |= surrogate_stage.statistics(self.stage, self.report)
        if self.pseudo_marginal:
            statistics["estimate"] = chain.value[2]
        if not self.tune:
            self.draws.record(self._watched())
        self._report(statistics)
        self.target.restore_estimates(self._kept_seeds())
        return RaveledVars(self.returned.copy(), q0.point_map_info), [statistics]

    def _arrive(self, x):
        """Make `x` the current position, evaluating the log density only where it is not known."""
        if x.shape != (self.dim,):
            raise ValueError(
                f"{type(self).__name__} takes points of {self.dim} numbers, the raveled "
                f"{', '.join(self.target.names)}, and this one has shape {x.shape}."
            )
        inputs_changed = self.target.inputs_changed()
        if self.stored is not None and self.target.has_new_data:
            self.stored.identify()
        self.target.check_data(x)
        if self.chain is None:
            try:
                self._begin_at(x)
            except BaseException:
                self.chain = self.learner = None
                raise
            return
        if self.returned is None or not (x == self.returned).all():
            self.chain.position[:] = x
            self.learner.invalidate()
            if self.stage is not None:
                self.stage.is_current[0] = False
            self._evaluate_current()
        elif inputs_changed and self.target.keeps_estimates:
            self.chain.counts[EVALUATIONS] += 1
            self.chain.value[:2] = self.target.rest(self.chain.position)
            self._mark_impossible()
        elif inputs_changed:
            self._evaluate_current()

    @one_thread()
    def _begin_at(self, x):
        self.chain = new_chain(np.array(x, dtype=np.float64), self._n_values())
        position = self.chain.position  # which the search for a start moves
        if self.surrogate is not None:
            self.stage = self._new_stage()
        if self.stored is not None:
            self.stored.begin_chain()
        self.report.foreign_seed = kept_estimate.foreign_seed(self.target)
        self._find_start(x)
        self.learner = self._new_learner(position, self.warm)
        if self.warm is None:
            self.learner.begin_with_scales(self.scales)
        if self.stage is not None:
            self._learn_from_others()
        if self.tune and self.warm is None:
            self._begin_tuning(x)
        self.looked = []
        if not self.tune:
            self._end_learning(position)
            if self.warm is None:
                self._check_tuning()

    def _find_start(self, x):
        """Begin at `x` (d,), or where chains that are about to tune begin apart.

        Chains that all begin at one point tell R-hat nothing. So one that is to begin at the
        model's default begins at a random point between it and a draw from the prior. The nearer
        that has to be for a density that tuning can climb from, the shorter are its first moves.
        Where a store has points that are typical of the posterior, it begins at one of these: what
        was learnt around them says little of a walk from elsewhere.
        """
        self.scales = self.target.scales * FIRST_SHARE
        is_free = self.disperse and self.tune and np.array_equal(x, self.target.default_start)
        if is_free and self.stage is not None and self.stored is not None:
            found = self.stored.from_others(N_READ)
            self.stored.put_back(found)
            typical = found.points[self._are_typical(found.log_densities)]
            if len(typical) >= self._enough_typical:
                if self._begins_at(self.rng.choice(typical)):
                    return
        is_searched = self.tune and self.warm is None and self.start == "optimize"
        if is_free and is_searched and self._looks_at(x, FIRST_SHARE) > -np.inf:
            self._move_to_proposal()
            return
        is_possible = self._begins_at(x)
        if is_free or is_searched:
            self._look_around(x, is_free)
            is_possible = self.chain.value[0] > -np.inf
        tries = kept_estimate.FIRST_ESTIMATES if self.target.has_estimates else 0
        while not is_possible and tries:
            is_possible, tries = self._begins_at(x), tries - 1
        if not is_possible:
            tried = f" in {kept_estimate.FIRST_ESTIMATES} estimates, {kept_estimate.ADVICE}"
            raise SamplingError(
                f"Initial evaluation of {', '.join(self.target.names)} failed: the log density "
                f"at the start {np.array2string(x, threshold=20)} (raveled, unconstrained) is not "
                f"finite{tried if self.target.has_estimates else ''}. Give a start with a positive "
                "probability: pm.sample(initvals=dispersed_starts(model, chains)), or see "
                "model.debug()."
            )

    def _begins_at(self, x):
        """Move the chain to `x` (d,); return whether there is a density."""
        self.chain.position[:] = x
        self._evaluate_current()
        self.looked.append((self.chain.position.copy(), self.chain.value.copy()))
        return self.chain.value[0] > -np.inf

    def _look_around(self, x, is_free):
        """Find how far from `x` (d,), where the chain is, the density is high enough to climb from.

        Move there if the chain `is_free` to, or where it is impossible.
        """
        here = self.chain.value[:N_TERMS].sum()
        is_possible = here > -np.inf
        lowest = here - typical_depth(self.dim) if is_possible else -np.inf
        for i in range(LOOKS if is_possible else IMPOSSIBLE_LOOKS):
            share = FIRST_SHARE * NEARER ** (i if is_possible else i // TRIES)
            if self._looks_at(x, share) > lowest:
                self.scales = share * self.target.scales
                if is_free or not is_possible:
                    self._move_to_proposal()
                return

    def _looks_at(self, x, share):
        """Log density at a `share` of the way from `x` (d,) to a draw from the prior."""
        drawn = self.target.prior_points
        point = x + share * (drawn[self.rng.integers(len(drawn))] - x)
        value = MetropolisHastingsStep._evaluate_at(self, point)
        self.looked.append((point, self.chain.proposed_value.copy()))
        return value

    def _move_to_proposal(self):
        chain = self.chain
        chain.position[:], chain.value[:] = chain.proposal, chain.proposed_value

    def _begin_tuning(self, x):
        """Prepare for tuning a chain that was told to start at `x` (d,)."""
        if self.start == "optimize":
            self._search()
            return
        known = self._known_near_mode()
        if known is not None:
            here = self.chain.value[:N_TERMS].sum()
            if self._are_typical(np.append(known[1], here))[-1]:
                self.learner.begin_with(around_the_mode(*known), self.rng)

    def _search(self):
        """Move the chain to a random point around a mode; teach what was found on the way."""
        chain, points, values, log_densities = self.chain, [], [], []

        def evaluate_and_keep(x):
            log_densities.append(self._evaluate_at(x))
            points.append(x.copy())
            values.append(chain.proposed_value.copy())
            return log_densities[-1]

        known, gradients = self._known_near_mode(), None
        if known is None:
            search_from(chain.position, self.scales, evaluate_and_keep, self._gradient_of_proposal)
            known = np.array(points), np.array(log_densities)
            if self.takes_gradients:
                gradients = self._gradients_in(np.array(values))
        gaussian = around_the_mode(*known, gradients)
        point_near_mode(gaussian, *known, evaluate_and_keep, self.rng)
        self._move_to_proposal()
        self.learner.begin_with(gaussian, self.rng)
        if self.stage is not None:
            surrogate_stage.teach(self.stage, chain, points, values, np.array(log_densities))
            self._teach()

    def _known_near_mode(self):
        """Points from a store that make a search needless, and their log densities; else None."""
        if self.stage is None or self.stored is None or not self.stage.is_open[0]:
            return None
        points, values = surrogate_stage.stored_points(self.stage, self._prior())
        return (points, values) if self._are_enough(values) else None

    def _are_typical(self, values):
        """Whether log densities (n,) may be those of points that are typical of the posterior."""
        return values > self._least_typical(values)

    def _least_typical(self, values):
        """Log density above which points may be typical, where those of `values` (n,) are known."""
        return np.max(values, initial=-np.inf) - typical_depth(self.dim)

    def _are_enough(self, values):
        """Whether so many of these log densities (n,) are typical that a search is needless."""
        return np.sum(self._are_typical(values)) >= self._enough_typical

    @property
    def _enough_typical(self):
        return TAUGHT * (self.dim + 2)

    def _evaluate_at(self, x):
        """Log density at `x` (d,), -inf if it is not finite; its terms are kept as a proposal's."""
        chain = self.chain
        chain.proposal[:] = x
        return evaluate((self._density_or_none,), x, chain.proposed_value, chain.counts)

    def _density_or_none(self, x, value):
        """As `_plain_density`, for start and tuning: an error counts as no density."""
        try:
            self._plain_density(x, value)
        except Exception as error:
            value[:] = np.nan
            self.report.failed += 1
            self.report.first_failure = self.report.first_failure or self._failure(error)

    def _failure(self, error):
        """Say at which natural values of the variables the last evaluation failed, and how."""
        values = self.target.natural(self.chain.proposal[None])
        shown = [
            f"{name} = {np.array2string(v[0], threshold=10)}" for name, (_, v) in values.items()
        ]
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{', '.join(shown)}: {first_line}"

    @property
    def _gradient_of_proposal(self):
        """What returns the gradient (d,) at `chain.proposal`; None for a step without gradients."""
        value = self.chain.proposed_value
        return (lambda: self._gradients_in(value)) if self.takes_gradients else None

    def _gradients_in(self, values):
        """Gradients (..., d) of the log density among the values (..., 3 + 2 d) of `_density`."""
        parts = values[..., N_TERMS:]
        return parts[..., : self.dim] + parts[..., self.dim :]

    def _learn_from_others(self):
        """Teach the first stage what other chains and runs have stored since the last time.

        Not yet where the chain is still so far below what they found that its own surroundings
        would be censored: a surrogate of somewhere else would keep it there.
        """
        if self.stored is None:
            return
        process = self.stage.process
        is_full = process.count[0] == process.values.size
        growth = surrogate_stage.configuration(self.surrogate).refit if is_full else READ_GROWTH
        found = self.stored.from_others(N_READ, growth)
        lowest = np.max(found.log_densities, initial=-np.inf) - process.censoring[1]
        if self.chain.value[:N_TERMS].sum() < lowest:
            self.stored.put_back(found)
        elif len(found.points):
            prior = self._prior()
            surrogate_stage.teach_found(self.stage, self.surrogate, self.chain, prior, found)

    def _new_learner(self, position, warm):
        return self.adaptation.start(position, self.rng, warm, self.target_accept)

    def _set_state(self, state):
        # PyMC sets the state of what has one, so there has to be a learner: a new one, so that the
        # present one is left as it is if the state is refused.
        if state.learner is not None:
            self.learner = self._new_learner(np.zeros(self.dim), None)
            expected = type(self.learner)._state_class
            if type(state.learner) is not expected:
                raise TypeError(
                    f"sampling_state.learner is a {type(state.learner).__name__}: "
                    f"{type(self).__name__} takes a {expected.__name__}."
                )
        super()._set_state(state)

    def _density(self):
        """Return the function of the target that transitions evaluate."""
        if self.stored is not None:
            return self.stored
        return self.target.with_gradients if self.takes_gradients else self.target.function

    def _prior(self):
        """Return the part of it that the first stage evaluates."""
        return self.target.prior_with_gradient if self.takes_gradients else self.target.prior

    def _n_values(self):
        """Count the numbers that `_density` returns, and the seeds of the estimates among them."""
        return N_TERMS + 2 * self.dim * self.takes_gradients + self.target.n_seeds

    def _evaluate_current(self):
        chain = self.chain
        chain.counts[EVALUATIONS] += 1
        self._plain_density(chain.position, chain.value)
        self._mark_impossible()

    def _plain_density(self, x, value):
        """Write what `_density` returns at `x`, then the seeds of its new estimates, to `value`."""
        end = value.size - self.target.n_seeds
        value[end:] = self.target.redraw_estimates(self.rng)
        self._density().into(x, value[:end])

    def _kept_seeds(self):
        return self.chain.value[self.chain.value.size - self.target.n_seeds :]

    def _mark_impossible(self):
        """Let a chain that was put where there is no density leave by any move."""
        if not math.isfinite(self.chain.value[:N_TERMS].sum()):
            self.chain.value[:N_TERMS] = 0.0
            self.chain.value[0] = -np.inf

    def _advance(self, n):
        """Make `n` transitions, and the updates of the proposal that come between them."""
        if not self.adapts:
            self._run(n)
            return
        learner, done = self.learner, 0
        while done < n:
            transition = self.transition + done
            count = learner.transitions_before_update(transition, n - done, self.rng)
            if count:
                self._learn_from(count)
                done += count
            if done < n:
                with one_thread(), all_or_nothing(learner):
                    learner.update(self.chain.position, self.tune, self.rng)
                self._explore()
                self._learn_from(1)
                done += 1

    def _explore(self):
        """Evaluate points that the learner wants to know."""

    def _learn_from(self, n):
        """Make `n` transitions, no more at a time than the learner has room for."""
        learner = self.learner
        while n > 0:
            count = min(n, learner.room())
            self._run(count)
            learner.absorb()
            n -= count

    def _run(self, n):
        """Make `n` transitions, compiled if log density and proposal are."""
        self._keep_to_one_period()
        table = self._density().compiled() if self.runs_compiled else None
        is_compiled, learner = table is not None, self.learner
        stage, proposal = self.stage, learner.proposal(is_compiled)
        if stage is not None:
            stage = self._stage(is_compiled)
        else:
            stage = learner.evaluation_record(self.adapts)
        run = self._loop(proposal, is_compiled)
        density = self._density_or_none if self.tune else self._plain_density
        try:
            run(
                table if is_compiled else (density,),
                stage,
                self.chain,
                learner.mixture(self.tune),
                proposal,
                learner.observer(),
                self.adapts,
                self.rng.standard_normal((n, self.dim + learner.n_more_normals)),
                self.rng.random((n, N_UNIFORMS + learner.n_more_uniforms)),
            )
        except Exception as error:
            if is_compiled:
                self.target(self.chain.proposal)  # PyTensor's own error names the operation
            if self.target.function.has_black_box:
                error.add_note(
                    f"The log density failed at a proposal of the chain, {self._failure(error)}. "
                    "Where the model is impossible, let the function return -np.inf."
                )
            raise
        if self.stage is not None:
            self._teach()

    def _keep_to_one_period(self):
        """Move angles by whole turns into their bounds, which while tuning follow the chain.

        They are a turn apart, around a running circular mean, so that they come to be where the
        density is lowest. What is within is one period of the target, and proposals end there.
        """
        chain, is_angle = self.chain, self.target.is_circular
        if not is_angle.any():
            return
        x, low = chain.position[is_angle], chain.bounds[0, is_angle]
        is_first = not np.isfinite(low).all()
        if self.tune or is_first:
            centre = x if is_first else low + math.pi
            centre = centre + turned(x - centre, -math.pi) / min(self.transition + 1, CENTRED_IN)
            chain.bounds[:, is_angle] = centre - math.pi, centre + math.pi
        within = turned(x, chain.bounds[0, is_angle])
        if (within != x).any():
            chain.position[is_angle] = within
            self.learner.invalidate()
            if self.stage is not None:
                self.stage.is_current[0] = False

    def _learnt_statistics(self, n_evals):
        return self.learner.statistics()

    def _loop(self, proposal, is_compiled):
        """Return the function that makes transitions."""
        return runner(type(proposal)) if is_compiled else run_plain

    def _new_stage(self):
        return surrogate_stage.new_stage(self.surrogate, self.dim, self.takes_gradients)

    def _stage(self, is_compiled):
        """Return the first stage as transitions take it, with what it calls in the same form."""
        self.stage.learns[0], prior = self.adapts, self._prior()
        if is_compiled:
            routines = compiled_routines(self.stage, self.chain)
            return self.stage._replace(routines=routines, log_prior=prior.compiled())
        return self.stage._replace(routines=plain_routines(self.stage), log_prior=prior.plain())

    def _teach(self):
        if self.tune and self.stored is not None and self.stored.is_reading_due:
            self._learn_from_others()
        if self.adapts:
            surrogate_stage.refit(self.stage, self.surrogate, self.chain)

    # warnings -------------------------------------------------------------------------------------

    def _report(self, statistics):
        """Add a warning to `statistics`, at most one of each kind in a chain."""
        report, steps = self.report, self.steps_per_draw
        report.unmoved = 0 if statistics["accepted"] > 0 else report.unmoved + steps
        weight = 1.0 / min(1.0 + self.transition / steps, max(1.0, 500 / steps))
        report.acceptance += weight * (statistics["accept"] - report.acceptance)
        report.evaluations += statistics["n_evals"]
        report.nonfinite += statistics["n_nonfinite"]
        message = kept_estimate.overestimate(self, statistics)
        if message is None:
            message = self._complaint()
        if message is not None:
            statistics["warning"] = SamplerWarning(*message, "warn")

    def _complaint(self):
        """Return a warning that was not given before in this chain, or None."""
        report, names = self.report, ", ".join(self.target.names)
        has_stuck = not self.tune and report.unmoved >= STUCK_AFTER
        if has_stuck and not {"stuck", "overestimate"} & report.told:
            report.told.add("stuck")
            reason = self._randomness() or (
                f"Tune longer (tune={2 * self.default_tune_steps}) or start elsewhere "
                "(initvals=dispersed_starts(model, chains))."
            )
            return (
                WarningType.CONVERGENCE,
                f"The chain of {names} is stuck: no move was accepted in the last "
                f"{report.unmoved} transitions. {reason}",
            )
        if report.pending is not None:
            message, report.pending = report.pending, None
            return message
        if report.failed and not self.tune and "failed" not in report.told:
            report.told.add("failed")
            return (
                WarningType.BAD_PARAMS,
                f"The log density of {names} failed at {report.failed} points of start and tuning, "
                f"which count as impossible. The first was {report.first_failure}. After tuning "
                "such a proposal ends the chain: let the function return -np.inf there.",
            )
        found = report.evaluations + report.known
        if found >= 500 and report.nonfinite > 0.1 * found and "nonfinite" not in report.told:
            report.told.add("nonfinite")
            share = report.nonfinite / found
            return (
                WarningType.BAD_PARAMS,
                f"{share:.0%} of the log densities of {names} so far were NaN or +inf and were "
                "rejected. The draws keep to where the model is finite; check the model there.",
            )
        message = self._complaint_of_mixing()
        if message is not None:
            return message
        message = kept_estimate.unseeded(self)
        if message is None and self.stage is not None and not self.tune:
            message = surrogate_stage.complaint(self.stage, report, names)
        return message

    def _randomness(self):
        """Say so if the log density at the current point is another one when evaluated again."""
        if not self.target.function.has_black_box or self.target.has_estimates:
            return None
        kept, again = self.chain.value[:N_TERMS].sum(), np.empty(N_TERMS)
        self.chain.counts[EVALUATIONS] += 1
        self.target.function.into(self.chain.position, again)
        again = again.sum()
        if np.isclose(again, kept, rtol=1e-6, atol=1e-3):
            return None
        return (
            f"The log density is random: at one point it is {kept:.4g}, and evaluated again "
            f"{again:.4g}. Give what draws random numbers a fixed seed; or, if it estimates the "
            "likelihood, take KameleonStep(pseudo_marginal=True)."
        )

    def _complaint_of_mixing(self):
        """Return a warning if the chain mixed badly, and no other one said why."""
        if {"stuck", "mixing"} & self.report.told:
            return None
        n_made = self.transition // self.steps_per_draw
        learnt = None if self.target.is_circular.any() else self.learner.normal()
        message = self.draws.complaint(self, n_made, self._element_names, learnt)
        return None if message is None else (WarningType.CONVERGENCE, message)

    def _watched(self):
        """Numbers of which it is watched how they mix: cosine and sine of an angle."""
        x, is_angle = self.chain.position, self.target.is_circular
        if not is_angle.any():
            return x
        return np.concatenate([np.where(is_angle, np.cos(x), x), np.sin(x[is_angle])])

    def _element_names(self):
        names = [name + element for name, element in self.target.coordinates()]
        named = list(zip(names, self.target.is_circular, strict=True))
        shown = [f"cos({name})" if is_angle else name for name, is_angle in named]
        return shown + [f"sin({name})" for name, is_angle in named if is_angle]

    def _check_tuning(self):
        """At the end of tuning, remember a warning for the next draw if something is off."""
        report = self.report
        is_short = self._n_learnt_from() < 0.25 * self._transitions_to_tune()
        if is_short and self.warm is None:
            report.pending = (
                WarningType.CONVERGENCE,
                f"Tuning of {', '.join(self.target.names)} was short: {self.transition} "
                f"transitions in {self.dim} dimensions. Take pm.sample("
                f"tune={self.default_tune_steps}) or more, or more "
                f"steps_per_draw (now {self.steps_per_draw}).",
            )
        else:
            # What is pending from before stands if there is nothing to say of the acceptance.
            report.pending = self._complaint_of_acceptance() or report.pending
        if report.pending is not None:
            report.told.add("mixing")  # its cause will have been told

    def _complaint_of_acceptance(self):
        """Return a warning if the acceptance at the end of tuning is not what it should be."""
        acceptance, target = self.report.acceptance, self.target_accept
        if 0.1 * target <= acceptance <= 0.5 * (1 + target):
            return None
        noisy = f" If the estimates are noisy: {kept_estimate.ADVICE}."
        return (
            WarningType.BAD_ACCEPTANCE,
            f"The acceptance of {', '.join(self.target.names)} ended tuning at {acceptance:.3f}, "
            f"far from its target {target:.3f}. Tune longer "
            f"(tune={2 * self.default_tune_steps}), and compare several chains."
            f"{noisy if self.target.has_estimates else ''}",
        )

    # what was learnt ------------------------------------------------------------------------------

    def proposal_covariance(self, x) -> np.ndarray:
        """Covariance of the step's own move from a point.

        Parameters
        ----------
        x : array, shape (..., d)
            Raveled, unconstrained positions, in the order of the model's variables.

        Returns
        -------
        array, shape (..., d, d)

        Raises
        ------
        RuntimeError
            If the step has learnt nothing.
        """
        x = self._checked_points(x)
        if self.learner is None and self.warm is not None:
            # Before there is a chain, which will begin anew.
            rng, last = copy.deepcopy(self.rng), self.warm.points[-1]
            self.learner = self.adaptation.start(last, rng, self.warm, self.target_accept)
        if self.learner is None or not self.learner.has_learnt:
            raise RuntimeError(
                f"This {type(self).__name__} has learnt nothing, so there is no proposal to show. "
                f"Make one from earlier draws: {type(self).__name__}(warm_start=idata)."
            )
        covariances = self.learner.covariances_at(x.reshape(-1, self.dim))
        return covariances.reshape(*x.shape, self.dim)

    def _checked_points(self, x):
        names, dim = ", ".join(self.target.names), self.dim
        try:
            points = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"x={x!r}: take an array of shape (..., {dim}), the raveled unconstrained {names}."
            ) from error
        if points.ndim == 0 or points.shape[-1] != dim:
            raise ValueError(
                f"x has shape {points.shape}: take shape (..., {dim}), the raveled unconstrained "
                f"{names}."
            )
        if not np.all(np.isfinite(points)):
            raise ValueError(f"x has NaN or infinite entries: take finite values of {names}.")
        return points

    def _progress_columns(self):
        if self.surrogate is None:
            return {"accept": ("Accept", "0.2f"), "n_evals": ("Evals", "0.0f")}
        return {"calls_made": ("Calls", "0.0f"), "calls_saved": ("Saved", "0.0f")}
