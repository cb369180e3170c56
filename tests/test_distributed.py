"""Chains on a Dask cluster: one seed is one result, nothing is lost, nothing is asked twice."""

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import values
from pymc.logprob.abstract import _logprob as logprob
from pymc.sampling.parallel import ParallelSamplingError
from pytensor.compile.ops import wrap_py

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    GPSurrogate,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    SurrogateHMCStep,
    distributed,
)
from pymc_kameleon._compat import group_dataset
from pymc_kameleon.distributed.parcel import Parcel, packed
from pymc_kameleon.distributed.run import ClientStore, shared_tuning, tuning_rounds
from pymc_kameleon.distributed.worker import Found, RoundStore, workbench

dask = pytest.importorskip("dask.distributed", reason="Dask is not installed")

SHORT = {"draws": 25, "tune": 40, "chains": 3, "rounds": 3, "random_seed": 8}
QUIET = {"progressbar": False, "compute_convergence_checks": False}


@pytest.fixture(scope="module")
def cluster():
    cluster = dask.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    )
    yield cluster
    with contextlib.suppress(KeyError):  # Dask's own: it may not find the worker that was killed
        cluster.close()


@pytest.fixture(scope="module")
def client(cluster):
    with dask.Client(cluster, set_as_default=False) as client:
        yield client


def with_likelihood(function):
    """x ~ N(0, 1), and a black box that has one argument."""
    operation = wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])(function)
    with pm.Model() as model:
        pm.Potential("simulator", operation(pm.Normal("x", 0, 1, shape=2)))
    return model


def logged(path, before=lambda x, n: None):
    """A likelihood N(1 | x, 1) that writes each point to a file, and calls `before` before."""

    def log_likelihood(x):
        with open(path, "ab") as file:
            n = file.tell() // 16
            before(x, n)
            file.write(np.array(x, dtype=float).tobytes())
        return np.asarray(-0.5 * np.sum((x - 1.0) ** 2))

    return with_likelihood(log_likelihood)


def asked(path):
    return [row.tobytes() for row in np.fromfile(path).reshape(-1, 2)]


def points_in(store, model):
    return {np.array(x).tobytes() for x in store.to_dataset(model)["x"].values}


def sampled(model, client, **options):
    with model:
        return distributed.sample(client=client, **QUIET | SHORT | options)


def shared(model, client, store=None, **options):
    store = EvaluationStore() if store is None else store
    return sampled(model, client, step=SurrogateHMCStep, store=store, **options)


@pytest.fixture(scope="module")
def reference(client, tmp_path_factory):
    """A run with a store, its file of points and its draws."""
    path = tmp_path_factory.mktemp("reference")
    store = EvaluationStore(path / "run.sqlite")
    return path / "asked", store, values(shared(logged(path / "asked"), client, store), "x")


# one result ---------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_one_seed_is_one_result_by_another_number_of_workers_one_of_which_dies(
    cluster, client, reference, tmp_path
):
    cluster.scale(1)
    while len(client.nthreads()) > 1:
        time.sleep(0.1)
    marker, store = tmp_path / "killed", EvaluationStore()

    def kill_once(x, n):
        if n > 3 * 40 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model = logged(tmp_path / "asked", kill_once)
    found = shared(model, client, store)
    assert marker.exists()
    np.testing.assert_array_equal(values(found, "x"), reference[-1])
    assert points_in(store, model) == set(asked(tmp_path / "asked"))


@pytest.mark.numerics
def test_without_a_store_the_draws_are_those_of_pymc(client):
    with pm.Model() as model:
        pm.Normal("x", 1.0, 2.0, shape=2)
        pm.Poisson("count", 3.0)
    step = functools.partial(AdaptiveMetropolisStep, ["x"], steps_per_draw=2)
    options = {"draws": 30, "tune": 50, "chains": 2, "random_seed": 4}
    with model:
        expected = pm.sample(**options, cores=1, step=step(), progressbar=False)
    found = sampled(model, client, step=step, **options)
    for name in ("x", "count"):
        np.testing.assert_array_equal(values(found, name), values(expected, name))


def assert_alike(found, expected, groups):
    for group in groups:
        ours, theirs = (group_dataset(result, group) for result in (found, expected))
        assert ours is not None and theirs is not None, group
        assert dict(ours.sizes) == dict(theirs.sizes)
        assert set(ours.data_vars) == set(theirs.data_vars)
        assert set(ours.attrs) == set(theirs.attrs)
        for name in theirs.coords:
            np.testing.assert_array_equal(ours[name], theirs[name])
        for name, variable in theirs.data_vars.items():
            assert ours[name].dims == variable.dims
            assert ours[name].dtype == variable.dtype


def test_the_result_is_one_of_pymc(client):
    with pm.Model(coords={"place": ["a", "b"]}) as model:
        rate = pm.LogNormal("rate", 0.0, 1.0, dims="place")
        pm.Deterministic("total", rate.sum())
        pm.Poisson("y", rate, observed=[1, 2], dims="place")
    options = {"draws": 20, "tune": 30, "chains": 2, "discard_tuned_samples": False}
    found = shared(model, client, **options)
    with model:
        step = SurrogateHMCStep(store=EvaluationStore())
        expected = pm.sample(**options | QUIET, cores=1, step=step)
    groups = ("posterior", "sample_stats", "observed_data", "warmup_posterior")
    assert_alike(found, expected, (*groups, "warmup_sample_stats"))
    assert group_dataset(found, "posterior").attrs["tuning_steps"] == 30
    some = sampled(model, client, step=AdaptiveMetropolisStep, **options, var_names=["total"])
    assert set(group_dataset(some, "posterior").data_vars) == {"total"}


@pytest.mark.numerics
def test_the_posterior_is_right(client):
    model = with_likelihood(lambda x: np.asarray(-0.5 * np.sum((x - 1.0) ** 2)))
    x = values(shared(model, client, draws=600, tune=120, chains=2), "x")
    models.assert_mean(x, np.full(2, 0.5))
    models.assert_mean((x - 0.5) ** 2, np.full(2, 0.5))


# evaluations --------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_every_evaluation_is_stored_and_none_is_asked_twice(client, reference, tmp_path):
    path, store, _ = reference
    points = asked(path)
    assert len(points) == len(set(points)) == store.summary()["evaluations"]
    assert store.summary()["chains"] == SHORT["chains"]
    model = logged(tmp_path / "asked")
    assert points_in(store, model) == set(points)
    shared(model, client, store)
    again = asked(tmp_path / "asked")
    assert again and not set(again) & set(points)
    assert store.summary()["evaluations"] == len(points) + len(again)
    # The first run searched: a chain that knows nothing asks 40 times before its first draw.
    assert len(again) <= 3 * (SHORT["tune"] + SHORT["draws"]) + 3 * 3 * 8


@pytest.mark.numerics
def test_evaluations_are_stored_while_chains_run(client, tmp_path):
    """The likelihood waits until the client's store has what was evaluated before."""
    path = tmp_path / "run.sqlite"
    store = EvaluationStore(path)

    def wait_for_store(x, n):
        if n == 30:
            end = time.monotonic() + 60
            while EvaluationStore(path).summary()["evaluations"] < 25:
                assert time.monotonic() < end
                time.sleep(0.05)

    shared(logged(tmp_path / "asked", wait_for_store), client, store, chains=1, tune=5, draws=5)
    assert store.summary()["evaluations"] == len(asked(tmp_path / "asked"))


def test_a_round_store_knows_and_finds():
    store, told = RoundStore(), []
    number = store.model_number({"likelihood": "sum"})
    gradient, points = np.array([0.5, -0.5]), np.array([[1.0, 2.0], [3.0, 4.0]])
    known = [Found.of(points[0], -1.0, gradient=gradient), Found.of(points[1], np.nan)]
    for _ in range(2):
        store.begin(number, known, told.append)
        assert store.find(number, points[0]) == -1.0
        assert np.isnan(store.find(number, points[1]))
        np.testing.assert_array_equal(store.find_with_gradient(number, points[0])[1], gradient)
        assert store.find_with_gradient(number, points[1]) is None
        store.add(number, "a", np.zeros(2), -np.inf, 0.5)
        assert [e.value for e in store.read(number, not_by="")] == [-np.inf]
        assert store.found == [Found.of(np.zeros(2), -np.inf, 0.5)]
    assert told == 2 * store.found


def test_a_client_store_takes_each_evaluation_once():
    store = EvaluationStore()
    kept = ClientStore(store, store.model_number({}), "run")
    found = [tuple(Found.of([k], -k, gradient=[2.0 * k])) for k in range(5)]
    kept.keep(0, 0, 0, found[:2])
    kept.keep(0, 0, 0, found[:3])  # from another worker, where the first one died
    kept.keep(0, 0, 3, found[3:4])
    kept.keep(0, 0, 0, found)
    kept.keep(0, 1, 0, found[:1])
    kept.keep(0, 0, 0, found)  # late
    kept.keep(1, 1, 0, found[:1])
    stored = store.read(kept.model)
    assert [e.value for e in stored] == [0.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0]
    assert all(e.gradient == 2 * e.point for e in stored)
    assert [one.point for one in ClientStore(store, kept.model, "next").known] == [
        e.point.tobytes() for e in stored
    ]


@pytest.mark.numerics
def test_gradients_go_along(client):
    """A chain begins a round with what all found: it knows more points than it evaluates."""
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("x", 0, 1, shape=2), 1, observed=np.array([0.5, -0.5]))

    def make_step(store):
        return MALAStep(surrogate=GPSurrogate(store=store))

    store = EvaluationStore()
    found = sampled(model, client, step=make_step, store=store)
    stored = store.read(1)
    assert len(stored) > 30
    for evaluation in stored:
        expected = np.array([0.5, -0.5]) - evaluation.point
        np.testing.assert_allclose(evaluation.gradient, expected, atol=1e-12)
    statistics = group_dataset(found, "sample_stats").isel(draw=0)
    assert np.all(statistics["n_points"] > 1.5 * statistics["calls_made"])


def test_a_walk_keeps_its_evaluations_and_learns_nothing_from_them(client):
    """Its chains tune as without a store, in one round, and again without a call."""
    model, store = quadratic(), EvaluationStore()
    first = sampled(model, client, step=KameleonStep, store=store)
    again = sampled(model, client, step=KameleonStep, store=store)
    np.testing.assert_array_equal(values(first, "x"), values(again, "x"))
    assert len(store.read(1)) > 0
    assert np.sum(values(again, "n_evals", "sample_stats")) == 0


def test_threads_of_a_worker_have_workbenches_of_their_own():
    data = packed(Parcel(quadratic(), AdaptiveMetropolisStep, False, None, None, {}, [None]))
    with workbench(data) as first, workbench(data) as second:
        assert first is not second
    with workbench(data) as again:
        assert again in (first, second)
    with pytest.raises(ArithmeticError), workbench(data) as failed:
        raise ArithmeticError
    with workbench(data) as one, workbench(data) as another:
        assert failed not in (one, another)


def test_rounds_make_up_the_tuning():
    for tune, rounds in [(0, 4), (1, 4), (3, 4), (100, 4), (101, 1), (7, 7)]:
        lengths = tuning_rounds(tune, rounds)
        assert sum(lengths) == tune
        assert len(lengths) == min(rounds, max(tune, 1))
        assert min(lengths) >= min(tune, 1)
        assert lengths[-1] == max(lengths)
    # More chains tune less.
    shared_by = [shared_tuning(600, chains) for chains in (1, 2, 4, 8, 16, 1000)]
    assert shared_by[0] == 600
    assert shared_by == sorted(shared_by, reverse=True)
    assert shared_by[-1] > 50


# ends ---------------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_an_interrupted_run_gives_what_is_finished(client, tmp_path, interruptible):
    step = functools.partial(AdaptiveMetropolisStep, steps_per_draw=1)
    options = {"step": step, "chains": 1, "tune": 20, "draws": 60}
    expected = values(sampled(logged(tmp_path / "all"), client, **options), "x")
    path = tmp_path / "asked"

    def interrupt():
        while not path.exists() or len(asked(path)) < 52:
            time.sleep(0.05)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    model = logged(path, lambda x, n: time.sleep(0.5) if n > 50 else None)
    found = values(sampled(model, client, **options), "x")
    thread.join()
    n = found.shape[1]
    assert 25 < n < 60
    np.testing.assert_array_equal(found, expected[:, :n])


def likelihood_of_a_class_made_here(kind):
    """x ~ N(0, 1) and y = 1 about x, by a distribution whose class only this process has."""

    def log_density(value, x):
        return -0.5 * pt.sqr(value - x)

    def random(x, rng=None, size=None):
        return rng.normal(x, 1.0, size=size)

    def normal(x, size):
        return pm.Normal.dist(x, 1.0, size=size)

    class OwnRV(pm.Normal.rv_type):
        name = "own"

    class Own(pm.Normal):
        rv_op = OwnRV()

    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=2)
        if kind == "logp":
            pm.CustomDist("y", x, logp=log_density, random=random, observed=np.ones(2))
        elif kind == "inferred":
            pm.CustomDist("y", x, dist=normal, observed=np.ones(2))
        else:
            logprob.register(OwnRV, lambda op, v, rng, size, *p, **_: log_density(v[0], p[0]))
            Own("y", x, 1.0, observed=np.ones(2))
    return model


@pytest.fixture(scope="module")
def of_normals(client):
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("x", 0, 1, shape=2), 1.0, observed=np.ones(2))
    return values(sampled(model, client, step=AdaptiveMetropolisStep), "x")


@pytest.mark.parametrize("kind", ["logp", "inferred", "class"])
def test_distributions_made_by_a_program_are_sent(client, of_normals, kind):
    found = sampled(likelihood_of_a_class_made_here(kind), client, step=AdaptiveMetropolisStep)
    np.testing.assert_allclose(values(found, "x"), of_normals, rtol=1e-8)


@pytest.mark.numerics
def test_an_error_of_the_likelihood_reaches_the_user(client):
    def fails_far_out(x):
        if np.sum(x**2) > 1.5:
            raise ArithmeticError("no solution")
        return np.asarray(-0.5 * np.sum(x**2))

    # One proposal in about twenty lies there: of 600 none with probability 1e-13. It is seldom a
    # chain's first: an error after other draws reaches the user too.
    store = EvaluationStore()
    with pytest.raises(ParallelSamplingError, match=r"Chain \d failed with.*no solution") as raised:
        shared(with_likelihood(fails_far_out), client, store, draws=200)
    cause = raised.value.__cause__
    assert isinstance(cause, ArithmeticError)
    assert "at a proposal of the chain, x = " in "\n".join(cause.__notes__)
    failed = store._execute("SELECT failure FROM evaluations WHERE failure IS NOT NULL")
    assert failed and all(row[0].startswith("ArithmeticError: no solution") for row in failed)


# errors -------------------------------------------------------------------------------------------


def quadratic():
    return with_likelihood(lambda x: np.asarray(-0.5 * np.sum(x**2)))


def locked_step():
    lock = threading.Lock()
    return lambda: AdaptiveMetropolisStep(rng=lock)


def locked_model():
    lock = threading.Lock()

    def locked(x):
        with lock:
            return np.asarray(-0.5 * np.sum(x**2))

    return with_likelihood(locked)


def of_another_model(directory):
    store = EvaluationStore(directory / "run.sqlite")
    store.model_number({"likelihood": "another"})
    return store


TAKES_NONE = "LatentGPStep takes none"
OPERATION = r"The operation BlackBox.* of simulator, because of member in it, cannot be sent"
LOCKED = r"FromFunctionOp\{locked\} of simulator, because of lock in it, cannot be sent"
READY = r"each worker needs its own: write step=SurrogateHMCStep, or step=functools\.partial"


def without_store(store):
    return AdaptiveMetropolisStep()


REFUSED = [  # options, or what makes them of a directory and a client; error and words
    ({"step": "kameleon"}, TypeError, "step='kameleon': pass the class of a step"),
    (
        {"step": functools.partial(SurrogateHMCStep, store=3)},
        TypeError,
        r"write distributed\.sample\(store=",
    ),
    (
        lambda *_: {"step": LatentGPStep, "store": EvaluationStore()},
        TypeError,
        TAKES_NONE,
    ),
    (
        lambda _, client: {"step": without_store, "store": EvaluationStore(), "client": client},
        TypeError,
        "store=: without_store makes 0 steps that use it",
    ),
    ({"store": "run.sqlite"}, TypeError, r"store='run\.sqlite': pass EvaluationStore"),
    (
        lambda directory, client: {
            "step": SurrogateHMCStep,
            "store": of_another_model(directory),
            "client": client,
        },
        ValueError,
        r"run\.sqlite has evaluations of another model",
    ),
    ({"cores": 2}, TypeError, "cores= is for pymc.sample: here the workers"),
    ({"callback": print}, TypeError, "callback= is for pymc.sample"),
    ({"init": "adapt_diag"}, TypeError, r"init= is for the NUTS of pymc\.sample"),
    ({"client": "localhost:8786"}, TypeError, "pass a dask.distributed.Client"),
    ({"draws": 0.5}, TypeError, "draws=0.5: take a whole number"),
    ({"initvals": [None, None]}, ValueError, "initvals has 2 starts for chains=3"),
    ({"var_names": ["y"]}, ValueError, "var_names: the model has no y; it has x"),
    ({"random_seed": -1}, ValueError, "random_seed=-1"),
    (lambda *_: {"model": models.unpicklable_black_box()[0]}, TypeError, OPERATION),
    (lambda *_: {"model": locked_model()}, TypeError, LOCKED),
    (lambda *_: {"step": locked_step()}, TypeError, "step=.*because of lock in it, cannot be sent"),
    (lambda *_: made_already(), TypeError, READY),
    (lambda *_: (made := made_already()) | {"step": [made["step"]]}, TypeError, READY),
]


def made_already():
    model = quadratic()
    return {"model": model, "step": SurrogateHMCStep(model=model)}


def refused(error, words, **options):
    with pytest.raises(error, match=words):
        distributed.sample(**{"model": quadratic()} | SHORT | options)


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_cannot_be_is_told(options, error, words, tmp_path, request):
    if callable(options):
        needs_client = "client" in options.__code__.co_varnames
        client = request.getfixturevalue("client") if needs_client else None
        options = options(tmp_path, client)
    refused(error, words, **options)


def test_a_closed_client_is_told(cluster):
    client = dask.Client(cluster, set_as_default=False)
    client.close()
    refused(ValueError, "client is closed: pass one that is connected", client=client)


def test_dask_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    refused(ImportError, r'pip install "pymc_kameleon\[distributed\]"')
