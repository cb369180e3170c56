"""What evaluates the log density of a target for one chain."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.initial_points import seed_from
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.chain.report import Report
from pymc_kameleon.store.stored_density import StoredDensity


class Evaluator:
    """Evaluates the log density of `target`, with its `gradients` or without, for one chain.

    Or with the `terms` of its likelihood, where that is a sum of them.

    `stored` knows what a file has, if there is one. `ahead` evaluates at several points at once
    where a black box can; `parallel` is None, or evaluates in several processes. `rng` draws the
    seeds of estimates; errors are noted in `report`. `correction` is None, or what is added to the
    log-likelihood at a point (d,): in plain Python then.
    """

    correction: Callable[[np.ndarray], float] | None = None
    parallel: Any = None

    def __init__(
        self,
        target: LogDensity,
        gradients: bool = False,
        stored: StoredDensity | None = None,
        ahead: Any = None,
        terms: bool = False,
    ):
        self.target, self.gradients, self.stored, self.ahead = target, gradients, stored, ahead
        self.terms = terms
        self.rng = np.random.default_rng()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the chain, if there is one."""
        self.report = Report()
        self._prior_points: np.ndarray | None = None

    @property
    def prior_points(self) -> np.ndarray:
        """Draws from the prior (n, d), this chain's own, made when they are first asked for."""
        if self._prior_points is None:
            self._prior_points = self.target.prior_points(seed_from(self.rng))
        return self._prior_points

    @property
    def function(self):
        """What writes the terms of the log density at a point."""
        if self.parallel is not None:
            return self.parallel
        if self.stored is not None:
            return self.stored
        if self.terms:
            return self.target.with_terms
        return self.target.with_gradients if self.gradients else self.target.function

    @property
    def is_compilable(self) -> bool:
        """Whether compiled code can call the log density."""
        return self.correction is None and not self.target.n_seeds and self.function.is_compilable

    @property
    def n_values(self) -> int:
        """Count the numbers that `into` writes, the seeds of the estimates among them."""
        n_terms = len(self.target.terms.names) if self.terms else 0
        return N_TERMS + 2 * self.target.dim * self.gradients + n_terms + self.target.n_seeds

    def into(self, x: np.ndarray, value: np.ndarray) -> None:
        """Write the terms of the log density at `x` (d,), gradients and new seeds to `value`."""
        if self.ahead is not None:
            self.ahead.asked(x)
        end = value.size - self.target.n_seeds
        value[end:] = self.target.redraw_estimates(self.rng)
        self.function.into(x, value[:end])
        if self.correction is not None:
            value[1] += self.correction(x)

    def into_or_none(self, x: np.ndarray, value: np.ndarray) -> None:
        """As `into`, for start and tuning: an error counts as no density."""
        self.or_none(self.into, x, value)

    def or_none(self, density, x: np.ndarray, value: np.ndarray) -> None:
        """Call `density`, which writes to `value`; an error is noted, and counts as none."""
        try:
            density(x, value)
        except Exception as error:
            value[:] = np.nan
            self.report.failed += 1
            self.report.first_failure = self.report.first_failure or self.failure(error, x)

    def failure(self, error: Exception, x: np.ndarray) -> str:
        """Say at which natural values of the variables `x` (d,) an evaluation failed, and how."""
        values = self.target.natural(x[None])
        shown = [
            f"{name} = {np.array2string(v[0], threshold=10)}" for name, (_, v) in values.items()
        ]
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{', '.join(shown)}: {first_line}"

    def gradient_at(self, value: np.ndarray) -> Callable[[], np.ndarray] | None:
        """Return what reads the gradient (d,) off `value`; None without gradients."""
        return (lambda: self.gradients_in(value)) if self.gradients else None

    def gradients_in(self, values: np.ndarray) -> np.ndarray:
        """Gradients (..., d) of the log density among the values (..., 3 + 2 d) of `into`."""
        parts, dim = values[..., N_TERMS:], self.target.dim
        return parts[..., :dim] + parts[..., dim:]
