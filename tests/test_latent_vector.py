"""Linear predictors as one latent function: what is found in a model, and that it is exact.

Statistical assertions state their null probability.
"""

import pickle
from functools import partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import COUNTS, FALSE_ALARM, INPUTS, PLAIN, UNCOMPILED, begin, drive, latent
from scipy import stats

from pymc_kameleon import LatentGPStep
from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.latent_gp.gaussian import sparse_cholesky
from pymc_kameleon.latent_gp.gaussian.blocks import Blocks
from pymc_kameleon.latent_gp.gaussian.conditional import BlockConditional
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import covariance_times
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.hyperparameters.learning import pilot_at
from pymc_kameleon.latent_gp.hyperparameters.site_function import constant_sites
from pymc_kameleon.latent_gp.hyperparameters.target import (
    JointTarget,
    move_hyperparameters,
    slices,
    trajectory,
)
from pymc_kameleon.latent_gp.reader import latent_vector
from pymc_kameleon.latent_gp.reader.precision_prior import PrecisionConditional
from pymc_kameleon.mcmc.chain import new_chain
from pymc_kameleon.model.initial_points import PriorSampler
from pymc_kameleon.model.transforms import unconstrained

N = len(COUNTS)
RING = np.roll(np.eye(N), 1, axis=0) + np.roll(np.eye(N), -1, axis=0)
GROUP = np.arange(N) % 3
COVARIATES = np.random.default_rng(5).standard_normal((N, 2))


def counted(predictor):
    return pm.Poisson("y", pt.exp(predictor), observed=pm.Data("data", COUNTS))


def mixed():
    """A function, an intercept, coefficients, and effects of groups about a mean of their own."""
    amplitude, spread = pm.HalfNormal("amplitude", 1.0), pm.HalfNormal("spread", 1.0)
    level = pm.Normal("level", 0.5, 1.0)
    slopes = pm.Normal("slopes", 0.0, 0.5, shape=2)
    mean = pm.Normal("mean", 0.0, 0.3)
    effects = pm.Normal("effects", mean, spread, shape=3)
    f = latent(amplitude=amplitude)
    counted(level + f + COVARIATES @ slopes + effects[GROUP])


def two_functions():
    amplitudes = pm.HalfNormal("amplitudes", 1.0, shape=2)
    f = latent("f", amplitude=amplitudes[0])
    g = latent("g", amplitude=amplitudes[1], lengthscale=0.2)
    counted(f + g)


def areas():
    """Areas on a ring, some with a covariate, of which the precision is known by its density."""
    sd, alpha = pm.HalfNormal("sd", 1.0), pm.Beta("alpha", 2, 2)
    phi = pm.CAR("phi", mu=np.zeros(N), W=RING, alpha=alpha, tau=sd**-2)
    counted(pm.Normal("level", 0, 1) + phi)


def noise_and_mean():
    """Observations that depend on two values each."""
    f = latent("f", amplitude=pm.HalfNormal("amplitude", 1.0))
    g = latent("g", amplitude=0.5)
    pm.Normal("y", f, pt.exp(g), observed=pm.Data("data", COUNTS.astype(float)))


def classes():
    """Three values each, and a sum of them that data say nothing of."""
    amplitude = pm.HalfNormal("amplitude", 2.0)
    functions = [latent(f"f{k}", amplitude=amplitude) for k in range(3)]
    p = pm.math.softmax(pt.stack(functions, axis=1), axis=1)
    pm.Categorical("y", p=p, observed=pm.Data("data", COUNTS % 3))


def bym2(can_be_drawn=False):
    """Areas as people write them, in fewer predictors than variables, and a weight that moves."""
    sd, share = pm.HalfNormal("sd", 1.0), pm.Beta("share", 2, 2)
    own = pm.Normal("own", 0, 1, shape=N)
    if can_be_drawn:  # the same
        precision = 2 * np.eye(N) - RING + (0.1 * N) ** -2
        phi = pm.MvNormal("phi", np.zeros(N), tau=precision)
    else:
        phi = pm.ICAR("phi", W=RING, zero_sum_stdev=0.1)
    level = pm.Normal("level", 0, 1)
    counted(level + sd * (pt.sqrt(1 - share) * own + pt.sqrt(share) * phi))


def walks():
    """Two values each of a walk and an autoregression, and a covariate of each observation."""
    spread = pm.HalfNormal("spread", 1.0)
    start = pm.Normal.dist(0, 1)
    f = pm.GaussianRandomWalk("f", sigma=spread, steps=2, init_dist=start)
    g = pm.AR("g", rho=[0.5], sigma=0.5, steps=2, init_dist=start)
    place, slope = np.arange(N) // 2, pm.Normal("slope", 0, 1)
    mean = f[place] + slope * COVARIATES[:, 0]
    pm.Normal("y", mean, pt.exp(g[place]), observed=pm.Data("data", COUNTS.astype(float)))


def known_walk():
    """No hyperparameters: a walk with fixed scales, and a level."""
    x = pm.GaussianRandomWalk("x", sigma=0.5, steps=N - 1, init_dist=pm.Normal.dist(0, 1))
    counted(pm.Normal("level", 0, 1) + x)


def crossed():
    """Effects of two crossed factors, one written with its scale outside, and a covariate."""
    first, second = pm.HalfNormal("first", 1.0), pm.HalfNormal("second", 1.0)
    u = pm.Normal("u", pm.Normal("level", 0.0, 1.0), first, shape=3)
    v = second * pm.Normal("v", 0.0, 1.0, shape=2)
    slope = pm.Normal("slope", 0.0, 0.5)
    counted(u[GROUP] + v[np.arange(N) // 3] + slope * COVARIATES[:, 0])


def random_slopes():
    """Correlated intercepts and slopes of groups."""
    sd = pm.HalfNormal.dist(0.7, shape=2)
    factor, _, _ = pm.LKJCholeskyCov("factor", n=2, eta=2.0, sd_dist=sd)
    effects = factor @ pm.Normal("effects", 0.0, 1.0, shape=(2, 3))
    level = pm.Normal("level", 0.0, 1.0)
    counted(level + effects[0, GROUP] + effects[1, GROUP] * COVARIATES[:, 0])


def noise_of_groups():
    """Two values each, of which one is that of several observations."""
    spread = pm.HalfNormal("spread", 1.0)
    u, v = pm.Normal("u", 0.0, spread, shape=5), pm.Normal("v", 0.0, 0.5, shape=5)
    mean, log_sd = u[np.arange(N) % 5], v[np.arange(N) // 2]
    pm.Normal("y", mean, pt.exp(log_sd), observed=pm.Data("data", COUNTS.astype(float)))


MODELS = {
    m.__name__: m
    for m in (
        mixed,
        two_functions,
        areas,
        bym2,
        walks,
        noise_and_mean,
        classes,
        known_walk,
        crossed,
        random_slopes,
        noise_of_groups,
    )
}


def made(build):
    with pm.Model() as model:
        build()
    return model


def names(values):
    return [value.name for value in values]


# what is found ------------------------------------------------------------------------------------


def test_gaussian_variables_of_a_linear_predictor_are_found():
    with pm.Model() as model:
        scale = pm.Normal("log_scale", 0, 1)
        pm.Normal("elsewhere", 0, 1)
        pm.StudentT("robust", 4)
        mixed()
        model_f = model["f"]
        pm.Normal("z", pt.exp(scale) * model_f[0] + model["robust"], 1.0, observed=0.3)
        pm.Normal("later", model_f[1], 1.0)
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    found = set(names(joint.function.value_variables))
    assert found == {"f_rotated_", "level", "slopes", "mean", "effects"}
    assert {"log_scale", "amplitude_log__", "spread_log__"} < set(names(joint.hyperparameters))
    assert names(joint.predicted) == ["later"]
    assert names(joint.others) == ["elsewhere"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: pm.TruncatedNormal("x", 0, 1, lower=-2.0, transform=None),
        lambda: pm.Laplace("x", 0, 1),
        lambda: pm.StudentT("x", 4),
        lambda: pm.Flat("x"),
        lambda: pm.HalfNormal("x", 1),
        lambda: pm.CustomDist("x", logp=lambda v: -pt.where(pt.abs(v) < 50, v**2, pt.abs(v))),
    ],
)
def test_what_is_not_gaussian_is_a_hyperparameter(make):
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
        counted(pm.Normal("level", 0, 1) + make() + f)
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    assert set(names(joint.function.value_variables)) == {"f_rotated_", "level"}
    assert len(joint.hyperparameters) == 2


@pytest.mark.parametrize(
    ("vars", "taken"),
    [
        (["f", "amplitude", "level"], {"f_rotated_", "level"}),
        (["f"], {"f_rotated_", "level", "slopes", "mean", "effects"}),
        (["level", "f"], {"f_rotated_", "level"}),
    ],
)
def test_vars_restrict_it(vars, taken):
    model = made(mixed)
    joint = JointModel(model, vars, compile_kwargs=UNCOMPILED)
    assert set(names(joint.function.value_variables)) == taken


def process_walk():
    pm.GaussianRandomWalk(
        "x", sigma=pm.HalfNormal("s", 1), steps=N - 1, init_dist=pm.Normal.dist(0, 2)
    )


def process_ar():
    rho, start = pm.Uniform("rho", -1, 1), pm.Normal.dist(0, 2)
    pm.AR("x", rho=[rho], sigma=pm.HalfNormal("s", 1), steps=N - 1, init_dist=start)


def process_icar():
    pm.ICAR("x", W=RING, sigma=pm.HalfNormal("s", 1))


def process_zero_sum():
    pm.ZeroSumNormal("x", pm.HalfNormal("s", 1), shape=N)
    pm.Normal("level", 0, 1)


@pytest.mark.numerics
@pytest.mark.parametrize("process", [process_walk, process_ar, process_icar, process_zero_sum])
def test_a_density_gives_the_gaussian(process):
    """Density of the model = that of the target with N(x; m, K), at random values; 1e-6 of it."""
    with pm.Model() as model:
        process()
        counted(model["x"] + (model["level"] if "level" in model.named_vars else 0.0))
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    rng = np.random.default_rng(0)
    target = JointTarget(joint, constant_sites(joint.flat_sites(), joint.dim))
    density, start = model.compile_logp(**UNCOMPILED), model.initial_point()
    for _ in range(3):
        theta = rng.standard_normal(joint.dim)
        joint.set_hyperparameters(theta)
        others = joint.function.prior._others.at()
        covariance = np.array([covariance_times(others.root, e) for e in np.eye(others.mean.size)])
        x = rng.standard_normal(others.mean.size)
        found = target.point(theta, joint.prior().variable.to_function(x))
        value = stats.multivariate_normal(others.mean, covariance).logpdf(x)
        values = [*joint.hyperparameters, *joint.function.value_variables]
        shapes = [start[v.name].shape for v in values]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = np.split(np.concatenate([theta, x]), ends[:-1])
        point = {v.name: p.reshape(s) for v, p, s in zip(values, parts, shapes, strict=True)}
        value += found.log_prior + found.log_likelihood
        np.testing.assert_allclose(density(point), value, rtol=1e-6)


@pytest.mark.numerics
def test_prior_of_linear_predictors():
    """Against the covariance put together by hand."""
    model = made(mixed)
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    theta = np.array([0.3, -0.4])
    assert names(joint.hyperparameters) == ["amplitude_log__", "spread_log__"]
    joint.set_hyperparameters(theta)
    gaussian, variable = joint.prior()
    amplitude, spread = np.exp(theta)
    dummies = np.eye(3)[GROUP]
    expected = amplitude**2 * np.exp(-0.5 * ((INPUTS[:, None] - INPUTS) ** 2).sum(axis=2))
    expected += 1e-6 * np.eye(N) + 1.0 + 0.25 * COVARIATES @ COVARIATES.T
    expected += dummies @ (spread**2 * np.eye(3) + 0.09) @ dummies.T
    np.testing.assert_allclose(gaussian.covariance, expected, atol=1e-10)
    np.testing.assert_allclose(gaussian.mean, 0.5, atol=1e-12)
    assert abs(variable.log_integral) < 1e-7
    u = gaussian.draw(np.random.default_rng(1))
    for seed in (2, 3):
        v, _ = variable.drawn(u, np.random.default_rng(seed))
        np.testing.assert_allclose(variable.to_function(v), u, atol=1e-6)


def test_equal_predictors_are_one():
    """Elements with one row, those that nothing Gaussian adds to, and cut points apart from it."""
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
        level = pm.Normal("level", 0, 1)
        cutpoints = pm.Normal(
            "cuts", 0, 1, shape=3, transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1]
        )
        twice = np.repeat(np.arange(N), 2)
        pm.OrderedLogistic("y", (level + f)[twice], cutpoints, observed=np.repeat(COUNTS % 4, 2))
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    assert joint.function.size == N
    assert set(names(joint.function.value_variables)) == {"f_rotated_", "level"}
    assert "cuts_ordered__" in names(joint.hyperparameters)


def test_what_makes_predictors_dependent_is_a_hyperparameter():
    """Three observations of each value, and a covariate of each observation."""
    place, x = np.repeat(np.arange(N), 3), np.random.default_rng(0).standard_normal(3 * N)
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
        level, slope = pm.Normal("level", 0, 1), pm.Normal("slope", 0, 1)
        pm.Poisson("y", pt.exp(level + slope * x + f[place]), observed=np.repeat(COUNTS, 3))
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    assert set(names(joint.function.value_variables)) == {"f_rotated_", "level"}
    assert names(joint.hyperparameters) == ["amplitude_log__", "slope"]
    assert joint.function.size == N


def test_new_data_in_the_design():
    """Other covariates are followed; other equal ones are refused, as they are one predictor."""
    with pm.Model() as model:
        f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
        x, place = pm.Data("x", np.r_[0.0, 0.0, 1 : N - 1]), pm.Data("place", np.arange(N))
        counted(pm.Normal("slope", 0, 1) * x + f[place])
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    joint.refresh()
    with model:
        pm.set_data({"x": np.arange(N) - 2.5})
    assert joint.refresh()
    expected = np.outer(np.arange(N) - 2.5, np.arange(N) - 2.5)
    joint.set_hyperparameters(np.full(1, -20.0))
    np.testing.assert_allclose(joint.prior().gaussian.covariance, expected, atol=2e-6)
    with model:
        pm.set_data({"x": np.zeros(N), "place": np.zeros(N, dtype=int)})
    with pytest.raises(ValueError, match="make a new one"):
        joint.refresh()


def test_what_is_watched_has_the_name_of_its_variable():
    """Where variables themselves are kept; there are more of them than predictors."""
    with made(bym2):
        step = LatentGPStep(compile_kwargs=UNCOMPILED)
    expected = ["sd_log__", "share_logodds__", "own[0]", "phi[0]", "level"]
    found = step._watched_names()
    assert len(found) == 2 + 2 * N + 1
    assert set(expected) < set(found)


def test_new_data_in_a_precision():
    """Means, weights and a covariate are followed, though no hyperparameter changes them."""
    with pm.Model() as model:
        mean, x = pm.Data("mean", np.zeros(N)), pm.Data("x", np.arange(N) - 2.0)
        phi = pm.CAR("phi", mu=mean, W=RING, alpha=0.5, tau=pm.Data("tau", 4.0))
        noise = pm.HalfNormal("noise", 1.0)
        pm.Normal("y", phi + pm.Normal("slope", 0, 1) * x, noise, observed=COUNTS / 5)
    joint = JointModel(model, compile_kwargs=UNCOMPILED)
    joint.refresh()
    new = {"mean": np.full(N, 2.0), "x": np.arange(N) - 1.0, "tau": 9.0}
    with model:
        pm.set_data(new)
    assert joint.refresh()
    gaussian = joint.function.prior.gaussian
    np.testing.assert_allclose(gaussian.mean, [*new["mean"], 0.0], atol=1e-12)
    slope = np.r_[np.zeros(N), 1.0]
    np.testing.assert_allclose(gaussian.predictors(slope), new["x"], atol=1e-12)
    precision = 9.0 * (2.0 * np.eye(N) - 0.5 * RING)
    expected = 0.5 * np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(gaussian.half_log_determinant, expected)


# exactness ----------------------------------------------------------------------------------------


def ends_and_fresh(name, n_sets, n_transitions):
    """All that moves, after frozen transitions from exact draws, and as many fresh values."""
    model = made(MODELS[name])
    joint = JointModel(model, compile_kwargs=PLAIN)
    twin = made(partial(bym2, can_be_drawn=True)) if name == "bym2" else model
    values = [*joint.hyperparameters, *joint.function.value_variables]
    variables = [twin[model.values_to_rvs[v].name] for v in values]
    parts = [unconstrained(twin, v).astype("float64").ravel() for v in variables]
    graph = pt.concatenate([*parts, twin["y"].astype("float64").ravel()])
    rng = np.random.default_rng(7)
    rows = PriorSampler(graph)(2 * n_sets, rng)
    dim, dtype = joint.dim, model["data"].get_value().dtype
    ends = []
    middle = np.median(rows[:, :dim], axis=0)
    spread = rows[:, :dim].std(axis=0)
    for row in rows[::2]:
        theta, v, y = row[:dim], row[dim : -len(COUNTS)], row[-len(COUNTS) :]
        with model:
            pm.set_data({"data": y.astype(dtype)})
        joint.set_hyperparameters(theta)
        joint.refresh()
        joint.recompute()
        u = joint.function.prior.at.variable.to_function(v)
        pilot = pilot_at(joint, middle, "laplace")
        sites = joint.flat_sites() if pilot is None else pilot.sites
        target = JointTarget(joint, constant_sites(sites, dim))
        point, chain = target.point(theta, u), new_chain(theta)
        learner = MomentsLearner(
            scaling=0.5, learn_scaling=False, covariance=np.diag(spread**2)
        ).start(theta, rng, 0.3)
        for _ in range(n_transitions):
            target.hold(point, rng)
            if dim:
                point = move_hyperparameters(target, point, chain, learner, rng, False)
            if point.conditional.has_adjoint:
                point, _, _ = trajectory(target, point, rng, 0.5)
            else:
                point, _ = slices(target, point, rng, 2)
        free, _ = point.variable.drawn(point.function, rng)
        ends.append([*point.x, *free, point.log_likelihood])
    fresh = rows[1::2, : -len(COUNTS)]
    return np.array(ends), fresh


def p_values(name, n_sets=300, n_transitions=10):
    ends, fresh = ends_and_fresh(name, n_sets, n_transitions)
    columns = zip(ends.T[:-1], fresh.T, strict=True)
    return np.array([stats.ks_2samp(end, new).pvalue for end, new in columns])


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("name", MODELS)
def test_frozen_transitions_leave_exact_draws_exact(name, monkeypatch):
    """300 data sets: hyperparameters and all variables behind the predictors keep their prior."""
    if name != "areas":  # sparse, though the matrix is so small
        monkeypatch.setattr(sparse_cholesky, "FULL", 2.0)
    if name == "noise_of_groups":  # each observation has values of its own
        monkeypatch.setattr(latent_vector, "MOST_TOGETHER", 2)
    found = p_values(name)
    assert found.min() > FALSE_ALARM / len(found), found


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("name", "conditional"), [("classes", BlockConditional), ("bym2", PrecisionConditional)]
)
def test_calibration_sees_a_determinant_that_is_missing(name, conditional, monkeypatch):
    exact = conditional.log_ratio

    def without(self, f):
        return exact(self, f) - self.log_jacobian

    monkeypatch.setattr(conditional, "log_ratio", without)
    assert p_values(name).min() < FALSE_ALARM


@pytest.mark.numerics
@pytest.mark.parametrize("is_spoilt", [False, pytest.param(True, marks=pytest.mark.sabotage)])
def test_trajectories_against_quadrature(is_spoilt, monkeypatch):
    """Two values of a walk, with poor sites; also that an energy without the sites is seen."""
    with pm.Model() as model:
        spread = pm.HalfNormal("spread", 1.0)
        x = pm.GaussianRandomWalk("x", sigma=spread, steps=1, init_dist=pm.Normal.dist(0, 1))
        pm.Poisson("y", pt.exp(x), observed=[3, 9])
    joint, rng = JointModel(model, compile_kwargs=PLAIN), np.random.default_rng(11)
    sites = constant_sites(Sites(np.full(2, 12.0), np.full(2, 5.0)), 1)
    target = JointTarget(joint, sites)
    point = target.point(np.array([-0.2]), np.ones(2))
    target.hold(point, rng)
    if is_spoilt:
        monkeypatch.setattr(Sites, "elementwise", lambda self, u: np.zeros(u.size))
    found, acceptances = [], []
    for _ in range(6000):
        point, acceptance, _ = trajectory(target, point, rng, 1.0)
        acceptances.append(acceptance)
        found.append(point.function[1])
    assert 0.1 < np.mean(acceptances) < 0.95
    grid = np.linspace(-4, 5, 400)
    first, second = np.meshgrid(grid, grid, indexing="ij")
    log_density = stats.norm.logpdf(first) + stats.norm(first, np.exp(-0.2)).logpdf(second)
    log_density += 3 * first - np.exp(first) + 9 * second - np.exp(second)
    distribution = np.cumsum(np.exp(log_density).sum(axis=0))
    distribution /= distribution[-1]
    exact = stats.kstest(found[::10], lambda x: np.interp(x, grid, distribution)).pvalue
    assert (exact < FALSE_ALARM) == is_spoilt, exact


def test_blocks():
    """Sites of three values each, of one block with two: what is packed comes back."""
    rng = np.random.default_rng(3)
    blocks = Blocks.of(np.array([0, 1, 0, 1, 0]), np.array([0, 0, 1, 1, 2]))
    precision = np.zeros((2, 3, 3))
    for k, n in enumerate((3, 2)):
        root = rng.standard_normal((n, n))
        precision[k, :n, :n] = root @ root.T
    shift = rng.standard_normal(5)
    sites = blocks.unpacked(blocks.packed(precision, shift))
    matrix = np.zeros((5, 5))
    for members, block in zip(blocks.members, precision, strict=True):
        own = members[members >= 0]
        matrix[np.ix_(own, own)] = block[: len(own), : len(own)]
    x = rng.standard_normal(5)
    np.testing.assert_allclose(sites.times(x), matrix @ x)
    diagonal, pairs, cross = sites.coupled()
    np.testing.assert_allclose(diagonal, np.diagonal(matrix))
    np.testing.assert_allclose(cross, matrix[pairs[:, 0], pairs[:, 1]])
    prior_root = np.linalg.cholesky(np.eye(5) + 0.3)
    mean = rng.standard_normal(5)
    conditional = BlockConditional(mean, prior_root, sites)
    prior = stats.multivariate_normal(mean, np.eye(5) + 0.3)
    covariance = np.linalg.inv(np.linalg.inv(np.eye(5) + 0.3) + matrix)
    exact = covariance @ (np.linalg.solve(np.eye(5) + 0.3, mean) + shift)
    np.testing.assert_allclose(conditional.mean, exact)
    own = stats.multivariate_normal(exact, covariance)
    ratio = prior.logpdf(x) - own.logpdf(x)
    np.testing.assert_allclose(conditional.log_ratio(x), ratio)
    eta = conditional.to_eta(x, rng)
    np.testing.assert_allclose(conditional.from_eta(eta), x)
    images = conditional.images(np.eye(5)[None])
    np.testing.assert_allclose(images.T @ images, covariance)


def predicted():
    """A Student-t regression with missing values, a prediction, and a count of it."""
    f = latent(amplitude=pm.HalfNormal("amplitude", 1.0))
    noise = pm.HalfNormal("noise", 1.0)
    pm.StudentT(
        "y", nu=4, mu=f, sigma=noise, observed=np.ma.masked_equal([0.3, -9, 0.1, 0.8, -9, 1.0], -9)
    )
    pm.Poisson("count", pt.exp(pm.Normal("later", f[0], 0.5)))


def test_what_nothing_observed_depends_on_is_drawn():
    """A prediction given the rest is an exact draw, independent of those before."""
    model = made(predicted)
    with model:
        step = LatentGPStep(compile_kwargs=PLAIN)
    assert set(names(step.joint.predicted)) == {"y_unobserved", "later", "count"}
    begin(step, tune=20)
    point, apart = model.initial_point(), []
    for k in range(220):
        if k == 20:
            step.stop_tuning()
        point, _ = step.step(point)
        if k >= 20:
            apart.append(point["later"] - step.position[0])
    assert point["count"].dtype.kind == "i"
    assert stats.kstest(apart, stats.norm(0, 0.5).cdf).pvalue > FALSE_ALARM


def noisy_with_prediction():
    noise_and_mean()
    pm.Normal("later", pm.modelcontext(None)["f"][0], 0.5)


@pytest.mark.parametrize(
    "build",
    [pytest.param(areas, marks=pytest.mark.numerics), noisy_with_prediction, known_walk],
)
def test_a_saved_state_continues_the_chain(build):
    """Of areas, of blocks with a prediction, without hyperparameters: to the last bit."""
    model = made(build)
    step, other = (LatentGPStep(model=model, compile_kwargs=PLAIN) for _ in range(2))
    begin(step, tune=20)
    _, _, point = drive(step, model.initial_point(), 30, tune=20)
    other.sampling_state = pickle.loads(pickle.dumps(step.sampling_state))
    expected, _, _ = drive(step, point, 5, tune=-1)
    found, _, _ = drive(other, point, 5, tune=-1)
    np.testing.assert_array_equal(found, expected)
