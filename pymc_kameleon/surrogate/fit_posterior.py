"""A fit to all evaluations: the surrogate, and all that trajectories and differences take."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon.gp.sparse_gp import (
    RATIONAL,
    SparseGP,
    Uncertainty,
    new_sparse_gp,
    posterior_covariance,
)
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, fit_sparse_gp, typical_map
from pymc_kameleon.gp.triangular_map import TriangularMap
from pymc_kameleon.gp.typical_set import TypicalSet, around_the_mode, typical_set
from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.mcmc.history import thinned
from pymc_kameleon.surrogate.annealing import anneal, moved
from pymc_kameleon.surrogate.hmc import Integrator, new_integrator
from pymc_kameleon.surrogate.modes import find_modes, nearest_modes
from pymc_kameleon.surrogate.posterior_surrogate import (
    PosteriorSurrogate,
    natural_slopes,
    natural_where,
    new_surrogate,
)
from pymc_kameleon.surrogate.support import Support, everywhere

N_TYPICAL, N_BEST = 200, 4
"""Draws from the surrogate for difference moves, and how many of them the evaluations with the
largest log densities replace: a mode can be there that the chain has not come to."""

BALL = 1.3
"""Trajectories stay within this times the distance of the furthest evaluation that was not very
low."""

WIDTHS = 3.0
"""Standard deviations, beyond the root of the dimension, that a ball which ends the draws has as
radius at least, and beyond one each side of a box: a Gaussian has 1e-4 of its mass outside."""


class Known(NamedTuple):
    """Evaluations: `points` (n, d), log densities `values` (n,), and the part that is not learnt.

    That is the `log_prior` (n,), or 0. `gradients` (n, d) are those of the log density, and
    `learnt_gradients` (n, d) those of the part that is learnt; None where there are none.
    """

    points: np.ndarray
    values: np.ndarray
    log_prior: np.ndarray
    gradients: np.ndarray | None = None
    learnt_gradients: np.ndarray | None = None

    def at(self, chosen: np.ndarray) -> "Known":
        """Return those of the evaluations that are `chosen` (n,)."""
        slopes = self.gradients, self.learnt_gradients
        return Known(
            self.points[chosen],
            self.values[chosen],
            self.log_prior[chosen],
            *(None if part is None else part[chosen] for part in slopes),
        )


class Past(NamedTuple):
    """Where the chain was lately.

    `positions` (m, d), none if it has not moved enough; the scales (d,) of coordinates that have
    not moved; and the log densities `visited` (k,) that it has had.
    """

    positions: np.ndarray
    scales: np.ndarray
    visited: np.ndarray

    def coordinates(
        self, points: np.ndarray, values: np.ndarray, gradients: np.ndarray | None
    ) -> Standardization:
        """Standardise by the chain's past, or by the evaluations near the largest value."""
        if len(self.positions):
            return standardization(self.positions, self.scales)
        return around_the_mode(points, values, gradients)

    def usual_points(self, coordinates: Standardization, rng: np.random.Generator) -> np.ndarray:
        """Standardised points (d, n) where the chain is, or will be if the density is Gaussian."""
        if len(self.positions):
            return coordinates.whiten(thinned(self.positions, N_TYPICAL, rng))
        return rng.standard_normal((len(coordinates.location), N_TYPICAL))


class FitOptions(NamedTuple):
    """What a fit does not learn.

    The largest number of centres; whether the values are noisy estimates; whether the support is
    learnt; and the acceptance on the surrogate that the step size of trajectories is chosen for.
    """

    max_points: int
    is_noisy: bool
    learns_support: bool
    target_accept: float


class FittedPosterior(NamedTuple):
    """A surrogate of the posterior, and all that moves on it take.

    Moves are in coordinates that `standardization` and `triangular_map` make; `gp` is the process
    of the log-likelihood, of the natural value where a coordinate `is_bounded` (d,), and the
    surrogate is -inf outside of the `support`. `differences` (d, n) are standardised points for
    differences of the history, and `population` (d, n) draws from the surrogate in coordinates of
    moves, the first `N_BEST` of which are evaluations; `modes` (n,) numbers the mode that each
    belongs to, -1 where that is not known. No evaluation is typical that is above the log density
    `usual_height`.

    `annealed` has the draws (n, d) at each temperature, in coordinates of moves and the hottest
    first. These and the `uncertainty` of the process say where to evaluate next; a chain goes on
    without them.
    """

    standardization: Standardization
    triangular_map: TriangularMap
    gp: SparseGP
    is_bounded: np.ndarray
    support: Support
    integrator: Integrator
    differences: np.ndarray
    population: np.ndarray
    modes: np.ndarray
    usual_height: float
    annealed: Sequence[np.ndarray] = ()
    uncertainty: Uncertainty | None = None

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"differences": 1, "population": 1, "modes": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether each draw has a number for its mode."""
        return self.population.shape[1] == len(self.modes)

    @property
    def is_fitted(self) -> bool:
        """Whether there was a fit."""
        return self.differences.shape[1] > 0

    @property
    def noise(self) -> float:
        """Standard deviation of values that are estimates, as far as is known."""
        return float(self.gp.noise[0])

    @property
    def n_centres(self) -> int:
        """Points that the surrogate holds."""
        return self.gp.weights.size

    def without_uncertainty(self) -> "FittedPosterior":
        """Return what a chain goes on with, which takes less memory."""
        return self._replace(annealed=(), uncertainty=None)

    def with_modes(self, log_prior: np.ndarray) -> "FittedPosterior":
        """Return the same with the modes of the population."""
        return self._replace(modes=find_modes(self.surrogate(log_prior), self.population))

    def surrogate(self, log_prior: np.ndarray) -> PosteriorSurrogate:
        """Return the surrogate, with what compiled code calls for the log prior."""
        return new_surrogate(
            self.standardization,
            self.triangular_map,
            self.gp.mean_function(),
            self.is_bounded,
            log_prior,
            self.support,
        )

    def to_moves(self, points: np.ndarray) -> np.ndarray:
        """Coordinates of moves (d, n) of the rows of `points` (n, d)."""
        return self.triangular_map.to_v(self.standardization.whiten(points))

    def mode_of(self, position: np.ndarray) -> float:
        """Return the number of the mode that `position` (d,) is nearest to; NaN while tuning."""
        last = self.modes.max(initial=-1)
        if last <= 0:
            return 0.0 if last == 0 else math.nan
        v = self.to_moves(position[None])
        return float(nearest_modes(self.population, self.modes, v.T)[0])

    def covariance_at(self, points: np.ndarray) -> np.ndarray:
        """Covariance (n, n) of the log densities at the rows of `points` (n, d), raw."""
        if self.uncertainty is None:
            raise RuntimeError("the uncertainty of this surrogate is not known")
        own = self.gp.standardization.whiten(natural_where(self.is_bounded, points))
        return posterior_covariance(self.gp, self.uncertainty, own)

    @one_thread()
    def draw(
        self,
        log_prior: np.ndarray,
        starts: np.ndarray,
        n: int,
        target_accept: float,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Draw from the surrogate, nearly independently: (n, d) in coordinates of moves.

        Among the raw points `starts` (k, d) are some of each mode.
        """
        begin, height = np.ascontiguousarray(self.to_moves(starts).T), self.usual_height
        surrogate = self.surrogate(log_prior)
        annealed, _ = anneal(surrogate, self.integrator, begin, n, target_accept, rng, height)
        return annealed[-1]

    @one_thread()
    def draw_on(self, log_prior: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw likewise, from where the last fit ended: at a fifth of the price."""
        surrogate, found = self.surrogate(log_prior), []
        particles = np.ascontiguousarray(self.population[:, N_BEST:].T)
        for _ in range(math.ceil(n / len(particles))):
            particles = moved(surrogate, self.integrator, particles, rng)
            found.append(particles)
        return np.concatenate(found)


def unfitted(dim: int) -> FittedPosterior:
    """Return what stands for a fit before there is one."""
    gp = new_sparse_gp(RATIONAL, dim)
    return FittedPosterior(
        gp.standardization,
        gp.triangular_map,
        gp,
        np.zeros(dim, dtype=np.bool_),
        everywhere(dim),
        new_integrator(dim),
        differences=np.zeros((dim, 0)),
        population=np.zeros((dim, 0)),
        modes=np.zeros(0, dtype=np.int64),
        usual_height=math.inf,
    )


@one_thread()
def fit_posterior(
    known: Known,
    past: Past,
    previous: FittedPosterior,
    options: FitOptions,
    log_prior: np.ndarray,
    rng: np.random.Generator,
) -> FittedPosterior | None:
    """Fit surrogate, integrator and difference moves to what is known; None if that is too little.

    `log_prior` is what compiled code calls for it. The search for hyperparameters begins with the
    `previous` ones, if there were any.
    """
    has_density, evaluated = np.isfinite(known.values), known.points
    if not np.any(has_density):
        return None
    if options.learns_support:
        known = known.at(has_density)
    points, values, dim = known.points, known.values, known.points.shape[1]
    coordinates = past.coordinates(points, values, known.gradients)
    usual = past.usual_points(coordinates, rng)
    typical = typical_set(values, dim, past.visited)
    usual_height = float(np.median(past.visited)) if len(past.visited) else math.inf
    depths = typical.depths(values)
    try:
        gp, uncertainty = _regress(known, past, previous, options, coordinates, typical)
        fitted = previous._replace(
            standardization=coordinates,
            triangular_map=_map_of_moves(known, previous.is_bounded, coordinates, gp, typical),
            gp=gp,
            support=everywhere(dim),
        )
        v = fitted.to_moves(points)
        radius = BALL * math.sqrt(np.max(np.sum(v[:, depths < 2.0 * typical.depth] ** 2, axis=0)))
        if options.learns_support:
            radius = max(radius, math.sqrt(dim) + WIDTHS)
            extent = _extent(v[:, depths < typical.depth])
            fitted = fitted._replace(support=_support(fitted, evaluated, has_density, extent))
        annealed, integrator = anneal(
            fitted.surrogate(log_prior),
            previous.integrator._replace(radius=np.array([radius])),
            np.ascontiguousarray(v.T),
            N_TYPICAL,
            options.target_accept,
            rng,
            usual_height,
        )
    except (TooFewValues, linalg.LinAlgError):  # try again when there are more points
        return None
    integrator.n_steps[0] = 0.0
    best = np.argsort(values)[-min(N_BEST, int(np.isfinite(values).sum())) :]
    population = np.ascontiguousarray(annealed[-1].T)
    population[:, : len(best)] = v[:, best]
    return fitted._replace(
        integrator=integrator,
        differences=usual,
        population=population,
        modes=np.full(N_TYPICAL, -1),
        usual_height=usual_height,
        annealed=annealed,
        uncertainty=uncertainty,
    )


def _extent(typical):
    """Half widths (d,) of a box around typical evaluations v (d, k), in coordinates of moves."""
    return np.maximum(BALL * np.max(np.abs(typical), axis=1), 1.0 + WIDTHS)


def _support(fitted, evaluated, has_density, extent):
    """Find where draws end, from the points (n, d) that were evaluated, within a box."""
    if np.all(has_density):
        return everywhere(len(extent))._replace(extent=extent)
    points = np.ascontiguousarray(fitted.to_moves(evaluated).T)
    return Support(points, has_density, extent)


def _regress(known, past, previous, options, coordinates, typical):
    points, learnt = known.points, known.learnt_gradients
    if np.any(previous.is_bounded):
        gradients = known.gradients
        if gradients is not None:
            scales = natural_slopes(previous.is_bounded, points)
            gradients, learnt = gradients / scales, learnt / scales
        points, positions = (
            natural_where(previous.is_bounded, x) for x in (points, past.positions)
        )
        coordinates = past._replace(positions=positions).coordinates(
            points, known.values, gradients
        )
    return fit_sparse_gp(
        points,
        known.values,
        coordinates,
        options.max_points,
        previous.gp.hyperparameters if previous.is_fitted else None,
        known.log_prior,
        learnt,
        typical,
        noise_start=(previous.gp.noise[0] or 1.0) if options.is_noisy else None,
    )


def _map_of_moves(
    known: Known,
    is_bounded: np.ndarray,
    coordinates: Standardization,
    gp: SparseGP,
    typical: TypicalSet,
) -> TriangularMap:
    """Straighten the coordinates of moves, if those of the process are."""
    found = gp.triangular_map
    if np.any(is_bounded) and found.mapped.size > 0:  # they are not the process's
        return typical_map(coordinates.whiten(known.points), known.values, typical)
    return found
