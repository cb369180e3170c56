"""Adaptive Metropolis as a PyMC step method: SM, AM-FS and AM-LS."""

import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.moments import MomentsLearner
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import renamed


@with_shared_parameters
class AdaptiveMetropolisStep(MetropolisHastingsStep):
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
    %(vars)s
    covariance_scaling : float, optional
        :math:`\lambda`, which multiplies the covariance; default that of the warm start, or
        :math:`2.38^2/d`.
    learn_scaling : bool
        Learn :math:`\lambda` while tuning, towards `target_accept`.
    covariance : "learned", "identity" or array, shape (d, d)
        Covariance in the raveled unconstrained space: learnt while tuning, or fixed.
    initial_covariance : array, shape (d, d), optional
        Start of a learnt covariance. By default the chain first learns the scale of each coordinate
        by moves of one coordinate at a time.
    %(target_accept)s
    %(adapt_after_tune)s
    %(steps_per_draw)s
    %(disperse)s
    %(start)s
    %(pseudo_marginal)s
    %(surrogate)s
    %(store)s
    %(warm_start)s
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument or a discrete variable, naming it.

    Notes
    -----
    Sampler statistics, float64, per draw: `accept`, `accepted`, `scaling`
    (:math:`\sqrt\lambda`, which multiplies standard deviations, as in all random walks),
    `covariance_scaling` (:math:`\lambda`), `n_evals`, `n_nonfinite`, as for `KameleonStep`. The
    proposal is symmetric and, after tuning, fixed, so the target is exactly invariant.

    Results of versions up to 0.2.0 have :math:`\lambda` as their `scaling`, and no
    `covariance_scaling`. As `warm_start` they teach the covariance; the scaling is learnt anew.

    References
    ----------
    .. [1] H. Haario, E. Saksman and J. Tamminen, "An adaptive Metropolis algorithm", Bernoulli 7,
       2001. doi:10.2307/3318737
    .. [2] C. Andrieu and J. Thoms, "A tutorial on adaptive MCMC", Statistics and Computing 18,
       2008, algorithm 4. doi:10.1007/s11222-008-9110-y

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=AdaptiveMetropolisStep())
    """

    name = "adaptive_metropolis"
    stats_dtypes_shapes = MetropolisHastingsStep.stats_dtypes_shapes | draw_statistics(
        "covariance_scaling"
    )
    warm_statistic = "covariance_scaling"

    @renamed(scaling="covariance_scaling")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        covariance_scaling: float | None = None,
        learn_scaling: bool = True,
        covariance: str = "learned",
        initial_covariance: ArrayLike | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            vars,
            learner=MomentsLearner(
                scaling=covariance_scaling,
                called="covariance_scaling",
                learn_scaling=learn_scaling,
                covariance=covariance,
                initial_covariance=initial_covariance,
            ),
            **options,
        )

    def _learnt_statistics(self, n_evals):
        statistics = super()._learnt_statistics(n_evals)
        return statistics | {"covariance_scaling": math.exp(self.learner.scaling.log[0])}
