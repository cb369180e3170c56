r"""The Gaussian of a latent function given its hyperparameters, and the map that carries f along.

With the prior N(m, K), K = C C^T, and Gaussian sites of precisions W = S^2 and shifts nu, in
coordinates v = C^-1 (f - m),

.. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + C^\top W C,\quad B \mu = C^\top s,\quad
    s = \nu - W m.

B is not factorised, but A = I + S K S, whose determinant is the same (Rasmussen & Williams 2006,
section 3.4.3), and

.. math:: B^{-1} x = x - C^\top S A^{-1} S C x.

So one factorisation of a matrix that is at hand does it all, beside that of K. The map from
standard normals is that of two sets of them, one for the prior and one for the sites,

.. math:: v = \mu + L \eta,\quad L = B^{-1} [I, C^\top S]
    = [I - C^\top S A^{-1} S C,\ C^\top S A^{-1}],\quad L L^\top = B^{-1}.

A large matrix is slow to read, so v and its product with C are not computed: for eta = [e; e'],

.. math:: C L \eta = S^{-1} (w + e'),\quad w = A^{-1} (S C e - e'),

since S K S w = S C e - e' - w. The mean of f - m is g = C L [0; S^-1 s], and mu = C^T r for
r = s - W g, which is -S w for that eta. If u is what s has where S is too small to divide by, that
eta is [C^T u; S^-1 (s - u)] and r = u - S w, and there f is m + C v. So for h = f - m - g

.. math:: \log\frac{N(v; 0, I)}{q(v)}
    = \frac{1}{2} h^\top W h - \big(h + \tfrac{1}{2} g\big)^\top r - \frac{1}{2} \log |B|.

Given f, eta is drawn from what q says of it: a draw eta', and f' where it takes f, make
eta = eta' + L^T B (v - v') = eta' + [C^-1 (f - f'); S (f - f')] (Matheron's rule).
"""

from functools import cached_property

import numpy as np

from pymc_kameleon.latent_gp.gaussian_sites import Gaussian, SiteFactor, Sites, solve_root
from pymc_kameleon.mcmc.linalg import dot, solve_upper_rows
from pymc_kameleon.mcmc.numba_bridge import SIMD, jit, jit_inner

__all__ = ["ConditionalGaussian"]

LEAST_TOLD = 1e-8
"""What a site says beside the prior from which a division by S keeps 12 digits of the function."""


class ConditionalGaussian:
    """N(f; m, C C^T) times Gaussian sites, normalised.

    m is `prior_mean` (N,), and C is `root` (N, N), in C order, not read above the diagonal. The
    `sites` have no negative precision, and `inner` is A, for the covariance and these sites.
    """

    def __init__(
        self, prior_mean: np.ndarray, root: np.ndarray, sites: Sites, inner: SiteFactor
    ) -> None:
        self._prior_mean, self._root, self.sites, self._roots = prior_mean, root, sites, inner.roots
        self.log_root_determinant = -inner.half_log_determinant  # log |L L^T| / 2 = -log |B| / 2
        self._pull, inverse_roots = np.empty((2, prior_mean.size))
        self._divides = _begin(
            sites.precision,
            sites.shift,
            prior_mean,
            inner.roots,
            inner.told,
            self._pull,
            inverse_roots,
        )
        self._factors = root, inner.lower, inner.roots, inverse_roots, self._divides

    @classmethod
    def of(cls, prior: Gaussian, sites: Sites) -> "ConditionalGaussian":
        """Multiply a prior, which is kept, by sites."""
        inner = SiteFactor(prior.covariance, sites.precision)
        return cls(prior.mean, prior.cholesky, sites, inner)

    @property
    def size(self) -> int:
        """N."""
        return self._pull.size

    @property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return self._centre[0]

    def whitened(self, f: np.ndarray) -> np.ndarray:
        """Return v = C^-1 (f - m), shape (N,), of a function `f` (N,)."""
        return solve_root(self._root, f - self._prior_mean)

    def log_ratio(self, f: np.ndarray) -> float:
        """Log of N(v; 0, I) over q(v), where the function is `f` (N,)."""
        mean, residual = self._centre
        quadratic = _quadratic(f, self._prior_mean, mean, residual, self.sites.precision)
        return quadratic + self.log_root_determinant

    def standardised(self, f: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw eta, shape (2, N), given that the function is `f` (N,)."""
        eta = rng.standard_normal((2, self.size))
        apart = f - self.restored(eta)
        eta[0] += solve_root(self._root, apart)
        eta[1] += self._roots * apart
        return eta

    def restored(self, eta: np.ndarray) -> np.ndarray:
        """Return f (N,) where the standardised function is `eta` (2, N)."""
        mean, residual, f = self._restored(eta)
        self._centre = mean, residual
        return f

    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return C L eta, shape (n, N), the changes of f by standardised `eta` (2, n, N)."""
        own, of_sites = eta
        if not self._divides:
            own = own.copy()
        w, images = np.empty((2, *own.shape))
        _map_into(*self._factors, own, of_sites, w, images)
        return images

    @cached_property
    def _centre(self):
        """Mean of f, and r, each (N,)."""
        return self._restored(np.zeros((2, self.size)))[:2]

    def _restored(self, eta):
        out, room = np.empty((3, self.size)), np.empty((4, 2, self.size))
        _restore_into(*self._factors, self._pull, self._prior_mean, eta, room, out)
        return out


@jit
def _begin(precision, shift, prior_mean, roots, told, pull, inverse_roots):
    """Write s, and 1 / S or 0 where S may not divide; return whether all of it may."""
    divides = True
    for i in range(roots.size):
        pull[i] = shift[i] - precision[i] * prior_mean[i]
        inverse_roots[i] = 1.0 / roots[i] if told[i] > LEAST_TOLD else 0.0
        divides = divides and told[i] > LEAST_TOLD
    return divides


@jit(fastmath=SIMD)
def _quadratic(f, prior_mean, mean, residual, precision):
    """Log ratio of the densities of v, without the determinant."""
    total = 0.0
    for i in range(f.size):
        h, g = f[i] - mean[i], mean[i] - prior_mean[i]
        total += 0.5 * precision[i] * h * h - (h + 0.5 * g) * residual[i]
    return total


@jit_inner(fastmath=SIMD)
def _map_into(root, factor, roots, inverse_roots, divides, own, of_sites, w, out):
    """Write w and C L [e; e'] for the rows e of `own` and e' of `of_sites`.

    `own` is overwritten unless all of S `divides`. A row of a matrix serves all of them before the
    next is read.
    """
    n, size = w.shape
    for i in range(size):
        for k in range(n):
            w[k, i] = roots[i] * dot(root[i], own[k], i + 1) - of_sites[k, i]
            w[k, i] = (w[k, i] - dot(factor[i], w[k], i)) / factor[i, i]
    solve_upper_rows(factor, size, w)
    for k in range(n):
        for i in range(size):
            out[k, i] = (w[k, i] + of_sites[k, i]) * inverse_roots[i]
    if divides:
        return
    for i in range(size):  # v = e - C^T S w
        for k in range(n):
            entry = roots[i] * w[k, i]
            for j in range(i + 1):
                own[k, j] -= entry * root[i, j]
    for i in range(size):
        if inverse_roots[i] == 0.0:
            for k in range(n):
                out[k, i] = dot(root[i], own[k], i + 1)


@jit(fastmath=SIMD)
def _restore_into(root, factor, roots, inverse_roots, divides, pull, prior_mean, eta, room, out):
    """Write the mean of f, r, and f where the standardised function is `eta`.

    The mean takes little time as a second vector.
    """
    own, of_sites, w, moved = room[0], room[1], room[2], room[3]
    size = roots.size
    for i in range(size):
        own[0, i], of_sites[0, i] = eta[0, i], eta[1, i]
        own[1, i] = 0.0
        of_sites[1, i] = pull[i] * inverse_roots[i]
    if not divides:
        for i in range(size):
            if inverse_roots[i] == 0.0:
                for j in range(i + 1):
                    own[1, j] += pull[i] * root[i, j]
    _map_into(root, factor, roots, inverse_roots, divides, own, of_sites, w, moved)
    for i in range(size):
        out[0, i] = prior_mean[i] + moved[1, i]
        out[1, i] = (pull[i] if inverse_roots[i] == 0.0 else 0.0) - roots[i] * w[1, i]
        out[2, i] = out[0, i] + moved[0, i]
