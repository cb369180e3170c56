"""Where tuning begins: where the chain was put, or at a random point around a mode nearby."""

import math

import numpy as np
from pymc.exceptions import SamplingError

from pymc_kameleon.gp.typical_set import around_the_mode, typical_depth
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.initial_points import orders_of, start_to_write
from pymc_kameleon.model.mode_search import search_mode
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.validation import checked_choice

TAUGHT = 10
"""Known evaluations near the largest, times d + 2, that make a search for the mode needless."""

STARTS = ("here", "optimize")

FIRST_SHARE = 0.5
"""Of the scale of the prior: of the first moves, before anything is known."""

N_READ = 6000
"""Evaluations of other chains and runs that are read at a time, at most: the last ones."""

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


def find_start(step, x):
    """Begin at `x` (d,), or where chains that are about to tune begin apart.

    R-hat shows nothing where all chains begin at one point. So one that is to begin at the model's
    default begins at a random point between it and a draw from the prior. The nearer that has to be
    for a density that tuning can climb from, the shorter are its first moves. Where a store has
    points that are typical of the posterior, it begins at one of these: what was learnt around them
    says little about a walk from elsewhere.
    """
    step.scales = step.target.scales * FIRST_SHARE
    is_default = np.array_equal(x, step.target.default_start, equal_nan=True)
    is_free = step.disperse and step.tune and is_default
    if is_free and step.stage is not None and step.stored is not None:
        found = step.stored.from_others(N_READ)
        step.stored.put_back(found)
        typical = found.points[_are_typical(found.log_densities, step.dim)]
        if len(typical) >= TAUGHT * (step.dim + 2):
            if begins_at(step, step.rng.choice(typical)):
                return
    is_searched = step.tune and step.warm is None and step.start == "optimize"
    if is_free and is_searched and _looks_at(step, x, FIRST_SHARE) > -np.inf:
        step._move_to_proposal()
        return
    is_possible = begins_at(step, x)
    if is_free or is_searched:
        _look_around(step, x, is_free)
        is_possible = step.chain.value[0] > -np.inf
    tries = kept_estimate.FIRST_ESTIMATES if step.target.has_estimates else 0
    while not is_possible and tries:
        is_possible, tries = begins_at(step, x), tries - 1
    if not is_possible:
        raise SamplingError(_impossible(step, x, is_free or is_searched))


def _impossible(step, x, is_searched):
    """Say that there is no density at the start `x` (d,), and what to write."""
    target = step.target
    tried = at_fault = ""
    if target.has_estimates:
        tried = f" in {kept_estimate.FIRST_ESTIMATES} estimates, {kept_estimate.ADVICE}"
    elif is_searched:
        tried = f", nor at any of {len(step.looked)} points on the way to draws from the prior"
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
        f"{'' if is_searched else prior}{example} model.debug() tells more."
    )


def begins_at(step, x) -> bool:
    """Move the chain to `x` (d,); return whether there is a density."""
    step.chain.position[:] = x
    step._evaluate_current()
    found, is_possible = step.chain.value.copy(), step.chain.value[0] > -np.inf
    if not is_possible:  # the value of the chain says so in its first term alone
        found[:N_TERMS] = -np.inf
    if np.isfinite(x).all():  # others have no distance from the rest
        step.looked.append((step.chain.position.copy(), found))
    return is_possible


def _look_around(step, x, is_free):
    """Find how far from `x` (d,), where the chain is, the density is high enough to climb from.

    Move there if the chain `is_free` to, or where it is impossible.
    """
    here = step.chain.value[:N_TERMS].sum()
    is_possible = here > -np.inf
    lowest = here - typical_depth(step.dim) if is_possible else -np.inf
    for share in SHARES if is_possible else SHARES_OF_IMPOSSIBLE:
        if _looks_at(step, x, share) > lowest:
            step.scales = min(share, FIRST_SHARE) * step.target.scales
            if is_free or not is_possible:
                step._move_to_proposal()
            return
    orders = [] if is_possible else orders_of(step.target.shapes)
    for which in orders * IN_ORDER:
        if _looks_at(step, x, 1.0, which) > lowest:
            step._move_to_proposal()
            return


def _looks_at(step, x, share, in_order=()):
    """Log density at a `share` of the way from `x` (d,) to a draw from the prior.

    Where `x` is not finite, at the draw. The elements of the variables `in_order` are sorted.
    """
    drawn = step.prior_points[step.rng.integers(len(step.prior_points))].copy()
    for i in in_order:
        end, shape = step.target.ends[i], step.target.shapes[i]
        drawn[end - math.prod(shape) : end].reshape(shape).sort(axis=-1)
    begin = np.where(np.isfinite(x), x, drawn)
    point = begin + share * (drawn - begin)
    value = step._evaluate_as_proposal(point)
    step.looked.append((point, step.chain.proposed_value.copy()))
    return value


def begin_tuning(step, x):
    """Prepare for tuning a chain that was told to start at `x` (d,)."""
    if step.start == "optimize":
        _search(step)
        return
    known = _known_near_mode(step)
    if known is not None:
        here = step.chain.value[:N_TERMS].sum()
        if _are_typical(np.append(known[1], here), step.dim)[-1]:
            step.learner.begin_with(around_the_mode(*known), step.rng)


def _search(step):
    """Move the chain to a random point around a mode; teach what was found on the way."""
    chain, points, values, log_densities = step.chain, [], [], []

    def evaluate_and_keep(x):
        log_densities.append(step._evaluate_as_proposal(x))
        points.append(x.copy())
        values.append(chain.proposed_value.copy())
        return log_densities[-1]

    known, gradients = _known_near_mode(step), None
    if known is None:
        search_from(chain.position, step.scales, evaluate_and_keep, step._gradient_of_proposal)
        known = np.array(points), np.array(log_densities)
        if step.takes_gradients:
            gradients = step._gradients_in(np.array(values))
    gaussian = around_the_mode(*known, gradients)
    point_near_mode(gaussian, *known, evaluate_and_keep, step.rng)
    step._move_to_proposal()
    step.learner.begin_with(gaussian, step.rng)
    step.screening.teach(step.stage, chain, points, values, np.array(log_densities))
    step._learn_from_evaluations()


def _known_near_mode(step):
    """Points from a store that make a search needless, and their log densities; else None."""
    known = None if step.stored is None else step.screening.known(step.stage)
    return known if known is not None and are_enough(known[1], step.dim) else None


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
