"""Black boxes that are written for one group, and called once for each."""

import numpy as np
import pymc as pm
import pytest

from pymc_kameleon import EvaluationStore, KameleonStep, black_box

THETA = np.array([[0.5, 1.0], [-1.0, 2.0], [0.0, 0.5]])
Y = np.array([[1.0, 2.0, 0.0, 1.0], [0.0, -1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 0.5]])


def of_one(theta, y, sd):
    assert theta.shape == (2,) and y.shape == (4,) and np.ndim(sd) == 0
    residuals = (y - theta[0] - theta[1] * np.arange(4.0)) / sd
    return -0.5 * residuals @ residuals - 4.0 * np.log(sd)


def curve_of_one(theta):
    if theta[0] < -2.0:
        raise ArithmeticError("too low")
    return theta[0] + theta[1] * np.arange(4.0)


def model_of(likelihood, shape=(3, 2)):
    with pm.Model() as model:
        theta, sd = pm.Normal("theta", 0.0, 1.0, shape=shape), pm.HalfNormal("sd")
        pm.Potential("likelihood", likelihood(theta, Y[: shape[0]], sd))
    return model


def model_of_curves(curve):
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=(3, 2))
        pm.Normal("y", curve(theta), 1.0, observed=Y)
    return model


@pytest.mark.parametrize("options", [{}, {"cores": 2}], ids=["one", "cores"])
def test_each_group_gets_its_rows_and_what_is_shared(options):
    box = black_box(of_one, each=["theta", "y"], **options)
    expected = [of_one(theta, y, 0.7) for theta, y in zip(THETA, Y, strict=True)]
    np.testing.assert_array_equal(box(THETA, Y, 0.7), expected)
    np.testing.assert_array_equal(box(sd=0.7, y=Y, theta=THETA), expected)
    model = model_of(box)
    found = model.compile_logp(sum=False)({"theta": THETA, "sd_log__": np.log(0.7)})
    np.testing.assert_allclose(found[-1], expected, rtol=1e-12)


def test_the_groups_of_an_evaluation_are_one_batch():
    sizes = []

    def of_many(theta, y, sd):
        sizes.append(len(theta))
        return np.array([of_one(*one) for one in zip(theta, y, sd, strict=True)])

    box = black_box(of_many, each=["theta", "y"], vectorized=True, shape=())
    expected = [of_one(theta, y, 0.7) for theta, y in zip(THETA, Y, strict=True)]
    np.testing.assert_array_equal(box(THETA, Y, 0.7), expected)
    assert sizes == [3]


def test_the_function_is_called_once_for_each_group():
    calls = []

    def noted(theta, y, sd):
        calls.append(theta.copy())
        return of_one(theta, y, sd)

    model = model_of(black_box(noted, each=["theta", "y"], shape=()))
    log_density = model.compile_logp()
    calls.clear()
    log_density({"theta": THETA, "sd_log__": 0.0})
    np.testing.assert_array_equal(calls, THETA)


def test_curves_have_a_row_for_each_group():
    model = model_of_curves(black_box(curve_of_one, each="theta"))
    curves = THETA[:, :1] + THETA[:, 1:] * np.arange(4.0)
    expected = -0.5 * (Y - curves) ** 2 - 0.5 * np.log(2 * np.pi)
    found = model.compile_logp(model.observed_RVs, sum=False)({"theta": THETA})
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@pytest.mark.parametrize("is_curve", [True, False])
def test_a_group_that_fails_makes_the_point_impossible_and_no_other_row(is_curve):
    failing = THETA.copy()
    failing[1, 0] = -3.0
    if is_curve:
        box = black_box(curve_of_one, each="theta", failures=ArithmeticError)
        model = model_of_curves(box)
        terms = model.compile_logp(model.potentials, sum=False)({"theta": failing})
        np.testing.assert_array_equal(terms[0], [0.0, -np.inf, 0.0])
        found = model.compile_logp(model.observed_RVs, sum=False)({"theta": failing})[0]
        assert np.all(np.isfinite(found))
    else:
        box = black_box(
            lambda theta: curve_of_one(theta).sum(), each="theta", failures=ArithmeticError
        )
        with pm.Model() as model:
            pm.Potential("p", box(pm.Normal("theta", 0.0, 1.0, shape=(3, 2))))
        found = model.compile_logp(model.potentials, sum=False)({"theta": failing})[0]
        np.testing.assert_array_equal(np.isfinite(found), [True, False, True])
        assert found[1] == -np.inf


def test_draws_are_the_same_with_several_cores():
    found = []
    for cores in (1, 2):
        model = model_of(black_box(of_one, each=["theta", "y"], shape=(), cores=cores))
        with model:
            result = pm.sample(
                20,
                tune=20,
                chains=1,
                cores=1,
                step=KameleonStep(steps_per_draw=2),
                random_seed=1,
                progressbar=False,
                compute_convergence_checks=False,
            )
        found.append(result["posterior"]["theta"].values)
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) > 3


def test_data_give_the_number_of_groups():
    with pm.Model() as model:
        y = pm.Data("y", Y)
        theta = pm.Normal("theta", 0.0, 1.0, shape=(3, 2))
        pm.Potential("p", black_box(of_one, each=["theta", "y"], shape=())(theta, y, 1.0))
        pm.set_data({"y": Y[:2]})
    with pytest.raises(ValueError, match=r"another number of groups .*theta 3, y 2"):
        model.compile_logp()({"theta": THETA})


REFUSED = [
    (lambda: black_box(of_one, each="rows"), "no argument rows; name some of theta, y, sd"),
    (lambda: black_box(of_one, each="y", store=EvaluationStore()), "KameleonStep\\(store=...\\)"),
    (lambda: black_box(of_one, each=["theta", "sd"])(THETA, Y[0], 1.0), "sd of of_one is a number"),
    (lambda: model_of(black_box(of_one, each=["theta", "y"]), (4, 2)), "theta 4, y 3"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
