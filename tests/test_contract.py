"""What PyMC and its users may expect of every step: a battery that runs over all of them.

Statistical assertions use Monte Carlo standard errors; each fails by chance with probability 1e-6.
"""

import copy
import functools
import logging
import os
import pickle
import subprocess
import sys
import threading
import warnings

import cloudpickle
import models
import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from conftest import (
    LATENT,
    LATENT_WAYS,
    METROPOLIS_HASTINGS,
    SAME_WITH_A_GRADIENT,
    STEPS,
    assert_evaluations,
    built,
    rows,
    small_model,
)
from models import assert_mean, assert_moments, begin, drive, run, sample, values
from pymc.stats.convergence import SamplerWarning
from pymc.step_methods import STEP_METHODS
from pymc.step_methods.compound import CompoundStep
from pytensor.compile import ops

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    KameleonStep,
    kernels,
    register,
    unregister,
)
from pymc_kameleon.mcmc.numba_bridge import N_TERMS

PYMC_6 = int(pm.__version__.split(".")[0]) >= 6
C_LINKER = {"mode": "cvm"}
UNCOMPILED = {"mode": "FAST_COMPILE"}
wrap_python = getattr(ops, "wrap_py", None) or ops.as_op
needs_c_compiler = pytest.mark.skipif(**models.needs_c_compiler)
pytestmark = [
    pytest.mark.usefixtures("quick_fits"),
    pytest.mark.filterwarnings("ignore:Detected variables likely created by GP objects"),
]


def parts(step):
    """The steps of a compound one, of which ours is the first."""
    return step.methods if isinstance(step, CompoundStep) else [step]


def ours_of(statistics):
    """Those of our step, for each draw."""
    return [s[0] if isinstance(s, list | tuple) else s for s in statistics]


@pytest.fixture
def registered():
    register()
    yield
    unregister()


# variables: order, shapes, transforms -------------------------------------------------------------


def test_order_of_vars_does_not_matter(make_each_way):
    model = models.two_scales()
    chains = []
    for names in (["a", "b"], ["b", "a"]):
        with model:
            step = make_each_way([model[name] for name in names], steps_per_draw=5)
        chains.append(sample(step, model, draws=900, tune=200))
    for name, mean, sd in (("a", 0, 1), ("b", 10, 0.1)):
        first, second = (values(chain, name) for chain in chains)
        np.testing.assert_array_equal(first, second)
        assert_moments(first, mean, sd, name)


def test_variables_may_be_named(make_each_way):
    model = models.two_scales()
    with model:
        by_name, by_variable = make_each_way(["b"]), make_each_way([model["b"]])
    assert [v.name for v in by_name.vars] == [v.name for v in by_variable.vars] == ["b"]


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(["mala", "surrogate_hmc"], SAME_WITH_A_GRADIENT))
def test_shapes_and_transforms(name):
    """Of the log density with its gradient, and of one whose prior is taken apart."""
    model, make_step = models.shapes_and_transforms(), STEPS[name].make
    with model:
        backwards = make_step(list(reversed(model.free_RVs)), compile_kwargs=UNCOMPILED)
        default = make_step(steps_per_draw=20)
    assert [v.name for v in backwards.vars] == [v.name for v in model.value_vars]
    for x in np.random.default_rng(0).normal(size=(3, default.dim)):
        np.testing.assert_allclose(backwards.target(x), default.target(x))
    idata = sample(default, model, draws=900, tune=300)
    assert values(idata, "matrix").shape == (1, 900, 2, 2)
    np.testing.assert_allclose(values(idata, "simplex").sum(axis=-1), 1)
    assert_mean(values(idata, "scale"), 2 * np.sqrt(2 / np.pi), "half-normal")
    assert_mean(values(idata, "simplex"), np.array([2, 3, 4]) / 9, "simplex")
    assert_moments(values(idata, "matrix"), np.array([[0, 1], [2, 3]]), 0.5, "matrix")
    assert_moments(values(idata, "interval"), np.ones(2), 4 / np.sqrt(12), "interval")


@pytest.mark.parametrize("dim", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_dimensions(make_random_walk, dim):
    """A batch is ten draws: at d = 50, 1500 transitions, many times the correlation length."""
    model, mean, sd = models.normal(dim)
    step = built(make_random_walk, model, steps_per_draw=5 if dim == 1 else 150)
    idata = sample(step, model, draws=300, tune=300)
    assert_moments(values(idata, "x"), mean, sd, f"d = {dim}")


# chains -------------------------------------------------------------------------------------------


def generator_after(spawned):
    rng = np.random.default_rng(20)
    if spawned:
        rng.spawn(spawned)
    return rng


def test_chains_share_nothing(case):
    step, fresh = parts(case.step()), parts(case.step(1))
    options = {"draws": case.kind.draws, "tune": case.kind.tune}
    both = sample(step, case.model, chains=2, random_seed=20, **options)
    again = sample(step, case.model, chains=2, random_seed=20, **options)
    draws = values(both, case.kind.variable)
    np.testing.assert_array_equal(draws, values(again, case.kind.variable))
    assert not np.array_equal(draws[0], draws[1])
    for chain in (0, 1):
        rng = generator_after(chain)
        alone = sample(fresh, case.model, random_seed=rng, **options)
        np.testing.assert_array_equal(draws[chain], values(alone, case.kind.variable)[0])


def test_shallow_copies_are_independent(case):
    """PyMC's population sampling copies a step with `copy.copy`, and takes turns."""
    step, tune = case.step(), case.kind.tune
    twins = [CompoundStep([copy.copy(part) for part in parts(step)]) for _ in range(2)]
    if case.beside:
        # One moves twice as fast, so that it meets values that the other has had.
        twins[0].methods[1].shift = 0.02
    expected_step = CompoundStep([parts(step)[0], *twins[0].methods[1:]])
    length = tune + case.kind.draws
    expected, _, _ = run(expected_step, case.model, length, tune=tune, seed=1)
    begin(twins[0], 1, tune), begin(twins[1], 2, tune)
    points = [case.model.initial_point(), case.model.initial_point()]
    first = []
    for i in range(length):
        for k, twin in enumerate(twins):
            if i == tune:
                twin.stop_tuning()
            points[k], _ = twin.step(points[k])
        first.append(np.concatenate([np.ravel(v) for v in points[0].values()]))
    np.testing.assert_array_equal(np.array(first), expected)


FAMILIES = {
    "metropolis_hastings": METROPOLIS_HASTINGS,
    "latent": LATENT_WAYS,
}


@functools.cache
def all_steps(family):
    """A variable for each step of a family, all of one parent, and the steps."""
    with pm.Model() as model:
        parent = pm.Normal("parent", 0, 0.5)
        steps = [STEPS[name].make([STEPS[name].add(name, parent)]) for name in FAMILIES[family]]
        # A step that samples has the linker's rounding, which is another one in PyMC 6.
        steps.append(models.Shift([parent], shift=0.001))
    return model, steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [
        # On the older PyMC tests/test_memory.py spawns a step.
        pytest.param("metropolis_hastings", "spawn", marks=pytest.mark.numerics),
        pytest.param("latent", "spawn", marks=pytest.mark.numerics),
        # What is forked has less to go wrong than what is spawned.
        ("latent", "fork"),
    ],
)
def test_processes_give_the_same_chains(family, method, monkeypatch):
    """Bitwise; several steps in one run, as spawning is slow."""
    monkeypatch.undo()  # processes that are spawned know nothing of it
    model, steps = all_steps(family)
    draws, tune = (20, 20) if family == "latent" else (80, 150)
    options = {"chains": 2, "draws": draws, "tune": tune, "random_seed": 7}
    expected = sample(steps, model, **options)
    result = sample(steps, model, cores=2, mp_ctx=method, **options)
    for name in FAMILIES[family]:
        assert len(np.unique(values(expected, name))) > 20
        np.testing.assert_array_equal(values(result, name), values(expected, name), err_msg=name)


# compiled and plain -------------------------------------------------------------------------------


def inverse_multiquadric(x, y, bandwidth):
    return 1 / np.sqrt(1 + np.sum((x - y) ** 2) / bandwidth**2)


def inverse_multiquadric_gradient(x, y, bandwidth):
    return (y - x) / bandwidth**2 * (1 + np.sum((x - y) ** 2) / bandwidth**2) ** -1.5


KERNELS = {
    "gaussian": kernels.Gaussian(),
    "matern 1.5": kernels.Matern(1.5),
    "matern 2.5": kernels.Matern(2.5),
    "matern 2.0": kernels.Matern(2.0),
    "linear": kernels.Linear(),
    "polynomial": kernels.Polynomial(2, 1.0),
    "own, compiled": kernels.CustomKernel(
        inverse_multiquadric, numba.njit(inverse_multiquadric_gradient)
    ),
    "own, plain": kernels.CustomKernel(inverse_multiquadric, inverse_multiquadric_gradient),
}
CONFIGURATIONS = {
    "adaptive metropolis": (AdaptiveMetropolisStep, {}),
    "fixed covariance": (AdaptiveMetropolisStep, {"covariance": np.diag([1.0, 2.0, 3.0])}),
    "paper": (KameleonStep.paper, {"adaptation": models.every_ten}),
    **{
        f"kameleon, {name}": (KameleonStep, {"kernel": kernel, "n_subsample": 60})
        for name, kernel in KERNELS.items()
    },
}


@needs_c_compiler
@pytest.mark.parametrize(
    ("configuration", "steps_per_draw"),
    # How transitions make up a draw does not depend on the kernel.
    [("kameleon, gaussian", 1), ("adaptive metropolis", 1), *((c, 20) for c in CONFIGURATIONS)],
)
def test_compiled_and_plain_give_the_same_chain(configuration, steps_per_draw):
    make, options = CONFIGURATIONS[configuration]
    model, _, _ = models.normal(3)
    chains = []
    for compile_kwargs in (None, C_LINKER):
        with model:
            step = make(steps_per_draw=steps_per_draw, compile_kwargs=compile_kwargs, **options)
        draws = 240 // steps_per_draw
        chains.append(run(step, model, draws, tune=200 // steps_per_draw, seed=3))
        compiled = compile_kwargs is None
        assert (step.target.function.compiled() is not None) == compiled
    (points, statistics, _), (plain_points, plain_statistics, _) = chains
    np.testing.assert_allclose(points, plain_points, rtol=1e-6, atol=1e-8)
    for name in ("accept", "scaling", "n_evals"):
        np.testing.assert_allclose(
            [s[name] for s in statistics], [s[name] for s in plain_statistics], rtol=1e-5, atol=1e-8
        )
    assert sum(s["accepted"] for s in statistics) > 0


# sampling state -----------------------------------------------------------------------------------

ROUND_TRIPS = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "cloudpickle": lambda state: cloudpickle.loads(cloudpickle.dumps(state)),
}


def assert_same_continuation(first, second):
    """Points and all statistics."""
    np.testing.assert_array_equal(first[0], second[0])
    for one, other in zip(ours_of(first[1]), ours_of(second[1]), strict=True):
        for statistics in (one, other):
            statistics.pop("warning", None)
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize(
    ("share", "round_trip"),
    [(0.0, "pickle"), (0.05, "pickle"), (1.0, "cloudpickle"), (1.5, "pickle")],
)
def test_saved_and_restored_state_continues_the_chain(case, share, round_trip):
    """Saved without tuning, early in it, at its very end, and after it; into a step with a past."""
    step, other, tune = case.step(), case.step(1), case.kind.tune if share else 0
    saved_at = max(1, int(share * tune))
    _, _, point = run(step, case.model, saved_at, tune, seed=4)
    run(other, case.model, 7, tune=3, seed=5)
    state = ROUND_TRIPS[round_trip](step.sampling_state)
    remaining = {"draws": case.kind.tune + case.kind.draws, "tune": max(tune - saved_at, -1)}
    expected = drive(step, point, **remaining)
    other.sampling_state = state
    assert_same_continuation(drive(other, point, **remaining), expected)


def test_state_restored_into_a_used_step(case):
    """Going back to an earlier state of the same step repeats its chain."""
    step, tune = case.step(), case.kind.tune
    saved_at = tune * 3 // 4
    _, _, point = run(step, case.model, saved_at, tune, seed=4)
    state = step.sampling_state
    remaining = {"draws": tune, "tune": tune - saved_at}
    expected = drive(step, point, **remaining)
    step.sampling_state = state
    assert_same_continuation(drive(step, point, **remaining), expected)


def test_pickled_step_continues(case):
    """A step goes to another process by cloudpickle, also in the middle of a chain."""
    step, tune = case.step(plain=True), case.kind.tune
    for length in (tune // 2, tune + 8):
        _, _, point = run(step, case.model, length, tune, seed=4)
        clone = cloudpickle.loads(cloudpickle.dumps(step))
        remaining = {"draws": tune, "tune": max(tune - length, -1)}
        expected = drive(step, point, **remaining)
        assert_same_continuation(drive(clone, point, **remaining), expected)


def test_restored_state_keeps_the_estimate(make_estimating):
    model, operation = models.black_box(dim=1, noise=1.0)
    with model:
        step = make_estimating(pseudo_marginal=True)
        other = make_estimating(pseudo_marginal=True)
    begin(step, seed=4)
    _, _, point = drive(step, model.initial_point(), 50, tune=30)
    other.sampling_state = step.sampling_state
    kept = step.chain.value.copy()
    operation.calls = 0
    other._arrive(point["x"])
    assert operation.calls == 0
    np.testing.assert_array_equal(other.chain.value, kept)


def test_state_of_another_configuration_is_refused(kind):
    model = small_model(kind.add, kind.variable, beside=False)
    step = kind.make(model=model, compile_kwargs=UNCOMPILED)
    run(step, model, 5)
    for difference in kind.different:
        other = kind.make(model=model, **({"compile_kwargs": UNCOMPILED} | difference))
        with pytest.raises(ValueError, match=next(iter(difference))):
            other.sampling_state = step.sampling_state


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (KameleonStep, ({"kernel": "gaussian"}, {"kernel": "linear"})),
        (KameleonStep, ({"n_subsample": 10}, {"n_subsample": 11})),
        (KameleonStep, ({"adaptation": None}, {"adaptation": models.every_ten})),
        (AdaptiveMetropolisStep, ({"covariance": np.eye(2)}, {"covariance": 2 * np.eye(2)})),
        (
            AdaptiveMetropolisStep,
            ({"initial_covariance": np.eye(2)}, {"initial_covariance": 2 * np.eye(2)}),
        ),
    ],
)
def test_state_of_another_proposal_is_refused(make, options):
    model, _, _ = models.normal(2)
    with model:
        first, second = (make(**o) for o in options)
    run(first, model, 5)
    with pytest.raises(ValueError, match=next(iter(options[0]))):
        second.sampling_state = first.sampling_state


def test_state_of_other_variables_is_refused(kind):
    with pm.Model() as model:
        first, second = (
            kind.make([kind.add(name, 0.0)], compile_kwargs=UNCOMPILED) for name in "ab"
        )
    begin(first).step(model.initial_point())
    with pytest.raises(ValueError, match="var"):
        second.sampling_state = first.sampling_state


@pytest.mark.slow
@pytest.mark.numerics
def test_state_and_step_stay_small(step_class):
    """At most 2 MB for d = 8 by default, and hardly more after 1e4 transitions than after 1e3."""
    model, _, _ = models.normal(8)
    with model:
        step = step_class(steps_per_draw=100)
    begin(step, tune=10**9)
    sizes, point, done = [], model.initial_point(), 0
    for draws in (10, 100):
        _, _, point = drive(step, point, draws - done, tune=-1)
        done = draws
        state = len(pickle.dumps(step.sampling_state))
        sizes.append((state, len(cloudpickle.dumps(step))))
        assert state <= 2e6
    assert all(late < 1.2 * early for early, late in zip(*sizes, strict=True))
    assert sizes[1][1] - sizes[1][0] < 1e6


# lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tune", "draws"), [(0, 30), (1, 1), (40, 30)])
def test_lengths_of_tuning(case, tune, draws):
    idata = sample(parts(case.step()), case.model, draws=draws, tune=tune)
    found = values(idata, case.kind.variable)
    assert found.shape[:2] == (1, draws) and np.all(np.isfinite(found))
    if draws == 30:
        assert case.name not in LATENT or len(np.unique(found)) > found.shape[-1]
        assert np.ptp(values(idata, case.kind.constant, "sample_stats")) == 0


def learnt(step):
    """All that a step has learnt, as bytes; not what is computed for the present position."""
    state = step.sampling_state
    if hasattr(state, "learner"):
        besides = {name: getattr(state, name, None) for name in ("stage", "sites", "n_fits")}
        found = {**state.learner.values, **besides}
        for name in ("here", "states"):
            found.pop(name, None)
    else:
        names = ("averaging", "site_precision", "site_shift", "n_fits", "next_fit")
        found = {name: getattr(state, name) for name in names if hasattr(state, name)}
    assert found
    return pickle.dumps(found)


@pytest.mark.parametrize("tune", [0, 1, 2, 130])
def test_frozen_however_short_tuning_was(case, tune):
    """Nothing that a transition depends on is learnt once tuning has ended.

    Sites are fitted at the last in the first draw after tuning, before the function moves.
    """
    step, ours = case.step(), parts(case.step())[0]
    _, _, point = run(step, case.model, tune + 1, tune)
    before = learnt(ours)
    drive(step, point, 2 * case.kind.draws, tune=-1)
    assert learnt(ours) == before


def test_adapt_after_tune_goes_on(make_random_walk):
    model, _, _ = models.normal(2)
    step = built(make_random_walk, model, adapt_after_tune=True)
    _, statistics, _ = run(step, model, 600, tune=300)
    assert len({s["scaling"] for s in statistics[300:]}) > 1


@pytest.mark.parametrize("schedule", [models.always, models.every_ten])
def test_own_schedule_from_the_first_transition(schedule):
    """An update that comes before there is a history waits for one."""
    model, _, _ = models.normal(2)
    step = KameleonStep(model=model, adaptation=schedule, n_subsample=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        points, statistics, _ = run(step, model, 300, tune=250)
    assert np.all(np.isfinite(points)) and len(np.unique(points[250:, 0])) > 5
    assert all(np.isfinite(s["scaling"]) and s["scaling"] < 1e6 for s in statistics)


def test_starts_of_chains_come_from_initvals(make_random_walk):
    model, _, _ = models.normal(1)
    starts = [{"x": np.array([5.0])}, {"x": np.array([-5.0])}]
    with model:
        step = make_random_walk(scaling=1e-12, learn_scaling=False, **tiny_moves(make_random_walk))
    idata = sample(step, model, chains=2, draws=1, tune=0, initvals=starts)
    np.testing.assert_allclose(values(idata, "x")[:, 0, 0], [5, -5], atol=3)


def tiny_moves(make_step):
    (tiny,) = (kind.tiny for kind in STEPS.values() if kind.make is make_step)
    return tiny


# compound steps -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_of_ours(make_each_way):
    model = models.two_scales()
    with model:
        steps = [make_each_way([model["b"]], steps_per_draw=3), make_each_way([model["a"]])]
    idata = sample(steps, model, draws=900, tune=300)
    assert_moments(values(idata, "b"), 10, 0.1, "b")
    assert values(idata, "accept", "sample_stats").shape == (1, 900, 2)
    counts = values(idata, "n_evals", "sample_stats")[0, 1:]
    moved = values(idata, "accepted", "sample_stats")[0] > 0
    assert_evaluations(steps[0], counts[:, 0], 3 + moved[:-1, 1])
    assert_evaluations(steps[1], counts[:, 1], 1 + moved[1:, 0])


def test_kameleon_beside_adaptive_metropolis():
    model = models.two_scales()
    with model:
        steps = [KameleonStep([model["a"]], n_subsample=50), AdaptiveMetropolisStep([model["b"]])]
    idata = sample(steps, model, draws=30, tune=30)
    assert values(idata, "scaling", "sample_stats").shape == (1, 30, 2)
    assert "bandwidth" in idata["sample_stats"]


@pytest.mark.slow
def test_with_nuts(make_each_way):
    """A Gaussian pair: the conditional means move with each other."""
    with pm.Model() as model:
        a = pm.Normal("a", 0, 1)
        b = pm.Normal("b", a, 1)
        pm.Normal("y", b, 1, observed=3.0)
        step = [make_each_way([b], steps_per_draw=10), pm.NUTS([a])]
    idata = sample(step, model, draws=1500, tune=400)
    assert_moments(values(idata, "a"), 1, np.sqrt(2 / 3), "a")
    assert_moments(values(idata, "b"), 2, np.sqrt(2 / 3), "b")
    assert "tree_depth" in idata["sample_stats"] or "depth" in idata["sample_stats"]


@pytest.mark.slow
def test_with_metropolis_on_a_discrete_variable(make_each_way):
    model = models.mixed_discrete()
    with model:
        step = make_each_way([model["x"]], steps_per_draw=5)
    idata = sample([step], model, draws=3000, tune=300)
    for name, expected in models.mixed_discrete_means().items():
        assert_mean(values(idata, name), expected, name)
    assert values(idata, "accepted", "sample_stats").shape == (1, 3000, 2)


@pytest.mark.slow
def test_with_binary_gibbs(make_each_way):
    model = models.with_switch()
    with model:
        steps = [make_each_way([model["x"]]), pm.BinaryGibbsMetropolis([model["on"]])]
    idata = sample(steps, model, draws=3000, tune=300)
    weight = np.exp(-0.25 * (0.5 - np.array([0, 1])) ** 2)
    assert_mean(values(idata, "on"), weight[1] / weight.sum(), "on")


@pytest.mark.slow
def test_not_blocked_gives_a_step_for_every_variable(make_each_way):
    model = models.two_scales()
    with model:
        step = make_each_way(blocked=False)
    assert isinstance(step, CompoundStep) and len(step.methods) == 2
    idata = sample(step, model, draws=900, tune=300)
    assert_moments(values(idata, "b"), 10, 0.1, "b")
    assert values(idata, "accept", "sample_stats").shape == (1, 900, 2)


def test_compound_state_is_restored(make_each_way):
    model = models.two_scales()
    with model:
        first, second = (
            CompoundStep([make_each_way([model[name]]) for name in "ab"]) for _ in range(2)
        )
    begin(first, seed=5)
    _, _, point = drive(first, model.initial_point(), 60, tune=-1)
    second.sampling_state = first.sampling_state
    expected, _, _ = drive(first, point, 150, tune=60)
    continued, _, _ = drive(second, point, 150, tune=60)
    np.testing.assert_array_equal(continued, expected)


# counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_draw", [1, 7])
def test_one_evaluation_a_transition(make_gradient_free, steps_per_draw):
    """Counted by the operation itself, beside the statistic."""
    model, operation = models.black_box()
    with model:
        step = make_gradient_free(steps_per_draw=steps_per_draw, disperse=False)
    begin(step)
    operation.calls = 0
    point, calls = model.initial_point(), []
    for i in range(200):
        if i == 150:
            step.stop_tuning()
        before = operation.calls
        point, (statistics,) = step.step(point)
        calls.append(operation.calls - before)
        assert statistics["n_evals"] == calls[-1]
    assert_evaluations(step, calls, [steps_per_draw + 1] + [steps_per_draw] * 199)
    assert step.target.n_evaluations == sum(calls)


def test_a_step_may_be_called_from_any_point(make_each_way):
    model, _, _ = models.normal(2)
    step = built(make_each_way, model, steps_per_draw=3)
    _, _, point = run(step, model, 10, tune=5)
    moved = {"x": point["x"] + 0.1}  # one standard deviation of the narrow coordinate
    point, (statistics,) = step.step(moved)
    assert_evaluations(step, statistics["n_evals"], 4)
    _, (statistics,) = step.step(point)
    assert_evaluations(step, statistics["n_evals"], 3)
    logp = model.compile_logp()(point)
    np.testing.assert_allclose(step.target(point["x"]).sum(), logp)


def test_jumping_about_between_draws_leaves_the_kept_density_right(make_each_way):
    model, _, _ = models.normal(2)
    step = built(make_each_way, model)
    _, _, point = run(step, model, 150, tune=150)
    rng = np.random.default_rng(0)
    for _ in range(20):
        point, _ = step.step({"x": rng.normal(size=2)})
        np.testing.assert_allclose(step.chain.value[:N_TERMS].sum(), step.target(point["x"]).sum())


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_evaluated_again_only_if_other_variables_changed(make_random_walk, shift):
    model = models.two_scales()
    with model:
        ours = make_random_walk([model["a"]], steps_per_draw=4, disperse=False)
        step = CompoundStep([ours, models.Shift([model["b"]], shift=shift)])
    _, statistics, _ = run(step, model, 30, tune=10)
    counts = [s[0]["n_evals"] for s in statistics]
    assert counts == [5] + [5 if shift else 4] * 29


@pytest.mark.slow
@pytest.mark.parametrize("compile_kwargs", [None, C_LINKER])
@pytest.mark.parametrize("length", [9])
def test_new_data_between_two_samplings(make_each_way, length, compile_kwargs):
    if compile_kwargs is not None and not pytensor.config.cxx:
        pytest.skip(models.needs_c_compiler["reason"])
    model = models.with_data()
    with model:
        step = make_each_way(steps_per_draw=4, compile_kwargs=compile_kwargs)
        before = sample(step, draws=300, tune=150)
        pm.set_data({"y": np.full(length, 5.0)})
        after = sample(step, draws=300, tune=150)
    for idata, level, n in ((before, 0.0, 4), (after, 5.0, length)):
        precision = n + 0.01
        assert_moments(values(idata, "mu"), level * n / precision, precision**-0.5, "mu")


def test_new_data_in_the_middle_of_a_chain(make_each_way):
    """Driven by hand, the kept log density is dropped as soon as the data are others."""
    model = models.with_data()
    with model:
        step = make_each_way()
    _, _, point = run(step, model, 10)
    with model:
        pm.set_data({"y": np.full(7, 5.0)})
    point, (statistics,) = step.step(point)
    assert statistics["n_evals"] == 2
    np.testing.assert_allclose(step.chain.value[:N_TERMS].sum(), model.compile_logp()(point))


# estimated likelihoods ----------------------------------------------------------------------------


def test_an_accepted_estimate_is_kept(make_estimating):
    """At a point that does not move the estimate is not drawn again."""
    model, operation = models.black_box(dim=1, noise=2.0)
    with model:
        step = make_estimating(pseudo_marginal=True)
    begin(step).stop_tuning()
    operation.calls = 0
    point, kept, stayed = model.initial_point(), None, 0
    for i in range(300):
        before = point["x"].copy()
        point, (statistics,) = step.step(point)
        assert statistics["n_evals"] == 1 + (i == 0)
        if np.array_equal(before, point["x"]) and kept is not None:
            assert step.chain.value[2] == kept
            stayed += 1
        kept = step.chain.value[2]
    assert operation.calls == 301
    assert 10 < stayed < 300


@pytest.mark.slow
def test_noisy_estimates_leave_the_posterior_right(make_estimating):
    model, _ = models.black_box(dim=1, noise=0.7)
    with model:
        step = make_estimating(pseudo_marginal=True, steps_per_draw=5)
    idata = sample(step, model, draws=3000, tune=600)
    assert_moments(values(idata, "x"), np.array([0.5]), np.sqrt(0.5), "pseudo-marginal")


def test_estimate_kept_while_the_rest_is_evaluated_again(make_estimating):
    model, operation = models.estimated_with_other()
    with model:
        ours = make_estimating([model["own"]], pseudo_marginal=True)
        step = CompoundStep([ours, models.Shift([model["other"]], shift=0.25)])
    prior = model.compile_fn(
        model.logp(vars=model.free_RVs), inputs=model.value_vars, mode="FAST_COMPILE"
    )
    exact = model.compile_fn(
        model.logp(vars=model.observed_RVs), inputs=model.value_vars, mode="FAST_COMPILE"
    )
    begin(step).stop_tuning()
    operation.calls = 0
    point = model.initial_point()
    for i in range(100):
        calls, kept = operation.calls, None if i == 0 else ours.chain.value[2]
        before = point
        point, _ = step.step(point)
        assert operation.calls - calls == 1 + (i == 0)
        at = {"own": point["own"], "other": before["other"]}
        np.testing.assert_allclose(ours.chain.value[:2], [prior(at), exact(at)])
        if i and point["own"] == before["own"]:
            assert ours.chain.value[2] == kept


@pytest.mark.slow
def test_posterior_of_an_estimated_term_in_a_compound(make_estimating):
    """The other variable is drawn exactly, so every error is the step's."""
    model, _ = models.estimated_with_other(noise=0.5)
    with model:
        ours = make_estimating([model["own"]], pseudo_marginal=True, steps_per_draw=5)
        gibbs = models.ExactOther([model["other"]])
    idata = sample([ours, gibbs], model, draws=3000, tune=500)
    variance = np.diag(np.linalg.inv(models.ESTIMATED_PRECISION))
    for i, name in enumerate(("own", "other")):
        assert_moments(values(idata, name), models.ESTIMATED_MEAN[i], variance[i] ** 0.5, name)


def test_entangled_estimates_are_refused(make_estimating):
    model, _ = models.estimated_with_other(entangled=True)
    with model:
        with pytest.raises(ValueError, match=r"simulator.*other.*vars="):
            make_estimating([model["own"]], pseudo_marginal=True)
        make_estimating(pseudo_marginal=True)


# progress bars and statistics ---------------------------------------------------------------------


@pytest.mark.parametrize("bar", [True, "combined+stats", "split"])
def test_progress_bars(case, bar, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    # PyMC 5 keeps the stream that was there when it was imported.
    monkeypatch.setattr("pymc.progress_bar.rich_progress.stderr", sys.stderr, raising=False)
    sample(parts(case.step()), case.model, chains=2, draws=4, tune=4, progressbar=bar)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "Draw" in shown
    for column in case.kind.columns:
        assert (column in shown) == (bar != "split")
    # As many, and as short, as 80 columns hold beside PyMC's own.
    words = [word for column in case.kind.columns for word in column.split()]
    assert len(case.kind.columns) <= 2 and max(map(len, words)) <= 6


MAY_BE_NAN = {
    "beta",
    "log_ratio",
    "swapped",
    "bandwidth",
    "component",
    "component_scaling",
    "surrogate_error",
    "mode",
}
"""Statistics that are NaN until a proposal is learnt, or where no move of its kind was made."""


def test_statistics_are_as_declared(case):
    step, tune = case.step(), case.kind.tune
    declared = dict(parts(step)[0].stats_dtypes_shapes)
    assert declared.pop("warning") == (SamplerWarning, None)
    _, statistics, _ = run(step, case.model, tune + case.kind.draws, tune)
    for draw in ours_of(statistics):
        assert set(draw) - {"warning"} == set(declared)
        for name, (dtype, shape) in declared.items():
            assert np.asarray(draw[name]).dtype == np.float64, name
            assert dtype is (object if shape else np.float64)
            assert np.shape(draw[name]) == tuple(shape)
            assert np.all(np.isfinite(draw[name])) or name in MAY_BE_NAN, name
        for name in {"accept", "accepted"} & set(draw):
            assert 0 <= draw[name] <= 1
        assert draw.get("n_nonfinite", 0) == 0
    reserved = {"total", "completed", "advance", "description", "visible", "refresh", "draw"}
    assert not reserved & set(declared)


def test_result_keeps_the_statistics_and_saves(case, tmp_path):
    step = case.step()
    options = {"draws": 10, "tune": 10, "discard_tuned_samples": False}
    idata = sample(parts(step), case.model, **options)
    for group in ("sample_stats", "warmup_sample_stats"):
        declared = set(parts(step)[0].stats_dtypes_shapes) - {"warning"}
        assert declared <= set(idata[group].data_vars)
        assert "warning" not in idata[group].data_vars
    idata.to_netcdf(tmp_path / "result.nc")


# warnings -----------------------------------------------------------------------------------------


def warnings_of(step, model, draws, tune):
    _, statistics, _ = run(step, model, draws, tune)
    return [s["warning"] for s in statistics if "warning" in s]


@pytest.fixture
def soon_stuck(monkeypatch):
    for module in ("report", "latent_function"):
        monkeypatch.setattr(f"pymc_kameleon.steps.{module}.STUCK_AFTER", 30)


def test_stuck_chain_says_so_once(kind, soon_stuck):
    model = kind.needle()
    step = kind.make(model=model, compile_kwargs=UNCOMPILED)
    told = warnings_of(step, model, 130, tune=10)
    messages = [w.message for w in told]
    assert all(w.level == "warn" for w in told)
    assert all(f" of {kind.variable} " in message for message in messages)
    for reason in ("stuck", *kind.told_of_a_needle):
        assert sum(reason in message for message in messages) == 1
    assert len(messages) == len(set(messages)) == 1 + len(kind.told_of_a_needle)
    assert any("stuck" in message and "30 " in message for message in messages)


def test_acceptance_far_from_target_says_so_once(make_random_walk):
    model, _, _ = models.normal(2)
    with model:
        step = make_random_walk(
            scaling=1e-12, learn_scaling=False, steps_per_draw=10, **tiny_moves(make_random_walk)
        )
    told = warnings_of(step, model, 900, tune=400)
    assert len(told) == 1
    assert "acceptance" in told[0].message and f"{step.target_accept:.3f}" in told[0].message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_say_so_once(make_random_walk, value):
    model = models.not_finite(value)
    step = built(make_random_walk, model, steps_per_draw=10)
    told = warnings_of(step, model, 900, tune=300)
    assert len(told) == 1
    assert "NaN" in told[0].message and "%" in told[0].message


@pytest.mark.parametrize("tune", [0, 1, 30])
def test_short_tuning_says_so_once(make_each_way, tune):
    model, _, _ = models.normal(2)
    step = built(make_each_way, model)
    told = warnings_of(step, model, 900, tune=tune)
    assert len(told) == 1
    assert "short" in told[0].message and f"tune={step.default_tune_steps}" in told[0].message


def test_long_enough_tuning_says_nothing(make_each_way):
    model, _, _ = models.normal(2)
    step = built(make_each_way, model, steps_per_draw=10)
    assert warnings_of(step, model, 400, tune=200) == []


def test_warnings_reach_the_log_and_not_the_result(kind, soon_stuck, caplog):
    model = kind.needle()
    step = kind.make(model=model, compile_kwargs=UNCOMPILED)
    idata = sample(step, model, chains=2, draws=35, tune=2)
    assert len([r for r in caplog.records if "stuck" in r.getMessage()]) == 2
    assert "warning" not in idata["sample_stats"].data_vars


# tuning length ------------------------------------------------------------------------------------


@pytest.mark.skipif(not PYMC_6, reason="PyMC 5 ignores default_tune_steps")
def test_default_tune_steps_is_honoured(kind):
    model = small_model(kind.add, kind.variable, beside=False)
    step = kind.make(model=model, **({"steps_per_draw": 20} if kind.variable == "x" else {}))
    assert 0 < step.default_tune_steps < 1000
    idata = sample(step, model, draws=2, tune=None)
    assert idata["posterior"].attrs["tuning_steps"] == step.default_tune_steps


def test_default_tune_steps_grows_with_dimension(step_class):
    with models.normal(2)[0]:
        small = step_class().default_tune_steps
        many = step_class(steps_per_draw=100).default_tune_steps
    with models.normal(20)[0]:
        large = step_class().default_tune_steps
    assert many < small < large


# registration -------------------------------------------------------------------------------------


def test_importing_registers_nothing():
    assert not any("kameleon" in m.__module__ for m in STEP_METHODS)


def test_register_and_unregister():
    before = list(STEP_METHODS)
    register()
    register()
    assert len(STEP_METHODS) == len(before) + 1
    unregister()
    unregister()
    assert before == STEP_METHODS


def test_registered_step_is_chosen_without_gradients(registered, caplog):
    model, _ = models.black_box()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model, caplog.at_level(logging.INFO):
            idata = pm.sample(
                draws=20,
                tune=20,
                chains=1,
                progressbar=False,
                kameleon={"steps_per_draw": 3, "n_subsample": 20},
            )
    assert np.all(values(idata, "n_evals", "sample_stats")[0] == 3)
    assert not [w for w in caught if "object mode" in str(w.message)]


def test_registered_step_leaves_gradients_to_nuts(registered):
    with models.normal(1)[0]:
        idata = pm.sample(draws=5, tune=5, chains=1, progressbar=False)
    assert "tree_depth" in idata["sample_stats"] or "depth" in idata["sample_stats"]


def test_registered_step_leaves_discrete_variables_alone(registered):
    with pm.Model():
        pm.Poisson("count", 3)
        pm.Potential("simulator", models.BlackBox(models.negative_half_square)(
            pt.stack([pm.Normal("x", 0, 1)])
        ))  # fmt: skip
        idata = pm.sample(draws=5, tune=5, chains=1, progressbar=False)
    assert values(idata, "accepted", "sample_stats").shape == (1, 5, 2)


# black boxes --------------------------------------------------------------------------------------


def test_black_box_falls_back_by_itself(make_gradient_free, caplog):
    """With one log line, no error, and no complaint of Numba's."""
    model, _ = models.black_box()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="pymc.kameleon"):
        warnings.simplefilter("error", UserWarning)
        with model:
            step = make_gradient_free()
        run(step, model, 30, tune=20)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("pymc.kameleon")]
    assert len(lines) == 1 and "BlackBox" in lines[0] and "Python" in lines[0]


@pytest.mark.slow
@pytest.mark.numerics
def test_black_box_posterior(make_gradient_free):
    model, _ = models.black_box(dim=2)
    with model:
        step = make_gradient_free(steps_per_draw=3)
    idata = sample(step, model, draws=2000, tune=600)
    assert_moments(values(idata, "x"), np.full(2, 0.5), np.sqrt(0.5), "black box")


@needs_c_compiler
def test_black_box_with_the_c_linker(make_gradient_free):
    model, _ = models.black_box()
    with model:
        step = make_gradient_free(compile_kwargs=C_LINKER)
    assert values(sample(step, model, draws=10, tune=10), "x").shape == (1, 10, 2)


def test_black_box_with_numba_on_request(make_gradient_free):
    """The user's own choice: object mode, which Numba remarks on."""
    model, _ = models.black_box()
    with model:
        step = make_gradient_free(compile_kwargs={"mode": "NUMBA"})
    expected, _, _ = run(make_gradient_free(model=model), model, 60, tune=30, seed=2)
    points, _, _ = run(step, model, 60, tune=30, seed=2)
    np.testing.assert_allclose(points, expected, rtol=1e-6)


def test_unpicklable_black_box_on_one_core(make_gradient_free):
    model, _ = models.unpicklable_black_box()
    with model:
        step = make_gradient_free()
    assert values(sample(step, model, draws=10, tune=10, chains=2), "x").shape == (2, 10, 2)


def test_black_box_on_two_cores(make_gradient_free):
    model, _ = models.black_box()
    with model:
        step = make_gradient_free()
    one = sample(step, model, draws=20, tune=20, chains=2)
    two = sample(step, model, draws=20, tune=20, chains=2, cores=2)
    np.testing.assert_allclose(values(two, "x"), values(one, "x"), rtol=1e-6)


@wrap_python(itypes=[pt.dvector], otypes=[pt.dscalar])
def wrapped_function(x):
    return np.array(models.negative_half_square(x))


def test_wrapped_python_function(make_gradient_free, caplog):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=2)
        pm.Potential("simulator", wrapped_function(x))
        with caplog.at_level(logging.INFO, logger="pymc.kameleon"):
            step = make_gradient_free()
    idata = sample(step, model, draws=20, tune=20)
    assert values(idata, "x").shape == (1, 20, 2)
    assert len([r for r in caplog.records if r.name.startswith("pymc.kameleon")]) == 1


def raising(x):
    raise FloatingPointError("the solver failed at x")


def test_an_error_of_the_black_box_is_shown(make_gradient_free):
    model, operation = models.black_box()
    with model:
        step = make_gradient_free()
    run(step, model, 3)
    operation.function = raising
    with pytest.raises(FloatingPointError, match="the solver failed"):
        step.step(model.initial_point())


# densities that are not finite --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "compile_kwargs"),
    [(np.nan, None), (np.inf, None), (-np.inf, None), (np.nan, C_LINKER)],
)
def test_regions_without_density(make_each_way, value, compile_kwargs):
    if compile_kwargs is not None and not pytensor.config.cxx:
        pytest.skip(models.needs_c_compiler["reason"])
    model = models.not_finite(value)
    step = built(make_each_way, model, compile_kwargs=compile_kwargs)
    points, statistics, _ = run(step, model, 500, tune=300)
    counted = sum(s["n_nonfinite"] for s in statistics)
    assert points.max() <= 0
    assert len(np.unique(points)) > 50
    assert counted == 0 if value == -np.inf else 20 < counted < 500


@pytest.mark.slow
@pytest.mark.numerics
def test_truncated_moments_are_right(make_each_way):
    model = models.not_finite()
    step = built(make_each_way, model, steps_per_draw=10)
    idata = sample(step, model, draws=1500, tune=300)
    assert_mean(values(idata, "x"), -np.sqrt(2 / np.pi), "half normal")


def test_model_without_bounds_checks(make_each_way):
    """A negative standard deviation is then NaN instead of -inf."""
    with pm.Model(check_bounds=False) as model:
        sigma = pm.Normal("sigma", 1, 1, initval=1.0)
        pm.Normal("y", 0, sigma, observed=np.array([0.5, -1.0]))
    step = make_each_way(model=model)
    points, statistics, _ = run(step, model, 600, tune=400)
    assert points.min() > 0
    assert sum(s["n_nonfinite"] for s in statistics) > 0


FLOAT32 = """
import numpy as np
from conftest import LATENT_WAYS, STEPS, WAYS_TO_RUN, assert_evaluations, small_model
from models import sample

for name in [*WAYS_TO_RUN, *LATENT_WAYS]:
    kind = STEPS[name]
    model = small_model(kind.add, kind.variable, beside=False)
    assert all(value.dtype == np.float32 for value in model.initial_point().values())
    modes = [{"mode": "FAST_COMPILE"}]
    if name == "kameleon":
        modes.append(None)
    moves_any = kind.variable == "x"
    options = {"steps_per_draw": 3} if moves_any else {}
    for mode in modes:
        step = kind.make(model=model, compile_kwargs=mode, **options)
        idata = sample(step, model, draws=40, tune=150 if moves_any else 8)
        draws = idata["posterior"][kind.variable].values
        assert draws.dtype == np.float32, (name, draws.dtype)
        assert np.all(np.isfinite(draws)) and len(np.unique(draws)) > 20, (name, draws)
        if moves_any:
            evaluations = idata["sample_stats"]["n_evals"].values
            assert_evaluations(step, evaluations, np.full(evaluations.shape, 3))
"""


def run_python(code, *flags, **environment):
    tests = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.dirname(tests), tests, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_single_precision():
    flags = ",".join(filter(None, [os.environ.get("PYTENSOR_FLAGS"), "floatX=float32"]))
    result = run_python(FLOAT32, PYTENSOR_FLAGS=flags)
    assert result.returncode == 0, result.stderr


def test_import_gives_no_warning_and_registers_nothing():
    """Warnings are errors, but for those of PyMC's own import, which comes first where it warns."""
    check = (
        "import pymc_kameleon; from pymc.step_methods import STEP_METHODS; "
        "assert not any('kameleon' in m.__module__ for m in STEP_METHODS)"
    )
    result = run_python(check, "-W", "error")
    if result.returncode and "pymc_kameleon" not in result.stderr.splitlines()[-1]:
        pymc_first = "import warnings, pymc; warnings.simplefilter('error'); "
        result = run_python(pymc_first + check)
    assert result.returncode == 0, result.stderr


# models -------------------------------------------------------------------------------------------


def test_model_outside_of_a_context(make_each_way):
    model = models.two_scales()
    step = make_each_way(model=model)
    idata = sample(step, model, draws=10, tune=10)
    assert values(idata, "a").shape == (1, 10)
    compound = make_each_way(model=model, blocked=False)
    assert len(compound.methods) == 2


@pytest.mark.skipif(not PYMC_6, reason="PyMC 5 has no frozen models")
def test_frozen_model(make_each_way):
    from pymc.model.transform.optimization import freeze_model

    model = freeze_model(models.with_data())
    step = make_each_way(model=model)
    points, _, _ = run(step, model, 50, tune=30)
    assert np.all(np.isfinite(points))
    with model:
        sample(make_each_way(), draws=10, tune=10)


def test_interrupted_sampling_keeps_its_draws(case):
    step, model = parts(case.step()), case.model

    def stop(trace, draw):
        if not draw.tuning and draw.draw_idx >= 40:
            raise KeyboardInterrupt

    idata = sample(step, model, draws=500, tune=30, callback=stop)
    assert 5 <= values(idata, case.kind.variable).shape[1] < 20
    again = sample(step, model, draws=4, tune=2)
    assert values(again, case.kind.variable).shape[:2] == (1, 4)


def test_unpicklable_members_are_found_early(make_each_way):
    """What cannot travel to another process is the model's member, not the step's own."""
    model, _, _ = models.normal(1)
    step = built(make_each_way, model)
    run(step, model, 3)
    cloudpickle.dumps(step)
    assert not any(isinstance(v, type(threading.Lock())) for v in vars(step).values())
