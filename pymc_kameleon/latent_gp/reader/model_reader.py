"""From a PyMC model and its latent function to a Gaussian prior and a factorising likelihood."""

from collections.abc import Set

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.utils import replace_rvs_by_values
from pymc.pytensorf import make_shared_replacements
from pymc.vartypes import discrete_types
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from scipy.linalg import LinAlgError

from pymc_kameleon.latent_gp.reader.likelihood import ModelLikelihood
from pymc_kameleon.latent_gp.reader.linear_predictor import (
    function_behind,
    name_of,
    shape_of,
    source_of,
)
from pymc_kameleon.latent_gp.reader.prior import ModelPrior
from pymc_kameleon.model.estimated_loglikelihood import estimates
from pymc_kameleon.model.model_function import IN_PYTHON, SharedValues


def variable_of(model, var):
    """Return the random variable that is named by itself, its name or its value variable."""
    if isinstance(var, str):
        if var not in model.named_vars:
            raise ValueError(f"vars: the model has no variable {var!r}.")
        var = model[var]
    return model.values_to_rvs.get(var, var)


def free_variable(model, var) -> tuple:
    """Find a latent function and the free random variable behind it.

    `var` is either, or the name of either. The free variable is returned first, then the function,
    None if it is the free variable itself. Of a free variable it is that of `function_behind`.
    ValueError if there is none, or it is discrete, or no vector.
    """
    var = variable_of(model, var)
    if var in model.observed_RVs:
        raise ValueError(f"vars: {var.name} is observed. Name the latent function.")
    if var not in model.free_RVs and var not in model.deterministics:
        raise ValueError(
            f"vars: {var.name or var} is neither a free variable nor a Deterministic of the model."
        )
    if var.dtype in discrete_types:
        raise ValueError(
            f"vars: {var.name} is discrete, and a latent function is continuous. Name the function "
            "of the Gaussian process."
        )
    if var.ndim != 1:
        raise ValueError(
            f"vars: {var.name} has {var.ndim} dimensions, and a latent function is a vector (N,). "
            "Give each output of a Gaussian process a function and a step of its own."
        )
    if var in model.free_RVs:
        return var, function_behind(model, var)
    candidates = [rv for rv in model.free_RVs if rv.ndim == 1 and shape_of(rv) == shape_of(var)]
    candidates = [rv for rv in candidates if _is_affine(model, var, rv)]
    if len(candidates) != 1:
        found = ", ".join(rv.name for rv in candidates) or "none"
        raise ValueError(
            f"vars: {var.name} should be an affine function of one normal vector of its own "
            f"length, and of these {found} was found. Name the free variable, vars=[...]. If this "
            "is a function of pm.gp.HSGP, it is linear in its coefficients: take LatentGPStep() "
            "without a name."
        )
    return candidates[0], source_of(var)


class LatentFunction:
    """Everything about a latent function f that its samplers and approximations need.

    `var` is as `free_variable` takes it, or what it returned. `initial_point` has the values of the
    other variables. `value_variable` is what `pm.sample` moves; `shared` are the value variables of
    the other free variables, with their shared variables. `predictions` are what is drawn given
    everything else, here nothing. `has_covariance` is whether its prior is known by that, and not
    by its precision.
    """

    predictions, has_covariance = None, True

    def __init__(self, model, var, *, initial_point=None, compile_kwargs=None):
        variable, function = var if isinstance(var, tuple) else free_variable(model, var)
        self.name = name_of(model, variable, function)
        self.value_variable = model.rvs_to_values[variable]
        self.value_variables = [self.value_variable]
        point = model.initial_point() if initial_point is None else initial_point
        self.shared = make_shared_replacements(point, [self.value_variable], model)
        graph = None if function is None else model.replace_rvs_by_values([function])[0]
        compile_kwargs = compile_kwargs or None
        self.prior = ModelPrior(model, self.name, variable, graph, self.shared, compile_kwargs)
        self.size = self.prior.size
        # Double precision whatever the model's: structure is found by comparing values.
        argument = pt.tensor(self.name, dtype="float64", shape=(self.size,))
        replaced = {variable if function is None else function: argument}
        self._read_likelihood(model, replaced, [variable], [], argument, compile_kwargs)
        self.follow_only(set(self.shared.values()))

    def _read_likelihood(
        self, model, replaced, own, predictions, argument, compile_kwargs, most_together=1
    ):
        """Read the terms of `argument` (N,), as `likelihood_terms` and `ModelLikelihood` do."""
        terms = likelihood_terms(model, replaced, own, predictions, self.shared, argument)
        self.likelihood = ModelLikelihood(
            model,
            self.name,
            terms,
            argument,
            self.size,
            self.prior.centre,
            compile_kwargs,
            moving=set(self.shared.values()),
            most_together=most_together,
        )

    def element_name(self, i: int) -> str:
        """Name of the i-th of the values that a step keeps."""
        return f"{self.name}[{i}]"

    def follow_only(self, others: set, ignored: Set = frozenset()) -> None:
        """Let `refresh` follow the shared variables of `others`, and leave those of `ignored`."""
        self._seen_prior = [SharedValues(f, others, ignored) for f in self.prior.functions]
        self._seen_likelihood = SharedValues(self.likelihood.compiled_value, others, ignored)

    def refresh(self) -> bool:
        """Follow the other variables; return whether prior or likelihood changed."""
        prior_changed = any([seen.changed() for seen in self._seen_prior])
        if any(seen.are_data_new for seen in self._seen_prior):
            self.prior.check_data()
            for seen in self._seen_prior:
                seen.are_data_new = False
        if prior_changed:
            self.prior.refresh()
        likelihood_changed = self._seen_likelihood.changed()
        if self._seen_likelihood.are_data_new:
            self.likelihood.data_changed(self.prior.centre)
            self._seen_likelihood.are_data_new = False
        return prior_changed or likelihood_changed

    def recompute(self) -> None:
        """Compute the prior anew, though nothing may have changed since the last `refresh`."""
        self.prior.refresh()

    def set_point(self, point: dict[str, np.ndarray]) -> None:
        """Give the other variables their values in `point` (by value variables' names)."""
        for value, shared in self.shared.items():
            if value.name in point:
                shared.set_value(np.asarray(point[value.name], dtype=shared.dtype))


def likelihood_terms(model, replaced, own, predictions, shared, argument) -> dict:
    """Log densities that depend on latent values, by name, as graphs of them and `shared` ones.

    `replaced` are variables of the model with graphs of `argument`, a vector of the latent values;
    `own` are the free variables behind them, and `predictions` free ones that are left out.
    """
    name = argument.name
    variables = [rv for rv in model.basic_RVs if rv not in replaced and rv not in predictions]
    given = clone_replace([*variables, *model.potentials], replace=replaced, rebuild_strict=False)
    rvs, potentials = given[: len(variables)], given[len(variables) :]
    originals = dict(zip(rvs, variables, strict=True))
    values = {
        "rvs_to_values": {rv: model.rvs_to_values[v] for rv, v in originals.items()},
        "rvs_to_transforms": {rv: model.rvs_to_transforms[v] for rv, v in originals.items()},
    }
    observed = {
        v.name: model.rvs_to_values[v]
        for rv, v in originals.items()
        if v in model.observed_RVs and argument in ancestors([rv])
    }
    try:
        densities = transformed_conditional_logp(rvs, **values)
    except (TypeError, ValueError) as error:
        if not observed:
            raise
        raise _shapes_differ(observed, argument) from error
    densities += replace_rvs_by_values(potentials, **values)
    named = zip([*variables, *model.potentials], densities, strict=True)
    terms = {v.name: density for v, density in named if v not in own}
    for variable in own:
        value = model.rvs_to_values[variable]
        besides = [other for other, t in terms.items() if value in ancestors([t])]
        if besides:
            raise ValueError(
                f"{', '.join(besides)} depends on {variable.name} not only through {name}, so its "
                f"likelihood is no function of {name}."
            )
    terms = {name: t for name, t in terms.items() if argument in ancestors([t])}
    if not terms:
        raise ValueError(
            f"Nothing observed depends on {name}: its posterior is its prior. Give the model an "
            f"observed variable or a pm.Potential that is a function of {name}."
        )
    noisy = [name for name, t in terms.items() if estimates([t])]
    if noisy:
        raise ValueError(
            f"{', '.join(noisy)} is an estimate, and depends on {name}: this needs the likelihood "
            "itself. Take a step that keeps estimates, such as KameleonStep(pseudo_marginal=True)."
        )
    graphs = clone_replace(list(terms.values()), replace=shared, rebuild_strict=False)
    terms = dict(zip(terms, graphs, strict=True))
    _check_shapes(observed, terms, argument)
    return terms


def _check_shapes(observed, terms, argument):
    for name in observed.keys() & terms.keys():
        shapes = pytensor.function(
            [argument],
            [observed[name].shape, terms[name].shape],
            mode=IN_PYTHON,
            on_unused_input="ignore",
        )
        try:
            values, densities = shapes(np.zeros(argument.type.shape))
        except ValueError as error:
            raise _shapes_differ({name: observed[name]}, argument) from error
        # A vector-valued distribution has one density for each of its vectors.
        if not np.array_equal(values[: len(densities)], densities):
            raise _shapes_differ({name: observed[name]}, argument)


def _shapes_differ(observed, argument) -> ValueError:
    shapes = [f"{name} of shape {tuple(v.shape.eval().tolist())}" for name, v in observed.items()]
    return ValueError(
        f"The observed values {' and '.join(shapes)} do not go with their distribution as a "
        f"function of {argument.name} of shape {argument.type.shape}. Give both the same shape."
    )


def _is_affine(model, function, variable) -> bool:
    """Whether `function` is an affine function of a free variable of the same length."""
    (graph,) = model.replace_rvs_by_values([function])
    value = model.rvs_to_values[variable]
    if value not in ancestors([graph]):
        return False
    point = model.initial_point()
    others = {v: pt.constant(point[v.name]) for v in model.value_vars if v is not value}
    evaluate = model.compile_fn(
        clone_replace(graph, replace=others, rebuild_strict=False),
        inputs=[value],
        point_fn=False,
        mode=IN_PYTHON,
    )
    first, second = np.random.default_rng(0).standard_normal((2, shape_of(variable)[0]))
    try:
        ends = evaluate(first.astype(value.dtype)) + evaluate(second.astype(value.dtype))
        middle = evaluate((0.5 * (first + second)).astype(value.dtype))
    except LinAlgError:
        return True  # The covariance is not positive definite: `ModelPrior` says so.
    scale = 1e-9 * max(np.abs(ends).max(), 1.0)
    return not np.all(np.isfinite(ends)) or np.allclose(ends, 2.0 * middle, atol=scale)
