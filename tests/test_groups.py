"""Black boxes that are written for one group, and called once for each."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_kameleon import AdaptiveMetropolisStep, EvaluationStore, KameleonStep, black_box
from pymc_kameleon.model.black_box import Calls, GroupMemory, takes_known_groups
from pymc_kameleon.model.guarded_call import Outcome

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
    (lambda: black_box(of_one, each=["theta", "sd"])(THETA, Y[0], 1.0), "sd of of_one is a number"),
    (lambda: model_of(black_box(of_one, each=["theta", "y"]), (4, 2)), "theta 4, y 3"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# groups whose inputs did not change --------------------------------------------------------------


def counted(calls, function=of_one):
    """Return the same function, which notes the first number of what each call is for."""

    @functools.wraps(function)
    def noted(theta, *others):
        calls.append(float(np.ravel(theta)[0]))
        return function(theta, *others)

    return noted


def blocks_of(box, n_groups=12):
    """Model with a variable for each group, which blocks can move one by one."""
    y = np.random.default_rng(0).normal(size=(n_groups, 4))
    with pm.Model() as model:
        thetas = [pm.Normal(f"theta{i}", 0.0, 1.0, shape=2) for i in range(n_groups)]
        pm.Potential("likelihood", box(pt.stack(thetas), y, 0.7))
    return model


def drawn_by_blocks(model, step=KameleonStep, steps_per_draw=3, draws=5, tune=10):
    with model:
        steps = [step(vars=[v], steps_per_draw=steps_per_draw) for v in model.free_RVs]
        result = pm.sample(
            draws,
            tune=tune,
            chains=1,
            cores=1,
            step=steps,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
        )
    return np.stack([result["posterior"][v.name].values[0] for v in model.free_RVs]), result


def many(theta, y, sd):
    return np.array([of_one(*one) for one in zip(theta, y, sd, strict=True)])


@pytest.mark.parametrize("step", [KameleonStep, AdaptiveMetropolisStep])
def test_a_block_for_each_group_calls_one_group_a_transition(step):
    calls = []
    box = black_box(counted(calls), each=["theta", "y"], shape=())
    model = blocks_of(box)
    draws, tune, steps_per_draw = 20, 20, 3
    result = drawn_by_blocks(model, step, steps_per_draw, draws, tune)[1]
    n_transitions = 12 * (draws + tune) * steps_per_draw
    n_evals = int(result["sample_stats"]["n_evals"].sum())
    # Where another step has moved, the point is evaluated again without a call. Beyond one call a
    # transition, each block calls all groups twice: at its start, and in its first draw, to find
    # out whether the function is random.
    assert n_evals > 12 * draws * steps_per_draw
    assert n_transitions <= len(calls) <= n_transitions + 12 * 2 * 12 + 50


def test_draws_are_those_of_a_function_that_is_called_for_all_groups(monkeypatch):
    found, n_calls = [], []
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(GroupMemory, "find", lambda self, group, key: None)
        calls = []
        model = blocks_of(black_box(counted(calls), each=["theta", "y"], shape=()), 6)
        found.append(drawn_by_blocks(model)[0])
        n_calls.append(len(calls))
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) > 6 * 5
    assert n_calls[0] < n_calls[1] / 3


@pytest.mark.parametrize("options", [{"cores": 2}, {"vectorized": True}], ids=str)
def test_draws_are_the_same_where_groups_are_called_at_once(options):
    found = []
    for chosen in ({}, options):
        function = many if "vectorized" in chosen else of_one
        model = blocks_of(black_box(function, each=["theta", "y"], shape=(), **chosen), 3)
        found.append(drawn_by_blocks(model)[0])
    np.testing.assert_array_equal(*found)


def test_only_groups_that_are_not_known_are_in_a_batch():
    sizes = []

    def of_many(theta, y, sd):
        sizes.append(len(theta))
        return many(theta, y, sd)

    box = black_box(of_many, each=["theta", "y"], vectorized=True, shape=())
    log_density, other = model_of(box).compile_logp(), THETA.copy()
    other[1:] += 0.5
    for theta in (THETA, other):
        log_density({"theta": theta, "sd_log__": 0.0})
    assert sizes == [3, 2]


def test_a_point_is_called_anew_where_all_groups_are_known():
    calls = []
    box = black_box(counted(calls), each=["theta", "y"], shape=())
    log_density, other = model_of(box).compile_logp(), THETA.copy()
    other[1, 0] = 7.0
    point, moved = ({"theta": theta, "sd_log__": 0.0} for theta in (THETA, other))
    expected = log_density(point)
    log_density(moved)
    assert calls == [0.5, -1.0, 0.0, 7.0]
    assert log_density(point) == expected
    assert calls[4:] == [0.5, -1.0, 0.0]
    with takes_known_groups():
        assert log_density(point) == expected
    assert len(calls) == 7
    log_density({"theta": THETA, "sd_log__": 0.1})  # what is shared has changed
    assert len(calls) == 10


def test_a_random_function_is_noticed(caplog):
    rng = np.random.default_rng(1)
    box = black_box(
        lambda theta, y, sd: of_one(theta, y, sd) + 0.2 * rng.normal(), each=["theta", "y"]
    )
    drawn_by_blocks(blocks_of(box, 2))
    assert "The log density is random" in caplog.text


def test_data_of_another_operation_and_new_data_are_told_apart():
    box = black_box(of_one, each=["theta", "y"], shape=())
    with pm.Model() as model:
        theta, y = pm.Normal("theta", 0.0, 1.0, shape=(3, 2)), pm.Data("y", Y)
        pm.Potential("one", box(theta, y, 1.0))
        pm.Potential("two", box(theta, 2 * Y, 1.0))
    log_density = model.compile_logp(model.potentials, sum=False)
    for i, data in enumerate([Y, Y[::-1], Y, 3 * Y]):
        with model:
            pm.set_data({"y": data})
        theta = THETA + np.array([[0.0], [i], [0.0]])  # one group is another one each time
        found = log_density({"theta": theta})
        for rows, values in zip((data, 2 * Y), found, strict=True):
            expected = [of_one(*one, 1.0) for one in zip(theta, rows, strict=True)]
            np.testing.assert_allclose(values, expected, rtol=1e-12)


def test_what_is_shared_is_told_apart():
    model = model_of(black_box(of_one, each=["theta", "y"], shape=()))
    log_density = model.compile_logp(model.potentials, sum=False)
    for i, sd in enumerate([1.0, 2.0, 1.0]):
        theta = THETA + np.array([[0.0], [i], [0.0]])
        [found] = log_density({"theta": theta, "sd_log__": np.log(sd)})
        expected = [of_one(*one, sd) for one in zip(theta, Y, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_failure_is_known_too_and_counted_once():
    calls, counts = [], Calls()
    box = black_box(
        counted(calls, curve_of_one), each="theta", failures=ArithmeticError, shape=(4,)
    )
    log_density = model_of_curves(box).compile_logp()
    with counts.counting():
        for low, first in ((-3.0, 0.5), (-3.0, 0.6), (-3.0, 0.7), (-1.0, 0.7)):
            theta = THETA.copy()
            theta[:2, 0] = first, low
            is_possible = np.isfinite(log_density({"theta": theta}))
            assert is_possible == (low > -2.0)
    assert calls == [0.5, -3.0, 0.0, 0.6, 0.7, -1.0]
    assert counts.made[box.key] == 6 and sum(counts.failed.values()) == 1
    assert "too low" in counts.last


def test_an_error_leaves_what_was_found():
    calls = []
    box = black_box(counted(calls, curve_of_one), each="theta", shape=(4,))
    log_density, wrong = model_of_curves(box).compile_logp(), THETA.copy()
    wrong[2, 0] = -3.0
    with pytest.raises(ArithmeticError, match="too low"):
        log_density({"theta": wrong})
    log_density({"theta": THETA})
    assert calls == [0.5, -1.0, -3.0, 0.0]


def test_memory_is_bounded_and_the_last_used_are_kept():
    memory = GroupMemory(2, 3)
    for i in range(4):
        memory.keep(0, i, Outcome(i))
        assert memory.find(0, 0) == Outcome(0)
    assert [memory.find(0, i) for i in range(4)] == [Outcome(0), None, Outcome(2), Outcome(3)]
    assert memory.find(1, 0) is None
    for copied in (pickle.loads(pickle.dumps(memory)), copy.deepcopy(memory)):
        assert copied.find(0, 0) is None
        assert copied.n_kept == 3
    with ThreadPoolExecutor(1) as other:
        assert other.submit(memory.find, 0, 0).result() is None
    large = black_box(lambda theta: np.ones(10**6), each="theta", shape=10**6)
    with pm.Model():
        curves = large(pm.Normal("theta", 0.0, 1.0, shape=(3, 2)))
    assert curves.owner.op.memory.n_kept == 2
    assert curves.owner.op.last.nbytes == 24 * 10**6


@pytest.mark.parametrize(
    ("low", "told"),
    [
        ([1, 1, 1], "(ArithmeticError 3), all of them in group 1, first at theta"),
        ([1, 2, 1], "(ArithmeticError 3), most often in group 1 (2 of 3), first at theta"),
        ([2], "(ArithmeticError 1), in group 2, first at theta"),
    ],
)
def test_the_group_that_fails_is_named(low, told):
    counts = Calls()
    box = black_box(curve_of_one, each="theta", failures=ArithmeticError, shape=(4,))
    log_density = model_of_curves(box).compile_logp()
    with counts.counting():
        for i, group in enumerate(low):
            theta = THETA + 0.01 * i
            theta[group, 0] = -3.0 - i
            log_density({"theta": theta})
    assert told in counts.complaint()


# groups in a store -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"cores": 2}, {"vectorized": True}], ids=["one", "cores", "vectorized"]
)
def test_a_store_keeps_the_value_of_each_group(tmp_path, options):
    points = [{"theta": THETA + shift, "sd_log__": 0.3} for shift in (0.0, [[0.0], [1.0], [0.0]])]
    function = many if "vectorized" in options else of_one
    found = []
    for repeat in range(2):
        store = EvaluationStore(tmp_path / "run.sqlite")
        box = black_box(function, each=["theta", "y"], store=store, name="of_one", **options)
        log_density, counts = model_of(box).compile_logp(), Calls()
        with counts.counting():
            found.append([log_density(point) for point in points])
        assert counts.made.total() == (4 if repeat == 0 else 0)
        assert store.summary()["evaluations"] == 4
    expected = model_of(black_box(of_one, each=["theta", "y"], shape=())).compile_logp()
    for values in found:
        np.testing.assert_allclose(values, [expected(point) for point in points], rtol=1e-12)


def test_unknown_groups_of_a_store_are_one_batch():
    sizes = []

    def of_many(theta, y, sd):
        sizes.append(len(theta))
        return many(theta, y, sd)

    box = black_box(of_many, each=["theta", "y"], vectorized=True, store=EvaluationStore())
    log_density, other = model_of(box).compile_logp(), THETA.copy()
    other[1:] += 0.5
    for theta in (THETA, other, THETA):
        log_density({"theta": theta, "sd_log__": 0.0})
    assert sizes == [3, 2]


def test_a_repeated_run_with_a_store_calls_nothing(tmp_path):
    found, n_calls = [], []
    for _ in range(2):
        calls, store = [], EvaluationStore(tmp_path / "run.sqlite")
        box = black_box(counted(calls), each=["theta", "y"], store=store)
        found.append(drawn_by_blocks(blocks_of(box, 3))[0])
        n_calls.append(len(calls))
    np.testing.assert_array_equal(*found)
    assert n_calls[0] > 0 and n_calls[1] == 0


def test_a_store_tells_large_data_apart_by_a_digest_and_shares_small_values():
    store, calls, n = EvaluationStore(), [], 5000

    def of_data(theta, y):
        calls.append(theta)
        return -0.5 * np.sum((y - theta) ** 2)

    for y in (np.ones((3, n)), np.tile(np.r_[np.ones(n - 1), 2.0], (3, 1))):
        with pm.Model() as model:
            theta = pm.Normal("theta", 0.0, 1.0, shape=3)
            pm.Potential("p", black_box(of_data, each=["theta", "y"], store=store)(theta, y))
        log_density = model.compile_logp(model.potentials, sum=False)
        for _ in range(2):
            [found] = log_density({"theta": np.arange(3.0)})
            expected = [of_data(t, row) for t, row in zip(np.arange(3.0), y, strict=True)]
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert len(calls) == 2 * 3 + 12  # 12 are those of the test
    rows = store.read(store.model_number({"function": black_box_name(of_data)}))
    assert len(rows) == 6 and all(len(row.point) < 10 for row in rows)


def black_box_name(function):
    return f"{function.__module__}.{function.__qualname__}"


def test_a_value_of_an_ordinary_call_is_that_of_a_group():
    calls, store = [], EvaluationStore()
    function = counted(calls)
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=2)
        pm.Potential("p", black_box(function, store=store)(theta, Y[1], 1.0))
    model.compile_logp()({"theta": THETA[1]})
    box = black_box(function, each=["theta", "y"], store=store)
    model_of(box).compile_logp()({"theta": THETA, "sd_log__": 0.0})
    assert calls == [-1.0, 0.5, 0.0]


def test_failures_and_errors_of_groups_are_stored_as_such():
    store, calls = EvaluationStore(), []

    def of_theta(theta):
        calls.append(theta[0])
        if theta[0] > 5.0:
            raise ValueError("a bug")
        return curve_of_one(theta).sum()

    box = black_box(of_theta, each="theta", failures=ArithmeticError, store=store, name="f")
    with pm.Model() as model:
        pm.Potential("p", box(pm.Normal("theta", 0.0, 1.0, shape=(3, 2))))
    log_density, failing, wrong = model.compile_logp(), THETA.copy(), THETA.copy()
    failing[1, 0], wrong[1, 0] = -3.0, 6.0
    for _ in range(2):
        assert log_density({"theta": failing}) == -np.inf
        with pytest.raises(ValueError, match="a bug"):
            log_density({"theta": wrong})
    assert calls == [0.5, -3.0, 0.0, 6.0, 6.0]
    told = [row.failure for row in store.read(store.model_number({"function": "f"}))]
    assert [t is None for t in told] == [True, False, True, False, False]
    assert "ArithmeticError: too low" in told[1] and "a bug" in told[3]


def test_a_store_of_a_step_knows_why_a_group_failed_that_was_known(tmp_path):
    box = black_box(
        lambda theta: curve_of_one(theta).sum(), each="theta", failures=ArithmeticError, shape=()
    )
    with pm.Model() as model:
        pm.Potential("p", box(pm.Normal("theta", 0.0, 1.0, shape=(3, 2))))
    log_density, store = model.compile_logp(), EvaluationStore()
    number, failing = store.model_number({"function": "f"}), THETA.copy()
    failing[1, 0] = -3.0
    for first in (0.5, 0.6):
        failing[0, 0] = first
        point = failing.copy()
        store.timed(number, "", point.ravel(), lambda point=point: log_density({"theta": point}))
    told = [row.failure for row in store.read(number)]
    assert all("ArithmeticError: too low" in one for one in told)


def test_a_store_wraps_a_black_box_with_groups():
    calls, store = [], EvaluationStore()
    box = store.wrap(black_box(counted(calls), each=["theta", "y"]), name="of_one")
    log_density = model_of(box).compile_logp()
    for _ in range(3):
        log_density({"theta": THETA, "sd_log__": 0.0})
    assert calls == [0.5, -1.0, 0.0]


def test_curves_are_refused_with_a_store():
    with pytest.raises(ValueError, match="of one number"):
        black_box(curve_of_one, each="theta", shape=4, store=EvaluationStore())
    box = black_box(curve_of_one, each="theta", store=EvaluationStore())
    with pm.Model() as model:
        pm.Potential("p", box(pm.Normal("theta", 0.0, 1.0, shape=(3, 2))))
    with pytest.raises(ValueError, match="return one number"):
        model.compile_logp()({"theta": THETA})
