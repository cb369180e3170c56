"""Fits of the regressions of a sum: each term's from its own inputs and values."""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon._threads import one_thread
from pymc_kameleon.gp.sparse_gp import RATIONAL, SparseGP, new_sparse_gp
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, fit_sparse_gp
from pymc_kameleon.gp.typical_set import around_the_mode, typical_depth, typical_set
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.surrogate.annealing import move_many
from pymc_kameleon.surrogate.fit_posterior import BALL
from pymc_kameleon.surrogate.hmc import Integrator, new_integrator, with_step_size
from pymc_kameleon.surrogate.posterior_surrogate import surrogate_gradients, surrogate_values
from pymc_kameleon.surrogate.sum_of_surrogates import (
    SumOfSurrogates,
    Terms,
    new_sum,
    packed,
    terms_at,
)

N_PARTICLES = 40
"""Draws from the surrogate that go on from fit to fit."""

WIDE = 2.0
"""Standard deviations of the wide Gaussian that stands for what the other terms and the prior say
of a term's inputs, relative to those of the draws: where the term itself is flat, points far beyond
them need not be known."""

COOLING = 4.0
"""Largest factor between temperatures, from the first points to draws."""


class SumParts:
    """What is known of a log density whose likelihood is a sum of terms, and what they depend on.

    `names` (T) are the terms', `members` (T) the indices of their inputs, which `inputs` writes;
    `known` is the known part with the gradient of all, as `LogDensity.known_with_slopes`.
    """

    def __init__(self, target):
        self.names, self.members = target.terms.names, target.terms.members
        self.inputs: ModelFunction = target.inputs_of_terms
        self.known: ModelFunction = target.known_with_slopes()
        self.n_inputs = self.known.dim - target.dim
        self.dim = target.dim

    def inputs_at(self, points: np.ndarray) -> np.ndarray:
        """Inputs (m, n) of the terms at the rows of `points` (m, d)."""
        found = np.empty((len(points), self.n_inputs))
        for point, row in zip(points, found, strict=True):
            self.inputs.into(point, row)
        return found


class FittedTerms(NamedTuple):
    """A sum of surrogates, and all that moves on it take.

    Moves are in (x - location) / scales, both (d,). `hyperparameters` (T, 1 + k) are of all terms,
    with zeros where a term has fewer inputs; `particles` (n, d) are draws from the surrogate, in
    raw coordinates, and `errors` (T,) standard deviations of the errors of the terms where they
    were evaluated after the fit before.
    """

    location: np.ndarray
    scales: np.ndarray
    terms: Terms
    hyperparameters: np.ndarray
    integrator: Integrator
    particles: np.ndarray
    errors: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"particles": 0}

    @property
    def is_fitted(self) -> bool:
        """Whether there was a fit."""
        return len(self.particles) > 0

    def surrogate(self, parts: SumParts) -> SumOfSurrogates:
        """Return the surrogate, with the known part of the log density."""
        return new_sum(
            self.location,
            self.scales,
            self.terms,
            parts.n_inputs,
            parts.inputs.compiled(),
            parts.known.compiled(),
        )


def unfitted_terms(parts: SumParts) -> FittedTerms:
    """Return what stands for a fit before there is one."""
    members, dim = parts.members, parts.dim
    processes = [new_sparse_gp(RATIONAL, len(indices)) for indices in members]
    largest = max(map(len, members))
    return FittedTerms(
        np.zeros(dim),
        np.ones(dim),
        packed(processes, members, np.zeros(len(members))),
        np.zeros((len(members), 1 + largest)),
        _without_root(dim),
        np.zeros((0, dim)),
        np.full(len(members), np.nan),
    )


def _without_root(dim):
    integrator = new_integrator(dim)
    return integrator._replace(root=np.zeros((0, 0)), radius=np.array([np.inf]))


@one_thread()
def fit_terms(
    points: np.ndarray,
    terms: np.ndarray,
    drawn: np.ndarray,
    previous: FittedTerms,
    parts: SumParts,
    max_points: int,
    target_accept: float,
    rng: np.random.Generator,
) -> FittedTerms | None:
    """Fit all terms to their values (n, T) at `points` (n, d); None if that is too little.

    `drawn` (m, d) are draws from where the posterior is taken to be. The search for hyperparameters
    begins with the `previous` ones.
    """
    inputs, at_drawn = parts.inputs_at(points), parts.inputs_at(drawn)
    processes, edges = [], []
    hyperparameters = previous.hyperparameters.copy()
    try:
        for t, indices in enumerate(parts.members):
            start = previous.hyperparameters[t, : 1 + len(indices)]
            gp, edge = fit_term(
                inputs[:, indices],
                terms[:, t],
                at_drawn[:, indices],
                max_points,
                start if previous.is_fitted else None,
            )
            processes.append(gp)
            edges.append(edge)
            hyperparameters[t, : 1 + len(indices)] = gp.hyperparameters
    except (TooFewValues, linalg.LinAlgError):
        return None
    fitted = previous._replace(
        terms=packed(processes, parts.members, np.array(edges)), hyperparameters=hyperparameters
    )
    if previous.is_fitted:
        return moved_particles(fitted, parts, previous.particles, 1.0, target_accept, rng)
    return _annealed(fitted, parts, points, target_accept, rng)


def fit_term(
    inputs: np.ndarray,
    values: np.ndarray,
    drawn: np.ndarray,
    max_centres: int,
    previous: np.ndarray | None,
) -> tuple[SparseGP, float]:
    """Regress the `values` (n,) of a term on its `inputs` (n, k); return the edge too.

    `drawn` (m, k) are inputs at draws from the surrogate, or from the prior. The search for
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


def _annealed(fitted, parts, points, target_accept, rng):
    """Draw from the surrogate, from the points (n, d) on, at temperatures that fall to 1."""
    values = _values(fitted, parts, points)
    chosen = np.argsort(-values)[:N_PARTICLES]
    particles, values = points[chosen], values[chosen]
    temperature = max(1.0, (values[0] - np.median(values)) / len(fitted.location))
    while True:
        fitted = moved_particles(fitted, parts, particles, temperature, target_accept, rng)
        if temperature == 1.0:
            return fitted
        colder = max(1.0, temperature / COOLING)
        values = _values(fitted, parts, fitted.particles)
        weights = np.exp((values - values.max()) * (1.0 / colder - 1.0 / temperature))
        kept = rng.choice(len(weights), size=N_PARTICLES, p=weights / weights.sum())
        particles, temperature = fitted.particles[kept], colder


def _values(fitted, parts, points):
    surrogate = fitted.surrogate(parts)
    return surrogate_values(surrogate, surrogate.to_moves(points).T)


def moved_particles(
    fitted: FittedTerms,
    parts: SumParts,
    particles: np.ndarray,
    temperature: float,
    target_accept: float,
    rng: np.random.Generator,
) -> FittedTerms:
    """Move `particles` (n, d) on the surrogate, and choose the integrator by where they are.

    Particles that are far too low for draws begin at another one.
    """
    dim = particles.shape[1]
    values = _values(fitted, parts, particles)
    is_low = ~(values > values.max() - 3.0 * temperature * typical_depth(dim))
    particles = particles.copy()
    particles[is_low] = particles[rng.choice(np.flatnonzero(~is_low), size=is_low.sum())]
    for _ in range(2):
        fitted = _scaled(fitted, parts, particles, temperature, target_accept, rng)
        surrogate = fitted.surrogate(parts)
        v = np.ascontiguousarray(surrogate.to_moves(particles).T)
        values = surrogate_values(surrogate, v)
        move_many(surrogate, fitted.integrator, temperature, v, values, rng, np.zeros((dim, 0)))
        particles = surrogate.to_points(v.T)
    fitted.integrator.n_steps[0] = 0.0
    return fitted._replace(particles=particles)


def _scaled(fitted, parts, particles, temperature, target_accept, rng):
    """Choose scales, step size and length by the particles (n, d) and the gradients there."""
    surrogate = fitted.surrogate(parts)
    gradients = surrogate_gradients(surrogate, surrogate.to_moves(particles).T) / fitted.scales
    gradients = gradients[np.isfinite(gradients).all(axis=1)] / math.sqrt(temperature)
    steepness = np.sqrt(np.mean(gradients**2, axis=0))
    spread = particles.std(axis=0) / math.sqrt(temperature)
    scales = np.where(spread > 0.0, np.sqrt(spread / steepness), 1.0 / steepness)
    fitted = fitted._replace(location=particles.mean(axis=0), scales=scales)
    surrogate = fitted.surrogate(parts)
    v = np.ascontiguousarray(surrogate.to_moves(particles).T)
    integrator = with_step_size(surrogate, fitted.integrator, v, target_accept, rng)
    return fitted._replace(integrator=integrator)
