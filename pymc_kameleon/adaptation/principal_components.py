"""Learner of PCA-Kameleon (Sejdinovic et al. 2014, appendix C)."""

import math

import numpy as np
from scipy import linalg

from pymc_kameleon.adaptation.subsample import SubsampleLearner
from pymc_kameleon.mcmc.proposals.eigenfunction_moves import (
    EigenfunctionMoves,
    Eigenfunctions,
    GradientsHere,
    directions,
)
from pymc_kameleon.validation import checked_integer, checked_share

MOST_COMPONENTS = 100
"""Largest number of eigenfunctions, where `n_components` is a share."""

SMALLEST_EIGENVALUE = 1e-10
"""Eigenvalues below this share of the largest are numerically zero."""


class PrincipalComponentLearner(SubsampleLearner):
    """Draws a new subsample at every update, and finds its principal eigenfunctions.

    Parameters are those of `PCAKameleonStep`.
    """

    growth = 1.3
    n_more_normals = 1
    state_names = (*SubsampleLearner.state_names, "eigenfunctions")

    def __init__(self, *, n_subsample, n_components, gamma, **choices):
        n_subsample = checked_integer("n_subsample", n_subsample, 2)
        self.n_components = _checked_components(n_components, n_subsample)
        if gamma == 0:
            raise ValueError(
                "gamma=0: moves along one direction alone cannot be reversed where it bends; take "
                "a number above 0."
            )
        is_share = isinstance(self.n_components, float)
        self.n_scalings = min(MOST_COMPONENTS, n_subsample) if is_share else self.n_components
        super().__init__(
            n_subsample=n_subsample, gamma=gamma, n_components=self.n_components, **choices
        )

    def _begin(self, position, rng, warm):
        self.eigenfunctions = self._no_components(0)
        super()._begin(position, rng, warm)

    @property
    def is_consistent(self):  # noqa: D102
        n = self.learnt.points.shape[1]
        arrays = (self.eigenfunctions.vectors, self.here.gradients, self.here.proposed)
        return all(array.shape[1] == n for array in arrays)

    def begin_warm(self, warm, rng):  # noqa: D102
        super().begin_warm(warm._replace(scaling=None), rng)

    def _begin_local(self):
        shape = self.learnt.points.shape
        self.here = GradientsHere(np.zeros(1, dtype=np.bool_), np.zeros(shape), np.zeros(shape))

    def proposal(self, compiled):  # noqa: D102
        learnt = self.learnt
        return EigenfunctionMoves(
            self.kernel.form(compiled),
            learnt.points,
            learnt.parameters,
            self.eigenfunctions,
            self.here,
            learnt.coordinates,
            self.scaling,
            self.gamma,
            self.history,
        )

    def _learn(self, history, rng, tune=True):
        self._learn_coordinates(history, rng)
        self._begin_local()
        self.eigenfunctions = self._principal_components()
        self._rescale(rng)

    def _principal_components(self):
        """Eigenvectors of HKH and their weights, the largest eigenvalue first."""
        points, bandwidth = self.learnt.points.T, self.learnt.parameters[-1]
        matrix = self.kernel(points, points, bandwidth)
        means = matrix.mean(axis=0)
        matrix = matrix - means - means[:, None] + means.mean()
        n, n_components = len(matrix), self.n_components
        found = self._no_components(n)
        if np.trace(matrix) <= 0:
            return found
        count = min(self.n_scalings, n)
        eigenvalues, vectors = linalg.eigh(matrix, subset_by_index=[n - count, n - 1])
        eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
        rank = max(1, int(np.sum(eigenvalues > SMALLEST_EIGENVALUE * eigenvalues[0])))
        if isinstance(n_components, float):
            shares = np.cumsum(eigenvalues[:rank]) / np.trace(matrix)
            rank = min(rank, 1 + int(np.searchsorted(shares, n_components)))
        # Their signs are arbitrary: one seed is one chain if these are not left to rounding.
        largest = np.abs(vectors).argmax(axis=0)
        vectors = vectors * np.sign(vectors[largest, np.arange(count)])
        found.vectors[:rank] = vectors[:, :rank].T
        found.weights[:rank] = eigenvalues[:rank] / eigenvalues[:rank].sum()
        found.thresholds[: rank - 1] = np.cumsum(found.weights[: rank - 1])
        return found

    def _no_components(self, n):
        capacity = self.n_scalings
        return Eigenfunctions(
            vectors=np.zeros((capacity, n)),
            weights=np.zeros(capacity),
            thresholds=np.full(capacity, np.inf),
            used=np.full(2, np.nan),
        )

    def _move_sizes(self, points):
        proposal = self.proposal(compiled=False)
        found = [directions(proposal, np.ascontiguousarray(u)) for u in points.T]
        return np.sum(np.mean(np.square(found), axis=0), axis=1) / self.dim

    def statistics(self):  # noqa: D102
        found = self.eigenfunctions
        component, component_scaling = found.used.tolist()
        found.used[:] = np.nan
        return super().statistics() | {
            "scaling": math.exp(found.weights @ self.scaling.log),
            "component": component,
            "component_scaling": component_scaling,
            "rank": float(np.count_nonzero(found.weights)),
        }


def _checked_components(n_components, n_subsample):
    if isinstance(n_components, float):
        if checked_share("n_components", n_components) == 0:
            raise ValueError(
                "n_components=0.0: take a share in (0, 1] of the spectrum, or a whole number."
            )
        return n_components
    n_components = checked_integer("n_components", n_components, 1)
    if n_components > n_subsample:
        raise ValueError(
            f"n_components={n_components} with n_subsample={n_subsample}: there are no more "
            f"eigenfunctions than points; take at most {n_subsample} components."
        )
    return n_components
