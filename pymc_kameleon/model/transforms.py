"""From natural values of a model's free variables to the unconstrained values that steps move."""

from collections.abc import Callable, Mapping

import numpy as np
import pytensor.tensor as pt
from pymc.logprob.transforms import IntervalTransform, LogOddsTransform
from pymc.pytensorf import compile as compile_graph
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace

__all__ = ["has_static_shape", "is_two_sided", "unconstrained_point", "unconstraining_function"]


def unconstraining_function(model, value_variables=None) -> Callable:
    """Compile the map that `pymc.sample` applies to `initvals`.

    Parameters
    ----------
    model : pymc.Model
    value_variables : list, optional
        Value variables to return; default those of all free variables.

    Returns
    -------
    callable
        Takes the natural values of all of `model.free_RVs`; returns a list of unconstrained ones.
    """
    variables = list(model.free_RVs)
    if value_variables is None:
        value_variables = [model.rvs_to_values[variable] for variable in variables]
    natural = {variable: variable.type(f"{variable.name}_natural") for variable in variables}
    unconstrained = []
    for value in value_variables:
        variable = model.values_to_rvs[value]
        transform = model.rvs_to_transforms[variable]
        unconstrained.append(
            variable if transform is None else transform.forward(variable, *variable.owner.inputs)
        )
    return compile_graph(
        list(natural.values()),
        clone_replace(unconstrained, natural),
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )


def unconstrained_point(model, point: Mapping) -> dict[str, np.ndarray]:
    """Values of a model's value variables, by name, at natural values of its free variables.

    Parameters
    ----------
    model : pymc.Model
    point : mapping
        Name of every free variable -> its natural value.

    Raises
    ------
    TypeError, ValueError
        If a variable is missing or unknown, or a value is no number or has another shape.
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
        if not has_static_shape(variable, value.shape):
            raise ValueError(
                f"point: {variable.name} has shape {value.shape}, the model has "
                f"{variable.type.shape}."
            )
    unconstrained = unconstraining_function(model)(*natural)
    shapes = {name: np.shape(value) for name, value in model.initial_point().items()}
    result = {}
    for variable, value in zip(model.free_RVs, unconstrained, strict=True):
        name = model.rvs_to_values[variable].name
        if np.shape(value) != shapes[name]:
            raise ValueError(
                f"point: {variable.name} has shape {np.shape(point[variable.name])}, which gives "
                f"{np.shape(value)} unconstrained; the model has {shapes[name]} there."
            )
        result[name] = value
    return result


def is_two_sided(transform, inputs) -> bool:
    """Whether a transform is the log odds of the share of an interval, by what is known of it.

    Parameters
    ----------
    transform : pymc transform or None
    inputs : list of variables
        Those of the random variable.
    """
    if isinstance(transform, IntervalTransform):
        bounds = transform.args_fn(*inputs)
        return not any(
            bound is None or (isinstance(bound, Constant) and np.any(np.isinf(bound.data)))
            for bound in map(_as_variable, bounds)
        )
    return isinstance(transform, LogOddsTransform)


def _as_variable(bound):
    return None if bound is None else pt.as_tensor(bound)


def has_static_shape(variable, shape: tuple[int, ...]) -> bool:
    """Whether a value of this shape can be one of `variable`, by what is known of its shape."""
    static = variable.type.shape
    return len(static) == len(shape) and all(
        n is None or n == m for n, m in zip(static, shape, strict=True)
    )


def _natural_value(variable, value):
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"point: {variable.name} is {value!r}: take numbers.")
    converted = array.astype(variable.dtype)
    if converted.dtype.kind in "biu" and np.any(converted != array):
        raise ValueError(f"point: {variable.name} is discrete, and {value!r} is no whole number.")
    return converted
