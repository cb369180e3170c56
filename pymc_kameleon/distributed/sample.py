"""`pymc.sample` with every chain a task of a Dask cluster."""

import functools
import inspect
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from pymc.model import Model, modelcontext
from pymc.stats.convergence import log_warning_stats
from pymc.step_methods.compound import BlockedStep, CompoundStep
from pymc.util import get_random_generator

from pymc_kameleon._compat import default_tuning, result_of_traces, steps_of
from pymc_kameleon.distributed.parcel import Parcel, made_step, packed, stored_densities
from pymc_kameleon.distributed.run import (
    ClientStore,
    Progress,
    Run,
    shared_tuning,
    trace_of,
    tuning_rounds,
)
from pymc_kameleon.model.traced import traced
from pymc_kameleon.steps import KameleonStep, SurrogateHMCStep
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.validation import checked_integer

_log = logging.getLogger("pymc.kameleon")

OF_NUTS = ("nuts_sampler", "nuts_sampler_kwargs", "init", "n_init", "jitter_max_retries", "backend")
REFUSED = {
    **dict.fromkeys(
        ("cores", "blas_cores", "mp_ctx"),
        "is for pymc.sample: here the workers of the cluster say how many chains run at once, one "
        "a thread. Leave it out.",
    ),
    **dict.fromkeys(
        ("callback", "trace"), "is for pymc.sample: it cannot follow chains on workers."
    ),
    **dict.fromkeys(
        OF_NUTS,
        "is for the NUTS of pymc.sample: write it into the step, "
        "step=functools.partial(pm.NUTS, ...).",
    ),
}
"""Arguments of `pymc.sample`, and why they are none here."""


def sample(
    draws: int = 1000,
    *,
    tune: int | None = None,
    chains: int = 4,
    step: Callable | None = None,
    store: EvaluationStore | None = None,
    client: Any = None,
    rounds: int = 4,
    random_seed: Any = None,
    initvals: Any = None,
    var_names: Sequence[str] | None = None,
    progressbar: Any = True,
    progressbar_theme: Any = None,
    quiet: bool = False,
    discard_tuned_samples: bool = True,
    compute_convergence_checks: bool = True,
    keep_warning_stat: bool = False,
    return_inferencedata: bool = True,
    idata_kwargs: dict | None = None,
    model: Model | None = None,
    compile_kwargs: dict | None = None,
    **step_kwargs: Any,
) -> Any:
    """Sample chains of a PyMC model on the workers of a Dask cluster.

    Each chain is a task that calls `pymc.sample(chains=1, cores=1)` on a worker, so it runs
    wherever Dask does: on this machine, under SLURM, PBS or LSF (dask-jobqueue), on Kubernetes, in
    a cloud. With a `store`, the chains tune in rounds: after each, all evaluations are gathered,
    and the next begins with a surrogate of all.

    One seed gives the same draws whatever the number of workers, to the last bit on machines of
    one kind, and where workers die: Dask runs the round of their chains again elsewhere.
    Without a store they are the draws of `pymc.sample` with that seed. Ctrl-C gives what is
    finished, as there.

    Parameters
    ----------
    draws : int
        Draws of each chain after tuning.
    tune : int, optional
        Draws of tuning; by default what the step asks for, less if several chains share a store.
    chains : int
        The default does not depend on the number of workers, so that the same seed gives the same
        result.
    step : class or callable, optional
        `SurrogateHMCStep`, say, a `functools.partial` of it, or a function that returns a step or
        a list of steps. It is called without arguments, or with `store=`, inside the model on each
        worker. Steps of variables that it leaves are chosen as by `pymc.sample`. By default
        `SurrogateHMCStep` with a store, `KameleonStep` without: what is sent to a cluster is
        expensive, and has no gradient as a rule.
    store : EvaluationStore, optional
        It stays with the client, and is filled while the chains run. What it knows is not
        evaluated again.
    client : dask.distributed.Client, optional
        By default that of a cluster of processes on this machine, which is closed at the end. A
        script needs `if __name__ == "__main__":` then, since its processes import it.
    rounds : int
        Of tuning, where chains share a store.
    random_seed : int, sequence of int, Generator or None
    initvals : dict, or list of one for each chain, optional
    var_names, progressbar, progressbar_theme, quiet, discard_tuned_samples
        As `pymc.sample` takes them.
    compute_convergence_checks, keep_warning_stat, return_inferencedata, idata_kwargs
        As `pymc.sample` takes them.
    model : pymc.Model, optional
        By default that of the context.
    compile_kwargs, **step_kwargs
        For steps that PyMC chooses, as `pymc.sample` takes them.

    Returns
    -------
    InferenceData (PyMC 5), DataTree (PyMC 6), or MultiTrace
        What `pymc.sample` returns.

    Raises
    ------
    ImportError
        If Dask is not installed.
    TypeError
        For a step that is made already, an argument that a cluster does not take, or a model that
        cannot be pickled, naming what is at fault.
    ValueError
        For a closed client, or a store of another model.
    pymc.sampling.parallel.ParallelSamplingError
        If a chain fails, with the worker's error as its cause.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> from pymc_kameleon import EvaluationStore, SurrogateHMCStep, distributed
    >>> with model:
    ...     idata = distributed.sample(
    ...         step=SurrogateHMCStep, store=EvaluationStore("run.sqlite"), client=Client(cluster)
    ...     )
    """
    draws = checked_integer("draws", draws, 1)
    chains = checked_integer("chains", chains, 1)
    rounds = checked_integer("rounds", rounds, 1)
    if tune is not None:
        tune = checked_integer("tune", tune, 0)
    for name in REFUSED.keys() & step_kwargs.keys():
        raise TypeError(f"{name}= {REFUSED[name]}")
    model = modelcontext(model)
    if step is None:
        step = KameleonStep if store is None else SurrogateHMCStep
    _check_step(step, store)
    parcel = Parcel(
        model=model,
        make_step=step,
        takes_store=store is not None,
        var_names=None if var_names is None else list(var_names),
        compile_kwargs=compile_kwargs,
        step_kwargs=step_kwargs,
        initvals=_of_each_chain(initvals, chains),
    )
    traced(model, parcel.var_names)
    if isinstance(random_seed, int) and random_seed == -1:
        raise ValueError("random_seed=-1: take a number of at least 0, or None for any.")
    rng = get_random_generator(random_seed)
    data, name = packed(parcel), uuid.uuid4().hex
    with _connected(client, chains) as connection:
        # On the client too, so that what is wrong is told before anything runs.
        made = made_step(parcel, store)
        learns = any(getattr(part, "learns_from_store", False) for part in steps_of(made))
        kept, is_shared = None, store is not None and chains > 1 and learns
        if store is not None:
            found = stored_densities(made)
            if len(found) != 1:
                raise TypeError(
                    f"store=: {_name(step)} makes {len(found)} steps that use it. Pass it on to "
                    "one, as SurrogateHMCStep(store=store)."
                )
            kept = ClientStore(store, found[0].model, name)
        if tune is None:
            tune = default_tuning(made)
            tune = shared_tuning(tune, chains) if is_shared else tune
        lengths = tuning_rounds(tune, rounds if is_shared else 1)
        if not quiet:
            n = len(connection.nthreads())
            _log.info("Sampling %d chains on a Dask cluster, now of %d workers", chains, n)
        bar = False if quiet else progressbar
        progress = Progress(made, chains, draws, tune, bar, progressbar_theme)
        begin = time.time()
        with progress.bars:
            run = Run(connection, name, data, rng, chains, kept, progress)
            sampled = run.sample(lengths, draws)
        seconds = time.time() - begin
    for parts in sampled if not quiet else []:
        for of_step in parts[-1].statistics if parts else []:
            log_warning_stats([{"warning": told} for told in of_step.get("warning", []) if told])
    return result_of_traces(
        [
            trace_of(parts, model, parcel.var_names, chain, made.stats_dtypes)
            for chain, parts in enumerate(sampled)
        ],
        tune=tune,
        seconds=seconds,
        model=model,
        discard_tuned_samples=discard_tuned_samples,
        compute_convergence_checks=compute_convergence_checks,
        return_inferencedata=return_inferencedata,
        keep_warning_stat=keep_warning_stat,
        idata_kwargs=idata_kwargs or {},
        quiet=quiet,
    )


def _check_step(step, store):
    made = step[0] if isinstance(step, list | tuple) and step else step
    if isinstance(made, BlockedStep | CompoundStep):
        name = type(made).__name__
        raise TypeError(
            f"step is a {name} that is made already, and each worker needs its own: write "
            f"step={name}, or step=functools.partial({name}, ...) with its arguments."
        )
    if not callable(step):
        raise TypeError(
            f"step={step!r}: pass the class of a step, a functools.partial of it, or a function "
            "that returns a step."
        )
    if "store" in getattr(step, "keywords", {}):
        raise TypeError(
            "step has a store= of its own, and each worker needs another one: write "
            "distributed.sample(store=...) and leave it out of step."
        )
    if store is None:
        return
    if not isinstance(store, EvaluationStore):
        raise TypeError(f"store={store!r}: pass EvaluationStore('run.sqlite').")
    if not _takes_store(step):
        raise TypeError(
            f"store=: {_name(step)} takes none. Take step=SurrogateHMCStep, which learns from "
            "stored evaluations, or give the function that makes the step an argument store."
        )


def _takes_store(step) -> bool:
    if isinstance(step, functools.partial):
        return _takes_store(step.func)
    parameters = inspect.signature(step).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "store" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _name(step) -> str:
    return getattr(step, "__name__", repr(step))


def _of_each_chain(initvals, chains):
    if initvals is None or isinstance(initvals, dict):
        return [initvals] * chains
    initvals = list(initvals)
    if len(initvals) != chains:
        raise ValueError(
            f"initvals has {len(initvals)} starts for chains={chains}: give one a chain, or one "
            "dict for all."
        )
    return initvals


# the cluster --------------------------------------------------------------------------------------


@contextmanager
def _connected(client, n_workers: int):
    """Give a client that is checked; without one, that of a local cluster that ends with it."""
    try:
        import dask.distributed as dask
    except ImportError as error:
        raise ImportError(
            'pymc_kameleon.distributed.sample needs Dask: pip install "pymc_kameleon[distributed]".'
        ) from error
    if client is None:
        with (
            _local_cluster(dask, min(n_workers, os.cpu_count() or 1)) as cluster,
            dask.Client(cluster, set_as_default=False) as own,
        ):
            yield own
        return
    if not isinstance(client, dask.Client):
        raise TypeError(
            f"client={client!r}: pass a dask.distributed.Client, as Client(cluster) of your "
            "cluster or Client('scheduler:8786'), or leave it out for a cluster on this machine."
        )
    if client.asynchronous:
        raise ValueError("client is asynchronous: pass one that was made with asynchronous=False.")
    if client.status != "running":
        raise ValueError(
            f"client is {client.status}: pass one that is connected, as Client(cluster), and close "
            "it after sampling."
        )
    yield client


@contextmanager
def _local_cluster(dask, n_workers):
    """Give a cluster of processes on this machine, which Ctrl-C does not end before its time."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        cluster = dask.LocalCluster(
            n_workers=n_workers, threads_per_worker=1, processes=True, dashboard_address=":0"
        )
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        except Exception as error:  # Dask's own, where a worker has died; the draws are here
            _log.warning("The local cluster did not close as it should: %r", error)
