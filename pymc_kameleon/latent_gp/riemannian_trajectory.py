"""Riemannian manifold Hamiltonian Monte Carlo for a latent Gaussian (Paquet & Fraccaro 2018).

The generalised leapfrog, equations 13 to 15, has implicit sub-steps. One is reversible only where
its equation is solved, and where the way back finds the solution that it came from.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pymc_kameleon.latent_gp.riemannian_metric import LocalGeometry, Metric, log_ratio_curvature
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.validation import checked_integer, checked_number

SOLUTION_TOLERANCE = 1e-9
"""An implicit equation is solved when an iteration changes no entry by more than this."""

RETURN_TOLERANCE = 2e-8
"""A sub-step returns when no entry differs by more than this. Both are relative to the largest
entry, or to the scale of the Gaussian if that is larger."""

MAX_ITERATIONS = 100


class IntegrationError(ArithmeticError):
    """A step that cannot be made, after `n_fixed_point` iterations: its trajectory is rejected."""

    def __init__(self, n_fixed_point: int = 0):
        super().__init__(f"after {n_fixed_point} iterations")
        self.n_fixed_point = n_fixed_point


class NotConverged(IntegrationError):
    """An implicit equation was not solved."""


class NotReversible(IntegrationError):
    """A sub-step backwards does not lead back."""


class Diverged(IntegrationError):
    """The target or its metric is not finite where the step leads."""


def leapfrog_step(
    geometry: LocalGeometry,
    momentum: np.ndarray,
    step_size: float,
    n_fixed_point: int | None = None,
) -> tuple[LocalGeometry, np.ndarray, int]:
    """Half a step of the momentum, a step of the position, half a step of the momentum.

    A negative `step_size` is a step back in time. `n_fixed_point` plain iterations of each implicit
    equation are made without any check, as in the paper, and then the step is not reversible unless
    it is short; None solves the equations and checks the way back. It returns the geometry at the
    new position, the momentum (N,) there, and the iterations; a step that fails raises
    IntegrationError.
    """
    half = 0.5 * step_size
    is_checked = n_fixed_point is None
    with np.errstate(over="ignore", invalid="ignore"):
        middle, velocity, count = _solve_momentum(geometry, momentum, half, n_fixed_point)
        if is_checked:
            back = middle + half * geometry.energy_gradient(velocity)
            _check_return(back, momentum, _momentum_scale(geometry, momentum - middle), count)
        try:
            position, iterations = _solve_position(
                geometry, middle, velocity, step_size, n_fixed_point
            )
        except IntegrationError as error:
            raise type(error)(count + error.n_fixed_point) from error
        count += iterations
        try:
            there = LocalGeometry(geometry.target, position, geometry.soft_floor)
        except FloatingPointError as error:
            raise Diverged(count) from error
        velocity = there.metric.velocity(middle)
        end = middle - half * there.energy_gradient(velocity)
        if not np.all(np.isfinite(end)):
            raise Diverged(count)
        if is_checked:
            try:
                start, _ = _solve_position(there, middle, velocity, -step_size, None)
                back, _, _ = _solve_momentum(there, end, -half, None)
            except NotConverged as error:
                raise NotReversible(count) from error
            _check_return(start, geometry.position, _position_scale(geometry, start), count)
            _check_return(back, middle, _momentum_scale(there, end - middle), count)
    return there, end, count


def _solve_momentum(geometry, momentum, half_step, n_fixed_point):
    """Solve q = momentum - half_step dH/dx(x, q): q, its velocity, and iterations (eq. 13)."""
    explicit = momentum - half_step * geometry.potential_gradient
    strength = 0.5 * half_step * geometry.curvature_slope
    current, velocity = momentum, geometry.metric.velocity(momentum)
    for iteration in range(1, (n_fixed_point or MAX_ITERATIONS) + 1):
        proposed = explicit + strength * velocity**2
        change = np.abs(proposed - current).max()
        current, velocity = proposed, geometry.metric.velocity(proposed)
        if n_fixed_point is None:
            bound = SOLUTION_TOLERANCE * _momentum_scale(geometry, current - momentum)
            if change <= bound:
                return current, velocity, iteration
            if not np.isfinite(change):
                raise NotConverged(iteration)
    if n_fixed_point is None:
        raise NotConverged(iteration)
    return current, velocity, iteration


def _solve_position(geometry, momentum, velocity, step_size, n_fixed_point):
    """Solve y = x + step_size / 2 (G(x)^-1 p + G(y)^-1 p): y and iterations (eq. 14).

    Written for u = G(y)^-1 p = 2 (y - x) / step_size - G(x)^-1 p, the equation
    (A^-1 + lambda(y)) u = p needs no inverse, and any diagonal D >= 0 gives an iteration
    u <- (A^-1 + D)^-1 (p + (D - lambda) u) with the same solution for one Cholesky factorisation.
    D = lambda is the plain fixed-point iteration; D = lambda + step_size / 2 lambda' u is Newton's.
    """
    target, half = geometry.target, 0.5 * step_size
    precision_scale = 1.0 / geometry.unit**2
    explicit = geometry.position + half * velocity
    position, there = explicit + half * velocity, velocity
    for iteration in range(1, (n_fixed_point or MAX_ITERATIONS) + 1):
        if n_fixed_point is not None and iteration == n_fixed_point:
            return position, iteration
        try:
            curvature, slope = log_ratio_curvature(
                target.log_ratio_terms(position), geometry.soft_floor, precision_scale
            )
            if n_fixed_point is not None:
                there = Metric(target.base, curvature).velocity(momentum)
            else:
                diagonal = np.maximum(curvature + half * slope * there, 0.0)
                force = momentum + (diagonal - curvature) * there
                there = Metric(target.base, diagonal).velocity(force)
        except FloatingPointError as error:
            raise (NotConverged if n_fixed_point is None else Diverged)(iteration) from error
        proposed = explicit + half * there
        change = np.abs(proposed - position).max()
        position = proposed
        if n_fixed_point is None and change <= SOLUTION_TOLERANCE * _position_scale(
            geometry, position
        ):
            return position, iteration
    raise NotConverged(iteration)


def _check_return(found, start, scale, count):
    if not np.abs(found - start).max() <= RETURN_TOLERANCE * scale:
        raise NotReversible(count)


def _position_scale(geometry, position):
    return max(geometry.unit, np.abs(position).max())


def _momentum_scale(geometry, change):
    # Momenta are as large as a nearly singular covariance makes them; a sub-step changes them by
    # much less, and its size is what its error is compared with.
    return max(1.0 / geometry.unit, np.abs(change).max())


LARGEST_ENERGY_ERROR = 1000.0
"""A trajectory whose energy grows by more has diverged; it would be rejected anyway."""


@dataclass(frozen=True)
class RiemannianSettings:
    """What a transition needs to know besides its target, fixed while the chain is compared.

    `step_size` is in the unit of the metric: trajectories of length pi / 2 cross a Gaussian. With
    `random_length` the number of steps is uniform on 1 to `n_steps`, so that no trajectory length
    is in tune with a period of the target.
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
    """Where a chain is, and the geometry there of the target of the last transition."""

    position: np.ndarray
    geometry: LocalGeometry | None = None


class RiemannianOutcome(NamedTuple):
    """What happened in a transition.

    `acceptance` is 0 if the trajectory failed; `n_leapfrog` counts the steps made, the one that
    failed included; `energy` is at the state that the transition ended in; `n_fixed_point` are the
    mean iterations of a step. The last three are 1 if this is why the trajectory failed, else 0.
    """

    acceptance: float
    accepted: bool
    n_leapfrog: int
    energy: float
    n_fixed_point: float
    not_converged: float
    not_reversible: float
    diverging: bool


def transition(
    target: TemperedTarget,
    state: RiemannianState,
    settings: RiemannianSettings,
    rng: np.random.Generator,
) -> tuple[RiemannianState, RiemannianOutcome]:
    """Draw a momentum, follow a trajectory, and accept or reject where it ends.

    The length is drawn before anything else, and a trajectory that cannot be followed there and
    back is rejected, so the target is left invariant (with checked implicit steps) for any step
    size that does not depend on the state. It raises what `LocalGeometry` does where the chain is.
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
        diverging=isinstance(failure, Diverged),
    )


@dataclass
class DualAveraging:
    """Learn a step size that gives a target acceptance (Hoffman & Gelman 2014, section 3.2.1).

    The iterates are drawn towards the initial step size, not to ten times as much: a step that is
    too long costs a hundred iterations of an implicit equation before it fails.
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
