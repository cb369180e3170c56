"""Terms of a log-likelihood: what each depends on, against what changes when a variable does."""

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.ops import wrap_py
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from pymc_kameleon import EvaluationStore, black_box
from pymc_kameleon.model.likelihood_terms import find_terms
from pymc_kameleon.model.log_density import likelihood_terms

G = 4
Y = np.random.default_rng(0).normal(size=(G, 3))
GROUPS = np.array([0, 0, 1, 2, 2, 2, 3, 1])
X = np.array([-1.0, 0.5, 0.5, 2.0, -0.3, 1.0, 0.7, 0.1])


def of_theta(theta):
    theta = np.ravel(theta)
    return float(np.sum(np.sin(theta * np.arange(1.0, 1.0 + len(theta)) + theta[0])))


def of_data(theta, y, scale=1.0):
    return of_theta(theta) - 0.5 * float(np.sum((y - np.ravel(theta)[0]) ** 2)) / scale**2


def curve(theta):
    return np.ravel(theta)[0] + np.sum(theta) * np.arange(3.0)


each_number = black_box(of_theta, each="theta", shape=())
each_data = black_box(of_data, each=["theta", "y"], shape=())
each_curve = black_box(curve, each="theta", shape=3)
number = black_box(of_theta, shape=())
one_curve = black_box(curve, shape=3)


class Rows(Op):
    """A log-likelihood of each row of data, as packages for choices and times have; `lag` of it."""

    __props__ = ("lag",)

    def __init__(self, lag=0):
        self.lag = lag

    def make_node(self, *inputs):
        return Apply(self, [pt.as_tensor(x) for x in inputs], [pt.vector()])

    def perform(self, node, inputs, outputs):
        data, *parameters = inputs
        value = np.zeros(len(data))
        for i, x in enumerate(parameters):
            value += np.cos(data[:, 0] * (i + 1) + x)
        outputs[0][0] = value + (np.roll(value, self.lag) if self.lag else 0.0)


@wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
def old_op(theta):
    return np.array(of_theta(theta))


def hierarchy(k=3, is_centred=True):
    mu, sd = pm.Normal("mu", 0.0, 1.0, shape=k), pm.HalfNormal("sd", 1.0, shape=k)
    if is_centred:
        return pm.Normal("theta", mu, sd, shape=(G, k))
    return pm.Deterministic("theta", mu + sd * pm.Normal("z", 0.0, 1.0, shape=(G, k)))


def centred():
    pm.Potential("l", each_data(hierarchy(), Y, pm.HalfNormal("s")))


def non_centred():
    pm.Potential("l", each_data(hierarchy(is_centred=False), Y, pm.HalfNormal("s")))


def in_a_loop():
    theta = hierarchy(is_centred=False)
    for g in range(G):
        pm.Potential(f"l{g}", number(theta[g]))


def sum_of_a_loop():
    theta = hierarchy()
    pm.Potential("l", sum(number(theta[g]) for g in range(G)) * 2.0 / 3.0)


def summed():
    pm.Potential("l", 3.0 - each_number(hierarchy()).sum() / 2.0)


def curves():
    pm.Normal("y", each_curve(hierarchy()), pm.HalfNormal("s"), observed=Y)


def curves_with_own_scale():
    s = pm.HalfNormal("s", 1.0, shape=G)
    pm.Normal("y", each_curve(hierarchy()), s[:, None], observed=Y)


def failing_curves():
    box = black_box(curve, each="theta", shape=3, failures=ArithmeticError)
    pm.StudentT("y", nu=4.0, mu=box(hierarchy()), sigma=pm.HalfNormal("s"), observed=Y)


def by_data():
    index = pm.Data("index", np.array([2, 0, 1]))
    pm.Potential("l", each_number(hierarchy()[index]))


def one_hot():
    design = np.zeros((8, G + 1))
    design[np.arange(8), GROUPS] = 1.0
    design[:, G] = X
    beta = pm.Normal("beta", 0.0, 1.0, shape=G + 1)
    pm.Potential("l", each_number(pt.dot(design, beta)[:, None]))


def one_hot_groups():
    beta = pm.Normal("beta", 0.0, 1.0, shape=(G, 2))
    pm.Potential("l", each_number(pt.dot(np.eye(G)[GROUPS], beta) + pm.Normal("b")))


def two_potentials():
    theta = hierarchy()
    pm.Potential("a", each_number(theta))
    pm.Potential("b", each_number(pt.exp(theta) + 1.0))


def one_of_all():
    pm.Potential("l", number(hierarchy()))


def shared_only():
    pm.Potential("l", each_data(pt.zeros((G, 2)) + pm.Normal("m"), Y))


def beside_others():
    theta = hierarchy(k=1)
    pm.Normal("y", theta[:, 0], 1.0, observed=X[:G])
    pm.Potential("l", each_number(theta))


def log_normal():
    pm.Potential("l", each_number(pm.LogNormal("t", 0.0, 1.0, shape=(G, 2))))


def beta():
    share = pm.Beta("t", 2.0, 2.0, shape=G)
    pm.Potential("l", each_number(pt.stack([share, 1.0 - share], axis=1)))


def dirichlet():
    pm.Potential("l", each_number(pm.Dirichlet("t", np.ones(3), shape=(G, 3))))


def ordered():
    order = pm.distributions.transforms.ordered
    start = np.tile([-1.0, 0.0, 1.0], (G, 1))
    t = pm.Normal("t", 0.0, 1.0, shape=(G, 3), transform=order, initval=start)
    pm.Potential("l", each_number(t))


def missing():
    y = Y.copy()
    y[1, 2] = np.nan
    pm.Normal("y", each_curve(hierarchy()), 1.0, observed=y)


def masked_rows():
    theta = hierarchy()
    kept = theta[np.array([True, False, True, True])]
    pm.Potential("l", pt.set_subtensor(pt.zeros(G)[1:], each_number(kept)))


def rows():
    theta = hierarchy(k=2, is_centred=False)
    pm.Potential("l", Rows()(X[:, None], theta[GROUPS, 0], pm.Normal("b")))


def rows_with_slopes():
    theta = hierarchy(k=2, is_centred=False)
    pm.Potential("l", Rows()(X[:, None], theta[GROUPS, 0] + theta[GROUPS, 1] * X))


def rows_that_are_none():
    theta = hierarchy(k=2)
    pm.Potential("l", Rows(lag=1)(X[:, None], theta[GROUPS, 0]))
    pm.Potential("other", number(theta[0]))


def of_old_op():
    theta = hierarchy()
    pm.Potential("l", pt.stack([old_op(theta[g]) for g in range(G)]))


def stored():
    theta = hierarchy()
    box = black_box(of_theta, store=EvaluationStore())
    pm.Potential("l", pt.stack([box(theta[g]) for g in range(G)]))


def two_stages():
    inner = each_curve(hierarchy())
    pm.Potential("l", each_number(pt.exp(-(inner**2))))


def curves_by_trial():
    found = one_curve(pm.Normal("m", 0.0, 1.0, shape=2))
    theta = pm.Normal("theta", 0.0, 1.0, shape=G)
    pm.Normal("y", found[GROUPS % 3], 1.0, observed=X)
    pm.Potential("l", each_number(theta[:, None]))


def one_curve_for_two():
    found = each_curve(hierarchy())
    pm.Normal("a", found[:, 0], 1.0, observed=X[:G])
    pm.Normal("b", found[:, 1:], pm.HalfNormal("s"), observed=Y[:, 1:])


def scales_by_trial():
    theta = hierarchy(k=2, is_centred=False)
    a, b = pm.Normal("a"), pm.Normal("b")
    scale = pt.exp(a + b * X)
    pm.Normal("y", each_curve(theta)[GROUPS, 0], scale, observed=X)


def half_black():
    theta = hierarchy(k=1)
    parts = [each_number(theta), -(theta[:2, 0] ** 2), pt.zeros(1)]
    pm.Potential("l", pt.concatenate(parts))


def switched():
    theta = hierarchy(k=2)
    first = pt.switch(np.arange(G)[:, None] < 2, theta, pm.Normal("other", shape=(G, 2)))
    pm.Potential("l", each_number(first))


def batched():
    mix = pt.matmul(pm.Normal("w", 0.0, 1.0, shape=(G, 2, 2)), np.ones((2, 2)))
    pm.Potential("l", each_number(mix))


def cholesky():
    w = pm.Normal("w", 0.0, 1.0, shape=(G, 2))
    matrix = w[:, :, None] * w[:, None, :] + np.eye(2)
    pm.Potential("l", each_number(pt.linalg.cholesky(matrix)))


def einsum():
    w, b = pm.Normal("w", 0.0, 1.0, shape=(G, 2, 3)), pm.Normal("b", 0.0, 1.0, shape=3)
    pm.Potential("l", each_number(pt.einsum("gij,j->gi", w, b)))


def mixture():
    mu = each_number(hierarchy(k=1))
    parts = [pm.Normal.dist(mu, 1.0), pm.Normal.dist(mu + 1.0, 2.0)]
    pm.Mixture("y", pm.Dirichlet("w", np.ones(2)), parts, observed=X[:G])


def multinomial():
    box = black_box(lambda theta: np.exp(theta) / np.exp(theta).sum(), each="theta", shape=3)
    counts = [[1, 2, 2], [5, 0, 0], [1, 1, 3], [2, 2, 1]]
    pm.Multinomial("y", n=5, p=box(hierarchy()), observed=counts)


def custom():
    def logp(value, theta):
        return each_data(theta, value[:, None])

    pm.CustomDist("y", hierarchy(k=2), logp=logp, observed=Y[:, 0], signature="(k)->()")


def zero_sum():
    z = pm.ZeroSumNormal("z", 1.0, shape=(G, 3), n_zerosum_axes=1)
    pm.Potential("l", each_number(z))


def correlated():
    chol, _, _ = pm.LKJCholeskyCov("c", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0))
    pm.Potential("l", each_number(pt.dot(chol, pm.Normal("z", 0.0, 1.0, shape=(G, 2)).T).T))


def loop_inside():
    twice = pytensor.scan(lambda row: 2.0 * row, sequences=[hierarchy(k=2)], return_updates=False)
    pm.Potential("l", each_number(twice))


MODELS = [
    (centred, [4] * G, ["l[0]", "l[1]", "l[2]", "l[3]"]),
    (non_centred, [4] * G, ["l[0]", "l[1]", "l[2]", "l[3]"]),
    (in_a_loop, [3] * G, ["l0", "l1", "l2", "l3"]),
    (sum_of_a_loop, [3] * G, None),
    (summed, [3] * G, ["l[0]", "l[1]", "l[2]", "l[3]"]),
    (curves, [4] * G, ["y[0]", "y[1]", "y[2]", "y[3]"]),
    (curves_with_own_scale, [4] * G, ["y[0]", "y[1]", "y[2]", "y[3]"]),
    (failing_curves, [4] * G, [f"y[{g}], curve_ran[{g}]" for g in range(G)]),
    (by_data, [3] * 3, ["l[0]", "l[1]", "l[2]"]),
    (one_hot, [2, 2, 2, 1], None),
    (one_hot_groups, [2] * G, ["l[0]", "l[2]", "l[3]", "l[6]"]),
    (two_potentials, [3] * G, [f"a[{g}], b[{g}]" for g in range(G)]),
    (one_of_all, None, None),
    (shared_only, None, None),
    (beside_others, [1] * G, None),
    (log_normal, [2] * G, None),
    (beta, [1] * G, None),
    (dirichlet, [2] * G, None),
    (ordered, [3] * G, None),
    (missing, [3] * G, None),
    (masked_rows, [3] * 3, None),
    (rows, [2] * G, ["l[0]", "l[2]", "l[3]", "l[6]"]),
    (rows_with_slopes, [2, 2, 2, 1], None),
    (rows_that_are_none, [4, 2], ["l", "other"]),
    (of_old_op, [3] * G, None),
    (stored, [3] * G, None),
    (two_stages, [3] * G, None),
    (curves_by_trial, [2] + [1] * G, ["y", "l[0]", "l[1]", "l[2]", "l[3]"]),
    (one_curve_for_two, [4] * G, [f"a[{g}], b[{g}]" for g in range(G)]),
    (scales_by_trial, [4, 4, 4, 3], None),
    (half_black, [1] * G, None),
    (switched, [2] * G, None),
    (batched, [2] * G, None),
    (cholesky, [2] * G, None),
    (einsum, [2] * G, None),
    (mixture, [2] * G, None),
    (multinomial, [3] * G, None),
    (custom, [2] * G, None),
    (zero_sum, [2] * G, None),
    (correlated, [2] * G, None),
    (loop_inside, [2] * G, None),
]


def check(model, seed, vars=None):
    """Return the terms of a model, after a look at what changes with each of its variables."""
    likelihood, point = likelihood_terms(model), model.initial_point()
    sampled = [v for v in model.value_vars if vars is None or v.name in vars]
    found = find_terms(likelihood, sampled, point)
    if found is None:
        return None
    total = sum(pt.sum(graph) for _, graph in likelihood)
    evaluate = pytensor.function(
        model.value_vars,
        [found.values, found.inputs, found.exact, total],
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )
    rng = np.random.default_rng(seed)
    point = {v.name: point[v.name] + 0.3 * rng.normal(size=v.type.shape) for v in model.value_vars}
    before = evaluate(*point.values())
    for variable in sampled:
        for i in range(point[variable.name].size):
            changed = {name: np.array(value) for name, value in point.items()}
            changed[variable.name].flat[i] += 0.1
            after = evaluate(*changed.values())
            np.testing.assert_allclose(after[0].sum() + after[2], after[3], rtol=1e-12)
            is_input_changed = before[1] != after[1]
            for t in np.flatnonzero(~np.isclose(before[0], after[0], rtol=1e-13)):
                assert np.any(is_input_changed[found.members[t]]), (found.names[t], variable, i)
    assert len(found.names) == len(found.members) == len(before[0])
    assert all(members.dtype == np.int64 for members in found.members)
    np.testing.assert_array_equal(
        np.unique(np.concatenate(found.members)), np.arange(len(before[1]))
    )
    return found


@pytest.mark.parametrize(
    ("build", "sizes", "names"), MODELS, ids=lambda x: getattr(x, "__name__", "")
)
def test_terms_depend_on_what_they_say(build, sizes, names):
    with pm.Model() as model:
        build()
    found = check(model, 1)
    assert (None if found is None else [len(m) for m in found.members]) == sizes
    if names is not None:
        assert found.names == names


def test_what_other_steps_move_is_no_input():
    with pm.Model() as model:
        centred()
    found = check(model, 1, ["theta"])
    assert [len(members) for members in found.members] == [3] * G


def test_rows_that_other_steps_choose_may_be_any():
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=(G, 3))
        chosen = pm.Categorical("chosen", np.ones(2) / 2)
        pm.Potential("a", number(theta[chosen]))
        pm.Potential("b", number(theta[0]))
    assert find_terms(likelihood_terms(model), [theta], model.initial_point()) is None


def test_without_a_black_box_there_are_no_terms():
    with pm.Model() as model:
        pm.Normal("y", hierarchy(), 1.0, observed=Y)
    assert check(model, 1) is None


def test_terms_of_compiled_functions_are_compiled():
    box = black_box(numba.njit(lambda theta: np.sum(np.sin(theta))))
    with pm.Model() as model:
        theta = hierarchy()
        for g in range(G):
            pm.Potential(f"l{g}", box(theta[g]))
        pm.Normal("y", theta[:, 0], 1.0, observed=X[:G])
    found = find_terms(likelihood_terms(model), model.value_vars, model.initial_point())
    graphs = [found.values, found.inputs, found.exact]
    point = model.initial_point()
    compiled, plain = (
        pytensor.function(model.value_vars, graphs, mode=mode, on_unused_input="ignore")(
            *(point[v.name] + 0.1 for v in model.value_vars)
        )
        for mode in ("NUMBA", "FAST_COMPILE")
    )
    for one, other in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def changed(x, n, k, rng):
    """Return a random operation on `x` (n, k), with its shape."""
    some, any_rows = rng.integers(0, n, size=2), rng.integers(0, n, size=rng.integers(2, n + 3))
    columns, mask = rng.integers(0, k, size=rng.integers(1, 4)), rng.random(n) < 0.6
    mask[:2] = True
    hot = np.eye(n)[any_rows]
    half = rng.random((n, k)) < 0.5
    changes = [
        lambda: (x[1:] if n > 2 else x[::-1], max(n - 1, 2), k),
        lambda: (x[:, ::-1], n, k),
        lambda: (x[any_rows], len(any_rows), k),
        lambda: (x[:, columns], n, len(columns)),
        lambda: (x[any_rows, rng.integers(0, k, size=len(any_rows))][:, None], len(any_rows), 1),
        lambda: (x[mask], mask.sum(), k),
        lambda: (x.T, k, n) if k > 1 else (x, n, k),
        lambda: (x.reshape((n * k, 1)), n * k, 1),
        lambda: (pt.stack([x, 2.0 * x[::-1]], axis=1).reshape((2 * n, k)), 2 * n, k),
        lambda: (pt.concatenate([x, pt.exp(-(x[:1] ** 2))], axis=0), n + 1, k),
        lambda: (pt.where(half, x, x[::-1]), n, k),
        lambda: (pt.tanh(x + x[rng.permutation(n)]), n, k),
        lambda: (pt.tanh(x * x[:1]), n, k),
        lambda: (pt.set_subtensor(x[some[0]], x[some[1]]), n, k),
        lambda: (pt.inc_subtensor(x[some[0]], x[some[1]]), n, k),
        lambda: (x.sum(axis=1, keepdims=True), n, 1),
        lambda: (pt.cumsum(x, axis=0), n, k),
        lambda: (pt.special.softmax(x, axis=1), n, k) if k > 1 else (x, n, k),
        lambda: (pt.dot(hot, x), len(any_rows), k),
        lambda: (pt.repeat(x, 2, axis=0), 2 * n, k),
    ]
    return changes[rng.integers(len(changes))]()


def test_random_graphs():
    n_found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        with pm.Model() as model:
            x, n, k = pm.Normal("theta", 0.0, 1.0, shape=(5, 2)), 5, 2
            for _ in range(rng.integers(2, 6)):
                x, n, k = changed(x, n, k, rng)
            pm.Potential("l", each_number(x))
        n_found += check(model, seed) is not None
    assert n_found > 12
