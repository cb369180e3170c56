"""Every evaluation of a likelihood in an SQLite file, which several processes read and write."""

import functools
import hashlib
import json
import logging
import os
import re
import sqlite3
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from pytensor.compile.ops import FromFunctionOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import ancestors, toposort

from pymc_kameleon.mcmc.bridge.pytensor import parts_of
from pymc_kameleon.model.black_box import BlackBox, Calls, GroupSimulator
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.model.operations import CheckedOperation

__all__ = ["EvaluationStore"]

_log = logging.getLogger("pymc.kameleon")

TABLES = """
CREATE TABLE IF NOT EXISTS models (
    id INTEGER PRIMARY KEY, description TEXT NOT NULL UNIQUE, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluations (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL REFERENCES models, chain TEXT NOT NULL,
    point BLOB NOT NULL, value REAL, failure TEXT, seconds REAL NOT NULL, finished REAL NOT NULL,
    gradient BLOB
);
CREATE INDEX IF NOT EXISTS by_point ON evaluations (model, point);
CREATE TABLE IF NOT EXISTS checks (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL REFERENCES models, found TEXT NOT NULL
);
"""

AT_POINT = (
    "FROM evaluations WHERE model = ? AND point = ? AND (failure IS NULL OR value IS NOT NULL)"
)

PATIENCE = 60.0
"""Seconds to wait for another process that writes."""

_inherited: list[sqlite3.Connection] = []
"""Connections of the parent process: to close one would break those of the parent."""


class StoredEvaluation(NamedTuple):
    """One evaluation of a likelihood.

    `number` increases in the order of storing, over all chains. `point` (d,) is raveled and
    unconstrained, `value` the log-likelihood there, NaN where it was and where the evaluation ended
    with an error, -inf where it ended with one of the `failures` of a `black_box`. `failure` has
    name and message of the exception, and `gradient` (d,) is that of the log-likelihood; each is
    None if there was none.
    """

    number: int
    point: np.ndarray
    value: float
    failure: str | None
    gradient: np.ndarray | None


def is_known(evaluation) -> bool:
    """Whether a `StoredEvaluation`, or another one with its fields, has a value."""
    return evaluation.failure is None or evaluation.value == -np.inf


class EvaluationStore:
    """Keep evaluations of a likelihood in a file, for other chains, later runs and other priors.

    Each evaluation is written at once, so a run that is killed loses none that were finished. Only
    log-likelihoods, and their gradients where a step takes them, are stored with their
    unconstrained points.

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

    >>> with model:
    ...     surrogate = GPSurrogate(store=EvaluationStore("run.sqlite"))
    ...     idata = pm.sample(step=AdaptiveMetropolisStep(surrogate=surrogate))
    """

    def __init__(self, path: str | os.PathLike | None = None, *, new_model: bool = False) -> None:
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
        known = dict(self._execute("SELECT description, id FROM models"))
        if text in known:
            return known[text]
        if known and not self.new_model:
            differences = [
                [name for name in description if other.get(name) != description[name]]
                for other in map(json.loads, known)
            ]
            fewest = min(differences, key=len)
            raise ValueError(
                f"{self.path} has evaluations of another model: "
                f"{', '.join(fewest)} differ. Take another file, or "
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
        gradient: np.ndarray | None = None,
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
        gradient : array, shape (d,), optional
            Of the log-likelihood.
        """
        command = (
            "INSERT INTO evaluations "
            "(model, chain, point, value, failure, seconds, finished, gradient) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        )
        known = None if gradient is None else as_bytes(gradient)
        row = (model, chain, as_bytes(point), float(value), failure, seconds, time.time(), known)
        self._write(command, *row)

    def _write(self, command, *row):
        try:
            self._execute(command, *row)
        except ValueError as error:
            if not self._has_failed:
                _log.warning("%s Sampling goes on, and evaluations are lost.", error)
            self._has_failed = True

    def count(self, model: int) -> int:
        """Count the evaluations of a model, failures too."""
        ((n,),) = self._execute("SELECT COUNT(*) FROM evaluations WHERE model = ?", model)
        return n

    def add_check(self, model: int, found: Mapping[str, Any]) -> None:
        """Store what a check of a surrogate of this model has found: numbers, by name."""
        self._write("INSERT INTO checks (model, found) VALUES (?, ?)", model, json.dumps(found))

    def last_check(self, model: int) -> dict[str, Any] | None:
        """Return what the last check of a surrogate of this model has found, None if none was."""
        command = "SELECT found FROM checks WHERE model = ? ORDER BY id DESC LIMIT 1"
        rows = self._execute(command, model)
        return json.loads(rows[0][0]) if rows else None

    def find(self, model: int, point: np.ndarray) -> float | None:
        """Return the log-likelihood at exactly this point (d,), or None if it is not known."""
        found = self._execute(f"SELECT value {AT_POINT}", model, as_bytes(point))
        return _number(found[0][0]) if found else None

    def find_with_gradient(self, model: int, point: np.ndarray) -> tuple[float, np.ndarray] | None:
        """Return log-likelihood and gradient (d,) at exactly this point, or None if not known."""
        command = f"SELECT value, gradient {AT_POINT} AND gradient IS NOT NULL"
        found = self._execute(command, model, as_bytes(point))
        return (_number(found[0][0]), _array(found[0][1])) if found else None

    def read(
        self, model: int, after: int = 0, not_by: str = "", most: int | None = None
    ) -> list[StoredEvaluation]:
        """Return the evaluations of a model with numbers above `after`, in the order of storing.

        Parameters
        ----------
        model : int
        after : int
        not_by : str
            A chain whose evaluations are left out.
        most : int, optional
            Return the last ones only where there are more; by default all.
        """
        # By the number of the row: the index of points would be read whole, and +model hides it.
        rows = self._execute(
            "SELECT id, point, value, failure, gradient FROM evaluations "
            "WHERE +model = ? AND id > ? AND chain != ? ORDER BY id DESC LIMIT ?",
            model,
            after,
            not_by,
            -1 if most is None else most,
        )
        return [
            StoredEvaluation(
                number, np.frombuffer(point), _number(value), failure, _array(gradient)
            )
            for number, point, value, failure, gradient in reversed(rows)
        ]

    def summary(self) -> dict[str, float]:
        """Count what is stored.

        Returns
        -------
        dict
            Numbers of `models`, `chains` and `evaluations`, of these `nonfinite` and `failed`, and
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

    def wrap(self, function: Callable[..., float] | Op, name: str | None = None) -> Any:
        """Return a function or operation that looks for its value before `function` is called.

        For black boxes of models that any step samples, those of PyMC too. Values are shared at
        once between chains, forked or spawned, and with later runs.

        Parameters
        ----------
        function : callable or pytensor Op
            A callable takes numbers or arrays of fixed shapes, and returns one number. An operation
            has one output, a scalar; what `wrap_py` returns is one. Of a `black_box` another one is
            returned, as ``black_box(store=...)`` makes it.
        name : str, optional
            What it is known by in the file. By default its module and its own name, of an operation
            those of its class, or of the function in it. Not what it does: give another name, or
            take another file, where the code or what it reads has changed.

        Returns
        -------
        callable or pytensor Op
            As was given. A gradient of an operation is that of the operation, and is not stored.

        Raises
        ------
        TypeError
            If it is neither.
        ValueError
            If the file has evaluations of other functions or models only; and, when an operation is
            applied, if it has not one scalar output.
        """
        if not callable(function):
            raise TypeError(
                f"function={function!r}: pass a callable that returns one number, or a PyTensor Op."
            )
        if isinstance(function, BlackBox):
            return function.with_store(self, name)
        values = _Values(self, _function_name(function) if name is None else name)
        if isinstance(function, GroupSimulator):
            function.stored = values
            return function
        kind = _StoredOp if isinstance(function, Op) else _StoredFunction
        return kind(function, values)

    def timed(
        self,
        model: int,
        chain: str,
        point: np.ndarray,
        evaluate: Callable[[], float],
        gradient: np.ndarray | None = None,
    ) -> float:
        """Call `evaluate`, which returns a log-likelihood, and store what came of it.

        Parameters
        ----------
        model : int
        chain : str
        point : array, shape (d,)
        evaluate : callable
            An exception is stored, and raised again. Where a `black_box` failed, and the value is
            not finite, -inf is stored with the reason.
        gradient : array, shape (d,), optional
            Where `evaluate` writes the gradient.

        Returns
        -------
        float
            The log-likelihood.
        """
        begin, calls = time.perf_counter(), Calls()

        def seconds():
            return time.perf_counter() - begin + calls.seconds_ahead

        try:
            with calls.counting():
                value = evaluate()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self.add(model, chain, point, np.nan, seconds(), told)
            raise
        failure = None if np.isfinite(value) else calls.last
        value = value if failure is None else -np.inf
        self.add(model, chain, point, value, seconds(), failure, gradient)
        return value

    def to_dataset(self, model: pm.Model, vars: Sequence[Variable] | None = None) -> xr.Dataset:
        """Return the evaluations of a model, with its variables in their natural coordinates.

        Parameters
        ----------
        model : pymc.Model
        vars : list of variables, optional
            Those of the step that was sampled with; default all.

        Returns
        -------
        xarray.Dataset
            Over the dimension "evaluation": each variable, with the model's coordinates,
            `log_likelihood`, `seconds`, `chain`, `failed`.
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
        data = xr.Dataset(found | target.natural(points))
        labels = {dim: list(known) for dim, known in model.coords.items() if known is not None}
        return data.assign_coords({dim: labels[dim] for dim in labels if dim in data.dims})

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
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(TABLES)
        _add_gradients(connection)
        if not os.access(self.path, os.W_OK):
            raise sqlite3.OperationalError("it is read-only")
        self._connection, self._process = connection, os.getpid()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Let readers and writers not wait for each other; SQLite itself does not wait to change it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _add_gradients(connection: sqlite3.Connection) -> None:
    """Add the column of gradients to a file that is older than they are."""
    columns = connection.execute("SELECT name FROM pragma_table_info('evaluations')").fetchall()
    if ("gradient",) in columns:
        return
    try:
        connection.execute("ALTER TABLE evaluations ADD COLUMN gradient BLOB")
    except sqlite3.OperationalError as error:
        if "duplicate column" not in str(error):  # another process was faster
            raise


def as_bytes(numbers: np.ndarray) -> bytes:
    """Return numbers (d,) as the file has them, d float64."""
    return np.asarray(numbers, dtype=np.float64).tobytes()


def _array(numbers: bytes | None):
    return None if numbers is None else np.frombuffer(numbers)


def _number(value: float | None) -> float:
    """SQLite has no NaN."""
    return np.nan if value is None else value


def _delete(path: Path, process: int) -> None:
    if os.getpid() == process:
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.unlink(missing_ok=True)


# which model --------------------------------------------------------------------------------------


def describe(target) -> dict[str, str]:
    """Describe what evaluations of two models have to share to be those of one likelihood.

    These are the variables with shapes and transforms, and digests of the data and of the graph of
    the likelihood. A black box is known by its name, not by what it does.
    """
    model, graphs = target.model, target.likelihood_graphs()
    transforms = [model.rvs_to_transforms[model.values_to_rvs[value]] for value in target.vars]
    variables = [
        f"{value.name}{list(shape)} by "
        f"{'no transform' if transform is None else type(transform).__name__}"
        for value, shape, transform in zip(target.vars, target.shapes, transforms, strict=True)
    ]
    leaves = [v for v in ancestors(graphs) if v.owner is None]
    data = [_digest(v) for v in leaves if isinstance(v, Constant | SharedVariable)]
    return {
        "variables": "; ".join(variables),
        "data or constants": _digest_of("\n".join(data)),
        "likelihood": _digest_of("\n".join(_lines(graphs))),
    }


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(leaf) -> str:
    value = np.asarray(leaf.data if isinstance(leaf, Constant) else leaf.get_value(borrow=True))
    if value.dtype == object:
        return _without_addresses(str(value))
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return f"{value.dtype}{value.shape}{digest}"


def _lines(graphs: Sequence) -> list[str]:
    """One line for each operation of the graphs: its name, and where its inputs come from."""
    numbers: dict = {}
    lines = []

    def number(variable):
        if variable not in numbers:
            is_input = variable.owner is None and not isinstance(variable, Constant)
            name = variable.name if is_input else ""
            numbers[variable] = f"{len(numbers)}{name}:{variable.type}"
        return numbers[variable]

    for node in toposort(graphs):
        inputs = ", ".join(number(variable) for variable in node.inputs)
        outputs = ", ".join(number(variable) for variable in node.outputs)
        lines.append(f"{outputs} = {_without_addresses(str(node.op))}({inputs})")
        if isinstance(node.op, HasInnerGraph):
            lines += _lines(node.op.inner_outputs)
    return [*lines, *(number(graph) for graph in graphs)]


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)


# functions and operations that look for their value first -----------------------------------------


def _function_name(function) -> str:
    named = parts_of(function)[0] if isinstance(function, FromFunctionOp) else function
    if isinstance(named, Op) or not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}.{named.__qualname__}"


class _Values:
    """Values of one function in a store."""

    def __init__(self, store: EvaluationStore, name: str):
        self.store, self.name = store, name
        self.model = store.model_number({"function": name})
        self._chain, self._process = "", 0

    def __getstate__(self):
        return self.__dict__ | {"_process": 0}

    def find(self, arguments: Sequence, longest: int | None = None) -> float | None:
        """Return the value that is stored for `arguments`, None if there is none.

        Those with more numbers than `longest` are known by a digest.
        """
        return self.store.find(self.model, _joined(arguments, longest))

    def at(
        self,
        arguments: Sequence,
        evaluate: Callable[[], float],
        keep: bool = True,
        longest: int | None = None,
    ) -> float:
        """Return the value that `find` finds, or else that of `evaluate`, which is kept."""
        point = _joined(arguments, longest)
        known = self.store.find(self.model, point)
        if known is not None:
            return known
        if not keep:
            return evaluate()
        if self._process != os.getpid():
            self._chain, self._process = uuid.uuid4().hex, os.getpid()
        return self.store.timed(self.model, self._chain, point, evaluate)


def _joined(arguments, longest):
    """Return the numbers of all arguments; of one with more than `longest` a digest, as numbers."""
    parts = []
    for argument in map(np.ravel, arguments):
        if longest is not None and argument.size > longest:
            argument = np.frombuffer(hashlib.sha256(as_bytes(argument)).digest())
        parts.append(argument)
    return np.concatenate(parts)


class _StoredFunction:
    """What `EvaluationStore.wrap` returns of a function."""

    def __init__(self, function: Callable[..., float], values: _Values):
        functools.update_wrapper(self, function)
        self._function, self._values = function, values

    def __call__(self, *arguments) -> float:
        return self._values.at(arguments, lambda: float(self._function(*arguments)))


class _StoredOp(Op):
    """What `EvaluationStore.wrap` returns of an operation with one scalar output."""

    def __init__(self, op: Op, values: _Values):
        self._checked, self._values = CheckedOperation(op), values

    @property
    def op(self) -> Op:
        """The operation itself."""
        return self._checked.op

    def __str__(self):
        return f"Stored{{{self._values.name}}}"

    def make_node(self, *inputs):
        node = self.op.make_node(*inputs)
        if [output.type.ndim for output in node.outputs] != [0]:
            raise ValueError(
                f"{self.op} has outputs {[str(output.type) for output in node.outputs]}: wrap an "
                "operation with one scalar output, the log-likelihood."
            )
        return Apply(self, node.inputs, [output.type() for output in node.outputs])

    def perform(self, node, inputs, outputs):
        def evaluate():
            self._checked.perform(node, inputs, outputs)
            return float(outputs[0][0])

        value = self._values.at(inputs, evaluate, keep=not getattr(self.op, "is_asked", False))
        outputs[0][0] = np.asarray(value, dtype=node.outputs[0].dtype)

    def pullback(self, inputs, outputs, cotangents):
        """Gradient of the operation, where it has one."""
        derive = getattr(self.op, "pullback", self.op.L_op)
        return derive(inputs, outputs, cotangents)

    # The name that PyTensor 2 calls.
    L_op = pullback
