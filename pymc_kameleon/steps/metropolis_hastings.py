"""What every random walk shares as a PyMC step: chains, kept log density, statistics."""

import copy
import logging
import math
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
    NONFINITE,
    Chain,
    mark_impossible,
    new_chain,
)
from pymc_kameleon.mcmc.scalings import target_acceptance
from pymc_kameleon.model.black_box import takes_known_groups
from pymc_kameleon.model.forks import refuse_in_fork
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.model.transforms import warm_points, warm_scaling
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.life_cycle import Step, draw_statistics, stored_at
from pymc_kameleon.steps.chain.report import (
    Report,
    complaint_of_acceptance,
    next_warning,
    tuning_was_short,
    watched,
)
from pymc_kameleon.steps.chain.sampler import ChainSampler, evaluator_of
from pymc_kameleon.steps.chain.screening import screening
from pymc_kameleon.steps.chain.start import Start, StartSearch, checked_start
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.store.stored_density import chosen_store
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.surrogate.delayed_acceptance import FirstStage
from pymc_kameleon.validation import checked_integer, checked_share

_log = logging.getLogger("pymc.kameleon")


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

    statistics_of_target: dict = {}
    """Type and shape of sampler statistics that not every target has."""

    takes_terms = False
    """Whether the terms of the likelihood follow those of the log density."""

    can_look_ahead = True
    """Whether transitions depend on nothing but chain, learner and random numbers."""

    sampler_class = ChainSampler

    chain, learner = stored_at("sampler.chain"), stored_at("sampler.learner")
    stage, screening = stored_at("sampler.stage"), stored_at("sampler.screening")
    transition, tune = stored_at("sampler.transition"), stored_at("sampler.tune")
    draws, evaluator = stored_at("sampler.draws"), stored_at("sampler.evaluator")
    steps_per_draw = stored_at("sampler.steps_per_draw")
    target_accept = stored_at("sampler.target_accept")
    rng, report = stored_at("sampler.evaluator.rng"), stored_at("sampler.evaluator.report")
    stored, ahead = stored_at("sampler.evaluator.stored"), stored_at("sampler.evaluator.ahead")

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
        self.target = LogDensity(
            model,
            vars,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            separate_estimates=self.pseudo_marginal,
        )
        self.dim = self.target.dim
        learner = self._learner_of_target(learner)
        learner.check(self.target.names, self.dim)
        takes_estimates = pseudo_marginal is not None
        is_estimated = self.pseudo_marginal or bool(self.target.estimated_terms)
        start = checked_start(start, takes_estimates and is_estimated)
        self.start = Start(start, bool(disperse), warm_start is not None)
        if takes_estimates and not pseudo_marginal:
            kept_estimate.warn_without(type(self).__name__, self.target)
        if self.pseudo_marginal:
            kept_estimate.require_one(type(self).__name__, self.target)
        screened = screening(surrogate, self.target, self.pseudo_marginal, self.takes_gradients)
        store = chosen_store(store, screened.store, is_estimated)
        if target_accept is None:
            target_accept = target_acceptance(self.dim)
        gradients = self.takes_gradients
        looks_ahead = self.can_look_ahead and not (self.pseudo_marginal or gradients)
        self.sampler = self.sampler_class(
            evaluator_of(self.target, store, gradients, looks_ahead, self.takes_terms),
            screened,
            learner,
            target_accept=float(target_accept),
            adapts_after_tune=bool(adapt_after_tune),
        )
        if steps_per_draw is None:
            steps_per_draw = self._chosen_steps_per_draw()
            name = type(self).__name__
            _log.info("%s: %d transitions a draw, %s", name, steps_per_draw, self._how)
        self.steps_per_draw = steps_per_draw
        patience = 2 if self.runs_compiled else 1
        self.default_tune_steps = math.ceil(patience * self.transitions_to_tune() / steps_per_draw)
        options = learner.options | {
            "steps_per_draw": self.steps_per_draw,
            "target_accept": self.target_accept,
            "adapt_after_tune": self.sampler.adapts_after_tune,
            "pseudo_marginal": self.pseudo_marginal,
            "shapes": self.target.shapes,
            "surrogate": screened.configuration,
        }
        self.configuration = ", ".join(f"{k}={v!r}" for k, v in sorted(options.items()))
        super().__init__(
            self.target.vars, self.target.shapes, self.target.shared, blocked=blocked, rng=rng
        )
        added = screened.statistics_dtypes | self.statistics_of_target
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
            self.evaluator.function.compiled()
        self._begin_chain(None)

    def __repr__(self):
        name, variables = type(self).__name__, ", ".join(self.target.names)
        return f"{name}(vars=[{variables}], steps_per_draw={self.steps_per_draw}), {self._how}"

    @property
    def runs_compiled(self) -> bool:
        """Whether transitions run compiled, log density included."""
        return self.sampler.runs_compiled

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

    def _learner_of_target(self, learner: Learner) -> Learner:
        """Return the learner for this target: by default that which was made for it."""
        return learner

    def _chosen_steps_per_draw(self) -> int:
        """Transitions a draw unless the user says otherwise."""
        return chosen_steps_per_draw(self.dim, self.runs_compiled)

    def transitions_to_tune(self) -> int:
        """Transitions that a first run needs to learn the shape of a target of this dimension."""
        return 1000 + 500 * self.dim

    def _n_learnt_from(self) -> int:
        """Transitions of tuning so far, and what else taught as much."""
        return self.transition

    # the life of a chain --------------------------------------------------------------------------

    def _start_chain(self, rng, tune, draws):
        refuse_in_fork(self.target.function.outputs)
        super()._start_chain(rng, tune, draws)

    def _begin_chain(self, expected_tune):
        self.sampler = self.sampler.copied()
        self.sampler.begin_anew()
        self.expected_tune, self.returned = expected_tune, None

    def _fresh_state(self):
        return {
            "chain": new_chain(np.zeros(self.dim), self.evaluator.n_values),
            "stage": self.screening.new_stage(),
        }

    def _set_state(self, state):
        # The present chain and learner are left as they are if the state is refused. PyMC sets the
        # state of what has one, so there has to be a learner.
        self.sampler = self.sampler.copied()
        if state.learner is None:
            return super()._set_state(state)
        new_learner = self.sampler.new_learner
        fresh, self.learner = (new_learner(np.zeros(self.dim), None) for _ in range(2))
        super()._set_state(state)
        self.learner.check_state(fresh)

    @one_thread()
    def _begin_at(self, x):
        sampler, search = self.sampler, StartSearch(self.sampler, self.start)
        sampler.put(x)
        position = self.chain.position  # which the search for a start moves
        search.find(x)
        sampler.learner = sampler.new_learner(position, self.warm)
        if self.warm is None:
            self.learner.begin_with_scales(search.scales)
        if self.stage is not None:
            sampler.read_store()
        if self.tune and self.warm is None:
            self._begin_tuning(x, search)
        if not self.tune:
            sampler.end_learning()
            if self.warm is None:
                self._check_tuning()

    def _begin_tuning(self, x, search):
        search.begin_tuning()

    def stop_tuning(self):
        """Freeze the adaptation (or let it go on with vanishing steps, `adapt_after_tune=True`)."""
        if self.chain is not None and self.tune:
            with self.report.calls.counting():
                self.sampler.read_store()
                self.sampler.end_learning()
            self._check_tuning()
        super().stop_tuning()

    def _check_tuning(self):
        """Remember a warning for the next draw if something is off at the end of tuning."""
        report = self.report
        is_short = self._n_learnt_from() < 0.25 * self.transitions_to_tune()
        if is_short and self.warm is None:
            report.pending = tuning_was_short(self)
        else:
            # What is pending from before stands if there is nothing to say of the acceptance.
            report.pending = self._complaint_of_acceptance() or report.pending
        if report.pending is not None:
            report.warned.add("mixing")  # its cause will have been told

    # a draw ---------------------------------------------------------------------------------------

    def astep(self, q0: RaveledVars) -> tuple[RaveledVars, list[dict[str, Any]]]:
        """Make `steps_per_draw` transitions from `q0`."""
        with self.report.calls.counting():
            return self._draw(q0)

    def _draw(self, q0):
        self.arrive(q0.data)
        # Until the draw is complete: if it is interrupted, position and value may not go together.
        self.returned = None
        chain = self.chain
        chain.outcome[:] = 0.0
        if self.tune and self.target.has_estimates:
            kept_estimate.advance_patiently(self.sampler, self.steps_per_draw)
        else:
            self.sampler.advance(self.steps_per_draw)
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
            self.draws.record(watched(self.sampler))
        message = next_warning(self, statistics)
        if message is not None:
            statistics["warning"] = SamplerWarning(*message, "warn")
        self.target.restore_estimates(chain.value[chain.value.size - self.target.n_seeds :])
        return RaveledVars(self.returned.copy(), q0.point_map_info), [statistics]

    def _learnt_statistics(self, n_evals):
        return self.learner.statistics()

    def arrive(self, x):
        """Make `x` the current position, evaluating the log density only where it is not known."""
        if x.shape != (self.dim,):
            raise ValueError(
                f"{type(self).__name__} takes points of {self.dim} numbers, the raveled "
                f"{', '.join(self.target.names)}, and this one has shape {x.shape}."
            )
        inputs_changed, sampler = self.target.inputs_changed(), self.sampler
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
            sampler.position_changed()
            with takes_known_groups():
                sampler.evaluate_current()
        elif inputs_changed and self.target.keeps_estimates:
            self.chain.counts[EVALUATIONS] += 1
            self.chain.value[:2] = self.target.rest(self.chain.position)
            mark_impossible(self.chain)
        elif inputs_changed:
            with takes_known_groups():
                sampler.evaluate_current()

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
            self.learner = self.sampler.template.start(last, rng, self.target_accept, self.warm)
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
