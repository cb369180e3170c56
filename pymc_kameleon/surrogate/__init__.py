"""Gaussian processes of the log-likelihood, and the two-stage acceptance that they serve."""

from pymc_kameleon.surrogate.surrogate import FittedSurrogate, GPSurrogate

__all__ = ["FittedSurrogate", "GPSurrogate"]
