"""What `LatentGPStep` learns while tuning: proposals, sites, and a surrogate from pilots."""

import math

import numpy as np
from pymc.stats.convergence import WarningType
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation.learner import LearnerState
from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.gp.typical_set import around_the_mode
from pymc_kameleon.latent_gp.hyperparameters.learning import (
    EvidenceLearner,
    Pilots,
    approximate,
    learn,
    no_pilots,
)
from pymc_kameleon.latent_gp.hyperparameters.site_function import SiteFunction, constant_sites
from pymc_kameleon.latent_gp.hyperparameters.target import JointTarget, log_joint, point_of_draw
from pymc_kameleon.mcmc.chain import Chain, new_chain
from pymc_kameleon.mcmc.history import History, new_history
from pymc_kameleon.mcmc.scalings import target_acceptance
from pymc_kameleon.steps.chain.life_cycle import all_or_nothing
from pymc_kameleon.steps.chain.start import FIRST_SHARE, point_near_mode, search_from
from pymc_kameleon.steps.latent_function import LatentFunctionState, LatentFunctionStep
from pymc_kameleon.surrogate.learner import N_HISTORY

ACCEPT_ON_SURROGATE = 0.9
"""Acceptance of trajectories on the surrogate, which cost nothing beside an exact ratio."""

FIRST_LESSON, MORE = 150, 50
"""Transitions before the first refit from pilots, and as many more for each hyperparameter, where
there was none before the chain; later ones are at twice, four times, ... as many."""

PILOTS, MORE_PILOTS = 10, 5
"""Pilots of a refit where the chain was, and as many more for each hyperparameter."""

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
    next_lesson: int
    n_fits: float


class LatentGPTuning(LatentFunctionStep):
    """Base of `LatentGPStep` with everything that its transitions take as given.

    A subclass sets `approximation`, `target_accept` and `joint`, and gives the transitions.
    """

    _state_class = LatentGPState

    moments, taught = MomentsLearner(), EvidenceLearner(max_centers=300)
    """Learners before and after the first refit, each without a chain."""

    def _begin_learning(self):
        self.chain = self.learner = self.sites = None
        self.history = self.pilots = None
        self.method = self.approximation
        self.transition = 0
        self.angle = 0.5 * math.pi
        self.next_fit = 0
        self.next_lesson = FIRST_LESSON + MORE * self.joint.dim
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
        points, pilots, values = [], [], []

        def log_density(theta):
            nearby = next((pilot.sites for pilot in reversed(pilots) if pilot is not None), None)
            pilot = approximate(self.joint, theta, "laplace", nearby)
            points.append(theta.copy())
            pilots.append(pilot)
            values.append(-np.inf if pilot is None else pilot.log_density)
            return values[-1]

        search_from(x, FIRST_SHARE * self.joint.scales, log_density)
        if np.isfinite(values).sum() < x.size + 2:
            return
        known = np.array(points), np.array(values)
        gaussian = around_the_mode(*known)
        point_near_mode(gaussian, *known, log_density, self.rng)
        self.learner.begin_with(gaussian, self.rng)
        self.chain.position[:] = points[-1]
        self.sites = constant_sites(pilots[-1].sites, x.size)
        normals = self.rng.standard_normal((x.size, N_EXPECTED))
        self.history.begin_with(gaussian.unwhiten(normals))
        self._take_lesson()

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
        x, is_taught = np.zeros(self.joint.dim), state.learner.kind == EvidenceLearner.__name__
        new_learner = self._taught_learner if is_taught else self._new_learner
        fresh, self.learner = new_learner(x), new_learner(x)
        super()._set_state(state)
        self.learner.check_state(fresh)

    def _new_learner(self, x):
        accept = target_acceptance(x.size) if self.target_accept is None else self.target_accept
        return self.moments.start(x, self.rng, accept)

    def _taught_learner(self, x):
        return self.taught.start(x, self.rng, ACCEPT_ON_SURROGATE)

    def _end_tuning(self):
        if self.learner is not None:
            with all_or_nothing(self.learner):
                self.learner.end_tuning(self.chain.position, self.rng)
        # Without pilots, sites that cost more than those of tuning are worth their time now.
        self.next_fit = None if isinstance(self.learner, EvidenceLearner) else self.draw
        self.history = self.pilots = None

    def _learn(self):
        """Learn where the chain has been, and not where the function is, what tuning learns."""
        if not self.joint.likelihood.has_gradient:
            return
        sites = self.sites
        if self.tune and self.joint.dim and self.transition >= self.next_lesson:
            self._take_lesson()
        elif self.next_fit is not None and self.draw >= self.next_fit:
            self._fit()
        if self.sites is sites:
            return
        self.n_fits += 1.0
        target, point = JointTarget(self.joint, self.sites), self._point
        self._point = target.point(point.x, point.function)
        if self.tune:
            self._leave_tails()

    def _take_lesson(self):
        """Learn from pilots; from the first on, the surrogate makes proposals."""
        learner = self.learner
        if not isinstance(learner, EvidenceLearner):
            learner = self._taught_learner(self.chain.position)
            learner.history = self.history
        n_pilots = PILOTS + MORE_PILOTS * self.joint.dim
        lesson = learn(self.joint, learner, self.pilots, self.method, self.rng, n_pilots)
        self.pilots, self.method = lesson.pilots, lesson.method
        self.next_lesson *= 2
        if lesson.sites is not None:
            self.sites, self.next_fit = lesson.sites, None
        if lesson.is_surrogate_fitted:
            self.learner, self.history = learner, None

    def _fit(self):
        """Fit constant sites at the mean of where the chain has been."""
        self.next_fit = max(1, 2 * self.draw) if self.tune else None
        normal = self.learner.normal()
        x = self._point.x if normal is None else normal[0].copy()
        start = self.sites(x) if self.n_fits else None
        # While tuning Laplace's, which are cheap, and are soon others.
        method = "laplace" if self.tune else self.approximation
        pilot = approximate(self.joint, x, method, start)
        if pilot is None and normal is not None:
            pilot = approximate(self.joint, self._point.x, method)
        if pilot is not None:
            self.sites = constant_sites(pilot.sites, self.joint.dim)
        elif not self.n_fits:
            self._warn_once(
                "center",
                WarningType.BAD_PARAMS,
                f"No Gaussian was found that is like the posterior of {self.function.name}, so "
                "hyperparameters move at a fixed whitened function: slowly, where data say much.",
            )

    def _leave_tails(self):
        """Move a function that is far out, where slices are slow, to a draw of its Gaussian."""
        point = self._point
        drawn = point_of_draw(self.joint, point, self.rng)
        if log_joint(drawn) > log_joint(point):
            self._point = drawn
