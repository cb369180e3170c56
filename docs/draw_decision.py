"""Draw decision.svg, the picture of the page "Which step for which problem"."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

QUESTIONS = [
    ("Is the likelihood\nitself an estimate?", "SurrogateHMCStep(\n pseudo_marginal=True)"),
    ("Latent Gaussian functions, areas,\nwalks or effects of groups?", "LatentGPStep"),
    ("Microseconds a call, and modes,\nstrong bends or a funnel?", "ParallelTemperingStep"),
    ("Are there gradients,\nand they are cheap?", "NUTS of PyMC"),
    ("Are there gradients,\nof milliseconds or more?", "MALAStep(\n surrogate=GPSurrogate())"),
    ("Does a call take 1 ms or more?\nIs there a cheaper version?", "MultilevelStep"),
    ("Does a call take 1 ms or more?\nSmooth, a few hundred calls only?", "surrogate_posterior"),
    ("Does a call take 1 ms or more?\nSmooth, up to 20 parameters?", "SurrogateHMCStep"),
    (
        "Does a call take 1 ms or more?\nNot smooth, few parameters?",
        "KameleonStep(\n surrogate=GPSurrogate())",
    ),
    ("Is the posterior\nnearly Gaussian?", "AdaptiveMetropolisStep"),
]
LAST = "KameleonStep"

WIDTH, ROW, BOX = 7.2, 1.05, 0.78
INK, LINE = "#2b2d33", "#8a8d94"
QUESTION_COLOR, STEP_COLOR = "#eef0f4", "#dcd9ee"


def draw():
    """Return the figure: questions from top to bottom, and a step to the right of each."""
    height = ROW * (len(QUESTIONS) + 1)
    figure, axes = plt.subplots(figsize=(WIDTH, height))
    axes.set(xlim=(0, WIDTH), ylim=(-height, 0))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    for row, (question, step) in enumerate(QUESTIONS):
        middle = -(row + 0.5) * ROW
        _box(axes, 0.06, middle, 3.6, question, QUESTION_COLOR)
        _box(axes, 4.24, middle, 2.9, step, STEP_COLOR, family="monospace")
        _arrow(axes, (3.66, middle), (4.24, middle))
        axes.text(3.93, middle + 0.08, "yes", ha="center", va="bottom", fontsize=12, color=INK)
        _arrow(axes, (0.5, middle - BOX / 2), (0.5, middle - ROW + BOX / 2))
        axes.text(0.6, middle - ROW / 2, "no", va="center", fontsize=12, color=INK)
    _box(axes, 0.06, -(len(QUESTIONS) + 0.5) * ROW, 3.6, LAST, STEP_COLOR, family="monospace")
    return figure


def _box(axes, left, middle, width, text, color, family="sans-serif"):
    shape = FancyBboxPatch(
        (left, middle - BOX / 2),
        width,
        BOX,
        boxstyle="round,pad=0,rounding_size=0.1",
        facecolor=color,
        edgecolor=LINE,
    )
    axes.add_patch(shape)
    size = 13.5 if family == "sans-serif" else 12.5
    axes.text(left + 0.14, middle, text, va="center", fontsize=size, family=family, color=INK)


def _arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": LINE, "lw": 1.5})


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "decision"  # the same file every time
    target = Path(__file__).with_name("decision.svg")
    draw().savefig(target, metadata={"Date": None})
