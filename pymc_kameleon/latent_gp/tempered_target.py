"""A Gaussian times a tempered likelihood, sampled by elliptical slices or whitened trajectories.

I. Murray, R. P. Adams & D. J. C. MacKay (2010), Elliptical slice sampling, AISTATS. R. Nishihara,
I. Murray & R. P. Adams (2014), Parallel MCMC with generalized elliptical slice sampling, JMLR 15,
for a centre that is not the prior. R. M. Neal (2010), MCMC using Hamiltonian dynamics.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.linalg import solve_triangular

from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites, with_sites
from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.chain import EVALUATIONS, N_TERMS, evaluate


class FactorisingLikelihood(Protocol):
    """Log likelihood sum_n l_n(f_n) of the values (N,) of a latent function.

    `probit_labels` (N,) are -1 and +1 if every l_n is log Phi(y_n f_n), else None.
    """

    size: int
    probit_labels: np.ndarray | None

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n; -inf or NaN where it is not finite."""

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n (N,) of each element."""

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and the first three derivatives: an array (4, N)."""


@dataclass(frozen=True)
class TemperedTarget:
    """Density proportional to base(x) exp(scale sum_n (l_n(x_n) - log site_n(x_n))).

    `scale` is the inverse temperature; `sites` what the base has taken from the likelihood already.
    """

    base: Gaussian
    likelihood: FactorisingLikelihood
    scale: float = 1.0
    sites: Sites | None = None

    def log_ratio(self, x: np.ndarray) -> float:
        """Log of target over base at `x` (N,), without a constant; -inf where not finite."""
        total = self.likelihood.value(x)
        if self.sites is not None:
            total -= self.sites.elementwise(x).sum()
        total = float(self.scale * total) if self.scale > 0 else 0.0
        return total if np.isfinite(total) else -np.inf

    def log_ratio_terms(self, x: np.ndarray) -> np.ndarray:
        """Elementwise values and first three derivatives of the log ratio: an array (4, N)."""
        terms = np.array(self.likelihood.terms(x), dtype=float)
        if self.sites is not None:
            terms[0] -= self.sites.elementwise(x)
            terms[1] -= self.sites.shift - self.sites.precision * x
            terms[2] += self.sites.precision
        return self.scale * terms


def annealed_from_prior_form(
    prior: Gaussian, likelihood, sites: Sites, beta: float
) -> TemperedTarget:
    """Write a temperature from prior x sites to the posterior as a Gaussian times likelihood^beta.

    A log-concave likelihood then has a non-negative curvature, which the Riemannian metric needs.
    """
    gaussian, _ = with_sites(prior, sites.scaled(1.0 - beta))
    return TemperedTarget(gaussian, likelihood, beta)


MOST_EVALUATIONS = 100
"""Evaluations after which a move is given up. The bracket shrinks by a factor of about 0.6 each
time, so a move that needs as many has met rounding errors."""


def elliptical_slice(
    target: TemperedTarget,
    x: np.ndarray,
    value: float,
    rng: np.random.Generator,
    most_evaluations: int = MOST_EVALUATIONS,
    n_transitions: int = 1,
) -> tuple[np.ndarray, float, int]:
    """Make transitions from `x` (N,) that leave base(x) exp(log_ratio(x)) invariant.

    `value` is ``target.log_ratio(x)``. The new x is returned, the array that was given if no
    transition moved, with the log ratio there and how often it was evaluated.

    A transition stays where it is after `most_evaluations`, and that keeps it reversible: given the
    slice, a move and its reverse reject the same number of angles with the same density (Murray et
    al., section 2.3), so the moves of each number obey detailed balance by themselves. Those beyond
    the bound become a stay, its own reverse.
    """
    directions = target.base.directions(rng, n_transitions)
    uniforms = rng.random((n_transitions, 1 + most_evaluations))
    return slices_along(target, x, value, directions, uniforms)[:3]


def slices_along(
    target: TemperedTarget,
    x: np.ndarray,
    value: float,
    directions: np.ndarray,
    uniforms: np.ndarray,
) -> tuple[np.ndarray, float, int, np.ndarray]:
    """Make the transitions of `elliptical_slice` with given random numbers.

    `directions` (n, N) are draws of the base about its mean, `uniforms` have shape (n, 1 + most
    evaluations). The angles (n,) by which each transition moved towards its direction are the last
    result; 0 if it did not.
    """
    base, likelihood = target.base, target.likelihood
    sites = Sites.flat(base.size) if target.sites is None else target.sites
    moved, counts = np.array(x, dtype=float), np.zeros(2, dtype=np.int64)
    angles = np.zeros(len(directions))
    function = getattr(likelihood, "compiled_value", None)
    table = None if function is None else function.compiled()
    run = run_slices
    if table is None:
        table = (_by_value(likelihood),)
        run = getattr(run_slices, "py_func", run_slices)  # itself under NUMBA_DISABLE_JIT
    value = run(
        table,
        target.scale,
        base.mean,
        *sites.coupled(),
        sites.shift,
        moved,
        value,
        directions,
        uniforms,
        np.empty(base.size),
        np.empty(getattr(likelihood, "n_outputs", N_TERMS)),
        counts,
        angles,
    )
    x = moved if angles.any() else x
    return x, value, int(counts[EVALUATIONS]), angles


def _by_value(likelihood):
    """Return a likelihood as `evaluate` takes it in plain Python."""

    def into(x, out):
        out[:] = 0.0
        out[0] = likelihood.value(x)

    return into


@jit
def run_slices(
    likelihood,
    scale,
    mean,
    precision,
    partners,
    cross,
    shift,
    x,
    value,
    directions,
    uniforms,
    proposal,
    outputs,
    counts,
    angles,
):
    """Make a transition for each row of `directions`, in place; return the last log ratio.

    The matrix of the sites has `precision` (N,) on its diagonal, and `cross` (k,) where two values
    are `partners` (k, 2).
    """
    size = x.size
    for t in range(directions.shape[0]):
        # 1 - U, in (0, 1]: a logarithm that is finite.
        threshold = value + math.log1p(-uniforms[t, 0])
        angle = 2.0 * math.pi * uniforms[t, 1]
        lower, upper = angle - 2.0 * math.pi, angle
        for k in range(2, uniforms.shape[1] + 1):
            cosine, sine = math.cos(angle), math.sin(angle)
            given_back = 0.0
            for i in range(size):
                moved = mean[i] + cosine * (x[i] - mean[i]) + sine * directions[t, i]
                proposal[i] = moved
                given_back += moved * (shift[i] - 0.5 * precision[i] * moved)
            for i in range(partners.shape[0]):
                given_back -= cross[i] * proposal[partners[i, 0]] * proposal[partners[i, 1]]
            proposed = evaluate(likelihood, proposal, outputs, counts)
            proposed = scale * (proposed - given_back) if scale > 0.0 else 0.0
            if proposed > threshold:
                value, angles[t] = proposed, angle
                for i in range(size):
                    x[i] = proposal[i]
                break
            if k == uniforms.shape[1]:
                break
            if angle < 0.0:
                lower = angle
            else:
                upper = angle
            angle = lower + (upper - lower) * uniforms[t, k]
    return value


def hamiltonian(
    target: TemperedTarget, x: np.ndarray, rng: np.random.Generator, step_size: float, n_steps: int
) -> tuple[np.ndarray, float, int]:
    """Make a transition from `x` (N,) that leaves base(x) exp(log_ratio(x)) invariant.

    It moves v in x = mean + L v, with L the Cholesky factor of the base, by the energy U + |p|^2 /
    2, p ~ N(0, I), U = |v|^2 / 2 - log_ratio(mean + L v). The number of leapfrog steps is uniform
    from 1 to `n_steps`, against orbits that return to where they began. The new x is returned, with
    the acceptance probability, 0 where the trajectory left the support, and the number of
    evaluations.
    """
    base = target.base
    position = solve_triangular(base.cholesky, x - base.mean, lower=True, check_finite=False)
    momentum = rng.standard_normal(len(x))
    length = int(rng.integers(1, n_steps + 1))
    uniform = rng.random()
    energy, gradient = _potential(target, position)
    start = energy + 0.5 * momentum @ momentum
    for taken in range(1, length + 1):
        momentum = momentum - 0.5 * step_size * gradient
        position = position + step_size * momentum
        energy, gradient = _potential(target, position)
        if not np.isfinite(energy) or not np.all(np.isfinite(gradient)):
            return x, 0.0, taken + 1
        momentum = momentum - 0.5 * step_size * gradient
    change = start - energy - 0.5 * momentum @ momentum
    acceptance = math.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if uniform >= acceptance:
        return x, acceptance, length + 1
    return base.mean + base.cholesky @ position, acceptance, length + 1


def _potential(target, v):
    """Potential energy and its gradient (N,) at v (N,)."""
    base = target.base
    terms = target.log_ratio_terms(base.mean + base.cholesky @ v)
    return 0.5 * float(v @ v) - float(terms[0].sum()), v - base.cholesky.T @ terms[1]
