"""The samplers of the comparison, each called as it is for the first time: with its defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pymc as pm

from benchmarks.black_box_peers import (
    PEERS,
    at_starts,
    default_nautilus,
    default_smc,
    emcee,
    n_walkers,
    stretch,
)
from benchmarks.black_box_targets import BlackBox, raveled
from benchmarks.compare_targets import (
    BLACK_BOXES,
    COARSE,
    COST_RATIO,
    LATENT_GP,
    TARGETS,
    unconstrained,
)
from benchmarks.sampling import REFERENCE, dataset, n_evaluations
from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    GPSurrogate,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    MultilevelStep,
    ParallelTemperingStep,
    PCAKameleonStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
    surrogate_posterior,
)

__all__ = ["CHAINS", "SAMPLERS", "Drawn", "Problem", "Sampler"]

CHAINS = 4
N_SHORT = 10
"""Draws of a run that fills caches."""

FEWEST = 45
"""Evaluations of the shortest run of `surrogate_posterior`, and twice the dimension more."""

SLICE_EVALUATIONS = 6
"""About what a coordinate of PyMC's slice sampler takes in a draw."""


@dataclass(frozen=True)
class Problem:
    """A target, its model, dispersed natural starts, a budget of evaluations and a seed.

    With `only_compile`, samplers do as little as fills the caches of compiled code on disk.
    """

    target: str
    model: pm.Model
    starts: list[dict[str, np.ndarray]]
    budget: int
    seed: int
    only_compile: bool = False

    @property
    def dim(self) -> int:
        """Number of unconstrained coordinates."""
        return sum(np.size(value) for value in self.model.initial_point().values())


@dataclass(frozen=True)
class Drawn:
    """What a sampler drew.

    Parameters
    ----------
    draws : array, shape (chains, draws, d) or (n, d)
        Natural or unconstrained; without chains, as many as they are worth.
    points : callable
        Takes a number; returns at most so many of the draws, unconstrained, shape (n, d).
    evaluations : int
        Of the log density, all counted.
    is_doubtful : bool
        Whether the sampler says of itself that its result should not be trusted.
    """

    draws: np.ndarray
    points: Callable[[int], np.ndarray]
    evaluations: int
    is_doubtful: bool = False


@dataclass(frozen=True)
class Sampler:
    """How a sampler is called, and on what.

    Parameters
    ----------
    draw : callable
        Takes a `Problem`, returns `Drawn`.
    package : str
        Name to import.
    gradient : bool
        Whether it needs one.
    only : tuple of str
        Targets to which it is restricted; empty for all.
    exact : bool
        Whether its draws would be those of the posterior after a run long enough.
    walkers : bool
        Whether it needs starts for the walkers of an ensemble, instead of four chains.
    """

    draw: Callable[[Problem], Drawn]
    package: str = "pymc"
    gradient: bool = False
    only: tuple[str, ...] = ()
    exact: bool = True
    walkers: bool = False

    def n_starts(self, dim: int) -> int:
        """Number of starts that it needs."""
        return n_walkers(dim) if self.walkers else CHAINS

    def fits(self, target: str) -> bool:
        """Whether it is run on a target."""
        without_gradient = self.gradient and target in BLACK_BOXES
        return not without_gradient and (not self.only or target in self.only)


def sample(problem: Problem, name: str, **options) -> Drawn:
    """Run `pymc.sample`."""
    if problem.only_compile:
        options |= {"draws": N_SHORT, "tune": N_SHORT}
    with problem.model:
        result = pm.sample(
            chains=CHAINS,
            cores=1,
            random_seed=problem.seed,
            progressbar=False,
            compute_convergence_checks=False,
            discard_tuned_samples=False,
            **options,
        )
    names = [rv.name for rv in problem.model.free_RVs]
    posterior = dataset(result)[names].load()
    parts = [posterior[n].transpose("chain", "draw", ...).values for n in names]
    draws = np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)
    statistics = [dataset(result, f"{when}sample_stats") for when in ("", "warmup_")]
    return Drawn(
        draws,
        lambda most: unconstrained(problem.model, result, most),
        sum(count(name, part, problem.dim) for part in statistics),
    )


def count(name, statistics, dim):
    """Evaluations of the log density, or of it and its gradient."""
    gradients = [n for n in ("n_steps", "n_leapfrog") if n in statistics and name in LEAPFROGS]
    if not gradients:
        return n_evaluations(name, statistics, dim)
    others = statistics["n_evals"].sum() if "n_evals" in statistics else 0
    return int(others + sum(statistics[n].sum() for n in gradients))


def plain(name: str, make_step: Callable, problem: Problem) -> Drawn:
    """Call ``pm.sample(step=Step())`` from dispersed starts."""
    with problem.model:
        step = make_step()
    return sample(problem, name, step=step, initvals=problem.starts)


def budgeted(name: str, make_step: Callable, cost: Callable, problem: Problem) -> Drawn:
    """Give a step as many draws as the budget allows, half of them to tune."""
    draws = max(round(problem.budget / (2 * CHAINS * cost(problem.dim))), 10)
    with problem.model:
        step = make_step()
    starts = problem.starts
    return sample(problem, name, step=step, initvals=starts, draws=draws, tune=draws)


def nuts(problem: Problem) -> Drawn:
    """Call PyMC's own NUTS from dispersed starts."""
    return sample(problem, "NUTS", nuts_sampler="pymc", initvals=problem.starts)


def nutpie(problem: Problem) -> Drawn:
    """Call nutpie, which finds its starts itself."""
    return sample(problem, "nutpie", nuts_sampler="nutpie")


def multilevel(problem: Problem) -> Drawn:
    """Call `MultilevelStep` with a coarse model, whose evaluations are in the seconds only."""
    coarse = COARSE[problem.target]()
    make_step = partial(MultilevelStep, coarse=[coarse], cost_ratio=COST_RATIO)
    return plain("MultilevelStep", make_step, problem)


def approximate(n_evaluations: int, problem: Problem) -> Drawn:
    """Call `surrogate_posterior`, which finds its starts itself."""
    if problem.only_compile:
        n_evaluations = 2 * problem.dim + FEWEST
    result = surrogate_posterior(
        problem.model, n_evaluations=n_evaluations, random_seed=problem.seed, progressbar=False
    )
    points = partial(unconstrained, problem.model, result)
    found = dataset(result).attrs
    return Drawn(points(CHAINS), points, found["n_evaluations"], not found["believable"])


def peer(draw: Callable, problem: Problem) -> Drawn:
    """Call a sampler of another package on log likelihood and prior."""
    box = BlackBox(problem.model)
    starts = raveled(problem.model, problem.starts)
    if problem.only_compile:
        return Drawn(np.array(starts), lambda most: np.array(starts), 0)
    draws = draw(box, starts, problem.budget, problem.seed)
    points = draws.reshape(-1, box.dim)
    return Drawn(
        draws,
        lambda most: points[np.unique(np.linspace(0, len(points) - 1, most).astype(int))],
        box.n_evals,
    )


def with_function(step: Callable, problem: Problem) -> Drawn:
    """`KameleonStep` for hyperparameters, and another step for the latent function."""

    def compound():
        model = problem.model
        others = [rv for rv in model.free_RVs if rv.name != "f_rotated_"]
        return [KameleonStep(others), step([model["f"]])]

    return plain(step.__name__, compound, problem)


LEAPFROGS = ("NUTS", "nutpie", "RiemannianHMCStep")

OURS = {
    "KameleonStep": KameleonStep,
    "KameleonStep.paper": KameleonStep.paper,
    "FastKameleonStep": FastKameleonStep,
    "PCAKameleonStep": PCAKameleonStep,
    "AdaptiveMetropolisStep": AdaptiveMetropolisStep,
    "SurrogateHMCStep": SurrogateHMCStep,
}

SAMPLERS: dict[str, Sampler] = {
    name: Sampler(partial(plain, name, step), package="pymc_kameleon")
    for name, step in OURS.items()
} | {
    "ParallelTemperingStep": Sampler(
        partial(plain, "ParallelTemperingStep", ParallelTemperingStep),
        package="pymc_kameleon",
        only=tuple(target for target in TARGETS if target not in BLACK_BOXES),
    ),
    "MALAStep": Sampler(
        partial(plain, "MALAStep", MALAStep), package="pymc_kameleon", gradient=True
    ),
    "MultilevelStep": Sampler(multilevel, package="pymc_kameleon", only=tuple(COARSE)),
    "KameleonStep + GPSurrogate": Sampler(
        partial(plain, "KameleonStep", lambda: KameleonStep(surrogate=GPSurrogate())),
        package="pymc_kameleon",
        only=BLACK_BOXES,
    ),
    "LatentGPStep": Sampler(
        partial(plain, "LatentGPStep", LatentGPStep), package="pymc_kameleon", only=(LATENT_GP,)
    ),
    "KameleonStep + EllipticalSliceStep": Sampler(
        partial(with_function, EllipticalSliceStep), package="pymc_kameleon", only=(LATENT_GP,)
    ),
    "KameleonStep + RiemannianHMCStep": Sampler(
        partial(with_function, RiemannianHMCStep), package="pymc_kameleon", only=(LATENT_GP,)
    ),
} | {
    f"surrogate_posterior, {n}": Sampler(
        partial(approximate, n), package="pymc_kameleon", exact=False
    )
    for n in (250, 500)
} | {
    REFERENCE: Sampler(partial(budgeted, REFERENCE, pm.DEMetropolisZ, lambda dim: 1)),
    "Metropolis": Sampler(partial(budgeted, "Metropolis", pm.Metropolis, lambda dim: dim)),
    "Slice": Sampler(
        partial(budgeted, "Slice", pm.Slice, lambda dim: SLICE_EVALUATIONS * dim)
    ),
    "NUTS": Sampler(nuts, gradient=True),
    "nutpie": Sampler(nutpie, package="nutpie", gradient=True),
    "sample_smc": Sampler(partial(peer, default_smc)),
    "emcee": Sampler(
        partial(peer, partial(emcee, stretch, place=at_starts)), package="emcee", walkers=True
    ),
    "emcee, optimised start": Sampler(
        partial(peer, PEERS["emcee stretch"].draw), package="emcee"
    ),
    "zeus, optimised start": Sampler(partial(peer, PEERS["zeus"].draw), package="zeus"),
    "PINTS": Sampler(partial(peer, PEERS["PINTS"].draw), package="pints"),
    "pocoMC": Sampler(partial(peer, PEERS["pocoMC"].draw), package="pocomc"),
    "nautilus": Sampler(partial(peer, default_nautilus), package="nautilus"),
    "PyVBMC": Sampler(
        partial(peer, PEERS["PyVBMC"].draw), package="pyvbmc", exact=False
    ),
}  # fmt: skip
