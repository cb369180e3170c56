"""MALA: its ratio by brute force, and moments; `test_contract`, `test_invariance` have the rest."""

import numpy as np
import pytest
from models import assert_moments, run
from scipy import linalg, stats

from pymc_kameleon import AdaptiveMetropolisStep, MALAStep
from pymc_kameleon.mcmc.proposals import langevin
from pymc_kameleon.targets import CorrelatedGaussian

pytestmark = pytest.mark.numerics


def test_log_ratio_of_mala_matches_scipy_densities():
    rng = np.random.default_rng(3)
    for dim in (1, 2, 5):
        factor = linalg.cholesky(np.cov(rng.normal(size=(dim, 40))).reshape(dim, dim), lower=True)
        factor, step_size = np.ascontiguousarray(factor), 0.7
        x, gradient, proposed_gradient, normals = rng.normal(size=(4, dim))
        drift, proposed_drift, proposal = np.empty((3, dim))
        langevin.whitened_drift(np.concatenate([np.zeros(3), gradient, 0 * x]), factor, drift)
        halves = np.concatenate([np.zeros(3), proposed_gradient / 2, proposed_gradient / 2])
        langevin.whitened_drift(halves, factor, proposed_drift)
        langevin.propose_langevin(x, drift, factor, step_size, normals, proposal)
        covariance = factor @ factor.T
        mean = x + 0.5 * step_size * covariance @ gradient
        np.testing.assert_allclose(proposal, mean + np.sqrt(step_size) * factor @ normals)
        back = proposal + 0.5 * step_size * covariance @ proposed_gradient
        expected = stats.multivariate_normal(back, step_size * covariance).logpdf(x)
        expected -= stats.multivariate_normal(mean, step_size * covariance).logpdf(proposal)
        found = langevin.langevin_log_ratio(drift, proposed_drift, step_size, normals)
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.slow
def test_step_size_reaches_its_target_acceptance_and_moments_are_right():
    target = CorrelatedGaussian(dim=6)
    model = target.model()
    step = MALAStep(model=model, rng=3, steps_per_draw=10)
    draws, statistics, _ = run(step, model, 2000, tune=400)
    assert 0.5 < np.mean([s["accept"] for s in statistics[400:]]) < 0.65
    exact = target.draw(200_000, np.random.default_rng(1))
    assert_moments(draws[400:], exact.mean(axis=0), exact.std(axis=0))


@pytest.mark.slow
def test_it_saves_evaluations_where_gradients_help():
    """Thirty dimensions: MALA's step size falls as d^(-1/3), that of a random walk as 1/d."""
    target = CorrelatedGaussian(dim=30)
    model, moved = target.model(), []
    for make in (AdaptiveMetropolisStep, MALAStep):
        step = make(model=model, rng=1, steps_per_draw=20)
        draws, _, _ = run(step, model, 1600, tune=1000)
        late = draws[1000:]
        moved.append(np.mean(np.square(np.diff(late, axis=0))) / np.mean(late.var(axis=0)))
    assert moved[1] > 2 * moved[0]
