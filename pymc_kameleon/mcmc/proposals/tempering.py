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

from pymc_kameleon.mcmc.chain import ACCEPTANCE, ACCEPTED, is_within, probability
from pymc_kameleon.mcmc.linalg import add_into, copy_into, factor_times, solve_factor
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, evaluate, jit, jitable
from pymc_kameleon.mcmc.proposals import register_proposal

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

SPREAD = 1.7
"""Standard deviation of the log of the scale of moves of one coordinate."""


class Reference(NamedTuple):
    """What beta = 0 is: the prior, or N(mean, factor factor^T), (d,) and (d, d)."""

    is_prior: np.ndarray
    mean: np.ndarray
    factor: np.ndarray


class Ladder(NamedTuple):
    """Inverse temperatures (K,), and for each what its moves are made with.

    `archive` (K, n, d) are points of that temperature, `deviations` (K, d) and `factor` (K, d, d)
    their standard deviations and the factor of their covariance, `log_scale` (K,) that of random
    walks, and `thresholds` (K, 3) the summed shares of all kinds of moves but the last.
    """

    betas: np.ndarray
    archive: np.ndarray
    deviations: np.ndarray
    factor: np.ndarray
    log_scale: np.ndarray
    thresholds: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(self._fields, 0)


class Tuning(NamedTuple):
    """What is recorded in a round of tuning; all arrays are changed in place.

    `points` (K, n, d) are evenly spaced states, every `stride`-th scan of `scans`: `cursor` (3,) of
    int64 has the scans of this round, the stride, and the number stored. `rejected` (K - 1, 2) sums
    the rejection probabilities of swaps, and counts them; `gains` (K, 4, 2) sums the squared jumps
    of each kind of move, in standard deviations, and counts moves; `n_walks` (K,) counts random
    walks ever made.
    """

    points: np.ndarray
    cursor: np.ndarray
    rejected: np.ndarray
    gains: np.ndarray
    n_walks: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("points", "rejected", "gains", "n_walks"), 0)


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

    `hot_density` is what replicas before the last evaluate, as `numba_bridge.evaluate` takes it. It
    is another one than the chain's where other steps move what it depends on (`is_apart`), which
    for the replicas stands still. `n_moves` are those of a replica between swaps.
    """

    hot_density: Any
    is_apart: bool
    n_moves: int
    adapts: bool
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
def log_reference(reference, x):
    """Log density of the Gaussian reference at `x` (d,)."""
    dim = x.size
    whitened = np.empty(dim)
    for i in range(dim):
        whitened[i] = x[i] - reference.mean[i]
    solve_factor(reference.factor, whitened, whitened)
    total = -0.5 * dim * math.log(2.0 * math.pi)
    for i in range(dim):
        total -= 0.5 * whitened[i] * whitened[i] + math.log(reference.factor[i, i])
    return total


@jitable(allocates=True)
def split(reference, x, value):
    """Log r and V at `x` (d,), from the terms of the log density; -inf for what is not finite."""
    likelihood = value[1] + value[2]
    if reference.is_prior[0]:
        base, ratio = value[0], likelihood
    else:
        base = log_reference(reference, x)
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
    i, j = int(uniforms[FIRST] * n), int(uniforms[SECOND] * (n - 1))
    if j >= i:
        j += 1
    scale = 2.38 / math.sqrt(2.0 * dim) * math.exp(0.5 * normals[dim])
    if uniforms[LENGTH] < JUMP_SHARE:
        scale = 1.0
    for a in range(dim):
        difference = scale * (archive[i, a] - archive[j, a])
        out[a] = x[a] + difference + NOISE * deviations[a] * normals[a]


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
        i = int(uniforms[FIRST] * dim)
        copy_into(x, out)
        out[i] += ladder.deviations[k, i] * math.exp(SPREAD * normals[dim]) * normals[0]
    return 0.0


@jitable
def _learn_move(replicas, k, kind, before, acceptance, accepted):
    gains, ladder = replicas.tuning.gains, replicas.ladder
    gains[k, kind, 1] += 1.0
    if accepted:
        for i in range(before.size):
            jump = (replicas.states.positions[k, i] - before[i]) / ladder.deviations[k, i]
            gains[k, kind, 0] += min(jump * jump, 4.0)
    if kind == WALK:
        n_walks = replicas.tuning.n_walks
        n_walks[k] += 1.0
        target = 0.44 if before.size == 1 else 0.234
        ladder.log_scale[k] += n_walks[k] ** -0.6 * (acceptance - target)


@jitable(allocates=True)
def _move(replicas, density, k, chain, normals, uniforms, before):
    """Make moves of replica k; return their summed acceptance, and how many were accepted."""
    ladder, dim = replicas.ladder, chain.position.size
    x, beta, thresholds = replicas.states.positions[k], ladder.betas[k], ladder.thresholds[k]
    total, n_accepted, base, ratio = 0.0, 0, 0.0, 0.0
    for t in range(replicas.n_moves):
        z = normals[t * (dim + 1) : (t + 1) * (dim + 1)]
        u = uniforms[t * N_UNIFORMS : (t + 1) * N_UNIFORMS]
        kind = 0
        while kind < thresholds.size and u[KIND] >= thresholds[kind]:
            kind += 1
        log_ratio = propose_at(ladder, k, kind, x, z, u, chain.proposal)
        acceptance, accepted = 0.0, False
        if is_within(chain.bounds, chain.proposal):
            evaluate(density, chain.proposal, chain.proposed_value, chain.counts)
            base, ratio = split(replicas.reference, chain.proposal, chain.proposed_value)
            here = tempered(replicas.states.base[k], replicas.states.ratio[k], beta)
            acceptance = probability(difference(tempered(base, ratio, beta), here) + log_ratio)
            accepted = u[ACCEPT] < acceptance
        if replicas.adapts:
            copy_into(x, before)
        if accepted:
            copy_into(chain.proposal, x)
            copy_into(chain.proposed_value, replicas.states.values[k])
            replicas.states.base[k], replicas.states.ratio[k] = base, ratio
            n_accepted += 1
        if replicas.adapts:
            _learn_move(replicas, k, kind, before, acceptance, accepted)
        total += acceptance
    return total, n_accepted


@jitable(allocates=True)
def _evaluate_at(replicas, density, k, chain):
    """Evaluate replica k where it is."""
    evaluate(density, replicas.states.positions[k], replicas.states.values[k], chain.counts)
    base, ratio = split(replicas.reference, replicas.states.positions[k], replicas.states.values[k])
    replicas.states.base[k], replicas.states.ratio[k] = base, ratio


@jitable
def _turn_into(bounds, x):
    """Move angles by whole turns to between their bounds."""
    for i in range(x.size):
        width = bounds[1, i] - bounds[0, i]
        if width < np.inf:
            x[i] -= width * math.floor((x[i] - bounds[0, i]) / width)


@jitable(allocates=True)
def _refresh(replicas, chain, normals):
    """Put an exact draw of the reference in the place of the first replica, if there is one."""
    drawn, reference = chain.proposal, replicas.reference
    if reference.is_prior[0]:
        if replicas.states.counters[FRESH] == replicas.states.fresh.shape[0]:
            return
        copy_into(replicas.states.fresh[replicas.states.counters[FRESH]], drawn)
        replicas.states.counters[FRESH] += 1
        _turn_into(chain.bounds, drawn)
    else:
        factor_times(reference.factor, normals, drawn)
        add_into(reference.mean, drawn, drawn)
        if not is_within(chain.bounds, drawn):  # so that it is a draw of one period
            return
    copy_into(drawn, replicas.states.positions[0])
    replicas.states.visited[0] = True
    _evaluate_at(replicas, replicas.hot_density, 0, chain)


@jitable
def _exchange(first, second):
    for i in range(first.size):
        first[i], second[i] = second[i], first[i]


@jitable(allocates=True)
def _swap_apart(replicas, log_density, k, chain, uniform, spare):
    """Swap the chain with the replica before it, where they have densities of their own."""
    reference, beta = replicas.reference, replicas.ladder.betas[k]
    hot, cold = replicas.states.positions[k], replicas.states.positions[k + 1]
    there = evaluate(log_density, hot, chain.proposed_value, chain.counts)
    evaluate(replicas.hot_density, cold, spare, chain.counts)
    base, ratio = split(reference, cold, spare)
    here = (
        replicas.states.values[k + 1, 0]
        + replicas.states.values[k + 1, 1]
        + replicas.states.values[k + 1, 2]
    )
    log_ratio = there - here + tempered(base, ratio, beta)
    log_ratio -= tempered(replicas.states.base[k], replicas.states.ratio[k], beta)
    acceptance = probability(log_ratio)
    accepted = uniform < acceptance
    if accepted:
        _exchange(hot, cold)
        copy_into(spare, replicas.states.values[k])
        copy_into(chain.proposed_value, replicas.states.values[k + 1])
        replicas.states.base[k], replicas.states.ratio[k] = base, ratio
        base, ratio = split(reference, cold, chain.proposed_value)
        replicas.states.base[k + 1], replicas.states.ratio[k + 1] = base, ratio
    return acceptance, accepted


@jitable
def log_swap_ratio(betas, ratio, k):
    """Log acceptance ratio of a swap of the states k and k + 1."""
    return (betas[k + 1] - betas[k]) * difference(ratio[k], ratio[k + 1])


@jitable(allocates=True)
def _swap(replicas, log_density, k, chain, uniform, spare):
    """Swap the states of k and k + 1, or not; return the acceptance probability."""
    if replicas.is_apart and k + 2 == replicas.ladder.betas.size:
        acceptance, accepted = _swap_apart(replicas, log_density, k, chain, uniform, spare)
    else:
        ratio = replicas.states.ratio
        acceptance = probability(log_swap_ratio(replicas.ladder.betas, ratio, k))
        accepted = uniform < acceptance
        if accepted:
            _exchange(replicas.states.positions[k], replicas.states.positions[k + 1])
            _exchange(replicas.states.values[k], replicas.states.values[k + 1])
            base = replicas.states.base
            base[k], base[k + 1] = base[k + 1], base[k]
            ratio[k], ratio[k + 1] = ratio[k + 1], ratio[k]
    if accepted:
        visited = replicas.states.visited
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
    last = replicas.states.positions.shape[0] - 1
    copy_into(chain.position, replicas.states.positions[last])
    for i in range(N_TERMS):
        replicas.states.values[last, i] = chain.value[i]
    base, ratio = split(replicas.reference, chain.position, chain.value)
    replicas.states.base[last], replicas.states.ratio[last] = base, ratio
    for k in range(last):
        _turn_into(chain.bounds, replicas.states.positions[k])
    if not replicas.states.is_current[0]:
        for k in range(last):
            _evaluate_at(replicas, replicas.hot_density, k, chain)
        replicas.states.is_current[0] = True


def _propose(replicas, chain, normals, uniforms):
    return 0.0, 0


def _covariance_at(replicas, x):
    factor = math.exp(replicas.ladder.log_scale[-1]) * replicas.ladder.factor[-1]
    return factor @ factor.T


def _scan(replicas, log_density, stage, chain, log_ratio, normals, uniforms):
    """Move every replica, then swap every other pair; the chain is where the last replica is."""
    dim, n, n_moves = chain.position.size, replicas.states.positions.shape[0], replicas.n_moves
    before, spare = np.empty(dim), np.empty(N_TERMS)
    _arrive(replicas, chain)
    _refresh(replicas, chain, normals[n * n_moves * (dim + 1) :])
    total, n_accepted = 0.0, 0
    for k in range(n):
        z = normals[k * n_moves * (dim + 1) : (k + 1) * n_moves * (dim + 1)]
        u = uniforms[3 + k * n_moves * N_UNIFORMS : 3 + (k + 1) * n_moves * N_UNIFORMS]
        density = log_density if k == n - 1 else replicas.hot_density
        total, n_accepted = _move(replicas, density, k, chain, z, u, before)
    swapped = uniforms[3 + n * n_moves * N_UNIFORMS :]
    for k in range(replicas.states.counters[SCANS] % 2, n - 1, 2):
        acceptance = _swap(replicas, log_density, k, chain, swapped[k], spare)
        replicas.states.swaps[0] += acceptance
        replicas.states.swaps[1] += 1.0
        if replicas.adapts:
            replicas.tuning.rejected[k, 0] += 1.0 - acceptance
            replicas.tuning.rejected[k, 1] += 1.0
    if replicas.states.visited[n - 1]:
        replicas.states.counters[TRIPS] += 1
        replicas.states.visited[n - 1] = False
    replicas.states.counters[SCANS] += 1
    copy_into(replicas.states.positions[n - 1], chain.position)
    for i in range(N_TERMS):
        chain.value[i] = replicas.states.values[n - 1, i]
    if replicas.adapts:
        _record(replicas)
    chain.outcome[ACCEPTANCE] += total / n_moves
    chain.outcome[ACCEPTED] += n_accepted / n_moves
    return total / n_moves, n_accepted > 0


register_proposal(Replicas, propose=_propose, accept=_scan, covariance_at=_covariance_at)
