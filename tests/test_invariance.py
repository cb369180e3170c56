"""With adaptation frozen, every step leaves its target exactly invariant.

Thousands of chains start at exact draws, make 150 transitions and are compared with the target
again. Each p-value has null probability 1e-6 of falling below the bound; a wrong reverse density
falls far below.
"""

import numba
import numpy as np
import pytest

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep
from pymc_kameleon.kernels import CustomKernel, Gaussian, Linear, Matern, Polynomial
from pymc_kameleon.proposals import centred_scatter
from pymc_kameleon.targets import Banana, Flower
from pymc_kameleon.testing import frozen, invariance_p_values
from pymc_kameleon.transitions import kameleon

BOUND = 1e-6
TRANSITIONS = 150
TARGET = Banana(bananicity=0.1, variance=100.0, dim=2)


@numba.njit
def _gradient(x, y, c):
    return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2


def _value(x, y, c):
    return 1 / (1 + ((x - y) ** 2).sum() / c**2)


def _plain_gradient(x, y, c):
    return _gradient.py_func(x, y, c)


def p_values(make, target=TARGET, n=4000, **options):
    rng = np.random.default_rng(20)
    warm = target.draw(80, rng)
    step = make(model=target.model(), warm_start=warm, steps_per_draw=TRANSITIONS, **options)
    return invariance_p_values(
        frozen(step, 21),
        target.draw(n, rng),
        target.draw(100_000, rng),
        {"quantile statistic": target.quantile_statistic, "product": lambda x: x[:, 0] * x[:, 1]},
    )


COMPILED_KERNELS = {
    "gaussian": Gaussian(),
    "matern-1.5": Matern(1.5),
    "matern-2.5": Matern(2.5),
    "linear": Linear(),
    "polynomial": Polynomial(2, 1.0),
    "custom": CustomKernel(_value, _gradient),
}
RAW = {"standardize": False, "gamma": 1.0, "scaling": 6.0, "bandwidth": 8.0}
RAW_WITHOUT_BANDWIDTH = {"standardize": False, "gamma": 1.0, "scaling": 0.05}


@pytest.mark.parametrize("global_share", [0.0, 0.7])
@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("kernel", COMPILED_KERNELS)
def test_kameleon_is_invariant(kernel, standardize, global_share):
    options = {"kernel": COMPILED_KERNELS[kernel], "global_share": global_share}
    if not standardize:
        options |= RAW if options["kernel"].has_bandwidth else RAW_WITHOUT_BANDWIDTH
    if kernel == "polynomial" and not standardize:
        options["scaling"] = 1e-4
    found = p_values(KameleonStep, **options)
    assert min(found.values()) > BOUND, found


@pytest.mark.parametrize(
    "kernel", [Matern(3.0), CustomKernel(_value, _plain_gradient)], ids=["matern-3", "plain"]
)
def test_kameleon_is_invariant_with_a_kernel_in_python(kernel):
    found = p_values(KameleonStep, n=250, kernel=kernel, global_share=0.3)
    assert min(found.values()) > BOUND, found


def test_paper_settings_are_invariant():
    found = p_values(KameleonStep.paper, bandwidth=10.0)
    assert min(found.values()) > BOUND, found


def test_kameleon_is_invariant_in_eight_dimensions():
    found = p_values(KameleonStep, target=Banana(0.03, dim=8))
    assert min(found.values()) > BOUND, found


def test_kameleon_is_invariant_on_a_flower():
    found = p_values(KameleonStep, target=Flower(dim=3), global_share=0.5)
    assert min(found.values()) > BOUND, found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"covariance": "identity", "scaling": 4.0},
        {"covariance": np.diag([100.0, 20.0])},
        {"initial_covariance": np.diag([50.0, 5.0])},
    ],
    ids=["learned", "identity", "array", "initial"],
)
def test_adaptive_metropolis_is_invariant(options):
    found = p_values(AdaptiveMetropolisStep, **options)
    assert min(found.values()) > BOUND, found


@pytest.mark.parametrize("make", [KameleonStep, AdaptiveMetropolisStep])
def test_a_step_that_never_tuned_is_invariant(make):
    rng = np.random.default_rng(3)
    step = frozen(make(model=TARGET.model(), steps_per_draw=TRANSITIONS), 4)
    found = invariance_p_values(step, TARGET.draw(4000, rng), TARGET.draw(100_000, rng))
    assert min(found.values()) > BOUND, found


def _reverse_density_of_the_forward_covariance(forward, reverse, normals, displacement):
    return kameleon_reverse(forward, forward, normals, displacement)


kameleon_reverse = kameleon.reverse_log_density


def test_a_wrong_reverse_density_is_caught(monkeypatch):
    monkeypatch.setattr(kameleon, "reverse_log_density", _reverse_density_of_the_forward_covariance)
    monkeypatch.setattr(kameleon, "run_compiled", None)
    options = RAW | {"global_share": 0.0, "compile_kwargs": {"mode": "cvm"}}
    found = p_values(KameleonStep, n=1000, **options)
    assert min(found.values()) < BOUND, found


def test_the_covariance_here_is_that_of_the_present_state_after_every_update():
    step = KameleonStep(
        model=TARGET.model(), global_share=0.0, adaptation=_every_third, n_subsample=50
    )
    point, updates, checked = {"x": np.array([1.0, -9.0])}, 0, 0
    learnt = None
    for _ in range(300):
        point, _ = step.step(point)
        updates += step.learnt is not learnt
        learnt = step.learnt
        if step.here.is_current[0]:
            position = np.linalg.solve(learnt.factor, step.chain.position - learnt.location)
            gradients, scatter = np.empty(learnt.points.shape), np.empty((2, 2))
            step.kernel.gradients(position, learnt.points, learnt.parameters, gradients)
            centred_scatter(gradients, scatter)
            np.testing.assert_allclose(step.here.scatter, scatter, rtol=1e-6, atol=1e-9)
            checked += 1
    assert updates > 50
    assert checked > 100


def _every_third(transition):
    return 1 / 3
