"""Call a log density or a kernel's gradients from code that is compiled once and cached.

What differs from model to model enters compiled code as the address of machine code, so the
transitions themselves are the same machine code for every model. The same transitions run as plain
Python when the log density or the kernel cannot be compiled: then a Python callable stands where
the address stood.
"""

import functools
import hashlib
from pathlib import Path

import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError
from numba.core.options import DefaultOptions
from numba.extending import intrinsic, overload, register_jitable
from numba.np.arrayobj import populate_array

__all__ = [
    "EVALUATIONS",
    "NONFINITE",
    "N_TERMS",
    "SIMD",
    "by_address",
    "by_class",
    "call_for_nothing",
    "caller",
    "compile_options",
    "evaluate",
    "evaluate_gradients",
    "gradients_address",
    "jit",
    "jit_inner",
    "jitable",
    "machine_code_address",
    "resolved_once",
]

N_TERMS = 3
"""Terms of a log density: log prior, exact log likelihood, estimated log likelihood."""

EVALUATIONS, NONFINITE = 0, 1
"""Positions in the `counts` array: log-density evaluations, and those that were NaN or +inf."""


SIMD = {"contract", "nsz", "reassoc"}
"""Fast-math freedoms that let a sum be vectorised; NaN and infinity keep their meaning."""

OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy"}
"""No C callback, which Numba would compile with a copy of all that a function does; and a division
by 0 is infinite or NaN, as in NumPy: one that may raise keeps its loop from being vectorised."""


def compile_options(allocates):
    """Return options of `numba.njit` for a function, with `allocates` as `jit` takes it."""
    return OPTIONS | ({"_nrt": allocates} if hasattr(DefaultOptions, "_nrt") else {})


CALLERS = {"demo", "distributed", "plots", "steps", "store"}
"""Folders that hold nothing that is compiled."""


@functools.cache
def _source_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in CALLERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _CacheOfThisSource(IndexDataCacheFile):
    def _load_index(self):
        try:
            return super()._load_index()
        except (AttributeError, ImportError):  # what another version of the package compiled
            return {}


def jit(function=None, *, allocates=False, **options):
    """Compile a function with Numba, and keep it on disk until a file of the package changes.

    Numba itself would look at the file of the function alone, and go on calling what was compiled
    of other files before they changed.

    Parameters
    ----------
    function : callable
    allocates : bool
        Whether the function makes arrays, returns one, or calls a function that returns one. Others
        need not count who holds those that they are given, which takes half of the time of a short
        loop. Numba raises if it finds out that an array is made; what such a call returns would
        never be freed.
    **options
        Of `numba.njit`.
    """
    if function is None:
        return functools.partial(jit, allocates=allocates, **options)
    compiled = numba.njit(cache=True, **(compile_options(allocates) | options))(function)
    if isinstance(compiled, Dispatcher):
        cache = compiled._cache
        directory, name = cache._cache_path, cache._impl.filename_base
        shared = numba.config.CACHE_DIR
        if shared and Path(directory).is_relative_to(shared):
            # The same for every copy of the source, wherever it is.
            directory = str(Path(shared, function.__module__))
            Path(directory).mkdir(exist_ok=True)
        cache._cache_file = _CacheOfThisSource(directory, name, _source_digest())
    return compiled


def jit_inner(function=None, *, allocates=False, **options):
    """Compile a small function that loops call, apart for compiled loops and for plain Python.

    Compiled loops get it without the wrapper through which Python calls it, which takes a third of
    its compile time. Parameters are those of `jit`.
    """
    if function is None:
        return functools.partial(jit_inner, allocates=allocates, **options)
    jitted = jit(function, allocates=allocates, **options)

    @functools.wraps(function)
    def call(*arguments):
        return jitted(*arguments)

    @overload(call, jit_options=compile_options(allocates) | options, strict=False)
    def compiled(*arguments):
        return function

    return call


def jitable(function=None, *, allocates=False):
    """Let compiled code call a function, as Numba's `register_jitable` does."""
    if function is None:
        return functools.partial(jitable, allocates=allocates)
    return register_jitable(**compile_options(allocates))(function)


def resolved_once(jitted):
    """Return `jitted`, which finds its machine code by the classes of its arguments alone.

    Numba looks at the type of every array in every tuple of every call, at 0.1 us each. This is for
    functions to which a class always brings arrays of the same types: no one checks them again.
    """
    if not isinstance(jitted, Dispatcher):  # NUMBA_DISABLE_JIT
        return jitted
    found = {}

    @functools.wraps(jitted.py_func)
    def call(*arguments):
        classes = tuple(map(type, arguments))
        if classes in found:
            return found[classes](*arguments)
        result = jitted(*arguments)
        found[classes] = jitted.overloads[tuple(map(numba.typeof, arguments))].entry_point
        return result

    return call


def by_class(stub):
    """Let a function do what is registered for the class of its first argument, a NamedTuple.

    `stub` documents it; `register(cls, function, allocates)` gives an implementation that Numba can
    compile, `allocates` being that of `jit`. A compiled call is resolved when its caller is
    compiled, and costs nothing. Plain Python calls `in_python`, if that is given.
    """
    implementations = {}

    @functools.wraps(stub)
    def call(value, *arguments):
        return implementations[type(value)][-1](value, *arguments)

    def compile_those(allocating):
        @overload(call, jit_options=compile_options(allocating), strict=False)
        def compiled(value, *arguments):
            if isinstance(value, types.BaseNamedTuple):
                function, allocates, _ = implementations.get(value.instance_class, (None,) * 3)
                return function if allocates == allocating else None
            return None

    compile_those(True)
    compile_those(False)

    def register(cls, function, *, allocates=True, in_python=None):
        function = jitable(function, allocates=allocates)
        implementations[cls] = function, allocates, in_python or function

    call.register = register
    return call


def caller(jitted, argument_types):
    """Return what calls a jitted function from compiled code, with arrays that are somewhere.

    It calls the machine code that is there. A plain call would have all of it optimised again
    with the caller, which takes a second where the function calls linear algebra.

    Parameters
    ----------
    jitted : numba dispatcher
        Keep it alive as long as what is compiled with the result.
    argument_types : sequence of numba array types
        Of a vector, and of arrays in C order.

    Returns
    -------
    callable
        ``call(vector, table)``, for compiled code: the other arrays are those of which an int64
        array holds, from its position 1 on, one after the other, the address and the shape.
    """
    parameters = jitted.get_call_template(tuple(argument_types), {})[2]
    machine_code = jitted.overloads[parameters]
    star_args = (types.StarArgTuple, types.StarArgUniTuple)
    takes_tuple = len(parameters) == 1 and isinstance(parameters[0], star_args)
    vector, *others = argument_types

    @intrinsic
    def call(typingctx, x, table):
        if x != vector:
            raise TypingError(f"{jitted} is compiled for {vector}, not {x}")

        def codegen(context, builder, signature, args):
            pointer = context.make_array(signature.args[1])(context, builder, args[1]).data
            values, position = [args[0]], 1
            for kind in others:
                values.append(_array_at(context, builder, kind, pointer, position))
                position += 1 + kind.ndim
            if takes_tuple:
                values = [context.make_tuple(builder, parameters[0], values)]
            return context.call_internal(
                builder, machine_code.fndesc, machine_code.signature, values
            )

        return machine_code.signature.return_type(x, table), codegen

    return call


def _array_at(context, builder, kind, pointer, position):
    """Array of a type in C order, whose address and shape are numbers at `position` of a table."""
    entries = [
        builder.load(cgutils.gep(builder, pointer, position + i)) for i in range(1 + kind.ndim)
    ]
    item = context.get_data_type(kind.dtype)
    step = context.get_constant(types.intp, context.get_abi_sizeof(item))
    itemsize, strides = step, []
    for length in reversed(entries[1:]):
        strides.insert(0, step)
        step = builder.mul(step, length)
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(entries[0], item.as_pointer())
    populate_array(array, data, entries[1:], strides, itemsize, meminfo=None)
    return array._getvalue()


def machine_code_address(jitted, argument_types):
    """Address of a jitted function's machine code, for what `by_address` returns.

    Parameters
    ----------
    jitted : numba dispatcher
        Keep it alive as long as the address is in use.
    argument_types : sequence of numba types

    Returns
    -------
    int
    """
    jitted.compile(tuple(argument_types))
    compiled = jitted.overloads[tuple(argument_types)]
    return compiled.library.get_pointer_to_function(compiled.fndesc.mangled_name)


def by_address(result):
    """Return what calls a function by its address, and passes its errors on.

    Numba optimises anew all that a compiled function calls, each time that it compiles a caller;
    what is called by address is compiled once.

    Parameters
    ----------
    result : numba type
        What the function returns.

    Returns
    -------
    call : callable
        ``call(routine, arguments)`` with a tuple of arguments; `routine` is what
        `machine_code_address` returned for their types, and in plain Python a callable.
    """

    def call(routine, arguments):
        return routine(*arguments)

    @intrinsic
    def call_address(typingctx, address, arguments):
        parameters = tuple(map(types.unliteral, arguments))

        def codegen(context, builder, signature, args):
            convention = context.call_conv
            function_type = convention.get_function_type(result, parameters)
            function = builder.inttoptr(args[0], function_type.as_pointer())
            found = zip(cgutils.unpack_tuple(builder, args[1]), arguments, parameters, strict=True)
            values = [context.cast(builder, *of_argument) for of_argument in found]
            status, value = convention.call_function(builder, function, result, parameters, values)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return value

        return result(types.intp, arguments), codegen

    @overload(call, jit_options=compile_options(False), strict=False)
    def compiled(routine, arguments):
        return lambda routine, arguments: call_address(routine, arguments)

    return call


call_for_nothing = by_address(types.none)


def _log_density_into(log_density, x, value):
    log_density[0](x, value)


@overload(_log_density_into, jit_options=compile_options(False))
def _log_density_into_overload(log_density, x, value):
    def compiled(log_density, x, value):
        call_for_nothing(log_density[0], (x, value, log_density))

    return compiled


@jitable
def evaluate(log_density, x, value, counts):
    """Evaluate the terms of the log density at `x` into `value`; return their sum.

    Parameters
    ----------
    log_density : int64 array (compiled) or 1-tuple of a callable (plain Python)
        What `LogDensity.compiled` or `LogDensity.plain` returned.
    x : array, shape (d,)
        Raveled position.
    value : array, shape (3,)
        The terms of the log density, as `LogDensity` returns them, are written here.
    counts : int64 array, shape (2,)
        `counts[EVALUATIONS]` and, for NaN and +inf, `counts[NONFINITE]` go up by one.

    Returns
    -------
    float
        The log density; -inf where it was NaN or +inf, so that such a proposal is rejected.
    """
    counts[EVALUATIONS] += 1
    _log_density_into(log_density, x, value)
    total = value[0] + value[1] + value[2]
    if np.isnan(total) or total == np.inf:
        counts[NONFINITE] += 1
        return -np.inf
    return total


def evaluate_gradients(kernel, x, points, parameters, gradients):
    """Write the gradients of k(., points[:, i]) at `x` into the columns of `gradients`.

    `kernel` is an address (an int) in compiled code and a callable in plain Python.
    """
    kernel(x, points, parameters, gradients)


@overload(evaluate_gradients, jit_options=compile_options(False))
def _evaluate_gradients_overload(kernel, x, points, parameters, gradients):
    def compiled(kernel, x, points, parameters, gradients):
        dim, n = points.shape
        if x.size != dim or gradients.shape[0] != dim or gradients.shape[1] != n:
            raise RuntimeError("the subsample has another size than where its gradients go")
        call_for_nothing(kernel, (x, points, parameters, gradients))

    return compiled


def gradients_address(gradients) -> int:
    """Address of a jitted `gradients(x, points, parameters, out)`, which has to be kept alive."""
    vector, matrix = types.float64[::1], types.float64[:, ::1]
    return machine_code_address(gradients, (vector, matrix, vector, matrix))
