"""From a PyMC model to a compiled log density over the raveled vector of free variables."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.pytensorf import join_nonshared_inputs, make_shared_replacements, rewrite_pregrad
from pymc.util import get_value_vars_from_user_vars
from pymc.vartypes import discrete_types
from pytensor.compile.ops import FromFunctionOp
from pytensor.gradient import NullTypeGradError
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch import basic as numba_dispatch
from pytensor.tensor.random.op import RandomVariable

from pymc_kameleon.compiled import as_pointer

__all__ = ["LogDensity", "select_variables"]

_log = logging.getLogger("pymc.kameleon")

N_TERMS = 3
"""Terms of a log density: log prior, exact log likelihood, estimated log likelihood."""


def select_variables(model, vars=None) -> list:
    """Value variables to sample, in the model's own order.

    PyMC ravels a point in the order of `model.value_vars`; a step that is compiled in any other
    order silently swaps its variables.

    Parameters
    ----------
    model : pymc.Model
    vars : list of variables or None
        Free random variables, value variables or names of either; None for all.

    Raises
    ------
    ValueError
        If there is nothing to sample or a variable is discrete.
    """
    if vars is None:
        chosen = list(model.value_vars)
    else:
        vars = vars if isinstance(vars, list | tuple) else [vars]
        named = [model[v] if isinstance(v, str) else v for v in vars]
        chosen = get_value_vars_from_user_vars(named, model)
    if not chosen:
        raise ValueError("vars: the model has no free variables to sample; give it at least one.")
    discrete = [v.name for v in chosen if v.dtype in discrete_types]
    if discrete:
        raise ValueError(
            f"vars: {', '.join(discrete)} {'is' if len(discrete) == 1 else 'are'} discrete, and "
            "this step moves continuous variables only. Name the continuous ones, vars=[...], and "
            "PyMC assigns a step to the rest: pm.sample(step=[KameleonStep(vars=[...])])."
        )
    wanted = set(chosen)
    return [v for v in model.value_vars if v in wanted]


class LogDensity:
    """Log density of a model over the raveled vector of some of its free variables.

    It is the sum of the log prior (with the Jacobians of the transforms) and the log likelihood
    (observed variables and potentials), which one compiled function returns together.

    Parameters
    ----------
    model : pymc.Model
    vars : list of variables or None
        Free variables of the vector; the others enter through shared variables.
    initial_point : dict or None
        Gives the shapes; default `model.initial_point()`.
    compile_kwargs : dict or None
        Passed to `model.compile_fn`. None compiles with PyTensor's Numba linker, so that compiled
        transitions can call the log density directly, and falls back to the default linker by
        itself where the model holds an operation that Numba does not know.
    separate_estimates : bool
        Keep the observed variables and potentials that hold black-box operations as a term of their
        own, so that an estimate can be kept while the rest is evaluated again (pseudo-marginal).

    Attributes
    ----------
    vars : list
        Value variables, in the model's order.
    names : list of str
    shapes : list of tuple
    dim : int
        Length d of the raveled vector.
    shared : dict
        Value variable of each variable not sampled here -> shared variable.
    n_evaluations : int
        Evaluations so far, those made inside compiled transitions included.
    """

    def __init__(
        self,
        model,
        vars: Sequence | None = None,
        *,
        initial_point: dict[str, np.ndarray] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        separate_estimates: bool = False,
    ):
        initial_point = model.initial_point() if initial_point is None else initial_point
        self.vars = select_variables(model, vars)
        self.names = [v.name for v in self.vars]
        self.shapes = [np.shape(initial_point[name]) for name in self.names]
        self.dim = int(sum(np.prod(shape) for shape in self.shapes))
        if self.dim == 0:
            raise ValueError(f"vars: {', '.join(self.names)} have no elements; nothing to sample.")
        self.shared = make_shared_replacements(initial_point, self.vars, model)
        self._others = set(self.shared.values())
        self.n_evaluations = 0

        terms = _likelihood_terms(model)
        estimated = [t for t in terms if separate_estimates and _has_black_box(t[1])]
        if separate_estimates:
            _refuse_shared_estimates(estimated, set(model.value_vars) - set(self.vars))
        exact = [variable for variable, logp in terms if (variable, logp) not in estimated]
        prior = model.logp(vars=model.free_RVs)
        likelihood = model.logp(vars=exact) if exact else pt.constant(0.0)
        estimate = (
            model.logp(vars=[variable for variable, _ in estimated])
            if estimated
            else pt.constant(0.0)
        )
        outputs = [pt.as_tensor(o).astype("float64") for o in (prior, likelihood, estimate)]
        self._outputs, self._input = join_nonshared_inputs(
            initial_point, outputs, self.vars, self.shared
        )
        self._model = model
        # PyMC 6 passes {} to a step that it chose itself: nothing that a user asked for.
        self._compile_kwargs = compile_kwargs or None
        self._function = self._compile(self._outputs)
        self._compilable = hasattr(getattr(self._function, "vm", None), "jit_fn")
        self._rest = self._compile(self._outputs[:2]) if estimated and self.shared else None
        self._gradient = None
        self._reset_compiled()

    def __getstate__(self):
        state = self.__dict__.copy()
        for name in ("_jitted", "_c_function", "_seen", "_moving", "_buffers", "_table"):
            state.pop(name)
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._reset_compiled()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Log prior, log likelihood and estimated log likelihood (0 if not separated) at `x`.

        Parameters
        ----------
        x : array, shape (d,)

        Returns
        -------
        array, shape (3,)
        """
        value = np.empty(N_TERMS)
        self.n_evaluations += 1
        self._into(x, value)
        return value

    def rest(self, x: np.ndarray) -> np.ndarray:
        """Log prior and exact log likelihood at `x`, without drawing the estimated term again."""
        return np.array([float(o) for o in self._rest(x.astype(self._input.dtype, copy=False))])

    @property
    def keeps_estimates(self) -> bool:
        """Whether estimated terms must be kept while other steps move the remaining variables."""
        return self._rest is not None

    def value_and_gradient(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Terms of the log density and the gradients of log prior and log likelihood.

        Parameters
        ----------
        x : array, shape (d,)

        Returns
        -------
        value : array, shape (3,)
        gradient : array, shape (2, d)
            Of the log prior, and of the log likelihood with its estimated part.

        Raises
        ------
        NotImplementedError
            If an operation of the model has no gradient.
        """
        if self._gradient is None:
            self._gradient = self._compile_gradient()
        self.n_evaluations += 1
        *value, prior, likelihood = self._gradient(x.astype(self._input.dtype, copy=False))
        return np.array(value, dtype=float), np.array([prior, likelihood], dtype=float)

    def plain(self) -> tuple[Callable[[np.ndarray, np.ndarray], None]]:
        """Return what `compiled.evaluate` takes in plain Python."""
        return (self._into,)

    def compiled(self) -> np.ndarray | None:
        """Return what `compiled.evaluate` takes in compiled code; None if there is no such thing.

        Returns
        -------
        int64 array
            The address of the C function, then data pointer and shape of every shared array. Valid
            until `inputs_changed` says that they changed.
        """
        if not self._compilable:
            return None
        if self._c_function is None and not self._compile_c_function():
            return None
        if self._table is None:
            self._buffers = [
                np.require(c.storage[0], requirements=["C", "A"]) for c in self._containers()
            ]
            table = [self._c_function.address]
            for array in self._buffers:
                table += [array.ctypes.data, *array.shape]
            self._table = np.array(table, dtype=np.intp)
        return self._table

    def inputs_changed(self) -> bool:
        """Whether a shared value (another step's variable, or data) changed since the last call."""
        values = [container.storage[0] for container in self._containers()]
        if self._seen is None:
            self._seen = [(None, None)] * len(values)
            self._moving = [variable in self._others for variable in self._function.get_shared()]
        changed = False
        for i, value in enumerate(values):
            last, copy = self._seen[i]
            if value is last:
                continue
            if not (self._moving[i] and _same(value, copy)):
                changed = True
            # Data may be large and are replaced as a whole; other variables are compared by value.
            self._seen[i] = (value, np.array(value) if self._moving[i] else None)
            self._table = None
        return changed

    def _into(self, x, value):
        for i, output in enumerate(self._function(x.astype(self._input.dtype, copy=False))):
            value[i] = output

    def _containers(self):
        return self._function.input_storage[1:]

    def _reset_compiled(self):
        self._c_function = self._jitted = self._buffers = self._table = None
        self._seen = self._moving = None

    def _compile(self, outputs):
        function = None
        if self._compile_kwargs is None:
            function = self._compile_numba(outputs)
        if function is None:
            kwargs = self._compile_kwargs
            if kwargs is None:
                kwargs = {"mode": "cvm"} if pytensor.config.cxx else {}
            function = self._model.compile_fn(
                outputs, inputs=[self._input], point_fn=False, **kwargs
            )
        function.trust_input = True
        return function

    def _compile_numba(self, outputs):
        """Compile with the Numba linker, or return None after logging why it cannot be done."""
        foreign = sorted({type(op).__name__ for op in _operations(outputs) if not _in_numba(op)})
        if foreign:
            _log.info(
                "The log density holds %s, which Numba cannot compile: transitions run in Python.",
                ", ".join(foreign),
            )
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                function = self._model.compile_fn(
                    outputs, inputs=[self._input], point_fn=False, mode="NUMBA"
                )
                function(np.zeros(self.dim, dtype=self._input.dtype))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            else:
                objects = [str(w.message) for w in caught if "object mode" in str(w.message)]
                if not objects:
                    return function
                reason = objects[0].splitlines()[0]
        _log.info(
            "Numba cannot compile the log density (%s): each transition runs in Python.", reason
        )
        return None

    def _compile_gradient(self):
        prior, likelihood = self._outputs[0], self._outputs[1] + self._outputs[2]
        try:
            gradients = [
                pt.grad(rewrite_pregrad(term), self._input, disconnected_inputs="ignore")
                for term in (prior, likelihood)
            ]
        except (NotImplementedError, NullTypeGradError) as error:
            raise NotImplementedError(
                f"The log density has no gradient with respect to {', '.join(self.names)}: {error}"
            ) from error
        return self._compile([*self._outputs, *gradients])

    def _compile_c_function(self) -> bool:
        arrays = [c.storage[0] for c in self._containers()]
        if not all(isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays):
            _log.info(
                "A shared input of the model is no plain array: each transition runs in Python."
            )
            self._compilable = False
            return False
        self._jitted = self._function.vm.jit_fn
        namespace = {
            "np": np,
            "carray": numba.carray,
            "as_pointer": as_pointer,
            "jitted": self._jitted,
        }
        for i, array in enumerate(arrays):
            namespace[f"dtype_{i}"] = array.dtype.type
        namespace["input_dtype"] = np.dtype(self._input.dtype).type
        exec(_c_function_source(self.dim, [a.ndim for a in arrays]), namespace)
        word = numba.types.intp
        self._c_function = numba.cfunc(word(word, word, word))(namespace["log_density"])
        return True


def _c_function_source(dim, dimensions) -> str:
    """Source of a C function that unpacks the table and calls the jitted function."""
    lines, offset = [], 1
    for i, ndim in enumerate(dimensions):
        shape = "".join(f"table[{offset + 1 + k}], " for k in range(ndim))
        lines.append(f"    shared_{i} = carray(as_pointer(table[{offset}]), ({shape}), dtype_{i})")
        offset += 1 + ndim
    arguments = "".join(f", shared_{i}" for i in range(len(dimensions)))
    return "\n".join(
        [
            "def log_density(x_address, value_address, table_address):",
            f"    x = carray(as_pointer(x_address), ({dim},), np.float64)",
            f"    value = carray(as_pointer(value_address), ({N_TERMS},), np.float64)",
            f"    table = carray(as_pointer(table_address), ({offset},), np.intp)",
            *lines,
            f"    terms = jitted(x.astype(input_dtype){arguments})",
            *[f"    value[{i}] = terms[{i}][()]" for i in range(N_TERMS)],
            "    return 1",
        ]
    )


def _same(a, b) -> bool:
    return (
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.dtype == b.dtype
        and np.array_equal(a, b)
    )


def _likelihood_terms(model) -> list[tuple]:
    """Pairs (observed variable or potential, its log density graph)."""
    variables = [*model.observed_RVs, *model.potentials]
    return list(zip(variables, model.logp(vars=variables, sum=False), strict=True))


def _operations(variables) -> Iterator:
    for variable in ancestors(variables):
        if variable.owner is not None:
            op = variable.owner.op
            yield op
            if isinstance(op, HasInnerGraph):
                yield from _operations(op.inner_outputs)


def _is_black_box(op) -> bool:
    package = type(op).__module__.split(".")[0]
    return isinstance(op, FromFunctionOp) or package not in ("pytensor", "pymc", "pymc_extras")


def _in_numba(op) -> bool:
    return not _is_black_box(op) or any(
        registry.dispatch(type(op)) is not registry.dispatch(object)
        for registry in (
            numba_dispatch.numba_funcify,
            numba_dispatch.numba_funcify_default_op_cache_key,
            numba_dispatch.numba_funcify_and_cache_key,
        )
    )


def _has_black_box(graph) -> bool:
    return any(isinstance(op, RandomVariable) or _is_black_box(op) for op in _operations([graph]))


def _refuse_shared_estimates(estimated, others):
    for variable, logp in estimated:
        foreign = sorted(v.name for v in ancestors([logp]) if v in others)
        if foreign:
            raise ValueError(
                f"pseudo_marginal=True: the estimated term {variable.name} depends on "
                f"{', '.join(foreign)}, which another step moves, so its estimate cannot be kept. "
                f"Give this step those variables too: vars=[..., {', '.join(foreign)}]."
            )
