"""Parallel tempering as a PyMC step method."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.ladder import MOST_TEMPERATURES, TemperingLearner
from pymc_kameleon.model.initial_points import prior_sampler
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters

__all__ = ["ParallelTemperingStep"]

IMPROPER = {"flat", "half_flat", "halfflat", "icar"}
"""Names of PyMC's improper distributions."""


@with_shared_parameters
class ParallelTemperingStep(MetropolisHastingsStep):
    r"""Parallel tempering: replicas of the chain at higher temperatures, which swap states.

    Parameters
    ----------
    %(vars)s
    """

    name = "parallel_tempering"
    _not_arguments = (
        "learner",
        "store",
        "pseudo_marginal",
        "surrogate",
        "warm_start",
        "adapt_after_tune",
        "target_accept",
        "start",
    )
    stats_dtypes_shapes = {
        k: v for k, v in MetropolisHastingsStep.stats_dtypes_shapes.items() if k != "scaling"
    } | {
        "swapped": (np.float64, []),
        "n_temperatures": (np.float64, []),
        "round_trips": (np.float64, []),
        "proper": (np.float64, []),
        "beta": (object, [MOST_TEMPERATURES]),
        "log_ratio": (object, [MOST_TEMPERATURES]),
    }

    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        n_temperatures: int | None = None,
        n_moves: int | None = None,
        **options: Any,
    ) -> None:
        learner = TemperingLearner(n_temperatures=n_temperatures, n_moves=n_moves)
        super().__init__(vars, learner=learner, pseudo_marginal=None, **options)
        learner.target = learner.hot_target = self.target
        if self.target.shared:
            learner.hot_target = LogDensity(
                self.target.model,
                vars,
                initial_point=options.get("initial_point"),
                compile_kwargs=options.get("compile_kwargs"),
            )
        else:
            learner.prior_sampler = prior_sampler(self.target.model, self.target.names)
        self._is_proper = not self.target.shared and not any(
            getattr(rv.owner.op, "name", None) in IMPROPER for rv in self.target.model.free_RVs
        )

    def _chosen_steps_per_draw(self):
        return 5 if self.runs_compiled else 1

    def _transitions_to_tune(self):
        return 2000

    def _run(self, n):
        self.learner.adapts = self.adapts
        self.learner.hold(n, self.rng)
        super()._run(n)

    def _evaluate_current(self):
        super()._evaluate_current()
        if self.learner is not None:
            self.learner.invalidate()

    def _learnt_statistics(self, n_evals):
        learner = self.learner
        found = learner.statistics() | {"proper": float(self._is_proper)}
        learner.swaps[:] = 0.0
        for name, values in (("beta", learner.ladder.betas), ("log_ratio", learner.ratio)):
            found[name] = np.full(MOST_TEMPERATURES, np.nan)
            found[name][: len(values)] = values
        return found
