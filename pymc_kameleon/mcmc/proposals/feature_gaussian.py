"""The proposal of Fast Kernel Adaptive Metropolis-Hastings (Kotlicki 2015, algorithm 2)."""

import math
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.history import History
from pymc_kameleon.mcmc.proposals.local_gaussian import ScatterHere, register_local_gaussian
from pymc_kameleon.mcmc.scalings import Scaling


class Features(NamedTuple):
    """Random features, and a factor of their covariance C = V^T V.

    Frequencies are (d, m) and phases (m,). V is `factor` (r, D), with D = 2m columns for "pairs",
    those of the sines first, and D = m for "shifted".
    """

    frequencies: np.ndarray
    phases: np.ndarray
    factor: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"factor": 0}


class FeatureGaussian(NamedTuple):
    """N(u, gamma^2 I + eta^2 J^T C J), with the Jacobian J of the features at u."""

    features: Features
    here: ScatterHere
    coordinates: Standardization
    scaling: Scaling
    gamma: float
    history: History


@jit(allocates=True)
def feature_scatter(features, u, out):
    """J^T C J into `out` (d, d), with the Jacobian J (D, d) of the features (eqs. 4.3 to 4.5).

    The rows of J are multiples of the frequencies, so the columns of V that belong to one frequency
    are combined before they meet it: O(D r) for that, and O(D r d / 2) for "pairs" after it.
    """
    frequencies, factor = features.frequencies, features.factor
    dim, m = frequencies.shape
    weights = np.empty((factor.shape[0], m))
    projections = np.empty((factor.shape[0], dim))
    sines, cosines = np.empty(m), np.empty(m)
    for i in range(m):
        sines[i] = features.phases[i]
    for a in range(dim):
        for i in range(m):
            sines[i] += frequencies[a, i] * u[a]
    scale = math.sqrt(2.0 / factor.shape[1])
    for i in range(m):
        sines[i], cosines[i] = scale * math.sin(sines[i]), scale * math.cos(sines[i])
    if factor.shape[1] == m:
        for k in range(factor.shape[0]):
            for i in range(m):
                weights[k, i] = -sines[i] * factor[k, i]
    else:
        for k in range(factor.shape[0]):
            for i in range(m):
                weights[k, i] = cosines[i] * factor[k, i] - sines[i] * factor[k, m + i]
    np.dot(weights, frequencies.T, projections)
    np.dot(projections.T, projections, out)


def _scatter(proposal, u, out):
    feature_scatter(proposal.features, u, out)


register_local_gaussian(FeatureGaussian, _scatter)
