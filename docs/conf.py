"""Sphinx configuration: python -m sphinx -W -b html docs docs/_build/html."""

import inspect
import re
import shutil
from pathlib import Path

from pymc.step_methods.arraystep import BlockedStep

import pymc_kameleon  # docstrings are completed at import, so the package is imported, not parsed

HERE = Path(__file__).parent

project = "pymc_kameleon"
author = "The pymc_kameleon developers"
copyright = author
version = release = pymc_kameleon.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "numpydoc",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints", "jupyter_execute"]

# Pages are MyST; equations are numbered where they have a label.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
math_eqref_format = "[{number}]"  # this site's numbers; those in parentheses are the papers'

# Docstrings are numpydoc's; a word in single backquotes is a name of the package or a literal.
default_role = "py:obj"
highlight_language = "none"  # pseudo-code
autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
templates_path = ["_templates"]

html_theme = "pydata_sphinx_theme"
html_title = "pymc_kameleon"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_sidebars = {
    page: []
    for page in ("index", "quickstart", "which_step", "compare", "measured", "papers_claims")
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def copy_notebooks():
    """Bring ../notebooks into the source tree, where Sphinx can see it; git ignores the copies."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    originals = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
    for copied in target.glob("*.ipynb"):
        if copied.name not in {original.name for original in originals}:
            copied.unlink()
    for original in originals:
        copied = target / original.name
        if not copied.exists() or copied.stat().st_mtime < original.stat().st_mtime:
            shutil.copy2(original, copied)


def signature_of_a_step(app, what, name, obj, options, signature, returns):
    """Give a step the signature of its `__init__`, which PyMC's `__new__` hides."""
    if what == "class" and issubclass(obj, BlockedStep):
        parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        return str(inspect.Signature(plain)), returns
    return None


def bracket_numbers(app, page, template, context, doctree):
    """Write the numbers of equations as references to them are written."""
    if "body" in context:
        pattern = r'(<span class="eqno">)\((\d+)\)'
        context["body"] = re.sub(pattern, r"\1[\2]", context["body"])


def setup(app):
    """Connect what Sphinx calls."""
    copy_notebooks()
    app.connect("autodoc-process-signature", signature_of_a_step)
    app.connect("html-page-context", bracket_numbers)
