"""What every random walk shares as a PyMC step: chains, kept log density, statistics."""

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
from pymc.blocking import RaveledVars
from pymc.model import Model, modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_kameleon._threads import one_thread
from pymc_kameleon.adaptation.learner import Learner, LearnerState, WarmStart
from pymc_kameleon.mcmc.chain import (
    ACCEPTANCE,
    ACCEPTED,
    EVALUATIONS,
    N_TERMS,
    NONFINITE,
    TRANSITION,
    Chain,
    evaluate,
    new_chain,
    turned,
)
from pymc_kameleon.mcmc.loop import run_plain, runner
from pymc_kameleon.mcmc.proposals import N_UNIFORMS
from pymc_kameleon.mcmc.scalings import target_acceptance
from pymc_kameleon.model.batches import Batches
from pymc_kameleon.model.forks import refuse_in_fork
from pymc_kameleon.model.initial_points import seed_from
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.model.transforms import warm_points, warm_scaling
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.life_cycle import Step, all_or_nothing, draw_statistics
from pymc_kameleon.steps.chain.look_ahead import LookAhead
from pymc_kameleon.steps.chain.mixing import KeptDraws
from pymc_kameleon.steps.chain.report import (
    Report,
    check_tuning,
    complaint_of_acceptance,
    end_with_draws,
    next_warning,
    watched,
)
from pymc_kameleon.steps.chain.screening import screening
from pymc_kameleon.steps.chain.start import N_READ, begin_tuning, checked_start, find_start
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.store.stored_density import StoredDensity, chosen_store
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.surrogate.delayed_acceptance import FirstStage
from pymc_kameleon.validation import checked_integer, checked_share

_log = logging.getLogger("pymc.kameleon")

CENTRED_IN = 100
"""Window, in transitions, of the running circular mean of an angle."""


def chosen_steps_per_draw(dim: int, is_compiled: bool) -> int:
    """Transitions a draw that a step in d = `dim` dimensions makes unless told otherwise.

    A well-tuned random walk on a Gaussian gains about 0.25 / d effective draws a transition, so 2d
    transitions leave one of two draws effective, and d one of four; posteriors of practice need the
    margin. A compiled transition costs microseconds, as a stored draw does. The number depends on
    what is fixed by the model, never on a clock, so that the same seed gives the same chain.
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
    """Base of the steps that propose and accept: a subclass makes a `Learner` of its arguments.

    One that needs a gradient, which no estimate has, gives None for `pseudo_marginal`.
    """

    stats_dtypes_shapes: dict = draw_statistics(
        "accept", "accepted", "scaling", "n_evals", "n_nonfinite", "n_transitions"
    )
    name = "metropolis_hastings"
    _state_class = MetropolisHastingsState
    default_tune_steps = 2000

    _not_arguments: tuple[str, ...] = ("learner",)
    """Arguments that are not those of the users of a subclass."""

    warm_statistic = "scaling"
    """Statistic of earlier draws that a chain with `warm_start` takes the scaling from."""

    takes_gradients = False
    """Whether gradients of prior and likelihood follow the terms of the log density."""

    can_look_ahead = True
    """Whether `_transitions` depend on nothing but chain, learner and random numbers."""

    correction: Callable[[np.ndarray], float] | None = None
    """What is added to the log likelihood at a point, if anything: in plain Python then."""

    def __init__(
        self,
        vars=None,
        *,
        learner: Learner,
        target_accept: float | None = None,
        adapt_after_tune: bool = False,
        steps_per_draw: int | None = None,
        disperse: bool = True,
        start: str = "here",
        pseudo_marginal: bool | None = False,
        surrogate: GPSurrogate | None = None,
        store: EvaluationStore | None = None,
        warm_start: Any = None,
        model: Model | None = None,
        rng: np.random.Generator | None = None,
        initial_point: dict[str, np.ndarray] | None = None,
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
        self.untaught = learner
        self.target = LogDensity(
            model,
            vars,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            separate_estimates=self.pseudo_marginal,
        )
        self.dim = self.target.dim
        learner.check(self.target.names, self.dim)
        kernel = learner.transition_kernel
        has_compiled_kernel = kernel is None or kernel.is_compiled
        self._could_compile = has_compiled_kernel and not self.target.n_seeds
        takes_estimates = pseudo_marginal is not None
        is_estimated = self.pseudo_marginal or bool(self.target.estimated_terms)
        self.start = checked_start(start, takes_estimates and is_estimated)
        if takes_estimates and not pseudo_marginal:
            kept_estimate.warn_without(type(self).__name__, self.target)
        if self.pseudo_marginal:
            kept_estimate.require_one(type(self).__name__, self.target)
        self.screening = screening(
            surrogate, self.target, self.pseudo_marginal, self.takes_gradients
        )
        store = chosen_store(store, self.screening.store, is_estimated)
        self.stored = None
        if store is not None:
            self.stored = StoredDensity(self.target, store, self.takes_gradients)
        self.ahead = self._new_look_ahead()
        self.target_accept = (
            target_acceptance(self.dim) if target_accept is None else float(target_accept)
        )
        if steps_per_draw is None:
            steps_per_draw = self._chosen_steps_per_draw()
            name = type(self).__name__
            _log.info("%s: %d transitions a draw, %s", name, steps_per_draw, self._how)
        self.steps_per_draw = steps_per_draw
        patience = 2 if self.runs_compiled else 1
        self.default_tune_steps = math.ceil(patience * self._transitions_to_tune() / steps_per_draw)
        options = learner.options | {
            "steps_per_draw": self.steps_per_draw,
            "target_accept": self.target_accept,
            "adapt_after_tune": self.adapt_after_tune,
            "pseudo_marginal": self.pseudo_marginal,
            "shapes": self.target.shapes,
            "surrogate": self.screening.configuration,
        }
        self.configuration = ", ".join(f"{k}={v!r}" for k, v in sorted(options.items()))
        super().__init__(
            self.target.vars, self.target.shapes, self.target.shared, blocked=blocked, rng=rng
        )
        added = self.screening.statistics_dtypes
        if self.pseudo_marginal:
            added = added | kept_estimate.STATISTICS
        if added:
            self.stats_dtypes_shapes = self.stats_dtypes_shapes | added
            self.stats_dtypes = [{k: dtype for k, (dtype, _) in self.stats_dtypes_shapes.items()}]
        self.warm = None
        if warm_start is not None:
            own = set(self.stats_dtypes_shapes) - {"warning"}
            others = {"bandwidth", "rank", "component", "step_size", "covariance_scaling"} - own
            self.warm = WarmStart(
                warm_points(warm_start, model, self.target, learner.history_capacity),
                warm_scaling(warm_start, self.warm_statistic, own, others),
            )
        if self.runs_compiled:  # once, before PyMC forks a process for each chain
            self._density.compiled()
        self._begin_chain(None)

    def __repr__(self):
        name, variables = type(self).__name__, ", ".join(self.target.names)
        return f"{name}(vars=[{variables}], steps_per_draw={self.steps_per_draw}), {self._how}"

    @property
    def runs_compiled(self) -> bool:
        """Whether transitions run compiled, log density included."""
        could_compile = self._could_compile and self.correction is None
        return could_compile and self._density.is_compilable

    @property
    def learns_from_store(self) -> bool:
        """Whether it learns from what others have stored while it tunes."""
        return self.screening.store is not None

    @property
    def can_be_tempered(self) -> bool:
        """Whether `ParallelTemperingStep` takes the model too, and costs little there."""
        is_estimated = self.target.has_estimates or self.target.estimated_terms
        return self.target.function.is_compilable and not is_estimated

    @property
    def _how(self):
        return "compiled" if self.runs_compiled else "in Python"

    def _chosen_steps_per_draw(self) -> int:
        """Transitions a draw unless the user says otherwise."""
        return chosen_steps_per_draw(self.dim, self.runs_compiled)

    def _transitions_to_tune(self) -> int:
        """Transitions that a first run needs to learn the shape of a target of this dimension."""
        return 1000 + 500 * self.dim

    def _n_learnt_from(self) -> int:
        """Transitions of tuning so far, and what else taught as much."""
        return self.transition

    def _new_look_ahead(self) -> LookAhead | None:
        """Return what evaluates at several points at once; None if nothing of the model can."""
        is_repeatable = not (self.pseudo_marginal or self.target.estimated_terms)
        if not (self.can_look_ahead and is_repeatable) or self.takes_gradients:
            return None
        batches = Batches(self.target.function)
        return LookAhead(batches, self.stored) if batches.size > 1 else None

    # the life of a chain --------------------------------------------------------------------------

    def _start_chain(self, rng, tune, draws):
        refuse_in_fork(self.target.function.outputs)
        super()._start_chain(rng, tune, draws)

    def _begin_chain(self, expected_tune):
        self.tune = True
        self.expected_tune = expected_tune
        self.transition = 0
        self.chain = self.learner = self.stage = self.returned = None
        self.draws, self.looked, self.scales = KeptDraws(), [], self.target.scales
        self._prior_points = None
        self.report = Report()

    def _fresh_state(self):
        return {
            "chain": new_chain(np.zeros(self.dim), self._n_values),
            "stage": self.screening.new_stage(),
        }

    def _set_state(self, state):
        # PyMC sets the state of what has one, so there has to be a learner: a new one, so that the
        # present one is left as it is if the state is refused.
        if state.learner is None:
            return super()._set_state(state)
        fresh, self.learner = (self._new_learner(np.zeros(self.dim), None) for _ in range(2))
        super()._set_state(state)
        self.learner.check_state(fresh)

    def _new_learner(self, position, warm):
        return self.untaught.start(position, self.rng, self.target_accept, warm)

    @one_thread()
    def _begin_at(self, x):
        self.chain = new_chain(np.array(x, dtype=np.float64), self._n_values)
        position = self.chain.position  # which the search for a start moves
        self.stage = self.screening.new_stage()
        if self.stored is not None:
            self.stored.begin_chain()
        self.report.foreign_seed = kept_estimate.foreign_seed(self.target)
        self._find_start(x)
        self.learner = self._new_learner(position, self.warm)
        if self.warm is None:
            self.learner.begin_with_scales(self.scales)
        if self.stage is not None:
            self._read_store()
        if self.tune and self.warm is None:
            self._begin_tuning(x)
        self.looked = []
        if not self.tune:
            self._end_learning(position)
            if self.warm is None:
                check_tuning(self)

    def _find_start(self, x):
        find_start(self, x)

    @property
    def prior_points(self) -> np.ndarray:
        """Draws from the prior (n, d), this chain's own, made when they are first asked for."""
        if self._prior_points is None:
            self._prior_points = self.target.prior_points(seed_from(self.rng))
        return self._prior_points

    def _begin_tuning(self, x):
        begin_tuning(self, x)

    def stop_tuning(self):
        """Freeze the adaptation (or let it go on with vanishing steps, `adapt_after_tune=True`)."""
        if self.chain is not None and self.tune:
            with self.report.calls.counting():
                self._read_store()
                self._end_learning(self.chain.position)
            check_tuning(self)
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
        with self.report.calls.counting():
            return self._draw(q0)

    def _draw(self, q0):
        self._arrive(q0.data)
        # Until the draw is complete: if it is interrupted, position and value may not go together.
        self.returned = None
        chain = self.chain
        chain.outcome[:] = 0.0
        if self.tune and self.target.has_estimates:
            kept_estimate.advance_patiently(self, self.steps_per_draw)
        else:
            self._advance(self.steps_per_draw)
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
            **self.screening.statistics(self.stage, self.report, self.steps_per_draw, evaluations),
        }
        if self.pseudo_marginal:
            statistics["estimate"] = chain.value[2]
        if not self.tune:
            self.draws.record(watched(self))
        message = next_warning(self, statistics)
        if message is not None:
            statistics["warning"] = SamplerWarning(*message, "warn")
        self.target.restore_estimates(chain.value[chain.value.size - self.target.n_seeds :])
        return RaveledVars(self.returned.copy(), q0.point_map_info), [statistics]

    def _learnt_statistics(self, n_evals):
        return self.learner.statistics()

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
            self._position_changed()
            self._evaluate_current()
        elif inputs_changed and self.target.keeps_estimates:
            self.chain.counts[EVALUATIONS] += 1
            self.chain.value[:2] = self.target.rest(self.chain.position)
            self._mark_impossible()
        elif inputs_changed:
            self._evaluate_current()

    def _position_changed(self):
        """Drop what was computed for the position, which transitions did not change."""
        self.learner.invalidate()
        self.screening.invalidate(self.stage)

    def _advance(self, n):
        """Make `n` transitions, and the updates of the proposal that come between them."""
        if not self.adapts:
            self._run(n)
        learner, done = self.learner, 0
        while self.adapts and done < n:
            count = learner.transitions_before_update(self.transition + done, n - done, self.rng)
            self._learn_from(count)
            done += count
            if done < n:
                with one_thread(), all_or_nothing(learner):
                    learner.update(self.chain.position, self.tune, self.rng)
                self._explore()
                self._learn_from(1)
                done += 1
        self.transition += n

    def _explore(self):
        """Evaluate points that the learner wants to know."""

    def _learn_from(self, n):
        """Make `n` transitions, no more at a time than the learner has room for."""
        while n > 0:
            count = min(n, self.learner.room())
            self._run(count)
            self.learner.absorb()
            n -= count

    def _run(self, n):
        """Make `n` transitions, and learn from their evaluations."""
        self._keep_to_one_period()
        normals = self.rng.standard_normal((n, self.dim + self.learner.n_more_normals))
        uniforms = self.rng.random((n, N_UNIFORMS + self.learner.n_more_uniforms))
        if self.ahead is None:
            self._transitions(normals, uniforms)
        else:
            for i in range(n):
                self.ahead.look(self, normals[i:], uniforms[i:])
                self._transitions(normals[i : i + 1], uniforms[i : i + 1])
        self._learn_from_evaluations()

    def _transitions(self, normals, uniforms):
        """Make a transition with each row of these, compiled if log density and proposal are.

        One at which compiled code raises an error is made again in Python while tuning, where that
        counts as no density.
        """
        table = self._density.compiled() if self.runs_compiled else None
        while len(normals):
            try:
                return self._loop(table, normals, uniforms)
            except Exception as error:
                if table is None or not self.tune:
                    if table is not None and not self.target.function.has_black_box:
                        self.target(self.chain.proposal)  # PyTensor's own error names the operation
                    self._end_by(error, "a proposal", self.chain.proposal)
                    raise
            failed = int(self.chain.counts[TRANSITION])
            self.chain.counts[EVALUATIONS] -= 1
            self._loop(None, normals[failed : failed + 1], uniforms[failed : failed + 1])
            normals, uniforms = normals[failed + 1 :], uniforms[failed + 1 :]

    def _loop(self, table, normals, uniforms):
        """Make transitions compiled, with the `table` of the log density, or without in Python."""
        is_compiled, learner = table is not None, self.learner
        proposal = learner.proposal(is_compiled)
        run = runner(type(proposal)) if is_compiled else run_plain
        density = self._density_or_none if self.tune else self._plain_density
        run(
            table if is_compiled else (density,),
            self.screening.form(self.stage, self.chain, is_compiled, self.adapts),
            self.chain,
            learner.mixture(self.tune),
            proposal,
            learner.recursion(),
            self.adapts,
            normals,
            uniforms,
        )

    def _end_by(self, error, point, x):
        """Say where a black box failed, and end a chain that has draws without losing them."""
        if not self.target.function.has_black_box:
            return
        error.add_note(
            f"The log density failed at {point} of the chain, {self._failure(error, x)}. Where the "
            "model is impossible, let the function return -np.inf, or name the exception in "
            "black_box(failures=...)."
        )
        if self.draws.n_draws:
            end_with_draws(error, self.draws.n_draws, ", ".join(self.target.names))

    def _learn_from_evaluations(self):
        """Teach the first stage what was evaluated, here and, while tuning, elsewhere."""
        if self.stage is None:
            return
        if self.tune and self.stored is not None and self.stored.is_reading_due:
            self._read_store()
        if self.adapts:
            self.screening.refit(self.stage, self.chain)

    def _read_store(self):
        """Teach the first stage what other chains and runs have stored since the last time.

        Not yet where the chain is still so far below what they found that its own surroundings
        would be censored: a surrogate of somewhere else would keep it there.
        """
        if self.stored is None or self.stage is None:
            return
        found = self.stored.from_others(N_READ, self.screening.growth(self.stage))
        lowest = np.max(found.log_densities, initial=-np.inf) - self.stage.process.censoring[1]
        if self.chain.value[:N_TERMS].sum() < lowest:
            self.stored.put_back(found)
        elif len(found.points):
            self.screening.teach_found(self.stage, self.chain, found)

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
            self._position_changed()

    # the log density ------------------------------------------------------------------------------

    @property
    def _density(self):
        """The function of the target that transitions evaluate."""
        if self.stored is not None:
            return self.stored
        return self.target.with_gradients if self.takes_gradients else self.target.function

    @property
    def _n_values(self):
        """Count the numbers that `_density` returns, and the seeds of the estimates among them."""
        return N_TERMS + 2 * self.dim * self.takes_gradients + self.target.n_seeds

    def _plain_density(self, x, value):
        """Write what `_density` returns at `x`, then the seeds of its new estimates, to `value`."""
        if self.ahead is not None:
            self.ahead.asked(x)
        end = value.size - self.target.n_seeds
        value[end:] = self.target.redraw_estimates(self.rng)
        self._density.into(x, value[:end])
        if self.correction is not None:
            value[1] += self.correction(x)

    def _density_or_none(self, x, value):
        """As `_plain_density`, for start and tuning: an error counts as no density."""
        self._or_none(self._plain_density, x, value)

    def _or_none(self, density, x, value):
        """Call `density`, which writes to `value`; an error is noted, and counts as none."""
        try:
            density(x, value)
        except Exception as error:
            value[:] = np.nan
            self.report.failed += 1
            self.report.first_failure = self.report.first_failure or self._failure(error, x)

    def _failure(self, error, x):
        """Say at which natural values of the variables `x` (d,) an evaluation failed, and how."""
        values = self.target.natural(x[None])
        shown = [
            f"{name} = {np.array2string(v[0], threshold=10)}" for name, (_, v) in values.items()
        ]
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{', '.join(shown)}: {first_line}"

    def _evaluate_current(self):
        chain = self.chain
        chain.counts[EVALUATIONS] += 1
        try:
            self._plain_density(chain.position, chain.value)
        except Exception as error:
            self._end_by(error, "the current point", chain.position)
            raise
        self._mark_impossible()

    def _mark_impossible(self):
        """Let a chain that was put where there is no density leave by any move."""
        if not math.isfinite(self.chain.value[:N_TERMS].sum()):
            self.chain.value[:N_TERMS] = 0.0
            self.chain.value[0] = -np.inf

    @property
    def _is_foreseeable(self) -> bool:
        """Whether the next transition depends on earlier log densities by acceptance alone."""
        return not self.adapts

    def _guess(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write to `value` what the log density at the proposal `x` (d,) is taken for ahead."""
        self.screening.guess(self.stage, self.chain, value)

    def _evaluate_as_proposal(self, x):
        """Log density at `x` (d,), -inf if it is not finite; its terms are kept as a proposal's."""
        chain = self.chain
        chain.proposal[:] = x
        return evaluate((self._density_or_none,), x, chain.proposed_value, chain.counts)

    def _move_to_proposal(self):
        """Move the chain to what `evaluate_as_proposal` has evaluated last."""
        chain = self.chain
        chain.position[:], chain.value[:] = chain.proposal, chain.proposed_value

    @property
    def _gradient_of_proposal(self):
        """What returns the gradient (d,) at `chain.proposal`; None for a step without gradients."""
        value = self.chain.proposed_value
        return (lambda: self._gradients_in(value)) if self.takes_gradients else None

    def _gradients_in(self, values):
        """Gradients (..., d) of the log density among the values (..., 3 + 2 d) of `_density`."""
        parts = values[..., N_TERMS:]
        return parts[..., : self.dim] + parts[..., self.dim :]

    # what is shown --------------------------------------------------------------------------------

    def _complaint_of_acceptance(self) -> tuple[WarningType, str] | None:
        return complaint_of_acceptance(self)

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
            self.learner = self.untaught.start(last, rng, self.target_accept, self.warm)
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
        if "calls_saved" in self.screening.statistics_dtypes:
            return {"calls_made": ("Calls", "0.0f"), "calls_saved": ("Saved", "0.0f")}
        return {"accept": ("Accept", "0.2f"), "n_evals": ("Evals", "0.0f")}
