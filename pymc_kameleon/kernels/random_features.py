r"""Random Fourier features: maps :math:`\phi` with :math:`\phi(x)^\top \phi(y) \approx k(x, y)`.

With frequencies :math:`\omega_i` drawn from the spectral density of k, the D features are one of

- "pairs": :math:`\sqrt{2/D}\,[\sin \omega_1^\top x, \dots, \sin \omega_{D/2}^\top x,
  \cos \omega_1^\top x, \dots, \cos \omega_{D/2}^\top x]`, all sines before all cosines;
- "shifted": :math:`\sqrt{2/D}\,[\cos(\omega_1^\top x + b_1), \dots, \cos(\omega_D^\top x + b_D)]`
  with phases :math:`b_i \sim U(0, 2\pi)`.

References
----------
A. Rahimi and B. Recht (2007), Random features for large-scale kernel machines, NeurIPS 20.
D. J. Sutherland and J. Schneider (2015), On the error of random Fourier features, UAI.
"""

import inspect

import numpy as np
from numpy.random import Generator

from pymc_kameleon._warnings import warn_user
from pymc_kameleon.kernels import Kernel, as_kernel
from pymc_kameleon.validation import checked_choice, checked_integer, checked_number

__all__ = [
    "EMBEDDINGS",
    "RandomFourierFeatures",
    "checked_n_features",
    "draw_features",
    "features",
    "jacobians",
]

EMBEDDINGS = ("pairs", "shifted")


def checked_n_features(n_features, embedding) -> int:
    """`n_features` as an int; an odd one for "pairs" is warned of, and is one more."""
    checked_choice("embedding", embedding, EMBEDDINGS)
    number = checked_integer("n_features", n_features, 2)
    if embedding == "pairs" and number % 2:
        warn_user(
            f"n_features={number} is odd, and embedding='pairs' takes sines and cosines in "
            f"pairs: there are {number + 1} features."
        )
        number += 1
    return number


def draw_features(
    kernel: Kernel | str,
    n_features: int,
    embedding: str,
    dim: int,
    bandwidth: float,
    rng: Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies (d, m), C-contiguous, and phases (m,), which are zeros for "pairs".

    m is D/2 for "pairs" and D for "shifted".
    """
    kernel = as_kernel(kernel, needs="spectrum")
    n_features = checked_n_features(n_features, embedding)
    dim = checked_integer("dim", dim, 1)
    bandwidth = checked_number("bandwidth", bandwidth, above=0)
    size = n_features // 2 if embedding == "pairs" else n_features
    frequencies = np.ascontiguousarray(kernel.frequencies(size, dim, bandwidth, rng).T)
    phases = np.zeros(size) if embedding == "pairs" else rng.uniform(0, 2 * np.pi, size)
    return frequencies, phases


def features(
    X: np.ndarray, frequencies: np.ndarray, phases: np.ndarray, embedding: str
) -> np.ndarray:
    """Features (n, D) of points (n, d), with what `draw_features` returned."""
    angles = X @ frequencies + phases
    if embedding == "pairs":
        return np.hstack([np.sin(angles), np.cos(angles)]) / np.sqrt(phases.size)
    return np.sqrt(2 / phases.size) * np.cos(angles)


def jacobians(
    X: np.ndarray, frequencies: np.ndarray, phases: np.ndarray, embedding: str
) -> np.ndarray:
    """Differentiate `features` in the point: (n, D, d)."""
    angles = X @ frequencies + phases
    if embedding == "pairs":
        slopes = np.hstack([np.cos(angles), -np.sin(angles)]) / np.sqrt(phases.size)
        return slopes[:, :, None] * np.tile(frequencies.T, (2, 1))
    slopes = -np.sqrt(2 / phases.size) * np.sin(angles)
    return slopes[:, :, None] * frequencies.T


class RandomFourierFeatures:
    r"""Map points to features whose inner products approximate a kernel.

    A transformer as in scikit-learn, which it does not need. The error of
    :math:`\phi(x)^\top \phi(y)` falls as :math:`D^{-1/2}`.

    Parameters
    ----------
    kernel : Kernel or str
        One with a spectral density: "gaussian" (default), "matern", "laplacian",
        "inverse_multiquadric", "sinc", "sinc_squared", an object from `pymc_kameleon.kernels` such
        as `Matern(1.5)`, or your own as `CustomKernel(value, frequencies=...)`.
    n_features : int
        Number D of features, at least 2; for "pairs" even, or it is raised by one.
    embedding : {"pairs", "shifted"}
        "pairs" (default): D/2 frequencies, the sines of all before the cosines of all. Its error
        depends on x - y only, and for a Gaussian kernel is never the larger one. "shifted": D
        frequencies, cosines with random phases.
    bandwidth : float
        Length scale of the kernel.
    random_state : int or numpy.random.Generator, optional
        Seed of the draws in `fit`.

    Attributes
    ----------
    frequencies_ : array, shape (m, d)
        Draws from the spectral density; m is D/2 for "pairs" and D for "shifted".
    phases_ : array, shape (m,)
        Uniform on :math:`(0, 2\pi)` for "shifted", zeros for "pairs".
    n_features_in_ : int
        Dimension d of the points.
    n_features_out_ : int
        Number D of features.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_kameleon.kernels.random_features import RandomFourierFeatures
    >>> X = np.random.default_rng(1).normal(size=(100, 3))
    >>> phi = RandomFourierFeatures("matern", n_features=2000, random_state=2).fit_transform(X)
    >>> phi.shape
    (100, 2000)
    """

    def __init__(
        self,
        kernel: Kernel | str = "gaussian",
        n_features: int = 300,
        *,
        embedding: str = "pairs",
        bandwidth: float = 1.0,
        random_state: int | Generator | None = None,
    ):
        self.kernel = kernel
        self.n_features = n_features
        self.embedding = embedding
        self.bandwidth = bandwidth
        self.random_state = random_state

    def fit(self, X, y=None):
        """Draw frequencies for points of the dimension of `X`.

        Parameters
        ----------
        X : array, shape (n, d)
        y : ignored

        Returns
        -------
        RandomFourierFeatures
            The same object.
        """
        dim = _checked_points(X).shape[1]
        rng = np.random.default_rng(self.random_state)
        frequencies, self.phases_ = draw_features(
            self.kernel, self.n_features, self.embedding, dim, self.bandwidth, rng
        )
        self.frequencies_ = np.ascontiguousarray(frequencies.T)
        self.n_features_in_ = dim
        self.n_features_out_ = self.phases_.size * (2 if self.embedding == "pairs" else 1)
        self._embedding = self.embedding
        return self

    def transform(self, X) -> np.ndarray:
        """Features of points, (n, d) to (n, D)."""
        X = _checked_points(X, self._fitted_dim())
        return features(X, self.frequencies_.T, self.phases_, self._embedding)

    def fit_transform(self, X, y=None) -> np.ndarray:
        """`fit`, then the features of `X`."""
        return self.fit(X).transform(X)

    def jacobian(self, X) -> np.ndarray:
        """Differentiate the features in the point.

        Parameters
        ----------
        X : array, shape (n, d) or (d,)

        Returns
        -------
        array, shape (n, D, d) or (D, d)
        """
        dim = self._fitted_dim()
        one = np.ndim(X) == 1
        X = _checked_points(np.asarray(X)[None] if one else X, dim)
        out = jacobians(X, self.frequencies_.T, self.phases_, self._embedding)
        return out[0] if one else out

    def get_params(self, deep: bool = True) -> dict:
        """Arguments of the constructor, as they were given."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params):
        """Change arguments of the constructor; `fit` takes them up."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{name}={value!r} is unknown: take one of {', '.join(known)}.")
            setattr(self, name, value)
        return self

    def __repr__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({arguments})"

    def _fitted_dim(self):
        if not hasattr(self, "frequencies_"):
            raise ValueError(f"{self!r} is not fitted: call fit(X) first.")
        return self.n_features_in_


def _checked_points(X, dim=None):
    """`X` as a finite float array of shape (n, d), with d = `dim` if given."""
    X = np.asarray(X, dtype=float)
    if X.ndim != 2 or dim not in (None, X.shape[1]):
        wanted = "(n, d)" if dim is None else f"(n, {dim})"
        raise ValueError(f"X has shape {X.shape}: take points as rows, shape {wanted}.")
    if not np.all(np.isfinite(X)):
        raise ValueError("X has NaN or infinite entries: take points that are all finite.")
    return X
