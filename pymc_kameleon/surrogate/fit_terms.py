"""Fits of the regressions of a sum, each to its own inputs and values, and draws from the sum."""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg
from scipy.optimize import brentq

from pymc_kameleon._threads import one_thread
from pymc_kameleon.gp.sparse_gp import RATIONAL, SparseGP, new_sparse_gp
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, fit_sparse_gp
from pymc_kameleon.gp.typical_set import around_the_mode, typical_depth, typical_set
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.surrogate.annealing import move_many
from pymc_kameleon.surrogate.fit_posterior import BALL
from pymc_kameleon.surrogate.hmc import STEEPEST, Integrator, new_integrator, with_step_size
from pymc_kameleon.surrogate.posterior_surrogate import (
    predicted,
    surrogate_gradients,
    surrogate_values,
)
from pymc_kameleon.surrogate.sum_of_surrogates import SumOfSurrogates, Terms, new_sum, packed
from pymc_kameleon.surrogate.sum_parts import SumParts

N_PARTICLES = 40
"""Draws from the surrogate that go on from fit to fit."""

WIDE = 2.0
"""Standard deviations of the wide Gaussian that stands for what the other terms and the prior say
of a term's inputs, relative to those of the draws: where the term itself is flat, points far beyond
them need not be known."""

COOLING, KEPT = 4.0, 0.1
"""Largest factor between temperatures, from the first points to draws, and smallest effective share
of particles from one to the next: with few of them all would begin at the same point."""

TOO_LOW = 3.0
"""Times the depth of a Gaussian below the largest log density of the particles: one that is lower
begins anew at another one."""


class FittedTerms(NamedTuple):
    """A sum of surrogates, and all that moves on it take.

    Moves are in (x - location) / scales, both (d,). `hyperparameters` (T, 1 + k) are of all terms,
    with zeros where a term has fewer inputs, and `widths` (T, k) standard deviations of the inputs
    by the term alone. `particles` (n, d) are draws from the surrogate, in raw coordinates.
    """

    location: np.ndarray
    scales: np.ndarray
    terms: Terms
    hyperparameters: np.ndarray
    widths: np.ndarray
    integrator: Integrator
    particles: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"particles": 0}

    @property
    def is_fitted(self) -> bool:
        """Whether there was a fit."""
        return len(self.particles) > 0

    @property
    def noise(self) -> float:
        """Standard deviation of values that are estimates: those of terms are none."""
        return 0.0

    @property
    def n_centres(self) -> int:
        """Points that the largest of the surrogates holds."""
        return int(self.terms.sizes[:, 2].max())

    def mode_of(self, position: np.ndarray) -> float:
        """Return NaN: modes of a sum are not numbered."""
        return math.nan

    def surrogate(self, parts: SumParts, is_independent: bool = False) -> SumOfSurrogates:
        """Return the surrogate, with what is known of the log density.

        Or with independent Gaussians in place of that, if `is_independent`.
        """
        known = parts.independent if is_independent else parts.known
        inputs, with_slopes = parts.inputs.compiled(), known.compiled()
        if inputs is None or with_slopes is None:
            raise RuntimeError("what is known of the log density cannot be compiled any more")
        return new_sum(self.location, self.scales, self.terms, parts.n_inputs, inputs, with_slopes)


def unfitted_terms(parts: SumParts) -> FittedTerms:
    """Return what stands for a fit before there is one."""
    members, dim = parts.members, parts.dim
    processes = [new_sparse_gp(RATIONAL, len(indices)) for indices in members]
    n_terms, largest = len(members), max(map(len, members))
    integrator = new_integrator(dim)
    return FittedTerms(
        np.zeros(dim),
        np.ones(dim),
        packed(processes, members, np.zeros(n_terms)),
        np.zeros((n_terms, 1 + largest)),
        np.zeros((n_terms, largest)),
        integrator._replace(root=np.zeros((0, 0)), radius=np.array([np.inf])),
        np.zeros((0, dim)),
    )


@one_thread()
def fit_terms(
    points: np.ndarray,
    values: np.ndarray,
    drawn: np.ndarray,
    previous: FittedTerms,
    parts: SumParts,
    max_points: int,
) -> FittedTerms | None:
    """Fit all terms to their `values` (m, T) at `points` (m, d); None if that is too little.

    `drawn` (l, d) are draws from where the posterior is taken to be. The search for hyperparameters
    begins with the `previous` ones.
    """
    inputs, at_drawn = parts.inputs_at(points), parts.inputs_at(drawn)
    is_usable = np.isfinite(inputs).all(axis=1)
    inputs, values = inputs[is_usable], values[is_usable]
    at_drawn = at_drawn[np.isfinite(at_drawn).all(axis=1)]
    if len(inputs) < 2 or len(at_drawn) < 2:
        return None
    # What many terms share they know together; each alone has to be known where it is typical.
    middle = at_drawn.mean(axis=0)
    at_drawn = middle + np.sqrt(parts.n_uses) * (at_drawn - middle)
    processes, edges = [], []
    hyperparameters, widths = previous.hyperparameters.copy(), previous.widths.copy()
    try:
        for t, indices in enumerate(parts.members):
            k = len(indices)
            start = previous.hyperparameters[t, : 1 + k] if previous.is_fitted else None
            gp, edge = fit_term(
                inputs[:, indices], values[:, t], at_drawn[:, indices], max_points, start
            )
            processes.append(gp)
            edges.append(edge)
            hyperparameters[t, : 1 + k] = gp.hyperparameters
            widths[t, :k] = np.sqrt(np.sum(gp.standardization.factor**2, axis=1))
    except (TooFewValues, linalg.LinAlgError):
        return None
    terms = packed(processes, parts.members, np.array(edges))
    return previous._replace(terms=terms, hyperparameters=hyperparameters, widths=widths)


def fit_term(
    inputs: np.ndarray,
    values: np.ndarray,
    drawn: np.ndarray,
    max_centres: int,
    previous: np.ndarray | None,
) -> tuple[SparseGP, float]:
    """Regress the `values` (m,) of a term on its `inputs` (m, k); return the edge too.

    `drawn` (l, k) are inputs where the posterior is taken to be, or the prior. The search for
    hyperparameters begins with the `previous` ones. Raises TooFewValues or LinAlgError as
    `fit_sparse_gp` does.
    """
    around = standardization(drawn, np.ones(drawn.shape[1]))
    weight = -0.5 * np.sum(around.whiten(inputs) ** 2, axis=0) / WIDE**2
    weighted = values + weight
    if not np.any(np.isfinite(weighted)):
        raise TooFewValues("a term has no finite value")
    typical = typical_set(weighted, inputs.shape[1])
    coordinates = around_the_mode(inputs, weighted)
    gp, _ = fit_sparse_gp(
        inputs, weighted, coordinates, max_centres, previous, weight, typical=typical
    )
    u = coordinates.whiten(inputs)
    near = typical.depths(weighted) < 2.0 * typical.depth
    return gp, BALL * math.sqrt(np.max(np.sum(u[:, near] ** 2, axis=0)))


# draws from the sum -------------------------------------------------------------------------------


class Sampled(NamedTuple):
    """From what particles are drawn: a surrogate with or without its known part, and how."""

    parts: SumParts
    is_independent: bool
    target_accept: float
    rng: np.random.Generator


@one_thread()
def first_particles(fitted: FittedTerms, points: np.ndarray, sampled: Sampled) -> FittedTerms:
    """Draw from the surrogate, from the `points` (m, d) on, at temperatures that fall to 1."""
    values = _values(fitted, points, sampled)
    chosen = np.argsort(-values)[:N_PARTICLES]
    particles, values = points[chosen], values[chosen]
    temperature = max(1.0, (values[0] - np.median(values)) / len(fitted.location))
    while True:
        for _ in range(2):
            fitted = _moved(fitted, particles, temperature, sampled)
            particles = fitted.particles
        if temperature == 1.0:
            return fitted
        temperature, weights = _colder(temperature, _values(fitted, particles, sampled))
        kept = sampled.rng.choice(len(weights), size=N_PARTICLES, p=weights)
        particles = particles[kept]


def _colder(temperature, values):
    """Return the next temperature, and weights (n,) of particles whose log densities are `values`.

    The colder one has effective particles as few as `KEPT` says.
    """

    def weights_at(inverse):
        below = np.maximum(values - values.max(), -1e300)
        weights = np.exp(below * (inverse - 1.0 / temperature))
        return weights / weights.sum()

    def too_few(inverse):
        return KEPT * len(values) * np.sum(weights_at(inverse) ** 2) - 1.0

    inverse = min(1.0, COOLING / temperature)
    if too_few(inverse) > 0.0:
        inverse = brentq(too_few, 1.0 / temperature, inverse)
    return 1.0 / inverse, weights_at(inverse)


@one_thread()
def moved_particles(fitted: FittedTerms, points: np.ndarray, sampled: Sampled) -> FittedTerms:
    """Move the particles on the surrogate, and choose the integrator by where they come to be.

    Particles that are far too low for draws begin at another one; if all are, beside the `points`
    (m, d), new ones are drawn. Then pairs of particles exchange the coordinates of a term, which
    takes them between its modes.
    """
    particles = fitted.particles.copy()
    values, depth = _values(fitted, particles, sampled), typical_depth(particles.shape[1])
    if not values.max() > _values(fitted, points, sampled).max() - TOO_LOW * depth:
        return first_particles(fitted, points, sampled)
    is_low = ~(values > values.max() - TOO_LOW * depth)
    others = np.flatnonzero(~is_low)
    particles[is_low] = particles[sampled.rng.choice(others, size=is_low.sum())]
    fitted = _moved(fitted, particles, 1.0, sampled)
    return _exchanged(fitted, sampled)


def _values(fitted, points, sampled):
    return predicted(fitted.surrogate(sampled.parts, sampled.is_independent), points)


def _moved(fitted, particles, temperature, sampled):
    dim = particles.shape[1]
    fitted = _with_integrator(fitted, particles, temperature, sampled)
    surrogate = fitted.surrogate(sampled.parts, sampled.is_independent)
    v = np.ascontiguousarray(surrogate.to_moves(particles).T)
    values = surrogate_values(surrogate, v)
    no_differences = np.zeros((dim, 0))
    move_many(surrogate, fitted.integrator, temperature, v, values, sampled.rng, no_differences)
    fitted.integrator.n_steps[0] = 0.0
    return fitted._replace(particles=surrogate.to_points(v.T))


def _with_integrator(fitted, particles, temperature, sampled):
    """Choose scales, step size and length by the particles (n, d) and the gradients there."""
    surrogate = fitted.surrogate(sampled.parts, sampled.is_independent)
    gradients = surrogate_gradients(surrogate, surrogate.to_moves(particles).T) / fitted.scales
    gradients = gradients[np.all(np.abs(gradients) < STEEPEST, axis=1)]
    squared = np.sum(gradients**2, axis=0) / max(1, len(gradients))
    steepness = np.sqrt(squared / temperature)
    spread = particles.std(axis=0) / math.sqrt(temperature)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.where(spread > 0.0, np.sqrt(spread / steepness), 1.0 / steepness)
    scales = np.where(np.isfinite(scales) & (scales > 0.0), scales, fitted.scales)
    fitted = fitted._replace(location=particles.mean(axis=0), scales=scales)
    surrogate = fitted.surrogate(sampled.parts, sampled.is_independent)
    v = np.ascontiguousarray(surrogate.to_moves(particles).T)
    integrator = with_step_size(surrogate, fitted.integrator, v, sampled.target_accept, sampled.rng)
    return fitted._replace(integrator=integrator)


def _exchanged(fitted, sampled):
    """Let pairs of particles exchange what one term alone depends on: exact for their product."""
    rng, particles = sampled.rng, fitted.particles.copy()
    values, half = _values(fitted, particles, sampled), len(particles) // 2
    for own in sampled.parts.own:
        order = rng.permutation(len(particles))
        first, second = order[:half], order[half : 2 * half]
        proposed = particles.copy()
        proposed[np.ix_(first, own)] = particles[np.ix_(second, own)]
        proposed[np.ix_(second, own)] = particles[np.ix_(first, own)]
        found = _values(fitted, proposed, sampled)
        gains = (found - values)[first] + (found - values)[second]
        accepted = np.log(rng.random(half)) < gains
        moved = np.concatenate([first[accepted], second[accepted]])
        particles[moved], values[moved] = proposed[moved], found[moved]
    return fitted._replace(particles=particles)
