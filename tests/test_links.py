"""Every link of the documentation points at something; of addresses of the web only the form."""

import json
import re
from urllib.parse import urlsplit

import pytest
from documentation import DOCS, ROOT, pages

pytestmark = pytest.mark.skipif(not pages(), reason="the tests are not in a clone")

FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\]\((?P<target>[^)\s]+)(?: \"[^\"]*\")?\)")
DOCUMENT = re.compile(r"\{doc\}`(?:[^`<]*<)?(?P<target>[^`<>]+)>?`")
CARD = re.compile(r"^:link: (?P<target>\S+)\n:link-type: doc$", re.MULTILINE)
INCLUDED = re.compile(r"^ *```\{(?:literalinclude|include|image|figure)\} (\S+)$", re.MULTILINE)
OWN_PATH = re.compile(
    r"(?<!\})`((?:docs|tests|notebooks|benchmarks|pymc_kameleon|\.ci|\.github)/[\w./-]*)`"
)
MADE = ("docs/_build", "docs/api/generated", "benchmarks/results")
"""Folders that commands make."""

HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
ADDRESS = re.compile(r"https?://[^\s<>\"'`\])}]+")
DOI = re.compile(r"10\.\d{4,9}/\S+")


def texts():
    """Text of every page, of the changelog, and of the markdown cells of each notebook."""
    found = {page: page.read_text(encoding="utf-8") for page in pages()}
    found[ROOT / "CHANGELOG.md"] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        found[notebook] = "\n\n".join(sources)
    return found


def anchors(text):
    """Anchors of a page's headings, as GitHub and the site make them."""
    plain = (re.sub(r"[^\w\- ]", "", heading).lower() for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


def in_repository(path):
    """Where a path of the site is in the repository: notebooks are copied into `docs`."""
    copies = DOCS / "notebooks"
    return ROOT / "notebooks" / path.relative_to(copies) if copies in path.parents else path


def _page(folder, name):
    """The file of the site's page `name`, seen from `folder`; None if there is none."""
    start = DOCS if name.startswith("/") else folder
    path = in_repository((start / name.lstrip("/")).resolve())
    found = (path.with_name(path.name + end) for end in (".md", ".ipynb"))
    return next((file for file in found if file.is_file()), None)


def missing(page, text):
    """Targets of a page's links that are not there."""
    folder, prose = page.parent, FENCED.sub("", text)
    lost = [n for find in (DOCUMENT, CARD) for n in find.findall(prose) if not _page(folder, n)]
    files = INCLUDED.findall(text)
    for target in LINK.findall(prose):
        if urlsplit(target).scheme:
            continue
        path, _, anchor = target.partition("#")
        file = in_repository((folder / path).resolve()) if path else page
        if not file.exists():
            lost.append(target)
        elif anchor and anchor not in anchors(text if file == page else file.read_text("utf-8")):
            lost.append(target)
    lost += [name for name in files if not in_repository((folder / name).resolve()).exists()]
    return lost + [
        path
        for path in OWN_PATH.findall(prose)
        if not path.startswith(MADE) and not (ROOT / path).exists()
    ]


def malformed(text):
    """Addresses of the web that cannot be right, by their form alone."""
    found = (address.rstrip(".,;:") for address in ADDRESS.findall(text))
    return [address for address in found if not _is_well_formed(address)]


def _is_well_formed(address):
    parts = urlsplit(address)
    host = parts.hostname or ""
    if host == "localhost" or re.fullmatch(r"[\d.]+", host):
        return True
    named = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host) is not None
    is_doi = host in ("doi.org", "dx.doi.org")
    return named and (not is_doi or DOI.fullmatch(parts.path.lstrip("/")) is not None)


TEXTS = texts() if pages() else {}
PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in TEXTS]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    assert missing(page, TEXTS[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_addresses_have_the_form_of_addresses(page):
    assert malformed(TEXTS[page]) == []


def test_the_links_of_docstrings_and_of_the_citation_have_the_form_of_addresses():
    sources = [*(ROOT / "pymc_kameleon").rglob("*.py"), ROOT / "CITATION.cff"]
    assert [a for file in sources for a in malformed(file.read_text("utf-8"))] == []
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    dois = re.findall(r"^ *doi: (\S+)$", citation, re.MULTILINE)
    assert dois and all(DOI.fullmatch(doi) for doi in dois)


def test_links_that_lead_nowhere_are_found_out():
    page = ROOT / "docs" / "index.md"
    text = (
        "# One page\n[a](#one-page) [b](#no-page) [c](nowhere.md) [d](quickstart.md)\n"
        "{doc}`quickstart` {doc}`x <steps/no_step>` {doc}`notebooks/01_quickstart`\n"
        "`docs/no_file.py` `docs/own_kernel.py`\n"
        "```{image} no_picture.png\n```\n[e](quickstart.md#no-heading)\n"
    )
    lost = ["steps/no_step", "#no-page", "nowhere.md", "quickstart.md#no-heading"]
    assert missing(page, text) == [*lost, "no_picture.png", "docs/no_file.py"]
    text = "https://doi.org/10.1214/07-AOS574, https://doi.org/AOS574 and http://arxiv/1"
    assert malformed(text) == ["https://doi.org/AOS574", "http://arxiv/1"]
