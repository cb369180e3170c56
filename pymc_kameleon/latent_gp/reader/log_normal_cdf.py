"""The log of the normal distribution function with three derivatives, accurate in both tails.

With z the argument and rho = phi(z) / Phi(z), the derivatives are rho, -rho (z + rho) and
-rho (1 - (z + rho) (z + 2 rho)). Far below zero z + rho cancels; there the asymptotic series of
Mills' ratio takes over, with a series of its own for each derivative.
"""

import numpy as np
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pymc.pytensorf import constant_fold
from pytensor import function
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.scalar import basic as scalar
from pytensor.scalar import math as scalar_math
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from scipy.special import log_ndtr

from pymc_kameleon._compat import operation_with_gradient
from pymc_kameleon.latent_gp.tilted_moments import TAIL, THIRD

ROUNDING = 1e-6
"""PyTensor rounds a bare sqrt(2.0), and so PyMC its Phi, to single precision."""

NEGATIVE = (-1.5, -4.0, -11.0)
"""Points that tell log Phi from other functions."""

EXCESS = (1.0, -2.0, 10.0, -74.0, 706.0, -8162.0, 110410.0)
"""Series in 1/z^2 of (z + rho) |z|."""

COMPARISONS = (scalar.EQ, scalar.GE, scalar.GT, scalar.LE, scalar.LT)


def log_normal_cdf(z):
    """Symbolic log Phi(z), three times differentiable, to 3e-9 (relative) from -1e4 up."""
    return _derivative(0, z)


def _derivative(order, z):
    """Return a derivative of log Phi as an operation whose gradient is the next one."""
    z = pt.as_tensor(z).astype("float64")
    argument = z.type()
    operation = operation_with_gradient(
        [argument], [_expression(order, argument)], PULLBACKS[order], f"log_normal_cdf_{order}"
    )
    return operation(z)


def _pullback(order):
    def pullback(inputs, outputs, gradients):
        return [gradients[0] * _derivative(order + 1, inputs[0])]

    return pullback


def _no_pullback(inputs, outputs, gradients):
    raise NotImplementedError("log_normal_cdf has three derivatives.")


# PyTensor takes two operations for one only if their pullbacks are the same object.
PULLBACKS = (_pullback(0), _pullback(1), _pullback(2), _no_pullback)


def _expression(order, z):
    if order == 0:
        # Phi(-a) = erfcx(a / sqrt 2) exp(-a^2 / 2) / 2 for a = |z|: one special function, one log.
        half = 0.5 * pt.erfcx(abs(z) / np.sqrt(2.0))
        square = 0.5 * z**2
        is_below = z < 0
        shifted = pt.switch(is_below, half - 1.0, -half * pt.exp(-square))
        return pt.log1p(shifted) - pt.switch(is_below, square, 0.0)
    # Each branch gets an argument from its own side, so that no NaN arises on the other.
    near, far = pt.maximum(z, TAIL), -pt.minimum(z, TAIL)
    hazard = np.sqrt(2.0 / np.pi) / pt.erfcx(-near / np.sqrt(2.0))
    is_tail = z < TAIL
    excess = pt.switch(is_tail, _series(EXCESS, far) / far, near + hazard)
    hazard = pt.switch(is_tail, far + excess, hazard)
    if order == 1:
        return hazard
    if order == 2:
        return -hazard * excess
    third = -hazard * (1.0 - excess * (excess + hazard))
    return pt.switch(is_tail, _series(THIRD, far) / far**3, third)


def _series(coefficients, far):
    total = float(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = float(coefficient) + total / far**2
    return total


def with_stable_normal_cdf(graphs: list) -> list:
    """Rewrite logarithms of a normal distribution function to ones that hold in the tails.

    `log(Phi(z))`, `log1p(-Phi(z))` and comparisons of Phi(z) with 0 and 1 are found where Phi is
    written with erf or erfc, as `pm.math.invprobit` does, or as the exponential of
    `pm.logcdf(pm.Normal.dist(...), z)`; this itself is found too: its derivatives cancel.
    """
    replacements = {}
    for variable in ancestors(graphs):
        operation = _scalar_operation(variable)
        z = _log_normal_argument(variable)
        if isinstance(operation, COMPARISONS):
            # Phi lies between 0 and 1, so a comparison with either has one outcome.
            compared, bound = variable.owner.inputs[0], _value(variable.owner.inputs[1])
            if bound in (0.0, 1.0) and _normal_argument(compared) is not None:
                outcome = np.array(operation.impl(0.5, bound), dtype=bool)
                replacements[variable] = pt.full_like(variable, outcome)
        elif isinstance(operation, scalar.Switch) and z is None:
            branches = [_log_normal_argument(v) for v in variable.owner.inputs[1:]]
            if all(branch is not None for branch in branches):
                z = pt.switch(variable.owner.inputs[0], *branches)
        if z is not None:
            replacements[variable] = log_normal_cdf(z).astype(variable.dtype)
    if not replacements:
        return list(graphs)
    return clone_replace(list(graphs), replace=replacements)


def _log_normal_argument(variable):
    """Return z where `variable` is log Phi(z), else None."""
    variable = _unwrapped(variable)
    operation = _scalar_operation(variable)
    if isinstance(operation, scalar.Log):
        return _normal_argument(variable.owner.inputs[0])
    if isinstance(operation, scalar.Log1p):
        return _normal_argument(1.0 + variable.owner.inputs[0])
    if isinstance(operation, scalar_math.Log1mexp):
        z = _log_normal_argument(variable.owner.inputs[0])
        return None if z is None else -z
    if isinstance(operation, scalar.Switch):
        _, tail, body = variable.owner.inputs
        z = _log_normal_argument(body)
        return z if z is not None and _is_tail(tail, z) else None
    return None


def _is_tail(graph, z):
    """Whether `graph`, a function of nothing but z, is log Phi(z) at negative z."""
    multiple, inner = _multiple(z)
    above = set(ancestors([graph]))
    if inner not in above or not any(
        isinstance(_scalar_operation(v), scalar_math.Erfcx) for v in above
    ):
        return False
    argument = pt.tensor(dtype="float64", shape=(1,) * inner.ndim)
    (replaced,) = clone_replace([graph], replace={inner: argument}, rebuild_strict=False)
    if any(v is not argument and not isinstance(v, Constant) for v in graph_inputs([replaced])):
        return False
    evaluate = function([argument], replaced, mode="FAST_COMPILE")
    values = [evaluate(np.full(argument.type.shape, x / multiple)).item() for x in NEGATIVE]
    return np.allclose(values, log_ndtr(NEGATIVE), rtol=ROUNDING)


def _unwrapped(variable):
    """Return the variable that `variable` is a copy of, past checks of parameters."""
    while variable.owner is not None and (
        isinstance(variable.owner.op, CheckParameterValue)
        or (
            isinstance(variable.owner.op, DimShuffle)
            and variable.owner.inputs[0].ndim == variable.ndim
        )
    ):
        variable = variable.owner.inputs[0]
    return variable


def _scalar_operation(variable):
    """Return the scalar operation that makes `variable` element by element, else None."""
    node = variable.owner
    return node.op.scalar_op if node is not None and isinstance(node.op, Elemwise) else None


def _normal_argument(variable):
    """Return z where `variable` is Phi(z), else None."""
    linear = _linear_in_erf(variable)
    if linear is None:
        return None
    constant, factor, argument = linear
    # Phi(z) = (1 + erf(z / sqrt 2)) / 2
    if not np.allclose([constant, abs(factor)], 0.5, rtol=1e-12):
        return None
    multiple, z = _multiple(argument)
    multiple *= np.sign(factor) * np.sqrt(2.0)
    if abs(abs(multiple) - 1.0) < ROUNDING:
        multiple = np.sign(multiple)
    return multiple * z


def _in_one_input(variable, operations):
    """Return the only input that is no constant, and `variable` as a function of it, else None.

    `variable` is made by one of these scalar operations, which are linear in that input.
    """
    operation = _scalar_operation(variable)
    if not isinstance(operation, operations):
        return None
    values = [_value(v) for v in variable.owner.inputs]
    moving = [i for i, value in enumerate(values) if value is None]
    if len(moving) != 1 or (isinstance(operation, scalar.TrueDiv) and moving[0] == 1):
        return None

    def at(x):
        return float(operation.impl(*(x if value is None else value for value in values)))

    return variable.owner.inputs[moving[0]], at


def _multiple(variable):
    """Return (c, u) with `variable` = c u for a constant c, as large a part of it as is written."""
    found = _in_one_input(variable, (scalar.Neg, scalar.Mul, scalar.TrueDiv))
    if found is None:
        return 1.0, variable
    multiple, rest = _multiple(found[0])
    return found[1](1.0) * multiple, rest


def _linear_in_erf(variable):
    """Return (a, b, u) where `variable` is a + b erf(u) with constants a and b, else None."""
    variable = _unwrapped(variable)
    operation = _scalar_operation(variable)
    if isinstance(operation, scalar_math.Erf):
        return 0.0, 1.0, variable.owner.inputs[0]
    if isinstance(operation, scalar_math.Erfc):
        return 1.0, -1.0, variable.owner.inputs[0]
    if isinstance(operation, scalar.Exp):
        z = _log_normal_argument(variable.owner.inputs[0])
        return None if z is None else (0.5, 0.5, z / np.sqrt(2.0))
    found = _in_one_input(
        variable, (scalar.Neg, scalar.Add, scalar.Sub, scalar.Mul, scalar.TrueDiv)
    )
    inner = found and _linear_in_erf(found[0])
    if inner is None:
        return None
    constant = found[1](0.0)
    factor = found[1](1.0) - constant
    return constant + factor * inner[0], factor * inner[1], inner[2]


def _value(variable):
    """Return the number that a constant variable is everywhere, else None."""
    while variable.owner is not None and isinstance(variable.owner.op, DimShuffle):
        variable = variable.owner.inputs[0]
    if variable.owner is not None and variable.ndim == 0:
        if not all(isinstance(v, Constant) for v in graph_inputs([variable])):
            return None
        (data,) = constant_fold([variable])
    elif isinstance(variable, Constant):
        data = variable.data
    else:
        return None
    data = np.asarray(data, dtype=float)
    return float(data.flat[0]) if data.size and np.all(data == data.flat[0]) else None
