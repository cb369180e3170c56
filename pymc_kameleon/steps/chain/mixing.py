"""What a chain can say about itself at its end: whether it mixed, and if not, what to change."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr

from pymc_kameleon._compat import arviz_statistics
from pymc_kameleon.mcmc.history import SEEN, STORED, History, new_history, record

KEPT = 1024
"""Draws that are kept, evenly spaced."""

USUAL_ENDS = (200, 1000)
"""Draws after which mixing is judged where PyMC does not say how many there will be."""

WANTED = 100
"""Effective draws of a chain below which there is a warning: R-hat of four chains then has 400."""

SHARE = 0.1
"""... and the share of the draws, for short runs."""

FEWEST = 100
"""Draws below which nothing is said."""

CLEARLY = 2.5
"""What times the wanted size batch means have to find for ArviZ not to be asked.

Its import takes a second in the process of each chain.
"""

APART = 6.0
"""Distance of two groups of draws, in their own standard deviations, that makes them modes.

The halves of a normal are 2.7 apart, those of a uniform 3.5.
"""


class KeptDraws:
    """What a chain keeps of its draws after tuning, to say at its end how it mixed."""

    def __init__(self) -> None:
        self.history: History | None = None
        self._is_told = False

    @property
    def n_draws(self) -> int:
        """Draws after tuning so far."""
        return 0 if self.history is None else int(self.history.cursor[SEEN])

    def record(self, draw: np.ndarray) -> None:
        """Keep a draw (d,)."""
        if self.history is None:
            self.history = new_history(KEPT, draw.size)
        record(self.history, draw)

    def complaint(self, step, n_made: int, names: Callable, learnt=None) -> str | None:
        """Return what `slow_mixing` says, once, at the end of the chain or where a usual one ends.

        `step` has `expected_draws`, `default_tune_steps` and perhaps `steps_per_draw`. `n_made`
        counts the draws so far, those of tuning among them; `names` returns what to call the
        coordinates; `learnt` is as for `slow_mixing`. A step that `can_be_tempered` has a model
        that `ParallelTemperingStep` takes too.
        """
        if self.history is None or self._is_told:
            return None
        n_draws = self.n_draws
        if n_draws not in (USUAL_ENDS if step.expected_draws is None else (step.expected_draws,)):
            return None
        kept = self.history.points[: self.history.cursor[STORED]]
        n_tune = max(n_made - n_draws, step.default_tune_steps)
        steps_per_draw = getattr(step, "steps_per_draw", None)
        can_be_tempered = getattr(step, "can_be_tempered", False)
        weigher = "ParallelTemperingStep" if can_be_tempered else "pm.sample_smc"
        message = slow_mixing(kept, n_draws, n_tune, steps_per_draw, names(), learnt, weigher)
        self._is_told = message is not None
        return message


def slow_mixing(
    draws: np.ndarray,
    n_draws: int,
    n_tune: int,
    steps_per_draw: int | None,
    names: Sequence[str],
    learnt: tuple[np.ndarray, np.ndarray] | None,
    weigher: str = "pm.sample_smc",
) -> str | None:
    """Return a warning if the effective size is below `WANTED`, with the likeliest reason.

    `draws` (m, d) are evenly spaced ones of a chain, which stand for `n_draws` after `n_tune` of
    tuning. `names` are what to call the coordinates, and `learnt` is None or what tuning learnt:
    mean (d,), and Cholesky factor (d, d) of the covariance. `weigher` samples several modes.
    """
    if n_draws < FEWEST:
        return None
    wanted = min(WANTED, SHARE * n_draws)
    if _by_batch_means(draws).min() > CLEARLY * wanted:
        return None
    effective = _effective_draws(draws)
    slowest = int(np.argmin(effective))
    found = max(effective[slowest], 1.0)
    if found >= wanted:
        return None
    name = names[slowest]
    told = f"{n_draws} draws of this chain have an effective size of {found:.0f} for {name}."
    modes = _modes(draws[:, slowest])
    if modes is not None:
        low, high, changes = modes
        return (
            f"{told} It has separate modes, near {low:.3g} and {high:.3g}, and the chain changed "
            f"between them {changes} times: their weights are unknown until it changes often. Take "
            f"dispersed starts and more chains to see all modes, and {weigher} to weigh them."
        )
    unsettled = None if learnt is None else _unsettled(draws, *learnt)
    if unsettled is not None:
        return (
            f"{told} Tuning had not settled: since then, {names[unsettled]} has left the range "
            f"that it learnt. Take pm.sample(tune={_rounded(3 * n_tune)})."
        )
    factor = WANTED / found
    advice = f"draws={_rounded(factor * n_draws)}"
    if steps_per_draw is not None:
        more = _rounded(factor * steps_per_draw)
        advice = f"steps_per_draw={more} (now {steps_per_draw}) or {advice}"
    return (
        f"{told} For {WANTED} take {advice}; if that is too many, another form of the model "
        "(centred or not), or NUTS where there is a gradient."
    )


def _by_batch_means(draws):
    """Effective sample size of the ranks of each column, from sqrt(m) means of consecutive ones."""
    length = math.isqrt(len(draws))
    n = len(draws) // length
    ranks = np.argsort(np.argsort(draws[: n * length], axis=0), axis=0)
    means = ranks.reshape(n, length, -1).mean(axis=1)
    return n * ranks.var(axis=0) / means.var(axis=0, ddof=1)


def _effective_draws(draws):
    """Effective sample size of each column; 0 where that cannot be found out."""
    dataset = xr.Dataset({"x": (("chain", "draw", "coordinate"), draws[None])})
    return np.nan_to_num(arviz_statistics().ess(dataset)["x"].values)


def _modes(x):
    """Centres of two groups of draws that are far apart, and how often the chain changed."""
    origin, unit = x.min(), x.max() - x.min()
    if not 0 < unit < math.inf:
        return None
    x = (x - origin) / unit
    ordered = np.sort(x)
    n = np.arange(1, len(x))
    below, squares = np.cumsum(ordered)[:-1] / n, np.cumsum(ordered**2)[:-1] / n
    above = (ordered.sum() - n * below) / (len(x) - n)
    squares_above = ((ordered**2).sum() - n * squares) / (len(x) - n)
    within = n * (squares - below**2) + (len(x) - n) * (squares_above - above**2)
    k = int(np.argmin(within))
    spread = math.sqrt(max(within[k], 0.0) / len(x))
    changes = int(np.count_nonzero(np.diff(x > ordered[k])))
    is_rare = changes < len(x) / 20
    if above[k] - below[k] > APART * spread and is_rare:
        return origin + unit * below[k], origin + unit * above[k], changes
    return None


def _unsettled(draws, mean, factor):
    """Return a coordinate that left the range learnt while tuning, if one did."""
    with np.errstate(all="ignore"):
        scale = np.linalg.norm(factor, axis=1)
        now = draws.std(axis=0)
        shift = np.nan_to_num(np.abs(draws.mean(axis=0) - mean) / np.maximum(scale, now))
        growth = np.nan_to_num(now / scale)
    worst = int(np.argmax(np.maximum(shift / 2.0, growth / 3.0)))
    return worst if shift[worst] > 2.0 or growth[worst] > 3.0 else None


def _rounded(number):
    """Round up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return int(math.ceil(number / unit) * unit)
