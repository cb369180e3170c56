import pickle
import time

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph import Apply
from scipy import stats
from scipy.integrate import solve_ivp

from pymc_kameleon import __main__, demo
from pymc_kameleon.demo import command as demo_run
from pymc_kameleon.demo import model as demo_model

TIMES = demo_model.YEARS - demo_model.YEARS[0]
TYPICAL = {
    "alpha": 0.55,
    "beta": 0.028,
    "gamma": 0.80,
    "delta": 0.024,
    "u0": 33.0,
    "v0": 5.9,
    "sigma_hare": 0.25,
    "sigma_lynx": 0.26,
}
OTHERS = [
    TYPICAL,
    {**TYPICAL, "alpha": 1.3, "gamma": 1.7, "sigma_hare": 0.9},
    {**TYPICAL, "beta": 0.3, "delta": 0.002, "u0": 2.0, "v0": 60.0, "sigma_lynx": 0.05},
]
ABSURD = [
    [np.nan] * 6,
    [np.inf] * 6,
    [1e300] * 6,
    [0.5, 0.03, 0.8, 0.02, 0.0, 5.0],
    [0.5, 0.03, 0.8, 0.02, -1.0, 5.0],
    [0.5, 0.03, 0.8, 0.02, 1e305, 1e305],
    [1e6, 1e5, 1e6, 1e5, 30.0, 5.0],
]


def reference_trajectory(values):
    alpha, beta, gamma, delta, hares, lynx = (values[name] for name in demo_model.PARAMETERS[:6])
    solution = solve_ivp(
        lambda _, y: [(alpha - beta * y[1]) * y[0], (-gamma + delta * y[0]) * y[1]],
        (TIMES[0], TIMES[-1]),
        [hares, lynx],
        method="DOP853",
        t_eval=TIMES,
        rtol=1e-12,
        atol=1e-14,
    )
    return solution.y.T


def reference_log_density(values, trajectory):
    def half_normal(value, mean, sd):
        return stats.truncnorm.logpdf(value, -mean / sd, np.inf, mean, sd)

    def log_normal(value, mean, sd):
        return stats.lognorm.logpdf(value, sd, scale=np.exp(mean))

    prior = (
        half_normal(values["alpha"], 1, 0.5)
        + half_normal(values["beta"], 0.05, 0.05)
        + half_normal(values["gamma"], 1, 0.5)
        + half_normal(values["delta"], 0.05, 0.05)
        + log_normal(values["u0"], np.log(10), 1)
        + log_normal(values["v0"], np.log(10), 1)
        + log_normal(values["sigma_hare"], -1, 1)
        + log_normal(values["sigma_lynx"], -1, 1)
    )
    log_trajectory = np.log(trajectory)
    likelihood = (
        log_normal(demo_model.HARE_PELTS, log_trajectory[:, 0], values["sigma_hare"]).sum()
        + log_normal(demo_model.LYNX_PELTS, log_trajectory[:, 1], values["sigma_lynx"]).sum()
    )
    return prior + likelihood


@pytest.fixture(scope="module")
def model():
    return demo.lynx_hare_model()


@pytest.fixture(scope="module")
def log_density(model):
    return model.compile_logp(jacobian=False, mode="FAST_COMPILE")


def value_point(values):
    # Every parameter is positive and sampled on the log scale.
    transforms = {name: f"{name}_log__" for name in values}
    for name in demo_model.RATES:
        transforms[name] = f"{name}_interval__"
    return {transforms[name]: np.log(value) for name, value in values.items()}


@pytest.mark.parametrize("values", OTHERS)
def test_op_solves_the_equations(values):
    parameters = pt.dvector()
    solve = pytensor.function([parameters], demo.LotkaVolterra(TIMES)(parameters), mode="cvm")
    solution = solve([values[name] for name in demo_model.PARAMETERS[:6]])
    np.testing.assert_allclose(solution, np.log(reference_trajectory(values)), atol=1e-5)


def test_op_is_picklable_and_comparable():
    op = demo.LotkaVolterra(TIMES)
    assert pickle.loads(pickle.dumps(op)) == op
    assert op != demo.LotkaVolterra(TIMES[:5])
    assert isinstance(op.make_node(pt.fvector()), Apply)


@pytest.mark.parametrize("parameters", ABSURD)
def test_failing_solver_gives_nan(parameters, capfd):
    start = time.perf_counter()
    solution = demo.solve_lotka_volterra(np.array(parameters), TIMES)
    assert time.perf_counter() - start < 1.0
    assert solution.shape == (21, 2)
    assert np.isnan(solution).all()
    assert capfd.readouterr() == ("", "")


def test_solver_comes_back_wherever_the_parameters_are():
    rng = np.random.default_rng(3)
    centre = np.log([TYPICAL[name] for name in demo_model.PARAMETERS[:6]])
    start = time.perf_counter()
    for scale in (1.0, 3.0, 10.0, 50.0):
        for _ in range(25):
            parameters = np.exp(centre + scale * rng.standard_normal(6))
            solution = demo.solve_lotka_volterra(parameters, TIMES)
            assert np.isfinite(solution).all() or np.isnan(solution).all()
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("values", OTHERS)
def test_log_density(log_density, values):
    parameters = np.array([values[name] for name in demo_model.PARAMETERS[:6]])
    trajectory = np.exp(demo.solve_lotka_volterra(parameters, TIMES))
    computed = float(log_density(value_point(values)))
    assert computed == pytest.approx(reference_log_density(values, trajectory), abs=1e-8, rel=1e-12)
    accurate = reference_log_density(values, reference_trajectory(values))
    assert computed == pytest.approx(accurate, rel=1e-5)


def test_log_density_where_the_solver_fails(log_density):
    failing = {**TYPICAL, "alpha": 1e6, "beta": 1e5, "gamma": 1e6, "delta": 1e5}
    assert not np.isfinite(log_density(value_point(failing)))


def test_model_has_no_gradient(model):
    assert [variable.name for variable in model.free_RVs] == list(demo_model.PARAMETERS)
    with pytest.raises((NotImplementedError, AttributeError)):
        model.compile_dlogp(mode="FAST_COMPILE")


@pytest.fixture(scope="module")
def runs(model):
    with model:
        idata = pm.sample(
            draws=60,
            tune=30,
            chains=2,
            cores=1,
            initvals=TYPICAL,
            step=pm.DEMetropolisZ(compile_kwargs={"mode": "FAST_COMPILE"}),
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
        )
    return [demo.SamplerRun("A", idata, 120, 120, 60), demo.SamplerRun("B", idata, 120, 240, 120)]


def test_tables(runs):
    summary = demo.summary_table(runs[0].idata)
    assert list(summary.columns) == ["mean", "sd", "ess_bulk", "ess_tail", "r_hat"]
    assert list(summary.index) == list(demo_model.PARAMETERS)
    mean = runs[0].idata["posterior"]["alpha"].values.mean()
    assert summary.loc["alpha", "mean"] == pytest.approx(mean)
    table = demo.comparison_table(runs)
    assert list(table.index) == ["A", "B"]
    assert list(table["evals"]) == [120, 240]
    np.testing.assert_allclose(
        table["ESS / 1000 evals"], 1000 * table["min bulk ESS"] / table["evals"]
    )
    np.testing.assert_allclose(table["ESS / s"] * table["seconds"], table["min bulk ESS"])


def test_picture(runs, tmp_path):
    path = tmp_path / "picture.png"
    demo.lynx_hare_figure(runs).savefig(path, dpi=30)
    assert path.stat().st_size > 1000


def test_report_writes_what_it_says(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "sample_both", lambda model, **arguments: runs)
    __main__.main(["--quick", "--output", str(tmp_path / "new" / "folder")])
    printed = capsys.readouterr().out
    for name in ("A.nc", "B.nc", "lynx_hare.png"):
        assert str(tmp_path / "new" / "folder" / name) in printed
        assert (tmp_path / "new" / "folder" / name).stat().st_size > 1000


@pytest.mark.parametrize("arguments", [["--chains", "1"], ["--draws", "2"], ["--tune", "-1"]])
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        __main__.main(arguments)
    assert arguments[0] in capsys.readouterr().err
