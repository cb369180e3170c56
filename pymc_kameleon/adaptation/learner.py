"""What a chain learns with: the user's choices, what was learnt, and how it goes on."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pymc.step_methods.state import DataClassState, WithSamplingState, dataclass_state

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.loop import Mixture, no_differences
from pymc_kameleon.mcmc.proposals import covariance_at
from pymc_kameleon.mcmc.saved_state import check_like
from pymc_kameleon.mcmc.scalings import (
    NO_RECURSION,
    WIDEST_BOUNDS,
    CoordinateScales,
    Scaling,
    ScalingRecursion,
    new_scaling,
)
from pymc_kameleon.validation import checked_number


class WarmStart(NamedTuple):
    """Earlier draws (n, d) to learn from, and the scaling that they were made with, if known."""

    points: np.ndarray
    scaling: float | None


@dataclass_state
class LearnerState(DataClassState):
    """All that a learner needs to go on: its class, and its `state_names` with their values."""

    kind: str
    values: dict[str, Any]


class SavedLearner(WithSamplingState):
    """How a learner is saved, and goes on.

    A subclass names in `state_names` what a saved state has to hold, and in `varying` which axes of
    these have no fixed length.
    """

    state_names: ClassVar[tuple[str, ...]] = ("scales",)
    varying: ClassVar[dict[str, int]] = {}

    @property
    def is_consistent(self) -> bool:
        """Whether arrays whose lengths vary together have the same."""
        return True

    @property
    def sampling_state(self) -> LearnerState:
        """All that is needed to go on."""
        values = {name: copy.deepcopy(getattr(self, name)) for name in self.state_names}
        return LearnerState(kind=type(self).__name__, values=values)

    @sampling_state.setter
    def sampling_state(self, state: LearnerState) -> None:
        self._set_state(state)

    def _set_state(self, state):
        if state.kind != type(self).__name__:
            raise TypeError(
                f"sampling_state.learner is that of a {state.kind}, and should be that of a "
                f"{type(self).__name__}."
            )
        self.__dict__.update(copy.deepcopy(state.values))

    def check_state(self, fresh: "SavedLearner") -> None:
        """Raise an error unless the arrays that were set are as in a `fresh` learner."""
        own, new = ({name: getattr(x, name) for name in x.state_names} for x in (self, fresh))
        check_like("sampling_state.learner", own, new, self.varying)
        if not self.is_consistent:
            raise ValueError("sampling_state.learner has arrays whose lengths do not fit.")


class Learner(SavedLearner, ABC):
    """What a chain learns with.

    A step has one that holds the choices alone; `start` returns that of a chain, which has all else
    too. A subclass names in `options` the choices that a saved state has to share.
    `history_capacity` is the largest number of points worth taking from a warm start, and
    `transition_kernel` the kernel whose gradients transitions evaluate, None if they evaluate none.
    """

    options: dict[str, Any]
    history_capacity: int
    transition_kernel = None

    def check(self, names: list[str], dim: int) -> None:
        """Raise an error if a choice does not fit the variables `names` with `dim` elements."""

    def start(
        self,
        position: np.ndarray,
        rng: np.random.Generator,
        target_accept: float,
        warm: WarmStart | None = None,
    ) -> Self:
        """Return what a chain that starts at `position` (d,) learns with."""
        started = copy.copy(self)
        started.dim, started.target_accept = position.size, target_accept
        started.scales = CoordinateScales(np.zeros(position.size), np.zeros(position.size))
        started._begin(position, rng, warm)
        return started

    @abstractmethod
    def _begin(
        self, position: np.ndarray, rng: np.random.Generator, warm: WarmStart | None
    ) -> None:
        """Set up all that belongs to one chain, in new arrays."""

    # what transitions take ------------------------------------------------------------------------

    n_more_normals = 0
    """Normal random numbers that a transition takes beside one for each coordinate."""

    n_more_uniforms = 0
    """Uniform random numbers that a transition takes beside `N_UNIFORMS`."""

    @abstractmethod
    def proposal(self, compiled: bool) -> Any:
        """Return the proposal, registered in `mcmc.proposals`."""

    def mixture(self, tune: bool) -> Mixture:
        """Return the moves beside the proposal's, and their shares: by default none."""
        return Mixture(self.scales, no_differences(self.dim), 0.0, 0.0)

    def recursion(self) -> ScalingRecursion:
        """Return how the scaling of the proposal is learnt: by default not at all."""
        return NO_RECURSION

    def moves(self, tune: bool, compiled: bool) -> tuple[Any, Mixture, ScalingRecursion]:
        """Return all that the loop of transitions takes: proposal, other moves, and recursion."""
        return self.proposal(compiled), self.mixture(tune), self.recursion()

    @property
    def is_compilable(self) -> bool:
        """Whether the proposal can run compiled."""
        return self.transition_kernel is None or self.transition_kernel.is_compiled

    def before_transitions(self, n: int, adapts: bool, rng: np.random.Generator) -> None:
        """Prepare for `n` transitions, which adapt or not."""

    def is_foreseeable(self, tune: bool, adapts: bool) -> bool:
        """Whether the next transition depends on earlier log densities by acceptance alone."""
        return not adapts

    def expected_at(self, x: np.ndarray) -> float | None:
        """Return what the log density at `x` (d,) is taken for, if anything was learnt of it."""
        return None

    # learning -------------------------------------------------------------------------------------

    def keep(self, point: np.ndarray, terms: np.ndarray) -> None:
        """Learn from an evaluation at `point` (d,) that was not a transition's, with its terms."""

    def keep_within(self, bounds: np.ndarray) -> None:
        """Move angles of what is known into their bounds (2, d), which others do not have."""

    def begin_with_scales(self, scales: np.ndarray) -> None:
        """Begin with the scales (d,) of the first moves."""
        self.scales.log_scale[:] = np.log(scales)

    def begin_with(self, gaussian: Standardization, rng: np.random.Generator) -> None:
        """Begin with a Gaussian that is roughly the target."""
        sd = np.sqrt(np.sum(gaussian.factor**2, axis=1))
        self.scales.log_scale[:] = np.log(np.maximum(sd, 1e-300))

    def transitions_before_update(self, transition: int, n: int, rng: np.random.Generator) -> int:
        """Transitions, at most `n`, to make after `transition` ones before the next update."""
        return n

    def update(
        self, position: np.ndarray, tune: bool, rng: np.random.Generator
    ) -> np.ndarray | Sequence[np.ndarray] | None:
        """Learn a new proposal, with the chain at `position` (d,).

        `tune` is False where the chain goes on learning after tuning. Returns the raw points (n, d)
        that are to be evaluated next; None by default.
        """
        return None

    def room(self) -> float:
        """Transitions that may be made before `absorb` has to be called."""
        return np.inf

    def absorb(self) -> None:
        """Learn from the positions since the last call, if there is a fixed room for them."""

    def end_tuning(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray | Sequence[np.ndarray] | None:
        """Leave a valid frozen proposal behind, whatever the length of tuning was.

        Returns the raw points (n, d) that are to be evaluated next; None by default.
        """
        return None

    def invalidate(self) -> None:
        """Drop what was computed for the position, which was changed from outside."""

    # what was learnt ------------------------------------------------------------------------------

    @property
    def has_learnt(self) -> bool:
        """Whether there is a learnt proposal."""
        return True

    def covariances_at(self, rows: np.ndarray) -> np.ndarray:
        """Covariances (n, d, d) of the proposal from the rows of an array (n, d)."""
        proposal = self.proposal(compiled=False)
        return np.array([covariance_at(proposal, row) for row in rows])

    def normal(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return mean (d,) and Cholesky factor (d, d) of what was learnt, if it was learnt."""
        return None

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Values of the sampler statistics that show what was learnt."""


class ScalingLearner(Learner):
    """Learns a scaling, towards an acceptance.

    Parameters
    ----------
    make_proposal : callable
        `make_proposal(scaling)` returns the proposal, a NamedTuple for whose class
        `register_proposal` was called; `scaling` is a `Scaling` of one number.
    scaling : float
        What the scaling is at first.
    """

    history_capacity = 2
    state_names = ("scales", "scaling")

    def __init__(self, make_proposal: Callable[[Scaling], Any], scaling: float = 1.0):
        self.make_proposal = make_proposal
        self.first_scaling = checked_number("scaling", scaling, above=0)
        self.options = {"proposal": make_proposal.__qualname__, "scaling": self.first_scaling}

    def _begin(self, position, rng, warm):
        known = None if warm is None else warm.scaling
        self.scaling = new_scaling(known or self.first_scaling)

    def proposal(self, compiled):  # noqa: D102
        return self.make_proposal(self.scaling)

    def recursion(self):  # noqa: D102
        return ScalingRecursion(self.scaling, WIDEST_BOUNDS, self.target_accept, 1.0, 0.5, True)

    def statistics(self):  # noqa: D102
        return {"scaling": math.exp(self.scaling.log[0])}
