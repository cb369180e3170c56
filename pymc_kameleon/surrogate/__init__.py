"""Gaussian processes of the log-likelihood, and the two-stage acceptance that they serve."""

from pymc_kameleon.surrogate.configuration import GPSurrogate
from pymc_kameleon.surrogate.fitted import FittedSurrogate

__all__ = ["FittedSurrogate", "GPSurrogate"]
