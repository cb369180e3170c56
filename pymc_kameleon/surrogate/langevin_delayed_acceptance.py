r"""GP-MALA: delayed acceptance with one surrogate of the log-likelihood and its gradient.

With m and e the marginalised and the exact density of a move times that of its start, and
:math:`R = e(x^* \to x) / e(x \to x^*)` the ratio of plain MALA, there are two exact forms:

- A: :math:`\alpha_1 = 1 \wedge r` with :math:`r = m(x^* \to x) / m(x \to x^*)`, then
  :math:`\alpha_2 = 1 \wedge R / r`. It is antisymmetric in the two points, as in GP-MH. It is the
  one of this file.
- B: :math:`\alpha_1(x, x^*) = 1 \wedge m(x^* \to x) / e(x \to x^*)`. The reverse is not its
  reciprocal but :math:`\alpha_1(x^*, x) = 1 \wedge m(x \to x^*) / e(x^* \to x)`, known once the
  model has been evaluated at :math:`x^*`, and
  :math:`\alpha_2 = 1 \wedge R\, \alpha_1(x^*, x) / \alpha_1(x, x^*)`.

References
----------
A. Benavoli, J. Wyse and A. White, Gaussian Processes to speed up MCMC with automatic
exploratory-exploitation effect; the marginalised density is its proposition 3.1, corrected.
"""

import math

import numpy as np

from pymc_kameleon.mcmc.chain import probability, settle
from pymc_kameleon.mcmc.linalg import (
    cholesky_in_place,
    copy_into,
    copy_matrix_into,
    solve_factor,
)
from pymc_kameleon.mcmc.numba_bridge import N_TERMS, call_for_nothing, evaluate, jit, jitable
from pymc_kameleon.mcmc.proposals.langevin import accept_langevin, accept_langevin_in_two_stages
from pymc_kameleon.surrogate.delayed_acceptance import (
    PASSED,
    SCREENED,
    SPREAD,
    FirstStage,
    call_for_acceptance,
    is_screened,
    log_probability,
)
from pymc_kameleon.surrogate.sparse_gp import predict_with_gradient

__all__ = ["accept_with_gradients", "log_exact_density", "log_marginal_density", "predict_into"]


@jit(allocates=True)
def log_exact_density(start, end, log_density, drift, step_size, factor):
    r"""Return log e(start -> end): density of `start` times that of the MALA move to `end`.

    The move is :math:`N(x + \tfrac12 \delta \Lambda g,\ \delta \Lambda)`, where :math:`\delta` is
    the `step_size`, `drift` (d,) the gradient g of `log_density`, which is log-likelihood plus log
    prior at `start` (d,), and `factor` (d, d) the lower Cholesky factor P of the preconditioner
    :math:`\Lambda = P P^\top`.
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

    :math:`p\, e^{\mu + \kappa/2} N(x + \tfrac12 \delta \Lambda (\mu_g + c + s),\
    \delta \Lambda + \tfrac14 \delta^2 \Lambda G \Lambda)`, all of it at `start`, with mean
    :math:`\mu` and variance :math:`\kappa` of the log-likelihood, mean :math:`\mu_g` (d,) and
    covariance G (d, d) of its gradient, covariance c (d,) of the two, and gradient s (d,) of the
    log prior. What is left is as in `log_exact_density`. It is NaN, which is a rejection, if G is
    not positive semi-definite.
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


@jit
def predict_into(process, x, prediction):
    """Predict at `x` (d,)."""
    prediction.moments[0], prediction.moments[1] = predict_with_gradient(
        process,
        x,
        prediction.gradient_mean,
        prediction.cross_covariance,
        prediction.gradient_covariance,
    )


@jitable
def _copy_prediction(source, out):
    copy_into(source.moments, out.moments)
    copy_into(source.gradient_mean, out.gradient_mean)
    copy_into(source.cross_covariance, out.cross_covariance)
    copy_matrix_into(source.gradient_covariance, out.gradient_covariance)


@jitable
def _log_marginal(start, end, value, prediction, step_size, factor):
    dim = start.size
    return log_marginal_density(
        start,
        end,
        value[0],
        value[N_TERMS : N_TERMS + dim],
        prediction.moments[0],
        prediction.moments[1],
        prediction.gradient_mean,
        prediction.cross_covariance,
        prediction.gradient_covariance,
        step_size,
        factor,
    )


@jitable(allocates=True)
def _log_exact(start, end, value, step_size, factor):
    dim = start.size
    gradient = np.empty(dim)
    for k in range(dim):
        gradient[k] = value[N_TERMS + k] + value[N_TERMS + dim + k]
    total = value[0] + value[1] + value[2]
    return log_exact_density(start, end, total, gradient, step_size, factor)


def accept_with_gradients(stage, log_density, chain, factor, step_size, uniforms):
    """Evaluate `chain.proposal` if the surrogate lets it through, and accept or reject it.

    Returns what `delayed_acceptance.accept_with_values` returns.
    """
    log_prior = evaluate(stage.log_prior, chain.proposal, stage.proposed_prior, stage.counts)
    stage.outcome[SCREENED] += 1.0
    if not log_prior > -np.inf:
        return 0.0, False
    x, proposal = chain.position, chain.proposal
    if not stage.is_current[0]:
        predict_into(stage.process, x, stage.here)
        stage.is_current[0] = True
    predict_into(stage.process, proposal, stage.there)
    stage.outcome[SPREAD] += np.sqrt(stage.there.moments[1])
    forward = _log_marginal(x, proposal, chain.value, stage.here, step_size, factor)
    reverse = _log_marginal(proposal, x, stage.proposed_prior, stage.there, step_size, factor)
    passing = probability(log_probability(reverse - forward))
    stage.outcome[PASSED] += passing
    if not uniforms[0] < passing:
        return 0.0, False
    total = evaluate(log_density, proposal, chain.proposed_value, chain.counts)
    acceptance = 0.0
    if total > -np.inf:
        log_ratio = _log_exact(proposal, x, chain.proposed_value, step_size, factor)
        log_ratio -= _log_exact(x, proposal, chain.value, step_size, factor)
        acceptance = probability(log_probability(log_ratio - (reverse - forward)))
    accepted = settle(chain, acceptance, uniforms[1])
    if accepted:
        _copy_prediction(stage.there, stage.here)
    call_for_nothing(stage.routines.learn, (stage, chain, False))
    return acceptance, accepted


def _accept(stage, log_density, chain, factor, step_size, normals, uniforms):
    if is_screened(stage, chain, uniforms):
        arguments = (stage, log_density, chain, factor, step_size, uniforms)
        return call_for_acceptance(stage.routines.accept, arguments)
    acceptance, accepted = accept_langevin(
        log_density, chain, factor, step_size, normals, uniforms[0]
    )
    call_for_nothing(stage.routines.learn, (stage, chain, accepted))
    return acceptance, accepted


accept_langevin_in_two_stages.register(FirstStage, _accept, allocates=True)
