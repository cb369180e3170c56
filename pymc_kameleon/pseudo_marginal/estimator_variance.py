"""Variance of the log-likelihood estimator of a model, and how many samples it needs."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pymc.model import Model, modelcontext

from pymc_kameleon.model.estimated_loglikelihood import draw_seeds, estimates
from pymc_kameleon.model.log_density import likelihood_terms
from pymc_kameleon.model.operations import has_black_box
from pymc_kameleon.model.transforms import unconstrained_point
from pymc_kameleon.validation import checked_integer, checked_number

RECOMMENDED = (1.0, 1.7)
"""Standard deviations of the log estimate between which a second of computing gives most effective
draws: 1 where the chain with the exact likelihood would mix fast, 1.7 where slowly."""

LONGEST_STRIDE = 30.0
"""Factor by which a number of samples changes at most from one measurement to the next."""

CLOSE = 0.15
"""Log distance from the aim at which a search ends."""

MEASUREMENTS = 8
"""At most so many numbers of samples are tried."""


@dataclass(frozen=True)
class EstimatorSD:
    """Standard deviation of the log-likelihood estimator at a point.

    Attributes
    ----------
    sd : float
        Standard deviation of the log of the estimate; infinite if any estimate is zero.
    standard_error : float
        Of `sd`.
    n_estimates : int
        Estimates drawn for it.
    n_zero : int
        How many of them are zero.
    n_samples : dict
        Term of the model -> number of importance samples or particles that it takes now; empty if
        no estimate says.
    recommended : dict or None
        Numbers for which the standard deviation is as aimed at; None if none was found.
    measured : pandas.DataFrame
        Every number that was tried: factor of the present one, sd, standard_error, n_zero.
    aim : float
    needs_more_for_zeros : bool
        Whether the recommended numbers are the fewest tried without estimates of zero, at a smaller
        standard deviation than the one aimed at.
    """

    sd: float
    standard_error: float
    n_estimates: int
    n_zero: int
    n_samples: dict[str, int]
    recommended: dict[str, int] | None
    measured: pd.DataFrame
    aim: float
    needs_more_for_zeros: bool = False

    def __float__(self):
        return self.sd

    def __str__(self):
        return "\n".join(filter(None, (self._precision(), self._advice())))

    def _precision(self):
        low, high = RECOMMENDED
        if self.n_zero:
            return f"{self.n_zero} of {self.n_estimates} estimates are zero: too few samples."
        verdict = "few" if self.sd > high else "many" if self.sd < low else None
        return (
            f"The log estimate has a standard deviation of {self.sd:.3g} ± "
            f"{self.standard_error:.2g}; {low:g} to {high:g} is best: "
            + ("there are enough samples." if verdict is None else f"too {verdict} samples.")
        )

    def _advice(self):
        last = self.measured.iloc[-1]
        if self.recommended is not None:
            return "\n".join(
                f"{name}: {self.n_samples[name]} samples now, {self._enough(count)}."
                for name, count in self.recommended.items()
            )
        if len(self.measured) > 1 or (self.n_samples and self.sd > self.aim):
            found = "some are still zero" if last["n_zero"] else f"{last['sd']:.3g}"
            return (
                f"No number up to max_factor times the present one was found for {self.aim:g}: "
                f"with {last['factor']:.3g} times as many it is {found}. Take a larger max_factor, "
                "or a better importance density or filter."
            )
        if not self.n_zero and self.sd > 0 and not self.n_samples:
            times = (self.sd / self.aim) ** 2
            return f"About {times:.2g} times as many samples would give {self.aim:g}."
        return ""

    def _enough(self, count):
        if self.needs_more_for_zeros:
            return f"{count} give no estimates of zero"
        if count == 1:
            return "1 is enough"
        return f"{count} for a standard deviation of about {self.aim:g}"


def estimator_sd(
    model: Model | None = None,
    point: dict[str, Any] | None = None,
    *,
    n_estimates: int = 100,
    aim: float = 1.3,
    max_factor: float = 100.0,
    random_seed: Any = None,
) -> EstimatorSD:
    """Measure the noise of a model's estimated likelihood, and find the samples that it needs.

    Parameters
    ----------
    model : pymc.Model, optional
        Default the one of the context.
    point : dict, optional
        Natural values of all free variables, by name: a point that a chain will often visit, such
        as a posterior mean. Default the model's initial point, which may not be one.
    n_estimates : int
        Estimates for one standard deviation, at least 10; 100 give it to 7 %.
    aim : float
        Standard deviation to look for.
    max_factor : float
        Largest multiple of the present number of samples that is tried; 1 looks for nothing.
    random_seed : int, optional

    Returns
    -------
    EstimatorSD
        Print it for the advice.

    Raises
    ------
    ValueError
        If the model has no estimated term, `point` lacks a variable, or an estimate is NaN.

    Notes
    -----
    Several estimates in one model are judged by their sum, and their numbers of samples multiplied
    by one factor. The recommended range is that of [1]_, for log-normal noise, and [2]_ finds 1.8
    for a random walk in many dimensions. The noise differs from point to point: it is often larger
    where chains start, so measure there too.

    References
    ----------
    .. [1] A. Doucet, M. K. Pitt, G. Deligiannidis and R. Kohn, "Efficient implementation of Markov
       chain Monte Carlo when using an unbiased likelihood estimator", Biometrika 102, 2015.
       doi:10.1093/biomet/asu075
    .. [2] C. Sherlock, A. H. Thiery, G. O. Roberts and J. S. Rosenthal, "On the efficiency of
       pseudo-marginal random walk Metropolis algorithms", Annals of Statistics 43, 2015.
       doi:10.1214/14-AOS1278

    Examples
    --------
    >>> print(estimator_sd(model, {"lengthscale": [1.0, 2.5]}))
    """
    model = modelcontext(model)
    checked_integer("n_estimates", n_estimates, 10)
    checked_number("aim", aim, above=0.0)
    checked_number("max_factor", max_factor, above=0.0)
    estimator = _Estimator(model, point, n_estimates, np.random.default_rng(random_seed))
    now = estimator.measure(1.0)
    rows, factor, for_zeros = [now], None, False
    if estimator.counts and max_factor > 1.0:
        rows, factor, for_zeros = _search(estimator, now, aim, max_factor)
    return EstimatorSD(
        sd=now["sd"],
        standard_error=now["standard_error"],
        n_estimates=n_estimates,
        n_zero=now["n_zero"],
        n_samples=estimator.n_samples(1.0),
        recommended=None if factor is None else estimator.n_samples(factor),
        measured=pd.DataFrame(rows).sort_values("factor", ignore_index=True),
        aim=aim,
        needs_more_for_zeros=for_zeros,
    )


class _Estimator:
    """The log-likelihood estimator of a model at one point: its variance by number of samples."""

    def __init__(self, model, point, n_estimates, rng):
        terms = {v.name: logp for v, logp in likelihood_terms(model) if has_black_box(logp)}
        if not terms:
            raise ValueError(
                "The model has no estimated term: give it one, "
                'pm.Potential("loglike", estimated_loglikelihood(fn, theta)).'
            )
        total = model.logp(vars=[model[name] for name in terms])
        self.function = model.compile_fn(
            total, inputs=model.value_vars, mode="FAST_COMPILE", on_unused_input="ignore"
        )
        self.point = model.initial_point() if point is None else unconstrained_point(model, point)
        self.n_estimates, self.rng = n_estimates, rng
        self.seeds, self.counts = [], {}
        for name, logp in terms.items():
            for i, estimate in enumerate(estimates([logp])):
                self.seeds.append(estimate.owner.inputs[0])
                if estimate.owner.op.takes_n_samples:
                    self.counts[name if i == 0 else f"{name} ({i + 1})"] = estimate.owner.inputs[-1]
        self.present = {name: int(count.get_value()) for name, count in self.counts.items()}

    def n_samples(self, factor) -> dict[str, int]:
        return {name: max(1, round(factor * n)) for name, n in self.present.items()}

    def measure(self, factor) -> dict:
        """Return the standard deviation at a multiple of the present numbers of samples."""
        values = np.empty(self.n_estimates)
        try:
            for name, n in self.n_samples(factor).items():
                self.counts[name].set_value(np.asarray(n))
            for i in range(self.n_estimates):
                draw_seeds(self.seeds, self.rng)
                values[i] = self.function(self.point)
        finally:
            for name, n in self.present.items():
                self.counts[name].set_value(np.asarray(n))
        if np.any(np.isnan(values) | (values == np.inf)):
            raise ValueError(
                "An estimate of the log-likelihood is NaN or +inf at this point: pass another "
                f"point, or mend the function. Its values: {np.array2string(values, threshold=5)}."
            )
        n_zero = int(np.sum(values == -np.inf))
        sd = error = math.inf
        if n_zero == 0:
            sd = float(values.std(ddof=1))
            # By the fourth moment.
            spread = ((values - values.mean()) ** 2).std(ddof=1)
            error = float(spread) / (2.0 * sd * math.sqrt(len(values))) if sd > 0.0 else 0.0
        return {"factor": factor, "sd": sd, "standard_error": error, "n_zero": n_zero}


def _search(estimator, now, aim, max_factor):
    """Measure other numbers of samples, and find the factor of the present ones for `aim`.

    Returns the measurements, the factor or None, and whether zeros need more samples than the aim.
    """
    smallest = 1.0 / max(estimator.present.values())
    rows = [now]
    while True:
        last, factor = rows[-1], max(_next_factor(rows, aim), smallest)
        if last["sd"] > 0.0 and abs(math.log(last["sd"] / aim)) < CLOSE:
            return rows, factor, False
        if any(row["n_zero"] and row["factor"] >= factor for row in rows[:-1]):
            return rows, last["factor"], True
        if any(estimator.n_samples(row["factor"]) == estimator.n_samples(factor) for row in rows):
            return rows, factor, False
        if factor > max_factor or len(rows) == MEASUREMENTS:
            return rows, None, False
        rows.append(estimator.measure(factor))


def _next_factor(rows, aim):
    """Between measurements about the aim by a straight line in logs; else by sd^2 ~ 1/factor."""
    row = rows[-1]
    usable = [r for r in rows if 0.0 < r["sd"] < math.inf]
    above = [r for r in usable if r["sd"] >= aim]
    below = [r for r in usable if r["sd"] < aim]
    if above and below:
        few, many = max(above, key=lambda r: r["factor"]), min(below, key=lambda r: r["factor"])
        if few["factor"] < many["factor"]:
            share = math.log(few["sd"] / aim) / math.log(few["sd"] / many["sd"])
            return few["factor"] * (many["factor"] / few["factor"]) ** share
    squared = 2.0 if row["n_zero"] else (row["sd"] / aim) ** 2
    return row["factor"] * min(max(squared, 1.0 / LONGEST_STRIDE), LONGEST_STRIDE)
