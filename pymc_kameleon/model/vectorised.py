"""PyTensor's mode "NUMBA" with an exponential that the compiler vectorises in loops over arrays.

Most of the time of a covariance matrix, or of a regression of counts, is its own.
"""

import numba
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.rewriting.basic import WalkingGraphRewriter, copy_stack_trace, node_rewriter
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_kameleon.mcmc.exponential import FUSED, exp_by_series
from pymc_kameleon.mcmc.numba_bridge import HAS_REGISTRIES, register_for_pytensor

__all__ = ["VECTORISING"]

BEFORE_FUSION = 48.5
"""Position among PyTensor's rewrites: after all that know a function by its operation."""


class VectorisedExp(ps.Exp):
    """e^x of a float64 among other operations, see `mcmc.exponential`."""


# The key is that of what PyTensor keeps on disk: another one for another function.
register_for_pytensor(
    VectorisedExp, numba.njit(fastmath=FUSED)(exp_by_series), "pymc_kameleon.exp_by_series.1"
)
_vectorised_exp = Elemwise(VectorisedExp(ps.upgrade_to_float, name="vectorised_exp"))


@node_rewriter([Elemwise])
def _vectorise(fgraph, node):
    x, y = node.inputs[0], node.outputs[0]
    if type(node.op.scalar_op) is not ps.Exp or x.dtype != "float64" or all(y.broadcastable):
        return None
    vectorised = _vectorised_exp(x)
    copy_stack_trace(y, vectorised)
    return [vectorised]


@node_rewriter([DimShuffle])
def _reshape_rows(fgraph, node):
    """Make a vector a row in which Numba knows that numbers are next to each other."""
    (x,), (y,) = node.inputs, node.outputs
    if node.op.new_order != ("x", 0):
        return None
    row = pt.specify_shape(x.reshape((1, x.shape[0])), y.type.shape)
    copy_stack_trace(y, row)
    return [row]


VECTORISING: Mode = get_mode("NUMBA")
if HAS_REGISTRIES:
    VECTORISING = VECTORISING.register(
        *(
            (WalkingGraphRewriter(rewriter, order="in_to_out"), BEFORE_FUSION)
            for rewriter in (_vectorise, _reshape_rows)
        )
    )
