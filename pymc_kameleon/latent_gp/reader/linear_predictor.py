"""Which variables of a model are Gaussian a priori and enter its likelihood by a linear predictor.

A graph is called affine here where its operations say so; whoever uses it compares values too.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.transforms import ZeroSumTransform
from pymc.vartypes import discrete_types
from pytensor import scalar
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import ViewOp
from pytensor.gradient import NullTypeGradError, grad, jacobian
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.sparse import math as sparse
from pytensor.tensor.basic import (
    Alloc,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.random.basic import MvNormalRV, NormalRV
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from pymc_kameleon._compat import PUTS_BY_ARRAYS, TAKES_BY_ARRAYS, Cholesky, SolveBase
from pymc_kameleon.model.model_function import IN_PYTHON

OF_FIRST: tuple[type, ...] = (
    Subtensor,
    *TAKES_BY_ARRAYS,
    DimShuffle,
    Reshape,
    SpecifyShape,
    Alloc,
    Split,
    TensorFromScalar,
    ScalarFromTensor,
    Repeat,
)
"""Operations that are linear in their first input, given the others."""

OF_ALL: tuple[type, ...] = (Join, MakeVector, IncSubtensor, *PUTS_BY_ARRAYS)
"""Operations that are linear in all inputs together; those that are indices do not count."""

OF_ONE: tuple[type, ...] = (Dot, BatchedDot, sparse.Dot, sparse.TrueDot, sparse.StructuredDot)
"""Products, which are linear in each of their factors."""

OF_ALL_NUMBERS = (scalar.Add, scalar.Sub, scalar.Neg, scalar.Identity, scalar.Second)
"""Operations that are linear in all inputs together, among elementwise ones."""

MIXING = (*OF_ONE, Sum, CumOp, SolveBase, OpFromGraph)
"""Operations of which an element may depend on several of an input."""


MANY_EFFECTS = 5
"""Elements of a variable from which it may have a linear predictor of its own, such as effects of
groups in a log standard deviation; fewer are better moved as hyperparameters."""


class Linear(NamedTuple):
    """Gaussian variables of a model, and the graphs by which its likelihood depends on them.

    `functions` are pairs of a free variable and the function that it stands behind, None if it is
    the function; `others` are free variables whose joint density is that of a Gaussian; `nodes` are
    the largest graphs that are affine in all of them.
    """

    functions: list[tuple]
    others: list[Variable]
    nodes: list[Variable]

    @property
    def variables(self) -> list[Variable]:
        """The free variables."""
        return [variable for variable, _ in self.functions] + self.others

    @property
    def leaves(self) -> dict[Variable, int]:
        """What stands for each of them in a graph, and its number."""
        made = [variable if f is None else f for variable, f in self.functions]
        return {variable: i for i, variable in enumerate([*made, *self.others])}


def source_of(variable: Variable) -> Variable:
    """Return what a `pm.Deterministic` was made from, all names taken away; else the variable."""
    while variable.owner is not None and isinstance(variable.owner.op, ViewOp):
        variable = variable.owner.inputs[0]
    return variable


def shape_of(variable: Variable) -> tuple[int, ...]:
    """Return the shape of a variable of a model."""
    if None in variable.type.shape:
        return tuple(int(n) for n in variable.shape.eval(mode=IN_PYTHON))
    return variable.type.shape


def element_names(variables: list[Variable], shapes: list[tuple[int, ...]]) -> list[str]:
    """Names of the elements of variables of these shapes, in the order of raveled values."""
    return [
        variable.name + (str(list(index)) if index else "")
        for variable, shape in zip(variables, shapes, strict=True)
        for index in np.ndindex(shape)
    ]


def with_gradient(model, variables: list[Variable], density: Variable) -> list[Variable]:
    """Return a log density and its gradient (M,) by free variables."""
    values = [model.rvs_to_values[v] for v in variables]
    density = density.astype("float64")
    gradients = grad(density, values, disconnected_inputs="ignore")
    return [density, pt.concatenate([g.astype("float64").ravel() for g in gradients])]


def is_gaussian(model, variables: list[Variable], start: dict) -> bool:
    """Whether the joint density of free variables is that of a Gaussian, whatever the others are.

    Its log is finite everywhere then, with a gradient that is affine, and constant in none of them.
    It is looked at near and far out, with the others at their `start`.
    """
    transforms = [model.rvs_to_transforms.get(v) for v in variables]
    if any(v.dtype in discrete_types for v in variables) or any(
        t is not None and not isinstance(t, ZeroSumTransform) for t in transforms
    ):
        return False
    values = [model.rvs_to_values[v] for v in variables]
    rest = {v: pt.constant(start[v.name]) for v in model.value_vars if v not in values}
    try:
        graphs = with_gradient(model, variables, model.logp(vars=variables))
        evaluate = model.compile_fn(
            clone_replace(graphs, replace=rest, rebuild_strict=False),
            inputs=values,
            point_fn=False,
            mode=IN_PYTHON,
            on_unused_input="ignore",
        )
        return all(_is_quadratic(evaluate, values, start, scale) for scale in (1.0, 1000.0))
    except (NotImplementedError, NullTypeGradError, ArithmeticError, ValueError):
        return False


def _is_quadratic(evaluate, values, start, scale) -> bool:
    """Whether a log density is finite, and its gradient affine, at random points this far out."""
    rng = np.random.default_rng(0)
    x, y = ([scale * rng.standard_normal(start[v.name].shape) for v in values] for _ in range(2))
    points = [x, y, [-part for part in x], [0.5 * (a + b) for a, b in zip(x, y, strict=True)]]
    densities, gradients = [], []
    for point in points:
        found = evaluate(*(np.asarray(p, v.dtype) for p, v in zip(point, values, strict=True)))
        densities.append(found[0])
        gradients.append(found[1])
    first, second, _, between = gradients
    changes = np.abs(first - second)
    tolerance = 1e-8 if all(v.dtype == "float64" for v in values) else 1e-4
    is_affine = np.allclose(first + second, 2 * between, rtol=0.0, atol=tolerance * changes.max())
    return bool(np.all(np.isfinite(densities)) and np.all(changes > 0) and is_affine)


def affine_nodes(outputs: Iterable[Variable], leaves: Iterable[Variable]) -> list[Variable]:
    """Return the largest graphs, affine in all of `leaves`, through which `outputs` need them."""
    leaves, outputs = set(leaves), list(outputs)
    affine, dependent = set(leaves), set(leaves)
    found: dict[Variable, None] = {}
    below = set(ancestors(outputs, blockers=leaves))
    for node in io_toposort(list(leaves), outputs):
        if not below.intersection(node.outputs):
            continue
        given = [v for v in node.inputs if v in dependent]
        made = [v for v in node.outputs if v not in leaves]
        if not given or not made:
            continue
        dependent.update(made)
        if affine.issuperset(given) and _is_affine(node, given) and not set(made) & set(outputs):
            affine.update(made)
        else:
            found |= dict.fromkeys(source_of(v) for v in given if v in affine)
    return list(found)


def function_behind(model, variable: Variable) -> Variable | None:
    """Return the function of a free variable v ~ N(., .) (N,) that a model is whitened by.

    It is the first vector of as many elements, an affine function of v, of which an element depends
    on several of v's, as L v does, and through which alone v acts. None if there is none, or it is
    not one to one, or that of another such variable too. Whether it has a name does not matter.
    """
    if not isinstance(variable.owner.op, NormalRV) or variable.ndim != 1:
        return None
    outputs = [v for v in [*model.basic_RVs, *model.potentials] if v is not variable]
    rivals = [v for v in model.free_RVs if v.ndim and isinstance(v.owner.op, NormalRV)]
    for graph, mixes in _affine_graphs(variable, outputs).items():
        is_vector = mixes and graph.ndim == 1 and shape_of(graph) == shape_of(variable)
        if is_vector and variable not in ancestors(outputs, blockers=[graph]):
            mixed = [v for v in rivals if _affine_graphs(v, [graph]).get(graph)]
            return graph if mixed == [variable] and _is_one_to_one(model, graph, variable) else None
    return None


def are_effects(variable: Variable, function: Variable | None) -> bool:
    """Whether a free normal variable has independent elements, in a `function` of it too."""
    if not isinstance(variable.owner.op, NormalRV):
        return False
    return function is None or not _affine_graphs(variable, [function]).get(function, True)


def name_of(model, variable: Variable, function: Variable | None) -> str:
    """Return what users call a function: the first Deterministic that is affine in it."""
    if function is None:
        return variable.name
    named = (d.name for d in model.deterministics if d in _affine_graphs(function, [d]))
    return next(named, variable.name)


def _affine_graphs(variable, outputs) -> dict[Variable, bool]:
    """Graphs below `outputs` that are affine in a variable, and whether they mix its elements."""
    found, dependent = {variable: False}, {variable}
    for node in io_toposort([variable], outputs):
        given = [v for v in node.inputs if v in dependent]
        if not given or isinstance(node.op, Shape | Shape_i):
            continue
        dependent.update(node.outputs)
        if all(v in found for v in given) and _is_affine(node, given):
            operation = getattr(node.op, "core_op", node.op)
            mixes = isinstance(operation, MIXING) or any(found[v] for v in given)
            found |= dict.fromkeys(node.outputs, mixes)
    return found


def _is_one_to_one(model, graph, variable) -> bool:
    """Whether an affine function of a free variable has a density, near the model's start."""
    if cholesky_factors([graph]):
        return True
    values, (graph,) = model.value_vars, model.replace_rvs_by_values([graph])
    matrix = jacobian(graph, model.rvs_to_values[variable], vectorize=True)
    options = {"point_fn": False, "mode": IN_PYTHON, "on_unused_input": "ignore"}
    rng, point = np.random.default_rng(0), model.initial_point()
    point = [perturbed(point[v.name], 0.3, rng) for v in values]
    matrix = model.compile_fn(matrix, inputs=values, **options)(*point)
    return bool(np.linalg.matrix_rank(matrix) == len(matrix))


def cholesky_factors(graphs: list[Variable]) -> list[Variable]:
    """Return the Cholesky factors that are computed in some graphs."""
    nodes = ((v, v.owner) for v in ancestors(graphs) if v.owner is not None)
    return [v for v, node in nodes if isinstance(getattr(node.op, "core_op", node.op), Cholesky)]


def perturbed(value, scale, rng):
    """Return a value moved at random, if it is a real number."""
    value = np.asarray(value)
    if value.dtype.kind != "f":
        return value
    return (value + scale * rng.standard_normal(value.shape)).astype(value.dtype)


def _is_affine(node: Apply, given: list[Variable]) -> bool:
    """Whether an operation is affine in those of its inputs that are `given`."""
    operation = getattr(node.op, "core_op", node.op)
    positions = [i for i, v in enumerate(node.inputs) if v in given]
    if isinstance(operation, ViewOp | Sum):
        return True
    if isinstance(operation, Elemwise):
        return _is_affine_number(operation.scalar_op, node, positions)
    if isinstance(operation, CumOp):
        return operation.mode == "add"
    if isinstance(operation, OF_ONE):
        return len(positions) == 1
    if isinstance(operation, SolveBase):
        return positions == [1]
    if isinstance(operation, OpFromGraph):  # as pt.einsum is
        inner = _affine_graphs(operation.inner_inputs[positions[0]], operation.inner_outputs)
        return len(positions) == 1 and inner.keys() >= set(operation.inner_outputs)
    return (isinstance(operation, OF_FIRST) and positions == [0]) or (
        isinstance(operation, OF_ALL)
        and all(node.inputs[i].dtype not in discrete_types for i in positions)
    )


def _is_affine_number(operation, node, positions):
    if isinstance(operation, scalar.Cast):
        return node.outputs[0].dtype not in discrete_types
    if isinstance(operation, scalar.Mul):
        return len(positions) == 1
    if isinstance(operation, scalar.TrueDiv):
        return positions == [0]
    return isinstance(operation, OF_ALL_NUMBERS)


def predictions_of(model, linear: Linear) -> list[Variable]:
    """Return free variables that depend on Gaussian ones, and that nothing observed depends on."""
    ends = [*model.observed_RVs, *model.potentials]
    behind = set(ancestors(ends))
    leaves = set(linear.leaves)
    return [
        v
        for v in model.free_RVs
        if v not in behind and v not in leaves and leaves & set(ancestors([v]))
    ]


def is_process(model, variable, start: dict) -> bool:
    """Whether a free variable is Gaussian given its parameters, and dependent by what it is.

    So are areas, random walks and autoregressions; a normal distribution is not, nor a vector with
    a covariance matrix.
    """
    if variable not in model.free_RVs or variable.ndim == 0:
        return False
    is_known = isinstance(variable.owner.op, NormalRV) or (
        isinstance(variable.owner.op, MvNormalRV) and variable.ndim == 1
    )
    return not is_known and is_gaussian(model, [variable], start)


def joined_by_data(model, functions: list[tuple], more: list[tuple]) -> list[tuple]:
    """Return those of more functions that an observation needs beside one of the first."""
    needs = [set(ancestors([v])) for v in [*model.observed_RVs, *model.potentials]]
    found: list[tuple] = []
    for pair in more:
        own, others = (set(Linear(f, [], []).leaves) for f in ([pair], [*functions, *found]))
        joined = any(need & own and need & others for need in needs)
        makers = [set(ancestors([v if f is None else f])) for v, f in [pair, *functions, *found]]
        # A function of which another one is made does not add to it.
        if joined and not makers[0] & others and not any(own & made for made in makers[1:]):
            found.append(pair)
    return found


def linear_part(
    model,
    functions: list[tuple],
    candidates: list[Variable],
    first: list[Variable],
    start: dict,
) -> Linear:
    """Return `functions` and those of the candidates, free variables, that come with them.

    Such a candidate is Gaussian a priori with those before it, the `first` ones and then larger
    ones, and adds to linear predictors that there are without it, or has `MANY_EFFECTS`. `start` is
    an initial point of the model.
    """
    behind_data = set(ancestors([*model.observed_RVs, *model.potentials]))
    makers = set(ancestors([variable if f is None else f for variable, f in functions]))
    found = _with_nodes(model, Linear(functions, [], []))
    for variable in sorted(candidates, key=lambda v: (v not in first, -math.prod(shape_of(v)))):
        if variable not in behind_data or variable in makers:
            continue
        trial = _with_nodes(model, found._replace(others=[*found.others, variable]))
        depends = any(variable in ancestors([node]) for node in trial.nodes)
        is_more = bool(found.nodes) and len(trial.nodes) > len(found.nodes)
        if (
            depends
            and not (is_more and math.prod(shape_of(variable)) < MANY_EFFECTS)
            and not _are_taken_apart(found.nodes, trial.nodes)
            and is_gaussian(model, trial.others, start)
        ):
            found = trial
    return found


def _are_taken_apart(nodes, later) -> bool:
    """Whether some of the affine nodes are affine no more, as `later` ones are parts of them."""
    return any(node is not part and part in ancestors([node]) for node in nodes for part in later)


def _with_nodes(model, linear):
    own = {*linear.variables, *predictions_of(model, linear)}
    outputs = [v for v in [*model.basic_RVs, *model.potentials] if v not in own]
    return linear._replace(nodes=affine_nodes(outputs, linear.leaves))
