"""The one loop of all random walks: pick a move, propose, accept or reject, commit, learn.

A transition draws one of three moves with probabilities that do not depend on the state: a change
of one coordinate, in the initial phase of tuning; a difference of two points of the history (ter
Braak & Vrugt 2008); or the proposal's own. Each has its own acceptance ratio, so the mixture leaves
the target invariant as long as points, scales and proposal stand still.
"""

import functools
import math
from typing import NamedTuple

import numba
import numpy as np

from pymc_kameleon.mcmc.bridge.jit import compile_options, jit, jit_inner, jitable, resolved_once
from pymc_kameleon.mcmc.chain import EVALUATIONS, TRANSITION, accept_or_reject
from pymc_kameleon.mcmc.differences import picked_difference, usual_scale
from pymc_kameleon.mcmc.linalg import add_into, copy_into
from pymc_kameleon.mcmc.proposals import (
    ACCEPT,
    CHOICE,
    JUMP,
    PICK,
    SECOND_PICK,
    accept_own,
    commit,
    invalidate,
    learn,
    propose,
)
from pymc_kameleon.mcmc.scalings import CoordinateScales, learn_coordinate_scale, learn_scaling

JUMP_SHARE = 0.1
"""Share of the difference moves that add the whole difference, which crosses between modes."""

NOISE = 0.01
"""Standard deviation of the noise of difference moves, in standardised coordinates."""


class Differences(NamedTuple):
    """Points of the history (d, n) in standardised coordinates, and how they are used.

    `factor` (d, d) is the lower Cholesky factor of the standardisation. `scale` multiplies most
    differences; a `jump_share` of the moves adds the whole difference, which crosses between modes.
    `noise` is the standard deviation of the noise, in standardised coordinates.
    """

    points: np.ndarray
    factor: np.ndarray
    scale: float
    jump_share: float
    noise: float


def differences_of(points: np.ndarray, factor: np.ndarray) -> Differences:
    """Return how points (d, n) of the history are used, of coordinates with this factor (d, d)."""
    return Differences(points, factor, usual_scale(len(points)), JUMP_SHARE, NOISE)


def no_differences(dim: int) -> Differences:
    """Return what a mixture without differences has in their place."""
    return Differences(np.zeros((dim, 0)), np.eye(dim), 0.0, 0.0, 0.0)


class Mixture(NamedTuple):
    """The moves beside the proposal's own, and their shares."""

    scales: CoordinateScales
    differences: Differences
    coordinate_share: float
    difference_share: float


@jitable
def propose_coordinate(scales, chain, normals, uniforms):
    """Change one coordinate, picked uniformly; return which."""
    i = int(uniforms[PICK] * chain.position.size)
    copy_into(chain.position, chain.proposal)
    chain.proposal[i] += math.exp(scales.log_scale[i]) * normals[0]
    return i


@jit_inner
def _difference(factor, points, i, j, scale, noise, normals, out):
    """`factor` @ (scale (points[:, i] - points[:, j]) + noise normals), into `out`."""
    for row in range(out.size):
        total = 0.0
        for k in range(row + 1):
            step = scale * (points[k, i] - points[k, j]) + noise * normals[k]
            total += factor[row, k] * step
        out[row] = total


@jitable
def propose_difference(differences, chain, normals, uniforms):
    """Add a multiple of the difference of two history points: symmetric, for these points."""
    i, j, scale = picked_difference(
        differences.points.shape[1],
        uniforms[PICK],
        uniforms[SECOND_PICK],
        uniforms[JUMP],
        differences.jump_share,
        differences.scale,
    )
    _difference(
        differences.factor,
        differences.points,
        i,
        j,
        scale,
        differences.noise,
        normals,
        chain.proposal,
    )
    add_into(chain.position, chain.proposal, chain.proposal)


def run_plain(log_density, stage, chain, mixture, proposal, recursion, adapts, normals, uniforms):
    """Make a transition with each row of `normals` (n, k) and of `uniforms` (n, N_UNIFORMS).

    `log_density` is what `mcmc.chain.evaluate` takes, `stage` a FirstStage or None, and
    `proposal` a NamedTuple registered in `mcmc.proposals`. The chain learns if `adapts`.
    """
    for t in range(normals.shape[0]):
        chain.counts[TRANSITION] = t
        z, u = normals[t], uniforms[t]
        is_coordinate = u[CHOICE] < mixture.coordinate_share
        is_own = u[CHOICE] >= mixture.coordinate_share + mixture.difference_share
        coordinate, index, log_ratio, acceptance, accepted = 0, -1, 0.0, 0.0, False
        if is_own:
            log_ratio, index = propose(proposal, chain, z, u)
        elif is_coordinate:
            coordinate = propose_coordinate(mixture.scales, chain, z, u)
        else:
            propose_difference(mixture.differences, chain, z, u)
        n_evaluations = chain.counts[EVALUATIONS]
        if is_own and log_ratio > -np.inf:
            acceptance, accepted = accept_own(
                proposal, log_density, stage, chain, log_ratio, z, u[ACCEPT:]
            )
            if accepted:
                commit(proposal)
        elif not is_own:
            acceptance, accepted = accept_or_reject(log_density, stage, chain, 0.0, u[ACCEPT:])
            if accepted:
                invalidate(proposal)
        if adapts:
            if is_coordinate:
                learn_coordinate_scale(mixture.scales, coordinate, acceptance)
            learn_scaling(recursion, index, acceptance)
            is_evaluated = chain.counts[EVALUATIONS] > n_evaluations
            learn(proposal, chain, is_evaluated, acceptance, index)


run_compiled = jit(run_plain)
_run_resolved = resolved_once(run_compiled)
_run_uncached = numba.njit(**compile_options(allocates=False))(run_plain)


@functools.cache
def runner(cls):
    """Return the compiled loop for a class of proposals; that of another package is not cached."""
    package = cls.__module__.split(".")[0]
    return _run_resolved if package == __package__.split(".")[0] else _run_uncached
