"""With adaptation frozen, every step leaves its target exactly invariant.

Thousands of chains start at exact draws, make 100 transitions and are compared with the target
again. Each p-value has null probability 1e-6 of falling below the bound; a wrong reverse density
falls far below.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytest
import surrogates
from models import drive
from scipy import stats
from test_kernels import KERNELS

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
    SurrogateHMCStep,
)
from pymc_kameleon.kernels import Linear
from pymc_kameleon.mcmc import loop
from pymc_kameleon.mcmc.proposals import eigenfunction_moves, langevin, local_gaussian
from pymc_kameleon.mcmc.proposals.local_gaussian import centred_scatter
from pymc_kameleon.steps.chain.sampler import ChainSampler
from pymc_kameleon.surrogate import delayed_acceptance
from pymc_kameleon.targets import Banana, Target
from pymc_kameleon.testing import frozen, invariance_p_values

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

BOUND = 1e-6
TRANSITIONS = 100
TARGET = Banana(bananicity=0.1, variance=100.0, dim=2)


class Row(NamedTuple):
    """A step, warmed up by 80 exact draws and frozen, and the draws that it moves."""

    make: Callable
    options: dict = {}
    target: Target = TARGET
    n: int = 3000
    n_known: int = 0
    """Points from which a surrogate is fitted, if any; of three it is nearly useless."""


def p_values(row, **more):
    rng, target = np.random.default_rng(20), row.target
    options = {"steps_per_draw": TRANSITIONS, "warm_start": target.draw(80, rng)}
    options |= row.options | more
    if row.n_known:
        settings = options.pop("settings", {})
        options["surrogate"] = surrogates.fitted(row.n_known, rng, **settings)
    model = surrogates.banana_with_likelihood() if row.n_known else target.model()
    return invariance_p_values(
        frozen(row.make(model=model, **options), 21),
        target.draw(row.n, rng),
        target.draw(100_000, rng),
        {"quantile statistic": target.quantile_statistic, "product": lambda x: x[:, 0] * x[:, 1]},
    )


OWN = KERNELS["custom-njit"]
RAW = {"standardize": False, "gamma": 1.0, "scaling": 6.0, "bandwidth": 8.0, "global_share": 0.0}
RAW_LINEAR = RAW | {"scaling": 0.05, "kernel": Linear()}
FAST = RAW | {"scaling": 100.0, "n_features": 60}
EIGHT = Banana(0.03, dim=8)
LONG = {"steps_per_draw": 150}

# Any function in the gradient's place leaves the ratio exact: `test_kernels` tests gradients. What
# may fail here is how a kernel with a bandwidth, one without and a user's own enter the transition.
ROWS = {
    "kameleon, mixed": Row(KameleonStep, {"global_share": 0.7}, n=4000),
    "kameleon, raw": Row(KameleonStep, RAW, n=4000),
    "kameleon, own kernel": Row(KameleonStep, {"kernel": OWN, "global_share": 0.0}, n=4000),
    "kameleon, paper": Row(KameleonStep.paper, {"bandwidth": 10.0}),
    "metropolis": Row(AdaptiveMetropolisStep),
    # The move is that of `KameleonStep`, with another scatter.
    "fast": Row(FastKameleonStep, FAST, n=4000),
    "pca, mixed": Row(PCAKameleonStep, {"global_share": 0.7}, n=4000),
    "pca, linear": Row(PCAKameleonStep, RAW_LINEAR, n=4000),
    "pca, d = 8": Row(PCAKameleonStep, {"n_components": 3}, EIGHT),
    "mala": Row(MALAStep, LONG, n=2000),
    "kameleon, poor surrogate": Row(KameleonStep, LONG, n=1500, n_known=3),
    "metropolis, mean that follows": Row(
        AdaptiveMetropolisStep, LONG | {"settings": {"mean": "current"}}, n=1500, n_known=40
    ),
    "kameleon, one or two stages": Row(
        KameleonStep,
        LONG | {"settings": {"mean": "constant", "one_stage_share": 0.5}},
        n=1500,
        n_known=12,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_frozen_step_is_invariant(name):
    found = p_values(ROWS[name])
    assert min(found.values()) > BOUND, found


right_reverse = local_gaussian.log_proposal_ratio
right_rank_one = eigenfunction_moves.rank_one_log_ratio


def _reverse_density_of_forward_factor(forward, reverse, normals, displacement):
    return right_reverse(forward, forward, normals, displacement)


def _rank_one_ratio_of_the_forward_direction(forward, reverse, displacement, gamma, nu):
    return right_rank_one(forward, forward, displacement, gamma, nu)


def _no_way_back(drift, proposed_drift, step_size, normals):
    return 0.0


def _second_stage_without_the_surrogate(proposed, current, there, here):
    return min(0.0, proposed - current)


REVERSE = (local_gaussian, "log_proposal_ratio", _reverse_density_of_forward_factor)
SPOILT = {
    "kameleon": (Row(KameleonStep, RAW, n=500), REVERSE),
    "fast": (Row(FastKameleonStep, FAST, n=500), REVERSE),
    "pca": (
        Row(PCAKameleonStep, RAW | {"n_components": 5}, n=500),
        (eigenfunction_moves, "rank_one_log_ratio", _rank_one_ratio_of_the_forward_direction),
    ),
    "mala": (
        Row(MALAStep, LONG | {"step_size": 0.1}, n=400),
        (langevin, "langevin_log_ratio", _no_way_back),
    ),
    "second stage": (
        Row(AdaptiveMetropolisStep, LONG, n=400, n_known=3),
        (delayed_acceptance, "second_stage", _second_stage_without_the_surrogate),
    ),
}


@pytest.mark.sabotage
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_ratio_is_caught(name, monkeypatch):
    row, mistake = SPOILT[name]
    monkeypatch.setattr(*mistake)
    monkeypatch.setattr(loop, "run_compiled", None)
    found = p_values(row, compile_kwargs={"mode": "cvm"})
    assert min(found.values()) < BOUND, found


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
    monkeypatch.setattr(ChainSampler, "keep_to_one_period", lambda self: None)
    found, _ = angles_p_values(KameleonStep, **KAMELEON_ON_ANGLES)
    assert min(found) < BOUND, found


@pytest.mark.parametrize(
    "make", [KameleonStep, FastKameleonStep, PCAKameleonStep, AdaptiveMetropolisStep]
)
def test_a_step_that_never_tuned_is_invariant(make):
    rng = np.random.default_rng(3)
    step = frozen(make(model=TARGET.model(), steps_per_draw=TRANSITIONS), 4)
    found = invariance_p_values(step, TARGET.draw(3000, rng), TARGET.draw(100_000, rng))
    assert min(found.values()) > BOUND, found


def test_the_covariance_here_is_that_of_the_present_state_after_every_update():
    step = KameleonStep.paper(
        model=TARGET.model(), standardize=True, adaptation=_every_third, n_subsample=50
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
    _, _, point = drive(step, {"x": np.array([0.0, -9.0])}, 500, tune=-1)
    step.stop_tuning()
    refreshed = step.learner.features.factor
    draws, _, _ = drive(step, point, 20_000, tune=-1)
    assert step.learner.features.factor is not refreshed
    statistic = TARGET.quantile_statistic(draws)
    for q in np.linspace(0.1, 0.9, 9):
        inside = statistic < stats.chi2.ppf(q, TARGET.degrees_of_freedom)
        batches = inside.reshape(50, -1).mean(axis=1)
        t = (batches.mean() - q) / (batches.std(ddof=1) / np.sqrt(50))
        assert abs(t) < 6.3, (q, t)
