"""What a step chooses when it is told nothing: the length of a draw and where chains start."""

import logging
import os

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from conftest import RANDOM_WALKS, STEPS, rows
from models import begin, drive, run_python, sample, values
from test_contract import PYMC_6

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep
from pymc_kameleon.diagnostics import efficiency_table
from pymc_kameleon.steps.metropolis_hastings import chosen_steps_per_draw

STILL = {"covariance": np.diag([1e-24] * 2), "learn_scaling": False, "steps_per_draw": 1}
"""Options of a random walk that stays within 1e-9 of where it starts."""


@pytest.mark.parametrize("name", rows(RANDOM_WALKS))
def test_the_number_of_transitions_is_told(name, caplog):
    make = STEPS[name].step_class
    model, _, _ = models.normal(3)
    with caplog.at_level(logging.INFO, logger="pymc.kameleon"), model:
        step = make()
    chosen = chosen_steps_per_draw(3, True)
    assert step.steps_per_draw == chosen > 1
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("pymc.kameleon")]
    assert lines == [f"{make.__name__}: {chosen} transitions a draw, compiled"]
    assert f"steps_per_draw={chosen}" in repr(step) and "compiled" in repr(step)
    begin(step)
    _, statistics, _ = drive(step, model.initial_point(), 3, tune=2)
    assert [s["n_transitions"] for s in statistics] == [chosen] * 3


def test_the_number_follows_the_dimension_and_what_runs_it(caplog):
    for dim, compiled, plain in [(1, 20, 5), (12, 24, 12), (80, 100, 50)]:
        assert chosen_steps_per_draw(dim, True) == compiled
        assert chosen_steps_per_draw(dim, False) == plain
    step = KameleonStep(model=models.black_box()[0])
    assert step.steps_per_draw == chosen_steps_per_draw(2, False)
    assert 1 < step.steps_per_draw < chosen_steps_per_draw(2, True)
    assert "in Python" in repr(step)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pymc.kameleon"):
        step = KameleonStep(model=models.normal(3)[0], steps_per_draw=3)
    assert step.steps_per_draw == 3
    assert not [r for r in caplog.records if r.name.startswith("pymc.kameleon")]


def starts(model, step, **options):
    """First draws of three chains of a step that hardly moves."""
    settings = {"chains": 3, "draws": 2, "tune": 5, "discard_tuned_samples": False} | options
    group = "warmup_posterior" if settings["tune"] else "posterior"
    return values(sample(step, model, **settings), "x", group)[:, 0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chains_are_dispersed_from_the_default_start():
    model, mean, sd = models.normal(2)
    default = model.initial_point()["x"]
    with model:
        step = AdaptiveMetropolisStep(**STILL)
        together = AdaptiveMetropolisStep(disperse=False, **STILL)
    found = starts(model, step)
    # No draw from the prior is as far as 6 standard deviations, with probability 1e-8.
    furthest = np.abs(mean - default) + 6.0 * sd
    assert np.all(np.abs(found - default) <= furthest / 2) and len(np.unique(found)) == 6
    np.testing.assert_array_equal(found, starts(model, step))
    np.testing.assert_allclose(found, starts(model, step, cores=2), atol=1e-8)
    np.testing.assert_allclose(starts(model, together), np.tile(default, (3, 1)), atol=1e-8)
    np.testing.assert_allclose(starts(model, step, tune=0), np.tile(default, (3, 1)), atol=1e-8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_given_start_is_respected():
    """Also where PyMC makes the step: it hands it the first start that was given."""
    model, _, _ = models.normal(2)
    given = [{"x": np.array([k, -k]) / 7} for k in (1.0, 2.0, 3.0)]
    step = AdaptiveMetropolisStep(model=model, **STILL)
    found = starts(model, step, initvals=given)
    np.testing.assert_allclose(found, [g["x"] for g in given], atol=1e-8)
    step = AdaptiveMetropolisStep(model=model, initial_point=given[0], **STILL)
    begin(step)
    _, _, point = drive(step, given[0], 1, tune=5)
    np.testing.assert_allclose(point["x"], given[0]["x"], atol=1e-8)


def test_two_steps_of_a_compound_choose_and_disperse_each():
    with pm.Model() as model:
        pm.Normal("a", shape=12)
        pm.Normal("b")
        steps = [KameleonStep([model["a"]]), AdaptiveMetropolisStep([model["b"]])]
    assert [s.steps_per_draw for s in steps] == [24, 20]
    result = sample(steps, model, chains=4, draws=300, tune=None if PYMC_6 else 400)
    assert efficiency_table({"": result})["rhat"].iloc[0] < 1.05


@pytest.mark.parametrize("options", [{"draws": 200}, {"chains": 1, "draws": 200}])
def test_short_runs_and_single_chains(options, caplog):
    model, mean, scale = models.normal(3)
    with model:
        result = pm.sample(step=KameleonStep(), progressbar=False, random_seed=1, **options)
    draws = values(result, "x")
    assert np.all(np.abs(draws.mean(axis=(0, 1)) - mean) < scale)
    assert not [r for r in caplog.records if "of this chain have" in r.getMessage()]


@pytest.mark.parametrize("width", [0.05, 1e-30])
def test_a_narrow_support_is_started_in(width):
    """Nearer to the default where the model is finite only there, or at it."""
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=2)
        pm.Potential("narrow", pt.switch(pt.abs(x).max() < width, 0.0, -np.inf))
        step = AdaptiveMetropolisStep(**STILL)
    begin(step)
    _, (statistics,), point = drive(step, model.initial_point(), 1, tune=5)
    assert np.all(np.abs(point["x"]) < max(width, 1e-9))
    assert statistics["n_evals"] > 2


FIRST_CALL = """
import hashlib, numpy as np, pymc as pm
from pymc_kameleon import AdaptiveMetropolisStep
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.surrogate.posterior_surrogate import NO_PRIOR, new_surrogate
from pymc_kameleon.surrogate.posterior_surrogate import surrogate_gradients
from pymc_kameleon.surrogate.support import everywhere
from pymc_kameleon.gp.sparse_gp_fit import fit_sparse_gp
days = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 7.0])
with pm.Model() as model:
    asymptote, rate = pm.HalfNormal("asymptote", 50), pm.HalfNormal("rate", 2)
    sigma = pm.HalfNormal("sigma", 10)
    pm.Normal("demand", asymptote * (1 - pm.math.exp(-rate * days)), sigma, observed=3 * days)
    target = AdaptiveMetropolisStep().target
points = np.random.default_rng(1).normal(size=(500, 3))
values = np.array([target(x).sum() for x in points])
where = standardization(points, np.ones(3))
gp, _ = fit_sparse_gp(points[:150], values[:150], where, 150)
mean, nowhere = gp.mean_function(), np.zeros(3, dtype=bool)
surrogate = new_surrogate(where, gp.triangular_map, mean, nowhere, NO_PRIOR, everywhere(3))
for found in (values, surrogate_gradients(surrogate, points)):
    print(hashlib.sha256(found.tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.numerics
def test_the_first_chain_of_a_model_is_the_chain_of_later_ones(tmp_path):
    """To the last bit, whether densities and surrogates are compiled or found in a cache."""
    flags = [f for f in os.environ.get("PYTENSOR_FLAGS", "").split(",") if f]
    flags = [f for f in flags if not f.startswith(("base_compiledir", "compiledir"))]
    flags = ",".join([*flags, f"base_compiledir={tmp_path}"])
    caches = {"PYTENSOR_FLAGS": flags, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [run_python(FIRST_CALL, **caches) for _ in range(2)]
    assert not any(run.returncode for run in runs), runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != ""


def test_a_learner_begins_where_the_chain_was_put(monkeypatch):
    model, _, _ = models.normal(2)
    step, given = KameleonStep(model=model), []
    new_learner = step.sampler.new_learner

    def noting(position, warm):
        given.append((position.copy(), step.chain.position.copy()))
        return new_learner(position, warm)

    begin(step)
    monkeypatch.setattr(step.sampler, "new_learner", noting)
    start = model.initial_point()
    step.step(start)
    ((position, chain),) = given
    np.testing.assert_array_equal(position, chain)
    assert not np.array_equal(position, step.target.default_start)
