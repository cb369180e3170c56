"""The examples of public docstrings run, with a few draws, and print what they say."""

import doctest
import logging

import documentation
import numba
import numpy as np
import pymc as pm
import pytest

import pymc_kameleon
from pymc_kameleon import kernels, pseudo_marginal, random_features

ALONE = [kernels.CustomKernel, random_features.RandomFourierFeatures, pymc_kameleon.GPSurrogate]
OF_ANY_MODEL = [
    pymc_kameleon.AdaptiveMetropolisStep,
    pymc_kameleon.EvaluationStore,
    pymc_kameleon.FastKameleonStep,
    pymc_kameleon.KameleonStep,
    pymc_kameleon.MALAStep,
    pymc_kameleon.PCAKameleonStep,
    pymc_kameleon.SurrogateHMCStep,
    pymc_kameleon.dispersed_starts,
    pymc_kameleon.surrogate_posterior,
]
OF_THEIR_OWN_MODEL = [
    pymc_kameleon.EllipticalSliceStep,
    pymc_kameleon.LatentGPStep,
    pymc_kameleon.RiemannianHMCStep,
    pseudo_marginal.estimated_loglikelihood,
    pseudo_marginal.gp_classification_loglikelihood,
    pseudo_marginal.particle_filter_loglikelihood,
]


@pytest.fixture
def small(monkeypatch, tmp_path):
    documentation.sample_little(monkeypatch, tmp_path)
    monkeypatch.setattr(logging.getLogger("pymc"), "disabled", True)


def public_names():
    found = {name: getattr(pymc_kameleon, name) for name in pymc_kameleon.__all__}
    return found | {name: getattr(pseudo_marginal, name) for name in pseudo_marginal.__all__}


def world(model):
    """What the examples take as given."""
    rng = np.random.default_rng(1)
    inputs = rng.uniform(-2, 2, size=(15, 2))
    labels = (inputs[:, 0] + rng.normal(size=15) > 0).astype(int)
    return public_names() | {
        "model": model,
        "inputs": inputs,
        "labels": labels,
        "counts": rng.poisson(2.0, size=15),
        "covariance": pm.gp.cov.ExpQuad(2, 1.0),
        "X": inputs,
        "y": labels,
        "returns": rng.normal(size=20),
        "data": 0.5,
        "np": np,
        "numba": numba,
        "pm": pm,
    }


def run(documented, given):
    for example in doctest.DocTestParser().get_examples(documented.__doc__):
        exec(compile(example.source, documented.__name__, "exec"), given)


def named(documented):
    return documented.__name__


@pytest.mark.parametrize("documented", ALONE, ids=named)
def test_an_example_that_stands_alone(documented):
    for found in doctest.DocTestFinder().find(documented, globs=vars(kernels).copy()):
        assert doctest.DocTestRunner().run(found).failed == 0


@pytest.mark.slow
@pytest.mark.documentation
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("documented", OF_ANY_MODEL, ids=named)
def test_an_example_of_any_model(documented, small):
    with pm.Model() as model:
        pm.Normal("x", shape=2)
        pm.Normal("y", 0.0, 1.0, observed=0.3)
    given = world(model)
    run(documented, given)
    assert "posterior" in given["idata"]


@pytest.mark.slow
@pytest.mark.documentation
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("documented", OF_THEIR_OWN_MODEL, ids=named)
def test_an_example_of_a_model_of_its_own(documented, small):
    given = world(pm.Model())
    run(documented, given)
    assert "posterior" in given["idata"]
