"""The sparse Gaussian process against brute force, and what it learns from."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from surrogates import learn_all

from pymc_kameleon.gp import sparse_gp_fit
from pymc_kameleon.gp.covariances import (
    COVARIANCES,
    fit_hyperparameters,
    log_marginal_likelihood,
)
from pymc_kameleon.gp.mean import Mean, fit_quadratic
from pymc_kameleon.gp.sparse_gp import (
    add_centre,
    follow,
    log_surrogate,
    new_sparse_gp,
    predict,
    predict_with_gradient,
    value_and_gradient_at,
)
from pymc_kameleon.gp.sparse_gp_fit import cholesky_with_jitter, fit_sparse_gp
from pymc_kameleon.gp.triangular_map import TriangularMap, identity_map
from pymc_kameleon.mcmc.coordinates import Standardization, standardization
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.surrogate.gp_surrogate import MEANS

KERNELS = list(COVARIANCES)


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
    if kernel == "gaussian":
        return amplitude**2 * np.exp(-(r**2) / 2)
    if kernel == "rational_quadratic":
        return amplitude**2 * (1 + r**2 / 16) ** -8
    root = np.sqrt(np.longdouble(5)) * r
    return amplitude**2 * (1 + root + root**2 / 3) * np.exp(-root)


def quadratic_mean(mean, u):
    return mean.constant[0] + u @ mean.linear + 0.5 * np.einsum("ni,ij,nj->n", u, mean.quadratic, u)


def difference_gradient(function, x):
    """Fourth-order central differences, in the precision of `x`."""
    step = x.dtype.type(1e-3)
    offsets, weights = (-2, -1, 1, 2), (1 / 12, -2 / 3, 2 / 3, -1 / 12)
    return np.array(
        [
            sum(
                w * np.asarray(function(x + o * step * e))
                for o, w in zip(offsets, weights, strict=True)
            )
            / step
            for e in np.eye(x.size, dtype=x.dtype)
        ]
    )


def bending(dim):
    """Replace the second coordinate by what a parabola in the first leaves of it."""
    linear, quadratic = np.zeros((1, dim)), np.zeros((1, dim, dim))
    linear[0, 0], quadratic[0, 0, 0] = 0.3, 0.8
    return TriangularMap(np.array([1]), np.array([0.7]), np.array([0.1]), linear, quadratic)


class Problem:
    """Points of a rough function, a mean, coordinates and hyperparameters."""

    def __init__(self, kernel, dim, count, bends=False):
        rng = np.random.default_rng(0)
        self.rng, self.kernel, self.dim = rng, kernel, dim
        self.location, root = rng.normal(size=dim), rng.normal(size=(dim, dim))
        self.factor = np.linalg.cholesky(root @ root.T + 0.3 * np.eye(dim))
        self.points = self.draw(count)
        self.values = self.function(self.points)
        half = rng.normal(size=(dim, dim))
        self.mean = Mean(np.array([0.7]), rng.normal(size=dim), -half @ half.T)
        self.hyperparameters = np.log([1.7, *rng.uniform(0.3, 0.8, dim)])
        self.triangular_map = bending(dim) if bends else identity_map(dim)

    def draw(self, count):
        return self.location + self.rng.normal(size=(count, self.dim)) @ self.factor.T

    def function(self, points):
        return np.sin(3 * points).sum(axis=1) - 0.5 * (points**2).sum(axis=1)

    def gradients(self, points):
        return 3 * np.cos(3 * points) - points

    def straight(self, points):
        """Coordinates v (n, d) in extended precision."""
        u = (points - self.location) @ inverse(self.factor).T
        v = u.copy()
        for k, *parts in zip(*self.triangular_map, strict=True):
            scale, constant, linear, quadratic = parts
            bend = constant + u @ linear + 0.5 * np.einsum("ni,ij,nj->n", u, quadratic, u)
            v[:, k] = (u[:, k] - bend) / scale
        return v

    def process(self, capacity=None, count=None):
        """A process with a centre at each point."""
        capacity = len(self.points) if capacity is None else capacity
        kernel = COVARIANCES[self.kernel]
        process = new_sparse_gp(kernel, self.dim, capacity, 1e6, has_variance=True)._replace(
            standardization=Standardization(self.location, self.factor),
            triangular_map=self.triangular_map,
            mean=copy.deepcopy(self.mean),
        )
        return learn_all(process, self.points[:count], self.values[:count], self.hyperparameters)

    def posterior(self, x, y, mean=None):
        """Means at the rows of `x`, and their covariances with those of `y`, by the textbook."""
        mean = self.mean if mean is None else mean
        at = self.straight(self.points)
        v, w = self.straight(x), self.straight(y)
        matrix = covariance(self.kernel, at, at, self.hyperparameters)
        matrix += 1e-8 * np.exp(2 * self.hyperparameters[0]) * np.eye(len(at))
        cross = [covariance(self.kernel, z, at, self.hyperparameters) for z in (v, w)]
        solved = cross[0] @ inverse(matrix)
        means = quadratic_mean(mean, v) + solved @ (self.values - quadratic_mean(mean, at))
        return means, covariance(self.kernel, v, w, self.hyperparameters) - solved @ cross[1].T


def predictions(process, x):
    return np.array([predict(process, row) for row in x]).T


def joint_prediction(process, x):
    dim = x.size
    of_mean, cross, of_gradient = np.empty(dim), np.empty(dim), np.empty((dim, dim))
    mean, variance = predict_with_gradient(process, x, of_mean, cross, of_gradient)
    return mean, variance, of_mean, cross, of_gradient


def snapshot(process):
    return pickle.dumps(process)


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


@pytest.mark.parametrize(("dim", "bends"), [(1, False), (3, True)])
def test_predictions_match_the_textbook(kernel, dim, bends):
    """Mean and covariances of the gradient are derivatives of those of the value."""
    problem = Problem(kernel, dim, 8 if dim == 1 else 25, bends)
    process, many = problem.process(), problem.draw(10)
    means, covariances = problem.posterior(many, many)
    variances = np.diagonal(covariances)
    expected = np.array([means, variances], dtype=float)
    np.testing.assert_allclose(predictions(process, many), expected, rtol=1e-7, atol=1e-7)
    largest = np.minimum(means + 0.5 * variances, problem.values.max()).astype(float)
    np.testing.assert_allclose([log_surrogate(process, row) for row in many], largest, atol=1e-7)
    for x in problem.draw(2):
        at = x.astype(np.longdouble)

        def of_covariance(y, x=at):
            return problem.posterior(x[None], y[None])[1][0, 0]

        def mixed(x, y=at, of_covariance=of_covariance):
            return difference_gradient(lambda y: of_covariance(y, x), y)

        mean, variance, *found = joint_prediction(process, x)
        np.testing.assert_allclose([mean, variance], predict(process, x), rtol=1e-9, atol=1e-12)
        expected = (
            difference_gradient(lambda x: problem.posterior(x[None], x[None])[0][0], at),
            difference_gradient(of_covariance, at),
            difference_gradient(mixed, at),
        )
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two.astype(float), rtol=1e-5, atol=1e-5)
        if kernel != "rational_quadratic":  # that of trajectories
            continue
        u = process.standardization.whiten(x[None])[:, 0]
        rooms, in_u = np.empty((2, dim)), np.empty(dim)
        value = value_and_gradient_at(process, u, *rooms, np.empty(len(problem.points)), in_u)
        assert value == pytest.approx(mean, rel=1e-9)
        np.testing.assert_allclose(in_u, problem.factor.T @ found[0], rtol=1e-7, atol=1e-9)


def test_the_surrogate_promises_no_more_than_the_largest_value(kernel):
    problem = Problem(kernel, 2, 10)
    problem.mean = Mean(np.array([0.0]), np.zeros(2), np.zeros((2, 2)))
    process, far = problem.process(), problem.location + 1e6
    for constant in (-4.0, 50.0):
        follow(process, constant)
        mean, variance = predict(process, far)
        assert mean == constant
        expected = min(mean + 0.5 * variance, problem.values.max())
        assert log_surrogate(process, far) == pytest.approx(expected)
    assert log_surrogate(process, far) == problem.values.max() < mean


def test_without_centres_the_prior_is_predicted(kernel):
    process = new_sparse_gp(COVARIANCES[kernel], 2, 5, 100.0, has_variance=True)
    process.mean.constant[0] = 3.0
    assert predict(process, np.array([0.3, 0.1])) == (3.0, 1.0)
    assert log_surrogate(process, np.array([0.3, 0.1])) == 3.5


def test_a_mean_that_follows_is_that_of_a_new_process(kernel):
    problem = Problem(kernel, 2, 25)
    means = [Mean(np.array([c]), np.zeros(2), np.zeros((2, 2))) for c in (0.7, -4.5)]
    problem.mean = means[0]
    process, x = problem.process(), problem.draw(10)
    follow(process, -4.5)
    expected = problem.posterior(x, x, means[1])[0].astype(float)
    np.testing.assert_allclose(predictions(process, x)[0], expected, atol=1e-7)


def test_what_is_known_already_or_finds_no_room_changes_nothing(kernel):
    problem = Problem(kernel, 2, 20)
    process = problem.process(21)
    before = snapshot(process)
    for point, value in zip(problem.points, problem.values, strict=True):
        assert not add_centre(process, point, value)
    assert not add_centre(process, np.array([0.1, np.nan]), 1.0)
    assert snapshot(process) == before
    new = problem.draw(2)
    assert add_centre(process, new[0], 1.0)
    before = snapshot(process)
    assert not add_centre(process, new[1], 1.0)
    assert snapshot(process) == before


def test_low_and_non_finite_values_are_censored(kernel):
    process = new_sparse_gp(COVARIANCES[kernel], 1, 10, 60.0, has_variance=True)
    assert not add_centre(process, np.array([0.0]), -np.inf)
    assert not add_centre(process, np.array([0.0]), np.nan)
    assert add_centre(process, np.array([0.0]), -5.0)
    for x, value in enumerate([-1e300, -np.inf, np.nan, np.inf, -64.0, -66.0], start=1):
        assert add_centre(process, np.array([3.0 * x]), value)
    np.testing.assert_array_equal(process.values[:7], [-5, -65, -65, -65, -65, -64, -65])
    assert add_centre(process, np.array([30.0]), 10.0)
    assert process.censoring[0] == 10
    assert np.all(np.isfinite(predictions(process, np.linspace(-5, 40, 50)[:, None])))


def test_the_least_jitter_that_works_is_taken():
    for matrix, expected in [(np.eye(5), 1e-8), (np.ones((60, 60)) - 3e-8 * np.eye(60), 1e-7)]:
        factor, jitter = cholesky_with_jitter(matrix.copy())
        assert jitter == pytest.approx(expected)
        product = factor @ factor.T - jitter * np.eye(len(matrix))
        np.testing.assert_allclose(product, matrix, atol=1e-12)
    with pytest.raises(np.linalg.LinAlgError):
        cholesky_with_jitter(-np.eye(3))


def joint_covariance(kernel, u, hyperparameters):
    """Covariances of value and gradient, by rows of points: differences of the textbook's."""
    step, offsets = np.longdouble(1e-4), (-2, -1, 1, 2)
    weights = np.array([1, -8, 8, -1], np.longdouble) / 12 / step
    count, dim = u.shape
    moved = [[(1, u.astype(np.longdouble))]]
    moved += [
        [(w, u + step * o * e) for w, o in zip(weights, offsets, strict=True)]
        for e in np.eye(dim, dtype=np.longdouble)
    ]
    out = np.zeros((count, 1 + dim, count, 1 + dim), np.longdouble)
    for i, one in enumerate(moved):
        for j, two in enumerate(moved):
            for a, p in one:
                for b, q in two:
                    out[:, i, :, j] += a * b * covariance(kernel, p, q, hyperparameters)
    return out.reshape(count * (1 + dim), -1).astype(float)


@pytest.mark.parametrize(("dim", "has_gradients"), [(1, True), (3, True), (5, False)])
def test_marginal_likelihood_and_its_gradient(kernel, dim, has_gradients):
    problem = Problem(kernel, dim, 4 if dim == 1 else 8)
    if has_gradients:  # which tell so much of what is near that close points are almost redundant
        problem.hyperparameters[1:] -= np.log(5.0 if dim == 1 else 2.0)
    u = problem.straight(problem.points).astype(float)
    noise, targets = np.linspace(0.0, 0.2, len(u)), problem.values[None]
    matrix = covariance(kernel, u, u, problem.hyperparameters).astype(float)
    if has_gradients:
        matrix = joint_covariance(kernel, u, problem.hyperparameters)
        targets = np.vstack([targets, (problem.gradients(problem.points) @ problem.factor).T])
    size = len(targets)
    matrix[np.diag_indices(len(matrix))] *= 1 + 1e-8
    matrix[np.arange(0, len(matrix), size), np.arange(0, len(matrix), size)] += noise**2
    target = targets.T.ravel()

    def likelihood(hyperparameters):
        at = np.ascontiguousarray(u.T)
        return log_marginal_likelihood(COVARIANCES[kernel], at, targets, hyperparameters, noise)

    determinant = np.linalg.slogdet(2 * np.pi * matrix)[1]
    expected = -0.5 * (target @ np.linalg.solve(matrix, target) + determinant)
    found, gradient = likelihood(problem.hyperparameters)
    assert found == pytest.approx(expected, rel=1e-7)
    differences = difference_gradient(lambda h: likelihood(h)[0], problem.hyperparameters)
    np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-6)


@pytest.mark.numerics
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


@pytest.mark.numerics
def test_hyperparameters_are_fitted_to_points_in_the_order_that_they_came(monkeypatch):
    """Not sorted, of which every other one would be those of a grid along the first coordinate."""
    given = []
    fit = sparse_gp_fit.fit_hyperparameters

    def noted(kernel, u, *arguments):
        given.append(u)
        return fit(kernel, u, *arguments)

    monkeypatch.setattr(sparse_gp_fit, "fit_hyperparameters", noted)
    points = np.random.default_rng(2).normal(size=(40, 2))
    coordinates = Standardization(np.zeros(2), np.eye(2))
    repeated = np.concatenate([points[:5], points])
    values = -0.5 * np.sum(repeated**4, axis=1)
    gp, _ = fit_sparse_gp(repeated, values, coordinates, 20)
    np.testing.assert_allclose(given[-1].T, gp.triangular_map.to_v(points.T).T)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_concave_quadratic_is_fitted_exactly(with_gradients):
    mean, dim = Problem("matern", 3, 5).mean, 3
    u = np.random.default_rng(1).normal(size=(dim, 30))
    gradients = mean.linear[:, None] + mean.quadratic @ u if with_gradients else None
    values = quadratic_mean(mean, u.T) - 1e6
    found = fit_quadratic(u, values, np.ones(30), gradients=gradients)
    np.testing.assert_allclose(found.constant + 1e6, mean.constant, atol=1e-6)
    np.testing.assert_allclose(found.linear, mean.linear, atol=1e-6)
    np.testing.assert_allclose(found.quadratic, mean.quadratic, atol=1e-6)


@pytest.mark.numerics
@pytest.mark.parametrize(("mean", "scale"), [("quadratic", 1e-6), ("constant", 1e6)])
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


@pytest.mark.numerics
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_what_is_known_comes_back_whatever_its_size(kernel, size):
    problem = Problem(kernel, 3, 60)
    fitted = GPSurrogate(kernel=kernel, depth=1e9).fit(problem.points, size * problem.values)
    mean, variance = fitted.predict(problem.points, return_variance=True)
    np.testing.assert_allclose(mean / size, problem.values, atol=0.02)
    assert variance.max() / size**2 < 1e-3


def test_a_quadratic_target_is_known_everywhere():
    problem = Problem("matern", 4, 40)
    u = problem.straight(problem.points).astype(float)
    fitted = GPSurrogate().fit(problem.points, quadratic_mean(problem.mean, u))
    x = problem.location + 5 * (problem.draw(20) - problem.location)
    expected = quadratic_mean(problem.mean, problem.straight(x).astype(float))
    mean, variance = fitted.predict(x, return_variance=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)
    assert variance.max() < 1e-5


@pytest.mark.numerics
def test_update_learns_and_there_are_no_more_centres_than_may_be():
    problem = Problem("gaussian", 2, 40)
    fitted = GPSurrogate(max_points=50).fit(problem.points, problem.values)
    new = problem.draw(60)
    hyperparameters = fitted.process.hyperparameters.copy()
    before = fitted.predict(new, return_variance=True)[1].mean()
    assert not fitted.update(problem.points[3], problem.values[3])
    learnt = [fitted.update(x, v) for x, v in zip(new, problem.function(new), strict=True)]
    assert sum(learnt) > 20
    assert fitted.process.count[0] == 50
    assert fitted.predict(new, return_variance=True)[1].mean() < before
    assert np.abs(fitted.predict(new) - problem.function(new)).mean() < 0.1
    np.testing.assert_array_equal(fitted.process.hyperparameters, hyperparameters)


def test_repeated_points_count_once_and_the_current_mean_is_the_value_given():
    problem, surrogate = Problem("matern", 2, 30), GPSurrogate(mean="current")
    points, values = np.tile(problem.points, (3, 1)), np.tile(problem.values, 3)
    process = surrogate.new_process(2)
    surrogate.fit_into(process, points, values, current_value=-2.5)
    assert predict(process, problem.location + 1e6)[0] == -2.5
    assert process.count[0] <= 30
    np.testing.assert_array_equal(surrogate.fit(points, values).points, problem.points)


def test_fitting_again_in_place_starts_from_what_was_known():
    problem, surrogate = Problem("gaussian", 2, 60), GPSurrogate()
    process = surrogate.new_process(2)
    surrogate.fit_into(process, problem.points[:30], problem.values[:30])
    before = process.hyperparameters.copy()
    surrogate.fit_into(process, problem.points, problem.values, searches=False)
    np.testing.assert_array_equal(process.hyperparameters, before)
    surrogate.fit_into(process, problem.points, problem.values)
    mean, _ = predictions(process, problem.points)
    np.testing.assert_allclose(mean, problem.values, atol=0.02)
    other = surrogate.fit(problem.points, problem.values).process
    np.testing.assert_allclose(other.hyperparameters, process.hyperparameters, atol=0.3)


@pytest.mark.numerics
def test_a_fit_leaves_censored_points_out(kernel):
    rng = np.random.default_rng(3)
    points = rng.normal(size=(60, 2))
    values = np.cos(points).sum(axis=1)
    beyond = np.concatenate([points, rng.normal(size=(20, 2)) * 0.3 + [4.0, 0.0]])
    censored = np.concatenate([values, np.full(20, -np.inf)])
    surrogate = GPSurrogate(kernel=kernel)
    expected = surrogate.fit(points, values).process
    assert snapshot(surrogate.fit(beyond, censored).process) == snapshot(expected)
    factor = standardization(points, np.ones(2)).factor
    np.testing.assert_array_equal(expected.standardization.factor, factor)
    few = surrogate.fit(beyond[-23:], np.r_[values[-3:], np.full(20, -1e9)])
    assert few.predict(np.array([[4.0, 0.0]]))[0] < -30.0


def test_a_cliff_does_not_ruin_what_lies_above_it():
    points = np.random.default_rng(0).normal(size=(80, 2))
    values = -0.5 * (points**2).sum(axis=1)
    values[points[:, 0] > 1] = -np.inf
    fitted = GPSurrogate().fit(points, values)
    left_out = np.random.default_rng(1).normal(size=(100, 2)) * 0.5 - [0.8, 0]
    assert np.abs(fitted.predict(left_out) + 0.5 * (left_out**2).sum(axis=1)).max() < 5


def test_amplitudes_do_not_run_away_where_a_polynomial_fits():
    """Its marginal likelihood grows with lengthscales and amplitude together, without end."""
    points = np.random.default_rng(7).normal(size=(80, 4))
    values = 10 * points[:, 0] * points[:, 3] ** 2 - 20 * (points**2).sum(axis=1)
    process = GPSurrogate(mean="constant").fit(points, values).process
    assert np.all(process.hyperparameters[1:] <= np.log(5.0 * 2.0) + 1e-9)
    assert process.jitter[0] == 1e-8


@pytest.mark.numerics
@pytest.mark.parametrize("mean", MEANS)
def test_values_and_gradients_are_fitted_together(kernel, mean):
    problem = Problem(kernel, 2, 60)
    problem.hyperparameters[1:] -= np.log(2.0)
    surrogate = GPSurrogate(kernel=kernel, mean=mean)
    process, values = surrogate.new_process(2, gradients=True), problem.values.copy()
    slopes = problem.gradients(problem.points)
    values[3], slopes[4] = -np.inf, np.nan
    surrogate.fit_into(process, problem.points, values, slopes, current_value=-1.5)
    assert process.count[0] > len(problem.points)
    x = problem.location + 0.4 * (problem.draw(10) - problem.location)
    for row, value, slope in zip(x, problem.function(x), problem.gradients(x), strict=True):
        found, variance, gradient, _, of_gradient = joint_prediction(process, row)
        np.testing.assert_allclose([found, *gradient], [value, *slope], atol=0.3)
        assert variance < 0.05 and np.linalg.eigvalsh(of_gradient)[0] > -1e-6
    with pytest.raises(ValueError, match="0 distinct points"):
        surrogate.fit_into(process, problem.points, values * np.nan, slopes)


def test_configuration_is_immutable_and_survives_pickling():
    surrogate = GPSurrogate(kernel="matern", n_initial=7, refit=2)
    assert pickle.loads(pickle.dumps(surrogate)) == surrogate
    with pytest.raises(dataclasses.FrozenInstanceError):
        surrogate.max_points = 5
    problem = Problem("matern", 2, 30)
    fitted = surrogate.fit(problem.points, problem.values)
    copied = pickle.loads(pickle.dumps(fitted))
    x = problem.draw(5)
    np.testing.assert_array_equal(copied.predict(x), fitted.predict(x))
    assert surrogate.needs_refit(20, 10)
    assert not surrogate.needs_refit(19, 10)
    assert surrogate.initial_size(3) == 7
    assert GPSurrogate().initial_size(8) == 18
    assert GPSurrogate().initial_size(8, gradients=True) == 4


X = np.random.default_rng(1).normal(size=(9, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GPSurrogate(kernel="rbf"), ValueError, "'rbf': take one of 'gaussian'"),
        (lambda: GPSurrogate(mean=None), ValueError, "mean=None: take one of 'quadratic'"),
        (lambda: GPSurrogate(max_points=2), ValueError, "max_points=2"),
        (lambda: GPSurrogate(max_points=20.5), TypeError, "max_points=20.5"),
        (lambda: GPSurrogate(n_initial=0), ValueError, "n_initial=0"),
        (lambda: GPSurrogate(refit=1.0), ValueError, "refit=1.0"),
        (lambda: GPSurrogate(refit=True), TypeError, "refit=True"),
        (lambda: GPSurrogate(depth=-1), ValueError, "depth=-1"),
        (
            lambda: GPSurrogate(max_points=6).check_dimension(5, "a, b"),
            ValueError,
            r"max_points=6 is too few for a, b.*d = 5.*at least 7",
        ),
        (
            lambda: GPSurrogate(max_points=20).check_dimension(5, "a, b", gradients=True),
            ValueError,
            r"max_points=20 is too few.*at least 24",
        ),
        (
            lambda: GPSurrogate(n_initial=4).check_dimension(5, "a, b"),
            ValueError,
            r"n_initial=4 does not suit.*take 7 to 300",
        ),
        (lambda: GPSurrogate().fit(X[:, 0], X[:, 0]), ValueError, r"X has shape \(9,\)"),
        (lambda: GPSurrogate().fit(X, X), ValueError, "values has shape"),
        (lambda: GPSurrogate().fit(X * np.nan, X[:, 0]), ValueError, "X has NaN"),
        (
            lambda: GPSurrogate().fit(X[:3], X[:3, 0]),
            ValueError,
            "3 distinct points have a finite log-likelihood",
        ),
        (lambda: GPSurrogate().fit(X, np.full(9, -np.inf)), ValueError, "0 distinct points"),
        (lambda: GPSurrogate().fit(X, X[:, 0]).update(X, 1.0), ValueError, "x has shape"),
        (lambda: GPSurrogate().fit(X, X[:, 0]).predict(X[:, :1]), ValueError, "X has shape"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
    for gradients in (False, True):
        GPSurrogate().check_dimension(50, gradients=gradients)
