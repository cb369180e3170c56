"""Learning of a surrogate without a chain: evaluations go where it is uncertain."""

from collections.abc import Callable
from contextlib import contextmanager, suppress

import numpy as np
from scipy.spatial.distance import cdist

from pymc_kameleon.approximate.parallel_evaluations import ParallelDensity
from pymc_kameleon.gp.mean import n_coefficients
from pymc_kameleon.gp.typical_set import typical_depth
from pymc_kameleon.mcmc.chain import EVALUATIONS
from pymc_kameleon.model.forks import runs_in_forks
from pymc_kameleon.steps.chain.report import may_be_random, randomness
from pymc_kameleon.steps.chain.start import FIRST_SHARE, begins_at
from pymc_kameleon.steps.surrogate_hmc import SurrogateHMCStep
from pymc_kameleon.surrogate.acquisition import points_to_explore
from pymc_kameleon.surrogate.fit_posterior import N_BEST
from pymc_kameleon.surrogate.learner import N_EVALUATIONS
from pymc_kameleon.surrogate.posterior_surrogate import surrogate_values

SEARCHED = 0.7
"""Largest share of the evaluations before the check that prior draws and search take."""

MOST_SEARCHES, FEWEST_EXPLORED = 4, 100
"""Searches for modes at most, and evaluations that one more has to leave, or twice those that a
quadratic takes."""

EDGES = 0.4
"""Share of the evaluations that go to edges of the density, where some evaluations have none."""

N_COVARIANCE = 250
"""Points at a time whose variances are computed."""


class Spent(Exception):
    """All evaluations that were allowed are made."""


class Explorer(SurrogateHMCStep):
    """`SurrogateHMCStep` that is taught by a bounded number of evaluations and makes no draws.

    Those that its store has are among them.

    It searches for the mode as the step does, and again from elsewhere if it can; then, in turns,
    fits the surrogate and evaluates where that is uncertain, among its draws at all temperatures.
    With several `cores`, points that are known beforehand are evaluated at once. `on_call`, if it
    is set, is called after each evaluation.
    """

    called = "surrogate_posterior"

    def __init__(self, *, budget: int, cores: int = 1, **options):
        self.budget = self.limit = budget
        self.n_before = 0
        self.parallel: ParallelDensity | None = None
        self.on_call: Callable[[], None] | None = None
        super().__init__(**options)
        if cores > 1:
            is_forked = runs_in_forks(self.target.function.outputs)
            self.parallel = ParallelDensity(self._density, cores, is_forked)

    # evaluations ----------------------------------------------------------------------------------

    @property
    def _density(self):
        return self.parallel or super()._density

    @property
    def n_calls(self) -> int:
        """Evaluations so far, those that a store knew not among them."""
        if self.chain is None:
            return 0
        return int(
            self.chain.counts[EVALUATIONS] if self.stored is None else self.stored.n_evaluated
        )

    @property
    def n_known(self) -> int:
        """Evaluations that a store knew, of those that are learnt from."""
        points, _, _ = self.learner.evaluations.stored()
        return max(0, len(np.unique(points, axis=0)) - self.n_calls)

    @property
    def n_paid(self) -> int:
        """Evaluations so far, with those that the store had at first."""
        return self.n_before + self.n_calls

    @property
    def left(self) -> int:
        """Evaluations that may still be made."""
        return self.limit - self.n_paid

    @contextmanager
    def limited(self, limit: int):
        """Allow no more evaluations than `limit` in all."""
        before, self.limit = self.limit, min(limit, self.limit)
        try:
            yield
        finally:
            self.limit = before

    def _pay(self, x):
        if self.left <= 0 and not (self.stored is not None and self.stored.knows(x)):
            raise Spent

    def _evaluate_as_proposal(self, x):
        self._pay(x)
        value = super()._evaluate_as_proposal(x)
        if self.on_call is not None:
            self.on_call()
        return value

    def _evaluate_current(self):
        self._pay(self.chain.position)
        super()._evaluate_current()

    def _announce(self, points):
        super()._announce(points[: max(self.left, 0)])

    def _evaluate_all(self, points):
        """Evaluate points that are known beforehand, as many as may be; return their values."""
        points, values = list(points), []
        if self.parallel is not None:
            points = self.parallel.announced(points[: max(self.left, 0)])
        else:
            self._announce(points)
        with suppress(Spent):
            for point in points:
                values.append(self._evaluate_as_proposal(point))
        return np.array(values)

    # learning -------------------------------------------------------------------------------------

    def begin(self, rng: np.random.Generator, start: np.ndarray | None = None) -> None:
        """Search for a mode from `start` (d,), by default the model's."""
        self._start_chain(rng, None, None)
        self.n_before = 0 if self.stored is None else self.stored.n_held
        with suppress(Spent):
            self._begin_at(self.target.default_start if start is None else start)

    def _find_start(self, x):
        """Begin at the best point that the store knows, at no evaluation; else as a chain does."""
        best = None if self.stored is None else self.stored.best_of_others(N_EVALUATIONS)
        if best is None:
            super()._find_start(x)
        else:
            self.scales = self.target.scales * FIRST_SHARE
            begins_at(self, best)

    @property
    def _n_prior_points(self):
        return max(0, super()._n_prior_points - self.n_before)

    def _search(self, from_anywhere):
        """Search for modes from several points, until one is found again or too few are left.

        They are the best ones: no chain has to begin apart from others.
        """
        end, reserve = self.limit, max(FEWEST_EXPLORED, 2 * n_coefficients(self.dim))
        with self.limited(max(1, round(SEARCHED * end))), suppress(Spent):
            heights = []
            for begin in self._points_to_search_from()[:MOST_SEARCHES]:
                n_calls, n_known = self.n_calls, len(self.learner.known()[1])
                self._search_from(begin)
                heights.append(max(self.learner.known()[1][n_known:], default=-np.inf))
                cost = self.n_calls - n_calls
                if end - self.n_paid < reserve + cost:
                    break
                if len(heights) > 1 and np.ptp(np.sort(heights)[-2:]) < typical_depth(self.dim):
                    break

    def _new_learner(self, position, warm):
        learner = super()._new_learner(position, warm)
        learner.learns_support = True
        return learner

    @property
    def knows_something(self) -> bool:
        """Whether there is a surrogate."""
        return self.learner is not None and self.learner.has_learnt

    @property
    def knows_enough(self) -> bool:
        """Whether a surrogate can be fitted to what is known, which a quadratic says."""
        known = 0 if self.learner is None else len(self.learner.known()[1])
        return known >= 2 * n_coefficients(self.dim)

    def fit(self) -> None:
        """Fit the surrogate to all that is known, of others too, if that can be done."""
        self._keep_to_one_period()
        self._read_store()
        self._fit()

    def explore(self) -> None:
        """Evaluate where the surrogate is uncertain, then fit it again.

        Where it is sure everywhere, draws from it are evaluated; and draws from the prior where
        nothing is known yet.
        """
        learner = self.learner
        n = min(learner.n_before_next_fit(), self.left)
        learner.last_update[:] = learner.n_own, learner.n_foreign
        points = list(self._near_edges(round(EDGES * n)))
        if learner.has_learnt:
            left = n - len(points)
            points += list(points_to_explore(learner.fitted, learner.surrogate, left))
        self._evaluate_all([*points, *self._others(n - len(points))])
        self.fit()

    def _near_edges(self, n):
        """Raw points, at most `n` of the surrogate's draws, where the density may be 0 or not.

        They are about as near to evaluations without one as to those with one, and far from both;
        picked one by one, each as if there were a density at the ones before.
        """
        support = self.learner.fitted.support
        if np.all(support.has_density):
            return []
        drawn = self.learner.fitted.population[:, N_BEST:].T
        inside = cdist(drawn, support.points[support.has_density]).min(axis=1)
        outside = cdist(drawn, support.points[~support.has_density]).min(axis=1)
        chosen = []
        for _ in range(n):
            best = int(np.argmax(2.0 * inside - outside))
            if not 2.0 * inside[best] > outside[best]:
                break
            chosen.append(best)
            inside = np.minimum(inside, cdist(drawn, drawn[[best]])[:, 0])
        return self.learner.surrogate.to_points(np.ascontiguousarray(drawn[chosen].T))

    def _others(self, n):
        """Raw points, `n` of the surrogate's draws; from start to prior where there is none."""
        if n <= 0:
            return []
        if self.learner.has_learnt:
            drawn = self.learner.fitted.population[:, N_BEST:]  # those before are evaluations
            chosen = self.rng.choice(drawn.shape[1], n, replace=n > drawn.shape[1])
            return self.learner.surrogate.to_points(np.ascontiguousarray(drawn[:, chosen]))
        pool, start = self.prior_points, self.target.default_start
        shares = self.rng.random((n, 1))
        return start + shares * (pool[self.rng.integers(len(pool), size=n)] - start)

    def randomness(self) -> str | None:
        """Say so if the log density is another one when evaluated again, by the last evaluation."""
        if self.left <= 0 or self.n_calls == 0 or not may_be_random(self):
            return None
        if self.stored is None:
            self.chain.counts[EVALUATIONS] += 1
        else:
            self.stored.n_evaluated += 1
        return randomness(self)

    # what was learnt ------------------------------------------------------------------------------

    def covariance(self, v: np.ndarray) -> np.ndarray:
        """Covariance (n, n) of the log densities at draws `v` (n, d)."""
        return self.learner.fitted.covariance_at(self.learner.surrogate.to_points(v.T))

    def standard_deviations(self, v: np.ndarray) -> np.ndarray:
        """Of the surrogate's log densities at draws `v` (n, d): (n,)."""
        found = [
            np.diagonal(self.covariance(v[begin : begin + N_COVARIANCE]))
            for begin in range(0, len(v), N_COVARIANCE)
        ]
        return np.sqrt(np.maximum(np.concatenate(found), 0.0))

    def errors(self, v: np.ndarray) -> np.ndarray:
        """Evaluate at draws `v` (m, d); return true log density minus surrogate (m or fewer,)."""
        surrogate = self.learner.surrogate
        points, expected = surrogate.to_points(v.T), surrogate_values(surrogate, v)
        true = self._evaluate_all(points)
        return true - expected[: len(true)]
