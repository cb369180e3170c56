"""Every evaluated point of a chain that learns, accepted or not, for a surrogate to learn from.

They are those of one chain, in memory; `store` keeps evaluations of all chains and runs on disk.
"""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import by_class
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.history import History


def oldest_first(count: int, *arrays: np.ndarray) -> tuple:
    """Return what is stored of `count` rows, modulo the length of the `arrays`, in order."""
    size = len(arrays[0])
    order = np.arange(max(0, count - size), count) % size
    return tuple(array[order] for array in arrays)


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
        return oldest_first(int(self.count[0]), self.points, self.values, self.gradients)


def new_evaluations(capacity: int, dim: int, gradients: bool = False) -> Evaluations:
    """Return a record of nothing yet."""
    return Evaluations(
        np.zeros((capacity, dim)),
        np.zeros(capacity),
        np.zeros((capacity, dim if gradients else 0)),
        np.zeros(1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@by_class
def keep_evaluation(evaluations, point, terms):
    """Remember the log density at `point` (d,), of which `terms` has the terms and what follows."""


def _keep_with_gradient(evaluations, point, terms):
    """Gradients of log prior and log-likelihood follow the terms, if they are evaluated."""
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


keep_evaluation.register(Evaluations, _keep_with_gradient, allocates=False)


class TermEvaluations(NamedTuple):
    """The same of a log density whose likelihood is a sum: `terms` (m, T) are those of the sum.

    `values` (m,) are the log densities; -inf stands for what was not finite.
    """

    points: np.ndarray
    values: np.ndarray
    terms: np.ndarray
    count: np.ndarray  # type: ignore[assignment]

    @property
    def is_consistent(self) -> bool:
        """Whether the count is no negative one."""
        return bool(self.count[0] >= 0)

    def stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points (n, d), log densities (n,) and terms (n, T), the oldest first."""
        return oldest_first(int(self.count[0]), self.points, self.values, self.terms)


def new_term_evaluations(capacity: int, dim: int, n_terms: int) -> TermEvaluations:
    """Return a record of nothing yet."""
    return TermEvaluations(
        np.zeros((capacity, dim)),
        np.zeros(capacity),
        np.zeros((capacity, n_terms)),
        np.zeros(1, dtype=np.int64),
    )


def _keep_terms(evaluations, point, terms):
    """Take the terms of the sum, which follow those of the log density."""
    i = evaluations.count[0] % evaluations.values.size
    for k in range(point.size):
        evaluations.points[i, k] = point[k]
    total = terms[0] + terms[1] + terms[2]
    evaluations.values[i] = total if np.isfinite(total) else -np.inf
    for t in range(evaluations.terms.shape[1]):
        term = terms[N_TERMS + t]
        evaluations.terms[i, t] = term if np.isfinite(term) else -np.inf
    evaluations.count[0] += 1


keep_evaluation.register(TermEvaluations, _keep_terms, allocates=False)


def visited_values(history: History, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Log densities where the chain was lately, of those among `values` (n,) at `points` (n, d)."""
    known = {point.tobytes(): value for point, value in zip(points, values, strict=True)}
    keys = [position.tobytes() for position in history.later_half()]
    return np.array([known[key] for key in keys if np.isfinite(known.get(key, np.nan))])
