"""A log density that raises: at points that a step chooses itself it counts as impossible."""

import re

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import BlackBox, Shift, begin, black_box, drive, run
from pytensor.compile.ops import wrap_py

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    GPSurrogate,
    KameleonStep,
    ParallelTemperingStep,
    SurrogateHMCStep,
    dispersed_starts,
)


class SolverError(Exception):
    pass


def solver(lowest=0.7, highest=1.4):
    """A model of k whose black box raises outside of an interval."""
    calls = []

    @wrap_py(itypes=[pt.dscalar], otypes=[pt.dscalar])
    def log_likelihood(k):
        calls.append(float(k))
        if not lowest < k < highest:
            raise SolverError(f"no solution for {k:.3g}")
        return -0.5 * ((k - 1.0) / 0.03) ** 2

    with pm.Model() as model:
        pm.Potential("likelihood", log_likelihood(pm.LogNormal("k", 0, 1, initval=1.0)))
    return model, calls


STEPS = {
    "AdaptiveMetropolisStep": AdaptiveMetropolisStep,
    "search": lambda **model: KameleonStep(start="optimize", **model),
    "surrogate": lambda **model: KameleonStep(surrogate=GPSurrogate(), **model),
    "SurrogateHMCStep": SurrogateHMCStep,
}


@pytest.mark.numerics
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_what_fails_while_tuning_is_impossible(make):
    model, calls = solver()
    step = begin(make(model=model), 1, tune=300, draws=1)
    point, found, told = model.initial_point(), [], []
    for _ in range(300):
        point, _ = step.step(point)
        found.append(np.exp(point["k_log__"]))
    k = np.array(found[100:])
    failed = [value for value in calls if not 0.7 < value < 1.4]
    assert failed and np.all((k > 0.7) & (k < 1.4))
    # The sd is .03, so these bounds fail with a probability below 1e-6 if 20 draws are effective.
    assert abs(k.mean() - 1.0) < 0.035 and 0.01 < k.std() < 0.06
    step.stop_tuning()
    for _ in range(3):  # one warning a draw
        point, (statistics,) = step.step(point)
        told += [statistics["warning"].message] if "warning" in statistics else []
    (message,) = [text for text in told if "failed at" in text]
    pattern = rf"failed at {len(failed)} points .* first was k = .*: SolverError: no solution"
    assert re.search(pattern, message)


def test_what_fails_in_any_replica_is_counted_while_tuning():
    model, calls = solver()
    step = ParallelTemperingStep(model=model, n_temperatures=4, n_moves=2)
    begin(step, 1, tune=30)
    drive(step, model.initial_point(), 30, tune=30)
    failed = [value for value in calls if not 0.7 < value < 1.4]
    assert failed and step.report.failed == len(failed)
    (k,) = re.findall(r"^k = ([\d.e+-]+): SolverError: no solution", step.report.first_failure)
    assert abs(float(k) / failed[0] - 1.0) < 1e-6


@pytest.mark.parametrize("make", [KameleonStep, AdaptiveMetropolisStep])
def test_what_fails_after_tuning_ends_the_chain(make):
    model, _ = solver()
    step = begin(make(model=model), 1, tune=0)
    point = model.initial_point()
    message = r"at a proposal of the chain, k = .*: SolverError: no solution .* return -np.inf"
    with pytest.raises(SolverError, match="no solution") as raised:
        for _ in range(100):
            point, _ = step.step(point)
    assert re.search(message, "\n".join(raised.value.__notes__))


def test_what_fails_at_the_start_is_raised():
    model, _ = solver(lowest=2.0, highest=3.0)
    step = begin(KameleonStep(model=model), 1, tune=10)
    with pytest.raises(SolverError, match="no solution for 1"):
        step.step(model.initial_point())


def once(function):
    """The function, which raises when it is asked again at a point where it had a value."""
    known = set()

    def asked(x):
        if x.tobytes() in known:
            raise SolverError("no second solution")
        known.add(x.tobytes())
        return function(x)

    return asked


def test_a_function_that_raises_when_it_is_asked_again_is_told_of():
    model, _ = black_box(function=once(models.negative_half_square))
    _, statistics, _ = run(KameleonStep(model=model), model, 45, tune=40)
    told = " ".join(s["warning"].message for s in statistics if "warning" in s)
    assert "The log density is random: at one point of x" in told
    assert "evaluated again it raises SolverError: no second solution" in told


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_chain_keeps_its_draws_where_its_point_fails(caplog):
    """Another step moves what the function depends on, to where it raises at any point."""
    with pm.Model():
        shift = pm.Normal("shift", initval=0.0)
        x = pm.Normal("x", shape=2)

        def function(x):
            if x[0] > 0.995:
                raise SolverError("no solution")
            return models.negative_half_square(x[1:])

        pm.Potential("box", BlackBox(function)(pt.concatenate([shift[None], x])))
        steps = [KameleonStep([x], steps_per_draw=2), Shift([shift], shift=0.1)]
        result = pm.sample(
            step=steps,
            chains=1,
            cores=1,
            tune=4,
            draws=30,
            progressbar=False,
            random_seed=1,
            compute_convergence_checks=False,
        )
    assert result.posterior.sizes["draw"] in (5, 6)
    (failure,) = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert "at the current point of the chain, x = " in "".join(failure.__notes__)


def test_dispersed_starts_leave_failures_out():
    model, calls = solver()
    starts = dispersed_starts(model, 3, random_seed=1)
    assert all(0.7 < start["k"] < 1.4 for start in starts)
    assert any(not 0.7 < value < 1.4 for value in calls)


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("step_class", [KameleonStep, SurrogateHMCStep])
def test_a_black_box_that_is_random_is_told_of(step_class, noise):
    """Two values differ by less than what is told of with probability .003."""
    model, operation = black_box(noise=noise)
    _, statistics, _ = run(step_class(model=model), model, 45, tune=40)
    told = [s["warning"].message for s in statistics if "warning" in s]
    is_told = any("The log density is random: at one point of x" in text for text in told)
    assert is_told == (noise > 0)
    assert operation.calls == sum(s["n_evals"] for s in statistics)  # one of them to find out
