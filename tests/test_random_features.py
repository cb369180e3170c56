"""Random Fourier features against the kernels that they approximate."""

import copy
import math
import pickle

import numpy as np
import pytest

from pymc_kameleon.kernels import (
    CustomKernel,
    Gaussian,
    InverseMultiquadric,
    Laplacian,
    Linear,
    Matern,
    Sinc,
    SincSquared,
)
from pymc_kameleon.kernels.random_features import (
    EMBEDDINGS,
    RandomFourierFeatures,
    checked_n_features,
    draw_features,
    features,
)

pytestmark = pytest.mark.numerics


def _cosines(x, y, c):
    return np.prod(np.cos((x - y) / c))


def _signs(size, dim, c, rng):
    return rng.choice([-1 / c, 1 / c], (size, dim))


KERNELS = {
    "gaussian": Gaussian(),
    "laplacian": Laplacian(),
    "matern-0.5": Matern(0.5),
    "matern-1.5": Matern(1.5),
    "matern-2.5": Matern(2.5),
    "matern-4": Matern(4),
    "inverse-multiquadric-0.5": InverseMultiquadric(0.5),
    "inverse-multiquadric-2": InverseMultiquadric(2),
    "sinc": Sinc(),
    "sinc-squared": SincSquared(),
    "custom": CustomKernel(_cosines, frequencies=_signs),
}
BANDWIDTH = 1.3
N_FEATURES = 200_000


def points_around(x, rng):
    """Points at zero to three bandwidths from `x` (d,), in random directions; shape (6, d)."""
    directions = rng.normal(size=(6, x.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return x + BANDWIDTH * np.array([0, 0.3, 0.7, 1.2, 2, 3])[:, None] * directions


def errors(kernel, embedding, dim, n_features, rng, bandwidth=BANDWIDTH):
    """Errors of phi(x)^T phi(y) for six y, with frequencies drawn for another `bandwidth`."""
    x = rng.normal(size=dim)
    y = points_around(x, rng)
    drawn = draw_features(kernel, n_features, embedding, dim, bandwidth, rng)
    approximate = features(y, *drawn, embedding) @ features(x[None], *drawn, embedding)[0]
    return approximate - kernel(y, x[None], BANDWIDTH)[:, 0]


def hoeffding(embedding, null_probability):
    """Bound that the largest of six errors exceeds with at most `null_probability`.

    phi(x)^T phi(y) is the mean of independent terms: D/2 of cos(w^T (x - y)) in [-1, 1], or D of
    2 cos(w^T x + b) cos(w^T y + b) in [-2, 2].
    """
    width, n_terms = (2, N_FEATURES // 2) if embedding == "pairs" else (4, N_FEATURES)
    return width * math.sqrt(math.log(2 * 6 / null_probability) / (2 * n_terms))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_inner_products_tend_to_the_kernel(name, embedding, dim):
    """Fails for a right spectrum with a probability of at most 1e-6 in each of the 66 cases."""
    found = errors(KERNELS[name], embedding, dim, N_FEATURES, np.random.default_rng(dim))
    assert np.abs(found).max() < hoeffding(embedding, 1e-6)
    if embedding == "pairs":
        assert abs(found[0]) < 1e-10


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("factor", [1 / 1.15, 1.15])
def test_a_spectrum_of_another_scale_would_be_seen(name, embedding, dim, factor):
    rng = np.random.default_rng(dim)
    found = errors(KERNELS[name], embedding, dim, N_FEATURES, rng, factor * BANDWIDTH)
    assert np.abs(found).max() > hoeffding(embedding, 1e-6)


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_error_falls_as_the_root_of_the_number_of_features(embedding):
    """The log of an RMS error over 300 replications has a standard deviation of about 0.04.

    That of the slope is then sqrt(2) 0.04 / log(100) = 0.013; the band is six of these.
    """
    rng = np.random.default_rng(11)
    few, many = (
        math.sqrt(np.mean([errors(Gaussian(), embedding, 2, D, rng)[3] ** 2 for _ in range(300)]))
        for D in (100, 10_000)
    )
    assert math.log(many / few) / math.log(100) == pytest.approx(-0.5, abs=0.08)


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_jacobians_match_finite_differences(embedding, dim):
    X = np.random.default_rng(dim).normal(size=(5, dim))
    phi = RandomFourierFeatures("matern", 40, embedding=embedding, random_state=1).fit(X)
    jacobians, step = phi.jacobian(X), 1e-6
    assert jacobians.shape == (5, 40, dim)
    for i in range(dim):
        ahead, behind = X.copy(), X.copy()
        ahead[:, i] += step
        behind[:, i] -= step
        difference = (phi.transform(ahead) - phi.transform(behind)) / (2 * step)
        np.testing.assert_allclose(jacobians[:, :, i], difference, atol=1e-7)
    np.testing.assert_allclose(phi.jacobian(X[2]), jacobians[2], rtol=1e-12)


def test_features_match_their_formulas():
    x = np.array([[0.3, -1.2]])
    phi = RandomFourierFeatures(n_features=6, random_state=3).fit(x)
    angles = phi.frequencies_ @ x[0]
    expected = math.sqrt(2 / 6) * np.concatenate([np.sin(angles), np.cos(angles)])
    np.testing.assert_allclose(phi.transform(x)[0], expected, rtol=1e-12)
    np.testing.assert_array_equal(phi.phases_, np.zeros(3))

    phi = RandomFourierFeatures(n_features=6, embedding="shifted", random_state=3).fit(x)
    expected = math.sqrt(2 / 6) * np.cos(phi.frequencies_ @ x[0] + phi.phases_)
    np.testing.assert_allclose(phi.transform(x)[0], expected, rtol=1e-12)


@pytest.mark.parametrize(("embedding", "m"), [("pairs", 5), ("shifted", 10)])
def test_shapes(embedding, m):
    X = np.random.default_rng(0).normal(size=(7, 3))
    phi = RandomFourierFeatures(n_features=10, embedding=embedding, random_state=0)
    assert phi.fit_transform(X).shape == (7, 10)
    assert phi.frequencies_.shape == (m, 3)
    assert phi.phases_.shape == (m,)
    assert (phi.n_features_in_, phi.n_features_out_) == (3, 10)
    drawn = draw_features("gaussian", 10, embedding, 3, 1.0, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn[0].T, phi.frequencies_)
    assert drawn[0].flags.c_contiguous


def test_a_seed_is_a_feature_map():
    X = np.random.default_rng(0).normal(size=(7, 3))
    maps = [RandomFourierFeatures(random_state=seed).fit_transform(X) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(maps[0], maps[1])
    assert not np.allclose(maps[0], maps[2])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda phi: pickle.loads(pickle.dumps(phi))])
def test_copies_are_the_same_map(duplicate):
    X = np.random.default_rng(0).normal(size=(7, 3))
    phi = RandomFourierFeatures(Matern(0.5), 20, bandwidth=2.0).fit(X)
    np.testing.assert_array_equal(duplicate(phi).transform(X), phi.transform(X))


def test_parameters_make_the_same_transformer():
    kernel = Matern(1.5)
    phi = RandomFourierFeatures(kernel, 21, embedding="shifted", bandwidth=2, random_state=5)
    parameters = phi.get_params()
    assert parameters["kernel"] is kernel
    again = RandomFourierFeatures(**parameters)
    assert again.get_params() == parameters
    assert repr(again) == repr(phi)
    assert phi.set_params(n_features=30, bandwidth=0.5) is phi
    assert phi.get_params() == {**parameters, "n_features": 30, "bandwidth": 0.5}


def test_parameters_set_after_fitting_wait_for_the_next_fit():
    X = np.random.default_rng(0).normal(size=(7, 3))
    phi = RandomFourierFeatures(n_features=10, random_state=0).fit(X)
    before = phi.transform(X)
    phi.set_params(embedding="shifted")
    np.testing.assert_array_equal(phi.transform(X), before)
    assert phi.fit(X).phases_.shape == (10,)


def test_an_odd_number_is_raised_for_pairs_only():
    with pytest.warns(UserWarning, match=r"n_features=7 is odd.*8 features"):
        assert checked_n_features(7, "pairs") == 8
    assert checked_n_features(7, "shifted") == 7
    assert checked_n_features(8, "pairs") == 8


# bad input ----------------------------------------------------------------------------------------

X = np.zeros((4, 2))


@pytest.mark.parametrize(
    ("options", "error", "mentions"),
    [
        ({"n_features": 1}, ValueError, ("n_features=1", "at least 2")),
        ({"n_features": 10.5}, TypeError, ("n_features=10.5", "whole number")),
        ({"n_features": "many"}, TypeError, ("n_features='many'", "whole number")),
        ({"embedding": "sines"}, ValueError, ("embedding='sines'", "'pairs'", "'shifted'")),
        ({"embedding": None}, ValueError, ("embedding=None", "'pairs'", "'shifted'")),
        ({"bandwidth": 0}, ValueError, ("bandwidth=0", "above 0")),
        ({"bandwidth": "median"}, TypeError, ("bandwidth='median'", "above 0")),
        ({"kernel": "rbf"}, ValueError, ("kernel='rbf'", "'gaussian'", "'sinc_squared'")),
        ({"kernel": "linear"}, ValueError, ("kernel='linear'", "'gaussian'", "frequencies=")),
        ({"kernel": Linear()}, ValueError, ("Linear()", "spectral density", "'laplacian'")),
        ({"kernel": _cosines}, TypeError, ("kernel=", "CustomKernel(value, frequencies=...)")),
    ],
)
def test_arguments(options, error, mentions):
    with pytest.raises(error) as caught:
        RandomFourierFeatures(**options).fit(X)
    for mention in mentions:
        assert mention in str(caught.value)


@pytest.mark.parametrize(
    ("result", "mentions"),
    [
        (np.zeros((2, 5)), ("frequencies=", "(2, 5)", "(5, 2)")),
        (np.zeros(5), ("frequencies=", "(5,)", "(5, 2)")),
        (np.full((5, 2), np.inf), ("frequencies=", "finite")),
    ],
)
def test_frequencies_of_your_own(result, mentions):
    kernel = CustomKernel(_cosines, frequencies=lambda size, dim, bandwidth, rng: result)
    with pytest.raises(ValueError) as caught:
        RandomFourierFeatures(kernel, 10).fit(X)
    for mention in mentions:
        assert mention in str(caught.value)


@pytest.mark.parametrize(
    ("points", "match"),
    [
        (np.zeros((4, 3)), r"\(4, 3\).*\(n, 2\)"),
        (np.zeros((1, 2, 2)), r"\(1, 2, 2\).*\(n, 2\)"),
        (np.full((1, 2), np.nan), "NaN"),
    ],
)
@pytest.mark.parametrize("method", ["transform", "jacobian"])
def test_points(method, points, match):
    phi = RandomFourierFeatures().fit(X)
    with pytest.raises(ValueError, match=match):
        getattr(phi, method)(points)


def test_points_to_fit():
    with pytest.raises(ValueError, match=r"shape \(2,\).*rows"):
        RandomFourierFeatures().fit(np.zeros(2))
    with pytest.raises(ValueError, match="dim=0"):
        RandomFourierFeatures().fit(np.zeros((3, 0)))
    with pytest.raises(ValueError, match="NaN"):
        RandomFourierFeatures().fit(np.full((3, 2), np.nan))


@pytest.mark.parametrize("method", ["transform", "jacobian"])
def test_not_fitted(method):
    with pytest.raises(ValueError, match=r"fit\(X\) first"):
        getattr(RandomFourierFeatures(), method)(X)


def test_unknown_parameter():
    with pytest.raises(ValueError, match=r"gamma=2 is unknown.*bandwidth"):
        RandomFourierFeatures().set_params(gamma=2)
