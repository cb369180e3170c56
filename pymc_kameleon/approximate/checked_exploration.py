"""Exploration for an approximate posterior: evaluations, the check of them, and the evidence."""

from typing import NamedTuple

import numpy as np
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from pymc_kameleon._compat import pareto_k
from pymc_kameleon._threads import one_thread
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.approximate.predicted_error import (
    error_of_few_draws,
    error_of_mean_weight,
    expected_error,
    overconfidence,
    total_variation,
)
from pymc_kameleon.evidence.estimates import Estimate, importance_sampling
from pymc_kameleon.evidence.normaliser import N_DRAWN
from pymc_kameleon.model.counting_bar import counting_bar
from pymc_kameleon.steps.chain.report import failures
from pymc_kameleon.steps.chain.surrogate_sampler import GROSS, NO_ESTIMATE
from pymc_kameleon.surrogate.posterior_surrogate import surrogate_values

CHECKED_SHARE, FEWEST_CHECKED, MOST_CHECKED = 1 / 8, 30, 50
"""Share of the evaluations that check the surrogate at its own draws, and how many these are at
least and at most: fewer than 30 have no Pareto k."""

N_PROBED = 5
"""Draws from which it is seen whether the surrogate is far too large where nothing was evaluated:
the first of each check, and of the last surrogate."""

KEPT, CAUTIOUS = (0.2, 0.5), 0.35
"""After a check that found the total variation distance D, the surrogate is fitted again, to the
values of the check too. Its predicted error is then kept between 0.2 D and 0.5 D, and its cautious
error is 0.35 D at least."""

N_JUDGED = 400
"""Draws at which the error of the marginals is predicted."""


class Checked(NamedTuple):
    """What true values at `n` fresh draws of a surrogate say about it.

    `size` is the effective number of these draws after weighting, `distance` the total variation
    distance that the weights imply, and `scale` how much more uncertain the surrogate is than its
    process says; `n_outside` have no density. `evidence` is that of this surrogate, corrected by
    the weights.
    """

    n: int
    size: float
    distance: float
    pareto_k: float
    scale: float
    n_outside: int
    evidence: Estimate


UNCHECKED = Checked(0, float("nan"), 0.0, float("nan"), 1.0, 0, NO_ESTIMATE)


class Approximation(NamedTuple):
    """Draws from a surrogate: raveled `points` (n, d), its log densities and their errors (n,).

    `predicted_error` is what the process says, kept within `KEPT` of what the last check found;
    `cautious_error` is the larger one of what the process says and `CAUTIOUS` of what it found.
    """

    points: np.ndarray
    values: np.ndarray
    deviations: np.ndarray
    predicted_error: float
    cautious_error: float
    evidence: Estimate


class CheckedExploration:
    """Evaluations until the budget is spent or the cautious error is below `tolerance`."""

    def __init__(self, explorer: Explorer, tolerance: float | None):
        self.explorer, self.tolerance = explorer, tolerance
        share = round(CHECKED_SHARE * explorer.budget)
        self.n_checks = min(max(share, FEWEST_CHECKED), MOST_CHECKED)
        # One evaluation is left to see whether the log density is random, where there is a doubt.
        self.most = explorer.budget - int(explorer.target.function.has_black_box)
        self.checked, self.error = UNCHECKED, float("nan")
        self.is_astray = False

    def learn(
        self, rng: np.random.Generator, progressbar: bool, start: np.ndarray | None = None
    ) -> bool:
        """Make the evaluations; return whether that was not interrupted."""
        explorer = self.explorer
        columns = (
            TextColumn("Evaluations {task.completed:.0f} of {task.total:.0f}"),
            BarColumn(),
            TextColumn("cautious error {task.fields[error]:.3f}"),
            TimeRemainingColumn(),
        )
        with counting_bar(
            *columns, total=explorer.budget, shown=progressbar, error=self.error
        ) as show:
            explorer.on_call = lambda: show(explorer.n_counted, explorer.budget, error=self.error)
            try:
                with explorer.limited(self.most):
                    self._explore_and_check(rng, start)
                show(explorer.n_counted, explorer.n_counted, error=self.error)
            except KeyboardInterrupt:
                if not explorer.knows_something and not explorer.knows_enough:
                    raise
                explorer.fit_known()
                return False
            finally:
                explorer.on_call = None
        return True

    def _explore_and_check(self, rng, start):
        explorer = self.explorer
        reserve = self.n_checks + N_PROBED
        with explorer.limited(self.most - reserve):
            explorer.begin(rng, start)
            if explorer.learner is None:
                raise ValueError(
                    f"n_evaluations={explorer.budget}: at none of the points that were tried is "
                    f"there a density of {', '.join(explorer.target.names)}. "
                    f"{failures(explorer) or 'See model.debug(), or take more evaluations.'}"
                )
            explorer.fit_known()
        self._recall_check()
        if self.checked.n and explorer.left < reserve:
            reserve = N_PROBED  # too few are left for another check
        if self.checked.n and self._is_good() and self._least_cautious_error() < self.tolerance:
            return
        while True:
            with explorer.limited(self.most - reserve):
                while explorer.left > 0 and not self._is_good():
                    explorer.explore()
            if not explorer.knows_something:
                return
            with explorer.limited(self.most - N_PROBED):
                while explorer.left > 0 and not self._check():
                    pass
            is_good = self._is_good() and self._least_cautious_error() < self.tolerance
            if explorer.left > reserve and not is_good:
                continue
            if explorer.left <= 0:
                return
            # The last fit is another surrogate than the one that was checked.
            self.is_astray = _are_astray(explorer.errors(explorer.draw_surrogate(N_PROBED)))
            self._keep_check()
            if not self.is_astray:
                return
            explorer.fit_known()
            if explorer.left <= reserve:
                return

    def _keep_check(self):
        """Store what is known of the surrogate, for a later call that has nothing to evaluate."""
        stored = self.explorer.stored
        if stored is not None:
            found = self.checked._asdict() | {"is_astray": bool(self.is_astray)}
            stored.store.add_check(stored.model, found)

    def _recall_check(self):
        stored = self.explorer.stored
        found = None if stored is None else stored.store.last_check(stored.model)
        if found is not None:
            self.is_astray = bool(found.pop("is_astray"))
            found["evidence"] = Estimate(*found["evidence"])
            self.checked = Checked(**found)

    def _is_good(self):
        """Predict the error; return whether it is as small as was asked for."""
        if self.explorer.knows_something:
            v = np.ascontiguousarray(self.explorer.learner.fitted.population.T)
            self.error = self._predicted(v)
        return self.tolerance is not None and self.error < self.tolerance

    def _least_cautious_error(self):
        """max(0.35 D, 2 D - 1), D from the last check; 1 if the surrogate was far too large.

        The few values of a check cannot show that a surrogate that was far off is right now.
        """
        distance = self.checked.distance
        return 1.0 if self.is_astray else max(CAUTIOUS * distance, 2.0 * distance - 1.0)

    def _predicted(self, v):
        points = self.explorer.learner.surrogate.to_points(v.T)
        covariance = self.checked.scale**2 * self.explorer.covariance(v)
        outside = self.checked.n_outside / max(self.checked.n, 1)
        return expected_error(points, covariance, self.explorer.rng) + outside

    @one_thread()
    def _check(self):
        """Evaluate fresh draws of the surrogate, compare, and fit it to these too.

        Return False if it ended after the first few, where they show that the surrogate is far too
        large at its own draws: then all there is to do is to teach it that.
        """
        explorer = self.explorer
        drawn = explorer.draw_surrogate(N_DRAWN)
        at = drawn[: self.n_checks]
        covariance, normaliser = explorer.covariance(at), explorer.normaliser(drawn)
        errors = explorer.errors(at[:N_PROBED])
        is_astray = _are_astray(errors)
        if not is_astray:
            errors = np.append(errors, explorer.errors(at[N_PROBED:]))
        n, weights = len(errors), importance_sampling(errors)
        finite = np.flatnonzero(np.isfinite(errors))
        self.checked = Checked(
            n,
            weights.effective_size,
            float(total_variation(errors)),
            pareto_k(errors),
            overconfidence(errors[finite], covariance[np.ix_(finite, finite)], explorer.rng),
            n - len(finite),
            _corrected(normaliser, weights.log_evidence, weights.standard_error),
        )
        self._keep_check()
        explorer.fit_known()
        return not is_astray

    @one_thread()
    def draw(self, n: int) -> Approximation:
        """Draw from the surrogate `n` times, and say how far it can be believed."""
        explorer = self.explorer
        if not explorer.knows_something:
            raise ValueError(
                f"n_evaluations={explorer.budget}: none of {explorer.n_calls} evaluations of the "
                f"log density of {', '.join(explorer.target.names)} was enough to fit a surrogate. "
                "See model.debug(), or take more evaluations."
            )
        surrogate, drawn = explorer.learner.surrogate, explorer.draw_surrogate(max(n, N_DRAWN))
        error = self._predicted(drawn[:N_JUDGED])
        least, most = (share * self.checked.distance for share in KEPT)
        predicted = min(max(error, least), most if self.checked.n else 1.0)
        cautious = max(error, self._least_cautious_error())
        v = drawn[:n]
        points = surrogate.to_points(v.T)
        few = error_of_few_draws(surrogate.to_points(drawn.T)) * np.sqrt(len(drawn) / n)
        return Approximation(
            explorer.orbits.spread(points, explorer.rng),
            surrogate_values(surrogate, v),
            self.checked.scale * explorer.standard_deviations(v),
            min(1.0, float(np.hypot(predicted, few))),
            min(1.0, float(np.hypot(cautious, few))),
            self._evidence(drawn),
        )

    def _evidence(self, drawn):
        """Evidence of the last surrogate, with an error not less than what the check found.

        That had another surrogate, corrected by few weights, which know little of a missing tail.
        """
        if self.checked.n == 0:
            return NO_ESTIMATE
        explorer = self.explorer
        normaliser = explorer.normaliser(drawn)
        covariance = self.checked.scale**2 * explorer.covariance(drawn[:N_JUDGED])
        uncertain = error_of_mean_weight(covariance, explorer.rng)
        apart = 0.5 * abs(normaliser.log_evidence - self.checked.evidence.log_evidence)
        return _corrected(normaliser, 0.0, max(uncertain, apart, self.checked.distance))


def _are_astray(errors):
    """Whether the surrogate is far too large at two or more of its own draws.

    Those without a density do not count: they are beyond an edge, which is known better with them.
    """
    return np.sum(errors[np.isfinite(errors)] < -GROSS) >= 2


def _corrected(normaliser, log_weight, error):
    return Estimate(
        normaliser.log_evidence + log_weight,
        float(np.hypot(normaliser.standard_error, error)),
        normaliser.effective_size,
    )
