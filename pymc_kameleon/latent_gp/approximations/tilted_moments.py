"""Moments of a Gaussian times one likelihood term, and their closed form for probit."""

from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr

__all__ = ["TiltedMoments", "log_ndtr_derivatives", "probit_moments"]

TAIL = -16.5
"""Below, differences of z and the hazard cancel and the asymptotic series are used: there the third
derivative loses as much to the first missing term as it loses to cancellation above."""

REST = np.array([1.0, -6.0, 50.0, -518.0, 6354.0, -89782.0, 1435330.0])
"""Asymptotic series of 1 + (log Phi)'': coefficients of z^-2, z^-4, ..."""

POWERS = 2 * np.arange(1, len(REST) + 1)
THIRD = REST * POWERS
FOURTH = THIRD * (POWERS + 1)
"""Its derivatives: coefficients of -z^-3, -z^-5, ... and of z^-4, z^-6, ..."""


@dataclass(frozen=True)
class TiltedMoments:
    """Moments of N(f; m, v) exp(l(f)) / Z for many independent terms.

    Attributes
    ----------
    log_normaliser : array, shape (N,)
        log Z.
    slope : array, shape (N,)
        d log Z / dm: (tilted mean - m) / v.
    curvature : array, shape (N,)
        - d^2 log Z / dm^2: (1 - tilted variance / v) / v.
    shrinkage : array, shape (N,)
        Tilted variance over v.
    """

    log_normaliser: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray
    shrinkage: np.ndarray


def log_ndtr_derivatives(z: np.ndarray) -> np.ndarray:
    """Values and first four derivatives of log Phi.

    Parameters
    ----------
    z : array, shape (N,)

    Returns
    -------
    array, shape (5, N)
    """
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
    """Moments for l(f) = log Phi(y f).

    Parameters
    ----------
    labels, mean, variance : array, shape (N,)
        y, -1 or +1; m and v of the cavities.

    Notes
    -----
    Z = Phi(z), z = y m / sqrt(1 + v) (Rasmussen & Williams 2006, eq. 3.58), by its hazard from
    erfcx, so that no tail loses digits.
    """
    scale = labels / np.sqrt(1.0 + variance)
    value, hazard, second, _, _, rest = _log_ndtr_terms(scale * mean)
    shrinkage = (1.0 + variance * rest) / (1.0 + variance)
    return TiltedMoments(value, scale * hazard, -second / (1.0 + variance), shrinkage)
