"""Log evidence from the statistics that draws carry."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, logsumexp

from pymc_kameleon._compat import group_dataset, pareto_k
from pymc_kameleon._warnings import warn_user
from pymc_kameleon.evidence.estimates import (
    LARGEST_PARETO_K,
    Estimate,
    from_series,
    importance_sampling,
)

DISAGREEMENT = 1.0
"""Spread of the log evidence between chains above which there is a warning."""

EVEN = 0.7
"""Effective share of weights from which they are so even that the shape of their tail is noise."""

COVERAGE = 0.975
"""Quantile up to which 1.96 standard errors are to reach, also where they are from few chains."""

_TAKES = (
    "take what pm.sample(step=ParallelTemperingStep()), pm.sample(step=SurrogateHMCStep()) or, "
    "as an approximation, surrogate_posterior() returned. For a latent Gaussian process there is "
    "latent_gp.log_marginal_likelihood(model, f)."
)

__all__ = ["bridge", "compare_evidence", "log_evidence"]


def log_evidence(result: Any) -> Estimate:
    r"""Log evidence log p(y) of a model, from draws of one of three kinds.

    Those of `ParallelTemperingStep`, of `SurrogateHMCStep`, where it costs no evaluation, and,
    approximately, of `surrogate_posterior`.

    Parameters
    ----------
    result : InferenceData or DataTree
        What `pm.sample(step=ParallelTemperingStep())`, `pm.sample(step=SurrogateHMCStep())` or
        `surrogate_posterior()` returned.

    Returns
    -------
    Estimate
        `log_evidence`, its `standard_error`, and the `effective_size` of the draws behind it.

    Raises
    ------
    TypeError, ValueError
        If the draws are not those of one of these steps alone, or of an approximation that was
        checked, or the prior is improper.

    Warns
    -----
    UserWarning
        If the chains disagree, an approximation should not be believed, or a surrogate is far too
        large in a tail.

    Notes
    -----
    With draws at :math:`\beta_k` and :math:`\beta_{k+1}`, and
    :math:`u = (\beta_{k+1} - \beta_k) V`, V the log-likelihood, the log ratio c of their
    normalisers solves :math:`\sum_k \sigma(u - c) = \sum_{k+1} \sigma(c - u)`, where
    :math:`\sigma` is the logistic function: bridge sampling, which has the smallest error of all
    estimates from these draws [1]_ [2]_. The sum over temperatures is log p(y), as the reference is
    normalised. Each chain has temperatures of its own.

    A chain of `SurrogateHMCStep` has a surrogate of its own. Its density s is normalised without
    the model, and :math:`1 / p(y) = E[s(x) / (p(y \mid x) p(x))]` over its draws, whatever s is
    where the chain comes. Mass of the surrogate where the chain never comes makes it too large:
    the chains then disagree.

    The standard error is the larger of two: from the autocorrelation within chains, with the
    correlation between temperatures counted, and from the spread of the chains. That of surrogates,
    which have normalisers of their own, is seen in this spread alone: it is wider by as much as
    Student's t with m - 1 degrees of freedom, m chains, is wider than a normal distribution. Of a
    single chain the error of its normaliser is not known.

    References
    ----------
    .. [1] C. H. Bennett, "Efficient estimation of free energy differences from Monte Carlo data",
       Journal of Computational Physics 22, 1976. doi:10.1016/0021-9991(76)90078-4
    .. [2] X.-L. Meng and W. H. Wong, "Simulating ratios of normalizing constants via a simple
       identity", Statistica Sinica 6, 1996.

    Examples
    --------
    >>> with model:
    ...     idata = pm.sample(step=ParallelTemperingStep())
    >>> log_evidence(idata).log_evidence
    """
    if not (hasattr(result, "children") or hasattr(result, "groups")):
        raise TypeError(f"result is of type {type(result).__name__}: {_TAKES}")
    posterior = group_dataset(result, "posterior")
    if posterior is not None and "log_evidence_error" in posterior.attrs:
        return _of_approximation(posterior.attrs)
    statistics = group_dataset(result, "sample_stats")
    if statistics is not None and "evidence_ratio" in statistics:
        return _of_chains_on_a_surrogate(statistics)
    if statistics is None or "beta" not in statistics:
        raise ValueError(f"There is no log evidence in the statistics of these draws: {_TAKES}")
    statistics, ladders = ladders_of_chains(result)
    if not has_evidence(statistics):
        raise ValueError(
            "There is no evidence: a prior is improper (Flat, HalfFlat, ICAR), so that p(y) has no "
            "meaning, or other steps sampled some of the variables. Give every variable a proper "
            "prior, and ParallelTemperingStep() all of them."
        )
    found, estimate = combined(ladders)
    _warn_of_disagreement(found, "plots.plot_tempering(result)")
    return estimate


def is_heavy_tailed(k: float, share: float) -> bool:
    """Whether weights with this Pareto k and effective share have a mean that is unreliable."""
    return k > LARGEST_PARETO_K and share < EVEN


def _warn_of_disagreement(found, plot):
    if np.ptp(found) > DISAGREEMENT:
        warn_user(
            f"The chains disagree about the log evidence: {', '.join(f'{v:.2f}' for v in found)}. "
            "They have not found the same modes, or tuning was too short: tune longer, and look at "
            f"{plot}."
        )


def _of_chains_on_a_surrogate(statistics):
    """Return 1 / mean(exp(-r)), r the log density minus that of the normalised surrogate."""
    log_weights = -statistics["evidence_ratio"].transpose("chain", "draw").values
    if np.isnan(log_weights).any():
        raise ValueError(
            "There is no evidence: a prior is improper (Flat, HalfFlat, ICAR), so that p(y) has no "
            "meaning, or other steps sampled some of the variables, or SurrogateHMCStep had no "
            "surrogate when tuning ended. Give every variable a proper prior, SurrogateHMCStep() "
            "all of them, and tune longer."
        )
    means = logsumexp(log_weights, axis=1) - np.log(log_weights.shape[1])
    weights = np.exp(log_weights - means[:, None])
    pooled = (log_weights - means[:, None]).ravel()
    k, share = pareto_k(pooled), importance_sampling(pooled).effective_size / pooled.size
    if is_heavy_tailed(k, share):
        warn_user(
            "The surrogate of SurrogateHMCStep is far too large somewhere in the posterior's tail: "
            f"do not trust this log evidence. Pareto k is {k:.2f}, above 0.7. Tune longer."
        )
    _warn_of_disagreement(-means, "plots.plot_surrogate(result)")
    # Errors of the normalisers are seen between chains alone, of which there are few.
    few = stats.t.ppf(COVERAGE, max(len(means) - 1, 1)) / stats.norm.ppf(COVERAGE)
    return _of_chains(-means, 1.0 - weights, float(few))


def _of_approximation(found):
    """Return what `surrogate_posterior` found, of the attributes of its posterior."""
    if not np.isfinite(found["log_evidence"]):
        raise ValueError(
            "There is no evidence: a prior is improper (Flat, HalfFlat, ICAR), so that p(y) has no "
            "meaning, or surrogate_posterior was interrupted before it checked its draws."
        )
    if not found["believable"]:
        warn_user(
            "This log evidence is that of an approximation that should not be believed yet, as "
            "surrogate_posterior warned: its standard error does not say how wrong it may be. Take "
            "more evaluations."
        )
    names = "log_evidence", "log_evidence_error", "log_evidence_size"
    return Estimate(*(float(found[name]) for name in names))


def ladders_of_chains(result: Any) -> tuple[xr.Dataset, list[tuple[np.ndarray, np.ndarray]]]:
    """Sample statistics, and of each chain inverse temperatures (K,) and V of each draw (n, K).

    It raises ValueError if the draws are not those of `ParallelTemperingStep`.
    """
    statistics = group_dataset(result, "sample_stats")
    if {"beta", "log_ratio", "proper"} - set(statistics):
        raise ValueError(
            "result has no draws at several temperatures: sample with "
            "pm.sample(step=ParallelTemperingStep())."
        )
    betas = statistics["beta"].transpose("chain", "draw", ...).values[:, -1]
    ratios = statistics["log_ratio"].transpose("chain", "draw", ...).values
    sizes = np.isfinite(betas).sum(axis=1)
    return statistics, [(b[:n], v[:, :n]) for b, v, n in zip(betas, ratios, sizes, strict=True)]


def has_evidence(statistics: xr.Dataset) -> bool:
    """Whether all variables were sampled at all temperatures, and had proper priors."""
    return bool(np.all(statistics["proper"].values == 1.0))


def bridge(betas: np.ndarray, log_ratios: np.ndarray) -> tuple[float, np.ndarray]:
    """Log ratio of normalisers at beta = 1 and 0, and what each draw adds to it (n,), less a mean.

    `log_ratios` (n, K) are V of the states at `betas` (K,).
    """
    total, influence = 0.0, np.zeros(len(log_ratios))
    for k, width in enumerate(np.diff(betas)):
        lower, upper = width * log_ratios[:, k], width * log_ratios[:, k + 1]
        if not (np.any(np.isfinite(lower)) and np.any(np.isfinite(upper))):
            return -np.inf, influence
        finite = np.concatenate([part[np.isfinite(part)] for part in (lower, upper)])
        bounds = finite.min() - 50.0, finite.max() + 50.0
        c = brentq(lambda c, a=lower, b=upper: np.sum(expit(a - c)) - np.sum(expit(c - b)), *bounds)
        below, above = expit(lower - c), expit(c - upper)
        slope = np.mean(below * (1.0 - below)) + np.mean(above * (1.0 - above))
        total += c
        influence += (below - above) / max(slope, 1e-300)
    return total, influence


def combined(ladders: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, Estimate]:
    """Log evidence by each of several chains (m,), and one estimate from all of them."""
    values, series = zip(*(bridge(*ladder) for ladder in ladders), strict=True)
    return np.array(values), _of_chains(np.array(values), np.array(series))


def _of_chains(found, series, wider=1.0):
    """Mean over chains (m,), with the larger of the errors within them (m, n) and between them.

    The latter is made `wider` by this factor.
    """
    value, m = float(np.mean(found)), len(found)
    if not np.isfinite(value):
        return Estimate(value, float("nan"), 0.0)
    estimate = from_series(value, series)
    between = wider * np.std(found, ddof=1) / np.sqrt(m) if m > 1 else 0.0
    return estimate._replace(standard_error=float(max(estimate.standard_error, between)))


def compare_evidence(results: Mapping[str, Any]) -> pd.DataFrame:
    """Compare models of the same data by their evidence.

    Parameters
    ----------
    results : dict
        Name of each model -> what `log_evidence` takes, or what it or
        `latent_gp.log_marginal_likelihood` returned.

    Returns
    -------
    DataFrame
        A row a model, the best first: `log_evidence` and its `standard_error`; `log_bayes_factor`
        of the best model against this one, with its `factor_error`; and `probability` of the model
        if all are equally probable before the data.

    Raises
    ------
    ValueError
        If there are no results, and as `log_evidence` does.

    Examples
    --------
    >>> compare_evidence({"one mode": first, "two modes": second})
    """
    if not results:
        raise ValueError("results: give at least one, as in {'name of the model': idata}.")
    table = pd.DataFrame(
        {name: _value_and_error(result) for name, result in results.items()},
        index=["log_evidence", "standard_error"],
    ).T.sort_values("log_evidence", ascending=False)
    best = table.iloc[0]
    table["log_bayes_factor"] = best["log_evidence"] - table["log_evidence"]
    errors = np.hypot(table["standard_error"], best["standard_error"])
    table["factor_error"] = np.where(np.arange(len(table)) == 0, 0.0, errors)
    logs = table["log_evidence"].to_numpy()
    table["probability"] = np.exp(logs - logsumexp(logs))
    return table


def _value_and_error(result):
    """Log evidence and its standard error, of draws or of what was estimated already."""
    if hasattr(result, "log_marginal_likelihood"):
        return [result.log_marginal_likelihood, result.standard_error]
    estimate = result if hasattr(result, "log_evidence") else log_evidence(result)
    return [estimate.log_evidence, estimate.standard_error]
