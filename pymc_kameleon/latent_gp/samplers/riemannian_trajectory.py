"""Riemannian manifold Hamiltonian Monte Carlo for a latent Gaussian (Paquet & Fraccaro 2018)."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pymc_kameleon.latent_gp.samplers.generalised_leapfrog import (
    Diverged,
    IntegrationError,
    NotConverged,
    NotReversible,
    leapfrog_step,
)
from pymc_kameleon.latent_gp.samplers.riemannian_metric import LocalGeometry
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.validation import checked_integer, checked_number

__all__ = [
    "DualAveraging",
    "RiemannianOutcome",
    "RiemannianSettings",
    "RiemannianState",
    "transition",
]

LARGEST_ENERGY_ERROR = 1000.0
"""A trajectory whose energy grows by more has diverged; it would be rejected anyway."""


@dataclass(frozen=True)
class RiemannianSettings:
    """What a transition needs to know besides its target, fixed while the chain is compared.

    `step_size` is in the unit of the metric: trajectories of length pi / 2 cross a Gaussian. The
    number of leapfrog steps is `n_steps` or, with `random_length`, uniform on 1 to `n_steps`, so
    that no trajectory length is in tune with a period of the target. For `n_fixed_point` see
    `leapfrog_step`, for `soft_floor` `log_ratio_curvature`: it is 0 for a log-concave likelihood,
    else `default_soft_floor`.
    """

    step_size: float = 0.4
    n_steps: int = 6
    n_fixed_point: int | None = None
    random_length: bool = True
    soft_floor: float = 0.0

    def __post_init__(self):
        checked_number("step_size", self.step_size, above=0)
        checked_integer("n_steps", self.n_steps, 1)
        if self.n_fixed_point is not None:
            checked_integer("n_fixed_point", self.n_fixed_point, 1)
        checked_number("soft_floor", self.soft_floor, at_least=0)


class RiemannianState(NamedTuple):
    """Where a chain is, and what is known there, of the target of the last transition.

    The geometry is used again if the next transition has the same position, likelihood, scale and
    floor, and the same `Gaussian` object.
    """

    position: np.ndarray
    geometry: LocalGeometry | None = None


class RiemannianOutcome(NamedTuple):
    """What happened in a transition.

    `acceptance` is its probability, 0 if the trajectory failed; `n_leapfrog` counts the steps made,
    the one that failed included; `energy` is the Hamiltonian at the state that the transition ended
    in; `n_fixed_point` are the mean iterations of a step, of its two implicit equations together.
    `not_converged`, `not_reversible` and `diverged` are 1 if this is why the trajectory failed,
    else 0.
    """

    acceptance: float
    accepted: bool
    n_leapfrog: int
    energy: float
    n_fixed_point: float
    not_converged: float
    not_reversible: float
    diverged: float


def transition(
    target: TemperedTarget,
    state: RiemannianState,
    settings: RiemannianSettings,
    rng: np.random.Generator,
) -> tuple[RiemannianState, RiemannianOutcome]:
    """Draw a momentum, follow a trajectory, and accept or reject where it ends.

    The length is drawn before anything else, and a trajectory that cannot be followed there and
    back is rejected, so the target is left invariant (with checked implicit steps) for any step
    size that does not depend on the state.

    It raises ValueError if the target has sites, and FloatingPointError if the chain is where the
    target or its metric is not finite, or at an element of positive second derivative without a
    `soft_floor`.
    """
    n_steps = settings.n_steps
    if settings.random_length:
        n_steps = int(rng.integers(1, n_steps + 1))
    start = state.geometry
    if start is None or not start.is_of(target, state.position, settings.soft_floor):
        start = LocalGeometry(target, state.position, settings.soft_floor)
    momentum = start.draw_momentum(rng)
    initial_energy = start.energy(momentum)
    here, failure, iterations, n_leapfrog = start, None, 0, 0
    try:
        while n_leapfrog < n_steps:
            n_leapfrog += 1
            here, momentum, count = leapfrog_step(
                here, momentum, settings.step_size, settings.n_fixed_point
            )
            iterations += count
        energy = here.energy(momentum)
        if not energy - initial_energy <= LARGEST_ENERGY_ERROR:
            raise Diverged
        acceptance = math.exp(min(0.0, initial_energy - energy))
    except IntegrationError as error:
        failure, acceptance, energy = error, 0.0, math.inf
        iterations += error.n_fixed_point
    # The uniform number is drawn after a failure too: every transition of a given length takes as
    # many random numbers.
    accepted = bool(rng.random() < acceptance)
    geometry = here if accepted else start
    return RiemannianState(geometry.position, geometry), RiemannianOutcome(
        acceptance=acceptance,
        accepted=accepted,
        n_leapfrog=n_leapfrog,
        energy=energy if accepted else initial_energy,
        n_fixed_point=iterations / n_leapfrog,
        not_converged=float(isinstance(failure, NotConverged)),
        not_reversible=float(isinstance(failure, NotReversible)),
        diverged=float(isinstance(failure, Diverged)),
    )


@dataclass
class DualAveraging:
    """Learn a step size that gives a target acceptance (Hoffman & Gelman 2014, section 3.2.1).

    The iterates are drawn towards the initial step size, not to ten times as much: a step that is
    too long costs a hundred iterations of an implicit equation before it fails.

    `target_accept` is the mean acceptance probability that is wanted, failures counted as 0;
    `shortfall` a weighted mean of what it lacked; `log_average` one of the iterates `log_step`, in
    which the first of them fade.
    """

    initial: float = 0.4
    target_accept: float = 0.8
    log_step: float = field(init=False)
    log_average: float = field(init=False, default=0.0)
    shortfall: float = field(init=False, default=0.0)
    n_updates: int = field(init=False, default=0)

    def __post_init__(self):
        self.log_step = math.log(self.initial)

    @property
    def step_size(self) -> float:
        """Step size to explore with, while learning."""
        return math.exp(self.log_step)

    @property
    def learnt(self) -> float:
        """Step size to keep."""
        return math.exp(self.log_average) if self.n_updates else self.initial

    def update(self, acceptance: float):
        """Show the acceptance probability of a transition that was made with `step_size`."""
        self.n_updates += 1
        t = self.n_updates
        self.shortfall += (self.target_accept - acceptance - self.shortfall) / (t + 10.0)
        self.log_step = math.log(self.initial) - math.sqrt(t) / 0.05 * self.shortfall
        self.log_average += t**-0.75 * (self.log_step - self.log_average)
