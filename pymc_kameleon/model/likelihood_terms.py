"""The log-likelihood as a sum of terms that hold black boxes, each a function of a few numbers.

Log densities are split into their summands, and these into groups of elements that share no call
of a black box. The inputs of a group are the fewest elements that determine it, a minimal cut;
groups of the same inputs are one term.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

from pymc_kameleon.model.elements import ElementGraph, inlined
from pymc_kameleon.model.operations import is_black_box, operations

_log = logging.getLogger("pymc.kameleon")

MOST_STEPS = 5_000_000
"""Of the search for the inputs of all groups together, about five seconds; a group whose share is
too small has what its calls need for inputs."""


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
        """Number of elements of `inputs`."""
        return 1 + max(int(own.max()) for own in self.members)


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
        graphs = inlined(graphs)
        found = ElementGraph(graphs, value_vars, point)
    except Exception as error:
        _log.debug("Terms of the log-likelihood were not found: %s", error)
        return None
    boxed, exact = [], pt.constant(0.0, dtype="float64")
    for (variable, _), graph in zip(likelihood, graphs, strict=True):
        for part, factor in _addends(graph, found):
            if part in found.boxed:
                boxed.append((variable.name, part, factor))
            else:
                exact += factor * pt.sum(part, dtype="float64")
    if not boxed:
        return None
    nodes = np.concatenate([found.nodes_of(part).ravel() for _, part, _ in boxed])
    groups, frontiers = _groups(found, found.root[nodes])
    cut_of = _cuts(found, frontiers)
    cuts = {cut: i for i, cut in enumerate(dict.fromkeys(cut_of))}
    if len(cuts) < 2 or max(map(len, cuts)) == np.count_nonzero(found.is_free):
        return None
    terms = np.array([cuts[cut] for cut in cut_of])[groups]
    parts = [pt.flatten(part).astype("float64") * factor for _, part, factor in boxed]
    zeros = pt.zeros(len(cuts), dtype="float64")
    values = pt.inc_subtensor(zeros[terms], pt.concatenate(parts))
    names = _names([(name, found.shape_of(part)) for name, part, _ in boxed], terms)
    inputs, members = _inputs(found, cuts)
    return SumOfTerms(names, values, inputs, members, exact)


# addends ------------------------------------------------------------------------------------------


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
    is_scale = [x in found.known and size == 1 for x, size in zip(inputs, sizes, strict=True)]
    is_linear = scalar in ("Mul", "Neg") or (scalar == "TrueDiv" and not is_scale[0])
    if is_scale.count(False) != 1 or not is_linear:
        return None
    which = is_scale.index(False)
    scales = [pt.flatten(x)[0].astype("float64") for x in inputs]
    scales[which] = pt.constant(1.0, dtype="float64")
    return [(inputs[which], op(*scales))]


# groups -------------------------------------------------------------------------------------------


def _groups(found, roots):
    """Return the group of each node of `roots`, and the nodes that each group is a function of.

    Groups share no call, and these nodes depend on none. What depends on nothing is of group 0.
    """
    waiting, links, needs = list(dict.fromkeys(roots.tolist())), [], []
    seen = set(waiting)
    for node in waiting:
        parents = found.parents_of(node).tolist() if found.has_call[node] else [node]
        for parent in parents:
            (links if found.has_call[parent] else needs).append((node, parent))
            if found.has_call[parent] and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    n, pairs = len(found.root), np.array(links, dtype=np.int64).reshape(-1, 2).T
    _, labels = connected_components(coo_array((np.ones(len(links)), pairs), shape=(n, n)))
    frontiers = defaultdict(set)
    for node, parent in needs:
        if found.varies[parent]:
            frontiers[labels[node]].add(parent)
    own = labels[roots].tolist()
    keys = [label for label in dict.fromkeys(own) if label in frontiers]
    number = {label: i for i, label in enumerate(keys)}
    groups = np.array([number.get(label, 0) for label in own])
    return groups, [frozenset(frontiers[label]) for label in keys]


# inputs -------------------------------------------------------------------------------------------


def _cuts(found, frontiers) -> list[tuple]:
    """Return the inputs of groups; the same for those that the same free elements determine.

    But not if these would need more than twice as many inputs as the first of them alone.
    """
    most = MOST_STEPS // max(len(set(frontiers)), 1)
    cuts, alike = {}, defaultdict(list)
    for frontier in dict.fromkeys(frontiers):
        between = _between(found, frontier, most)
        if between is None:
            cuts[frontier] = tuple(sorted(frontier))
        else:
            alike[frozenset(node for node in between if found.is_free[node])].append(frontier)
    for which in alike.values():
        first, joint = (_cut(found, ends) for ends in (which[0], frozenset().union(*which)))
        is_joint = len(joint) <= 2 * len(first)
        cuts |= {ends: joint if is_joint else _cut(found, ends) for ends in which}
    return [cuts[frontier] for frontier in frontiers]


def _between(found, frontier, most=np.inf):
    """Return nodes that those of `frontier` are computed from, and these; None beyond `most`."""
    between, waiting = set(), list(frontier)
    while waiting:
        node = waiting.pop()
        if node not in between:
            between.add(node)
            parents = found.parents_of(node)
            most -= 1 + len(parents)
            if most < 0:
                return None
            waiting += parents.tolist()
    return between


def _cut(found, frontier) -> tuple[int, ...]:
    """Return the fewest nodes that determine those of `frontier`, in order.

    Paths from the free nodes to the frontier, no two of which share a node, are as many as these
    nodes (Menger's theorem). Of several such sets it is the one nearest to the free nodes.
    """
    nodes = np.array(sorted(_between(found, frontier)))
    parents = [found.parents_of(node) for node in nodes]
    before = np.searchsorted(nodes, np.concatenate(parents))
    after = np.repeat(np.arange(len(nodes)), list(map(len, parents)))
    ends = np.searchsorted(nodes, sorted(frontier))
    free = np.flatnonzero(found.is_free[nodes])
    # Node i is an edge from 2 i to 2 i + 1; one that stands for several elements is no input.
    n, own = len(nodes), np.arange(len(nodes))
    start = np.concatenate([2 * own, 2 * before + 1, np.full(len(free), 2 * n), 2 * ends + 1])
    end = np.concatenate([2 * own + 1, 2 * after, 2 * free, np.full(len(ends), 2 * n + 1)])
    size = np.full(len(start), n + 1, dtype=np.int32)
    size[:n][found.variable[nodes] >= 0] = 1
    capacity = csr_array((size, (start, end)), shape=(2 * n + 2, 2 * n + 2))
    left = capacity - maximum_flow(capacity, 2 * n, 2 * n + 1).flow
    left.eliminate_zeros()
    is_reached = np.zeros(2 * n + 2, dtype=np.bool_)
    is_reached[breadth_first_order(left, 2 * n, return_predecessors=False)] = True
    is_cut = is_reached[: 2 * n : 2] & ~is_reached[1 : 2 * n : 2]
    return tuple(nodes[is_cut].tolist())


def _inputs(found, cuts):
    """Return the graph of the distinct inputs, and for each term which of them are its own."""
    nodes = np.array(sorted(set().union(*cuts)))
    parts = []
    for number in np.unique(found.variable[nodes]):
        elements = found.element[nodes[found.variable[nodes] == number]]
        parts.append(pt.flatten(found.variables[number])[elements].astype("float64"))
    return pt.concatenate(parts), [np.searchsorted(nodes, cut) for cut in cuts]


def _names(addends, terms) -> list[str]:
    """Return names of the terms: of their variables, with an index if there are several of one."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    start = 0
    for name, shape in addends:
        size = int(np.prod(shape))
        own, start = terms[start : start + size], start + size
        for term, place, n in zip(*np.unique(own, True, False, True), strict=True):
            index = [int(i) for i in np.unravel_index(place, shape)]
            is_row = n == np.prod(shape[1:]) and not any(index[1:])
            label = f"[{', '.join(map(str, index[:1] if is_row else index))}]" if index else ""
            found[term].setdefault(name, label)
    n_terms = Counter(name for names in found.values() for name in names)
    return [
        ", ".join(name + (label if n_terms[name] > 1 else "") for name, label in names.items())
        for _, names in sorted(found.items())
    ]
