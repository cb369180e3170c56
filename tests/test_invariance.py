"""With adaptation frozen, every step leaves its target exactly invariant.

Thousands of chains start at exact draws, make 100 transitions and are compared with the target
again. Each p-value has null probability 1e-6 of falling below the bound; a wrong reverse density
falls far below.
"""

import functools

import numba
import numpy as np
import pymc as pm
import pytest
from scipy import stats

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
    SurrogateHMCStep,
)
from pymc_kameleon.kernels import CustomKernel, Linear
from pymc_kameleon.mcmc import run
from pymc_kameleon.mcmc.proposals import eigenfunction_moves, local_gaussian
from pymc_kameleon.mcmc.proposals.local_gaussian import centred_scatter
from pymc_kameleon.targets import Banana, Flower
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

BOUND = 1e-6
TRANSITIONS = 100
TARGET = Banana(bananicity=0.1, variance=100.0, dim=2)


@numba.njit
def _gradient(x, y, c):
    return 2 * (y - x) / c**2 / (1 + ((x - y) ** 2).sum() / c**2) ** 2


def _value(x, y, c):
    return 1 / (1 + ((x - y) ** 2).sum() / c**2)


def p_values(make, target=TARGET, n=3000, **options):
    rng = np.random.default_rng(20)
    warm = target.draw(80, rng)
    step = make(model=target.model(), warm_start=warm, steps_per_draw=TRANSITIONS, **options)
    return invariance_p_values(
        frozen(step, 21),
        target.draw(n, rng),
        target.draw(100_000, rng),
        {"quantile statistic": target.quantile_statistic, "product": lambda x: x[:, 0] * x[:, 1]},
    )


RAW = {"standardize": False, "gamma": 1.0, "scaling": 6.0, "bandwidth": 8.0}
RAW_LINEAR = {"standardize": False, "gamma": 1.0, "scaling": 0.05, "kernel": Linear()}
CUSTOM = CustomKernel(_value, _gradient)

# Any function in the gradient's place leaves the ratio exact: `test_kernels` tests gradients. What
# may fail here is how a kernel with a bandwidth, one without and a user's own enter the transition.


@pytest.mark.parametrize(
    "options",
    [
        {"global_share": 0.7},
        RAW | {"global_share": 0.0},
        {"kernel": CUSTOM, "global_share": 0.0},
    ],
    ids=["mixed", "raw", "custom"],
)
def test_kameleon_is_invariant(options):
    found = p_values(KameleonStep, n=4000, **options)
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
    [{}, {"covariance": np.diag([100.0, 20.0])}],
    ids=["learned", "array"],
)
def test_adaptive_metropolis_is_invariant(options):
    found = p_values(AdaptiveMetropolisStep, **options)
    assert min(found.values()) > BOUND, found


FAST_RAW = RAW | {"scaling": 100.0}


# The move is that of `KameleonStep`, with another scatter.


@pytest.mark.parametrize("embedding", ["pairs", "shifted"])
def test_fast_kameleon_is_invariant(embedding):
    options = FAST_RAW | {"embedding": embedding, "global_share": 0.0}
    found = p_values(FastKameleonStep, n=4000, n_features=60, **options)
    assert min(found.values()) > BOUND, found


@pytest.mark.parametrize(
    "options", [{"global_share": 0.7}, RAW, RAW_LINEAR], ids=["mixed", "raw", "raw, linear"]
)
def test_pca_kameleon_is_invariant(options):
    found = p_values(PCAKameleonStep, n=4000, **options)
    assert min(found.values()) > BOUND, found


def test_pca_kameleon_is_invariant_in_eight_dimensions_with_few_components():
    found = p_values(PCAKameleonStep, target=Banana(0.03, dim=8), n_components=3)
    assert min(found.values()) > BOUND, found


def angles_p_values(make, **options):
    """P-values of a frozen step on an angle, and how wide its draws are."""
    rng, name = np.random.default_rng(30), "angle_circular__"
    draws = rng.vonmises(-1.5, 0.6, (104_080, 1))
    warm, start, reference = draws[:80], draws[80:4080], draws[4080:, 0]
    with pm.Model() as model:
        pm.VonMises("angle", -1.5, 0.6, shape=1)
    step = frozen(make(model=model, warm_start=warm, steps_per_draw=20, **options), 31)
    moved = np.array([step.step({name: x})[0][name][0] for x in start])
    p_values = [stats.ks_2samp(f(moved), f(reference)).pvalue for f in (np.cos, np.sin)]
    return p_values, np.ptp(moved)


KAMELEON_ON_ANGLES = {
    "standardize": False,
    "gamma": 0.3,
    "scaling": 1.0,
    "global_share": 0.0,
}


@pytest.mark.parametrize(
    ("make", "options"),
    [(KameleonStep, KAMELEON_ON_ANGLES), (SurrogateHMCStep, {})],
    ids=["kameleon", "surrogate_hmc"],
)
def test_a_step_is_invariant_on_an_angle(make, options):
    found, width = angles_p_values(make, **options)
    assert min(found) > BOUND, found
    assert 6.0 < width <= 2 * np.pi


def test_proposals_that_do_not_know_the_period_are_found(monkeypatch):
    """A kernel of past points is not the same one period further."""
    monkeypatch.setattr(KameleonStep, "_keep_to_one_period", lambda self: None)
    found, _ = angles_p_values(KameleonStep, **KAMELEON_ON_ANGLES)
    assert min(found) < BOUND, found


KERNEL_STEPS = [KameleonStep, FastKameleonStep, PCAKameleonStep]


@pytest.mark.parametrize("make", [*KERNEL_STEPS, AdaptiveMetropolisStep])
def test_a_step_that_never_tuned_is_invariant(make):
    rng = np.random.default_rng(3)
    step = frozen(make(model=TARGET.model(), steps_per_draw=TRANSITIONS), 4)
    found = invariance_p_values(step, TARGET.draw(3000, rng), TARGET.draw(100_000, rng))
    assert min(found.values()) > BOUND, found


right_reverse = local_gaussian.reverse_log_density
right_rank_one = eigenfunction_moves.rank_one_log_ratio


def _reverse_density_of_forward_factor(forward, reverse, normals, displacement):
    return right_reverse(forward, forward, normals, displacement)


def _rank_one_ratio_of_the_forward_direction(forward, reverse, displacement, gamma, nu):
    return right_rank_one(forward, forward, displacement, gamma, nu)


WRONG = [
    (KameleonStep, RAW),
    (FastKameleonStep, FAST_RAW | {"n_features": 60}),
    (PCAKameleonStep, RAW | {"n_components": 5}),
]


@pytest.mark.parametrize(("make", "options"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_a_wrong_reverse_density_is_caught(make, options, monkeypatch):
    monkeypatch.setattr(local_gaussian, "reverse_log_density", _reverse_density_of_forward_factor)
    monkeypatch.setattr(
        eigenfunction_moves, "rank_one_log_ratio", _rank_one_ratio_of_the_forward_direction
    )
    monkeypatch.setattr(run, "run_compiled", None)
    plain = {"global_share": 0.0, "compile_kwargs": {"mode": "cvm"}}
    found = p_values(make, n=1000, **(options | plain))
    assert min(found.values()) < BOUND, found


def test_the_covariance_here_is_that_of_the_present_state_after_every_update():
    step = KameleonStep(
        model=TARGET.model(), global_share=0.0, adaptation=_every_third, n_subsample=50
    )
    point, updates, checked = {"x": np.array([1.0, -9.0])}, 0, 0
    learnt = None
    for _ in range(300):
        point, _ = step.step(point)
        updates += step.learner.learnt is not learnt
        learnt = step.learner.learnt
        if step.learner.here.is_current[0]:
            position = learnt.coordinates.whiten(step.chain.position[None])[:, 0]
            gradients, scatter = np.empty(learnt.points.shape), np.empty((2, 2))
            step.learner.kernel.gradients(position, learnt.points, learnt.parameters, gradients)
            centred_scatter(gradients, scatter)
            np.testing.assert_allclose(step.learner.here.scatter, scatter, rtol=1e-6, atol=1e-9)
            checked += 1
    assert updates > 50
    assert checked > 100


def _every_third(transition):
    return 1 / 3


@pytest.mark.parametrize(
    "make", [FastKameleonStep, functools.partial(FastKameleonStep.thesis, bandwidth=8.0)]
)
def test_continuous_adaptation_keeps_the_quantiles(make):
    """The share of a long chain in each quantile region, within the error by 50 batches.

    The nine t-statistics have 49 degrees of freedom; each exceeds 6.3 with probability 8e-8.
    """
    step = make(
        model=TARGET.model(), adapt_after_tune=True, n_features=60, steps_per_draw=20, rng=5
    )
    point = {"x": np.array([0.0, -9.0])}
    draws = np.empty((40_000, 2))
    for _ in range(500):
        point, _ = step.step(point)
    step.stop_tuning()
    refreshed = step.learner.features.factor
    for i in range(len(draws)):
        point, _ = step.step(point)
        draws[i] = point["x"]
    assert step.learner.features.factor is not refreshed
    statistic = TARGET.quantile_statistic(draws)
    for q in np.linspace(0.1, 0.9, 9):
        inside = statistic < stats.chi2.ppf(q, TARGET.degrees_of_freedom)
        batches = inside.reshape(50, -1).mean(axis=1)
        t = (batches.mean() - q) / (batches.std(ddof=1) / np.sqrt(50))
        assert abs(t) < 6.3, (q, t)
