"""The targets of the comparison as PyMC models with dispersed starts, and what is known of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from benchmarks.black_box import N_REFERENCE, reference_draws
from benchmarks.black_box_targets import DENSITIES as PLAIN
from benchmarks.black_box_targets import MODELS, TwoModes, prior_scales
from benchmarks.common import SEED
from benchmarks.latent_gp_joint import classification
from benchmarks.practice import eight_schools
from benchmarks.sampling import dataset
from benchmarks.simulators import simulate_sir_epidemic, sir_epidemic
from pymc_kameleon import black_box, dispersed_starts
from pymc_kameleon.demo import YEARS, log_populations, lynx_hare_model, plausible_starts
from pymc_kameleon.model.transforms import unconstraining_function
from pymc_kameleon.targets import Flower, Target

__all__ = [
    "BLACK_BOXES",
    "COARSE",
    "COST_RATIO",
    "LATENT_GP",
    "TARGETS",
    "TOLERANCE",
    "reference",
    "starts_of",
    "unconstrained",
]


@dataclass(frozen=True)
class Funnel:
    """Neal's funnel: v ~ N(0, 3^2), and further coordinates that are N(0, e^v)."""

    dim: int = 10

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw independently and exactly, shape (n, dim)."""
        x = rng.standard_normal((n, self.dim))
        x[:, 0] *= 3.0
        x[:, 1:] *= np.exp(0.5 * x[:, :1])
        return x


DENSITIES = {
    "banana-8": PLAIN["banana-8"],
    "twisted-banana-8": PLAIN["twisted-banana-8"],
    "flower-8": Flower(),
    "ring-8": PLAIN["ring-8"],
    "gaussian-20": PLAIN["gaussian-20"],
    "funnel-10": Funnel(),
    "two-modes": PLAIN["two-modes"],
}


def log_density(density, x):
    """Graph of a log density, which has a gradient."""
    if isinstance(density, Target):
        with pm.Model(model=None):  # apart from the model in whose context this is called
            return pm.logp(density.model()["x"], x)
    if isinstance(density, Funnel):
        rest = pm.logp(pm.Normal.dist(0.0, pt.exp(0.5 * x[0])), x[1:])
        return pm.logp(pm.Normal.dist(0.0, 3.0), x[0]) + rest.sum()
    parts = zip(TwoModes.weights, TwoModes.means, TwoModes.covariances, strict=True)
    modes = [
        np.log(w) + pm.logp(pm.MvNormal.dist(np.array(mean), np.array(covariance)), x)
        for w, mean, covariance in parts
    ]
    return pt.logsumexp(pt.stack(modes))


def model_of_density(name: str) -> pm.Model:
    """A model with a wide Gaussian prior, whose posterior is the density."""
    density = DENSITIES[name]
    scales = prior_scales(density)
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, scales, shape=density.dim)
        prior = pm.logp(pm.Normal.dist(0.0, scales), x).sum()
        pm.Potential("log_likelihood", log_density(density, x) - prior)
    return model


LATENT_GP = "gp-classification"
BLACK_BOXES = ("lynx-hare", "sir")
"""Targets without a gradient."""

TARGETS: dict[str, Callable[[], pm.Model]] = {
    name: partial(model_of_density, name) for name in DENSITIES
} | {
    "eight-schools": eight_schools,
    LATENT_GP: partial(classification, "logit", 40),
    "lynx-hare": lynx_hare_model,
    "sir": MODELS["sir"],
}

TOLERANCE, COST_RATIO = 1e-4, 3.0
"""Of the solver in a coarse model, instead of 1e-8; how many of its solutions one then costs."""


@black_box(shape=(len(YEARS), 2))
def coarse_trajectory(parameters):
    """Return log populations in all years, less exactly."""
    return log_populations(parameters, YEARS - YEARS[0], TOLERANCE)


COARSE: dict[str, Callable[[], pm.Model]] = {
    "lynx-hare": partial(lynx_hare_model, coarse_trajectory),
    "sir": lambda: sir_epidemic(simulate_sir_epidemic(random_seed=SEED), tolerance=TOLERANCE),
}
"""Black boxes with a larger tolerance of their solver."""

LONG = {"draws": 5000, "tune": 2000, "chains": 4, "cores": 1, "target_accept": 0.95}
"""Chains of PyMC's NUTS that are the reference where there is a gradient but are no exact draws."""


def starts_of(name: str, model: pm.Model, n: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Dispersed natural values, draws of the prior."""
    find = plausible_starts if name == "lynx-hare" else dispersed_starts
    return find(model, n, SEED + seed)


def unconstrained(model: pm.Model, result, most: int) -> np.ndarray:
    """Raveled unconstrained points of a posterior, evenly thinned, shape (n, d)."""
    to_values = unconstraining_function(model)
    stacked = dataset(result).stack(sample=("chain", "draw"))
    draws = [
        stacked[rv.name].transpose("sample", ...).values.astype(rv.dtype) for rv in model.free_RVs
    ]
    chosen = np.unique(np.linspace(0, stacked.sizes["sample"] - 1, most).astype(int))
    points = [to_values(*(values[i] for values in draws)) for i in chosen]
    return np.array([np.concatenate([np.ravel(v) for v in point]) for point in points])


def reference(name: str) -> np.ndarray:
    """Draws of the posterior, shape (n, d), raveled and unconstrained: exact, or of long chains."""
    if name in DENSITIES:
        return DENSITIES[name].draw(N_REFERENCE, np.random.default_rng(SEED))
    if name in BLACK_BOXES:
        return reference_draws(name)
    model = TARGETS[name]()
    with model:
        result = pm.sample(**LONG, random_seed=SEED, nuts_sampler="pymc", progressbar=False)
    return unconstrained(model, result, N_REFERENCE // 2)
