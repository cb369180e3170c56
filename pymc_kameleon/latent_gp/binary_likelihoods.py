"""Likelihoods of binary labels given the values of a latent function, in closed form."""

import numpy as np
from scipy.special import expit, log_ndtr

from pymc_kameleon.latent_gp.logit_moments import log_expit, logit_moments
from pymc_kameleon.latent_gp.tilted_moments import (
    TiltedMoments,
    log_ndtr_derivatives,
    probit_moments,
)

__all__ = ["Logit", "Probit"]


class Logit:
    """Logistic likelihood: l_n(f) = -log(1 + exp(-y_n f)).

    Parameters
    ----------
    labels : array, shape (N,)
        y, -1 and 1.

    Attributes
    ----------
    labels : array, shape (N,)
    size : int
        N.
    probit_labels : None
    """

    probit_labels = None

    def __init__(self, labels: np.ndarray):
        self.labels = np.asarray(labels, dtype=float)
        self.size = len(self.labels)

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n at `f` (N,)."""
        return float(self.elementwise(f).sum())

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n at `f` (..., N), in the same shape."""
        return log_expit(self.labels * f)

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and first three derivatives at `f` (N,): an array (4, N)."""
        z = self.labels * f
        # Each from its own side: 1 - expit loses the tail.
        against, for_ = expit(-z), expit(z)
        curvature = against * for_
        third = self.labels * curvature * (for_ - against)
        return np.stack([log_expit(z), self.labels * against, -curvature, third])

    def tilted_moments(self, mean: np.ndarray, variance: np.ndarray) -> TiltedMoments:
        """Moments of N(f; m, v) exp(l(f)) for means and variances (N,)."""
        return logit_moments(self.labels, mean, variance)


class Probit:
    """Probit likelihood: l_n(f) = log Phi(y_n f).

    Parameters
    ----------
    labels : array, shape (N,)
        y, -1 and 1.

    Attributes
    ----------
    probit_labels : array, shape (N,)
    size : int
        N.
    """

    def __init__(self, labels: np.ndarray):
        self.probit_labels = np.asarray(labels, dtype=float)
        self.size = len(self.probit_labels)

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n at `f` (N,)."""
        return float(self.elementwise(f).sum())

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n at `f` (..., N), in the same shape."""
        return log_ndtr(self.probit_labels * f)

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and first three derivatives at `f` (N,): an array (4, N)."""
        y = self.probit_labels
        value, first, second, third, _ = log_ndtr_derivatives(y * f)
        return np.stack([value, y * first, second, y * third])

    def tilted_moments(self, mean: np.ndarray, variance: np.ndarray) -> TiltedMoments:
        """Moments of N(f; m, v) exp(l(f)) for means and variances (N,)."""
        return probit_moments(self.probit_labels, mean, variance)
