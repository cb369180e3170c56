"""What the pictures of steps and results show, read back from the axes."""

import arviz as az
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm
import pytest
from models import begin, drive, sample
from scipy.stats import chi2

from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep, SurrogateHMCStep
from pymc_kameleon.gp.typical_set import typical_depth
from pymc_kameleon.plots import (
    plot_adaptation,
    plot_efficiency,
    plot_proposals,
    plot_surrogate,
)
from pymc_kameleon.plots.surrogate import implied_acceptance
from pymc_kameleon.surrogate.posterior_surrogate import predicted
from pymc_kameleon.targets import Banana

COVARIANCE = np.array([[4.0, 1.5, 0.2], [1.5, 2.0, -0.3], [0.2, -0.3, 0.5]])
SEED = 3


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def gaussian_model(dim):
    with pm.Model() as model:
        pm.Normal("x", shape=dim)
    return model


def fixed_step(dim):
    """A step whose proposal is known: N(x, COVARIANCE) everywhere."""
    points = np.random.default_rng(SEED).normal(size=(300, dim))
    with gaussian_model(dim):
        return AdaptiveMetropolisStep(
            covariance=COVARIANCE[:dim, :dim], covariance_scaling=1.0, warm_start=points
        )


@pytest.fixture(scope="module")
def flat_step():
    return fixed_step(2)


@pytest.fixture(scope="module")
def solid_step():
    return fixed_step(3)


@pytest.fixture(scope="module")
def banana_step():
    banana = Banana(0.1, dim=2)
    with banana.model():
        return KameleonStep(warm_start=banana.draw(500, np.random.default_rng(SEED)))


def contours(ax):
    return [line.get_xydata() for line in ax.lines if line.get_linestyle() == "-"]


def centres(ax):
    (markers,) = [line for line in ax.lines if line.get_marker() == "o"]
    return markers.get_xydata()


def assert_contours(ax, centre_of_each, covariances, level):
    for contour, centre, covariance in zip(contours(ax), centre_of_each, covariances, strict=True):
        away = contour - centre
        radii = np.einsum("ni,ij,nj->n", away, np.linalg.inv(covariance), away)
        np.testing.assert_allclose(radii, chi2.ppf(level, 2), rtol=1e-9)
        np.testing.assert_allclose(contour[0], contour[-1], atol=1e-9)
        angles = np.unwrap(np.arctan2(*away.T))
        assert abs(angles[-1] - angles[0]) == pytest.approx(2 * np.pi)


@pytest.mark.parametrize(
    ("variables", "level"), [((2, 0), 0.5), (("x[1]", "x[2]"), 0.95), (["x[2]", 1], 0.95)]
)
def test_contours_are_those_of_the_marginal_covariance(solid_step, variables, level):
    points = np.array([[0.0, 1.0, 2.0], [-3.0, 0.5, 0.25]])
    ax = plot_proposals(solid_step, points, variables=variables, level=level)
    pair = [int(v.strip("x[]")) if isinstance(v, str) else v for v in variables]
    np.testing.assert_array_equal(centres(ax), points[:, pair])
    assert_contours(ax, points[:, pair], [COVARIANCE[np.ix_(pair, pair)]] * 2, level)
    assert (ax.get_xlabel(), ax.get_ylabel()) == tuple(f"x[{i}]" for i in pair)
    alone = plot_proposals(solid_step, points[0], variables=variables, level=level)
    np.testing.assert_array_equal(centres(alone), points[:1, pair])


@pytest.mark.numerics
def test_contours_of_a_local_proposal_differ_from_place_to_place(banana_step):
    points = np.array([[-15.0, 12.5], [0.0, -10.0], [15.0, 12.5]])
    covariances = banana_step.proposal_covariance(points)
    assert_contours(plot_proposals(banana_step, points), points, covariances, 0.95)
    assert covariances[0, 0, 1] < 0 < covariances[2, 0, 1]


@pytest.mark.numerics
def test_default_places_are_spread_over_the_history(banana_step):
    first, again = (centres(plot_proposals(banana_step)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(first) == 8
    rows = {tuple(row) for row in banana_step.warm.points}
    assert all(tuple(place) in rows for place in first)
    gaps = np.linalg.norm(first[:, None] - first, axis=-1)[np.triu_indices(8, 1)]
    assert gaps.min() > 3
    assert np.ptp(first[:, 0]) > 20
    assert len(centres(plot_proposals(banana_step, n_points=3))) == 3
    with gaussian_model(2):  # no more than there are points
        step = KameleonStep(warm_start=[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert len(centres(plot_proposals(step, n_points=8))) == 3


def heights(ax):
    (mesh,) = ax.collections
    return mesh.get_coordinates(), mesh.get_array()


@pytest.mark.numerics
@pytest.mark.parametrize("variables", [(0, 1), (1, 0)])
def test_density_of_two_coordinates_is_that_of_the_model(banana_step, variables):
    before = banana_step.target.n_evaluations
    ax = plot_proposals(banana_step, variables=variables, grid_size=30)
    places, found = heights(ax)
    assert found.shape == (30, 30)
    expected = Banana(0.1, dim=2).log_density(places[..., list(variables)])
    np.testing.assert_allclose(found, np.exp(expected - expected.max()), rtol=1e-6, atol=1e-12)
    assert banana_step.target.n_evaluations == before


def test_density_of_more_coordinates_is_a_histogram_of_the_history(solid_step):
    places, found = heights(plot_proposals(solid_step, grid_size=60))
    assert found.max() == pytest.approx(1)
    centre = np.sum(places * found[..., None], axis=(0, 1)) / found.sum()
    np.testing.assert_allclose(centre, solid_step.warm.points.mean(axis=0)[:2], atol=0.1)


def test_density_of_ones_own(flat_step):
    for density, expected in (
        (lambda x: -((x[:, 0] - 2 * x[:, 1]) ** 2), lambda x, y: np.exp(-((x - 2 * y) ** 2))),
        (lambda x: np.where(x[:, 0] > 0, 0.0, np.nan), lambda x, y: (x > 0) * 1.0),
        (lambda x: np.full(len(x), -np.inf), lambda x, y: np.zeros_like(x)),
    ):
        places, found = heights(plot_proposals(flat_step, density=density, grid_size=20))
        height = expected(places[..., 0], places[..., 1])
        np.testing.assert_allclose(found, height / max(height.max(), 1e-9), rtol=1e-9)


@pytest.mark.numerics
def test_overlay_takes_another_color_and_both_names(flat_step, banana_step):
    ax = plot_proposals(banana_step, label="one")
    limits, drawn = ax.get_xlabel(), len(ax.lines)
    bare = {"density": None, "show_history": False}
    assert plot_proposals(flat_step, [[0.0, 0.0]], **bare, ax=ax, label="other") is ax
    assert len(ax.lines) == drawn + 2
    assert len(ax.collections) == 1
    assert ax.get_xlabel() == limits
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "other"]
    colors = [line.get_color() for line in ax.lines if line.get_linestyle() == "-"]
    assert len(set(colors[:-1])) == 1
    assert colors[-1] != colors[0]
    ax = plot_proposals(flat_step, **bare, color="red", n_points=2)
    assert len(ax.lines) == 3
    assert not ax.collections
    assert ax.get_legend() is None
    assert {line.get_color() for line in ax.lines} == {"red"}


@pytest.mark.numerics
def test_equal_aspect_only_for_like_ranges(flat_step):
    assert plot_proposals(flat_step).get_aspect() == 1
    with gaussian_model(2):
        unlike = KameleonStep(warm_start=flat_step.warm.points * [1.0, 100.0])
    assert plot_proposals(unlike).get_aspect() == "auto"


def test_after_sampling_a_model_with_a_transform():
    with pm.Model(coords={"group": ["a", "b"]}) as model:
        pm.HalfNormal("rate")
        pm.Normal("effect", dims="group")
    with model:
        step = KameleonStep(steps_per_draw=10)
        with pytest.raises(RuntimeError, match="warm_start"):
            plot_proposals(step)
        idata = sample(step, draws=20, tune=100)
        warm = KameleonStep(warm_start=idata)
    for variables in [(0, 2), ("rate", "effect[1]"), ("rate_log__", 2)]:
        ax = plot_proposals(step, variables=variables)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("rate (log)", "effect[1]")
        assert len(contours(ax)) == 8
    assert len(contours(plot_proposals(warm))) == 8
    with pytest.raises(ValueError, match=r"'effect'.*effect\[0\], effect\[1\]"):
        plot_proposals(step, variables=("rate", "effect"))
    model = gaussian_model(2)
    step = AdaptiveMetropolisStep(model=model)
    sample(step, model, draws=5, tune=300)
    with pytest.raises(ValueError, match="pass points"):
        plot_proposals(step)
    assert len(contours(plot_proposals(step, [[0.0, 0.0], [1.0, 1.0]]))) == 2


# the surrogate ------------------------------------------------------------------------------------


def learnt(model, tune=120):
    step = SurrogateHMCStep(model=model)
    begin(step, SEED, tune=tune)
    drive(step, model.initial_point(), tune, tune=tune)
    step.stop_tuning()
    return step


@pytest.fixture(scope="module")
def surrogate_step():
    with pm.Model() as model:
        rate = pm.HalfNormal("rate")
        x = pm.Normal("x", shape=2)
        pm.Potential("bend", -4.0 * (x[1] - x[0] ** 2) ** 2 - 0.5 * rate)
    return learnt(model)


def result(groups):
    """Return a result of the type that this generation of ArviZ has."""
    if int(az.__version__[0]) >= 1:
        return az.from_dict(groups, save_warmup=True)
    return az.from_dict(**groups, save_warmup=True)


@pytest.fixture(scope="module")
def surrogate_result():
    rng = np.random.default_rng(SEED)
    errors = rng.normal(scale=0.1, size=(2, 50))
    errors[0, :4] = [np.nan, -np.inf, 3.0, -500.0]
    return result(
        {
            "posterior": {"x": rng.normal(size=(2, 50))},
            "sample_stats": {"surrogate_error": errors, "accept": np.full((2, 50), 0.75)},
        }
    )


@pytest.mark.numerics
def test_predictions_are_those_of_all_evaluations(surrogate_step):
    left, _ = plot_surrogate(surrogate_step)
    points, values, _ = surrogate_step.learner.known()
    true = values - values.max()
    is_typical = true > -typical_depth(3)
    (dots,) = left.collections
    found = predicted(surrogate_step.learner.surrogate, points) - values.max()
    edge = left.get_xlim()[0]
    expected = np.column_stack([np.maximum(found, edge), true])[is_typical]
    np.testing.assert_allclose(dots.get_offsets(), expected)
    np.testing.assert_array_equal(dots.get_array(), np.flatnonzero(is_typical) + 1)
    (lower,) = [line for line in left.lines if line.get_marker() == "v"]
    assert len(lower.get_xdata()) == np.sum(~is_typical) > 0
    assert set(lower.get_ydata()) == {left.get_ylim()[0]} == {edge}
    (text,) = left.texts
    assert f"{len(values)} evaluations, {is_typical.sum()} typical" in text.get_text()


@pytest.mark.numerics
def test_contours_of_two_coordinates_are_those_of_the_surrogate():
    """And an evaluation that it misjudges is marked."""
    step = learnt(gaussian_model(2))
    for variables in [(0, 1), (1, 0)]:
        drawn = contour_paths(plot_surrogate(step, variables=variables)[1])[:, list(variables)]
        radii = np.sum(drawn**2, axis=1)
        expected = chi2.ppf([0.5, 0.95], 2)
        off = np.abs(radii[:, None] - expected).min(axis=1)
        assert np.median(off) < 0.3
        assert {int(np.argmin(np.abs(r - expected))) for r in radii} == {0, 1}
    step.learner.fitted.gp.mean.linear[:] += 40.0
    left, _ = plot_surrogate(step)
    (marked,) = [line for line in left.lines if line.get_marker() == "<"]
    assert set(marked.get_xdata()) == {left.get_xlim()[0]}
    assert np.all(marked.get_ydata() > -typical_depth(2))


@pytest.mark.numerics
def test_evaluations_are_drawn_where_they_were(surrogate_step):
    names = ["rate (log)", "x[0]", "x[1]"]
    for variables, pair in ((("rate", "x[1]"), [0, 2]), ((2, 0), [2, 0]), (None, [1, 2])):
        _, right = plot_surrogate(surrogate_step, variables=variables)
        assert [right.get_xlabel(), right.get_ylabel()] == [names[i] for i in pair]
        points, values, _ = surrogate_step.learner.known()
        is_typical = values > values.max() - typical_depth(3)
        dots = next(c for c in right.collections if len(c.get_offsets()) == is_typical.sum())
        np.testing.assert_array_equal(dots.get_offsets(), points[is_typical][:, pair])
        (others,) = right.lines
        np.testing.assert_array_equal(others.get_xydata(), points[~is_typical][:, pair])


def contour_paths(ax):
    found = [c for c in ax.collections if len(c.get_offsets()) < 2 and c.get_linewidth()[0] < 2]
    paths = [path.vertices for c in found for path in c.get_paths() if len(path.vertices)]
    return np.concatenate(paths)


@pytest.mark.numerics
def test_a_single_coordinate_is_drawn_against_the_log_density():
    step = learnt(gaussian_model(1))
    _, right = plot_surrogate(step)
    assert (right.get_xlabel(), right.get_ylabel()) == ("x[0]", "log density - largest")
    (line,) = right.lines
    x, y = line.get_xydata().T
    near = np.abs(x) < 2
    np.testing.assert_allclose(y[near], -0.5 * x[near] ** 2, atol=0.15)
    with pytest.raises(ValueError, match=r"moves only x\[0\]"):
        plot_surrogate(step, variables=(0, 1))


def test_errors_are_drawn_by_chain(surrogate_result):
    left, right = plot_surrogate(surrogate_result)
    errors = np.asarray(surrogate_result["sample_stats"]["surrogate_error"])
    lines = [line for line in left.lines if line.get_marker() == "."]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["chain 0", "chain 1"]
    for line, values in zip(lines, errors, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(50))
        np.testing.assert_array_equal(line.get_ydata(), np.clip(values, -100, 100))
    assert left.get_ylim()[0] < -100
    for patch, values in zip(right.patches[-2:], errors, strict=True):
        heights, edges, _ = patch.get_data()
        assert heights.sum() == pytest.approx(1)
        known = np.clip(values[~np.isnan(values)], -100, 100)
        np.testing.assert_allclose(heights, np.histogram(known, edges)[0] / len(known))
    assert "mean of accept 0.75" in right.texts[0].get_text()


def test_draws_of_tuning_are_left_of_the_others():
    groups = {
        "posterior": {"x": np.zeros((1, 10))},
        "sample_stats": {"surrogate_error": np.zeros((1, 10))},
        "warmup_sample_stats": {"surrogate_error": np.ones((1, 5))},
    }
    left, right = plot_surrogate(result(groups))
    (dots,) = [line for line in left.lines if line.get_marker() == "."]
    np.testing.assert_array_equal(dots.get_xdata(), np.arange(-5, 10))
    np.testing.assert_array_equal(dots.get_ydata(), [1.0] * 5 + [0.0] * 10)
    assert right.texts[0].get_text() == "implied acceptance 1.00"


def test_implied_acceptance_is_that_of_independent_proposals():
    rng = np.random.default_rng(SEED)
    errors = np.append(rng.normal(size=30), -np.inf)
    weights = np.exp(errors)
    expected = np.minimum.outer(weights, weights).sum() / (31 * weights.sum())
    assert implied_acceptance(errors) == pytest.approx(expected)
    assert implied_acceptance(np.full(7, 3.0)) == pytest.approx(1)


@pytest.mark.numerics
def test_axes_of_ones_own(surrogate_step, surrogate_result):
    figure, axes = plt.subplots(2, 2)
    for row, source in zip(axes, (surrogate_step, surrogate_result), strict=True):
        found = plot_surrogate(source, axes=row)
        assert list(found) == list(row)
        assert all(ax.has_data() for ax in row)
    assert plt.get_fignums() == [figure.number]


def test_the_result_of_sampling_has_all_it_takes():
    model = gaussian_model(2)
    step = SurrogateHMCStep(model=model)
    options = {"draws": 30, "tune": 60, "chains": 2, "discard_tuned_samples": False}
    idata = sample(step, model, **options)
    assert min(plot_surrogate(idata)[0].lines[-2].get_xdata()) == -60
    assert plot_surrogate(step)[1].get_xlabel() == "x[0]"


# adaptation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[KameleonStep], [KameleonStep, AdaptiveMetropolisStep]])
def test_the_scaling_of_every_draw_is_drawn(steps):
    with pm.Model() as model:
        variables = [pm.Normal(name, shape=2) for name in "xy"[: len(steps)]]
        made = [step([variable]) for step, variable in zip(steps, variables, strict=True)]
    options = {"chains": 2, "draws": 60, "tune": 40, "random_seed": SEED}
    idata = sample(made, model, **options, discard_tuned_samples=False)
    left, right = plot_adaptation(idata)
    parts = [np.asarray(idata[g]["scaling"]) for g in ("warmup_sample_stats", "sample_stats")]
    expected = np.concatenate(parts, axis=1).reshape(2, 100, -1)
    lines = [line for line in left.lines if len(line.get_xdata()) == 100]
    assert len(lines) == 2 * len(steps)
    for line, (chain, part) in zip(lines, np.ndindex(2, len(steps)), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(-40, 60))
        np.testing.assert_array_equal(line.get_ydata(), expected[chain, :, part])
    accept = np.asarray(idata["sample_stats"]["accept"]).reshape(2, 60, -1)
    means = next(line for line in right.lines if len(line.get_xdata()) == 50)
    np.testing.assert_allclose(means.get_ydata()[-30:], accept[0, :, 0].reshape(30, 2).mean(axis=1))
    assert left.get_yscale() == "log" and left.get_ylabel() == "scaling"
    # Without draws of tuning there is what was learnt; on axes of one's own.
    _, axes = plt.subplots(1, 2)
    without = {name: idata[name] for name in ("posterior", "sample_stats")}
    left, _ = plot_adaptation(result({k: dict(v.data_vars) for k, v in without.items()}), axes=axes)
    assert left is axes[0]
    lines = [line for line in left.lines if len(line.get_xdata()) == 60]
    assert len(lines) == 2 * len(steps) and all(np.ptp(line.get_ydata()) == 0 for line in lines)


# efficiency ---------------------------------------------------------------------------------------

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
    plt.close("all")
    figure, ax = plt.subplots()
    assert plot_efficiency(TABLE, styles={"a": {"color": "red", "linewidth": 3.0}}, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    other, named = ax.lines
    assert (named.get_color(), named.get_linewidth()) == ("red", 3.0)
    assert other.get_color() != "red"


def test_repetitions_of_a_budget_are_drawn_as_medians():
    columns = {
        "budget": [100, 100, 100, 1000],
        "evaluations": [110, 90, 130, 999],
        "error": [0.5, 0.9, 0.7, 0.1],
    }
    table = pd.DataFrame({"sampler": "a"} | columns)
    assert drawn(plot_efficiency(table)) == {"a": [[110, 0.7], [999, 0.1]]}


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
    """The reference may be a result, too."""
    by_values = drawn(plot_efficiency({"a": some_result(tuning)}, REFERENCE))
    points = np.array(by_values["a"])
    means = VALUES.mean(axis=0).cumsum(axis=0) / np.arange(1, 31)[:, None]
    expected = np.sqrt((((means - CENTRE) / SCALE) ** 2).mean(axis=1))
    draws = ((points[:, 0] - 60 * tuning) / 10).astype(int)
    assert (draws[0], draws[-1]) == (1, 30)
    np.testing.assert_allclose(points[:, 1], expected[draws - 1])
    reference = result({"posterior": {"x": REFERENCE["x"][None]}})
    assert drawn(plot_efficiency({"a": some_result(tuning)}, reference)) == by_values


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


# refusals -----------------------------------------------------------------------------------------


def proposals(**arguments):
    return lambda fixture: plot_proposals(fixture("solid_step"), **arguments)


def surrogate(**arguments):
    return lambda fixture: plot_surrogate(fixture("surrogate_step"), **arguments)


def of_step(picture, step_class, dim, **options):
    return lambda _: picture(step_class(model=gaussian_model(dim), **options))


def errors_of(**statistics):
    posterior = {"x": np.zeros((1, 10))}
    return lambda _: plot_surrogate(result({"posterior": posterior, "sample_stats": statistics}))


def efficiency(runs, reference=None):
    return lambda fixture: plot_efficiency(runs, reference)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (proposals(points=np.zeros((4, 2))), ValueError, r"points has shape \(4, 2\).*\(k, 3\)"),
        (proposals(points=np.zeros((0, 3))), ValueError, r"points has shape \(0, 3\)"),
        (proposals(points=np.full((1, 3), np.nan)), ValueError, "points has NaN"),
        (proposals(points="abc"), TypeError, "points='abc'"),
        (proposals(variables=(0, 3)), ValueError, "no coordinate 3; take 0 to 2"),
        (proposals(variables=(0, -1)), ValueError, "variables=-1"),
        (proposals(variables=(0, "y")), ValueError, r"no coordinate 'y'; there are x\[0\]"),
        (proposals(variables=("x[1]", 1)), ValueError, "two different"),
        (proposals(variables=(0, 1, 2)), ValueError, "two different"),
        (proposals(variables="x"), TypeError, "take a pair"),
        (proposals(level=95), ValueError, "level=95"),
        (proposals(level=1.0), ValueError, "level=1.0"),
        (proposals(n_points=0), ValueError, "n_points=0"),
        (proposals(grid_size=1), ValueError, "grid_size=1"),
        (proposals(density="kde"), ValueError, "density='kde'"),
        (proposals(density=3), TypeError, "density=3"),
        (of_step(plot_proposals, KameleonStep, 1), ValueError, r"moves only x\[0\]"),
        (of_step(plot_proposals, pm.Metropolis, 2), TypeError, "take a step of pymc_kameleon"),
        (surrogate(variables=("x[0]", "y")), ValueError, "no coordinate 'y'"),
        (surrogate(variables=(1, 1)), ValueError, "two different"),
        (surrogate(variables=1), TypeError, "take a pair"),
        (surrogate(axes=3), TypeError, "take a pair"),
        (of_step(plot_surrogate, SurrogateHMCStep, 2), RuntimeError, "has learnt nothing"),
        (of_step(plot_surrogate, pm.Metropolis, 2), TypeError, "source is of type Metropolis"),
        (
            lambda fixture: plot_surrogate(fixture("surrogate_result"), variables=(0, 1)),
            ValueError,
            "a result has none to choose",
        ),
        (errors_of(accept=np.ones((1, 10))), ValueError, "no statistic 'surrogate_error'"),
        (errors_of(surrogate_error=np.full((1, 10), np.nan)), ValueError, "NaN in all draws"),
        (lambda fixture: plot_adaptation(fixture("surrogate_result")), ValueError, "step_size"),
        (lambda _: plot_adaptation([1.0]), TypeError, "what pm"),
        (efficiency(TABLE[["sampler", "error"]]), ValueError, "no column evaluations"),
        (efficiency(TABLE[:0]), ValueError, "runs is empty"),
        (efficiency(TABLE.assign(error=[0.1, 0.0, 1, 1, 1])), ValueError, r"runs\['error'\] has 0"),
        (
            efficiency(TABLE.assign(evaluations=np.nan)),
            ValueError,
            r"runs\['evaluations'\] has nan",
        ),
        (efficiency([1.0]), TypeError, "runs is of type list"),
        (efficiency({"a": 1.0}, REFERENCE), TypeError, r"runs\['a'\] is of type float"),
        (efficiency({}, REFERENCE), ValueError, "runs is empty"),
        (efficiency({"a": some_result()}), TypeError, "reference=None"),
        (efficiency({"a": some_result()}, {"z": [1.0]}), ValueError, r"runs\['a'\] has none"),
        (
            efficiency({"a": some_result()}, {"x": np.zeros((5, 2))}),
            ValueError,
            r"reference\['x'\].*\(2,\)",
        ),
        (
            efficiency({"a": result({"posterior": {"x": VALUES}})}, REFERENCE),
            ValueError,
            "'n_evals'",
        ),
    ],
)
def test_refusals(request, call, error, match):
    with pytest.raises(error, match=match):
        call(request.getfixturevalue)
    assert not plt.get_fignums()
