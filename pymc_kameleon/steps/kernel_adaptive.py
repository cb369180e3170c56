"""What steps with a locally adapted proposal share: coordinates, scalings and updates."""

import math
from abc import abstractmethod
from typing import Annotated, Any

import numpy as np
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation import (
    History,
    Standardization,
    new_history,
    standardization,
    thinned,
)
from pymc_kameleon.kernels import median_bandwidth
from pymc_kameleon.layout import floats
from pymc_kameleon.steps.base import MetropolisHastingsState, MetropolisHastingsStep
from pymc_kameleon.transitions.mixture import N_UNIFORMS, Here, Learnt, Scaling, Settings
from pymc_kameleon.validation import checked_integer, checked_number, checked_share

__all__ = ["KernelAdaptiveState", "KernelAdaptiveStep"]

GROWTH = 1.1
"""Factor between the transitions at which the proposal is updated, by default."""

COMPONENT_SHARE = 0.2
"""Share of one-coordinate moves while tuning, after the initial phase of nothing else.

They learn the scale of each coordinate from nothing; without them a chain on a correlated 20-d
Gaussian that starts in the tail needs four times as many evaluations to arrive.
"""

JUMP_SHARE = 0.1
"""Share of the difference moves that add the whole difference, which crosses between modes."""

NOISE = 0.01
"""Standard deviation of the noise of difference moves, in standardised coordinates."""

LARGEST_LOG_SCALING = 15.0
"""Bound of a log scaling in raw coordinates; in standardised ones it follows the moves' size."""

BANDWIDTH_POINTS = 200
SIZE_POINTS = 20


@dataclass_state
class KernelAdaptiveState(MetropolisHastingsState):
    """State of a step with a locally adapted proposal."""

    history: History | None
    learnt: Learnt | None
    scaling: Scaling | None
    here: Here | None
    typical_size: Annotated[np.ndarray, floats("scalings")]
    next_update: int
    spare: np.ndarray


class KernelAdaptiveStep(MetropolisHastingsStep):
    """Base of `KameleonStep`, `FastKameleonStep` and `PCAKameleonStep`.

    A subclass gives the module of its transitions and what an update learns (`_update`).
    """

    default_tune_steps = 2000
    stats_dtypes_shapes = MetropolisHastingsStep.stats_dtypes_shapes | {
        "bandwidth": (np.float64, [])
    }
    _state_class = KernelAdaptiveState

    transitions: Any
    """Module with `run_compiled` and `run_plain`."""

    growth = GROWTH
    n_recent = 0
    extra_normals = 0

    def __init__(
        self,
        vars,
        *,
        kernel,
        bandwidth,
        n_subsample,
        gamma,
        default_gamma: float,
        scaling,
        learn_scaling,
        standardize,
        global_share,
        learning_rate,
        learning_decay,
        configuration: dict[str, Any],
        **options,
    ):
        self.kernel = kernel
        if isinstance(bandwidth, str):
            if bandwidth != "median":
                raise ValueError(f'bandwidth={bandwidth!r}: take a number above 0, or "median".')
            self.bandwidth = bandwidth
        else:
            self.bandwidth = checked_number("bandwidth", bandwidth, above=0)
        self.n_subsample = checked_integer("n_subsample", n_subsample, 2)
        if gamma is not None:
            gamma = checked_number("gamma", gamma, at_least=0)
        self.initial_scaling = (
            None if scaling is None else checked_number("scaling", scaling, above=0)
        )
        self.standardize = bool(standardize)
        self.learn_scaling = bool(learn_scaling)
        self.global_share = checked_share("global_share", global_share)
        self.learning_rate = checked_number("learning_rate", learning_rate, above=0)
        self.learning_decay = checked_number("learning_decay", learning_decay, above=0)
        self._workspace = self._workspace_of = None
        super().__init__(
            vars,
            configuration=configuration
            | {
                "kernel": repr(self.kernel),
                "bandwidth": self.bandwidth,
                "n_subsample": self.n_subsample,
                "gamma": gamma,
                "scaling": scaling,
                "learn_scaling": self.learn_scaling,
                "standardize": self.standardize,
                "global_share": self.global_share,
                "learning_rate": self.learning_rate,
                "learning_decay": self.learning_decay,
            },
            **options,
        )
        if gamma is None:
            gamma = default_gamma / math.sqrt(self.dim) if self.standardize else 0.2
        self.gamma = gamma

    # what a subclass gives ------------------------------------------------------------------------

    @abstractmethod
    def _update(self, history: np.ndarray) -> None:
        """Learn a new proposal from the rows of `history`."""

    @abstractmethod
    def _begin_local(self) -> None:
        """Set up what is local to the sampler, for a proposal without points."""

    @abstractmethod
    def _local(self) -> tuple:
        """Return what transitions take between `learnt` and the scalings."""

    @abstractmethod
    def _new_workspace(self) -> Any:
        """Scratch arrays of the transitions."""

    @abstractmethod
    def _scatter_at(self, standardized: np.ndarray) -> np.ndarray:
        """Covariance (d, d) of a local move under a scaling of 1, without its isotropic part."""

    def _local_covariance(self, standardized):
        """Covariance (d, d) of a local move from a place, in standardised coordinates."""
        variance = math.exp(2 * self.scaling.log[0])
        return self.gamma**2 * np.eye(self.dim) + variance * self._scatter_at(standardized)

    def _move_sizes(self, points):
        """Mean variance of a coordinate under each scaling of 1, over places `points` (d, k)."""
        traces = [np.trace(self._scatter_at(np.ascontiguousarray(u))) for u in points.T]
        return np.array([np.mean(traces) / self.dim])

    # life cycle -----------------------------------------------------------------------------------

    def _history_capacity(self):
        return 4 * self.n_subsample

    def _lengths(self):
        return super()._lengths() | {
            "history": self._history_capacity(),
            "recent": self.n_recent,
            "scalings": self._n_scalings(),
            "parameters": self._kernel_parameters(np.zeros((self.dim, 0))).size,
        }

    def _forget(self):
        self.history = self.learnt = self.scaling = self.here = None
        self._workspace = self._workspace_of = None
        self.typical_size = np.zeros(self._n_scalings())
        self.next_update = 0
        self.spare = np.zeros(0)

    def _n_scalings(self):
        return 1

    def _begin(self, position):
        self.history = new_history(self._history_capacity(), self.dim, self.n_recent)
        start = self.initial_scaling or self.warm_scaling or 1.0
        n = self._n_scalings()
        self.scaling = Scaling(np.full(n, math.log(start)), np.zeros(n))
        nothing = np.zeros((self.dim, 0))
        self.learnt = Learnt(
            points=nothing,
            location=np.zeros(self.dim),
            factor=np.eye(self.dim),
            parameters=self._kernel_parameters(nothing),
            smallest_log_scaling=np.full(n, -LARGEST_LOG_SCALING),
            largest_log_scaling=np.full(n, LARGEST_LOG_SCALING),
        )
        self._begin_local()
        self._keep_size()
        self.next_update = max(100, 25 * self.dim)
        if self.warm is not None:
            points = self.warm[self.rng.permutation(len(self.warm))]
            self.history.points[: len(points)] = points
            self.history.cursor[:3] = (len(points), 1, len(points))
            self.components.log_scale[:] = np.log(points.std(axis=0) + 1e-300)
            self._update(points)

    def _end_tuning(self):
        if not self._has_points() and self._follows_schedule() and self.standardize:
            later = self.history.later_half()
            if len(np.unique(later, axis=0)) > 2 * self.dim:
                self._update(later)

    def __getstate__(self):
        """Leave scratch memory out of what is sent to other processes."""
        return self.__dict__ | {"_workspace": None, "_workspace_of": None}

    def _moved(self):
        self.here.is_current[0] = False

    def _has_points(self):
        return self.learnt.points.shape[1] > 0

    # transitions ----------------------------------------------------------------------------------

    def _advance(self, n):
        settings = self._current_settings()
        done = 0
        while done < n:
            count = self._transitions_before_update(self.transition + done, n - done)
            if count:
                self._make_transitions(count, settings)
                done += count
            if done < n:
                history = self.history.later_half()
                if len(history) and np.any(history != history[0]):
                    with self._all_or_nothing():
                        self._update(history)
                settings = self._current_settings()
                self._make_transitions(1, settings)
                done += 1

    def _make_transitions(self, n, settings):
        if self._workspace_of is not self.learnt:
            self._workspace, self._workspace_of = self._new_workspace(), self.learnt
        self._run(
            self.transitions.run_compiled,
            self.transitions.run_plain,
            self._kernel_of_transitions(),
            self.chain,
            self.here,
            self.learnt,
            *self._local(),
            self.scaling,
            self.components,
            self.history,
            self._workspace,
            settings,
            self.rng.standard_normal((n, self.dim + self.extra_normals)),
            self.rng.random((n, N_UNIFORMS)),
        )

    def _kernel_of_transitions(self):
        return self.kernel

    def _current_settings(self):
        component_share = 0.0
        if self.standardize:
            component_share = (COMPONENT_SHARE if self.tune else 0.0) if self._has_points() else 1.0
        return Settings(
            gamma=self.gamma,
            component_share=component_share,
            global_share=(1.0 - component_share) * self.global_share,
            difference_scale=2.38 / math.sqrt(2 * self.dim),
            jump_share=JUMP_SHARE,
            noise=NOISE,
            target_accept=self.target_accept,
            step_factor=self.learning_rate,
            step_power=self.learning_decay,
            learn=self.learn_scaling,
            adapt=self.adapts,
        )

    def _follows_schedule(self):
        """Whether updates come at transition counts that grow by a constant factor."""
        return True

    def _transitions_before_update(self, transition, n):
        """Transitions, at most `n`, before the next update."""
        if not self.adapts:
            return n
        while self.next_update < transition:
            self.next_update = math.ceil(self.growth * self.next_update)
        if self.next_update == transition:
            self.next_update = math.ceil(self.growth * self.next_update)
            return 0
        return min(n, self.next_update - transition)

    # adaptation -----------------------------------------------------------------------------------

    def _learn_coordinates(self, history):
        """Learn location, scale, subsample and bandwidth from the rows of `history`."""
        points = thinned(history, self.n_subsample, self.rng)
        learnt = Standardization(np.zeros(self.dim), np.eye(self.dim))
        if self.standardize:
            learnt = standardization(history, np.exp(self.components.log_scale))
        points = learnt.whiten(points)
        self.learnt = self.learnt._replace(
            points=points,
            location=learnt.location,
            factor=learnt.factor,
            parameters=self._kernel_parameters(points),
        )
        self.here.is_current[0] = False

    def _whiten(self, rows):
        """Standardised coordinates of the rows of an array (n, d), as an array (d, n)."""
        return Standardization(self.learnt.location, self.learnt.factor).whiten(rows)

    def _kernel_parameters(self, points):
        return self.kernel.parameters(self._bandwidth_of(points))

    def _bandwidth_of(self, points):
        if not self.kernel.has_bandwidth:
            return math.nan
        if self.bandwidth != "median":
            return self.bandwidth
        return median_bandwidth(thinned(points.T, BANDWIDTH_POINTS, self.rng).T)

    def _rescale(self):
        """Choose the scalings at the first update, and keep the sizes of local moves across others.

        At a scaling of `unit` a local move has the size of the best random walk on a Gaussian of
        the history's variance (Roberts et al. 1997). In raw coordinates a later update changes no
        scaling, and there are no bounds: the published settings have neither.
        """
        points = self.learnt.points
        chosen = self.rng.integers(points.shape[1], size=SIZE_POINTS)
        sizes = self._move_sizes(np.ascontiguousarray(points[:, chosen]))
        sizes = np.maximum(sizes, 1e-300)
        spread = max(float(points.var(axis=1).mean()), 1e-300)
        unit = 0.5 * np.log(spread / sizes) + math.log(2.38 / math.sqrt(self.dim))
        known, chooses = self.typical_size > 0, self.initial_scaling is None
        if chooses and self.warm_scaling is None:
            self.scaling.log[~known] = unit[~known] + math.log(0.5)
        if self.standardize:
            self.scaling.log[known] += 0.5 * np.log(self.typical_size[known] / sizes[known])
            smallest, largest = unit + math.log(0.05), unit + math.log(100.0)
            if chooses:
                self.scaling.log[:] = np.clip(self.scaling.log, smallest, largest)
            self.learnt = self.learnt._replace(
                smallest_log_scaling=smallest, largest_log_scaling=largest
            )
        self.typical_size = sizes

    def _keep_size(self):
        """With the numbers that are still free, the size of the state does not depend on draws."""
        self.spare = np.zeros(self._largest_size() - self._size())

    def _size(self):
        """Count the numbers in the arrays of the state that have grown so far."""
        return self.learnt.points.size

    def _largest_size(self):
        """Count the numbers that those arrays may come to hold."""
        return self.dim * self.n_subsample

    # what was learnt ------------------------------------------------------------------------------

    def _has_learnt(self):
        return self.learnt is not None and self._has_points()

    def _learnt_normal(self):
        if not self.standardize or not self._has_points():
            return None
        return self.learnt.location, self.learnt.factor

    def _covariances_at(self, rows):
        places, factor = self._whiten(rows).T, self.learnt.factor
        local = [self._local_covariance(np.ascontiguousarray(place)) for place in places]
        return np.array([factor @ r @ factor.T for r in local])

    def _scaling_statistics(self):
        return {
            "scaling": math.exp(self.scaling.log[0]),
            "bandwidth": self._learnt_bandwidth(),
        }

    def _learnt_bandwidth(self):
        unknown = self.bandwidth == "median" and not self._has_points()
        if unknown or not self.kernel.has_bandwidth:
            return math.nan
        return float(self.learnt.parameters[-1])
