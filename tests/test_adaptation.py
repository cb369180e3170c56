"""The history is uniform and bounded; coordinates are safe for few points and wild scales."""

import functools

import numpy as np
import pytest
from models import normal, run

from pymc_kameleon import FastKameleonStep, KameleonStep, PCAKameleonStep
from pymc_kameleon.adaptation.feature_covariance import new_covariance, update_covariance
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.mcmc.history import RECENT, new_history, record, thinned
from pymc_kameleon.mcmc.proposals.random_walk import FORGETTING, Moments, update_moments
from pymc_kameleon.mcmc.scalings import learn_scaling


@pytest.mark.parametrize("n", [1, 3, 4, 5, 64, 1000, 12345])
def test_history_is_evenly_spaced_bounded_and_reaches_the_present(n):
    history = new_history(8, 1)
    for t in range(n):
        record(history, np.array([float(t)]))
    count, stride, seen = history.cursor[:3]
    assert seen == n
    assert count <= 8
    np.testing.assert_array_equal(history.points[:count, 0], stride * np.arange(count))
    assert n - stride * count < stride
    later = history.later_half()[:, 0]
    assert np.all(later >= (n // 2) - stride)
    assert len(later) >= min(2, count)


def test_recent_positions_are_kept_without_gaps():
    history = new_history(4, 1, n_recent=6)
    for t in range(20):
        if history.cursor[RECENT] == 6:
            history.cursor[RECENT] = 0
        record(history, np.array([float(t)]))
    assert history.cursor[RECENT] == 2
    np.testing.assert_array_equal(history.recent[:2, 0], [18.0, 19.0])


@pytest.mark.parametrize(("n", "dim", "largest"), [(100_000, 5, 400), (10_000, 2, 2)])
def test_covariance_in_blocks_equals_two_passes_far_from_zero(n, dim, largest):
    """Blocks of several rows, and one row at a time."""
    rng = np.random.default_rng(4)
    rows = 1e6 + rng.normal(size=(n, dim)) @ rng.normal(size=(dim, dim))
    covariance, start = new_covariance(dim), 0
    while start < n:
        size = int(rng.integers(1, largest))
        update_covariance(covariance, rows[start : start + size])
        start += size
    expected = np.cov(rows.T, bias=True)
    found = np.tril(covariance.scatter) / covariance.weight[0]
    tolerance = 1e-10 * np.abs(expected).max()
    np.testing.assert_allclose(found, np.tril(expected), rtol=0, atol=tolerance)
    np.testing.assert_allclose(covariance.mean, rows.mean(axis=0), rtol=1e-13)


def test_a_weighted_row_counts_as_so_many_rows():
    rows = np.random.default_rng(6).normal(size=(30, 3))
    weighted, repeated = new_covariance(3), new_covariance(3)
    update_covariance(weighted, rows[:10], 4.0)
    update_covariance(weighted, rows[10:])
    update_covariance(repeated, np.concatenate([np.repeat(rows[:10], 4, axis=0), rows[10:]]))
    for one, other in zip(weighted, repeated, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13)


def test_thinning_draws_rows_without_replacement():
    points = np.arange(50.0)[:, None]
    assert len(np.unique(thinned(points, 10, np.random.default_rng(0)))) == 10
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
    moments = Moments(np.zeros(3), np.eye(3), np.array([5.0]))
    mean, covariance, n = np.zeros(3), np.eye(3), 5.0
    for position in positions:
        update_moments(moments, position)
        n += 1
        step = FORGETTING / (n + FORGETTING)
        difference = position - mean
        mean = mean + step * difference
        covariance = (1 - step) * (covariance + step * np.outer(difference, difference))
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(moments.factor @ moments.factor.T, covariance, rtol=1e-9)


@pytest.mark.parametrize(("dim", "target"), [(1, 0.44), (2, 0.234), (9, 0.234)])
def test_acceptance_that_a_scaling_is_learnt_for(dim, target):
    step = KameleonStep(model=normal(dim)[0])
    assert step.target_accept == target


@pytest.mark.numerics
@pytest.mark.parametrize(
    "make_step",
    [KameleonStep, FastKameleonStep, functools.partial(PCAKameleonStep, n_components=3)],
    ids=["kameleon", "fast_kameleon", "pca_kameleon"],
)
def test_a_scaling_stays_in_the_range_of_useful_moves(make_step):
    """Whatever the acceptance: from a twentieth to a hundred times the best random walk.

    That is the one with 2.38^2 / d times the variance (Roberts et al. 1997), here of the subsample.
    """
    model, _, _ = normal(2)
    step = make_step(model=model, steps_per_draw=10)
    run(step, model, 200, tune=200)
    learner = step.learner
    points = learner.learnt.points
    best = 2.38**2 / 2 * points.var(axis=1).mean()
    for acceptance, factor in ((0.0, 0.05), (1.0, 100.0)):
        for _ in range(3000):
            for j in range(learner.scaling.log.size):
                learn_scaling(learner.recursion(), j, acceptance)
        sizes = np.exp(2 * learner.scaling.log) * learner._move_sizes(points) / best
        # Both are means over some of the points.
        np.testing.assert_allclose(np.sqrt(sizes), factor, rtol=0.5)
