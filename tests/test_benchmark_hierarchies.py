"""Hierarchies of the benchmarks: black boxes against the same densities written in PyTensor."""

import numpy as np
import pytensor.tensor as pt
import pytest

pytest.importorskip("benchmarks", reason="the tests are not in a clone")

from benchmarks.hierarchies import (
    DOSE,
    HOURS,
    PATIENTS,
    PLATES,
    failing,
    failure,
    log_concentration,
    log_concentrations,
    log_growth,
    log_growths,
    odes,
    population,
)

pytestmark = pytest.mark.numerics

PAIRS = {
    "numbers": (population, {}),
    "curves": (population, {"as_curve": True}),
    "not centred": (population, {"centred": False}),
    "failures": (failing, {}),
    "equations": (odes, {"seconds": 0.0}),
}


def compiled(model):
    return model.compile_logp(mode="FAST_COMPILE")


@pytest.mark.parametrize("kind", PAIRS)
def test_the_posterior_is_the_same_with_gradients(kind):
    make, options = PAIRS[kind]
    model = make(3, **options)
    options = {k: v for k, v in options.items() if k == "centred"}
    densities = [compiled(m) for m in (model, make(3, differentiable=True, **options))]
    rng = np.random.default_rng(1)
    for scale in (0.0, 0.2, 0.4):
        point = {k: v + scale * rng.normal(size=v.shape) for k, v in model.initial_point().items()}
        values = [density(point) for density in densities]
        assert np.isfinite(values).all()
        assert values[0] == pytest.approx(values[1], rel=1e-8)


def test_concentrations_are_those_of_the_textbook_and_have_its_limit():
    theta = np.array([[0.5, 1.0, 3.0], [-2.5, 1.0, 3.0], [-2.0, 1.0, 3.0], [-2.0 + 1e-7, 1.0, 3.0]])
    found = np.array([log_concentration(row) for row in theta])
    np.testing.assert_allclose(log_concentrations(pt.as_tensor(theta)).eval(), found, rtol=1e-12)
    for row, curve in zip(theta[:2], found[:2], strict=True):
        a, k, volume = np.exp(row[0]), np.exp(row[1] - row[2]), np.exp(row[2])
        expected = DOSE * a / volume / (a - k) * (np.exp(-k * HOURS) - np.exp(-a * HOURS))
        np.testing.assert_allclose(np.exp(curve), expected, rtol=1e-10)
    k = np.exp(-2.0)
    expected = DOSE * k * HOURS * np.exp(-k * HOURS) / np.exp(3.0)
    np.testing.assert_allclose(np.exp(found[2]), expected, rtol=1e-12)
    np.testing.assert_allclose(found[3], found[2], rtol=1e-5)


def test_growth_has_its_closed_form():
    theta = np.random.default_rng(1).normal(PLATES[0], 0.5, (4, 3))
    found = np.array([log_growth(row) for row in theta])
    np.testing.assert_allclose(found, log_growths(pt.as_tensor(theta)).eval(), atol=1e-7)


@pytest.mark.parametrize("differentiable", [True, False])
def test_one_person_fails_beyond_a_plane(differentiable):
    person, limit = failure(3, 0)
    density = compiled(model := failing(3, differentiable=differentiable))
    point = model.initial_point()
    for i in range(3):
        for beyond in (-0.01, 0.01):
            theta = np.tile(PATIENTS[0], (3, 1))
            theta[i, 0] = limit - theta[i, 1] + beyond
            value = density(point | {"theta": theta})
            assert np.isfinite(value) == (i != person or beyond < 0)
