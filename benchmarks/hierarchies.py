"""Hierarchies whose log-likelihood is a sum of black boxes, one for each group."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from scipy.integrate import solve_ivp
from scipy.optimize import least_squares
from scipy.special import expit

from benchmarks.common import SEED, heading, show, write
from benchmarks.sampling import REFERENCE, dataset, four_chains, n_evaluations
from pymc_kameleon import KameleonStep, SurrogateHMCStep, black_box

__all__ = [
    "MODELS",
    "STEPS",
    "add_arguments",
    "failing",
    "odes",
    "participants",
    "population",
    "run",
]

HALF_LOG_2_PI = 0.5 * np.log(2.0 * np.pi)

# Populations --------------------------------------------------------------------------------------

DOSE = 100.0
HOURS = np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 24.0])
PATIENTS = np.array([0.0, 1.0, 3.0]), np.array([0.4, 0.25, 0.2]), 0.12
"""Mean and standard deviations of log absorption, log clearance and log volume; of the error."""


def log_concentration(theta: np.ndarray) -> np.ndarray:
    """Log concentration of one person at `HOURS` (8,) after a dose that is absorbed.

    D a (exp(-k t) - exp(-a t)) / (V (a - k)) with k the clearance over V; written with the smaller
    rate outside, it has its limit where a and k are equal.
    """
    absorption, elimination = np.exp(theta[0]), np.exp(theta[1] - theta[2])
    apart = abs(absorption - elimination) * HOURS
    near = apart < 1e-5
    safe = np.where(near, 1.0, apart)
    shape = np.where(near, 1.0 - 0.5 * apart, -np.expm1(-safe) / safe)
    smaller = min(absorption, elimination)
    return np.log(DOSE) + theta[0] - theta[2] + np.log(HOURS * shape) - smaller * HOURS


def log_concentrations(theta):
    """Write `log_concentration` of all persons in PyTensor, for gradients: (n_groups, 8)."""
    absorption, elimination = pt.exp(theta[:, :1]), pt.exp(theta[:, 1:2] - theta[:, 2:])
    apart = abs(absorption - elimination) * HOURS
    near = apart < 1e-5
    safe = pt.switch(near, 1.0, apart)
    shape = pt.switch(near, 1.0 - 0.5 * apart, -pt.expm1(-safe) / safe)
    smaller = pt.minimum(absorption, elimination)
    return np.log(DOSE) + theta[:, :1] - theta[:, 2:] + pt.log(HOURS * shape) - smaller * HOURS


def normal_log_likelihood(curve: Callable, theta, y, s) -> float:
    """Log density of the observations `y` of one group around its curve."""
    residuals = (y - curve(theta)) / s
    return -0.5 * residuals @ residuals - len(y) * (np.log(s) + HALF_LOG_2_PI)


def patient(theta, y, s):
    """Log-likelihood of one person."""
    return normal_log_likelihood(log_concentration, theta, y, s)


@cache
def patients(n_groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate persons: their parameters (n_groups, 3) and log concentrations (n_groups, 8)."""
    mean, sd, error = PATIENTS
    rng = np.random.default_rng([SEED, seed, n_groups])
    theta = rng.normal(mean, sd, (n_groups, 3))
    curves = np.array([log_concentration(row) for row in theta])
    return theta, curves + error * rng.standard_normal(curves.shape)


def hierarchy(n_groups: int, centre: np.ndarray, centred: bool = True):
    """Return parameters `theta` (n_groups, 3) of groups, normal around `mu`, and the error `s`."""
    mu = pm.Normal("mu", centre, 1.0, shape=3)
    sd = pm.HalfNormal("sd", 0.5, shape=3)
    s = pm.HalfNormal("s", 0.5)
    if centred:
        return pm.Normal("theta", mu, sd, shape=(n_groups, 3)), s
    offset = pm.Normal("offset", 0.0, 1.0, shape=(n_groups, 3))
    return pm.Deterministic("theta", mu + sd * offset), s


def population(
    n_groups: int,
    centred: bool = True,
    as_curve: bool = False,
    differentiable: bool = False,
    seed: int = 0,
) -> pm.Model:
    """Build a model of how a drug is absorbed and eliminated in `n_groups` persons.

    The black box is the log-likelihood of a person, or the log curve of a person. With
    `differentiable` it is written in PyTensor: the posterior is the same.
    """
    _, y = patients(n_groups, seed)
    with pm.Model() as model:
        theta, s = hierarchy(n_groups, PATIENTS[0], centred)
        if differentiable:
            pm.Normal("y", log_concentrations(theta), s, observed=y)
        elif as_curve:
            curve = black_box(log_concentration, each="theta")
            pm.Normal("y", curve(theta), s, observed=y)
        else:
            log_likelihood = black_box(patient, each=["theta", "y"])
            pm.Potential("likelihood", log_likelihood(theta, y, s))
    return model


# Failures -----------------------------------------------------------------------------------------

BEYOND = 1.6
"""Posterior standard deviations from the mean to the plane beyond which a solver fails, about."""


def failing(n_groups: int = 12, differentiable: bool = False, seed: int = 0, **options) -> pm.Model:
    """Build a `population` in which the solver of one person fails beyond a plane.

    The posterior is 0 there, as it is with `differentiable`.
    """
    _, y = patients(n_groups, seed)
    person, limit = failure(n_groups, seed)
    if differentiable:
        model = population(n_groups, differentiable=True, seed=seed, **options)
        with model:
            theta = model["theta"]
            fails = theta[person, 0] + theta[person, 1] > limit
            pm.Potential("ran", pt.switch(fails, -np.inf, 0.0))
        return model

    def unstable(theta, y, s, i):
        if i == person and theta[0] + theta[1] > limit:
            raise ArithmeticError("the solver diverged")
        return patient(theta, y, s)

    log_likelihood = black_box(unstable, each=["theta", "y", "i"], failures=ArithmeticError)
    with pm.Model() as model:
        theta, s = hierarchy(n_groups, PATIENTS[0], **options)
        pm.Potential("likelihood", log_likelihood(theta, y, s, np.arange(n_groups)))
    return model


@cache
def failure(n_groups: int, seed: int) -> tuple[int, float]:
    """Person whose solver fails, and the largest log absorption plus log clearance where it runs.

    It is the person for whom that sum is largest, so that the solver runs at the model's starting
    point. The posterior of this person alone, given the true population, says where.
    """
    truth, y = patients(n_groups, seed)
    person = int(np.argmax(truth[:, :2].sum(axis=1)))
    mean, sd, error = PATIENTS

    def residuals(theta):
        fit = (y[person] - log_concentration(theta)) / error
        return np.concatenate([fit, (theta - mean) / sd])

    found = least_squares(residuals, truth[person], xtol=1e-12)
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return person, float(found.x[:2].sum() + BEYOND * np.sqrt(covariance[:2, :2].sum()))


# Differential equations ---------------------------------------------------------------------------

READINGS = np.arange(2.0, 26.0, 2.0)
PLATES = np.log([0.6, 4.0, 1.0]), np.array([0.2, 0.3, 0.15]), 0.1
"""Mean and standard deviations of log rate, log lag and log capacity; of the error."""

BEGIN = np.log(0.01)
SECONDS_A_STEP = 8e-6
"""Of a call of the solver for each step that it makes at most, about."""


def log_growth(theta: np.ndarray, seconds: float = 0.0) -> np.ndarray:
    """Solve for the log size of a culture at `READINGS` (12,): logistic growth after a lag.

    x' = r q / (1 + q) (1 - exp(x) / K), q' = r q (Baranyi and Roberts 1994). The longest step of
    the solver is such that a call takes about `seconds`.
    """
    rate, lag, capacity = np.exp(theta)
    log_q = -rate * lag - np.log(-np.expm1(-rate * lag))

    def derivative(t, x):
        return rate * expit(log_q + rate * t) * (1.0 - np.exp(x) / capacity)

    span = 0.0, READINGS[-1]
    longest = span[1] * SECONDS_A_STEP / seconds if seconds else np.inf
    options = {"rtol": 1e-10, "atol": 1e-12, "max_step": longest}
    found = solve_ivp(derivative, span, [BEGIN], "LSODA", READINGS, **options)
    if not found.success:
        raise ArithmeticError(found.message)
    return found.y[0]


def log_growths(theta):
    """Write the closed form of `log_growth` of all plates in PyTensor: (n_groups, 12)."""
    rate, lag, capacity = (pt.exp(theta[:, i : i + 1]) for i in range(3))
    grown = pt.logaddexp(pt.log1mexp(-rate * lag), rate * (READINGS - lag))
    # K N exp(g) / (K + N (exp(g) - 1)), with N the size at the beginning.
    below = pt.logaddexp(pt.log(capacity - np.exp(BEGIN)), BEGIN + grown)
    return theta[:, 2:] + BEGIN + grown - below


@cache
def plates(n_groups: int, seed: int) -> np.ndarray:
    """Simulate log sizes (n_groups, 12)."""
    mean, sd, error = PLATES
    rng = np.random.default_rng([SEED, seed, n_groups])
    curves = np.array([log_growth(row) for row in rng.normal(mean, sd, (n_groups, 3))])
    return curves + error * rng.standard_normal(curves.shape)


def odes(
    n_groups: int = 20,
    seconds: float = 0.01,
    cores: int = 1,
    centred: bool = True,
    differentiable: bool = False,
    seed: int = 0,
) -> pm.Model:
    """Build a model of the growth of cultures on plates, each the solution of an equation."""
    y = plates(n_groups, seed)

    def plate(theta, y, s):
        return normal_log_likelihood(partial(log_growth, seconds=seconds), theta, y, s)

    with pm.Model() as model:
        theta, s = hierarchy(n_groups, PLATES[0], centred)
        if differentiable:
            pm.Normal("y", log_growths(theta), s, observed=y)
        else:
            options = {"each": ["theta", "y"], "failures": ArithmeticError, "cores": cores}
            pm.Potential("likelihood", black_box(plate, **options)(theta, y, s))
    return model


# Drift diffusion ----------------------------------------------------------------------------------


@cache
def trials(n_groups: int, n_trials: int, seed: int):
    """Simulate decisions of participants, whose drift and threshold vary, with HSSM."""
    import hssm
    import pandas as pd

    rng = np.random.default_rng([SEED, seed])
    tables = []
    for i in range(n_groups):
        drift, threshold = rng.normal(0.5, 0.3), np.exp(rng.normal(np.log(1.5), 0.15))
        truth = {"v": drift, "a": threshold, "z": 0.5, "t": 0.3}
        table = hssm.simulate_data(model="ddm", theta=truth, size=n_trials, random_state=SEED + i)
        tables.append(table.assign(participant_id=i))
    return pd.concat(tables, ignore_index=True)


def participants(
    n_groups: int = 30,
    n_trials: int = 40,
    centred: bool = False,
    differentiable: bool = False,
    seed: int = 0,
) -> pm.Model:
    """Build the PyMC model of HSSM: drift and threshold of each participant, a black box.

    With `differentiable` it is HSSM's series in PyTensor, of the same likelihood, on which NUTS
    takes more than seven minutes: leave it out by `--no-reference`.
    """
    import hssm

    terms = [{"name": name, "formula": f"{name} ~ 1 + (1|participant_id)"} for name in "va"]
    model = hssm.HSSM(
        trials(n_groups, n_trials, seed),
        model="ddm",
        loglik_kind="analytical" if differentiable else "blackbox",
        include=terms,
        noncentered=not centred,
    )
    return model.pymc_model


# Measurements -------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable, Callable]] = {
    "population": (population, partial(population, differentiable=True)),
    "population, not centred": (
        partial(population, centred=False),
        partial(population, differentiable=True),
    ),
    "curves": (partial(population, as_curve=True), partial(population, differentiable=True)),
    "failing": (failing, partial(population, differentiable=True)),
    "odes": (odes, partial(odes, differentiable=True)),
    "participants": (participants, partial(participants, differentiable=True)),
    "participants, centred": (
        partial(participants, centred=True),
        partial(participants, differentiable=True),
    ),
}
"""Name -> the model, and one with the same posterior and gradients; both of a number of groups."""

STEPS: dict[str, Callable] = {
    "SurrogateHMCStep": SurrogateHMCStep,
    "KameleonStep": KameleonStep,
    REFERENCE: pm.DEMetropolisZ,
    "Slice": pm.Slice,
}

COLUMNS = "model groups step d calls ESS R-hat ESS/1000 ESS/1000+t mean-error seconds CPU-s".split()


def add_arguments(parser):
    default = [name for name in MODELS if "participants" not in name or find_spec("hssm")]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=default)
    parser.add_argument("--groups", nargs="+", type=int, default=[12], help="numbers of groups")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["SurrogateHMCStep"])
    parser.add_argument("--tune", type=int, help="draws of tuning, by default those of the step")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=1, help="chains at once")
    parser.add_argument("--no-reference", action="store_true", help="no NUTS, no mean-error")
    parser.add_argument(
        "--references", type=Path, help="folder that keeps the draws of NUTS from run to run"
    )


def cpu_seconds() -> float:
    """Seconds of this process, and of those that it waited for."""
    return sum(os.times()[:4])


def parameters(model: pm.Model) -> list[str]:
    """Names of free variables, and of parameters of groups that are made of them.

    Not those of HSSM's parameters of each trial, which are as many as there are data.
    """
    made = [v.name for v in model.deterministics if v.name == "theta" or "|" in v.name]
    return [variable.name for variable in model.free_RVs] + made


def quality(draws: xr.Dataset) -> dict[str, float]:
    """Smallest bulk effective size and largest R-hat of all entries of all variables."""
    return {
        "ESS": min(float(v.min()) for v in az.ess(draws).data_vars.values()),
        "R-hat": max(float(v.max()) for v in az.rhat(draws).data_vars.values()),
    }


def nuts(
    name: str, n_groups: int, folder: Path | None = None, *, draws: int = 1500, tune: int = 1000
) -> tuple[xr.Dataset, dict]:
    """Draws of the same posterior by NUTS, and what they took."""
    _, make = MODELS[name]
    kind = next((k for k in ("odes", "participants") if name.startswith(k)), "population")
    path = None if folder is None else folder / f"{kind}_{n_groups}.nc"
    if path is not None and path.exists():
        posterior = xr.load_dataset(path, engine="h5netcdf")
    else:
        model, wall, cpu = make(n_groups), time.perf_counter(), cpu_seconds()
        with model:
            options = {"var_names": parameters(model), "random_seed": SEED}
            result = four_chains(pm.NUTS(), draws=draws, tune=tune, **options)
        posterior = dataset(result).load()
        posterior.attrs = {
            "seconds": time.perf_counter() - wall,
            "CPU-s": cpu_seconds() - cpu,
            "divergences": int(dataset(result, "sample_stats")["diverging"].sum()),
            "gradients": float(dataset(result, "sample_stats")["n_steps"].sum()),
            "gradients of tuning": float(dataset(result, "warmup_sample_stats")["n_steps"].sum()),
        }
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            posterior.to_netcdf(path, engine="h5netcdf")
    row = {"model": name, "groups": n_groups, "step": "NUTS"} | quality(posterior)
    row |= {key: float(posterior.attrs[key]) for key in ("seconds", "CPU-s", "divergences")}
    return (runs_only(posterior, n_groups) if name == "failing" else posterior), row


def runs_only(posterior: xr.Dataset, n_groups: int, seed: int = 0) -> xr.Dataset:
    """Draws of `failing` from those of `population`: the ones where the solver runs, as a chain."""
    person, limit = failure(n_groups, seed)
    flat = posterior.stack(sample=("chain", "draw")).reset_index("sample", drop=True)
    sums = flat["theta"].isel(theta_dim_0=person, theta_dim_1=slice(0, 2)).sum("theta_dim_1")
    kept = flat.isel(sample=np.flatnonzero(sums.values <= limit))
    print(f"the solver runs in {kept.sizes['sample'] / flat.sizes['sample']:.1%} of the posterior")
    return kept.rename(sample="draw").expand_dims("chain")


def describe(posterior: xr.Dataset):
    """Print means and standard deviations of what all groups have in common."""
    for name, draws in posterior.data_vars.items():
        found = [f(("chain", "draw")).values for f in (draws.mean, draws.std)]
        if found[0].size <= 3:
            print("{}: mean {}, sd {}".format(name, *(np.round(one, 3) for one in found)))


def mean_error(draws: xr.Dataset, reference: xr.Dataset) -> float:
    """Largest difference of two means in posterior standard deviations, of all that both have."""
    over = ("chain", "draw")
    errors = [
        float(abs((draws[v].mean(over) - reference[v].mean(over)) / reference[v].std(over)).max())
        for v in draws.data_vars
        if v in reference
    ]
    return max(errors)


def measure(name: str, n_groups: int, step: str, seed: int, options: dict, reference) -> dict:
    """Sample once with the plain call of a step."""
    model = MODELS[name][0](n_groups)
    dim = sum(np.size(value) for value in model.initial_point().values())
    wall, cpu = time.perf_counter(), cpu_seconds()
    with model:
        options = options | {"var_names": parameters(model), "random_seed": SEED + seed}
        idata = four_chains(STEPS[step](), **options)
    seconds, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    after, tuning = (
        n_evaluations(step, dataset(idata, group), dim)
        for group in ("sample_stats", "warmup_sample_stats")
    )
    draws = dataset(idata)
    row = {"model": name, "groups": n_groups, "step": step, "seed": seed, "d": dim}
    row |= {"calls": after + tuning, "of tuning": tuning} | quality(draws)
    row["ESS/1000"] = 1000.0 * row["ESS"] / max(after, 1)
    row["ESS/1000+t"] = 1000.0 * row["ESS"] / (after + tuning)
    if reference is not None:
        row["mean-error"] = mean_error(draws, reference)
    return row | {"seconds": seconds, "CPU-s": cpu}


def in_markdown(rows: list[dict], columns: list[str]) -> str:
    """Table of the pages of documentation; a missing key is an empty cell."""

    def cell(value):
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return str(value)

    table = [columns, ["---"] * len(columns)]
    table += [[cell(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def run(arguments):
    """Print and write the efficiency of every step on every hierarchy."""
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    lines = heading(
        "Hierarchies of black boxes",
        "Plain calls, four chains. calls: evaluations of the likelihood of all groups, tuning "
        "included. ESS, R-hat: smallest bulk effective size and largest R-hat of all parameters, "
        "those of groups included. ESS/1000: effective draws for 1000 evaluations after tuning, "
        "and for 1000 of all (+t). mean-error: largest difference to the means of NUTS, on the "
        "same posterior with gradients, in standard deviations. Compiling is in the seconds.",
    )
    options = {"draws": arguments.draws, "cores": arguments.cores}
    if arguments.tune is not None:
        options["tune"] = arguments.tune
    rows = []
    for name in arguments.models:
        for n_groups in arguments.groups:
            reference = None
            if not arguments.no_reference:
                reference, row = nuts(name, n_groups, arguments.references)
                rows.append(row)
                show([row])
                describe(reference)
            for step in arguments.steps:
                for seed in range(arguments.seeds):
                    rows.append(measure(name, n_groups, step, seed, options, reference))
                    show(rows[-1:])
                    write(rows, lines, arguments.output / "hierarchies.csv")
    print(in_markdown(rows, COLUMNS))
