"""Picture of what a step has learnt: its local proposals at several points."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import ArrayLike
from pymc.step_methods.compound import BlockedStep
from scipy.ndimage import gaussian_filter
from scipy.spatial import KDTree
from scipy.stats import chi2

from pymc_kameleon.plots.common import checked_pair, coordinate_names, grid_of, listed, new_axes
from pymc_kameleon.validation import checked_integer, checked_share

DENSITY_COLORS = LinearSegmentedColormap.from_list(
    "density", ["#ffffff", "#dcdcec", "#aeaccf", "#827ca9"]
)
HISTORY_COLOR = "#4a4a55"
MOST_POINTS = 1000
"""Largest number of history points that are drawn, or searched for points."""

CROWDED = 0.8
"""Share of the history, its most crowded part, from which points are chosen: no lone points."""

LARGEST_STRETCH = 2.0
"""Ratio of the ranges of two coordinates up to which both have one scale."""

N_ANGLES = 200


def plot_proposals(
    step: BlockedStep,
    points: ArrayLike | None = None,
    *,
    variables: Sequence[int | str] = (0, 1),
    n_points: int = 8,
    level: float = 0.95,
    density: str | Callable | None = "auto",
    show_history: bool = True,
    grid_size: int = 120,
    ax: Axes | None = None,
    color: Any = None,
    label: str | None = None,
) -> Axes:
    r"""Draw contours of a step's local proposal at several points, over the density.

    As figure 2 of the paper of kernel adaptive Metropolis-Hastings: how the proposal at a point
    follows the shape of the posterior there. Of steps that mix in global moves it shows the kernel
    moves alone.

    Parameters
    ----------
    step : KameleonStep, FastKameleonStep, PCAKameleonStep or AdaptiveMetropolisStep
        A step that has learnt: one with a `warm_start`, or one after `pm.sample(cores=1)`, which
        leaves it as it was at the end of its last chain.
    points : array, shape (k, d) or (d,), optional
        Points to propose from: raveled unconstrained positions, in the order of the model's
        variables. By default `n_points` that are spread over the history.
    variables : pair of int or str
        The coordinates to draw, horizontal first: positions in the raveled vector, or names as in
        "rate" for a scalar variable and "x[0]" for an element of a vector.
    n_points : int
        Number of points, where `points` is not given.
    level : float
        Probability that a proposal falls inside of its contour, in (0, 1).
    density : "auto", callable or None
        What is drawn below. A callable takes an array (n, 2) of the two coordinates and returns
        log densities (n,). "auto" is the log density of the model where it has two coordinates
        (`grid_size` squared evaluations), and a smoothed histogram of the history otherwise.
    show_history : bool
        Draw (at most 1000 of) the positions that the step has learnt from.
    grid_size : int
        Number of grid lines of the density in each direction.
    ax : matplotlib Axes, optional
        Where to draw; default a new figure. To compare two steps, draw the second one on the axes
        of the first with `density=None, show_history=False`.
    color : color, optional
        Of the contours; default the next one of the axes.
    label : str, optional
        Name of the step in a legend.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    RuntimeError
        If the step has learnt nothing.
    ValueError, TypeError
        For a bad argument, or a step with only one coordinate.

    Notes
    -----
    A contour is the ellipse :math:`(y - x)^\top C(x)^{-1} (y - x) = \chi^2_2(\text{level})` with
    the block C of the two coordinates in `step.proposal_covariance(x)`. For a Gaussian proposal the
    share `level` falls inside; the proposal of `PCAKameleonStep` is a mixture of Gaussians, of
    which this is the Gaussian with the same covariance.

    Examples
    --------
    >>> with model:
    ...     step = KameleonStep(warm_start=idata)
    >>> plot_proposals(step, variables=("rate", "x[0]"))
    """
    names = _checked_names(step)
    pair = checked_pair(variables, names)
    n_points = checked_integer("n_points", n_points, 1)
    grid_size = checked_integer("grid_size", grid_size, 2)
    radius = math.sqrt(chi2.ppf(checked_share("level", level, open_interval=True), 2))
    _check_density(density)
    history = _history(step)
    if points is None:
        points = _spread(_required(history, step), pair, n_points)
    else:
        points = _checked_points(points, names)
    covariances = step.proposal_covariance(points)[:, pair][:, :, pair]
    contours = _ellipses(points[:, pair], covariances, radius)

    ax = new_axes() if ax is None else ax
    is_first = not ax.has_data()
    shown = contours.reshape(-1, 2)
    if history is not None:
        shown = np.concatenate([shown, history[:, pair]])
    if density is not None:
        _draw_density(ax, density, step, history, pair, shown, grid_size)
    if show_history and history is not None:
        drawn = _thinned(history)[:, pair]
        ax.plot(*drawn.T, ".", ms=2.5, mew=0, color=HISTORY_COLOR, alpha=0.35, zorder=1)
    _draw_contours(ax, points[:, pair], contours, color, label)
    if is_first:
        ax.set(xlabel=names[pair[0]][0], ylabel=names[pair[1]][0])
        ranges = np.ptp(shown, axis=0)
        if ranges.max() < LARGEST_STRETCH * ranges.min():
            ax.set_aspect("equal")
    return ax


def _checked_names(step) -> list[list[str]]:
    if not hasattr(step, "proposal_covariance"):
        raise TypeError(
            f"step={type(step).__name__}: take a step of pymc_kameleon (one of the `methods` of a "
            "compound step)."
        )
    names = coordinate_names(step)
    if len(names) < 2:
        raise ValueError(
            f"step moves only {names[0][0]}: proposals are drawn in the plane of two coordinates, "
            "so take a step with at least two."
        )
    return names


def _check_density(density):
    if not (density is None or callable(density) or isinstance(density, str)):
        raise TypeError(
            f'density={density!r}: take "auto", None, or a function of points (n, 2) that returns '
            "log densities (n,)."
        )
    if isinstance(density, str) and density != "auto":
        raise ValueError(f'density={density!r}: take "auto", None or a function.')


def _history(step) -> np.ndarray | None:
    """Positions that the step has learnt from, shape (n, d), or None if it keeps none."""
    if step.warm is not None:
        return step.warm.points
    history = getattr(step.learner, "history", None)
    points = None if history is None else history.later_half()
    return points if points is not None and len(points) else None


def _required(history, step):
    if history is None:
        step.proposal_covariance(np.zeros(step.dim))
        raise ValueError(
            f"points: this {type(step).__name__} keeps no history to choose points from; pass "
            f"points of shape (k, {step.dim}), or make the step with warm_start=idata."
        )
    return history


def _checked_points(points, names) -> np.ndarray:
    dim = len(names)
    meaning = f"points of shape (k, {dim}), the raveled unconstrained {listed(names)}"
    try:
        array = np.atleast_2d(np.asarray(points, dtype=float))
    except (TypeError, ValueError) as error:
        raise TypeError(f"points={points!r}: take {meaning}.") from error
    if array.ndim != 2 or array.shape[1] != dim or not len(array):
        raise ValueError(f"points has shape {np.shape(points)}: take {meaning}.")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"points has NaN or infinite entries: take {meaning}, all finite.")
    return array


def _thinned(rows: np.ndarray) -> np.ndarray:
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS))
    return rows[np.unique(chosen.astype(int))]


def _spread(history: np.ndarray, pair: list[int], n_points: int) -> np.ndarray:
    """Rows of `history` that lie in its crowded parts, each as far as can be from the others."""
    rows = np.unique(_thinned(history), axis=0)
    plane = rows[:, pair]
    plane = (plane - plane.mean(axis=0)) / np.maximum(plane.std(axis=0), 1e-300)
    neighbours = min(len(rows), 1 + math.isqrt(len(rows)))
    reach = np.reshape(KDTree(plane).query(plane, [neighbours])[0], -1)
    crowded = np.argsort(reach, kind="stable")[: max(n_points, round(CROWDED * len(rows)))]
    rows, plane = rows[crowded], plane[crowded]
    # The first of them is only to measure from: it need not be a good one.
    distances = np.linalg.norm(plane, axis=1)
    chosen = []
    for _ in range(min(n_points, len(rows))):
        chosen.append(int(np.argmax(distances)))
        further = np.linalg.norm(plane - plane[chosen[-1]], axis=1)
        distances = further if len(chosen) == 1 else np.minimum(distances, further)
    return rows[chosen]


def _ellipses(centres: np.ndarray, covariances: np.ndarray, radius: float) -> np.ndarray:
    """Points at Mahalanobis distance `radius` from each centre, shape (k, N_ANGLES, 2)."""
    angles = np.linspace(0, 2 * np.pi, N_ANGLES)
    circle = radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    eigenvalues, vectors = np.linalg.eigh(covariances)
    factors = vectors * np.sqrt(np.maximum(eigenvalues, 0.0))[:, None]
    return centres[:, None] + circle @ np.swapaxes(factors, -1, -2)


def _draw_density(ax, density, step, history, pair, shown, grid_size):
    low, high = shown.min(axis=0), shown.max(axis=0)
    margin = 0.04 * (high - low)
    lines = np.linspace(low - margin, high + margin, grid_size)
    if callable(density):
        heights = _relative(np.asarray(density(grid_of(lines)), dtype=float))
    elif step.dim == 2:
        heights = _relative(_log_densities(step, grid_of(lines)[:, pair]))
    elif history is not None:
        heights = _smoothed_histogram(history[:, pair], lines)
    else:
        return
    ax.pcolormesh(
        *lines.T,
        heights.reshape(grid_size, grid_size),
        cmap=DENSITY_COLORS,
        shading="gouraud",
        rasterized=True,
        zorder=0,
    )


def _relative(log_densities: np.ndarray) -> np.ndarray:
    """Densities in units of the largest one, 0 where they are not finite."""
    possible = np.where(np.isfinite(log_densities), log_densities, -np.inf)
    largest = possible.max()
    return np.exp(possible - largest) if np.isfinite(largest) else np.zeros_like(possible)


def _log_densities(step, points: np.ndarray) -> np.ndarray:
    evaluate, value = step.target.function.plain()[0], np.empty(3)
    found = np.empty(len(points))
    with np.errstate(all="ignore"):
        for i, point in enumerate(points):
            evaluate(point, value)
            found[i] = value.sum()
    return found


def _smoothed_histogram(rows: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Count rows around each crossing of the grid lines, smoothed over a 40th of the picture."""
    half = 0.5 * (lines[1] - lines[0])
    edges = np.concatenate([lines - half, lines[-1:] + half])
    counts = np.histogram2d(rows[:, 0], rows[:, 1], bins=list(edges.T))[0].T
    smoothed = gaussian_filter(counts, len(lines) / 40)
    return smoothed / smoothed.max()


def _draw_contours(ax, centres, contours, color, label):
    for i, contour in enumerate(contours):
        (line,) = ax.plot(
            *contour.T, color=color, lw=1.6, zorder=3, label=label if i == 0 else None
        )
        color = line.get_color()
    ax.plot(*centres.T, "o", ms=4, color=color, mec="white", mew=0.7, zorder=4)
    if label is not None:
        ax.legend()
