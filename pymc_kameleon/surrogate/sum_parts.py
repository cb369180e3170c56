"""What is known of a log density whose likelihood is a sum of terms."""

from collections.abc import Sequence

import numpy as np

from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.model.model_function import ModelFunction

MOST_INPUTS = 0.5
"""Inputs of the largest term, relative to all variables, up to which terms are learnt apart."""


class SumParts:
    """The terms of a sum, what they depend on, and what else is known of the log density.

    `names` (T) are the terms' names, and `members` (T) the indices of their inputs, which the
    function `inputs` writes. `known` is the known part with the gradient of all, as
    `LogDensity.known_with_slopes`; `independent` the same with independent Gaussians in its place,
    as wide as the prior. `own` (T) has the coordinates that each term alone depends on. `shared`
    are pairs (input, coordinate) of coordinates that are inputs of several terms, and `n_uses` (n,)
    counts the terms that have an input.
    """

    def __init__(self, target: LogDensity):
        terms = target.terms
        self.dim, self.n_inputs = target.dim, terms.n_inputs
        self.names: Sequence[str] = terms.names
        self.members: Sequence[np.ndarray] = terms.members
        self.inputs: ModelFunction = target.inputs_of_terms
        self.known: ModelFunction = target.known_with_slopes()
        drawn = target.prior_points(seed=0)
        middle = np.median(drawn, axis=0)
        self.independent: ModelFunction = target.known_with_slopes((middle, target.scales))
        self.n_uses = np.bincount(np.concatenate(self.members), minlength=self.n_inputs)
        depends = self._dependence(drawn[0], target.scales)
        uses = np.array([depends[indices].any(axis=0) for indices in self.members])
        is_own = uses.sum(axis=0) == 1
        self.own = [np.flatnonzero(used & is_own) for used in uses]
        is_one = depends.sum(axis=1) == 1
        self.shared = [
            (i, int(np.argmax(depends[i]))) for i in np.flatnonzero((self.n_uses > 1) & is_one)
        ]

    def _dependence(self, point, scales):
        """Whether each input changes with each coordinate, (n, d)."""
        steps = np.vstack([np.zeros(self.dim), 0.1 * np.diag(scales)])
        values = self.inputs_at(point + steps)
        return (values[1:] != values[0]).T

    @property
    def is_compilable(self) -> bool:
        """Whether compiled code can call all functions, which are compiled for it here."""
        functions = self.inputs, self.known, self.independent
        return all(function.compiled() is not None for function in functions)

    def inputs_at(self, points: np.ndarray) -> np.ndarray:
        """Return inputs (m, n) of the terms at the rows of `points` (m, d)."""
        found = np.empty((len(points), self.n_inputs))
        for point, row in zip(points, found, strict=True):
            self.inputs.into(point, row)
        return found


def sum_parts(target: LogDensity) -> SumParts | None:
    """Return the parts if the likelihood is a sum of terms that are worth learning apart."""
    terms = target.sum_of_terms
    if terms is None or max(map(len, terms.members)) > MOST_INPUTS * target.dim:
        return None
    try:
        parts = SumParts(target)
    except NotImplementedError:  # what is known has no gradient
        return None
    return parts if parts.is_compilable else None
