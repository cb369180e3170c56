"""What a chain that mixed badly says at its end, and that one that mixed well says nothing."""

import models
import numpy as np
import pymc as pm
import pytest
from models import begin, drive, run, sample
from scipy.signal import lfilter
from test_contract import PYMC_6

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep, ParallelTemperingStep
from pymc_kameleon.steps.chain import mixing
from pymc_kameleon.steps.chain.mixing import KeptDraws, slow_mixing
from pymc_kameleon.steps.chain.report import element_names

NAMES = ["a", "b[0]", "b[1]"]


def autoregression(correlation, n=1000, seed=1):
    """Stationary draws with unit variance, of which each counts as (1 - c) / (1 + c)."""
    noise = np.random.default_rng(seed).standard_normal((n + 2000, 3))
    noise[1:] *= np.sqrt(1 - np.square(correlation))
    return np.column_stack(
        [lfilter([1.0], [1.0, -c], noise[:, k])[2000:] for k, c in enumerate(correlation)]
    )


def message(draws, n_draws=None, learnt=None):
    """What is said of draws; `learnt` is a mean and a standard deviation."""
    if learnt is not None:
        learnt = learnt[0], np.diag(learnt[1])
    return slow_mixing(draws, n_draws or len(draws), 500, 20, NAMES, learnt)


def test_draws_that_mix_say_nothing():
    """Of 20 sets of 1000, with an effective size of 333 and a standard error below 45 for the
    slowest coordinate: 100 is five standard errors off, probability 1e-6 for all together.
    """
    assert [message(autoregression([0.0, 0.3, 0.5], seed=k)) for k in range(20)] == [None] * 20


def test_arviz_is_not_asked_about_draws_that_clearly_mix(monkeypatch):
    """Its import takes a second. Batch means of 1000 independent draws find a size below 250 with
    a probability below 1e-12.
    """
    monkeypatch.delattr(mixing, "_effective_draws")
    assert message(autoregression([0.0, 0.0, 0.0])) is None
    with pytest.raises(NameError):
        message(autoregression([0.0, 0.0, 0.9]))


def test_the_slowest_coordinate_is_named_with_what_to_write():
    """The effective size is 5 (standard error below 4), so 100 need about 20 times as many."""
    told = message(autoregression([0.0, 0.5, 0.99]))
    assert told.startswith("1000 draws of this chain have") and "for b[1]." in told
    number = int(told.split("steps_per_draw=")[1].split()[0])
    assert 180 <= number <= 2000 and "(now 20)" in told
    assert int(told.split(" draws=")[1].split(";")[0]) == pytest.approx(50 * number, rel=0.2)


def test_thinned_draws_stand_for_all():
    draws = autoregression([0.0, 0.5, 0.99], n=4000)[::4]
    assert message(draws, 4000).startswith("4000 draws of this chain have")


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_modes_are_told_apart_from_slow_moves(offset):
    draws = autoregression([0.0, 0.5, 0.5])
    draws[:300, 0] += 12.0
    draws[700:, 0] += 12.0
    told = message(draws + offset)
    assert "separate modes" in told and "2 times" in told and "for a." in told
    assert "separate modes" not in message(autoregression([0.0, 0.5, 0.99]) + offset)
    assert "pm.sample_smc to weigh them" in told


def test_what_weighs_modes_is_a_step_that_takes_the_model():
    compiled, (in_python, _) = models.normal(2)[0], models.black_box()
    estimated = models.black_box(noise=1.0)[0]
    assert KameleonStep(model=compiled).can_be_tempered
    assert not KameleonStep(model=in_python).can_be_tempered
    assert not KameleonStep(model=estimated, pseudo_marginal=True).can_be_tempered
    assert not ParallelTemperingStep(model=compiled).can_be_tempered  # it is one
    draws = KeptDraws()
    for k in range(1000):
        draws.record(np.array([100.0 * (k // 500) + k % 7]))
    for step, weigher in ((compiled, "ParallelTemperingStep"), (in_python, "pm.sample_smc")):
        step = KameleonStep(model=step)
        step.expected_draws, draws._is_told = 1000, False
        assert f"and {weigher} to weigh them" in draws.complaint(step, 1000, lambda: ["x"])


def test_draws_outside_of_what_tuning_learnt():
    draws = autoregression([0.0, 0.5, 0.98])
    center, scale = draws.mean(axis=0), draws.std(axis=0)
    assert "steps_per_draw" in message(draws, learnt=(center, scale))
    for learnt in ((center - [0, 0, 5], scale), (center, scale / [1, 1, 5])):
        told = message(draws, learnt=learnt)
        assert "b[1] has left the range" in told and "tune=1500" in told


@pytest.mark.parametrize("scale", [1e300, 1e-300, 0.0])
def test_wild_scales_are_judged_without_a_warning_of_numpy(scale):
    """A coordinate that never moved counts like any other to ArviZ, or not at all."""
    draws = scale * np.cumsum(autoregression([0.9, 0.9, 0.99]), axis=0)
    learnt = (np.zeros(3), np.full(3, scale))
    assert scale == 0.0 or message(draws, learnt=learnt).startswith("1000 draws of this chain")


@pytest.mark.parametrize("n", [2, 50, 99])
def test_few_draws_say_nothing(n):
    assert message(autoregression([0.999] * 3, n=n)) is None


def funnel():
    with pm.Model() as model:
        log_scale = pm.Normal("log_scale", 0, 3)
        pm.Normal("x", 0, pm.math.exp(log_scale), shape=6)
    return model


@pytest.mark.slow
def test_a_funnel_through_pm_sample(caplog):
    """Known draws are judged at the end; unknown ones (PyMC 5) after 200 and 1000."""
    model = funnel()
    with model:
        step = KameleonStep(steps_per_draw=2)
    sample(step, model, draws=300, chains=2, tune=1000)
    told = [r.getMessage() for r in caplog.records if "of this chain have" in r.getMessage()]
    assert len(told) == 2
    assert all(m.startswith(f"{300 if PYMC_6 else 200} draws") for m in told)


@pytest.mark.parametrize("ends", [None, 300])
def test_only_at_the_end_and_once(ends):
    model = funnel()
    with model:
        step = AdaptiveMetropolisStep(steps_per_draw=2, rng=1)
    begin(step)
    step.expected_draws = ends
    _, statistics, point = drive(step, model.initial_point(), 1500, tune=-1)
    assert not any("warning" in s for s in statistics)
    step.stop_tuning()
    _, statistics, _ = drive(step, point, 1200, tune=-1)
    told = [i + 1 for i, s in enumerate(statistics) if "chain have" in str(s.get("warning"))]
    assert told == [200 if ends is None else 300]
    assert step.draws.history.points.nbytes == 1024 * 7 * 8
    begin(step)
    assert step.draws.history is None


def test_angles_are_judged_by_cosine_and_sine():
    """An angle near pi goes on beyond it, and has one mode."""
    with pm.Model() as model:
        angle = pm.VonMises("angle", 0, 0.1)
        pm.Potential("near pi", -2.0 * pm.math.cos(angle))
    step = AdaptiveMetropolisStep(model=model)
    points, statistics, _ = run(step, model, 700, tune=200)
    assert np.any(np.abs(points[:, 0]) > np.pi)
    assert [s["warning"] for s in statistics if "warning" in s] == []
    assert element_names(step) == ["cos(angle_circular__)", "sin(angle_circular__)"]
    circular = np.angle(np.exp(1j * points[200:, 0]).mean())
    assert abs(abs(circular) - np.pi) < 0.3  # 5 standard errors of 300 effective draws
