"""The factorising log likelihood of a latent function, with derivatives, from a PyMC model."""

import math
from collections.abc import Set
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import NullTypeGradError, grad
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Cast
from pytensor.tensor.elemwise import Elemwise
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.special import log_ndtr

from pymc_kameleon.latent_gp.gaussian.blocks import Blocks
from pymc_kameleon.latent_gp.reader.affine_graph import grouped
from pymc_kameleon.latent_gp.reader.log_normal_cdf import with_stable_normal_cdf
from pymc_kameleon.latent_gp.tilted_moments import TiltedMoments, log_expit, logit_moments
from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.model_function import ENDLESS, IN_PYTHON, ModelFunction
from pymc_kameleon.model.operations import black_boxes

PROBE_SCALES = (0.5, 0.1, 0.01, 0.0)
"""Standard deviations of the points, about the prior mean, where a likelihood is probed."""

FEW, N_GROUPINGS = 64, 3
"""Values that are moved one by one to see what depends on them; more, in groups, so many times."""


class ModelLikelihood:
    """Log likelihood of the values of a latent function, as the sum of one term for each value.

    `terms` are the log densities of the variables that depend on the function `name`, by name, and
    graphs of `function` (N,), float64. It raises ValueError if the likelihood is not finite near
    `centre` (N,), the prior mean, or does not factorise. `has_curvature` is whether any second
    derivative is not 0: of -|y - f| all are, and Laplace's approximation knows nothing then.
    `moving` are shared variables that change at any time; after others `data_changed` is called.
    Where terms may depend on several values, no more than `most_together` that share none with
    others, there are `blocks` of them, and no third derivatives.
    """

    def __init__(
        self,
        model,
        name,
        terms,
        function,
        size,
        centre,
        compile_kwargs,
        *,
        moving: Set,
        most_together: int = 1,
    ):
        self._model, self._compile_kwargs, self._moving = model, compile_kwargs, moving
        self._most_together, self._function = most_together, function
        self.name, self.size = name, size
        self.names = list(terms)
        graphs = _in_double_precision([pt.as_tensor(t) for t in terms.values()])
        graphs = with_stable_normal_cdf([t.astype("float64") for t in graphs])
        self._count = model.compile_fn(
            [t.size for t in graphs], inputs=[function], point_fn=False, mode=IN_PYTHON
        )
        flat = pt.concatenate([t.flatten() for t in graphs])
        total = _simplified(flat.sum())
        zero = pt.constant(0.0)
        self.compiled_value = self._compile([zero, total, zero, flat], function)
        self._no_gradient = self._structure = None
        self.blocks: Blocks | None = None
        try:
            derivatives = _derivatives(total, function)
            self._gradient = derivatives[0]
            self._derivative_graphs = [*derivatives, flat]
            structure = _structure(flat, derivatives[0], function, _unlike(size))
        except (NotImplementedError, NullTypeGradError) as error:
            self._no_gradient = ", ".join(black_boxes(graphs)) or str(error)
        else:
            self._structure = model.compile_fn(
                structure, inputs=[function], point_fn=False, mode=IN_PYTHON
            )
        self.data_changed(centre)

    def data_changed(self, centre: np.ndarray) -> None:
        """Find anew which observations there are, and which value each of them belongs to."""
        self.compiled_value.check_data(centre, f"The log likelihood of {self.name}")
        self._counts = self._count(centre)
        self.n_outputs = N_TERMS + int(sum(self._counts))
        self._owners = None
        self._probes = self._find_probes(centre)
        self._known_labels: dict = {}
        self.has_curvature = False
        if self._structure is not None and not self._find_structure(self._structure):
            self._find_blocks()

    @cached_property
    def _slope(self):
        return self._compile([_simplified(self._gradient)], self._function)

    @cached_property
    def _derivatives(self):
        return self._compile(self._derivative_graphs, self._function)

    @property
    def has_gradient(self) -> bool:
        """Whether derivatives are known."""
        return self._no_gradient is None

    def value(self, f: np.ndarray) -> float:
        """Sum of l_n at `f` (N,)."""
        out = np.empty(self.n_outputs)
        self.compiled_value.into_compiled(f, out)
        return float(out[1])

    def elementwise(self, f: np.ndarray) -> np.ndarray:
        """Values l_n (N,) at `f` (N,); ValueError if the model gives only their sum."""
        if self._owners is None:
            raise ValueError(
                f"The log likelihood of {self.name} is known as a whole only, not for each element "
                "of the function. Write it without summing: a pm.Potential may be a vector."
            )
        return self._summed(self._observations(f))

    def terms(self, f: np.ndarray) -> np.ndarray:
        """Values and first three derivatives at `f` (N,): an array (4, N).

        Where the terms are known as a whole only, each value is an N-th of their sum.
        """
        derivatives, observations = self._differentiated(f)
        if self._owners is None:
            values = np.full(self.size, observations.sum() / self.size)
        else:
            values = self._summed(observations)
        return np.vstack([values, derivatives])

    def _differentiated(self, f):
        """First three derivatives (3, N), and each observation's value."""
        self.require_gradient()
        n = 3 * self.size
        out = np.empty(n + self.n_outputs - N_TERMS)
        self._derivatives.into(f, out)
        return out[:n].reshape(3, self.size), out[n:]

    def slope(self, f: np.ndarray) -> np.ndarray:
        """Gradient (N,) at `f` (N,)."""
        self.require_gradient()
        out = np.empty(self.size)
        self._slope.into(f, out)
        return out

    def block_terms(self, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradient (N,) and second derivatives (n, m, m) in `blocks` at `f` (N,)."""
        if self.blocks is None:
            raise ValueError(f"The terms of {self.name} depend on one value each.")
        out = np.empty((1 + self.blocks.members.shape[1]) * self.size)
        self._block_derivatives.into(f, out)
        gradient, *columns = out.reshape(-1, self.size)
        return gradient, self.blocks.matrices(np.array(columns))

    def require_gradient(self) -> None:
        """Raise NotImplementedError, naming the operation, if there is no gradient."""
        if self._no_gradient is not None:
            raise NotImplementedError(
                f"The likelihood of {self.name} has no gradient: {self._no_gradient} has none. "
                "Take EllipticalSliceStep with center='prior', which needs none."
            )

    @property
    def probit_labels(self) -> np.ndarray | None:
        """Labels (N,), -1 and +1, if l_n is log Phi(label f_n) for every n."""
        return self._labels(log_ndtr)

    @property
    def logit_labels(self) -> np.ndarray | None:
        """Labels (N,), -1 and +1, if l_n is -log(1 + exp(-label f_n)) for every n."""
        return self._labels(log_expit)

    def tilted_moments(self, mean: np.ndarray, variance: np.ndarray) -> TiltedMoments:
        """Tilted moments with `logit_labels`: a tenth of the cost of the quadrature."""
        return logit_moments(self.logit_labels, mean, variance)

    def _labels(self, log_probability):
        """Labels (N,) for which each term is `log_probability` (label f_n), or None."""
        if log_probability in self._known_labels:
            return self._known_labels[log_probability]
        labels = self._find_labels(log_probability)
        if self._moving.isdisjoint(self.compiled_value.shared()):
            self._known_labels[log_probability] = labels
        return labels

    def _find_labels(self, log_probability):
        if self._owners is None:
            return None
        labels = np.sign(self.terms(self._probes[0])[1])
        for f in self._probes:
            expected = log_probability(labels * f)
            if not np.allclose(self.elementwise(f), expected, rtol=1e-9, atol=1e-12):
                return None
        return labels

    # construction ---------------------------------------------------------------------------------

    def _compile(self, outputs, function):
        return ModelFunction(self._model, outputs, function, self.size, self._compile_kwargs)

    def _summed(self, observations):
        return np.bincount(self._owners, weights=observations, minlength=self.size)

    def _find_probes(self, centre):
        """Two points with a finite likelihood."""
        rng = np.random.default_rng(0)
        for scale in PROBE_SCALES:
            probes = centre + scale * rng.standard_normal((2, self.size))
            values = np.array([self._observations(f) for f in probes])
            if np.all(np.isfinite(values)):
                return probes
        first = int(np.flatnonzero(~np.isfinite(values[0]))[0])
        ends = np.cumsum(self._counts)
        term = int(np.searchsorted(ends, first, side="right"))
        raise ValueError(
            f"{self.names[term]}: the log likelihood of its value number "
            f"{first - (ends[term - 1] if term else 0)} is {values[0, first]} wherever {self.name} "
            "was tried, near its prior mean. Is the observed value one that the likelihood can "
            "produce? Bernoulli takes 0 and 1, not -1 and 1."
        )

    def _find_structure(self, structure):
        """Find the element that each observation belongs to; False if there are several."""
        vector = _unlike(self.size)
        owners = np.zeros(int(sum(self._counts)), dtype=np.int64)
        separate = True
        for f in self._probes:
            product, second, ones, weighted = structure(f)
            self.has_curvature |= bool(np.any(second != 0))
            expected = second * vector
            if not np.allclose(product, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max()):
                return False
            moving = np.abs(ones) > 0
            ratios = weighted[moving] / ones[moving]
            order = np.argsort(vector)
            middles = 0.5 * (vector[order][1:] + vector[order][:-1])
            nearest = order[np.searchsorted(middles, ratios)]
            separate &= np.allclose(vector[nearest], ratios, rtol=1e-9)
            owners[moving] = nearest
        self.blocks = None
        if separate:
            self._owners = owners
        return True

    def _find_blocks(self):
        """Find which values go together, and compile second derivatives for them."""
        found = self._values_together() if self._most_together > 1 else None
        if found is None or found.members.shape[1] > self._most_together:
            raise NotFactorising(
                f"The log likelihood of {self.name} does not factorise: its Hessian has entries "
                f"off the diagonal. Each of {', '.join(self.names)} may depend on "
                + ("one value" if self._most_together == 1 else f"{self._most_together} values")
                + f" of {self.name} only. Take NUTS or KameleonStep for this model."
            )
        self.has_curvature = True  # off the diagonal, at least
        if self.blocks is not None and np.array_equal(self.blocks.members, found.members):
            return
        self.blocks, columns = found, []
        for members in found.members.T:
            own = np.zeros(self.size)
            own[members[members >= 0]] = 1.0
            column = grad((self._gradient * pt.constant(own)).sum(), self._function)
            columns.append(_simplified(column))
        self._block_derivatives = self._compile([self._gradient, *columns], self._function)

    def _values_together(self):
        """Return blocks of the values that one observation depends on; None if they are many."""
        pattern = self._dependence()
        if pattern is None:
            return None
        _, block = connected_components(pattern.T @ pattern, directed=False)
        order = np.argsort(block, kind="stable")
        number = np.empty(self.size, dtype=np.int64)
        number[order] = np.arange(self.size) - np.searchsorted(block[order], block[order])
        return Blocks.of(block, number)

    def _dependence(self) -> csr_array | None:
        """Return which observations (n,) depend on which values (N,); None if one does on many.

        An observation may depend on those of which the group moves it, in each of several random
        groupings; on which it does, groups tell of which no two may move one observation.
        """
        if self.size <= FEW:
            return self._moved_by(np.arange(self.size))
        rng, n_groups = np.random.default_rng(3), math.isqrt(self.size)
        found: Any = None
        for _ in range(N_GROUPINGS):
            moved = self._moved_by(rng.permutation(self.size) % n_groups)
            if moved is None:
                return None
            found = moved if found is None else found.multiply(moved)
        return found.multiply(self._moved_by(grouped(csr_array(found)).of_column))

    def _moved_by(self, group):
        """Return which observations (n,) change with the `group` (N,) of which values (N,).

        None if one changes with more groups than the values that it may depend on.
        """
        f, shift = self._probes[0], 0.1 * np.random.default_rng(2).standard_normal(self.size)
        before = self._observations(f)
        moved = (f + shift * (group == k) for k in range(group.max() + 1))
        changed = np.array([self._observations(other) != before for other in moved])
        if changed.sum(axis=0).max() > self._most_together:
            return None
        values = np.arange(self.size)
        members = csr_array((np.ones(self.size), (group, values)))
        return csr_array(changed.T.astype(float)) @ members

    def _observations(self, f):
        out = np.empty(self.n_outputs)
        self.compiled_value.into(f, out)
        return out[N_TERMS:]


class NotFactorising(ValueError):
    """Observations depend on too many values together."""


def _in_double_precision(graphs):
    """Return equal graphs without casts from double to single precision.

    Rounded values hide which observation belongs to which value, and the tails of Phi.
    """
    casts = {
        v: v.owner.inputs[0]
        for v in ancestors(graphs)
        if v.owner is not None
        and isinstance(v.owner.op, Elemwise)
        and isinstance(v.owner.op.scalar_op, Cast)
        and (v.dtype, v.owner.inputs[0].dtype) == ("float32", "float64")
    }
    return clone_replace(graphs, replace=casts, rebuild_strict=False) if casts else graphs


def _simplified(graph):
    """Return an equal graph whose derivatives are finite where the graph is, as PyMC does it."""
    return rewrite_graph(graph, include=("canonicalize", "stabilize"), exclude=(ENDLESS,))


def _derivatives(total, function):
    """First, second and third derivative: each is the gradient of the sum of the one before."""
    derivatives, last = [], total
    for _ in range(3):
        derivatives.append(grad(last, function, disconnected_inputs="ignore"))
        # Each derivative is simplified before it is differentiated: it grows tenfold otherwise.
        last = _simplified(derivatives[-1].sum())
    return derivatives


def _structure(observations, gradient, function, vector):
    """Hessian times `vector` and ones, and the Jacobian of the observations times ones and it."""
    vector = pt.constant(vector)
    products = [
        grad((gradient * w).sum(), function, disconnected_inputs="ignore")
        for w in (vector, pt.ones_like(vector))
    ]
    weights = observations.type()
    pulled = grad((observations * weights).sum(), function, disconnected_inputs="ignore")
    pushed = [
        grad((pulled * w).sum(), weights, disconnected_inputs="ignore")
        for w in (pt.ones_like(vector), vector)
    ]
    zeros = pt.zeros_like(observations)
    return [*products, *clone_replace(pushed, replace={weights: zeros}, rebuild_strict=False)]


def _unlike(size):
    """Return a vector (size,) without structure, all of whose entries differ."""
    return 1.0 + np.random.default_rng(1).random(size)
