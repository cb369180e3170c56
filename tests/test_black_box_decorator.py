"""`black_box`: functions as terms of a model, which may fail, hang, print, or end their process."""

import functools
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pymc as pm
import pytest
from models import begin, drive, has_ended, run, sample

from pymc_kameleon import EvaluationStore, KameleonStep, SurrogateHMCStep, black_box
from pymc_kameleon.model.black_box import Calls

WEIGHTS = np.array([1.0, 2.0, 4.0])


class SolverError(Exception):
    """Of a class that cannot be made anew from what it holds."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")


def only_positive(a):
    if a < 0:
        raise SolverError(3, "no solution")
    return -0.5 * a * a


# what it takes, and what it returns ---------------------------------------------------------------

RETURNED = {
    "float": (lambda a: -0.5 * float(a) ** 2, ()),
    "int": (lambda a: -2, ()),
    "float32": (lambda a: np.float32(-0.5), ()),
    "list": (lambda a: [a, 2.0 * a, 4.0 * a], (3,)),
    "integers": (lambda a: np.array([1, 2, 4]), (3,)),
    "matrix": (lambda a: np.outer(WEIGHTS, [a, a]), (3, 2)),
    "array of one": (lambda a: np.array([a]), (1,)),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_shape_is_found_at_the_start(kind):
    function, shape = RETURNED[kind]
    with pm.Model() as model:
        a = pm.LogNormal("a", initval=0.5)
        found = pm.Deterministic("found", black_box(function)(a))
    assert found.type.shape == shape and found.dtype == "float64"
    value = model.compile_fn(found, inputs=[a], point_fn=False)(0.5)
    np.testing.assert_array_equal(value, function(0.5))


def test_arguments_are_natural_values_in_their_shapes():
    seen = []

    @black_box
    def log_likelihood(rate, weights, data, scale):
        seen.append((rate, weights, data, scale))
        weights *= 2.0  # a copy
        return 0.0

    data = np.arange(6.0).reshape(2, 3)
    with pm.Model():
        rate = pm.Uniform("rate", 1, 3, initval=1.5)
        weights = pm.Dirichlet("weights", np.ones(3), initval=np.array([0.2, 0.3, 0.5]))
        pm.Potential("p", log_likelihood(rate, weights, data, scale=2 * rate))
        step = KameleonStep()
    step.target(step.target.default_start)
    assert len(seen) == 2
    for rate, weights, given, scale in seen:
        assert np.shape(rate) == () and rate == pytest.approx(1.5) and scale == pytest.approx(3.0)
        np.testing.assert_allclose(weights, [0.4, 0.6, 1.0])
        np.testing.assert_array_equal(given, data)


def test_a_list_of_variables_is_a_vector_and_a_method_has_its_object():
    class Simulated:
        scale = 2.0

        @black_box
        def log_likelihood(self, pair, is_doubled):
            return -self.scale * (1 + is_doubled) * np.sum(pair)

    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        found = Simulated().log_likelihood([a, b], True)
    value = model.compile_fn(found, inputs=[a, b], point_fn=False)(0.5, 1.0)
    assert value == -6.0 == Simulated().log_likelihood([0.5, 1.0], True)


def test_with_numbers_it_is_the_function():
    curve = black_box(lambda a, b=1: [a, b], failures=ZeroDivisionError)
    np.testing.assert_array_equal(curve(1, b=2), [1.0, 2.0])
    assert black_box(only_positive).__name__ == "only_positive"
    with pytest.raises(RuntimeError, match=r"only_positive failed: SolverError: no solution \(3\)"):
        black_box(only_positive, failures=SolverError)(-1)


def test_it_is_not_called_where_the_shape_is_given():
    with pm.Model():
        curve = black_box(lambda a: pytest.fail("called"), shape=3)(pm.Normal("a"))
    assert curve.type.shape == (3,)
    assert curve.shape.eval().tolist() == [3]


def test_equal_calls_are_made_once():
    calls = []
    curve = black_box(lambda a: calls.append(a) or [a, a], shape=2)
    with pm.Model() as model:
        a = pm.Normal("a")
        pm.Normal("x", curve(a), 1.0, observed=[0.0, 0.0])
        pm.Normal("y", curve(a).sum(), 1.0, observed=0.0)
        model.compile_logp()({"a": 1.0})
    assert len(calls) == 1


def in_a_log_density():
    with pm.Model():
        box = black_box(lambda y, a: -0.5 * (y - a) ** 2)
        pm.CustomDist("y", pm.Normal("a"), logp=lambda y, a: box(y, a), observed=1.0)
        pm.modelcontext(None).logp()


REFUSED = [
    (lambda: black_box(3), TypeError, "function=3: pass a Python function"),
    (lambda: black_box(len, failures="x"), TypeError, "take classes of exceptions"),
    (lambda: black_box(len, failures=[3]), TypeError, "take classes of exceptions"),
    (
        lambda: black_box(len, core=2),
        TypeError,
        "core is no argument of black_box: did you mean",
    ),
    (lambda: black_box(len, timeout=0), ValueError, "timeout=0: take a finite number above 0"),
    (lambda: black_box(len, store="x.sqlite"), TypeError, "take an EvaluationStore"),
    (lambda: black_box(len, shape=(2, -1)), ValueError, "shape=-1"),
    (lambda: black_box(len, shape=2, store=EvaluationStore()), ValueError, "of one number"),
    (in_a_log_density, TypeError, "more than the variables of the model"),
    (lambda: black_box(only_positive)(), ValueError, "only_positive got no arguments"),
    (lambda: black_box(only_positive)(1, 2), TypeError, "only_positive does not take these"),
    (lambda: black_box(only_positive)(pm.Normal.dist()), TypeError, "outside of a model"),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_refusals(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_what_does_not_work_at_the_start():
    with pm.Model():
        a = pm.Normal("a", initval=-2)
        told = "only_positive failed at the starting point of the model, a = -2.: SolverError"
        with pytest.raises(ValueError, match=told):
            black_box(only_positive, failures=SolverError)(a)
        with pytest.raises(SolverError) as raised:
            black_box(only_positive)(a)
        assert "only_positive was called with a = -2." in raised.value.__notes__[0]
        with pytest.raises(TypeError, match="<lambda> returned None: return"):
            black_box(lambda a: None)(a)
        with pytest.raises(TypeError, match="Argument 2 of <lambda> is of type dict: pass"):
            black_box(lambda a, b: 0.0)(a, {})


def test_another_shape_later_is_an_error():
    curve = black_box(lambda a: np.zeros(3 if a == 0 else 4))
    with pm.Model() as model:
        pm.Potential("p", curve(pm.Normal("a")).sum())
    logp = model.compile_logp()
    with pytest.raises(ValueError, match=r"<lambda> returned an array of shape \(4,\)"):
        logp({"a": 1.0})


# failures -----------------------------------------------------------------------------------------


def half_normal_model(make):
    """A half-normal posterior of `a`, by a function that fails where it is negative."""
    with pm.Model() as model:
        a = pm.Flat("a", initval=1.0)
        pm.Potential("p", make(only_positive)(a))
    return model


@pytest.mark.parametrize(
    "make", [KameleonStep, pytest.param(SurrogateHMCStep, marks=pytest.mark.numerics)]
)
def test_failures_are_rejected_counted_and_told_once(make):
    model = half_normal_model(lambda f: black_box(f, failures=SolverError))
    draws, statistics, _ = run(make(model=model), model, 550, tune=150, seed=1)
    told = [s["warning"].message for s in statistics if "warning" in s]
    (message,) = [text for text in told if "failed" in text or "NaN" in text]
    assert "only_positive failed in" in message and "(SolverError " in message
    assert "first at a = -" in message and "no solution (3)" in message
    kept = draws[150:]
    assert kept.min() > 0
    # 100 effective draws at least: a half normal has mean .798 and sd .603, six errors are .36.
    assert abs(kept.mean() - np.sqrt(2 / np.pi)) < 0.36


def test_failures_of_a_curve_are_impossible_and_counted():
    def shifted(a):
        return WEIGHTS + only_positive(a)

    curve = black_box(shifted, failures=(ZeroDivisionError, SolverError))
    with pm.Model() as model:
        mu = curve(pm.Normal("a", initval=1.0))
        pm.Normal("y", pm.math.switch(mu > 0, mu, 0.01), 1.0, observed=WEIGHTS)
    assert [term.name for term in model.potentials] == ["shifted_ran"]
    calls = Calls()
    with calls.counting():
        assert model.compile_logp()({"a": -1.0}) == -np.inf
    assert calls.failed.total() == 1
    assert "first at a = -1.: SolverError" in calls.complaint()


def test_another_chain_in_between_changes_no_count():
    model = half_normal_model(lambda f: black_box(f, failures=SolverError))
    step = begin(KameleonStep(model=model, steps_per_draw=20), 1, tune=20, draws=2)
    _, _, point = drive(step, model.initial_point(), 20, tune=-1)
    begin(KameleonStep(model=model), 2, tune=1)
    step.stop_tuning()
    told = [step.step(point)[1][0].get("warning") for _ in range(3)]
    assert any("only_positive failed in" in one.message for one in told if one is not None)


@pytest.mark.parametrize("cores", [1, 2])
def test_what_was_drawn_is_kept_when_the_function_raises(cores, interruptible, caplog):
    """It is an error of each chain, after about 50 draws that each keeps."""

    @black_box
    def log_likelihood(a):
        log_likelihood.calls = getattr(log_likelihood, "calls", 0) + 1
        if log_likelihood.calls > 700:
            raise SolverError(3, "no licence")
        return -0.5 * a * a

    with pm.Model():
        pm.Potential("p", log_likelihood(pm.Flat("a", initval=0.5)))
        step = KameleonStep(steps_per_draw=5)
        options = {"chains": cores, "cores": cores, "mp_ctx": "fork"}
        idata = sample(step, tune=50, draws=1000, **options)
    n = idata["posterior"].sizes["draw"]
    assert 0 < n < 200
    assert np.isfinite(idata["posterior"]["a"].values).all()
    if cores == 1:  # workers write to the standard error
        said = caplog.text
        assert "ends here, after" in said and "no licence (3)" in said and "with a = " in said


def test_failures_are_stored_as_such(tmp_path):
    """And are not asked for again, where other errors are."""
    store = EvaluationStore(tmp_path / "run.sqlite")
    calls = []

    @black_box(failures=SolverError)
    def log_likelihood(a):
        calls.append(a)
        if a > 2:
            raise OSError("no disk")
        return only_positive(a)

    with pm.Model() as model:
        pm.Potential("p", log_likelihood(pm.Flat("a", initval=1.0)))
        step = begin(SurrogateHMCStep(store=store), 1, tune=10, draws=1)
    step.step(model.initial_point())
    value = np.empty(3)
    for a in (-1.0, -1.0, 1.5):
        step.stored.into(np.array([a]), value)
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            step.stored.into(np.array([3.0]), value)
    assert [a for a in calls if a in (-1.0, 3.0)] == [-1.0, 3.0, 3.0]
    rows = {float(one.point[0]): one for one in store.read(step.stored.model)}
    assert rows[-1.0].value == -np.inf and rows[-1.0].failure.endswith("no solution (3)")
    assert np.isnan(rows[3.0].value) and rows[3.0].failure.startswith("OSError: no disk")
    assert rows[1.5].failure is None
    found = step.stored.store.summary()
    assert found["failed"] >= 3


def test_a_store_knows_arguments_by_name_in_any_order_and_functions_by_a_given_one(tmp_path):
    store = EvaluationStore(tmp_path / "run.sqlite")
    difference = black_box(lambda a, b: 10.0 * a - b, store=store, name="difference")
    found = []
    for order in (1, -1):
        with pm.Model() as model:
            a, b = pm.Flat("a"), pm.Flat("b")
            pm.Potential("p", difference(**dict([("a", a), ("b", b)][::order])))
        found.append(float(model.compile_logp()({"a": 1.0, "b": 2.0})))
    assert found == [8.0, 8.0] and difference.name == "difference"
    with pytest.raises(ValueError, match="has evaluations of another model: function"):
        half_normal_model(lambda f: black_box(f, store=store, name="another"))


def test_partial_functions_and_objects_have_names_and_keep_what_they_are(tmp_path):
    class Curve:
        shape, failures, name = (4, 4), "none", "x"

        def __call__(self, a):
            return [a, a]

    with pm.Model():
        a = pm.Normal("a")
        assert black_box(Curve())(a).type.shape == (2,)
        partial = black_box(functools.partial(only_positive), store=EvaluationStore())
        assert partial(a).type.shape == () and partial.name == "only_positive"
        again = cloudpickle.loads(cloudpickle.dumps(black_box(Curve(), failures=OSError)))
    assert again.failures == (OSError,) and again.name == "Curve"


def test_store_of_a_function(tmp_path):
    calls = []

    def log_likelihood(a):
        calls.append(a)
        return only_positive(a)

    for _ in range(2):
        store = EvaluationStore(tmp_path / "run.sqlite")
        with pm.Model() as model:
            wrapped = black_box(log_likelihood, failures=SolverError, store=store)
            pm.Potential("p", wrapped(pm.Flat("a", initval=1.0)))
        assert model.compile_logp()({"a": 2.0}) == -2.0
        assert model.compile_logp()({"a": -2.0}) == -np.inf
    assert calls == [2.0, -2.0]
    wrapped = EvaluationStore(tmp_path / "run.sqlite").wrap(
        black_box(log_likelihood, failures=SolverError)
    )
    with pm.Model() as model:
        pm.Potential("p", wrapped(pm.Flat("a", initval=1.0)))
    assert model.compile_logp()({"a": 2.0}) == -2.0 and calls == [2.0, -2.0]
    with pytest.raises(ValueError, match="has evaluations of another model: function"):
        half_normal_model(lambda f: black_box(f, store=store))


def test_failures_are_those_of_an_evaluation_and_not_of_another_thread():
    def fails(a):
        raise SolverError(7, "diverged")

    box = black_box(fails, failures=SolverError, shape=())
    with pm.Model() as model:
        pm.Potential("p", box(pm.Normal("a")))
    logp, store = model.compile_logp(), EvaluationStore()
    number = store.model_number({"function": "f"})

    def not_a_number():
        with ThreadPoolExecutor(1) as other:
            args = number, "other", np.ones(1), lambda: float(logp({"a": 1.0}))
            assert other.submit(store_in_a_thread, store.path, *args).result() == -np.inf
        return np.nan

    assert np.isnan(store.timed(number, "own", np.zeros(1), not_a_number))
    told = {float(one.point[0]): one.failure for one in store.read(number)}
    assert told[0.0] is None and "diverged" in told[1.0]


def store_in_a_thread(path, *arguments):
    return EvaluationStore(path).timed(*arguments)


def test_two_functions_of_one_name_are_counted_apart():
    def two(fails):
        def solve(a):
            if a in fails:
                raise SolverError(a, "diverged")
            return a

        return black_box(solve, failures=SolverError, shape=())

    one, other, calls = two((1,)), two((1, 2)), Calls()
    with calls.counting():
        for a in (0.0, 1.0, 2.0, 3.0):
            for box in (one, other, cloudpickle.loads(cloudpickle.dumps(other))):
                box.outcome([np.asarray(a)], ())
    told = calls.complaint()
    assert "solve failed in 25.0% of 4 calls" in told and "solve failed in 50.0% of 8" in told


# processes ----------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_is_a_failure():
    def slow(a):
        if a < 0:
            time.sleep(60.0)
        print("printed, and not taken for an answer")
        return -0.5 * a * a

    begun = time.monotonic()
    model = half_normal_model(lambda _: black_box(slow, timeout=0.5))
    logp, calls = model.compile_logp(), Calls()
    with calls.counting():
        assert [logp({"a": a}) for a in (1.0, -1.0, 2.0, -3.0)] == [-0.5, -np.inf, -2.0, -np.inf]
    assert time.monotonic() - begun < 50.0
    assert calls.last == "a = -3.: longer than 0.5 s"


@pytest.mark.skipif(os.name == "nt", reason="POSIX ends groups of processes")
def test_what_a_function_waits_for_is_ended_with_it():
    def waits(a):
        if a > 1:  # a copy of the process, which holds its pipes
            if os.fork() == 0:
                time.sleep(77.125)
                os._exit(0)
            time.sleep(60.0)
        subprocess.run(["sleep", "77.25"])

    wrapped = black_box(waits, timeout=0.5, shape=())
    for a in (1.0, 2.0):
        with pytest.raises(RuntimeError, match=r"waits failed: longer than 0.5 s"):
            wrapped(a)
    left = subprocess.run(["pgrep", "-f", "sleep 77.25"], capture_output=True, text=True)
    assert not left.stdout


def test_threads_take_turns():
    wrapped = black_box(lambda a: 2.0 * a, timeout=60.0)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda a: float(wrapped(a)), range(60)))
    assert found == [2.0 * a for a in range(60)]


def test_errors_and_ends_of_the_process_of_a_function():
    class Unsent(Exception):
        def __init__(self, code, text):
            super().__init__(f"{text} ({code})")

    def dies(a):
        if a < -1:
            os._exit(7)
        if a < 0:
            raise Unsent(3, "no solution")
        return float(os.getpid())

    wrapped = black_box(dies, timeout=60.0)
    first = wrapped(1.0)
    assert first not in (os.getpid(), wrapped(-0.0) + 1) and wrapped(2.0) == first
    with pytest.raises(RuntimeError, match="Unsent: no solution") as raised:
        wrapped(-0.5)
    assert "In a process of its own" in raised.value.__notes__[0]
    with pytest.raises(ChildProcessError, match="ended with status 7"):
        wrapped(-2.0)
    assert wrapped(1.0) != first  # a new one
    listed = black_box(dies, timeout=60.0, failures=(Unsent, ChildProcessError), shape=())
    with pm.Model() as model:
        pm.Potential("p", listed(pm.Normal("a")))
    logp = model.compile_logp()
    assert logp({"a": -0.5}) == logp({"a": -2.0}) == -np.inf


@pytest.mark.numerics
def test_nothing_is_left_of_processes(tmp_path):
    """Neither when the program ends, nor when it is killed within a call."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        from pymc_kameleon import black_box

        def tell(a):
            if a > 1:
                print(os.getpid(), file=sys.stderr, flush=True)
                time.sleep(60)
            return os.getpid()

        wrapped = black_box(tell, timeout=100)
        print(int(wrapped(0.0)), flush=True)
        if sys.argv[1] == "hang":
            wrapped(2.0)
        """)
    )
    done = subprocess.run([sys.executable, script, "end"], capture_output=True, text=True)
    assert done.returncode == 0 and has_ended(int(done.stdout))
    with subprocess.Popen(
        [sys.executable, script, "hang"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as killed:
        child = int(killed.stdout.readline())
        assert int(killed.stderr.readline()) == child
        killed.kill()
        assert has_ended(child)


@pytest.mark.parametrize("mp_ctx", ["fork", pytest.param("spawn", marks=pytest.mark.numerics)])
def test_chains_in_processes(mp_ctx):
    """Each with a process beside it; what the parent has begun is not theirs."""

    @black_box(failures=ArithmeticError, timeout=60.0)
    def log_likelihood(a):
        if a < 0:
            raise ArithmeticError("no solution")
        return -0.5 * a * a

    with pm.Model():
        pm.Potential("p", log_likelihood(pm.Flat("a", initval=1.0)))
        idata = sample(KameleonStep(), tune=50, draws=50, chains=2, cores=2, mp_ctx=mp_ctx)
    draws = idata["posterior"]["a"].values
    assert draws.min() > 0 and len(np.unique(draws[0])) > 10 and not np.allclose(*draws)


# simulators as they are ---------------------------------------------------------------------------
