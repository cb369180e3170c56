"""The proposal of PCA-Kameleon: moves along principal eigenfunctions.

Sejdinovic et al. 2014, appendix C.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import SIMD, jit
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.history import History
from pymc_kameleon.mcmc.linalg import add_into, copy_matrix_into, factor_times
from pymc_kameleon.mcmc.proposals import PICK, register_proposal
from pymc_kameleon.mcmc.proposals.local_gaussian import evaluate_gradients, record_position
from pymc_kameleon.mcmc.scalings import Scaling


class Eigenfunctions(NamedTuple):
    """Principal eigenfunctions of the subsample's centred kernel matrix HKH.

    Rows of `vectors` (m, n) are unit eigenvectors a_j, which are centred: H a_j = a_j. `weights`
    (m,) are omega_j, 0 for unused components; `thresholds` (m,) are omega_1 + ... +
    omega_j, infinite from the last component with a weight on. `used` (2,), of floats, has the
    number of the last eigenfunction moved along since this was set, from 1 (NaN: none), and its
    scaling then.
    """

    vectors: np.ndarray
    weights: np.ndarray
    thresholds: np.ndarray
    used: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"vectors": 1}

    @property
    def is_consistent(self) -> bool:
        """Whether every uniform number finds a component."""
        return bool(self.thresholds[-1] == np.inf)


class GradientsHere(NamedTuple):
    """Gradients (d, n) of the kernel at the position, valid if `is_current[0]`, and at x*."""

    is_current: np.ndarray
    gradients: np.ndarray
    proposed: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"gradients": 1, "proposed": 1}


class EigenfunctionMoves(NamedTuple):
    """N(u, gamma^2 I + nu_j^2 c_j c_j^T), with c_j = M H a_j at u for an eigenfunction j.

    j does not depend on the state, so each eigenfunction is a transition with its own ratio.
    """

    kernel: Any
    points: np.ndarray
    parameters: np.ndarray
    eigenfunctions: Eigenfunctions
    here: GradientsHere
    coordinates: Standardization
    scaling: Scaling
    gamma: float
    history: History


@jit(fastmath=SIMD)
def direction(gradients, vector, out):
    """C = M H a with M = 2 `gradients` (d, n) and a centred `vector` (n,), into `out` (d,)."""
    for a in range(out.size):
        total = 0.0
        for i in range(vector.size):
            total += gradients[a, i] * vector[i]
        out[a] = 2.0 * total


@jit
def rank_one_log_ratio(forward, reverse, displacement, gamma, nu):
    """Return log N(x; x*, R*) - log N(x*; x, R) for R = gamma^2 I + nu^2 c c^T.

    c is `forward` in R and `reverse` in R*; x* - x = `displacement`. Inverse and determinant of a
    rank-one covariance are those of Sherman and Morrison.
    """
    forward_size, reverse_size, forward_dot, reverse_dot = 0.0, 0.0, 0.0, 0.0
    for i in range(displacement.size):
        forward_size += forward[i] * forward[i]
        reverse_size += reverse[i] * reverse[i]
        forward_dot += forward[i] * displacement[i]
        reverse_dot += reverse[i] * displacement[i]
    isotropic, rank_one = gamma * gamma, nu * nu
    forward_variance = isotropic + rank_one * forward_size
    reverse_variance = isotropic + rank_one * reverse_size
    explained = reverse_dot**2 / reverse_variance - forward_dot**2 / forward_variance
    return 0.5 * (rank_one / isotropic * explained + math.log(forward_variance / reverse_variance))


def _propose(proposal, chain, normals, uniforms):
    here, eigenfunctions, dim = proposal.here, proposal.eigenfunctions, chain.position.size
    j = 0
    while uniforms[PICK] >= eigenfunctions.thresholds[j]:
        j += 1
    nu, gamma = math.exp(proposal.scaling.log[j]), proposal.gamma
    eigenfunctions.used[0] = j + 1.0
    eigenfunctions.used[1] = nu
    c, proposed_c, u, displacement = np.empty(dim), np.empty(dim), np.empty(dim), np.empty(dim)
    points, parameters = proposal.points, proposal.parameters
    standardize(proposal.coordinates, chain.position, u)
    if not here.is_current[0]:
        evaluate_gradients(proposal.kernel, u, points, parameters, here.gradients)
        here.is_current[0] = True
    direction(here.gradients, eigenfunctions.vectors[j], c)
    for a in range(dim):
        displacement[a] = gamma * normals[a] + nu * normals[dim] * c[a]
    factor_times(proposal.coordinates.factor, displacement, chain.proposal)
    add_into(chain.position, chain.proposal, chain.proposal)
    add_into(u, displacement, u)
    evaluate_gradients(proposal.kernel, u, points, parameters, here.proposed)
    direction(here.proposed, eigenfunctions.vectors[j], proposed_c)
    return rank_one_log_ratio(c, proposed_c, displacement, gamma, nu), j


def _commit(proposal):
    copy_matrix_into(proposal.here.proposed, proposal.here.gradients)


def _invalidate(proposal):
    proposal.here.is_current[0] = False


def directions(proposal, u) -> np.ndarray:
    """c_j of all eigenfunctions at a point `u` (d,) in standardised coordinates, shape (m, d)."""
    vectors = proposal.eigenfunctions.vectors
    found, gradients = np.zeros((len(vectors), u.size)), np.empty(proposal.points.shape)
    proposal.kernel(u, proposal.points, proposal.parameters, gradients)
    for j, vector in enumerate(vectors):
        direction(gradients, vector, found[j])
    return found


def _covariance_at(proposal, x):
    u, factor = np.empty(x.size), proposal.coordinates.factor
    standardize(proposal.coordinates, x, u)
    c = directions(proposal, u)
    variances = proposal.eigenfunctions.weights * np.exp(2 * proposal.scaling.log)
    local = proposal.gamma**2 * np.eye(u.size) + (variances * c.T) @ c
    return factor @ local @ factor.T


register_proposal(
    EigenfunctionMoves,
    propose=_propose,
    commit=_commit,
    invalidate=_invalidate,
    learn=record_position,
    covariance_at=_covariance_at,
)
