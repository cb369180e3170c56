"""A Python function that estimates a likelihood, as a term of a PyMC model.

Andrieu & Roberts (2009), "The pseudo-marginal approach for efficient Monte Carlo computations",
Annals of Statistics 37. doi:10.1214/07-AOS574
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable

from pymc_kameleon.model.operations import converted
from pymc_kameleon.validation import argument_mismatch, checked_integer

SEED_BOUND = 2**53
"""Seeds are whole numbers that a float64 holds: a chain keeps them beside its log density."""

NO_SEEDS = np.zeros(0, dtype=np.int64)


def estimated_loglikelihood(fn: Callable, *inputs: Any, n_samples: int | None = None) -> Variable:
    """Log of an unbiased estimate of a likelihood, as a term of a model.

    Parameters
    ----------
    fn : callable
        ``fn(*values, rng)`` returns the log of an estimate whose mean, over the draws of `rng`, is
        the likelihood at `values`. The values are NumPy scalars and arrays, not to be changed in
        place, and `rng` a ``numpy.random.Generator``, the only source of randomness that it may
        use. -inf is an estimate of 0; NaN is rejected by the steps, and counted. Chains in several
        processes need a `fn` that cloudpickle can pickle, which any function is.
    *inputs : variables, arrays or numbers
        What the likelihood depends on: random variables of the model, or anything made of them.
    n_samples : int, optional
        Number of importance samples or particles, if `fn` takes it, as
        ``fn(*values, n_samples, rng)``: then `diagnostics.estimator_sd` can find the number that
        a sampler needs.

    Returns
    -------
    TensorVariable, scalar float64
        For ``pymc.Potential``. It has no gradient and is never compiled.

    Raises
    ------
    TypeError
        If `fn` is no function of these arguments, or, while sampling, if what it returns is no
        number.
    ValueError
        If there are no inputs, or `n_samples` is below 1.

    Notes
    -----
    The seed of `rng` is an input of the operation, a shared variable. A step of this package sets
    it from its own generator before each evaluation, and with ``pseudo_marginal=True`` it keeps
    the accepted estimate, which leaves the exact posterior invariant [1]_. After each draw the seed
    is that of the kept estimate, so other steps, and a ``pymc.Deterministic`` of the estimate, see
    this one. Whatever else evaluates the model, such as ``model.compile_logp()``, or a step of PyMC
    that moves one of the inputs, leaves the seed as it is, and sees one fixed, rough surface.

    There PyMC 6 says that Numba uses object mode, which means that `fn` runs in Python.

    References
    ----------
    .. [1] C. Andrieu and G. O. Roberts, "The pseudo-marginal approach for efficient Monte Carlo
       computations", Annals of Statistics 37, 2009. doi:10.1214/07-AOS574

    Examples
    --------
    >>> def log_estimate(theta, rng):
    ...     x = theta + rng.standard_normal(100)
    ...     return np.log(np.mean(np.exp(-0.5 * (data - x) ** 2)))
    >>> with pm.Model():
    ...     theta = pm.Normal("theta")
    ...     pm.Potential("loglike", estimated_loglikelihood(log_estimate, theta))
    ...     idata = pm.sample(step=KameleonStep(pseudo_marginal=True))
    """
    if not callable(fn):
        raise TypeError(
            f"fn={fn!r}: pass a function fn(theta, rng) that returns the log of an estimate."
        )
    if not inputs:
        raise ValueError(
            "estimated_loglikelihood got no inputs: name what the likelihood depends on, as in "
            "estimated_loglikelihood(fn, theta)."
        )
    operation = EstimatedLogLikelihood(fn, takes_n_samples=n_samples is not None)
    counted = [] if n_samples is None else ["n_samples"]
    names = [*(f"value_{i + 1}" for i in range(len(inputs))), *counted, "rng"]
    error = argument_mismatch(fn, names)
    if error is not None:
        raise TypeError(
            f"{operation.name} does not take the arguments ({', '.join(names)}) that it is called "
            f"with: {error}. Give it a parameter for each input, then n_samples if "
            "estimated_loglikelihood got n_samples=, then rng."
        ) from error
    variables = [pytensor.shared(np.int64(0), name="estimate_seed"), *inputs]
    if n_samples is not None:
        count = np.int64(checked_integer("n_samples", n_samples, 1))
        variables.append(pytensor.shared(count, name="n_samples"))
    return operation(*map(pt.as_tensor_variable, variables))


class EstimatedLogLikelihood(Op):
    """Operation of `estimated_loglikelihood`: the seed, then the inputs, then any `n_samples`."""

    def __init__(self, fn: Callable, takes_n_samples: bool):
        self.fn, self.takes_n_samples = fn, takes_n_samples
        self.name = getattr(fn, "__name__", type(fn).__name__)

    def __str__(self):
        return f"{type(self).__name__}({self.name})"

    def make_node(self, seed, *inputs):  # noqa: D102
        return Apply(self, [seed, *inputs], [pt.scalar(dtype="float64")])

    def perform(self, node, inputs, outputs):
        """Evaluate the function with a generator of its seed."""
        seed, *values = inputs
        rng = np.random.default_rng(int(seed))
        estimate = self.fn(*(np.asarray(value)[()] for value in values), rng)
        outputs[0][0] = converted(estimate, node.outputs[0].type, self.name)

    def do_constant_folding(self, fgraph, node):
        """Never: an estimate is drawn again with every seed."""
        return False


def estimates(graphs) -> list:
    """Variables in `graphs` that are estimates, each with a seed that a step can set."""
    found = [
        variable
        for variable in dict.fromkeys(ancestors(graphs))
        if variable.owner is not None and isinstance(variable.owner.op, EstimatedLogLikelihood)
    ]
    for variable in found:
        # A copy of the model may have another input there.
        if not isinstance(variable.owner.inputs[0], SharedVariable):
            raise TypeError(
                f"The seed of {variable.owner.op} is {variable.owner.inputs[0]}, and no shared "
                "variable: build the model anew instead of copying it."
            )
    return found


def seeds_of(graphs) -> list[SharedVariable]:
    """Seeds of the estimates in `graphs`."""
    return [variable.owner.inputs[0] for variable in estimates(graphs)]


def is_estimate(graph) -> bool:
    """Whether a log density is an estimate, or draws random numbers, as `pm.Simulator` does."""
    return bool(estimates([graph])) or any(
        variable.owner is not None and isinstance(variable.owner.op, RandomVariable)
        for variable in ancestors([graph])
    )


def draw_seeds(seeds: list[SharedVariable], rng: np.random.Generator) -> np.ndarray:
    """Give estimates new seeds, so that their next evaluation is independent; return these."""
    values = rng.integers(SEED_BOUND, size=len(seeds)) if seeds else NO_SEEDS
    set_seeds(seeds, values)
    return values


def set_seeds(seeds: list[SharedVariable], values: np.ndarray) -> None:
    """Give estimates the seeds of earlier ones, which their next evaluation repeats."""
    for seed, value in zip(seeds, values, strict=True):
        seed.set_value(np.asarray(value, dtype=np.int64), borrow=True)
