"""The one loop of all random walks: pick a move, propose, accept or reject, commit, learn.

A transition draws one of three moves with probabilities that do not depend on the state: a change
of one coordinate, in the initial phase of tuning; a difference of two points of the history (ter
Braak & Vrugt 2008); or the proposal's own. Each has its own acceptance ratio, so the mixture leaves
the target invariant as long as points, scales and proposal stand still.
"""

import functools
from typing import NamedTuple

import numba
import numpy as np

from pymc_kameleon.mcmc.chain import accept_or_reject
from pymc_kameleon.mcmc.moves import (
    ACCEPT,
    CHOICE,
    CoordinateScales,
    Differences,
    move_coordinate,
    propose_difference,
)
from pymc_kameleon.mcmc.numba_bridge import by_class, jit, resolved_once
from pymc_kameleon.mcmc.proposals import commit, invalidate, propose

__all__ = ["Mixture", "observe", "run_plain", "runner"]


@by_class
def observe(observer, position, acceptance, index):
    """Learn from a transition of a chain that adapts.

    Parameters
    ----------
    observer : NamedTuple
    position : array, shape (d,)
        Where the chain is now.
    acceptance : float
        Acceptance probability of the move.
    index : int
        What `propose` returned; -1 for a move that was not the proposal's.
    """


class Mixture(NamedTuple):
    """The moves beside the proposal's own, and their shares."""

    scales: CoordinateScales
    differences: Differences
    coordinate_share: float
    difference_share: float


def run_plain(
    log_density,
    stage,
    chain,
    mixture,
    proposal,
    observer,
    adapts,
    normals,
    uniforms,
):
    """Make `len(normals)` transitions.

    Parameters
    ----------
    log_density
        As `numba_bridge.evaluate` takes it.
    stage : FirstStage or None
    chain : Chain
    mixture : Mixture
    proposal : NamedTuple registered in `mcmc.proposals`
    observer : NamedTuple for which `observe` is registered
    adapts : bool
        Whether the chain learns.
    normals : array, shape (n, k)
    uniforms : array, shape (n, N_UNIFORMS)
    """
    for t in range(normals.shape[0]):
        choice = uniforms[t, CHOICE]
        acceptance, index = 0.0, -1
        if choice < mixture.coordinate_share:
            acceptance, accepted = move_coordinate(
                log_density, stage, chain, mixture.scales, normals[t], uniforms[t], adapts
            )
            if accepted:
                invalidate(proposal)
        elif choice < mixture.coordinate_share + mixture.difference_share:
            propose_difference(mixture.differences, chain, normals[t], uniforms[t])
            acceptance, accepted = accept_or_reject(
                log_density, stage, chain, 0.0, uniforms[t, ACCEPT:]
            )
            if accepted:
                invalidate(proposal)
        else:
            log_ratio, index = propose(proposal, chain, normals[t], uniforms[t])
            if log_ratio > -np.inf:
                acceptance, accepted = accept_or_reject(
                    log_density, stage, chain, log_ratio, uniforms[t, ACCEPT:]
                )
                if accepted:
                    commit(proposal)
        if adapts:
            observe(observer, chain.position, acceptance, index)


run_compiled = jit(run_plain)
_run_resolved = resolved_once(run_compiled)
_run_uncached = numba.njit(run_plain)


@functools.cache
def runner(cls):
    """Return the compiled loop for a class of proposals; that of another package is not cached."""
    package = cls.__module__.split(".")[0]
    return _run_resolved if package == __package__.split(".")[0] else _run_uncached
