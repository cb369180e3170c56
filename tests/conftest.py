"""One battery for every step: a new step is a row of `STEPS`, and its tests are there."""

import dataclasses
import functools
import gc
import signal
from collections.abc import Callable

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import COUNTS, PLAIN, Shift
from pymc.step_methods.compound import CompoundStep

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    MultilevelStep,
    ParallelTemperingStep,
    PCAKameleonStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
)
from pymc_kameleon.surrogate.hmc import LENGTHS

LONG = "slow", "numerics", "documentation"
"""Markers of tests that a first look at the package leaves out."""

PYMC_6 = int(pm.__version__.split(".")[0]) >= 6


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what is long, before `-m` selects."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & set(LONG) and not (PYMC_6 and "sabotage" in marks):
            item.add_marker("long")


# Graphs of models are many small objects: looking through them after every 700 that are new took
# 6 % of the time of the tests.
gc.set_threshold(50_000, 20, 20)


def _vector(name, parent):
    """Two numbers of different scales."""
    return pm.Normal(name, parent + np.array([-1.0, 1.0]), np.array([0.1, 10.0]), shape=2)


def _counts(name, parent):
    """A latent function that is observed by counts."""
    f = models.latent(name, lengthscale=pt.exp(parent))
    pm.Poisson(f"data of {name}", pt.exp(f), observed=COUNTS)
    return f


def _counts_of_unknown_amplitude(name, parent):
    """The same, of an amplitude that the step moves too."""
    amplitude = pm.HalfNormal(f"{name}_amplitude", 2.0)
    f = models.latent(name, lengthscale=pt.exp(parent), amplitude=amplitude)
    pm.Poisson(f"data of {name}", pt.exp(f), observed=COUNTS)
    return f


def _needle_of_unknown_amplitude():
    """The function may be 0 only, whatever its amplitude, and that may be what it is only."""
    with pm.Model() as model:
        amplitude = pm.Normal("amplitude", 1.0, 1.0, initval=1.0)
        f = models.latent("g", amplitude=amplitude)
        away = pt.neq(f, 0) | pt.neq(amplitude, 1)
        pm.Potential("needle", pt.switch(away, -np.inf, 0.0) - 0.5 * f**2)
    return model


def _latent_gp(vars=None, **options):
    """A step for a function and its amplitude, and not for a parent of its lengthscale."""
    if vars:
        name = getattr(vars[0], "name", vars[0])
        vars = [name, f"{name}_amplitude"]
    return LatentGPStep(vars, **options)


def _multilevel(vars=None, *, model=None, **options):
    """A step whose coarse model is the fine one."""
    model = pm.modelcontext(model)
    return MultilevelStep(vars, coarse=[model], model=model, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A step, what it moves in a small model, and what its tests have to know of it.

    `make` takes the arguments that all steps take; each of the options `different` makes a step of
    another configuration. The progress bar has `columns`; the statistic `constant` no longer
    changes after tuning; `told_of_a_needle` is said of a chain that cannot move, besides that it
    is stuck. `add` adds `variable`, of a name and a parent, to the model of the context; in that of
    `needle` nothing but the start is possible. All that is learnt is learnt in `tune` draws, and
    two chains differ after `draws`. Moves with the options `tiny` are too short to be refused.
    """

    make: Callable
    different: tuple
    columns: tuple
    constant: str
    told_of_a_needle: tuple
    variable: str
    add: Callable
    needle: Callable
    tune: int
    draws: int
    tiny: dict = dataclasses.field(default_factory=dict)

    @property
    def step_class(self):
        return getattr(self.make, "func", self.make)


def _metropolis_hastings(step_class, tiny, scaling="scaling", **options):
    constant = scaling if scaling == "step_size" else "scaling"
    return Kind(
        make=functools.partial(step_class, steps_per_draw=1, **options),
        different=(
            {"steps_per_draw": 3},
            {"target_accept": 0.3},
            {"adapt_after_tune": True},
            {"learn_scaling": False},
            {scaling: 0.5},
        ),
        columns=("Accept", "Evals"),
        constant=constant,
        told_of_a_needle=("short",),
        variable="x",
        add=_vector,
        needle=models.needle,
        tune=400,
        draws=100,
        tiny=tiny,
    )


def _latent(step_class, **rest):
    return Kind(
        make=functools.partial(step_class, compile_kwargs=PLAIN, **rest.pop("options", {})),
        variable="f",
        add=_counts,
        needle=models.latent_needle,
        tune=12,
        draws=12,
        **rest,
    )


_NO_KERNEL = {"gamma": 1e-6, "global_share": 0.0, "standardize": False, "bandwidth": 1.0}
_IDENTITY = {"covariance": "identity"}
_SLICE = {"columns": ("Evals", "Log ratio"), "constant": "n_refits"}

STEPS = {
    "kameleon": _metropolis_hastings(KameleonStep, _NO_KERNEL, n_subsample=100),
    "fast_kameleon": _metropolis_hastings(FastKameleonStep, _NO_KERNEL, n_features=60),
    "pca_kameleon": _metropolis_hastings(PCAKameleonStep, _NO_KERNEL, n_subsample=100),
    "adaptive_metropolis": _metropolis_hastings(
        AdaptiveMetropolisStep, _IDENTITY, "covariance_scaling"
    ),
    "mala": _metropolis_hastings(MALAStep, _IDENTITY, "step_size"),
    "surrogate_hmc": dataclasses.replace(
        _metropolis_hastings(SurrogateHMCStep, {}, "step_size", max_points=100, start="here"),
        different=({"steps_per_draw": 3}, {"target_accept": 0.3}, {"max_points": 50}),
        columns=("Accept", "Calls"),
        tune=100,
    ),
    "multilevel": dataclasses.replace(
        _metropolis_hastings(_multilevel, {}),
        different=({"steps_per_draw": 3}, {"subchain_length": 3}, {"cost_ratio": 4.0}),
        columns=("Accept", "Evals", "Coarse"),
        constant="subchain_length",
        tune=60,
    ),
    "parallel_tempering": dataclasses.replace(
        _metropolis_hastings(ParallelTemperingStep, {}, n_temperatures=4),
        different=({"steps_per_draw": 3}, {"n_temperatures": 5}, {"n_moves": 7}),
        constant="n_temperatures",
    ),
    "riemannian": _latent(
        RiemannianHMCStep,
        different=(
            {"step_size": 0.3},
            {"n_steps": 5},
            {"_published": {"n_fixed_point": 4}},
            {"target_accept": 0.7},
            {"adapt_step_size": False},
            {"_published": {"random_length": False}},
            {"soft_floor": 0.1},
        ),
        columns=("Accept", "Leaps"),
        constant="step_size",
        told_of_a_needle=("failed",),
    ),
    "latent_gp": Kind(
        make=functools.partial(_latent_gp, compile_kwargs=PLAIN),
        different=(
            {"approximation": "laplace"},
            {"steps_per_draw": 3},
            {"n_slices": 5},
            {"target_accept": 0.3},
        ),
        columns=("Accept", "Evals"),
        constant="n_refits",
        told_of_a_needle=(),
        variable="g",
        add=_counts_of_unknown_amplitude,
        needle=_needle_of_unknown_amplitude,
        tune=130,
        draws=12,
    ),
    "slice_ep": _latent(
        EllipticalSliceStep,
        different=({"approximation": "laplace"}, {"steps_per_draw": 3}),
        told_of_a_needle=("poor",),
        **_SLICE,
    ),
    "slice_prior": _latent(
        EllipticalSliceStep,
        options={"approximation": "prior"},
        different=({"approximation": "ep"},),
        told_of_a_needle=(),
        **_SLICE,
    ),
}
"""Name -> step; Laplace's centre has all of its life cycle in common with that of EP."""


@functools.cache
def small_model(add, variable, beside):
    """The variable alone, or with the parent that another step moves."""
    with pm.Model() as model:
        add(variable, pm.Normal("parent", 0, 0.5) if beside else 0.0)
    return model


class Case:
    """A step of a small model, alone or beside one that changes the model for it."""

    def __init__(self, name, beside):
        self.name, self.beside, self.kind = name, beside, STEPS[name]

    @property
    def model(self):
        return small_model(self.kind.add, self.kind.variable, self.beside)

    def step(self, which=0, plain=False):
        """A step, made once a run: each chain begins anew. For another `which`, another one.

        The log density of a `plain` one is the same to the last bit after pickling.
        """
        return _step(self, which, plain)


@functools.cache
def _step(case, which, plain):
    options = {"compile_kwargs": PLAIN} if plain else {}
    step = case.kind.make([case.kind.variable], model=case.model, **options)
    if not case.beside:
        return step
    shift = Shift([case.model["parent"]], shift=0.01, model=case.model)
    return CompoundStep([step, shift])


METROPOLIS_HASTINGS = [name for name, kind in STEPS.items() if kind.variable == "x"]
RANDOM_WALKS = [name for name in METROPOLIS_HASTINGS if STEPS[name].tiny]
LATENT = [name for name, kind in STEPS.items() if kind.variable == "f"]
# Walks without gradients have all in common but their proposals, and slices all but their centres:
# one does for what these do not touch.
WAYS_TO_RUN = ["kameleon", "mala", "surrogate_hmc"]
LATENT_WAYS = ["riemannian", "slice_ep", "latent_gp"]

CASES = {name: Case(name, beside=False) for name in STEPS} | {
    # How other variables reach a log density does not depend on the proposal.
    f"{name}-beside": Case(name, beside=True)
    for name in ["kameleon", "mala", "latent_gp", *LATENT]
}
ONE_OF_EACH = [*WAYS_TO_RUN, *LATENT_WAYS, "kameleon-beside", "latent_gp-beside"]

_BUILT = {}


def assert_evaluations(step, found, expected):
    """As many as expected; fewer only where moves on a surrogate may end where they began."""
    found, expected = np.asarray(found), np.asarray(expected)
    if isinstance(step, SurrogateHMCStep):
        assert np.all(found <= expected)
        assert found.sum() > 0.8 * expected.sum()
    else:
        np.testing.assert_array_equal(found, expected)


def built(make_step, model, **options):
    """A step of `model`, made once a run for equal arguments: each chain begins anew."""
    key = id(model), make_step, repr(options)
    if key not in _BUILT:
        # The model is kept too, so that no other one has its id.
        _BUILT[key] = model, make_step(model=model, **options)
    return _BUILT[key][1]


OLDER_TOO = {"kameleon", "kameleon-beside", "slice_ep", "latent_gp"}
"""Rows in which PyMC meets all that it meets in any: the newer one is enough for the others."""


def rows(names, older_too=OLDER_TOO, mark=pytest.mark.numerics):
    """Parameters of a fixture or a test, marked but for some: by default for the newer PyMC."""
    return [pytest.param(name, marks=() if name in older_too else mark) for name in names]


@pytest.fixture
def interruptible():
    """A shell has its jobs in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def quick_fits(monkeypatch):
    """A fit of `SurrogateHMCStep` anneals fewer particles in fewer stages, by short trajectories.

    For what does not depend on how well it fits.
    """
    monkeypatch.setattr("pymc_kameleon.surrogate.fit_posterior.N_TYPICAL", 50)
    monkeypatch.setattr("pymc_kameleon.surrogate.annealing.ABOVE_ONE", (4.0, 0.0))
    monkeypatch.setattr("pymc_kameleon.surrogate.hmc.LENGTHS", LENGTHS[:9])


def each(names, take, older_too=OLDER_TOO):
    """A fixture: what `take` takes for each of some names."""

    def fixture(request):
        return take(request.param)

    return pytest.fixture(params=rows(names, older_too))(fixture)


def _make(name):
    return STEPS[name].make


# A step of each way to run, and every step, with a model; and without one.
case = each(ONE_OF_EACH, CASES.get)
every_case = each([*STEPS, "kameleon-beside", "latent_gp-beside"], CASES.get)
kind = each([*WAYS_TO_RUN, *LATENT_WAYS], STEPS.get, older_too={"kameleon"})
# Functions of the arguments that all steps of any variables take: for every one, for each way to
# run, for those that need no gradient, and for those whose every move has a scaling.
make_step = each(METROPOLIS_HASTINGS, _make)
make_each_way = each(WAYS_TO_RUN, _make)
make_gradient_free = each(["kameleon", "surrogate_hmc"], _make)
make_random_walk = each(RANDOM_WALKS, _make)
# Those that take estimates of a likelihood: one of a single scaling, and one of several.
make_estimating = each(["kameleon", "pca_kameleon"], _make)
step_class = each(WAYS_TO_RUN, lambda name: STEPS[name].step_class)
