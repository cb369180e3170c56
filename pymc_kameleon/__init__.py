"""Gradient-free, kernel-adaptive step methods for PyMC."""

from pymc_kameleon import (
    diagnostics,
    kernels,
    plots,
    random_features,
    surrogate_targets,
    targets,
)
from pymc_kameleon.registration import register, unregister
from pymc_kameleon.starts import dispersed_starts
from pymc_kameleon.steps import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
)
from pymc_kameleon.surrogate import GPSurrogate

__version__ = "0.1.0"

__all__ = [
    "AdaptiveMetropolisStep",
    "FastKameleonStep",
    "GPSurrogate",
    "KameleonStep",
    "MALAStep",
    "PCAKameleonStep",
    "diagnostics",
    "dispersed_starts",
    "kernels",
    "plots",
    "random_features",
    "register",
    "surrogate_targets",
    "targets",
    "unregister",
]
