"""Latent Gaussian processes with their hyperparameters, moved together."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pymc.blocking import RaveledVars
from pymc.exceptions import SamplingError
from pymc.stats.convergence import WarningType
from pytensor.graph.basic import Variable

from pymc_kameleon.latent_gp.gaussian.conditional import conditional_of
from pymc_kameleon.latent_gp.hyperparameters.joint_model import JointModel
from pymc_kameleon.latent_gp.hyperparameters.target import (
    JointPoint,
    JointTarget,
    move_hyperparameters,
    slices,
    trajectory,
)
from pymc_kameleon.latent_gp.reader.linear_predictor import element_names
from pymc_kameleon.mcmc.chain import ACCEPTANCE, ACCEPTED, EVALUATIONS
from pymc_kameleon.mcmc.history import record
from pymc_kameleon.steps.chain.life_cycle import all_or_nothing, draw_statistics
from pymc_kameleon.steps.latent_function import OtherVariables
from pymc_kameleon.steps.latent_gp_tuning import LatentGPTuning
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import checked_choice, checked_integer, checked_share

APPROXIMATIONS = ("ep", "laplace")

FAILURES = 0.1
"""Share of proposals without a covariance from which there is a warning."""

TURN_ACCEPT, LEAST_ANGLE = 0.85, 0.05
"""Acceptance of trajectories of the function that the length of their turns is learnt for, and the
shortest."""


@with_shared_parameters
class LatentGPStep(LatentGPTuning):
    r"""Latent Gaussian variables and their hyperparameters, moved together.

    For functions (`pm.gp.Latent`, `pm.MvNormal`), areas (`pm.CAR`, `pm.ICAR`), random walks and
    autoregressions, with the intercepts, coefficients and effects of groups that are added to them,
    and observations that depend on one value of the sum, or on a few that go together. Up to a few
    thousand values where there is a covariance matrix, tens of thousands where areas and walks are
    known by their neighbours. Hyperparameters mix as in their marginal posterior, though the
    function, as the sum is called here, is never integrated out: it is carried along by a Gaussian
    that knows where it lies at other hyperparameters. It needs no gradient in the hyperparameters.

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
        that prior and likelihood of that depend on, if any. Default all functions, areas and walks.
    approximation : {"ep", "laplace"}
        What the sites come from; "ep" is replaced by Laplace's where the two are found to agree.
        Without a gradient of the likelihood there are none, and hyperparameters move at a fixed
        whitened function. Always Laplace's where observations depend on several values, or no
        function has a covariance matrix.
    steps_per_draw : int, optional
        Transitions for each draw that is kept; default as many as hyperparameters, at least 2.
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
    `scaling`         of the proposal
    `surrogate_share` share of moves that a surrogate of log p(theta | y) proposes
    `learnt_sites`    1 if sites are a function of the hyperparameters, 0 if constant
    `n_evals`         likelihood evaluations in the draw
    `n_failed`        proposals at which a covariance was not positive definite
    `n_center`        times that the sites were fitted so far in the chain
    `log_likelihood`  of the draw
    ================= =================================================================

    The posterior is invariant for any sites that are a function of the hyperparameters alone.
    Tuning begins with a search for the mode of p(theta | y) as Laplace's approximation gives it,
    from where the chain was put, and the chain moves to a random point around it. Pilots are
    approximated there, and again where the chain has been after 300 + 100 d transitions and at
    twice, four times, ... as many. They teach a surrogate of log p(theta | y), which makes
    proposals beside those of differences of earlier points, and sites as a function of theta, which
    take the place of constant ones if more moves are accepted with them. Tuning ends all that.
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
        "n_center",
        "log_likelihood",
    )
    default_tune_steps = 500
    _computed = ("_seen_version", "_seen_prior", "_point")

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
            self.steps_per_draw = max(2, self.joint.dim)
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
        self._settle(x, prior)
        self.learner.invalidate()

    def _moved_start(self):
        """Return theta, where tuning is to begin, and its prior; draw a function there."""
        x = self.chain.position.copy()
        self.joint.set_hyperparameters(x)
        self.joint.recompute()
        prior = self.function.prior.at
        conditional = conditional_of(prior.gaussian, self.sites(x), self.joint.likelihood.blocks)
        drawn = conditional.draw(self.rng)
        is_possible = np.isfinite(self.joint.likelihood.value(conditional.predictors(drawn)))
        self.position = drawn if is_possible else conditional.mean
        return x, prior

    def _settle(self, x, prior):
        """Keep what is known of the model at theta = `x`, where its prior is `prior`."""
        conditional = conditional_of(prior.gaussian, self.sites(x), self.joint.likelihood.blocks)
        self._point = JointPoint(
            x.copy(),
            self.position,
            prior.variable,
            conditional,
            self.joint.log_prior(x) + prior.variable.log_integral,
            self.joint.likelihood.value(conditional.predictors(self.position)),
        )

    def _transitions(self):
        self._learn()
        target = JointTarget(self.joint, self.sites)
        target.hold(self._point, self.rng)
        n_slice_evaluations = 0
        for _ in range(self.steps_per_draw):
            if self.joint.dim:
                self._move_hyperparameters(target)
            self.transition += 1
            n_slice_evaluations += self._move_function(target)
        chain = self.chain
        accepted = chain.outcome / self.steps_per_draw if self.joint.dim else np.ones(2)
        statistics = {
            "accept": accepted[ACCEPTANCE],
            "accepted": accepted[ACCEPTED],
            "surrogate_share": 0.0,
            **self.learner.statistics(),
            "learnt_sites": float(len(self.sites.precision) > 1),
            "n_evals": float(chain.counts[EVALUATIONS] + n_slice_evaluations),
            "n_failed": float(target.n_failed),
            "n_center": self.n_fits,
            "log_likelihood": self._point.log_likelihood,
        }
        self._count_failures(target.n_failed)
        chain.counts[:] = 0
        return self._point.function, statistics

    def _move_hyperparameters(self, target):
        learner, chain, rng = self.learner, self.chain, self.rng
        if self.tune and learner.transitions_before_update(self.transition, 1, rng) == 0:
            with all_or_nothing(learner):
                learner.update(chain.position, True, rng)
        self._point = move_hyperparameters(target, self._point, chain, learner, rng, self.tune)
        if self.tune and self.history is not None:
            record(self.history, chain.position)

    def _move_function(self, target):
        """Move the function at fixed hyperparameters; return the number of evaluations."""
        n_slices, n_more = self.n_slices, 0
        if self._point.conditional.has_adjoint and self.joint.likelihood.has_gradient:
            # One of thousands of values is not changed by slices of which all change.
            n_slices = 1
            self._point, acceptance, n_more = trajectory(target, self._point, self.rng, self.angle)
            if self.tune:
                self.angle *= math.exp((acceptance - TURN_ACCEPT) / math.sqrt(1 + self.transition))
                self.angle = min(max(self.angle, LEAST_ANGLE), 0.5 * math.pi)
        self._point, n = slices(target, self._point, self.rng, n_slices)
        return n + n_more

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
