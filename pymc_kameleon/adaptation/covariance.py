"""Running covariance of rows that come in blocks."""

import math
from typing import Annotated, NamedTuple

import numpy as np
from scipy import linalg

from pymc_kameleon.mcmc.layout import floats

__all__ = [
    "RunningCovariance",
    "new_covariance",
    "update_covariance",
]


class RunningCovariance(NamedTuple):
    """Mean and scatter of all rows seen so far, updated in blocks.

    Attributes
    ----------
    mean : array, shape (k,)
    scatter : array, shape (k, k)
        Sum of outer products of the centred rows; the lower triangle is filled.
    weight : array, shape (1,)
        Sum of the weights of the rows.
    """

    mean: Annotated[np.ndarray, floats("features")]
    scatter: Annotated[np.ndarray, floats("features", "features")]
    weight: Annotated[np.ndarray, floats(1)]


def new_covariance(k: int) -> RunningCovariance:
    """Return the running covariance of no rows of length `k`."""
    return RunningCovariance(np.zeros(k), np.zeros((k, k)), np.zeros(1))


def update_covariance(covariance: RunningCovariance, rows: np.ndarray, weight: float = 1.0):
    """Show a block of rows to a running covariance (Welford 1962, for blocks; in place).

    Each block is centred at its own mean, so nothing cancels however large the mean is.

    Parameters
    ----------
    covariance : RunningCovariance
    rows : array, shape (n, k)
    weight : float
        Weight of each row.
    """
    old, new = covariance.weight[0], weight * len(rows)
    if new == 0:
        return
    mean = rows.mean(axis=0)
    shift = mean - covariance.mean
    block = np.empty((len(rows) + 1, len(mean)))
    np.subtract(rows, mean, out=block[:-1])
    block[:-1] *= math.sqrt(weight)
    block[-1] = math.sqrt(old * new / (old + new)) * shift
    linalg.blas.dsyrk(1.0, block.T, beta=1.0, c=covariance.scatter.T, lower=0, overwrite_c=1)
    covariance.mean[:] += new / (old + new) * shift
    covariance.weight[0] += new
