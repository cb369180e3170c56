"""Samplers of other packages, on a black box, within a budget of evaluations."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import pymc as pm

from benchmarks.black_box_targets import BlackBox
from pymc_kameleon.model.mode_search import search_mode

__all__ = [
    "PEERS",
    "Peer",
    "at_starts",
    "default_nautilus",
    "default_smc",
    "emcee",
    "n_walkers",
    "stretch",
]

SEARCH_SHARE = 0.15
"""Share of the budget after which no further search for a mode begins."""

BALL = 0.1
"""Standard deviation of the walkers around a mode or start, in unconstrained coordinates."""

MUCH_LOWER = 4.0
"""Log density by which a mode is lower than the best one if no walker starts there."""

LIVE_SHARES = (10, 20, 30, 40, 60, 80)
"""Evaluations in the budget for each live point, tried until the exploration comes to its end."""

MIN_LIVE, MAX_LIVE, MAX_BATCH = 20, 2000, 50
SEARCH_FOR_ONE = 400
"""A search for a mode takes half of it at most."""

N_DRAWS = 4000

UNUSABLY_LOWER = 1e4
"""Log density below that of a mode that stands for all lower ones where a regression learns it."""


def sample_smc(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by sequential Monte Carlo from the prior, with particles that use up the budget.

    The evaluations that a particle needs are found by runs that are not counted.
    """
    particles = max(budget // 30, 4)
    for _ in range(4):
        box.n_evals = 0
        draws = _smc(box, particles, seed)
        if 0.9 * budget <= box.n_evals <= 1.05 * budget:
            break
        particles = max(round(particles * budget / box.n_evals), 4)
    return draws


def default_smc(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by sequential Monte Carlo with defaults, whatever the budget, a run for each start."""
    return _smc(box, 2000, seed, len(starts))


def _smc(box, particles, seed, runs=1):
    found = []

    class Counted(pm.smc.kernels.IMH):
        compiled = None

        def set_rng(self, rng):
            if self.compiled is not None:
                self.likelihood_logp_func = self.compiled
            super().set_rng(rng)

        def setup_kernel(self):
            super().setup_kernel()
            self.compiled, self.likelihood_logp_func = self.likelihood_logp_func, box.log_likelihood
            points = self.tempered_posterior
            self.likelihood_logp = np.array([box.log_likelihood(x) for x in points])

        def sample_settings(self):
            found.append(self.tempered_posterior)
            return super().sample_settings()

    pm.sample_smc(
        particles,
        Counted,
        model=box.model,
        random_seed=seed,
        chains=runs,
        cores=1,
        compute_convergence_checks=False,
        progressbar=False,
    )
    return np.array(found)


def modes(box: BlackBox, starts: list, budget: int) -> list[np.ndarray]:
    """Climb from as many of the starts as a share of the budget allows; return high modes.

    The first steps are a quarter as long as the prior's middle two thirds are wide.
    """
    found, heights = [], []
    low, high = (box.from_unit_cube(np.full(box.dim, share)) for share in (1 / 6, 5 / 6))
    for start in starts:
        if found and box.n_evals > SEARCH_SHARE * budget:
            break
        points, values = [], []

        def log_density(x, points=points, values=values):
            points.append(x.copy())
            values.append(box.log_density(x))
            return values[-1]

        search_mode(log_density, start, 0.25 * (high - low), budget // 2)
        best = int(np.argmax(values))
        found.append(points[best])
        heights.append(values[best])
    return [
        x for x, height in zip(found, heights, strict=True) if height > max(heights) - MUCH_LOWER
    ]


def n_walkers(dim: int) -> int:
    """Size of an ensemble in `dim` dimensions."""
    return max(4 * dim, 16)


def around_modes(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Walkers, shape (n, d), around modes to which some of the starts lead."""
    rng = np.random.default_rng(seed)
    around = np.resize(modes(box, starts, budget), (n_walkers(box.dim), box.dim))
    return around + BALL * rng.standard_normal(around.shape)


def at_starts(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Walkers around the starts, of which there are as many as walkers."""
    points = np.array(starts)
    return points + BALL * np.random.default_rng(seed).standard_normal(points.shape)


def emcee(
    moves: Callable,
    box: BlackBox,
    starts: list,
    budget: int,
    seed: int,
    place: Callable = around_modes,
) -> np.ndarray:
    """Draw by an ensemble; the later half of its steps."""
    from emcee import EnsembleSampler

    walkers = place(box, starts, budget, seed)
    n_steps = (budget - box.n_evals) // len(walkers) - 1
    if n_steps < 2:
        return walkers[:, None]
    np.random.seed(seed)  # noqa: NPY002 - the sampler copies this state
    sampler = EnsembleSampler(len(walkers), box.dim, box.log_density, moves=moves())
    sampler.run_mcmc(walkers, n_steps)
    return sampler.get_chain(discard=n_steps // 2).swapaxes(0, 1)


def stretch():
    from emcee.moves import StretchMove

    return [(StretchMove(), 1.0)]


def differences():
    from emcee.moves import DEMove, DESnookerMove

    return [(DEMove(), 0.8), (DESnookerMove(), 0.2)]


def zeus(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by ensemble slice sampling from walkers around modes; the later half of its steps."""
    from zeus import EnsembleSampler

    walkers = around_modes(box, starts, budget, seed)
    np.random.seed(seed)  # noqa: NPY002 - the sampler draws from it
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    sampler = EnsembleSampler(len(walkers), box.dim, box.log_density, verbose=False)
    root.setLevel(level)
    root.handlers[:] = handlers
    draws, before = [walkers], box.n_evals
    for x, *_ in sampler.sample(walkers, iterations=budget, progress=False):
        draws.append(x.copy())
        if 2 * box.n_evals - before > budget:
            break
        before = box.n_evals
    return np.swapaxes(draws[len(draws) // 2 :], 0, 1)


def pints(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by the adaptive Metropolis that PINTS takes by default; the later half of each chain."""
    from pints import LogPDF, MCMCController

    class Density(LogPDF):
        def n_parameters(self):
            return box.dim

        def __call__(self, x):
            return box.log_density(x)

    np.random.seed(seed)  # noqa: NPY002 - the sampler draws from it
    controller = MCMCController(Density(), len(starts), starts)
    controller.set_max_iterations(max(budget // len(starts), 2))
    controller.set_log_to_screen(False)
    chains = controller.run()
    return chains[:, chains.shape[1] // 2 :]


def nautilus(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by importance nested sampling from the prior, exploring with what the budget allows.

    The number of live points is found by runs that are not counted.
    """
    for share in LIVE_SHARES:
        box.n_evals = 0
        n_live = int(np.clip(budget // share, MIN_LIVE, MAX_LIVE))
        sampler = _nautilus(box, seed, n_live=n_live, n_batch=min(n_live, MAX_BATCH))
        sampler.run(n_like_max=budget, n_eff=np.inf)
        if sampler.explored or n_live == MIN_LIVE:
            break
    return _nautilus_draws(sampler, seed)


def default_nautilus(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by importance nested sampling from the prior, with defaults, whatever the budget."""
    sampler = _nautilus(box, seed)
    sampler.run()
    return _nautilus_draws(sampler, seed)


def _nautilus(box, seed, **options):
    from nautilus import Sampler

    arguments = (box.from_unit_cube, box.log_likelihood, box.dim)
    return Sampler(*arguments, pass_dict=False, seed=seed, **options)


def _nautilus_draws(sampler, seed):
    draws, log_weights, _ = sampler.posterior()
    return _resampled(draws, np.exp(log_weights - log_weights.max()), seed)


def _resampled(draws, weights, seed):
    """As many equally weighted draws as the weights are worth."""
    shares = np.cumsum(weights / weights.sum())
    size = int(weights.sum() ** 2 / (weights**2).sum())
    places = (np.arange(size) + np.random.default_rng(seed).random()) / size
    return draws[np.searchsorted(shares, places).clip(max=len(draws) - 1)]


def pocomc(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw by preconditioned Monte Carlo from the prior, with defaults, whatever the budget."""
    from pocomc import Sampler

    class Prior:
        dim = box.dim
        bounds = np.tile([-np.inf, np.inf], (box.dim, 1))
        rng = np.random.default_rng(seed)

        def logpdf(self, x):
            return np.array([box.log_prior(row) for row in x])

        def rvs(self, size=1):
            return box.draw_prior(size, self.rng)

    sampler = Sampler(Prior(), box.log_likelihood, random_state=seed)
    sampler.run(n_evidence=0, progress=False)
    draws, weights, *_ = sampler.posterior()
    return _resampled(draws, weights, seed)


def pyvbmc(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw from a variational mixture that is fitted with defaults, whatever the budget.

    It starts at a mode; the plausible region is as wide as a third of the prior's middle two
    thirds, and lies around the mode.
    """
    return _fitted_mixture(box, starts[0], seed).sample(N_DRAWS)[0]


def stacked_pyvbmc(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw from such mixtures of all starts, whose components get new weights together."""
    from pyvbmc import SVBMC

    found = [_fitted_mixture(box, start, seed + k) for k, start in enumerate(starts)]
    stacked = SVBMC(found, M_min=1 / len(found), seed=seed, show_tips=False)
    stacked.optimize()
    return stacked.sample(N_DRAWS)


def _fitted_mixture(box, start, seed):
    from pyvbmc import VBMC

    mode = modes(box, [start], SEARCH_FOR_ONE)[0]
    lowest = box.log_density(mode) - UNUSABLY_LOWER
    low, high = (box.from_unit_cube(np.full(box.dim, share)) for share in (1 / 6, 5 / 6))
    margin = (high - low) / 6
    unbounded = np.full(box.dim, np.inf)
    fit = VBMC(
        lambda x: max(box.log_density(np.ravel(x)), lowest),
        mode,
        -unbounded,
        unbounded,
        mode - margin,
        mode + margin,
        {"display": "off", "show_tips": False},
        seed=seed,
    )
    return fit.optimize()[0]


def gpry(box: BlackBox, starts: list, budget: int, seed: int) -> np.ndarray:
    """Draw from a Gaussian process that is taught with defaults, whatever the budget.

    Its box has all but a thousandth of the prior on either side of each coordinate.
    """
    from gpry import Runner

    low, high = (box.from_unit_cube(np.full(box.dim, share)) for share in (1e-3, 1 - 1e-3))
    bounds = [[float(a), float(b)] for a, b in zip(low, high, strict=True)]
    runner = Runner(lambda x: box.log_density(np.ravel(x)), bounds, seed=seed, verbose=0)
    runner.run()
    runner.generate_mc_sample()
    sample = runner.last_mc_samples()
    weights = np.ones(len(sample["X"])) if sample["w"] is None else sample["w"]
    return _resampled(sample["X"], weights, seed)


@dataclass(frozen=True)
class Peer:
    """A sampler of another package.

    Parameters
    ----------
    draw : callable
        Takes a black box, starting points, a budget of evaluations and a seed; returns draws,
        raveled and unconstrained: of chains or walkers with shape (chains, n, d), otherwise (n, d).
    package : str
        Name to import.
    own_budget : bool
        Whether it chooses the number of evaluations itself.
    """

    draw: Callable[[BlackBox, list, int, int], np.ndarray]
    package: str
    own_budget: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return find_spec(self.package) is not None


PEERS = {
    "sample_smc": Peer(sample_smc, "pymc"),
    "emcee stretch": Peer(partial(emcee, stretch), "emcee"),
    "emcee DE + snooker": Peer(partial(emcee, differences), "emcee"),
    "zeus": Peer(zeus, "zeus"),
    "PINTS": Peer(pints, "pints"),
    "nautilus": Peer(nautilus, "nautilus"),
    "pocoMC": Peer(pocomc, "pocomc", own_budget=True),
    "GPry": Peer(gpry, "gpry", own_budget=True),
    "PyVBMC": Peer(pyvbmc, "pyvbmc", own_budget=True),
    "PyVBMC, stacked": Peer(stacked_pyvbmc, "torch", own_budget=True),
}
