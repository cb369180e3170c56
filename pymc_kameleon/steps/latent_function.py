"""What the steps for a latent Gaussian process share: the function, its chain, its warnings."""

from abc import abstractmethod
from dataclasses import field
from typing import Any

import numpy as np
from pymc.blocking import RaveledVars
from pymc.exceptions import SamplingError
from pymc.model import Model, modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_kameleon._threads import threads_for
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction
from pymc_kameleon.steps.chain.life_cycle import STUCK_AFTER, Step
from pymc_kameleon.steps.chain.mixing import KeptDraws
from pymc_kameleon.steps.chain.report import Report

WATCHED = 20
"""Number of values of a function whose mixing is monitored."""


@dataclass_state
class LatentFunctionState(StepMethodState):
    """All that the next transition of a chain needs."""

    tune: bool
    expected_tune: int | None
    draw: int
    position: np.ndarray | None
    returned: np.ndarray | None
    report: Report
    configuration: str = field(metadata={"frozen": True})


class LatentFunctionStep(Step):
    """Base of the steps that move the values of a latent function.

    A subclass gives `_transitions` (those of one draw, and their statistics), `_model_changed`, and
    `_begin_learning` and `_end_tuning` for what it learns.
    """

    _state_class = LatentFunctionState
    _computed: tuple[str, ...] = ("_seen_version", "_seen_prior", "_target")
    """Attributes that follow from the state and the other variables."""

    _not_arguments: tuple[str, ...] = ("configuration",)
    """Arguments that are not those of the users of a subclass."""

    _seen_version: int | None
    _seen_prior: Any

    def __init__(
        self,
        vars,
        *,
        configuration: dict[str, Any],
        model: Model | None = None,
        rng: np.random.Generator | None = None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        own = self._read(modelcontext(model), vars, initial_point, compile_kwargs)
        self.configuration = ", ".join(f"{k}={v!r}" for k, v in sorted(configuration.items()))
        super().__init__(*own, blocked=blocked, rng=rng)
        self._begin_chain(None)

    def _read(self, model, vars, initial_point, compile_kwargs) -> tuple[list, list, dict]:
        """Read the model; return the variables of this step, their shapes and the shared ones."""
        self.function = LatentFunction(
            model,
            _one_variable(model, vars),
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
        )
        self._others = OtherVariables(self.function)
        return [self.function.value_variable], [(self.function.size,)], self.function.shared

    @abstractmethod
    def _begin_learning(self) -> None:
        """Set up what adapts, for a new chain."""

    @abstractmethod
    def _model_changed(self, prior_changed: bool) -> None:
        """Drop what was computed from an earlier likelihood, and from an earlier prior if so."""

    @abstractmethod
    def _transitions(self) -> tuple[np.ndarray, dict[str, float]]:
        """Make the transitions of a draw: the new values (N,), and their statistics."""

    @abstractmethod
    def _end_tuning(self) -> None:
        """Leave a valid frozen step behind, whatever the length of tuning was."""

    def _begin_chain(self, expected_tune):
        self.tune = True
        self.expected_tune = expected_tune
        self.draw = 0
        self.position = self.returned = None
        self.report = Report()
        self.draws = KeptDraws()
        self._begin_learning()
        self._forget_model()

    def _fresh_state(self):
        return {"position": np.zeros(self.function.prior.gaussian.size)}

    def _forget_model(self):
        self.__dict__.update(dict.fromkeys(self._computed))

    def __getstate__(self):
        """Leave out what is computed anew: it holds matrices (N, N)."""
        return super().__getstate__() | dict.fromkeys(self._computed)

    @property
    def sampling_state(self) -> LatentFunctionState:
        """All that the next transition needs, apart from the other variables' values."""
        return super().sampling_state

    @sampling_state.setter
    def sampling_state(self, state):
        Step.sampling_state.fset(self, state)
        self._forget_model()

    def stop_tuning(self):
        """Freeze what was learnt."""
        if self.tune:
            with threads_for(self.function.size):
                self._end_tuning()
        super().stop_tuning()

    def astep(self, q0: RaveledVars) -> tuple[RaveledVars, list[dict[str, Any]]]:
        """Make the transitions of a draw from `q0`, given the other variables."""
        with threads_for(self.function.size):
            return self._draw(q0)

    def _draw(self, q0):
        prior_changed = self._refresh()
        if not self._is_at(q0.data, prior_changed):
            self.position = self.function.prior.to_function(q0.data.astype(float))
        if self.returned is None:
            self._check_start()
        before = self.position
        self.position, statistics = self._transitions()
        self.draw += 1
        # By value: rounding may take an ellipse back to the very point that it started from.
        is_unmoved = np.array_equal(self.position, before)
        self.returned = q0.data if is_unmoved else self._free_variable(q0.data.dtype)
        self._report(statistics, moved=not is_unmoved)
        return RaveledVars(self.returned.copy(), q0.point_map_info), [statistics]

    def _refresh(self) -> bool:
        """Follow the other variables; return whether the prior is not the one known here."""
        version = self._others.follow()
        prior = self.function.prior.gaussian
        prior_changed = prior is not self._seen_prior
        if prior_changed or version != self._seen_version:
            self._model_changed(prior_changed)
        self._seen_version, self._seen_prior = version, prior
        return prior_changed

    def _is_at(self, x, prior_changed) -> bool:
        """Whether the position kept is the function that the free variable `x` stands for.

        It is not computed from `x` again where it is: rounding would make a chain that is continued
        in another process differ in the last bits.
        """
        if self.returned is None or not np.array_equal(x, self.returned):
            return False
        return not prior_changed or np.array_equal(self._free_variable(x.dtype), x)

    def _free_variable(self, dtype):
        return self.function.prior.to_variable(self.position).astype(dtype)

    def _check_start(self):
        name, prior = self.function.name, self.function.prior.gaussian
        value = self.function.likelihood.value(prior.predictors(self.position))
        if not np.isfinite(value):
            raise SamplingError(
                f"Initial evaluation of {name} failed: its log likelihood is {value} at the start. "
                "Give a start with a positive probability, pm.sample(initvals=...)."
            )

    def _report(self, statistics, moved):
        """Add a warning to `statistics`, at most one of each kind in a chain."""
        report, name = self.report, self.function.name
        report.unmoved = 0 if moved else report.unmoved + 1
        if not self.tune:
            if report.unmoved >= STUCK_AFTER:
                self._warn_once(
                    "stuck",
                    WarningType.CONVERGENCE,
                    f"The chain of {name} is stuck: it has not moved in the last {report.unmoved} "
                    "draws. Tune longer, or start elsewhere (initvals=...).",
                )
            self.draws.record(self._watched())
            message = self.draws.complaint(self, self.draw, self._watched_names)
            if message is not None and "stuck" not in report.warned:
                self._warn_once("mixing", WarningType.CONVERGENCE, message)
        if report.pending is not None:
            statistics["warning"] = SamplerWarning(*report.pending, "warn")
            report.pending = None

    @property
    def _elements(self):
        size = self.function.prior.gaussian.size
        return np.linspace(0, size - 1, min(WATCHED, size)).astype(int)

    def _watched(self):
        """Values whose mixing is monitored."""
        return self.position[self._elements]

    def _watched_names(self):
        return [self.function.element_name(i) for i in self._elements]

    def _warn_once(self, name, kind, message):
        """Give a warning with the next statistics, if none of this name was given in the chain."""
        if name not in self.report.warned:
            self.report.warned.add(name)
            self.report.pending = kind, message


class OtherVariables:
    """Follows the other variables, for a step and its shallow copies, which share the function.

    A copy is told by the version that another one has seen a change before it. `function` is a
    `LatentFunction` or a `JointModel`.
    """

    def __init__(self, function):
        self.function = function
        self.version = 0
        self._failed = False

    def follow(self) -> int:
        """Bring prior and likelihood up to date; return their version.

        It is a SamplingError if the prior's covariance is not positive definite.
        """
        try:
            changed = self.function.refresh()
            if self._failed:
                # The values that made it fail count as seen, and the prior is still an older one.
                self.function.recompute()
        except ValueError as error:
            self._failed = True
            raise SamplingError(str(error)) from error
        if changed or self._failed:
            self.version += 1
        self._failed = False
        return self.version


def _one_variable(model, vars):
    if vars is None:
        vars = list(model.value_vars)
    vars = list(vars) if isinstance(vars, list | tuple) else [vars]
    if len(vars) != 1:
        names = ", ".join(getattr(v, "name", str(v)) for v in vars)
        raise ValueError(
            f"vars: this step moves one latent function, and here are {names}. Name the function, "
            "vars=[f]; the others get steps of their own in pm.sample."
        )
    return vars[0]
