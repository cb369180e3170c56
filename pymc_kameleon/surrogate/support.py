"""Where a surrogate has a density, as far as evaluations without one show."""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit_inner


class Support(NamedTuple):
    """Where there is a density: where the nearest of some points has one, within a box.

    `points` (n, d) are in coordinates of moves, and `has_density` (n,); with none it is in the
    whole box, of half widths `extent` (d,).
    """

    points: np.ndarray
    has_density: np.ndarray
    extent: np.ndarray


def everywhere(dim: int) -> Support:
    """Return the support of a density that is positive everywhere."""
    return Support(np.zeros((0, dim)), np.zeros(0, dtype=np.bool_), np.full(dim, np.inf))


@jit_inner
def is_inside(support, v):
    """Whether there is a density at `v` (d,), as far as is known."""
    for k in range(v.size):
        if not abs(v[k]) <= support.extent[k]:
            return False
    nearest, found = np.inf, True
    for i in range(support.has_density.size):
        distance = 0.0
        for k in range(v.size):
            distance += (v[k] - support.points[i, k]) ** 2
        if distance < nearest:
            nearest, found = distance, support.has_density[i]
    return found
