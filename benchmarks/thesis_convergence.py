"""Section 5.2 of the F-KAMH thesis (Kotlicki 2015): random features and the exact kernel."""

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import SEED, heading, show, write
from pymc_kameleon.kernels import Gaussian
from pymc_kameleon.kernels.random_features import EMBEDDINGS, draw_features, features, jacobians
from pymc_kameleon.mcmc.proposals.local_gaussian import centred_scatter
from pymc_kameleon.targets import Banana

__all__ = ["COLORS", "EXPERIMENTS", "Experiment", "add_arguments", "run"]

N_DRAWS = 5000
SUBSAMPLES = (250, 1000, 2000, 3000)
N_FEATURES = (10, 20, 40, 60, 100, 160, 250, 400, 600)
PLACES = {"ridge": -0.6, "far": -1.0}
"""Where covariances are compared, and the published slopes of log error on log D."""

PUBLISHED_SIZES = {250: "D > 70", 3000: "D > 300"}
"""Published numbers of features that are better than subsamples, on the strongly twisted banana."""

LINES = [("KAMH", n) for n in SUBSAMPLES] + [("KAMH, same nu", n) for n in PUBLISHED_SIZES]
N_RIDGE = 15
LARGE = 100
"""Number of features from which a second slope is fitted."""

COLORS = {"pairs": "#2d8a57", "shifted": "#b8433a"}
"""Those of the published figures, of embeddings (2.4) and (2.5)."""


@dataclass(frozen=True)
class Experiment:
    """A target, with the bandwidth of the published runs.

    Parameters
    ----------
    target : Banana
    bandwidth : float
    eta : float
        Scaling of the random features, about what 300 of them learn in `thesis_efficiency`.
    """

    target: Banana
    bandwidth: float
    eta: float

    @property
    def label(self) -> str:
        return f"Banana({self.target.bananicity:g}, {self.target.variance:g}), d = 8"

    @cached_property
    def places(self) -> dict[str, np.ndarray]:
        """Points of the ridge, and the one far from it; arrays (k, dim)."""
        ridge = np.zeros((N_RIDGE, self.target.dim))
        ridge[:, 0] = 2 * np.sqrt(self.target.variance) * np.linspace(-1, 1, N_RIDGE)
        ridge[:, 1] = self.target.bananicity * (ridge[:, 0] ** 2 - self.target.variance)
        far = np.zeros((1, self.target.dim))
        far[0, 1] = -200.0
        return {"ridge": ridge, "far": far}

    def kernel_covariances(self, draws: np.ndarray, places: np.ndarray) -> np.ndarray:
        """nu^2 M H M^T with nu = eta / (2 sqrt(n)) at each place; shape (k, dim, dim)."""
        kernel, points = Gaussian(), np.ascontiguousarray(draws.T)
        parameters, gradients = kernel.parameters(self.bandwidth), np.empty(points.shape)
        scatter = np.empty((len(places), points.shape[0], points.shape[0]))
        for place, out in zip(places, scatter, strict=True):
            kernel.gradients(place, points, parameters, gradients)
            centred_scatter(gradients, out)
        return self.eta**2 / (4 * len(draws)) * scatter

    def feature_covariances(
        self, draws: np.ndarray, places: np.ndarray, n: int, embedding: str, rng
    ) -> np.ndarray:
        """eta^2 J^T C J at each place, of `n` random features; shape (k, dim, dim)."""
        arguments = (n, embedding, draws.shape[1], self.bandwidth, rng)
        drawn = *draw_features(Gaussian(), *arguments), embedding
        phi = features(draws, *drawn)
        phi -= phi.mean(axis=0)
        # As (phi J)^T (phi J) / n, the covariance C of the features is not needed.
        projected = np.tensordot(jacobians(places, *drawn), phi, axes=(1, 1))
        return self.eta**2 / len(draws) * projected @ np.swapaxes(projected, 1, 2)


EXPERIMENTS = {
    "banana-0.1": Experiment(Banana(0.1, 100.0, dim=8), 10.0, 90.0),
    "banana-0.03": Experiment(Banana(0.03, 100.0, dim=8), 5.0, 57.0),
}


def add_arguments(parser):
    parser.add_argument("--runs", type=int, default=150, help="published: 250")
    choices = {"nargs": "+", "choices": EXPERIMENTS, "default": list(EXPERIMENTS)}
    parser.add_argument("--targets", **choices)


def errors(experiment: Experiment, rng: np.random.Generator) -> dict[tuple, float]:
    """Mean Frobenius errors of one run, and the norm of the adaptive covariance itself.

    Keys are a place, a sampler (or "norm"), the embedding, and a size.
    """
    draws = experiment.target.draw(N_DRAWS, rng)
    counts = {name: len(places) for name, places in experiment.places.items()}
    places = np.concatenate(list(experiment.places.values()))
    exact = experiment.kernel_covariances(draws, places)
    found = {("norm", "", N_DRAWS): np.zeros_like(exact)}
    for size in SUBSAMPLES:
        bootstrap = draws[rng.integers(N_DRAWS, size=size)]
        covariances = experiment.kernel_covariances(bootstrap, places)
        found["KAMH", "", size] = covariances
        found["KAMH, same nu", "", size] = size / N_DRAWS * covariances
    for embedding in EMBEDDINGS:
        for n in N_FEATURES:
            arguments = (draws, places, n, embedding, rng)
            found["F-KAMH", embedding, n] = experiment.feature_covariances(*arguments)
    ends = np.cumsum(list(counts.values()))[:-1]
    return {
        (place, *key): part.mean()
        for key, covariances in found.items()
        for place, part in zip(
            counts, np.split(np.linalg.norm(covariances - exact, axis=(1, 2)), ends), strict=True
        )
    }


def slope(sizes, values: np.ndarray) -> tuple[float, float]:
    """Fit log mean error on log size, by least squares; values (runs, sizes).

    The standard error is that over runs, by the delta method.
    """
    x = np.log(sizes) - np.mean(np.log(sizes))
    weights, means = x / (x @ x), values.mean(axis=0)
    return weights @ np.log(means), (values / means @ weights).std(ddof=1) / np.sqrt(len(values))


def slopes(name: str, found: dict[tuple, np.ndarray]) -> list[dict]:
    """Fit a line for each place and embedding, over all and over the larger numbers."""
    rows, large = [], [n for n in N_FEATURES if n >= LARGE]
    for place, published in PLACES.items():
        for embedding in EMBEDDINGS:
            row = {"target": name, "place": place, "embedding": embedding, "published": published}
            for label, sizes in (("slope", N_FEATURES), (f"from D={LARGE}", large)):
                values = [found[place, "F-KAMH", embedding, n] for n in sizes]
                row[label], row[f"+-{label}"] = slope(sizes, np.column_stack(values))
            rows.append(row)
    return rows


def table(name: str, found: dict[tuple, np.ndarray]) -> list[dict]:
    """Mean errors and their standard errors; at the far point those of the features only."""
    rows = []
    for (place, sampler, embedding, size), values in found.items():
        if sampler == "F-KAMH" or (sampler != "norm" and place == "ridge"):
            row = {"target": name, "place": place, "sampler": sampler, "embedding": embedding}
            row |= {"size": size, "error": values.mean()}
            row["+-error"] = values.std(ddof=1) / np.sqrt(len(values))
            if place == "ridge":
                row["share"] = values.mean() / found[place, "norm", "", N_DRAWS].mean()
            rows.append(row)
    return sorted(rows, key=lambda row: (row["place"] != "ridge", row["sampler"]))


def better_than(name: str, found: dict[tuple, np.ndarray]) -> list[dict]:
    """Interpolate, on the ridge, how many features have the error of each subsample."""
    rows, sizes = [], np.log(N_FEATURES)
    for sampler in ("KAMH", "KAMH, same nu"):
        for size in SUBSAMPLES:
            error = np.log(found["ridge", sampler, "", size].mean())
            row = {"target": name, "sampler": sampler, "size": size}
            for embedding in EMBEDDINGS:
                means = [found["ridge", "F-KAMH", embedding, n].mean() for n in N_FEATURES]
                crossing = np.exp(np.interp(-error, -np.log(means), sizes))
                enough = error > np.log(means[-1])
                row[embedding] = f"D > {crossing:.0f}" if enough else "none"
            row["published"] = PUBLISHED_SIZES.get(size, "") if name == "banana-0.1" else ""
            rows.append(row)
    return rows


def figure(results: dict[str, dict[tuple, np.ndarray]]) -> Figure:
    """Draw error on D, log-log, as in figures 5.7, A.3 and A.5."""
    picture = Figure(figsize=(10, 0.5 + 3.6 * len(results)), layout="constrained")
    axes = picture.subplots(len(results), len(PLACES), squeeze=False, sharex=True)
    sizes = np.array(N_FEATURES)
    for row, (name, found) in zip(axes, results.items(), strict=True):
        for axis, (place, published) in zip(row, PLACES.items(), strict=True):
            for embedding, color in COLORS.items():
                values = np.column_stack([found[place, "F-KAMH", embedding, n] for n in sizes])
                mean, half = values.mean(axis=0), 1.96 * values.std(axis=0, ddof=1)
                label = f"F-KAMH, {embedding}: slope {slope(sizes, values)[0]:.2f}"
                style = {"color": color, "marker": "o", "markersize": 3.5, "capsize": 2}
                axis.errorbar(sizes, mean, half / np.sqrt(len(values)), label=label, **style)
            guide = mean[-1] * 1.6 * (sizes / sizes[-1]) ** published
            axis.plot(sizes, guide, ":", color="#6b7078", label=f"published slope {published:g}")
            for sampler, size in LINES if place == "ridge" else ():
                error = found[place, sampler, "", size].mean()
                dashes = "-" if sampler == "KAMH" else (0, (5, 3))
                axis.axhline(error, color="#2b2d33", linewidth=0.7, linestyle=dashes, zorder=1)
                below = size == max(SUBSAMPLES)
                style = {"textcoords": "offset points", "va": "top" if below else "bottom"}
                shift = (0, -2 if below else 0)
                axis.annotate(f"{sampler}, n = {size}", (9.2, error), shift, fontsize=7, **style)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks([10, 20, 50, 100, 200, 600], ["10", "20", "50", "100", "200", "600"])
            axis.minorticks_off()
            where = f"{N_RIDGE} points of the ridge" if place == "ridge" else "at (0, -200, 0, ...)"
            axis.set_title(f"{EXPERIMENTS[name].label}, {where}", loc="left", fontsize=9)
            axis.legend(frameon=False, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("Frobenius norm of the error")
    for axis in axes[-1]:
        axis.set_xlabel("random features D")
    return picture


def run(arguments):
    lines = heading(
        "thesis-convergence: error of F-KAMH's proposal covariance (Kotlicki 2015, section 5.2)",
        "Frobenius norm of the difference from KAMH's with the true Gaussian kernel and n = "
        f"{N_DRAWS} exact draws, nu = eta / (2 sqrt(n)); mean over {arguments.runs} runs with new "
        "draws and frequencies, +- its standard error. gamma cancels. Published bandwidths, raw "
        f"coordinates. ridge: mean over {N_RIDGE} points, x1 evenly from -20 to 20; far: at "
        "(0, -200, 0, ...), where KAMH has no adaptive covariance, whatever n. F-KAMH has D = size "
        "features, KAMH as many of the draws, bootstrapped. share: of the norm of KAMH's adaptive "
        "covariance. same nu: that of all the draws in spite of a smaller n, so that the "
        "covariance is too small by the factor n / 5000.",
        f"slope: of log mean error on log D for D from {N_FEATURES[0]} to {N_FEATURES[-1]}, and "
        f"for D >= {LARGE}; +- standard error over runs. It depends on these D: the error is a sum "
        "of one part that falls as D^-1/2 and one that falls as D^-1, which is all there is at the "
        "far point. eta scales all errors by eta^2 and changes no slope. better than: D, by "
        "interpolation, from which the error on the ridge is below that of the subsample, beside "
        f"the published; none: not up to D = {N_FEATURES[-1]}.",
    )
    rows, fitted, compared, results = [], [], [], {}
    for name in arguments.targets:
        experiment, rng = EXPERIMENTS[name], np.random.default_rng(SEED)
        runs = [errors(experiment, rng) for _ in range(arguments.runs)]
        found = {key: np.array([run[key] for run in runs]) for key in runs[0]}
        results[name] = found
        rows += table(name, found)
        fitted += slopes(name, found)
        compared += better_than(name, found)
        nu = experiment.eta / (2 * np.sqrt(N_DRAWS))
        title = f"bandwidth {experiment.bandwidth:g}, eta = {experiment.eta:g}, nu = {nu:.3g}"
        for part, about in ((rows, title), (fitted, "slopes"), (compared, "better than")):
            show([row for row in part if row["target"] == name], f"{experiment.target}, {about}")
    write(rows, lines, arguments.output / "thesis-convergence.csv")
    write(fitted, lines, arguments.output / "thesis-convergence-slopes.csv")
    write(compared, lines, arguments.output / "thesis-convergence-sizes.csv")
    path = arguments.output / f"thesis-convergence-pymc{version('pymc')}.png"
    figure(results).savefig(path, dpi=150)
    print(f"  {path}", flush=True)
