"""The surrogate as users configure it, and how it is fitted."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pymc_kameleon.mcmc.coordinates import standardization
from pymc_kameleon.surrogate.covariances import COVARIANCES
from pymc_kameleon.surrogate.fitted import FittedSurrogate
from pymc_kameleon.surrogate.gaussian_process import Process, new_process
from pymc_kameleon.surrogate.marginal_likelihood import fit_hyperparameters
from pymc_kameleon.surrogate.mean import Mean, constant_mean, fit_mean, mean_value
from pymc_kameleon.surrogate.training_set import rebuild, set_prior
from pymc_kameleon.validation import (
    checked_array,
    checked_choice,
    checked_integer,
    checked_number,
    checked_share,
)

__all__ = ["MEANS", "GPSurrogate"]

MEANS = ("quadratic", "constant", "current")


DEFAULT_SIZE, DEFAULT_SIZE_WITH_GRADIENTS = 300, 600
"""Numbers stored by default. With 300 a process with gradients is full at 75 points in three
dimensions, and GP-MALA at an acceptance of a quarter then loses a fifth of its effective draws an
evaluation."""


@dataclass(frozen=True, kw_only=True)
class GPSurrogate:
    r"""A Gaussian process of the log-likelihood, for delayed acceptance.

    It is a configuration: it never changes, and holds nothing of a chain. What a chain learns is a
    `Process`, from `new_process` and `fit_into`. On its own it is a regression of a function that
    is expensive and without noise: `fit` returns a `FittedSurrogate`.

    It works in coordinates standardised by its points. Hyperparameters, a lengthscale for each
    standardised coordinate and an amplitude, maximise the marginal likelihood.

    Parameters
    ----------
    kernel : {"squared_exponential", "matern52", "rational_quadratic"}
        Matern 5/2 for log-likelihoods that are less smooth.
    mean : {"quadratic", "constant", "current"}
        Prior mean, fitted by least squares: a concave quadratic (a constant while there are few
        points), or a constant. "current" is that of the paper, the log-likelihood of the chain's
        current point: then the surrogate depends on the state, and a transition has to evaluate
        the reverse first stage under the proposed point's mean.
    n_initial : int, optional
        Number of points before the first fit; by default the larger of 10 and 2 (d + 1), and with
        gradients the larger of 4 and as many as bring that many numbers.
    max_points : int, optional
        Points stored; a new one takes the place of the least useful one when there are as many. A
        point with its gradient counts d + 1. By default 300, and 600 with gradients.
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
    n_points          points it holds
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

    kernel: str = "squared_exponential"
    mean: str = "quadratic"
    n_initial: int | None = None
    max_points: int | None = None
    refit: float = 1.25
    one_stage_share: float = 0.02
    depth: float | None = None
    store: Any = None

    def __post_init__(self):
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
        """Raise a ValueError if `max_points` or `n_initial` do not suit the dimension.

        A fit of a constant and d + 1 hyperparameters takes d + 2 points, or 4 with gradients.

        Parameters
        ----------
        dim : int
            Dimension d of the points.
        names : str
            What has this dimension, for the message: "a, b and c", say.
        gradients : bool
            Whether points come with gradients.
        """
        least = 4 * (dim + 1) if gradients else dim + 2
        stored = self._numbers(gradients)
        if stored < least:
            raise ValueError(
                f"max_points={stored} is too few for {names}, d = {dim}: "
                f"take at least {least}, better {10 * least}."
            )
        least = _fewest(dim, gradients)
        initial, largest = self.initial_size(dim, gradients), self.capacity(dim, gradients)
        if not least <= initial <= largest:
            raise ValueError(
                f"n_initial={self.n_initial} does not suit {names}, d = {dim}: "
                f"take {least} to {largest}."
            )

    def capacity(self, dim: int, gradients: bool = False) -> int:
        """Return the number of points that a process holds at most."""
        return self._numbers(gradients) // (dim + 1 if gradients else 1)

    def _numbers(self, gradients):
        """Return the number of values and derivatives that a process holds at most."""
        if self.max_points is not None:
            return self.max_points
        return DEFAULT_SIZE_WITH_GRADIENTS if gradients else DEFAULT_SIZE

    def initial_size(self, dim: int, gradients: bool = False) -> int:
        """Return the number of points to evaluate before the first fit."""
        if self.n_initial is not None:
            return self.n_initial
        numbers = max(10, 2 * (dim + 1))
        size = max(4, -(-numbers // (dim + 1))) if gradients else numbers
        return min(size, self.capacity(dim, gradients))

    def needs_refit(self, n_learnt: int, n_at_last_fit: int) -> bool:
        """Whether enough points have been learnt since the last fit; both counts are of all."""
        return n_learnt >= self.refit * n_at_last_fit

    def new_process(self, dim: int, gradients: bool = False) -> Process:
        """Return a process in `dim` dimensions, of values or with gradients, without points."""
        depth = 10.0 * dim + 50.0 if self.depth is None else self.depth
        kernel, capacity = COVARIANCES[self.kernel], self.capacity(dim, gradients)
        return new_process(kernel, capacity, dim, depth, gradients)

    def fit_into(
        self,
        process: Process,
        points: np.ndarray,
        values: np.ndarray,
        gradients: np.ndarray | None = None,
        current_value: float | None = None,
    ) -> None:
        """Fit everything of `process` in place: coordinates, mean, hyperparameters, factor.

        The search for hyperparameters starts from those of the process, if it holds points. To fit
        again what a process holds, pass it its own points and values.

        Parameters
        ----------
        process : Process
        points : array, shape (t, d)
            Raw coordinates. Repeated points count once, and of more than `max_points` the last
            ones are taken.
        values : array, shape (t,)
            Log-likelihoods; -inf and NaN are censored. What is censored is left out, unless it has
            no gradient and fewer than d + 2 points would remain.
        gradients : array, shape (t, d), or (t, 0) or None for a process of values
            A point whose gradient is not finite is left out.
        current_value : float, optional
            For mean="current": the log-likelihood of the current point; by default the last value.

        Raises
        ------
        ValueError
            If fewer than d + 2 points, or 2 with gradients, have a finite value.
        """
        dim, previous = points.shape[1], None
        if process.count[0]:
            previous = process.hyperparameters.copy()
        if gradients is None:
            gradients = np.empty((len(points), 0))
        has_gradients = gradients.shape[1] > 0
        least = _fewest(dim, has_gradients)
        chosen = _last_distinct(points, process.values.size)
        points, values, gradients = points[chosen], values[chosen], gradients[chosen]
        finite = np.isfinite(values) & np.isfinite(gradients).all(axis=1)
        _check_enough(int(finite.sum()), least)
        best = values[finite].max()
        process.censoring[0] = max(process.censoring[0], best - process.censoring[1])
        inside = finite & (values > process.censoring[0])
        values = np.where(inside, values, process.censoring[0])
        if has_gradients or inside.sum() >= least:
            # Censored values are a plateau behind a cliff: no smooth process fits both sides of it,
            # and the amplitude of one that tries runs away.
            points, values, gradients = points[inside], values[inside], gradients[inside]
        _check_enough(len(values), least)
        standard = standardization(points, np.ones(dim))
        u, targets = standard.whiten(points), values[None]
        if has_gradients:
            targets = np.vstack([values, (gradients @ standard.factor).T])
        mean = self._mean(u, targets, current_value)
        residuals = targets.copy()
        residuals[0] -= [mean_value(mean, column) for column in np.ascontiguousarray(u.T)]
        if has_gradients:
            residuals[1:] -= mean.linear[:, None] + mean.quadratic @ u
        hyperparameters, _ = fit_hyperparameters(process.kernel, u, residuals, previous)
        rebuild(
            process,
            points,
            values,
            gradients,
            hyperparameters=hyperparameters,
            mean=mean,
            standardization=standard,
        )

    def fitted(
        self,
        points: np.ndarray,
        values: np.ndarray,
        previous: Process | None = None,
        current_value: float | None = None,
    ) -> Process:
        """Return a new process fitted to points, as `fit_into` does.

        With a `previous` process, its hyperparameters are where the search starts, and its lowest
        value that enters is kept.
        """
        process = self.new_process(points.shape[1])
        if previous is not None:
            process.count[:] = previous.count
            process.censoring[:] = previous.censoring
            set_prior(process, previous.hyperparameters)
        self.fit_into(process, points, values, current_value=current_value)
        return process

    def fit(self, X: ArrayLike, values: ArrayLike) -> FittedSurrogate:
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
        return FittedSurrogate(self, self.fitted(X, values))

    def _mean(self, u, targets, current_value) -> Mean:
        if self.mean == "current":
            value = targets[0, -1] if current_value is None else current_value
            return constant_mean(value, len(u))
        return fit_mean(self.mean == "quadratic", u, targets)


def _fewest(dim, gradients):
    """Return the number of points that a fit takes."""
    return 2 if gradients else dim + 2


def _check_enough(count, least):
    if count < least:
        raise ValueError(
            f"{count} distinct points have a finite log-likelihood: a fit takes {least}."
        )


def _last_distinct(points, largest):
    """Return the indices of the last occurrences of points, in order, at most `largest`."""
    first_of_reversed = np.unique(points[::-1], axis=0, return_index=True)[1]
    return np.sort(len(points) - 1 - first_of_reversed)[-largest:]
