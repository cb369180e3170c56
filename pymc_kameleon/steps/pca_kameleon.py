"""PCA-Kameleon as a PyMC step method (Sejdinovic et al. 2014, appendix C)."""

from collections.abc import Sequence
from typing import Any

from pytensor.graph.basic import Variable

from pymc_kameleon.adaptation.principal_components import PrincipalComponentLearner
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.kernel_adaptive import KernelAdaptiveStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters


@with_shared_parameters
class PCAKameleonStep(KernelAdaptiveStep):
    r"""PCA-Kameleon: moves along the principal eigenfunctions of the history's kernel matrix.

    Where `KameleonStep` draws from one Gaussian that mixes all directions, this step picks one
    eigenfunction j with probability :math:`\omega_j`, and moves along it with a scaling of its own.
    For curved posteriors with few directions that matter; what it learns can be read direction by
    direction.

    A kernel move from x draws from :math:`N(x, \gamma^2 I + \nu_j^2 c_j c_j^\top)`,
    :math:`c_j = M H a_j`, where the columns of M are :math:`2 \nabla_x k(x, z_i)` at a subsample z
    of the chain's history and :math:`a_j` are the eigenvectors of its centred kernel matrix; the
    acceptance ratio uses the same j at both ends. With probability `global_share` the move is
    instead :math:`x + g (z_i - z_j)`, plus small noise, with two points of the subsample.

    ::

        draw a move: along an eigenfunction j ~ omega, or a difference of two history points
        propose x*; evaluate the log density at x* only
        accept with probability min(1, p(x*) q_j(x | x*) / p(x) q_j(x* | x))
        while tuning: learn nu_j; at growing intervals draw a new subsample and bandwidth,
                      standardise coordinates, and compute the eigenvectors

    Parameters
    ----------
    %(vars)s
    %(kernel)s
    %(bandwidth)s
    n_subsample : int
        Largest number of history points in the subsample, at least 2. The cost of a kernel move is
        linear in it, that of an update of higher order.
    n_components : int or float
        Number of eigenfunctions (at most `n_subsample`), or the share in (0, 1] of the sum of the
        eigenvalues that they have together (at most 100 of them then).
    gamma : float, optional
        Standard deviation of the isotropic part of kernel moves, above 0. Default
        :math:`1.4 / \sqrt d` in standardised coordinates, 0.2 in raw ones.
    scaling : float, optional
        Start of every :math:`\nu_j`. By default chosen from the first subsample.
    learn_scaling : bool
        Learn each :math:`\nu_j` while tuning, from moves along its eigenfunction.
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
    warm_start : result of `pm.sample` or array (n, d), optional
        Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
        start. The scalings are learnt anew.
    learning_rate, learning_decay : float
        Factor of the steps of the recursions for :math:`\log\nu_j`, and the power of the number of
        moves along eigenfunction j by which they fall.
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument, more components than points or a discrete variable,
        naming it.

    Notes
    -----
    Sampler statistics, float64, per draw:

    ================= ==================================================================
    accept            mean acceptance probability of the draw's transitions
    accepted          share of them that were accepted
    scaling           geometric mean of the :math:`\nu_j` with weights :math:`\omega_j`
    component         last eigenfunction moved along in the draw, from 1 (NaN: none)
    component_scaling its :math:`\nu_j`
    rank              number of eigenfunctions
    bandwidth         length scale of the kernel (NaN: none, or not learnt yet)
    n_transitions     transitions of the draw
    n_evals           log-density evaluations
    n_nonfinite       those that were NaN or +inf (and rejected)
    ================= ==================================================================

    j is drawn independently of the state, so the moves along each eigenfunction leave the target
    invariant on their own. A scaling belongs to the rank j of an eigenvalue, not to a direction:
    it is carried over when the eigenvectors change.

    References
    ----------
    .. [1] D. Sejdinovic, H. Strathmann, M. Lomeli Garcia, C. Andrieu and A. Gretton, "Kernel
       Adaptive Metropolis-Hastings", ICML 2014. arXiv:1307.5302, appendix C.

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=PCAKameleonStep())
    """

    name = "pca_kameleon"
    learner_class = PrincipalComponentLearner
    stats_dtypes_shapes = KernelAdaptiveStep.stats_dtypes_shapes | draw_statistics(
        "bandwidth", "component", "component_scaling", "rank"
    )

    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        n_subsample: int = 200,
        n_components: int | float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(
            vars, own={"n_subsample": n_subsample, "n_components": n_components}, **options
        )
