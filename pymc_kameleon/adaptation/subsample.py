"""What the kernel-adaptive proposals share: history, coordinates, subsample, scalings, schedule."""

import math
from abc import abstractmethod
from typing import Annotated, Any, NamedTuple

import numpy as np
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation.history import (
    History,
    new_history,
    record,
    thinned,
)
from pymc_kameleon.adaptation.learner import Adaptation, Learner, LearnerState, WarmStart
from pymc_kameleon.adaptation.scaling import ScalingBounds, ScalingRecursion
from pymc_kameleon.adaptation.standardization import standardization
from pymc_kameleon.kernels import median_bandwidth
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.layout import floats
from pymc_kameleon.mcmc.proposals import Scaling
from pymc_kameleon.mcmc.proposals.local_gaussian import ScatterHere, scatter
from pymc_kameleon.mcmc.run import Mixture, differences_of, observe
from pymc_kameleon.validation import checked_integer, checked_number, checked_share

__all__ = ["Learnt", "SubsampleAdaptation", "SubsampleLearner", "SubsampleState"]

COORDINATE_SHARE = 0.2
"""Share of one-coordinate moves while tuning, after the initial phase of nothing else.

They learn the scale of each coordinate from nothing; without them a chain on a correlated 20-d
Gaussian that starts in the tail needs four times as many evaluations to arrive.
"""

LARGEST_LOG_SCALING = 15.0
"""Bound of a log scaling in raw coordinates; in standardised ones it follows the moves' size."""

BANDWIDTH_POINTS = 200
SIZE_POINTS = 20

DRAWS_PER_DIMENSION = 20
"""Draws from a Gaussian that is roughly the target, with which a chain may begin: so few that the
first update no longer sees them."""


class SubsampleAdaptation(Adaptation):
    """Choices of a proposal that is learnt from a subsample of the history.

    Parameters are those of `KameleonStep`.
    """

    growth = 1.1
    """Factor between the transitions at which the proposal is updated."""

    default_gamma = 1.4
    n_scalings = 1
    n_recent = 0

    def __init__(
        self,
        *,
        kernel,
        bandwidth,
        n_subsample,
        gamma,
        scaling,
        learn_scaling,
        standardize,
        global_share,
        learning_rate,
        learning_decay,
        **options,
    ):
        self.kernel = self.transition_kernel = kernel
        if isinstance(bandwidth, str):
            if bandwidth != "median":
                raise ValueError(f'bandwidth={bandwidth!r}: take a number above 0, or "median".')
            self.bandwidth = bandwidth
        else:
            self.bandwidth = checked_number("bandwidth", bandwidth, above=0)
        self.n_subsample = checked_integer("n_subsample", n_subsample, 2)
        self.history_capacity = 4 * self.n_subsample
        self.gamma = None if gamma is None else checked_number("gamma", gamma, at_least=0)
        self.scaling = None if scaling is None else checked_number("scaling", scaling, above=0)
        self.standardize = bool(standardize)
        self.learn_scaling = bool(learn_scaling)
        self.global_share = checked_share("global_share", global_share)
        self.learning_rate = checked_number("learning_rate", learning_rate, above=0)
        self.learning_decay = checked_number("learning_decay", learning_decay, above=0)
        self.options = options | {
            "kernel": repr(self.kernel),
            "bandwidth": self.bandwidth,
            "n_subsample": self.n_subsample,
            "gamma": self.gamma,
            "scaling": self.scaling,
            "learn_scaling": self.learn_scaling,
            "standardize": self.standardize,
            "global_share": self.global_share,
            "learning_rate": self.learning_rate,
            "learning_decay": self.learning_decay,
        }

    @abstractmethod
    def new_learner(
        self, dim: int, target_accept: float, rng: np.random.Generator
    ) -> "SubsampleLearner":
        """Return a learner that has seen nothing."""

    def start(self, position, rng, warm, target_accept):  # noqa: D102
        learner = self.new_learner(position.size, target_accept, rng)
        if warm is not None:
            learner.begin_warm(warm, rng)
        return learner

    def gamma_in(self, dim: int) -> float:
        """Return gamma, which depends on the dimension unless it was chosen."""
        if self.gamma is not None:
            return self.gamma
        return self.default_gamma / math.sqrt(dim) if self.standardize else 0.2

    def kernel_parameters(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Parameters of the kernel for `points` (d, n); the last is the bandwidth."""
        return self.kernel.parameters(self.bandwidth_of(points, rng))

    def bandwidth_of(self, points: np.ndarray, rng: np.random.Generator) -> float:
        """Bandwidth for `points` (d, n)."""
        if not self.kernel.has_bandwidth:
            return math.nan
        if self.bandwidth != "median":
            return self.bandwidth
        return median_bandwidth(thinned(points.T, BANDWIDTH_POINTS, rng).T)


class Learnt(NamedTuple):
    """What an update of the proposal replaces; fixed between updates.

    Attributes
    ----------
    points : array, shape (d, n)
        Subsample of the history in standardised coordinates.
    coordinates : Standardization
    parameters : array
        What the kernel's `gradients` takes; the last is its bandwidth.
    """

    points: Annotated[np.ndarray, floats("d", "n")]
    coordinates: Standardization
    parameters: Annotated[np.ndarray, floats("parameters")]


class SubsampleObserver(NamedTuple):
    """Records the history, and learns the scaling of local moves if `learns`."""

    history: History
    recursion: ScalingRecursion
    learns: bool


def _observe(observer, position, acceptance, index):
    if observer.learns:
        observe(observer.recursion, position, acceptance, index)
    record(observer.history, position)


observe.register(SubsampleObserver, _observe, allocates=False)


@dataclass_state
class SubsampleState(LearnerState):
    """State of a learner with a subsample."""

    history: History
    learnt: Learnt
    scaling: Scaling
    bounds: ScalingBounds
    here: ScatterHere
    typical_size: Annotated[np.ndarray, floats("scalings")]
    next_update: int


class SubsampleLearner(Learner):
    """Base of the learners of `KameleonStep`, `FastKameleonStep` and `PCAKameleonStep`.

    A subclass gives its proposal and what an update learns (`_learn`).
    """

    _state_class = SubsampleState

    def __init__(
        self,
        choices: SubsampleAdaptation,
        dim: int,
        target_accept: float,
        rng: np.random.Generator,
    ):
        super().__init__(dim)
        self.choices, self.target_accept = choices, target_accept
        self.gamma = choices.gamma_in(dim)
        self.warm_scaling = None
        self.history = new_history(choices.history_capacity, dim, choices.n_recent)
        n, nothing = choices.n_scalings, np.zeros((dim, 0))
        self.scaling = Scaling(np.full(n, math.log(choices.scaling or 1.0)), np.zeros(n))
        self.learnt = Learnt(
            points=nothing,
            coordinates=Standardization(np.zeros(dim), np.eye(dim)),
            parameters=choices.kernel_parameters(nothing, rng),
        )
        self._n_parameters = self.learnt.parameters.size
        largest = np.full(n, LARGEST_LOG_SCALING)
        self.bounds = ScalingBounds(-largest, largest)
        self.typical_size = np.zeros(n)
        self.next_update = max(100, 25 * dim)
        self._begin_local()

    @abstractmethod
    def _learn(self, history: np.ndarray, rng: np.random.Generator, tune: bool = True) -> None:
        """Learn a new proposal from the rows of `history`."""

    def _begin_local(self) -> None:
        """Set up what is computed at the current position."""
        scatters = (np.zeros((self.dim, self.dim)) for _ in range(2))
        self.here = ScatterHere(np.zeros(1, dtype=np.bool_), *scatters)

    def _move_sizes(self, points: np.ndarray) -> np.ndarray:
        """Mean variance of a coordinate under each scaling of 1, over points `points` (d, k)."""
        proposal, found = self.proposal(compiled=False), np.empty((self.dim, self.dim))
        traces = []
        for u in points.T:
            scatter(proposal, np.ascontiguousarray(u), found)
            traces.append(np.trace(found))
        return np.array([np.mean(traces) / self.dim])

    def begin_warm(self, warm, rng):
        """Learn from earlier draws before the first transition."""
        if self.choices.scaling is None and warm.scaling is not None:
            self.warm_scaling = warm.scaling
            self.scaling.log[:] = math.log(warm.scaling)
        points = warm.points[rng.permutation(len(warm.points))]
        self.history.begin_with(points)
        self.scales.log_scale[:] = np.log(points.std(axis=0) + 1e-300)
        self._learn(points, rng)

    def begin_with(self, gaussian, rng):  # noqa: D102
        n = min(DRAWS_PER_DIMENSION * self.dim, self.choices.history_capacity)
        normals = rng.standard_normal((n, self.dim))
        self.begin_warm(WarmStart(gaussian.unwhiten(normals.T), None), rng)

    # what transitions take ------------------------------------------------------------------------

    def mixture(self, tune):  # noqa: D102
        share = 0.0
        if self.choices.standardize:
            share = (COORDINATE_SHARE if tune else 0.0) if self.has_learnt else 1.0
        has_differences = self.learnt.points.shape[1] > 1
        return Mixture(
            self.scales,
            differences_of(self.learnt.points, self.learnt.coordinates.factor),
            share,
            (1.0 - share) * self.choices.global_share if has_differences else 0.0,
        )

    def observer(self):  # noqa: D102
        choices = self.choices
        recursion = ScalingRecursion(
            self.scaling,
            self.bounds,
            self.target_accept,
            choices.learning_rate,
            choices.learning_decay,
        )
        learns = choices.learn_scaling and self.learnt.points.shape[1] > 1
        return SubsampleObserver(self.history, recursion, learns)

    def invalidate(self):  # noqa: D102
        self.here.is_current[0] = False

    # learning -------------------------------------------------------------------------------------

    follows_schedule = True
    """Whether updates come at transition counts that grow by a constant factor."""

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        growth = self.choices.growth
        while self.next_update < transition:
            self.next_update = math.ceil(growth * self.next_update)
        if self.next_update == transition:
            self.next_update = math.ceil(growth * self.next_update)
            return 0
        return min(n, self.next_update - transition)

    def update(self, position, tune, rng):  # noqa: D102
        history = self.history.later_half()
        if len(history) and np.any(history != history[0]):
            self._learn(history, rng, tune)

    def end_tuning(self, position, rng):  # noqa: D102
        if not self.has_learnt and self.follows_schedule and self.choices.standardize:
            later = self.history.later_half()
            if len(np.unique(later, axis=0)) > 2 * self.dim:
                self._learn(later, rng)

    def _learn_coordinates(self, history, rng):
        """Learn location, scale, subsample and bandwidth from the rows of `history`."""
        points = thinned(history, self.choices.n_subsample, rng)
        coordinates = Standardization(np.zeros(self.dim), np.eye(self.dim))
        if self.choices.standardize:
            coordinates = standardization(history, np.exp(self.scales.log_scale))
        points = coordinates.whiten(points)
        self.learnt = Learnt(points, coordinates, self.choices.kernel_parameters(points, rng))
        self.invalidate()

    def _rescale(self, rng):
        """Choose the scalings at the first update, and keep the sizes of local moves across others.

        At a scaling of `unit` a local move has the size of the best random walk on a Gaussian of
        the history's variance (Roberts et al. 1997). In raw coordinates a later update changes no
        scaling, and there are no bounds: the published settings have neither.
        """
        points = self.learnt.points
        chosen = rng.integers(points.shape[1], size=SIZE_POINTS)
        sizes = self._move_sizes(np.ascontiguousarray(points[:, chosen]))
        sizes = np.maximum(sizes, 1e-300)
        spread = max(float(points.var(axis=1).mean()), 1e-300)
        unit = 0.5 * np.log(spread / sizes) + math.log(2.38 / math.sqrt(self.dim))
        known, chooses = self.typical_size > 0, self.choices.scaling is None
        if chooses and self.warm_scaling is None:
            self.scaling.log[~known] = unit[~known] + math.log(0.5)
        if self.choices.standardize:
            self.scaling.log[known] += 0.5 * np.log(self.typical_size[known] / sizes[known])
            smallest, largest = unit + math.log(0.05), unit + math.log(100.0)
            if chooses:
                self.scaling.log[:] = np.clip(self.scaling.log, smallest, largest)
            self.bounds = ScalingBounds(smallest, largest)
        self.typical_size = sizes

    # what was learnt ------------------------------------------------------------------------------

    @property
    def has_learnt(self):  # noqa: D102
        return self.learnt.points.shape[1] > 0

    def normal(self):  # noqa: D102
        if not self.choices.standardize or not self.has_learnt:
            return None
        return self.learnt.coordinates

    def statistics(self) -> dict[str, Any]:  # noqa: D102
        return {"scaling": math.exp(self.scaling.log[0]), "bandwidth": self.learnt_bandwidth()}

    def learnt_bandwidth(self) -> float:
        """Return the bandwidth, NaN while it is not known."""
        unknown = self.choices.bandwidth == "median" and not self.has_learnt
        if unknown or not self.choices.kernel.has_bandwidth:
            return math.nan
        return float(self.learnt.parameters[-1])

    def lengths(self):  # noqa: D102
        return super().lengths() | {
            "history": self.choices.history_capacity,
            "recent": self.choices.n_recent,
            "scalings": self.choices.n_scalings,
            "parameters": self._n_parameters,
        }
