"""A likelihood in other processes: UM-Bridge servers on the loopback address, one a chain."""

import contextlib
import functools
import multiprocessing
import socket
import time

import models
import numpy as np
import pymc as pm
import pytest
from models import FORK, sample
from scipy import integrate, stats

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EvaluationStore,
    GPSurrogate,
    SurrogateHMCStep,
)

umbridge = pytest.importorskip("umbridge", reason="pip install umbridge, which is not here")

TIMES = np.linspace(0.5, 4.0, 8)
OBSERVED = 3.0 * np.exp(-0.7 * TIMES) + 0.1 * np.random.default_rng(3).normal(size=8)
PATIENCE = 30.0
"""Seconds until a server has to answer."""


class OneNumber(umbridge.Model):
    """A model of `size` numbers that returns one."""

    size = 1

    def get_input_sizes(self, config):
        return [self.size]

    def get_output_sizes(self, config):
        return [1]

    def supports_evaluate(self):
        return True


class Decay(OneNumber):
    """Log-likelihood of log start and log rate of a decay, whose equation is solved numerically."""

    size = 2

    def __init__(self):
        super().__init__("decay")
        self.calls = 0

    def __call__(self, parameters, config):
        self.calls += 1
        start, rate = np.exp(parameters[0])
        solved = integrate.solve_ivp(
            lambda t, y: -rate * y, (0.0, 4.0), [start], t_eval=TIMES, rtol=1e-8, atol=1e-10
        )
        return [[float(stats.norm.logpdf(OBSERVED, solved.y[0], 0.1).sum())]]


class Calls(OneNumber):
    """How often another model was called."""

    def __init__(self, counted):
        super().__init__("calls")
        self.counted = counted

    def __call__(self, parameters, config):
        return [[self.counted.calls]]


def serve(port):
    from aiohttp import web

    # `serve_models` would listen to the whole network.
    web.run_app = functools.partial(web.run_app, host="127.0.0.1", print=None)
    decay = Decay()
    umbridge.serve_models([decay, Calls(decay)], port)


@contextlib.contextmanager
def servers(n):
    """URLs of `n` servers, each a process, which end with the context."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    processes = [FORK.Process(target=serve, args=(port,), daemon=True) for port in ports]
    for process in processes:
        process.start()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            wait_for(url)
        yield urls
    finally:
        for process in processes:
            process.terminate()
            process.join()


def wait_for(url):
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return umbridge.supported_models(url)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def calls_of(url):
    return umbridge.HTTPModel(url, "calls")([[0.0]])[0][0]


def on_servers(urls):
    """UM-Bridge's own operation; a process asks one of several servers, the next one the next."""
    from umbridge.pymc import UmbridgeOp

    class Decays(UmbridgeOp):
        def __init__(self):
            super().__init__(urls[0], "decay")
            self.models = [umbridge.HTTPModel(url, "decay") for url in urls]

        def perform(self, node, inputs, outputs):
            number = (*multiprocessing.current_process()._identity, 0)[0]
            self.umbridge_model = self.models[number % len(self.models)]
            super().perform(node, inputs, outputs)

    operation = Decays()
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        pm.Potential("likelihood", operation(x)[0])
    return model


def expected_means():
    """Means and mean squares of the posterior, on a grid."""
    logs = np.linspace([0.8, -0.8], [1.4, 0.0], 300)
    grid = np.stack(np.meshgrid(*logs.T, indexing="ij"), axis=-1)
    curves = np.exp(grid[..., :1] - np.exp(grid[..., 1:]) * TIMES)
    log_density = stats.norm.logpdf(OBSERVED, curves, 0.1).sum(-1) - 0.5 * (grid**2).sum(-1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    return (weights[..., None] * grid).sum((0, 1)), (weights[..., None] * grid**2).sum((0, 1))


def test_chains_ask_a_server_each_and_a_later_run_asks_less():
    mean, square = expected_means()
    with servers(2) as urls:
        model, store = on_servers(urls), EvaluationStore()
        before = [calls_of(url) for url in urls]
        idata = sample(
            SurrogateHMCStep(model=model, store=store),
            model,
            tune=80,
            draws=120,
            chains=2,
            cores=2,
            discard_tuned_samples=False,
        )
        asked = [calls_of(url) - n for url, n in zip(urls, before, strict=True)]
        groups = "sample_stats", "warmup_sample_stats"
        counts = [models.values(idata, "n_evals", group) for group in groups]
        assert min(asked) > 50
        assert sum(asked) == store.summary()["evaluations"] == sum(map(np.sum, counts))
        draws = models.values(idata, "x")
        models.assert_mean(draws, mean)
        models.assert_mean(draws**2, square)

        before, known = [calls_of(url) for url in urls], store.summary()["evaluations"]
        later = AdaptiveMetropolisStep(
            model=model, surrogate=GPSurrogate(store=store), start="optimize", steps_per_draw=1
        )
        idata = sample(later, model, tune=60, draws=240)
        asked = sum(calls_of(url) - n for url, n in zip(urls, before, strict=True))
        assert asked == store.summary()["evaluations"] - known < 240
        models.assert_mean(models.values(idata, "x"), mean)
