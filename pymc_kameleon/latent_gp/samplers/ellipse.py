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
    """Make transitions from `x` (N,) that leave base(x) exp(log_ratio(x)) invariant.

    `value` is ``target.log_ratio(x)``. The new x is returned, which is the array that was given if
    no transition moved, with the log ratio there and how often it was evaluated: once a transition
    where an angle is accepted at once.

    A transition stays where it is after `most_evaluations` of the log importance ratio, and that
    keeps it reversible: given the slice, a move and its reverse reject the same number of angles
    with the same density (Murray et al., section 2.3), so the moves of each number obey detailed
    balance by themselves. Those beyond the bound become a stay, its own reverse.
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

    `directions` (n, N) are draws of the base about its mean, `uniforms` have shape
    (n, 1 + most evaluations). The angles (n,) by which each transition moved towards its direction
    are the last result; 0 if it did not.
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
        sites.precision,
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

    `likelihood` is what `numba_bridge.evaluate` takes; `mean`, `precision` and `shift` (N,) are
    those of the base, and of the sites that the log importance ratio gives back; `proposal` (N,)
    and `outputs` are room for a point and for what the likelihood returns. `angles` (n,) of
    transitions that do not move are left.
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
