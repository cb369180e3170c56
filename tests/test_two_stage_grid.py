"""Two-stage acceptance is exact: the target is the stationary vector of a finite chain.

On a grid of states the two-stage kernel is a matrix, so its stationary vector is known to rounding,
for right and for wrong rules alike. The proposal is a Gaussian restricted to the grid, each row
normalised; its row sums enter the ratio with the densities.
"""

import math

import numpy as np
import pytest
from surrogates import gp_of

from pymc_kameleon.gp.sparse_gp import (
    follow,
    log_surrogate,
    predict_with_gradient,
)
from pymc_kameleon.surrogate.acceptance_ratios import (
    corrected_second_stage,
    first_stage,
    log_exact_density,
    log_marginal_density,
    log_probability,
    second_stage,
)

N_STATES = 60
GRID = np.linspace(-3, 4, N_STATES)
KNOWN = np.array([-2.5, -0.8, 0.4, 1.9, 3.1])
STEP_SIZE, FACTOR = 0.5, np.array([[1.2]])
EXACT = 1e-12


def log_likelihood(x):
    """Two modes of different height and width."""
    return np.logaddexp(-((x + 1) ** 2) / 0.5, 0.7 - (x - 1.5) ** 2 / 1.2) + 0.3 * np.sin(3 * x)


def likelihood_slope(x):
    left, right = -((x + 1) ** 2) / 0.5, 0.7 - (x - 1.5) ** 2 / 1.2
    share = 1 / (1 + np.exp(right - left))
    of_modes = share * -4 * (x + 1) + (1 - share) * -2 * (x - 1.5) / 1.2
    return of_modes + 0.9 * np.cos(3 * x)


def log_prior(x):
    return -0.5 * (x - 0.5) ** 2 / 9


def prior_slope(x):
    return -(x - 0.5) / 9


LIKELIHOOD, PRIOR = log_likelihood(GRID), log_prior(GRID)
TARGET = np.exp(LIKELIHOOD + PRIOR)
TARGET /= TARGET.sum()


def normalised(log_densities):
    """Rows of log proposal probabilities on the grid, and the log row sums."""
    sums = np.log(np.exp(log_densities).sum(axis=1))
    return log_densities - sums[:, None], sums


def stationary(transition):
    """Stationary vector by the elimination of Grassmann, Taksar and Heyman: no subtraction."""
    table, size = transition.copy(), len(transition)
    for n in range(size - 1, 0, -1):
        table[:n, n] /= table[n, :n].sum()
        table[:n, :n] += np.outer(table[:n, n], table[n, :n])
    found = np.ones(size)
    for n in range(1, size):
        found[n] = found[:n] @ table[:n, n]
    return found / found.sum()


def distance_to_target(log_proposal, log_acceptance):
    """Total variation between the target and the stationary vector."""
    transition = np.exp(log_proposal + log_acceptance)
    return 0.5 * np.abs(stationary(transition) - TARGET).sum()


def matrix(function):
    """`function(i, j)` for all pairs of states, start and end."""
    return np.array([[function(i, j) for j in range(N_STATES)] for i in range(N_STATES)])


def process_of(points, constant=-2.0):
    process = gp_of(points[:, None], log_likelihood(points), np.log([2.0, 0.7]))
    follow(process, constant)
    return process


def surrogate_on_grid(process):
    return np.array([log_surrogate(process, x) for x in GRID[:, None]])


@pytest.fixture(scope="module")
def proposal():
    """A random walk with a drift, so that the ratio of proposals matters."""
    centre = GRID + 0.2 * np.cos(GRID)
    return normalised(-0.5 * (GRID - centre[:, None]) ** 2 / 0.8**2)[0]


def test_stationary_vector_of_plain_metropolis_hastings_is_the_target(proposal):
    acceptance = matrix(
        lambda i, j: log_probability(
            math.log(TARGET[j] / TARGET[i]) + proposal[j, i] - proposal[i, j]
        )
    )
    assert distance_to_target(proposal, acceptance) < EXACT
    assert distance_to_target(proposal, np.zeros((N_STATES, N_STATES))) > 0.1


@pytest.mark.parametrize("points", [KNOWN, KNOWN[:0], KNOWN[2:3]], ids=len)
def test_gp_mh_is_exact_for_a_fixed_surrogate(proposal, points):
    if len(points):
        values = surrogate_on_grid(process_of(points))
    else:
        values = np.random.default_rng(1).normal(size=N_STATES)

    def acceptance(i, j):
        ends = values[j], values[i]
        alpha_1 = first_stage(*ends, PRIOR[j] - PRIOR[i], proposal[j, i] - proposal[i, j])
        return alpha_1 + second_stage(LIKELIHOOD[j], LIKELIHOOD[i], *ends)

    assert distance_to_target(proposal, matrix(acceptance)) < EXACT


def test_a_mean_that_follows_is_exact_with_the_reverse_under_the_proposed_points_mean(proposal):
    """Surrogates whose prior mean is the log-likelihood of each state: rows."""
    process, following = process_of(KNOWN), np.empty((N_STATES, N_STATES))
    for value, row in zip(LIKELIHOOD, following, strict=True):
        follow(process, value)
        row[:] = surrogate_on_grid(process)

    def acceptance(i, j):
        prior, moves = PRIOR[j] - PRIOR[i], proposal[j, i] - proposal[i, j]
        forward = first_stage(following[i, j], following[i, i], prior, moves)
        reverse = first_stage(following[j, i], following[j, j], -prior, -moves)
        ratio = LIKELIHOOD[j] - LIKELIHOOD[i] + prior + moves
        return forward + corrected_second_stage(ratio, forward, reverse)

    assert distance_to_target(proposal, matrix(acceptance)) < EXACT


@pytest.fixture(scope="module")
def langevin():
    """Proposal of MALA on the grid, and matrices of log e and log m, start to end.

    On the grid e has the normalised proposal; m may stay a density, since any function of the two
    states serves as the first stage's numerator and denominator.
    """
    process = gp_of(KNOWN[:, None], log_likelihood(KNOWN), np.log([2.0, 0.7]))
    posterior = []
    for x in GRID[:, None]:
        of_mean, cross, of_gradient = np.empty(1), np.empty(1), np.empty((1, 1))
        posterior.append(
            (
                *predict_with_gradient(process, x, of_mean, cross, of_gradient),
                of_mean,
                cross,
                of_gradient,
            )
        )
    states, drift = GRID[:, None], (likelihood_slope(GRID) + prior_slope(GRID))[:, None]
    densities = LIKELIHOOD + PRIOR
    prior_slopes = prior_slope(GRID)[:, None]
    exact = matrix(
        lambda i, j: log_exact_density(
            states[i], states[j], densities[i], drift[i], STEP_SIZE, FACTOR
        )
    )
    marginal = matrix(
        lambda i, j: log_marginal_density(
            states[i], states[j], PRIOR[i], prior_slopes[i], *posterior[i], STEP_SIZE, FACTOR
        )
    )
    proposal, sums = normalised(exact - densities[:, None])
    return proposal, exact - sums[:, None], marginal


def form_a(marginal, exact, back, forth):
    """The marginal density in numerator and denominator of the first stage."""
    log_r = marginal[back] - marginal[forth]
    return log_probability(log_r) + log_probability(exact[back] - exact[forth] - log_r)


def form_b(marginal, exact, back, forth):
    """The exact density in the denominator, so another ratio for the way back."""
    forward = log_probability(marginal[back] - exact[forth])
    reverse = log_probability(marginal[forth] - exact[back])
    return forward + corrected_second_stage(exact[back] - exact[forth], forward, reverse)


def reciprocal(marginal, exact, back, forth):
    """As `form_b`, with the reciprocal in the second stage. Measured: a distance of 0.11."""
    log_r = marginal[back] - exact[forth]
    return log_probability(log_r) + log_probability(exact[back] - exact[forth] - log_r)


@pytest.mark.parametrize(
    ("form", "is_exact"), [(form_a, True), (form_b, True), (reciprocal, False)]
)
def test_gp_mala(langevin, form, is_exact):
    proposal, exact, marginal = langevin
    acceptance = matrix(lambda i, j: form(marginal, exact, (j, i), (i, j)))
    distance = distance_to_target(proposal, acceptance)
    assert distance < EXACT if is_exact else distance > 1e-3


def test_non_finite_ratios_are_rejections():
    assert log_probability(np.nan) == -np.inf
    assert log_probability(-np.inf) == -np.inf
    assert log_probability(np.inf) == 0.0
    assert second_stage(-np.inf, 0.0, 1.0, 2.0) == -np.inf
    assert second_stage(np.nan, 0.0, 1.0, 2.0) == -np.inf
    assert first_stage(np.inf, np.inf, 0.0, 0.0) == -np.inf


class Law:
    """A random Gaussian law of (f, g), and a MALA move from 0 to `end`."""

    def __init__(self, dim, step_size, seed):
        rng = np.random.default_rng([dim, seed])
        root = rng.normal(size=(dim + 1, dim + 1)) * 0.5
        self.dim, self.step_size = dim, step_size
        self.mean, self.covariance = rng.normal(size=dim + 1), root @ root.T
        self.prior_slope, self.end = rng.normal(size=dim), rng.normal(size=dim)
        scatter = np.cov(rng.normal(size=(dim, 3 + dim))).reshape(dim, dim)
        self.factor = np.linalg.cholesky(scatter)

    def log_marginal(self):
        return log_marginal_density(
            np.zeros(self.dim),
            self.end,
            0.0,
            self.prior_slope,
            self.mean[0],
            self.covariance[0, 0],
            self.mean[1:],
            np.ascontiguousarray(self.covariance[0, 1:]),
            np.ascontiguousarray(self.covariance[1:, 1:]),
            self.step_size,
            self.factor,
        )

    def log_integrand(self, f, g):
        """Log of e^f N(end; delta Lambda (g + s) / 2, delta Lambda) for rows of f and g."""
        preconditioner = self.factor @ self.factor.T
        centre = 0.5 * self.step_size * (g + self.prior_slope) @ preconditioner
        whitened = np.linalg.solve(self.factor, (self.end - centre).T)
        constant = self.dim * math.log(2 * math.pi * self.step_size)
        constant += 2 * np.log(np.diagonal(self.factor)).sum()
        return f - 0.5 * (whitened**2).sum(axis=0) / self.step_size - 0.5 * constant


@pytest.mark.parametrize(("dim", "step_size"), [(1, 0.3), (1, 2.0), (2, 0.3), (2, 2.0)])
def test_marginalised_density_matches_quadrature(dim, step_size):
    law = Law(dim, step_size, 0)
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(80 if dim == 1 else 50)
    points = np.stack(np.meshgrid(*[nodes] * (dim + 1)), axis=-1).reshape(-1, dim + 1)
    weights = np.ones(len(points))
    for axis in np.meshgrid(*[node_weights / node_weights.sum()] * (dim + 1)):
        weights *= axis.ravel()
    draws = law.mean + points @ np.linalg.cholesky(law.covariance).T
    expected = math.log(np.exp(law.log_integrand(draws[:, 0], draws[:, 1:])) @ weights)
    assert law.log_marginal() == pytest.approx(expected, abs=1e-8)


def test_without_uncertainty_the_marginalised_density_is_the_exact_one():
    law = Law(2, 0.7, 1)
    law.covariance = np.zeros((3, 3))
    drift = law.mean[1:] + law.prior_slope
    exact = log_exact_density(np.zeros(2), law.end, law.mean[0], drift, 0.7, law.factor)
    assert law.log_marginal() == pytest.approx(exact, abs=1e-12)
