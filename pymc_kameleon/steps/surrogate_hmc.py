"""Hamiltonian Monte Carlo without gradients, on a surrogate learnt from all evaluations."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pymc.stats.convergence import WarningType
from pytensor.graph.basic import Variable

from pymc_kameleon._threads import one_thread
from pymc_kameleon.evidence.estimates import Estimate
from pymc_kameleon.evidence.normaliser import N_DRAWN, log_normaliser
from pymc_kameleon.gp.mean import n_coefficients
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.history import thinned
from pymc_kameleon.model.initial_points import seed_from
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.life_cycle import draw_statistics, without_scaling
from pymc_kameleon.steps.chain.start import are_enough, least_typical, point_near_mode, search_from
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.surrogate.learner import N_EVALUATIONS, TrajectoryLearner
from pymc_kameleon.surrogate.posterior import predicted_at
from pymc_kameleon.validation import renamed

_log = logging.getLogger("pymc.kameleon")

MOST_CHECKS, GROSS = 5, 5.0
"""Surrogates that are checked at the end of tuning, and the error at their own draws that asks for
one more fit."""

ADVICE_BESIDE = (
    "sum or integrate them out of the likelihood (marginalise), or take KameleonStep, which learns "
    "no log density"
)
"""What to do where other steps move what the likelihood depends on."""

NO_ESTIMATE = Estimate(float("nan"), float("nan"), 0.0)

MANY_DIMENSIONS = 30
"""Dimensions from which a surrogate takes more evaluations than it saves."""


def _prior_with_gradient(target) -> ModelFunction | None:
    """Log prior with its gradient for compiled code; None where it has to be learnt."""
    if not target.has_likelihood:
        return None
    try:
        prior = target.prior_with_gradient
    except NotImplementedError:
        return None
    return None if prior.compiled() is None else prior


@with_shared_parameters
class SurrogateHMCStep(MetropolisHastingsStep):
    r"""Hamiltonian Monte Carlo on a surrogate of the log density, with no gradient of the model.

    For likelihoods that cost a millisecond or more, have no gradient, and are smooth, in up to
    about 20 dimensions. A regression of the log-likelihood learns from every evaluation, accepted
    or not, and is, with the model's own prior, a surrogate s(x) of the log density. Trajectories
    run on its gradient and cost no evaluation; one true evaluation then accepts or rejects the end
    of a trajectory, which makes the draws exact. Where evaluations cost microseconds,
    `KameleonStep` is faster.

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
    where the model was last evaluated; NaN if it was not), `mode` (number of the surrogate's mode
    that the draw is nearest to, the largest is 0; NaN while tuning), `evidence_ratio` (log density
    minus that of the normalised surrogate, of which `log_evidence` takes a mean; NaN while tuning,
    and where the evidence has no meaning), `calls_made` (evaluations of the chain so far, without
    those that a store knew).

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
    learns_from_store = True
    called = "SurrogateHMCStep"
    """What messages call it."""
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
        max_points: int = 1000,
        target_accept: float = 0.9,
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
        if self.target.estimated_terms and not is_noisy:
            raise ValueError(
                f"The likelihood term {', '.join(self.target.estimated_terms)} is an estimate. "
                f"Write {self.called}(pseudo_marginal=True): the surrogate then learns with its "
                "noise."
            )
        if self.dim > MANY_DIMENSIONS:
            _log.warning(
                "%s in %d dimensions: a surrogate takes more evaluations there than it saves. Take "
                "KameleonStep, or NUTS where there is a gradient.",
                self.called,
                self.dim,
            )
        if self.takes_gradients:
            _ = self.target.with_gradients  # raises an error where there is none
        self.known_prior = _prior_with_gradient(self.target)
        others = self.target.others_in_likelihood
        if self.known_prior is None:
            others = [variable.name for variable in self.target.shared]
        self.moved_by_others = ", ".join(others)
        if others:
            _log.warning(
                "What the surrogate of %s learns depends on %s too, which another step moves: it "
                "cannot follow it. Give this step those variables, if they are continuous; else "
                "%s.",
                ", ".join(self.target.names),
                self.moved_by_others,
                ADVICE_BESIDE,
            )

    @property
    def _searches(self):
        return self.start == "optimize" and self.dim <= MANY_DIMENSIONS and self.warm is None

    @property
    def _n_prior_points(self):
        return min(30, 6 + 100 // self.dim**2)

    def _transitions_to_tune(self):
        return min(25 * n_coefficients(self.dim), 400 + 50 * self.dim)

    def _n_learnt_from(self):
        return self.transition + self.learner.n_foreign

    # the start ------------------------------------------------------------------------------------

    def _begin_tuning(self, x):
        learner = self.learner
        for point, value in self.looked:
            learner.keep(point, value)
        self._read_store()
        learner.last_update[:] = learner.n_own, learner.n_foreign
        if self._searches:
            is_taught = self._is_taught_by(learner.known()[1])
            if not is_taught:
                default = self.target.default_start
                self._search(from_anywhere=np.array_equal(x, default, equal_nan=True))
            self._begin_near_mode()
            learner.next_update = learner.n_own + (learner.n_before_next_fit() if is_taught else 5)

    def _evaluate_as_proposal(self, x):
        value = super()._evaluate_as_proposal(x)
        if self.learner is not None:
            self.learner.keep(x, self.chain.proposed_value)
        return value

    def _announce(self, points):
        """Evaluate black boxes at these points at once, where that can be done."""
        if self.ahead is not None:
            self.ahead.announce(points)

    def _evaluate_all(self, points):
        self._announce(points)
        return np.array([self._evaluate_as_proposal(point) for point in points])

    def _explore(self):
        self._evaluate_all(self.learner.acquisition_points)
        self._read_store()

    def _end_learning(self, position):
        """Fit for the last time, and again while the surrogate is far too large at its own draws.

        It can be so where nothing was evaluated, and later transitions would propose such points in
        vain.
        """
        for _ in range(MOST_CHECKS):
            self._keep_to_one_period()
            super()._end_learning(position)
            surrogate, points = self.learner.surrogate, self.learner.acquisition_points
            found = self._evaluate_all(points)
            errors = found - [predicted_at(surrogate, point, np.inf) for point in points]
            if min(errors, default=0.0) > -GROSS - 3.0 * self.learner.gp.noise[0]:
                break
        else:
            super()._end_learning(position)
        if self.learner.has_learnt:
            random_state = self.rng.bit_generator.state
            self.learner.log_normaliser = self.normaliser().log_evidence
            self.rng.bit_generator.state = random_state  # draws do not depend on it

    @property
    def _is_foreseeable(self):
        learner = self.learner
        return not self.tune or (learner.has_learnt and learner.n_own < learner.next_update)

    def _guess(self, x, value):
        value[:] = 0.0
        learner = self.learner
        value[0] = predicted_at(learner.surrogate, x, np.inf) if learner.has_learnt else -np.inf

    def _keep_to_one_period(self):
        super()._keep_to_one_period()
        if self.tune:
            self.learner.keep_within(self.chain.bounds)

    def _read_store(self):
        """Learn what other chains and runs have stored since the last time."""
        if self.stored is None:
            return
        known = {point.tobytes() for point in self.learner.evaluations.stored()[0]}
        found = self.stored.from_others(N_EVALUATIONS)
        for point, terms in zip(found.points, found.values, strict=True):
            if point.tobytes() not in known:
                self.learner.keep_foreign(point, terms)

    def _is_taught_by(self, values):
        """Whether these log densities (n,), some of them others', make a search needless."""
        return self.learner.n_foreign > 0 and are_enough(values, self.dim)

    def _missing(self, best):
        """Log density that a search lacks whose largest is `best` to be where others have taught.

        NaN as long as they have not taught enough.
        """
        self._read_store()
        values = self.learner.known()[1]
        return least_typical(values, self.dim) - best if self._is_taught_by(values) else np.nan

    def _search(self, from_anywhere):
        """Search for a mode, from the best point if `from_anywhere`, else where the chain is."""
        points = self._points_to_search_from()
        self._search_from(points[0] if from_anywhere else self.chain.position)

    def _points_to_search_from(self):
        """Evaluate some draws from the prior, so that the surrogate sees other modes.

        Returns these points after the best one of all that is known, the higher ones first.
        """
        drawn = self.target.prior_draws(self._n_prior_points, seed_from(self.rng))
        values = self._evaluate_all(drawn)
        self._read_store()
        points, known, _ = self.learner.known()
        best, others = points[np.argmax(known)], drawn[np.argsort(-values)]
        return [best, *(point for point in others if not np.array_equal(point, best))]

    def _search_from(self, begin):
        if not self.takes_gradients:  # where every search without them begins
            steps = self.scales * np.vstack([np.eye(self.dim), -np.eye(self.dim)])
            self._announce([begin, *(begin + steps)])
        missing = None if self.stored is None else self._missing
        search_from(
            begin, self.scales, self._evaluate_as_proposal, self._gradient_of_proposal, missing
        )
        self._read_store()

    def _fit(self):
        """Fit the surrogate to all that is known, if that can be done."""
        return self.learner.fit(self.rng)

    def _begin_near_mode(self):
        """Move the chain to a random point around the mode of what is known."""
        learner = self.learner
        self._fit()
        gaussian, (points, values, _) = learner.standardization, learner.known()
        point_near_mode(gaussian, points, values, self._evaluate_as_proposal, self.rng)
        self._move_to_proposal()

    def _new_learner(self, position, warm):
        learner = super()._new_learner(position, warm)
        learner.prior = self.known_prior
        if self.known_prior is not None:
            learner.is_bounded[:] = self.target.has_two_bounds()
        learner.evaluations.first_term[0] = self.known_prior is not None
        if warm is not None:
            self.learner = learner
            learner.history.begin_with(warm.points)
            self._evaluate_all(thinned(warm.points, 50 + 10 * self.dim, self.rng))
            self._fit()
        return learner

    # the surrogate as a density ------------------------------------------------------------------

    def is_allowed(self, v: np.ndarray) -> np.ndarray:
        """Whether the rows of `v` (n, d), in coordinates of moves, are in the surrogate's domain.

        That is the ball of its trajectories, and one period of each angle.
        """
        inside = np.sum(v**2, axis=1) <= self.learner.integrator.radius[0] ** 2
        angles = self.target.is_circular
        if angles.any():
            points = self.learner.surrogate.to_points(v.T)[:, angles]
            low, high = self.chain.bounds[:, angles]
            inside &= np.all((points >= low) & (points <= high), axis=1)
        return inside

    def draw_surrogate(self, n: int) -> np.ndarray:
        """Draw from the surrogate: (n, d), in coordinates of moves, in random order."""
        return self._allowed(self.learner.draw(n, self.rng), n)

    def _allowed(self, drawn, n):
        drawn = drawn[self.is_allowed(drawn)]
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
            drawn = self._allowed(self.learner.draw_on(N_DRAWN, self.rng), N_DRAWN)
        return log_normaliser(self.learner.surrogate, drawn, self.is_allowed, self.rng)

    # what is shown --------------------------------------------------------------------------------

    def _learnt_statistics(self, n_evals):
        chain, surrogate, error = self.chain, self.learner.surrogate, np.nan
        if n_evals and self.learner.has_learnt:
            expected = predicted_at(surrogate, chain.proposal, np.inf)
            if expected > -np.inf:
                error = chain.proposed_value[:N_TERMS].sum() - expected
        return super()._learnt_statistics(n_evals) | {
            "surrogate_error": error,
            "mode": self.learner.mode_of(chain.position),
            "evidence_ratio": self._evidence_ratio(surrogate),
            "calls_made": float(self.report.evaluations + n_evals),
        }

    def _evidence_ratio(self, surrogate):
        """Log density minus that of the normalised surrogate, where the chain is."""
        learner, chain = self.learner, self.chain
        if self.tune or np.isnan(learner.log_normaliser):
            return np.nan
        expected = predicted_at(surrogate, chain.position, learner.integrator.radius[0])
        return chain.value[:N_TERMS].sum() - expected + learner.log_normaliser

    def _complaint_of_acceptance(self):
        learner = self.learner
        too_noisy = kept_estimate.too_noisy(", ".join(self.target.names), learner.gp.noise[0])
        if learner.follows or too_noisy:
            return too_noisy
        if self.moved_by_others:
            names = ", ".join(self.target.names)
            return (
                WarningType.BAD_ACCEPTANCE,
                f"The surrogate of {names} (acceptance {learner.acceptance:.3f}) does not follow "
                f"the log density, which depends on {self.moved_by_others} too, and another step "
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
