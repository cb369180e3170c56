"""Sweeps of expectation propagation over the sites, all at a time or one after the other."""

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dger

from pymc_kameleon.latent_gp.approximations.tilted_moments import TiltedMoments, probit_moments
from pymc_kameleon.latent_gp.gaussian_algebra import Sites

__all__ = ["ParallelSweep", "SequentialSweep"]

SMALLEST_SHARE = 1e-3
"""Share of an update below which a sweep makes no progress."""

SHORT_SHARE = 0.02
"""Share of an update below which it is made though it is far worse than the sites before."""


def _matched(tilted: TiltedMoments, cavity_mean) -> Sites:
    """Sites that turn the cavities' moments into the tilted ones (eq. 3.59)."""
    return Sites(
        tilted.curvature / tilted.shrinkage,
        (tilted.slope + cavity_mean * tilted.curvature) / tilted.shrinkage,
    )


def _mixed(old: Sites, new: Sites, share: float) -> Sites:
    return Sites(
        old.precision + share * (new.precision - old.precision),
        old.shift + share * (new.shift - old.shift),
    )


class ParallelSweep:
    """All sites at a time; the share of an update that is made follows the residual."""

    def __init__(self, largest):
        self.largest = self.share = largest
        self.n_better = 0

    def __call__(self, state):
        """Return the state after a sweep; the same object if no update is valid."""
        matched = _matched(state.tilted, state.cavity_mean)
        while self.share >= SMALLEST_SHARE:
            new = self._try(state, matched)
            if new is not None:
                self._adapt(new.residual <= state.residual)
                return new
            self.share *= 0.5
        return state

    def _try(self, state, matched):
        """Return the updated state, None where it is invalid or far worse."""
        try:
            new = state.with_sites(_mixed(state.sites, matched, self.share))
        except (LinAlgError, FloatingPointError):
            return None
        # Log-concave terms find their way back from anywhere. Others must not wander off to nearly
        # improper cavities; but not every good update improves the worst site.
        is_usable = np.all(matched.precision >= 0) or new.residual < 2.0 * state.residual
        return new if is_usable or self.share < SHORT_SHARE else None

    def _adapt(self, is_better):
        if not is_better:
            self.share, self.n_better = max(0.5 * self.share, 2.0 * SMALLEST_SHARE), 0
        elif self.n_better < 2:
            self.n_better += 1
        else:
            self.share, self.n_better = min(1.5 * self.share, self.largest), 0


class SequentialSweep:
    """One site after the other, with rank-one updates of the covariance (algorithm 3.5)."""

    def __init__(self, share):
        self.share = share

    def __call__(self, state):
        """Return the state after a sweep."""
        labels = state.likelihood.probit_labels
        precision, shift = state.sites.precision.copy(), state.sites.shift.copy()
        covariance, mean = np.asfortranarray(state.product.covariance()), state.product.mean.copy()
        for n in range(len(mean)):
            column = covariance[:, n].copy()
            variance = column[n] / (1.0 - precision[n] * column[n])
            cavity_mean = mean[n] - variance * (shift[n] - precision[n] * mean[n])
            tilted = probit_moments(
                labels[n : n + 1], np.array([cavity_mean]), np.array([variance])
            )
            matched = _matched(tilted, cavity_mean)
            precision_change = self.share * (matched.precision[0] - precision[n])
            shift_change = self.share * (matched.shift[0] - shift[n])
            precision[n] += precision_change
            shift[n] += shift_change
            scale = 1.0 / (1.0 + precision_change * column[n])
            mean += column * scale * (shift_change - precision_change * mean[n])
            covariance = dger(
                -precision_change * scale, column, column, a=covariance, overwrite_a=True
            )
        # The factorisation at the end of a sweep takes away what rounding has added up.
        return state.with_sites(Sites(precision, shift))
