"""A model on a worker, with its compiled functions, kept for the next chain and round."""

import copy
import hashlib
import logging
import threading
import warnings
from collections import OrderedDict
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pymc as pm
from pymc.backends.ndarray import NDArray
from threadpoolctl import threadpool_limits

from pymc_kameleon._compat import complete_step
from pymc_kameleon.distributed.parcel import Parcel, unpacked
from pymc_kameleon.distributed.round_store import Found, Known, RoundStore

__all__ = ["Part", "Task", "Workbench", "made_step", "stored_densities", "traced", "workbench"]

MODELS_KEPT = 3


class Task(NamedTuple):
    """One round of one chain: with the parcel and what is known, all that its draws depend on.

    Attributes
    ----------
    run : str
        Of which call of `sample`.
    chain, round : int
    bit_generator : type
    seed : numpy.random.SeedSequence
        Of which PyMC's generator of the chain is the next child.
    tune, draws : int
    start : dict or None
        Unconstrained values where the round before ended; None before the first.
    """

    run: str
    chain: int
    round: int
    bit_generator: type
    seed: np.random.SeedSequence
    tune: int
    draws: int
    start: dict[str, np.ndarray] | None


class Part(NamedTuple):
    """What a round of a chain made.

    Attributes
    ----------
    samples : dict
        Name of each variable -> array, shape (draws, ...).
    statistics : list of dict
        For each step, name -> array, shape (draws,).
    point : dict
        Unconstrained values of the last draw.
    found : list of Found
    """

    samples: dict[str, np.ndarray]
    statistics: list[dict[str, np.ndarray]]
    point: dict[str, np.ndarray] | None
    found: list[Found]

    @property
    def n_draws(self) -> int:
        """Draws, of tuning and after it."""
        return len(next(iter(self.samples.values())))


def made_step(parcel: Parcel, store=None):
    """Make the step of a parcel, with those that PyMC chooses for the variables it leaves."""
    with parcel.model as model:
        step = parcel.make_step(store=store) if parcel.takes_store else parcel.make_step()
        return complete_step(model, step, parcel.compile_kwargs, parcel.step_kwargs)


def stored_densities(step) -> list:
    """Return what a step, or those that it is made of, evaluates through a store."""
    parts = getattr(step, "methods", [step])
    found = [getattr(part, "stored", None) for part in parts]
    return [stored for stored in found if stored is not None]


def traced(model: pm.Model, var_names: list[str] | None) -> list:
    """Return the variables that a trace has.

    Raises
    ------
    ValueError
        If there are none of these names.
    """
    if var_names is None:
        return model.unobserved_value_vars
    chosen = [v for v in model.unobserved_RVs if v.name in var_names]
    missing = sorted(set(var_names) - {v.name for v in chosen})
    if missing:
        known = ", ".join(v.name for v in model.unobserved_RVs)
        raise ValueError(f"var_names: the model has no {', '.join(missing)}; it has {known}.")
    return model.replace_rvs_by_values(chosen)


@contextmanager
def _already_told():
    """Leave out what the step says when it is made: the client has made one too."""
    log = logging.getLogger("pymc.kameleon")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class Workbench:
    """A model and a step of which no state goes from one task to the next.

    Parameters
    ----------
    parcel : Parcel
    """

    def __init__(self, parcel: Parcel):
        self.parcel = parcel
        self.store = RoundStore() if parcel.takes_store else None
        with _already_told():
            self.step = made_step(parcel, self.store)
        self.state = copy.deepcopy(self.step.sampling_state)
        self.prototype = NDArray(model=parcel.model, vars=traced(parcel.model, parcel.var_names))

    def run(self, task: Task, known: Known | None, tell, on_draw) -> Part:
        """Sample the round of a task.

        Parameters
        ----------
        task : Task
        known : Known or None
        tell : callable
            Called with each evaluation, a `Found`.
        on_draw : callable
            Called with the trace and PyMC's draw after each one; a KeyboardInterrupt ends the
            chain.
        """
        if self.store is not None:
            (stored,) = stored_densities(self.step)
            self.store.begin(stored.model, known, tell)
        for part in getattr(self.step, "methods", [self.step]):
            if hasattr(part, "prior_share"):  # no two chains evaluate the same draw of the prior
                part.prior_share = slice(task.chain, None, len(self.parcel.initvals))
        self.step.sampling_state = copy.deepcopy(self.state)
        start = task.start if task.start is not None else self.parcel.initvals[task.chain]
        point = None

        def callback(trace, draw):
            nonlocal point
            point = draw.point
            on_draw(trace, draw)

        with threadpool_limits(1), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Tuning samples will be included")
            warnings.filterwarnings("ignore", message="`return_inferencedata=False`")
            trace = pm.sample(
                draws=task.draws,
                tune=task.tune,
                chains=1,
                cores=1,
                random_seed=np.random.Generator(task.bit_generator(task.seed)),
                step=self.step,
                initvals=start,
                trace=self._new_trace(),
                callback=callback,
                model=self.parcel.model,
                progressbar=False,
                quiet=True,
                discard_tuned_samples=False,
                compute_convergence_checks=False,
                return_inferencedata=False,
            )
        (chain,) = trace._straces.values()
        found = [] if self.store is None else self.store.found
        return part_of(chain, point, found)

    def _new_trace(self):
        like = self.prototype
        shapes, dtypes = like.var_shapes, like.var_dtypes
        return NDArray(
            model=like.model, vars=like.vars, fn=like.fn, var_shapes=shapes, var_dtypes=dtypes
        )


def part_of(trace: NDArray, point, found: list[Found]) -> Part:
    """Copy the draws that a trace has so far."""
    n = len(trace)
    samples = {name: values[:n].copy() for name, values in trace.samples.items()}
    statistics = [{k: v[:n].copy() for k, v in of_step.items()} for of_step in trace._stats]
    return Part(samples, statistics, point, list(found))


_free: OrderedDict[str, list[Workbench]] = OrderedDict()
_changing, _building = threading.Lock(), threading.Lock()


@contextmanager
def workbench(data: bytes):
    """Lend a workbench of a pickled parcel; threads of one worker have different ones."""
    digest = hashlib.sha256(data).hexdigest()
    with _changing:
        free = _free.setdefault(digest, [])
        _free.move_to_end(digest)
        while len(_free) > MODELS_KEPT:
            _free.popitem(last=False)
        lent = free.pop() if free else None
    if lent is None:
        with _building:
            lent = Workbench(unpacked(data))
    yield lent
    # One that raised an error is not lent again.
    with _changing:
        free.append(lent)
