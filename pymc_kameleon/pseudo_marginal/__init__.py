"""Unbiased estimates of a likelihood as terms of a PyMC model, for pseudo-marginal sampling."""

from pymc_kameleon.model.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.pseudo_marginal.gp_classification import (
    GPClassificationEstimator,
    gp_classification_loglikelihood,
)
from pymc_kameleon.pseudo_marginal.particle_filter import (
    BootstrapFilter,
    particle_filter_loglikelihood,
)

__all__ = [
    "BootstrapFilter",
    "GPClassificationEstimator",
    "estimated_loglikelihood",
    "gp_classification_loglikelihood",
    "particle_filter_loglikelihood",
]
