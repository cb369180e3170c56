"""Local Gaussian proposals: x* ~ N(x, R(x)), whose covariance depends on the position.

In standardised coordinates R(u) = gamma^2 I + nu^2 S(u): a proposal gives the scatter S, and the
density of the way back has R at x*. For KAMH, S = M H M^T (Sejdinovic et al. 2014, proposition 2).
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import standardize
from pymc_kameleon.mcmc.layout import flags, floats
from pymc_kameleon.mcmc.linalg import (
    add_into,
    cholesky_in_place,
    copy_matrix_into,
    factor_times,
    solve_factor,
)
from pymc_kameleon.mcmc.numba_bridge import by_class, jit_inner
from pymc_kameleon.mcmc.proposals import register_proposal

__all__ = ["ScatterHere", "register_local_gaussian", "scatter"]


class ScatterHere(NamedTuple):
    """S (d, d) at the current position, valid if `is_current[0]`, and at the proposal."""

    is_current: Annotated[np.ndarray, flags(1)]
    scatter: Annotated[np.ndarray, floats("d", "d")]
    proposed: Annotated[np.ndarray, floats("d", "d")]


@by_class
def scatter(proposal, u, out):
    """Write S(u) (d, d) into `out`."""


@jit_inner
def local_covariance(scatter, gamma, nu, out):
    """R = gamma^2 I + nu^2 S (d, d), into `out`, which may be S."""
    for i in range(out.shape[0]):
        for j in range(i + 1):
            out[i, j] = out[j, i] = nu * nu * scatter[i, j]
        out[i, i] += gamma * gamma


@jit_inner
def reverse_log_density(forward_factor, reverse_factor, normals, displacement):
    """Return log N(x; x*, R(x*)) - log N(x*; x, R(x)).

    The factors are those of R(x) and R(x*); x* - x = `displacement` = forward_factor @ normals,
    which is overwritten with the normals of the way back.
    """
    solve_factor(reverse_factor, displacement, displacement)
    total = 0.0
    for i in range(normals.size):
        total += 0.5 * (normals[i] * normals[i] - displacement[i] * displacement[i])
        total += math.log(forward_factor[i, i] / reverse_factor[i, i])
    return total


def propose_locally(proposal, chain, normals, uniforms):
    """Draw x* from N(x, R(x)); both densities use the same points, scaling and coordinates."""
    here, dim = proposal.here, chain.position.size
    u, displacement = np.empty(dim), np.empty(dim)
    factor, proposed_factor = np.empty((dim, dim)), np.empty((dim, dim))
    nu = math.exp(proposal.scaling.log[0])
    standardize(proposal.coordinates, chain.position, u)
    if not here.is_current[0]:
        scatter(proposal, u, here.scatter)
        here.is_current[0] = True
    local_covariance(here.scatter, proposal.gamma, nu, factor)
    if not cholesky_in_place(factor):
        return -np.inf, 0
    factor_times(factor, normals, displacement)
    factor_times(proposal.coordinates.factor, displacement, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    add_into(u, displacement, u)
    scatter(proposal, u, here.proposed)
    local_covariance(here.proposed, proposal.gamma, nu, proposed_factor)
    if not cholesky_in_place(proposed_factor):
        return -np.inf, 0
    return reverse_log_density(factor, proposed_factor, normals, displacement), 0


def _commit(proposal):
    copy_matrix_into(proposal.here.proposed, proposal.here.scatter)


def _invalidate(proposal):
    proposal.here.is_current[0] = False


def _covariance_at(proposal, x):
    u, covariance = np.empty(x.size), np.empty((x.size, x.size))
    standardize(proposal.coordinates, x, u)
    scatter(proposal, u, covariance)
    local_covariance(covariance, proposal.gamma, math.exp(proposal.scaling.log[0]), covariance)
    return proposal.coordinates.factor @ covariance @ proposal.coordinates.factor.T


def register_local_gaussian(cls: type, scatter_of: Callable) -> None:
    """Register a local Gaussian proposal.

    Parameters
    ----------
    cls : subclass of NamedTuple
        It has at least the fields `here` (`ScatterHere`), `coordinates` (`Standardization`),
        `scaling` (`Scaling`, of one number) and `gamma` (a float).
    scatter_of : callable
        `scatter_of(proposal, u, out)` writes S(u) (d, d) into `out`.
    """
    scatter.register(cls, scatter_of)
    register_proposal(
        cls,
        propose=propose_locally,
        commit=_commit,
        invalidate=_invalidate,
        covariance_at=_covariance_at,
    )
