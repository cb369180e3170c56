"""Elliptical slice sampling of a tempered target, centred on its base.

I. Murray, R. P. Adams & D. J. C. MacKay (2010), Elliptical slice sampling, AISTATS. R. Nishihara,
I. Murray & R. P. Adams (2014), Parallel MCMC with generalized elliptical slice sampling, JMLR 15,
for a centre that is not the prior.
"""

import math

import numpy as np

from pymc_kameleon.latent_gp.gaussian_sites import Sites
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget
from pymc_kameleon.mcmc.numba_bridge import EVALUATIONS, N_TERMS, evaluate, jit

__all__ = ["MOST_EVALUATIONS", "elliptical_slice", "slices_along"]

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
    """Make transitions that leave base(x) exp(log_ratio(x)) invariant.

    Compiled where the likelihood is a model's that can be called from compiled code.

    Parameters
    ----------
    target : TemperedTarget
    x : array, shape (N,)
    value : float
        ``target.log_ratio(x)``.
    rng : Generator
    most_evaluations : int
        Evaluations of the log importance ratio after which a transition stays where it is.
    n_transitions : int

    Returns
    -------
    x : array, shape (N,)
        The array that was given if no transition moved.
    value : float
        ``target.log_ratio`` at the new x.
    n_evaluations : int
        How often the log importance ratio was evaluated; one a transition is an angle accepted at
        once.

    Notes
    -----
    Giving up keeps the transition reversible: given the slice, a move and its reverse reject the
    same number of angles with the same density (Murray et al., section 2.3), so the moves of each
    number obey detailed balance by themselves. Those beyond the bound become a stay, its own
    reverse.
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

    Parameters
    ----------
    target, x, value
        As for `elliptical_slice`.
    directions : array, shape (n, N)
        Draws of the base about its mean.
    uniforms : array, shape (n, 1 + most evaluations)

    Returns
    -------
    x, value, n_evaluations
        As from `elliptical_slice`.
    angles : array, shape (n,)
        By which each transition moved, towards its direction; 0 if it did not.
    """
    base, likelihood = target.base, target.likelihood
    sites = Sites.flat(base.size) if target.sites is None else target.sites
    moved, counts = np.array(x, dtype=float), np.zeros(2, dtype=np.int64)
    angles = np.zeros(len(directions))
    function = getattr(likelihood, "compiled_value", None)
    n_outputs = getattr(likelihood, "n_outputs", N_TERMS)
    table = None if function is None else function.compiled()
    if table is not None:
        run = run_compiled
    else:
        table, run = (_by_value(likelihood),), run_plain
    value = run(
        table,
        target.scale,
        base.mean,
        sites.precision,
        sites.shift,
        moved,
        value,
        directions,
        uniforms,
        np.empty(base.size),
        np.empty(n_outputs),
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


def run_plain(
    likelihood,
    scale,
    mean,
    precision,
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

    Parameters
    ----------
    likelihood
        As `numba_bridge.evaluate` takes it.
    scale : float
    mean, precision, shift : array, shape (N,)
        Of the base and of the sites that the log importance ratio gives back.
    x : array, shape (N,)
    value : float
    directions : array, shape (n, N)
        Draws of the base about its mean.
    uniforms : array, shape (n, 1 + most evaluations)
    proposal : array, shape (N,)
    outputs : array
        Room for what the likelihood returns.
    counts : int64 array, shape (2,)
    angles : array, shape (n,)
        Of the transitions that moved; the others are left.
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


run_compiled = jit(run_plain)
