"""Posteriors as black boxes: models, their priors, dispersed starts, evaluations counted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.blocking import DictToArrayBijection
from pymc.pytensorf import compile as compile_graph
from pymc.pytensorf import join_nonshared_inputs
from pytensor.compile.ops import wrap_py
from scipy import stats
from scipy.special import expit, logsumexp

from benchmarks.common import SEED
from benchmarks.simulators import simulate_sir_epidemic, sir_epidemic
from pymc_kameleon import dispersed_starts
from pymc_kameleon.demo import lynx_hare_model, plausible_starts
from pymc_kameleon.targets import Banana, CorrelatedGaussian, Ring, Target

__all__ = [
    "DENSITIES",
    "MODELS",
    "BlackBox",
    "TwoModes",
    "black_box",
    "logistic_regression",
    "model_of",
    "prior_scales",
    "raveled",
    "starting_points",
    "supernovae",
]

PRIOR_WIDTH = 3.0
"""Standard deviations of the prior that a `Target` has for samplers that need one, in its own."""


@dataclass(frozen=True)
class TwoModes:
    """Two Gaussians in the plane, nine standard deviations apart, with a Gaussian prior."""

    dim = 2
    prior_scale = 5.0
    weights = (0.7, 0.3)
    means = ((-3.0, -3.0), (4.0, 3.0))
    covariances = (((1.0, 0.5), (0.5, 1.0)), ((0.5, -0.2), (-0.2, 1.0)))

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the normalised posterior at `x` (n, 2)."""
        components = zip(self.means, self.covariances, strict=True)
        values = [stats.multivariate_normal(*component).logpdf(x) for component in components]
        return logsumexp(np.column_stack(values), axis=1, b=self.weights)

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw independently and exactly, shape (n, 2)."""
        mode = rng.choice(2, n, p=self.weights)
        factors = np.linalg.cholesky(self.covariances)[mode]
        noise = rng.standard_normal((n, 2, 1))
        return np.array(self.means)[mode] + (factors @ noise)[..., 0]


def logistic_regression() -> pm.Model:
    """Build a regression of 500 binary outcomes on an intercept and nine correlated covariates."""
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((500, 10)) + rng.standard_normal((500, 1))
    x[:, 0] = 1.0
    y = rng.random(500) < expit(x @ rng.normal(0.0, 0.5, 10))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.5, shape=10)
        pm.Bernoulli("y", logit_p=pt.dot(x, beta), observed=y)
    return model


def distance_modulus(matter: float, w0: float, wa: float, redshifts: np.ndarray) -> np.ndarray:
    """Magnitudes by which a flat universe dims a source, up to a constant.

    Parameters
    ----------
    matter : float
        Density of matter, a share of the critical one.
    w0, wa : float
        Equation of state w0 + wa z / (1 + z) of the dark energy.
    redshifts : array, shape (n,)
    """
    nodes, weights = np.polynomial.legendre.leggauss(8)
    z = 0.5 * redshifts[:, None] * (1.0 + nodes)
    log_dark = 3.0 * (1.0 + w0 + wa) * np.log1p(z) - 3.0 * wa * z / (1.0 + z)
    rate = np.sqrt(matter * (1.0 + z) ** 3 + (1.0 - matter) * np.exp(log_dark))
    distance = 0.5 * redshifts * (weights / rate).sum(axis=1)
    return 5.0 * np.log10((1.0 + redshifts) * distance)


def supernovae() -> pm.Model:
    """Build a regression of the magnitudes of 60 supernovae on their redshifts.

    Uniform priors whose bounds cut the posterior: the data say little of the dark energy's change.
    """
    rng = np.random.default_rng(SEED)
    redshifts = rng.uniform(0.02, 1.3, 60)
    observed = distance_modulus(0.3, -1.0, 0.0, redshifts) + rng.normal(0.0, 0.15, 60)

    @wrap_py(itypes=[pt.dscalar] * 3, otypes=[pt.dvector])
    def magnitudes(matter, w0, wa):
        return distance_modulus(matter, w0, wa, redshifts)

    with pm.Model() as model:
        matter = pm.Uniform("matter", 0.1, 0.6)
        w0 = pm.Uniform("w0", -2.0, 0.0)
        wa = pm.Uniform("wa", -2.0, 2.0)
        offset = pm.Uniform("offset", -1.0, 1.0)
        scatter = pm.HalfNormal("scatter", 0.5)
        pm.Normal("y", offset + magnitudes(matter, w0, wa), scatter, observed=observed)
    return model


def concentration(excess, clearance, volume, lag, times):
    """Concentration of a unit dose, taken by mouth at time 0, in one compartment; 0 before `lag`.

    Absorption is faster by `excess` than elimination, lest the two can be exchanged.
    """
    rate = clearance / volume
    absorption, since = rate + excess, np.maximum(times - lag, 0.0)
    decays = np.exp(-rate * since) - np.exp(-absorption * since)
    return absorption / (volume * excess) * decays


def pharmacokinetics() -> pm.Model:
    """Build the model of one patient's concentrations after a dose of 100, five parameters."""
    rng = np.random.default_rng(SEED)
    times = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0])
    exact = 100.0 * concentration(1.2, 3.0, 30.0, 0.3, times)
    observed = exact * np.exp(rng.normal(0.0, 0.15, len(times)))

    @wrap_py(itypes=[pt.dscalar] * 4, otypes=[pt.dvector])
    def log_concentration(excess, clearance, volume, lag):
        with np.errstate(all="ignore"):
            return np.log(100.0 * concentration(excess, clearance, volume, lag, times))

    with pm.Model() as model:
        excess = pm.LogNormal("excess", 0.0, 1.0)
        clearance = pm.LogNormal("clearance", 1.0, 1.0)
        volume = pm.LogNormal("volume", 3.0, 1.0)
        lag = pm.Uniform("lag", 0.0, 0.5)
        scatter = pm.HalfNormal("scatter", 0.5)
        mean = log_concentration(excess, clearance, volume, lag)
        pm.Normal("y", mean, scatter, observed=np.log(observed))
    return model


class Oscillation:
    """A wave of unknown frequency, seen at nearly regular times: an alias is likely too."""

    dim = 3
    noise, amplitude, frequencies = 0.5, 2.0, (0.1, 0.9)

    def __init__(self):
        rng = np.random.default_rng(SEED)
        self.times = np.arange(10.0) + rng.normal(0.0, 0.05, 10)
        basis = self.basis(0.3)
        self.observed = basis @ [1.0, -0.5] + rng.normal(0.0, self.noise, 10)

    def basis(self, frequency):
        """Cosine and sine at the times: (n, 2)."""
        angles = 2.0 * np.pi * frequency * self.times
        return np.column_stack([np.cos(angles), np.sin(angles)])

    def model(self) -> pm.Model:
        """Build the model, whose curve is a black box."""

        @wrap_py(itypes=[pt.dvector, pt.dscalar], otypes=[pt.dvector])
        def curve(amplitudes, frequency):
            return self.basis(float(frequency)) @ amplitudes

        with pm.Model() as model:
            amplitudes = pm.Normal("amplitudes", 0.0, self.amplitude, shape=2)
            frequency = pm.Uniform("frequency", *self.frequencies)
            pm.Normal("y", curve(amplitudes, frequency), self.noise, observed=self.observed)
        return model

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw (n, 3) in unconstrained coordinates; exact but for a grid of 20 000 frequencies."""
        low, high = self.frequencies
        grid = np.linspace(low, high, 20_001)[1:-1]
        log_weights = np.empty(len(grid))
        means, factors = np.empty((len(grid), 2)), np.empty((len(grid), 2, 2))
        for i, frequency in enumerate(grid):
            basis = self.basis(frequency) / self.noise
            precision = basis.T @ basis + np.eye(2) / self.amplitude**2
            moment = basis.T @ self.observed / self.noise
            means[i] = np.linalg.solve(precision, moment)
            log_weights[i] = 0.5 * (moment @ means[i] - np.linalg.slogdet(precision)[1])
            factors[i] = np.linalg.cholesky(np.linalg.inv(precision))
        weights = np.exp(log_weights - log_weights.max())
        chosen = rng.choice(len(grid), n, p=weights / weights.sum())
        normals = rng.standard_normal((n, 2, 1))
        amplitudes = means[chosen] + (factors[chosen] @ normals)[..., 0]
        share = (grid[chosen] - low) / (high - low)
        return np.column_stack([amplitudes, np.log(share / (1.0 - share))])


def threshold() -> pm.Model:
    """Build a model of 40 failure times that begin at an unknown one: an edge of the likelihood."""
    rng = np.random.default_rng(SEED)
    failures = 10.0 + 5.0 * rng.weibull(1.3, 40)

    @wrap_py(itypes=[pt.dscalar] * 3, otypes=[pt.dscalar])
    def log_likelihood(begin, scale, shape):
        return np.asarray(stats.weibull_min.logpdf(failures, shape, begin, scale).sum())

    with pm.Model() as model:
        begin = pm.Normal("begin", 8.0, 3.0)
        scale, shape = pm.HalfNormal("scale", 10.0), pm.HalfNormal("shape", 2.0)
        pm.Potential("log_likelihood", log_likelihood(begin, scale, shape))
    return model


DENSITIES: dict[str, Target | TwoModes] = {
    "banana-2": Banana(0.03, dim=2),
    "banana-8": Banana(0.03, dim=8),
    "twisted-banana-8": Banana(0.1, dim=8),
    "ring-8": Ring(10.0, 1.0, dim=8),
    "gaussian-20": CorrelatedGaussian(20),
    "two-modes": TwoModes(),
}
MODELS: dict[str, Callable[[], pm.Model]] = {
    "logistic": logistic_regression,
    "sir": lambda: sir_epidemic(simulate_sir_epidemic(random_seed=SEED)),
    "supernova": supernovae,
    "lynx-hare": lynx_hare_model,
    "pharmacokinetics": pharmacokinetics,
    "oscillation": lambda: Oscillation().model(),
    "threshold": threshold,
}


def prior_scales(density) -> float | np.ndarray:
    """Standard deviations of a Gaussian prior, the density's own or a wide one."""
    scale = getattr(density, "prior_scale", None)
    if scale is not None:
        return scale
    return PRIOR_WIDTH * density.draw(10_000, np.random.default_rng(SEED)).std(axis=0)


@cache
def model_of(name: str, with_prior: bool = False) -> pm.Model:
    """A model whose likelihood is a black box where it could be compiled.

    With `with_prior`, a `Target`, which has none, gets a wide Gaussian one. Its likelihood is then
    the density divided by the prior, so that the posterior stays the same.
    """
    if name in MODELS:
        return MODELS[name]()
    density = DENSITIES[name]
    scales = prior_scales(density) if with_prior else getattr(density, "prior_scale", None)

    @wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
    def log_likelihood(x):
        prior = 0.0 if scales is None else stats.norm.logpdf(x, 0.0, scales).sum()
        return np.asarray(density.log_density(x[None])[0] - prior)

    with pm.Model() as model:
        shape = density.dim
        x = pm.Flat("x", shape=shape) if scales is None else pm.Normal("x", 0, scales, shape=shape)
        pm.Potential("log_likelihood", log_likelihood(x))
    return model


def starting_points(name: str, chains: int, seed: int) -> list[np.ndarray]:
    """Raveled unconstrained points that are not draws of the posterior."""
    density = DENSITIES.get(name)
    if isinstance(density, Target):
        scales = density.scales if isinstance(density, CorrelatedGaussian) else 1.0
        normals = np.random.default_rng(SEED + seed).standard_normal((chains, density.dim))
        return list(3.0 * scales * normals)
    model = model_of(name)
    find = plausible_starts if name == "lynx-hare" else dispersed_starts
    return raveled(model, find(model, chains, SEED + seed))


def raveled(model: pm.Model, starts: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Raveled unconstrained points of natural values by name."""
    points = []
    for start in starts:
        initial = pm.initial_point.make_initial_point_fn(model=model, overrides=start)(0)
        points.append(DictToArrayBijection.map(initial).data)
    return points


class BlackBox:
    """Log likelihood and prior of a model in raveled unconstrained coordinates.

    Parameters
    ----------
    model : pymc.Model
        Its free variables are independent in the prior.

    Attributes
    ----------
    n_evals : int
        Evaluations of the likelihood since it was last set to 0.
    """

    def __init__(self, model: pm.Model):
        self.model = model
        self.n_evals = 0
        initial = model.initial_point()
        self.dim = DictToArrayBijection.map(initial).data.size
        outputs, joined = join_nonshared_inputs(
            initial, [model.varlogp, model.datalogp], model.value_vars
        )
        self._log_prior, self._log_likelihood = (
            compile_graph([joined], output, on_unused_input="ignore") for output in outputs
        )
        self.from_unit_cube = self._compile_quantiles(initial)

    def _compile_quantiles(self, initial: dict[str, np.ndarray]) -> Callable:
        """Compile the map of a uniform vector (d,) to a draw of the prior."""
        uniform, parts, end = pt.dvector(), [], 0
        for value in self.model.value_vars:
            variable = self.model.values_to_rvs[value]
            shape = initial[value.name].shape
            begin, end = end, end + initial[value.name].size
            part = pm.icdf(variable, uniform[begin:end].reshape(shape))
            transform = self.model.rvs_to_transforms[variable]
            if transform is not None:
                part = transform.forward(part, *variable.owner.inputs)
            parts.append(pt.flatten(part))
        return compile_graph([uniform], pt.concatenate(parts))

    def draw_prior(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw from the prior, shape (n, d)."""
        return np.array([self.from_unit_cube(u) for u in rng.random((n, self.dim))])

    def log_prior(self, x: np.ndarray) -> float:
        """Evaluate the log density of the prior at `x` (d,)."""
        return float(self._log_prior(x))

    def log_likelihood(self, x: np.ndarray) -> float:
        """Evaluate the log likelihood at `x` (d,), -inf where it is NaN, and count."""
        self.n_evals += 1
        value = float(self._log_likelihood(x))
        return -np.inf if np.isnan(value) else value

    def log_density(self, x: np.ndarray) -> float:
        """Evaluate the log density of the posterior at `x` (d,), up to a constant, and count."""
        value = self.log_prior(x) + self.log_likelihood(x)
        return -np.inf if np.isnan(value) else value


@cache
def black_box(name: str) -> BlackBox:
    """Return the black box of a target, with a prior."""
    return BlackBox(model_of(name, with_prior=True))
