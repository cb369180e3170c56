r"""The Gaussian of a latent function given its hyperparameters, and the map that carries f along.

With the prior N(m, K), K = C C^T, and Gaussian sites of precisions W = S^2 and shifts nu, in
coordinates v = C^-1 (f - m),

.. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + C^\top W C,\quad B \mu = C^\top (\nu - W m).

B is not factorised, but A = I + S K S, whose determinant is the same (Rasmussen & Williams 2006,
section 3.4.3), and

.. math:: B^{-1} x = x - C^\top S A^{-1} S C x.

So one factorisation of a matrix that is at hand does it all, beside that of K. The map from
standard normals is that of two sets of them, one for the prior and one for the sites,

.. math:: v = \mu + L \eta,\quad L = B^{-1} [I, C^\top S],\quad L L^\top = B^{-1},

and given v, eta is drawn from what q says of it: a draw eta', and v' = mu + L eta', make
eta = eta' + L^T B (v - v') (Matheron's rule).
"""

from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, lapack
from scipy.linalg.blas import dsymv, dtrmv, dtrsv

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
        log |L L^T| / 2 = -log |B| / 2.

    Raises
    ------
    scipy.linalg.LinAlgError
        If a factor is not finite.
    """

    def __init__(self, prior: Gaussian, sites: Sites):
        self.prior, self.sites = prior, sites
        self._roots = np.sqrt(sites.precision)
        inner = self._roots[:, None] * prior.covariance
        inner *= self._roots
        np.einsum("ii->i", inner)[:] += 1.0
        # Symmetric: its transpose is the same in the order that LAPACK takes.
        self._factor, failed = lapack.dpotrf(inner.T, lower=1, clean=0, overwrite_a=1)
        self.log_root_determinant = -float(np.log(np.diagonal(self._factor)).sum())
        if failed or not np.isfinite(self.log_root_determinant):
            raise LinAlgError("The precision of the latent function is not finite.")
        shift = sites.shift - sites.precision * prior.mean
        self._whitened_mean = self._solved(dtrmv(prior.cholesky.T, shift, lower=0))

    @property
    def size(self) -> int:
        """N."""
        return self.prior.size

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return unwhitened(self.prior, self._whitened_mean)

    def log_density(self, v: np.ndarray) -> float:
        """Log q at `v` (N,), without log(2 pi) N / 2."""
        apart = v - self._whitened_mean
        seen = self._roots * dtrmv(self.prior.cholesky.T, apart, lower=0, trans=1)
        return -0.5 * float(apart @ apart + seen @ seen) - self.log_root_determinant

    def standardised(self, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw eta, shape (2, N), given the whitened function `v` (N,)."""
        eta = rng.standard_normal((2, self.size))
        apart = v - self.restored(eta)
        eta[0] += apart
        eta[1] += self._roots * dtrmv(self.prior.cholesky.T, apart, lower=0, trans=1)
        return eta

    def restored(self, eta: np.ndarray) -> np.ndarray:
        """Return v (N,) where the standardised function is `eta` (2, N)."""
        pulled = dtrmv(self.prior.cholesky.T, self._roots * eta[1], lower=0)
        return self._whitened_mean + self._solved(eta[0] + pulled)

    def directions(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws (n, N) of f about its mean: C e - K S A^-1 (S C e + e') for normal e and e'."""
        # Products with a few vectors are faster one by one than all at a time.
        draws = np.empty((n, self.size))
        for draw, (own, of_sites) in zip(
            draws, rng.standard_normal((n, 2, self.size)), strict=True
        ):
            of_prior = dtrmv(self.prior.cholesky.T, own, lower=0, trans=1)
            solved = self._roots * self._inner_solved(self._roots * of_prior + of_sites)
            draw[:] = of_prior - dsymv(1.0, self.prior.covariance.T, solved)
        return draws

    def _solved(self, x):
        """B^-1 x."""
        upper = self.prior.cholesky.T
        solved = self._inner_solved(self._roots * dtrmv(upper, x, lower=0, trans=1))
        return x - dtrmv(upper, self._roots * solved, lower=0)

    def _inner_solved(self, x):
        """A^-1 x."""
        return dtrsv(self._factor, dtrsv(self._factor, x, lower=1), lower=1, trans=1)


def whitened(prior: Gaussian, f: np.ndarray) -> np.ndarray:
    """Return v = C^-1 (f - m), shape (N,), of a function `f` (N,) whose prior is N(m, C C^T)."""
    return dtrsv(prior.cholesky.T, f - prior.mean, lower=0, trans=1)


def unwhitened(prior: Gaussian, v: np.ndarray) -> np.ndarray:
    """Return f = m + C v, shape (N,)."""
    return prior.mean + dtrmv(prior.cholesky.T, v, lower=0, trans=1)
