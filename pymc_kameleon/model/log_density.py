"""From a PyMC model to a compiled log density over the raveled vector of free variables."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.multivariate import ICARRV
from pymc.logprob.transforms import CircularTransform, LogTransform
from pymc.pytensorf import join_nonshared_inputs, make_shared_replacements, rewrite_pregrad
from pymc.util import get_value_vars_from_user_vars
from pymc.vartypes import discrete_types
from pytensor.gradient import NullTypeGradError
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.estimated_loglikelihood import (
    draw_seeds,
    estimates,
    is_estimate,
    seeds_of,
    set_seeds,
)
from pymc_kameleon.model.initial_points import (
    MODE,
    N_PRIOR_POINTS,
    PriorDraws,
    not_finite,
    prior_scales,
)
from pymc_kameleon.model.likelihood_terms import SumOfTerms, find_terms
from pymc_kameleon.model.model_function import ModelFunction, SharedValues
from pymc_kameleon.model.normal_scores import NormalScores
from pymc_kameleon.model.operations import black_boxes, has_black_box
from pymc_kameleon.model.transforms import is_two_sided

NO_TERMS = [pt.constant(0.0)] * (N_TERMS - 1)
"""Zeros for the likelihood's terms of a log density."""

LONGEST_LOG = 3.0
"""A factor of 20 for a positive parameter. That of a prior meant to be uninformative, such as
InverseGamma(0.01, 0.01), is 1e33: no first move or search should be as long."""

IMPROPER = (FlatRV, HalfFlatRV, ICARRV)
"""PyMC's improper distributions."""


def continuous_variables(model) -> list:
    """Value variables that are continuous; all of them if none is."""
    return [v for v in model.value_vars if v.dtype not in discrete_types] or list(model.value_vars)


def select_variables(model, vars=None) -> list:
    """Value variables to sample, in the model's own order.

    PyMC ravels a point in the order of `model.value_vars`; a step that is compiled in any other
    order silently swaps its variables. `vars` are free random variables, value variables or names
    of either; None stands for all continuous ones, as PyMC finds steps for the others. Raises a
    ValueError if there is nothing to sample, or a variable is discrete or not one of the model's.
    """
    if vars is None:
        chosen = continuous_variables(model)
    else:
        vars = vars if isinstance(vars, list | tuple) else [vars]
        chosen = get_value_vars_from_user_vars([_free_variable(model, v) for v in vars], model)
    if not chosen:
        raise ValueError("vars: the model has no free variables to sample; give it at least one.")
    discrete = [v.name for v in chosen if v.dtype in discrete_types]
    if discrete:
        raise ValueError(
            f"vars: {', '.join(discrete)} {'is' if len(discrete) == 1 else 'are'} discrete, and "
            "this step moves continuous variables only. Name the continuous ones, vars=[...], and "
            "PyMC assigns a step to the rest: pm.sample(step=[KameleonStep(vars=[...])])."
        )
    wanted = set(chosen)
    return [v for v in model.value_vars if v in wanted]


def _free_variable(model, variable):
    known = [*model.free_RVs, *model.value_vars]
    if isinstance(variable, str):
        by_name = {**model.named_vars, **{v.name: v for v in reversed(known)}}
        variable = by_name.get(variable, variable)
    if any(variable is v for v in known):
        return variable
    name = variable if isinstance(variable, str) else getattr(variable, "name", None)
    names = ", ".join(v.name for v in model.free_RVs)
    if variable in model.deterministics:
        reason = "is a Deterministic, which follows from others"
    elif variable in model.observed_RVs:
        reason = "is observed"
    elif name in {v.name for v in known}:
        reason = "is a variable of another model, though this one has one of that name"
    else:
        reason = "is no variable of this model"
    raise ValueError(f"vars: {name or repr(variable)} {reason}. Free variables are {names}.")


class LogDensity:
    """Log density of a model over the raveled vector of some of its free variables.

    It is the sum of the log prior (with the Jacobians of the transforms) and the log likelihood
    (observed variables and potentials), which one compiled `function` returns together, with a
    third term for an estimated log likelihood, 0 if none is separated. `vars` is as
    `select_variables` takes it; the variables that are not among them enter through shared
    variables (`shared` has these by value variable). `initial_point`, by default
    `model.initial_point()`, gives the shapes, and `compile_kwargs` is as `ModelFunction` takes it.
    With `separate_estimates` the observed variables and potentials that hold black-box operations
    are a term of their own, so that an estimate can be kept while the rest is evaluated again
    (pseudo-marginal). With `normal_scores`, positive variables whose prior has a known quantile
    function are moved in `NormalScores`.

    The attributes `vars`, `names` and `shapes` are of the value variables in the model's order,
    `dim` is the length d of the raveled vector, and `default_start` (d,) where chains begin that
    were given no other start. `n_evaluations` are those so far, those made inside compiled
    transitions included. `has_likelihood` says whether the model has observed variables or
    potentials, and `others_in_likelihood` has the names of variables not sampled here that the
    likelihood depends on. `has_estimates` says whether there are estimates that were separated;
    `estimated_terms` are the names of the observed variables and potentials that hold an
    `estimated_loglikelihood` or draw random numbers. `foreign_estimates`, by name their seeds,
    depend on none of `vars`, and are left out: they cancel in the ratio unless they are redrawn.
    `n_seeds` is the number of estimates in the log density.
    """

    def __init__(
        self,
        model,
        vars: Sequence | None = None,
        *,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        separate_estimates: bool = False,
        normal_scores: bool = False,
    ):
        default = model.initial_point()
        initial_point = default if initial_point is None else initial_point
        self.vars = select_variables(model, vars)
        self.names = [v.name for v in self.vars]
        self.default_start = np.concatenate([np.ravel(default[name]) for name in self.names])
        self.shapes = [np.shape(initial_point[name]) for name in self.names]
        self.ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        self.dim = int(self.ends[-1])
        if self.dim == 0:
            raise ValueError(f"vars: {', '.join(self.names)} have no elements; nothing to sample.")
        self.shared = make_shared_replacements(initial_point, self.vars, model)
        self.n_evaluations = 0

        terms = classify_terms(model, self.vars, separate_estimates)
        foreign = {variable.name: seeds_of([logp]) for variable, logp in terms.foreign}
        self.foreign_estimates = {name: seeds for name, seeds in foreign.items() if seeds}
        kept, others = [*terms.exact, *terms.estimated], set(model.value_vars) - set(self.vars)
        self.has_likelihood = bool(kept)
        self.others_in_likelihood = _names_among(others, [logp for _, logp in kept])
        self.estimated_terms = [variable.name for variable, logp in kept if is_estimate(logp)]
        self.has_estimates = bool(terms.estimated)
        if separate_estimates:
            _refuse_shared_estimates(terms.estimated, others)
        prior = model.logp(vars=model.free_RVs)
        if estimates([prior]):
            _refuse_estimated_priors(model)
        likelihood, estimate = (
            model.logp(vars=[variable for variable, _ in part]) if part else pt.constant(0.0)
            for part in (terms.exact, terms.estimated)
        )
        self.scores = NormalScores(model, self.vars, self.shapes, normal_scores)
        if self.scores.scored:
            prior = self.scores.log_prior()
            likelihood, estimate = self.scores.with_scores([likelihood, estimate])
            self.default_start = self.scores.from_values(self.default_start[None])[0]
        outputs = [pt.as_tensor(o).astype("float64") for o in (prior, likelihood, estimate)]
        self._outputs, self._input = join_nonshared_inputs(
            initial_point, outputs, self.vars, self.shared
        )
        self._seeds = seeds_of(self._outputs)
        self.n_seeds = len(self._seeds)
        self.model = model
        self._prior_draws = PriorDraws(model, self.names)
        # PyMC 6 passes {} to a step that it chose itself: nothing that a user chose.
        self._compile_kwargs = compile_kwargs or None
        self.function = self._compile(*self._outputs)
        self._rest = self._compile(*self._outputs[:2]) if terms.estimated and self.shared else None
        self._inputs = SharedValues(
            self.function, set(self.shared.values()), ignored=set(self._seeds)
        )

    def prior_draws(self, n: int, seed: int, only_drawable: bool = True) -> np.ndarray:
        """Draw points (at most n, d) from the prior, as `PriorDraws` does."""
        return self.scores.from_values(self._prior_draws(n, seed, only_drawable))

    def prior_points(self, seed: int) -> np.ndarray:
        """Draws from the prior (n, d), raveled; jittered defaults where it cannot be drawn from."""
        drawn = self.prior_draws(N_PRIOR_POINTS, seed, only_drawable=False)
        return drawn if len(drawn) else self.default_start[None]

    @cached_property
    def scales(self) -> np.ndarray:
        """Scale (d,) of the prior in each coordinate; of a logarithm at most `LONGEST_LOG`.

        It belongs to the model, and is the same in all chains and runs.
        """
        scales = prior_scales(self.prior_points(seed=0))
        is_log = self._where(lambda rv, transform: isinstance(transform, LogTransform))
        is_log &= ~self.scores.is_scored
        return np.where(is_log, np.minimum(scales, LONGEST_LOG), scales)

    def likelihood_graphs(self) -> list:
        """Log densities of the observed variables and potentials that depend on `vars`."""
        own = set(self.vars)
        return [logp for _, logp in likelihood_terms(self.model) if _names_among(own, [logp])]

    @property
    def has_proper_prior(self) -> bool:
        """Whether no free variable of the model has an improper distribution."""
        return not any(isinstance(rv.owner.op, IMPROPER) for rv in self.model.free_RVs)

    def has_two_bounds(self) -> np.ndarray:
        """Whether each raveled coordinate (d,) has two bounds in its natural space."""
        return self._where(lambda rv, transform: is_two_sided(transform, rv.owner.inputs))

    @cached_property
    def is_circular(self) -> np.ndarray:
        """Whether each raveled coordinate (d,) is an angle that goes on beyond -pi and pi."""
        return self._where(lambda rv, transform: isinstance(transform, CircularTransform))

    def _where(self, condition):
        found = []
        for value, shape in zip(self.vars, self.shapes, strict=True):
            variable = self.model.values_to_rvs[value]
            is_true = condition(variable, self.model.rvs_to_transforms[variable])
            found += [is_true] * math.prod(shape)
        return np.array(found, dtype=np.bool_)

    def coordinates(self) -> list[tuple[str, str]]:
        """Name of the variable and index in it, as in "[0, 1]", of each raveled coordinate."""
        return [
            (name, f"[{', '.join(map(str, index))}]" if index else "")
            for name, shape in zip(self.names, self.shapes, strict=True)
            for index in np.ndindex(shape)
        ]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the terms of the log density (3,) at `x` (d,)."""
        value = np.empty(N_TERMS)
        self.n_evaluations += 1
        self.function.into(x, value)
        return value

    def natural(self, points: np.ndarray) -> dict[str, tuple[list[str], np.ndarray]]:
        """Natural values of the variables at the rows of `points` (n, d), for an xarray data set.

        Name of the variable -> dimensions, the first of which is "evaluation", and values.
        """
        variables = [self.model.values_to_rvs[value] for value in self.vars]
        backward = self.model.compile_fn(
            self.model.replace_rvs_by_values(variables),
            inputs=self.vars,
            point_fn=False,
            mode="FAST_COMPILE",
            on_unused_input="ignore",
        )
        rows = [backward(*self._parts(point)) for point in self.scores.to_values(points)]
        result = {}
        for i, variable in enumerate(variables):
            values = np.array([row[i] for row in rows])
            own = [f"{variable.name}_dim_{k}" for k in range(max(values.ndim - 1, 0))]
            dims = self.model.named_vars_to_dims.get(variable.name) or own
            result[variable.name] = (["evaluation", *dims], values)
        return result

    def _parts(self, x):
        """Values of the variables in the raveled vector `x` (d,)."""
        parts = zip(np.split(x, self.ends[:-1]), self.shapes, self.vars, strict=True)
        return [part.reshape(shape).astype(v.dtype) for part, shape, v in parts]

    def at_fault(self, x: np.ndarray) -> list[str]:
        """Names of the variables and potentials whose log density at `x` (d,) is not finite."""
        values = self.scores.to_values(x[None])[0]
        point = dict(zip(self.names, self._parts(values), strict=True))
        point |= {variable.name: shared.get_value() for variable, shared in self.shared.items()}
        try:
            with np.errstate(all="ignore"):
                return not_finite(self.model, self.model.compile_logp(sum=False, mode=MODE), point)
        except Exception:  # of a user's function
            return []

    def redraw_estimates(self, rng: np.random.Generator) -> np.ndarray:
        """Make the next evaluation draw every estimate anew; return the seeds (n_seeds,)."""
        return draw_seeds(self._seeds, rng)

    def restore_estimates(self, seeds: np.ndarray) -> None:
        """Make the next evaluation repeat the estimates of `seeds` (n_seeds,)."""
        set_seeds(self._seeds, seeds)

    def rest(self, x: np.ndarray) -> np.ndarray:
        """Log prior and exact log likelihood at `x`, without drawing the estimated term again."""
        if self._rest is None:
            raise ValueError("No estimate is kept: `keeps_estimates` is False.")
        value = np.empty(2)
        self._rest.into(x, value)
        return value

    @property
    def keeps_estimates(self) -> bool:
        """Whether estimated terms must be kept while other steps move the remaining variables."""
        return self._rest is not None

    def value_and_gradient(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Terms of the log density (3,), and gradients (2, d) of log prior and log likelihood.

        The estimated part is in the second. Raises NotImplementedError as `with_gradients` does.
        """
        self.n_evaluations += 1
        value = np.empty(N_TERMS + 2 * self.dim)
        self.with_gradients.into(x, value)
        return value[:N_TERMS], value[N_TERMS:].reshape(2, self.dim)

    @cached_property
    def with_gradients(self) -> ModelFunction:
        """The three terms, the gradient of the log prior and that of the log likelihood.

        Raises NotImplementedError if an operation of the model has no gradient.
        """
        prior, likelihood, estimate = self._outputs
        return self._compile(*self._outputs, *self._gradients_of(prior, likelihood + estimate))

    @cached_property
    def prior(self) -> ModelFunction:
        """The log prior, with the Jacobians of the transforms, and two zeros for other terms."""
        return self._compile(self._outputs[0], *NO_TERMS)

    def log_prior(self, x: np.ndarray) -> float:
        """Evaluate the log prior at `x` (d,)."""
        value = np.empty(N_TERMS)
        self.prior.into(x, value)
        return float(value[0])

    @cached_property
    def prior_with_gradient(self) -> ModelFunction:
        """The log prior, two zeros instead of the other terms, and the gradient of the prior."""
        prior = self._outputs[0]
        return self._compile(prior, *NO_TERMS, *self._gradients_of(prior))

    # a likelihood that is a sum of black boxes ----------------------------------------------------

    @property
    def terms(self) -> SumOfTerms:
        """The terms, where there are several."""
        if self.sum_of_terms is None:
            raise RuntimeError("the log-likelihood is no sum of several terms")
        return self.sum_of_terms

    @cached_property
    def sum_of_terms(self) -> SumOfTerms | None:
        """Black boxes whose sum, with what is known, is the log-likelihood; None for one alone."""
        if self.shared or self.has_estimates or self.estimated_terms:
            return None
        return find_terms(likelihood_terms(self.model), self.vars, self.model.initial_point())

    @cached_property
    def _joined_terms(self):
        """Graphs of the prior, of what else is known, of the terms and their inputs; the point."""
        terms, prior = self.terms, self.model.logp(vars=self.model.free_RVs)
        graphs = [
            pt.as_tensor(graph).astype("float64")
            for graph in (prior, terms.exact, terms.values, terms.inputs)
        ]
        return join_nonshared_inputs(self.model.initial_point(), graphs, self.vars, self.shared)

    @cached_property
    def with_terms(self) -> ModelFunction:
        """The three terms of the log density, then those of the likelihood (T,)."""
        (prior, exact, values, _), x = self._joined_terms
        outputs = [prior, exact + values.sum(), pt.constant(0.0), values]
        return ModelFunction(self.model, outputs, x, self.dim, self._compile_kwargs)

    @cached_property
    def inputs_of_terms(self) -> ModelFunction:
        """What the terms depend on (n,)."""
        (_, _, _, inputs), x = self._joined_terms
        return ModelFunction(self.model, [inputs], x, self.dim, self._compile_kwargs)

    def known_with_slopes(self, gaussian=None) -> ModelFunction:
        """Return what is known of the log density, and the gradient of all of it.

        At the raveled vector followed by the slopes (n,) of the sum of the terms in their inputs:
        log prior and likelihoods without a black box, two zeros, and the gradient (d,). With
        `gaussian`, means and standard deviations (d,), independent ones are in place of both.
        Raises a NotImplementedError if what is known has no gradient.
        """
        (prior, exact, _, inputs), x = self._joined_terms
        known = prior + exact
        if gaussian is not None:
            known = -0.5 * (((x - gaussian[0]) / gaussian[1]) ** 2).sum()
        slopes = pt.vector("slopes", dtype=x.dtype)
        both = pt.vector("position_and_slopes", dtype=x.dtype)
        [gradient] = self._gradients_of(known + pt.dot(inputs, slopes), at=x)
        position = {x: both[: self.dim], slopes: both[self.dim :]}
        outputs = graph_replace([known, *NO_TERMS, gradient], position, strict=False)
        size = self.dim + self.terms.n_inputs
        return ModelFunction(self.model, outputs, both, size, self._compile_kwargs)

    def inputs_changed(self) -> bool:
        """Whether a shared value (another step's variable, or data) changed since the last call.

        True at the first one, but not where nothing but data can change and estimates are kept:
        then the first call is that of a restored chain, which has its estimate.
        """
        is_known = self._inputs.were_seen or self.shared or not self.has_estimates
        return self._inputs.changed() and bool(is_known)

    @property
    def has_new_data(self) -> bool:
        """Whether data may have changed that `check_data` has not seen; after `inputs_changed`."""
        return self._inputs.are_data_new

    def check_data(self, x: np.ndarray) -> None:
        """Raise a ValueError if the log density cannot be computed at `x` (d,) with new data.

        Because the model's variables were resized, or shapes or indices do not fit each other.
        `inputs_changed` finds out whether data are new.
        """
        if not self._inputs.are_data_new:
            return
        try:
            is_known = self.function.check_data(x, f"The log density of {', '.join(self.names)}")
        except ValueError as error:
            point = self.model.initial_point()
            for name, shape in zip(self.names, self.shapes, strict=True):
                if name in point and np.shape(point[name]) != shape:
                    raise ValueError(
                        f"The model was resized: {name} has shape {np.shape(point[name])} in it "
                        f"now, and had {shape} when this step was made. Make a new step, inside "
                        "`with model:`, and start it from a point of this size."
                    ) from error
            raise
        self._inputs.are_data_new = not is_known

    def _compile(self, *outputs):
        return ModelFunction(self.model, outputs, self._input, self.dim, self._compile_kwargs)

    def _gradients_of(self, *terms, at=None):
        at = self._input if at is None else at
        try:
            return [
                pt.grad(rewrite_pregrad(term), at, disconnected_inputs="ignore") for term in terms
            ]
        except (NotImplementedError, NullTypeGradError) as error:
            named = ", ".join(black_boxes(terms)) or str(error)
            raise NotImplementedError(
                f"The log density has no gradient with respect to {', '.join(self.names)}: {named} "
                "has none. Take a step that needs no gradient: KameleonStep, or SurrogateHMCStep "
                "without gradients=True."
            ) from error


def likelihood_terms(model) -> list[tuple]:
    """Pairs (observed variable or potential, its log density graph)."""
    variables = [*model.observed_RVs, *model.potentials]
    return list(zip(variables, model.logp(vars=variables, sum=False), strict=True))


class LikelihoodTerms(NamedTuple):
    """Pairs (observed variable or potential, its log density graph), by what becomes of them."""

    exact: list[tuple]
    estimated: list[tuple]
    foreign: list[tuple]


def classify_terms(model, vars: Sequence, separate_estimates: bool) -> LikelihoodTerms:
    """Terms to evaluate, estimates to keep apart, and estimates that depend on none of `vars`."""
    own, terms = set(vars), LikelihoodTerms([], [], [])
    for variable, logp in likelihood_terms(model):
        is_separate = separate_estimates and has_black_box(logp)
        if (is_separate or seeds_of([logp])) and not _names_among(own, [logp]):
            terms.foreign.append((variable, logp))
        elif is_separate:
            terms.estimated.append((variable, logp))
        else:
            terms.exact.append((variable, logp))
    return terms


def _refuse_estimated_priors(model):
    for variable in model.free_RVs:
        if estimates([model.logp(vars=[variable])]):
            raise ValueError(
                f"The log density of the free variable {variable.name} holds an "
                "estimated_loglikelihood, which no step can keep: make it a potential, "
                f'pm.Potential("{variable.name}_estimate", estimated_loglikelihood(...)).'
            )


def _refuse_shared_estimates(estimated, others):
    for variable, logp in estimated:
        foreign = _names_among(others, [logp])
        if foreign:
            raise ValueError(
                f"pseudo_marginal=True: the estimated term {variable.name} depends on "
                f"{', '.join(foreign)}, which another step moves, so its estimate cannot be kept. "
                f"Give this step those variables too: vars=[..., {', '.join(foreign)}], with "
                "blocked=True."
            )


def _names_among(variables, graphs) -> list[str]:
    return sorted(v.name for v in ancestors(graphs) if v in variables)
