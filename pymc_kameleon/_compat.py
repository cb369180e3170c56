"""The only file that knows PyMC 5 from PyMC 6, and ArviZ 0 from ArviZ 1."""

import inspect
from importlib import import_module

import numpy as np
from pytensor.compile.builders import OpFromGraph

__all__ = [
    "arviz_statistics",
    "complete_step",
    "group_dataset",
    "is_result",
    "operation_with_gradient",
    "pareto_k",
    "posterior_result",
    "result_of_traces",
    "stacked",
    "with_inner_graph",
]


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


def arviz_statistics():
    """Return the module with ArviZ's statistics; from ArviZ 1 on, plots are not imported too."""
    try:
        return import_module("arviz_stats")
    except ImportError:
        return import_module("arviz")


def pareto_k(log_weights: np.ndarray) -> float:
    """Shape k of the generalised Pareto distribution of the largest importance weights.

    Parameters
    ----------
    log_weights : array, shape (n,)

    Returns
    -------
    float
        NaN where no tail can be fitted: fewer than 25 weights, or a tail of equal ones.

    References
    ----------
    .. [1] A. Vehtari, D. Simpson, A. Gelman, Y. Yao and J. Gabry, "Pareto smoothed importance
       sampling", Journal of Machine Learning Research 25, 2024. arXiv:1507.02646
    """
    if len(log_weights) < 25 or not np.isfinite(np.max(log_weights)):
        return float("nan")
    statistics = arviz_statistics()
    if hasattr(statistics, "psislw"):
        k = float(statistics.psislw(log_weights)[1])
    else:
        from arviz_stats.base import array_stats

        try:
            # It takes log-likelihoods, whose negatives are the log weights of leaving one out.
            k = float(array_stats.psislw(-log_weights)[1])
        except ValueError:
            k = float("nan")
    return k if np.isfinite(k) else float("nan")


def posterior_result(values: dict[str, np.ndarray]):
    """Make a result whose posterior group holds arrays (chains, draws, ...)."""
    import arviz

    if "posterior" in inspect.signature(arviz.from_dict).parameters:
        return arviz.from_dict(posterior=values)
    return arviz.from_dict({"posterior": values})


def complete_step(model, step, compile_kwargs: dict | None, step_kwargs: dict):
    """Add the steps that PyMC chooses for the variables that `step` leaves."""
    from pymc.sampling.mcmc import assign_step_methods, instantiate_steppers
    from pymc.step_methods import CompoundStep

    provided, selected = assign_step_methods(model, step)
    steps = instantiate_steppers(
        model,
        steps=provided,
        selected_steps=selected,
        step_kwargs=step_kwargs,
        compile_kwargs=compile_kwargs or {},
    )
    return CompoundStep(steps) if isinstance(steps, list) else steps


def result_of_traces(traces: list, *, tune: int, seconds: float, model, **options):
    """Make of the traces of all chains what `pymc.sample` returns.

    Chains of different lengths are cut as PyMC cuts those of an interrupted run. `options` are
    those arguments of `pymc.sample` that say what is returned.
    """
    from pymc.sampling.mcmc import _sample_return

    return _sample_return(
        run=None, traces=traces, tune=tune, t_sampling=seconds, model=model, **options
    )
