"""Call machine code by its address, from code that is compiled once and cached.

What differs from model to model enters compiled code as an address. In plain Python a callable
stands where the address stood.
"""

import numba
from numba import types
from numba.extending import intrinsic, is_jitted, overload

from pymc_kameleon.mcmc.bridge.jit import compile_options
from pymc_kameleon.mcmc.bridge.undocumented import has_names

# Missing: to call compiled code by its address, with its errors passed on. A C callback passes
# none, and a function that is an argument is compiled and optimised again in each caller.
BY_ADDRESS = has_names(
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


def address_once(jitted, argument_types, kind=None):
    """Return its `machine_code_address`, which is looked for once a process.

    `argument_types` returns the Numba types, which are always the same for a `kind`, the class of
    the first argument where it may be one of several.
    """
    if not is_jitted(jitted):  # NUMBA_DISABLE_JIT
        return jitted
    if (jitted, kind) not in _addresses:
        _addresses[jitted, kind] = machine_code_address(jitted, argument_types())
    return _addresses[jitted, kind]


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
