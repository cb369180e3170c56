"""Generalised linear mixed models: effects of groups are found however a model is written."""

from functools import partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import FALSE_ALARM, UNCOMPILED, run
from scipy import stats

from pymc_kameleon import LatentGPStep
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.hyperparameters.learning import pilot_at

RNG = np.random.default_rng(1)
N, N_FIRST, N_SECOND = 30, 7, 5
FIRST, SECOND = RNG.integers(N_FIRST, size=N), RNG.integers(N_SECOND, size=N)
X, REAL, COUNT = RNG.standard_normal(N), RNG.standard_normal(N), RNG.poisson(2.0, size=N)
SHARE = RNG.uniform(0.1, 0.9, size=N)


def scales(*names):
    return [pm.HalfNormal(name, 1.0) for name in names]


def fixed_effects():
    return pm.Normal("level", 0.0, 2.0) + pm.Normal("slope", 0.0, 1.0) * X


def poisson(eta):
    pm.Poisson("y", pt.exp(eta), observed=COUNT)


def normal(eta):
    pm.Normal("y", eta, 0.7, observed=REAL)


def crossed(form="centred", observe=poisson):
    """Two crossed factors."""
    s, t = scales("s", "t")
    if form == "centred":
        u, v = pm.Normal("u", 0.0, s, shape=N_FIRST), pm.Normal("v", 0.0, t, shape=N_SECOND)
    else:
        u = s * pm.Normal("u", 0.0, 1.0, shape=N_FIRST)
        v = t * pm.Normal("v", 0.0, 1.0, shape=N_SECOND)
    if form == "kept":
        u, v = pm.Deterministic("effects", u), pm.Deterministic("others", v)
    eta = fixed_effects()
    if form == "matrix":  # as Bambi writes it
        eta += pt.dot(np.eye(N_FIRST)[FIRST], u) + pt.dot(np.eye(N_SECOND)[SECOND], v)
    else:
        eta += u[FIRST] + v[SECOND]
    observe(eta)


def nested(form="centred"):
    """Classes in schools, around a mean of all."""
    s, t = scales("s", "t")
    school = np.arange(N_FIRST) % 3
    mean = pm.Normal("level", 0.0, 2.0)
    if form == "centred":
        u = pm.Normal("u", mean, s, shape=3)
        v = pm.Normal("v", u[school], t, shape=N_FIRST)
    else:
        u = mean + s * pm.Normal("u", 0.0, 1.0, shape=3)
        v = u[school] + t * pm.Normal("v", 0.0, 1.0, shape=N_FIRST)
    poisson(v[FIRST] + pm.Normal("slope", 0.0, 1.0) * X)


def random_slopes(form="product"):
    """Correlated intercepts and slopes."""
    sd = pm.HalfNormal.dist(1.0, shape=2)
    factor, _, _ = pm.LKJCholeskyCov("factor", n=2, eta=2.0, sd_dist=sd)
    if form == "product":
        effects = pt.dot(factor, pm.Normal("w", 0.0, 1.0, shape=(2, N_FIRST))).T
        eta = fixed_effects()
    elif form == "rows":
        effects = pm.MvNormal("w", np.zeros(2), chol=factor, shape=(N_FIRST, 2))
        eta = fixed_effects()
    else:
        means = pt.stack([pm.Normal("level", 0.0, 2.0), pm.Normal("slope", 0.0, 1.0)])
        effects, eta = pm.MvNormal("w", means, chol=factor, shape=(N_FIRST, 2)), 0.0
    poisson(eta + effects[FIRST, 0] + effects[FIRST, 1] * X)


def noise_of_groups():
    """Effects of groups in the mean, and in the log of the standard deviation."""
    s, t = scales("s", "t")
    mean = fixed_effects() + s * pm.Normal("u", 0.0, 1.0, shape=N_FIRST)[FIRST]
    log_sd = pm.Normal("log_sd", 0.0, 1.0) + t * pm.Normal("v", 0.0, 1.0, shape=N_SECOND)[SECOND]
    pm.Normal("y", mean, pt.exp(log_sd), observed=REAL)


def noise_by_covariate():
    (s,) = scales("s")
    mean = fixed_effects() + s * pm.Normal("u", 0.0, 1.0, shape=N_FIRST)[FIRST]
    log_sd = pm.Normal("log_sd", 0.0, 1.0) + pm.Normal("by_x", 0.0, 1.0) * X
    pm.Normal("y", mean, pt.exp(log_sd), observed=REAL)


def one_factor(observe):
    (s,) = scales("s")
    observe(fixed_effects() + s * pm.Normal("u", 0.0, 1.0, shape=N_FIRST)[FIRST])


def beta(eta):
    mean, size = pm.math.invlogit(eta), pm.Gamma("size", 2.0, 0.1)
    pm.Beta("y", mean * size, (1.0 - mean) * size, observed=SHARE)


def zero_inflated(eta):
    share = pm.Beta("share", 1.0, 1.0)
    pm.ZeroInflatedPoisson("y", psi=share, mu=pt.exp(eta), observed=COUNT * (FIRST > 1))


def ordinal(eta):
    start = np.array([-1.0, 0.5, 2.0])
    ordered = pm.distributions.transforms.ordered
    cuts = pm.Normal("cuts", start, 2.0, shape=3, transform=ordered, initval=start)
    pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=np.minimum(COUNT, 3))


def multiple_membership():
    """Each observation belongs to three groups."""
    members = np.zeros((N, N_FIRST))
    for row in members:
        row[RNG.choice(N_FIRST, 3, replace=False)] = 1 / 3
    (s,) = scales("s")
    poisson(fixed_effects() + members @ pm.Normal("u", 0.0, s, shape=N_FIRST))


def hilbert_space():
    amplitude = pm.HalfNormal("s", 1.0)
    process = pm.gp.HSGP(m=[8], c=1.5, cov_func=amplitude**2 * pm.gp.cov.ExpQuad(1, 1.0))
    poisson(pm.Normal("level", 0.0, 2.0) + process.prior("f", X=X[:, None]))


def no_scales():
    poisson(fixed_effects() + 0.5 * pm.Normal("u", 0.0, 1.0, shape=N_FIRST)[FIRST])


LINEAR = "u level slope"

FOUND = [
    (crossed, "u v level slope", "s t"),
    (partial(crossed, "matrix"), "u v level slope", "s t"),
    (partial(nested, "product"), "v u level slope", "s t"),
    (random_slopes, "w level slope", "factor"),
    (partial(random_slopes, "means"), "w level slope", "factor"),
    (noise_of_groups, "u v level slope log_sd", "s t"),
    (noise_by_covariate, LINEAR, "s log_sd by_x"),
    (partial(one_factor, ordinal), LINEAR, "s cuts"),
    (hilbert_space, "f_hsgp_coeffs level", "s"),
    (no_scales, LINEAR, ""),
]
ALSO_FOUND = [
    (partial(crossed, "product"), "u v level slope", "s t"),
    (partial(crossed, "kept"), "u v level slope", "s t"),
    (nested, "v u level slope", "s t"),
    (partial(random_slopes, "rows"), "w level slope", "factor"),
    (partial(one_factor, beta), LINEAR, "s size"),
    (partial(one_factor, zero_inflated), LINEAR, "s share"),
    (multiple_membership, LINEAR, "s"),
]
FOUND += [pytest.param(*case, marks=pytest.mark.slow) for case in ALSO_FOUND]


def read(build, vars=None):
    with pm.Model() as model:
        build()
    return model, JointModel(model, vars, compile_kwargs=UNCOMPILED)


@pytest.mark.parametrize(("build", "linear", "hyperparameters"), FOUND)
def test_effects_are_found_and_densities_are_those_of_the_model(build, linear, hyperparameters):
    """What prior, likelihood and density of x say together is the model's own log density."""
    model, joint = read(build)
    found = [model.values_to_rvs[v].name for v in joint.function.value_variables]
    assert sorted(found) == sorted(linear.split())
    own = [model.values_to_rvs[v].name for v in joint.hyperparameters]
    assert sorted(own) == sorted(hyperparameters.split())
    log_density, rng = model.compile_logp(), np.random.default_rng(2)
    start = model.initial_point()
    for _ in range(3):
        theta = 0.3 * rng.standard_normal(joint.dim)
        theta += np.concatenate([np.ravel(start[v.name]) for v in joint.hyperparameters] or [[]])
        joint.set_hyperparameters(theta)
        prior, variables = joint.prior()
        x = 0.5 * rng.standard_normal(prior.size)
        values = [*joint.hyperparameters, *joint.function.value_variables]
        ends = np.cumsum([start[v.name].size for v in values])
        parts = np.split(np.concatenate([theta, x]), ends[:-1])
        point = {
            v.name: part.reshape(start[v.name].shape) for v, part in zip(values, parts, strict=True)
        }
        v = prior.whiten(x)
        of_x = prior.half_log_determinant - 0.5 * (v @ v + v.size * np.log(2 * np.pi))
        total = joint.log_prior(theta) + variables.log_integral + of_x
        total += joint.likelihood.value(prior.predictors(x))
        np.testing.assert_allclose(total, log_density(point), rtol=1e-8)


def covariance_of_crossed(s, t):
    """That of observations with a noise of 0.7."""
    first, second = np.eye(N_FIRST)[FIRST], np.eye(N_SECOND)[SECOND]
    fixed = 4.0 + np.outer(X, X) + 0.49 * np.eye(N)
    return fixed + s**2 * first @ first.T + t**2 * second @ second.T


THETA = [np.array([-0.4, 0.3]), np.array([0.5, -1.0]), np.array([-2.0, 0.1])]


@pytest.mark.numerics
@pytest.mark.parametrize("form", ["centred", "product", "kept", "matrix"])
def test_evidence_of_crossed_effects_is_exact_in_every_form(form):
    """Laplace's approximation of Gaussian observations, beside their covariance matrix."""
    _, joint = read(partial(crossed, form, normal))
    for theta in THETA:
        s, t = np.exp(theta)
        expected = stats.multivariate_normal.logpdf(REAL, None, covariance_of_crossed(s, t))
        expected += stats.halfnorm.logpdf([s, t]).sum() + theta.sum()
        assert [v.name for v in joint.hyperparameters] == ["s_log__", "t_log__"]
        pilot = pilot_at(joint, theta, "laplace")
        np.testing.assert_allclose(pilot.log_density, expected, rtol=1e-9)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("build", "forms"),
    [(nested, ["centred", "product"]), (random_slopes, ["product", "rows", "means"])],
)
def test_the_form_changes_no_evidence(build, forms):
    found = []
    for form in forms:
        _, joint = read(partial(build, form))
        thetas = np.random.default_rng(3).normal(size=(3, joint.dim))
        found.append([pilot_at(joint, theta, "laplace").log_density for theta in thetas])
    for others in found[1:]:
        np.testing.assert_allclose(others, found[0], rtol=1e-6)


def test_one_name_brings_what_is_added_to_it():
    for vars in (["level"], ["effects"], ["u", "s", "t", "v", "level", "slope"]):
        _, joint = read(partial(crossed, "kept"), vars)
        assert len(joint.function.value_variables) == 4, vars
        assert joint.dim == 2


def test_a_model_without_gaussian_variables_is_refused():
    with pm.Model() as model:
        pm.Poisson("y", pm.Gamma("rate", 2.0, 1.0), observed=COUNT)
    with pytest.raises(ValueError, match="no latent function was found"):
        LatentGPStep(model=model)


@pytest.mark.slow
@pytest.mark.numerics
def test_a_factor_that_does_nothing_has_the_posterior_of_quadrature():
    """Its standard deviation reaches down to 0; every third of 1500 draws is taken for independent.

    A Kolmogorov-Smirnov test for each of the two scales, null probability FALSE_ALARM.
    """
    observed = np.linspace(-2.0, 2.0, N_FIRST)[FIRST] + 0.3 * X + 0.7 * REAL
    grid = np.exp(np.linspace(np.log(1e-4), np.log(8.0), 70))
    covariances = [covariance_of_crossed(s, t) for s in grid for t in grid]
    log_density = [stats.multivariate_normal.logpdf(observed, None, c) for c in covariances]
    log_density = np.reshape(log_density, (grid.size, grid.size))
    log_prior = stats.halfnorm.logpdf(grid) + np.log(grid)
    density = np.exp(log_density + log_prior + log_prior[:, None] - log_density.max())
    with pm.Model() as model:
        crossed("product", lambda eta: pm.Normal("y", eta, 0.7, observed=observed))
    points, _, last = run(LatentGPStep(model=model), model, 1900, tune=400)
    ends = dict(zip(last, np.cumsum([v.size for v in last.values()]), strict=True))
    for name, axis in (("s_log__", 1), ("t_log__", 0)):
        draws = points[400:, ends[name] - 1]
        cumulative = np.cumsum(density.sum(axis=axis))
        cumulative = np.r_[0.0, 0.5 * (cumulative[1:] + cumulative[:-1])] / cumulative[-1]
        p_value = stats.kstest(draws[::3], lambda x, c=cumulative: np.interp(x, np.log(grid), c))
        assert p_value.pvalue > FALSE_ALARM
    assert np.mean(draws < np.log(0.05)) > 0.03
