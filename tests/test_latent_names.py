"""A name is no part of a model: a `pm.Deterministic` changes no draw of a latent Gaussian model."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import COUNTS, UNCOMPILED, begin, drive, latent
from pymc.distributions.distribution import SymbolicRandomVariable
from pytensor.graph.traversal import io_toposort
from pytensor.tensor.random.op import RandomVariable
from test_latent_gp_step import hierarchical, regression, scaled
from test_latent_reading import LIKELIHOODS, standard_normal_function
from test_latent_vector import MODELS, RING, N, made, names, predicted

from pymc_kameleon import EllipticalSliceStep, LatentGPStep
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.reader.linear_predictor import function_behind
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction, free_variable

try:
    from benchmarks.latent_models import PROBLEMS
except ImportError:  # the tests are not in a clone
    PROBLEMS = {}


def with_all_kept(model):
    """Name everything real that the model computes, and use what has the name in its place."""
    named, kept = {*model.basic_RVs, *model.potentials}, {}
    with model:
        for node in io_toposort([], list(named)):
            node.inputs[:] = [kept.get(v, v) for v in node.inputs]
            # A distribution that is no variable of the model has no values to name.
            is_random = isinstance(node.op, RandomVariable | SymbolicRandomVariable)
            for v in node.outputs if not is_random else model.free_RVs:
                is_real = getattr(v.type, "dtype", "").startswith("float")
                if v.owner is node and is_real and v not in model.potentials:
                    kept[v] = pm.Deterministic(f"kept_{len(kept)}", v)
    return model


def draws(model, n=5, tune=0):
    step = begin(LatentGPStep(model=model, compile_kwargs=UNCOMPILED), tune=tune)
    return drive(step, model.initial_point(), n + tune, tune)[0]


def from_data(build):
    """A model of the benchmarks, with their data."""
    return lambda: build(np.random.default_rng(1))


def bym2_as_in_the_gallery():
    """PyMC's own example, with the intermediates that it keeps."""
    x, expected = np.linspace(-1, 1, N), np.linspace(2, 8, N)
    level, slope = pm.Normal("beta0", 0, 1), pm.Normal("beta1", 0, 1)
    theta, phi = pm.Normal("theta", 0, 1, shape=N), pm.ICAR("phi", W=RING)
    sigma, rho = pm.HalfNormal("sigma", 1), pm.Beta("rho", 0.5, 0.5)
    mixture = pm.Deterministic("mixture", pt.sqrt(1 - rho) * theta + pt.sqrt(rho / 0.4) * phi)
    mu = pm.Deterministic("mu", expected * pt.exp(level + slope * x + sigma * mixture))
    pm.Poisson("y", mu, observed=COUNTS)


def labelled():
    """Of a function times its amplitude, by its probability."""
    f = pm.Deterministic("f_scaled", pm.HalfNormal("amplitude", 1.0) * latent(amplitude=1.0))
    p = pm.Deterministic("p", pm.math.invprobit(pm.Normal("level", 0, 1) + f))
    pm.Bernoulli("y", p, observed=COUNTS > 0)


QUICK = {
    "bym2": bym2_as_in_the_gallery,
    "labelled": labelled,
    "noise_and_mean": MODELS["noise_and_mean"],
}
LONG = {k: build for k, build in MODELS.items() if k not in QUICK} | {"predicted": predicted}
LONG |= {k: from_data(build) for k, build in PROBLEMS.items() if "N =" not in k}


@pytest.mark.parametrize(
    "build",
    [*QUICK.values(), *(pytest.param(b, marks=pytest.mark.slow) for b in LONG.values())],
    ids=[*QUICK, *LONG],
)
def test_draws_are_the_same_with_everything_kept(build):
    """To the last bit, and so is what is moved how."""
    model, kept = made(build), with_all_kept(made(build))
    assert len(kept.deterministics) > len(model.deterministics) + 3
    np.testing.assert_array_equal(draws(kept), draws(model))


@pytest.mark.slow
def test_tuned_draws_are_the_same_with_everything_kept():
    model, kept = made(bym2_as_in_the_gallery), with_all_kept(made(bym2_as_in_the_gallery))
    np.testing.assert_array_equal(draws(kept, tune=5), draws(model, tune=5))


@pytest.mark.parametrize("build", [hierarchical, regression, scaled])
def test_what_is_moved_is_the_same_with_everything_kept(build):
    found = [
        JointModel(model, compile_kwargs=UNCOMPILED) for model in (build(), with_all_kept(build()))
    ]
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_are_the_same_with_everything_kept(name):
    def build():
        LIKELIHOODS[name](standard_normal_function())

    found = [
        LatentFunction(m, "f", compile_kwargs=UNCOMPILED)
        for m in (made(build), with_all_kept(made(build)))
    ]
    terms = [f.likelihood.terms(np.linspace(-1, 1, f.size)) for f in found]
    np.testing.assert_array_equal(*terms)
    for labels in ("probit_labels", "logit_labels"):
        np.testing.assert_equal(*(getattr(f.likelihood, labels) for f in found))


def test_a_function_is_known_by_its_product_not_by_its_name():
    """Written by hand, with a name or without, with a mean or others; effects are none."""

    def build(name, mean):
        with pm.Model() as model:
            v = pm.Normal("v", 0, 1, shape=N)
            lengthscale = pm.LogNormal("lengthscale", 0, 1)
            covariance = pm.gp.cov.ExpQuad(1, lengthscale)(np.arange(N)[:, None]) + 1e-6 * pt.eye(N)
            f = pt.linalg.cholesky(covariance) @ v
            f = mean() + (pm.Deterministic("f", f) if name else f)
            pm.Deterministic("beside", 2.0 * f)
            effects = pm.Normal("effects", 0, 1, shape=N)
            scaled = pm.HalfNormal("sd", 1) * effects
            pm.Poisson(
                "y",
                pt.exp(f + (pm.Deterministic("g", scaled) if name else scaled)),
                observed=COUNTS,
            )
        return model

    for mean in (lambda: 0.5, lambda: pm.Normal("level", 0, 1)):
        for name in (True, False):
            joint = JointModel(build(name, mean), compile_kwargs=UNCOMPILED)
            behind = [v.name for v, _ in joint.function.linear.functions]
            assert behind == ["v"]
            assert "effects" in names(joint.function.value_variables)
            assert names(joint.hyperparameters) == ["lengthscale_log__", "sd_log__"]


def test_a_name_may_be_given_to_the_step():
    """Of a function, or of effects, elementwise, where there is no other."""
    with pm.Model() as model:
        effects = pm.Normal("effects", 0, 1, shape=N)
        x = pm.Deterministic("x", pm.HalfNormal("sd", 1) * effects)
        pm.Poisson("y", pt.exp(pm.Deterministic("eta", 1.0 + x)), observed=COUNTS)
    for vars in (None, ["x"], ["effects"]):
        joint = JointModel(model, vars, compile_kwargs=UNCOMPILED)
        assert names(joint.function.value_variables) == ["effects"]
        assert names(joint.hyperparameters) == ["sd_log__"]
    assert free_variable(model, "x") == (effects, x.owner.inputs[0])
    with model:
        assert EllipticalSliceStep(["x"], compile_kwargs=UNCOMPILED).function.name == "x"


ROOT = np.linalg.cholesky(np.eye(N) + 0.5)


@pytest.mark.parametrize(
    ("make", "is_function"),
    [
        (lambda v: pt.dot(ROOT, v), True),
        (lambda v: pt.einsum("ij,j->i", ROOT, v), True),
        (lambda v: pt.linalg.solve_triangular(ROOT.T, v, lower=False), True),
        (lambda v: v.cumsum(), True),
        (lambda v: 2.0 * v, False),
        (lambda v: v[np.arange(N)[::-1]], False),
        (lambda v: v - v.mean(), False),
        (lambda v: pt.dot(np.ones((N, N)), v), False),
        (lambda v: pt.dot(ROOT, v) + pt.exp(v), False),
        (lambda v: pt.dot(ROOT, pt.exp(v)), False),
        (lambda v: pt.dot(ROOT, v + pm.Normal("w", 0, 1, shape=N)), False),
    ],
)
def test_functions_behind_a_vector(make, is_function):
    with pm.Model() as model:
        v = pm.Normal("v", 0, 1, shape=N)
        pm.Poisson("y", pt.exp(0.5 + make(v)), observed=COUNTS)
    found = function_behind(model, v)
    assert (found is not None) == is_function
    with_all_kept(model)
    kept = function_behind(model, v)
    assert (kept is not None) == is_function
