"""Unbiased estimates of a likelihood as terms of a PyMC model, for pseudo-marginal sampling."""

from pymc_kameleon.pseudo_marginal.estimated_loglikelihood import estimated_loglikelihood

__all__ = ["estimated_loglikelihood"]
