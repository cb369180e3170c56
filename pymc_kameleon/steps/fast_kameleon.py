"""Fast Kernel Adaptive Metropolis-Hastings as a PyMC step method (Kotlicki 2015)."""

from collections.abc import Sequence
from typing import Any

from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.feature_covariance import FeatureLearner
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.kernel_adaptive import KernelAdaptiveStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import as_published, only_published

PUBLISHED = ("learning_rate", "learning_decay")
"""Arguments of published settings alone."""


@with_shared_parameters
class FastKameleonStep(KernelAdaptiveStep):
    r"""Kernel Adaptive Metropolis-Hastings on the whole history, by random Fourier features.

    Where `KameleonStep` sums over a subsample of the history, this step keeps a running covariance
    of random features of all of it, so the cost of a move does not depend on how much was learnt.
    Kernels without a gradient work here. For the same posteriors as `KameleonStep`; a few hundred
    features blur the kernel, most of all in many dimensions.

    A kernel move from x draws from :math:`N(x, \gamma^2 I + \eta^2 J^\top C J)` with the Jacobian J
    of the features at x and their covariance C; the acceptance ratio uses the same C and
    :math:`\eta` at both ends. With probability `global_share` the move is instead
    :math:`x + g (z_i - z_j)`, plus small noise, with two points of the history.

    ::

        draw a move: kernel, or difference of two history points
        propose x*; evaluate the log density at x* only
        accept with probability min(1, p(x*) q(x | x*) / p(x) q(x* | x))
        while tuning: learn eta; whenever the chain is twice as long, learn coordinates and
                      bandwidth and draw new frequencies; add every position to C

    Parameters
    ----------
    %(vars)s
    kernel : Kernel or str
        Any kernel of `pymc_kameleon.kernels` with a spectrum: `Gaussian()` (default),
        `Matern(smoothness)`, `Laplacian()`, `InverseMultiquadric(exponent)`, `Sinc()`,
        `SincSquared()`, one of their names, or `CustomKernel(value, frequencies=...)`.
    bandwidth : float or "median"
        Length scale of the kernel, in standardised coordinates if `standardize`. "median" (default)
        is the median distance within the history divided by :math:`\sqrt 2`.
    n_features : int
        Number D of random features, at least 2; even for "pairs".
    embedding : "pairs" or "shifted"
        Sine and cosine of each frequency, or cosines with a random phase; see `random_features`.
    rank_share : float
        C is replaced by its leading eigenvectors with this share of its trace, in (0, 1]. The
        default leaves out less than 1 % of the proposal's covariance and halves the cost; 1 keeps
        all.
    gamma : float, optional
        Standard deviation of the isotropic part of kernel moves, at least 0. Default
        :math:`1.4 / \sqrt d` in standardised coordinates, 0.2 in raw ones.
    scaling : float, optional
        Start of :math:`\eta`. By default that of the warm start, or chosen from the first history.
    learn_scaling : bool
        Learn :math:`\eta` while tuning, from kernel moves.
    %(target_accept)s
    adapt_after_tune : bool
        Go on adding positions to C and learning :math:`\eta` after tuning, with steps that vanish:
        a position has weight 1/t. Coordinates and frequencies stay. False freezes the step, which
        makes it exactly invariant.
    %(standardize)s
    %(global_share)s
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
        At construction, for a bad argument, a kernel without a spectrum or a discrete variable,
        naming it.

    Warns
    -----
    UserWarning
        If `n_features` is odd with "pairs" (one more is taken), or the kernel is so rough that its
        frequencies have no second moment: the proposal is valid, but does not settle as D grows.

    Notes
    -----
    Sampler statistics, float64, per draw:

    =============== ====================================================================
    accept          mean acceptance probability of the draw's transitions
    accepted        share of them that were accepted
    scaling         :math:`\eta`
    bandwidth       length scale of the kernel (NaN: none, or not learnt yet)
    rank            number of eigenvectors of C that the proposal uses
    n_transitions   transitions of the draw
    n_evals         log-density evaluations
    n_nonfinite     those that were NaN or +inf (and rejected)
    =============== ====================================================================

    With :math:`\nu = \eta / (2 \sqrt n)` and `rank_share=1` the proposal is that of KAMH with the
    kernel :math:`\phi(x)^\top \phi(y)` and the whole history as subsample.

    References
    ----------
    .. [1] A. Kotlicki, "Fast Kernel Adaptive Metropolis-Hastings Algorithm", thesis, Oxford,
       2015.
    .. [2] A. Rahimi and B. Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007.

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=FastKameleonStep())
    """

    name = "fast_kameleon"
    learner_class = FeatureLearner
    kernel_needs = "spectrum"
    _not_arguments = (*KernelAdaptiveStep._not_arguments, *PUBLISHED)
    stats_dtypes_shapes = KernelAdaptiveStep.stats_dtypes_shapes | draw_statistics(
        "bandwidth", "rank"
    )

    @only_published(*PUBLISHED, constructor="thesis")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        n_features: int = 100,
        embedding: str = "pairs",
        rank_share: float = 0.95,
        **options: Any,
    ) -> None:
        super().__init__(
            vars,
            own={"n_features": n_features, "embedding": embedding, "rank_share": rank_share},
            **options,
        )

    @classmethod
    def thesis(cls, vars=None, *, bandwidth="median", gamma=0.5, **kwargs):
        r"""Return a step with the settings of the published experiments.

        Raw coordinates, no difference moves, 300 features, the whole of their covariance, learnt
        from the chain for ever; :math:`\log\eta` moves by 1/t times the distance of the acceptance
        from 0.234. Here the acceptance is the probability rather than whether a move was accepted,
        and what was learnt enters the proposal at transition counts that grow by a fifth.

        Parameters
        ----------
        vars, bandwidth, gamma, **kwargs
            As for `FastKameleonStep`, and:

            learning_rate : float
                Factor of the steps of the recursion for :math:`\log\eta`, 1.
            learning_decay : float
                Power of the number of kernel moves so far by which these steps fall, 1.
                `FastKameleonStep` has 0.5.
        """
        settings = {
            "n_features": 300,
            "learning_decay": 1.0,
            "standardize": False,
            "global_share": 0.0,
            "rank_share": 1.0,
            "target_accept": 0.234,
            "adapt_after_tune": True,
        }
        settings = as_published(PUBLISHED, settings | kwargs)
        return cls(vars, bandwidth=bandwidth, gamma=gamma, **settings)
