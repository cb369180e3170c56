"""Call a log density or a kernel's gradients from code that is compiled once and cached.

What differs from model to model enters compiled code as the address of machine code, so the
transitions themselves are the same machine code for every model. The same transitions run as plain
Python when the log density or the kernel cannot be compiled: then a Python callable stands where
the address stood.

Names that Numba and PyTensor do not document are used in this file alone. Each section says which
public way is missing, and what is done, slower, where a version lacks one of the names.
"""

import functools
import hashlib
import logging
import pkgutil
from operator import attrgetter
from pathlib import Path

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, is_jitted, overload, register_jitable
from pytensor.compile.ops import FromFunctionOp

N_TERMS = 3
"""Terms of a log density: log prior, exact log likelihood, estimated log likelihood."""

EVALUATIONS, NONFINITE = 0, 1
"""Positions in the `counts` array: log-density evaluations, and those that were NaN or +inf."""

SIMD = {"contract", "nsz", "reassoc"}
"""Fast-math freedoms that let a sum be vectorised; NaN and infinity keep their meaning."""

_log = logging.getLogger("pymc.kameleon")


@numba.njit(cache=True)
def _nothing():
    pass


SAMPLES = {"dispatcher": _nothing, "wrapped": FromFunctionOp(_nothing, [], [], None)}


def _has(names: str, otherwise: str) -> bool:
    """Whether these names are there in the present versions; if not, log what is done otherwise."""
    for name in names.split():
        first, _, rest = name.partition(".")
        try:
            attrgetter(rest)(SAMPLES[first]) if first in SAMPLES else pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            if not numba.config.DISABLE_JIT:
                _log.warning("This version of Numba or PyTensor has no %s: %s.", name, otherwise)
            return False
    return True


# compiling ----------------------------------------------------------------------------------------

OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy"}
"""No C callback, which Numba would compile with a copy of all that a function does; and a division
by 0 is infinite or NaN, as in NumPy: one that may raise keeps its loop from being vectorised."""

# Missing: a cache that asks about more files than that of the function alone.
KEEPS_ON_DISK = _has(
    "numba.core.caching.IndexDataCacheFile dispatcher._cache._cache_file dispatcher._cache._impl"
    " dispatcher._cache._impl.filename_base dispatcher._cache.cache_path",
    "what is compiled is not kept on disk",
)

# Missing: to say that a function makes no arrays.
COUNTS_AT_WILL = _has(
    "numba.core.options.DefaultOptions._nrt", "compiled loops count who holds their arrays"
)

CALLERS = {
    "__main__",
    "demo",
    "diagnostics",
    "distributed",
    "evidence",
    "learnt_posterior",
    "plots",
    "steps",
    "store",
    "stored_density",
    "targets",
    "testing",
}
"""Folders and modules that hold nothing that is compiled."""


def compile_options(allocates, **options):
    """Return options of `numba.njit` for a function, with `allocates` as `jit` takes it.

    A function whose sums may be reordered becomes part of each that calls it. Else there would be
    several copies of it, each ordered in its own way, and which one is called would depend on
    whether this process compiles the callers or finds them on disk.
    """
    counting = {"_nrt": allocates} if COUNTS_AT_WILL else {}
    return OPTIONS | counting | {"forceinline": "fastmath" in options} | options


@functools.cache
def _source_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).with_suffix("").parts[0] not in CALLERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


if KEEPS_ON_DISK:

    class _CacheOfThisSource(numba.core.caching.IndexDataCacheFile):
        def _load_index(self):
            try:
                return super()._load_index()
            except (AttributeError, ImportError):  # what another version of the package compiled
                return {}


def _keep_until_a_source_changes(cache, module: str) -> None:
    directory, shared = cache.cache_path, numba.config.CACHE_DIR
    if shared and Path(directory).is_relative_to(shared):
        # The same for every copy of the source, wherever it is.
        directory = str(Path(shared, module))
        Path(directory).mkdir(exist_ok=True)
    name = cache._impl.filename_base
    cache._cache_file = _CacheOfThisSource(directory, name, _source_digest())


def jit(function=None, *, allocates=False, **options):
    """Compile a function with Numba, and keep it on disk until a file of the package changes.

    Numba itself would look at the file of the function alone, and go on calling what was compiled
    of other files before they changed.

    `allocates` is whether the function makes arrays, returns one, or calls a function that returns
    one. Others need not count who holds those that they are given, which takes half of the time of
    a short loop. Numba raises if it finds out that an array is made; what such a call returns would
    never be freed. `options` are those of `numba.njit`.
    """
    if function is None:
        return functools.partial(jit, allocates=allocates, **options)
    options = compile_options(allocates, **options)
    compiled = numba.njit(cache=KEEPS_ON_DISK, **options)(function)
    if KEEPS_ON_DISK and is_jitted(compiled):
        _keep_until_a_source_changes(compiled._cache, function.__module__)
    return compiled


jit_by_address = functools.partial(jit, no_cpython_wrapper=True)
"""`jit` for a function that only compiled code calls, by its address."""


def jit_inner(function=None, *, allocates=False, **options):
    """`jit` for a small function that loops call: compiled for them and for plain Python apart.

    Compiled loops get it without the wrapper through which Python calls it, which takes a third of
    its compile time.
    """
    if function is None:
        return functools.partial(jit_inner, allocates=allocates, **options)
    jitted = jit(function, allocates=allocates, **options)

    @functools.wraps(function)
    def call(*arguments):
        return jitted(*arguments)

    @overload(call, jit_options=compile_options(allocates, **options), strict=False)
    def compiled(*arguments):
        return function

    return call


def jitable(function=None, *, allocates=False):
    """Let compiled code call a function, as Numba's `register_jitable` does."""
    if function is None:
        return functools.partial(jitable, allocates=allocates)
    return register_jitable(**compile_options(allocates))(function)


# Missing: to call a compiled function whose types are known.
RESOLVES_ONCE = _has(
    "dispatcher.overloads numba.core.compiler.CompileResult.entry_point",
    "the types of all arrays are looked at before each draw",
)


def resolved_once(jitted):
    """Return `jitted`, which finds its machine code by the classes of its arguments alone.

    Numba looks at the type of every array in every tuple of every call, at 0.1 us each. This is for
    functions to which a class always brings arrays of the same types: no one checks them again.
    """
    if not RESOLVES_ONCE or not is_jitted(jitted):
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
        if type(value) not in implementations:
            known = ", ".join(sorted(cls.__name__ for cls in implementations))
            raise TypeError(
                f"No {stub.__name__} is registered for {type(value).__name__}: proposals of your "
                "own give theirs to pymc_kameleon.mcmc.proposals.register_proposal. Registered are "
                f"those of {known}."
            )
        return implementations[type(value)][-1](value, *arguments)

    def compile_those(allocating):
        @overload(call, jit_options=compile_options(allocating), strict=False)
        def compiled(value, *arguments):
            function, allocates, _ = implementations.get(_class_of(value), (None,) * 3)
            return function if allocates == allocating else None

    def _class_of(kind):
        # Missing: the class of a NamedTuple's Numba type; its name begins with that of the class.
        named = [cls for cls in implementations if str(kind).startswith(f"{cls.__name__}(")]
        return getattr(kind, "instance_class", named[0] if len(named) == 1 else None)

    compile_those(True)
    compile_those(False)

    def register(cls, function, *, allocates=True, in_python=None):
        function = jitable(function, allocates=allocates)
        implementations[cls] = function, allocates, in_python or function

    call.register = register
    return call


# calling by address -------------------------------------------------------------------------------

# Missing: to call compiled code by its address, with its errors passed on. A C callback passes
# none, and a function that is an argument is compiled and optimised again in each caller.
BY_ADDRESS = _has(
    "dispatcher.overloads dispatcher.get_call_template numba.core.compiler.CompileResult.library"
    " numba.core.compiler.CompileResult.fndesc numba.core.funcdesc.FunctionDescriptor.mangled_name"
    " numba.core.codegen.JITCodeLibrary.get_pointer_to_function"
    " numba.core.cpu.CPUContext.call_conv numba.core.callconv.CPUCallConv.get_function_type"
    " numba.core.callconv.CPUCallConv.call_function"
    " numba.core.callconv.CPUCallConv.return_status_propagate numba.np.arrayobj.populate_array",
    "transitions run in plain Python",
)


def machine_code(jitted, argument_types) -> tuple:
    """Address of a jitted function's machine code for Numba types, and the type of its result.

    The function has to be kept alive as long as the address is in use.
    """
    parameters = jitted.get_call_template(tuple(argument_types), {})[2]
    compiled = jitted.overloads[parameters]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.mangled_name)
    return address, compiled.signature.return_type


def machine_code_address(jitted, argument_types):
    """Address of `machine_code`; where there is none the function, which callers compile anew."""
    return machine_code(jitted, argument_types)[0] if BY_ADDRESS else jitted


_addresses: dict = {}


def address_once(jitted, argument_types):
    """Return its `machine_code_address`, which is looked for once a process.

    `argument_types` returns the Numba types, which are always the same.
    """
    if not is_jitted(jitted):  # NUMBA_DISABLE_JIT
        return jitted
    if jitted not in _addresses:
        _addresses[jitted] = machine_code_address(jitted, argument_types())
    return _addresses[jitted]


def _call_there(context, builder, address, result, kinds, values):
    convention = context.call_conv
    function_type = convention.get_function_type(result, kinds)
    function = builder.inttoptr(address, function_type.as_pointer())
    status, value = convention.call_function(builder, function, result, kinds, values)
    with builder.if_then(status.is_error, likely=False):
        convention.return_status_propagate(builder, status)
    return value


def by_address(result):
    """Return what calls a function by its address, and passes its errors on.

    Numba optimises anew all that a compiled function calls, each time that it compiles a caller;
    what is called by address is compiled once. `result` is the Numba type of what the function
    returns. ``call(routine, arguments)`` takes a tuple of arguments; `routine` is what
    `machine_code_address` returned for their types, and in plain Python a callable.
    """

    def call(routine, arguments):
        return routine(*arguments)

    @intrinsic
    def call_address(typingctx, address, arguments):
        kinds = tuple(map(types.unliteral, arguments))

        def codegen(context, builder, signature, args):
            found = [builder.extract_value(args[1], i) for i in range(len(kinds))]
            values = [
                context.cast(builder, *of_argument)
                for of_argument in zip(found, arguments, kinds, strict=True)
            ]
            return _call_there(context, builder, args[0], result, kinds, values)

        return result(types.intp, arguments), codegen

    @overload(call, jit_options=compile_options(False), strict=False)
    def compiled(routine, arguments):
        if isinstance(routine, types.Integer) and BY_ADDRESS:
            return lambda routine, arguments: call_address(routine, arguments)
        return call if isinstance(routine, types.Dispatcher) else _refuse

    return call


def _refuse(routine, arguments):
    raise RuntimeError("No function can be called by its address.")


call_for_nothing = by_address(types.none)


def with_tabled_arrays(result, vector, kinds):
    """Return what calls machine code with a vector, and with arrays that are somewhere.

    ``call(vector, table, start)``, for compiled code: an int64 array holds, from `start` on, the
    address of the machine code, then address and shape of each array. `result`, `vector` and
    `kinds`, the arrays' in C order, are Numba types.
    """

    @intrinsic
    def call(typingctx, x, table, start):
        if x != vector:
            return None

        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[1])(context, builder, args[1]).data
            entries = iter(range(1 + sum(1 + kind.ndim for kind in kinds)))

            def entry():
                position = context.get_constant(types.intp, next(entries))
                return builder.load(builder.gep(data, [builder.add(args[2], position)]))

            address = entry()
            arrays = [
                _array_at(context, builder, kind, entry(), [entry() for _ in range(kind.ndim)])
                for kind in kinds
            ]
            return _call_there(
                context, builder, address, result, (vector, *kinds), [args[0], *arrays]
            )

        return result(vector, table, types.intp), codegen

    return call


def _array_at(context, builder, kind, address, shape):
    item = context.get_data_type(kind.dtype)
    step = itemsize = context.get_constant(types.intp, context.get_abi_sizeof(item))
    strides = []
    for length in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, length)
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(address, item.as_pointer())
    numba.np.arrayobj.populate_array(array, data, shape, strides, itemsize, meminfo=None)
    return array._getvalue()


# what PyTensor knows ------------------------------------------------------------------------------

REGISTRIES = [
    f"pytensor.link.numba.dispatch.basic.numba_funcify{what}"
    for what in ("", "_and_cache_key", "_default_op_cache_key")
]

# Missing: to ask whether Numba can compile an operation that is not PyTensor's own.
HAS_REGISTRIES = _has(" ".join(REGISTRIES), "users' operations are not compiled with Numba")

# Missing: the function that an operation of `wrap_py` calls, and a way to pickle one.
TELLS_WRAPPED = _has(
    "wrapped._FromFunctionOp__fn wrapped._FromFunctionOp__infer_shape",
    "what functions of wrap_py return is not converted, and they are pickled by their names",
)


def jitted_by_pytensor(function):
    """Return the jitted function in one that PyTensor compiled with Numba; None if there is none.

    Missing: to call from compiled code what PyTensor compiled. Transitions then run in Python.
    """
    return getattr(getattr(function, "vm", None), "jit_fn", None)


def is_registered(op) -> bool:
    """Whether someone has registered how Numba compiles an operation like this one."""
    registries = map(pkgutil.resolve_name, REGISTRIES) if HAS_REGISTRIES else ()
    return any(r.dispatch(type(op)) is not r.dispatch(object) for r in registries)


def parts_of(op: FromFunctionOp) -> tuple:
    """Return the arguments that make an operation of `wrap_py` anew, its function first.

    PyTensor pickles such an operation by the name of its function, under which another object may
    be, or which other processes do not have.
    """
    if not TELLS_WRAPPED:
        raise TypeError(
            f"This version of PyTensor does not tell which function {op} calls: take a class of "
            "pytensor.graph.Op with a method `perform` in place of wrap_py."
        )
    private = "_FromFunctionOp__"
    function, infer_shape = (getattr(op, private + name) for name in ("fn", "infer_shape"))
    return function, op.itypes, op.otypes, infer_shape


# the log density and the kernel -------------------------------------------------------------------


def _log_density_into(log_density, x, value):
    log_density[0](x, value)


@overload(_log_density_into, jit_options=compile_options(False))
def _log_density_into_overload(log_density, x, value):
    def compiled(log_density, x, value):
        call_for_nothing(log_density[0], (x, value, log_density))

    return compiled


@jitable
def evaluate(log_density, x, value, counts):
    """Evaluate the terms of the log density at `x` (d,) into `value` (3,); return their sum.

    Or -inf where that is NaN or +inf, so that such a proposal is rejected. `log_density` is what
    `ModelFunction.compiled` returned (int64 array) or, for plain Python, `ModelFunction.plain`.
    `counts[EVALUATIONS]` and, for NaN and +inf, `counts[NONFINITE]` go up by one.
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
