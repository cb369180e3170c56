"""The function of a target that transitions evaluate, with all that it found kept in a store."""

import uuid

import numpy as np

from pymc_kameleon.mcmc.numba_bridge import N_TERMS
from pymc_kameleon.store.evaluation_store import EvaluationStore, StoredEvaluation
from pymc_kameleon.store.fingerprint import describe

__all__ = ["StoredDensity"]


class StoredDensity:
    """Terms of a log density; a log-likelihood that is known is not evaluated again.

    Parameters
    ----------
    target : LogDensity
    store : EvaluationStore

    Raises
    ------
    ValueError
        If the store has other models only, or the likelihood depends on variables that another step
        moves.
    """

    is_compilable = False

    def __init__(self, target, store: EvaluationStore):
        if target.others_in_likelihood:
            raise ValueError(
                f"store=: the likelihood depends on {', '.join(target.others_in_likelihood)} too, "
                "which another step moves. Give this step those variables: "
                f"vars=[{', '.join([*target.names, *target.others_in_likelihood])}]."
            )
        if not target.has_likelihood:
            raise ValueError(
                "store= keeps log-likelihoods, and this model has no observed variables and no "
                "potentials: leave store out, or give a variable observed=..."
            )
        self.target, self.store = target, store
        self.chain, self.last = "", 0
        self.identify()

    def identify(self) -> None:
        """Find the number of the model, with its present data, in the store.

        Raises
        ------
        ValueError
            If the store has other models only.
        """
        self.model = self.store.model_number(describe(self.target))

    def begin_chain(self) -> None:
        """Store what follows as the evaluations of a new chain."""
        self.chain, self.last = uuid.uuid4().hex, 0

    def compiled(self) -> None:
        """Return nothing: compiled code cannot write to a file."""

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,) into `value` (3,)."""
        known = self.store.find(self.model, x)
        if known is not None:
            value[:] = self.log_prior(x), known, 0.0
            return

        def evaluate():
            self.target.function.into(x, value)
            return value[1]

        self.store.timed(self.model, self.chain, x, evaluate)

    def log_prior(self, x: np.ndarray) -> float:
        """Log prior at `x` (d,)."""
        terms = np.empty(N_TERMS)
        self.target.prior.into(x, terms)
        return terms[0]

    def new_from_others(self) -> list[StoredEvaluation]:
        """Return what other chains and runs have stored since the last call."""
        found = self.store.read(self.model, self.last, not_by=self.chain)
        if found:
            self.last = found[-1].number
        return found
