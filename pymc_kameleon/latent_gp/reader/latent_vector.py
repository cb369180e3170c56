r"""Linear predictors of Gaussian variables, as one latent function with a Gaussian prior.

Functions and other Gaussian variables x ~ N(m, K) enter the likelihood by u = A x only, where m, K
and A depend on hyperparameters. So u ~ N(A m, A K A^T) is a latent function as any other, and x
is drawn given u where it is wanted: for a draw x' of the prior,

.. math:: x = x' + K A^\top (A K A^\top)^{-1} (u - A x')

(Matheron's rule). Where no function has a covariance matrix, x itself is the latent vector, by its
precision.
"""

import math
from abc import abstractmethod
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import pytensor.tensor as pt
from pymc.pytensorf import compile as compile_graph
from pymc.pytensorf import make_shared_replacements
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from scipy.linalg.blas import dtrmv
from scipy.sparse import csr_array, hstack

from pymc_kameleon.latent_gp.gaussian.blocks import Blocks
from pymc_kameleon.latent_gp.gaussian.sites import (
    cholesky_overwriting,
    factorised,
    solve_lower,
)
from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import covariance_times
from pymc_kameleon.latent_gp.reader.affine_graph import AffineGraph, places_of, split_vector
from pymc_kameleon.latent_gp.reader.density_prior import Density, DensityPrior
from pymc_kameleon.latent_gp.reader.likelihood import NotFactorising
from pymc_kameleon.latent_gp.reader.linear_predictor import (
    element_names,
    name_of,
    predictions_of,
    shape_of,
)
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction
from pymc_kameleon.latent_gp.reader.precision_prior import PrecisionAt, Products
from pymc_kameleon.latent_gp.reader.prior import FreeVariable, ModelPrior, Prior, PriorAt
from pymc_kameleon.model.initial_points import reseed
from pymc_kameleon.model.model_function import IN_PYTHON, ModelFunction
from pymc_kameleon.model.transforms import unconstrained

ONCE = {"mode": IN_PYTHON}
"""For graphs that are evaluated when the step is made, or when data change."""

MOST_TOGETHER = 8
"""Linear predictors that an observation may depend on."""


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

    def transpose_times(self, y: np.ndarray) -> np.ndarray:
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
            z = others.root.solved(matrix)
            self.covariance += z @ z.T

    def _times(self, functions, others):
        """Return A x for the functions, and the other variables, None without them."""
        parts = [design.times(f) for design, f in zip(self._designs, functions, strict=True)]
        return sum(parts if others is None else [*parts, self._matrix @ others])

    def factorised_in_place(self) -> tuple[np.ndarray, "VectorAt"]:
        """Return the Cholesky factor of the covariance, in its place, and the free variables."""
        self._cholesky = cholesky_overwriting(self.covariance)
        return self._cholesky, self

    def factorised(self) -> PriorAt:
        """Return the prior of the predictors, and keep the covariance."""
        gaussian = factorised(self.mean, self.covariance, self._name)
        self._cholesky = gaussian.cholesky
        return PriorAt(gaussian, self)

    @cached_property
    def _factors(self) -> list[tuple[np.ndarray, FreeVariable]]:
        """Cholesky factor of each function's covariance, and its free variable."""
        found = []
        for function in self._functions:
            at = function.factorised(self._name)
            found.append((at.gaussian.cholesky, at.variable))
        return found

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Linear predictors (N,) where the free variables are `v` (M,)."""
        functions, end = [], 0
        for cholesky, variable in self._factors:
            begin, end = end, end + len(cholesky)
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
            function.mean + dtrmv(cholesky.T, rng.standard_normal(len(cholesky)), lower=0, trans=1)
            for function, (cholesky, _) in zip(self._functions, self._factors, strict=True)
        ]
        others = None if self._others is None else self._others.draw(rng)
        apart = u - self._times(draws, others)
        weights = solve_lower(self._cholesky, solve_lower(self._cholesky, apart), transposed=True)
        free, natural = [], []
        for draw, design, function, (_, variable) in zip(
            draws, self._designs, self._functions, self._factors, strict=True
        ):
            natural.append(draw + function.covariance @ design.transpose_times(weights))
            free.append(variable.to_variable(natural[-1]))
        if self._others is not None:
            moved = others + covariance_times(self._others.root, self._matrix.T @ weights)
            natural.append(moved)
            free.append(moved)
        return np.concatenate(free), np.concatenate(natural)


def _natural_parts(model, linear, shapes):
    """Return a vector, and what of it stands for a model's functions and other variables."""
    values = [model.rvs_to_values[v] for v in linear.variables]
    vector, parts = split_vector(values, shapes)
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


class PredictorPrior(Prior):
    """The prior of the linear predictors of a model, as `ModelPrior` is that of a function.

    `size` (N) predictors differ; `inverse` is which of them each element of the nodes is, N for
    those that are none; `blocks` are those of the likelihood. A subclass reads the `_others`, and
    says what follows from the entries of A. If `are_apart`, elements have predictors of their own,
    though they may be equal.
    """

    _others: DensityPrior | None = None
    blocks: Blocks | None = None

    def __init__(self, model, linear, shapes, name, shared, compile_kwargs, are_apart=False):
        self.name, self._are_apart = name, are_apart
        self._names = ", ".join(variable.name for variable in linear.variables)
        self._n_elements = sum(map(math.prod, shapes))
        self._shared = list(shared.values())
        vector, parts = _natural_parts(model, linear, shapes)
        nodes = [node.astype("float64").ravel() for node in linear.nodes]
        nodes = _in_values(model, nodes, parts)
        graph = pt.concatenate(clone_replace(nodes, shared, rebuild_strict=False))
        length = sum(math.prod(shape) for shape in map(shape_of, linear.nodes))
        self._whole = AffineGraph(model, graph, vector, self._n_elements, length, ONCE)
        matrices = self._whole.matrices_about(self._shared)
        self._kept, self.inverse = _distinct_rows(matrices, are_apart)
        self.size = len(self._kept)
        self._check_rank(matrices, linear, shapes)
        self._moves = not set(shared.values()).isdisjoint(ancestors([graph]))
        self._design = AffineGraph(
            model,
            graph[self._kept],
            vector,
            self._n_elements,
            self.size,
            compile_kwargs if self._moves else ONCE,
        )
        self._find_entries(matrices)
        self.refresh()

    def _find_entries(self, matrices):
        """Find which entries A and the precision have, where these are A's of all nodes."""
        self._design.find_groups([matrix[self._kept] for matrix in matrices])
        if self._others is not None:
            self._others.find_entries(self._shared)
        self._parts = None if self._moves else self._read_design()

    def _check_rank(self, matrices, linear, shapes):
        """Raise `Dependent` if there are too many linear predictors."""

    @abstractmethod
    def _read_design(self):
        """Return A at the present values."""

    @property
    def design(self):
        """A at the present values, or as it always is."""
        return self._read_design() if self._parts is None else self._parts

    @property
    def functions(self) -> list[ModelFunction]:
        """What the prior is computed with."""
        found = [self._design.function]
        return found + ([] if self._others is None else [self._others.gradient.function])

    def _not_positive_definite(self):
        return ValueError(
            f"The joint prior of {self._names} is improper, or their precision is not positive "
            "definite: give each a proper prior."
        )

    def check_data(self) -> None:
        """Check shapes for data that are new, and read the design again."""
        for function in self.functions:
            function.check_data(np.zeros(function.dim), f"The prior of {self.name}")
        matrices = self._whole.matrices_about(self._shared)
        if not np.array_equal(_distinct_rows(matrices, self._are_apart)[1], self.inverse):
            raise ValueError(
                "With the new data other observations have the same linear predictor than before, "
                "and the step was made for those: make a new one, step=LatentGPStep(...)."
            )
        self._find_entries(matrices)


class VectorPrior(PredictorPrior):
    """That of predictors to which functions with covariance matrices add, by a covariance."""

    def __init__(self, model, linear, shapes, name, shared, compile_kwargs):
        n = len(linear.functions)
        self._functions = []
        for variable, function in linear.functions:
            graph = None if function is None else model.replace_rvs_by_values([function])[0]
            own = name_of(model, variable, function)
            self._functions.append(ModelPrior(model, own, variable, graph, shared, compile_kwargs))
        if linear.others:
            self._others = DensityPrior(model, linear.others, shapes[n:], shared, compile_kwargs)
        self._ends = np.cumsum([math.prod(shape) for shape in shapes[:n]]).astype(int)
        super().__init__(model, linear, shapes, name, shared, compile_kwargs)

    def _check_rank(self, matrices, linear, shapes):
        """Raise `Dependent` if there are more linear predictors than variables tell apart."""
        matrices = [matrix.toarray() for matrix in matrices]
        if self._excess(matrices) == 0:
            return
        columns = places_of(shapes)[len(linear.functions) :]
        left = [self._excess([np.delete(m, own, axis=1) for m in matrices]) for own in columns]
        worst = linear.others[int(np.argmin(left))] if left else None
        raise Dependent(self.size, self._n_elements, worst)

    def _excess(self, matrices):
        """Return how many more distinct rows there are than their rank."""
        kept, _ = _distinct_rows([csr_array(matrix) for matrix in matrices])
        return len(kept) - (np.linalg.matrix_rank(matrices[0][kept]) if len(kept) else 0)

    def _read_design(self):
        _, matrix = self._design.matrix()
        designs = [Design(matrix[:, begin:end]) for begin, end in pairwise([0, *self._ends])]
        return designs, np.asfortranarray(matrix[:, self._ends[-1] :])

    @property
    def functions(self) -> list[ModelFunction]:
        """What the prior is computed with."""
        return [f.function for f in self._functions] + super().functions

    def evaluate(self) -> PriorAt:
        """Return the prior at the present values of the other variables, but do not keep it."""
        return self.unfactorised().factorised()

    def unfactorised(self) -> VectorAt:
        """Return what `evaluate` does, before anything is factorised."""
        designs, matrix = self.design
        functions = [function.unfactorised() for function in self._functions]
        others = None if self._others is None else self._others.at()
        return VectorAt(self.name, designs, matrix, functions, others)


class PrecisionPrior(PredictorPrior):
    """That of a latent vector without such functions, by its precision."""

    def __init__(self, model, linear, shapes, name, shared, compile_kwargs, are_apart=False):
        self._own = DensityPrior(model, linear.others, shapes, shared, compile_kwargs)
        self._others = self._own
        super().__init__(model, linear, shapes, name, shared, compile_kwargs, are_apart)

    def _find_entries(self, matrices):
        self._density: Density | None = None
        self._products: Products | None = None
        self._joined: Blocks | None = None
        super()._find_entries(matrices)

    def _read_design(self):
        return self._design.entries()[1]

    def evaluate(self) -> PriorAt:
        """Return the prior at the present values of the other variables, but do not keep it."""
        found = self.unfactorised()
        return PriorAt(found, found)

    def unfactorised(self) -> PrecisionAt:
        """Return the same once."""
        density = self._density
        if density is None:
            density = self._own.at()
            self._density = density if self._own.is_constant else None
        if self._products is None or self._joined is not self.blocks:
            rows, columns, _ = self._design.groups
            shape = (self.size, self._n_elements)
            together = np.zeros((0, 2), dtype=np.int64)
            if self.blocks is not None:
                together = self.blocks.together
            prior = density.pattern.rows, density.pattern.columns
            self._products = Products(rows, columns, shape, together, prior)
            self._joined = self.blocks
        return PrecisionAt(density, self._products, self.design)


class Dependent(ValueError):
    """More linear predictors than Gaussian variables tell apart; the most without `worst`."""

    def __init__(self, n_predictors: int, n_variables: int, worst) -> None:
        self.worst = worst
        super().__init__(
            f"{n_predictors} linear predictors of {n_variables} Gaussian variables are not "
            "independent. Give each observation an effect of its own, or take NUTS."
        )


def _distinct_rows(matrices, are_apart=False):
    """Return the first of each kind of rows that are not 0, and for each row which it is.

    All of them if they `are_apart`.
    """
    both = hstack(matrices, format="csr")
    both.sort_indices()
    scale = abs(both).max(axis=0).toarray().ravel()
    rounded = np.round(both.data / scale[both.indices], 9) + 0.0
    number: dict[bytes, int] = {}
    kept, inverse = [], np.empty(both.shape[0], dtype=np.int64)
    for i, (begin, end) in enumerate(pairwise(both.indptr)):
        is_entry = rounded[begin:end] != 0.0
        key = both.indices[begin:end][is_entry].tobytes() + rounded[begin:end][is_entry].tobytes()
        key = b"%d" % i if key and are_apart else key
        if key and key not in number:
            number[key] = len(kept)
            kept.append(i)
        inverse[i] = number[key] if key else -1
    return np.array(kept, dtype=np.int64), np.where(inverse < 0, len(kept), inverse)


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
        self.shapes = shapes = [np.shape(point[value.name]) for value in self.value_variables]
        self.has_covariance = bool(linear.functions)
        if self.has_covariance:
            self._read(model, linear, predictions, VectorPrior, compile_kwargs)
        else:
            try:
                self._read(model, linear, predictions, PrecisionPrior, compile_kwargs)
            except NotFactorising:
                kind = partial(PrecisionPrior, are_apart=True)
                self._read(model, linear, predictions, kind, compile_kwargs)
        self.predictions = None
        if predictions:
            self.predictions = Predictions(model, predictions, linear, shapes, self.shared)
        self.follow_only(set(self.shared.values()))

    def _read(self, model, linear, predictions, kind, compile_kwargs):
        self.prior = kind(model, linear, self.shapes, self.name, self.shared, compile_kwargs)
        self.size = self.prior.size
        argument = pt.tensor(self.name, dtype="float64", shape=(self.size,))
        replaced = self._nodes_of(model, argument, linear, self.shapes)
        own = linear.variables
        self._read_likelihood(
            model, replaced, own, predictions, argument, compile_kwargs, MOST_TOGETHER
        )
        self.prior.blocks = self.likelihood.blocks

    def element_name(self, i: int) -> str:
        """Name of the i-th of the values that a step keeps: variables if there is a precision."""
        if self.has_covariance:
            return super().element_name(i)
        return element_names(self.value_variables, self.shapes)[i]

    def refresh(self) -> bool:
        """Follow the other variables; return whether prior or likelihood changed."""
        changed = super().refresh()
        self.prior.blocks = self.likelihood.blocks
        return changed

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
