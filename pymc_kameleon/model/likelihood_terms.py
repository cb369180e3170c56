"""The log-likelihood as a sum of terms that hold black boxes, each a function of a few numbers."""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.random.op import RandomVariable
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pymc_kameleon.model.black_box import GroupSimulator, Simulator
from pymc_kameleon.model.operations import is_black_box, operations

_log = logging.getLogger("pymc.kameleon")

LARGEST_CUT = 50
"""Inputs of a term beyond which no smaller set of them is looked for."""

MOST_FREE = 2_000_000
"""Free elements of all nodes together beyond which those of further ones are not known."""


class SumOfTerms(NamedTuple):
    """A log-likelihood that is the sum of `values` and of `exact`, which holds no black box.

    Term t of `names`, for messages, has the value `values[t]`, of shape (T,), and is a function of
    `inputs[members[t]]`; `inputs` (n,) are elements of variables of the graph, the free ones first.
    """

    names: list[str]
    values: pt.TensorVariable
    inputs: pt.TensorVariable
    members: list[np.ndarray]
    exact: pt.TensorVariable

    @property
    def n_inputs(self) -> int:
        """Count the inputs of all terms."""
        return 1 + max(int(indices.max()) for indices in self.members)


def find_terms(
    likelihood: Sequence[tuple], value_vars: Sequence, point: dict[str, np.ndarray]
) -> SumOfTerms | None:
    """Find the terms of a log-likelihood that can be learned one by one.

    `likelihood` has pairs (observed variable or potential, its log density graph), `value_vars` are
    those that are sampled, and `point` has a value of every value variable, which gives the shapes.
    None if there is no black box, if there is one term only, or one that depends on everything.
    """
    graphs = [pt.as_tensor(graph) for _, graph in likelihood]
    if not any(map(is_black_box, operations(graphs))):
        return None
    try:
        found = ElementGraph(graphs, value_vars, point)
    except Exception as error:
        _log.debug("Terms of the log-likelihood were not found: %s", error)
        return None
    boxed, exact = [], pt.constant(0.0, dtype="float64")
    for (variable, _), graph in zip(likelihood, graphs, strict=True):
        for part, factor in _addends(graph, found):
            if part in found.boxed:
                boxed.append(Addend(variable.name, part, factor))
            else:
                exact += factor * pt.sum(part, dtype="float64")
    if not boxed:
        return None
    groups, frontiers = _groups(found, [found.nodes_of(addend.part).ravel() for addend in boxed])
    terms, cuts = _terms(groups, _cuts(found, frontiers))
    n_free = sum(np.size(point[variable.name]) for variable in value_vars)
    if len(cuts) < 2 or max(map(len, cuts)) == n_free:
        return None
    inputs, members = _inputs(found, cuts)
    parts = [pt.flatten(addend.part).astype("float64") * addend.factor for addend in boxed]
    zeros = pt.zeros(len(cuts), dtype="float64")
    values = pt.inc_subtensor(zeros[np.concatenate(terms)], pt.concatenate(parts))
    names = _names(boxed, terms, [found.shape_of(addend.part) for addend in boxed], len(cuts))
    return SumOfTerms(names, values, inputs, members, exact)


# addends ------------------------------------------------------------------------------------------


class Addend(NamedTuple):
    """A summand of the log density of the variable `name`: `factor` times the sum of `part`."""

    name: str
    part: pt.TensorVariable
    factor: float | pt.TensorVariable


def _addends(graph, found) -> list[tuple]:
    """Pairs of a variable and a factor, such that the factors times the sums add up to `graph`."""
    done, waiting = [], [(graph, 1.0)]
    while waiting:
        variable, factor = waiting.pop()
        parts = _parts(variable, found) if variable in found.boxed else None
        if parts is None:
            done.append((variable, factor))
        else:
            waiting += [(part, factor * scale) for part, scale in reversed(parts)]
    return done


def _parts(variable, found):
    """Return variables and factors whose sum has the same total; None if it is no such sum."""
    if variable.owner is None:
        return None
    op, inputs = variable.owner.op, variable.owner.inputs
    kind = type(op).__name__
    if kind in ("DimShuffle", "Reshape", "Sum"):
        return [(inputs[0], 1.0)]
    sizes = [int(np.prod(found.shape_of(x))) for x in inputs]
    if kind != "Elemwise" or 0 in sizes:
        return None
    repeats = [np.prod(found.shape_of(variable)) / size for size in sizes]
    scalar = type(op.scalar_op).__name__
    if scalar in ("Add", "Sub"):
        signs = [1.0] + [1.0 if scalar == "Add" else -1.0] * (len(inputs) - 1)
        return [(x, n * sign) for x, n, sign in zip(inputs, repeats, signs, strict=True)]
    if scalar == "Neg":
        return [(inputs[0], -1.0)]
    scales = [x for x, size in zip(inputs, sizes, strict=True) if x in found.known and size == 1]
    if scalar == "TrueDiv" and inputs[1] in scales:
        return [(inputs[0], repeats[0] / pt.flatten(inputs[1])[0].astype("float64"))]
    rest = [x for x in inputs if x not in scales]
    if scalar != "Mul" or len(rest) != 1:
        return None
    factor = repeats[inputs.index(rest[0])]
    for scale in scales:
        factor = factor * pt.flatten(scale)[0].astype("float64")
    return [(rest[0], factor)]


# terms --------------------------------------------------------------------------------------------


def _groups(found, nodes):
    """Return groups of elements that share no call, numbers of each element, and what they need.

    Of each group the second has the nodes from which it is computed that depend on no call. An
    element that depends on no variable belongs to group 0.
    """
    roots = [found.root[of_one] for of_one in nodes]
    is_needed = found.ancestors(np.concatenate(roots))
    children, parents = found.edges
    is_kept = is_needed[children] & found.has_call[children]
    children, parents = children[is_kept], parents[is_kept]
    is_inner = found.has_call[parents]
    n, inner = len(found.root), (children[is_inner], parents[is_inner])
    links = coo_array((np.ones(len(inner[0])), inner), shape=(n, n))
    _, labels = connected_components(links, directed=False)
    frontiers = defaultdict(set)
    for label, parent in zip(labels[children[~is_inner]], parents[~is_inner], strict=True):
        frontiers[int(label)].add(int(parent))
    keys: dict[int, int] = {}
    groups = []
    for of_one in roots:
        own = labels[of_one]
        for label, node in zip(*np.unique([own, of_one], axis=1), strict=True):
            if found.varies[node] and not found.has_call[node]:
                frontiers[int(label)] = {int(node)}
        distinct, first, inverse = np.unique(own, return_index=True, return_inverse=True)
        for label in own[np.sort(first)].tolist():
            if frontiers.get(label):
                keys.setdefault(label, len(keys))
        groups.append(np.array([keys.get(label, 0) for label in distinct.tolist()])[inverse])
    return groups, [sorted(frontiers[label]) for label in keys]


def _terms(groups, cuts):
    """Return the terms of elements, and the inputs of terms: equal inputs are one term."""
    keys: dict[tuple, int] = {}
    term_of = np.array([keys.setdefault(cut, len(keys)) for cut in cuts] or [0])
    return [term_of[group] for group in groups], list(keys)


def _cuts(found, frontiers):
    """Return the inputs of groups; the same for those that the same free elements determine.

    But not if these would need more than twice as many inputs as each of them.
    """
    cuts = [_cut(found, frontier, LARGEST_CUT) for frontier in frontiers]
    alike = defaultdict(list)
    for i, frontier in enumerate(frontiers):
        free = [found.free_of.get(node) for node in frontier]
        alike[i if None in free else frozenset().union(*free)].append(i)
    for which in alike.values():
        most = 2 * max(len(cuts[i]) for i in which)
        joint = set().union(*(frontiers[i] for i in which))
        cut = _cut(found, joint, most) if len(which) > 1 else cuts[which[0]]
        if len(cut) <= most:
            for i in which:
                cuts[i] = cut
    return cuts


def _cut(found, frontier, most) -> tuple[int, ...]:
    """Return the fewest nodes that determine those of `frontier`, all of it if they are many.

    Paths from the free elements to the frontier, no two of which share a node, are as many as these
    nodes (Menger's theorem). Of several such sets it is the one nearest to the free elements.
    """
    fixed = {node for node in frontier if found.is_free[node]}
    free = {node: found.free_of.get(node) for node in frontier if node not in fixed}
    if None in free.values():
        return tuple(sorted(frontier))
    free = {node: own - fixed for node, own in free.items() if own - fixed}
    if sum(map(len, free.values())) == len(set().union(*free.values())):
        ends = {min(own) if len(own) == 1 else node for node, own in free.items()}
        return tuple(sorted(fixed | ends))
    children = _between(found, free, fixed)
    capacity: dict = defaultdict(dict)

    def connect(start, end, size):
        capacity[start][end] = size
        capacity[end].setdefault(start, 0)

    for node, computed in children.items():
        connect((node, "in"), (node, "out"), 1 if found.variable[node] >= 0 else np.inf)
        for child in computed:
            connect((node, "out"), (child, "in"), np.inf)
        if found.is_free[node]:
            connect("free", (node, "in"), np.inf)
    for node in free:
        connect((node, "out"), "end", np.inf)
    for _ in range(most + 1):
        before = _reached(capacity)
        if "end" not in before:
            cut = {v for v in children if (v, "in") in before and (v, "out") not in before}
            return tuple(sorted(fixed | cut))
        end = "end"
        while end != "free":
            capacity[before[end]][end] -= 1
            capacity[end][before[end]] += 1
            end = before[end]
    return min(tuple(sorted(fixed.union(*free.values()))), tuple(sorted(frontier)), key=len)


def _between(found, ends, fixed):
    """Return the nodes that `ends` are computed from but through `fixed`, with what needs each."""
    children: dict[int, list[int]] = {node: [] for node in ends}
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        for parent in found.parents_of(node):
            if parent not in fixed:
                if parent not in children:
                    children[parent] = []
                    waiting.append(parent)
                children[parent].append(node)
    return children


def _reached(capacity):
    """Return what is reached from the free elements, with what comes before it on the way."""
    before: dict = {"free": None}
    queue = deque(["free"])
    while queue and "end" not in before:
        start = queue.popleft()
        for end, size in capacity[start].items():
            if size > 0 and end not in before:
                before[end] = start
                queue.append(end)
    return before


def _inputs(found, cuts):
    """Return the graph of the distinct inputs, and for each term which of them are its own."""
    nodes = np.unique(np.concatenate([np.array(cut, dtype=np.int64) for cut in cuts]))
    variables, elements = found.variable[nodes], found.element[nodes]
    order = np.lexsort((elements, variables))
    position = np.empty(len(found.root), dtype=np.int64)
    position[nodes[order]] = np.arange(len(nodes))
    parts = []
    for number in np.unique(variables):
        which = np.sort(elements[variables == number])
        parts.append(pt.flatten(found.variables[number])[which].astype("float64"))
    inputs = parts[0] if len(parts) == 1 else pt.concatenate(parts)
    return inputs, [np.sort(position[np.array(cut)]) for cut in cuts]


def _names(addends: Iterable[Addend], terms, shapes, n) -> list[str]:
    """Return names of the terms: of their variables, with an index if there are several of one."""
    found: list[dict[str, str]] = [{} for _ in range(n)]
    for addend, of_one, shape in zip(addends, terms, shapes, strict=True):
        distinct, first, count = np.unique(of_one, return_index=True, return_counts=True)
        for term, start, size in zip(distinct, first, count, strict=True):
            index = [int(i) for i in np.unravel_index(start, shape)]
            is_row = size == np.prod(shape[1:]) and not any(index[1:])
            label = f"[{', '.join(map(str, index[:1] if is_row else index))}]" if index else ""
            found[term].setdefault(addend.name, label)
    n_terms: dict[str, int] = defaultdict(int)
    for names in found:
        for name in names:
            n_terms[name] += 1
    return [
        ", ".join(name + (label if n_terms[name] > 1 else "") for name, label in names.items())
        for names in found
    ]


# elements -----------------------------------------------------------------------------------------

NODE = np.dtype(
    [
        ("root", np.int64),
        ("variable", np.int64),
        ("element", np.int64),
        ("value", np.float64),
        ("varies", np.bool_),
        ("is_free", np.bool_),
        ("has_call", np.bool_),
    ]
)
"""What is known of a node: the node that it is a function of, if that is one, and an element of a
variable that has its value; -1 for a node that stands for several elements or a call."""

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

ALONG_AXIS = ("CumOp", "Softmax", "LogSoftmax")
"""Operations that go along `axis`."""

LARGEST_PRODUCT = 20_000_000
"""Numbers that a matrix product is found with, element by element."""


class ElementGraph:
    """Which elements of the variables of some graphs depend on which others.

    Each element of a variable has a node; elements of one node have the same value. Node 0 is the
    constant 0. The attributes, arrays by node, are as in `NODE`, and `edges` (children, parents)
    lead from a node to the roots of those that it is computed from, if it is its own root.
    `variables` has the variables by number, the sampled ones first; those in `known` depend on no
    variable of the model, and those in `boxed` on a black box. A call is a node too.
    """

    root: np.ndarray
    variable: np.ndarray
    element: np.ndarray
    varies: np.ndarray
    is_free: np.ndarray
    has_call: np.ndarray

    def __init__(self, graphs, value_vars, point):
        self.variables, self.known, self.boxed = [], set(), set()
        self._values, self._nodes, self._found = {}, {}, {}
        self._table, self._edges = np.zeros(1, dtype=NODE), [np.empty((2, 0), dtype=np.int64)]
        self._table["variable"] = -1
        for variable in value_vars:
            self._start(variable, point, is_sampled=True)
        for variable in ancestors(graphs):
            if variable.owner is None and variable not in self._values:
                self._start(variable, point)
        with np.errstate(all="ignore"):
            for node in io_toposort([], graphs):
                self._read(node)
        for name in ("root", "variable", "element", "varies", "is_free", "has_call"):
            setattr(self, name, self._table[name])
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
            nodes = self._new(len(distinct), -1, value=distinct)
            self._nodes[variable] = nodes[inverse].reshape(values.shape)
        return self._nodes[variable]

    def parents_of(self, node: int) -> list[int]:
        """Nodes that a node is computed from."""
        return self.edges[1, self._starts[node] : self._starts[node + 1]].tolist()

    @cached_property
    def free_of(self) -> dict[int, frozenset]:
        """Free elements of nodes that depend on no call, as far as they are not too many."""
        free = {node: frozenset([node]) for node in np.flatnonzero(self.is_free).tolist()}
        n = 0
        for node in np.unique(self.edges[0][~self.has_call[self.edges[0]]]).tolist():
            found = [free[parent] for parent in self.parents_of(node)]
            free[node] = found[0] if len(found) == 1 else frozenset().union(*found)
            n += len(free[node]) if len(found) > 1 else 0
            if n > MOST_FREE:
                break
        return free

    def ancestors(self, nodes: np.ndarray) -> np.ndarray:
        """Whether each node is one of `nodes` or of those that they are computed from."""
        is_ancestor = np.zeros(len(self.root), dtype=np.bool_)
        is_ancestor[nodes] = True
        for children, parents in reversed(self._edges):
            is_ancestor[parents[is_ancestor[children]]] = True
        return is_ancestor

    # nodes

    def _number(self, variable):
        self.variables.append(variable)
        return len(self.variables) - 1

    def _new(self, n, variable, elements=None, **known):
        """Make `n` nodes for elements of the variable with a number, by default the first ones."""
        new = np.zeros(n, dtype=NODE)
        nodes = new["root"] = len(self._table) + np.arange(n)
        new["variable"], new["value"] = variable, np.nan
        new["element"] = np.arange(n) if elements is None else elements
        for name, value in known.items():
            new[name] = value
        self._table = np.concatenate([self._table, new])
        return nodes

    def _functions(self, rows, variable=-1, elements=None, is_call=False):
        """Nodes (n,) that are functions of the nodes in each of `rows` (n, k).

        Equal rows have the same node. Negative numbers tell rows apart, and are no nodes.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if rows.shape[1] == 0:
            rows = np.zeros((len(rows), 1), dtype=np.int64)
        keys = rows.view(np.dtype((np.void, 8 * rows.shape[1])))[:, 0]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        elements = first if elements is None else elements[first]
        parents = np.maximum(rows[first], 0)
        has_call = np.any(self._table["has_call"][parents], axis=1) | is_call
        roots = np.where(self._table["varies"][parents], self._table["root"][parents], -1)
        roots.sort(axis=1)
        is_distinct = roots >= 0
        is_distinct[:, 1:] &= roots[:, 1:] != roots[:, :-1]
        count = is_distinct.sum(axis=1)
        nodes = self._new(len(first), variable, elements, varies=count > 0, has_call=has_call)
        last = roots[:, -1]
        is_one = (count == 1) & (self._table["variable"][last] >= 0) & (not is_call)
        self._table["root"][nodes[is_one]] = last[is_one]
        is_distinct[is_one] = False
        self._edges.append(
            np.array([np.repeat(nodes, is_distinct.sum(axis=1)), roots[is_distinct]])
        )
        return nodes[inverse.ravel()]

    # operations

    def _start(self, variable, point, is_sampled=False):
        if isinstance(variable, Constant):
            self._know(variable, variable.data)
        elif isinstance(variable, SharedVariable):
            self._know(variable, variable.get_value(borrow=True))
        else:
            value = self._values[variable] = np.asarray(point[variable.name])
            is_new = {"varies": is_sampled, "is_free": is_sampled}
            nodes = self._new(value.size, self._number(variable), **is_new)
            self._nodes[variable] = nodes.reshape(value.shape)

    def _know(self, variable, value):
        self.known.add(variable)
        self._values[variable] = value

    def _read(self, node):
        op, inputs, outputs = node.op, node.inputs, node.outputs
        if isinstance(op, OpFromGraph):
            self._read_inside(node)
            return
        values = [self._values[x] for x in inputs]
        inner_ops = operations(op.inner_outputs) if isinstance(op, HasInnerGraph) else []
        is_opaque = any(map(is_black_box, [op, *inner_ops]))
        found = _at_point(node, values)
        is_known = all(x in self.known for x in inputs) and not isinstance(op, RandomVariable)
        if not is_opaque and (is_known or type(op).__name__ in ("Shape", "Shape_i")):
            for output, value in zip(outputs, found, strict=True):
                self._know(output, value)
            return
        self._values.update(zip(outputs, found, strict=True))
        if is_opaque or any(x in self.boxed for x in inputs):
            self.boxed.update(outputs)
        key = op, *(self._key(x) for x in inputs)
        if key not in self._found:
            nodes = self._call(node, values) if is_opaque else self._exact(node)
            self._found[key] = nodes or self._opaque(node, self._all_of(inputs))
        self._nodes.update(zip(outputs, self._found[key], strict=True))

    def _read_inside(self, node):
        inner = _inlined(node)
        for variable in ancestors(inner, blockers=node.inputs):
            if variable.owner is None and variable not in self._values:
                self._start(variable, {})
        for inner_node in io_toposort(node.inputs, inner):
            self._read(inner_node)
        for output, same in zip(node.outputs, inner, strict=True):
            self._values[output], self._nodes[output] = self._values[same], self.nodes_of(same)
            for group in (self.known, self.boxed):
                if same in group:
                    group.add(output)

    def _key(self, variable):
        """Tell what a variable holds: inputs of equal keys give the same outputs."""
        value = self._values[variable] if variable in self.known else self._nodes[variable]
        if not isinstance(value, np.ndarray | np.generic):
            return id(variable)
        return variable in self.known, value.dtype.str, value.shape, value.tobytes()

    def _all_of(self, inputs):
        """Nodes of all elements of some inputs, as one row; constants are left out."""
        rows = [self._nodes[x].ravel() for x in inputs if x not in self.known]
        return np.concatenate([np.empty(0, dtype=np.int64), *rows])[None]

    def _opaque(self, node, rows, is_call=False):
        """Nodes of outputs whose first axes have `rows` of inputs, on all of which they depend."""
        hubs = self._functions(rows, is_call=is_call)
        found = []
        for output in node.outputs:
            shape = self.shape_of(output)
            size = int(np.prod(shape))
            nodes = np.repeat(hubs, size // len(hubs)) if size else hubs[:0]
            if not is_call:
                each = np.array([nodes, -1 - np.arange(size)]).T
                nodes = self._functions(each, self._number(output))
            found.append(nodes.reshape(shape))
        return found

    def _exact(self, node):
        """Nodes of the outputs of an operation of PyTensor; None if they may depend on all."""
        try:
            found = self._known_operation(node)
        except Exception as error:
            _log.debug("The elements of %s are not told apart: %s", node, error)
            return None
        if found is None or [x.shape for x in found] != list(map(self.shape_of, node.outputs)):
            return None
        return found

    def _known_operation(self, node):
        op, inputs, output = node.op, node.inputs, node.outputs[0]
        kind, n = type(op).__name__, len(inputs)
        shape = self.shape_of(output)
        if kind in PASSES:
            return [self.nodes_of(inputs[0])]
        if kind in MOVES:
            return self._moved(node, [0])
        if kind in SETS and op.set_instead_of_inc:
            return self._moved(node, [0, 1])
        if kind == "MakeVector":
            return [np.array([self.nodes_of(x) for x in inputs]).reshape(n)]
        if kind == "Join":
            return self._moved(node, [i for i in range(n) if inputs[i].ndim])
        if kind == "Elemwise" and len(node.outputs) == 1:
            return [self._elementwise(op.scalar_op, inputs, output, shape)]
        core = type(op.core_op).__name__ if kind == "Blockwise" else kind
        if core in ("Dot", "BatchedDot"):
            return [self._product(*map(self.nodes_of, inputs), self._number(output)).reshape(shape)]
        if kind == "Blockwise":
            return self._opaque(node, self._batches(inputs, op.batch_ndim(node), shape))
        axes = getattr(op, "axis", None)
        if isinstance(op, CAReduce):
            nodes = self.nodes_of(inputs[0])
            axes = range(nodes.ndim) if axes is None else [i % nodes.ndim for i in axes]
            last = np.moveaxis(nodes, list(axes), range(-len(axes), 0))
            rows = last.reshape(int(np.prod(shape)), -1)
            return [self._functions(rows, self._number(output)).reshape(shape)]
        if kind in ALONG_AXIS and axes is not None:
            return [self._along(self.nodes_of(inputs[0]), axes, self._number(output))]
        return None

    def _moved(self, node, which):
        """Nodes where an operation puts those of the inputs `which`; None if it depends on more."""
        inputs, values = list(node.inputs), []
        for i, variable in enumerate(inputs):
            if i in which:
                inputs[i] = pt.TensorType("float64", variable.type.shape)()
                values.append(self.nodes_of(variable).astype(np.float64))
            elif variable in self.known:
                values.append(self._values[variable])
            else:
                return None
        found = _performed(node.op.make_node(*inputs), values)
        return [np.asarray(nodes).astype(np.int64) for nodes in found]

    def _elementwise(self, scalar, inputs, output, shape):
        nodes = [np.broadcast_to(self.nodes_of(x), shape) for x in inputs]
        kind = type(scalar).__name__
        if kind == "Second":
            return nodes[1]
        if kind == "Switch" and inputs[0] in self.known:
            return np.where(self._values[inputs[0]], nodes[1], nodes[2])
        rows = np.stack([x.ravel() for x in nodes], axis=1)
        if kind == "Mul":
            rows[np.any(self._table["value"][rows] == 0.0, axis=1)] = 0
        return self._functions(rows, self._number(output)).reshape(shape)

    def _product(self, a, b, number):
        """Nodes of a matrix product; what is multiplied by the constant 0 is left out."""
        a = (a if a.ndim > 1 else a[None])[..., :, None, :]
        b = np.swapaxes(b if b.ndim > 1 else b[:, None], -1, -2)[..., None, :, :]
        shape = np.broadcast_shapes(a.shape, b.shape)
        if np.prod(shape) > LARGEST_PRODUCT:
            raise ValueError("a large matrix product")
        value = self._table["value"]
        is_zero = (value[a] == 0.0) | (value[b] == 0.0)
        rows = np.concatenate([np.where(is_zero, 0, a), np.where(is_zero, 0, b)], axis=-1)
        return self._functions(rows.reshape(-1, 2 * shape[-1]), number).reshape(shape[:-1])

    def _batches(self, inputs, n_axes, shape):
        """Nodes of the inputs of an operation that is done for each index of its first axes."""
        batch, rows = shape[:n_axes], []
        for variable in inputs:
            if variable not in self.known:
                nodes = self._nodes[variable]
                nodes = np.broadcast_to(nodes, batch + nodes.shape[n_axes:])
                rows.append(nodes.reshape(int(np.prod(batch)), -1))
        markers = -1 - np.arange(int(np.prod(batch)))
        return np.concatenate([markers[:, None], *rows], axis=1)

    def _along(self, nodes, axis, number):
        """Nodes of what depends on all elements along an axis."""
        last = np.moveaxis(nodes, axis, -1)
        places = np.moveaxis(np.arange(nodes.size).reshape(nodes.shape), axis, -1)
        hubs = self._functions(last.reshape(-1, last.shape[-1]))
        rows = np.array([np.repeat(hubs, last.shape[-1]), -1 - places.ravel()]).T
        found = self._functions(rows, number, places.ravel()).reshape(last.shape)
        return np.moveaxis(found, -1, axis)

    def _call(self, node, values):
        """Nodes of what a black box returns: of one call, or of one for each group or row."""
        op, unknown = node.op, [x for x in node.inputs if x not in self.known]
        if isinstance(op, GroupSimulator):
            has_rows, n = op.has_rows, op.shape[0]
        else:
            n = max((np.size(self._values[x]) for x in unknown), default=1)
            has_rows = [
                x in unknown and np.size(v) == n for x, v in zip(node.inputs, values, strict=True)
            ]
            if n < 2 or not _is_by_rows(node, values, unknown, n, has_rows):
                return self._opaque(node, self._all_of(unknown), is_call=True)
        rows = [np.empty((n, 0), dtype=np.int64)]
        for variable, is_row in zip(node.inputs, has_rows, strict=True):
            if variable in unknown:
                nodes = self._nodes[variable]
                rows.append(nodes.reshape(n, -1) if is_row else np.tile(nodes.ravel(), (n, 1)))
        return self._opaque(node, np.concatenate(rows, axis=1), is_call=True)


def _is_by_rows(node, values, inputs, n, has_rows) -> bool:
    """Whether each number that somebody's operation returns depends on one row of its inputs.

    This is tried at the point: with a little change of the first row, and then of the last one, of
    what depends on variables, no other number may change.
    """
    shapes = [np.shape(v) for x, v in zip(node.inputs, values, strict=True) if x in inputs]
    simulator = isinstance(getattr(node.op, "op", node.op), Simulator)
    if simulator or len(node.outputs) != 1 or node.outputs[0].type.ndim != 1:
        return False
    if any(len(shape) > 1 or np.prod(shape) not in (1, n) for shape in shapes):
        return False
    try:
        before = _performed(node, values)[0]
        for row in (0, n - 1):
            changed = [np.array(value, copy=True) for value in values]
            for value, is_row in zip(changed, has_rows, strict=True):
                if is_row:
                    value[row] += 1e-3 * abs(value[row]) + 1e-6
            after = _performed(node, changed)[0]
            is_other = (before != after) & ~(np.isnan(before) & np.isnan(after))
            if len(before) != n or np.flatnonzero(is_other).tolist() != [row]:
                return False
    except Exception as error:
        _log.debug("The rows of %s are not told apart: %s", node.op, error)
        return False
    return True


def _inlined(node):
    """Return the graph inside of an operation, as one of its inputs."""
    op = node.op
    replaced = dict(zip(op.fgraph.inputs, node.inputs, strict=True))
    if hasattr(op.fgraph, "bind"):
        return op.fgraph.bind(replaced)
    return clone_replace(op.fgraph.outputs, replaced)


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
