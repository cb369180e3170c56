"""Where tuning begins: where the chain was put, or at a random point around a mode nearby."""

import math
from typing import NamedTuple

import numpy as np
from pymc.exceptions import SamplingError

from pymc_kameleon.gp.typical_set import around_the_mode, typical_depth
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.initial_points import orders_of, start_to_write
from pymc_kameleon.model.mode_search import search_mode
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.sampler import N_READ
from pymc_kameleon.validation import checked_choice

TAUGHT = 10
"""Known evaluations near the largest, times d + 2, that make a search for the mode needless."""

STARTS = ("here", "optimize")

FIRST_SHARE = 0.5
"""Of the scale of the prior: of the first moves, before anything is known."""

NEARER = 0.25
"""Factor of the fraction of the path to a draw from the prior, where the last one was too far."""

SHARES = FIRST_SHARE * NEARER ** np.arange(15)
"""Fractions of the path to a draw from the prior that are tried."""

IN_ORDER = 8
"""Draws of which the elements of a vector are sorted, where no other point has a density."""

SHARES_OF_IMPOSSIBLE = np.append(np.ones(32), np.repeat(SHARES[:8], 8))
"""The same from a point without a density: the draws themselves, then eight draws at each
fraction."""

WIDTHS = (1.5, 1.0, 0.5, 0.25)
"""Of the Gaussian from which a chain's start is drawn, relative to that of the mode, in the order
in which they are tried. The first is wide, so that chains begin further apart than they end."""


def checked_start(start: str, is_estimated: bool) -> str:
    """`start`, which is one of `STARTS`, and "here" where the log density is an estimate."""
    start = checked_choice("start", start, STARTS)
    if start == "optimize" and is_estimated:
        raise ValueError(
            'start="optimize" with pseudo_marginal=True or an estimated_loglikelihood: the search '
            'takes the log density for exact, and an estimate is noisy. Write start="here", and '
            "pm.sample(initvals=dispersed_starts(model, chains)) for starts that lie apart."
        )
    return start


class Start(NamedTuple):
    """How a chain begins: `where`, one of `STARTS`, and whether at a random point (`disperse`).

    One that `is_warm` begins with what was learnt from earlier draws.
    """

    where: str
    disperse: bool
    is_warm: bool


class StartSearch:
    """Search for the start of the chain of a `ChainSampler`.

    It finds `scales` (d,), standard deviations of the first moves. `looked` has the points where
    the log density was evaluated, and its terms.
    """

    def __init__(self, sampler, start: Start):
        self.sampler, self.target, self.start = sampler, sampler.target, start
        self.scales = self.target.scales * FIRST_SHARE
        self.looked: list[tuple[np.ndarray, np.ndarray]] = []

    def find(self, x: np.ndarray) -> None:
        """Choose the starting point: `x` (d,), or a random one for chains that are to begin apart.

        R-hat shows nothing where all chains begin at one point. So one that is to begin at the
        model's default begins at a random point between it and a draw from the prior. The nearer
        that has to be for a density that tuning can climb from, the shorter are its first moves.
        Where a store has points that are typical of the posterior, it begins at one of these: what
        was learnt around them says little about a walk from elsewhere.
        """
        sampler, target, stored = self.sampler, self.target, self.sampler.stored
        is_default = np.array_equal(x, target.default_start, equal_nan=True)
        is_free = self.start.disperse and sampler.tune and is_default
        if is_free and sampler.stage is not None and stored is not None:
            found = stored.from_others(N_READ)
            stored.put_back(found)
            typical = found.points[_are_typical(found.log_densities, target.dim)]
            if len(typical) >= TAUGHT * (target.dim + 2):
                if self.begins_at(sampler.rng.choice(typical)):
                    return
        is_searched = sampler.tune and not self.start.is_warm and self.start.where == "optimize"
        if is_free and is_searched and self._looks_at(x, FIRST_SHARE) > -np.inf:
            sampler.move_to_proposal()
            return
        is_possible = self.begins_at(x)
        if is_free or is_searched:
            self._look_around(x, is_free)
            is_possible = sampler.chain.value[0] > -np.inf
        tries = kept_estimate.FIRST_ESTIMATES if target.has_estimates else 0
        while not is_possible and tries:
            is_possible, tries = self.begins_at(x), tries - 1
        if not is_possible:
            n_looked = len(self.looked) if is_free or is_searched else None
            raise SamplingError(_impossible(target, x, n_looked))

    def begins_at(self, x: np.ndarray) -> bool:
        """Move the chain to `x` (d,); return whether there is a density."""
        chain = self.sampler.chain
        chain.position[:] = x
        self.sampler.evaluate_current()
        found, is_possible = chain.value.copy(), chain.value[0] > -np.inf
        if not is_possible:  # the value of the chain says so in its first term alone
            found[:N_TERMS] = -np.inf
        if np.isfinite(x).all():  # others have no distance from the rest
            self.looked.append((chain.position.copy(), found))
        return is_possible

    def _look_around(self, x, is_free):
        """Find how far from `x` (d,), where the chain is, the density is high enough to climb from.

        Move there if the chain `is_free` to, or where it is impossible.
        """
        here = self.sampler.chain.value[:N_TERMS].sum()
        is_possible = here > -np.inf
        lowest = here - typical_depth(self.target.dim) if is_possible else -np.inf
        for share in SHARES if is_possible else SHARES_OF_IMPOSSIBLE:
            if self._looks_at(x, share) > lowest:
                self.scales = min(share, FIRST_SHARE) * self.target.scales
                if is_free or not is_possible:
                    self.sampler.move_to_proposal()
                return
        orders = [] if is_possible else orders_of(self.target.shapes)
        for which in orders * IN_ORDER:
            if self._looks_at(x, 1.0, which) > lowest:
                self.sampler.move_to_proposal()
                return

    def _looks_at(self, x, share, in_order=()):
        """Log density at a `share` of the way from `x` (d,) to a draw from the prior.

        Where `x` is not finite, at the draw. The elements of the variables `in_order` are sorted.
        """
        sampler, target = self.sampler, self.target
        points = sampler.evaluator.prior_points
        drawn = points[sampler.rng.integers(len(points))].copy()
        for i in in_order:
            end, shape = target.ends[i], target.shapes[i]
            drawn[end - math.prod(shape) : end].reshape(shape).sort(axis=-1)
        begin = np.where(np.isfinite(x), x, drawn)
        point = begin + share * (drawn - begin)
        value = sampler.evaluate(point)
        self.looked.append((point, sampler.chain.proposed_value.copy()))
        return value

    def begin_tuning(self) -> None:
        """Prepare for tuning."""
        if self.start.where == "optimize":
            self._search()
            return
        sampler, known = self.sampler, _known_near_mode(self.sampler)
        if known is not None:
            here = sampler.chain.value[:N_TERMS].sum()
            if _are_typical(np.append(known[1], here), self.target.dim)[-1]:
                sampler.learner.begin_with(around_the_mode(*known), sampler.rng)

    def _search(self):
        """Move the chain to a random point around a mode; teach what was found on the way."""
        sampler, evaluator = self.sampler, self.sampler.evaluator
        chain, points, values, log_densities = sampler.chain, [], [], []

        def evaluate_and_keep(x):
            log_densities.append(sampler.evaluate(x))
            points.append(x.copy())
            values.append(chain.proposed_value.copy())
            return log_densities[-1]

        known, gradients = _known_near_mode(sampler), None
        if known is None:
            gradient = evaluator.gradient_at(chain.proposed_value)
            search_from(chain.position, self.scales, evaluate_and_keep, gradient)
            known = np.array(points), np.array(log_densities)
            if evaluator.gradients:
                gradients = evaluator.gradients_in(np.array(values))
        gaussian = around_the_mode(*known, gradients)
        point_near_mode(gaussian, *known, evaluate_and_keep, sampler.rng)
        sampler.move_to_proposal()
        sampler.learner.begin_with(gaussian, sampler.rng)
        sampler.screening.teach(sampler.stage, chain, points, values, np.array(log_densities))
        sampler.learn_from_evaluations()


def _impossible(target, x, n_looked):
    """Say that there is no density at the start `x` (d,), and what to write."""
    tried = at_fault = ""
    if target.has_estimates:
        tried = f" in {kept_estimate.FIRST_ESTIMATES} estimates, {kept_estimate.ADVICE}"
    elif n_looked is not None:
        tried = f", nor at any of {n_looked} points on the way to draws from the prior"
    faults = target.at_fault(x)
    if faults:
        at_fault = f" At fault: {', '.join(faults)}."
    prior = "draws from the prior, pm.sample(initvals=dispersed_starts(model, chains)), or one "
    variables = [target.model.values_to_rvs[value] for value in target.vars]
    example = start_to_write([v.name for v in variables], target.shapes)
    return (
        f"Initial evaluation of {', '.join(target.names)} failed: the log density at the start "
        f"{np.array2string(x, threshold=20)} (raveled, unconstrained) is not finite{tried}."
        f"{at_fault} Give a start with a positive probability, "
        f"{prior if n_looked is None else ''}{example} model.debug() tells more."
    )


def _known_near_mode(sampler):
    """Points from a store that make a search needless, and their log densities; else None."""
    known = None if sampler.stored is None else sampler.screening.known(sampler.stage)
    return known if known is not None and are_enough(known[1], sampler.target.dim) else None


def _are_typical(values, dim):
    """Whether log densities (n,) may be those of points that are typical of the posterior."""
    return values > least_typical(values, dim)


def least_typical(values: np.ndarray, dim: int) -> float:
    """Log density above which points may be typical, where those of `values` (n,) are known."""
    return np.max(values, initial=-np.inf) - typical_depth(dim)


def are_enough(values: np.ndarray, dim: int) -> bool:
    """Whether so many of these log densities (n,) are typical that a search is needless."""
    return np.sum(_are_typical(values, dim)) >= TAUGHT * (dim + 2)


def search_from(begin: np.ndarray, scales: np.ndarray, evaluate, gradient=None, missing=None):
    """Search for a mode from `begin` (d,) by calls of `evaluate`, which keeps what it finds.

    `scales` (d,) are the lengths of the first steps. `gradient` returns the gradient where
    `evaluate` was called last, if there is one; `missing` says how much higher than the largest
    value others have come.
    """
    search_mode(evaluate, begin.copy(), scales, 100 + 100 * begin.size, gradient, missing)


def point_near_mode(gaussian, points, log_densities, evaluate, rng) -> np.ndarray:
    """Return a random point (d,) around a mode, or the best of the points; it is evaluated last.

    `gaussian` (a `Standardization`) has mean and covariance of the mode, `points` (n, d) were
    evaluated with the `log_densities` (n,), and `evaluate` returns that of a point.
    """
    dim = len(gaussian.location)
    lowest = log_densities.max() - 20 - 3 * dim
    for width in WIDTHS:
        point = gaussian.location + width * gaussian.factor @ rng.standard_normal(dim)
        if evaluate(point) > lowest:
            return point
    point = points[np.argmax(log_densities)]
    evaluate(point)
    return point
