"""Picture of parallel tempering: where swaps are rejected, states on their way, log evidence."""

from typing import Any

import numpy as np
from matplotlib import rc_context

from pymc_kameleon.evidence.from_draws import combined, has_evidence, ladders_of_chains
from pymc_kameleon.plots.common import COLORS, INK, STYLE, row_of_axes

N_PARTS = 12
"""Lengths of the chains at which the log evidence is computed."""


def plot_tempering(result: Any, *, axes: np.ndarray | None = None) -> np.ndarray:
    """Draw how well states travelled between the prior and the posterior, and the log evidence.

    Left, the rejection probabilities of swaps summed from beta = 0 upwards: temperatures divide the
    height equally, so a step between two neighbours that is much higher than the others is where
    they are too far apart; the height at 1 is the communication barrier. Middle, round trips of
    each chain: a line that stays level says that no state came from the prior for so long, and that
    the weights of modes may be wrong. Right, the log evidence from the draws so far, with two
    standard errors; only where there is one.

    Parameters
    ----------
    result : InferenceData or DataTree
        What `pm.sample(step=ParallelTemperingStep())` returned.
    axes : three matplotlib Axes, optional
        Where to draw; default a new figure.

    Returns
    -------
    array of matplotlib Axes, shape (3,)

    Raises
    ------
    ValueError
        If the draws are not those of `ParallelTemperingStep`.
    TypeError
        If `axes` are not three.

    References
    ----------
    S. Syed, A. Bouchard-Cote, G. Deligiannidis and A. Doucet, "Non-reversible parallel tempering: a
    scalable highly parallel MCMC scheme", JRSS B 84, 2022. doi:10.1111/rssb.12464

    Examples
    --------
    >>> plot_tempering(pm.sample(step=ParallelTemperingStep()))
    """
    statistics, ladders = ladders_of_chains(result)
    with rc_context(STYLE):
        axes = row_of_axes(axes, 3, "three", figsize=(12.0, 3.6))
        trips = statistics["round_trips"].values
        for i, (betas, ratios) in enumerate(ladders):
            color = COLORS[i % len(COLORS)]
            axes[0].plot(betas, _barrier(betas, ratios), "o-", color=color, markersize=3.5, lw=1.0)
            axes[1].plot(np.arange(1, trips.shape[1] + 1), trips[i], color=color, lw=1.0)
        axes[0].set(xlabel=r"inverse temperature $\beta$", ylabel="summed rejections of swaps")
        axes[1].set(xlabel="draw", ylabel="round trips of each chain", ylim=(0, None))
        _draw_evidence(axes[2], ladders, statistics)
    return axes


def _barrier(betas, ratios):
    """Rejection probabilities of swaps between neighbours, summed from the first."""
    widths = np.diff(betas)
    log_ratio = widths * (ratios[:, :-1] - ratios[:, 1:])
    accepted = np.exp(np.minimum(0.0, np.where(np.isnan(log_ratio), -np.inf, log_ratio)))
    return np.concatenate([[0.0], np.cumsum(1.0 - accepted.mean(axis=0))])


def _draw_evidence(ax, ladders, statistics):
    ax.set(xlabel="draw", ylabel=r"log evidence ($\pm$2 standard errors)")
    if not has_evidence(statistics):
        ax.text(0.5, 0.5, "no evidence of an\nimproper prior", ha="center", va="center")
        return
    n = statistics.sizes["draw"]
    lengths = np.unique(np.linspace(max(n / N_PARTS, 4), n, N_PARTS).astype(int))
    found = [combined([(b, v[:length]) for b, v in ladders])[1] for length in lengths]
    errors = [2.0 * estimate.standard_error for estimate in found]
    values = [estimate.log_evidence for estimate in found]
    ax.errorbar(lengths, values, errors, fmt="o", color=INK, markersize=4, capsize=2.5)
    ax.axhline(values[-1], color=INK, linewidth=0.8, linestyle=":")
