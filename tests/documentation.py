"""What the documentation holds: programs, names of code, texts of warnings; and how to run it."""

import functools
import importlib
import re
from pathlib import Path

import pymc as pm
import pytensor

import pymc_kameleon
from pymc_kameleon import latent_gp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "pymc_kameleon"

PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```"
    r"|^```\{literalinclude\} (?P<file>\S+\.py)$",
    re.MULTILINE | re.DOTALL,
)
CODE_TABLE = re.compile(r"^## In the code\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
WARNING_TABLE = re.compile(r"^\| warning \|.*?\n\|[-| ]+\n((?:\|.*\n)+)", re.MULTILINE)
LITERAL = re.compile(r"`([^`\n]+)`")
ADJACENT = re.compile(r'"\s*\n\s*f?"')


def sample_little(monkeypatch, folder):
    """Let samplers and estimates make a few draws, in a folder where files may be left.

    Models are not compiled, which would take most of the time: other tests compile each step.
    """
    plain = pm.sample
    monkeypatch.setattr(pytensor.config, "mode", "FAST_COMPILE")

    def sample(*args, **kwargs):
        if "initvals" not in kwargs:
            kwargs["chains"] = min(kwargs.get("chains", 2), 2)
        kwargs |= {"tune": 20, "draws": 10, "cores": 1, "progressbar": False}
        return plain(*args, **kwargs)

    few = functools.partial(latent_gp.log_marginal_likelihood, n_temperatures=10, n_particles=8)
    monkeypatch.setattr(latent_gp, "log_marginal_likelihood", few)
    approximate = pymc_kameleon.surrogate_posterior

    def approximate_little(*args, **kwargs):
        return approximate(*args, **kwargs | {"n_evaluations": 60, "draws": 50})

    monkeypatch.setattr(pymc_kameleon, "surrogate_posterior", approximate_little)
    monkeypatch.setattr(pm, "sample", sample)
    monkeypatch.chdir(folder)


def pages():
    """Paths of all pages that are written by hand, README included; empty if there are no docs."""
    found = [
        page
        for page in sorted(DOCS.rglob("*.md"))
        if not {"_build", "generated", "notebooks"} & set(page.relative_to(DOCS).parts)
    ]
    return [*found, ROOT / "README.md"] if found else []


def programs(page):
    """All Python of a page, in order: blocks, and files that it includes.

    Those of a page of the site are one program, those of the README one each.
    """
    parts = []
    for match in PROGRAM.finditer(page.read_text(encoding="utf-8")):
        if match["code"] is not None:
            parts.append(match["code"])
        else:
            parts.append((page.parent / match["file"]).read_text(encoding="utf-8"))
    return parts if page.name == "README.md" or not parts else ["\n\n".join(parts)]


def section(text, heading):
    """What follows a heading of the second level, until the next one."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text):
    """First cell of each row of the tables of a text."""
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))


def lists_of_steps():
    """What claims to name every step, by where it stands."""
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in (
            "README.md",
            "docs/which_step.md",
            "docs/steps/index.md",
            "docs/api/steps.md",
            "docs/project/citing.md",
            "docs/compare.md",
        )
    }
    methods = [line for line in texts["docs/steps/index.md"].splitlines() if line.isidentifier()]
    titles = [(DOCS / f"steps/{name}.md").read_text("utf-8").partition("\n")[0] for name in methods]
    return {
        "README.md": rows(section(texts["README.md"], "The steps")),
        "docs/which_step.md": rows(section(texts["docs/which_step.md"], "The steps side by side")),
        "docs/steps/index.md": "\n".join(titles),
        "docs/api/steps.md": texts["docs/api/steps.md"],
        "docs/project/citing.md": rows(texts["docs/project/citing.md"]),
        "docs/compare.md": rows(texts["docs/compare.md"]),
    }


def names_of_code(page):
    """Dotted names in the tables "In the code" of a page, without the name of the package."""
    parts = {path.stem for path in PACKAGE.iterdir()}
    return [
        name
        for table in CODE_TABLE.findall(page.read_text(encoding="utf-8"))
        for name in LITERAL.findall(table)
        if re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] in parts
    ]


def exists(name):
    """Whether a dotted name below the package is a module, or something in one."""
    parts = ["pymc_kameleon", *name.split(".")]
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def quoted_warnings(page):
    """Texts in the first column of the tables of warnings of a page."""
    return [
        row.split("|")[1].strip().strip("`")
        for table in WARNING_TABLE.findall(page.read_text(encoding="utf-8"))
        for row in table.splitlines()
    ]


def texts_of_the_package():
    """All source of the package, string literals that are split over lines joined."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    return ADJACENT.sub("", "\n".join(sources))
