"""Posteriors with few parameters and cheap likelihoods, to compare a predicted error with the true.

Some were looked at while `surrogate_posterior` was designed; the others, of the same families with
other data or of other families, are `held_out`. Each has priors by name, and a log-likelihood of
many points at once, so that long references cost seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.compile.ops import wrap_py
from scipy import stats
from scipy.special import expit, gammaln, logsumexp, ndtr, ndtri
from sklearn.mixture import GaussianMixture

__all__ = ["TARGETS", "Target", "evidence", "model_of", "normal_scores", "reference"]

DISTRIBUTIONS: dict[str, Callable] = {
    "Normal": stats.norm,
    "HalfNormal": lambda sigma: stats.halfnorm(0, sigma),
    "LogNormal": lambda mu, sigma: stats.lognorm(sigma, scale=np.exp(mu)),
    "Uniform": lambda lower, upper: stats.uniform(lower, upper - lower),
    "Exponential": lambda rate: stats.expon(scale=1.0 / rate),
    "Gamma": lambda alpha, beta: stats.gamma(alpha, scale=1.0 / beta),
    "Beta": stats.beta,
    "InverseGamma": lambda alpha, beta: stats.invgamma(alpha, scale=beta),
    "HalfCauchy": lambda beta: stats.halfcauchy(0, beta),
    "StudentT": stats.t,
}

N_PARTICLES, N_MOVES, LAST_MOVES, KEPT_SHARE = 12_000, 12, 72, 0.6
"""Of the reference by sequential Monte Carlo: particles, moves at a temperature and at the last,
and the effective share of the particles at which the next temperature is chosen."""

N_IMPORTANCE = 40_000


@dataclass(frozen=True)
class Target:
    """Priors: name -> (distribution, its parameters); log-likelihood of points (n, d): (n,)."""

    priors: dict[str, tuple]
    log_likelihood: Callable[[np.ndarray], np.ndarray]
    held_out: bool

    def natural(self, z: np.ndarray) -> np.ndarray:
        """Points (n, d) of which `z` (n, d) are the normal scores."""
        columns = zip(self.priors.values(), z.T, strict=True)
        return np.column_stack([DISTRIBUTIONS[p[0]](*p[1:]).ppf(ndtr(c)) for p, c in columns])

    def values(self, z: np.ndarray) -> np.ndarray:
        """Log-likelihood (n,) at normal scores, -inf where it is not finite."""
        with np.errstate(all="ignore"):
            found = self.log_likelihood(self.natural(z))
        return np.where(np.isfinite(found), found, -np.inf)


# families -----------------------------------------------------------------------------------------


def normal(residuals, sd):
    """Log density (n,) of residuals (n, ...) with standard deviations (n,)."""
    axes = tuple(range(1, residuals.ndim))
    sd = sd.reshape(-1, *(1,) * len(axes))
    return np.sum(-0.5 * (residuals / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi), axis=axes)


def solved(slope, start, times, n_steps):
    """States (n, T, k) of an ordinary differential equation from `start` (n, k) at time 0."""
    y, t, found = start, 0.0, []
    for end in times:
        h = (end - t) / n_steps
        for _ in range(n_steps if h > 0 else 0):
            k1 = slope(y)
            k2 = slope(y + 0.5 * h * k1)
            k3 = slope(y + 0.5 * h * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3))
        t = end
        found.append(y)
    return np.stack(found, axis=1)


def fitzhugh_nagumo(seed, b):
    """Two states with noise; the second parameter is near 0."""
    times = np.linspace(0, 20, 60)

    def states(a, b, c):
        def slope(y):
            v, r = y.T
            return np.stack([c * (v - v**3 / 3 + r), -(v - a + b * r) / c], axis=1)

        return solved(slope, np.tile([-1.0, 1.0], (len(a), 1)), times, 4)

    y = states(*np.array([[0.2], [b], [3.0]]))[0]
    y = y + 0.3 * np.random.default_rng(seed).standard_normal(y.shape)
    return lambda x: normal(y - states(*x.T[:3]), x[:, 3])


def two_rates(k1, k2, times):
    """Difference of two exponentials, which an exchange of the rates does not change."""
    difference = np.where(np.abs(k2 - k1) < 1e-8, 1e-8, k2 - k1)
    return (np.exp(-k1 * times) - np.exp(-k2 * times)) / difference


def kinetics(seed, sd, rates):
    """Concentrations after a dose: either rate is that of absorption."""
    times = np.array([0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12])
    y = 4 * two_rates(*rates, times)
    y = y + sd * np.random.default_rng(seed).standard_normal(len(times))
    return lambda x: normal(y - x[:, [0]] * two_rates(x[:, [1]], x[:, [2]], times), x[:, 3])


def transfection(seed, rates):
    """Fluorescence after mRNA was taken up: two modes by the exchange of two rates."""
    times = np.linspace(0.5, 25, 40)

    def curve(start, size, k1, k2):
        after = np.maximum(times - start, 0.0)
        return size * np.where(times > start, two_rates(k1, k2, after), 0.0)

    y = curve(2.0, 3.0, *rates) + 0.2 * np.random.default_rng(seed).standard_normal(40)
    return lambda x: normal(y - curve(*x.T[:4, :, None]), x[:, 4])


def squares(seed, truth):
    """Simple likelihood, complex posterior: four modes by signs (Papamakarios and others 2019)."""

    def parts(x):
        return x[:, :2], x[:, 2] ** 2, x[:, 3] ** 2, np.tanh(x[:, 4])

    mean, s1, s2, r = parts(np.array([truth]))
    covariance = [[s1[0] ** 2, r[0] * s1[0] * s2[0]], [r[0] * s1[0] * s2[0], s2[0] ** 2]]
    y = np.random.default_rng(seed).multivariate_normal(mean[0], covariance, 4)

    def log_likelihood(x):
        mean, s1, s2, r = parts(x)
        s1, s2 = np.maximum(s1, 1e-6), np.maximum(s2, 1e-6)
        a, b = np.moveaxis((y - mean[:, None]) / np.stack([s1, s2], axis=1)[:, None], 2, 0)
        q = 1 - r**2
        form = np.sum(a * a - 2 * r[:, None] * a * b + b * b, axis=1) / q
        return -0.5 * form - 4 * np.log(2 * np.pi * s1 * s2 * np.sqrt(q))

    return log_likelihood


def two_moons(x_observed):
    """Two crescents (Greenberg and others 2019)."""

    def log_likelihood(x):
        centre = np.stack([-np.abs(x.sum(axis=1)), x[:, 1] - x[:, 0]], axis=1) / np.sqrt(2)
        p = np.array(x_observed) - centre - np.array([0.25, 0.0])
        radius = np.hypot(*p.T)
        value = -0.5 * ((radius - 0.1) / 0.01) ** 2 - np.log(0.01 * radius)
        return np.where(p[:, 0] > 0, value, -np.inf)

    return log_likelihood


def gaussians(centres, sds, weights):
    """Mixture of Gaussians with diagonal covariances."""

    def log_likelihood(x):
        z = (x[:, None] - centres) / sds
        scale = np.sum(np.log(np.broadcast_to(sds, centres.shape)), axis=1)
        return logsumexp(-0.5 * np.sum(z**2, axis=2) - scale, axis=1, b=weights)

    return log_likelihood


def on_a_circle(n, radius, sd, weights):
    """Gaussians on a circle."""
    angles = 2 * np.pi * np.arange(n) / n + 0.3
    centres = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return gaussians(centres, sd, np.array(weights))


def lumpy(seed, dim, n):
    """Many Gaussians that overlap."""
    rng = np.random.default_rng(seed)
    centres, sds = rng.uniform(-1.5, 1.5, (n, dim)), rng.uniform(0.3, 0.8, (n, dim))
    return gaussians(centres, sds, rng.dirichlet(np.ones(n)))


def dose_response(seed, floor):
    """Hill curve with a floor near 0."""
    dose = np.array([0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30.0]).repeat(3)

    def curve(floor, largest, middle, steepness):
        p = dose**steepness
        return floor + largest * p / (p + middle**steepness)

    y = curve(floor, 5.0, 1.0, 1.5) + 0.3 * np.random.default_rng(seed).standard_normal(24)
    return lambda x: normal(y - curve(*x.T[:4, :, None]), x[:, 4])


def components(seed, tau, n_groups, n):
    """Groups with a common standard deviation near 0, effects integrated out."""
    rng = np.random.default_rng(seed)
    y = 1 + tau * rng.standard_normal((n_groups, 1)) + rng.standard_normal((n_groups, n))
    means, within = y.mean(axis=1), np.sum((y - y.mean(axis=1, keepdims=True)) ** 2)

    def log_likelihood(x):
        mu, tau, sigma = x.T
        between = np.sqrt(tau**2 + sigma**2 / n)
        rest = -0.5 * within / sigma**2 - n_groups * (n - 1) * np.log(sigma)
        return normal(means - mu[:, None], between) + rest

    return log_likelihood


def logistic(seed, dim, n):
    """Logistic regression."""
    rng = np.random.default_rng(seed)
    covariates = np.column_stack([np.ones(n), rng.standard_normal((n, dim - 1))])
    y = rng.random(n) < expit(covariates @ (0.8 * rng.standard_normal(dim)))
    return lambda x: -np.logaddexp(0.0, np.where(y, -1.0, 1.0) * (x @ covariates.T)).sum(axis=1)


def epidemic(seed):
    """Counts of an SIR epidemic, with overdispersion."""

    def infected(contact, recovery, first):
        def slope(y):
            new = contact * y[:, 0] * y[:, 1]
            return np.stack([-new, new - recovery * y[:, 1]], axis=1)

        return solved(slope, np.stack([1 - first, first], axis=1), np.arange(1, 15.0), 6)[:, :, 1]

    mean = 800 * infected(*np.array([[1.6], [0.5], [0.004]]))[0]
    y = np.random.default_rng(seed).negative_binomial(10, 10 / (10 + mean))

    def log_likelihood(x):
        mean, phi = np.maximum(800 * infected(*x.T[:3]), 1e-9), x[:, [3]]
        chances = phi * np.log(phi / (phi + mean)) + y * np.log(mean / (phi + mean))
        return np.sum(gammaln(y + phi) - gammaln(phi) - gammaln(y + 1) + chances, axis=1)

    return log_likelihood


def two_decays(seed):
    """Sum of two exponentials: labels of the two are exchangeable."""
    times = np.linspace(0, 6, 30)
    y = 2 * np.exp(-0.4 * times) + 3 * np.exp(-2.5 * times)
    y = y + 0.1 * np.random.default_rng(seed).standard_normal(30)

    def log_likelihood(x):
        a1, a2, k1, k2 = x.T[:4, :, None]
        return normal(y - a1 * np.exp(-k1 * times) - a2 * np.exp(-k2 * times), x[:, 4])

    return log_likelihood


def mixture(seed):
    """Two normal components of which labels are exchangeable."""
    rng = np.random.default_rng(seed)
    y = np.append(rng.normal(-1, 1, 25), rng.normal(2.2, 0.7, 15))

    def log_likelihood(x):
        m1, m2, s1, s2, p = x.T[:, :, None]
        one = stats.norm.logpdf(y, m1, s1) + np.log(p)
        return np.logaddexp(one, stats.norm.logpdf(y, m2, s2) + np.log1p(-p)).sum(axis=1)

    return log_likelihood


def wave(seed, frequency):
    """A sine at few irregular times, with many local modes of its frequency."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, 4, 18))
    y = 1.2 * np.sin(frequency * times + 0.5) + 0.5 * rng.standard_normal(18)
    return lambda x: normal(y - x[:, [0]] * np.sin(x[:, [1]] * times + x[:, [2]]), x[:, 3])


def survival(seed):
    """Weibull times with a covariate, some censored."""
    rng = np.random.default_rng(seed)
    times, covariate = 2.0 * rng.weibull(1.5, 25), rng.standard_normal(25)
    censored, times = times > 2.5, np.minimum(times, 2.5)

    def log_likelihood(x):
        k, scale = x[:, [0]], x[:, [1]] * np.exp(x[:, [2]] * covariate)
        u = times / scale
        event = np.log(k / scale) + (k - 1) * np.log(u)
        return np.sum(np.where(censored, 0.0, event) - u**k, axis=1)

    return log_likelihood


def enzyme(seed):
    """Michaelis-Menten rates with a constant near 0."""
    dose = np.array([0.5, 1, 2, 3, 5, 8.0]).repeat(2)
    y = 3 * dose / (dose + 0.1) + 0.4 * np.random.default_rng(seed).standard_normal(12)
    return lambda x: normal(y - x[:, [0]] * dose / (dose + x[:, [1]]), x[:, 2])


def himmelblau(x):
    """Four modes of unequal mass."""
    a, b = x.T
    return -0.3 * ((a**2 + b - 11) ** 2 + (a + b**2 - 7) ** 2)


def banana(x):
    """A bend, and three more coordinates."""
    rest = np.sum(x[:, 2:] ** 2, axis=1)
    return -0.5 * ((x[:, 0] / 2) ** 2 + ((x[:, 1] - 0.4 * x[:, 0] ** 2 + 1) / 0.5) ** 2 + rest)


def heavy_tails(seed, dim, df):
    """Student's t with correlations."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((dim, dim))
    factor = np.linalg.cholesky(root @ root.T / dim + 0.2 * np.eye(dim))
    location = rng.standard_normal(dim)

    def log_likelihood(x):
        z = np.linalg.solve(factor, (x - location).T)
        return -0.5 * (df + dim) * np.log1p(np.sum(z**2, axis=0) / df)

    return log_likelihood


def repeated(n, *prior):
    """The same prior `n` times."""
    return {f"x{i}": prior for i in range(n)}


OF_FHN = {
    "a": ("HalfNormal", 1.0),
    "b": ("HalfNormal", 1.0),
    "c": ("LogNormal", 0.5, 0.7),
    "s": ("HalfNormal", 1.0),
}
OF_KINETICS = {
    "size": ("LogNormal", 1.0, 1.0),
    "k1": ("LogNormal", -0.5, 1.0),
    "k2": ("LogNormal", -0.5, 1.0),
    "s": ("HalfNormal", 0.5),
}
OF_TRANSFECTION = {
    "start": ("LogNormal", 0.5, 0.8),
    "size": ("LogNormal", 1.0, 1.0),
    "k1": ("LogNormal", -1.5, 1.0),
    "k2": ("LogNormal", -1.5, 1.0),
    "s": ("HalfNormal", 1.0),
}
OF_DOSES = {
    "floor": ("HalfNormal", 1.0),
    "largest": ("Gamma", 2.0, 0.4),
    "middle": ("LogNormal", 0.0, 1.5),
    "steepness": ("LogNormal", 0.0, 0.5),
    "s": ("HalfNormal", 1.0),
}
OF_GROUPS = {"mu": ("Normal", 0.0, 5.0), "tau": ("HalfCauchy", 1.0), "s": ("HalfNormal", 2.0)}
OTHER_GROUPS = {
    "mu": ("Normal", 0.0, 5.0),
    "tau": ("InverseGamma", 2.0, 0.5),
    "s": ("Exponential", 0.5),
}
OF_EPIDEMIC = {
    "contact": ("HalfNormal", 2.0),
    "recovery": ("Exponential", 1.0),
    "first": ("Beta", 1.0, 50.0),
    "phi": ("Gamma", 2.0, 0.1),
}
OF_DECAYS = {
    "a1": ("HalfNormal", 5.0),
    "a2": ("HalfNormal", 5.0),
    "k1": ("LogNormal", 0.0, 1.0),
    "k2": ("LogNormal", 0.0, 1.0),
    "s": ("HalfNormal", 0.5),
}
OF_MIXTURE = {
    "m1": ("Normal", 0.0, 3.0),
    "m2": ("Normal", 0.0, 3.0),
    "s1": ("HalfNormal", 2.0),
    "s2": ("HalfNormal", 2.0),
    "p": ("Beta", 2.0, 2.0),
}
OF_WAVE = {
    "size": ("HalfNormal", 2.0),
    "frequency": ("Uniform", 0.5, 12.0),
    "phase": ("Uniform", -1.57, 1.57),
    "s": ("HalfNormal", 1.0),
}
OF_SURVIVAL = {
    "k": ("Gamma", 2.0, 1.0),
    "scale": ("InverseGamma", 3.0, 4.0),
    "b": ("Normal", 0.0, 1.0),
}
OF_ENZYME = {"vmax": ("HalfNormal", 5.0), "km": ("Exponential", 1.0), "s": ("HalfNormal", 1.0)}
SQUARES = repeated(5, "Uniform", -3.0, 3.0)
MOONS = repeated(2, "Uniform", -1.0, 1.0)

DESIGN = {
    "fitzhugh-nagumo": (OF_FHN, fitzhugh_nagumo(1, 0.1)),
    "kinetics": (OF_KINETICS, kinetics(2, 0.1, (0.3, 1.2))),
    "slcp": (SQUARES, squares(4, (0.7, -1.5, -1.0, -0.9, 0.6))),
    "two-moons": (MOONS, two_moons((0.0, 0.0))),
    "himmelblau": (repeated(2, "Uniform", -6.0, 6.0), himmelblau),
    "circle-6": (repeated(2, "Normal", 0.0, 4.0), on_a_circle(6, 4.0, 0.6, np.ones(6))),
    "transfection": (OF_TRANSFECTION, transfection(6, (0.1, 0.6))),
    "dose-response": (OF_DOSES, dose_response(9, 0.05)),
    "components": (OF_GROUPS, components(11, 0.1, 8, 6)),
    "logistic-10": (repeated(10, "Normal", 0.0, 2.0), logistic(13, 10, 80)),
    "heavy-tails": (repeated(4, "Normal", 0.0, 10.0), heavy_tails(21, 4, 3.0)),
    "lumpy-4": (repeated(4, "Normal", 0.0, 3.0), lumpy(22, 4, 12)),
    "banana-5": (repeated(5, "Normal", 0.0, 5.0), banana),
}
HELD_OUT = {
    "fitzhugh-nagumo-b": (OF_FHN, fitzhugh_nagumo(5, 0.2)),
    "kinetics-b": (OF_KINETICS, kinetics(3, 0.15, (0.2, 2.0))),
    "slcp-b": (SQUARES, squares(14, (1.2, -0.4, -1.3, 1.1, -0.4))),
    "two-moons-b": (MOONS, two_moons((-0.5, 0.3))),
    "circle-4": (repeated(2, "Normal", 0.0, 5.0), on_a_circle(4, 6.0, 0.7, [1, 0.5, 1, 0.3])),
    "transfection-b": (OF_TRANSFECTION, transfection(16, (0.15, 0.9))),
    "dose-response-b": (OF_DOSES, dose_response(19, 0.1)),
    "components-b": (OTHER_GROUPS, components(12, 0.5, 6, 4)),
    "logistic-8": (repeated(8, "StudentT", 3.0, 0.0, 1.5), logistic(23, 8, 40)),
    "lumpy-6": (repeated(6, "Normal", 0.0, 3.0), lumpy(32, 6, 8)),
    "epidemic": (OF_EPIDEMIC, epidemic(7)),
    "two-decays": (OF_DECAYS, two_decays(8)),
    "mixture": (OF_MIXTURE, mixture(20)),
    "wave": (OF_WAVE, wave(17, 5.0)),
    "survival": (OF_SURVIVAL, survival(24)),
    "enzyme": (OF_ENZYME, enzyme(10)),
}
TARGETS = {name: Target(*parts, held_out=False) for name, parts in DESIGN.items()} | {
    name: Target(*parts, held_out=True) for name, parts in HELD_OUT.items()
}


# models and references ----------------------------------------------------------------------------


@cache
def model_of(name: str) -> pm.Model:
    """Return the model, whose likelihood is a black box."""
    target = TARGETS[name]

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def log_likelihood(x):
        with np.errstate(all="ignore"):
            return np.asarray(target.log_likelihood(x[None])[0], dtype=float)

    with pm.Model() as model:
        x = [getattr(pm, kind)(name, *values) for name, (kind, *values) in target.priors.items()]
        pm.Potential("log_likelihood", log_likelihood(pt.stack(x)))
    return model


def normal_scores(name: str, posterior) -> np.ndarray:
    """Normal scores (n, d) of the draws of a result."""
    columns = []
    for parameter, (kind, *values) in TARGETS[name].priors.items():
        draws = posterior[parameter].values.ravel()
        columns.append(ndtri(DISTRIBUTIONS[kind](*values).cdf(draws).clip(1e-300, 1 - 1e-16)))
    return np.column_stack(columns)


@cache
def reference(name: str) -> np.ndarray:
    """Draws (n, d) of the normal scores by sequential Monte Carlo, with moves by differences."""
    target, rng = TARGETS[name], np.random.default_rng(1)
    z = rng.standard_normal((N_PARTICLES, len(target.priors)))
    values, beta, scale = target.values(z), 0.0, 1.0
    while beta < 1.0:
        beta, weights = _next_temperature(values, beta)
        kept = rng.choice(N_PARTICLES, N_PARTICLES, p=weights)
        z, values = z[kept], values[kept]
        accepted = [
            _move(target, z, values, beta, scale, rng)
            for _ in range(LAST_MOVES if beta == 1.0 else N_MOVES)
        ]
        scale = float(np.clip(scale * np.exp(np.mean(accepted) - 0.25), 0.2, 2.0))
    return z


def _next_temperature(values, beta):
    def weights(new):
        found = np.exp((new - beta) * (values - values.max()))
        return np.where(np.isfinite(values), found, 0.0)

    least = KEPT_SHARE * np.isfinite(values).sum()
    low, high = beta, 1.0
    if weights(1.0).sum() ** 2 < least * np.sum(weights(1.0) ** 2):
        for _ in range(60):
            middle = 0.5 * (low + high)
            found = weights(middle)
            if found.sum() ** 2 < least * np.sum(found**2):
                high = middle
            else:
                low = middle
        new = low
    else:
        new = 1.0
    return new, weights(new) / weights(new).sum()


def _move(target, z, values, beta, scale, rng):
    """Make a Metropolis move of each particle, in place, and return the share accepted."""
    n, dim = z.shape
    one, other = rng.integers(n, size=(2, n))
    width = scale * 2.38 / np.sqrt(2 * dim)
    size = rng.choice([1.0, width, 0.3 * width], n, p=[0.1, 0.6, 0.3])[:, None]
    step = size * (z[one] - z[other]) + 1e-4 * rng.standard_normal((n, dim))
    proposed = z + step * (rng.random((n, dim)) < rng.choice([0.5, 1.0]))
    found = target.values(proposed)
    change = beta * (found - values) - 0.5 * np.sum(proposed**2 - z**2, axis=1)
    accepted = np.log(rng.random(n)) < change
    z[accepted], values[accepted] = proposed[accepted], found[accepted]
    return accepted.mean()


@cache
def evidence(name: str) -> float:
    """Log evidence by importance sampling from a mixture fitted to half of the reference."""
    target, z, rng = TARGETS[name], reference(name), np.random.default_rng(2)
    mixture = GaussianMixture(20, random_state=0).fit(z[::2])
    draws = mixture.sample(N_IMPORTANCE)[0]
    is_prior = rng.random(N_IMPORTANCE) < 0.1
    draws[is_prior] = rng.standard_normal((is_prior.sum(), z.shape[1]))
    prior = stats.norm.logpdf(draws).sum(axis=1)
    parts = mixture.score_samples(draws) + np.log(0.9), prior + np.log(0.1)
    weights = target.values(draws) + prior - np.logaddexp(*parts)
    return float(logsumexp(weights) - np.log(N_IMPORTANCE))
