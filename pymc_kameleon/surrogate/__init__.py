"""Gaussian processes of the log-likelihood, and the two-stage acceptance that they serve."""

from pymc_kameleon.surrogate.fitted import FittedSurrogate
from pymc_kameleon.surrogate.surrogate import GPSurrogate

__all__ = ["FittedSurrogate", "GPSurrogate"]
