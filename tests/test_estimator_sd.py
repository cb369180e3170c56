"""How noisy an estimated likelihood is, and the number of samples that is recommended."""

import models
import numpy as np
import pymc as pm
import pytest

from pymc_kameleon.diagnostics import estimator_sd
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood


def with_estimates(fn, n_samples=None, names=("loglike",), shape=()):
    """Terms that `fn` estimates, each with its number of samples."""
    with pm.Model() as model:
        x = pm.HalfNormal("x", shape=shape)
        for i, name in enumerate(names):
            count = None if n_samples is None else n_samples * (i + 1)
            pm.Potential(name, estimated_loglikelihood(fn, x, n_samples=count))
    return model


def noisy(noise, n_samples=None, **options):
    """Terms with log-normal noise of that standard deviation, over the root of `n_samples`."""

    def estimate(x, n, rng):
        sd = noise / np.sqrt(n)
        return -0.5 * np.sum(x**2) + sd * rng.standard_normal() - 0.5 * sd**2

    def plain(x, rng):
        return estimate(x, 1, rng)

    return with_estimates(plain if n_samples is None else estimate, n_samples, **options)


POINT = {"x": 0.5}


def test_standard_deviation_and_its_error():
    """At 4.9 standard errors, which a normal exceeds with probability 1e-6."""
    result = estimator_sd(noisy(0.8), POINT, n_estimates=4000, random_seed=1)
    assert abs(result.sd - 0.8) < 4.9 * result.standard_error
    np.testing.assert_allclose(result.standard_error, 0.8 / np.sqrt(2 * 4000), rtol=0.2)
    assert float(result) == result.sd
    assert result.n_samples == {} and result.recommended is None


@pytest.mark.parametrize(("noise", "aim"), [(0.3, 1.3), (10.0, 1.0), (40.0, 1.3)])
def test_recommended_number_of_samples(noise, aim):
    """It follows an estimate of the standard deviation to 5 %, so itself is right to 50 %."""
    model = noisy(noise, n_samples=10)
    result = estimator_sd(model, POINT, n_estimates=200, aim=aim, random_seed=2, max_factor=1000)
    assert result.n_samples == {"loglike": 10}
    exact, count = max(1.0, (noise / aim) ** 2), result.recommended["loglike"]
    assert exact / 1.5 <= count <= 1.5 * exact
    nearest = result.measured.iloc[(result.measured["sd"] - aim).abs().argmin()]
    assert abs(np.log(nearest["sd"] / aim)) < 0.35 or count == 1
    assert f"10 samples now, {'1 is enough' if count == 1 else f'{count} for'}" in str(result)
    # The model keeps its own number, and one seed is one result.
    again = estimator_sd(model, POINT, n_estimates=200, aim=aim, random_seed=2, max_factor=1000)
    assert str(again) == str(result)
    assert str(estimator_sd(model, POINT, aim=aim, random_seed=5)) != str(result)


def test_noise_that_does_not_fall():
    model = with_estimates(lambda x, n_samples, rng: 5.0 * rng.standard_normal(), 3)
    result = estimator_sd(model, n_estimates=20, random_seed=1)
    assert result.recommended is None
    assert len(result.measured) > 1
    assert "No number" in str(result) and "better importance density" in str(result)


def test_estimates_of_zero():
    def hit_or_miss(x, n_samples, rng):
        hits = rng.random(n_samples) < 0.05
        return np.log(np.mean(hits)) if hits.any() else -np.inf

    result = estimator_sd(with_estimates(hit_or_miss, 5), random_seed=1)
    assert result.sd == np.inf and 50 < result.n_zero < 95
    assert f"{result.n_zero} of 100 estimates are zero" in str(result)
    assert result.recommended["loglike"] > 5
    assert f"{result.recommended['loglike']} give no estimates of zero" in str(result)


def test_a_number_between_two_that_were_measured():
    """At n = 1 and 2 the noise is 1.57 and 1.08, which has the aim of 1.3 between."""
    sd = {1: 1.57, 2: 1.08}
    model = with_estimates(lambda x, n_samples, rng: rng.normal(0.0, sd[int(n_samples)]), 1)
    for seed in range(5):
        assert estimator_sd(model, random_seed=seed).recommended["loglike"] in (1, 2)


def test_several_estimates_are_judged_by_their_sum():
    model = noisy(3.0, 1, names=("a", "b"))
    result = estimator_sd(model, n_estimates=4000, random_seed=1, max_factor=1)
    assert abs(result.sd - 3.0 * np.sqrt(1.5)) < 4.9 * result.standard_error
    counts = estimator_sd(model, n_estimates=200, random_seed=1).recommended
    assert set(counts) == {"a", "b"} and abs(counts["b"] - 2 * counts["a"]) <= 1


@pytest.mark.parametrize(
    ("noise", "words"), [(0.5, "too many"), (1.4, "enough"), (9.0, "times as many")]
)
def test_too_many_samples_and_the_right_number(noise, words):
    assert words in str(estimator_sd(noisy(noise), POINT, random_seed=1, n_estimates=1000))


def test_an_estimate_of_the_users_own_operation():
    model, _ = models.black_box(noise=1.5)
    result = estimator_sd(model, {"x": [0.0, 1.0]}, n_estimates=2000)
    assert abs(result.sd - 1.5) < 4.9 * result.standard_error


def test_a_point_of_a_discrete_variable():
    with pm.Model() as model:
        count = pm.Poisson("count", 3)
        term = estimated_loglikelihood(lambda k, rng: rng.normal(0, k), count)
        pm.Potential("loglike", term)
    result = estimator_sd(model, {"count": 2}, n_estimates=4000, random_seed=1)
    assert abs(result.sd - 2.0) < 4.9 * result.standard_error
    with pytest.raises(ValueError, match="count is discrete"):
        estimator_sd(model, {"count": 2.7})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"point": {}}, "x missing"),
        ({"point": {"x": [1.0, 2.0], "z": 1.0}}, "z unknown"),
        ({"point": {"x": [1.0, 2.0, 3.0]}}, r"x has shape \(3,\).*\(2,\)"),
        ({"point": {"x": 1.0}}, r"x has shape \(\).*\(2,\)"),
        ({"point": {"x": ["a", "b"]}}, "x is .*take numbers"),
        ({"point": [1.0]}, "point=.*take a dict"),
        ({"n_estimates": 5}, "n_estimates"),
        ({"model": models.normal(1)[0]}, "no estimated term"),
        ({"model": with_estimates(lambda x, rng: np.nan)}, "NaN"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimator_sd(**({"model": noisy(1.0, shape=2)} | arguments))
