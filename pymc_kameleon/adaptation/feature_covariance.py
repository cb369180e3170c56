"""Learner of Fast Kernel Adaptive Metropolis-Hastings (Kotlicki 2015)."""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon._warnings import warn_user
from pymc_kameleon.adaptation.subsample import SubsampleLearner
from pymc_kameleon.kernels.random_features import checked_n_features, draw_features, features
from pymc_kameleon.mcmc.history import RECENT, SEEN, STRIDE, thinned
from pymc_kameleon.mcmc.proposals.feature_gaussian import FeatureGaussian, Features
from pymc_kameleon.validation import checked_share

N_POINTS = 1000
"""Points of the history that difference moves use."""

BLOCK = 256
"""Positions that enter the running covariance together."""


class RunningCovariance(NamedTuple):
    """Mean (k,) and scatter (k, k) of all rows seen so far, updated in blocks.

    The scatter is the sum of outer products of the centred rows, of which the lower triangle is
    filled; `weight` (1,) is the sum of the weights of the rows.
    """

    mean: np.ndarray
    scatter: np.ndarray
    weight: np.ndarray


def new_covariance(k: int) -> RunningCovariance:
    """Return the running covariance of no rows of length `k`."""
    return RunningCovariance(np.zeros(k), np.zeros((k, k)), np.zeros(1))


def update_covariance(covariance: RunningCovariance, rows: np.ndarray, weight: float = 1.0):
    """Show a block of rows to a running covariance (Welford 1962, for blocks; in place).

    Each block of `rows` (n, k) is centred at its own mean, so nothing cancels however large the
    mean is; `weight` is that of each row.
    """
    old, new = covariance.weight[0], weight * len(rows)
    if new == 0:
        return
    mean = rows.mean(axis=0)
    shift = mean - covariance.mean
    block = np.empty((len(rows) + 1, len(mean)))
    np.subtract(rows, mean, out=block[:-1])
    block[:-1] *= math.sqrt(weight)
    block[-1] = math.sqrt(old * new / (old + new)) * shift
    linalg.blas.dsyrk(1.0, block.T, beta=1.0, c=covariance.scatter.T, lower=0, overwrite_c=1)
    covariance.mean[:] += new / (old + new) * shift
    covariance.weight[0] += new


class FeatureLearner(SubsampleLearner):
    """Adds every position to the covariance of random features, which it draws ever more rarely.

    Parameters are those of `FastKameleonStep`.
    """

    growth = 1.2
    n_recent = BLOCK
    state_names = (*SubsampleLearner.state_names, "features", "covariance", "next_redraw")

    def __init__(self, *, n_features, embedding, rank_share, **choices):
        self.n_features = checked_n_features(n_features, embedding)
        self.embedding = embedding
        if checked_share("rank_share", rank_share) == 0:
            raise ValueError("rank_share=0: take a number in (0, 1]; 1 keeps all eigenvectors.")
        self.rank_share = float(rank_share)
        kernel = choices["kernel"]
        if not kernel.has_finite_frequencies:
            warn_user(
                f"kernel={kernel!r} is so rough that its frequencies have no second moment: the "
                "sampler is exact, but its proposals differ from one set of frequencies to the "
                "next, however many features there are. Take Matern(smoothness) above 1."
            )
        super().__init__(
            n_subsample=N_POINTS,
            n_features=self.n_features,
            embedding=embedding,
            rank_share=self.rank_share,
            **choices,
        )
        self.transition_kernel = None

    def _begin(self, position, rng, warm):
        m = self.n_features // (2 if self.embedding == "pairs" else 1)
        frequencies, factor = np.zeros((self.dim, m)), np.zeros((0, self.n_features))
        self.features = Features(frequencies, np.zeros(m), factor)
        self.covariance = new_covariance(self.n_features)
        self.next_redraw = 0
        super()._begin(position, rng, warm)

    def _kernel_parameters(self, points, rng):
        return np.array([self._bandwidth_of(points, rng)])

    def proposal(self, compiled):  # noqa: D102
        return FeatureGaussian(
            self.features,
            self.here,
            self.learnt.coordinates,
            self.scaling,
            self.gamma,
            self.history,
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
        moves = self.standardize or self.bandwidth == "median"
        if not self.has_learnt or (tune and moves and seen >= self.next_redraw):
            self._redraw(history, rng)
            self.next_redraw = 2 * seen
        else:
            self._absorb()
            points = thinned(history, self.n_subsample, rng)
            points = self.learnt.coordinates.whiten(points)
            self.learnt = self.learnt._replace(points=points)
        self._refresh(rng)

    def _redraw(self, history, rng):
        """Learn coordinates and bandwidth, draw frequencies, and learn their covariance anew.

        Each row of `history` stands for as many positions as the history's stride.
        """
        self._learn_coordinates(history, rng)
        frequencies, phases = draw_features(
            self.kernel,
            self.n_features,
            self.embedding,
            self.dim,
            self.learnt_bandwidth(),
            rng,
        )
        self.features = self.features._replace(frequencies=frequencies, phases=phases)
        self.covariance = new_covariance(self.n_features)
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
        return features(u, drawn.frequencies, drawn.phases, self.embedding)

    def _refresh(self, rng):
        """Factor the covariance of the features, for the transitions to come."""
        covariance = self.covariance.scatter / self.covariance.weight[0]
        eigenvalues, vectors = linalg.eigh(covariance, lower=True, driver="evd")
        eigenvalues, vectors = np.maximum(eigenvalues[::-1], 0.0), vectors[:, ::-1]
        rank, share = int(np.count_nonzero(eigenvalues)), self.rank_share
        if share < 1:
            shares = np.cumsum(eigenvalues)
            rank = min(rank, 1 + int(np.searchsorted(shares, share * shares[-1])))
        factor = np.ascontiguousarray((vectors[:, :rank] * np.sqrt(eigenvalues[:rank])).T)
        self.features = self.features._replace(factor=factor)
        self.invalidate()
        self._rescale(rng)

    def statistics(self):  # noqa: D102
        return super().statistics() | {"rank": float(len(self.features.factor))}
