"""Docstrings and signatures: every parameter is documented once, and has a type."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from models import run_python

import pymc_kameleon
from pymc_kameleon.steps.shared_parameters import ENTRIES, with_shared_parameters

STEPS = [name for name in pymc_kameleon.__all__ if name.endswith("Step")]
MODULES = (
    "diagnostics",
    "distributed",
    "kernels",
    "latent_gp",
    "plots",
    "pseudo_marginal",
    "store",
    "surrogate",
    "targets",
    "testing",
)


def documented(doc):
    """Names in the section "Parameters", in the form of numpydoc."""
    section = inspect.cleandoc(doc).split("Parameters\n----------\n")[1].split("\n\n")[0]
    heads = [line for line in section.splitlines() if not line.startswith(" ")]
    return [name.strip() for head in heads for name in head.split(" : ")[0].split(",")]


@pytest.mark.parametrize("name", STEPS)
def test_every_parameter_is_documented_once(name):
    step = getattr(pymc_kameleon, name)
    arguments = list(inspect.signature(step).parameters)
    assert sorted(documented(step.__doc__)) == sorted(arguments)
    assert "%(" not in step.__doc__
    assert max(map(len, inspect.getdoc(step).splitlines())) <= 96


def test_entries_take_the_indentation_of_their_line():
    class Step:
        """Summary, 10 % of it.

        Parameters
        ----------
        %(disperse)s
        other : {"a", "b"}
        """

    lines = with_shared_parameters(Step).__doc__.splitlines()
    first, *rest = ENTRIES["disperse"].splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == first)
    indent = lines[start].removesuffix(first)
    assert lines[start + 1 : start + 1 + len(rest)] == [indent + line for line in rest]
    assert lines[0] == "Summary, 10 % of it."
    assert lines[start + 1 + len(rest)] == indent + 'other : {"a", "b"}'


def test_an_unknown_entry_is_an_error():
    class Step:
        """Summary.

        %(no_such_entry)s
        """

    with pytest.raises(KeyError, match="no_such_entry"):
        with_shared_parameters(Step)


def test_a_class_without_docstring_stays():
    assert with_shared_parameters(type("Step", (), {})).__doc__ is None


@pytest.mark.slow
@pytest.mark.documentation
def test_import_without_docstrings():
    code = "import pymc_kameleon as p; assert p.KameleonStep.__doc__ is None"
    result = run_python(code + "; print('imported')", flags=["-OO"])
    assert result.stdout == "imported\n", result.stderr


def public_functions():
    """Functions and methods that users call, by name."""
    modules = [
        pymc_kameleon,
        *(importlib.import_module(f"pymc_kameleon.{name}") for name in MODULES),
    ]
    for module in modules:
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found):
                for own, method in vars(found).items():
                    if inspect.isfunction(method) and (
                        own == "__init__" or not own.startswith("_")
                    ):
                        yield f"{name}.{own}", method


def test_type_checkers_see_all_public_names():
    """What is imported where types are checked is what `__all__` has."""
    tree = ast.parse(Path(pymc_kameleon.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    ]
    seen = [alias.name for node in block.body for alias in node.names]
    assert sorted(seen) == sorted(pymc_kameleon.__all__)


def untyped(function):
    """What has no type in the signature of a function: parameters, and the result."""
    signature = inspect.signature(function)
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is inspect.Parameter.empty and name not in ("self", "cls")
    ]
    has_result = signature.return_annotation is not inspect.Signature.empty
    return missing if has_result else [*missing, "the result"]


def test_what_is_public_has_types():
    found = {name: untyped(function) for name, function in public_functions()}
    assert len(found) > 50
    assert {name: missing for name, missing in found.items() if missing} == {}
