"""What steps with one learnt covariance share: its start, its initial phase, what it has become."""

import hashlib
import math
from abc import abstractmethod

import numpy as np
from pymc.step_methods.state import dataclass_state
from scipy import linalg

from pymc_kameleon.adaptation import standardization
from pymc_kameleon.steps.base import MetropolisHastingsState, MetropolisHastingsStep
from pymc_kameleon.transitions.adaptive_metropolis import Moments
from pymc_kameleon.validation import checked_array, checked_number

__all__ = ["LearntCovarianceState", "LearntCovarianceStep"]


@dataclass_state
class LearntCovarianceState(MetropolisHastingsState):
    """State of a step with one learnt covariance."""

    moments: Moments | None
    initial_transitions: int


class LearntCovarianceStep(MetropolisHastingsStep):
    """Base of `AdaptiveMetropolisStep` and `MALAStep`.

    A subclass gives the start of its scaling (`_default_scaling`) and `_make_transitions`.
    """

    default_tune_steps = 2000
    _state_class = LearntCovarianceState

    def __init__(
        self,
        vars,
        *,
        scaling,
        learn_scaling,
        covariance,
        initial_covariance,
        **options,
    ):
        if scaling is not None:
            scaling = checked_number("scaling", scaling, above=0)
        self.learn_scaling = bool(learn_scaling)
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
        super().__init__(
            vars,
            configuration={
                "scaling": scaling,
                "learn_scaling": self.learn_scaling,
                "covariance": covariance if isinstance(covariance, str) else _digest(covariance),
                "initial_covariance": _digest(initial_covariance),
            },
            **options,
        )
        self.initial_scaling = scaling or self.warm_scaling or self._default_scaling()
        self._start_factor = None
        if not isinstance(covariance, str):
            self._start_factor = self._cholesky("covariance", covariance)
        elif covariance == "identity":
            self._start_factor = np.eye(self.dim)
        elif initial_covariance is not None:
            self._start_factor = self._cholesky("initial_covariance", initial_covariance)

    @abstractmethod
    def _default_scaling(self) -> float:
        """Return what multiplies the covariance at first."""

    @abstractmethod
    def _make_transitions(self, n: int) -> None:
        """Make `n` transitions of one phase."""

    def _cholesky(self, name, covariance):
        matrix = checked_array(
            name,
            covariance,
            (self.dim, self.dim),
            f"a covariance matrix of {', '.join(self.target.names)}",
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

    # life cycle -----------------------------------------------------------------------------------

    def _history_capacity(self):
        return 10_000

    def _forget(self):
        self.moments = None
        self.initial_transitions = 0

    def _begin(self, position):
        factor = np.eye(self.dim) if self._start_factor is None else self._start_factor.copy()
        self.moments = Moments(
            mean=position.copy(),
            factor=factor,
            log_scaling=np.array([math.log(self.initial_scaling)]),
            n_updates=np.array([0.0, 10.0 * self.dim]),
        )
        if self.warm is not None and self.learns_covariance:
            learnt = standardization(self.warm, np.ones(self.dim))
            self.moments.mean[:] = learnt.location
            self.moments.factor[:] = learnt.factor
            self.moments.n_updates[1] = len(self.warm)
        elif self._start_factor is None:
            self.initial_transitions = max(100, 25 * self.dim)

    def _end_tuning(self):
        if 0 < self.transition < self.initial_transitions:
            self._end_initial_phase()

    def _end_initial_phase(self):
        self.initial_transitions = 0
        self.moments.mean[:] = self.chain.position
        self.moments.factor[:] = np.diag(np.exp(self.components.log_scale))

    def _moved(self):
        pass

    # transitions ----------------------------------------------------------------------------------

    def _advance(self, n):
        if not self.adapts or not self.initial_transitions:
            self._make_transitions(n)
            return
        first = min(n, self.initial_transitions - self.transition)
        self._make_transitions(first)
        if self.transition + first == self.initial_transitions:
            self._end_initial_phase()
        if n > first:
            self._make_transitions(n - first)

    # what was learnt ------------------------------------------------------------------------------

    def _has_learnt(self):
        return self.moments is not None and not self.initial_transitions

    def _learnt_normal(self):
        if not self.learns_covariance or not self._has_learnt():
            return None
        return self.moments.mean, self.moments.factor

    def _covariances_at(self, rows):
        factor = self.moments.factor
        covariance = math.exp(self.moments.log_scaling[0]) * factor @ factor.T
        return np.tile(covariance, (len(rows), 1, 1))

    def _scaling_statistics(self):
        return {"scaling": math.exp(self.moments.log_scaling[0])}


def _digest(array) -> str | None:
    """Return a short text that tells arrays apart, to compare configurations."""
    if array is None:
        return None
    return hashlib.sha256(np.asarray(array, dtype=float).tobytes()).hexdigest()[:16]
