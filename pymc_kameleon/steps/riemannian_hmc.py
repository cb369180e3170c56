"""Riemannian manifold Hamiltonian Monte Carlo for a latent Gaussian process."""

import math
from collections.abc import Sequence
from typing import Any

from pymc.exceptions import SamplingError
from pymc.stats.convergence import WarningType
from pymc.step_methods.state import dataclass_state
from pytensor.graph.basic import Variable

from pymc_kameleon.latent_gp.riemannian_metric import needed_soft_floor
from pymc_kameleon.latent_gp.riemannian_trajectory import (
    DualAveraging,
    RiemannianOutcome,
    RiemannianSettings,
    RiemannianState,
    transition,
)
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.latent_function import LatentFunctionState, LatentFunctionStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import (
    as_published,
    checked_integer,
    checked_number,
    checked_share,
    only_published,
)

FAILURES = ("not_converged", "not_reversible", "diverging")

SHARE_OF_FAILURES = 0.1
"""Share of failed trajectories after tuning above which a chain warns."""

SMALLEST_STEP_SIZE = 1e-10
"""Smallest step size, to which a chain that never moves learns down; at 0 there are no steps."""

NOWHERE_TO_GO = RiemannianOutcome(
    acceptance=0.0,
    accepted=False,
    n_leapfrog=0,
    energy=math.nan,
    n_fixed_point=0.0,
    not_converged=0.0,
    not_reversible=0.0,
    diverging=True,
)
"""Outcome of a transition from where there is no metric."""


@dataclass_state
class RiemannianHMCState(LatentFunctionState):
    """All that the next transition of a chain needs."""

    averaging: DualAveraging
    step_size: float
    trajectories: int


PUBLISHED = ("n_fixed_point", "random_length")
"""Arguments of published settings alone."""


@with_shared_parameters
class RiemannianHMCStep(LatentFunctionStep):
    """Riemannian manifold HMC for the latent function of a Gaussian-process model.

    The metric is the precision that the posterior has at the point: that of the prior plus the
    curvature of the likelihood. So a trajectory follows correlations of any strength and crosses
    the posterior in a few steps, whatever the hyperparameters. Each step factorises an N x N matrix
    several times; `EllipticalSliceStep` is faster wherever the posterior is nearly Gaussian.

    ::

        draw p ~ N(0, G(x)), a number of steps
        each step: p half a step (implicit), x a step (implicit), p half a step
            rejected if an implicit equation is not solved, or not solved by the way back
        accept by H = p' G(x)^-1 p / 2 + log|G(x)| / 2 - log density(x)

    Parameters
    ----------
    %(latent_vars)s
    step_size : float
        First step size while tuning, in the unit of the metric (a Gaussian is crossed in pi / 2);
        the step size throughout with `adapt_step_size=False`.
    n_steps : int
        Largest number of steps of a trajectory; it is uniform on 1 to `n_steps`.
    target_accept : float
        Acceptance probability that the step size is learnt for, failures counted as 0.
    adapt_step_size : bool
        Learn the step size while tuning, towards `target_accept`.
    soft_floor : float or None
        Lower bound of the metric's curvature, smoothed, for a likelihood that is not log-concave. 0
        is none. None finds out whether it is needed.
    %(pymc)s

    Raises
    ------
    ValueError
        If no Gaussian prior or no factorising likelihood is found, saying which and why.
    NotImplementedError
        If the likelihood has no gradient.

    Notes
    -----
    Sampler statistics, float64 but for the last:

    ================ ==================================================================
    `accept`         acceptance probability, 0 for a trajectory that failed
    `accepted`       1 if accepted
    `step_size`      of the trajectory
    `n_leapfrog`     steps made
    `energy`         Hamiltonian at the draw
    `n_fixed_point`  iterations of a step, mean of the trajectory
    `not_converged`  1 if an implicit equation was not solved
    `not_reversible` 1 if the way back did not return
    `diverging`      whether the energy or the likelihood was lost, bool
    ================ ==================================================================

    The target is invariant for a fixed step size: the integrator, checked, is reversible and keeps
    volume, and what fails is rejected. After tuning the step size is fixed. Where other steps move
    hyperparameters, the prior's Cholesky factor is computed again then and only then.

    References
    ----------
    Paquet & Fraccaro (2018), An efficient implementation of Riemannian manifold Hamiltonian Monte
    Carlo for Gaussian process models, arXiv:1810.11893.
    Girolami & Calderhead (2011), Riemann manifold Langevin and Hamiltonian Monte Carlo methods,
    JRSS B 73, 123-214, doi:10.1111/j.1467-9868.2010.00765.x.

    Examples
    --------
    >>> with model:  # doctest: +SKIP
    ...     f = pm.gp.Latent(cov_func=covariance).prior("f", X=inputs)
    ...     pm.Poisson("y", mu=pm.math.exp(f), observed=counts)
    ...     idata = pm.sample(step=RiemannianHMCStep([f]))
    """

    name = "riemannian_hmc"
    stats_dtypes_shapes: dict = draw_statistics(
        "accept",
        "accepted",
        "step_size",
        "n_leapfrog",
        "energy",
        "n_fixed_point",
        "not_converged",
        "not_reversible",
    ) | {"diverging": (bool, [])}
    default_tune_steps = 500
    _state_class = RiemannianHMCState
    _computed = (*LatentFunctionStep._computed, "_geometry", "soft_floor")

    @only_published(*PUBLISHED, constructor="paper")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        step_size: float = 0.4,
        n_steps: int = 6,
        n_fixed_point: int | None = None,
        target_accept: float = 0.8,
        adapt_step_size: bool = True,
        random_length: bool = True,
        soft_floor: float | None = None,
        **options: Any,
    ) -> None:
        self.first_step_size = checked_number("step_size", step_size, above=0)
        self.n_steps = checked_integer("n_steps", n_steps, 1)
        self.n_fixed_point = (
            None if n_fixed_point is None else checked_integer("n_fixed_point", n_fixed_point, 1)
        )
        self.target_accept = checked_share("target_accept", target_accept, open_interval=True)
        self.adapt_step_size = bool(adapt_step_size)
        self.random_length = bool(random_length)
        if soft_floor is not None:
            checked_number("soft_floor", soft_floor, at_least=0)
        self.given_floor = soft_floor
        super().__init__(
            vars,
            configuration={
                "step_size": self.first_step_size,
                "n_steps": self.n_steps,
                "n_fixed_point": self.n_fixed_point,
                "target_accept": self.target_accept,
                "adapt_step_size": self.adapt_step_size,
                "random_length": self.random_length,
                "soft_floor": soft_floor,
            },
            **options,
        )
        self.function.likelihood.require_gradient()

    @classmethod
    def paper(
        cls,
        vars=None,
        *,
        step_size: float = 0.1,
        n_steps: int = 10,
        n_fixed_point: int | None = 5,
        **kwargs,
    ) -> "RiemannianHMCStep":
        """Make a step with the settings of Paquet & Fraccaro: nothing learnt, nothing checked.

        Five iterations do not solve the implicit equations, so that the draws are not exact; at a
        step size of 0.1 the error is small.

        Parameters
        ----------
        vars, step_size, n_steps, **kwargs
            As for `RiemannianHMCStep`. Every trajectory has `n_steps` steps, unless
            ``random_length=True``: then it is uniform on 1 to `n_steps`, as there.
        n_fixed_point : int or None
            Fixed-point iterations of each implicit equation, without any check; then the target is
            only nearly invariant. None solves them and checks the way back, as
            `RiemannianHMCStep` does.
        """
        settings = {
            "step_size": step_size,
            "n_steps": n_steps,
            "n_fixed_point": n_fixed_point,
            "adapt_step_size": False,
            "random_length": False,
        }
        return cls(vars, **as_published(PUBLISHED, settings | kwargs))

    def _begin_learning(self):
        self.averaging = DualAveraging(self.first_step_size, self.target_accept)
        self.step_size = self.first_step_size
        self.trajectories = 0

    def _model_changed(self, prior_changed):
        self._target = self._geometry = self.soft_floor = None

    def _end_tuning(self):
        if self.adapt_step_size:
            self.step_size = max(self.averaging.learnt, SMALLEST_STEP_SIZE)

    def _transitions(self):
        if self._target is None:
            self._target = TemperedTarget(self.function.prior.gaussian, self.function.likelihood)
            # A function of the other variables alone: what the move may depend on.
            self.soft_floor = (
                needed_soft_floor(self._target) if self.given_floor is None else self.given_floor
            )
        settings = RiemannianSettings(
            self.step_size,
            self.n_steps,
            self.n_fixed_point,
            self.random_length,
            self.soft_floor,
        )
        state = RiemannianState(self.position, self._geometry)
        try:
            state, outcome = transition(self._target, state, settings, self.rng)
        except FloatingPointError as error:
            if self.draw == 0:
                raise SamplingError(
                    f"RiemannianHMCStep cannot start from these values of {self.function.name}: "
                    f"{error}"
                ) from error
            # Other steps led here. No trajectory ends where there is no metric, so that to stay is
            # reversible, until they lead away again.
            outcome = NOWHERE_TO_GO
        self._geometry = state.geometry
        self._learn(outcome)
        statistics = {
            "accept": outcome.acceptance,
            "accepted": float(outcome.accepted),
            "step_size": settings.step_size,
            "n_leapfrog": float(outcome.n_leapfrog),
            "energy": outcome.energy,
            "n_fixed_point": outcome.n_fixed_point,
            **{name: getattr(outcome, name) for name in FAILURES},
        }
        return (state.position if outcome.accepted else self.position), statistics

    def _learn(self, outcome):
        if self.tune:
            if self.adapt_step_size and outcome.n_leapfrog:
                self.averaging.update(outcome.acceptance)
                self.step_size = max(self.averaging.step_size, SMALLEST_STEP_SIZE)
            return
        report = self.report
        self.trajectories += 1
        report.failed += any(getattr(outcome, name) for name in FAILURES)
        report.acceptance += (outcome.acceptance - report.acceptance) / self.trajectories
        if self.trajectories < 100 or "trajectories" in report.warned:
            return
        failures = report.failed / self.trajectories
        if failures > SHARE_OF_FAILURES:
            self._warn_once(
                "trajectories",
                WarningType.BAD_PARAMS,
                f"{failures:.0%} of the trajectories of {self.function.name} failed (see the "
                "statistics not_converged, not_reversible and diverging) and were rejected. Take a "
                f"step_size below {self.step_size:.3g}, or tune longer.",
            )
        elif self.adapt_step_size and not 0.3 < report.acceptance / self.target_accept < 1.24:
            self._warn_once(
                "trajectories",
                WarningType.BAD_ACCEPTANCE,
                f"The acceptance of {self.function.name} is {report.acceptance:.2f}, far from "
                f"its target {self.target_accept:.2f}. Tune longer.",
            )

    def _progress_columns(self):
        return {"accept": ("Accept", "0.2f"), "n_leapfrog": ("Leaps", "0.0f")}
