"""Models with a latent Gaussian process and a likelihood that factorises over its values.

Approximations and log evidence of a PyMC model; the steps that sample such models, `LatentGPStep`,
`EllipticalSliceStep` and `RiemannianHMCStep`, are with the other steps.
"""

from pymc_kameleon.latent_gp.gaussian_approximations import GaussianApproximation
from pymc_kameleon.latent_gp.interface import expectation_propagation, laplace, log_evidence
from pymc_kameleon.latent_gp.latent_evidence import Evidence

__all__ = [
    "Evidence",
    "GaussianApproximation",
    "expectation_propagation",
    "laplace",
    "log_evidence",
]
