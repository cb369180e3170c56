"""What the parameters mean that several steps have, written once for all docstrings."""

import inspect
import re
from typing import Any

ENTRIES = {
    "vars": """\
vars : list of variables, optional
    Continuous free variables of the model; default all of them.""",
    "latent_vars": """\
vars : list of one variable, optional
    The latent function: what `pm.gp.Latent(...).prior` or `pm.MvNormal` returned. Not needed if
    it is the model's only free variable.""",
    "kernel": """\
kernel : Kernel, str or (value, gradient)
    `Gaussian()` (default), `Matern(smoothness)`, `Linear()`, `Polynomial(degree)` of
    `pymc_kameleon.kernels`, one of their names in lower case, or your own as `CustomKernel`.""",
    "bandwidth": r"""bandwidth : float or "median"
    Length scale of the kernel, in standardised coordinates if `standardize`. "median" (default)
    is the median distance within the subsample divided by :math:`\sqrt 2`.""",
    "target_accept": """\
target_accept : float, optional
    Acceptance probability that the scaling is learnt for; default 0.44 for d = 1, else 0.234.""",
    "adapt_after_tune": """\
adapt_after_tune : bool
    Go on adapting after tuning, ever more rarely or with vanishing steps. False (default)
    freezes the step, which then leaves the posterior exactly invariant.""",
    "standardize": """\
standardize : bool
    Work in coordinates whitened by the covariance of the history, which makes all defaults free
    of scale, and learn each coordinate's scale at the start.""",
    "global_share": """\
global_share : float, optional
    Share of difference moves in [0, 1]; default 0.8.""",
    "steps_per_draw": """\
steps_per_draw : int, optional
    Transitions per stored draw. By default 2d, at least 20 and at most 100, where the model
    compiles: they run in one compiled call. Where it does not, d, at least 5 and at most 50.""",
    "disperse": """\
disperse : bool
    Move a chain away from the model's default start before it tunes, as PyMC moves those of
    NUTS; a start that was given is left alone, if it is another one: a step sees where it
    starts, not who said so.""",
    "start": """\
start : "here" or "optimize"
    How tuning begins: where the chain starts, or with a search for the mode from there, by
    100 + 100 d evaluations at most, and a random point around what it found. Not with
    `warm_start`.""",
    "pseudo_marginal": """\
pseudo_marginal : bool
    The black-box terms of the likelihood are unbiased estimates, an `estimated_loglikelihood`
    say: keep the accepted one, which is then a statistic, `estimate`. While tuning, that of a
    point from which three moves in a row were rejected is drawn again.""",
    "surrogate": """\
surrogate : GPSurrogate, optional
    Delayed acceptance, for likelihoods that cost milliseconds or more: a Gaussian process of
    the log-likelihood screens proposals, and a second stage keeps the posterior exact. With
    `pseudo_marginal` it learns from the estimates, and how noisy they are.""",
    "store": """\
store : EvaluationStore, optional
    Keeps every log-likelihood in a file, and evaluates none again that is known there, of an
    earlier run or another chain. Nothing is learnt from it, so that draws are the same without;
    `GPSurrogate(store=...)` learns too. A step with a store runs in Python.""",
    "warm_start": """\
warm_start : result of `pm.sample` or array (n, d), optional
    Earlier draws of this model (or raveled unconstrained points) to learn from at every chain
    start.""",
    "pymc": """\
model : pymc.Model, optional
    Default the one of the context.
compile_kwargs : dict, optional
    For `model.compile_fn`; by default the model is compiled with Numba, or with PyTensor's
    default linker if it holds a black-box operation.
rng, initial_point, blocked
    As for every step method of PyMC.""",
}
"""Entries of a section "Parameters", by the names that stand for them in docstrings."""


def with_shared_parameters(cls: Any) -> Any:
    """Put the entry of `ENTRIES` instead of each line ``%(name)s`` of a class's docstring.

    Its signature shows what ``**options`` passes on to its bases, without `cls._not_arguments`. A
    name without an entry is a KeyError.
    """
    if cls.__doc__ is not None:  # as it is under python -OO
        cls.__doc__ = re.sub(r"^( *)%\((\w+)\)s$", _entry, cls.__doc__, flags=re.MULTILINE)
    own = dict(inspect.signature(cls.__init__).parameters)
    base = cls.__base__
    while own.pop("options", None) is not None:
        inherited = inspect.signature(base.__init__).parameters
        own |= {k: v for k, v in inherited.items() if k not in {*own, *cls._not_arguments}}
        base = base.__base__
    own.pop("self")
    cls.__signature__ = inspect.Signature(list(own.values()))
    return cls


def _entry(line: re.Match) -> str:
    indent, name = line.groups()
    return indent + ENTRIES[name].replace("\n", "\n" + indent)
