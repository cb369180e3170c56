"""The past positions of a chain, in bounded memory."""

from typing import NamedTuple

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit_inner

STORED, STRIDE, SEEN, RECENT = range(4)
"""Positions in a history's `cursor`: what they count is said in `History`."""


class History(NamedTuple):
    """Evenly spaced past positions of a chain, in bounded memory.

    Every `stride`-th position is kept; when the buffer is full, every other one is dropped and the
    stride doubles. So the points are always uniform over the chain so far, and over any later part
    of it.

    Row i of `points` (capacity, d), which are raw, is from transition i * stride. `recent` (m, d)
    has the last positions, without gaps, if m > 0: room for `cursor[RECENT]` of them to be used and
    taken out (`cursor[RECENT] = 0`) before there are m. `cursor` (4,), of int64, has the number of
    points stored, the stride, the number of positions seen, and that of recent ones.
    """

    points: np.ndarray
    recent: np.ndarray
    cursor: np.ndarray

    @property
    def is_consistent(self) -> bool:
        """Whether the counts are those of arrays of this size."""
        count, stride, seen, recent = self.cursor
        room, recent_room = len(self.points), len(self.recent)
        return bool(0 <= count <= room and stride > 0 <= seen and 0 <= recent <= recent_room)

    def begin_with(self, points: np.ndarray) -> None:
        """Let the rows of `points` (n, d), at most as many as there is room for, be the past."""
        self.points[: len(points)] = points
        self.cursor[[STORED, STRIDE, SEEN]] = (len(points), 1, len(points))

    def later_half(self) -> np.ndarray:
        """Positions from the later half of the chain, shape (m, d)."""
        count = self.cursor[0]
        return self.points[count // 2 : count]


def new_history(capacity: int, dim: int, n_recent: int = 0) -> History:
    """Return an empty history of at most `capacity` (an even number of) points."""
    return History(np.zeros((capacity, dim)), np.zeros((n_recent, dim)), np.array([0, 1, 0, 0]))


@jit_inner
def record(history, position):
    """Show the history the chain's next position."""
    points, cursor = history.points, history.cursor
    if cursor[2] % cursor[1] == 0:
        if cursor[0] == points.shape[0]:
            half = points.shape[0] // 2
            for i in range(half):
                for k in range(points.shape[1]):
                    points[i, k] = points[2 * i, k]
            cursor[0] = half
            cursor[1] *= 2
        if cursor[2] % cursor[1] == 0:
            for k in range(points.shape[1]):
                points[cursor[0], k] = position[k]
            cursor[0] += 1
    cursor[2] += 1
    if history.recent.shape[0] > 0:
        for k in range(points.shape[1]):
            history.recent[cursor[RECENT], k] = position[k]
        cursor[RECENT] += 1


def thinned(points: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """At most `size` of the rows of `points`, drawn without replacement."""
    if len(points) <= size:
        return points
    return points[np.sort(rng.choice(len(points), size, replace=False))]
