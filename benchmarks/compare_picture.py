"""Picture."""

from matplotlib.figure import Figure


def picture(results):
    return Figure()
