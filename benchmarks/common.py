"""Tables, results of `pymc.sample`, and steps driven by hand."""

import logging
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

__all__ = ["DrivenStep", "dataset", "heading", "mark", "pymc_major", "sample", "show"]

SEED = 20140622


def pymc_major() -> int:
    """Return 5 or 6."""
    return int(version("pymc").split(".")[0])


def heading(title: str, *paragraphs: str) -> str:
    """Lines above a table: title, versions, and what the figures mean."""
    import pymc_kameleon

    packages = ("pymc", "pytensor", "numba", "numpy", "arviz")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [
        title,
        f"Python {python}, {versions}, pymc_kameleon {pymc_kameleon.__version__}; one thread",
        *[textwrap.fill(paragraph, 100) for paragraph in paragraphs],
    ]
    return "\n".join(lines)


def show(
    rows: list[dict],
    lines: str,
    path: Path,
    columns: list[str] | None = None,
    write: bool = True,
) -> pd.DataFrame:
    """Print some columns of a table below its heading, and write all of them as CSV.

    Parameters
    ----------
    rows : list of dict
        The columns are the keys; a missing one is an empty cell.
    lines : str
        What `heading` returned. The CSV has it as comments that begin with #.
    path : Path
        Of the CSV, without the version of PyMC that is added to its name.
    columns : list of str, optional
        Columns to print; default all.
    write : bool
        False prints only.
    """
    table = pd.DataFrame(rows)
    path = path.with_name(f"{path.stem}-pymc{version('pymc')}.csv")
    shown = table if columns is None else table[[name for name in columns if name in table]]
    text = shown.to_string(index=False, na_rep="", float_format=_number)
    print(f"\n{lines}\n\n{text}", flush=True)
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        comments = "".join(f"# {line}\n" for line in lines.splitlines())
        path.write_text(comments + table.to_csv(index=False))
        print(f"\n  {path}", flush=True)
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mark(value: float, bound: float, largest: bool = True) -> dict[str, str]:
    """Columns that say what was to reach, and whether it was."""
    reached = value <= bound if largest else value >= bound
    return {"target": f"{'<=' if largest else '>='} {bound:g}", "met": "yes" if reached else "NO"}


def dataset(result, group: str = "posterior"):
    """Group of what `pymc.sample` returned as an `xarray.Dataset`, on PyMC 5 and 6."""
    node = result[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node


class Stopwatch:
    """Callback of `pymc.sample` that takes the CPU time after three draws of each chain."""

    def __init__(self, tune: int, draws: int):
        self.marks = (0, tune - 1, tune + draws - 1)
        self.times: list[float] = []

    def __call__(self, trace, draw):
        if draw.draw_idx in self.marks:
            self.times.append(time.process_time())

    def seconds(self) -> np.ndarray:
        """Seconds of tuning (without its first draw) and of sampling, summed over chains."""
        return np.diff(np.reshape(self.times, (-1, 3)), axis=1).sum(axis=0)


def sample(
    model: pm.Model,
    make_step: Callable,
    *,
    draws: int,
    tune: int,
    initvals: list[dict[str, np.ndarray]],
    random_seed: int,
) -> tuple[Any, np.ndarray]:
    """Run `pymc.sample`, one chain after the other in this process.

    Returns
    -------
    result : InferenceData or DataTree
        With what was drawn in tuning.
    seconds : array, shape (2,)
        See `Stopwatch.seconds`.
    """
    logging.getLogger("pymc").setLevel(logging.ERROR)
    stopwatch = Stopwatch(tune, draws)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pm.sample(
            draws=draws,
            tune=tune,
            chains=len(initvals),
            cores=1,
            step=make_step(),
            initvals=initvals,
            random_seed=random_seed,
            callback=stopwatch,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
            progressbar=False,
        )
    return result, stopwatch.seconds()


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

    def begin(self, seed: int = SEED):
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
