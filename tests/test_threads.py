"""The package's own linear algebra takes one thread, a user's functions as many as there are."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import begin, drive, run
from pytensor.compile.ops import wrap_py
from scipy import linalg
from threadpoolctl import threadpool_info, threadpool_limits

from pymc_kameleon import (
    EllipticalSliceStep,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    PCAKameleonStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
    _threads,
)
from pymc_kameleon._threads import all_threads, one_thread
from pymc_kameleon.latent_gp import interface
from pymc_kameleon.pseudo_marginal import (
    GPClassificationEstimator,
    gp_classification_loglikelihood,
)

pytestmark = pytest.mark.numerics


def blas_threads():
    return {
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    }


@pytest.fixture(autouse=True)
def two_threads():
    with threadpool_limits(2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("The linear algebra of this machine has one thread.")
        yield


def test_one_thread_inside_and_all_of_them_for_users():
    with one_thread():
        assert blas_threads() == {1}
        with all_threads():
            assert blas_threads() == {2}
            with one_thread():
                assert blas_threads() == {1}
            assert blas_threads() == {2}
        with one_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {1}
    assert blas_threads() == {2}
    with all_threads():
        assert blas_threads() == {2}
    with pytest.raises(ZeroDivisionError), one_thread(), all_threads():
        raise ZeroDivisionError
    assert blas_threads() == {2}


def noting_threads(function, found):
    def noted(*arguments, **options):
        found.append(blas_threads())
        return function(*arguments, **options)

    return noted


@pytest.fixture
def seen(monkeypatch):
    """Threads that there were whenever a matrix was factorised."""
    found = []
    for owner, name in ((linalg, "cholesky"), (linalg, "eigh"), (np.linalg, "cholesky")):
        monkeypatch.setattr(owner, name, noting_threads(getattr(owner, name), found))
    return found


@pytest.mark.parametrize(
    "make",
    [
        KameleonStep,
        FastKameleonStep,
        PCAKameleonStep,
        SurrogateHMCStep,
        lambda: MALAStep(surrogate=GPSurrogate()),
    ],
)
def test_steps_learn_on_one_thread(make, seen):
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("x", shape=2), observed=np.ones(2))
        step = make()
    run(step, model, 101, tune=100, seed=1)
    assert seen and all(threads == {1} for threads in seen)
    assert blas_threads() == {2}


@pytest.mark.parametrize("cls", [LatentGPStep, EllipticalSliceStep, RiemannianHMCStep])
def test_large_functions_have_all_threads(cls, monkeypatch):
    x = np.linspace(0, 5, 20)[:, None]
    found = []
    with pm.Model() as model:
        scale = pm.HalfNormal("scale") if cls is LatentGPStep else 1.0
        f = pm.gp.Latent(cov_func=scale**2 * pm.gp.cov.ExpQuad(1, 1.0)).prior("f", X=x)
        pm.Poisson("y", pm.math.exp(f), observed=np.arange(20))
        step = cls([f])
    transitions = step._transitions
    monkeypatch.setattr(step, "_transitions", lambda: found.append(blas_threads()) or transitions())
    for largest in (1000, 10):
        monkeypatch.setattr(_threads, "SMALL", largest)
        run(step, model, 2, tune=1, seed=1)
    assert found == [{1}] * 2 + [{2}] * 2


def test_black_boxes_have_all_threads():
    found = []

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def log_likelihood(x):
        found.append(blas_threads())
        return -0.5 * x @ x

    with pm.Model() as model:
        pm.Potential("p", log_likelihood(pm.Normal("x", shape=2)))
        step = SurrogateHMCStep()
    run(step, model, 61, tune=60, seed=1)
    assert len(found) > 60 and all(threads == {2} for threads in found)


def test_a_black_box_of_the_package_takes_one_thread(monkeypatch):
    """A user's function in its place has all; this one, inside of it, is small."""
    inputs, found = np.linspace(0, 1, 20)[:, None], []
    for name in ("approximate", "estimate"):
        noting = noting_threads(getattr(GPClassificationEstimator, name), found)
        monkeypatch.setattr(GPClassificationEstimator, name, noting)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        labels = inputs[:, 0] > 0.5
        pm.Potential("y", gp_classification_loglikelihood(inputs, labels, scale))
        step = KameleonStep(pseudo_marginal=True)
    drive(begin(step, 1, tune=2), model.initial_point(), 1, tune=2)
    assert found and all(threads == {1} for threads in found)
    assert blas_threads() == {2}


@pytest.mark.parametrize("name", ["expectation_propagation", "laplace"])
def test_approximations_take_one_thread(name, monkeypatch):
    found, inner = [], f"{name}_approximation"
    monkeypatch.setattr(interface, inner, noting_threads(getattr(interface, inner), found))
    with pm.Model():
        f = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, 1.0)).prior("f", X=np.arange(9.0)[:, None])
        pm.Poisson("y", pm.math.exp(f), observed=np.arange(9))
        getattr(interface, name)()
    assert found == [{1}]
    assert blas_threads() == {2}


class Library:
    """Stands for one whose number of threads all threads set, or the first alone that did."""

    def __init__(self, has_owner):
        self.number, self.owner = 2, threading.get_ident() if has_owner else None

    def get_num_threads(self):
        return self.number

    def set_num_threads(self, number):
        if self.owner in (None, threading.get_ident()):
            self.number = number


@pytest.mark.parametrize("has_owner", [False, True])
@pytest.mark.parametrize("inner", [one_thread, all_threads])
def test_threads_of_python_leave_what_there_was(inner, has_owner, monkeypatch):
    """One is within another one's linear algebra, or function, when that ends."""
    library = Library(has_owner)
    monkeypatch.setattr(_threads, "_libraries", lambda: [library])
    has_begun, is_over = threading.Event(), threading.Event()

    def other():
        with one_thread(), inner():
            has_begun.set()
            assert is_over.wait(30.0)

    with ThreadPoolExecutor(1) as threads:
        with one_thread():
            assert library.number == 1
            waited = threads.submit(other)
            assert has_begun.wait(30.0)
            with all_threads():
                assert library.number == 2
        is_over.set()
        waited.result()
    assert library.number == 2
    with one_thread():
        assert library.number == 1
    assert library.number == 2
