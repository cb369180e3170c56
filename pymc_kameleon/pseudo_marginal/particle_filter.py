"""Likelihood of a state-space model as a term of a PyMC model, for pseudo-marginal sampling."""

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable

from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.pseudo_marginal.bootstrap_filter import BootstrapFilter
from pymc_kameleon.validation import checked_integer

__all__ = ["particle_filter_loglikelihood"]


def particle_filter_loglikelihood(
    y: ArrayLike,
    *parameters: Any,
    initial: Callable,
    transition: Callable,
    log_observation: Callable,
    n_particles: int = 200,
) -> Variable:
    """Estimated log-likelihood of a state-space model whose state is a number, for a PyMC model.

    Parameters
    ----------
    y : array, shape (T,) or (T, k)
        Observations, a row a time. NaN, or a row of NaN, is a missing one: the particles move and
        are not weighted. A row with some NaN is handed to `log_observation`.
    *parameters : variables, arrays or numbers
        Random variables of the model, or anything made of them; the three functions get all of
        them, in this order.
    initial : callable
        ``initial(*parameters, n_particles, rng)``: draws of the first state, (n_particles,).
    transition : callable
        ``transition(x, t, *parameters, rng)``: a draw of the state at time t given each state `x`
        (n_particles,) at time t - 1. t is the row of `y`, from 1 on.
    log_observation : callable
        ``log_observation(y_t, x, t, *parameters)``: log density of ``y_t = y[t]`` given each state
        `x` (n_particles,), every constant that a parameter enters included.
    n_particles : int
        The standard deviation of the log estimate falls as its inverse root. Pseudo-marginal chains
        are most efficient when it is between 1 and 1.7 [4]_; `diagnostics.estimator_sd` finds the
        number that this takes.

    Returns
    -------
    TensorVariable, scalar float64
        For ``pymc.Potential``.

    Raises
    ------
    TypeError, ValueError
        See `BootstrapFilter`.

    Notes
    -----
    The mean of the estimated likelihood, not of its log, is the exact one [2]_, so that a
    pseudo-marginal chain has the exact posterior [3]_; see `estimated_loglikelihood` for the steps
    to take. If all three functions are decorated with ``numba.njit`` the filter runs compiled,
    about four times as fast. Where they divide by zero, which Numba takes for an error, the
    estimate is NaN and the proposal rejected.

    References
    ----------
    .. [1] N. J. Gordon, D. J. Salmond and A. F. M. Smith, "Novel approach to nonlinear/non-Gaussian
       Bayesian state estimation", IEE Proceedings F 140, 1993. doi:10.1049/ip-f-2.1993.0015
    .. [2] P. Del Moral, Feynman-Kac Formulae, Springer, 2004, section 7.4.
    .. [3] C. Andrieu, A. Doucet and R. Holenstein, "Particle Markov chain Monte Carlo methods",
       JRSS B 72, 2010. doi:10.1111/j.1467-9868.2009.00736.x
    .. [4] A. Doucet, M. K. Pitt, G. Deligiannidis and R. Kohn, "Efficient implementation of Markov
       chain Monte Carlo when using an unbiased likelihood estimator", Biometrika 102, 2015.
       doi:10.1093/biomet/asu075

    Examples
    --------
    Stochastic volatility:

    >>> @numba.njit
    ... def initial(mu, phi, sigma, n_particles, rng):
    ...     return mu + sigma / np.sqrt(1 - phi**2) * rng.standard_normal(n_particles)
    >>> @numba.njit
    ... def transition(x, t, mu, phi, sigma, rng):
    ...     return mu + phi * (x - mu) + sigma * rng.standard_normal(len(x))
    >>> @numba.njit
    ... def log_observation(y_t, x, t, mu, phi, sigma):
    ...     return -0.5 * (np.log(2 * np.pi) + x + y_t**2 * np.exp(-x))
    >>> with pm.Model():
    ...     mu, phi, sigma = pm.Normal("mu"), pm.Uniform("phi"), pm.HalfNormal("sigma")
    ...     loglike = particle_filter_loglikelihood(
    ...         returns, mu, phi, sigma,
    ...         initial=initial, transition=transition, log_observation=log_observation,
    ...     )
    ...     pm.Potential("loglike", loglike)
    ...     idata = pm.sample(step=KameleonStep(pseudo_marginal=True))
    """
    checked_integer("n_particles", n_particles, 1)
    log_estimate = BootstrapFilter(y, initial, transition, log_observation)
    return estimated_loglikelihood(log_estimate, *parameters, n_samples=n_particles)
