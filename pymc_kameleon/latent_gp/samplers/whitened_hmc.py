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
    whitened: bool = True,
) -> tuple[np.ndarray, float, int]:
    """Make a transition that leaves base(x) exp(log_ratio(x)) invariant.

    Parameters
    ----------
    target : TemperedTarget
    x : array, shape (N,)
    rng : Generator
    step_size : float
        Of the leapfrog, in the coordinates that it runs in. Where it is learnt it must not depend
        on `x`, or the transition is not invariant.
    n_steps : int
        Largest number of leapfrog steps; their number is uniform from 1 to this, against orbits
        that return to where they began.
    whitened : bool
        Move v in x = mean + L v, with L the Cholesky factor of the base: a base that is close to
        the target makes all scales about 1. Otherwise move x itself, with unit masses: the paper's
        baseline, whose step follows the smallest scale of the base.

    Returns
    -------
    x : array, shape (N,)
    acceptance : float
        Acceptance probability of the move; 0 where the trajectory left the support.
    n_evaluations : int
        Evaluations of the derivatives.

    Notes
    -----
    The energy is U + |p|^2 / 2, p ~ N(0, I), with U = |v|^2 / 2 - log_ratio(mean + L v) and
    gradient v - L^T log_ratio'(x); of plain coordinates, U = -log base(x) - log_ratio(x).
    """
    potential = _whitened if whitened else _plain
    position = _coordinates(target, x) if whitened else x
    momentum = rng.standard_normal(len(x))
    length = int(rng.integers(1, n_steps + 1))
    uniform = rng.random()
    energy, gradient = potential(target, position)
    start = energy + 0.5 * momentum @ momentum
    for taken in range(1, length + 1):
        momentum = momentum - 0.5 * step_size * gradient
        position = position + step_size * momentum
        energy, gradient = potential(target, position)
        if not np.isfinite(energy) or not np.all(np.isfinite(gradient)):
            return x, 0.0, taken + 1
        momentum = momentum - 0.5 * step_size * gradient
    change = start - energy - 0.5 * momentum @ momentum
    acceptance = math.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if uniform >= acceptance:
        return x, acceptance, length + 1
    moved = target.base.mean + target.base.cholesky @ position if whitened else position
    return moved, acceptance, length + 1


def _coordinates(target, x):
    base = target.base
    return solve_triangular(base.cholesky, x - base.mean, lower=True, check_finite=False)


def _whitened(target, v):
    """Potential energy and its gradient (N,) at v (N,)."""
    base = target.base
    terms = target.log_ratio_terms(base.mean + base.cholesky @ v)
    return 0.5 * float(v @ v) - float(terms[0].sum()), v - base.cholesky.T @ terms[1]


def _plain(target, x):
    terms = target.log_ratio_terms(x)
    score = target.base.score(x)
    # The constant of the base drops out: (x - mean)^T score = -(x - mean)^T K^-1 (x - mean).
    energy = -0.5 * float((x - target.base.mean) @ score) - float(terms[0].sum())
    return energy, -score - terms[1]
