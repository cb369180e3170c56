"""A fitted surrogate, for use on its own."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pymc_kameleon.surrogate.budget import add_training_point
from pymc_kameleon.surrogate.gaussian_process import Process, gradient, predict
from pymc_kameleon.validation import checked_array

if TYPE_CHECKING:
    from pymc_kameleon.surrogate.configuration import GPSurrogate

__all__ = ["FittedSurrogate"]


class FittedSurrogate:
    """What `GPSurrogate.fit` returns: predictions, and more points.

    Attributes
    ----------
    surrogate : GPSurrogate
        How it was fitted.
    process : Process
        What it has learnt.
    """

    def __init__(self, surrogate: "GPSurrogate", process: Process) -> None:
        self.surrogate, self.process = surrogate, process

    def update(self, x: np.ndarray, value: float) -> bool:
        """Add a point without fitting anything again; whether it was worth its place.

        Parameters
        ----------
        x : array, shape (d,)
        value : float
            NaN and -inf are censored.
        """
        x = checked_array("x", x, self.process.points.shape[1:], "a point")
        nowhere = np.full(x.size, np.nan)
        return bool(add_training_point(self.process, x, float(value), np.empty(0), nowhere))

    def predict(
        self, X: ArrayLike, return_variance: bool = False, return_gradient: bool = False
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Predict at the rows of `X`.

        Parameters
        ----------
        X : array, shape (n, d)
        return_variance : bool
            Return the variance (n,) too.
        return_gradient : bool
            Return the gradient (n, d) of the mean too.

        Returns
        -------
        array of shape (n,), or a tuple
            The mean, and what was asked for, in this order.
        """
        X = np.asarray(X, dtype=float)
        dim = self.process.points.shape[1]
        X = checked_array("X", X, (X.shape[0] if X.ndim else 0, dim), "points as rows")
        mean, variance = np.array([predict(self.process, x) for x in X]).reshape(-1, 2).T
        results: tuple[np.ndarray, ...] = (mean, variance) if return_variance else (mean,)
        if return_gradient:
            of_mean, of_variance = np.empty(X.shape), np.empty(dim)
            for x, row in zip(X, of_mean, strict=True):
                gradient(self.process, x, row, of_variance)
            results += (of_mean,)
        return results if len(results) > 1 else mean
