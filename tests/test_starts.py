"""Starting points: finite, dispersed and accepted by `pymc.sample`.

A Kolmogorov-Smirnov test fails at p < 1e-6, which is the probability of a false alarm of each.
"""

import warnings

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from models import PLAIN, begin, black_box, drive
from pymc.distributions.transforms import Interval, ordered
from pymc.exceptions import SamplingError
from pymc.initial_point import make_initial_point_fn
from scipy import stats

from pymc_kameleon import AdaptiveMetropolisStep, ParallelTemperingStep, SurrogateHMCStep
from pymc_kameleon.model.initial_points import PriorDraws, dispersed_starts, prior_sampler

FALSE_ALARM = 1e-6


@pytest.fixture(autouse=True)
def quick_compilation():
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


def hierarchical():
    with pm.Model(coords={"group": range(3)}) as model:
        mean = pm.Normal("mean", 0, 5)
        scale = pm.HalfNormal("scale", 2)
        group = pm.Normal("group_mean", mean, scale, dims="group")
        upper = pm.Uniform("upper", 0, scale, shape=2)
        pm.Normal("y", group + upper.sum(), 1.0, observed=np.arange(3.0))
    return model


def constrained():
    with pm.Model() as model:
        pm.Gamma("gamma", 2, 1, shape=(2, 2))
        pm.Uniform("interval", -1, 3)
        pm.Dirichlet("simplex", np.ones((2, 3)))
        pm.Normal("ordered", 0, 1, shape=7, transform=ordered)
        pm.ZeroSumNormal("zero_sum", shape=(2, 4))
        pm.LKJCholeskyCov("cholesky", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
        pm.VonMises("angle", 0, 1)
    return model


def with_discrete():
    with pm.Model() as model:
        rate = pm.Exponential("rate", 0.2)
        count = pm.Poisson("count", rate, shape=2)
        pm.Bernoulli("switch", 0.5)
        pm.Normal("y", count.sum(), 5.0, observed=3.0)
    return model


def without_priors():
    with pm.Model() as model:
        flat = pm.Flat("flat", shape=2)
        half_flat = pm.HalfFlat("half_flat")
        pm.CustomDist("custom", flat[0], logp=lambda value, mean: -((value - mean) ** 2))
        upper = pm.Uniform("upper", 0, half_flat)
        pm.CustomDist(
            "bounded",
            upper,
            logp=lambda value, bound: -value,
            transform=Interval(bounds_fn=lambda *inputs: (0, inputs[-1])),
            initval=1e-3,
        )
        pm.CustomDist("whole", logp=lambda value: -1.0 * value, dtype="int64", initval=2)
        pm.Flat("ordered", shape=3, transform=ordered)
        pm.Normal("child", flat, half_flat)
    return model


def imputed():
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 1)
        data = np.ma.masked_invalid([0.5, np.nan, 1.5, np.nan])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pm.LogNormal("y", mean, 1, observed=data)
    return model


# The older PyMC is asked for what its initial points treat in a way of its own.
MODELS = [
    pytest.param(hierarchical, marks=pytest.mark.numerics),
    pytest.param(constrained, marks=pytest.mark.numerics),
    with_discrete,
    without_priors,
    imputed,
]
every_model = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


@pytest.mark.slow
@every_model
def test_starts_are_finite_and_distinct_and_chains_begin_there(build):
    model = build()
    starts = dispersed_starts(model, 3, random_seed=1)
    log_density = model.compile_logp()
    for start in starts:
        assert list(start) == [variable.name for variable in model.free_RVs]
        for variable in model.free_RVs:
            value = start[variable.name]
            assert isinstance(value, np.ndarray) and value.dtype == variable.dtype
            assert np.isfinite(value).all()
        assert start.get("whole", 2) == 2  # without a prior it stays where it is
        assert np.isfinite(log_density(make_initial_point_fn(model=model, overrides=start)(0)))
    for variable in model.free_RVs:
        if variable.dtype.startswith("float"):
            first, second, third = (start[variable.name] for start in starts)
            assert not np.array_equal(first, second) and not np.array_equal(second, third)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        idata = pm.sample(
            draws=2,
            tune=0,
            chains=3,
            cores=1,
            step=pm.Metropolis(scaling=1e-13, blocked=True),
            initvals=starts,
            random_seed=3,
            progressbar=False,
            compute_convergence_checks=False,
        )
    for chain, start in enumerate(starts):
        for name, value in start.items():
            first = idata["posterior"][name].values[chain, 0]
            np.testing.assert_allclose(first, value, rtol=1e-6, atol=1e-8)


@pytest.mark.numerics
def test_the_seed_decides():
    with pm.Model() as model:
        pm.Normal("child", pm.Normal("mean", 0, 1), 1)
        pm.Flat("flat")

    def flat(seed):
        starts = dispersed_starts(model, 2, random_seed=seed)
        return np.concatenate([np.ravel(value) for start in starts for value in start.values()])

    np.testing.assert_array_equal(flat(8), flat(8))
    np.testing.assert_array_equal(flat(np.random.default_rng(8)), flat(np.random.default_rng(8)))
    assert not np.array_equal(flat(8), flat(9))
    assert not np.array_equal(flat(None), flat(None))


def test_starts_are_prior_draws_given_a_finite_log_density():
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 10)
        pm.Normal("child", mean, 1)
        pm.Potential("positive", pt.switch(mean > 0, 0.0, -np.inf))
    starts = dispersed_starts(model, 1000, random_seed=10)
    mean, child = (np.array([start[name] for start in starts]) for name in ("mean", "child"))
    assert stats.kstest(mean, stats.halfnorm(0, 10).cdf).pvalue > FALSE_ALARM
    assert stats.kstest(child - mean, stats.norm.cdf).pvalue > FALSE_ALARM


@pytest.mark.numerics
def test_flat_variables_are_jittered_in_the_unconstrained_space():
    with pm.Model() as model:
        pm.Flat("flat", initval=3.0)
        pm.HalfFlat("half_flat", initval=np.e)
    starts = dispersed_starts(model, 1000, random_seed=11)
    flat, half_flat = (np.array([start[name] for start in starts]) for name in model.named_vars)
    jitter = stats.uniform(-2, 4).cdf
    assert stats.kstest(flat - 3, jitter).pvalue > FALSE_ALARM
    assert stats.kstest(np.log(half_flat) - 1, jitter).pvalue > FALSE_ALARM


def test_starts_shrink_towards_the_default():
    # The count can be right only at the default, so that no prior draw passes. Where points are
    # 2^-k of the distance away, |draw - 2| < 0.01 2^k; at k = 10 this fails with probability 1e-16.
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, initval=2.0)
        k = pm.Poisson("k", 1e6, initval=1)
        pm.Potential("narrow", pt.switch((abs(x - 2) < 0.01) & pt.eq(k, 1), 0.0, -np.inf))
    starts = dispersed_starts(model, 2, random_seed=12)
    assert all(abs(start["x"] - 2) < 0.01 and start["k"] == 1 for start in starts)
    assert starts[0]["x"] != starts[1]["x"]


def test_priors_that_cannot_always_be_drawn():
    with pm.Model() as model:
        scale = pm.Normal("scale", 0, 1, shape=12, initval=np.full(12, 2.5))
        pm.Normal("x", 0, scale)
    start = dispersed_starts(model, 1, random_seed=13)[0]
    assert np.all(start["scale"] > 0)


def test_errors_name_the_variables_at_fault():
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        pm.Potential("impossible", pt.log(-(x**2)))
        pm.Poisson("y", 2.0, observed=-1)
    with pytest.raises(ValueError, match=r"At fault: y, impossible\. .*initval"):
        dispersed_starts(model, 1, random_seed=15)


def test_chains_must_be_a_positive_integer():
    for chains in (0, -1, 1.5, True, "4"):
        with pytest.raises(ValueError, match="chains="):
            dispersed_starts(hierarchical(), chains)
    with pm.Model() as model:
        pm.Normal("y", observed=1.0)
    with pytest.raises(ValueError, match="no free variables"):
        dispersed_starts(model, 2)


# many draws at a time -----------------------------------------------------------------------------


def hierarchy():
    with pm.Model() as model:
        a, s = pm.Normal("a"), pm.HalfCauchy("s", 2.0)
        b = pm.Normal("b", a, s, shape=3)
        pm.MvNormal("c", b, np.eye(3) + 0.5)
        pm.Uniform("u", a - 1.0, a + s, shape=(2, 1))
        pm.GaussianRandomWalk("w", s, init_dist=pm.Normal.dist(a, 1.0), steps=3)
    return model


def shapes():
    with pm.Model() as model:
        share = pm.Dirichlet("share", np.array([1.0, 2.0, 3.0]))
        pm.ZeroSumNormal("zero", shape=4)
        pm.Truncated("cut", pm.Normal.dist(share.sum(), 1.0), lower=0.5)
        middle = pm.Normal("cuts", [0.0, 1.0], 1.0, transform=ordered, initval=[0.0, 1.0])
        pm.Deterministic("d", middle.sum())
    return model


def cholesky():
    with pm.Model() as model:
        pm.LKJCholeskyCov("lkj", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
    return model


@pytest.mark.parametrize(
    ("build", "at_once"), [(hierarchy, True), (shapes, True), (cholesky, False)]
)
def test_many_draws_are_as_many_single_ones(build, at_once, monkeypatch):
    """Distributions and correlations of ranks, from draw to draw too, are those of single draws.

    The least of up to 17 p-values above 1e-6 / 17; correlations within 5 standard errors of zero
    or each other.
    """
    model, n = build(), 3000
    names = [value.name for value in model.value_vars]
    sampler = prior_sampler(model, names)
    assert sampler.is_batched == at_once
    rows = sampler(n, np.random.default_rng(1))
    np.testing.assert_array_equal(rows, sampler(n, np.random.default_rng(1)))
    if not at_once:
        return
    monkeypatch.delattr("pymc.distributions.shape_utils.change_dist_size")
    single = prior_sampler(model, names)
    assert not single.is_batched
    expected = single(n, np.random.default_rng(2))
    assert rows.shape[1] == expected.shape[1]
    p_values = [stats.ks_2samp(*columns).pvalue for columns in zip(rows.T, expected.T, strict=True)]
    assert min(p_values) > 1e-6 / len(p_values), p_values
    ranks = [stats.rankdata(values, axis=0) for values in (rows, expected)]
    correlations = [np.corrcoef(r.T) for r in ranks]
    assert np.abs(correlations[0] - correlations[1]).max() < 5.0 * np.sqrt(2.0 / n)
    next_one = np.corrcoef(ranks[0][:-1].T, ranks[0][1:].T)[: rows.shape[1], rows.shape[1] :]
    assert np.abs(next_one).max() < 5.0 / np.sqrt(n)


# where a model is possible ------------------------------------------------------------------------


def cut_points():
    """Six cut points that have to be in order, which their prior does not say: one draw in 720."""
    with pm.Model() as model:
        cutpoints = pm.Normal("cutpoints", 0.0, 3.0, shape=6)
        eta = pm.Normal("eta", 0.0, 1.0)
        below = pm.math.sigmoid(cutpoints - eta)
        p = pt.concatenate([below[:1], pt.diff(below), 1.0 - below[-1:]])
        pm.Potential("y", pt.log(p).sum())
    return model


def log_ordered():
    """Elements that are the same at PyMC's default, whose transform is -inf there."""
    with pm.Model() as model:
        pm.HalfNormal("levels", 1.0, shape=3, transform=ordered)
    return model


@pytest.mark.parametrize("build", [cut_points, log_ordered])
def test_starts_in_order(build):
    model = build()
    name = model.free_RVs[0].name
    for start in dispersed_starts(model, 3, random_seed=1):
        assert np.all(np.diff(start[name]) > 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("build", [cut_points, log_ordered])
@pytest.mark.parametrize("step_class", [AdaptiveMetropolisStep, SurrogateHMCStep])
def test_a_step_finds_where_a_vector_is_in_order(build, step_class, quick_fits):
    model = build()
    step = begin(step_class(model=model, compile_kwargs=PLAIN), 1, tune=20)
    draws, _, _ = drive(step, model.initial_point(), 20, tune=20)
    assert np.isfinite(draws).all()
    assert np.isfinite(step.chain.value[:3]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_impossible_model_says_where_and_what_to_write():
    with pm.Model() as model:
        cutpoints = pm.Normal("cutpoints", 0.0, 1.0, shape=6)
        pm.Normal("scale", 0.0, 1.0)
        pm.Potential("y", pt.log(-pt.sum(cutpoints**2) - 1.0))
    message = (
        r"At fault: y\..*initvals=\{\"cutpoints\": np.linspace\(-2, 2, 6\)\}.*transforms.ordered"
    )
    with pytest.raises(ValueError, match=message):
        dispersed_starts(model, 1, random_seed=1)
    step = begin(AdaptiveMetropolisStep(model=model, compile_kwargs=PLAIN), 1, tune=20)
    with pytest.raises(SamplingError, match=r"nor at any of \d+ points.*" + message):
        step.step(model.initial_point())
    begin(step, 1, tune=0)
    step.tune = False
    with pytest.raises(SamplingError, match=r"dispersed_starts\(model, chains\)"):
        step.step(model.initial_point())


# draws from the prior belong to a chain -----------------------------------------------------------


def first_points(step_class, seed, **options):
    """Where a chain asks for the log density before its first draw."""
    asked = []

    def log_density(x):
        asked.append(x.copy())
        return -0.5 * np.sum(x**2)

    model, _ = black_box(function=log_density)
    step = begin(step_class(model=model, **options), seed, tune=30)
    asked.clear()
    step.step(model.initial_point())
    return np.array(asked)


@pytest.mark.parametrize(
    ("step_class", "options"),
    [
        (AdaptiveMetropolisStep, {"steps_per_draw": 1}),
        (SurrogateHMCStep, {}),
        (ParallelTemperingStep, {"n_temperatures": 3, "n_moves": 1}),
    ],
)
def test_chains_share_no_draw_from_the_prior(step_class, options, quick_fits):
    """What is tried first is the same for one seed, and for another one only at the default."""
    one, again, other = (first_points(step_class, seed, **options) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    both = {x.tobytes() for x in one} & {x.tobytes() for x in other}
    assert len(one) > 2 and len(both) <= 1


def test_draws_follow_from_the_seed_alone():
    """Not from what was drawn before, nor where; of variables that cannot be drawn too."""
    for build in (hierarchical, without_priors):
        model = build()
        names = [value.name for value in model.continuous_value_vars]
        draws = PriorDraws(model, names)
        expected = PriorDraws(model, names)(4, 7, only_drawable=False)
        draws(3, 1, only_drawable=False)
        np.testing.assert_array_equal(draws(4, 7, only_drawable=False), expected)
        copied = cloudpickle.loads(cloudpickle.dumps(draws))
        np.testing.assert_array_equal(copied(4, 7, only_drawable=False), expected)
        assert not np.array_equal(draws(4, 8, only_drawable=False), expected)


def failing(rng=None, size=None):
    raise RuntimeError("a bug of the user")


@pytest.mark.parametrize(
    ("add", "level", "reason"),
    [
        (lambda: pm.Flat("x"), "INFO", "NotImplementedError"),
        (
            lambda: pm.CustomDist("x", logp=lambda v: -(v**2), random=failing),
            "WARNING",
            "RuntimeError: a bug of the user",
        ),
        (lambda: pm.Normal("x", 0.0, pm.Normal("s") - 9.0), "WARNING", "ValueError"),
    ],
)
def test_a_prior_without_draws_is_logged(add, level, reason, caplog):
    with pm.Model() as model, caplog.at_level("INFO", logger="pymc.kameleon"):
        add()
        assert prior_sampler(model, ["x"]) is None
    (record,) = [r for r in caplog.records if "cannot be drawn from" in r.getMessage()]
    assert record.levelname == level
    assert reason in record.getMessage() and "The prior of x" in record.getMessage()
