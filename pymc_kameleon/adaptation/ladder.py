"""How parallel tempering learns: temperatures, reference, archives of points."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.mcmc.proposals.tempering import (
    FRESH,
    SCANS,
    TRIPS,
    Ladder,
    Reference,
    Replicas,
    States,
    Tuning,
    normals_of_scan,
    uniforms_of_scan,
)
from pymc_kameleon.mcmc.proposals.trends import N_COEFFICIENTS, fit_trends, picks
from pymc_kameleon.mcmc.scalings import (
    LARGEST_LOG_SCALING,
    Scaling,
    ScalingBounds,
    ScalingRecursion,
    target_acceptance,
)
from pymc_kameleon.model.initial_points import N_PRIOR_POINTS, PriorSampler
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.validation import checked_integer

FIRST_TEMPERATURES, LEAST_TEMPERATURES, MOST_TEMPERATURES = 12, 4, 40
"""Numbers of temperatures: at first, and what a number that is chosen may be."""

ARCHIVE = 1000
"""Points of each temperature that its moves are made with."""

FIRST_ROUND = 25
"""Scans of the first round of tuning."""

FRESH_DRAWS = 200
"""Draws of the prior that are made at a time."""

WIDENED = 1.2
"""Times the standard deviations of the draws: a learnt Gaussian reference."""


def equal_rejections(betas: np.ndarray, rejections: np.ndarray, n: int) -> np.ndarray:
    """Inverse temperatures (n,) between which swaps would be rejected equally often.

    `rejections` (K - 1,) are those between neighbours of `betas` (K,), from 0 to 1. Their sums are
    the communication barrier of Syed et al. (2022), which is interpolated in log beta; below the
    smallest positive one, in beta.
    """
    barrier = np.concatenate([[0.0], np.cumsum(np.clip(rejections, 1e-3, 1.0))])
    levels = np.linspace(0.0, barrier[-1], n)
    logs = np.interp(levels, barrier[1:], np.log(betas[1:]))
    found = np.where(levels < barrier[1], betas[1] * levels / barrier[1], np.exp(logs))
    found[0], found[-1] = 0.0, 1.0
    return found


class TemperingLearner(Learner):
    """Learns in rounds, each half as long again as the last.

    After each round it chooses temperatures between which swaps are rejected equally often; each
    takes archive, covariance and trends of the nearest one of that round; and a Gaussian reference
    is fitted to the draws at temperature 1, and widened. Five are set by the step: `target`, the
    chain's `LogDensity`; `hot_target`, that of the other replicas, another one where other steps
    move what it depends on; `stored`, the `StoredDensity` of both, or None; `prior_sampler`, a
    `PriorSampler`, or None where the reference is learnt; and `or_none(density, x, value)`, which
    calls a density and notes an error.
    """

    state_names = ("scales", "ladder", "reference", "tuning", "states", "rounds", "held")
    history_capacity = ARCHIVE
    target: LogDensity
    hot_target: LogDensity
    stored: Any = None
    prior_sampler: PriorSampler | None = None
    or_none: Callable

    def __init__(self, *, n_temperatures: int | None, n_moves: int | None):
        if n_temperatures is not None:
            n_temperatures = checked_integer("n_temperatures", n_temperatures, 2)
            if n_temperatures > MOST_TEMPERATURES:
                raise ValueError(
                    f"n_temperatures={n_temperatures}: take at most {MOST_TEMPERATURES}, as many "
                    "as the statistics have room for."
                )
        if n_moves is not None:
            checked_integer("n_moves", n_moves, 1)
        self.n_temperatures, self.chosen_moves = n_temperatures, n_moves
        self.options = {"n_temperatures": n_temperatures, "n_moves": n_moves}

    @property
    def n_moves(self) -> int:
        """Moves of each replica between swaps."""
        return self.chosen_moves or min(6 + self.dim // 5, 20)

    def _begin(self, position, rng, warm):
        n = self.n_temperatures or FIRST_TEMPERATURES
        is_prior = self.prior_sampler is not None
        self.reference = Reference(
            np.array([is_prior]),
            Standardization(position.copy(), np.diag(self.target.scales).astype(float)),
        )
        self.rounds = np.array([FIRST_ROUND, FIRST_ROUND])
        self.held = {}
        self._begin_replicas(position, n, rng)

    def _begin_replicas(self, position, n, rng):
        """Begin at draws of the prior, or around the start, with temperatures for these."""
        if self.prior_sampler is None:
            normals = rng.standard_normal((N_PRIOR_POINTS, self.dim))
            drawn = position + normals * self.target.scales
        else:
            drawn = self.prior_sampler(N_PRIOR_POINTS, rng)
        deviations = 0.5 * np.maximum(drawn.std(axis=0), self.target.scales * 1e-3)
        terms = self._terms_at(drawn)
        heights = terms[:, 1] + terms[:, 2]
        if self.prior_sampler is None:
            heights = heights + terms[:, 0]
        heights = heights[np.isfinite(heights)]
        spread = np.subtract(*np.quantile(heights, (0.84, 0.16))) if len(heights) > 1 else 1.0
        smallest = min(0.1, 0.5 / max(spread, 1e-300))
        betas = np.concatenate([[0.0], np.geomspace(smallest, 1.0, n - 1)])
        shrunk = 1.0 / np.sqrt(1.0 + betas * spread / self.dim)
        archive = position + shrunk[:, None, None] * (self._archive_of(drawn) - position)
        self.ladder = Ladder(
            betas,
            archive,
            archive.mean(axis=1),
            np.zeros((n, self.dim, self.dim, N_COEFFICIENTS)),
            np.tile(np.arange(1, self.dim + 1) / self.dim, (n, 1)),
            shrunk[:, None] * deviations,
            np.array([np.diag(s * deviations) for s in shrunk]),
            np.full(n, math.log(2.38 / math.sqrt(self.dim))),
            np.zeros(n),
            np.array([np.nan]),
        )
        self.tuning = self._new_round(n, FIRST_ROUND)
        self.states = States(
            positions=drawn[rng.integers(len(drawn), size=n)].copy(),
            values=np.zeros((n, N_TERMS)),
            base=np.zeros(n),
            ratio=np.zeros(n),
            is_current=np.zeros(1, dtype=np.bool_),
            fresh=np.zeros((0, self.dim)),
            counters=np.zeros(3, dtype=np.int64),
            visited=np.zeros(n, dtype=np.bool_),
            swaps=np.zeros(2),
        )
        self._hold_others()

    def _terms_at(self, points):
        """Terms of the log density at `points`, which are no evaluations of a draw."""
        terms = np.empty((len(points), N_TERMS))
        self.target.n_evaluations += len(points)
        n_known = 0 if self.stored is None else self.stored.taken_n_known()
        for x, value in zip(points, terms, strict=True):
            self.or_none((self.stored or self.target.function).into, x, value)
        if self.stored is not None:
            self.stored.taken_n_known()
            self.stored.count(0, n_known)
        return terms

    def _new_round(self, n, length):
        return Tuning(
            np.zeros((n, ARCHIVE, self.dim)),
            np.array([0, max(1, math.ceil(length / ARCHIVE)), 0]),
            np.zeros((n - 1, 2)),
        )

    def _archive_of(self, points):
        """As many of the rows of `points` as an archive has, each as often as possible."""
        repeats = np.resize(np.arange(len(points)), ARCHIVE)
        return points[np.sort(repeats)] if len(points) < ARCHIVE else points[:ARCHIVE]

    # what transitions take ------------------------------------------------------------------------

    @property
    def n_more_normals(self):  # noqa: D102
        return normals_of_scan(len(self.ladder.betas), self.n_moves, self.dim) - self.dim

    @property
    def n_more_uniforms(self):  # noqa: D102
        return uniforms_of_scan(len(self.ladder.betas), self.n_moves)

    def proposal(self, compiled):  # noqa: D102
        scaling = Scaling(self.ladder.log_scale, self.ladder.n_walks)
        bound = np.full(len(scaling.log), LARGEST_LOG_SCALING)
        function = self._hot_function
        table = function.compiled() if compiled else (self._hot_density,)
        return Replicas(
            table,
            self.hot_target is not self.target,
            self.n_moves,
            self.adapts,
            ScalingRecursion(
                scaling, ScalingBounds(-bound, bound), target_acceptance(self.dim), 1.0, 0.6, True
            ),
            self.ladder,
            self.reference,
            self.tuning,
            self.states,
        )

    @property
    def _hot_function(self):
        """What evaluates the densities of the other replicas."""
        return self.stored or self.hot_target.function

    def _hot_density(self, x, value):
        """As the target's, where an error counts as no density while tuning."""
        density = self._hot_function.into
        if self.adapts:
            self.or_none(density, x, value)
        else:
            density(x, value)

    adapts = True

    def _hold_others(self):
        """Let the other replicas see the present values of other steps' variables, from now on.

        Their densities stand still after tuning: what the chain's density depends on then is part
        of the state that is sampled, and theirs must not be.
        """
        for variable, shared in self.target.shared.items():
            self.held[variable.name] = np.array(shared.get_value())
        self.states.is_current[0] = False

    def before_transitions(self, n, adapts, rng):
        """Have what `n` scans need: draws of the prior, and the values that are held."""
        self.adapts = adapts
        self.draw_prior(n, rng)
        if self.hot_target is self.target:
            return
        if self.adapts:
            self._hold_others()
        for variable, shared in self.hot_target.shared.items():
            shared.set_value(self.held[variable.name])

    def draw_prior(self, n: int, rng: np.random.Generator) -> None:
        """Have draws of the prior for `n` scans, if it can be drawn from."""
        unused = self.states.fresh[self.states.counters[FRESH] :]
        if self.prior_sampler is None or len(unused) >= n:
            return
        drawn = self.prior_sampler(max(n, FRESH_DRAWS), rng)
        self.states = self.states._replace(fresh=np.concatenate([unused, drawn]))
        self.states.counters[FRESH] = 0

    def invalidate(self):
        """Evaluate every replica again: what they depend on has changed."""
        self.states.is_current[0] = False

    # learning -------------------------------------------------------------------------------------

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        return min(n, max(0, int(self.rounds[0]) - transition - 1))

    def update(self, position, tune, rng):  # noqa: D102
        self._end_round()
        self.rounds[1] = _longer(self.rounds[1])
        self.rounds[0] += self.rounds[1]

    def end_tuning(self, position, rng):  # noqa: D102
        if self.tuning.cursor[0] >= self.rounds[1] // 2:
            self._end_round()
        self.adapts = False
        self.states.counters[[SCANS, TRIPS]] = 0

    def _end_round(self):
        """Learn from what was recorded since the last time."""
        old, tuning = self.ladder, self.tuning
        sums, counts = tuning.rejected.T
        rejections = np.where(counts > 0, sums / np.maximum(counts, 1.0), 1.0)
        n = self.n_temperatures or self._needed(rejections, len(old.betas))
        betas = equal_rejections(old.betas, rejections, n)
        nearest = _nearest(old.betas, betas)
        stored = int(tuning.cursor[2])
        if stored < 2:
            return
        points = tuning.points[:, :stored]
        coordinates = [standardization(p, d) for p, d in zip(points, old.deviations, strict=True)]
        factors = np.array([c.factor for c in coordinates])
        location = np.array([c.location for c in coordinates])
        deviations = np.sqrt(np.sum(factors**2, axis=2))
        trends = np.zeros((*factors.shape, N_COEFFICIENTS))
        for k in set(nearest):
            fit_trends(points[k], location[k], deviations[k], trends[k])
        self.ladder = Ladder(
            betas,
            np.array([self._archive_of(points[k]) for k in nearest]),
            location[nearest],
            trends[nearest],
            np.array([picks(trends[k]) for k in nearest]),
            deviations[nearest],
            factors[nearest],
            old.log_scale[nearest],
            old.n_walks[nearest],
            np.array([np.sum(rejections)]),
        )
        here = self.states
        self.states = here._replace(
            positions=here.positions[nearest],
            values=here.values[nearest],
            base=here.base[nearest],
            ratio=here.ratio[nearest],
            visited=np.zeros(n, dtype=np.bool_),
        )
        self.tuning = self._new_round(n, _longer(self.rounds[1]))
        if self.prior_sampler is None:
            self.reference.gaussian.location[:] = coordinates[-1].location
            self.reference.gaussian.factor[:] = WIDENED * coordinates[-1].factor
            self.states.is_current[0] = False

    @staticmethod
    def _needed(rejections, n):
        """About twice the barrier, within bounds; no fewer than half of before at a time."""
        wanted = math.ceil(2.0 * float(np.sum(rejections))) + 1
        return min(max(wanted, n // 2, LEAST_TEMPERATURES), 2 * n, MOST_TEMPERATURES)

    # what was learnt ------------------------------------------------------------------------------

    def normal(self):  # noqa: D102
        return self.ladder.location[-1], self.ladder.factor[-1]

    @property
    def is_consistent(self):  # noqa: D102
        n, states = len(self.ladder.betas), self.states
        arrays = (*self.ladder[:-1], *states[:4], states.visited)
        return all(len(array) == n for array in (*arrays, self.tuning.points))

    def statistics(self):  # noqa: D102
        sums, count = self.states.swaps
        return {
            "swapped": sums / count if count else math.nan,
            "n_temperatures": float(len(self.ladder.betas)),
            "barrier": float(self.ladder.barrier[0]),
            "round_trips": float(self.states.counters[TRIPS]),
        }


def _longer(length):
    """Return how long the next round is."""
    return length * 3 // 2


def _nearest(old, new):
    """Find the nearest of the `old` inverse temperatures, in logs; 0 has 0."""
    with np.errstate(divide="ignore"):
        logs, wanted = np.log(old[1:]), np.log(new[1:])
    found = 1 + np.argmin(np.abs(wanted[:, None] - logs), axis=1)
    return np.concatenate([[0], found])
