r"""A latent vector by its precision, for models whose functions are all known by their density.

Areas, walks, effects and coefficients x ~ N(m, Q^{-1}), where the linear predictors are u = A x.
Given Gaussian sites of precision W and shift nu for u, x has the precision P and the mean mu,

.. math:: P = Q + A^\top W A,\quad P (\mu - m) = A^\top (\nu - W A m),

which are sparse where Q and A are (Rue & Held, Gaussian Markov Random Fields, 2005). With P = F F^T
the standardised vector is eta = F^T (x - mu); nothing asks for a covariance, and there may be more
predictors than variables or fewer.
"""

import math
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError

from pymc_kameleon.latent_gp.gaussian.blocks import Blocks, BlockSites
from pymc_kameleon.latent_gp.gaussian.conditional import Conditional
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import Pattern, Root, covariance_times
from pymc_kameleon.latent_gp.reader.density_prior import Density
from pymc_kameleon.mcmc.bridge.jit import jit

COST = 12
"""Of a product of two entries one by one, in those of a product of whole matrices."""


class Products:
    """Where the entries of A^T W A go: into those of a pattern that has the entries of Q too.

    `rows` and `columns` are those of the entries of A, by rows; `together` (k, 2) are pairs of
    predictors that W joins, and `prior` the entries of Q on and below its diagonal.
    """

    def __init__(self, rows, columns, shape, together, prior):
        self.rows, self.columns, (self.n, size) = rows, columns, shape
        starts = np.searchsorted(rows, np.arange(self.n + 1))
        own = np.arange(self.n)
        pairs = np.concatenate([np.column_stack([own, own]), together])
        lengths = np.diff(starts)
        n_products = float(np.sum(lengths[pairs[:, 0]] * lengths[pairs[:, 1]]))
        self._is_whole = n_products * COST > self.n * float(size) ** 2
        if self._is_whole:
            below = np.tril_indices(size)
            self._of_prior = prior[0] * (prior[0] + 1) // 2 + prior[1]
            self._together, self.pattern = together, Pattern(*below, size)
            return
        first, second, weight = _products(starts, pairs)
        low = np.maximum(columns[first], columns[second])
        high = np.minimum(columns[first], columns[second])
        keys = np.concatenate([prior[0] * size + prior[1], low * size + high])
        found, places = np.unique(keys, return_inverse=True)
        self._of_prior, target = np.split(places, [prior[0].size])
        # A pair of unlike predictors stands for two entries of W.
        twice = np.where((columns[first] == columns[second]) & (weight >= self.n), 2.0, 1.0)
        self._products = first, second, weight, twice, target
        self.pattern = Pattern(found // size, found % size, size)

    def entries(self, prior, matrix, precision, cross):
        """Entries of Q + A^T W A, of those of Q, A, and W: its diagonal and of pairs."""
        if self._is_whole:
            whole = np.zeros((self.n, self.pattern.size))
            whole[self.rows, self.columns] = matrix
            weighted = precision[:, None] * whole
            i, j = self._together.T
            np.add.at(weighted, i, cross[:, None] * whole[j])
            np.add.at(weighted, j, cross[:, None] * whole[i])
            out = (whole.T @ weighted)[self.pattern.rows, self.pattern.columns]
            out[self._of_prior] += prior
            return out
        out, weights = np.zeros(self.pattern.rows.size), np.concatenate([precision, cross])
        out[self._of_prior] = prior
        _add_products(*self._products, weights, matrix, out)
        return out

    def times(self, matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return A x."""
        out = np.zeros(self.n)
        _add_times(self.rows, self.columns, matrix, x, out)
        return out

    def transpose_times(self, matrix: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return A^T y."""
        out = np.zeros(self.pattern.size)
        _add_times(self.columns, self.rows, matrix, y, out)
        return out


@jit
def _add_products(first, second, weight, twice, target, weights, matrix, out):
    for k in range(first.size):
        product = matrix[first[k]] * matrix[second[k]]
        out[target[k]] += twice[k] * weights[weight[k]] * product


@jit
def _add_times(rows, columns, matrix, x, out):
    for k in range(rows.size):
        out[rows[k]] += matrix[k] * x[columns[k]]


def _products(starts, pairs):
    """Pairs of entries of A in the rows of each of `pairs`, and the number of that pair.

    Within one row each two of them stand once.
    """
    first, second, number = [], [], []
    lengths = np.diff(starts)
    for length, other in {(lengths[i], lengths[j]) for i, j in pairs}:
        chosen = (lengths[pairs[:, 0]] == length) & (lengths[pairs[:, 1]] == other)
        for is_own in (True, False):
            kept = np.flatnonzero(chosen & ((pairs[:, 0] == pairs[:, 1]) == is_own))
            a, b = np.tril_indices(length) if is_own else np.indices((length, other)).reshape(2, -1)
            first.append((starts[pairs[kept, 0]][:, None] + a).ravel())
            second.append((starts[pairs[kept, 1]][:, None] + b).ravel())
            number.append(np.repeat(kept, a.size))
    return tuple(np.concatenate(part).astype(np.int64) for part in (first, second, number))


class PrecisionAt:
    """The prior of a latent vector at some hyperparameters, and the variables x behind it.

    `design` (n,) are the entries of A. exp(`log_integral`) is by how much more than a Gaussian the
    density weighs.
    """

    def __init__(self, density: Density, products: Products, design: np.ndarray):
        self._density, self._products, self._design = density, products, design
        self.mean, self.log_integral = density.mean, density.log_integral
        self.half_log_determinant = density.root.half_log_determinant
        if not math.isfinite(self.log_integral):
            raise LinAlgError("A prior is not finite.")

    @property
    def size(self) -> int:
        """Number of variables, M."""
        return self.mean.size

    @cached_property
    def variances(self) -> np.ndarray:
        """Those of the predictors (N,) as far as one variable at a time goes: no larger ones."""
        return self._products.times(self._design**2, 1.0 / self._density.diagonal)

    def predictors(self, x: np.ndarray) -> np.ndarray:
        """Return u = A x (N,)."""
        return self._products.times(self._design, x)

    def transpose_times(self, y: np.ndarray) -> np.ndarray:
        """Return A^T y (M,)."""
        return self._products.transpose_times(self._design, y)

    def whiten(self, x: np.ndarray) -> np.ndarray:
        """Return R^T (x - m), where Q = R R^T."""
        return self._density.root.transpose_times(x - self.mean)

    def with_sites(self, sites: Sites, blocks: Blocks | None) -> "PrecisionConditional":
        """Multiply by sites, those of `Blocks.packed` if there are blocks."""
        return PrecisionConditional(self, sites if blocks is None else blocks.unpacked(sites))

    def root_with(self, sites: Sites | BlockSites) -> Root:
        """Factorise P = Q + A^T W A."""
        precision, _, cross = sites.coupled()
        entries = self._products.entries(self._density.entries, self._design, precision, cross)
        return self._density.root_of(self._products.pattern, entries)

    # what is recorded -----------------------------------------------------------------------------

    def to_function(self, v: np.ndarray) -> np.ndarray:
        """Return `v` (M,), which is what is moved."""
        return v.copy()

    def is_at(self, x: np.ndarray, v: np.ndarray, dtype) -> bool:
        """Whether `v` is `x` as it was recorded."""
        return np.array_equal(x.astype(dtype), v.astype(dtype))

    def drawn(self, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `x` twice: nothing is left to be drawn."""
        return x, x


class PrecisionConditional(Conditional):
    """N(x; m, Q^-1) times sites of u = A x, normalised, by its precision."""

    has_adjoint = True

    def __init__(self, prior: PrecisionAt, sites: Sites | BlockSites) -> None:
        super().__init__(prior.mean)
        self._prior, self.sites = prior, sites
        self._root = prior.root_with(sites)
        self.log_jacobian = prior.half_log_determinant - self._root.half_log_determinant
        slope = sites.shift - sites.times(prior.predictors(prior.mean))
        self.mean = prior.mean + covariance_times(self._root, prior.transpose_times(slope))

    def predictors(self, x: np.ndarray) -> np.ndarray:
        """Linear predictors (N,) of `x` (M,)."""
        return self._prior.predictors(x)

    def whiten(self, x: np.ndarray) -> np.ndarray:
        """Return x standardised by the prior (M,)."""
        return self._prior.whiten(x)

    def _standardize(self, x, v):
        return self._root.transpose_times(x - self.mean)

    def from_eta(self, eta: np.ndarray) -> np.ndarray:
        """Return x (M,) for standard normals `eta` (1, M)."""
        return self.draws(eta[None])[0]

    def at_predictors(self, u: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return x (M,) for the `eta` at which the predictors are `u` (N,)."""
        return self.from_eta(eta)

    def draws(self, normals: np.ndarray) -> np.ndarray:
        """Return vectors x (n, M) of standard normals (1, n, M)."""
        return self.mean + self._root.drawn(normals[0])

    def images(self, eta: np.ndarray) -> np.ndarray:
        """Return changes (n, N) of the predictors by standard normals `eta` (1, n, M)."""
        return np.array([self.predictors(x) for x in self._root.drawn(eta[0])])

    def adjoint(self, slope: np.ndarray) -> np.ndarray:
        """Return the slope by eta (1, M) of what has the `slope` (N,) by the predictors."""
        return self._root.solved(self._prior.transpose_times(slope)[None])
