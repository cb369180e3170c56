"""One step of the generalised leapfrog, with implicit sub-steps that are solved and checked.

Equations 13 to 15 of Paquet & Fraccaro (2018). An implicit sub-step is reversible only where its
equation is solved, and where the way back finds the solution that it came from.
"""

import numpy as np

from pymc_kameleon.latent_gp.samplers.riemannian_metric import (
    LocalGeometry,
    Metric,
    log_ratio_curvature,
)

__all__ = [
    "MAX_ITERATIONS",
    "RETURN_TOLERANCE",
    "SOLUTION_TOLERANCE",
    "Diverged",
    "IntegrationError",
    "NotConverged",
    "NotReversible",
    "leapfrog_step",
]

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

    Equations 13 to 15. A negative `step_size` is a step back in time. `n_fixed_point` plain
    iterations of each implicit equation are made without any check, as in the paper, and then the
    step is not reversible unless it is short; None solves the equations and checks the way back.
    It returns the geometry at the new position, the momentum (N,) there, and the iterations of the
    two implicit equations, without those of the checks; a step that fails raises IntegrationError.
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
