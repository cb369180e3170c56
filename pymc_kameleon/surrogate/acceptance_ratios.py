r"""Acceptance ratios of delayed acceptance, as logs: GP-MH, and GP-MALA with gradients.

With m and e the marginalised and the exact density of a MALA move times that of its start, and
:math:`R = e(x^* \to x) / e(x \to x^*)` the ratio of plain MALA, there are two exact forms:

- A: :math:`\alpha_1 = 1 \wedge r` with :math:`r = m(x^* \to x) / m(x \to x^*)`, then
  :math:`\alpha_2 = 1 \wedge R / r`. It is antisymmetric in the two points, as in GP-MH. It is the
  one that is used.
- B: :math:`\alpha_1(x, x^*) = 1 \wedge m(x^* \to x) / e(x \to x^*)`. The reverse is not its
  reciprocal but :math:`\alpha_1(x^*, x) = 1 \wedge m(x \to x^*) / e(x^* \to x)`, known once the
  model has been evaluated at :math:`x^*`, and
  :math:`\alpha_2 = 1 \wedge R\, \alpha_1(x^*, x) / \alpha_1(x, x^*)`.

A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
exploratory-exploitation effect; the marginalised density is its proposition 3.1, corrected.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.bridge.jit import jit
from pymc_kameleon.mcmc.linalg import cholesky_in_place, solve_factor


@jit
def log_probability(log_ratio):
    """Log of 1 ∧ exp(`log_ratio`); -inf, a rejection, where the ratio is NaN."""
    if log_ratio >= 0.0:
        return 0.0
    if log_ratio < 0.0:
        return log_ratio
    return -np.inf


@jit
def first_stage(surrogate_proposed, surrogate_current, log_prior_ratio, log_proposal_ratio):
    """Log acceptance probability of the first stage of GP-MH.

    S(x*) and S(x) are by the same code even where the log-likelihood is known; the ratios are those
    of the prior, with Jacobians, log p(x*) - log p(x), and of the proposal, log q(x | x*) - log
    q(x* | x).
    """
    return log_probability(
        surrogate_proposed - surrogate_current + log_prior_ratio + log_proposal_ratio
    )


@jit
def second_stage(likelihood_proposed, likelihood_current, surrogate_proposed, surrogate_current):
    """Log acceptance probability of GP-MH's second stage; prior and proposal have cancelled."""
    return log_probability(
        likelihood_proposed - likelihood_current - (surrogate_proposed - surrogate_current)
    )


@jit
def corrected_second_stage(log_ratio, log_first, log_first_reverse):
    """Log acceptance probability of the second stage after a first stage of any kind.

    `log_ratio` is that of Metropolis and Hastings; the others are logs of the probabilities that
    the first stage lets x -> x* through, and that it would let x* -> x through.
    """
    return log_probability(log_ratio + log_first_reverse - log_first)


@jit(allocates=True)
def log_exact_density(start, end, log_density, drift, step_size, factor):
    r"""Return log e(start -> end): density of `start` times that of the MALA move to `end`.

    The move is :math:`N(x + \tfrac12 \delta \Lambda g,\ \delta \Lambda)` for the `step_size`
    :math:`\delta`, `drift` g and :math:`\Lambda = P P^\top`, P the lower triangular `factor`.
    """
    dim = start.size
    whitened = np.empty(dim)
    total = log_density - 0.5 * dim * math.log(2.0 * math.pi * step_size)
    _whitened_move(start, end, drift, step_size, factor, whitened)
    for i in range(dim):
        total -= 0.5 * whitened[i] * whitened[i] / step_size + math.log(factor[i, i])
    return total


@jit(allocates=True)
def log_marginal_density(
    start,
    end,
    log_prior,
    prior_gradient,
    mean,
    variance,
    gradient_mean,
    cross_covariance,
    gradient_covariance,
    step_size,
    factor,
):
    r"""Return log m(start -> end): e averaged over log-likelihood and gradient.

    :math:`p\, e^{\mu + \kappa/2} N(x + \tfrac12 \delta \Lambda (\mu_g + c + s),\ \delta \Lambda +
    \tfrac14 \delta^2 \Lambda G \Lambda)`, all of it at `start`, with the moments of a `Prediction`
    and the gradient s (d,) of the log prior. It is NaN, which is a rejection, if G is not positive
    semi-definite.
    """
    dim = start.size
    drift, whitened, root = np.empty(dim), np.empty(dim), np.zeros((dim, dim))
    for i in range(dim):
        drift[i] = gradient_mean[i] + cross_covariance[i] + prior_gradient[i]
    _whitened_move(start, end, drift, step_size, factor, whitened)
    for i in range(dim):
        for j in range(i + 1):
            for a in range(i, dim):
                for b in range(j, dim):
                    root[i, j] += factor[a, i] * gradient_covariance[a, b] * factor[b, j]
            root[i, j] *= 0.25 * step_size * step_size
        root[i, i] += step_size
    if not cholesky_in_place(root):
        return np.nan
    solve_factor(root, whitened, whitened)
    total = log_prior + mean + 0.5 * variance - 0.5 * dim * math.log(2.0 * math.pi)
    for i in range(dim):
        total -= 0.5 * whitened[i] * whitened[i] + math.log(root[i, i] * factor[i, i])
    return total


@jit
def _whitened_move(start, end, drift, step_size, factor, out):
    r""":math:`P^{-1} (end - start) - \tfrac12 \delta P^\top g` into `out`."""
    for i in range(out.size):
        out[i] = end[i] - start[i]
    solve_factor(factor, out, out)
    for i in range(out.size):
        total = 0.0
        for j in range(i, out.size):
            total += factor[j, i] * drift[j]
        out[i] -= 0.5 * step_size * total
