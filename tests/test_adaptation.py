"""The history is uniform and bounded; coordinates are safe for few points and wild scales."""

import numpy as np
import pytest

from pymc_kameleon.adaptation import new_history, record, standardization, thinned
from pymc_kameleon.transitions.adaptive_metropolis import FORGETTING, Moments, update_moments


@pytest.mark.parametrize("n", [1, 3, 4, 5, 64, 1000, 12345])
def test_history_is_evenly_spaced_bounded_and_reaches_the_present(n):
    history = new_history(8, 1)
    for t in range(n):
        record(history, np.array([float(t)]))
    count, stride, seen = history.cursor
    assert seen == n
    assert count <= 8
    np.testing.assert_array_equal(history.points[:count, 0], stride * np.arange(count))
    assert n - stride * count < stride
    later = history.later_half()[:, 0]
    assert np.all(later >= (n // 2) - stride)
    assert len(later) >= min(2, count)


def test_thinning_draws_rows_without_replacement():
    points = np.arange(50.0)[:, None]
    some = thinned(points, 10, np.random.default_rng(0))
    assert len(np.unique(some)) == 10
    assert thinned(points, 60, np.random.default_rng(0)) is points


def test_standardization_whitens():
    rng = np.random.default_rng(0)
    scales = np.array([1e-6, 1.0, 1e6])
    root = np.array([[1, 0, 0], [0.9, 0.4, 0], [-0.5, 0.2, 0.7]])
    points = 5 * scales + (rng.normal(size=(2000, 3)) @ root.T) * scales
    learnt = standardization(points, np.ones(3))
    whitened = learnt.whiten(points)
    np.testing.assert_allclose(np.cov(whitened, bias=True), np.eye(3), atol=1e-4)
    np.testing.assert_allclose(whitened.mean(axis=1), 0, atol=1e-9)


@pytest.mark.parametrize("points", [np.ones((1, 4)), np.ones((7, 4)), np.eye(4)[:2]])
def test_standardization_of_degenerate_points_is_positive_definite(points):
    learnt = standardization(points, np.full(4, 1e-3))
    assert np.all(np.diag(learnt.factor) > 0)
    assert np.all(np.isfinite(learnt.whiten(points)))


def test_running_moments_match_the_recursion_written_out():
    rng = np.random.default_rng(4)
    positions = rng.normal(size=(300, 3)) @ rng.normal(size=(3, 3)) + 4
    moments = Moments(np.zeros(3), np.eye(3), np.zeros(1), np.array([0.0, 5.0]))
    mean, covariance, n = np.zeros(3), np.eye(3), 5.0
    for position in positions:
        moments.n_updates[1] += 1
        update_moments(moments, position)
        n += 1
        step = FORGETTING / (n + FORGETTING)
        difference = position - mean
        mean = mean + step * difference
        covariance = (1 - step) * (covariance + step * np.outer(difference, difference))
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(moments.factor @ moments.factor.T, covariance, rtol=1e-9)
