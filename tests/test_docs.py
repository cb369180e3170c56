"""The documentation: its programs run, and what it names is there."""

import importlib.util
import re
import runpy
import tomllib

import documentation
import numpy as np
import pymc as pm
import pytest
from documentation import DOCS, ROOT

import pymc_kameleon

PAGES = documentation.pages()
PYMC_6 = int(pm.__version__.split(".")[0]) >= 6
pytestmark = pytest.mark.skipif(not PAGES, reason="the tests are not in a clone")


def named(page):
    return str(page.relative_to(ROOT))


def having(find):
    return [pytest.param(page, id=named(page)) for page in PAGES if find(page)]


def programs():
    """Those of the README are not long, nor the first of each page with PyMC 6."""
    return [
        pytest.param(
            source,
            id=f"{named(page)}-{i}",
            marks=pytest.mark.documentation if DOCS in page.parents and (i or not PYMC_6) else [],
        )
        for page in PAGES
        for i, source in enumerate(documentation.programs(page))
    ]


@pytest.fixture
def small(monkeypatch, tmp_path):
    documentation.sample_little(monkeypatch, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("source", programs())
def test_the_programs_of_a_page_run(source, small):
    exec(compile(source, "page", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", having(documentation.names_of_code))
def test_the_code_that_a_page_names_exists(page):
    missing = [n for n in documentation.names_of_code(page) if not documentation.exists(n)]
    assert missing == []


def test_a_name_that_does_not_exist_is_found_out():
    assert documentation.exists("mcmc.loop.run_plain")
    assert documentation.exists("steps.kameleon.KameleonStep.paper")
    assert not documentation.exists("mcmc.loop.no_such_thing")
    assert not documentation.exists("no_such_module.run")


@pytest.mark.parametrize("page", having(documentation.quoted_warnings))
def test_the_warnings_that_a_page_quotes_are_given(page):
    texts = documentation.texts_of_the_package()
    assert [quoted for quoted in documentation.quoted_warnings(page) if quoted not in texts] == []


def example(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.documentation
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["own_kernel", "own_proposal", "own_surrogate"])
def test_an_example_runs_as_a_program(name, small):
    runpy.run_path(str(DOCS / f"{name}.py"), run_name="__main__")


def test_the_kernel_has_the_gradient_that_it_says():
    kernel = example("own_kernel")
    rng = np.random.default_rng(1)
    x, y, step = rng.normal(size=3), rng.normal(size=3), 1e-6 * np.eye(3)
    rises = [kernel.value(x + h, y, 1.5) - kernel.value(x - h, y, 1.5) for h in step]
    np.testing.assert_allclose(kernel.gradient(x, y, 1.5), np.array(rises) / 2e-6, rtol=1e-7)


def test_the_kernel_is_the_transform_of_its_spectrum():
    """The mean of 100 000 cosines: 6 standard errors of 1/sqrt(2) each, a null of 2e-9."""
    kernel = example("own_kernel")
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=3), rng.normal(size=3)
    frequencies = kernel.frequencies(100_000, 3, 1.5, rng)
    found = np.mean(np.cos(frequencies @ (x - y)))
    assert abs(found - kernel.value(x, y, 1.5)) < 6 * 0.71 / np.sqrt(100_000)


def test_the_surrogate_predicts_the_simulator_between_its_points():
    module = example("own_surrogate")
    points = np.random.default_rng(1).uniform(-1, 1, (50, 2))
    truth = np.array([module.log_likelihood(point) for point in points])
    mean = module.fitted_surrogate().predict(points)
    assert np.std(mean - truth) < 0.1 * np.std(truth)


STEPS = [name for name in pymc_kameleon.__all__ if name.endswith("Step")]


@pytest.mark.parametrize("where", documentation.lists_of_steps() if PAGES else [])
def test_a_list_of_all_steps_has_all_of_them(where):
    found = documentation.lists_of_steps()[where]
    assert [step for step in STEPS if not re.search(rf"\b{step}\b", found)] == []


def test_the_comparison_runs_all_steps():
    samplers = pytest.importorskip("benchmarks.compare_samplers").SAMPLERS
    assert [step for step in STEPS if not re.search(rf"\b{step}\b", "\n".join(samplers))] == []


def test_the_picture_of_decisions_names_steps_that_exist():
    module = example("draw_decision")
    steps = [step.split("(")[0] for _, step in module.QUESTIONS] + [module.LAST]
    for step in set(steps) - {"NUTS of PyMC"}:
        assert step in pymc_kameleon.__all__
    assert len(module.draw().axes[0].texts) > 2 * len(module.QUESTIONS)


def test_one_version_everywhere():
    version = pymc_kameleon.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")
