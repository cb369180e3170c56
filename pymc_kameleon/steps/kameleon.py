"""Kernel Adaptive Metropolis-Hastings as a PyMC step method (Sejdinovic et al. 2014)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from pymc.step_methods.compound import Competence
from pymc.step_methods.state import dataclass_state

from pymc_kameleon.adaptation import History, new_history, standardization, thinned
from pymc_kameleon.kernels import Gaussian, Kernel, as_kernel, median_bandwidth
from pymc_kameleon.proposals import centred_scatter
from pymc_kameleon.steps.base import GradientFreeState, GradientFreeStep
from pymc_kameleon.transitions import kameleon
from pymc_kameleon.transitions.kameleon import (
    N_UNIFORMS,
    Here,
    Learnt,
    Scaling,
    Settings,
    Workspace,
)
from pymc_kameleon.validation import checked_integer, checked_number, checked_share

__all__ = ["KameleonState", "KameleonStep"]

GROWTH = 1.1
"""Factor between the transitions at which a new subsample is drawn, by default."""

COMPONENT_SHARE = 0.2
"""Share of one-coordinate moves while tuning, after the initial phase of nothing else.

They learn the scale of each coordinate from nothing; without them a chain on a correlated 20-d
Gaussian that starts in the tail needs four times as many evaluations to arrive.
"""

JUMP_SHARE = 0.1
"""Share of the difference moves that add the whole difference, which crosses between modes."""

NOISE = 0.01
"""Standard deviation of the noise of difference moves, in standardised coordinates."""

LARGEST_LOG_SCALING = 15.0
"""Bound of log nu in raw coordinates; in standardised ones it follows the size of the moves."""

BANDWIDTH_POINTS = 200
SCATTER_POINTS = 20


@dataclass_state
class KameleonState(GradientFreeState):
    """State of a `KameleonStep`."""

    history: History | None
    learnt: Learnt | None
    scaling: Scaling | None
    here: Here | None
    typical_scatter: float
    next_update: int
    spare: np.ndarray


class KameleonStep(GradientFreeStep):
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
    vars : list of variables, optional
        Continuous free variables of the model; default all of them.
    kernel : Kernel, str or (value, gradient)
        `Gaussian()` (default), `Matern(smoothness)`, `Linear()`, `Polynomial(degree)` of
        `pymc_kameleon.kernels`, one of their names in lower case, or your own as `CustomKernel`.
    bandwidth : float or "median"
        Length scale of the kernel, in standardised coordinates if `standardize`. "median" (default)
        is the median distance within the subsample divided by :math:`\sqrt 2`.
    n_subsample : int
        Largest number of history points in the subsample, at least 2. The cost of a kernel move is
        linear in it.
    gamma : float, optional
        Standard deviation of the isotropic part of kernel moves, at least 0. Default
        :math:`1.4 / \sqrt d` in standardised coordinates, 0.2 in raw ones. The first makes larger
        moves than the acceptance target asks for where the posterior bends sharply, which paid on
        all of `targets`; :math:`\nu` then shrinks to its lower bound. A smaller value leaves more
        to the kernel.
    scaling : float, optional
        Start of :math:`\nu`. By default that of the warm start, or chosen from the first subsample.
    learn_scaling : bool
        Learn :math:`\nu` while tuning, from kernel moves.
    target_accept : float, optional
        Acceptance that :math:`\nu` is learnt for; default 0.44 for d = 1, else 0.234.
    adaptation : callable, optional
        Probability, as a function of the number of transitions so far, that a new subsample is
        drawn before the next one. By default one is drawn at transition counts that grow by 10 %.
    adapt_after_tune : bool
        Go on adapting after tuning, ever more rarely. False freezes the step, which makes it
        exactly invariant.
    standardize : bool
        Work in coordinates whitened by the covariance of the history, which makes all defaults free
        of scale, and learn each coordinate's scale at the start.
    global_share : float, optional
        Share of difference moves in [0, 1]; default 0.8.
    steps_per_draw : int
        Transitions per stored draw. They run in one compiled call where the model compiles.
    pseudo_marginal : bool
        The black-box terms of the likelihood are unbiased estimates: keep the accepted one.
    warm_start : result of `pm.sample` or array (n, d), optional
        Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
        start.
    learning_rate : float
        Factor of the steps of the recursion for :math:`\log\nu`; 0.5 is the recursion for
        :math:`\log\nu^2` of the published runs.
    model, rng, initial_point, compile_kwargs, blocked
        As for every PyMC step. `compile_kwargs` is for `model.compile_fn`; by default the model is
        compiled with Numba, or with PyTensor's default linker if it holds a black-box operation.

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
    n_evals         log-density evaluations
    n_nonfinite     those that were NaN or +inf (and rejected)
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
    ...     idata = pm.sample(step=KameleonStep(steps_per_draw=20))
    """

    name = "kameleon"
    default_tune_steps = 2000
    stats_dtypes_shapes = GradientFreeStep.stats_dtypes_shapes | {"bandwidth": (np.float64, [])}
    _state_class = KameleonState

    def __init__(
        self,
        vars=None,
        *,
        kernel: Kernel | str | tuple[Callable, Callable] | None = None,
        bandwidth: float | str = "median",
        n_subsample: int = 1000,
        gamma: float | None = None,
        scaling: float | None = None,
        learn_scaling: bool = True,
        target_accept: float | None = None,
        adaptation: Callable[[int], float] | None = None,
        adapt_after_tune: bool = False,
        standardize: bool = True,
        global_share: float | None = None,
        steps_per_draw: int = 1,
        pseudo_marginal: bool = False,
        warm_start=None,
        learning_rate: float = 1.0,
        model=None,
        rng=None,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ):
        self.kernel = Gaussian() if kernel is None else as_kernel(kernel)
        if isinstance(bandwidth, str):
            if bandwidth != "median":
                raise ValueError(f'bandwidth={bandwidth!r}: take a number above 0, or "median".')
            self.bandwidth = bandwidth
        else:
            self.bandwidth = checked_number("bandwidth", bandwidth, above=0)
        self.n_subsample = checked_integer("n_subsample", n_subsample, 2)
        if gamma is not None:
            gamma = checked_number("gamma", gamma, at_least=0)
        self.initial_scaling = (
            None if scaling is None else checked_number("scaling", scaling, above=0)
        )
        if not (adaptation is None or callable(adaptation)):
            raise TypeError(
                f"adaptation={adaptation!r}: pass a function of the number of transitions that "
                "returns a probability, or None for the default schedule."
            )
        self.adaptation = adaptation
        self.standardize = bool(standardize)
        self.learn_scaling = bool(learn_scaling)
        self.global_share = (
            0.8 if global_share is None else checked_share("global_share", global_share)
        )
        self.learning_rate = checked_number("learning_rate", learning_rate, above=0)
        super().__init__(
            vars,
            steps_per_draw=steps_per_draw,
            target_accept=target_accept,
            adapt_after_tune=adapt_after_tune,
            pseudo_marginal=pseudo_marginal,
            warm_start=warm_start,
            configuration={
                "kernel": repr(self.kernel),
                "bandwidth": self.bandwidth,
                "n_subsample": self.n_subsample,
                "gamma": gamma,
                "scaling": scaling,
                "learn_scaling": self.learn_scaling,
                "standardize": self.standardize,
                "global_share": self.global_share,
                "adaptation": getattr(adaptation, "__qualname__", adaptation),
                "learning_rate": self.learning_rate,
            },
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        if gamma is None:
            gamma = 1.4 / math.sqrt(self.dim) if self.standardize else 0.2
        self.gamma = gamma

    @classmethod
    def paper(cls, vars=None, *, bandwidth="median", gamma=0.2, **kwargs):
        r"""Return a step with the settings of the published experiments.

        Raw coordinates, no difference moves, :math:`\nu^2` from 0.1 by the recursion on
        :math:`\log\nu^2`, 500 initial steps of a random walk N(x, gamma² I), then a new subsample
        before every transition of tuning. The history here is the later half of the chain, evenly
        thinned.

        Parameters
        ----------
        vars, bandwidth, gamma, **kwargs
            As for `KameleonStep`.
        """
        settings = {
            "scaling": math.sqrt(0.1),
            "learning_rate": 0.5,
            "standardize": False,
            "global_share": 0.0,
            "adaptation": _after_five_hundred,
        }
        return cls(vars, bandwidth=bandwidth, gamma=gamma, **(settings | kwargs))

    # life cycle -----------------------------------------------------------------------------------

    def _history_capacity(self):
        return 4 * self.n_subsample

    def _forget(self):
        self.history = self.learnt = self.scaling = self.here = self._workspace = None
        self.typical_scatter = 0.0
        self.next_update = 0
        self.spare = np.zeros((self.dim, self.n_subsample))

    def _begin(self, position):
        self.history = new_history(self._history_capacity(), self.dim)
        start = self.initial_scaling or self.warm_scaling or 1.0
        self.scaling = Scaling(np.array([math.log(start)]), np.zeros(1))
        self.here = Here(np.zeros(1, dtype=np.bool_), np.zeros((self.dim, self.dim)))
        self.learnt = Learnt(
            points=np.zeros((self.dim, 0)),
            location=np.zeros(self.dim),
            factor=np.eye(self.dim),
            parameters=self.kernel.parameters(self._bandwidth_of(np.zeros((self.dim, 0)))),
            smallest_log_scaling=-LARGEST_LOG_SCALING,
            largest_log_scaling=LARGEST_LOG_SCALING,
        )
        self.next_update = max(100, 25 * self.dim)
        if self.warm is not None:
            points = self.warm[self.rng.permutation(len(self.warm))]
            self.history.points[: len(points)] = points
            self.history.cursor[:] = (len(points), 1, len(points))
            self.components.log_scale[:] = np.log(points.std(axis=0) + 1e-300)
            self._update(points)

    def _end_tuning(self):
        if self.learnt.points.shape[1] == 0 and self.adaptation is None and self.standardize:
            later = self.history.later_half()
            if len(np.unique(later, axis=0)) > 2 * self.dim:
                self._update(later)

    def __getstate__(self):
        """Leave scratch memory out of what is sent to other processes."""
        return self.__dict__ | {"_workspace": None}

    def _moved(self):
        self.here.is_current[0] = False

    # transitions ----------------------------------------------------------------------------------

    def _advance(self, n):
        settings = self._current_settings()
        done = 0
        while done < n:
            count = self._transitions_before_update(self.transition + done, n - done)
            if count:
                self._make_transitions(count, settings)
                done += count
            if done < n:
                history = self.history.later_half()
                if len(history) and np.any(history != history[0]):
                    self._update(history)
                settings = self._current_settings()
                self._make_transitions(1, settings)
                done += 1

    def _make_transitions(self, n, settings):
        if self._workspace is None:
            self._workspace = _new_workspace(*self.learnt.points.shape)
        self._run(
            kameleon.run_compiled,
            kameleon.run_plain,
            self.kernel,
            self.chain,
            self.here,
            self.learnt,
            self.scaling,
            self.components,
            self.history,
            self._workspace,
            settings,
            self.rng.standard_normal((n, self.dim)),
            self.rng.random((n, N_UNIFORMS)),
        )

    def _current_settings(self):
        has_points = self.learnt.points.shape[1] > 0
        component_share = 0.0
        if self.standardize:
            component_share = (COMPONENT_SHARE if self.tune else 0.0) if has_points else 1.0
        return Settings(
            gamma=self.gamma,
            component_share=component_share,
            global_share=(1.0 - component_share) * self.global_share,
            difference_scale=2.38 / math.sqrt(2 * self.dim),
            jump_share=JUMP_SHARE,
            noise=NOISE,
            target_accept=self.target_accept,
            step_factor=self.learning_rate,
            learn=self.learn_scaling,
            adapt=self.adapts,
        )

    def _transitions_before_update(self, transition, n):
        """Transitions, at most `n`, before the next subsample is drawn."""
        if not self.adapts:
            return n
        if self.adaptation is None:
            while self.next_update < transition:
                self.next_update = math.ceil(GROWTH * self.next_update)
            if self.next_update == transition:
                self.next_update = math.ceil(GROWTH * self.next_update)
                return 0
            return min(n, self.next_update - transition)
        uniforms = self.rng.random(n)
        for i in range(n):
            if uniforms[i] < self.adaptation(transition + i):
                return i
        return n

    # adaptation -----------------------------------------------------------------------------------

    def _update(self, history):
        """Draw a new subsample, and learn coordinates and bandwidth from it."""
        points = thinned(history, self.n_subsample, self.rng)
        location, factor = np.zeros(self.dim), np.eye(self.dim)
        if self.standardize:
            learnt = standardization(history, np.exp(self.components.log_scale))
            location, factor = learnt
            points = learnt.whiten(points)
        else:
            points = np.ascontiguousarray(points.T)
        bandwidth = self._bandwidth_of(points)
        self.learnt = Learnt(
            points=points,
            location=location,
            factor=factor,
            parameters=self.kernel.parameters(bandwidth),
            smallest_log_scaling=-LARGEST_LOG_SCALING,
            largest_log_scaling=LARGEST_LOG_SCALING,
        )
        self._workspace = _new_workspace(*points.shape)
        # With the columns that are still free, the size of the state does not depend on the draws.
        self.spare = np.zeros((self.dim, self.n_subsample - points.shape[1]))
        self.here.is_current[0] = False
        if self.standardize:
            self._rescale()

    def _bandwidth_of(self, points):
        if not self.kernel.has_bandwidth:
            return math.nan
        if self.bandwidth != "median":
            return self.bandwidth
        return median_bandwidth(thinned(points.T, BANDWIDTH_POINTS, self.rng).T)

    def _rescale(self):
        """Keep the size of kernel moves across an update, and bound it.

        The size is nu^2 times the mean diagonal of M H M^T over some points of the subsample.
        """
        points, scatter = self.learnt.points, np.zeros((self.dim, self.dim))
        chosen = self.rng.integers(points.shape[1], size=SCATTER_POINTS)
        total = 0.0
        for i in chosen:
            self.kernel.gradients(
                np.ascontiguousarray(points[:, i]),
                points,
                self.learnt.parameters,
                self._workspace.gradients,
            )
            centred_scatter(self._workspace.gradients, scatter)
            total += np.trace(scatter) / (self.dim * SCATTER_POINTS)
        typical = max(total, 1e-300)
        unit = -0.5 * math.log(typical) + math.log(2.38 / math.sqrt(self.dim))
        if self.typical_scatter > 0:
            self.scaling.log[0] += 0.5 * math.log(self.typical_scatter / typical)
        elif self.initial_scaling is None and self.warm_scaling is None:
            self.scaling.log[0] = unit + math.log(0.5)
        self.typical_scatter = typical
        smallest, largest = unit + math.log(0.05), unit + math.log(100.0)
        if self.initial_scaling is None:
            self.scaling.log[0] = min(max(self.scaling.log[0], smallest), largest)
        self.learnt = self.learnt._replace(
            smallest_log_scaling=smallest, largest_log_scaling=largest
        )

    @staticmethod
    def competence(var, has_grad):
        """Ideal where there is no gradient, once `register` has put the step on PyMC's list."""
        competence = GradientFreeStep.competence(var, has_grad)
        usable = competence == Competence.COMPATIBLE and not has_grad
        return Competence.IDEAL if usable else competence

    def _scaling_statistics(self):
        return {
            "scaling": math.exp(self.scaling.log[0]),
            "bandwidth": self._learnt_bandwidth(),
        }

    def _learnt_bandwidth(self):
        unknown = self.bandwidth == "median" and self.learnt.points.shape[1] == 0
        if unknown or not self.kernel.has_bandwidth:
            return math.nan
        return float(self.learnt.parameters[-1])


def _new_workspace(dim, n):
    return Workspace(
        proposed_scatter=np.zeros((dim, dim)),
        factor=np.zeros((dim, dim)),
        proposed_factor=np.zeros((dim, dim)),
        gradients=np.zeros((dim, n)),
        standardized=np.zeros(dim),
        displacement=np.zeros(dim),
        step=np.zeros(dim),
    )


def _after_five_hundred(transition: int) -> float:
    """Schedule of the published runs: a random walk first, then a new subsample every time."""
    return float(transition >= 500)
