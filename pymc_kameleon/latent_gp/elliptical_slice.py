"""Elliptical slice sampling of a tilted Gaussian, centred on its base.

I. Murray, R. P. Adams & D. J. C. MacKay (2010), Elliptical slice sampling, AISTATS. R. Nishihara,
I. Murray & R. P. Adams (2014), Parallel MCMC with generalized elliptical slice sampling, JMLR 15,
for a centre that is not the prior.
"""

import math

import numpy as np

from pymc_kameleon.latent_gp.tilted import TiltedGaussian

__all__ = ["MOST_EVALUATIONS", "elliptical_slice"]

MOST_EVALUATIONS = 200
"""Evaluations after which a move is given up. The bracket shrinks at least by a factor of
about 0.6 on average, so a move that needs as many has met rounding errors."""


def elliptical_slice(
    target: TiltedGaussian,
    x: np.ndarray,
    value: float,
    rng: np.random.Generator,
    most_evaluations: int = MOST_EVALUATIONS,
) -> tuple[np.ndarray, float, int]:
    """Make a transition that leaves base(x) exp(tilt(x)) invariant.

    Parameters
    ----------
    target : TiltedGaussian
    x : array, shape (N,)
    value : float
        ``target.tilt(x)``.
    rng : Generator
    most_evaluations : int
        Evaluations of the tilt after which the chain stays where it is.

    Returns
    -------
    x : array, shape (N,)
    value : float
        ``target.tilt`` at the new x.
    n_evaluations : int
        How often the tilt was evaluated; one is an angle accepted at once.

    Notes
    -----
    Giving up keeps the transition reversible: given the slice, a move and its reverse reject the
    same number of angles with the same density (Murray et al., section 2.3), so the moves of each
    number obey detailed balance by themselves. Those beyond the bound become a stay, its own
    reverse.
    """
    base = target.base
    offset = x - base.mean
    direction = base.cholesky @ rng.standard_normal(base.size)
    # 1 - U, in (0, 1]: a logarithm that is finite.
    threshold = value + math.log1p(-rng.random())
    angle = 2.0 * math.pi * rng.random()
    lower, upper = angle - 2.0 * math.pi, angle
    for n_evaluations in range(1, most_evaluations + 1):
        proposal = base.mean + math.cos(angle) * offset + math.sin(angle) * direction
        proposed = target.tilt(proposal)
        if proposed > threshold:
            return proposal, proposed, n_evaluations
        if angle < 0:
            lower = angle
        else:
            upper = angle
        angle = lower + (upper - lower) * rng.random()
    return x, value, most_evaluations
