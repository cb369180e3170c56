"""Draws from a surrogate by sequential Monte Carlo, from high temperatures down to 1."""

from typing import Any

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.surrogate.hmc import Integrator, tuned_integrator
from pymc_kameleon.surrogate.posterior_surrogate import (
    PosteriorSurrogate,
    call_for_value,
    new_workspace,
    surrogate_values,
)
from pymc_kameleon.surrogate.transition import (
    MOVES,
    UNIFORMS,
    SurrogateTransition,
    move_routine,
    temperature_of,
)

ABOVE_ONE = 8.0, 4.0, 2.0, 1.0, 0.0
"""Parts above 1 of the temperatures, times the root of the dimension, the hottest first."""


@jit(allocates=True)
def _move_all(proposal, temperature, particles, values, normals, uniforms):
    surrogate = proposal.surrogate
    workspace = new_workspace(surrogate)
    for k in range(particles.shape[0]):
        for m in range(normals.shape[1]):
            arguments = (
                surrogate,
                proposal.integrator,
                proposal.points,
                temperature,
                particles[k],
                values[k],
                normals[k, m],
                uniforms[k, m],
                workspace,
            )
            values[k] = call_for_value(proposal.move, arguments)


def move_many(
    surrogate: Any,
    integrator: Integrator,
    temperature: float,
    particles: np.ndarray,
    values: np.ndarray,
    rng: np.random.Generator,
    points: np.ndarray,
) -> None:
    """Make `MOVES` moves of each of the `particles` (n, d) and their `values` (n,), in place.

    Differences of the columns of `points` (d, m) are moves too, if there are any.
    """
    n, dim = particles.shape
    move = move_routine(surrogate, integrator)
    _move_all(
        SurrogateTransition(surrogate, integrator, points, move, None),
        temperature,
        particles,
        values,
        rng.standard_normal((n, MOVES, dim)),
        rng.random((n, MOVES, UNIFORMS)),
    )


def moved(
    surrogate: PosteriorSurrogate,
    integrator: Integrator,
    particles: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return `particles` (n, d) after `MOVES` moves each, which leave exp(s) invariant."""
    particles = particles.copy()
    values = surrogate_values(surrogate, particles)
    points = np.ascontiguousarray(particles.T)
    move_many(surrogate, integrator, 1.0, particles, values, rng, points)
    return particles


def anneal(
    surrogate: PosteriorSurrogate,
    integrator: Integrator,
    starts: np.ndarray,
    n: int,
    target_accept: float,
    rng: np.random.Generator,
    highest: float = np.inf,
) -> tuple[list[np.ndarray], Integrator]:
    """Draw from the tempered surrogate by sequential Monte Carlo, without a true evaluation.

    Among the `starts` (k, d), in coordinates of moves, are some of each mode. Above the log density
    `highest` all particles have the same weights. Returns `n` draws (n, d) from exp(s / T) for each
    temperature, the hottest first, down to T = 1, and the integrator tuned for the last of them;
    that one's radius is the given one's.
    """
    dim = starts.shape[1]
    particles = starts[np.sum(starts**2, axis=1) <= integrator.radius[0] ** 2]
    values = surrogate_values(surrogate, particles)
    found, before = [], np.inf
    for above in ABOVE_ONE:
        temperature = temperature_of(above, dim)
        log_weights = np.minimum(values, highest) * (1.0 / temperature - 1.0 / before)
        weights = np.exp(log_weights - log_weights.max())
        kept = rng.choice(len(weights), size=n, p=weights / weights.sum())
        particles, values, before = particles[kept], values[kept], temperature
        integrator = tuned_integrator(surrogate, integrator, particles, target_accept, rng)
        points = np.ascontiguousarray(particles.T)
        move_many(surrogate, integrator, temperature, particles, values, rng, points)
        found.append(particles.copy())
    return found, tuned_integrator(surrogate, integrator, particles, target_accept, rng)
