"""Multilevel delayed acceptance: a subchain on a coarse model proposes (Dodwell et al. 2019)."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pymc.exceptions import SamplingError
from pymc.model import Model
from pymc.stats.convergence import WarningType
from pytensor.graph.basic import Variable
from scipy import linalg

from pymc_kameleon.adaptation.learner import Learner, LearnerState
from pymc_kameleon.gp.sparse_gp import RATIONAL, mean_at, new_sparse_gp
from pymc_kameleon.gp.sparse_gp_fit import fit_sparse_gp
from pymc_kameleon.gp.typical_set import typical_set
from pymc_kameleon.mcmc.chain import EVALUATIONS, N_TERMS, accept_or_reject
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.mcmc.proposals import register_proposal
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.chain.sampler import ChainSampler
from pymc_kameleon.steps.kameleon import KameleonStep
from pymc_kameleon.steps.mala import MALAStep
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.parallel_tempering import ParallelTemperingStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.steps.surrogate_hmc import SurrogateHMCStep
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.validation import checked_integer, checked_number, renamed

N_KEPT, MAX_CENTRES = 2000, 300
"""Evaluations that the difference of two levels is learnt from, the last ones, and its centres."""

GROWTH = 1.1
"""Factor between the numbers of evaluations at which the difference is fitted again: after every
one at first, when the coarse model may be far off."""

REFUSED, WELCOME = 0.25, 0.5
"""Acceptance between two fits below which subchains become half as long, so that they end where the
difference is better known, and above which they become longer again."""

NOISE_SHARE = 1e-3
"""Noise of differences, relative to their distances from the median."""

LONGEST_SHARE = 0.1
"""Length of the longest subchain, as a share of the coarse chain from which the length is
chosen."""

POOR = 0.1
"""Acceptance below which there is a warning that the coarse model is a poor one."""


class Subchain(NamedTuple):
    """A proposal that is the end of a subchain of the level below, which the learner has."""

    learner: "MultilevelLearner"


def _propose(proposal, chain, normals, uniforms):
    return proposal.learner.propose(chain), 0


def _accept(proposal, log_density, stage, chain, log_ratio, normals, uniforms):
    n_evaluations = chain.counts[EVALUATIONS]
    outcome = accept_or_reject(log_density, stage, chain, log_ratio, uniforms)
    if chain.counts[EVALUATIONS] > n_evaluations:
        proposal.learner.compare(chain.proposed_value)
    return outcome


def _learn(proposal, chain, is_evaluated, acceptance, index):
    if is_evaluated:
        proposal.learner.keep(chain.proposal, chain.proposed_value)
        proposal.learner.acceptances.append(acceptance)


register_proposal(Subchain, propose=_propose, accept=_accept, learn=_learn)


class Tilt(NamedTuple):
    """A linear difference of two log densities: `constant` (1,), `slope` (d,).

    Added to a Gaussian log density it moves the mean, and leaves the covariance as it is.
    """

    constant: np.ndarray
    slope: np.ndarray

    def at(self, x):
        """Return its value at `x` (..., d)."""
        return self.constant[0] + x @ self.slope


def fitted_tilt(points: np.ndarray, differences: np.ndarray, depths: np.ndarray) -> Tilt:
    """Regress `differences` (n,) on `points` (n, d), with smaller weights for larger `depths`.

    The slope is shrunk as by one further point in each direction.
    """
    dim = points.shape[1]
    weights = (1.0 / (1.0 + depths / dim)) ** 2
    chosen = weights > 0.0
    points, differences, weights = points[chosen], differences[chosen], weights[chosen]
    weights /= weights.max()
    centre, mean = (np.average(part, axis=0, weights=weights) for part in (points, differences))
    factor = standardization(points, np.ones(dim)).factor
    u = linalg.solve_triangular(factor, (points - centre).T, lower=True)
    slope = linalg.solve(u * weights @ u.T + np.eye(dim), u * weights @ (differences - mean))
    slope = linalg.solve_triangular(factor, slope, lower=True, trans=1)
    return Tilt(np.array([mean - slope @ centre]), slope)


class MultilevelLearner(Learner):
    """Has the step of the level below, and learns how far its log density is off.

    `below` is a step of a coarse model, `cost_ratio` how many of its evaluations one of this level
    costs, and `length` the number of its transitions that make a proposal, None to choose it.
    """

    history_capacity = 2
    points: np.ndarray
    fine: np.ndarray
    coarse: np.ndarray
    """Of both levels, at the points that this one was evaluated at."""

    state_names = (
        "scales",
        "points",
        "fine",
        "coarse",
        "count",
        "tilt",
        "gp",
        "length",
        "best_length",
        "acceptances",
        "next_fit",
        "error",
        "last_position",
        "last_value",
        "is_known",
    )

    def __init__(self, below: MetropolisHastingsStep, cost_ratio: float, length: int | None):
        self.template, self.cost_ratio, self.given_length = below, cost_ratio, length
        self.options = {
            "below": type(below).__name__,
            "of_below": below.configuration,
            "cost_ratio": cost_ratio,
            "length": length,
        }

    def _begin(self, position, rng, warm):
        dim = self.dim
        # What belongs to a chain is in new arrays; target and choices are shared.
        self.below = copy.copy(self.template)
        self.below.set_rng(rng)
        self.below.evaluator.correction = self.correction
        self.inherited: Callable[[np.ndarray], float] | None = None
        self.points = np.zeros((N_KEPT, dim))
        self.fine, self.coarse = np.zeros(N_KEPT), np.zeros(N_KEPT)
        self.count = np.zeros(1, dtype=np.int64)
        self.tilt = Tilt(np.zeros(1), np.zeros(dim))
        self.gp = new_sparse_gp(RATIONAL, dim)
        self.length = self.best_length = self.given_length or 1
        self.acceptances: list[float] = []
        self.next_fit = dim + 2
        self.error = math.nan
        self.last_position, self.last_value = position.copy(), np.zeros(N_TERMS)
        self.is_known = False

    @property
    def lower(self) -> "MultilevelLearner | None":
        """That of the level below, if there are levels below it."""
        learner = self.below.learner
        return learner if isinstance(learner, MultilevelLearner) else None

    # what transitions take ------------------------------------------------------------------------

    def proposal(self, compiled):  # noqa: D102
        return Subchain(self)

    def propose(self, chain) -> float:
        """Write the end of a subchain that begins at the position of `chain` as its proposal.

        The transitions of the level below are reversible with respect to its density c, so that the
        ratio of the subchain's densities is c(x) / c(x*), of which the log is returned: -inf where
        the subchain did not move, as there is nothing to evaluate.
        """
        below = self.below
        if not below.tune:
            below.chain.bounds[:] = chain.bounds
        self._put_below(chain.position)
        begin = below.chain.value[:N_TERMS].sum()
        if begin == -np.inf and not below.tune:
            return -np.inf
        self.is_known = False
        try:
            below.sampler.advance(self.length)
        except Exception:
            chain.proposal[:] = below.chain.proposal  # which the error is to name
            raise
        self.is_known = True
        chain.proposal[:] = below.chain.position
        if np.array_equal(chain.proposal, chain.position):
            return -np.inf
        # While tuning a chain may leave what is impossible below.
        return begin - below.chain.value[:N_TERMS].sum() if begin > -np.inf else 0.0

    def _put_below(self, x):
        """Let the level below be at `x` (d,), evaluating only where its value is not known.

        It is not after an interrupt, for one.
        """
        chain = self.below.chain
        if self.is_known and np.array_equal(x, self.last_position):
            chain.position[:], chain.value[:] = self.last_position, self.last_value
            self.below.sampler.position_changed()
        elif not (self.is_known and np.array_equal(x, chain.position)):
            self.is_known = False  # as long as the evaluation may fail
            chain.position[:] = x
            self.below.sampler.position_changed()
            self.below.sampler.evaluate_current()
            self.is_known = True
        self.last_position[:], self.last_value[:] = chain.position, chain.value

    # learning -------------------------------------------------------------------------------------

    def begin_below(self, x: np.ndarray, tune: bool, rng: np.random.Generator) -> None:
        """Begin the chain of the level below at `x` (d,); tune it, and choose the length."""
        below = self.below
        below.rng, below.tune = rng, tune
        try:
            below.arrive(x)
        except SamplingError as error:
            raise SamplingError(f"A coarse model: {error}") from error
        if tune:
            self._tune_below()

    def _tune_below(self):
        """Tune the chain of the level below on its own, and choose the length of subchains."""
        below = self.below
        self._put_below(below.chain.position)
        positions = np.empty((below.transitions_to_tune(), self.dim))
        for row in positions:
            below.sampler.advance(1)
            row[:] = below.chain.position
        if self.given_length is None:
            lower = self.lower
            cost = 1.0 if lower is None else 1.0 + lower.length / lower.cost_ratio
            positions = positions[len(positions) // 2 :]
            self.best_length = best_length(positions, cost / self.cost_ratio)
            is_refused = bool(self.acceptances) and np.mean(self.acceptances) < REFUSED
            self.length = min(self.best_length, self.length) if is_refused else self.best_length

    def keep(self, point: np.ndarray, terms: np.ndarray) -> None:
        """Learn from the log density of this level where the level below is."""
        corrected = self.below.chain.value[:N_TERMS].sum()
        if not np.isfinite(corrected):
            return
        i = int(self.count[0]) % N_KEPT
        fine = terms[:N_TERMS].sum()
        self.points[i], self.coarse[i] = point, corrected - self.correction(point)
        self.fine[i] = fine - self._inherited(point) if np.isfinite(fine) else -np.inf
        self.count[0] += 1

    def compare(self, terms: np.ndarray) -> None:
        """Note by how much the log density of this level is above that of the level below."""
        self.error = float(terms[:N_TERMS].sum() - self.below.chain.value[:N_TERMS].sum())

    def correction(self, x: np.ndarray) -> float:
        """Return what is added to the log density of the level below at `x` (d,)."""
        return self._difference(x) + self._inherited(x)

    def _difference(self, x):
        if not self.gp.count[0]:
            return 0.0
        return self.tilt.at(x) + mean_at(self.gp.mean_function(), x)

    def _inherited(self, x):
        return 0.0 if self.inherited is None else self.inherited(x)

    is_compilable = False
    """Transitions of subchains are made in Python."""

    def before_transitions(self, n, adapts, rng):  # noqa: D102
        self.below.rng = rng

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        return min(n, max(0, self.next_fit - int(self.count[0])))

    def update(self, position, tune, rng):  # noqa: D102
        self.fit()
        self.next_fit = math.ceil(GROWTH * max(self.next_fit, int(self.count[0])))
        acceptance, self.acceptances = np.mean(self.acceptances or [1.0]), []
        if self.given_length is None and acceptance < REFUSED:
            self.length = max(1, self.length // 2)
        elif acceptance > WELCOME:
            self.length = min(2 * self.length, self.best_length)

    def fit(self) -> None:
        """Fit the difference of the two log densities; the level below then takes it over."""
        kept = slice(0, min(int(self.count[0]), N_KEPT))
        points, fine, coarse = self.points[kept], self.fine[kept], self.coarse[kept]
        if np.sum(np.isfinite(fine)) < self.dim + 2:
            return
        typical = typical_set(fine, self.dim)
        depths = typical.depths(fine)
        coordinates = standardization(points[depths < typical.depth], points.std(axis=0) + 1e-300)
        tilt = fitted_tilt(points, fine - coarse, depths)
        try:
            gp, _ = fit_sparse_gp(
                points,
                fine,
                coordinates,
                MAX_CENTRES,
                self.gp.hyperparameters if self.gp.count[0] else None,
                coarse + tilt.at(points),
                typical=typical,
                constant=0.0,
                noise_share=NOISE_SHARE,
            )
        except linalg.LinAlgError:
            return  # points that are not told apart: ask again later
        self.tilt, self.gp = tilt, gp
        self.forget_values()

    def forget_values(self) -> None:
        """Have levels below evaluated anew: what is added to their log densities has changed."""
        self.is_known = False
        if self.lower is not None:
            self.lower.forget_values()

    def follow_data(self, x: np.ndarray) -> None:
        """Have levels below evaluated anew if their data have changed; raise if they do not fit."""
        target = self.below.target
        if target.inputs_changed():
            target.check_data(x)
            self.is_known = False
        if self.lower is not None:
            self.lower.follow_data(x)

    def end_tuning(self, position, rng):  # noqa: D102
        if self.below.chain is None:
            self.begin_below(position, False, rng)
            return
        self.below.rng = rng
        self.fit()
        self._tune_below()
        self.below.stop_tuning()

    # what was learnt ------------------------------------------------------------------------------

    def taken_evaluations(self) -> int:
        """Count the evaluations of all levels below since the last call."""
        counts = self.below.chain.counts
        taken = int(counts[EVALUATIONS])
        counts[:] = 0
        return taken if self.lower is None else taken + self.lower.taken_evaluations()

    def statistics(self):  # noqa: D102
        return {
            "coarse_evals": float(self.taken_evaluations()),
            "subchain_length": float(self.length),
            "coarse_error": self.error,
        }

    @property
    def sampling_state(self) -> LearnerState:
        """All that is needed to go on, that of the level below too."""
        state = super().sampling_state
        state.values["below"] = self.below.sampling_state
        return state

    @sampling_state.setter
    def sampling_state(self, state: LearnerState) -> None:
        values = dict(state.values)
        below = values.pop("below", None)
        self._set_state(LearnerState(kind=state.kind, values=values))
        self.below.sampling_state = below


def best_length(positions: np.ndarray, cost: float) -> int:
    """Length of subchains that makes most of a fine evaluation, found from a coarse chain (n, d).

    One after which a coordinate has the autocorrelation r brings 1 - r, in the worst coordinate, at
    the price of 1 + `cost` a transition.
    """
    n = len(positions)
    lags = np.unique(np.geomspace(1, max(1, int(LONGEST_SHARE * n)), 40).astype(int))
    variance = np.maximum(positions.var(axis=0), 1e-300)
    moved = np.array([np.mean((positions[k:] - positions[:-k]) ** 2, axis=0) for k in lags])
    gains = np.minimum(moved / (2.0 * variance), 1.0).min(axis=1)
    return int(lags[np.argmax(gains / (1.0 + cost * lags))])


class MultilevelSampler(ChainSampler):
    """Makes transitions whose proposals are subchains of the level below."""

    def new_learner(self, position, warm):  # noqa: D102
        learner = super().new_learner(position, warm)
        learner.inherited = self.evaluator.correction
        return learner


@with_shared_parameters
class MultilevelStep(MetropolisHastingsStep):
    r"""Multilevel delayed acceptance: subchains on coarse models propose to the fine one.

    For likelihoods computed by a solver, where a coarser mesh, a larger step or fewer terms give a
    cheaper model that is nearly right. A proposal is the end of a chain of the coarse model that
    begins at the current point: nearly independent of it, at the price of one evaluation of the
    fine model. How far the coarse log density is off is learnt while tuning, by a Gaussian process,
    and added to it. The result is exact however far off the coarse models are, if their densities
    are positive wherever that of the fine one is.

    ::

        c: log density of the coarse model, plus what was learnt of the difference
        x* = x after `subchain_length` transitions of `step` that leave exp(c) invariant
        evaluate the log density p of the fine model at x*
        accept with probability min(1, exp(p(x*) - p(x) + c(x) - c(x*)))
        three models and more: the transitions that leave exp(c) invariant are made likewise

    Parameters
    ----------
    coarse : list of pymc.Model
        Models with the same free variables as the one that is sampled, the cheapest first. Build
        them outside of its `with` block: within it they would become parts of it. Their densities
        have to be positive wherever its density is.
    step : step class or callable
        What moves the cheapest model: `KameleonStep` (default), `AdaptiveMetropolisStep`, ..., or a
        function that returns such a step and takes `model` and other arguments by name, as
        `functools.partial` makes. `disperse`, `start` and `warm_start` are those of this step.
    cost_ratio : float or sequence of floats
        How many evaluations of a coarse model one evaluation of the next finer model costs, for
        each coarse model. Subchains are longer where it is large.
    subchain_length : int or sequence of ints, optional
        Transitions of each coarse level that make a proposal. By default chosen while tuning, from
        the autocorrelation of the coarse chain and the costs.
    %(vars)s
        All of them: none may be moved by another step.
    steps_per_draw : int
        Transitions a draw, each of one evaluation of the fine model at most.
    store : EvaluationStore, optional
        Keeps every evaluation of the fine model in a file, which is then not made again.
    %(disperse)s
    %(start)s
        On the cheapest model.
    %(warm_start)s
        For the cheapest model.
    %(pymc)s

    Raises
    ------
    ValueError, TypeError
        At construction, for a bad argument, a discrete variable or a coarse model with other
        variables, naming it.

    Notes
    -----
    Sampler statistics, float64, per draw, beside `accept`, `accepted`, `n_nonfinite` and
    `n_transitions` of `KameleonStep`:

    =============== ====================================================================
    n_evals         evaluations of the fine model
    coarse_evals    evaluations of all coarse models
    subchain_length transitions of the next coarser level that make a proposal
    coarse_error    log density at the last evaluated proposal, minus the corrected
                    coarse one (a constant does not matter)
    =============== ====================================================================

    Before the fine model is evaluated, the chain of the cheapest model is tuned on its own. After
    tuning the difference, the lengths and all that `step` has learnt are frozen: each level is then
    reversible with respect to its density, and the fine one is exactly invariant.

    References
    ----------
    .. [1] J. A. Christen and C. Fox, "Markov chain Monte Carlo using an approximation", Journal of
       Computational and Graphical Statistics 14, 2005. doi:10.1198/106186005X76983
    .. [2] T. J. Dodwell, C. Ketelsen, R. Scheichl and A. L. Teckentrup, "Multilevel Markov chain
       Monte Carlo", SIAM Review 61, 2019. doi:10.1137/19M126966X
    .. [3] M. B. Lykkegaard, T. J. Dodwell, C. Fox, G. Mingas and R. Scheichl, "Multilevel delayed
       acceptance MCMC", SIAM/ASA Journal on Uncertainty Quantification 11, 2023.
       doi:10.1137/22M1476770

    Examples
    --------
    >>> coarse, fine = model_on_a_mesh(8), model_on_a_mesh(64)  # doctest: +SKIP
    >>> with fine:  # doctest: +SKIP
    ...     step = MultilevelStep(coarse=[coarse], cost_ratio=64)
    ...     idata = pm.sample(step=step, tune=100, draws=500)
    """

    name = "multilevel"
    sampler_class = MultilevelSampler
    can_look_ahead = False
    stats_dtypes_shapes = draw_statistics(
        "accept", "accepted", "n_evals", "n_nonfinite", "n_transitions", "coarse_evals",
        "subchain_length", "coarse_error",
    )  # fmt: skip
    default_tune_steps = 200
    _not_arguments = (
        "learner",
        "target_accept",
        "adapt_after_tune",
        "pseudo_marginal",
        "surrogate",
    )

    @renamed(length="subchain_length")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        coarse: Sequence[Model],
        step: Callable[..., MetropolisHastingsStep] = KameleonStep,
        cost_ratio: float | ArrayLike = 16.0,
        subchain_length: int | Sequence[int] | None = None,
        steps_per_draw: int = 1,
        disperse: bool = True,
        start: str = "here",
        store: EvaluationStore | None = None,
        warm_start: Any = None,
        **options: Any,
    ) -> None:
        coarse = _checked_models(coarse)
        if not callable(step):
            raise TypeError(f"step={step!r}: pass a class, as in step=KameleonStep.")
        ratios = _one_each("cost_ratio", cost_ratio, coarse, partial(checked_number, above=0))
        lengths = _one_each("subchain_length", subchain_length, coarse, _checked_length)
        on_lowest = {"disperse": disperse, "start": start, "warm_start": warm_start}
        more = {k: v for k, v in options.items() if k == "compile_kwargs"}
        if len(coarse) == 1:
            below = step(model=coarse[0], steps_per_draw=1, **on_lowest, **more)
            _check_lowest(below)
        else:
            below = MultilevelStep(
                coarse=coarse[:-1],
                step=step,
                cost_ratio=ratios[:-1],
                subchain_length=lengths[:-1],
                model=coarse[-1],
                **on_lowest,
                **more,
            )
        super().__init__(
            vars,
            learner=MultilevelLearner(below, ratios[-1], lengths[-1]),
            steps_per_draw=steps_per_draw,
            disperse=False,
            pseudo_marginal=None,
            store=store,
            **options,
        )
        self._check_same_variables(below)

    def _check_same_variables(self, below):
        targets = self.target, below.target
        for target in targets:
            if target.shared:
                names = ", ".join(variable.name for variable in target.shared)
                raise ValueError(
                    f"{names}: another step would move it, which coarse models cannot follow. "
                    "MultilevelStep moves all free variables of a model, continuous ones."
                )
            if target.estimated_terms:
                raise ValueError(
                    f"The likelihood term {', '.join(target.estimated_terms)} is an estimate, "
                    "which no level may have: take KameleonStep(pseudo_marginal=True)."
                )
        own, others = (list(zip(t.names, t.shapes, strict=True)) for t in targets)
        if own != others:
            raise ValueError(
                f"coarse: a model has the free variables {_shown(others)}, and the fine one has "
                f"{_shown(own)}. Give all models the same, of the same shapes and transforms and "
                "in the same order: build them with one function of the mesh."
            )

    def transitions_to_tune(self) -> int:  # noqa: D102
        return 50 + 10 * self.dim

    def _begin_tuning(self, x, search):
        sampler = self.sampler
        self.learner.begin_below(x, True, self.rng)
        if sampler.evaluate(self.learner.below.chain.position.copy()) > -np.inf:
            sampler.move_to_proposal()

    def arrive(self, x: np.ndarray) -> None:  # noqa: D102
        super().arrive(x)
        self.learner.follow_data(x)

    def _complaint_of_acceptance(self):
        if self.report.acceptance >= POOR:
            return None
        return (
            WarningType.BAD_ACCEPTANCE,
            f"The acceptance of {', '.join(self.target.names)} ended tuning at "
            f"{self.report.acceptance:.3f}: the coarse model is a poor guide to it. A finer "
            "coarse model, shorter subchains (subchain_length=1) or longer tuning may help.",
        )

    def proposal_covariance(self, x: ArrayLike) -> np.ndarray:
        """Raise an error: subchains have no covariance that is known.

        Raises
        ------
        NotImplementedError
        """
        raise NotImplementedError(
            "The moves of MultilevelStep are subchains of a coarse model, whose covariance is not "
            "known in closed form."
        )

    def _progress_columns(self):
        return {
            "accept": ("Accept", "0.2f"),
            "n_evals": ("Evals", "0.0f"),
            "coarse_evals": ("Coarse", "0.0f"),
        }


def _checked_models(coarse):
    models = list(coarse) if isinstance(coarse, list | tuple) else [coarse]
    for model in models:
        if not isinstance(model, Model):
            raise TypeError(
                f"coarse={model!r}: pass PyMC models with the free variables of the fine one, the "
                "cheapest first."
            )
    if not models:
        raise ValueError("coarse=[]: pass at least one model that is cheaper than the fine one.")
    return models


def _checked_length(name: str, value: int | None) -> int | None:
    """`value`, which is a number of transitions, or None."""
    return None if value is None else checked_integer(name, value, 1)


def _one_each(name, value, coarse, checked):
    values = list(value) if isinstance(value, list | tuple | np.ndarray) else [value] * len(coarse)
    if len(values) != len(coarse):
        raise ValueError(
            f"{name} has {len(values)} numbers, and there are {len(coarse)} coarse models: give "
            "one for each, the cheapest model's first, or one for all."
        )
    return [checked(name, each) for each in values]


def _check_lowest(step):
    others = MALAStep, MultilevelStep, ParallelTemperingStep, SurrogateHMCStep
    if not isinstance(step, MetropolisHastingsStep) or isinstance(step, others):
        raise TypeError(f"step: {type(step).__name__} is no random walk: take KameleonStep.")
    if step.sampler.adapts_after_tune:
        raise ValueError(
            "step: with adapt_after_tune=True the coarse chain is never reversible. Leave it out."
        )


def _shown(variables):
    return ", ".join(f"{name} {shape}" if shape else name for name, shape in variables)
