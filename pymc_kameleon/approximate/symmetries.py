"""Symmetries of a posterior: exchanges and reflections of parameters that do not change it.

Labels of mixture components, two rates either of which is the faster one, a parameter of which only
the square enters: such a posterior has modes of equal mass, far apart, that a search finds by
chance. Exchanges and reflections that leave the prior as it is cost nothing to find. One evaluation
at the image of the mode says whether one leaves the likelihood too, and another one confirms it.
"""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.coordinates import Standardization

MOST_ALIKE = 4
"""Parameters alike beyond which exchanges are not tried: these are elements of an effect."""

LARGEST_ORBIT = 24
"""Points of an orbit at most: those of the labels of four components. A symmetry that would make
more of them is not made use of."""

ROUNDING = 1e-9
"""Relative difference up to which two log densities are equal."""


class Symmetry(NamedTuple):
    """The map x -> signs x[order] + shift of raveled points; each array is (d,)."""

    order: np.ndarray
    signs: np.ndarray
    shift: np.ndarray

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Return the images (..., d) of `points` (..., d)."""
        return self.signs * points[..., self.order] + self.shift

    def after(self, other: "Symmetry") -> "Symmetry":
        """Return the map that applies `other` first."""
        return Symmetry(
            other.order[self.order],
            self.signs * other.signs[self.order],
            self.signs * other.shift[self.order] + self.shift,
        )


def exchange(dim: int, *pairs: tuple[int, int]) -> Symmetry:
    """Return the map that exchanges pairs of coordinates; without any, the identity."""
    order = np.arange(dim)
    for i, j in pairs:
        order[[i, j]] = j, i
    return Symmetry(order, np.ones(dim), np.zeros(dim))


def reflection(k: int, centre: np.ndarray) -> Symmetry:
    """Return the map that reflects coordinate `k` about its `centre` (d,)."""
    found = exchange(len(centre))
    found.signs[k], found.shift[k] = -1.0, 2.0 * centre[k]
    return found


def symmetries_of_prior(
    is_kept: Callable[[Symmetry], bool], centre: np.ndarray, may_reflect: np.ndarray
) -> list[Symmetry]:
    """Exchanges and reflections about `centre` (d,) that leave the prior as it is: `is_kept`.

    First exchanges of one pair, then reflections of one coordinate that `may_reflect` (d,), and
    exchanges of a pair with reflections of both; then exchanges of all pairs at once, as labels of
    components are, and these with the reflection of another coordinate.
    """
    dim = len(centre)
    reflections = {
        k: map_
        for k, map_ in ((k, reflection(k, centre)) for k in range(dim) if may_reflect[k])
        if is_kept(map_)
    }
    groups: list[list[int]] = []
    for k in range(dim):
        group = next((g for g in groups if is_kept(exchange(dim, (g[0], k)))), None)
        if group is None:
            groups.append([k])
        else:
            group.append(k)
    groups = [group for group in groups if 2 <= len(group) <= MOST_ALIKE]
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    found = [*(exchange(dim, pair) for pair in pairs), *reflections.values()]
    for i, j in pairs:
        if i in reflections and j in reflections:
            found.append(exchange(dim, (i, j)).after(reflections[i]).after(reflections[j]))
    for size in sorted({len(group) for group in groups}):
        same = [group for group in groups if len(group) == size]
        alone = [map_ for k, map_ in reflections.items() if not any(k in g for g in same)]
        for i, j in combinations(range(size), 2):
            labels = exchange(dim, *((group[i], group[j]) for group in same))
            found += [labels] * (len(same) > 1) + [labels.after(map_) for map_ in alone]
    return found


class Orbits:
    """Sets of points that the products of some `symmetries` map to each other.

    The first of each is the one nearest to the mode, in the coordinates `around`, whose origin that
    is. `size` is the number of products; without symmetries it is 1.
    """

    def __init__(self, symmetries: list[Symmetry], around: Standardization | None):
        self.around, self.maps = around, []
        for i in range(len(symmetries)):
            maps = _products(symmetries[: i + 1])
            if len(maps) <= LARGEST_ORBIT:
                self.maps = maps
        self.size = max(1, len(self.maps))

    def fold(self, points: np.ndarray) -> None:
        """Put the first point of its orbit in place of each of the rows of `points` (n, d)."""
        if self.size > 1:
            nearest = self._nearest(points)
            for i in range(1, self.size):
                points[nearest == i] = self.maps[i](points[nearest == i])

    def is_first(self, points: np.ndarray) -> np.ndarray:
        """Whether each of the rows of `points` (n, d) is the first one of its orbit."""
        return self._nearest(points) == 0

    def spread(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a random point of the orbit of each of the rows of `points` (n, d)."""
        found, chosen = points.copy(), rng.integers(self.size, size=len(points))
        for i in range(1, self.size):
            found[chosen == i] = self.maps[i](points[chosen == i])
        return found

    def _nearest(self, points):
        distances = [np.sum(self.around.whiten(map_(points)) ** 2, axis=0) for map_ in self.maps]
        return np.argmin(distances, axis=0)


def _products(symmetries):
    """Return the identity and all products of the maps, one more than `LARGEST_ORBIT` at most."""
    found = [exchange(len(symmetries[0].order))]
    for known in found:
        for symmetry in symmetries:
            new = symmetry.after(known)
            if len(found) <= LARGEST_ORBIT and not any(_are_equal(new, m) for m in found):
                found.append(new)
    return found


def _are_equal(one, other):
    return all(np.allclose(a, b) for a, b in zip(one, other, strict=True))
