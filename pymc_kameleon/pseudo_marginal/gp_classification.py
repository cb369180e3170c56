"""Marginal likelihood of the hyperparameters of a Gaussian-process classifier, estimated."""

from typing import Any, Literal

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorConstant

from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.pseudo_marginal.gp_classification_estimator import (
    GPClassificationEstimator,
    wrong_lengthscales,
)
from pymc_kameleon.validation import checked_integer

__all__ = ["gp_classification_loglikelihood"]


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
        raise ValueError(wrong_lengthscales(shape, dimension))
    if amplitude.ndim:
        raise ValueError(f"amplitude has {amplitude.ndim} dimensions: take one number.")
    for name, variable in (("lengthscales", lengthscales), ("amplitude", amplitude)):
        if isinstance(variable, TensorConstant) and not np.all(variable.data > 0):
            raise ValueError(f"{name}={variable.data}: take positive numbers.")
    return estimated_loglikelihood(estimator, lengthscales, amplitude, n_samples=n_importance)
