"""From natural values of a model's free variables to the unconstrained values that steps move."""

from collections.abc import Callable

from pymc.pytensorf import compile as compile_graph
from pytensor.graph.replace import clone_replace

__all__ = ["unconstraining_function"]


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
