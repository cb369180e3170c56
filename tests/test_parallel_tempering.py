"""Parallel tempering: exact on the product of all temperatures, and what it learns."""

from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import begin, drive, run
from scipy import stats

from pymc_kameleon.adaptation.ladder import equal_rejections
from pymc_kameleon.evidence import from_draws as evidence
from pymc_kameleon.mcmc import loop
from pymc_kameleon.mcmc.proposals import tempering
from pymc_kameleon.mcmc.proposals.trends import fit_trends, picks, propose_along
from pymc_kameleon.plots import plot_tempering
from pymc_kameleon.steps import parallel_tempering
from pymc_kameleon.steps.parallel_tempering import ParallelTemperingStep

pytestmark = pytest.mark.numerics

BOUND = 1e-6
"""Null probability of a p-value below it."""


def with_prior(log_likelihood):
    """N(0, 2^2) in two dimensions, times a likelihood."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 2.0, shape=2)
        pm.Potential("likelihood", log_likelihood(x))
    return model


def symbolic_banana(x):
    return -0.5 * ((x[1] + 0.5 * x[0] ** 2 - 1.0) ** 2 / 0.3)


def symbolic_funnel(x):
    return -0.5 * x[1] ** 2 * pt.exp(-0.6 * x[0]) - 0.3 * x[0] + x[1] ** 2 / 8.0


def symbolic_two_modes(x):
    distances = [((x - c) ** 2).sum() / 0.2 for c in (1.5, -1.5)]
    return pm.math.logaddexp(*(-0.5 * d for d in distances))


def flat():
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("likelihood", symbolic_banana(x) - 0.5 * (x[0] / 2.0) ** 2)
    return model


MODELS = {
    "funnel": lambda: with_prior(symbolic_funnel),
    "two modes": lambda: with_prior(symbolic_two_modes),
    "improper": flat,
}


def frozen(model, **options):
    """Return a step that has tuned, and a point."""
    step = ParallelTemperingStep(
        model=model, rng=1, steps_per_draw=3, n_temperatures=4, disperse=False, **options
    )
    _, _, point = drive(step, model.initial_point(), 500, tune=-1)
    step.stop_tuning()
    return step, point


class Tempered:
    """Draws of all temperatures of a frozen step, from the terms of its density on a grid.

    Uniform within a cell, whose width is a fortieth of the narrowest feature or less.
    """

    def __init__(self, step, half_width, rng):
        self.rng, self.step = rng, step
        edges = np.linspace(-half_width, half_width, 402)
        self.width = edges[1] - edges[0]
        middles = 0.5 * (edges[1:] + edges[:-1])
        self.points = np.stack(np.meshgrid(middles, middles), axis=-1).reshape(-1, 2)
        terms = np.empty((len(self.points), 3))
        for x, value in zip(self.points, terms, strict=True):
            step.target.function.into_compiled(x, value)
        reference = step.learner.reference
        parts = [tempering.split(reference, x, v) for x, v in zip(self.points, terms, strict=True)]
        base, ratio = np.array(parts).T
        logs = base + step.learner.ladder.betas[:, None] * ratio
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        self.sums = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)

    def draw(self, n):
        """Draw (n, temperatures, 2)."""
        cells = [np.searchsorted(s, self.rng.random(n) * s[-1]) for s in self.sums]
        inside = self.rng.uniform(-0.5, 0.5, (n, len(cells), 2)) * self.width
        return self.points[np.stack(cells, axis=1)] + inside


STATISTICS = {
    "first": lambda x: x[:, 0],
    "second": lambda x: x[:, 1],
    "bend": lambda x: x[:, 1] + 0.5 * x[:, 0] ** 2,
    "product": lambda x: x[:, 0] * x[:, 1],
}


def p_values(step, point, half_width, n):
    """P-values, by statistic and temperature, of exact draws after a draw of the step."""
    tempered = Tempered(step, half_width, np.random.default_rng(5))
    (name,) = step.target.names
    moved = []
    for states in tempered.draw(n):
        step.learner.states.positions[:] = states
        point = point | {name: states[-1]}
        step.step(point)
        moved.append(step.learner.states.positions.copy())
    moved, exact = np.array(moved), tempered.draw(20_000)
    return {
        (label, k): stats.ks_2samp(f(moved[:, k]), f(exact[:, k])).pvalue
        for label, f in STATISTICS.items()
        for k in range(exact.shape[1])
    }


def bounded():
    with pm.Model() as model:
        x = pm.Uniform("x", -3.0, 3.0, shape=2)
        pm.Potential("likelihood", symbolic_banana(x))
    return model


MODELS["bounds"] = bounded
HALF_WIDTHS = {"funnel": 12.0, "two modes": 9.0, "improper": 25.0, "bounds": 14.0}


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_step_is_invariant_at_every_temperature(name):
    step, point = frozen(MODELS[name]())
    found = p_values(step, point, HALF_WIDTHS[name], 1500)
    assert min(found.values()) > BOUND, found


def _swap_the_wrong_way(betas, ratio, k):
    return -(betas[k + 1] - betas[k]) * (ratio[k] - ratio[k + 1])


def _too_cold(base, ratio, beta):
    return base + min(1.0, 5.0 * beta) * ratio


def _without_jacobian(propose):
    def proposed(*arguments):
        propose(*arguments)
        return 0.0

    return proposed


SPOILT = {
    "swap": ("log_swap_ratio", _swap_the_wrong_way, tempering.DIFFERENCE, 700),
    "temperature": ("tempered", _too_cold, tempering.DIFFERENCE, 1500),
    "stretch": (
        "_propose_stretch",
        _without_jacobian(tempering._propose_stretch),
        tempering.STRETCH,
        900,
    ),
    "trends": (
        "propose_along",
        _without_jacobian(tempering.propose_along),
        tempering.COORDINATE,
        600,
    ),
}
"""What is spoilt, the kind of moves that all moves are, and how many draws show it."""


@pytest.mark.sabotage
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_ratio_is_caught(name, monkeypatch):
    density, width = (symbolic_funnel, 12.0) if name == "trends" else (symbolic_banana, 9.0)
    step, point = frozen(with_prior(density), compile_kwargs={"mode": "cvm"})
    *mistake, kind, n = SPOILT[name]
    monkeypatch.setattr(tempering, *mistake)
    if name == "trends":
        assert np.any(step.learner.ladder.trends[-1, :, :, 3])
        monkeypatch.setattr(tempering, "ALONG_SHARE", 1.0)
    monkeypatch.setattr(loop, "run_compiled", None)
    monkeypatch.setattr(tempering, "kind_of", lambda uniform: kind)
    found = p_values(step, point, width, n)
    assert min(found.values()) < BOUND, found


def test_each_draw_of_the_prior_is_used_once():
    """A pool that is drawn from again would be a part of the state that does not move."""
    step, point = frozen(with_prior(symbolic_banana))
    learner, seen = step.learner, []
    for _ in range(300):
        point, _ = step.step(point)
        states = learner.states
        seen.append(states.fresh[states.counters[tempering.FRESH] - 1])
    assert len(np.unique(seen, axis=0)) == len(seen)


def test_evaluations_are_counted():
    step, point = frozen(with_prior(symbolic_banana))
    _, (statistics,) = step.step(point)
    moves = 3 * step.learner.n_moves  # the draw of the prior is evaluated once, and stays
    assert statistics["n_evals"] == 3 * (moves + 1)


def funnel_and_bend(n):
    """A coordinate that two follow with their spread, and one with its location; one that none."""
    rng = np.random.default_rng(2)
    z, v = rng.standard_normal((4, n)), 3.0 * rng.standard_normal(n)
    bend = 0.1 * v**2 + 0.5 * v + 2.0
    return np.column_stack([v, np.exp(0.5 * v) * z[0], z[1], bend + z[2], np.exp(-v / 3.0) * z[3]])


def test_trends_are_found():
    points = funnel_and_bend(1000)
    location, deviations = points.mean(axis=0), points.std(axis=0)
    found = np.empty((5, 5, 4))
    fit_trends(points, location, deviations, found)
    # By standard deviations of the first: 0.5 v + 0.1 v^2 with v = location + 3 u, about.
    width, middle = deviations[0], location[0]
    expected = np.zeros((5, 3))
    expected[1, 2], expected[4, 2] = 0.5 * width, -width / 3.0
    expected[3] = (0.5 + 0.2 * middle) * width, 0.1 * width**2, 0.0
    np.testing.assert_allclose(found[0, :, 1:], expected, atol=0.15)
    assert np.all(found[2][:, 1:] == 0.0)
    probabilities = np.diff(picks(found), prepend=0.0)
    assert probabilities[0] == probabilities.max() > 10.0 * probabilities[2] > 0.0


def test_a_move_along_trends_leads_back_and_its_ratio_is_the_jacobian():
    points = funnel_and_bend(300)
    trends, location, deviations = np.empty((5, 5, 4)), points.mean(axis=0), points.std(axis=0)
    fit_trends(points, location, deviations, trends)

    def moved(x, change):
        out = np.empty(5)
        return propose_along(trends, location, deviations, 0, change, x, out), out

    for x in points[:20]:
        ratio, there = moved(x, 1.3)
        back, again = moved(there, -1.3)
        np.testing.assert_allclose(again, x, rtol=1e-8, atol=1e-8)
        assert ratio == pytest.approx(-back)
        steps = 1e-5 * np.eye(5)
        columns = [(moved(x + h, 1.3)[1] - moved(x - h, 1.3)[1]) / 2e-5 for h in steps]
        assert np.linalg.slogdet(columns)[1] == pytest.approx(ratio, abs=1e-6)
    assert moved(points[0], 100.0)[0] == -np.inf


def test_ladder_of_equal_rejections():
    """For rejections that grow with log beta the ladder is geometric; the ends stay."""
    betas = np.array([0.0, 0.01, 0.1, 1.0])
    np.testing.assert_allclose(equal_rejections(betas, np.full(3, 0.3), 4), betas)
    found = equal_rejections(betas, np.array([0.2, 0.2, 0.4]), 5)
    np.testing.assert_allclose(found, [0.0, 0.01, 0.1, 10**-0.5, 1.0])


def test_bridge_between_gaussians():
    """Log normaliser of N(0, 1) times N(y; x, s^2), from independent draws of each temperature.

    The error is within 5 standard errors of the truth, null probability 6e-7.
    """
    rng, y, s = np.random.default_rng(3), 1.5, 0.4
    betas = np.array([0.0, 0.05, 0.3, 1.0])
    precision = 1.0 + betas / s**2
    x = betas * y / s**2 / precision + rng.standard_normal((4000, 4)) / np.sqrt(precision)
    log_ratios = stats.norm.logpdf(y, x, s)
    found, series = evidence.bridge(betas, log_ratios)
    error = series.std() / np.sqrt(len(series))
    assert 0.0 < error < 0.05
    assert abs(found - stats.norm.logpdf(y, 0.0, np.hypot(1.0, s))) < 5.0 * error


def conjugate(scale):
    rng = np.random.default_rng(8)
    design, y = rng.standard_normal((30, 3)), rng.standard_normal(30)
    with pm.Model() as model:
        weights = pm.Normal("weights", 0.0, scale, shape=3)
        pm.Normal("y", design @ weights, 0.7, observed=y)
    covariance = 0.49 * np.eye(30) + scale**2 * design @ design.T
    return model, stats.multivariate_normal(np.zeros(30), covariance).logpdf(y)


def sampled(model, **options):
    with model:
        return pm.sample(
            step=ParallelTemperingStep(),
            chains=2,
            cores=1,
            random_seed=4,
            progressbar=False,
            compute_convergence_checks=False,
            **options,
        )


def warned(statistics):
    return [s["warning"].message for s in statistics if "warning" in s]


def test_picture_of_temperatures():
    result = sampled(conjugate(1.0)[0], draws=60, tune=150)
    left, middle, right = plot_tempering(result)
    n = int(result.sample_stats["n_temperatures"].values[0, -1])
    assert len(left.lines) == len(middle.lines) == 2
    betas, barrier = left.lines[0].get_data()
    assert len(betas) == n and betas[-1] == 1.0
    assert np.all(np.diff(barrier) >= 0.0) and 0.0 < barrier[-1] < n - 1
    assert right.containers and plot_tempering(result, axes=[left, middle, right])[0] is left
    improper = plot_tempering(sampled(flat(), draws=10, tune=20))[2]
    assert "improper" in improper.texts[0].get_text()
    with pytest.raises(TypeError, match="three"):
        plot_tempering(result, axes=[left])


def test_too_few_temperatures_are_told_of():
    """Of a regression whose posterior is 1e-4 of the prior in each of 8 directions."""
    design = np.random.default_rng(4).standard_normal((60, 8))
    with pm.Model() as model:
        weights = pm.Normal("weights", 0.0, 30.0, shape=8)
        pm.Normal("y", design @ weights, 0.02, observed=design.sum(axis=1))
    step = ParallelTemperingStep(model=model, n_temperatures=2, rng=1)
    _, statistics, _ = run(step, model, 300, tune=299)
    told = warned(statistics)
    assert any("2 temperatures of weights are too few" in m and "take" in m for m in told), told


def test_few_round_trips_are_told_of(monkeypatch):
    monkeypatch.setattr(parallel_tempering, "FEWEST_TRIPS", 10_000)
    model = conjugate(1.0)[0]
    step = ParallelTemperingStep(model=model, rng=1, steps_per_draw=20)
    _, statistics, _ = run(step, model, 360, tune=200)
    told = warned(statistics)
    assert len(told) == 1 and "round" not in told[0] and "states came from the reference" in told[0]


def test_chains_that_disagree_about_the_evidence():
    result = sampled(conjugate(1.0)[0], draws=60, tune=150)
    result.sample_stats["log_ratio"][0] += 3.0
    with pytest.warns(UserWarning, match="chains disagree about the log evidence"):
        assert evidence.log_evidence(result).standard_error > 1.0


def test_log_evidence_of_a_regression():
    """Within 5 standard errors, null probability 6e-7; and the comparison of two priors.

    The standard error within chains is 0.045; half of the difference of two is above 0.2 with
    probability 1e-5.
    """
    results, truth = {}, {}
    for scale in (1.0, 30.0):
        model, truth[scale] = conjugate(scale)
        found = evidence.log_evidence(sampled(model, draws=3000, tune=500))
        assert abs(found.log_evidence - truth[scale]) < 5.0 * found.standard_error
        assert found.standard_error < 0.2
        results[scale] = found if scale == 1.0 else SimpleNamespace(**found._asdict())
    table = evidence.compare_evidence(results)
    assert list(table.index) == [1.0, 30.0]
    factor = table["log_bayes_factor"][30.0]
    assert abs(factor - (truth[1.0] - truth[30.0])) < 5.0 * table["factor_error"][30.0]
    assert table["probability"].sum() == pytest.approx(1.0)


def test_no_evidence_of_an_improper_prior():
    result = sampled(flat(), draws=20, tune=50)
    with pytest.raises(ValueError, match="improper"):
        evidence.log_evidence(result)


def squared(x):
    return x[0] ** 2 + 0.5 * x[1]


@pytest.mark.slow
def test_simulation_based_calibration():
    """Of a model with two modes: ranks of the truth among the draws.

    2 x 120 uniform ranks among 20 draws that are 20 scans apart, and whether a draw is above zero
    where the truth is not: a chi-squared of 3 degrees of freedom and a z, null probability 1e-6.
    """
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        seen = pm.Data("seen", 0.0)
        pm.Normal("y", squared(x), 0.4, observed=seen)
    step, rng = ParallelTemperingStep(model=model, steps_per_draw=20), np.random.default_rng(21)
    start = model.initial_point()
    ranks, signs = [], []
    for _ in range(120):
        truth = rng.standard_normal(2)
        with model:
            pm.set_data({"seen": rng.normal(squared(truth), 0.4)})
        begin(step, tune=20, draws=20, seed=int(rng.integers(1 << 30)))
        kept, _, _ = drive(step, start, 40, tune=20)
        kept = kept[20:]
        ranks.append((kept < truth).sum(axis=0))
        signs.append(np.mean(kept[:, 0] > 0.0) - (truth[0] > 0.0))
    # Ranks from 0 to 20, of which each class has 5, 5, 5 and 6.
    for column in np.transpose(ranks):
        counts = np.histogram(column, [-0.5, 4.5, 9.5, 14.5, 20.5])[0]
        expected = 120 * np.array([5, 5, 5, 6]) / 21
        assert stats.chi2.sf(np.sum((counts - expected) ** 2 / expected), 3) > BOUND, counts
    t = np.mean(signs) / (np.std(signs, ddof=1) / np.sqrt(120))
    assert abs(t) < 5.0, t


def test_others_of_the_hot_density_are_those_of_the_end_of_tuning():
    with pm.Model() as model:
        x, k = pm.Normal("x", 0.0, 2.0), pm.Normal("k", 1.0, 1.0)
        pm.Normal("y", x * k, 1.0, observed=3.0)
        step = ParallelTemperingStep([x], rng=1, disperse=False)
    point, terms = model.initial_point(), np.empty((2, 3))
    _, _, point = drive(step, point, 20, tune=-1)
    step.stop_tuning()
    for values, k in zip(terms, (point["k"], 4.0), strict=True):
        point, _ = step.step(point | {"k": np.asarray(k)})
        step.learner.hot_target.function.into_compiled(np.array([1.0]), values)
    np.testing.assert_array_equal(terms[0], terms[1])
    step.target.function.into_compiled(np.array([1.0]), values)
    assert abs(values.sum() - terms[0].sum()) > 1.0


def test_the_hot_density_stands_still_while_others_move():
    """In a compound the chain's posterior is that of the model, whatever the other step draws.

    y ~ N(x z, 1) with z = 1 or 3 by a fair coin: P(z = 3 | y) is known from the evidence of each.
    """
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 2.0)
        k = pm.Bernoulli("k", 0.5)
        pm.Normal("y", x * (1.0 + 2.0 * k), 1.0, observed=3.0)
        result = pm.sample(
            2000,
            tune=500,
            step=[ParallelTemperingStep([x])],
            chains=2,
            cores=1,
            random_seed=2,
            progressbar=False,
            compute_convergence_checks=False,
        )
    logs = [stats.norm.logpdf(3.0, 0.0, np.hypot(2.0 * z, 1.0)) for z in (1.0, 3.0)]
    expected = 1.0 / (1.0 + np.exp(logs[0] - logs[1]))
    batches = result.posterior["k"].values.reshape(50, -1).mean(axis=1)
    t = (batches.mean() - expected) / (batches.std(ddof=1) / np.sqrt(50))
    assert abs(t) < 5.5, (t, expected)  # 49 degrees of freedom: null probability 1.4e-6
    assert model.free_RVs


@pytest.mark.parametrize("number", [1, 41])
def test_numbers_of_temperatures_that_there_cannot_be(number):
    with pytest.raises(ValueError, match=f"n_temperatures={number}: take"):
        ParallelTemperingStep(model=with_prior(symbolic_banana), n_temperatures=number)


def test_a_state_brings_its_number_of_temperatures():
    """The chain goes on as it would have, in a step that begins with another number."""
    model = with_prior(symbolic_banana)
    step, other = (ParallelTemperingStep(model=model, rng=r, disperse=False) for r in (1, 2))
    _, _, point = drive(step, model.initial_point(), 60, tune=-1)
    other.step(model.initial_point())
    assert len(other.learner.ladder.betas) != len(step.learner.ladder.betas)
    other.sampling_state = step.sampling_state
    expected, found = (drive(s, point, 5, tune=-1)[0] for s in (step, other))
    np.testing.assert_array_equal(found, expected)
