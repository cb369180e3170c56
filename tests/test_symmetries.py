"""Symmetries of a posterior: what is found, and that draws are of all modes."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import BlackBox
from scipy import stats

from pymc_kameleon import surrogate_posterior
from pymc_kameleon._compat import group_dataset, stacked
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.approximate.symmetries import (
    LARGEST_ORBIT,
    Orbits,
    exchange,
    reflection,
    symmetries_of_prior,
)
from pymc_kameleon.mcmc.coordinates import Standardization

TIMES = np.array([0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0])


def through_a_compartment(size, k1, k2):
    return size * (np.exp(-k1 * TIMES) - np.exp(-k2 * TIMES)) / (k2 - k1)


CONCENTRATIONS = through_a_compartment(4.0, 0.3, 1.2) + 0.1 * np.random.default_rng(
    1
).standard_normal(len(TIMES))


def kinetics(asymmetry=0.0):
    """Concentrations after a dose: which rate is absorption and which elimination is not known."""

    def log_likelihood(size, k1, k2):
        expected = through_a_compartment(size, k1, k2)
        return stats.norm.logpdf(CONCENTRATIONS, expected, 0.1).sum() - asymmetry * (k1 > k2)

    with pm.Model() as model:
        size, k1, k2 = (pm.LogNormal(name, 0.0, 1.0) for name in ("size", "k1", "k2"))
        pm.Potential(
            "concentrations", BlackBox(lambda x: log_likelihood(*x))(pt.stack([size, k1, k2]))
        )
    return model


@pytest.mark.numerics
@pytest.mark.parametrize("seed", range(3))
def test_both_halves_of_an_exchange(seed):
    result = surrogate_posterior(kinetics(), n_evaluations=150, random_seed=seed, progressbar=False)
    posterior = group_dataset(result, "posterior")
    k1, k2 = stacked(posterior, "k1"), stacked(posterior, "k2")
    # Of 4000 independent draws: 5 standard deviations, null probability 6e-7.
    assert abs(np.mean(k1 < k2) - 0.5) < 0.04
    slower = np.minimum(k1, k2)
    grid = np.exp(np.linspace(-5.0, 3.0, 161))
    k, other = np.meshgrid(grid, grid * 1.0001, indexing="ij")
    # The size enters linearly: its integral is a sum over a grid of its own.
    sizes = np.exp(np.linspace(-1.0, 3.0, 161))
    unit = (np.exp(-k[..., None] * TIMES) - np.exp(-other[..., None] * TIMES)) / (other - k)[
        ..., None
    ]
    log_density = -0.5 * ((CONCENTRATIONS - sizes[:, None, None, None] * unit) ** 2).sum(
        axis=-1
    ) / 0.01 - 0.5 * (np.log(sizes)[:, None, None] ** 2 + np.log(k) ** 2 + np.log(other) ** 2)
    constant = len(TIMES) * stats.norm.logpdf(0.0, 0.0, 0.1) + 3 * stats.norm.logpdf(0.0)
    cell = np.prod([np.log(part[1] / part[0]) for part in (sizes, grid, grid)])
    evidence = np.log(np.exp(log_density).sum() * cell) + constant
    assert abs(posterior.attrs["log_evidence"] - evidence) < 0.2
    weights = np.exp(log_density).sum(axis=0)
    mean = np.sum(weights * np.minimum(k, other)) / weights.sum()
    assert abs(slower.mean() - mean) < 0.3 * slower.std()


@pytest.mark.numerics
def test_a_symmetry_that_the_likelihood_has_not_is_not_taken():
    explorer = Explorer(kinetics(asymmetry=0.5), budget=150)
    with explorer.limited(100):
        explorer.begin(np.random.default_rng(1))
    assert explorer.orbits.size == 1


@pytest.mark.numerics
def test_signs_and_labels_are_found():
    """Squares of two parameters, and a mixture of two components with weights p and 1 - p."""
    y = np.concatenate([stats.norm.ppf((np.arange(20) + 0.5) / 20, m, 0.5) for m in (-1.0, 2.0)])

    def squares(a, b, c):
        return stats.norm.logpdf([1.0, 4.0, 2.0], [a**2, b**2, c], 0.1).sum()

    def mixture(m, p):
        parts = [stats.norm.logpdf(y, centre, 0.5) for centre in m]
        return np.logaddexp(np.log(p) + parts[0], np.log1p(-p) + parts[1]).sum()

    with pm.Model() as signs:
        a, b, c = (pm.Normal(name, 0.0, 2.0) for name in "abc")
        pm.Potential("y", BlackBox(lambda x: squares(*x))(pt.stack([a, b, c])))
    with pm.Model() as labels:
        m, p = pm.Normal("m", 0.0, 3.0, shape=2), pm.Beta("p", 2.0, 2.0)
        pm.Potential("y", BlackBox(lambda x: mixture(x[:2], x[2]))(pt.concatenate([m, [p]])))
    for model, size in ((signs, 4), (labels, 2)):
        explorer = Explorer(model, budget=250)
        with explorer.limited(180):
            explorer.begin(np.random.default_rng(1))
        assert explorer.orbits.size == size


def test_candidates_are_exchanges_of_few_and_reflections_that_the_prior_has():
    """Coordinates 0 and 1 are alike, 3 to 7 are many alike, and 2 may be reflected."""
    kind = np.array([0, 0, 1, 2, 2, 2, 2, 2])

    def is_kept(symmetry):
        keeps_kinds = np.array_equal(kind[symmetry.order], kind)
        return keeps_kinds and bool(np.all(symmetry.signs[kind != 1] > 0.0))

    found = symmetries_of_prior(is_kept, np.arange(8.0), np.ones(8, dtype=bool))
    x = np.arange(8.0) + 1.0
    images = [symmetry(x) for symmetry in found]
    np.testing.assert_array_equal(images[0], [2, 1, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(images[1], [1, 2, 1, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(images[2], [2, 1, 1, 4, 5, 6, 7, 8])
    assert len(found) == 3


def test_orbits_have_one_first_point_and_all_others_as_often():
    rng = np.random.default_rng(1)
    mode = Standardization(np.array([1.0, 2.0, 3.0]), np.eye(3))
    orbits = Orbits([exchange(3, (0, 1)), reflection(2, np.zeros(3))], mode)
    assert orbits.size == 4
    points = rng.standard_normal((1000, 3))
    first = points.copy()
    orbits.fold(first)
    assert orbits.is_first(first).all()
    spread = orbits.spread(first, rng)
    again = spread.copy()
    orbits.fold(again)
    np.testing.assert_allclose(again, first)
    counts = np.unique(
        np.sign([spread[:, 0] - spread[:, 1], spread[:, 2]]), axis=1, return_counts=True
    )
    # Four equal shares of 1000: 6 standard deviations, null probability below 1e-8.
    assert np.all(np.abs(counts[1] - 250) < 83)


def test_a_group_that_is_too_large_is_not_made_use_of():
    mode = Standardization(np.zeros(6), np.eye(6))
    swaps = [exchange(6, (i, i + 1)) for i in range(5)]
    orbits = Orbits(swaps, mode)
    assert orbits.size == 24 <= LARGEST_ORBIT
