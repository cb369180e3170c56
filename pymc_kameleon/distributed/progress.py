"""PyMC's progress bars, moved by messages of workers."""

from pymc.progress_bar import MCMCProgressBarManager

__all__ = ["Progress"]


class Progress:
    """A bar for each chain.

    Parameters
    ----------
    step : step method
        One like those of the chains, which says what is shown.
    chains, draws, tune : int
    progressbar, progressbar_theme
        As `pymc.sample` takes them.
    """

    def __init__(self, step, chains: int, draws: int, tune: int, progressbar, progressbar_theme):
        options = {} if progressbar_theme is None else {"progressbar_theme": progressbar_theme}
        self.bars = MCMCProgressBarManager(
            step_method=step,
            chains=chains,
            draws=draws,
            tune=tune,
            progressbar=progressbar,
            **options,
        )
        self.tune, self.total = tune, draws + tune
        self.shown = [0] * chains
        self.statistics: list[list[dict] | None] = [None] * chains

    def __enter__(self):
        self.bars.__enter__()
        return self

    def __exit__(self, *error):
        return self.bars.__exit__(*error)

    def show(self, chain: int, n: int, statistics: list[dict] | None = None) -> None:
        """Show that a chain has made `n` draws, and the statistics of the last one."""
        if statistics:
            self.statistics[chain] = statistics
        shown, latest = self.shown[chain], self.statistics[chain]
        if latest is None or n <= shown:
            return
        for draw in range(shown, n):
            self._update(chain, draw, latest, is_last=False)
        self.shown[chain] = n
        if n == self.total and (not self.bars.combined_progress or min(self.shown) == n):
            self._update(chain, n - 1, latest, is_last=True)

    def _update(self, chain, draw, statistics, is_last):
        self.bars.update(
            chain_idx=chain,
            is_last=is_last,
            draw=draw,
            tuning=draw < self.tune,
            stats=statistics,
        )
