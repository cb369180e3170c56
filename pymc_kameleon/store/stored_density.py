"""The function of a target that transitions evaluate, with all that it found kept in a store."""

import uuid
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.store.evaluation_store import EvaluationStore, describe, is_known


class FromOthers(NamedTuple):
    """What others evaluated, with the prior of this model.

    These are points (n, d), what `StoredDensity.into` writes at them (n, 3) or (n, 3 + 2 d), and
    log densities (n,), -inf where they are not finite.
    """

    points: np.ndarray
    values: np.ndarray
    log_densities: np.ndarray


def chosen_store(store, of_surrogate, is_estimated: bool) -> EvaluationStore | None:
    """Return the store of a step: its argument `store`, or that of its surrogate."""
    if store is None:
        return of_surrogate
    if is_estimated:
        raise ValueError(
            "store= with a likelihood that is an estimate (pseudo_marginal=True, or an "
            "estimated_loglikelihood): a store keeps one value of a point, and an estimate is "
            "another one each time. Leave store out."
        )
    if of_surrogate is not None and of_surrogate.path != getattr(store, "path", None):
        raise ValueError(
            "store= and GPSurrogate(store=...) are two stores: write "
            "GPSurrogate(store=...) alone, and the step keeps its evaluations there."
        )
    return store


class StoredDensity:
    """Terms of the log density `target`; a log-likelihood that is known is not evaluated again.

    With `gradients`, those of log prior and log-likelihood follow the terms. `n_evaluated` counts
    the evaluations of the chain.
    """

    is_compilable = False

    def __init__(self, target, store: EvaluationStore, gradients: bool = False):
        if not isinstance(store, EvaluationStore):
            raise TypeError(f"store={store!r}: pass EvaluationStore(path), or EvaluationStore().")
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
        self.target, self.store, self.gradients = target, store, gradients
        self._begin("")
        self.identify()

    def identify(self) -> None:
        """Find the number of the model, with its present data, in the store."""
        self.model = self.store.model_number(describe(self.target))

    def begin_chain(self) -> None:
        """Store what follows as the evaluations of a new chain."""
        self._begin(uuid.uuid4().hex)

    def _begin(self, chain):
        self.chain, self._last, self._next_reading = chain, 0, 0.0
        self._returned = None
        self._values_read: dict[bytes, np.ndarray] = {}
        self.n_evaluated = self._n_known = 0

    def compiled(self) -> None:
        """Return nothing: compiled code cannot write to a file."""

    @property
    def prior(self):
        """The function of the log prior, with its gradient if there are gradients."""
        return self.target.prior_with_gradient if self.gradients else self.target.prior

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,), and gradients, into `value`."""
        gradient = value[N_TERMS + x.size :] if self.gradients else None
        known = self._find(x)
        if known is not None:
            log_likelihood, known_gradient = known
            self._join(x, log_likelihood, known_gradient, value)
            self._n_known += 1
            return
        function = self.target.with_gradients if self.gradients else self.target.function

        def evaluate():
            function.into(x, value)
            return value[1]

        self.n_evaluated += 1
        self.store.timed(self.model, self.chain, self._as_stored(x), evaluate, gradient)

    def knows(self, x: np.ndarray) -> bool:
        """Whether the log-likelihood at `x` (d,) is known."""
        return self._find(x) is not None

    def count(self, n_evaluated: int, n_known: int) -> None:
        """Count what another process has evaluated, and found in the store, for this chain."""
        self.n_evaluated += n_evaluated
        self._n_known += n_known

    def taken_counts(self) -> tuple[int, int]:
        """Return how many were evaluated and found in the store since the last call."""
        found = self.n_evaluated, self._n_known
        self.n_evaluated = self._n_known = 0
        return found

    def taken_n_known(self) -> int:
        """Return how many were found in the store since the last call."""
        known, self._n_known = self._n_known, 0
        return known

    def _find(self, x):
        """Log-likelihood and gradient, which is None if there are none; None if not known."""
        if self.gradients:
            return self.store.find_with_gradient(self.model, x)
        known = self.store.find(self.model, self._as_stored(x))
        return None if known is None else (known, None)

    def _as_stored(self, x):
        """Values of the model's variables at `x` (d,), to the last bit where they were read."""
        if not self.target.scores.scored:
            return x
        known = self._values_read.get(x.tobytes())
        return self.target.scores.to_values(x[None])[0] if known is None else known

    def _as_moved(self, values):
        """Points (n, d) of the step that have such `values` (n, d) of the model's variables."""
        points = self.target.scores.from_values(values)
        if self.target.scores.scored:
            self._values_read |= {x.tobytes(): v for x, v in zip(points, values, strict=True)}
        return points

    def _join(self, x, log_likelihood, gradient, value):
        """Write the prior at `x` (d,), and what is known of the likelihood, into `value`."""
        dim = x.size if self.gradients else 0
        self.prior.into(x, value[: N_TERMS + dim])
        value[1] = log_likelihood
        if self.gradients:
            value[N_TERMS + dim :] = gradient

    @property
    def n_held(self) -> int:
        """Evaluations of this model in the store, whoever made them."""
        return self.store.count(self.model)

    def best_of_others(self, most: int) -> np.ndarray | None:
        """Return the point (d,) of largest density that others have stored, if there is one."""
        found = self.from_others(most)
        self.put_back(found)
        if np.max(found.log_densities, initial=-np.inf) == -np.inf:
            return None
        return found.points[np.argmax(found.log_densities)]

    @property
    def is_reading_due(self) -> bool:
        """Whether enough was evaluated since others' evaluations were read."""
        return self.n_evaluated >= self._next_reading

    def from_others(self, most: int, growth: float = 1.0) -> FromOthers:
        """Return what other chains and runs have stored since the last call, without failures.

        Of more than `most`, the last ones. The next reading is due when the evaluations of this
        chain have grown by the factor `growth`.
        """
        read = self.store.read(self.model, self._last, not_by=self.chain, most=most)
        if read:
            self._last = read[-1].number
        self._next_reading = max(self.n_evaluated + 1, growth * self.n_evaluated)
        usable = [
            one for one in read if is_known(one) and not (self.gradients and one.gradient is None)
        ]
        dim = self.target.dim
        points = self._as_moved(np.array([found.point for found in usable]).reshape(-1, dim))
        values = np.zeros((len(usable), N_TERMS + 2 * dim * self.gradients))
        for one, point, value in zip(usable, points, values, strict=True):
            self._join(point, one.value, one.gradient, value)
        log_densities = values[:, :N_TERMS].sum(axis=1)
        log_densities[~np.isfinite(log_densities)] = -np.inf
        found = FromOthers(points, values, log_densities)
        if self._returned is not None:
            parts = zip(self._returned, found, strict=True)
            found = FromOthers(*(np.concatenate(part)[-most:] for part in parts))
            self._returned = None
        return found

    def put_back(self, found: FromOthers) -> None:
        """Let what was read be the first that is returned the next time."""
        self._returned = found
