r"""Coordinates in which the prior of a positive variable is standard normal.

With F the distribution function of the prior, given its parameters,

.. math:: z = \Phi^{-1}(F(x)), \qquad x = F^{-1}(\Phi(z)).

Where the data say that a scale or a rate is near 0, and not how near, the likelihood is flat along
a long tail of its logarithm, which the prior's Jacobian alone ends. That tail of z is Gaussian.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions import continuous
from pymc.logprob.transforms import LogTransform
from pytensor.graph.replace import graph_replace
from pytensor.tensor.random import basic

LARGEST_SCORE, N_HALVINGS = 37.0, 60
"""Beyond it Phi(-z) is no double; and the halvings of (-37, 37) that find a z to rounding."""


def _below(z):
    """Phi(z), accurate for z of any sign."""
    return 0.5 * pt.erfc(-z / np.sqrt(2.0))


def _half_normal(z, loc, sigma):
    halves = pt.switch(z < 0.0, pt.erfinv(_below(z)), pt.erfcinv(_below(-z)))
    return loc + sigma * np.sqrt(2.0) * halves


def _standard_exponential(z):
    return -pt.switch(z < 0.0, pt.log1p(-_below(z)), pt.log(_below(-z)))


def _standard_gamma(z, alpha):
    lower, upper = pt.gammaincinv(alpha, _below(z)), pt.gammainccinv(alpha, _below(-z))
    return pt.switch(z < 0.0, lower, upper)


def _half_cauchy(z, beta):
    quarter = 0.5 * np.pi
    return beta * pt.switch(
        z < 0.0, pt.tan(quarter * _below(z)), 1.0 / pt.tan(quarter * _below(-z))
    )


def _half_student_t(z, nu, sigma):
    standard = pm.StudentT.dist(nu=nu, mu=0.0, sigma=1.0)
    lower, upper = 0.5 + 0.5 * _below(z), 0.5 * _below(-z)
    return sigma * pt.switch(z < 0.0, pm.icdf(standard, lower), -pm.icdf(standard, upper))


QUANTILES: dict[type, Callable] = {
    basic.HalfNormalRV: _half_normal,
    basic.ExponentialRV: lambda z, scale: scale * _standard_exponential(z),
    basic.GammaRV: lambda z, alpha, scale: scale * _standard_gamma(z, alpha),
    basic.InvGammaRV: lambda z, alpha, beta: beta / _standard_gamma(-z, alpha),
    continuous.WeibullBetaRV: lambda z, alpha, beta: beta * _standard_exponential(z) ** (1 / alpha),
    continuous.HalfCauchyRV: _half_cauchy,
    continuous.HalfStudentTRV: _half_student_t,
}
"""F^-1(Phi(z)) of positive distributions, accurate in both tails; parameters are those of the
random variable."""


def has_normal_score(model, value) -> bool:
    """Whether the variable of a value variable is positive, with a known quantile function."""
    variable = model.values_to_rvs[value]
    is_positive = isinstance(model.rvs_to_transforms[variable], LogTransform)
    return is_positive and type(variable.owner.op) in QUANTILES


def _value_of_score(model, value, z):
    """Graph of a value variable where the normal score is `z`, and its parents are given."""
    variable = model.values_to_rvs[value]
    node = variable.owner
    parameters = model.replace_rvs_by_values(list(node.op.dist_params(node)))
    return pt.log(QUANTILES[type(node.op)](z, *parameters)).astype(value.dtype)


class NormalScores:
    """Normal scores z in place of those of the value variables `vars` that have one, if `are_used`.

    `scored` are these, in the order in which each comes after its parents. `is_scored` (d,) are the
    elements of the raveled vector of all `vars`, which have these `shapes`.
    """

    def __init__(self, model, vars: Sequence, shapes: Sequence[tuple[int, ...]], are_used: bool):
        self.model, self.vars, self.shapes = model, vars, shapes
        in_order = [model.rvs_to_values[variable] for variable in model.free_RVs]
        chosen = {value for value in vars if are_used and has_normal_score(model, value)}
        self.scored = [value for value in in_order if value in chosen]
        sizes = [math.prod(shape) for shape in shapes]
        self.is_scored = np.repeat([value in chosen for value in vars], sizes)
        self._ends = np.cumsum(sizes)[:-1]
        self._scored_in_place = [value for value in vars if value in chosen]

    def with_scores(self, graphs: Sequence) -> list:
        """Return `graphs` of value variables with those that are scored standing for the scores."""
        scores = {value: value.type(f"{value.name}_score") for value in self.scored}
        values: dict = {}
        for value, z in scores.items():
            graph = _value_of_score(self.model, value, z)
            values[value] = graph_replace(graph, values, strict=False) if values else graph
        replaced = graph_replace(list(graphs), values, strict=False)
        return graph_replace(replaced, {z: v for v, z in scores.items()}, strict=False)

    def log_prior(self) -> pt.TensorVariable:
        """Graph of the log prior: standard normal in the scores, the model's in other variables."""
        scored = set(self.scored)
        others = [rv for rv in self.model.free_RVs if self.model.rvs_to_values[rv] not in scored]
        prior = self.with_scores([self.model.logp(vars=others)])[0] if others else 0.0
        normal = pm.Normal.dist()
        return prior + sum(pm.logp(normal, value).sum() for value in self.scored)

    def to_values(self, points: np.ndarray) -> np.ndarray:
        """Values of the model's variables (n, d) where the scores are those in `points` (n, d)."""
        values = points.copy()
        if self.scored and len(points):
            values[:, self.is_scored] = [self._values_at(*self._parts(point)) for point in points]
        return values

    def from_values(self, points: np.ndarray) -> np.ndarray:
        """Scores (n, d) of `points` (n, d) of the model's variables, by bisection."""
        scores = points.copy()
        if not self.scored:
            return scores
        for point, found in zip(points, scores, strict=True):
            wanted, parts = point[self.is_scored], self._parts(point)
            low = np.full(len(wanted), -LARGEST_SCORE)
            high = -low
            for _ in range(N_HALVINGS):
                middle = 0.5 * (low + high)
                is_below = self._values_given(middle, *parts) < wanted
                low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
            found[self.is_scored] = 0.5 * (low + high)
        return scores

    def _parts(self, point):
        parts = zip(np.split(point, self._ends), self.shapes, self.vars, strict=True)
        return [part.reshape(shape).astype(v.dtype) for part, shape, v in parts]

    @cached_property
    def _values_at(self) -> Callable:
        """The values that have scores, raveled, at the variables with scores among them."""
        return self._compiled(self.vars, self.with_scores(self._scored_in_place))

    @cached_property
    def _values_given(self) -> Callable:
        """The same at scores (m,), with parents that are given by the values of all variables."""
        joined, end, graphs = pt.dvector("scores"), 0, []
        for value, shape in zip(self.vars, self.shapes, strict=True):
            if value in self.scored:
                begin, end = end, end + math.prod(shape)
                z = joined[begin:end].reshape(shape)
                graphs.append(_value_of_score(self.model, value, z))
        return self._compiled([joined, *self.vars], graphs)

    def _compiled(self, inputs, graphs):
        return self.model.compile_fn(
            pt.concatenate([pt.flatten(graph) for graph in graphs]),
            inputs=inputs,
            point_fn=False,
            mode="FAST_COMPILE",
            on_unused_input="ignore",
        )
