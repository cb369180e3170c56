"""Fits from few values, or none: a surrogate that is finite, or none yet; never an error or NaN."""

import numpy as np
import pymc as pm
import pytest
from models import BlackBox, begin, drive, run
from scipy import linalg

from pymc_kameleon import GPSurrogate, KameleonStep, SurrogateHMCStep, surrogate_posterior
from pymc_kameleon.approximate.predicted_error import marginal_total_variation
from pymc_kameleon.gp.sparse_gp_fit import (
    TooFewValues,
    distinct,
    fit_sparse_gp,
    most_informative,
    typical_map,
)
from pymc_kameleon.gp.typical_set import (
    TypicalSet,
    around_the_mode,
    clipped_residuals,
    typical_set,
)
from pymc_kameleon.surrogate.acquisition import points_to_explore
from pymc_kameleon.surrogate.learner import TrajectoryLearner
from pymc_kameleon.surrogate.posterior_surrogate import surrogate_gradients, surrogate_values

pytestmark = pytest.mark.numerics

PLACES = {
    "anywhere": lambda x, rng: x,
    "on a line": lambda x, rng: np.outer(x[:, 0], x[0]),
    "repeated": lambda x, rng: x[rng.integers(len(x), size=len(x))],
    "at one point": lambda x, rng: np.tile(x[0], (len(x), 1)),
    "not told apart": lambda x, rng: 1.0 + 1e-13 * x,
    "one far away": lambda x, rng: x * np.where(np.arange(len(x)) == 0, 1e8, 1.0)[:, None],
}

HEIGHTS = {
    "a Gaussian": lambda v: v,
    "equal": lambda v: 0.0 * v + 3.0,
    "very low": lambda v: 1e6 * v,
    "one above a gap": lambda v: v - 1e5 * (np.arange(len(v)) > 0),
    "nearly equal": lambda v: 1e-10 * v,
    "convex": lambda v: -v,
}

N_CASES = 30


def evaluations(seed):
    """Points (n, d) in d = 1 to 10, of any scales, and values of which few are finite, or none."""
    rng = np.random.default_rng(seed)
    dim, n, n_finite = seed % 10 + 1, rng.choice([1, 2, 5, 30]), rng.choice([0, 1, 2, 3, 4, 8, 30])
    place, height = rng.choice(list(PLACES)), rng.choice(list(HEIGHTS))
    x = rng.standard_normal((n, dim)) * 10.0 ** rng.uniform(-6, 6, dim)
    points = PLACES[place](x, rng)
    z = (points - points.mean(axis=0)) / (points.std(axis=0) + 1e-300)
    values = HEIGHTS[height](-0.5 * np.sum(z**2, axis=1))
    values[rng.permutation(n)[n_finite:]] = rng.choice([-np.inf, np.nan])
    return points, values, rng


@pytest.mark.parametrize("seed", range(N_CASES // 2))
def test_a_surrogate_of_few_values_is_finite_or_there_is_none(seed, quick_fits):
    points, values, rng = evaluations(seed)
    learner = TrajectoryLearner(max_points=100).start(points[0], rng, 0.9)
    for point, value in zip(points, values, strict=True):
        learner.keep(point, np.array([value, 0.0, 0.0]))
    fitted = learner.fit(rng)
    if not np.isfinite(values).any():
        assert fitted is None
    if fitted is None:
        assert not learner.has_learnt
        return
    surrogate, drawn = learner.surrogate, np.ascontiguousarray(learner.fitted.population.T)
    for found in (
        surrogate.to_points(learner.fitted.population),
        surrogate_values(surrogate, drawn),
        surrogate_gradients(surrogate, drawn),
        points_to_explore(fitted, surrogate, 3),
        *learner.fitted.gp.mean,
    ):
        assert np.isfinite(found).all()


@pytest.mark.parametrize("seed", range(N_CASES))
def test_a_process_of_few_values_is_finite_or_says_how_many_it_takes(seed):
    points, values, _ = evaluations(seed)
    try:
        fitted = GPSurrogate().fit(points, values)
    except TooFewValues as error:
        assert "distinct points have a finite log-likelihood" in str(error)
    except linalg.LinAlgError:
        pass  # points that no jitter tells apart
    else:
        for part in fitted.predict(points, return_variance=True, return_gradient=True):
            assert np.isfinite(part).all()


@pytest.mark.parametrize("seed", range(N_CASES))
def test_parts_of_a_fit(seed):
    points, values, _ = evaluations(seed)
    chosen = most_informative(points, values, 5)
    assert len(chosen) <= 5 and np.isfinite(values[chosen]).all()
    if not np.isfinite(values).any():
        with pytest.raises(TooFewValues):
            fit_sparse_gp(points, values, around_the_mode(points, 0.0 * points[:, 0]), 10)
        return
    typical = typical_set(values, points.shape[1])
    assert np.any(typical.depths(values) < typical.depth)
    for part in (
        *around_the_mode(points, values),
        *clipped_residuals(values, np.zeros(len(values)), typical),
    ):
        assert np.isfinite(part).all()


@pytest.mark.parametrize("dim", [1, 2, 10])
def test_nothing_bends_where_there_is_nothing(dim):
    nothing = TypicalSet(10.0, 1.0)  # far above all values
    assert typical_map(np.zeros((dim, 5)), np.zeros(5), nothing).mapped.size == 0
    rng = np.random.default_rng(1)
    points = rng.standard_normal((8, dim))
    values = -0.5 * np.sum(points**2, axis=1)
    coordinates = around_the_mode(points, values)
    gp, _ = fit_sparse_gp(points, values, coordinates, 10, typical=nothing)
    expected, _ = fit_sparse_gp(points, values, coordinates, 10)
    np.testing.assert_array_equal(gp.weights, expected.weights)


def test_of_a_point_evaluated_twice_the_finite_value_counts():
    points = np.array([[0.0], [1.0], [0.0], [1.0], [2.0]])
    values = np.array([-1.0, -2.0, -np.inf, -3.0, np.nan])
    np.testing.assert_array_equal(distinct(points, values), [0, 3, 4])


# steps --------------------------------------------------------------------------------------------


def moons(t, at=(-0.64, 0.16)):
    """Log density of sbibm's two moons, which is there in a thin crescent for each sign of t1 + t2.

    x = (r cos a + 1/4, r sin a) + (-|t1 + t2|, t2 - t1) / sqrt(2), where r is N(0.1, 0.01) and a
    uniform between -pi / 2 and pi / 2.
    """
    x, y = np.array(at) - np.array([-abs(t[0] + t[1]), t[1] - t[0]]) / np.sqrt(2.0)
    r = np.hypot(x - 0.25, y)
    if x < 0.25:
        return -np.inf
    return -0.5 * ((r - 0.1) / 0.01) ** 2 - np.log(np.pi * r * 0.01 * np.sqrt(2.0 * np.pi))


def within(log_density, dim=2):
    """A model of a uniform prior with a black box."""
    with pm.Model() as model:
        t = pm.Uniform("t", -1.0, 1.0, shape=dim)
        pm.Potential("likelihood", BlackBox(log_density)(t))
    return model


def natural(points):
    return 2.0 / (1.0 + np.exp(-np.asarray(points))) - 1.0


@pytest.mark.parametrize("seed", [1, 2])
def test_two_moons(seed, quick_fits):
    """All draws are on a moon, within 6 standard deviations of its radius: height 4.8 - 18.

    The default start is between the moons, where there is no density.
    """
    model = within(moons)
    draws, statistics, _ = run(SurrogateHMCStep(model=model), model, 160, tune=80, seed=seed)
    assert min(moons(t) for t in natural(draws[80:])) > -14.0
    assert np.isfinite([s["step_size"] for s in statistics]).all()


def test_an_impossible_start_is_learnt_as_impossible():
    model = within(moons)
    step = begin(SurrogateHMCStep(model=model), 2, tune=50)
    drive(step, model.initial_point(), 1, tune=50)
    points, values, _ = step.learner.known()
    at_start = np.all(points == step.target.default_start, axis=1)
    assert at_start.any() and np.all(values[at_start] == -np.inf)


@pytest.mark.parametrize(("dim", "width"), [(1, 1e-30), (3, 0.3)])
def test_few_points_have_a_density(dim, width, quick_fits):
    """Those within a ball around the default start, or that alone: then the chain says so."""
    model = within(lambda t: -np.sum(t**2) if np.sum(t**2) <= width**2 else -np.inf, dim)
    with np.errstate(all="raise", under="ignore"):
        step = SurrogateHMCStep(model=model)
        draws, statistics, _ = run(step, model, 150, tune=60, seed=dim)
    assert np.all(np.sum(natural(draws) ** 2, axis=1) <= width**2)
    told = " ".join(s["warning"].message for s in statistics if "warning" in s)
    assert len(np.unique(draws[60:], axis=0)) > 5 or told


def test_an_approximation_without_a_density():
    model = within(lambda t: -np.inf)
    with pytest.raises(Exception, match="density"):
        surrogate_posterior(model, n_evaluations=60, random_seed=1, progressbar=False, draws=50)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_distance_to_draws_at_one_point(share):
    """Of a surrogate of one point with a density."""
    draws = np.where(np.arange(8) < 8 * share, 1.0, 2.0)[:, None]
    assert marginal_total_variation(draws, np.full((9, 1), 2.0)) == share


@pytest.mark.parametrize(
    ("error", "is_told"), [(ValueError("a bug"), True), (TooFewValues("too few"), False)]
)
def test_only_what_a_fit_may_lack_closes_a_first_stage(error, is_told, monkeypatch):
    def fit_into(*arguments, **options):
        raise error

    monkeypatch.setattr(GPSurrogate, "fit_into", fit_into)
    model = within(lambda t: -np.sum(t**2))
    step = KameleonStep(model=model, surrogate=GPSurrogate(), steps_per_draw=5)
    if is_told:
        with pytest.raises(ValueError, match="a bug"):
            run(step, model, 20, tune=20)
    else:
        run(step, model, 20, tune=20)
        assert not step.stage.is_open[0]
