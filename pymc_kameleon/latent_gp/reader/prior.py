"""The Gaussian prior of a latent function, as a function of a model's other variables."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.gradient import jacobian
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.random.basic import MvNormalRV, NormalRV
from scipy.linalg import LinAlgError, lu_factor, lu_solve
from scipy.linalg.blas import dtrmv

from pymc_kameleon.latent_gp.gaussian.sites import (
    Gaussian,
    cholesky_of,
    cholesky_overwriting,
    factorised,
    solve_lower,
)
from pymc_kameleon.latent_gp.reader.linear_predictor import (
    cholesky_factors,
    is_process,
    perturbed,
    shape_of,
)
from pymc_kameleon.model.model_function import IN_PYTHON, ModelFunction

PERTURBATIONS = (0.3, 0.03, 0.0)
"""Standard deviations of the values, about the model's start, at which a graph is taken apart: the
covariance need not be positive definite everywhere."""


@dataclass(frozen=True)
class FreeVariable:
    """The model's free variable v behind a latent function: f = offset + matrix v, or v itself.

    What is above the diagonal of a matrix that is lower triangular is not read.
    """

    offset: np.ndarray | None
    matrix: np.ndarray | None
    is_triangular: bool
    _decomposition: list = field(default_factory=list, repr=False)
    log_integral = 0.0

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Values f (N,) of the latent function where the free variable is `v` (N,)."""
        if self.matrix is None:
            return v.copy()
        if self.is_triangular:
            # The transpose is in Fortran order, so BLAS reads it where it is.
            return self.offset + dtrmv(self.matrix.T, v, lower=0, trans=1)
        return self.offset + self.matrix @ v

    def to_variable(self, f: np.ndarray) -> np.ndarray:
        """Free variable (N,) at which the latent function is `f` (N,)."""
        if self.matrix is None:
            return f.copy()
        if self.is_triangular:
            return solve_lower(self.matrix, f - self.offset)
        if not self._decomposition:
            self._decomposition.append(lu_factor(self.matrix, check_finite=False))
        return lu_solve(self._decomposition[0], f - self.offset, check_finite=False)

    def drawn(self, f: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the same with `f`, as nothing is left to be drawn."""
        return self.to_variable(f), f

    def is_at(self, f: np.ndarray, v: np.ndarray, dtype) -> bool:
        """Whether `v` (N,), recorded in a type, is what `to_variable` makes of `f` (N,)."""
        return np.array_equal(self.to_variable(f).astype(dtype), v.astype(dtype))


class FreeVariables(Protocol):
    """What there is behind a latent function at some values of the other variables.

    exp(`log_integral`) is by how much more than a Gaussian density the model's weighs.
    """

    log_integral: float

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Values f (N,) of the latent function where the free variables are `v` (M,)."""

    def is_at(self, f: np.ndarray, v: np.ndarray, dtype) -> bool:
        """Whether `v` (M,), recorded in a type, is what `f` (N,) was recorded as."""

    def drawn(self, f: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the free variables (M,), and what they stand for, where the function is `f` (N,)."""


class PriorAt(NamedTuple):
    """The prior of a latent function at some values of the other variables.

    `gaussian` is a `Gaussian`, or a `PrecisionAt`.
    """

    gaussian: Any
    variable: FreeVariables


class UnfactorisedPrior(NamedTuple):
    """A prior before factorisation; the caller owns its C-ordered covariance and may overwrite it.

    If it `is_whitened`, f = mean + C v for the free variable v, with the Cholesky factor C; else f
    is v. Where the model has a factor of the covariance in some other form, all is `known`.
    """

    mean: np.ndarray
    covariance: np.ndarray
    is_whitened: bool = False
    known: PriorAt | None = None

    def factorised_in_place(self) -> tuple[np.ndarray, FreeVariables]:
        """Return C (N, N), in place of the covariance on the diagonal and below, and v."""
        if self.known is not None:
            return self.known.gaussian.cholesky, self.known.variable
        cholesky = cholesky_overwriting(self.covariance)
        return cholesky, self._variable(cholesky)

    def factorised(self, name: str) -> PriorAt:
        """Return the prior of a function of this name, and keep the covariance."""
        if self.known is not None:
            return self.known
        gaussian = factorised(self.mean, self.covariance, name)
        return PriorAt(gaussian, self._variable(gaussian.cholesky))

    def _variable(self, cholesky):
        known = (self.mean, cholesky, True) if self.is_whitened else (None, None, False)
        return FreeVariable(*known)


class Prior(ABC):
    """A Gaussian prior that is a function of a model's other variables, and what it is `at` them.

    A subclass gives `evaluate`, and `_not_positive_definite`, the error where it is no Gaussian.
    """

    at: PriorAt

    @property
    def gaussian(self) -> Gaussian:
        """N(m, K) at the values of the other variables at the last `refresh`."""
        return self.at.gaussian

    @property
    def centre(self) -> np.ndarray:
        """What observations depend on (N,), at the prior mean."""
        return self.gaussian.predictors(self.gaussian.mean)

    def refresh(self) -> None:
        """Compute the prior again; ValueError if it is no Gaussian."""
        try:
            self.at = self.evaluate()
        except LinAlgError as error:
            raise self._not_positive_definite() from error

    @abstractmethod
    def evaluate(self) -> PriorAt:
        """Return the prior at the present values of the other variables, but do not keep it."""

    @abstractmethod
    def _not_positive_definite(self) -> ValueError:
        """Return the error that says what is not positive definite."""


class ModelPrior(Prior):
    """N(m, K) of a latent function f, and the map between f and the model's free variable.

    The free variable v is f itself (`pm.MvNormal`) or has a Gaussian prior of which f is an affine
    function (`pm.gp.Latent` samples v ~ N(0, I) and sets f = m + L v). It raises ValueError if v is
    no Gaussian, or f no affine function of it, or K is not positive definite. `function` is f in
    terms of the value variables, or None if it is v; `others` are those that do not belong to f,
    with their shared variables.
    """

    def __init__(self, model, name, variable, function, others, compile_kwargs):
        self.name = name
        value = model.rvs_to_values[variable]
        self.size = math.prod(shape_of(variable))
        _check_gaussian(model, variable)
        self._is_identity = function is None
        self._is_independent = isinstance(variable.owner.op, NormalRV)
        parameters = variable.owner.op.dist_params(variable.owner)
        mean, spread = model.replace_rvs_by_values([pt.as_tensor(p) for p in parameters])
        spread_shape = (self.size,) if self._is_independent else (self.size, self.size)
        given = [
            pt.broadcast_to(mean, (self.size,)),
            pt.broadcast_to(spread, spread_shape).flatten(),
        ]
        factor = None
        if not self._is_identity:
            factor = _covariance_cholesky(function, value, others, self.size)
        self._takes_covariance = factor is not None
        self._is_standard = _are_constants([mean, spread], [0.0, 1.0])
        if self._is_identity:
            affine = [value]
        elif factor is not None:
            # The factor is computed here, once: it is not in what these depend on.
            offset = clone_replace(function, {factor: pt.zeros_like(factor)}, rebuild_strict=False)
            # Nothing else compares its size with that of v, where data are new.
            covariance = pt.specify_shape(factor.owner.inputs[0], (self.size, self.size))
            affine = [offset, covariance.flatten()]
        else:
            affine = [function, jacobian(function, value, vectorize=True).flatten()]
        replaced = clone_replace([*given, *affine], replace=others, rebuild_strict=False)
        self.function = ModelFunction(model, replaced, value, self.size, compile_kwargs, apart=True)
        self._covariances = _factorised_matrices(function, others)
        self._check_affine()
        self.refresh()

    def evaluate(self) -> PriorAt:
        """Return the prior at the present values of the other variables, but do not keep it."""
        return self.unfactorised().factorised(self.name)

    def unfactorised(self) -> UnfactorisedPrior:
        """Return what `evaluate` does, as far as it is known without factorising a covariance."""
        mean, spread, offset, matrix = self._evaluate(np.zeros(self.size))
        if self._is_identity and not self._is_independent:
            covariance = self._own(spread).reshape(self.size, self.size)
            return UnfactorisedPrior(mean, covariance)
        if self._takes_covariance and self._is_standard:
            return UnfactorisedPrior(offset, self._own(matrix), is_whitened=True)
        known = self._by_factors(mean, spread, offset, matrix)
        return UnfactorisedPrior(known.gaussian.mean, known.gaussian.covariance, known=known)

    def _own(self, array):
        """Return an array that may be overwritten: a black box may keep the one that it returns."""
        return array.copy() if self.function.has_black_box else array

    def _by_factors(self, mean, spread, offset, matrix):
        if self._takes_covariance:
            matrix = cholesky_of(matrix)
        centre = mean if matrix is None else offset + matrix @ mean
        if self._is_independent:
            factor = np.diag(spread) if matrix is None else matrix * spread
            gaussian = self._from_factor(centre, factor)
        else:
            spread = spread.reshape(self.size, self.size)
            gaussian = factorised(centre, matrix @ spread @ matrix.T, self.name)
        is_triangular = matrix is not None and not np.any(np.triu(matrix, 1))
        return PriorAt(gaussian, FreeVariable(offset, matrix, is_triangular))

    def _from_factor(self, centre, factor):
        diagonal = np.diagonal(factor)
        if not np.all(np.isfinite(factor)):
            raise self._not_positive_definite()
        if np.any(np.triu(factor, 1)) or np.any(diagonal == 0):
            return factorised(centre, factor @ factor.T, self.name)
        return Gaussian(centre, factor @ factor.T, factor * np.sign(diagonal))

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Values f (N,) of the latent function where the free variable is `v` (N,)."""
        return self.at.variable.to_function(v)

    def to_variable(self, f: np.ndarray) -> np.ndarray:
        """Free variable (N,) at which the latent function is `f` (N,)."""
        return cast(FreeVariable, self.at.variable).to_variable(f)

    @property
    def functions(self) -> list[ModelFunction]:
        """What the prior is computed with."""
        return [self.function]

    def check_data(self) -> None:
        """Check shapes and indices for data that are new."""
        self.function.check_data(np.zeros(self.size), f"The prior of {self.name}")

    def _evaluate(self, v):
        """Mean and spread of v, and f and its Jacobian at `v`, or that times its transpose."""
        n = self.size
        lengths = [n, n if self._is_independent else n * n, n, n * n]
        if self._is_identity:
            lengths.pop()
        try:
            mean, spread, offset, *matrix = self.function.arrays(v, lengths)
        except LinAlgError as error:
            raise self._not_positive_definite() from error
        if self._is_identity:
            return mean, spread, None, None
        return mean, spread, offset, matrix[0].reshape(self.size, self.size)

    def _not_positive_definite(self):
        """Return the error that tells of the smallest eigenvalue of the matrix that failed."""
        for evaluate in self._covariances:
            try:
                factorised(np.zeros(self.size), evaluate(), self.name)
            except ValueError as error:
                return error
        return ValueError(f"The covariance of {self.name} is not finite or not positive definite.")

    def _check_affine(self):
        if self._is_identity or self._takes_covariance:
            return  # `_covariance_cholesky` has compared values of the function
        v, w = np.random.default_rng(0).standard_normal((2, self.size))
        (_, _, at_v, matrix), (_, _, at_w, other) = self._evaluate(v), self._evaluate(w)
        if not np.all(np.isfinite(matrix)):
            raise self._not_positive_definite()
        scale = np.abs(matrix).max() * self.size
        if not (
            np.allclose(matrix, other, atol=1e-9 * scale)
            and np.allclose(at_v - at_w, matrix @ (v - w), atol=1e-9 * scale)
        ):
            raise ValueError(
                f"{self.name} is not Gaussian a priori: it is no affine function of the normal "
                "variable behind it. Name the variable that is, vars=[...]."
            )


def _are_constants(variables, values) -> bool:
    """Whether variables are known to have these values everywhere."""
    try:
        found = [pt.get_underlying_scalar_constant_value(variable) for variable in variables]
    except NotScalarConstantError:
        return False
    return found == values


def _check_gaussian(model, variable):
    name = variable.name
    if not isinstance(variable.owner.op, NormalRV | MvNormalRV):
        kind = type(variable.owner.op).__name__.removesuffix("RV")
        if is_process(model, variable, model.initial_point()):
            raise ValueError(
                f"{name} is distributed as {kind}, known by its density and not by a covariance "
                f"matrix. Take LatentGPStep([{name}]), with fixed hyperparameters too."
            )
        raise ValueError(
            f"{name} is not Gaussian a priori: it is distributed as {kind}. This step takes "
            "pm.gp.Latent(...).prior(...), pm.MvNormal, or an affine function of pm.Normal."
        )
    if model.rvs_to_transforms.get(variable) is not None:
        raise ValueError(f"{name} has a transform, so it is no Gaussian. Leave the transform out.")


def _factorised_matrices(function, others):
    """Functions without arguments that return the matrices whose Cholesky factors f needs."""
    if function is None:
        return []
    matrices = [factor.owner.inputs[0] for factor in cholesky_factors([function])]
    replaced = clone_replace(matrices, replace=others, rebuild_strict=False)
    return [matrix.eval for matrix in replaced]


def _covariance_cholesky(function, value, others, size):
    """Return L, the Cholesky factor of a matrix in the model, if f is offset + L v; else None.

    So it is for `pm.gp.Latent`, and the covariance of f is then known without a product.
    """
    factors = cholesky_factors([function])
    if len(factors) != 1 or value in ancestors(factors):
        return None
    (cholesky,) = factors
    operation = getattr(cholesky.owner.op, "core_op", cholesky.owner.op)
    if cholesky.ndim != 2 or not operation.lower:
        return None
    offset = clone_replace(function, {cholesky: pt.zeros_like(cholesky)}, rebuild_strict=False)
    compare = pytensor.function(
        [value, *others], [function, offset, cholesky], mode=IN_PYTHON, on_unused_input="ignore"
    )
    rng = np.random.default_rng(0)
    v = rng.standard_normal(size).astype(value.dtype)
    for scale in PERTURBATIONS:
        points = [perturbed(shared.get_value(), scale, rng) for shared in others.values()]
        try:
            found, start, factor = compare(v, *points)
        except (LinAlgError, ValueError):
            continue
        if np.all(np.isfinite(found)):
            scale = np.abs(factor).max(initial=1.0) * len(v)
            rtol = 1e-9 if found.dtype == np.float64 else 1e-4
            is_factor = np.allclose(found, start + factor @ v, rtol=rtol, atol=rtol * scale)
            return cholesky if is_factor else None
    return None
