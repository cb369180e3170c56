"""Sample the lynx and hare model in two ways, compare them, and write what came out."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm

from pymc_kameleon.demo.figure import lynx_hare_figure
from pymc_kameleon.demo.model import HARE_PELTS, LYNX_PELTS, PARAMETERS, lynx_hare_model
from pymc_kameleon.model.initial_points import dispersed_starts
from pymc_kameleon.model.transforms import unconstraining_function
from pymc_kameleon.steps import KameleonStep

__all__ = ["SamplerRun", "comparison_table", "run_demo", "sample_both", "summary_table"]

DRAWS = 600
TUNE = 300
CHAINS = 4
STEPS_PER_DRAW = 20
STARTS_PER_CHAIN = 150
QUICK_DRAWS = 50
QUICK_TUNE = 50
SEED = 1900


@dataclass(frozen=True)
class SamplerRun:
    """What one sampler returned and what it spent.

    Parameters
    ----------
    name : str
        Name of the step method.
    idata : InferenceData or DataTree
        Result of ``pymc.sample``, tuning included.
    proposals, evaluations : int
        Proposed moves and evaluations of the log density after tuning, over all chains.
    tuning_evaluations : int
        Evaluations of the log density during tuning, over all chains.
    """

    name: str
    idata: Any
    proposals: int
    evaluations: int
    tuning_evaluations: int

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of tuning and sampling; compiling is not in it."""
        return float(self.idata["posterior"].attrs["sampling_time"])


def plausible_starts(
    model: pm.Model, chains: int, random_seed: int | None
) -> list[dict[str, np.ndarray]]:
    """Start each chain at the best of many dispersed rates, with the other parameters at a guess.

    The posterior has a minor mode, 40 log units below the main one, where populations swing twice
    as fast and the rest is noise; a chain that starts there stays. With the populations of 1900 as
    counted and small observation errors, only rates with the right rhythm have some density.
    """
    guess = {"u0": HARE_PELTS[0], "v0": LYNX_PELTS[0], "sigma_hare": 0.25, "sigma_lynx": 0.25}
    guess = {name: np.array(value) for name, value in guess.items()}
    starts = dispersed_starts(model, STARTS_PER_CHAIN * chains, random_seed)
    starts = [start | guess for start in starts]
    unconstrain = unconstraining_function(model)
    log_density = model.compile_logp(mode="FAST_COMPILE")
    names = [value.name for value in model.value_vars]
    heights = [
        float(log_density(dict(zip(names, unconstrain(*start.values()), strict=True))))
        for start in starts
    ]
    best = np.reshape(heights, (chains, STARTS_PER_CHAIN)).argmax(axis=1)
    return [starts[chain * STARTS_PER_CHAIN + best[chain]] for chain in range(chains)]


def sample_both(
    model: pm.Model,
    *,
    draws: int = DRAWS,
    tune: int = TUNE,
    chains: int = CHAINS,
    steps_per_draw: int = STEPS_PER_DRAW,
    random_seed: int | None = None,
    progressbar: bool = True,
) -> list[SamplerRun]:
    """Sample a model with KameleonStep and DEMetropolisZ at equal numbers of evaluations.

    ``pymc.DEMetropolisZ`` evaluates the log density at both points of every proposal, KameleonStep
    only at the new one, so DEMetropolisZ gets ``steps_per_draw / 2`` draws for each of
    KameleonStep's.

    Parameters
    ----------
    model : pymc.Model
        A model whose free variables are all continuous.
    draws, tune : int
        Draws and tuning draws of KameleonStep in each chain.
    chains : int
        Number of chains; both samplers start them at the same points.
    steps_per_draw : int
        Transitions in each draw of KameleonStep.
    random_seed : int, optional
        Seed of starts and chains.
    progressbar : bool
        Whether to show the progress of sampling.

    Returns
    -------
    list of SamplerRun
    """
    with model, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numba will use object mode", UserWarning)
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        arguments: dict[str, Any] = {
            "chains": chains,
            "cores": min(chains, os.cpu_count() or 1),
            "initvals": plausible_starts(model, chains, random_seed),
            "random_seed": random_seed,
            "discard_tuned_samples": False,
            "progressbar": progressbar,
        }
        print(f"KameleonStep: {chains} chains, {tune} + {draws} draws of {steps_per_draw} moves")
        step = KameleonStep(steps_per_draw=steps_per_draw)
        idata = pm.sample(draws=draws, tune=tune, step=step, **arguments)
        kameleon = SamplerRun(
            "KameleonStep",
            idata,
            chains * draws * steps_per_draw,
            int(idata["sample_stats"]["n_evals"].sum()),
            int(idata["warmup_sample_stats"]["n_evals"].sum()) if tune else 0,
        )
        draws, tune = draws * steps_per_draw // 2, tune * steps_per_draw // 2
        print(f"DEMetropolisZ: {chains} chains, {tune} + {draws} draws of one move")
        idata = pm.sample(draws=draws, tune=tune, step=pm.DEMetropolisZ(), **arguments)
    proposals = chains * draws
    differential = SamplerRun("DEMetropolisZ", idata, proposals, 2 * proposals, 2 * chains * tune)
    return [kameleon, differential]


def summary_table(idata: Any) -> pd.DataFrame:
    """Posterior summary with the columns that every ArviZ has, in full precision.

    Parameters
    ----------
    idata : InferenceData or DataTree
        Result of ``pymc.sample``.

    Returns
    -------
    pandas.DataFrame
        One row a parameter; columns mean, sd, ess_bulk, ess_tail, r_hat.
    """
    columns = ["mean", "sd", "ess_bulk", "ess_tail", "r_hat"]
    summary = az.summary(idata, var_names=list(PARAMETERS), round_to="none")[columns].astype(float)
    tail = az.ess(idata, var_names=list(PARAMETERS), method="tail", prob=(0.05, 0.95))
    return summary.assign(ess_tail=[float(tail[name]) for name in PARAMETERS])


def comparison_table(runs: Sequence[SamplerRun]) -> pd.DataFrame:
    """Compare samplers by the parameter that each of them samples worst.

    Parameters
    ----------
    runs : sequence of SamplerRun
        Results to compare.

    Returns
    -------
    pandas.DataFrame
        One row a sampler. Effective sample sizes (ESS) per second count tuning in, those per 1000
        evaluations count the evaluations after tuning.
    """
    rows = {}
    for run in runs:
        summary = summary_table(run.idata)
        bulk = summary["ess_bulk"].min()
        rows[run.name] = {
            "max R-hat": summary["r_hat"].max(),
            "min bulk ESS": bulk,
            "min tail ESS": summary["ess_tail"].min(),
            "seconds": run.seconds,
            "ESS / s": bulk / run.seconds,
            "ESS / 1000 evals": 1000 * bulk / run.evaluations,
            "proposals": run.proposals,
            "evals": run.evaluations,
            "tuning evals": run.tuning_evaluations,
        }
    counts = ["proposals", "evals", "tuning evals"]
    return pd.DataFrame(rows).T.astype(dict.fromkeys(counts, int))


def run_demo(
    output: Path,
    *,
    draws: int = DRAWS,
    tune: int = TUNE,
    chains: int = CHAINS,
    random_seed: int | None = None,
    progressbar: bool = True,
) -> list[SamplerRun]:
    """Sample the lynx--hare model with both samplers, report, and write results and a picture.

    Parameters
    ----------
    output : Path
        Folder to write to; made where it does not exist.
    draws, tune, chains, random_seed, progressbar
        See :func:`sample_both`.

    Returns
    -------
    list of SamplerRun
    """
    output.mkdir(parents=True, exist_ok=True)
    runs = sample_both(
        lynx_hare_model(),
        draws=draws,
        tune=tune,
        chains=chains,
        random_seed=random_seed,
        progressbar=progressbar,
    )
    for run in runs:
        print(f"\n{run.name}\n{summary_table(run.idata).to_string(float_format='{:.4g}'.format)}")
    print("\nThe parameter that each sampler samples worst:")
    print(comparison_table(runs).to_string(float_format="{:.4g}".format))
    print(
        "Seconds are those of tuning and sampling, without compiling; ESS / 1000 evals leaves"
        "\ntuning out. DEMetropolisZ evaluates both points of a proposal, KameleonStep the new one."
    )
    print("\nWritten:")
    for run in runs:
        path = output / f"{run.name}.nc"
        run.idata.to_netcdf(str(path))
        print(f"  {path.resolve()}")
    path = output / "lynx_hare.png"
    lynx_hare_figure(runs).savefig(path, dpi=150)
    print(f"  {path.resolve()}")
    return runs
