"""Make `KameleonStep` PyMC's automatic choice for variables without gradients, when asked to."""

from pymc.step_methods import STEP_METHODS
from pymc.step_methods.compound import Competence

from pymc_kameleon.steps import KameleonStep

__all__ = ["register", "unregister"]


class _RegisteredKameleonStep(KameleonStep):
    """A `KameleonStep` that PyMC prefers where there is no gradient."""

    @staticmethod
    def competence(var, has_grad):
        """Preferred for continuous variables without a gradient."""
        if has_grad:
            return Competence.INCOMPATIBLE
        competence = KameleonStep.competence(var, has_grad)
        return Competence.IDEAL if competence == Competence.COMPATIBLE else competence


def register() -> None:
    """Make `KameleonStep` the automatic choice for continuous variables without gradients.

    Importing the package never does this. Options pass through `pm.sample(kameleon={...})`.
    """
    if _RegisteredKameleonStep not in STEP_METHODS:
        STEP_METHODS.append(_RegisteredKameleonStep)


def unregister() -> None:
    """Undo `register`."""
    if _RegisteredKameleonStep in STEP_METHODS:
        STEP_METHODS.remove(_RegisteredKameleonStep)
