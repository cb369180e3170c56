"""The chain of `SurrogateHMCStep`: evaluations that teach its surrogate, and what that says."""

import logging
from collections.abc import Sequence

import numpy as np

from pymc_kameleon._threads import one_thread
from pymc_kameleon.adaptation.learner import WarmStart
from pymc_kameleon.evidence.estimates import Estimate
from pymc_kameleon.evidence.normaliser import N_DRAWN, log_normaliser
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.history import thinned
from pymc_kameleon.model.initial_points import seed_from
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.steps.chain.sampler import ChainSampler
from pymc_kameleon.steps.chain.start import are_enough, least_typical, point_near_mode, search_from
from pymc_kameleon.surrogate.learner import N_EVALUATIONS, TrajectoryLearner
from pymc_kameleon.surrogate.posterior_surrogate import predicted_at

_log = logging.getLogger("pymc.kameleon")

MOST_CHECKS, GROSS = 5, 5.0
"""Surrogates that are checked at the end of tuning, and the error at their own draws that asks for
one more fit."""

NO_ESTIMATE = Estimate(float("nan"), float("nan"), 0.0)

MAX_POINTS, TARGET_ACCEPT = 1000, 0.9
"""Largest number of points that a surrogate holds, and acceptance on the surrogate, by default."""

MANY_DIMENSIONS = 30
"""Dimensions from which a surrogate takes more evaluations than it saves."""

ADVICE_BESIDE = (
    "sum or integrate them out of the likelihood (marginalise), or take KameleonStep, which learns "
    "no log density"
)
"""What to do where other steps move what the likelihood depends on."""


def _prior_with_gradient(target) -> ModelFunction | None:
    """Log prior with its gradient for compiled code; None where it has to be learnt."""
    if not target.has_likelihood:
        return None
    try:
        prior = target.prior_with_gradient
    except NotImplementedError:
        return None
    return None if prior.compiled() is None else prior


class SurrogateSampler(ChainSampler):
    """Transitions whose learner fits a surrogate, and the evaluations that it asks for.

    `known_prior` is the log prior with its gradient, which is not learnt; None where it has to be.
    `moved_by_others` names the variables of other steps that what is learnt depends on. `scales`
    (d,) are standard deviations of the first moves.
    """

    learner: TrajectoryLearner
    scales: np.ndarray

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        target = self.target
        if self.evaluator.gradients:
            _ = target.with_gradients  # raises an error where there is none
        # A sum of terms has a function of its own for what is known.
        self.known_prior = None if self.evaluator.terms else _prior_with_gradient(target)
        others = target.others_in_likelihood
        if self.known_prior is None:
            others = [variable.name for variable in target.shared]
        self.moved_by_others = ", ".join(others)

    def new_learner(self, position: np.ndarray, warm: WarmStart | None) -> TrajectoryLearner:
        """Return what a chain at `position` (d,) learns with, taught by earlier draws if warm."""
        learner = super().new_learner(position, warm)
        learner.prior = self.known_prior
        if self.known_prior is not None:
            learner.fitted.is_bounded[:] = self.target.has_two_bounds()
            learner.evaluations.first_term[0] = 1
        if warm is not None:
            self.learner = learner
            learner.history.begin_with(warm.points)
            self.evaluate_all(thinned(warm.points, self.n_warm_points, self.rng))
            self.fit()
        return learner

    # the start ------------------------------------------------------------------------------------

    @property
    def n_warm_points(self) -> int:
        """Earlier draws that are evaluated again, at most."""
        return 50 + 10 * self.target.dim

    @property
    def n_prior_points(self) -> int:
        """Draws from the prior that are evaluated before a search."""
        return min(30, 6 + 100 // self.target.dim**2)

    def learn_first(
        self, looked: Sequence[tuple[np.ndarray, np.ndarray]], searches: bool, from_anywhere: bool
    ) -> None:
        """Learn from the evaluations before tuning; search for a mode if told to.

        Those `looked` at are points with their terms. A search begins at the best point that is
        known if `from_anywhere`, else where the chain is.
        """
        learner = self.learner
        for point, value in looked:
            learner.keep(point, value)
        self.read_store()
        learner.last_update[:] = learner.n_own, learner.n_foreign
        if searches:
            is_taught = self._is_taught_by(learner.known()[1])
            if not is_taught:
                self.search(from_anywhere)
            self._begin_near_mode()
            learner.next_update = learner.n_own + (learner.n_before_next_fit() if is_taught else 5)

    def search(self, from_anywhere: bool) -> None:
        """Search for a mode, from the best point if `from_anywhere`, else where the chain is."""
        points = self.points_to_search_from()
        self.search_from(points[0] if from_anywhere else self.chain.position)

    def points_to_search_from(self) -> list[np.ndarray]:
        """Evaluate some draws from the prior, so that the surrogate sees other modes.

        Returns these points after the best one of all that is known, the higher ones first.
        """
        drawn = self.target.prior_draws(self.n_prior_points, seed_from(self.rng))
        values = self.evaluate_all(drawn)
        self.read_store()
        points, known, _ = self.learner.known()
        best, others = points[np.argmax(known)], drawn[np.argsort(-values)]
        return [best, *(point for point in others if not np.array_equal(point, best))]

    def search_from(self, begin: np.ndarray) -> None:
        """Search for a mode from `begin` (d,)."""
        if not self.evaluator.gradients:  # where every search without them begins
            steps = self.scales * np.vstack([np.eye(self.target.dim), -np.eye(self.target.dim)])
            self.announce([begin, *(begin + steps)])
        gradient = self.evaluator.gradient_at(self.chain.proposed_value)
        search_from(begin, self.scales, self.evaluate, gradient, self._missing)
        self.read_store()

    def _is_taught_by(self, values):
        """Whether these log densities (n,), some of them others', make a search needless."""
        return self.learner.n_foreign > 0 and are_enough(values, self.target.dim)

    def _missing(self, best):
        """Log density that a search lacks whose largest is `best` to be where others have taught.

        NaN as long as they have not taught enough.
        """
        if self.stored is None:
            return np.nan
        self.read_store()
        if not self.learner.n_foreign:
            return np.nan
        values = self.learner.known()[1]
        lowest = least_typical(values, self.target.dim)
        return lowest - best if self._is_taught_by(values) else np.nan

    def _begin_near_mode(self):
        """Move the chain to a random point around the mode of what is known."""
        learner = self.learner
        self.fit()
        gaussian, (points, values, _) = learner.fitted.standardization, learner.known()
        point_near_mode(gaussian, points, values, self.evaluate, self.rng)
        self.move_to_proposal()

    # learning -------------------------------------------------------------------------------------

    def fit(self):
        """Fit the surrogate to all that is known, if that can be done; return what was fitted."""
        return self.learner.fit(self.rng)

    def _explore(self, points):
        self.evaluate_all(points)
        self.read_store()

    def read_store(self):  # noqa: D102
        if self.stored is None:
            return
        found = self.stored.from_others(N_EVALUATIONS)
        if not len(found.points):
            return
        known = {point.tobytes() for point in self.learner.evaluations.stored()[0]}
        for point, terms in zip(found.points, found.values, strict=True):
            if point.tobytes() not in known:
                self.learner.keep(point, terms, is_foreign=True)

    def end_learning(self):
        """Fit for the last time, and again while the surrogate is far too large at its own draws.

        It can be so where nothing was evaluated, and later transitions would propose such points in
        vain.
        """
        learner = self.learner
        for _ in range(MOST_CHECKS):
            self.keep_to_one_period()
            points, surrogate = super().end_learning(), learner.surrogate
            found = self.evaluate_all(points)
            errors = found - [predicted_at(surrogate, point, np.inf) for point in points]
            if min(errors, default=0.0) > -GROSS - 3.0 * learner.fitted.noise:
                break
        else:
            super().end_learning()
        if learner.has_learnt:
            random_state = self.rng.bit_generator.state
            learner.log_normaliser = self.normaliser().log_evidence
            self.rng.bit_generator.state = random_state  # draws do not depend on it

    # the surrogate as a density -------------------------------------------------------------------

    def is_allowed(self, v: np.ndarray) -> np.ndarray:
        """Whether the rows of `v` (n, d), in coordinates of moves, are in the surrogate's domain.

        That is the ball of its trajectories, and one period of each angle.
        """
        inside = np.sum(v**2, axis=1) <= self.learner.fitted.integrator.radius[0] ** 2
        angles = self.target.is_circular
        if angles.any():
            points = self.learner.surrogate.to_points(v.T)[:, angles]
            low, high = self.chain.bounds[:, angles]
            inside &= np.all((points >= low) & (points <= high), axis=1)
        return inside

    def draw_surrogate(self, n: int) -> np.ndarray:
        """Draw from the surrogate: (n, d), in coordinates of moves, in random order."""
        learner = self.learner
        drawn = learner.fitted.draw(
            learner.log_prior, learner.known()[0], n, self.target_accept, self.rng
        )
        return self._allowed(drawn, n)

    def _allowed(self, drawn, n):
        allowed = self.is_allowed(drawn)
        drawn = drawn[allowed] if allowed.any() else drawn
        order = self.rng.permutation(len(drawn))
        if len(order) < n:  # of an angle, beyond the period
            order = np.append(order, self.rng.integers(len(drawn), size=n - len(order)))
        return np.ascontiguousarray(drawn[order])

    @one_thread()
    def normaliser(self, drawn: np.ndarray | None = None) -> Estimate:
        """Log normaliser of the surrogate, from draws (n, d); from its population by default.

        NaN where the evidence has none: an improper prior, or variables of other steps.
        """
        if self.target.shared or not self.target.has_proper_prior:
            return NO_ESTIMATE
        if drawn is None:
            drawn = self.learner.fitted.draw_on(self.learner.log_prior, N_DRAWN, self.rng)
            drawn = self._allowed(drawn, N_DRAWN)
        return log_normaliser(self.learner.surrogate, drawn, self.is_allowed, self.rng)

    def error_of_last(self) -> float:
        """Log density minus surrogate at the last evaluation; NaN without a surrogate."""
        if self.learner.has_learnt:
            expected = predicted_at(self.learner.surrogate, self.chain.proposal, np.inf)
            if expected > -np.inf:
                return self.chain.proposed_value[:N_TERMS].sum() - expected
        return np.nan

    def evidence_ratio(self) -> float:
        """Log density minus that of the normalised surrogate, where the chain is; NaN in tuning."""
        learner, chain = self.learner, self.chain
        if self.tune or np.isnan(learner.log_normaliser):
            return np.nan
        expected = predicted_at(
            learner.surrogate, chain.position, learner.fitted.integrator.radius[0]
        )
        return chain.value[:N_TERMS].sum() - expected + learner.log_normaliser


def check_learnable(sampler: SurrogateSampler, called: str, is_noisy: bool = False) -> None:
    """Raise an error if the log density of a `sampler` is an estimate that is taken for exact.

    Log a warning where a surrogate is of no use, or cannot follow the log density. `called` is what
    the user called.
    """
    target = sampler.target
    if target.estimated_terms and not is_noisy:
        raise ValueError(
            f"The likelihood term {', '.join(target.estimated_terms)} is an estimate. Write "
            f"{called}(pseudo_marginal=True): the surrogate then learns with its noise."
        )
    if target.dim > MANY_DIMENSIONS and not sampler.evaluator.terms:
        _log.warning(
            "%s in %d dimensions: a surrogate takes more evaluations there than it saves. Take "
            "KameleonStep, or NUTS where there is a gradient.",
            called,
            target.dim,
        )
    if sampler.moved_by_others:
        _log.warning(
            "What the surrogate of %s learns depends on %s too, which another step moves: it "
            "cannot follow it. Give this step those variables, if they are continuous; else "
            "%s.",
            ", ".join(target.names),
            sampler.moved_by_others,
            ADVICE_BESIDE,
        )
