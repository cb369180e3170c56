"""Unbiased estimates of the marginal likelihood of a Gaussian-process classifier."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorConstant
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.spatial.distance import pdist, squareform
from scipy.special import logsumexp

from pymc_kameleon._threads import threads_for
from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, Sites, cholesky_of, whitened_precision
from pymc_kameleon.latent_gp.gaussian_approximations import PropagationState, best_seen, newton_mode
from pymc_kameleon.latent_gp.tilted_moments import Logit, Probit
from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.validation import checked_choice, checked_integer, checked_number

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


def gp_classification_loglikelihood(
    X: ArrayLike,
    y: ArrayLike,
    lengthscales: Any,
    *,
    amplitude: Any = 1.0,
    likelihood: Literal["logit", "probit"] = "logit",
    approximation: Literal["laplace", "ep"] = "laplace",
    n_importance: int = 100,
    jitter: float = 1e-6,
    prior_share: float = 0.02,
) -> Variable:
    r"""Log marginal likelihood of a Gaussian-process classifier's hyperparameters, estimated.

    Parameters
    ----------
    X : array, shape (N, D)
        Inputs; give them comparable scales first.
    y : array, shape (N,)
        Labels: -1 and 1, 0 and 1, or bool.
    lengthscales : variable or number, scalar or shape (D,)
        One for all inputs, or one for each.
    amplitude : variable or number, scalar
        Standard deviation of the latent function.
    likelihood : {"logit", "probit"}
    approximation : {"laplace", "ep"}
        Whose Gaussian is the importance density, Laplace's or that of expectation propagation. The
        latter takes two to four times as long, and has a much smaller variance where the amplitude
        is large or the likelihood probit.
    n_importance : int
        Draws of the latent function for each estimate.
    jitter : float
        Added to the diagonal of the kernel matrix, in units of the squared amplitude: part of the
        model, not of the approximation.
    prior_share : float
        Share of the importance density that is the prior, at least 0 and below 1. No weight is
        above its inverse; at 0 the variance of the estimate can be infinite.

    Returns
    -------
    TensorVariable, scalar float64
        For ``pymc.Potential``: see `estimated_loglikelihood`. It is NaN, a rejection, where a
        hyperparameter is not positive or the kernel matrix not positive definite within rounding.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these.

    Notes
    -----
    The latent function has mean 0 and the covariance

    .. math:: k(x, x') = \alpha^2 \Big(\exp\big(-\tfrac12 \sum_d (x_d - x'_d)^2 / \ell_d^2\big)
        + \mathrm{jitter}\, \delta_{x x'}\Big),

    and is integrated out by importance sampling, without bias (Filippone & Girolami 2014 [1]_;
    eq. 6 of Sejdinovic et al. 2014 [2]_), from a mixture of the approximation and a little of the
    prior [3]_. A pseudo-marginal step then has the exact posterior of the hyperparameters; it needs
    estimates whose log has a standard deviation of 1.7 or less (`diagnostics.estimator_sd`).

    References
    ----------
    .. [1] M. Filippone and M. Girolami, "Pseudo-marginal Bayesian inference for Gaussian
       processes", IEEE Transactions on Pattern Analysis and Machine Intelligence 36, 2014.
       doi:10.1109/TPAMI.2014.2316530
    .. [2] D. Sejdinovic, H. Strathmann, M. Lomeli Garcia, C. Andrieu and A. Gretton, "Kernel
       adaptive Metropolis-Hastings", ICML 2014.
    .. [3] T. Hesterberg, "Weighted average importance sampling and defensive mixture
       distributions", Technometrics 37, 1995. doi:10.1080/00401706.1995.10484303

    Examples
    --------
    >>> with pm.Model():
    ...     log_squared = pm.Normal("log_squared", 0.0, 5**0.5, shape=X.shape[1])
    ...     lengthscales = pm.math.exp(log_squared / 2)
    ...     pm.Potential("loglike", gp_classification_loglikelihood(X, y, lengthscales))
    ...     idata = pm.sample(step=KameleonStep(pseudo_marginal=True))
    """
    estimator = GPClassificationEstimator(
        X,
        y,
        likelihood=likelihood,
        approximation=approximation,
        jitter=jitter,
        prior_share=prior_share,
    )
    checked_integer("n_importance", n_importance, 1)
    lengthscales = pt.as_tensor_variable(lengthscales)
    amplitude = pt.as_tensor_variable(amplitude)
    dimension = estimator.inputs.shape[1]
    shape = lengthscales.type.shape
    if shape not in ((), (None,), (dimension,)):
        raise ValueError(_wrong_lengthscales(shape, dimension))
    if amplitude.ndim:
        raise ValueError(f"amplitude has {amplitude.ndim} dimensions: take one number.")
    for name, variable in (("lengthscales", lengthscales), ("amplitude", amplitude)):
        if isinstance(variable, TensorConstant) and not np.all(variable.data > 0):
            raise ValueError(f"{name}={variable.data}: take positive numbers.")
    return estimated_loglikelihood(estimator, lengthscales, amplitude, n_samples=n_importance)


@dataclass(frozen=True)
class ImportanceDensity:
    """Gaussian q = prior x sites, in whitened coordinates v, f = m + L v with K = L L^T.

    There the prior is N(0, I), and q has the mean `centre` (N,) and the precision F F^T, F =
    `factor`.
    """

    prior: Gaussian
    centre: np.ndarray
    factor: np.ndarray
    log_determinant: float
    """Of the factor."""

    @classmethod
    def product(cls, prior: Gaussian, sites: Sites) -> "ImportanceDensity":
        """Multiply a prior by Gaussian sites, none of whose precisions is negative."""
        factor = cholesky_of(whitened_precision(prior, sites))
        shift = prior.cholesky.T @ (sites.shift - sites.precision * prior.mean)
        half = solve_triangular(factor, shift, lower=True, check_finite=False)
        centre = solve_triangular(factor, half, lower=True, trans="T", check_finite=False)
        return cls(prior, centre, factor, float(np.log(np.diagonal(factor)).sum()))

    def draw(self, z: np.ndarray) -> np.ndarray:
        """Turn standard normals (N, n) into draws v (N, n) of q."""
        step = solve_triangular(self.factor, z, lower=True, trans="T", check_finite=False)
        return self.centre[:, None] + step

    def log_ratio(self, v: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Log q over prior (n,) at the v (N, n) that `draw` makes of z (N, n)."""
        squares = np.einsum("ij,ij->j", v, v) - np.einsum("ij,ij->j", z, z)
        return 0.5 * squares + self.log_determinant

    def whiten(self, v: np.ndarray) -> np.ndarray:
        """Return the z (N, n) of which `draw` makes v (N, n)."""
        return self.factor.T @ (v - self.centre[:, None])


class GPClassificationEstimator:
    """Unbiased estimate of the marginal likelihood of a Gaussian-process classifier.

    ``log_estimate(lengthscales, amplitude, n_importance, rng)`` is a float.

    Parameters
    ----------
    X, y, likelihood, approximation, jitter, prior_share
        As `gp_classification_loglikelihood` takes them.

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
        """Log of an estimate of p(y | hyperparameters); NaN if there is no importance density."""
        with threads_for(len(self.labels)):
            density = self.approximate(lengthscales, amplitude)
            return np.nan if density is None else self.estimate(density, n_importance, rng)

    def prior(self, lengthscales: np.ndarray, amplitude: float) -> Gaussian:
        """Prior of the latent function at the inputs; `LinAlgError` if the matrix is none."""
        lengthscales, amplitude = np.asarray(lengthscales, dtype=float), float(amplitude)
        dimension = self.inputs.shape[1]
        if lengthscales.shape not in ((), (dimension,)):
            raise ValueError(_wrong_lengthscales(lengthscales.shape, dimension))
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

        None if one of them is NaN or not positive, or the kernel matrix not positive definite
        within rounding.
        """
        try:
            prior = self.prior(lengthscales, amplitude)
            sites = self._laplace_sites(prior)
            if self.approximation == "ep":
                sites = self._propagated(prior, sites)
            return ImportanceDensity.product(prior, sites)
        except LinAlgError:
            return None

    def estimate(
        self,
        density: ImportanceDensity,
        n_importance: int,
        rng: np.random.Generator,
        *,
        antithetic: bool = True,
    ) -> float:
        r"""Log of an unbiased estimate of the integral of N(f; m, K) exp(sum_n l_n(f_n)).

        Parameters
        ----------
        density : ImportanceDensity
            From `approximate`.
        n_importance : int
            Number of draws.
        rng : numpy.random.Generator
        antithetic : bool
            Whether draws of q are in pairs, mirrored at its mean.

        Returns
        -------
        float
            -inf if no draw has a positive likelihood.

        Notes
        -----
        With draws f_i of the mixture (1 - e) q + e p of the Gaussian q and the prior p,

        .. math:: \hat p = \frac1n \sum_i \frac{p(y | f_i) p(f_i)}{(1 - e) q(f_i) + e p(f_i)},

        the defensive form (Hesterberg 1995; Owen & Zhou 2000) of eq. 6 of Sejdinovic et al. (2014).
        Without it the variance is infinite wherever the likelihood falls more slowly than the sites
        that stand for it; with it no weight is above p(y | f) / e. The number of draws from the
        prior is e n rounded up or down at random, so that its mean is e n and the estimate unbiased
        for every n. Antithetic draws of a symmetric q are draws of q, one by one: the sum has the
        same mean.
        """
        prior, share = density.prior, self.prior_share
        n_prior = int(np.floor(share * n_importance + rng.random())) if share > 0 else 0
        n_gaussian = n_importance - n_prior
        n_drawn = (n_gaussian + 1) // 2 if antithetic else n_gaussian
        drawn = rng.standard_normal((n_drawn + n_prior, prior.size)).T
        z = drawn[:, :n_drawn]
        if antithetic:
            z = np.concatenate([z, -z[:, : n_gaussian - n_drawn]], axis=1)
        v = density.draw(z)
        if n_prior:
            of_prior = drawn[:, n_drawn:]
            z = np.concatenate([z, density.whiten(of_prior)], axis=1)
            v = np.concatenate([v, of_prior], axis=1)
        log_ratio = density.log_ratio(v, z)
        if share > 0:
            log_ratio = np.logaddexp(np.log1p(-share) + log_ratio, np.log(share))
        f = v.T @ prior.cholesky.T + prior.mean
        log_weights = self.likelihood.elementwise(f).sum(axis=1) - log_ratio
        return float(logsumexp(log_weights) - np.log(n_importance))

    def _laplace_sites(self, prior):
        zero = np.zeros(prior.size)
        found = newton_mode(prior, self.likelihood, zero, zero, NEWTON_TOLERANCE, MAX_NEWTON_STEPS)
        is_near = found.residual < NEWTON_TOLERANCE
        mode = (found.position + found.step if is_near else found.position)[1]
        _, slope, second, _ = self.likelihood.terms(mode)
        precision = np.maximum(-second, 0.0)
        return Sites(precision, slope + precision * mode)

    def _propagated(self, prior, sites):
        try:
            start = PropagationState(prior, self.likelihood, sites, None, SWEEP_TOLERANCE)
        except LinAlgError:
            # A prior so broad that rounding leaves no cavity.
            return sites
        state, _ = best_seen(start, 1.0, SWEEP_TOLERANCE, MAX_SWEEPS)
        return state.sites.floored(state.product.mean)


def _wrong_lengthscales(shape, dimension):
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
