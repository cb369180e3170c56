"""Gradient-free, kernel-adaptive step methods for PyMC."""

from importlib import import_module

from pymc_kameleon import kernels, latent_gp, pseudo_marginal, random_features, targets
from pymc_kameleon.registration import register, unregister
from pymc_kameleon.starts import dispersed_starts
from pymc_kameleon.steps import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
    RiemannianHMCStep,
)
from pymc_kameleon.surrogate import GPSurrogate

__version__ = "0.1.0"

__all__ = [
    "AdaptiveMetropolisStep",
    "EllipticalSliceStep",
    "FastKameleonStep",
    "GPSurrogate",
    "KameleonStep",
    "MALAStep",
    "PCAKameleonStep",
    "RiemannianHMCStep",
    "diagnostics",
    "dispersed_starts",
    "kernels",
    "latent_gp",
    "plots",
    "pseudo_marginal",
    "random_features",
    "register",
    "surrogate_targets",
    "targets",
    "unregister",
]

_ON_REQUEST = ("diagnostics", "plots", "surrogate_targets")


def __getattr__(name):
    """Import what sampling does not need, and is slow to import, when it is asked for."""
    if name in _ON_REQUEST:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
