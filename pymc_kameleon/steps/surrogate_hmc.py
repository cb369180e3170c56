"""Hamiltonian Monte Carlo without gradients, on a surrogate learnt from all evaluations."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pymc.stats.convergence import WarningType
from pytensor.graph.basic import Variable

from pymc_kameleon.gp.mean import n_coefficients
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.life_cycle import draw_statistics, without_scaling
from pymc_kameleon.steps.chain.surrogate_sampler import (
    ADVICE_BESIDE,
    MANY_DIMENSIONS,
    MAX_POINTS,
    TARGET_ACCEPT,
    SurrogateSampler,
    check_learnable,
)
from pymc_kameleon.steps.chain.terms_sampler import TermsSampler
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.surrogate.learner import TrajectoryLearner
from pymc_kameleon.surrogate.sum_parts import sum_parts
from pymc_kameleon.surrogate.terms_learner import TermsLearner
from pymc_kameleon.validation import renamed

_log = logging.getLogger("pymc.kameleon")

TRANSITIONS_OF_TERMS = 100
"""Transitions of tuning where terms are learnt apart, after the draws that teach them first."""


@with_shared_parameters
class SurrogateHMCStep(MetropolisHastingsStep):
    r"""Hamiltonian Monte Carlo on a surrogate of the log density, with no gradient of the model.

    For likelihoods that cost a millisecond or more, have no gradient, and are smooth, in up to
    about 20 dimensions; in hundreds where the log-likelihood is a sum of black boxes, each of a few
    numbers, as in a hierarchy. A regression of the log-likelihood learns from every evaluation,
    accepted or not, and is, with the model's own prior, a surrogate s(x) of the log density.
    Trajectories run on its gradient and cost no evaluation; one true evaluation then accepts or
    rejects the end of a trajectory, which makes the draws exact. Where evaluations cost
    microseconds, `KameleonStep` is faster.

    ::

        tuning: climb towards the mode, then in turns trajectories, evaluations and new fits of s
        T = 1 + 2 / sqrt(d) in 5 to 20 % of the transitions, else 1
        x* = x after 4 to 8 moves that leave exp(s / T) invariant: Hamiltonian trajectories, and
            differences of two draws from exp(s), which cross between modes
        evaluate the log density at x*
        accept with probability min(1, p(x*) exp(s(x) / T) / (p(x) exp(s(x*) / T)))
        with a small probability: a difference of two points of the history instead

    Parameters
    ----------
    %(vars)s
    max_points : int
        Points held by the surrogate, each with a radial basis function, 1000 by default: of more
        evaluations, the most informative ones. Time of a leapfrog step and memory grow with it.
    target_accept : float
        Acceptance on the surrogate that the step size is chosen for. That of the chain is lower by
        the surrogate's error.
    gradients : bool
        Learn from gradients of the model too, for models that have them at the price of a few
        evaluations; `n_evals` counts value and gradient as one.
    %(start)s
        Some draws from the prior are evaluated first; the search begins at the best of them if the
        chain starts at the model's default. By default "optimize", and "here" of estimates.
    %(pseudo_marginal)s
        The surrogate learns from all estimates, and how noisy they are.
    steps_per_draw : int
        Transitions a draw, each of one evaluation at most.
    store : EvaluationStore, optional
        Keeps every evaluation in a file. Chains that share one learn from each other's evaluations
        while they tune, and from those of earlier runs.
    %(disperse)s
    %(warm_start)s
        Some of them, 50 + 10 d at most, are evaluated again.
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument or a discrete variable, naming it.
    NotImplementedError
        At construction, with `gradients`, if the model has none, naming the operation.

    Notes
    -----
    Sampler statistics, float64, per draw: `accept`, `accepted`, `n_evals`, `n_nonfinite`,
    `n_transitions`, as for `KameleonStep`; `step_size` and `n_leapfrog` (leapfrog steps on the
    surrogate), `n_centers` (points that it holds), `surrogate_error` (log density minus surrogate
    where the model was last evaluated; NaN if it was not), `worst_term` and `worst_term_error` (of
    a sum: number of the term that was furthest off there, and by how much), `mode` (number of the
    surrogate's mode that the draw is nearest to, the largest is 0; NaN while tuning, and of a sum),
    `evidence_ratio` (log density minus that of the normalised surrogate, of which `log_evidence`
    takes a mean; NaN while tuning, and where the evidence has no meaning), `calls_made`
    (evaluations of the chain so far, without those that a store knew).

    After tuning surrogate, mass matrix, step size and length are frozen, so the target is exactly
    invariant whatever the surrogate is; with a poor one many proposals are rejected, and a warning
    says so. A surrogate cannot learn jumps: where the log density is not smooth, take
    `KameleonStep`. A chain changes between all modes that its evaluations have come near; some
    draws from the prior are evaluated for that, but in many dimensions they need not come near all.

    References
    ----------
    .. [1] C. E. Rasmussen, "Gaussian processes to speed up hybrid Monte Carlo for expensive
       Bayesian integrals", Bayesian Statistics 7, 2003.
    .. [2] J. S. Liu, "Monte Carlo Strategies in Scientific Computing", section 9.4.3, 2001:
       surrogate transitions.

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=SurrogateHMCStep())
    """

    name = "surrogate_hmc"
    sampler: SurrogateSampler
    sampler_class = SurrogateSampler
    learns_from_store = True
    _not_arguments = ("learner", "surrogate", "adapt_after_tune")
    stats_dtypes_shapes = without_scaling(MetropolisHastingsStep) | draw_statistics(
        *("step_size", "n_leapfrog", "n_centers", "surrogate_error", "mode", "evidence_ratio"),
        "calls_made",
    )
    warm_statistic = "step_size"

    @renamed(max_centers="max_points")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        max_points: int = MAX_POINTS,
        target_accept: float = TARGET_ACCEPT,
        gradients: bool = False,
        start: str | None = None,
        store: EvaluationStore | None = None,
        steps_per_draw: int = 1,
        pseudo_marginal: bool = False,
        **options: Any,
    ) -> None:
        self.takes_gradients, is_noisy = bool(gradients), bool(pseudo_marginal)
        if is_noisy and (self.takes_gradients or store is not None):
            other = "gradients" if self.takes_gradients else "store"
            raise ValueError(
                f"pseudo_marginal=True with {other}=: an estimate has no gradient, and is another "
                "one each time. Leave it out."
            )
        self._has_store = store is not None
        if start is None:
            start = "here" if is_noisy else "optimize"
        super().__init__(
            vars,
            learner=TrajectoryLearner(
                max_points=max_points, gradients=self.takes_gradients, is_noisy=is_noisy
            ),
            target_accept=target_accept,
            steps_per_draw=steps_per_draw,
            start=start,
            store=store,
            pseudo_marginal=is_noisy or None,
            **options,
        )
        check_learnable(self.sampler, type(self).__name__, is_noisy)

    def _learner_of_target(self, learner):
        if self.takes_gradients or self.pseudo_marginal or self._has_store:
            return learner
        parts = sum_parts(self.target)
        if parts is None:
            return learner
        self.takes_terms, self.sampler_class = True, TermsSampler
        n_terms = len(parts.names)
        self.statistics_of_target = draw_statistics("worst_term", "worst_term_error")
        _log.info(
            "SurrogateHMCStep: the log-likelihood is a sum of %d terms, %s to %s, each of at most "
            "%d numbers: each has a surrogate of its own",
            n_terms,
            parts.names[0],
            parts.names[-1],
            max(map(len, parts.members)),
        )
        return TermsLearner(parts, max_points=learner.max_points)

    def transitions_to_tune(self) -> int:  # noqa: D102
        if self.takes_terms:
            return TRANSITIONS_OF_TERMS
        return min(25 * n_coefficients(self.dim), 400 + 50 * self.dim)

    def _n_learnt_from(self):
        return self.transition + self.learner.n_foreign

    def _begin_tuning(self, x, search):
        self.sampler.scales = search.scales
        searches = self.start.where == "optimize"
        searches &= self.takes_terms or self.dim <= MANY_DIMENSIONS
        is_default = np.array_equal(x, self.target.default_start, equal_nan=True)
        self.sampler.learn_first(search.looked, searches, from_anywhere=is_default)

    # what is shown --------------------------------------------------------------------------------

    def _learnt_statistics(self, n_evals):
        return super()._learnt_statistics(n_evals) | {
            "surrogate_error": self.sampler.error_of_last() if n_evals else np.nan,
            "mode": self.learner.fitted.mode_of(self.chain.position),
            "evidence_ratio": self.sampler.evidence_ratio(),
            "calls_made": float(self.report.evaluations + n_evals),
            **self._term_statistics(n_evals),
        }

    def _term_statistics(self, n_evals):
        if not self.takes_terms:
            return {}
        term, error = self.sampler.worst_of_last() if n_evals else (np.nan, np.nan)
        return {"worst_term": term, "worst_term_error": error}

    def _complaint_of_acceptance(self):
        learner = self.learner
        too_noisy = kept_estimate.too_noisy(", ".join(self.target.names), learner.fitted.noise)
        if learner.follows or too_noisy:
            return too_noisy
        others = self.sampler.moved_by_others
        if others:
            names = ", ".join(self.target.names)
            return (
                WarningType.BAD_ACCEPTANCE,
                f"The surrogate of {names} (acceptance {learner.acceptance:.3f}) does not follow "
                f"the log density, which depends on {others} too, and another step "
                "moves that: what was learnt holds at earlier values of it. Longer tuning does "
                f"not help. Give this step those variables, if they are continuous; else "
                f"{ADVICE_BESIDE}.",
            )
        return (
            WarningType.BAD_ACCEPTANCE,
            f"At the end of tuning, trajectories of {', '.join(self.target.names)} on the "
            f"surrogate (acceptance {learner.acceptance:.3f}) took the chain less far than "
            "differences of earlier points: it does not follow the log density, so those make most "
            f"of the moves. Tune longer (tune={2 * self.default_tune_steps}); if that does not "
            "help, the log density is not smooth enough: take KameleonStep.",
        )

    def proposal_covariance(self, x: ArrayLike) -> np.ndarray:
        """Raise an error: trajectories have no covariance that is known.

        Raises
        ------
        NotImplementedError
        """
        raise NotImplementedError(
            "The moves of SurrogateHMCStep are trajectories on a surrogate, whose covariance is "
            "not known in closed form."
        )

    def _progress_columns(self):
        return {"accept": ("Accept", "0.2f"), "calls_made": ("Calls", "0.0f")}
