"""The predator and prey model of Carpenter (2018), with its differential equation as a black box.

https://mc-stan.org/users/documentation/case-studies/lotka-volterra-predator-prey.html
"""

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.graph import Apply, Op
from scipy.integrate import ODEintWarning, odeint

__all__ = [
    "HARE_PELTS",
    "LYNX_PELTS",
    "PARAMETERS",
    "RATES",
    "YEARS",
    "LotkaVolterra",
    "lynx_hare_model",
    "solve_lotka_volterra",
]

SOLVER_TOLERANCE = 1e-8
SOLVER_MAX_STEPS = 2000
# Failures come back as NaN. A filter around each call would make Python forget which warnings it
# has shown already, and those of other code would be shown again and again.
warnings.filterwarnings("ignore", category=ODEintWarning, module=re.escape(__name__))

YEARS = np.arange(1900, 1921)
# Thousands of pelts collected by the Hudson's Bay Company.
# fmt: off
HARE_PELTS = np.array([
    30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1,
    40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7,
])
LYNX_PELTS = np.array([
    4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4,
    8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6,
])
# fmt: on
RATES = ("alpha", "beta", "gamma", "delta")
PARAMETERS = (*RATES, "u0", "v0", "sigma_hare", "sigma_lynx")


def _log_derivative(
    log_populations: np.ndarray, time: float, alpha: float, beta: float, gamma: float, delta: float
) -> tuple[float, float]:
    log_hares, log_lynx = log_populations.tolist()
    return alpha - beta * math.exp(log_lynx), delta * math.exp(log_hares) - gamma


def solve_lotka_volterra(parameters: np.ndarray, times: np.ndarray) -> np.ndarray:
    r"""Solve the Lotka--Volterra equations for the logarithms of both populations.

    .. math:: u' = (\alpha - \beta v) u, \qquad v' = (-\gamma + \delta u) v

    The logarithms are what the log-normal observations need, stay accurate where a population
    almost dies out, and take half the steps.

    Parameters
    ----------
    parameters : array of float, shape (6,)
        alpha, beta, gamma, delta (per year) and the populations u0 of hares and v0 of lynx at
        ``times[0]`` (thousands of pelts).
    times : array of float, shape (n_times,)
        Increasing times in years.

    Returns
    -------
    array of float, shape (n_times, 2)
        Logarithms of hares and lynx, all NaN where the solver fails.
    """
    *rates, hares, lynx = np.asarray(parameters, dtype=float).tolist()
    failed = np.full((len(times), 2), np.nan)
    if not (0 < hares < math.inf and 0 < lynx < math.inf):
        return failed
    try:
        solution, report = odeint(
            _log_derivative,
            [math.log(hares), math.log(lynx)],
            times,
            args=tuple(rates),
            rtol=SOLVER_TOLERANCE,
            atol=SOLVER_TOLERANCE,
            mxstep=SOLVER_MAX_STEPS,
            full_output=True,
        )
    except (ODEintWarning, OverflowError):
        return failed
    solved = report["message"] == "Integration successful." and np.isfinite(solution).all()
    return solution if solved else failed


class LotkaVolterra(Op):
    """A black box for PyTensor: log populations at fixed times, without a gradient.

    Parameters
    ----------
    times : sequence of float
        Times in years, the first one being that of the initial populations.
    """

    __props__ = ("times",)

    def __init__(self, times: Sequence[float]) -> None:
        self.times = tuple(float(time) for time in times)

    def make_node(self, parameters: Any) -> Apply:
        """Wrap a vector of the six parameters of :func:`solve_lotka_volterra`."""
        parameters = pt.cast(pt.as_tensor_variable(parameters), "float64")
        return Apply(self, [parameters], [pt.dmatrix(shape=(len(self.times), 2))])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        """Solve the equations."""
        outputs[0][0] = solve_lotka_volterra(inputs[0], np.asarray(self.times))


def lynx_hare_model() -> pm.Model:
    """Build the predator and prey model of the pelts of 1900 to 1920.

    Returns
    -------
    pymc.Model
        Eight parameters: the rates ``alpha``, ``beta``, ``gamma``, ``delta`` per year, the
        populations ``u0`` of hares and ``v0`` of lynx in 1900 in thousands of pelts, and the
        scales ``sigma_hare`` and ``sigma_lynx`` of the log-normal observations.
    """
    with pm.Model(coords={"year": YEARS}) as model:
        alpha = pm.TruncatedNormal("alpha", mu=1.0, sigma=0.5, lower=0.0)
        beta = pm.TruncatedNormal("beta", mu=0.05, sigma=0.05, lower=0.0)
        gamma = pm.TruncatedNormal("gamma", mu=1.0, sigma=0.5, lower=0.0)
        delta = pm.TruncatedNormal("delta", mu=0.05, sigma=0.05, lower=0.0)
        hares = pm.LogNormal("u0", mu=math.log(10.0), sigma=1.0)
        lynx = pm.LogNormal("v0", mu=math.log(10.0), sigma=1.0)
        sigma_hare = pm.LogNormal("sigma_hare", mu=-1.0, sigma=1.0)
        sigma_lynx = pm.LogNormal("sigma_lynx", mu=-1.0, sigma=1.0)
        solve = LotkaVolterra(YEARS - YEARS[0])
        log_mean = solve(pt.stack([alpha, beta, gamma, delta, hares, lynx]))
        pm.LogNormal("hare", log_mean[:, 0], sigma_hare, observed=HARE_PELTS, dims="year")
        pm.LogNormal("lynx", log_mean[:, 1], sigma_lynx, observed=LYNX_PELTS, dims="year")
    return model
