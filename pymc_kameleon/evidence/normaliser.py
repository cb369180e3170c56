"""Normaliser of a surrogate, by bridge sampling to a mixture of Gaussians: no true evaluation."""

from collections.abc import Callable

import numpy as np
from scipy import stats
from scipy.special import logsumexp

from pymc_kameleon.evidence.estimates import Estimate
from pymc_kameleon.evidence.from_draws import combined
from pymc_kameleon.surrogate.modes import find_modes, nearest_modes
from pymc_kameleon.surrogate.posterior_surrogate import PosteriorSurrogate, surrogate_values

N_FITTED, BRIDGED = 400, (4, 200)
"""Draws to which a mixture of Gaussians is fitted, and series of others that are compared with
it."""

N_DRAWN = N_FITTED + BRIDGED[0] * BRIDGED[1]

FEW = 5
"""Draws for each dimension, below which a mode has no Gaussian of its own."""

N_GROUPED = 200
"""Draws that are grouped by modes; each of the others belongs to the nearest of them."""


class Mixture:
    """A mixture of Gaussians, one for each mode of a surrogate, fitted to draws `v` (n, d)."""

    def __init__(self, surrogate: PosteriorSurrogate, v: np.ndarray):
        grouped = np.ascontiguousarray(v[:N_GROUPED].T)
        modes = find_modes(surrogate, grouped)
        numbers = np.zeros(len(v), dtype=np.int64)
        if modes.max() > 0:
            numbers = nearest_modes(grouped, modes, v)
        counts = np.bincount(numbers)
        large = np.flatnonzero(counts >= FEW * v.shape[1])
        self.shares = counts[large] / counts[large].sum()
        self.parts = [
            stats.multivariate_normal(
                v[numbers == k].mean(axis=0), np.cov(v[numbers == k].T), allow_singular=True
            )
            for k in large
        ]

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw `n` points (n, d), independently."""
        counts = rng.multinomial(n, self.shares)
        drawn = [
            np.reshape(part.rvs(count, random_state=rng), (count, -1))
            for part, count in zip(self.parts, counts, strict=True)
            if count
        ]
        return rng.permutation(np.concatenate(drawn))

    def log_density(self, v: np.ndarray) -> np.ndarray:
        """Evaluate the normalised log density (n,) at the rows of `v` (n, d)."""
        values = [np.reshape(part.logpdf(v), len(v)) for part in self.parts]
        return logsumexp(np.array(values), axis=0, b=self.shares[:, None])


def log_volume(surrogate: PosteriorSurrogate) -> float:
    """Log of the volume of raw coordinates that a unit of those of moves is."""
    factor, scales = surrogate.standardization.factor, surrogate.triangular_map.scales
    return float(np.sum(np.log(np.abs(np.diagonal(factor)))) + np.sum(np.log(scales)))


def log_normaliser(
    surrogate: PosteriorSurrogate,
    drawn: np.ndarray,
    is_allowed: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
) -> Estimate:
    """Find the log normaliser of a surrogate in raw coordinates.

    `drawn` (n, d), `N_DRAWN` at least, are draws from it, and `is_allowed` says where the rows of
    an array have a density at all.
    """
    mixture = Mixture(surrogate, drawn[:N_FITTED])
    ladders, volume = [], log_volume(surrogate)
    for series in drawn[N_FITTED:N_DRAWN].reshape(*BRIDGED, -1):
        ratios = []
        for v in (mixture.draw(len(series), rng), series):
            values = np.where(is_allowed(v), surrogate_values(surrogate, v), -np.inf)
            ratios.append(values + volume - mixture.log_density(v))
        ladders.append((np.array([0.0, 1.0]), np.array(ratios).T))
    return combined(ladders)[1]
