"""The chain of `SurrogateHMCStep` where the likelihood is a sum of terms that are learnt apart."""

import math

import numpy as np

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.initial_points import seed_from
from pymc_kameleon.steps.chain.surrogate_sampler import NO_ESTIMATE, SurrogateSampler
from pymc_kameleon.surrogate.posterior_surrogate import predicted
from pymc_kameleon.surrogate.terms_learner import TermsLearner

N_FIRST, N_WARM = 40, 100
"""Draws from the prior, or earlier draws, that are evaluated first."""

ROUND, ROUNDS, INDEPENDENT = 8, 32, 4
"""Draws from the surrogate that are evaluated before it is fitted again, largest number of such
rounds before the first transition, and how many of them have independent priors."""

CLOSE = 0.2
"""Standard deviation of the error of the sum at its own draws from which transitions begin."""

OUTWARDS = 1.5
"""Factor of the distance from the middle of the draws for those that are moved outwards."""


class TermsSampler(SurrogateSampler):
    """Transitions on a sum of surrogates, and the evaluations before them that teach the terms."""

    learner: TermsLearner

    n_warm_points = N_WARM

    # the start ------------------------------------------------------------------------------------

    def learn_first(self, looked, searches, from_anywhere):  # noqa: D102
        learner = self.learner
        for point, value in looked:
            learner.keep(point, value)
        drawn = self.target.prior_draws(N_FIRST, seed_from(self.rng))
        self.evaluate_all(drawn if len(drawn) else self.target.prior_points(seed_from(self.rng)))
        self.read_store()
        errors = np.zeros(0)
        for i in range(ROUNDS):
            learner.is_independent = i < INDEPENDENT
            if self.fit() is None:
                break
            found = self._evaluate_draws()
            errors = np.append(errors, found)[-2 * len(found) :]
            if not learner.is_independent and len(errors) >= ROUND and errors.std() < CLOSE:
                break
        learner.is_independent = False
        learner.last_update[:] = learner.n_own, learner.n_foreign
        learner.next_update = learner.n_own + learner.n_before_next_fit()
        if searches and self.chain.proposed_value[:N_TERMS].sum() > -np.inf:
            self.move_to_proposal()

    def _evaluate_draws(self):
        """Evaluate draws from the surrogate; return its errors at those that are not moved.

        Half of them are moved outwards: a regression is as good between its points as it is bad
        beyond them. And in what terms share they are moved as far as one term alone leaves
        open: all terms together leave less, and would learn nothing of it.
        """
        learner, rng = self.learner, self.rng
        particles, shared = learner.fitted.particles, learner.parts.shared
        points = particles[rng.permutation(len(particles))[:ROUND]].copy()
        n_moved, middle = ROUND // 2, particles.mean(axis=0)
        points[:n_moved] += (OUTWARDS - 1.0) * (points[:n_moved] - middle)
        for i, k in shared:
            width = np.median(self._widths_of(i))
            points[:n_moved, k] = middle[k] + width * rng.standard_normal(n_moved)
        found = self.evaluate_all(points)
        self.read_store()
        return np.maximum(found - predicted(learner.surrogate, points), -1e300)[n_moved:]

    def _widths_of(self, i):
        """Return standard deviations of input `i` by each of the terms that have it."""
        learner = self.learner
        return [
            learner.fitted.widths[t, list(indices).index(i)]
            for t, indices in enumerate(learner.parts.members)
            if i in indices
        ]

    # what was learnt ------------------------------------------------------------------------------

    def normaliser(self, drawn=None):
        """Return no estimate: a sum in many dimensions is not normalised."""
        return NO_ESTIMATE

    def worst_of_last(self) -> tuple[float, float]:
        """Return the number of the term that was furthest off at the last evaluation, its error.

        NaN without a surrogate, and where a term was not finite.
        """
        learner, chain = self.learner, self.chain
        if not learner.has_learnt:
            return math.nan, math.nan
        errors = chain.proposed_value[N_TERMS:] - learner.terms_at(chain.proposal)
        if not np.isfinite(errors).all():
            return math.nan, math.nan
        worst = int(np.argmax(np.abs(errors)))
        return float(worst), float(errors[worst])
