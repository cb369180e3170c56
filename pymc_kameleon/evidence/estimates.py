"""Estimates of log evidence from weights, and from draws at several temperatures.

N. Friel & A. N. Pettitt (2008) for thermodynamic integration, N. Friel, M. Hurn & J. Wyse (2014),
Improving power posterior estimation of statistical evidence, Statistics and Computing 24, for its
correction; W. Xie et al. (2011), Systematic Biology 60(2), for stepping stones.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from pymc_kameleon._compat import arviz_statistics

LARGEST_PARETO_K = 0.7
"""Shape of the tail of the weights above which there is a warning: from there on more particles
hardly make their mean more precise (Vehtari, Simpson, Gelman, Yao & Gabry 2024)."""


class Estimate(NamedTuple):
    """Log evidence, its standard error, and the effective number of draws behind it."""

    log_evidence: float
    standard_error: float
    effective_size: float


def importance_sampling(log_weights: np.ndarray) -> Estimate:
    r"""Log of the mean of weights (n,), with Kish's effective size, :math:`(\sum w)^2 / \sum w^2`.

    The standard error is that of the delta method; infinite for a single weight. No estimate from
    the weights knows of a tail that they have not met.
    """
    n, largest = len(log_weights), np.max(log_weights)
    if not np.isfinite(largest):
        return Estimate(_log_mean_exp(log_weights), float("inf"), 0.0)
    weights = np.exp(log_weights - largest)
    size = float(weights.sum() ** 2 / (weights**2).sum())
    error = np.sqrt(max(n / size - 1.0, 0.0) / (n - 1.0)) if n > 1 else np.inf
    return Estimate(_log_mean_exp(log_weights), float(error), size)


def _log_mean_exp(log_weights):
    return float(logsumexp(log_weights) - np.log(np.size(log_weights)))


def stepping_stones(betas: np.ndarray, log_ratios: np.ndarray) -> Estimate:
    r"""Chain importance sampling from each temperature to the next.

    From log ratios (n_replicates, n_draws, n_temperatures),

    .. math:: \log Z = \sum_i \log \operatorname{mean}_{x \sim \beta_i} e^{\Delta_i\, t(x)}

    for any ladder, with no error of discretisation.
    """
    exponents = np.diff(betas) * log_ratios[..., :-1]
    ratios = np.array([_log_mean_exp(exponents[..., i]) for i in range(len(betas) - 1)])
    if not np.all(np.isfinite(ratios)):
        return Estimate(float(ratios.sum()), float("nan"), 0.0)
    return from_series(float(ratios.sum()), np.exp(exponents - ratios).sum(axis=-1))


def thermodynamic_integration(betas: np.ndarray, log_ratios: np.ndarray) -> Estimate:
    r"""Integrate the mean log ratio over beta by the trapezoid rule, corrected by the variance.

    The derivative of the mean :math:`E_\beta` is the variance :math:`V_\beta`, so that

    .. math:: \log Z \approx \sum_i \frac{\Delta_i}{2} (E_i + E_{i+1})
              - \frac{\Delta_i^2}{12} (V_{i+1} - V_i).

    What is left of the error of the ladder is of order :math:`\Delta^4` and not in the standard
    error. This one is from the sum over temperatures of what each draw adds, so that the
    correlation between temperatures, which swaps cause, is counted.
    """
    widths = np.diff(betas)
    weights = 0.5 * (np.append(widths, 0.0) + np.insert(widths, 0, 0.0))
    correction = (np.append(widths**2, 0.0) - np.insert(widths**2, 0, 0.0)) / 12.0
    if not np.all(np.isfinite(log_ratios)):
        return Estimate(float("nan"), float("nan"), 0.0)
    squares = (log_ratios - log_ratios.mean(axis=(0, 1))) ** 2
    added = log_ratios @ weights + squares @ correction
    return from_series(float(added.mean()), added)


def from_series(log_evidence, series):
    """Estimate whose error is that of the mean of a series (n_replicates, n_draws)."""
    if series.shape[1] < 4 or np.ptp(series) == 0:
        return Estimate(log_evidence, float("nan"), float(series.size))
    size = min(float(arviz_statistics().ess(series, method="mean")), float(series.size))
    return Estimate(log_evidence, float(series.std(ddof=1) / np.sqrt(size)), size)


ESTIMATORS = {
    "stepping_stones": stepping_stones,
    "thermodynamic_integration": thermodynamic_integration,
}
