"""Gradient-free, kernel-adaptive step methods for PyMC."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pymc_kameleon import (
        diagnostics,
        distributed,
        kernels,
        latent_gp,
        plots,
        pseudo_marginal,
        targets,
    )
    from pymc_kameleon.approximate.surrogate_posterior import surrogate_posterior
    from pymc_kameleon.evidence import compare_evidence, log_evidence
    from pymc_kameleon.kernels import random_features
    from pymc_kameleon.model.black_box import black_box
    from pymc_kameleon.model.initial_points import dispersed_starts
    from pymc_kameleon.steps import (
        AdaptiveMetropolisStep,
        EllipticalSliceStep,
        FastKameleonStep,
        KameleonStep,
        LatentGPStep,
        MALAStep,
        MultilevelStep,
        ParallelTemperingStep,
        PCAKameleonStep,
        RiemannianHMCStep,
        SurrogateHMCStep,
    )
    from pymc_kameleon.steps.kameleon import register, unregister
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
    "MultilevelStep",
    "PCAKameleonStep",
    "ParallelTemperingStep",
    "RiemannianHMCStep",
    "SurrogateHMCStep",
    "black_box",
    "compare_evidence",
    "diagnostics",
    "dispersed_starts",
    "distributed",
    "kernels",
    "latent_gp",
    "log_evidence",
    "plots",
    "pseudo_marginal",
    "random_features",
    "register",
    "surrogate_posterior",
    "targets",
    "unregister",
]

_WHERE = {
    "EvaluationStore": "store",
    "GPSurrogate": "surrogate",
    "black_box": "model.black_box",
    "compare_evidence": "evidence",
    "dispersed_starts": "model.initial_points",
    "log_evidence": "evidence",
    "random_features": "kernels",
    "register": "steps.kameleon",
    "surrogate_posterior": "approximate.surrogate_posterior",
    "unregister": "steps.kameleon",
} | {name: "steps" for name in __all__ if name.endswith("Step")}


def __getattr__(name):
    """Import a public name when it is first used: Numba and SciPy take half a second."""
    if name == "surrogate_targets":
        raise AttributeError(
            f"{__name__}.{name} is benchmarks/simulators.py of the repository now: copy the models "
            "that you need."
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WHERE:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
