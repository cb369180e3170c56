"""The only file that knows PyMC 5 from PyMC 6, ArviZ 0 from ArviZ 1, and private names of PyMC.

Names that PyMC does not promise to keep are looked up when they are needed: where one is not found,
there is a slower way that is right, or an error that names it.
"""

import inspect
import logging
import multiprocessing
import os
import signal
import time
import traceback
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

import numpy as np
import pymc as pm
import pytensor.tensor.subtensor
from pymc.backends.base import MultiTrace
from pymc.stats.convergence import log_warning_stats
from pymc.step_methods.compound import CompoundStep
from pytensor.compile.builders import OpFromGraph
from pytensor.tensor.subtensor import AdvancedIncSubtensor, AdvancedSubtensor
from rich.progress import TextColumn
from rich.table import Column

_log = logging.getLogger("pymc.kameleon")

# results ------------------------------------------------------------------------------------------


def is_result(result) -> bool:
    """Whether `result` is what `pm.sample` returns (InferenceData, or DataTree on PyMC 6)."""
    return hasattr(result, "posterior") or (hasattr(result, "children") and "posterior" in result)


def group_dataset(result, group: str):
    """Group of a result as an `xarray.Dataset`, or None if it is not there."""
    if group not in (result.children if hasattr(result, "children") else result.groups()):
        return None
    node = result[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node


def stacked(dataset, name: str) -> np.ndarray:
    """Values of one variable, shape (chains * draws, ...)."""
    values = dataset[name].transpose("chain", "draw", ...).values
    return values.reshape(-1, *values.shape[2:])


def posterior_result(values: dict[str, np.ndarray]):
    """Make a result whose posterior group holds arrays (chains, draws, ...)."""
    import arviz

    if "posterior" in inspect.signature(arviz.from_dict).parameters:
        return arviz.from_dict(posterior=values)
    return arviz.from_dict({"posterior": values})


# graphs -------------------------------------------------------------------------------------------

IS_PYTENSOR_2 = hasattr(pytensor.tensor.subtensor, "AdvancedSubtensor1")

if IS_PYTENSOR_2:
    from pytensor.tensor import slinalg as linalg
    from pytensor.tensor.subtensor import AdvancedIncSubtensor1, AdvancedSubtensor1

    TAKES_BY_ARRAYS: tuple[type, ...] = (AdvancedSubtensor, AdvancedSubtensor1)
    PUTS_BY_ARRAYS: tuple[type, ...] = (AdvancedIncSubtensor, AdvancedIncSubtensor1)
else:
    from pytensor.tensor import linalg

    TAKES_BY_ARRAYS = (AdvancedSubtensor,)
    PUTS_BY_ARRAYS = (AdvancedIncSubtensor,)

Cholesky, SolveBase = linalg.Cholesky, linalg.SolveBase


def operation_with_gradient(inputs, outputs, pullback, name: str) -> OpFromGraph:
    """Operation of a graph, inlined when compiled, with `pullback` as its gradient."""
    known = inspect.signature(OpFromGraph.__init__).parameters
    keyword = "pullback" if "pullback" in known else "lop_overrides"
    return OpFromGraph(inputs, outputs, inline=True, name=name, **{keyword: pullback})


def with_inner_graph(op, change):
    """Copy of an operation with a graph inside, whose outputs are `change` of the present ones."""
    is_frozen = hasattr(op, "clone_with_inner_graph")
    copy = op if is_frozen else op.clone()
    graph = copy.fgraph.unfreeze() if is_frozen else copy.fgraph
    before = list(graph.outputs)
    for old, new in zip(before, change(before), strict=True):
        graph.replace(old, new, import_missing=True)
    return copy.clone_with_inner_graph(graph) if is_frozen else copy


def draws_of(variable, n):
    """`n` independent draws of a random variable whose parameters stand still: a new first axis."""
    shapes = import_module("pymc.distributions.shape_utils")
    if not hasattr(shapes, "change_dist_size"):
        raise NotImplementedError("PyMC has no change_dist_size.")
    return shapes.change_dist_size(variable, (n,), expand=True)


# ArviZ --------------------------------------------------------------------------------------------


def arviz_statistics():
    """Return the module with ArviZ's statistics; from ArviZ 1 on, plots are not imported too."""
    try:
        return import_module("arviz_stats")
    except ImportError:
        return import_module("arviz")


def pareto_k(log_weights: np.ndarray) -> float:
    """Shape k of the generalised Pareto distribution of the largest importance weights (n,).

    NaN where no tail can be fitted: fewer than 30 weights, or a tail of equal ones. See A. Vehtari,
    D. Simpson, A. Gelman, Y. Yao and J. Gabry, "Pareto smoothed importance sampling", Journal of
    Machine Learning Research 25, 2024. arXiv:1507.02646
    """
    if len(log_weights) < 30 or not np.isfinite(np.max(log_weights)):
        return float("nan")
    statistics = arviz_statistics()
    if hasattr(statistics, "psislw"):
        k = float(statistics.psislw(log_weights)[1])
    else:
        from arviz_stats.base import array_stats

        try:
            # It takes log-likelihoods, whose negatives are the log weights of leaving one out.
            finite = np.where(np.isfinite(log_weights), log_weights, log_weights.max() - 700.0)
            k = float(array_stats.psislw(-finite)[1])
        except ValueError:
            k = float("nan")
    return k if np.isfinite(k) else float("nan")


# names that PyMC does not promise to keep ---------------------------------------------------------


def _found(module: str, name: str):
    """Return what PyMC has under a name, or None in a version that has none."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _missing(name: str, instead: str) -> str:
    return f"PyMC {pm.__version__} has no {name}: {instead}."


def private(module: str, name: str, purpose: str):
    """Return what PyMC has under a name for which there is no other way, or raise an error."""
    found = _found(module, name)
    if found is None:
        instead = f"{purpose} needs it. Take a version that has, as pymc>=5.28,<7"
        raise ImportError(_missing(f"{module}.{name}", instead))
    return found


def steps_of(step) -> list:
    """Return the steps that a compound step is made of, or the step itself."""
    return list(getattr(step, "methods", [step]))


def default_tuning(step) -> int:
    """Draws of tuning that a step asks for; before PyMC 6.3 only those of this package do."""
    return max(getattr(part, "default_tune_steps", None) or 1000 for part in steps_of(step))


def complete_step(model, step, compile_kwargs: dict | None, step_kwargs: dict):
    """Add the steps that PyMC chooses for the variables that `step` leaves."""
    # No public function returns the steps that `pymc.sample` chooses.
    assign = _found("pymc.sampling.mcmc", "assign_step_methods")
    instantiate = _found("pymc.sampling.mcmc", "instantiate_steppers")
    if assign is None or instantiate is None:
        steps = list(step) if isinstance(step, list | tuple) else [step]
        moved = {variable for part in steps for variable in part.vars}
        left = ", ".join(v.name for v in model.value_vars if v not in moved)
        if left:
            name = "pymc.sampling.mcmc.assign_step_methods, or instantiate_steppers"
            instead = f"let step= be a function that returns steps of all variables, {left} too"
            raise RuntimeError(_missing(name, instead))
    else:
        provided, selected = assign(model, step)
        steps = instantiate(
            model,
            steps=provided,
            selected_steps=selected,
            step_kwargs=step_kwargs,
            compile_kwargs=compile_kwargs or {},
        )
    if not isinstance(steps, list):
        return steps
    return steps[0] if len(steps) == 1 else CompoundStep(steps)


HANDLED = 1.0
"""Seconds in which a process that was sent a signal has handled it."""


def is_in_worker() -> bool:
    """Whether this is a process of `pymc.sample`, with one chain."""
    return multiprocessing.current_process().name.startswith("worker_chain_")


def can_interrupt_sampling() -> bool:
    """Whether the caller is called by `pymc.sample`, which can be ended from there.

    Not on a cluster, where nobody would see that: there an error goes to the client.
    """
    if is_in_worker():
        # A signal would end the process of the user on Windows, and is ignored by one that a shell
        # has put into the background.
        return os.name != "nt" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    callers = {
        (frame.f_globals.get("__name__"), frame.f_code.co_name)
        for frame, _ in traceback.walk_stack(None)
    }
    on_cluster = ("pymc_kameleon.distributed.worker", "run_round")
    return ("pymc.sampling.mcmc", "_sample") in callers and on_cluster not in callers


def interrupt_sampling() -> NoReturn:
    """End `pymc.sample` as Ctrl-C does, with the draws so far; a step has no public way."""
    parent = multiprocessing.parent_process() if is_in_worker() else None
    if parent is not None and parent.pid is not None:
        os.kill(parent.pid, signal.SIGINT)
        # Its thread that samples has to see the signal before the end of this process's pipe.
        time.sleep(HANDLED)
    raise KeyboardInterrupt


class Averaged(float):
    """A statistic of one draw, which a progress bar shows as its `mean` over the last draws.

    PyMC does not say of which chain the statistics are that a bar is to show.
    """

    def __new__(cls, value, mean):
        """Make a number with a mean."""
        made = super().__new__(cls, value)
        made.mean = float(mean)
        return made

    def __reduce__(self):
        return Averaged, (float(self), self.mean)


class CalledByPyMC:
    """What PyMC calls on a step by names that are private, or others in each version.

    A step has `_start_chain`, with numbers of draws that are None where PyMC does not say, and
    `_progress_columns`, name -> title and format of what is shown.
    """

    def set_rng(self, rng):
        """Start a new chain (PyMC before 6.3)."""
        self._start_chain(rng, None, None)

    def setup_chain(self, rng, tune, draws):
        """Start a new chain (PyMC 6.3 and later)."""
        self._start_chain(rng, int(tune), int(draws))

    # There is no public way to say what a progress bar shows; by other names it shows the draws.

    def _progressbar_config(self, n_chains=1):
        shown = self._progress_columns()
        columns = [
            TextColumn(f"{{task.fields[{name}]:{form}}}", table_column=Column(title, ratio=1))
            for name, (title, form) in shown.items()
        ]
        return columns, {name: [0.0] * n_chains for name in shown}

    def _make_progressbar_update_functions(self):
        shown = self._progress_columns()

        def update(statistics):
            found = {name: statistics[name] for name in shown}
            return {k: v.mean if isinstance(v, Averaged) else v for k, v in found.items()}

        return (update,)


class _NoBars(nullcontext):
    """Bars that are not shown."""

    combined_progress = False

    def update(self, **progress):
        """Show nothing."""


def progress_bars(step, chains: int, draws: int, tune: int, progressbar, progressbar_theme):
    """Return PyMC's progress bars of several chains; none where it has them by another name."""
    # Public is the argument of `pymc.sample` only, which moves them itself.
    manager = _found("pymc.progress_bar", "MCMCProgressBarManager")
    if manager is None:
        name = "pymc.progress_bar.MCMCProgressBarManager"
        _log.info(_missing(name, "there are no progress bars"))
        return _NoBars()
    options = {} if progressbar_theme is None else {"progressbar_theme": progressbar_theme}
    return manager(
        step_method=step, chains=chains, draws=draws, tune=tune, progressbar=progressbar, **options
    )


def result_of_traces(traces: list, *, tune: int, seconds: float, model, **options):
    """Make of the traces of all chains what `pymc.sample` returns.

    Chains of different lengths are cut as PyMC cuts those of an interrupted run. `options` are
    those arguments of `pymc.sample` that say what is returned.
    """
    # `pymc.to_inference_data` is public; what it converts knows of tuning by private names only.
    make = _found("pymc.sampling.mcmc", "_sample_return")
    if make is None:
        return _result_by_public_names(traces, tune, seconds, model, **options)
    return make(run=None, traces=traces, tune=tune, t_sampling=seconds, model=model, **options)


def _result_by_public_names(
    traces,
    tune,
    seconds,
    model,
    *,
    discard_tuned_samples,
    compute_convergence_checks,
    return_inferencedata,
    keep_warning_stat,
    idata_kwargs,
    quiet,
):
    """Do what `_sample_return` does, but that a `MultiTrace` has no report of tuning and time."""
    discarded = tune if discard_tuned_samples else 0
    # As many of the longest chains as make the most draws, each as long as the shortest of them.
    traces = sorted(traces, key=len)
    useful = [max(0, len(trace) - discarded) for trace in traces]
    if not any(useful):
        raise ValueError("Not enough samples to build a trace.")
    first = int(np.argmax([n * (len(traces) - i) for i, n in enumerate(useful)]))
    traces, length = traces[first:], useful[first] + discarded
    tune = min(tune, length)

    found, converted = {}, None
    for prefix, part in ("", slice(tune, length)), ("warmup_", slice(discarded, tune)):
        if part.start == part.stop:
            continue
        options = {"model": model, "save_warmup": False} | idata_kwargs
        if prefix:
            options |= dict.fromkeys({"log_likelihood", "log_prior"} & options.keys(), False)
        converted = pm.to_inference_data(MultiTrace([trace[part] for trace in traces]), **options)
        for group in converted.children if hasattr(converted, "children") else converted.groups():
            data = group_dataset(converted, group)
            if group in ("posterior", "sample_stats"):
                data.attrs |= {"sampling_time": seconds, "tuning_steps": tune}
                found[prefix + group] = data
            else:
                found.setdefault(group, data)

    def from_groups():
        kind = type(converted)
        return kind.from_dict(found) if hasattr(kind, "children") else kind(**found)

    result = from_groups()

    check = _found("pymc.stats.convergence", "run_convergence_checks")
    if compute_convergence_checks and check is not None:
        for warning in check(result, model):
            if not quiet:
                log_warning_stats([{"warning": warning}])
    if not return_inferencedata:
        return MultiTrace([trace[discarded:length] for trace in traces])
    if keep_warning_stat:
        return result
    for group in {"sample_stats", "warmup_sample_stats"} & found.keys():
        told = [name for name in found[group].data_vars if str(name).endswith("warning")]
        found[group] = found[group].drop_vars([*told, "warning_dim_0"], errors="ignore")
    return from_groups()
