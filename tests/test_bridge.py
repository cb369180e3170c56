"""Without a name that Numba or PyTensor do not document: slower, as the log says, and right."""

import ast
import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numba
import numpy as np
import pytensor.tensor as pt
import pytest
from models import run_python
from pytensor.compile.ops import FromFunctionOp

MODULES = [
    f"pymc_kameleon.mcmc.bridge.{name}" for name in ("undocumented", "jit", "address", "pytensor")
]
"""In the order in which they import each other."""

SOURCES = {name: importlib.util.find_spec(name).origin for name in MODULES}

ON_DISK = "what is compiled is not kept on disk"
COUNTED = "compiled loops count who holds their arrays"
RESOLVED = "the types of all arrays are looked at before each draw"
IN_PYTHON = "transitions run in plain Python"
REGISTERED = "users' operations are not compiled with Numba"
WRAPPED = "what functions of wrap_py return is not converted"

NAMES = {
    "IndexDataCacheFile": ON_DISK,
    "_cache_file": ON_DISK,
    "_impl": ON_DISK,
    "filename_base": ON_DISK,
    "cache_path": ON_DISK,
    "_nrt": COUNTED,
    "entry_point": RESOLVED,
    "overloads": RESOLVED,
    "get_call_template": IN_PYTHON,
    "library": IN_PYTHON,
    "fndesc": IN_PYTHON,
    "mangled_name": IN_PYTHON,
    "get_pointer_to_function": IN_PYTHON,
    "call_conv": IN_PYTHON,
    "get_function_type": IN_PYTHON,
    "call_function": IN_PYTHON,
    "return_status_propagate": IN_PYTHON,
    "populate_array": IN_PYTHON,
    "instance_class": None,
    "numba_funcify": REGISTERED,
    "_FromFunctionOp__": WRAPPED,
    "jit_fn": None,
}
"""Name -> what the log says if it is gone."""


def without(*names):
    """The modules of a version in which some names are other ones, and all that they define."""
    sources = {module: Path(origin).read_text() for module, origin in SOURCES.items()}
    for name in names:
        assert any(name in source for source in sources.values())
        sources = {m: source.replace(name, f"{name}_gone") for m, source in sources.items()}
    modules = {name: ModuleType(name) for name in sources}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            module.__file__ = SOURCES[name]
            patch.setitem(sys.modules, name, module)
            exec(compile(sources[name], SOURCES[name], "exec"), module.__dict__)
    defined = {k: v for module in modules.values() for k, v in vars(module).items()}
    return modules, SimpleNamespace(**{k: v for k, v in defined.items() if k[:2] != "__"})


class One(NamedTuple):
    number: float


class Two(NamedTuple):
    number: float


def filled(n, x):
    out = np.empty(n)
    for i in range(n):
        out[i] = x
    return out


def test_all_that_is_asked_for_is_taken_away_below():
    owned = r"(?:numba\.core|numba\.np|dispatcher|wrapped)\.(?:\w+\.)*(\w+)"
    asked = [n for origin in SOURCES.values() for n in re.findall(owned, Path(origin).read_text())]
    assert len(asked) > 15
    assert {name.replace("__fn", "__").replace("__infer_shape", "__") for name in asked} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_is_right(name, caplog):
    with caplog.at_level(logging.WARNING, logger="pymc.kameleon"):
        _, bridge = without(name)
    said = [r.getMessage() for r in caplog.records]
    assert all(name in line or NAMES[name] is None for line in said)
    assert NAMES[name] is None or any(NAMES[name] in line for line in said)

    jitted = bridge.resolved_once(bridge.jit(filled, allocates=True))
    for _ in range(2):
        np.testing.assert_array_equal(jitted(3, 2.0), np.full(3, 2.0))

    @bridge.by_class
    def doubled(value):
        """Twice the number."""

    doubled.register(One, lambda value: 2.0 * value.number, allocates=False)
    doubled.register(Two, lambda value: 4.0 * value.number, allocates=True)

    @numba.njit
    def both(one, two):
        return doubled(one), doubled(two)

    assert both(One(1.0), Two(1.0)) == both.py_func(One(1.0), Two(1.0)) == (2.0, 4.0)

    @numba.njit
    def divided(x, y):
        if y == 0.0:
            raise ValueError("nothing to divide by")
        return x / y

    call = bridge.by_address(numba.types.float64)

    @numba.njit
    def called(routine, x, y):
        return call(routine, (x, y))

    routine = bridge.machine_code_address(divided, (numba.types.float64,) * 2)
    assert called(routine, 3.0, 2.0) == called.py_func(divided, 3.0, 2.0) == 1.5
    with pytest.raises(ValueError, match="nothing to divide by"):
        called(routine, 3.0, 0.0)

    op = FromFunctionOp(filled, [pt.lscalar, pt.dscalar], [pt.dvector], None)
    if NAMES[name] == WRAPPED:
        with pytest.raises(TypeError, match="does not tell which function"):
            bridge.parts_of(op)
    else:
        assert bridge.parts_of(op)[0] is filled
    assert not bridge.is_registered(op)


def test_a_class_that_is_not_registered_is_named():
    from pymc_kameleon.mcmc.proposals import propose

    with pytest.raises(TypeError, match=r"No propose is registered for One.*register_proposal"):
        propose(One(1.0), None, None, None)


PACKAGE = Path(SOURCES[MODULES[0]]).parents[2]


def test_what_calls_compiled_code_holds_none():
    """Else an edit would leave machine code of before on disk; and all names are names of files."""
    from pymc_kameleon.mcmc.bridge.jit import CALLERS

    compiling = {"jit", "jit_by_address", "jit_inner", "jitable", "by_class"}
    named = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__init__")}
    assert named >= CALLERS
    assert {"demo", "store", "steps", "plots", "evidence"} <= CALLERS
    for path in PACKAGE.rglob("*.py"):
        is_caller = path.relative_to(PACKAGE).with_suffix("").parts[0] in CALLERS
        taken = [
            (node.module or "", {alias.name for alias in node.names})
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        compiles = any(compiling & names for module, names in taken if "mcmc.bridge" in module)
        assert not (is_caller and compiles), path
        if compiles:
            parts = {module.removeprefix("pymc_kameleon.").split(".")[0] for module, _ in taken}
            assert not parts & CALLERS, path


CHAIN = """
import logging
import sys

from test_bridge import without

logging.basicConfig(format="%(message)s", stream=sys.stderr)
if len(sys.argv) > 1:
    sys.modules.update(without(*sys.argv[1:])[0])

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.compile import ops
from pymc_kameleon import AdaptiveMetropolisStep

wrap_python = getattr(ops, "wrap_py", None) or ops.as_op
square = wrap_python(itypes=[pt.dvector], otypes=[pt.dscalar])(lambda x: np.sum(x**2))
for black_box in (False, True):
    with pm.Model() as model:
        data = pm.Data("data", np.array([1.0, 2.0]))
        x = pm.Normal("x", shape=2)
        if black_box:
            pm.Potential("p", -square(x))
        pm.Normal("y", pt.exp(x), observed=data)
        step = AdaptiveMetropolisStep(steps_per_draw=5)
    step.setup_chain(np.random.default_rng(1), 20, 1)
    point = model.initial_point()
    for _ in range(40):
        point, _ = step.step(point)
    print(step.runs_compiled, *point["x"])
"""


@pytest.mark.slow
@pytest.mark.numerics
def test_a_chain_is_the_same(tmp_path):
    """To rounding, with names of each kind gone."""

    def chains(*gone):
        # What is compiled with counting is another machine code.
        cache = tmp_path / ("counted" if "_nrt" in gone else "not counted")
        cache.mkdir(exist_ok=True)
        process = run_python(CHAIN, *gone, NUMBA_CACHE_DIR=str(cache))
        assert process.returncode == 0, process.stderr[-2000:]
        lines = [line.split() for line in process.stdout.splitlines()]
        found = np.array([line[1:] for line in lines], float)
        return process.stderr, [line[0] for line in lines], found

    _, compiled, expected = chains()
    assert compiled == ["True", "False"]
    for gone, is_compiled in (
        (("_nrt", "instance_class", "_impl"), True),
        (("populate_array", "_FromFunctionOp__"), False),
        (("jit_fn",), False),
    ):
        said, compiled, found = chains(*gone)
        assert all(NAMES[name] is None or NAMES[name] in said for name in gone)
        assert compiled == [str(is_compiled), "False"], gone
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(gone))
