"""Likelihoods of binary labels, log Phi(y f) and log expit(y f), and Gaussians times one term."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import erfcx, expit, log_ndtr

TAIL = -16.5
"""Below, differences of z and the hazard cancel and the asymptotic series are used: there the third
derivative loses as much to the first missing term as it loses to cancellation above."""

REST = np.array([1.0, -6.0, 50.0, -518.0, 6354.0, -89782.0, 1435330.0])
"""Asymptotic series of 1 + (log Phi)'': coefficients of z^-2, z^-4, ..."""

POWERS = 2 * np.arange(1, len(REST) + 1)
THIRD = REST * POWERS
FOURTH = THIRD * (POWERS + 1)
"""Its derivatives: coefficients of -z^-3, -z^-5, ... and of z^-4, z^-6, ..."""


REACH = 7.0
"""Standard deviations of the cavity from the mode to the last node."""

N_NODES = 33
"""Nodes that are enough for equal spacing: half a standard deviation where that is 1."""

BEND = 2.0
"""Distance from f = 0 beyond which the spacing of graded nodes is proportional to it."""

GRADED_SPACING = 0.1
"""That proportion."""


class TiltedMoments(NamedTuple):
    """Moments of N(f; m, v) exp(l(f)) / Z for many independent terms, each an array (N,).

    Log Z; d log Z / dm = (tilted mean - m) / v; - d^2 log Z / dm^2; and the tilted variance over v.
    """

    log_normaliser: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray
    shrinkage: np.ndarray


def log_expit(z: np.ndarray) -> np.ndarray:
    """Log of the logistic function; five times as fast as `scipy.special.log_expit`."""
    return np.minimum(z, 0.0) - np.log1p(np.exp(-np.abs(z)))


class _BinaryLikelihood:
    """log p(y_n | f) = g(y_n f) for `labels` y (N,) of -1 and 1; a subclass gives g."""

    probit_labels: np.ndarray | None = None
    _log_probability: Callable
    _derivatives: Callable

    def __init__(self, labels: np.ndarray):
        self.labels = np.asarray(labels, dtype=float)
        self.size = len(self.labels)

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n at `f` (N,)."""
        return float(self.elementwise(f).sum())

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n at `f` (..., N), in the same shape."""
        return self._log_probability(self.labels * f)

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and first three derivatives at `f` (N,): an array (4, N)."""
        value, first, second, third = self._derivatives(self.labels * f)
        return np.stack([value, self.labels * first, second, self.labels * third])


class Logit(_BinaryLikelihood):
    """Logistic likelihood: l_n(f) = -log(1 + exp(-y_n f))."""

    _log_probability = staticmethod(log_expit)

    def _derivatives(self, z):
        # Each from its own side: 1 - expit loses the tail.
        against, for_ = expit(-z), expit(z)
        curvature = against * for_
        return log_expit(z), against, -curvature, curvature * (for_ - against)

    def tilted_moments(self, mean: np.ndarray, variance: np.ndarray) -> TiltedMoments:
        """Moments of N(f; m, v) exp(l(f)) for means and variances (N,)."""
        return logit_moments(self.labels, mean, variance)


class Probit(_BinaryLikelihood):
    """Probit likelihood: l_n(f) = log Phi(y_n f)."""

    def __init__(self, labels: np.ndarray):
        super().__init__(labels)
        self.probit_labels = self.labels

    _log_probability = staticmethod(log_ndtr)

    def _derivatives(self, z):
        return log_ndtr_derivatives(z)[:4]


def log_ndtr_derivatives(z: np.ndarray) -> np.ndarray:
    """Values and first four derivatives of log Phi at `z` (N,): an array (5, N)."""
    return _log_ndtr_terms(z)[:5]


def _log_ndtr_terms(z):
    """Values, four derivatives, and 1 + the second derivative: rows (6, N)."""
    z = np.asarray(z, dtype=float)
    with np.errstate(over="ignore"):
        hazard = np.sqrt(2.0 / np.pi) / erfcx(-z / np.sqrt(2.0))
    excess = z + hazard
    curvature = hazard * excess
    rest = 1.0 - curvature
    third = curvature * excess - hazard * rest
    fourth = 2.0 * curvature * rest - third * (excess + hazard)
    is_tail = z < TAIL
    if np.any(is_tail):
        inverse = -1.0 / z[is_tail]
        rest[is_tail], third[is_tail], fourth[is_tail] = (
            inverse**order * np.polynomial.polynomial.polyval(inverse**2, series)
            for order, series in ((2, REST), (3, THIRD), (4, FOURTH))
        )
        curvature[is_tail] = 1.0 - rest[is_tail]
    return np.stack([log_ndtr(z), hazard, -curvature, third, fourth, rest])


def probit_moments(labels, mean, variance) -> TiltedMoments:
    """Moments for l(f) = log Phi(y f), y = -1 or 1 (Rasmussen & Williams 2006, eq. 3.58)."""
    scale = labels / np.sqrt(1.0 + variance)
    value, hazard, second, _, _, rest = _log_ndtr_terms(scale * mean)
    shrinkage = (1.0 + variance * rest) / (1.0 + variance)
    return TiltedMoments(value, scale * hazard, -second / (1.0 + variance), shrinkage)


def logit_moments(labels, mean, variance) -> TiltedMoments:
    """Moments for l(f) = -log(1 + exp(-y f)), by a fixed rule about the mode.

    The trapezoidal rule over what the cavity reaches about the mode of the tilted density. In f the
    error is exp(-2 pi^2 / h) for a spacing h and the poles of the logistic function at +-i pi, and
    exp(-2 pi^2 v / h^2) for the Gaussian. A cavity broader than 1 that sees the bend at f = 0 has
    the rule in asinh(f / 2) instead. Slope and curvature are averages of s = 1 / (1 + exp(y f)): d
    log Z / dm = y <s> and d^2 log Z / dm^2 = 2 <s^2> - <s> - <s>^2.
    """
    margin, deviation = labels * mean, np.sqrt(variance)
    shift = _tilted_modes(margin, variance)
    g, spacing = _nodes(margin + shift, deviation)
    offset = g - (margin + shift)
    # exp(-|g|) serves the likelihood and its slope.
    small = np.exp(-np.abs(g))
    logs = np.minimum(g, 0.0) - np.log1p(small) - 0.5 * ((shift + offset) / deviation) ** 2
    logs += np.log(spacing / (np.sqrt(2.0 * np.pi) * deviation))
    largest = logs.max(axis=0)
    weights = np.exp(logs - largest)
    total = weights.sum(axis=0)
    weights /= total
    against = np.where(g > 0, small, 1.0) / (1.0 + small)
    slope = np.einsum("kn,kn->n", weights, against)
    square = np.einsum("kn,kn,kn->n", weights, against, against)
    offset -= np.einsum("kn,kn->n", weights, offset)
    width = np.einsum("kn,kn,kn->n", weights, offset, offset)
    return TiltedMoments(
        largest + np.log(total),
        labels * slope,
        slope * (1.0 + slope) - 2.0 * square,
        width / variance,
    )


def _nodes(mode, deviation):
    """Nodes y f and their weights: arrays (K, N) and (K, N) or (N,)."""
    reach = REACH * deviation
    is_graded = (deviation > 1.0) & (np.abs(mode) < (REACH + 1.0) * deviation)
    if not np.any(is_graded):
        share = np.linspace(-1.0, 1.0, N_NODES)[:, None]
        return mode + share * reach, reach * 2.0 / (N_NODES - 1)
    lower = np.where(is_graded, np.arcsinh((mode - reach) / BEND), mode - reach)
    upper = np.where(is_graded, np.arcsinh((mode + reach) / BEND), mode + reach)
    span = upper - lower
    n_nodes = max(N_NODES, int(np.max(span[is_graded]) / GRADED_SPACING) + 2)
    u = lower + np.linspace(0.0, 1.0, n_nodes)[:, None] * span
    step = np.broadcast_to(span / (n_nodes - 1), u.shape).copy()
    graded = u[:, is_graded]
    step[:, is_graded] *= BEND * np.cosh(graded)
    u[:, is_graded] = BEND * np.sinh(graded)
    return u, step


def _tilted_modes(margin, variance):
    """Find t = y f - y m at the mode to a tenth of a standard deviation: t = v s(y m + t)."""
    lower, upper = np.zeros_like(margin), variance
    t = np.clip(-margin, lower, upper)
    for _ in range(60):
        against = expit(-margin - t)
        excess = t - variance * against
        lower, upper = np.where(excess < 0, t, lower), np.where(excess > 0, t, upper)
        new = t - excess / (1.0 + variance * against * (1.0 - against))
        new = np.where((new >= lower) & (new <= upper), new, 0.5 * (lower + upper))
        step, t = np.abs(new - t), new
        if np.all(step**2 < 0.01 * variance):
            break
    return t
