r"""The Gaussian of a latent function given its hyperparameters, and the map that carries f along.

With the prior N(m, K), K = C C^T, and Gaussian sites of precisions W = S^2 and shifts nu, in
coordinates v = C^-1 (f - m),

.. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + C^\top W C,\quad B \mu = C^\top (\nu - W m).

B is not factorised, but A = I + S K S, whose determinant is the same (Rasmussen & Williams 2006,
section 3.4.3), and

.. math:: B^{-1} x = x - C^\top S A^{-1} S C x.

So one factorisation of a matrix that is at hand does it all, beside that of K. The map from
standard normals is that of two sets of them, one for the prior and one for the sites,

.. math:: v = \mu + L \eta,\quad L = B^{-1} [I, C^\top S]
    = [I - C^\top S A^{-1} S C,\ C^\top S A^{-1}],\quad L L^\top = B^{-1},

which gives f - m = C v without a product with C: for standard normals e and e',

.. math:: C L [e; e'] = S^{-1} (w + e'),\quad w = A^{-1} (S C e - e'),

since S K S w = S C e - e' - w. And given v, eta is drawn from what q says of it: a draw eta', and
v' = mu + L eta', make eta = eta' + L^T B (v - v') (Matheron's rule). A large matrix is slow to
read, so what can be is computed for several vectors at a time.
"""

from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, lapack
from scipy.linalg.blas import dtrmv, dtrsv

from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, Sites
from pymc_kameleon.mcmc.linalg import dot, solve_upper_rows
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit

__all__ = ["ConditionalGaussian", "whitened"]

LEAST_ROOT = 1e-4
"""Entry of S from which a division by it keeps 12 digits of f; below it f is C v."""


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
        inner = np.empty_like(prior.covariance)
        _inner_into(prior.covariance, self._roots, inner)
        # The upper factor in Fortran order is the lower one in C order, without a copy.
        factor, failed = lapack.dpotrf(inner.T, lower=0, clean=0, overwrite_a=1)
        self._factor = factor.T
        self.log_root_determinant = -float(np.log(np.diagonal(self._factor)).sum())
        if failed or not np.isfinite(self.log_root_determinant):
            raise LinAlgError("The precision of the latent function is not finite.")
        shift = sites.shift - sites.precision * prior.mean
        self._pull = dtrmv(prior.cholesky.T, shift, lower=0)

    @property
    def size(self) -> int:
        """N."""
        return self.prior.size

    @property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return self._centre[1]

    def log_density(self, v: np.ndarray, f: np.ndarray) -> float:
        """Log q at `v` (N,), where the function is `f` (N,), without log(2 pi) N / 2."""
        whitened_mean, mean = self._centre
        apart, seen = v - whitened_mean, self._roots * (f - mean)
        return -0.5 * float(apart @ apart + seen @ seen) - self.log_root_determinant

    def standardised(self, v: np.ndarray, f: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw eta, shape (2, N), given `v` (N,), where the function is `f` (N,)."""
        whitened_mean, mean = self._centre
        eta = rng.standard_normal((2, self.size))
        (apart,), (of_function,) = self._mapped(eta[None, 0], eta[None, 1])
        eta[0] += v - whitened_mean - apart
        eta[1] += self._roots * (f - mean - of_function)
        return eta

    def restored(self, eta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return v (N,) and f (N,) where the standardised function is `eta` (2, N)."""
        own, of_sites = eta
        nothing = np.zeros(self.size)
        # The mean as well: a second vector takes little time.
        v, f = self._mapped(np.array([self._pull, own]), np.array([nothing, of_sites]))
        self._centre = whitened_mean, mean = v[0], self.prior.mean + f[0]
        return whitened_mean + v[1], mean + f[1]

    def directions(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws (n, N) of f about its mean."""
        own, of_sites = rng.standard_normal((2, n, self.size))
        return self._mapped(own, of_sites, whitens=False)[1]

    @cached_property
    def _centre(self):
        """Means of v and of f, each (N,): mu = B^-1 `pull`."""
        v, f = self._mapped(self._pull[None], np.zeros((1, self.size)))
        return v[0], self.prior.mean + f[0]

    def _mapped(self, own, of_sites, whitens=True):
        """L, if it `whitens`, and C L times the columns of [own^T; of_sites^T], shape (n, N)."""
        v, f = own.copy(), np.empty_like(own)
        divides = self._roots.min() > LEAST_ROOT
        whitens |= not divides
        _map_into(self.prior.cholesky, self._factor, self._roots, of_sites, whitens, divides, v, f)
        return v, f


def whitened(prior: Gaussian, f: np.ndarray) -> np.ndarray:
    """Return v = C^-1 (f - m), shape (N,), of a function `f` (N,) whose prior is N(m, C C^T)."""
    return dtrsv(prior.cholesky.T, f - prior.mean, lower=0, trans=1)


@jit(fastmath=SIMD)
def _inner_into(covariance, roots, out):
    """Write the lower triangle of A into that of `out`."""
    for i in range(roots.size):
        for j in range(i):
            out[i, j] = roots[i] * covariance[i, j] * roots[j]
        out[i, i] = 1.0 + roots[i] * covariance[i, i] * roots[i]


@jit(fastmath=SIMD)
def _map_into(cholesky, factor, roots, of_sites, whitens, divides, v, f):
    """Write L [e; e'] in place of the rows e of `v`, if it `whitens`, and C L [e; e'] into `f`."""
    size, n = roots.size, v.shape[0]
    # A row of a matrix serves all vectors before the next is read.
    for i in range(size):
        for k in range(n):
            f[k, i] = roots[i] * dot(cholesky[i], v[k], i + 1) - of_sites[k, i]
            f[k, i] = (f[k, i] - dot(factor[i], f[k], i)) / factor[i, i]
    solve_upper_rows(factor, size, f)
    if whitens:
        for i in range(size):
            for k in range(n):
                entry = roots[i] * f[k, i]
                for j in range(i + 1):
                    v[k, j] -= entry * cholesky[i, j]
    for i in range(size):
        for k in range(n):
            if divides:
                f[k, i] = (f[k, i] + of_sites[k, i]) / roots[i]
            else:
                f[k, i] = dot(cholesky[i], v[k], i + 1)
