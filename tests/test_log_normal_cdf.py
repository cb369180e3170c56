"""log Phi and its derivatives against arithmetic of sixty digits, alone and within models."""

import mpmath
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from models import UNCOMPILED
from scipy.special import erf, expit, gammaln

from pymc_kameleon.latent_gp.reader.log_normal_cdf import log_normal_cdf, with_stable_normal_cdf
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction

pytestmark = pytest.mark.numerics

POINTS = np.concatenate(
    [
        -np.geomspace(1e4, 0.01, 60),
        [-17.001, -17.0, -16.999, -16.3, -1.0, 0.0, 1.0, 6.0, 8.3, 37.0, 38.4],
        np.geomspace(0.01, 40.0, 30),
    ]
)
TAILS = np.array([-1e4, -1e3, -50.0, -20.5, -10.0, -5.0, -0.5, 0.7, 3.0, 12.0, 40.0])


def exact(points):
    """Array (4, n): log Phi and its first three derivatives."""
    rows = []
    with mpmath.workdps(60):
        for point in points:
            z = mpmath.mpf(float(point))
            upper, lower = mpmath.ncdf(-z), mpmath.ncdf(z)
            value = mpmath.log1p(-upper) if z > 0 else mpmath.log(lower)
            ratio = mpmath.npdf(z) / lower
            u = z + ratio
            row = (value, ratio, -ratio * u, -ratio * (1 - u * (z + 2 * ratio)))
            rows.append([float(v) for v in row])
    return np.array(rows).T


def exact_with_labels(labels, points):
    """Array (4, n): log Phi(label f) and its derivatives in f."""
    return exact(labels * points) * np.stack([np.ones_like(labels), labels] * 2)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "NUMBA", "cvm"])
def test_value_and_three_derivatives(mode):
    if mode == "cvm" and not pytensor.config.cxx:
        pytest.skip("there is no C compiler")
    z = pt.dvector("z")
    outputs = [log_normal_cdf(z)]
    for _ in range(3):
        outputs.append(pytensor.grad(outputs[-1].sum(), z))
    found = np.stack(pytensor.function([z], outputs, mode=mode)(POINTS))
    assert np.all(np.isfinite(found))
    # Beyond 37 the derivatives are denormal numbers, and then zero.
    np.testing.assert_allclose(found, exact(POINTS), rtol=3e-9, atol=1e-300)
    np.testing.assert_allclose(found[:3], exact(POINTS)[:3], rtol=1e-10, atol=1e-300)


def test_there_is_no_fourth_derivative():
    z = pt.dvector("z")
    last = log_normal_cdf(z)
    for _ in range(3):
        last = pytensor.grad(last.sum(), z)
    with pytest.raises(NotImplementedError, match="three derivatives"):
        pytensor.grad(last.sum(), z)


def bernoulli(p):
    return lambda f, labels: pm.Bernoulli("y", p=p(f), observed=(labels + 1) // 2)


def potential(value):
    return lambda f, labels: pm.Potential("y", value(f, labels))


def normal_logcdf(z):
    return pm.logcdf(pm.Normal.dist(0.0, 1.0), z)


WAYS = {
    "invprobit": bernoulli(pm.math.invprobit),
    "erf": bernoulli(lambda f: 0.5 * (1 + pt.erf(f / np.sqrt(2)))),
    "erf, symbolic root": bernoulli(lambda f: (1 + pt.erf(f / pt.sqrt(2.0))) / 2),
    "erf, integer root": bernoulli(lambda f: (1 + pt.erf(f / pm.math.sqrt(2))) / 2),
    "erf, root as factor": bernoulli(lambda f: 0.5 + 0.5 * pt.erf(np.sqrt(0.5) * f)),
    "erfc": bernoulli(lambda f: 0.5 * pt.erfc(-f / np.sqrt(2))),
    "complement": bernoulli(lambda f: 1 - pm.math.invprobit(-f)),
    "Deterministic": bernoulli(lambda f: pm.Deterministic("p", pm.math.invprobit(f))),
    "exp of logcdf": bernoulli(lambda f: pt.exp(normal_logcdf(f))),
    "Binomial": lambda f, labels: pm.Binomial(
        "y", n=1, p=pm.math.invprobit(f), observed=(labels + 1) // 2
    ),
    "log of invprobit": potential(lambda f, labels: pt.log(pm.math.invprobit(labels * f))),
    "log1mexp of logcdf": potential(
        lambda f, labels: pt.switch(labels > 0, normal_logcdf(f), pt.log1mexp(normal_logcdf(f)))
    ),
    "logcdf": potential(lambda f, labels: normal_logcdf(labels * f)),
}


def read(likelihood, labels, **kwargs):
    with pm.Model() as model:
        f = pm.MvNormal("f", np.zeros(len(labels)), cov=np.eye(len(labels)))
        likelihood(f, labels)
    return LatentFunction(model, f, compile_kwargs=UNCOMPILED, **kwargs).likelihood


LABELS = np.array([1, -1, 1, 1, -1, 1, -1, -1, 1, -1, -1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "floatX", "rounds"),
    [
        *((way, "float64", False) for way in WAYS),
        *((way, "float32", True) for way in ("invprobit", "logcdf", "Binomial")),
        ("invprobit", "float64", True),
    ],
)
def test_tails_however_phi_is_written(way, floatX, rounds):
    def likelihood(f, labels):
        WAYS[way](f.astype("float32") if rounds else f, labels)

    with pytensor.config.change_flags(floatX=floatX):
        found, expected = read(likelihood, LABELS), exact_with_labels(LABELS, TAILS)
        np.testing.assert_allclose(found.terms(TAILS), expected, rtol=1e-8, atol=1e-300)
        np.testing.assert_allclose(found.elementwise(TAILS), expected[0], rtol=1e-10)
        np.testing.assert_array_equal(found.probit_labels, LABELS)


def test_other_likelihoods_of_single_precision_factorise():
    def rounded(f, counts):
        twice = f.astype("float32").astype("float64").astype("float32")
        pm.Poisson("y", pt.exp(twice), observed=counts)

    f, counts = np.array([0.3, -1.2, 2.1]), np.array([0, 1, 12])
    likelihood = read(rounded, counts)
    expected = f * counts - np.exp(f) - gammaln(counts + 1.0)
    np.testing.assert_allclose(likelihood.elementwise(f), expected, rtol=1e-10)
    np.testing.assert_allclose(likelihood.terms(f)[1], counts - np.exp(f), rtol=1e-10)
    assert likelihood.probit_labels is None


def test_tails_of_a_normal_with_mean_and_scale():
    def likelihood(f, labels):
        pm.Potential("y", pm.logcdf(pm.Normal.dist(1.0, 2.0), labels * f))

    expected = exact((LABELS * TAILS - 1) / 2) * (LABELS / 2) ** np.arange(4)[:, None]
    found = read(likelihood, LABELS).terms(TAILS)
    # PyMC's root of two is in single precision.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-300)


def test_binomial_counts_keep_the_tails():
    counts, n = np.array([0, 1, 3, 3, 2, 0]), np.array([3, 3, 3, 3, 3, 1])
    likelihood = read(
        lambda f, _: pm.Binomial("y", n=n, p=pm.math.invprobit(f), observed=counts), counts
    )
    points = np.array([-200.0, -1e4, 40.0, -30.0, 50.0, -10.0])
    ones = np.ones(6)
    expected = counts * exact_with_labels(ones, points)
    expected += (n - counts) * exact_with_labels(-ones, points)
    expected[0] += np.log([1, 3, 1, 1, 3, 1])
    np.testing.assert_allclose(likelihood.terms(points), expected, rtol=1e-8, atol=1e-300)
    assert likelihood.probit_labels is None


def half_observed(f, labels):
    pm.Bernoulli("y", p=pm.math.invprobit(f[1:]), observed=(labels[1:] + 1) // 2)


def half_erf(x):
    return 0.5 + 0.5 * erf(x)


RELATIVES = {
    "logit": (bernoulli(pm.math.invlogit), expit),
    "scaled": (
        bernoulli(lambda f: pm.math.invprobit(1.01 * f)),
        lambda f: half_erf(1.01 * f / np.sqrt(2)),
    ),
    "shifted": (
        bernoulli(lambda f: pm.math.invprobit(f + 0.01)),
        lambda f: half_erf((f + 0.01) / np.sqrt(2)),
    ),
    "lapses": (
        bernoulli(lambda f: 0.01 + 0.98 * pm.math.invprobit(f)),
        lambda f: 0.01 + 0.98 * half_erf(f / np.sqrt(2)),
    ),
    "erf without its root": (bernoulli(lambda f: 0.5 * (1 + pt.erf(f))), half_erf),
    "one not observed": (half_observed, None),
}


@pytest.mark.parametrize("way", RELATIVES)
def test_relatives_of_phi_have_no_labels_and_keep_their_values(way):
    likelihood, probability = RELATIVES[way]
    labels, points = np.array([1, -1, -1, 1]), np.array([-1.5, -0.3, 0.4, 2.0])
    found = read(likelihood, labels)
    assert found.probit_labels is None
    if probability is not None:
        p = probability(points)
        expected = np.log(np.where(labels > 0, p, 1 - p))
        # PyMC's invprobit holds a root of two in single precision.
        np.testing.assert_allclose(found.elementwise(points), expected, rtol=1e-6)


def test_a_switch_between_different_functions_stays():
    z = pt.dvector("z")
    one_sided = pt.switch(z < -1, pt.log(pt.erfcx(-z)), pt.log1p(-0.5 * pt.erfc(z / np.sqrt(2))))
    (graph,) = with_stable_normal_cdf([one_sided])
    points = np.array([-3.0, -0.5])
    expected = pytensor.function([z], one_sided, mode="FAST_COMPILE")(points)
    found = pytensor.function([z], graph, mode="FAST_COMPILE")(points)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
