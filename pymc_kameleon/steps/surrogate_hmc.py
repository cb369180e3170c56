"""Hamiltonian Monte Carlo without gradients, on a surrogate learnt from all evaluations."""

from typing import Any

import numpy as np

from pymc_kameleon.mcmc.numba_bridge import EVALUATIONS, N_TERMS
from pymc_kameleon.model.mode_search import search_mode
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.surrogate.trajectory_adaptation import TrajectoryAdaptation

__all__ = ["SurrogateHMCStep"]

STARTS = ("optimize", "here")


class SurrogateHMCStep(MetropolisHastingsStep):
    name = "surrogate_hmc"
    stats_dtypes_shapes = MetropolisHastingsStep.stats_dtypes_shapes | {
        "n_leapfrog": (np.float64, []),
        "n_centers": (np.float64, []),
    }

    def __init__(
        self,
        vars=None,
        *,
        max_centers: int = 500,
        target_accept: float = 0.9,
        start: str = "optimize",
        steps_per_draw: int = 1,
        disperse: bool = True,
        warm_start=None,
        model=None,
        rng=None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        if start not in STARTS:
            raise ValueError(f'start={start!r}: take "optimize" or "here".')
        self.start = start
        super().__init__(
            vars,
            adaptation=TrajectoryAdaptation(max_centers=max_centers),
            target_accept=target_accept,
            steps_per_draw=steps_per_draw,
            disperse=disperse,
            warm_start=warm_start,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )

    def _begin_at(self, x):
        super()._begin_at(x)
        if self.tune and self.warm is None:
            self.learner.keep(self.chain.position, self.chain.value[:N_TERMS].sum())
            if self.start == "optimize":
                self._search()

    def _evaluate_at(self, x):
        """Log density at `x` (d,), which is learnt."""
        chain = self.chain
        chain.counts[EVALUATIONS] += 1
        self._plain_density(x, chain.proposed_value)
        value = chain.proposed_value[:N_TERMS].sum()
        self.learner.keep(x, value)
        return value

    def _search(self):
        """Move the chain from its start to the typical set."""
        learner, chain = self.learner, self.chain
        search_mode(self._evaluate_at, chain.position.copy(), 100 + 20 * self.dim)
        learner.fit(self.rng)
        coordinates = learner.surrogate.standardization
        points, values = learner.evaluations.held()
        for width in (1.5, 1.0, 0.5, 0.25):
            normals = self.rng.standard_normal(self.dim)
            start = coordinates.location + width * coordinates.factor @ normals
            if self._evaluate_at(start) > values.max() - 3 * self.dim - 20:
                break
        else:
            start = points[np.argmax(values)].copy()
            self._evaluate_at(start)
        chain.position[:], chain.value[:] = start, chain.proposed_value
        learner.next_update = int(learner.evaluations.count[0]) + 5

    def _new_learner(self, position, warm):
        learner = super()._new_learner(position, warm)
        if warm is not None:
            self.learner = learner
            learner.begin_with(warm.points)
            for point in warm.points:
                self._evaluate_at(point)
            learner.fit(self.rng)
        return learner
