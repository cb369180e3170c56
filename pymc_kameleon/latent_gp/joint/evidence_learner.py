"""Learner of hyperparameters' moves: surrogate transitions on log evidences at pilot points."""

import numpy as np

from pymc_kameleon.surrogate.trajectory_adaptation import TrajectoryAdaptation, TrajectoryLearner

__all__ = ["EVIDENCE", "EvidenceLearner"]

EVIDENCE = TrajectoryAdaptation(max_centers=300)
"""Choices of every `EvidenceLearner`."""


class EvidenceLearner(TrajectoryLearner):
    """Moves on a surrogate of log p(theta | y), beside differences of past points.

    The surrogate is fitted to approximations at pilot points, which are given by `keep`, and not to
    the densities that transitions evaluate: those know theta and a function. It differs from the
    truth by what the approximation leaves out, and the exact ratio takes that into account.
    """

    def evaluation_record(self, learns):
        """Nothing is learnt from the evaluations of transitions."""
        return None

    def transitions_before_update(self, transition, n, rng):
        """Return `n`: whoever has the pilots says when to fit."""
        return n

    def uncertain_points(self, fitted, n: int) -> np.ndarray:
        """Points, at most `n` rows, where the surrogate that was `fitted` should know more."""
        uncertainty, annealed = fitted
        return self._uncertain_points(uncertainty, annealed, n)

    def end_tuning(self, position, rng):
        """Freeze what there is."""
        self._judge()
        self.integrator.hot_share[0] = 0.0

    def statistics(self):
        """Return the share of surrogate transitions, beside the scaling."""
        found = super().statistics()
        surrogate = 1.0 - self.difference_share if self.has_learnt else 0.0
        return {"scaling": found["scaling"], "surrogate_share": surrogate}
