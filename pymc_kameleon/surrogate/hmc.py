r"""Hamiltonian trajectories on a surrogate s (Rasmussen 2003), without the true density.

Momenta :math:`n \sim N(0, T I)` and a leapfrog of :math:`H = -s(u) + \tfrac12 |n|^2` whose velocity
is A n, so the mass matrix is :math:`(A A^\top)^{-1}`. The map is reversible and keeps volume, so
accepting its end with probability :math:`1 \wedge e^{(H - H^*) / T}` leaves :math:`e^{s / T}`
invariant. `surrogate.transition` makes several such moves a proposal of the true density.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit, jit_inner
from pymc_kameleon.mcmc.chain import probability
from pymc_kameleon.mcmc.linalg import copy_into, dot, factor_times
from pymc_kameleon.surrogate.posterior_surrogate import (
    PosteriorSurrogate,
    new_workspace,
    surrogate_gradients,
    surrogate_value_and_gradient,
)
from pymc_kameleon.surrogate.support import is_inside

SHORT_SHARE = 0.2
"""Share of trajectories whose length is drawn log-uniformly, so that some are short."""

STEP_JITTER = 0.2
"""Step sizes are uniform within this share of the mean, so that no period is hit."""

LARGEST_STEP = 1.5
"""The first step size tried, where the mass matrix makes the density nearly standard normal."""

N_STARTS = 30
"""Trajectories on the surrogate from which step size and length are chosen."""

STUCK, MOST_STUCK = 0.1, 0.3
"""Mean acceptance below which a start does not count for the step size, and the largest share of
such starts: in the neck of a funnel steps would have to be too small for everywhere else."""

LARGEST_CONDITION, STEEPEST = 1e6, 1e100
"""Of the information from which the mass matrix is made, and of the slopes that it is made of."""

LENGTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])


class Integrator(NamedTuple):
    r"""How trajectories run; arrays are changed in place.

    `root` is A, lower-triangular, in coordinates of moves, or empty, (0, 0), for the identity;
    `length` is the largest number of leapfrog steps, and `n_steps` how many there were so far. No
    point of a trajectory is further than
    `radius` from the origin; the way back visits the same points, so this is symmetric. A
    `hot_share` of proposals is at a higher temperature, :math:`n \sim N(0, T I)`: they end further
    out, where the surrogate is to learn, and leave a tail where it is too low. They are as exact.
    """

    root: np.ndarray
    step_size: np.ndarray
    length: np.ndarray
    radius: np.ndarray
    n_steps: np.ndarray
    hot_share: np.ndarray


def new_integrator(dim: int) -> Integrator:
    """Return an integrator that was tuned for nothing yet."""
    one, zero = np.ones(1), np.zeros(1)
    return Integrator(np.eye(dim), 0.1 * one, 8.0 * one, zero, zero.copy(), zero.copy())


@jit_inner
def _kick(root, size, gradient, momentum):
    if root.size == 0:
        for i in range(momentum.size):
            momentum[i] += size * gradient[i]
        return
    for i in range(momentum.size):
        for j in range(i, momentum.size):
            momentum[i] += size * root[j, i] * gradient[j]


@jit_inner
def leapfrog(surrogate, root, step_size, n_steps, radius, gradient, workspace, u, momentum):
    """Move `u` and `momentum`, both (d,), in place along a trajectory; return s where it ends.

    It is -inf if a point was outside of the ball of `radius`, or not finite, or if the trajectory
    ends outside of the surrogate's support. `gradient` (d,) is that at `u`, before and after.
    """
    velocity, value = workspace.velocity, -np.inf
    for _ in range(n_steps):
        _kick(root, 0.5 * step_size, gradient, momentum)
        if root.size == 0:
            copy_into(momentum, velocity)
        else:
            factor_times(root, momentum, velocity)
        for i in range(u.size):
            u[i] += step_size * velocity[i]
        if not _squared_norm(u) <= radius * radius:
            return -np.inf
        value = surrogate_value_and_gradient(surrogate, u, workspace, gradient)
        _kick(root, 0.5 * step_size, gradient, momentum)
    return value if is_inside(surrogate.support, u) else -np.inf


@jit_inner
def _squared_norm(vector):
    return dot(vector, vector, vector.size)


@jit_inner
def move_by_trajectory(surrogate, integrator, temperature, u, value, momentum, uniforms, workspace):
    """Move `u` (d,) in place, or leave it, so that exp(s / T) stays invariant; return s there.

    `value` is s(u); `momentum` (d,), overwritten, has standard normal numbers, `uniforms` (4,)
    uniform ones.
    """
    dim = u.size
    start, gradient = workspace.other, workspace.gradient
    for i in range(dim):
        start[i] = u[i]
        momentum[i] *= math.sqrt(temperature)
    length = integrator.length[0]
    if uniforms[0] < SHORT_SHARE:
        n_steps = int(math.exp(uniforms[1] * math.log(length + 1.0)))
    else:
        n_steps = math.ceil(length * (0.25 + 0.75 * uniforms[1]))
    step_size = integrator.step_size[0] * (1.0 + STEP_JITTER * (2.0 * uniforms[2] - 1.0))
    before = value - 0.5 * _squared_norm(momentum)
    surrogate_value_and_gradient(surrogate, u, workspace, gradient)
    integrator.n_steps[0] += n_steps
    radius = integrator.radius[0]
    end = leapfrog(
        surrogate, integrator.root, step_size, n_steps, radius, gradient, workspace, u, momentum
    )
    after = end - 0.5 * _squared_norm(momentum)
    if uniforms[3] < probability((after - before) / temperature):
        return end
    for i in range(dim):
        u[i] = start[i]
    return value


@jit(allocates=True)
def _jumps(surrogate, root, step_size, radius, lengths, starts, momenta, acceptance, jumps):
    """Find acceptance (n, k) and accepted mean squared jumps (n, d) on the surrogate alone.

    They are after increasing `lengths` (n,) from `starts` with `momenta` (k, d).
    """
    k, dim = starts.shape
    u, momentum, gradient = np.empty(dim), np.empty(dim), np.empty(dim)
    workspace = new_workspace(surrogate)
    for n in range(lengths.size):
        for s in range(k):
            acceptance[n, s] = 0.0
        for i in range(dim):
            jumps[n, i] = 0.0
    for s in range(k):
        for i in range(dim):
            u[i], momentum[i] = starts[s, i], momenta[s, i]
        before = surrogate_value_and_gradient(surrogate, u, workspace, gradient)
        before -= 0.5 * _squared_norm(momentum)
        made = 0
        for n in range(lengths.size):
            steps, made = lengths[n] - made, lengths[n]
            end = leapfrog(
                surrogate, root, step_size, steps, radius, gradient, workspace, u, momentum
            )
            if end == -np.inf:
                break
            accepted = probability(end - 0.5 * _squared_norm(momentum) - before)
            acceptance[n, s] = accepted
            for i in range(dim):
                jumps[n, i] += accepted * (u[i] - starts[s, i]) ** 2 / k


def tuned_integrator(
    surrogate: PosteriorSurrogate,
    integrator: Integrator,
    points: np.ndarray,
    target_accept: float,
    rng: np.random.Generator,
) -> Integrator:
    """Choose mass matrix, step size and length on the surrogate, without a true evaluation.

    The inverse of the mass matrix is that of the surrogate's Fisher information at `points` (k, d),
    those that the chain visits; the length that with the largest expected squared jump a step, of
    the coordinate that moves least. The mean acceptance, without starts that are stuck, is to be
    `target_accept`.
    """
    k, dim = points.shape
    gradients = surrogate_gradients(surrogate, points)
    gradients = gradients[np.all(np.abs(gradients) < STEEPEST, axis=1)]
    information = (gradients.T @ gradients + 2 * dim * np.eye(dim)) / (k + 2 * dim)
    eigenvalues = np.linalg.eigvalsh(information)
    too_small = eigenvalues[-1] / LARGEST_CONDITION - eigenvalues[0]
    if too_small > 0.0:
        information += too_small * np.eye(dim)
    root = np.linalg.cholesky(np.linalg.inv(information))
    return with_step_size(surrogate, integrator._replace(root=root), points, target_accept, rng)


def with_step_size(
    surrogate: Any,
    integrator: Integrator,
    points: np.ndarray,
    target_accept: float,
    rng: np.random.Generator,
) -> Integrator:
    """Choose step size and length for this mass matrix, as `tuned_integrator` does."""
    root, radius, (k, dim) = integrator.root, integrator.radius[0], points.shape
    starts = np.ascontiguousarray(points[rng.integers(k, size=N_STARTS)])
    momenta = rng.standard_normal(starts.shape)
    step_size, few = LARGEST_STEP, LENGTHS[:8]
    acceptance, jumps = np.empty((len(LENGTHS), N_STARTS)), np.empty((len(LENGTHS), dim))
    for _ in range(20):
        _jumps(surrogate, root, step_size, radius, few, starts, momenta, acceptance, jumps)
        each = acceptance[: len(few)].mean(axis=0)
        counts = each > STUCK
        if counts.mean() >= 1.0 - MOST_STUCK and each[counts].mean() >= target_accept:
            break
        step_size *= 0.8
    _jumps(surrogate, root, step_size, radius, LENGTHS, starts, momenta, acceptance, jumps)
    # Lengths are uniform between a quarter and the whole.
    means = [
        jumps[(LENGTHS >= length / 4) & (LENGTHS <= length)].mean(axis=0).min()
        for length in LENGTHS
    ]
    best = np.argmax(means / (LENGTHS + 16.0))  # several trajectories make one transition
    return integrator._replace(
        step_size=np.array([step_size]), length=np.array([float(LENGTHS[best])])
    )
