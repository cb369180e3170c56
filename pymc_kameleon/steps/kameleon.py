"""Kernel Adaptive Metropolis-Hastings as a PyMC step method (Sejdinovic et al. 2014)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pymc.step_methods import STEP_METHODS
from pymc.step_methods.compound import Competence
from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.subsample import SubsampleLearner
from pymc_kameleon.mcmc.proposals.local_gaussian import KernelGaussian
from pymc_kameleon.mcmc.saved_state import name_of
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.kernel_adaptive import KernelAdaptiveStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import as_published, only_published


class KernelLearner(SubsampleLearner):
    """Draws a new subsample at every update.

    `schedule` is the probability of an update before each transition, as a function of their
    number, or None; other parameters are those of `KameleonStep`.
    """

    def __init__(self, *, schedule: Callable[[int], float] | None, **choices):
        if not (schedule is None or callable(schedule)):
            raise TypeError(
                f"adaptation={schedule!r}: pass a function of the number of transitions that "
                "returns a probability, or None for the default schedule."
            )
        self.schedule = schedule
        self.follows_schedule = schedule is None
        super().__init__(**choices, adaptation=schedule and name_of(schedule))

    def proposal(self, compiled):  # noqa: D102
        learnt = self.learnt
        return KernelGaussian(
            self.kernel.form(compiled),
            learnt.points,
            learnt.parameters,
            self.here,
            learnt.coordinates,
            self.scaling,
            self.gamma,
            self.history,
        )

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        if self.schedule is None:
            return super().transitions_before_update(transition, n, rng)
        uniforms = rng.random(n)
        for i in range(n):
            if uniforms[i] < self.schedule(transition + i):
                return i
        return n

    def _learn(self, history, rng, tune=True):
        self._learn_coordinates(history, rng)
        self._rescale(rng)


PUBLISHED = ("adaptation", "learning_rate", "learning_decay")
"""Arguments of published settings alone."""


@with_shared_parameters
class KameleonStep(KernelAdaptiveStep):
    r"""Kernel Adaptive Metropolis-Hastings: proposals that follow the local shape of the posterior.

    For models without gradients whose posterior is curved or badly scaled. Where a gradient exists,
    NUTS needs fewer evaluations.

    A kernel move from x draws from :math:`N(x, \gamma^2 I + \nu^2 M H M^\top)`, where the columns
    of M are :math:`2 \nabla_x k(x, z_i)` at a subsample z of the chain's history and H centres; the
    acceptance ratio uses the same subsample and :math:`\nu` at both ends. With probability
    `global_share` the move is instead :math:`x + g (z_i - z_j)`, plus small noise, with two points
    of the subsample.

    ::

        draw a move: kernel, or difference of two history points
        propose x*; evaluate the log density at x* only
        accept with probability min(1, p(x*) q(x | x*) / p(x) q(x* | x))
        while tuning: learn nu; at growing intervals draw a new subsample and bandwidth,
                      and standardise coordinates by the covariance of the history

    Parameters
    ----------
    %(vars)s
    %(kernel)s
    %(bandwidth)s
    n_subsample : int
        Largest number of history points in the subsample, at least 2. The cost of a kernel move is
        linear in it.
    gamma : float, optional
        Standard deviation of the isotropic part of kernel moves, at least 0. Default
        :math:`1.4 / \sqrt d` in standardised coordinates, 0.2 in raw ones. The first makes larger
        moves than the acceptance target needs where the posterior bends sharply, which helped on
        all of `targets`; :math:`\nu` then shrinks to its lower bound. A smaller value leaves more
        to the kernel.
    scaling : float, optional
        Start of :math:`\nu`. By default that of the warm start, or chosen from the first subsample.
    learn_scaling : bool
        Learn :math:`\nu` while tuning, from kernel moves.
    %(target_accept)s
    %(adapt_after_tune)s
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
        At construction, for a bad argument or a discrete variable, naming it.

    Notes
    -----
    Sampler statistics, float64, per draw:

    =============== ====================================================================
    accept          mean acceptance probability of the draw's transitions
    accepted        share of them that were accepted
    scaling         :math:`\nu`
    bandwidth       length scale of the kernel (NaN: none, or not learnt yet)
    n_transitions   transitions of the draw
    n_evals         log-density evaluations
    n_nonfinite     those that were NaN or +inf (and rejected)
    estimate        kept estimate of the log-likelihood (`pseudo_marginal`)
    =============== ====================================================================

    The subsample, scales and coordinates are fixed between updates and, by default, after tuning;
    every move then has the acceptance ratio of its own proposal, so the target is exactly
    invariant.

    References
    ----------
    .. [1] D. Sejdinovic, H. Strathmann, M. Lomeli Garcia, C. Andrieu and A. Gretton, "Kernel
       Adaptive Metropolis-Hastings", ICML 2014. arXiv:1307.5302
    .. [2] C. J. F. ter Braak and J. A. Vrugt, "Differential Evolution Markov Chain with snooker
       updater and fewer chains", Statistics and Computing 18, 2008. doi:10.1007/s11222-008-9104-9

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=KameleonStep())
    """

    name = "kameleon"
    learner_class = KernelLearner
    _not_arguments = (*KernelAdaptiveStep._not_arguments, "learning_rate", "learning_decay")
    stats_dtypes_shapes = KernelAdaptiveStep.stats_dtypes_shapes | draw_statistics("bandwidth")

    @only_published(*PUBLISHED, constructor="paper")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        n_subsample: int = 200,
        adaptation: Callable[[int], float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(vars, own={"n_subsample": n_subsample, "schedule": adaptation}, **options)

    @classmethod
    def paper(cls, vars=None, *, bandwidth="median", gamma=0.2, **kwargs):
        r"""Return a step with the settings of the published experiments.

        Raw coordinates, no difference moves, 1000 points, acceptance 0.234, :math:`\nu^2` from 0.1
        by the recursion on :math:`\log\nu^2`, 500 initial steps of a random walk N(x, gamma² I),
        then a new subsample before every transition of tuning, which takes most of its time. The
        history here is the later half of the chain, evenly thinned.

        Parameters
        ----------
        vars, bandwidth, gamma, **kwargs
            As for `KameleonStep`, and:

            learning_rate : float
                Factor of the steps of the recursion for :math:`\log\nu`, 0.5: that is the
                recursion for :math:`\log\nu^2`. `KameleonStep` has 1.
            learning_decay : float
                Power of the number of kernel moves so far by which these steps fall, 0.5.
            adaptation : callable, optional
                Probability, as a function of the number of transitions so far, that a new subsample
                is drawn before the next one. None, as in `KameleonStep`: one is drawn at transition
                counts that grow by 10 %.
        """
        settings = {
            "n_subsample": 1000,
            "scaling": math.sqrt(0.1),
            "learning_rate": 0.5,
            "standardize": False,
            "global_share": 0.0,
            "target_accept": 0.234,
            "adaptation": _after_five_hundred,
        }
        settings = as_published(PUBLISHED, settings | kwargs)
        return cls(vars, bandwidth=bandwidth, gamma=gamma, **settings)

    @staticmethod
    def competence(var, has_grad):
        """Ideal where there is no gradient, once `register` has put the step on PyMC's list."""
        competence = KernelAdaptiveStep.competence(var, has_grad)
        usable = competence == Competence.COMPATIBLE and not has_grad
        return Competence.IDEAL if usable else competence


def _after_five_hundred(transition: int) -> float:
    """Schedule of the published runs: a random walk first, then a new subsample every time."""
    return float(transition >= 500)


def register() -> None:
    """Make `KameleonStep` the automatic choice for continuous variables without gradients.

    Importing the package never does this. Options pass through `pm.sample(kameleon={...})`.
    """
    if KameleonStep not in STEP_METHODS:
        STEP_METHODS.append(KameleonStep)


def unregister() -> None:
    """Undo `register`."""
    if KameleonStep in STEP_METHODS:
        STEP_METHODS.remove(KameleonStep)
