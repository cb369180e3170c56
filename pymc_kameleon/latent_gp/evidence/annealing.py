"""Annealed importance sampling from a Gaussian to the posterior of a latent function.

R. M. Neal (2001), Annealed importance sampling, Statistics and Computing 11(2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import logsumexp

from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, Sites, with_sites
from pymc_kameleon.latent_gp.tempered_target import (
    FactorisingLikelihood,
    TemperedTarget,
    annealed,
    annealed_from_prior_form,
)
from pymc_kameleon.validation import checked_choice, checked_integer

__all__ = [
    "Annealed",
    "AnnealingPath",
    "anneal",
    "effective_size",
    "ladder",
    "log_mean_exp",
    "standard_error",
]

SMALLEST = 1e-5
"""First temperature above 0 of a geometric ladder: the log likelihood of a draw of a wide prior is
of the order of thousands, and no more than about one may come at a time."""

SPACINGS = ("geometric", "linear", "power", "ends")


def ladder(n_temperatures: int, spacing: str = "geometric") -> np.ndarray:
    r"""Inverse temperatures from 0 to 1.

    Parameters
    ----------
    n_temperatures : int
        How many, 0 and 1 included.
    spacing : {"geometric", "linear", "power", "ends"}
        With t from 0 to 1 in equal steps: 0 and a geometric progression from 1e-5 (the paper's
        form); t; :math:`t^5`; :math:`\sin^2(\pi t / 2)`. From the prior the first temperatures are
        those that change most: "geometric" or "power". From an approximation of the posterior, what
        is left over are its tails, near both ends: "ends".

    Returns
    -------
    array, shape (n_temperatures,)
        Increasing.

    Raises
    ------
    ValueError
        For another spacing, or fewer than two temperatures.
    """
    n_temperatures = checked_integer("n_temperatures", n_temperatures, 2)
    checked_choice("spacing", spacing, SPACINGS)
    uniform = np.linspace(0.0, 1.0, n_temperatures)
    if spacing == "geometric":
        return np.concatenate([[0.0], np.geomspace(SMALLEST, 1.0, n_temperatures)[1:]])
    if spacing == "power":
        return uniform**5
    if spacing == "ends":
        betas = np.sin(0.5 * np.pi * uniform) ** 2
        betas[-1] = 1.0
        return betas
    return uniform


@dataclass(frozen=True)
class AnnealingPath:
    """Targets base(x) exp(beta log_ratio(x)) from prior x sites (beta = 0) to the posterior (1).

    Attributes
    ----------
    prior : Gaussian
    likelihood : FactorisingLikelihood
    sites : Sites
        What the base takes of the likelihood: `Sites.flat` begins at the prior.
    base : Gaussian
        Prior x sites, normalised.
    log_normaliser : float
        Log of the integral of prior x sites: log Z is this plus that of the annealing.
    posterior : TemperedTarget
        The temperature of beta = 1.
    """

    prior: Gaussian
    likelihood: FactorisingLikelihood
    sites: Sites
    base: Gaussian = field(init=False)
    log_normaliser: float = field(init=False)
    posterior: TemperedTarget = field(init=False)

    def __post_init__(self):
        # Nothing to factorise where the sites say nothing, and no rounding errors from it.
        base, log_normaliser = (
            (self.prior, 0.0) if self.is_flat else with_sites(self.prior, self.sites)
        )
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "log_normaliser", log_normaliser)
        object.__setattr__(self, "posterior", self.tempered(1.0))

    @property
    def is_flat(self) -> bool:
        """Whether the path begins at the prior."""
        return not (np.any(self.sites.precision) or np.any(self.sites.shift))

    def tempered(self, beta: float) -> TemperedTarget:
        """Temperature as the base times the tempered log importance ratio; costs nothing."""
        if self.is_flat:
            return TemperedTarget(self.base, self.likelihood, beta)
        return annealed(self.base, self.likelihood, self.sites, beta)

    def tempered_in_prior_form(self, beta: float) -> TemperedTarget:
        """Temperature as a Gaussian times likelihood^beta; costs a Cholesky factor unless flat."""
        if self.is_flat:
            return self.tempered(beta)
        return annealed_from_prior_form(self.prior, self.likelihood, self.sites, beta)

    def log_ratio(self, x: np.ndarray) -> float:
        """Log importance ratio at `x` (N,) at beta = 1: the log weight of a draw of the base."""
        return self.posterior.log_ratio(x)


@dataclass(frozen=True)
class Annealed:
    """What a few particles brought back.

    Attributes
    ----------
    log_weights : array, shape (n_particles,)
        Their mean exponential estimates Z without bias.
    draws : array, shape (n_particles, N)
        States after the last transition, at beta = 1; draws of the posterior under the weights.
    acceptance : array, shape (n_particles, n_temperatures)
        Mean over the transitions at a temperature; NaN at beta = 0, which needs none.
    n_evaluations : array, shape (n_particles,)
        Of the likelihood, or of its derivatives, in transitions.
    """

    log_weights: np.ndarray
    draws: np.ndarray
    acceptance: np.ndarray
    n_evaluations: np.ndarray


def anneal(
    path: AnnealingPath,
    betas: np.ndarray,
    transition,
    step_sizes: np.ndarray,
    generators: Sequence[np.random.Generator],
    n_moves: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Annealed:
    """Anneal a particle for each generator, all of them temperature by temperature.

    Parameters
    ----------
    path : AnnealingPath
    betas : array, shape (n_temperatures,)
        From 0 to 1, increasing.
    transition : TemperedTransition
    step_sizes : array, shape (n_temperatures,)
        Fixed beforehand: learning them from these particles would bias the weights.
    generators : sequence of Generator
        One a particle, which uses no other: how particles are split over processes changes nothing.
    n_moves : int
        Transitions of each particle at each temperature.
    advance : callable
        Called after each temperature.

    Notes
    -----
    With x_0 drawn from the base and x_b the state after the transitions at beta_b,
    log w = log_normaliser + sum_b (beta_{b+1} - beta_b) log_ratio(x_b).
    """
    states = np.array([path.base.draw(rng) for rng in generators])
    log_ratios = np.array([path.log_ratio(x) for x in states])
    log_weights = np.full(len(states), path.log_normaliser)
    acceptance = np.full((len(states), len(betas)), np.nan)
    evaluations = np.zeros(len(states), dtype=int)
    for b in range(1, len(betas)):
        log_weights += (betas[b] - betas[b - 1]) * log_ratios
        transition.begin(path, betas[b])
        for i, rng in enumerate(generators):
            accepted = 0.0
            for _ in range(n_moves):
                move = transition.move(states[i], log_ratios[i], step_sizes[b], rng)
                states[i], log_ratios[i] = move.x, move.log_ratio
                accepted += move.acceptance
                evaluations[i] += move.n_evaluations
            acceptance[i, b] = accepted / n_moves
        advance()
    return Annealed(log_weights, states, acceptance, evaluations)


def log_mean_exp(log_weights: np.ndarray) -> float:
    """Log of the mean of exp(log_weights), over all of them."""
    return float(logsumexp(log_weights) - np.log(np.size(log_weights)))


def effective_size(log_weights: np.ndarray) -> float:
    """Kish's (sum w)^2 / sum w^2, between 1 and the number of weights; 0 if all are zero."""
    largest = np.max(log_weights)
    if not np.isfinite(largest):
        return 0.0
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / (weights**2).sum())


def standard_error(log_weights: np.ndarray) -> float:
    r"""Estimate the standard error of `log_mean_exp`, infinite for a single weight.

    Notes
    -----
    The delta method: the standard deviation of w over :math:`\sqrt n` times its mean, which is
    :math:`\sqrt{(n / \text{effective size} - 1) / (n - 1)}`. A jackknife agrees to the first
    order, and no estimate from the weights knows of a tail that they have not met: where the
    effective size is a few, take neither at its word.
    """
    size, n = effective_size(log_weights), len(log_weights)
    if n < 2 or size == 0:
        return float("inf")
    return float(np.sqrt(max(n / size - 1.0, 0.0) / (n - 1.0)))
