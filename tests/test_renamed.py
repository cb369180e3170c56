"""Old names go on working: each warns, says the new one, and means the same."""

import functools
import inspect
import warnings

import models
import numpy as np
import pymc as pm
import pytest

import pymc_kameleon
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    MultilevelStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
    black_box,
    latent_gp,
)

MODEL, COARSE = models.normal(2)[0], models.normal(2)[0]


def counts():
    with pm.Model() as model:
        f = pm.MvNormal("f", np.zeros(3), np.eye(3))
        pm.Poisson("y", pm.math.exp(f), observed=[0, 1, 3])
    return model


LATENT = counts()


def draws_of(make, model=MODEL):
    """Options -> a few draws of such a step, and its statistics."""

    def draw(**options):
        points, statistics, _ = models.run(make(model=model, **options), model, 12, tune=8)
        return points, [{k: float(v) for k, v in s.items() if k != "warning"} for s in statistics]

    return draw


def marginal_likelihood(**options):
    found = latent_gp.log_marginal_likelihood(
        LATENT, random_seed=1, n_temperatures=3, n_particles=4, progressbar=False, **options
    )
    return found.log_marginal_likelihood, found.draws


def tempered(**options):
    return marginal_likelihood(method="tempering", **options)


def published(constructor, make):
    """Options of a class that are those of a constructor of published settings now."""
    return f"{make.__name__}.{constructor}", draws_of(functools.partial(make, steps_per_draw=2))


def every_third(transition):
    return 1 / 3


ADAPTIVE = draws_of(functools.partial(AdaptiveMetropolisStep, steps_per_draw=2))
KAMELEON, PAPER = published("paper", KameleonStep)
FAST, THESIS = published("thesis", FastKameleonStep)
SLICE = draws_of(EllipticalSliceStep, LATENT)
RIEMANNIAN = draws_of(RiemannianHMCStep, LATENT)
MULTILEVEL = draws_of(functools.partial(MultilevelStep, coarse=[COARSE]))

ARGUMENTS = {
    "AdaptiveMetropolisStep, scaling": (ADAPTIVE, {"scaling": 0.7}, {"covariance_scaling": 0.7}),
    "MALAStep, scaling": (draws_of(MALAStep), {"scaling": 0.7}, {"step_size": 0.7}),
    "SurrogateHMCStep, max_centers": (
        draws_of(SurrogateHMCStep),
        {"max_centers": 20},
        {"max_points": 20},
    ),
    "EllipticalSliceStep, center": (SLICE, {"center": "laplace"}, {"approximation": "laplace"}),
    "MultilevelStep, length": (MULTILEVEL, {"length": 2}, {"subchain_length": 2}),
    "log_marginal_likelihood, start": (
        marginal_likelihood,
        {"start": "laplace"},
        {"approximation": "laplace"},
    ),
    "log_marginal_likelihood, n_draws": (tempered, {"n_draws": 20}, {"draws": 20}),
    "log_marginal_likelihood, n_tune": (tempered, {"n_tune": 20}, {"tune": 20}),
    "black_box, workers": (
        lambda **options: black_box(len, **options)._options,
        {"workers": 2},
        {"cores": 2},
    ),
}


def told(call):
    """What a call returned, and its warnings of old names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [w for w in caught if "is deprecated: write" in str(w.message)]


def check_warning(warning, old, new):
    """Its category, where it points, and what it says."""
    assert issubclass(warning.category, FutureWarning)
    assert warning.filename in (__file__, models.__file__)
    before, after = str(warning.message).split(" is deprecated: write ")
    assert old in before and new in after


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_by_its_old_name(name):
    call, old, new = ARGUMENTS[name]
    called, _ = name.split(", ")
    found, warned = told(lambda: call(**old))
    assert len(warned) == 1
    check_warning(warned[0], f"{called}({next(iter(old))}=...)", f"{called}({next(iter(new))}=...)")
    expected, warned = told(lambda: call(**new))
    assert not warned
    np.testing.assert_equal(found, expected)
    with pytest.raises(TypeError, match=f"{next(iter(old))} is the old name of {next(iter(new))}"):
        call(**old, **new)


@pytest.mark.parametrize(
    ("make", "constructor", "options"),
    [
        (KameleonStep, "paper", {"learning_rate": 0.7}),
        (KameleonStep, "paper", {"learning_decay": 0.6}),
        (KameleonStep, "paper", {"adaptation": every_third}),
        (FastKameleonStep, "thesis", {"learning_rate": 0.7}),
        (FastKameleonStep, "thesis", {"learning_decay": 0.6}),
        (RiemannianHMCStep, "paper", {"n_fixed_point": 4}),
        (RiemannianHMCStep, "paper", {"random_length": False}),
    ],
)
def test_an_argument_of_published_settings(make, constructor, options):
    (name,), model = options, LATENT if make is RiemannianHMCStep else MODEL
    step, warned = told(lambda: make(model=model, **options))
    assert len(warned) == 1
    check_warning(warned[0], f"{make.__name__}({name}=...)", f"{make.__name__}.{constructor}(")
    made, warned = told(lambda: getattr(make, constructor)(model=model, **options))
    assert not warned

    def value(step):
        return next((part for part in step.configuration.split(", ") if name in part), None)

    def learner(step):
        return vars(step.sampler.template if hasattr(step, "sampler") else step)

    attributes = {"learning_rate": "learning_rate", "adaptation": "schedule"}
    key = attributes.get(name, name)
    assert value(step) == value(made)
    if key in learner(step):
        assert learner(step)[key] == learner(made)[key] == options[name]
    assert not {name, "_published"} & set(inspect.signature(make).parameters)


@pytest.mark.parametrize(
    ("old", "new"), [("squared_exponential", "gaussian"), ("matern52", "matern")]
)
def test_a_kernel_by_its_old_name(old, new):
    found, (warning,) = told(lambda: GPSurrogate(kernel=old))
    check_warning(warning, f"GPSurrogate(kernel={old!r})", f"GPSurrogate(kernel={new!r})")
    assert found == GPSurrogate(kernel=new)


@pytest.mark.parametrize(
    ("old", "new"),
    [("Evidence", "MarginalLikelihood"), ("log_evidence", "log_marginal_likelihood")],
)
def test_what_is_in_latent_gp_by_its_old_name(old, new):
    found, (warning,) = told(lambda: getattr(latent_gp, old))
    check_warning(warning, f"latent_gp.{old}", f"latent_gp.{new}")
    assert found is getattr(latent_gp, new)
    assert old not in latent_gp.__all__
    _, warned = told(lambda: exec(f"from pymc_kameleon.latent_gp import {old}", {"__name__": "x"}))
    assert {warning.filename for warning in warned} == {"<string>"}


def test_attributes_of_a_marginal_likelihood_by_their_old_names():
    found = latent_gp.log_marginal_likelihood(
        LATENT, random_seed=1, n_temperatures=3, n_particles=4, progressbar=False
    )
    value, (warning,) = told(lambda: found.log_evidence)
    check_warning(warning, ".log_evidence", ".log_marginal_likelihood")
    assert value == found.log_marginal_likelihood
    value, (warning,) = told(lambda: found.start)
    check_warning(warning, ".start", ".approximation")
    assert value is found.approximation
    table, warned = told(lambda: pymc_kameleon.compare_evidence({"one": found}))
    assert not warned
    assert table.loc["one", "log_evidence"] == found.log_marginal_likelihood


def test_signatures_show_new_names_alone():
    for name, (_, old, new) in ARGUMENTS.items():
        called = name.split(", ")[0]
        function = getattr(pymc_kameleon, called, None) or getattr(latent_gp, called)
        known = inspect.signature(function).parameters
        assert not set(old) & set(known)
        assert set(new) <= set(known) or "options" in known


def test_a_step_a_variable_takes_old_names_too():
    """PyMC makes these itself, `blocked=False`, and pickles what a step was made with."""
    with pm.Model():
        pm.Normal("a")
        pm.Normal("b")
        steps, warned = told(lambda: AdaptiveMetropolisStep(scaling=0.7, blocked=False))
    assert len(steps.methods) == 2 == len(warned)
    assert {step.sampler.template.chosen_scaling for step in steps.methods} == {0.7}


# statistics ---------------------------------------------------------------------------------------


def test_a_scaling_multiplies_standard_deviations():
    """That of `AdaptiveMetropolisStep` multiplied the covariance; its square does."""
    step = AdaptiveMetropolisStep(model=MODEL, covariance_scaling=4.0, learn_scaling=False)
    _, statistics, _ = models.run(step, MODEL, 3, tune=2)
    assert statistics[-1]["scaling"] == pytest.approx(2.0)
    assert statistics[-1]["covariance_scaling"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (AdaptiveMetropolisStep, "covariance_scaling"),
        (MALAStep, "step_size"),
        (functools.partial(KameleonStep, n_subsample=20), "scaling"),
    ],
)
def test_a_warm_start_takes_a_scaling_in_its_own_unit(make, name):
    model = models.normal(2)[0]
    step = make(model=model, **{name: 0.3}, learn_scaling=False)
    idata = models.sample(step, model, draws=20, tune=50)
    last = models.values(idata, name, "sample_stats")[0, -1]
    assert make(model=model, warm_start=idata).warm.scaling == pytest.approx(last)
    # As earlier versions had it: a `scaling` alone, of which nobody can tell what it multiplies.
    group = idata["sample_stats"]
    if hasattr(group, "to_dataset"):
        group.dataset = group.to_dataset().drop_vars(name)
    else:
        del group[name]
    again = make(model=model, warm_start=idata)
    assert again.warm.scaling is None
    assert len(again.warm.points) == 20
