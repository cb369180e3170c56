"""Diagnostics: a table of hand-computed numbers, and of real results on both ArviZ generations."""

from functools import partial

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytest
from models import sample

from pymc_kameleon import AdaptiveMetropolisStep, kernels
from pymc_kameleon.diagnostics import (
    efficiency_table,
    maximum_mean_discrepancy,
    squared_jump_distance,
)

X = np.array([[0.0, 1.0, 1.0, 3.0], [0.0, 0.0, 2.0, 2.0]])
Y = np.stack([X, -2.0 * X], axis=2)
N_EVALS = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
NEW_ARVIZ = int(az.__version__.split(".")[0]) >= 1
RATES = ("ess_bulk_per_evaluation", "ess_bulk_per_second")


def made_result(posterior, sample_stats=None, sampling_time=None):
    """Result with the given values, of the type that this generation of ArviZ has."""
    groups = {"posterior": posterior} | ({"sample_stats": sample_stats} if sample_stats else {})
    result = az.from_dict(groups) if NEW_ARVIZ else az.from_dict(**groups)
    if sampling_time is not None:
        result["posterior"].attrs["sampling_time"] = sampling_time
    return result


def of_one(**options):
    return efficiency_table({"a": made_result({"x": X})}, **options)


def gaussian_model():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        pm.Normal("y", x.sum(), 1.0, observed=0.5)
        pm.Deterministic("total", x.sum())
    return model


def sampled(step):
    with gaussian_model():
        return sample(step(), draws=200, tune=200, chains=2)


@pytest.fixture(scope="module")
def adaptive_metropolis():
    return sampled(lambda: AdaptiveMetropolisStep(steps_per_draw=5))


@pytest.fixture(scope="module")
def nuts():
    return sampled(pm.NUTS)


def test_squared_jump_distance_by_hand():
    # Squares of the jumps: 1, 0, 4 and 0, 4, 0.
    assert squared_jump_distance(made_result({"x": X})) == pytest.approx(9 / 6)
    both = made_result({"x": X, "y": Y})
    assert squared_jump_distance(both) == pytest.approx(9 / 6 * (1 + 1 + 4))
    assert squared_jump_distance(both, var_names=["y"]) == pytest.approx(9 / 6 * 5)
    assert squared_jump_distance(both, var_names="x") == pytest.approx(9 / 6)
    assert np.isnan(squared_jump_distance(made_result({"x": X[:1, :1]})))


def test_counts_and_percentages_by_hand():
    result = made_result(
        {"x": X}, {"n_evals": N_EVALS, "accept": N_EVALS / 2, "calls": 10 * N_EVALS}, 2.0
    )
    table = efficiency_table(
        {"one": result, "ten": result, "other": result},
        steps_per_draw={"ten": 10},
        evaluations={"other": "calls"},
        seconds={"ten": 4.0},
    )
    assert list(table.index) == ["one", "ten", "other"]
    assert list(table["chains"]) == [2] * 3
    assert list(table["draws"]) == [4] * 3
    np.testing.assert_allclose(table["acceptance"], 6 / 16)
    np.testing.assert_allclose(table["esjd"], 9 / 6)
    np.testing.assert_allclose(table["evaluations"], [6, 6, 60])
    np.testing.assert_allclose(table["evaluations_percent"], [75, 7.5, 750])
    np.testing.assert_allclose(table["seconds"], [2, 4, 2])
    np.testing.assert_allclose(table["ess_bulk_per_evaluation"], table["ess_bulk"] / [6, 6, 60])
    np.testing.assert_allclose(table["ess_bulk_per_second"], table["ess_bulk"] / [2, 4, 2])
    everywhere = efficiency_table({"a": result}, steps_per_draw=2, evaluations="calls")
    assert everywhere.loc["a", "evaluations_percent"] == pytest.approx(375)


def test_missing_statistics_are_nan():
    table = efficiency_table({"bare": made_result({"x": X})})
    for column in ("acceptance", "evaluations", "evaluations_percent", "seconds", *RATES):
        assert np.isnan(table.loc["bare", column])
    assert table.loc["bare", "esjd"] == pytest.approx(9 / 6)
    other = efficiency_table({"other": made_result({"x": X}, {"lp": X})})
    assert np.isnan(other.loc["other", "evaluations"])
    none = efficiency_table({"none": made_result({"x": X}, {"n_evals": 0 * X}, 1.0)})
    assert none.loc["none", "evaluations"] == 0
    assert np.isnan(none.loc["none", "ess_bulk_per_evaluation"])


def test_several_steps_in_a_draw():
    evaluations = np.stack([N_EVALS, np.ones((2, 4))], axis=2)
    acceptance = np.stack([np.full((2, 4), 0.2), np.full((2, 4), 0.6)], axis=2)
    result = made_result({"x": X}, {"n_evals": evaluations, "accept": acceptance})
    row = efficiency_table({"compound": result}).loc["compound"]
    assert row["evaluations"] == 6 + 8
    assert row["evaluations_percent"] == pytest.approx(100 * 14 / 16)
    assert row["acceptance"] == pytest.approx(0.4)
    above_one = made_result({"x": X}, {"accept": np.array([[0.5, 4.0, 1.0, 0.0]] * 2)})
    assert efficiency_table({"a": above_one}).loc["a", "acceptance"] == pytest.approx(2.5 / 4)


def test_effective_sizes_are_those_of_the_worst_element():
    rng = np.random.default_rng(2)
    white = rng.standard_normal((2, 400))
    slow = np.cumsum(rng.standard_normal((2, 400)), axis=1)
    x = np.stack([white, slow], axis=2)
    row = efficiency_table({"a": made_result({"x": x, "white": white})}).loc["a"]
    alone = efficiency_table({"a": made_result({"x": slow})}).loc["a"]
    columns = ["ess_bulk", "ess_tail", "rhat"]
    np.testing.assert_allclose(row[columns].astype(float), alone[columns].astype(float))
    best = efficiency_table({"a": made_result({"x": x, "white": white})}, var_names=["white"])
    assert best.loc["a", "ess_bulk"] > 10 * row["ess_bulk"]
    assert best.loc["a", "rhat"] < row["rhat"]


def test_elements_that_never_move_are_left_out():
    rng = np.random.default_rng(3)
    correlations = np.stack([np.ones((2, 100)), rng.standard_normal((2, 100))], axis=2)
    row = efficiency_table({"a": made_result({"x": correlations})}).loc["a"]
    alone = efficiency_table({"a": made_result({"x": correlations[..., 1]})}).loc["a"]
    assert row["ess_bulk"] == pytest.approx(alone["ess_bulk"])
    stuck = efficiency_table({"stuck": made_result({"x": np.ones((2, 100))})}).loc["stuck"]
    assert np.isnan(stuck[["ess_bulk", "ess_tail", "rhat"]].astype(float)).all()
    assert stuck["esjd"] == 0


def test_a_draw_that_is_not_a_number_shows():
    x = np.random.default_rng(4).standard_normal((2, 100, 2))
    x[0, 3, 0] = np.nan
    row = efficiency_table({"a": made_result({"x": x})}).loc["a"]
    assert np.isnan(row[["ess_bulk", "ess_tail", "rhat", "esjd"]].astype(float)).all()


def test_few_draws_have_no_effective_size():
    row = efficiency_table({"a": made_result({"x": X[:, :3]})}).loc["a"]
    assert np.isnan(row[["ess_bulk", "ess_tail"]].astype(float)).all()
    assert row["esjd"] == pytest.approx(5 / 4)


def test_one_chain_has_no_r_hat():
    x = np.random.default_rng(5).standard_normal((1, 100))
    row = efficiency_table({"a": made_result({"x": x})}).loc["a"]
    assert np.isnan(row["rhat"])
    assert row["ess_bulk"] > 10


def test_real_results(adaptive_metropolis, nuts):
    table = efficiency_table(
        {"AM": adaptive_metropolis, "NUTS": nuts},
        var_names=["x"],
        evaluations={"NUTS": "n_steps"},
        steps_per_draw={"AM": 5},
    )
    assert isinstance(table, pd.DataFrame)
    assert not table.isna().any(axis=None)
    assert list(table["draws"]) == [200, 200]
    am = table.loc["AM"]
    assert am["evaluations"] == 2 * 200 * 5
    assert am["evaluations_percent"] == pytest.approx(100)
    statistics = adaptive_metropolis["sample_stats"]
    assert am["acceptance"] == pytest.approx(float(statistics["accept"].mean()))
    x = adaptive_metropolis["posterior"]["x"].transpose("chain", "draw", ...).values
    assert am["esjd"] == pytest.approx((np.diff(x, axis=1) ** 2).sum(axis=2).mean())
    axes = {"chain_axis": 0, "draw_axis": 1} if NEW_ARVIZ else {}
    sizes = [float(az.ess(x[..., i], **axes)) for i in range(2)]
    assert am["ess_bulk"] == pytest.approx(min(sizes))
    assert am["seconds"] == pytest.approx(adaptive_metropolis["posterior"].attrs["sampling_time"])
    assert table.loc["NUTS", "acceptance"] == pytest.approx(
        float(nuts["sample_stats"]["acceptance_rate"].mean())
    )


def test_no_evaluations_of_nuts_by_default(nuts):
    row = efficiency_table({"NUTS": nuts}).loc["NUTS"]
    assert np.isnan(row[["evaluations", "evaluations_percent", RATES[0]]].astype(float)).all()
    assert row["ess_bulk_per_second"] > 0


def test_deterministic_variables_count_by_default(adaptive_metropolis):
    everything = squared_jump_distance(adaptive_metropolis)
    parts = [squared_jump_distance(adaptive_metropolis, var_names=[v]) for v in ("x", "total")]
    assert everything == pytest.approx(sum(parts))


def test_real_compound_step():
    with pm.Model() as model:
        pm.Normal("x")
        pm.Normal("z")
        steps = [AdaptiveMetropolisStep([name], steps_per_draw=1) for name in ("x", "z")]
    result = sample(steps, model, draws=50, tune=50)
    row = efficiency_table({"compound": result}).loc["compound"]
    # Each step evaluates the current point again after the other one moved.
    assert 100 <= row["evaluations"] <= 200
    assert row["evaluations_percent"] == pytest.approx(row["evaluations"])
    assert 0 < row["acceptance"] <= 1


RESULT = made_result({"x": X})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *((partial(efficiency_table, no), TypeError, "take a mapping") for no in ([], None, "a")),
        (partial(efficiency_table, RESULT), TypeError, "take a mapping of names"),
        (partial(efficiency_table, {}), ValueError, "results is empty"),
        (partial(efficiency_table, {"a": {"x": X}}), TypeError, r"\['a'\] is of type dict"),
        (partial(squared_jump_distance, X), TypeError, "is of type ndarray"),
        (partial(of_one, var_names=["w"]), ValueError, "posterior of 'a' holds x; take some"),
        (partial(of_one, var_names=[]), ValueError, "take some"),
        (partial(of_one, steps_per_draw={"b": 2}), ValueError, "'b', which is none of the results"),
        (partial(of_one, steps_per_draw=0), ValueError, "steps_per_draw of 'a'"),
        (partial(of_one, seconds={"a": -1.0}), ValueError, "seconds of 'a'"),
        *(
            (partial(maximum_mean_discrepancy, np.zeros((5, 2)), second), ValueError, "sample")
            for second in (np.zeros(3), np.zeros((4, 3)), np.zeros((0, 2)))
        ),
    ],
)
def test_errors_teach(call, error, words):
    with pytest.raises(error, match=words):
        call()


# maximum mean discrepancy -------------------------------------------------------------------------


def test_discrepancy_of_a_linear_kernel_is_the_distance_of_the_means():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(50, 3)), rng.normal(1.0, 1.0, size=(70, 3))
    expected = np.linalg.norm(first.mean(axis=0) - second.mean(axis=0))
    found = maximum_mean_discrepancy(first, second, kernels.Linear())
    np.testing.assert_allclose(found, expected)


def test_discrepancy_of_a_polynomial_kernel_compares_moments():
    """(1 + x y)^3 has features 1, sqrt(3) x, sqrt(3) x^2, x^3; in blocks as at once."""
    rng = np.random.default_rng(2)
    first, second = rng.normal(size=(3000, 1)), rng.exponential(size=(2000, 1))
    moments = [
        np.array([np.sqrt(3) * x.mean(), np.sqrt(3) * (x**2).mean(), (x**3).mean()])
        for x in (first, second)
    ]
    found = maximum_mean_discrepancy(first, second, kernels.Polynomial(3))
    np.testing.assert_allclose(found, np.linalg.norm(moments[0] - moments[1]), rtol=1e-9)


def test_discrepancy_by_default_tells_samples_apart():
    rng = np.random.default_rng(3)
    same = rng.normal(size=(400, 2))
    assert maximum_mean_discrepancy(same, same) < 1e-7
    near = maximum_mean_discrepancy(same, rng.normal(size=(400, 2)))
    far = maximum_mean_discrepancy(same, 3 * rng.normal(size=(400, 2)))
    assert near < 0.1 < far
