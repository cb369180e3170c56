"""Bad input: errors at construction that name the argument, its value and what to write instead."""

import inspect
import re

import models
import numpy as np
import pymc as pm
import pytest
from models import sample
from pymc.exceptions import SamplingError

import pymc_kameleon
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
    SurrogateHMCStep,
    kernels,
    latent_gp,
)
from pymc_kameleon.kernels.random_features import RandomFourierFeatures
from pymc_kameleon.validation import checked_choice


@pytest.fixture(scope="module")
def model():
    return models.normal(2)[0]


def refused(error, make, *mentions, **options):
    """Construction fails, and the message holds every one of `mentions`."""
    with pytest.raises(error) as caught:
        make(**options)
    message = str(caught.value)
    for mention in mentions:
        assert mention in message, f"{mention!r} is not in: {message}"


SHARED = [
    ("steps_per_draw", 0, ValueError, "at least 1"),
    ("steps_per_draw", -3, ValueError, "at least 1"),
    ("steps_per_draw", 1.5, TypeError, "whole number"),
    ("steps_per_draw", "2", TypeError, "whole number"),
    ("steps_per_draw", True, TypeError, "whole number"),
    ("steps_per_draw", float("nan"), (TypeError, ValueError), "whole number"),
    ("steps_per_draw", float("inf"), (TypeError, ValueError), "whole number"),
    ("target_accept", 0, ValueError, "(0, 1)"),
    ("target_accept", 1, ValueError, "(0, 1)"),
    ("target_accept", -0.2, ValueError, "(0, 1)"),
    ("target_accept", 23.4, ValueError, "(0, 1)"),
    ("target_accept", float("nan"), ValueError, "(0, 1)"),
    ("target_accept", "high", TypeError, "(0, 1)"),
]


SCALINGS = [(0, ValueError), (-1.0, ValueError), (float("inf"), ValueError), ("big", TypeError)]


NAMES_OF_SCALINGS = {AdaptiveMetropolisStep: "covariance_scaling", MALAStep: "step_size"}


def test_arguments_of_every_step(step_class, model):
    for argument, value, error, instead in SHARED:
        options = {argument: value, "model": model}
        refused(error, step_class, f"{argument}={value!r}", instead, **options)


def test_scaling_of_every_random_walk(make_random_walk, model):
    for value, error in SCALINGS:
        name = NAMES_OF_SCALINGS.get(make_random_walk.func, "scaling")
        options = {name: value, "model": model}
        refused(error, make_random_walk, f"{name}={value!r}", "above 0", **options)


@pytest.mark.parametrize(
    "make",
    [KameleonStep, AdaptiveMetropolisStep, FastKameleonStep, PCAKameleonStep, SurrogateHMCStep],
)
def test_estimates_that_there_are_not(make, model):
    mentions = ("pseudo_marginal=True", "depends on x", f"Write {make.__name__}()", "Potential")
    refused(ValueError, make, *mentions, model=model, pseudo_marginal=True)


KAMELEON = [
    ("bandwidth", 0, ValueError, "above 0"),
    ("bandwidth", "mean", ValueError, "median"),
    ("bandwidth", None, TypeError, "above 0"),
    ("n_subsample", 1, ValueError, "at least 2"),
    ("n_subsample", 10.5, TypeError, "whole number"),
    ("gamma", -0.1, ValueError, "at least 0"),
    ("gamma", float("nan"), ValueError, "at least 0"),
    ("gamma", "x", TypeError, "at least 0"),
    ("global_share", -0.1, ValueError, "[0, 1]"),
    ("global_share", 1.1, ValueError, "[0, 1]"),
    ("kernel", "rbf", ValueError, "gaussian"),
    ("kernel", "laplacian", ValueError, "gradient"),
    ("kernel", "laplacian", ValueError, "FastKameleonStep"),
    ("kernel", "triangular", ValueError, "sinc_squared"),
    ("kernel", kernels.Matern(1.0), ValueError, "Matern(smoothness) above 1"),
    ("kernel", kernels.Laplacian, ValueError, "gradient"),
    (
        "kernel",
        kernels.CustomKernel(models.negative_half_square, frequencies=max),
        ValueError,
        "CustomKernel(value, gradient)",
    ),
    ("kernel", 3, TypeError, "CustomKernel"),
    ("kernel", models.negative_half_square, TypeError, "CustomKernel"),
]


@pytest.mark.parametrize(("argument", "value", "error", "instead"), KAMELEON)
def test_arguments_of_kameleon(model, argument, value, error, instead):
    options = {argument: value, "model": model}
    refused(error, KameleonStep, f"{argument}={value!r}", instead, **options)


def test_arguments_of_published_settings(model):
    make = KameleonStep.paper
    refused(ValueError, make, "learning_rate=0", "above 0", learning_rate=0, model=model)
    refused(TypeError, make, "adaptation=0.5", "function", adaptation=0.5, model=model)


@pytest.mark.numerics
@pytest.mark.parametrize("value", [0.0, -1.5, float("nan"), float("inf"), "1.5", True])
def test_parameters_above_zero(value):
    error = (ValueError, TypeError)
    refused(error, kernels.Matern, f"smoothness={value!r}", "above 0", smoothness=value)
    refused(error, kernels.InverseMultiquadric, f"exponent={value!r}", "above 0", exponent=value)


@pytest.mark.numerics
def test_arguments_of_kernels():
    polynomial, custom = kernels.Polynomial, kernels.CustomKernel
    refused(ValueError, polynomial, "degree=0", "at least 1", degree=0)
    refused(ValueError, polynomial, "degree=1.5", "at least 1", degree=1.5)
    refused(ValueError, polynomial, "offset=-1", "at least 0", offset=-1)
    refused(TypeError, custom, "gradient=None", "frequencies=None", "at least one", value=max)
    refused(TypeError, custom, "value=None", "(x, y, bandwidth)", value=None, gradient=max)
    refused(TypeError, custom, "gradient=2", "(x, y, bandwidth)", value=max, gradient=2)
    refused(TypeError, custom, "frequencies=2", "(size, dim", value=max, frequencies=2)


@pytest.mark.numerics
def test_kernels_without_a_spectral_density():
    for kernel in (kernels.Linear(), kernels.Polynomial(), kernels.CustomKernel(max, min)):
        mentions = (repr(kernel), "spectral density", "frequencies=")
        refused(
            ValueError, kernels.as_kernel, *mentions, "'laplacian'", kernel=kernel, needs="spectrum"
        )
        arguments = {"size": 2, "dim": 1, "bandwidth": 1.0, "rng": np.random.default_rng(0)}
        refused(ValueError, kernel.frequencies, *mentions, "Laplacian()", **arguments)
    refused(
        ValueError, kernels.as_kernel, "needs='value'", "'spectrum'", kernel="sinc", needs="value"
    )


ADAPTIVE_METROPOLIS = [
    ({"covariance": "learn"}, ("covariance='learn'", "learned", "identity")),
    ({"covariance": np.eye(3)}, ("covariance", "(3, 3)", "(2, 2)", "x")),
    ({"covariance": np.full((2, 2), np.nan)}, ("covariance", "NaN", "finite")),
    ({"covariance": np.array([[1.0, 0.5], [0.0, 1.0]])}, ("covariance", "symmetric")),
    ({"covariance": np.array([[1.0, 2.0], [2.0, 1.0]])}, ("covariance", "-1", "diagonal")),
    ({"initial_covariance": -np.eye(2)}, ("initial_covariance", "-1", "diagonal")),
    (
        {"covariance": "identity", "initial_covariance": np.eye(2)},
        ("initial_covariance", "covariance", "learned"),
    ),
]


@pytest.mark.parametrize(("options", "mentions"), ADAPTIVE_METROPOLIS)
def test_arguments_of_adaptive_metropolis(model, options, mentions):
    refused(ValueError, AdaptiveMetropolisStep, *mentions, model=model, **options)


def test_the_suggested_diagonal_helps(model):
    """An error that says what to write must be right about it."""
    covariance = np.array([[1.0, 2.0], [2.0, 1.0]])
    AdaptiveMetropolisStep(model=model, covariance=covariance + 2 * np.eye(2))


def test_unknown_argument(kind, model):
    refused(TypeError, kind.step_class, "n_subsamples", model=model, n_subsamples=3)


# variables and models -----------------------------------------------------------------------------


def test_discrete_variables(step_class):
    """They are left to others, unless they are named or nothing else is there."""
    model, count = models.mixed_discrete(), "count"
    names = [v.name for v in model.value_vars if v.name != count]
    for options in ({}, {"blocked": False}, {"vars": None}, {"vars": [model["x"]]}):
        step = step_class(model=model, compile_kwargs=models.PLAIN, **options)
        assert [v.name for v in step.vars] == names
    discrete = count, "discrete"
    refused(ValueError, step_class, *discrete, "vars=[", model=model, vars=[model[count]])
    with pm.Model() as only:
        pm.Poisson(count, 3)
    for blocked in (True, False):
        refused(ValueError, step_class, *discrete, model=only, blocked=blocked)


def test_no_variables(kind):
    with pm.Model() as empty:
        pm.Normal("y", 0, 1, observed=1.0)
    refused(ValueError, kind.step_class, "vars", "free variable", model=empty)
    refused(ValueError, kind.step_class, "vars", model=models.two_scales(), vars=[])


def test_variables_that_are_not_free(step_class):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        total = pm.Deterministic("total", 2 * x)
        y = pm.Normal("y", x, 1, observed=1.0)
    for variable, reason in ((total, "follows from others"), (y, "is observed")):
        for named in (variable, variable.name):
            refused(
                ValueError, step_class, variable.name, reason, "are x", model=model, vars=[named]
            )
    refused(ValueError, step_class, "no_such is no variable", "are x", model=model, vars="no_such")
    with pm.Model():
        other = pm.Normal("x", 0, 1)
    refused(ValueError, step_class, "x is a variable of another", model=model, vars=[other])
    assert [v.name for v in step_class(["x"], model=model).vars] == ["x"]


def test_missing_model(kind):
    refused(TypeError, kind.step_class, "model", "with model:", "model=")
    refused(TypeError, KameleonStep.paper, "model", "with model:", "model=")


# starts -------------------------------------------------------------------------------------------


def test_start_without_density(make_step):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        pm.Potential("never", pm.math.switch(x < 50, -np.inf, 0.0))
    step = make_step(model=model)
    with pytest.raises(SamplingError, match=r"[Ii]nitial"):
        sample(step, model, draws=5, tune=5)


# warm starts --------------------------------------------------------------------------------------


WARM = [
    (np.zeros(2), ("warm_start", "(2,)", "(n, 2)", "x")),
    (np.zeros((5, 3)), ("warm_start", "(5, 3)", "(n, 2)", "x")),
    (np.zeros((1, 2)), ("warm_start", "two", "run")),
    (np.full((9, 2), np.nan), ("warm_start", "finite")),
    ("yesterday", ("warm_start",)),
    ({"x": np.zeros(3)}, ("warm_start",)),
]


def test_warm_starts(step_class, model):
    for points, mentions in WARM:
        refused((ValueError, TypeError), step_class, *mentions, model=model, warm_start=points)
    with pm.Model() as smaller:
        pm.Normal("a", 0, 1)
    options = {"draws": 5, "tune": 5}
    without_b = sample(pm.Metropolis(model=smaller), smaller, **options)
    two = models.two_scales()
    refused(ValueError, step_class, "warm_start", "b", model=two, warm_start=without_b)
    shorter, other = sample(pm.Metropolis(model=model), model, **options), models.normal(3)[0]
    refused((ValueError, TypeError), step_class, "warm_start", "x", model=other, warm_start=shorter)


def test_choices():
    assert checked_choice("link", "logit", ("logit", "probit")) == "logit"
    assert checked_choice("link", "logit", {"logit": 1, "probit": 2}) == "logit"
    for value in ("cauchit", None, 1, ["logit"]):
        message = re.escape(f"link={value!r}: take 'logit' or 'probit'.")
        with pytest.raises(ValueError, match=message):
            checked_choice("link", value, ("logit", "probit"))
    with pytest.raises(ValueError, match="take one of 'a', 'b', 'c', or a function"):
        checked_choice("link", "d", "abc", ", or a function")


@pytest.mark.numerics
def test_warnings_point_at_the_line_of_the_user():
    X = np.linspace(0.0, 1.0, 8)[:, None]
    with pm.Model() as latent:
        f = pm.MvNormal("f", np.zeros(2), np.array([[1.0, 0.9], [0.9, 1.0]]))
        pm.Poisson("y", pm.math.exp(f), observed=[1, 9])
    calls = {
        "is odd, and": lambda: RandomFourierFeatures(n_features=7).fit(X),
        "is odd": lambda: FastKameleonStep(n_features=7, model=models.normal(2)[0]),
        "Laplace's approximation": lambda: latent_gp.laplace(latent, max_iterations=1),
        "Expectation propagation": lambda: latent_gp.expectation_propagation(latent, max_sweeps=1),
    }
    for message, call in calls.items():
        with pytest.warns(UserWarning, match=message) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def test_names_that_changed_say_the_new_one():
    with pytest.raises(TypeError, match="n_temperatures"):
        pymc_kameleon.latent_gp.log_marginal_likelihood(None, n_rungs=20)
    with pytest.raises(AttributeError, match=r"benchmarks/simulators\.py"):
        _ = pymc_kameleon.surrogate_targets


@pytest.mark.parametrize(
    ("make", "argument", "instead"),
    [
        (KameleonStep, "n_subsampl", "did you mean n_subsample?"),
        (KameleonStep, "target_acept", "did you mean target_accept?"),
        (pymc_kameleon.MALAStep, "pseudo_marginal", "no argument of MALAStep"),
        (pymc_kameleon.SurrogateHMCStep, "adapt_after_tune", "no argument of SurrogateHMCStep"),
        (pymc_kameleon.LatentGPStep, "learner", "no argument of LatentGPStep"),
    ],
)
def test_an_argument_that_a_step_does_not_have(model, make, argument, instead):
    refused(TypeError, make, argument, instead, model=model, **{argument: 1})


def test_a_signature_shows_the_arguments_that_all_steps_share():
    shown = inspect.signature(FastKameleonStep).parameters
    assert {"n_features", "target_accept", "surrogate", "compile_kwargs"} < set(shown)
    assert not {"options", "learner"} & set(shown)
    assert "store" in shown
