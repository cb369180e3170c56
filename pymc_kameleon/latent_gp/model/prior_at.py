"""The prior of a latent function, and its free variable, at some values of the other variables."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.linalg import lu_factor, lu_solve
from scipy.linalg.blas import dtrmv, dtrsv

from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, cholesky_overwriting, factorised

__all__ = ["FreeVariable", "PriorAt", "UnfactorisedPrior"]


@dataclass(frozen=True)
class FreeVariable:
    """The model's free variable v behind a latent function: f = offset + matrix v.

    Attributes
    ----------
    offset : array (N,) or None
    matrix : array (N, N) or None
        None if f is v.
    is_triangular : bool
        Whether the matrix is lower triangular; what is above its diagonal is then not read.
    """

    offset: np.ndarray | None
    matrix: np.ndarray | None
    is_triangular: bool
    _decomposition: list = field(default_factory=list, repr=False)

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
            return dtrsv(self.matrix.T, f - self.offset, lower=0, trans=1)
        if not self._decomposition:
            self._decomposition.append(lu_factor(self.matrix, check_finite=False))
        return lu_solve(self._decomposition[0], f - self.offset, check_finite=False)


class PriorAt(NamedTuple):
    """The prior of a latent function at some values of the other variables."""

    gaussian: Gaussian
    variable: FreeVariable


class UnfactorisedPrior(NamedTuple):
    """The same before its covariance is factorised.

    Attributes
    ----------
    mean : array (N,)
    covariance : array (N, N)
        In C order, and of nobody else.
    is_root : bool
        Whether f = mean + C v for the free variable v, where C is the Cholesky factor; else f is v.
    known : PriorAt or None
        Where the model has a factor of the covariance, in some other form.
    """

    mean: np.ndarray
    covariance: np.ndarray
    is_root: bool = False
    known: PriorAt | None = None

    def factorised_in_place(self) -> tuple[np.ndarray, FreeVariable]:
        """Return C (N, N), in place of the covariance on the diagonal and below, and v.

        Raises
        ------
        scipy.linalg.LinAlgError
            If the covariance is not positive definite. Of NaN the factor may be NaN.
        """
        if self.known is not None:
            return self.known.gaussian.cholesky, self.known.variable
        root = cholesky_overwriting(self.covariance)
        return root, self._variable(root)

    def factorised(self, name: str) -> PriorAt:
        """Return the prior of a function of this name, and keep the covariance.

        Raises
        ------
        ValueError
            As `gaussian_algebra.factorised`.
        """
        if self.known is not None:
            return self.known
        gaussian = factorised(self.mean, self.covariance, name)
        return PriorAt(gaussian, self._variable(gaussian.cholesky))

    def _variable(self, root):
        return FreeVariable(*((self.mean, root, True) if self.is_root else (None, None, False)))
