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

G, CALLS = 4, []
Y = np.random.default_rng(0).normal(size=(G, 3))
GROUPS = np.array([0, 0, 1, 2, 2, 2, 3, 1])
X = np.array([-1.0, 0.5, 0.5, 2.0, -0.3, 1.0, 0.7, 0.1])


def of_theta(theta):
    CALLS.append(theta)
    theta = np.ravel(theta)
    return float(np.sum(np.sin(theta * np.arange(1.0, 1.0 + len(theta)) + theta[0])))


def of_data(theta, y, scale=1.0):
    return of_theta(theta) - 0.5 * float(np.sum((y - np.ravel(theta)[0]) ** 2)) / scale**2


def curve(theta):
    return np.ravel(theta)[0] + np.sum(theta) * np.arange(3.0)


each_number = black_box(of_theta, each="theta", shape=())
each_data = black_box(of_data, each=["theta", "y"], shape=())
each_curve = black_box(curve, each="theta", shape=3)
failing_curve = black_box(curve, each="theta", shape=3, failures=ArithmeticError)
number = black_box(of_theta, shape=())
stored = black_box(of_theta, store=EvaluationStore())
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
        value[self.lag :] += value[: len(value) - self.lag] if self.lag else 0.0
        outputs[0][0] = value


@wrap_py(itypes=[pt.dvector], otypes=[pt.dscalar])
def old_op(theta):
    return np.array(of_theta(theta))


def normal(name, *shape):
    return pm.Normal(name, 0.0, 1.0, shape=shape)


def hierarchy(k=3, is_centred=True):
    mu, sd = normal("mu", k), pm.HalfNormal("sd", 1.0, shape=k)
    if is_centred:
        return pm.Normal("theta", mu, sd, shape=(G, k))
    return pm.Deterministic("theta", mu + sd * normal("z", G, k))


def potential(*logp):
    for name, value in zip("lk", logp, strict=False):
        pm.Potential(name, value)


def of_each(box):
    theta = hierarchy()
    return [box(theta[g]) for g in range(G)]


def one_hot():
    design = np.column_stack([np.eye(G)[GROUPS], X])
    potential(each_number(pt.dot(design, normal("beta", G + 1))[:, None]))


def same_theta():
    theta = hierarchy()
    potential(each_number(theta), each_number(pt.exp(theta) + 1.0))


def beside_others():
    theta = hierarchy(k=1)
    pm.Normal("y", theta[:, 0], 1.0, observed=X[:G])
    potential(each_number(theta))


def set_numbers():
    potential(pt.set_subtensor(pt.zeros(G)[1:], each_number(hierarchy()[1:])))


def rows():
    theta = hierarchy(k=2, is_centred=False)
    potential(Rows()(X[:, None], theta[GROUPS, 0], pm.Normal("b")))


def rows_with_slopes():
    theta = hierarchy(k=2, is_centred=False)
    potential(Rows()(X[:, None], theta[GROUPS, 0] + theta[GROUPS, 1] * X))


def row_before():
    theta = hierarchy(k=2)
    potential(Rows(1)(X[:2, None], theta[:2, 0]), number(theta[0]))


def curves_by_trial():
    found, theta = one_curve(normal("m", 2)), normal("theta", G)
    pm.Normal("y", found[GROUPS % 3], 1.0, observed=X)
    potential(each_number(theta[:, None]))


def one_curve_for_two():
    found = each_curve(hierarchy())
    pm.Normal("a", found[:, 0], 1.0, observed=X[:G])
    pm.Normal("b", found[:, 1:], pm.HalfNormal("s"), observed=Y[:, 1:])


def scales_by_trial():
    theta, scale = hierarchy(k=2, is_centred=False), pt.exp(pm.Normal("a") + pm.Normal("b") * X)
    pm.Normal("y", each_curve(theta)[GROUPS, 0], scale, observed=X)


def half_black():
    theta = hierarchy(k=1)
    potential(pt.concatenate([each_number(theta), -(theta[:2, 0] ** 2), pt.zeros(1)]))


def batches():
    w = normal("w", G, 2)
    matrix = w[:, :, None] * w[:, None, :] + np.eye(2)
    potential(each_number(pt.linalg.cholesky(matrix)))


def mixture():
    mu = each_number(hierarchy(k=1))
    parts = [pm.Normal.dist(mu, 1.0), pm.Normal.dist(mu + 1.0, 2.0)]
    pm.Mixture("y", pm.Dirichlet("w", np.ones(2)), parts, observed=X[:G])


def multinomial():
    box = black_box(lambda theta: np.exp(theta) / np.exp(theta).sum(), each="theta", shape=3)
    counts = [[1, 2, 2], [5, 0, 0], [1, 1, 3], [2, 2, 1]]
    pm.Multinomial("y", n=5, p=box(hierarchy()), observed=counts)


def curves(box):
    pm.Normal("y", box(hierarchy()), pm.HalfNormal("s"), observed=Y)


def each_of(theta):
    potential(each_number(theta))


FOUR, CURVES = [f"l[{g}]" for g in range(G)], [f"y[{g}]" for g in range(G)]
BY_TRIAL = ["l[0]", "l[2]", "l[3]", "l[6]"]
FAILING = [f"y[{g}], curve_ran[{g}]" for g in range(G)]
ONES = np.ones((2, 2))
MODELS = {
    "centred": (lambda: potential(each_data(hierarchy(), Y, pm.HalfNormal("s"))), [4] * G, FOUR),
    "non-centred": (lambda: each_of(hierarchy(is_centred=False) + normal("b")), [3] * G, FOUR),
    "sum of a loop": (lambda: potential(sum(of_each(number)) * 2.0 / 3.0), [3] * G, None),
    "sum": (lambda: potential(3.0 - each_number(hierarchy()).sum() / 2.0), [3] * G, FOUR),
    "repeated": (lambda: potential(each_number(hierarchy()) + pt.zeros((2, 1))), [3] * G, FOUR),
    "quotient": (lambda: potential(1.0 / (9.0 + each_number(hierarchy()))), [3] * G, FOUR),
    "set": (set_numbers, [3] * 3, ["l[0]", "l[2]", "l[3]"]),
    "increased": (lambda: each_of(pt.inc_subtensor((x := hierarchy())[0], x[1])), [3] * G, FOUR),
    "curves": (lambda: curves(each_curve), [4] * G, CURVES),
    "failures": (lambda: curves(failing_curve), [4] * G, FAILING),
    "index": (lambda: each_of(hierarchy()[pm.Data("i", [2, 0, 1])]), [3] * 3, FOUR[:3]),
    "one-hot": (one_hot, [2, 2, 2, 1], None),
    "groups": (lambda: each_of(pt.dot(np.eye(G)[GROUPS], normal("b", G, 2))), [2] * G, BY_TRIAL),
    "same theta": (same_theta, [3] * G, [f"l[{g}], k[{g}]" for g in range(G)]),
    "all": (lambda: potential(number(hierarchy())), None, None),
    "no black box": (lambda: pm.Normal("y", hierarchy(), 1.0, observed=Y), None, None),
    "beside others": (beside_others, [1] * G, FOUR),
    "simplex": (lambda: each_of(pm.Dirichlet("t", np.ones(3), shape=(G, 3))), [2] * G, FOUR),
    "zero sum": (lambda: each_of(pm.ZeroSumNormal("z", 1.0, shape=(G, 3))), [2] * G, FOUR),
    "rows": (rows, [2] * G, BY_TRIAL),
    "slopes": (rows_with_slopes, [2, 2, 2, 1], None),
    "the row before": (row_before, [2, 2], ["l", "k"]),
    "old operation": (lambda: potential(pt.stack(of_each(old_op))), [3] * G, FOUR),
    "stored": (lambda: potential(pt.stack(of_each(stored))), [3] * G, FOUR),
    "two stages": (lambda: each_of(pt.exp(-(each_curve(hierarchy()) ** 2))), [3] * G, FOUR),
    "curve by trial": (curves_by_trial, [2] + [1] * G, ["y", *FOUR]),
    "one curve for two": (one_curve_for_two, [4] * G, [f"a[{g}], b[{g}]" for g in range(G)]),
    "scale by trial": (scales_by_trial, [4, 4, 4, 3], None),
    "half": (half_black, [1] * G, None),
    "product": (lambda: each_of(pt.matmul(normal("w", G, 2, 2), ONES)), [2] * G, FOUR),
    "batches": (batches, [2] * G, FOUR),
    "mixture": (mixture, [2] * G, CURVES),
    "multinomial": (multinomial, [3] * G, CURVES),
}


def check(model, seed, vars=None):
    """Return the terms of a model, after a look at what changes with each of its variables."""
    likelihood, point = likelihood_terms(model), model.initial_point()
    sampled = [v for v in model.value_vars if vars is None or v.name in vars]
    n_calls = len(CALLS)
    found = find_terms(likelihood, sampled, point)
    assert len(CALLS) == n_calls
    if found is None:
        return None
    total = sum(pt.sum(graph) for _, graph in likelihood)
    outputs = [found.values, found.inputs, found.exact, total]
    options = {"mode": "FAST_COMPILE", "on_unused_input": "ignore"}
    evaluate = pytensor.function(model.value_vars, outputs, **options)
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
    assert set(np.concatenate(found.members)) == set(range(found.n_inputs))
    assert found.n_inputs == len(before[1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_terms_depend_on_what_they_say(name):
    build, sizes, names = MODELS[name]
    with pm.Model() as model:
        build()
    found = check(model, 1)
    assert (None if found is None else [len(members) for members in found.members]) == sizes
    assert names is None or found.names == names


def test_what_other_steps_move_is_no_input():
    with pm.Model() as model:
        each_of(pt.concatenate([hierarchy(), normal("b", G, 1)], axis=1))
    found = check(model, 1, ["theta"])
    assert [len(members) for members in found.members] == [3] * G


def test_rows_that_other_steps_choose_may_be_any():
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=(G, 3))
        chosen = pm.Categorical("chosen", np.ones(2) / 2)
        pm.Potential("a", number(theta[chosen]))
        pm.Potential("b", number(theta[0]))
    assert find_terms(likelihood_terms(model), [theta], model.initial_point()) is None


def test_terms_of_compiled_functions_are_compiled():
    box = black_box(numba.njit(lambda theta: np.sum(np.sin(theta))))
    with pm.Model() as model:
        theta = hierarchy()
        for g in range(G):
            pm.Potential(f"l{g}", box(theta[g]))
        pm.Normal("y", theta[:, 0], 1.0, observed=X[:G])
    point = model.initial_point()
    found = find_terms(likelihood_terms(model), model.value_vars, point)
    graphs, values = [found.values, found.inputs, found.exact], [x + 0.1 for x in point.values()]
    compiled, plain = (
        pytensor.function(model.value_vars, graphs, mode=mode, on_unused_input="ignore")(*values)
        for mode in ("NUMBA", "FAST_COMPILE")
    )
    for one, other in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def changed(x, n, k, rng):
    """Return a random operation on `x` (n, k), with its shape."""
    some, any_rows = rng.integers(0, n, size=2), rng.integers(0, n, size=rng.integers(2, n + 3))
    columns, mask = rng.integers(0, k, size=rng.integers(1, 4)), rng.random(n) < 0.6
    mask[:2] = True
    hot, half = np.eye(n)[any_rows], rng.random((n, k)) < 0.5
    changes = [
        lambda: (x[1:] if n > 2 else x[::-1], max(n - 1, 2), k),
        lambda: (x[:, ::-1], n, k),
        lambda: (x[any_rows], len(any_rows), k),
        lambda: (x[:, columns], n, len(columns)),
        lambda: (x[any_rows, rng.integers(0, k, size=len(any_rows))][:, None], len(any_rows), 1),
        lambda: (x[mask], mask.sum(), k),
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
