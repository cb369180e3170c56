"""Unbiased estimates of a likelihood as terms of a PyMC model, for pseudo-marginal sampling."""

from pymc_kameleon.pseudo_marginal.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.pseudo_marginal.gp_classification import gp_classification_loglikelihood

__all__ = ["estimated_loglikelihood", "gp_classification_loglikelihood"]
