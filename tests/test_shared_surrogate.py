"""Chains with a store: shared while they tune, exact after it, nothing asked twice."""

import signal

import models
import numpy as np
import pymc as pm
import pytest
from models import FORK, BlackBox, Killed, begin, drive, sample

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    GPSurrogate,
    KameleonStep,
    MALAStep,
    SurrogateHMCStep,
)
from pymc_kameleon.gp.sparse_gp import predict
from pymc_kameleon.gp.sparse_gp_fit import most_informative

pytestmark = pytest.mark.numerics


SCREENED = [AdaptiveMetropolisStep, MALAStep]
"""Steps with delayed acceptance, without gradients and with them."""


class Counted(BlackBox):
    """-|x - 1|^2 / 2 with its gradient; notes the points that it is asked for."""

    def __init__(self):
        super().__init__(self.note)
        self.asked = []

    def note(self, x):
        self.asked.append(np.array(x, dtype=float).tobytes())
        return models.negative_half_square(x)

    def pullback(self, inputs, outputs, cotangents):
        return [cotangents[0] * (1.0 - inputs[0])]

    L_op = pullback


def counted(prior_sd=1.0):
    operation = Counted()
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, prior_sd, shape=2)
        pm.Potential("simulator", operation(x))
    return model, operation


def make(cls, model, store, **options):
    if cls is SurrogateHMCStep:
        return cls(model=model, store=store, **options)
    surrogate = {k: options.pop(k) for k in ("max_points", "n_initial") if k in options}
    options = {"steps_per_draw": 3} | options
    return cls(model=model, surrogate=GPSurrogate(store=store, **surrogate), **options)


def learnt(step):
    """Points that the surrogate of a step was taught, and their log-likelihoods."""
    n = min(step.stage.count[0], len(step.stage.values))
    return step.stage.points[:n], step.stage.values[:n]


def driven(step, model, draws, tune, seed=1):
    begin(step, seed, tune)
    return drive(step, model.initial_point(), draws, tune)


def driven_together(cls, model, store, tune, seed=0, **options):
    """Two chains that have tuned side by side, and where they are."""
    steps = [make(cls, model, store, **options) for _ in range(2)]
    points = [model.initial_point() for _ in steps]
    for k, step in enumerate(steps):
        begin(step, seed + k, tune)
    for _ in range(tune):
        for k, step in enumerate(steps):
            points[k], _ = step.step(points[k])
    return steps, points


# kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*SCREENED, KameleonStep, SurrogateHMCStep])
def test_every_call_is_stored_once_and_statistics_count_calls(cls):
    model, operation = counted()
    store = EvaluationStore()
    for seed in (1, 2):
        step = make(cls, model, store)
        operation.asked.clear()
        before = store.summary()["evaluations"]
        _, statistics, _ = driven(step, model, 60, 40, seed)
        assert len(operation.asked) == store.summary()["evaluations"] - before
        assert sum(s["n_evals"] for s in statistics) == len(operation.asked)
        assert statistics[-1]["calls_made"] == len(operation.asked)
        if cls is not SurrogateHMCStep:
            total = sum(s["n_transitions"] for s in statistics)
            assert statistics[-1]["calls_saved"] == total - len(operation.asked)
    rows = store.read(step.stored.model)
    assert len({row.point.tobytes() for row in rows}) == len(rows)
    for row in rows:
        np.testing.assert_allclose(row.value, models.negative_half_square(row.point), rtol=1e-12)
        if cls is MALAStep:
            np.testing.assert_allclose(row.gradient, 1.0 - row.point, rtol=1e-12)
        else:
            assert row.gradient is None


@pytest.mark.parametrize("cls", [*SCREENED, SurrogateHMCStep])
def test_what_is_known_is_not_asked_again_and_is_not_counted(cls):
    """A chain that its surrogate does not change is the same again, without a call."""
    model, operation = counted()
    store, found = EvaluationStore(), []
    hmc = cls is SurrogateHMCStep
    options = {"steps_per_draw": 5} if hmc else {"n_initial": 250, "max_points": 900}
    for _ in range(2):
        step = make(cls, model, store, disperse=False, **options)
        operation.asked.clear()
        points, statistics, _ = driven(step, model, 40, 0 if hmc else 30)
        found.append(points)
        n_evals = sum(s["n_evals"] for s in statistics)
        assert n_evals == len(operation.asked) == statistics[-1]["calls_made"]
        assert (n_evals > 100) == (len(found) == 1)
    assert not operation.asked
    np.testing.assert_allclose(*found, rtol=1e-10)


def test_values_without_gradients_are_asked_again_where_gradients_are_needed():
    model, operation = counted()
    store = EvaluationStore()
    driven(make(AdaptiveMetropolisStep, model, store), model, 40, 20)
    values = store.summary()["evaluations"]
    operation.asked.clear()
    driven(make(MALAStep, model, store), model, 40, 20)
    assert operation.asked
    walk = make(AdaptiveMetropolisStep, model, store)
    begin(walk, 3, 20)
    walk.step(model.initial_point())
    # Values that came with a gradient serve a step that takes none.
    assert walk.stage.count[0] > min(values, 200)
    assert len(store.read(walk.stored.model)) >= values + len(operation.asked)


@pytest.mark.parametrize("cls", [AdaptiveMetropolisStep, SurrogateHMCStep])
def test_a_chain_that_shares_nothing_is_as_without_a_store(cls):
    chains = []
    for store in (None, EvaluationStore()):
        model, _ = models.black_box()
        chains.append(driven(make(cls, model, store), model, 120, 80, 3)[0])
    np.testing.assert_array_equal(*chains)


def test_a_model_that_compiles_runs_in_python_with_a_store():
    model = models.with_data()
    step = AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate(store=EvaluationStore()))
    assert not step.runs_compiled
    assert "in Python" in repr(step)
    _, statistics, _ = driven(step, model, 20, 10)
    assert step.stored.store.summary()["evaluations"] == sum(s["n_evals"] for s in statistics)


def test_a_store_that_is_none_is_refused():
    model, _ = models.black_box()
    with pytest.raises(TypeError, match=r"store='run\.sqlite'.*EvaluationStore"):
        AdaptiveMetropolisStep(model=model, surrogate=GPSurrogate(store="run.sqlite"))


# shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SCREENED)
def test_chains_that_tune_learn_from_each_other_and_stop_then(cls):
    model, _ = counted()
    store = EvaluationStore()
    steps, points = driven_together(cls, model, store, 100, steps_per_draw=1)
    foreign = [{r.point.tobytes() for r in store.read(1, not_by=s.stored.chain)} for s in steps]
    for step, others in zip(steps, foreign, strict=True):
        step.stop_tuning()
        held = {point.tobytes() for point in learnt(step)[0]}
        assert len(held & others) > 0.2 * len(held)
        assert len(held - others) > 0.2 * len(held)
    before = [step.stage.process.weights.copy() for step in steps]
    for step, point, weights in zip(steps, points, before, strict=True):
        drive(step, point, 30, -1)
        np.testing.assert_array_equal(step.stage.process.weights, weights)


def test_learners_that_tune_learn_from_each_other_and_stop_then():
    model, _ = models.black_box()
    steps, points = driven_together(SurrogateHMCStep, model, EvaluationStore(), 150)
    for step in steps:
        step.stop_tuning()
    for step, other in zip(steps, reversed(steps), strict=True):
        learner = step.learner
        assert learner.n_own + learner.n_foreign == learner.evaluations.count[0]
        assert learner.n_fitted == learner.evaluations.count[0]
        assert 0.7 * other.learner.n_own < learner.n_foreign <= other.learner.n_own
    held = [(s.learner.fitted.gp.weights.copy(), s.learner.evaluations.count[0]) for s in steps]
    for step, point, (weights, count) in zip(steps, points, held, strict=True):
        drive(step, point, 30, tune=-1)
        np.testing.assert_array_equal(step.learner.fitted.gp.weights, weights)
        assert step.learner.evaluations.count[0] == count


@pytest.mark.parametrize("cls", SCREENED)
def test_a_later_run_begins_with_a_trained_surrogate(cls):
    """With another prior, too."""
    model, _ = counted()
    store = EvaluationStore()
    driven(make(cls, model, store), model, 150, 120)
    narrow, operation = counted(prior_sd=0.5)
    for tune in (20, 0):
        step = make(cls, narrow, store)
        operation.asked.clear()
        begin(step, 5, tune)
        if not tune:
            step.stop_tuning()
        _, (statistics,) = step.step(narrow.initial_point())
        assert step.stage.is_open[0]
        assert statistics["n_points"] > 30
        assert len(operation.asked) <= 4
        held, values = learnt(step)
        expected = [models.negative_half_square(x) for x in held]
        np.testing.assert_allclose(values, expected, rtol=1e-10)


@pytest.mark.parametrize("cls", [AdaptiveMetropolisStep, SurrogateHMCStep])
def test_a_chain_that_is_continued_does_not_depend_on_the_file_and_reads_nothing_twice(cls):
    model, _ = models.black_box()
    store = EvaluationStore()
    first = make(cls, model, store)
    _, _, point = driven(first, model, 60, 100)
    second = make(cls, model, EvaluationStore() if cls is AdaptiveMetropolisStep else store)
    second.sampling_state = first.sampling_state
    if cls is AdaptiveMetropolisStep:
        assert second.stage.count[0] == first.stage.count[0]
        return
    drive(second, point, 40, tune=100)
    assert second.learner.n_foreign == 0
    known = np.unique(second.learner.evaluations.stored()[0], axis=0)
    assert len(known) == store.summary()["evaluations"]


def test_the_training_set_stays_bounded_and_is_chosen():
    model, _ = counted()
    store, rng = EvaluationStore(), np.random.default_rng(4)
    step = make(AdaptiveMetropolisStep, model, store, max_points=40)
    for point in 3.0 * rng.normal(size=(400, 2)) + 0.5:
        store.add(step.stored.model, "a", point, models.negative_half_square(point), 0.0)
    begin(step, 1, 200)
    point, _ = step.step(model.initial_point())
    assert step.stage.process.count[0] <= 40
    assert 100 < len(learnt(step)[0]) <= 200
    for more in rng.normal(size=(100, 2)) + 0.5:
        store.add(step.stored.model, "b", more, models.negative_half_square(more), 0.0)
    drive(step, point, 60, 60)
    step.stop_tuning()
    assert step.stage.process.count[0] <= 40
    held = {point.tobytes() for point in learnt(step)[0]}
    assert any(e.point.tobytes() in held for e in store.read(step.stored.model, after=400))
    u = rng.normal(size=(200, 2)) * 0.5**0.5 + 0.5
    found = [predict(step.stage.process, x)[0] for x in u]
    np.testing.assert_allclose(found, [models.negative_half_square(x) for x in u], atol=0.05)


def test_points_that_say_most_are_chosen():
    rng = np.random.default_rng(7)
    points = np.concatenate([rng.normal(size=(900, 3)), 8.0 * rng.normal(size=(100, 3))])
    points[1] = points[0]
    values = -0.5 * np.sum(points**2, axis=1)
    values[5] = -np.inf
    chosen = most_informative(points, values, 100)
    assert len(chosen) == len(set(chosen)) == 100
    assert 5 not in chosen
    assert not {0, 1} <= set(chosen)
    typical = np.linalg.norm(points[chosen], axis=1) < 4.0
    assert typical.mean() > 0.6


# where a chain begins -----------------------------------------------------------------------------


def test_a_search_is_left_out_where_the_mode_is_known():
    model, operation = counted()
    store, asked = EvaluationStore(), []
    for seed in (1, 2):
        step = make(AdaptiveMetropolisStep, model, store, start="optimize", steps_per_draw=1)
        operation.asked.clear()
        begin(step, seed, 100)
        point, _ = step.step(model.initial_point())
        asked.append(len(operation.asked))
        drive(step, point, 100, 100)
    assert asked[1] < 10 < asked[0]


@pytest.mark.parametrize("shares", [False, True])
def test_a_search_ends_when_another_chain_has_taught_enough(shares):
    """What that chain evaluated comes between two calls of the search, which takes 55 alone."""
    model, operation = models.black_box(dim=8)
    taught, store = [], EvaluationStore()
    if shares:
        other = make(SurrogateHMCStep, model, EvaluationStore())
        driven(other, model, 60, 100, 2)
        taught = other.stored.store.read(other.stored.model)
    step = make(SurrogateHMCStep, model, store)
    asked, original = [], operation.function

    def searching(x):
        asked.append(x)
        if len(asked) == 30:
            for found in taught:
                store.add(step.stored.model, "other", found.point, found.value, 0.0)
        return original(x)

    operation.function = searching
    begin(step, 1, tune=100)
    step.step({"x": np.full(8, 6.0)})
    assert len(asked) < 40 if shares else len(asked) > 50


@pytest.mark.parametrize("told", [False, True])
def test_a_chain_begins_at_a_known_point_unless_it_is_told_where(told):
    """Far out it learns from itself alone, until it is near what is known."""
    model, operation = counted()
    store = EvaluationStore()
    driven(make(AdaptiveMetropolisStep, model, store, n_initial=4), model, 120, 100)
    known = {row.point.tobytes() for row in store.read(1)}
    step = make(AdaptiveMetropolisStep, model, store, steps_per_draw=1)
    begin(step, 8, 200)
    operation.asked.clear()
    start = {"x": np.full(2, 20.0)} if told else model.initial_point()
    point, _ = step.step(start)
    assert step.stage.is_open[0] != told
    if not told:
        assert not operation.asked or point["x"].tobytes() in known | set(operation.asked)
        assert np.linalg.norm(step.chain.position - 0.5) < 5.0
        return
    assert operation.asked[0] == start["x"].tobytes()
    drive(step, point, 200, 200)
    held, _ = learnt(step)
    assert len({x.tobytes() for x in held} & known) > 20


def test_a_chain_that_is_told_to_begin_here_does():
    model, _ = models.black_box()
    store = EvaluationStore()
    driven(make(SurrogateHMCStep, model, store), model, 100, 100)
    step = begin(make(SurrogateHMCStep, model, store, start="here"), 1, tune=10)
    before = np.full(2, 2.5)
    points, _, _ = drive(step, {"x": before}, 1, tune=10)
    assert step.learner.n_foreign > 100
    assert np.linalg.norm(points[0] - before) < 1.0


# exact --------------------------------------------------------------------------------------------


# processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "tune", "draws"), [(SurrogateHMCStep, 40, 600), (AdaptiveMetropolisStep, 100, 1500)]
)
def test_a_killed_run_goes_on_where_it_was(tmp_path, cls, tune, draws):
    path = tmp_path / "run.sqlite"
    operation = Killed(models.negative_half_square)
    with pm.Model() as model:
        pm.Potential("simulator", operation(pm.Normal("x", 0, 1, shape=2)))
    step = make(cls, model, EvaluationStore(path))
    operation.calls, operation.last = 0, 120
    process = FORK.Process(target=lambda: sample(step, model, draws=300, tune=200))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store = EvaluationStore(path)
    seen = {e.point.tobytes() for e in store.read(step.stored.model)}
    assert len(seen) == 119  # the last one was not finished
    asked, operation.last = [], None

    def noted(x):
        asked.append(np.array(x, dtype=float).tobytes())
        return models.negative_half_square(x)

    operation.function = noted
    again = make(cls, model, store)
    asked.clear()
    idata = sample(again, model, draws=draws, tune=tune, discard_tuned_samples=False)
    assert not seen & set(asked)
    assert len(store.read(step.stored.model)) == 119 + len(asked)
    if cls is SurrogateHMCStep:
        # It begins with a surrogate: a run that knows nothing asks 60 times before its first draw.
        assert len(asked) < 700
    else:
        assert models.values(idata, "n_points", "warmup_sample_stats")[0, 0] > 50
    x = models.values(idata, "x")
    models.assert_mean(x, np.full(2, 0.5))
    models.assert_mean((x - 0.5) ** 2, np.full(2, 0.5))
