"""Figure 5 of the paper of kernel adaptive Metropolis-Hastings (Sejdinovic et al. 2014)."""

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.common import SEED, heading, show, write
from benchmarks.sampling import dataset, sample
from pymc_kameleon import AdaptiveMetropolisStep, KameleonStep
from pymc_kameleon.targets import Banana, Flower, Target

__all__ = ["EXPERIMENTS", "Experiment", "add_arguments", "figure", "run"]

PROBABILITIES = np.arange(1, 10) / 10
CONFIDENCE = 0.8
BASELINES = ("SM", "AM-FS", "AM-LS")
PAPER, DEFAULT = "KAMH-LS", "KameleonStep"
MEASURES = ["accept", "norm", *[f"q{q:.1f}" for q in PROBABILITIES], "mean q"]
CLAIM = (
    "Published: KAMH-LS has clearly smaller quantile deviations than SM, AM-FS and AM-LS, and a "
    "comparable or smaller norm of the mean."
)


@dataclass(frozen=True)
class Experiment:
    """A row of the published figure.

    Parameters
    ----------
    target : Target
    iterations, burn_in : int
        Transitions in all, and those after which adaptation stops and averages begin.
    bandwidth : float
        Of the published KAMH-LS.
    first_variance : float
        The initial covariance of adaptive Metropolis is diag(first_variance, 1, ..., 1).
    """

    target: Target
    iterations: int
    burn_in: int
    bandwidth: float
    first_variance: float

    def samplers(self, steps_per_draw: int) -> dict:
        """Return what makes the step of each sampler."""
        covariance = np.diag([self.first_variance] + [1.0] * (self.target.dim - 1))
        adaptive = partial(AdaptiveMetropolisStep, steps_per_draw=steps_per_draw)
        paper = partial(KameleonStep.paper, bandwidth=self.bandwidth)
        return {
            "SM": partial(adaptive, covariance="identity", learn_scaling=False),
            "AM-FS": partial(adaptive, initial_covariance=covariance, learn_scaling=False),
            "AM-LS": partial(adaptive, initial_covariance=covariance),
            PAPER: partial(paper, steps_per_draw=steps_per_draw),
            DEFAULT: partial(KameleonStep, steps_per_draw=steps_per_draw),
        }


EXPERIMENTS = {
    "banana-0.03": Experiment(Banana(0.03, 100.0), 40_000, 20_000, 5.0, 100.0),
    "banana-0.1": Experiment(Banana(0.1, 100.0), 80_000, 40_000, 10.0, 100.0),
    "flower": Experiment(Flower(10.0, 6.0, 6, 1.0), 120_000, 60_000, 5.0, 1.0),
}


def add_arguments(parser):
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--share", type=float, default=1.0, help="of the published iterations")
    parser.add_argument("--steps-per-draw", type=int, default=20, help="1 stores every state")
    choices = {"nargs": "+", "choices": EXPERIMENTS, "default": list(EXPERIMENTS)}
    parser.add_argument("--targets", **choices)


def measure(experiment: Experiment, make_step, arguments) -> np.ndarray:
    """Acceptance, norm of the mean and quantile errors of each chain, shape (chains, 12)."""
    target, steps = experiment.target, arguments.steps_per_draw
    result, _ = sample(
        target.model(),
        make_step,
        draws=round(arguments.share * (experiment.iterations - experiment.burn_in) / steps),
        tune=round(arguments.share * experiment.burn_in / steps),
        initvals=[{"x": np.zeros(target.dim)}] * arguments.chains,
        random_seed=SEED,
    )
    accepted = dataset(result, "sample_stats")["accepted"].values.mean(axis=1)
    draws = dataset(result)["x"].values
    norms = np.linalg.norm(draws.mean(axis=1), axis=-1)
    errors = np.array([target.quantile_error(chain, PROBABILITIES) for chain in draws])
    return np.column_stack([accepted, norms, errors, errors.mean(axis=1)])


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over chains, and half the width of its confidence interval; values (chains, n)."""
    chains = len(values)
    if chains < 2:
        return values[0], np.full(values.shape[1], np.nan)
    quantile = stats.t(chains - 1).ppf(0.5 + CONFIDENCE / 2)
    return values.mean(axis=0), quantile * values.std(axis=0, ddof=1) / np.sqrt(chains)


def verdicts(found: dict[str, np.ndarray]) -> list[dict]:
    """Compare KAMH-LS, and the default step, with each baseline."""
    rows = []
    for sampler in (PAPER, DEFAULT):
        for baseline in BASELINES:
            (mean, half), (other, other_half) = interval(found[sampler]), interval(found[baseline])
            width = np.hypot(half, other_half)
            below = ((other - mean)[2:-1] > width[2:-1]).sum()
            above = ((mean - other)[2:-1] > width[2:-1]).sum()
            norm = "larger" if mean[1] - other[1] > width[1] else "comparable"
            rows.append(
                {
                    "sampler": sampler,
                    "against": baseline,
                    "error ratio": mean[-1] / other[-1],
                    "below": f"{below} of 9",
                    "above": f"{above} of 9",
                    "errors as claimed": "yes" if mean[-1] + width[-1] < other[-1] else "NO",
                    "norm ratio": mean[1] / other[1],
                    "norm": "smaller" if other[1] - mean[1] > width[1] else norm,
                    "norm as claimed": "NO" if norm == "larger" else "yes",
                }
            )
    return rows


def figure(results: dict[str, dict[str, np.ndarray]], share: float = 1.0) -> Figure:
    """Draw bars as in the published figure, a row for each target."""
    picture = Figure(figsize=(11, 0.6 + 3.1 * len(results)), layout="constrained")
    axes = picture.subplots(len(results), 1, squeeze=False)[:, 0]
    colors = ["#c9c4b5", "#d99a4e", "#a4503c", "#1f7a85", "#17324d"]
    scale = np.array([1.0, 0.1] + [10.0] * len(PROBABILITIES))
    labels = ["accept", r"$\Vert\hat E[X]\Vert/10$"]
    labels += [f"{10 * round(10 * q)}%" for q in PROBABILITIES]
    for axis, (name, found) in zip(axes, results.items(), strict=True):
        for i, (sampler, values) in enumerate(found.items()):
            mean, half = (scale * part[:-1] for part in interval(values))
            offsets = np.arange(len(mean)) + 0.16 * (i - (len(found) - 1) / 2)
            error = {"elinewidth": 0.8, "capsize": 1.5, "ecolor": "#2b2d33"}
            axis.bar(offsets, mean, 0.16, yerr=half, color=colors[i], label=sampler, error_kw=error)
        experiment = EXPERIMENTS[name]
        iterations, burn_in = share * experiment.iterations, share * experiment.burn_in
        length = f"{iterations:.0f} iterations, burn-in {burn_in:.0f}"
        axis.set_title(f"{experiment.target}: {length}", loc="left", fontsize=10)
        axis.set_xticks(np.arange(len(labels)), labels)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        axis.set_ylim(bottom=0.0)
    axes[-1].set_xlabel(r"deviation of quantiles $|\hat F(q) - q| \times 10$ (from 10% on)")
    axes[0].legend(ncols=len(colors), frameon=False, fontsize=9, loc="upper right")
    return picture


def run(arguments):
    lines = heading(
        "kamh-figure5: deviation from exact quantiles, as in figure 5 of Sejdinovic et al. (2014)",
        f"{arguments.chains} chains from 0 in 8 dimensions, {arguments.share:g} x the published "
        "iterations; adaptation stops at the burn-in. SM is N(x, 2.38^2/d I); AM-FS and AM-LS "
        "start at covariance diag(100, 1, ...) for bananas, I for the flower; KAMH-LS is "
        "KameleonStep.paper with the published bandwidth; KameleonStep is the default step.",
        f"Repeats kept, every {arguments.steps_per_draw}th state stored: F(q) and the mean are as "
        "unbiased as from all states, and hardly more variable where neighbours are alike. accept "
        "is over all transitions. Figures are means over chains of each chain's value; +- half of "
        f"the {CONFIDENCE:.0%} interval of that mean. norm: |mean|; q0.1 ...: |F(q) - q|; mean q: "
        "the mean of these nine.",
        CLAIM + " Claims are judged by the mean of the nine and by the norm; a difference counts "
        f"where its {CONFIDENCE:.0%} interval leaves out 0.",
    )
    rows, compared, results = [], [], {}
    for name in arguments.targets:
        experiment, found = EXPERIMENTS[name], {}
        for sampler, make_step in experiment.samplers(arguments.steps_per_draw).items():
            print(f"{name} {sampler}", flush=True)
            found[sampler] = measure(experiment, make_step, arguments)
            mean, half = interval(found[sampler])
            row = {"target": name, "sampler": sampler, "sigma": experiment.bandwidth}
            row |= dict(zip(MEASURES, mean, strict=True))
            rows.append(row | {f"+-{key}": h for key, h in zip(MEASURES, half, strict=True)})
        results[name] = found
        compared += [{"target": name} | row for row in verdicts(found)]
        show(rows[-len(found) :], columns=["target", "sampler", *MEASURES, "+-norm", "+-mean q"])
        show([row for row in compared if row["target"] == name], "Published claim and measurement")
        # All targets so far, so that an interrupted run loses nothing.
        write(rows, lines, arguments.output / "kamh-figure5.csv")
        write(compared, lines, arguments.output / "kamh-figure5-claims.csv")
        path = arguments.output / f"kamh-figure5-pymc{version('pymc')}.png"
        figure(results, arguments.share).savefig(path, dpi=150)
        print(f"  {path}", flush=True)
