r"""Targets of the kernel adaptive Metropolis--Hastings paper as PyMC models with exact draws.

Every target has the density :math:`p(x) = Z^{-1} \exp(-\lVert u(x) \rVert^2 / 2)` for a map
:math:`u` of its own, so that :math:`\lVert u(x) \rVert^2` of a draw is chi-squared and tells how
much of every quantile region a sampler has covered.

References
----------
Sejdinovic, Strathmann, Lomeli Garcia, Andrieu and Gretton (2014). Kernel adaptive Metropolis--
Hastings. ICML, section 5.2. Haario, Saksman and Tamminen (1999). Adaptive proposal distribution for
random walk Metropolis algorithm. Computational Statistics 14 (the banana).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import scipy
from pytensor.tensor.random.op import RandomVariable

from pymc_kameleon._compat import private
from pymc_kameleon.validation import checked_integer, checked_number

__all__ = ["Banana", "CorrelatedGaussian", "Flower", "Ring", "Target"]

LOG_TWO_PI = math.log(2 * math.pi)
N_ANGLES = 4096
"""Nodes of a periodic trapezoidal rule, whose error falls exponentially with their number."""


class Target(ABC):
    r"""A density :math:`p(x) = Z^{-1} \exp(-\lVert u(x) \rVert^2 / 2)` with an exact sampler.

    Subclasses are frozen dataclasses: equal, hashed and pickled by their parameters.

    Attributes
    ----------
    dim : int
        Length of x.
    """

    dim: int

    @abstractmethod
    def _standardise(self, x: Any, numerics: ModuleType) -> Any:
        """Map x (..., dim) to u (..., degrees_of_freedom) by functions of NumPy or PyTensor."""

    @abstractmethod
    def _log_normaliser(self) -> float:
        """Return log Z."""

    def _start(self) -> np.ndarray:
        """Return the initial point of the model, shape (dim,)."""
        return np.zeros(self.dim)

    @abstractmethod
    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Return exact independent draws, shape (n, dim)."""

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draw independently and exactly from the target.

        Parameters
        ----------
        n : int
            Number of draws.
        rng : numpy.random.Generator

        Returns
        -------
        array of float, shape (n, dim)
        """
        return self._draw(n, rng)

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom of the chi-squared :meth:`quantile_statistic`, the length of u."""
        return self.dim

    def model(self) -> pm.Model:
        """Build the target as a PyMC model.

        Returns
        -------
        pymc.Model
            One free variable ``x`` of shape (dim,), without a transform. Its log density is
            normalised and has a gradient, and its prior draws are those of :meth:`draw`.
        """
        with pm.Model() as model:
            rng = pytensor.shared(np.random.default_rng())
            x = _TargetVariable(self).make_node(rng, None).outputs[1]
            model.register_rv(x, "x", default_transform=None)
        return model

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the normalised log density, the same as that of the model.

        Parameters
        ----------
        x : array of float, shape (..., dim)

        Returns
        -------
        array of float, shape (...)
        """
        return -0.5 * self.quantile_statistic(x) - self._log_normaliser()

    def quantile_statistic(self, x: np.ndarray) -> np.ndarray:
        r"""Evaluate :math:`\lVert u(x) \rVert^2`, whose level sets bound the quantile regions.

        Parameters
        ----------
        x : array of float, shape (..., dim)

        Returns
        -------
        array of float, shape (...)
            For exact draws, chi-squared with :attr:`degrees_of_freedom` degrees of freedom.

        Raises
        ------
        ValueError
            If the last axis of x does not have length dim.
        """
        x = np.asarray(x, dtype=float)
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(
                f"x has shape {x.shape}, and the last axis must have length dim={self.dim}; "
                "move the axis of the coordinates to the end, np.moveaxis(x, axis, -1)."
            )
        return (self._standardise(x, np) ** 2).sum(axis=-1)

    def quantile_error(
        self,
        draws: np.ndarray,
        probabilities: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    ) -> np.ndarray:
        r"""Measure by how much draws miss the probability of each quantile region.

        .. math:: |\hat F(q) - q|, \qquad \hat F(q) = \frac 1 n \sum_{i=1}^n
            \mathbb 1\{\lVert u(x_i) \rVert^2 < F^{-1}_{\chi^2_k}(q)\}

        Parameters
        ----------
        draws : array of float, shape (..., dim)
            Draws, pooled over all leading axes. Figure 5 of the paper is the mean over chains of
            the error of each chain: call this once a chain and average.
        probabilities : sequence of float
            Probabilities q of the regions, strictly between 0 and 1.

        Returns
        -------
        array of float, shape (len(probabilities),)

        Raises
        ------
        ValueError
            If there are no draws, the last axis does not have length dim, or a probability is not
            between 0 and 1.
        """
        q = np.atleast_1d(np.asarray(probabilities, dtype=float))
        if not np.all((q > 0) & (q < 1)):
            raise ValueError(f"probabilities={probabilities!r}: take numbers in (0, 1).")
        statistic = self.quantile_statistic(draws).ravel()
        if statistic.size == 0:
            raise ValueError(f"draws has shape {np.shape(draws)}: give at least one draw.")
        quantiles = scipy.stats.chi2(self.degrees_of_freedom).ppf(q)
        return np.abs((statistic[:, None] < quantiles).mean(axis=0) - q)


# Public is `pymc.CustomDist` only, whose class no other process finds.
_logprob = private("pymc.logprob.abstract", "_logprob", "a model of pymc_kameleon.targets")
_support_point = private(
    "pymc.distributions.distribution", "_support_point", "a model of pymc_kameleon.targets"
)


class _TargetVariable(RandomVariable):
    """Random variable of a target.

    ``pymc.CustomDist`` makes a class on the fly, for which an unpickling process knows no log
    density; one of this module is found again by its name.
    """

    name = "target"
    signature = "->(n)"
    dtype = "floatX"
    _print_name = ("Target", "\\operatorname{Target}")
    __props__ = (*RandomVariable.__props__, "target")

    def __init__(self, target: Target, **kwargs: Any) -> None:
        self.target = target
        super().__init__(**kwargs)

    def _supp_shape_from_params(self, dist_params: Any, param_shapes: Any = None) -> tuple[int]:
        return (self.target.dim,)

    def rng_fn(self, rng: np.random.Generator, size: Sequence[int] | None = None) -> np.ndarray:
        shape = () if size is None else tuple(int(length) for length in np.atleast_1d(size))
        return self.target.draw(math.prod(shape), rng).reshape(*shape, self.target.dim)


@_logprob.register(_TargetVariable)
def _target_log_density(op: _TargetVariable, values: Sequence, *inputs: Any, **kwargs: Any) -> Any:
    u = op.target._standardise(values[0], pt)
    return -0.5 * pt.sum(u**2, axis=-1) - op.target._log_normaliser()


# Not an initval: PyMC can neither freeze nor condition a model that has one.
@_support_point.register(_TargetVariable)
def _target_support_point(op: _TargetVariable, variable: Any, *inputs: Any) -> Any:
    return pt.broadcast_to(pt.as_tensor_variable(op.target._start()), variable.shape)


@dataclass(frozen=True)
class Banana(Target):
    r"""Banana of Haario et al. (1999): a Gaussian, twisted along its longest axis.

    .. math::
        p(x) = \mathcal N(x_1; 0, v) \; \mathcal N(x_2; b(x_1^2 - v), 1)
        \prod_{j=3}^d \mathcal N(x_j; 0, 1), \qquad
        u = (x_1 / \sqrt v, \; x_2 - b(x_1^2 - v), \; x_3, \ldots, x_d)

    The mean is 0. The map u preserves volume up to a constant, so the quantile regions are exact.

    Parameters
    ----------
    bananicity : float
        Twist b. The paper has 0.03 (moderate) and 0.1 (strong).
    variance : float
        Variance v of the first coordinate.
    dim : int
        Length of x, at least 2.
    """

    bananicity: float = 0.03
    variance: float = 100.0
    dim: int = 8

    def __post_init__(self) -> None:
        _require_within("bananicity", self.bananicity)
        checked_number("variance", self.variance, above=0)
        checked_integer("dim", self.dim, 2)

    def _standardise(self, x: Any, numerics: ModuleType) -> Any:
        first = x[..., :1]
        second = x[..., 1:2] - self.bananicity * (first**2 - self.variance)
        blocks = [first / math.sqrt(self.variance), second, x[..., 2:]]
        return numerics.concatenate(blocks, axis=-1)

    def _log_normaliser(self) -> float:
        return 0.5 * (self.dim * LOG_TWO_PI + math.log(self.variance))

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        x = rng.standard_normal((n, self.dim))
        x[:, 0] *= math.sqrt(self.variance)
        x[:, 1] += self.bananicity * (x[:, 0] ** 2 - self.variance)
        return x


@dataclass(frozen=True)
class Flower(Target):
    r"""Flower: a ring in two dimensions whose radius oscillates with the angle.

    .. math::
        p(x) \propto \exp\left(-\frac{(r - \rho(\theta))^2}{2 \sigma^2}\right)
        \prod_{j=3}^d \mathcal N(x_j; 0, 1), \qquad
        \rho(\theta) = r_0 + A \cos(\omega \theta), \qquad
        u = ((r - \rho(\theta)) / \sigma, \; x_3, \ldots, x_d)

    with polar coordinates :math:`(r, \theta)` of :math:`(x_1, x_2)`; the first factor is a density
    per unit area of that plane. (The formula printed in the paper lacks the square.) The mean is 0
    for a ring and for :math:`\omega \ge 2`.

    Parameters
    ----------
    radius : float
        Mean radius r0.
    amplitude : float
        Height A of the petals, smaller than the radius.
    frequency : int
        Number of petals, a positive integer, without which the density would jump.
    scale : float
        Standard deviation sigma across the ridge, and of nothing else.
    dim : int
        Length of x, at least 2.

    Notes
    -----
    The angle has the marginal density

    .. math::
        m(\theta) \propto \int_0^\infty r \, e^{-(r - \rho)^2 / 2\sigma^2} dr
        = \sigma^2 e^{-\rho^2 / 2\sigma^2} + \sqrt{2\pi} \, \sigma \rho \, \Phi(\rho / \sigma),

    almost but not exactly :math:`\rho(\theta)`, and the radius given the angle a density
    proportional to :math:`r \, \mathcal N(r; \rho, \sigma^2)` on r > 0. The term of
    :math:`r = \rho + \sigma u_1` that is odd in :math:`u_1` cancels in the density of
    :math:`u_1^2`, which is chi-squared but for the truncation at r = 0: no quantile region is off
    by more than :math:`r_0^{-1} \,\mathrm{mean}_\theta[\sigma \varphi(\rho / \sigma) - \rho
    \Phi(-\rho / \sigma)]` in probability, 1e-7 with the default parameters. The bound grows as the
    valleys, :math:`r_0 - |A|`, come within a few scales of the centre. At the centre itself the
    angle counts as 0, and the gradient, which does not exist there, is given as 0.
    """

    radius: float = 10.0
    amplitude: float = 6.0
    frequency: int = 6
    scale: float = 1.0
    dim: int = 8

    def __post_init__(self) -> None:
        checked_number("radius", self.radius, above=0)
        checked_number("scale", self.scale, above=0)
        _require_within("amplitude", self.amplitude, self.radius)
        checked_integer("frequency", self.frequency, 1)
        checked_integer("dim", self.dim, 2)

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom of the chi-squared :meth:`quantile_statistic`, dim - 1."""
        return self.dim - 1

    def _ridge(self, angle: Any, numerics: ModuleType) -> Any:
        return self.radius + self.amplitude * numerics.cos(self.frequency * angle)

    def _angular_mass(self, ridge: Any) -> Any:
        standard = ridge / self.scale
        tail = scipy.stats.norm.pdf(standard) + standard * scipy.stats.norm.cdf(standard)
        return math.sqrt(2 * math.pi) * self.scale**2 * tail

    def _standardise(self, x: Any, numerics: ModuleType) -> Any:
        first, second = x[..., :1], x[..., 1:2]
        squared = first**2 + second**2
        # Neither atan2 nor the square root has a gradient at 0, and where() would pass on its NaN.
        centre = squared <= 0
        angle = numerics.arctan2(second, numerics.where(centre, 1.0, first))
        r = numerics.where(centre, 0.0, numerics.sqrt(numerics.where(centre, 1.0, squared)))
        across = (r - self._ridge(angle, numerics)) / self.scale
        return numerics.concatenate([across, x[..., 2:]], axis=-1)

    def _log_normaliser(self) -> float:
        angles = 2 * np.pi / N_ANGLES * np.arange(N_ANGLES)
        # The mean over all angles is the same for every number of petals; one is integrated best.
        ridge = self.radius + self.amplitude * np.cos(angles)
        area = 2 * math.pi * self._angular_mass(ridge).mean()
        return math.log(area) + 0.5 * (self.dim - 2) * LOG_TWO_PI

    def _start(self) -> np.ndarray:
        start = np.zeros(self.dim)
        start[0] = self._ridge(0.0, np)
        return start

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        angle = self._draw_angle(n, rng)
        r = self._draw_radius(angle, rng)
        x = rng.standard_normal((n, self.dim))
        x[:, 0] = r * np.cos(angle)
        x[:, 1] = r * np.sin(angle)
        return x

    def _draw_angle(self, n: int, rng: np.random.Generator) -> np.ndarray:
        highest = self._angular_mass(self.radius + abs(self.amplitude))

        def propose(rows):
            angle = rng.uniform(-np.pi, np.pi, rows.size)
            return angle, self._angular_mass(self._ridge(angle, np)) / highest

        return _by_rejection(n, propose, rng)

    def _draw_radius(self, angle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        ridge = self._ridge(angle, np)
        # log r lies below its tangent at the mode, so N(mode, sigma^2) is an envelope.
        mode = 0.5 * (ridge + np.sqrt(ridge**2 + 4 * self.scale**2))

        def propose(rows):
            r = mode[rows] + self.scale * rng.standard_normal(rows.size)
            ratio = np.maximum(r / mode[rows], 0.0)
            return r, ratio * np.exp(1 - ratio)

        return _by_rejection(angle.size, propose, rng)


def _by_rejection(n: int, propose: Callable, rng: np.random.Generator) -> np.ndarray:
    """Draw values (n,); `propose` returns some for given rows, and how probably to accept each."""
    values = np.empty(n)
    missing = np.arange(n)
    while missing.size:
        proposed, acceptance = propose(missing)
        accepted = rng.random(missing.size) < acceptance
        values[missing[accepted]] = proposed[accepted]
        missing = missing[~accepted]
    return values


@dataclass(frozen=True)
class Ring(Flower):
    r"""Ring: a :class:`Flower` without petals, A = 0.

    .. math:: p(x) \propto \exp\left(-\frac{(r - r_0)^2}{2 \sigma^2}\right)
        \prod_{j=3}^d \mathcal N(x_j; 0, 1)

    The quantile regions are exact to rounding for a radius of eight scales or more.

    Parameters
    ----------
    radius : float
        Radius r0.
    scale : float
        Standard deviation sigma across the ring.
    dim : int
        Length of x, at least 2.
    """

    amplitude: float = field(default=0.0, init=False, repr=False)
    frequency: int = field(default=1, init=False, repr=False)


@dataclass(frozen=True)
class CorrelatedGaussian(Target):
    r"""Gaussian with zero mean, correlated neighbours and unequal scales.

    .. math::
        p(x) = \mathcal N(x; 0, \Sigma), \qquad \Sigma_{ij} = s_i s_j c^{|i - j|}, \qquad
        u = L^{-1} x, \quad \Sigma = L L^\top

    The correlation is that of a first-order autoregression, so that u takes O(d) operations, and
    the standard deviations s are spaced geometrically.

    Parameters
    ----------
    dim : int
        Length of x, at least 1.
    correlation : float
        Correlation c of neighbours, strictly between -1 and 1.
    smallest_scale, largest_scale : float
        Standard deviations of the first and of the last coordinate; of dim=1, the smallest.
    """

    dim: int = 20
    correlation: float = 0.95
    smallest_scale: float = 0.1
    largest_scale: float = 10.0

    def __post_init__(self) -> None:
        checked_integer("dim", self.dim, 1)
        _require_within("correlation", self.correlation, 1.0)
        checked_number("smallest_scale", self.smallest_scale, above=0)
        checked_number("largest_scale", self.largest_scale, above=0)
        if self.smallest_scale > self.largest_scale:
            raise ValueError(
                f"smallest_scale={self.smallest_scale!r} must not exceed "
                f"largest_scale={self.largest_scale!r}; exchange the two."
            )

    @property
    def scales(self) -> np.ndarray:
        """Standard deviations, shape (dim,)."""
        return np.geomspace(self.smallest_scale, self.largest_scale, self.dim)

    @property
    def covariance(self) -> np.ndarray:
        """Covariance matrix, shape (dim, dim)."""
        index = np.arange(self.dim)
        correlation = float(self.correlation) ** np.abs(index[:, None] - index)
        return np.outer(self.scales, self.scales) * correlation

    @property
    def _innovation_scale(self) -> float:
        return math.sqrt((1 - self.correlation) * (1 + self.correlation))

    def _standardise(self, x: Any, numerics: ModuleType) -> Any:
        z = x / self.scales
        innovations = (z[..., 1:] - self.correlation * z[..., :-1]) / self._innovation_scale
        return numerics.concatenate([z[..., :1], innovations], axis=-1)

    def _log_normaliser(self) -> float:
        log_determinant = float(np.log(self.scales).sum())
        log_determinant += (self.dim - 1) * math.log(self._innovation_scale)
        return log_determinant + 0.5 * self.dim * LOG_TWO_PI

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        z = rng.standard_normal((n, self.dim))
        z[:, 1:] *= self._innovation_scale
        for j in range(1, self.dim):
            z[:, j] += self.correlation * z[:, j - 1]
        return z * self.scales


def _require_within(name: str, value: Any, bound: float = math.inf) -> None:
    finite = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or abs(value) >= bound:
        interval = f" strictly between {-bound:g} and {bound:g}" if bound < math.inf else ""
        raise ValueError(f"{name}={value!r}: take a finite number{interval}.")
