"""Models with a latent Gaussian process and a likelihood that factorises over its values.

Approximations and log marginal likelihood of a PyMC model; the steps that sample such models,
`LatentGPStep`, `EllipticalSliceStep` and `RiemannianHMCStep`, are with the other steps.
"""

from typing import Any

from pymc_kameleon.latent_gp.gaussian_approximations import GaussianApproximation
from pymc_kameleon.latent_gp.interface import (
    expectation_propagation,
    laplace,
    log_marginal_likelihood,
)
from pymc_kameleon.latent_gp.latent_evidence import MarginalLikelihood
from pymc_kameleon.validation import warn_of_old_name

__all__ = [
    "GaussianApproximation",
    "MarginalLikelihood",
    "expectation_propagation",
    "laplace",
    "log_marginal_likelihood",
]

_OLD_NAMES = {"Evidence": "MarginalLikelihood", "log_evidence": "log_marginal_likelihood"}


def __getattr__(name: str) -> Any:
    """Return what had the name `name` in earlier versions, with a warning."""
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _OLD_NAMES[name]
    warn_of_old_name(f"pymc_kameleon.latent_gp.{name}", f"pymc_kameleon.latent_gp.{new}")
    return globals()[new]
