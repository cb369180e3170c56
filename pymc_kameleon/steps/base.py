"""What every step shares: chains, kept log density, first stage, statistics, warnings."""

import copy
import logging
import math
from abc import abstractmethod
from dataclasses import field
from typing import Any

import numpy as np
from pymc.blocking import RaveledVars
from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation import HELD, SEEN, record, target_acceptance
from pymc_kameleon.compiled import EVALUATIONS, N_TERMS, NONFINITE
from pymc_kameleon.model_function import ModelFunction
from pymc_kameleon.steps import kept_estimate, two_stage
from pymc_kameleon.steps.life_cycle import STUCK_AFTER, Step
from pymc_kameleon.steps.mixing import new_draws, slow_mixing
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.target import LogDensity
from pymc_kameleon.transitions.metropolis import ACCEPTANCE, ACCEPTED, Chain, Components
from pymc_kameleon.transitions.two_stage import FirstStage
from pymc_kameleon.transitions.two_stage_mala import JointFirstStage
from pymc_kameleon.validation import checked_integer, checked_share
from pymc_kameleon.warm_start import warm_points, warm_scaling

__all__ = ["MetropolisHastingsState", "MetropolisHastingsStep", "chosen_steps_per_draw"]

_log = logging.getLogger("pymc.kameleon")

USUAL_ENDS = (200, 1000)
"""Draws after which mixing is judged where PyMC does not say how many there will be."""

DISPERSAL_TRIES = 60
"""Points tried around the model's default start, ten at each width."""


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
    components: Components | None
    stage: FirstStage | JointFirstStage | None
    returned: np.ndarray | None
    report: dict[str, float]
    configuration: str = field(metadata={"frozen": True})


class MetropolisHastingsStep(Step):
    """Base of the steps: arguments, chains, kept log density, statistics, warnings.

    A subclass gives `_begin` (fresh adaptation at a position), `_advance` (a number of
    transitions), `_end_tuning`, and `_scaling_statistics`; one that needs a gradient, which no
    estimate has, gives None for `pseudo_marginal`.
    """

    stats_dtypes_shapes = {
        "accept": (np.float64, []),
        "accepted": (np.float64, []),
        "scaling": (np.float64, []),
        "n_evals": (np.float64, []),
        "n_nonfinite": (np.float64, []),
        "n_transitions": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    _state_class = MetropolisHastingsState

    def __init__(
        self,
        vars,
        *,
        steps_per_draw: int | None,
        disperse: bool,
        target_accept: float | None,
        adapt_after_tune: bool,
        pseudo_marginal: bool | None,
        surrogate: GPSurrogate | None,
        warm_start,
        configuration: dict[str, Any],
        model,
        rng,
        initial_point,
        compile_kwargs: dict[str, Any] | None,
        blocked: bool,
    ):
        model = modelcontext(model)
        if steps_per_draw is not None:
            steps_per_draw = checked_integer("steps_per_draw", steps_per_draw, 1)
        if target_accept is not None:
            checked_share("target_accept", target_accept, open_interval=True)
        self.pseudo_marginal = bool(pseudo_marginal)
        self.adapt_after_tune = bool(adapt_after_tune)
        self.disperse = bool(disperse)
        self.target = LogDensity(
            model,
            vars,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            separate_estimates=self.pseudo_marginal,
        )
        self.dim = self.target.dim
        if pseudo_marginal is not None and not pseudo_marginal:
            kept_estimate.warn_without(type(self).__name__, self.target)
        self.surrogate = surrogate
        if surrogate is not None:
            self._check_surrogate()
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
        options = configuration | {
            "steps_per_draw": self.steps_per_draw,
            "target_accept": self.target_accept,
            "adapt_after_tune": self.adapt_after_tune,
            "pseudo_marginal": self.pseudo_marginal,
            "shapes": self.target.shapes,
            "surrogate": None if surrogate is None else repr(two_stage.configuration(surrogate)),
        }
        self.configuration = ", ".join(f"{k}={v!r}" for k, v in sorted(options.items()))
        super().__init__(
            self.target.vars, self.target.shapes, self.target.shared, blocked=blocked, rng=rng
        )
        added = {} if surrogate is None else two_stage.STATISTICS
        if self.pseudo_marginal:
            added = added | kept_estimate.STATISTICS
        if added:
            self.stats_dtypes_shapes = self.stats_dtypes_shapes | added
            self.stats_dtypes = [{k: dtype for k, (dtype, _) in self.stats_dtypes_shapes.items()}]
        self.warm = self.warm_scaling = None
        if warm_start is not None:
            self.warm = warm_points(warm_start, model, self.target, self._history_capacity())
            own = set(self.stats_dtypes_shapes) - {"warning"}
            others = {"bandwidth", "rank", "component", "step_size"} - own
            self.warm_scaling = warm_scaling(warm_start, own, others)
        if self.runs_compiled:  # once, before PyMC forks a process for each chain
            self._density().compiled()
        self._begin_chain(None)

    def __repr__(self):
        name, variables = type(self).__name__, ", ".join(self.target.names)
        return f"{name}(vars=[{variables}], steps_per_draw={self.steps_per_draw}), {self._how}"

    @property
    def runs_compiled(self) -> bool:
        """Whether transitions run compiled, log density included."""
        kernel = self._kernel_of_transitions()
        has_compiled_kernel = kernel is None or kernel.is_compiled
        return self._density().is_compilable and not self.target.n_seeds and has_compiled_kernel

    @property
    def _how(self):
        return "compiled" if self.runs_compiled else "in Python"

    def _kernel_of_transitions(self):
        """Return the kernel whose gradients transitions evaluate, if they evaluate any."""
        return None

    def _transitions_to_tune(self) -> int:
        """Transitions that a first run needs to learn the shape of a target of this dimension."""
        return 1000 + 500 * self.dim

    @abstractmethod
    def _history_capacity(self) -> int:
        """Largest number of points worth taking from a warm start."""

    @abstractmethod
    def _begin(self, position: np.ndarray) -> None:
        """Set up what adapts, for a chain that starts at `position`."""

    @abstractmethod
    def _advance(self, n: int) -> None:
        """Make `n` transitions of `self.chain`."""

    @abstractmethod
    def _moved(self) -> None:
        """Drop what was computed for the position before it was changed from outside."""

    @abstractmethod
    def _end_tuning(self) -> None:
        """Leave a valid frozen step behind, whatever the length of tuning was."""

    @abstractmethod
    def _scaling_statistics(self) -> dict[str, float]:
        """Values of the statistics that show what was learnt."""

    def _begin_chain(self, expected_tune):
        self.tune = True
        self.expected_tune = expected_tune
        self.transition = 0
        self.chain = self.components = self.stage = self.returned = None
        self.draws = new_draws(self.dim)
        self.report = {
            "unmoved": 0,
            "rejections": 0,
            "acceptance": 0.0,
            "evaluations": 0,
            "nonfinite": 0,
        }
        if self.surrogate is not None:
            self.report |= two_stage.new_report()
        self._forget()

    def _lengths(self):
        lengths = {"d": self.dim, "values": self._n_values()}
        if self.stage is not None:
            lengths |= two_stage.lengths(self._new_stage())
        return lengths

    @abstractmethod
    def _forget(self) -> None:
        """Drop what the last chain learnt; new arrays are made at the first transition."""

    def stop_tuning(self):
        """Freeze the adaptation (or let it go on with vanishing steps, `adapt_after_tune=True`)."""
        if self.chain is not None and self.tune:
            with self._all_or_nothing():
                self._end_tuning()
            self._check_tuning()
        super().stop_tuning()

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
        self.returned = chain.position.astype(q0.data.dtype)
        evaluations, nonfinite = (int(chain.counts[i]) for i in (EVALUATIONS, NONFINITE))
        chain.counts[:] = 0
        self.target.n_evaluations += evaluations
        statistics = {
            "accept": chain.outcome[ACCEPTANCE] / self.steps_per_draw,
            "accepted": chain.outcome[ACCEPTED] / self.steps_per_draw,
            "n_evals": float(evaluations),
            "n_nonfinite": float(nonfinite),
            "n_transitions": float(self.steps_per_draw),
            **self._scaling_statistics(),
        }
        if self.stage is not None:
            self.report["calls_made"] += evaluations
            self.report["calls_saved"] += self.steps_per_draw - evaluations
            statistics |= two_stage.statistics(self.stage, self.report)
        if self.pseudo_marginal:
            statistics["estimate"] = chain.value[2]
        if not self.tune:
            record(self.draws, chain.position)
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
        self.target.check_data(x)
        if self.chain is None:
            try:
                self._begin_at(x)
            except BaseException:
                self.chain = None
                raise
            return
        if self.returned is None or not (x == self.returned).all():
            self.chain.position[:] = x
            self._moved()
            if self.stage is not None:
                self.stage.is_current[0] = False
            self._evaluate_current()
        elif inputs_changed and self.target.keeps_estimates:
            self.chain.counts[EVALUATIONS] += 1
            self.chain.value[:2] = self.target.rest(self.chain.position)
            self._mark_impossible()
        elif inputs_changed:
            self._evaluate_current()

    def _begin_at(self, x):
        position = np.array(x, dtype=np.float64)
        self.chain = Chain(
            position=position,
            value=np.zeros(self._n_values()),
            proposal=position.copy(),
            proposed_value=np.zeros(self._n_values()),
            counts=np.zeros(2, dtype=np.int64),
            outcome=np.zeros(2),
        )
        self._begin_components()
        if self.surrogate is not None:
            self.stage = self._new_stage()
        self.report["foreign_seed"] = kept_estimate.foreign_seed(self.target)
        for start in self._starts(x):
            position[:] = start
            self._evaluate_current()
            if self.chain.value[0] > -np.inf:
                break
        else:
            tried = f" in {kept_estimate.FIRST_ESTIMATES} estimates, {kept_estimate.ADVICE}"
            raise SamplingError(
                f"Initial evaluation of {', '.join(self.target.names)} failed: the log density "
                f"at the start {np.array2string(x, threshold=20)} (raveled, unconstrained) is not "
                f"finite{tried if self.target.has_estimates else ''}. Give a start with a positive "
                "probability: pm.sample(initvals=dispersed_starts(model, chains)), or see "
                "model.debug()."
            )
        self._begin(position)
        if not self.tune:
            self._end_tuning()
            if self.warm is None:
                self._check_tuning()

    def _starts(self, x):
        """Points to begin at, the first of which with a finite log density is taken.

        Chains that all begin at one point tell R-hat nothing, so a chain that is about to tune is
        moved from the model's default start as PyMC moves those of NUTS, less far where the model
        is finite nearby only.
        """
        if self.disperse and self.tune and np.array_equal(x, self.target.default_start):
            for i in range(DISPERSAL_TRIES):
                width = 0.5 ** (i // 10)
                yield x + self.rng.uniform(-width, width, self.dim)
        for _ in range(kept_estimate.FIRST_ESTIMATES if self.target.has_estimates else 1):
            yield x

    def _begin_components(self):
        self.components = Components(np.zeros(self.dim), np.zeros(self.dim))

    def _density(self):
        """Return the function of the target that transitions evaluate."""
        return self.target.function

    def _prior(self):
        """Return the part of it that the first stage evaluates."""
        return self.target.prior

    def _n_values(self):
        """Count the numbers that `_density` returns, and the seeds of the estimates among them."""
        return N_TERMS + self.target.n_seeds

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

    def _run(self, compiled, plain, kernel, *arguments):
        """Run transitions compiled, or plain where log density or kernel are not compiled."""
        table = self._density().compiled() if self.runs_compiled else None
        if table is None:
            leading = ((self._plain_density,), self._stage(ModelFunction.plain))
            leading += () if kernel is None else (kernel.gradients,)
            plain(*leading, *arguments)
            self._teach()
            return
        leading = (table, self._stage(ModelFunction.compiled))
        leading += () if kernel is None else (kernel.address(),)
        try:
            compiled(*leading, *arguments)
        except Exception:
            self.target(self.chain.proposal)  # PyTensor's own error names the operation
            raise
        self._teach()

    def _check_surrogate(self):
        two_stage.check(self.surrogate, self.target, self.pseudo_marginal)

    def _new_stage(self):
        return two_stage.new_stage(self.surrogate, self.dim)

    def _stage(self, form):
        """Return the first stage as transitions take it, with the log prior in the same form."""
        if self.stage is None:
            return None
        self.stage.learns[0] = self.adapts
        return self.stage._replace(log_prior=form(self._prior()))

    def _teach(self):
        if self.stage is not None and self.adapts:
            two_stage.refit(self.stage, self.surrogate, self.chain)

    # warnings -------------------------------------------------------------------------------------

    def _report(self, statistics):
        """Add a warning to `statistics`, at most one of each kind in a chain."""
        report, steps = self.report, self.steps_per_draw
        report["unmoved"] = 0 if statistics["accepted"] > 0 else report["unmoved"] + steps
        weight = 1.0 / min(1.0 + self.transition / steps, max(1.0, 500 / steps))
        report["acceptance"] += weight * (statistics["accept"] - report["acceptance"])
        report["evaluations"] += statistics["n_evals"]
        report["nonfinite"] += statistics["n_nonfinite"]
        message = kept_estimate.overestimate(self, statistics)
        if message is None:
            message = self._complaint()
        if message is not None:
            statistics["warning"] = SamplerWarning(*message, "warn")

    def _complaint(self):
        """Return a warning that was not given before in this chain, or None."""
        report, names = self.report, ", ".join(self.target.names)
        has_stuck = not self.tune and report["unmoved"] >= STUCK_AFTER
        if has_stuck and "stuck" not in report and "overestimate" not in report:
            report["stuck"] = 1
            return (
                WarningType.CONVERGENCE,
                f"The chain of {names} is stuck: no move was accepted in the last "
                f"{report['unmoved']} transitions. Tune longer "
                f"(tune={2 * self.default_tune_steps}) or start elsewhere "
                "(initvals=dispersed_starts(model, chains)).",
            )
        if "pending" in report:
            return report.pop("pending")
        if (
            report["evaluations"] >= 500
            and report["nonfinite"] > 0.1 * report["evaluations"]
            and "nonfinite_told" not in report
        ):
            report["nonfinite_told"] = 1
            share = report["nonfinite"] / report["evaluations"]
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
            message = two_stage.complaint(self.stage, report, names)
        return message

    def _complaint_of_mixing(self):
        """Return a warning if the chain mixed badly, at its end or where a usual one ends."""
        n_draws = int(self.draws.cursor[SEEN])
        ends = USUAL_ENDS if self.expected_draws is None else (self.expected_draws,)
        if self.tune or n_draws not in ends or {"stuck", "mixing"} & set(self.report):
            return None
        kept = self.draws.points[: self.draws.cursor[HELD]]
        n_tune = self.transition // self.steps_per_draw - n_draws
        message = slow_mixing(
            kept,
            n_draws,
            max(n_tune, self.default_tune_steps),
            self.steps_per_draw,
            [name + element for name, element in self.target.coordinates()],
            self._learnt_normal(),
        )
        if message is None:
            return None
        self.report["mixing"] = 1
        return WarningType.CONVERGENCE, message

    def _learnt_normal(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return mean (d,) and Cholesky factor (d, d) that tuning learnt, if it learnt them."""
        return None

    def _check_tuning(self):
        """At the end of tuning, remember a warning for the next draw if something is off."""
        acceptance, names = self.report["acceptance"], ", ".join(self.target.names)
        noisy = f" If the estimates are noisy: {kept_estimate.ADVICE}."
        hint = noisy if self.target.has_estimates else ""
        low, high = 0.1 * self.target_accept, 0.5 * (1 + self.target_accept)
        if self.transition < 0.25 * self._transitions_to_tune() and self.warm is None:
            self.report["pending"] = (
                WarningType.CONVERGENCE,
                f"Tuning of {names} was short: {self.transition} transitions in {self.dim} "
                f"dimensions. Take pm.sample(tune={self.default_tune_steps}) or more, or more "
                f"steps_per_draw (now {self.steps_per_draw}).",
            )
        elif not low <= acceptance <= high:
            self.report["pending"] = (
                WarningType.BAD_ACCEPTANCE,
                f"The acceptance of {names} ended tuning at {acceptance:.3f}, far from its target "
                f"{self.target_accept:.3f}. Tune longer (tune={2 * self.default_tune_steps}), and "
                f"compare several chains.{hint}",
            )
        if "pending" in self.report:
            self.report["mixing"] = 1  # its cause will have been told

    # what was learnt ------------------------------------------------------------------------------

    def proposal_covariance(self, x) -> np.ndarray:
        """Covariance of the step's own move from a place.

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
        x = self._checked_places(x)
        if self.chain is None and self.warm is not None and not self._has_learnt():
            self._begin_warm()
        if not self._has_learnt():
            raise RuntimeError(
                f"This {type(self).__name__} has learnt nothing, so there is no proposal to show. "
                f"Make one from earlier draws: {type(self).__name__}(warm_start=idata)."
            )
        return self._covariances_at(x.reshape(-1, self.dim)).reshape(*x.shape, self.dim)

    @abstractmethod
    def _has_learnt(self) -> bool:
        """Whether there is a learnt proposal."""

    @abstractmethod
    def _covariances_at(self, rows: np.ndarray) -> np.ndarray:
        """Covariances (n, d, d) of the step's own move from the rows of an array (n, d)."""

    def _begin_warm(self):
        """Learn from the warm start before there is a chain; a chain will begin anew."""
        rng, self.rng = self.rng, copy.deepcopy(self.rng)
        self._begin_components()
        self._begin(self.warm[-1])
        self.rng = rng

    def _checked_places(self, x):
        names, dim = ", ".join(self.target.names), self.dim
        try:
            places = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"x={x!r}: take an array of shape (..., {dim}), the raveled unconstrained {names}."
            ) from error
        if places.ndim == 0 or places.shape[-1] != dim:
            raise ValueError(
                f"x has shape {places.shape}: take shape (..., {dim}), the raveled unconstrained "
                f"{names}."
            )
        if not np.all(np.isfinite(places)):
            raise ValueError(f"x has NaN or infinite entries: take finite values of {names}.")
        return places

    def _progress_columns(self):
        shown = {"accept": ("Acceptance", "0.2f"), "scaling": ("Scaling", "0.3g")}
        if self.surrogate is None:
            return shown | {"n_evals": ("Evals/draw", "0.0f")}
        return shown | {
            "calls_made": ("Calls made", "0.0f"),
            "calls_saved": ("Calls saved", "0.0f"),
        }
