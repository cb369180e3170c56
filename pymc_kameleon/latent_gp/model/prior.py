"""The Gaussian prior of a latent function, as a function of a model's other variables."""

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import jacobian
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.basic import MvNormalRV, NormalRV
from scipy.linalg import LinAlgError, lu_factor, lu_solve
from scipy.linalg.blas import dtrsv

from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, factorised
from pymc_kameleon.model.model_function import ModelFunction

__all__ = ["ModelPrior"]


class ModelPrior:
    """N(m, K) of a latent function f, and the map between f and the model's free variable.

    The free variable v is f itself (`pm.MvNormal`) or has a Gaussian prior of which f is an affine
    function (`pm.gp.Latent` samples v ~ N(0, I) and sets f = m + L v).

    Parameters
    ----------
    model : pymc.Model
    name : str
        Of the latent function.
    variable : random variable
        v, of shape (N,).
    function : tensor variable or None
        f in terms of the model's value variables; None if it is v.
    others : dict
        Value variables that do not belong to f -> shared variables.
    compile_kwargs : dict or None
        As for `ModelFunction`.

    Attributes
    ----------
    gaussian : Gaussian
        Of f, at the present values of the other variables.

    Raises
    ------
    ValueError
        If v is no Gaussian, or f no affine function of it, or K is not positive definite.
    """

    def __init__(self, model, name, variable, function, others, compile_kwargs):
        self.name = name
        value = model.rvs_to_values[variable]
        self.size = int(np.prod(variable.shape.eval()))
        _check_gaussian(model, variable)
        self._is_identity = function is None
        self._is_independent = isinstance(variable.owner.op, NormalRV)
        parameters = variable.owner.op.dist_params(variable.owner)
        mean, spread = model.replace_rvs_by_values([pt.as_tensor(p) for p in parameters])
        if not self._is_independent:
            spread_length = (self.size, self.size)
        else:
            spread_length = (self.size,)
        outputs = [
            pt.broadcast_to(mean, (self.size,)),
            pt.broadcast_to(spread, spread_length).flatten(),
        ]
        if self._is_identity:
            outputs.append(value)
        else:
            outputs += [function, jacobian(function, value, vectorize=True).flatten()]
        replaced = clone_replace(outputs, replace=others, rebuild_strict=False)
        self._function = ModelFunction(model, replaced, value, self.size, compile_kwargs)
        self._covariances = _factorised_matrices(function, others)
        self._n_outputs = sum(self._lengths())
        self._check_affine()
        self.refresh()

    def _lengths(self):
        n = self.size
        lengths = [n, n if self._is_independent else n * n]
        return [*lengths, n] if self._is_identity else [*lengths, n, n * n]

    @property
    def function(self) -> ModelFunction:
        """The compiled function behind the moments."""
        return self._function

    def refresh(self) -> None:
        """Compute the prior at the present values of the other variables.

        Raises
        ------
        ValueError
            If the covariance is not positive definite.
        """
        mean, spread, offset, matrix = self._evaluate(np.zeros(self.size))
        n = self.size
        if self._is_independent:
            factor = np.diag(spread) if matrix is None else matrix * spread
            self.gaussian = self._from_factor(mean, offset, matrix, factor)
        else:
            covariance = spread.reshape(n, n)
            centre = mean
            if matrix is not None:
                covariance = matrix @ covariance @ matrix.T
                centre = offset + matrix @ mean
            self.gaussian = factorised(centre, covariance, self.name)
        self._offset, self._matrix = offset, matrix
        self._is_triangular = matrix is not None and not np.any(np.triu(matrix, 1))
        self._decomposition = None

    def _from_factor(self, mean, offset, matrix, factor):
        centre = mean if matrix is None else offset + matrix @ mean
        diagonal = np.diagonal(factor)
        if not np.all(np.isfinite(factor)):
            raise self._not_positive_definite()
        if np.any(np.triu(factor, 1)) or np.any(diagonal == 0):
            return factorised(centre, factor @ factor.T, self.name)
        return Gaussian(centre, factor @ factor.T, factor * np.sign(diagonal))

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Values f (N,) of the latent function where the free variable is `v` (N,)."""
        return v.copy() if self._matrix is None else self._offset + self._matrix @ v

    def to_variable(self, f: np.ndarray) -> np.ndarray:
        """Free variable (N,) at which the latent function is `f` (N,)."""
        if self._matrix is None:
            return f.copy()
        if self._is_triangular:
            # The transpose is in Fortran order, so BLAS reads it where it is.
            return dtrsv(self._matrix.T, f - self._offset, lower=0, trans=1)
        if self._decomposition is None:
            self._decomposition = lu_factor(self._matrix, check_finite=False)
        return lu_solve(self._decomposition, f - self._offset, check_finite=False)

    def _evaluate(self, v):
        """Mean and spread of v, and f and its Jacobian at `v` (None if f is v)."""
        out = np.empty(self._n_outputs)
        try:
            self._function.into(v, out)
        except LinAlgError as error:
            raise self._not_positive_definite() from error
        parts = np.split(out, np.cumsum(self._lengths())[:-1])
        if self._is_identity:
            return parts[0], parts[1], None, None
        return parts[0], parts[1], parts[2], parts[3].reshape(self.size, self.size)

    def _not_positive_definite(self):
        """Return the error that tells of the smallest eigenvalue of the matrix that failed."""
        for evaluate in self._covariances:
            try:
                factorised(np.zeros(self.size), evaluate(), self.name)
            except ValueError as error:
                return error
        return ValueError(f"The covariance of {self.name} is not finite or not positive definite.")

    def _check_affine(self):
        if self._is_identity:
            return
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


def _check_gaussian(model, variable):
    name = variable.name
    if not isinstance(variable.owner.op, NormalRV | MvNormalRV):
        kind = type(variable.owner.op).__name__.removesuffix("RV")
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
    matrices = []
    for variable in ancestors([function]):
        if variable.owner is not None:
            operation = getattr(variable.owner.op, "core_op", variable.owner.op)
            if type(operation).__name__ == "Cholesky":
                matrices.append(variable.owner.inputs[0])
    replaced = clone_replace(matrices, replace=others, rebuild_strict=False)
    return [matrix.eval for matrix in replaced]
