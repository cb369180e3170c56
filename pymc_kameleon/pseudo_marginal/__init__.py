"""Unbiased estimates of a likelihood as terms of a PyMC model, for pseudo-marginal sampling."""

from pymc_kameleon.pseudo_marginal.bootstrap_filter import BootstrapFilter
from pymc_kameleon.pseudo_marginal.estimated_loglikelihood import estimated_loglikelihood
from pymc_kameleon.pseudo_marginal.particle_filter import particle_filter_loglikelihood

__all__ = ["BootstrapFilter", "estimated_loglikelihood", "particle_filter_loglikelihood"]
