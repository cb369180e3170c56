"""Prior and likelihood read from models, against PyMC's own graphs and finite differences."""

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from models import UNCOMPILED, BlackBox, negative_half_square

from pymc_kameleon.latent_gp import expectation_propagation, interface, laplace
from pymc_kameleon.latent_gp.reader import likelihood as likelihood_module
from pymc_kameleon.latent_gp.reader.model_reader import LatentFunction, free_variable
from pymc_kameleon.model.model_function import ModelFunction

N = 5
INPUTS = np.linspace(0.0, 2.0, N)[:, None]
PLACE = np.array([-1.3, 0.4, 0.9, -0.2, 1.7])


def read(model, var="f", **kwargs):
    return LatentFunction(model, var, compile_kwargs=UNCOMPILED, **kwargs)


def standard_normal_function(n=N):
    return pm.MvNormal("f", np.zeros(n), cov=np.eye(n))


def evaluated(model, variables, point):
    """Values of a model's variables in PyMC's own graphs, at a point of its value variables."""
    graphs = model.replace_rvs_by_values(variables)
    function = model.compile_fn(
        graphs, inputs=model.value_vars, on_unused_input="ignore", **UNCOMPILED
    )
    return function({v.name: point[v.name] for v in model.value_vars})


def observed_log_density(model, point):
    """PyMC's own log density of everything that is observed."""
    variables = [*model.observed_RVs, *model.potentials]
    return model.compile_logp(vars=variables, **UNCOMPILED)(point)


# likelihoods --------------------------------------------------------------------------------------


def ordered(f):
    pm.OrderedLogistic("y", eta=f, cutpoints=[-1.0, 0.5], observed=[0, 2, 1, 1, 2])


def student_t(f):
    y = np.array([-1.0, 0.2, 3.0, 0.0, 1.2])
    pm.StudentT("y", nu=4.0, mu=f, sigma=pm.HalfNormal("sigma"), observed=y)


def repeated(f):
    index = np.array([3, 0, 0, 1, 4, 3, 0])
    pm.Normal("y", f[index], 0.7, observed=np.linspace(-1.0, 1.0, 7))


def several(f):
    pm.Poisson("counts", pt.exp(f[:3]), observed=[0, 2, 5])
    pm.Bernoulli("labels", logit_p=f, observed=[1, 0, 0, 1, 1])
    pm.Potential("bound", -pt.exp(-3.0 * f))


def hidden_layer(f):
    pm.Normal("rate", f, 0.5, shape=N)


LIKELIHOODS = {
    "Bernoulli, probit": lambda f: pm.Bernoulli(
        "y", p=pm.math.invprobit(f), observed=[1, 0, 0, 1, 1]
    ),
    "Bernoulli, logit_p": lambda f: pm.Bernoulli("y", logit_p=f, observed=[1, 0, 0, 1, 1]),
    "Bernoulli, invlogit": lambda f: pm.Bernoulli(
        "y", p=pm.Deterministic("p", pm.math.invlogit(f)), observed=[1, 0, 0, 1, 1]
    ),
    "Poisson": lambda f: pm.Poisson("y", pt.exp(f), observed=[0, 2, 5, 1, 3]),
    "Binomial": lambda f: pm.Binomial("y", n=4, logit_p=f, observed=[0, 1, 4, 2, 3]),
    "StudentT": student_t,
    "OrderedLogistic": ordered,
    "NegativeBinomial": lambda f: pm.NegativeBinomial(
        "y", mu=pt.exp(f), alpha=2.5, observed=[0, 1, 7, 2, 3]
    ),
    "vector Potential": lambda f: pm.Potential("y", -pt.log1p((f - 0.3) ** 2)),
    "summed Potential": lambda f: pm.Potential("y", -pt.sum(pt.cosh(f) * np.arange(1.0, N + 1))),
    "Gaussian": lambda f: pm.Normal("y", f, 0.3, observed=PLACE + 0.1),
    "linear Potential": lambda f: pm.Potential("y", f * np.arange(N)),
    "by index, repeated": repeated,
    "several": several,
    "another layer": hidden_layer,
}


@pytest.fixture(scope="module", params=list(LIKELIHOODS))
def problem(request):
    with pm.Model() as model:
        LIKELIHOODS[request.param](standard_normal_function())
    return request.param, model, read(model)


def test_likelihood_and_its_derivatives_are_those_of_the_model(problem):
    name, model, function = problem
    likelihood, step = function.likelihood, 1e-5
    point = model.initial_point() | {"f": PLACE}
    if name == "another layer":
        point["rate"] = np.linspace(-0.5, 0.5, N)
        function.set_point(point)
        expected = model.compile_logp(vars=[model["rate"]], **UNCOMPILED)(point)
    else:
        expected = observed_log_density(model, point)
    # PyMC's invprobit holds a root of two in single precision.
    rtol = 1e-6 if "probit" in name else 1e-12
    assert likelihood.value(PLACE) == pytest.approx(expected, rel=rtol)
    terms = likelihood.terms(PLACE)
    assert terms.shape == (4, N)
    shifts = step * np.eye(N)
    slope = [likelihood.value(PLACE + s) - likelihood.value(PLACE - s) for s in shifts]
    np.testing.assert_allclose(terms[1], np.array(slope) / (2 * step), rtol=1e-7, atol=1e-8)
    above, below = likelihood.terms(PLACE + step), likelihood.terms(PLACE - step)
    differences = (above - below) / (2 * step)
    np.testing.assert_allclose(terms[2:], differences[1:3], rtol=1e-7, atol=1e-8)
    labels = [1, -1, -1, 1, 1] if name == "Bernoulli, probit" else None
    np.testing.assert_equal(likelihood.probit_labels, labels)
    copy = cloudpickle.loads(cloudpickle.dumps(function)).likelihood
    np.testing.assert_array_equal(copy.terms(PLACE), terms)
    assert copy.value(PLACE) == likelihood.value(PLACE)


def test_elements_sum_to_the_value(problem):
    name, _, function = problem
    likelihood = function.likelihood
    value = likelihood.value(PLACE)
    assert likelihood.terms(PLACE)[0].sum() == pytest.approx(value, rel=1e-12)
    if name == "summed Potential":
        with pytest.raises(ValueError, match=r"as a whole only.*a vector"):
            likelihood.elementwise(PLACE)
        return
    elements = likelihood.elementwise(PLACE)
    assert elements.sum() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(likelihood.terms(PLACE)[0], elements, rtol=1e-12)
    for n in range(N):
        moved = likelihood.elementwise(PLACE + 0.5 * (np.arange(N) == n))
        others = np.arange(N) != n
        np.testing.assert_array_equal(moved[others], elements[others])
        whole = likelihood.value(PLACE + 0.5 * (np.arange(N) == n)) - value
        assert moved[n] - elements[n] == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_another_variable_of_the_likelihood_is_followed():
    with pm.Model() as model:
        student_t(standard_normal_function())
    function = read(model)
    assert function.refresh() and not function.refresh()
    point = model.initial_point() | {"f": PLACE, "sigma_log__": np.array(-1.1)}
    prior = function.prior.gaussian
    function.set_point(point)
    assert function.refresh()
    assert not function.refresh()
    expected = observed_log_density(model, point)
    assert function.likelihood.value(PLACE) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_array_equal(function.prior.gaussian.covariance, prior.covariance)


def test_data_may_be_replaced():
    with pm.Model() as model:
        weights = pytensor.shared(np.ones(N), name="weights")
        counts = pm.Data("counts", np.array([0, 2, 5, 1, 3]))
        exposure = pm.Data("exposure", np.ones(N))
        f = standard_normal_function()
        pm.Poisson("y", exposure * pt.exp(f), observed=counts)
        pm.Potential("more", -weights * pt.cosh(f))
    function = read(model)
    point = {"f": PLACE}
    first = function.likelihood.value(PLACE)
    assert first == pytest.approx(observed_log_density(model, point), rel=1e-12)
    for change in (
        lambda: pm.set_data({"counts": np.array([3, 1, 0, 2, 2])}, model=model),
        lambda: pm.set_data({"exposure": np.linspace(0.5, 2.0, N)}, model=model),
        lambda: weights.set_value(np.linspace(0.0, 3.0, N)),
    ):
        function.refresh()
        change()
        assert function.refresh()
        value = function.likelihood.value(PLACE)
        assert value != pytest.approx(first, rel=1e-6)
        assert value == pytest.approx(observed_log_density(model, point), rel=1e-12)
        assert function.likelihood.elementwise(PLACE).sum() == pytest.approx(value, rel=1e-12)
        first = value


def test_missing_observations_do_not_count_for_f_alone():
    y = np.array([0.3, np.nan, 1.0, -1.0, 0.1])
    with pm.Model() as model:
        f = standard_normal_function()
        with pytest.warns(match="missing"):
            pm.Normal("y", f, 0.5, observed=y)
    function = read(model)
    point = model.initial_point() | {"f": PLACE, "y_unobserved": np.array([0.8])}
    function.set_point(point)
    z = (np.where(np.isnan(y), 0.8, y) - PLACE) / 0.5
    expected = -0.5 * z**2 - np.log(0.5 * np.sqrt(2 * np.pi))
    # PyMC rounds log sqrt(2 pi) to single precision.
    np.testing.assert_allclose(function.likelihood.elementwise(PLACE), expected, rtol=1e-7)


def test_without_gradient_values_remain():
    with pm.Model() as model:
        pm.Potential("y", BlackBox(negative_half_square)(standard_normal_function()))
    function = read(model)
    likelihood = function.likelihood
    expected = observed_log_density(model, {"f": PLACE})
    assert not likelihood.has_gradient
    assert likelihood.value(PLACE) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(NotImplementedError, match="likelihood of f has no gradient: BlackBox"):
        likelihood.terms(PLACE)
    with pytest.raises(ValueError, match="known as a whole only"):
        likelihood.elementwise(PLACE)
    assert likelihood.probit_labels is None


@pytest.fixture
def evaluations(monkeypatch):
    """Counts evaluations of compiled functions."""
    counted, into = [], ModelFunction.into

    def counting(self, x, value):
        counted.append(self)
        into(self, x, value)

    monkeypatch.setattr(ModelFunction, "into", counting)
    return counted


def test_labels_are_found_once_until_the_data_change(evaluations):
    """Expectation propagation asks for them in each sweep."""
    with pm.Model() as model:
        labels = pm.Data("labels", np.array([1, 0, 0, 1, 1]))
        p = pm.math.invprobit(standard_normal_function())
        pm.Bernoulli("y", p, observed=labels)
    function = read(model)
    function.refresh()
    likelihood = function.likelihood
    np.testing.assert_array_equal(likelihood.probit_labels, [1, -1, -1, 1, 1])
    evaluations.clear()
    for _ in range(10):
        assert likelihood.probit_labels is not None
    assert not evaluations  # thirty before they were kept
    pm.set_data({"labels": np.array([0, 0, 0, 1, 1])}, model=model)
    assert function.refresh()
    np.testing.assert_array_equal(likelihood.probit_labels, [-1, -1, -1, 1, 1])


def test_labels_follow_a_scale_that_moves():
    """There are labels where it is 1, and none elsewhere, though no data have changed."""
    with pm.Model() as model:
        scale = pm.Normal("scale", 1.0, 1.0)
        eta = scale * standard_normal_function()
        pm.Bernoulli("y", logit_p=eta, observed=[1, 0, 0, 1, 1])
    function = read(model)
    for value, has_labels in ((1.0, True), (2.0, False), (1.0, True)):
        function.set_point({"scale": np.array(value)})
        function.refresh()
        assert (function.likelihood.logit_labels is not None) == has_labels


def test_values_that_go_together_are_found_in_groups(evaluations, monkeypatch):
    """The same blocks as value by value, in a third of the evaluations."""
    size, rng = 600, np.random.default_rng(4)
    place = rng.permutation(size).reshape(-1, 3)
    f = pt.vector("f", shape=(size,), dtype="float64")
    terms = {"y": -pt.exp(f[place[:, 0]]) - f[place[:, 1]] ** 2 * (1.0 + f[place[:, 2]] ** 2)}
    found = []
    for few in (likelihood_module.FEW, size):
        monkeypatch.setattr(likelihood_module, "FEW", few)
        evaluations.clear()
        with pm.Model() as model:
            made = likelihood_module.ModelLikelihood(
                model,
                "f",
                terms,
                f,
                size,
                np.zeros(size),
                UNCOMPILED,
                moving=set(),
                most_together=8,
            )
        found.append((made.blocks.members, len(evaluations)))
    (blocks, in_groups), (expected, one_by_one) = found
    np.testing.assert_array_equal(blocks, expected)
    assert one_by_one > size > 3 * in_groups
    assert {frozenset(row) for row in blocks} == {frozenset(row) for row in place}


# priors -------------------------------------------------------------------------------------------


def kernel(lengthscale, amplitude, inputs=INPUTS):
    covariance = amplitude**2 * np.exp(-0.5 * ((inputs - inputs.T) / lengthscale) ** 2)
    return covariance + 1e-4 * np.eye(len(inputs))


def gaussian_process(reparameterize):
    def prior():
        lengthscale = pm.LogNormal("lengthscale")
        amplitude = pm.HalfNormal("amplitude")
        constant = pm.Normal("constant")
        gp = pm.gp.Latent(
            mean_func=pm.gp.mean.Constant(constant),
            cov_func=amplitude**2 * pm.gp.cov.ExpQuad(1, ls=lengthscale),
        )
        f = gp.prior("f", X=INPUTS, jitter=1e-4, reparameterize=reparameterize)

        def moments(lengthscale, amplitude, constant):
            return np.full(N, constant), kernel(lengthscale, amplitude)

        return f, moments

    return prior


def multivariate(form):
    def prior():
        amplitude, shift = pm.HalfNormal("amplitude"), pm.Normal("shift")
        base = kernel(0.7, 1.0)
        matrix = {"cov": base, "chol": np.linalg.cholesky(base), "tau": np.linalg.inv(base)}[form]
        scale = {"cov": amplitude**2, "chol": amplitude, "tau": 1 / amplitude**2}[form]
        f = pm.MvNormal("f", shift * INPUTS[:, 0], **{form: scale * matrix})

        def moments(amplitude, shift):
            return shift * INPUTS[:, 0], amplitude**2 * base

        return f, moments

    return prior


def user_written(make, factor):
    """f = make(v, amplitude, L) with v ~ N(0.4, scale^2) and f = amplitude * factor(L) v + 0.5."""

    def prior():
        amplitude, scale = pm.HalfNormal("amplitude"), pm.HalfNormal("scale")
        lower = np.linalg.cholesky(kernel(0.7, 1.0))
        v = pm.Normal("v", 0.4, scale, shape=N)
        f = pm.Deterministic("f", make(v, amplitude, lower))

        def moments(amplitude, scale):
            matrix = amplitude * factor(lower)
            return 0.5 + matrix @ np.full(N, 0.4), scale**2 * matrix @ matrix.T

        return f, moments

    return prior


def correlated():
    """A whitened function whose v is itself a multivariate normal."""
    amplitude = pm.HalfNormal("amplitude")
    v = pm.MvNormal("v", np.arange(N), cov=kernel(0.7, 1.0))
    f = pm.Deterministic("f", 1.5 - amplitude * v)
    return f, lambda amplitude: (1.5 - amplitude * np.arange(N), amplitude**2 * kernel(0.7, 1.0))


def independent():
    scale = pm.HalfNormal("scale")
    f = pm.Normal("f", np.arange(N), scale)
    return f, lambda scale: (np.arange(N), scale**2 * np.eye(N))


PRIORS = {
    "Latent": gaussian_process(True),
    "Latent, not reparameterized": gaussian_process(False),
    "MvNormal, cov": multivariate("cov"),
    "MvNormal, chol": multivariate("chol"),
    "MvNormal, tau": multivariate("tau"),
    "m + L v": user_written(lambda v, a, L: 0.5 + a * pt.dot(L, v), lambda L: L),
    "eta v": user_written(lambda v, a, L: a * v + 0.5, lambda L: np.eye(N)),
    "upper": user_written(lambda v, a, L: 0.5 + a * pt.dot(L.T, v), lambda L: L.T),
    "negative": user_written(lambda v, a, L: 0.5 - a * pt.dot(L, v), lambda L: -L),
    "v correlated": correlated,
    "Normal": independent,
}
POINTS = [
    {"lengthscale": 0.6, "amplitude": 1.7, "constant": -0.8, "shift": 2.0, "scale": 0.3},
    {"lengthscale": 2.5, "amplitude": 0.2, "constant": 1.1, "shift": -1.0, "scale": 3.0},
]


@pytest.fixture(scope="module", params=PRIORS)
def with_prior(request):
    with pm.Model() as model:
        f, moments = PRIORS[request.param]()
        pm.Poisson("y", pt.exp(f), observed=np.arange(N))
    return model, moments, read(model, f)


def value_point(model, values, function, position):
    """Point of the value variables with the other variables at `values`."""
    point = {}
    for rv in model.free_RVs:
        name = model.rvs_to_values[rv].name
        if name == function.value_variable.name:
            point[name] = position
        else:
            logged = name.endswith("_log__")
            point[name] = np.array(np.log(values[rv.name]) if logged else values[rv.name])
    return point


def test_prior_follows_the_other_variables(with_prior):
    """So does a copy; and it maps between the function and its free variable."""
    model, moments, function = with_prior
    copy = cloudpickle.loads(cloudpickle.dumps(function))
    for values in POINTS:
        point = value_point(model, values, function, PLACE)
        function.set_point(point)
        assert function.refresh()
        known = {v.name: values[v.name] for v in model.free_RVs if v.name in values}
        mean, covariance = moments(**known)
        prior = function.prior.gaussian
        np.testing.assert_allclose(prior.mean, mean, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(prior.covariance, covariance, rtol=1e-8, atol=1e-10)
        factor = prior.cholesky
        np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-8, atol=1e-10)
        np.testing.assert_array_equal(factor, np.tril(factor))
        assert np.all(np.diagonal(factor) > 0)
        assert not function.refresh()
        (expected,) = evaluated(model, [model["f"]], point)
        found = function.prior.to_function(PLACE)
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(function.prior.to_variable(found), PLACE, rtol=1e-8)
        copy.set_point(point)
        copy.refresh()
        np.testing.assert_array_equal(copy.prior.gaussian.covariance, prior.covariance)
        np.testing.assert_array_equal(copy.prior.to_function(PLACE), found)


def test_prior_and_likelihood_make_the_models_density(with_prior):
    model, _, function = with_prior
    values = POINTS[0]
    other = np.linspace(-0.3, 0.8, N)
    log_density = model.compile_logp(**UNCOMPILED)
    difference = 0.0
    for sign, position in ((1, PLACE), (-1, other)):
        point = value_point(model, values, function, position)
        function.set_point(point)
        function.refresh()
        f = function.prior.to_function(position)
        found = function.prior.gaussian.log_density(f) + function.likelihood.value(f)
        difference += sign * (found - log_density(point))
    assert difference == pytest.approx(0.0, abs=1e-7)


def test_inputs_may_be_replaced():
    with pm.Model() as model:
        inputs = pm.Data("inputs", INPUTS)
        gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=0.7))
        f = gp.prior("f", X=inputs, jitter=1e-4)
        pm.Poisson("y", pt.exp(f), observed=np.arange(N))
    function = read(model, f)
    np.testing.assert_allclose(function.prior.gaussian.covariance, kernel(0.7, 1.0), rtol=1e-8)
    function.refresh()
    pm.set_data({"inputs": INPUTS**2}, model=model)
    assert function.refresh()
    expected = kernel(0.7, 1.0, INPUTS**2)
    np.testing.assert_allclose(function.prior.gaussian.covariance, expected, rtol=1e-8)


def test_a_copy_under_a_name_is_the_function():
    with pm.Model() as model:
        v = pm.Normal("v", shape=N)
        f = 0.5 + pt.dot(np.linalg.cholesky(kernel(0.7, 1.0)), v)
        pm.Deterministic("f", f)
        pm.Poisson("y", pt.exp(f), observed=np.arange(N))
    assert free_variable(model, "f") == (v, f)
    found = read(model).likelihood.terms(PLACE)[1]
    np.testing.assert_allclose(found, np.arange(N) - np.exp(PLACE), rtol=1e-12)


def test_models_with_initial_values_of_their_own():
    with pm.Model() as model:
        amplitude = pm.HalfNormal("amplitude", initval=2.0)
        f = pm.MvNormal("f", np.zeros(N), cov=amplitude**2 * np.eye(N), initval=np.ones(N))
        observe(f)
    function = read(model)
    np.testing.assert_allclose(function.prior.gaussian.covariance, 4 * np.eye(N))
    found = function.likelihood.terms(PLACE)[1]
    np.testing.assert_allclose(found, np.arange(N) - np.exp(PLACE), rtol=1e-12)


# names --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whitened():
    with pm.Model(coords={"place": np.arange(N)}) as model:
        gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=0.7))
        f = gp.prior("f", X=INPUTS, dims="place")
        p = pm.Deterministic("p", pm.math.invprobit(f), dims="place")
        pm.Bernoulli("y", p=p, observed=[1, 0, 0, 1, 1], dims="place")
    return model


def test_the_function_goes_by_many_names(whitened):
    f, rotated = whitened["f"], whitened["f_rotated_"]
    for var in (f, "f", rotated, "f_rotated_", whitened.rvs_to_values[rotated]):
        assert free_variable(whitened, var)[0] is rotated
    for var in ("f", "f_rotated_"):
        function = read(whitened, var)
        assert (function.name, function.size) == ("f", N)
        np.testing.assert_allclose(function.prior.gaussian.covariance, kernel(0.7, 1.0), atol=1e-4)
        np.testing.assert_array_equal(function.likelihood.probit_labels, [1, -1, -1, 1, 1])
    with pm.Model():
        foreign = pm.Normal("foreign", shape=N)
    with pytest.raises(ValueError, match="foreign is neither a free variable nor"):
        read(whitened, foreign)


def test_a_function_of_its_own_is_its_own_variable():
    with pm.Model(coords={"place": np.arange(N)}) as model:
        f = pm.MvNormal("f", np.zeros(N), cov=np.eye(N), dims="place")
        pm.Deterministic("doubled", 2 * f, dims="place")
        pm.Poisson("y", pt.exp(f), observed=np.arange(N), dims="place")
    assert free_variable(model, "f") == (f, None)
    assert read(model).name == "f"


def test_one_element():
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(standard_normal_function(1)), observed=[2])
    likelihood = read(model).likelihood
    f = np.array([0.3])
    expected = [0.6 - np.exp(0.3) - np.log(2), 2 - np.exp(0.3), -np.exp(0.3), -np.exp(0.3)]
    np.testing.assert_allclose(likelihood.terms(f)[:, 0], expected, rtol=1e-12)
    assert likelihood.elementwise(f) == pytest.approx(expected[:1])


@pytest.mark.parametrize("reparameterize", [True, False])
def test_a_latent_function_in_single_precision(reparameterize):
    with pytensor.config.change_flags(floatX="float32"):
        with pm.Model() as model:
            gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=np.float32(0.7)))
            inputs = INPUTS.astype("float32")
            f = gp.prior("f", X=inputs, jitter=1e-3, reparameterize=reparameterize)
            pm.Bernoulli("y", p=pm.math.invprobit(f), observed=[1, 0, 0, 1, 1])
        function = read(model)
        assert function.value_variable.dtype == "float32"
        covariance = kernel(0.7, 1.0) + (1e-3 - 1e-4) * np.eye(N)
        np.testing.assert_allclose(function.prior.gaussian.covariance, covariance, atol=1e-5)
        np.testing.assert_array_equal(function.likelihood.probit_labels, [1, -1, -1, 1, 1])
        elements = function.likelihood.elementwise(PLACE)
        np.testing.assert_allclose(function.likelihood.terms(PLACE)[0], elements, rtol=1e-6)


# bad input ----------------------------------------------------------------------------------------


def observe(f):
    pm.Poisson("y", pt.exp(f), observed=np.arange(N))


def likelihood(make):
    """A builder: a standard normal function, and what `make` observes of it."""
    return lambda: make(standard_normal_function())


def duplicated(reparameterize):
    def build():
        gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=1.0))
        inputs = np.array([[0.0], [0.0], [1.0], [2.0], [2.0]])
        observe(gp.prior("f", X=inputs, jitter=0.0, reparameterize=reparameterize))

    return build


def not_finite():
    scale = pm.Data("scale", np.nan)
    observe(pm.MvNormal("f", np.zeros(N), cov=scale * np.eye(N)))


@likelihood
def second_variable_outside(f):
    pm.Poisson("first", pt.exp(f), observed=np.arange(N))
    pm.Bernoulli("second", logit_p=f, observed=[1, 0, 2, 0, 1])


@likelihood
def column_of_data(f):
    pm.Bernoulli("y", logit_p=f, observed=pm.Data("labels", np.ones((N, 1))))


@likelihood
def softmax(f):
    pm.Multinomial("y", n=6, p=pm.math.softmax(f), observed=[1, 2, 0, 0, 3])


def of_v(function):
    """A builder: counts about a function of v ~ N(0, I)."""
    return lambda: observe(pm.Deterministic("f", function(pm.Normal("v", shape=N))))


def besides():
    of_v(lambda v: 1.0 + 2.0 * v)()
    pm.Potential("penalty", -(pm.modelcontext(None)["v"] ** 4))


def normal(observed=0.0, **options):
    """A builder: f ~ N(0, I) of any shape, with a normal error."""
    return lambda: pm.Normal("y", pm.Normal("f", **options), 1.0, observed=observed)


START = pm.Normal.dist(0, 1)
NO_PD, NOT_AFFINE = "f is not positive definite", "f should be an affine function"
SHAPES = r"do not.* f of shape \(5,\)"
UNOBSERVED = likelihood(lambda f: pm.Normal("y", 0.0, 1.0, observed=np.zeros(N)))
BAD = [
    (duplicated(True), "f", f"{NO_PD}.*eigenvalue.*jitt"),
    (duplicated(False), "f", f"{NO_PD}.*eigenvalue.*jitter"),
    (
        lambda: observe(pm.MvNormal("f", np.zeros(N), cov=np.eye(N) - 0.5)),
        "f",
        f"{NO_PD}.*eigenvalue is -1.5.* of 3",
    ),
    (not_finite, "f", "covariance of f has NaN"),
    (
        likelihood(lambda f: pm.Bernoulli("y", p=pm.math.invprobit(f), observed=[1, -1, 1, 1, -1])),
        "f",
        "y: .*number 1 is -inf.*Bernoulli takes 0 and 1, not -1 and 1",
    ),
    (
        likelihood(lambda f: pm.Poisson("y", pt.exp(f), observed=[0, 1, 2, -3, 4])),
        "f",
        "y: .*number 3 is -inf.*can produce",
    ),
    (second_variable_outside, "f", "second: .*number 2 is -inf"),
    (
        lambda: pm.Normal("y", pm.Poisson("f", np.ones(N)), 1.0, observed=np.zeros(N)),
        "f",
        "f is discrete",
    ),
    (
        likelihood(lambda f: pm.Bernoulli("y", logit_p=f, observed=np.ones((N, 1)))),
        "f",
        rf"y of shape \(5, 1\) {SHAPES}.*Give both",
    ),
    (
        likelihood(lambda f: pm.Normal("y", f, 1.0, observed=np.zeros(N - 1))),
        "f",
        rf"y of shape \(4,\) {SHAPES}.*Give both",
    ),
    (column_of_data, "f", rf"y of shape \(5, 1\) {SHAPES}"),
    (UNOBSERVED, "f", "Nothing observed depends on f.*observed variable"),
    (
        likelihood(lambda f: pm.Potential("x", -pt.cosh(pm.Normal("z")))),
        "f",
        "Nothing observed depends on f",
    ),
    (
        lambda: pm.MvNormal("f", np.zeros(N), cov=np.eye(N), observed=np.ones(N)),
        "f",
        "f is observed. Name the latent",
    ),
    (
        lambda: observe(pm.StudentT("f", 3.0, shape=N)),
        "f",
        "f is not Gaussian a priori.*StudentT.*pm.MvNormal",
    ),
    (
        lambda: observe(pm.GaussianRandomWalk("f", sigma=1.0, steps=N - 1, init_dist=START)),
        "f",
        r"f is distributed as .*Walk.*LatentGPStep\(\[f\]\)",
    ),
    (
        lambda: observe(pm.Normal("f", shape=N, transform=pm.distributions.transforms.ordered)),
        "f",
        "f has a transform.*Leave",
    ),
    (of_v(pt.exp), "f", f"{NOT_AFFINE}.*none was found"),
    (of_v(lambda v: v + 0.01 * v**2), "f", f"{NOT_AFFINE}.*none was found"),
    (
        likelihood(lambda f: pm.Potential("smooth", -((f[1:] - f[:-1]) ** 2))),
        "f",
        "f does not factorise.*smooth may depend on one",
    ),
    (softmax, "f", "f does not factorise.*y may depend on one value of f"),
    (besides, "f", "penalty depends on v not only through f"),
    (normal(np.zeros((N, 2)), shape=(N, 2)), "f", "f has 2 dimensions.*vector"),
    (normal(), "f", "f has 0 dimensions.*vector"),
    (of_v(lambda v: pt.dot(np.ones((N, N)), v)), "f", f"{NO_PD}.*eigenvalue"),
    (
        of_v(lambda v: pm.Normal("second", shape=N) + v),
        "f",
        f"{NOT_AFFINE} of one.*v, second was found",
    ),
    (UNOBSERVED, "g", "the model has no variable 'g'"),
    (not_finite, "scale", "scale is neither a free"),
]


@pytest.mark.parametrize(("build", "name", "message"), BAD)
def test_bad_input_is_named(build, name, message):
    with pm.Model() as model:
        build()
    with pytest.raises(ValueError, match=message):
        read(model, name)


def test_a_covariance_that_ceases_to_be_positive_definite_is_named():
    with pm.Model() as model:
        correlation = pm.Normal("correlation")
        cov = pt.fill_diagonal(pt.ones((N, N)) * correlation, 1.0)
        observe(pm.MvNormal("f", np.zeros(N), cov=cov))
    function = read(model)
    function.refresh()
    function.set_point({"correlation": np.array(-0.5)})
    with pytest.raises(ValueError, match="f is not positive definite"):
        function.refresh()


# approximations of a model ------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch):
    """Counts how often a model is read and compiled."""
    counted, read = [], interface.LatentFunction

    def counting(*args, **kwargs):
        counted.append(args)
        return read(*args, **kwargs)

    monkeypatch.setattr(interface, "LatentFunction", counting)
    interface._readings.clear()
    return counted


COUNTS = np.array([0, 1, 4, 2, 0])


def counts_with_lengthscale():
    with pm.Model() as model:
        counts = pm.Data("counts", COUNTS)
        covariance = pm.gp.cov.ExpQuad(1, pm.LogNormal("lengthscale", 0.0, 1.0))
        f = pm.gp.Latent(cov_func=covariance).prior("f", X=INPUTS)
        pm.Poisson("y", pt.exp(f), observed=counts)
    return model, f


def evidence(model, f, lengthscale, approximate=laplace):
    return approximate(model, f, point={"lengthscale": lengthscale}, compile_kwargs=UNCOMPILED)


def test_approximations_at_many_hyperparameters_compile_once(compilations):
    model, f = counts_with_lengthscale()
    found = [evidence(model, f, s) for s in (0.5, 1.0, 2.0)]
    found.append(evidence(model, "f", 0.7, expectation_propagation))
    assert len(compilations) == 1
    interface._readings.clear()
    fresh = evidence(model, f, 1.0)
    assert found[1].log_evidence == pytest.approx(fresh.log_evidence, rel=1e-12)
    np.testing.assert_array_equal(found[1].likelihood.terms(PLACE), fresh.likelihood.terms(PLACE))
    with pytest.raises(ValueError, match="f"):
        evidence(model, f, np.nan)  # and it spoils nothing
    assert evidence(model, f, 1.0).log_evidence == fresh.log_evidence


def test_an_approximation_keeps_the_likelihood_that_it_was_made_with(compilations):
    with pm.Model() as model:
        f = standard_normal_function()
        scale = pm.HalfNormal("scale", 1.0)
        pm.StudentT("y", 4, mu=f, sigma=scale, observed=np.log(COUNTS + 1.0))
    at = [laplace(model, f, point={"scale": s}, compile_kwargs=UNCOMPILED) for s in (0.5, 2.0)]
    values = [result.likelihood.value(PLACE) for result in (at[1], at[0], at[1])]
    assert values[0] == values[2] != values[1]
    assert len(compilations) == 1
    copies = cloudpickle.loads(cloudpickle.dumps(at))
    assert [result.likelihood.value(PLACE) for result in copies] == values[1:]


def test_what_changes_in_a_model_is_followed(compilations):
    model, f = counts_with_lengthscale()
    before = evidence(model, f, 1.0).log_evidence
    with model:
        pm.set_data({"counts": COUNTS + 1})
    data = evidence(model, f, 1.0).log_evidence
    with model:
        pm.Potential("more", -0.5 * f**2)
    potential = evidence(model, f, 1.0).log_evidence
    assert before != data != potential and len(compilations) == 2


def test_models_that_are_kept_are_few(compilations, monkeypatch):
    monkeypatch.setattr(interface, "MOST_READINGS", 1)
    for _ in range(2):
        evidence(*counts_with_lengthscale(), 1.0)
    assert len(interface._readings) == 1
