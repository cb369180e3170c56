"""Points of an earlier result, or of an array, in the raveled coordinates of a step."""

import numpy as np

from pymc_kameleon._compat import group_dataset, is_result, stacked
from pymc_kameleon.model.transforms import has_static_shape, unconstraining_function

__all__ = ["warm_points", "warm_scaling"]


def warm_points(warm_start, model, target, largest: int) -> np.ndarray:
    """At most `largest` raveled, unconstrained points to learn from, evenly thinned.

    Parameters
    ----------
    warm_start : result of `pm.sample`, or array of shape (..., d)
        An array holds raveled points in the unconstrained space, in the order of the model's
        variables.
    model : pymc.Model
    target : LogDensity
    largest : int

    Returns
    -------
    array, shape (n, d)

    Raises
    ------
    ValueError
        If a variable of the model is missing from the result, or the shapes do not fit.
    """
    if is_result(warm_start):
        points = _from_result(warm_start, model, target, largest)
    else:
        try:
            points = np.asarray(warm_start, dtype=float)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise TypeError(
                f"warm_start={warm_start!r}: take a result of pm.sample, or an array of shape "
                f"(n, {target.dim}), the raveled unconstrained {', '.join(target.names)}."
            ) from error
        if points.ndim < 2 or points.shape[-1] != target.dim:
            raise ValueError(
                f"warm_start has shape {points.shape}: take a result of pm.sample, or points of "
                f"shape (n, {target.dim}), the raveled unconstrained {', '.join(target.names)}."
            )
        points = _some_rows(points.reshape(-1, target.dim), largest)
    points = points[np.all(np.isfinite(points), axis=1)]
    if len(points) < 2:
        raise ValueError("warm_start holds fewer than two finite points; take a longer run.")
    return points


def warm_scaling(warm_start, present: set[str], absent: set[str]) -> float | None:
    """Scaling that an earlier run of the same kind of step ended with, the median over its chains.

    Parameters
    ----------
    warm_start : result of `pm.sample`, or array
    present, absent : set of str
        Sampler statistics that tell such a run from those of other steps.

    Returns
    -------
    float or None
        None if the points do not come from such a run, or from several steps at once.
    """
    statistics = group_dataset(warm_start, "sample_stats") if is_result(warm_start) else None
    if statistics is None or not present <= set(statistics) or absent & set(statistics):
        return None
    last = statistics["scaling"].isel(draw=-1)
    return float(last.median()) if last.dims == ("chain",) else None


def _some_rows(array, largest):
    """At most `largest` rows, evenly spaced."""
    return array[np.unique(np.linspace(0, len(array) - 1, largest).astype(int))]


def _from_result(result, model, target, largest):
    posterior = group_dataset(result, "posterior")
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        raise ValueError(
            f"warm_start has no {', '.join(missing)}; take a result of this model, with all of its "
            "free variables in the posterior group."
        )
    draws = {rv: stacked(posterior, rv.name) for rv in model.free_RVs}
    for rv, values in draws.items():
        if not has_static_shape(rv, values.shape[1:]):
            raise ValueError(
                f"warm_start has {rv.name} of shape {values.shape[1:]}, the model has "
                f"{rv.type.shape}; take a result of this model."
            )
    chosen = _some_rows(np.arange(len(next(iter(draws.values())))), largest)
    to_values = unconstraining_function(model, target.vars)
    points = [to_values(*(draws[rv][i] for rv in draws)) for i in chosen]
    for variable, shape, value in zip(target.vars, target.shapes, points[0], strict=True):
        if np.shape(value) != shape:
            rv = model.values_to_rvs[variable]
            raise ValueError(
                f"warm_start has {rv.name} of shape {draws[rv].shape[1:]}, which is another size "
                "than the model has now; take a result of this model."
            )
    return np.array([np.concatenate([np.ravel(v) for v in point]) for point in points])
