"""Parallel tempering of a latent function, and the log evidence that its temperatures give.

N. Friel & A. N. Pettitt (2008) for thermodynamic integration, N. Friel, M. Hurn & J. Wyse (2014),
Improving power posterior estimation of statistical evidence, Statistics and Computing 24, for its
correction; W. Xie et al. (2011), Systematic Biology 60(2), for stepping stones.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pymc_kameleon._compat import arviz_statistics
from pymc_kameleon.latent_gp.evidence.annealing import AnnealingPath, log_mean_exp

__all__ = ["Estimate", "Tempered", "stepping_stones", "temper", "thermodynamic_integration"]


@dataclass(frozen=True)
class Tempered:
    """What one replicate of all temperatures did, warm-up left out.

    Attributes
    ----------
    log_ratios : array, shape (n_draws, n_temperatures)
        Log importance ratio, at beta = 1, of the state of each temperature.
    draws : array, shape (n_draws, N)
        States of the temperature of beta = 1: draws of the posterior.
    acceptance : array, shape (n_temperatures,)
        Mean over the transitions of a temperature; NaN at beta = 0, which is drawn independently.
    swap_acceptance : array, shape (n_temperatures - 1,)
        Mean acceptance probability of the swaps of a temperature and the next.
    n_evaluations : int
        Of the likelihood, or of its derivatives, in transitions.
    """

    log_ratios: np.ndarray
    draws: np.ndarray
    acceptance: np.ndarray
    swap_acceptance: np.ndarray
    n_evaluations: int


class Estimate(NamedTuple):
    """Log evidence, its standard error, and the effective number of draws behind it."""

    log_evidence: float
    standard_error: float
    effective_size: float


def temper(
    path: AnnealingPath,
    betas: np.ndarray,
    transition,
    step_sizes: np.ndarray,
    rng: np.random.Generator,
    n_draws: int,
    n_tune: int,
    advance: Callable[[], None] = lambda: None,
) -> Tempered:
    """Run a chain a temperature, each moved in turn and then swapped with a neighbour.

    Parameters
    ----------
    path : AnnealingPath
    betas : array, shape (n_temperatures,)
        From 0 to 1, increasing.
    transition : TemperedTransition
    step_sizes : array, shape (n_temperatures,)
    rng : Generator
    n_draws, n_tune : int
        Kept iterations, and those before them, which forget the start.
    advance : callable
        Called after each iteration.

    Notes
    -----
    Pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... swap in alternation, with probability 1 and
    exp((beta_j - beta_i) (log_ratio(x_i) - log_ratio(x_j))): the alternation carries a state from
    one end to the other faster than random pairs (Syed et al. 2022). The temperature of beta = 0 is
    a fresh draw of the base every time.
    """
    n_temperatures = len(betas)
    transitions = [copy.copy(transition) for _ in betas]
    for one, beta in zip(transitions[1:], betas[1:], strict=True):
        one.begin(path, beta)
    states = np.array([path.base.draw(rng) for _ in betas])
    log_ratios = np.array([path.log_ratio(x) for x in states])
    kept, draws = np.empty((n_draws, n_temperatures)), np.empty((n_draws, path.base.size))
    accepted, swapped = np.zeros(n_temperatures), np.zeros((2, n_temperatures - 1))
    accepted[0], evaluations = np.nan, 0
    for iteration in range(-n_tune, n_draws):
        states[0] = path.base.draw(rng)
        log_ratios[0] = path.log_ratio(states[0])
        for j in range(1, n_temperatures):
            move = transitions[j].move(states[j], log_ratios[j], step_sizes[j], rng)
            states[j], log_ratios[j] = move.x, move.log_ratio
            evaluations += move.n_evaluations
            if iteration >= 0:
                accepted[j] += move.acceptance
        for i in range(iteration % 2, n_temperatures - 1, 2):
            probability = _swap_probability(betas[i : i + 2], log_ratios[i : i + 2])
            if rng.random() < probability:
                states[[i, i + 1]], log_ratios[[i, i + 1]] = (
                    states[[i + 1, i]],
                    log_ratios[[i + 1, i]],
                )
            if iteration >= 0:
                swapped[:, i] += probability, 1.0
        if iteration >= 0:
            kept[iteration], draws[iteration] = log_ratios, states[-1]
        advance()
    swap_acceptance = swapped[0] / np.maximum(swapped[1], 1.0)
    return Tempered(kept, draws, accepted / n_draws, swap_acceptance, evaluations)


def _swap_probability(betas, log_ratios):
    if not np.isfinite(log_ratios[1]):
        return 1.0
    # A state outside of the support, at beta = 0, has a log importance ratio of -inf and never goes
    # up.
    return float(np.exp(min(0.0, (betas[1] - betas[0]) * (log_ratios[0] - log_ratios[1]))))


def thermodynamic_integration(betas: np.ndarray, log_ratios: np.ndarray) -> Estimate:
    r"""Integrate the mean log ratio over beta by the trapezoid rule, corrected by the variance.

    Parameters
    ----------
    betas : array, shape (n_temperatures,)
    log_ratios : array, shape (n_replicates, n_draws, n_temperatures)

    Notes
    -----
    The derivative of the mean :math:`E_\beta` is the variance :math:`V_\beta`, so that

    .. math:: \log Z \approx \sum_i \frac{\Delta_i}{2} (E_i + E_{i+1})
              - \frac{\Delta_i^2}{12} (V_{i+1} - V_i).

    What is left of the error of the ladder is of order :math:`\Delta^4` and not in the standard
    error. This one is from the effective size (over the draws) of the sum over temperatures of what
    each draw adds to the estimate, so that correlation between temperatures, which swaps cause, is
    counted.
    """
    widths = np.diff(betas)
    weights = 0.5 * (np.append(widths, 0.0) + np.insert(widths, 0, 0.0))
    correction = (np.append(widths**2, 0.0) - np.insert(widths**2, 0, 0.0)) / 12.0
    if not np.all(np.isfinite(log_ratios)):
        return Estimate(float("nan"), float("nan"), 0.0)
    squares = (log_ratios - log_ratios.mean(axis=(0, 1))) ** 2
    added = log_ratios @ weights + squares @ correction
    return _from_series(float(added.mean()), added)


def stepping_stones(betas: np.ndarray, log_ratios: np.ndarray) -> Estimate:
    r"""Chain importance sampling from each temperature to the next.

    Parameters
    ----------
    betas : array, shape (n_temperatures,)
    log_ratios : array, shape (n_replicates, n_draws, n_temperatures)

    Notes
    -----
    .. math:: \log Z = \sum_i \log \operatorname{mean}_{x \sim \beta_i} e^{\Delta_i\, t(x)}

    for any ladder, with no error of discretisation. The standard error is that of the delta
    method, from a series over the draws as in `thermodynamic_integration`.
    """
    exponents = np.diff(betas) * log_ratios[..., :-1]
    ratios = np.array([log_mean_exp(exponents[..., i].ravel()) for i in range(len(betas) - 1)])
    if not np.all(np.isfinite(ratios)):
        return Estimate(float(ratios.sum()), float("nan"), 0.0)
    return _from_series(float(ratios.sum()), np.exp(exponents - ratios).sum(axis=-1))


def _from_series(log_evidence, series):
    """Estimate whose error is that of the mean of a series (n_replicates, n_draws)."""
    if series.shape[1] < 4 or np.ptp(series) == 0:
        return Estimate(log_evidence, float("nan"), float(series.size))
    size = min(float(arviz_statistics().ess(series, method="mean")), float(series.size))
    return Estimate(log_evidence, float(series.std(ddof=1) / np.sqrt(size)), size)
