"""F-KAMH: its covariance against that of KAMH, what it learns from, and bad input."""

import numpy as np
import pytest

from pymc_kameleon import FastKameleonStep, KameleonStep
from pymc_kameleon.kernels import CustomKernel, Gaussian, Laplacian, Linear
from pymc_kameleon.kernels.random_features import features, jacobians
from pymc_kameleon.targets import Banana

pytestmark = pytest.mark.numerics

TARGET = Banana(bananicity=0.1, variance=100.0, dim=3)
MODEL = TARGET.model()
POINTS = TARGET.draw(300, np.random.default_rng(1))
PLACES = TARGET.draw(5, np.random.default_rng(2)) + 0.3


def random_feature_kernel(step):
    """The kernel phi(x)^T phi(y) of a step's features, and its gradient."""
    drawn, embedding = step.learner.features, step.learner.embedding

    def phi(x):
        return features(x[None], drawn.frequencies, drawn.phases, embedding)[0]

    def value(x, y, bandwidth):
        return phi(x) @ phi(y)

    def gradient(x, y, bandwidth):
        return jacobians(x[None], drawn.frequencies, drawn.phases, embedding)[0].T @ phi(y)

    return CustomKernel(value, gradient)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("embedding", ["pairs", "shifted"])
def test_covariance_is_that_of_kameleon_with_the_kernel_of_the_features(embedding, standardize):
    options = {
        "model": MODEL,
        "warm_start": POINTS,
        "standardize": standardize,
        "bandwidth": 1.5 if standardize else 9.0,
        "gamma": 0.3,
    }
    eta = 7.0
    fast = FastKameleonStep(
        n_features=40, embedding=embedding, rank_share=1, scaling=eta, **options
    )
    found = fast.proposal_covariance(PLACES)
    slow = KameleonStep(
        kernel=random_feature_kernel(fast),
        n_subsample=300,
        scaling=eta / (2 * np.sqrt(300)),
        **options,
    )
    # An update keeps the size of moves; here both scalings are to stay as they were given.
    fast.learner.scaling.log[0] = np.log(eta)
    slow.proposal_covariance(PLACES)
    slow.learner.scaling.log[0] = np.log(eta / (2 * np.sqrt(300)))
    found, expected = fast.proposal_covariance(PLACES), slow.proposal_covariance(PLACES)
    assert found.shape == (5, 3, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_a_smaller_rank_share_changes_little():
    whole, most = (
        FastKameleonStep(model=MODEL, warm_start=POINTS, rank_share=share, n_features=200, rng=1)
        for share in (1, 0.95)
    )
    expected, found = whole.proposal_covariance(PLACES), most.proposal_covariance(PLACES)
    assert len(most.learner.features.factor) < 0.5 * len(whole.learner.features.factor)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_what_is_learnt_is_the_covariance_of_all_positions_since_the_middle_of_the_last_redraw():
    step = FastKameleonStep(
        model=Banana(0.1, dim=2).model(), n_features=30, rng=3, steps_per_draw=1
    )
    redraws, frequencies, positions = [], None, []
    point = {"x": np.array([0.0, -9.0])}
    for t in range(700):
        point, (statistics,) = step.step(point)
        assert t > 0 or statistics["rank"] == 0
        positions.append(point["x"])
        if step.learner.features.frequencies is not frequencies:
            frequencies = step.learner.features.frequencies
            redraws.append(t)
    assert statistics["rank"] == len(step.learner.features.factor) > 0
    step.stop_tuning()
    assert redraws[-1] > 400
    assert len(redraws) == 4
    kept = np.array(positions)[redraws[-1] // 2 :]
    u = step.learner.learnt.coordinates.whiten(kept).T
    rows = features(u, step.learner.features.frequencies, step.learner.features.phases, "pairs")
    expected = np.cov(rows.T, bias=True)
    found = np.tril(step.learner.covariance.scatter) / step.learner.covariance.weight[0]
    assert step.learner.covariance.weight[0] == len(kept)
    np.testing.assert_allclose(found, np.tril(expected), atol=1e-12)


def test_rough_kernels_and_odd_numbers_are_named_in_a_warning():
    with pytest.warns(UserWarning, match="32"):
        assert FastKameleonStep(model=MODEL, n_features=31).sampler.template.n_features == 32
    with pytest.warns(UserWarning, match="Laplacian.*no second moment"):
        FastKameleonStep(model=MODEL, kernel=Laplacian())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_features": 1}, "n_features"),
        ({"embedding": "both"}, "embedding"),
        ({"kernel": Linear()}, "no spectral density"),
        ({"kernel": "polynomial"}, "no spectral density"),
        ({"rank_share": 0}, "rank_share"),
        ({"rank_share": 1.2}, "rank_share"),
        ({"kernel": CustomKernel(Gaussian(), lambda x, y, c: x)}, "frequencies"),
    ],
)
def test_bad_input_of_fast_kameleon(options, message):
    with pytest.raises(ValueError, match=message):
        FastKameleonStep(model=MODEL, **options)
