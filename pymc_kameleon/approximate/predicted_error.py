r"""How far a surrogate can be trusted: distances of marginals, and what true values say about it.

With true values at draws from the surrogate, weights :math:`w = p / e^s` would make them draws from
the posterior, and half of the mean of :math:`|w / \bar w - 1|` is the total variation distance of
the two. Between a few dozen draws the marginals are as blurred as these are few; so functions are
drawn from the process instead, at many points, as uncertain as the true values say that it is.
"""

import numpy as np
from scipy import linalg, optimize
from scipy.ndimage import gaussian_filter1d
from scipy.special import logsumexp

N_BINS = 400
MARGIN = 0.3
"""Bins beyond the reference at either end, as a share of its width."""

BANDWIDTH = 5000**-0.2
"""Standard deviation of the kernel, in those of the reference: Scott's rule for 5000 draws."""

N_FUNCTIONS = 30
"""Functions that are drawn from the process."""

SCALES = 1e-2, 1e2
"""Least and largest factor between how uncertain the process says that it is and how it is."""


def marginal_total_variation(
    draws: np.ndarray, reference: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Mean over coordinates of half the L1 distance of two smoothed histograms.

    They are of `draws` (n, d), with `weights` (n,) if these are given, and of a `reference` (m, d).
    Both are smoothed by one kernel, whatever the numbers of draws, so that samplers which return
    more of them are not compared at a finer resolution. Draws beyond the bins count in the last.
    """
    weights = np.ones(len(draws)) if weights is None else weights
    shares = weights / weights.sum()
    distances = []
    for x, expected in zip(draws.T, reference.T, strict=True):
        low, high = np.quantile(expected, [0.0005, 0.9995])
        if not high > low:  # all of it at one point
            distances.append(shares[x != low].sum())
            continue
        margin = MARGIN * (high - low)
        edges = np.linspace(low - margin, high + margin, N_BINS + 1)
        width = BANDWIDTH * expected.std() / (edges[1] - edges[0])
        inside = x.clip(edges[0], edges[-1]), expected.clip(edges[0], edges[-1])
        found = np.histogram(inside[0], edges, weights=shares)[0]
        wanted = np.histogram(inside[1], edges)[0] / len(expected)
        distances.append(0.5 * np.abs(gaussian_filter1d(found - wanted, width)).sum())
    return float(np.mean(distances))


def relative_weights(log_weights: np.ndarray) -> np.ndarray:
    """Weights (..., n) over their mean, from their logs; 0 for -inf."""
    largest = np.max(log_weights, axis=-1, keepdims=True)
    weights = np.exp(log_weights - np.where(np.isfinite(largest), largest, 0.0))
    return weights / np.maximum(weights.mean(axis=-1, keepdims=True), 1e-300)


def total_variation(log_weights: np.ndarray) -> np.ndarray:
    """Total variation distance (...) that log weights (..., n) of draws imply, at most 1."""
    found = 0.5 * np.mean(np.abs(relative_weights(log_weights) - 1.0), axis=-1)
    return np.where(np.max(log_weights, axis=-1) > -np.inf, found, 1.0)


def functions_drawn(covariance: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw `n` functions (n, m) of mean 0 with this covariance (m, m), which may be singular."""
    values, vectors = linalg.eigh(covariance, check_finite=False)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return rng.standard_normal((n, len(covariance))) @ root.T


def overconfidence(errors: np.ndarray, covariance: np.ndarray, rng: np.random.Generator) -> float:
    """Factor by which a process is more uncertain than it says, from `errors` (m,) of predictions.

    The functions of its `covariance` (m, m) are as far from the surrogate, on average, as the true
    values are. It is 1 where there are none.
    """
    if not len(errors):
        return 1.0
    drawn = functions_drawn(covariance, rng, 10 * N_FUNCTIONS)
    wanted = total_variation(errors)

    def excess(log_scale):
        return np.mean(total_variation(np.exp(log_scale) * drawn)) - wanted

    low, high = np.log(SCALES)
    if excess(low) > 0.0:
        return SCALES[0]
    return SCALES[1] if excess(high) < 0.0 else float(np.exp(optimize.brentq(excess, low, high)))


def expected_error(draws: np.ndarray, covariance: np.ndarray, rng: np.random.Generator) -> float:
    """Mean marginal total variation distance from `draws` (m, d) of a surrogate to the posterior.

    That is one of the functions with this `covariance` (m, m) beside the surrogate.
    """
    return float(
        np.mean(
            [
                marginal_total_variation(draws, draws, relative_weights(function))
                for function in functions_drawn(covariance, rng, N_FUNCTIONS)
            ]
        )
    )


def error_of_mean_weight(covariance: np.ndarray, rng: np.random.Generator) -> float:
    """Return the standard deviation of log mean exp(f), f of this `covariance` (m, m)."""
    drawn = functions_drawn(covariance, rng, 10 * N_FUNCTIONS)
    return float(np.std(logsumexp(drawn, axis=1)))


def error_of_few_draws(draws: np.ndarray) -> float:
    """Mean marginal total variation distance of independent `draws` (n, d) to their density."""
    half = len(draws) // 2
    return 0.5 * marginal_total_variation(draws[:half], draws[half : 2 * half])
