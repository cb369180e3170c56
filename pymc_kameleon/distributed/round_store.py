"""The store of a chain on a worker: what is known before a round, and what the round finds."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_kameleon.store.evaluation_store import TABLES, EvaluationStore, as_bytes

__all__ = ["Found", "Known", "RoundStore"]


class Known(NamedTuple):
    """Evaluations that every chain of a round begins with.

    Attributes
    ----------
    points : array, shape (n, d)
    values : array, shape (n,)
    gradients : list of (bytes or None)
        As in `Found`.
    """

    points: np.ndarray
    values: np.ndarray
    gradients: list[bytes | None]


class Found(NamedTuple):
    """An evaluation of a round.

    Attributes
    ----------
    point : bytes
        Of d float64.
    value : float
    seconds : float
    failure : str or None
        Name and message of the exception, if one was raised.
    gradient : bytes or None
        Of d float64, if it was evaluated.
    """

    point: bytes
    value: float
    seconds: float
    failure: str | None
    gradient: bytes | None


class RoundStore(EvaluationStore):
    """A store in memory, for one chain at a time.

    Attributes
    ----------
    found : list of Found
        Evaluations since the round began, in their order.
    tell : callable or None
        Called with each of them.
    """

    def __init__(self):
        self.path, self.new_model = ":memory:", True
        self.found: list[Found] = []
        self.tell: Callable[[Found], None] | None = None
        self._reset()
        self._connect()

    def begin(self, model: int, known: Known | None, tell: Callable[[Found], None]) -> None:
        """Forget everything, and know these evaluations of a model.

        Parameters
        ----------
        model : int
        known : Known or None
        tell : callable
        """
        self.found, self.tell = [], tell
        self._execute("DELETE FROM evaluations")
        if known is not None:
            rows = [
                (model, point.tobytes(), float(value), gradient)
                for point, value, gradient in zip(*known, strict=True)
            ]
            self._execute("BEGIN")
            self._connection.executemany(
                "INSERT INTO evaluations (model, chain, point, value, gradient, seconds, finished) "
                "VALUES (?, '', ?, ?, ?, 0, 0)",
                rows,
            )
            self._execute("COMMIT")

    def add(self, model, chain, point, value, seconds, failure=None, gradient=None):  # noqa: D102
        super().add(model, chain, point, value, seconds, failure, gradient)
        gradient = None if gradient is None else as_bytes(gradient)
        self.found.append(Found(as_bytes(point), float(value), float(seconds), failure, gradient))
        if self.tell is not None:
            self.tell(self.found[-1])

    def _execute(self, command, *values):
        return self._connection.execute(command, values).fetchall()

    def _connect(self):
        # A worker runs the rounds of one chain after the other, in threads of its choice.
        self._connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._connection.executescript(TABLES)
