"""Learner of hyperparameters' moves: surrogate transitions on log evidences at pilot points."""

import numpy as np

from pymc_kameleon.surrogate.depth import typical_depth
from pymc_kameleon.surrogate.trajectory_adaptation import TrajectoryLearner

__all__ = ["EvidenceLearner"]

COSINE = 0.7
"""That of the angle between an axis and the points that say what is in its direction."""


class EvidenceLearner(TrajectoryLearner):
    """Moves on a surrogate of log p(theta | y), beside differences of past points.

    The surrogate is fitted to approximations at pilot points, which are given by `keep`, and not to
    the densities that transitions evaluate: those know theta and a function. It differs from the
    truth by what the approximation leaves out, and the exact ratio takes that into account.
    """

    keeps_evaluations = False

    def transitions_before_update(self, transition, n, rng):
        """Return `n`: whoever has the pilots says when to fit."""
        return n

    def unknown_points(self, fitted, n: int) -> np.ndarray:
        """Rows of points, at most n + 2 d, where the surrogate that was `fitted` should know more.

        At most `n` of them are where it is uncertain. It does not know of what is further out than
        its trajectories go, so the others are at their end, on the axes.
        """
        return np.concatenate([self._points_to_explore(fitted, n), self._open_ends()])

    def _open_ends(self):
        """Return the ends of axes, but those in whose direction a very low density is known."""
        points, values, _ = self.known()
        surrogate = self.surrogate
        v = surrogate.to_moves(points)
        v /= np.maximum(np.linalg.norm(v, axis=0), 1e-300)
        axes = np.concatenate([np.eye(self.dim), -np.eye(self.dim)])
        is_low = values < values.max() - typical_depth(self.dim)
        is_closed = np.any((axes @ v > COSINE) & is_low, axis=1)
        return surrogate.to_points(self.integrator.radius[0] * axes[~is_closed].T)

    def end_tuning(self, position, rng):
        """Freeze what there is."""
        self._judge()
        self.integrator.hot_share[0] = 0.0

    def statistics(self):
        """Return the share of surrogate transitions, beside the scaling."""
        found = super().statistics()
        surrogate = 1.0 - self.difference_share if self.has_learnt else 0.0
        return {"scaling": found["scaling"], "surrogate_share": surrogate}
