"""Names that PyMC does not promise to keep: where one is gone, another way, or an error says so."""

import importlib.util
import logging

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_kameleon import AdaptiveMetropolisStep, targets
from pymc_kameleon._compat import (
    CalledByPyMC,
    complete_step,
    group_dataset,
    progress_bars,
    result_of_traces,
)
from pymc_kameleon.distributed.run import trace_of
from pymc_kameleon.distributed.worker import Part

GROUPS = ("posterior", "sample_stats", "warmup_posterior", "warmup_sample_stats", "observed_data")
OPTIONS = {
    "discard_tuned_samples": True,
    "compute_convergence_checks": False,
    "return_inferencedata": True,
    "keep_warning_stat": False,
    "idata_kwargs": {},
    "quiet": True,
}


def taken_away(monkeypatch, module, name):
    monkeypatch.delattr(importlib.import_module(module), name)


def observed():
    with pm.Model(coords={"place": ["a", "b"]}) as model:
        rate = pm.LogNormal("rate", 0.0, 1.0, dims="place")
        pm.Poisson("y", rate, observed=[1, 2], dims="place")
    return model


def part(n, seed):
    """`n` draws of the model with the statistics of two steps."""
    logs = np.random.default_rng(seed).normal(size=(n, 2))
    statistics = {"accepted": logs[:, 0] > 0, "warning": np.zeros(n, dtype=object)}
    samples = {"rate_log__": logs, "rate": np.exp(logs)}
    return Part(samples, [statistics, {"accepted": logs[:, 1] > 0}], None, [])


DTYPES = [{"accepted": bool, "warning": object}, {"accepted": bool}]


def result(model, lengths, tune=6, **options):
    traces = [
        trace_of([part(n, k) for n in parts], model, None, k, DTYPES)
        for k, parts in enumerate(lengths)
    ]
    return result_of_traces(traces, tune=tune, seconds=1.5, model=model, **OPTIONS | options)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([[6, 10], [6, 10], [16]], {}),
        ([[6, 10], [6, 10], [16]], {"discard_tuned_samples": False}),
        ([[6, 10], [9], [14], []], {"discard_tuned_samples": False}),
        ([[8], [16], [4]], {}),
        ([[4], [5]], {"discard_tuned_samples": False}),
        ([[16]], {"keep_warning_stat": True, "idata_kwargs": {"include_transformed": True}}),
        ([[60], [60]], {"tune": 0, "compute_convergence_checks": True}),
    ],
)
def test_a_result_without_the_private_function_is_the_same(monkeypatch, lengths, options):
    model = observed()
    expected = result(model, lengths, **options)
    taken_away(monkeypatch, "pymc.sampling.mcmc", "_sample_return")
    found = result(model, lengths, **options)
    for group in GROUPS:
        ours, theirs = group_dataset(found, group), group_dataset(expected, group)
        if theirs is None or not theirs.data_vars:
            assert ours is None
            continue
        xr.testing.assert_equal(ours, theirs)
        assert ours.attrs | {"created_at": ""} == theirs.attrs | {"created_at": ""}


def test_what_is_no_result_is_the_same_too(monkeypatch):
    model = observed()
    expected = result(model, [[16], [14]], return_inferencedata=False)
    taken_away(monkeypatch, "pymc.sampling.mcmc", "_sample_return")
    found = result(model, [[16], [14]], return_inferencedata=False)
    np.testing.assert_array_equal(found["rate"], expected["rate"])
    np.testing.assert_array_equal(found["accepted"], expected["accepted"])
    with pytest.raises(ValueError, match="Not enough samples"):
        result(model, [[6], [5]])


@pytest.mark.parametrize("name", ["assign_step_methods", "instantiate_steppers"])
def test_a_step_of_all_variables_is_complete_without_the_choice_of_others(monkeypatch, name):
    with pm.Model() as model:
        x, count = pm.Normal("x"), pm.Poisson("count", 3.0)
        one, other = AdaptiveMetropolisStep([x]), pm.Metropolis([count])
        chosen = complete_step(model, [one], None, {})
        taken_away(monkeypatch, "pymc.sampling.mcmc", name)
        found = complete_step(model, [one, other], None, {})
        with pytest.raises(RuntimeError, match=rf"PyMC .* has no .*{name}.* returns .* count too"):
            complete_step(model, one, None, {})
    assert [type(step) for step in found.methods] == [type(step) for step in chosen.methods]
    assert found.methods == [one, other]


def test_without_progress_bars_a_run_goes_on(monkeypatch, caplog):
    taken_away(monkeypatch, "pymc.progress_bar", "MCMCProgressBarManager")
    caplog.set_level(logging.INFO)
    bars = progress_bars(None, 2, 10, 5, True, None)
    with bars:
        bars.update(chain_idx=0, is_last=True, draw=14, tuning=False, stats=[{}])
    assert "has no pymc.progress_bar.MCMCProgressBarManager" in caplog.text


def test_a_chain_begins_alike_by_the_names_of_both_versions():
    with pm.Model():
        pm.Normal("x")
        step = AdaptiveMetropolisStep()
    generators = [np.random.default_rng(3) for _ in range(2)]
    states = []
    step.set_rng(generators[0])
    states.append((step.rng, step.expected_tune, step.expected_draws))
    step.setup_chain(generators[1], np.int64(7), 9)
    states.append((step.rng, step.expected_tune, step.expected_draws))
    assert states == [(generators[0], None, None), (generators[1], 7, 9)]


@pytest.mark.parametrize("name", ["_progressbar_config", "_make_progressbar_update_functions"])
def test_a_step_samples_where_progress_bars_ask_by_other_names(monkeypatch, name):
    """PyMC's own then say what is shown, the draws alone."""
    monkeypatch.delattr(CalledByPyMC, name)
    with pm.Model():
        pm.Normal("x")
        step = AdaptiveMetropolisStep()
    columns, shown = step._progressbar_config(2)
    (update,) = step._make_progressbar_update_functions()
    assert len(columns) == len(shown) or name == "_make_progressbar_update_functions"
    assert isinstance(update(dict.fromkeys(step._progress_columns(), 0.0)), dict)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pymc.logprob.abstract", "_logprob"),
        ("pymc.distributions.distribution", "_support_point"),
    ],
)
def test_targets_name_what_they_miss(monkeypatch, module, name):
    taken_away(monkeypatch, module, name)
    spec = importlib.util.spec_from_file_location("targets_again", targets.__file__)
    with pytest.raises(
        ImportError, match=rf"PyMC .* has no {module}\.{name}: .*targets.* needs it"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
