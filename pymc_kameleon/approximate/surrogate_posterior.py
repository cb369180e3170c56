"""An approximate posterior, and its evidence, from a few hundred evaluations of the likelihood."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pymc.backends.ndarray import NDArray
from pymc.blocking import DictToArrayBijection, RaveledVars
from pymc.model import Model, modelcontext
from pymc.util import get_random_generator
from pymc.vartypes import discrete_types

from pymc_kameleon._compat import result_of_traces
from pymc_kameleon._warnings import warn_user
from pymc_kameleon.approximate.checked_exploration import FEWEST_CHECKED, CheckedExploration
from pymc_kameleon.approximate.exploration import Explorer
from pymc_kameleon.evidence.from_draws import is_heavy_tailed
from pymc_kameleon.gp.mean import n_coefficients
from pymc_kameleon.mcmc.chain import NONFINITE
from pymc_kameleon.model.black_box import Calls
from pymc_kameleon.model.operations import has_black_box
from pymc_kameleon.model.traced import traced
from pymc_kameleon.steps.chain.report import MANY, failures, not_finite
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.validation import checked_integer, checked_number, names_close_arguments

__all__ = ["surrogate_posterior"]

_log = logging.getLogger("pymc.kameleon")

FEWEST_LEARNT = 2, 15
"""Evaluations that teach, at least: times the dimension, and beside that."""

LARGEST_ERROR, SMALLEST_SHARE = 0.1, 0.5
"""Predicted error above which there is a warning, and effective share of the checks below."""

FEW_CHECKED = 20
"""Draws of the last check below which there is a warning: where a surrogate was far too large, none
may be left for another check."""

ENOUGH = 2
"""Evaluations that teach, for each coefficient of a quadratic, below which there is a warning: what
a surrogate does not know of at all its check does not find."""

STATISTICS = {"surrogate_log_density": np.dtype(float), "surrogate_sd": np.dtype(float)}


@names_close_arguments
def surrogate_posterior(
    model: Model | None = None,
    *,
    n_evaluations: int = 250,
    draws: int = 1000,
    chains: int = 4,
    tolerance: float | None = None,
    store: EvaluationStore | None = None,
    cores: int = 1,
    var_names: Sequence[str] | None = None,
    random_seed: Any = None,
    progressbar: bool = True,
    compile_kwargs: dict[str, Any] | None = None,
) -> Any:
    r"""Approximate the posterior of a model from a few hundred evaluations of its likelihood.

    For likelihoods that cost seconds or more, have no gradient, and are smooth, in up to about 20
    dimensions. Evaluations go where a regression of the log-likelihood is uncertain, and what is
    returned are draws from that regression with the model's own prior: **an approximation**, with
    an estimate of its error that true values at fresh draws give. The same evaluations begin exact
    chains of `SurrogateHMCStep`, if both are given one store.

    ::

        evaluate some draws from the prior, and search for modes from the best
        look for exchanges and reflections of parameters that change nothing
        in turns: fit the surrogate to all evaluations; evaluate where it is uncertain, of its draws
            at all temperatures, picked one by one as if those before were known
        evaluate fresh draws from the surrogate, one in eight of all evaluations: the check
        fit it to these as well, and draw from it

    Parameters
    ----------
    model : pymc.Model, optional
        Default the one of the context. All its free variables are continuous.
    n_evaluations : int
        Evaluations of the likelihood that are made in all, at most. Those of this model that the
        store has are among them: the same call made again makes the rest only, and none where all
        are there. A larger number asks for more.
    draws, chains : int
        Nearly independent draws of the surrogate are returned as so many chains, for ArviZ.
    tolerance : float, optional
        Stop as soon as the cautious error is below this. By default all evaluations are made.
    store : EvaluationStore, optional
        Keeps the evaluations. What is known already is learnt from, and not evaluated again. Where
        a run is killed, as many are lost as are being made: one, or `cores`.
    cores : int
        Processes that evaluate at once, except in the search for a mode: a few times less waiting
        with as many cores, and the same result to the last bit. They are forked; on Windows, and
        beside a library whose threads a fork does not have (JAX, PyTorch, TensorFlow), they begin
        anew, which takes some seconds.
    var_names : list of str, optional
        Variables to return; by default all but deterministics that hold a black box, which would be
        called once a draw.
    random_seed : int, sequence of int, Generator or None
    progressbar : bool
        Show evaluations made, the cautious error and the time left.
    compile_kwargs : dict, optional
        For `model.compile_fn`.

    Returns
    -------
    InferenceData (PyMC 5) or DataTree (PyMC 6)
        As of `pymc.sample`, with the sampler statistics `surrogate_log_density` of each draw and
        its standard deviation `surrogate_sd`. Attributes of the posterior are below.

    Raises
    ------
    ValueError, TypeError
        For a bad argument, discrete variables, a likelihood that is an estimate, a store of another
        model, or too few evaluations for the dimension, naming it.

    Warns
    -----
    UserWarning
        If the check says that the draws are not to be believed, or it was interrupted: what is
        known by then is returned, if it is enough for a surrogate.

    Notes
    -----
    Attributes of the posterior:

    ======================= ========================================================================
    approximation           "surrogate_posterior": these are no exact draws
    n_evaluations           evaluations of the likelihood made
    n_known                 evaluations that the store knew
    predicted_error         predicted distance to the posterior: mean over the marginals of the
                            total variation distance, between 0 and 1; that of exact draws of this
                            number is included
    cautious_error          the same as the surrogate and its last check say it, whose values have
                            been learnt since: above 0.1 there is a warning
    n_checked               true values at fresh draws of the surrogate
    effective_share         effective size of their importance weights, a share of them
    believable              1, or 0 where there was a warning
    pareto_k                shape of the tail of these weights, above 0.7 not to be believed
    log_evidence            log p(y), NaN if a prior is improper; `log_evidence` takes the result
    log_evidence_error      its standard error
    log_evidence_size       effective number of draws behind it
    ======================= ========================================================================

    Modes that no evaluation came near are not known to any of these figures.

    The log evidence is that of the surrogate, by bridge sampling to a mixture of Gaussians [1]_.
    Its standard error is how uncertain the process is, scaled by what the check found, and at least
    half of the difference to the evidence that the importance weights of the check give.

    References
    ----------
    .. [1] X.-L. Meng and W. H. Wong, "Simulating ratios of normalizing constants via a simple
       identity", Statistica Sinica 6, 1996.

    Examples
    --------
    >>> idata = surrogate_posterior(model, n_evaluations=100)
    >>> idata["posterior"].attrs["predicted_error"]

    >>> store = EvaluationStore("run.sqlite")
    >>> with model:
    ...     approximate = surrogate_posterior(store=store, n_evaluations=100)
    ...     idata = pm.sample(step=SurrogateHMCStep(store=store))  # exact, from the same start
    """
    if not isinstance(model, Model | None):
        raise TypeError(
            f"model={model!r}: take a pymc.Model. The number of evaluations is an argument by its "
            "name, surrogate_posterior(n_evaluations=...)."
        )
    model = modelcontext(model)
    draws, chains = checked_integer("draws", draws, 1), checked_integer("chains", chains, 1)
    n_evaluations = checked_integer("n_evaluations", n_evaluations, 1)
    cores = checked_integer("cores", cores, 1)
    if tolerance is not None:
        tolerance = checked_number("tolerance", tolerance, above=0)
    _refuse_discrete(model)
    variables = _returned(model, var_names)
    explorer = Explorer(
        model, budget=n_evaluations, cores=cores, store=store, compile_kwargs=compile_kwargs
    )
    _refuse_too_few(explorer, n_evaluations)
    begin, calls = time.time(), Calls()
    run = CheckedExploration(explorer, tolerance)
    try:
        with calls.counting():
            is_complete = run.learn(get_random_generator(random_seed), progressbar)
    finally:
        if explorer.parallel is not None:
            explorer.parallel.close()
    approximation = run.draw(chains * draws)
    found = _attributes(run, approximation)
    failed = failures(explorer)
    reasons = (
        _reasons_for_doubt(found, explorer.target.dim, failed is not None) if is_complete else []
    )
    cause = failed or (explorer.randomness() if reasons else None)
    found |= {"n_evaluations": explorer.n_calls, "believable": int(is_complete and not reasons)}
    result = _result(model, variables, chains, explorer, approximation, time.time() - begin)
    result["posterior"].attrs.update(found)
    if not is_complete:
        _warn_of_interrupt(found, store)
    elif reasons:
        _warn_of(", ".join(explorer.target.names), found, reasons, cause)
    nonfinite = int(explorer.chain.counts[NONFINITE]) - explorer.report.failed
    if nonfinite > MANY * explorer.n_calls:
        warn_user(not_finite(", ".join(explorer.target.names), nonfinite / explorer.n_calls))
    complaint = calls.complaint()
    if complaint is not None:
        warn_user(complaint)
    return result


# what is asked for --------------------------------------------------------------------------------


def _refuse_discrete(model):
    discrete = [v.name for v in model.free_RVs if v.dtype in discrete_types]
    if discrete:
        raise ValueError(
            f"{', '.join(discrete)} {'is' if len(discrete) == 1 else 'are'} discrete, and a "
            "surrogate is of continuous variables: sum them out of the likelihood (as pm.Mixture "
            "does), or sample with pm.sample(step=[KameleonStep(vars=[...])]), which gives them "
            "steps of their own."
        )


def _refuse_too_few(explorer, n_evaluations):
    fewest = FEWEST_LEARNT[0] * explorer.target.dim + FEWEST_LEARNT[1] + FEWEST_CHECKED
    if n_evaluations < fewest:
        raise ValueError(
            f"n_evaluations={n_evaluations}: in {explorer.target.dim} dimensions "
            f"({', '.join(explorer.target.names)}) take {fewest} at least, of which "
            f"{FEWEST_CHECKED} check the surrogate."
        )


def _returned(model, var_names):
    """Variables of the trace; deterministics that call a black box only if they were asked for."""
    found = traced(model, None if var_names is None else list(var_names))
    if var_names is not None:
        return found
    graphs = zip(
        model.deterministics, model.replace_rvs_by_values(model.deterministics), strict=True
    )
    expensive = {variable.name for variable, graph in graphs if has_black_box(graph)}
    if expensive:
        _log.info(
            "%s would be called once a draw, and %s left out: name what you want in var_names, or "
            "write pm.compute_deterministics for a few of the draws.",
            ", ".join(sorted(expensive)),
            "is" if len(expensive) == 1 else "are",
        )
    return [variable for variable in found if variable.name not in expensive]


# the result ---------------------------------------------------------------------------------------


def _result(model, variables, chains, explorer, approximation, seconds):
    """Return draws as `pymc.sample` does."""
    points = explorer.target.scores.to_values(approximation.points)
    parts = points, approximation.values, approximation.deviations
    traces = [
        _trace(model, variables, i, *part)
        for i, part in enumerate(zip(*(np.split(x, chains) for x in parts), strict=True))
    ]
    return result_of_traces(
        traces,
        tune=0,
        seconds=seconds,
        model=model,
        discard_tuned_samples=True,
        compute_convergence_checks=False,
        return_inferencedata=True,
        keep_warning_stat=False,
        idata_kwargs={},
        quiet=True,
    )


def _trace(model, variables, chain, points, *statistics):
    """Trace of a chain of raveled `points` (n, d) with `STATISTICS`, each (n,)."""
    trace = NDArray(model=model, vars=variables)
    trace.setup(len(points), chain, [STATISTICS])
    start = model.initial_point()
    in_order = {variable.name: start[variable.name] for variable in model.value_vars}
    shapes = DictToArrayBijection.map(in_order).point_map_info
    for point, *row in zip(points, *statistics, strict=True):
        values = DictToArrayBijection.rmap(RaveledVars(point, shapes))
        named = dict(zip(STATISTICS, row, strict=True))
        trace.record(values, [named], in_warmup=False)
    return trace


def _attributes(run, approximation):
    explorer, checked, evidence = run.explorer, run.checked, approximation.evidence
    found = {
        "approximation": "surrogate_posterior",
        "n_evaluations": explorer.n_calls,
        "n_known": explorer.n_known,
        "predicted_error": approximation.predicted_error,
        "cautious_error": approximation.cautious_error,
        "n_checked": checked.n,
        "effective_share": checked.size / max(checked.n, 1),
        "pareto_k": checked.pareto_k,
        "log_evidence": evidence.log_evidence,
        "log_evidence_error": evidence.standard_error,
        "log_evidence_size": evidence.effective_size,
    }
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}


# what is said of it -------------------------------------------------------------------------------


def _warn_of_interrupt(found, store):
    checked = "checked earlier" if found["n_checked"] else "that was not checked"
    advice = (
        "With store=EvaluationStore(path) the same call would go on from these evaluations"
        if store is None
        else f"The same call goes on: {store} has these evaluations"
    )
    warn_user(
        f"Interrupted after {found['n_evaluations']} evaluations: the draws are those of the "
        f"surrogate by then, an approximation {checked}. {advice}."
    )


def _warn_of(names, found, reasons, cause):
    known = found["n_evaluations"] + found["n_known"]
    advice = cause or (
        f"Take more evaluations (n_evaluations={2 * known}; with store= none is "
        "made twice), or exact chains that begin with these, "
        "pm.sample(step=SurrogateHMCStep(store=store)). If twice as many do not help, the log "
        "density is not smooth (jumps, a solver's tolerance) or has too many dimensions for a "
        "surrogate: take KameleonStep."
    )
    warn_user(
        f"These draws of {names} are an approximation that should not be believed yet: "
        f"{'; '.join(reasons)}. {advice}"
    )


def _reasons_for_doubt(found, dim, has_failed):
    """Say in words what there is against the draws."""
    reasons, coefficients = [], n_coefficients(dim)
    if has_failed:
        reasons.append("what they are like where it failed is not known")
    taught = found["n_evaluations"] + found["n_known"] - found["n_checked"]
    if taught < ENOUGH * coefficients:
        reasons.append(
            f"{taught} evaluations beside those of the check are few in {dim} dimensions, where a "
            f"quadratic has {coefficients} coefficients"
        )
    if found["n_checked"] == 0:
        reasons.append("they were not checked")
    elif found["n_checked"] < FEW_CHECKED:
        reasons.append(f"only {found['n_checked']} of them were checked")
    if found["cautious_error"] > LARGEST_ERROR:
        reasons.append(
            f"the error of the marginals is predicted as {found['predicted_error']:.2f} and may be "
            f"{found['cautious_error']:.2f} (total variation distance, 0 to 1)"
        )
    if found["n_checked"] and found["effective_share"] < SMALLEST_SHARE:
        reasons.append(
            f"of {found['n_checked']} draws whose true log density was evaluated only "
            f"{found['effective_share'] * found['n_checked']:.0f} count after weighting"
        )
    if is_heavy_tailed(found["pareto_k"], found["effective_share"]):
        reasons.append(f"Pareto k of these weights is {found['pareto_k']:.2f}, above 0.7")
    return reasons
