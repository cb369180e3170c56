"""The Gaussian process of the log-likelihood against brute force, and what it learns from."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.surrogate.budget import add_training_point, least_useful
from pymc_kameleon.surrogate.configuration import MEANS
from pymc_kameleon.surrogate.covariances import COVARIANCES
from pymc_kameleon.surrogate.gaussian_process import (
    gradient,
    log_surrogate,
    new_process,
    predict,
    predict_with_gradient,
)
from pymc_kameleon.surrogate.marginal_likelihood import fit_hyperparameters, log_marginal_likelihood
from pymc_kameleon.surrogate.mean import Mean, fit_mean, mean_gradient, mean_value
from pymc_kameleon.surrogate.training_set import extend, follow, rebuild, remove, set_prior

KERNELS = list(COVARIANCES)
NO_GRADIENT = np.empty(0)


def inverse(matrix):
    """Inverse by Gauss-Jordan elimination in extended precision."""
    size = len(matrix)
    table = np.concatenate([matrix, np.eye(size)], axis=1).astype(np.longdouble)
    for i in range(size):
        pivot = i + np.argmax(np.abs(table[i:, i]))
        table[[i, pivot]] = table[[pivot, i]]
        table[i] /= table[i, i]
        others = np.arange(size) != i
        table[others] -= table[others, i, None] * table[i]
    return table[:, size:]


def covariance(kernel, u, other, hyperparameters):
    """Textbook covariances of the rows of `u` and `other`, in extended precision."""
    amplitude, *lengthscales = np.exp(np.asarray(hyperparameters, np.longdouble))
    r = np.sqrt((((u[:, None] - other) / np.array(lengthscales)) ** 2).sum(axis=-1))
    if kernel == "squared_exponential":
        return amplitude**2 * np.exp(-(r**2) / 2)
    if kernel == "rational_quadratic":
        return amplitude**2 * (1 + r**2 / 16) ** -8
    root = np.sqrt(np.longdouble(5)) * r
    return amplitude**2 * (1 + root + root**2 / 3) * np.exp(-root)


def quadratic_mean(mean, u):
    return mean.constant[0] + u @ mean.linear + 0.5 * np.einsum("ni,ij,nj->n", u, mean.quadratic, u)


def difference_gradient(function, x, step=1e-3):
    """Fourth-order central differences."""
    offsets, weights = (-2, -1, 1, 2), (1 / 12, -2 / 3, 2 / 3, -1 / 12)
    return np.array(
        [
            sum(
                w * np.asarray(function(x + o * step * e))
                for o, w in zip(offsets, weights, strict=True)
            )
            / step
            for e in np.eye(x.size)
        ]
    )


class Problem:
    """Points of a rough function, a mean, a standardisation and hyperparameters."""

    def __init__(self, kernel, dim, count, seed=0):
        rng = np.random.default_rng(seed)
        self.rng, self.kernel, self.dim = rng, kernel, dim
        self.location, root = rng.normal(size=dim), rng.normal(size=(dim, dim))
        self.factor = np.linalg.cholesky(root @ root.T + 0.3 * np.eye(dim))
        self.points = self.draw(count)
        self.values = self.function(self.points)
        half = rng.normal(size=(dim, dim))
        self.mean = Mean(np.array([0.7]), rng.normal(size=dim), -half @ half.T)
        self.hyperparameters = np.log([1.7, *rng.uniform(0.3, 0.8, dim)])

    def draw(self, count):
        return self.location + self.rng.normal(size=(count, self.dim)) @ self.factor.T

    def function(self, points):
        return np.sin(3 * points).sum(axis=1) - 0.5 * (points**2).sum(axis=1)

    @property
    def standardization(self):
        return Standardization(self.location, self.factor)

    def whiten(self, points):
        return np.linalg.solve(self.factor, (points - self.location).T).T

    def process(self, capacity=None, count=None):
        capacity = len(self.points) if capacity is None else capacity
        process = new_process(COVARIANCES[self.kernel], capacity, self.dim, 1e6)
        rebuild(
            process,
            self.points[:count],
            self.values[:count],
            hyperparameters=self.hyperparameters,
            mean=self.mean,
            standardization=self.standardization,
        )
        return process

    def brute_force(self, x, points=None, values=None, jitter=1e-10):
        """Mean and variance at the rows of `x`, by the textbook."""
        points = self.points if points is None else points
        values = self.function(points) if values is None else values
        u, v = self.whiten(points), self.whiten(x)
        matrix = covariance(self.kernel, u, u, self.hyperparameters)
        matrix += jitter * np.exp(2 * self.hyperparameters[0]) * np.eye(len(u))
        cross = covariance(self.kernel, v, u, self.hyperparameters)
        solved = cross @ inverse(matrix)
        mean = quadratic_mean(self.mean, v) + solved @ (values - quadratic_mean(self.mean, u))
        variance = np.exp(2 * self.hyperparameters[0]) - (solved * cross).sum(axis=1)
        return mean.astype(float), variance.astype(float)


def predictions(process, x):
    return np.array([predict(process, row) for row in x]).T


def snapshot(process):
    return pickle.dumps(process)


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_predictions_match_the_textbook(kernel, dim):
    problem = Problem(kernel, dim, 8 if dim == 1 else 40)
    process, x = problem.process(), problem.draw(20)
    mean, variance = problem.brute_force(x, jitter=process.jitter[0])
    np.testing.assert_allclose(predictions(process, x), [mean, variance], rtol=1e-8, atol=1e-8)
    expected = np.minimum(mean + 0.5 * variance, problem.values.max())
    np.testing.assert_allclose([log_surrogate(process, row) for row in x], expected, atol=1e-8)


def test_the_surrogate_promises_no_more_than_the_largest_value(kernel):
    problem = Problem(kernel, 2, 10)
    process, far = problem.process(), problem.location + 1e6
    mean, variance = predict(process, far)
    for constant in (-4.0, 50.0):
        process.mean.quadratic[:] = process.mean.linear[:] = 0.0
        follow(process, constant)
        mean, variance = predict(process, far)
        expected = min(mean + 0.5 * variance, problem.values.max())
        assert log_surrogate(process, far) == pytest.approx(expected)
    assert mean == 50.0
    assert log_surrogate(process, far) == problem.values.max() < mean


def test_without_points_the_prior_is_predicted(kernel):
    process = new_process(COVARIANCES[kernel], 5, 2, 100.0)
    process.mean.constant[0] = 3.0
    assert predict(process, np.array([0.3, 0.1])) == (3.0, 1.0)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_gradients_match_finite_differences(kernel, dim):
    problem = Problem(kernel, dim, 8 if dim == 1 else 40)
    process, of_mean, of_variance = problem.process(), np.empty(dim), np.empty(dim)
    for x in problem.draw(5):
        gradient(process, x, of_mean, of_variance)
        expected = difference_gradient(lambda x: predict(process, x), x, 2e-4).T
        np.testing.assert_allclose([of_mean, of_variance], expected, rtol=1e-8, atol=1e-8)


def test_variance_vanishes_and_values_return_at_the_points(kernel):
    problem = Problem(kernel, 3, 60)
    process = problem.process()
    mean, variance = predictions(process, problem.points)
    np.testing.assert_allclose(mean, problem.values, atol=1e-6)
    assert np.all(variance >= 0)
    assert variance.max() < 1e-8


def test_growing_by_points_equals_the_full_factorisation(kernel):
    problem = Problem(kernel, 5, 500)
    full, grown = problem.process(), problem.process(500, count=0)
    order = problem.rng.permutation(500)
    assert all(extend(grown, problem.points[i], problem.values[i], NO_GRADIENT) for i in order)
    x = problem.draw(50)
    np.testing.assert_allclose(predictions(grown, x), predictions(full, x), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(grown.weights, full.weights[order], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(grown.inverse_blocks, full.inverse_blocks[order], rtol=1e-8)


def test_what_is_predicted_already_or_finds_no_room_changes_nothing(kernel):
    problem = Problem(kernel, 2, 20)
    process = problem.process(21)
    before = snapshot(process)
    for point, value in zip(problem.points, problem.values, strict=True):
        assert not extend(process, point, value, NO_GRADIENT)
    assert not extend(process, np.array([0.1, np.nan]), 1.0, NO_GRADIENT)
    assert snapshot(process) == before
    new = problem.draw(2)
    assert extend(process, new[0], 1.0, NO_GRADIENT)
    before = snapshot(process)
    assert not extend(process, new[1], 1.0, NO_GRADIENT)
    assert snapshot(process) == before


def test_low_and_non_finite_values_are_censored(kernel):
    process = new_process(COVARIANCES[kernel], 10, 1, 60.0)
    assert not extend(process, np.array([0.0]), -np.inf, NO_GRADIENT)
    assert not extend(process, np.array([0.0]), np.nan, NO_GRADIENT)
    assert extend(process, np.array([0.0]), -5.0, NO_GRADIENT)
    for x, value in enumerate([-1e300, -np.inf, np.nan, np.inf, -64.0, -66.0], start=1):
        assert extend(process, np.array([3.0 * x]), value, NO_GRADIENT)
    np.testing.assert_array_equal(process.values[:7], [-5, -65, -65, -65, -65, -64, -65])
    assert extend(process, np.array([30.0]), 10.0, NO_GRADIENT)
    assert process.censoring[0] == -50
    rebuild(process, process.points[:8].copy(), process.values[:8].copy())
    np.testing.assert_array_equal(process.values[:8], [-5, -50, -50, -50, -50, -50, -50, 10])
    assert np.all(np.isfinite(predictions(process, np.linspace(-5, 40, 50)[:, None])))


def test_a_cliff_does_not_ruin_what_lies_above_it():
    points = np.random.default_rng(0).normal(size=(80, 2))
    values = -0.5 * (points**2).sum(axis=1)
    values[points[:, 0] > 1] = -np.inf
    inside = points[:, 0] < 0.3
    fitted = GPSurrogate().fit(points, values)
    left_out = np.random.default_rng(1).normal(size=(100, 2)) * 0.5 - [0.8, 0]
    mean = fitted.predict(left_out)
    assert inside.sum() > 20
    assert np.abs(mean + 0.5 * (left_out**2).sum(axis=1)).max() < 5


def test_a_mean_that_follows_equals_a_rebuilt_process(kernel):
    problem = Problem(kernel, 2, 25)
    process = problem.process()
    follow(process, -4.5)
    problem.mean = problem.mean._replace(constant=np.array([-4.5]))
    x = problem.draw(10)
    np.testing.assert_allclose(
        predictions(process, x), problem.brute_force(x, jitter=process.jitter[0]), atol=1e-8
    )


@pytest.mark.parametrize("index", [0, 13, 29])
def test_removal_equals_a_process_without_the_point(kernel, index):
    problem = Problem(kernel, 3, 30)
    process, x = problem.process(), problem.draw(10)
    remove(process, index)
    problem.points, problem.values = (
        np.delete(a, index, axis=0) for a in (problem.points, problem.values)
    )
    without = problem.process()
    np.testing.assert_allclose(predictions(process, x), predictions(without, x), atol=1e-9)
    for name in ("points", "values", "weights", "inverse_blocks", "whitened"):
        found, expected = getattr(process, name)[:29], getattr(without, name)
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def test_the_least_useful_point_is_the_one_that_the_others_predict_best(kernel):
    problem = Problem(kernel, 2, 15)
    process = problem.process()
    use = []
    for i, (point, value) in enumerate(zip(problem.points, problem.values, strict=True)):
        others = np.delete(problem.points, i, axis=0)
        mean, variance = problem.brute_force(point[None], others, jitter=process.jitter[0])
        error = abs(value - mean[0]) + 0.5 * (variance[0] + 1e-10 * np.exp(2 * np.log(1.7)))
        use.append(error / (1 + problem.values.max() - value))
    index, smallest = least_useful(process, np.full(2, np.nan))
    assert (index, smallest) == (np.argmin(use), pytest.approx(min(use), rel=1e-6))
    other, _ = least_useful(process, problem.points[index])
    assert other == np.argsort(use)[1]


def test_a_full_process_stays_right_and_keeps_the_current_point(kernel):
    problem = Problem(kernel, 2, 40)
    process, current = problem.process(), problem.points[7].copy()
    replaced = 0
    for x in problem.draw(300):
        before = snapshot(process)
        changed = add_training_point(process, x, problem.function(x[None])[0], NO_GRADIENT, current)
        assert changed == (snapshot(process) != before)
        replaced += changed
        assert process.count[0] == 40
        assert np.any(np.all(process.points == current, axis=1))
        if changed and replaced % 10 == 0:
            current = x
    assert replaced > 30
    x = problem.draw(20)
    expected = problem.brute_force(x, process.points, process.values, process.jitter[0])
    np.testing.assert_allclose(predictions(process, x), expected, rtol=1e-7, atol=1e-7)
    fresh = copy.deepcopy(process)
    rebuild(fresh, process.points.copy(), process.values.copy())
    np.testing.assert_allclose(process.inverse_blocks, fresh.inverse_blocks, rtol=1e-3)


def test_budget_of_one_point_never_gives_up_the_current_one(kernel):
    process = new_process(COVARIANCES[kernel], 1, 1, 60.0)
    current = np.zeros(1)
    assert add_training_point(process, current, 1.0, NO_GRADIENT, current)
    assert not add_training_point(process, np.ones(1), 2.0, NO_GRADIENT, current)
    assert add_training_point(process, np.ones(1), 9.0, NO_GRADIENT, np.ones(1))
    assert process.points[0, 0] == 1.0


def test_rebuild_takes_the_least_jitter_that_works():
    process = new_process(COVARIANCES["squared_exponential"], 60, 1, 60.0)
    points = np.linspace(0, 1, 60)[:, None]
    assert rebuild(process, points[::12], np.sin(points[::12, 0])) == 1e-10
    needed = rebuild(process, np.zeros((60, 1)) + 1e-13 * points, np.zeros(60))
    assert needed == process.jitter[0]
    assert 1e-10 <= needed <= 1e-2


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_marginal_likelihood_and_its_gradient(kernel, dim):
    problem = Problem(kernel, dim, 6 if dim == 1 else 25)
    u = problem.whiten(problem.points)
    found, slopes = log_marginal_likelihood(
        COVARIANCES[kernel],
        np.ascontiguousarray(u.T),
        problem.values[None],
        problem.hyperparameters,
    )
    matrix = covariance(kernel, u, u, problem.hyperparameters).astype(float)
    matrix += 1e-8 * np.exp(2 * problem.hyperparameters[0]) * np.eye(len(u))
    expected = -0.5 * (
        problem.values @ np.linalg.solve(matrix, problem.values)
        + np.linalg.slogdet(2 * np.pi * matrix)[1]
    )
    assert found == pytest.approx(expected, rel=1e-8)
    differences = difference_gradient(
        lambda h: log_marginal_likelihood(
            COVARIANCES[kernel], np.ascontiguousarray(u.T), problem.values[None], h
        )[0],
        problem.hyperparameters,
    )
    np.testing.assert_allclose(slopes, differences, rtol=1e-7, atol=1e-7)


def test_hyperparameters_are_found_again(kernel):
    """From 200 values the log lengthscales are known to about 0.1."""
    rng = np.random.default_rng(5)
    u, truth = rng.normal(size=(200, 2)), np.log([3.0, 0.5, 2.0])
    matrix = covariance(kernel, u, u, truth).astype(float) + 1e-8 * np.eye(200)
    values = np.linalg.cholesky(matrix) @ rng.normal(size=200)
    u = np.ascontiguousarray(u.T)
    found, value = fit_hyperparameters(COVARIANCES[kernel], u, values[None])
    np.testing.assert_allclose(found, truth, atol=0.7)
    expected, _ = log_marginal_likelihood(COVARIANCES[kernel], u, values[None], found)
    np.testing.assert_allclose(value, expected, rtol=1e-8)  # linear algebra on several threads
    assert value > log_marginal_likelihood(COVARIANCES[kernel], u, values[None], truth)[0]
    again, _ = fit_hyperparameters(COVARIANCES[kernel], u, values[None], found + 0.2)
    np.testing.assert_allclose(again, found, atol=0.02)


@pytest.mark.parametrize("dim", [1, 3])
def test_mean_and_its_gradient(dim):
    problem = Problem("matern52", dim, 5)
    u, out = problem.rng.normal(size=dim), np.empty(dim)
    mean_gradient(problem.mean, u, out)
    assert mean_value(problem.mean, u) == pytest.approx(quadratic_mean(problem.mean, u[None])[0])
    expected = difference_gradient(lambda u: mean_value(problem.mean, u), u)
    np.testing.assert_allclose(out, expected, atol=1e-8)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_concave_quadratic_is_fitted_exactly(with_gradients):
    mean, dim = Problem("matern52", 3, 5).mean, 3
    u = np.random.default_rng(1).normal(size=(dim, 30))
    targets = quadratic_mean(mean, u.T)[None] - 1e6
    if with_gradients:
        targets = np.concatenate([targets, mean.linear[:, None] + mean.quadratic @ u])
    found = fit_mean(True, u, targets)
    np.testing.assert_allclose(found.constant + 1e6, mean.constant, atol=1e-8)
    np.testing.assert_allclose(found.linear, mean.linear, atol=1e-8)
    np.testing.assert_allclose(found.quadratic, mean.quadratic, atol=1e-8)


def test_a_fitted_quadratic_is_concave_and_few_points_give_a_constant():
    rng = np.random.default_rng(2)
    u = rng.normal(size=(2, 40))
    saddle = (u[0] ** 2 - u[1] ** 2 + u[0])[None]
    eigenvalues = np.linalg.eigvalsh(fit_mean(True, u, saddle).quadratic)
    assert eigenvalues[0] < -0.5
    assert eigenvalues[1] <= 1e-12
    for few in (fit_mean(True, u[:, :11], saddle[:, :11]), fit_mean(False, u, saddle)):
        assert not np.any(few.linear)
        assert not np.any(few.quadratic)
        assert np.isfinite(few.constant[0])


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("mean", ["quadratic", "constant"])
def test_surrogate_predicts_in_any_units(kernel, mean, scale):
    rng = np.random.default_rng(3)
    X, new = rng.normal(size=(2, 150, 2)) * [1, scale]

    def function(X):
        return np.sin(X[:, 0]) * X[:, 1] / scale - 0.5 * (X[:, 1] / scale) ** 2

    surrogate = GPSurrogate(kernel=kernel, mean=mean)
    fitted = surrogate.fit(X, function(X))
    inside = np.abs(new / [1, scale]).max(axis=1) < 1.5
    predicted, variance, of_mean = fitted.predict(
        new[inside], return_variance=True, return_gradient=True
    )
    np.testing.assert_allclose(predicted, function(new[inside]), atol=0.1)
    assert np.all(variance < 0.1)
    expected = np.cos(new[inside, 0]) * new[inside, 1] / scale
    np.testing.assert_allclose(of_mean[:, 0], expected, atol=0.5)


def test_a_quadratic_target_is_known_everywhere():
    problem = Problem("matern52", 4, 40)
    u = problem.whiten(problem.points)
    fitted = GPSurrogate().fit(problem.points, quadratic_mean(problem.mean, u))
    x = problem.location + 5 * (problem.draw(20) - problem.location)
    expected = quadratic_mean(problem.mean, problem.whiten(x))
    mean, variance = fitted.predict(x, return_variance=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-8, atol=1e-8)
    assert variance.max() < 1e-5


def test_update_learns_and_the_budget_holds():
    problem = Problem("squared_exponential", 2, 40)
    fitted = GPSurrogate(max_points=50).fit(problem.points, problem.values)
    new = problem.draw(100)
    before = fitted.predict(new, return_variance=True)[1].mean()
    learnt = [fitted.update(x, v) for x, v in zip(new, problem.function(new), strict=True)]
    assert sum(learnt) > 20
    assert fitted.process.count[0] == 50
    assert fitted.predict(new, return_variance=True)[1].mean() < before


def test_fitting_again_in_place_starts_from_what_was_known():
    problem = Problem("squared_exponential", 2, 60)
    surrogate = GPSurrogate()
    process = surrogate.new_process(2)
    surrogate.fit_into(process, problem.points[:30], problem.values[:30])
    for i in range(30, 60):
        add_training_point(
            process, problem.points[i], problem.values[i], NO_GRADIENT, problem.points[0]
        )
    count = process.count[0]
    surrogate.fit_into(process, process.points[:count], process.values[:count])
    assert process.count[0] == count
    mean, _ = predictions(process, process.points[:count])
    np.testing.assert_allclose(mean, process.values[:count], atol=1e-4)
    other = surrogate.fitted(problem.points, problem.values, previous=process)
    np.testing.assert_allclose(other.hyperparameters, process.hyperparameters, atol=0.3)


def test_repeated_points_count_once_and_the_last_are_kept():
    problem = Problem("matern52", 1, 30)
    points, values = np.tile(problem.points, (3, 1)), np.tile(problem.values, 3)
    assert GPSurrogate().fit(points, values).process.count[0] == 30
    process = GPSurrogate(max_points=12).fit(points, values).process
    np.testing.assert_array_equal(process.points, problem.points[-12:])


def test_current_mean_is_the_value_given():
    problem = Problem("matern52", 2, 30)
    process = GPSurrogate(mean="current").fitted(problem.points, problem.values, current_value=-2.5)
    far = problem.location + 1e6
    assert predict(process, far)[0] == -2.5


def test_standardisation_is_that_of_the_points_that_are_not_censored():
    problem = Problem("matern52", 2, 30)
    values = problem.values.copy()
    values[:5] = -np.inf
    process = GPSurrogate().fitted(problem.points, values)
    expected = standardization(problem.points[5:], np.ones(2))
    np.testing.assert_allclose(process.standardization.factor, expected.factor)


def test_a_fit_leaves_censored_points_out(kernel):
    rng = np.random.default_rng(3)
    points = rng.normal(size=(60, 2))
    values = np.cos(points).sum(axis=1)
    beyond = np.concatenate([points, rng.normal(size=(20, 2)) * 0.3 + [4.0, 0.0]])
    censored = np.concatenate([values, np.full(20, -np.inf)])
    surrogate = GPSurrogate(kernel=kernel)
    expected, found = surrogate.fitted(points, values), surrogate.fitted(beyond, censored)
    assert snapshot(found) == snapshot(expected)
    few = surrogate.fitted(beyond[-23:], np.r_[values[-3:], np.full(20, -1e9)])
    assert few.count[0] == 23


def test_amplitudes_do_not_run_away_where_a_polynomial_fits():
    """Its marginal likelihood grows with lengthscales and amplitude together, without end."""
    points = np.random.default_rng(7).normal(size=(80, 4))
    values = 10 * points[:, 0] * points[:, 3] ** 2 - 20 * (points**2).sum(axis=1)
    process = GPSurrogate(mean="constant").fitted(points, values)
    assert np.all(process.hyperparameters[1:] <= np.log(5.0 * 2.0) + 1e-9)
    assert process.jitter[0] * np.exp(2 * process.hyperparameters[0]) < 1e-4


def test_configuration_is_immutable_and_survives_pickling():
    surrogate = GPSurrogate(kernel="matern52", n_initial=7, refit=2)
    assert pickle.loads(pickle.dumps(surrogate)) == surrogate
    with pytest.raises(dataclasses.FrozenInstanceError):
        surrogate.max_points = 5
    problem = Problem("matern52", 2, 30)
    fitted = surrogate.fit(problem.points, problem.values)
    copied = pickle.loads(pickle.dumps(fitted))
    x = problem.draw(5)
    np.testing.assert_array_equal(copied.predict(x), fitted.predict(x))
    assert surrogate.needs_refit(20, 10)
    assert not surrogate.needs_refit(19, 10)
    assert surrogate.initial_size(3) == 7
    assert GPSurrogate().initial_size(8) == 18
    assert GPSurrogate().initial_size(8, gradients=True) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernel": "rbf"}, ValueError, "kernel='rbf': take one of 'squared_exponential'"),
        ({"mean": None}, ValueError, "mean=None: take one of 'quadratic'"),
        ({"max_points": 2}, ValueError, "max_points=2"),
        ({"max_points": 20.5}, TypeError, "max_points=20.5"),
        ({"n_initial": 0}, ValueError, "n_initial=0"),
        ({"refit": 1.0}, ValueError, "refit=1.0"),
        ({"refit": True}, TypeError, "refit=True"),
        ({"depth": -1}, ValueError, "depth=-1"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        GPSurrogate(**arguments)


def test_wrong_dimensions_and_data_are_named():
    with pytest.raises(ValueError, match=r"max_points=6 is too few for a, b.*d = 5.*at least 7"):
        GPSurrogate(max_points=6).check_dimension(5, "a, b")
    with pytest.raises(ValueError, match=r"max_points=20 is too few.*at least 24"):
        GPSurrogate(max_points=20).check_dimension(5, "a, b", gradients=True)
    with pytest.raises(ValueError, match=r"n_initial=4 does not suit.*take 7 to 300"):
        GPSurrogate(n_initial=4).check_dimension(5, "a, b")
    GPSurrogate().check_dimension(50)
    GPSurrogate().check_dimension(50, gradients=True)
    surrogate, X = GPSurrogate(), np.random.default_rng(1).normal(size=(9, 2))
    with pytest.raises(ValueError, match=r"X has shape \(9,\)"):
        surrogate.fit(X[:, 0], X[:, 0])
    with pytest.raises(ValueError, match="values has shape"):
        surrogate.fit(X, X)
    with pytest.raises(ValueError, match="X has NaN"):
        surrogate.fit(X * np.nan, X[:, 0])
    with pytest.raises(ValueError, match="3 distinct points have a finite log-likelihood"):
        surrogate.fit(X[:3], X[:3, 0])
    with pytest.raises(ValueError, match="0 distinct points"):
        surrogate.fit(X, np.full(9, -np.inf))
    fitted = surrogate.fit(X, X[:, 0])
    with pytest.raises(ValueError, match="x has shape"):
        fitted.update(X, 1.0)
    with pytest.raises(ValueError, match="X has shape"):
        fitted.predict(X[:, :1])


class JointProblem(Problem):
    """The same with gradients; covariances of gradients by differences of the kernel's values."""

    step = np.longdouble(1e-4)
    offsets = (-2, -1, 1, 2)
    weights = np.array([1, -8, 8, -1], np.longdouble) / 12

    def __init__(self, kernel, dim, count, seed=0):
        super().__init__(kernel, dim, count, seed)
        # Gradients tell so much of their neighbourhood that close points are almost redundant.
        self.hyperparameters[1:] -= np.log(5.0 if dim == 1 else 2.0)

    def gradients(self, points):
        return 3 * np.cos(3 * points) - points

    def joint(self, capacity=None, count=None):
        capacity = len(self.points) if capacity is None else capacity
        process = new_process(COVARIANCES[self.kernel], capacity, self.dim, 1e6, gradients=True)
        given = (a[:count] for a in (self.points, self.values, self.gradients(self.points)))
        set_prior(process, self.hyperparameters, self.mean, self.standardization)
        if count != 0:
            rebuild(process, *given)
        return process

    def shifted(self, u):
        """Points shifted for a derivative in each coordinate, (d, 4, n, d)."""
        moves = (
            self.step
            * np.array(self.offsets)[None, :, None, None]
            * np.eye(self.dim)[:, None, None]
        )
        return u.astype(np.longdouble) + moves

    def joint_covariance(self, u, other):
        """Covariances of (value, gradient in u) of two sets of points, by rows of points."""
        weights = self.weights / self.step
        one = [(1, u[None])] + [(weights, s) for s in self.shifted(u)]
        two = [(1, other[None])] + [(weights, s) for s in self.shifted(other)]
        size = self.dim + 1
        out = np.zeros((len(u), size, len(other), size), np.longdouble)
        for i, (w, points) in enumerate(one):
            for j, (v, others) in enumerate(two):
                for a, p in zip(np.broadcast_to(w, len(points)), points, strict=True):
                    for b, q in zip(np.broadcast_to(v, len(others)), others, strict=True):
                        out[:, i, :, j] += (
                            a * b * covariance(self.kernel, p, q, self.hyperparameters)
                        )
        return out.reshape(len(u) * size, len(other) * size)

    def prior_rows(self, u):
        slopes = self.mean.linear + u @ self.mean.quadratic
        return np.column_stack([quadratic_mean(self.mean, u), slopes]).ravel()

    def joint_brute_force(self, x, points=None):
        """Mean and covariance of value and gradient at `x`, in raw coordinates."""
        points = self.points if points is None else points
        u, v = self.whiten(points), self.whiten(x[None])
        slope = 1 if self.kernel == "squared_exponential" else 5 / 3
        scale = [1, *slope * np.exp(-2 * self.hyperparameters[1:])]
        jitter = 1e-10 * np.exp(2 * self.hyperparameters[0]) * np.tile(scale, len(u))
        matrix = self.joint_covariance(u, u) + np.diag(jitter)
        cross = self.joint_covariance(v, u)
        target = np.column_stack([self.function(points), self.gradients(points) @ self.factor])
        solved = cross @ inverse(matrix)
        mean = self.prior_rows(v) + solved @ (target.ravel() - self.prior_rows(u))
        posterior = self.joint_covariance(v, v) - solved @ cross.T
        to_raw = np.eye(self.dim + 1)
        to_raw[1:, 1:] = np.linalg.inv(self.factor).T
        return (to_raw @ mean).astype(float), (to_raw @ posterior @ to_raw.T).astype(float)


def joint_prediction(process, x):
    dim = x.size
    of_mean, cross, of_gradient = np.empty(dim), np.empty(dim), np.empty((dim, dim))
    mean, variance = predict_with_gradient(process, x, of_mean, cross, of_gradient)
    covariance = np.block([[np.array([[variance]]), cross[None]], [cross[:, None], of_gradient]])
    return np.concatenate([[mean], of_mean]), covariance


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_joint_predictions_match_brute_force(kernel, dim):
    problem = JointProblem(kernel, dim, 4 if dim == 1 else 12)
    process = problem.joint()
    assert process.jitter[0] == 1e-10
    for x in problem.draw(3):
        found, expected = joint_prediction(process, x), problem.joint_brute_force(x)
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-8)


def test_joint_process_interpolates_values_and_gradients(kernel):
    problem = JointProblem(kernel, 3, 20)
    process, slopes = problem.joint(), problem.gradients(problem.points)
    for x, value, slope in zip(problem.points, problem.values, slopes, strict=True):
        mean, posterior = joint_prediction(process, x)
        np.testing.assert_allclose(mean, [value, *slope], atol=1e-5)
        assert np.abs(posterior).max() < 1e-7


def test_joint_mean_gradient_is_the_gradient_of_the_mean(kernel):
    problem = JointProblem(kernel, 2, 12)
    process, x = problem.joint(), problem.draw(1)[0]
    mean, _ = joint_prediction(process, x)
    expected = difference_gradient(lambda x: joint_prediction(process, x)[0][0], x, 2e-4)
    np.testing.assert_allclose(mean[1:], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_gradients_of_mean_and_variance_are_those_of_the_joint_posterior(kernel, with_gradients):
    problem = JointProblem(kernel, 3, 20)
    process = problem.joint() if with_gradients else problem.process()
    of_mean, of_variance = np.empty(3), np.empty(3)
    for x in problem.draw(5):
        gradient(process, x, of_mean, of_variance)
        mean, posterior = joint_prediction(process, x)
        np.testing.assert_allclose([mean[0], posterior[0, 0]], predict(process, x), rtol=1e-9)
        np.testing.assert_allclose(of_mean, mean[1:], rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(of_variance, 2 * posterior[0, 1:], rtol=1e-7, atol=1e-8)


def test_joint_growing_and_removal_equal_the_full_factorisation(kernel):
    problem = JointProblem(kernel, 3, 40)
    full, grown = problem.joint(), problem.joint(41, count=0)
    slopes, x = problem.gradients(problem.points), problem.draw(5)
    order = problem.rng.permutation(40)
    for i in order:
        assert extend(grown, problem.points[i], problem.values[i], slopes[i])
    before = snapshot(grown)
    for value, slope in [(1.0, slopes[0]), (-np.inf, slopes[0]), (np.nan, slopes[0])]:
        assert not extend(grown, problem.points[0], value, slope)
    assert not extend(grown, x[0], 1.0, slopes[0] * np.nan)
    assert snapshot(grown) == before
    for row in x:
        for one, two in zip(joint_prediction(grown, row), joint_prediction(full, row), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-8)
    for name in ("weights", "inverse_blocks"):
        found, expected = (getattr(a, name)[: 40 * 4].reshape(40, -1) for a in (grown, full))
        np.testing.assert_allclose(found, expected[order], rtol=1e-6, atol=1e-6)
    assert remove(full, 17)
    kept = np.arange(40) != 17
    problem.points, problem.values = problem.points[kept], problem.values[kept]
    for name in ("points", "values", "gradients", "weights", "inverse_blocks", "whitened"):
        expected = getattr(problem.joint(), name)
        found = getattr(full, name)[: len(expected)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    for row in x:
        for one, two in zip(
            joint_prediction(full, row), joint_prediction(problem.joint(), row), strict=True
        ):
            np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-8)


def test_joint_budget_replaces_the_point_that_the_others_predict_best(kernel):
    problem = JointProblem(kernel, 2, 10)
    process, use = problem.joint(), []
    for i, (x, value) in enumerate(zip(problem.points, problem.values, strict=True)):
        mean, posterior = problem.joint_brute_force(x, np.delete(problem.points, i, axis=0))
        error = abs(value - mean[0]) + 0.5 * posterior[0, 0]
        use.append(error / (1 + problem.values.max() - value))
    index, smallest = least_useful(process, np.full(2, np.nan))
    assert (index, smallest) == (np.argmin(use), pytest.approx(min(use), rel=1e-5))
    assert least_useful(process, problem.points[index])[0] == np.argsort(use)[1]
    current, replaced = problem.points[index].copy(), 0
    for x in problem.draw(60):
        slope = problem.gradients(x)
        replaced += add_training_point(process, x, problem.function(x[None])[0], slope, current)
    assert replaced > 5
    assert process.count[0] == 10
    assert np.any(np.all(process.points == current, axis=1))
    x = problem.draw(1)[0]
    expected = problem.joint_brute_force(x, process.points)
    for one, two in zip(joint_prediction(process, x), expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_joint_marginal_likelihood_and_its_gradient(kernel, dim):
    problem = JointProblem(kernel, dim, 4 if dim == 1 else 8)
    u = problem.whiten(problem.points)
    slopes = problem.gradients(problem.points) @ problem.factor
    given = (np.ascontiguousarray(u.T), np.vstack([problem.values, slopes.T]))

    def likelihood(hyperparameters):
        return log_marginal_likelihood(COVARIANCES[kernel], *given, hyperparameters)

    matrix = problem.joint_covariance(u, u).astype(float)
    matrix[np.diag_indices(len(matrix))] *= 1 + 1e-8
    target = np.column_stack([problem.values, slopes]).ravel()
    determinant = np.linalg.slogdet(2 * np.pi * matrix)[1]
    expected = -0.5 * (target @ np.linalg.solve(matrix, target) + determinant)
    found, gradient = likelihood(problem.hyperparameters)
    assert found == pytest.approx(expected, rel=1e-7)
    differences = difference_gradient(lambda h: likelihood(h)[0], problem.hyperparameters)
    np.testing.assert_allclose(gradient, differences, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mean", MEANS)
def test_joint_fit(kernel, mean):
    problem = JointProblem(kernel, 2, 60)
    surrogate = GPSurrogate(kernel=kernel, mean=mean)
    process, values = surrogate.new_process(2, gradients=True), problem.values.copy()
    slopes = problem.gradients(problem.points)
    values[3], slopes[4] = -np.inf, np.nan
    surrogate.fit_into(process, problem.points, values, slopes, current_value=-1.5)
    assert process.count[0] == 58
    count = process.count[0]
    surrogate.fit_into(
        process, process.points[:count], process.values[:count], process.gradients[:count]
    )
    x = problem.location + 0.4 * (problem.draw(10) - problem.location)
    for row, value, slope in zip(x, problem.function(x), problem.gradients(x), strict=True):
        found, posterior = joint_prediction(process, row)
        np.testing.assert_allclose(found, [value, *slope], atol=0.3)
        assert posterior[0, 0] < 0.05
    with pytest.raises(ValueError, match="0 distinct points"):
        surrogate.fit_into(process, problem.points, values * np.nan, slopes)
