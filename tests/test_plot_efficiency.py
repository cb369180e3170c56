"""What the picture of errors against evaluations shows, read back from the axes."""

import arviz as az
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm
import pytest
from models import sample

from pymc_kameleon import AdaptiveMetropolisStep
from pymc_kameleon.plots import plot_efficiency


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


TABLE = pd.DataFrame(
    {
        "sampler": ["b", "a", "b", "a", "a"],
        "evaluations": [300, 1000, 100, 2000, 500],
        "error": [0.1, 0.2, 0.5, 0.05, 0.4],
    }
)


def drawn(ax):
    """Points of each line by its label."""
    return {line.get_label(): line.get_xydata().tolist() for line in ax.lines}


def result(groups):
    """Return a result of the type that this generation of ArviZ has."""
    if int(az.__version__[0]) >= 1:
        return az.from_dict(groups, save_warmup=True)
    return az.from_dict(**groups, save_warmup=True)


def test_a_line_a_sampler_in_the_order_of_evaluations():
    ax = plot_efficiency(TABLE)
    assert drawn(ax) == {
        "b": [[100, 0.5], [300, 0.1]],
        "a": [[500, 0.4], [1000, 0.2], [2000, 0.05]],
    }
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["b", "a"]
    first, second = ax.lines
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()


def test_repetitions_of_a_budget_are_drawn_as_medians():
    table = pd.DataFrame(
        {
            "sampler": "a",
            "budget": [100, 100, 100, 1000],
            "evaluations": [110, 90, 130, 999],
            "error": [0.5, 0.9, 0.7, 0.1],
        }
    )
    assert drawn(plot_efficiency(table)) == {"a": [[110, 0.7], [999, 0.1]]}


def test_axes_and_styles_of_ones_own():
    figure, ax = plt.subplots()
    assert plot_efficiency(TABLE, styles={"a": {"color": "red", "linewidth": 3.0}}, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    other, named = ax.lines
    assert (named.get_color(), named.get_linewidth()) == ("red", 3.0)
    assert other.get_color() != "red"


VALUES = np.random.default_rng(1).normal(size=(2, 30, 3))
CENTRE, SCALE = 0.5, 2.0
REFERENCE = {"x": CENTRE + SCALE * np.array([[1.0] * 3, [-1.0] * 3]), "not in the result": [1.0]}
STEPS = {"n_steps": np.full((2, 30), 7.0)}


def some_result(tuning=True):
    groups = {
        "posterior": {"x": VALUES, "y": np.zeros((2, 30))},
        "sample_stats": {"n_evals": np.full((2, 30), 5.0)},
    }
    if tuning:
        groups["warmup_sample_stats"] = {"n_evals": np.full((2, 10), 3.0)}
    return result(groups)


@pytest.mark.parametrize("tuning", [True, False])
def test_errors_of_a_result_are_those_of_running_means(tuning):
    points = np.array(drawn(plot_efficiency({"a": some_result(tuning)}, REFERENCE))["a"])
    means = VALUES.mean(axis=0).cumsum(axis=0) / np.arange(1, 31)[:, None]
    expected = np.sqrt((((means - CENTRE) / SCALE) ** 2).mean(axis=1))
    draws = ((points[:, 0] - 60 * tuning) / 10).astype(int)
    assert (draws[0], draws[-1]) == (1, 30)
    np.testing.assert_allclose(points[:, 1], expected[draws - 1])


def test_a_result_is_a_reference_too():
    reference = result({"posterior": {"x": REFERENCE["x"][None]}})
    by_result = plot_efficiency({"a": some_result()}, reference)
    assert drawn(by_result) == drawn(plot_efficiency({"a": some_result()}, REFERENCE))


def test_another_statistic_counts():
    runs = {"a": some_result(), "b": result({"posterior": {"x": VALUES}, "sample_stats": STEPS})}
    with pytest.raises(ValueError, match=r"runs\['b'\] has no statistic 'n_evals'"):
        plot_efficiency(runs, REFERENCE)
    with pytest.raises(ValueError, match="evaluations names 'c'"):
        plot_efficiency(runs, REFERENCE, evaluations={"c": "n_steps"})
    points = drawn(plot_efficiency(runs, REFERENCE, evaluations={"b": "n_steps"}))
    assert (points["a"][0][0], points["b"][0][0]) == (70, 14)


def test_results_of_sampling():
    with pm.Model() as model:
        pm.Normal("x", shape=2)
    options = {"draws": 40, "tune": 20, "chains": 2, "discard_tuned_samples": False}
    idata = sample(AdaptiveMetropolisStep(model=model), model, **options)
    ax = plot_efficiency({"first": idata, "again": idata}, idata)
    assert drawn(ax)["first"] == drawn(ax)["again"]
    parts = [idata[f"{when}sample_stats"]["n_evals"].values for when in ("warmup_", "")]
    assert drawn(ax)["first"][-2][0] < sum(part.sum() for part in parts)
    assert drawn(ax)["first"][0][0] == parts[0].sum() + parts[1][:, 0].sum()


@pytest.mark.parametrize(
    ("runs", "reference", "error", "match"),
    [
        (TABLE[["sampler", "error"]], None, ValueError, "no column evaluations"),
        (TABLE[:0], None, ValueError, "runs is empty"),
        (TABLE.assign(error=[0.1, 0.0, 1, 1, 1]), None, ValueError, r"runs\['error'\] has 0"),
        (TABLE.assign(evaluations=np.nan), None, ValueError, r"runs\['evaluations'\] has nan"),
        ([1.0], None, TypeError, "runs is of type list"),
        ({"a": 1.0}, REFERENCE, TypeError, r"runs\['a'\] is of type float"),
        ({}, REFERENCE, ValueError, "runs is empty"),
        ({"a": some_result()}, None, TypeError, "reference=None"),
        ({"a": some_result()}, {"z": [1.0]}, ValueError, r"runs\['a'\] has none"),
        ({"a": some_result()}, {"x": np.zeros((5, 2))}, ValueError, r"reference\['x'\].*\(2,\)"),
        ({"a": result({"posterior": {"x": VALUES}})}, REFERENCE, ValueError, "'n_evals'"),
    ],
)
def test_bad_arguments(runs, reference, error, match):
    with pytest.raises(error, match=match):
        plot_efficiency(runs, reference)
    assert not plt.get_fignums()
