"""Preconditioned MALA as a PyMC step method (Roberts & Stramer 2002), and GP-MALA."""

import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.mcmc.proposals.langevin import Langevin
from pymc_kameleon.steps.chain.life_cycle import draw_statistics, without_scaling
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import renamed

COORDINATE_SHARE = 0.1
"""Share of one-coordinate moves while tuning, after the initial phase of nothing else: far out,
where gradients are huge, moves along them are all rejected."""


@with_shared_parameters
class MALAStep(MetropolisHastingsStep):
    r"""Metropolis-adjusted Langevin with a learnt preconditioner and step size.

    Proposes from :math:`N(x + \tfrac{\delta}{2} \Lambda \nabla \log p(x),\ \delta \Lambda)`. For
    models with gradients where a NUTS trajectory costs too much; with `surrogate` it is GP-MALA,
    for likelihoods whose value and gradient cost milliseconds or more. Elsewhere NUTS is better.

    ::

        propose x* along the preconditioned gradient; with a surrogate, it screens x* first
        evaluate log density and gradient at x*
        accept with probability min(1, p(x*) q(x | x*) / p(x) q(x* | x))
        while tuning: learn Lambda and delta; add points to the surrogate

    Parameters
    ----------
    %(vars)s
    step_size : float, optional
        :math:`\delta`; default that of the warm start, or :math:`1.65^2 d^{-1/3}`.
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
    %(adapt_after_tune)s
    %(steps_per_draw)s
    %(disperse)s
    %(start)s
    surrogate : GPSurrogate, optional
        Delayed acceptance: a Gaussian process of the log-likelihood and its gradient screens
        proposals, and a second stage keeps the posterior exact.
    %(store)s
    %(warm_start)s
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument or a discrete variable, naming it.
    NotImplementedError
        At construction, if the model has no gradient, naming the operation.

    Notes
    -----
    Sampler statistics, float64, per draw: `accept`, `accepted`, `step_size` (:math:`\delta`),
    `n_evals` (value and gradient together are one), `n_nonfinite`, as for `KameleonStep`.
    Preconditioner and step size are fixed after tuning, so the target is exactly
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
    takes_gradients = True
    _not_arguments = ("learner", "pseudo_marginal")
    stats_dtypes_shapes = without_scaling(MetropolisHastingsStep) | draw_statistics("step_size")
    warm_statistic = "step_size"

    @renamed(scaling="step_size")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        step_size: float | None = None,
        learn_scaling: bool = True,
        covariance: str = "learned",
        initial_covariance: ArrayLike | None = None,
        target_accept: float = 0.574,
        **options: Any,
    ) -> None:
        super().__init__(
            vars,
            learner=MomentsLearner(
                scaling=step_size,
                called="step_size",
                learn_scaling=learn_scaling,
                covariance=covariance,
                initial_covariance=initial_covariance,
                default_scaling=_default_step_size,
                proposal_class=Langevin,
                coordinate_share=COORDINATE_SHARE,
            ),
            target_accept=target_accept,
            pseudo_marginal=None,
            **options,
        )
        _ = self.target.with_gradients  # raises an error where there is none

    def _learnt_statistics(self, n_evals):
        return {"step_size": math.exp(self.learner.scaling.log[0])}


def _default_step_size(dim: int) -> float:
    return 1.65**2 * dim ** (-1 / 3)
