"""Adaptive Metropolis as a PyMC step method: SM, AM-FS and AM-LS."""

import hashlib
import math
from typing import Any

import numpy as np
from pymc.step_methods.state import dataclass_state
from scipy import linalg

from pymc_kameleon.adaptation import standardization
from pymc_kameleon.steps.base import GradientFreeState, GradientFreeStep
from pymc_kameleon.transitions import adaptive_metropolis
from pymc_kameleon.transitions.adaptive_metropolis import N_UNIFORMS, Moments, Settings
from pymc_kameleon.validation import checked_array, checked_number

__all__ = ["AdaptiveMetropolisState", "AdaptiveMetropolisStep"]


@dataclass_state
class AdaptiveMetropolisState(GradientFreeState):
    """State of an `AdaptiveMetropolisStep`."""

    moments: Moments | None
    initial_transitions: int


class AdaptiveMetropolisStep(GradientFreeStep):
    r"""Random-walk Metropolis with a learnt covariance and scaling.

    Proposes from :math:`N(x, \lambda \Sigma)`. For posteriors that are nearly Gaussian and have no
    gradient, and as the baseline of the adaptive literature; a curved posterior is better left to
    `KameleonStep`.

    =====================  =========================================================================
    SM                     `covariance="identity", learn_scaling=False`
    AM with fixed scaling  `learn_scaling=False`
    AM with learnt scale   the default
    =====================  =========================================================================

    Parameters
    ----------
    vars : list of variables, optional
        Continuous free variables of the model; default all of them.
    scaling : float, optional
        :math:`\lambda`, which multiplies the covariance; default :math:`2.38^2/d`.
    learn_scaling : bool
        Learn :math:`\lambda` while tuning, towards `target_accept`.
    covariance : "learned", "identity" or array, shape (d, d)
        Covariance in the raveled unconstrained space: learnt while tuning, or fixed.
    initial_covariance : array, shape (d, d), optional
        Start of a learnt covariance. By default the chain first learns the scale of each coordinate
        by moves of one coordinate at a time.
    target_accept : float, optional
        Default 0.44 for d = 1, else 0.234.
    adapt_after_tune : bool
        Go on learning after tuning, with vanishing steps.
    steps_per_draw : int
        Transitions per stored draw. They run in one compiled call where the model compiles.
    pseudo_marginal : bool
        The black-box terms of the likelihood are unbiased estimates: keep the accepted one.
    warm_start : result of `pm.sample` or array (n, d), optional
        Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
        start.
    model, rng, initial_point, compile_kwargs, blocked
        As for every PyMC step; see `KameleonStep`.

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument or a discrete variable, naming it.

    Notes
    -----
    Sampler statistics, float64, per draw: `accept`, `accepted`, `scaling` (:math:`\lambda`),
    `n_evals`, `n_nonfinite`, as for `KameleonStep`. The proposal is symmetric and, after tuning,
    fixed, so the target is exactly invariant.

    References
    ----------
    .. [1] H. Haario, E. Saksman and J. Tamminen, "An adaptive Metropolis algorithm", Bernoulli 7,
       2001. doi:10.2307/3318737
    .. [2] C. Andrieu and J. Thoms, "A tutorial on adaptive MCMC", Statistics and Computing 18,
       2008, algorithm 4. doi:10.1007/s11222-008-9110-y

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=AdaptiveMetropolisStep(steps_per_draw=20))
    """

    name = "adaptive_metropolis"
    default_tune_steps = 2000
    _state_class = AdaptiveMetropolisState

    def __init__(
        self,
        vars=None,
        *,
        scaling: float | None = None,
        learn_scaling: bool = True,
        covariance="learned",
        initial_covariance=None,
        target_accept: float | None = None,
        adapt_after_tune: bool = False,
        steps_per_draw: int = 1,
        pseudo_marginal: bool = False,
        warm_start=None,
        model=None,
        rng=None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
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
            steps_per_draw=steps_per_draw,
            target_accept=target_accept,
            adapt_after_tune=adapt_after_tune,
            pseudo_marginal=pseudo_marginal,
            warm_start=warm_start,
            configuration={
                "scaling": scaling,
                "learn_scaling": self.learn_scaling,
                "covariance": covariance if isinstance(covariance, str) else _digest(covariance),
                "initial_covariance": _digest(initial_covariance),
            },
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        self.initial_scaling = scaling or self.warm_scaling or 2.38**2 / self.dim
        self._start_factor = None
        if not isinstance(covariance, str):
            self._start_factor = self._cholesky("covariance", covariance)
        elif covariance == "identity":
            self._start_factor = np.eye(self.dim)
        elif initial_covariance is not None:
            self._start_factor = self._cholesky("initial_covariance", initial_covariance)

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

    def _make_transitions(self, n):
        self._run(
            adaptive_metropolis.run_compiled,
            adaptive_metropolis.run_plain,
            None,
            self.chain,
            self.moments,
            self.components,
            Settings(
                by_component=self.initial_transitions > 0,
                target_accept=self.target_accept,
                learn_covariance=self.learns_covariance,
                learn_scaling=self.learn_scaling,
                adapt=self.adapts,
            ),
            self.rng.standard_normal((n, self.dim)),
            self.rng.random((n, N_UNIFORMS)),
        )

    # what was learnt ------------------------------------------------------------------------------

    def proposal_covariance(self, x) -> np.ndarray:
        r"""Covariance :math:`\lambda \Sigma` of a move, the same at every place.

        Parameters
        ----------
        x : array, shape (..., d)
            Raveled, unconstrained positions, in the order of the model's variables.

        Returns
        -------
        array, shape (..., d, d)

        Raises
        ------
        RuntimeError
            If the step has learnt nothing.
        """
        x = self._checked_places(x)
        if self.chain is None and self.warm is not None and self.moments is None:
            self._begin(self.warm[-1])
        if self.moments is None or self.initial_transitions:
            raise RuntimeError(self._nothing_learnt())
        factor = self.moments.factor
        covariance = math.exp(self.moments.log_scaling[0]) * factor @ factor.T
        return np.broadcast_to(covariance, (*x.shape, self.dim)).copy()

    def _scaling_statistics(self):
        return {"scaling": math.exp(self.moments.log_scaling[0])}


def _digest(array) -> str | None:
    """Return a short text that tells arrays apart, to compare configurations."""
    if array is None:
        return None
    return hashlib.sha256(np.asarray(array, dtype=float).tobytes()).hexdigest()[:16]
