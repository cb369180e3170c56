"""Gradient-free, kernel-adaptive step methods for PyMC."""

from importlib import import_module

from pymc_kameleon import kernels, latent_gp, pseudo_marginal, targets
from pymc_kameleon.kernels import random_features
from pymc_kameleon.model.initial_points import dispersed_starts
from pymc_kameleon.steps import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    KameleonStep,
    LatentGPStep,
    MALAStep,
    PCAKameleonStep,
    RiemannianHMCStep,
    SurrogateHMCStep,
)
from pymc_kameleon.steps.registration import register, unregister
from pymc_kameleon.store import EvaluationStore
from pymc_kameleon.surrogate import GPSurrogate

__version__ = "0.2.0"

__all__ = [
    "AdaptiveMetropolisStep",
    "EllipticalSliceStep",
    "EvaluationStore",
    "FastKameleonStep",
    "GPSurrogate",
    "KameleonStep",
    "LatentGPStep",
    "MALAStep",
    "PCAKameleonStep",
    "RiemannianHMCStep",
    "SurrogateHMCStep",
    "diagnostics",
    "dispersed_starts",
    "distributed",
    "kernels",
    "latent_gp",
    "plots",
    "pseudo_marginal",
    "random_features",
    "register",
    "targets",
    "unregister",
]

_ON_REQUEST = ("diagnostics", "distributed", "plots")


def __getattr__(name):
    """Import what sampling does not need, and is slow to import, when it is first used."""
    if name in _ON_REQUEST:
        return import_module(f"{__name__}.{name}")
    if name == "surrogate_targets":
        raise AttributeError(f"{__name__}.{name} is {__name__}.targets.simulators now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
