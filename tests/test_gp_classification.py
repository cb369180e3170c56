"""Estimated marginal likelihood of a Gaussian-process classifier, against exact values."""

import pickle
import warnings
from functools import cache

import cloudpickle
import latent_data
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from latent_likelihoods import Logit as OtherLogit
from scipy.stats import multivariate_normal

from pymc_kameleon.latent_gp.quadrature import quadrature_moments
from pymc_kameleon.latent_gp.tilted_moments import Logit, Probit
from pymc_kameleon.pseudo_marginal import (
    GPClassificationEstimator,
    gp_classification_loglikelihood,
)

pytestmark = pytest.mark.numerics

X = np.array([[0.0, 0.3], [0.4, -0.2], [0.5, 0.6], [2.0, -1.0], [-1.5, 0.8]])
Y = np.array([1, 1, -1, 1, -1])
LENGTHSCALES = np.array([0.8, 1.5])
JITTER = 0.2
KINDS = [(a, b) for a in ("logit", "probit") for b in ("laplace", "ep")]

Z_BOUND = 4.0
"""Standard errors: a correct estimator is outside with probability 6e-5 per case."""


def kernel(amplitude, jitter=JITTER):
    scaled = X / LENGTHSCALES
    squares = ((scaled[:, None] - scaled) ** 2).sum(axis=2)
    return amplitude**2 * (np.exp(-0.5 * squares) + jitter * np.eye(5))


def exact(likelihood, covariance):
    """Marginal likelihood by the trapezoidal rule in five whitened coordinates."""
    family = {"logit": Logit, "probit": Probit}[likelihood]
    z = np.linspace(-6.0, 6.0, 23)
    mesh = np.meshgrid(*[z] * 5, indexing="ij", sparse=True)
    logs = -0.5 * sum(m**2 for m in mesh)
    for row, label in zip(np.linalg.cholesky(covariance), Y, strict=True):
        # The factor is triangular: a value needs the coordinates before it alone.
        f = sum(c * m for c, m in zip(row, mesh, strict=True) if c != 0.0)
        logs = logs + family(np.array([float(label)])).elementwise(f[..., None])[..., 0]
    return np.exp(logs).sum() * ((z[1] - z[0]) / np.sqrt(2 * np.pi)) ** 5


exact_kernel = cache(lambda likelihood, amplitude: exact(likelihood, kernel(amplitude)))


def estimator(likelihood="logit", approximation="laplace", **options):
    options = {"jitter": JITTER} | options
    return GPClassificationEstimator(
        X, Y, likelihood=likelihood, approximation=approximation, **options
    )


def standard_errors(values, truth):
    """How many standard errors the mean of `values` is from the truth."""
    return (values.mean() - truth) / (values.std(ddof=1) / np.sqrt(len(values)))


@pytest.mark.parametrize(
    "likelihood, approximation, amplitude, prior_share, n_importance, n_estimates",
    [
        ("logit", "laplace", 0.7, 0.0, 400, 500),
        ("probit", "ep", 1.5, 0.05, 400, 500),
        # 0.3 of 1 or 7 draws is no whole number.
        ("logit", "ep", 1.5, 0.3, 1, 10_000),
        ("probit", "laplace", 1.5, 0.3, 7, 10_000),
    ],
)
def test_mean_is_the_marginal_likelihood(
    likelihood, approximation, amplitude, prior_share, n_importance, n_estimates
):
    one = estimator(likelihood, approximation, prior_share=prior_share)
    density, rng = one.approximate(LENGTHSCALES, amplitude), np.random.default_rng(1)
    if not prior_share:
        # The variance is finite: prior^2 / q can be integrated.
        assert np.linalg.eigvalsh(density.factor @ density.factor.T)[-1] < 2.0
    values = np.exp([one.estimate(density, n_importance, rng) for _ in range(n_estimates)])
    assert abs(standard_errors(values, exact_kernel(likelihood, amplitude))) < Z_BOUND


@pytest.mark.parametrize("likelihood, approximation", KINDS)
def test_estimates_are_precise_on_glass(likelihood, approximation):
    inputs, labels = latent_data.glass()
    one = GPClassificationEstimator(
        inputs, labels, likelihood=likelihood, approximation=approximation
    )
    rng = np.random.default_rng(5)
    density = one.approximate(np.full(9, 3.0), 1.0)
    # Five times what was measured, 0.02 to 0.08.
    assert np.std([one.estimate(density, 100, rng) for _ in range(30)]) < 0.4


@pytest.mark.parametrize(
    "mean, variance",
    [(0, 1), (-3, 0.04), (3, 100), (-40, 25), (9, 190), (-90, 900), (-3e6, 1e12), (1e5, 1e12)],
)
def test_logit_moments(mean, variance):
    """The last ones are in cavities that are broad against the sigmoid."""
    cavity = np.array([float(mean)]), np.array([float(variance)])
    moments = Logit([1.0]).tilted_moments(*cavity)
    mirrored = Logit([-1.0]).tilted_moments(-cavity[0], cavity[1])
    assert mirrored.slope == -moments.slope
    assert mirrored.log_normaliser == moments.log_normaliser
    if variance > 200:
        expected = quadrature_moments(OtherLogit([1.0]), *cavity)
        assert abs(moments.slope - expected.slope) * np.sqrt(variance) < 1e-4
        assert moments.shrinkage == pytest.approx(expected.shrinkage, rel=1e-4)
        return
    expected = quadrature_moments(OtherLogit([1.0]), *cavity, tolerance=1e-10)
    deviation = np.sqrt(expected.shrinkage / variance)
    assert moments.log_normaliser == pytest.approx(expected.log_normaliser, rel=1e-8, abs=1e-9)
    assert abs(moments.slope - expected.slope) / deviation < 1e-7
    assert moments.shrinkage == pytest.approx(expected.shrinkage, rel=1e-7)
    assert variance * moments.curvature == pytest.approx(1 - expected.shrinkage, abs=1e-7)


@pytest.mark.parametrize("family", [Logit, Probit])
def test_likelihoods_and_their_derivatives(family):
    likelihood = family([1, -1, 1, -1])
    f = np.array([0.3, -0.7, -12.0, 12.0])
    high, low = likelihood.terms(f + 1e-5), likelihood.terms(f - 1e-5)
    terms = likelihood.terms(f)
    np.testing.assert_allclose((high[:3] - low[:3]) / 2e-5, terms[1:], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(likelihood.elementwise(f), terms[0])
    assert likelihood.value(f) == pytest.approx(terms[0].sum())
    np.testing.assert_allclose(likelihood.elementwise(np.stack([f, -f]))[0], terms[0])
    far = likelihood.terms(np.array([1e8, 1e8, -1e8, -1e8]))
    assert np.all(np.isfinite(far))


def one_estimate(y=Y, inputs=X, lengthscales=LENGTHSCALES, amplitude=1.0, **options):
    one = GPClassificationEstimator(inputs, y, **options)
    return one(lengthscales, amplitude, 11, np.random.default_rng(6))


def test_equal_arguments_give_equal_estimates():
    expected = one_estimate(Y)
    for labels in ((Y + 1) // 2, Y > 0, Y.astype(float)):
        assert one_estimate(labels) == expected
    assert one_estimate(-Y) != expected
    assert one_estimate(lengthscales=0.7) == one_estimate(lengthscales=np.array([0.7, 0.7]))
    one = estimator("probit", "ep")
    for dumps in (pickle.dumps, cloudpickle.dumps):
        both = one, pickle.loads(dumps(one))
        values = [e(LENGTHSCALES, 1.0, 10, np.random.default_rng(7)) for e in both]
        assert values[0] == values[1]


@pytest.mark.parametrize("likelihood, approximation", [("logit", "ep"), ("probit", "laplace")])
@pytest.mark.parametrize(
    "lengthscales, amplitude",
    [(1e-8, 1), (1e8, 1), (np.array([1e-8, 1e8]), 1), (np.inf, 1), (1, 1e-200), (1, 1e6)],
)
def test_extreme_hyperparameters(likelihood, approximation, lengthscales, amplitude):
    options = {"likelihood": likelihood, "approximation": approximation}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = one_estimate(lengthscales=lengthscales, amplitude=amplitude, **options)
    assert np.isfinite(value)
    assert value < np.log(2.0)
    if np.all(lengthscales == 1e-8) and approximation == "ep":
        # All values of the function are independent.
        assert value == pytest.approx(5 * np.log(0.5), abs=0.2)


def test_value_in_a_graph():
    lengthscales, amplitude = pt.vector("lengthscales"), pt.scalar("amplitude")
    graph = gp_classification_loglikelihood(
        X, Y, lengthscales, amplitude=amplitude, likelihood="probit", n_importance=400
    )
    evaluate = pytensor.function([lengthscales, amplitude], graph, mode="FAST_COMPILE")
    # log p(y) is a normal probability.
    covariance = np.eye(5) + Y[:, None] * kernel(1.1, jitter=1e-6) * Y
    exact_value = multivariate_normal(np.zeros(5), covariance, seed=0).logcdf(np.zeros(5))
    assert evaluate(LENGTHSCALES, 1.1) == pytest.approx(exact_value, abs=0.3)
    assert np.isnan(evaluate(LENGTHSCALES, -1.1))


def test_no_hyperparameters_of_a_kernel():
    for lengthscales in (0.0, -1.0, np.array([1.0, np.nan])):
        assert np.isnan(one_estimate(lengthscales=lengthscales))
    for amplitude in (np.nan, 0.0, -2.0, np.inf, 1e200):
        assert np.isnan(one_estimate(lengthscales=1.0, amplitude=amplitude))
    equal = np.zeros((5, 2))
    assert np.isnan(one_estimate(inputs=equal, jitter=0.0))
    assert np.isfinite(one_estimate(inputs=equal))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"X": X[:, 0]}, ValueError, r"X has shape \(5,\)"),
        ({"X": np.where(X > 1, np.nan, X)}, ValueError, r"X\[3, 0\] is nan"),
        ({"X": pt.matrix()}, TypeError, "X is a TensorVariable"),
        ({"y": Y[:4]}, ValueError, r"y has shape \(4,\) and X has 5 rows"),
        ({"y": Y + 5}, ValueError, r"y has 2 different values \(4, 6\)"),
        ({"y": np.array([1, 0, -1, 1, 0])}, ValueError, "y has 3 different values"),
        ({"y": np.array(list("abcde"))}, TypeError, "y == name_of_a_class"),
        ({"lengthscales": np.ones(3)}, ValueError, r"lengthscales has shape \(3,\)"),
        ({"lengthscales": pt.vector(shape=(3,))}, ValueError, r"lengthscales has shape \(3,\)"),
        ({"lengthscales": np.ones((2, 2))}, ValueError, "lengthscales has shape"),
        ({"lengthscales": [1.0, -1.0]}, ValueError, "lengthscales=.*positive"),
        ({"amplitude": 0.0}, ValueError, "amplitude=0.*positive"),
        ({"amplitude": np.ones(2)}, ValueError, "amplitude has 1 dimensions"),
        ({"likelihood": "cauchit"}, ValueError, "likelihood='cauchit': take 'logit' or 'probit'"),
        ({"approximation": "EP"}, ValueError, "approximation='EP': take 'laplace' or 'ep'"),
        ({"n_importance": 0}, ValueError, "n_importance=0"),
        ({"jitter": -1e-6}, ValueError, "jitter=-1e-06"),
        ({"prior_share": 1.0}, ValueError, r"prior_share=1.0: take a number in \[0, 1\)"),
        ({"prior_share": -0.1}, ValueError, "prior_share=-0.1"),
    ],
)
def test_errors(arguments, error, message):
    arguments = {"X": X, "y": Y, "lengthscales": 1.0} | arguments
    with pytest.raises(error, match=message):
        gp_classification_loglikelihood(**arguments)


# in a model -----------------------------------------------------------------------------------
