"""Learning of a surrogate without a chain: evaluations go where it is uncertain."""

import math
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from pymc.model import Model
from scipy.spatial.distance import cdist

from pymc_kameleon._threads import one_thread
from pymc_kameleon.approximate.parallel_evaluations import ParallelDensity
from pymc_kameleon.approximate.symmetries import (
    ROUNDING,
    Orbits,
    symmetries_of_prior,
)
from pymc_kameleon.gp.mean import n_coefficients
from pymc_kameleon.gp.typical_set import around_the_mode, typical_depth
from pymc_kameleon.mcmc.chain import EVALUATIONS
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.model.forks import refuse_in_fork, runs_in_forks
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.chain.report import may_be_random, randomness
from pymc_kameleon.steps.chain.sampler import evaluator_of
from pymc_kameleon.steps.chain.screening import NoScreening
from pymc_kameleon.steps.chain.start import Start, StartSearch
from pymc_kameleon.steps.chain.surrogate_sampler import (
    MANY_DIMENSIONS,
    MAX_POINTS,
    TARGET_ACCEPT,
    SurrogateSampler,
    check_learnable,
)
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.surrogate.acquisition import points_to_explore
from pymc_kameleon.surrogate.fit_posterior import N_BEST
from pymc_kameleon.surrogate.learner import N_EVALUATIONS, TrajectoryLearner
from pymc_kameleon.surrogate.posterior_surrogate import predicted, surrogate_values

SEARCHED = 0.7
"""Largest share of the evaluations before the check that prior draws and search take."""

FEWEST_EXPLORED = 100
"""Evaluations that a search for one more mode has to leave, or twice those that a quadratic
takes."""

AGAIN = 2
"""Searches that have to end at modes that are known, beside one for each of these."""

N_EXPECTED, EXPECTED = 2, 1.0
"""A search ends at a known mode where so many evaluations in turn, near its height, differ by less
than this from the surrogate."""

EDGES = 0.4
"""Share of the evaluations that go to edges of the density, where some evaluations have none."""

SHARE_TRIED, N_COMPARED = 0.05, 5
"""Share of the evaluations that may look for symmetries, and draws at which priors are compared."""

APART = 3.0
"""Standard deviations of a mode from its image below which the two are one mode."""

N_COVARIANCE = 250
"""Points at a time whose variances are computed."""


class Spent(Exception):
    """All evaluations that were allowed are made."""


class Explorer(SurrogateSampler):
    """`SurrogateSampler` that is taught by a bounded number of evaluations and makes no draws.

    Those that its store has are among them.

    It searches for the mode as a chain does, and again from elsewhere if it can; then, in turns,
    fits the surrogate and evaluates where that is uncertain, among its draws at all temperatures.
    With several `cores`, points that are known beforehand are evaluated at once. `on_call`, if it
    is set, is called after each evaluation.
    """

    def __init__(
        self,
        model: Model,
        *,
        budget: int,
        cores: int = 1,
        store: EvaluationStore | None = None,
        compile_kwargs: dict[str, Any] | None = None,
    ):
        self.budget = self.limit = budget
        self.n_before = 0
        self.orbits = Orbits([], None)
        self.heights: list[float] = []
        self.n_again, self.is_known_mode = 0, False
        self.parallel: ParallelDensity | None = None
        self.on_call: Callable[[], None] | None = None
        target = LogDensity(model, compile_kwargs=compile_kwargs, normal_scores=True)
        super().__init__(
            evaluator_of(target, store, gradients=False, looks_ahead=True),
            NoScreening(),
            TrajectoryLearner(max_points=MAX_POINTS),
            target_accept=TARGET_ACCEPT,
        )
        self.template.learns_support = True
        check_learnable(self, "surrogate_posterior")
        if cores > 1:
            is_forked = runs_in_forks(target.function.outputs)
            self.parallel = ParallelDensity(self.evaluator.function, cores, is_forked)
            self.evaluator.parallel = self.parallel

    # evaluations ----------------------------------------------------------------------------------

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
    def n_counted(self) -> int:
        """Evaluations that count: those made so far, and those in the store at the begin."""
        return self.n_before + self.n_calls

    @property
    def left(self) -> int:
        """Evaluations that may still be made."""
        return self.limit - self.n_counted

    @contextmanager
    def limited(self, limit: int):
        """Allow no more evaluations than `limit` in all."""
        before, self.limit = self.limit, min(limit, self.limit)
        try:
            yield
        finally:
            self.limit = before

    def _check_budget(self, x):
        if self.left <= 0 and not (self.stored is not None and self.stored.knows(x)):
            raise Spent

    def evaluate(self, x):  # noqa: D102
        self._check_budget(x)
        value = super().evaluate(x)
        if self.on_call is not None:
            self.on_call()
        return value

    def evaluate_current(self):  # noqa: D102
        self._check_budget(self.chain.position)
        super().evaluate_current()

    def announce(self, points):  # noqa: D102
        super().announce(points[: max(self.left, 0)])

    def evaluate_all(self, points):
        """Evaluate points that are known beforehand, as many as may be; return their values."""
        points, values = list(points), []
        if self.parallel is not None:
            points = self.parallel.announced(points[: max(self.left, 0)])
        else:
            self.announce(points)
        with suppress(Spent):
            for point in points:
                values.append(self.evaluate(point))
        return np.array(values)

    # learning -------------------------------------------------------------------------------------

    def begin(self, rng: np.random.Generator, start: np.ndarray | None = None) -> None:
        """Search for a mode from `start` (d,), by default the model's."""
        refuse_in_fork(self.target.function.outputs)
        self.begin_anew()
        self.evaluator.rng = rng
        self.n_before = 0 if self.stored is None else self.stored.n_held
        self.orbits = Orbits([], None)
        self.heights.clear()
        self.n_again, self.is_known_mode = 0, False
        with suppress(Spent), one_thread():
            self._begin_at(self.target.default_start if start is None else start, start is None)

    def _begin_at(self, x, is_default):
        """Begin at the best point that the store knows, at no evaluation; else as a chain does."""
        search = StartSearch(self, Start("optimize", disperse=True, is_warm=False))
        self.put(x)
        position = self.chain.position  # which the search for a start moves
        best = None if self.stored is None else self.stored.best_of_others(N_EVALUATIONS)
        if best is None:
            search.find(x)
        else:
            search.begins_at(best)
        self.scales, self.learner = search.scales, self.new_learner(position, None)
        self.learner.begin_with_scales(self.scales)
        searches = self.target.dim <= MANY_DIMENSIONS
        self.learn_first(search.looked, searches, from_anywhere=is_default)
        self._look_for_symmetries()

    @property
    def n_prior_points(self):  # noqa: D102
        return max(0, super().n_prior_points - self.n_before)

    def search(self, from_anywhere):
        """Search for modes from several points, until the known ones are found again and again.

        The points are the best ones: no chain has to begin apart from others. A search after the
        first ends where the surrogate knows the density.
        """
        end, reserve = self.limit, max(FEWEST_EXPLORED, 2 * n_coefficients(self.target.dim))
        with self.limited(max(1, round(SEARCHED * end))), suppress(Spent):
            for begin in self.points_to_search_from():
                n_calls, n_known = self.n_calls, len(self.learner.known()[1])
                if self.heights:
                    self.fit_known()
                self.is_known_mode = False
                self.search_from(begin)
                values = self.learner.known()[1]
                if self.is_known_mode:
                    self.n_again += 1
                else:
                    self.heights.append(np.max(values[n_known:], initial=-np.inf))
                if self.n_again >= self.n_modes + AGAIN:
                    break
                if end - self.n_counted < reserve + (self.n_calls - n_calls) // 2:
                    break

    @property
    def n_modes(self) -> int:
        """Different modes, of those that searches have found, that are not far below the highest.

        They end at the same one if the surrogate does not know better.
        """
        lowest = max(self.heights, default=-np.inf) - typical_depth(self.target.dim)
        return int(np.sum(np.array(self.heights) > lowest))

    def _missing(self, best):
        """Return 0 where the last evaluations were what the surrogate expects near a mode."""
        points, values, _ = (part[-N_EXPECTED:] for part in self.learner.known())
        lowest = max(self.heights, default=np.inf) - typical_depth(self.target.dim)
        if self.learner.has_learnt and np.all(values > lowest):
            expected = predicted(self.learner.surrogate, points)
            self.is_known_mode = bool(np.all(np.abs(values - expected) < EXPECTED))
            if self.is_known_mode:
                return 0.0
        return super()._missing(best)

    def _look_for_symmetries(self):
        """Find exchanges and reflections that leave the log density as it is.

        Where the image of the mode has another log density, it is an evaluation as any other.
        """
        target, (points, values, _) = self.target, self.learner.known()
        in_order = np.argsort(-values)[: np.isfinite(values).sum()]
        best, other = in_order[0], in_order[len(in_order) // 2]
        candidates = symmetries_of_prior(
            self._keeps_prior,
            target.default_start,
            ~(target.scores.is_scored | target.is_circular),
        )
        by_prior = Standardization(points[best], np.diag(target.scales))
        found, left = [], round(SHARE_TRIED * self.budget)
        for symmetry in candidates:
            image = symmetry(points[best])
            if not self._are_apart(by_prior, image):
                continue
            if left > 0 and not self._holds(symmetry):
                left -= 1
                if np.isclose(self.evaluate(image), values[best], ROUNDING, ROUNDING):
                    self.evaluate(symmetry(points[other]))
            if self._holds(symmetry):
                found.append(symmetry)
                self.orbits = Orbits(found, by_prior)

    def _are_apart(self, by_prior, image):
        """Whether a point is beyond the mode, as far as those know that are not nearer to it."""
        points, values, _ = self.learner.known()
        whitened, there = by_prior.whiten(points), by_prior.whiten(image[None])
        own = np.sum(whitened**2, axis=0) <= np.sum((whitened - there) ** 2, axis=0)
        mode = around_the_mode(points[own], values[own])
        return mode.distance(by_prior.location, image) > APART

    def _holds(self, symmetry):
        """Whether two pairs of evaluations or more are images of each other, and all are equal."""
        points, values, _ = self.learner.known()
        images = symmetry(points)
        distances = cdist(images, points)
        nearest = np.argmin(distances, axis=1)
        scale = 1.0 + np.max(np.abs(points), axis=1)
        is_known = distances.min(axis=1) < ROUNDING * scale
        is_known &= np.max(np.abs(images - points), axis=1) > ROUNDING * scale
        same = np.isclose(values[nearest], values, ROUNDING, ROUNDING)
        return np.sum(is_known) > 2 and bool(np.all(same[is_known]))

    def _keeps_prior(self, symmetry):
        target, drawn = self.target, self.evaluator.prior_points[:N_COMPARED]
        values, images = target.scores.to_values(drawn), symmetry(drawn)
        if not np.allclose(target.scores.to_values(images), symmetry(values)):
            return False  # equal scores are different values
        priors = [[target.log_prior(x) for x in rows] for rows in (drawn, images)]
        return np.allclose(*priors, ROUNDING, ROUNDING)

    @property
    def knows_something(self) -> bool:
        """Whether there is a surrogate."""
        return self.learner is not None and self.learner.has_learnt

    @property
    def knows_enough(self) -> bool:
        """Whether a surrogate can be fitted to what is known, which a quadratic says."""
        known = 0 if self.learner is None else len(self.learner.known()[1])
        return known >= 2 * n_coefficients(self.target.dim)

    def fit_known(self) -> None:
        """Fit the surrogate to all that is known, of others too, if that can be done."""
        self.keep_to_one_period()
        self.read_store()
        self.orbits.fold(self.learner.evaluations.points)
        self.fit()

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
        self.evaluate_all([*points, *self._others(n - len(points))])
        self.fit_known()

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
        pool, start = self.evaluator.prior_points, self.target.default_start
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

    def is_allowed(self, v):  # noqa: D102
        allowed = super().is_allowed(v)
        if self.orbits.size > 1:
            allowed &= self.orbits.is_first(self.learner.surrogate.to_points(v.T))
        return allowed

    def draw_surrogate(self, n):
        """Draw as the base class does, one point of each orbit."""
        return super().draw_surrogate(n if self.orbits.size == 1 else 2 * n)[:n]

    def normaliser(self, drawn=None):
        """Log normaliser of the surrogate, of all of each orbit."""
        found = super().normaliser(drawn)
        return found._replace(log_evidence=found.log_evidence + math.log(self.orbits.size))

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
        true = self.evaluate_all(points)
        return true - expected[: len(true)]
