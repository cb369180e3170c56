"""States of a latent function at many temperatures: annealed one after another, or side by side.

R. M. Neal (2001), Annealed importance sampling, Statistics and Computing 11(2). S. Syed, A.
Bouchard-Côté, G. Deligiannidis & A. Doucet (2022), Non-reversible parallel tempering, JRSS B 84(2),
doi:10.1111/rssb.12464, for the ladder and the swaps.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from pymc.smc.kernels import systematic_resampling
from scipy.special import softmax

from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites, with_sites
from pymc_kameleon.latent_gp.riemannian_metric import needed_soft_floor
from pymc_kameleon.latent_gp.riemannian_trajectory import RiemannianSettings, RiemannianState
from pymc_kameleon.latent_gp.riemannian_trajectory import transition as riemannian
from pymc_kameleon.latent_gp.tempered_target import (
    FactorisingLikelihood,
    TemperedTarget,
    annealed_from_prior_form,
    elliptical_slice,
    hamiltonian,
)

PILOTS, PILOT_MOVES = 16, 3
"""States of the pilot pass, and moves of each at a temperature."""

PILOT_REJECTION = 0.4
"""Share of swaps rejected between two temperatures of the pilot pass: with larger steps its few
weights degenerate."""

SMALLEST_GAP = 1e-12
"""First temperature above 0 where draws of the base may be impossible, or all but."""

TARGET_ACCEPTANCE, GAIN = 0.8, 0.3
"""Acceptance of trajectories that the pilot pass aims at, and gain of log step size on what it
lacks; constant, so that the step can follow the temperatures."""

TRAJECTORY = math.pi
"""Largest length: it takes a standard normal coordinate from one side to the other."""


class AnnealingPath:
    """Targets base(x) exp(beta log_ratio(x)) from prior x sites (beta = 0) to the posterior (1).

    `base` is prior x sites, normalised, and `log_normaliser` the log of its integral. `sites` are
    None where the path begins at the prior.
    """

    def __init__(self, prior: Gaussian, likelihood: FactorisingLikelihood, sites: Sites):
        self.prior, self.likelihood = prior, likelihood
        # Nothing to factorise where the sites say nothing, and no rounding errors from it.
        is_flat = not (np.any(sites.precision) or np.any(sites.shift))
        self.sites = None if is_flat else sites
        self.base, self.log_normaliser = (prior, 0.0) if is_flat else with_sites(prior, sites)

    def tempered(self, beta: float) -> TemperedTarget:
        """Temperature as the base times the tempered log importance ratio; costs nothing."""
        return TemperedTarget(self.base, self.likelihood, beta, self.sites)

    def tempered_in_prior_form(self, beta: float) -> TemperedTarget:
        """Temperature as a Gaussian times likelihood^beta; costs a Cholesky factor unless flat."""
        if self.sites is None:
            return self.tempered(beta)
        return annealed_from_prior_form(self.prior, self.likelihood, self.sites, beta)

    def log_ratio(self, x: np.ndarray) -> float:
        """Log importance ratio at `x` (N,) at beta = 1: the log weight of a draw of the base."""
        return self.tempered(1.0).log_ratio(x)


# transitions at a temperature ---------------------------------------------------------------------


class Move(NamedTuple):
    """Where a transition led: the state, its log importance ratio at beta = 1, and what it took."""

    x: np.ndarray
    log_ratio: float
    acceptance: float
    n_evaluations: int


class TemperedTransition(NamedTuple):
    """A family of transitions, one for each temperature of a path.

    ``at(path, beta)``, beta > 0, returns ``move(x, log_ratio, step_size, rng) -> Move`` that leaves
    the tempered target invariant; ``log_ratio = path.log_ratio(x)``. `initial_step_size` is NaN for
    a transition without a step size.
    """

    at: Callable[[AnnealingPath, float], Callable[..., Move]]
    initial_step_size: float = math.nan


def _slices(path, beta):
    """Elliptical slice sampling about the base; "acceptance" is one over the angles tried."""
    target = path.tempered(beta)

    def move(x, log_ratio, step_size, rng):
        moved, value, n_evaluations = elliptical_slice(target, x, beta * log_ratio, rng)
        log_ratio = log_ratio if moved is x else value / beta
        return Move(moved, log_ratio, 1.0 / n_evaluations, n_evaluations)

    return move


def _hamiltonian(path, beta):
    """Hamiltonian Monte Carlo, whitened by the base."""
    target = path.tempered(beta)

    def move(x, log_ratio, step_size, rng):
        n_steps = _n_steps(step_size, 100)
        moved, acceptance, n_evaluations = hamiltonian(target, x, rng, step_size, n_steps)
        log_ratio = log_ratio if moved is x else path.log_ratio(moved)
        return Move(moved, log_ratio, acceptance, n_evaluations)

    return move


def _riemannian(path, beta):
    """Riemannian Hamiltonian Monte Carlo on the prior form, whose metric is positive.

    Trajectories that cannot be followed there and back count as rejected.
    """
    target = path.tempered_in_prior_form(beta)
    floor = needed_soft_floor(target)

    def move(x, log_ratio, step_size, rng):
        if not np.isfinite(log_ratio):
            # No metric outside of the support; such a particle has weight 0 and may stay.
            return Move(x, log_ratio, 0.0, 1)
        settings = RiemannianSettings(step_size, _n_steps(step_size, 20), soft_floor=floor)
        state, outcome = riemannian(target, RiemannianState(x), settings, rng)
        log_ratio = path.log_ratio(state.position) if outcome.accepted else log_ratio
        return Move(state.position, log_ratio, outcome.acceptance, 1 + outcome.n_leapfrog)

    return move


def _n_steps(step_size, most):
    return min(most, max(1, math.ceil(TRAJECTORY / step_size)))


TRANSITIONS = {
    "slice": TemperedTransition(_slices),
    "hmc": TemperedTransition(_hamiltonian, 0.1),
    "rmhmc": TemperedTransition(_riemannian, 0.4),
}


# the ladder ---------------------------------------------------------------------------------------


class _States:
    """States (n, N), one for each generator, with their log importance ratios (n,) at beta = 1."""

    def __init__(self, path, generators):
        self.x = np.array([path.base.draw(rng) for rng in generators])
        self.log_ratios = np.array([path.log_ratio(x) for x in self.x])

    def move(self, i, transition, step_size, rng) -> Move:
        move = transition(self.x[i], self.log_ratios[i], step_size, rng)
        self.x[i], self.log_ratios[i] = move.x, move.log_ratio
        return move

    def take(self, which, sources):
        """Put copies of some states in the place of others."""
        self.x[which], self.log_ratios[which] = self.x[sources], self.log_ratios[sources]


def learn_ladder(
    path: AnnealingPath, n_temperatures: int, transition: TemperedTransition, rng
) -> tuple[np.ndarray, np.ndarray]:
    """Learn temperatures between which swaps are rejected equally often, and their step sizes.

    It returns inverse temperatures (n_temperatures,), increasing from 0 to 1, and step sizes, NaN
    at beta = 0. `rng` is used by nothing else: what follows is independent of what is learnt, so
    each of its transitions leaves its temperature invariant, and weights stay unbiased.

    A few pilots climb from 0 to 1, resampled by their weights at each temperature, which is chosen
    so that a given share of its swaps with the last one would be rejected. The sum of the shares is
    the barrier of Syed et al.; the temperatures divide it equally. Increments of log weights then
    have nearly equal variances too, which is best for annealing. The step size of a temperature is
    the geometric mean of those tried.
    """
    pilots, log_step = _States(path, [rng] * PILOTS), math.log(transition.initial_step_size)
    betas, barrier, log_steps = [0.0], [0.0], [log_step]
    while betas[-1] < 1.0 and np.any(np.isfinite(pilots.log_ratios)):
        possible = pilots.log_ratios[np.isfinite(pilots.log_ratios)]
        gap = _gap(pilots.log_ratios, 1.0 - betas[-1])
        # States outside of the support are lost at the first temperature, however low it is.
        barrier.append(barrier[-1] + _rejection(possible, gap))
        # Where the last step is the rest, rounding must not leave a part of it.
        betas.append(betas[-1] + gap if betas[-1] + gap < 1.0 - SMALLEST_GAP else 1.0)
        resampled = systematic_resampling(softmax(gap * pilots.log_ratios), rng)
        pilots.take(slice(None), resampled)
        move, tried = transition.at(path, betas[-1]), []
        for _ in range(PILOT_MOVES):
            for i in range(PILOTS):
                tried.append(log_step)
                acceptance = pilots.move(i, move, math.exp(log_step), rng).acceptance
                log_step += GAIN * (acceptance - TARGET_ACCEPTANCE)
        log_steps.append(float(np.mean(tried[-2 * PILOTS :])))
    if len(betas) == 1:  # no pilot is possible, and there is nothing to learn from
        betas, barrier, log_steps = [0.0, 1.0], [0.0, 0.0], [log_step] * 2
    # It increases where the likelihood says nothing, too.
    height = np.array(barrier) + 1e-3 * np.array(betas)
    levels = np.linspace(0.0, height[-1], n_temperatures)
    ladder = np.interp(levels, height, betas)
    ladder[0], ladder[-1] = 0.0, 1.0
    step_sizes = np.exp(np.interp(levels, height[1:], log_steps[1:]))
    step_sizes[0] = np.nan
    return ladder, step_sizes


def _gap(log_ratios, largest):
    """Gap to a temperature with which `PILOT_REJECTION` of the swaps would be rejected."""
    if _rejection(log_ratios, largest) <= PILOT_REJECTION:
        return largest
    low, high = math.log(SMALLEST_GAP), math.log(largest)
    for _ in range(30):
        middle = 0.5 * (low + high)
        is_far = _rejection(log_ratios, math.exp(middle)) > PILOT_REJECTION
        low, high = (low, middle) if is_far else (middle, high)
    return math.exp(high)


def _rejection(log_ratios, gap):
    """Share of swaps rejected with a temperature whose states are these (n,), weighted."""
    above = log_ratios[np.isfinite(log_ratios)]
    acceptance = np.exp(np.minimum(0.0, gap * (log_ratios[:, None] - above)))
    return 1.0 - float(acceptance.mean(axis=0) @ softmax(gap * above))


# runs over a ladder -------------------------------------------------------------------------------


class Run(NamedTuple):
    """What n particles, or a replicate of all temperatures, brought back, warm-up left out.

    `log_ratios` (n, n_temperatures) are at beta = 1, a row a particle, or an iteration of
    tempering; `draws` (n, N) are the states at beta = 1. `acceptance` (k, n_temperatures) and
    `n_evaluations` (k,) are those of each particle, or of a replicate. `swap_acceptance`
    (n_temperatures - 1,), None for particles, is of the swaps of a temperature and the next.
    """

    log_ratios: np.ndarray
    draws: np.ndarray
    acceptance: np.ndarray
    n_evaluations: np.ndarray
    swap_acceptance: np.ndarray | None = None


def anneal(
    path: AnnealingPath,
    betas: np.ndarray,
    transition: TemperedTransition,
    step_sizes: np.ndarray,
    generators: Sequence[np.random.Generator],
    n_moves: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Anneal a particle for each generator, all of them temperature by temperature.

    A particle uses no other generator: how particles are split over processes changes nothing.
    """
    n, n_temperatures = len(generators), len(betas)
    states = _States(path, generators)
    log_ratios, acceptance = np.empty((n, n_temperatures)), np.full((n, n_temperatures), np.nan)
    log_ratios[:, 0] = states.log_ratios
    evaluations = np.zeros(n, dtype=int)
    for b in range(1, n_temperatures):
        move = transition.at(path, betas[b])
        for i, rng in enumerate(generators):
            moves = [states.move(i, move, step_sizes[b], rng) for _ in range(n_moves)]
            acceptance[i, b] = sum(m.acceptance for m in moves) / n_moves
            evaluations[i] += sum(m.n_evaluations for m in moves)
        log_ratios[:, b] = states.log_ratios
        advance()
    return Run(log_ratios, states.x, acceptance, evaluations)


def temper(
    path: AnnealingPath,
    betas: np.ndarray,
    transition: TemperedTransition,
    step_sizes: np.ndarray,
    rng: np.random.Generator,
    n_draws: int,
    n_tune: int,
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Run a chain a temperature, each moved in turn and then swapped with a neighbour.

    Pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... swap in alternation, which carries a state
    from one end to the other faster than random pairs. The temperature of beta = 0 is a fresh draw
    of the base every time.
    """
    n_temperatures = len(betas)
    moves = [transition.at(path, beta) for beta in betas[1:]]
    states = _States(path, [rng] * n_temperatures)
    log_ratios, draws = np.empty((n_draws, n_temperatures)), np.empty((n_draws, path.base.size))
    acceptance, swaps = np.zeros((1, n_temperatures)), np.zeros((2, n_temperatures - 1))
    acceptance[0, 0], evaluations = np.nan, 0
    for iteration in range(-n_tune, n_draws):
        is_kept = iteration >= 0
        states.x[0] = path.base.draw(rng)
        states.log_ratios[0] = path.log_ratio(states.x[0])
        for j, transition_there in enumerate(moves, start=1):
            move = states.move(j, transition_there, step_sizes[j], rng)
            evaluations += move.n_evaluations
            acceptance[0, j] += is_kept * move.acceptance / n_draws
        for i in range(iteration % 2, n_temperatures - 1, 2):
            probability = _swap_probability(betas[i : i + 2], states.log_ratios[i : i + 2])
            if rng.random() < probability:
                states.take([i, i + 1], [i + 1, i])
            swaps[:, i] += is_kept * probability, is_kept
        if is_kept:
            log_ratios[iteration], draws[iteration] = states.log_ratios, states.x[-1]
        advance()
    swap_acceptance = swaps[0] / np.maximum(swaps[1], 1.0)
    return Run(log_ratios, draws, acceptance, np.array([evaluations]), swap_acceptance)


def _swap_probability(betas, log_ratios):
    if not np.isfinite(log_ratios[1]):
        return 1.0
    # A state outside of the support, at beta = 0, has a log importance ratio of -inf and never goes
    # up.
    return float(np.exp(min(0.0, (betas[1] - betas[0]) * (log_ratios[0] - log_ratios[1]))))
