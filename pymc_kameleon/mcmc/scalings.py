"""How scalings are learnt: that of a proposal, and those of moves that change one coordinate."""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jitable

COORDINATE_TARGET = 0.44

LARGEST_LOG_SCALING = 20.0


def target_acceptance(dim: int) -> float:
    """Return the acceptance that a scaling is learnt for: 0.44 in one dimension, else 0.234."""
    return COORDINATE_TARGET if dim == 1 else 0.234


class Scaling(NamedTuple):
    """Logs of the scalings of a proposal, and how often each was updated; arrays of shape (m,)."""

    log: np.ndarray
    n_updates: np.ndarray


def new_scaling(scaling: float, m: int = 1) -> Scaling:
    """Return `m` equal scalings that were never updated."""
    return Scaling(np.full(m, math.log(scaling)), np.zeros(m))


class ScalingBounds(NamedTuple):
    """Bounds of log scalings, shape (m,).

    Without kernel support every small move is accepted and the recursion would run away; where all
    moves fail, it would shrink to nothing.
    """

    smallest: np.ndarray
    largest: np.ndarray


WIDEST_BOUNDS = ScalingBounds(np.full(1, -LARGEST_LOG_SCALING), np.full(1, LARGEST_LOG_SCALING))
"""Bounds of one log scaling that has no others."""


class ScalingRecursion(NamedTuple):
    """Robbins-Monro recursion of the scaling that a move was made with.

    The n-th step of a log scaling is `factor` n^-`power` times acceptance minus target (Andrieu &
    Thoms 2008, algorithm 4).
    """

    scaling: Scaling
    bounds: ScalingBounds
    target_accept: float
    factor: float
    power: float
    learns: bool


NO_RECURSION = ScalingRecursion(
    Scaling(np.zeros(0), np.zeros(0)), ScalingBounds(np.zeros(0), np.zeros(0)), 0.0, 0.0, 0.0, False
)
"""What a proposal without a scaling has in its place."""


@jitable
def learn_scaling(recursion, j, acceptance):
    """Learn from a move with scaling `j`; -1 is one that was not the proposal's own."""
    if recursion.learns and j >= 0:
        scaling, bounds = recursion.scaling, recursion.bounds
        scaling.n_updates[j] += 1.0
        step = recursion.factor * scaling.n_updates[j] ** -recursion.power
        log_scaling = scaling.log[j] + step * (acceptance - recursion.target_accept)
        scaling.log[j] = min(max(log_scaling, bounds.smallest[j]), bounds.largest[j])


class CoordinateScales(NamedTuple):
    """Scales of moves that change one coordinate, learnt from nothing at the start of a chain.

    Logs of the scales, and how often each was updated; arrays of shape (d,).
    """

    log_scale: np.ndarray
    n_updates: np.ndarray


@jitable
def learn_coordinate_scale(scales, i, acceptance):
    """Learn from a move of coordinate `i`.

    It is fast enough to cross many orders of magnitude in a few dozen proposals.
    """
    step = 3.0 / (1.0 + 0.1 * scales.n_updates[i])
    scales.n_updates[i] += 1.0
    scales.log_scale[i] += step * (acceptance - COORDINATE_TARGET)
