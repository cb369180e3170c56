"""Make `KameleonStep` PyMC's automatic choice for variables without gradients, on request."""

from pymc.step_methods import STEP_METHODS

from pymc_kameleon.steps import KameleonStep

__all__ = ["register", "unregister"]


def register() -> None:
    """Make `KameleonStep` the automatic choice for continuous variables without gradients.

    Importing the package never does this. Options pass through `pm.sample(kameleon={...})`.
    """
    if KameleonStep not in STEP_METHODS:
        STEP_METHODS.append(KameleonStep)


def unregister() -> None:
    """Undo `register`."""
    if KameleonStep in STEP_METHODS:
        STEP_METHODS.remove(KameleonStep)
