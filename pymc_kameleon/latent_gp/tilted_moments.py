"""Moments of a Gaussian times one likelihood term: probit in closed form, others by quadrature."""

from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr

__all__ = [
    "TiltedMoments",
    "log_ndtr_derivatives",
    "probit_moments",
    "quadrature_moments",
]

TAIL = -20.0
"""Below, differences of z and the hazard cancel and the asymptotic series are used."""

REST = np.array([1.0, -6.0, 50.0, -518.0, 6354.0, -89782.0, 1435330.0])
"""Asymptotic series of 1 + (log Phi)'': coefficients of z^-2, z^-4, ..."""

POWERS = 2 * np.arange(1, len(REST) + 1)
THIRD = REST * POWERS
FOURTH = THIRD * (POWERS + 1)
"""Its derivatives: coefficients of -z^-3, -z^-5, ... and of z^-4, z^-6, ..."""

MAX_NODES = 2049
"""Quadrature nodes at which it gives up."""

HALF_WIDTH = 9.0
"""Standard deviations of the cavity to which the quadrature reaches on either side."""


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


def quadrature_moments(likelihood, mean, variance, n_nodes=33, tolerance=1e-6) -> TiltedMoments:
    """Moments for any factorising likelihood, by adaptive quadrature.

    Parameters
    ----------
    likelihood : FactorisingLikelihood
        Asked once per node for all terms.
    mean, variance : array, shape (N,)
        m and v of the cavities.
    n_nodes : int
        Nodes of the first rule, which is refined where it must be.
    tolerance : float
        Largest change of a moment (log Z; mean and standard deviation in units of the latter) from
        one refinement to the next, for all terms.

    Raises
    ------
    FloatingPointError
        If a term has no finite value where it is looked for, or its moments do not settle within
        `MAX_NODES` nodes.

    Notes
    -----
    The trapezoidal rule in u, f = c + s sinh(u), about the mode c of the tilted density with s its
    scale there. Nodes are dense where the density is narrow and reach over the whole cavity, so
    that a likelihood thousands of times narrower than the cavity, or with heavy tails, costs a few
    nodes more: the density need not look like a Gaussian, as it must for Gauss-Hermite nodes. The
    rule converges geometrically in the number of nodes, each refinement keeps the nodes that there
    are, and the error after it is of the order of the square of the change that it made.
    """
    centre, scale = _tilted_mode(likelihood, mean, variance)
    deviation = np.sqrt(variance)
    lower = np.arcsinh((np.minimum(mean, centre) - HALF_WIDTH * deviation - centre) / scale)
    upper = np.arcsinh((np.maximum(mean, centre) + HALF_WIDTH * deviation - centre) / scale)
    share = np.linspace(0.0, 1.0, n_nodes)
    logs, offsets = _weigh(likelihood, mean, variance, centre, scale, lower, upper, share)
    moments = _summed(logs, offsets, (upper - lower) / (n_nodes - 1))
    while True:
        middle = 0.5 * (share[1:] + share[:-1])
        more = _weigh(likelihood, mean, variance, centre, scale, lower, upper, middle)
        share = np.sort(np.concatenate([share, middle]))
        logs, offsets = np.concatenate([logs, more[0]]), np.concatenate([offsets, more[1]])
        before = moments
        moments = _summed(logs, offsets, (upper - lower) / (len(share) - 1))
        log_normaliser, shift, width = moments
        change = np.abs(log_normaliser - before[0]) + np.abs(shift - before[1]) / width
        change += np.abs(np.log(width / before[2]))
        # NaN compares false: what is not finite is not settled.
        is_settled = change < tolerance
        if np.all(is_settled):
            break
        if len(share) >= MAX_NODES:
            worst = int(np.argmax(np.where(np.isfinite(change), change, np.inf)))
            raise FloatingPointError(
                f"The moments of {np.sum(~is_settled)} of {len(mean)} likelihood terms do not "
                f"settle with {len(share)} quadrature nodes: element {worst} changes by "
                f"{change[worst]:.2g} for a cavity of mean {mean[worst]:.3g} and standard "
                f"deviation {deviation[worst]:.3g}. Is its log-likelihood finite and smooth there?"
            )
    shift = shift + (centre - mean)
    shrinkage = width**2 / variance
    return TiltedMoments(log_normaliser, shift / variance, (1.0 - shrinkage) / variance, shrinkage)


def _weigh(likelihood, mean, variance, centre, scale, lower, upper, share):
    """Log integrands in u and offsets f - c at shares of the way from lower to upper: (K, N)."""
    logs, offsets = np.empty((2, len(share), len(mean)))
    for k, part in enumerate(share):
        u = lower + part * (upper - lower)
        offsets[k] = scale * np.sinh(u)
        logs[k] = _log_tilted(likelihood, centre + offsets[k], mean, variance)
        logs[k] += np.log(scale * np.cosh(u))
    return logs, offsets


def _summed(logs, offsets, spacing):
    """Log Z, mean of the offset and standard deviation: three arrays (N,)."""
    largest = logs.max(axis=0)
    weights = np.exp(logs - largest)
    total = weights.sum(axis=0)
    weights /= total
    first = (weights * offsets).sum(axis=0)
    second = (weights * (offsets - first) ** 2).sum(axis=0)
    return largest + np.log(total * spacing), first, np.sqrt(second)


def _log_tilted(likelihood, f, mean, variance):
    """log N(f; m, v) + l(f), -inf where it is not finite."""
    with np.errstate(all="ignore"):
        value = likelihood.elementwise(f) - 0.5 * (f - mean) ** 2 / variance
    value = value - 0.5 * np.log(2.0 * np.pi * variance)
    return np.where(np.isfinite(value), value, -np.inf)


def _tilted_mode(likelihood, mean, variance, max_iterations=100):
    """Modes of N(f; m, v) exp(l(f)) and the scales of the density there: arrays (N,), (N,).

    Newton steps by the absolute curvature go uphill wherever it is negative, and find the peak of
    a power law from far away in one step.
    """
    starts = mean + np.sqrt(variance) * np.linspace(-3.0, 3.0, 7)[:, None]
    values = np.stack([_log_tilted(likelihood, start, mean, variance) for start in starts])
    best, columns = values.argmax(axis=0), np.arange(len(mean))
    centre, value = starts[best, columns], values[best, columns]
    for _ in range(max_iterations):
        with np.errstate(all="ignore"):
            _, slope, second, _ = likelihood.terms(centre)
            precision = np.abs(1.0 / variance - second)
            precision = np.where(np.isfinite(precision), precision, 1.0 / variance)
            step = (slope - (centre - mean) / variance) / np.maximum(precision, 1e-3 / variance)
        step = np.where(np.isfinite(step), step, 0.0)
        if np.all(np.abs(step) * np.sqrt(precision) < 1e-3):
            break
        for _ in range(50):
            new = _log_tilted(likelihood, centre + step, mean, variance)
            is_worse = new < value
            if not np.any(is_worse):
                break
            step = np.where(is_worse, 0.5 * step, step)
        step = np.where(new < value, 0.0, step)
        centre, value = centre + step, np.maximum(new, value)
    return centre, 1.0 / np.sqrt(np.maximum(precision, 1.0 / variance))
