"""Moments of a Gaussian times one term of any factorising likelihood, by adaptive quadrature."""

import numpy as np
from scipy.special import expit

from pymc_kameleon.latent_gp.tilted_moments import TiltedMoments

MAX_NODES = 2049
"""Nodes from which it is not refined."""

REACH = 9.0
"""Standard deviations of the cavity beyond which there is nothing."""

NEGLIGIBLE = 45.0
"""Fall of the log density at which the nodes end."""

MOST_KINKS = 16
"""Kinks of the log-likelihood of a term that are looked for."""

LEAST_JUMP = 1e-6
"""Jump of the slope, times the standard deviation of the cavity, that is a kink."""

PANEL_END = 3.0
"""Where the nodes between two kinks end: what is beyond has a share of 1e-13."""


# Far out a log-likelihood overflows: such points get no weight.
@np.errstate(all="ignore")
def quadrature_moments(likelihood, mean, variance, n_nodes=33, tolerance=1e-6) -> TiltedMoments:
    """Moments for any factorising likelihood, by adaptive quadrature.

    The rule of `n_nodes` is refined until no moment of any term (log Z; mean and standard deviation
    in units of the latter) changes by more than `tolerance`. It raises FloatingPointError if a term
    does not settle within `MAX_NODES` nodes, as where it is not finite in all of its cavity.

    The trapezoidal rule in u = sum_j asinh((f - c_j) / s_j), where c_j are the modes of the tilted
    density and the bend of the log-likelihood, and s_j the scales there: nodes are dense where the
    density is narrow and reach over the whole cavity, so that a likelihood thousands of times
    narrower than it, or with heavy tails, costs a few nodes more. The rule converges geometrically,
    and the error after a refinement is of the order of the square of the change that it made.

    A term with kinks, as -|y - f| has one, is integrated from one to the next by the double
    exponential rule (Takahasi & Mori, 1974), with the same properties on an interval at whose ends
    the density does not vanish.
    """
    grid = _Grid(likelihood, mean, variance)
    share = np.linspace(0.0, 1.0, n_nodes)
    logs, nodes = grid.weigh(share)
    log_normaliser, average, width = _summed(logs, nodes, grid.span / (n_nodes - 1))
    while True:
        logs_between, nodes_between = grid.weigh(0.5 * (share[1:] + share[:-1]))
        logs = np.concatenate([logs, logs_between])
        nodes = np.concatenate([nodes, nodes_between])
        share = np.linspace(0.0, 1.0, len(nodes))
        before = log_normaliser, average, width
        log_normaliser, average, width = _summed(logs, nodes, grid.span / (len(nodes) - 1))
        change = np.abs(log_normaliser - before[0]) + np.abs(average - before[1]) / width
        change += np.abs(np.log(width / before[2]))
        # NaN compares false: what is not finite is not settled.
        is_settled = change < tolerance
        if np.all(is_settled):
            shrinkage = width**2 / variance
            shift = average + (grid.origin - mean)
            return TiltedMoments(
                log_normaliser, shift / variance, (1.0 - shrinkage) / variance, shrinkage
            )
        if len(nodes) >= MAX_NODES:
            worst = int(np.argmax(np.where(np.isfinite(change), change, np.inf)))
            raise FloatingPointError(
                f"The moments of {np.sum(~is_settled)} of {len(mean)} likelihood terms do not "
                f"settle with {len(nodes)} quadrature nodes: those of element {worst} change by "
                f"{change[worst]:.2g} for a cavity of mean {mean[worst]:.3g} and standard "
                f"deviation {np.sqrt(variance[worst]):.3g}. Is its log-likelihood finite and "
                "smooth there?"
            )


class _Grid:
    """The map between f and u of every term.

    Offsets are from the mode, which keeps the digits of a narrow density far from 0. A centre that
    a term does not need has an infinite scale, and no part in its u.
    """

    def __init__(self, likelihood, mean, variance):
        self.likelihood, self.mean, self.variance = likelihood, mean, variance
        self.origin, scale = _tilted_modes(likelihood, mean, variance)
        self.offsets, self.scales = [np.zeros_like(mean)], [scale]
        if getattr(likelihood, "has_curvature", True):
            # Uphill from the peak of the likelihood alone, which may lie in the cavity's tail.
            peak, _ = _uphill(likelihood, mean, 1e4 * variance, self.origin)
            self._add(*_uphill(likelihood, mean, variance, peak))
        self._bound()
        self._find_bends()
        self.start = self._map(self.lower)[0]
        self.span = self._map(self.upper)[0] - self.start
        if self.kinks:
            self.edges = np.sort([self.lower, *self.kinks, self.upper], axis=0)
            self.has_kinks = np.any(self.edges[1:-1] < self.upper, axis=0)
            self.span = np.where(self.has_kinks, 1.0, self.span)

    def _log_tilted(self, offset):
        return _log_tilted(self.likelihood, self.origin + offset, self.mean, self.variance)

    def _add(self, point, scale):
        """Add a centre to the terms of which no node would come near it."""
        offset = point - self.origin
        is_needed = self._map(offset)[1] * scale < 0.5
        is_needed &= self._log_tilted(offset) > self._log_tilted(self.offsets[0]) - NEGLIGIBLE
        if np.any(is_needed):
            self.offsets.append(np.where(is_needed, offset, 0.0))
            self.scales.append(np.where(is_needed, scale, np.inf))

    def _bound(self):
        """Find where the density has become negligible on either side."""
        reach, middle = REACH * np.sqrt(self.variance), self.mean - self.origin
        floor = np.max([self._log_tilted(offset) for offset in self.offsets], axis=0) - NEGLIGIBLE
        bounds = []
        for extreme, sign in ((np.min, -1.0), (np.max, 1.0)):
            inside = extreme(self.offsets, axis=0)
            outside = extreme([inside, middle], axis=0) + sign * reach
            for _ in range(12):
                half = 0.5 * (inside + outside)
                is_inside = self._log_tilted(half) > floor
                inside, outside = (
                    np.where(is_inside, half, inside),
                    np.where(is_inside, outside, half),
                )
            bounds.append(outside)
        self.lower, self.upper = bounds

    def _find_bends(self):
        """Add a centre where the log-likelihood bends, and find its kinks.

        A sigmoid far narrower than the cavity has no mode there to show it.
        """
        self.kinks, intervals = [], [(self.lower, self.upper)]
        while intervals and len(self.kinks) < MOST_KINKS:
            lower, upper = intervals.pop(0)
            left, right, scale, is_kink = self._bend(lower, upper)
            if len(self.kinks) == 0:
                self._add(self.origin + left, scale)
            if np.any(is_kink):
                self.kinks.append(np.where(is_kink, 0.5 * (left + right), self.upper))
                intervals.append((lower, np.where(is_kink, left, lower)))
                intervals.append((np.where(is_kink, right, upper), upper))

    def _bend(self, lower, upper):
        """Where the slope of the log-likelihood is halfway between its values at two offsets.

        Returns the ends of a short interval around it, the scale of the bend, and whether it is a
        kink: the slope changes within the interval more than its derivatives there explain.
        """
        first, last = [self.likelihood.terms(self.origin + x)[1:3] for x in (lower, upper)]
        halfway, is_falling = 0.5 * (first[0] + last[0]), first[0] > last[0]
        for _ in range(25):
            half = 0.5 * (lower + upper)
            there = self.likelihood.terms(self.origin + half)[1:3]
            is_left = (there[0] > halfway) == is_falling
            lower, upper = np.where(is_left, half, lower), np.where(is_left, upper, half)
            first, last = np.where(is_left, there, first), np.where(is_left, last, there)
        scale = 1.0 / np.sqrt(np.abs(there[1]))
        jump = np.abs(last[0] - first[0])
        explained = 8.0 * (upper - lower) * (np.abs(first[1]) + np.abs(last[1]))
        is_kink = (jump > explained) & (jump * np.sqrt(self.variance) > LEAST_JUMP)
        return lower, upper, np.where(np.isfinite(scale) & (scale > 0), scale, np.inf), is_kink

    def weigh(self, share):
        """Log integrands in u, and offsets of f, at shares (K,) of the span: (K, N), (K, N)."""
        nodes = self._inverse(self.start + share[:, None] * self.span)
        logs = -np.log(self._map(nodes)[1])
        if self.kinks:
            between, log_density = self._between_kinks(share[:, None])
            nodes = np.where(self.has_kinks, between, nodes)
            logs = np.where(self.has_kinks, log_density, logs)
        return logs + self._log_tilted(nodes), nodes

    def _between_kinks(self, share):
        """Return offsets, and the logs of their derivatives, at shares (K, 1) of all intervals."""
        n = len(self.edges) - 1
        which = np.minimum((share * n).astype(int), n - 1)
        lower, upper = (np.take_along_axis(self.edges, which + k, axis=0) for k in (0, 1))
        t = PANEL_END * (2.0 * (share * n - which) - 1.0)
        left, right = expit(np.pi * np.sinh(t)), expit(-np.pi * np.sinh(t))
        width = upper - lower
        nodes = np.where(t < 0, lower + width * left, upper - width * right)
        return nodes, np.log(2.0 * n * PANEL_END * np.pi * width * left * right * np.cosh(t))

    def _map(self, x):
        """Return u and du/df at offsets x (..., N)."""
        u, density = np.zeros_like(x), np.zeros_like(x)
        for offset, scale in zip(self.offsets, self.scales, strict=True):
            ratio = (x - offset) / scale
            u += np.arcsinh(ratio)
            density += 1.0 / (scale * np.sqrt(1.0 + ratio**2))
        return u, density

    def _inverse(self, u):
        if len(self.offsets) == 1:
            return self.scales[0] * np.sinh(u)
        lower, upper = np.broadcast_to(self.lower, u.shape), np.broadcast_to(self.upper, u.shape)
        x, step = 0.5 * (lower + upper), upper - lower
        for _ in range(200):
            excess, density = self._map(x)
            excess -= u
            newton = -excess / density
            is_found = (np.abs(excess) < 1e-13) | (np.abs(newton) <= 1e-15 * np.abs(x))
            if np.all(is_found):
                break
            lower, upper = np.where(excess < 0, x, lower), np.where(excess > 0, x, upper)
            # u bends several times: Newton steps that do not shrink may go round in a circle.
            is_short = np.abs(newton) < 0.5 * np.abs(step)
            is_newton = is_short & (x + newton > lower) & (x + newton < upper)
            step = np.where(is_newton, newton, 0.5 * (lower + upper) - x)
            x = np.where(is_found, x, x + step)
        return x


def _summed(logs, nodes, spacing):
    """Log Z, mean of the offset and standard deviation: three arrays (N,)."""
    largest = logs.max(axis=0)
    weights = np.exp(logs - largest)
    total = weights.sum(axis=0)
    weights /= total
    average = (weights * nodes).sum(axis=0)
    return (
        largest + np.log(total * spacing),
        average,
        np.sqrt((weights * (nodes - average) ** 2).sum(axis=0)),
    )


def _log_tilted(likelihood, f, mean, variance):
    """Log of N(f; m, v) exp(l(f)) at f (..., N), -inf where it is not finite."""
    rows = [likelihood.elementwise(row) for row in f.reshape(-1, f.shape[-1])]
    value = np.reshape(rows, f.shape) - 0.5 * (f - mean) ** 2 / variance
    value = value - 0.5 * np.log(2.0 * np.pi * variance)
    return np.where(np.isfinite(value), value, -np.inf)


def _tilted_modes(likelihood, mean, variance):
    """Find a mode of each tilted density, uphill from the best of a few points, and its scale."""
    starts = mean + np.sqrt(variance) * np.linspace(-3.0, 3.0, 7)[:, None]
    values = _log_tilted(likelihood, starts, mean, variance)
    best = starts[values.argmax(axis=0), np.arange(len(mean))]
    return _uphill(likelihood, mean, variance, best)


def _uphill(likelihood, mean, variance, start, max_iterations=100):
    """Climb to modes of N(f; m, v) exp(l(f)); return them and the scales there: (N,), (N,).

    Newton steps by the absolute curvature go uphill wherever it is negative.
    """
    point, value = start, _log_tilted(likelihood, start, mean, variance)
    is_done = np.zeros(len(mean), dtype=bool)
    for _ in range(max_iterations):
        _, slope, second, _ = likelihood.terms(point)
        precision = np.abs(1.0 / variance - second)
        precision = np.where(np.isfinite(precision), precision, 1.0 / variance)
        precision = np.maximum(precision, 1e-3 / variance)
        step = (slope - (point - mean) / variance) / precision
        step = np.where(np.isfinite(step) & ~is_done, step, 0.0)
        if np.all(np.abs(step) * np.sqrt(precision) < 1e-3):
            break
        is_halved = np.zeros(len(mean), dtype=bool)
        for _ in range(30):
            new = _log_tilted(likelihood, point + step, mean, variance)
            is_worse = new < value
            if not np.any(is_worse):
                break
            is_halved |= is_worse
            step = np.where(is_worse, 0.5 * step, step)
        step = np.where(is_worse, 0.0, step)
        # At a kink steps cross it, and become shorter and shorter.
        is_done |= is_worse | is_halved & (new - value < 1e-3)
        point, value = point + step, np.where(is_worse, value, new)
    return point, 1.0 / np.sqrt(np.maximum(precision, 1.0 / variance))
