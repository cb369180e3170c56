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
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve

from pymc_kameleon.gp.covariances import COVARIANCES
from pymc_kameleon.gp.sparse_gp import basis_functions
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, SiteFactor, Sites, solve_root
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit, jit_inner
from pymc_kameleon.mcmc.coordinates import Standardization, standardize
from pymc_kameleon.mcmc.exponential import exp
from pymc_kameleon.mcmc.linalg import dot, solve_upper_rows

LEAST_TOLD = 1e-8
"""What a site says beside the prior from which a division by S keeps 12 digits of the function."""


class ConditionalGaussian:
    """N(f; m, C C^T) times Gaussian sites, normalised.

    C is `root` (N, N), in C order, not read above the diagonal; `inner` is A, for these sites, none
    of whose precisions is negative.
    """

    n_sets = 2
    """Of standard normals."""

    def __init__(
        self, prior_mean: np.ndarray, root: np.ndarray, sites: Sites, inner: SiteFactor
    ) -> None:
        self._prior_mean, self._root, self.sites, self._roots = prior_mean, root, sites, inner.roots
        self.log_root_determinant = -inner.half_log_determinant  # log |L L^T| / 2 = -log |B| / 2
        self._pull, inverse_roots = np.empty((2, prior_mean.size))
        self._divides = _begin_into(
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

    @property
    def of_predictors(self):
        """The Gaussian of what observations depend on, which is the function."""
        return self

    def predictors(self, f: np.ndarray) -> np.ndarray:
        """Return what observations depend on, which is `f` (N,)."""
        return f

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

    def restored_after(self, f: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return the function for the `eta` (2, N) at which it is known to be `f` (N,)."""
        return f

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Draw f (N,)."""
        return self.restored(rng.standard_normal((self.n_sets, self.size)))

    def draws(self, normals: np.ndarray) -> np.ndarray:
        """Return functions f (n, N) of standard normals (2, n, N)."""
        return self.mean + self.images(normals)

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
def _begin_into(precision, shift, prior_mean, roots, told, pull, inverse_roots):
    """Write the slopes of the sites at the prior mean and 1 / S, 0 where sites say too little.

    Returns whether none is 0.
    """
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
    """Write w and C L [e; e'] for the rows e of `own`, overwritten, and e' of `of_sites`.

    A row of a matrix serves all of them before the next is read.
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
    """Write the mean of f, r, and f where the standardised function is `eta`."""
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


SMALLEST_PRECISION = 1e-10
"""Share of a pilot's mean precision below which a site says nothing, and its logarithm too much."""

LENGTHSCALE, LINEAR_VARIANCE, NOISE_VARIANCE = 2.0, 4.0, 0.01
"""Of the regression, in standardised coordinates, relative to the variance of a parameter."""


class SiteFunction(NamedTuple):
    """Sites whose parameters are a Gaussian process of standardised hyperparameters u.

    The basis functions are 1, u, and a radial one at each of `pilots` (d, P), standardised, over
    the lengthscale. `precision` and `shift` (b, N) are coefficients of the logs of the precisions,
    and of the shifts and what else sites of blocks have, b = 1 for constant sites, else 1 + d + P.
    Where `has_means` (1,) the second are those of the means, which do not change with the noise of
    a normal likelihood. Further out than `radius` (1,) the sites are those at that distance in the
    same direction: nothing is extrapolated.
    """

    coordinates: Standardization
    radius: np.ndarray
    pilots: np.ndarray
    precision: np.ndarray
    shift: np.ndarray
    has_means: np.ndarray

    @property
    def varying(self) -> dict[str, int]:
        """Axes that have no fixed length, by field."""
        return {"pilots": 1, "precision": 0, "shift": 0}

    @property
    def is_consistent(self) -> bool:
        """Whether there is a coefficient for each basis function."""
        n = len(self.precision)
        return n == len(self.shift) and (n == 1 or n == 1 + sum(self.pilots.shape))

    def __call__(self, x: np.ndarray) -> Sites:
        """Sites at the hyperparameters `x` (d,)."""
        if len(self.precision) == 1:
            return Sites(np.exp(self.precision[0]), self.shift[0])
        found = Sites(np.zeros(self.precision.shape[1]), np.zeros(self.shift.shape[1]))
        _sites_into(*self, x, np.empty_like(x), found.precision, found.shift)
        return found


@jit(fastmath=SIMD)
def _sites_into(coordinates, radius, pilots, precision, shift, has_means, x, u, found, shifts):
    """Write precisions and shifts at `x` (d,) in place of zeros; u (d,) is overwritten."""
    dim = x.size
    standardize(coordinates, x, u)
    distance = math.sqrt(dot(u, u, dim))
    if distance > radius[0]:
        for k in range(dim):
            u[k] *= radius[0] / distance
    for j in range(precision.shape[0]):
        weight = 1.0
        if j > dim:
            squared = 0.0
            for k in range(dim):
                squared += (u[k] / LENGTHSCALE - pilots[k, j - dim - 1]) ** 2
            weight = exp(-0.5 * squared)
        elif j > 0:
            weight = u[j - 1]
        for i in range(found.size):
            found[i] += weight * precision[j, i]
        for i in range(shifts.size):
            shifts[i] += weight * shift[j, i]
    for i in range(found.size):
        found[i] = exp(found[i])
        if has_means[0]:
            shifts[i] *= found[i]


def _radial(u, pilots):
    """Squared-exponential basis functions (n, P) of the columns of `u` (d, n)."""
    out = np.empty((u.shape[1], 1, pilots.shape[1]))
    basis_functions(COVARIANCES["gaussian"], u / LENGTHSCALE, pilots, out)
    return out[:, 0]


def constant_sites(sites: Sites, dim: int) -> SiteFunction:
    """Return sites that are the same at all hyperparameters (d,)."""
    with np.errstate(divide="ignore"):
        logs = np.log(sites.precision)[None]
    return SiteFunction(
        Standardization(np.zeros(dim), np.eye(dim)),
        np.zeros(1),
        np.zeros((dim, 0)),
        logs,
        sites.shift[None].copy(),
        np.zeros(1, dtype=np.bool_),
    )


def fit_sites(
    points: np.ndarray,
    precision: np.ndarray,
    shift: np.ndarray,
    coordinates: Standardization,
    has_means: bool = False,
) -> SiteFunction | None:
    """Regress parameters of sites, both (P, N), on the hyperparameters of pilot `points` (P, d).

    The posterior mean of a Gaussian process for each parameter, in units of its standard deviation:
    a linear function of u with weights N(0, 4), plus a squared-exponential covariance. None if
    there are too few points for a linear function, or no site says anything.
    """
    dim = points.shape[1]
    if len(points) < 1.5 * (1 + dim) or not np.any(precision > 0):
        return None
    u = coordinates.whiten(points)
    usual = precision.mean(axis=1, keepdims=True)
    usual = np.where(usual > 0, usual, usual.mean())
    precision = np.maximum(precision, SMALLEST_PRECISION * usual)
    parameters = np.hstack([np.log(precision), shift / precision if has_means else shift])
    location = parameters.mean(axis=0)
    linear, pilots = np.column_stack([np.ones(len(points)), u.T]), u / LENGTHSCALE
    covariance = _radial(u, pilots) + LINEAR_VARIANCE * linear @ linear.T
    covariance[np.diag_indices_from(covariance)] += NOISE_VARIANCE
    weights = solve(covariance, parameters - location, assume_a="pos")
    coefficients = np.vstack([LINEAR_VARIANCE * linear.T @ weights, weights])
    coefficients[0] += location
    size = precision.shape[1]
    return SiteFunction(
        coordinates,
        np.array([np.sqrt(np.max(np.sum(u**2, axis=0)))]),
        pilots,
        np.ascontiguousarray(coefficients[:, :size]),
        np.ascontiguousarray(coefficients[:, size:]),
        np.array([has_means]),
    )
