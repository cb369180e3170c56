"""Every evaluation of a likelihood in an SQLite file, which several processes read and write."""

import functools
import json
import logging
import os
import sqlite3
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pymc as pm
import xarray as xr

from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.store.fingerprint import describe

__all__ = ["EvaluationStore", "StoredEvaluation"]

_log = logging.getLogger("pymc.kameleon")

TABLES = """
CREATE TABLE IF NOT EXISTS models (
    id INTEGER PRIMARY KEY, description TEXT NOT NULL UNIQUE, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluations (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL REFERENCES models, chain TEXT NOT NULL,
    point BLOB NOT NULL, value REAL, failure TEXT, seconds REAL NOT NULL, finished REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_point ON evaluations (model, point);
"""

PATIENCE = 60.0
"""Seconds to wait for another process that writes."""

_inherited = []
"""Connections of the parent process: to close one would break those of the parent."""


class StoredEvaluation(NamedTuple):
    """One evaluation of a likelihood.

    Attributes
    ----------
    number : int
        Increases in the order of storing, over all chains.
    point : array, shape (d,)
        Raveled and unconstrained.
    value : float
        Log-likelihood; NaN where it was, and where the evaluation failed.
    failure : str or None
        Name and message of the exception, if one was raised.
    """

    number: int
    point: np.ndarray
    value: float
    failure: str | None


class EvaluationStore:
    """Keep evaluations of a likelihood in a file, for other chains, later runs and other priors.

    Each evaluation is written at once, so a run that is killed loses none that were finished. Only
    log-likelihoods are stored, with their unconstrained points.

    Parameters
    ----------
    path : str or path, optional
        An SQLite file; it is made if there is none. On a network drive SQLite's locks may not hold.
        By default a temporary file, which is deleted with this object: chains of one
        `pymc.sample` share their evaluations, and nothing is left.
    new_model : bool
        Allow a model whose likelihood, variables or data differ from those in the file already.

    Raises
    ------
    ValueError
        If the file is none of this kind, or cannot be written.

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=SurrogateHMCStep(store=EvaluationStore("run.sqlite")))
    """

    def __init__(self, path: str | os.PathLike | None = None, *, new_model: bool = False):
        if path is None:
            handle, path = tempfile.mkstemp(suffix=".sqlite", prefix="evaluations-")
            os.close(handle)
            weakref.finalize(self, _delete, Path(path), os.getpid())
        self.path, self.new_model = Path(path).absolute(), bool(new_model)
        self._reset()
        self._execute("PRAGMA user_version")  # opens it, which raises an error if it is no store

    def __repr__(self):
        return f"EvaluationStore({str(self.path)!r})"

    def __getstate__(self):
        return {"path": self.path, "new_model": self.new_model}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._reset()

    def _reset(self):
        self._connection = self._process = None
        self._has_failed = False

    # writing and reading --------------------------------------------------------------------------

    def model_number(self, description: Mapping[str, str]) -> int:
        """Return the number of a model in this file, which it is given if it has none.

        Parameters
        ----------
        description : mapping
            What has to agree, by name.

        Raises
        ------
        ValueError
            If the file has other models only, naming what differs, unless `new_model`.
        """
        text = json.dumps(dict(description), sort_keys=True)
        known = {
            found: number for number, found in self._execute("SELECT id, description FROM models")
        }
        if text in known:
            return known[text]
        if known and not self.new_model:
            differences = [
                [name for name in description if json.loads(other).get(name) != description[name]]
                for other in known
            ]
            raise ValueError(
                f"{self.path} has evaluations of another model: "
                f"{', '.join(min(differences, key=len))} differ. Take another file, or "
                "EvaluationStore(path, new_model=True) to keep both in this one."
            )
        self._execute(
            "INSERT OR IGNORE INTO models (description, created) VALUES (?, ?)", text, time.time()
        )
        ((number,),) = self._execute("SELECT id FROM models WHERE description = ?", text)
        return number

    def add(
        self,
        model: int,
        chain: str,
        point: np.ndarray,
        value: float,
        seconds: float,
        failure: str | None = None,
    ) -> None:
        """Store one evaluation; where it cannot be written, log a warning and go on.

        Parameters
        ----------
        model : int
        chain : str
            Who evaluated.
        point : array, shape (d,)
        value : float
            Log-likelihood, -inf and NaN included.
        seconds : float
            How long it took.
        failure : str, optional
            Name and message of an exception.
        """
        row = (model, chain, np.asarray(point, dtype=np.float64).tobytes(), float(value))
        try:
            self._execute(
                "INSERT INTO evaluations (model, chain, point, value, failure, seconds, finished) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                *row,
                failure,
                seconds,
                time.time(),
            )
        except ValueError as error:
            if not self._has_failed:
                _log.warning("%s Sampling goes on, and evaluations are lost.", error)
            self._has_failed = True

    def find(self, model: int, point: np.ndarray) -> float | None:
        """Return the log-likelihood at exactly this point (d,), or None if it is not known."""
        found = self._execute(
            "SELECT value FROM evaluations WHERE model = ? AND point = ? AND failure IS NULL",
            model,
            np.asarray(point, dtype=np.float64).tobytes(),
        )
        return _number(found[0][0]) if found else None

    def read(self, model: int, after: int = 0, not_by: str = "") -> list[StoredEvaluation]:
        """Return the evaluations of a model with numbers above `after`, in the order of storing.

        Parameters
        ----------
        model : int
        after : int
        not_by : str
            A chain whose evaluations are left out.
        """
        rows = self._execute(
            "SELECT id, point, value, failure FROM evaluations "
            "WHERE model = ? AND id > ? AND chain != ? ORDER BY id",
            model,
            after,
            not_by,
        )
        return [
            StoredEvaluation(number, np.frombuffer(point), _number(value), failure)
            for number, point, value, failure in rows
        ]

    def summary(self) -> dict[str, float]:
        """Count what is stored.

        Returns
        -------
        dict
            Numbers of `models`, `chains` and `evaluations`; of these `nonfinite` and `failed`; and
            the `seconds` that all took.
        """
        ((models,),) = self._execute("SELECT COUNT(*) FROM models")
        (row,) = self._execute(
            "SELECT COUNT(DISTINCT chain), COUNT(*), "
            "SUM(failure IS NULL AND (value IS NULL OR ABS(value) = 9e999)), "
            "SUM(failure IS NOT NULL), SUM(seconds) FROM evaluations"
        )
        names = ("chains", "evaluations", "nonfinite", "failed", "seconds")
        return {"models": models} | {k: v or 0 for k, v in zip(names, row, strict=True)}

    def wrap(self, function: Callable[..., float]) -> Callable[..., float]:
        """Return a function that looks for its value in the store before it calls `function`.

        For black boxes of models that any step samples, those of PyMC too.

        Parameters
        ----------
        function : callable
            Takes numbers or arrays of fixed shapes; returns one number. It is known by its name.
        """
        model = self.model_number({"function": f"{function.__module__}.{function.__qualname__}"})
        chains = {}

        @functools.wraps(function)
        def stored(*arguments):
            point = np.concatenate([np.ravel(argument) for argument in arguments])
            known = self.find(model, point)
            if known is not None:
                return known
            chain = chains.setdefault(os.getpid(), uuid.uuid4().hex)
            return self.timed(model, chain, point, lambda: float(function(*arguments)))

        return stored

    def timed(
        self, model: int, chain: str, point: np.ndarray, evaluate: Callable[[], float]
    ) -> float:
        """Call `evaluate`, which returns a log-likelihood, and store what came of it.

        Parameters
        ----------
        model : int
        chain : str
        point : array, shape (d,)
        evaluate : callable
            An exception is stored, and raised again.

        Returns
        -------
        float
            The log-likelihood.
        """
        begin = time.perf_counter()
        try:
            value = evaluate()
        except Exception as error:
            failure, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - begin
            self.add(model, chain, point, np.nan, seconds, failure)
            raise
        self.add(model, chain, point, value, time.perf_counter() - begin)
        return value

    def to_dataset(self, model: pm.Model, vars=None) -> xr.Dataset:
        """Return the evaluations of a model, with its variables in their natural coordinates.

        Parameters
        ----------
        model : pymc.Model
        vars : list of variables, optional
            Those of the step that was sampled with; default all.

        Returns
        -------
        xarray.Dataset
            Over the dimension "evaluation": each variable, `log_likelihood`, `seconds`, `chain`,
            `failed`.
        """
        target = LogDensity(model, vars)
        number = self.model_number(describe(target))
        rows = self._execute(
            "SELECT point, value, seconds, chain, failure IS NOT NULL FROM evaluations "
            "WHERE model = ? ORDER BY id",
            number,
        )
        columns = list(zip(*rows, strict=True)) or [()] * 5
        points = np.array([np.frombuffer(point) for point in columns[0]]).reshape(-1, target.dim)
        found = {
            "log_likelihood": ("evaluation", np.array([_number(value) for value in columns[1]])),
            "seconds": ("evaluation", np.array(columns[2])),
            "chain": ("evaluation", np.array(columns[3], dtype=str)),
            "failed": ("evaluation", np.array(columns[4], dtype=bool)),
        }
        return xr.Dataset(found | target.natural(points))

    # the file -------------------------------------------------------------------------------------

    def _execute(self, command, *values):
        """Rows that an SQL command returns; every command is a transaction of its own."""
        try:
            if self._process != os.getpid():
                self._connect()
            return self._connection.execute(command, values).fetchall()
        except sqlite3.Error as error:
            raise ValueError(
                f"{self.path} cannot be used as a store of evaluations: {error}."
            ) from error

    def _connect(self):
        if self._connection is not None:
            _inherited.append(self._connection)
        connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(TABLES)
        self._connection, self._process = connection, os.getpid()


def _number(value: float | None) -> float:
    """SQLite has no NaN."""
    return np.nan if value is None else value


def _delete(path: Path, process: int) -> None:
    if os.getpid() == process:
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.unlink(missing_ok=True)
