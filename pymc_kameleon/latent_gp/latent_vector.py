r"""Linear predictors of Gaussian variables, as one latent function with a Gaussian prior.

Functions and other Gaussian variables x ~ N(m, K) enter the likelihood by u = A x only, where m, K
and A depend on hyperparameters. So u ~ N(A m, A K A^T) is a latent function as any other, and x
is drawn given u where it is wanted: for a draw x' of the prior,

.. math:: x = x' + K A^\top (A K A^\top)^{-1} (u - A x')

(Matheron's rule). Columns of A, and of the precision of x where only its density is known, are
found from differences of what a graph of the model returns: those of elements that never meet in
one row together.
"""

import math
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pymc.pytensorf import compile as compile_graph
from pymc.pytensorf import make_shared_replacements
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dtrmv, dtrsm
from scipy.sparse import csr_array

from pymc_kameleon.latent_gp.gaussian_sites import (
    cholesky_overwriting,
    factorised,
    solve_root,
)
from pymc_kameleon.latent_gp.likelihood import ModelLikelihood
from pymc_kameleon.latent_gp.linear_predictor import (
    density_and_gradient,
    predictions_of,
    shape_of,
)
from pymc_kameleon.latent_gp.prior import FreeVariable, ModelPrior, Prior, PriorAt, perturbed
from pymc_kameleon.latent_gp.reading import LatentFunction, likelihood_terms
from pymc_kameleon.model.initial_points import reseed
from pymc_kameleon.model.model_function import IN_PYTHON, ModelFunction
from pymc_kameleon.model.transforms import unconstrained

LOG_2PI = math.log(2.0 * math.pi)

ONCE = {"mode": IN_PYTHON}
"""For graphs that are evaluated when the step is made, or when data change."""

MOST_TOGETHER = 8
"""Linear predictors that an observation may depend on."""

TRIES = (1.0, 0.3, 0.03, 0.0)
"""Standard deviations of the values, about the model's start, at which a matrix is looked at."""


class Groups(NamedTuple):
    """Which entries of a matrix are not 0, and which of its columns are found together.

    `rows`, `columns` (n,) are those of the entries; `of_column` (M,) is the group of each column.
    """

    rows: np.ndarray
    columns: np.ndarray
    of_column: np.ndarray

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.of_column.max(initial=-1)) + 1


def grouped(is_entry: np.ndarray) -> Groups:
    """Put columns of a pattern (N, M) together, of which none two have an entry in one row."""
    taken: list[np.ndarray] = []
    of_column = np.zeros(is_entry.shape[1], dtype=np.int64)
    for j in range(is_entry.shape[1]):
        column = is_entry[:, j]
        group = next((k for k, rows in enumerate(taken) if not np.any(rows & column)), len(taken))
        if group == len(taken):
            taken.append(np.zeros(len(column), dtype=bool))
        taken[group] |= column
        of_column[j] = group
    rows, columns = np.nonzero(is_entry)
    return Groups(rows, columns, of_column)


class AffineGraph:
    """An affine graph (N,) of a vector (M,), other variables of the model given.

    `graph` is that of `vector`, and of shared variables. `extra` scalars are returned with it at 0.
    """

    def __init__(self, model, graph, vector, size, length, compile_kwargs, extra=()):
        outputs = [graph, *extra]
        self.function = ModelFunction(model, outputs, vector, size, compile_kwargs)
        self.size, self.length, self.n_extra = size, length, len(extra)
        self.groups = grouped(np.zeros((length, size), dtype=bool))

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the graph (N,) and what is returned with it, at `x` (M,)."""
        out = np.empty(self.length + self.n_extra)
        self.function.into(x, out)
        return out

    def find_groups(self, matrices: list[np.ndarray]) -> None:
        """Find which entries the matrix has, from what `matrices_about` returned."""
        self.groups = grouped(np.any([matrix != 0.0 for matrix in matrices], axis=0))

    def matrices_about(self, shared) -> list[np.ndarray]:
        """Return the matrix (N, M) at two values of `shared` variables, near the present ones."""
        present, found = [(v, v.get_value()) for v in shared], []
        rng = np.random.default_rng(0)
        for scale in TRIES:
            for variable, value in present:
                variable.set_value(perturbed(value, scale, rng))
            with np.errstate(all="ignore"):
                start = self.at(np.zeros(self.size))[: self.length]
                columns = [self.at(x)[: self.length] - start for x in np.eye(self.size)]
            matrix = np.array(columns).reshape(self.size, self.length).T
            if np.all(np.isfinite(matrix)):
                found.append(matrix)
            if len(found) == 2:
                break
        for variable, value in present:
            variable.set_value(value)
        if not found:
            raise ValueError("A linear predictor is not finite near the start of the model.")
        return found

    def matrix(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what `at` does at 0, and the matrix (N, M)."""
        start = self.at(np.zeros(self.size))
        rows, columns, of_column = self.groups
        changes = np.empty((self.groups.n_groups, self.length))
        for k in range(self.groups.n_groups):
            changes[k] = (self.at((of_column == k).astype(float)) - start)[: self.length]
        matrix = np.zeros((self.length, self.size))
        matrix[rows, columns] = changes[of_column[columns], rows]
        return start, matrix


class DensityPrior:
    """N(m, K) of variables whose joint log density is quadratic in them.

    `shared` are the value variables of others, with their shared variables.
    """

    def __init__(self, model, variables, shapes, shared, compile_kwargs):
        values = [model.rvs_to_values[v] for v in variables]
        self.size = sum(map(math.prod, shapes))
        vector, parts = _split(values, shapes)
        graphs = density_and_gradient(model, variables)
        density, gradient = clone_replace(graphs, shared | parts, rebuild_strict=False)
        self.gradient = AffineGraph(
            model, gradient, vector, self.size, self.size, compile_kwargs, extra=[density]
        )

    def at(self) -> "PrecisionGaussian":
        """Return the Gaussian at the present values; LinAlgError if it is none."""
        start, negative = self.gradient.matrix()
        return PrecisionGaussian(start[: self.size], -negative, start[self.size])


class PrecisionGaussian:
    """exp(constant + slope x - x^T precision x / 2), a multiple of a Gaussian.

    `log_integral` is the log of that multiple.
    """

    def __init__(self, slope: np.ndarray, precision: np.ndarray, constant: float):
        self._root = cholesky_overwriting(0.5 * (precision + precision.T))
        half_log_determinant = float(np.log(np.diagonal(self._root)).sum())
        if not math.isfinite(half_log_determinant):
            raise LinAlgError("A precision is not finite.")
        self.mean = self.times_covariance(slope)
        self.log_integral = (
            constant + 0.5 * float(slope @ self.mean) - half_log_determinant
        ) + 0.5 * slope.size * LOG_2PI

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw (M,) from the Gaussian."""
        z = rng.standard_normal(self.mean.size)
        return self.mean + solve_root(self._root, z, transposed=True)

    def whitened(self, matrix: np.ndarray) -> np.ndarray:
        """Return A L^-T for a matrix A (N, M), where the precision is L L^T."""
        # In Fortran order, L^T is upper triangular.
        return dtrsm(1.0, self._root.T, matrix, side=1, lower=0)

    def times_covariance(self, x: np.ndarray) -> np.ndarray:
        """Return K x for `x` (M,)."""
        return solve_root(self._root, solve_root(self._root, x), transposed=True)


class Design:
    """Columns of A (N, M) that belong to one function: `matrix` is sparse, or selects elements."""

    def __init__(self, matrix: np.ndarray):
        self._matrix = csr_array(matrix)
        rows, columns = np.nonzero(matrix)
        selects = np.all(matrix[rows, columns] == 1.0) and np.unique(rows).size == rows.size
        self._selection = (_as_slice(rows), _as_slice(columns)) if selects else None

    def times(self, x: np.ndarray) -> np.ndarray:
        """Return A x."""
        return self._matrix @ x

    def pulled(self, y: np.ndarray) -> np.ndarray:
        """Return A^T y."""
        return self._matrix.T @ y

    def add_covariance(self, covariance: np.ndarray, out: np.ndarray) -> None:
        """Add A K A^T to `out` (N, N)."""
        if self._selection is None:
            out += self._matrix @ (self._matrix @ covariance).T
        else:
            rows, columns = self._selection
            out[_grid(rows)] += covariance[_grid(columns)]


def _as_slice(indices):
    """Return a slice where indices are one after the other."""
    if indices.size and np.array_equal(indices, indices[0] + np.arange(indices.size)):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def _grid(part):
    return (part, part) if isinstance(part, slice) else np.ix_(part, part)


class VectorAt:
    """The prior of a latent vector at some values of the other variables, before factorisation.

    `mean` and `covariance` are those of the linear predictors, and the memory of the second is the
    caller's. It is also the map between them and the free variables, as `FreeVariable` is, once
    there is a factor. `designs` are the columns of A of each function, `matrix` is those of the
    others.
    """

    def __init__(self, name, designs, matrix, functions, others):
        self._name, self._designs, self._matrix = name, designs, matrix
        self._functions, self._others = functions, others
        self.log_integral = 0.0 if others is None else others.log_integral
        self.mean = self._times([f.mean for f in functions], others and others.mean)
        self.covariance = np.zeros((self.mean.size, self.mean.size))
        for design, function in zip(designs, functions, strict=True):
            design.add_covariance(function.covariance, self.covariance)
        if others is not None:
            z = others.whitened(matrix)
            self.covariance += z @ z.T

    def _times(self, functions, others):
        """Return A x for the functions, and the other variables, None without them."""
        parts = [design.times(f) for design, f in zip(self._designs, functions, strict=True)]
        return sum(parts if others is None else [*parts, self._matrix @ others])

    def factorised_in_place(self) -> tuple[np.ndarray, "VectorAt"]:
        """Return the Cholesky factor of the covariance, in its place, and the free variables."""
        self._root = cholesky_overwriting(self.covariance)
        return self._root, self

    def factorised(self) -> PriorAt:
        """Return the prior of the predictors, and keep the covariance."""
        gaussian = factorised(self.mean, self.covariance, self._name)
        self._root = gaussian.cholesky
        return PriorAt(gaussian, self)

    @cached_property
    def _roots(self) -> list[tuple[np.ndarray, FreeVariable]]:
        """Cholesky factor of each function's covariance, and its free variable."""
        found = []
        for function in self._functions:
            at = function.factorised(self._name)
            found.append((at.gaussian.cholesky, at.variable))
        return found

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Linear predictors (N,) where the free variables are `v` (M,)."""
        functions, end = [], 0
        for root, variable in self._roots:
            begin, end = end, end + len(root)
            functions.append(variable.to_function(v[begin:end]))
        return self._times(functions, None if self._others is None else v[end:])

    def is_at(self, u: np.ndarray, v: np.ndarray, dtype) -> bool:
        """Whether `v` (M,) have the linear predictors `u` (N,), but for rounding."""
        return np.abs(self.to_function(v) - u).max() <= 1e-8 * (1.0 + np.abs(u).max())

    def drawn(self, u: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the free variables (M,) where the linear predictors are `u` (N,).

        They are returned with the functions and other variables that they stand for, x (M,).
        """
        draws = [
            function.mean + dtrmv(root.T, rng.standard_normal(len(root)), lower=0, trans=1)
            for function, (root, _) in zip(self._functions, self._roots, strict=True)
        ]
        others = None if self._others is None else self._others.draw(rng)
        apart = u - self._times(draws, others)
        pull = solve_root(self._root, solve_root(self._root, apart), transposed=True)
        free, natural = [], []
        for draw, design, function, (_, variable) in zip(
            draws, self._designs, self._functions, self._roots, strict=True
        ):
            natural.append(draw + function.covariance @ design.pulled(pull))
            free.append(variable.to_variable(natural[-1]))
        if self._others is not None:
            moved = others + self._others.times_covariance(self._matrix.T @ pull)
            natural.append(moved)
            free.append(moved)
        return np.concatenate(free), np.concatenate(natural)


def _places(shapes):
    """Return where values of these shapes are in a vector that holds one after the other."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return np.split(np.arange(ends[-1]), ends[:-1])


def _split(variables, shapes):
    """Return a vector, and what of it stands for each of the variables, of these shapes."""
    parts = _places(shapes)
    vector = pt.tensor("latent", dtype="float64", shape=(sum(map(len, parts)),))
    return vector, {
        variable: pt.specify_shape(vector[part[0] : part[-1] + 1].reshape(shape), shape).astype(
            variable.dtype
        )
        for variable, part, shape in zip(variables, parts, shapes, strict=True)
    }


def _natural_parts(model, linear, shapes):
    """Return a vector, and what of it stands for a model's functions and other variables."""
    values = [model.rvs_to_values[v] for v in linear.variables]
    vector, parts = _split(values, shapes)
    natural = []
    for variable, value in zip(linear.variables, values, strict=True):
        transform, part = model.rvs_to_transforms[variable], parts[value]
        natural.append(
            part if transform is None else transform.backward(part, *variable.owner.inputs)
        )
    return vector, {leaf: natural[i] for leaf, i in linear.leaves.items()}


def _in_values(model, graphs, replaced):
    """Return graphs of random variables with some replaced, and values for all others."""
    rest = [v for v in model.free_RVs if v not in replaced]
    natural = dict(zip(rest, model.replace_rvs_by_values(rest), strict=True))
    return clone_replace(graphs, natural | replaced, rebuild_strict=False)


class VectorPrior(Prior):
    """The prior of the linear predictors of a model, as `ModelPrior` is that of a function.

    `size` (N) predictors differ; `inverse` is which of them each element of the nodes is, N for
    those that are none.
    """

    def __init__(self, model, linear, shapes, name, shared, compile_kwargs):
        self.name = name
        self._names = ", ".join(variable.name for variable in linear.variables)
        n = len(linear.functions)
        self._functions = []
        for variable, function in linear.functions:
            graph = None if function is None else model.replace_rvs_by_values([function])[0]
            own = variable.name if function is None else function.name
            self._functions.append(ModelPrior(model, own, variable, graph, shared, compile_kwargs))
        self._others = None
        if linear.others:
            self._others = DensityPrior(model, linear.others, shapes[n:], shared, compile_kwargs)
        self._ends = np.cumsum([math.prod(shape) for shape in shapes[:n]]).astype(int)
        self._n_elements = sum(map(math.prod, shapes))
        self._compile_design(model, linear, shapes, shared, compile_kwargs)
        self.refresh()

    def _compile_design(self, model, linear, shapes, shared, compile_kwargs):
        vector, parts = _natural_parts(model, linear, shapes)
        nodes = [node.astype("float64").ravel() for node in linear.nodes]
        nodes = _in_values(model, nodes, parts)
        graph = pt.concatenate(clone_replace(nodes, shared, rebuild_strict=False))
        length = sum(math.prod(shape) for shape in map(shape_of, linear.nodes))
        self._whole = AffineGraph(model, graph, vector, self._n_elements, length, ONCE)
        self._shared = list(shared.values())
        matrices = self._whole.matrices_about(self._shared)
        self._kept, self.inverse = _distinct_rows(matrices)
        self.size = len(self._kept)
        self._check_rank(matrices, linear, shapes)
        moves = not set(shared.values()).isdisjoint(ancestors([graph]))
        options = compile_kwargs if moves else ONCE
        self._design = AffineGraph(
            model, graph[self._kept], vector, self._n_elements, self.size, options
        )
        self._moves = moves
        self._find_entries(matrices)

    def _find_entries(self, matrices):
        """Find which entries A and the precision have, where these are A's of all nodes."""
        self._design.find_groups([matrix[self._kept] for matrix in matrices])
        if self._others is not None:
            gradient = self._others.gradient
            gradient.find_groups(gradient.matrices_about(self._shared))
        self._parts = None if self._moves else self._split_matrix()

    def _check_rank(self, matrices, linear, shapes):
        """Raise `Dependent` if there are more linear predictors than variables tell apart."""
        if _excess(matrices) == 0:
            return
        columns = _places(shapes)[len(linear.functions) :]
        left = [_excess([np.delete(m, own, axis=1) for m in matrices]) for own in columns]
        worst = linear.others[int(np.argmin(left))] if left else None
        raise Dependent(self.size, self._n_elements, worst)

    def _split_matrix(self):
        _, matrix = self._design.matrix()
        designs = [Design(matrix[:, begin:end]) for begin, end in pairwise([0, *self._ends])]
        return designs, np.asfortranarray(matrix[:, self._ends[-1] if len(self._ends) else 0 :])

    @property
    def functions(self) -> list[ModelFunction]:
        """What the prior is computed with."""
        functions = [f.function for f in self._functions] + [self._design.function]
        return functions + ([] if self._others is None else [self._others.gradient.function])

    def _not_positive_definite(self):
        return ValueError(
            f"The joint prior of {self._names} is improper, or their precision is not positive "
            "definite: give each a proper prior."
        )

    def evaluate(self) -> PriorAt:
        """Return the prior at the present values of the other variables, but do not keep it."""
        return self.unfactorised().factorised()

    def unfactorised(self) -> VectorAt:
        """Return what `evaluate` does, before anything is factorised."""
        designs, matrix = self._split_matrix() if self._parts is None else self._parts
        functions = [function.unfactorised() for function in self._functions]
        others = None if self._others is None else self._others.at()
        return VectorAt(self.name, designs, matrix, functions, others)

    def check_data(self) -> None:
        """Check shapes for data that are new, and read the design anew."""
        for function in self.functions:
            function.check_data(np.zeros(function.dim), f"The prior of {self.name}")
        matrices = self._whole.matrices_about(self._shared)
        if not np.array_equal(_distinct_rows(matrices)[1], self.inverse):
            raise ValueError(
                "With the new data other observations have the same linear predictor than before, "
                "and the step was made for those: make a new one, step=LatentGPStep(...)."
            )
        self._find_entries(matrices)


class Dependent(ValueError):
    """More linear predictors than Gaussian variables tell apart; the most without `worst`."""

    def __init__(self, n_predictors: int, n_variables: int, worst) -> None:
        self.worst = worst
        super().__init__(
            f"{n_predictors} linear predictors of {n_variables} Gaussian variables are not "
            "independent. Give each observation an effect of its own, or take NUTS."
        )


def _excess(matrices):
    """Return how many more distinct rows there are than their rank."""
    kept, _ = _distinct_rows(matrices)
    return len(kept) - (np.linalg.matrix_rank(matrices[0][kept]) if len(kept) else 0)


def _distinct_rows(matrices):
    """Return the first of each kind of rows that are not 0, and for each row which it is."""
    rows = np.hstack(matrices)
    scale = np.abs(rows).max(axis=0, initial=0.0)
    rounded = np.round(rows / np.where(scale > 0, scale, 1.0), 9) + 0.0
    _, first, inverse = np.unique(rounded, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.ravel()
    is_kept = np.any(rounded[first] != 0, axis=1)
    order = np.argsort(first[is_kept])
    number = np.full(len(first), is_kept.sum())
    number[np.flatnonzero(is_kept)[order]] = np.arange(is_kept.sum())
    return first[is_kept][order], number[inverse]


class LatentVector(LatentFunction):
    """The linear predictors of a model, as one latent function, and the variables behind them.

    `linear` are those variables, `predictions` those that nothing observed depends on.
    """

    def __init__(self, model, linear, *, initial_point=None, compile_kwargs=None):
        self.name = "the linear predictor"
        self.linear, predictions = linear, predictions_of(model, linear)
        self.value_variables = [model.rvs_to_values[v] for v in linear.variables]
        predicted = [model.rvs_to_values[v] for v in predictions]
        point = model.initial_point() if initial_point is None else initial_point
        self.shared = make_shared_replacements(point, self.value_variables + predicted, model)
        compile_kwargs = compile_kwargs or None
        shapes = [np.shape(point[value.name]) for value in self.value_variables]
        self.prior = VectorPrior(model, linear, shapes, self.name, self.shared, compile_kwargs)
        self.size = self.prior.size
        argument = pt.tensor(self.name, dtype="float64", shape=(self.size,))
        replaced = self._nodes_of(model, argument, linear, shapes)
        terms = likelihood_terms(
            model, replaced, linear.variables, predictions, self.shared, argument
        )
        mean = self.prior.gaussian.mean
        self.likelihood = ModelLikelihood(
            model, self.name, terms, argument, self.size, mean, compile_kwargs, MOST_TOGETHER
        )
        self.predictions = None
        if predictions:
            self.predictions = Predictions(model, predictions, linear, shapes, self.shared)
        self.follow_only(set(self.shared.values()))

    def _nodes_of(self, model, argument, linear, shapes):
        """Graphs of the vector of predictors that stand for the nodes of the model."""
        padded, end, found = pt.concatenate([argument, pt.zeros(1)]), 0, {}
        vector, parts = _natural_parts(model, linear, shapes)
        zeros = clone_replace(list(parts.values()), {vector: pt.zeros(vector.type.shape)})
        zeros = dict(zip(parts, zeros, strict=True))
        offsets = _in_values(model, linear.nodes, zeros)
        node_shapes = map(shape_of, linear.nodes)
        for node, offset, shape in zip(linear.nodes, offsets, node_shapes, strict=True):
            begin, end = end, end + math.prod(shape)
            part = padded[self.prior.inverse[begin:end]].reshape(shape)
            found[node] = offset + part
        return found


class Predictions:
    """Free variables that nothing observed depends on, drawn given all others.

    Graphs of the functions and other variables `linear`, of these `shapes`; `shared` are the value
    variables of all others, with their shared variables.
    """

    def __init__(self, model, variables, linear, shapes, shared):
        self.value_variables = [model.rvs_to_values[v] for v in variables]
        vector, parts = _natural_parts(model, linear, shapes)
        given = [v for v in model.free_RVs if v not in variables and v not in parts]
        natural = clone_replace(model.replace_rvs_by_values(given), shared, rebuild_strict=False)
        graph = pt.concatenate(
            [unconstrained(model, v).astype("float64").ravel() for v in variables]
        )
        replaced = dict(zip(given, natural, strict=True)) | parts
        (graph,) = clone_replace([graph], replaced, rebuild_strict=False)
        self._draw = compile_graph([vector], graph, mode=IN_PYTHON, on_unused_input="ignore")

    def drawn(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw the variables, raveled, where functions and other variables are `x` (M,)."""
        reseed(self._draw, rng)
        return self._draw(x)
