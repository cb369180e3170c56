"""Learner of `SurrogateHMCStep`: fits of the surrogate while tuning, then everything is frozen."""

import math

import numpy as np
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.gp.sparse_gp import (
    RATIONAL,
    Uncertainty,
    new_sparse_gp,
    posterior_covariance,
)
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, fit_sparse_gp, typical_map
from pymc_kameleon.gp.typical_set import around_the_mode, typical_set
from pymc_kameleon.mcmc.chain import turned
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.mcmc.history import new_history, thinned
from pymc_kameleon.mcmc.loop import Mixture, differences_of, no_differences
from pymc_kameleon.surrogate.evaluations import keep_evaluation, new_evaluations
from pymc_kameleon.surrogate.posterior import (
    NO_PRIOR,
    PosteriorSurrogate,
    Support,
    everywhere,
    find_modes,
    log_priors,
    natural_slopes,
    natural_where,
    nearest_mode,
    new_surrogate,
    surrogate_values,
)
from pymc_kameleon.surrogate.trajectory import new_integrator
from pymc_kameleon.surrogate.transition import (
    MOVES,
    UNIFORMS,
    SurrogateTransition,
    TransitionRecord,
    anneal,
    move_routine,
    moved,
)
from pymc_kameleon.validation import checked_integer

GROWTH, LATE_GROWTH, MOST_NEW = 1.2, 1.1, 150
"""Factor between the numbers of evaluations at which the surrogate is fitted again; it is smaller
where the difference would be larger than the last."""

N_HISTORY = 1000
N_EVALUATIONS = 6000
N_TYPICAL, N_BEST = 200, 4
"""Draws from the surrogate for difference moves, and how many of them the evaluations with the
largest log densities replace: a mode can be there that the chain has not come to."""

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

BALL = 1.3
"""Trajectories stay within this times the distance of the furthest evaluation that was not very
low."""

WIDTHS = 3.0
"""Standard deviations, beyond the root of the dimension, that a ball which ends the draws has as
radius at least, and beyond one each side of a box: a Gaussian has 1e-4 of its mass outside."""

EXPLORED = 0.2
"""Share of the evaluations while tuning that go where the surrogate is uncertain."""

N_CHECKED = 4
"""Draws from the last surrogate, the most uncertain ones, that are evaluated at once."""

N_CANDIDATES = 100
"""Points of each temperature among which those are chosen."""

WORTH, SURE = 2.5, 0.3
"""A point is worth its standard deviation times the surrogate's density at so high a temperature;
below so large a standard deviation there is nothing to learn."""


class TrajectoryLearner(Learner):
    """Fits the surrogate to all evaluations, at numbers of them that grow by a constant factor.

    A `prior` with its gradient is not learnt; without one no coordinate `is_bounded`, and taken by
    its natural value.
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
        "standardization",
        "triangular_map",
        "gp",
        "integrator",
        "outcome",
        "last",
        "differences",
        "population",
        "modes",
        "difference_share",
        "acceptance",
        "n_fitted",
        "n_foreign",
        "next_update",
        "last_update",
        "log_normaliser",
    )
    varying = {"differences": 1, "population": 1, "modes": 0}

    def __init__(self, *, max_points: int, gradients: bool = False, is_noisy: bool = False):
        self.max_points = checked_integer("max_points", max_points, 1)
        self.gradients, self.is_noisy = gradients, is_noisy
        self.options = {"max_points": self.max_points, "gradients": gradients}

    def _begin(self, position, rng, warm):
        dim = self.dim
        self.history = new_history(N_HISTORY, dim)
        self.evaluations = new_evaluations(N_EVALUATIONS, dim, self.gradients)
        self.gp = new_sparse_gp(RATIONAL, dim)
        self.standardization = self.gp.standardization
        self.triangular_map = self.gp.triangular_map
        self.is_bounded = np.zeros(dim, dtype=np.bool_)
        self.prior, self.support = None, everywhere(dim)
        self.integrator = new_integrator(dim)
        self.integrator.hot_share[0] = HOT_SHARE
        self.outcome, self.last = np.zeros((2, 4)), position.copy()
        self.population, self.modes = np.zeros((dim, 0)), np.zeros(0, dtype=np.int64)
        self.differences = np.zeros((dim, 0))
        self.n_more_normals, self.n_more_uniforms = (MOVES - 1) * dim, MOVES * UNIFORMS
        self.difference_share = 0.5
        self.acceptance = math.nan
        self.next_update = 5 * (dim + 2)
        self.n_fitted, self.log_normaliser = 0, math.nan
        self.n_foreign, self.last_update = 0, np.zeros(2, dtype=np.int64)
        self.acquisition_points, self.usual_height = (), math.inf
        self._no_differences = no_differences(dim)

    @property
    def is_consistent(self):  # noqa: D102
        return self.population.shape[1] == len(self.modes)

    # what transitions take ------------------------------------------------------------------------

    def proposal(self, compiled):  # noqa: D102
        surrogate, integrator = self.surrogate, self.integrator
        move = move_routine(surrogate, integrator)
        return SurrogateTransition(surrogate, integrator, self.population, move, self.record)

    @property
    def record(self) -> TransitionRecord:
        """What remembers each transition."""
        factor = self.standardization.factor
        scales = np.sqrt((factor * factor).sum(axis=1))
        return TransitionRecord(
            self.history, self.evaluations, self.outcome, scales, self.last, self.keeps_evaluations
        )

    def mixture(self, tune):  # noqa: D102
        if not self.has_learnt:
            return Mixture(self.scales, self._no_differences, 1.0, 0.0)
        differences = differences_of(self.differences, self.standardization.factor)
        return Mixture(self.scales, differences, 0.0, self.difference_share)

    # learning -------------------------------------------------------------------------------------

    def keep(self, point: np.ndarray, terms: np.ndarray) -> None:
        """Learn from an evaluation that was not a transition's, of which `terms` has the terms."""
        keep_evaluation(self.evaluations, point, terms)

    def keep_foreign(self, point: np.ndarray, terms: np.ndarray) -> None:
        """Learn from an evaluation of another chain."""
        self.keep(point, terms)
        self.n_foreign += 1

    def keep_within(self, bounds: np.ndarray) -> None:
        """Move angles of what is known into their bounds (2, d), which others do not have."""
        is_angle = np.isfinite(bounds[0])
        if is_angle.any():
            for points in (self.evaluations.points, self.history.points, self.last[None]):
                points[:, is_angle] = turned(points[:, is_angle], bounds[0, is_angle])

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

    def _gradients(self):
        """Gradients (n, d) of the log density, and of what is learnt; None if not evaluated."""
        if not self.gradients:
            return None, None
        points, _, learnt = self.evaluations.stored()
        return learnt + log_priors(self.log_prior, points)[1], learnt

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        return min(n, max(0, self.next_update - self.n_own))

    def update(self, position, tune, rng):  # noqa: D102
        fitted, self.acquisition_points = self.fit(rng), ()
        n_new = self.n_before_next_fit()
        self.last_update[:] = self.n_own, self.n_foreign
        if fitted is not None:
            self.acquisition_points = self.points_to_explore(fitted, round(EXPLORED * n_new))
            self.outcome *= REMEMBERED
        self.next_update = self.n_own + n_new

    def n_before_next_fit(self) -> int:
        """Count the evaluations of this chain from one fit to the next."""
        count = int(self.evaluations.count[0])
        most = max(MOST_NEW, math.ceil((LATE_GROWTH - 1.0) * count))
        n_new = min(max(5, math.ceil((GROWTH - 1.0) * count)), most)
        # Of which other chains make as large a part as they made lately.
        own, foreign = np.array([self.n_own, self.n_foreign]) - self.last_update
        return max(5, round(n_new * own / (own + foreign))) if foreign else n_new

    def points_to_explore(self, fitted: tuple[Uncertainty, list[np.ndarray]], n: int) -> np.ndarray:
        """Raw points, at most `n` of the draws at all temperatures, to be evaluated after a fit."""
        uncertainty, annealed = fitted
        drawn = np.concatenate([part[:N_CANDIDATES] for part in annealed])
        return self._uncertain_points(uncertainty, drawn, n)

    def _uncertain_points(self, uncertainty, drawn, n):
        """Raw points, at most `n` of those `drawn` (m, d), where the surrogate is uncertain.

        They are picked one by one, each as if the ones before were known; typical ones come first.
        """
        values = surrogate_values(self.surrogate, drawn)
        values = np.minimum(values, self.usual_height)
        points = self.surrogate.to_points(drawn.T)
        covariance = self.covariance_at(points, uncertainty)
        variance = np.diagonal(covariance).copy()
        chosen = []
        for _ in range(n):
            spread = np.sqrt(np.maximum(variance, 1e-300))
            score = np.where(spread > SURE, np.log(spread) + values / WORTH, -np.inf)
            best = int(np.argmax(score))
            if score[best] == -np.inf:
                break
            chosen.append(best)
            column = covariance[:, best] / math.sqrt(covariance[best, best])
            covariance = covariance - np.outer(column, column)
            variance = np.diagonal(covariance).copy()
            variance[best] = 0.0
        return points[chosen]

    def end_tuning(self, position, rng):  # noqa: D102
        self._judge()
        self.acquisition_points = ()
        enough = self.n_fitted + 1 if self.has_learnt else 2 * (self.dim + 1)
        if self.evaluations.count[0] > enough:
            fitted = self.fit(rng)
            if fitted is not None:
                uncertainty, annealed = fitted
                points = self._uncertain_points(uncertainty, annealed[-1], N_CHECKED)
                self.acquisition_points = points
        if self.has_learnt:
            self.modes = find_modes(self.surrogate, self.population)
        refused = 1.0 if math.isnan(self.acceptance) else 1.0 - self.acceptance
        self.integrator.hot_share[0] = np.clip(2.0 * refused, *LATER_HOT_SHARE)

    @one_thread()
    def fit(self, rng: np.random.Generator) -> tuple[Uncertainty, list[np.ndarray]] | None:
        """Fit surrogate, integrator and difference moves to what is known.

        Returns the uncertainty of the surrogate, and what `anneal` drew from it; None, and nothing
        has changed, if there was no fit.
        """
        points, values, not_learnt = self.known()
        has_density, evaluated = np.isfinite(values), points
        if not np.any(has_density):
            return None
        gradients, learnt = self._gradients()
        if self.learns_support:
            points, values, not_learnt = (x[has_density] for x in (points, values, not_learnt))
            if self.gradients:
                gradients, learnt = gradients[has_density], learnt[has_density]
        coordinates = self._coordinates(points, values, gradients, self._past())
        usual = self._usual_points(coordinates, rng)
        visited = self.visited_values(points, values)
        typical = typical_set(values, self.dim, visited)
        usual_height = np.median(visited) if len(visited) else np.inf
        high = typical.depths(values) < 2.0 * typical.depth
        try:
            gp, uncertainty = self._regress(
                points, values, not_learnt, gradients, learnt, coordinates, typical
            )
            triangular_map = self._map_of_moves(points, values, coordinates, gp, typical)
            surrogate = self._surrogate_of(coordinates, triangular_map, gp, everywhere(self.dim))
            known = surrogate.to_moves(points)
            radius = BALL * math.sqrt(np.max(np.sum(known[:, high] ** 2, axis=0)))
            if self.learns_support:
                radius = max(radius, math.sqrt(self.dim) + WIDTHS)
                is_typical = typical.depths(values) < typical.depth
                support = self._support(surrogate, evaluated, has_density, known[:, is_typical])
                surrogate = surrogate._replace(support=support)
            annealed, integrator = anneal(
                surrogate,
                self.integrator._replace(radius=np.array([radius])),
                np.ascontiguousarray(known.T),
                N_TYPICAL,
                self.target_accept,
                rng,
                usual_height,
            )
        except (TooFewValues, linalg.LinAlgError):  # try again when there are more points
            return None
        integrator.n_steps[0] = 0.0
        self.n_fitted = int(self.evaluations.count[0])
        best = np.argsort(values)[-min(N_BEST, int(np.isfinite(values).sum())) :]
        self.population = np.ascontiguousarray(annealed[-1].T)
        self.population[:, : len(best)] = known[:, best]
        self.modes = np.full(N_TYPICAL, -1)
        self.standardization, self.triangular_map, self.gp = coordinates, triangular_map, gp
        self.support = surrogate.support
        self.integrator, self.differences = integrator, usual
        self.usual_height = usual_height
        self._judge()
        return uncertainty, annealed

    def _support(self, surrogate, evaluated, has_density, typical):
        """Find where draws end, from the points (n, d) that were evaluated and v (d, k)."""
        extent = np.maximum(BALL * np.max(np.abs(typical), axis=1), 1.0 + WIDTHS)
        if np.all(has_density):
            return everywhere(self.dim)._replace(extent=extent)
        points = np.ascontiguousarray(surrogate.to_moves(evaluated).T)
        return Support(points, has_density, extent)

    def _regress(self, points, values, not_learnt, gradients, learnt, coordinates, typical):
        if np.any(self.is_bounded):
            if self.gradients:
                scales = natural_slopes(self.is_bounded, points)
                gradients, learnt = gradients / scales, learnt / scales
            points, past = (natural_where(self.is_bounded, x) for x in (points, self._past()))
            coordinates = self._coordinates(points, values, gradients, past)
        previous = self.gp.hyperparameters if self.has_learnt else None
        noise = (self.gp.noise[0] or 1.0) if self.is_noisy else None
        return fit_sparse_gp(
            points,
            values,
            coordinates,
            self.max_points,
            previous,
            not_learnt,
            learnt,
            typical,
            noise_start=noise,
        )

    def _map_of_moves(self, points, values, coordinates, gp, typical):
        """Straighten the coordinates of moves, if those of the process are."""
        found = gp.triangular_map
        if np.any(self.is_bounded) and found.mapped.size > 0:  # they are not the process's
            return typical_map(coordinates.whiten(points), values, typical)
        return found

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

    def _past(self):
        """Later half of the history, if the chain has moved enough in it; else nothing."""
        later = self.history.later_half()
        return later if len(np.unique(later, axis=0)) > 4 * self.dim else later[:0]

    def _coordinates(self, points, values, gradients, past):
        """Standardise by the chain's past, or by the evaluations near the largest value."""
        if len(past):
            return standardization(past, np.exp(self.scales.log_scale))
        return around_the_mode(points, values, gradients)

    def _usual_points(self, coordinates, rng):
        """Standardised points (d, n) where the chain is, or will be if the density is Gaussian."""
        past = self._past()
        if len(past):
            return coordinates.whiten(thinned(past, N_TYPICAL, rng))
        return rng.standard_normal((self.dim, N_TYPICAL))

    # what was learnt ------------------------------------------------------------------------------

    @property
    def log_prior(self) -> np.ndarray:
        """What compiled code calls for the log prior; `NO_PRIOR` where that is learnt too."""
        return NO_PRIOR if self.prior is None else self.prior.compiled()

    @property
    def surrogate(self) -> PosteriorSurrogate:
        """The surrogate of the log density."""
        return self._surrogate_of(self.standardization, self.triangular_map, self.gp, self.support)

    def _surrogate_of(self, coordinates, triangular_map, gp, support):
        mean = gp.mean_function()
        return new_surrogate(
            coordinates, triangular_map, mean, self.is_bounded, self.log_prior, support
        )

    @property
    def has_learnt(self):  # noqa: D102
        return self.differences.shape[1] > 0

    def covariance_at(self, points: np.ndarray, uncertainty: Uncertainty) -> np.ndarray:
        """Covariance (n, n) of the log densities at the rows of `points` (n, d), raw, of a fit."""
        own = self.gp.standardization.whiten(natural_where(self.is_bounded, points))
        return posterior_covariance(self.gp, uncertainty, own)

    @one_thread()
    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw from the surrogate, nearly independently: (n, d) in coordinates of moves."""
        surrogate, (points, _, _) = self.surrogate, self.known()
        starts = np.ascontiguousarray(surrogate.to_moves(points).T)
        height = self.usual_height
        annealed, _ = anneal(surrogate, self.integrator, starts, n, self.target_accept, rng, height)
        return annealed[-1]

    @one_thread()
    def draw_on(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw likewise, from where the last fit ended: at a fifth of the price."""
        surrogate, found = self.surrogate, []
        particles = np.ascontiguousarray(self.population[:, N_BEST:].T)
        for _ in range(math.ceil(n / len(particles))):
            particles = moved(surrogate, self.integrator, particles, rng)
            found.append(particles)
        return np.concatenate(found)

    def visited_values(self, points: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Log densities where the chain was lately, of those among `values` (n,) at `points`."""
        known = {point.tobytes(): value for point, value in zip(points, values, strict=True)}
        keys = [position.tobytes() for position in self.history.later_half()]
        return np.array([known[key] for key in keys if np.isfinite(known.get(key, np.nan))])

    def mode_of(self, position: np.ndarray) -> float:
        """Return the number of the mode that `position` (d,) is nearest to; NaN while tuning."""
        last = self.modes.max(initial=-1)
        if last <= 0:
            return 0.0 if last == 0 else math.nan
        v = self.surrogate.to_moves(position[None])[:, 0]
        return float(nearest_mode(self.population, self.modes, v))

    @property
    def follows(self) -> bool:
        """Whether trajectories take the chain further than differences, as far as is known."""
        return self.difference_share < MOST and not self.acceptance < HOPELESS

    def normal(self):  # noqa: D102
        return self.standardization if self.has_learnt else None

    def statistics(self):  # noqa: D102
        n_leapfrog = float(self.integrator.n_steps[0])
        self.integrator.n_steps[0] = 0.0
        return {
            "step_size": float(self.integrator.step_size[0]),
            "n_leapfrog": n_leapfrog,
            "n_centers": float(self.gp.weights.size),
        }
