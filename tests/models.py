"""Small models with known posteriors, operations without gradients, and a step driven by hand.

A step is driven here as `pm.sample` does it, transition by transition, so that a test sees every
statistic of every draw.
"""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.distributions.transforms import ordered
from pymc.step_methods.compound import BlockedStep
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from scipy import stats

FALSE_ALARM = 1e-6
"""Probability that a statistical assertion fails although the sampler is right, for each number."""

N_BATCHES = 30

FORK = multiprocessing.get_context("fork")

# operations without gradients ---------------------------------------------------------------------


class BlackBox(Op):
    """Scalar function of a vector that neither PyTensor nor Numba can look into; counts its calls.

    With `noise` it is an unbiased estimate: exp(noise) has mean one.
    """

    def __init__(self, function, noise=0.0, member=None):
        self.function, self.noise, self.member = function, noise, member
        self.calls = 0
        self.rng = np.random.default_rng(12345)

    def make_node(self, x):
        x = pt.as_tensor_variable(x)
        return Apply(self, [x], [pt.scalar(dtype=x.dtype)])

    def perform(self, node, inputs, outputs):
        self.calls += 1
        value = self.function(inputs[0])
        if self.noise:
            value += self.noise * self.rng.standard_normal() - 0.5 * self.noise**2
        outputs[0][0] = np.asarray(value, dtype=node.outputs[0].dtype)


class Killed(BlackBox):
    """Kills its process at a call."""

    last = None

    def perform(self, node, inputs, outputs):
        super().perform(node, inputs, outputs)
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def negative_half_square(x):
    return -0.5 * float(np.sum((np.asarray(x) - 1.0) ** 2))


def black_box(dim=2, noise=0.0, member=None, function=negative_half_square):
    """x ~ N(0, 1) with a black-box likelihood N(1 | x, 1): the posterior is N(0.5, 0.5)."""
    operation = BlackBox(function, noise, member)
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=dim)
        pm.Potential("simulator", operation(x))
    return model, operation


def unpicklable_black_box():
    return black_box(member=threading.Lock())


def run_python(code, *arguments, flags=(), **environment):
    """A program in a process of its own, which finds the package and the tests."""
    tests = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.dirname(tests), tests, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def has_ended(process):
    """Whether the process of this number ends within ten seconds."""
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
        if state.stdout.strip().startswith(b"Z"):  # whoever adopted it has not looked yet
            return True
        time.sleep(0.05)
    return False


# models -------------------------------------------------------------------------------------------


@functools.cache
def two_scales():
    """a ~ N(0, 1) and b ~ N(10, 0.1): swapped variables show in every draw."""
    with pm.Model() as model:
        pm.Normal("a", 0, 1)
        pm.Normal("b", 10, 0.1)
    return model


@functools.cache
def normal(dim):
    """Independent normals with means -1 ... 1 and standard deviations from 0.1 to 10."""
    mean, sd = np.linspace(-1, 1, dim), np.geomspace(0.1, 10, dim)
    with pm.Model() as model:
        pm.Normal("x", mean, sd, shape=dim)
    return model, mean, sd


CORRELATED_MEAN = np.array([1.0, -2.0, 30.0])
CORRELATED_COVARIANCE = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 100.0]])


@functools.cache
def correlated():
    with pm.Model() as model:
        pm.MvNormal("x", CORRELATED_MEAN, CORRELATED_COVARIANCE, shape=3)
    return model


def shapes_and_transforms():
    """Several shapes and transforms; every variable has its prior as posterior."""
    with pm.Model() as model:
        pm.HalfNormal("scale", 2)
        pm.Dirichlet("simplex", np.array([2.0, 3.0, 4.0]))
        pm.Normal("matrix", np.array([[0.0, 1.0], [2.0, 3.0]]), 0.5, shape=(2, 2))
        pm.Uniform("interval", -1, 3, shape=2)
    return model


def everything():
    """Transforms (log, interval, simplex, ordered), data, imputed data, a potential."""
    data = np.ma.masked_values([0.3, 1.1, -99.0, 0.4], -99.0)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2)
        share = pm.Uniform("share", 0, 1)
        simplex = pm.Dirichlet("simplex", np.array([2.0, 3.0, 4.0]))
        levels = pm.Normal(
            "levels", 0, 1, shape=3, transform=ordered, initval=np.array([-1.0, 0.0, 1.0])
        )
        slope = pm.Normal("slope", 0, 1, shape=(2, 1))
        pm.Normal("y", share + (simplex * levels).sum(), scale, observed=data)
        pm.Normal("z", slope.sum(), scale, observed=np.array([0.2, -0.3]))
        pm.Potential("penalty", -((slope.sum() - share) ** 2))
    return model


def with_data():
    """mu ~ N(0, 10), y ~ N(mu, 1): the posterior follows the data."""
    with pm.Model() as model:
        y = pm.Data("y", np.zeros(4))
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("likelihood", mu, 1, observed=y, shape=y.shape)
    return model


def correlated_pair():
    """Scalar a, vector b, positive c and data that tie them together."""
    with pm.Model() as model:
        a = pm.Normal("a", 0, 1)
        b = pm.Normal("b", a, 2, shape=2)
        c = pm.HalfNormal("c", 1)
        data = pm.Data("data", np.array([0.1, 0.2]))
        pm.Normal("y", b.sum() + a, c, observed=data, shape=data.shape)
    return model


def mixed_discrete():
    """count ~ Poisson(4), x ~ N(0, 1), y = 3 ~ N(x + count, 1): known by summation."""
    with pm.Model() as model:
        count = pm.Poisson("count", 4)
        x = pm.Normal("x", 0, 1)
        pm.Normal("y", x + count, 1, observed=3.0)
    return model


@functools.cache
def needle():
    """Nothing but the start has a positive density."""
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        pm.Potential("needle", pt.switch(pt.eq(x, 0), 0.0, -np.inf))
    return model


@functools.cache
def not_finite(value=np.nan):
    """Standard normal restricted to x <= 0 by a log density that is `value` elsewhere."""
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, initval=-1.0)
        pm.Potential("half", pt.switch(x > 0, value, 0.0))
    return model


INPUTS = np.linspace(-2, 2, 6)[:, None]
COUNTS = np.array([0, 1, 3, 2, 0, 1])


def latent(name="f", lengthscale=1.0, amplitude=1.5, inputs=INPUTS, **kwargs):
    """A Gaussian process in the model of the context: its values at `inputs`."""
    covariance = amplitude**2 * pm.gp.cov.ExpQuad(inputs.shape[1], lengthscale)
    if pytensor.config.floatX == "float32":
        kwargs, inputs = {"jitter": 1e-4} | kwargs, inputs.astype("float32")
    return pm.gp.Latent(cov_func=covariance).prior(name, X=inputs, **kwargs)


@functools.cache
def latent_needle():
    """Nothing but f = 0 has a positive likelihood."""
    with pm.Model() as model:
        f = latent()
        pm.Potential("needle", pt.switch(pt.eq(f, 0), 0.0, -np.inf) - 0.5 * f**2)
    return model


def estimated_with_other(noise=0.5, entangled=False):
    """An estimated term of `own`; prior and exact likelihood tie `own` to `other`."""
    operation = BlackBox(negative_half_square, noise)
    with pm.Model() as model:
        other = pm.Normal("other", 0, 1)
        own = pm.Normal("own", other, 1)
        term = pt.stack([own, other]) if entangled else pt.stack([own])
        pm.Potential("simulator", operation(term))
        pm.Normal("y", own - other, 1, observed=0.7)
    return model, operation


def always(transition):
    """An adaptation schedule that does not wait for a history."""
    return 1.0


def every_ten(transition):
    """An adaptation schedule."""
    return float(transition % 10 == 9)


class Shift(BlockedStep):
    """Moves one scalar variable by a fixed amount every draw; by nothing, it stands still."""

    name = "shift"
    stats_dtypes_shapes = {}

    def __init__(self, vars, *, shift=0.0, model=None, rng=None, blocked=True):
        model = pm.modelcontext(model)
        self.vars = [model.rvs_to_values[v] for v in vars]
        self.shift = shift

    def step(self, point):
        name = self.vars[0].name
        return {**point, name: np.asarray(point[name] + self.shift)}, [{}]


# driving a step -----------------------------------------------------------------------------------


def begin(step, seed=0, tune=100, draws=100):
    """What `pm.sample` does before a chain."""
    rng = np.random.default_rng(seed)
    if hasattr(step, "setup_chain"):
        step.setup_chain(rng, tune, draws)
    else:
        step.set_rng(rng)
    step.tune = bool(tune)
    step.reset_tuning()
    return step


def drive(step, point, draws, tune=0):
    """`draws` draws from `point`, of which `tune` tune; points (draws, d) and all statistics."""
    points, statistics = [], []
    for i in range(draws):
        if i == tune:
            step.stop_tuning()
        point, stats_of_draw = step.step(point)
        points.append(np.concatenate([np.ravel(v) for v in point.values()]))
        statistics.append(stats_of_draw[0] if len(stats_of_draw) == 1 else stats_of_draw)
    return np.array(points), statistics, point


def run(step, model, draws, tune=0, seed=0):
    """A chain from the model's initial point: points, statistics, last point."""
    begin(step, seed, tune, draws - tune)
    return drive(step, model.initial_point(), draws, tune)


def sample(step, model=None, **kwargs):
    """`pm.sample`, quietly, with one core and one chain unless told otherwise.

    The steps are compiled already. What PyMC adds, for starts and for what it keeps of a draw, runs
    in Python: to compile it takes seconds in every test.
    """
    quiet = {"progressbar": False, "compute_convergence_checks": False, "random_seed": 1}
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        return pm.sample(step=step, model=model, **({"cores": 1, "chains": 1} | quiet | kwargs))


def values(idata, name, group="posterior"):
    return idata[group][name].values


# statistical assertions ---------------------------------------------------------------------------


def assert_mean(draws, expected, what=""):
    """The mean of a chain within its Monte Carlo error, by batch means.

    `draws` has shape (chain, draw, ...) or (draw, ...); a Student t with 29 degrees of freedom
    exceeds the bound with probability `FALSE_ALARM`.
    """
    draws, expected = np.asarray(draws, dtype=float), np.asarray(expected, dtype=float)
    draws = draws.reshape(-1, *draws.shape[draws.ndim - expected.ndim :])
    length = len(draws) // N_BATCHES
    batches = draws[: length * N_BATCHES].reshape(N_BATCHES, length, *expected.shape).mean(axis=1)
    error = batches.std(axis=0, ddof=1) / np.sqrt(N_BATCHES)
    bound = stats.t.isf(FALSE_ALARM / 2, N_BATCHES - 1)
    z = (batches.mean(axis=0) - expected) / error
    assert np.all(np.abs(z) < bound), f"{what} mean is {z} standard errors from {expected}"


def assert_moments(draws, mean, sd, what=""):
    """Mean and mean squared deviation of a chain within their Monte Carlo errors."""
    mean, sd = np.broadcast_arrays(np.asarray(mean, dtype=float), np.asarray(sd, dtype=float))
    assert_mean(draws, mean, f"{what} first moment:")
    assert_mean((np.asarray(draws) - mean) ** 2, sd**2, f"{what} second moment:")


UNCOMPILED = {"mode": "FAST_COMPILE"}
PLAIN = {"mode": "cvm"} if pytensor.config.cxx else UNCOMPILED
"""A log density that compiled transitions cannot call."""

needs_c_compiler = {
    "condition": not pytensor.config.cxx,
    "reason": "PyTensor found no C compiler, so there is no C linker to compare with",
}
