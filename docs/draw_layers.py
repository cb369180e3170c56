"""Draw layers.svg, the picture of the layout of the package in the contributing guide."""

from pathlib import Path

import matplotlib.pyplot as plt
from draw_decision import INK, LINE, QUESTION_COLOR, STEP_COLOR
from matplotlib.patches import Rectangle

LAYERS = [
    ("demo", "the first command of the README"),
    ("approximate, distributed, diagnostics, plots", "what is done with steps, chains and results"),
    ("steps, pseudo_marginal", "what PyMC calls: a class for each sampler; estimated likelihoods"),
    ("latent_gp", "latent Gaussian models: reader, algebra, approximations, moves"),
    ("evidence, store", "log evidence of draws; evaluations kept in a file"),
    ("surrogate", "delayed acceptance and trajectories on a learnt log density"),
    ("adaptation, gp", "what random walks learn; Gaussian-process regression"),
    ("model, kernels", "from a PyMC model to a compiled log density; kernels"),
    ("mcmc", "compiled: chain, loop, proposals, histories, scalings"),
    ("targets, testing", "densities with exact draws; tests of invariance"),
    ("validation", "arguments"),
    ("_compat, _threads, _warnings", "what differs between versions; threads; warnings"),
]
"""From the top: each layer imports from those below it alone."""

WIDTH, ROW = 9.6, 0.52


def draw():
    """Return the figure."""
    figure, axes = plt.subplots(figsize=(WIDTH, ROW * len(LAYERS)))
    axes.set(xlim=(0, WIDTH), ylim=(-ROW * len(LAYERS), 0))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    for row, (names, purpose) in enumerate(LAYERS):
        low, middle = -(row + 0.94) * ROW, -(row + 0.5) * ROW
        color = STEP_COLOR if row == 2 else QUESTION_COLOR
        axes.add_patch(
            Rectangle((0.04, low), WIDTH - 0.08, 0.88 * ROW, facecolor=color, edgecolor=LINE)
        )
        axes.text(0.16, middle, names, va="center", fontsize=10, family="monospace", color=INK)
        axes.text(4.7, middle, purpose, va="center", fontsize=9.5, color=INK)
    return figure


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "layers"  # the same file every time
    draw().savefig(Path(__file__).with_name("layers.svg"), metadata={"Date": None})
