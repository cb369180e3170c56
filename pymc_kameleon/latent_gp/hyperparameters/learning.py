"""What tuning learns from approximations at pilots: a surrogate of log p(theta | y), and sites."""

import warnings
from typing import NamedTuple

import numpy as np

from pymc_kameleon.gp.typical_set import typical_depth
from pymc_kameleon.latent_gp.gaussian.conditional import conditional_of
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites
from pymc_kameleon.latent_gp.gaussian_approximations import (
    BlockApproximation,
    GaussianApproximation,
    expectation_propagation_approximation,
    laplace_approximation,
    laplace_in_blocks,
)
from pymc_kameleon.latent_gp.hyperparameters.site_function import (
    SiteFunction,
    constant_sites,
    fit_sites,
)
from pymc_kameleon.latent_gp.reader.precision_prior import PrecisionAt
from pymc_kameleon.mcmc.history import thinned
from pymc_kameleon.surrogate.acquisition import points_to_explore
from pymc_kameleon.surrogate.learner import TrajectoryLearner

MOST_PILOTS, LEAST_PILOTS, MOST_NUMBERS = 400, 40, 4_000_000
"""Approximations that are kept, fewer where they would have more numbers than this; beyond, the
least probable go."""

TOLERANCE, MAX_SWEEPS, N_NODES = 1e-3, 40, 17
"""Of expectation propagation: the sites are exact enough long before they have converged."""

MOST_INFORMATION = 1e12
"""Precision of a site, in units of the prior's, beyond which log evidences are lost to rounding."""


class Pilot(NamedTuple):
    """The Gaussian approximation at hyperparameters theta, `x` (d,): its sites.

    `log_density` is log p(y | theta) + log p(theta) as they give it.
    """

    x: np.ndarray
    sites: Sites
    log_density: float


class Pilots(NamedTuple):
    """What is kept of approximations, one row each: theta, its log density, and the sites."""

    points: np.ndarray
    values: np.ndarray
    precision: np.ndarray
    shift: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return dict.fromkeys(("points", "values", "precision", "shift"), 0)

    @property
    def is_consistent(self) -> bool:
        """Whether all rows are complete."""
        return len({len(array) for array in self}) == 1

    def joined(self, new: list[Pilot]) -> "Pilots":
        """Return these and new ones, at most `MOST_PILOTS`."""
        if not new:
            return self
        rows = zip(
            *((p.x, p.log_density, p.sites.precision, p.sites.shift) for p in new), strict=True
        )
        parts = [np.concatenate([old, row]) for old, row in zip(self, rows, strict=True)]
        n_numbers = sum(part[0].size for part in parts)
        most = max(LEAST_PILOTS, min(MOST_PILOTS, MOST_NUMBERS // n_numbers))
        kept = np.sort(np.argsort(-parts[1])[:most])
        return Pilots(*(np.ascontiguousarray(part[kept]) for part in parts))

    def among_the_best(self, depth: float) -> "Pilots":
        """Return those whose log density is within `depth` of the largest."""
        kept = self.values > self.values.max() - depth
        return Pilots(*(part[kept] for part in self))

    def sites_near(self, x: np.ndarray, scale: np.ndarray) -> Sites | None:
        """Sites of the pilot nearest to `x` (d,) in units of `scale` (d,); None without pilots."""
        if len(self.values) == 0:
            return None
        i = int(np.argmin(np.sum(((self.points - x) / scale) ** 2, axis=1)))
        return Sites(self.precision[i], self.shift[i])


def no_pilots(dim: int, sites: Sites) -> Pilots:
    """Return no pilots, of `dim` hyperparameters and such sites."""
    arrays = (np.zeros((0, part.size)) for part in (sites.precision, sites.shift))
    return Pilots(np.zeros((0, dim)), np.zeros(0), *arrays)


def pilot_at(model, x: np.ndarray, method: str, start: Sites | None = None) -> Pilot | None:
    """Approximate p(f | y, theta) at `x` (d,), by "ep" or "laplace" or, where it fails, the latter.

    Without curvature of the likelihood it is always by expectation propagation. The search begins
    at the sites `start`, if any. The hyperparameters of the model are set to `x`. None if there is
    no Gaussian.
    """
    log_prior = model.log_prior(x)
    if not np.isfinite(log_prior):
        return None
    model.set_hyperparameters(x)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", UserWarning)
        try:
            prior, variable = model.prior()
        except (ArithmeticError, ValueError):
            return None
        log_prior += variable.log_integral
        is_logit = getattr(model.likelihood, "logit_labels", None) is not None
        is_curved = getattr(model.likelihood, "has_curvature", True)
        blocks = getattr(model.likelihood, "blocks", None)
        in_blocks = blocks is not None or isinstance(prior, PrecisionAt)
        if in_blocks:
            method = "laplace"
        for name in dict.fromkeys([method, "laplace"] if is_curved else ["ep"]):
            try:
                found: GaussianApproximation | BlockApproximation
                if name == "ep":
                    found = expectation_propagation_approximation(
                        prior,
                        model.likelihood,
                        tolerance=TOLERANCE,
                        max_sweeps=MAX_SWEEPS,
                        n_nodes=None if is_logit else N_NODES,
                        moment_tolerance=TOLERANCE,
                        sites=start,
                    )
                elif in_blocks:
                    found = laplace_in_blocks(prior, model.likelihood, 1e-3, start)
                else:
                    found = laplace_approximation(prior, model.likelihood, tolerance=1e-3)
            except (ArithmeticError, ValueError, NotImplementedError):
                continue
            sites, value = found.sites, found.log_evidence + log_prior
            if found.converged and np.isfinite(value) and _are_usable(sites, prior):
                return Pilot(x.copy(), sites, float(value))
    return None


def _are_usable(sites: Sites, prior: Gaussian | PrecisionAt) -> bool:
    information = sites.precision * prior.variances
    return bool(np.all(information < MOST_INFORMATION) and np.all(np.isfinite(sites.shift)))


class PilotSearch:
    """Log p(theta | y) by Laplace's approximation, as a function of theta that keeps its pilots.

    `points`, `values` and `pilots` are those so far: -inf and None where there is no Gaussian.
    """

    def __init__(self, model):
        self.model, self.points, self.values, self.pilots = model, [], [], []

    def __call__(self, x: np.ndarray) -> float:
        """Approximate at `x` (d,), beginning at the sites of the last pilot."""
        nearby = next((p.sites for p in reversed(self.pilots) if p is not None), None)
        pilot = pilot_at(self.model, x, "laplace", nearby)
        self.points.append(x.copy())
        self.pilots.append(pilot)
        self.values.append(-np.inf if pilot is None else pilot.log_density)
        return self.values[-1]


COSINE = 0.7
"""That of the angle between an axis and the points that say what is in its direction."""

N_DRAWS = 16
"""Functions drawn at each pilot, of which one is resampled to compare sites by."""

EXPLORATIONS = 3
"""Of a refit: each fits the surrogate again, which then reaches further into tails."""

N_COMPARED, AGREEMENT = 8, 0.05
"""Pilots at which expectation propagation and Laplace's approximation are compared, and standard
deviation of the difference of their log evidences up to which the cheaper is as good."""


class HyperparameterLearner(TrajectoryLearner):
    """Learns an approximation of log p(theta | y), and proposes theta from it.

    Differences of past points are the other moves.

    The surrogate is fitted to approximations at pilot points, not to the densities that transitions
    evaluate: those know theta and a function. The exact ratio takes the difference into account.
    """

    keeps_evaluations = False

    def transitions_before_update(self, transition, n, rng):
        """Return `n`: whoever has the pilots says when to fit."""
        return n

    def unknown_points(self, fitted, n: int) -> np.ndarray:
        """Rows of points, at most n + 2 d, where the surrogate that was `fitted` should know more.

        At most `n` are where it is uncertain; the others are on the axes, where its trajectories
        end.
        """
        uncertain = points_to_explore(fitted, self.surrogate, n)
        return np.concatenate([uncertain, self._open_ends()])

    def _open_ends(self):
        """Return the ends of axes, but those in whose direction a very low density is known."""
        points, values, _ = self.known()
        surrogate = self.surrogate
        v = surrogate.to_moves(points)
        v /= np.maximum(np.linalg.norm(v, axis=0), 1e-300)
        axes = np.concatenate([np.eye(self.dim), -np.eye(self.dim)])
        is_low = values < values.max() - typical_depth(self.dim)
        is_closed = np.any((axes @ v > COSINE) & is_low, axis=1)
        return surrogate.to_points(self.fitted.integrator.radius[0] * axes[~is_closed].T)

    def end_tuning(self, position, rng):
        """Freeze what there is."""
        self._judge()
        self.fitted = self.fitted.without_uncertainty()
        self.fitted.integrator.hot_share[0] = 0.0
        return ()

    def statistics(self):
        """Return the share of surrogate transitions, beside the scaling."""
        found = super().statistics()
        surrogate = 1.0 - self.difference_share if self.has_learnt else 0.0
        return {"scaling": found["step_size"], "surrogate_share": surrogate}


class Refit(NamedTuple):
    """What was fitted; `method` is that of the refits to come, sites are None without pilots."""

    pilots: Pilots
    sites: SiteFunction | None
    is_surrogate_fitted: bool
    method: str


def refit(
    model,
    learner: HyperparameterLearner,
    pilots: Pilots,
    method: str,
    rng: np.random.Generator,
    n_pilots: int,
) -> Refit:
    """Approximate at points where the chain was and where the surrogate is uncertain, and fit.

    `n_pilots` new ones are where the chain was, by the history of the learner. In each of several
    explorations half as many more are where the surrogate is uncertain, and up to 2 d on the axes
    where it ends.
    """
    past = thinned(np.unique(learner.history.later_half(), axis=0), n_pilots, rng)
    scale = past.std(axis=0) + 1e-300
    if method == "ep" and len(pilots.values) == 0 and _agree(model, thinned(past, N_COMPARED, rng)):
        method = "laplace"
    pilots = _approximated(model, learner, pilots, past, scale, method)
    fitted = learner.fit(rng)
    for _ in range(EXPLORATIONS):
        if fitted is None:
            break
        unknown = learner.unknown_points(fitted, n_pilots // 2)
        if len(unknown) == 0:
            break
        pilots = _approximated(model, learner, pilots, unknown, scale, method)
        fitted = learner.fit(rng) or fitted
    if len(pilots.values) == 0:
        return Refit(pilots, None, fitted is not None, method)
    best = pilots.among_the_best(typical_depth(model.dim))
    centre = best.sites_near(best.points.mean(axis=0), scale)
    constant = constant_sites(centre, model.dim)  # type: ignore[arg-type]  # there are pilots
    if fitted is None:
        return Refit(pilots, constant, False, method)
    coordinates = learner.fitted.standardization
    halves = [Pilots(*(part[k::2] for part in best)) for k in (0, 1)]
    highest, sites = _acceptance_of(model, constant, halves[1], rng), constant
    have_blocks = best.precision.shape != best.shift.shape
    for has_means in (False,) if have_blocks else (False, True):
        candidate = _fitted(halves[0], coordinates, has_means)
        acceptance = 0.0 if candidate is None else _acceptance_of(model, candidate, halves[1], rng)
        if acceptance > highest:
            highest, sites = acceptance, _fitted(best, coordinates, has_means)
    return Refit(pilots, sites, True, method)


def _agree(model, points):
    """Whether Laplace's approximation is cheaper than expectation propagation, and as good."""
    closed = ("probit_labels", "logit_labels")
    if any(getattr(model.likelihood, name, None) is not None for name in closed):
        return False
    if not getattr(model.likelihood, "has_curvature", True):
        return False
    differences, sites = [], None
    for x in points:
        both = [pilot_at(model, x, "ep", sites), pilot_at(model, x, "laplace")]
        if None in both:
            return False
        differences.append(both[0].log_density - both[1].log_density)
        sites = both[0].sites
    return len(differences) > 1 and float(np.std(differences)) < AGREEMENT


def _fitted(pilots, coordinates, has_means):
    return fit_sites(pilots.points, pilots.precision, pilots.shift, coordinates, has_means)


def _approximated(model, learner, pilots, points, scale, method):
    """Add approximations at the rows of `points` to the pilots, and to the learner's densities."""
    found: list[Pilot] = []
    for x in points:
        nearby = Pilots(*pilots).joined(found) if len(pilots.values) == 0 else pilots
        pilot = pilot_at(model, x, method, nearby.sites_near(x, scale))
        if pilot is not None:
            learner.keep(x, np.array([pilot.log_density, 0.0, 0.0]))
            found.append(pilot)
    return pilots.joined(found)


def _acceptance_of(model, sites, pilots, rng):
    """Return the mean acceptance of moves of theta between pilots, with these sites.

    The approximate p(theta | y) is divided out, so that the error of the sites alone counts. At
    each pilot a function is drawn, by importance resampling of draws from its own approximation,
    and the log density of theta at its eta is compared with the pilot's log evidence.
    """
    excess, blocks = [], getattr(model.likelihood, "blocks", None)
    for x, value, precision, shift in zip(*pilots, strict=True):
        model.set_hyperparameters(x)
        try:
            prior = model.prior().gaussian
            own = conditional_of(prior, Sites(precision, shift), blocks)
            other = conditional_of(prior, sites(x), blocks)
        except ValueError:
            continue
        draws = own.draws(rng.standard_normal((own.n_sets, N_DRAWS, prior.size)))
        values = np.array([model.likelihood.value(prior.predictors(f)) for f in draws])
        # The largest of these is that of a draw by the weights (Gumbel's trick).
        weights = values + [own.log_ratio(f) for f in draws] + rng.gumbel(size=N_DRAWS)
        i = int(np.argmax(weights))
        excess.append(values[i] + other.log_ratio(draws[i]) + model.log_prior(x) - value)
    excess = np.array(excess)
    finite = excess[np.isfinite(excess)]
    return float(np.exp(np.minimum(0.0, finite - finite[:, None])).mean()) if len(finite) else 0.0
