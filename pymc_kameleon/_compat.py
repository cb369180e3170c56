"""The only file that knows PyMC 5 from PyMC 6, and ArviZ 0 from ArviZ 1."""

import inspect

import numpy as np
from pytensor.compile.builders import OpFromGraph

__all__ = [
    "group_dataset",
    "is_result",
    "operation_with_gradient",
    "posterior_result",
    "stacked",
]


def is_result(result) -> bool:
    """Whether `result` is what `pm.sample` returns (InferenceData, or DataTree on PyMC 6)."""
    return hasattr(result, "posterior") or (hasattr(result, "children") and "posterior" in result)


def group_dataset(result, group: str):
    """Group of a result as an `xarray.Dataset`, or None if it is not there."""
    if group not in (result.children if hasattr(result, "children") else result.groups()):
        return None
    node = result[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node


def stacked(dataset, name: str) -> np.ndarray:
    """Values of one variable, shape (chains * draws, ...)."""
    values = dataset[name].transpose("chain", "draw", ...).values
    return values.reshape(-1, *values.shape[2:])


def operation_with_gradient(inputs, outputs, pullback, name: str) -> OpFromGraph:
    """Operation of a graph, inlined when compiled, with `pullback` as its gradient."""
    known = inspect.signature(OpFromGraph.__init__).parameters
    keyword = "pullback" if "pullback" in known else "lop_overrides"
    return OpFromGraph(inputs, outputs, inline=True, name=name, **{keyword: pullback})


def posterior_result(values: dict[str, np.ndarray]):
    """Make a result whose posterior group holds arrays (chains, draws, ...)."""
    import arviz

    if "posterior" in inspect.signature(arviz.from_dict).parameters:
        return arviz.from_dict(posterior=values)
    return arviz.from_dict({"posterior": values})
