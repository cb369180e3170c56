"""From a PyMC model to its latent function and the hyperparameters of that function."""

import logging
import math

import numpy as np
import pytensor.tensor as pt
from pymc.pytensorf import join_nonshared_inputs
from pymc.vartypes import discrete_types
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.basic import MvNormalRV

from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.reader.latent_vector import Dependent, LatentVector, VectorAt
from pymc_kameleon.latent_gp.reader.linear_predictor import (
    are_effects,
    function_behind,
    is_process,
    joined_by_data,
    linear_part,
    predictions_of,
    shape_of,
)
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction, free_variable, variable_of
from pymc_kameleon.latent_gp.reader.prior import PriorAt, UnfactorisedPrior
from pymc_kameleon.model.estimated_loglikelihood import estimates
from pymc_kameleon.model.initial_points import N_PRIOR_POINTS, prior_draws, prior_scales
from pymc_kameleon.model.model_function import ModelFunction, SharedValues

_log = logging.getLogger("pymc.kameleon")

MOST_VALUES = 10_000
"""Values of a function beyond which its matrices, of 0.8 GB each, are refused."""


class JointModel:
    """A latent function of a PyMC model, and the continuous variables that it depends on.

    `vars` names the latent function, and hyperparameters if not all of them are to be moved. Theta
    has the value variables `hyperparameters`, in the model's order, of `shapes`, `dim` numbers in
    all, none where scales are known, and `scales` (d,) those of their prior. `others` are the value
    variables that other steps move.
    """

    def __init__(self, model, vars=None, *, initial_point=None, compile_kwargs=None):
        point = model.initial_point() if initial_point is None else initial_point
        functions, processes, named = named_variables(model, vars, point)
        for variable in functions:
            _check_size(model, variable)
        self.function = _latent(model, functions, processes, named, point, compile_kwargs)
        values = self._hyperparameters(model, named)
        self.hyperparameters = values
        self.shapes = [np.shape(point[value.name]) for value in values]
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.dim = sum(sizes)
        ends = np.cumsum(sizes)
        self._slices = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        shared = self.function.shared
        self._shared = [shared[value] for value in values]
        for variable in self._shared:  # each in memory of its own, which is written into
            variable.set_value(variable.get_value(), borrow=True)
        self.others = {value: s for value, s in shared.items() if value not in set(values)}
        self.function.follow_only(set(self.others.values()), ignored=set(self._shared))
        self.scales = self._find_scales(model, [value.name for value in values])
        self._log_prior = self._compile_log_prior(model, values, point, compile_kwargs or None)
        self._seen_log_prior = SharedValues(self._log_prior, set(self.others.values()))
        if isinstance(self.function, LatentVector):
            _log.info("%s", self)

    def __str__(self):
        """Say what is moved how."""
        parts = {
            "linear in": self.function.value_variables,
            "hyperparameters": self.hyperparameters,
            "drawn from them": self.predicted,
            "left to other steps": list(self.others),
        }
        given = [
            f"{k} {', '.join(v.name for v in values)}" for k, values in parts.items() if values
        ]
        return f"LatentGPStep: {self.function.size} linear predictors, {'; '.join(given)}"

    @property
    def predicted(self) -> list:
        """Value variables that nothing observed depends on, drawn given all others."""
        predictions = self.function.predictions
        return [] if predictions is None else predictions.value_variables

    @property
    def likelihood(self):
        """Log likelihood of the function, at the hyperparameters that were set last."""
        return self.function.likelihood

    def refresh(self) -> bool:
        """Follow the other variables, at the theta set last; return whether anything changed."""
        function_changed = self.function.refresh()
        return self._seen_log_prior.changed() or function_changed

    def recompute(self) -> None:
        """As for `LatentFunction`."""
        self.function.recompute()

    def log_prior(self, x: np.ndarray) -> float:
        """Log prior of theta at `x` (d,), and all other terms that are none of the function's."""
        out = np.empty(1)
        self._log_prior.into(x, out)
        return float(out[0])

    def set_hyperparameters(self, x: np.ndarray) -> None:
        """Set theta to `x` (d,), raveled and unconstrained, in prior and likelihood."""
        for shared, part, shape in zip(self._shared, self._slices, self.shapes, strict=True):
            storage = shared.container.storage
            if not storage[0].flags.carray:  # as some are that came from another process
                storage[0] = np.array(storage[0])
            storage[0][...] = x[part].reshape(shape)

    def prior(self) -> PriorAt:
        """Return the prior at the theta set last; ValueError or LinAlgError if there is none."""
        return self.function.prior.evaluate()

    def unfactorised_prior(self) -> UnfactorisedPrior | VectorAt:
        """Return the prior before its covariance is factorised, which the caller may overwrite."""
        return self.function.prior.unfactorised()

    def flat_sites(self) -> Sites:
        """Sites without information."""
        size, blocks = self.function.size, self.likelihood.blocks
        n_shifts = size if blocks is None else blocks.n_parameters
        return Sites(np.zeros(size), np.zeros(n_shifts))

    def _hyperparameters(self, model, named):
        """Value variables of theta: the named ones, or all that the function depends on."""
        function, name = self.function, self.function.name
        computed = [*function.prior.functions, function.likelihood.compiled_value]
        used = {shared for f in computed for shared in f.shared()}
        found = [v for v, shared in function.shared.items() if shared in used]
        found = [v for v in model.value_vars if v in found and v.dtype not in discrete_types]
        if named is not None:
            own = function.value_variables
            named = [v for v in named if v not in own]
            strange = [v.name for v in named if v not in found]
            if strange:
                raise ValueError(
                    f"vars: neither the prior of {name} nor its likelihood depends on "
                    f"{', '.join(strange)} directly. Leave {'it' if len(strange) == 1 else 'them'} "
                    f"out, vars=[{', '.join([name, *(v.name for v in named if v in found)])}]: "
                    "PyMC gives what is left a step of its own."
                )
            found = [v for v in found if v in named]
        else:
            _refuse_functions(model, name, found)
        return found

    def _find_scales(self, model, names):
        if not names:
            return np.ones(0)
        drawn = prior_draws(model, names, N_PRIOR_POINTS, seed=0, only_drawable=False)
        return prior_scales(drawn) if len(drawn) else np.ones(self.dim)

    def _compile_log_prior(self, model, values, point, compile_kwargs):
        latent = [*self.function.value_variables, *self.predicted]
        of_function = {model.values_to_rvs[value].name for value in latent}
        of_function |= set(self.function.likelihood.names)
        terms = [*model.basic_RVs, *model.potentials]
        terms = [v for v in terms if v.name not in of_function]
        graph = model.logp(vars=terms)
        if estimates([graph]):
            raise ValueError(
                "A term of the model is an estimate, and this step takes log densities for exact. "
                "Take KameleonStep(pseudo_marginal=True)."
            )
        if not values:
            nothing = pt.vector(shape=(0,), dtype="float64")
            return ModelFunction(model, [nothing.sum()], nothing, 0, compile_kwargs)
        outputs, joined = join_nonshared_inputs(
            point, [graph.astype("float64")], values, self.others
        )
        # Flat priors leave nothing that depends on the input.
        return ModelFunction(
            model, [outputs[0] + 0.0 * joined.sum()], joined, self.dim, compile_kwargs
        )


def named_variables(model, vars, start):
    """Split `vars` into latent functions, processes (see `is_process`), and other free variables.

    The last are None if none was named beside the others, which means all that belong to them.
    """
    if vars is None:
        behind_data = set(ancestors([*model.observed_RVs, *model.potentials]))
        free = [rv for rv in model.free_RVs if rv in behind_data]
        functions = [rv for rv in free if _is_function(model, rv)]
        processes = [rv for rv in free if is_process(model, rv, start)]
        return functions, processes, None
    vars = list(vars) if isinstance(vars, list | tuple) else [vars]
    vars = [variable_of(model, var) for var in vars]
    processes = [var for var in vars if is_process(model, var, start)]
    if len(vars) == 1:
        (var,) = vars
        is_free = var in model.free_RVs
        if processes or (is_free and are_effects(var, function_behind(model, var))):
            return [], vars, None
        return vars, [], None
    functions = [var for var in vars if var in model.deterministics or _is_function(model, var)]
    others = [var for var in vars if var not in functions and var not in processes]
    if not others:
        return functions, processes, None
    discrete = [var.name for var in others if var.dtype in discrete_types]
    if discrete:
        raise ValueError(
            f"vars: {', '.join(discrete)} {'is' if len(discrete) == 1 else 'are'} discrete, and "
            "this step moves continuous hyperparameters. Leave such variables out: PyMC gives "
            "them a step of their own."
        )
    foreign = [var.name for var in others if var not in model.free_RVs]
    if foreign:
        raise ValueError(f"vars: {', '.join(foreign)} is no free variable of the model.")
    return functions, processes, [model.rvs_to_values[var] for var in others]


def _latent(model, functions, processes, named, point, compile_kwargs):
    """Return the latent function: that of the one variable, or the linear predictors of several."""
    options = {"initial_point": point, "compile_kwargs": compile_kwargs}
    pairs = [_pair(model, var) for var in functions]
    processes = processes + [variable for variable, f in pairs if are_effects(variable, f)]
    pairs = [pair for pair in pairs if not are_effects(*pair)]
    if named is None:
        more = [v for v in model.free_RVs if v not in dict(pairs)]
        found = [_pair(model, v) for v in more if _is_function(model, v)]
        pairs += joined_by_data(model, pairs, found)
        candidates = [v for v in more if v not in dict(found)]
    else:
        candidates = [*processes, *(model.values_to_rvs[value] for value in named)]
    while True:
        linear = linear_part(model, pairs, candidates, processes, point)
        if not linear.variables:
            raise ValueError(NO_FUNCTION)
        own = {*linear.variables, *predictions_of(model, linear)}
        if len(pairs) == 1 and own == set(dict(pairs)):  # nothing else is linear
            return LatentFunction(model, pairs[0], **options)
        for variable in linear.others if pairs else []:
            _check_size(model, variable)
        try:
            return LatentVector(model, linear, **options)
        except Dependent as error:
            if error.worst is None or error.worst in processes:
                raise
            _log.info("LatentGPStep takes %s for a hyperparameter: %s", error.worst.name, error)
            candidates = [v for v in candidates if v is not error.worst]


def _pair(model, var):
    """Return a free variable, and what it stands behind: as the model is written, or `var` says."""
    variable, function = free_variable(model, var)
    behind = function_behind(model, variable)
    return variable, function if behind is None else behind


def _is_function(model, rv) -> bool:
    """Whether a free variable is, or stands behind, a function with a covariance matrix."""
    if rv.ndim != 1 or rv not in model.free_RVs:
        return False
    return isinstance(rv.owner.op, MvNormalRV) or function_behind(model, rv) is not None


NO_FUNCTION = (
    "vars: no latent function was found in the model, nor effects: variables that are Gaussian "
    "given all others, and enter the likelihood by a linear predictor. Such are "
    "pm.gp.Latent(...).prior(...), pm.MvNormal, pm.CAR, pm.ICAR, pm.GaussianRandomWalk, pm.AR, and "
    "pm.Normal for coefficients and effects of groups. pm.gp.Marginal has integrated its function "
    "out: take NUTS, or KameleonStep() if there is no gradient."
)


def _refuse_functions(model, name, found):
    functions = [v.name for v in found if _is_function(model, model.values_to_rvs[v])]
    if functions:
        raise ValueError(
            f"The likelihood or the prior of {name} depends on another latent function too: "
            f"{', '.join(functions)}, and not by adding it. Take NUTS; or name the "
            f"hyperparameters that belong to {name}, vars=[{name}, ...], and give the other one "
            "a step of its own."
        )


def _check_size(model, f):
    size = math.prod(shape_of(f))
    if size > MOST_VALUES:
        raise ValueError(
            f"{f.name} has {size} values: a covariance matrix of {8e-9 * size**2:.1f} GB, and "
            f"this step needs several. Take at most {MOST_VALUES}, or pm.gp.HSGP."
        )
