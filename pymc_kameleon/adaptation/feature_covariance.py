"""Learner of Fast Kernel Adaptive Metropolis-Hastings (Kotlicki 2015)."""

import numpy as np
from pymc.step_methods.state import dataclass_state
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon._warnings import warn_user
from pymc_kameleon.adaptation.covariance import (
    RunningCovariance,
    new_covariance,
    update_covariance,
)
from pymc_kameleon.adaptation.history import RECENT, SEEN, STRIDE, thinned
from pymc_kameleon.adaptation.subsample import (
    SubsampleAdaptation,
    SubsampleLearner,
    SubsampleState,
)
from pymc_kameleon.kernels.random_features import checked_n_features, draw_features, features
from pymc_kameleon.mcmc.proposals.feature_gaussian import FeatureGaussian, Features
from pymc_kameleon.validation import checked_share

__all__ = ["FeatureAdaptation", "FeatureLearner"]

N_POINTS = 1000
"""Points of the history that difference moves use."""

BLOCK = 256
"""Positions that enter the running covariance together."""


class FeatureAdaptation(SubsampleAdaptation):
    """Choices of `FastKameleonStep`, whose parameters these are."""

    growth = 1.2
    n_recent = BLOCK

    def __init__(self, *, n_features, embedding, rank_share, **choices):
        self.n_features = checked_n_features(n_features, embedding)
        self.embedding = embedding
        if checked_share("rank_share", rank_share) == 0:
            raise ValueError("rank_share=0: take a number in (0, 1]; 1 keeps all eigenvectors.")
        self.rank_share = float(rank_share)
        self.n_frequencies = self.n_features // (2 if embedding == "pairs" else 1)
        kernel = choices["kernel"]
        if not kernel.has_finite_frequencies:
            warn_user(
                f"kernel={kernel!r} is so rough that its frequencies have no second moment: the "
                "sampler is exact, but its proposals differ from one set of frequencies to the "
                "next, however many features there are. Matern(smoothness) above 1 settles."
            )
        super().__init__(
            n_subsample=N_POINTS,
            n_features=self.n_features,
            embedding=embedding,
            rank_share=self.rank_share,
            **choices,
        )
        self.transition_kernel = None

    def new_learner(self, dim, target_accept, rng):  # noqa: D102
        return FeatureLearner(self, dim, target_accept, rng)

    def kernel_parameters(self, points, rng):  # noqa: D102
        return np.array([self.bandwidth_of(points, rng)])


@dataclass_state
class FeatureState(SubsampleState):
    """State of a `FeatureLearner`."""

    features: Features
    covariance: RunningCovariance
    next_redraw: int


class FeatureLearner(SubsampleLearner):
    """Adds every position to the covariance of random features, which it draws ever more rarely."""

    _state_class = FeatureState

    def __init__(self, choices, dim, target_accept, rng):
        super().__init__(choices, dim, target_accept, rng)
        m, n = choices.n_frequencies, choices.n_features
        self.features = Features(np.zeros((dim, m)), np.zeros(m), np.zeros((0, n)))
        self.covariance = new_covariance(n)
        self.next_redraw = 0

    def proposal(self, compiled):  # noqa: D102
        return FeatureGaussian(
            self.features, self.here, self.learnt.coordinates, self.scaling, self.gamma
        )

    def room(self):  # noqa: D102
        return BLOCK - int(self.history.cursor[RECENT])

    def absorb(self):  # noqa: D102
        if self.history.cursor[RECENT] == BLOCK:
            self._absorb()

    def end_tuning(self, position, rng):  # noqa: D102
        super().end_tuning(position, rng)
        if self.has_learnt:
            self._absorb()
            self._refresh(rng)

    def _learn(self, history, rng, tune=True):
        seen = int(self.history.cursor[SEEN])
        moves = self.choices.standardize or self.choices.bandwidth == "median"
        if not self.has_learnt or (tune and moves and seen >= self.next_redraw):
            self._redraw(history, rng)
            self.next_redraw = 2 * seen
        else:
            self._absorb()
            points = thinned(history, self.choices.n_subsample, rng)
            points = self.learnt.coordinates.whiten(points)
            self.learnt = self.learnt._replace(points=points)
        self._refresh(rng)

    def _redraw(self, history, rng):
        """Learn coordinates and bandwidth, draw frequencies, and learn their covariance anew.

        Each row of `history` stands for as many positions as the history's stride.
        """
        choices = self.choices
        self._learn_coordinates(history, rng)
        frequencies, phases = draw_features(
            choices.kernel,
            choices.n_features,
            choices.embedding,
            self.dim,
            self.learnt_bandwidth(),
            rng,
        )
        self.features = self.features._replace(frequencies=frequencies, phases=phases)
        self.covariance = new_covariance(choices.n_features)
        stride = float(self.history.cursor[STRIDE])
        update_covariance(self.covariance, self._features_of(history), stride)
        self.history.cursor[RECENT] = 0

    @one_thread()
    def _absorb(self):
        """Add the positions since the last time to the covariance of the features."""
        count = int(self.history.cursor[RECENT])
        if count and self.has_learnt:
            update_covariance(self.covariance, self._features_of(self.history.recent[:count]))
        self.history.cursor[RECENT] = 0

    def _features_of(self, rows):
        u = self.learnt.coordinates.whiten(rows).T
        drawn = self.features
        return features(u, drawn.frequencies, drawn.phases, self.choices.embedding)

    def _refresh(self, rng):
        """Factor the covariance of the features, for the transitions to come."""
        covariance = self.covariance.scatter / self.covariance.weight[0]
        eigenvalues, vectors = linalg.eigh(covariance, lower=True, driver="evd")
        eigenvalues, vectors = np.maximum(eigenvalues[::-1], 0.0), vectors[:, ::-1]
        rank, share = int(np.count_nonzero(eigenvalues)), self.choices.rank_share
        if share < 1:
            shares = np.cumsum(eigenvalues)
            rank = min(rank, 1 + int(np.searchsorted(shares, share * shares[-1])))
        factor = np.ascontiguousarray((vectors[:, :rank] * np.sqrt(eigenvalues[:rank])).T)
        self.features = self.features._replace(factor=factor)
        self.invalidate()
        self._rescale(rng)

    def statistics(self):  # noqa: D102
        return super().statistics() | {"rank": float(len(self.features.factor))}

    def lengths(self):  # noqa: D102
        return super().lengths() | {
            "features": self.choices.n_features,
            "m": self.choices.n_frequencies,
        }
