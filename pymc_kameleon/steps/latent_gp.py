"""Latent Gaussian processes with their hyperparameters, moved together."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pymc.blocking import RaveledVars
from pymc.exceptions import SamplingError
from pymc.stats.convergence import WarningType
from pymc.step_methods.state import dataclass_state
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.learner import LearnerState
from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.gp.typical_set import around_the_mode
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.hyperparameters.learning import (
    HyperparameterLearner,
    Pilots,
    PilotSearch,
    no_pilots,
    pilot_at,
    refit,
)
from pymc_kameleon.latent_gp.hyperparameters.site_function import SiteFunction, constant_sites
from pymc_kameleon.latent_gp.hyperparameters.target import (
    JointTarget,
    log_joint,
    point_of_draw,
    transition,
)
from pymc_kameleon.latent_gp.reader.linear_predictor import element_names
from pymc_kameleon.mcmc.chain import ACCEPTANCE, ACCEPTED, EVALUATIONS, Chain, new_chain
from pymc_kameleon.mcmc.history import History, new_history, record
from pymc_kameleon.mcmc.scalings import target_acceptance
from pymc_kameleon.steps.chain.life_cycle import all_or_nothing, draw_statistics
from pymc_kameleon.steps.chain.start import FIRST_SHARE, point_near_mode, search_from
from pymc_kameleon.steps.latent_function import (
    LatentFunctionState,
    LatentFunctionStep,
    OtherVariables,
)
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.surrogate.learner import N_HISTORY
from pymc_kameleon.validation import checked_choice, checked_integer, checked_share

APPROXIMATIONS = ("ep", "laplace")

FAILURES = 0.1
"""Share of proposals without a covariance from which there is a warning."""

TURN_ACCEPT, LEAST_ANGLE, LARGEST_ANGLE, FROZEN = 0.85, 0.05, math.pi, 0.9
"""Acceptance of trajectories of the function that the length of their turns is learnt for, the
shortest and the longest, and what of it is kept after tuning: a turn more costs less than a
rejection."""

ACCEPT_ON_SURROGATE = 0.9
"""Acceptance of trajectories on the surrogate, which cost nothing beside an exact ratio."""

FIRST_REFIT, MORE, FIRST_OF_DRAWS = 150, 50, 125
"""Transitions before the first refit from pilots, plus this many per hyperparameter, or where a
draw is one transition so many draws, if there was none before the chain; later ones are at twice,
four times, ... as many."""

PILOTS, MORE_PILOTS = 10, 5
"""Pilots of a refit where the chain was, plus this many per hyperparameter."""

N_EXPECTED = 200
"""Draws of the Gaussian around the mode that stand for the chain's past in the refit before it."""


@dataclass_state
class LatentGPState(LatentFunctionState):
    """All that the next transition of a chain needs."""

    chain: Chain | None
    learner: LearnerState | None
    sites: SiteFunction | None
    history: History | None
    pilots: Pilots | None
    method: str
    transition: int
    angle: float
    next_fit: int | None
    next_refit: int
    n_fits: float


@with_shared_parameters
class LatentGPStep(LatentFunctionStep):
    r"""Latent Gaussian variables and their hyperparameters, moved together.

    For functions (`pm.gp.Latent`, `pm.MvNormal`), areas (`pm.CAR`, `pm.ICAR`), random walks and
    autoregressions, with the intercepts, coefficients and effects of groups that are added to them,
    or these alone, nested and crossed; and observations that depend on one value of the sum, or on
    a few. Up to a few thousand values where there is a covariance matrix, tens of thousands without
    one. Hyperparameters mix as in their marginal posterior, though the function, as the sum is
    called here, is never integrated out: it is carried along by a Gaussian that knows where it lies
    at other hyperparameters. It needs no gradient in the hyperparameters.

    ::

        theta: hyperparameters; f: the function; q(f | theta): prior of f times Gaussian sites
        with f = m(theta) + C(theta) v, draw eta: v = mu(theta) + L(theta) eta, N(0, I) under q
        repeat steps_per_draw times:
            propose theta*, and f* by the same two equations at theta*
            accept by the ratio of p(y | f, theta) p(f | theta) p(theta) / q(f | theta)
            eta, and with it f: elliptical slices about N(0, I)

    Parameters
    ----------
    vars : list of variables, optional
        A latent function, or several, and the variables to move with them; if none but a function
        is named, all Gaussian ones that add to the same linear predictor, and all continuous ones
        that prior and likelihood of that depend on, if any. Default all functions, areas and walks,
        or where there are none, coefficients and effects.
    approximation : {"ep", "laplace"}
        What the sites come from; "ep" is replaced by Laplace's where the two are found to agree.
        Without a gradient of the likelihood there are none, and hyperparameters move at a fixed
        whitened function. Always Laplace's where observations depend on several values, or no
        function has a covariance matrix.
    steps_per_draw : int, optional
        Transitions for each draw that is kept; default as many as hyperparameters, at least 2, and
        1 without a covariance matrix, where the function moves further in each.
    n_slices : int
        Elliptical slices of the function in each transition; without a covariance matrix one, after
        a trajectory.
    target_accept : float, optional
        Acceptance probability that the scaling is learnt for; default 0.44 for one hyperparameter,
        else 0.234.
    %(pymc)s

    Raises
    ------
    ValueError
        If no Gaussian prior is found, observations depend on too many values together, or a
        variable is none of the hyperparameters: it says which, and what to write.

    Notes
    -----
    Sampler statistics, all float64:

    ================= =================================================================
    `accept`          mean acceptance probability of hyperparameters; 1 if there are none
    `accepted`        share of accepted moves; 1 if there are none
    `scaling`         of the random walk, a factor of standard deviations; the step size where a
                      surrogate of log p(theta | y) has been learnt
    `surrogate_share` share of moves that a surrogate of log p(theta | y) proposes
    `learnt_sites`    1 if sites are a function of the hyperparameters, 0 if constant
    `n_evals`         likelihood evaluations in the draw
    `n_failed`        proposals at which a covariance was not positive definite
    `n_refits`        times that the sites were fitted so far in the chain
    `loglik`          log-likelihood of the draw
    ================= =================================================================

    The posterior is invariant for any sites that are a function of the hyperparameters alone.
    Tuning begins with a search for the mode of p(theta | y) as Laplace's approximation gives it,
    from where the chain was put, and the chain moves to a random point around it. Pilots are
    approximated there, and again where the chain has been after 300 + 100 d transitions, or 250
    where a draw is one, and at twice, four times, ... as many. They teach a surrogate of
    log p(theta | y), which makes proposals beside those of differences of earlier points, and sites
    as a function of theta, which take the place of constant ones if more moves are accepted with
    them. Tuning ends all that.
    Ratios are exact. Without hyperparameters, where all scales are known, the function alone moves,
    with sites that are fitted at draws 0, 1, 2, 4, ... of tuning and at the first one after it.

    References
    ----------
    .. [1] I. Murray and R. P. Adams, "Slice sampling covariance hyperparameters of latent Gaussian
       models", NIPS 23, 2010. arXiv:1006.0868
    .. [2] M. Filippone and M. Girolami, "Pseudo-marginal Bayesian inference for Gaussian
       processes", IEEE Transactions on Pattern Analysis and Machine Intelligence 36, 2014.
       doi:10.1109/TPAMI.2014.2316530
    .. [3] C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006,
       chapter 3.

    Examples
    --------
    >>> with model:  # doctest: +SKIP
    ...     lengthscale = pm.InverseGamma("lengthscale", 3, 2)
    ...     f = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(2, lengthscale)).prior("f", X=inputs)
    ...     pm.Bernoulli("y", logit_p=f, observed=labels)
    ...     idata = pm.sample(step=LatentGPStep([f]))
    """

    name = "latent_gp"
    stats_dtypes_shapes: dict = draw_statistics(
        "accept",
        "accepted",
        "scaling",
        "surrogate_share",
        "learnt_sites",
        "n_evals",
        "n_failed",
        "n_refits",
        "loglik",
    )
    default_tune_steps = 500
    _state_class = LatentGPState
    _computed = ("_seen_version", "_seen_prior", "_point")

    moments, on_surrogate = MomentsLearner(), HyperparameterLearner(max_points=300)
    """Learners before and after the first refit, each without a chain."""

    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        approximation: Literal["ep", "laplace"] = "ep",
        steps_per_draw: int | None = None,
        n_slices: int = 3,
        target_accept: float | None = None,
        **options: Any,
    ) -> None:
        self.approximation = checked_choice("approximation", approximation, APPROXIMATIONS)
        if not options.get("blocked", True):
            raise ValueError(
                "blocked=False: LatentGPStep moves a function and its hyperparameters together. "
                "Leave it out, and name those that belong to this step, vars=[f, ...]."
            )
        if steps_per_draw is not None:
            steps_per_draw = checked_integer("steps_per_draw", steps_per_draw, 1)
        self.steps_per_draw = steps_per_draw
        self.n_slices = checked_integer("n_slices", n_slices, 1)
        if target_accept is not None:
            checked_share("target_accept", target_accept, open_interval=True)
        self.target_accept = target_accept
        super().__init__(
            vars,
            configuration={
                "approximation": approximation,
                "steps_per_draw": steps_per_draw,
                "n_slices": self.n_slices,
                "target_accept": target_accept,
            },
            **options,
        )

    def _read(self, model, vars, initial_point, compile_kwargs):
        self.joint = JointModel(
            model, vars, initial_point=initial_point, compile_kwargs=compile_kwargs
        )
        self.function = self.joint.function
        if self.steps_per_draw is None:
            has_covariance = self.function.has_covariance
            self.steps_per_draw = max(2, self.joint.dim) if has_covariance else 1
        self._others = OtherVariables(self.joint)
        # In the model's order, which is that of the points that PyMC records.
        joint, point = self.joint, model.initial_point()
        parts = [joint.hyperparameters, self.function.value_variables, joint.predicted]
        own = sorted(itertools.chain(*parts), key=model.value_vars.index)
        shapes = [np.shape(point[value.name]) for value in own]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        where = dict(zip(own, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
        self._where = [np.concatenate([[], *map(where.get, part)]).astype(int) for part in parts]
        return own, shapes, joint.others

    # the life of a chain --------------------------------------------------------------------------

    def _begin_learning(self):
        self.chain = self.learner = self.sites = None
        self.history = self.pilots = None
        self.method = self.approximation
        self.transition = 0
        self.angle = 0.5 * math.pi
        self.next_fit = 0
        is_draw = self.steps_per_draw == 1
        self.next_refit = FIRST_OF_DRAWS if is_draw else FIRST_REFIT + MORE * self.joint.dim
        self.n_fits = 0.0

    def _begin_at(self, x):
        self.chain = new_chain(x)
        self.learner = self._new_learner(x)
        self.sites = constant_sites(self.joint.flat_sites(), x.size)
        self.history = new_history(N_HISTORY, x.size)
        self.pilots = no_pilots(x.size, self.joint.flat_sites())
        self.learner.begin_with_scales(FIRST_SHARE * self.joint.scales)
        if self.tune and self.joint.likelihood.has_gradient and self.joint.dim:
            self._search(x)

    def _search(self, x):
        """Move the chain to a random point around a mode of the approximated p(theta | y).

        A chain that begins far out would learn the shape there, and be slow to reach the
        posterior's mass.
        """
        log_density = PilotSearch(self.joint)
        search_from(x, FIRST_SHARE * self.joint.scales, log_density)
        if np.isfinite(log_density.values).sum() < x.size + 2:
            return
        known = np.array(log_density.points), np.array(log_density.values)
        gaussian = around_the_mode(*known)
        point_near_mode(gaussian, *known, log_density, self.rng)
        self.learner.begin_with(gaussian, self.rng)
        self.chain.position[:] = log_density.points[-1]
        self.sites = constant_sites(log_density.pilots[-1].sites, x.size)
        normals = self.rng.standard_normal((x.size, N_EXPECTED))
        self.history.begin_with(gaussian.unwhiten(normals))
        self._refit()

    def _fresh_state(self):
        dim = self.joint.dim
        return super()._fresh_state() | {
            "chain": new_chain(np.zeros(dim)),
            "sites": constant_sites(self.joint.flat_sites(), dim),
            "history": new_history(N_HISTORY, dim),
            "pilots": no_pilots(dim, self.joint.flat_sites()),
        }

    def _set_state(self, state):
        if state.learner is None:
            return super()._set_state(state)
        x = np.zeros(self.joint.dim)
        on_surrogate = state.learner.kind == HyperparameterLearner.__name__
        fresh, self.learner = (self._new_learner(x, on_surrogate) for _ in range(2))
        super()._set_state(state)
        self.learner.check_state(fresh)

    def _new_learner(self, x, on_surrogate=False):
        if on_surrogate:
            return self.on_surrogate.start(x, self.rng, ACCEPT_ON_SURROGATE)
        accept = target_acceptance(x.size) if self.target_accept is None else self.target_accept
        return self.moments.start(x, self.rng, accept)

    def _end_tuning(self):
        if self.learner is not None:
            with all_or_nothing(self.learner):
                self.learner.end_tuning(self.chain.position, self.rng)
        # Without pilots, sites that cost more than those of tuning are worth their time now.
        self.next_fit = None if isinstance(self.learner, HyperparameterLearner) else self.draw
        self.history = self.pilots = None
        self.angle *= FROZEN

    def _model_changed(self, prior_changed):
        self._point = None

    # a draw ---------------------------------------------------------------------------------------

    def _draw(self, q0):
        self._arrive(q0.data)
        # Until the draw is complete: if it is interrupted, theta and the function may not belong
        # together.
        self.returned = None
        self.chain.outcome[:] = 0.0
        before = self.position
        self.position, statistics = self._transitions()
        self.draw += 1
        is_unmoved = statistics["accepted"] == 0.0 or np.array_equal(self.position, before)
        self.returned = self._drawn(q0.data.dtype)
        self._report(statistics, moved=not is_unmoved)
        return RaveledVars(self.returned.copy(), q0.point_map_info), [statistics]

    def _arrive(self, q):
        """Find the point that `q`, theta and the free variable, stands for."""
        is_first = self.chain is None
        is_here = self.returned is not None and np.array_equal(q, self.returned)
        given, v = self._unpacked(q.astype(float))
        x = self.chain.position if is_here else given
        self.joint.set_hyperparameters(x)
        version = self._others.follow()
        if is_here and self._point is not None and version == self._seen_version:
            return
        try:
            self.joint.recompute()
        except ValueError as error:
            raise SamplingError(str(error)) from error
        prior, self._seen_version = self.function.prior.at, version
        variable = prior.variable
        # Kept where it is the same: the way to the free variable and back rounds.
        if not (
            is_here and variable.is_at(self.position, v, self.function.value_variables[0].dtype)
        ):
            self.position = variable.to_function(v)
        if is_first:
            self._check_start()
            self._begin_at(x)
            if not np.array_equal(self.chain.position, x):
                x, prior = self._moved_start()
        self.chain.position[:] = x
        self._point = JointTarget(self.joint, self.sites).point(x, self.position, prior)
        self.learner.invalidate()

    def _moved_start(self):
        """Return theta, where tuning is to begin, and its prior; draw a function there."""
        x = self.chain.position.copy()
        self.joint.set_hyperparameters(x)
        self.joint.recompute()
        prior = self.function.prior.at
        conditional = JointTarget(self.joint, self.sites).conditional(x, prior)
        drawn = conditional.draw(self.rng)
        is_possible = np.isfinite(self.joint.likelihood.value(conditional.predictors(drawn)))
        self.position = drawn if is_possible else conditional.mean
        return x, prior

    def _transitions(self):
        self._learn()
        target = JointTarget(self.joint, self.sites)
        target.hold(self._point, self.rng)
        chain, n_evaluations = self.chain, 0
        for _ in range(self.steps_per_draw):
            self._update_proposal()
            self._point, n_more, turn_acceptance = transition(
                target,
                self._point,
                chain,
                self.learner,
                self.rng,
                self.tune,
                self.n_slices,
                self.angle,
            )
            self.transition += 1
            n_evaluations += n_more
            if self.tune:
                self._learn_from(turn_acceptance)
        accepted = chain.outcome / self.steps_per_draw if self.joint.dim else np.ones(2)
        statistics = {
            "accept": accepted[ACCEPTANCE],
            "accepted": accepted[ACCEPTED],
            "surrogate_share": 0.0,
            **self.learner.statistics(),
            "learnt_sites": float(len(self.sites.precision) > 1),
            "n_evals": float(chain.counts[EVALUATIONS] + n_evaluations),
            "n_failed": float(target.n_failed),
            "n_refits": self.n_fits,
            "loglik": self._point.log_likelihood,
        }
        self._count_failures(target.n_failed)
        chain.counts[:] = 0
        return self._point.function, statistics

    def _update_proposal(self):
        learner, rng = self.learner, self.rng
        if not (self.tune and self.joint.dim):
            return
        if learner.transitions_before_update(self.transition, 1, rng) == 0:
            with all_or_nothing(learner):
                learner.update(self.chain.position, True, rng)

    def _learn_from(self, turn_acceptance):
        """Keep theta for the first refit, and learn how far the function turns at a time."""
        if self.joint.dim and self.history is not None:
            record(self.history, self.chain.position)
        if turn_acceptance is not None:
            self.angle *= math.exp((turn_acceptance - TURN_ACCEPT) / math.sqrt(1 + self.transition))
            self.angle = min(max(self.angle, LEAST_ANGLE), LARGEST_ANGLE)

    def _drawn(self, dtype):
        """Return theta, the free variables and the predictions as `pm.sample` has them."""
        v, latent = self._point.variable.drawn(self.position, self.rng)
        predictions = self.function.predictions
        self.joint.set_hyperparameters(self.chain.position)
        predicted = [] if predictions is None else predictions.drawn(latent, self.rng)
        values = np.empty(sum(map(len, self._where)))
        for where, part in zip(self._where, (self.chain.position, v, predicted), strict=True):
            values[where] = part
        return self._as_recorded(values, dtype)

    def _unpacked(self, q):
        """Return theta (d,) and the free variables (M,) of what `_drawn` returned."""
        theta, free, _ = self._where
        return q[theta], q[free]

    # what tuning learns ---------------------------------------------------------------------------

    def _learn(self):
        """Fit the sites if that is due, to where theta has been and not to the function."""
        if not self.joint.likelihood.has_gradient:
            return
        sites = self.sites
        if self.tune and self.joint.dim and self.transition >= self.next_refit:
            self._refit()
        elif self.next_fit is not None and self.draw >= self.next_fit:
            self._fit()
        if self.sites is sites:
            return
        self.n_fits += 1.0
        target, point = JointTarget(self.joint, self.sites), self._point
        self._point = target.point(point.x, point.function)
        if self.tune:  # slices are slow where a function is far out: a draw of its Gaussian is not
            drawn = point_of_draw(self.joint, self._point, self.rng)
            if log_joint(drawn) > log_joint(self._point):
                self._point = drawn

    def _refit(self):
        """Fit surrogate and sites to pilots; from the first time on, the surrogate proposes."""
        learner = self.learner
        if not isinstance(learner, HyperparameterLearner):
            learner = self._new_learner(self.chain.position, on_surrogate=True)
            learner.history = self.history
        n_pilots = PILOTS + MORE_PILOTS * self.joint.dim
        fitted = refit(self.joint, learner, self.pilots, self.method, self.rng, n_pilots)
        self.pilots, self.method = fitted.pilots, fitted.method
        self.next_refit *= 2
        if fitted.sites is not None:
            self.sites, self.next_fit = fitted.sites, None
        if fitted.is_surrogate_fitted:
            self.learner, self.history = learner, None

    def _fit(self):
        """Fit constant sites at the mean of where the chain has been."""
        self.next_fit = max(1, 2 * self.draw) if self.tune else None
        normal = self.learner.normal()
        x = self._point.x if normal is None else normal[0].copy()
        start = self.sites(x) if self.n_fits else None
        # While tuning Laplace's, which are cheap, and are soon others.
        method = "laplace" if self.tune else self.approximation
        pilot = pilot_at(self.joint, x, method, start)
        if pilot is None and normal is not None:
            pilot = pilot_at(self.joint, self._point.x, method)
        if pilot is not None:
            self.sites = constant_sites(pilot.sites, self.joint.dim)
        elif not self.n_fits:
            self._warn_once(
                "center",
                WarningType.BAD_PARAMS,
                f"No Gaussian was found that is like the posterior of {self.function.name}, so "
                "hyperparameters move at a fixed whitened function: slowly, where data say much.",
            )

    # warnings and progress ------------------------------------------------------------------------

    def _watched(self):
        return np.concatenate([self.chain.position, super()._watched()])

    def _watched_names(self):
        own = element_names(self.joint.hyperparameters, self.joint.shapes)
        return own + super()._watched_names()

    def _count_failures(self, n_failed):
        self.report.failed += int(n_failed)
        share = self.report.failed / self.transition
        if self.transition >= 500 and share > FAILURES:
            self._warn_once(
                "failed",
                WarningType.BAD_PARAMS,
                f"At {share:.0%} of the hyperparameters proposed so far the covariance of "
                f"{self.function.name} was not positive definite, and they were rejected. The "
                "draws keep to where it is: give priors that keep lengthscales from infinity, or "
                "the covariance more jitter.",
            )

    def _progress_columns(self):
        return {"accept": ("Accept", "0.2f"), "n_evals": ("Evals", "0.0f")}
