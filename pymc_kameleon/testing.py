"""Does a step leave its target invariant? A test for steps and kernels, these and your own."""

from collections.abc import Callable, Mapping

import numpy as np
from pymc.step_methods.compound import BlockedStep
from scipy import stats

__all__ = ["frozen", "invariance_p_values"]


def frozen(step: BlockedStep, random_seed: int | None = None) -> BlockedStep:
    """Start a chain of `step` that does not adapt, with what a `warm_start` taught it.

    Parameters
    ----------
    step : a step of this package
        Built with `warm_start=`, points that are independent of the draws of the test.
    random_seed : int or None

    Returns
    -------
    step
        The same step, with adaptation frozen.
    """
    step.setup_chain(np.random.default_rng(random_seed), 0, 1)
    step.stop_tuning()
    return step


def invariance_p_values(
    step: BlockedStep,
    draws: np.ndarray,
    reference: np.ndarray,
    statistics: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
) -> dict[str, float]:
    """Move exact draws by a frozen step, and compare them with the target again.

    If the step leaves the target invariant, the moved draws are exact too and the p-values are
    uniform, so a bound of 1e-6 on each has that null probability. Take 100 transitions or more
    (`steps_per_draw`): a few hide a wrong acceptance ratio. The test has power where proposals
    differ much between the two ends of a move: no difference moves, a large scaling.

    Parameters
    ----------
    step : step
        Frozen, see `frozen`; it samples one variable, and its model has no other.
    draws : array, shape (n, d)
        Independent exact draws to start from, in the unconstrained space.
    reference : array, shape (m, d)
        Further independent exact draws, m at least n.
    statistics : mapping of callables, optional
        Functions of points (n, d) with values (n,), compared besides the d marginals.

    Returns
    -------
    dict
        Kolmogorov-Smirnov p-value by name; "x[i]" for the marginals.
    """
    (name,) = step.var_names
    moved = np.empty_like(draws)
    for i, draw in enumerate(draws):
        point, _ = step.step({name: draw})
        moved[i] = point[name]
    p_values = {
        f"x[{j}]": stats.ks_2samp(moved[:, j], reference[:, j]).pvalue
        for j in range(draws.shape[1])
    }
    for label, statistic in (statistics or {}).items():
        p_values[label] = stats.ks_2samp(statistic(moved), statistic(reference)).pvalue
    return {k: float(v) for k, v in p_values.items()}
