"""Moves that know the scales of the coordinates, or points of the history, and nothing else."""

import math
from typing import Annotated, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pymc_kameleon.mcmc.chain import accept_or_reject
from pymc_kameleon.mcmc.layout import floats
from pymc_kameleon.mcmc.linalg import add_into, copy_into
from pymc_kameleon.mcmc.numba_bridge import jit

__all__ = [
    "ACCEPT",
    "CHOICE",
    "N_UNIFORMS",
    "PICK",
    "CoordinateScales",
    "Differences",
    "Scaling",
    "differences_of",
    "move_coordinate",
    "no_differences",
    "propose_difference",
]

N_UNIFORMS = 7
CHOICE, PICK, _SECOND_PICK, _JUMP, ACCEPT = range(N_UNIFORMS - 2)
"""Uniform random numbers of a transition: kind of move, two picks, length, and from `ACCEPT` on
those of acceptance."""

COORDINATE_TARGET = 0.44

JUMP_SHARE = 0.1
"""Share of the difference moves that add the whole difference, which crosses between modes."""

NOISE = 0.01
"""Standard deviation of the noise of difference moves, in standardised coordinates."""


class CoordinateScales(NamedTuple):
    """Scales of moves that change one coordinate, learnt from nothing at the start of a chain.

    Attributes
    ----------
    log_scale : array, shape (d,)
    n_updates : array, shape (d,)
    """

    log_scale: Annotated[np.ndarray, floats("d")]
    n_updates: Annotated[np.ndarray, floats("d")]


class Scaling(NamedTuple):
    """Logs of the scalings of a proposal, and how often each was updated; arrays of shape (m,)."""

    log: Annotated[np.ndarray, floats("scalings")]
    n_updates: Annotated[np.ndarray, floats("scalings")]


class Differences(NamedTuple):
    """Points of the history (d, n) in standardised coordinates, and how they are used.

    Attributes
    ----------
    points : array, shape (d, n)
    factor : array, shape (d, d)
        Lower Cholesky factor of the standardisation.
    scale : float
        What multiplies most differences.
    jump_share : float
        Share of moves that add the whole difference, which crosses between modes.
    noise : float
        Standard deviation of the noise, in standardised coordinates.
    """

    points: np.ndarray
    factor: np.ndarray
    scale: float
    jump_share: float
    noise: float


def differences_of(points: np.ndarray, factor: np.ndarray) -> Differences:
    """Return how points (d, n) of the history are used, of coordinates with this factor (d, d)."""
    return Differences(points, factor, 2.38 / math.sqrt(2 * len(points)), JUMP_SHARE, NOISE)


def no_differences(dim: int) -> Differences:
    """Return what a mixture without differences has in their place."""
    return Differences(np.zeros((dim, 0)), np.eye(dim), 0.0, 0.0, 0.0)


@register_jitable
def move_coordinate(log_density, stage, chain, scales, normals, uniforms, adapts):
    """Propose a change of one coordinate, picked uniformly, and accept or reject it.

    Its scale is learnt fast enough to cross many orders of magnitude in a few dozen proposals.
    """
    i = int(uniforms[PICK] * chain.position.size)
    copy_into(chain.position, chain.proposal)
    chain.proposal[i] += math.exp(scales.log_scale[i]) * normals[0]
    acceptance, accepted = accept_or_reject(log_density, stage, chain, 0.0, uniforms[ACCEPT:])
    if adapts:
        step = 3.0 / (1.0 + 0.1 * scales.n_updates[i])
        scales.n_updates[i] += 1.0
        scales.log_scale[i] += step * (acceptance - COORDINATE_TARGET)
    return acceptance, accepted


@jit
def _difference(factor, points, i, j, scale, noise, normals, out):
    """`factor` @ (scale (points[:, i] - points[:, j]) + noise normals), into `out`."""
    for row in range(out.size):
        total = 0.0
        for k in range(row + 1):
            step = scale * (points[k, i] - points[k, j]) + noise * normals[k]
            total += factor[row, k] * step
        out[row] = total


@register_jitable
def propose_difference(differences, chain, normals, uniforms):
    """Add a multiple of the difference of two history points: symmetric, for these points."""
    n = differences.points.shape[1]
    i = int(uniforms[PICK] * n)
    j = int(uniforms[_SECOND_PICK] * (n - 1))
    if j >= i:
        j += 1
    scale = 1.0 if uniforms[_JUMP] < differences.jump_share else differences.scale
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
