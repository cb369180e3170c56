"""Every link of the documentation points at something; of addresses of the web only the form."""

import re

import links
import pytest
from documentation import ROOT, pages

pytestmark = pytest.mark.skipif(not pages(), reason="the tests are not in a clone")

TEXTS = links.texts() if pages() else {}
PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in TEXTS]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    assert links.missing(page, TEXTS[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_addresses_have_the_form_of_addresses(page):
    assert links.malformed(TEXTS[page]) == []


def test_the_links_of_docstrings_and_of_the_citation_have_the_form_of_addresses():
    sources = [*(ROOT / "pymc_kameleon").rglob("*.py"), ROOT / "CITATION.cff"]
    assert [a for file in sources for a in links.malformed(file.read_text("utf-8"))] == []
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    dois = re.findall(r"^ *doi: (\S+)$", citation, re.MULTILINE)
    assert dois and all(links.DOI.fullmatch(doi) for doi in dois)


def test_links_that_lead_nowhere_are_found_out():
    page = ROOT / "docs" / "index.md"
    text = (
        "# One page\n[a](#one-page) [b](#no-page) [c](nowhere.md) [d](quickstart.md)\n"
        "{doc}`quickstart` {doc}`x <steps/no_step>` {doc}`notebooks/01_quickstart`\n"
        "`docs/no_file.py` `docs/own_kernel.py`\n"
        "```{image} no_picture.png\n```\n[e](quickstart.md#no-heading)\n"
    )
    lost = ["steps/no_step", "#no-page", "nowhere.md", "quickstart.md#no-heading"]
    assert links.missing(page, text) == [*lost, "no_picture.png", "docs/no_file.py"]
    text = "https://doi.org/10.1214/07-AOS574, https://doi.org/AOS574 and http://arxiv/1"
    assert links.malformed(text) == ["https://doi.org/AOS574", "http://arxiv/1"]
