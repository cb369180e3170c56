"""Gaussian processes of the log density, and the two-stage acceptance that they serve."""

from pymc_kameleon.surrogate.gp_surrogate import FittedSurrogate, GPSurrogate

__all__ = ["FittedSurrogate", "GPSurrogate"]
