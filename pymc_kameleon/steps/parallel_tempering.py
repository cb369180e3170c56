"""Parallel tempering as a PyMC step method."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pymc.stats.convergence import WarningType
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.ladder import MOST_TEMPERATURES, TemperingLearner
from pymc_kameleon.mcmc.proposals.tempering import SCANS, TRIPS
from pymc_kameleon.model.initial_points import prior_sampler
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.chain.life_cycle import without_scaling
from pymc_kameleon.steps.chain.sampler import ChainSampler
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters

LARGEST_REJECTION = 0.85
"""Mean rejection probability of swaps from which there are too few temperatures."""

SCANS_BEFORE_TRIPS, FEWEST_TRIPS = 2000, 4
"""Scans, and the fewest round trips expected after these: ten in a chain of 1000 draws."""


class TemperingSampler(ChainSampler):
    """Makes scans of all replicas."""

    learner: TemperingLearner

    def new_learner(self, position, warm):  # noqa: D102
        self.template.or_none = self.evaluator.or_none
        return super().new_learner(position, warm)

    def evaluate_current(self):  # noqa: D102
        super().evaluate_current()
        if self.learner is not None:
            self.learner.invalidate()


@with_shared_parameters
class ParallelTemperingStep(MetropolisHastingsStep):
    r"""Parallel tempering: copies of the chain at higher temperatures, which swap states with it.

    For log densities that cost microseconds, with several modes, strong bends, or scales that
    change from place to place; and for posteriors whose shape is unknown. The evidence of the model
    comes with the draws: `pymc_kameleon.log_evidence`.

    Replica k has the density :math:`r(x)^{1 - \beta_k} p(x)^{\beta_k}`, where :math:`\beta` goes
    from 0 to 1 and r is the prior, or, where that is improper or cannot be drawn from, a Gaussian
    that is learnt.

    ::

        put an exact draw of r in the place of the first replica
        move each of the others: by a difference of two points of its archive, a random walk, a
            stretch towards or away from a point of the archive, or one coordinate at a random
            scale; half of these take the others along, as location and spread of each follow it
        swap neighbours, pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... in turn, with
            probability min(1, exp((beta_{k+1} - beta_k) (V_k - V_{k+1}))), V = log p - log r
        while tuning, in rounds of growing lengths: learn temperatures between which swaps are
            rejected equally often, their number, archives, covariances, and a Gaussian r

    Parameters
    ----------
    %(vars)s
    n_temperatures : int, optional
        Number of temperatures, at least 2. By default about twice the sum of the rejection
        probabilities of all pairs, at least 4 and at most 40, as tuning finds it.
    n_moves : int, optional
        Moves of each replica between swaps. By default 6 + d / 5, at most 20.
    steps_per_draw : int, optional
        Scans (moves of all replicas, and swaps) a draw. By default 5, where the model compiles, and
        else 1.
    %(disperse)s
    %(store)s
        All variables are this step's then.
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument, a discrete variable, or a likelihood that is an
        estimate, naming it.

    Notes
    -----
    Sampler statistics, float64, per draw:

    =============== ====================================================================
    accept          mean acceptance probability of the moves at beta = 1
    accepted        share of them that were accepted
    swapped         mean acceptance probability of swaps
    n_temperatures  number of temperatures
    barrier         sum of the rejection probabilities of all swaps, as tuning found it
    round_trips     states that came from beta = 0 to beta = 1 since tuning
    beta            inverse temperatures, padded with NaN to 40 numbers
    log_ratio       V of the state of each
    proper          1 if these give the evidence, see `log_evidence`
    n_transitions   scans of the draw
    n_evals         log-density evaluations, of all replicas
    n_nonfinite     those that were NaN or +inf (and rejected)
    =============== ====================================================================

    Temperatures, archives and reference are frozen after tuning, and the product of all densities
    is then exactly invariant. Beside other steps, the other replicas use the values that the other
    variables had at the end of tuning. A mode that holds less than about 1e-8 of the reference is
    not found: give starts in it, `pm.sample(initvals=...)`.

    References
    ----------
    .. [1] S. Syed, A. Bouchard-Cote, G. Deligiannidis and A. Doucet, "Non-reversible parallel
       tempering: a scalable highly parallel MCMC scheme", JRSS B 84, 2022. doi:10.1111/rssb.12464
    .. [2] C. J. F. ter Braak and J. A. Vrugt, "Differential Evolution Markov Chain with snooker
       updater and fewer chains", Statistics and Computing 18, 2008. doi:10.1007/s11222-008-9104-9
    .. [3] J. S. Liu and C. Sabatti, "Generalised Gibbs sampler and multigrid Monte Carlo for
       Bayesian computation", Biometrika 87, 2000. doi:10.1093/biomet/87.2.353
    .. [4] J. Goodman and J. Weare, "Ensemble samplers with affine invariance", Communications in
       Applied Mathematics and Computational Science 5, 2010. doi:10.2140/camcos.2010.5.65

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=ParallelTemperingStep())
    """

    name = "parallel_tempering"
    sampler_class = TemperingSampler
    can_look_ahead = can_be_tempered = False
    _not_arguments = (
        "learner",
        "pseudo_marginal",
        "surrogate",
        "warm_start",
        "adapt_after_tune",
        "target_accept",
        "start",
    )
    stats_dtypes_shapes = without_scaling(MetropolisHastingsStep) | {
        "swapped": (np.float64, []),
        "n_temperatures": (np.float64, []),
        "barrier": (np.float64, []),
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
        if self.target.estimated_terms:
            raise ValueError(
                f"The likelihood term {', '.join(self.target.estimated_terms)} is an estimate, and "
                "ParallelTemperingStep takes the log density for exact. Write "
                "KameleonStep(pseudo_marginal=True)."
            )
        learner.target = learner.hot_target = self.target
        if self.stored is not None and self.target.shared:
            others = ", ".join(variable.name for variable in self.target.shared)
            raise ValueError(
                f"store=: ParallelTemperingStep has one for a whole model alone, and another step "
                f"moves {others}. Leave store out, or give this step all variables."
            )
        learner.stored = self.stored
        if self.target.shared:
            learner.hot_target = LogDensity(
                self.target.model,
                vars,
                initial_point=options.get("initial_point"),
                compile_kwargs=options.get("compile_kwargs"),
            )
        else:
            learner.prior_sampler = prior_sampler(self.target.model, self.target.names)
        self._is_proper = not self.target.shared and self.target.has_proper_prior

    def _chosen_steps_per_draw(self):
        return 5 if self.runs_compiled else 1

    def transitions_to_tune(self) -> int:  # noqa: D102
        return 1500 + 50 * self.dim

    def _complaint_of_acceptance(self):
        n, barrier = len(self.learner.ladder.betas), float(self.learner.ladder.barrier[0])
        if not barrier > LARGEST_REJECTION * (n - 1):
            return None
        names = ", ".join(self.target.names)
        advice = "Give priors that are nearer to the data"
        if n < MOST_TEMPERATURES:
            wanted = min(math.ceil(2.0 * barrier) + 1, MOST_TEMPERATURES)
            advice = f"Leave n_temperatures out, or take {wanted}"
        return (
            WarningType.CONVERGENCE,
            f"{n} temperatures of {names} are too few: neighbours swap in "
            f"{1 - barrier / (n - 1):.0%} of the attempts, so that hardly any state gets from the "
            f"reference to the chain. {advice}.",
        )

    def _count_trips(self):
        """Warn, once, of a chain that hardly any state reached from the first temperature."""
        scans, trips = (int(self.learner.states.counters[i]) for i in (SCANS, TRIPS))
        if self.tune or scans < SCANS_BEFORE_TRIPS or "trips" in self.report.warned:
            return
        self.report.warned.add("trips")
        if trips < FEWEST_TRIPS:
            self.report.pending = (
                WarningType.CONVERGENCE,
                f"Only {trips} states came from the reference to the chain of "
                f"{', '.join(self.target.names)} in {scans} scans: the weights of modes and the "
                f"evidence may be wrong. Tune longer (tune={2 * self.default_tune_steps}), or take "
                "more draws and compare chains.",
            )

    def _learnt_statistics(self, n_evals):
        learner = self.learner
        self._count_trips()
        found = learner.statistics() | {"proper": float(self._is_proper)}
        learner.states.swaps[:] = 0.0
        for name, values in (("beta", learner.ladder.betas), ("log_ratio", learner.states.ratio)):
            found[name] = np.full(MOST_TEMPERATURES, np.nan)
            found[name][: len(values)] = values
        return found
