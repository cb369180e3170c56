"""Precision matrices: square roots, products and conditionals against whole matrices."""

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import LinAlgError
from scipy.sparse import random_array

from pymc_kameleon.latent_gp.gaussian import sparse_cholesky
from pymc_kameleon.latent_gp.gaussian.blocks import Blocks
from pymc_kameleon.latent_gp.gaussian.sites import Sites
from pymc_kameleon.latent_gp.gaussian.sparse_cholesky import (
    Pattern,
    SparseRoot,
    UpdatedRoot,
    WholeRoot,
    covariance_times,
)
from pymc_kameleon.latent_gp.reader import affine_graph, precision_prior
from pymc_kameleon.latent_gp.reader.affine_graph import grouped, matrix_of
from pymc_kameleon.latent_gp.reader.density_prior import Density
from pymc_kameleon.latent_gp.reader.precision_prior import (
    PrecisionAt,
    PrecisionConditional,
    Products,
)


def lattice(side):
    """Precision of areas on a map, each with up to four neighbours."""
    number = np.arange(side**2).reshape(side, side)
    matrix = np.zeros((side**2, side**2))
    for first, second in ((number[:, 1:], number[:, :-1]), (number[1:], number[:-1])):
        matrix[first, second] = matrix[second, first] = -1.0
    return matrix + np.diag(0.1 - matrix.sum(axis=1))


def pattern_and_entries(matrix):
    rows, columns = np.nonzero(np.tril(matrix))
    return Pattern(rows, columns, len(matrix)), matrix[rows, columns]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "tail"), [(SparseRoot, 0), (SparseRoot, 12), (WholeRoot, 0), (UpdatedRoot, 12)]
)
def test_roots(kind, tail, monkeypatch):
    monkeypatch.setattr(sparse_cholesky, "FULL", 0.0 if kind is WholeRoot else 0.9)
    monkeypatch.setattr(sparse_cholesky, "LEAST_TAIL", tail or 1000)
    matrix, rng = lattice(6), np.random.default_rng(0)
    pattern, entries = pattern_and_entries(matrix)
    root = pattern.root(entries)
    if kind is UpdatedRoot:
        rows, weights = rng.standard_normal((2, 36)), np.array([30.0, -0.01])
        root, matrix = UpdatedRoot(root, rows, weights), matrix + rows.T * weights @ rows
    assert isinstance(root, kind)
    if kind is SparseRoot:
        assert (root._tail.size > 0) == (tail > 0)
    x, y = rng.standard_normal((2, 36))
    close(2.0 * root.half_log_determinant, np.linalg.slogdet(matrix)[1])
    close(covariance_times(root, x), np.linalg.solve(matrix, x))
    close(root.transpose_times(x) @ root.transpose_times(y), x @ matrix @ y)
    close(root.solved(x[None])[0] @ root.transpose_times(y), x @ y)
    for many in (root.drawn, root.solved):
        close(many(np.stack([x, y]))[1], many(y[None])[0])


@pytest.mark.parametrize(("full", "tail"), [(0.0, 1000), (0.9, 1000), (0.9, 5)])
def test_what_is_not_positive_definite_is_refused(full, tail, monkeypatch):
    monkeypatch.setattr(sparse_cholesky, "FULL", full)
    monkeypatch.setattr(sparse_cholesky, "LEAST_TAIL", tail)
    pattern, entries = pattern_and_entries(lattice(5))
    with pytest.raises(LinAlgError):
        pattern.root(-entries)
    with pytest.raises(LinAlgError):
        pattern.root(np.full(entries.size, np.nan))
    with pytest.raises(LinAlgError):
        UpdatedRoot(pattern.root(entries), np.ones((1, 25)), np.array([-10.0]))


def test_a_factor_of_neighbours_stays_sparse():
    """Of a chain it has two entries a row; of a map far fewer than half of them."""
    n = 2000
    rows = np.concatenate([np.arange(n), np.arange(1, n)])
    columns = np.concatenate([np.arange(n), np.arange(n - 1)])
    root = Pattern(rows, columns, n).root(np.repeat([2.1, -1.0], [n, n - 1]))
    assert isinstance(root, SparseRoot)
    assert root._lower[1].size == 2 * n - 1
    pattern, _ = pattern_and_entries(lattice(20))
    assert pattern._lower[1].size < 0.08 * 400**2 / 2


def test_crossed_factors_leave_a_whole_matrix_of_the_smaller_one():
    first, second = np.repeat(np.arange(300), 8), np.random.default_rng(4).integers(90, size=2400)
    matrix = np.diag(np.full(390, 20.0))
    matrix[300 + second, first] = matrix[first, 300 + second] = 0.7
    pattern, entries = pattern_and_entries(matrix)
    root = pattern.root(entries)
    assert 50 <= len(root._tail) < 150
    x = np.random.default_rng(5).standard_normal(390)
    close(covariance_times(root, x), np.linalg.solve(matrix, x))


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_matrix_is_found_from_random_groups_of_its_columns(is_dense, monkeypatch):
    """And, where a row has an entry in each column, from them one by one."""
    monkeypatch.setattr(affine_graph, "MANY", 100)
    matrix = random_array((300, 400), density=0.01, rng=1, format="csr").toarray()
    matrix[:, 7] = 1.0  # an intercept
    if is_dense:
        matrix[3] = 1.0
    calls = []

    def affine(x):
        calls.append(1)
        return 3.0 + matrix @ x

    found = matrix_of(affine, 400)
    # Differences of numbers near 3.
    np.testing.assert_allclose(found.toarray(), matrix, atol=1e-12)
    assert found.nnz == np.count_nonzero(matrix)
    assert (len(calls) > 3 * 64 * affine_graph.ROUNDS) == is_dense
    groups = grouped(found)
    for k in range(groups.n_groups):
        assert np.count_nonzero(matrix[:, groups.of_column == k], axis=1).max() <= 1


@pytest.mark.parametrize("full", [0.0, 0.9])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_conditional_gaussian(full, in_blocks, monkeypatch):
    """Of areas and a coefficient, with a penalised sum, given sites; by entries and as a whole."""
    monkeypatch.setattr(sparse_cholesky, "FULL", full)
    monkeypatch.setattr(precision_prior, "COST", 0 if full else 1e9)
    rng, side = np.random.default_rng(2), 5
    n, size = side**2, side**2 + 1
    prior = np.zeros((size, size))
    prior[:n, :n], prior[n, n] = lattice(side), 0.3
    pattern, entries = pattern_and_entries(prior)
    rows, weights = np.r_[np.ones(n), 0.0][None], np.array([2.0])
    precision, slope = prior + rows.T * weights @ rows, rng.standard_normal(size)
    design = np.column_stack([0.7 * np.eye(n), rng.standard_normal(n)])
    blocks = Blocks.of(np.arange(n) // 2, np.arange(n) % 2) if in_blocks else None
    together = blocks.together if in_blocks else np.zeros((0, 2), dtype=int)
    a_rows, a_columns = np.nonzero(design)
    products = Products(a_rows, a_columns, design.shape, together, (pattern.rows, pattern.columns))
    density = Density(pattern, entries, rows, weights, slope, 0.4)
    at = PrecisionAt(density, products, design[a_rows, a_columns])
    matrix, shift = np.diag(rng.gamma(2.0, size=n)), rng.standard_normal(n)
    sites = Sites(np.diagonal(matrix).copy(), shift)
    if in_blocks:
        sizes = np.sum(blocks.members >= 0, axis=1)
        own = rng.standard_normal((len(sizes), 2, 2))
        own = own @ own.transpose(0, 2, 1)
        own[sizes < 2, 1] = own[sizes < 2, :, 1] = 0.0
        for members, block, k in zip(blocks.members, own, sizes, strict=True):
            matrix[np.ix_(members[:k], members[:k])] = block[:k, :k]
        sites = blocks.unpacked(blocks.packed(own, shift))
    found = PrecisionConditional(at, sites)

    covariance = np.linalg.inv(precision)
    gaussian = stats.multivariate_normal(covariance @ slope, covariance)
    x = rng.standard_normal(size)
    value = 0.4 + slope @ x - 0.5 * x @ precision @ x
    close(value, gaussian.logpdf(x) + at.log_integral)
    of_both = np.linalg.inv(precision + design.T @ matrix @ design)
    own = stats.multivariate_normal(of_both @ (slope + design.T @ shift), of_both)
    close(found.mean, own.mean)
    close(found.log_ratio(x), gaussian.logpdf(x) - own.logpdf(x))
    close(found.predictors(x), design @ x)
    eta = found.to_eta(x, rng)
    close(found.from_eta(eta), x)
    images = found.images(np.eye(size)[None]).T
    close(images @ images.T, design @ of_both @ design.T)
    close(found.adjoint(shift)[0], images.T @ shift)
    close(found.draws(eta[None])[0], x)
    assert np.all(at.variances <= np.diagonal(design @ covariance @ design.T) + 1e-12)
