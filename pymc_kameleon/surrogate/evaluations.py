"""Every evaluated point of a chain that learns, accepted or not, for a surrogate to learn from.

They are those of one chain, in memory; `store` keeps evaluations of all chains and runs on disk.
"""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jitable
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.history import History


class Evaluations(NamedTuple):
    """The last evaluations of a chain; all arrays are changed in place.

    At the raw coordinates `points` (m, d), `values` (m,) are what is learnt, log-likelihoods or log
    densities, -inf where they were not finite; `gradients` (m, d) are theirs, (m, 0) where
    gradients are not evaluated. `first_term` (1,) is the first term of the log density that counts
    in it: 1 if the prior is not learnt. `count` (1,) is how many there were so far; they are stored
    modulo m. Both are int64.
    """

    points: np.ndarray
    values: np.ndarray
    gradients: np.ndarray
    first_term: np.ndarray
    count: np.ndarray  # type: ignore[assignment]

    @property
    def is_consistent(self) -> bool:
        """Whether the count is no negative one."""
        return bool(self.count[0] >= 0)

    def stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points (n, d), values (n,) and gradients (n, d or 0), the oldest first."""
        count, size = int(self.count[0]), len(self.values)
        order = np.arange(max(0, count - size), count) % size
        return self.points[order], self.values[order], self.gradients[order]


def new_evaluations(capacity: int, dim: int, gradients: bool = False) -> Evaluations:
    """Return a record of nothing yet."""
    return Evaluations(
        np.zeros((capacity, dim)),
        np.zeros(capacity),
        np.zeros((capacity, dim if gradients else 0)),
        np.zeros(1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@jitable
def keep_evaluation(evaluations, point, terms):
    """Remember the log density at `point` (d,), and its gradient if gradients are evaluated.

    `terms` has the terms of the log density, then the gradients of log prior and log-likelihood.
    """
    value = 0.0
    for k in range(evaluations.first_term[0], N_TERMS):
        value += terms[k]
    i = evaluations.count[0] % evaluations.values.size
    for k in range(point.size):
        evaluations.points[i, k] = point[k]
    evaluations.values[i] = value if np.isfinite(value) else -np.inf
    dim = evaluations.gradients.shape[1]
    for k in range(dim):
        gradient = terms[N_TERMS + dim + k]
        if evaluations.first_term[0] == 0:
            gradient += terms[N_TERMS + k]
        evaluations.gradients[i, k] = gradient
    evaluations.count[0] += 1


def visited_values(history: History, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Log densities where the chain was lately, of those among `values` (n,) at `points` (n, d)."""
    known = {point.tobytes(): value for point, value in zip(points, values, strict=True)}
    keys = [position.tobytes() for position in history.later_half()]
    return np.array([known[key] for key in keys if np.isfinite(known.get(key, np.nan))])
