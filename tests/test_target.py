"""The log density of a model over a raveled vector, against PyMC's own."""

import logging

import models
import numba
import numpy as np
import pymc as pm
import pytest
from scipy import optimize, stats

from pymc_kameleon.mcmc.chain import evaluate
from pymc_kameleon.model.log_density import LogDensity, select_variables

MODES = [None, {"mode": "FAST_COMPILE"}]


@pytest.fixture(scope="module", params=MODES, ids=["compiled", "plain"])
def everything(request):
    """The model with every transform, its log density, and PyMC's prior and likelihood."""
    with pytest.warns(match="missing values"):
        model = models.everything()
    target = LogDensity(model, compile_kwargs=request.param)
    pieces = [
        model.compile_fn(
            graph, inputs=model.value_vars, on_unused_input="ignore", mode="FAST_COMPILE"
        )
        for graph in (
            model.logp(vars=model.free_RVs),
            model.logp(vars=[*model.observed_RVs, *model.potentials]),
            model.logp(),
        )
    ]
    return model, target, pieces


def random_points(model, n=10):
    rng = np.random.default_rng(3)
    start = model.initial_point()
    for _ in range(n):
        yield {
            k: (v + 0.5 * rng.normal(size=np.shape(v))).astype(v.dtype) for k, v in start.items()
        }


def ravel(target, point):
    return np.concatenate([np.ravel(point[name]) for name in target.names])


def test_split_agrees_with_the_model(everything):
    model, target, (prior, likelihood, total) = everything
    for point in random_points(model):
        value = target(ravel(target, point))
        assert value.shape == (3,) and value[2] == 0
        np.testing.assert_allclose(value[0], prior(point), rtol=1e-10)
        np.testing.assert_allclose(value[1], likelihood(point), rtol=1e-10)
        np.testing.assert_allclose(value.sum(), total(point), rtol=1e-10)


def test_compiled_form_agrees(everything):
    """What compiled transitions call is what Python calls."""
    model, target, _ = everything
    table = target.function.compiled()
    if table is None:
        assert target._compile_kwargs is not None
        return

    @numba.njit
    def call(table, x, value, counts):
        return evaluate(table, x, value, counts)

    for point in random_points(model, 3):
        x, value, counts = ravel(target, point), np.empty(3), np.zeros(2, dtype=np.int64)
        total = call(table, x, value, counts)
        np.testing.assert_allclose(value, target(x), rtol=1e-12)
        np.testing.assert_allclose(total, value.sum(), rtol=1e-12)
        assert list(counts) == [1, 0]


def test_gradient_against_finite_differences(everything):
    """Compiled, a smaller model does (`test_no_likelihood`)."""
    model, target, _ = everything
    if target.function.compiled() is not None:
        return
    for point in random_points(model, 3):
        x = ravel(target, point)
        value, gradient = target.value_and_gradient(x)
        np.testing.assert_allclose(value, target(x))
        assert gradient.shape == (2, target.dim)
        for term in range(2):
            numeric = optimize.approx_fprime(x, lambda z, t=term: target(z)[t], 1e-7)
            np.testing.assert_allclose(gradient[term], numeric, rtol=1e-4, atol=1e-4)


def test_order_is_the_models(everything):
    model, target, _ = everything
    assert target.names == [v.name for v in model.value_vars]
    assert target.dim == sum(np.size(v) for v in model.initial_point().values())
    shuffled = select_variables(model, list(reversed(model.free_RVs)))
    assert shuffled == list(model.value_vars)
    assert select_variables(model, model.value_vars[2]) == [model.value_vars[2]]


@pytest.mark.parametrize(
    ("build", "own", "other"),
    [(models.correlated_pair, ["c", "a"], "b"), (models.mixed_discrete, ["x"], "count")],
)
def test_some_variables_given_the_others(build, own, other):
    """In the model's order; discrete ones enter as they are."""
    model = build()
    target = LogDensity(model, [model[name] for name in own], compile_kwargs=MODES[1])
    assert target.names == [v.name for v in model.value_vars if v.name != other]
    (shared,) = target.shared.values()
    total = model.compile_logp(mode="FAST_COMPILE")
    rng = np.random.default_rng(0)
    for _ in range(3):
        value = rng.integers(9, size=shared.get_value().shape).astype(shared.dtype)
        shared.set_value(value)
        x = rng.normal(size=target.dim)
        point = dict(zip(target.names, x, strict=True)) | {other: value}
        np.testing.assert_allclose(target(x).sum(), total(point))


def test_inputs_that_changed():
    model = models.correlated_pair()
    target = LogDensity(model, [model["a"]])
    (shared_b, _) = sorted(target.shared.values(), key=lambda s: s.get_value().ndim, reverse=True)
    target.inputs_changed()
    assert not target.inputs_changed()
    shared_b.set_value(np.array([1.0, 2.0]))
    assert target.inputs_changed() and not target.inputs_changed()
    shared_b.set_value(np.array([1.0, 2.0]))
    assert not target.inputs_changed()
    with model:
        pm.set_data({"data": np.array([1.0, 2.0, 3.0])})
    assert target.inputs_changed() and not target.inputs_changed()


def test_no_likelihood():
    model, mean, sd = models.normal(3)
    target = LogDensity(model)
    x, before = np.array([0.3, -1.0, 2.0]), target.n_evaluations
    np.testing.assert_allclose(target(x), [stats.norm.logpdf(x, mean, sd).sum(), 0, 0])
    _, gradient = target.value_and_gradient(x)
    np.testing.assert_allclose(gradient, [(mean - x) / sd**2, np.zeros(3)])
    assert target.n_evaluations == before + 2


def test_black_box_has_no_gradient(caplog):
    model, operation = models.black_box()
    with caplog.at_level(logging.INFO, logger="pymc.kameleon"):
        target = LogDensity(model)
    assert len(caplog.records) == 1 and "BlackBox" in caplog.text
    assert target.function.compiled() is None
    operation.calls = 0
    x = np.array([0.5, 0.0])
    prior = stats.norm.logpdf(x).sum()
    np.testing.assert_allclose(target(x), [prior, -0.625, 0])
    assert operation.calls == 1
    with pytest.raises(NotImplementedError, match="x"):
        target.value_and_gradient(x)


def test_estimates_apart():
    model, operation = models.estimated_with_other(noise=0.5)
    target = LogDensity(model, [model["own"]], separate_estimates=True)
    assert target.keeps_estimates
    operation.calls = 0
    x = np.array([0.4])
    first, second = target(x), target(x)
    assert operation.calls == 2
    np.testing.assert_array_equal(first[:2], second[:2])
    assert first[2] != second[2]
    np.testing.assert_allclose(target.rest(x), first[:2])
    assert operation.calls == 2
    expected = stats.norm.logpdf(0.0) + stats.norm.logpdf(0.4), stats.norm.logpdf(0.7, 0.4)
    np.testing.assert_allclose(first[:2], expected)
    everything = LogDensity(models.estimated_with_other(entangled=True)[0], separate_estimates=True)
    assert not everything.keeps_estimates and everything(np.zeros(2))[2] != 0


def test_random_numbers_in_the_graph_are_others_at_every_call():
    data = np.random.default_rng(0).normal(1.0, 1.0, 50)
    with pm.Model() as model:
        x = pm.Normal("x")
        batch = pm.Minibatch(data, batch_size=5)
        pm.Normal("y", x, 1.0, observed=batch, total_size=50)
    density = LogDensity(model)
    assert len({float(density(np.zeros(1)).sum()) for _ in range(5)}) == 5
