"""The proposal of KAMH against brute force, and the linear algebra it rests on."""

import types

import numpy as np
import pytest
from scipy import linalg, stats

from pymc_kameleon.kernels import Gaussian, Linear, Matern, Polynomial
from pymc_kameleon.mcmc.chain import probability
from pymc_kameleon.mcmc.linalg import cholesky_in_place, rank_one_update, solve_factor
from pymc_kameleon.mcmc.loop import Differences, propose_difference
from pymc_kameleon.mcmc.proposals.eigenfunction_moves import rank_one_log_ratio
from pymc_kameleon.mcmc.proposals.local_gaussian import (
    centred_scatter,
    local_covariance,
    log_proposal_ratio,
)

KERNELS = [Gaussian(), Matern(1.5), Matern(2.5), Matern(3.3), Linear(), Polynomial(2)]


def proposal_covariance(kernel, x, points, bandwidth, gamma, nu):
    gradients, scatter = np.empty(points.shape), np.empty((x.size, x.size))
    kernel.gradients(x, points, kernel.parameters(bandwidth), gradients)
    centred_scatter(gradients, scatter)
    factor = np.zeros_like(scatter)
    local_covariance(scatter, gamma, nu, factor)
    assert cholesky_in_place(factor)
    return np.tril(factor)


def brute_force_covariance(kernel, x, points, bandwidth, gamma, nu):
    n = points.shape[1]
    gradients = np.empty(points.shape)
    kernel.gradients(x, points, kernel.parameters(bandwidth), gradients)
    centring = np.eye(n) - np.ones((n, n)) / n
    m = 2 * gradients
    return gamma**2 * np.eye(x.size) + nu**2 * m @ centring @ m.T


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize(("dim", "n"), [(1, 3), (2, 40), (5, 1), (8, 101), (13, 1000)])
def test_covariance_matches_brute_force_with_explicit_centring(kernel, dim, n):
    rng = np.random.default_rng(dim * n)
    x, points = rng.normal(size=dim), rng.normal(size=(dim, n))
    factor = proposal_covariance(kernel, x, points, 1.3, 0.4, 0.7)
    expected = brute_force_covariance(kernel, x, points, 1.3, 0.4, 0.7)
    np.testing.assert_allclose(factor @ factor.T, expected, rtol=1e-10, atol=1e-10)


def test_probability_of_no_number_is_zero():
    found = [probability(ratio) for ratio in (np.nan, -np.inf, -1e4, np.log(0.3), 0.0, np.inf)]
    np.testing.assert_allclose(found, [0.0, 0.0, 0.0, 0.3, 1.0, 1.0])


def test_log_ratio_matches_scipy_densities():
    rng = np.random.default_rng(3)
    points, x = rng.normal(size=(3, 30)), rng.normal(size=3)
    forward = proposal_covariance(Gaussian(), x, points, 1.1, 0.3, 0.4)
    normals = rng.normal(size=3)
    displacement = forward @ normals
    reverse = proposal_covariance(Gaussian(), x + displacement, points, 1.1, 0.3, 0.4)
    expected = stats.multivariate_normal(x + displacement, reverse @ reverse.T).logpdf(
        x
    ) - stats.multivariate_normal(x, forward @ forward.T).logpdf(x + displacement)
    ratio = log_proposal_ratio(forward, reverse, normals, displacement)
    assert ratio == pytest.approx(expected, abs=1e-10)


def test_rank_one_log_ratio_matches_scipy_densities():
    rng = np.random.default_rng(8)
    for dim in (1, 3, 9):
        forward, reverse, displacement = rng.normal(size=(3, dim))
        gamma, nu = 0.4, 1.7
        one, other = (
            stats.multivariate_normal(cov=gamma**2 * np.eye(dim) + nu**2 * np.outer(c, c))
            for c in (forward, reverse)
        )
        expected = other.logpdf(displacement) - one.logpdf(displacement)
        found = rank_one_log_ratio(forward, reverse, displacement, gamma, nu)
        assert found == pytest.approx(expected, abs=1e-10)


def test_factorisation_reports_failure_instead_of_nonsense():
    assert not cholesky_in_place(np.zeros((2, 2)))
    assert not cholesky_in_place(np.full((2, 2), np.inf))
    assert not cholesky_in_place(np.full((2, 2), np.nan))
    assert cholesky_in_place(np.eye(2))


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_rank_one_update_matches_cholesky(dim):
    rng = np.random.default_rng(dim)
    root = rng.normal(size=(dim, dim))
    covariance = root @ root.T + np.eye(dim)
    factor, vector = linalg.cholesky(covariance, lower=True), rng.normal(size=dim)
    expected = linalg.cholesky(0.8 * covariance + 0.3 * np.outer(vector, vector), lower=True)
    rank_one_update(factor, vector, 0.8, 0.3)
    np.testing.assert_allclose(factor, expected, atol=1e-12)


def test_difference_and_triangular_solve():
    rng = np.random.default_rng(8)
    factor, points = np.tril(rng.normal(size=(4, 4))) + 3 * np.eye(4), rng.normal(size=(4, 6))
    normals, out, back = rng.normal(size=4), np.empty(4), np.empty(4)
    chain = types.SimpleNamespace(position=rng.normal(size=4), proposal=out)
    uniforms = np.array([0.5, 1.5 / 6, 4.5 / 5, 0.5, 0.0, 0.0, 0.0])  # the points 1 and 5
    propose_difference(Differences(points, factor, 0.6, 0.1, 0.1), chain, normals, uniforms)
    out -= chain.position
    np.testing.assert_allclose(
        out, factor @ (0.6 * (points[:, 1] - points[:, 5]) + 0.1 * normals), atol=1e-12
    )
    solve_factor(factor, out, back)
    np.testing.assert_allclose(factor @ back, out, atol=1e-12)
