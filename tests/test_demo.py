import pickle
import time

import numpy as np
import pymc as pm
import pytest
from models import sample
from scipy import stats
from scipy.integrate import solve_ivp

from pymc_kameleon import __main__, demo

TIMES = demo.YEARS - demo.YEARS[0]
TYPICAL = dict(zip(demo.PARAMETERS, [0.55, 0.028, 0.80, 0.024, 33.0, 5.9, 0.25, 0.26], strict=True))
OTHERS = [
    TYPICAL,
    {**TYPICAL, "alpha": 1.3, "gamma": 1.7, "sigma_hare": 0.9},
    {**TYPICAL, "beta": 0.3, "delta": 0.002, "u0": 2.0, "v0": 60.0, "sigma_lynx": 0.05},
]
FAILING = {**TYPICAL, "alpha": 1e6, "beta": 1e5, "gamma": 1e6, "delta": 1e5}
ABSURD = [
    [np.nan] * 6,
    [np.inf] * 6,
    [1e300] * 6,
    [0.5, 0.03, 0.8, 0.02, 0.0, 5.0],
    [0.5, 0.03, 0.8, 0.02, -1.0, 5.0],
    [0.5, 0.03, 0.8, 0.02, 1e305, 1e305],
    [FAILING[name] for name in demo.PARAMETERS[:6]],
]


def reference_trajectory(alpha, beta, gamma, delta, hares, lynx):
    return solve_ivp(
        lambda _, y: [(alpha - beta * y[1]) * y[0], (-gamma + delta * y[0]) * y[1]],
        (TIMES[0], TIMES[-1]),
        [hares, lynx],
        method="DOP853",
        t_eval=TIMES,
        rtol=1e-12,
        atol=1e-14,
    ).y.T


def reference_log_density(values, trajectory):
    total = 0.0
    for name, (mean, sd) in zip(demo.RATES, [(1, 0.5), (0.05, 0.05)] * 2, strict=True):
        total += stats.truncnorm.logpdf(values[name], -mean / sd, np.inf, mean, sd)
    for name, log_mean in zip(demo.PARAMETERS[4:], [np.log(10)] * 2 + [-1] * 2, strict=True):
        total += stats.lognorm.logpdf(values[name], 1, scale=np.exp(log_mean))
    errors = values["sigma_hare"], values["sigma_lynx"]
    pelts = np.column_stack([demo.HARE_PELTS, demo.LYNX_PELTS])
    return total + stats.lognorm.logpdf(pelts, errors, scale=trajectory).sum()


@pytest.fixture(scope="module")
def model():
    return demo.lynx_hare_model()


@pytest.fixture(scope="module")
def log_density(model):
    compiled = model.compile_logp(jacobian=False, mode="FAST_COMPILE")
    # Every parameter is positive and sampled on the log scale.
    names = dict(zip(demo.PARAMETERS, (v.name for v in model.value_vars), strict=True))
    return lambda values: float(compiled({names[k]: np.log(v) for k, v in values.items()}))


@pytest.mark.parametrize("values", OTHERS)
def test_log_density_is_that_of_the_equations(log_density, values):
    parameters = [values[name] for name in demo.PARAMETERS[:6]]
    solution, accurate = demo.log_populations(parameters, TIMES), reference_trajectory(*parameters)
    np.testing.assert_allclose(solution, np.log(accurate), atol=1e-5)
    expected = reference_log_density(values, np.exp(solution))
    assert log_density(values) == pytest.approx(expected, abs=1e-8, rel=1e-12)
    assert expected == pytest.approx(reference_log_density(values, accurate), rel=1e-5)


@pytest.mark.parametrize("parameters", ABSURD)
def test_failing_solver_gives_nan(parameters, capfd):
    start = time.perf_counter()
    solution = demo.log_populations(np.array(parameters), TIMES)
    assert time.perf_counter() - start < 1.0
    assert solution.shape == (21, 2)
    assert np.isnan(solution).all()
    assert capfd.readouterr() == ("", "")


def test_solver_comes_back_wherever_the_parameters_are():
    rng = np.random.default_rng(3)
    centre = np.log([TYPICAL[name] for name in demo.PARAMETERS[:6]])
    start = time.perf_counter()
    for scale in np.repeat([1.0, 3.0, 10.0, 50.0], 25):
        solution = demo.log_populations(np.exp(centre + scale * rng.standard_normal(6)), TIMES)
        assert np.isfinite(solution).all() or np.isnan(solution).all()
    assert time.perf_counter() - start < 10


def test_model_is_a_black_box_that_can_be_sent(model, log_density):
    assert pickle.loads(pickle.dumps(demo.log_trajectory)) == demo.log_trajectory
    assert [variable.name for variable in model.free_RVs] == list(demo.PARAMETERS)
    assert not np.isfinite(log_density(FAILING))
    with pytest.raises((NotImplementedError, AttributeError)):
        model.compile_dlogp(mode="FAST_COMPILE")


@pytest.fixture(scope="module")
def results(model):
    options = {"draws": 60, "tune": 30, "chains": 2, "initvals": TYPICAL}
    with model:
        step = pm.DEMetropolisZ(compile_kwargs={"mode": "FAST_COMPILE"})
    result = sample(step, model, **options)
    return {"A": result, "B": result}


def test_report_and_files(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "sample_both", lambda draws, tune: results)
    folder = tmp_path / "new" / "folder"
    __main__.main(["--quick", "--output", str(folder)])
    printed = capsys.readouterr().out
    for name in ("A.nc", "B.nc", "lynx_hare.png"):
        assert str(folder / name) in printed
        assert (folder / name).stat().st_size > 1000
    mean = results["A"]["posterior"]["alpha"].values.mean()
    row = next(line.split() for line in printed.splitlines() if line.startswith("alpha"))
    assert float(row[1]) == pytest.approx(mean, rel=1e-3)
    # Chains as short as these do not agree.
    assert "\nR-hat of A is up to " in printed and "\nR-hat of B is up to " in printed
    columns = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line}
    # Two chains of 60 draws, each of which evaluates the log density twice.
    assert columns["evaluations"] == ["240", "240"]
    each = float(columns["ess_bulk_per_evaluation"][0])
    assert each == pytest.approx(float(columns["ess_bulk"][0]) / 240, rel=1e-3)
