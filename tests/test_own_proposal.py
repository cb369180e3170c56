"""The example of a user's own proposal: invariant, compiled, and through `pm.sample`."""

import importlib.util
from pathlib import Path

import models
import numpy as np
import pymc as pm
import pytest
from models import PLAIN, begin, drive, sample, values
from scipy import stats

from pymc_kameleon.mcmc.proposals import propose
from pymc_kameleon.testing import frozen, invariance_p_values

EXAMPLE = Path(__file__).parents[1] / "docs" / "own_proposal.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the tests are not in a clone")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_proposal", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def student(dim=2):
    with pm.Model() as model:
        pm.StudentT("x", nu=4, mu=0, sigma=1, shape=dim)
    return model


def p_values(example):
    """Each below 1e-6 with that probability if the step leaves the target invariant."""
    rng = np.random.default_rng(5)
    draws, reference = rng.standard_t(4, (1500, 2)), rng.standard_t(4, (20_000, 2))
    step = example.tail_walk(model=student(), steps_per_draw=100, compile_kwargs=PLAIN)
    frozen(step, random_seed=2)
    radius = {"radius": lambda x: np.sum(x**2, axis=1)}
    return invariance_p_values(step, draws, reference, radius)


@pytest.mark.numerics
@pytest.mark.slow
def test_it_leaves_its_target_invariant(example):
    assert min(p_values(example).values()) > 1e-6


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.sabotage
def test_a_forgotten_ratio_would_be_caught(example):
    right = example.propose

    def symmetric(proposal, chain, normals, uniforms):
        return 0.0, right(proposal, chain, normals, uniforms)[1]

    propose.register(example.TailWalk, symmetric)
    try:
        assert min(p_values(example).values()) < 1e-6
    finally:
        propose.register(example.TailWalk, right)


def test_it_samples_a_model_through_pymc(example):
    with student() as model:
        idata = sample(example.tail_walk(), model, chains=2, draws=1000, tune=500)
    x = values(idata, "x")
    models.assert_mean(x, np.zeros(2))
    models.assert_mean(np.abs(x) < stats.t.ppf(0.75, 4), np.full(2, 0.5))


def test_compiled_and_plain_are_one_chain(example):
    found = []
    for options in ({}, {"compile_kwargs": PLAIN}):
        model = student()
        step = begin(example.tail_walk(model=model, steps_per_draw=5, **options), tune=50)
        found.append(drive(step, model.initial_point(), 100, tune=50)[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8)
