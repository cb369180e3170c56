"""Step methods for `pm.sample`."""

from pymc_kameleon.steps.adaptive_metropolis import AdaptiveMetropolisStep
from pymc_kameleon.steps.kameleon import KameleonStep

__all__ = ["AdaptiveMetropolisStep", "KameleonStep"]
