"""Random Fourier features against the kernels that they approximate."""

import copy
import math
import pickle

import numpy as np
import pytest
from test_kernels import SPECTRAL, _cosines

from pymc_kameleon.kernels import CustomKernel, Linear, Matern
from pymc_kameleon.kernels.random_features import (
    EMBEDDINGS,
    RandomFourierFeatures,
    checked_n_features,
    draw_features,
    features,
)

pytestmark = pytest.mark.numerics


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


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize(("embedding", "dim"), [("pairs", 8), ("shifted", 1)])
def test_inner_products_tend_to_the_kernel(name, embedding, dim):
    """Fails for a right spectrum with a probability of at most 1e-6 in each of the 26 cases.

    A spectrum of another scale would be seen.
    """
    bound = hoeffding(embedding, 1e-6)
    found, shorter, longer = (
        errors(SPECTRAL[name], embedding, dim, N_FEATURES, np.random.default_rng(dim), bandwidth)
        for bandwidth in (BANDWIDTH, BANDWIDTH / 1.15, BANDWIDTH * 1.15)
    )
    assert np.abs(found).max() < bound
    assert min(np.abs(shorter).max(), np.abs(longer).max()) > bound
    if embedding == "pairs":
        assert abs(found[0]) < 1e-10


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("dim", [1, 8])
def test_jacobians_match_finite_differences(embedding, dim):
    points = np.random.default_rng(dim).normal(size=(5, dim))
    phi = RandomFourierFeatures("matern", 40, embedding=embedding, random_state=1).fit(points)
    jacobians, step = phi.jacobian(points), 1e-6 * np.eye(dim)
    assert jacobians.shape == (5, 40, dim)
    for i in range(dim):
        difference = (phi.transform(points + step[i]) - phi.transform(points - step[i])) / 2e-6
        np.testing.assert_allclose(jacobians[:, :, i], difference, atol=1e-7)
    np.testing.assert_allclose(phi.jacobian(points[2]), jacobians[2], rtol=1e-12)


@pytest.mark.parametrize(("embedding", "m"), [("pairs", 5), ("shifted", 10)])
def test_features_match_their_formulas(embedding, m):
    points = np.random.default_rng(0).normal(size=(7, 3))
    phi = RandomFourierFeatures(n_features=10, embedding=embedding, random_state=0)
    found = phi.fit_transform(points)
    assert phi.frequencies_.shape == (m, 3) and phi.phases_.shape == (m,)
    assert (phi.n_features_in_, phi.n_features_out_) == (3, 10)
    angles = points @ phi.frequencies_.T + phi.phases_
    parts = [np.sin(angles), np.cos(angles)] if embedding == "pairs" else [np.cos(angles)]
    np.testing.assert_allclose(found, math.sqrt(2 / 10) * np.hstack(parts), rtol=1e-12)
    assert np.all(phi.phases_ == 0) == (embedding == "pairs")
    drawn = draw_features("gaussian", 10, embedding, 3, 1.0, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn[0].T, phi.frequencies_)
    assert drawn[0].flags.c_contiguous


def test_a_seed_is_a_feature_map_and_so_are_its_copies():
    points = np.random.default_rng(0).normal(size=(7, 3))
    fits = [RandomFourierFeatures(Matern(0.5), 20, random_state=k).fit(points) for k in (1, 1, 2)]
    first, same, other = (phi.transform(points) for phi in fits)
    np.testing.assert_array_equal(first, same)
    assert not np.allclose(first, other)
    for duplicate in (copy.deepcopy(fits[0]), pickle.loads(pickle.dumps(fits[0]))):
        np.testing.assert_array_equal(duplicate.transform(points), first)


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
    points = np.random.default_rng(0).normal(size=(7, 3))
    phi = RandomFourierFeatures(n_features=10, random_state=0).fit(points)
    before = phi.transform(points)
    phi.set_params(embedding="shifted")
    np.testing.assert_array_equal(phi.transform(points), before)
    assert phi.fit(points).phases_.shape == (10,)


def test_an_odd_number_is_raised_for_pairs_only():
    with pytest.warns(UserWarning, match=r"n_features=7 is odd.*8 features"):
        assert checked_n_features(7, "pairs") == 8
    assert checked_n_features(7, "shifted") == 7
    assert checked_n_features(8, "pairs") == 8


X = np.zeros((4, 2))


def fit(points=X, **options):
    return RandomFourierFeatures(**options).fit(points)


def fit_own(frequencies):
    return fit(kernel=CustomKernel(_cosines, frequencies=lambda *_: frequencies), n_features=10)


REFUSALS = [
    (lambda: fit(n_features=1), ValueError, "n_features=1: .*at least 2"),
    (lambda: fit(n_features=10.5), TypeError, "n_features=10.5: .*whole number"),
    (lambda: fit(n_features="many"), TypeError, "n_features='many': .*whole number"),
    (lambda: fit(embedding="sines"), ValueError, "embedding='sines'.*'pairs'.*'shifted'"),
    (lambda: fit(embedding=None), ValueError, "embedding=None.*'pairs'.*'shifted'"),
    (lambda: fit(bandwidth=0), ValueError, "bandwidth=0.*above 0"),
    (lambda: fit(bandwidth="median"), TypeError, "bandwidth='median'.*above 0"),
    (lambda: fit(kernel="rbf"), ValueError, "kernel='rbf'.*'gaussian'.*'sinc_squared'"),
    (lambda: fit(kernel="linear"), ValueError, "kernel='linear'.*'gaussian'.*frequencies="),
    (lambda: fit(kernel=Linear()), ValueError, r"Linear\(\).*spectral density.*'laplacian'"),
    (lambda: fit(kernel=_cosines), TypeError, r"kernel=.*CustomKernel\(value, frequencies="),
    (lambda: fit_own(np.zeros((2, 5))), ValueError, r"frequencies=.*\(2, 5\).*\(5, 2\)"),
    (lambda: fit_own(np.zeros(5)), ValueError, r"frequencies=.*\(5,\).*\(5, 2\)"),
    (lambda: fit_own(np.full((5, 2), np.inf)), ValueError, "frequencies=.*finite"),
    (lambda: fit(np.zeros(2)), ValueError, r"shape \(2,\).*rows"),
    (lambda: fit(np.zeros((3, 0))), ValueError, "dim=0"),
    (lambda: fit(np.full((3, 2), np.nan)), ValueError, "NaN"),
    (lambda: fit().transform(np.zeros((4, 3))), ValueError, r"\(4, 3\).*\(n, 2\)"),
    (lambda: fit().jacobian(np.zeros((4, 3))), ValueError, r"\(4, 3\).*\(n, 2\)"),
    (lambda: fit().transform(np.zeros((1, 2, 2))), ValueError, r"\(1, 2, 2\).*\(n, 2\)"),
    (lambda: fit().jacobian(np.full((1, 2), np.nan)), ValueError, "NaN"),
    (lambda: RandomFourierFeatures().transform(X), ValueError, r"fit\(X\) first"),
    (lambda: RandomFourierFeatures().jacobian(X), ValueError, r"fit\(X\) first"),
    (lambda: fit().set_params(gamma=2), ValueError, "gamma=2 is unknown.*bandwidth"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
