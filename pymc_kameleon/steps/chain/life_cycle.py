"""What PyMC calls on every step, from its construction to the end of a chain."""

import inspect
from abc import abstractmethod
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
from pymc.blocking import DictToArrayBijection, RaveledVars
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning
from pymc.step_methods.arraystep import ArrayStepShared
from pymc.step_methods.compound import Competence
from pymc.util import get_random_generator
from pymc.vartypes import discrete_types

from pymc_kameleon._compat import Averaged, CalledByPyMC
from pymc_kameleon.mcmc.saved_state import check_like
from pymc_kameleon.model.log_density import continuous_variables
from pymc_kameleon.steps.chain.main_guard import require_main_guard
from pymc_kameleon.validation import hidden_arguments, unknown_argument

REAL = "biuf"
"""Kinds of types that are real numbers."""

AVERAGED = 100
"""Draws over which the acceptance is averaged that is shown while sampling."""

STUCK_AFTER = 1000
"""Transitions without an accepted move after which a chain is called stuck."""


def draw_statistics(*names: str) -> dict:
    """Types and shapes, as PyMC takes them, of sampler statistics: numbers, and a warning."""
    return {name: (np.float64, []) for name in names} | {"warning": (SamplerWarning, None)}


def without_scaling(cls) -> dict:
    """Return the statistics of a step for one that learns a step size, which is no scaling."""
    return {k: v for k, v in cls.stats_dtypes_shapes.items() if k != "scaling"}


@contextmanager
def all_or_nothing(changed):
    """Restore the attributes if an error or an interrupt occurs.

    Arrays whose sizes belong together are replaced one after the other.
    """
    before = changed.__dict__.copy()
    try:
        yield
    except BaseException:
        changed.__dict__.update(before)
        raise


def stored_at(path: str) -> Any:
    """`chain = stored_at("sampler.chain")` in a class means that `x.chain` is `x.sampler.chain`."""
    part, name = path.rsplit(".", 1)
    owner = attrgetter(part)
    return property(attrgetter(path), lambda x, value: setattr(owner(x), name, value))


class Step(CalledByPyMC, ArrayStepShared):
    """Base of all steps: a subclass gives what is abstract here, and `astep`.

    It moves the value variables `vars` of the `shapes` for which everything is compiled; `shared`
    maps value variables of other steps to shared variables. `expected_tune` and `expected_draws`
    are the draws of tuning and those after it, None where PyMC does not say (before 6.3).
    """

    expected_draws = None

    default_blocked = True

    _acceptance = 0, 0.0
    """Draws of the chain so far, at most `AVERAGED`, and their mean acceptance."""

    def __init__(self, vars, shapes, shared, *, blocked, rng):
        super().__init__(vars, shared, blocked=blocked, rng=rng)
        # As `RaveledVars.point_map_info`: name, shape, size and type.
        self._own = tuple(
            (variable.name, shape, int(np.prod(shape)), np.dtype(variable.dtype))
            for variable, shape in zip(vars, shapes, strict=True)
        )

    def __new__(cls, *args, **kwargs):
        """Create a step, or one per variable if `blocked=False`."""
        try:
            model = modelcontext(kwargs.get("model"))
        except TypeError as error:
            raise TypeError(
                f"model: {cls.__name__} needs one. Create it inside `with model:`, or pass model=."
            ) from error
        known = inspect.signature(cls).parameters
        taken = {*known, *hidden_arguments(cls.__init__)}
        unknown = [name for name in kwargs if name not in taken]
        if unknown and "__signature__" in cls.__dict__:
            raise unknown_argument(cls.__name__, unknown[0], known)
        vars = args[0] if args else kwargs.get("vars")
        if not model.value_vars or (isinstance(vars, list | tuple) and not vars):
            raise ValueError(
                "vars: there is no free variable to sample. Give the model one, and leave vars out "
                "or name at least one."
            )
        if vars is None and kwargs.get("blocked") is False:
            args, kwargs["vars"] = args[1:], continuous_variables(model)
        return super().__new__(cls, *args, **kwargs)

    def __getstate__(self):
        """Return what is pickled, where PyMC may start a process with it."""
        require_main_guard()
        return self.__dict__.copy()

    def _start_chain(self, rng, tune, draws):
        self.rng = get_random_generator(rng, copy=False)
        self._begin_chain(tune)
        self.expected_draws, self._acceptance = draws, (0, 0.0)

    def reset_tuning(self):
        """Forget what was learnt, keeping whether and for how long the chain is about to tune."""
        tune = self.tune
        self._begin_chain(self.expected_tune)
        self.tune = tune

    def step(self, point):
        """Make a draw from `point`, the values of all variables.

        Raises
        ------
        ValueError, TypeError
            If a value is missing, no real number, or of another shape than the step was made for.
        """
        try:
            own = [self._own_value(point[name], name, s, t) for name, s, _, t in self._own]
            for name, shared in self.shared.items():
                # A copy: a worker process of PyMC writes each draw into the same arrays, and no
                # step would notice that another one moved.
                value = np.array(point[name])
                if value.ndim != shared.type.ndim or value.dtype.kind not in REAL:
                    raise self._unfit(name, value, f"{shared.type.ndim} dimensions")
                shared.set_value(value, borrow=True)
        except KeyError as error:
            names = [name for name, *_ in self._own]
            raise ValueError(
                f"The point has no {error}, and {type(self).__name__} needs one: give the values "
                f"of {', '.join([*names, *self.shared])}, as model.initial_point() does."
            ) from error
        # In the order for which the model is compiled; PyMC's own would be that of the point.
        raveled = own[0].flatten() if len(own) == 1 else np.concatenate([v.ravel() for v in own])
        moved, statistics = self.astep(RaveledVars(raveled, self._own))
        self._average(statistics[0])
        others = dict(point) if self.shared else None
        return DictToArrayBijection.rmap(moved, start_point=others), statistics

    def _average(self, statistics):
        """Let a progress bar show the mean acceptance of late; that of one draw says little."""
        if "accept" in statistics:
            n, mean = self._acceptance
            n = min(n + 1, AVERAGED)
            mean += (statistics["accept"] - mean) / n
            self._acceptance = n, mean
            statistics["accept"] = Averaged(statistics["accept"], mean)

    def _as_recorded(self, values, dtype):
        """Return the raveled `values` (d,) as a point has them: rounded to each variable's type."""
        recorded, end = values.astype(dtype), 0
        for _, _, size, own in self._own:
            begin, end = end, end + size
            if own != dtype:
                recorded[begin:end] = recorded[begin:end].astype(own)
        return recorded

    def _own_value(self, value, name, shape, dtype):
        """Return a value as an array that this step can move, or raise an error."""
        if type(value) is np.ndarray and value.shape == shape and value.dtype == dtype:
            return value
        value = np.asarray(value)
        if value.shape != shape or value.dtype.kind not in REAL:
            raise self._unfit(name, value, f"shape {shape}")
        return value.astype(dtype)

    def _unfit(self, name, value, expected):
        """Return the error for a value that a step cannot take."""
        if value.dtype.kind not in REAL:
            return TypeError(f"{name} is of type {value.dtype}: give real numbers.")
        step = type(self).__name__
        return ValueError(
            f"{name} has shape {value.shape}, and this {step} was made for {expected}. A step is "
            "compiled for the sizes that its model has when it is made: after pm.set_data has "
            f"resized a variable, make a new one, step={step}(...), inside `with model:`."
        )

    @property
    def sampling_state(self):
        """All that the next transition needs.

        Setting a state that is not one of a step like this one raises an error that names what
        differs, and leaves the step as it was.
        """
        return super().sampling_state

    @sampling_state.setter
    def sampling_state(self, state):
        if not isinstance(state, self._state_class):
            raise TypeError(
                f"sampling_state is a {type(state).__name__}: {type(self).__name__} takes that of "
                f"a {type(self).__name__}."
            )
        with all_or_nothing(self):
            self._set_state(state)
            for name, fresh in self._fresh_state().items():
                if getattr(state, name) is not None:
                    check_like(f"sampling_state.{name}", getattr(state, name), fresh)

    def _set_state(self, state):
        ArrayStepShared.sampling_state.fset(self, state)

    @abstractmethod
    def _fresh_state(self) -> dict[str, Any]:
        """Return what a state has to be like; learners check their own part."""

    @abstractmethod
    def _begin_chain(self, expected_tune: int | None) -> None:
        """Set up everything that belongs to one chain, in new arrays."""

    @staticmethod
    def competence(var, has_grad):
        """Continuous variables only."""
        return Competence.INCOMPATIBLE if var.dtype in discrete_types else Competence.COMPATIBLE

    @abstractmethod
    def _progress_columns(self) -> dict[str, tuple[str, str]]:
        """Statistics to show while sampling: name -> title and format."""
