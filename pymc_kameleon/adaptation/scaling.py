"""The recursion of a scaling, and the learner that learns nothing else."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation.learner import Adaptation, Learner, LearnerState
from pymc_kameleon.mcmc.layout import floats
from pymc_kameleon.mcmc.proposals import Scaling
from pymc_kameleon.mcmc.run import Mixture, no_differences, observe
from pymc_kameleon.validation import checked_number

__all__ = [
    "WIDEST_BOUNDS",
    "ScalingAdaptation",
    "ScalingBounds",
    "ScalingRecursion",
    "scaling_of_a_random_walk",
    "target_acceptance",
]

LARGEST_LOG_SCALING = 20.0


def target_acceptance(dim: int) -> float:
    """Return the acceptance that a scaling is learnt for: 0.44 in one dimension, else 0.234."""
    return 0.44 if dim == 1 else 0.234


def scaling_of_a_random_walk(dim: int) -> float:
    """Return what multiplies a Gaussian target's covariance in the best of random walks."""
    return 2.38**2 / dim


class ScalingBounds(NamedTuple):
    """Bounds of log scalings, shape (m,).

    Without kernel support every small move is accepted and the recursion would run away; where all
    moves fail, it would shrink to nothing.
    """

    smallest: Annotated[np.ndarray, floats("scalings")]
    largest: Annotated[np.ndarray, floats("scalings")]


WIDEST_BOUNDS = ScalingBounds(np.full(1, -LARGEST_LOG_SCALING), np.full(1, LARGEST_LOG_SCALING))
"""Bounds of one log scaling that has no others."""


class ScalingRecursion(NamedTuple):
    """Robbins-Monro recursion of the scaling that a move was made with.

    The n-th step of a log scaling is `factor` n^-`power` times acceptance minus target (Andrieu &
    Thoms 2008, algorithm 4).
    """

    scaling: Scaling
    bounds: ScalingBounds
    target_accept: float
    factor: float
    power: float


def _observe(recursion, position, acceptance, j):
    scaling, bounds = recursion.scaling, recursion.bounds
    if j >= 0:
        scaling.n_updates[j] += 1.0
        step = recursion.factor * scaling.n_updates[j] ** -recursion.power
        log_scaling = scaling.log[j] + step * (acceptance - recursion.target_accept)
        scaling.log[j] = min(max(log_scaling, bounds.smallest[j]), bounds.largest[j])


observe.register(ScalingRecursion, _observe, allocates=False)


class ScalingAdaptation(Adaptation):
    """Choices of a proposal with one scaling, which is all that it learns.

    Parameters
    ----------
    make_proposal : callable
        `make_proposal(scaling)` returns the proposal, a NamedTuple for whose class
        `register_proposal` was called; `scaling` is a `Scaling` of one number.
    scaling : float
        What the scaling is at first.
    """

    history_capacity = 2

    def __init__(self, make_proposal: Callable[[Scaling], Any], scaling: float = 1.0):
        self.make_proposal = make_proposal
        self.scaling = checked_number("scaling", scaling, above=0)
        self.options = {"proposal": make_proposal.__qualname__, "scaling": self.scaling}

    def start(self, position, rng, warm, target_accept):  # noqa: D102
        scaling = self.scaling if warm is None or warm.scaling is None else warm.scaling
        return ScalingLearner(self.make_proposal, scaling, position.size, target_accept)


@dataclass_state
class ScalingState(LearnerState):
    """State of a `ScalingLearner`."""

    scaling: Scaling


class ScalingLearner(Learner):
    """Learns a scaling, towards an acceptance."""

    _state_class = ScalingState

    def __init__(self, make_proposal, scaling, dim, target_accept):
        super().__init__(dim)
        self.make_proposal, self.target_accept = make_proposal, target_accept
        self.scaling = Scaling(np.array([math.log(scaling)]), np.zeros(1))
        self._no_differences = no_differences(dim)

    def proposal(self, compiled):
        return self.make_proposal(self.scaling)

    def mixture(self, tune):
        return Mixture(self.scales, self._no_differences, 0.0, 0.0)

    def observer(self):
        return ScalingRecursion(self.scaling, WIDEST_BOUNDS, self.target_accept, 1.0, 0.5)

    def transitions_before_update(self, transition, n, rng):
        return n

    def update(self, position, tune, rng):
        pass

    def end_tuning(self, position, rng):
        pass

    @property
    def has_learnt(self):
        return True

    def statistics(self):
        return {"scaling": math.exp(self.scaling.log[0])}

    def lengths(self):
        return super().lengths() | {"scalings": 1}
