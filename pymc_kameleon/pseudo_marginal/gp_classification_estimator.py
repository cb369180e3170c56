"""The estimator behind `gp_classification_loglikelihood`, on arrays."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import LinAlgError, cholesky
from scipy.spatial.distance import pdist, squareform

from pymc_kameleon._threads import threads_for
from pymc_kameleon.latent_gp.approximations.approximation import floored
from pymc_kameleon.latent_gp.approximations.binary_likelihoods import Logit, Probit
from pymc_kameleon.latent_gp.approximations.expectation_propagation import (
    PropagationState,
    best_seen,
)
from pymc_kameleon.latent_gp.approximations.laplace import newton_mode
from pymc_kameleon.latent_gp.approximations.site_updates import ParallelSweep
from pymc_kameleon.latent_gp.gaussian_algebra import Gaussian, Sites
from pymc_kameleon.pseudo_marginal.importance_sampling import (
    ImportanceDensity,
    estimated_log_marginal_likelihood,
    importance_density,
)
from pymc_kameleon.validation import checked_choice, checked_number

__all__ = ["GPClassificationEstimator"]

LIKELIHOODS = {"logit": Logit, "probit": Probit}

APPROXIMATIONS = ("laplace", "ep")

# Any importance density that is a function of the hyperparameters leaves the estimate unbiased. At
# these tolerances its variance is what it is at much smaller ones.

NEWTON_TOLERANCE = 0.3
"""Length of Laplace's last Newton step in standard deviations: after it the mode is known to 0.1 in
all dimensions together."""

MAX_NEWTON_STEPS = 50

SWEEP_TOLERANCE = 0.01
"""Residual of expectation propagation, in standard deviations of each marginal."""

MAX_SWEEPS = 12
"""At a large amplitude parallel sweeps of a logistic likelihood oscillate before they converge, and
gain nothing after these."""


class GPClassificationEstimator:
    """Unbiased estimate of the marginal likelihood of a Gaussian-process classifier.

    Parameters
    ----------
    X : array, shape (N, D)
        Inputs.
    y : array, shape (N,)
        Labels: -1 and 1, 0 and 1, or bool.
    likelihood : {"logit", "probit"}
    approximation : {"laplace", "ep"}
        Whose Gaussian is the importance density.
    jitter : float
        At least 0; in units of the squared amplitude.
    prior_share : float
        Share of the prior in the importance density, at least 0 and below 1.

    Attributes
    ----------
    inputs : array, shape (N, D)
    labels : array, shape (N,)
        -1 and 1.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these.
    """

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        likelihood: str = "logit",
        approximation: str = "laplace",
        jitter: float = 1e-6,
        prior_share: float = 0.02,
    ) -> None:
        self.inputs = _checked_inputs(X)
        self.labels = _checked_labels(y, len(self.inputs))
        self.likelihood = LIKELIHOODS[checked_choice("likelihood", likelihood, LIKELIHOODS)](
            self.labels
        )
        self.approximation = checked_choice("approximation", approximation, APPROXIMATIONS)
        self.jitter = checked_number("jitter", jitter, at_least=0.0)
        self.prior_share = checked_number("prior_share", prior_share, at_least=0.0)
        if self.prior_share >= 1.0:
            raise ValueError(
                f"prior_share={prior_share!r}: take a number in [0, 1), 0.02 say. A share of 1 "
                "would leave no draws from the approximation."
            )

    @np.errstate(all="ignore")
    def __call__(
        self,
        lengthscales: np.ndarray,
        amplitude: float,
        n_importance: int,
        rng: np.random.Generator,
    ) -> float:
        """Log of an estimate whose mean is the marginal likelihood p(y | hyperparameters).

        Parameters
        ----------
        lengthscales : float or array, shape (D,)
        amplitude : float
        n_importance : int
        rng : numpy.random.Generator

        Returns
        -------
        float
            NaN if there is no importance density: see `approximate`.
        """
        with threads_for(len(self.labels)):
            density = self.approximate(lengthscales, amplitude)
            return np.nan if density is None else self.estimate(density, n_importance, rng)

    def prior(self, lengthscales: np.ndarray, amplitude: float) -> Gaussian:
        """Prior of the latent function at the inputs.

        Raises
        ------
        ValueError
            If the lengthscales are neither one nor one for each input.
        scipy.linalg.LinAlgError
            Where `approximate` has no result.
        """
        lengthscales, amplitude = np.asarray(lengthscales, dtype=float), float(amplitude)
        dimension = self.inputs.shape[1]
        if lengthscales.shape not in ((), (dimension,)):
            raise ValueError(wrong_lengthscales(lengthscales.shape, dimension))
        scale = amplitude * amplitude
        if not (np.all(lengthscales > 0) and amplitude > 0 and np.isfinite(scale)):
            raise LinAlgError("The hyperparameters make no kernel.")
        covariance = squareform(np.exp(-0.5 * pdist(self.inputs / lengthscales, "sqeuclidean")))
        covariance[np.diag_indices_from(covariance)] = 1.0 + self.jitter
        factor = amplitude * cholesky(covariance, lower=True, check_finite=False)
        return Gaussian(np.zeros(len(covariance)), scale * covariance, factor)

    @np.errstate(all="ignore")
    def approximate(self, lengthscales: np.ndarray, amplitude: float) -> ImportanceDensity | None:
        """Find the importance density, a function of the hyperparameters alone.

        Returns
        -------
        ImportanceDensity or None
            None if a hyperparameter is NaN or not positive, or the kernel matrix not positive
            definite within rounding.
        """
        try:
            prior = self.prior(lengthscales, amplitude)
            sites = self._laplace_sites(prior)
            if self.approximation == "ep":
                sites = self._propagated(prior, sites)
            return importance_density(prior, sites)
        except LinAlgError:
            return None

    def estimate(
        self, density: ImportanceDensity, n_importance: int, rng: np.random.Generator
    ) -> float:
        """Log of an estimate with the draws of an importance density.

        Parameters
        ----------
        density : ImportanceDensity
            From `approximate`.
        n_importance : int
        rng : numpy.random.Generator

        Returns
        -------
        float
        """
        return estimated_log_marginal_likelihood(
            density, self.likelihood, n_importance, self.prior_share, rng
        )

    def _laplace_sites(self, prior):
        zero = np.zeros(prior.size)
        found = newton_mode(prior, self.likelihood, zero, zero, NEWTON_TOLERANCE, MAX_NEWTON_STEPS)
        is_near = found.residual < NEWTON_TOLERANCE
        mode = found.offset + found.next_step if is_near else found.offset
        _, slope, second, _ = self.likelihood.terms(mode)
        precision = np.maximum(-second, 0.0)
        return Sites(precision, slope + precision * mode)

    def _propagated(self, prior, sites):
        try:
            start = PropagationState(prior, self.likelihood, sites, None, SWEEP_TOLERANCE)
        except LinAlgError:
            # A prior so broad that rounding leaves no cavity.
            return sites
        state, _ = best_seen(start, ParallelSweep(1.0), SWEEP_TOLERANCE, MAX_SWEEPS)
        return floored(state.sites, state.product.mean)


def wrong_lengthscales(shape: tuple, dimension: int) -> str:
    """Message for lengthscales of the wrong shape."""
    return (
        f"lengthscales has shape {shape} and X has {dimension} columns: take one number, the same "
        f"for all columns, or one for each, shape ({dimension},)."
    )


def _checked_inputs(X):
    try:
        inputs = np.array(X, dtype=float)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"X is a {type(X).__name__} that is no table of numbers: pass an array, shape (N, D), "
            "data and not a random variable."
        ) from error
    if inputs.ndim != 2 or 0 in inputs.shape:
        raise ValueError(
            f"X has shape {inputs.shape}: take one row for each observation and one column for "
            "each input, shape (N, D); X[:, None] for a single input."
        )
    if not np.all(np.isfinite(inputs)):
        row, column = np.argwhere(~np.isfinite(inputs))[0]
        raise ValueError(
            f"X[{row}, {column}] is {inputs[row, column]}: leave out, or impute, rows with missing "
            "or infinite entries."
        )
    return inputs


def _checked_labels(y, size):
    labels = np.asarray(y)
    if labels.shape != (size,):
        raise ValueError(
            f"y has shape {labels.shape} and X has {size} rows: take one label for each row, shape "
            f"({size},)."
        )
    if labels.dtype.kind not in "biuf":
        raise TypeError(
            f"y has entries of type {labels.dtype}: take labels -1 and 1, 0 and 1, or bool, such "
            "as y == name_of_a_class."
        )
    values = np.unique(labels)
    if not (np.isin(values, [-1, 1]).all() or np.isin(values, [0, 1]).all()):
        shown = ", ".join(f"{value:g}" for value in values[:5].astype(float))
        raise ValueError(
            f"y has {len(values)} different values ({shown}{', ...' * (len(values) > 5)}): take "
            "labels -1 and 1, 0 and 1, or bool, such as y == 1."
        )
    return np.where(labels > 0, 1.0, -1.0)
