"""Approximations and log marginal likelihood of a PyMC model with a latent Gaussian process."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytensor
from pymc.model import Model, modelcontext
from pytensor.graph.basic import Variable

from pymc_kameleon._compat import posterior_result
from pymc_kameleon._threads import threads_for
from pymc_kameleon.latent_gp.gaussian_approximations import (
    GaussianApproximation,
    expectation_propagation_approximation,
    laplace_approximation,
)
from pymc_kameleon.latent_gp.latent_evidence import MarginalLikelihood, estimate_log_evidence
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction
from pymc_kameleon.model.transforms import unconstraining_function
from pymc_kameleon.validation import checked_choice, renamed

MOST_READINGS = 4
"""Models that are kept compiled, so that calls at many hyperparameters compile once."""

NO_OPTIONS = {"n_rungs": "is called n_temperatures.", "spacing": "is learnt: leave it out."}
"""What earlier versions took, and what to do instead."""


def laplace(
    model: Model | None = None,
    f: Variable | str | None = None,
    *,
    point: dict[str, Any] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> GaussianApproximation:
    """Gaussian about the mode of the posterior of a latent function.

    Parameters
    ----------
    model : pymc.Model, optional
        Default the one of the context.
    f : variable or str, optional
        The latent function: what `pm.gp.Latent(...).prior` or `pm.MvNormal` returned. Not needed if
        it is the model's only free variable.
    point : dict, optional
        Natural values of the model's other free variables, by name; needed if there are any.
    compile_kwargs : dict, optional
        As for the steps.
    **options
        tolerance : float
            Converged when the Newton step is shorter, in standard deviations of the approximation;
            default 1e-8.
        max_iterations : int
            Newton steps, default 200.
        start : array, shape (N,)
            Where to begin; the prior mean by default.

    Returns
    -------
    GaussianApproximation
        Its sites have precision -l'' and shift l' - l'' f at the mode f, for the log-likelihood l
        of each value.

    Raises
    ------
    ValueError
        If no Gaussian prior or no factorising likelihood is found, `point` lacks a variable, an
        option is out of its range, or the log-likelihood is not finite where to begin.
    ArithmeticError
        If the iterations end where the posterior has no maximum but a saddle, or at kinks of a
        likelihood that has no curvature.

    Warns
    -----
    UserWarning
        If `max_iterations` were not enough.

    Notes
    -----
    Where the likelihood is not log-concave the posterior may have several modes, of which this is
    one: prefer expectation propagation, or begin at several points.
    """
    return _approximated(laplace_approximation, model, f, point, compile_kwargs, options)


def expectation_propagation(
    model: Model | None = None,
    f: Variable | str | None = None,
    *,
    point: dict[str, Any] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> GaussianApproximation:
    """Gaussian that matches the moments of the posterior of a latent function, term by term.

    Parameters
    ----------
    model, f, point, compile_kwargs
        As for `laplace`.
    **options
        damping : float
            Share of a site's old parameters that an update keeps, from 0, the default, to below 1.
            All sites are updated at a time, and more is kept where they oscillate.
        tolerance : float
            Converged when no tilted mean differs from the marginal's by more, in its standard
            deviations, and no tilted log standard deviation; default 1e-6.
        max_sweeps : int
            Default 200.
        n_nodes : int or None
            Quadrature nodes to begin with, default 33; a probit likelihood needs none. None, for a
            logistic likelihood only, takes a fixed rule, at a tenth of the cost.
        moment_tolerance : float
            Of the quadrature, or `tolerance` if that is smaller; default 1e-6. Nodes are added
            until no moment of any term changes by more.
        sites : Sites
            Where to start, the sites of a neighbouring problem say; none by default.

    Returns
    -------
    GaussianApproximation

    Raises
    ------
    ValueError
        As for `laplace`, and if an option is out of its range or `sites` leave no Gaussian.
    FloatingPointError
        If the quadrature does not settle.

    Warns
    -----
    UserWarning
        If `max_sweeps` were not enough, or no update of the sites leaves a valid Gaussian.

    Notes
    -----
    Where the likelihood is not log-concave and the posterior has several modes, expectation
    propagation may have several fixed points, or find none.
    """
    approximate = expectation_propagation_approximation
    return _approximated(approximate, model, f, point, compile_kwargs, options)


@renamed(start="approximation", n_draws="draws", n_tune="tune")
def log_marginal_likelihood(
    model: Model | None = None,
    f: Variable | str | None = None,
    *,
    point: dict[str, Any] | None = None,
    method: Literal["ais", "tempering"] = "ais",
    approximation: Literal["prior", "laplace", "ep"] | GaussianApproximation = "ep",
    transition: str = "slice",
    compile_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> MarginalLikelihood:
    """Estimate the log marginal likelihood of the hyperparameters of a latent Gaussian process.

    Parameters
    ----------
    model, f, point, compile_kwargs
        As for `laplace`.
    method : {"ais", "tempering"}
        Annealed importance sampling, or parallel tempering.
    approximation : {"ep", "laplace", "prior"} or GaussianApproximation
        Gaussian at which the path to the posterior begins: a good one makes it short, and any gives
        the right answer.
    transition : {"slice", "hmc", "rmhmc"}
        What leaves each temperature invariant: elliptical slice sampling about that Gaussian,
        Hamiltonian Monte Carlo whitened by it, or Riemannian Hamiltonian Monte Carlo.
    **options
        n_temperatures : int
            Temperatures, 0 and 1 included; default 100, and 20 for tempering. A pilot pass learns
            where, and step sizes: swaps of all neighbours are rejected equally often.
        n_particles : int
            Independent particles, default 64; replicates of the whole tempering, default 4.
        n_moves : int
            Transitions a temperature of each particle, default 1; of annealed importance sampling.
        draws, tune : int
            Iterations of each replicate kept, and before them, default 1000 and 500; of tempering.
        estimator : {"stepping_stones", "thermodynamic_integration"}
            Which estimate of tempering is the result; both are in the report.
        cores : int
            Processes. The result for one seed does not depend on their number.
        random_seed : int, Generator or None
            One seed is one result.
        progressbar : bool
            Whether to show how far it is.

    Returns
    -------
    MarginalLikelihood
        With the final draws, resampled by their weights, as `result`: what `pm.sample` returns; and
        the Gaussian at which the path began as `approximation`.

    Raises
    ------
    ValueError, TypeError
        As for `laplace`, and for a bad argument.

    Warns
    -----
    UserWarning
        If the effective size of the weights is small, the tail of 100 weights or more is heavy (a
        Pareto k above 0.7), or neighbouring temperatures hardly ever swap.

    Notes
    -----
    Begin with expectation propagation and the slice: for a probit likelihood of 767 observations
    400 temperatures and 64 particles give a standard error of 0.06 in 18 seconds. From a prior that
    is much wider than the posterior the slice makes small moves and the weights degenerate; there
    take "hmc". Hundreds of temperatures cost less than they save, as long as a few dozen particles
    are left to tell the standard error.
    """
    for name, advice in NO_OPTIONS.items():
        if name in options:
            raise TypeError(f"{name} {advice}")
    approximate: dict[str, Callable] = {
        "prior": lambda prior, likelihood: None,
        "laplace": laplace_approximation,
        "ep": expectation_propagation_approximation,
    }
    if not isinstance(approximation, GaussianApproximation):
        besides = ", or what `laplace` or `expectation_propagation` returned"
        checked_choice("approximation", approximation, approximate, besides)
    reading, values = _read_at(model, f, point, compile_kwargs)
    function = reading.function
    prior, likelihood = function.prior.gaussian, function.likelihood
    if approximation != "prior" or transition != "slice":
        likelihood.require_gradient()
    if isinstance(approximation, GaussianApproximation):
        begin = approximation
    else:
        with threads_for(function.size):
            begin = approximate[approximation](prior, likelihood)
    evidence = estimate_log_evidence(
        prior,
        likelihood,
        sites=None if begin is None else begin.sites,
        method=method,
        transition=transition,
        **options,
    )
    draws = evidence.posterior_draws(options.get("random_seed"))
    result = posterior_result({function.name: draws[None]})
    if begin is not None and begin is not approximation:
        begin = replace(begin, likelihood=_LikelihoodAt(reading, values))
    return replace(evidence, result=result, approximation=begin)


def _approximated(approximate, model, f, point, compile_kwargs, options):
    reading, values = _read_at(model, f, point, compile_kwargs)
    function = reading.function
    function.likelihood.require_gradient()
    with threads_for(function.size):
        found = approximate(function.prior.gaussian, function.likelihood, **options)
    return replace(found, likelihood=_LikelihoodAt(reading, values))


class _Reading:
    """A latent function as it was read and compiled from a model, at any values of the others."""

    def __init__(self, model, f, compile_kwargs):
        self.function = LatentFunction(model, f, compile_kwargs=compile_kwargs)
        self.others = [model.values_to_rvs[value] for value in self.function.shared]
        if self.others:
            self._unconstrained = unconstraining_function(model, list(self.function.shared))
            initial = model.initial_point()
            shapes = {v: initial[model.rvs_to_values[v].name].shape for v in model.free_RVs}
            # The function itself, and what it does not depend on, may have any value.
            self._any = {v: np.zeros(shape, dtype=v.dtype) for v, shape in shapes.items()}

    def values_at(self, point) -> dict[str, np.ndarray]:
        """Values of the others, as the function has them, at natural ones."""
        others, point = self.others, {} if point is None else dict(point)
        missing = [variable.name for variable in others if variable.name not in point]
        unknown = set(point) - {variable.name for variable in others}
        if missing or unknown:
            raise ValueError(
                f"point: give values of {', '.join(v.name for v in others) or 'nothing'}; "
                f"{', '.join(missing) or 'none'} missing, {', '.join(sorted(unknown)) or 'none'} "
                "unknown."
            )
        if not others:
            return {}
        natural = [
            np.asarray(point[v.name], dtype=v.dtype) if v.name in point else anything
            for v, anything in self._any.items()
        ]
        names = [value.name for value in self.function.shared]
        return dict(zip(names, self._unconstrained(*natural), strict=True))

    def go_to(self, values):
        """Bring prior and likelihood to these values of the others, and to the data of now."""
        self.function.set_point(values)
        self.function.refresh()


class _LikelihoodAt:
    """The likelihood of a reading at given values, wherever others have taken the reading."""

    def __init__(self, reading, values):
        self._reading, self._values = reading, values

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        self._reading.go_to(self._values)
        return getattr(self._reading.function.likelihood, name)


_readings: OrderedDict[tuple, tuple[_Reading, list]] = OrderedDict()


def _read_at(model, f, point, compile_kwargs) -> tuple[_Reading, dict[str, np.ndarray]]:
    """Read a model at natural values of its other free variables; compile what is new only."""
    model = modelcontext(model)
    if f is None:
        if len(model.free_RVs) != 1:
            names = ", ".join(variable.name for variable in model.free_RVs)
            raise ValueError(f"f: name the latent function; the free variables are {names}.")
        f = model.free_RVs[0]
    f = model.named_vars.get(f, f) if isinstance(f, str) else f
    options = dict(compile_kwargs or {})
    # All objects that decide what is compiled.
    variables = [*model.basic_RVs, *model.potentials, *model.deterministics, *model.data_vars]
    decisive = [model, *variables, *map(model.rvs_to_values.get, model.basic_RVs)]
    decisive += map(model.rvs_to_transforms.get, model.free_RVs)
    parts = [f, *decisive, *options.values()]
    key = (threading.get_ident(), pytensor.config.floatX, *options, *map(id, parts))
    # Out of what is kept until all went well.
    reading = _readings.pop(key, (None,))[0] or _Reading(model, f, compile_kwargs)
    values = reading.values_at(point)
    reading.go_to(values)
    # What the identities are of must not be freed: another object might have them then.
    _readings[key] = reading, parts
    while len(_readings) > MOST_READINGS:
        _readings.popitem(last=False)
    return reading, values
