"""Generalised linear mixed models as people write them, for the benchmark `latent-models`."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy.special import expit


def fixed(x):
    return pm.Normal("level", 0, 2) + pm.Normal("slope", 0, 1) * x


def crossed(rng, n=900, sizes=(40, 25)):
    """Counts, and effects of two factors."""
    first, second = (rng.integers(size, size=n) for size in sizes)
    x, spreads = rng.standard_normal(n), (0.6, 0.4)
    u, v = (sd * rng.standard_normal(size) for sd, size in zip(spreads, sizes, strict=True))
    y = rng.poisson(np.exp(0.5 + 0.3 * x + u[first] + v[second]))
    effects = pm.Normal("u", 0, pm.HalfNormal("s", 1), shape=sizes[0])
    others = pm.Normal("v", 0, pm.HalfNormal("t", 1), shape=sizes[1])
    pm.Poisson("y", pt.exp(fixed(x) + effects[first] + others[second]), observed=y)


def nested(rng, n=600, n_schools=12, n_classes=60):
    """Yes or no of pupils, in classes of schools."""
    class_of, x = rng.integers(n_classes, size=n), rng.standard_normal(n)
    school_of = np.arange(n_classes) % n_schools
    u = 0.5 * rng.standard_normal(n_schools)[school_of] + 0.4 * rng.standard_normal(n_classes)
    y = rng.binomial(1, expit(0.2 + 0.5 * x + u[class_of]))
    schools = pm.Normal("schools", 0, pm.HalfNormal("s", 1), shape=n_schools)
    classes = pm.Normal("classes", schools[school_of], pm.HalfNormal("t", 1), shape=n_classes)
    pm.Bernoulli("y", logit_p=fixed(x) + classes[class_of], observed=y)


def random_slopes(rng, n=400, n_groups=25):
    """Counts, and correlated intercepts and slopes of groups."""
    group, x = rng.integers(n_groups, size=n), rng.standard_normal(n)
    effects = rng.multivariate_normal([0.5, 0.3], [[0.36, 0.1], [0.1, 0.16]], size=n_groups)
    y = rng.poisson(np.exp(effects[group, 0] + effects[group, 1] * x))
    sd = pm.HalfNormal.dist(1, shape=2)
    factor, _, _ = pm.LKJCholeskyCov("factor", n=2, eta=2, sd_dist=sd)
    of_group = pt.dot(factor, pm.Normal("z", 0, 1, shape=(2, n_groups))).T
    pm.Poisson("y", pt.exp(fixed(x) + of_group[group, 0] + of_group[group, 1] * x), observed=y)


def one_factor(rng, n, n_groups):
    """A group for each observation, a covariate, and true linear predictors."""
    group, x = rng.integers(n_groups, size=n), rng.standard_normal(n)
    return group, x, 0.3 + 0.5 * x + 0.5 * rng.standard_normal(n_groups)[group]


def beta(rng, n=300, n_groups=20):
    """Shares."""
    group, x, eta = one_factor(rng, n, n_groups)
    y = np.clip(rng.beta(10 * expit(eta), 10 * expit(-eta)), 1e-4, 1 - 1e-4)
    effects = pm.HalfNormal("s", 1) * pm.Normal("z", 0, 1, shape=n_groups)
    mean, size = pm.math.invlogit(fixed(x) + effects[group]), pm.Gamma("size", 2, 0.1)
    pm.Beta("y", mean * size, (1 - mean) * size, observed=y)


def ordinal(rng, n=300, n_groups=20):
    """Ratings from 1 to 5."""
    group, x, eta = one_factor(rng, n, n_groups)
    y = np.digitize(eta + rng.logistic(size=n), [-1.0, -0.2, 0.6, 1.5])
    effects = pm.HalfNormal("s", 1) * pm.Normal("z", 0, 1, shape=n_groups)
    predictor = pm.Normal("slope", 0, 1) * x + effects[group]
    pm.OrderedLogistic("y", eta=predictor, cutpoints=cut_points(), compute_p=False, observed=y)


def cut_points():
    start = np.linspace(-1.5, 1.5, 4)
    ordered = pm.distributions.transforms.ordered
    return pm.Normal("cuts", start, 2, shape=4, transform=ordered, initval=start)


def ratings(rng, n=73_421, sizes=(2972, 1128), is_ordinal=False):
    """As many as in the InstEval data of lme4: lecturers by students."""
    student, lecturer = (rng.integers(size, size=n) for size in sizes)
    x = rng.standard_normal(n)
    eta = 0.1 * x + 0.33 * rng.standard_normal(sizes[0])[student]
    eta += 0.5 * rng.standard_normal(sizes[1])[lecturer]
    u = pm.Normal("u", 0, pm.HalfNormal("s", 1), shape=sizes[0])
    v = pm.Normal("v", 0, pm.HalfNormal("t", 1), shape=sizes[1])
    if is_ordinal:
        y = np.digitize(2 * eta + rng.logistic(size=n), np.linspace(-1.5, 1.5, 4))
        predictor = pm.Normal("slope", 0, 1) * x + u[student] + v[lecturer]
        pm.OrderedLogistic("y", eta=predictor, cutpoints=cut_points(), compute_p=False, observed=y)
    else:
        y = 3.2 + eta + 1.18 * rng.standard_normal(n)
        pm.Normal("y", fixed(x) + u[student] + v[lecturer], pm.HalfNormal("noise", 1), observed=y)


PROBLEMS = {
    "crossed factors": crossed,
    "nested factors": nested,
    "random slopes": random_slopes,
    "shares, beta": beta,
    "ordinal ratings": ordinal,
}

LARGE = {
    "73 421 ratings, normal": ratings,
    "73 421 ratings, ordinal": lambda rng: ratings(rng, is_ordinal=True),
}
