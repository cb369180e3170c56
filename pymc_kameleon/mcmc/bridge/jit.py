"""Compile functions with Numba once, and keep what is compiled on disk.

Transitions are the same machine code for every model, or the same functions in plain Python. Each
comment "Missing" says which public way there is not, and `has_names` what is done, slower, where a
version lacks one of the names.
"""

import functools
import hashlib
from pathlib import Path

import numba
from numba.extending import is_jitted, overload, register_jitable

from pymc_kameleon.mcmc.bridge.undocumented import has_names

SIMD = {"contract", "nsz", "reassoc"}
"""Fast-math freedoms that let a sum be vectorised; NaN and infinity keep their meaning."""

OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy"}
"""No C callback, which Numba would compile with a copy of all that a function does; and a division
by 0 is infinite or NaN, as in NumPy: one that may raise keeps its loop from being vectorised."""

# Missing: a cache that asks about more files than that of the function alone.
KEEPS_ON_DISK = has_names(
    "numba.core.caching.IndexDataCacheFile dispatcher._cache._cache_file dispatcher._cache._impl"
    " dispatcher._cache._impl.filename_base dispatcher._cache.cache_path",
    "what is compiled is not kept on disk",
)

# Missing: to say that a function makes no arrays.
COUNTS_AT_WILL = has_names(
    "numba.core.options.DefaultOptions._nrt", "compiled loops count who holds their arrays"
)

CALLERS = {
    "__main__",
    "approximate",
    "demo",
    "diagnostics",
    "distributed",
    "evidence",
    "plots",
    "steps",
    "store",
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
    root, digest = Path(__file__).parents[2], hashlib.sha256()
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
RESOLVES_ONCE = has_names(
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
