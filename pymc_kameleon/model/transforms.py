"""From natural values of a model's free variables to the unconstrained values that steps move."""

from collections.abc import Callable, Mapping

import numpy as np
import pytensor.tensor as pt
from pymc.logprob.transforms import IntervalTransform, LogOddsTransform
from pymc.pytensorf import compile as compile_graph
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace

from pymc_kameleon._compat import group_dataset, is_result, stacked


def unconstrained(model, variable):
    """Graph of the unconstrained value of a free variable, given the natural one."""
    transform = model.rvs_to_transforms[variable]
    return variable if transform is None else transform.forward(variable, *variable.owner.inputs)


def unconstraining_function(model, value_variables=None) -> Callable:
    """Compile the map that `pymc.sample` applies to `initvals`.

    It takes the natural values of all of `model.free_RVs`, and returns a list of the unconstrained
    ones of `value_variables`, by default of all.
    """
    variables = list(model.free_RVs)
    if value_variables is not None:
        variables = [model.values_to_rvs[value] for value in value_variables]
    natural = {rv: rv.type(f"{rv.name}_natural") for rv in model.free_RVs}
    return compile_graph(
        list(natural.values()),
        clone_replace([unconstrained(model, variable) for variable in variables], natural),
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )


def unconstrained_point(model, point: Mapping) -> dict[str, np.ndarray]:
    """Values of a model's value variables, by name, at natural values of all its free variables.

    Raises a TypeError or ValueError if a variable is missing or unknown, or a value is no number or
    has another shape.
    """
    names = [variable.name for variable in model.free_RVs]
    if not isinstance(point, Mapping):
        raise TypeError(
            f"point={point!r}: take a dict of natural values of {', '.join(names)}, by name."
        )
    missing, unknown = [n for n in names if n not in point], sorted(set(point) - set(names))
    if missing or unknown:
        raise ValueError(
            f"point: give natural values of {', '.join(names)}; {', '.join(missing) or 'none'} "
            f"missing, {', '.join(unknown) or 'none'} unknown."
        )
    natural = [_natural_value(variable, point[variable.name]) for variable in model.free_RVs]
    for variable, value in zip(model.free_RVs, natural, strict=True):
        if not _has_static_shape(variable, value.shape):
            raise ValueError(
                f"point: {variable.name} has shape {value.shape}, the model has "
                f"{variable.type.shape}."
            )
    shapes = {name: np.shape(value) for name, value in model.initial_point().items()}
    result = {}
    values = unconstraining_function(model)(*natural)
    for variable, given, value in zip(model.free_RVs, natural, values, strict=True):
        name = model.rvs_to_values[variable].name
        if np.shape(value) != shapes[name]:
            raise ValueError(
                f"point: {variable.name} has shape {given.shape}, which gives "
                f"{np.shape(value)} unconstrained; the model has {shapes[name]} there."
            )
        result[name] = value
    return result


def _natural_value(variable, value):
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"point: {variable.name} is {value!r}: take numbers.")
    converted = array.astype(variable.dtype)
    if converted.dtype.kind in "biu" and np.any(converted != array):
        raise ValueError(f"point: {variable.name} is discrete, and {value!r} is no whole number.")
    return converted


def _has_static_shape(variable, shape: tuple[int, ...]) -> bool:
    """Whether a value of this shape can be one of `variable`, by what is known of its shape."""
    static = variable.type.shape
    return len(static) == len(shape) and all(
        n is None or n == m for n, m in zip(static, shape, strict=True)
    )


def is_two_sided(transform, inputs) -> bool:
    """Whether a transform is the log odds of the share of an interval, by what is known of it.

    `inputs` are those of the random variable.
    """
    if not isinstance(transform, IntervalTransform):
        return isinstance(transform, LogOddsTransform)
    bounds = [None if b is None else pt.as_tensor(b) for b in transform.args_fn(*inputs)]
    return not any(
        bound is None or (isinstance(bound, Constant) and np.any(np.isinf(bound.data)))
        for bound in bounds
    )


# what an earlier run found ------------------------------------------------------------------------


def warm_points(warm_start, model, target, largest: int) -> np.ndarray:
    """At most `largest` raveled, unconstrained points (n, d) to learn from, evenly thinned.

    `warm_start` is a result of `pm.sample`, or an array (..., d) of such points in the order of the
    variables of `target`, a `LogDensity`. Raises a TypeError or ValueError if it is neither, a
    variable of the model is missing from it, or the shapes do not fit.
    """
    if is_result(warm_start):
        points = _from_result(warm_start, model, target, largest)
    else:
        try:
            points = np.asarray(warm_start, dtype=float)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise TypeError(
                f"warm_start={warm_start!r}: take a result of pm.sample, or an array of shape "
                f"(n, {target.dim}), the raveled unconstrained {', '.join(target.names)}."
            ) from error
        if points.ndim < 2 or points.shape[-1] != target.dim:
            raise ValueError(
                f"warm_start has shape {points.shape}: take a result of pm.sample, or points of "
                f"shape (n, {target.dim}), the raveled unconstrained {', '.join(target.names)}."
            )
        points = _some_rows(points.reshape(-1, target.dim), largest)
    points = points[np.all(np.isfinite(points), axis=1)]
    if len(points) < 2:
        raise ValueError("warm_start holds fewer than two finite points; take a longer run.")
    return points


def _some_rows(array, largest):
    """At most `largest` rows, evenly spaced."""
    return array[np.unique(np.linspace(0, len(array) - 1, largest).astype(int))]


def _from_result(result, model, target, largest):
    posterior = group_dataset(result, "posterior")
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        raise ValueError(
            f"warm_start has no {', '.join(missing)}; take a result of this model, with all of its "
            "free variables in the posterior group."
        )
    draws = {rv: stacked(posterior, rv.name) for rv in model.free_RVs}
    for rv, values in draws.items():
        if not _has_static_shape(rv, values.shape[1:]):
            raise ValueError(
                f"warm_start has {rv.name} of shape {values.shape[1:]}, the model has "
                f"{rv.type.shape}; take a result of this model."
            )
    chosen = _some_rows(np.arange(len(next(iter(draws.values())))), largest)
    to_values = unconstraining_function(model, target.vars)
    points = [to_values(*(draws[rv][i] for rv in draws)) for i in chosen]
    for variable, shape, value in zip(target.vars, target.shapes, points[0], strict=True):
        if np.shape(value) != shape:
            rv = model.values_to_rvs[variable]
            raise ValueError(
                f"warm_start has {rv.name} of shape {draws[rv].shape[1:]}, which is another size "
                "than the model has now; take a result of this model."
            )
    return np.array([np.concatenate([np.ravel(v) for v in point]) for point in points])


def warm_scaling(warm_start, statistic: str, present: set[str], absent: set[str]) -> float | None:
    """Scaling that an earlier run of the same kind of step ended with, the median over its chains.

    `statistic` is where such a run keeps it: a name that has never meant anything else, since a
    number does not say what it is a factor of.

    `present` and `absent` are sampler statistics that tell such a run from those of other steps;
    None if the points do not come from one, or from several steps at once.
    """
    statistics = group_dataset(warm_start, "sample_stats") if is_result(warm_start) else None
    if statistics is None:
        return None
    if not {statistic, *present} <= set(statistics) or absent & set(statistics):
        return None
    last = statistics[statistic].isel(draw=-1)
    return float(last.median()) if last.dims == ("chain",) else None
