"""Likelihoods of binary labels given the values of a latent function, in closed form."""

from abc import ABC, abstractmethod

import numpy as np
from scipy.special import expit, log_ndtr

from pymc_kameleon.latent_gp.approximations.logit_moments import log_expit, logit_moments
from pymc_kameleon.latent_gp.approximations.tilted_moments import (
    TiltedMoments,
    log_ndtr_derivatives,
)

__all__ = ["Logit", "Probit"]


class _BinaryLikelihood(ABC):
    """log p(y_n | f) = g(y_n f) for labels y of -1 and 1; a subclass gives g and derivatives.

    Parameters
    ----------
    labels : array, shape (N,)
        y, -1 and 1.

    Attributes
    ----------
    labels : array, shape (N,)
    size : int
        N.
    probit_labels : array, shape (N,), or None
        The labels, if the likelihood is probit.
    """

    probit_labels: np.ndarray | None = None

    def __init__(self, labels: np.ndarray):
        self.labels = np.asarray(labels, dtype=float)
        self.size = len(self.labels)

    @staticmethod
    @abstractmethod
    def _log_probability(z): ...

    @staticmethod
    @abstractmethod
    def _derivatives(z): ...

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

    @staticmethod
    def _derivatives(z):
        # Each from its own side: 1 - expit loses the tail.
        against, for_ = expit(-z), expit(z)
        curvature = against * for_
        return log_expit(z), against, -curvature, curvature * (for_ - against)

    def tilted_moments(self, mean: np.ndarray, variance: np.ndarray) -> TiltedMoments:
        """Moments of N(f; m, v) exp(l(f)) for means and variances (N,)."""
        return logit_moments(self.labels, mean, variance)


class Probit(_BinaryLikelihood):
    """Probit likelihood: l_n(f) = log Phi(y_n f)."""

    _log_probability = staticmethod(log_ndtr)

    @property
    def probit_labels(self):
        """Labels, by which the approximations know that moments are in closed form."""
        return self.labels

    @staticmethod
    def _derivatives(z):
        return log_ndtr_derivatives(z)[:4]
