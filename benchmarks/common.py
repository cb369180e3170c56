"""Tables, and steps driven by hand."""

import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import date
from importlib.metadata import packages_distributions, version
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm

from benchmarks import ALL_THREADS, LIBRARIES

__all__ = [
    "SEED",
    "DrivenStep",
    "all_threads",
    "busy_machine",
    "heading",
    "machine",
    "mark",
    "pymc_major",
    "show",
    "versions",
    "write",
]

SEED = 20140622


LOAD = "import numpy as np\na = np.ones((1000, 1000))\nwhile True: a @ a"
"""Another process, whose linear algebra has all the threads that there are."""


def all_threads() -> dict[str, str]:
    """Environment of a process that has as many threads as those of users have."""
    given = {f"{library}_NUM_THREADS" for library in LIBRARIES}
    return {k: v for k, v in os.environ.items() if k not in given} | {ALL_THREADS: "1"}


@contextmanager
def busy_machine():
    """Run a process beside, that multiplies matrices on all threads."""
    load = subprocess.Popen([sys.executable, "-c", LOAD], env=all_threads())
    try:
        yield
    finally:
        load.kill()
        load.wait()


def pymc_major() -> int:
    """Return 5 or 6."""
    return int(version("pymc").split(".")[0])


def versions(packages: set[str]) -> str:
    """Say which versions of packages, given by the names to import, are there, but for PyMC."""
    distributions = packages_distributions()
    names = sorted(distributions[package][0] for package in packages - {"pymc"})
    return ", ".join(f"{name} {version(name)}" for name in names)


def machine() -> str:
    """Say what computer this is, and the date."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, {date.today()}"


def heading(title: str, *paragraphs: str) -> str:
    """Print, and return, the lines above a table: title, versions, what the figures mean."""
    import pymc_kameleon

    packages = ("pymc", "pytensor", "numba", "numpy", "arviz")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    python = ".".join(map(str, sys.version_info[:3]))
    threads = "all threads" if ALL_THREADS in os.environ else "one thread"
    lines = [
        title,
        f"Python {python}, {versions}, pymc_kameleon {pymc_kameleon.__version__}; {threads}",
        *[textwrap.fill(paragraph, 100) for paragraph in paragraphs],
    ]
    print("\n" + "\n".join(lines), flush=True)
    return "\n".join(lines)


def show(rows: list[dict], title: str = "", columns: list[str] | None = None):
    """Print some columns (default all) of a table; a missing key is an empty cell."""
    table = pd.DataFrame(rows)
    shown = table if columns is None else table[[name for name in columns if name in table]]
    text = shown.to_string(index=False, na_rep="", float_format=_number)
    print(f"\n{title}\n{text}\n", flush=True)


def write(rows: list[dict], lines: str, path: Path):
    """Write all columns of a table as CSV.

    Parameters
    ----------
    rows : list of dict
    lines : str
        What `heading` returned, the first lines of the file, which begin with #.
    path : Path
        Without the version of PyMC that is added to its name.
    """
    path = path.with_name(f"{path.stem}-pymc{version('pymc')}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = "".join(f"# {line}\n" for line in lines.splitlines())
    path.write_text(comments + pd.DataFrame(rows).to_csv(index=False))
    print(f"  {path}", flush=True)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mark(value: float, bound: float, largest: bool = True) -> dict[str, str]:
    """Columns that say what was to reach, and whether it was."""
    reached = value <= bound if largest else value >= bound
    return {"target": f"{'<=' if largest else '>='} {bound:.7g}", "met": "yes" if reached else "NO"}


class DrivenStep:
    """A step that is called by hand, in the order in which `pymc.sample` does it.

    Parameters
    ----------
    model : pymc.Model
    make_step : callable
        Makes the step; called inside the model.
    """

    def __init__(self, model: pm.Model, make_step: Callable):
        with model:
            self.step = make_step()
        self.start = model.initial_point()
        self.begin()

    def begin(self, seed: int | list[int] = SEED):
        """Begin a chain, which tunes, at the initial point of the model."""
        rng = np.random.default_rng(seed)
        if hasattr(self.step, "setup_chain"):
            self.step.setup_chain(rng, 0, 0)
        else:
            self.step.set_rng(rng)
        self.step.tune = True
        self.step.reset_tuning()
        self.point = self.start

    def draw(self, n: int) -> tuple[float, float]:
        """Make `n` draws; return CPU seconds a draw and the mean of the statistic `accepted`."""
        accepted, point, step = 0.0, self.point, self.step.step
        start = time.process_time()
        for _ in range(n):
            point, (statistics,) = step(point)
            accepted += statistics["accepted"]
        seconds = (time.process_time() - start) / n
        self.point = point
        return seconds, accepted / n

    def tune(self, draws: int):
        """Make `draws` tuning draws and stop tuning."""
        self.draw(draws)
        self.step.stop_tuning()
