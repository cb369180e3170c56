"""A progress bar of work that is counted, also by forked processes."""

import time
from contextlib import contextmanager

from rich.progress import Progress, ProgressColumn

REFRESH = 0.2
"""Seconds between two refreshes of the bar."""


@contextmanager
def counting_bar(*columns: ProgressColumn, total: int, shown: bool, text: str = "", **fields):
    """Give a function that shows how much is done, of how much, and new values of `fields`."""
    # Without auto-refresh there is no thread, which a forked process would not inherit.
    with Progress(*columns, auto_refresh=False, disable=not shown) as progress:
        task, last = progress.add_task(text, total=total, **fields), time.monotonic()

        def show(done, total=total, **fields):
            nonlocal last
            is_due = done == total or time.monotonic() - last > REFRESH
            if is_due:
                last = time.monotonic()
            progress.update(task, completed=done, total=total, refresh=is_due, **fields)

        yield show
