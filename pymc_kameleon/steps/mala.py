"""Preconditioned MALA as a PyMC step method (Roberts & Stramer 2003), and GP-MALA."""

from typing import Any

import numpy as np

from pymc_kameleon.compiled import N_TERMS
from pymc_kameleon.steps import two_stage
from pymc_kameleon.steps.learnt_covariance import LearntCovarianceStep
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.transitions import mala
from pymc_kameleon.transitions.mala import N_UNIFORMS, LangevinWorkspace, Settings

__all__ = ["MALAStep"]

COMPONENT_SHARE = 0.1
"""Share of one-coordinate moves while tuning, after the initial phase of nothing else: far out,
where gradients are huge, moves along them are all refused."""


class MALAStep(LearntCovarianceStep):
    r"""Metropolis-adjusted Langevin with a learnt preconditioner and step size.

    Proposes from :math:`N(x + \tfrac{\delta}{2} \Lambda \nabla \log p(x),\ \delta \Lambda)`. For
    models with gradients where a NUTS trajectory costs too much; with `surrogate` it is GP-MALA,
    for likelihoods whose value and gradient cost milliseconds or more. Elsewhere NUTS is better.

    ::

        propose x* along the preconditioned gradient; with a surrogate, ask it first
        evaluate log density and gradient at x*
        accept with probability min(1, p(x*) q(x | x*) / p(x) q(x* | x))
        while tuning: learn Lambda and delta; teach the surrogate

    Parameters
    ----------
    vars : list of variables, optional
        Continuous free variables of the model; default all of them.
    scaling : float, optional
        Step size :math:`\delta`; default :math:`1.65^2 d^{-1/3}`.
    learn_scaling : bool
        Learn :math:`\delta` while tuning, towards `target_accept`.
    covariance : "learned", "identity" or array, shape (d, d)
        Preconditioner :math:`\Lambda` in the raveled unconstrained space: the posterior covariance,
        learnt while tuning, or fixed.
    initial_covariance : array, shape (d, d), optional
        Start of a learnt preconditioner. By default the chain first learns the scale of each
        coordinate by moves of one coordinate at a time.
    target_accept : float
        Default 0.574.
    adapt_after_tune : bool
        Go on learning after tuning, with vanishing steps.
    steps_per_draw, disperse
        As for `KameleonStep`.
    surrogate : GPSurrogate, optional
        A joint Gaussian process of the log-likelihood and its gradient that is asked first: what it
        finds hopeless is rejected without an evaluation.
    warm_start : result of `pm.sample` or array (n, d), optional
        Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
        start.
    model, rng, initial_point, compile_kwargs, blocked
        As for every PyMC step; see `KameleonStep`.

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument or a discrete variable, naming it.
    NotImplementedError
        At construction, if the model has no gradient, naming the operation.

    Notes
    -----
    Sampler statistics, float64, per draw: `accept`, `accepted`, `scaling` and `step_size` (both
    :math:`\delta`), `n_evals` (value and gradient together are one), `n_nonfinite`, as for
    `KameleonStep`. Preconditioner and step size are fixed after tuning, so the target is exactly
    invariant.

    References
    ----------
    .. [1] G. O. Roberts and O. Stramer, "Langevin Diffusions and Metropolis-Hastings Algorithms",
       Methodology and Computing in Applied Probability 4, 2002. doi:10.1023/A:1023562417138
    .. [2] A. Benavoli, J. Wyse and A. White, "Gaussian Processes to speed up MCMC with automatic
       exploratory-exploitation effect".

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=MALAStep())
    """

    name = "mala"
    stats_dtypes_shapes = LearntCovarianceStep.stats_dtypes_shapes | {"step_size": (np.float64, [])}

    def __init__(
        self,
        vars=None,
        *,
        scaling: float | None = None,
        learn_scaling: bool = True,
        covariance="learned",
        initial_covariance=None,
        target_accept: float = 0.574,
        adapt_after_tune: bool = False,
        steps_per_draw: int | None = None,
        disperse: bool = True,
        surrogate: GPSurrogate | None = None,
        warm_start=None,
        model=None,
        rng=None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        self._workspace = None
        super().__init__(
            vars,
            scaling=scaling,
            learn_scaling=learn_scaling,
            covariance=covariance,
            initial_covariance=initial_covariance,
            steps_per_draw=steps_per_draw,
            disperse=disperse,
            target_accept=target_accept,
            adapt_after_tune=adapt_after_tune,
            pseudo_marginal=None,
            surrogate=surrogate,
            warm_start=warm_start,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        _ = self.target.with_gradients

    def __getstate__(self):
        """Leave scratch memory out of what is sent to other processes."""
        return self.__dict__ | {"_workspace": None}

    def _default_scaling(self):
        return 1.65**2 * self.dim ** (-1 / 3)

    def _density(self):
        return self.target.with_gradients

    def _prior(self):
        return self.target.prior_with_gradient

    def _n_values(self):
        return N_TERMS + 2 * self.dim

    def _check_surrogate(self):
        two_stage.check(self.surrogate, self.target, False, gradients=True)

    def _new_stage(self):
        return two_stage.new_joint_stage(self.surrogate, self.dim)

    def _make_transitions(self, n):
        if self._workspace is None:
            self._workspace = LangevinWorkspace(np.zeros(self.dim), np.zeros(self.dim))
        component_share = COMPONENT_SHARE if self.tune and self._start_factor is None else 0.0
        if self.initial_transitions:
            component_share = 1.0
        self._run(
            mala.run_compiled,
            mala.run_plain,
            None,
            self.chain,
            self.moments,
            self.components,
            self._workspace,
            Settings(
                component_share=component_share,
                target_accept=self.target_accept,
                learn_covariance=self.learns_covariance,
                learn_scaling=self.learn_scaling,
                adapt=self.adapts,
            ),
            self.rng.standard_normal((n, self.dim)),
            self.rng.random((n, N_UNIFORMS)),
        )

    def _scaling_statistics(self):
        statistics = super()._scaling_statistics()
        return statistics | {"step_size": statistics["scaling"]}
