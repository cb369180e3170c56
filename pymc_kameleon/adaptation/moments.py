"""Learner of adaptive Metropolis and MALA: one covariance and scaling, at every transition."""

import hashlib
import math

import numpy as np
from scipy import linalg

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.mcmc.loop import Mixture, no_differences
from pymc_kameleon.mcmc.proposals.random_walk import Moments, RandomWalk
from pymc_kameleon.mcmc.scalings import WIDEST_BOUNDS, ScalingRecursion, new_scaling
from pymc_kameleon.validation import checked_array, checked_number


def scaling_of_a_random_walk(dim: int) -> float:
    """Return what multiplies a Gaussian target's covariance in the best of random walks."""
    return 2.38**2 / max(dim, 1)


class MomentsLearner(Learner):
    """Learns the scale of each coordinate first, by moves of one at a time, then the covariance.

    `default_scaling` gives the start of the scaling as a function of the dimension,
    `proposal_class` is `RandomWalk` or `Langevin`, and `coordinate_share` the share of
    one-coordinate moves while tuning, after the initial phase of nothing else. The other parameters
    are those of `AdaptiveMetropolisStep`.
    """

    history_capacity = 10_000
    state_names = ("scales", "moments", "scaling", "initial_transitions")

    def __init__(
        self,
        *,
        scaling=None,
        learn_scaling=True,
        covariance="learned",
        initial_covariance=None,
        default_scaling=scaling_of_a_random_walk,
        proposal_class=RandomWalk,
        coordinate_share=0.0,
        called="scaling",
    ):
        self.chosen_scaling = None if scaling is None else checked_number(called, scaling, above=0)
        self.learns_scaling = bool(learn_scaling)
        if isinstance(covariance, str) and covariance not in ("learned", "identity"):
            raise ValueError(
                f'covariance={covariance!r}: take "learned", "identity" or a (d, d) array.'
            )
        self.learns_covariance = isinstance(covariance, str) and covariance == "learned"
        if initial_covariance is not None and not self.learns_covariance:
            raise ValueError(
                "initial_covariance is the start of a learnt covariance: take "
                'covariance="learned", or leave it out.'
            )
        self.covariance, self.initial_covariance = covariance, initial_covariance
        self.default_scaling, self.proposal_class = default_scaling, proposal_class
        self.coordinate_share = coordinate_share
        self.start_factor = None
        self.options = {
            called: self.chosen_scaling,
            "learn_scaling": self.learns_scaling,
            "covariance": covariance if isinstance(covariance, str) else _digest(covariance),
            "initial_covariance": _digest(initial_covariance),
        }

    def check(self, names, dim):  # noqa: D102
        if not isinstance(self.covariance, str):
            self.start_factor = _cholesky("covariance", self.covariance, names, dim)
        elif self.covariance == "identity":
            self.start_factor = np.eye(dim)
        elif self.initial_covariance is not None:
            name = "initial_covariance"
            self.start_factor = _cholesky(name, self.initial_covariance, names, dim)

    def _begin(self, position, rng, warm):
        start, dim = self.start_factor, self.dim
        known = None if warm is None else warm.scaling
        self.scaling = new_scaling(self.chosen_scaling or known or self.default_scaling(dim))
        self.moments = Moments(
            mean=position.copy(),
            factor=np.eye(dim) if start is None else start.copy(),
            weight=np.array([10.0 * dim]),
        )
        self._no_differences = no_differences(dim)
        self.initial_transitions = 0
        if warm is not None and self.learns_covariance:
            self._begin_at(standardization(warm.points, np.ones(dim)))
            self.moments.weight[0] = len(warm.points)
        elif start is None:
            self.initial_transitions = max(100, 25 * dim)

    def begin_with_scales(self, scales):  # noqa: D102
        super().begin_with_scales(scales)
        if self.start_factor is None:
            self.moments.factor[:] = np.diag(scales)

    def begin_with(self, gaussian, rng):  # noqa: D102
        super().begin_with(gaussian, rng)
        if self.initial_transitions:
            self.initial_transitions = 0
            self._begin_at(gaussian)

    def _begin_at(self, gaussian):
        self.moments.mean[:] = gaussian.location
        self.moments.factor[:] = gaussian.factor

    def proposal(self, compiled):  # noqa: D102
        learns = self.learns_covariance and not self.initial_transitions
        return self.proposal_class(self.moments, self.scaling.log, learns)

    def mixture(self, tune):  # noqa: D102
        share = 0.0
        if self.initial_transitions:
            share = 1.0
        elif tune and self.start_factor is None:
            share = self.coordinate_share
        return Mixture(self.scales, self._no_differences, share, 0.0)

    def recursion(self):  # noqa: D102
        return ScalingRecursion(
            self.scaling, WIDEST_BOUNDS, self.target_accept, 1.0, 0.5, self.learns_scaling
        )

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        if not self.initial_transitions:
            return n
        return min(n, max(0, self.initial_transitions - transition))

    def update(self, position, tune, rng):  # noqa: D102
        self._begin_covariance(position)

    def end_tuning(self, position, rng):  # noqa: D102
        if self.initial_transitions and np.any(self.scales.n_updates):
            self._begin_covariance(position)

    def _begin_covariance(self, position):
        """End the initial phase: begin with the scales that it found."""
        self.initial_transitions = 0
        self.moments.mean[:] = position
        self.moments.factor[:] = np.diag(np.exp(self.scales.log_scale))

    @property
    def has_learnt(self):  # noqa: D102
        return not self.initial_transitions

    def normal(self):  # noqa: D102
        if not self.learns_covariance or not self.has_learnt:
            return None
        return self.moments.mean, self.moments.factor

    def statistics(self):  # noqa: D102
        return {"scaling": math.exp(0.5 * self.scaling.log[0])}


def _cholesky(name, covariance, names, dim):
    matrix = checked_array(
        name, covariance, (dim, dim), f"a covariance matrix of {', '.join(names)}"
    )
    if not np.allclose(matrix, matrix.T):
        raise ValueError(f"{name} is not symmetric: take a covariance matrix.")
    try:
        return np.ascontiguousarray(linalg.cholesky(matrix, lower=True))
    except linalg.LinAlgError as error:
        smallest = linalg.eigvalsh(matrix)[0]
        raise ValueError(
            f"{name} is not positive definite (smallest eigenvalue {smallest:.3g}): add "
            f"{max(1e-10, -2 * smallest):.3g} to its diagonal."
        ) from error


def _digest(array) -> str | None:
    """Return a short text that tells arrays apart, to compare configurations."""
    if array is None:
        return None
    return hashlib.sha256(np.asarray(array, dtype=float).tobytes()).hexdigest()[:16]
