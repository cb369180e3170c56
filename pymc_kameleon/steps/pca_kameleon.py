"""PCA-Kameleon as a PyMC step method (Sejdinovic et al. 2014, appendix C)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from pymc.step_methods.state import dataclass_state
from scipy import linalg

from pymc_kameleon.kernels import Gaussian, Kernel, as_kernel
from pymc_kameleon.steps.kernel_adaptive import KernelAdaptiveState, KernelAdaptiveStep
from pymc_kameleon.surrogate import GPSurrogate
from pymc_kameleon.transitions import pca_kameleon
from pymc_kameleon.transitions.pca_kameleon import (
    Directions,
    Eigenfunctions,
    GradientsHere,
    direction,
)
from pymc_kameleon.validation import checked_integer, checked_share

__all__ = ["PCAKameleonState", "PCAKameleonStep"]

MOST_COMPONENTS = 100
"""Largest number of eigenfunctions, where `n_components` is a share."""

SMALLEST_EIGENVALUE = 1e-10
"""Eigenvalues below this share of the largest are numerically zero."""


@dataclass_state
class PCAKameleonState(KernelAdaptiveState):
    """State of a `PCAKameleonStep`."""

    here: GradientsHere | None
    eigenfunctions: Eigenfunctions | None


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
    vars : list of variables, optional
        Continuous free variables of the model; default all of them.
    kernel, bandwidth
        As for `KameleonStep`.
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
    target_accept : float, optional
        Acceptance that each :math:`\nu_j` is learnt for; default 0.44 for d = 1, else 0.234.
    adapt_after_tune, standardize, global_share, steps_per_draw, disperse, pseudo_marginal,
    surrogate
        As for `KameleonStep`.
    warm_start : result of `pm.sample` or array (n, d), optional
        Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
        start. The scalings are learnt anew.
    learning_rate, learning_decay : float
        Factor of the steps of the recursions for :math:`\log\nu_j`, and the power of the number of
        moves along eigenfunction j by which they fall.
    model, rng, initial_point, compile_kwargs, blocked
        As for every PyMC step; see `KameleonStep`.

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
    stats_dtypes_shapes = KernelAdaptiveStep.stats_dtypes_shapes | {
        "component": (np.float64, []),
        "component_scaling": (np.float64, []),
        "rank": (np.float64, []),
    }
    _state_class = PCAKameleonState
    transitions = pca_kameleon
    extra_normals = 1
    growth = 1.3

    def __init__(
        self,
        vars=None,
        *,
        kernel: Kernel | str | tuple[Callable, Callable] | None = None,
        bandwidth: float | str = "median",
        n_subsample: int = 200,
        n_components: int | float = 0.9,
        gamma: float | None = None,
        scaling: float | None = None,
        learn_scaling: bool = True,
        target_accept: float | None = None,
        adapt_after_tune: bool = False,
        standardize: bool = True,
        global_share: float = 0.8,
        steps_per_draw: int | None = None,
        disperse: bool = True,
        pseudo_marginal: bool = False,
        surrogate: GPSurrogate | None = None,
        warm_start=None,
        learning_rate: float = 1.0,
        learning_decay: float = 0.5,
        model=None,
        rng=None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        n_subsample = checked_integer("n_subsample", n_subsample, 2)
        self.n_components = _checked_components(n_components, n_subsample)
        if gamma == 0:
            raise ValueError(
                "gamma=0: moves along one direction alone cannot be reversed where it bends; take "
                "a number above 0."
            )
        self._capacity = (
            self.n_components
            if isinstance(self.n_components, int)
            else min(MOST_COMPONENTS, n_subsample)
        )
        super().__init__(
            vars,
            kernel=Gaussian() if kernel is None else as_kernel(kernel),
            bandwidth=bandwidth,
            n_subsample=n_subsample,
            gamma=gamma,
            default_gamma=1.4,
            scaling=scaling,
            learn_scaling=learn_scaling,
            target_accept=target_accept,
            adapt_after_tune=adapt_after_tune,
            standardize=standardize,
            global_share=global_share,
            steps_per_draw=steps_per_draw,
            disperse=disperse,
            pseudo_marginal=pseudo_marginal,
            surrogate=surrogate,
            warm_start=warm_start,
            learning_rate=learning_rate,
            learning_decay=learning_decay,
            configuration={"n_components": self.n_components},
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        self.warm_scaling = None

    # life cycle -----------------------------------------------------------------------------------

    def _n_scalings(self):
        return self._capacity

    def _forget(self):
        super()._forget()
        self.eigenfunctions = None

    def _begin_local(self):
        self.here = GradientsHere(np.zeros(1, dtype=np.bool_), np.zeros((self.dim, 0)))
        self.eigenfunctions = self._no_components(0)

    def _local(self):
        return (self.eigenfunctions,)

    def _new_workspace(self):
        return Directions(
            proposed_gradients=np.zeros(self.learnt.points.shape),
            direction=np.zeros(self.dim),
            proposed_direction=np.zeros(self.dim),
            standardized=np.zeros(self.dim),
            displacement=np.zeros(self.dim),
        )

    # adaptation -----------------------------------------------------------------------------------

    def _update(self, history):
        """Draw a new subsample, and learn coordinates, bandwidth and eigenfunctions from it."""
        self._learn_coordinates(history)
        self.here = GradientsHere(np.zeros(1, dtype=np.bool_), np.zeros(self.learnt.points.shape))
        self.eigenfunctions = self._principal_components()
        self._keep_size()
        self._rescale()

    def _principal_components(self):
        """Eigenvectors of HKH and their weights, the largest eigenvalue first."""
        points, bandwidth = self.learnt.points.T, self.learnt.parameters[-1]
        matrix = self.kernel(points, points, bandwidth)
        means = matrix.mean(axis=0)
        matrix = matrix - means - means[:, None] + means.mean()
        n = len(matrix)
        found = self._no_components(n)
        if np.trace(matrix) <= 0:
            return found
        count = min(self._capacity, n)
        eigenvalues, vectors = linalg.eigh(matrix, subset_by_index=[n - count, n - 1])
        eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
        rank = max(1, int(np.sum(eigenvalues > SMALLEST_EIGENVALUE * eigenvalues[0])))
        if isinstance(self.n_components, float):
            shares = np.cumsum(eigenvalues[:rank]) / np.trace(matrix)
            rank = min(rank, 1 + int(np.searchsorted(shares, self.n_components)))
        found.vectors[:rank] = vectors[:, :rank].T
        found.weights[:rank] = eigenvalues[:rank] / eigenvalues[:rank].sum()
        found.thresholds[: rank - 1] = np.cumsum(found.weights[: rank - 1])
        return found

    def _no_components(self, n):
        return Eigenfunctions(
            vectors=np.zeros((self._capacity, n)),
            weights=np.zeros(self._capacity),
            thresholds=np.full(self._capacity, np.inf),
            used=np.full(2, np.nan),
        )

    def _size(self):
        return super()._size() + self.eigenfunctions.vectors.size + self.here.gradients.size

    def _largest_size(self):
        return super()._largest_size() + (self._capacity + self.dim) * self.n_subsample

    # what was learnt ------------------------------------------------------------------------------

    def _directions(self, standardized):
        """Directions c_j at a place, shape (capacity, d)."""
        learnt, found = self.learnt, np.zeros((self._capacity, self.dim))
        gradients = np.empty(learnt.points.shape)
        self.kernel.gradients(standardized, learnt.points, learnt.parameters, gradients)
        for j in range(self._capacity):
            direction(gradients, self.eigenfunctions.vectors[j], found[j])
        return found

    def _move_sizes(self, points):
        found = [self._directions(np.ascontiguousarray(u)) for u in points.T]
        return np.sum(np.mean(np.square(found), axis=0), axis=1) / self.dim

    def _scatter_at(self, standardized):
        """Covariance of the mixture over the eigenfunctions, all scalings being 1."""
        c = self._directions(standardized)
        return (self.eigenfunctions.weights * c.T) @ c

    def _local_covariance(self, standardized):
        c = self._directions(standardized)
        variances = self.eigenfunctions.weights * np.exp(2 * self.scaling.log)
        return self.gamma**2 * np.eye(self.dim) + (variances * c.T) @ c

    def _scaling_statistics(self):
        found = self.eigenfunctions
        component, component_scaling = found.used.tolist()
        found.used[:] = np.nan
        return super()._scaling_statistics() | {
            "scaling": math.exp(found.weights @ self.scaling.log),
            "component": component,
            "component_scaling": component_scaling,
            "rank": float(np.count_nonzero(found.weights)),
        }


def _checked_components(n_components, n_subsample):
    if isinstance(n_components, float):
        if checked_share("n_components", n_components) == 0:
            raise ValueError(
                "n_components=0.0: take a share in (0, 1] of the spectrum, or a whole number."
            )
        return n_components
    n_components = checked_integer("n_components", n_components, 1)
    if n_components > n_subsample:
        raise ValueError(
            f"n_components={n_components} with n_subsample={n_subsample}: there are no more "
            f"eigenfunctions than points; take at most {n_subsample} components."
        )
    return n_components
