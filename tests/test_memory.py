"""Nothing from outside reaches compiled memory unchecked: a wrong size is an error, never a crash.

Where a mistake would kill the interpreter the test runs in a process of its own. The checks run all
tests on the older PyMC with NUMBA_BOUNDSCHECK=1, where an index out of range is an error too.
"""

import copy
import functools
import gc
import multiprocessing
import os
import re
import signal
import traceback

import cloudpickle
import conftest
import models
import numba
import numpy as np
import pymc as pm
import pytest
from models import assert_mean, begin, drive, sample, values
from numba.core.runtime import _nrt_python, rtsys
from pymc.exceptions import SamplingError

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
)
from pymc_kameleon.adaptation.learner import LearnerState
from pymc_kameleon.kernels import CustomKernel
from pymc_kameleon.mcmc.chain import evaluate
from pymc_kameleon.mcmc.proposals.local_gaussian import evaluate_gradients
from pymc_kameleon.pseudo_marginal import estimated_loglikelihood
from pymc_kameleon.steps.chain.sampler import ChainSampler

pytestmark = [
    pytest.mark.memory,
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_fits"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="A process of its own is a fork here."),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Detected variables likely created by GP objects"),
]

REFUSALS = (ValueError, TypeError, SamplingError)
SIZE = 3
MOST_SECONDS = 120
"""After which a process of its own, which takes seconds, hangs."""


def _report(function, pipe):
    try:
        pipe.send((function(), None))
    except BaseException as error:
        pipe.send((None, (type(error), str(error), traceback.format_exc())))


def in_own_process(function, log=None):
    """Result of a function of no arguments; fails if a signal killed the process.

    Returns the result, and the type, message and traceback of an exception or None.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(function, there))
    process.start()
    there.close()
    has_ended = here.poll(MOST_SECONDS)
    if not has_ended:
        process.kill()
    try:
        outcome = here.recv()
    except EOFError:
        outcome = None
    process.join()
    said = f" after\n{log.read_text()}" if log is not None and log.exists() else ""
    assert has_ended, f"did not end in {MOST_SECONDS} seconds{said}"
    assert process.exitcode == 0 and outcome is not None, (
        f"killed by signal {-process.exitcode}{said}"
    )
    return outcome


def test_a_killed_process_is_seen():
    with pytest.raises(AssertionError, match="killed by signal 9"):
        in_own_process(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="NUMBA_BOUNDSCHECK is not set.")
def test_bounds_are_checked_in_this_run():
    with pytest.raises(IndexError):
        numba.njit(lambda x: x[3])(np.zeros(3))


# a model that is resized --------------------------------------------------------------------------


def resizable(term=None):
    """x ~ N(0, 1) of as many values as `size` has, and observations of their sum."""
    with pm.Model(coords={"group": range(SIZE)}) as model:
        pm.Data("size", np.zeros(SIZE), dims="group")
        observed = pm.Data("observed", np.array([3.0]))
        x = pm.Normal("x", 0, 1, dims="group")
        if term is None:
            pm.Normal("y", x.sum(), 1, observed=observed, shape=observed.shape)
        else:
            pm.Potential("likelihood", term(x.sum(), observed))
    return model


def estimated(mean, observed):
    def log_estimate(mean, observed, rng):
        noise = 0.1 * rng.standard_normal()
        return -0.5 * np.sum((observed - mean) ** 2) + noise - 0.005

    return estimated_loglikelihood(log_estimate, mean, observed)


def beside():
    """The resizable model with a scalar that another step moves."""
    model = resizable()
    with model:
        pm.Normal("z", model["x"].sum(), 1)
    return model


def resize(model, n):
    with model:
        pm.set_data({"size": np.zeros(n)}, coords={"group": range(n)})


def observe(model, *observed):
    with model:
        pm.set_data({"observed": np.array(observed, dtype=float)})


def sum_of(n, *observed):
    """Posterior mean of the sum of x."""
    return n * sum(observed) / (1 + n * len(observed))


def two_steps():
    model = pm.modelcontext(None)
    return [AdaptiveMetropolisStep([model["x"]], steps_per_draw=10), pm.Slice([model["z"]])]


FAST = {"steps_per_draw": 20}
PLAIN = {"compile_kwargs": models.PLAIN}
SURROGATE = functools.partial(GPSurrogate, max_points=40, n_initial=10)
VARIANTS = {
    "kameleon": (resizable, lambda: KameleonStep(n_subsample=50, **FAST)),
    "fast": (resizable, lambda: FastKameleonStep(n_features=40, **FAST)),
    "pca": (resizable, lambda: PCAKameleonStep(n_subsample=50, **FAST)),
    "metropolis": (resizable, lambda: AdaptiveMetropolisStep(**FAST)),
    "mala": (resizable, lambda: MALAStep(**FAST)),
    "mala, plain": (resizable, lambda: MALAStep(**FAST, **PLAIN)),
    "surrogate": (resizable, lambda: AdaptiveMetropolisStep(surrogate=SURROGATE(), **FAST)),
    "gradient surrogate": (resizable, lambda: MALAStep(surrogate=SURROGATE(), **FAST)),
    "surrogate hmc": (
        resizable,
        lambda: SurrogateHMCStep(max_points=60, start="here", **FAST),
    ),
    "estimate": (
        functools.partial(resizable, estimated),
        lambda: KameleonStep(n_subsample=50, pseudo_marginal=True, **FAST),
    ),
    "beside slice": (beside, two_steps),
}


RESIZED = ["kameleon", "mala", "gradient surrogate", "surrogate hmc", "estimate", "beside slice"]
"""A random walk, a gradient, and what learns from values of one shape: the others add nothing."""


def rows(variants):
    """Variants as parameters: what reaches PyMC is the same in all but a few."""
    few = {"kameleon", "surrogate hmc", "beside slice", "slice, ep"}
    return conftest.rows(variants, few, pytest.mark.bounds)


@functools.cache
def used(variant):
    """A model and its step, which has sampled it."""
    make_model, make_step = VARIANTS[variant]
    model = make_model()
    with model:
        step = make_step()
    sample(step, model, draws=10, tune=30)
    return model, step


def draw_sum(variant, **options):
    model, step = used(variant)
    idata = sample(step, model, **({"draws": 900, "tune": 300} | options))
    return values(idata, "x").sum(axis=-1)


@pytest.mark.parametrize("variant", rows(RESIZED))
def test_a_resized_variable_is_refused_and_other_data_of_any_length_just_work(variant):
    """The error says what to do; the model may be set back."""
    model, _ = used(variant)

    def sample_other():
        observe(model, 1.0, 2.0, 3.0, 4.0)
        first = draw_sum(variant)
        for n in (1, 8):
            resize(model, n)
            with pytest.raises(ValueError) as raised:
                draw_sum(variant, draws=10)
            for words in (f"x has shape ({n},)", f"({SIZE},)", "make a new one"):
                assert words in str(raised.value)
        resize(model, SIZE)
        observe(model, 4.0)
        return first, draw_sum(variant)

    draws, error = in_own_process(sample_other)
    assert error is None, error[2]
    # The noise of the estimate is the same for all x: it changes no posterior.
    for found, observed in zip(draws, [(1.0, 2.0, 3.0, 4.0), (4.0,)], strict=True):
        if variant != "beside slice":
            assert_mean(found, sum_of(SIZE, *observed), variant)
        assert np.all(np.isfinite(found))


# what compiled code allocates ---------------------------------------------------------------------


def held():
    """Arrays that compiled code has made or been given and not let go, and all that it made."""
    gc.collect()
    counts = rtsys.get_allocation_stats()
    return counts.mi_alloc - counts.mi_free, counts.mi_alloc


@pytest.mark.parametrize("kind", rows([*VARIANTS][:5] + [*VARIANTS][6:10]))
def test_compiled_transitions_let_go_what_they_hold(kind):
    """Functions that make no arrays do not count them; a wrong `allocates` would leak."""
    _, step = used(kind)
    were_counted = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    try:
        point, before = {"x": np.zeros(SIZE)}, held()
        drive(begin(step, 1, 150, 50), point, 200, tune=150)
        after = held()
    finally:
        if not were_counted:
            _nrt_python.memsys_disable_stats()
    assert after[1] - before[1] > 2000
    assert abs(after[0] - before[0]) < 20


# a point from outside -----------------------------------------------------------------------------

POINTS = {
    "longer": ({"x": np.zeros(8)}, ValueError, "x has shape (8,)"),
    "shorter": ({"x": np.zeros(1)}, ValueError, "x has shape (1,)"),
    "scalar": ({"x": 0.0}, ValueError, "x has shape ()"),
    "matrix": ({"x": np.zeros((3, 1))}, ValueError, "x has shape (3, 1)"),
    "missing": ({"y": np.zeros(3)}, ValueError, "has no 'x'"),
    "complex": ({"x": np.zeros(3, complex)}, TypeError, "x is of type complex128"),
    "objects": ({"x": np.array([None] * 3)}, TypeError, "x is of type object"),
}


@pytest.mark.parametrize("variant", ["kameleon", "mala, plain"])
def test_a_point_that_does_not_fit(variant):
    model, step = used(variant)
    begin(step)
    _, _, good = drive(step, model.initial_point(), 3, tune=5)
    for point, error, message in POINTS.values():
        for _ in range(2):
            with pytest.raises(error) as raised:
                step.step(point)
            assert message in str(raised.value)
    drive(step, good, 3)


def test_other_types_and_layouts_of_a_point_give_the_same_chain():
    """A list, whole numbers, single precision, every other number of an array, another order."""
    _, step = used("kameleon")
    expected = None
    for x in (
        np.zeros(3),
        [0, 0, 0],
        np.zeros(3, int),
        np.zeros(3, np.float32),
        np.zeros(6)[::2],
        np.zeros(3, ">f8"),
    ):
        begin(step, seed=2)
        points, _, last = drive(step, {"x": x}, 40, tune=20)
        assert last["x"].dtype == np.float64
        expected = points if expected is None else expected
        np.testing.assert_array_equal(points, expected)


def test_variables_of_a_point_are_told_apart_by_name_and_shape():
    """In any order; a scalar takes no vector, and lengths are those of each, not of all."""
    with pm.Model() as model:
        pm.Normal("a"), pm.Normal("b", 10, 0.1, shape=2), pm.Normal("c", shape=3)
        step = AdaptiveMetropolisStep()
    point = model.initial_point()
    begin(step)
    first, _, _ = drive(step, point, 20, tune=10)
    begin(step)
    second, _, _ = drive(step, dict(reversed(point.items())), 20, tune=10)
    np.testing.assert_array_equal(first, second)
    for other, words in [
        ({"a": np.zeros(1)}, r"a has shape \(1,\)"),
        ({"a": np.zeros(3)}, r"a has shape \(3,\)"),
        ({"b": np.zeros(3), "c": np.zeros(2)}, r"b has shape \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            step.step(point | other)
    step.step(point)


def test_another_steps_variable_of_another_dimension_is_noticed():
    model, _ = used("beside slice")
    with model:
        step = KameleonStep([model["x"]])
    begin(step)
    with pytest.raises(ValueError, match=r"z has shape \(2,\)"):
        step.step({"x": np.zeros(3), "z": np.zeros(2)})


def test_another_steps_variable_may_be_resized():
    """Of the same dimension: nothing is compiled for its size."""
    with pm.Model(coords={"group": range(3)}) as model:
        size = pm.Data("size", np.zeros(3), dims="group")
        x = pm.Normal("x", 0, 1, dims="group")
        z = pm.Normal("z", x.sum(), 1)
        step = AdaptiveMetropolisStep([z], steps_per_draw=20)
    begin(step)
    drive(step, {"x": np.zeros(3), "z": np.zeros(())}, 20, tune=10)
    resize(model, 6)
    assert size.get_value().shape == (6,)
    begin(step, tune=200)
    draws, _, _ = drive(step, {"x": np.ones(6), "z": np.zeros(())}, 1100, tune=200)
    assert_mean(draws[200:, -1], 6.0)


@numba.njit
def evaluate_compiled(log_density, x, value, counts):
    return evaluate(log_density, x, value, counts)


@pytest.mark.parametrize(("x_size", "value_size"), [(SIZE + 1, 3), (1, 3), (SIZE, 2), (SIZE, 4)])
def test_a_compiled_log_density_refuses_arrays_of_another_length(x_size, value_size):
    """The last line of defence: nothing is read or written there."""
    _, step = used("metropolis")
    counts, value = np.zeros(2, np.int64), np.zeros(value_size)
    table = step.target.function.compiled()
    with pytest.raises(RuntimeError, match="another size"):
        evaluate_compiled(table, np.zeros(x_size), value, counts)
    with pytest.raises(ValueError, match="numbers"):
        step.target.function.into(np.zeros(x_size), value)
    assert np.isfinite(evaluate_compiled(table, np.zeros(SIZE), np.zeros(3), counts))


def test_a_draw_that_was_interrupted_is_begun_anew(monkeypatch):
    """Its chain has moved already: the point that is given says where it is."""
    model, step = used("metropolis")
    begin(step)
    _, _, point = drive(step, model.initial_point(), 30, tune=60)

    def interrupted(n):
        ChainSampler.advance(step.sampler, n)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step.sampler, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.step(point)
    assert not np.array_equal(step.chain.position, point["x"])
    step.arrive(point["x"])
    np.testing.assert_array_equal(step.chain.position, point["x"])
    np.testing.assert_array_equal(step.chain.value, step.target(point["x"]))


# data ---------------------------------------------------------------------------------------------


OUT_OF_RANGE = [
    *(([0, 1, index], "out of bounds", "group of shape (3,)") for index in (3, -4, 10**6)),
    # A mask that is too long.
    ([True, False, False, True], "", "group of shape (4,)"),
]


@pytest.mark.parametrize("compile_kwargs", [None, models.PLAIN])
@pytest.mark.parametrize("mask", [False, True])
def test_an_index_out_of_range_is_an_error(mask, compile_kwargs):
    """PyTensor's compiled code would read whatever is there."""
    good = np.array([True, False, True]) if mask else np.arange(3)
    with pm.Model() as model:
        group = pm.Data("group", good)
        x = pm.Normal("x", 0, 1, shape=3)
        pm.Normal("y", x[group], 1, observed=np.zeros(2 if mask else 3))
        step = KameleonStep(compile_kwargs=compile_kwargs)
    begin(step)
    _, _, point = drive(step, model.initial_point(), 5, tune=5)
    for given, *words in OUT_OF_RANGE[3:] if mask else OUT_OF_RANGE[:3]:
        group.set_value(np.array(given, dtype=group.dtype))
        _, (kind, message, _) = in_own_process(lambda: drive(step, point, 5))
        assert kind is ValueError and all(word in message for word in words), message
    group.set_value(good.astype(group.dtype))
    drive(step, point, 5)


def test_data_that_do_not_fit_each_other_are_named():
    """And so is a point of the old size after the model was resized."""
    with pm.Model(coords={"group": range(3)}) as model:
        size = pm.Data("size", np.zeros(3), dims="group")
        weights = pm.Data("weights", np.ones(3))
        x = pm.Normal("x", 0, 1, dims="group")
        pm.Potential("term", -((weights * (x - size)).sum() ** 2))
        step = AdaptiveMetropolisStep()
    begin(step)
    _, _, point = drive(step, model.initial_point(), 5, tune=5)
    weights.set_value(np.ones(4))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weights of shape \(4,\)"):
            step.step(point)
    weights.set_value(np.ones(3))
    drive(step, point, 5)
    resize(model, 8)
    with pytest.raises(ValueError, match=r"The model was resized: x has shape \(8,\)"):
        step.step(point)


# latent functions ---------------------------------------------------------------------------------

LATENT = {"slice, ep": EllipticalSliceStep, "riemannian": RiemannianHMCStep}
INPUTS = np.linspace(-1, 1, 5)
OBSERVED = np.array([0.0, 1.0, 3.0, 2.0, 0.0])
MISFITS = [
    ("where", np.array([0, 1, 2, 3, 9]), "out of bounds"),
    ("observed", np.array([1.0, 2.0]), "observed of shape (2,)"),
    ("inputs", np.linspace(-1, 1, 7)[:, None], "inputs of shape (7, 1)"),
]


@functools.cache
def latent():
    """Values of f at five inputs, observed as often as there are data, with an error of 1."""
    with pm.Model() as model:
        inputs = pm.Data("inputs", INPUTS[:, None])
        where = pm.Data("where", np.arange(5))
        observed = pm.Data("observed", OBSERVED)
        f = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, 1.0)).prior("f", X=inputs)
        pm.Normal("y", f[where], 1, observed=observed, shape=observed.shape)
    return model


@functools.cache
def latent_step(kind):
    with latent():
        return LATENT[kind]()


@pytest.mark.parametrize("kind", rows(LATENT))
def test_a_latent_function_with_other_data(kind):
    """The posterior, known in closed form, follows more observations, elsewhere."""
    model, step = latent(), latent_step(kind)
    where, observed = np.array([4, 4, 3, 0, 1, 2, 2, 2]), np.array([1.0, 0, 2, 5, 1, 0, 0, 1])
    covariance = np.exp(-0.5 * np.subtract.outer(INPUTS, INPUTS) ** 2)
    picks = np.eye(5)[where]
    gain = covariance @ picks.T @ np.linalg.inv(picks @ covariance @ picks.T + np.eye(8))

    def sample_twice():
        sample(step, model, draws=20, tune=20)
        with model:
            pm.set_data({"where": where, "observed": observed})
        n_draws = 390 if kind == "riemannian" else 1500
        return values(sample(step, model, draws=n_draws, tune=100), "f")[0]

    draws, error = in_own_process(sample_twice)
    assert error is None, error[2]
    assert_mean(draws, gain @ observed, kind)


@pytest.mark.parametrize("kind", rows(LATENT))
@pytest.mark.parametrize(("name", "value", "mention"), MISFITS, ids=[m[0] for m in MISFITS])
def test_a_latent_function_with_data_that_do_not_fit(kind, name, value, mention):
    model, step = latent(), latent_step(kind)

    def go_on():
        begin(step)
        _, _, point = drive(step, model.initial_point(), 3, tune=5)
        model[name].set_value(value.astype(model[name].dtype))
        drive(step, point, 3)

    _, (kind, message, trace) = in_own_process(go_on)
    assert issubclass(kind, SamplingError), trace
    assert mention in message


# states, surrogates, warm starts, copies ----------------------------------------------------------


def spoilt(state):
    """Copies of a state, each with one array of another length, type or layout."""
    for name, part in vars(state).items():
        if isinstance(part, LearnerState):
            found = spoilt_values(part)
        elif isinstance(part, tuple):
            found = spoilt_tuple(part)
        else:
            continue
        for where, other in found:
            spoiled = copy.copy(state)
            setattr(spoiled, name, other)
            yield f"{name}.{where}", spoiled


def spoilt_values(learner):
    for name, part in learner.values.items():
        if isinstance(part, tuple):
            yield name, LearnerState(kind=learner.kind, values=learner.values | {name: None})
            for where, other in spoilt_tuple(part):
                values = learner.values | {name: other}
                yield f"{name}.{where}", LearnerState(kind=learner.kind, values=values)


def spoilt_tuple(part):
    for field, array in part._asdict().items():
        if isinstance(array, tuple):
            for where, other in spoilt_tuple(array):
                yield f"{field}.{where}", part._replace(**{field: other})
        if not isinstance(array, np.ndarray):
            continue
        flat = np.zeros(array.size + 1, array.dtype)
        kind = np.float32 if array.dtype.kind == "f" else np.int32
        for other in (flat, array.astype(kind), list(array.ravel())):
            yield field, part._replace(**{field: other})


@pytest.mark.parametrize(
    "variant", ["kameleon", "fast", "pca", "metropolis", "surrogate", "gradient surrogate"]
)
def test_a_state_of_other_arrays_is_refused_and_changes_nothing(variant):
    model, step = used(variant)
    begin(step)
    _, _, point = drive(step, model.initial_point(), 40, tune=60)
    state = step.sampling_state
    expected, _, _ = drive(step, point, 5)
    step.sampling_state = state
    count = 0
    for name, other in spoilt(state):
        # One of a map that is longer than its others is known by the map alone.
        named = re.sub(r"triangular_map\.\w+$", "triangular_map", name)
        with pytest.raises((ValueError, TypeError), match=f"sampling_state.{named}"):
            step.sampling_state = other
        count += 1
    assert count > 30
    np.testing.assert_array_equal(drive(step, point, 5)[0], expected)


@pytest.mark.parametrize(
    ("variant", "name", "field", "value"),
    [
        ("kameleon", "history", "cursor", [10**6, 1, 10**6, 0]),
        ("fast", "history", "cursor", [0, 1, 5, 10**6]),
        ("pca", "eigenfunctions", "thresholds", 0.5),
    ],
)
def test_a_state_that_counts_too_far_is_refused(variant, name, field, value):
    model, step = used(variant)
    begin(step)
    drive(step, model.initial_point(), 40, tune=60)
    state = step.sampling_state
    getattr(state.learner.values[name], field)[...] = value
    with pytest.raises(ValueError, match=f"sampling_state.learner.{name}"):
        step.sampling_state = state


def test_a_refused_state_leaves_nothing_behind():
    """PyMC sets field by field, and finds at the last that the configuration differs."""
    model, step = used("metropolis")
    begin(step)
    _, _, point = drive(step, model.initial_point(), 10, tune=20)
    other_model, _, _ = models.normal(8)
    with other_model:
        other = AdaptiveMetropolisStep(**FAST)
    begin(other)
    drive(other, other_model.initial_point(), 10, tune=20)
    with pytest.raises(ValueError, match=r"\(8,\)"):
        step.sampling_state = other.sampling_state
    assert step.chain.position.shape == (SIZE,)
    drive(step, point, 5)


def test_a_state_of_a_latent_function_of_another_length_is_refused():
    step = latent_step("slice, ep")
    begin(step)
    drive(step, latent().initial_point(), 3, tune=5)
    state = step.sampling_state
    for name in ("position", "site_precision"):
        other = copy.copy(state)
        setattr(other, name, np.zeros(9))
        with pytest.raises(ValueError, match=f"sampling_state.{name} has shape"):
            step.sampling_state = other


def test_a_fitted_surrogate_or_a_warm_start_of_another_size_is_refused():
    model, _ = used("surrogate")
    points = np.random.default_rng(0).standard_normal((30, SIZE))
    fitted = SURROGATE().fit(points, -0.5 * (points**2).sum(axis=1))
    AdaptiveMetropolisStep(model=model, surrogate=fitted)
    fitted.process = fitted.process._replace(values=np.zeros(7))
    with pytest.raises(ValueError, match=r"surrogate\.process\.values has shape"):
        AdaptiveMetropolisStep(model=model, surrogate=fitted)
    bigger = resizable()
    resize(bigger, 8)
    earlier = sample(pm.Metropolis(model=bigger), bigger, draws=20, tune=10)
    with pytest.raises(ValueError, match=r"warm_start has x of shape \(8,\)"):
        KameleonStep(model=model, warm_start=earlier)


def test_a_step_outlives_the_names_of_its_model():
    """The compiled log density is reached by an address: what it points to must stay."""
    model = resizable()
    with model:
        step = KameleonStep(kernel="matern", **FAST)
    start = model.initial_point()
    begin(step)
    _, _, point = drive(step, start, 10, tune=20)
    del model
    gc.collect()
    twin = copy.copy(step)
    del step
    gc.collect()
    points, _, _ = drive(twin, point, 50)
    assert np.all(np.isfinite(points))


@numba.njit
def gradients_compiled(kernel, x, points, parameters, gradients):
    evaluate_gradients(kernel, x, points, parameters, gradients)


@numba.njit
def positive_gradient(x, y, bandwidth):
    if x[0] < 0:
        raise ValueError("no gradient there")
    return y - x


def test_a_kernel_that_raises_or_gets_arrays_of_another_length_is_an_error():
    """Not a chain that goes on with whatever its gradients were before, or writes elsewhere."""
    kernel = CustomKernel(lambda x, y, bandwidth: 1.0, positive_gradient)
    address, points, one = kernel.address(), np.ones((2, 5)), np.ones(1)
    gradients_compiled(address, np.zeros(2), points, one, np.empty((2, 5)))
    with pytest.raises(ValueError, match="no gradient there"):
        gradients_compiled(address, -np.ones(2), points, one, np.empty((2, 5)))
    for x, out in ((np.zeros(3), np.empty((2, 5))), (np.zeros(2), np.empty((2, 4)))):
        with pytest.raises(RuntimeError, match="another size"):
            gradients_compiled(address, x, points, one, out)


class Schedule:
    def __call__(self, n):
        return 0.1


def test_a_saved_state_knows_functions_of_users_by_name():
    """Their addresses are others in each process, which would refuse the state."""
    model, _, _ = models.normal(2)

    def value(x, y, bandwidth):
        return 1.0

    plain = getattr(positive_gradient, "py_func", positive_gradient)
    kernels = [CustomKernel(value, gradient) for gradient in (plain, positive_gradient)]
    options = [
        *({"kernel": kernel} for kernel in kernels),
        {"adaptation": functools.partial(min, 0.1)},
        {"adaptation": Schedule()},
        {"adaptation": lambda n: 0.1},
    ]
    for chosen in options:
        make = KameleonStep.paper if "adaptation" in chosen else KameleonStep
        step = make(model=model, **chosen)
        assert "0x" not in step.configuration
        again = cloudpickle.loads(cloudpickle.dumps(step))
        assert again.configuration == step.configuration
    assert "positive_gradient" in repr(kernels[0])
    other = CustomKernel(value, models.negative_half_square)
    assert repr(other) != repr(kernels[0])


# any sequence of calls ----------------------------------------------------------------------------


class Fuzz:
    """A step, a model and a point, and everything that may be done with them."""

    has_pickled = False

    def __init__(self, variant, rng):
        self.variant, self.rng = variant, rng
        self.model, step = used(variant)
        self.step = copy.copy(step)
        self.n = SIZE
        resize(self.model, SIZE), observe(self.model, 3.0)
        self.states = []
        self.begin()

    def begin(self):
        begin(self.step, seed=int(self.rng.integers(1000)), tune=int(self.rng.integers(3)))
        self.point = {"x": np.zeros(SIZE)}

    def draw(self):
        for _ in range(int(self.rng.integers(1, 60))):
            self.point, _ = self.step.step(self.point)

    def observe(self):
        observe(self.model, *self.rng.normal(size=int(self.rng.integers(1, 9))))

    def resize(self):
        self.n = int(self.rng.integers(1, 9))
        resize(self.model, self.n)

    def resized_point(self):
        self.step.step({"x": np.zeros(self.n)})

    def foreign_point(self):
        point, _, _ = POINTS[list(POINTS)[self.rng.integers(len(POINTS))]]
        self.step.step(point)

    def jump(self):
        self.point = {"x": list(self.rng.normal(size=SIZE))}

    def stop_tuning(self):
        self.step.stop_tuning()

    def reset_tuning(self):
        self.step.reset_tuning()

    def save(self):
        self.states.append(self.step.sampling_state)

    def restore(self):
        if self.states:
            self.step.sampling_state = self.states[self.rng.integers(len(self.states))]

    def restore_foreign(self):
        other = "metropolis" if self.variant == "kameleon" else "kameleon"
        self.step.sampling_state = used(other)[1].sampling_state

    def restore_spoilt(self):
        if self.states:
            choices = list(spoilt(self.states[-1]))
            if choices:
                self.step.sampling_state = choices[self.rng.integers(len(choices))][1]

    def copy(self):
        self.step = copy.copy(self.step)

    def pickle(self):
        """With its model; it takes a second, so once for a step."""
        if not self.has_pickled:
            type(self).has_pickled = True
            self.step = cloudpickle.loads(cloudpickle.dumps(self.step))
            self.model = self.step.target.model

    def interrupt(self):
        """Interrupt one of the step's own methods, as a user may at any time."""
        parts = [self.step, *(getattr(self.step, part, None) for part in ("sampler", "learner"))]
        owners = [(o, n) for o in parts for n in INTERRUPTED if hasattr(o, n)]
        owner, name = owners[self.rng.integers(len(owners))]

        def interrupted(*arguments, **options):
            if self.rng.random() < 0.5:
                getattr(type(owner), name)(owner, *arguments, **options)
            raise KeyboardInterrupt

        setattr(owner, name, interrupted)
        try:
            self.draw()
        except KeyboardInterrupt:
            pass
        finally:
            delattr(owner, name)

    def check(self):
        assert np.shape(self.point["x"]) == (SIZE,)
        assert np.all(np.isfinite(self.point["x"]))
        copy.copy(self.step).sampling_state = self.step.sampling_state


INTERRUPTED = [
    "_learn",
    "_learn_coordinates",
    "_rescale",
    "_refresh",
    "_absorb",
    "_principal_components",
    "_run",
    "learn_from_evaluations",
    "end_tuning",
    "evaluate_current",
    "_complaint_of_acceptance",
]
SINGLE = [variant for variant in VARIANTS if variant != "beside slice"]
CALLS = [
    *["draw"] * 6,
    *["observe"] * 2,
    *["resize", "resized_point", "foreign_point", "jump", "stop_tuning", "reset_tuning"],
    *["begin", "save", "restore", "restore", "restore_foreign", "restore_spoilt"],
    *["copy", "pickle"],
    *["interrupt"] * 2,
]


@pytest.mark.parametrize("variant", rows(SINGLE))
def test_any_sequence_of_calls(variant, tmp_path):
    """Sequences of twelve calls; each call works, or is refused with a message.

    Twenty, and eight of the step that fits for a fifth of a second at each of its updates.
    """
    for one in (variant, "kameleon", "metropolis"):
        used(one)
    log = tmp_path / "calls"

    def play():
        for seed in range(8 if variant == "surrogate hmc" else 20):
            rng = np.random.default_rng([seed, SINGLE.index(variant)])
            fuzz = Fuzz(variant, rng)
            log.write_text(f"{variant}, sequence {seed}:\n")
            for call in rng.choice(CALLS, size=12):
                with log.open("a") as file:
                    file.write(f"  {call}\n")
                try:
                    getattr(fuzz, call)()
                except REFUSALS as error:
                    assert len(str(error)) > 20, repr(error)
                fuzz.check()
        return True

    _, error = in_own_process(play, log)
    assert error is None, f"{log.read_text()}{error[2]}"


@pytest.mark.parametrize("variant", ["kameleon", "gradient surrogate", "estimate"])
def test_pickled_and_copied_steps_go_on(variant):
    model, step = used(variant)
    begin(step)
    _, _, point = drive(step, model.initial_point(), 40, tune=20)
    twins = [copy.deepcopy(step), cloudpickle.loads(cloudpickle.dumps(step))]
    expected, _, _ = drive(step, point, 20)
    for twin in twins:
        found, _, _ = drive(twin, point, 20)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        with pytest.raises(ValueError, match="x has shape"):
            twin.step({"x": np.zeros(SIZE + 1)})
