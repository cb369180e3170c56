"""Each room of the package imports from those below it alone, and no module needs itself."""

import ast
import graphlib
import importlib.util
from pathlib import Path

import pytest
from documentation import DOCS

import pymc_kameleon

ROOT = Path(pymc_kameleon.__file__).parent
NAME = ROOT.name

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the tests are not in a clone")


def layers():
    """Rooms from the top, as the contributing guide draws them."""
    spec = importlib.util.spec_from_file_location("draw_layers", DOCS / "draw_layers.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        spec.loader.exec_module(module)
    return [names.split(", ") for names, _ in module.LAYERS]


def module_of(parts):
    """The module that a dotted name is or is in, as a tuple; a folder is its first file."""
    for n in range(len(parts), -1, -1):
        place = ROOT.joinpath(*parts[:n])
        if place.with_suffix(".py").exists() and n:
            return tuple(parts[:n])
        if (place / "__init__.py").exists():
            return (*parts[:n], "__init__")
    raise AssertionError(parts)


def imported(source):
    """The modules of the package that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == NAME:
                yield module_of(rest)


def arrows():
    """Which modules each module imports."""
    found = {}
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").parts
        found[module] = {to for to in imported(path.read_text("utf-8")) if to != module}
    return found


def test_every_room_is_in_a_layer():
    rooms = {module[0] for module in arrows()} - {"__init__", "__main__"}
    named = [name for layer in layers() for name in layer]
    assert sorted(named) == sorted(rooms)


def test_imports_go_down():
    level = {name: i for i, layer in enumerate(layers()) for name in layer}
    upwards = [
        f"{'.'.join(module)} -> {'.'.join(to)}"
        for module, others in arrows().items()
        for to in others
        if module[0] in level and to[0] != module[0] and level[module[0]] >= level.get(to[0], -1)
    ]
    assert upwards == []


def test_no_module_needs_itself():
    list(graphlib.TopologicalSorter(arrows()).static_order())


def test_an_import_inside_a_function_counts():
    source = f"def f():\n    from {NAME}.steps import kameleon\n    import {NAME}.evidence\n"
    assert set(imported(source)) == {("steps", "kameleon"), ("evidence", "__init__")}
