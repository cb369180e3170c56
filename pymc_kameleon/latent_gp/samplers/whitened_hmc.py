"""Hamiltonian Monte Carlo for a tempered target, in coordinates whitened by its base.

R. M. Neal (2010), MCMC using Hamiltonian dynamics, Handbook of Markov Chain Monte Carlo.
"""

import math

import numpy as np
from scipy.linalg import solve_triangular

from pymc_kameleon.latent_gp.tempered_target import TemperedTarget

__all__ = ["hamiltonian"]


def hamiltonian(
    target: TemperedTarget,
    x: np.ndarray,
    rng: np.random.Generator,
    step_size: float,
    n_steps: int,
) -> tuple[np.ndarray, float, int]:
    """Make a transition from `x` (N,) that leaves base(x) exp(log_ratio(x)) invariant.

    It moves v in x = mean + L v, with L the Cholesky factor of the base: a base that is close to
    the target makes all scales about 1. The energy is U + |p|^2 / 2, p ~ N(0, I), with
    U = |v|^2 / 2 - log_ratio(mean + L v). The number of leapfrog steps is uniform from 1 to
    `n_steps`, against orbits that return to where they began. The new x (N,) is returned, with the
    acceptance probability, 0 where the trajectory left the support, and the number of evaluations
    of the derivatives.
    """
    base = target.base
    position = solve_triangular(base.cholesky, x - base.mean, lower=True, check_finite=False)
    momentum = rng.standard_normal(len(x))
    length = int(rng.integers(1, n_steps + 1))
    uniform = rng.random()
    energy, gradient = _potential(target, position)
    start = energy + 0.5 * momentum @ momentum
    for taken in range(1, length + 1):
        momentum = momentum - 0.5 * step_size * gradient
        position = position + step_size * momentum
        energy, gradient = _potential(target, position)
        if not np.isfinite(energy) or not np.all(np.isfinite(gradient)):
            return x, 0.0, taken + 1
        momentum = momentum - 0.5 * step_size * gradient
    change = start - energy - 0.5 * momentum @ momentum
    acceptance = math.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if uniform >= acceptance:
        return x, acceptance, length + 1
    return base.mean + base.cholesky @ position, acceptance, length + 1


def _potential(target, v):
    """Potential energy and its gradient (N,) at v (N,)."""
    base = target.base
    terms = target.log_ratio_terms(base.mean + base.cholesky @ v)
    return 0.5 * float(v @ v) - float(terms[0].sum()), v - base.cholesky.T @ terms[1]
