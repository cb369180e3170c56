"""What is peculiar to the two steps for a latent Gaussian process; `test_contract` has the rest.

Statistical assertions state their null probability; the shared one is `models.FALSE_ALARM`, 1e-6.
"""

import copy
import functools
import pickle
import re
import warnings

import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from conftest import CASES, LATENT, STEPS
from latent_data import glass
from latent_likelihoods import squared_exponential
from models import (
    COUNTS,
    FALSE_ALARM,
    INPUTS,
    PLAIN,
    UNCOMPILED,
    Shift,
    begin,
    latent,
    latent_needle,
    run,
    sample,
    values,
)
from pymc.exceptions import SamplingError
from pymc.stats.convergence import WarningType
from pymc.step_methods.compound import CompoundStep
from references import z_scores
from scipy import stats

from pymc_kameleon import EllipticalSliceStep, KameleonStep, RiemannianHMCStep
from pymc_kameleon.latent_gp import expectation_propagation
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.reader.prior import ModelPrior
from pymc_kameleon.latent_gp.riemannian_metric import LocalGeometry
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.steps import elliptical_slice
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = pytest.mark.filterwarnings("ignore:Detected variables likely created by GP objects")


# models -------------------------------------------------------------------------------------------


def poisson(**kwargs):
    """One free variable."""
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(latent(**kwargs)), observed=COUNTS)
    return model


def two_functions():
    """Two latent functions whose sum is observed: each is a part of the other's likelihood."""
    with pm.Model() as model:
        f, g = latent("f"), latent("g", lengthscale=0.5, reparameterize=False)
        pm.Poisson("y", pt.exp(f + g), observed=COUNTS)
    return model


def wall():
    """The likelihood is zero where f > 1."""
    with pm.Model() as model:
        f = latent()
        pm.Potential("wall", pt.switch(f > 1, -np.inf, -0.5 * f**2))
    return model


@functools.cache
def _model(make):
    return make()


@functools.cache
def _step(make, name):
    return STEPS[name].make(["f"], model=_model(make))


def alone(name):
    """Model and step, as the contract has them."""
    case = CASES[name]
    return case.model, case.step()


def beside(name, shift=0.01):
    """A model with a lengthscale that another step moves, our step, and both as one."""
    case = CASES[f"{name}-beside"]
    step = case.step().methods[0]
    return (
        case.model,
        step,
        CompoundStep([step, Shift([case.model["parent"]], shift=shift, model=case.model)]),
    )


@pytest.fixture(params=LATENT)
def name(request):
    """Every step in turn."""
    return request.param


# vars ---------------------------------------------------------------------------------------------


def test_vars_may_be_the_variable_behind_the_function():
    model, _, _ = beside("slice_prior")
    behind = model["f_rotated_"]
    make = functools.partial(EllipticalSliceStep, approximation="prior", compile_kwargs=UNCOMPILED)
    with model:
        step = make((model.rvs_to_values[behind],))
        assert [v.name for v in step.vars] == ["f_rotated_"] and step.function.name == "f"
        assert isinstance(make("f", blocked=False), EllipticalSliceStep)


@pytest.mark.parametrize("make", [RiemannianHMCStep, EllipticalSliceStep])
def test_a_single_latent_function_is_found(make):
    with pm.Model():
        count = pm.Poisson("count", 3, shape=4)
    assert not make.competence(count, True)
    assert make(model=_model(poisson), compile_kwargs=UNCOMPILED).function.name == "f"


def discrete():
    with pm.Model() as model:
        pm.Normal("y", pm.Poisson("count", 3, shape=4), 1, observed=np.zeros(4))
    return model


def with_parent():
    return CASES["slice_prior-beside"].model


BOTH, RMHMC, SLICE = (
    (RiemannianHMCStep, EllipticalSliceStep),
    (RiemannianHMCStep,),
    (EllipticalSliceStep,),
)


@pytest.mark.parametrize(
    ("makes", "build", "options", "words"),
    [
        (BOTH, with_parent, {}, r"one latent function.*parent"),
        (BOTH, with_parent, {"vars": ["f", "f_rotated_"]}, "one latent function"),
        (BOTH, with_parent, {"vars": []}, "no free variable"),
        (BOTH, discrete, {"vars": ["count"]}, "count is discrete"),
        (RMHMC, poisson, {"step_size": 0}, "step_size"),
        (RMHMC, poisson, {"n_steps": 0}, "n_steps"),
        (RMHMC, poisson, {"_published": {"n_fixed_point": 0}}, "n_fixed_point"),
        (RMHMC, poisson, {"target_accept": 1.0}, "target_accept"),
        (RMHMC, poisson, {"soft_floor": -1.0}, "soft_floor"),
        (SLICE, poisson, {"approximation": "mode"}, "approximation='mode'.*'laplace'"),
        (SLICE, poisson, {"steps_per_draw": 0}, "steps_per_draw"),
    ],
)
def test_what_is_refused(makes, build, options, words):
    for make in makes:
        with pytest.raises(ValueError, match=words):
            make(model=_model(build), **options)


# chains -------------------------------------------------------------------------------------------


def test_a_copy_notices_what_another_copy_saw_first(name):
    """Copies share the compiled prior, so only one of them sees it change."""
    model, step, _ = beside(name)
    twin = copy.copy(step)
    begin(step, 1), begin(twin, 1)
    there = model.initial_point() | {"parent": np.array(0.7)}
    for one, point in ((step, model.initial_point()), (twin, there), (step, there)):
        one.step(point)
    covariance = squared_exponential(INPUTS, np.exp(0.7), 1.5).covariance
    precision = getattr(step, "site_precision", None)
    if precision is not None:
        covariance = np.linalg.inv(np.linalg.inv(covariance) + np.diag(precision))
    np.testing.assert_allclose(step._target.base.covariance, covariance, atol=1e-4)


# sampling state -----------------------------------------------------------------------------------


@pytest.mark.numerics
def test_state_stays_small(name):
    """Vectors of length N only, and no more of them after a hundred draws than after one."""
    n = 36
    with pm.Model() as model:
        log_lengthscale = pm.Normal("log_lengthscale", 0, 0.5)
        f = latent(lengthscale=pt.exp(log_lengthscale), inputs=np.linspace(-9, 9, n)[:, None])
        pm.Poisson("y", pt.exp(f), observed=np.tile(COUNTS, n // len(COUNTS)))
        step = STEPS[name].make([f], compile_kwargs=UNCOMPILED)
    compound = CompoundStep([step, Shift([log_lengthscale], shift=0.01, model=model)])
    sizes = []
    for length in (1, 20):
        run(compound, model, length, tune=15)
        state = step.sampling_state
        arrays = [v for v in vars(state).values() if isinstance(v, np.ndarray)]
        assert arrays and all(a.shape == (n,) for a in arrays)
        sizes.append(len(pickle.dumps(state)))
    assert sizes[1] <= sizes[0] + 200
    assert sizes[1] < 4 * 8 * n + 4000
    assert step._target is not None
    clone = cloudpickle.loads(cloudpickle.dumps(step))
    assert clone._target is None and step._target is not None


# lengths ------------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_what_is_learnt_does_not_depend_on_the_function(name):
    """The same hyperparameters and other functions: the same sites, or the same floor."""
    (_, step, _), learnt = beside(name), []
    for scale in (0.0, 1.5):
        begin(step, tune=10)
        rng = np.random.default_rng(3)
        for i in range(12):
            if i == 10:
                step.stop_tuning()
            f = scale * rng.standard_normal(6)
            # Where the step itself led is given up.
            step.step({"parent": np.array(0.05 * i), "f_rotated_": f})
        attributes = ("site_precision", "site_shift", "soft_floor")
        learnt.append([getattr(step, attribute, None) for attribute in attributes])
    for first, second in zip(*learnt, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.numerics
def test_sites_follow_the_hyperparameters_while_tuning():
    model, _, compound = beside("slice_ep", shift=0.05)
    _, statistics, _ = run(compound, model, 60, tune=40)
    fits = [s[0]["n_refits"] for s in statistics]
    # At draws 0, 1, 2, 4, 8, 16, 32 and after tuning.
    assert fits[:9] == [1, 2, 3, 3, 4, 4, 4, 4, 5]
    assert fits[39:] == [7.0] + [8.0] * 20
    model, step = alone("slice_ep")
    _, statistics, _ = run(step, model, 60, tune=40)
    assert {s["n_refits"] for s in statistics} == {1.0}


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["counts", "waiting times"])
def test_slices_leave_a_start_in_a_tail_that_is_heavier_than_the_centre(kind, level=5.0):
    inputs, rng = np.linspace(0, 5, 12)[:, None], np.random.default_rng(1)
    logs = level + np.sin(inputs[:, 0])
    with pm.Model() as model:
        f = latent(inputs=inputs, amplitude=4.0)
        if kind == "counts":
            pm.Poisson("y", pt.exp(f), observed=rng.poisson(np.exp(logs)))
        else:
            pm.Gamma("y", 4.0, pt.exp(f), observed=rng.gamma(4.0, np.exp(-logs)))
    approximation = expectation_propagation(model, f)
    deviations = np.sqrt(np.diag(approximation.posterior.covariance))
    step = EllipticalSliceStep(["f"], model=model, compile_kwargs=UNCOMPILED)
    points, _, _ = run(step, model, 620, tune=20)
    draws = np.array([step.function.prior.to_function(point) for point in points])
    z = (draws[20:].mean(axis=0) - approximation.posterior.mean) / deviations
    # Mean of some 300 effective draws, in sds, and an approximation that is right to a tenth.
    assert np.abs(z).max() < 0.1 + 5.0 / np.sqrt(300)


@pytest.mark.numerics
@pytest.mark.parametrize("tune", [0, 60])
def test_step_size_is_learnt_to_the_target(tune):
    model, step = alone("riemannian")
    _, statistics, _ = run(step, model, tune + 100, tune=tune)
    sizes = [s["step_size"] for s in statistics]
    assert len(set(sizes[:tune])) == tune
    assert set(sizes[tune:]) == {step.step_size}
    assert (step.step_size == step.first_step_size) == (tune == 0)
    if tune:
        assert step.step_size == step.averaging.learnt
        # A hundred acceptances have a mean within 0.15 of their expectation, and sixty draws learn
        # it within as much.
        assert abs(np.mean([s["accept"] for s in statistics[tune:]]) - 0.8) < 0.3


@pytest.mark.numerics
def test_a_chain_that_never_moves_keeps_a_positive_step_size():
    model = latent_needle()
    step = RiemannianHMCStep(model=model, compile_kwargs=UNCOMPILED)
    begin(step)
    # As after five thousand trajectories that failed.
    step.averaging.shortfall, step.averaging.n_updates = 0.8, 5000
    step.averaging.log_average = -800.0
    point, (statistics,) = step.step(model.initial_point())
    assert statistics["accepted"] == 0 and step.averaging.step_size == 0 < step.step_size
    step.step(point)
    step.stop_tuning()
    assert step.step_size > 0
    step.step(point)


@pytest.mark.numerics
def test_paper_settings():
    step = RiemannianHMCStep.paper(model=_model(poisson), compile_kwargs=UNCOMPILED)
    _, statistics, _ = run(step, _model(poisson), 12, tune=6)
    for s in statistics:
        assert s["step_size"] == 0.1 and s["n_leapfrog"] == 10 and s["n_fixed_point"] == 10
        assert s["not_converged"] == s["not_reversible"] == 0


# statistics ---------------------------------------------------------------------------------------


def test_log_ratio_and_evaluations_are_those_of_the_draw():
    model, step = alone("slice_prior")
    _, statistics, point = run(step, model, 5, tune=2)
    likelihood = stats.poisson.logpmf(COUNTS, np.exp(step.position)).sum()
    np.testing.assert_allclose(statistics[-1]["log_ratio"], likelihood)
    np.testing.assert_allclose(step.function.prior.to_function(point["f_rotated_"]), step.position)
    assert all(s["n_evals"] >= 2 for s in statistics)


def test_energy_is_that_of_the_draw():
    model, step = alone("riemannian")
    begin(step)
    point = model.initial_point()
    for _ in range(10):
        point, (statistics,) = step.step(point)
        potential = step._geometry.energy(np.zeros(6))
        assert statistics["energy"] >= potential
        np.testing.assert_array_equal(step._geometry.position, step.position)


# compound steps -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_beside_nuts_and_metropolis():
    """Names and types of statistics agree with theirs; discrete variables go to Metropolis."""
    with pm.Model() as model:
        log_lengthscale = pm.Normal("log_lengthscale", 0, 0.5)
        excess = pm.Poisson("excess", 1)
        f, g = latent("f", lengthscale=pt.exp(log_lengthscale)), latent("g")
        pm.Poisson("y", pt.exp(f) + 0.1 + excess, observed=COUNTS)
        pm.Poisson("z", pt.exp(g), observed=COUNTS)
        classes = (RiemannianHMCStep, EllipticalSliceStep)
        steps = [
            make([v], compile_kwargs=UNCOMPILED) for make, v in zip(classes, (f, g), strict=True)
        ]
        steps += [
            pm.NUTS([log_lengthscale], compile_kwargs=UNCOMPILED, max_treedepth=2),
            pm.Metropolis([excess], compile_kwargs=UNCOMPILED),
        ]
    idata = sample(steps, model, draws=4, tune=4)
    for step_class in classes:
        own = set(step_class.stats_dtypes_shapes) - {"warning"}
        assert own | {"diverging", "scaling"} <= set(idata["sample_stats"].data_vars)
    assert values(idata, "f").shape == (1, 4, 6)


@pytest.mark.numerics
def test_two_functions_each_with_its_step():
    model = _model(two_functions)
    steps = [
        EllipticalSliceStep(["f"], model=model, compile_kwargs=UNCOMPILED),
        RiemannianHMCStep(["g"], model=model, compile_kwargs=UNCOMPILED),
    ]
    idata = sample(steps, model, draws=5, tune=5)
    assert values(idata, "f").shape == values(idata, "g").shape == (1, 5, 6)
    _, _, point = run(CompoundStep(steps), model, 3, tune=2)
    first, second = (step.function for step in steps)
    for function in (first, second):
        function.set_point(point)
        function.refresh()
    f, g = first.prior.to_function(point["f_rotated_"]), point["g"]
    expected = stats.poisson.logpmf(COUNTS, np.exp(f + g)).sum()
    np.testing.assert_allclose(first.likelihood.value(f), expected, rtol=1e-6)
    np.testing.assert_allclose(second.likelihood.value(g), expected, rtol=1e-6)


# counts -------------------------------------------------------------------------------------------


@pytest.fixture
def refreshed(monkeypatch):
    """Number of times that a prior was computed, in a list."""
    calls, refresh = [], ModelPrior.refresh
    monkeypatch.setattr(ModelPrior, "refresh", lambda prior: (calls.append(1), refresh(prior))[1])
    return calls


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_the_prior_is_computed_only_where_hyperparameters_moved(name, shift, refreshed):
    model, step, compound = beside(name, shift)
    begin(compound)
    point = model.initial_point()
    for i in range(15):
        if i == 10:
            compound.stop_tuning()
        lengthscale = np.exp(point["parent"])
        point, _ = compound.step(point)
        expected = squared_exponential(INPUTS, lengthscale, 1.5).covariance
        np.testing.assert_allclose(step.function.prior.gaussian.covariance, expected, atol=1e-5)
        assert len(refreshed) <= (i + 1 if shift else 1)
        f = step.function.prior.to_function(point["f_rotated_"])
        np.testing.assert_allclose(f, step.position, atol=1e-9)


@pytest.mark.numerics
def test_the_centre_is_computed_only_where_hyperparameters_moved(monkeypatch):
    """A likelihood that another function moves leaves the prior times sites alone."""
    calls, with_sites = [], elliptical_slice.with_sites
    monkeypatch.setattr(
        elliptical_slice, "with_sites", lambda *a: (calls.append(1), with_sites(*a))[1]
    )
    model = _model(two_functions)
    step = EllipticalSliceStep(["f"], model=model, compile_kwargs=UNCOMPILED)
    other = Shift([model["g"]], shift=0.01, model=model)
    run(CompoundStep([step, other]), model, 20, tune=10)
    # The fits of draws 0, 1, 2, 4, 8 and 10.
    assert len(calls) == 6


@pytest.mark.numerics
def test_metrics_are_those_of_the_steps_only(monkeypatch):
    """The geometry where a trajectory begins is that where the last one ended."""
    calls, initialise = [], LocalGeometry.__init__

    def counted(geometry, *args):
        calls.append(1)
        initialise(geometry, *args)

    monkeypatch.setattr(LocalGeometry, "__init__", counted)
    model, step = alone("riemannian")
    _, statistics, _ = run(step, model, 20, tune=10)
    assert not any(s["diverging"] for s in statistics)
    failed = sum(s["not_converged"] + s["not_reversible"] for s in statistics)
    steps = sum(s["n_leapfrog"] for s in statistics)
    assert steps + 1 - failed <= len(calls) <= steps + 1


def test_the_function_is_that_of_any_point_from_outside(name):
    model, step = alone(name)
    run(step, model, 4, tune=2)
    rng = np.random.default_rng(0)
    for _ in range(5):
        point, _ = step.step({"f_rotated_": rng.standard_normal(6)})
        f = step.function.prior.to_function(point["f_rotated_"])
        np.testing.assert_allclose(f, step.position, atol=1e-9)


# what cannot be computed --------------------------------------------------------------------------


def test_covariance_that_is_not_positive_definite_is_an_error_every_time(name):
    """Also at the second attempt, when the values that spoil it are no longer new."""
    with pm.Model() as model:
        share = pm.Normal("share", 1, 1)
        covariance = share * pt.as_tensor(squared_exponential(INPUTS, 1.0, 1.5).covariance)
        f = pm.MvNormal("f", np.zeros(6), cov=covariance)
        pm.Poisson("y", pt.exp(f), observed=COUNTS)
        step = STEPS[name].make([f], compile_kwargs=UNCOMPILED)
    good = model.initial_point()
    bad = good | {"share": np.array(-1.0)}
    begin(step)
    for point in (bad, bad):
        with pytest.raises(SamplingError, match=r"not positive definite.*eigenvalue.*jitter"):
            step.step(point)
    begin(step)
    with pytest.raises(SamplingError, match="not positive definite"):
        step.step(bad)
    step.step(good)
    np.testing.assert_allclose(step.function.prior.gaussian.covariance[0, 0], 2.25, rtol=1e-3)


def test_start_without_likelihood_is_an_error_that_names_the_function(name):
    step = STEPS[name].make(model=_model(wall), compile_kwargs=UNCOMPILED)
    begin(step)
    with pytest.raises(SamplingError, match=r"Initial evaluation of f failed.*initvals"):
        step.step({"f_rotated_": np.full(6, 3.0)})
    step.step({"f_rotated_": np.zeros(6)})
    assert step.position.max() <= 1


def student():
    """Log-concave where the residuals are small against the scale only."""
    with pm.Model() as model:
        log_scale = pm.Normal("log_scale", 0, 1)
        f = latent(reparameterize=False)
        pm.StudentT("y", nu=3, mu=f, sigma=pt.exp(log_scale), observed=np.zeros(6))
    return model


@pytest.mark.numerics
def test_a_place_without_a_metric_is_stayed_at():
    """Another step may lead there; at the start of a chain it is an error."""
    model = _model(student)
    step = RiemannianHMCStep(["f"], model=model, soft_floor=0.0, compile_kwargs=UNCOMPILED)
    begin(step)
    start = {"log_scale": np.array(3.0), "f": np.full(6, 1.0)}
    point, (statistics,) = step.step(start)
    assert statistics["diverging"] == 0
    learnt = step.averaging.log_step
    point["log_scale"] = np.array(-3.0)
    stayed, (statistics,) = step.step(point)
    np.testing.assert_array_equal(stayed["f"], point["f"])
    assert statistics["diverging"] == 1 and statistics["accept"] == statistics["n_leapfrog"] == 0
    assert step.averaging.log_step == learnt
    _, (statistics,) = step.step(stayed | {"log_scale": np.array(3.0)})
    assert statistics["n_leapfrog"] > 0
    begin(step)
    with pytest.raises(SamplingError, match=r"cannot start.*f.*soft_floor"):
        step.step(point)


@pytest.mark.numerics
def test_the_floor_follows_the_likelihood():
    """It is 0 where the likelihood is log-concave, whatever it was at the start."""
    model = _model(student)
    step = RiemannianHMCStep(["f"], model=model, compile_kwargs=UNCOMPILED)
    begin(step)
    point, floors = model.initial_point(), []
    for log_scale in (4.0, 0.0, -1.0, 4.0):
        point, _ = step.step(point | {"log_scale": np.array(log_scale)})
        floors.append(step.soft_floor)
    assert floors[0] == floors[3] == 0.0 and 0 < floors[1] < floors[2]


# warnings -----------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_poor_centre_says_so_once_however_often_it_is_fitted(monkeypatch):
    def unconverged(prior, likelihood):
        warnings.warn("it has not converged", UserWarning, stacklevel=2)
        warnings.warn("overflow", RuntimeWarning, stacklevel=2)
        return type("Fit", (), {"sites": Sites.flat(prior.size), "posterior": prior})

    def impossible(prior, likelihood):
        raise ValueError("it is not finite at the prior mean")

    model, _, compound = beside("slice_ep")
    for fit, reason in ((unconverged, "not converged"), (impossible, "not finite at")):
        monkeypatch.setattr(elliptical_slice, "expectation_propagation_approximation", fit)
        _, statistics, _ = run(compound, model, 20, tune=10)
        assert statistics[-1][0]["n_refits"] == 6
        told = [s[0]["warning"].message for s in statistics if "warning" in s[0]]
        assert len(told) == 1 and "poor" in told[0] and "f" in told[0] and reason in told[0]


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("options", "tune", "words"),
    [
        (
            {"step_size": 4.0, "adapt_step_size": False},
            10,
            ["trajectories of f failed.*below 4"],
        ),
        (
            {"step_size": 1e-3},
            0,
            ["acceptance of f is 1.00.*0.80", "of this chain have an effective size of"],
        ),
    ],
)
def test_trajectories_that_fail_or_are_too_short_say_so_once(options, tune, words):
    step = RiemannianHMCStep(model=_model(poisson), compile_kwargs=UNCOMPILED, **options)
    _, statistics, _ = run(step, _model(poisson), 130, tune)
    told = [s["warning"] for s in statistics if "warning" in s]
    assert len(told) == len(words)
    assert all(re.search(w, warning.message) for w, warning in zip(words, told, strict=True))
    if tune == 0:
        assert told[0].kind is WarningType.BAD_ACCEPTANCE


@pytest.mark.numerics
@pytest.mark.parametrize("case", [case for case in CASES if case.split("-")[0] in LATENT])
def test_chains_in_order_say_nothing(case):
    draws = 800 if case.startswith("slice_prior") else 110  # it mixes the worst
    _, statistics, _ = run(CASES[case].step(), CASES[case].model, 50 + draws, tune=50)
    told = [s for s in statistics if "warning" in (s if isinstance(s, dict) else s[0])]
    assert told == []


# invariance ---------------------------------------------------------------------------------------

SPREAD = 0.7


class Repeated:
    """A step whose draw is several draws of another one: a few transitions hide a wrong ratio."""

    def __init__(self, step, times):
        self._step, self._times, self.var_names = step, times, step.var_names

    def step(self, point):
        for _ in range(self._times):
            point, statistics = self._step.step(point)
        return point, statistics


def p_values(step, posterior_draws, times, n):
    """Exact draws of f, moved by the step as draws of the free variable, and compared with exact.

    Each p-value has null probability 1e-6 of falling below `FALSE_ALARM`.
    """
    prior = step.function.prior
    variables = np.array([prior.to_variable(f) for f in posterior_draws])
    mean, factor = variables.mean(axis=0), np.linalg.cholesky(np.cov(variables.T))

    def distance(x):
        return (np.linalg.solve(factor, (x - mean).T) ** 2).sum(axis=0)

    comparisons = {"distance": distance, "sum": lambda x: x.sum(axis=1)}
    return invariance_p_values(Repeated(step, times), variables[:n], variables[n:], comparisons)


def gaussian(reparameterize=True):
    """Normal observations of a prior with a mean: the posterior is a Gaussian."""
    with pm.Model() as model:
        mean = pm.gp.mean.Constant(0.5)
        process = pm.gp.Latent(mean_func=mean, cov_func=1.5**2 * pm.gp.cov.ExpQuad(1, 1.0))
        f = process.prior("f", X=INPUTS, reparameterize=reparameterize)
        pm.Normal("y", f, SPREAD, observed=COUNTS - 1.0)
    return model


@functools.cache
def gaussian_draws():
    prior = squared_exponential(INPUTS, 1.0, 1.5, jitter=1e-6 / 1.5**2)
    covariance = np.linalg.inv(np.linalg.inv(prior.covariance) + np.eye(6) / SPREAD**2)
    mean = 0.5 + covariance @ ((COUNTS - 1.5) / SPREAD**2)
    normals = np.random.default_rng(11).standard_normal((50_000, 6))
    return mean + normals @ np.linalg.cholesky(covariance).T


EXACT = {
    "riemannian": (True, {}),
    "ep": (False, {"approximation": "ep"}),
    "laplace": (True, {"approximation": "laplace"}),
    "prior": (False, {"approximation": "prior"}),
    "sites of another likelihood": (True, {"approximation": "ep"}),
}


def slices(reparameterize, **options):
    model = _model(gaussian) if reparameterize else _model(functools.partial(gaussian, False))
    step = EllipticalSliceStep(
        ["f"], model=model, steps_per_draw=25, compile_kwargs=PLAIN, **options
    )
    return frozen(step, 21)


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_draws_of_a_gaussian_posterior_stay_exact(name):
    reparameterize, options = EXACT[name]
    if name == "riemannian":
        step, times, n = frozen(_step(gaussian, name), 21), 4, 250
    else:
        step, times, n = slices(reparameterize, **options), 1, 600
    if "another" in name:
        step.site_precision, step.site_shift = np.linspace(0.2, 3, 6), np.linspace(2, -2, 6)
        step.next_fit = None
    found = p_values(step, gaussian_draws(), times, n)
    assert min(found.values()) > FALSE_ALARM, found


@pytest.mark.numerics
@pytest.mark.sabotage
def test_a_log_ratio_that_keeps_the_sites_is_caught(monkeypatch):
    def without_sites(base, likelihood, scale=1.0, sites=None):
        return TemperedTarget(base, likelihood, scale)

    monkeypatch.setattr(elliptical_slice, "TemperedTarget", without_sites)
    found = p_values(slices(True), gaussian_draws(), 1, 600)
    assert min(found.values()) < FALSE_ALARM, found


# posteriors ---------------------------------------------------------------------------------------


def counts_with_hyperparameters():
    """Twelve counts whose lengthscale and amplitude are unknown."""
    inputs = np.linspace(-3, 3, 12)[:, None]
    observed = np.array([0, 1, 1, 3, 6, 4, 2, 0, 0, 1, 2, 5])
    with pm.Model() as model:
        lengthscale = pm.LogNormal("lengthscale", 0, 0.5)
        amplitude = pm.LogNormal("amplitude", 0, 0.5)
        f = latent("f", lengthscale, amplitude, inputs)
        pm.Poisson("y", pt.exp(f), observed=observed)
    return model


def numbers(idata):
    """Logs of the hyperparameters, and f at four inputs: (chain, draw, 6)."""
    hyper = [np.log(values(idata, name))[..., None] for name in ("lengthscale", "amplitude")]
    return np.concatenate([*hyper, values(idata, "f")[..., [0, 4, 7, 11]]], axis=-1)


def glass_classification():
    """Every n-th row of glass, with hyperparameters near those of the largest evidence."""
    inputs, labels = glass()
    inputs, labels = inputs[:: len(inputs) // 40][:40], labels[:: len(labels) // 40][:40]
    with pm.Model() as model:
        f = latent("f", np.exp(1.5), np.exp(1.0), inputs)
        pm.Bernoulli("y", p=pm.math.invprobit(f), observed=(labels > 0).astype(int))
    return model


def function_values(idata):
    return values(idata, "f")[..., ::10]


def assert_agrees_with_nuts(draws, name):
    """Six standard errors: null probability 2e-9 for each number."""
    z = z_scores(draws, name)
    assert np.all(np.abs(z) < 6), f"{name}: {z} standard errors from NUTS"


@pytest.mark.numerics
@pytest.mark.slow
def test_compound_with_hyperparameters_agrees_with_nuts():
    """What other steps do to the prior reaches both steps by the same way: one stands for both."""
    model = _model(counts_with_hyperparameters)
    with model:
        hyperparameters = [model["lengthscale"], model["amplitude"]]
        steps = [KameleonStep(hyperparameters, steps_per_draw=10, compile_kwargs=PLAIN)]
        steps += [EllipticalSliceStep(["f"], compile_kwargs=PLAIN)]
    idata = sample(steps, model, draws=1500, tune=200, random_seed=4)
    assert_agrees_with_nuts(numbers(idata), "counts")


@pytest.mark.numerics
@pytest.mark.slow
def test_moments_of_classification_agree_with_nuts():
    model = glass_classification()
    with model:
        runs = [
            sample(EllipticalSliceStep(["f"], compile_kwargs=PLAIN), draws=1500, tune=10),
            sample(RiemannianHMCStep(["f"], compile_kwargs=PLAIN), draws=150, tune=30),
        ]
    for idata in runs:
        assert_agrees_with_nuts(function_values(idata), "glass")
