"""Values of a latent function that go together, and Gaussian sites of several values each.

Where an observation depends on several values, the matrix of the sites has a block for each such
set, W = S S^T, S = U D^(1/2) with U unit lower triangular.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.mcmc.bridge.jit import SIMD, jit


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

    @cached_property
    def links(self) -> tuple[tuple, np.ndarray, np.ndarray]:
        """Which entries of matrices (n, m, m) are on or below the diagonal, and their values.

        Indices of the entries, and of the value of each one's row and column.
        """
        n, m = self.members.shape
        block, row, column = np.indices((n, m, m)).reshape(3, -1)
        rows, columns = self.members[block, row], self.members[block, column]
        kept = (row >= column) & (rows >= 0) & (columns >= 0)
        return (block[kept], row[kept], column[kept]), rows[kept], columns[kept]

    @cached_property
    def together(self) -> np.ndarray:
        """Pairs (k, 2) of different values that go together."""
        _, rows, columns = self.links
        return np.column_stack([rows, columns])[rows != columns]

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
        n, m = self.members.shape
        root = np.zeros((n, m, m))
        root[:, np.arange(m), np.arange(m)] = 1.0
        root[:, *self._pairs] = entries.reshape(n, -1)
        root *= np.sqrt(sites.precision)[self.members][:, None]
        return BlockSites(self, root, shift)


@dataclass(frozen=True)
class BlockSites:
    """Gaussian sites: their product is exp(shift x - x^T S S^T x / 2); `root` (n, m, m) is S."""

    blocks: Blocks
    root: np.ndarray
    shift: np.ndarray

    def transpose_times(self, lower: np.ndarray) -> np.ndarray:
        """Return S^T C for a lower triangular C (N, N) in C order, not read above the diagonal."""
        entries, rows, columns = self.blocks.links
        out = np.zeros(lower.shape)
        _transpose_times_into(self.root[entries], rows, columns, lower, out)
        return out

    def times(self, x: np.ndarray) -> np.ndarray:
        """Return W x for `x` (N,)."""
        entries, rows, columns = self.blocks.links
        root = self.root[entries]
        by_column = np.bincount(columns, root * x[rows], minlength=x.size)
        return np.bincount(rows, root * by_column[columns], minlength=x.size)

    def coupled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the diagonal of W (N,), and pairs (k, 2) of values with their entries (k,)."""
        (block, row, column), rows, columns = self.blocks.links
        entries = (self.root @ self.root.transpose(0, 2, 1))[block, row, column]
        is_own = rows == columns
        diagonal = np.empty(self.shift.size)
        diagonal[rows[is_own]] = entries[is_own]
        return diagonal, self.blocks.together, entries[~is_own]

    def elementwise(self, x: np.ndarray) -> np.ndarray:
        """Log of what belongs to each value (N,) at `x` (N,)."""
        return x * (self.shift - 0.5 * self.times(x))


@jit(fastmath=SIMD)
def _transpose_times_into(entries, rows, columns, lower, out):
    for k in range(entries.size):
        for j in range(rows[k] + 1):
            out[columns[k], j] += entries[k] * lower[rows[k], j]
