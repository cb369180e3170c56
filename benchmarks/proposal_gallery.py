"""Gallery of local proposals, as figure 2 of the paper of kernel adaptive Metropolis-Hastings."""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import SEED, heading, show
from pymc_kameleon import FastKameleonStep, KameleonStep, PCAKameleonStep
from pymc_kameleon.plots import plot_proposals
from pymc_kameleon.targets import Banana, Flower, Ring, Target

__all__ = ["ROWS", "SCENES", "Scene", "add_arguments", "figure", "run"]

GAMMA = 0.2
ROWS = {
    "KameleonStep": (KameleonStep, "#a4503c"),
    "FastKameleonStep": (FastKameleonStep, "#1f7a85"),
    "PCAKameleonStep": (PCAKameleonStep, "#a8731f"),
}


@dataclass(frozen=True)
class Scene:
    """A column of the gallery.

    Parameters
    ----------
    target : Target
        In two dimensions.
    bandwidth : float
        Of the kernel, in raw coordinates.
    size : float
        Root mean square, over places and directions, of a proposal's standard deviation.
    places : array, shape (k, 2)
    limits : tuple
        Lowest and highest value of each axis, horizontal first.
    """

    target: Target
    bandwidth: float
    size: float
    places: np.ndarray
    limits: tuple

    def step(self, step_class, draws: np.ndarray):
        """Make a step that has learnt from `draws` and proposes moves of the size of the scene."""
        options = {
            "bandwidth": self.bandwidth,
            "gamma": GAMMA,
            "standardize": False,
            "warm_start": draws,
        }
        with self.target.model():
            unit = step_class(scaling=1.0, **options).proposal_covariance(self.places)
            variance = np.trace(unit, axis1=1, axis2=2).mean() / 2 - GAMMA**2
            scaling = np.sqrt((self.size**2 - GAMMA**2) / variance)
            return step_class(scaling=scaling, **options)


def _on_banana(banana: Banana, first: np.ndarray) -> np.ndarray:
    return np.column_stack([first, banana.bananicity * (first**2 - banana.variance)])


def _on_flower(flower: Flower, angles: np.ndarray) -> np.ndarray:
    r = flower.radius + flower.amplitude * np.cos(flower.frequency * angles)
    return np.column_stack([r * np.cos(angles), r * np.sin(angles)])


def _scenes() -> dict[str, Scene]:
    banana, flower, ring = Banana(0.03, 100.0, dim=2), Flower(dim=2), Ring(dim=2)
    on_banana = _on_banana(banana, np.linspace(-24, 24, 7))
    # Tips and both sides of each petal.
    on_flower = _on_flower(flower, np.pi / 12 * np.delete(np.arange(24), np.arange(2, 24, 4)))
    on_ring = _on_flower(ring, np.pi / 4 * np.arange(8))
    return {
        "banana": Scene(banana, 5.0, 2.0, on_banana, ((-29, 29), (-8, 24))),
        "flower": Scene(flower, 3.0, 1.2, on_flower, ((-20.5, 20.5), (-20.5, 20.5))),
        "ring": Scene(ring, 4.0, 1.7, on_ring, ((-13.5, 13.5), (-13.5, 13.5))),
    }


SCENES = _scenes()


def add_arguments(parser):
    parser.add_argument("--draws", type=int, default=2500, help="exact draws to learn from")


def figure(steps: dict[str, dict]) -> Figure:
    """Draw contours of the proposals of `steps[row][column]`."""
    picture = Figure(figsize=(12, 9.4), layout="constrained")
    picture.get_layout_engine().set(w_pad=0.05, h_pad=0.06, wspace=0.0, hspace=0.0)
    axes = picture.subplots(len(steps), len(SCENES), width_ratios=[1.55, 1, 1])
    for row, (step_name, of_targets) in zip(axes, steps.items(), strict=True):
        color = ROWS[step_name][1]
        for ax, (target_name, step) in zip(row, of_targets.items(), strict=True):
            scene = SCENES[target_name]
            plot_proposals(step, scene.places, grid_size=240, ax=ax, color=color)
            ax.set(xlabel="", ylabel="", xlim=scene.limits[0], ylim=scene.limits[1])
            ax.set_aspect("equal")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        row[0].set_title(step_name, loc="left", color=color, weight="bold", size=16)
    return picture


def run(arguments):
    heading(
        "proposal-gallery: 95 % contours of the local proposals of three steps",
        f"Learnt from {arguments.draws} exact draws, in raw coordinates, gamma={GAMMA:g}. The "
        "scalings are such that the moves have the standard deviation in the last column, which is "
        "for the eye; tuning chooses others.",
    )
    steps, rows = {name: {} for name in ROWS}, []
    for target_name, scene in SCENES.items():
        draws = scene.target.draw(arguments.draws, np.random.default_rng(SEED))
        for step_name, (step_class, _) in ROWS.items():
            step = scene.step(step_class, draws)
            steps[step_name][target_name] = step
            rows.append(
                {
                    "target": target_name,
                    "step": step_name,
                    "bandwidth": scene.bandwidth,
                    "scaling": step.sampler.template.chosen_scaling,
                    "sd of moves": scene.size,
                }
            )
    show(rows)
    path = arguments.output / "proposals.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(steps).savefig(path, dpi=90)
    print(f"  {path}", flush=True)
