"""Transitions on the temperatures of an annealing path, and the step sizes that they need."""

import math
from typing import NamedTuple, Protocol

import numpy as np

from pymc_kameleon.latent_gp.evidence.annealing import AnnealingPath
from pymc_kameleon.latent_gp.samplers.ellipse import elliptical_slice
from pymc_kameleon.latent_gp.samplers.riemannian_metric import needed_soft_floor
from pymc_kameleon.latent_gp.samplers.riemannian_trajectory import (
    RiemannianSettings,
    RiemannianState,
)
from pymc_kameleon.latent_gp.samplers.riemannian_trajectory import transition as riemannian
from pymc_kameleon.latent_gp.samplers.whitened_hmc import hamiltonian

__all__ = [
    "TRANSITIONS",
    "HamiltonianTransition",
    "Move",
    "RiemannianTransition",
    "SliceTransition",
    "TemperedTransition",
    "learn_step_sizes",
]

PILOTS = 4
PILOT_MOVES = 2
"""Chains of the pilot pass, and moves of each at a temperature."""

FIRST_RUNG = 5
"""How many times longer the pilot pass stays at its first temperature, to forget the initial
step."""

GAIN = 0.3
"""Of log step size on acceptance; constant, so that the step can follow the temperatures."""


class Move(NamedTuple):
    """Where a transition led: the state, its log importance ratio at beta = 1, and what it took."""

    x: np.ndarray
    log_ratio: float
    acceptance: float
    n_evaluations: int


class TemperedTransition(Protocol):
    """A family of transitions, one for each temperature of a path.

    Attributes
    ----------
    initial_step_size : float or None
        Where the pilot pass begins; None for a transition without a step size.
    target_acceptance : float
        What the pilot pass aims at.
    """

    initial_step_size: float | None
    target_acceptance: float

    def begin(self, path: AnnealingPath, beta: float) -> None:
        """Go to a temperature, beta > 0; what it has to factorise is factorised here."""

    def move(
        self, x: np.ndarray, log_ratio: float, step_size: float, rng: np.random.Generator
    ) -> Move:
        """Leave the tempered target invariant, from `x` (N,) with its ``path.log_ratio(x)``."""


class SliceTransition:
    """Elliptical slice sampling about the base of the path: nothing to tune.

    Its `acceptance` is the inverse of the number of angles that a move tried.
    """

    initial_step_size = None
    target_acceptance = math.nan

    def begin(self, path, beta):
        """Go to a temperature."""
        self._target = path.tempered(beta)

    def move(self, x, log_ratio, step_size, rng):
        """Make a transition; `step_size` has no meaning here."""
        beta = self._target.scale
        moved, value, n_evaluations = elliptical_slice(self._target, x, beta * log_ratio, rng)
        log_ratio = log_ratio if moved is x else value / beta
        return Move(moved, log_ratio, 1.0 / n_evaluations, n_evaluations)


class HamiltonianTransition:
    """Hamiltonian Monte Carlo, whitened by the base of the path.

    Parameters
    ----------
    trajectory : float
        Largest length of a trajectory, in the coordinates of `hamiltonian`: pi takes a standard
        normal coordinate from one side to the other.
    most_steps : int
        Largest number of leapfrog steps, where the step size would need more.
    whitened : bool
        See `hamiltonian`.
    target_acceptance : float
    """

    def __init__(
        self,
        trajectory: float = math.pi,
        most_steps: int = 100,
        whitened: bool = True,
        target_acceptance: float = 0.8,
    ):
        self.trajectory, self.most_steps, self.whitened = trajectory, most_steps, whitened
        self.target_acceptance = target_acceptance
        self.initial_step_size = 0.1

    def begin(self, path, beta):
        """Go to a temperature."""
        self._path, self._target = path, path.tempered(beta)

    def move(self, x, log_ratio, step_size, rng):
        """Make a transition of a trajectory of random length."""
        n_steps = min(self.most_steps, max(1, math.ceil(self.trajectory / step_size)))
        moved, acceptance, n_evaluations = hamiltonian(
            self._target, x, rng, step_size, n_steps, self.whitened
        )
        log_ratio = log_ratio if moved is x else self._path.log_ratio(moved)
        return Move(moved, log_ratio, acceptance, n_evaluations)


class RiemannianTransition:
    """Riemannian Hamiltonian Monte Carlo on temperatures in prior form, whose metric is positive.

    Parameters
    ----------
    trajectory : float
        Largest length of a trajectory, in the unit of the metric.
    most_steps : int
        Largest number of generalised leapfrog steps.
    soft_floor : float, optional
        See `RiemannianSettings`; by default 0 if no term of the likelihood is convex anywhere
        within five standard deviations of the temperature's Gaussian, see `needed_soft_floor`.
    target_acceptance : float
        Trajectories that cannot be followed there and back count as rejected.
    """

    def __init__(
        self,
        trajectory: float = math.pi,
        most_steps: int = 20,
        soft_floor: float | None = None,
        target_acceptance: float = 0.8,
    ):
        self.trajectory, self.most_steps, self.soft_floor = trajectory, most_steps, soft_floor
        self.target_acceptance = target_acceptance
        self.initial_step_size = 0.4

    def begin(self, path, beta):
        """Go to a temperature: a Cholesky factorisation, unless the path begins at the prior."""
        self._path, self._target = path, path.tempered_in_prior_form(beta)
        self._floor = (
            needed_soft_floor(self._target) if self.soft_floor is None else self.soft_floor
        )

    def move(self, x, log_ratio, step_size, rng):
        """Make a transition of a trajectory of random length."""
        if not np.isfinite(log_ratio):
            # No metric outside of the support; such a particle has weight 0 and may stay.
            return Move(x, log_ratio, 0.0, 1)
        n_steps = min(self.most_steps, max(1, math.ceil(self.trajectory / step_size)))
        settings = RiemannianSettings(step_size, n_steps, soft_floor=self._floor)
        state, outcome = riemannian(self._target, RiemannianState(x), settings, rng)
        log_ratio = self._path.log_ratio(state.position) if outcome.accepted else log_ratio
        return Move(state.position, log_ratio, outcome.acceptance, 1 + outcome.n_leapfrog)


TRANSITIONS = {
    "slice": SliceTransition,
    "hmc": HamiltonianTransition,
    "rmhmc": RiemannianTransition,
}


def learn_step_sizes(
    path: AnnealingPath,
    betas: np.ndarray,
    transition: TemperedTransition,
    rng: np.random.Generator,
) -> np.ndarray:
    """Learn a step size for every temperature, by a pilot pass over the ladder.

    Parameters
    ----------
    path : AnnealingPath
    betas : array, shape (n_temperatures,)
    transition : TemperedTransition
    rng : Generator
        Used by nothing else: the particles that follow are independent of what is learnt, so each
        of their transitions leaves its temperature invariant, and the weights stay unbiased.

    Returns
    -------
    array, shape (n_temperatures,)
        NaN at beta = 0, and everywhere for a transition without a step size.

    Notes
    -----
    A few chains climb the ladder together. After each move, log step += gain (acceptance - target),
    with a constant gain; the step size of a temperature is the geometric mean of those tried there.
    """
    step_sizes = np.full(len(betas), np.nan)
    if transition.initial_step_size is None:
        return step_sizes
    log_step = math.log(transition.initial_step_size)
    states = [path.base.draw(rng) for _ in range(PILOTS)]
    log_ratios = [path.log_ratio(x) for x in states]
    for b in range(1, len(betas)):
        transition.begin(path, betas[b])
        tried = []
        for _ in range(PILOT_MOVES * (FIRST_RUNG if b == 1 else 1)):
            for i in range(PILOTS):
                tried.append(log_step)
                move = transition.move(states[i], log_ratios[i], math.exp(log_step), rng)
                states[i], log_ratios[i] = move.x, move.log_ratio
                log_step += GAIN * (move.acceptance - transition.target_acceptance)
        step_sizes[b] = math.exp(np.mean(tried[-PILOTS * PILOT_MOVES :]))
    return step_sizes
