r"""The Gaussian of a latent function given its hyperparameters, and the map that carries f along.

With the prior N(m, C C^T) and Gaussian sites of precisions W and shifts nu, in coordinates
v = C^-1 (f - m),

.. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + C^\top W C = R^\top R,\quad
    B \mu = C^\top (\nu - W m),

and eta = R (v - mu) is standard normal under it. All of B's eigenvalues are at least 1, however
ill-conditioned K is, and it takes one factorisation beside that of K.
"""

from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, lapack
from scipy.linalg.blas import dtrmm, dtrmv, dtrsm, dtrsv

from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, Sites

__all__ = ["ConditionalGaussian", "unwhitened", "whitened"]


class ConditionalGaussian:
    """N(f; m, K) times Gaussian sites, normalised.

    Parameters
    ----------
    prior : Gaussian
        N(m, K).
    sites : Sites
        With no negative precision.

    Attributes
    ----------
    prior : Gaussian
    sites : Sites
    log_root_determinant : float
        log |L| for v = mu + L eta, L = R^-1: minus the sum of the logs of R's diagonal.

    Raises
    ------
    scipy.linalg.LinAlgError
        If a factor is not finite.
    """

    def __init__(self, prior: Gaussian, sites: Sites):
        self.prior, self.sites = prior, sites
        scaled = np.sqrt(sites.precision)[:, None] * prior.cholesky
        # Its transpose is upper triangular in Fortran order, as LAPACK takes it: U U^T in place.
        inner, _ = lapack.dlauum(scaled.T, lower=0, overwrite_c=1)
        np.einsum("ii->i", inner)[:] += 1.0
        self._factor, failed = lapack.dpotrf(inner, lower=0, clean=0, overwrite_a=1)
        diagonal = np.diagonal(self._factor)
        self.log_root_determinant = -float(np.log(diagonal).sum()) if not failed else np.nan
        if not np.isfinite(self.log_root_determinant):
            raise LinAlgError("The precision of the latent function is not finite.")
        shift = dtrmv(prior.cholesky.T, sites.shift - sites.precision * prior.mean, lower=0)
        self._whitened_mean = dtrsv(self._factor, dtrsv(self._factor, shift, trans=1))

    @property
    def size(self) -> int:
        """N."""
        return self.prior.size

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return unwhitened(self.prior, self._whitened_mean)

    def standardised(self, v: np.ndarray) -> np.ndarray:
        """Return eta (N,) where the whitened function is `v` (N,)."""
        return dtrmv(self._factor, v - self._whitened_mean)

    def restored(self, eta: np.ndarray) -> np.ndarray:
        """Return v (N,) where the standardised function is `eta` (N,)."""
        return self._whitened_mean + dtrsv(self._factor, eta)

    def directions(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws (n, N) of f about its mean."""
        normals = np.asfortranarray(rng.standard_normal((n, self.size)).T)
        solved = dtrsm(1.0, self._factor, normals, lower=0, overwrite_b=1)
        return dtrmm(1.0, self.prior.cholesky.T, solved, lower=0, trans_a=1, overwrite_b=1).T


def whitened(prior: Gaussian, f: np.ndarray) -> np.ndarray:
    """Return v = C^-1 (f - m), shape (N,), of a function `f` (N,) whose prior is N(m, C C^T)."""
    return dtrsv(prior.cholesky.T, f - prior.mean, lower=0, trans=1)


def unwhitened(prior: Gaussian, v: np.ndarray) -> np.ndarray:
    """Return f = m + C v, shape (N,)."""
    return prior.mean + dtrmv(prior.cholesky.T, v, lower=0, trans=1)
