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

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dsyrk, dtrmm, dtrmv, dtrsm

from pymc_kameleon.latent_gp.gaussian.blocks import Blocks, BlockSites
from pymc_kameleon.latent_gp.gaussian.sites import (
    Gaussian,
    SiteFactor,
    Sites,
    cholesky_overwriting,
    solve_lower,
)
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit, jit_inner
from pymc_kameleon.mcmc.linalg import dot, solve_upper_rows

LEAST_INFORMATION = 1e-8
"""Precision of a site, in units of the prior's, from which a division by S keeps 12 digits of f."""


class Conditional(ABC):
    """A latent Gaussian f ~ N(m, K) given Gaussian `sites`: their product q(f), normalised.

    Observations depend on its `predictors` (N,), which are f (M,) itself by default.

    - `whiten` takes f to v, which is a priori N(0, I).
    - `from_eta` takes `n_sets` sets of M standard normals, eta, to f under q, by v = mu + L eta;
      `to_eta` goes back, with a draw of eta where several give the same f.
    - `log_jacobian` is log |L L^T| / 2, and `log_ratio` is log N(f; m, K) - log q(f).
    - `draw` and `draws` give functions under q, `mean` (M,) is their mean, and `images` is what eta
      adds to the mean of the predictors; `adjoint` is the transpose of that, if it `has_adjoint`.
    """

    n_sets = 1
    has_adjoint = False
    mean: Any
    sites: Any
    log_jacobian: float

    def __init__(self, prior_mean, cholesky=None):
        self._prior_mean, self._cholesky = prior_mean, cholesky

    @property
    def size(self) -> int:
        """M."""
        return self._prior_mean.size

    def predictors(self, f: np.ndarray) -> np.ndarray:
        """Return what observations depend on (N,), where the function is `f` (M,)."""
        return f

    def whiten(self, f: np.ndarray) -> np.ndarray:
        """Return v (M,) of a function `f` (M,)."""
        return solve_lower(self._cholesky, f - self._prior_mean)

    def log_ratio(self, f: np.ndarray) -> float:
        """Log density of the prior less that of q, at `f` (M,)."""
        v = self.whiten(f)
        z = self._standardize(f, v)
        return 0.5 * float(z @ z - v @ v) + self.log_jacobian

    def to_eta(self, f: np.ndarray, rng: Any = None) -> np.ndarray:
        """Return eta (n_sets, M) of a function `f` (M,); `rng` draws what that leaves open."""
        return self._standardize(f, self.whiten(f))[None]

    def _standardize(self, f, v):
        """Return eta (M,) of `f` (M,), which is `v` whitened, where there is one set."""
        raise NotImplementedError

    @abstractmethod
    def from_eta(self, eta: np.ndarray) -> np.ndarray:
        """Return f (M,) for standard normals `eta` (n_sets, M)."""

    def at_predictors(self, u: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return f (M,) for an `eta` (n_sets, M) at which the predictors are known: `u` (N,)."""
        return u

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw f (M,)."""
        return self.from_eta(rng.standard_normal((self.n_sets, self.size)))

    def draws(self, normals: np.ndarray) -> np.ndarray:
        """Return functions f (n, M) of standard normals (n_sets, n, M)."""
        return self.mean + self.images(normals)

    @abstractmethod
    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return changes (n, N) of the predictors by standard normals `eta` (n_sets, n, M)."""

    def adjoint(self, slope: np.ndarray) -> np.ndarray:
        """Return the slope by eta (n_sets, M) of what has the `slope` (N,) by the predictors."""
        raise NotImplementedError


def conditional_of(prior, sites: Sites, blocks: Blocks | None) -> Conditional:
    """Multiply a prior, which is kept, by sites, those of `Blocks.packed` if there are blocks."""
    if not isinstance(prior, Gaussian):
        return prior.with_sites(sites, blocks)
    if blocks is not None:
        return BlockConditional(prior.mean, prior.cholesky, blocks.unpacked(sites))
    factor = SiteFactor(prior.covariance, sites.precision)
    return ConditionalGaussian(prior.mean, prior.cholesky, sites, factor)


def conditional_in_place(prior, sites: Sites, blocks: Blocks | None) -> tuple[Any, Conditional]:
    """Return the free variables and the conditional, in the memory of an unfactorised prior."""
    if not hasattr(prior, "covariance"):
        return prior, conditional_of(prior, sites, blocks)
    if blocks is not None:
        cholesky, variable = prior.factorised_in_place()
        return variable, BlockConditional(prior.mean, cholesky, blocks.unpacked(sites))
    # Before the memory of the covariance is the factor's.
    factor = SiteFactor(prior.covariance, sites.precision)
    cholesky, variable = prior.factorised_in_place()
    return variable, ConditionalGaussian(prior.mean, cholesky, sites, factor)


class ConditionalGaussian(Conditional):
    """A function with one site for each value, none of a negative precision.

    C is `cholesky` (N, N), in C order, not read above the diagonal; `factor` is that of A, for
    these sites.
    """

    n_sets = 2

    def __init__(
        self, prior_mean: np.ndarray, cholesky: np.ndarray, sites: Sites, factor: SiteFactor
    ) -> None:
        super().__init__(prior_mean, cholesky)
        self.sites, self._roots = sites, factor.roots
        self.log_jacobian = -factor.half_log_determinant
        self._slope, inverse_roots = np.empty((2, prior_mean.size))
        self._divides = _begin_into(
            sites.precision,
            sites.shift,
            prior_mean,
            factor.roots,
            factor.information,
            self._slope,
            inverse_roots,
        )
        self._factors = cholesky, factor.lower, factor.roots, inverse_roots, self._divides

    @property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return self._centre[0]

    def log_ratio(self, f: np.ndarray) -> float:
        """Log of N(v; 0, I) over q(v), where the function is `f` (N,)."""
        mean, residual = self._centre
        quadratic = _quadratic(f, self._prior_mean, mean, residual, self.sites.precision)
        return quadratic + self.log_jacobian

    def to_eta(self, f: np.ndarray, rng: Any = None) -> np.ndarray:
        """Draw eta (2, N), given that the function is `f` (N,)."""
        eta = rng.standard_normal((2, self.size))
        apart = f - self.from_eta(eta)
        eta[0] += solve_lower(self._cholesky, apart)
        eta[1] += self._roots * apart
        return eta

    def from_eta(self, eta: np.ndarray) -> np.ndarray:
        """Return f (N,) for standard normals `eta` (2, N)."""
        mean, residual, f = self._from_eta(eta)
        self._centre = mean, residual
        return f

    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return C L eta, shape (n, N), the changes of f by standard normals `eta` (2, n, N)."""
        own, of_sites = eta
        if not self._divides:
            own = own.copy()
        w, images = np.empty((2, *own.shape))
        _map_into(*self._factors, own, of_sites, w, images)
        return images

    @cached_property
    def _centre(self):
        """Mean of f, and r, each (N,)."""
        return self._from_eta(np.zeros((2, self.size)))[:2]

    def _from_eta(self, eta):
        out, room = np.empty((3, self.size)), np.empty((4, 2, self.size))
        _from_eta_into(*self._factors, self._slope, self._prior_mean, eta, room, out)
        return out


class BlockConditional(Conditional):
    r"""A function with sites of values that go together.

    What is said above of two sets of standard normals holds here of one. With T = S^T C,

    .. math:: q(v) = N(v; \mu, B^{-1}),\quad B = I + T^\top T = G G^\top,\quad
        B \mu = C^\top (\nu - W m),\quad v = \mu + G^{-\top} \eta.
    """

    def __init__(self, prior_mean: np.ndarray, cholesky: np.ndarray, sites: BlockSites) -> None:
        super().__init__(prior_mean, cholesky)
        self.sites = sites
        # In Fortran order T is its transpose, and the upper triangle the lower one.
        inner = dsyrk(1.0, sites.transpose_times(cholesky).T, lower=0).T
        inner[np.diag_indices_from(inner)] += 1.0
        self._factor = cholesky_overwriting(inner)
        self.log_jacobian = -float(np.log(np.diagonal(self._factor)).sum())
        if not math.isfinite(self.log_jacobian):
            raise LinAlgError("The precision of the latent function is not finite.")
        slope = dtrmv(cholesky.T, sites.shift - sites.times(prior_mean), lower=0)
        self._centre = solve_lower(self._factor, solve_lower(self._factor, slope), transposed=True)

    @property
    def mean(self) -> np.ndarray:
        """Mean (N,) of f."""
        return self._function(self._centre)

    def _standardize(self, f, v):
        return dtrmv(self._factor.T, v - self._centre, lower=0)

    def from_eta(self, eta: np.ndarray) -> np.ndarray:
        """Return f (N,) for standard normals `eta` (1, N)."""
        return self._function(self._centre + solve_lower(self._factor, eta[0], transposed=True))

    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return C G^-T eta, shape (n, N), the changes of f by standard normals `eta` (1, n, N)."""
        changes = dtrsm(1.0, self._factor.T, eta[0].T, lower=0)
        return dtrmm(1.0, self._cholesky.T, changes, lower=0, trans_a=1).T.copy()

    def _function(self, v):
        return self._prior_mean + dtrmv(self._cholesky.T, v, lower=0, trans=1)


@jit
def _begin_into(precision, shift, prior_mean, roots, information, slope, inverse_roots):
    """Write the slopes of the sites at the prior mean and 1 / S, 0 where sites say too little.

    Returns whether none is 0.
    """
    divides = True
    for i in range(roots.size):
        slope[i] = shift[i] - precision[i] * prior_mean[i]
        inverse_roots[i] = 1.0 / roots[i] if information[i] > LEAST_INFORMATION else 0.0
        divides = divides and information[i] > LEAST_INFORMATION
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
def _map_into(cholesky, factor, roots, inverse_roots, divides, own, of_sites, w, out):
    """Write w and C L [e; e'] for the rows e of `own`, overwritten, and e' of `of_sites`.

    A row of a matrix serves all of them before the next is read.
    """
    n, size = w.shape
    for i in range(size):
        for k in range(n):
            w[k, i] = roots[i] * dot(cholesky[i], own[k], i + 1) - of_sites[k, i]
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
                own[k, j] -= entry * cholesky[i, j]
    for i in range(size):
        if inverse_roots[i] == 0.0:
            for k in range(n):
                out[k, i] = dot(cholesky[i], own[k], i + 1)


@jit(fastmath=SIMD)
def _from_eta_into(
    cholesky, factor, roots, inverse_roots, divides, slope, prior_mean, eta, room, out
):
    """Write the mean of f, r, and f for standard normals `eta`."""
    own, of_sites, w, moved = room[0], room[1], room[2], room[3]
    size = roots.size
    for i in range(size):
        own[0, i], of_sites[0, i] = eta[0, i], eta[1, i]
        own[1, i] = 0.0
        of_sites[1, i] = slope[i] * inverse_roots[i]
    if not divides:
        for i in range(size):
            if inverse_roots[i] == 0.0:
                for j in range(i + 1):
                    own[1, j] += slope[i] * cholesky[i, j]
    _map_into(cholesky, factor, roots, inverse_roots, divides, own, of_sites, w, moved)
    for i in range(size):
        out[0, i] = prior_mean[i] + moved[1, i]
        out[1, i] = (slope[i] if inverse_roots[i] == 0.0 else 0.0) - roots[i] * w[1, i]
        out[2, i] = out[0, i] + moved[0, i]
