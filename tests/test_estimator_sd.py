"""How noisy an estimated likelihood is, and the number of samples that is recommended."""

import models
import numpy as np
import pymc as pm
import pytest

from pymc_kameleon.diagnostics import estimator_sd
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood


def noisy(noise, n_samples=None, name="loglike"):
    """A term with log-normal noise of that standard deviation, over the root of `n_samples`."""

    def estimate(x, n, rng):
        sd = noise / np.sqrt(n)
        return -0.5 * np.sum(x**2) + sd * rng.standard_normal() - 0.5 * sd**2

    def plain(x, rng):
        return estimate(x, 1, rng)

    fn = plain if n_samples is None else estimate
    with pm.Model() as model:
        x = pm.HalfNormal("x", shape=2)
        pm.Potential(name, estimated_loglikelihood(fn, x, n_samples=n_samples))
    return model


POINT = {"x": [0.5, 2.0]}


def test_standard_deviation_and_its_error():
    """At 4.9 standard errors, which a normal exceeds with probability 1e-6."""
    result = estimator_sd(noisy(0.8), POINT, n_estimates=4000, random_seed=1)
    assert abs(result.sd - 0.8) < 4.9 * result.standard_error
    np.testing.assert_allclose(result.standard_error, 0.8 / np.sqrt(2 * 4000), rtol=0.2)
    assert float(result) == result.sd
    assert result.n_samples == {} and result.recommended is None


@pytest.mark.parametrize("noise", [0.3, 10.0, 40.0])
@pytest.mark.parametrize("aim", [1.0, 1.3])
def test_recommended_number_of_samples(noise, aim):
    """It follows an estimate of the standard deviation to 5 %, so itself is right to 50 %."""
    model = noisy(noise, n_samples=10)
    result = estimator_sd(model, POINT, n_estimates=200, aim=aim, random_seed=2, max_factor=1000)
    assert result.n_samples == {"loglike": 10}
    exact = max(1.0, (noise / aim) ** 2)
    assert exact / 1.5 <= result.recommended["loglike"] <= max(1.5 * exact, 1)
    nearest = result.measured.iloc[(result.measured["sd"] - aim).abs().argmin()]
    assert abs(np.log(nearest["sd"] / aim)) < 0.35 or result.recommended["loglike"] == 1
    count = result.recommended["loglike"]
    assert f"10 samples now, {'1 is enough' if count == 1 else f'{count} for'}" in str(result)


def test_the_model_keeps_its_number_of_samples():
    model = noisy(5.0, n_samples=10)
    count = model["loglike"].owner.inputs[-1]
    while count.owner is not None:
        count = count.owner.inputs[-1]
    estimator_sd(model, POINT, n_estimates=20, random_seed=3)
    assert count.get_value() == 10


def test_one_seed_is_one_result():
    model = noisy(3.0, n_samples=10)
    first, second = (str(estimator_sd(model, POINT, random_seed=4)) for _ in range(2))
    assert first == second != str(estimator_sd(model, POINT, random_seed=5))


def test_noise_that_does_not_fall():
    def heavy(x, n_samples, rng):
        return 5.0 * rng.standard_normal()

    with pm.Model():
        pm.Potential("loglike", estimated_loglikelihood(heavy, pm.Normal("x"), n_samples=3))
        result = estimator_sd(n_estimates=20, random_seed=1)
    assert result.recommended is None
    assert len(result.measured) > 1
    assert "No number" in str(result) and "better importance density" in str(result)


def test_estimates_of_zero():
    def hit_or_miss(x, n_samples, rng):
        hits = rng.random(n_samples) < 0.05
        return np.log(np.mean(hits)) if hits.any() else -np.inf

    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("loglike", estimated_loglikelihood(hit_or_miss, x, n_samples=5))
    result = estimator_sd(model, random_seed=1)
    assert result.sd == np.inf and 50 < result.n_zero < 95
    assert f"{result.n_zero} of 100 estimates are zero" in str(result)
    assert result.recommended["loglike"] > 5
    assert f"{result.recommended['loglike']} give no estimates of zero" in str(result)


def test_a_number_between_two_that_were_measured():
    """At n = 1 and 2 the noise is 1.57 and 1.08, which has the aim of 1.3 between."""

    def estimate(x, n_samples, rng):
        return rng.normal(0.0, {1: 1.57, 2: 1.08}[n_samples])

    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("loglike", estimated_loglikelihood(estimate, x, n_samples=1))
    for seed in range(5):
        result = estimator_sd(model, random_seed=seed)
        assert result.recommended["loglike"] in (1, 2)


def test_several_estimates_are_judged_by_their_sum():
    def estimate(x, n_samples, rng):
        return rng.normal(0.0, 3.0 / np.sqrt(n_samples))

    with pm.Model() as model:
        x = pm.Normal("x")
        for name, n_samples in (("a", 1), ("b", 2)):
            pm.Potential(name, estimated_loglikelihood(estimate, x, n_samples=n_samples))
    result = estimator_sd(model, n_estimates=4000, random_seed=1, max_factor=1)
    assert abs(result.sd - 3.0 * np.sqrt(1.5)) < 4.9 * result.standard_error
    result = estimator_sd(model, n_estimates=200, random_seed=1)
    assert set(result.recommended) == {"a", "b"}
    assert result.recommended["b"] in range(
        2 * result.recommended["a"] - 1, 2 * result.recommended["a"] + 2
    )


def test_too_many_samples_and_the_right_number():
    assert "too many" in str(estimator_sd(noisy(0.5), POINT, random_seed=1))
    assert "enough" in str(estimator_sd(noisy(1.4), POINT, random_seed=1, n_estimates=1000))
    assert "times as many" in str(estimator_sd(noisy(9.0), POINT, random_seed=1))


def test_an_estimate_of_the_users_own_operation():
    model, _ = models.black_box(noise=1.5)
    result = estimator_sd(model, {"x": [0.0, 1.0]}, n_estimates=2000)
    assert abs(result.sd - 1.5) < 4.9 * result.standard_error


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({}, "x missing"),
        ({"x": [1.0, 2.0], "z": 1.0}, "z unknown"),
        ({"x": [1.0, 2.0, 3.0]}, r"x has shape \(3,\).*\(2,\)"),
        ({"x": 1.0}, r"x has shape \(\).*\(2,\)"),
        ({"x": ["a", "b"]}, "x is .*take numbers"),
        ([1.0], "point=.*take a dict"),
    ],
)
def test_bad_points(point, message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimator_sd(noisy(1.0), point)


def test_a_point_of_a_discrete_variable():
    with pm.Model() as model:
        count = pm.Poisson("count", 3)
        term = estimated_loglikelihood(lambda k, rng: rng.normal(0, k), count)
        pm.Potential("loglike", term)
    result = estimator_sd(model, {"count": 2}, n_estimates=4000, random_seed=1)
    assert abs(result.sd - 2.0) < 4.9 * result.standard_error
    with pytest.raises(ValueError, match="count is discrete"):
        estimator_sd(model, {"count": 2.7})


def test_what_has_no_noise_to_measure():
    with pytest.raises(ValueError, match="no estimated term"):
        estimator_sd(models.normal(1)[0])

    def broken(x, rng):
        return np.nan

    with pm.Model() as model:
        pm.Potential("loglike", estimated_loglikelihood(broken, pm.Normal("x")))
    with pytest.raises(ValueError, match="NaN"):
        estimator_sd(model)
    with pytest.raises(ValueError, match="n_estimates"):
        estimator_sd(model, n_estimates=5)
