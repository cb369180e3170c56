"""Step methods for `pm.sample`."""

from pymc_kameleon.steps.adaptive_metropolis import AdaptiveMetropolisStep
from pymc_kameleon.steps.elliptical_slice import EllipticalSliceStep
from pymc_kameleon.steps.fast_kameleon import FastKameleonStep
from pymc_kameleon.steps.kameleon import KameleonStep
from pymc_kameleon.steps.latent_gp import LatentGPStep
from pymc_kameleon.steps.mala import MALAStep
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep
from pymc_kameleon.steps.multilevel import MultilevelStep
from pymc_kameleon.steps.parallel_tempering import ParallelTemperingStep
from pymc_kameleon.steps.pca_kameleon import PCAKameleonStep
from pymc_kameleon.steps.riemannian_hmc import RiemannianHMCStep
from pymc_kameleon.steps.surrogate_hmc import SurrogateHMCStep

__all__ = [
    "AdaptiveMetropolisStep",
    "EllipticalSliceStep",
    "FastKameleonStep",
    "KameleonStep",
    "LatentGPStep",
    "MALAStep",
    "MetropolisHastingsStep",
    "MultilevelStep",
    "PCAKameleonStep",
    "ParallelTemperingStep",
    "RiemannianHMCStep",
    "SurrogateHMCStep",
]
