"""Targets: exact draws against densities, models against formulas.

A Kolmogorov-Smirnov test fails at p < 1e-6, which is the probability of a false alarm of each; with
about 30 of them in this file, no seed had to be chosen.
"""

import os
import subprocess
import sys
import warnings

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytest
from pymc.model.transform.conditioning import remove_value_transforms
from scipy import integrate, stats
from scipy.optimize import approx_fprime

from pymc_kameleon.targets import Banana, CorrelatedGaussian, Flower, Ring

pytestmark = pytest.mark.numerics

FALSE_ALARM = 1e-6
N_DRAWS = 20_000

TARGETS = [Banana(), Banana(0.1, 100.0, 2), Flower(), Ring(), Ring(3.0, 0.3, 2)]
TARGETS += [CorrelatedGaussian(), CorrelatedGaussian(3, -0.7, 1.0, 2.0), CorrelatedGaussian(1)]
FLOWERS = [Flower(), Flower(5.0, -3.0, 5, 1.0, 3), Flower(3.0, 2.9, 1, 2.0, 2), Ring(), Ring(2.0)]
CASES = [Banana(), Flower(), Ring(), CorrelatedGaussian()]

every_target = pytest.mark.parametrize("target", TARGETS, ids=repr)
every_flower = pytest.mark.parametrize("flower", FLOWERS, ids=repr)
every_case = pytest.mark.parametrize("target", CASES, ids=lambda target: type(target).__name__)


@pytest.fixture(autouse=True)
def quick_compilation():
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


def polar(flower, x):
    """Angle within a petal, distance from the ridge in scales, and radius."""
    angle = np.arctan2(x[:, 1], x[:, 0])
    r = np.hypot(x[:, 0], x[:, 1])
    ridge = flower.radius + flower.amplitude * np.cos(flower.frequency * angle)
    return np.mod(flower.frequency * angle, 2 * np.pi), (r - ridge) / flower.scale, r


def p_value(draws, grid, density):
    cdf = integrate.cumulative_simpson(density, x=grid, initial=0)
    return stats.kstest(draws, lambda x: np.interp(x, grid, cdf / cdf[-1])).pvalue


def marginal_p_values(flower, x):
    """Test angle, distance and radius against the density, integrated on a polar grid."""
    radius, amplitude, scale = flower.radius, flower.amplitude, flower.scale
    angle, distance, r = polar(flower, x)
    angles = np.linspace(0, 2 * np.pi, 801)
    ridge = radius + amplitude * np.cos(angles)
    radii = np.linspace(0, radius + abs(amplitude) + 9 * scale, 3001)
    density = radii * np.exp(-0.5 * ((radii - ridge[:, None]) / scale) ** 2)
    distances = np.linspace(-9, 9, 3001)
    radius_there = np.maximum(ridge[:, None] + scale * distances, 0)
    across = integrate.simpson(radius_there, x=angles, axis=0) * np.exp(-0.5 * distances**2)
    return {
        "angle": p_value(angle, angles, integrate.simpson(density, x=radii, axis=1)),
        "distance": p_value(distance, distances, across),
        "radius": p_value(r, radii, integrate.simpson(density, x=angles, axis=0)),
    }


@every_target
def test_model_has_the_log_density_and_its_gradient(target):
    rng, model = np.random.default_rng(1), target.model()
    log_density, gradient = model.compile_logp(), model.compile_dlogp()
    for draw in target.draw(5, rng):
        expected = approx_fprime(draw, target.log_density, 1e-6)
        np.testing.assert_allclose(gradient({"x": draw}), expected, rtol=1e-3, atol=1e-3)
    x = np.concatenate([target.draw(10, rng), 5 * rng.standard_normal((10, target.dim))])
    x = np.concatenate([x, np.zeros((1, target.dim))])
    values = [log_density({"x": point}) for point in x]
    np.testing.assert_allclose(values, target.log_density(x), rtol=1e-10)


def banana_formula(target, x):
    expected = stats.norm(0, np.sqrt(target.variance)).logpdf(x[:, 0])
    expected += stats.norm(target.bananicity * (x[:, 0] ** 2 - target.variance)).logpdf(x[:, 1])
    return expected + stats.norm.logpdf(x[:, 2:]).sum(axis=1)


def flower_formula(flower, x):
    _, distance, _ = polar(flower, x)
    return -0.5 * distance**2 - 0.5 * (x[:, 2:] ** 2).sum(axis=1)


def gaussian_formula(target, x):
    scales = np.sqrt(np.diag(target.covariance))
    np.testing.assert_allclose(scales[[0, -1]], [target.smallest_scale, target.largest_scale])
    assert target.covariance[0, 1] / (scales[0] * scales[1]) == pytest.approx(target.correlation)
    return stats.multivariate_normal(np.zeros(target.dim), target.covariance).logpdf(x)


@pytest.mark.parametrize(
    ("target", "formula"),
    [
        (Banana(), banana_formula),
        (Banana(-0.1, 4.0, 3), banana_formula),
        (CorrelatedGaussian(), gaussian_formula),
        (CorrelatedGaussian(3, -0.7, 1.0, 2.0), gaussian_formula),
        *((flower, flower_formula) for flower in FLOWERS),
    ],
)
def test_log_density_against_its_formula(target, formula):
    x = 0.3 * np.random.default_rng(2).standard_normal((50, target.dim))
    x += target.draw(50, np.random.default_rng(3))
    found, expected = target.log_density(x), formula(target, x)
    if formula is flower_formula:  # up to a constant, which `test_flower_is_normalised` has
        found, expected = np.diff(found), np.diff(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("flower", [Flower(dim=2), Flower(3.0, 2.9, 1, 2.0, 2), Ring(dim=2)])
def test_flower_is_normalised(flower):
    angles = np.linspace(0, 2 * np.pi, 2001)
    radii = np.linspace(0, flower.radius + abs(flower.amplitude) + 10 * flower.scale, 4001)
    x = radii * np.stack([np.cos(angles), np.sin(angles)])[..., None]
    density = radii * np.exp(flower.log_density(np.moveaxis(x, 0, -1)))
    total = integrate.simpson(integrate.simpson(density, x=radii, axis=1), x=angles)
    assert total == pytest.approx(1, abs=1e-6)


@every_target
def test_exact_draws_have_their_quantile_statistic_and_last_coordinate(target):
    draws = target.draw(N_DRAWS, np.random.default_rng(5))
    assert draws.shape == (N_DRAWS, target.dim)
    reference = stats.chi2(target.degrees_of_freedom)
    assert stats.kstest(target.quantile_statistic(draws), reference.cdf).pvalue > FALSE_ALARM
    if isinstance(target, CorrelatedGaussian) or target.dim > 2:
        scale = target.scales[-1] if isinstance(target, CorrelatedGaussian) else 1.0
        assert stats.kstest(draws[:, -1], stats.norm(0, scale).cdf).pvalue > FALSE_ALARM


@every_flower
def test_marginals_of_flowers(flower):
    draws = flower.draw(N_DRAWS, np.random.default_rng(7))
    p_values = marginal_p_values(flower, draws)
    assert min(p_values.values()) > FALSE_ALARM, p_values


def test_quantile_error_of_known_cases():
    target = CorrelatedGaussian(2, 0.0, 1.0, 1.0)
    q = np.arange(1, 10) / 10
    inside, outside = np.zeros((4, 2)), np.full((4, 2), 100.0)
    np.testing.assert_allclose(target.quantile_error(inside), 1 - q)
    np.testing.assert_allclose(target.quantile_error(outside), q)
    both = np.stack([inside, outside])
    np.testing.assert_allclose(target.quantile_error(both), np.abs(0.5 - q))
    np.testing.assert_allclose(target.quantile_error(both, [0.25]), [0.25])
    # P(chi-squared with 2 degrees of freedom < 2) = 1 - exp(-1) = 0.63
    np.testing.assert_allclose(target.quantile_error([[1.0, 1.0]], [0.63, 0.64]), [0.63, 0.36])


@pytest.mark.slow
@pytest.mark.parametrize("target", [Banana(), Flower()], ids=repr)
def test_compiles_with_numba_without_object_mode(target):
    model = target.model()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*object mode.*")
        function = model.compile_fn([model.logp(), model.dlogp()], mode="NUMBA")
        x = target.draw(1, np.random.default_rng(10))[0]
        log_density, gradient = function({"x": x})
    assert log_density == pytest.approx(target.log_density(x), rel=1e-10)
    assert np.isfinite(gradient).all()


@every_target
def test_starts_are_finite(target):
    model = target.model()
    start = model.initial_point()
    assert start["x"].shape == (target.dim,)
    expected = np.zeros(target.dim)
    if isinstance(target, Flower):
        expected[0] = target.radius + target.amplitude
    np.testing.assert_array_equal(start["x"], expected)
    assert target.quantile_statistic(np.zeros(target.dim)) < np.inf
    log_density, gradient = model.compile_logp(), model.compile_dlogp()
    for x in (start["x"], np.zeros(target.dim), np.full(target.dim, 1e-200)):
        assert np.isfinite(log_density({"x": x}))
        assert np.isfinite(gradient({"x": x})).all()


@every_case
def test_prior_draws_are_exact_draws(target):
    model = target.model()
    assert [variable.name for variable in model.free_RVs] == ["x"]
    assert model.rvs_to_transforms[model["x"]] is None
    x = pm.draw(model["x"], draws=2000, random_seed=12)
    reference = stats.chi2(target.degrees_of_freedom)
    assert stats.kstest(target.quantile_statistic(x), reference.cdf).pvalue > FALSE_ALARM
    shape = pm.draw(model["x"][None], random_seed=13).shape
    assert shape == (1, target.dim)


@pytest.mark.slow
def test_models_survive_a_new_process():
    models = {repr(target): (target, target.model()) for target in CASES}
    code = (
        "import sys, cloudpickle, numpy as np, pymc as pm\n"
        "for target, model in cloudpickle.load(sys.stdin.buffer).values():\n"
        "    x = pm.draw(model['x'], random_seed=1, mode='FAST_COMPILE')\n"
        "    value = model.compile_logp(mode='FAST_COMPILE')({'x': x})\n"
        "    np.testing.assert_allclose(value, target.log_density(x), rtol=1e-10)\n"
        "    assert np.isfinite(model.initial_point()['x']).all()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=cloudpickle.dumps(models),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode()


def test_models_can_be_transformed():
    model = remove_value_transforms(Banana().model())
    x = np.ones(8)
    assert model.compile_logp()({"x": x}) == pytest.approx(Banana().log_density(x), rel=1e-10)


def test_equality_follows_from_the_parameters():
    assert Banana() == Banana(0.03, 100.0, 8) != Banana(0.1)
    assert hash(Ring(5.0)) == hash(Ring(5.0))
    assert Ring() != Flower(amplitude=0.0, frequency=1)
    assert cloudpickle.loads(cloudpickle.dumps(Flower())) == Flower()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Banana(dim=1), ValueError, "dim=1: take a whole number of at least 2"),
        (lambda: Banana(dim=2.5), TypeError, "dim=2.5"),
        (lambda: Banana(variance=0), ValueError, "variance=0: take a finite number above 0"),
        (lambda: Banana(bananicity=np.nan), ValueError, "bananicity=nan: take a finite number"),
        (lambda: Banana(bananicity="a"), ValueError, "bananicity='a': take a finite number"),
        (lambda: Flower(amplitude=10.0), ValueError, "amplitude=10.0.*between -10 and 10"),
        (lambda: Flower(frequency=2.5), TypeError, "frequency=2.5: take a whole number"),
        (lambda: Ring(scale=-1.0), ValueError, "scale=-1.0: take a finite number above 0"),
        (lambda: CorrelatedGaussian(correlation=1.0), ValueError, "correlation=1.0.*-1 and 1"),
        (lambda: CorrelatedGaussian(smallest_scale=20.0), ValueError, "exceed largest_scale=10.0"),
        (lambda: Banana().log_density(np.zeros((8, 3))), ValueError, r"shape \(8, 3\).*dim=8"),
        (lambda: Banana().quantile_error(np.zeros((3, 8)), (0.5, 1.0)), ValueError, r"=\(0.5, 1"),
        (lambda: Banana().quantile_error(np.zeros((0, 8))), ValueError, r"shape \(0, 8\)"),
    ],
)
def test_errors_name_the_argument(build, error, message):
    with pytest.raises(error, match=message):
        build()
