"""What PyMC calls on every step, from its construction to the end of a chain."""

from abc import abstractmethod

import numpy as np
from pymc.model import modelcontext
from pymc.step_methods.arraystep import ArrayStepShared
from pymc.step_methods.compound import Competence
from pymc.util import get_random_generator
from pymc.vartypes import discrete_types
from rich.progress import TextColumn
from rich.table import Column

__all__ = ["STUCK_AFTER", "Step"]

STUCK_AFTER = 1000
"""Transitions without an accepted move after which a chain is called stuck."""


class Step(ArrayStepShared):
    """Base of all steps: a subclass gives `_begin_chain`, `astep` and `_progress_columns`.

    Attributes
    ----------
    expected_tune : int or None
        Draws of tuning; None where PyMC does not say (before 6.3).
    """

    default_blocked = True

    def __new__(cls, *args, **kwargs):
        """Create a step, or one per variable if `blocked=False`."""
        try:
            model = modelcontext(kwargs.get("model"))
        except TypeError as error:
            raise TypeError(
                f"model: {cls.__name__} needs one. Create it inside `with model:`, or pass model=."
            ) from error
        vars = args[0] if args else kwargs.get("vars")
        if not model.value_vars or (isinstance(vars, list | tuple) and not vars):
            raise ValueError(
                "vars: there is no free variable to sample. Give the model one, and leave vars out "
                "or name at least one."
            )
        return super().__new__(cls, *args, **kwargs)

    def set_rng(self, rng):
        """Start a new chain (PyMC before 6.3)."""
        self.rng = get_random_generator(rng, copy=False)
        self._begin_chain(None)

    def setup_chain(self, rng, tune, draws):
        """Start a new chain (PyMC 6.3 and later)."""
        self.rng = get_random_generator(rng, copy=False)
        self._begin_chain(int(tune))

    def reset_tuning(self):
        """Forget what was learnt, keeping whether and for how long the chain is about to tune."""
        tune = self.tune
        self._begin_chain(self.expected_tune)
        self.tune = tune

    def step(self, point):
        """Make a draw from `point`, the values of all variables."""
        # A worker process of PyMC writes each draw into the same arrays. What they held at the last
        # draw must not change with them, or no step would notice that another one moved.
        others = {name: np.array(point[name]) for name in self.shared}
        return super().step({**point, **others})

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
            return {name: statistics[name] for name in shown}

        return (update,)
