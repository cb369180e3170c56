"""What each element of each variable of some graphs is computed from.

Graphs are read once, operation by operation, with values at one point, which give the shapes. An
element gets the number of a node; elements that are the same function of the same ones share it.
"""

import logging

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.tensor.elemwise import CAReduce

from pymc_kameleon.model.black_box import GroupSimulator, Simulator
from pymc_kameleon.model.operations import is_black_box, operations

_log = logging.getLogger("pymc.kameleon")

MOVES = (
    *("Subtensor", "AdvancedSubtensor", "AdvancedSubtensor1", "DimShuffle", "Reshape", "Alloc"),
    *("Split", "ExtractDiag", "Repeat", "JoinDims", "SplitDims"),
)
"""Operations that move the elements of their first input, as the other inputs say."""

SETS = ("IncSubtensor", "AdvancedIncSubtensor", "AdvancedIncSubtensor1")
"""Operations that may put elements of the second input in the place of those of the first."""

PASSES = (
    *("TensorFromScalar", "ScalarFromTensor", "CheckAndRaise", "Assert", "CheckParameterValue"),
    *("SpecifyShape", "ViewOp", "DeepCopyOp", "CpuContiguous", "OutputGuard"),
)
"""Operations whose output is their first input."""

LARGEST_PRODUCT = 20_000_000
"""Numbers that a matrix product is found with, element by element."""

NAMES = ["root", "variable", "element", "varies", "has_call"]
NODE = np.dtype({"names": NAMES, "formats": [np.int64] * 3 + [np.bool_] * 2})
"""The node that a node is a function of, or itself; the number of a variable and the index in it of
an element that has its value, -1 if it stands for several or for a call; whether it depends on a
sampled variable, and on a black box."""


class ElementGraph:
    """Which elements of the variables of some graphs depend on which others.

    Node 0 is the constant 0. The attributes of `NODE` are arrays by node. `edges` (children,
    parents) lead from a node that is its own root to the roots of those that it is computed from.
    `variables` has the variables by number, the sampled ones first; `is_free` tells their nodes.
    Variables in `known` depend on no variable of the model, those in `boxed` on a black box.
    """

    def __init__(self, graphs, value_vars, point):
        self.variables, self.known, self.boxed = [], set(), set()
        self._values, self._nodes, self._found = {}, {}, {}
        self._table, self._edges = np.zeros(1, dtype=NODE), [np.empty((2, 0), dtype=np.int64)]
        self._table["variable"] = -1
        for variable in value_vars:
            self._start(variable, point, varies=True)
        n_free = len(self._table)
        for variable in ancestors(graphs):
            if variable.owner is None and variable not in self._values:
                self._start(variable, point)
        with np.errstate(all="ignore"):
            for node in io_toposort([], graphs):
                self._read(node)
        columns = (self._table[name] for name in NAMES)
        self.root, self.variable, self.element, self.varies, self.has_call = columns
        self.is_free = (np.arange(len(self.root)) < n_free) & self.varies
        self.edges = np.concatenate(self._edges, axis=1)
        self._starts = np.searchsorted(self.edges[0], np.arange(len(self.root) + 1))

    def shape_of(self, variable) -> tuple[int, ...]:
        """Shape of a variable at the point."""
        return np.shape(self._values[variable])

    def nodes_of(self, variable) -> np.ndarray:
        """Nodes of the elements of a variable."""
        if variable not in self._nodes:
            values = np.asarray(self._values[variable], dtype=np.float64)
            distinct, inverse = np.unique(values, return_inverse=True)
            nodes = np.where(distinct == 0.0, 0, self._new(len(distinct)))
            self._nodes[variable] = nodes[inverse].reshape(values.shape)
        return self._nodes[variable]

    def parents_of(self, node: int) -> np.ndarray:
        """Nodes that a node is computed from."""
        return self.edges[1, self._starts[node] : self._starts[node + 1]]

    # nodes

    def _start(self, variable, point, varies=False):
        if isinstance(variable, Constant | SharedVariable):
            is_constant = isinstance(variable, Constant)
            self._values[variable] = variable.data if is_constant else variable.get_value()
            self.known.add(variable)
        else:
            value = self._values[variable] = np.asarray(point[variable.name])
            nodes = self._new(value.size, variable, element=np.arange(value.size), varies=varies)
            self._nodes[variable] = nodes.reshape(value.shape)

    def _new(self, n, variable=None, **known):
        """Make `n` nodes, for elements of a variable if one is given."""
        new = np.zeros(n, dtype=NODE)
        nodes = new["root"] = len(self._table) + np.arange(n)
        new["variable"] = -1 if variable is None else len(self.variables)
        self.variables += [] if variable is None else [variable]
        for name, value in known.items():
            new[name] = value
        self._table = np.concatenate([self._table, new])
        return nodes

    def _functions(self, rows, variable=None, is_call=False):
        """Nodes (n,) that are functions of the nodes in each of `rows` (n, k).

        Equal rows have the same node. Negative numbers tell rows apart, and are no nodes.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        keys = rows.view(np.dtype((np.void, 8 * rows.shape[1])))[:, 0]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        parents = np.maximum(rows[first], 0)
        has_call = np.any(self._table["has_call"][parents], axis=1) | is_call
        roots = np.where(self._table["varies"][parents], self._table["root"][parents], -1)
        roots.sort(axis=1)
        is_distinct = roots >= 0
        is_distinct[:, 1:] &= roots[:, 1:] != roots[:, :-1]
        count, last = is_distinct.sum(axis=1), roots[:, -1]
        known = {"element": first, "varies": count > 0, "has_call": has_call}
        nodes = self._new(len(first), variable, **known)
        is_one = (count == 1) & (self._table["variable"][last] >= 0) & (not is_call)
        self._table["root"][nodes[is_one]] = last[is_one]
        is_distinct[is_one] = False
        pairs = np.repeat(nodes, is_distinct.sum(axis=1)), roots[is_distinct]
        self._edges.append(np.array(pairs))
        return nodes[inverse.ravel()]

    def _together(self, node, output, batch=()):
        """Nodes of an output, each a function of all inputs, or of those at an index of `batch`."""
        shape = self.shape_of(output)
        parts = [self._nodes[x] for x in node.inputs if x not in self.known]
        hubs = self._functions(_rows(parts, batch))
        hubs = hubs.reshape(batch + (1,) * (len(shape) - len(batch)))
        each = np.broadcast_to(hubs, shape).ravel()
        return self._functions(np.array([each, -1 - np.arange(each.size)]).T, output).reshape(shape)

    # operations

    def _read(self, node):
        op, inputs, outputs = node.op, node.inputs, node.outputs
        values = [self._values[x] for x in inputs]
        inner = operations(op.inner_outputs) if isinstance(op, HasInnerGraph) else ()
        is_opaque = any(map(is_black_box, [op, *inner]))
        self._values.update(zip(outputs, _at_point(node, values), strict=True))
        is_known = self.known.issuperset(inputs) or type(op).__name__ in ("Shape", "Shape_i")
        if is_known and not is_opaque:
            self.known.update(outputs)
            return
        if is_opaque or not self.boxed.isdisjoint(inputs):
            self.boxed.update(outputs)
        # Operations of equal inputs have equal outputs.
        nodes = {x: self._nodes[x] for x in inputs if x not in self.known}
        key = op, *((nodes[x].shape, nodes[x].tobytes()) if x in nodes else x for x in inputs)
        if key not in self._found:
            self._found[key] = self._call(node, values) if is_opaque else self._exact(node)
        self._nodes.update(zip(outputs, self._found[key], strict=True))

    def _exact(self, node):
        """Nodes of the outputs of an operation of PyTensor; they depend on all if it is unknown."""
        shapes = [self.shape_of(output) for output in node.outputs]
        try:
            found = self._known_operation(node, shapes[0])
            if found is not None and [x.shape for x in found] == shapes:
                return found
        except Exception as error:
            _log.debug("The elements of %s are not told apart: %s", node, error)
        return [self._together(node, output) for output in node.outputs]

    def _known_operation(self, node, shape):
        op, inputs, output = node.op, node.inputs, node.outputs[0]
        kind = type(op).__name__
        if kind in PASSES:
            return [self.nodes_of(inputs[0])]
        if kind in MOVES:
            return self._moved(node, [0])
        if kind in SETS and op.set_instead_of_inc:
            return self._moved(node, [0, 1])
        if kind in ("Join", "MakeVector"):
            is_joined = [x.ndim > 0 or kind == "MakeVector" for x in inputs]
            return self._moved(node, np.flatnonzero(is_joined))
        core = type(op.core_op).__name__ if kind == "Blockwise" else kind
        if kind == "Elemwise" and len(node.outputs) == 1:
            each = [np.broadcast_to(self.nodes_of(x), shape).ravel() for x in inputs]
            found = self._functions(np.stack(each, axis=1), output)
        elif core in ("Dot", "BatchedDot"):
            found = self._functions(_factors(*map(self.nodes_of, inputs)), output)
        elif kind == "Blockwise":
            found = self._together(node, output, shape[: op.batch_ndim(node)])
        elif isinstance(op, CAReduce):
            nodes = self.nodes_of(inputs[0])
            axes = range(nodes.ndim) if op.axis is None else op.axis
            last = np.moveaxis(nodes, list(axes), range(-len(axes), 0))
            found = self._functions(last.reshape(int(np.prod(shape)), -1), output)
        else:
            return None
        return [found.reshape(shape)]

    def _moved(self, node, which):
        """Nodes where an operation puts those of the inputs `which`; None if it depends on more."""
        inputs, values = [], []
        for i, x in enumerate(node.inputs):
            is_own = i in which
            if not is_own and x not in self.known:
                return None
            inputs.append(pt.TensorType("float64", x.type.shape)() if is_own else x)
            values.append(self.nodes_of(x).astype(np.float64) if is_own else self._values[x])
        found = _performed(node.op.make_node(*inputs), values)
        return [nodes.astype(np.int64) for nodes in found]

    def _call(self, node, values):
        """Nodes of what a black box returns: of one call, or of one for each group or row."""
        shapes = [self.shape_of(output) for output in node.outputs]
        varies = [x not in self.known for x in node.inputs]
        if isinstance(node.op, GroupSimulator):
            n, has_rows = node.op.shape[0], node.op.has_rows
        else:
            n, has_rows = _rows_of(node, values, varies, shapes)
        parts = [
            self._nodes[x].reshape(n if is_row else 1, -1)
            for x, is_row in zip(node.inputs, has_rows, strict=True)
            if x not in self.known
        ]
        calls = self._functions(_rows(parts, (n,)), is_call=True)
        return [np.repeat(calls, int(np.prod(shape)) // n).reshape(shape) for shape in shapes]


def inlined(graphs: list) -> list:
    """Return graphs in which operations that are graphs themselves are replaced by these."""
    while nodes := [x for x in io_toposort([], graphs) if isinstance(x.op, OpFromGraph)]:
        fgraph = nodes[0].op.fgraph
        inputs = dict(zip(fgraph.inputs, nodes[0].inputs, strict=True))
        has_bind = hasattr(fgraph, "bind")
        inner = fgraph.bind(inputs) if has_bind else clone_replace(fgraph.outputs, inputs)
        graphs = graph_replace(graphs, dict(zip(nodes[0].outputs, inner, strict=True)))
    return graphs


def _factors(a, b):
    """Nodes that each element of a matrix product is made of, but what is multiplied by 0."""
    a = (a if a.ndim > 1 else a[None])[..., :, None, :]
    b = np.swapaxes(b if b.ndim > 1 else b[:, None], -1, -2)[..., None, :, :]
    if np.prod(np.broadcast_shapes(a.shape, b.shape)) > LARGEST_PRODUCT:
        raise ValueError("a large matrix product")
    is_zero = (a == 0) | (b == 0)
    rows = np.concatenate([np.where(is_zero, 0, a), np.where(is_zero, 0, b)], axis=-1)
    return rows.reshape(-1, rows.shape[-1])


def _rows(parts, batch):
    """Nodes of inputs of what is done for each index of the axes `batch`, which tell rows apart."""
    n = int(np.prod(batch))
    rows = [np.broadcast_to(x, batch + x.shape[len(batch) :]).reshape(n, -1) for x in parts]
    return np.concatenate([-1 - np.arange(n)[:, None], *rows], axis=1)


def _rows_of(node, values, varies, returned):
    """Return how many calls somebody's operation stands for, and which inputs have a row for each.

    `returned` has the shapes of its outputs. It is one call for each row if this is so at the
    point: with a little change of a random half of the rows, and then of the others, some numbers
    of this half change, and no others do.
    """
    shapes = {np.shape(value) for value, is_own in zip(values, varies, strict=True) if is_own}
    n = max((int(np.prod(shape)) for shape in shapes), default=1)
    has_rows = [np.size(x) == n and is_own for x, is_own in zip(values, varies, strict=True)]
    alone = 1, [False] * len(values)
    is_simulator = isinstance(getattr(node.op, "op", node.op), Simulator)
    if is_simulator or returned != [(n,)] or n < 2 or not shapes <= {(), (1,), (n,)}:
        return alone
    is_first = np.random.default_rng(0).permutation(n) < n // 2
    before = _performed(node, values)[0]
    for half in (is_first, ~is_first):
        changed = [np.array(value, copy=True) for value in values]
        for value, is_row in zip(changed, has_rows, strict=True):
            if is_row:
                value[half] += 1e-3 * abs(value[half]) + 1e-6
        after = _performed(node, changed)[0]
        is_other = (before != after) & ~(np.isnan(before) & np.isnan(after))
        if is_other[~half].any() or not is_other.any():
            return alone
    return n, has_rows


def _at_point(node, values):
    """Return values of the outputs, those that a black box had before instead of a call."""
    simulator = getattr(node.op, "op", node.op)
    if isinstance(simulator, Simulator):
        last = np.asarray(simulator.last, dtype=np.float64)
        return [last, np.zeros(last.shape[: node.outputs[-1].ndim])][: len(node.outputs)]
    if type(node.op).__name__ in PASSES:
        return [values[0]]
    if is_black_box(node.op) and all(None not in x.type.shape for x in node.outputs):
        return [np.ones(x.type.shape, dtype=x.dtype) for x in node.outputs]
    return _performed(node, values)


def _performed(node, values):
    """Return the outputs of an operation at values of its inputs."""
    storage = {x: [value] for x, value in zip(node.inputs, values, strict=True)}
    storage |= {output: [None] for output in node.outputs}
    is_done = {x: [x in node.inputs] for x in storage}
    node.op.make_thunk(node, storage, is_done, [], impl="py")()
    return [storage[output][0] for output in node.outputs]
