"""What PyMC and its users may expect of every step: a battery that runs over all of them.

Statistical assertions use Monte Carlo standard errors; each fails by chance with probability 1e-6.
"""

import copy
import functools
import logging
import os
import pickle
import sys
import warnings

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from conftest import (
    CASES,
    LATENT_WAYS,
    STEPS,
    WAYS_TO_RUN,
    assert_evaluations,
    built,
    rows,
    small_model,
)
from models import (
    UNCOMPILED,
    assert_mean,
    assert_moments,
    begin,
    drive,
    run,
    run_python,
    sample,
    values,
)
from pymc.stats.convergence import SamplerWarning
from pymc.step_methods import STEP_METHODS
from pymc.step_methods.compound import CompoundStep
from scipy import stats
from test_kernels import KERNELS as OWN

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    KameleonStep,
    MALAStep,
    kernels,
    register,
    unregister,
)
from pymc_kameleon.mcmc.chain import N_TERMS

PYMC_6 = int(pm.__version__.split(".")[0]) >= 6
C_LINKER = {"mode": "cvm"}
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


def messages(statistics):
    return [s["warning"] for s in ours_of(statistics) if "warning" in s]


# variables: order, shapes, transforms -------------------------------------------------------------


def test_order_and_names_of_vars_do_not_matter(make_each_way):
    model = models.two_scales()
    chains = []
    for names in (["a", "b"], [model["b"], "a"]):
        step = make_each_way(names, model=model, steps_per_draw=5)
        chains.append(sample(step, model, draws=900, tune=200))
    for name, mean, sd in (("a", 0, 1), ("b", 10, 0.1)):
        first, second = (values(chain, name) for chain in chains)
        np.testing.assert_array_equal(first, second)
        assert_moments(first, mean, sd, name)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("name", ["mala", "surrogate_hmc"])
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


@pytest.mark.numerics
@pytest.mark.parametrize("dim", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_dimensions(make_random_walk, dim):
    """A batch is ten draws: at d = 50, 1500 transitions, many times the correlation length."""
    model, mean, sd = models.normal(dim)
    step = built(make_random_walk, model, steps_per_draw=5 if dim == 1 else 150)
    idata = sample(step, model, draws=300, tune=300)
    assert_moments(values(idata, "x"), mean, sd, f"d = {dim}")


# chains -------------------------------------------------------------------------------------------


def test_chains_share_nothing(case):
    """Each of two is that which is sampled alone, by a step that has sampled or by a new one."""
    step, fresh = parts(case.step()), parts(case.step(1))
    options = {"draws": case.kind.draws, "tune": case.kind.tune}
    draws = values(
        sample(step, case.model, chains=2, random_seed=20, **options), case.kind.variable
    )
    assert not np.array_equal(draws[0], draws[1])
    for chain, one in ((0, step), (1, fresh)):
        rng = np.random.default_rng(20)
        rng.spawn(chain)
        alone = sample(one, case.model, random_seed=rng, **options)
        np.testing.assert_array_equal(draws[chain], values(alone, case.kind.variable)[0])


def test_shallow_copies_are_independent(every_case):
    """PyMC's population sampling copies a step with `copy.copy`, and takes turns."""
    case, step, tune = every_case, every_case.step(), every_case.kind.tune
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "names"),
    [
        pytest.param("spawn", [*WAYS_TO_RUN, *LATENT_WAYS], marks=pytest.mark.numerics),
        # What is forked has less to go wrong than what is spawned.
        pytest.param("fork", ["kameleon", "slice_ep", "latent_gp"], marks=pytest.mark.bounds),
    ],
)
def test_processes_give_the_same_chains(method, names, monkeypatch):
    """Bitwise; several steps in one run, as spawning is slow."""
    monkeypatch.undo()  # processes that are spawned know nothing of it
    with pm.Model() as model:
        parent = pm.Normal("parent", 0, 0.5)
        steps = [STEPS[name].make([STEPS[name].add(name, parent)]) for name in names]
        # A step that samples has the linker's rounding, which is another one in PyMC 6.
        steps.append(models.Shift([parent], shift=0.001))
    options = {"chains": 2, "draws": 80, "tune": 150, "random_seed": 7}
    expected = sample(steps, model, **options)
    result = sample(steps, model, cores=2, mp_ctx=method, **options)
    for name in names:
        assert len(np.unique(values(expected, name))) > 20
        np.testing.assert_array_equal(values(result, name), values(expected, name), err_msg=name)


# compiled and plain -------------------------------------------------------------------------------


KERNELS = {
    "gaussian": kernels.Gaussian(),
    "matern 2.0": kernels.Matern(2.0),
    "polynomial": kernels.Polynomial(2, 1.0),
    "own, compiled": OWN["custom-njit"],
    "own, plain": OWN["custom-plain"],
}
CONFIGURATIONS = {
    f"kameleon, {name}": functools.partial(KameleonStep, kernel=kernel, n_subsample=60)
    for name, kernel in KERNELS.items()
} | {
    "adaptive metropolis": AdaptiveMetropolisStep,
    "fixed covariance": functools.partial(
        AdaptiveMetropolisStep, covariance=np.diag([1.0, 2.0, 3.0])
    ),
    "paper": functools.partial(KameleonStep.paper, adaptation=models.every_ten),
}


@needs_c_compiler
@pytest.mark.parametrize(
    ("configuration", "steps_per_draw"),
    # How transitions make up a draw does not depend on the kernel.
    [
        ("kameleon, gaussian", 1),
        *(
            pytest.param(c, n, marks=pytest.mark.numerics)
            for c, n in [("adaptive metropolis", 1), *((c, 20) for c in CONFIGURATIONS)]
        ),
    ],
)
def test_compiled_and_plain_give_the_same_chain(configuration, steps_per_draw):
    model, _, _ = models.normal(3)
    chains = []
    for compile_kwargs in (None, C_LINKER):
        step = CONFIGURATIONS[configuration](
            model=model, steps_per_draw=steps_per_draw, compile_kwargs=compile_kwargs
        )
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


def assert_same_continuation(step, point, remaining, expected):
    """Points and all statistics of a chain that goes on are those of the other one's end."""
    points, statistics, _ = drive(step, point, **remaining)
    n = len(points)
    np.testing.assert_array_equal(points, expected[0][-n:])
    for one, other in zip(ours_of(statistics), ours_of(expected[1][-n:]), strict=True):
        one, other = (
            {k: v for k, v in statistic.items() if k != "warning"} for statistic in (one, other)
        )
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_saved_state_continues_the_chain(every_case, tuned):
    """Saved early, in tuning, at its end, and after it; into the same step or one with a past."""
    case, kind = every_case, every_case.kind
    step, other, tune = case.step(), case.step(1), kind.tune if tuned else 0
    saved_at = {1, max(1, tune // 20), tune * 3 // 4, tune, tune + 5} - {0}
    length = tune + kind.draws
    begin(step, 4, tune, kind.draws)
    point, points, statistics, saved = case.model.initial_point(), [], [], {}
    for i in range(length):
        if i == tune:
            step.stop_tuning()
        (moved,), (told,), point = drive(step, point, 1, tune=-1)
        points.append(moved), statistics.append(told)
        if i + 1 in saved_at:
            saved[i + 1] = step.sampling_state, point
    run(other, case.model, 7, tune=3, seed=5)
    expected = np.array(points), statistics
    for at, (state, point) in saved.items():
        remaining = {"draws": length - at, "tune": max(tune - at, -1)}
        for which, library in ((other, pickle), (step, cloudpickle)):
            which.sampling_state = library.loads(library.dumps(state))
            assert_same_continuation(which, point, remaining, expected)


def test_pickled_step_continues(every_case):
    """A step goes to another process by cloudpickle, also in the middle of a chain."""
    case = every_case
    step, tune = case.step(plain=True), case.kind.tune
    _, _, point = run(step, case.model, tune // 2, tune, seed=4)
    clone = cloudpickle.loads(cloudpickle.dumps(step))
    remaining = {"draws": tune // 2 + 12, "tune": tune - tune // 2}
    assert_same_continuation(clone, point, remaining, drive(step, point, **remaining))


OTHER_PROPOSALS = [
    (KameleonStep, {"kernel": "gaussian"}, {"kernel": "linear"}),
    (KameleonStep, {"n_subsample": 10}, {"n_subsample": 11}),
    (KameleonStep.paper, {"adaptation": models.always}, {"adaptation": models.every_ten}),
    (AdaptiveMetropolisStep, {"covariance": np.eye(2)}, {"covariance": 2 * np.eye(2)}),
    *(
        (AdaptiveMetropolisStep, {"initial_covariance": a}, {"initial_covariance": b})
        for a, b in [(np.eye(2), 2 * np.eye(2))]
    ),
]


@pytest.mark.numerics
@pytest.mark.parametrize(("make", "first", "second"), OTHER_PROPOSALS)
def test_state_of_another_proposal_is_refused(make, first, second):
    model, _, _ = models.normal(2)
    step, other = (make(model=model, compile_kwargs=UNCOMPILED, **o) for o in (first, second))
    run(step, model, 5)
    with pytest.raises(ValueError, match=next(iter(first))):
        other.sampling_state = step.sampling_state


def test_state_of_another_configuration_or_variable_is_refused(kind):
    with pm.Model() as model:
        first, second = (kind.add(name, 0.0) for name in "ab")
    step = kind.make([first], model=model, compile_kwargs=UNCOMPILED)
    begin(step).step(model.initial_point())
    for difference in kind.different:
        options = {"compile_kwargs": UNCOMPILED} | difference
        with pytest.raises(ValueError, match=next(iter(difference.get("_published", difference)))):
            kind.make([first], model=model, **options).sampling_state = step.sampling_state
    with pytest.raises(ValueError, match="var"):
        other = kind.make([second], model=model, compile_kwargs=UNCOMPILED)
        other.sampling_state = step.sampling_state


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("name", ["kameleon", "fast_kameleon", "pca_kameleon", "surrogate_hmc"])
def test_state_and_step_stay_small(name):
    """At most 2 MB for d = 8 by default, and hardly more after 1e4 transitions than after 1e3."""
    model, _, _ = models.normal(8)
    step = begin(STEPS[name].step_class(model=model, steps_per_draw=100), tune=10**9)
    sizes, point = [], model.initial_point()
    for draws in (10, 90):
        _, _, point = drive(step, point, draws, tune=-1)
        state = len(pickle.dumps(step.sampling_state))
        sizes.append((state, len(cloudpickle.dumps(step))))
        assert state <= 2e6
    assert all(late < 1.2 * early for early, late in zip(*sizes, strict=True))
    assert sizes[1][1] - sizes[1][0] < 1e6


# lengths and statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize(("tune", "draws"), [(0, 30), (1, 1), (40, 30)])
def test_lengths_of_tuning(case, tune, draws, tmp_path):
    """And what the result keeps of them, which can be saved."""
    step = parts(case.step())
    idata = sample(step, case.model, draws=draws, tune=tune, discard_tuned_samples=False)
    found = values(idata, case.kind.variable)
    assert found.shape[:2] == (1, draws) and np.all(np.isfinite(found))
    for group in ["sample_stats"] + ["warmup_sample_stats"] * bool(tune):
        assert set(step[0].stats_dtypes_shapes) - {"warning"} <= set(idata[group].data_vars)
        assert "warning" not in idata[group].data_vars
    if draws == 30:
        assert case.kind.variable != "f" or len(np.unique(found)) > found.shape[-1]
        assert np.ptp(values(idata, case.kind.constant, "sample_stats")) == 0
    else:
        idata.to_netcdf(tmp_path / "result.nc")


def learnt(step):
    """All that a step has learnt, as bytes; not what is computed for the present position."""
    return pickle.dumps(learnt_values(step.sampling_state))


def learnt_values(state):
    if hasattr(state, "learner"):
        besides = {name: getattr(state, name, None) for name in ("stage", "sites", "n_fits")}
        found = {**state.learner.values, **besides}
        for name in ("here", "states", "last_position", "last_value", "is_known"):
            found.pop(name, None)
        if "below" in found:
            found["below"] = learnt_values(found["below"])
    else:
        names = ("averaging", "site_precision", "site_shift", "n_fits", "next_fit")
        found = {name: getattr(state, name) for name in names if hasattr(state, name)}
    assert found
    return found


def test_frozen_however_short_tuning_was(every_case):
    """Nothing that a transition depends on is learnt once tuning has ended.

    Sites are fitted at the last in the first draw after tuning, before the function moves.
    """
    case, step = every_case, every_case.step()
    for tune in (0, 1, 2, 130):
        _, _, point = run(step, case.model, tune + 1, tune)
        before = learnt(parts(step)[0])
        drive(step, point, 2 * case.kind.draws, tune=-1)
        assert learnt(parts(step)[0]) == before, tune


def test_adapt_after_tune_goes_on(make_random_walk):
    model, _, _ = models.normal(2)
    step = built(make_random_walk, model, adapt_after_tune=True)
    _, statistics, _ = run(step, model, 600, tune=300)
    learnt = "step_size" if make_random_walk.func is MALAStep else "scaling"
    assert len({s[learnt] for s in statistics[300:]}) > 1


@pytest.mark.numerics
@pytest.mark.parametrize("schedule", [models.always, models.every_ten])
def test_own_schedule_from_the_first_transition(schedule):
    """An update that comes before there is a history waits for one."""
    model, _, _ = models.normal(2)
    step = KameleonStep.paper(
        model=model, adaptation=schedule, n_subsample=20, standardize=True, global_share=0.8
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        points, statistics, _ = run(step, model, 300, tune=250)
    assert np.all(np.isfinite(points)) and len(np.unique(points[250:, 0])) > 5
    assert all(np.isfinite(s["scaling"]) and s["scaling"] < 1e6 for s in statistics)


@pytest.mark.parametrize("name", rows([*WAYS_TO_RUN, *LATENT_WAYS]))
def test_progress_bars(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    # PyMC 5 keeps the stream that was there when it was imported.
    monkeypatch.setattr("pymc.progress_bar.rich_progress.stderr", sys.stderr, raising=False)
    case = CASES[name]
    for bar in ["combined+stats"] + [True, "split"] * (name == "kameleon"):
        sample(case.step(), case.model, chains=2, draws=4, tune=4, progressbar=bar)
        captured = capsys.readouterr()
        shown = captured.out + captured.err
        assert "Draw" in shown
        for column in case.kind.columns:
            assert (column in shown) == (bar != "split")
    # As many, and as short, as 80 columns hold beside PyMC's own.
    words = [word for column in case.kind.columns for word in column.split()]
    assert len(case.kind.columns) <= 2 and max(map(len, words)) <= 6


@pytest.mark.parametrize("name", [*WAYS_TO_RUN, *LATENT_WAYS])
def test_the_bar_shows_the_mean_acceptance_of_a_chain(name):
    """Over its draws so far; a statistic is that of its draw, and goes through a pipe."""
    case = CASES[name]
    step = case.step()
    if "Accept" not in case.kind.columns:
        return
    (show,) = step._make_progressbar_update_functions()
    for seed in (1, 2):  # the second chain begins anew
        begin(step, seed, tune=10)
        point, found = case.model.initial_point(), []
        for i in range(10):
            point, (statistics,) = step.step(point)
            found.append(float(statistics["accept"]))
            shown = show(pickle.loads(pickle.dumps(statistics)))["accept"]
            assert abs(shown - np.mean(found)) < 1e-9, i
            assert type(shown) is float and np.asarray(statistics["accept"]).dtype == np.float64
    assert len(set(found)) > 1


MAY_BE_NAN = {
    *("bandwidth", "component", "component_scaling", "surrogate_error", "mode", "evidence_ratio"),
    *("beta", "log_ratio", "swapped", "barrier"),
}
"""Statistics that are NaN until a proposal is learnt, or where no move of its kind was made."""


def test_statistics_are_as_declared(every_case):
    step, tune = every_case.step(), every_case.kind.tune
    declared = dict(parts(step)[0].stats_dtypes_shapes)
    assert declared.pop("warning") == (SamplerWarning, None)
    _, statistics, _ = run(step, every_case.model, tune + every_case.kind.draws, tune)
    for draw in ours_of(statistics):
        assert set(draw) - {"warning"} == set(declared)
        for name, (dtype, shape) in declared.items():
            assert np.asarray(draw[name]).dtype == (np.float64 if shape else dtype), name
            assert dtype is (object if shape else bool if name == "diverging" else np.float64)
            assert np.shape(draw[name]) == tuple(shape)
            assert np.all(np.isfinite(draw[name])) or name in MAY_BE_NAN, name
        for name in {"accept", "accepted"} & set(draw):
            assert 0 <= draw[name] <= 1
        assert draw.get("n_nonfinite", 0) == 0
    reserved = {"total", "completed", "advance", "description", "visible", "refresh", "draw"}
    assert not reserved & set(declared)


@pytest.mark.skipif(not PYMC_6, reason="PyMC 5 ignores default_tune_steps")
def test_default_tune_steps_is_honoured(kind):
    model = small_model(kind.add, kind.variable, beside=False)
    step = kind.make(model=model, **({"steps_per_draw": 20} if kind.variable == "x" else {}))
    assert 0 < step.default_tune_steps < 1000
    idata = sample(step, model, draws=2, tune=None)
    assert idata["posterior"].attrs["tuning_steps"] == step.default_tune_steps


@pytest.mark.numerics
def test_default_tune_steps_grows_with_dimension(step_class):
    small, many, large = (
        step_class(model=models.normal(dim)[0], steps_per_draw=n, compile_kwargs=UNCOMPILED)
        for dim, n in ((2, 1), (2, 100), (20, 1))
    )
    assert many.default_tune_steps < small.default_tune_steps < large.default_tune_steps


# compound steps -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_of_ours(make_each_way):
    model = models.two_scales()
    with model:
        steps = [make_each_way([model["b"]], steps_per_draw=3), make_each_way(["a"])]
    idata = sample(steps, model, draws=900, tune=300)
    assert_moments(values(idata, "b"), 10, 0.1, "b")
    assert values(idata, "accept", "sample_stats").shape == (1, 900, 2)
    counts = values(idata, "n_evals", "sample_stats")[0, 1:]
    moved = values(idata, "accepted", "sample_stats")[0] > 0
    assert_evaluations(steps[0], counts[:, 0], 3 + moved[:-1, 1])
    assert_evaluations(steps[1], counts[:, 1], 1 + moved[1:, 0])


@pytest.mark.slow
def test_with_steps_of_pymc(make_each_way):
    """With gradients, for whole numbers and for switches: a Gaussian pair, given the other two."""
    with pm.Model() as model:
        count, on = pm.Poisson("count", 4), pm.Bernoulli("on", 0.5)
        a = pm.Normal("a", 0, 1)
        x = pm.Normal("x", a, 1)
        pm.Normal("y", x + count + on, 1, observed=3.0)
        steps = [make_each_way([x], steps_per_draw=10), pm.NUTS([a])]
        # PyMC gives the count a Metropolis step.
        steps.append(pm.BinaryGibbsMetropolis([on]))
    idata = sample(steps, model, draws=3000, tune=400)
    counts, switches = np.meshgrid(np.arange(60), [0, 1])
    left = 3.0 - counts - switches
    weight = stats.poisson.pmf(counts, 4) * stats.norm.pdf(left, 0, np.sqrt(3))
    weight /= weight.sum()
    means = {"count": counts, "on": switches, "a": left / 3, "x": 2 * left / 3}
    for name, given in means.items():
        assert_mean(values(idata, name), np.sum(weight * given), name)
        if name in "ax":
            square = np.sum(weight * (given**2 + 2 / 3))
            assert_mean(values(idata, name) ** 2, square, f"{name}, squared")
    assert "tree_depth" in idata["sample_stats"] or "depth" in idata["sample_stats"]
    assert values(idata, "accepted", "sample_stats").shape[:2] == (1, 3000)


def test_compound_state_is_restored(make_each_way):
    model = models.two_scales()
    first, second = (make_each_way(model=model, blocked=False) for _ in range(2))
    assert isinstance(first, CompoundStep) and len(first.methods) == 2
    begin(first, seed=5)
    _, _, point = drive(first, model.initial_point(), 60, tune=-1)
    second.sampling_state = first.sampling_state
    expected, _, _ = drive(first, point, 150, tune=60)
    continued, _, _ = drive(second, point, 150, tune=60)
    np.testing.assert_array_equal(continued, expected)


# counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_draw", [1, 7])
def test_one_evaluation_a_transition(make_gradient_free, steps_per_draw):
    """Counted by the operation itself; one more in the first draw asks whether it is random."""
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
    expected = np.full(200, steps_per_draw)
    expected[[0, 150]] += 1
    assert_evaluations(step, calls, expected)
    assert step.target.n_evaluations == sum(calls)


def test_a_step_may_be_called_from_any_point(make_each_way):
    """The kept density is dropped there, and kept where the point is that of the last draw."""
    model, _, _ = models.normal(2)
    step = built(make_each_way, model, steps_per_draw=3)
    _, _, point = run(step, model, 150, tune=150)
    point, (statistics,) = step.step({"x": point["x"] + 0.1})  # one sd of the narrow coordinate
    assert_evaluations(step, statistics["n_evals"], 4)
    _, (statistics,) = step.step(point)
    assert_evaluations(step, statistics["n_evals"], 3)
    np.testing.assert_allclose(
        step.target(point["x"]).sum(), model.compile_logp(**UNCOMPILED)(point)
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        point, _ = step.step({"x": rng.normal(size=2)})
        np.testing.assert_allclose(step.chain.value[:N_TERMS].sum(), step.target(point["x"]).sum())


@pytest.mark.parametrize("shift", [0.0, 0.1])
@pytest.mark.parametrize("name", rows(["kameleon", "mala"]))
def test_evaluated_again_only_if_other_variables_changed(name, shift):
    model = models.two_scales()
    with model:
        ours = STEPS[name].make([model["a"]], steps_per_draw=4, disperse=False)
        step = CompoundStep([ours, models.Shift([model["b"]], shift=shift)])
    _, statistics, _ = run(step, model, 30, tune=10)
    counts = [s[0]["n_evals"] for s in statistics]
    assert counts == [5] + [5 if shift else 4] * 29


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
    np.testing.assert_allclose(
        step.chain.value[:N_TERMS].sum(), model.compile_logp(**UNCOMPILED)(point)
    )


# estimated likelihoods ----------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_an_accepted_estimate_is_kept(make_estimating, shift):
    """Also while the rest is evaluated again: it is not drawn again where the point stays."""
    model, operation = models.estimated_with_other(noise=2.0)
    with model:
        ours = make_estimating([model["own"]], pseudo_marginal=True)
        step = CompoundStep([ours, models.Shift([model["other"]], shift=shift)])
    prior, exact = (
        model.compile_fn(model.logp(vars=variables), inputs=model.value_vars, mode="FAST_COMPILE")
        for variables in (model.free_RVs, model.observed_RVs)
    )
    begin(step).stop_tuning()
    operation.calls, stayed = 0, 0
    point = model.initial_point()
    for i in range(200):
        calls, kept = operation.calls, None if i == 0 else ours.chain.value[2]
        before = point
        point, statistics = step.step(point)
        assert operation.calls - calls == 1 + (i == 0)
        assert statistics[0]["n_evals"] == 1 + (i == 0 or shift > 0)
        at = {"own": point["own"], "other": before["other"]}
        np.testing.assert_allclose(ours.chain.value[:2], [prior(at), exact(at)])
        if i and point["own"] == before["own"]:
            assert ours.chain.value[2] == kept
            stayed += 1
    assert 10 < stayed < 200


def test_entangled_estimates_are_refused(make_estimating):
    model, _ = models.estimated_with_other(entangled=True)
    with model:
        with pytest.raises(ValueError, match=r"simulator.*other.*vars="):
            make_estimating([model["own"]], pseudo_marginal=True)
        make_estimating(pseudo_marginal=True)


# warnings -----------------------------------------------------------------------------------------


def test_stuck_chain_says_so_once(kind, monkeypatch, caplog):
    """In the statistics of a draw, and by PyMC in the log of each chain, not in the result."""
    for module in ("chain.report", "latent_function"):
        monkeypatch.setattr(f"pymc_kameleon.steps.{module}.STUCK_AFTER", 30)
    model = kind.needle()
    step = kind.make(model=model, compile_kwargs=UNCOMPILED)
    # A trajectory that fails is told when enough of them did.
    draws = 130 if "failed" in kind.told_of_a_needle else 60
    told = messages(run(step, model, draws, tune=10)[1])
    said = [w.message for w in told]
    assert all(w.level == "warn" for w in told)
    assert all(f" of {kind.variable} " in message for message in said)
    for reason in ("stuck", *kind.told_of_a_needle):
        assert sum(reason in message for message in said) == 1
    assert len(said) == len(set(said)) == 1 + len(kind.told_of_a_needle)
    assert any("stuck" in message and "30 " in message for message in said)
    caplog.clear()
    idata = sample(step, model, chains=2, draws=32, tune=2)
    assert len([r for r in caplog.records if "stuck" in r.getMessage()]) == 2
    assert "warning" not in idata["sample_stats"].data_vars


@pytest.mark.parametrize("name", rows(["kameleon", "fast_kameleon", "pca_kameleon", "mala"]))
def test_acceptance_far_from_target_says_so_once(name):
    """The moves are tiny: chains stay where the initial values are."""
    model, _, _ = models.normal(2)
    (scaling,) = STEPS[name].different[-1]
    options = {scaling: 1e-12, "learn_scaling": False, "steps_per_draw": 10}
    step = STEPS[name].make(model=model, **options, **STEPS[name].tiny)
    (told,) = messages(run(step, model, 900, tune=400)[1])
    assert "acceptance" in told.message and f"{step.target_accept:.3f}" in told.message
    starts = [{"x": np.full(2, 5.0)}, {"x": np.full(2, -5.0)}]
    idata = sample(step, model, chains=2, draws=1, tune=0, initvals=starts)
    np.testing.assert_allclose(values(idata, "x")[:, 0, 0], [5, -5], atol=3)


def test_short_tuning_says_so_once(make_each_way):
    model, _, _ = models.normal(2)
    step = built(make_each_way, model)
    for tune in (0, 1, 30):
        (told,) = messages(run(step, model, 900, tune=tune)[1])
        assert "short" in told.message and f"tune={step.default_tune_steps}" in told.message
    enough = built(make_each_way, model, steps_per_draw=10)
    assert messages(run(enough, model, 400, tune=200)[1]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "compile_kwargs"),
    [(np.nan, None), (np.inf, None), (-np.inf, None), (np.nan, models.PLAIN)],
)
def test_regions_without_density(make_each_way, value, compile_kwargs):
    """Chains stay out of them, with the right moments; one that is not zero is said, once."""
    model = models.not_finite(value)
    step = built(make_each_way, model, steps_per_draw=10, compile_kwargs=compile_kwargs)
    points, statistics, _ = run(step, model, 900, tune=300)
    counted = sum(s["n_nonfinite"] for s in statistics)
    assert points.max() <= 0
    assert_mean(points[300:, 0], -np.sqrt(2 / np.pi), "half normal")
    told = [w.message for w in messages(statistics)]
    if value == -np.inf:
        assert counted == 0 and told == []
    else:
        assert 40 < counted < 9000
        assert len(told) == 1 and "NaN" in told[0] and "%" in told[0]


# registration -------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    before = list(STEP_METHODS)
    register()
    register()
    assert len(STEP_METHODS) == len(before) + 1
    yield
    unregister()
    unregister()
    assert before == STEP_METHODS


def test_registered_step_is_chosen_without_gradients(registered):
    """And disperses its chains."""
    model, _ = models.black_box()
    options = {"draws": 5, "tune": 5, "chains": 2, "cores": 1, "progressbar": False}
    options |= {"discard_tuned_samples": False}
    with warnings.catch_warnings(record=True) as caught, model:
        warnings.simplefilter("always")
        idata = pm.sample(**options, kameleon={"steps_per_draw": 3, "n_subsample": 20})
    assert np.all(values(idata, "n_evals", "sample_stats") == [4, 3, 3, 3, 3])
    assert len(np.unique(values(idata, "x", "warmup_posterior")[:, 0])) == 4
    assert not [w for w in caught if "object mode" in str(w.message)]
    with models.normal(1)[0]:
        idata = pm.sample(**options)
    assert "tree_depth" in idata["sample_stats"] or "depth" in idata["sample_stats"]


def test_registered_step_leaves_discrete_variables_alone(registered):
    with pm.Model():
        pm.Poisson("count", 3)
        operation = models.BlackBox(models.negative_half_square)
        pm.Potential("simulator", operation(pt.stack([pm.Normal("x", 0, 1)])))
        idata = pm.sample(draws=5, tune=5, chains=1, progressbar=False)
    assert values(idata, "accepted", "sample_stats").shape == (1, 5, 2)


# black boxes --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_black_box_falls_back_by_itself(make_gradient_free, caplog):
    """With one log line, no error, and no complaint of Numba's; in processes and by any linker."""
    model, operation = models.black_box()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="pymc.kameleon"):
        warnings.simplefilter("error", UserWarning)
        step = make_gradient_free(model=model, steps_per_draw=3)
        expected, _, _ = run(step, model, 60, tune=30, seed=2)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("pymc.kameleon")]
    assert len(lines) == 1 and "BlackBox" in lines[0] and "Python" in lines[0]
    idata = sample(step, model, draws=2000, tune=600)
    assert_moments(values(idata, "x"), np.full(2, 0.5), np.sqrt(0.5), "black box")
    # Object mode, which Numba remarks on, is the user's own choice.
    for compile_kwargs in (models.PLAIN, {"mode": "NUMBA"}):
        other = make_gradient_free(model=model, steps_per_draw=3, compile_kwargs=compile_kwargs)
        points, _, _ = run(other, model, 5, tune=5, seed=2)
        np.testing.assert_allclose(points, expected[:5], rtol=1e-6)
    one, two = (sample(step, model, draws=20, tune=20, chains=2, cores=n) for n in (1, 2))
    np.testing.assert_allclose(values(two, "x"), values(one, "x"), rtol=1e-6)

    def raising(x):
        raise FloatingPointError("the solver failed at x")

    operation.function = raising
    with pytest.raises(FloatingPointError, match="the solver failed"):
        step.step(model.initial_point())


def test_unpicklable_black_box_on_one_core(make_gradient_free):
    model, _ = models.unpicklable_black_box()
    step = make_gradient_free(model=model)
    assert values(sample(step, model, draws=10, tune=10, chains=2), "x").shape == (2, 10, 2)


# processes of their own, models, interruptions ----------------------------------------------------


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
        idata = sample(step, model, draws=40, tune=60 if moves_any else 8)
        draws = idata["posterior"][kind.variable].values
        assert draws.dtype == np.float32, (name, draws.dtype)
        assert np.all(np.isfinite(draws)) and len(np.unique(draws)) > 20, (name, draws)
        if moves_any:
            evaluations = idata["sample_stats"]["n_evals"].values
            assert_evaluations(step, evaluations, np.full(evaluations.shape, 3))
"""


@pytest.mark.slow
@pytest.mark.numerics
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
    result = run_python(check, flags=("-W", "error"))
    if result.returncode and "pymc_kameleon" not in result.stderr.splitlines()[-1]:
        pymc_first = "import warnings, pymc; warnings.simplefilter('error'); "
        result = run_python(pymc_first + check)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not PYMC_6, reason="PyMC 5 has no frozen models")
def test_frozen_model(make_each_way):
    from pymc.model.transform.optimization import freeze_model

    model = freeze_model(models.with_data())
    points, _, _ = run(make_each_way(model=model), model, 50, tune=30)
    assert np.all(np.isfinite(points))


def test_interrupted_sampling_keeps_its_draws(case):
    step, model = parts(case.step()), case.model

    def stop(trace, draw):
        if not draw.tuning and draw.draw_idx >= 40:
            raise KeyboardInterrupt

    idata = sample(step, model, draws=500, tune=30, callback=stop)
    assert 5 <= values(idata, case.kind.variable).shape[1] < 20
    again = sample(step, model, draws=4, tune=2)
    assert values(again, case.kind.variable).shape[:2] == (1, 4)
