"""The learner of a proposal of your own, whose scaling is all that it learns."""

import math
from collections.abc import Callable
from typing import Any

from pymc_kameleon.adaptation.learner import Learner
from pymc_kameleon.mcmc.run import Mixture, no_differences
from pymc_kameleon.mcmc.scalings import WIDEST_BOUNDS, Scaling, ScalingRecursion, new_scaling
from pymc_kameleon.validation import checked_number

__all__ = ["ScalingLearner"]


class ScalingLearner(Learner):
    """Learns a scaling, towards an acceptance.

    Parameters
    ----------
    make_proposal : callable
        `make_proposal(scaling)` returns the proposal, a NamedTuple for whose class
        `register_proposal` was called; `scaling` is a `Scaling` of one number.
    scaling : float
        What the scaling is at first.
    """

    history_capacity = 2
    state_names = ("scales", "scaling")

    def __init__(self, make_proposal: Callable[[Scaling], Any], scaling: float = 1.0):
        self.make_proposal = make_proposal
        self.first_scaling = checked_number("scaling", scaling, above=0)
        self.options = {"proposal": make_proposal.__qualname__, "scaling": self.first_scaling}

    def _begin(self, position, rng, warm):
        known = None if warm is None else warm.scaling
        self.scaling = new_scaling(known or self.first_scaling)
        self._no_differences = no_differences(self.dim)

    def proposal(self, compiled):  # noqa: D102
        return self.make_proposal(self.scaling)

    def mixture(self, tune):  # noqa: D102
        return Mixture(self.scales, self._no_differences, 0.0, 0.0)

    def recursion(self):  # noqa: D102
        return ScalingRecursion(self.scaling, WIDEST_BOUNDS, self.target_accept, 1.0, 0.5, True)

    def statistics(self):  # noqa: D102
        return {"scaling": math.exp(self.scaling.log[0])}
