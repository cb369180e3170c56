"""Parallel tempering: replicas at inverse temperatures from 0 to 1, which move and swap.

Replica k has the density r(x)^(1 - beta_k) p(x)^beta_k, with a normalised reference r: the prior,
or a Gaussian. With V = log p - log r, neighbours swap with probability
min(1, exp((beta_{k+1} - beta_k) (V_k - V_{k+1}))), pairs (0, 1), (2, 3), ... and (1, 2), (3, 4),
... in turn, which carries states from one end to the other faster than random pairs (Okabe et al.
2001; Syed, Bouchard-Cote, Deligiannidis & Doucet 2022).

A transition of the chain, which is the last replica, moves every replica and then swaps. While
archives, ladder and reference stand still, each move and each swap leaves the product of all
densities invariant.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit, jitable
from pymc_kameleon.mcmc.chain import (
    ACCEPTANCE,
    ACCEPTED,
    N_TERMS,
    evaluate,
    is_within,
    probability,
    wrap_angle,
)
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.differences import add_difference, picked_difference, usual_scale
from pymc_kameleon.mcmc.linalg import add_into, copy_into, factor_times
from pymc_kameleon.mcmc.proposals import register_proposal
from pymc_kameleon.mcmc.proposals.trends import pick, propose_along
from pymc_kameleon.mcmc.scalings import ScalingRecursion, learn_scaling

MOVES = DIFFERENCE, WALK, STRETCH, COORDINATE = 0, 1, 2, 3
"""Kinds of moves: by a difference of two points of the archive, a random walk with the covariance
of the archive, towards or away from a point of it, and of one coordinate at a random scale."""

N_UNIFORMS = 5
KIND, FIRST, SECOND, LENGTH, ACCEPT = range(N_UNIFORMS)
"""Uniform random numbers of a move: kind, two picks, length and acceptance."""

JUMP_SHARE = 0.2
"""Share of difference moves that add the whole difference, which crosses between modes."""

NOISE = 0.01
"""Noise of difference moves, in standard deviations of the archive."""

WIDEST_STRETCH = 2.0

ALONG_SHARE = 0.5
"""Share of the moves of one coordinate that the others follow, see `trends`."""

SPREAD = 1.7
"""Standard deviation of the log of the scale of moves of one coordinate."""

FARTHEST = 10.0
"""Standard deviations, the longest of them: much further out log densities are rounding errors."""


class Reference(NamedTuple):
    """What beta = 0 is: the prior, if `is_prior` (1,), or a Gaussian."""

    is_prior: np.ndarray
    gaussian: Standardization


class Ladder(NamedTuple):
    """Inverse temperatures (K,), and for each what its moves are made with.

    `archive` (K, n, d) are points of that temperature, `location` (K, d), `deviations` (K, d) and
    `factor` (K, d, d) their means, standard deviations and the factor of their covariance, and
    `trends` (K, d, d, 4) and `picks` (K, d) what moves along trends take. `log_scale` (K,) are logs
    of the scalings of random walks, which were learnt from `n_walks` (K,). `barrier` (1,) is the
    sum of the rejection probabilities of all swaps in the last round; NaN before there was one.
    """

    betas: np.ndarray
    archive: np.ndarray
    location: np.ndarray
    trends: np.ndarray
    picks: np.ndarray
    deviations: np.ndarray
    factor: np.ndarray
    log_scale: np.ndarray
    n_walks: np.ndarray
    barrier: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(self._fields[:-1], 0)


class Tuning(NamedTuple):
    """What is recorded in a round of tuning; all arrays are changed in place.

    `points` (K, n, d) are evenly spaced states, every `stride`-th scan of `scans`: `cursor` (3,) of
    int64 has the scans of this round, the stride, and the number stored. `rejected` (K - 1, 2) sums
    the rejection probabilities of swaps, and counts them.
    """

    points: np.ndarray
    cursor: np.ndarray
    rejected: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("points", "rejected"), 0)


class States(NamedTuple):
    """States of all temperatures, the last of which is the chain; arrays are changed in place.

    `positions` (K, d), `values` (K, 3) as the log density returns them, `base` (K,) = log r and
    `ratio` (K,) = V. `is_current` (1,) is False where values have to be evaluated again. `fresh`
    (n, d) are draws of the prior, of which `counters[FRESH]` were used: each takes the place of the
    first state once. `counters` (3,) counts scans and round trips, too; `visited` (K,) says of
    each state whether it has been at beta = 0 since it was last at 1. `swaps` (2,) are summed
    acceptance probabilities of swaps since the last draw, and their number.
    """

    positions: np.ndarray
    values: np.ndarray
    base: np.ndarray
    ratio: np.ndarray
    is_current: np.ndarray
    fresh: np.ndarray
    counters: np.ndarray
    visited: np.ndarray
    swaps: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("positions", "values", "base", "ratio", "fresh", "visited"), 0)


class Replicas(NamedTuple):
    """Ladder and states, and what moves are made with.

    `hot_density` is what replicas before the last evaluate, as `mcmc.chain.evaluate` takes it. It
    is another one than the chain's where other steps move what it depends on (`is_apart`), which
    for the replicas stands still. `n_moves` are those of a replica between swaps, and `recursion`
    is how the scalings of random walks are learnt.
    """

    hot_density: Any
    is_apart: bool
    n_moves: int
    adapts: bool
    recursion: ScalingRecursion
    ladder: Ladder
    reference: Reference
    tuning: Tuning
    states: States


SCANS, TRIPS, FRESH = 0, 1, 2
"""Positions in `States.counters`."""


def normals_of_scan(n_temperatures: int, n_moves: int, dim: int) -> int:
    """Return how many normal random numbers a scan takes."""
    return n_temperatures * n_moves * (dim + 1) + dim


def uniforms_of_scan(n_temperatures: int, n_moves: int) -> int:
    """Return how many uniform random numbers a scan takes."""
    return n_temperatures * (n_moves * N_UNIFORMS + 1)


@jit(allocates=True)
def log_normal(gaussian, x):
    """Log density at `x` (d,) of the Gaussian of a `Standardization`."""
    dim = x.size
    whitened = np.empty(dim)
    standardize(gaussian, x, whitened)
    total = -0.5 * dim * math.log(2.0 * math.pi)
    for i in range(dim):
        total -= 0.5 * whitened[i] * whitened[i] + math.log(gaussian.factor[i, i])
    return total


@jitable(allocates=True)
def split(reference, x, value):
    """Log r and V at `x` (d,), from the terms of the log density; -inf for what is not finite."""
    likelihood = value[1] + value[2]
    if reference.is_prior[0]:
        base, ratio = value[0], likelihood
    else:
        base = log_normal(reference.gaussian, x)
        ratio = value[0] + likelihood - base
    base = base if -np.inf < base < np.inf else -np.inf
    return base, ratio if -np.inf < ratio < np.inf else -np.inf


@jitable
def tempered(base, ratio, beta):
    """Log density at a temperature; that of the reference needs no likelihood."""
    return base + beta * ratio if beta > 0.0 else base


@jitable
def difference(log_proposed, log_current):
    """Difference of log densities; -inf where there is none at what is proposed."""
    return log_proposed - log_current if log_proposed > -np.inf else -np.inf


@jitable
def _propose_stretch(archive, x, uniforms, out):
    """Move towards or away from a point of the archive (Goodman & Weare 2010), which is fixed."""
    anchor = archive[int(uniforms[FIRST] * archive.shape[0])]
    root = math.sqrt(WIDEST_STRETCH)
    stretch = (1.0 / root + uniforms[LENGTH] * (root - 1.0 / root)) ** 2
    for i in range(x.size):
        out[i] = anchor[i] + stretch * (x[i] - anchor[i])
    return (x.size - 1) * math.log(stretch)


@jitable
def _propose_difference(archive, deviations, x, normals, uniforms, out):
    n, dim = archive.shape
    scale = usual_scale(dim) * math.exp(0.5 * normals[dim])
    i, j, scale = picked_difference(
        n, uniforms[FIRST], uniforms[SECOND], uniforms[LENGTH], JUMP_SHARE, scale
    )
    add_difference(x, archive.T, i, j, scale, out)
    for a in range(dim):
        out[a] += NOISE * deviations[a] * normals[a]


@jitable
def propose_at(ladder, k, kind, x, normals, uniforms, out):
    """Write a move of a kind from `x` (d,) into `out`; return log q(x | x*) - log q(x* | x)."""
    dim = x.size
    if kind == DIFFERENCE:
        _propose_difference(ladder.archive[k], ladder.deviations[k], x, normals, uniforms, out)
    elif kind == WALK:
        factor_times(ladder.factor[k], normals[:dim], out)
        scale = math.exp(ladder.log_scale[k])
        for i in range(dim):
            out[i] = x[i] + scale * out[i]
    elif kind == STRETCH:
        return _propose_stretch(ladder.archive[k], x, uniforms, out)
    else:
        size = math.exp(SPREAD * normals[dim]) * normals[0]
        deviations, size = ladder.deviations[k], min(max(size, -FARTHEST), FARTHEST)
        if uniforms[SECOND] < ALONG_SHARE:
            j, trends = pick(ladder.picks[k], uniforms[FIRST]), ladder.trends[k]
            change = size * deviations[j]
            return propose_along(trends, ladder.location[k], deviations, j, change, x, out)
        j = int(uniforms[FIRST] * dim)
        copy_into(x, out)
        out[j] += size * deviations[j]
    return 0.0


@jitable
def kind_of(uniform):
    """Return the kind of a move; all are equally probable."""
    return int(uniform * len(MOVES))


@jitable(allocates=True)
def _move(replicas, density, k, chain, normals, uniforms):
    """Make moves of replica k; return their summed acceptance, and how many were accepted."""
    states, ladder, dim = replicas.states, replicas.ladder, chain.position.size
    x, beta = states.positions[k], ladder.betas[k]
    total, n_accepted, base, ratio = 0.0, 0, 0.0, 0.0
    for t in range(replicas.n_moves):
        z = normals[t * (dim + 1) : (t + 1) * (dim + 1)]
        u = uniforms[t * N_UNIFORMS : (t + 1) * N_UNIFORMS]
        kind = kind_of(u[KIND])
        log_ratio = propose_at(ladder, k, kind, x, z, u, chain.proposal)
        acceptance, accepted = 0.0, False
        if log_ratio > -np.inf and is_within(chain.bounds, chain.proposal):
            evaluate(density, chain.proposal, chain.proposed_value, chain.counts)
            base, ratio = split(replicas.reference, chain.proposal, chain.proposed_value)
            here = tempered(states.base[k], states.ratio[k], beta)
            acceptance = probability(difference(tempered(base, ratio, beta), here) + log_ratio)
            accepted = u[ACCEPT] < acceptance
        if accepted:
            copy_into(chain.proposal, x)
            copy_into(chain.proposed_value, states.values[k])
            states.base[k], states.ratio[k] = base, ratio
            n_accepted += 1
        if replicas.adapts and kind == WALK:
            learn_scaling(replicas.recursion, k, acceptance)
        total += acceptance
    return total, n_accepted


@jitable(allocates=True)
def _evaluate_at(replicas, density, k, chain):
    """Evaluate replica k where it is."""
    states = replicas.states
    evaluate(density, states.positions[k], states.values[k], chain.counts)
    base, ratio = split(replicas.reference, states.positions[k], states.values[k])
    states.base[k], states.ratio[k] = base, ratio


@jitable
def _turn_into(bounds, x):
    """Move angles by whole turns to between their bounds."""
    for i in range(x.size):
        if bounds[0, i] > -np.inf:
            x[i] = wrap_angle(x[i], bounds[0, i])


@jitable(allocates=True)
def _refresh(replicas, chain, normals):
    """Put an exact draw of the reference in the place of the first replica; return whether."""
    states, gaussian, drawn = replicas.states, replicas.reference.gaussian, chain.proposal
    if replicas.reference.is_prior[0]:
        if states.counters[FRESH] == states.fresh.shape[0]:
            return False
        copy_into(states.fresh[states.counters[FRESH]], drawn)
        states.counters[FRESH] += 1
        _turn_into(chain.bounds, drawn)
    else:
        factor_times(gaussian.factor, normals, drawn)
        add_into(gaussian.location, drawn, drawn)
        if not is_within(chain.bounds, drawn):  # so that it is a draw of one period
            return False
    copy_into(drawn, states.positions[0])
    states.visited[0] = True
    _evaluate_at(replicas, replicas.hot_density, 0, chain)
    return True


@jitable
def _exchange(first, second):
    for i in range(first.size):
        first[i], second[i] = second[i], first[i]


@jitable(allocates=True)
def _swap_apart(replicas, log_density, k, chain, uniform, spare):
    """Swap the chain with the replica before it, where they have densities of their own."""
    states, reference, beta = replicas.states, replicas.reference, replicas.ladder.betas[k]
    hot, cold, terms = states.positions[k], states.positions[k + 1], states.values[k + 1]
    there = evaluate(log_density, hot, chain.proposed_value, chain.counts)
    evaluate(replicas.hot_density, cold, spare, chain.counts)
    base, ratio = split(reference, cold, spare)
    log_ratio = there - (terms[0] + terms[1] + terms[2]) + tempered(base, ratio, beta)
    log_ratio -= tempered(states.base[k], states.ratio[k], beta)
    acceptance = probability(log_ratio)
    accepted = uniform < acceptance
    if accepted:
        _exchange(hot, cold)
        copy_into(spare, states.values[k])
        copy_into(chain.proposed_value, terms)
        states.base[k], states.ratio[k] = base, ratio
        states.base[k + 1], states.ratio[k + 1] = split(reference, cold, terms)
    return acceptance, accepted


@jitable
def log_swap_ratio(betas, ratio, k):
    """Log acceptance ratio of a swap of the states k and k + 1."""
    return (betas[k + 1] - betas[k]) * difference(ratio[k], ratio[k + 1])


@jitable(allocates=True)
def _swap(replicas, log_density, k, chain, uniform, spare):
    """Swap the states of k and k + 1, or not; return the acceptance probability."""
    states = replicas.states
    if replicas.is_apart and k + 2 == replicas.ladder.betas.size:
        acceptance, accepted = _swap_apart(replicas, log_density, k, chain, uniform, spare)
    else:
        base, ratio = states.base, states.ratio
        acceptance = probability(log_swap_ratio(replicas.ladder.betas, ratio, k))
        accepted = uniform < acceptance
        if accepted:
            _exchange(states.positions[k], states.positions[k + 1])
            _exchange(states.values[k], states.values[k + 1])
            base[k], base[k + 1] = base[k + 1], base[k]
            ratio[k], ratio[k + 1] = ratio[k + 1], ratio[k]
    if accepted:
        visited = states.visited
        visited[k], visited[k + 1] = visited[k + 1], visited[k]
    return acceptance


@jitable
def _record(replicas):
    tuning = replicas.tuning
    stored = tuning.cursor[2]
    if tuning.cursor[0] % tuning.cursor[1] == 0 and stored < tuning.points.shape[1]:
        for k in range(replicas.states.positions.shape[0]):
            copy_into(replicas.states.positions[k], tuning.points[k, stored])
        tuning.cursor[2] += 1
    tuning.cursor[0] += 1


@jitable(allocates=True)
def _arrive(replicas, chain):
    """Put the chain in the last place, and evaluate what is not known."""
    states, last = replicas.states, replicas.states.positions.shape[0] - 1
    copy_into(chain.position, states.positions[last])
    copy_into(chain.value, states.values[last])
    base, ratio = split(replicas.reference, chain.position, chain.value)
    states.base[last], states.ratio[last] = base, ratio
    for k in range(last):
        _turn_into(chain.bounds, states.positions[k])
    if not states.is_current[0]:
        for k in range(last):
            _evaluate_at(replicas, replicas.hot_density, k, chain)
        states.is_current[0] = True


def _propose(replicas, chain, normals, uniforms):
    return 0.0, 0


def _covariance_at(replicas, x):
    factor = math.exp(replicas.ladder.log_scale[-1]) * replicas.ladder.factor[-1]
    return factor @ factor.T


def _scan(replicas, log_density, stage, chain, log_ratio, normals, uniforms):
    """Move every replica but a fresh one, then swap every other pair; the chain is the last."""
    states, n_moves, spare = replicas.states, replicas.n_moves, np.empty(N_TERMS)
    n, dim = states.positions.shape
    _arrive(replicas, chain)
    is_fresh = _refresh(replicas, chain, normals[n * n_moves * (dim + 1) :])
    total, n_accepted = 0.0, 0
    for k in range(1 if is_fresh else 0, n):
        z = normals[k * n_moves * (dim + 1) : (k + 1) * n_moves * (dim + 1)]
        u = uniforms[3 + k * n_moves * N_UNIFORMS : 3 + (k + 1) * n_moves * N_UNIFORMS]
        density = log_density if k == n - 1 else replicas.hot_density
        total, n_accepted = _move(replicas, density, k, chain, z, u)
    swapped = uniforms[3 + n * n_moves * N_UNIFORMS :]
    for k in range(states.counters[SCANS] % 2, n - 1, 2):
        acceptance = _swap(replicas, log_density, k, chain, swapped[k], spare)
        states.swaps[0] += acceptance
        states.swaps[1] += 1.0
        if replicas.adapts:
            replicas.tuning.rejected[k, 0] += 1.0 - acceptance
            replicas.tuning.rejected[k, 1] += 1.0
    if states.visited[n - 1]:
        states.counters[TRIPS] += 1
        states.visited[n - 1] = False
    states.counters[SCANS] += 1
    copy_into(states.positions[n - 1], chain.position)
    copy_into(states.values[n - 1], chain.value)
    if replicas.adapts:
        _record(replicas)
    chain.outcome[ACCEPTANCE] += total / n_moves
    chain.outcome[ACCEPTED] += n_accepted / n_moves
    return total / n_moves, n_accepted > 0


register_proposal(Replicas, propose=_propose, accept=_scan, covariance_at=_covariance_at)
