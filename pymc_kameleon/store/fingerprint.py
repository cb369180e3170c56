"""What evaluations of two models have to share to be those of one likelihood."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import ancestors, toposort

__all__ = ["describe"]


def describe(target) -> dict[str, str]:
    """Describe the likelihood of a model as a function of some of its variables.

    A black box is known by its name, not by what it does.

    Parameters
    ----------
    target : LogDensity

    Returns
    -------
    dict
        Variables with their shapes and transforms; observed data and other arrays, and the graph of
        the likelihood, by their digests.
    """
    model, graphs = target.model, target.likelihood_graphs()
    variables = [
        f"{value.name}{list(shape)} by {_name(model.rvs_to_transforms[model.values_to_rvs[value]])}"
        for value, shape in zip(target.vars, target.shapes, strict=True)
    ]
    leaves = [v for v in ancestors(graphs) if v.owner is None]
    data = [_digest(v) for v in leaves if isinstance(v, Constant | SharedVariable)]
    return {
        "variables": "; ".join(variables),
        "data or constants": _digest_of("\n".join(data)),
        "likelihood": _digest_of("\n".join(_lines(graphs))),
    }


def _name(transform) -> str:
    return "no transform" if transform is None else type(transform).__name__


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(leaf) -> str:
    value = np.asarray(leaf.data if isinstance(leaf, Constant) else leaf.get_value(borrow=True))
    if value.dtype == object:
        return _without_addresses(str(value))
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return f"{value.dtype}{value.shape}{digest}"


def _lines(graphs: Sequence) -> list[str]:
    """One line for each operation of the graphs: its name, and where its inputs come from."""
    numbers: dict = {}
    lines = []

    def number(variable):
        if variable not in numbers:
            is_input = variable.owner is None and not isinstance(variable, Constant)
            name = variable.name if is_input else ""
            numbers[variable] = f"{len(numbers)}{name}:{variable.type}"
        return numbers[variable]

    for node in toposort(graphs):
        inputs = ", ".join(number(variable) for variable in node.inputs)
        outputs = ", ".join(number(variable) for variable in node.outputs)
        lines.append(f"{outputs} = {_without_addresses(str(node.op))}({inputs})")
        if isinstance(node.op, HasInnerGraph):
            lines += _lines(node.op.inner_outputs)
    return [*lines, *(number(graph) for graph in graphs)]


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)
