"""What learns: a configuration, which is chosen once, and a learner, which belongs to one chain."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from pymc.step_methods.state import DataClassState, WithSamplingState, dataclass_state

from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.proposals import covariance_at
from pymc_kameleon.mcmc.run import CoordinateScales, Mixture

__all__ = ["Adaptation", "Learner", "LearnerState", "WarmStart"]


class WarmStart(NamedTuple):
    """Earlier draws (n, d) to learn from, and the scaling that they were made with, if known."""

    points: np.ndarray
    scaling: float | None


class Adaptation(ABC):
    """What the user chose about the proposal and its adaptation.

    Attributes
    ----------
    options : dict
        The choices that a saved state has to share.
    history_capacity : int
        Largest number of points worth taking from a warm start.
    transition_kernel : Kernel or None
        Kernel whose gradients transitions evaluate, if they evaluate any.
    """

    options: dict[str, Any]
    history_capacity: int
    transition_kernel = None

    def check(self, names: list[str], dim: int) -> None:  # noqa: B027
        """Raise an error if a choice does not fit the variables `names` with `dim` elements."""

    @abstractmethod
    def start(
        self,
        position: np.ndarray,
        rng: np.random.Generator,
        warm: WarmStart | None,
        target_accept: float,
    ) -> "Learner":
        """Return what a chain that starts at `position` (d,) learns with."""


@dataclass_state
class LearnerState(DataClassState):
    """All that a learner needs to go on."""

    scales: CoordinateScales


class Learner(WithSamplingState, ABC):
    """What one chain has learnt, and how it goes on learning.

    Attributes
    ----------
    scales : CoordinateScales
    """

    _state_class = LearnerState

    def __init__(self, dim: int):
        self.dim = dim
        self.scales = CoordinateScales(np.zeros(dim), np.zeros(dim))

    # what transitions take ------------------------------------------------------------------------

    n_more_normals = 0
    """Normal random numbers that a transition takes beside one for each coordinate."""

    n_more_uniforms = 0
    """Uniform random numbers that a transition takes beside `N_UNIFORMS`."""

    @abstractmethod
    def proposal(self, compiled: bool) -> Any:
        """Return the proposal, registered in `mcmc.proposals`."""

    @abstractmethod
    def mixture(self, tune: bool) -> Mixture:
        """Return the moves beside the proposal's, and their shares."""

    @abstractmethod
    def observer(self) -> Any:
        """Return what learns from each transition, registered for `mcmc.run.observe`."""

    def evaluation_record(self, learns: bool) -> Any:
        """Return what remembers each evaluation, registered for `chain.remember`, or None."""

    # learning -------------------------------------------------------------------------------------

    def begin_with_scales(self, scales: np.ndarray) -> None:
        """Begin with the scales (d,) of the first moves."""
        self.scales.log_scale[:] = np.log(scales)

    def begin_with(self, gaussian: Standardization, rng: np.random.Generator) -> None:
        """Begin with a Gaussian that is roughly the target."""
        sd = np.sqrt(np.sum(gaussian.factor**2, axis=1))
        self.scales.log_scale[:] = np.log(np.maximum(sd, 1e-300))

    @abstractmethod
    def transitions_before_update(self, transition: int, n: int, rng: np.random.Generator) -> int:
        """Transitions, at most `n`, to make after `transition` ones before the next update."""

    @abstractmethod
    def update(self, position: np.ndarray, tune: bool, rng: np.random.Generator) -> None:
        """Learn a new proposal, with the chain at `position` (d,).

        `tune` is False where the chain goes on learning after tuning.
        """

    def room(self) -> float:
        """Transitions that may be made before `absorb` has to be called."""
        return np.inf

    def absorb(self) -> None:
        """Learn from the positions since the last call, if there is a fixed room for them."""

    @abstractmethod
    def end_tuning(self, position: np.ndarray, rng: np.random.Generator) -> None:
        """Leave a valid frozen proposal behind, whatever the length of tuning was."""

    def invalidate(self) -> None:
        """Drop what was computed for the position, which was changed from outside."""

    # what was learnt ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_learnt(self) -> bool:
        """Whether there is a learnt proposal."""

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

    def lengths(self) -> dict[str, int]:
        """Lengths of the arrays in the state, by the names in their declarations."""
        return {"d": self.dim}
