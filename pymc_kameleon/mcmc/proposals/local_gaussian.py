"""Kernel Adaptive Metropolis-Hastings: x* ~ N(x, R(x)), whose covariance depends on the position.

In standardised coordinates R(u) = gamma^2 I + nu^2 S(u), and the density of the way back has R at
x*. For KAMH, S = M H M^T with M = 2 [grad k(u, z_1), ..., grad k(u, z_n)] (Sejdinovic et al. 2014,
proposition 2 and algorithm 1); another proposal gives another S. The acceptance probability is in
`mcmc.chain.accept_in_one_stage`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from pymc_kameleon.mcmc.bridge.address import call_for_nothing
from pymc_kameleon.mcmc.bridge.jit import SIMD, by_class, compile_options, jit, jit_inner
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.history import History, record
from pymc_kameleon.mcmc.linalg import (
    add_into,
    cholesky_in_place,
    copy_matrix_into,
    factor_times,
    solve_factor,
)
from pymc_kameleon.mcmc.proposals import register_proposal
from pymc_kameleon.mcmc.scalings import Scaling


def evaluate_gradients(kernel, x, points, parameters, gradients):
    """Write the gradients of k(., points[:, i]) at `x` into the columns of `gradients`.

    `kernel` is an address (an int) in compiled code and a callable in plain Python.
    """
    kernel(x, points, parameters, gradients)


@overload(evaluate_gradients, jit_options=compile_options(False))
def _evaluate_gradients_overload(kernel, x, points, parameters, gradients):
    def compiled(kernel, x, points, parameters, gradients):
        dim, n = points.shape
        if x.size != dim or gradients.shape[0] != dim or gradients.shape[1] != n:
            raise RuntimeError("the subsample has another size than where its gradients go")
        call_for_nothing(kernel, (x, points, parameters, gradients))

    return compiled


class ScatterHere(NamedTuple):
    """S (d, d) at the current position, valid if `is_current[0]`, and at the proposal."""

    is_current: np.ndarray
    scatter: np.ndarray
    proposed: np.ndarray


def no_scatter(dim: int) -> ScatterHere:
    """Return room for S at two positions."""
    return ScatterHere(np.zeros(1, dtype=np.bool_), np.zeros((dim, dim)), np.zeros((dim, dim)))


class KernelGaussian(NamedTuple):
    """N(u, gamma^2 I + nu^2 M H M^T).

    `kernel` is what `evaluate_gradients` takes, and `parameters` what the kernel's
    `gradients` takes. `points` (d, n) are z_i, a subsample of the history in standardised
    coordinates.
    """

    kernel: Any
    points: np.ndarray
    parameters: np.ndarray
    here: ScatterHere
    coordinates: Standardization
    scaling: Scaling
    gamma: float
    history: History


@jit(fastmath=SIMD, allocates=True)
def centred_scatter(gradients, out):
    """M H M^T, with M = 2 `gradients` (d, n) and H = I - 11^T/n, into `out` (d, d).

    Rows are taken two at a time, so that each number loaded serves two products.
    """
    dim, n = gradients.shape
    sums = np.empty(dim)
    for a in range(dim):
        total = 0.0
        for j in range(n):
            total += gradients[a, j]
        sums[a] = total
    inverse = 1.0 / max(n, 1)
    for a in range(0, dim, 2):
        a2 = min(a + 1, dim - 1)
        for b in range(0, a + 1, 2):
            b2 = min(b + 1, dim - 1)
            s11, s12, s21, s22 = 0.0, 0.0, 0.0, 0.0
            for j in range(n):
                s11 += gradients[a, j] * gradients[b, j]
                s12 += gradients[a, j] * gradients[b2, j]
                s21 += gradients[a2, j] * gradients[b, j]
                s22 += gradients[a2, j] * gradients[b2, j]
            out[a, b] = 4.0 * (s11 - sums[a] * sums[b] * inverse)
            out[a, b2] = 4.0 * (s12 - sums[a] * sums[b2] * inverse)
            out[a2, b] = 4.0 * (s21 - sums[a2] * sums[b] * inverse)
            out[a2, b2] = 4.0 * (s22 - sums[a2] * sums[b2] * inverse)
    for a in range(dim):
        for b in range(a):
            out[b, a] = out[a, b]


def _kernel_scatter(proposal, u, out):
    gradients = np.empty(proposal.points.shape)
    evaluate_gradients(proposal.kernel, u, proposal.points, proposal.parameters, gradients)
    centred_scatter(gradients, out)


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
def log_proposal_ratio(forward_factor, reverse_factor, normals, displacement):
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
    return log_proposal_ratio(factor, proposed_factor, normals, displacement), 0


def record_position(proposal, chain, is_evaluated, acceptance, index):
    """Show where the chain is to the proposal's `history`."""
    record(proposal.history, chain.position)


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
    """Register a local Gaussian proposal; `scatter_of(proposal, u, out)` writes its S(u) (d, d).

    `cls` is a NamedTuple with at least the fields `here` (`ScatterHere`), `coordinates`
    (`Standardization`), `scaling` (`Scaling`, of one number), `gamma` (a float) and `history`
    (`History`).
    """
    scatter.register(cls, scatter_of)
    register_proposal(
        cls,
        propose=propose_locally,
        commit=_commit,
        invalidate=_invalidate,
        learn=record_position,
        covariance_at=_covariance_at,
    )


register_local_gaussian(KernelGaussian, _kernel_scatter)
