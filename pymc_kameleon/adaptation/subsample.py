"""What the kernel-adaptive proposals share: history, coordinates, subsample, scalings, schedule."""

import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pymc_kameleon.adaptation.learner import Learner, WarmStart
from pymc_kameleon.kernels import median_bandwidth
from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.mcmc.history import new_history, thinned
from pymc_kameleon.mcmc.loop import Mixture, differences_of
from pymc_kameleon.mcmc.proposals.local_gaussian import no_scatter, scatter
from pymc_kameleon.mcmc.scalings import ScalingBounds, ScalingRecursion, new_scaling
from pymc_kameleon.validation import checked_integer, checked_number, checked_share

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


class Learnt(NamedTuple):
    """What an update of the proposal replaces; fixed between updates.

    `points` (d, n) are a subsample of the history in standardised `coordinates`; `parameters` are
    what the kernel's `gradients` takes, the last of which is its bandwidth.
    """

    points: np.ndarray
    coordinates: Standardization
    parameters: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"points": 1}


class SubsampleLearner(Learner):
    """Base of what `KameleonStep`, `FastKameleonStep` and `PCAKameleonStep` learn with.

    A subclass gives its proposal and what an update learns (`_learn`). Parameters are those of
    `KameleonStep`; `options` are more that a saved state has to share. `here` is what is computed
    at the current position, `typical_size` (m,) the mean variance of a coordinate of local moves
    under each scaling of 1, 0 if unknown, and `next_update` the transitions before the next update.
    """

    growth = 1.1
    """Factor between the transitions at which the proposal is updated."""

    default_gamma = 1.4
    n_scalings = 1
    n_recent = 0
    state_names: ClassVar[tuple[str, ...]] = (
        "scales",
        "history",
        "learnt",
        "scaling",
        "bounds",
        "here",
        "typical_size",
        "next_update",
    )

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
        self.chosen_gamma = None if gamma is None else checked_number("gamma", gamma, at_least=0)
        self.chosen_scaling = (
            None if scaling is None else checked_number("scaling", scaling, above=0)
        )
        self.standardize = bool(standardize)
        self.learns_scaling = bool(learn_scaling)
        self.global_share = checked_share("global_share", global_share)
        self.learning_rate = checked_number("learning_rate", learning_rate, above=0)
        self.learning_decay = checked_number("learning_decay", learning_decay, above=0)
        self.options = options | {
            "kernel": repr(self.kernel),
            "bandwidth": self.bandwidth,
            "n_subsample": self.n_subsample,
            "gamma": self.chosen_gamma,
            "scaling": self.chosen_scaling,
            "learn_scaling": self.learns_scaling,
            "standardize": self.standardize,
            "global_share": self.global_share,
            "learning_rate": self.learning_rate,
            "learning_decay": self.learning_decay,
        }

    def _begin(self, position, rng, warm):
        dim, n = self.dim, self.n_scalings
        usual = self.default_gamma / math.sqrt(dim) if self.standardize else 0.2
        self.gamma = usual if self.chosen_gamma is None else self.chosen_gamma
        self.warm_scaling = None
        self.history = new_history(self.history_capacity, dim, self.n_recent)
        self.scaling = new_scaling(self.chosen_scaling or 1.0, n)
        nothing = np.zeros((dim, 0))
        self.learnt = Learnt(
            points=nothing,
            coordinates=Standardization(np.zeros(dim), np.eye(dim)),
            parameters=self._kernel_parameters(nothing, rng),
        )
        largest = np.full(n, LARGEST_LOG_SCALING)
        self.bounds = ScalingBounds(-largest, largest)
        self.typical_size = np.zeros(n)
        self.next_update = max(100, 25 * dim)
        self._begin_local()
        if warm is not None:
            self.begin_warm(warm, rng)

    def _kernel_parameters(self, points, rng):
        """Parameters of the kernel for `points` (d, n); the last is the bandwidth."""
        return self.kernel.parameters(self._bandwidth_of(points, rng))

    def _bandwidth_of(self, points, rng):
        if not self.kernel.has_bandwidth:
            return math.nan
        if self.bandwidth != "median":
            return self.bandwidth
        return median_bandwidth(thinned(points.T, BANDWIDTH_POINTS, rng).T)

    @abstractmethod
    def _learn(self, history: np.ndarray, rng: np.random.Generator, tune: bool = True) -> None:
        """Learn a new proposal from the rows of `history`."""

    def _begin_local(self) -> None:
        """Set up what is computed at the current position."""
        self.here: Any = no_scatter(self.dim)

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
        if self.chosen_scaling is None and warm.scaling is not None:
            self.warm_scaling = warm.scaling
            self.scaling.log[:] = math.log(warm.scaling)
        points = warm.points[rng.permutation(len(warm.points))]
        self.history.begin_with(points)
        self.scales.log_scale[:] = np.log(points.std(axis=0) + 1e-300)
        self._learn(points, rng)

    def begin_with(self, gaussian, rng):  # noqa: D102
        n = min(DRAWS_PER_DIMENSION * self.dim, self.history_capacity)
        normals = rng.standard_normal((n, self.dim))
        self.begin_warm(WarmStart(gaussian.unwhiten(normals.T), None), rng)

    # what transitions take ------------------------------------------------------------------------

    def mixture(self, tune):  # noqa: D102
        share = 0.0
        if self.standardize:
            share = (COORDINATE_SHARE if tune else 0.0) if self.has_learnt else 1.0
        has_differences = self.learnt.points.shape[1] > 1
        return Mixture(
            self.scales,
            differences_of(self.learnt.points, self.learnt.coordinates.factor),
            share,
            (1.0 - share) * self.global_share if has_differences else 0.0,
        )

    def recursion(self):  # noqa: D102
        return ScalingRecursion(
            self.scaling,
            self.bounds,
            self.target_accept,
            self.learning_rate,
            self.learning_decay,
            self.learns_scaling and self.learnt.points.shape[1] > 1,
        )

    def invalidate(self):  # noqa: D102
        self.here.is_current[0] = False

    # learning -------------------------------------------------------------------------------------

    follows_schedule = True
    """Whether updates come at transition counts that grow by a constant factor."""

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        growth = self.growth
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
        if not self.has_learnt and self.follows_schedule and self.standardize:
            later = self.history.later_half()
            if len(np.unique(later, axis=0)) > 2 * self.dim:
                self._learn(later, rng)

    def _learn_coordinates(self, history, rng):
        """Learn location, scale, subsample and bandwidth from the rows of `history`."""
        points = thinned(history, self.n_subsample, rng)
        coordinates = Standardization(np.zeros(self.dim), np.eye(self.dim))
        if self.standardize:
            coordinates = standardization(history, np.exp(self.scales.log_scale))
        points = coordinates.whiten(points)
        self.learnt = Learnt(points, coordinates, self._kernel_parameters(points, rng))
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
        known, chooses = self.typical_size > 0, self.chosen_scaling is None
        if chooses and self.warm_scaling is None:
            self.scaling.log[~known] = unit[~known] + math.log(0.5)
        if self.standardize:
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
        if not self.standardize or not self.has_learnt:
            return None
        return self.learnt.coordinates

    def statistics(self) -> dict[str, Any]:  # noqa: D102
        return {"scaling": math.exp(self.scaling.log[0]), "bandwidth": self.learnt_bandwidth()}

    def learnt_bandwidth(self) -> float:
        """Return the bandwidth, NaN while it is not known."""
        unknown = self.bandwidth == "median" and not self.has_learnt
        if unknown or not self.kernel.has_bandwidth:
            return math.nan
        return float(self.learnt.parameters[-1])
