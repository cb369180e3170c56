"""Learner of `SurrogateHMCStep`: fits of the surrogate while tuning, then everything is frozen."""

import math

import numpy as np

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.mcmc.chain import wrap_angle
from pymc_kameleon.mcmc.history import new_history
from pymc_kameleon.mcmc.loop import Mixture, differences_of, no_differences
from pymc_kameleon.surrogate.acquisition import points_to_check, points_to_explore
from pymc_kameleon.surrogate.evaluations import keep_evaluation, new_evaluations, visited_values
from pymc_kameleon.surrogate.fit_posterior import (
    FitOptions,
    FittedPosterior,
    Known,
    Past,
    fit_posterior,
    unfitted,
)
from pymc_kameleon.surrogate.posterior_surrogate import (
    NO_PRIOR,
    PosteriorSurrogate,
    log_priors,
    predicted_at,
)
from pymc_kameleon.surrogate.transition import (
    MOVES,
    UNIFORMS,
    SurrogateTransition,
    TransitionRecord,
    move_routine,
)
from pymc_kameleon.validation import checked_integer

GROWTH, LATE_GROWTH, MOST_NEW = 1.2, 1.1, 150
"""Factor between the numbers of evaluations at which the surrogate is fitted again; it is smaller
where the difference would be larger than the last."""

N_HISTORY = 1000
N_EVALUATIONS = 6000

FEW, MOST = 0.05, 0.8
"""Shares of difference moves, which need no surrogate, where trajectories take the chain further
and where they do not."""

ASSUMED = 4.0
"""Moves of each kind that count as made before there are any: trajectories to an independent point,
of which every other one is accepted, and differences with the usual size and acceptance."""

REMEMBERED = 0.5
"""Weight of moves made before the last fit, whose surrogate was worse."""

CLEARLY = 2.0
"""Standard errors by which differences must be ahead of trajectories to make most moves."""

LEAST_MADE = 10
"""Trajectories from which their acceptance is known."""

HOT_SHARE = 0.25
"""Share of hotter trajectories while tuning, so that tails are known before they matter."""

LATER_HOT_SHARE = 0.05, 0.2
"""Least and largest share afterwards, so that the chain does not rest in a tail where the surrogate
is too low: twice the share of trajectories that were rejected."""

HOPELESS = 0.05
"""Acceptance of trajectories below which the surrogate does not show where the chain will be."""

EXPLORED = 0.2
"""Share of the evaluations while tuning that go where the surrogate is uncertain."""

N_CHECKED = 4
"""Draws from the last surrogate, the most uncertain ones, that are evaluated at once."""


class TrajectoryLearner(Learner):
    """Fits the surrogate to all evaluations, at numbers of them that grow by a constant factor.

    If compiled code can call the log prior with its gradient (`prior`), the log-likelihood alone is
    learnt; otherwise the whole log density, in unconstrained coordinates.
    """

    history_capacity = N_HISTORY
    keeps_evaluations = True
    """Whether the evaluations of transitions are learnt from."""

    learns_support = False
    """Whether draws of the surrogate end at a box around the typical evaluations, and where there
    is no density, instead of that it is very low there. That is sharper, and nothing for a chain,
    which has to find the way back."""

    state_names = (
        "scales",
        "history",
        "evaluations",
        "fitted",
        "outcome",
        "last",
        "difference_share",
        "acceptance",
        "n_fitted",
        "n_foreign",
        "next_update",
        "last_update",
        "log_normaliser",
    )

    def __init__(self, *, max_points: int, gradients: bool = False, is_noisy: bool = False):
        self.max_points = checked_integer("max_points", max_points, 1)
        self.gradients, self.is_noisy = gradients, is_noisy
        self.options = {"max_points": self.max_points, "gradients": gradients}

    def _begin(self, position, rng, warm):
        dim = self.dim
        self.history = new_history(N_HISTORY, dim)
        self.prior = None
        self.evaluations, self.fitted = self._nothing_known()
        self.fitted.integrator.hot_share[0] = HOT_SHARE
        self.outcome, self.last = np.zeros((2, 4)), position.copy()
        self.n_more_normals, self.n_more_uniforms = (MOVES - 1) * dim, MOVES * UNIFORMS
        self.difference_share = 0.5
        self.acceptance = math.nan
        self.next_update = 5 * (dim + 2)
        self.n_fitted, self.log_normaliser = 0, math.nan
        self.n_foreign, self.last_update = 0, np.zeros(2, dtype=np.int64)
        self._no_differences = no_differences(dim)

    def _nothing_known(self):
        """Return what stands for evaluations, and for a fit, before there are any."""
        return new_evaluations(N_EVALUATIONS, self.dim, self.gradients), unfitted(self.dim)

    # what transitions take ------------------------------------------------------------------------

    def proposal(self, compiled):  # noqa: D102
        surrogate, fitted = self.surrogate, self.fitted
        factor = fitted.standardization.factor
        scales = np.sqrt((factor * factor).sum(axis=1))
        return SurrogateTransition(
            surrogate,
            fitted.integrator,
            fitted.population,
            move_routine(surrogate, fitted.integrator),
            TransitionRecord(
                self.history,
                self.evaluations,
                self.outcome,
                scales,
                self.last,
                self.keeps_evaluations,
            ),
        )

    def mixture(self, tune):  # noqa: D102
        if not self.has_learnt:
            return Mixture(self.scales, self._no_differences, 1.0, 0.0)
        fitted = self.fitted
        differences = differences_of(fitted.differences, fitted.standardization.factor)
        return Mixture(self.scales, differences, 0.0, self.difference_share)

    # learning -------------------------------------------------------------------------------------

    def keep(self, point: np.ndarray, terms: np.ndarray, is_foreign: bool = False) -> None:
        """Learn from an evaluation that was not a transition's, of which `terms` has the terms.

        One that `is_foreign` was made by another chain.
        """
        keep_evaluation(self.evaluations, point, terms)
        self.n_foreign += is_foreign

    def is_foreseeable(self, tune, adapts):  # noqa: D102
        return not tune or (self.has_learnt and self.n_own < self.next_update)

    def expected_at(self, x):  # noqa: D102
        return predicted_at(self.surrogate, x, np.inf) if self.has_learnt else -np.inf

    def keep_within(self, bounds: np.ndarray) -> None:
        """Move angles of what is known into their bounds (2, d), which others do not have."""
        is_angle = np.isfinite(bounds[0])
        if is_angle.any():
            for points in (self.evaluations.points, self.history.points, self.last[None]):
                points[:, is_angle] = wrap_angle(points[:, is_angle], bounds[0, is_angle])

    @property
    def n_own(self) -> int:
        """Evaluations of this chain so far."""
        return int(self.evaluations.count[0]) - self.n_foreign

    def known(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points (n, d) that were evaluated, log densities (n,), and the part not learnt (n,)."""
        points, learnt, _ = self.evaluations.stored()
        not_learnt, _ = log_priors(self.log_prior, points)
        values = learnt + not_learnt
        return points, np.where(np.isfinite(values), values, -np.inf), not_learnt

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        return min(n, max(0, self.next_update - self.n_own))

    def update(self, position, tune, rng):  # noqa: D102
        fitted, n_new, points = self.fit(rng), self.n_before_next_fit(), ()
        self.last_update[:] = self.n_own, self.n_foreign
        if fitted is not None:
            points = self._explored(fitted, n_new)
            self.outcome *= REMEMBERED
        self.next_update = self.n_own + n_new
        return points

    def _explored(self, fitted, n_new):
        """Return points to evaluate after a fit, of `n_new` until the next, and go on without it.

        Only these take what the fit drew, and how uncertain it is.
        """
        points = points_to_explore(fitted, self.surrogate, round(EXPLORED * n_new))
        self.fitted = fitted.without_uncertainty()
        return points

    def n_before_next_fit(self) -> int:
        """Count the evaluations of this chain from one fit to the next."""
        count = int(self.evaluations.count[0])
        most = max(MOST_NEW, math.ceil((LATE_GROWTH - 1.0) * count))
        n_new = min(max(5, math.ceil((GROWTH - 1.0) * count)), most)
        # Of which other chains make as large a part as they made lately.
        own, foreign = np.array([self.n_own, self.n_foreign]) - self.last_update
        return max(5, round(n_new * own / (own + foreign))) if foreign else n_new

    def end_tuning(self, position, rng):  # noqa: D102
        self._judge()
        points, fitted = (), None
        enough = self.n_fitted + 1 if self.has_learnt else 2 * (self.dim + 1)
        if self.evaluations.count[0] > enough:
            fitted = self.fit(rng)
        if fitted is not None:
            points = points_to_check(fitted, self.surrogate, N_CHECKED)
        if self.has_learnt:
            self.fitted = self.fitted.without_uncertainty().with_modes(self.log_prior)
        self._choose_hot_share()
        return points

    def _choose_hot_share(self):
        refused = 1.0 if math.isnan(self.acceptance) else 1.0 - self.acceptance
        self.fitted.integrator.hot_share[0] = np.clip(2.0 * refused, *LATER_HOT_SHARE)

    def fit(self, rng: np.random.Generator) -> FittedPosterior | None:
        """Fit the surrogate to what is known; None, and nothing has changed, if that is too little.

        Only until the next update the learner keeps what the fit drew, and how uncertain it is.
        """
        known = self._known_with_gradients()
        found = fit_posterior(
            known,
            self._past(known),
            self.fitted,
            FitOptions(self.max_points, self.is_noisy, self.learns_support, self.target_accept),
            self.log_prior,
            rng,
        )
        if found is not None:
            self.fitted, self.n_fitted = found, int(self.evaluations.count[0])
            self._judge()
        return found

    def _known_with_gradients(self):
        known = Known(*self.known())
        if not self.gradients:
            return known
        points, _, learnt = self.evaluations.stored()
        gradients = learnt + log_priors(self.log_prior, points)[1]
        return known._replace(gradients=gradients, learnt_gradients=learnt)

    def _past(self, known):
        later = self.history.later_half()
        has_moved = len(np.unique(later, axis=0)) > 4 * self.dim
        return Past(
            later if has_moved else later[:0],
            np.exp(self.scales.log_scale),
            visited_values(self.history, known.points, known.values),
        )

    def _judge(self):
        """Let trajectories be most moves, unless differences clearly took the chain further."""
        made, accepted, distance, squares = self.outcome.T
        if made[0] >= LEAST_MADE:
            self.acceptance = accepted[0] / made[0]
        assumed, n = np.array([self.dim, 1.0]), made + ASSUMED
        means = (distance + ASSUMED * assumed) / n
        variances = (squares + ASSUMED * 2.0 * assumed**2) / n - means**2
        is_clear = means[1] - means[0] > CLEARLY * np.sqrt(np.sum(variances / n))
        self.difference_share = MOST if is_clear else FEW

    # what was learnt ------------------------------------------------------------------------------

    @property
    def log_prior(self) -> np.ndarray:
        """What compiled code calls for the log prior; `NO_PRIOR` where that is learnt too."""
        return NO_PRIOR if self.prior is None else self.prior.compiled()

    @property
    def surrogate(self) -> PosteriorSurrogate:
        """The surrogate of the log density."""
        return self.fitted.surrogate(self.log_prior)

    @property
    def has_learnt(self):  # noqa: D102
        return self.fitted.is_fitted

    @property
    def follows(self) -> bool:
        """Whether trajectories take the chain further than differences, as far as is known."""
        return self.difference_share < MOST and not self.acceptance < HOPELESS

    def normal(self):  # noqa: D102
        return self.fitted.standardization if self.has_learnt else None

    def statistics(self):  # noqa: D102
        integrator = self.fitted.integrator
        n_leapfrog = float(integrator.n_steps[0])
        integrator.n_steps[0] = 0.0
        return {
            "step_size": float(integrator.step_size[0]),
            "n_leapfrog": n_leapfrog,
            "n_centers": float(self.fitted.n_centres),
        }
