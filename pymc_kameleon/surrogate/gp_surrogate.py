"""The surrogate of delayed acceptance as users configure it, and on its own once it is fitted."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pymc_kameleon.gp.covariances import COVARIANCES
from pymc_kameleon.gp.sparse_gp import (
    SparseGP,
    add_centre,
    new_sparse_gp,
    predict,
    predict_with_gradient,
)
from pymc_kameleon.gp.sparse_gp_fit import TooFewValues, distinct, fit_sparse_gp
from pymc_kameleon.gp.typical_set import TypicalSet
from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.validation import (
    checked_array,
    checked_choice,
    checked_integer,
    checked_number,
    checked_share,
    warn_of_old_name,
)

OLD_KERNELS = {"squared_exponential": "gaussian", "matern52": "matern"}

MEANS = ("quadratic", "constant", "current")

DEFAULT_SIZE, DEFAULT_SIZE_WITH_GRADIENTS = 300, 600
"""Numbers held by default. With 300, GP-MALA at an acceptance of a quarter lost a fifth of its
effective draws an evaluation in three dimensions."""

KEPT = 5
"""Evaluations that fits learn from, times those that are held."""

NOISE_SHARE = 1e-3
"""Noise of values, relative to the residuals of the prior mean."""


@dataclass(frozen=True, kw_only=True)
class GPSurrogate:
    r"""A Gaussian process of the log-likelihood, for delayed acceptance.

    It is a configuration: it never changes, and holds nothing of a chain. What a chain learns is a
    `SparseGP`, from `new_process` and `fit_into`. On its own it is a regression of a function that
    is expensive and without noise: `fit` returns a `FittedSurrogate`. The ratios of both stages are
    in `surrogate.acceptance_ratios`.

    It works in coordinates standardised by its points. Hyperparameters, a lengthscale for each
    standardised coordinate and an amplitude, maximise the marginal likelihood.

    Parameters
    ----------
    kernel : {"gaussian", "matern", "rational_quadratic"}
        "matern" is Matern 5/2, for log-likelihoods that are less smooth.
    mean : {"quadratic", "constant", "current"}
        Prior mean, fitted by least squares: a concave quadratic, or a constant. "current" is that
        of the paper, the log-likelihood of the chain's current point: then the surrogate depends on
        the state, and a transition has to evaluate the reverse first stage under the proposed
        point's mean.
    n_initial : int, optional
        Number of points before the first fit; by default the larger of 10 and 2 (d + 1), and with
        gradients the larger of 4 and as many as bring that many numbers.
    max_points : int, optional
        Points held: of more that are known, the most informative ones, chosen anew at each fit,
        which learns from all of them. A point with its gradient counts d + 1. By default 300,
        and 600 with gradients.
    refit : float
        Hyperparameters are fitted again when the number of points learnt has grown by this factor
        since the last fit.
    one_stage_share : float
        Share of transitions that evaluate the model without the first stage, so that a region
        that it is wrong about stays open.
    depth : float, optional
        Log-likelihoods further below the largest one are censored: they enter as if they were this
        far below, until the next fit leaves them out. By default 10 d + 50.
    store : EvaluationStore, optional
        Keeps every evaluation of a step in a file. Chains that share one learn from each other's
        evaluations while they tune, as soon as they are near the best of them, and stop with what
        they then know. A later run begins with what is known, at one of its points if no start was
        given, and evaluates none of it again. A step with a store runs in Python.

    Notes
    -----
    As `surrogate=` of a step it adds these sampler statistics, float64, per draw:

    ================= ===================================================================
    surrogate_accept  mean probability of passing the first stage (NaN: it was not used)
    surrogate_sd      mean standard deviation of the surrogate at the proposals
    n_points          evaluations that it has learnt from
    calls_made        log-density evaluations of the chain so far, tuning included; not
                      those that a store knew
    calls_saved       transitions without one
    ================= ===================================================================

    It learns while tuning and is frozen afterwards, unless `adapt_after_tune=True`. What `fit`
    returns may be passed to a step in its place: then it screens from the start.

    References
    ----------
    A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
    exploratory-exploitation effect.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_kameleon.surrogate import GPSurrogate
    >>> X = np.random.default_rng(1).normal(size=(60, 2))
    >>> fitted = GPSurrogate().fit(X, np.cos(X).sum(axis=1))
    >>> mean, variance = fitted.predict(X[:5], return_variance=True)
    """

    kernel: str = "gaussian"
    mean: str = "quadratic"
    n_initial: int | None = None
    max_points: int | None = None
    refit: float = 1.25
    one_stage_share: float = 0.02
    depth: float | None = None
    store: Any = None

    def __post_init__(self):
        new = OLD_KERNELS.get(self.kernel) if isinstance(self.kernel, str) else None
        if new is not None:
            old = self.kernel
            warn_of_old_name(f"GPSurrogate(kernel={old!r})", f"GPSurrogate(kernel={new!r})")
            object.__setattr__(self, "kernel", new)
        for name, known in (("kernel", tuple(COVARIANCES)), ("mean", MEANS)):
            checked_choice(name, getattr(self, name), known)
        checked = {
            "refit": checked_number("refit", self.refit, above=1),
            "one_stage_share": checked_share("one_stage_share", self.one_stage_share),
        }
        if self.max_points is not None:
            checked["max_points"] = checked_integer("max_points", self.max_points, 3)
        if self.n_initial is not None:
            checked["n_initial"] = checked_integer("n_initial", self.n_initial, 2)
        if self.depth is not None:
            checked["depth"] = checked_number("depth", self.depth, above=0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_dimension(self, dim: int, names: str = "the model", gradients: bool = False) -> None:
        """Raise a ValueError if `max_points` or `n_initial` do not suit the dimension."""
        least = 4 * (dim + 1) if gradients else dim + 2
        stored = self.capacity(gradients)
        if stored < least:
            raise ValueError(
                f"max_points={stored} is too few for {names}, d = {dim}: "
                f"take at least {least}, better {10 * least}."
            )
        least, largest = _fewest(dim, gradients), stored // _numbers_of_point(dim, gradients)
        if not least <= self.initial_size(dim, gradients) <= largest:
            raise ValueError(
                f"n_initial={self.n_initial} does not suit {names}, d = {dim}: "
                f"take {least} to {largest}."
            )

    def capacity(self, gradients: bool = False) -> int:
        """Return the number of centres that a process has at most."""
        if self.max_points is not None:
            return self.max_points
        return DEFAULT_SIZE_WITH_GRADIENTS if gradients else DEFAULT_SIZE

    def n_kept(self, dim: int, gradients: bool = False) -> int:
        """Return the number of evaluations that a fit learns from at most."""
        return KEPT * self.capacity(gradients) // _numbers_of_point(dim, gradients)

    def initial_size(self, dim: int, gradients: bool = False) -> int:
        """Return the number of points to evaluate before the first fit."""
        if self.n_initial is not None:
            return self.n_initial
        numbers = max(10, 2 * (dim + 1))
        size = max(4, -(-numbers // (dim + 1))) if gradients else numbers
        return min(size, self.capacity(gradients) // _numbers_of_point(dim, gradients))

    def needs_refit(self, n_learnt: int, n_at_last_fit: int) -> bool:
        """Whether enough points have been learnt since the last fit; both counts are of all."""
        return n_learnt >= self.refit * n_at_last_fit

    def new_process(self, dim: int, gradients: bool = False, is_noisy: bool = False) -> SparseGP:
        """Return a process in `dim` dimensions, without points; values are estimates if noisy."""
        depth = 10.0 * dim + 50.0 if self.depth is None else self.depth
        kernel, capacity = COVARIANCES[self.kernel], self.capacity(gradients)
        process = new_sparse_gp(kernel, dim, capacity, depth, has_variance=True)
        process.noise[0] = float(is_noisy)
        return process

    def fit_into(
        self,
        process: SparseGP,
        points: np.ndarray,
        values: np.ndarray,
        gradients: np.ndarray | None = None,
        current_value: float | None = None,
        searches: bool = True,
    ) -> None:
        """Fit everything of `process` in place: coordinates, mean, hyperparameters, weights.

        The search for hyperparameters, if it `searches`, starts from those of the process, if that
        holds points. Repeated `points` (t, d) count once. `values` (t,) of -inf and NaN are
        censored; what is censored is left out, unless fewer points than a fit takes would remain.
        Of `gradients` (t, d), or (t, 0) or None, those that are not finite are left out. With
        mean="current" the mean is `current_value`, by default the last value. Raises TooFewValues
        if fewer than d + 2 points, or 2 with gradients, have a finite value.
        """
        dim = points.shape[1]
        if gradients is not None and gradients.shape[1] == 0:
            gradients = None
        least = _fewest(dim, gradients is not None)
        chosen = distinct(points, values)
        points, values = points[chosen], values[chosen]
        finite = np.isfinite(values)
        if finite.sum() < least:
            raise TooFewValues(
                f"{finite.sum()} distinct points have a finite log-likelihood: a fit takes {least}."
            )
        largest, depth = max(process.censoring[0], values[finite].max()), process.censoring[1]
        inside = finite & (values > largest - depth)
        values = np.where(inside, values, largest - depth)
        if inside.sum() >= least:
            # Censored values are a plateau behind a cliff: no smooth process fits both sides of it,
            # and the amplitude of one that tries runs away.
            chosen, points, values = chosen[inside], points[inside], values[inside]
        constant = None
        if self.mean == "current":
            constant = values[-1] if current_value is None else current_value
        elif self.mean == "constant":
            constant = np.average(values, weights=1.0 / (1.0 + (largest - values) / dim))
        found, uncertainty = fit_sparse_gp(
            points,
            values,
            standardization(points, np.ones(dim)),
            process.values.size,
            process.hyperparameters.copy() if process.count[0] else None,
            gradients=None if gradients is None else gradients[chosen],
            typical=TypicalSet(largest, 0.5 * depth),
            kernel=process.kernel,
            constant=constant,
            noise_share=NOISE_SHARE,
            noise_start=process.noise[0] or None,
            max_iterations=(60, 60) if searches else (0, 0),
        )
        count = found.count[0]
        process.count[0], process.censoring[0] = count, largest
        process.centres[:, :count] = found.centres
        process.factor[:count, :count] = uncertainty.factor
        for name in ("values", "weights"):
            getattr(process, name)[:count] = getattr(found, name)
        for name in ("standardization", "mean"):
            for own, part in zip(getattr(process, name), getattr(found, name), strict=True):
                own[:] = part
        for name in ("hyperparameters", "noise", "inverse_lengthscales", "jitter"):
            getattr(process, name)[:] = getattr(found, name)

    def fit(self, X: ArrayLike, values: ArrayLike) -> "FittedSurrogate":
        """Regress `values` (n,) on the rows of `X` (n, d)."""
        X = np.asarray(X, dtype=float)
        if X.ndim != 2:
            raise ValueError(f"X has shape {X.shape}: take points as rows, shape (n, d).")
        X = checked_array("X", X, X.shape, "points as rows")
        values = np.asarray(values, dtype=float)
        if values.shape != X.shape[:1]:
            raise ValueError(
                f"values has shape {values.shape}: take one for each point, shape {X.shape[:1]}."
            )
        process = self.new_process(X.shape[1])
        kept = distinct(X, values)[-self.n_kept(X.shape[1]) :]
        self.fit_into(process, X[kept], values[kept])
        return FittedSurrogate(self, process, X[kept], values[kept])


class FittedSurrogate:
    """What `GPSurrogate.fit` returns: predictions, and more points.

    Attributes
    ----------
    surrogate : GPSurrogate
        How it was fitted.
    process : SparseGP
        What it has learnt.
    points, values : array, shape (n, d) and (n,)
        Evaluations that it has learnt from.
    """

    def __init__(
        self, surrogate: GPSurrogate, process: SparseGP, points: np.ndarray, values: np.ndarray
    ) -> None:
        self.surrogate, self.process, self.points, self.values = surrogate, process, points, values

    def update(self, x: np.ndarray, value: float) -> bool:
        """Add a point without fitting hyperparameters again; whether it was worth its place.

        Parameters
        ----------
        x : array, shape (d,)
        value : float
            NaN and -inf are censored.
        """
        process, dim = self.process, self.points.shape[1]
        x = checked_array("x", x, (dim,), "a point")
        is_full = process.count[0] == process.values.size
        if not is_full and not add_centre(process, x, float(value)):
            return False
        kept = slice(-self.surrogate.n_kept(dim), None)
        self.points = np.concatenate([self.points, x[None]])[kept]
        self.values = np.append(self.values, value)[kept]
        if is_full:
            before = predict(process, x)[1]
            self.surrogate.fit_into(process, self.points, self.values, searches=False)
            return bool(predict(process, x)[1] < before)
        return True

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
        dim = self.points.shape[1]
        X = checked_array("X", X, (X.shape[0] if X.ndim else 0, dim), "points as rows")
        mean, variance = np.array([predict(self.process, x) for x in X]).reshape(-1, 2).T
        results: tuple[np.ndarray, ...] = (mean, variance) if return_variance else (mean,)
        if return_gradient:
            of_mean, cross, of_gradient = np.empty(X.shape), np.empty(dim), np.empty((dim, dim))
            for x, row in zip(X, of_mean, strict=True):
                predict_with_gradient(self.process, x, row, cross, of_gradient)
            results += (of_mean,)
        return results if len(results) > 1 else mean


def _numbers_of_point(dim, gradients):
    return 1 + dim if gradients else 1


def _fewest(dim, gradients):
    """Return the number of points that a fit takes."""
    return 2 if gradients else dim + 2
