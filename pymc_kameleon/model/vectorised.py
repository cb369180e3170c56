"""Rewrites of PyTensor graphs that let Numba vectorise elementary functions of arrays.

Most of the time of a covariance matrix, or of a logistic regression, is theirs, and takes less than
half of it.
"""

import math
from functools import partial

import numba
import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import WalkingGraphRewriter, copy_stack_trace, node_rewriter
from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from scipy import special

from pymc_kameleon.mcmc.exponential import FUSED, exp_by_series
from pymc_kameleon.mcmc.logarithm import (
    log1p_by_series,
    log_by_series,
    sigmoid_by_series,
    softplus_by_series,
)

__all__ = ["VECTORISING"]

BEFORE_LOOPS, BEFORE_FUSION = 48.4, 48.5
"""Positions among PyTensor's rewrites: after all that know a function by its operation."""

SHORT = 32
"""Elements from which a loop of its own saves time."""

LOOPS = {
    ps.Exp: (exp_by_series, np.exp),
    ps.Log: (log_by_series, np.log),
    ps.Log1p: (log1p_by_series, np.log1p),
    ps.Sigmoid: (sigmoid_by_series, special.expit),
    ps.Softplus: (softplus_by_series, partial(np.logaddexp, 0.0)),
}
"""Scalar operation of PyTensor -> function that Numba vectorises, and NumPy's."""


class Loop(Op):
    """A function of every element of a float64 array, in a loop of its own.

    A sum or a branch in the same loop would keep the compiler from vectorising it.
    """

    __props__ = ("operation",)

    def __init__(self, operation):
        self.operation = operation

    def make_node(self, x):
        """Apply the function to an array."""
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        """Evaluate by NumPy."""
        outputs[0][0] = LOOPS[self.operation][1](inputs[0])

    def __str__(self):
        """Return a name for graphs that are printed."""
        return f"vectorised_{self.operation.__name__.lower()}"


@register_funcify_and_cache_key(Loop)
def _funcify_loop(op, node, **kwargs):
    function = LOOPS[op.operation][0]
    by_element = numba.njit(fastmath=FUSED, error_model="numpy", forceinline=True)(function)

    @numba.njit(error_model="numpy")
    def loop(x):
        x = np.ascontiguousarray(x)
        out = np.empty(x.shape)
        flat, out_flat = x.reshape(-1), out.reshape(-1)
        for i in range(flat.size):
            out_flat[i] = by_element(flat[i])
        return out

    # The key is that of what PyTensor keeps on disk: another one for another function.
    return loop, f"pymc_kameleon.{function.__name__}.loop.1"


class VectorisedExp(ps.Exp):
    """e^x of a float64 among other operations, see `mcmc.exponential`."""


_vectorised_exp = VectorisedExp(ps.upgrade_to_float, name="vectorised_exp")
_compiled_exp = numba.njit(fastmath=FUSED)(exp_by_series)


@register_funcify_and_cache_key(VectorisedExp)
def _funcify_exp(op, node, **kwargs):
    return _compiled_exp, "pymc_kameleon.exp_by_series.1"


@node_rewriter([Elemwise])
def _vectorise(fgraph, node):
    (x,), (y,) = node.inputs[:1], node.outputs[:1]
    operation = type(node.op.scalar_op)
    if operation not in LOOPS or x.dtype != "float64" or all(y.broadcastable):
        return None
    # Another loop over a few elements, or over a matrix for e^x alone, takes more than it saves.
    is_short = None not in y.type.shape and math.prod(y.type.shape) < SHORT
    if operation is ps.Exp and (is_short or y.ndim > 1):
        vectorised = Elemwise(_vectorised_exp)(x)
    elif is_short:
        return None
    else:
        vectorised = Loop(operation)(x)
    copy_stack_trace(y, vectorised)
    return [vectorised]


@node_rewriter([Elemwise])
def _choose_first(fgraph, node):
    """Evaluate f(where(c, x, y)) for where(c, f(x), f(y)), with one loop for two."""
    if not isinstance(node.op.scalar_op, ps.Switch):
        return None
    condition, *branches = node.inputs
    outer = []
    while all(_is_unary(branch) for branch in branches):
        first, second = (branch.owner for branch in branches)
        inner = [first.inputs[0], second.inputs[0]]
        if first.op.scalar_op != second.op.scalar_op or inner[0].dtype != inner[1].dtype:
            break
        outer.append(first.op)
        branches = inner
    shapes = {v.type.broadcastable for v in (*branches, *node.outputs)}
    if len(shapes) > 1 or not any(type(op.scalar_op) in LOOPS for op in outer):
        return None
    chosen = node.op(condition, *branches)
    for op in reversed(outer):
        chosen = op(chosen)
    copy_stack_trace(node.outputs[0], chosen)
    return [chosen]


def _is_unary(variable):
    owner = variable.owner
    return owner is not None and isinstance(owner.op, Elemwise) and len(owner.inputs) == 1


@node_rewriter([DimShuffle])
def _reshape_rows(fgraph, node):
    """Make a vector a row in which Numba knows that numbers are next to each other."""
    (x,), (y,) = node.inputs, node.outputs
    if node.op.new_order != ("x", 0):
        return None
    row = pt.specify_shape(x.reshape((1, x.shape[0])), y.type.shape)
    copy_stack_trace(y, row)
    return [row]


def _everywhere(rewriter, position):
    return WalkingGraphRewriter(rewriter, order="in_to_out"), position


VECTORISING: Mode = get_mode("NUMBA").register(
    _everywhere(_choose_first, BEFORE_LOOPS),
    _everywhere(_vectorise, BEFORE_FUSION),
    _everywhere(_reshape_rows, BEFORE_FUSION),
)
"""PyTensor's mode "NUMBA" with elementary functions of arrays vectorised."""
