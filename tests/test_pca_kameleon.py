"""PCA-Kameleon: eigenfunctions and covariance by brute force, separate scalings, bad input."""

import numpy as np
import pytest
from models import drive

from pymc_kameleon import PCAKameleonStep
from pymc_kameleon.kernels import Gaussian
from pymc_kameleon.targets import Banana

TARGET = Banana(bananicity=0.1, variance=100.0, dim=3)
MODEL = TARGET.model()
POINTS = TARGET.draw(60, np.random.default_rng(1))
START = {"x": np.array([0.0, -9.0, 0.0])}
PLACES = TARGET.draw(4, np.random.default_rng(2))
RAW = {
    "model": MODEL,
    "warm_start": POINTS,
    "standardize": False,
    "bandwidth": 9.0,
    "gamma": 0.3,
    "scaling": 2.0,
}


def test_covariance_of_pca_kameleon_matches_brute_force():
    step = PCAKameleonStep(n_components=7, **RAW)
    found = step.proposal_covariance(PLACES)
    z, h = step.learner.learnt.points.T, np.eye(60) - 1 / 60
    eigenvalues, vectors = np.linalg.eigh(h @ Gaussian()(z, z, 9.0) @ h)
    weights = eigenvalues[-7:] / eigenvalues[-7:].sum()
    for x, covariance in zip(PLACES, found, strict=True):
        kernel = Gaussian()(x[None], z, 9.0)[0]
        m = 2 * kernel * (z - x).T / 9.0**2
        c = m @ h @ vectors[:, -7:]
        expected = 0.3**2 * np.eye(3) + 2.0**2 * (weights * c) @ c.T
        np.testing.assert_allclose(covariance, expected, rtol=1e-10, atol=1e-12)


def test_weights_are_shares_of_the_kept_eigenvalues():
    step = PCAKameleonStep(n_components=0.8, **RAW)
    step.proposal_covariance(PLACES)
    rank = np.count_nonzero(step.learner.eigenfunctions.weights)
    z, h = step.learner.learnt.points.T, np.eye(60) - 1 / 60
    eigenvalues = np.linalg.eigvalsh(h @ Gaussian()(z, z, 9.0) @ h)[::-1]
    shares = np.cumsum(eigenvalues) / eigenvalues.sum()
    assert shares[rank - 1] >= 0.8 > shares[rank - 2]
    expected = eigenvalues[:rank] / eigenvalues[:rank].sum()
    np.testing.assert_allclose(step.learner.eigenfunctions.weights[:rank], expected, atol=1e-12)
    thresholds = step.learner.eigenfunctions.thresholds
    np.testing.assert_allclose(thresholds[: rank - 1], np.cumsum(expected)[:-1])
    assert np.all(np.isinf(thresholds[rank - 1 :]))


def test_components_are_picked_by_weight():
    """Each of 8000 picks of three components is within five standard errors (null 2e-6)."""
    step = PCAKameleonStep(n_components=3, global_share=0, learn_scaling=False, **RAW)
    step.setup_chain(np.random.default_rng(2), 0, 1)
    step.stop_tuning()
    picked = np.array([s["component"] for s in drive(step, START, 8000, tune=-1)[1]])
    weights = step.learner.eigenfunctions.weights
    for j in range(3):
        error = np.sqrt(weights[j] * (1 - weights[j]) / 8000)
        assert abs(np.mean(picked == j + 1) - weights[j]) < 5 * error


def test_each_component_has_its_own_scaling():
    step = PCAKameleonStep(
        model=MODEL, n_components=4, n_subsample=50, rng=4, global_share=0, steps_per_draw=1
    )
    drive(step, START, 1500, tune=-1)
    before, counts = step.learner.scaling.log.copy(), step.learner.scaling.n_updates.copy()
    changed = []
    update = step.learner.eigenfunctions
    point = {"x": step.chain.position.copy()}
    for _ in range(40):
        point, (statistics,) = step.step(point)
        assert step.learner.eigenfunctions is update
        moved = np.flatnonzero(step.learner.scaling.n_updates != counts)
        if np.isnan(statistics["component"]):
            assert len(moved) == 0
            continue
        assert list(moved) == [int(statistics["component"]) - 1]
        assert statistics["component_scaling"] == pytest.approx(np.exp(before[moved[0]]))
        before, counts = step.learner.scaling.log.copy(), step.learner.scaling.n_updates.copy()
        changed.append(moved[0])
    assert len(set(changed)) > 1
    assert len(np.unique(before)) == 4


def test_no_component_without_a_kernel_move():
    step = PCAKameleonStep(model=MODEL, global_share=1, n_subsample=50, rng=4)
    _, statistics, _ = drive(step, START, 300, tune=-1)
    assert np.isnan(statistics[-1]["component"])
    assert statistics[-1]["rank"] >= 1
    assert statistics[0]["rank"] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_components": 201}, ValueError, "at most 200"),
        ({"n_components": 20, "n_subsample": 10}, ValueError, "at most 10"),
        ({"n_components": 0}, ValueError, "n_components"),
        ({"n_components": 1.5}, ValueError, "n_components"),
        ({"n_components": 0.0}, ValueError, "n_components"),
        ({"n_components": "all"}, TypeError, "n_components"),
        ({"gamma": 0}, ValueError, "gamma"),
        ({"kernel": "laplacian"}, ValueError, "gradient"),
    ],
)
def test_bad_input_of_pca_kameleon(options, error, message):
    with pytest.raises(error, match=message):
        PCAKameleonStep(model=MODEL, **options)
