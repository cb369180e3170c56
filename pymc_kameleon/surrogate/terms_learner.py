"""Learner of `SurrogateHMCStep` where the likelihood is a sum of terms that are learnt apart."""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit, resolved_once
from pymc_kameleon.mcmc.coordinates import Standardization
from pymc_kameleon.mcmc.loop import Mixture, differences_of
from pymc_kameleon.mcmc.proposals import register_proposal
from pymc_kameleon.surrogate.evaluations import new_term_evaluations
from pymc_kameleon.surrogate.fit_terms import (
    FittedTerms,
    Sampled,
    first_particles,
    fit_terms,
    moved_particles,
    unfitted_terms,
)
from pymc_kameleon.surrogate.hmc import Integrator
from pymc_kameleon.surrogate.learner import (
    N_CHECKED,
    N_EVALUATIONS,
    TrajectoryLearner,
)
from pymc_kameleon.surrogate.sum_of_surrogates import SumOfSurrogates, terms_at
from pymc_kameleon.surrogate.sum_parts import SumParts
from pymc_kameleon.surrogate.transition import (
    TransitionRecord,
    learn_from_transition,
    move_routine,
    propose_by_moves,
)


class TermsTransition(NamedTuple):
    """The proposal, as `SurrogateTransition`: trajectories on a sum of surrogates."""

    surrogate: SumOfSurrogates
    integrator: Integrator
    points: np.ndarray
    move: int
    record: TransitionRecord


register_proposal(
    TermsTransition,
    propose=propose_by_moves,
    learn=learn_from_transition,
    in_python=resolved_once(jit(propose_by_moves, allocates=True)),
)


class TermsLearner(TrajectoryLearner):
    """Fits a surrogate of each term to its values at all evaluations.

    While `is_independent`, independent Gaussians stand for what is known of the log density: before
    the terms are known the scale of a hierarchy would shrink to 0, and not come back.
    """

    is_independent = False

    def __init__(self, parts: SumParts, *, max_points: int):
        super().__init__(max_points=max_points)
        self.parts = parts
        self.options = {"max_points": self.max_points, "terms": list(parts.names)}

    def _nothing_known(self):
        evaluations = new_term_evaluations(N_EVALUATIONS, self.dim, len(self.parts.names))
        return evaluations, unfitted_terms(self.parts)

    # what transitions take ------------------------------------------------------------------------

    def proposal(self, compiled):  # noqa: D102
        surrogate, fitted = self.surrogate, self.fitted
        return TermsTransition(
            surrogate,
            fitted.integrator,
            np.zeros((self.dim, 0)),
            move_routine(surrogate, fitted.integrator),
            TransitionRecord(
                self.history, self.evaluations, self.outcome, fitted.scales, self.last, True
            ),
        )

    def mixture(self, tune):  # noqa: D102
        if not self.has_learnt:
            return Mixture(self.scales, self._no_differences, 1.0, 0.0)
        fitted = self.fitted
        points = np.ascontiguousarray(((fitted.particles - fitted.location) / fitted.scales).T)
        differences = differences_of(points, np.diag(fitted.scales))
        return Mixture(self.scales, differences, 0.0, self.difference_share)

    # learning -------------------------------------------------------------------------------------

    def known(self):  # noqa: D102
        points, values, _ = self.evaluations.stored()
        return points, values, np.zeros(len(values))

    def _explored(self, fitted, n_new):
        return ()

    def end_tuning(self, position, rng):  # noqa: D102
        self._judge()
        if self.evaluations.count[0] > self.n_fitted + 1:
            self.fit(rng)
        self._choose_hot_share()
        if not self.has_learnt:
            return ()
        return self.fitted.particles[rng.permutation(len(self.fitted.particles))[:N_CHECKED]]

    def fit(  # type: ignore[override]
        self, rng: np.random.Generator
    ) -> FittedTerms | None:
        """Fit all terms to what is known, and draw; None if that is too little."""
        points, _, values = self.evaluations.stored()
        previous = self.fitted
        drawn = previous.particles if previous.is_fitted else points
        fitted = fit_terms(points, values, drawn, previous, self.parts, self.max_points)
        if fitted is None:
            return None
        sampled = Sampled(self.parts, self.is_independent, self.target_accept, rng)
        if previous.is_fitted and not self.is_independent:
            self.fitted = moved_particles(fitted, points, sampled)
        else:
            self.fitted = first_particles(fitted, points, sampled)
        self.n_fitted = int(self.evaluations.count[0])
        self._judge()
        return self.fitted

    # what was learnt ------------------------------------------------------------------------------

    @property
    def surrogate(self) -> SumOfSurrogates:  # type: ignore[override]
        """The surrogate of the log density."""
        return self.fitted.surrogate(self.parts)

    def terms_at(self, x: np.ndarray) -> np.ndarray:
        """Return what the terms (T,) at `x` (d,) are taken for."""
        return terms_at(self.surrogate, self.parts.inputs_at(x[None]))[0]

    def normal(self):  # noqa: D102
        fitted = self.fitted
        return Standardization(fitted.location, np.diag(fitted.scales)) if self.has_learnt else None
