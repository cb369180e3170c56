"""Values of a latent function that go together, and Gaussian sites of several values each.

Where an observation depends on several values, the matrix of the sites has a block for each such
set, W = S S^T, S = U D^(1/2) with U unit lower triangular.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from pymc_kameleon.latent_gp.gaussian_sites import Sites


@dataclass(frozen=True)
class Blocks:
    """Which values of a latent function go together.

    `members` (n, m) are those of each block, in order, -1 beyond its end.
    """

    members: np.ndarray
    size: int

    @classmethod
    def of(cls, block: np.ndarray, number: np.ndarray) -> "Blocks":
        """Make blocks of the block (N,) of each value and its number (N,) in it."""
        members = np.full((block.max() + 1, number.max() + 1), -1)
        members[block, number] = np.arange(block.size)
        return cls(members, block.size)

    @property
    def n_parameters(self) -> int:
        """Numbers beside the precisions: shifts, and entries of U below its diagonal."""
        n, m = self.members.shape
        return self.size + n * m * (m - 1) // 2

    @cached_property
    def _pairs(self):
        """Rows and columns of a matrix (m, m) below its diagonal."""
        return np.tril_indices(self.members.shape[1], -1)

    def matrices(self, columns: np.ndarray) -> np.ndarray:
        """Blocks (n, m, m) of a matrix of which entries (m, N) with the k-th member are known."""
        is_there = self.members >= 0
        found = np.moveaxis(columns[:, self.members], 0, 2)
        return np.where(is_there[:, :, None] & is_there[:, None, :], found, 0.0)

    def packed(self, precision: np.ndarray, shift: np.ndarray) -> Sites:
        """Return D, and shifts (N,) with the entries of U, of precisions (n, m, m)."""
        left, (n, m, _) = precision.copy(), precision.shape
        unit, diagonal = np.zeros((n, m, m)), np.zeros((n, m))
        for k in range(m):
            pivot = np.maximum(left[:, k, k], 0.0)
            usable = pivot > 1e-12 * np.abs(precision[:, k, k])
            diagonal[:, k] = np.where(usable, pivot, 0.0)
            unit[:, :, k] = np.where(usable[:, None], left[:, :, k], 0.0)
            unit[:, :, k] /= np.where(usable, pivot, 1.0)[:, None]
            left -= diagonal[:, k, None, None] * unit[:, :, None, k] * unit[:, None, :, k]
        values = np.zeros(self.size)
        values[self.members[self.members >= 0]] = diagonal[self.members >= 0]
        return Sites(values, np.concatenate([shift, unit[:, *self._pairs].ravel()]))

    def unpacked(self, sites: Sites) -> "BlockSites":
        """Return the sites of which `packed` made these."""
        shift, entries = np.split(sites.shift, [self.size])
        rows, columns = self._pairs
        below, above = self.members[:, rows].ravel(), self.members[:, columns].ravel()
        is_there = (below >= 0) & (entries != 0.0)
        below, above, entries = below[is_there], above[is_there], entries[is_there]
        own, scale = np.arange(self.size), np.sqrt(sites.precision)
        data = np.concatenate([scale, entries * scale[above]])
        index = np.concatenate([own, above]), np.concatenate([own, below])
        return BlockSites(csr_array((data, index), shape=(self.size, self.size)), shift)


@dataclass(frozen=True)
class BlockSites:
    """Gaussian sites: their product is exp(shift x - x^T S S^T x / 2); `root` is S^T, sparse."""

    root: csr_array
    shift: np.ndarray

    @cached_property
    def matrix(self) -> csr_array:
        """W = S S^T."""
        return csr_array(self.root.T @ self.root)

    def coupled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the diagonal (N,), and pairs (k, 2) of values with the entries (k,) of each."""
        entries = self.matrix.tocoo()
        rows, columns = entries.coords
        above = rows < columns
        pairs = np.column_stack([rows[above], columns[above]]).astype(np.int64)
        return self.matrix.diagonal(), pairs, entries.data[above]

    def elementwise(self, x: np.ndarray) -> np.ndarray:
        """Log of what belongs to each value (N,) at `x` (N,)."""
        return x * (self.shift - 0.5 * (self.matrix @ x))
