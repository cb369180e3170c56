"""Overdispersed starting points for the chains of `pymc.sample`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from numbers import Integral

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.pytensorf import collect_default_updates, reseed_rngs
from pymc.pytensorf import compile as compile_graph
from pymc.util import get_random_generator
from pymc.vartypes import discrete_types
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.tensor.random.type import RandomType

from pymc_kameleon._compat import draws_of
from pymc_kameleon.model.model_function import IN_PYTHON
from pymc_kameleon.model.transforms import unconstrained, unconstraining_function

_log = logging.getLogger("pymc.kameleon")

N_PRIOR_POINTS = 50
"""They cost a thirtieth of a second, and their scale is that of the prior to a fifth."""

PRIOR_TRIES = 100
TRIES_IN_ORDER = 20
SHRINKS = 10
TRIES_PER_SHRINK = 10
JITTER = 2.0
SEED_BOUND = 2**32

MODE = "FAST_COMPILE"
"""Few evaluations of several functions: to compile them would cost more than to run them."""

FAILURES = (ValueError, ArithmeticError)
"""What draws and log densities raise at parameters out of bounds; LinAlgError is a ValueError."""

Point = dict[str, np.ndarray]


def dispersed_starts(
    model: pm.Model,
    chains: int,
    random_seed: int | Sequence[int] | np.random.SeedSequence | np.random.Generator | None = None,
) -> list[Point]:
    """Draw a starting point for every chain from the prior.

    PyMC moves the starts of NUTS at random, and the steps of this package move theirs near the
    default; every other step method starts all chains at one point, and R-hat then sees little of a
    chain that stays where it began. Starts from the prior lie further apart.

    Parameters
    ----------
    model : pymc.Model
        A model with at least one free variable.
    chains : int
        Number of chains, at least 1.
    random_seed : int, sequence of int, SeedSequence, Generator or None
        The same seed gives the same points.

    Returns
    -------
    list of dict
        One a chain: name of each free variable -> value in its natural (constrained) space, as
        ``pymc.sample(initvals=...)`` wants it. The log density of the model is finite at each.

    Raises
    ------
    ValueError
        If chains is not a positive integer, the model has no free variables, or no point with a
        finite log density is found.

    Notes
    -----
    Free variables, imputed values among them, are drawn jointly from the prior. A variable whose
    prior cannot be drawn from (``pymc.Flat``, a ``pymc.CustomDist`` without ``random``) gets the
    default initial point of the model plus a uniform(-2, 2) jitter in the unconstrained space, or
    the default itself if it is discrete; those that depend on it are drawn given that value.
    Vectors that an ordered transform would refuse are sorted.

    A point without a finite log density is drawn again. After 100 such points, vectors are sorted,
    one at a time and then all, as a model may need them without its priors saying so. After 20 such
    points of each, new ones are moved towards the default initial point, by half of the distance in
    the unconstrained space at first and closer after every ten further failures; discrete variables
    then take the default, and values that could not be drawn or lie outside of the support are
    jittered as above.

    Examples
    --------
    >>> with model:
    ...     starts = dispersed_starts(model, chains=4)
    ...     idata = pm.sample(chains=4, step=KameleonStep(), initvals=starts)
    """
    if not isinstance(chains, Integral) or isinstance(chains, bool) or chains < 1:
        raise ValueError(f"chains={chains!r} must be a whole number of at least 1, as in chains=4.")
    if not model.free_RVs:
        raise ValueError("model has no free variables, so there is nothing to start.")
    search = _StartSearch(model, get_random_generator(random_seed))
    return [search.find() for _ in range(chains)]


def prior_draws(
    model: pm.Model, names: Sequence[str], n: int, seed: int, only_drawable: bool = True
) -> np.ndarray:
    """Draw value variables from the prior, as `PriorDraws` does."""
    return PriorDraws(model, names)(n, seed, only_drawable)


class PriorDraws:
    """Draws of the value variables `names` from the prior: raveled, unconstrained and finite.

    The likelihood is not evaluated. Variables that cannot be drawn are jittered, as for
    `dispersed_starts`, or where `only_drawable` none are returned.
    """

    def __init__(self, model: pm.Model, names: Sequence[str]) -> None:
        self.model, self.names = model, names

    def __getstate__(self):
        return {"model": self.model, "names": self.names}  # another process compiles for itself

    def __call__(self, n: int, seed: int, only_drawable: bool = True) -> np.ndarray:
        """Draw `n` rows, and return those (at most n, d) that are finite."""
        rows = self._drawn_jointly(n, seed)
        if rows is not None:
            return rows
        search, rows = self._search, []
        search.seed(get_random_generator(seed))
        if only_drawable and search.undrawable_names() & set(self.names):
            return np.zeros((0, 0))
        for _ in range(n):
            try:
                with np.errstate(all="ignore"):
                    drawn = search.draw_unconstrained()
            except FAILURES:
                continue
            row = np.concatenate([np.ravel(drawn[name]) for name in self.names])
            if np.all(np.isfinite(row)):
                rows.append(row)
        return np.array(rows)

    def _drawn_jointly(self, n, seed):
        """Draw the variables and what they depend on, if all that can be drawn; else None."""
        try:
            draw, generators = self._draw
            reseed_rngs(generators, seed)
            rows = _finite_rows(draw, n)
        except Exception:  # whatever a user's own `random` may raise
            return None
        return rows if len(rows) > 0.5 * n else None

    @cached_property
    def _draw(self):
        drawn = _joint_draw(self.model, self.names)
        return compile_graph([], drawn, mode=IN_PYTHON), list(collect_default_updates(drawn))

    @cached_property
    def _search(self):
        search = _StartSearch(self.model, get_random_generator(0))
        search.find_undrawable()
        return search


def not_finite(model: pm.Model, log_densities: Callable, point: Point) -> list[str]:
    """Names of the variables and potentials whose log density at a point is not finite."""
    factors = zip([*model.basic_RVs, *model.potentials], log_densities(point), strict=True)
    return [factor.name for factor, term in factors if not np.isfinite(np.sum(term))]


def orders_of(shapes: Sequence[tuple[int, ...]], skipped: Sequence[bool] = ()) -> list[list[int]]:
    """Find whose elements a model may want in order: of each vector, then of all of them.

    A prior that does not say so has one draw in n! that is, in n dimensions.
    """
    vectors = [i for i, shape in enumerate(shapes) if shape and shape[-1] > 1]
    vectors = [i for i in vectors if not (skipped and skipped[i])]
    return [[i] for i in vectors] + [vectors] * (len(vectors) > 1)


def start_to_write(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    """Say how a start is written, of the first vector among the variables if there is one."""
    vectors = [(n, shape[0]) for n, shape in zip(names, shapes, strict=True) if len(shape) == 1]
    if not vectors:
        return f'as in pm.sample(initvals={{"{names[0]}": 1.0}}).'
    name, size = vectors[0]
    return (
        f'as in pm.sample(initvals={{"{name}": np.linspace(-2, 2, {size})}}). If a vector has to '
        "be in order, give it transform=pm.distributions.transforms.ordered, and such an initval."
    )


def prior_scales(points: np.ndarray) -> np.ndarray:
    """Scales (d,) of draws from a prior (n, d): half of the middle two thirds; 1 where they are 0.

    They are what is known of the parameters' units before the log density is evaluated.
    """
    low, high = np.quantile(points, (0.16, 0.84), axis=0)
    scales = 0.5 * (high - low)
    return np.where(np.isfinite(scales) & (scales > 0), scales, 1.0)


def _joint_draw(model, names):
    """Graph of the variables `names` (d,), drawn from the prior with what they depend on."""
    variables = {model.rvs_to_values[variable].name: variable for variable in model.free_RVs}
    return pt.concatenate([unconstrained(model, variables[name]).ravel() for name in names])


def _in_batches(graph, n):
    """Graph of `n` independent draws (n, d) of a random graph (d,)."""
    batches, random = {}, set()
    for node in FunctionGraph(outputs=[graph], clone=False).toposort():
        follows = not random.isdisjoint(node.inputs)
        draws = any(isinstance(i.type, RandomType) for i in node.inputs)
        if draws:
            (drawn,) = (o for o in node.outputs if not isinstance(o.type, RandomType))
            batch = vectorize_graph(drawn, batches) if follows else draws_of(drawn, n)
            if batch.ndim != drawn.ndim + 1:
                raise NotImplementedError(f"{drawn} has no batches.")
            batches[drawn] = batch
        if draws or follows:
            random.update(o for o in node.outputs if not isinstance(o.type, RandomType))
    return vectorize_graph(graph, batches)


def _finite_rows(draw, n):
    with np.errstate(all="ignore"):
        rows = np.array([draw() for _ in range(n)], dtype=float)
    return rows[np.all(np.isfinite(rows), axis=1)]


def prior_sampler(model: pm.Model, names: Sequence[str]) -> PriorSampler | None:
    """Return what draws the variables `names` and what they depend on.

    None, and a line in the log that says why, if that cannot be.
    """
    try:
        sampler = PriorSampler(_joint_draw(model, names))
        n_finite = len(sampler(20, np.random.default_rng(0)))
        if n_finite > 10:
            return sampler
        reason, level = f"of 20 draws {n_finite} are finite", logging.WARNING
    except Exception as error:  # whatever a user's own `random` may raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        # What PyMC raises for a distribution that has no draws, pymc.Flat for one.
        level = logging.INFO if isinstance(error, NotImplementedError) else logging.WARNING
    _log.log(
        level,
        "The prior of %s cannot be drawn from (%s): a Gaussian that is learnt stands for it.",
        ", ".join(names),
        reason,
    )
    return None


def _generators(draw):
    return [v for v in draw.get_shared() if isinstance(v.type, RandomType)]


def reseed(draw, rng: np.random.Generator) -> None:
    """Let a compiled function go on with random numbers that follow from a generator."""
    reseed_rngs(_generators(draw), seed_from(rng))


def seed_from(rng: np.random.Generator) -> int:
    """Draw a seed."""
    return int(rng.integers(SEED_BOUND))


class PriorSampler:
    """Draws of value variables from their prior, raveled and unconstrained.

    Many at a time, unless the `graph` of one (d,) has a distribution that does not allow for that.
    """

    def __init__(self, graph: Variable) -> None:
        n = pt.lscalar()
        try:
            self.draw = compile_graph([n], _in_batches(graph, n), mode=IN_PYTHON)
            self.is_batched = self.draw(2).shape[0] == 2
        except Exception:  # of PyTensor's rewriting, of many kinds
            self.is_batched = False
        if not self.is_batched:
            self.draw = compile_graph([], graph, mode=IN_PYTHON)

    def __call__(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw `n` rows, and return those (at most n, d) that are finite."""
        reseed(self.draw, rng)
        if not self.is_batched:
            return _finite_rows(self.draw, n)
        with np.errstate(all="ignore"):
            rows = self.draw(n)
        return rows[np.all(np.isfinite(rows), axis=1)]


class _StartSearch:
    """Compiled functions of one model, and the search for one start at a time."""

    def __init__(self, model: pm.Model, rng: np.random.Generator) -> None:
        self.model, self.rng = model, rng
        self.variables = list(model.free_RVs)
        self.names = [variable.name for variable in self.variables]
        self.values = [model.rvs_to_values[variable] for variable in self.variables]
        self.discrete = [variable.dtype in discrete_types for variable in self.variables]
        self.to_unconstrained = unconstraining_function(model)
        self.to_natural = compile_graph(
            self.values,
            model.replace_rvs_by_values(self.variables),
            mode=MODE,
            on_unused_input="ignore",
        )
        default = model.initial_point(random_seed=seed_from(self.rng))
        # PyMC's default lies outside of the support of an ordered vector, for one.
        self.default = [
            np.where(np.isfinite(default[value.name]), default[value.name], 0).astype(value.dtype)
            for value in self.values
        ]
        self.shapes = [np.shape(value) for value in self.to_natural(*self.default)]
        self.undrawable = [False] * len(self.variables)
        self.draw_prior = self._compile_draw()
        self.was_searched = False

    @cached_property
    def log_densities(self) -> Callable:
        """Log densities of all variables, which tell where there is no start."""
        return self.model.compile_logp(sum=False, mode=MODE)

    def seed(self, rng: np.random.Generator) -> None:
        """Let what is drawn from now on follow from a generator."""
        self.rng = rng
        reseed(self.draw_prior, rng)

    def _compile_draw(self) -> Callable:
        """Compile a joint draw of natural values, given unconstrained ones of the undrawable."""
        graph = FunctionGraph(outputs=self.variables, clone=True)
        clones = list(graph.outputs)
        inputs: list = []
        # Children first: a replaced variable depends on its parents through its bounds.
        for i in reversed(np.flatnonzero(self.undrawable)):
            natural = value = self.values[i].type(f"{self.names[i]}_given")
            transform = self.model.rvs_to_transforms[self.variables[i]]
            if transform is not None:
                natural = transform.backward(value, *clones[i].owner.inputs)
            natural = clones[i].type.filter_variable(natural.astype(clones[i].dtype))
            graph.replace(clones[i], natural, import_missing=True)
            inputs.insert(0, value)
        return compile_graph(
            inputs,
            list(graph.outputs),
            random_seed=seed_from(self.rng),
            mode=MODE,
            on_unused_input="ignore",
        )

    def _is_undrawable(self, variable, default) -> bool:
        """Try the prior of a variable with all the others at the default initial point."""
        constants = {
            other: other.type.filter_variable(pt.as_tensor_variable(value, dtype=other.dtype))
            for other, value in zip(self.variables, default, strict=True)
            if other is not variable
        }
        draw = clone_replace([variable], constants)
        try:
            compile_graph([], draw, random_seed=seed_from(self.rng), mode=MODE)()
        except Exception:  # whatever a user's own `random` may raise
            return True
        return False

    def _draw(self) -> list[np.ndarray]:
        """Draw natural values, sorted where the support asks for that."""
        return self._sorted(self._draw_unsorted())

    def _draw_unsorted(self) -> list[np.ndarray]:
        if not self.was_searched:
            try:
                return self.draw_prior()
            except Exception:  # whatever a user's own `random` may raise
                self.find_undrawable()
        given = zip(self._jitter(), self.undrawable, strict=True)
        return self.draw_prior(*(value for value, is_given in given if is_given))

    def find_undrawable(self) -> None:
        """Find out which priors have no draws."""
        self.was_searched = True
        default = self.to_natural(*self.default)
        self.undrawable = [self._is_undrawable(v, default) for v in self.variables]
        self.draw_prior = self._compile_draw()

    def _jitter(self) -> list[np.ndarray]:
        """Jitter the default in the unconstrained space."""
        return [
            default
            if discrete
            else (default + self.rng.uniform(-JITTER, JITTER, default.shape)).astype(default.dtype)
            for default, discrete in zip(self.default, self.discrete, strict=True)
        ]

    def _sorted(self, natural: list[np.ndarray]) -> list[np.ndarray]:
        """Sort the vectors that are inside the support only when sorted."""
        natural = list(natural)
        for i, value in enumerate(natural):
            if np.ndim(value) == 0 or np.isfinite(self.to_unconstrained(*natural)[i]).all():
                continue
            ascending = np.sort(value, axis=-1)
            for candidate in (ascending, ascending[..., ::-1].copy()):
                trial = [*natural[:i], candidate, *natural[i + 1 :]]
                if np.isfinite(self.to_unconstrained(*trial)[i]).all():
                    natural = trial
                    break
        return natural

    def undrawable_names(self) -> set[str]:
        """Value variables whose priors were found to have no draws."""
        found = zip(self.values, self.undrawable, strict=True)
        return {value.name for value, fails in found if fails}

    def draw_unconstrained(self) -> Point:
        """Draw from the prior: name of each value variable -> unconstrained value."""
        values = self.to_unconstrained(*self._draw())
        return {variable.name: value for variable, value in zip(self.values, values, strict=True)}

    def _shrunk(self, weight: float) -> list[np.ndarray]:
        """Draw natural values at the share `weight` of their distance from the default."""
        jittered = self._jitter()
        try:
            drawn = self.to_unconstrained(*self._draw())
        except FAILURES:
            drawn = jittered
        shrunk = []
        for value, jitter, default, discrete in zip(
            drawn, jittered, self.default, self.discrete, strict=True
        ):
            value = default if discrete else np.where(np.isfinite(value), value, jitter)
            shrunk.append((default + weight * (value - default)).astype(default.dtype))
        return self.to_natural(*shrunk)

    def _faults(self, natural: list[np.ndarray]) -> list[str]:
        """Names of the variables and potentials that `pymc.sample` would not start with."""
        unconstrained = self.to_unconstrained(*natural)
        faults = [
            name
            for name, *parts in zip(self.names, natural, unconstrained, strict=True)
            if not all(np.isfinite(part).all() for part in parts)
        ]
        if faults:
            return faults
        point = {value.name: part for value, part in zip(self.values, unconstrained, strict=True)}
        return not_finite(self.model, self.log_densities, point)

    def _in_order(self, which: list[int]) -> list[np.ndarray]:
        """Draw natural values, and sort those of the variables `which`."""
        natural = list(self._draw())
        for i in which:
            natural[i] = np.sort(natural[i], axis=-1)
        return natural

    def _attempts(self) -> list[Callable]:
        """Return what draws natural values, in the order in which it is tried."""
        orders = orders_of(self.shapes, skipped=self.discrete)
        weights = [0.5**k for k in range(1, SHRINKS + 1) for _ in range(TRIES_PER_SHRINK)]
        return [
            *[self._draw] * PRIOR_TRIES,
            *(partial(self._in_order, which) for which in orders for _ in range(TRIES_IN_ORDER)),
            *(partial(self._shrunk, weight) for weight in weights),
        ]

    def find(self) -> Point:
        attempts = self._attempts()
        faults: list[str] = []
        error = None
        for attempt in attempts:
            try:
                with np.errstate(all="ignore"):
                    natural = attempt()
                    faults = self._faults(natural)
            except Exception as raised:  # whatever a user's own functions may raise
                error = raised
                continue
            if not faults:
                found = zip(self.variables, natural, strict=True)
                return {v.name: np.array(value, dtype=v.dtype) for v, value in found}
        subject = ", ".join(faults) if faults else f"one of {', '.join(self.names)}"
        raise ValueError(
            f"No starting point with a finite log density was found in {len(attempts)} tries, of "
            f"which the last were next to the model's default initial point. At fault: {subject}. "
            "Check that the observed data are possible under the model, model.debug() shows where "
            "they are not; narrow the priors; or write where the log density is finite, "
            f"{start_to_write(self.names, self.shapes)}"
        ) from error
